"""The measurements of growth run at a tiny size, and resume."""

import json
import sys

import pytest
import torch

from benchmarks import swinv2 as growth


@pytest.mark.parametrize("kind", growth.KINDS)
def test_the_norms_behind_the_branches_begin_where_they_should(kind):
    torch.manual_seed(0)
    model, start = growth.new_model(kind), growth.KINDS[kind][1]
    if start is not None:
        assert all((block.norm1.weight == start).all() for block in model.blocks)
    stages = growth.stream_function()(model.eval(), torch.randn(2, 1, 24, 24))
    assert [len(stage) for stage in stages] == [3, 3]
    if start == 0:  # blocks are the identity
        assert all(stage[0] == stage[2] for stage in stages)


@pytest.mark.slow
def test_a_tiny_record(tmp_path, monkeypatch, capsys):
    call = ["swinv2", "growth", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*call, "--minutes", "0"])
    growth.main()
    assert "again" in capsys.readouterr().out  # no time for any model
    monkeypatch.setattr(sys, "argv", call)
    growth.main()
    record = json.loads((tmp_path / "growth.json").read_text())
    assert {"device", "date", "best", "logistic regression"} <= set(record)
    assert [run["kind"] for run in record["runs"]] == list(growth.KINDS)
    for run in record["runs"]:
        assert [look["step"] for look in run["looks"]] == [0, 2]
        assert set(run["transfer"]["kept"]) == {"doubled", *map(str, growth.SIZES)}
        assert ("stretched" in run["transfer"]) == (run["kind"] != "V1")


def test_the_parts_are_disjoint():
    images = torch.cat([part[0] for part in growth.parts()])
    assert [len(part[1]) for part in growth.parts()] == [1137, 300, 360]
    assert len(images.flatten(1).unique(dim=0)) == len(images)
