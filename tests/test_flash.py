"""The tiled kernels are attention in every option, interpreted or on a GPU, and compile."""

import itertools
import os
import random
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from torch.utils.flop_counter import FlopCounterMode

from attnlib import flash
from attnlib.attention import attention, attention_backend, causal_mask
from attnlib.flash import (
    Ranges,
    flash_attention,
    flash_decode,
    is_supported,
    merge_partials,
    packed_ranges,
    tiled_attention,
    triton_mode,
)
from attnlib.train import peak_memory
from helpers import finer_precision, kernel_grid

ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.fixture(autouse=True)
def exact_products():
    """Float32 products in float32: another test may have allowed less."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def tensor(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=True)


def qkv(*lead, n, m=None, d=8, d_v=None, dtype=torch.float32):
    """Queries (*lead, n, d), keys (*lead, m, d) and values (*lead, m, d_v)."""
    shapes = (n, d), (m or n, d), (m or n, d_v or d)
    return [tensor(*lead, *shape, dtype=dtype) for shape in shapes]


def reference(q, k, v, mask, bias, causal, scale):
    """Attention by the equation."""
    if causal:
        seen = causal_mask(q.shape[-2], k.shape[-2], device=q.device)
        mask = seen if mask is None else mask & seen
    with attention_backend("reference"):
        return attention(q, k, v, mask=mask, bias=bias, scale=scale)


def agree(q, k, v, mask=None, bias=None, causal=False, scale=None):
    """Output and all gradients against the reference in float64."""
    inputs = [x for x in (q, k, v, bias) if x is not None]
    out = flash_attention(q, k, v, mask=mask, bias=bias, causal=causal, scale=scale)
    assert out.dtype == q.dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = reference(*exact[:3], mask, None if bias is None else exact[3], causal, scale)
    assert out.shape == wanted.shape
    grad = torch.randn_like(out)
    ours = out, *torch.autograd.grad(out, inputs, grad)
    theirs = wanted, *torch.autograd.grad(wanted, exact, grad.double())
    for a, b in zip(ours, theirs, strict=True):
        assert torch.isfinite(a).all() and a.shape == b.shape
        assert (a.double() - b).abs().max() <= LIMIT[q.dtype] * max(1, b.abs().max())


# --- every option -----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@kernel_grid("n, m", [(1, 1), (1, 40), (32, 32), (33, 33), (35, 50)], kept=[(1, 40), (35, 50)])
def test_lengths(n, m, causal):
    torch.manual_seed(0)
    agree(*qkv(1, 2, n=n, m=m, d=16), causal=causal)


def test_more_queries_than_keys():
    torch.manual_seed(0)
    agree(*qkv(1, 1, n=50, m=17, d=16))


@kernel_grid("d, d_v", [(1, 1), (24, 40), (33, 16), (100, 100), (256, 256)], kept=[(24, 40)])
def test_widths(d, d_v):
    torch.manual_seed(0)
    refused = DEVICE == "cuda" and max(d, d_v) > 128  # in float32
    dtype = torch.bfloat16 if refused else torch.float32
    agree(*qkv(1, 1, n=20, d=d, d_v=d_v, dtype=dtype), causal=True)


@kernel_grid(
    "shape",
    [(2, 2, 35, 20), (1, 2, 35, 20), (2, 1, 1, 20), (35, 20), (2, 35, 1), (1, 1, 1, 1)],
    kept=[(1, 2, 35, 20), (2, 35, 1)],
)
def test_bias_and_its_gradient_along_every_axis(shape):
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 1, 20, device=DEVICE) < 0.7
    agree(*qkv(2, 2, n=35, m=20), mask, tensor(*shape))


@pytest.mark.parametrize("enough, causal", [(1, True), (20, False)])
@kernel_grid(
    "shape",
    [(1, 2, 33, 33), (1, 2, 1, 33), (2, 1, 33, 1), (1, 1, 1, 1)],
    kept=[(1, 2, 33, 33)],
)
def test_gradient_of_a_bias_by_few_and_by_many_programs(shape, enough, causal, monkeypatch):
    """Written by the kernel itself, or as sums that are added afterwards."""
    torch.manual_seed(0)
    monkeypatch.setattr(flash, "_bias_gradient", partial(flash._bias_gradient, enough=enough))
    mask = torch.rand(2, 1, 33, 1, device=DEVICE) < 0.7
    bias = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (x.detach() for x in qkv(2, 2, n=33, m=33, d=16))
    grad = torch.randn(2, 2, 33, 16, device=DEVICE)
    out = flash_attention(q, k, v, mask=mask, bias=bias, causal=causal)
    (found,) = torch.autograd.grad(out, bias, grad)
    exact = [x.detach().double() for x in (q, k, v, bias)]
    exact[3].requires_grad_()
    out = reference(*exact[:3], mask, exact[3], causal, None)
    (wanted,) = torch.autograd.grad(out, exact[3], grad.double())
    assert found.dtype == bias.dtype and found.shape == bias.shape
    assert (found.double() - wanted).abs().max() <= 4e-3 * max(1, wanted.abs().max())


def bias_gradient_bytes(shape, n, m, monkeypatch):
    """What the gradient of a bias in bfloat16 takes; its kernel does not run."""
    monkeypatch.setattr(flash, "launch", lambda *arguments, **options: None)
    q, k, v, grad = (
        torch.zeros(1, 2, length, 16, dtype=torch.bfloat16) for length in (n, m, m, n)
    )
    bias = torch.zeros(shape, dtype=torch.bfloat16)
    rows = torch.zeros(1, 2, n)
    inputs = q, k, v, None, bias, None
    return peak_memory(lambda: flash._bias_gradient(inputs, grad, rows, rows, False, 1.0))


@pytest.mark.skipif(DEVICE == "cuda", reason="what is counted is the same")
def test_gradient_of_a_bias_takes_no_memory_beside_itself(monkeypatch):
    """2 bytes for each entry in bfloat16; and what a bias of one row takes knows no queries."""
    entries = 2 * 1024 * 1024
    assert bias_gradient_bytes((2, 1024, 1024), 1024, 1024, monkeypatch) <= 2.01 * entries
    short, long = (
        bias_gradient_bytes((2, 1, 1024), n, 1024, monkeypatch) for n in (2048, 16384)
    )
    assert short == long
    partial_sums = 4 * 2 * 1024 * 8  # float32, of 8 programs for each of the 128 tiles
    assert long <= 1.2 * partial_sums
    short, long = (
        bias_gradient_bytes((2, 1024, 1), 1024, m, monkeypatch) for m in (2048, 16384)
    )
    assert short == long


@kernel_grid(
    "shape",
    [(2, 2, 20, 35), (2, 1, 20, 35), (1, 2, 20, 1), (2, 1, 1, 35), (20, 35)],
    kept=[(2, 1, 20, 35), (1, 2, 20, 1)],
)
def test_mask_along_every_axis_and_causal(shape):
    torch.manual_seed(0)
    mask = torch.rand(shape, device=DEVICE) < 0.6
    agree(*qkv(2, 2, n=20, m=35), mask, tensor(2, 20, 35), causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision(dtype):
    torch.manual_seed(0)
    mask = torch.rand(1, 2, 35, 35, device=DEVICE) < 0.7
    agree(*qkv(1, 2, n=35, d=64, dtype=dtype), mask, tensor(2, 35, 35, dtype=dtype))


def test_rounding_is_that_of_the_reference_in_the_same_dtype():
    """In bfloat16 the kernel is at least as near to float64 as the equation in bfloat16."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 48, 32, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    exact = attention(q.double(), k.double(), v.double())
    with attention_backend("reference"):
        plain = (attention(q, k, v) - exact).abs().mean()
    assert (flash_attention(q, k, v) - exact).abs().mean() <= 1.05 * plain


