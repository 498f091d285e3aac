"""attnlib.attention by its definition in float64, in calls that are legitimate and unusual."""

from contextlib import ExitStack
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense import agree, compare, dense, dense_weights, with_gradients
from draws import (
    batches,
    broadcasting,
    counts,
    drawn,
    dtypes,
    layouts,
    masks,
    normal,
    paddings,
    seeds,
)
from hypothesis import example
from hypothesis import strategies as st

from attnlib.attention import (
    BACKENDS,
    AdditiveAttention,
    _MapRecorder,
    _narrow_bias,
    attention,
    attention_backend,
    attention_weights,
    broadcasts,
    causal_mask,
    check_attention,
    check_fits,
    checkpoint_block,
    combined_bias,
    current_backend,
    masked_softmax,
    padding_mask,
    record_attention,
    reference,
    register_backend,
    sdpa,
)

library = import_module("attnlib.attention")  # `attnlib.attention` is the function
names = st.sampled_from(("auto", "reference", "sdpa"))
lengths = st.integers(min_value=0, max_value=6)


def call(batch, heads, n, m, dtype, seed, layout, share=1):
    """Queries (B, h, share, N, 4); `share` of their heads have keys and values together."""
    q = normal((batch, heads, share, n, 4), dtype, seed, layout)
    k = normal((batch, heads, 1, m, 4), dtype, seed + 1, layout)
    v = normal((batch, heads, 1, m, 3), dtype, seed + 2, layout)
    return q, k, v


@st.composite
def restrictions(draw, shape, dtype):
    """A mask, a bias, both or neither, for logits of a shape."""
    mask, bias = draw(st.none() | masks(shape)), None
    if draw(st.booleans()):
        own = draw(dtypes(torch.float32, torch.float64, torch.bfloat16))
        bias = normal(draw(broadcasting(shape)), own, draw(seeds), draw(layouts))
        if draw(st.booleans()):
            bias = torch.where(bias < -1, -torch.inf, bias)
    if mask is None and shape[-2] <= shape[-1] and draw(st.booleans()):
        mask = "causal"
    return mask, bias


def as_tensor(mask, n, m):
    """The mask that the word "causal" stands for: key j is at most at query i's position."""
    if isinstance(mask, str):
        return torch.arange(m) <= torch.arange(m - n, m)[:, None]
    return mask


@drawn(batches, counts, counts, lengths, lengths, dtypes(), seeds, layouts, names, st.data())
def test_attention(batch, heads, share, n, m, dtype, seed, layout, name, data):
    inputs = list(call(batch, heads, n, m, dtype, seed, layout, share))
    mask, bias = data.draw(restrictions((batch, heads, share, n, m), dtype))
    scale = data.draw(st.sampled_from((None, 0.3, 0.0, -0.5)))
    inputs += [] if bias is None else [bias]
    full = as_tensor(mask, n, m)

    def ours(q, k, v, bias=None):
        with attention_backend(name):
            return attention(q, k, v, mask=mask, bias=bias, scale=scale)

    def oracle(q, k, v, bias=None):
        return dense(q, k, v, full, bias, scale)

    state = torch.get_rng_state()
    compare(ours, oracle, inputs, dtype, steps=32)
    assert ours(*inputs).dtype == dtype
    assert torch.equal(torch.get_rng_state(), state) and current_backend() == "auto"


@drawn(batches, lengths, lengths, seeds, names, st.data())
@example(2, 0, 5, 0, "sdpa", None)
@example(2, 3, 0, 0, "sdpa", None)
@example(0, 3, 5, 0, "sdpa", None)  # learned queries, and a batch without images
@example(2, 3, 5, 0, "reference", None)
def test_leading_axes(batch, n, m, seed, name, data):
    """Any of q, k and v may lack leading axes, and mask and bias may have them all."""
    leading = batch, 3
    shapes, mask = [(), leading, leading[1:]], torch.rand(*leading, n, m) < 0.7
    if data is not None:
        shapes = [data.draw(broadcasting((*leading, 1)))[:-1] for _ in range(3)]
        leading = torch.broadcast_shapes(*shapes)
        mask = data.draw(masks((*leading, n, m)))
    sizes = (n, 4), (m, 4), (m, 2)
    inputs = [normal((*a, *b), seed=seed + i) for i, (a, b) in enumerate(zip(shapes, sizes))]
    inputs.append(normal((*leading, n, m), seed=seed + 3))

    def ours(q, k, v, bias):
        with attention_backend(name):
            return attention(q, k, v, mask=mask, bias=bias)

    def oracle(q, k, v, bias):
        return dense(q, k, v, mask, bias)

    compare(ours, oracle, inputs, torch.float64)
    with record_attention() as maps:
        attention(*inputs[:3], mask=mask, bias=inputs[3])
    agree(maps[0], dense_weights(*inputs[:2], mask, inputs[3]), torch.float64)


