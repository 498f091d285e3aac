"""The runs of one vector against attention: they run, measure what they say, and the records
are complete and tuned evenly."""

import json
import math

import pytest
import torch
import torch.nn as nn
from number_names import german

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


@pytest.mark.parametrize(
    "command, name", [("bottleneck", "bottleneck"), ("numbers", "seq2seq_numbers")]
)
def test_a_tiny_record_can_be_interrupted_and_goes_on(tmp_path, capsys, command, name):
    arguments = [command, "--tiny", "--out", str(tmp_path)]
    path = tmp_path / f"{name}.json"
    bottleneck.main([*arguments, "--minutes", "0"])
    assert not path.exists()
    bottleneck.main(arguments)
    record = json.loads(path.read_text())
    runs = record["runs"]
    assert f"{len(runs)} runs, recorded" in capsys.readouterr().out
    path.write_text(json.dumps(record | {"runs": runs[:3]}))
    bottleneck.main(arguments)
    again = json.loads(path.read_text())["runs"]
    assert again[:3] == runs[:3]
    assert [run["test" if command == "bottleneck" else "right"] for run in again] == [
        run["test" if command == "bottleneck" else "right"] for run in runs
    ]


def groups(runs, keys):
    """The runs by the values of some settings."""
    found = {}
    for run in runs:
        found.setdefault(tuple(run[key] for key in keys), []).append(run)
    return found


def test_the_numbers_are_tuned_evenly():
    runs = read_record("seq2seq_numbers")["runs"]
    found = groups(runs, ("attention", "steps"))
    budgets = bottleneck.NUMBER_STEPS
    assert set(found) == {(kind, n) for kind, steps in budgets.items() for n in steps}
    for some in found.values():
        first = [run for run in some if run["seed"] == 0]
        assert sorted(run["lr"] for run in first) == sorted(bottleneck.NUMBER_RATES)
        best = max(first, key=bottleneck.number_score)["lr"]
        assert min(bottleneck.NUMBER_RATES) < best < max(bottleneck.NUMBER_RATES)
        assert {run["seed"] for run in some if run["lr"] == best} == set(bottleneck.SEEDS)


def test_the_strings_are_tuned_evenly():
    runs = read_record("bottleneck")["runs"]
    found = groups(runs, ("attention", "width"))
    widths = bottleneck.WIDTHS
    assert set(found) == {(kind, n) for kind, some in widths.items() for n in some}
    for some in found.values():
        tuned = [run for run in some if run["part"] == "tune"]
        assert {run["steps"] for run in tuned} == {bottleneck.TUNING_STEPS}
        assert sorted(run["lr"] for run in tuned) == sorted(bottleneck.STRING_RATES)
        best = max(tuned, key=lambda run: run["valid"])["lr"]
        assert min(bottleneck.STRING_RATES) < best < max(bottleneck.STRING_RATES)
        final = [run for run in some if run["part"] == "run"]
        assert {(run["lr"], run["steps"]) for run in final} == {(best, bottleneck.STRING_STEPS)}
        assert sorted(run["seed"] for run in final) == list(bottleneck.SEEDS)
    longer = [run for run in runs if run["part"] == "longer"]
    assert sorted(run["seed"] for run in longer) == list(bottleneck.SEEDS)


def test_the_recorded_texts_are_judged_by_correct_german():
    _, parts = bottleneck.number_data()
    asked = parts["test"][0]
    runs = [run for run in read_record("seq2seq_numbers")["runs"] if "wrong" in run]
    assert len(runs) == len(bottleneck.NUMBER_RATES) + len(bottleneck.SEEDS) - 1
    for run in runs:
        wrong = {number for number, ok in zip(asked, run["right"]) if ok == "0"}
        assert wrong == {int(number) for number in run["wrong"]}
        assert all(text != german(int(number)) for number, text in run["wrong"].items())
