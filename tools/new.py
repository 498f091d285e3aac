"""An empty chapter with its places: `make new NB=56_name` (`python -m tools.new 56_name`).

It makes the notebook with the cells that every chapter has, a line in _toc.yml where the number
belongs, and a test file. The number says in which part the chapter stands; the name is that of
its module. What is still to be written says so in capital letters, and the tests ask for it: a
statement without a check, a chapter without exercises, a module that exports nothing.
"""

import argparse
import keyword
import re
import sys
from pathlib import Path

import nbformat

from tools import notebooks

ROOT = Path(__file__).resolve().parent.parent
INTRODUCTION = """# TITLE OF THE CHAPTER

> ONE SENTENCE: WHAT THE CHAPTER SHOWS.

THE QUESTION, AND WHY IT MATTERS. This chapter exports `attnlib.{name}`."""
BODY = """## THE IDEA

IN WORDS, WITH A FIGURE THAT CODE DRAWS.

## WHAT CAN BE PROVED

:::{{prf:theorem}} ITS NAME
:label: thm-{name}

ALL ASSUMPTIONS, AND WHAT FOLLOWS FROM THEM.
:::

:::{{prf:proof}}
THE WHOLE PROOF.
:::"""
CHECK = """# check: thm-{name}
# COMPUTE BOTH SIDES, AND ASSERT THAT THEY AGREE
# control: WHAT IS BROKEN
# THE SAME WITH ONE ASSUMPTION MISSING, AND ASSERT THAT THEY DISAGREE"""
MIDDLE = """## THE CODE

ONE IDEA A CELL, AN AXIS COMMENT ON EVERY RESHAPE; THEN PARITY WITH WHAT PEOPLE USE.

## AN EXPERIMENT

ON REAL INPUT, THREE SEEDS OR MORE, EACH CONTESTANT TUNED, A SIMPLE BASELINE AMONG THEM.

## THE COST

PREDICTED AND MEASURED."""
PAPER = """## Where the code departs from the paper

WHERE IT DOES, AND WHY."""
SUMMARY = """## Summary

- AT MOST EIGHT LINES, WHOSE NUMBERS ARE ON THE PAGE."""
END = """## Exercises

:::{{exercise}} ITS NAME
:label: ex-{name}-1

THE FIRST OF SIX TO TEN.
:::

```{{solution-start}} ex-{name}-1
:class: dropdown
```"""
TEST = '''"""attnlib.{name}: parity with a peer, properties, gradients, bad input."""

from attnlib import {name}


def test_the_chapter_exports_something():
    assert {name}.__all__, "nbs/{number}_{name}.ipynb has no cell that begins with `#| export`"
'''


def cell(kind, name, source, *tags):
    """A cell with an id that says what it is."""
    made = getattr(nbformat.v4, f"new_{kind}_cell")(source)
    made.id = name
    if tags:
        made.metadata["tags"] = list(tags)
    return made


def chapter(name):
    """The notebook of an empty chapter."""
    other = nbformat.read(ROOT / "nbs" / "93_models.ipynb", 4)
    install = next(each.source for each in other.cells if each.id == "colab")
    cells = [
        cell("markdown", "title", INTRODUCTION.format(name=name)),
        cell("code", "colab", install, "remove-cell"),
        cell("code", "default-exp", f"#| default_exp {name}", "remove-cell"),
        cell("code", "imports", "#| export\nimport torch  # noqa: F401", "hide-input"),
        cell(
            "code", "setup", "from attnlib.plot import set_style\n\nset_style()", "hide-input"
        ),
        cell("markdown", "idea", BODY.format(name=name)),
        cell("code", "theorem-check", CHECK.format(name=name)),
        cell("markdown", "code-text", MIDDLE),
        cell("markdown", "paper", PAPER),
        cell("markdown", "summary", SUMMARY),
        cell("markdown", "exercises", END.format(name=name)),
        cell("code", "solution-1", "# THE SOLUTION, EXECUTED"),
        cell("markdown", "solution-1-end", "```{solution-end}\n```"),
    ]
    metadata = {"figures": {}, "kernelspec": other.metadata["kernelspec"]}
    return notebooks.canonical(nbformat.v4.new_notebook(cells=cells, metadata=metadata))


def listed(toc, number, name):
    """_toc.yml with a line for the chapter, behind the one with the next smaller number."""
    lines = toc.splitlines()
    places = [(i, re.match(r"\s+- file: nbs/(\d\d)_", line)) for i, line in enumerate(lines)]
    same = [(i, x[1]) for i, x in places if x and x[1][0] == number[0]]
    before = [i for i, other in same if other < number]
    at = before[-1] + 1 if before else same[0][0]
    lines.insert(at, f"      - file: nbs/{number}_{name}")
    return "\n".join(lines) + "\n"


def refusal(wanted):
    """What is wrong with the name of a new chapter; empty if nothing is."""
    found = re.fullmatch(r"([1-59]\d)_([a-z][a-z0-9_]*)", wanted)
    if not found:
        return "it must be like 56_name: a floor from 1 to 5 or 9, a digit, a module's name"
    if keyword.iskeyword(found[2]):
        return f"{found[2]!r} is a word of Python, and no module can be called so"
    for path in notebooks.notebooks():
        if path.stem[:2] == found[1]:
            return f"the number is that of {path.name}"
        if path.stem[3:] == found[2]:
            return f"the name is that of {path.name}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("chapter", help="number and name: make new NB=56_name")
    wanted = parser.parse_args().chapter
    if problem := refusal(wanted):
        sys.exit(f"chapter ({wanted!r}) cannot be made: {problem}")
    number, _, name = wanted.partition("_")
    notebook, test = ROOT / "nbs" / f"{wanted}.ipynb", ROOT / "tests" / f"test_{name}.py"
    toc = ROOT / "_toc.yml"
    notebooks.write(chapter(name), notebook)
    toc.write_text(listed(toc.read_text("utf-8"), number, name), encoding="utf-8")
    if not test.exists():
        test.write_text(TEST.format(name=name, number=number), encoding="utf-8")
    for path in (notebook, toc, test):
        print(path.relative_to(ROOT))
    if number[0] != "9":
        print("still to be written: what it needs and gives, in _ext/ideas.yml")


if __name__ == "__main__":
    main()
