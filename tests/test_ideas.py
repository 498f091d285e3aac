"""What a chapter needs and gives, as ideas.yml says, is what its module imports."""

import json
import re
from graphlib import TopologicalSorter

import pytest

import chapters
import ideas
from tools import plain

ENTRIES = ideas.entries()
FOUND = ideas.read()
KNOWN = plain.Names()
NUMBERED = [
    chapter for _, some in chapters.parts() for chapter in some if chapter.number is not None
]
NAMES = [chapter.page.split("/")[-1] for chapter in NUMBERED]
FILES = {path.stem[3:]: path.stem for path in (chapters.ROOT / "nbs").glob("[1-5]*.ipynb")}


def imported(name):
    """The chapters (tools left out) whose modules a chapter's module imports."""
    path = chapters.ROOT / "attnlib" / f"{name[3:]}.py"
    code = path.read_text("utf-8") if path.exists() else ""
    return {FILES[m] for m in re.findall(r"(?m)^from \.(\w+) import", code) if m in FILES}


def below(name, entries):
    """All that a chapter needs, directly or through another."""
    found = set()
    for other in entries[name]["needs"]:
        found |= {other} | below(other, entries)
    return found


def complaints(entries, order):
    """What is wrong with the needs of the chapters in this order."""
    found = []
    for i, name in enumerate(order):
        entry = entries[name]
        found += [f"{name}: {n} comes later" for n in entry["needs"] if n not in order[:i]]
        used, ahead = imported(name), set(entry.get("ahead", ()))
        missing = used - below(name, entries) - ahead
        found += [f"{name}: its module imports {n}" for n in sorted(missing)]
        idle = {n for n in ahead if n in order[:i] or n not in used}
        found += [f"{name}: {n} is not ahead" for n in sorted(idle)]
    return found


def test_every_chapter_has_an_entry_and_every_entry_a_chapter():
    assert [name for name in NAMES if name not in ENTRIES] == []
    assert [name for name in ENTRIES if name not in FILES.values()] == []
    assert list(FOUND) == NAMES
    for name, entry in ENTRIES.items():
        assert 2 <= len(entry["able"]) <= 3, name
        assert set(entry) <= {"needs", "ahead", "gives", "able"}, name


def test_needs_go_back_and_agree_with_the_imports():
    tuple(TopologicalSorter({n: e["needs"] for n, e in ENTRIES.items()}).static_order())
    assert complaints(ENTRIES, NAMES) == []


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("32_swin", dict(needs=["33_swinv2"]), "33_swinv2 comes later"),
        ("32_swin", dict(needs=[]), "its module imports 30_vit"),
        ("24_gpt", dict(ahead=[]), "its module imports 35_vit_variants"),
        ("12_position", dict(ahead=["35_vit_variants"]), "35_vit_variants is not ahead"),
    ],
)
def test_a_wrong_entry_is_found(name, change, said):
    other = {"33_swinv2": ENTRIES["33_swinv2"] | dict(needs=[])}  # else a circle
    found = complaints(ENTRIES | other | {name: ENTRIES[name] | change}, NAMES)
    assert f"{name}: {said}" in found


def test_box_and_map_hold_every_idea():
    picture = ideas.draw(FOUND)
    for name, idea in FOUND.items():
        assert f'data-idea="{name}"' in picture
        copy = plain.plain(idea.page, KNOWN)
        text = plain.source(copy["cells"][0])
        assert "> **You will be able to**" in text and f"- {idea.able[0]}" in text
        assert all(FOUND[other].title in text for other in idea.needs)
        links = re.findall(rf'data-idea="{name}".*?</li>', picture)
        for other in idea.needs:
            assert f'href="../{FOUND[other].page}.html"' in links[0]


def test_minutes_leave_out_the_exercises():
    text = dict(cell_type="markdown", source="word " * 1300 + "\n## Exercises\n" + "x " * 9000)
    assert ideas.minutes([text]) == 10
    assert ideas.minutes([text | dict(source="word " * 9000)]) == 60
    code = dict(cell_type="code", source="x = 1\n" * 300, metadata={})
    folded = code | dict(metadata=dict(tags=["hide-input"]))
    assert ideas.minutes([code, text]) == 20 and ideas.minutes([folded, text]) == 10


def test_the_box_tells_what_the_code_takes_where_it_was_measured(tmp_path):
    assert ideas.to_run("32_swin", tmp_path) == ""
    path = tmp_path / ideas.RECORD
    path.parent.mkdir(parents=True)
    seconds = {"10_attention": 31.2, "11_multihead": 71.0, "32_swin": 130.4}
    path.write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
    assert ideas.to_run("12_position", tmp_path) == ""
    for name, long in [
        ("10_attention", "less than a minute"),
        ("11_multihead", "about 1 minute"),
        ("32_swin", "about 2 minutes"),
    ]:
        assert f"takes {long} on one core" in ideas.to_run(name, tmp_path)


# --- the summaries ----------------------------------------------------------------------------

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def numbers(text):
    return {number.replace(",", "") for number in NUMBER.findall(text)}


def claimed(summary):
    """The numbers of a summary; those within formulas, names and roles are no results."""
    for part in (r"\{[\w:]+\}`[^`]*`", r"\$[^$]*\$", r"[A-Za-z][\w-]*\d[\w/]*"):
        summary = re.sub(part, " ", summary)
    return numbers(summary)


def printed(cells):
    """The numbers of a page: its text, its code and what this printed."""
    texts = [plain.source(cell) for cell in cells if cell["id"] != "summary"]
    for cell in cells:
        for output in cell.get("outputs", ()):
            texts.append("".join(output.get("text", ())))
            data = output.get("data", {})
            texts += ["".join(data[kind]) for kind in data if kind.startswith("text/")]
    return numbers("\n".join(texts))


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_closes_with_a_summary_of_its_own_numbers(name):
    cells = plain.read(chapters.ROOT / "nbs" / f"{name}.ipynb")["cells"]
    place = [cell["id"] for cell in cells].index("summary")
    summary = plain.source(cells[place])
    assert plain.source(cells[place + 1]).startswith(("## Going deeper", "## Exercises"))
    assert claimed(summary) - printed(cells) == set()
    assert claimed("99.123% of 7 in $x^3$, {eq}`eq-8`") == {"99.123", "7"}
