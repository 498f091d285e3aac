"""The built book as a reader meets it: without a network, on a screen and a phone.

Links, ids, alternative texts, and whatever else stands in a page's HTML are read for every
page. A headless browser opens one page of each kind and those whose source has changed; under
`-m slow` it opens all others.

`make book` builds the pages; ATTNLIB_BOOK names their folder, _build/html by default. Chromium
is looked for as $CHROMIUM, `chromium` and `google-chrome`. Without pages or browser the tests
are skipped; where CI=true they fail.
"""

import contextlib
import functools
import http.server
import io
import json
import os
import re
import shutil
import threading
import unicodedata
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup, NavigableString

import chapters
from tools import pdf, plain, quick

ROOT = Path(__file__).resolve().parent.parent
BOOK = Path(os.environ.get("ATTNLIB_BOOK", ROOT / "_build" / "html")).resolve()
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


def listed(entry):
    """The pages below an entry of _toc.yml."""
    pages = [entry["file"]] if "file" in entry else []
    if entry.get("glob") == "book/api/*":
        pages = [f"book/api/{chapter.module}" for chapter in chapters.modules()]
    return pages + [
        page
        for key in ("chapters", "sections")
        for child in entry.get(key, ())
        for page in listed(child)
    ]


PAGES = [TOC["root"], *(page for part in TOC["parts"] for page in listed(part))]
NOTEBOOKS = [page for page in PAGES if (ROOT / f"{page}.ipynb").exists()]
CHAPTERS = [page for part in TOC["parts"] if part.get("numbered") for page in listed(part)]
PLAIN = plain.Names()
ALL = [*PAGES, "genindex", "py-modindex", "search"]
KINDS = [  # one page of each kind: chapters with and without an explorer, a tool, lists, …
    *("book/index", "nbs/10_attention", "nbs/32_swin", "nbs/92_plot", "book/glossary"),
    *("book/theorems", "book/bibliography", "book/api/swin", "genindex", "search"),
]


def changed_pages():
    """The pages whose source has changed since this branch left `main`."""
    commit = quick.base()
    names = commit and quick.git("diff", "--name-only", commit) or ""
    return {name.rpartition(".")[0] for name in names.splitlines()}


def on_screen(pages):
    """Run a test for some pages, for most of them only under `-m slow`."""
    soon = {*KINDS, *changed_pages()}
    cases = []
    for page in pages:
        marks = [] if page in soon else [pytest.mark.slow]
        cases.append(pytest.param(page, marks=marks))
    return pytest.mark.parametrize("name", cases)


every_page = pytest.mark.parametrize("name", ALL)
every_notebook = pytest.mark.parametrize("name", NOTEBOOKS)
some_pages = on_screen(ALL)
some_notebooks = on_screen(NOTEBOOKS)


def missing(what):
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(what)


# --- the reader -------------------------------------------------------------------------------

LOOK = r"""async () => {
  if (window.MathJax) await MathJax.startup.promise;
  for (const image of document.images) image.loading = "eager";
  await Promise.all([...document.images].map(image => image.decode().catch(() => {})));
  await document.fonts.ready;
  const all = (selector, f) => [...document.querySelectorAll(selector)].map(f);
  return {
    uncopied: all(".cell_input .highlight",
      cell => cell.querySelector("button.copybtn") ? 0 : 1),
    formulas: all("mjx-container", formula => 1).length,
    math_errors: all("mjx-merror, [data-mjx-error], .MathJax_Error",
      error => error.dataset.mjxError || error.title || error.textContent),
    undrawn: all("img", image => image.complete && image.naturalWidth > 0 ? "" : image.src)
      .filter(source => source),
    solutions: all(".solution.admonition", box => box.classList.contains("toggle-hidden")
      && [...box.children].slice(1).every(
        child => child.matches("button") || child.clientHeight === 0)),
    bar: document.querySelector("header.bd-header")?.offsetHeight || 0,
  };
}"""

SEARCHES = """() => [
  ...document.querySelectorAll("button[class*=search-button], input[type=search]")
].filter(element => element.checkVisibility({visibilityProperty: true})).length"""

# the longest line of each cell that scrolls sideways; what is folded is opened first
CUT = """() => {
  document.querySelectorAll("details").forEach(fold => fold.open = true);
  const hidden = "toggle-hidden";
  document.querySelectorAll(`.${hidden}`).forEach(fold => fold.classList.remove(hidden));
  const cells = [...document.querySelectorAll("div.cell_input pre")];
  return {
    cells: cells.length,
    seen: cells.filter(pre => pre.clientWidth).length,
    cut: cells.filter(pre => pre.scrollWidth > pre.clientWidth).map(
      pre => pre.textContent.split("\\n").sort((a, b) => b.length - a.length)[0]),
  };
}"""

