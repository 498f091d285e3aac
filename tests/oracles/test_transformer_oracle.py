"""The Transformer against its equations in float64 and PyTorch's, over unusual calls."""

import math

import pytest
import torch
import torch.nn as nn
from draws import DTYPES, batches, drawn, layouts, masks, normal, paddings, seeds
from draws import tolerance as rounding
from hypothesis import example
from hypothesis import strategies as st
from signatures import unchecked
from transformers.models.t5.modeling_t5 import T5Attention

from attnlib import transformer
from attnlib.decoding import KVCache
from attnlib.transformer import (
    _ACTIVATIONS,
    POSITIONS,
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    Positions,
    Transformer,
    _check_rows,
    _layer_from_torch,
    check_tied,
    from_torch,
    label_smoothing_loss,
)

torch.set_num_threads(1)
SRC, TGT = 9, 7


def shaken(module, seed=0, dtype=torch.float64):
    """Random numbers in every parameter, so that none can hide; evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
            p.mul_(0.3 if p.ndim == 1 else 0.7 / p.shape[-1] ** 0.5)
        for part in module.modules():
            if isinstance(part, nn.LayerNorm):
                part.weight.add_(1.0)
    return module.to(dtype).eval()


def close(found, wanted, dtype=torch.float64, steps=64):
    scale = wanted.abs().max().item() if wanted.numel() else 0
    atol = rounding(dtype, steps) * max(1, scale)
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=atol)


# --- the equations ----------------------------------------------------------------------------


def linear(x, part):
    return x @ part.weight.double().T + part.bias.double()


def norm(x, part):
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + part.eps).sqrt()
    return part.weight.double() * x + part.bias.double()


def turned(x):
    """Heads (..., N, d), neighbors turned as complex numbers."""
    n, d = x.shape[-2:]
    speeds = 10000.0 ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.arange(n)[:, None] * speeds
    z = torch.complex(x[..., ::2], x[..., 1::2])
    z = z * torch.complex(angles.cos(), angles.sin())
    return torch.stack([z.real, z.imag], -1).flatten(-2)


def attended(x, y, part, mask=None, bias=None):
    """Tokens x (B, N, C) to tokens y (B, M, C), with zeros where x may attend to nothing."""
    h, d = part.num_heads, x.shape[-1] // part.num_heads
    weights, biases = part.in_proj_weight.double(), part.in_proj_bias.double()
    q, k, v = (
        (z @ w.T + b).unflatten(-1, (h, d)).transpose(1, 2)
        for z, w, b in zip((x, y, y), weights.chunk(3), biases.chunk(3))
    )
    if getattr(part, "rotary", False):
        q, k = turned(q), turned(k)
    logits = q @ k.mT / d**0.5
    if bias is not None:
        logits = logits + bias.double()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    dead = (logits == -torch.inf).all(-1, keepdim=True)
    weights = logits.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return linear((weights @ v).transpose(1, 2).flatten(2), part.out_proj)


def activated(x, activation):
    if activation is _ACTIVATIONS["relu"]:
        return x.clamp(min=0)
    if activation is _ACTIVATIONS["gelu"]:
        return x * (1 + torch.erf(x / 2**0.5)) / 2
    if activation is _ACTIVATIONS["silu"]:
        return x / (1 + (-x).exp())
    return x.tanh()


def fed(x, part):
    return linear(activated(linear(x, part.linear1), part.activation), part.linear2)


def through_layer(x, layer, mask=None, bias=None, memory=None, memory_mask=None):
    steps = [(layer.norm1, lambda x: attended(x, x, layer.self_attn, mask, bias))]
    if memory is not None:
        cross = layer.multihead_attn
        steps += [(layer.norm2, lambda x: attended(x, memory, cross, memory_mask))]
    last = layer.norm2 if memory is None else layer.norm3
    steps += [(last, lambda x: fed(x, layer.feed_forward))]
    for own, f in steps:
        x = x + f(norm(x, own)) if layer.norm_first else norm(x + f(x), own)
    return x


def through_stack(x, stack, *inputs):
    for layer in stack.layers:
        x = through_layer(x, layer, *inputs)
    return x if stack.norm is None else norm(x, stack.norm)


def sines(length, dim):
    rows = torch.zeros(length, dim, dtype=torch.float64)
    for p in range(length):
        for i in range(0, dim, 2):
            angle = p / 10000 ** (i / dim)
            rows[p, i], rows[p, i + 1] = math.sin(angle), math.cos(angle)
    return rows


def offsets_bias(positions, stack, n):
    """What is added to logits of n tokens: (h, n, n), or None."""
    offsets = torch.arange(n) - torch.arange(n)[:, None]
    if positions.scheme == "alibi":
        h = positions.nhead
        power = 2 ** math.floor(math.log2(h))
        slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        slopes += [2 ** (-8 * (i + 0.5) / power) for i in range(h - power)]
        return -torch.tensor(slopes, dtype=torch.float64)[:, None, None] * offsets.abs()
    if positions.scheme == "relative":
        part = getattr(positions, stack)
        buckets = T5Attention._relative_position_bucket(
            offsets, bidirectional=stack == "encoder", num_buckets=32, max_distance=128
        )
        return part.relative_attention_bias.weight.double()[buckets].permute(2, 0, 1)
    return None


def embedded(tokens, table, model):
    """Of tokens (N,): (1, N, d_model)."""
    x = model.d_model**0.5 * table.weight.double()[tokens]
    if model.positions.scheme == "sinusoidal":
        x = x + sines(*x.shape)
    elif model.positions.scheme == "learned":
        (rows,) = model.positions.learned.parameters()
        x = x + rows.double()[: len(tokens)]
    return x[None]


def equations(model, src, tgt):
    """Logits (N, vocab) for one source and one target, of which nothing is padding."""
    positions, n = model.positions, len(tgt)
    x = embedded(src, model.src_embed, model)
    x = through_stack(x, model.encoder, None, offsets_bias(positions, "encoder", len(src)))
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    bias = offsets_bias(positions, "decoder", n)
    y = embedded(tgt, model.tgt_embed, model)
    y = through_stack(y, model.decoder, causal, bias, x)
    logits = y[0] @ model.output.weight.double().T
    return logits if model.output_bias is None else logits + model.output_bias.double()


# --- the model --------------------------------------------------------------------------------


@st.composite
def models(draw):
    """Any of the options together."""
    heads = draw(st.sampled_from((1, 2, 3)))
    return dict(
        src_vocab=SRC,
        tgt_vocab=draw(st.sampled_from((None, TGT))),
        d_model=heads * draw(st.sampled_from((2, 4))),
        nhead=heads,
        num_encoder_layers=draw(st.integers(0, 2)),
        num_decoder_layers=draw(st.integers(0, 2)),
        dim_feedforward=draw(st.integers(1, 5)),
        dropout=0.0,
        activation=draw(st.sampled_from((*_ACTIVATIONS, torch.tanh))),
        norm_first=draw(st.booleans()),
        final_norm=draw(st.sampled_from((None, True, False))),
        max_length=16,
        pad_id=draw(st.sampled_from((0, TGT - 1))),
        tie_weights=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        position=draw(st.sampled_from(POSITIONS)),
    )


def sentences(model, vocab, lengths, seed):
    """Tokens of these numbers of tokens, and padding behind them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab - 1, (len(lengths), max(lengths)), generator=generator)
    tokens = tokens + (tokens >= model.pad_id)  # any but padding
    behind = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    return tokens.masked_fill(behind, model.pad_id)


