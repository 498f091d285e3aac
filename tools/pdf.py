"""The whole book as one PDF: `make pdf`, or `python -m tools.pdf` after `make book`.

Chromium prints the pages of the built book one by one, in the order of _toc.yml: formulas set,
solutions unfolded, and what is wide scaled to the width of the paper. Each begins at the page
number after the last. Then the title page and the contents are printed, whose numbers are known
by now, and all is joined. Parts, chapters and sections become bookmarks. Links between chapters
lead to a page of the PDF; what it does not hold is linked on the web. How a page looks on paper
is said in _static/book.css, under `@media print`.
"""

import argparse
import contextlib
import datetime
import functools
import html
import http.server
import io
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag

import yaml
from pypdf import PdfReader, PdfWriter
from pypdf.constants import PageLabelStyle
from pypdf.generic import (
    ArrayObject,
    DictionaryObject,
    Fit,
    FloatObject,
    NameObject,
    NullObject,
    TextStringObject,
)

ROOT = Path(__file__).resolve().parent.parent
WEB = yaml.safe_load((ROOT / "_config.yml").read_text("utf-8"))["html"]["baseurl"]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
POINTS = 72 / 25.4  # of a millimetre
TOP, SIDE, BOTTOM = 20, 21, 20  # margins of an A4 page, in millimetres
WIDTH = round((210 - 2 * SIDE) * 96 / 25.4)  # of the text, in pixels of CSS

PAPER = """
@page {{
  size: A4;
  margin: {top}mm {side}mm {bottom}mm;
  @top-left {{ content: {left}; {face} }}
  @top-right {{ content: {right}; {face} }}
  @bottom-center {{ content: counter(page, {style}); {face} }}
}}
@page :first {{ @top-left {{ content: none }} @top-right {{ content: none }} {first} }}
html {{ counter-reset: page {before}; }}
"""
FACE = (
    "font: 8.5pt 'Noto Sans', 'DejaVu Sans', sans-serif; color: #55606b; white-space: nowrap;"
)

# Make a page fit for paper. Returns its headings, [[level, text, id], ...].
PREPARE = """async () => {
  document.documentElement.dataset.theme = "light";
  if (window.MathJax) await MathJax.startup.promise;
  const all = selector => [...document.querySelectorAll(selector)];
  const useless = "#jb-print-docs-body, mjx-assistive-mml, a.headerlink, button, script";
  all(useless).forEach(element => element.remove());
  for (const fold of all("article details")) {
    if (fold.matches("div.cell details.hide") && fold.closest("div.cell").querySelector("img"))
      fold.remove();  // the code of a figure
    fold.open = true;
  }
  all(".toggle-hidden").forEach(fold => fold.classList.remove("toggle-hidden"));
  for (const image of document.images) image.loading = "eager";
  await Promise.all([...document.images].map(image => image.decode().catch(() => {})));
  await document.fonts.ready;

  const shrink = (element, share) => {
    const size = parseFloat(getComputedStyle(element).fontSize);
    element.style.fontSize = `${size * share}px`;
  };
  all("span.math.wide").forEach(formula => formula.classList.remove("wide"));
  for (const formula of all("article mjx-container")) {
    const column = formula.closest("p, li, td, dd, section, div.math");
    const number = formula.parentElement.querySelector(".eqno")?.offsetWidth || 0;
    const space = column.clientWidth - 2 * number;
    formula.style.fontSize = "101%";  // its capitals beside those of the text
    const wide = formula.firstElementChild.offsetWidth;
    if (wide > space + 1) shrink(formula, Math.max(0.5, space / wide));
  }
  for (const pre of all("article pre")) {
    for (let i = 0; i < 4 && pre.scrollWidth > pre.clientWidth; i++)
      shrink(pre, Math.max(0.6, 0.99 * pre.clientWidth / pre.scrollWidth));
    if (pre.scrollWidth > pre.clientWidth) pre.style.whiteSpace = "pre-wrap";
  }
  for (const table of all("article table")) {
    const column = table.closest(".pst-scrollable-table-container, .output, section, div");
    for (let i = 0; i < 4 && table.offsetWidth > column.clientWidth + 1; i++)
      shrink(table, Math.max(0.6, 0.99 * column.clientWidth / table.offsetWidth));
  }

  const low = element => element.offsetHeight < 300;  // under a third of the page: not split
  all("article :is(.cell_input, .cell_output, .admonition, table, li)").filter(low)
    .forEach(element => element.classList.add("keep"));

  const links = document.createElement("div");  // a link to a place makes it known in the PDF
  links.style.display = "none";
  for (const element of all("article [id]")) {
    const link = document.createElement("a");
    link.href = "#" + element.id;
    links.append(link);
  }
  document.body.append(links);
  return all("article h1, article h2, article h3").map(h => [Number(h.tagName[1]),
    h.textContent.trim().replace(/\\s+/g, " "), h.id || h.closest("section, [id]")?.id]);
}"""

