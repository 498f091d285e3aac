"""The figures that move: each control changes them, and their formulas are the library's."""

import base64
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from docutils.core import publish_doctree
from docutils.parsers.rst import directives
from docutils.utils import SystemMessage
from PIL import Image

import explorers as directive
from attnlib.attention import attention
from attnlib.cost import count_operations
from attnlib.decoding import top_p_filter
from attnlib.efficient import linear_attention, local_attention
from attnlib.position import apply_rotary, sinusoidal_encoding
from attnlib.swin import shift_mask, window_layout
from attnlib.vit import Block
from tools import explorers, plain

ROOT = Path(__file__).resolve().parent.parent
every_explorer = pytest.mark.parametrize("name", explorers.EXPLORERS)


def missing(what):
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(what)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed: pip install 'attnlib[test]'")
    with sync_playwright() as playwright:
        try:
            browser = explorers.chromium(playwright)
        except SystemExit as no_browser:
            missing(str(no_browser))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def formula(browser):
    """A function that calls a formula of explorers.js."""
    page = explorers.opened(browser, "saturation")
    call = "([name, values]) => attnlibExplorers.formulas[name](...values)"
    yield lambda name, *values: page.evaluate(call, [name, values])
    page.close()


def moved(page, control):
    """Whether the drawing changes when a control is used by the keyboard alone."""
    panels = page.locator("figure.explorer .panels")
    before, kind = panels.inner_html(), control.evaluate("e => e.type")
    control.focus()
    if kind == "range":
        at_end = control.evaluate("e => e.value === e.max")
        page.keyboard.press("ArrowLeft" if at_end else "ArrowRight")
    elif kind == "select-one":
        last = control.evaluate("e => e.selectedIndex === e.options.length - 1")
        page.keyboard.press("ArrowUp" if last else "ArrowDown")
    elif kind == "radio":
        page.keyboard.press("ArrowDown")
    else:
        page.keyboard.press("Space")
    return panels.inner_html() != before


@every_explorer
@pytest.mark.parametrize("width", [752, 342])
def test_every_control_moves_it_by_keyboard(browser, name, width):
    page, errors = explorers.opened(browser, name, width), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    inputs, still, i = page.locator("figure.explorer :is(input, select, button)"), [], 0
    while i < inputs.count():  # a choice may bring other controls
        if not moved(page, inputs.nth(i)):
            still.append(inputs.nth(i).evaluate("e => e.outerHTML"))
        i += 1
    assert i and (still, errors) == ([], [])
    assert not re.search("NaN|undefined", page.content().split("<script")[0])
    for control in inputs.all():
        box = control.locator("xpath=ancestor-or-self::*[contains(@class, 'control')]").last
        assert min(box.bounding_box()[side] for side in ("width", "height")) >= 24
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


@every_explorer
def test_it_says_what_it_shows(browser, name):
    page = explorers.opened(browser, name)
    words = page.locator("figure.explorer [aria-live=polite]")
    panels = page.locator("figure.explorer svg[role=img]").all()
    before = words.inner_text(), [panel.get_attribute("aria-label") for panel in panels]
    assert all(before[1]) and len(before[0]) > 20
    control = page.locator("figure.explorer :is(input, select)").first
    assert moved(page, control)
    after = words.inner_text(), [panel.get_attribute("aria-label") for panel in panels]
    assert after[0] != before[0] and after[1] != before[1]
    page.close()


@every_explorer
def test_its_data_are_small(name):
    path = explorers.FOLDER / f"{name}.js"
    assert path.exists() == (name in explorers.DATA)
    assert not path.exists() or path.stat().st_size <= 300_000
    assert (explorers.FOLDER / f"{name}.png").stat().st_size <= 150_000


def same(ours, theirs):
    """Whether data are the same up to rounding, packed ones up to two steps."""
    if isinstance(ours, dict) and "steps" in ours:  # of equal or tiny ones any may come first
        ours, theirs = (found | dict(steps=likely(found["steps"])) for found in (ours, theirs))
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, str) and len(ours) > 500:
        a, b = map(steps, (ours, theirs))
        return a.shape == b.shape and np.abs(a - b).max() <= 2
    return ours == (pytest.approx(theirs, abs=2e-3) if isinstance(ours, float) else theirs)


