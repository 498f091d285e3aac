"""The list of figures, and the place on a page to which a link to a figure leads.

A figure is the output of a cell that `attnlib.plot.show` gave a caption, or an `{explorer}`.
The first gets the id `figure-NAME`, where the cell's id is `NAME` or `NAME-figure`; the second
has an id. figures.md says `<!-- figures -->` where the list goes.
"""

import json
import re
import runpy
from html import unescape
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).resolve().parent.parent
parts = runpy.run_path(str(ROOT / "_ext" / "chapters.py"))["parts"]
HERE = "<!-- figures -->\n"
CAPTION = re.compile(r'(?s)<p class="caption"[^>]*>(.*?)</p>')
EXPLORER = re.compile(r"(?ms)^:::\{explorer\}[ ]*(\S+)\n:alt:[^\n]*\n(.*?)^:::[ ]*$")
SENTENCE = re.compile(r"(?s).+?[.?!][”\")]*(?=\s+[^a-z\s]|\s*$)")
SHORT = 30  # a sentence with fewer letters, such as "Recorded runs.", takes the next along


def beginning(caption):
    """The first sentence of a caption, and further ones until it says something."""
    found = ""
    for sentence in SENTENCE.findall(caption):
        if len(found) >= SHORT:
            break
        found += sentence
    return " ".join((found or caption).split())


def caption(cell):
    """The caption of the figure that a code cell drew, as Markdown, or an empty text."""
    for output in cell.get("outputs", ()):
        if found := CAPTION.search("".join(output.get("data", {}).get("text/html", ""))):
            return re.sub(r"([\\`*_$<>\[\]~{}])", r"\\\1", unescape(found[1]))
    return ""


def anchor(cell):
    return f"figure-{cell['id'].removesuffix('-figure')}"


def figures(page, root=ROOT):
    """[(anchor, caption), ...] of a notebook's figures, in its order."""
    found = []
    for cell in json.loads((root / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            found += [(anchor(cell), text)] if (text := caption(cell)) else []
        else:
            for name, text in EXPLORER.findall("".join(cell["source"])):
                found.append((f"explorer-{name}", text))
    return found


def label(page, place):
    """What a link in Markdown calls a figure: `[text](#label)`."""
    return f"{page.split('/')[-1]}-{place}".lower()


def listed(root=ROOT):
    """The list of all figures for figures.md."""
    lines = []
    for _, some in parts(root):
        for chapter in some:
            found = figures(chapter.page, root)
            if found:
                lines += ["", f"## {{doc}}`{chapter.page}`", ""]
            for place, text in found:
                lines.append(f"- [{beginning(text)}](#{label(chapter.page, place)})")
    return "\n".join(lines) + "\n"


# --- as an extension --------------------------------------------------------------------------


def change(app, docname, source):
    """Fill in the list; note in a notebook's cells which of them are figures."""
    if docname == "figures":
        source[0] = source[0].replace(HERE, listed(Path(app.srcdir)))
    elif app.env.doc2path(docname).endswith(".ipynb"):
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code" and caption(cell):
                cell["metadata"]["figure"] = anchor(cell)
        source[0] = json.dumps(notebook)


def name_figures(app, doctree):
    """Give each figure its id, and the id a label."""
    page, labels = app.env.docname, app.env.get_domain("std").anonlabels
    for node in doctree.findall(nodes.container):
        if place := node.get("cell_metadata", {}).get("figure"):
            node["ids"].append(place)
        for place in node["ids"]:
            if place.startswith(("figure-", "explorer-")):
                labels[label(page, place)] = page, place


def read_again(app, env, added, changed, removed):
    return {"figures"} & set(env.found_docs)


def setup(app):
    app.connect("source-read", change, priority=400)  # before directives of nbdev are taken out
    app.connect("doctree-read", name_figures)
    app.connect("env-get-outdated", read_again)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