SIZE = """() => {
  const article = document.querySelector("article") || document.querySelector("main");
  const scrolls = element => element !== article
    && (getComputedStyle(element).overflowX !== "visible" || scrolls(element.parentElement));
  const beyond = [...article.querySelectorAll("*")].filter(element =>
    element.getBoundingClientRect().right > innerWidth + 1 && !scrolls(element.parentElement));
  return {
    width: document.scrollingElement.scrollWidth,
    beyond: beyond.slice(0, 5).map(e => e.outerHTML.slice(0, 120)),
  };
}"""


AXE = """async colours => (await axe.run({exclude: [["mjx-container"]]},
    {preload: false, resultTypes: ["violations"],
     rules: {"color-contrast": {enabled: colours}}}))
  .violations.filter(found => ["serious", "critical"].includes(found.impact))
  .map(found => `${found.id}: ${found.nodes[0].html.slice(0, 200)}`)"""

# thousands of coloured words and parts of formulas, of which axe would look at each
PLAINLY = """() => document.querySelectorAll("pre, mjx-container")
  .forEach(element => element.textContent = "words")"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def site():
    """The address of the pages, served from this machine."""
    if not (BOOK / "book" / "index.html").exists():
        missing(
            f"no book in {BOOK}: build it with `make book`, or set ATTNLIB_BOOK to the folder "
            "of its pages"
        )
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=BOOK)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed: pip install 'attnlib[test]'")
    program = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    if not program:
        missing("no Chromium: install it, or set CHROMIUM to its path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def opened(site, browser):
    """A function that opens a page of the book, once, and tells what was seen."""
    seen = {}

    def visit(name):
        if name not in seen:
            seen[name] = look(name, site, browser)
        return seen[name]

    return visit


def violations(page, colours):
    """What axe finds on a page, serious or critical; None where axe is not installed."""
    try:
        import axe_playwright_python as axe
    except ImportError:
        return None
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    return page.evaluate(AXE, colours)


def look(name, site, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    complaints, outside = [], []

    page.on(
        "request",
        lambda request: (
            request.url.startswith((site, "data:", "blob:")) or outside.append(request.url)
        ),
    )
    page.on(
        "console", lambda message: message.type == "error" and complaints.append(message.text)
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "response",
        lambda answer: (
            answer.status >= 400 and complaints.append(f"{answer.status} {answer.url}")
        ),
    )
    page.goto(f"{site}{name}.html", wait_until="load")
    seen = page.evaluate(LOOK)
    seen["searches"] = page.evaluate(SEARCHES)
    seen["night"] = at_night(page)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(200)
    seen["phone"] = page.evaluate(SIZE)
    seen["phone_searches"] = page.evaluate(SEARCHES)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.wait_for_timeout(200)
    seen["cells"] = page.evaluate(CUT)
    seen.update(complaints=complaints, outside=outside, site=site)
    page.evaluate(PLAINLY)
    seen["violations"] = violations(page, colours=False)
    page.close()
    return seen


def at_night(page):
    """Press the button until it is dark; the brightness, 0 to 1, of page, text and a figure."""
    for _ in range(3):
        if page.evaluate("document.documentElement.dataset.theme") == "dark":
            break
        page.locator(".theme-switch-button:visible").first.click()
    night = page.evaluate("""() => {
      const brightness = color =>
        color.match(/\\d+/g).slice(0, 3).reduce((sum, c) => sum + Number(c), 0) / 765;
      const style = getComputedStyle(document.querySelector("main"));
      return {theme: document.documentElement.dataset.theme, text: brightness(style.color),
              page: brightness(getComputedStyle(document.body).backgroundColor)};
    }""")
    figure = page.locator(".cell_output img").first
    if figure.count() and figure.is_visible():
        from matplotlib.image import imread

        figure.scroll_into_view_if_needed()
        figure.evaluate("image => image.decode()")  # else the page behind it may be seen
        page.wait_for_timeout(300)  # colours fade
        pixels = imread(io.BytesIO(figure.screenshot()))  # (H, W, C)
        night["figure"] = float(pixels[12, 12, :3].mean())
    return night


@functools.cache
def written(name):
    """What stands in a page's HTML."""
    page = soup(name)
    apart = ["script", "style", "noscript", "pre", "code"]
    words = []
    for text in page.body.find_all(string=True):
        inside = text.find_parent(lambda tag: tag.name in apart or "math" in classes(tag))
        if inside is None and type(text) is NavigableString:  # no comment
            words.append(text)
    folds = page.select("div.cell details.hide > summary")
    return {
        "text": " ".join(words),
        "code": [pre.get_text() for pre in page.select("pre")],
        "folds": [(shut(fold), fold.parent.has_attr("open")) for fold in folds],
        "images": [(image["src"], image.get("alt", "")) for image in page.select("img")],
        "links": [link["href"] for link in page.select("a[href]")],
        "ids": [element["id"] for element in page.select("[id]")],
        "terms": [word.parent["href"] for word in page.select("a > .std-term")],
        "box": [link["href"] for link in page.select(".chapter-box a")],
        "boxes": len(page.select(".proof.admonition")),
        "exercises": len(page.select(".exercise.admonition")),
        "solutions": len(page.select(".solution.admonition")),
    }