@kernel_grid("scale", [0.0, -0.7, 3], kept=[-0.7])
def test_scale(scale):
    torch.manual_seed(0)
    agree(*qkv(1, 1, n=20), scale=scale, causal=True)


@pytest.mark.parametrize("device", [DEVICE])
@kernel_grid("causal", [False, True], kept=[True])
def test_every_kernel_in_one_small_case_sanitize(causal, device):
    """For compute-sanitizer, which `make gpu` runs on tests of this name.

    Edges in all axes, masks, a shared bias.
    """
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 1, 150, device=device) < 0.7
    agree(*qkv(2, 2, n=140, m=150, d=24, d_v=40), mask, tensor(2, 140, 150), causal=causal)
    agree(*qkv(1, 2, n=1, m=70, d=16), causal=causal)


@kernel_grid("seed", range(6), kept=[0])
def test_random_cases(seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    b, h = draw.choice([(1, 1), (1, 2), (2, 1)])
    n, d, d_v = (draw.randint(1, 40) for _ in range(3))
    m = n + draw.randint(0, 20)
    shapes = [[draw.choice([1, size]) for size in (b, h, n, m)] for _ in range(2)]
    mask = torch.rand(shapes[0], device=DEVICE) < 0.7 if draw.random() < 0.6 else None
    bias = tensor(*shapes[1]) if draw.random() < 0.6 else None
    agree(*qkv(b, h, n=n, m=m, d=d, d_v=d_v), mask, bias, causal=draw.random() < 0.5)


# --- nothing to see ---------------------------------------------------------------------------


def test_queries_that_see_nothing_get_zeros_and_zero_gradients():
    torch.manual_seed(0)
    (q, k, v), bias = qkv(1, 1, n=40), torch.randn(40, 40, device=DEVICE)
    bias[3], bias[5:7, :20] = -torch.inf, -torch.inf
    bias.requires_grad_()
    mask = torch.ones(40, 40, dtype=torch.bool, device=DEVICE)
    mask[4], mask[5, 20:], mask[33] = False, False, False
    agree(q, k, v, mask, bias)
    out = flash_attention(q, k, v, mask=mask, bias=bias)
    empty = [3, 4, 5, 33]
    dq, dbias = torch.autograd.grad(out.square().sum(), (q, bias))
    assert not any(x.any() for x in (out[..., empty, :], dq[..., empty, :], dbias[empty]))
    assert out[..., 6, :].any()
    nobody = flash_attention(q, k, v, mask=torch.zeros(1, 1, dtype=torch.bool, device=DEVICE))
    assert not nobody.any() and not torch.autograd.grad(nobody.sum(), k)[0].any()


def test_empty_tensors():
    q, k, v = qkv(2, n=5, m=6, d=4, d_v=3)
    out = flash_attention(q, k[:, :0], v[:, :0])
    assert out.shape == (2, 5, 3) and not out.any()
    assert not torch.autograd.grad(out.sum(), q)[0].any()
    assert flash_attention(q[:, :0], k, v).shape == (2, 0, 3)
    assert flash_attention(q[:0], k[:0], v[:0]).shape == (0, 5, 3)
    bias = tensor(5, 6)  # used, though by nobody: its gradient is zero and not missing
    nobody = flash_attention(q[:0], k[:0], v[:0], bias=bias)
    assert not torch.autograd.grad(nobody.sum(), bias)[0].any()


# --- the backend ------------------------------------------------------------------------------


def test_backend_triton_is_the_kernel_where_it_can_serve(monkeypatch):
    """What it cannot serve goes to PyTorch's kernels, which the counter of launches shows."""
    launches, started = [], flash.launch
    monkeypatch.setattr(
        flash, "launch", lambda *a, **o: launches.append(a[0]) or started(*a, **o)
    )
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, device=DEVICE) for _ in range(3))
    bias = torch.randn(2, 9, 9, device=DEVICE)
    wide = torch.randn(1, 2, 9, 257, device=DEVICE)
    with attention_backend("triton"):
        ours = attention(q, k, v, mask="causal", bias=bias, scale=0.3)
        assert len(launches) == 1
        others = attention(q.double(), k.double(), v.double()), attention(q, k, wide)
        attention(q, k, v, dropout_p=0.5)
    assert len(launches) == 1
    torch.testing.assert_close(ours, attention(q, k, v, mask="causal", bias=bias, scale=0.3))
    torch.testing.assert_close(others[0], attention(q, k, v).double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(others[1], attention(q, k, wide))


def test_what_is_supported():
    x = torch.ones(1, device=DEVICE)
    assert is_supported(x, 256) and is_supported(x, 128, 128) and is_supported(x.to("meta"), 32)
    assert not is_supported(x, 257) and not is_supported(x, 129, 128)
    assert not is_supported(x.double(), 32)


def test_shapes_without_numbers():
    """On the meta device the operators give shapes, so that counters can run."""
    q, k, v = (torch.empty(2, 3, n, 8, device="meta") for n in (5, 7, 7))
    assert flash_attention(q, k, v).shape == q.shape


# --- the precision of float32 -----------------------------------------------------------------


def test_precision_is_asked_for_in_float32_alone(monkeypatch):
    """And what PyTorch refuses to say, after settings of both kinds, is not asked."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 5, 8, device=DEVICE)
    with finer_precision(cuda="tf32", cpu="bf16"):
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
                torch.get_float32_matmul_precision()
        out = flash_attention(q, q, q)
    torch.testing.assert_close(out, attention(q, q, q), rtol=2e-3, atol=2e-3)
    asked = []
    monkeypatch.setattr(
        flash, "float32_products", lambda device: asked.append(device) or "ieee"
    )
    for dtype in (torch.float16, torch.bfloat16):
        flash_attention(*[q.to(dtype)] * 3)
    assert not asked
    flash_attention(q, q, q)
    assert asked


# --- strides and axes -------------------------------------------------------------------------


def test_any_strides():
    torch.manual_seed(0)
    fused = tensor(2, 20, 3, 2, 8)  # (B, N, 3, h, d), the output of one fused projection
    agree(*(x.transpose(1, 2) for x in fused.unbind(2)))
    q, k = tensor(1, 2, 8, 20).mT, tensor(2, 20, 8, 1).permute(3, 0, 1, 2)
    v, mask = tensor(1, 2, 20, 16)[..., ::2], torch.rand(20, 20, device=DEVICE) < 0.7
    agree(q, k, v, mask.T)


def test_nothing_is_copied(monkeypatch):
    seen = []
    monkeypatch.setattr(flash, "launch", lambda *arguments, **options: seen.extend(arguments))
    q, k, v = torch.randn(2, 20, 3, 2, 8, device=DEVICE).permute(2, 0, 3, 1, 4)
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool, device=DEVICE)
    bias = torch.randn(2, 20, 20, device=DEVICE)
    flash_attention(q, k[:, :1], v, mask=mask, bias=bias)
    given = [x for x in seen if isinstance(x, torch.Tensor)]
    for x, y in zip((q, k, v, mask, bias), given):
        assert y.data_ptr() == x.data_ptr()
    assert given[3].shape == mask.shape and given[4].shape == bias.shape


# --- decoding ---------------------------------------------------------------------------------

CACHES = {  # of 2 sequences and 2 heads, with room for 30 keys: (its shape, the axes B, h, M)
    "in a row": ((2, 2, 30, 8), (0, 1, 2)),
    "tokens first": ((2, 30, 2, 8), (0, 2, 1)),
    "of the whole batch": ((30, 2, 2, 8), (1, 2, 0)),
}


@kernel_grid("cache", CACHES, kept=["tokens first"])
@kernel_grid("splits, heads, n", [(None, 2, 1), (2, 8, 5), (3, 4, 1)], kept=[(2, 8, 5)])
def test_decoding_is_attention_whatever_the_strides(cache, splits, heads, n, monkeypatch):
    """And the cache that a kernel gets is the cache itself."""
    torch.manual_seed(0)
    shape, axes = CACHES[cache]
    k, v = (torch.randn(shape, device=DEVICE).permute(*axes, 3)[:, :, :23] for _ in range(2))
    q = torch.randn(2, n, heads, 8, device=DEVICE).transpose(1, 2)
    given, start = [], flash.launch

    def launch(*arguments, **options):
        given.append((arguments, options))
        start(*arguments, **options)

    monkeypatch.setattr(flash, "launch", launch)
    found = flash_decode(q, k, v, splits=splits)
    keys, values = (x.double().repeat_interleave(heads // 2, 1) for x in (k, v))
    wanted = attention(q.double(), keys, values)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    ((arguments, options),) = given
    for own, x in zip(arguments[4:6], (k, v), strict=True):
        assert own.data_ptr() == x.data_ptr() and own.stride() == x.stride()
    assert options["BLOCK_M"] == 16  # the least that tl.dot takes


@pytest.mark.skipif(DEVICE == "cuda", reason="what is counted is the same")
def test_decoding_takes_little_memory_and_pads_a_query_to_16_rows(monkeypatch):
    """A cache (B, M, h, d) costs what (B, h, M, d) costs, which is far below a copy."""
    monkeypatch.setattr(flash, "launch", lambda *arguments, **options: None)
    q, taken = torch.zeros(2, 4, 1, 64), []
    for shape, axes in (((2, 4, 4096, 64), (0, 1, 2, 3)), ((2, 4096, 4, 64), (0, 2, 1, 3))):
        cache = torch.zeros(shape).permute(axes)
        taken.append(peak_memory(lambda: flash_decode(q, cache, cache, splits=16)))
    assert taken[0] == taken[1] < 0.05 * 4 * cache.numel()
    for size, widths in ((2, (16, 64, 128, 256)), (4, (16, 64, 128))):
        for width in widths:
            assert flash.tiling("decode", width, width, size)["BLOCK_M"] == 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decoding_in_lower_precision_compiled_and_counted(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, device=DEVICE, dtype=dtype) for n in (1, 50, 50))
    wanted = attention(q.double(), k.double(), v.double())
    with FlopCounterMode(display=False) as counter:
        found = flash_decode(q, k, v, splits=3)
    assert found.dtype == dtype and counter.get_total_flops() == 2 * 2 * 50 * (16 + 16)
    assert (found.double() - wanted).abs().max() <= LIMIT[dtype]
    compiled = torch.compile(partial(flash_decode, splits=3), backend="aot_eager")
    assert torch.equal(compiled(q, k, v), found)


@pytest.mark.parametrize(
    "q, k, v, mask, bias",
    [
        ((5, 4), (7, 4), (7, 4), (5, 7), (7,)),
        ((3, 5, 4), (7, 4), (1, 7, 6), (3, 1, 7), None),
        ((2, 2, 2, 5, 4), (2, 2, 2, 5, 4), (2, 2, 2, 5, 4), (2, 1, 1, 1, 5), (2, 2, 5, 5)),
        ((2, 1, 2, 5, 4), (1, 2, 1, 5, 4), (2, 5, 4), (2, 1, 2, 1, 5), (1, 2, 1, 5, 1)),
    ],
)
def test_leading_axes(q, k, v, mask, bias):
    torch.manual_seed(0)
    mask = torch.rand(mask, device=DEVICE) < 0.8
    agree(tensor(*q), tensor(*k), tensor(*v), mask, bias and tensor(*bias))


def test_only_the_gradients_that_are_asked_for():
    q, k, v = (torch.randn(1, 1, 9, 8, device=DEVICE) for _ in range(3))
    bias = tensor(9, 9)
    flash_attention(q, k, v, bias=bias).sum().backward()
    assert bias.grad.shape == (9, 9) and q.grad is None
    assert not flash_attention(q, k, v, bias=bias.detach()).requires_grad


def started(monkeypatch):
    """The names of the kernels that are launched from now on, and with how many programs."""
    names, launch = [], flash.launch

    def counted(kernel, programs, *arguments, **options):
        names.append((kernel.fn.__name__, programs))
        return launch(kernel, programs, *arguments, **options)

    monkeypatch.setattr(flash, "launch", counted)
    return names


@pytest.mark.parametrize(
    "needs, kernels",
    [
        ("q", {"_query_kernel"}),
        ("k", {"_key_kernel"}),
        ("v", {"_key_kernel"}),
        ("qk", {"_query_kernel", "_key_kernel"}),
        ("b", {"_bias_kernel"}),
        ("qb", {"_query_kernel", "_bias_kernel"}),
    ],
)
def test_no_kernel_for_a_gradient_that_nobody_needs(needs, kernels, monkeypatch):
    torch.manual_seed(0)
    inputs = [x.detach() for x in (*qkv(1, 2, n=20), tensor(20, 20))]
    own = [x.requires_grad_(name in needs) for x, name in zip(inputs, "qkvb", strict=True)]
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in own]
    names = started(monkeypatch)
    out = flash_attention(*own[:3], bias=own[3])
    out.square().sum().backward()
    assert {name for name, _ in names[1:]} == kernels
    attention(*exact[:3], bias=exact[3]).square().sum().backward()
    for a, b in zip(own, exact, strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or (a.grad.double() - b.grad).abs().max() < 1e-5


# --- ranges: windows and packed sequences -----------------------------------------------------


def agree_on_ranges(ranges, q, k, v, bias=None):
    """Output and gradients against the reference with the same ranges as a mask, in float64."""
    inputs = [x for x in (q, k, v, bias) if x is not None]
    out = flash_attention(q, k, v, bias=bias, ranges=ranges)
    grad, seen = torch.randn_like(out), ranges.mask()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wide = [x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in exact[1:3]]
    wanted = reference(
        exact[0], *wide, seen, exact[3] if bias is not None else None, False, None
    )
    ours = out, *torch.autograd.grad(out, inputs, grad)
    theirs = wanted, *torch.autograd.grad(wanted, exact, grad.double())
    for a, b in zip(ours, theirs, strict=True):
        assert torch.isfinite(a).all() and (a.double() - b).abs().max() <= 1e-5


@kernel_grid("seed", range(8), kept=[0, 1])
def test_ranges_of_packed_sequences(seed):
    generator, lengths = random.Random(seed), []
    torch.manual_seed(seed)
    while sum(lengths) < 70:
        lengths.append(generator.choice([0, 1, 3, 17, 33, 64]))
    causal, window = seed % 2 == 0, generator.choice([None, 1, 5, 40])
    n, own = sum(lengths), generator.choice([1, 2, 4])
    q, k, v = tensor(2, 4, n, 16), tensor(2, own, n, 16), tensor(2, own, n, 16)
    bias = tensor(4, n, n) if seed % 3 == 0 else None
    agree_on_ranges(packed_ranges(lengths, causal, window, device=DEVICE), q, k, v, bias)


@kernel_grid("seed", range(6), kept=[0])
def test_any_ranges_of_each_sequence(seed):
    """Bounds that never decrease, empty ranges too; N and M differ."""
    torch.manual_seed(seed)
    n, m = 45 + seed, 70 - 9 * seed
    bounds = torch.randint(0, m + 1, (2, 2, n), device=DEVICE).sort(-1).values
    ranges = Ranges(*bounds, m)  # two sequences
    i, j = torch.arange(n, device=DEVICE)[:, None], torch.arange(m, device=DEVICE)
    first, last = (x[:, None] for x in ranges.by_key.unbind(1))  # (2, 1, M)
    assert torch.equal((first <= i) & (i < last), ranges.mask()[:, 0])  # the inverse
    assert torch.equal(
        ranges.mask()[:, 0], (bounds[0, ..., None] <= j) & (j < bounds[1, ..., None])
    )
    agree_on_ranges(ranges, tensor(2, 4, n, 8), tensor(2, 2, m, 8), tensor(2, 2, m, 8))


def test_tiles_outside_of_all_ranges_are_not_read():
    """What stands there may be NaN, forward and backward."""
    q, k, v = (x.detach() for x in qkv(1, 2, n=256))
    ranges = packed_ranges([128, 128], device=DEVICE)
    for x in (q, k, v):
        x[..., 128:, :] = torch.nan
    own = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attention(*own, ranges=ranges)[..., :128, :]
    gradients = torch.autograd.grad(out.sum(), own)
    assert all(torch.isfinite(x[..., :128, :]).all() for x in (out, *gradients[:1]))
    alone = [x[..., :128, :].detach() for x in own]
    torch.testing.assert_close(out, flash_attention(*alone))


def test_ranges_through_leading_axes_and_a_compiler():
    torch.manual_seed(0)
    bounds = torch.randint(0, 6, (2, 2, 5), device=DEVICE).sort(-1).values
    ranges = Ranges(*bounds, 6)
    q = tensor(2, 3, 2, 5, 8).transpose(1, 2)  # axes that do not merge
    k, v = tensor(2, 1, 3, 6, 8).expand(2, 2, 3, 6, 8), tensor(2, 2, 3, 6, 8)
    out = flash_attention(q, k, v, ranges=ranges)
    torch.testing.assert_close(out, attention(q, k, v, mask=ranges.mask()[:, None]))
    call = torch.compile(lambda *x: flash_attention(*x, ranges=ranges), fullgraph=True)
    torch.testing.assert_close(call(q[:, 0], k[:, 0], v[:, 0]), out[:, 0])


def test_bad_ranges():
    q, k, v = qkv(2, 1, n=6)
    for first, last, keys, message in (
        ([0, 2, 1], [3, 3, 3], 3, "must not decrease"),
        ([0, 0, 0], [1, 2, 4], 3, r"from 0 to keys \(3\)"),
        ([-1, 0, 0], [1, 2, 3], 3, "from 0 to keys"),
        ([0.0, 0.0], [1.0, 2.0], 3, "must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            Ranges(torch.tensor(first), torch.tensor(last), keys)
    for lengths, window in (([3, -1], None), ([3], 0)):
        with pytest.raises(ValueError, match="at least"):
            packed_ranges(lengths, window=window)
    six = packed_ranges([6], device=DEVICE)
    for ranges, options in (
        (packed_ranges([7], device=DEVICE), {}),
        (six, dict(causal=True)),
        (Ranges(*torch.zeros(2, 3, 6, dtype=torch.long, device=DEVICE), 6), {}),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            flash_attention(q, k, v, ranges=ranges, **options)


def test_ranges_are_refused_where_they_have_no_tile(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    q = types.SimpleNamespace(is_cuda=True, device="cuda", shape=(1, 1, 6, 8))
    with pytest.raises(TypeError, match="no tiles for GPUs of compute capability 10"):
        packed_ranges([6]).check(q, q, False)


# --- heads that share keys --------------------------------------------------------------------


def repeated(q, k, v, grad, mask, bias, causal):
    """Output and gradients in float64, with keys and values repeated for every head of q."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    bias = None if bias is None else bias.detach().double().requires_grad_()
    wide = [x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v)]
    out = reference(q, *wide, mask, bias, causal, None)
    inputs = [x for x in (q, k, v, bias) if x is not None]
    return out, *torch.autograd.grad(out, inputs, grad.double())


