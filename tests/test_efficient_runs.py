"""The experiments with cheaper attention run, and their records hold what the page says."""

import json
import sys

import pytest
import torch

pytest.importorskip("accelerate", reason="trains")
pytest.importorskip("tokenizers", reason="reads a text")

from attnlib.train import read_record
from benchmarks import efficient


def rows(monkeypatch, folder, what, name=None):
    monkeypatch.setattr(sys, "argv", ["efficient", what, "--tiny", "--out", str(folder)])
    efficient.main()
    name = f"efficient_{what}.json" if name is None else name
    return json.loads(next(folder.glob(name)).read_text())["rows"]


@pytest.mark.parametrize("what", ["recall", "cliff", "text"])
@pytest.mark.slow
def test_decoders(monkeypatch, tmp_path, what):
    found = {row["name"]: row for row in rows(monkeypatch, tmp_path, what)}
    ending = ", 14" if what == "cliff" else ""
    for name in efficient.decoders(16, 0):
        assert found[f"{name}{ending}, 0"]["judge"] == "test"
        chosen = [row for row in found if row.startswith(name) and "tuning" in row]
        assert all(found[row]["judge"] == "valid" for row in chosen) and chosen


@pytest.mark.slow
def test_a_trained_vit(monkeypatch, tmp_path):
    found = {row["name"]: row for row in rows(monkeypatch, tmp_path, "swap")}
    for name in efficient.encoders(0):
        assert len(found[f"{name}, as it is, 0"]["errors"]) == 6
    assert max(found["exact, as it is, 0"]["errors"]) == 0
    assert found["Nyström 8, 0"]["curve"][-1][0] == found["Nyström 8, 0"]["steps"]


@pytest.mark.slow
def test_crossover(monkeypatch, tmp_path):
    found = rows(monkeypatch, tmp_path, "crossover", "efficient_crossover_*.json")
    assert {row["n"] for row in found} == {64, 128}
    assert {row["name"] for row in found} >= set(efficient.contestants(32, 64, "cpu"))


def test_tasks_ask_what_was_told():
    tokens, targets = efficient.recall_batches(rows=8)(0)(0)
    told = tokens[:, : 2 * efficient.PAIRS].unflatten(1, (-1, 2))
    for row, pairs, wanted in zip(tokens, told, targets, strict=True):
        table = dict(pairs.tolist())
        assert len(table) == efficient.PAIRS
        asked = (wanted >= 0).nonzero().flatten()
        assert len(asked) == efficient.PAIRS and asked.min() >= 2 * efficient.PAIRS
        assert [table[int(x)] for x in row[asked]] == wanted[asked].tolist()
    tokens, targets = efficient.copy_batches(15)(0)(0)
    assert torch.equal(targets[:, 15:], tokens[:, :-15]) and (targets[:, :15] == -100).all()


def test_the_records_are_whole():
    for what in ("recall", "cliff", "text", "swap"):
        record = read_record(f"efficient_{what}")
        assert not record["tiny"]
        tuned = [row for row in record["rows"] if "seed" in row and "tuning" not in row["name"]]
        assert {row["seed"] for row in tuned} == {0, 1, 2}