def classes(tag):
    return tag.get("class") or []


def shut(fold):
    """The words of a fold while it is shut; those for when it is open follow them."""
    return fold.get_text().strip().partition("\n")[0].strip()


def inside(name, link):
    """The file of the book and the place in it that a link on a page leads to, if it does."""
    parts = urlsplit(urljoin(f"http://book/{name}.html", link))
    if parts.netloc != "book":
        return None, None
    return BOOK / (unquote(parts.path).lstrip("/") or "index.html"), unquote(parts.fragment)


@functools.cache
def anchors(path):
    return set(re.findall(r'\bid="([^"]+)"', path.read_text(encoding="utf-8")))


def source(name):
    cells = json.loads((ROOT / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )


# --- what every page owes its reader ----------------------------------------------------------


@some_pages
def test_page_needs_no_network(opened, name):
    assert opened(name)["outside"] == []


@some_pages
def test_no_error_in_the_console(opened, name):
    assert opened(name)["complaints"] == []


@some_pages
def test_formulas_are_set(opened, name):
    seen = opened(name)
    html = (BOOK / f"{name}.html").read_text(encoding="utf-8")
    wanted = len(re.findall(r'class="(?:amsmath )?math notranslate', html))
    assert seen["math_errors"] == []
    assert seen["formulas"] == wanted, (
        f"{wanted} formulas in the page's source, {seen['formulas']} set"
    )


@every_page
def test_nothing_raw_is_left(site, name):
    seen = written(name)
    raw = re.compile(
        # TeX and fences; roles and directives; outputs without words, control characters
        r".{0,30}(?:\\[a-zA-Z]+|\\[()\[\]]|\$|:::|```"
        r"|\{(?:prf:\w+|doc|eq|ref|numref|cite:?\w*|download|exercise|solution)[^}]*\}"
        r"|<(?:Figure|Axes)[ :]|[\x00-\x08\x0b-\x1f]).{0,30}"
    )
    assert raw.findall(seen["text"]) == []
    assert [
        line
        for code in seen["code"]
        for line in code.splitlines()
        if re.match(r"\s*#\s?\|", line)
    ] == []


@some_pages
def test_code_can_be_copied(opened, name):
    assert sum(opened(name)["uncopied"]) == 0


@every_notebook
def test_a_folded_docstring_is_copied_with_the_code(site, name):
    cells = json.loads((ROOT / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    told = {
        "\n".join(line for line in code.splitlines() if not line.startswith("#|"))
        for code in codes
        if re.search(r"(?m)^ +-{4,}$", code)
    }
    shown = {code.strip() for code in written(name)["code"]}
    assert {code.strip() for code in told} <= shown


@some_pages
def test_no_code_is_cut_off(opened, name):
    """Lines of 96 columns fit at 1280 pixels; what is folded is opened for this."""
    seen = opened(name)["cells"]
    assert seen["seen"] == seen["cells"] and seen["cut"] == []


@some_pages
def test_images_are_drawn(opened, name):
    assert opened(name)["undrawn"] == []


@every_page
def test_images_are_there_and_described(site, name):
    images = written(name)["images"]
    files = [inside(name, image)[0] for image, _ in images if not image.startswith("data:")]
    assert [file for file in files if file is not None and not file.is_file()] == []
    useless = re.compile(r"\s*$|<|\S+\.(?:png|svg|jpe?g|gif|webp)$")
    assert [image for image in images if useless.match(image[1])] == []


@every_page
def test_links_lead_somewhere(site, name):
    dead = []
    for link in sorted(set(written(name)["links"])):
        target, place = inside(name, link)
        if target is None:
            continue
        if not target.is_file():
            dead.append(link)
        elif place and place not in anchors(target):
            dead.append(f"{link} (no such place on the page)")
    assert dead == []


@every_page
def test_no_id_stands_twice(site, name):
    ids = written(name)["ids"]
    assert sorted({i for i in ids if ids.count(i) > 1}) == []


def test_the_parse_finds_what_is_wrong(tmp_path, monkeypatch):
    """The control: a dead link, an image without words, an id that is there twice, raw TeX."""
    html = """<body><a href="other.html">a</a><a href="#nowhere">b</a>
    <p id="p"></p><p id="p"></p>
    <img src="gone.png"><p>\\alpha <span class="math">\\beta</span><code>$</code></p></body>"""
    (tmp_path / "page.html").write_text(html)
    monkeypatch.setattr("test_browser.BOOK", tmp_path)
    for test in (
        test_links_lead_somewhere,
        test_images_are_there_and_described,
        test_no_id_stands_twice,
        test_nothing_raw_is_left,
    ):
        with pytest.raises(AssertionError):
            test(None, "page")
    seen = written("page")
    assert seen["ids"] == ["p", "p"] and seen["images"] == [("gone.png", "")]
    assert "alpha" in seen["text"] and "beta" not in seen["text"]


@every_page
def test_buttons_open_the_plain_copy(site, name):
    path = CONFIG["repository"]["url"].removeprefix("https://github.com")
    copies = {page: f"{path}/blob/plain/{page.split('/')[-1]}.ipynb" for page in NOTEBOOKS}
    hosts = {
        "https://colab.research.google.com/github": "colab",
        "https://kaggle.com/kernels/welcome?src=https://github.com": "kaggle",
    }
    for prefix, host in hosts.items():
        found = {link for link in written(name)["links"] if host in urlsplit(link).netloc}
        assert found <= {prefix + copy for copy in copies.values()}
        if name in NOTEBOOKS:
            assert found == {prefix + copies[name]}


@every_notebook
def test_numbers_of_the_plain_copy_are_those_of_the_book(site, name):
    page = (BOOK / f"{name}.html").read_text(encoding="utf-8")
    for called, address in PLAIN.labels.values():
        if address.startswith(f"{plain.BOOK}{name}.html#"):
            box = page.split(f'id="{address.split("#")[1]}"')[1]
            number = re.search(r'class="(?:caption-number|eqno)">\s*([^<]+)', box)[1]
            assert number.strip() == called


@some_pages
def test_one_search_and_no_empty_bar(opened, name):
    # the search page has its own field
    seen, expected = (
        opened(name),
        2 if name == "search" else 1,
    )
    assert (seen["searches"], seen["phone_searches"]) == (expected, expected)
    assert seen["bar"] == 0


@some_pages
def test_page_fits_a_phone(opened, name):
    phone = opened(name)["phone"]
    assert phone["width"] <= 391
    assert phone["beyond"] == [], "beyond the right edge, and not inside a box that scrolls"


@some_pages
def test_dark_mode(opened, name):
    night = opened(name)["night"]
    assert night["theme"] == "dark"
    assert night["page"] < 0.2 and night["text"] > 0.6, night
    assert night.get("figure", 1.0) > 0.7, f"the figures' background is dark: {night}"


# --- what a chapter owes its reader -----------------------------------------------------------


@every_notebook
def test_boxes_exercises_and_solutions(site, name):
    seen, text = written(name), source(name)
    assert seen["boxes"] == len(re.findall(r"(?m)^:{3,}\{prf:", text))
    assert seen["exercises"] == len(re.findall(r"(?m)^[:`]{3,}\{exercise(?:-start)?\}", text))
    solutions = re.findall(r"(?m)^[:`]{3,}\{solution(?:-start)?\}", text)
    assert seen["solutions"] == len(solutions)


@some_notebooks
def test_solutions_are_folded(opened, name):
    seen = opened(name)["solutions"]
    assert len(seen) == written(name)["solutions"] and all(seen)


@every_notebook
def test_imports_are_folded(site, name):
    """A page opens with its idea: its imports are behind a line that says so."""
    cells = json.loads((ROOT / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    tags = {cell["id"]: cell["metadata"].get("tags", ()) for cell in cells}
    imports = [
        tags[i] for i in ("imports", "setup") if i in tags and "remove-cell" not in tags[i]
    ]
    assert all("hide-input" in found for found in imports), "tag them `hide-input`"
    words = [words for words, _ in written(name)["folds"]]
    assert words.count("Imports") in range(bool(imports), len(imports) + 1)  # some are joined
    assert set(words) <= {"Imports", "Show the code"}
    assert not any(is_open for _, is_open in written(name)["folds"])


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_has_theorems_and_exercises(site, name):
    seen = written(name)
    assert seen["boxes"] >= 2 and seen["exercises"] >= 1 and seen["solutions"]


@every_page
def test_the_script_of_explorers_is_loaded_where_they_are(name):
    page = soup(name)
    assert len(page.select('script[src*="explorers.js"]')) == bool(page.select(".explorer"))


@pytest.mark.parametrize("name", PLAIN.explorers)
def test_an_explorer_moves(site, browser, name):
    """On a phone, in the dark, by keyboard; tests/test_explorers.py tries every control."""
    page, outside = browser.new_page(viewport={"width": 390, "height": 844}), []
    page.on("request", lambda r: r.url.startswith((site, "data:")) or outside.append(r.url))
    page.emulate_media(color_scheme="dark")
    page.goto(site + PLAIN.explorers[name].removeprefix(plain.BOOK))
    figure = page.locator(f"#explorer-{name} figure.explorer")
    figure.scroll_into_view_if_needed()
    panels = figure.locator(".panels")
    panels.locator("svg *").first.wait_for(state="attached")
    before = panels.inner_html()
    figure.locator("input[type=range], input[type=radio]").first.focus()
    page.keyboard.press("ArrowRight")
    assert panels.inner_html() != before and outside == []
    page.close()


@pytest.mark.parametrize("name", PLAIN.explorers)
def test_a_picture_stands_for_an_explorer_without_scripts(site, browser, name):
    page = browser.new_page(java_script_enabled=False)
    page.goto(site + PLAIN.explorers[name].removeprefix(plain.BOOK))
    picture = page.locator(f"#explorer-{name} figure.explorer img")
    assert picture.bounding_box()["height"] > 100 and len(picture.get_attribute("alt")) > 40
    assert page.locator(f"#explorer-{name} svg").count() == 0
    page.close()


def test_a_picture_stands_for_a_running_explorer_on_paper(site, browser):
    page = browser.new_page()
    page.goto(f"{site}nbs/32_swin.html")
    picture, stage = (page.locator(f"figure.explorer > {part}") for part in ("img", ".stage"))
    stage.wait_for()
    assert not picture.is_visible()
    page.emulate_media(media="print")
    assert picture.is_visible() and not stage.is_visible()
    page.close()


def test_a_solution_unfolds(site, browser):
    name = next((name for name in CHAPTERS if "{solution" in source(name)), None)
    if name is None:
        pytest.skip("no chapter has a solution yet")
    page = browser.new_page()
    page.goto(f"{site}{name}.html")
    solution = page.locator(".solution.admonition").first
    assert solution.bounding_box()["height"] < 80
    solution.locator(".admonition-title").first.click()
    page.wait_for_function(
        "document.querySelector('.solution.admonition').getBoundingClientRect().height > 80"
    )
    page.close()


def test_a_docstring_unfolds(site, browser):
    """Shut it has its first lines, on paper too; all of its lines once it is opened."""
    page = browser.new_page()
    page.goto(f"{site}nbs/10_attention.html")
    box = page.locator("pre", has_text="def attention_weights").last
    box.scroll_into_view_if_needed()
    fold, height = box.locator("details.docstring"), box.bounding_box()["height"]
    assert "The weights softmax(QKᵀ/√d_k" in box.inner_text()
    assert "As `attention` does" not in box.inner_text()
    fold.locator("summary").press("Enter")
    assert "As `attention` does" in box.inner_text()
    assert box.bounding_box()["height"] > height + 100
    page.emulate_media(media="print")
    assert not fold.is_visible()
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "name",
    ["book/index", "nbs/92_plot", "book/glossary", "book/theorems", "book/speeds", "search"],
)
def test_axe_finds_no_serious_violation(site, browser, name, scheme):
    """One page of each kind with its colours, which take most of a minute on a chapter."""
    # else a color may be on its way from one scheme to the other
    page = browser.new_page(color_scheme=scheme, reduced_motion="reduce")
    page.goto(f"{site}{name}.html")
    assert violations(page, colours=True) == []
    page.close()


@some_pages
def test_axe_finds_no_serious_violation_but_for_colours(opened, name):
    pytest.importorskip("axe_playwright_python")
    assert opened(name)["violations"] == []


def test_axe_finds_a_picture_without_words(browser):
    """The control: what is left out above leaves this in."""
    page = browser.new_page()
    page.set_content("<pre>code</pre><img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>")
    assert "image-alt" in [line.split(":")[0] for line in violations(page, colours=False)]
    page.close()


class Host(http.server.SimpleHTTPRequestHandler):
    """The book below a path, as its host serves it: a missing page shows 404.html."""

    base = "/attnlib/"

    def log_message(self, *arguments):
        pass

    def translate_path(self, path):
        return super().translate_path("/" + path.removeprefix(self.base))

    def send_error(self, code, message=None, explain=None):
        page = (BOOK / "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)


@contextlib.contextmanager
def hosted():
    """The address of the book's first folder while it is served."""
    handler = functools.partial(Host, directory=str(BOOK))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}{Host.base}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("width", [1280, 390])
def test_page_404_works_at_any_depth(site, browser, width):
    """As a host serves it: in the place of any page that is missing."""
    page, dead = browser.new_page(viewport={"width": width, "height": 800}), []
    with hosted() as book:
        page.on("response", lambda r: r.status >= 400 and dead.append(r.url))
        lost = f"{book}nbs/deeper/no-such-page.html"
        assert page.goto(lost).status == 404
        assert dead == [lost]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        family = page.locator("article h1").evaluate("e => getComputedStyle(e).fontFamily")
        assert family.startswith("system-ui")  # of book.css
        page.locator("article a", has_text="first page").click()
        assert page.url == f"{book}book/index.html"
        page.goto(lost)
        page.locator("article a", has_text="search").click()
        page.locator("main input[type=search]").fill("softmax")
        page.keyboard.press("Enter")
        page.wait_for_selector("#search-results li a", timeout=60_000)
        assert page.url.startswith(f"{book}search.html?q=softmax")
    page.close()


# --- how soon it shows ------------------------------------------------------------------------


@every_page
def test_page_loads_what_it_needs(site, name):
    page = soup(name)
    scripts = {Path(urlsplit(s["src"]).path).name: s for s in page.select("script[src]")}
    assert "fontawesome.js" not in scripts
    assert page.select('i[class*="fa-"], span[class*="fa-"]') == []
    assert all(script.has_attr("defer") for script in scripts.values())
    assert ("searchindex.js" in scripts) == (name == "search")
    formulas = bool(page.select(".math"))
    assert {"startup.js" in scripts, "formulas.js" in scripts} == {formulas}
    late = [image.get("loading") == "lazy" for image in page.select("article img")]
    assert late == [name != "book/index"] * len(late)


def test_formulas_in_view_come_first(site, browser):
    """At the top of a page the first; where one arrives further down, others."""
    first_set = """() => new Promise(done => new MutationObserver((_, observer) => {
      const formulas = [...document.querySelectorAll("article .math")];
      const found = formulas.findIndex(formula => formula.querySelector("mjx-container"));
      if (found >= 0) { observer.disconnect(); done(found); }
    }).observe(document, {childList: true, subtree: true}))"""
    page = browser.new_page()
    page.add_init_script(f"window.firstSet = ({first_set})()")
    page.goto(f"{site}nbs/51_flash.html", wait_until="commit")
    assert page.evaluate("firstSet") == 0
    page.goto("about:blank")
    page.goto(f"{site}nbs/51_flash.html#exercises", wait_until="commit")
    assert page.evaluate("firstSet") > 100
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_boxes_of_the_map_of_ideas_stand_apart(site, browser, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(f"{site}book/index.html")
    boxes = [box.bounding_box() for box in page.locator("nav.ideas ol ol li").all()]
    assert len(boxes) == len(CHAPTERS)
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            aside = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
            assert aside or a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"]
    page.close()


@every_page
def test_head_describes_the_page(site, name):
    page = (BOOK / f"{name}.html").read_text(encoding="utf-8")
    if name not in ("genindex", "py-modindex", "search"):
        head = BeautifulSoup(page, "html.parser").head
        for tag in ('name="description"', 'property="og:title"', 'property="og:image"'):
            assert len(head.select(f"meta[{tag}]")) == 1, tag
        assert f"{CONFIG['html']['baseurl']}{name}.html</loc>" in (
            BOOK / "sitemap.xml"
        ).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words, wanted",
    [
        ("Saturation", "nbs/10_attention.html#thm-saturation"),
        ("Gumbel", "nbs/41_beit.html#thm-gumbel"),
        ("number of heads", "book/glossary.html#h-number-of-heads"),
    ],
)
def test_search_finds_theorems_and_symbols_by_name(site, browser, words, wanted):
    page = browser.new_page()
    page.goto(f"{site}search.html?q={words.replace(' ', '+')}")
    # the results come one by one, and the quotations between them take their time
    page.wait_for_selector(f'#search-results li a[href*="{wanted}"]', timeout=60_000)
    page.close()


def test_search_finds_a_function(site, browser):
    page = browser.new_page()
    page.goto(f"{site}search.html?q=causal_mask")
    page.wait_for_selector('#search-results li a[href*="attention"]', timeout=60_000)
    page.wait_for_timeout(1000)  # the quotations follow
    quoted = page.locator("#search-results").inner_text()
    assert "\\" not in quoted and "Colab" not in quoted
    page.close()


def test_first_page_leads_to_every_notebook(site):
    links = {inside("book/index", link)[0] for link in written("book/index")["links"]}
    wanted = [*NOTEBOOKS, *(page for page in PAGES if page.startswith("book/api/"))]
    assert [page for page in wanted if BOOK / f"{page}.html" not in links] == []


def test_example_on_the_first_page_runs():
    code = re.search(
        r"```python\n(.*?)```", (ROOT / "book" / "index.md").read_text("utf-8"), re.DOTALL
    )[1]
    exec(code, {})


def test_formulas_of_the_plain_copies_are_set(site, browser):
    """The copies write some signs otherwise, and their formulas have tags."""
    signs = [r"\tag", *(sign for sign in plain.TEX.values() if sign.startswith("\\"))]
    written = set()
    for chapter in PLAIN.chapters:
        cells = plain.plain(chapter.page, PLAIN)["cells"]
        text = "\n\n".join(plain.source(cell) for cell in cells if "outputs" not in cell)
        for found in plain.MATH.finditer(text):
            tex = found["display"] or found["inline"] or ""
            if any(sign in tex for sign in signs):
                written.add((tex, bool(found["display"])))
    assert len(written) > 300
    page = browser.new_page()
    page.goto(f"{site}nbs/10_attention.html")
    errors = """async formulas => {
      await MathJax.startup.promise;
      return formulas.filter(([tex, display]) =>
        MathJax.tex2chtml(tex, {display}).querySelector("mjx-merror, [data-mjx-error]"));
    }"""
    assert page.evaluate(errors, sorted(written)) == []
    assert len(page.evaluate(errors, [[r"\nothing", False], ["x", True]])) == 1  # control
    page.close()


# --- by touch, by keys, by ear ----------------------------------------------------------------


@pytest.fixture
def phone(site, browser):
    """A function that opens a page on a phone, with all its formulas set."""
    context = browser.new_context(
        viewport={"width": 375, "height": 812}, is_mobile=True, has_touch=True
    )

    def visit(name):
        page = context.new_page()
        page.goto(f"{site}{name}.html")
        page.evaluate("async () => { if (window.MathJax) await MathJax.startup.promise; }")
        return page

    yield visit
    context.close()


def test_a_page_ends_with_its_footer(phone):
    """What is folded takes no room below it."""
    page = phone("nbs/10_attention")
    below = """() => document.scrollingElement.scrollHeight - scrollY
      - document.querySelector("footer.bd-footer-content").getBoundingClientRect().bottom"""
    assert page.evaluate(below) < 3


@pytest.mark.parametrize("name", ["nbs/22_decoding", "nbs/32_swin"])
def test_a_wide_equation_has_the_whole_column(phone, name):
    """Beside its number it would end early, as if it were complete."""
    narrow = """() => [...document.querySelectorAll("div.math:has(.eqno)")].filter(equation => {
      const set = equation.querySelector("mjx-container");
      return set.scrollWidth > set.clientWidth && set.clientWidth < equation.clientWidth - 1;
    }).map(equation => equation.id)"""
    page = phone(name)
    assert page.evaluate(narrow) == []
    assert page.locator("div.math.wide .eqno").count()


@every_notebook
def test_no_line_begins_with_the_punctuation_behind_a_formula(site, name):
    html = (BOOK / f"{name}.html").read_text(encoding="utf-8")
    formula = r'<span class="math notranslate nohighlight">[^<]*</span>'
    html, kept = re.subn(rf'<span class="unbroken">\S?{formula}[^<]*</span>', "", html)
    assert re.findall(rf"{formula}[,.;:?!)][^<]{{,20}}", html) == []
    assert kept or name not in CHAPTERS


def test_a_tap_on_the_contents_shows_the_section(phone):
    page = phone("nbs/10_attention")
    page.locator("button.secondary-toggle").tap()
    contents = page.locator("#pst-secondary-sidebar-modal")
    contents.locator("a", has_text="The softmax").tap()
    page.wait_for_url("**#the-softmax")
    assert not contents.is_visible()
    assert 0 < page.locator("#the-softmax h2").bounding_box()["y"] < 400


def test_a_tap_enlarges_a_figure(phone):
    page = phone("nbs/10_attention")
    figure = page.locator(".cell_output img").first
    before = figure.bounding_box()["width"]
    figure.tap()
    assert figure.bounding_box()["width"] > 2 * before
    assert page.evaluate("document.scrollingElement.scrollWidth") == 375
    figure.tap()
    assert figure.bounding_box()["width"] == before


def test_buttons_are_large_enough_for_a_finger(phone):
    page = phone("nbs/10_attention")
    buttons = page.locator(
        ".bd-header-article .article-header-buttons > :is(a, button), details.hide > summary"
    )
    boxes = [button.bounding_box() for button in buttons.all()]
    assert len([box for box in boxes if box]) > 10
    assert [box for box in boxes if box and min(box["height"], box["width"]) < 36] == []


@pytest.mark.parametrize("name", ["book/index", "search"])
def test_the_glass_stands_beside_the_words_of_a_search(phone, name):
    page = phone(name)
    if name == "book/index":
        page.locator("button.search-button__button:visible").first.tap()
    form = page.locator("form.bd-search:visible").first
    glass, field = form.locator("svg").bounding_box(), form.locator("input").bounding_box()
    assert glass["x"] + glass["width"] <= field["x"]


@every_page
def test_buttons_say_what_they_open(site, name):
    page = soup(name)
    called = [e.get("aria-label") or e.get("title", "") for e in page.select("button, summary")]
    assert [words for words in called if "oggle" in words] == []
    if page.select("button.secondary-toggle"):
        assert page.select(".bd-sidebar-secondary")
    assert all(dialog.get("aria-label") for dialog in page.select("dialog"))


def test_a_reader_with_keys_sees_where_they_are(site, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{site}nbs/10_attention.html")
    page.keyboard.press("Tab")
    buttons = page.locator(".bd-header-article .btn:visible, .solution button.toggle-button")
    assert buttons.count() > 10
    for button in buttons.all():
        button.focus()
        assert button.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    names = [b.get_attribute("aria-label") for b in page.locator("button.toggle-button").all()]
    assert names and all(name.startswith("Solution to Exercise 1.") for name in names)
    page.close()


# --- on paper ---------------------------------------------------------------------------------


def test_the_pdf_holds_every_page_in_order():
    found = [name for name, *_ in pdf.pages(BOOK)]
    assert sorted(found) == sorted(PAGES[1:])
    assert [name for name in found if name in NOTEBOOKS] == NOTEBOOKS


def test_pages_print_as_one_pdf(site, browser, tmp_path):
    """Two short chapters, one of which links to the other and to pages that are left out."""
    said, names = [], ("nbs/91_train", "nbs/96_recipes")
    wanted = [(name, "Tools", 0) for name in names]
    pdf.make(browser, site, wanted, say=said.append).write(tmp_path / "two.pdf")
    assert (tmp_path / "two.pdf").stat().st_size < 2e6
    book = pdf.PdfReader(tmp_path / "two.pdf")
    labels, pages = book.page_labels, book.pages
    assert labels[:3] == ["i", "ii", "1"] and len(pages) > 12

    def titles(outline):
        for item in outline:
            yield from titles(item) if isinstance(item, list) else [item]

    number = book.get_destination_page_number
    marks = {item.title: number(item) for item in titles(book.outline)}
    assert marks["Training"] == 2 and marks["Recipes"] > marks["Training"]
    for title in ("Checkpoints", "Recipes"):
        assert title in pages[marks[title]].extract_text()
    contents = " ".join(pages[1].extract_text().split())
    assert f"Recipes {labels[marks['Recipes']]}" in contents
    heads = re.compile(r"\A(?:.*\n)?\d+\n")  # title, part and number of a page
    whole = " ".join(" ".join(heads.sub("", page.extract_text()) for page in pages).split())
    whole = unicodedata.normalize("NFKC", whole)  # "fi" may be one sign
    plainly = re.compile(r"(?m)(?<=[.?] )[A-Z][a-z ,]+[.?](?= |$)")
    sentences = [sentence for name in names for sentence in plainly.findall(source(name))]
    missing = [s for s in sentences if s not in whole]  # the end of a page may cut one
    assert len(sentences) > 20 and len(missing) <= len(sentences) // 10, missing
    links = [link.get_object() for page in pages for link in page.get("/Annots", ())]
    inner = [link["/Dest"][0].get_object() for link in links if "/Dest" in link]
    assert pages[marks["Recipes"]] in inner and all(page in list(pages) for page in inner)
    outer = [link["/A"]["/URI"] for link in links if "/A" in link]
    assert any(address.startswith(f"{pdf.WEB}nbs/") for address in outer)
    assert not any(site in address for address in outer)
    assert len(said) == len(names), said  # nothing is wider than the paper


def test_what_is_wider_than_the_paper_is_seen(browser):
    page = browser.new_page(viewport={"width": pdf.WIDTH, "height": 900})
    page.set_content("<article><p>Narrow.</p></article>")
    assert page.evaluate(pdf.BEYOND) == []
    page.set_content(f"<article><p style='width: {pdf.WIDTH + 9}px'>Wide.</p></article>")
    assert len(page.evaluate(pdf.BEYOND)) == 1
    page.close()


# --- the reference and the chapters lead to each other ----------------------------------------


@pytest.mark.parametrize("chapter", chapters.modules(), ids=lambda chapter: chapter.module)
def test_each_name_is_linked_to_its_chapter_and_back(chapter):
    pages = [BOOK / f"{name}.html" for name in (f"book/api/{chapter.module}", chapter.page)]
    if not all(page.exists() for page in pages):
        missing(f"no {pages[0]}: make book")
    reference, page = (path.read_text(encoding="utf-8") for path in pages)
    for name in chapters.public_names(ROOT / "attnlib" / f"{chapter.module}.py"):
        entry = f"attnlib.{chapter.module}.{name}"
        _, at, after = reference.partition(f'id="{entry}"')
        link = re.search(r'In the chapter: <a[^>]* href="\.\./\.\./([^"#]+)#?([^"]*)"', after)
        assert at and link[1] == f"{chapter.page}.html", name
        assert not link[2] or f'id="{link[2]}"' in page, name
        assert f'href="../book/api/{chapter.module}.html#{entry}"' in page, name


def soup(name):
    return BeautifulSoup((BOOK / f"{name}.html").read_text(encoding="utf-8"), "html.parser")


def test_names_in_docstrings_are_links_and_other_words_code(site):
    links = {a["href"] for a in soup("book/api/swinv2").select("a:has(> code.py-obj)")}
    assert {"swin.html#attnlib.swin.SwinBlock", "#attnlib.swinv2.log_coordinates"} <= links
    for chapter in chapters.modules():
        words = soup(f"book/api/{chapter.module}").select("code.py-obj")
        assert [word.text for word in words if word.parent.name != "a"] == [], chapter.module


def test_words_of_the_glossary_lead_to_it(site):
    entries, used = {dt["id"] for dt in soup("book/glossary").select("dl.glossary dt")}, set()
    for name in NOTEBOOKS:
        links = written(name)["terms"]
        targets = [link.removeprefix("../book/glossary.html#") for link in links]
        assert len(set(targets)) == len(targets), f"{name} links a word twice"
        used |= set(targets)
    assert used <= entries and len(used) > 0.6 * len(entries)


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_box_of_a_chapter_leads_to_the_notation(site, name):
    assert "../book/glossary.html#notation" in written(name)["box"]
    assert written("book/glossary")["ids"].count("notation") == 1
