"""Cheaper attention: equal to dense attention with a mask and to peers, and no leak."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from attnlib.attention import attention, causal_mask, padding_mask
from attnlib.efficient import (
    _iterated_inverse,
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
from helpers import close

FEATURES = random_features(32, 8, generator=torch.Generator().manual_seed(0))


def qkv(n=37, d=8, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, 3, n, d, generator=generator, dtype=dtype).unbind()
    return q, k, v


def hashed(q, k, v, **options):
    return lsh_attention(q, k, v, 4, 2, generator=torch.Generator().manual_seed(1), **options)


def delta(q, k, v):
    return delta_attention(q, F.normalize(k, dim=-1), v, v[..., 0].sigmoid(), chunk=8)[0]


CAUSAL = {
    "local": partial(local_attention, window=5),
    "linear": lambda q, k, v: linear_attention(q, k, v, causal=True, chunk=8)[0],
    "delta": delta,
    "performer": lambda q, k, v: performer_attention(q, k, v, FEATURES, causal=True),
    "lsh": partial(hashed, causal=True),
}


# --- masks and their faster twins -------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n", "window"), [(37, 5), (8, 8), (9, 8), (5, 8), (16, 4), (3, 1)])
def test_local_attention_is_a_mask(n, window, causal):
    tensors = [x.requires_grad_() for x in qkv(n)]
    dense = attention(*tensors, mask=sparse_mask(n, window=window, causal=causal))
    ours = local_attention(*tensors, window, causal=causal)
    close(ours, dense, 1e-12)
    wanted = torch.autograd.grad(dense.square().sum(), tensors)
    for a, b in zip(torch.autograd.grad(ours.square().sum(), tensors), wanted, strict=True):
        close(a, b, 1e-11)


def test_sparse_mask_holds_what_it_says():
    drawn = partial(sparse_mask, 30, window=3, generator=torch.Generator().manual_seed(0))
    mask, causal = drawn(global_tokens=2, random_keys=4), drawn(random_keys=4, causal=True)
    assert mask[:2].all() and mask[:, :2].all() and mask.diagonal(2).all()
    assert (mask.sum(1) >= 5).all() and mask.sum() < 0.6 * mask.numel()
    assert not causal.triu(1).any() and causal.diagonal().all()


@pytest.mark.parametrize("axis", [0, 1])
def test_axial_attention_is_a_mask(axis):
    q, k, v = qkv(12)
    place = torch.arange(12)
    line = place % 4 if axis == 0 else place // 4  # of a map of 3 × 4
    dense = attention(q, k, v, mask=line[:, None] == line)
    close(axial_attention(q, k, v, (3, 4), axis), dense, 1e-12)


def test_pooling_is_exact_on_constant_cells():
    q, k, v = qkv(24)
    place = torch.arange(24)
    cell = place // 6 // 2 * 3 + place % 6 // 2  # a map of 4 × 6, cells of 2 × 2
    k, v = k[..., cell, :], v[..., cell, :]
    close(pooled_attention(q, k, v, (4, 6), 2), attention(q, k, v), 1e-12)


def test_linformer_with_the_identity_is_exact():
    q, k, v = qkv()
    one = torch.eye(37, dtype=q.dtype)
    close(linformer_attention(q, k, v, one, one), attention(q, k, v), 1e-12)


def test_lsh_with_one_bucket_pair_and_many_rounds_sees_all():
    q, k, v = qkv()
    generator = torch.Generator().manual_seed(0)
    out = lsh_attention(q, k, v, 2, 64, causal=True, generator=generator)
    close(out, attention(q, k, v, mask="causal"), 1e-12)


# --- the future, padding, neighbors in the batch ----------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("t", [0, 7, 8, 20, 36])
def test_the_future_changes_nothing(name, t):
    before = CAUSAL[name](*qkv(dtype=torch.float32))
    changed = qkv(dtype=torch.float32)
    for x in changed:
        x[..., t:, :] = 3 * torch.randn_like(x[..., t:, :])
    after = CAUSAL[name](*changed)
    assert torch.equal(before[..., :t, :], after[..., :t, :])
    assert not torch.equal(before[..., t, :], after[..., t, :])


MASKED = {
    "linear": lambda q, k, v, mask: linear_attention(q, k, v, mask=mask)[0],
    "performer": lambda q, k, v, mask: performer_attention(q, k, v, FEATURES, mask=mask),
    "nystrom": lambda q, k, v, mask: nystrom_attention(q, k, v, 6, mask=mask),
    "lsh": lambda q, k, v, mask: hashed(q, k, v, mask=mask),
}


@pytest.mark.parametrize("name", MASKED)
def test_what_stands_in_the_padding_does_not_matter(name):
    mask = padding_mask(torch.tensor([20, 37]))
    before, others = MASKED[name](*qkv(), mask), qkv()
    for x in others:
        x[0, :, 20:] = 5.0
    after = MASKED[name](*others, mask)
    close(after[0, :, :20], before[0, :, :20], 1e-12)
    assert not torch.allclose(MASKED[name](*others, mask | True)[0, :, :20], after[0, :, :20])


@pytest.mark.parametrize("name", [*MASKED, "iterated"])
def test_a_sequence_does_not_know_its_batch(name):
    run = MASKED.get(name) or (lambda q, k, v, m: nystrom_attention(q, k, v, 6, iterations=6))
    q, k, v = qkv()
    both = run(q, k, v, None if name != "lsh" else torch.ones(37, dtype=torch.bool))
    alone = run(
        q[:1], k[:1], v[:1], None if name != "lsh" else torch.ones(37, dtype=torch.bool)
    )
    close(alone, both[:1], 1e-10)


def test_a_query_without_keys_gets_zeros():
    q, k, v = qkv()
    mask = torch.zeros(1, 37, dtype=torch.bool)
    assert not linear_attention(q, k, v, mask=mask)[0].any()
    assert not performer_attention(q, k, v, FEATURES, mask=mask).any()
    for iterations in (None, 6):
        q.grad, q = None, q.detach().requires_grad_()
        out = nystrom_attention(q, k, v, 6, mask=mask, iterations=iterations)
        out.sum().backward()
        assert not out.any() and not q.grad.any()
    mask = padding_mask(torch.tensor([0, 37]))  # one of two sequences is empty
    out = nystrom_attention(q, k, v, 6, mask=mask, iterations=6)
    alone = nystrom_attention(q[1:], k[1:], v[1:], 6, iterations=6)
    assert not out[0].any()
    close(out[1:], alone, 1e-10)


# --- states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("rule", [linear_attention, delta_attention])
def test_a_state_is_carried_across_calls(rule, chunk):
    q, k, v = qkv()
    k = F.normalize(k, dim=-1)
    options = dict(chunk=chunk)
    rate = [torch.rand(2, 3, 37, dtype=q.dtype)] if rule is delta_attention else []
    options |= dict(causal=True) if rule is linear_attention else {}
    whole, last = rule(q, k, v, *rate, **options)
    state, outs = None, []
    for part in (slice(0, 1), slice(1, 20), slice(20, 37)):
        own = [x[:, :, part] for x in (q, k, v, *rate)]
        out, state = rule(*own, state=state, **options)
        outs.append(out)
    close(torch.cat(outs, 2), whole, 1e-10)
    close(state, last, 1e-10)


def test_linear_attention_is_its_matrix():
    q, k, v = (x.requires_grad_() for x in qkv())
    weights = elu_features(q) @ elu_features(k).mT
    for causal in (False, True):
        a = weights.tril() if causal else weights
        dense = a @ v / a.sum(-1, keepdim=True)
        ours = linear_attention(q, k, v, causal=causal, chunk=8)[0]
        close(ours, dense, 1e-12)
        wanted = torch.autograd.grad(dense.square().sum(), (q, k, v), retain_graph=True)
        found = torch.autograd.grad(ours.square().sum(), (q, k, v))
        for a, b in zip(found, wanted, strict=True):
            close(a, b, 1e-11)


def test_delta_rule_is_that_of_qwen3_next():
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v = qkv(dtype=torch.float32)
    k, rate = F.normalize(k, dim=-1), torch.rand(2, 3, 37)
    ours, state = delta_attention(q / 8**0.5, k, v, rate, chunk=16)
    x = [t.transpose(1, 2) for t in (q, k, v)]  # (B, h, N, d) -> (B, N, h, d)
    gate, rate = torch.zeros(2, 37, 3), rate.transpose(1, 2)
    theirs, last = module.torch_recurrent_gated_delta_rule(*x, gate, rate, None, True)
    close(theirs.transpose(1, 2), ours, 1e-5)
    close(last, state, 1e-5)
    theirs, last = module.torch_chunk_gated_delta_rule(
        *x, gate, rate, initial_state=None, output_final_state=True
    )
    close(theirs.transpose(1, 2), ours, 1e-5)
    close(last, state, 1e-5)


@pytest.mark.parametrize("name", ["linear", "performer"])
def test_states_are_kept_in_full_precision(name):
    exact = qkv(2000, dtype=torch.float32)
    half = [x.bfloat16() for x in exact]
    ours, wanted = CAUSAL[name](*half), CAUSAL[name](*(x.float() for x in half))
    assert ours.dtype == torch.bfloat16
    close(ours.float(), wanted, 2e-2)


# --- features, landmarks ----------------------------------------------------------------------


def test_orthogonal_features_are_orthogonal_and_uniform():
    w = random_features(4000 * 4, 4, generator=torch.Generator().manual_seed(0))
    blocks = w.unflatten(0, (-1, 4)).double()
    gram = blocks @ blocks.mT
    close(gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2)), torch.zeros_like(gram), 1e-4)
    assert w.mean(0).abs().max() < 4 / math.sqrt(len(w))
    assert (w.square().mean(0) - 1).abs().max() < 0.1
    assert random_features(6, 4).shape == (6, 4)


def test_performer_comes_near_the_softmax():
    q, k, v = (0.5 * x for x in qkv(dtype=torch.float32))
    exact, found = attention(q, k, v), []
    for m in (16, 4096):
        w = random_features(m, 8, generator=torch.Generator().manual_seed(1))
        found.append((performer_attention(q, k, v, w) - exact).norm() / exact.norm())
    assert found[1] < 0.06 < found[0]


def test_performer_is_the_matrix_of_its_features():
    q, k, v = qkv()
    phi = [
        (x @ FEATURES.double().T - (x**2).sum(-1, keepdim=True) / 2).exp()
        for x in (q * 8**-0.25, k * 8**-0.25)
    ]
    a = phi[0] @ phi[1].mT
    for causal in (False, True):
        b = a.masked_fill(~causal_mask(37), 0) if causal else a
        ours = performer_attention(q, k, v, FEATURES, causal=causal)
        close(ours, b @ v / b.sum(-1, keepdim=True), 1e-10)


def test_nystrom_as_in_transformers():
    module = pytest.importorskip("transformers.models.nystromformer.modeling_nystromformer")
    from transformers import NystromformerConfig

    config = NystromformerConfig(
        hidden_size=16,
        num_attention_heads=1,  # their first iterate is scaled by all heads together
        num_landmarks=4,
        segment_means_seq_len=32,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    theirs = module.NystromformerSelfAttention(config).eval().double()
    theirs.conv_kernel_size = None  # no convolution beside the attention
    x = torch.randn(1, 32, 16, dtype=torch.float64)
    q, k, v = (
        f(x).unflatten(-1, (1, 16)).transpose(1, 2)
        for f in (theirs.query, theirs.key, theirs.value)
    )
    ours = nystrom_attention(q, k, v, 4, iterations=6).transpose(1, 2).flatten(2)
    close(theirs(x)[0], ours, 1e-10)
    assert not torch.allclose(theirs(x)[0], attention(q, k, v).transpose(1, 2).flatten(2))


def test_the_iteration_obeys_its_law():
    """A residual's eigenvalue r becomes r³ (3 + r) / 4."""
    a = torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=torch.float64)
    one = torch.eye(2, dtype=a.dtype)
    for steps in range(3):
        before, after = (
            torch.linalg.eigvals(one - a @ _iterated_inverse(a, n)).real.sort().values
            for n in (steps, steps + 1)
        )
        close((before**3 * (3 + before) / 4).sort().values, after, 1e-9)


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: local_attention(q, k, v, 0), r"window \(0\)"),
        (lambda q, k, v: local_attention(q[..., :5, :], k, v, 4), "q holds 5 tokens and k 37"),
        (lambda q, k, v: sparse_mask(9, window=2, random_keys=10), r"random_keys \(10\)"),
        (lambda q, k, v: axial_attention(q, k, v, (5, 7), 0), r"grid \(5, 7\)"),
        (lambda q, k, v: axial_attention(q, k, v, (1, 37), 2), r"axis \(2\)"),
        (lambda q, k, v: pooled_attention(q, k, v, (1, 37), 2), r"ratio \(2\)"),
        (lambda q, k, v: linformer_attention(q, k, v, q[0, 0], q[0, 0]), r"e of shape"),
        (lambda q, k, v: nystrom_attention(q, k, v, 38), r"landmarks \(38\)"),
        (lambda q, k, v: random_features(0, 4), r"m \(0\)"),
        (
            lambda q, k, v: performer_attention(q, k, v, torch.ones(4, 9)),
            r"w of shape \(4, 9\)",
        ),
        (lambda q, k, v: linear_attention(q, k, v, chunk=0), r"chunk \(0\)"),
        (lambda q, k, v: delta_attention(q, k, v, q), "beta of shape"),
        (lambda q, k, v: lsh_attention(q, k, v, 3), r"buckets \(3\)"),
        (lambda q, k, v: lsh_attention(q, k, v, 4, 0), r"rounds \(0\)"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call(*qkv())


@pytest.mark.parametrize("causal", [False, True])
def test_no_tokens_are_no_error(causal):
    empty = torch.zeros(2, 0, 4)
    assert local_attention(empty, empty, empty, 3, causal=causal).shape == (2, 0, 4)