def decoded(model, src, tgt, parts):
    """Logits of all targets, some at a time."""
    memory, mask = model.encode(src)
    cache, found = KVCache(), []
    for piece in tgt.split(parts, dim=1):
        found.append(model.decode(piece, memory, mask, cache))
    return torch.cat(found, dim=1)


lengths = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@drawn(models(), lengths, st.lists(st.integers(1, 4), min_size=1, max_size=4), seeds)
def test_any_transformer_is_its_equations(options, lengths, parts, seed):
    """Padded sources, several new tokens at a time; outputs and all gradients."""
    model = shaken(Transformer(**options), seed)
    src = sentences(model, model.src_vocab_size, lengths, seed)
    tgt = sentences(model, model.vocab_size, [sum(parts)] * len(lengths), seed + 1)
    rows = [equations(model, row[:n], own) for row, n, own in zip(src, lengths, tgt)]
    wanted = torch.stack(rows)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(wanted.square().sum(), parameters, materialize_grads=True)
    for found in (
        model(src, tgt),
        decoded(model, src, tgt, parts),
        model(src.int(), tgt.int()),
    ):
        close(found, wanted, steps=1000)
        loss = found.square().sum()
        grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
        for ours, theirs in zip(grads, expected):
            close(ours, theirs, steps=100_000)


