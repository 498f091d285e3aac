"""`make quick` runs what a change may break, and not the rest."""

import ast
import shutil
from pathlib import Path

import nbformat
import pytest

from tools import quick

ROOT = Path(__file__).parent.parent
FILES = {
    "attnlib/__init__.py": "",
    "attnlib/models.py": (
        "MODELS = {}\n\n\ndef register_model(name, cls):\n    MODELS[name] = cls\n\n\n"
        "def create_model(name):\n    return MODELS[name]()\n"
    ),
    "attnlib/vit.py": (
        "from .models import register_model\n\n\nclass Vit:\n    depth = 2\n\n\n"
        "register_model('vit_tiny', Vit)\n"
    ),
    "attnlib/swin.py": (
        "from .models import register_model\n\n\nclass Swin:\n    depth = 2\n\n\n"
        "register_model('swin_tiny', Swin)\n"
    ),
    "attnlib/mask.py": "def causal():\n    return 1\n\n\ndef padding():\n    return 2\n",
    "tests/conftest.py": (
        "import pytest\nfrom attnlib.mask import padding\n\n\n"
        "@pytest.fixture\ndef mask():\n    return padding()\n"
    ),
    "tests/test_all.py": (
        "import pytest\nfrom attnlib.mask import causal\n"
        "from attnlib.models import create_model\n\n\n"
        "@pytest.mark.parametrize('name', ['vit_tiny', 'swin_tiny'])\n"
        "def test_models(name):\n    assert create_model(name)\n\n\n"
        "def test_causal():\n    assert causal() == 1\n\n\n"
        "def test_padding(mask):\n    assert mask == 2\n"
    ),
    "tests/test_arguments.py": (
        "import pytest\nfrom attnlib import mask\n\n\n"
        "ROWS = {'mask.causal': mask.causal, 'mask.padding': mask.padding}\n\n\n"
        "@pytest.mark.parametrize('name', ROWS)\n"
        "def test_rows(name):\n    assert ROWS[name]()\n"
    ),
}


@pytest.fixture
def selected(tmp_path):
    """A function that changes one file of a small project, and returns what is chosen."""

    def write(folder, files):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        shutil.copy(ROOT / "pyproject.toml", folder)
        nb = nbformat.v4.new_notebook()
        nb.cells = [nbformat.v4.new_code_cell("from attnlib.mask import causal\ncausal()")]
        (folder / "nbs").mkdir(exist_ok=True)
        nbformat.write(nb, folder / "nbs" / "10_small.ipynb")
        return folder

    def selected(name, old, new):
        texts = {}
        before = quick.codes(write(tmp_path / "before", FILES), texts)
        assert FILES[name].count(old) == 1
        changed = FILES | {name: FILES[name].replace(old, new)}
        now = quick.codes(write(tmp_path / "now", changed), texts)
        return quick.selection(before, now)

    return selected


def test_nothing_is_chosen_where_nothing_changed(selected):
    chosen = selected("attnlib/mask.py", "return 1", "return 1  # a comment")
    functions = ["mask.causal", "mask.padding", "models.create_model", "models.register_model"]
    names = [*functions, "swin", "swin.Swin", "vit", "vit.Vit"]
    assert chosen == {"tests": {}, "names": names, "notebooks": []}


def test_a_function_chooses_its_tests_and_notebooks(selected):
    chosen = selected("attnlib/mask.py", "return 1", "return 3")
    of_rows = {"tests/test_arguments.py::test_rows": ["mask.causal"]}
    assert chosen["tests"] == {"tests/test_all.py::test_causal": None} | of_rows
    assert chosen["notebooks"] == ["10_small"]


def test_a_cell_chooses_the_tests_that_run_it(tmp_path):
    def tests(code):
        files = {
            "benchmarks/small.py": (
                "from benchmarks.chapter import run_cells\n\n"
                "page = run_cells('10_small', 'one')\n"
            ),
            "tests/conftest.py": "",
            "tests/test_small.py": (
                "from benchmarks.small import page\n\n\ndef test_page():\n    assert page.f()\n"
            ),
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        nb = nbformat.v4.new_notebook()
        nb.cells = [nbformat.v4.new_code_cell(text, id=name) for name, text in code.items()]
        (tmp_path / "nbs").mkdir(exist_ok=True)
        nbformat.write(nb, tmp_path / "nbs" / "10_small.ipynb")
        return quick.codes(tmp_path, {})[0]["tests/test_small.py::test_page"]

    code = {"one": "def f():\n    return 1", "two": "x = 2"}
    assert tests(code) != tests(code | {"one": "def f():\n    return 3"})
    assert tests(code) == tests(code | {"two": "x = 3"})


def test_a_fixture_leads_to_what_it_uses(selected):
    chosen = selected("attnlib/mask.py", "return 2", "return 3")
    of_rows = {"tests/test_arguments.py::test_rows": ["mask.padding"]}
    assert chosen["tests"] == {"tests/test_all.py::test_padding": None} | of_rows
    assert chosen["notebooks"] == []


def test_of_a_test_for_every_model_only_those_that_changed_run(selected):
    chosen = selected("attnlib/swin.py", "depth = 2", "depth = 3")
    assert chosen["tests"] == {"tests/test_all.py::test_models": ["swin"]}
    name = "tests/test_all.py::test_models"
    assert quick.is_changed(f"{name}[swin_tiny]", chosen)
    assert not quick.is_changed(f"{name}[vit_tiny]", chosen)
    assert quick.is_changed(f"{name}[other]", chosen)  # names no model


def test_of_a_test_for_every_function_only_those_that_changed_run(selected):
    chosen = selected("attnlib/mask.py", "return 1", "return 3")
    name = "tests/test_arguments.py::test_rows"
    assert chosen["tests"][name] == ["mask.causal"]
    assert quick.is_changed(f"{name}[mask.causal-size]", chosen)
    assert quick.is_changed(f"{name}[mask.causal, 2-size]", chosen)
    assert not quick.is_changed(f"{name}[mask.padding-size]", chosen)


def test_a_changed_test_runs_for_every_model(selected):
    chosen = selected("tests/test_all.py", "assert create_model(name)", "create_model(name)")
    assert chosen["tests"] == {"tests/test_all.py::test_models": None}
    assert quick.is_changed("tests/test_all.py::test_models[vit_tiny]", chosen)


def test_parity_runs_once_for_each_model():
    name, other = "tests/test_mae.py", "tests/test_parity.py"
    first, *_ = [test for test in quick.PARITY if test.startswith(name)]
    assert quick.is_parity(f"{first}[a]", seen=set())
    assert not quick.is_parity(f"{first}[b]", seen={first})
    several, *_ = [test for test in quick.PARITY if test.startswith(other)]
    assert quick.is_parity(f"{several}[swin-{{}}-False]", seen={several})
    assert not quick.is_parity(f"{several}[swin-{{}}-True]", seen=set())


def test_every_parity_test_is_there():
    for test in quick.PARITY:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
