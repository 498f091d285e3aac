"""The collages keep what they promise; a small model is trained on them, stored and loaded."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.data import collages, digits
from attnlib.models import create_model
from attnlib.train import find_records, read_record
from benchmarks import tnt as training

SPLITS = "train", "test"


@pytest.mark.parametrize("split", SPLITS)
def test_boxes_hold_their_digits_and_nothing_else(split):
    found = collages(64, split, seed=3)
    for i in range(64):
        mask, seen = found["mask"][i], torch.zeros(64, 64, dtype=torch.bool)
        for kind, (x0, y0, x1, y1) in zip(found["kind"][i].tolist(), found["box"][i].int()):
            if kind < 0:
                assert (x0, y0, x1, y1) == (0, 0, 0, 0)
                continue
            inside = torch.zeros_like(seen)
            inside[y0:y1, x0:x1] = True
            assert not (inside & seen).any()  # no two overlap
            own = mask[y0:y1, x0:x1]
            assert set(own.unique().tolist()) <= {0, 1 + kind}
            for edge in (own[0], own[-1], own[:, 0], own[:, -1]):  # and they are tight
                assert (edge == 1 + kind).any()
            seen |= inside
        assert not mask[~seen].any()
    assert torch.equal(found["label"], found["kind"][:, 0])


@given(
    count=st.integers(1, 40),
    split=st.sampled_from(SPLITS),
    size=st.sampled_from([16, 33, 64, 96, 200]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_shapes_and_ranges(count, split, size, seed):
    found = collages(count, split, size, seed=seed)
    assert found["image"].shape == (count, 3, size, size)
    assert 0 <= found["image"].min() and found["image"].max() <= 1
    assert found["mask"].shape == (count, size, size) and found["mask"].max() <= 10
    assert found["kind"].shape == (count, 3) and (found["kind"][:, 0] >= 0).all()
    assert found["box"].shape == (count, 3, 4) and found["box"].max() <= size
    again = collages(count, split, size, seed=seed)
    assert all(torch.equal(found[key], again[key]) for key in found)


def test_a_seed_is_the_same_scene_at_every_size():
    small, large = (collages(50, size=size, seed=1) for size in (64, 128))
    assert torch.equal(small["kind"], large["kind"])
    assert (small["box"] - large["box"] / 2).abs().max() <= 2
    shrunk = torch.nn.functional.avg_pool2d(large["image"], 2)
    assert (shrunk - small["image"]).abs().mean() < 0.03


def test_training_and_test_share_nothing():
    """A collage without its photograph is a digit of its own split."""
    a, b = (collages(200, split, seed=0)["image"] for split in SPLITS)
    assert not torch.equal(a, b)
    assert len(digits("train")[0]) + len(digits("test")[0]) == 1797


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(count=0), r"count \(0\)"),
        (dict(count=2, split="dev"), r"split \('dev'\)"),
        (dict(count=2, size=1.5), r"size \(1.5\)"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        collages(**arguments)


# --- the models that come with the library ----------------------------------------------------


@pytest.mark.parametrize("name", training.COLLAGE_STEPS)
def test_a_model_is_trained_and_loaded(name, tmp_path, monkeypatch):
    arguments = ["tnt", "collages", name, "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    training.main()
    path = tmp_path / f"{name}.safetensors"
    model = create_model(name, pretrained=path).eval()
    assert path.stat().st_size < 2 * 2**20
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 10)


def test_places_are_taught_their_shares():
    mask = torch.zeros(1, 8, 8, dtype=torch.long)
    mask[0, :4, :2] = 3  # half of the first patch of four pixels
    found = training.shares(mask, 4)
    assert found.shape == (1, 11, 2, 2) and torch.allclose(found.sum(1), torch.ones(1, 2, 2))
    assert found[0, 3, 0, 0] == 0.5 and found[0, 0, 0, 0] == 0.5 and found[0, 0, 1, 1] == 1


@pytest.mark.parametrize("name", training.COLLAGE_STEPS)
def test_the_stored_weights_give_the_recorded_accuracy(name):
    model = create_model(name, pretrained=True).eval()
    assert find_records()[name].with_suffix(".safetensors").stat().st_size < 2 * 2**20
    x, y = training.pixels(collages(500, "test", seed=1))
    with torch.no_grad():
        found = (model(x).argmax(1) == y).float().mean()
    assert abs(found - read_record(name)["history"][-1]["accuracy"]) < 0.04  # of 2,000