# What is still wider than the paper.
BEYOND = """() => [...document.querySelectorAll("article *")]
  .filter(element => element.getClientRects().length
    && element.getBoundingClientRect().right > innerWidth + 2)
  .slice(0, 3).map(element => element.outerHTML.slice(0, 160))"""


class Leaf(NamedTuple):
    """A page of the book in print."""

    name: str  # as "nbs/32_swin"
    part: str
    depth: int  # 0 for a chapter, 1 for a page below one
    first: int  # the page number at which it begins
    headings: list  # [(level, text, id)]
    places: dict  # {id: (page of the leaf from 0, height in points)}
    pdf: PdfReader
    beyond: list  # what reaches beyond the paper


# --- what is printed --------------------------------------------------------------------------


def below(entry, book, depth=0):
    """The pages of an entry of _toc.yml, as [(page, depth)], where the book has them."""
    pages = [(entry["file"], depth)] if "file" in entry else []
    if "glob" in entry:
        for page in sorted(book.glob(f"{entry['glob']}.html")):
            if 'http-equiv="refresh"' not in page.read_text("utf-8")[:200]:  # a former address
                pages.append((str(page.relative_to(book))[:-5], depth))
    for child in entry.get("sections", ()):
        pages += below(child, book, depth + 1)
    return [page for page in pages if (book / f"{page[0]}.html").exists()]


def pages(book):
    """The pages of the book in their order: [(page, part, depth)]."""
    found = {}
    for part in yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))["parts"]:
        for entry in part["chapters"]:
            for page, depth in below(entry, book):
                found.setdefault(page, (page, part.get("caption", ""), depth))
    return list(found.values())


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(book):
    """The address of the pages, served from this machine."""
    handler = functools.partial(Quiet, directory=book)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@contextlib.contextmanager
