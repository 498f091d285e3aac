"""The tables of the README, all of them: `python -m tools.readme` makes them again.

A table stands between two comments that say what makes it: the commands come from the Makefile,
the models from the registry, and the chapters from book/_ext/chapters.py. A test compares the
README with them, and finds a table without a maker.
"""

import re
import runpy
from pathlib import Path

import attnlib.panoptic  # noqa: F401  which registers its models, and `attnlib` the others
from attnlib.cli import _REPORTED, _TOP1
from attnlib.models import MODELS, list_models

ROOT = Path(__file__).resolve().parent.parent
chapters = runpy.run_path(str(ROOT / "book" / "_ext" / "chapters.py"))


def commands(root=ROOT):
    """What `make help` lists."""
    lines = ["| command | what it does |", "|---|---|"]
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    for name, about in re.findall(r"(?m)^([a-z]+):.*?## (.+)$", makefile):
        lines.append(f"| `make {name}` | {about} |")
    return "\n".join(lines) + "\n"


def accuracy(names):
    """The smallest and the largest published accuracy of some models."""
    found = sorted(_TOP1[name] for name in names if name in _TOP1)
    found += sorted(float(_REPORTED[x][:4]) for x in names if "top-1" in _REPORTED.get(x, ""))
    ends = dict.fromkeys(f"{value:.1f}" for value in found[:1] + found[-1:])
    return "–".join(ends)


def models():
    """The classes that have names, with the owners of their weights."""
    rows = {}
    for name in list_models():
        rows.setdefault(MODELS[name][0], []).append(name)
    lines = ["| class | names | top-1 on ImageNet, % | weights from |", "|---|---|---|---|"]
    for cls, names in sorted(
        rows.items(), key=lambda row: (row[0].__module__, row[0].__name__)
    ):
        module = cls.__module__.split(".")[-1]
        owners = {(MODELS[name][1] or "").partition("/")[0] for name in names} - {""}
        owners = ", ".join("this library" if x == "attnlib" else x for x in sorted(owners))
        listed = f"{len(names)}, such as `{names[0]}`" if len(names) > 1 else f"`{names[0]}`"
        about = f"`{module}.{cls.__name__}` | {listed} | {accuracy(names)} | {owners}"
        lines.append(f"| {about} |")
    return "\n".join(lines) + "\n"


MADE = {"commands": commands, "models": models}


def updated(text):
    """The README's text with the present tables."""
    for name, make in MADE.items():
        begin, end = f"<!-- {name}: made by tools/readme.py -->\n", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = before + begin + make() + end + rest.split(end, 1)[1]
    return chapters["updated"](text)


def unmade(text):
    """The lines of tables that stand between no two comments."""
    kept = re.sub(r"(?s)<!-- (\w+): made by \S+ -->\n.*?<!-- /\1 -->", "", text)
    return [line for line in kept.splitlines() if line.startswith("|")]


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
