"""A fingerprint covers the names that a cell uses, transitively, and nothing else."""

import nbformat
import pytest

from tools import notebooks
from tools.names import Module, Project, parsable, used_names

PLOT = '''
"""Figures."""
from .color import BLUE, GREEN
from . import shapes
import math

STYLE = {"size": 3}


def show(figure):
    """Display a figure."""
    return frame(figure, STYLE)


def frame(figure, style):
    return shapes.box(figure, style, BLUE)


def unrelated():
    return math.pi
'''
COLOR = """
BLUE = "#00f"
GREEN = "#0f0"
"""
SHAPES = """
from functools import cache

class Box:
    def __init__(self, x):
        self.x = x

    def area(self):
        return self.x * 2


class Square:
    side = 4


KINDS = (Square, Box)


@cache
def box(figure, style, color):  # around a figure
    if isinstance(figure, KINDS) or type(figure) is Square:
        return figure
    return Box(figure).area()


if __name__ == "__main__":
    print(Square.side)


class Circle:
    pass
"""
CELLS = [
    "from attnlib.plot import show\nimport torch.nn.functional as F",
    "def helper(x):\n    return deeper(x)\n\ndef deeper(x):\n    return F.relu(x)",
    "def idle(x):\n    return x",
    "scale = 2.0",
    "show(helper(scale))",
]


@pytest.fixture
def stamp(tmp_path, monkeypatch):
    """A function that stamps the last cell, after changes {file or number of a cell: …}."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)

    def stamp(changes=None, cells=CELLS, **modules):
        sources = {"__init__": "", "plot": PLOT, "color": COLOR, "shapes": SHAPES, **modules}
        code = dict(enumerate(cells))
        for place, (old, new) in (changes or {}).items():
            texts = sources if place in sources else code
            assert texts[place].count(old) == 1
            texts[place] = texts[place].replace(old, new)
        (tmp_path / "attnlib").mkdir(exist_ok=True)
        for name, source in sources.items():
            (tmp_path / "attnlib" / f"{name}.py").write_text(source)
        nb = nbformat.v4.new_notebook()
        nb.cells = [nbformat.v4.new_code_cell(source) for source in code.values()]
        picture = nbformat.v4.new_output("display_data", {"image/png": "aaaa"})
        nb.cells[-1].outputs = [picture]
        (found,) = notebooks.stamps(nb).values()
        return found["code"]

    return stamp


LEAVES = {
    "a class that is only compared with": {"shapes": ("side = 4", "side = 5")},
    "a docstring": {"plot": ("Display a figure.", "Show a figure.")},
    "the docstring of a module": {"plot": ('"""Figures."""', '"""Pictures."""')},
    "a comment": {"shapes": ("  # around a figure", "")},
    "a comment in a cell": {3: ("2.0", "2.0  # twice")},
    "another function": {"plot": ("math.pi", "math.tau")},
    "another class": {"shapes": ("class Circle:\n    pass", "class Disc:\n    x = 1")},
    "another constant": {"color": ("#0f0", "#0a0")},
    "another import": {"plot": ("import math", "import cmath, math")},
    "another function of a cell": {2: ("return x", "return 2 * x")},
}
CHANGES = {
    "a table of classes that is only compared with": {"shapes": ("Square, Box", "Box, Square")},
    "a function": {"plot": ("frame(figure, STYLE)", "frame(figure, dict(STYLE))")},
    "a helper three calls away": {"shapes": ("Box(figure).area()", "-Box(figure).area()")},
    "a method": {"shapes": ("self.x * 2", "self.x * 3")},
    "a constant": {"plot": ('"size": 3', '"size": 4')},
    "a constant of another module": {"color": ("#00f", "#00e")},
    "a decorator": {"shapes": ("@cache\n", "")},
    "a helper in a cell": {1: ("return deeper(x)", "return -deeper(x)")},
    "a helper of a helper": {1: ("F.relu(x)", "F.gelu(x)")},
    "what a name of another package means": {0: ("torch.nn.functional", "mylib.functional")},
    "what ran before": {3: ("2.0", "3.0")},
    "the cell itself": {4: ("scale", "scale + 1")},
}


@pytest.mark.parametrize("changes", LEAVES.values(), ids=LEAVES)
def test_what_a_figure_does_not_use_leaves_its_stamp(stamp, changes):
    assert stamp(changes) == stamp()


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_what_a_figure_uses_changes_its_stamp(stamp, changes):
    assert stamp(changes) != stamp()


def test_what_runs_with_a_used_module_counts(stamp):
    """A setting, a value in a table, and a function that its decorator registers."""
    for running in ("{}(1)", "BLUE[{}] = 1", "@register({})\ndef one():\n    pass"):
        added = {name: COLOR + running.format(name) + "\n" for name in ("a", "b")}
        assert stamp(color=added["a"]) != stamp(color=added["b"])
        assert stamp(idle=added["a"]) == stamp(idle=added["b"])  # control: nothing imports it


MODELS = """
MODELS = {}

