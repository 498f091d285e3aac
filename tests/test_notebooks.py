"""Notebooks, library and stored outputs belong together, and the check of it can fail."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import chapters
import ideas
from tools import notebooks

ROOT = Path(__file__).parent.parent

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
        assert exported == path.read_text(), (
            f"attnlib/{path.name} is not what the notebooks export: run `make run`"
        )
    assert not list((tmp_path / "nbs").glob("*.txt")), (
        "nbdev-export wrote a file that is not committed"
    )


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_first_cell_installs_the_library_and_leaves_torch_alone(path):
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    first = cells[0].source
    assert (
        "import attnlib" in first
        and "except ModuleNotFoundError" in first
        and "%pip install" in first
    )
    assert not re.search(r"(?m)^(?!\s*#).*\b(torch|-U|--upgrade|--force)\b", first)
    assert "remove-cell" in cells[0].metadata.get("tags", [])


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter_has_what_a_chapter_has(path):
    nb = nbformat.read(path, 4)
    assert nb.cells[0].source.startswith("# ") and "\n> " in nb.cells[0].source
    assert len({cell.id for cell in nb.cells}) == len(nb.cells)
    if re.match(r"[1-5]", path.stem):
        prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
        for wanted in ("{prf:theorem}", "{prf:proof}", "{exercise}"):
            assert wanted in prose, f"{path.name} has no {wanted}"
        assert prose.count("{prf:proof}") >= prose.count("{prf:theorem}")


# --- a chapter is a notebook and a line of _toc.yml -------------------------------------------


def test_every_notebook_is_a_chapter():
    listed = [f"{chapter.page}.ipynb" for _, some in chapters.parts() for chapter in some]
    assert sorted(listed) == [str(path.relative_to(ROOT)) for path in CHAPTERS]
    for chapter in chapters.modules():
        assert chapter.page == f"nbs/{chapter.page[4:6]}_{chapter.module}"


def test_the_readme_lists_the_chapters():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert chapters.updated(readme) == readme, "run `python -m tools.readme`"


def test_the_example_in_the_readme_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = {}
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (block,) = [block for block in blocks if "record_attention() as maps" in block]
    exec(block, found)
    assert len(found["maps"]) == 12 and found["maps"][0].shape == (1, 3, 197, 197)


def test_a_chapter_is_added_by_two_changes(tmp_path):
    """A notebook and a line of _toc.yml: the lists of chapters and the library have it then."""
    for name in ("_toc.yml", "nbs", "attnlib"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    nb = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# A title\n\n> What it shows."),
            nbformat.v4.new_code_cell("#| default_exp next"),
        ]
    )
    notebooks.write(nb, tmp_path / "nbs" / "13_next.ipynb")
    toc = (tmp_path / "_toc.yml").read_text(encoding="utf-8")
    line = "      - file: nbs/12_position\n"
    added = toc.replace(line, line + "      - file: nbs/13_next\n")
    (tmp_path / "_toc.yml").write_text(added, encoding="utf-8")
    assert "4. {doc}`/nbs/13_next`: What it shows" in chapters.first_page(tmp_path)
    assert "| {doc}`attnlib.next <next>` | What it shows." in chapters.library(tmp_path)
    assert "| [A title](nbs/13_next.ipynb) | `next` |" in chapters.readme(tmp_path)


# --- the check must notice --------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A notebook with two pictures, and a module that it imports, on which the check runs."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "nbs").mkdir()
    (tmp_path / "attnlib").mkdir()
    module = tmp_path / "attnlib" / "plot.py"
    module.write_text(
        'SIZE = 3\n\n\ndef draw(x):\n    """Draw a figure."""\n    return SIZE * x\n'
    )
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "NBS", tmp_path / "nbs")
    nb = nbformat.v4.new_notebook()
    sources = {
        "imports": "from attnlib.plot import draw",
        "data": "x = 1",
        "first": "draw(x)",
        "second": "draw(-x)",
    }
    for name, source in sources.items():
        nb.cells.append(nbformat.v4.new_code_cell(source, id=name))
    for cell, image in zip(nb.cells[2:], ("aaaa", "bbbb")):
        cell.outputs = [nbformat.v4.new_output("display_data", {"image/png": image})]
    nb.metadata["figures"] = notebooks.stamps(nb)
    path = tmp_path / "nbs" / "10_small.ipynb"
    notebooks.write(notebooks.canonical(nb), path)
    assert notebooks.check() == []
    return path


def edit(path, change):
    nb = nbformat.read(path, 4)
    change({cell.id: cell for cell in nb.cells})
    notebooks.write(nb, path)


def test_check_notices_changed_code_before_a_figure(small):
    edit(small, lambda cells: cells["data"].update(source="x = 2"))
    complaints = notebooks.check()
    assert len(complaints) == 2
    assert "'first' is older than the code" in complaints[0]


def test_check_notices_a_changed_library(small):
    module = small.parent.parent / "attnlib" / "plot.py"
    module.write_text(module.read_text().replace("SIZE = 3", "SIZE = 4"))
    assert any("older than the code" in line for line in notebooks.check())


def test_check_lets_words_change(small):
    module = small.parent.parent / "attnlib" / "plot.py"
    module.write_text(module.read_text().replace("Draw a", "Show a") + "# a comment\n")
    assert notebooks.check() == []


def test_check_notices_another_picture(small):
    def change(cells):
        first, second = cells["first"].outputs[0], cells["second"].outputs[0]
        first.data["image/png"] = second.data["image/png"]

    edit(small, change)
    assert any("not the one that its code drew" in line for line in notebooks.check())


def test_check_notices_a_figure_that_went(small):
    edit(small, lambda cells: cells["first"].update(outputs=[]))
    assert any("came or went" in line for line in notebooks.check())


def test_check_notices_an_uncleaned_notebook(small):
    edit(small, lambda cells: cells["imports"].update(execution_count=99))
    assert any("make run NB=10_small" in line for line in notebooks.check())


def test_unknown_notebook_is_named():
    with pytest.raises(
        SystemExit, match="no notebook named 99_nothing; there are: .*10_attention"
    ):
        notebooks.notebooks(["99_nothing"])


def test_nothing_names_this_machine():
    for path in CHAPTERS:
        assert not re.search(r"/(home|root|tmp|work)/", path.read_text()), (
            f"{path.name} carries a path of a machine"
        )
    assert os.environ.get("HOME", "/nowhere") not in (ROOT / "README.md").read_text()


# --- statements have checks that can fail, figures have captions, chapters end ----------------

NUMBERED = [path for path in CHAPTERS if path.stem[0] in "12345"]
STATEMENT = re.compile(r"\{prf:(?:theorem|proposition|lemma|corollary)\}.*\n:label: (\S+)")


def unchecked(nb):
    """The labels of the statements that no cell checks, or checks without a control.

    A check is a code cell with a line "# check: LABEL". A control is the same check of a broken
    variant, behind a line "# control: WHAT IS BROKEN" in the same cell, that asserts or prints.
    """
    checked = set()
    for cell in nb.cells:
        if cell.cell_type == "code":
            _, *after = re.split(r"(?m)^\s*# control: \S", cell.source, maxsplit=1)
            if after and re.search(r"\bassert\b", after[0]):
                checked |= set(re.findall(r"(?m)^\s*# check: (\S+)", cell.source))
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    return [label for label in STATEMENT.findall(prose) if label not in checked]


def without_caption(nb):
    """The ids of the cells whose figure has no caption of its own."""
    found = []
    for cell in nb.cells:
        outputs = [out.get("data", {}) for out in cell.get("outputs", ())]
        pictures = sum("image/png" in data for data in outputs)
        captions = [
            data for data in outputs if '<p class="caption">' in data.get("text/html", "")
        ]
        found += [cell.id] * (pictures > len(captions))
    return found


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_each_statement_has_a_check_with_a_control(path):
    assert unchecked(nbformat.read(path, 4)) == []


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_each_figure_has_a_caption(path):
    assert without_caption(nbformat.read(path, 4)) == []


def prose_of(cells):
    """The text of some cells, without the summary's."""
    texts = [
        cell["source"]
        for cell in cells
        if cell["cell_type"] == "markdown" and cell["id"] != "summary"
    ]
    return "\n".join(texts)


