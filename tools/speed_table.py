"""The table of speeds in the README, made from the records: `python tools/speed_table.py` puts it there.

Each number is our time over that of the nearest rival, the median of rounds in which all took turns; `make bench` writes
the records and then calls this file, and a test compares the README with them.
"""
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speed: made by tools/speed_table.py -->\n", "<!-- /speed -->"
VISION = {"ViT-S": "vit", "Swin-T": "swin", "SwinV2-T": "swinv2", "TNT-S": "tnt"}
MODES = ("float32", "float32, medium", "bfloat16")


def best(rows, key):
    """Our time over that of the nearest rival, the largest of the ratios, and its name."""
    if all(row[key] == "attnlib" for row in rows):
        return ""
    nearest = max((row for row in rows if row[key] != "attnlib"), key=lambda row: row["ratio"])
    return f"{nearest['ratio']:.2f} ({nearest[key]})"


def table():
    found = []
    for device in ("cpu", "cpu_amx", "cuda"):
        for name, stem in VISION.items():
            path = RECORDS / f"{stem}_{device}.json"
            if not path.exists():
                continue
            record = json.loads(path.read_text())
            for kind in ("forward", "training"):
                for batch in sorted({row["batch"] for row in record["rows"]}):
                    case = kind, batch, False
                    rows = [row for row in record["rows"] if (row["pass"], row["batch"], row["compiled"]) == case]
                    cells = [[row for row in rows if row["mode"] == mode] for mode in MODES]
                    found.append([f"{name}, {kind}, batch {batch}", record["device"],
                                  *(best(cell, "library") for cell in cells)])
        path = RECORDS / f"translation_{device}.json"
        if path.exists():
            record = json.loads(path.read_text())
            rows = {mode: [row for row in record["training"] if (row["mode"], row["dropout"]) == (mode, 0)]
                    for mode in MODES}
            found.append(["Transformer, training", record["device"], *(best(rows[mode], "model") for mode in MODES)])
            for batch in sorted({row["batch"] for row in record.get("decoding", ())}):
                rows = {mode: [row for row in record["decoding"] if (row["mode"], row["batch"]) == (mode, batch)]
                        for mode in MODES}
                found.append([f"Transformer, decoding, batch {batch}", record["device"],
                              *(best(rows[mode], "model") for mode in MODES)])
    lines = ["| | on | float32 | float32, \"medium\" | bfloat16 |", "|---|---|---|---|---|"]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in found]) + "\n"


def updated(text):
    """The README's text with the table of the present records."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(encoding="utf-8")), encoding="utf-8")
