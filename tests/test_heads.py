"""The comparisons of the chapter on heads run at a tiny size; removed heads add nothing."""

import json
import sys

import pytest
import torch

from benchmarks import multihead as heads


@pytest.mark.parametrize("part", ("payloads", "retrieval", "digits"))
def test_a_tiny_record(part, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["multihead", part, "--tiny", "--out", str(tmp_path)])
    heads.main()
    record = json.loads((tmp_path / f"heads_{part}.json").read_text())
    assert {"device", "torch", "date", "commit", "threads", "steps"} <= set(record)
    found = record.get("heads") or record["contestants"]
    for contestant in found.values():
        assert contestant["rates"] and all(0 <= run["test"] for run in contestant["runs"])


def test_the_parts_of_the_digits_are_disjoint():
    images = torch.cat([part[0] for part in heads.digit_parts()])
    assert [len(part[1]) for part in heads.digit_parts()] == [1000, 300, 497]
    # the data set itself has no image twice
    assert len(images.flatten(1).unique(dim=0)) == len(images)


def test_a_removed_head_adds_nothing():
    torch.manual_seed(0)
    model, smaller = heads.RowClassifier(4), heads.RowClassifier(4)
    x = torch.randn(3, 8, 8)
    smaller.load_state_dict(heads.without(model, range(4)))
    torch.nn.init.zeros_(model.attend.out_proj.weight)
    assert torch.equal(smaller(x), model(x))


def test_retrieval_wants_the_payload_of_the_key():
    (x,), wanted = heads.retrieval_batch(50)
    match = (x[:, :-1, :8] == x[:, -1:, :8]).all(-1)  # (B, n)
    assert match.sum(-1).eq(1).all()
    assert torch.equal(x[:, :-1, 8:][match], wanted)
