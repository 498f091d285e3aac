"""How a notebook becomes a page.

nbdev's directives go, a figure keeps its alternative text, boxes get clean HTML.
"""

import json

from docutils import nodes
from sphinx.util import logging

logger = logging.getLogger(__name__)
COLAB = "https://colab.research.google.com/github"
KAGGLE = "https://kaggle.com/kernels/welcome?src=https://github.com"
PLAIN = "plain"  # the branch with the copies that `python -m tools.plain` makes
ICON = "fa-brands fa-kaggle"
IMPORTS = ("imports", "setup")  # ids of the cells whose fold is called "Imports"


def read_notebook(app, docname, source):
    """Change the notebook as it is read; the file, which a page offers for download, stays."""
    if app.env.doc2path(docname).endswith(".ipynb"):
        notebook = json.loads(source[0])
        shown = [cell for cell in notebook["cells"] if prepare(cell, docname)]
        notebook["cells"] = join_imports(shown)
        source[0] = json.dumps(notebook)


def prepare(cell, docname):
    """Make a cell fit to be shown, in place; False if the page is better without it."""
    if cell["cell_type"] != "code":
        return True
    lines = "".join(cell["source"]).splitlines()
    if any(line.startswith("#|") and line[2:].split() == ["hide"] for line in lines):
        return False
    cell["source"] = "\n".join(line for line in lines if not line.startswith("#|")).strip("\n")
    images = [
        output["data"] for output in cell["outputs"] if "image/png" in output.get("data", {})
    ]
    if len(images) > 1:
        logger.warning(
            "cell %r draws %d figures; one fits a cell",
            cell.get("id"),
            len(images),
            location=docname,
        )
    # `attnlib.plot.show` stores the alternative text as the picture's plain-text form
    if images:
        words = " ".join("".join(images[0].get("text/plain", "")).split())
        cell["metadata"].setdefault("mystnb", {}).setdefault("image", {})["alt"] = words
    if cell.get("id") in IMPORTS:  # folded by their tag, so that a page opens with its idea
        prompts = {"code_prompt_show": "Imports", "code_prompt_hide": "Imports"}
        cell["metadata"].setdefault("mystnb", {}).update(prompts)
    return bool(cell["source"] or cell["outputs"])


def join_imports(cells):
    """One fold of imports where those of the module and those of the page follow each other."""
    found = []
    for cell in cells:
        pair = [found[-1], cell] if found else []
        if pair and all(one.get("id") in IMPORTS and not one["outputs"] for one in pair):
            found[-1]["source"] += "\n\n" + cell["source"]
        else:
            found.append(cell)
    return found


def tidy_boxes(app, doctree, docname):
    """Theorems and exercises: "Proof." in italics, and no id twice on a page."""
    for box in doctree.findall(nodes.admonition):
        if box["classes"][:2] == ["proof", "proof"]:
            box["ids"] = []
            word = next(box.findall(nodes.Text))
            if word.startswith("Proof. "):
                word.parent.replace(
                    word, [nodes.emphasis("", "Proof."), nodes.Text(word[len("Proof.") :])]
                )
    for section in doctree.findall(nodes.section):
        if section["ids"] and section["ids"][0] in (
            "proof-content",
            "exercise-content",
            "solution-content",
        ):
            section["ids"] = []


def show_lone_buttons(app, pagename, templatename, context, doctree):
    """A menu with one entry becomes that entry: "Colab" is seen without opening anything.

    Colab gets the copy of the notebook that needs no book around it, and Kaggle as well.
    """
    found = []
    for button in context.get("header_buttons", []):
        button = button["buttons"][0] if len(button.get("buttons", [])) == 1 else button
        found.append(button)
        if COLAB in button.get("url", ""):
            copy = button["url"].split(COLAB)[1].split("/blob/")[0]
            copy += f"/blob/{PLAIN}/{pagename.split('/')[-1]}.ipynb"
            button["url"] = COLAB + copy
            about = dict(
                text="Kaggle", tooltip="Launch on Kaggle", label="launch-kaggle-button"
            )
            found.append(button | about | dict(icon=ICON, url=KAGGLE + copy))
    context["header_buttons"] = found


def free_references(app, pagename, templatename, context, doctree):
    """A list of references whose entries have a role of their own is no list to ARIA."""
    role = '<div role="list" class="citation-list">'
    context["body"] = context.get("body", "").replace(role, '<div class="citation-list">')


def setup(app):
    app.connect("source-read", read_notebook)
    app.connect("doctree-resolved", tidy_boxes)
    app.connect("html-page-context", show_lone_buttons, priority=600)
    app.connect("html-page-context", free_references)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
