"""`make new NB=56_name` copies the template of a chapter, which runs and has its form."""

import sys

import nbformat
import pytest

from tools import new, notebooks


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """An empty repository in which the command works."""
    (tmp_path / "nbs").mkdir()
    monkeypatch.setattr(new, "ROOT", tmp_path)
    return tmp_path


def make(monkeypatch, name):
    monkeypatch.setattr(sys, "argv", ["new", name])
    new.main()


def test_a_copy_is_a_clean_notebook_that_exports_its_module(copied, monkeypatch):
    make(monkeypatch, "59_example")
    path = copied / "nbs" / "59_example.ipynb"
    nb = nbformat.read(path, 4)
    nbformat.validate(nb)
    text = path.read_text("utf-8")
    assert nbformat.writes(notebooks.canonical(nb), indent=1) + "\n" == text
    assert "#| default_exp example" in text
    assert new.PLACEHOLDER not in text


def test_a_copy_runs_and_has_the_form_of_a_chapter(copied, monkeypatch):
    make(monkeypatch, "59_example")
    nb = nbformat.read(copied / "nbs" / "59_example.ipynb", 4)
    code = [cell.source for cell in nb.cells if cell.cell_type == "code"]
    exec("\n".join(source for source in code if "%pip" not in source), {})
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    for wanted in ("{prf:theorem}", "{prf:proof}", "{exercise}", "{solution-start}"):
        assert wanted in prose
    ids = [cell.id for cell in nb.cells]
    assert ids[:5] == ["title", "colab", "default-exp", "imports", "setup"]


def test_the_template_installs_the_library_as_chapters_do():
    def install(path):
        return next(cell.source for cell in nbformat.read(path, 4).cells if cell.id == "colab")

    assert install(new.TEMPLATE) == install(notebooks.NBS / "10_attention.ipynb")


@pytest.mark.parametrize("name", ["10_new", "59_attention", "61_new", "59_New", "new"])
def test_a_wrong_name_is_refused(name):
    assert new.refusal(name, notebooks.NBS)
    assert not new.refusal("59_example", notebooks.NBS)


def test_a_refused_chapter_changes_nothing(copied, monkeypatch):
    (copied / "nbs" / "10_attention.ipynb").touch()
    before = sorted(copied.rglob("*"))
    with pytest.raises(SystemExit, match="10_new"):
        make(monkeypatch, "10_new")
    assert sorted(copied.rglob("*")) == before
