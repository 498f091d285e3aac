"""The table of speeds in the README, made from the records by `python -m tools.speed_table`.

A cell compares our model with its nearest rival: the median, over the rounds in which all took
turns, of our time over its. It says "level" where the quartiles of that ratio include 1, or
where the medians of the times themselves do not agree on who is faster. `make bench` writes the
records and then calls this file; a test compares the README with them.
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speed: made by tools/speed_table.py -->\n", "<!-- /speed -->"
VISION = {"ViT-S": "vit", "Swin-T": "swin", "SwinV2-T": "swinv2", "TNT-S": "tnt"}
MODES = ("float32", "float32, medium", "bfloat16")
OURS = {"plain": "attnlib", "optimized": "attnlib, optimized"}  # their names in the records


def cell(rows, ours):
    """What the table says of one of our models, "plain" or "optimized", in some rows."""
    own = [row["ms"] for row in rows if row["name"] == OURS[ours]]
    rivals = [row for row in rows if row["name"] not in OURS.values()]
    if not own or not rivals:
        return ""
    ratios = {row["name"]: row if ours == "plain" else row["optimized"] for row in rivals}
    nearest = max(ratios, key=lambda name: ratios[name]["ratio"])
    ratio, (low, high) = ratios[nearest]["ratio"], ratios[nearest]["quartiles"]
    faster = own[0] < min(row["ms"] for row in rivals)
    level = low <= 1 <= high or faster != (ratio < 1)
    return f"{'level' if level else format(ratio, '.2f')} ({nearest})"


def cases(record):
    """What a record compares, {case: rows with "name" and "mode"}, in the table's order."""
    found = {}
    for kind in ("forward", "training"):
        for row in record.get("rows", ()):
            if row["pass"] == kind and not row["compiled"]:
                case = found.setdefault(f"{kind}, batch {row['batch']}", [])
                case.append(dict(row, name=row["library"]))
    for row in record.get("training", ()):
        if row["dropout"] == 0:
            found.setdefault("training", []).append(dict(row, name=row["model"]))
    for row in record.get("decoding", ()):
        case = found.setdefault(f"decoding, batch {row['batch']}", [])
        case.append(dict(row, name=row["model"]))
    return found


def lines(title, record, note):
    """The table's lines for one record."""
    for case, rows in cases(record).items():
        modes = [[row for row in rows if row["mode"] == mode] for mode in MODES]
        for ours in OURS:
            cells = [cell(some, ours) for some in modes]
            if any(cells):
                what = case if ours == "plain" else f"{case}, optimized"
                yield f"| {title}{note}, {what} | {record['device']} | {' | '.join(cells)} |"


def table():
    found, notes = [], []  # a note says which work is skipped: the field "skipped" of a record
    for device in ("cpu", "cpu_amx", "cuda"):
        for title, stem in {**VISION, "Transformer": "translation"}.items():
            path = RECORDS / f"{stem}_{device}.json"
            if path.exists():
                record = json.loads(path.read_text(encoding="utf-8"))
                skipped = record.get("skipped")
                if skipped and skipped not in notes:
                    notes.append(skipped)
                mark = f" [{notes.index(skipped) + 1}]" if skipped else ""
                found += lines(title, record, mark)
    head = ['| | on | float32 | float32, "medium" | bfloat16 |', "|---|---|---|---|---|"]
    below = [f"\n[{number}] {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*head, *found, *below]) + "\n"


def updated(text):
    """The README's text with the table of the present records."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(encoding="utf-8")), encoding="utf-8")
