"""Copy the template of a chapter: `make new NB=56_name` (`python -m tools.new 56_name`)."""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "tools" / "template.ipynb"
PLACEHOLDER = "chapter_name"  # in the template, where the module's name goes


def refusal(chapter, folder):
    """Say why a chapter cannot have this name, or return an empty string."""
    if not re.fullmatch(r"[1-59]\d_[a-z][a-z0-9_]*", chapter):
        return "allowed is a two-digit number, an underscore and a module's name, as in 56_name"
    for path in sorted(folder.glob("*.ipynb")):
        if path.stem[:2] == chapter[:2] or path.stem[3:] == chapter[3:]:
            return f"{path.name} has this number or this name"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapter", help="number and name, as in 56_name")
    chapter = parser.parse_args().chapter
    problem = refusal(chapter, ROOT / "nbs")
    if problem:
        sys.exit(f"chapter ({chapter!r}) cannot be made: {problem}")
    text = TEMPLATE.read_text("utf-8").replace(PLACEHOLDER, chapter[3:])
    (ROOT / "nbs" / f"{chapter}.ipynb").write_text(text, encoding="utf-8")
    print(f"nbs/{chapter}.ipynb is a copy of the template. Still to be written:")
    print(f"  a line `- file: nbs/{chapter}` in _toc.yml")
    print("  what the chapter needs and gives, in book/_ext/ideas.yml")
    print(f"  its tests, in tests/test_{chapter[3:]}.py")


if __name__ == "__main__":
    main()
