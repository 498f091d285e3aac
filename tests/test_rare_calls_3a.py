"""Calls that are rare and allowed: what they must give."""

import copy
import math

import pytest
import torch
import torch.nn as nn

from attnlib.attention import attention
from attnlib.decoding import KVCache
from attnlib.efficient import local_attention
from attnlib.gpt import GPT, GPTConfig
from attnlib.scaling import Cluster, _possible_plans
from attnlib.transformer import Transformer, from_torch


def small_transformer():
    torch.manual_seed(0)
    model = Transformer(
        20, d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=2, dim_feedforward=16
    )
    return model.eval()


def small_gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(20, 16, n_layer=1, n_head=2, n_embd=16)).eval()


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_far_wider_than_the_text_takes_no_more_memory(causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 4)
    out = local_attention(q, k, v, 1_000_000_000, causal=causal)
    wanted = attention(q, k, v, mask="causal" if causal else None)
    torch.testing.assert_close(out, wanted)


def test_a_cache_whose_first_call_failed_takes_another_number_of_rows():
    model = small_transformer()
    memory, mask = model.encode(torch.randint(1, 20, (3, 4)))
    wrong_mask = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    tgt = torch.tensor([[1], [2], [3]])
    cache = KVCache()
    with pytest.raises(ValueError, match="mask"):
        model.decode(tgt, memory, wrong_mask, cache)
    found = model.decode(tgt[:2], memory[:2], mask[:2], cache)
    torch.testing.assert_close(found, model.decode(tgt[:2], memory[:2], mask[:2]))
    assert len(cache) == 1


def test_a_bias_that_learns_alone_has_its_gradient_with_a_cache():
    model = small_transformer().requires_grad_(False)
    bias = model.decoder.layers[-1].multihead_attn.in_proj_bias.requires_grad_(True)
    tgt = torch.tensor([[1, 2], [3, 4]])
    gradients = []
    for first_call_learns in (True, False):
        cache = KVCache()
        memory, mask = model.encode(torch.tensor([[5, 6, 7], [8, 9, 0]]))
        with torch.set_grad_enabled(first_call_learns):
            model.decode(tgt[:, :1], memory, mask, cache)
        logits = model.decode(tgt[:, 1:], memory, mask, cache)
        gradients.append(torch.autograd.grad(logits.square().sum(), bias)[0])
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("make", [small_transformer, small_gpt])
def test_a_tied_model_loads_copies_that_hold_nan(make):
    model = make()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    tied = [
        name
        for name in weights
        if "embed.weight" in name
        or name == "output.weight"
        or name in ("wte.weight", "lm_head.weight")
    ]
    for name in tied:
        weights[name][3, 1] = math.nan
    assert len(tied) > 1
    make().load_state_dict(weights)
    weights[tied[0]][2, 1] += 1
    with pytest.raises(ValueError, match="different tensors"):
        make().load_state_dict(weights)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_from_torch_has_the_mode_of_the_module(training):
    module = nn.Transformer(8, 2, 1, 1, 8, batch_first=True).train(training)
    ours = from_torch(copy.deepcopy(module), 10)
    assert {part.training for part in ours.modules()} == {training}


def test_a_plan_cuts_hidden_units_evenly():
    config = GPTConfig(100, 16, n_layer=2, n_head=8, n_embd=64, n_inner=180, tied=False)
    cuts = {plan.tensor for plan in _possible_plans(config, Cluster(8), 8)}
    assert cuts == {1, 2, 4}  # 8 does not divide 180


@pytest.mark.parametrize("name", ["devices", "node"])
def test_a_cluster_has_whole_devices(name):
    with pytest.raises(ValueError, match=rf"{name} \(8\.0\)"):
        Cluster(**{"devices": 8, name: 8.0})


def test_a_gpt_under_vmap_reads_a_mask_of_numbers():
    model = small_gpt()
    tokens = torch.randint(0, 20, (3, 2, 4))
    mask = torch.ones(3, 2, 4, dtype=torch.long)
    mask[:, 0, :2] = 0
    found = torch.func.vmap(model)(tokens, mask)
    for i in range(3):
        torch.testing.assert_close(found[i], model(tokens[i], mask[i]))
    with pytest.raises(ValueError, match="attention_mask holds 2"):
        model(tokens[0], 2 * mask[0])