def chromium():
    """A headless browser: $CHROMIUM, `chromium` or `google-chrome`."""
    from playwright.sync_api import sync_playwright

    program = os.environ.get("CHROMIUM")
    program = program or shutil.which("chromium") or shutil.which("google-chrome")
    if not program:
        sys.exit("no Chromium: install it, or set CHROMIUM to its path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


def paper(left="", right="", style="decimal", before=0, first=""):
    """The style sheet of a page's paper: its margins, head and number."""
    quoted = [f'"{text}"' if text else "none" for text in (left, right)]
    return PAPER.format(
        top=TOP, side=SIDE, bottom=BOTTOM, left=quoted[0], right=quoted[1], style=style,
        before=before, first=first, face=FACE,
    )  # fmt: skip


def on_paper(page):
    """A PdfReader of what the browser's page shows, and {id: (page, height)}."""
    reader = PdfReader(io.BytesIO(page.pdf(prefer_css_page_size=True, print_background=True)))
    places = {}
    for name, place in reader.named_destinations.items():
        height = float(place["/Top"]) - TOP * POINTS  # Chromium forgets the margin
        number = reader.get_destination_page_number(place)
        places[unquote(name.removeprefix("/"))] = number, height + 6
    return reader, places


def leaf(browser, site, name, part, depth, first):
    """Print one page of the book."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
    page.emulate_media(media="print", color_scheme="light")
    page.route("**/explorers.js*", lambda route: route.abort())  # pictures do not move on paper
    page.goto(f"{site}{name}.html", wait_until="load")
    headings = page.evaluate(PREPARE)
    beyond = page.evaluate(BEYOND)
    title = headings[0][1] if headings else name
    page.add_style_tag(content=paper(title, part, before=first - 1))
    reader, places = on_paper(page)
    page.close()
    return Leaf(name, part, depth, first, headings, places, reader, beyond)


# --- the title page and the contents ----------------------------------------------------------


def line(site, leaf, level, text, place):
    number = leaf.first + leaf.places.get(place, (0, 0))[0]
    link = f"{site}{leaf.name}.html" + (f"#{place}" if place else "")
    text = f'<a href="{link}">{html.escape(text)}</a>'
    return f'<li class="level-{level}">{text}<span class="dots"></span>{number}</li>'


def contents(site, leaves):
    """The table of contents as lines of HTML."""
    lines, part = [], ""
    for leaf in leaves:
        if leaf.part != part:
            part = leaf.part
            lines.append(f'<li class="part">{html.escape(part)}</li>')
        for level, text, place in leaf.headings:
            if level == 1 or (level == 2 and not leaf.name.startswith("book/api/")):
                where = place if level == 2 else ""
                lines.append(line(site, leaf, level + leaf.depth, text, where))
    return "\n".join(lines)


def front(browser, site, leaves):
    """Print the title page and the contents."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / "attnlib/__init__.py").read_text())[1]
    day = datetime.date.today()
    text = f"""<!DOCTYPE html><html data-theme="light" lang="en"><head>
      <link rel="stylesheet" href="{site}_static/book.css"></head><body class="front">
      <section class="title-page"><img src="{site}_static/logo.svg" alt="">
      <h1>attnlib</h1><p class="subtitle">Attention, derived and measured</p>
      <p>A book whose code is a library</p>
      <p class="colophon">Version {version}, {day.day} {day:%B %Y}.
      On the web, where every page also runs: <a href="{WEB}">{WEB}</a>.
      This print unfolds the solutions of the exercises, and leaves out the code that draws
      the figures, which the web pages hold.
      Text and code are free under the Apache License 2.0.</p>
      </section><h2>Contents</h2><ul class="contents">{contents(site, leaves)}</ul>
      </body></html>"""
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
    page.emulate_media(media="print")
    page.set_content(text, wait_until="load")
    first = "@bottom-center { content: none }"
    page.add_style_tag(content=paper("Contents", style="lower-roman", first=first))
    reader, _ = on_paper(page)
    page.close()
    return reader


# --- one file ---------------------------------------------------------------------------------


def place(writer, number, height):
    """Where a link leads: a page of the file and a height on it."""
    where = [writer.pages[number].indirect_reference, NameObject("/XYZ")]
    return ArrayObject([*where, NullObject(), FloatObject(round(height, 1)), NullObject()])


def find(link, own, site, leaves):
    """The leaf and place in it that a link means; (None, its address on the web) if none."""
    if "/Dest" in link:
        return own, own.places.get(unquote(str(link["/Dest"]).removeprefix("/")))
    address, name = urldefrag(str(link["/A"]["/URI"]))
    leaf = leaves.get(address.removeprefix(site).removesuffix(".html"))
    if address.startswith(site) and leaf:
        return leaf, leaf.places.get(unquote(name), (0, 842.0)) if name else (0, 842.0)
    address = address.replace(site, WEB) + (f"#{name}" if name else "")
    return None, address


def redirect(writer, link, own, site, leaves, skipped):
    """Let a link lead to a page of this file, where it has the page, else to the web."""
    leaf, where = find(link, own, site, leaves)
    if leaf is None:
        action = {NameObject("/S"): NameObject("/URI")}
        action[NameObject("/URI")] = TextStringObject(where)
        link[NameObject("/A")] = DictionaryObject(action)
    elif where:
        link.pop("/A", None)
        number = skipped + leaf.first - 1 + where[0]
        link[NameObject("/Dest")] = place(writer, number, where[1])


def bookmarks(writer, leaves, skipped):
    """An outline of parts, chapters and sections."""
    parents, part = {}, ""
    writer.add_outline_item(title="Contents", page_number=1)
    for leaf in leaves:
        if leaf.part != part:
            part, number = leaf.part, skipped + leaf.first - 1
            parents = {0: writer.add_outline_item(title=part, page_number=number)}
        for level, text, name in leaf.headings:
            page, height = leaf.places.get(name, (0, 842.0))
            level = level + leaf.depth
            above = [parents[i] for i in sorted(parents) if i < level]
            parents = {i: item for i, item in parents.items() if i < level}
            parents[level] = writer.add_outline_item(
                title=text, page_number=skipped + leaf.first - 1 + page,
                parent=above[-1] if above else None, fit=Fit.xyz(top=height), is_open=False,
            )  # fmt: skip


def joined(opening, leaves, site):
    """All printed pages as one file."""
    writer, known = PdfWriter(), {leaf.name: leaf for leaf in leaves}
    owners = [None for _ in map(writer.add_page, opening.pages)]
    skipped = len(owners)
    for leaf in leaves:
        owners += [leaf for _ in map(writer.add_page, leaf.pdf.pages)]
    for page, own in zip(writer.pages, owners):
        for link in page.get("/Annots", ()):
            redirect(writer, link.get_object(), own, site, known, skipped)
    bookmarks(writer, leaves, skipped)
    writer.set_page_label(0, skipped - 1, style=PageLabelStyle.LOWERCASE_ROMAN)
    writer.set_page_label(skipped, len(owners) - 1, style=PageLabelStyle.DECIMAL)
    writer.page_mode = "/UseOutlines"
    writer.root_object[NameObject("/Lang")] = TextStringObject("en")
    title = "attnlib: attention, derived and measured"
    writer.add_metadata({"/Title": title, "/Author": "The attnlib authors", "/Subject": WEB})
    return writer


def make(browser, site, wanted, say=print):
    """The PDF of the pages `wanted`, [(page, part, depth)], that `site` serves."""
    leaves, first = [], 1
    for name, part, depth in wanted:
        started = time.perf_counter()
        leaves.append(leaf(browser, site, name, part, depth, first))
        count = len(leaves[-1].pdf.pages)
        seconds = time.perf_counter() - started
        say(f"{name}: pages {first} to {first + count - 1}, {seconds:.1f} s")
        for element in leaves[-1].beyond:
            say(f"  wider than the paper: {element}")
        first += count
    return joined(front(browser, site, leaves), leaves, site)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--book", type=Path, default=ROOT / "_build/html", help="built pages")
    parser.add_argument("--out", type=Path, default=ROOT / "_build/pdf/attnlib.pdf")
    parser.add_argument("names", nargs="*", help="print these pages only, as nbs/32_swin")
    arguments = parser.parse_args()
    wanted = [page for page in pages(arguments.book) if page[0] in arguments.names]
    if not arguments.names:
        wanted = pages(arguments.book)
    if not wanted:
        sys.exit(f"no such page in {arguments.book}: build the book with `make book`")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with served(arguments.book) as site, chromium() as browser:
        writer = make(browser, site, wanted)
    writer.write(arguments.out)
    size = arguments.out.stat().st_size / 1e6
    print(f"{arguments.out}: {len(writer.pages)} pages, {size:.1f} MB")


if __name__ == "__main__":
    main()
