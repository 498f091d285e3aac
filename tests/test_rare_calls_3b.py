"""Calls that are rare and allowed: pools of fast copies, inference mode, windows as numbers."""

import copy

import pytest
import torch
import torch.nn as nn

from attnlib.cost import saved_activations
from attnlib.finetune import gradient_map
from attnlib.inference import optimize_for_inference
from attnlib.swin import SwinTransformer
from attnlib.tnt import TNT
from attnlib.vit import VisionTransformer


def small_vit():
    return VisionTransformer(16, 4, 3, 5, embed_dim=16, depth=2, num_heads=2).eval()


def small_tnt():
    return TNT(
        16,
        4,
        3,
        5,
        embed_dim=16,
        inner_dim=8,
        depth=2,
        num_heads_inner=2,
        num_heads_outer=2,
        first_stride=2,
    ).eval()


@pytest.mark.parametrize("make", [small_vit, small_tnt])
@pytest.mark.parametrize("pool", ["avg", "", "token"])
@torch.no_grad()
def test_pool_of_an_optimized_copy_can_be_changed(make, pool):
    torch.manual_seed(0)
    model = make()
    fast = optimize_for_inference(model)
    model.set_pool(pool)
    fast.set_pool(pool)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(fast(x), model(x))


def test_gradient_map_works_in_inference_mode():
    torch.manual_seed(0)
    model = small_vit()
    x = torch.randn(2, 3, 16, 16)
    expected = gradient_map(model, x, 4)
    with torch.inference_mode():
        found = gradient_map(model, x.clone(), 4)
    torch.testing.assert_close(found, expected)
    assert not x.requires_grad


def test_saved_activations_leaves_buffers_and_random_numbers_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    saved_activations(model, torch.ones(2, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name


def test_window_of_a_stage_may_be_a_number():
    model = SwinTransformer(
        32, 2, 3, 5, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4
    )
    stage = model.layers[0]
    stage.set_window_size(2)
    assert [block.attn.window_size for block in stage.blocks] == [(2, 2), (2, 2)]
    assert [block.attn.shift_size for block in stage.blocks] == [(0, 0), (1, 1)]
