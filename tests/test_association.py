"""The contest of attention, a convolution and pairs: its data, its fairness, and its script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from benchmarks import attention as contest

ROOT = Path(__file__).resolve().parent.parent


def test_partners_are_there_in_half_of_the_examples_and_nowhere_else():
    known, new = contest.vocabularies()
    for words in (known, new):
        x, there = contest.examples(400, words, contest.ODD, torch.Generator().manual_seed(1))
        i = (x[:, :, None] - words).norm(dim=-1).argmin(-1)  # (400, N)
        partner = (i[:, :1] + len(words) // 3) % len(words)
        assert torch.equal((i == partner).sum(1), there.long())
        assert not (i == partner)[:, contest.EVEN].any() and 150 < there.sum() < 250
    assert torch.cdist(known, new).min() > 0.1  # no word is in both


def test_a_linear_map_turns_words_into_partners():
    for words in contest.vocabularies():
        partners = words.roll(-len(words) // 3, 0)
        U = torch.linalg.lstsq(words, partners).solution
        torch.testing.assert_close(words @ U, partners, atol=1e-4, rtol=0)
        assert (words @ U.T - partners).norm() > 1  # the transpose is another map


def test_the_contestants_hand_over_equally_many_features():
    x = torch.randn(5, contest.N, contest.D)
    for make in contest.CONTESTANTS.values():
        assert make()(x).shape == (5, 32)
    assert isinstance(make(), nn.Module)


@pytest.mark.slow
def test_tiny_run_records_every_contestant(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.attention",
        "association",
        "--tiny",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, cwd=ROOT)
    subprocess.run([*command, "--contestants", "pairs"], check=True, cwd=ROOT)
    rows = json.loads((tmp_path / "association.json").read_text(encoding="utf-8"))["rows"]
    assert sorted(row["name"] for row in rows) == sorted(contest.CONTESTANTS)
    assert all(0 <= row[part] <= 1 for row in rows for part in ("same", "places", "words"))