def likely(steps):
    found = [
        [(node["token"], node["p"]) for node in step if node["p"] > 0.002] for step in steps
    ]
    return [[list(node) for node in sorted(step)] for step in found]


def steps(text):
    data = base64.b64decode(text.split(",")[-1])
    if text.startswith("data:"):
        return np.asarray(Image.open(io.BytesIO(data)), dtype=int)
    return np.frombuffer(data, dtype=np.uint8).astype(int)


@pytest.mark.parametrize("name", explorers.DATA)
def test_its_data_are_what_the_library_gives(name):
    assert same(explorers.DATA[name](), explorers.read_data(name)), (
        f"run `python -m tools.explorers {name}`"
    )


def test_other_data_are_noticed():
    found = explorers.read_data("patches")
    text = found["pictures"][0]["maps"]
    found["pictures"][0]["maps"] = (
        text[:1000] + ("A" if text[1000] != "A" else "g") + text[1001:]
    )
    assert same(found, found) and not same(explorers.read_data("patches"), found)


TRANSLATIONS = {
    "Ein bärtiger Mann repariert ein altes Fahrrad.",
    "Ein Hund rennt am Strand.",
    "Zwei junge Frauen spielen Fußball im Park.",
    "Eine Frau in einem blauen Kleid geht die Straße entlang.",
}


def test_the_translator_says_what_is_shown():
    for own in explorers.read_data("heads")["sentences"]:
        said = "".join(own["target"][1:-1]).replace("_", " ").strip()
        assert (own["target"][0], own["target"][-1]) == ("<s>", "</s>")
        assert "".join(own["source"][1:-1]).replace("_", " ").strip() == own["title"]
        assert said in TRANSLATIONS


def test_the_heads_do_what_the_chapter_says():
    """Head 1.1 attends to what was translated last, head 3.1 to the noun of an article."""
    found = explorers.read_data("heads")
    own = found["sentences"][0]
    shape = (found["layers"], found["heads"], len(own["target"]) - 1, len(own["source"]))
    weights = explorers.unpacked(own["cross"], shape)
    said = own["target"][1:]
    for layer, head, query, key in [(0, 0, "_Mann", "_beard"), (2, 0, "_ein", "_bicycle")]:
        row = weights[layer, head, said.index(query)]
        assert row[own["source"].index(key)] > 0.9


def test_searches_end_as_in_the_chapter():
    table, unheard, *_ = explorers.read_data("beams")["cases"]
    found = [(search["text"], search["p"]) for search in table["searches"]]
    assert found == [("aaa", 0.136), ("baa", 0.0607), ("caa", 0.25), ("caa", 0.25)]
    assert [search["text"] for search in unheard["searches"]] == [
        "_achthundertdrei",
        "_zweihundertdreizig",
        "_zweihundertdreizig",
        "_sechzig",
    ]


def test_all_are_in_the_book():
    known = plain.Names()
    assert sorted(known.explorers) == sorted(explorers.EXPLORERS)
    pages = {}
    for name, address in known.explorers.items():
        path = explorers.FOLDER / f"{name}.js"
        pages.setdefault(address.split("#")[0], []).append(
            path.stat().st_size if path.exists() else 0
        )
    assert all(sum(sizes) <= 300_000 for sizes in pages.values())


# --- the formulas -----------------------------------------------------------------------------


