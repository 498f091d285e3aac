"""Run, clean and check the notebooks. `make run` and `make test` call this file.

    python tools/notebooks.py run [NAME ...]     execute in place, clean, number, stamp the figures
    python tools/notebooks.py check              clean? numbered? figures as old as their code?
    python tools/notebooks.py test [NAME ...]    execute a copy of each beside the built wheel, compare outputs

A stored figure is *stamped*: the notebook's metadata holds, for each figure, a fingerprint of the code that drew it
(every code cell up to it and the library modules the notebook imports, comments and docstrings left out) and of the
picture itself. `check` recomputes both. Change the code and forget `make run`, and the check names the figure.
"""
import argparse
import ast
import base64
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"


def notebooks(names=()):
    found = sorted(NBS.glob("[0-9]*.ipynb"))
    wanted = [path for path in found if not names or path.stem in names]
    unknown = set(names) - {path.stem for path in found}
    if unknown:
        sys.exit(f"no notebook named {', '.join(sorted(unknown))}; there are: {', '.join(p.stem for p in found)}")
    return wanted


# --- the form in which a notebook is committed -------------------------------------------------------------------


def canonical(nb):
    """What `nbdev-clean` leaves, with the executed cells numbered again: nbval refuses outputs without a number."""
    from fastcore.nbio import dict2nb
    from nbdev.clean import clean_nb
    from nbdev.config import get_config

    config = get_config(ROOT)
    cleaned = dict2nb(nb)
    clean_nb(
        cleaned,
        allowed_metadata_keys=config.allowed_metadata_keys,
        allowed_cell_metadata_keys=config.allowed_cell_metadata_keys,
    )
    nb = nbformat.from_dict(plain(cleaned))
    number = 0
    for cell in nb.cells:
        if cell.cell_type == "code" and code_of(cell).strip():
            number += 1
            cell.execution_count = number
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = number
    return nb


def plain(value):
    """fastcore's notebook objects as plain dictionaries, without the bookkeeping that it keeps on cells."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not key.endswith("_")}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def write(nb, path):
    path.write_text(nbformat.writes(nb, indent=1) + "\n", encoding="utf-8")


# --- figures are held to their code ------------------------------------------------------------------------------


def code_of(cell):
    """A cell's code without nbdev's directives."""
    return "\n".join(line for line in cell.source.splitlines() if not line.startswith("#|"))


def without_words(code):
    """Code without comments, docstrings, magics and blank lines: rewording a sentence makes no figure old."""
    code = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", code)
    lines = code.splitlines()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = ""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def imported_modules(code, seen):
    """The library's modules that some code imports, and those that these import, in `seen`."""
    for name in re.findall(r"(?m)^\s*from (?:attnlib)?\.(\w+) import", code):
        path = ROOT / "attnlib" / f"{name}.py"
        if name not in seen and path.exists():
            seen[name] = path.read_text(encoding="utf-8")
            imported_modules(seen[name], seen)
    return seen


def fingerprint(*texts):
    return hashlib.sha256("\n\n".join(texts).encode()).hexdigest()[:16]


def stamps(nb):
    """{cell id: {"code": …, "image": …}} for every cell with a stored picture."""
    code, found = [], {}
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        code.append(without_words(code_of(cell)))
        images = [o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})]
        if images:
            library = imported_modules("\n".join(code), {})
            modules = [without_words(library[name]) for name in sorted(library)]
            pictures = [hashlib.sha256(base64.b64decode(image)).hexdigest() for image in images]
            found[cell.id] = {"code": fingerprint(*code, *modules), "image": fingerprint(*pictures)}
    return found