@drawn(models(), lengths, st.sampled_from(DTYPES[1:]), st.booleans(), seeds)
def test_narrow_numbers_are_near_the_equations(options, lengths, dtype, autocast, seed):
    autocast = autocast and dtype == torch.float32
    model = shaken(Transformer(**options), seed, dtype)
    src = sentences(model, model.src_vocab_size, lengths, seed)
    tgt = sentences(model, model.vocab_size, [5] * len(lengths), seed + 1)
    with torch.no_grad():
        rows = [equations(model, row[:n], own) for row, n, own in zip(src, lengths, tgt)]
        with torch.autocast("cpu", enabled=autocast):
            outputs = model(src, tgt), decoded(model, src, tgt, (2, 1, 2))
    for found in outputs:
        close(found, torch.stack(rows), torch.bfloat16 if autocast else dtype, 64)


# --- layers -----------------------------------------------------------------------------------

LAYER = st.tuples(
    st.sampled_from(((2, 1), (4, 2), (6, 3))),
    st.integers(1, 5),
    st.sampled_from((*_ACTIVATIONS, torch.tanh)),
    st.booleans(),
    st.booleans(),
)


def layer_of(kind, settings, seed, dtype=torch.float64):
    (width, heads), hidden, activation, norm_first, rotary = settings
    return shaken(kind(width, heads, hidden, 0.1, activation, norm_first, rotary), seed, dtype)


@drawn(LAYER, batches, st.integers(1, 4), st.integers(1, 5), layouts, seeds, st.data())
def test_layers_are_their_equations(settings, batch, n, m, layout, seed, data):
    """With masks that may hide everything, and a bias; no gradient from a row without keys."""
    (width, heads), *_ = settings
    x = normal((batch, n, width), seed=seed, layout=layout)
    memory = normal((batch, m, width), seed=seed + 1, layout=layout)
    own = data.draw(st.one_of(st.none(), masks((batch, heads, n, n))))
    other = data.draw(st.one_of(st.none(), masks((batch, heads, n, m))))
    bias = data.draw(st.sampled_from((None, normal((heads, 1, n), seed=seed + 2))))
    encoder, decoder = (layer_of(kind, settings, seed) for kind in (EncoderLayer, DecoderLayer))
    shorter = [memory, other, bias]
    pairs = [
        (encoder(x, own, bias), through_layer(x, encoder, own, bias)),
        (
            decoder(x, memory, own, other, bias),
            through_layer(x, decoder, own, bias, *shorter[:2]),
        ),
        (encoder.self_attn(x, own, bias), attended(x, x, encoder.self_attn, own, bias)),
        (
            decoder.multihead_attn(x, memory, other),
            attended(x, memory, decoder.multihead_attn, other),
        ),
        (encoder.feed_forward(x), fed(x, encoder.feed_forward)),
        (
            Encoder([encoder, encoder], encoder.norm1)(x, own, bias),
            norm(
                through_layer(through_layer(x, encoder, own, bias), encoder, own, bias),
                encoder.norm1,
            ),
        ),
        (
            Decoder([decoder])(x, memory, own, other, bias),
            through_layer(x, decoder, own, bias, memory, other),
        ),
    ]
    parameters = [*encoder.parameters(), *decoder.parameters()]
    for found, wanted in pairs:
        close(found, wanted, steps=1000)
        grads = [
            torch.autograd.grad(y.square().sum(), parameters, materialize_grads=True)
            for y in (found, wanted)
        ]
        for ours, theirs in zip(*grads):
            close(ours, theirs, steps=100_000)


@drawn(LAYER, batches, st.lists(st.integers(1, 3), min_size=1, max_size=4), seeds, st.data())
def test_layers_with_a_cache(settings, batch, parts, seed, data):
    """One, two, or three new tokens at a time, with new memories in between."""
    (width, _), *_ = settings
    x = normal((batch, sum(parts), width), seed=seed)
    causal = torch.ones(sum(parts), sum(parts), dtype=torch.bool).tril()
    layer = layer_of(DecoderLayer, settings, seed)
    memory = normal((batch, 3, width), seed=seed + 1)
    kept = data.draw(paddings(batch, 3))[:, None, None]
    cache, found = KVCache(), []
    for piece in x.split(parts, dim=1):
        found.append(layer(piece, memory, "causal", kept, cache=cache, layer=5))
        if data.draw(st.booleans()):
            memory = memory.clone()
    wanted = through_layer(x, layer, causal, None, memory, kept)
    close(torch.cat(found, dim=1), wanted, steps=1000)
    assert cache.tokens_of(5) == sum(parts) and set(cache.room) == {5}


