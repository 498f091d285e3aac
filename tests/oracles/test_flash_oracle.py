"""Attention in tiles is attention by its formula in float64, for calls that are unusual."""

import math

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from draws import batches, broadcasting, drawn, layouts, masks, normal, seeds, tolerance
from hypothesis import strategies as st

from attnlib import flash
from attnlib.attention import attention, attention_backend
from attnlib.flash import (
    Ranges,
    flash_attention,
    flash_decode,
    merge_partials,
    packed_ranges,
    tiled_attention,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
dtypes = st.sampled_from(flash._DTYPES)
lengths = st.sampled_from((1, 2, 5, 17, 33, 0))
widths = st.sampled_from((8, 1, 3, 16, 20))
scales = st.sampled_from((None, 0.0, -0.7, 2.0))


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def direct(q, k, v, mask=None, bias=None, scale=None):
    """softmax(scale QKᵀ + bias) V, zeros where a query may attend to nothing; and the lse."""
    group = q.shape[-3] // max(1, k.shape[-3]) if q.ndim > 2 and k.ndim > 2 else 1
    k, v = (x.repeat_interleave(group, -3) if group > 1 else x for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    s = s if mask is None else s.masked_fill(~mask, -torch.inf)
    empty = (s == -torch.inf).all(-1, keepdim=True)  # also without keys
    weights = s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return weights @ v, s.masked_fill(empty, 0).logsumexp(-1).masked_fill(
        empty[..., 0], -torch.inf
    )


def causal(n, m):
    """Query i, the last but n − 1 − i, sees keys up to its own place."""
    return torch.ones(n, m, dtype=torch.bool).tril(m - n)


def compare(call, oracle, inputs, dtype, terms=1, steep=1):
    """Output and gradients of a call on `inputs` against those of an oracle in float64.

    Each number of the last input's gradient is a sum of so many rounded `terms`, and logits are
    as large as `steep`: their rounding changes a weight by so many times its own.
    """
    ours = [x.detach().to(DEVICE).requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    out, wanted = call(*ours), oracle(*theirs)
    assert out.dtype == dtype and out.shape == wanted.shape
    close(out, wanted, steep)
    if not out.requires_grad:  # no query, or no key
        assert out.numel() == 0 or not out.any()
        return
    grad = normal(out.shape, dtype, 7)
    found = torch.autograd.grad(out, ours, grad.to(DEVICE), allow_unused=True)
    exact = torch.autograd.grad(wanted, theirs, grad.double(), allow_unused=True)
    units = [steep] * (len(inputs) - 1) + [max(steep, terms**0.5)]
    for x, a, b, count in zip(inputs, found, exact, units, strict=True):
        zeros = torch.zeros_like(x)
        close(zeros if a is None else a, zeros if b is None else b, count)


def close(a, b, units=1):
    assert a.shape == b.shape and torch.isfinite(a).all()
    largest = max(1.0, b.detach().abs().max().item()) if b.numel() else 1.0
    limit = (
        max(tolerance(a.dtype, max(8, units)), 1e-5 if a.dtype == torch.float32 else 0)
        * largest
    )
    torch.testing.assert_close(
        a.detach().double().cpu(), b.detach().double(), rtol=0, atol=limit
    )


# --- in plain PyTorch -------------------------------------------------------------------------


@drawn(st.data(), counts := st.integers(0, 5), counts, st.integers(1, 6), st.integers(1, 6))
def test_tiles_of_any_size(data, n, m, rows, cols):
    """Also of rows that see nothing, whose outputs and gradients are zero."""
    shape = data.draw(st.sampled_from(((), (2,), (1, 2))))
    q, k, v = (
        normal((*shape, length, d), seed=data.draw(seeds), layout=data.draw(layouts))
        for length, d in ((n, 3), (m, 3), (m, 2))
    )
    mask = data.draw(masks((*shape, n, m))).expand(*shape, n, m)
    bias = normal((*shape, n, m), seed=9).masked_fill(~mask, -torch.inf)
    scale = data.draw(scales)

    def call(*tensors):
        return tiled_attention(
            *tensors, bias=bias, scale=scale, block_rows=rows, block_cols=cols
        )[0]

    compare(call, lambda q, k, v: direct(q, k, v, None, bias, scale)[0], (q, k, v), q.dtype)
    _, lse = tiled_attention(q, k, v, bias=bias, scale=scale, block_rows=rows, block_cols=cols)
    assert torch.allclose(lse, direct(q, k, v, None, bias, scale)[1], atol=1e-12)


@pytest.mark.parametrize("name", ["block_rows", "block_cols"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_tile_has_a_row_and_a_column(name, size):
    """A negative size once gave zeros."""
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=rf"{name} \({size}\).* at least 1"):
        tiled_attention(x, x, x, **{name: size})


@drawn(st.data(), st.integers(1, 5), st.integers(0, 6), st.integers(0, 6), seeds)
def test_parts_of_keys_are_merged(data, n, first, m, seed):
    """Gradients are zero, and not NaN, for queries that see nothing in either part."""
    first = min(first, m)
    inputs = normal((2, n, 3), seed=seed), normal((2, m, 3), seed=1), normal((2, m, 4), seed=2)
    mask = data.draw(masks((2, n, m))).expand(2, n, m)
    bias = torch.zeros(2, n, m, dtype=torch.float64).masked_fill(~mask, -torch.inf)

    def call(q, k, v):
        parts = [
            tiled_attention(q, k[:, part], v[:, part], bias=bias[..., part])
            for part in (slice(first), slice(first, None))
        ]
        out, lse = merge_partials(*parts)
        return torch.cat([out, torch.where(mask.any(-1), lse, 0)[..., None]], -1)

    def oracle(q, k, v):
        out, lse = direct(q, k, v, mask)
        return torch.cat([out, torch.where(mask.any(-1), lse, 0)[..., None]], -1)

    compare(call, oracle, inputs, torch.float64)


# --- the kernels ------------------------------------------------------------------------------


@drawn(
    st.data(),
    batches,
    st.integers(1, 2),
    st.integers(1, 3),
    lengths,
    lengths,
    widths,
    widths,
    dtypes,
)
def test_flash_attention(data, batch, own, group, n, m, d, d_v, dtype):
    """Grouped heads, masks and biases of every shape, any strides, any scale; and gradients."""
    heads, seed = own * group, data.draw(seeds)
    q, k, v = (
        normal(shape, dtype, seed + i, data.draw(layouts))
        for i, shape in enumerate(
            ((batch, heads, n, d), (batch, own, m, d), (batch, own, m, d_v))
        )
    )
    shape, inputs, terms = (batch, heads, n, m), (q, k, v), 1
    mask = data.draw(st.none() | masks(shape))
    if data.draw(st.booleans()):
        bias = normal(data.draw(broadcasting(shape)), dtype, seed, data.draw(layouts))
        inputs = *inputs, bias
        terms = math.prod(shape) / max(1, bias.numel())
    tril = n <= m and data.draw(st.booleans())
    scale = data.draw(scales)

    def call(q, k, v, bias=None):
        place = None if mask is None else mask.to(DEVICE)
        return flash_attention(q, k, v, mask=place, bias=bias, causal=tril, scale=scale)

    def oracle(q, k, v, bias=None):
        seen = torch.ones(n, m, dtype=torch.bool) if mask is None else mask
        return direct(q, k, v, seen & causal(n, m) if tril else seen, bias, scale)[0]

    factor = d**-0.5 if scale is None else scale
    keys = k.double().repeat_interleave(group, 1)
    logits = (q.double() @ keys.mT * factor).abs()
    compare(call, oracle, inputs, dtype, terms, logits.max().item() if logits.numel() else 1)


@drawn(st.data(), st.lists(st.integers(1, 2), max_size=3), st.integers(1, 5), st.integers(1, 5))
def test_leading_axes_broadcast(data, lead, n, m):
    """Of queries, keys and values, each of their own, with none up to three of them."""
    shapes = [
        (*data.draw(broadcasting((*lead, 1, 1)))[:-2], length, d)
        for length, d in ((n, 4), (m, 4), (m, 3))
    ]
    q, k, v = (normal(shape, torch.float32, i) for i, shape in enumerate(shapes))
    lead = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    mask = data.draw(masks((*lead, n, m)))

    def oracle(q, k, v):
        q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
        return direct(q, k, v, mask)[0]

    compare(
        lambda q, k, v: flash_attention(q, k, v, mask=mask.to(DEVICE)),
        oracle,
        (q, k, v),
        torch.float32,
    )


@drawn(st.data(), batches, st.integers(1, 3), lengths, lengths, dtypes)
def test_ranges(data, batch, heads, n, m, dtype):
    """Any ranges that do not move back, of all sequences or of each."""
    rows = data.draw(st.sampled_from((1, batch)))
    integers = data.draw(st.sampled_from((torch.int64, torch.int32, torch.uint8)))
    bounds = torch.tensor(
        [
            [sorted(data.draw(st.lists(st.integers(0, m), min_size=n, max_size=n)))] * rows
            for _ in range(2)
        ],
        dtype=integers,
    ).reshape(2, rows, n)
    ranges = Ranges(*(x.to(DEVICE) for x in bounds), m)
    first, last = bounds[..., None].long()
    keys = torch.arange(m)
    mask = ((first <= keys) & (keys < last))[:, None]  # (B or 1, 1, N, M)
    assert torch.equal(ranges.mask().cpu(), mask)
    q, k, v = (
        normal((batch, heads, length, 8), dtype, i) for i, length in enumerate((n, m, m))
    )
    seen = data.draw(st.none() | masks((batch, heads, n, m)))

    def call(q, k, v):
        place = None if seen is None else seen.to(DEVICE)
        return flash_attention(q, k, v, mask=place, ranges=ranges)

    whole = mask if seen is None else mask & seen
    compare(call, lambda q, k, v: direct(q, k, v, whole)[0], (q, k, v), dtype)


def test_a_bound_of_few_bits_may_not_decrease():
    """In uint8 the difference 0 − 2 is 254."""
    first, last = torch.tensor([[2, 0], [3, 3]], dtype=torch.uint8)
    with pytest.raises(ValueError, match="must not decrease"):
        Ranges(first, last, 3)
    with pytest.raises(ValueError, match=r"shape \(2,\).*shape \(3,\)"):
        Ranges(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 3)


@drawn(st.lists(st.integers(0, 4), max_size=4), st.booleans(), st.none() | st.integers(1, 4))
def test_packed_sequences(parts, tril, window):
    """Each token is in a sequence, and sees those of its own that are near; also no tokens."""
    number = torch.arange(len(parts)).repeat_interleave(torch.tensor(parts).long())
    place = torch.arange(len(number))
    apart = place[:, None] - place
    wanted = number[:, None] == number
    wanted = wanted & (apart >= 0) if tril else wanted
    wanted = wanted if window is None else wanted & (apart.abs() < window)
    for given in (parts, torch.tensor(parts).long(), torch.tensor(parts, dtype=torch.int32)):
        assert torch.equal(packed_ranges(given, tril, window).mask()[0, 0], wanted)
    x = normal((1, 2, len(number), 4), torch.float32)
    out = flash_attention(x, x, x, ranges=packed_ranges(parts, tril, window))
    close(out, direct(*[x.double()] * 3, wanted)[0])


def test_lengths_are_integers():
    assert torch.equal(packed_ranges(3).by_query, packed_ranges([3]).by_query)
    for wrong in ([2.0], torch.ones(1, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="lengths .* must be a list of integers"):
            packed_ranges(wrong)


@drawn(
    st.data(),
    batches,
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from((1, 2, 17, 0)),
    st.sampled_from((1, 3, 16, 40)),
    widths,
    widths,
    dtypes,
)
def test_decoding(data, batch, own, group, n, m, d, d_v, dtype):
    """Any number of parts, of a cache with any strides; also of no sequence."""
    seed = data.draw(seeds)
    q, k, v = (
        normal(shape, dtype, seed + i, data.draw(layouts)).to(DEVICE)
        for i, shape in enumerate(
            ((batch, own * group, n, d), (batch, own, m, d), (batch, own, m, d_v))
        )
    )
    splits = data.draw(st.none() | st.integers(1, m))
    scale = data.draw(st.sampled_from((None, 0.0, 1.5)))
    out = flash_decode(q, k, v, splits=splits, scale=scale)
    assert out.dtype == dtype
    close(out, direct(*(x.double().cpu() for x in (q, k, v)), scale=scale)[0])


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((2, 1, 4), (2, 3, 4), (2, 3, 4)),
        ((1, 0, 1, 4), (1, 0, 3, 4), (1, 0, 3, 4)),
        ((1, 2, 1, 0), (1, 2, 3, 0), (1, 2, 3, 4)),
        ((1, 2, 1, 4), (2, 2, 3, 4), (2, 2, 3, 4)),
        ((1, 3, 1, 4), (1, 2, 3, 4), (1, 2, 3, 4)),
    ],
)
def test_shapes_that_cannot_be_decoded_are_named(q, k, v):
    with pytest.raises(ValueError, match=r"must be \(B, h, N, d\)"):
        flash_decode(*(torch.randn(shape) for shape in (q, k, v)))


def test_autocast_leaves_float64_alone_as_pytorch_does():
    x = normal((1, 2, 3, 4))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match="float64"):
            flash_attention(x, x, x)
        assert flash_attention(*[x.float()] * 3).dtype == torch.bfloat16


@drawn(st.data(), batches, st.integers(1, 6), st.integers(1, 6))
def test_the_backend_serves_every_dtype(data, batch, n, m):
    """What the kernels do not take goes through PyTorch, and gives the same."""
    dtype = data.draw(st.sampled_from((torch.float64, *flash._DTYPES)))
    q, k, v = (
        normal((batch, 2, length, 4), dtype, i, data.draw(layouts))
        for i, length in enumerate((n, m, m))
    )
    mask = data.draw(masks((batch, 2, n, m)))
    with attention_backend("triton"):
        out = attention(q, k, v, mask=mask)
    assert out.dtype == dtype
    close(out, direct(q.double(), k.double(), v.double(), mask)[0])


# --- pieces of kernels ------------------------------------------------------------------------


@triton.jit
def product_kernel(A, B, Out, Rounded, PRECISION: tl.constexpr):
    """Out = A Bᵀ of 16 by 16 numbers, by `dot`, and the same rounded to Rounded's dtype."""
    place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    out = flash.dot(tl.load(A + place), tl.trans(tl.load(B + place)), None, PRECISION)
    tl.store(Out + place, out)
    tl.store(Rounded + place, flash.rounded(out, Rounded.dtype.element_ty, PRECISION))


@drawn(seeds, dtypes, st.sampled_from((1.0, 1e-3, 1e4)))
def test_products_and_their_rounding(seed, dtype, size):
    """To the nearest number, and to the even one of two: as PyTorch rounds."""
    a, b = ((normal((16, 16), seed=seed + i) * size**0.5).to(DEVICE, dtype) for i in (0, 1))
    out, low = torch.empty(16, 16, device=DEVICE), torch.empty_like(a)
    flash.launch(product_kernel, 1, a.device, a, b, out, low, flash.product_precision(a))
    exact = (a.double() @ b.double().T).cpu()
    close(out.cpu() / size, exact / size)
    assert torch.equal(low, out.to(dtype))


@drawn(
    st.sampled_from(sorted(flash.KERNELS)),
    st.integers(1, 256),
    st.integers(1, 256),
    st.sampled_from((2, 4)),
    st.booleans(),
    st.sampled_from(sorted(flash._SHARED_MEMORY.values())),
)
def test_tiles_hold_the_heads(kernel, d, d_v, size, extra, shared):
    """Each is as wide as the next power of two, at least 16, as products of tiles need."""
    if size == 4 and max(d, d_v) > 128:
        return  # which `refusal` refuses
    options = flash.tiling(kernel, d, d_v, size, extra, shared << 10)
    assert (options["D"], options["DV"]) == (d, d_v)
    for name, width in (("BLOCK_D", d), ("BLOCK_DV", d_v)):
        assert options[name] == max(16, 2 ** (width - 1).bit_length())
    for name in ("BLOCK_M", "BLOCK_N"):
        assert options[name] >= 16 and options[name].bit_count() == 1


@drawn(
    st.sampled_from(sorted(flash.CARDS)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 64),
    st.integers(1, 64),
    st.booleans(),
    st.booleans(),
)
def test_predicted_times_are_work_over_speed(card, batch, heads, n, d, tril, bias):
    speed, memory, processors, clock = flash.CARDS[card]
    (forward,) = flash.predicted_times(card, batch, heads, n, d, causal=tril, bias=bias)
    pairs = batch * heads * n * n / (2 if tril else 1)
    assert forward["products"] == pytest.approx(2 * 2 * pairs * d / speed)
    assert forward["exponentials"] == pytest.approx(pairs / (16 * processors * clock))
    moved = 2 * (4 * batch * heads * n * d + bias * heads * n * n)
    assert forward["bytes"] == pytest.approx(moved / memory)
    backward = flash.predicted_times(card, batch, heads, n, d, tril, bias, backward=True)
    products = sum(kernel["products"] for kernel in backward)
    assert products == pytest.approx((3 + 4 + 2 * bias) * 2 * pairs * d / speed)


@drawn(st.sampled_from((torch.float64, torch.int32, *flash._DTYPES)), st.integers(1, 300))
def test_what_is_supported(dtype, width):
    x = torch.empty(1, dtype=dtype)
    wanted = dtype in flash._DTYPES and width <= 256
    assert flash.is_supported(x.to("meta"), width) is wanted
    if flash.triton_mode("cpu") == "interpreted":
        assert flash.is_supported(x, width) is wanted and flash.refusal(x, width) is None


ORACLES = {
    "merge_partials": test_parts_of_keys_are_merged,
    "tiled_attention": test_tiles_of_any_size,
    "flash_attention": test_flash_attention,
    "Ranges": test_ranges,
    "packed_ranges": test_packed_sequences,
    "flash_decode": test_decoding,
    "flash_backend": test_the_backend_serves_every_dtype,
    "dot": test_products_and_their_rounding,
    "rounded": test_products_and_their_rounding,
    "launch": test_products_and_their_rounding,
    "product_precision": test_products_and_their_rounding,
    "tiling": test_tiles_hold_the_heads,
    "predicted_times": test_predicted_times_are_work_over_speed,
    "is_supported": test_what_is_supported,
    "triton_mode": test_what_is_supported,
    "refusal": test_what_is_supported,
}
NOT_HERE = {
    "refuse_derivative": "words an error: tests/test_rare_calls_5c.py",
    "compile_kernel": "compiles for a GPU in a process of its own: tests/test_kernels.py",
    "compile_for": "compiles for a GPU in a process of its own: tests/test_kernels.py",
    "_DTYPES": "a constant",
    "_OLDEST_TRITON": "a constant",
    "LOG2E": "a constant",
    "TILES": "a table, read by `tiling`",
    "_WITH_EXTRA": "a table, read by `tiling`",
    "KERNELS": "the kernels, which are run above",
    "_SHARED_MEMORY": "a table of what GPUs have",
    "CARDS": "a table of data sheets",
}


def test_every_public_name_is_here_or_said_to_be_elsewhere():
    assert not ORACLES.keys() & NOT_HERE.keys()
    assert set(flash.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