def too_long(nb):
    """What of a chapter is longer than the rules allow.

    A chapter with a core has "## Going deeper": its core takes at most 40 minutes and has at
    most 8 sections, and all of it has at most 4,500 words, without solutions. Another chapter
    has at most 6,000 words.
    """
    core = ideas.core_of(nb.cells)
    if not re.search(r"(?m)^## Going deeper\b", prose_of(nb.cells)):
        prose = re.sub(r"(?ms)^:::\{explorer\}.*?^:::$", "", prose_of(nb.cells))
        prose = re.sub(
            r"\{term\}`([^`<]*)[^`]*`", r"\1", prose
        )  # a link is as long as its text
        words = len(re.findall(r"\w+", re.sub(r"\$\$?.*?\$\$?", "", prose, flags=re.S)))
        return [] if words <= 6000 else [f"{words} words, more than 6,000"]
    minutes = ideas.minutes(core)
    texts = [cell["source"] for cell in core if cell["cell_type"] == "markdown"]
    sections = len(re.findall(r"(?m)^## ", "\n".join(texts)))
    words = ideas.words_in(prose_of(ideas.without_solutions(nb.cells)))
    found = []
    if minutes > 40:
        found.append(f"core of {minutes:.0f} minutes, more than 40")
    if sections > 8:
        found.append(f"core of {sections} sections, more than 8")
    if words > 4500:
        found.append(f"{words} words without solutions, more than 4,500")
    return found


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_a_chapter_has_an_end(path):
    """It is not too long, and closes with six to ten exercises with their solutions."""
    nb = nbformat.read(path, 4)
    assert too_long(nb) == []
    prose = prose_of(nb.cells)
    exercises = re.findall(r":::\{exercise\}.*\n:label: (\S+)", prose)
    solutions = re.findall(r"```\{solution-start\} (\S+)", prose)
    assert 6 <= len(exercises) <= 10 and sorted(exercises) == sorted(solutions)


