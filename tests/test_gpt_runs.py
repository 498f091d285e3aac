"""The recorded runs of GPT: every command works, and the records hold what is said."""

import json
import math

import pytest
import torch

from attnlib.data import book_text
from attnlib.gpt import GPT, GPTConfig, text_batches, text_bits, text_loss
from attnlib.train import read_record
from benchmarks import gpt
from helpers import close


def run(command, folder, *options):
    threads = torch.get_num_threads()  # a command sets them for its whole process
    gpt.main([command, "--tiny", "--out", str(folder), *options])
    torch.set_num_threads(threads)


STAND_IN = """
import torch.nn as nn, torch.nn.functional as F
from attnlib.gpt import GPT as Ours, GPTConfig as Config, GPT2_STYLE
def GPTConfig(**shape): return Config(**(GPT2_STYLE | shape))
class MLP(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = old.c_fc, nn.GELU(), old.c_proj
    def forward(self, x): return self.c_proj(self.gelu(self.c_fc(x)))
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = Ours(config)
        for block in self.transformer.h: block.mlp = MLP(block.mlp)
    def forward(self, tokens, targets):
        logits = self.transformer(tokens)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.mark.slow
def test_nanogpt_is_compared(tmp_path):
    """A stand-in with nanoGPT's names and exact GELU; the record has the real one."""
    path = tmp_path / "model.py"
    path.write_text(STAND_IN)
    run("nanogpt", tmp_path, "--model", str(path), "--device", "cpu")
    tiny = json.loads((tmp_path / "nanogpt_cpu.json").read_text())
    real = read_record("nanogpt_cpu")
    assert tiny["tiny"] and not real["tiny"]
    for record in (tiny, real):  # the exact GELU is seen, the same one is not
        assert record["tanh"]["logits"] < 1e-6 < record["exact"]["logits"] < 1e-2
        assert record["tanh"]["gradients"] < 1e-5 < record["exact"]["gradients"] < 1e-2


@pytest.mark.slow
def test_the_book_is_learned(tmp_path):
    run("book", tmp_path)
    record = json.loads((tmp_path / "gpt_book.json").read_text())
    assert record["tiny"] and record["runs"][0]["part"] == "test"


def test_the_record_beats_its_baselines():
    record = read_record("gpt_book")
    assert not record["tiny"] and len(record["runs"]) == 3
    assert {row["part"] for row in record["tuning"]} == {"valid"}
    rows = [row for row in record["tuning"] if row["vocab"] <= gpt.MINUTE]
    best = min(rows, key=lambda row: row["bits"])
    assert {(row["vocab"], row["lr"]) for row in record["runs"]} == {
        (best["vocab"], best["lr"])
    }
    assert max(row["bits"] for row in record["runs"]) < min(record["baselines"].values())


def test_n_grams_are_probabilities():
    """They sum to one: with every continuation of a context the shares add up."""
    train, context = "abcabcabdaab" * 3, "ab"
    total = 0.0
    for letter in "abcd":
        bits = 3 * gpt.n_grams(train, context + letter, 3)
        total += 2 ** -(bits - 2 * gpt.n_grams(train, context, 3))
    assert 0.97 < total <= 1.0  # a fifth symbol, never seen, has the rest


def test_bits_of_a_text():
    torch.manual_seed(0)
    model = GPT(GPTConfig(40, 16, 2, 2, n_embd=16)).double()
    tokens = torch.randint(40, (100,))
    whole = (
        -model(tokens[None, :11]).log_softmax(-1)[0, :10].gather(1, tokens[1:11, None]).sum()
    )
    close(text_bits(model, tokens[:11], 16), whole.item() / math.log(2), 1e-9)
    assert abs(text_bits(model, tokens, 16) / 99 - math.log2(40)) < 0.5
    total, count = text_loss(model, (tokens[:17][None],))
    close(text_bits(model, tokens[:17], 16, 16), total.item() / math.log(2), 1e-4)
    assert count == 16


def test_batches_are_pieces_of_the_text():
    tokens = torch.arange(50)
    (piece,) = text_batches(tokens, 8, 200)(3)
    assert piece.shape == (200, 9) and (piece.diff(dim=1) == 1).all()
    assert piece.min() == 0 and piece.max() == 49
    with pytest.raises(ValueError, match="tokens"):
        text_batches(tokens, 50, 2)


def test_the_pinned_text_is_prose():
    assert "attention" in book_text("test") and ":::" not in book_text()


PLAY = "ROMEO:\nBut soft, what light through yonder window breaks?\n\nJULIET:\nO Romeo!\n"


@pytest.fixture
def play(tmp_path):
    path = tmp_path / "input.txt"
    path.write_text(PLAY * 40, encoding="utf-8")
    return path


@pytest.mark.parametrize("setting", gpt.SHAKESPEARE)
def test_shakespeare_goes_on_and_ships(tmp_path, play, setting, fresh_accelerate):
    """A second call makes no run again; the checkpoint has the tokenizer of characters."""
    options = ("--data", str(play), "--checkpoints", str(tmp_path), "--setting", setting)
    run("shakespeare", tmp_path, *options)
    run("shakespeare", tmp_path, *options)
    (row,) = json.loads((tmp_path / "gpt_shakespeare.json").read_text())["runs"]
    assert row["bits"] == pytest.approx(row["nats"] / math.log(2), abs=1e-3)
    assert row["curve"][-1][2] == pytest.approx(row["nats"], abs=1e-3)
    path = tmp_path / f"shakespeare_{setting}_0.json"
    run("drawn", tmp_path, "--data", str(play), "--model", str(path))
    record = json.loads((tmp_path / "gpt_drawn.json").read_text())
    assert sorted(record["symbols"]) == sorted(set(PLAY))
    assert all(len(own["logits"]) == len(set(PLAY)) for own in record["contexts"])


def test_the_tokenizer_of_characters():
    tokenizer = gpt.character_tokenizer(PLAY)
    tokens = tokenizer.encode(PLAY).ids
    assert len(tokens) == len(PLAY) and tokenizer.decode(tokens) == PLAY


def test_every_stage_grows(tmp_path, play):
    run("growth", tmp_path, "--data", str(play))
    record = json.loads((tmp_path / "gpt_growth.json").read_text())
    assert [row["stage"] for row in record["runs"]] == list(gpt.STAGES)
    assert all(row["seed"] == 100 for row in record["tuning"])


def test_the_schedule_is_nanogpts():
    rate = gpt.learning_rate_with_floor
    options = dict(steps=2000, warmup=100, schedule="cosine")
    assert rate(0, **options) == 1 / 101 and rate(100, **options) == 1
    assert rate(1050, **options) == pytest.approx(0.55) and rate(2000, **options) == 0.1


def test_the_record_of_shakespeare_is_near_nanogpt():
    runs = read_record("gpt_shakespeare")["runs"]
    nats = [row["nats"] for row in runs if row["setting"] == "nanogpt"]
    assert len(nats) >= 3
    assert (
        abs(sum(nats) / len(nats) - 1.88)
        < 2 * read_record("gpt_drawn")["estimate"]["deviation"]
    )
