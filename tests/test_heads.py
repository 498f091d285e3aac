"""The comparisons of the chapter on heads run at a tiny size."""

import json
import sys

import pytest
import torch

from benchmarks import multihead as heads


@pytest.mark.parametrize("part", ("payloads", "digits"))
def test_a_tiny_record(part, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["multihead", part, "--tiny", "--out", str(tmp_path)])
    heads.main()
    record = json.loads((tmp_path / f"heads_{part}.json").read_text())
    assert {"device", "torch", "date", "commit", "threads", "steps"} <= set(record)
    for found in record["heads"].values():
        assert found["rates"] and all(0 <= run["test"] for run in found["runs"])


def test_the_parts_of_the_digits_are_disjoint():
    images = torch.cat([part[0] for part in heads.digit_parts()])
    assert [len(part[1]) for part in heads.digit_parts()] == [1000, 300, 497]
    # the data set itself has no image twice
    assert len(images.flatten(1).unique(dim=0)) == len(images)
