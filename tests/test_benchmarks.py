"""The benchmarks run, at a size at which they cost nothing, and record what they say they record."""
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_attention_benchmark(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "attention.py", "--tiny", "--device", "cpu", "--repeats", "4"]
    subprocess.run([*command, "--out", tmp_path], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    record = json.loads((tmp_path / "attention_cpu.json").read_text())
    assert {"device", "torch", "date", "commit", "threads"} <= set(record) and len(record["rows"]) == 8
    for row in record["rows"]:
        assert row["reference"]["ratio"] == 1 and row["sdpa"]["ms"] > 0
        assert row["difference"] < (1e-5 if row["dtype"] == "float32" else 5e-2)
