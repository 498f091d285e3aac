"""The runs of one vector against attention: they run, measure what they say, and the record
is complete."""

import json
import math

import pytest
import torch
import torch.nn as nn

from attnlib.train import read_record
from benchmarks import seq2seq as bottleneck


class Told(nn.Module):
    """Gives each symbol the probability `p`, and the rest evenly to the others."""

    def __init__(self, p):
        super().__init__()
        self.p, self.size = p, 3 + bottleneck.ALPHABET

    def forward(self, src, tgt):
        other = (1 - self.p) / (bottleneck.ALPHABET - 1)
        logits = torch.full((*src.shape, self.size), -torch.inf)
        logits[..., 3:] = math.log(other) if other else -torch.inf
        return logits.scatter(-1, src[..., None], math.log(self.p))


@pytest.mark.parametrize("p, bits", [(1, 5), (0.5, 4), (1 / 32, 0), (1 / 64, -1)])
def test_bits_through_is_what_need_not_be_told(p, bits):
    found = bottleneck.bits_through(Told(p), 4, 0, 8)
    assert found == pytest.approx(4 * bits, abs=1e-4)


def test_strings_are_new_and_batches_have_one_length():
    batches = bottleneck.string_batches(0)
    found = [batches(step) for step in range(200)]
    assert {1, bottleneck.LONGEST} <= {src.shape[1] for src, _ in found}
    for src, tgt in found:
        assert src.min() >= 3 and torch.equal(tgt[:, 1:], src) and (tgt[:, 0] == 1).all()
    rows = {tuple(row) for src, _ in found if src.shape[1] > 5 for row in src.tolist()}
    assert len(rows) == sum(len(src) for src, _ in found if src.shape[1] > 5)


def test_parts_of_the_numbers_are_apart():
    _, parts = bottleneck.number_data(tiny=True)
    numbers = [set(parts[name][0]) for name in ("train", "valid", "test")]
    assert len(set.union(*numbers)) == sum(map(len, numbers))


def test_a_tiny_record_can_be_interrupted_and_goes_on(tmp_path, capsys):
    command = ["bottleneck", "--tiny", "--out", str(tmp_path)]
    path = tmp_path / "bottleneck.json"
    bottleneck.main([*command, "--minutes", "0"])
    assert not path.exists()
    bottleneck.main([*command, "--task", "copy"])
    copies = json.loads(path.read_text())["runs"]
    bottleneck.main(command)
    runs = json.loads(path.read_text())["runs"]
    assert runs[: len(copies)] == copies
    assert len(runs) == len(list(bottleneck.jobs(True)))
    assert f"{len(runs)} runs, recorded" in capsys.readouterr().out


def test_the_record_has_all_runs_each_at_the_best_rate():
    runs = read_record("bottleneck")["runs"]
    names = ("task", "part", "attention", "width", "steps", "seed")
    done = {(*(run[name] for name in names), run["lr"]) for run in runs}
    for *job, rate in bottleneck.jobs(False):
        task, _, attention, width, *_ = job
        assert (*job, rate or bottleneck.best_rate(runs, task, attention, width)) in done
