"""The chapters in Markdown that every reader of notebooks shows: `python -m tools.plain`.

    python -m tools.plain                   write the copies
    python -m tools.plain --run [NAME ...]  execute each in an empty folder beside the wheel

A chapter is written in MyST, whose boxes and references only the book understands. Colab and
GitHub would show them as source. This command writes a copy of each notebook in which

    :::{prf:theorem} Name         is  a quotation headed "Theorem 1.1 (Name)."
    :::{exercise} Name            is  a quotation headed "Exercise 1.2 (Name)."
    solution-start, solution-end  are the fold "Solution of exercise 1.2", and folded code
    :::{explorer} name            is  its picture, and a link to where it moves
    {cite:t}`liu2021`             is  a link "Liu et al. (2021)" to the paper
    {prf:ref}, {ref}, {eq}, {doc} are links into the book
    $$ ... $$ (eq-name)           is  a formula with its number as a tag, on one line

Formulas are written so that no reader of Markdown mistakes them: GitHub, Colab and others
differ in what they take for a backslash, an emphasis or a quotation inside a formula.

Numbers are those of the book, which a test compares. Code and outputs stay as they are, but for
the directives of nbdev. The site publishes the copies, and its buttons open them.

A copy begins with what its reader will meet: the seconds of the page, which `--run` measures
and `--record` keeps in benchmarks/results/pages.json, and what `python -m benchmarks.pages`
has estimated for GPUs.
"""

import argparse
import json
import os
import re
import resource
import runpy
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import yaml
from pybtex.database import parse_file

ROOT = Path(__file__).resolve().parent.parent
EXT = ROOT / "book" / "_ext"
parts = runpy.run_path(str(EXT / "chapters.py"))["parts"]  # the order of the book
ideas = runpy.run_path(str(EXT / "ideas.py"))  # what each chapter gives and needs
BOOK = yaml.safe_load((ROOT / "_config.yml").read_text("utf-8"))["html"]["baseurl"]
BOX = re.compile(r"(?ms)^:::\{(prf:\w+|exercise)\}[ ]*([^\n]*)\n(.*?)^:::[ ]*$")
EXPLORER = re.compile(r"(?ms)^:::\{explorer\}[ ]*(\S+)\n:alt:[ ]*([^\n]+)\n(.*?)^:::[ ]*$")
LABEL = re.compile(r"(?m)^:label:[ ]*(\S+)\n")
FORMULA = re.compile(r"(?s)\$\$(.+?)\$\$(?:[ ]*\(([\w-]+)\))?")
# a formula of two kinds; or code, where a dollar is a dollar
MATH = re.compile(
    r"(?s)```.*?```|`[^`\n]+`|\$\$(?P<display>.+?)\$\$(?:[ ]*\((?P<label>[\w-]+)\))?"
    r"|(?<!\\)\$(?P<inline>[^$\n]+)\$"
)
ROLE = re.compile(r"\{(doc|ref|eq|prf:ref|cite:t|cite:p|term)\}`([^`]+)`")
MARK = re.compile(r"(?s)(```\{solution-(?:start|end)\}.*?```)")
START, END = re.compile(r"```\{solution-start\}[ ]*(\S+)"), "```{solution-end}"


def source(cell):
    return "".join(cell["source"])


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


# --- what the book calls its parts ------------------------------------------------------------