@st.composite
def torch_layers(draw):
    """Options of PyTorch's layers."""
    heads = draw(st.sampled_from((1, 2)))
    return dict(
        d_model=4 * heads,
        nhead=heads,
        dim_feedforward=draw(st.integers(1, 5)),
        dropout=draw(st.sampled_from((0.0, 0.3))),
        activation=draw(st.sampled_from(("relu", "gelu", torch.tanh, nn.SiLU()))),
        norm_first=draw(st.booleans()),
        layer_norm_eps=draw(st.sampled_from((1e-5, 0.1))),
        batch_first=draw(st.booleans()),
    )


@drawn(torch_layers(), st.booleans(), st.integers(1, 3), st.integers(1, 4), st.data())
def test_layers_of_torch(options, decodes, n, m, data):
    kind = nn.TransformerDecoderLayer if decodes else nn.TransformerEncoderLayer
    theirs = shaken(kind(**options), data.draw(seeds))
    ours = _layer_from_torch(theirs).eval()
    x, memory = (normal((2, k, options["d_model"]), seed=k) for k in (n, m))
    mask = data.draw(masks((2, options["nhead"], n, n)))
    mask = mask.broadcast_to(2, options["nhead"], n, n) | torch.eye(n, dtype=torch.bool)
    kept = data.draw(paddings(2, m, empty=False))
    swap = (lambda y: y) if options["batch_first"] else (lambda y: y.transpose(0, 1))
    if decodes:
        found = ours(x, memory, mask, kept[:, None, None])
        wanted = theirs(
            swap(x), swap(memory), ~mask.flatten(0, 1), memory_key_padding_mask=~kept
        )
    else:
        found, wanted = ours(x, mask), theirs(swap(x), ~mask.flatten(0, 1))
    close(found, swap(wanted), steps=1000)
    assert ours.dropout.p == options["dropout"]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@drawn(torch_layers(), st.integers(1, 2), st.integers(1, 2), st.booleans(), st.data())
def test_transformers_of_torch(options, encoders, decoders, shared, data):
    theirs = nn.Transformer(num_encoder_layers=encoders, num_decoder_layers=decoders, **options)
    theirs = shaken(theirs, data.draw(seeds))
    ours = from_torch(theirs, SRC, None if shared else TGT, max_length=8).eval()
    src, tgt = sentences(ours, 7, [5, 3], 0), sentences(ours, 7, [4, 4], 1)
    x, y = (ours.embed(t, e) for t, e in ((src, ours.src_embed), (tgt, ours.tgt_embed)))
    if not options["batch_first"]:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    wanted = theirs(
        x,
        y,
        tgt_mask=~torch.ones(4, 4, dtype=torch.bool).tril(),
        src_key_padding_mask=src == 0,
        memory_key_padding_mask=src == 0,
    )
    wanted = wanted if options["batch_first"] else wanted.transpose(0, 1)
    close(ours(src, tgt), wanted @ ours.output.weight.T, steps=1000)


# --- positions --------------------------------------------------------------------------------


@drawn(
    st.sampled_from(POSITIONS),
    st.sampled_from(DTYPES),
    batches,
    st.integers(1, 4),
    st.integers(0, 6),
    st.sampled_from((1, 2, 3, 5)),
)
def test_schemes_of_positions(scheme, dtype, batch, n, past, heads):
    positions = shaken(Positions(scheme, 6, heads, 8), dtype=dtype)
    x = normal((batch, n, 6), dtype)
    if scheme in ("sinusoidal", "learned") and past + n > 8:
        with pytest.raises(ValueError, match="must"):
            positions.add(x, past)
        return
    wanted = x.double()
    if scheme == "sinusoidal":
        wanted = wanted + sines(past + n, 6)[past:]
    elif scheme == "learned":
        (rows,) = positions.learned.parameters()
        wanted = wanted + rows.double()[past : past + n]
    found = positions.add(x, past)
    assert found.dtype == dtype
    close(found, wanted, dtype, 2)
    for stack in ("encoder", "decoder"):
        found = positions.bias(stack, n, past + n, "cpu", dtype)
        wanted = offsets_bias(positions, stack, past + n)
        if wanted is None:
            assert found is None
        else:
            close(found, wanted[:, past:], found.dtype, 2)


# --- the loss ---------------------------------------------------------------------------------