@kernel_grid("heads, own", [(4, 2), (3, 1), (6, 2)], kept=[(4, 2)])
@kernel_grid("kind", ["plain", "causal", "mask", "bias", "everything"], kept=["everything"])
def test_grouped_queries(kind, heads, own, monkeypatch):
    """Keys with fewer heads: one launch of each kernel, and gradients of the keys' shape."""
    torch.manual_seed(0)
    q = tensor(2, heads, 20, 8)
    k, v = tensor(2, own, 35, 8), tensor(2, own, 35, 5)
    mask = (
        torch.rand(2, 1, 20, 35, device=DEVICE) < 0.7
        if kind in ("mask", "everything")
        else None
    )
    bias = tensor(heads, 20, 35) if kind in ("bias", "everything") else None
    causal, names = kind in ("causal", "everything"), started(monkeypatch)
    out = flash_attention(q, k, v, mask=mask, bias=bias, causal=causal)
    grad = torch.randn_like(out)
    inputs = [x for x in (q, k, v, bias) if x is not None]
    ours = out, *torch.autograd.grad(out, inputs, grad)
    assert len(names) == 3 + (bias is not None)
    assert dict(names)["_key_kernel"] == 2 * own * -(-35 // 32) or DEVICE == "cuda"
    for a, b in zip(ours, repeated(q, k, v, grad, mask, bias, causal), strict=True):
        assert a.shape == b.shape and (a.double() - b).abs().max() < 1e-5 * max(
            1, b.abs().max()
        )


@pytest.mark.parametrize(
    "q, k, mask, bias, launches",
    [
        ((2, 2, 3, 9, 8), (2, 2, 1, 11, 8), None, None, 1),
        ((2, 2, 3, 9, 8), (2, 2, 1, 11, 8), (2, 1, 1, 1, 11), None, 1),
        ((2, 2, 3, 9, 8), (2, 2, 1, 11, 8), None, (2, 3, 9, 11), 1),
        ((2, 2, 3, 9, 8), (2, 2, 1, 11, 8), None, (3, 1, 11), 1),
        ((2, 2, 3, 9, 8), (2, 1, 1, 11, 8), (2, 1, 1, 9, 1), None, 1),
        ((2, 2, 2, 3, 9, 8), (2, 2, 2, 1, 11, 8), None, None, 1),
        ((2, 2, 3, 9, 8), (11, 8), None, None, 1),
        ((2, 2, 3, 9, 8), (2, 2, 1, 11, 8), (2, 1, 1, 1, 11), (3, 9, 11), 2),
    ],
)
def test_grouped_queries_in_axes_of_their_own(q, k, mask, bias, launches, monkeypatch):
    """What `attention` calls grouped: (…, heads of keys, group, N, d) beside keys with a 1."""
    torch.manual_seed(0)
    q, k, v = tensor(*q), tensor(*k), tensor(*k)
    mask = None if mask is None else torch.rand(mask, device=DEVICE) < 0.8
    names = started(monkeypatch)
    agree(q, k, v, mask, bias and tensor(*bias))
    assert sum(name == "_forward_kernel" for name, _ in names) == launches


def test_grouped_queries_through_the_backend_and_a_compiler():
    torch.manual_seed(0)
    q, k, v = tensor(1, 2, 2, 9, 8), tensor(1, 2, 1, 9, 8), tensor(1, 2, 1, 9, 8)
    with attention_backend("triton"):
        ours = attention(q, k, v, mask="causal")
    torch.testing.assert_close(ours, attention(q, k, v, mask="causal"), rtol=1e-4, atol=1e-5)
    flat = q.flatten(1, 2).detach(), k.squeeze(2).detach(), v.squeeze(2).detach()
    compiled = torch.compile(lambda *x: flash_attention(*x, causal=True), fullgraph=True)
    torch.testing.assert_close(compiled(*flat), ours.flatten(1, 2), rtol=1e-4, atol=1e-5)


def test_heads_that_do_not_divide_are_refused():
    q, k = tensor(1, 6, 5, 8), tensor(1, 4, 5, 8)
    with pytest.raises(ValueError, match=r"k \(1, 4, 5, 8\)"):
        flash_attention(q, k, k)


def test_a_new_length_does_not_recompile():
    """Counts that change from batch to batch are no part of what a kernel is compiled for."""
    code = """
from attnlib import flash
for kernel in flash.KERNELS.values():
    print(sorted(p.name for p in kernel.params if p.do_not_specialize))
"""
    done = python(code, TRITON_INTERPRET="0").stdout.splitlines()
    backward_of_bias = "['H', 'M', 'N', 'repeats', 'splits']"
    decoding = "['H', 'M', 'N', 'splits']"
    assert done == ["['H', 'M', 'N']"] * 3 + [backward_of_bias, decoding]


# --- PyTorch ----------------------------------------------------------------------------------


def test_operators_keep_their_promises():
    (q, k, v), bias = qkv(1, 2, n=9), tensor(1, 2, 9, 9)
    mask, forward = torch.rand(1, 1, 1, 9, device=DEVICE) < 0.7, torch.ops.attnlib.flash_forward
    ranges = packed_ranges([4, 5], device=DEVICE)
    for seen, keys, causal in ((None, None, True), (ranges.by_query, ranges.by_key, False)):
        inputs = [x.detach() for x in (q, k, v, mask, bias)]
        torch.library.opcheck(forward, (*inputs, seen, causal, 0.3))
        out, lse = forward(*inputs, seen, causal, 0.3)
        given = torch.randn_like(out), *inputs, seen, keys, out, lse, causal, 0.3, True
        torch.library.opcheck(torch.ops.attnlib.flash_backward, given)


def test_compiles_without_graph_breaks():
    torch.manual_seed(0)
    inputs = (*qkv(1, 2, n=9), tensor(2, 9, 9))

    def call(q, k, v, bias):
        return flash_attention(q, k, v, bias=bias, causal=True) * 2

    plain, ours = call(*inputs), torch.compile(call, fullgraph=True)(*inputs)
    torch.testing.assert_close(ours, plain)
    gradients = [torch.autograd.grad(out.sum(), inputs) for out in (ours, plain)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_operations_are_counted():
    """PyTorch's counter gives the kernels' products; forward they are the equation's."""
    (q, k, v), bias = qkv(2, 3, n=9, m=11, d=8, d_v=5), tensor(9, 11)
    product = 2 * 2 * 3 * 9 * 11
    for backend in ("reference", "triton"):
        with FlopCounterMode(display=False) as counter, attention_backend(backend):
            attention(q, k, v)
        assert counter.get_total_flops() == product * (8 + 5)
    for more, options in enumerate(({}, dict(bias=bias))):
        out = flash_attention(q, k, v, **options)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == product * ((4 + more) * 8 + (3 + more) * 5)


def test_second_derivatives_are_refused():
    q = tensor(1, 1, 4, 8)
    (gradient,) = torch.autograd.grad(flash_attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(gradient.sum(), q)


def test_autocast():
    q, k, v = qkv(1, 1, n=4)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = flash_attention(q, k, v.detach().bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


# --- bad input --------------------------------------------------------------------------------


def test_bad_input():
    q, k, v = (torch.randn(1, 2, 5, 8, device=DEVICE) for _ in range(3))
    wide = torch.randn(1, 3, 257, device=DEVICE)
    elsewhere = torch.ones(5, 5, dtype=torch.bool, device="meta")
    short = q, k[..., :4, :], v[..., :4, :]
    for error, named, arguments, options in (
        (ValueError, r"k \(1, 2, 5, 7\)", (q, k[..., :7], v), {}),
        (ValueError, r"v \(1, 2, 4, 8\)", (q, k, v[..., :4, :]), {}),
        (TypeError, "mask of dtype", (q, k, v), {"mask": torch.zeros(5, 5)}),
        (ValueError, "bias of shape", (q, k, v), {"bias": torch.zeros(3, 5, 5)}),
        (TypeError, "q of dtype torch.float64", (q.double(), k.double(), v.double()), {}),
        (TypeError, "k of torch.float16", (q, k.half(), v), {}),
        (ValueError, "5 queries to 4 keys", short, {"causal": True}),
        (ValueError, "mask is on meta", (q, k, v), {"mask": elsewhere}),
        (ValueError, "of width 257 is wider", (wide, wide, wide), {}),
    ):
        with pytest.raises(error, match=named):
            flash_attention(*arguments, **options)


@pytest.mark.parametrize(
    "name, version, major, dtype, width, message",
    [
        ("Tesla T4", "3.9.0", 7, torch.float16, 8, "T4: the kernels need compute capability 8"),
        ("A100", "3.9.0", 8, torch.float32, 200, "width 200 in torch.float32: the kernels"),
        ("A100", "3.4.0", 8, torch.float32, 128, None),
        ("A100", "3.10.0+git1", 8, torch.bfloat16, 256, None),
        ("A100", "3.3.1", 8, torch.float16, 8, "Triton 3.3.1: the kernels need Triton 3.4"),
        ("A100", "2.9", 8, torch.float16, 8, "with Triton 2.9: the kernels need Triton 3.4"),
    ],
)
def test_what_has_no_tile_is_refused(name, version, major, dtype, width, message, monkeypatch):
    """The error says what is needed, and the backend leaves the work to PyTorch."""
    monkeypatch.setattr(flash.triton, "__version__", version)
    monkeypatch.setattr(flash, "triton_mode", lambda device: "compiled")
    chip = types.SimpleNamespace(name=name, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    x = types.SimpleNamespace(is_cuda=True, device="cuda", dtype=dtype)
    reason = flash.refusal(x, width)
    assert reason is None if message is None else message in reason
    if message:
        monkeypatch.setattr(flash, "refusal", lambda *x: reason)
        x = torch.randn(1, 2, 5, 8, dtype=dtype, device=DEVICE)
        with pytest.raises(TypeError, match=message):
            flash_attention(x, x, x)
        with attention_backend("triton"):
            torch.testing.assert_close(
                attention(x, x, x), F.scaled_dot_product_attention(x, x, x)
            )


def python(code, **environment):
    """Run code in a process of its own; a variable that is None is taken out of it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    environment = {name: value for name, value in environment.items() if value is not None}
    call = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_says_where_it_runs():
    assert triton_mode(DEVICE) == ("compiled" if DEVICE == "cuda" else "interpreted")
    code = """
import torch
from attnlib.attention import attention, attention_backend
from attnlib.flash import flash_attention, triton_mode
x = torch.ones(2, 2)
with attention_backend("triton"):
    print(triton_mode("cpu"), attention(x, x, x).sum().item())
flash_attention(x, x, x)
"""
    for before, interpret in (("", "0"), ("import triton", None)):
        done = python(before + code, TRITON_INTERPRET=interpret)
        assert done.stdout == "None 4.0\n", done.stderr
        assert "RuntimeError: q is on cpu, and Triton runs on CPU" in done.stderr


def test_without_triton_the_module_says_what_to_install():
    done = python("import sys; sys.modules['triton'] = None\nimport attnlib.flash")
    assert 'ImportError: triton is missing: pip install "attnlib[triton]"' in done.stderr


def test_import_of_the_library_is_not_slowed():
    assert python("import attnlib, sys; print('triton' in sys.modules)").stdout == "False\n"


# --- the page's plain versions ----------------------------------------------------------------


@pytest.mark.parametrize("block_rows, block_cols", [(1, 1), (4, 3), (16, 64)])
def test_tiled_attention(block_rows, block_cols):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (10, 13, 13))
    bias = torch.randn(3, 10, 13, dtype=torch.float64)
    bias[1, 4] = -torch.inf
    out, lse = tiled_attention(q, k, v, bias=bias, block_rows=block_rows, block_cols=block_cols)
    torch.testing.assert_close(out, attention(q, k, v, bias=bias), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, (q @ k.mT / 2 + bias).logsumexp(-1), rtol=1e-10, atol=1e-10)
    halves = slice(0, 5), slice(5, 13)
    parts = [tiled_attention(q, k[..., s, :], v[..., s, :], bias=bias[..., s]) for s in halves]
    for ours, theirs in zip(merge_partials(*parts), (out, lse)):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


# --- for GPUs ---------------------------------------------------------------------------------


def cases_on_a_gpu():
    """(width, dtype, mask or bias, what is seen, lengths, group).

    Each pair of values occurs; only the widths, of which the record of all compilations has
    every combination, take turns.
    """
    values = (
        (torch.float32, torch.float16, torch.bfloat16),
        ("plain", "mask", "bias", "both"),
        ("all", "causal", "ranges"),
        ((1024, 1024), (777, 1500), (1, 1000)),
        (1, 4),  # heads of queries for each head of keys
    )
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(values)), 2)
        for a, b in itertools.product(values[i], values[j])
    }
    draw, cases = random.Random(3), []
    while missing:  # the best of some random cases that hold a pair that is missing
        i, a, j, b = min(missing, key=str)
        drawn = []
        for _ in range(100):
            case = [draw.choice(own) for own in values]
            case[i], case[j] = a, b
            pairs = {(x, case[x], y, case[y]) for x, y in itertools.combinations(range(5), 2)}
            drawn.append((len(missing & pairs), case, pairs))
        _, case, pairs = max(drawn, key=lambda own: own[0])
        missing -= pairs
        widths = (64, 128, 16, 32, 80, 96) + ((256,) if case[0] != torch.float32 else ())
        cases.append((widths[len(cases) % len(widths)], *case))
    return cases


def test_cases_on_a_gpu_are_few():
    """Compilations: forward, query and key once a case, and the bias kernel where one is."""
    cases = cases_on_a_gpu()
    assert {case[0] for case in cases} == {16, 32, 64, 80, 96, 128, 256}
    assert sum(3 + (case[2] in ("bias", "both")) for case in cases) <= 60


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("case", cases_on_a_gpu(), ids=str)
def test_full_sizes_on_a_gpu(case):
    d, dtype, extra, seen, (n, m), group = case
    torch.manual_seed(0)
    q, k, v = (
        tensor(2, 4, n, d, dtype=dtype),
        *(tensor(2, 4 // group, m, d, dtype=dtype) for _ in range(2)),
    )
    mask = torch.rand(2, 1, n, m, device=DEVICE) < 0.8 if extra in ("mask", "both") else None
    bias = tensor(4, n, m, dtype=dtype) if extra in ("bias", "both") else None
    bounds = torch.randint(0, m + 1, (2, 2, n), device=DEVICE).sort(-1).values
    options = dict(causal=seen == "causal")
    told = mask
    if seen == "ranges":
        options = dict(ranges=Ranges(*bounds, m))
        told = options["ranges"].mask() if mask is None else mask & options["ranges"].mask()
    out = flash_attention(q, k, v, mask=mask, bias=bias, **options)
    grad = torch.randn_like(out)
    inputs = [x for x in (q, k, v, bias) if x is not None]
    ours = out, *torch.autograd.grad(out, inputs, grad)
    for a, b in zip(ours, repeated(q, k, v, grad, told, bias, seen == "causal"), strict=True):
        assert (a.double() - b).abs().max() <= LIMIT[dtype] * max(1, b.abs().max())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_offsets_beyond_32_bits_on_a_gpu():
    """A bias of more than 2^31 numbers, whose last rows are read by the last queries."""
    n, m = 33000, 66000
    options = dict(device=DEVICE, dtype=torch.bfloat16)
    q, k, v = (torch.randn(1, 1, length, 16, **options) for length in (n, m, m))
    bias = torch.zeros(n, m, **options)
    bias[-1, : m // 2] = -torch.inf
    out = flash_attention(q, k, v, bias=bias)[..., -1:, :]
    k, v = k[..., m // 2 :, :], v[..., m // 2 :, :]
    wanted = F.scaled_dot_product_attention(q[..., -1:, :], k, v)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


def test_tiles_of_no_queries_or_no_keys():
    some = torch.randn(2, 3, 4)
    out, lse = tiled_attention(some[:, :0], some, some)
    assert out.shape == (2, 0, 4) and lse.shape == (2, 0)
    out, lse = tiled_attention(some, some[:, :0], some[:, :0])
    assert (out == 0).all() and (lse == -torch.inf).all() and out.shape == (2, 3, 4)
