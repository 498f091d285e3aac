"""The segmentation of the chapter on Swin runs at a tiny size and counts what it says."""

import json
import sys

import pytest
import torch

from benchmarks import swin as dense


def test_a_tiny_record(tmp_path, monkeypatch, capsys):
    command = ["swin", "dense", "--tiny", "--models", "Swin", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    dense.main()
    record = json.loads((tmp_path / "dense.json").read_text())
    assert {"device", "torch", "date", "commit", "threads", "limits", "batch"} <= set(record)
    assert [(run["of"], run["seed"]) for run in record["runs"]] == [(2, 0), (2, 1)]
    for run in record["runs"]:
        assert 0 <= run["valid"] <= 1 and 0 <= run["test"][-1] <= 1 and run["seconds"][-1] > 0
    dense.main()  # everything is there
    assert json.loads((tmp_path / "dense.json").read_text()) == record


def test_the_contestants_have_equally_many_parameters():
    counts = [
        sum(p.numel() for p in make().parameters()) for make in dense.CONTESTANTS.values()
    ]
    assert max(counts) < 1.03 * counts[0] and min(counts) > 0.97 * counts[0]


@pytest.mark.parametrize("name", dense.CONTESTANTS)
def test_every_pixel_gets_logits(name):
    model = dense.CONTESTANTS[name]().eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, 48, 48)).shape == (2, 11, 48, 48)


def test_only_one_of_the_two_swins_shifts():
    shifts = [
        [block.attn.layout((12, 12)).shift for block in make().backbone.blocks]
        for make in (dense.swin, dense.CONTESTANTS["Swin without shift"])
    ]
    assert shifts == [[(0, 0), (1, 1)] * 3, [(0, 0)] * 6]
    # without shifts a window of the first stage never hears of its neighbor
    x = torch.randn(1, 12, 12, 24, requires_grad=True)
    for name, reaches in (("Swin", True), ("Swin without shift", False)):
        y = dense.CONTESTANTS[name]().eval().backbone.layers[0](x)
        (gradient,) = torch.autograd.grad(y[0, 3, 3].square().sum(), x)
        assert (gradient[0, 2, 3].abs().sum() > 0) == reaches


def test_scores():
    wanted = torch.tensor([[0, 0, 1, 1], [0, 0, 2, 2]])
    assert dense.mean_iou(wanted, wanted) == dense.ink_iou(wanted, wanted) == 1
    found = torch.tensor([[0, 0, 1, 0], [0, 0, 1, 2]])
    # ground 4 of 5; kind 1: 1 of 3; kind 2: 1 of 2
    assert dense.mean_iou(found, wanted) == pytest.approx((4 / 5 + 1 / 3 + 1 / 2) / 3)
    assert dense.ink_iou(found, wanted) == pytest.approx(3 / 4)
    limits = dense.limits(torch.zeros(1, 48, 48, dtype=torch.long))
    assert limits == {"all ground": 1, "patches of 4": 1, "patches of 6": 1}


def test_validation_and_test_are_other_pictures():
    (train, _), (valid, _), (test, _) = dense.parts((16, 16, 16))
    assert not any(torch.equal(a, b) for a in train for b in (*valid, *test))
