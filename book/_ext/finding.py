"""The list of all statements, their names in the search, and descriptions of the chapters.

theorems.md says `<!-- theorems -->` where the list goes. The search finds a statement by its
title. A chapter is described by the sentence under its title, for search engines and for links
that are shared; sphinxext-opengraph does the rest.
"""

import json
import re
import runpy
from pathlib import Path

from sphinx.domains import Domain, ObjType

ROOT = Path(__file__).resolve().parents[2]
parts = runpy.run_path(str(ROOT / "book" / "_ext" / "chapters.py"))["parts"]
BOX = re.compile(r"(?ms)^:::\{prf:(?!proof)\w+\}[ ]*([^\n]*)\n:label:[ ]*(\S+)$")
KINDS = ("theorem", "proposition", "lemma", "corollary", "definition", "example")
HERE = "<!-- theorems -->\n"


def words(markdown):
    """Return a sentence without its markup."""
    text = re.sub(r"\{\w+(?::\w+)?\}`([^`<]*?)(?:\s*<[^`]*)?`", r"\1", markdown)
    return " ".join(re.sub(r"[`*$]", "", text).split())


def statements(root=ROOT):
    """Return [(page, [(title, label), ...]), ...] of all boxes with a label."""
    found = []
    for _, some in parts(root):
        for chapter in some:
            cells = json.loads((root / f"{chapter.page}.ipynb").read_text("utf-8"))["cells"]
            texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
            boxes = BOX.findall("\n\n".join(texts))
            if boxes:
                found.append((chapter.page, boxes))
    return found


def listed(root=ROOT):
    """Write the list of all statements for theorems.md."""
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


def described(source):
    """Return a notebook, as JSON, that is described by the sentence under its title."""
    notebook = json.loads(source)
    summary = re.search(r"(?m)^> (.+)", "".join(notebook["cells"][0]["source"]))
    if summary:
        text = words(summary[1])
        notebook["metadata"]["og:description"] = text
        notebook["metadata"]["myst"] = {"html_meta": {"description": text}}
    return json.dumps(notebook)


def read(app, docname, source):
    if docname == "book/theorems":
        source[0] = source[0].replace(HERE, listed(Path(app.srcdir)))
    elif docname.startswith("nbs/"):
        source[0] = described(source[0])


def read_again(app, env, added, changed, removed):
    return {"book/theorems"} & set(env.found_docs)


def setup(app):
    app.add_domain(Statements)
    app.connect("source-read", read)
    app.connect("env-get-outdated", read_again)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
