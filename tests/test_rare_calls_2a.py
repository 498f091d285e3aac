"""Rare but legitimate calls of layers from PyTorch and of counts."""

import warnings

import pytest
import torch
import torch.nn as nn

from attnlib.cost import count_operations, saved_activations, training_memory
from attnlib.transformer import _layer_from_torch

LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("training", (True, False))
def test_a_layer_from_torch_has_the_mode_of_that_layer(layer_class, training):
    theirs = layer_class(8, 2, 16, activation=nn.PReLU(), batch_first=True).train(training)
    ours = _layer_from_torch(theirs)
    assert {part.training for part in ours.modules()} == {training}


def test_a_layer_from_torch_in_evaluation_drops_nothing():
    theirs = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).eval()
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(_layer_from_torch(theirs)(x), theirs(x))


@pytest.mark.parametrize("layer_class", LAYERS)
def test_what_is_frozen_in_a_torch_layer_stays_frozen(layer_class):
    theirs = layer_class(8, 2, 16, activation=nn.PReLU(), batch_first=True)
    theirs.requires_grad_(False)
    assert not any(p.requires_grad for p in _layer_from_torch(theirs).parameters())
    theirs.linear1.weight.requires_grad_(True)
    theirs.activation.requires_grad_(True)
    trained = [
        name for name, p in _layer_from_torch(theirs).named_parameters() if p.requires_grad
    ]
    assert trained == ["feed_forward.linear1.weight", "feed_forward.activation.weight"]


def test_saved_activations_and_memory_are_the_same_in_inference_mode():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.ones(3, 4)
    wanted = saved_activations(model, x), training_memory(model, x)
    with torch.inference_mode():
        assert (saved_activations(model, x), training_memory(model, x)) == wanted
        assert torch.is_inference_mode_enabled()
    assert wanted[0] > 0


def test_views_in_place_move_no_bytes():
    def change(x):
        return x.transpose_(0, 1).unsqueeze_(0).squeeze_(0).t_()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count = count_operations(change, torch.ones(3, 4))
        rows = count_operations(nn.GRU(5, 4, batch_first=True), torch.ones(2, 6, 5))
    assert (count.bytes, count.operators, rows.uncounted) == (0, [], [])


def test_unfolding_an_image_is_no_product():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count = count_operations(nn.Unfold(2), torch.ones(1, 2, 4, 4))
        back = count_operations(nn.Fold((4, 4), 2), torch.ones(1, 8, 9))
    assert count.uncounted == back.uncounted == []
    assert count.flops == back.flops == 0 < min(count.bytes, back.bytes)
