"""Multi-head attention: parity with torch.nn.MultiheadAttention, properties, bad input."""

import copy
import itertools

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.attention import attention_backend, causal_mask, padding_mask
from attnlib.multihead import MultiHeadAttention, check_heads, merge_heads, split_heads

EXACT = dict(rtol=0, atol=1e-12)  # float64 sums of some hundred numbers near 1


def twins(embed_dim=24, num_heads=4, dtype=torch.float64, **options):
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(
        embed_dim, num_heads, batch_first=True, dtype=dtype, **options
    )
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = MultiHeadAttention(embed_dim, num_heads, **options).to(dtype)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def tokens(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def masks(name, n, m, lengths, heads):
    """The same restriction in PyTorch's terms (True: may not) and in ours (True: may)."""
    if name == "none":
        return {}, {}
    if name == "padding":
        real = padding_mask(torch.tensor(lengths), m)
        return dict(key_padding_mask=~real[:, 0, 0]), dict(mask=real)
    if name == "causal":
        return dict(attn_mask=~causal_mask(n, m)), dict(mask=causal_mask(n, m))
    if name == "both":
        real, causal = padding_mask(torch.tensor(lengths), m), causal_mask(n, m)
        return (
            dict(attn_mask=~causal, key_padding_mask=~real[:, 0, 0]),
            dict(mask=causal & real),
        )
    bias = tokens(len(lengths), heads, n, m, seed=7)
    if name == "bias":
        return dict(attn_mask=bias.flatten(0, 1)), dict(bias=bias)
    mask = bias > -0.5  # "per head"; the first key stays open to all
    mask[..., 0] = True
    return dict(attn_mask=~mask.flatten(0, 1)), dict(mask=mask)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
@pytest.mark.parametrize("masking", ["none", "padding", "causal", "both", "bias", "per head"])
@pytest.mark.parametrize("kind", ["self", "cross", "widths", "no biases"])
def test_parity_of_outputs_maps_and_gradients(kind, masking, backend):
    options = dict(widths=dict(kdim=10, vdim=6), **{"no biases": dict(bias=False)}).get(
        kind, {}
    )
    theirs, ours = twins(**options)
    query = tokens(3, 5, 24)
    if kind == "self":
        inputs = [query] * 3
    else:
        key = tokens(3, 7, ours.kdim, seed=1)
        inputs = [query, key, tokens(3, 7, ours.vdim, seed=2) if kind == "widths" else key]
    m = inputs[1].shape[1]
    torch_masks, our_masks = masks(masking, 5, m, [m, 4, 1], 4)
    wrt = list(dict.fromkeys(x.requires_grad_() for x in inputs))

    output, maps = theirs(*inputs, **torch_masks, average_attn_weights=False)
    with attention_backend(backend):
        output_2, maps_2 = (
            ours(*inputs, **our_masks),
            ours.attention_maps(*inputs[:2], **our_masks),
        )
        torch.testing.assert_close(output_2, output, **EXACT)
        torch.testing.assert_close(maps_2, maps, **EXACT)
        gradients_2 = torch.autograd.grad(output_2.square().sum(), [*wrt, *ours.parameters()])
    gradients = torch.autograd.grad(output.square().sum(), [*wrt, *theirs.parameters()])
    for gradient_2, gradient in zip(gradients_2, gradients):
        torch.testing.assert_close(gradient_2, gradient, rtol=1e-11, atol=1e-11)


def test_parity_in_float32():
    theirs, ours = twins(512, 8, dtype=torch.float32)
    x = tokens(2, 30, 512, dtype=torch.float32)
    torch.testing.assert_close(
        ours(x), theirs(x, x, x, need_weights=False)[0], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "options",
    [{}, dict(bias=False), dict(kdim=9), dict(vdim=9), dict(kdim=9, vdim=5, bias=False)],
)
def test_same_start_and_same_state_dict(options):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(24, 4, **options)
    torch.manual_seed(3)
    ours = MultiHeadAttention(24, 4, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    theirs.load_state_dict(ours.state_dict(), strict=True)


def test_the_paper_s_configuration():
    mha = MultiHeadAttention(512, 8, bias=False)
    assert sum(p.numel() for p in mha.parameters()) == 4 * 512**2
    q, k, v = mha.project(*[torch.zeros(1, 3, 512)] * 3)
    assert q.shape == k.shape == v.shape == (1, 8, 3, 64)


@settings(max_examples=40, deadline=None)
@given(b=st.integers(0, 3), n=st.integers(0, 5), h=st.integers(1, 4), d=st.integers(1, 4))
def test_split_and_merge_are_inverse(b, n, h, d):
    x = torch.arange(b * n * h * d).view(b, n, h * d)
    heads = split_heads(x, h)
    assert heads.shape == (b, h, n, d)
    assert torch.equal(merge_heads(heads), x)
    for i in range(h):
        assert torch.equal(heads[:, i], x[..., i * d : (i + 1) * d])


@settings(max_examples=25, deadline=None)
@given(
    h=st.sampled_from([1, 2, 3, 4]),
    n=st.integers(1, 6),
    m=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_the_layer_is_the_paper_s_formula(h, n, m, seed):
    """Concat(head_1, ..., head_h) W^O, head by head, with matrices cut
    out of the parameters."""
    torch.manual_seed(seed)
    mha, x, y = (
        MultiHeadAttention(12, h).double(),
        tokens(n, 12, seed=seed),
        tokens(m, 12, seed=seed + 1),
    )
    nn.init.normal_(mha.in_proj_bias)
    nn.init.normal_(mha.out_proj.bias)
    w, b, d = mha.in_proj_weight, mha.in_proj_bias, 12 // h
    heads = []
    for i in range(h):
        rows = [slice(part * 12 + i * d, part * 12 + (i + 1) * d) for part in range(3)]
        q, k, v = (z @ w[row].T + b[row] for z, row in zip((x, y, y), rows))
        heads.append((q @ k.T / d**0.5).softmax(-1) @ v)
    expected = torch.cat(heads, -1) @ mha.out_proj.weight.T + mha.out_proj.bias
    torch.testing.assert_close(mha(x[None], y[None])[0], expected, **EXACT)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), h=st.sampled_from([1, 2, 4]), n=st.integers(1, 6))
def test_permuting_tokens_or_heads(data, h, n):
    torch.manual_seed(0)
    mha, x = MultiHeadAttention(8, h).double(), tokens(2, n, 8)
    order = torch.tensor(data.draw(st.permutations(range(n))))
    torch.testing.assert_close(mha(x[:, order]), mha(x)[:, order], **EXACT)
    heads, before = torch.tensor(data.draw(st.permutations(range(h)))), mha(x)
    with torch.no_grad():
        stacked = mha.in_proj_weight.view(3, h, 8 // h, 8)
        mha.in_proj_weight.copy_(stacked[:, heads].flatten(0, 2))
        mha.out_proj.weight.copy_(mha.out_proj.weight.view(8, h, 8 // h)[:, heads].flatten(1))
    torch.testing.assert_close(mha(x), before, **EXACT)


@pytest.mark.parametrize("bias", [True, False])
def test_the_fused_projection_is_the_separate_ones(bias):
    _, ours = twins(bias=bias)
    x = tokens(2, 5, 24)
    torch.testing.assert_close(ours(x), ours(x, x.clone(), x.clone()), **EXACT)
    torch.testing.assert_close(
        ours.attention_maps(x), ours.attention_maps(x, x.clone()), **EXACT
    )


def test_defaults_of_key_and_value():
    _, ours = twins()
    x, y, v = tokens(2, 5, 24), tokens(2, 7, 24, seed=1), tokens(2, 5, 24, seed=2)
    assert torch.equal(ours(x), ours(x, x, x))
    assert torch.equal(ours(x, y), ours(x, y, y))
    assert torch.equal(ours(x, value=v), ours(x, x, v))


def test_maps_sum_to_one_and_give_the_output():
    _, ours = twins()
    x, y = tokens(2, 5, 24), tokens(2, 7, 24, seed=1)
    maps = ours.attention_maps(x, y)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64), **EXACT)
    values = ours.project(x, y, y)[2]
    torch.testing.assert_close(ours.out_proj(merge_heads(maps @ values)), ours(x, y), **EXACT)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_query_that_may_attend_nowhere(backend):
    _, ours = twins()
    x, mask = tokens(2, 5, 24).requires_grad_(), torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    with attention_backend(backend):
        output = ours(x, mask=mask)
        assert torch.equal(output[:, 2], ours.out_proj.bias.expand(2, -1))
        (gradient,) = torch.autograd.grad(output[:, 2].sum(), x, retain_graph=True)
        assert torch.equal(gradient, torch.zeros_like(x))
        output.sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters())
    assert ours.attention_maps(x, mask=mask)[:, :, 2].eq(0).all()


def test_gradcheck():
    torch.manual_seed(0)
    mha, y = MultiHeadAttention(4, 2).double(), tokens(1, 2, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, y: mha(x, y), (tokens(1, 3, 4).requires_grad_(), y)
    )


def test_dropout_acts_in_training_only():
    _, dropping = twins(dropout=0.5)
    _, plain = twins()
    x = tokens(2, 5, 24)
    assert torch.equal(dropping.eval()(x), plain(x))
    torch.manual_seed(0)
    dropping.train()
    samples = torch.stack([dropping(x) for _ in range(4000)])
    assert not torch.equal(samples[0], samples[1])
    error = samples.std(0) / 4000**0.5  # of the mean
    # unbiased: kept weights are scaled by 1/(1 - p)
    assert ((samples.mean(0) - plain(x)).abs() < 6 * error).all()
    assert dropping.attention_maps(x).sum(-1).sub(1).abs().max() < 1e-12


def test_learned_queries_broadcast_over_the_batch():
    _, ours = twins()
    queries, memory = tokens(1, 3, 24), tokens(4, 6, 24, seed=1)
    torch.testing.assert_close(
        ours(queries, memory), ours(queries.expand(4, -1, -1), memory), **EXACT
    )


def test_half_precision_and_copies():
    mha, x = MultiHeadAttention(32, 4), tokens(2, 9, 32, dtype=torch.float32)
    half = copy.deepcopy(mha).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).float(), mha(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 3), r"embed_dim \(100\) must be divisible by num_heads \(3\)"),
        ((0, 1), r"embed_dim \(0\) must be an integer of at least 1"),
        ((8, 0), r"num_heads \(0\) must be an integer of at least 1"),
        ((8, -2), r"num_heads \(-2\) must be an integer of at least 1"),
        ((8, 2, dict(kdim=0)), r"kdim \(0\) must be an integer of at least 1"),
        ((8, 2, dict(vdim=-1)), r"vdim \(-1\) must be an integer of at least 1"),
        ((8, 2, dict(dropout=1.0)), r"dropout \(1.0\) must be in \[0, 1\)"),
        ((8, 2, dict(dropout=-0.1)), r"dropout \(-0.1\) must be in \[0, 1\)"),
    ],
)
def test_bad_sizes(arguments, message):
    *sizes, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(*sizes, **options)


