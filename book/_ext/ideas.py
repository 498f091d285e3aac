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
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import networkx
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
WORDS, LINES = 150, 30  # that a reader takes in within a minute: of text, of code
WIDE = 5  # boxes that fit beside each other


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


def minutes(cells):
    """Minutes to read a chapter, without its exercises and what is folded, to the next five."""
    words = lines = 0
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            if {"hide-input", "remove-cell"} & set(cell["metadata"].get("tags", ())):
                continue
            lines += sum(bool(line.strip()) for line in text.splitlines())
            continue
        before, mark, _ = text.partition("## Exercises")
        words += len(before.split())
        if mark:
            break
    return max(5, 5 * round((words / WORDS + lines / LINES) / 5))


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
    lines += ["", f"**Time**: about {minutes(cells)} minutes to read, without the exercises."]
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


def rows_of(graph):
    """Rows of few nodes, each below all that it needs; what others wait for comes first."""
    deep = {}
    for node in reversed(list(networkx.topological_sort(graph))):
        deep[node] = 1 + max((deep[n] for n in graph.successors(node)), default=0)
    rows, placed = [], set()
    while len(placed) < len(graph):
        ready = [n for n in graph if n not in placed and placed >= set(graph.predecessors(n))]
        rows.append(sorted(ready, key=lambda n: -deep[n])[:WIDE])
        placed |= set(rows[-1])
    return rows


def layers(graph):
    """Rows of nodes from the ideas that need nothing downwards.

    An edge that passes over rows gets a stand-in (a tuple) in each, so that lines bend around
    boxes. Each row is sorted by the mean place of what its nodes hang on, a few times.
    """
    rows = rows_of(graph)
    level = {node: i for i, row in enumerate(rows) for node in row}
    paths = []
    for a, b in graph.edges:
        bends = [(a, b, i) for i in range(level[a] + 1, level[b])]
        for bend in bends:
            rows[bend[2]].append(bend)
        paths.append([a, *bends, b])
    steps = [step for path in paths for step in pairwise(path)]
    for turn in range(8):
        places = {node: (i + 0.5) / len(row) for row in rows for i, node in enumerate(row)}
        near = {}
        for a, b in steps:
            one, other = (b, a) if turn % 2 == 0 else (a, b)
            near.setdefault(one, []).append(places[other])
        for row in rows:
            row.sort(key=lambda n: sum(near[n]) / len(near[n]) if n in near else places[n])
    return rows, paths


def curve(points):
    """A smooth path through points, downwards at each."""
    text = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x, y), (u, v) in pairwise(points):
        half = (y + v) / 2
        text += f"C{x:.0f} {half:.0f} {u:.0f} {half:.0f} {u:.0f} {v:.0f}"
    return text


def draw(found):
    """The map: a list of links, which a wide page lays over lines drawn as SVG."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(found)
    graph.add_edges_from((n, name) for name, i in found.items() for n in i.needs if n in found)
    rows, paths = layers(networkx.transitive_reduction(graph))
    where = {}
    for y, row in enumerate(rows):
        weights = [1.0 if isinstance(node, str) else 0.12 for node in row]
        total, left = sum(weights), 0.0
        for node, weight in zip(row, weights):
            where[node] = (1000 * (left + weight / 2) / total, 100 * y + 50)
            left += weight
    lines = [
        f'<path d="{curve([where[node] for node in path])}" data-from="{path[0]}" '
        f'data-to="{path[-1]}"/>'
        for path in paths
    ]
    items = []
    for name, idea in found.items():
        x, y = where[name]
        items.append(
            f'<li style="--x:{x / 10:.1f}%;--y:{y / len(rows):.1f}%">'
            f'<a href="../{idea.page}.html" data-idea="{name}">'
            f"<b>{idea.number}. {escape(idea.title)}</b> "
            f"<span>{escape(idea.gives)}</span></a></li>"
        )
    size = f'viewBox="0 0 1000 {100 * len(rows)}" preserveAspectRatio="none"'
    svg = f'<svg {size} aria-hidden="true">{"".join(lines)}</svg>'
    opened = f'<nav class="ideas" aria-label="Map of ideas" style="--rows:{len(rows)}">'
    return f"{opened}{svg}<ol>{''.join(items)}</ol></nav>\n"


# --- as an extension --------------------------------------------------------------------------


def change(app, docname, source):
    """Boxes into notebooks, the map into the first page, as they are read."""
    root, name = Path(app.srcdir), docname.split("/")[-1]
    if docname == "book/index":
        source[0] = source[0].replace(HERE, draw(read(root)))
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
