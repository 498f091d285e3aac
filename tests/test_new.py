"""`make new NB=56_name`: an empty chapter in its places, and tests that say what is open."""

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

import chapters
from tools import new, notebooks

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A small copy of the repository, with three chapters, on which the command works."""
    for folder in ("nbs", "attnlib", "tests"):
        (tmp_path / folder).mkdir()
    some = ("nbs/10_attention.ipynb", "nbs/54_efficient.ipynb", "nbs/93_models.ipynb")
    for name in ("pyproject.toml", "_toc.yml", "attnlib/__init__.py", *some):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "NBS", tmp_path / "nbs")
    monkeypatch.setattr(new, "ROOT", tmp_path)
    return tmp_path


def make(monkeypatch, name):
    monkeypatch.setattr(sys, "argv", ["new", name])
    new.main()


def test_a_chapter_is_made_with_all_its_places(copied, monkeypatch, capsys):
    make(monkeypatch, "59_example")
    *said, rest = capsys.readouterr().out.splitlines()
    assert said == ["nbs/59_example.ipynb", "_toc.yml", "tests/test_example.py"]
    assert rest.endswith("in _ext/ideas.yml")

    # the book has it, at the end of its part, and the first page, the README and the reference
    found = {caption: [x.page for x in some] for caption, some in chapters.parts(copied)}
    assert found["Part V: Cost"][-1] == "nbs/59_example"
    assert "{doc}`nbs/59_example`" in chapters.first_page(copied)
    assert "(nbs/59_example.ipynb) | `example` |" in chapters.readme(copied)
    assert "attnlib.example" in chapters.library(copied)

    # it is as `make run` leaves a notebook, and exports a module
    path = copied / "nbs" / "59_example.ipynb"
    left = nbformat.writes(notebooks.canonical(nbformat.read(path, 4)), indent=1) + "\n"
    assert left == path.read_text("utf-8")
    subprocess.run([Path(sys.executable).parent / "nbdev-export"], cwd=copied, check=True)
    assert ast.parse((copied / "attnlib" / "example.py").read_text()).body


def test_an_empty_chapter_runs_and_has_the_form_of_one(copied, monkeypatch):
    make(monkeypatch, "59_example")
    nb = nbformat.read(copied / "nbs" / "59_example.ipynb", 4)
    code = [cell.source for cell in nb.cells if cell.cell_type == "code"]
    exec("\n".join(source for source in code if "%pip" not in source), {})
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    for wanted in ("{prf:theorem}", "{prf:proof}", "{exercise}", "{solution-start}"):
        assert wanted in prose
    assert "## Where the code departs from the paper" in prose
    ids = [cell.id for cell in nb.cells]
    assert ids[:5] == ["title", "colab", "default-exp", "imports", "setup"]


def test_the_tests_ask_for_what_is_open(copied, monkeypatch):
    """The new test file fails until the chapter exports something."""
    make(monkeypatch, "59_example")
    subprocess.run([Path(sys.executable).parent / "nbdev-export"], cwd=copied, check=True)
    place = copied / "attnlib" / "example.py"
    spec = importlib.util.spec_from_file_location("attnlib.example", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("attnlib.example", module, raising=False)
    names = {}
    exec((copied / "tests" / "test_example.py").read_text(), names)
    with pytest.raises(AssertionError, match="has no cell"):
        names["test_the_chapter_exports_something"]()
    module.__all__ = ["f"]
    names["test_the_chapter_exports_something"]()


@pytest.mark.parametrize(
    "name, problem",
    [
        ("10_new", "the number is that of 10_attention.ipynb"),
        ("59_attention", "the name is that of 10_attention.ipynb"),
        ("61_new", "a floor from 1 to 5 or 9"),
        ("59_New", "a floor from 1 to 5 or 9"),
        ("59_class", "is a word of Python"),
        ("new", "a floor from 1 to 5 or 9"),
    ],
)
def test_a_wrong_name_is_refused(name, problem):
    assert problem in new.refusal(name) and new.refusal("59_example") == ""


def test_a_refused_chapter_changes_nothing(copied, monkeypatch):
    before = sorted(copied.rglob("*"))
    with pytest.raises(SystemExit, match="the number is that of 10_attention.ipynb"):
        make(monkeypatch, "10_new")
    assert sorted(copied.rglob("*")) == before


def test_a_chapter_stands_in_the_order_of_numbers():
    toc = (ROOT / "_toc.yml").read_text("utf-8")
    for number, before in (("13", "12_position"), ("98", "97_cli"), ("46", "45_spatial")):
        lines = [line.strip() for line in new.listed(toc, number, "x").splitlines()]
        assert lines[lines.index(f"- file: nbs/{before}") + 1] == f"- file: nbs/{number}_x"
    first = yaml.safe_load(new.listed(toc, "29", "x"))["parts"][2]["chapters"]
    assert first[-1] == {"file": "nbs/29_x"}
