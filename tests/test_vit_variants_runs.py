"""The comparisons of the chapter on the modern block run at a tiny size."""

import json
import sys

import pytest
import torch

from benchmarks import vit_variants


@pytest.mark.slow
@pytest.mark.parametrize("part", ("options", "rates", "larger"))
def test_a_tiny_record(part, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vit_variants", part, "--tiny", "--out", str(tmp_path)])
    monkeypatch.setattr(
        vit_variants, "OPTIONS", {k: vit_variants.OPTIONS[k] for k in ("plain", "QK-norm")}
    )
    vit_variants.main()
    record = json.loads((tmp_path / f"modern_{part}.json").read_text())
    assert {"device", "torch", "date", "commit", "threads", "steps"} <= set(record)
    if part == "rates":
        assert all(len(runs) == 4 for runs in record["runs"].values())
    else:
        assert all(found["rates"] for found in record["contestants"].values())


def test_the_parts_of_the_digits_are_disjoint():
    parts = vit_variants.parts()
    assert [len(y) for _, y in parts] == [1137, 300, 360]
    images = torch.cat([x for x, _ in parts])
    assert len(images.flatten(1).unique(dim=0)) == len(images)


def test_a_pasted_digit_is_whole():
    x, y = torch.rand(5, 1, 8, 8) + 1, torch.arange(5)
    wide, same = vit_variants.pasted((x, y), 20, torch.Generator().manual_seed(0))
    assert wide.shape == (5, 1, 20, 20) and torch.equal(same, y)
    background = x.min() * (400 - 64)
    torch.testing.assert_close(wide.sum((1, 2, 3)), x.sum((1, 2, 3)) + background)


def test_all_contestants_have_nearly_the_same_size():
    counts = [
        sum(p.numel() for p in vit_variants.make(**options).parameters() if p.requires_grad)
        for options in vit_variants.OPTIONS.values()
    ]
    assert max(counts) < 1.02 * min(counts)