def test_softmax_and_sinusoids(formula):
    z = [-30.0, 0.5, 2.0, 700.0, 699.0]
    found = torch.tensor(formula("softmax", z), dtype=torch.float64)
    expected = torch.tensor(z, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(found, expected)
    for position, dim, base in (0, 8, 10000.0), (37, 16, 10000.0), (100, 32, 100.0):
        found = torch.tensor(formula("sinusoids", position, dim, base), dtype=torch.float64)
        table = sinusoidal_encoding(1, dim, offset=position, base=base, dtype=torch.float64)
        torch.testing.assert_close(found, table[0])


def test_rotary(formula):
    x = torch.tensor([[0.9, 0.5, -0.6, 0.9, 1.0, -0.3]], dtype=torch.float64)
    for position, base in (0, 100.0), (-12, 100.0), (50, 10000.0):
        expected = apply_rotary(x, torch.tensor([position]), base=base)
        found = torch.tensor(formula("rotary", x[0].tolist(), position, base))
        torch.testing.assert_close(found.double(), expected[0], check_dtype=False)


@pytest.mark.parametrize(
    "size, window, shift", [((8, 8), 4, 2), ((7, 10), 4, 1), ((3, 14), 5, 4), ((6, 6), 7, 3)]
)
def test_shift_mask(formula, size, window, shift):
    """Also for maps that are padded, or smaller than the window along one axis or both."""
    ours = window_layout(size, (window, window), (shift, shift))
    layout = formula("windowLayout", size, [window, window], [shift, shift])
    assert {key: tuple(pair) for key, pair in layout.items()} == {
        key: getattr(ours, key) for key in ("window", "shift", "padded")
    }
    assert torch.equal(torch.tensor(formula("shiftMask", layout)), shift_mask(ours))


def test_operations(formula):
    """Those that the library's counter finds, for four heads; the linear layers in a block."""
    n, w, d = 64, 8, 16
    q, k, v = torch.randn(3, 1, 4, n, d)
    calls = {
        "exact": lambda q, k, v: attention(q, k, v),
        "window": lambda q, k, v: local_attention(q, k, v, w),
        "linear": lambda q, k, v: linear_attention(q, k, v),
    }
    found = formula("operations", n, 4 * d, w, d)
    assert {kind: count_operations(call, q, k, v).flops for kind, call in calls.items()} == {
        kind: n * found[kind] for kind in calls
    }
    block, x = Block(4 * d, 4).eval(), torch.randn(1, n, 4 * d)
    assert count_operations(block, x).flops == n * (found["layers"] + found["exact"])


def test_nucleus(formula):
    """The distribution from which the library draws, at several temperatures and top-p."""
    logits = torch.tensor(explorers.read_data("sampling")["contexts"][2]["logits"]).double()
    for temperature, p in (1.0, 0.9), (0.3, 0.5), (2.0, 1.0), (1.5, 0.05):
        expected = top_p_filter(logits[None] / temperature, p)[0].softmax(-1)
        found = formula("nucleus", logits.tolist(), temperature, p)
        after = torch.tensor([token["after"] for token in found], dtype=torch.float64)
        torch.testing.assert_close(after, expected)
        assert [token["kept"] for token in found] == (expected > 0).tolist()


def test_normal_numbers_are_normal(formula):
    sample = torch.tensor(formula("normals", 4, 20_000))
    assert abs(sample.mean()) < 0.03 and abs(sample.std() - 1) < 0.03
    assert formula("normals", 4, 3) == formula("normals", 4, 3) != formula("normals", 5, 3)


# --- the directive ----------------------------------------------------------------------------


def parsed(text):
    directives.register_directive("explorer", directive.Explorer)
    settings = dict(env=SimpleNamespace(srcdir=ROOT), halt_level=3, report_level=5)
    return publish_doctree(text, settings_overrides=settings)


def test_the_directive_makes_a_figure():
    text = ".. explorer:: saturation\n   :alt: Bars.\n\n   Move it."
    (box,) = parsed(text).children
    (figure,) = box.children
    assert box["ids"] == ["explorer-saturation"] and directive.has_explorer(parsed(text))
    assert figure["classes"] == ["explorer", "explorer-saturation"]
    assert figure[0]["uri"] == "/book/_static/explorers/saturation.png"
    assert (figure[0]["alt"], figure[1].astext()) == ("Bars.", "Move it.")
    assert not directive.has_explorer(parsed("Nothing moves."))


@pytest.mark.parametrize(
    "text, words",
    [
        (".. explorer:: none\n   :alt: Bars.\n\n   Move it.", "allowed are"),
        (".. explorer:: saturation\n\n   Move it.", "needs the option :alt:"),
        (".. explorer:: saturation\n   :alt: Bars.", "and a caption"),
    ],
)
def test_the_directive_refuses(text, words):
    with pytest.raises(SystemMessage, match=words):
        parsed(text)
