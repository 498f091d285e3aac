"""All of `make gpu` and `make bench` runs, at a size at which it costs nothing, and records what it says it records."""
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
gpu = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A function that runs a part of `make gpu`, on a CPU and tiny, and returns what it recorded."""
    folder = tmp_path_factory.mktemp("records")

    def run(part, name):
        command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--tiny", "--device", "cpu", "--out", folder]
        environment = dict(os.environ, OMP_NUM_THREADS="1", TQDM_DISABLE="1")
        done = subprocess.run([*command, "--part", part], env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert f"== {part}: done" in done.stdout
        found = json.loads((folder / f"{name}.json").read_text()) if name else {}
        assert not name or {"device", "torch", "date", "commit", "threads"} <= set(found)
        return found

    return run


def test_the_readme_has_the_records():
    spec = importlib.util.spec_from_file_location("speed_table", ROOT / "tools" / "speed_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert module.updated(readme) == readme, "run `python tools/speed_table.py`"
    assert "| ViT-S, forward" in module.table()


@pytest.mark.parametrize("part", ["checks", "kernels", "sanitize"])
def test_checks(record, part):
    record(part, None)


def test_all_files_with_tests_for_cuda_are_checked():
    """A machine with a GPU may lack what the other files import, so those that count are named."""
    needles = "torch.cuda.is_available()", 'importorskip("triton")'
    found = {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py")
             if any(needle in path.read_text(encoding="utf-8") for needle in needles)}
    assert found - {"tests/test_benchmarks.py"} == set(gpu.CHECKS + gpu.KERNELS)


def test_without_a_gpu_nothing_is_begun(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--part", "attention", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, CUDA_VISIBLE_DEVICES=""))
    assert done.returncode == 2 and "finds no CUDA device" in done.stderr and not any(tmp_path.iterdir())


def test_parts_without_their_packages_are_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--part", "run_lengths", "run_digits", "--tiny", "--device", "cpu",
                                      "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    said = capsys.readouterr().out
    assert end.value.code == 0 and "run_lengths: left out, since num2words, tokenizers cannot be imported" in said
    assert "run_digits: left out, since sklearn" in said


def test_a_part_out_of_time_has_failed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "LIMIT", 0.1)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--part", "attention", "--tiny", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="failed: attention"):
        gpu.main()
    assert "attention: out of time" in capsys.readouterr().out and not (tmp_path / "gpu.done").exists()


def test_a_finished_part_is_not_run_again(tmp_path):
    now = gpu.commit()
    (tmp_path / "gpu.done").write_text(f"{now} attention\n")
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--tiny", "--device", "cpu", "--part", "attention"]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, check=True)
    assert f"== attention: done for {now}" in done.stdout and not (tmp_path / "attention_cpu.json").exists()


def test_no_part_is_forgotten():
    """Each benchmark and each run of the repository has a part."""
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"common", "gpu", "runs", "vision"}
    assert scripts <= set(gpu.PARTS) and set(gpu.VISION) <= set(gpu.PARTS)
    spec = importlib.util.spec_from_file_location("runs", ROOT / "benchmarks" / "runs.py")
    runs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runs)
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
    assert "copy_gb_per_s" in found and len(found["training"]) == 36 and len(found["decoding"]) == 12
    for row in found["training"] + found["decoding"]:
        low, high = row["quartiles"]
        assert row["ms"] > 0 and low <= row["ratio"] <= high and (row["model"] != "attnlib" or row["ratio"] == 1)
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


@pytest.mark.parametrize("name, libraries", [
    ("vit", {"attnlib", "timm", "torchvision", "transformers", "vit-pytorch"}),
    ("swin", {"attnlib", "timm", "torchvision", "transformers"}),
    ("swinv2", {"attnlib", "timm", "torchvision", "transformers"}),
    ("tnt", {"attnlib", "timm"}),
])
def test_vision(record, name, libraries):
    """All peers run, those with our weights agree, and each has a ratio."""
    found = record(name, f"{name}_cpu")
    assert {row["library"] for row in found["rows"]} == libraries
    assert set(found["differences"][gpu.VISION[name]]) == libraries - {"attnlib", "vit-pytorch"}
    assert len(found["rows"]) == 2 * len(libraries)
    assert all(row["ms"] > 0 and row["ratio"] > 0 and row["memory"] > 0 for row in found["rows"])


@pytest.mark.parametrize("name", ["numbers", "numbers_english", "lengths", "digits", "backbones"])
def test_runs(record, name):
    found = record(f"run_{name}", name)
    if name.startswith("numbers"):
        assert len(found["supervised"]["directions"]) == (108 if name == "numbers" else 22)
    elif name == "lengths":
        assert {run["position"] for run in found["runs"]} >= {"sinusoidal", "rotary", "none"}
    elif name == "digits":
        assert [run["model"] for run in found["runs"]] == ["vit", "deit", "swin", "swinv2", "tnt"]
        assert all(0 <= run["history"][-1]["accuracy"] <= 1 for run in found["runs"])
    else:
        assert {row["task"] for row in found["rows"]} == {"digits", "scenes"}
