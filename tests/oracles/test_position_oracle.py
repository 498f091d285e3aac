"""attnlib.position by short formulas in float64 and integers, in unusual calls."""

import math

import numpy as np
import pytest
import torch
from dense import agree, compare, with_gradients
from draws import (
    batches,
    broadcasting,
    counts,
    drawn,
    dtypes,
    layouts,
    map_sizes,
    normal,
    seeds,
)
from hypothesis import example
from hypothesis import strategies as st

import attnlib.position as library
from attnlib.position import (
    LearnedPositionalEmbedding,
    RelativePositionBias,
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    position_angles,
    relative_position_bucket,
    relative_positions,
    rotate_halves,
    rotate_pairs,
    sincos_2d,
    sinusoidal_encoding,
)

lengths = st.integers(min_value=0, max_value=6)
bases = st.sampled_from((10000.0, 100, 0.5, 500000.0))
wide = dtypes(torch.float64, torch.float32)


@st.composite
def places(draw, shape):
    """Positions of a shape: whole or real numbers, some negative, some far away."""
    dtype = draw(st.sampled_from((torch.int64, torch.int32, torch.float32, torch.float64)))
    far = draw(st.sampled_from((1, 100, 100_000)))
    x = far * normal(shape, seed=draw(seeds))
    return (x if dtype.is_floating_point else x.round()).to(dtype)


# --- sinusoids and tables ---------------------------------------------------------------------


@drawn(st.lists(lengths, max_size=3).map(tuple), counts, bases, st.data())
def test_angles(shape, half, base, data):
    positions = data.draw(places(shape))
    angles = position_angles(positions, 2 * half, base=base)
    assert angles.dtype == torch.float64 and angles.shape == (*shape, half)
    for position, row in zip(positions.flatten().tolist(), angles.reshape(-1, half).tolist()):
        wanted = [position / base ** (2 * i / (2 * half)) for i in range(half)]
        np.testing.assert_allclose(row, wanted, rtol=1e-14, atol=0)


@drawn(lengths, counts, st.sampled_from((0, 7, -3, 100_000)), bases, dtypes())
def test_sinusoids(length, half, offset, base, dtype):
    found = sinusoidal_encoding(length, 2 * half, offset=offset, base=base, dtype=dtype)
    wanted = np.empty((length, 2 * half))
    for p in range(length):
        for i in range(half):
            angle = (offset + p) / base ** (i / half)
            wanted[p, 2 * i], wanted[p, 2 * i + 1] = math.sin(angle), math.cos(angle)
    assert found.dtype == dtype
    # at 100,000 and more, an angle in float64 is rounded to 1e-11
    atol = torch.finfo(dtype).eps / 2 + 4e-11
    torch.testing.assert_close(found.double(), torch.from_numpy(wanted), rtol=0, atol=atol)


@drawn(batches, lengths, counts, dtypes(), seeds, layouts, st.integers(-2, 8))
def test_learned_positions(batch, n, dim, dtype, seed, layout, offset):
    table = LearnedPositionalEmbedding(7, dim, dtype=dtype)
    x = normal((batch, n, dim), dtype, seed, layout)
    if offset < 0 or offset + n > 7:
        with pytest.raises(ValueError, match=rf"positions {offset} to {offset + n - 1}"):
            table(x, offset=offset)
        return
    found = with_gradients(lambda x, weight: table(x, offset=offset), [x, table.weight])[:2]
    agree(found[0], x.double() + table.weight[offset : offset + n].double(), dtype, steps=1)
    weighting = normal(found[0].shape, seed=100).to(dtype)
    assert torch.equal(found[1], weighting)
    table(x, offset=offset).backward(weighting)
    wanted = torch.zeros(7, dim, dtype=torch.float64)
    wanted[offset : offset + n] = weighting.double().sum(0)
    agree(table.weight.grad, wanted, dtype, steps=4)


# --- relative biases --------------------------------------------------------------------------


@drawn(lengths, lengths)
def test_offsets(n, cached):
    m = n + cached
    wanted = [[j - (cached + i) for j in range(m)] for i in range(n)]
    assert torch.equal(relative_positions(n, m), torch.tensor(wanted).long().view(n, m))
    with pytest.raises(ValueError, match=rf"m \({n}\)"):
        relative_positions(n + 1, n)


