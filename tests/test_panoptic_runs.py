"""The recorded experiments of the panoptic chapter run, and their records say so."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from attnlib.models import unwrap_state_dict
from attnlib.panoptic import panoptic_detr, panoptic_quality
from attnlib.train import read_record
from benchmarks import panoptic
from benchmarks.panoptic import label_maps, panoptic_scenes, small_panoptic


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder in which the experiment has left its tiny record."""
    folder = tmp_path_factory.mktemp("panoptic")
    with pytest.MonkeyPatch.context() as patch:
        for part in ("queries", "pixels"):
            patch.setattr(sys, "argv", ["panoptic", part, "--tiny", "--out", str(folder)])
            panoptic.main()
    return folder


@pytest.mark.slow
def test_every_part_is_recorded(tiny):
    record = json.loads((tiny / "panoptic.json").read_text())
    assert [run["variant"] for run in record["runs"]] == list(panoptic.VARIANTS)
    others = json.loads((tiny / "panoptic_pixels.json").read_text())["runs"]
    assert [run["baseline"] for run in others] == ["forest", "pixel network"]
    assert {run["steps"] for run in record["detectors"]} == {3, 4}
    for run in record["runs"] + others:
        assert all(0 <= run["test"][part]["pq"] <= 1 for part in ("all", "things", "stuff"))
    model = small_panoptic()
    model.load_state_dict(unwrap_state_dict(tiny / "panoptic_shapes.safetensors"))


@pytest.mark.slow
def test_what_is_recorded_is_not_run_again(tiny, monkeypatch, capsys):
    before = (tiny / "panoptic.json").read_text()
    monkeypatch.setattr(panoptic, "fit", None)
    monkeypatch.setattr(sys, "argv", ["panoptic", "queries", "--tiny", "--out", str(tiny)])
    panoptic.main()
    assert "4 runs, recorded" in capsys.readouterr().out
    assert (tiny / "panoptic.json").read_text() == before


def test_scenes_are_covered_by_their_segments():
    found = panoptic_scenes(40, "test", seed=3)
    masks = found["mask"].long()
    assert (masks.sum(1) == 1).all()  # each pixel has one segment
    there = found["label"] >= 0
    assert torch.equal(there, found["mask"].flatten(2).any(2))
    assert (found["label"][:, :3] < 4).all() and (found["label"][there][-2:] < 6).all()
    for mask, box in zip(found["mask"][there], found["box"][there].long().tolist()):
        rows, columns = mask.nonzero().T
        x0, y0, x1, y1 = box
        assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (
            x0,
            y0,
            x1,
            y1,
        )
    for segments, infos in label_maps(found):
        numbers = {info["id"] for info in infos}
        assert numbers == set(segments.unique().tolist()) == set(range(1, len(infos) + 1))


def test_connected_pixels_are_segments():
    maps = torch.full((1, 12, 12), 4)
    maps[0, :, 8:] = 5
    maps[0, 1:4, 1:4], maps[0, 6:10, 2:5] = 0, 2
    maps[0, 6, 2] = 1  # the others of this piece have another opinion
    ((segments, infos),) = panoptic.connected(maps)
    assert [info["category_id"] for info in infos] == [4, 5, 0, 2]
    assert (segments == 3).sum() == 9 and (segments == 4).sum() == 12


def test_the_pixels_around():
    x = torch.arange(2 * 3 * 48 * 48.0).view(2, 3, 48, 48)
    rows, columns = torch.tensor([[20], [30]]), torch.tensor([[15], [40]])
    found = panoptic.around(x, rows, columns)
    assert found.shape == (2, 1, 245) and found[1, 0, -2:].tolist() == [30, 40]
    middle = found[0, 0, : 81 * 3].view(9, 9, 3)
    assert torch.equal(middle[4, 4], x[0, :, 20, 15]) and torch.equal(
        middle[0, 8], x[0, :, 6, 29]
    )


@pytest.mark.slow
def test_tiny_speed(tmp_path, monkeypatch):
    command = ["panoptic", "speed", "--tiny", "--repeats", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    panoptic.main()
    record = json.loads((tmp_path / "panoptic_speed_cpu.json").read_text())
    assert len(record["rows"]) == 7 and all(row["ratio"] > 0 for row in record["rows"])


@pytest.mark.slow
def test_coco(tmp_path):
    """Pictures and annotations in COCO's format; the model has random weights."""
    (tmp_path / "val").mkdir()
    (tmp_path / "panoptic_val").mkdir()
    rows, pictures = [], []
    for i in range(4):
        rng = np.random.default_rng(i)
        pixels = rng.integers(0, 256, (40 + 8 * i, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "val" / f"{i}.jpg")
        colors = np.zeros((40 + 8 * i, 60, 3), dtype=np.uint8)
        colors[:20], colors[20:, 30:] = (7, 1, 0), (0, 0, 2)  # numbers 263 and 131072
        Image.fromarray(colors).save(tmp_path / "panoptic_val" / f"{i}.png")
        infos = [dict(id=263, category_id=1, iscrowd=0)]
        infos += [dict(id=131072, category_id=5, iscrowd=0)]
        rows.append(dict(image_id=i, file_name=f"{i}.png", segments_info=infos))
        pictures.append(dict(id=i, file_name=f"{i}.jpg"))
    kinds = [dict(id=1, isthing=1), dict(id=5, isthing=0)]
    data = dict(images=pictures, annotations=rows, categories=kinds)
    (tmp_path / "panoptic_val.json").write_text(json.dumps(data))
    torch.manual_seed(0)
    model = panoptic_detr(
        **dict(backbone="resnet18", num_queries=4, num_classes=8, embed_dim=128),
        **dict(num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16),
    )
    paths = tmp_path / "val", tmp_path / "panoptic_val.json"
    found = panoptic.evaluate(model, *paths, threshold=0.1, count=2)
    assert 0 <= found["all"]["pq"] <= 1 and {1, 5} <= set(found["classes"])
    segments, infos = panoptic.read_truth(
        tmp_path / "panoptic_val" / "0.png", rows[0]["segments_info"]
    )
    assert segments[0, 0] == 263 and segments[30, 40] == 131072 and segments[30, 0] == 0
    x, size = panoptic.read_picture(tmp_path / "val" / "0.jpg")
    assert size == (40, 60) and x.shape == (1, 3, 800, 1200)


# --- the record, as the page tells it ---------------------------------------------------------


def test_the_record_says_what_the_page_says():
    runs = [run for run in read_record("panoptic")["runs"] if run["variant"] == "per head"]
    best = max((run for run in runs if run["seed"] == 0), key=lambda run: run["valid"])
    found = [run["test"]["all"]["pq"] for run in runs if run["lr"] == best["lr"]]
    assert sum(found) / len(found) > 0.6
    others = [run for run in read_record("panoptic_pixels")["runs"] if "trees" not in run]
    assert min(run["test"]["all"]["pq"] for run in others) > max(found)  # told on the page


def test_the_stored_weights_give_the_recorded_quality():
    model, data = small_panoptic(), panoptic_scenes(150, "test", seed=2)
    model.load_state_dict(unwrap_state_dict("attnlib/panoptic_shapes"))
    maps = panoptic.predict(model, data["image"], 0.5)
    found = panoptic_quality(maps, label_maps(data), panoptic.THINGS)["all"]["pq"]
    runs = read_record("panoptic")["runs"]
    best = max((r for r in runs if r["seed"] == 0), key=lambda run: run["valid"])
    assert abs(found - best["test"]["all"]["pq"]) < 0.05
