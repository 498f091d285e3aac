"""Test what a change may break: `make quick` takes about two minutes if one chapter changed.

    python -m tools.quick          ruff, one parity test per model, changed tests and notebooks
    python -m tools.quick --list   say what that would be

The working tree is compared with the commit at which its branch left `main`. A test or a
notebook has changed if its code has, or that of any name that it uses (see tools/names.py). Of
a test that runs for every model, or for every function of the library, only those that changed
are run. What is skipped is printed; `make test` skips nothing.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat

from .names import DEFINITIONS, FUNCTIONS, Notebook, Project, strings
from .notebooks import ROOT, code_of

# one parity test per model: the first of these names, or those with these arguments
PARITY = {
    "tests/test_multihead.py::test_parity_in_float32": [],
    "tests/test_seq2seq.py::test_encoder_is_two_gru_cells_run_by_hand": [],
    "tests/test_transformer.py::test_parity_with_torch": [],
    "tests/test_gpt.py::test_logits_and_gradients_are_those_of_transformers": [],
    "tests/test_parity.py::test_outputs_features_and_gradients": [
        *("vit-{}-False", "deit-{}-False", "tnt-{}-False", "swin-{}-False", "swinv2-{}-False")
    ],
    "tests/test_vit_variants.py::test_outputs_and_gradients_are_timms": [],
    "tests/test_mae.py::test_loss_prediction_mask_and_gradients_are_those_of_transformers": [],
    "tests/test_beit.py::test_outputs_and_gradients_are_timms": [],
    "tests/test_detr.py::test_outputs_are_transformers": [],
    "tests/test_panoptic.py::test_masks_are_those_of_transformers": [],
    "tests/test_autoformer.py::test_outputs_are_those_of_the_authors_class": [],
    "tests/test_spatial.py::test_gates_are_timms": [],
}
# files whose tests run for functions of the library: of those only, whose code has changed
FOR_EACH_FUNCTION = ("tests/test_arguments.py", "tests/test_world.py")
MANY = 300  # test functions, for which several processes are faster than one
RUN_CELLS = "run_cells"  # of benchmarks/chapter.py, which runs cells of a page
SELECTION = "ATTNLIB_QUICK"  # the environment variable through which pytest is told


# --- which tests and notebooks have changed ---------------------------------------------------


def git(*command):
    """Return what git says; None where it fails, as in a copy that is no repository."""
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def base():
    """Return the commit with which the working tree is compared, None without a repository."""
    for main in ("origin/main", "main"):
        found = git("merge-base", "HEAD", main)
        if found:
            return found
    return git("rev-parse", "HEAD")


def search_path(root):
    """Return the folders from which the tests import, as pyproject.toml has them."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return [root / folder for folder in settings["tool"]["pytest"]["ini_options"]["pythonpath"]]


def parts_of_tests(project, root):
    """Return {node id: the parts of a test and of its fixtures}."""
    found = {}
    conftest = project.module("conftest")
    for path in sorted((root / "tests").rglob("test_*.py")):
        module = project.module(path.stem)
        around = [part for part in module.parts if "autouse" in part.text]
        around += module.binding("pytestmark")
        for part in module.parts:
            if isinstance(part.node, DEFINITIONS) and part.node.name.lower().startswith("test"):
                name = f"{path.relative_to(root).as_posix()}::{part.node.name}"
                found[name] = with_fixtures([part, *around], [module, conftest])
    return found


def with_fixtures(parts, modules):
    """Return parts and the fixtures that their arguments name, transitively."""
    found = []
    todo = list(parts)
    while todo:
        part = todo.pop()
        found.append(part)
        if not isinstance(part.node, FUNCTIONS):
            continue
        for argument in part.node.args.args:
            for module in modules:
                fixtures = [part for part in module.binding(argument.arg) if part not in found]
                todo += fixtures
                if fixtures:
                    break
    return found


