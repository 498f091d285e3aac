"""The recorded experiments of the chapter on visual tokens run, and their record says so."""

import json
import sys

import pytest
import torch

from attnlib.train import find_records, read_record
from benchmarks import beit


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder in which both parts have left their tiny records."""
    folder = tmp_path_factory.mktemp("beit")
    with pytest.MonkeyPatch.context() as patch:
        for part in ("digits", "variants"):
            patch.setattr(sys, "argv", ["beit", part, "--tiny", "--out", str(folder)])
            beit.main()
    return folder


@pytest.mark.slow
def test_every_part_is_recorded(tiny):
    record = json.loads((tiny / "beit.json").read_text())
    assert [run["variant"] for run in record["runs"]] == ["blocks"]
    assert {run["contestant"] for run in record["probes"]} == {
        "raw pixels",
        "untrained",
        "BEiT",
    }
    assert {run["contestant"] for run in record["tuning"]} == {"BEiT", "from scratch"}
    assert len({run["steps"] for run in record["tuning"]}) == 2  # and at equal time
    assert all(0 <= run["test"] <= 1 for run in record["probes"] + record["tuning"])
    assert (tiny / "beit_digits.safetensors").exists()
    record = json.loads((tiny / "beit_variants.json").read_text())
    names = [*beit.TOKENIZERS, "teacher", "k-means"]
    assert [run["tokenizer"] for run in record["tokenizers"]] == names
    assert [run["variant"] for run in record["runs"]] == list(beit.VARIANTS)


@pytest.mark.slow
def test_what_is_recorded_is_not_run_again(tiny, monkeypatch, capsys):
    before = (tiny / "beit.json").read_text()
    monkeypatch.setattr(beit, "fine_tuned", None)
    monkeypatch.setattr(beit, "probe", None)
    monkeypatch.setattr(sys, "argv", ["beit", "digits", "--tiny", "--out", str(tiny)])
    beit.main()
    assert "1 runs, recorded" in capsys.readouterr().out
    assert (tiny / "beit.json").read_text() == before


@pytest.mark.parametrize("kind", ["blocks", "random"])
def test_masks_hide_so_many(kind):
    drawn = beit.masks(kind, 500)
    hidden = drawn.flatten(1).sum(1)
    assert drawn.shape == (500, 4, 4) and hidden.max() == beit.HIDDEN and hidden.min() >= 4
    assert torch.equal(drawn, beit.masks(kind, 500))
    alike = (drawn[:, 1:] == drawn[:, :-1]).float().mean()
    assert (alike > 0.6) == (kind == "blocks")


@pytest.mark.skipif("beit" not in find_records(), reason="not recorded")
def test_the_record_says_what_the_chapter_says():
    record = read_record("beit")
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2]
    for run in record["runs"]:
        assert run["steps"] == beit.LONG and run["accuracy"] > 1.9 * run["place_accuracy"]
    used = [run["used"] for run in record["tokenizers"]]
    assert sum(used) / 3 >= 0.9 * beit.VOCABULARY and min(used) > 0.8 * beit.VOCABULARY
    assert all(run["error"] < 0.065 for run in record["tokenizers"])
    probes = [run for run in record["probes"] if run["labels"] == 1200]
    mean = {
        name: sum(run["test"] for run in probes if run["contestant"] == name) / 3
        for name in ("raw pixels", "untrained", "BEiT")
    }
    assert mean["untrained"] < 0.88 < mean["BEiT"] < mean["raw pixels"]
