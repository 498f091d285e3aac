"""Run, clean and check the notebooks. `make run` and `make test` call this file.

    python -m tools.notebooks run [NAME ...]   execute in place, clean, number, stamp figures
    python -m tools.notebooks check            clean? numbered? figures as old as their code?
    python -m tools.notebooks test [NAME ...]  execute copies beside the built wheel, compare;
                                               with --no-wheel beside the checkout

A stored figure is *stamped*: the notebook's metadata holds, for each figure, a fingerprint of
the code that drew it and of the picture itself. The code is what ran before it and what the
cell depends on by names, in the notebook, the library, and the tools (see tools/names.py),
without comments and docstrings. `check` recomputes both. Change the code and forget `make run`,
and the check names the figure.
"""

import argparse
import base64
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat

from .names import Notebook, Project

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"


def notebooks(names=()):
    """The paths of some notebooks, in the order of the names, or of all."""
    found = {path.stem: path for path in sorted(NBS.glob("[0-9]*.ipynb"))}
    unknown = set(names) - set(found)
    if unknown:
        known = ", ".join(found)
        sys.exit(f"no notebook named {', '.join(sorted(unknown))}; there are: {known}")
    return [found[name] for name in names or found]


# --- the form in which a notebook is committed ------------------------------------------------


def canonical(nb):
    """What `nbdev-clean` leaves, with the executed cells numbered again.

    nbval refuses outputs without a number.
    """
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
    """fastcore's notebook objects as plain dictionaries, without its bookkeeping."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not key.endswith("_")}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def write(nb, path):
    path.write_text(nbformat.writes(nb, indent=1) + "\n", encoding="utf-8")


# --- figures are held to their code -----------------------------------------------------------


def code_of(cell):
    """A cell's code without nbdev's directives."""
    return "\n".join(line for line in cell.source.splitlines() if not line.startswith("#|"))


def fingerprint(*texts):
    return hashlib.sha256("\n\n".join(texts).encode()).hexdigest()[:16]


def library():
    """The modules whose code a figure may depend on."""
    return Project([ROOT], packages=["attnlib", "tools", "benchmarks"])


def stamps(nb, project=None):
    """{cell id: {"code": …, "image": …}} for every cell with a stored picture.

    A project may be shared by several notebooks; its modules are then read once.
    """
    project = project or library()
    notebook = Notebook()
    found = {}
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        notebook.add(code_of(cell))
        images = [o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})]
        if images:
            ran = notebook.ran()
            counted, meanings = project.closure(ran)
            named = {part.text for part in counted if part not in ran}
            pictures = [hashlib.sha256(base64.b64decode(image)).hexdigest() for image in images]
            found[cell.id] = {
                "code": fingerprint(
                    *[part.text for part in ran], *sorted(named), *sorted(meanings)
                ),
                "image": fingerprint(*pictures),
            }
    return found


def check():
    """The complaints about the committed notebooks, a line each."""
    complaints = []
    project = library()
    for path in notebooks():
        nb, found = nbformat.read(path, 4), []
        if nbformat.writes(canonical(nb), indent=1) + "\n" != path.read_text(encoding="utf-8"):
            found.append("not as `make run` leaves a notebook (cleaned and numbered)")
        stored, now = nb.metadata.get("figures", {}), stamps(nb, project)
        for cell in sorted(set(stored) | set(now)):
            figure = f"the figure of cell {cell!r}"
            if cell not in now or cell not in stored:
                found.append(f"{figure} came or went without a run")
            elif stored[cell]["image"] != now[cell]["image"]:
                found.append(f"{figure} is not the one that its code drew")
            elif stored[cell]["code"] != now[cell]["code"]:
                found.append(f"{figure} is older than the code behind it")
        where, again = path.relative_to(ROOT), f"run `make run NB={path.stem}` and look at it"
        complaints += [f"{where}: {what}; {again}" for what in found]
    return complaints


# --- running ---------------------------------------------------------------------------


def startup(folder):
    """The environment of kernels that can import torchvision: see tools/torchvision_ops.py."""
    profile = Path(folder) / "ipython" / "profile_default" / "startup"
    profile.mkdir(parents=True)
    (profile / "first.py").write_text('__import__("torchvision_ops")\n')  # which binds no name
    library = Path(folder) / "first"
    library.mkdir()
    shutil.copy(ROOT / "tools" / "torchvision_ops.py", library)
    search = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(library)]))
    return {"IPYTHONDIR": str(Path(folder) / "ipython"), "PYTHONPATH": search}


def side_by_side(function, items, jobs):
    """The results of a function, in the order of the items, some at the same time."""
    if jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core each
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(function, items))


def execute(path):
    """Execute a notebook in place, clean, number and stamp it; its name, if that fails."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    began = time.perf_counter()
    nb = nbformat.read(path, 4)
    options = dict(timeout=900, kernel_name="python3", coalesce_streams=True)
    try:
        NotebookClient(nb, **options, resources={"metadata": {"path": str(NBS)}}).execute()
    except (CellExecutionError, CellTimeoutError) as problem:
        print(f"{path.name}: {problem}", flush=True)
        return path.name
    nb.metadata["figures"] = stamps(nb)
    write(canonical(nb), path)
    seconds = time.perf_counter() - began
    print(f"{path.name}: {seconds:.0f} s, {len(nb.metadata['figures'])} figures", flush=True)


