"""The comparison of students runs at a tiny size; labels that are withheld have no weight."""

import json
import sys

import torch

from attnlib.deit import DistillationLoss
from benchmarks import deit as distillation


def test_a_tiny_record(tmp_path, monkeypatch, capsys):
    call = ["deit", "distillation", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*call, "--minutes", "0"])
    distillation.main()
    assert "again" in capsys.readouterr().out  # no time for any model
    monkeypatch.setattr(sys, "argv", call)
    distillation.main()
    record = json.loads((tmp_path / "distillation.json").read_text())
    assert {"device", "date", "steps", "logistic regression"} <= set(record)
    assert list(record["best"]) == ["teacher", *distillation.STUDENTS]
    for run in record["runs"]:
        assert [step for step, _ in run["curve"]] == [1, 2] and 0 <= run["test"] <= 1
        assert ("heads" in run) == ("two tokens" in run["name"])


def test_the_parts_are_disjoint_and_differ_between_seeds():
    seen, valid, test, pictures = distillation.parts(0)
    assert [len(part[1]) for part in (seen, valid, test, pictures)] == [200, 200, 360, 1237]
    images = torch.cat([valid[0], test[0], pictures[0]])
    assert len(images.flatten(1).unique(dim=0)) == len(images) == 1797
    assert not torch.equal(distillation.parts(1)[0][0], seen[0])


def test_withheld_labels_have_no_weight():
    torch.manual_seed(0)
    logits = torch.randn(4, 10)
    for name, (_, options, without_labels) in distillation.STUDENTS.items():
        if without_labels:
            loss_fn = DistillationLoss(torch.nn.Linear(10, 10), **options)
            a, b = (
                loss_fn(torch.nn.Identity(), (logits, labels))[0]
                for labels in torch.arange(8).view(2, 4)
            )
            assert a == b, name