def texts_behind(project, parts, root, cells):
    """Return all code that some parts depend on, as a set of texts.

    Cells of pages that `run_cells` runs belong to it; `cells` keeps those read before.
    """
    counted, meanings = project.closure(parts)
    found = {part.text for part in counted} | meanings
    for part in counted:
        if RUN_CELLS in part.uses:
            if part not in cells:
                cells[part] = page_code(root, strings(part.node))
            found |= cells[part]
    return found


def page_code(root, names):
    """Return the code of the named cells of the named pages, or of all if no cell is named."""
    found = set()
    for path in sorted((root / "nbs").glob("[0-9]*.ipynb")):
        if path.stem in names:
            code = {}
            for cell in nbformat.read(path, 4).cells:
                if cell.cell_type == "code":
                    code[cell.id] = code_of(cell)
            found |= {code[name] for name in names & code.keys()} or set(code.values())
    return found


def read_notebook(path, texts):
    """Return the code of a notebook; `texts` keeps those that were read before."""
    text = path.read_text(encoding="utf-8")
    if text not in texts:
        texts[text] = Notebook()
        for cell in nbformat.reads(text, 4).cells:
            if cell.cell_type == "code":
                texts[text].add(code_of(cell))
    return texts[text]


def definitions(project, root):
    """Return {"vit.Attention": its parts} for the functions and classes of the library."""
    found = {}
    for path in sorted((root / "attnlib").glob("[a-z]*.py")):
        for part in project.module(f"attnlib.{path.stem}").parts:
            if part.is_definition:
                found[f"{path.stem}.{part.node.name}"] = [part]
    return found


def codes(root, texts):
    """Return the code behind each test, notebook, word that names models, and function."""
    project = Project(search_path(root), texts=texts)
    cells = {}
    tests = {}
    for name, parts in parts_of_tests(project, root).items():
        tests[name] = texts_behind(project, parts, root, cells)
    pages = {}
    for path in sorted((root / "nbs").glob("[0-9]*.ipynb")):
        pages[path.stem] = texts_behind(project, read_notebook(path, texts).parts, root, cells)
    models = {}
    for part, words in project.registering("attnlib"):
        for word in words:
            models.setdefault(word, set()).update(texts_behind(project, [part], root, cells))
    functions = {}
    for name, parts in definitions(project, root).items():
        functions[name] = texts_behind(project, parts, root, cells)
    return tests, pages, models, functions


def changes(before, now):
    """Return {name: the texts that came or went}, for the names whose code has changed."""
    found = {}
    for name, texts in now.items():
        changed = texts ^ before.get(name, set())
        if changed:
            found[name] = changed
    return found


def selection(before, now):
    """Return what to run.

    Returns
    -------
    dict
        `tests`: {node id: names of what changed, or None for all that the test runs for};
        `names`: all words that name models, and all functions and classes of the library;
        `notebooks`: their names.
    """
    models = changes(before[2], now[2])
    functions = changes(before[3], now[3])
    chosen = {}
    for name, changed in changes(before[0], now[0]).items():
        named = functions if name.startswith(FOR_EACH_FUNCTION) else models
        only_named = changed <= set().union(*named.values())
        chosen[name] = sorted(named) if only_named else None
    return {
        "tests": chosen,
        "names": sorted(now[2] | now[3]),
        "notebooks": sorted(changes(before[1], now[1])),
    }


# --- what pytest is told ----------------------------------------------------------------------


def is_parity(nodeid, seen):
    """True for a parity test that always runs; `seen` are the names of those before it."""
    name, _, arguments = nodeid.removesuffix("]").partition("[")
    if name not in PARITY:
        return False
    if PARITY[name]:
        return arguments in PARITY[name]
    return name not in seen


def names_in(arguments, known):
    """Return the models and functions that the arguments of a test name.

    Such as "swin" in `swin_tiny-True`, and "swin.SwinBlock" in `swin.SwinBlock, 2-dim`.
    """
    found = set()
    for argument in arguments.split("-"):
        for name in (argument.partition(",")[0], argument.partition("_")[0]):
            if name in known:
                found.add(name)
                break
    return found