def run(paths, jobs):
    """The names of the notebooks that could not be executed."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(startup(folder))
        return list(filter(None, side_by_side(execute, paths, min(jobs, len(paths)))))


def install(folder):
    """Build the wheel from a copy of the sources; the folder in which it is installed."""
    site, dist, source = folder / "site", folder / "dist", folder / "source"
    source.mkdir()  # setuptools leaves a build folder behind: not in the checkout
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "benchmarks" / "results", source / "benchmarks" / "results")
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "attnlib", source / "attnlib", ignore=without)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", dist, source]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site]
    subprocess.run([*pip, next(dist.glob("*.whl"))], check=True)
    return site


def told(title, *commands, **options):
    """Run commands until one fails, print what they said in one piece; the title, if so."""
    began, failed = time.perf_counter(), None
    together = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for command in commands:
        done = subprocess.run(command, **together, **options)
        print(done.stdout, end="")
        if done.returncode:
            failed = title
            break
    print(f"{title}: {time.perf_counter() - began:.0f} s", flush=True)
    return failed


def book():
    """Build the book, strictly, and read its pages in a browser."""
    pages = ROOT / "_build" / "check"
    build = ["build", ".", "-q", "-W", "-n", "--keep-going", "--all", "--path-output", pages]
    return told(
        "the book",
        [Path(sys.executable).with_name("jupyter-book"), *build],
        [sys.executable, "-m", "pytest", "tests/test_browser.py", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=dict(os.environ, ATTNLIB_BOOK=str(pages / "_build" / "html")),
    )


def test(paths, jobs, with_book, wheel=True):
    """Strict nbval on a copy of each notebook, alone in an empty folder, beside the wheel.

    The wheel takes the place of the checkout; without it the notebooks import the checkout,
    which saves the time of building. Beside the notebooks the book is built and read, if that
    is asked for. Returned are the names of what failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        site = install(folder) if wheel else ROOT
        env = dict(os.environ, ATTNLIB_SITE=str(site), OMP_NUM_THREADS="1", **startup(folder))
        env["PYTHONPATH"] = os.pathsep.join([str(site), env["PYTHONPATH"]])
        ask = [sys.executable, "-c", "import attnlib; print(attnlib.__file__)"]
        found = subprocess.run(
            ask, cwd=folder, env=env, check=True, capture_output=True, text=True
        )
        assert found.stdout.startswith(str(site)), f"the wheel is hidden by {found.stdout}"
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]

        def job(path):
            if path is None:
                return book()
            (folder / path.stem).mkdir()
            shutil.copy(path, folder / path.stem)
            command = [*pytest, "--nbval", "--nbval-cell-timeout=600", path.name]
            return told(path.name, command, cwd=folder / path.stem, env=env)

        return list(filter(None, side_by_side(job, [None] * with_book + paths, jobs)))


def main():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("command", choices=["run", "check", "test"])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="notebooks without .ipynb; all by default"
    )
    parser.add_argument(
        "--jobs", type=int, help="notebooks at the same time; run: 2, test: one for each core"
    )
    parser.add_argument(
        "--book", action="store_true", help="test: build and read the book, too"
    )
    parser.add_argument(
        "--no-wheel", action="store_true", help="test: beside the checkout, which is faster"
    )
    arguments = parser.parse_intermixed_args()
    if arguments.command == "run":
        failed = run(notebooks(arguments.names), arguments.jobs or min(2, os.cpu_count()))
        if failed:
            sys.exit(f"not executed: {', '.join(failed)}")
    elif arguments.command == "test":
        jobs = arguments.jobs or os.cpu_count()
        paths = notebooks(arguments.names)
        failed = test(paths, jobs, arguments.book, wheel=not arguments.no_wheel)
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
    else:
        gc.disable()  # the trees of all code are kept, and searching them again takes long
        complaints = check()
        if complaints:
            sys.exit("\n".join(complaints))
        print("notebooks: clean, numbered, figures as old as their code")


if __name__ == "__main__":
    main()