def bucket_of(offset, bidirectional, buckets, largest):
    """T5's bucket of an offset, in whole numbers: no logarithm is rounded."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    steps, b = buckets - exact, 0
    # log(distance / exact) / log(largest / exact) >= (b + 1) / steps
    while b + 1 < steps and distance**steps * exact ** (b + 1) >= (
        largest ** (b + 1) * exact**steps
    ):
        b += 1
    return start + exact + b


integers = st.sampled_from(
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # as a table may be stored
)


@drawn(st.booleans(), st.integers(4, 40), st.integers(1, 300), integers, st.integers(-300, 300))
@example(True, 32, 108, torch.int8, -128)  # has no opposite in 8 bits
@example(False, 32, 112, torch.uint8, 5)  # of which a byte's opposite is 251
def test_buckets(bidirectional, num_buckets, more, dtype, offset):
    exact = (num_buckets // 2 if bidirectional else num_buckets) // 2
    options = dict(
        bidirectional=bidirectional, num_buckets=num_buckets, max_distance=exact + more
    )
    limits = torch.iinfo(dtype)
    offsets = [x for x in range(offset, offset + 20) if limits.min <= x <= limits.max]
    wanted = [bucket_of(x, bidirectional, num_buckets, exact + more) for x in offsets]
    found = relative_position_bucket(torch.tensor(offsets, dtype=dtype), **options)
    assert found.dtype == torch.int64 and found.tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_what_is_no_offset(dtype):
    with pytest.raises(TypeError, match=f"relative_position of dtype {dtype}"):
        relative_position_bucket(torch.ones(3, dtype=dtype))


@drawn(counts, lengths, lengths, st.booleans(), st.integers(4, 12), seeds, dtypes())
def test_the_bias_of_t5(heads, n, cached, bidirectional, num_buckets, seed, dtype):
    m = n + cached
    options = dict(bidirectional=bidirectional, num_buckets=num_buckets, max_distance=9)
    layer = RelativePositionBias(heads, **options).to(dtype)
    weight, bias = layer.relative_attention_bias.weight, layer(n, m)
    assert bias.shape == (heads, n, m) and bias.dtype == dtype
    weighting = normal((heads, n, m), seed=seed).to(dtype)
    bias.backward(weighting)
    wanted = torch.zeros(num_buckets, heads, dtype=torch.float64)
    for i in range(n):
        for j in range(m):
            b = bucket_of(j - (cached + i), bidirectional, num_buckets, 9)
            assert torch.equal(bias[:, i, j], weight[b])
            wanted[b] += weighting[:, i, j].double()
    agree(weight.grad, wanted, dtype, steps=64)


def published_slopes(n):
    """ALiBi's code: powers of one ratio, and for other numbers half of twice as many."""
    if math.log2(n).is_integer():
        first = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [first * first**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return published_slopes(closest) + published_slopes(2 * closest)[0::2][: n - closest]


@drawn(st.integers(1, 70), lengths, lengths, dtypes())
@example(3, 1, 4000, torch.float16)
def test_alibi(heads, n, cached, dtype):
    m = n + cached
    slopes = torch.tensor(published_slopes(heads), dtype=torch.float64)
    distance = (torch.arange(m) - torch.arange(cached, m)[:, None]).abs()
    rounding, wide = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
    options = dict(
        rtol=rounding.eps / 2 + 16 * wide.eps,  # their code multiplies up to 64 times
        atol=rounding.smallest_normal * rounding.eps,  # the least number of the dtype
    )
    found = alibi_slopes(heads, dtype=dtype), alibi_bias(heads, n, m, dtype=dtype)
    for x, wanted in zip(found, (slopes, -slopes[:, None, None] * distance), strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), wanted, **options)


# --- grids ------------------------------------------------------------------------------------