def register_model(name, cls):
    MODELS[name] = cls

def create_model(name):
    return MODELS[name]()
"""
SWIN = """
from .models import register_model

class Swin:
    depth = 2

for size in ("tiny", "small"):
    name = f"swin_{size}"
    register_model(name, Swin)
"""


def test_a_model_counts_where_a_string_names_it(stamp):
    deeper = SWIN.replace("depth = 2", "depth = 3")
    for name, counts in (("swin_tiny", True), ("vit_tiny", False), ("tiny_swin", False)):
        cells = ["from attnlib.models import create_model", f"create_model('{name}')"]
        before = stamp(cells=cells, models=MODELS, swin=SWIN)
        assert (stamp(cells=cells, models=MODELS, swin=deeper) != before) == counts


def test_a_module_that_is_passed_on_counts_as_a_whole(stamp):
    other = {"shapes": ("pass", "x = 1")}
    cells = ["from attnlib import shapes", "getattr(shapes, 'Box')"]
    assert stamp(other, cells=cells) != stamp(cells=cells)
    cells[1] = "shapes.Box"
    assert stamp(other, cells=cells) == stamp(cells=cells)  # control: one name of it


@pytest.mark.parametrize(
    "code, names",
    [
        ("lambda x, *y: x + y + z", {"z"}),
        ("def f(x=a, *, b=b) -> c:\n    d = x\n    return d + e", {"a", "b", "e"}),
        ("def f():\n    global n\n    n = n + 1", {"n"}),
        ("def f():\n    x = 1\n    def g():\n        return x + y\n    return g", {"y"}),
        ("[x for x in x if x < y]", {"x", "y"}),
        (
            "isinstance(x, A) and type(y) in (B, C) and y < D",
            {"isinstance", "x", "type", "y", "D"},
        ),
        ("x: A = {B: f(), 'c': C}", {"f", "C"}),
        ("[row for rows in table for row in rows]", {"table"}),
        ("a.b.c(d[e].f)", {"a.b.c", "d", "e"}),
        ("class A(B):\n    @p\n    def f(self):\n        return self.x + y", {"B", "p", "y"}),
    ],
)
def test_names_that_code_reads_from_outside(code, names):
    (part,) = Module(code).parts
    assert used_names(part.node) - part.binds == names - part.binds
    assert names <= used_names(part.node)


def test_imports_lead_on_through_packages_and_functions(tmp_path):
    files = {
        "pack/__init__.py": "from .inner import one\n",
        "pack/inner.py": "from ..other import two as second\n\n\ndef one():\n    second()\n",
        "other.py": "def two():\n    from third import three\n    return three()\n",
        "third.py": "def three():\n    return 3\n",
    }
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code.replace("..other", "other"))
    for code in ("import pack\npack.one()", "import pack.inner\npack.inner.one()"):
        counted, meanings = Project([tmp_path]).closure(Module(code).parts)
        names = {name for part in counted for name in part.binds}
        assert names == {"one", "two", "three"} and meanings == {"second = two"}


def test_magics_are_no_python():
    assert parsable("%pip install x\nif a:\n    !ls") == "pass\nif a:\n    pass"
