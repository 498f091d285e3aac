"""What helps to find the book and one's way in it: cards, a map of the site, lists, a page 404.

Every page gets a description, and what social networks show of a link: title, description and a
picture, the page's first. A chapter's description is the sentence under its title. Pictures say
how large they are, so that text does not jump as they load. `sitemap.xml` lists the pages.
theorems.md says `<!-- theorems -->` where the list of all statements goes, and the search finds
each by its title.
"""

import json
import re
import runpy
from html import escape, unescape
from pathlib import Path
from urllib.parse import urlsplit

import imagesize
from sphinx.domains import Domain, ObjType

ROOT = Path(__file__).resolve().parents[2]
parts = runpy.run_path(str(ROOT / "book" / "_ext" / "chapters.py"))["parts"]
BOX = re.compile(r"(?ms)^:::\{prf:(?!proof)\w+\}[ ]*([^\n]*)\n:label:[ ]*(\S+)$")
KINDS = ("theorem", "proposition", "lemma", "corollary", "definition", "example")
HERE = "<!-- theorems -->\n"
PICTURE = re.compile(r'<img alt="([^"]+)"([^>]*) src="([./]*_images/([^"/]+))"')
COVER = ("_static/page.png", "A heat map: scanned digits attend to others of their kind")
ABOUT = (
    "Attention and the transformers built on it, derived, proved, implemented and measured: "
    "a book of notebooks, whose code is a library."
)
LOST = """<section><h1>No such page</h1>
<p>The page may have moved. The <a href="{home}">first page</a> lists all chapters, and the
<a href="search.html">search</a> knows every word of them.</p></section>"""


def words(markdown):
    """A sentence without its markup."""
    text = re.sub(r"\{\w+(?::\w+)?\}`([^`<]*?)(?:\s*<[^`]*)?`", r"\1", markdown)
    return " ".join(re.sub(r"[`*$]", "", text).split())


def described(root=ROOT):
    """{page: its description} of the chapters and the pages of their modules."""
    found = {"book/index": ABOUT}
    for _, some in parts(root):
        for chapter in some:
            found[chapter.page] = words(chapter.summary)
            if chapter.module:
                found[f"book/api/{chapter.module}"] = (
                    f"attnlib.{chapter.module}: {words(chapter.summary)}"
                )
    return found


def first_picture(body):
    """(file, alternative text) of the first picture of a page that networks can show."""
    for alt, _, _, name in PICTURE.findall(body):
        if name.endswith((".png", ".jpg")):
            return f"_images/{name}", unescape(alt)
    return COVER


def with_sizes(body, files):
    """The page's HTML with the width and height of its pictures; files: {name: path}."""

    def sized(found):
        alt, more, source, name = found.groups()
        width, height = imagesize.get(files[name]) if name in files else (-1, -1)
        if width < 0 or "width=" in more:
            return found[0]
        return f'<img alt="{alt}"{more} src="{source}" width="{width}" height="{height}"'

    return PICTURE.sub(sized, body)


def tags(title, text, address, picture, alt):
    """What a page's head says about it to search engines and social networks."""
    card = {
        "og:type": "article",
        "og:site_name": "attnlib",
        "og:title": title,
        "og:description": text,
        "og:url": address,
        "og:image": picture,
        "og:image:alt": alt,
    }
    named = {"description": text, "twitter:card": "summary_large_image"}
    lines = [f'<meta name="{key}" content="{escape(named[key])}" />' for key in named]
    lines += [f'<meta property="{key}" content="{escape(card[key])}" />' for key in card]
    return "\n".join(lines) + "\n"


def add_card(app, pagename, templatename, context, doctree):
    base = app.config.html_baseurl
    if doctree is not None:
        title = re.sub(r"<[^>]+>", "", context.get("title", "")) or "attnlib"
        text = app.finding.get(pagename, ABOUT)
        picture, alt = first_picture(context["body"])
        card = tags(title, text, f"{base}{pagename}.html", base + picture, alt)
        # the theme's own tag from the page's metadata would stand twice
        context["metatags"] = context.get("metatags", "") + card
        files = {name: Path(app.srcdir, path) for path, name in app.builder.images.items()}
        context["body"] = with_sizes(context["body"], files)


def statements(root=ROOT):
    """[(page, [(title, label), ...]), ...] of all theorems, propositions and the like."""
    found = []
    for _, some in parts(root):
        for chapter in some:
            cells = json.loads((root / f"{chapter.page}.ipynb").read_text("utf-8"))["cells"]
            texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
            if boxes := [box for text in texts for box in BOX.findall(text)]:
                found.append((chapter.page, boxes))
    return found


def listed(root=ROOT):
    """The list of all statements for theorems.md."""
    lines = []
    for page, boxes in statements(root):
        lines += ["", f"## {{doc}}`/{page}`", ""]
        lines += [f"- {{prf:ref}}`{label}`: {title}" for title, label in boxes]
    return "\n".join(lines) + "\n"


class Statements(Domain):
    """To the search theorems are objects like functions: a title leads to the box."""

    name, label = "statement", "Statements"
    object_types = {kind: ObjType(kind) for kind in KINDS}

    def get_type_name(self, type, primary=False):
        return type.lname

    def get_objects(self):
        boxes = getattr(self.env, "proof_list", {})
        for _, some in statements(Path(self.env.srcdir)):
            for title, label in some:
                if label in boxes:
                    box, name = boxes[label], words(title)
                    yield name, name, box["realtype"], box["docname"], box["ids"][0], 1


def begin(app):
    app.finding = described(Path(app.srcdir))


def fill_in(app, docname, source):
    if docname == "book/theorems":
        source[0] = source[0].replace(HERE, listed(Path(app.srcdir)))


def lost_page(app):
    yield (
        "404",
        {"title": "No such page", "body": LOST.format(home="book/index.html")},
        "page.html",
    )


def from_the_top(html, base):
    """The page 404 is shown at any address, so its relative links start from the book's own."""
    top = urlsplit(base).path
    links = r'\b(href|src|action|data-content_root)="(?![#/]|[a-z]+:)(?:\./)?'
    return re.sub(links, rf'\1="{top}', html)


def lead_home(app, problem):
    if problem is None and app.builder.name == "html":
        page = Path(app.outdir) / "404.html"
        html = from_the_top(page.read_text("utf-8"), app.config.html_baseurl)
        page.write_text(html, "utf-8")


def read_again(app, env, added, changed, removed):
    return {"book/theorems"} & set(env.found_docs)


def write_sitemap(app, problem):
    if problem is None and app.builder.name == "html":
        base = app.config.html_baseurl
        pages = [
            f"<url><loc>{base}{name}.html</loc></url>" for name in sorted(app.env.found_docs)
        ]
        (Path(app.outdir) / "sitemap.xml").write_text(
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
            + "\n".join(pages)
            + "\n</urlset>\n"
        )


def setup(app):
    app.add_domain(Statements)
    app.connect("builder-inited", begin)
    app.connect("source-read", fill_in)
    app.connect("env-get-outdated", read_again)
    app.connect("html-page-context", add_card)
    app.connect("html-collect-pages", lost_page)
    app.connect("build-finished", write_sitemap)
    app.connect("build-finished", lead_home)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
