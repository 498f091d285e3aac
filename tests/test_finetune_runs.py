"""The runs of the chapter on practice pass at a tiny size, and go on where they stopped."""

import json
import sys

import pytest

from attnlib.data import describe_scenes
from benchmarks import finetune


@pytest.fixture
def untrained(monkeypatch):
    """The model without its weights, which a tiny run does not need."""
    make = finetune.create_model
    monkeypatch.setattr(
        finetune, "create_model", lambda name, pretrained, **options: make(name, **options)
    )


def test_a_tiny_record(tmp_path, monkeypatch, untrained):
    monkeypatch.setattr(sys, "argv", ["finetune", "finetune", "--tiny", "--out", str(tmp_path)])
    finetune.main()
    path = tmp_path / "finetune.json"
    record = json.loads(path.read_text())
    assert {"device", "torch", "date", "commit", "threads"} <= set(record)
    found = {run["contestant"] for run in record["runs"]}
    assert found == {"head alone", *finetune.CONTESTANTS}
    for run in record["runs"]:
        assert 0 <= run["valid"] <= 1 and 0 <= run["test"] <= 1
        assert run["steps"] == 0 or run["curve"][-1][0] == run["steps"]
    before = path.read_text()
    finetune.main()  # nothing is left to do
    assert path.read_text() == before


def test_no_time_is_no_run(tmp_path, monkeypatch, untrained, capsys):
    command = ["finetune", "finetune", "--tiny", "--minutes", "0", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    finetune.main()
    assert "0 runs so far" in capsys.readouterr().out


def test_shapes_are_ten_pairs():
    images, labels = finetune.shapes(200, 3)
    assert images.shape == (200, 3, 64, 64) and images.min() >= -1 and images.max() <= 1
    assert set(labels.tolist()) == set(range(10))
    kinds = describe_scenes(200, seed=3)["kind"].sort(1).values
    assert (
        len({(tuple(pair), label) for pair, label in zip(kinds.tolist(), labels.tolist())})
        == 10
    )


def test_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["finetune", "sizes", "--tiny", "--out", str(tmp_path)])
    finetune.main()
    record = json.loads((tmp_path / "sizes.json").read_text())
    (row,) = record["rows"]
    assert (
        row["model"] == finetune.SIZES_NAMES[0]
        and row["images_per_second"] > 0
        and row["memory"] > 1
    )
    assert record["batch"] == 4 and "device" in record
