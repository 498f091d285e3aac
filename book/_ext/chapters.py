"""The chapters, read from _toc.yml and the notebooks: no other list of them is kept by hand.

A chapter is a line in _toc.yml and a notebook with a title, a sentence about it and a module.
As an extension of Sphinx this file writes a page of the library for every module, and puts the
chapters where index.md and api/index.md say `<!-- chapters -->`. It links each name of the
library to the section of the chapter that defines it, the definition there to the name's entry
in the reference, and the names that docstrings mention to theirs.
"""

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml
from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- chapters: made by book/_ext/chapters.py -->\n", "<!-- /chapters -->"
HERE = "<!-- chapters -->\n"
API = "book/api"  # the folder of the library's pages

PAGE = """# attnlib.{module}

Exported by the chapter {{doc}}`/{page}`.

```{{eval-rst}}
.. automodule:: attnlib.{module}
   :members:
   :inherited-members: Module, TorchDispatchMode, dict, list, tuple

   .. autosummary::
      :nosignatures:

{names}
```
"""


class Chapter(NamedTuple):
    page: str  # without .ipynb
    title: str
    summary: str
    module: str | None
    number: int | None


def read(page, number=None, root=ROOT):
    """The chapter that a notebook holds."""
    cells = json.loads((root / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    head = re.match(r"# (?P<title>.+)\n\n> (?P<summary>.+)", texts[0])
    if not head:
        raise ValueError(f"{page}.ipynb does not begin with `# Title` and `> what it shows`")
    exports = re.search(r"(?m)^#\| default_exp (\w+)$", "\n".join(texts))
    return Chapter(page, head["title"], head["summary"], exports and exports[1], number)


def parts(root=ROOT):
    """[(caption, [Chapter, ...]), ...] in the order of _toc.yml, where there are notebooks."""
    toc, found, count = yaml.safe_load((root / "_toc.yml").read_text("utf-8")), [], 0
    for part in toc["parts"]:
        chapters = []
        for entry in part["chapters"]:
            if (root / f"{entry['file']}.ipynb").exists():
                count += bool(part.get("numbered"))
                number = count if part.get("numbered") else None
                chapters.append(read(entry["file"], number, root))
        if chapters:
            found.append((part.get("caption", ""), chapters))
    return found


def modules(root=ROOT):
    """The chapters that export a module."""
    return [chapter for _, some in parts(root) for chapter in some if chapter.module]


# --- where the chapters are listed ------------------------------------------------------------


def first_page(root=ROOT):
    """Lists for index.md, a heading for each part."""
    lines = []
    for caption, chapters in parts(root):
        if caption:
            lines += ["", f"### {caption}", ""]
            for chapter in chapters:
                start = f"{chapter.number}." if chapter.number else "-"
                text = f"{start} {{doc}}`/{chapter.page}`: {chapter.summary.rstrip('.')}"
                module = f"{{doc}}`{chapter.module} </{API}/{chapter.module}>`"
                lines.append(f"{text} ({module}).")
    return "\n".join(lines) + "\n"


def library(root=ROOT):
    """The table of modules for api/index.md."""
    lines = [":::{div} modules", "| module | what it holds | chapter |", "|---|---|---|"]
    for page, _, summary, module, _ in modules(root):
        lines.append(f"| {{doc}}`attnlib.{module} <{module}>` | {summary} | {{doc}}`/{page}` |")
    return "\n".join([*lines, ":::"]) + "\n"


def former_names(root=ROOT):
    """The tables of renamed and removed names for migration.md."""
    tree = ast.parse((root / "attnlib" / "_renamed.py").read_text(encoding="utf-8"))
    tables = {}
    for node in tree.body:
        name = getattr(node, "targets", [node])[0]
        if getattr(name, "id", None) in ("MODULES", "RENAMED", "MOVED"):
            tables[name.id] = ast.literal_eval(node.value)
    lines = ["| former name | name since version 0.3 |", "|---|---|"]
    for former, module in sorted(tables["MODULES"].items()):
        lines.append(f"| `attnlib.{former}` (module) | `attnlib.{module}` |")
    private = []
    for module, names in sorted(tables["RENAMED"].items()):
        for former, name in sorted(names.items()):
            if name.startswith("_"):
                private.append(f"`{module}.{former}`")
            else:
                lines.append(f"| `{module}.{former}` | `{module}.{name}` |")
    lines += ["", "| removed name | instead |", "|---|---|"]
    for module, names in sorted(tables["MOVED"].items()):
        lines += [f"| `{module}.{name}` | {where} |" for name, where in sorted(names.items())]
    lines += ["", "These names are private now, with an underscore before the name: "]
    return "\n".join(lines) + ", ".join(private) + ".\n"


def readme(root=ROOT):
    """The README's table."""
    lines = ["| chapter | module | what it holds |", "|---|---|---|"]
    for caption, chapters in parts(root):
        lines += [f"| **{caption}** | | |"] if caption else []
        for page, title, summary, module, _ in chapters:
            name = f"`{module}`" if module else ""
            lines.append(f"| [{title}]({page}.ipynb) | {name} | {summary} |")
    return "\n".join(lines) + "\n"


def updated(text):
    """The README's text with the table of the present chapters."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + readme() + END + rest.split(END, 1)[1]


# --- pages of the library ---------------------------------------------------------------------


def public_names(path):
    """The functions and classes of a module that autodoc documents."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            kernel = any("'jit'" in ast.dump(decorator) for decorator in node.decorator_list)
            if not node.name.startswith("_") and not kernel:
                found.append(node.name)
    return found


def write_pages(app, config):
    """A page for every module, written only if it is new; those of former modules go."""
    root, wanted = Path(app.srcdir), {"index.md"}
    for chapter in modules(root):
        names = public_names(root / "attnlib" / f"{chapter.module}.py")
        listed = "\n".join(f"      {name}" for name in names)
        page = root / API / f"{chapter.module}.md"
        text = PAGE.format(module=chapter.module, page=chapter.page, names=listed)
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
        wanted.add(page.name)
        former = f"api/{chapter.module}"
        config.redirects[former] = f"../{API}/{chapter.module}.html"
    config.redirects["api/index"] = f"../{API}/index.html"
    for page in (root / API).glob("*.md"):
        if page.name not in wanted:
            page.unlink()


def fill_in(app, docname, source):
    """Put the chapters where a page asks for them."""
    lists = {"book/index": first_page, f"{API}/index": library, "book/migration": former_names}
    if docname in lists:
        source[0] = source[0].replace(HERE, lists[docname](Path(app.srcdir)))


def read_again(app, env, added, changed, removed):
    """The pages that are filled in: a notebook may have another title."""
    return {"book/index", f"{API}/index", "book/migration"}


# --- from the reference to the chapters, and back ---------------------------------------------


def sections(texts):
    """How many headings stand in Markdown texts, those in code and boxes left out."""
    fence, count = "", 0
    for line in "\n".join(texts).splitlines():
        mark = re.match(r" {0,3}(`{3,}|~{3,}|:{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        elif not fence:
            count += bool(re.match(r"#{1,6} \S", line))
    return count


def definitions(page, root=ROOT):
    """{name: number of the section, from 0} of what a notebook exports."""
    found, before = {}, []
    for cell in json.loads((root / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            before.append(source)
        elif re.match(r"#\|\s*export\b", source):
            for name in re.findall(r"(?m)^(?:def|class) ([A-Za-z]\w*)", source):
                found[name] = sections(before) - 1
    return found


modules_once = cache(modules)  # a build asks for each of its pages


def link_to_chapters(app, doctree, docname):
    """Below each class and function of the reference, where the book makes it."""
    for chapter in modules_once(Path(app.srcdir)):
        if docname == f"{API}/{chapter.module}":
            numbers = definitions(chapter.page, Path(app.srcdir))
            anchors = list(app.env.tocs[chapter.page].findall(nodes.reference))
            start = app.builder.get_relative_uri(docname, chapter.page)
            for entry in doctree.findall(addnodes.desc):
                name = entry[0].get("fullname", "")
                if name in numbers and numbers[name] < len(anchors):
                    anchor = anchors[numbers[name]]
                    link = nodes.reference("", anchor.astext(), internal=True)
                    link["refuri"] = start + anchor["anchorname"]
                    text = nodes.paragraph("", "In the chapter: ", link, classes=["chapter"])
                    entry[-1] += text


DEFINED = re.compile(  # "def name" or "class name" at the beginning of a line, as HTML
    r'(?m)((?:^|<pre><span></span>)<span class="k">(?:def|class)</span>'
    r'(?:<span class="w"> </span>| )<span class="n[fc]">)(\w+)(?=</span>)'
)


def link_to_reference(app, pagename, templatename, context, doctree):
    """In a chapter the name behind `def` or `class` leads to its entry in the reference."""
    for chapter in modules_once(Path(app.srcdir)):
        if pagename == chapter.page and "body" in context:
            source = Path(app.srcdir) / "attnlib" / f"{chapter.module}.py"
            wanted = set(public_names(source))
            page = context["pathto"](f"{API}/{chapter.module}")

            def link(found):
                start, name = found.groups()
                if name not in wanted:
                    return found[0]
                wanted.discard(name)  # the first definition is the library's
                target = f'href="{page}#attnlib.{chapter.module}.{name}"'
                return f'{start}<a class="api" {target} title="In the reference">{name}</a>'

            context["body"] = DEFINED.sub(link, context["body"])


def meant(word, known):
    """The full name that a word means in a docstring of another module, or None.

    An everyday word such as `scale` means none, and neither does a name that several have.
    """
    word = word.removesuffix("()")
    if not re.fullmatch(r"[\w.]*[A-Z_.][\w.]*", word):
        return None
    names = [name for name in known if f".{name}".endswith(f".{word}")]
    names = [name for name in names if name.count(".") <= 2 + word.count(".")]
    return names[0] if len(names) == 1 else None


def link_names(app, env, node, contnode):
    """Words in single backticks: a name of another module leads to its entry, others are code.

    Names of the same module, and those in full, are Sphinx's to find.
    """
    if node["refdomain"] != "py" or node["reftype"] != "obj":
        return None
    entries = env.get_domain("py").objects
    name = meant(node["reftarget"], [name for name in entries if name.startswith("attnlib.")])
    if name is None:
        return nodes.literal("", contnode.astext(), classes=["code"])
    entry, start = entries[name], node.get("refdoc")
    return make_refnode(app.builder, start, entry.docname, entry.node_id, contnode, name)


def setup(app):
    app.connect("config-inited", write_pages)  # before _toc.yml is read, which asks for api/*
    app.connect("source-read", fill_in)
    app.connect("env-get-outdated", read_again)
    app.connect("missing-reference", link_names)
    app.connect("doctree-resolved", link_to_chapters)
    app.connect("html-page-context", link_to_reference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
