"""The comparison of small backbones runs at a tiny size, and compares what it says."""

import json
import sys

import pytest
import torch

from benchmarks import tnt as compare


def run(folder, monkeypatch, *options):
    command = ["tnt", "compare", "--tiny", "--tasks", "digits", "--out", str(folder), *options]
    monkeypatch.setattr(sys, "argv", command)
    compare.main()
    return json.loads((folder / "compare.json").read_text())


@pytest.mark.slow
def test_a_tiny_record(tmp_path, monkeypatch):
    record = run(tmp_path, monkeypatch)
    assert {"device", "torch", "date", "commit", "threads", "batch"} <= set(record)
    names = [*compare.backbones(), "logistic regression"]
    assert [row["model"] for row in record["runs"]] == names
    assert [row["model"] for row in record["tuning"]] == names[:-1]
    for row in record["runs"][:-1]:
        assert {"task", "model", "parameters", "lr", "seed"} <= set(row)
        assert row["steps"] == [1, 2] and len(row["accuracy"]) == len(row["seconds"]) == 2
        assert 0 < row["seconds"][0] < row["seconds"][1]
    for row in record["runs"][:-1]:
        assert ("spread" in row) == (row["model"] in ("TNT", "TNT, no word positions"))
        assert all(
            15 < words <= 16.001 for words in row.get("spread", ())
        )  # it has learned nothing
    assert run(tmp_path, monkeypatch, "--tasks", "digits, longer")["runs"][-1]["model"] == (
        "TNT, no inner blocks"
    )
    again = run(tmp_path, monkeypatch, "--models", "TNT")
    assert again["runs"][: len(names)] == record["runs"]  # what is there is not trained again


def test_time_ends_a_command(tmp_path, monkeypatch, capsys):
    run(tmp_path, monkeypatch, "--models", "logistic regression")
    record = run(tmp_path, monkeypatch, "--models", "TNT", "--minutes", "0")
    assert len(record["runs"]) == 1 and not record["tuning"]
    assert "give the command again" in capsys.readouterr().out


def test_the_networks_are_of_one_size():
    sizes = {}
    for name, make in compare.backbones().items():
        model = make()
        sizes[name] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert model(torch.zeros(2, 1, 16, 16)).shape == (2, 10)
    assert max(sizes.values()) < 1.03 * min(sizes.values())
    # the words' positions: 16 places in a patch, 8 numbers each
    assert sizes["TNT"] - sizes["TNT, no word positions"] == 16 * 8


def test_the_ablations_lack_what_they_say():
    torch.manual_seed(0)
    makers, x = compare.backbones(), torch.randn(2, 1, 16, 16)
    without = makers["TNT, no inner blocks"]()
    words, sentences = without.embed(x)
    assert without.blocks[0]((words, sentences))[0] is words
    model = makers["TNT, no word positions"]()
    model(x).sum().backward()
    assert not model.pixel_pos.any() and model.pixel_pos.grad is None


def test_the_parts_are_apart():
    parts = compare.digit_parts(16).values()
    assert [len(labels) for _, labels in parts] == [1200, 237, 360]
    assert len(torch.cat([x.flatten(1) for x, _ in parts]).unique(dim=0)) == 1797
