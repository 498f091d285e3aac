"""The record of the window kernels on GPUs that are not here is of today and in order."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="it compiles the kernels")

from benchmarks import windows as static

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "windows_static.json"
AGAIN = "run python -m benchmarks.windows static --out benchmarks/results"


@pytest.fixture(scope="module")
def rows():
    return list(csv.DictReader(json.loads(RECORD.read_text())["rows"]))


def test_record_is_of_todays_kernels(rows):
    assert len(static.read(RECORD)) == len(rows), f"a kernel or a tile has changed: {AGAIN}"
    record = json.loads(RECORD.read_text())
    assert record["compiled"] == len(rows) == record["of"] == len(static.jobs()), AGAIN


def test_every_gate_holds(rows):
    wrong = {row["kernel"]: static.broken(row) for row in rows if static.broken(row)}
    assert not wrong and not json.loads(RECORD.read_text())["failed"]


def test_gates_find_what_is_wrong(rows):
    """A kernel that is in order, and each of the defects that the gates are for."""
    usual = dict(kernel="forward", gpu="sm_90", dtype="bfloat16", width="32", window="7")
    row = next(row for row in rows if usual.items() <= row.items() and row["options"] == "s")
    assert not static.broken(row)
    for change, word in (
        (dict(stack="1528"), "stack"),
        (dict(registers="32"), "registers"),
        (dict(kernel="whole", registers="60"), "below 80"),
        (dict(shared="240000"), "shared memory"),
        (dict(programs="0"), "fits"),
        (dict(product="tt.dot"), "warp groups"),
        (dict(buffers="1"), "fetch ahead"),
    ):
        assert word in static.broken(row | change), change
    assert not static.broken(row | dict(options="sp", buffers="1"))


def test_every_launch_of_swin_is_compiled(rows):
    """All GPUs and dtypes, windows of 7 and heads of 32: forward, backward, shifted, padded."""
    names = {tuple(row[name] for name in static.NAMES) for row in rows}
    for gpu in ("sm_80", "sm_89", "sm_90", "sm_100"):
        for dtype in static.WIDTHS:
            kernels = ("query", "key", "bias") if dtype == "float32" else ("whole",)
            for kernel in ("forward", *kernels):
                for options in ("none", "s", "sp"):
                    assert (kernel, gpu, dtype, "32", "7", options) in names
            for kernel in static.PRODUCTS:
                assert (kernel, gpu, dtype, "96", "-", "-") in names


def test_another_source_or_tile_drops_rows(monkeypatch):
    before = static.read(RECORD)
    tiles = static.windows.TILES["key"] | {(2, 32): (32, 8, 2)}
    monkeypatch.setitem(static.windows.TILES, "key", tiles)
    static.windows.tiling.cache_clear()
    gone = before.keys() - static.read(RECORD).keys()
    static.windows.tiling.cache_clear()
    assert gone and all(job[0] == "key" and job[3] in ("16", "32") for job in gone)
    hashed = static.source_hash
    monkeypatch.undo()
    static.windows.tiling.cache_clear()
    monkeypatch.setattr(
        static, "source_hash", lambda k, cosine: hashed(k, cosine) + "x" * (k == "bias")
    )
    assert {job[0] for job in before.keys() - static.read(RECORD).keys()} == {"bias"}


def test_a_fingerprint_is_of_a_kernels_own_functions(monkeypatch):
    texts = dict(static.functions())
    before = {name: static.source_hash(name) for name in ("forward", "whole", "fc1")}
    text, names = texts["_row_sums"]  # of the backward pass alone
    monkeypatch.setattr(static, "functions", lambda: texts | {"_row_sums": (text + " ", names)})
    after = {name: static.source_hash(name) for name in before}
    assert [before[name] == after[name] for name in before] == [True, False, True]


SAMPLE = """
import json
from benchmarks import windows as static
for job in {jobs}:
    print(json.dumps(static.compiled(job)))
"""


def test_a_sample_is_as_recorded(rows):
    """Ten kernels are compiled anew; another version of Triton may give other numbers."""
    recorded = {tuple(row[name] for name in static.NAMES): row for row in rows}
    names = [name for name in recorded if name[1] in ("sm_80", "sm_90")]
    jobs = names[:: len(names) // 10][:10]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-W", "ignore", "-c", SAMPLE.format(jobs=jobs)]
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == len(jobs), done.stderr
    version = json.loads(RECORD.read_text())["triton"]
    for job, row in zip(jobs, made):
        assert not static.broken(row), row
        if version == static.triton.__version__:
            assert row == recorded[job]


@pytest.mark.slow
def test_command_goes_on_where_it_ended(tmp_path):
    call = [sys.executable, "-W", "ignore", "-m", "benchmarks.windows", "static"]
    call += ["--out", str(tmp_path), "--only", "sm_90,bfloat16,64,bias", "--most", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for count in (1, 2):
        done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        record = json.loads((tmp_path / "windows_static.json").read_text())
        assert record["compiled"] == count and "1/1 bias sm_90" in done.stdout
