"""The experiments with a GPT run, and their records hold what the page reads from them."""

import json

import pytest
import torch

pytest.importorskip("accelerate", reason="trains")
pytest.importorskip("tokenizers", reason="reads a text")

from attnlib.gpt import GPT, GPTConfig
from benchmarks import gpt


def rows(folder, what):
    gpt.main([what, "--tiny", "--out", str(folder)])
    return {
        row["name"]: row
        for row in json.loads((folder / f"gpt_{what}.json").read_text())["rows"]
    }


@pytest.mark.slow
def test_options(tmp_path):
    found = rows(tmp_path, "options")
    assert {"modern, 0", "2019, 0"} < set(found)
    assert found["modern, 0"]["judge"] == "test" and len(found["modern, 0"]["curve"]) == 4
    assert found["modern, 0.002, tuning"]["judge"] == "valid"


@pytest.mark.slow
def test_scaling(tmp_path):
    found = rows(tmp_path, "scaling")
    assert {row["width"] for row in found.values()} == {16, 32}
    assert all(row["best"] == min(bits for _, bits in row["curve"]) for row in found.values())


@pytest.mark.slow
def test_induction(tmp_path):
    found = rows(tmp_path, "induction")
    assert found["1 layers, 0"]["steps"] == 4 * found["2 layers, 0"]["steps"]
    assert len(found["2 layers, 0"]["heads"]) == len(found["2 layers, 0"]["without"]) == 2


@pytest.mark.slow
def test_sampling(tmp_path):
    found = rows(tmp_path, "sampling")
    assert set(gpt.SETTINGS) < set(found["texts 0"]["found"])


def test_second_half_is_the_first_begun_elsewhere():
    (tokens,) = gpt.copies(0)(0)
    first, second = tokens.chunk(2, 1)
    for a, b in zip(first, second, strict=True):
        assert any(torch.equal(a.roll(-shift), b) for shift in range(gpt.HALF // 2))


def test_a_head_is_taken_out_and_put_back():
    torch.manual_seed(0)
    model = GPT(GPTConfig(gpt.SYMBOLS, 2 * gpt.HALF, n_layer=2, n_head=2, n_embd=16)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    before = gpt.copying(model)
    assert gpt.without(model, 0, 1) != pytest.approx(before, abs=1e-3)
    assert gpt.copying(model) == before


def test_scores_of_heads_that_are_made_by_hand(monkeypatch):
    """One head looks at the token before, one at what followed the same token."""
    (tokens,) = gpt.copies(998)(0)
    n = tokens.shape[1]
    before = torch.eye(n).roll(1, 0)
    before[0] = torch.eye(n)[0]
    behind = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=-1)
    same = (tokens[:, :, None] == behind[:, None]).tril(-1).float()
    match = same / same.sum(-1, keepdim=True).clamp(min=1)
    maps = [torch.stack([before.expand_as(match), match], 1)]

    class Recorded:
        __enter__ = lambda self: maps  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

    monkeypatch.setattr(gpt, "record_attention", Recorded)
    (found,) = gpt.heads(lambda tokens: None)
    assert found["before"][0] == [1.0, 0.0, 0.0, 0.0] and found["match"][1][0] > 0.99
    assert max(found["before"][1]) < 0.3 and max(found["match"][0]) < 0.3


def test_repeated_and_different():
    tokens = torch.arange(gpt.PROMPT + gpt.NEW).repeat(2, 1)
    judge = lambda x: torch.zeros(*x.shape, 1000)  # noqa: E731
    found = gpt.statistics(tokens, judge)
    assert found["repeated"] == 0 and found["different"] == 0.5
    assert found["nats"] == pytest.approx(6.9078, abs=1e-3)
    assert gpt.statistics(tokens * 0, judge)["repeated"] > 0.98
