"""The plain copies of the notebooks: no word of MyST, the same code, and they run."""

import json
import re

import nbformat
import pytest
from markdown_it import MarkdownIt
from nbclient import NotebookClient

from tools import plain

KNOWN = plain.Names()
PAGES = [chapter.page for chapter in KNOWN.chapters]
MYST = re.compile(r"(?m)\{[\w:-]+\}`|^\s*(:::|```\{)|^:\w+:|^\$\$ \(|^\([\w-]+\)=")
every_copy = pytest.mark.parametrize("page", PAGES)


def texts(cells, kind):
    return [plain.source(cell) for cell in cells if cell["cell_type"] == kind]


@every_copy
def test_nothing_of_myst_is_left(page):
    original = "\n".join(texts(plain.read(plain.ROOT / f"{page}.ipynb")["cells"], "markdown"))
    copy = "\n\n".join(texts(plain.plain(page, KNOWN)["cells"], "markdown"))
    assert not MYST.search(copy), MYST.search(copy)
    assert copy.count("<details>") == copy.count("</details>")
    boxes = re.findall(r"(?m)^:::\{(?:prf:(?!proof)\w+|exercise)\}", original)
    assert len(re.findall(r"(?m)^> \*\*[A-Z]\w+ [\d.]+( \(.+\))?\.\*\*", copy)) == len(boxes)
    assert copy.count("\\tag{") == len(re.findall(r"\$\$ \([\w-]+\)", original))


@every_copy
def test_code_and_outputs_are_the_same(page):
    original = plain.read(plain.ROOT / f"{page}.ipynb")["cells"]
    copy = plain.plain(page, KNOWN)["cells"]

    def lines(cells):
        found = [line for text in texts(cells, "code") for line in text.splitlines()]
        return [line for line in found if line and not line.startswith(("#|", "#@title"))]

    assert lines(copy) == lines(original)
    outputs = [
        [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]]
        for cells in (original, copy)
    ]
    assert outputs[0] == outputs[1]
    nbformat.validate(nbformat.from_dict(plain.plain(page, KNOWN)))


@every_copy
def test_boxes_and_folds_survive_as_html(page):
    """What GitHub's Markdown makes of a cell: formulas untouched, boxes as quotations."""
    reader = MarkdownIt("gfm-like", {"html": True, "linkify": False})
    for text in texts(plain.plain(page, KNOWN)["cells"], "markdown"):
        html = reader.render(text)
        assert html.count("<blockquote>") >= bool(re.search(r"(?m)^> \*\*", text))
        assert html.count("<summary>") == text.count("<summary>")
        assert not re.search(r"\]\(http", re.sub(r"(?s)<code.*?</code>|\$.*?\$", "", html))


def test_a_box_a_formula_and_references():
    box = ":::{prf:theorem} Jacobian\n:label: thm-jacobian\nSee {eq}`eq-attention`.\n:::"
    found = plain.markdown(box, KNOWN)
    assert found.startswith("> **Theorem 1.1 (Jacobian).** See [(1.1)](https://")
    assert "[Liu et al. (2021)](https://" in plain.markdown("{cite:t}`liu2021swin`", KNOWN)
    assert plain.markdown("$$\nx\n$$ (eq-attention)", KNOWN) == "$$\nx \\tag{1.1}\n$$"
    # control: what nobody has written is not passed over
    with pytest.raises(KeyError, match="thm-none"):
        plain.markdown("{prf:ref}`thm-none`", KNOWN)


def test_an_explorer_is_its_picture_and_a_link():
    text = ":::{explorer} saturation\n:alt: Bars.\nMove {eq}`eq-attention`.\n:::\nMore."
    found = plain.markdown(text, KNOWN)
    where = f"{plain.BOOK}nbs/10_attention.html#explorer-saturation"
    assert found.startswith(
        f"[![Bars.]({plain.BOOK}_static/explorers/saturation.png)]({where})"
    )
    assert found.endswith(f"[Move it in the book.]({where})\nMore.") and "[(1.1)]" in found


@pytest.mark.parametrize("name", ["00_preface", "92_plot"])
def test_a_copy_runs_in_an_empty_folder(name, tmp_path):
    """The code of the others is that of the notebooks, which are executed beside the wheel."""
    notebook = nbformat.from_dict(plain.plain(f"nbs/{name}", KNOWN))
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}})
    client.execute()


def test_the_command_writes_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["plain", "--out", str(tmp_path)])
    plain.main()
    assert len(list(tmp_path.glob("*.ipynb"))) == len(PAGES)
    assert json.loads((tmp_path / "32_swin.ipynb").read_text())["nbformat"] == 4