def shapes(*sizes):
    return [torch.zeros(size) for size in sizes]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (shapes((2, 5, 9)), r"query of shape \(2, 5, 9\) must be \(B, tokens, 8\)"),
        (shapes((5, 8)), r"query of shape \(5, 8\) must be \(B, tokens, 8\)"),
        (shapes((2, 1, 5, 8)), r"query of shape \(2, 1, 5, 8\) must be \(B, tokens, 8\)"),
        (shapes((2, 5, 8), (2, 5, 8)), r"key of shape \(2, 5, 8\) must be \(B, tokens, 6\)"),
        (
            shapes((2, 5, 8), (2, 5, 6), (2, 5, 6)),
            r"value of shape \(2, 5, 6\) must be \(B, tokens, 4\)",
        ),
        (
            shapes((2, 5, 8), (2, 5, 6), (2, 3, 4)),
            r"k \(2, 2, 5, 4\), v \(2, 2, 3, 4\) must be",
        ),
        (shapes((2, 5, 8), (3, 5, 6), (3, 5, 4)), r"leading axes must agree"),
    ],
)
def test_bad_inputs(inputs, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(8, 2, kdim=6, vdim=4)(*inputs)


@pytest.mark.parametrize("method", ["forward", "attention_maps"])
def test_bad_masks(method):
    call = getattr(MultiHeadAttention(8, 2), method)
    x = torch.zeros(3, 5, 8)
    with pytest.raises(TypeError, match=r"mask of dtype torch.float32"):
        call(x, mask=torch.ones(5, 5))
    padding = torch.ones(3, 5, dtype=torch.bool)  # (B, M) without its axes
    with pytest.raises(
        ValueError,
        match=r"mask of shape \(3, 5\)",
    ):
        call(x, mask=padding)
    call(x, mask=padding[:, None, None])
    with pytest.raises(
        ValueError,
        match=r"bias of shape \(4, 4\)",
    ):
        call(x, bias=torch.zeros(4, 4))


def test_options_are_keywords():
    with pytest.raises(TypeError):
        # torch's third argument is dropout: not to be mistaken for kdim
        MultiHeadAttention(8, 2, 0.1)
    with pytest.raises(TypeError):
        MultiHeadAttention(8, 2)(
            *[torch.zeros(1, 3, 8)] * 3, torch.ones(3, 3, dtype=torch.bool)
        )


def test_two_masks_and_a_bias_together():
    _, ours = twins()
    x, bias = tokens(2, 5, 24), tokens(4, 5, 5, seed=3)
    real, causal = padding_mask(torch.tensor([5, 3])), causal_mask(5)
    together = ours.attention_maps(x, mask=real & causal, bias=bias)
    alone = ours.attention_maps(x, bias=bias).masked_fill(~(real & causal), 0)
    torch.testing.assert_close(together, alone / alone.sum(-1, keepdim=True), **EXACT)
    for i, j in itertools.product(range(5), range(5)):
        assert (together[0, :, i, j] > 0).all() == (j <= i)


# --- nothing special about its parts ----------------------------------------------------------


def test_hooks_and_replaced_parts_are_used():
    mha, x, seen = MultiHeadAttention(8, 2), torch.randn(2, 5, 8), []
    mha.out_proj.register_forward_hook(lambda layer, inputs, out: seen.append(out.shape))
    before = mha(x)
    assert seen == [(2, 5, 8)]
    mha.out_proj.forward = torch.zeros_like
    assert (mha(x) == 0).all() and (before != 0).any()


def test_compiles_and_maps_over_a_batch():
    mha, x = MultiHeadAttention(8, 2), torch.randn(3, 2, 5, 8)
    compiled = torch.compile(mha, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x[0]), mha(x[0]))
    torch.testing.assert_close(torch.vmap(mha)(x), torch.stack([mha(part) for part in x]))


def test_check_heads_names_the_width():
    with pytest.raises(ValueError, match=r"dim \(10\)"):
        check_heads(3, dim=10)