@drawn(
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(1, 6),
    st.sampled_from((0.0, 0.1, 1.0)),
    st.sampled_from(DTYPES),
    layouts,
    st.sampled_from((0, 2, -100)),
    st.booleans(),
    seeds,
)
def test_the_smoothed_loss_is_its_formula(
    batch, n, vocab, smoothing, dtype, layout, pad_id, autocast, seed
):
    logits = normal((batch, n, vocab), dtype, seed, layout).requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(vocab, (batch, n), generator=generator)
    if pad_id == -100:
        targets[:, n // 2 :] = pad_id
    for own in (targets, targets.int()):
        with torch.autocast("cpu", enabled=autocast):
            loss, count = label_smoothing_loss(logits, own, smoothing=smoothing, pad_id=pad_id)
        log_probs, wanted = logits.double().log_softmax(-1), logits.double().sum() * 0
        for b in range(batch):
            for i in range(n):
                if targets[b, i] != pad_id:
                    row = log_probs[b, i]
                    wanted = wanted - (1 - smoothing) * row[targets[b, i]]
                    wanted = wanted - smoothing * row.mean()
        assert count == (targets != pad_id).sum() and loss.ndim == 0
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        close(loss, wanted, loss.dtype, 16)
        grads = [
            torch.autograd.grad(y, logits, materialize_grads=True)[0] for y in (loss, wanted)
        ]
        close(*grads, dtype, 8)


# --- checks -----------------------------------------------------------------------------------


def passes(call, *errors):
    """Whether a call passes; it may raise only errors that say what is allowed."""
    try:
        with unchecked():
            call()
    except errors as error:
        assert "must" in str(error) or "there are" in str(error)
        return False
    return True


@drawn(st.integers(1, 3), st.integers(1, 3))
def test_rows_of_targets(rows, sources):
    tokens, memory = torch.ones(rows, 4, dtype=torch.int64), torch.zeros(sources, 1, 3)
    assert passes(lambda: _check_rows(tokens, memory), ValueError) == (rows == sources)


@drawn(
    st.integers(-1, 5),
    st.sampled_from((0.0, 0.5, 1.0, -0.1, math.nan)),
    st.integers(1, 5),
    st.sampled_from((0, 2, -1, 1.0)),
)
def test_which_settings_are_possible(pad_id, dropout, vocab, layers):
    allowed = 0 <= pad_id < vocab and type(layers) is int and layers >= 0
    allowed = allowed and 0 <= dropout < 1
    options = dict(dropout=dropout, pad_id=pad_id)
    assert (
        passes(lambda: Transformer(vocab, None, 4, 2, layers, 0, **options), ValueError)
        == allowed
    )


@drawn(st.booleans(), st.sampled_from(("", "model.")), st.booleans())
@example(True, "model.", True)
def test_a_tied_parameter_has_one_tensor(tied, prefix, differ):
    model = Transformer(SRC, TGT, 4, 2, 1, 1, tie_weights=tied)
    state = {prefix + key: x.clone() for key, x in model.state_dict().items()}
    if differ:
        state[f"{prefix}output.weight"] += 1
    if tied and differ:
        with pytest.raises(
            ValueError, match=f"different tensors for '{prefix}tgt_embed.weight'"
        ):
            check_tied(model, state, prefix)
    else:
        check_tied(model, state, prefix)


ORACLES = {
    "SelfAttention": test_layers_are_their_equations,
    "CrossAttention": test_layers_are_their_equations,
    "FeedForward": test_layers_are_their_equations,
    "EncoderLayer": test_layers_are_their_equations,
    "DecoderLayer": test_layers_are_their_equations,
    "Encoder": test_layers_are_their_equations,
    "Decoder": test_layers_are_their_equations,
    "Positions": test_schemes_of_positions,
    "check_tied": test_a_tied_parameter_has_one_tensor,
    "_check_rows": test_rows_of_targets,
    "Transformer": test_any_transformer_is_its_equations,
    "label_smoothing_loss": test_the_smoothed_loss_is_its_formula,
    "_layer_from_torch": test_layers_of_torch,
    "from_torch": test_transformers_of_torch,
}
NOT_HERE = {
    "tie": "part of tie_embeddings; tests/test_transformations.py",
    "_tie_embeddings": "runs after each load; tests/test_transformations.py",
    "_ACTIVATIONS": "a table of functions, each in the equations above",
    "POSITIONS": "a table of names, each in the equations above",
}


def test_nothing_is_left_out():
    assert set(transformer.__all__) == {name for name in ORACLES | NOT_HERE if name[0] != "_"}
