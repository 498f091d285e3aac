"""What each chapter needs and gives: ideas.yml as a box in each chapter and as a map.

As an extension of Sphinx this file puts a box under the title of every chapter that ideas.yml
names, links to the chapters that build on it behind its summary, and draws the map of ideas
where index.md says `<!-- map -->`. `tools/plain.py` writes the same box into the plain copies,
but for the time that the code takes, which they tell in a table, and the link to the glossary.
"""

import json
import re
import runpy
from html import escape
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXT = ROOT / "book" / "_ext"
parts = runpy.run_path(str(EXT / "chapters.py"))["parts"]  # the order of the book
HERE = "<!-- map -->\n"
HEAD = re.compile(r"# .+\n\n> .+\n?")
RECORD = "benchmarks/results/pages.json"
NOTATION = (
    "\n\n**Notation**: {ref}`symbols <notation>` and {ref}`words <words>` of all chapters."
)
WORDS, LINES = 200, 10  # that a reader takes in within a minute: of text, of code


class Idea(NamedTuple):
    page: str
    title: str
    number: str  # as the book numbers it, "3" where all parts count on
    needs: tuple  # names of notebooks, as are those of `ahead`
    ahead: tuple
    gives: str
    able: tuple


def entries(root=ROOT):
    """ideas.yml as it is: {name of the notebook: entry}."""
    return yaml.safe_load((root / "book" / "_ext" / "ideas.yml").read_text("utf-8"))


def read(root=ROOT):
    """{name of the notebook: Idea} of the chapters of the book, in its order."""
    known, found = entries(root), {}
    for _, some in parts(root):
        for chapter in some:
            name = chapter.page.split("/")[-1]
            if name in known:
                e = known[name]
                lists = tuple(e["needs"]), tuple(e.get("ahead", ())), e["gives"]
                found[name] = Idea(
                    chapter.page, chapter.title, str(chapter.number), *lists, tuple(e["able"])
                )
    return found


def without_solutions(cells):
    """The cells of a chapter without those between the marks of a solution."""
    found = []
    inside = False
    for cell in cells:
        text = "".join(cell["source"])
        if "{solution-start}" in text:
            inside = True
        if not inside:
            found.append(cell)
        if "{solution-end}" in text:
            inside = False
    return found


def before(cells, heading):
    """The cells before the first one with a heading, and that one up to the heading."""
    found = []
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            match = re.search(rf"(?m)^{heading}\b.*$", text)
            if match:
                return [*found, {**cell, "source": text[: match.start()]}]
        found.append(cell)
    return found


def core_of(cells):
    """The cells of the core: all before the heading "Going deeper"."""
    return before(cells, "## Going deeper")


def is_folded(cell):
    """Whether a reader does not see the code of a cell at once."""
    folds = {"hide-input", "hide-cell", "remove-cell"}
    return bool(folds & set(cell["metadata"].get("tags", ())))


def words_in(text):
    """Words of a page's Markdown, without formulas, marks of directives, and pictures."""
    text = re.sub(r"(?ms)^:::\{explorer\}.*?^:::$", "", text)  # captions do not count
    text = re.sub(r"\{[\w:]+\}`([^`<]*)[^`]*`", r"\1", text)  # a link is as long as its text
    text = re.sub(r"\$\$?.*?\$\$?", " ", text, flags=re.S)
    text = re.sub(r"(?m)^(:::|```|:\w+:).*$", "", text)
    return len(re.findall(r"\w+(?:['’-]\w+)*", text))


def seconds_of(cell):
    """Seconds to read a cell: 200 words, ten lines of code, or two pictures in a minute."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        formulas = len(re.findall(r"\$\$.*?\$\$", text, flags=re.S))
        pictures = text.count(":::{explorer}")
        return 60 * words_in(text) / WORDS + 30 * (formulas + pictures)
    pictures = 0
    for output in cell.get("outputs", ()):
        if "image/png" in output.get("data", ()) or "image/svg+xml" in output.get("data", ()):
            pictures += 1
    lines = 0
    if not is_folded(cell):
        lines = sum(bool(line.strip()) for line in text.splitlines())
    if "remove-cell" in cell["metadata"].get("tags", ()):
        pictures = 0
    return 60 * lines / LINES + 30 * pictures


def minutes(cells):
    """Minutes to read some cells of a chapter, without its exercises."""
    cells = before(cells, "## Exercises")
    return sum(seconds_of(cell) for cell in cells) / 60


def time_to_read(cells):
    """The sentence about a chapter's time: of its core, if it has one, and of the whole."""
    whole = max(5, 5 * round(minutes(cells) / 5))
    core = max(5, 5 * round(minutes(core_of(cells)) / 5))
    if core == whole:
        return f"about {whole} minutes to read, without the exercises"
    return f"about {core} minutes for the core, about {whole} with all of Going deeper"