def is_changed(nodeid, chosen):
    """True for a test that was chosen, with these arguments."""
    name, _, arguments = nodeid.removesuffix("]").partition("[")
    name = "::".join(name.split("::")[:2])  # of a class, if the test is in one
    if name not in chosen["tests"]:
        return False
    changed = chosen["tests"][name]
    named = names_in(arguments, set(chosen["names"]))
    return changed is None or not named or not named.isdisjoint(changed)


def pytest_collection_modifyitems(config, items):
    """Keep the chosen tests; pytest calls this because it is told `-p tools.quick`."""
    chosen = json.loads(Path(os.environ[SELECTION]).read_text())
    kept = []
    left = []
    seen = set()
    for item in items:
        wanted = is_parity(item.nodeid, seen) or is_changed(item.nodeid, chosen)
        (kept if wanted else left).append(item)
        if wanted:
            seen.add(item.nodeid.partition("[")[0])
    config.hook.pytest_deselected(items=left)
    items[:] = kept


# --- running ----------------------------------------------------------------------------------


def run(*command, **environment):
    """Run a command, print what it says in one piece; True if it did what it should."""
    together = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ, **environment), **together)
    print(done.stdout, end="", flush=True)
    return done.returncode == 0


def longest_first(names):
    """Return names of notebooks, those with most cells first, so that none is left alone."""
    cells = {}
    for name in names:
        nb = nbformat.read(ROOT / "nbs" / f"{name}.ipynb", 4)
        cells[name] = sum(cell.cell_type == "code" for cell in nb.cells)
    return sorted(names, key=cells.get, reverse=True)


def skipped(chosen, now):
    """Return lines that say what is not run."""
    tests = set(now[0]) - set(chosen["tests"]) - set(PARITY)
    pages = set(now[1]) - set(chosen["notebooks"])
    return [
        f"skipped: {len(tests)} of {len(now[0])} test functions, whose code is unchanged",
        f"skipped: {len(pages)} of {len(now[1])} notebooks, whose code is unchanged",
        "skipped: the book in a browser, slow tests, what depends on records and texts, and "
        "the wheel, in whose place notebooks import the checkout",
        "`make test` runs all of it, and `pytest -m slow` the slow tests",
    ]


def choose(folder):
    """Return what to run, and the present code, after the former one was put into a folder."""
    commit = base()
    if commit is None:
        sys.exit("no git repository to compare with: run `make test`")
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    print(f"compared with {commit[:7]}", flush=True)
    texts = {}
    now = codes(ROOT, texts)
    return selection(codes(folder, texts), now), now


def test_commands(chosen, told):
    """Return the commands that run the chosen tests and notebooks, and their environments."""
    python = [sys.executable, "-m"]
    files = sorted({name.partition("::")[0] for name in [*chosen["tests"], *PARITY]})
    # each process imports all files, which for a few tests takes longer than the tests
    workers = "auto" if len(chosen["tests"]) > MANY else "0"
    environment = {"OMP_NUM_THREADS": "1", SELECTION: str(told)}
    commands = [([*python, "pytest", "-n", workers, "-p", "tools.quick", *files], environment)]
    if chosen["notebooks"]:
        names = longest_first(chosen["notebooks"])
        commands.append(([*python, "tools.notebooks", "test", "--no-wheel", *names], {}))
    return commands


def main():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--list", action="store_true", help="only say what would run")
    arguments = parser.parse_args()
    gc.disable()  # the trees of all code are kept, and searching them again takes long
    python = [sys.executable, "-m"]
    rules = (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["tools.notebooks", "check"],
    )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        done = []
        if not arguments.list:
            done += [pool.submit(run, *python, *rule) for rule in rules]
        chosen, now = choose(Path(folder))
        for name in chosen["tests"]:
            print(f"changed: {name}")
        for name in chosen["notebooks"]:
            print(f"changed: nbs/{name}.ipynb")
        print("\n".join(skipped(chosen, now)), flush=True)
        if arguments.list:
            return
        told = Path(folder) / "selection.json"
        told.write_text(json.dumps(chosen))
        for command, environment in test_commands(chosen, told):
            done.append(pool.submit(run, *command, **environment))
        good = [job.result() for job in done]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