def names(notebook, page, number, free):
    """{label: (what it is called, its address)} of a chapter's boxes and formulas.

    The formulas of all chapters without a number are counted together, in `free`.
    """
    found, own = {}, {}

    def numbered(kind):
        counts = own if number or kind != "equation" else free
        counts[kind] = counts.get(kind, 0) + 1
        return f"{number}.{counts[kind]}" if number else str(counts[kind])

    for cell in notebook["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        for box in BOX.finditer(source(cell)):
            kind, label = box[1].removeprefix("prf:"), LABEL.search(box[3])
            if kind != "proof":
                name = f"{kind.capitalize()} {numbered(kind)}"
                if label:
                    found[label[1]] = name, f"{BOOK}{page}.html#{label[1]}"
        for formula in FORMULA.finditer(source(cell)):
            if formula[2]:
                address = f"{BOOK}{page}.html#equation-{formula[2].lower()}"
                found[formula[2]] = f"({numbered('equation')})", address
    return found


ACCENTS = {
    "'": "\u0301",
    "`": "\u0300",
    '"': "\u0308",
    "^": "\u0302",
    "~": "\u0303",
    "c": "\u0327",
}
LATEX = re.compile(r"""\\(?:(['`"^~]|c(?=[ {]))\{?\\?([A-Za-z])\}?|([A-Za-z]+)[ ]?)""")
LETTERS = {"L": "Ł", "l": "ł", "o": "ø", "O": "Ø", "ss": "ß", "i": "ı", "aa": "å"}


def unlatex(match):
    """An accent or a letter of LaTeX as a character."""
    if match[1]:
        return unicodedata.normalize("NFC", match[2] + ACCENTS[match[1]])
    return LETTERS.get(match[3], match[3])


def last_names(entry):
    """As "Liu", "Liu and Hu", or "Liu et al." in a text."""
    last = [" ".join(p.prelast_names + p.last_names) for p in entry.persons["author"]]
    last = [re.sub(r"[{}\\]", "", LATEX.sub(unlatex, name)) for name in last]
    if len(last) > 2 or last[-1] == "others":
        return f"{last[0]} et al."
    return " and ".join(last)


def citations():
    """{key: (names, year, address)} of the bibliography."""
    found = {}
    for key, entry in parse_file(ROOT / "references.bib").entries.items():
        f = entry.fields
        arxiv = f.get("eprint") or next(
            iter(re.findall(r"arXiv:(\S+)", f.get("howpublished", ""))), None
        )
        address = f.get("url") or (arxiv and f"https://arxiv.org/abs/{arxiv}")
        address = address or (f.get("doi") and f"https://doi.org/{f['doi']}")
        address = address or f"{BOOK}book/bibliography.html"
        found[key] = last_names(entry), f.get("year", ""), address
    return found


class Names:
    """All that the roles of the book refer to."""

    def __init__(self, root=ROOT):
        self.chapters = [chapter for _, some in parts(root) for chapter in some]
        self.pages = {chapter.page.split("/")[-1]: chapter for chapter in self.chapters}
        self.labels, self.citations, free = {}, citations(), {}
        self.explorers = {}  # where in the book each is
        self.ideas = ideas["read"](root)
        for chapter in self.chapters:
            notebook = read(root / f"{chapter.page}.ipynb")
            self.labels |= names(notebook, chapter.page, chapter.number, free)
            for name, *_ in EXPLORER.findall("\n".join(map(source, notebook["cells"]))):
                self.explorers[name] = f"{BOOK}{chapter.page}.html#explorer-{name}"

    def link(self, role, target):
        """What stands for {role}`target`."""
        if role.startswith("cite"):
            return self.cite(role, target)
        text, _, inner = target.rpartition("<")
        if role == "term":
            return text.strip() or target
        name = (inner.rstrip(">") if text else target).split("/")[-1]
        if role == "doc":
            if (ROOT / "book" / f"{name}.md").exists():  # a page of text, such as the glossary
                return f"[{text.strip() or name}]({BOOK}book/{name}.html)"
            chapter = self.pages[name]
            return f"[{text.strip() or chapter.title}]({BOOK}{chapter.page}.html)"
        called, address = self.labels[name]
        return f"[{text.strip() or called}]({address})"

    def cite(self, role, keys):
        some = [self.citations[key.strip()] for key in keys.split(",")]
        if role == "cite:t":
            return ", ".join(f"[{who} ({year})]({where})" for who, year, where in some)
        return "(" + "; ".join(f"[{who}, {year}]({where})" for who, year, where in some) + ")"


# What Markdown, which knows no formulas, would change in one, and TeX that means the same. A
# backslash before a sign is a sign; _ and * emphasize, but not behind a space; < opens a tag.
TEX = {
    r"\\": r"\cr",
    r"\{": r"\lbrace",
    r"\}": r"\rbrace",
    r"\|": r"\Vert",
    r"\,": r"\thinspace",
    r"\:": r"\mskip4mu",
    r"\;": r"\mskip5mu",
    r"\!": r"\negthinspace",
    "<": r"\lt",
    ">": r"\gt",
    "*": r"\ast",
    "_": " _",
}
SIGN = re.compile(r"\\operatorname\*|\\[\\{}|,:;!_]|[<>*_]")


def for_markdown(tex):
    """A formula on one line, which Markdown leaves alone."""

    def instead(match):
        sign = TEX.get(match[0], match[0])
        letter = tex[match.end() : match.end() + 1].isalpha()
        return sign + " " * (letter and sign[-1].isalpha())

    return " ".join(SIGN.sub(instead, tex).split())


# --- a cell -----------------------------------------------------------------------------------


def quoted(text):
    return "\n".join(f"> {line}".rstrip() for line in text.strip().split("\n"))


def markdown(text, known):
    """A cell's text without a word of MyST."""

    def box(match):
        kind, title, body = match[1].removeprefix("prf:"), match[2].strip(), match[3]
        label = LABEL.search(body)
        body = LABEL.sub("", body).strip()
        if kind == "proof":
            return f"*Proof.* {body}" + ("\n\n∎" if body.endswith("$$") else " ∎")
        name = known.labels[label[1]][0] if label else kind.capitalize()
        return quoted(f"**{name}{f' ({title})' if title else ''}.** {body}")

    def formula(match):
        if match["inline"]:
            return f"${for_markdown(match['inline'])}$"
        if not match["display"]:
            return match[0]
        label = match["label"]
        tag = f" \\tag{{{known.labels[label][0].strip('()')}}}" if label else ""
        return f"$${for_markdown(match['display'])}{tag}$$"

    def explorer(match):
        name, alt, caption = match.groups()
        picture, where = f"{BOOK}_static/explorers/{name}.png", known.explorers[name]
        text = f"{caption.strip()} [Move it in the book.]({where})"
        return f"[![{alt}]({picture})]({where})\n\n{text}"

    text = EXPLORER.sub(explorer, text)
    text = MATH.sub(formula, text)
    text = BOX.sub(box, text)
    return ROLE.sub(lambda match: known.link(match[1], match[2]), text)


def folded(text, name):
    return f"<details>\n<summary>{name}</summary>\n\n{text.strip()}\n\n</details>"


def fold_of(cell):
    """What a reader would find if a folded cell were opened."""
    if any("image/png" in output.get("data", {}) for output in cell["outputs"]):
        return "Code of the figure"
    return "Imports" if cell.get("id") in ("imports", "setup") else "More code"


def code(cell, solution):
    """A code cell without the directives of nbdev; that of a solution is folded."""
    lines = [line for line in source(cell).splitlines() if not line.startswith("#|")]
    cell["source"] = "\n".join(lines).strip("\n")
    tags = set(cell["metadata"].get("tags", ()))
    cell["metadata"] = {}
    if solution or "hide-input" in tags:
        title = f"#@title {solution or fold_of(cell)}"
        cell["source"] = f"{title}\n{cell['source']}"
        cell["metadata"] = {"cellView": "form", "jupyter": {"source_hidden": True}}
    return cell


def pieces(text, solution, known):
    """A text cell in plain Markdown, and the solution that goes on behind it, if any."""
    found = []
    for piece in MARK.split(text):
        if start := START.match(piece):
            solution = f"Solution of {known.labels[start[1]][0].lower()}"
        elif piece.startswith(END):
            solution = None
        elif piece.strip():
            piece = markdown(piece.strip(), known)
            found.append(folded(piece, solution) if solution else piece)
    return "\n\n".join(found), solution


# --- what a reader will meet ------------------------------------------------------------------

RESULTS = ROOT / "benchmarks" / "results"
ALIKE = "about as long\\*"
SMALL = (
    "\\* Estimated, not measured: with models as small as those of a page, a GPU waits for "
    "operators to start, as a CPU does."
)
LARGE = (
    " Minutes and rates come from the operations and bytes of a training step and the GPU's "
    "data sheet, batches from a count in float32. On a GPU, `train.fit` computes in bfloat16, "
    "and in float16 where there is no bfloat16, as on the T4."
)


def recorded(name):
    """A record of benchmarks/results, or an empty one."""
    path = RESULTS / f"{name}.json"
    return read(path) if path.exists() else {}


def what_to_expect(page):
    """A table of the minutes and the memory that a chapter's copy takes."""
    name = page.split("/")[-1]
    seconds = recorded("pages").get("seconds", {}).get(name)
    here = f"{seconds:.0f} s, one core" if seconds else "90 s at most"
    lines = ["| | CPU | T4 (15 GB) | H200 |", "|---|---|---|---|"]
    lines.append(f"| this page | {here} | {ALIKE} | {ALIKE} |")
    rows = [row for row in recorded("pages_estimated").get("rows", ()) if row["page"] == name]
    for row in rows:
        minutes, rates = row.get("minutes"), row.get("rates")
        if minutes:
            estimates = [f"{minutes[gpu]:g} min\\*" for gpu in ("T4", "H200")]
            lines.append(f"| `{row['run']}` | hours | {' | '.join(estimates)} |")
        else:
            estimates = [f"{rates[gpu]:g} a second\\*" for gpu in ("T4", "H200")]
            estimates[0] += f", batches of at most {row['batch']}\\*"
            what = f"{row['what']} to train {row['model']}"
            lines.append(f"| {what} | | {' | '.join(estimates)} |")
    return "\n".join([*lines, "", SMALL + LARGE * bool(rows)])


# --- a copy -----------------------------------------------------------------------------------


def plain(page, known):
    """A chapter's notebook as a copy that needs no book around it."""
    notebook, cells, solution = read(ROOT / f"{page}.ipynb"), [], None
    if (name := page.split("/")[-1]) in known.ideas:
        ideas["add"](notebook["cells"], name, known.ideas, quoted)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell = code(cell, solution)
        else:
            text, solution = pieces(source(cell), solution, known)
            cell |= dict(source=text)
        if cell["source"]:
            cells.append(cell)
    where = f"[a page of the book]({BOOK}{page}.html)"
    cells[0]["source"] += f"\n\n*A chapter of [attnlib]({BOOK}); also {where}.*"
    cells[0]["source"] += f"\n\n{what_to_expect(page)}"
    kept = ("kernelspec", "language_info")
    metadata = {key: notebook["metadata"][key] for key in kept if key in notebook["metadata"]}
    return notebook | dict(cells=cells, metadata=metadata)


# --- executed ---------------------------------------------------------------------------------


def kernel(folder, python):
    """Make `python` the interpreter of notebooks, and the wheel the library; its settings."""
    from tools import notebooks  # which needs what executes notebooks

    site = notebooks.install(folder)
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    start = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    about = {"argv": start, "display_name": "Python 3", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(about))
    settings = dict(notebooks.startup(folder), JUPYTER_PATH=str(folder), OMP_NUM_THREADS="1")
    settings["PYTHONPATH"] = os.pathsep.join([str(site), settings["PYTHONPATH"]])
    ask = [
        python,
        "-c",
        "import attnlib, platform as p, torch; "
        "print(attnlib.__file__, p.python_version(), torch.__version__)",
    ]
    told = subprocess.run(
        ask, cwd=spec, env=os.environ | settings, check=True, capture_output=True, text=True
    )
    where, version, torch = told.stdout.split()
    assert where.startswith(str(site)), f"the wheel is hidden by {where}"
    return settings, f"{version}, PyTorch {torch}"


def execute(notebook, folder, limit=900):
    """Execute a copy in a folder; the seconds of a processor that it took."""
    import nbformat
    from nbclient import NotebookClient

    def used():
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    began = used()
    where = {"metadata": {"path": str(folder)}}
    copy = nbformat.from_dict(notebook)
    NotebookClient(copy, timeout=limit, kernel_name="python3", resources=where).execute()
    return used() - began


def run(names, known, python):
    """Execute copies one by one; the versions, {name: seconds}, the names of what failed."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    seconds, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        settings, version = kernel(Path(folder), python)
        os.environ.update(settings)
        for chapter in known.chapters:
            name = chapter.page.split("/")[-1]
            if names and name not in names:
                continue
            empty = Path(folder) / name
            empty.mkdir()
            try:
                seconds[name] = round(execute(plain(chapter.page, known), empty), 1)
                print(f"{name}: {seconds[name]} s on Python {version}", flush=True)
            except (CellExecutionError, CellTimeoutError) as problem:
                failed.append(name)
                print(f"{name}: {problem}", flush=True)
    return version, seconds, failed


def record(version, seconds):
    """Add measured seconds to benchmarks/results/pages.json."""
    from benchmarks.records import write_record

    kept = recorded("pages").get("seconds", {}) | seconds
    write_record(RESULTS / "pages.json", {"kernel": version, "seconds": kept})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "_build/html/plain")
    parser.add_argument("--run", nargs="*", metavar="NAME", help="execute; all by default")
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter that executes"
    )
    parser.add_argument(
        "--record", action="store_true", help="keep the seconds that --run took"
    )
    arguments = parser.parse_args()
    known = Names()
    if arguments.run is not None:
        version, seconds, failed = run(arguments.run, known, arguments.python)
        if arguments.record:
            record(version, seconds)
        if failed or not seconds:
            sys.exit(f"failed: {', '.join(failed) or 'there is no such chapter'}")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for chapter in known.chapters:
        path = arguments.out / f"{chapter.page.split('/')[-1]}.ipynb"
        copy = json.dumps(plain(chapter.page, known), indent=1, ensure_ascii=False)
        path.write_text(copy + "\n")
    print(f"{len(known.chapters)} plain notebooks in {arguments.out}")


if __name__ == "__main__":
    main()
