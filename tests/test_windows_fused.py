"""A Swin block as five kernels is the block, and says what it cannot do."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_memory import watched

from attnlib import windows
from attnlib.cost import count_operations
from attnlib.swin import PatchMerging, SwinBlock, SwinTransformer
from attnlib.swinv2 import SwinTransformerV2
from attnlib.windows import FusedBlock, FusedMerging, fuse_swin, fused_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = {torch.float32: 1e-4 if DEVICE == "cuda" else 2e-6, torch.bfloat16: 2e-2}
LIMIT[torch.float16] = 3e-3


def randomized(module):
    """The module on the device, no norm or bias of which is one or zero."""
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5 if p.ndim == 2 else 1.0)
    return module.to(DEVICE).requires_grad_(False)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(list(LIMIT)),
    st.tuples(st.integers(1, 140), st.integers(1, 70), st.integers(1, 70)),
    st.tuples(*[st.booleans()] * 4),
)
def test_products(dtype, sizes, options):
    rows, fan_in, fan_out = sizes
    normed, gelu, added, biased = options
    layer, norm = randomized(nn.Linear(fan_in, fan_out, biased)), nn.LayerNorm(fan_in)
    norm, layer = randomized(norm).to(dtype) if normed else None, layer.to(dtype)
    x = (3 + torch.randn(2, rows, fan_in, device=DEVICE)).to(dtype)
    residual = torch.randn(2, rows, fan_out, device=DEVICE).to(dtype) if added else None
    with torch.no_grad():
        found = fused_linear(x, layer, norm=norm, gelu=gelu, residual=residual)
        wide = x.double()
        if normed:
            wide = F.layer_norm(wide, (fan_in,), norm.weight.double(), norm.bias.double())
        bias = layer.bias.double() if biased else None
        exact = F.linear(wide, layer.weight.double(), bias)
        exact = F.gelu(exact) if gelu else exact
        exact = exact + residual.double() if added else exact
    assert found.dtype == dtype and found.shape == exact.shape
    assert (found - exact).abs().max() <= LIMIT[dtype] * max(exact.abs().max().item(), 1)


def test_rows_far_from_zero_keep_their_variance():
    layer, norm = randomized(nn.Linear(64, 8)), nn.LayerNorm(64).to(DEVICE)
    x = 1000 + torch.randn(5, 64, device=DEVICE)
    with torch.no_grad():
        found = fused_linear(x, layer, norm=norm)
        exact = F.linear(norm.double()(x.double()), layer.weight.double(), layer.bias.double())
    assert (found - exact).abs().max() < 1e-3


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is what is watched")
def test_a_block_touches_only_what_is_its_own():
    block = randomized(SwinBlock(16, 2, (3, 2), (1, 1))).eval()
    x = torch.randn(1, 5, 4, 16)
    with watched(windows) as names, torch.no_grad():
        found = FusedBlock(block)(x)
    assert names == ["_product", "_forward", "_product", "_product", "_product"]
    torch.testing.assert_close(found, block(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
def test_models(size):
    torch.manual_seed(0)
    options = dict(embed_dim=16, depths=(2, 1), num_heads=(1, 2), window_size=2)
    model = randomized(SwinTransformer(16, 4, 1, 3, **options)).eval()
    fused, x = fuse_swin(model), torch.randn(2, 1, *size, device=DEVICE)
    assert fused.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-3, atol=1e-4)  # a known bias


def test_merging():
    merging, x = randomized(PatchMerging(8)), torch.randn(1, 5, 3, 8, device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(FusedMerging(merging)(x), merging(x), rtol=1e-4, atol=1e-5)


def test_operator_checks_and_counts():
    x, weight = torch.randn(5, 16, device=DEVICE), torch.randn(8, 16, device=DEVICE)
    arguments = (x.T.contiguous().T, weight, None, None, None, 0.0, True, None)
    torch.library.opcheck(torch.ops.attnlib.fused_linear.default, arguments)
    layer = nn.Linear(16, 8, bias=False, device=DEVICE)
    with torch.no_grad():
        counted = count_operations(lambda: fused_linear(x, layer))
    assert counted.flops == 2 * 5 * 16 * 8 and counted.bytes == 4 * (80 + 128 + 40)


def test_bad_input():
    layer, x = nn.Linear(8, 4, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    with pytest.raises(RuntimeError, match="under torch.no_grad"):
        fused_linear(x, layer)
    with torch.no_grad():
        for arguments, options, error, message in (
            ((x[:, :7], layer), {}, ValueError, r"must be \(..., 8\)"),
            ((x, layer), dict(residual=x), ValueError, r"residual of shape \(3, 4\)"),
            ((x, layer), dict(norm=nn.LayerNorm(4)), ValueError, "norm of shape"),
            ((x.double(), layer), {}, TypeError, "float64"),
            ((x.half(), layer), {}, TypeError, "as layer and residual"),
        ):
            with pytest.raises(error, match=message):
                fused_linear(*arguments, **options)
    small = dict(embed_dim=8, depths=(1,), num_heads=(1,), window_size=2)
    with pytest.raises(TypeError, match="SwinTransformerV2"):
        fuse_swin(SwinTransformerV2(8, 4, 1, 3, **small))
    with pytest.raises(TypeError, match="Linear"):
        fuse_swin(layer)
    model = SwinTransformer(8, 4, 1, 3, **small)
    model.layers[0].blocks[0].mlp.act = nn.ReLU()
    with pytest.raises(TypeError, match="with GELU"):
        fuse_swin(model)
