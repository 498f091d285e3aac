"""The record of what the kernels take on GPUs that are not here is today's, and all is well."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="it compiles the kernels")

from benchmarks import kernels

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "kernels_static.json"
AGAIN = "run python -m benchmarks.kernels --out benchmarks/results"


@pytest.fixture(scope="module")
def rows():
    return list(csv.DictReader(json.loads(RECORD.read_text())["rows"]))


def test_record_is_of_todays_kernels(rows):
    record = json.loads(RECORD.read_text())
    assert record["source"] == kernels.source_hash(), f"the kernels have changed: {AGAIN}"
    assert len(kernels.read(RECORD)) == len(rows), f"a tile has changed: {AGAIN}"
    assert record["compiled"] == len(rows) and record["of"] == len(kernels.jobs())
    assert record["of"] - record["compiled"] == sum(record["not compiled yet"].values())


def test_every_gate_holds(rows):
    wrong = {kernels.key(row): kernels.broken(row) for row in rows if kernels.broken(row)}
    assert not wrong and not json.loads(RECORD.read_text())["failed"]


def test_what_readers_have_is_complete(rows):
    """Bfloat16 on the GPUs of data centers, heads of 64 and 128, every kernel and option."""
    done = {kernels.key(row) for row in rows}
    wanted = {
        tuple(map(str, (*job[:4], job[4] or "plain")))
        for job in kernels.jobs(["bfloat16"])
        if job[1] in kernels.FIRST and job[3] in (64, 128)
    }
    assert wanted <= done, f"{len(wanted - done)} kernels have not been compiled: {AGAIN}"


def test_gates_find_what_is_wrong():
    """A kernel that is in order, and each of the defects that the gates are for."""
    row = dict.fromkeys(kernels.COLUMNS, "0") | dict(
        kernel="key", gpu="sm_90", dtype="bfloat16", width="64", rows="64", cols="128",
        warps="8", stages="3", registers="250", shared="66560", programs="1",
        product="warp_group_dot", buffers="3",
    )  # fmt: skip
    assert not kernels.broken(row)
    for change, word in (
        (dict(stack="3352"), "stack"),
        (dict(registers="32"), "registers"),
        (dict(registers="60"), "below 64"),
        (dict(shared="240000"), "shared memory"),
        (dict(programs="0"), "fits"),
        (dict(product="tt.dot"), "warp groups"),
        (dict(buffers="2"), "fetch ahead"),
        (dict(gpu="sm_80", product="tt.dot", buffers="1"), "fetch ahead"),
    ):
        assert word in kernels.broken(row | change)
    assert not kernels.broken(row | dict(gpu="sm_80", product="tt.dot", buffers="2"))


def test_programs_of_a_multiprocessor():
    """Limited by registers, by shared memory, by warps, by the number of programs."""
    assert kernels.programs(80, 4, 128, 0) == 4
    assert kernels.programs(90, 4, 32, 100 << 10) == 2
    assert kernels.programs(89, 8, 32, 0) == 6
    assert kernels.programs(80, 1, 32, 0) == 32


def test_hash_is_of_code_and_not_of_words(tmp_path):
    text = Path(kernels.flash.__file__).read_text()
    for changed, same in (
        (text.replace('"""Add the bias to logits', '"""Add a bias to the logits'), True),
        (text + "\n\ndef other():\n    return 1\n", True),
        (text.replace("peak = new\n", "peak = new + 0\n"), False),
        (text.replace("(128, 64, 4, 3)", "(128, 64, 4, 2)"), True),  # of some rows only
    ):
        assert changed != text
        path = tmp_path / "flash.py"
        path.write_text(changed)
        assert (kernels.source_hash(path) == kernels.source_hash()) is same


@pytest.mark.parametrize("table, extra", [("TILES", "plain"), ("WITH_EXTRA", "m")])
def test_rows_of_another_tile_are_dropped(monkeypatch, table, extra):
    before = kernels.read(RECORD)
    changed = {"forward": getattr(kernels.flash, table)["forward"] | {(2, 64): (64, 64, 4, 2)}}
    monkeypatch.setattr(kernels.flash, table, getattr(kernels.flash, table) | changed)
    gone = before.keys() - kernels.read(RECORD).keys()
    assert ("forward", "sm_90", "bfloat16", "64", extra) in gone
    assert all(name[0] == "forward" and name[3] in ("16", "32", "64") for name in gone)


SAMPLE = """
import json
from benchmarks import kernels
for job in {jobs}:
    print(json.dumps(kernels.compiled(*job)))
"""


def test_a_sample_is_as_recorded(rows):
    """A dozen kernels are compiled anew; another version of Triton may give other numbers."""
    recorded = {kernels.key(row): row for row in rows}
    names = [name for name in recorded if name[1] in ("sm_80", "sm_90")][:: len(recorded) // 12]
    jobs = [(*name[:3], int(name[3]), name[4].replace("plain", "")) for name in names[:12]]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-W", "ignore", "-c", SAMPLE.format(jobs=jobs)]
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == len(jobs), done.stderr
    version = json.loads(RECORD.read_text())["triton"]
    for row in made:
        assert not kernels.broken(row), row
        if version == kernels.triton.__version__:
            assert {c: str(row[c]) for c in row} == recorded[kernels.key(row)]


def test_command_goes_on_where_it_ended(tmp_path):
    call = [sys.executable, "-W", "ignore", "-m", "benchmarks.kernels", "--out", str(tmp_path)]
    call += ["--only", "sm_90,bfloat16,64,bias", "--most", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for count in (1, 2):
        done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        record = json.loads((tmp_path / "kernels_static.json").read_text())
        assert record["compiled"] == count and "1/1 bias sm_90" in done.stdout
