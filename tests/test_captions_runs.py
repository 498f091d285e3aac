"""The recorded experiments on captions: every part runs, and the records hold what is said."""

import json
import sys

import pytest
import torch
from PIL import Image

from attnlib.data import CAPTION_WORDS, caption_scenes, context_scenes, decode_captions
from attnlib.models import load_pretrained
from attnlib.spatial import Captioner
from attnlib.train import find_records, read_record
from benchmarks import spatial


def command(patch, folder, *arguments):
    patch.setattr(sys, "argv", ["captions", *arguments, "--tiny", "--out", str(folder)])
    spatial.main()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder in which the parts without photographs have left their tiny records."""
    folder = tmp_path_factory.mktemp("captions")
    with pytest.MonkeyPatch.context() as patch:
        for part in ("compare", "bias"):
            command(patch, folder, part)
    return folder


@pytest.mark.slow
def test_soft_and_hard_are_compared(tiny):
    record = json.loads((tiny / "captions_compare.json").read_text())
    assert {run["contestant"] for run in record["runs"]} == set(spatial.CONTESTANTS)
    assert record["baseline"][0]["test"] >= 0
    for run in record["runs"]:
        for part in ("valid", "test", "novel"):
            assert all(0 <= value <= 1 + 1e-4 for value in run[part].values())
        assert 0 <= run["history"][-1]["exact"] <= 1
    load_pretrained(Captioner(len(CAPTION_WORDS)), tiny / "captions_compare.safetensors")


@pytest.mark.slow
def test_bias_is_measured(tiny):
    record = json.loads((tiny / "captions_bias.json").read_text())
    runs = {run["contestant"]: run for run in record["runs"]}
    assert set(runs) == set(spatial.CORRELATIONS)
    assert runs["balanced"]["scenes"] < runs["correlated"]["scenes"]
    for run in runs.values():
        assert 0 <= run["changed"] <= 1 and 0 <= run["conflict"]["right"] <= 1
    load_pretrained(Captioner(len(CAPTION_WORDS)), tiny / "captions_bias.safetensors")


@pytest.mark.slow
def test_what_is_recorded_is_not_run_again(tiny, monkeypatch, capsys):
    before = (tiny / "captions_bias.json").read_text()
    monkeypatch.setattr(spatial, "fit", None)
    command(monkeypatch, tiny, "bias")
    assert "3 runs, recorded" in capsys.readouterr().out
    assert (tiny / "captions_bias.json").read_text() == before


@pytest.mark.slow
def test_flickr_runs(tmp_path, monkeypatch):
    folder = tmp_path / "flickr"
    (folder / "Flicker8k_Dataset").mkdir(parents=True)
    for part, name in (("train", "dog"), ("test", "cat")):
        Image.new("RGB", (50, 40), "red").save(folder / "Flicker8k_Dataset" / f"{name}.jpg")
        (folder / f"Flickr_8k.{part}Images.txt").write_text(f"{name}.jpg\n")
    lines = [f"{name}.jpg#0\tA {name} runs fast ." for name in ("dog", "cat")]
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines))
    command(monkeypatch, tmp_path, "flickr", "--flickr", str(folder))
    (run,) = json.loads((tmp_path / "captions_flickr.json").read_text())["runs"]
    assert run["words"] == 8 and run["examples"][0][1] == "a cat runs fast"


def test_the_pipeline_reads_clear_scenes():
    train, test = caption_scenes(800), caption_scenes(40, "test")
    read = spatial.by_parts(train)(test["image"])
    right = [a == b for a, b in zip(read, decode_captions(test["caption"]))]
    assert sum(right) > 20
    assert spatial.by_parts(train)(torch.zeros(1, 3, 32, 32)) == ["a"]


@pytest.mark.slow
def test_the_run_for_a_gpu(tmp_path):
    found = spatial.longer(tmp_path, tiny=True)
    assert [run["contestant"] for run in found["runs"]] == ["soft", "hard"]
    assert all(0 <= run["test"]["exact"] <= 1 and run["history"] for run in found["runs"])


def test_a_balanced_set_is_balanced():
    scenes = context_scenes(500, 0.9, seed=1)
    found = spatial.balanced(scenes, 0)
    assert found["agrees"].sum() == (~found["agrees"]).sum() == (~scenes["agrees"]).sum()


def test_moved_attention_is_on_its_object():
    scenes = caption_scenes(20)
    moved = spatial.on_other(scenes)
    assert torch.allclose(moved.sum(1), torch.ones(20))
    found = spatial.weight_on_objects(moved[:, None], scenes["mask"])
    assert torch.allclose(found[0][:, 0, 1], torch.ones(20), atol=1e-5)


@pytest.mark.skipif("captions_compare" not in find_records(), reason="not recorded")
def test_the_record_says_what_the_chapter_says():
    runs = read_record("captions_compare")["runs"]

    def best(name):
        own = [run for run in runs if run["contestant"] == name]
        steps = min(run["steps"] for run in own)
        tried = {
            r["lr"]: r["valid"]["exact"] for r in own if (r["seed"], r["steps"]) == (0, steps)
        }
        rate = max(tried, key=tried.get)
        return [r["test"] for r in own if (r["lr"], r["steps"]) == (rate, steps)]

    soft, half, hard = best("soft"), best("half"), best("hard")
    assert len(soft) == len(half) == len(hard) == 3
    assert min(run["exact"] for run in soft) >= 0.9
    assert min(run[key] for run in soft for key in ("hit_color", "hit_kind")) >= 0.95
    assert sum(run["exact"] for run in half) > 2 * sum(run["exact"] for run in hard)


@pytest.mark.skipif("captions_bias" not in find_records(), reason="not recorded")
def test_the_record_of_bias_says_what_the_chapter_says():
    runs = read_record("captions_bias")["runs"]
    for run in runs:
        gap = run["agree"]["right"] - run["conflict"]["right"]
        assert (gap > 0.4) == (run["contestant"] == "correlated")
