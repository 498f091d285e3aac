"""The pictures and the recorded experiments on gates, windows and channels."""

import json
import sys

import pytest
import torch

from attnlib.models import load_pretrained
from attnlib.spatial import Draw
from attnlib.train import find_records, read_record
from benchmarks import spatial

# --- pictures ---------------------------------------------------------------------------------


def test_what_is_asked_for_has_the_color():
    made = spatial.page_cells("asked-scenes")
    found = made.asked_scenes(60, "test", seed=3)
    assert found["question"].unique().tolist() == list(range(6))
    for image, question, mask, kind in zip(
        *(found[key] for key in ("image", "question", "mask", "kind"))
    ):
        paint = made.PALETTE[question][:, None]
        assert torch.allclose(image[:, mask[0]], paint.expand(3, int(mask[0].sum())))
        for other in mask[1:][kind[1:] >= 0]:
            assert (image[:, other] - paint).norm(dim=0).min() > 0.3
    hard = made.hard_scenes(1000, "test", seed=3)["kind"]
    assert len(hard) > 50 and (hard[:, [0, 2]] >= 0).all()
    assert all(len(set(row)) == 3 for row in hard.tolist())  # -1, no shape, is none of them


def test_digits_are_placed_whole():
    place = spatial.page_cells("placed-digits").placed_digits
    canvas = place(50, "test", seed=1)
    assert canvas.shape == (50, 1, 16, 16) and canvas.unique().tolist() == [0, 1]
    assert torch.equal(canvas, place(50, "test", seed=1))
    ink = (spatial.data.digits("test", 12)[0] > 0.5).float().sum((1, 2, 3))
    assert set(canvas.sum((1, 2, 3)).tolist()) <= set(ink.tolist())
    assert (canvas[:, 0].any(2).float().argmax(1) > 3).any()  # not all at the top


def test_gated_networks_have_about_the_same_size():
    made = spatial.page_cells("gated-convnet")
    sizes = [
        sum(p.numel() for p in made.gated_convnet(gate, widths).parameters())
        for gate, widths in made.GATES.values()
    ]
    assert max(sizes) < 1.01 * min(sizes)


def test_the_mixture_is_a_distribution():
    """Over all images of four pixels the probabilities sum to one."""
    train = (torch.rand(30, 1, 2, 2, generator=torch.Generator().manual_seed(0)) > 0.4).float()
    every = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4).view(16, 1, 2, 2)
    costs = torch.tensor([spatial.mixture_cost(train, x[None], 3, 0.5) for x in every])
    assert torch.allclose((-costs).exp().sum(), torch.tensor(1.0), atol=1e-6)


# --- the runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder in which all parts have left their tiny records."""
    folder = tmp_path_factory.mktemp("glimpses")
    with pytest.MonkeyPatch.context() as patch:
        for part in ("attend", "draw", "channels"):
            patch.setattr(sys, "argv", ["glimpses", part, "--tiny", "--out", str(folder)])
            spatial.main()
    return folder


@pytest.mark.slow
def test_every_part_is_recorded(tiny):
    attend, draw, channels = (
        json.loads((tiny / f"glimpses_{part}.json").read_text())
        for part in ("attend", "draw", "channels")
    )
    assert {run["pool"] for run in attend["runs"]} == set(spatial.POOLS)
    assert len(attend["baselines"]) == len(draw["baselines"]) == 1
    for run in attend["runs"]:
        assert 0 <= run["test"]["accuracy"] <= 1
        assert ("mass" in run["test"]) == (run["pool"] in ("dot", "additive"))
    assert {run["name"] for run in draw["runs"]} == set(spatial.GLIMPSES)
    assert all(run["test"]["bound"] > run["test"]["kl"] >= 0 for run in draw["runs"])
    load_pretrained(Draw(glimpse=5, **spatial.DRAW), tiny / "glimpses_draw.safetensors")
    (squeeze,) = (run for run in channels["runs"] if run["name"] == "SE")
    assert len(squeeze["gates"]) == 10 and squeeze["spread_within"] >= 0


@pytest.mark.slow
def test_what_is_recorded_is_not_run_again(tiny, monkeypatch, capsys):
    before = (tiny / "glimpses_channels.json").read_text()
    monkeypatch.setattr(spatial, "fit", None)
    monkeypatch.setattr(sys, "argv", ["glimpses", "channels", "--tiny", "--out", str(tiny)])
    spatial.main()
    assert "3 runs, recorded" in capsys.readouterr().out
    assert (tiny / "glimpses_channels.json").read_text() == before


@pytest.mark.skipif("glimpses_attend" not in find_records(), reason="not recorded")
def test_the_record_says_what_the_chapter_says():
    runs = read_record("glimpses_attend")["runs"]

    def scores(pool, steps=700):
        found = [run for run in runs if (run["pool"], run["steps"]) == (pool, steps)]
        return [run["test"]["accuracy"] for run in found]

    assert min(scores("dot")) > 0.9
    assert max(scores("additive") + scores("additive", 2800)) < 0.5  # it cannot ask
    assert max(scores("max")) < 0.5 < min(scores("max", 2800)) < 0.8  # it is slow