def test_a_chapter_that_is_too_long_is_found():
    text = nbformat.v4.new_markdown_cell

    def chapter(*sources):
        return nbformat.v4.new_notebook(cells=[text(source) for source in sources])

    deeper = "## Going deeper\n\n" + "word " * 2000
    exercises = "## Exercises\n\n" + "word " * 1000
    solution = ("```{solution-start} ex-a\n```", "word " * 9000, "```{solution-end}\n```")
    assert too_long(chapter("word " * 5900)) == []
    assert too_long(chapter("word " * 6100)) == ["6100 words, more than 6,000"]
    assert too_long(chapter("## A\n\n" + "word " * 1400, deeper, exercises, *solution)) == []
    (long,) = too_long(chapter("## A\n\n" + "word " * 1600, deeper, exercises, *solution))
    assert "without solutions, more than 4,500" in long
    core = "## A\n\n" + "$$ a $$ " * 81
    assert too_long(chapter(core, deeper)) == ["core of 41 minutes, more than 40"]
    assert too_long(chapter("## A\n\n" * 8, deeper)) == []
    assert too_long(chapter("## A\n\n" * 9, deeper)) == ["core of 9 sections, more than 8"]


def test_the_rules_for_chapters_find_what_breaks_them():
    code, text = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    statement = text(":::{prf:theorem} A title\n:label: thm-a\nTrue.\n:::")
    good = "# check: thm-a\nassert 1 + 1 == 2\n# control: another sum\nassert 1 + 2 != 2"
    for source, missing in (
        (good, []),
        (good.replace("thm-a", "thm-b"), ["thm-a"]),
        (good.replace("# control", "# more"), ["thm-a"]),
        (good.rpartition("\n")[0], ["thm-a"]),
    ):
        nb = nbformat.v4.new_notebook(cells=[statement, code(source)])
        assert unchecked(nb) == missing
    picture = nbformat.v4.new_output("display_data", {"image/png": "", "text/plain": "a"})
    for html, count in (('<p class="caption">b</p>', 0), ('<p aria-hidden="true">a</p>', 1)):
        caption = nbformat.v4.new_output("display_data", {"text/html": html})
        nb = nbformat.v4.new_notebook(cells=[code("show()", outputs=[picture, caption])])
        assert len(without_caption(nb)) == count
