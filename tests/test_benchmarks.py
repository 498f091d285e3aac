"""The benchmarks run, at a size at which they cost nothing, and record what they say they record."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_attention_benchmark(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "attention.py", "--tiny", "--device", "cpu", "--repeats", "4"]
    subprocess.run([*command, "--out", tmp_path], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    record = json.loads((tmp_path / "attention_cpu.json").read_text())
    assert {"device", "torch", "date", "commit", "threads"} <= set(record) and len(record["rows"]) == 8
    for row in record["rows"]:
        assert row["reference"]["ratio"] == 1 and row["sdpa"]["ms"] > 0
        assert row["difference"] < (1e-5 if row["dtype"] == "float32" else 5e-2)


def test_translation_benchmark(tmp_path):
    for name in ("transformers", "x_transformers"):
        pytest.importorskip(name)
    command = [sys.executable, ROOT / "benchmarks" / "translation.py", "--tiny", "--device", "cpu", "--repeats", "4"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    subprocess.run([*command, "--out", tmp_path], check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)
    record = json.loads((tmp_path / "translation_cpu.json").read_text())
    assert {"device", "torch", "date", "commit", "threads", "copy_gb_per_s"} <= set(record)
    assert len(record["training"]) == 36 and len(record["decoding"]) == 12
    for row in record["training"] + record["decoding"]:
        low, high = row["quartiles"]
        assert row["ms"] > 0 and low <= row["ratio"] <= high and (row["model"] != "attnlib" or row["ratio"] == 1)
    for row in record["training"]:
        compared = row["dropout"] == 0 and not row["model"].startswith("x-")
        assert (row["error"] is not None) == compared
        assert not compared or row["error"] < (1e-5 if row["mode"] == "float32" else 0.05)
    assert all(row["same_tokens"] == 1 for row in record["decoding"] if row["mode"] == "float32")


def test_vision_benchmark(tmp_path):
    """All peers of ViT run, those with our weights agree, and each has a ratio."""
    command = [sys.executable, ROOT / "benchmarks" / "vision.py", "--tiny", "--device", "cpu", "--repeats", "2"]
    options = ["--models", "vit_tiny_patch16_224", "--modes", "float32", "bfloat16", "--batch", "2", "--name", "vit"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    subprocess.run([*command, *options, "--out", tmp_path], check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    record = json.loads((tmp_path / "vit_cpu.json").read_text())
    assert set(record["differences"]["vit_tiny_patch16_224"]) == {"timm", "torchvision", "transformers"}
    assert len(record["rows"]) == 2 * 2 * 5 and all(row["ms"] > 0 and row["ratio"] > 0 for row in record["rows"])
