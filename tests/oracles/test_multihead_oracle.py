"""attnlib.multihead by its definition in float64, head by head, in unusual calls."""

from functools import partial

import pytest
import torch
from dense import agree, compare, dense, dense_weights
from draws import batches, counts, drawn, dtypes, layouts, masks, normal, paddings, seeds
from hypothesis import example
from hypothesis import strategies as st

import attnlib.multihead as library
from attnlib.attention import attention_backend
from attnlib.multihead import MultiHeadAttention, check_heads, merge_heads, split_heads

lengths = st.integers(min_value=0, max_value=6)
names = st.sampled_from(("auto", "reference", "sdpa"))


def layer_of(heads, width, kdim, vdim, bias, dtype, seed):
    """A layer whose every parameter is random."""
    layer = MultiHeadAttention(heads * width, heads, kdim=kdim, vdim=vdim, bias=bias)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(layer.named_parameters()):
            parameter.copy_(0.5 * normal(parameter.shape, seed=seed + number))
    return layer.to(dtype)


def weights_of(layer):
    """W^Q, W^K, W^V and their biases in float64, each of all heads; zeros for no biases."""
    if layer.fused:
        weights = layer.in_proj_weight.double().chunk(3)
    else:
        weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    biases = layer.in_proj_bias
    biases = torch.zeros(3 * layer.embed_dim) if biases is None else biases
    return [w.detach().double() for w in weights], biases.detach().double().chunk(3)


def by_heads(layer, query, key, value, mask, bias, maps=False):
    """The paper's formula for one head after the other; the maps, or the output."""
    weights, biases = weights_of(layer)
    inputs = query.double(), key.double(), value.double()
    q, k, v = (x @ w.T + b for x, w, b in zip(inputs, weights, biases))
    d = layer.embed_dim // layer.num_heads
    shape = len(key), layer.num_heads, query.shape[1], key.shape[1]
    found = []
    for h in range(layer.num_heads):
        part = slice(h * d, (h + 1) * d)
        own = [x if x is None else x.expand(shape)[:, h] for x in (mask, bias)]
        function = dense_weights if maps else partial(dense, v=v[..., part])
        found.append(function(q[..., part], k[..., part], mask=own[0], bias=own[1]))
    if maps:
        return torch.stack(found, dim=1)
    out = torch.cat(found, dim=-1) @ layer.out_proj.weight.detach().double().T
    return out if layer.out_proj.bias is None else out + layer.out_proj.bias.detach().double()


@st.composite
def layers(draw, dtype):
    """A layer with widths of its own, or with one, with biases or without."""
    heads, width = draw(st.sampled_from((1, 2, 3))), draw(st.integers(1, 4))
    kdim, vdim = draw(st.none() | counts), draw(st.none() | counts)
    return layer_of(heads, width, kdim, vdim, draw(st.booleans()), dtype, draw(seeds))


@drawn(batches, lengths, lengths, dtypes(), seeds, layouts, names, st.data())
def test_multi_head_attention(batch, n, m, dtype, seed, layout, name, data):
    layer = data.draw(layers(dtype))
    shared = data.draw(st.booleans())  # learned queries, the same for the batch
    query = normal((1 if shared else batch, n, layer.embed_dim), dtype, seed, layout)
    key = normal((batch, m, layer.kdim), dtype, seed + 1, layout)
    value = normal((batch, m, layer.vdim), dtype, seed + 2, layout)
    shape = (batch, layer.num_heads, n, m)
    mask = data.draw(st.none() | masks(shape))
    bias = normal(shape, dtype, seed + 3) if data.draw(st.booleans()) else None
    options = dict(mask=mask, bias=bias)

    def ours(query, key, value):
        with attention_backend(name):
            return layer(query, key, value, **options)

    oracle = partial(by_heads, layer, **options)
    compare(ours, oracle, [query, key, value], dtype, steps=64)
    found = layer.attention_maps(query, key, **options)
    agree(found, by_heads(layer, query, key, value, **options, maps=True), dtype, steps=32)


@drawn(batches, lengths, st.sampled_from((1, 2, 3)), dtypes(torch.bfloat16, torch.float16))
def test_multi_head_attention_in_autocast(batch, n, heads, cast):
    layer = layer_of(heads, 4, None, None, True, torch.float32, 0)
    x = normal((batch, n, 4 * heads), torch.float32)
    causal = torch.arange(n) <= torch.arange(n)[:, None]
    with torch.autocast("cpu", cast):
        out, maps = layer(x, mask="causal"), layer.attention_maps(x, mask="causal")
    agree(out, by_heads(layer, x, x, x, causal, None), cast, steps=32)
    agree(maps, by_heads(layer, x, x, x, causal, None, maps=True), cast)


@drawn(st.integers(1, 3), counts, st.booleans(), seeds, st.data())
def test_padding_is_that_of_pytorch(batch, n, bias, seed, data):
    """The module of PyTorch gives NaN where a query may attend to nothing; ours zero heads."""
    kept = data.draw(paddings(batch, n))
    layer = layer_of(2, 3, None, None, bias, torch.float64, seed)
    peer = torch.nn.MultiheadAttention(6, 2, bias=bias, batch_first=True).double()
    peer.load_state_dict(layer.state_dict())
    x = normal((batch, n, 6), seed=seed)
    out = layer(x, mask=kept[:, None, None])
    wanted = peer(x, x, x, key_padding_mask=~kept, need_weights=False)[0]
    some = kept.any(1)
    torch.testing.assert_close(out[some], wanted[some], rtol=0, atol=1e-12)
    for row in out[~some].flatten(0, 1):  # of nothing but the last bias
        last = layer.out_proj.bias if bias else torch.zeros(6, dtype=torch.float64)
        torch.testing.assert_close(row, last, rtol=0, atol=0)


@drawn(batches, lengths, counts, st.integers(1, 4), dtypes(), layouts)
@example(0, 3, 2, 4, torch.float32, "contiguous")
def test_heads_are_columns(batch, n, heads, width, dtype, layout):
    x = normal((batch, n, heads * width), dtype, layout=layout)
    parts = split_heads(x, heads)
    assert parts.shape == (batch, heads, n, width)
    for h in range(heads):
        assert torch.equal(parts[:, h], x[..., h * width : (h + 1) * width])
    assert torch.equal(merge_heads(parts), x)
    assert torch.equal(merge_heads(parts), torch.cat(parts.unbind(1), dim=-1))


sizes = st.one_of(st.integers(-2, 12), st.sampled_from((2.0, "4", None)))


@drawn(sizes, sizes, sizes)
@example(3, 12, 1)
def test_numbers_of_heads(num_heads, width, other):
    numbers = num_heads, width, other
    if not all(isinstance(x, int) and x >= 1 for x in numbers):
        wrong = next(x for x in numbers if not isinstance(x, int) or x < 1)
        with pytest.raises(ValueError, match=rf"\({wrong!r}\)"):
            check_heads(num_heads, width=width, other=other)
    elif width % num_heads:
        with pytest.raises(ValueError, match=rf"width \({width}\)"):
            check_heads(num_heads, width=width, other=other)
    else:
        check_heads(num_heads, width=width, other=other)
        layer = MultiHeadAttention(width, num_heads, kdim=other)
        assert layer.kdim == other


ORACLES = {
    "split_heads": test_heads_are_columns,
    "merge_heads": test_heads_are_columns,
    "check_heads": test_numbers_of_heads,
    "MultiHeadAttention": test_multi_head_attention,
}


def test_nothing_is_left_out():
    assert set(library.__all__) == ORACLES.keys()