def to_run(name, root=ROOT):
    """How long the code of a chapter takes, as recorded by `tools.plain`, or nothing."""
    path = root / RECORD
    record = json.loads(path.read_text("utf-8")) if path.exists() else {}
    seconds = record.get("seconds", {}).get(name)
    if not seconds:
        return ""
    count = round(seconds / 60)
    long = "less than a minute" if seconds < 60 else f"about {count} minute{'s'[: count > 1]}"
    return f"The code takes {long} on one core of a CPU."


def links(names, found):
    return ", ".join(f"{{doc}}`/{found[name].page}`" for name in names if name in found)


def box(name, found, cells):
    """The box of a chapter in Markdown, with the book's roles."""
    idea = found[name]
    known = links(idea.needs, found) or "linear algebra and basic PyTorch"
    lines = ["**You will be able to**", "", *(f"- {goal}" for goal in idea.able), ""]
    lines += [f"**You should know**: {known}."]
    if ahead := links(idea.ahead, found):
        lines[-1] += f" The code also uses a part of {ahead}, which need not be read before."
    lines += ["", f"**Time**: {time_to_read(cells)}."]
    return "\n".join(lines)


def onward(name, found):
    """A line with the chapters that build on this one, or nothing."""
    later = links([other for other, idea in found.items() if name in idea.needs], found)
    return f"\n\n**What builds on this**: {later}." if later else ""


def add(cells, name, found, fence, more=""):
    """Put the box, with more text at its end, under the title, and the line behind the summary.

    The cells are changed in place.
    """
    first = "".join(cells[0]["source"])
    head = HEAD.match(first)
    rest = first[head.end() :].strip("\n")
    boxed = fence(box(name, found, cells) + more)
    cells[0]["source"] = "\n\n".join(filter(None, [head[0].strip(), boxed, rest]))
    for cell in cells:
        if cell.get("id") == "summary":
            cell["source"] = "".join(cell["source"]) + onward(name, found)


# --- the map ----------------------------------------------------------------------------------


def boxed(name, found):
    """Write a chapter's box on the map: its link, its idea, and the chapters it builds on."""
    idea = found[name]
    lines = [f'<li><a href="../{idea.page}.html" data-idea="{name}">']
    lines.append(f"<b>{idea.number}. {escape(idea.title)}</b></a> ")
    lines.append(f"<span>{escape(idea.gives)}</span>")
    needs = []
    for other in idea.needs:
        if other in found:
            page, title, number = found[other][:3]
            needs.append(f'<a href="../{page}.html" title="{escape(title)}">{number}</a>')
    if needs:
        lines.append(f" <small>builds on {', '.join(needs)}</small>")
    return "".join(lines) + "</li>"


def draw(found, root=ROOT):
    """Write the map: a row of boxes for each part of the book."""
    rows = []
    for caption, some in parts(root):
        names = [chapter.page.split("/")[-1] for chapter in some]
        boxes = [boxed(name, found) for name in names if name in found]
        if boxes:
            rows.append(f"<li><p>{escape(caption)}</p><ol>{''.join(boxes)}</ol></li>")
    return f'<nav class="ideas" aria-label="Map of ideas"><ol>{"".join(rows)}</ol></nav>\n'


# --- as an extension --------------------------------------------------------------------------


def change(app, docname, source):
    """Boxes into notebooks, the map into the first page, as they are read."""
    root, name = Path(app.srcdir), docname.split("/")[-1]
    if docname == "book/index":
        source[0] = source[0].replace(HERE, draw(read(root), root))
    elif docname.startswith("nbs/") and name in (found := read(root)):
        notebook = json.loads(source[0])
        fence = ":::{{div}} chapter-box\n{}\n:::".format
        if (root / RECORD).exists():
            app.env.note_dependency(str(root / RECORD))
        more = f" {to_run(name, root)}".rstrip() + NOTATION
        add(notebook["cells"], name, found, fence, more)
        source[0] = json.dumps(notebook)


def setup(app):
    app.connect("source-read", change)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
