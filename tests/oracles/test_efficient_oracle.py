"""attnlib.efficient by matrices, loops and recurrences in float64, in unusual calls."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense import agree, compare, dense, dense_weights
from draws import (
    batches,
    broadcasting,
    counts,
    drawn,
    dtypes,
    layouts,
    map_sizes,
    masks,
    normal,
    paddings,
    seeds,
)
from hypothesis import strategies as st

import attnlib.efficient as library
from attnlib.efficient import (
    _check_grid,
    _check_lengths,
    _iterated_inverse,
    _segment_means,
    at_least_float32,
    axial_attention,
    delta_attention,
    elu_features,
    linear_attention,
    linformer_attention,
    local_attention,
    lsh_attention,
    nystrom_attention,
    performer_attention,
    pooled_attention,
    random_features,
    sparse_mask,
)

lengths = st.integers(min_value=0, max_value=7)
chunks = st.sampled_from((1, 2, 3, 64))


@st.composite
def tensors(draw, n, m=None, dtype=None):
    """q (..., n, 4), k (..., m, 4) and v (..., m, 3), whose leading axes broadcast."""
    dtype = draw(dtypes()) if dtype is None else dtype
    leading, seed, layout = (draw(batches), 2), draw(seeds), draw(layouts)
    m = n if m is None else m
    found = []
    for i, shape in enumerate(((n, 4), (m, 4), (m, 3))):
        own = draw(broadcasting(leading)) if draw(st.booleans()) else leading
        found.append(normal((*own, *shape), dtype, seed + i, layout))
    return found


def leading_of(q, k, v):
    return torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])


@st.composite
def token_masks(draw, leading, n):
    """A mask that broadcasts to (..., 1, n), of one axis too; padding on any side; or None."""
    kind = draw(st.sampled_from(("none", "padding", "any", "one axis")))
    if kind == "padding" and len(leading) == 2:
        return draw(paddings(leading[0], n))[:, None, None]
    if kind == "any":
        return draw(masks((*leading, 1, n)))
    return draw(paddings(1, n))[0] if kind == "one axis" else None


# --- masks and their faster twins -------------------------------------------------------------


@drawn(counts, counts, st.integers(0, 6), st.integers(0, 6), st.booleans(), seeds)
def test_sparse_mask(n, window, global_tokens, random_keys, causal, seed):
    if max(global_tokens, random_keys) > n:
        with pytest.raises(ValueError, match=r"must be between 0 and n"):
            sparse_mask(n, window=window, global_tokens=global_tokens, random_keys=random_keys)
        return
    state = torch.get_rng_state()
    options = dict(window=window, global_tokens=global_tokens, causal=causal)
    plain = sparse_mask(n, **options)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn
    for i in range(n):
        for j in range(n):
            near = abs(i - j) < window or min(i, j) < global_tokens
            assert plain[i, j] == (near and (j <= i or not causal))
    generator = torch.Generator().manual_seed(seed)
    mask = sparse_mask(n, **options, random_keys=random_keys, generator=generator)
    extra = mask & ~plain
    assert torch.equal(mask & plain, plain) and (extra.sum(1) <= random_keys).all()
    if not causal:
        assert (mask.sum(1) >= random_keys).all()
    assert not (causal and mask.triu(1).any())


@drawn(lengths, counts, st.booleans(), st.data())
def test_local_attention(n, window, causal, data):
    q, k, v = data.draw(tensors(n))
    apart = torch.arange(n) - torch.arange(n)[:, None]
    mask = (apart.abs() < window) & ((apart <= 0) | (not causal))
    ours = partial(local_attention, window=window, causal=causal)
    compare(ours, partial(dense, mask=mask), [q, k, v], q.dtype, steps=32)


@drawn(map_sizes(5), st.sampled_from((0, 1)), st.data())
def test_axial_attention(grid, axis, data):
    height, width = grid
    q, k, v = data.draw(tensors(height * width))
    place = torch.arange(height * width)
    line = place % width if axis == 0 else place // width
    mask = line[:, None] == line
    ours = partial(axial_attention, grid=grid, axis=axis)
    compare(ours, partial(dense, mask=mask), [q, k, v], q.dtype, steps=32)


@drawn(lengths, map_sizes(3), st.integers(1, 3), st.data())
def test_pooled_attention(n, cells, ratio, data):
    height, width = cells[0] * ratio, cells[1] * ratio
    q, k, v = data.draw(tensors(n, height * width))

    def pooled(x):
        x = x.reshape(*x.shape[:-2], height, width, x.shape[-1])
        rows = []
        for i in range(0, height, ratio):
            for j in range(0, width, ratio):
                rows.append(x[..., i : i + ratio, j : j + ratio, :].mean((-3, -2)))
        return torch.stack(rows, dim=-2)

    ours = partial(pooled_attention, grid=(height, width), ratio=ratio)
    compare(ours, lambda q, k, v: dense(q, pooled(k), pooled(v)), [q, k, v], q.dtype, steps=32)


@drawn(st.sampled_from(((2, 3, 1), (-2, -3), (6,), (5, 1))))
def test_what_is_no_grid(grid):
    x = torch.ones(6, 4)
    calls = (
        partial(_check_grid, x),
        lambda grid: axial_attention(x, x, x, grid, 0),
        lambda grid: pooled_attention(x, x, x, grid, 1),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"grid \(.*\)"):
            call(grid)
    _check_grid(x, (2, 3))


@drawn(lengths, lengths, st.data())
def test_lengths_that_fit(n, m, data):
    q, k, v = data.draw(tensors(n, m))
    if n == m:
        assert _check_lengths(q, k, v) == leading_of(q, k, v)
    else:
        with pytest.raises(ValueError, match=f"q holds {n} tokens and k {m}"):
            _check_lengths(q, k, v)
    with pytest.raises(ValueError, match=r"q \(.*\), k \(.*\), v \(.*\)"):
        _check_lengths(q, k, torch.ones(m + 1, 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, v: pooled_attention(x, x, v, (2, 3), 1),
        lambda x, v: linformer_attention(x, x, v, torch.ones(2, 6), torch.ones(2, 6)),
        lambda x, v: linear_attention(x, x, v),
    ],
)
def test_values_for_other_keys(call):
    with pytest.raises(ValueError, match=r"q \(6, 4\), k \(6, 4\), v \(5, 4\)"):
        call(torch.ones(6, 4), torch.ones(5, 4))
    with pytest.raises(ValueError, match=r"e of shape \(6,\)"):
        linformer_attention(*[torch.ones(6, 4)] * 3, torch.ones(6), torch.ones(6))


# --- mixtures and landmarks -------------------------------------------------------------------


@drawn(lengths, st.integers(1, 4), dtypes(), seeds, st.data())
def test_linformer_attention(n, m, dtype, seed, data):
    inputs = data.draw(tensors(n, dtype=dtype))
    inputs += [normal((m, n), dtype, seed + i) / max(n, 1) ** 0.5 for i in range(2)]

    def oracle(q, k, v, e, f):
        mixed = [torch.einsum("mn,...nd->...md", a, x) for a, x in ((e, k), (f, v))]
        return dense(q, *mixed)

    compare(linformer_attention, oracle, inputs, dtype, steps=64)


def means_by_loops(x, count, mask):
    """Means of the runs of tokens in float64, and which of them there are."""
    n = x.shape[-2]
    kept = torch.ones(1, n) if mask is None else torch.atleast_2d(mask)
    kept = kept.double().transpose(-1, -2)  # (..., N, 1)
    kept = kept.expand(*kept.shape[:-2], n, 1)
    means, there = [], []
    for r in range(count):
        own = [i for i in range(n) if r * n <= i * count < (r + 1) * n]
        number = kept[..., own, :].sum(-2)
        means.append((kept * x)[..., own, :].sum(-2) / number.clamp(min=1))
        there.append(number > 0)
    return torch.stack(means, dim=-2), torch.cat(there, dim=-1)


@drawn(lengths, st.integers(1, 9), st.data())
def test_segment_means(n, count, data):
    x, _, _ = data.draw(tensors(n))
    mask = data.draw(token_masks(x.shape[:-2], n))
    wanted, there = means_by_loops(x.double(), count, mask)
    assert torch.equal(_segment_means(x, count, mask)[1], there)
    ours = lambda x: _segment_means(x, count, mask)[0]  # noqa: E731
    compare(ours, lambda x: means_by_loops(x, count, mask)[0], [x], x.dtype, steps=4)


def test_means_of_long_runs_in_half_precision():
    x = torch.full((2000, 1), 100, dtype=torch.float16)  # the sum is beyond its largest number
    assert _segment_means(x, 1)[0].item() == 100


def inverse_by_steps(a, steps):
    """The iteration as the paper writes it, for one matrix after the other."""
    one, inverses = torch.eye(a.shape[-1]).double(), []
    for matrix in a.flatten(0, -3):
        norms = matrix.abs().sum(0).max() * matrix.abs().sum(1).max()
        z = matrix.T / (norms if norms > 0 else 1)
        for _ in range(steps):
            y = matrix @ z
            z = 0.25 * z @ (13 * one - y @ (15 * one - y @ (7 * one - y)))
        inverses.append(z)
    return torch.stack(inverses).reshape(a.shape) if inverses else a


@drawn(batches, counts, st.integers(0, 8), dtypes(), seeds)
def test_iterated_inverse(batch, m, steps, dtype, seed):
    logits = 2 * normal((batch, 2, m, m), seed=seed)
    a = logits.softmax(-1).to(dtype)
    found, wanted = _iterated_inverse(a, steps), inverse_by_steps(a.double(), steps)
    assert found.dtype == dtype
    largest = wanted.abs().max().item() if wanted.numel() else 1
    noise = 64 * m * largest * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    agree(found, wanted, dtype, steps=2 + 2 * noise / torch.finfo(dtype).eps)
    if dtype == torch.float64 and m < 3 and batch > 0:
        well = torch.eye(m, dtype=dtype) + 0.1 * a  # soon exact where all values are near
        well = well / well.sum(-1, keepdim=True)
        agree(_iterated_inverse(well, 12), torch.linalg.inv(well), dtype, steps=256)


@drawn(counts, st.integers(1, 6), st.sampled_from((None, 6)), st.data())
def test_nystrom_attention(n, landmarks, iterations, data):
    q, k, v = data.draw(tensors(n))
    mask = data.draw(token_masks(leading_of(q, k, v), n))
    if landmarks > n:
        with pytest.raises(ValueError, match=rf"landmarks \({landmarks}\)"):
            nystrom_attention(q, k, v, landmarks)
        return
    few_q, there = means_by_loops(q.double(), landmarks, mask)
    few_k, _ = means_by_loops(k.double(), landmarks, mask)
    a = dense_weights(few_q, few_k, there[..., None, :]) * there[..., None]
    values, noise = np.linalg.svd(a.numpy(), compute_uv=False), 1.0
    if iterations is None:
        inverse = torch.from_numpy(np.linalg.pinv(a.numpy(), rcond=1e-3))
        large = values[values > 1e-3 * values.max(-1, keepdims=True, initial=0)]
        noise = (1 / large.min(initial=1)) ** 2  # of a pseudo-inverse, for each unit of a
    else:
        inverse = inverse_by_steps(a, iterations)
        noise = max(1.0, inverse.abs().max().item() if inverse.numel() else 1) ** 2
    wanted = dense_weights(q, few_k, there[..., None, :]) @ (inverse @ dense(few_q, k, v, mask))
    found = nystrom_attention(q, k, v, landmarks, mask=mask, iterations=iterations)
    assert found.dtype == v.dtype
    inner = torch.finfo(torch.promote_types(v.dtype, torch.float32)).eps
    agree(found, wanted, v.dtype, steps=2 + 64 * noise * inner / torch.finfo(v.dtype).eps)


@pytest.mark.parametrize("iterations", [None, 6])
def test_nystrom_gradients(iterations):
    inputs = [normal((2, 1, 7, 4), seed=seed).requires_grad_() for seed in range(3)]
    mask = torch.tensor([False, True, True, True, True, False, True])

    def ours(q, k, v):
        return nystrom_attention(q, k, v, 3, mask=mask, iterations=iterations)

    assert torch.autograd.gradcheck(ours, inputs)


# --- features, states and buckets -------------------------------------------------------------


@drawn(counts, counts, st.booleans(), seeds)
def test_random_features(m, d, orthogonal, seed):
    found = random_features(
        m, d, orthogonal=orthogonal, generator=torch.Generator().manual_seed(seed)
    )
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(-(-m // d), d, d, generator=generator)
    if orthogonal:
        lengths = torch.randn(blocks.shape, generator=generator).double().norm(dim=-1)
        rows = []
        for block, own in zip(blocks.double().numpy(), lengths.numpy(), strict=True):
            basis, r = np.linalg.qr(block)
            basis = basis * np.sign(np.diag(r))  # the one with a positive diagonal in r
            rows.append(torch.from_numpy(basis.T * own[:, None]))
        blocks = torch.stack(rows)
    agree(found, blocks.flatten(0, 1)[:m].double(), torch.float32, steps=1024)


@drawn(batches, lengths, dtypes(), seeds, layouts)
def test_features_and_wider_numbers(batch, n, dtype, seed, layout):
    x = normal((batch, n, 3), dtype, seed, layout)
    compare(elu_features, lambda x: torch.where(x > 0, x + 1, x.exp()), [x], dtype, steps=4)
    (y,) = at_least_float32(x)
    assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(y.double(), x.double())


def by_matrix(q, k, v, causal, mask, state=None):
    """Values averaged with the products of features, and with what a state holds."""
    n = q.shape[-2]
    weights = torch.einsum("...nm,...jm->...nj", q, k)
    if mask is not None:
        weights = weights * torch.atleast_2d(mask)
    if causal:
        weights = weights * (torch.arange(n) <= torch.arange(n)[:, None])
    sums = torch.einsum("...nj,...jd->...nd", weights, v)
    total = weights.sum(-1, keepdim=True)
    if state is not None:
        sums, total = sums + q @ state[..., :-1], total + q @ state[..., -1:]
    return sums / torch.where(total > 0, total, 1)


@drawn(lengths, chunks, st.booleans(), st.data())
def test_linear_attention(n, chunk, causal, data):
    q, k, v = data.draw(tensors(n))
    leading = leading_of(q, k, v)
    mask = data.draw(token_masks(leading, n))
    state = None
    if data.draw(st.booleans()):  # of earlier tokens: sums of features, and of their products
        state = normal((*leading, 4, 4), seed=5).abs().to(at_least_float32(v)[0].dtype)

    def oracle(q, k, v):
        q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
        return by_matrix(q, k, v, causal, mask, None if state is None else state.double())

    options = dict(causal=causal, mask=mask, state=state, chunk=chunk)
    ours = lambda q, k, v: linear_attention(q, k, v, **options)[0]  # noqa: E731
    compare(ours, oracle, [q, k, v], v.dtype, steps=64)
    features = elu_features(k.double())
    if mask is not None:
        features = features * torch.atleast_2d(mask).transpose(-1, -2)
    last = torch.einsum("...nm,...nd->...md", features, F.pad(v.double(), (0, 1), value=1.0))
    last = last if state is None else last + state.double()
    found = linear_attention(q, k, v, **options)[1]
    assert found.dtype == at_least_float32(v)[0].dtype
    agree(found.expand(last.shape), last, found.dtype)


@pytest.mark.parametrize("shape", [(6, 6), (3, 6), (7, 1, 1, 1, 6), (5,)])
def test_masks_that_do_not_fit(shape):
    """A mask hides tokens; one for each pair of tokens is another thing."""
    q, k, v = (normal((2, 3, 6, 3), seed=seed) for seed in range(3))
    calls = (
        lambda mask: linear_attention(q, k, v, mask=mask),
        lambda mask: performer_attention(q, k, v, torch.ones(2, 3), mask=mask),
        lambda mask: nystrom_attention(q, k, v, 3, mask=mask),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"mask of shape"):
            call(torch.ones(shape, dtype=torch.bool))
        with pytest.raises(TypeError, match="mask of dtype torch.float32"):
            call(torch.ones(6))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seen", [(False, False, True, True, False), (False,) * 5])
def test_no_gradient_where_nothing_is_seen(causal, seen):
    mask = torch.tensor(seen)
    inputs = [normal((2, 5, 4), torch.float32, seed).requires_grad_() for seed in range(3)]
    w = random_features(6, 4, generator=torch.Generator().manual_seed(0))
    for function in (
        lambda q, k, v: linear_attention(q, k, v, causal=causal, mask=mask)[0],
        lambda q, k, v: performer_attention(q, k, v, w, causal=causal, mask=mask),
    ):
        out = function(*inputs)
        gradients = torch.autograd.grad(out.square().sum() + out.sum(), inputs)
        assert all(g.isfinite().all() for g in gradients)
        assert not gradients[1][:, ~mask].any() and not gradients[2][:, ~mask].any()
        blind = ~mask.cummax(0).values if causal else ~mask.any().expand(5)
        assert not out[:, blind].any() and not gradients[0][:, blind].any()


@drawn(lengths, counts, st.booleans(), seeds, st.data())
def test_performer_attention(n, m, causal, seed, data):
    q, k, v = data.draw(tensors(n))
    mask = data.draw(token_masks(leading_of(q, k, v), n))
    w = normal((m, 4), torch.float32, seed)

    def oracle(q, k, v):
        q, k = (x / 4**0.25 for x in (q, k))
        q, k = ((x @ w.double().T - (x * x).sum(-1, keepdim=True) / 2).exp() for x in (q, k))
        return by_matrix(q, k, v, causal, mask)

    ours = lambda q, k, v: performer_attention(q, k, v, w, causal=causal, mask=mask)  # noqa: E731
    compare(ours, oracle, [q, k, v], v.dtype, steps=256 if v.dtype.itemsize > 2 else 16)


@drawn(lengths, chunks, st.data())
def test_delta_attention(n, chunk, data):
    q, k, v = data.draw(tensors(n))
    k = F.normalize(k.double(), dim=-1).to(k.dtype)
    leading = leading_of(q, k, v)
    beta = normal(k.shape[:-1], seed=7).sigmoid().to(k.dtype)
    state = None
    if data.draw(st.booleans()):
        state = normal((*leading, 4, 3), at_least_float32(v)[0].dtype, 8)
    options = dict(state=state, chunk=chunk)

    def recurrence(q, k, v, beta):
        s = torch.zeros(*leading, 4, 3).double() if state is None else state.double()
        outs = [v.new_zeros(*leading, 3) + 0 * v.sum()]  # for no tokens, too
        for t in range(n):
            wrong = v[..., t, :] - torch.einsum("...d,...de->...e", k[..., t, :], s)
            s = s + torch.einsum("...d,...e->...de", beta[..., t, None] * k[..., t, :], wrong)
            outs.append(torch.einsum("...d,...de->...e", q[..., t, :], s))
        return torch.stack(outs, dim=-2)[..., 1:, :], s

    inputs = [q, k, v, beta]
    ours = lambda *x: delta_attention(*x, **options)[0]  # noqa: E731
    compare(ours, lambda *x: recurrence(*x)[0], inputs, v.dtype, steps=64)
    last, wanted = (
        delta_attention(*inputs, **options)[1],
        recurrence(*(x.double() for x in inputs))[1],
    )
    agree(last.expand(wanted.shape), wanted, last.dtype)


@drawn(lengths, st.sampled_from((2, 4, 6)), st.integers(1, 3), st.booleans(), seeds, st.data())
def test_lsh_attention(n, buckets, rounds, causal, seed, data):
    q, k, v = data.draw(tensors(n))
    mask = data.draw(st.none() | masks((*leading_of(q, k, v), n, n)))
    turns = torch.randn(
        rounds, 4, buckets // 2, generator=torch.Generator().manual_seed(seed)
    ).to(q)
    near = torch.eye(n, dtype=torch.bool)
    for turn in turns:
        places = []
        for x in (q, k):
            x = torch.cat([x @ turn, -(x @ turn)], dim=-1).float()
            places.append(torch.from_numpy(x.numpy().argmax(-1)))
        near = near | (places[0][..., :, None] == places[1][..., None, :])
    near = near if mask is None else near & mask
    near = near & (torch.arange(n) <= torch.arange(n)[:, None]) if causal else near

    def ours(q, k, v):
        generator = torch.Generator().manual_seed(seed)
        options = dict(causal=causal, mask=mask, generator=generator)
        return lsh_attention(q, k, v, buckets, rounds, **options)

    compare(ours, partial(dense, mask=near), [q, k, v], q.dtype, steps=32)


CAST = {
    "local": partial(local_attention, window=3),
    "axial": partial(axial_attention, grid=(2, 3), axis=1),
    "pooled": partial(pooled_attention, grid=(2, 3), ratio=1),
    "linear": lambda q, k, v: linear_attention(q, k, v, causal=True, chunk=2)[0],
    "performer": lambda q, k, v: performer_attention(q, k, v, torch.eye(4) + 1),
    "delta": lambda q, k, v: delta_attention(q, k, v, torch.full((2, 6), 0.5), chunk=2)[0],
    "nystrom": partial(nystrom_attention, landmarks=3),
    "iterated": partial(nystrom_attention, landmarks=3, iterations=6),
}


@pytest.mark.parametrize("name", CAST)
@drawn(seeds, dtypes(torch.bfloat16, torch.float16))
def test_autocast(name, seed, cast):
    q, k, v = (normal((2, 6, 4), torch.float32, seed + i) for i in range(3))
    k = F.normalize(k, dim=-1)
    wanted = CAST[name](q, k, v)
    with torch.autocast("cpu", cast):
        out = CAST[name](q, k, v)
    agree(out, wanted, cast)


ORACLES = {
    "sparse_mask": test_sparse_mask,
    "_check_lengths": test_lengths_that_fit,
    "local_attention": test_local_attention,
    "_check_grid": test_what_is_no_grid,
    "axial_attention": test_axial_attention,
    "pooled_attention": test_pooled_attention,
    "linformer_attention": test_linformer_attention,
    "_segment_means": test_segment_means,
    "_iterated_inverse": test_iterated_inverse,
    "nystrom_attention": test_nystrom_attention,
    "random_features": test_random_features,
    "at_least_float32": test_features_and_wider_numbers,
    "elu_features": test_features_and_wider_numbers,
    "linear_attention": test_linear_attention,
    "performer_attention": test_performer_attention,
    "delta_attention": test_delta_attention,
    "lsh_attention": test_lsh_attention,
}


def test_nothing_is_left_out():
    assert set(library.__all__) == {name for name in ORACLES if name[0] != "_"}
