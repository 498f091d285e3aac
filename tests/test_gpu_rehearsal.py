"""`make gpu` with faults: the records are complete whatever fails, and say what they lack."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, records, runner, timing

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
TIMED = (  # parts that write rows; of the models one, for all are timed by one script
    *("roof", "attention", "flash", "windows", "fused", "vit", "translation", "mae_speed"),
    *("detr_speed", "panoptic_speed", "autoformer_speed", "efficient"),
)
PACKAGES = (
    *("timm", "torchvision", "transformers", "triton", "accelerate", "safetensors", "scipy"),
    *("sklearn", "tokenizers", "num2words", "pycocotools", "vit_pytorch", "x_transformers"),
    *("tqdm", "pytest"),
)


# --- running out of memory --------------------------------------------------------------------


class Rehearsal:
    """Runs parts, tiny and on a CPU, and out of memory at one call of each setting.

    Attributes
    ----------
    at : int
        The call of the present setting that fails: 0 is its beginning, before the first
        contestant; with -1 none fails.
    asked : list of dict
        The settings of the last run.
    hit : list of dict
        Those in which a call has failed.
    """

    def __init__(self, folder, monkeypatch):
        self.folder, self.asked, self.hit = folder, [], []
        self.attempt, self.once = timing.attempt, runner.Rows.once
        rehearsal = self

        def attempt(left_out, name, function):
            return rehearsal.attempt(left_out, name, lambda: rehearsal.call(function))

        def once(rows, setting, make, kind="rows"):
            rehearsal.count, rehearsal.at = 0, rehearsal.first
            rehearsal.at += rehearsal.step * len(rehearsal.asked)
            rehearsal.asked.append(setting)
            begin = lambda left_out: rehearsal.call(lambda: make(left_out))  # noqa: E731
            return rehearsal.once(rows, setting, begin, kind)

        monkeypatch.setattr(timing, "attempt", attempt)
        monkeypatch.setattr(runner.Rows, "once", once)
        monkeypatch.setattr(records, "_commit", lambda: None)  # it would ask git for each row
        self.monkeypatch = monkeypatch

    def call(self, function):
        self.count += 1
        if self.count == self.at + 1:
            self.hit.append(self.asked[-1])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
        return function()

    def run(self, part, first=-1, step=0):
        """The exit status of a part, and its record.

        In its first setting the call `first` fails, in each further one `step` calls later.
        """
        self.first, self.step, self.asked, self.hit = first, step, [], []
        self.count, self.at = 0, -1  # until a setting begins
        threads, seen = torch.get_num_threads(), set(self.folder.glob("*.json"))
        status = 0
        for command in gpu.PARTS[part]("cpu", True):
            _, _, module, *options = command
            options += ["--tiny", "--out", str(self.folder), "--minutes", "60"]
            options += ["--device", "cpu"] if part != "efficient" else []
            self.monkeypatch.setattr(sys, "argv", [module, *options])
            try:
                importlib.import_module(module).main()
            except SystemExit as end:
                status = status or end.code
        torch.set_num_threads(threads)
        found = set(self.folder.glob("*.json")) - seen or self.folder.glob("*.json")
        (path,) = found
        return status, json.loads(path.read_text())


def holds(record, setting):
    """Whether a record has rows of a setting."""
    rows = [row for value in record.values() if isinstance(value, list) for row in value]
    missing = [*record["left_out"], *record["failed"], *record["begun"]]
    return any(setting.items() <= row.items() for row in rows if row not in missing)


def mentions(record, setting):
    """Why something of a setting is missing."""
    missing = [*record["left_out"], *record["failed"]]
    return [row["why"] for row in missing if setting.items() <= row.items()]


def rehearse(part, first, step, folder, monkeypatch):
    """With a call of each setting out of memory, then without: the settings, and those hit.

    For `first` and `step` see `Rehearsal.run`.
    """
    folder = folder / f"{part}-{first}"
    folder.mkdir()
    with monkeypatch.context() as patch:
        rehearsal = Rehearsal(folder, patch)
        status, record = rehearsal.run(part, first, step)
        asked, hit = rehearsal.asked, rehearsal.hit
        assert asked and not record["begun"]
        for setting in asked:
            failed = any(setting.items() <= row.items() for row in record["failed"])
            assert holds(record, setting) != failed, (setting, "neither measured nor failed")
            why = mentions(record, setting)
            assert any("OutOfMemoryError" in words for words in why) == (setting in hit)
        assert bool(status) == bool(record["failed"])
        status, record = rehearsal.run(part)
        assert status == 0 and not record["failed"] and not record["begun"]
        assert rehearsal.asked == asked and all(holds(record, setting) for setting in asked)
    return asked, hit


@pytest.mark.parametrize("at", [0, 1, 8])
def test_out_of_memory_in_the_attention_backends(at, tmp_path, monkeypatch):
    """At the beginning, in the first call of a backend, and in the turns."""
    asked, hit = rehearse("attention", at, 0, tmp_path, monkeypatch)
    assert asked == hit and len(hit) == 8


@pytest.mark.slow
@pytest.mark.parametrize("part", TIMED)
def test_out_of_memory_at_each_measured_call_in_turn(part, tmp_path, monkeypatch):
    """First at the beginning of all settings, then at other calls of each."""
    asked, hit = rehearse(part, 0, 0, tmp_path, monkeypatch)
    assert asked == hit
    first = 1
    while hit:
        _, hit = rehearse(part, first, 1, tmp_path, monkeypatch)
        first += len(asked)
    assert first > 1 + len(asked)


def test_ours_stays_where_others_leave_no_memory():
    """The largest of the others goes, until ours runs; alone it fails itself."""
    from benchmarks import flash

    rows = {"triton": {"MiB": 9}, "math": {"MiB": 5}, "flash": {"MiB": 1}, "flex": {"MiB": 3}}

    def calls(least):
        """Ours runs beside at most so many others."""
        standing = dict.fromkeys(rows)

        def ours():
            if len(standing) > least + 1:
                largest = max(set(standing) - {"triton"}, key=lambda name: rows[name]["MiB"])
                del standing[largest]
                raise torch.OutOfMemoryError("CUDA out of memory.")

        return {name: ours if name == "triton" else lambda: None for name in rows}

    left_out = {}
    assert set(flash.warmed(calls(1), rows, "cpu", left_out)) == {"triton", "flash"}
    assert list(left_out) == ["math", "flex"]
    assert "leaves triton no memory (OutOfMemoryError" in left_out["math"]
    left_out = {}
    assert not flash.warmed(calls(-1), rows, "cpu", left_out) and set(left_out) == set(rows)


def test_flash_without_memory_for_the_exact_results(monkeypatch):
    """Times without errors; and ours may be missing without taking the others along."""
    from benchmarks import flash

    def refuse(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    case, left_out = flash.make((1, 1, 9, 8), torch.float32, "cpu", "plain", False), {}
    functions = {name: flash.contestants("cpu")[name] for name in ("math", "reference")}
    monkeypatch.setattr(flash, "exact_results", refuse)
    functions = {"triton": refuse} | functions
    found = flash.measure(functions, flash.forward, case, "cpu", 2, left_out)
    assert set(left_out) == {"exact results", "triton"}
    assert set(found["backends"]) == {"math", "reference"}
    for row in found["backends"].values():
        assert row["error"] is None and row["ms"] > 0 and "ratio" not in row


def test_a_setting_that_ends_the_process_is_given_up_after_two(tmp_path):
    path = tmp_path / "rows_cpu.json"
    for _ in range(2):
        rows = runner.Rows(path, "cpu")
        with pytest.raises(KeyboardInterrupt):  # in place of a crash
            rows.once({"size": 1}, lambda left_out: (_ for _ in ()).throw(KeyboardInterrupt))
    rows = runner.Rows(path, "cpu")
    assert rows.once({"size": 1}, lambda left_out: pytest.fail("begun again")) == []
    assert rows.once({"size": 2}, lambda left_out: [{"ms": 1}]) == [{"size": 2, "ms": 1}]
    record = json.loads(path.read_text())
    (failed,) = record["failed"]
    assert failed == {"size": 1, "why": "it has ended the process twice"}
    assert record["rows"] == [{"size": 2, "ms": 1}]


def test_a_wrong_result_fails_its_setting_alone(tmp_path):
    """And the command; the next one tries it again."""
    path = tmp_path / "rows_cpu.json"
    good = []

    def make(left_out):
        assert good, "off by 0.3"
        return [{"ms": 1}]

    for wanted in (1, 0):
        rows = runner.Rows(path, "cpu")

        def go():
            rows.once({"size": 1}, make)
            rows.once({"size": 2}, lambda left_out: [{"ms": 2}])

        if wanted:
            with pytest.raises(SystemExit, match="1 settings have failed"):
                rows.work(go)
        else:
            rows.work(go)
        record = json.loads(path.read_text())
        why = [row["why"] for row in record["failed"]]
        assert why == ["AssertionError: off by 0.3"] * wanted
        assert {row["size"] for row in record["rows"]} == ({2} if wanted else {1, 2})
        good.append(True)


# --- packages that are missing ----------------------------------------------------------------

WITHOUT = """
import importlib, sys, traceback
sys.modules[{package!r}] = None  # which raises ModuleNotFoundError where it is imported
from benchmarks import gpu