def check():
    """The complaints about the committed notebooks, a line each."""
    complaints = []
    for path in notebooks():
        nb, where = nbformat.read(path, 4), path.relative_to(ROOT)
        again = f"run `make run NB={path.stem}` and look at it"
        if nbformat.writes(canonical(nb), indent=1) + "\n" != path.read_text(encoding="utf-8"):
            complaints.append(f"{where}: not as `make run` leaves a notebook (cleaned and numbered); {again}")
        stored, now = nb.metadata.get("figures", {}), stamps(nb)
        for cell in sorted(set(stored) | set(now)):
            if cell not in now or cell not in stored:
                complaints.append(f"{where}: the figure of cell {cell!r} came or went without a run; {again}")
            elif stored[cell]["image"] != now[cell]["image"]:
                complaints.append(f"{where}: the figure of cell {cell!r} is not the one that its code drew; {again}")
            elif stored[cell]["code"] != now[cell]["code"]:
                complaints.append(f"{where}: the figure of cell {cell!r} is older than the code behind it; {again}")
    return complaints


# --- running -----------------------------------------------------------------------------------------------------


def startup(folder):
    """An IPython folder whose kernels can import torchvision (see tools/torchvision_ops.py); it names nothing."""
    target = Path(folder) / "ipython" / "profile_default" / "startup"
    target.mkdir(parents=True)
    path = f'__import__("sys").path.append({str(ROOT / "tools")!r})'
    import_it = '__import__("torchvision_ops")\n__import__("sys").path.pop()\n'
    (target / "first.py").write_text(f"{path}\n{import_it}", encoding="utf-8")
    return target.parent.parent


def run(paths):
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = str(startup(folder))
        for path in paths:
            began = time.perf_counter()
            nb = nbformat.read(path, 4)
            where = {"metadata": {"path": str(NBS)}}
            NotebookClient(nb, timeout=900, kernel_name="python3", coalesce_streams=True, resources=where).execute()
            nb.metadata["figures"] = stamps(nb)
            write(canonical(nb), path)
            seconds = time.perf_counter() - began
            print(f"{path.name}: {seconds:.0f} s, {len(nb.metadata['figures'])} figures", flush=True)


def test(paths):
    """Strict nbval on a copy of each notebook, alone in an empty folder, with the wheel in place of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        site, dist = folder / "site", folder / "dist"
        quiet = dict(check=True, stdout=subprocess.DEVNULL)
        ipython = startup(folder)
        source = folder / "source"  # setuptools leaves a build folder behind: not in the checkout
        source.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        shutil.copytree(ROOT / "benchmarks" / "results", source / "benchmarks" / "results")
        shutil.copytree(ROOT / "attnlib", source / "attnlib", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", dist, source], **quiet)
        wheel = next(dist.glob("*.whl"))
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel], check=True)
        env = dict(os.environ, PYTHONPATH=str(site), ATTNLIB_SITE=str(site), IPYTHONDIR=str(ipython))
        origin = subprocess.run([sys.executable, "-c", "import attnlib; print(attnlib.__file__)"], cwd=folder, env=env,
                                check=True, capture_output=True, text=True).stdout
        assert origin.startswith(str(site)), f"the wheel is hidden by {origin}"
        command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-cell-timeout=600", "--tb=short"]
        env["OMP_NUM_THREADS"] = "1"  # one core for each of the notebooks that run side by side

        def alone(path):
            (folder / path.stem).mkdir()
            shutil.copy(path, folder / path.stem)
            began = time.perf_counter()
            done = subprocess.run([*command, "-p", "no:cacheprovider", path.name], cwd=folder / path.stem, env=env,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            print(f"{done.stdout}{path.name}: {time.perf_counter() - began:.0f} s", flush=True)
            return [path.name] if done.returncode else []

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return sum(pool.map(alone, paths), [])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "check", "test"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks without .ipynb; all by default")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(notebooks(arguments.names))
    elif arguments.command == "test":
        failed = test(notebooks(arguments.names))
        if failed:
            sys.exit(f"not as stored: {', '.join(failed)}")
    else:
        complaints = check()
        if complaints:
            sys.exit("\n".join(complaints))
        print("notebooks: clean, numbered, figures as old as their code")


if __name__ == "__main__":
    main()
