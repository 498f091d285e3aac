"""The plain copies of the notebooks: no word of MyST, the same code, and they run."""

import functools
import html
import json
import re

import nbformat
import pytest
from markdown_it import MarkdownIt
from nbclient.exceptions import CellExecutionError
from nbconvert.filters import markdown2html

from attnlib.cost import training_memory
from benchmarks import pages
from tools import plain

KNOWN = plain.Names()
PAGES = [chapter.page for chapter in KNOWN.chapters]
MYST = re.compile(r"(?m)\{[\w:-]+\}`|^\s*(:::|```\{)|^:\w+:|^\$\$ \(|^\([\w-]+\)=")
GFM = MarkdownIt("gfm-like", {"html": True, "linkify": False})  # of GitHub, without formulas
READERS = [GFM.render, markdown2html]  # the second knows formulas, and is Jupyter's
every_copy = pytest.mark.parametrize("page", PAGES)


@functools.cache
def cells_of(page):
    return plain.plain(page, KNOWN)["cells"]


def texts(cells, kind):
    return [plain.source(cell) for cell in cells if cell["cell_type"] == kind]


@every_copy
def test_nothing_of_myst_is_left(page):
    original = "\n".join(texts(plain.read(plain.ROOT / f"{page}.ipynb")["cells"], "markdown"))
    copy = "\n\n".join(texts(cells_of(page), "markdown"))
    assert not MYST.search(copy), MYST.search(copy)
    assert copy.count("<details>") == copy.count("</details>")
    boxes = re.findall(r"(?m)^:::\{(?:prf:(?!proof)\w+|exercise)\}", original)
    assert len(re.findall(r"(?m)^> \*\*[A-Z]\w+ [\d.]+( \(.+\))?\.\*\*", copy)) == len(boxes)
    assert copy.count("\\tag{") == len(re.findall(r"\$\$ \([\w-]+\)", original))


@every_copy
def test_code_and_outputs_are_the_same(page):
    original = plain.read(plain.ROOT / f"{page}.ipynb")["cells"]
    copy = cells_of(page)

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


def formulas(text):
    """[(what stands before it, the formula with its dollars, what stands behind it)]"""
    found = [
        match for match in plain.MATH.finditer(text) if match["inline"] or match["display"]
    ]
    return [(text[: one.start()], one[0], text[one.end() :]) for one in found]


def changed(text, render):
    """The formulas of a text that are not in the page a reader of Markdown makes of it."""
    page = html.unescape(re.sub(r"<[^>]*>", "", render(text)))
    return [formula for _, formula, _ in formulas(text) if formula not in page]


def doubtful(text):
    """Formulas that GitHub is known not to set, though its Markdown leaves them as they are."""
    found = []
    for before, formula, behind in formulas(text):
        if formula.startswith("$$"):  # a line of its own, which may be a line of a quotation
            fine = re.search(r"(^|\n)(> )?$", before) and re.match(r"\n|$", behind)
        else:  # no letter or digit beside it, no space inside
            fine = not re.search(r"\w\Z", before) and not re.match(r"\w", behind)
            fine = fine and formula == f"${formula[1:-1].strip()}$"
        foreign = re.search(r"\\(label|ref|eqref|newcommand|def|require)\b|\n", formula)
        if not fine or foreign:
            found.append(formula)
    left = plain.MATH.sub("", text)
    return found + re.findall(r"(?<!\\)\$.*", left) + re.findall(r"(?m)^\|.*\$.*\|.*\$", left)


@every_copy
def test_every_reader_of_markdown_finds_the_formulas(page):
    for text in texts(cells_of(page), "markdown"):
        for render in READERS:
            assert changed(text, render) == []
        assert doubtful(text) == []


def test_formulas_that_a_reader_would_miss_are_seen():
    """Controls: what happens to a formula as the book writes it, and to doubtful ones."""
    for formula in (
        r"$\{a\}$",
        r"$$a\\b$$",
        r"$\bar{x}_{i} + \bar{y}_{j}$",
        "$a*b*c$",
        "$a<b>c$",
    ):
        assert changed(formula, GFM.render), formula
        assert not changed(plain.markdown(formula, KNOWN), GFM.render)
    for formula in ("the $n$th", "$ x $", "see $$x$$", r"$\ref{x}$", "a $ alone"):
        assert doubtful(formula), formula
    assert not doubtful("> $$x \\tag{1}$$\n>\n> for $x$, and `$x`")