@drawn(counts, counts, dtypes(torch.bfloat16, torch.float16), seeds, names, st.data())
def test_attention_in_autocast(n, m, cast, seed, name, data):
    q, k, v = call(2, 3, n, m, torch.float32, seed, "contiguous")
    mask, bias = data.draw(restrictions((2, 3, 1, n, m), torch.float32))
    with torch.autocast("cpu", cast), attention_backend(name):
        out = attention(q, k, v, mask=mask, bias=bias)
        weights = attention_weights(q, k, mask=mask, bias=bias)
    agree(out, dense(q, k, v, as_tensor(mask, n, m), bias), cast)
    agree(weights, dense_weights(q, k, as_tensor(mask, n, m), bias), cast)


@drawn(batches, counts, lengths, lengths, dtypes(), seeds, layouts, st.data())
def test_weights_and_their_record(batch, heads, n, m, dtype, seed, layout, data):
    q, k, v = call(batch, heads, n, m, dtype, seed, layout)
    mask, bias = data.draw(restrictions((batch, heads, 1, n, m), dtype))
    full = as_tensor(mask, n, m)
    compare(
        lambda q, k: attention_weights(q, k, mask=mask, bias=bias),
        lambda q, k: dense_weights(q, k, full, bias),
        [q, k],
        dtype,
        steps=32,
    )
    with record_attention() as maps:
        out = attention(q, k, v, mask=mask, bias=bias)
    assert len(maps) == 1
    agree(maps[0], dense_weights(q, k, full, bias), dtype)
    agree(out, dense(q, k, v, full, bias), dtype)


@drawn(counts, counts, seeds, st.sampled_from((0.1, 0.7)), st.data())
def test_dropped_weights(n, m, seed, p, data):
    q, k, v = call(2, 2, n, m, torch.float64, seed, "contiguous")
    mask, bias = data.draw(restrictions((2, 2, 1, n, m), torch.float64))
    weights = dense_weights(q, k, as_tensor(mask, n, m), bias)
    torch.manual_seed(seed)
    factor = F.dropout(torch.ones_like(weights), p)  # 0 or 1 / (1 - p)
    for function in (reference, _MapRecorder()):
        torch.manual_seed(seed)
        out = function(q, k, v, mask, bias, None, p)
        agree(out, (weights * factor) @ v, torch.float64)
    out = sdpa(q, k, v, mask, bias, None, p)  # draws others
    empty = ~(weights > 0).any(-1)
    assert (out[empty] == 0).all() and out.isfinite().all()


# --- masks and their parts --------------------------------------------------------------------


@drawn(batches, counts, lengths, lengths, dtypes(), seeds, st.data())
def test_masked_softmax(batch, heads, n, m, dtype, seed, data):
    logits = normal((batch, heads, n, m), dtype, seed)
    logits = torch.where(logits < -1, -torch.inf, logits)
    mask = data.draw(st.none() | masks(logits.shape))
    one = torch.ones(1, dtype=torch.float64)

    def oracle(x):
        return dense_weights(one.new_zeros(n, 1), one.new_zeros(m, 1), mask, x)

    compare(lambda x: masked_softmax(x, mask), oracle, [logits], dtype)


@drawn(lengths, lengths)
def test_causal_mask(n, more):
    m = n + more
    wanted = [[j <= i + more for j in range(m)] for i in range(n)]
    assert torch.equal(causal_mask(n, m), torch.tensor(wanted, dtype=torch.bool).view(n, m))
    assert torch.equal(causal_mask(n), causal_mask(n, n))


@drawn(st.lists(lengths, min_size=1, max_size=4), lengths)
def test_padding_mask(sizes, more):
    m = max(sizes) + more
    wanted = torch.tensor([[[[j < size for j in range(m)]]] for size in sizes])
    found = padding_mask(torch.tensor(sizes), m)
    assert torch.equal(found, wanted.bool().view(len(sizes), 1, 1, m))
    assert padding_mask(torch.tensor(sizes)).shape[-1] == max(sizes)


shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@drawn(shapes, shapes, st.sampled_from((torch.bool, torch.float16, torch.int64)))
def test_what_broadcasts_and_fits(shape, to, dtype):
    try:
        fits = np.broadcast_shapes(shape, to) == to
    except ValueError:
        fits = False
    assert broadcasts(shape, to) == fits
    x = torch.zeros(shape, dtype=dtype)
    for name, own in (("mask", torch.bool), ("bias", torch.float16)):
        if dtype != own:
            with pytest.raises(TypeError, match=f"{name} of dtype {dtype}"):
                check_fits(name, x, to)
        elif not fits:
            with pytest.raises(ValueError, match=f"{name} of shape"):
                check_fits(name, x, to)
        else:
            check_fits(name, x, to)


@drawn(shapes, shapes, shapes, st.booleans())
@example((2, 1, 3, 4), (5, 6, 4), (1, 1, 6, 2), False)
@example((3, 4), (0, 5, 4), (0, 5, 2), False)  # learned queries, and a batch without images
@example((0, 4), (2, 5, 4), (5, 2), False)
@example((3, 4), (2, 0, 4), (0, 2), False)
def test_shapes_that_fit_together(q, k, v, alike):
    if alike:  # shapes drawn alone would hardly ever fit
        q, k, v = (*q[:2], 3, 4), (*q[1:2], 5, 4), (*q[:2], 5, 1)
    fits = len(q) > 1 and len(k) > 1 and len(v) > 1
    fits = fits and q[-1] == k[-1] > 0 and k[-2] == v[-2]
    if fits:
        try:
            leading = np.broadcast_shapes(q[:-2], k[:-2], v[:-2])
        except ValueError:
            fits = False
    tensors = [torch.zeros(shape) for shape in (q, k, v)]
    if fits:
        assert check_attention(*tensors) == leading
        assert attention(*tensors).shape == (*leading, q[-2], v[-1])
    else:
        with pytest.raises(ValueError, match=r"must be \(\.\.\., N, d\)"):
            check_attention(*tensors)


@drawn(batches, counts, counts, lengths, dtypes(), seeds, st.data())
def test_a_combined_bias(batch, heads, n, m, dtype, seed, data):
    q, k, _ = call(batch, heads, n, m, dtype, seed, "contiguous")
    shape = (batch, heads, 1, n, m)
    mask, bias = data.draw(restrictions(shape, dtype))
    wanted = torch.zeros(shape, dtype=torch.float64) if bias is None else bias.double()
    full = as_tensor(mask, n, m)
    wanted = wanted if full is None else wanted.masked_fill(~full, -torch.inf)
    wanted = wanted.expand(shape)
    empty = (wanted == -torch.inf).all(-1, keepdim=True)
    combined, found = combined_bias(mask, bias, q, k)
    assert torch.equal(found.expand(empty.shape), empty)
    assert torch.equal(combined.double().expand(shape), wanted.masked_fill(empty, 0))
    narrow = _narrow_bias(combined, q)
    assert narrow.dtype == dtype
    if m > 0:  # a row's differences are as exact as the dtype allows
        exact = wanted.masked_fill(empty, 0)
        exact = exact - exact.amax(-1, keepdim=True)
        found = narrow.double().expand(shape)
        found = found - found.amax(-1, keepdim=True)
        same = torch.finfo(dtype).eps if combined.dtype != dtype else 1e-15
        torch.testing.assert_close(found, exact, rtol=same, atol=1e-6 if same > 1e-6 else 1e-14)


@drawn(batches, counts, lengths, dtypes(), seeds, layouts, st.data())
def test_additive_attention(batch, n, m, dtype, seed, layout, data):
    torch.manual_seed(seed)
    layer = AdditiveAttention(3, 5, 4).to(dtype)
    weights = [layer.query_proj.weight, layer.key_proj.weight, layer.score.weight]
    wq, wk, w = (x.detach().double() for x in weights)
    q = normal((batch, 2, n, 3), dtype, seed, layout)
    k = normal((batch, 1, m, 5), dtype, seed + 1, layout)
    v = normal((1, 2, m, 2), dtype, seed + 2, layout)
    mask = data.draw(st.none() | masks((batch, 2, n, m)))
    zeros = torch.zeros(n, 1).double(), torch.zeros(m, 1).double()

    def oracle(q, k, v):
        q, k = torch.einsum("...ni,hi->...nh", q, wq), torch.einsum("...mi,hi->...mh", k, wk)
        hidden = torch.tanh(q[..., :, None, :] + k[..., None, :, :])
        logits = torch.einsum("...h,h->...", hidden, w[0])
        return torch.einsum("...nm,...md->...nd", dense_weights(*zeros, mask, logits), v)

    compare(lambda q, k, v: layer(q, k, v, mask), oracle, [q, k, v], dtype, steps=32)
    one = torch.eye(m, dtype=torch.float64)
    agree(layer.attention_weights(q, k, mask), oracle(q.double(), k.double(), one), dtype)


