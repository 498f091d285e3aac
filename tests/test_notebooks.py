"""The notebooks, the library and the stored outputs belong together, and the check that says so can fail."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import notebooks  # noqa: E402

CHAPTERS = notebooks.notebooks()


def test_committed_notebooks_are_clean_and_their_figures_current():
    assert notebooks.check() == []


def test_export_changes_nothing(tmp_path):
    """nbdev-export, run on a copy, leaves the library as it was committed."""
    for name in ("pyproject.toml", "nbs", "attnlib"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    subprocess.run([Path(sys.executable).parent / "nbdev-export"], cwd=tmp_path, check=True)
    for path in sorted((ROOT / "attnlib").glob("*.py")):
        exported = (tmp_path / "attnlib" / path.name).read_text()
        assert exported == path.read_text(), f"attnlib/{path.name} is not what the notebooks export: run `make run`"
    assert not list((tmp_path / "nbs").glob("*.txt")), "nbdev-export wrote a file that is not committed"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_first_cell_installs_the_library_and_leaves_torch_alone(path):
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    first = cells[0].source
    assert "import attnlib" in first and "except ModuleNotFoundError" in first and "%pip install" in first
    assert not re.search(r"(?m)^(?!\s*#).*\b(torch|-U|--upgrade|--force)\b", first)
    assert "remove-cell" in cells[0].metadata.get("tags", [])


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter_has_what_a_chapter_has(path):
    nb = nbformat.read(path, 4)
    assert nb.cells[0].source.startswith("# ") and "\n> " in nb.cells[0].source
    assert len({cell.id for cell in nb.cells}) == len(nb.cells)
    for cell in nb.cells:
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert cell.cell_type != "code" or len(lines) <= 45, f"cell {cell.id} has {len(lines)} lines"
    if re.match(r"[1-5]", path.stem):
        prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
        for wanted in ("{prf:theorem}", "{prf:proof}", "{exercise}", "## Where the code departs from the paper"):
            assert wanted in prose, f"{path.name} has no {wanted}"
        assert prose.count("{prf:proof}") >= prose.count("{prf:theorem}")


# --- the check must notice -------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the tree on which the check runs, and one of its notebooks."""
    for name in ("pyproject.toml", "nbs", "attnlib"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "NBS", tmp_path / "nbs")
    return tmp_path / "nbs" / "10_attention.ipynb"


def edit(path, change):
    nb = nbformat.read(path, 4)
    change({cell.id: cell for cell in nb.cells})
    notebooks.write(nb, path)


def test_check_notices_changed_code_before_a_figure(copied):
    def change(cells):
        cells["kernel-regression"].source = cells["kernel-regression"].source.replace("0.3,", "0.4,")

    edit(copied, change)
    assert any("older than the code" in line and "kernel-figure" in line for line in notebooks.check())


def test_check_notices_a_changed_library(copied):
    module = copied.parent.parent / "attnlib" / "plot.py"
    module.write_text(module.read_text().replace("(7.0, 3.2)", "(6.0, 3.2)"))
    assert any("older than the code" in line for line in notebooks.check())


def test_check_lets_words_change(copied):
    module = copied.parent.parent / "attnlib" / "plot.py"
    module.write_text(module.read_text().replace("Display a figure", "Show a figure") + "# a comment\n")
    assert notebooks.check() == []


def test_check_notices_another_picture(copied):
    def change(cells):
        first, second = cells["kernel-figure"].outputs[0], cells["digits-figure"].outputs[0]
        first.data["image/png"] = second.data["image/png"]

    edit(copied, change)
    assert any("not the one that its code drew" in line for line in notebooks.check())


def test_check_notices_an_uncleaned_notebook(copied):
    edit(copied, lambda cells: cells["imports"].update(execution_count=99))
    assert any("make run NB=10_attention" in line for line in notebooks.check())


def test_unknown_notebook_is_named():
    with pytest.raises(SystemExit, match="no notebook named 99_nothing; there are: .*10_attention"):
        notebooks.notebooks(["99_nothing"])


def test_nothing_names_this_machine():
    for path in CHAPTERS:
        assert not re.search(r"/(home|root|tmp|work)/", path.read_text()), f"{path.name} carries a path of a machine"
    assert os.environ.get("HOME", "/nowhere") not in (ROOT / "README.md").read_text()