def test_a_word_of_the_glossary_is_its_plain_word():
    text = "The {term}`softmax` of {term}`logits <logit>`."
    assert plain.markdown(text, KNOWN) == "The softmax of logits."


def test_tex_for_markdown_means_the_same():
    written = plain.for_markdown("\\{a_i\\,\\mid\\, i<n\\}^* \\\\\n\\operatorname*{max}_j")
    assert written == (
        r"\lbrace a _i\thinspace\mid\thinspace i\lt n\rbrace^\ast \cr \operatorname*{max} _j"
    )


@every_copy
def test_boxes_and_folds_survive_as_html(page):
    """What GitHub's Markdown makes of a cell: boxes as quotations, folds, no raw links."""
    for text in texts(cells_of(page), "markdown"):
        page = GFM.render(text)
        assert page.count("<blockquote>") >= bool(re.search(r"(?m)^> \*\*", text))
        assert page.count("<summary>") == text.count("<summary>")
        words = re.sub(r"(?s)<code.*?</code>|\$.*?\$", "", page)
        assert not re.search(r"\]\(http|\*\*", words)


def test_a_box_a_formula_and_references():
    box = ":::{prf:theorem} Jacobian\n:label: thm-jacobian\nSee {eq}`eq-attention`.\n:::"
    found = plain.markdown(box, KNOWN)
    assert found.startswith("> **Theorem 1.1 (Jacobian).** See [(1.1)](https://")
    assert "[Liu et al. (2021)](https://" in plain.markdown("{cite:t}`liu2021swin`", KNOWN)
    assert plain.markdown("$$\nx\n$$ (eq-attention)", KNOWN) == r"$$x \tag{1.1}$$"
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
    """`python -m tools.plain --run` does this for all, beside the wheel."""
    assert plain.execute(plain.plain(f"nbs/{name}", KNOWN), tmp_path, limit=120) > 0


def test_a_copy_that_fails_is_told(tmp_path):
    broken = plain.plain("nbs/00_preface", KNOWN)
    broken["cells"].append(broken["cells"][-1] | {"cell_type": "code", "source": "1 / 0"})
    broken["cells"][-1] |= dict(outputs=[], execution_count=None, metadata={})
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        plain.execute(broken, tmp_path, limit=120)


def test_a_copy_begins_with_what_it_takes(monkeypatch):
    records = {
        "pages": {"seconds": {"30_vit": 41.3}},
        "pages_estimated": {
            "rows": [
                dict(page="30_vit", run="run()", minutes={"T4": 30.0, "H200": 5.5}),
                dict(page="30_vit", what="images", model="`vit`", batch=103)
                | dict(rates={"T4": 240.0, "H200": 3000.0}),
            ]
        },
    }
    monkeypatch.setattr(plain, "recorded", records.get)
    top = plain.source(plain.plain("nbs/30_vit", KNOWN)["cells"][0])
    assert "| this page | 41 s, one core |" in top
    assert "| `run()` | hours | 30 min\\* | 5.5 min\\* |" in top
    assert "| 240 a second\\*, batches of at most 103\\* | 3000 a second\\* |" in top
    assert GFM.render(top).count("<tr>") == 4 and "\n\n\\* Estimated, not measured" in top
    # one that nobody has measured says so, and promises no GPU
    other = plain.what_to_expect("nbs/50_cost")
    assert "90 s at most" in other and "float16" not in other


def test_estimates_count_memory_and_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pages", "--tiny", "--out", str(tmp_path)])
    pages.main()
    published, run = json.loads((tmp_path / "pages_estimated.json").read_text())["rows"]
    assert published["page"] == run["page"] == "34_tnt" and published["batch"] > 10
    assert published["rates"]["H200"] > published["rates"]["T4"] > 0
    assert run["minutes"]["T4"] > run["minutes"]["H200"] > 0
    model, inputs = pages.small_classifier("vit")
    memory = training_memory(model, inputs(1))
    fixed = memory.parameters + memory.gradients + memory.optimizer
    monkeypatch.setattr(pages, "T4_BYTES", fixed + 10.5 * memory.activations)
    assert pages.largest_batch(model, inputs) == 10
    one, two = (pages.step_seconds(model, inputs(n))["T4"] for n in (64, 128))
    assert one < two < 2 * one  # more images, as many operators


def test_the_command_writes_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["plain", "--out", str(tmp_path)])
    plain.main()
    assert len(list(tmp_path.glob("*.ipynb"))) == len(PAGES)
    assert json.loads((tmp_path / "32_swin.ipynb").read_text())["nbformat"] == 4