def call(command, seconds):
    _, _, module, *options = command
    if module == "pytest":
        return 0, ""
    sys.argv = [module, *options]
    try:
        importlib.import_module(module).main()
    except SystemExit as end:
        return end.code or 0, ""
    except BaseException as problem:
        traceback.print_exc()
        return 1, repr(problem)
    return 0, ""

gpu.call = call
sys.argv = ["gpu", "--tiny", "--device", "cpu", "--out", {out!r}, "--part", *{parts!r}]
gpu.main()
"""


def parts_without(package, parts, out):
    """Run parts in a process without a package; the record of all, and those of the parts."""
    code = WITHOUT.format(package=package, out=str(out), parts=list(parts))
    environment = dict(os.environ, OMP_NUM_THREADS="1", TQDM_DISABLE="1", PYTHONPATH=str(ROOT))
    environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    suite = json.loads((out / "gpu_tiny_cpu.json").read_text())["parts"]
    assert set(suite) == set(parts)
    records = {path.stem: json.loads(path.read_text()) for path in out.glob("*_cpu.json")}
    for name, row in suite.items():
        assert row["how"] in ("done", "left out"), (name, row)
        if row["how"] == "left out":
            assert package in row["why"] and package in gpu.needed(name)
    for record in records.values():
        assert not record.get("failed") and not record.get("begun")
    return suite, records


def test_without_transformers(tmp_path):
    """Its models are left out, with the reason, and ours are timed without them."""
    suite, records = parts_without("transformers", ["mae_speed", "translation"], tmp_path)
    assert suite["mae_speed"]["how"] == "done" and suite["translation"]["how"] == "left out"
    record = records["mae_speed_cpu"]
    why = {row["why"] for row in record["left_out"] if row["what"] == "transformers"}
    assert len(why) == 1 and "ModuleNotFoundError" in why.pop()
    assert all({"attnlib", "lean"} == set(row["ms"]) for row in record["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_without_each_package_in_turn(package, tmp_path):
    """Each part completes, or is left out since it needs the package; then with it, all do."""
    needy = {part for part in gpu.PARTS if package in gpu.needed(part)}
    parts = [*TIMED, "checks", "kernels", "swinv2"]
    parts += sorted(part for part in needy if part.startswith("run_"))
    suite, records = parts_without(package, parts, tmp_path)
    left_out = {part for part in suite if suite[part]["how"] == "left out"}
    assert left_out == needy & set(parts)
    lost = [row for record in records.values() for row in record.get("left_out", ())]
    why = [row["why"] for row in lost if "ModuleNotFoundError" in row["why"]]
    if package in ("timm", "torchvision", "transformers", "vit_pytorch", "x_transformers"):
        assert why and all(package in words for words in why)
    else:
        assert not why
