"""The tables of speeds in the README, made from the records by `python -m tools.speed_table`.

A cell compares our model with its nearest rival: the median, over the rounds in which all took
turns, of our time over its, and the quartiles. It says "tie" where the quartiles, as they are
shown, include 1. The median of the ratios need not agree with the ratio of the median times. A
cell is marked where the two name different winners. `make bench` writes the records and then
calls this file; a test compares the README with them.
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speed: made by tools/speed_table.py -->\n", "<!-- /speed -->"
VISION = {"ViT-S": "vit", "Swin-T": "swin", "SwinV2-T": "swinv2", "TNT-S": "tnt"}
MODES = ("float32", "float32, medium", "bfloat16")
OURS = {"plain": "attnlib", "optimized": "attnlib, optimized"}  # their names in the records
HEAD = ['| | float32 | float32, "medium" | bfloat16 |', "|---|---|---|---|"]
SKIPPED = {  # operations of an image, all and without those that only the optimized model skips
    "ViT-S": (9_197_764_608, 8_618_231_808),
    "TNT-S": (10_433_750_016, 9_854_217_216),
}
DAGGER = (
    "† The medians of the two times name the other as the faster. Shown is the median of the "
    "ratios within the rounds: a busy machine slows all contestants of a round alike."
)


def cell(rows, ours):
    """What the table says of one of our models, "plain" or "optimized", in some rows."""
    own = [row["ms"] for row in rows if row["name"] == OURS[ours]]
    which = "ratio" if ours == "plain" else "optimized"
    rivals = [row for row in rows if row["name"] not in OURS.values() and row.get(which)]
    if not own or not rivals:
        return ""
    ratios = {row["name"]: row if ours == "plain" else row["optimized"] for row in rivals}
    nearest = max(ratios, key=lambda name: ratios[name]["ratio"])
    ratio = ratios[nearest]["ratio"]
    low, high = (round(quartile, 2) for quartile in ratios[nearest]["quartiles"])
    said = f"{low:.2f}–{high:.2f}, {nearest}"
    if low <= 1 <= high:
        return f"tie ({said})"
    rival = next(row["ms"] for row in rivals if row["name"] == nearest)
    mark = "" if (own[0] < rival) == (ratio < 1) else "†"
    return f"{ratio:.2f}{mark} ({said})"


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


def lines(title, record, mark):
    """The table's lines for one record; `mark` stands where work is skipped."""
    for case, rows in cases(record).items():
        modes = [[row for row in rows if row["mode"] == mode] for mode in MODES]
        for ours in OURS:
            cells = [cell(some, ours) for some in modes]
            if any(cells):
                what = case if ours == "plain" else f"{case}, optimized{mark}"
                yield f"| {title}, {what} | {' | '.join(cells)} |"


def rounds(records):
    """How many rounds the rows of some records had: "5 rounds", or "" if none says so."""
    rows = (row for record in records for case in cases(record).values() for row in case)
    found = sorted({row["rounds"] for row in rows if "rounds" in row})
    return f"{' to '.join(map(str, sorted({*found[:1], *found[-1:]})))} rounds" if found else ""


def skipped_work(note, titles):
    """The note on what the optimized models do not compute, with numbers if known."""
    known = {title: [n / 1e9 for n in SKIPPED[title]] for title in titles if title in SKIPPED}
    shares = [f"{title} {rest:.2f} of {whole:.2f}" for title, (whole, rest) in known.items()]
    return note + (f" Billion operations an image: {', '.join(shares)}." if shares else "")


def section(found):
    """One device's table with its notes, from {title: record}."""
    notes, body = {}, []
    for title, record in found.items():
        mark = ""
        if record.get("skipped"):
            notes.setdefault(record["skipped"], []).append(title)
            mark = f" [{list(notes).index(record['skipped']) + 1}]"
        body += lines(title, record, mark)
    records = list(found.values())
    threads = {f"{record['threads']} threads" for record in records if "threads" in record}
    about = ", ".join([*sorted(threads), *filter(None, [rounds(records)])])
    below = [f"[{i}] {skipped_work(*note)}" for i, note in enumerate(notes.items(), 1)]
    below += [DAGGER] * any("†" in line for line in body)
    title = f"**{records[0]['device']}**" + (f", {about}" if about else "")
    return "\n\n".join([title, "\n".join([*HEAD, *body]), *below]) + "\n"


def table():
    """A table for each device on which there are records."""
    found = {}
    for device in ("cpu", "cpu_amx", "cuda"):
        for title, stem in {**VISION, "Transformer": "translation"}.items():
            path = RECORDS / f"{stem}_{device}.json"
            if path.exists():
                record = json.loads(path.read_text(encoding="utf-8"))
                found.setdefault(record["device"], {})[title] = record
    return "\n".join(section(records) for records in found.values())


def updated(text):
    """The README's text with the table of the present records."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(encoding="utf-8")), encoding="utf-8")