def sincos_of_mae(height, width, dim):
    """get_2d_sincos_pos_embed of MAE's code for a grid of two sides."""

    def one(positions, dim):
        omega = 1.0 / 10000 ** (np.arange(dim // 2, dtype=np.float64) / (dim / 2.0))
        angles = np.einsum("m,d->md", positions.reshape(-1).astype(np.float64), omega)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    columns, rows = np.meshgrid(np.arange(width), np.arange(height))
    return np.concatenate([one(columns, dim // 2), one(rows, dim // 2)], axis=1)


@drawn(map_sizes(), counts, dtypes())
@example((0, 5), 2, torch.float32)
@example((3, 0), 1, torch.float16)
def test_sincos_of_a_grid(size, quarter, dtype):
    wanted = torch.from_numpy(sincos_of_mae(*size, 4 * quarter))
    found = sincos_2d(*size, 4 * quarter, dtype=dtype)
    assert found.dtype == dtype
    atol = torch.finfo(dtype).eps / 2 + 1e-14
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol)


# --- rotary -----------------------------------------------------------------------------------


def turned(x, angles, interleaved):
    """Each pair of x (..., d) by a matrix of cosine and sine, in float64."""
    half = x.shape[-1] // 2
    angles = angles.expand(*x.shape[:-1], half)
    out = torch.empty(x.shape, dtype=torch.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = angles[..., i].cos(), angles[..., i].sin()
        out[..., a] = c * x[..., a] - s * x[..., b]
        out[..., b] = s * x[..., a] + c * x[..., b]
    return out


@drawn(batches, counts, lengths, counts, dtypes(), seeds, layouts, bases, st.data())
def test_rotary(batch, heads, n, half, dtype, seed, layout, base, data):
    x = normal((batch, heads, n, 2 * half), dtype, seed, layout)
    positions = data.draw(places(data.draw(broadcasting((batch, heads, n)))))
    exponents = torch.arange(half, dtype=torch.float64) / half
    angles = (
        positions[..., None].double() / torch.tensor(base, dtype=torch.float64) ** exponents
    )
    for interleaved in (True, False):
        found = apply_rotary(x, positions, base=base, interleaved=interleaved)
        assert found.dtype == dtype
        # far away, an angle in float64 is rounded to about 1e-11
        steps = 4 if dtype != torch.float64 or positions.numel() == 0 else 1e6
        compare(
            lambda x: apply_rotary(x, positions, base=base, interleaved=interleaved),
            lambda x: turned(x, angles, interleaved),
            [x],
            dtype,
            steps=steps,
        )


@drawn(batches, lengths, counts, dtypes(), wide, seeds, layouts, st.data())
def test_turned_pairs(batch, n, half, dtype, of_angles, seed, layout, data):
    x = normal((batch, n, 2 * half), dtype, seed, layout)
    angles = normal(data.draw(broadcasting((batch, n, half))), of_angles, seed + 1, layout)
    compare(rotate_pairs, lambda x, angles: turned(x, angles, True), [x, angles], dtype)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = rotate_halves(x, cos, sin)
    assert found.dtype == dtype
    a, b = x.double().chunk(2, dim=-1)
    c, s = cos.double(), sin.double()
    agree(found, torch.cat([c * a - s * b, s * a + c * b], dim=-1), dtype)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 8), (8,)])
def test_one_token_cut_from_a_longer_row(first, shape):
    """PyTorch calls it contiguous, though it begins, or would go on, at an odd place."""
    row = normal((*shape[:-1], 9), torch.float32)
    x = row[..., first : first + 8]
    angles = torch.tensor(3.0, dtype=torch.float64) / 10000 ** (torch.arange(4).double() / 4)
    agree(apply_rotary(x, torch.tensor(3)), turned(x.double(), angles, True), torch.float32)
    flat = normal((9,), torch.float32)[1:].view(shape)
    agree(apply_rotary(flat, torch.tensor(3)), turned(flat.double(), angles, True), flat.dtype)


def test_halves_that_do_not_fit():
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"x of shape \(2, 3\)"):
        rotate_halves(torch.ones(2, 3), one, one)
    for name, angles in (("cos", (torch.ones(5, 2, 2), one)), ("sin", (one, torch.ones(3)))):
        with pytest.raises(ValueError, match=f"{name} of shape"):
            rotate_halves(torch.ones(2, 4), *angles)


ORACLES = {
    "position_angles": test_angles,
    "sinusoidal_encoding": test_sinusoids,
    "LearnedPositionalEmbedding": test_learned_positions,
    "relative_positions": test_offsets,
    "relative_position_bucket": test_buckets,
    "RelativePositionBias": test_the_bias_of_t5,
    "alibi_slopes": test_alibi,
    "alibi_bias": test_alibi,
    "sincos_2d": test_sincos_of_a_grid,
    "rotate_halves": test_turned_pairs,
    "rotate_pairs": test_turned_pairs,
    "apply_rotary": test_rotary,
}


def test_nothing_is_left_out():
    assert set(library.__all__) == ORACLES.keys()