# --- backends and the second computation ------------------------------------------------------


@drawn(st.lists(st.sampled_from(("auto", "reference", "sdpa", "own", sdpa)), max_size=4))
def test_backends_are_a_stack(stack):
    register_backend("own", reference)
    outer, before = [], current_backend()
    try:
        with ExitStack() as blocks:
            for name in stack:
                outer.append(current_backend())
                blocks.enter_context(attention_backend(name))
                assert current_backend() == name
            assert current_backend() == (stack[-1] if stack else before)
            q, k, v = call(1, 2, 3, 4, torch.float64, 0, "contiguous")
            close = dict(rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(attention(q, k, v), dense(q, k, v), **close)
    finally:
        del BACKENDS["own"]
    assert outer == [before, *stack[:-1]][: len(stack)] and current_backend() == before


@drawn(counts, seeds, names, st.sampled_from((0.0, 0.5)), dtypes(torch.float64, torch.float32))
def test_a_checkpointed_block(n, seed, name, p, dtype):
    q, k, v = call(2, 2, n, n, dtype, seed, "contiguous")
    runs, seen = [], []

    def block(q, k, v):
        seen.append(current_backend())
        return attention(q, k, v, mask="causal", dropout_p=p)

    for function in (block, partial(checkpoint_block, block)):
        torch.manual_seed(seed)
        with attention_backend(name):
            runs.append(with_gradients(function, [q, k, v]))
    for plain, again in zip(*runs, strict=True):
        assert torch.equal(plain, again)
    assert seen == 3 * [name]  # plainly, and twice


@drawn(names, st.booleans())
def test_the_second_computation_has_the_first_one_s_backend(name, recorded):
    outer = record_attention() if recorded else attention_backend(name)
    with outer:
        first, second = library._checkpoint_contexts()
    with attention_backend("sdpa"):
        with first:
            assert current_backend() == "sdpa"
        for _ in range(2):
            with second:
                again = current_backend()
                assert again.lists == () if recorded else again == name
        assert current_backend() == "sdpa"


@drawn(batches, counts, st.data())
def test_padding_of_every_kind(batch, n, data):
    kept = data.draw(paddings(batch, n))
    q, k, v = call(batch, 2, n, n, torch.float64, 0, "contiguous")
    mask = kept[:, None, None, None, :]
    compare(
        partial(attention, mask=mask),
        partial(dense, mask=mask),
        [q, k, v],
        torch.float64,
    )


ORACLES = {
    "BACKENDS": test_backends_are_a_stack,
    "masked_softmax": test_masked_softmax,
    "causal_mask": test_causal_mask,
    "padding_mask": test_padding_mask,
    "broadcasts": test_what_broadcasts_and_fits,
    "check_fits": test_what_broadcasts_and_fits,
    "AdditiveAttention": test_additive_attention,
    "check_attention": test_shapes_that_fit_together,
    "combined_bias": test_a_combined_bias,
    "attention_weights": test_weights_and_their_record,
    "reference": test_attention,
    "_narrow_bias": test_a_combined_bias,
    "sdpa": test_attention,
    "fastest_backend": test_attention,  # each of its answers gives the same numbers
    "current_backend": test_backends_are_a_stack,
    "register_backend": test_backends_are_a_stack,
    "attention_backend": test_backends_are_a_stack,
    "attention": test_attention,
    "_MapRecorder": test_dropped_weights,
    "record_attention": test_weights_and_their_record,
    "_SameBackend": test_the_second_computation_has_the_first_one_s_backend,
    "_checkpoint_contexts": test_the_second_computation_has_the_first_one_s_backend,
    "checkpoint_block": test_a_checkpointed_block,
}
NOT_HERE = {
    "float32_products": "reads a setting of PyTorch; tests/test_attention.py sets each",
    "_cpu_flags": "reads a file of Linux; tests/test_attention.py",
    "_has_amx": "looks a name up in cpu_flags",
    "_SameTensors": "part of checkpoint_block; tests/test_backbones.py",
}


def test_nothing_is_left_out():
    assert set(library.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
