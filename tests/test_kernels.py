"""The record of what the kernels take on GPUs that are not here is today's, and all is well."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="it compiles the kernels")

from benchmarks import flash as kernels

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "kernels_static.json"
AGAIN = "run python -m benchmarks.flash static --out benchmarks/results"


@pytest.fixture(scope="module")
def rows():
    return list(csv.DictReader(json.loads(RECORD.read_text())["rows"]))


def test_record_is_of_todays_kernels(rows):
    record = json.loads(RECORD.read_text())
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


@pytest.mark.parametrize("table, extra", [("TILES", "plain"), ("_WITH_EXTRA", "m")])
def test_rows_of_another_tile_are_dropped(monkeypatch, table, extra):
    before = kernels.read(RECORD)
    changed = {"forward": getattr(kernels.flash, table)["forward"] | {(2, 64): (64, 64, 4, 2)}}
    monkeypatch.setattr(kernels.flash, table, getattr(kernels.flash, table) | changed)
    gone = before.keys() - kernels.read(RECORD).keys()
    assert ("forward", "sm_90", "bfloat16", "64", extra) in gone
    assert all(name[0] == "forward" and name[3] in ("16", "32", "64") for name in gone)


SAMPLE = """
import json
from benchmarks import flash as kernels
for job in {jobs}:
    print(json.dumps(kernels.{function}(*job)))
"""


def run(function, jobs):
    """What a function of `kernels` says of each job, in a process that can compile."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-W", "ignore", "-c", SAMPLE.format(jobs=jobs, function=function)]
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == len(jobs), done.stderr
    return made


def job_of(name):
    return *name[:3], int(name[3]), name[4].replace("plain", "")


def of_this_triton():
    return json.loads(RECORD.read_text())["triton"] == kernels.triton.__version__


def test_code_of_a_sample_is_as_recorded(rows):
    """Each kernel, option and dtype; the code before Triton knows the GPU."""
    if not of_this_triton():
        pytest.skip("another version of Triton")
    first = {}
    for row in rows:
        first.setdefault((row["kernel"], row["extra"], row["dtype"]), row)
    codes = run("code_of", [job_of(kernels.key(row)) for row in first.values()])
    for row, code in zip(first.values(), codes, strict=True):
        assert row["code"] == code, f"{kernels.key(row)} has changed: {AGAIN}"


def test_a_sample_is_as_recorded(rows):
    """A dozen kernels are compiled anew; another version of Triton may give other numbers."""
    recorded = {kernels.key(row): row for row in rows}
    names = [name for name in recorded if name[1] in ("sm_80", "sm_90")][:: len(recorded) // 12]
    for row in run("compiled", [job_of(name) for name in names[:12]]):
        assert not kernels.broken(row), row
        if of_this_triton():
            assert {c: str(row[c]) for c in row} == recorded[kernels.key(row)]


def test_code_is_what_counts_and_not_words(tmp_path):
    """A docstring changes nothing, a constant of the kernel does."""
    text = Path(kernels.flash.__file__).read_text()
    program = """
import sys
sys.path.insert(0, {folder!r})
import importlib.util
from attnlib import flash
from benchmarks import flash as kernels
spec = importlib.util.spec_from_file_location("attnlib.changed", {path!r})
source = open({path!r}).read().replace("attnlib::flash", "changed::flash")
source = source.replace("torch.ops.attnlib", "torch.ops.changed")
open({path!r}, "w").write(source)
changed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(changed)
kernels.compile_for = changed.compile_for
print(kernels.code_of("forward", "sm_90", "bfloat16", 64, "b"))
"""
    (wanted,) = run("code_of", [("forward", "sm_90", "bfloat16", 64, "b")])
    for new, same in (
        (text.replace('"""Add the bias to logits', '"""Add a bias to the logits'), True),
        (text.replace("to(tl.float32) * LOG2E", "to(tl.float32) * 2"), False),
    ):
        assert new != text
        path = tmp_path / "changed.py"
        path.write_text(new)
        call = program.format(folder=str(ROOT), path=str(path))
        environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", call],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert (done.stdout.strip() == wanted) is same, done.stderr


@pytest.mark.slow
def test_command_goes_on_where_it_ended(tmp_path):
    call = [sys.executable, "-W", "ignore", "-m", "benchmarks.flash", "static"]
    call += ["--out", str(tmp_path), "--only", "sm_90,bfloat16,64,bias", "--most", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for count in (1, 2):
        done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        record = json.loads((tmp_path / "kernels_static.json").read_text())
        assert record["compiled"] == count and "1/1 bias sm_90" in done.stdout


def test_kernels_compile_on_the_oldest_triton():
    """A record made with the version that pyproject.toml asks for: all options, two GPUs."""
    record = json.loads((ROOT / "benchmarks" / "results" / "kernels_floor.json").read_text())
    floor = ".".join(record["triton"].split(".")[:2])
    assert f"triton>={floor};" in (ROOT / "pyproject.toml").read_text()
    assert floor == ".".join(map(str, kernels.flash._OLDEST_TRITON))
    rows = {kernels.key(row): row for row in csv.DictReader(record["rows"])}
    for job in kernels.jobs(["bfloat16", "64"]):
        if job[1] in kernels.FIRST:
            row = rows[kernels.key_of(job)]
            tile = [int(row[c]) for c in kernels.COLUMNS[5:9]]
            assert tile == kernels.tile_of(*job)
            assert not kernels.broken(row), row
