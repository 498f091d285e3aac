"""The recorded speeds as tables, where speeds.md says `<!-- speeds -->`."""

import json
from pathlib import Path

HERE = "<!-- speeds -->\n"
RECORDS = "benchmarks/results"
MODELS = {
    "vit": "ViT-S",
    "swin": "Swin-T",
    "swinv2": "SwinV2-T",
    "tnt": "TNT-S",
    "translation": "Transformer",
}
MODES = ("float32", "float32, medium", "bfloat16")


def cases(record):
    """Group the rows of a record by what was measured: {case: {library: {mode: row}}}."""
    found = {}

    def add(case, library, row):
        found.setdefault(case, {}).setdefault(library, {})[row["mode"]] = row

    for row in record.get("rows", ()):
        if not row["compiled"]:
            add(f"{row['pass']}, batch {row['batch']}", row["library"], row)
    for row in record.get("training", ()):
        if row["dropout"] == 0:
            add("training, without dropout", row["model"], row)
    for row in record.get("decoding", ()):
        add(f"decoding, batch {row['batch']}", row["model"], row)
    return found


def cell(row, library):
    """Write the median time and, for another library, our time divided by its time."""
    if row is None:
        return ""
    text = f"{row['ms']:.0f}"
    if library.startswith("attnlib") or "ratio" not in row:
        return text
    low, high = row["quartiles"]
    return f"{text}; {row['ratio']:.2f} ({low:.2f}–{high:.2f})"


def table(libraries):
    """Write one table: a row for each library, a column for each precision."""
    lines = ["| ms | " + " | ".join(MODES) + " |", "|---|---|---|---|"]
    for library, rows in libraries.items():
        cells = [cell(rows.get(mode), library) for mode in MODES]
        lines.append(f"| {library} | " + " | ".join(cells) + " |")
    return lines


def listed(root):
    """Write all tables, a section for each model and device."""
    lines = []
    for device in ("cpu", "cpu_amx", "cuda"):
        for stem, title in MODELS.items():
            path = Path(root) / RECORDS / f"{stem}_{device}.json"
            if path.exists():
                record = json.loads(path.read_text("utf-8"))
                lines += ["", f"## {title} on {record['device']}"]
                for case, libraries in cases(record).items():
                    lines += ["", f"**{case.capitalize()}**", "", *table(libraries)]
                if record.get("skipped"):
                    lines += ["", record["skipped"]]
    return "\n".join(lines) + "\n"


def fill_in(app, docname, source):
    if docname == "book/speeds":
        source[0] = source[0].replace(HERE, listed(app.srcdir))


def read_again(app, env, added, changed, removed):
    return {"book/speeds"} & set(env.found_docs)


def setup(app):
    app.connect("source-read", fill_in)
    app.connect("env-get-outdated", read_again)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
