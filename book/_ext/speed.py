"""What makes a page show soon: nothing that it does not need, and nothing that it waits for.

The last step of the build rewrites the pages, whoever wrote their parts:

- An icon becomes a drawing; without this, each page loads the theme's script of 1.5 MB which
  draws two thousand. The drawings are taken from that script.
- The index of the search is loaded where one searches, MathJax where formulas are.
- Scripts wait until the page is read (`defer`), pictures of chapters until they are near.
- Pictures say how large they are, so that text does not move as they arrive.

_static/formulas.js has MathJax set formulas in small steps, those in view first.
"""

import re
from pathlib import Path

import imagesize

FORMULAS = "formulas.js"
ICONS = Path("_static", "scripts", "fontawesome.js")
FAMILIES = {"fas": "fas", "fa-solid": "fas", "fab": "fab", "fa-brands": "fab", "far": "far"}
MATH = re.compile(r'class="(?:[^"]* )?math[ "]')

FAMILY = re.compile(r'\b\w+\("(fa[sbr])",\w+\)')
DRAWING = r'[{{,]"?{name}"?:\[(\d+),(\d+),\[[^\]]*\],"[0-9a-f]+","([^"]+)"\]'
ICON = re.compile(r'<(i|span) class="([^"]*\bfa-[^"]*)"([^>]*)></\1>')
SCRIPT = re.compile(r"<script\b([^>]*)>(.*?)</script>\n?", re.DOTALL)
SOURCE = re.compile(r'\bsrc="(?:[^"]*/)?([^"/?]+)(?:\?[^"]*)?"')
SEARCHING = ("searchtools.js", "language_data.js", "searchindex.js")
SETTING = re.compile(r"window\.(\w+) = ")
LATER = re.compile(r"\bDOCUMENTATION_OPTIONS\.")
SIZED = re.compile(r'<img\b[^>]*\bsrc="([./]*_images/[^":?#]+)"')
ARTICLE = re.compile(r"<article\b.*</article>", re.DOTALL)
PICTURE = re.compile(r"<img\b(?![^>]*\bloading=)")


def drawings(script):
    """A function: the width, height and path of an icon in the theme's script, or None."""
    families, start = {}, 0
    for found in FAMILY.finditer(script):
        families[found[1]] = families.get(found[1], "") + script[start : found.start()]
        start = found.end()

    def drawing(family, name):
        found = re.search(DRAWING.format(name=re.escape(name)), families.get(family, ""))
        return found and found.groups()

    return drawing


def with_drawings(html, drawing):
    """The page with drawings in the place of icons, as the theme's script would make them."""

    def drawn(found):
        _, classes, more = found.groups()
        names = classes.split()
        family = next((FAMILIES[name] for name in names if name in FAMILIES), "")
        names = [name for name in names if name not in FAMILIES]
        shapes = [drawing(family, name.removeprefix("fa-")) for name in names]
        shape = next((shape for shape in shapes if shape), None)
        if not shape:
            return found[0]
        width, height, path = shape
        more = re.sub(r'\s*\btitle="[^"]*"', "", more)  # the button has a name
        return (
            f'<svg class="icon {" ".join(names)}"{more} aria-hidden="true" '
            f'viewBox="0 0 {width} {height}"><path fill="currentColor" d="{path}"/></svg>'
        )

    return ICON.sub(drawn, html)


def with_waiting_scripts(html, unneeded):
    """The page without the scripts named, where others run in their order once it is read."""

    def waiting(found):
        said, code = found.groups()
        name = SOURCE.search(said)
        what = name or SETTING.match(code)
        if what and what[1] in unneeded:
            return ""
        if name and not re.search(r"\b(?:defer|async|type)\b", said):
            return f"<script defer{said}>{code}</script>\n"
        if not name and LATER.match(code):  # it uses one that waits, and modules wait too
            return f'<script type="module"{said}>{code}</script>\n'
        return found[0]

    return SCRIPT.sub(waiting, html)


def with_late_pictures(html):
    """The page whose pictures are loaded when they are near; above them stands text."""

    def late(article):
        return PICTURE.sub('<img loading="lazy" decoding="async"', article[0])

    return ARTICLE.sub(late, html)


def with_sizes(html, folder):
    """The page whose pictures say how large they are; the addresses start from a folder."""

    def sized(found):
        path = folder / found[1]
        width, height = imagesize.get(path) if path.is_file() else (-1, -1)
        if width < 0 or "width=" in found[0]:
            return found[0]
        return f'<img width="{width}" height="{height}"' + found[0].removeprefix("<img")

    return SIZED.sub(sized, html)


def lighter(html, path, drawing):
    """The HTML of the page at `path` without what it need not load or wait for."""
    html = with_drawings(html, drawing)
    unneeded = set() if path.name == "search.html" else set(SEARCHING)
    if not ICON.search(html):
        unneeded.add(ICONS.name)
    if not MATH.search(html):
        unneeded |= {"startup.js", FORMULAS, "MathJax"}
    if path.name != "index.html":  # which begins with a picture
        html = with_late_pictures(html)
    html = with_sizes(html, path.parent)
    return with_waiting_scripts(html, unneeded)


def lighten(app, problem):
    if problem is None and app.builder.name == "html":
        out = Path(app.outdir)
        drawing = drawings((out / ICONS).read_text("utf-8"))
        for page in app.env.found_docs | {"404", "genindex", "py-modindex", "search"}:
            path = out / f"{page}.html"
            if path.exists():
                html = path.read_text("utf-8")
                if (found := lighter(html, path, drawing)) != html:
                    path.write_text(found, "utf-8")


def load_script(app, pagename, templatename, context, doctree):
    """Before MathJax, whose start it changes; both are dropped from a page without formulas."""
    app.add_js_file(FORMULAS, priority=400)


def setup(app):
    app.connect("html-page-context", load_script)
    app.connect("build-finished", lighten, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
