"""Names of earlier versions still work and warn, or say what to use instead."""

import importlib

import pytest
import torch

from attnlib import _renamed
from attnlib._renamed import MODULES, MOVED, RENAMED, former_arguments
from attnlib.gpt import GPT, GPTConfig
from attnlib.seq2seq import Seq2Seq

RENAMES = [(m, old, new) for m, names in RENAMED.items() for old, new in names.items()]
MOVES = [(module, name) for module, names in MOVED.items() for name in names]


@pytest.mark.parametrize("module, former, name", RENAMES)
def test_a_renamed_name_warns(module, former, name):
    module = importlib.import_module(f"attnlib.{module}")
    with pytest.warns(DeprecationWarning, match=rf"{former} is called {name}"):
        found = getattr(module, former)
    assert found is vars(module)[name]
    assert former not in vars(module)  # the name is not taken by something else


@pytest.mark.parametrize("module, name", MOVES)
def test_a_moved_name_says_what_to_use(module, name):
    with pytest.raises(ImportError, match=rf"{name} has left the library"):
        getattr(importlib.import_module(f"attnlib.{module}"), name)


@pytest.mark.parametrize("former", MODULES)
def test_a_renamed_module_warns(former):
    module = importlib.import_module(f"attnlib.{MODULES[former]}")
    name = module.__all__[-1]
    with pytest.warns(DeprecationWarning, match=f"attnlib.{MODULES[former]}"):
        found = getattr(importlib.import_module(f"attnlib.{former}"), name)
    assert found is getattr(module, name)


def test_other_names_are_as_unknown_as_ever():
    for module in ("train", *MODULES):
        with pytest.raises(AttributeError):
            importlib.import_module(f"attnlib.{module}").no_such_name  # noqa: B018
    assert not hasattr(importlib.import_module("attnlib.train"), "no_such_name")


def test_former_arguments_warn():
    @former_arguments(every="log_every")
    def run(*, log_every=1):
        return log_every

    with pytest.warns(DeprecationWarning, match="every of run is called log_every"):
        assert run(every=3) == 3
    assert run(log_every=4) == 4 and run() == 1
    with pytest.raises(TypeError, match="every"):
        run(every=1, log_every=2)


def test_former_attributes_warn():
    config = GPTConfig(n_head=12, n_kv_head=4)
    for former, wanted in (("kv_heads", 4), ("head_width", 64), ("hidden", 2048)):
        with pytest.warns(DeprecationWarning, match=f"{former} of GPTConfig is called"):
            assert getattr(config, former) == wanted
    torch.manual_seed(0)
    model, tokens = GPT(GPTConfig(20, 8, 1, 2, n_embd=8)), torch.tensor([[3, 4]])
    with pytest.warns(DeprecationWarning, match="features of GPT is called forward_features"):
        assert torch.equal(model.features(tokens), model.forward_features(tokens))


def test_former_arguments_of_a_class_name_the_class():
    with pytest.warns(DeprecationWarning, match="padding_idx of Seq2Seq is called pad_id"):
        model = Seq2Seq(9, 9, embed_dim=4, hidden_dim=4, padding_idx=3)
    assert model.encoder.embed.padding_idx == 3
    with pytest.warns(DeprecationWarning, match="end of Seq2Seq.greedy is called eos_id"):
        model.greedy(torch.tensor([[1, 2]]), 2, end=4)


def test_no_name_is_renamed_twice():
    for module, names in _renamed.RENAMED.items():
        assert names.keys().isdisjoint(_renamed.MOVED.get(module, {}))
        assert set(names.values()).isdisjoint(names), module
