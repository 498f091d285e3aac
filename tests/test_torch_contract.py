"""`MultiHeadAttention` and torch.nn's: one call converts, and errors explain what differs."""

import pytest
import torch
import torch.nn as nn

from attnlib import MultiHeadAttention, attention
from attnlib.transformer import CrossAttention, SelfAttention

SHAPES = [dict(), dict(kdim=6, vdim=10), dict(bias=False), dict(kdim=6, bias=False)]


def both(**options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    return theirs, MultiHeadAttention.from_torch(theirs)


def inputs(theirs, n=5, m=7):
    shapes = (2, n, 12), (2, m, theirs.kdim), (2, m, theirs.vdim)
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("kind", ["none", "boolean", "added", "padding", "causal"])
def test_a_converted_layer_gives_torchs_output(options, kind):
    theirs, ours = both(**options)
    q, k, v = inputs(theirs, 7 if kind == "causal" else 5)
    hidden = torch.rand(q.shape[1], 7) < 0.4
    hidden[:, 0] = False
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    if kind == "boolean":
        wanted, found = dict(attn_mask=hidden), dict(mask=~hidden)
    elif kind == "added":
        bias = torch.randn(q.shape[1], 7, dtype=torch.float64)
        wanted, found = dict(attn_mask=bias), dict(bias=bias)
    elif kind == "padding":
        wanted = dict(key_padding_mask=padding)
        found = dict(mask=~padding[:, None, None, :])
    elif kind == "causal":
        future = torch.ones(7, 7, dtype=torch.bool).triu(1)
        wanted, found = dict(attn_mask=future), dict(mask="causal")
    else:
        wanted, found = {}, {}
    expected, weights = theirs(q, k, v, average_attn_weights=False, **wanted)
    torch.testing.assert_close(ours(q, k, v, **found), expected, rtol=1e-12, atol=1e-12)
    maps = ours.attention_maps(q, k, **found)
    torch.testing.assert_close(maps, weights, rtol=1e-12, atol=1e-12)


def test_weights_are_copied_with_mode_dtype_and_what_is_frozen():
    theirs, _ = both()
    theirs.out_proj.requires_grad_(False)
    theirs.eval().half()
    before = torch.get_rng_state()
    ours = MultiHeadAttention.from_torch(theirs)
    assert torch.equal(torch.get_rng_state(), before) and not ours.training
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {"out_proj.weight", "out_proj.bias"}
    assert all(p.dtype == torch.float16 for p in ours.parameters())
    with torch.no_grad():
        ours.out_proj.weight.zero_()
    assert theirs.out_proj.weight.abs().max() > 0


def test_sequence_first_layers_become_batch_first():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 3, dropout=0.3).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(2, 5, 12)
    expected, _ = theirs(*(x.transpose(0, 1),) * 3)
    torch.testing.assert_close(ours(x), expected.transpose(0, 1), rtol=1e-5, atol=1e-6)
    assert ours.dropout == 0.3


def test_attention_of_a_transformer_is_converted():
    theirs, _ = both()
    x, memory, _ = inputs(theirs)
    before = torch.get_rng_state()
    ours = SelfAttention.from_torch(theirs)
    assert torch.equal(torch.get_rng_state(), before) and type(ours) is SelfAttention
    expected, _ = theirs(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
    torch.testing.assert_close(ours(x, mask="causal"), expected, rtol=1e-12, atol=1e-12)
    theirs, _ = both(bias=False, kdim=12, vdim=12, dropout=0.2)
    ours = CrossAttention.from_torch(theirs.eval())
    assert type(ours) is CrossAttention and ours.dropout == 0.2 and not ours.training
    expected, _ = theirs(x, memory, memory)
    torch.testing.assert_close(ours(x, memory), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(kdim=6), r"kdim \(6\) and vdim \(12\) equal to embed_dim \(12\)"),
        (dict(vdim=6), r"kdim \(12\) and vdim \(6\) equal to embed_dim \(12\)"),
        (dict(bias=False), r"must have bias=True and dropout \(0.0\) of 0"),
        (dict(dropout=0.5), r"must have bias=True and dropout \(0.5\) of 0"),
    ],
)
def test_self_attention_refuses_settings_that_it_cannot_have(options, message):
    with pytest.raises(ValueError, match=message):
        SelfAttention.from_torch(nn.MultiheadAttention(12, 3, **options))


def test_inputs_are_projected_by_their_own_matrices():
    theirs, ours = both(kdim=6, vdim=10)
    q, k, v = inputs(theirs)
    queries, keys, values = ours.project(q, k, v)
    torch.testing.assert_close(ours.project(q), [queries])
    torch.testing.assert_close(ours.project(q, k), [queries, keys])
    torch.testing.assert_close(ours.project(q, value=v), [queries, values])


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_layers_with_keys_of_their_own_are_refused(option):
    with pytest.raises(ValueError, match=rf"{option} \(False\)"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 3, **{option: True}))
    with pytest.raises(TypeError, match=r"layer \(Linear\)"):
        MultiHeadAttention.from_torch(nn.Linear(3, 3))


@pytest.mark.parametrize(
    "name, cure",
    [
        ("batch_first", r"\(B, N, width\)"),
        ("add_bias_kv", "no such option"),
        ("attn_mask", "mask=~attn_mask"),
        ("dropuot", "no such argument"),
    ],
)
def test_arguments_of_torchs_constructor_are_explained(name, cure):
    with pytest.raises(TypeError, match=rf"{name} \(True\).*{cure}"):
        MultiHeadAttention(12, 3, **{name: True})


@pytest.mark.parametrize(
    "name, cure",
    [
        ("attn_mask", "mask=~attn_mask"),
        ("key_padding_mask", r"~key_padding_mask\[:, None, None, :\]"),
        ("is_causal", "mask='causal'"),
        ("need_weights", "attention_maps"),
        ("average_attn_weights", "attention_maps"),
    ],
)
def test_arguments_of_torchs_call_are_explained(name, cure):
    layer = MultiHeadAttention(12, 3)
    with pytest.raises(TypeError, match=f"{name}.*{cure}"):
        layer(torch.randn(2, 5, 12), **{name: None})


def test_a_mask_for_each_sequence_is_told_its_axes():
    layer = MultiHeadAttention(12, 3)
    x, mask = torch.randn(2, 5, 12), torch.ones(2, 5, dtype=torch.bool)
    for call in (lambda: layer(x, mask=mask), lambda: attention(*[x[:, None]] * 3, mask=mask)):
        with pytest.raises(ValueError, match=r"mask\[:, None, None, :\]"):
            call()
    assert layer(x, mask=mask[:, None, None, :]).shape == (2, 5, 12)
    with pytest.raises(ValueError) as caught:
        layer(x, mask=torch.ones(3, 4, dtype=torch.bool))
    assert "None" not in str(caught.value)
