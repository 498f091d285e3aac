"""Calls that few people make: NaN, layers without ReLU, lengths in narrow integers."""

import pytest
import torch
import torch.nn as nn

from attnlib.inference import PackedLinear, _PackedConv

FINE = dict(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_relu_keeps_nan(dtype):
    torch.manual_seed(0)
    layer = nn.Linear(400, 600, dtype=dtype)
    x = torch.randn(2, 3, 400, dtype=dtype)
    x[0, 0, 0] = torch.nan
    with torch.no_grad():
        y = PackedLinear(layer.weight, layer.bias, "relu")(x)
        expected = layer(x).relu()
    assert y[0, 0].isnan().all()
    torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("with_shortcut", [True, False])
def test_packed_conv_applies_relu_if_asked_and_keeps_nan(relu, with_shortcut):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3, padding=1).eval()
    norm = nn.BatchNorm2d(8).eval()
    x = torch.randn(2, 3, 9, 7)
    x[0, 0, 0, 0] = torch.nan
    shortcut = torch.randn(2, 8, 9, 7) if with_shortcut else None
    with torch.no_grad():
        y = _PackedConv(conv, norm, relu)(x, shortcut)
        expected = norm(conv(x))
    if with_shortcut:
        expected = expected + shortcut
    expected = expected.relu() if relu else expected
    assert y[0, 0, 0, 0].isnan()
    torch.testing.assert_close(y, expected, equal_nan=True, **FINE)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_packed_ranges_of_narrow_integers(dtype):
    packed_ranges = pytest.importorskip("attnlib.flash").packed_ranges
    wide = packed_ranges([200, 100])
    narrow = packed_ranges(torch.tensor([200, 100], dtype=dtype))
    assert torch.equal(narrow.by_query, wide.by_query)
