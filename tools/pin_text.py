"""Pin the book's prose as a corpus: `python -m tools.pin_text`.

All Markdown of the chapters, in the order of the book, without the lines that only mark up:
fences of theorems and solutions, labels, tables. `attnlib.data.book_text` reads it. It
is pinned because chapters that train on it store what they got: making it anew changes them.
"""

import bz2
from pathlib import Path

import nbformat
import yaml

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "attnlib" / "book_text.txt.bz2"
MARKUP = (":::", "```", ":label:", ":class:", ":name:", "|", "> ")


def prose(source):
    """The lines of a Markdown cell that say something."""
    lines = [line.rstrip() for line in source.splitlines() if not line.startswith(MARKUP)]
    return "\n".join(lines).strip()


def book(skip=()):
    """The prose of all chapters but those in `skip`, in the order of _toc.yml."""
    parts = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))["parts"]
    names = [chapter["file"] for part in parts for chapter in part["chapters"]]
    paths = [ROOT / f"{name}.ipynb" for name in names if Path(name).name not in skip]
    cells = (cell for path in paths if path.exists() for cell in nbformat.read(path, 4).cells)
    texts = (prose(cell.source) for cell in cells if cell.cell_type == "markdown")
    return "\n\n".join(text for text in texts if text) + "\n"


if __name__ == "__main__":
    text = book(skip=("24_gpt",))
    TARGET.write_bytes(bz2.compress(text.encode("utf-8"), 9))
    print(
        f"{TARGET.name}: {len(text):,} characters, {len(text.split()):,} words, "
        f"{TARGET.stat().st_size:,} bytes"
    )
