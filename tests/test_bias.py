"""The runs of the chapter on the Vision Transformer at a tiny size, and what they promise."""

import json
import sys

import torch

from benchmarks import vit as bias


def test_a_tiny_record_and_its_continuation(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vit", "bias", "--tiny", "--out", str(tmp_path)])
    bias.main()
    record = json.loads((tmp_path / "bias.json").read_text())
    assert {"device", "torch", "date", "commit", "threads"} <= set(record)
    for run in record["runs"]:
        assert 0 <= run["test"] <= 1 and run["valid"][-1][0] == run["steps"]
    contestants = {(run["task"], run["model"]) for run in record["runs"]}
    assert len(contestants) == 5 and len(record["baselines"]) == 2
    bias.main()  # all is there: nothing is trained again
    again = json.loads((tmp_path / "bias.json").read_text())
    assert again["runs"] == record["runs"]


def test_no_image_is_in_two_parts():
    parts = bias.data("digits")
    assert [len(y) for _, y in parts] == [1200, 237, 360]
    assert len(torch.cat([x.flatten(1) for x, _ in parts]).unique(dim=0)) == 1797


def test_one_patch_at_a_time_is_local():
    """f(a, a) + f(b, b) = f(a, b) + f(b, a) for objects in patches of their own."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    x = torch.zeros(4, 3, 32, 32, dtype=torch.float64)
    for i, pair in enumerate(((a, a), (b, b), (a, b), (b, a))):
        x[i, :, :8, :8], x[i, :, 16:24, 16:24] = pair
    sums = {}
    for name, make in bias.networks().items():
        f = make(*bias.SHAPES["scenes"]).double().eval()(x)[:, 1]
        sums[name] = (f[0] + f[1] - f[2] - f[3]).abs().item()
    assert sums["one patch at a time"] < 1e-12
    assert min(sums["ViT"], sums["convolutions"]) > 1e-9
