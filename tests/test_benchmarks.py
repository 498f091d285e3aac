"""All of `make gpu` and `make bench` runs at a tiny size, and records what it says it does."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from attnlib.cost import count_operations
from attnlib.inference import forward_short
from attnlib.models import create_model
from benchmarks import common, gpu, runs
from tools import speed_table

ROOT = Path(__file__).parent.parent
GPU = [sys.executable, "-m", "benchmarks.gpu"]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A function that runs a part of `make gpu`, tiny and on a CPU, and returns the record."""
    folder = tmp_path_factory.mktemp("records")

    def run(part, name):
        command = [*GPU, "--tiny", "--device", "cpu", "--out", folder]
        environment = dict(os.environ, OMP_NUM_THREADS="1", TQDM_DISABLE="1")
        done = subprocess.run(
            [*command, "--part", part],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert f"== {part}: done" in done.stdout
        found = json.loads((folder / f"{name}.json").read_text()) if name else {}
        assert not name or {"device", "torch", "date", "commit", "threads"} <= set(found)
        return found

    return run


def test_the_readme_has_the_records():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert speed_table.updated(readme) == readme, "run `python -m tools.speed_table`"
    assert "| ViT-S" in speed_table.table()


def test_the_table_says_tie_where_nothing_is_shown():
    """Quartiles around 1; else the median ratio, marked where the medians contradict it."""

    def say(ours, rows, which="plain"):
        rivals = [
            dict(name=name, ms=ms, ratio=ratio, quartiles=quartiles, optimized=fast)
            for name, ms, ratio, quartiles, fast in rows
        ]
        own = {
            name: dict(name=name, ms=ms, ratio=1, quartiles=[1, 1]) for name, ms in ours.items()
        }
        return speed_table.cell([*own.values(), *rivals], which)

    plain = {"attnlib": 9.0}
    fast = dict(ratio=0.5, quartiles=[0.4, 0.6])
    said = "0.90 (0.85–0.95, timm)"
    assert say(plain, [("timm", 10.0, 0.9, [0.85, 0.95], None)]) == said
    said = "1.10 (1.05–1.20, timm)"
    assert say(plain, [("timm", 8.0, 1.1, [1.05, 1.2], None)]) == said
    said = "tie (0.85–1.00, timm)"
    assert say(plain, [("timm", 10.0, 0.9, [0.85, 1.0], None)]) == said
    assert say(plain, [("timm", 8.9, 0.9, [0.85, 1.0], None)]) == said
    said = "0.90† (0.85–0.95, timm)"
    assert say(plain, [("timm", 8.9, 0.9, [0.85, 0.95], None)]) == said
    nearest = [("a", 10.0, 0.9, [0.8, 0.95], None), ("b", 9.5, 0.95, [0.9, 0.97], None)]
    assert say(plain, nearest) == "0.95 (0.90–0.97, b)"
    both, rivals = plain | {"attnlib, optimized": 5.0}, [("a", 10.0, 0.9, [0.8, 0.95], fast)]
    assert say(both, rivals) == "0.90 (0.80–0.95, a)"
    assert say(both, rivals, "optimized") == "0.50 (0.40–0.60, a)"
    assert say(plain, [("a", 10.0, 0.9, [0.8, 0.95], None)], "optimized") == ""
    assert say(plain, []) == ""


def test_the_table_names_skipped_work_rounds_and_contradictions(monkeypatch, tmp_path):
    row = dict(mode="float32", batch=8, compiled=False, ratio=1, quartiles=[1, 1], rounds=5)
    row |= {"pass": "forward", "optimized": dict(ratio=0.7, quartiles=[0.6, 0.8])}
    rows = [row | {"library": "attnlib", "ms": 11.0}]
    rows += [row | {"library": "attnlib, optimized", "ms": 7.0}]
    rows += [row | {"library": "timm", "ms": 10.0, "ratio": 0.9, "quartiles": [0.85, 0.95]}]
    record = {"device": "a processor", "threads": 2, "skipped": "One row.", "rows": rows}
    (tmp_path / "vit_cpu.json").write_text(json.dumps(record))
    monkeypatch.setattr(speed_table, "RECORDS", tmp_path)
    table = speed_table.table()
    assert table.startswith("**a processor**, 2 threads, 5 rounds\n\n| ")
    assert "| ViT-S, forward, batch 8 | 0.90† (0.85–0.95, timm) |  |  |\n" in table
    assert "\n| ViT-S, forward, batch 8, optimized [1] | 0.70 (0.60–0.80, timm) |" in table
    assert "\n[1] One row. Billion operations an image: ViT-S 8.62 of 9.20.\n" in table
    assert table.endswith(f"\n\n{speed_table.DAGGER}\n")
    for other in rows:
        del other["rounds"]
    rows[2]["ms"] = 12.0
    (tmp_path / "vit_cpu.json").write_text(json.dumps({"device": "b", "rows": rows}))
    table = speed_table.table()
    assert table.startswith("**b**\n\n| ") and "†" not in table and "[1]" not in table


@pytest.mark.parametrize("title", speed_table.SKIPPED)
def test_the_skipped_work_is_what_the_counter_counts(title):
    name = {"ViT-S": "vit_small_patch16_224", "TNT-S": "tnt_s_patch16_224"}[title]
    model, x = create_model(name).eval(), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        whole = count_operations(model, x).flops
        rest = count_operations(partial(forward_short, model), x).flops
    assert (whole, rest) == speed_table.SKIPPED[title]


def test_turns_are_taken_in_a_new_order_each_round():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = common.take_turns(calls, 20, "cpu")
    rounds = [tuple(order[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds) and len(set(rounds)) > 3
    assert [len(times[name]) for name in "abc"] == [20, 20, 20]
    order.clear()
    common.take_turns(calls, 20, "cpu")
    assert [tuple(order[i : i + 3]) for i in range(0, 60, 3)] == rounds  # seeded


def test_ratios_are_medians_over_rounds():
    """A slow round slows all who take part in it, so each round has a ratio of its own."""
    times = {
        "attnlib": [1, 20, 1, 1],
        "timm": [2, 40, 2, 2],
        "attnlib, optimized": [1, 10, 0.5, 1],
    }
    row = common.compared(times, "timm")
    assert row["ratio"] == 0.5 and row["quartiles"] == [0.5, 0.5] and row["rounds"] == 4
    assert row["optimized"] == {"ratio": 0.375, "quartiles": [0.25, 0.5], "rounds": 4}
    assert row["ms"] == 2 and "optimized" not in common.compared({"attnlib": [1]}, "attnlib")


@pytest.mark.parametrize("part", ["checks", "kernels", "sanitize"])
def test_checks(record, part):
    record(part, None)


def test_all_files_with_tests_for_cuda_are_checked():
    """A machine with a GPU may lack what other files import, so those that count are named."""
    needles = "torch.cuda.is_available()", 'importorskip("triton")'
    found = {
        f"tests/{path.name}"
        for path in (ROOT / "tests").glob("test_*.py")
        if any(needle in path.read_text(encoding="utf-8") for needle in needles)
    }
    assert found - {"tests/test_benchmarks.py"} == set(gpu.CHECKS + gpu.KERNELS)


def test_without_a_gpu_nothing_is_begun(tmp_path):
    command = [*GPU, "--part", "attention", "--out", tmp_path]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (
        done.returncode == 2
        and "finds no CUDA device" in done.stderr
        and not any(tmp_path.iterdir())
    )


def test_a_machine_without_jupyter_can_start():
    missing = "IPython fastcore jupyter_book nbclient nbdev nbformat playwright sphinx"
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing.split()}))
import pytest
import benchmarks.gpu, tools.speed_table
files = benchmarks.gpu.CHECKS + benchmarks.gpu.KERNELS
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", *files]))
"""
    command = [sys.executable, "-c", code]
    environment = dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_parts_without_their_packages_are_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "gpu.py",
            "--part",
            "run_lengths",
            "run_digits",
            "--tiny",
            "--device",
            "cpu",
            "--out",
            str(tmp_path),
        ],
    )
    with pytest.raises(SystemExit) as end:
        gpu.main()
    said = capsys.readouterr().out
    assert (
        end.value.code == 0
        and "run_lengths: left out, since num2words, tokenizers cannot be imported" in said
    )
    assert "run_digits: left out, since sklearn" in said


def test_a_part_out_of_time_has_failed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "LIMIT", 0.1)
    monkeypatch.setattr(
        sys,
        "argv",
        ["gpu.py", "--part", "attention", "--tiny", "--device", "cpu", "--out", str(tmp_path)],
    )
    with pytest.raises(SystemExit, match="failed: attention"):
        gpu.main()
    assert (
        "attention: out of time" in capsys.readouterr().out
        and not (tmp_path / "gpu.done").exists()
    )


def test_a_finished_part_is_not_run_again(tmp_path):
    now = gpu.commit()
    (tmp_path / "gpu.done").write_text(f"{now} attention\n")
    command = [*GPU, "--tiny", "--device", "cpu", "--part", "attention"]
    done = subprocess.run(
        [*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (
        f"== attention: done for {now}" in done.stdout
        and not (tmp_path / "attention_cpu.json").exists()
    )


def test_no_part_is_forgotten():
    """Each benchmark and each run of the repository has a part."""
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {
        "__init__",
        "common",
        "gpu",
        "inference",  # of CPUs
        "runs",
        "vision",
        # experiments of Parts I and II: many small models, each too small for a GPU
        *("ablations", "association", "bias", "bottleneck", "compare", "decoding"),
        *("collages", "dense", "distillation", "finetune", "growth", "heads"),
        *("modern", "positions", "sizes", "zero_shot"),
        # of Part IV; `run_mae_cifar` is for a GPU
        *("autoformer", "beit", "captions", "detr", "detr_coco", "glimpses", "hidden", "mae"),
        *("mae_photographs", "panoptic", "panoptic_coco"),
    }
    assert scripts <= set(gpu.PARTS) and set(gpu.VISION) <= set(gpu.PARTS)
    assert set(gpu.RUNS + gpu.NETWORK) == set(runs.PARTS) and set(gpu.NEEDS) <= set(gpu.PARTS)
    assert {f"run_{name}" for name in runs.PARTS} <= set(gpu.PARTS)


def test_attention(record):
    found = record("attention", "attention_cpu")
    assert len(found["rows"]) == 8
    for row in found["rows"]:
        assert row["reference"]["ratio"] == 1 and row["sdpa"]["ms"] > 0
        assert row["difference"] < (1e-5 if row["dtype"] == "float32" else 5e-2)


def test_translation(record):
    for name in ("transformers", "x_transformers"):
        pytest.importorskip(name)
    found = record("translation", "translation_cpu")
    assert (
        "copy_gb_per_s" in found
        and len(found["training"]) == 36
        and len(found["decoding"]) == 18
    )
    for row in found["training"] + found["decoding"]:
        low, high = row["quartiles"]
        assert (
            row["ms"] > 0
            and low <= row["ratio"] <= high
            and (row["model"] != "attnlib" or row["ratio"] == 1)
        )
        assert row["memory"] > 0
    for row in found["training"]:
        compared = row["dropout"] == 0 and not row["model"].startswith("x-")
        assert (row["error"] is not None) == compared
        assert not compared or row["error"] < (1e-5 if row["mode"] == "float32" else 0.05)
    assert all(row["same_tokens"] == 1 for row in found["decoding"] if row["mode"] == "float32")


def test_flash(record):
    pytest.importorskip("triton")
    found = record("flash", "flash_cpu")
    assert "triton" in found and len(found["rows"]) == 6
    for row in found["rows"]:
        assert row["backends"]["triton"]["ms"] > 0 and "reference" in row["backends"]
        assert all(other["error"] < row["allowed"] for other in row["backends"].values())


def test_windows(record):
    pytest.importorskip("triton")
    found = record("windows", "windows_cpu")
    assert {row["way"] for row in found["rows"]} == {"timm", "PyTorch", "kernel"}
    assert all(row["ms"] > 0 and row["difference"] < 0.05 for row in found["rows"])


@pytest.mark.parametrize(
    "name, libraries",
    [
        ("vit", {"attnlib", "timm", "torchvision", "transformers", "vit-pytorch"}),
        ("swin", {"attnlib", "timm", "torchvision", "transformers"}),
        ("swinv2", {"attnlib", "timm", "torchvision", "transformers"}),
        ("tnt", {"attnlib", "timm"}),
    ],
)
def test_vision(record, name, libraries):
    """All peers run, those with our weights agree, and each has a ratio."""
    found = record(name, f"{name}_cpu")
    assert {row["library"] for row in found["rows"]} == libraries | {"attnlib, optimized"}
    assert set(found["differences"][gpu.VISION[name]]) == libraries - {"attnlib", "vit-pytorch"}
    assert len(found["rows"]) == 2 * len(libraries) + 1  # the optimized one does not train
    assert all(
        row["ms"] > 0 and row["ratio"] > 0 and row["memory"] > 0 for row in found["rows"]
    )


@pytest.mark.parametrize(
    "name", ["numbers", "translator", "lengths", "digits", "detr", "supernet"]
)
def test_runs(record, name):
    found = record(f"run_{name}", name)
    if name == "numbers":
        assert len(found["supervised"]["directions"]) == 108
    elif name == "translator":
        assert len(found["tokenizer"]) > 1000 and 0 <= found["runs"][0]["test"] <= 1
    elif name == "lengths":
        assert {run["position"] for run in found["runs"]} >= {"sinusoidal", "rotary", "none"}
    elif name == "supernet":
        assert all(0 <= row["accuracy"] <= 1 for row in found["subnets"])
    elif name == "detr":
        assert found["history"] and 0 <= found["ap"] <= found["ap50"] <= 1
    else:
        assert [run["model"] for run in found["runs"]] == [
            "vit",
            "deit",
            "swin",
            "swinv2",
            "tnt",
        ]
        assert all(0 <= run["history"][-1]["accuracy"] <= 1 for run in found["runs"])
