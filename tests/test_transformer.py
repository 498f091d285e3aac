"""The Transformer: parity with PyTorch and Marian, cached decoding, masks, loss, bad input."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.attention import attention_backend, causal_mask
from attnlib.backbone import evaluation
from attnlib.decoding import KVCache, greedy
from attnlib.train import fit, shuffled_batches
from attnlib.transformer import (
    POSITIONS,
    CrossAttention,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    Positions,
    SelfAttention,
    Transformer,
    from_torch,
    label_smoothing_loss,
)
from attnlib.translation import from_marian
from helpers import tiny_marian

EXACT = dict(rtol=0, atol=1e-11)  # float64 sums through a few layers


def small(**options):
    torch.manual_seed(0)
    settings = dict(
        d_model=16,
        nhead=2,
        num_encoder_layers=2,
        num_decoder_layers=3,
        dim_feedforward=24,
        max_length=32,
    )
    return Transformer(20, **(settings | options)).double().eval()


def shake(module):
    """Random numbers in every parameter, biases and norms included, so that none can hide."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype) * 0.1)
    return module


def sentences(batch, length, vocab=20, seed=0, shortest=1):
    """Random tokens from 1 on, with padding 0 behind all rows but the first."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocab, (batch, length), generator=generator)
    lengths = torch.randint(shortest, length + 1, (batch, 1), generator=generator)
    lengths[0] = length
    return tokens.masked_fill(torch.arange(length) >= lengths, 0)


# --- torch.nn.Transformer ---------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_parity_with_torch(norm_first, activation, dtype, atol):
    torch.manual_seed(0)
    theirs = nn.Transformer(
        24, 3, 2, 3, 40, 0.0, activation, batch_first=True, norm_first=norm_first, dtype=dtype
    )
    ours = from_torch(shake(theirs), 20, max_length=16)
    assert ours.encoder.norm is not None and ours.decoder.norm is not None
    x, y = torch.randn(3, 7, 24, dtype=dtype), torch.randn(3, 5, 24, dtype=dtype)
    real = torch.arange(7) < torch.tensor([[7], [4], [1]])
    mask, causal = real[:, None, None, :], causal_mask(5)
    memory = theirs.encoder(x, src_key_padding_mask=~real)
    torch.testing.assert_close(ours.encoder(x, mask)[real], memory[real], rtol=0, atol=atol)
    expected = theirs.decoder(y, memory, tgt_mask=~causal, memory_key_padding_mask=~real)
    out = ours.decoder(y, memory, causal, mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)

    torch.autograd.backward([expected.square().sum(), out.square().sum()])
    gradients = {
        name.replace("feed_forward.", ""): p.grad for name, p in ours.decoder.named_parameters()
    }
    for name, parameter in theirs.decoder.named_parameters():
        scale = parameter.grad.abs().max().item() + 1
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=0, atol=10 * atol * scale
        )


def test_torch_without_final_norms():
    theirs = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    theirs.encoder.norm = theirs.decoder.norm = None
    assert from_torch(theirs, 20, max_length=8).encoder.norm is None


def test_torch_keeps_the_epsilon_of_the_norms():
    torch.manual_seed(0)
    theirs = nn.Transformer(
        8, 2, 1, 1, 8, 0.0, layer_norm_eps=0.1, batch_first=True, dtype=torch.float64
    ).eval()
    ours = from_torch(theirs, 20, max_length=8).eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(ours.encoder(x), theirs.encoder(x), rtol=0, atol=1e-10)


# --- Marian -----------------------------------------------------------------------------------


def marian(dtype, **options):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = tiny_marian(**dict(decoder_layers=3) | options).to(dtype)
    shake(model)
    for part in (model.model.encoder, model.model.decoder):  # shaken too, so made anew
        part.embed_positions.weight.data = part.embed_positions.create_weight().to(dtype)
    model.final_logits_bias.normal_()
    return model


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shared", [True, False])
def test_parity_with_marian(dtype, atol, shared):
    options = (
        {}
        if shared
        else dict(
            share_encoder_decoder_embeddings=False,
            decoder_vocab_size=26,
            pad_token_id=25,
            decoder_start_token_id=25,
        )
    )
    theirs = marian(dtype, **options)
    pad = theirs.config.pad_token_id
    ours = from_marian(theirs.config, theirs.state_dict()).eval()
    src, labels = sentences(3, 9, 25), sentences(3, 6, 25, seed=1)
    src, labels = src.masked_fill(src == 0, pad), labels.masked_fill(labels == 0, -100)
    expected = theirs(input_ids=src, attention_mask=(src != pad).long(), labels=labels)
    memory, mask = ours.encode(src)
    real = src != pad
    assert memory.dtype == dtype
    torch.testing.assert_close(
        memory[real], expected.encoder_last_hidden_state[real], rtol=0, atol=atol
    )
    tgt = theirs.prepare_decoder_input_ids_from_labels(labels)  # begins with the padding token
    logits = ours.decode(tgt, memory, mask)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=atol)
    loss, count = label_smoothing_loss(logits, labels, smoothing=0.0, pad_id=-100)
    torch.testing.assert_close(loss / count, expected.loss, rtol=0, atol=atol)


@pytest.mark.parametrize("shared", [True, False])
def test_marian_with_an_output_matrix_of_its_own(shared):
    theirs = marian(
        torch.float64, tie_word_embeddings=False, share_encoder_decoder_embeddings=shared
    )
    nn.init.normal_(theirs.lm_head.weight)
    ours = from_marian(theirs.config, theirs.state_dict()).eval()
    src, tgt = sentences(2, 7, 29, shortest=7), sentences(2, 5, 29, seed=1, shortest=5)
    expected = theirs(
        input_ids=src, attention_mask=torch.ones_like(src), decoder_input_ids=tgt
    ).logits
    torch.testing.assert_close(ours(src, tgt), expected, rtol=0, atol=1e-10)


def test_marian_greedy_with_cache():
    theirs = marian(torch.float64)
    ours = from_marian(theirs.config, theirs.state_dict()).eval()
    src = sentences(2, 9, 29, shortest=9)
    expected = theirs.generate(src, num_beams=1, do_sample=False, max_new_tokens=12)
    memory, mask = ours.encode(src)
    tokens, cache = torch.full((2, 1), 29), KVCache()
    for _ in range(expected.shape[1] - 1):
        best = ours.decode(tokens[:, -1:], memory, mask, cache)[:, -1:]
        best[
            ..., 29
        ] = -torch.inf  # generate never chooses padding (bad_words_ids of published models)
        tokens = torch.cat([tokens, best.argmax(-1)], dim=1)
    for mine, their in zip(tokens.tolist(), expected.tolist()):
        end = their.index(0) if 0 in their else len(their)
        if 29 not in their[1:end]:
            assert mine[:end] == their[:end]


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(scale_embedding=False), r"scale_embedding \(False\) of config must be True"),
        (dict(decoder_attention_heads=4), r"encoder_attention_heads \(2\) of config must be 4"),
    ],
)
def test_marian_that_is_another_model(options, words):
    theirs = marian(torch.float32, **options)
    with pytest.raises(ValueError, match=words):
        from_marian(theirs.config, theirs.state_dict())


@pytest.mark.parametrize("shared", [True, False])
def test_marian_file_keeps_a_tied_matrix_once(shared):
    theirs = marian(torch.float32, share_encoder_decoder_embeddings=shared)
    weights = {
        key: x
        for key, x in theirs.state_dict().items()
        if key != "lm_head.weight" and "positions" not in key
    }
    if shared:
        weights = {key: x for key, x in weights.items() if "embed_tokens" not in key}
    whole, part = (
        from_marian(theirs.config, x).state_dict() for x in (theirs.state_dict(), weights)
    )
    assert all(torch.equal(whole[key], part[key]) for key in whole)


def test_marian_lists_missing_weights():
    theirs = marian(torch.float32)
    weights = theirs.state_dict()
    del weights["model.encoder.layers.1.fc1.bias"]
    with pytest.raises(
        RuntimeError, match=r"Missing.*encoder.layers.1.feed_forward.linear1.bias"
    ):
        from_marian(theirs.config, weights)


# --- what the model is ------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
def test_cache_changes_nothing(norm_first):
    model = shake(small(norm_first=norm_first))
    src, tgt = sentences(3, 7), sentences(3, 9, seed=1, shortest=9)
    memory, mask = model.encode(src)
    whole = model.decode(tgt, memory, mask)
    for cuts in ([1] * 9, [4, 3, 2], [9]):
        cache = KVCache()
        parts = [model.decode(part, memory, mask, cache) for part in tgt.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)
        assert len(cache) == 9 and cache.memory[2][1].shape == (3, 2, 7, 8)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 4),
    m=st.integers(1, 6),
    n=st.integers(1, 6),
    more=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_padding_changes_nothing(batch, m, n, more, seed):
    model = small()
    src, tgt = sentences(batch, m, seed=seed), sentences(batch, n, seed=seed + 1)
    expected = model(src, tgt)
    longer = model(F.pad(src, (0, more)), F.pad(tgt, (0, more)))
    torch.testing.assert_close(longer[:, :n], expected, **EXACT)
    one_by_one = [model(s[None, s != 0], t[None, t != 0])[0] for s, t in zip(src, tgt)]
    for row, alone in zip(expected, one_by_one):
        torch.testing.assert_close(row[: len(alone)], alone, **EXACT)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 8), data=st.data(), norm_first=st.booleans())
def test_no_look_into_the_future(n, data, norm_first):
    at = data.draw(st.integers(1, n - 1))
    model, src, tgt = small(norm_first=norm_first), sentences(2, 5), sentences(2, n, shortest=n)
    other = tgt.clone()
    other[:, at:] = torch.randint(
        1, 20, (2, n - at), generator=torch.Generator().manual_seed(n)
    )
    torch.testing.assert_close(model(src, tgt)[:, :at], model(src, other)[:, :at], **EXACT)


def test_a_source_of_padding_only_is_finite():
    model, src = small(), torch.zeros(1, 4, dtype=torch.int64)
    logits = model(src, sentences(1, 3))
    logits.sum().backward()
    assert logits.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "tgt_vocab, tie, distinct",
    [(None, True, 1), (None, False, 3), (15, True, 2), (15, False, 3)],
)
def test_tied_weights(tgt_vocab, tie, distinct):
    model = small(tgt_vocab=tgt_vocab, tie_weights=tie)
    tables = {model.src_embed.weight, model.tgt_embed.weight, model.output.weight}
    assert len(tables) == distinct
    assert model(sentences(2, 4), sentences(2, 3, 15)).shape == (2, 3, tgt_vocab or 20)
    copied = copy.deepcopy(model)
    assert (
        len({copied.src_embed.weight, copied.tgt_embed.weight, copied.output.weight})
        == distinct
    )
    other = small(tgt_vocab=tgt_vocab, tie_weights=tie)
    other.load_state_dict(shake(model).state_dict(), strict=True)
    torch.testing.assert_close(
        other(sentences(2, 4), sentences(2, 3, 15)), model(sentences(2, 4), sentences(2, 3, 15))
    )


@pytest.mark.parametrize("norm_first, last", [(False, False), (True, True)])
def test_parameter_count(norm_first, last):
    d, f, v = 16, 24, 20
    encoder, decoder = 4 * d * d + 2 * d * f + f + 9 * d, 8 * d * d + 2 * d * f + f + 15 * d
    count = v * d + 2 * encoder + 3 * decoder + 4 * d * last
    assert sum(p.numel() for p in small(norm_first=norm_first).parameters()) == count


def test_maps_are_the_weights_that_were_used():
    model = shake(small(dropout=0.5)).train()
    src, tgt = sentences(3, 7), sentences(3, 5, seed=1)
    maps = model.attention_maps(src, tgt)
    assert model.training and {name: len(x) for name, x in maps.items()} == {
        "encoder": 2,
        "decoder": 3,
        "cross": 3,
    }
    assert maps["cross"][0].shape == (3, 2, 5, 7)
    for weights in sum(maps.values(), []):
        torch.testing.assert_close(
            weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64), **EXACT
        )
    padding = (src == 0)[:, None, None, :]
    assert (maps["encoder"][1].masked_select(padding) == 0).all() and (
        maps["cross"][1].masked_select(padding) == 0
    ).all()
    assert (maps["decoder"][2].triu(1) == 0).all()
    layer = model.eval().encoder.layers[0].self_attn
    x = model.embed(src, model.src_embed)
    torch.testing.assert_close(
        maps["encoder"][0], layer.attention_maps(x, mask=(src != 0)[:, None, None, :]), **EXACT
    )


def test_backends_agree():
    model, src, tgt = shake(small()), sentences(3, 7), sentences(3, 5)
    with attention_backend("reference"):
        expected = model(src, tgt)
    with attention_backend("sdpa"):
        torch.testing.assert_close(model(src, tgt), expected, **EXACT)


def test_gradients_against_differences():
    model = small(
        d_model=4,
        nhead=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dim_feedforward=4,
        activation="gelu",
    )
    src, tgt, weight = (
        sentences(2, 3),
        sentences(2, 3),
        model.src_embed.weight.detach().clone().requires_grad_(),
    )

    def loss(weight):
        names = ("src_embed.weight", "tgt_embed.weight", "output.weight")
        logits = torch.func.functional_call(model, dict.fromkeys(names, weight), (src, tgt))
        return label_smoothing_loss(logits, tgt)[0]

    assert torch.autograd.gradcheck(loss, weight)


# --- positions --------------------------------------------------------------------------------

LEARNED = {
    "learned": "positions.learned",
    "relative": "positions.encoder",
}  # the schemes that have parameters


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("cuts", [[1] * 9, [4, 3, 2]])
def test_cache_changes_nothing_in_any_scheme(position, cuts):
    model = shake(small(position=position))
    src, tgt = sentences(3, 7), sentences(3, 9, seed=1, shortest=9)
    memory, mask = model.encode(src)
    cache = KVCache()
    parts = [model.decode(part, memory, mask, cache) for part in tgt.split(cuts, dim=1)]
    torch.testing.assert_close(
        torch.cat(parts, dim=1), model.decode(tgt, memory, mask), **EXACT
    )


@pytest.mark.parametrize("position", POSITIONS)
def test_order_counts_but_without_positions(position):
    model, src, order = (
        shake(small(position=position)),
        sentences(2, 6, shortest=6),
        torch.tensor([3, 0, 5, 1, 2, 4]),
    )
    memory, permuted = model.encode(src)[0], model.encode(src[:, order])[0]
    difference = (permuted - memory[:, order]).abs().max()
    assert difference < 1e-11 if position == "none" else difference > 1e-3
    tgt = sentences(
        2, 6, seed=1, shortest=6
    )  # the decoder is causal: it knows the order in every scheme
    assert (model(src, tgt[:, order]) - model(src, tgt)[:, order]).abs().max() > 1e-3


@pytest.mark.parametrize("position", POSITIONS)
def test_padding_changes_nothing_in_any_scheme(position):
    model, src, tgt = shake(small(position=position)), sentences(3, 6), sentences(3, 5, seed=1)
    longer = model(F.pad(src, (0, 3)), F.pad(tgt, (0, 2)))
    torch.testing.assert_close(longer[:, :5], model(src, tgt), **EXACT)


@pytest.mark.parametrize("position", POSITIONS)
def test_gradients_reach_learned_positions(position):
    model = small(position=position)
    label_smoothing_loss(model(sentences(2, 5), sentences(2, 4)), sentences(2, 4, seed=2))[
        0
    ].backward()
    named = {name: p for name, p in model.named_parameters() if name.startswith("positions.")}
    assert bool(named) is (position in LEARNED)
    assert all(p.grad.abs().max() > 0 for p in named.values())
    assert position not in LEARNED or any(name.startswith(LEARNED[position]) for name in named)


@pytest.mark.parametrize("position", POSITIONS)
def test_positions_go_through_a_state_dict(position):
    model, other = shake(small(position=position)), small(position=position)
    other.load_state_dict(model.state_dict(), strict=True)
    src, tgt = sentences(2, 5), sentences(2, 4)
    torch.testing.assert_close(other(src, tgt), model(src, tgt), rtol=0, atol=0)


def test_an_unknown_scheme():
    with pytest.raises(
        ValueError,
        match=r"position \('circular'\)",
    ):
        small(position="circular")


# --- the cache's room -------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.integers(1, 5), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_key_values_are_what_was_put_in(parts, seed):
    generator, cache, every = torch.Generator().manual_seed(seed), KVCache(), []
    for n in parts:
        every.append(torch.randn(2, 2, 3, 2, n, 4, generator=generator))  # of two layers
        cache.update(0, *every[-1][0] + 1)  # a call that fails: never advanced
        cache.rewind()
        found = [torch.stack(cache.update(i, *new)) for i, new in enumerate(every[-1])]
        cache.advance(n)
        expected = torch.cat(every, dim=4)
        assert torch.equal(torch.stack(found), expected)
        rooms = [room.shape[3] for room in cache.room.values()]
        assert all(len(cache) == sum(parts[: len(every)]) <= n <= 2 * len(cache) for n in rooms)
    rows = torch.tensor([2, 0, 0])
    cache.reorder(rows)
    found = torch.stack(cache.update(1, *torch.zeros(2, 3, 2, 1, 4)))[:, :, :, :-1]
    assert torch.equal(found, expected[1][:, rows])
    with pytest.raises(ValueError, match="cache has 3 rows and cannot take 1"):
        cache.update(0, *torch.zeros(2, 1, 2, 1, 4))


@pytest.mark.parametrize("rotary", [False, True])
def test_self_attention_alone_with_a_cache(rotary):
    torch.manual_seed(0)
    layer, x, cache = (
        SelfAttention(8, 2, rotary).double(),
        torch.randn(2, 6, 8).double(),
        KVCache(),
    )
    parts = [layer(part, "causal", cache=cache) for part in x.split([1, 2, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x, "causal"), **EXACT)


def test_cross_attention_alone_with_a_cache():
    torch.manual_seed(0)
    layer, x, cache = CrossAttention(8, 2).double(), torch.randn(2, 6, 8).double(), KVCache()
    for memory in torch.randn(2, 2, 5, 8).double():  # another one replaces the first
        for part in x.split(2, dim=1):
            found = layer(part, memory, cache=cache)
            torch.testing.assert_close(found, layer(part, memory), **EXACT)


@pytest.mark.parametrize("rows", [[2, 0, 1], [1], [0, 0, 2, 2]])
def test_after_reordering_rows_attend_to_the_memory_that_is_given(rows):
    model, src = shake(small()), sentences(3, 5)
    tgt = sentences(3, 4, seed=1, shortest=4)
    memory, mask = model.encode(src)
    cache = KVCache()
    model.decode(tgt[:, :3], memory, mask, cache)
    cache.reorder(torch.tensor(rows))
    found = model.decode(tgt[rows, 3:], memory[rows], mask[rows], cache)
    expected = model.decode(tgt[rows], memory[rows], mask[rows])
    torch.testing.assert_close(found, expected[:, 3:], **EXACT)


def test_a_memory_is_projected_once():
    model, src = small(), sentences(2, 5)
    tgt = sentences(2, 4, seed=1, shortest=4)
    memory, mask = model.encode(src)
    layer, cache, inputs = model.decoder.layers[0].multihead_attn, KVCache(), []
    project = layer.project
    layer.project = lambda *x: inputs.append(len(x)) or project(*x)
    for part in tgt.split(1, dim=1):
        model.decode(part, memory, mask, cache)
    assert inputs == [3, 1, 1, 1]


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
def test_positions_beyond_the_table(scheme):
    positions = Positions(scheme, 8, 2, 10)
    x = torch.zeros(1, 3, 8)
    assert positions.add(x, 7).shape == x.shape
    for offset in (8, 9, 10, -1):
        with pytest.raises(ValueError, match=r"x at the positions .* must lie in 0 to 9"):
            positions.add(x, offset)


@pytest.mark.parametrize("position", POSITIONS)
def test_padding_before_a_token_is_refused(position):
    model = small(position=position)
    for row in ([0, 4, 5, 6], [4, 0, 5, 0]):
        src = torch.tensor([[3, 4, 5, 0], row])
        with pytest.raises(ValueError, match=r"src has padding \(0\) before a token in row 1"):
            model(src, torch.tensor([[1], [1]]))
        with pytest.raises(ValueError, match=r"src has padding \(0\) before a token in row 1"):
            greedy(model, src, 3)


# --- evaluation mode --------------------------------------------------------------------------


def modes(model):
    return [part.training for part in model.modules()]


@pytest.mark.parametrize("order", ["nested", "crossed"])
def test_overlapping_evaluation(order):
    model = small().train()
    model.encoder.eval()
    before = modes(model)
    blocks = evaluation(model), evaluation(model.decoder)
    blocks[0].__enter__()
    blocks[1].__enter__()
    assert not any(modes(model))
    first, last = (1, 0) if order == "nested" else (0, 1)
    blocks[first].__exit__(None, None, None)
    assert not any(modes((model, model.decoder)[last]))
    blocks[last].__exit__(None, None, None)
    assert modes(model) == before
    with pytest.raises(ZeroDivisionError), evaluation(model):
        raise ZeroDivisionError
    assert modes(model) == before


def test_threads_that_generate_with_one_model():
    """Blocks of evaluation overlap in every order; dropout is off in each of them."""
    model, src = small(dropout=0.9, num_encoder_layers=1).train(), sentences(2, 5)
    with evaluation(model):
        expected = model.encode(src)[0]

    def encode(_):
        with evaluation(model):
            return model.encode(src)[0]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(encode, range(40)):
            torch.testing.assert_close(found, expected, **EXACT)
    assert all(modes(model))


# --- what hides nothing -----------------------------------------------------------------------


def test_a_mask_that_hides_nothing_changes_nothing():
    model, src, tgt = shake(small()), sentences(2, 5, shortest=5), sentences(2, 4)
    memory, mask = model.encode(src)
    assert mask.all() and mask.shape == (2, 1, 1, 5)
    torch.testing.assert_close(
        model.decode(tgt, memory, mask), model.decode(tgt, memory), **EXACT
    )
    torch.testing.assert_close(
        model.encoder(model.embed(src, model.src_embed), mask), memory, **EXACT
    )


# --- the loss ---------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(smoothing=st.floats(0, 1), vocab=st.integers(2, 9), seed=st.integers(0, 99))
def test_loss_is_the_formula(smoothing, vocab, seed):
    targets = sentences(3, 5, vocab, seed)
    logits = torch.randn(
        3, 5, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    loss, count = label_smoothing_loss(logits, targets, smoothing=smoothing)
    expected = 0.0
    for row, target in zip(logits.flatten(0, 1), targets.flatten()):
        if target != 0:
            log_p = row.log_softmax(-1)
            expected -= (1 - smoothing) * log_p[target].item() + smoothing * log_p.mean().item()
    assert (
        math.isclose(loss.item(), expected, rel_tol=1e-10, abs_tol=1e-10)
        and count == (targets != 0).sum()
    )


def test_it_learns_to_copy():
    torch.manual_seed(0)
    model = Transformer(12, None, 32, 4, 1, 1, 64, 0.0, norm_first=True, max_length=8)
    words = torch.randint(3, 12, (512, 5))
    tgt = torch.cat([torch.ones(512, 1, dtype=torch.int64), words], dim=1)

    def loss_fn(model, batch):
        return label_smoothing_loss(
            model(batch[0], batch[1][:, :-1]), batch[1][:, 1:], smoothing=0.0
        )

    history = fit(
        model,
        shuffled_batches(words, tgt, batch_size=64),
        loss_fn=loss_fn,
        steps=150,
        lr=5e-3,
        warmup=20,
        log_every=50,
    )
    assert history[-1]["loss"] < 0.5 < 1 < history[0]["loss"]


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "src, tgt, error, words",
    [
        (
            torch.tensor([[1, 20]]),
            torch.tensor([[1]]),
            ValueError,
            r"src holds the token 20; it must be from 0 to 19",
        ),
        (
            torch.tensor([[1]]),
            torch.tensor([[-1, 3]]),
            ValueError,
            r"tgt holds the token -1; it must be from 0 to 19",
        ),
        (
            torch.ones(1, 33, dtype=torch.int64),
            torch.tensor([[1]]),
            ValueError,
            r"src ends at token 33; there are max_length \(32\) positions",
        ),
        (
            torch.tensor([[1], [2]]),
            torch.tensor([[1]]),
            ValueError,
            r"tgt has 1 rows; for 2 sources it must have",
        ),
        (
            torch.tensor([[1.0]]),
            torch.tensor([[1]]),
            TypeError,
            r"src of dtype torch.float32 must be torch.int64 or",
        ),
        (
            torch.tensor([1]),
            torch.tensor([[1]]),
            ValueError,
            r"src of shape \(1,\) must be \(B, N\)",
        ),
        (
            torch.ones(1, 0, dtype=torch.int64),
            torch.tensor([[1]]),
            ValueError,
            r"src of shape \(1, 0\) must be \(B, N\)",
        ),
    ],
)
def test_bad_tokens(src, tgt, error, words):
    with pytest.raises(error, match=words):
        small()(src, tgt)


def test_bad_positions_with_a_cache():
    model, src = small(), sentences(1, 3)
    memory, mask = model.encode(src)
    cache = KVCache()
    model.decode(torch.ones(1, 32, dtype=torch.int64), memory, mask, cache)
    with pytest.raises(
        ValueError, match=r"tgt ends at token 33; there are max_length \(32\) positions"
    ):
        model.decode(torch.ones(1, 1, dtype=torch.int64), memory, mask, cache)
    with pytest.raises(ValueError, match=r"tgt has 2 rows; for 1 sources"):
        model.decode(torch.ones(2, 1, dtype=torch.int64), memory, mask)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(nhead=3), r"embed_dim \(16\) must be divisible by num_heads \(3\)"),
        (dict(activation="tanh"), r"activation \('tanh'\) must be one of \['relu', 'gelu'"),
        (dict(dropout=1.5), r"dropout \(1.5\) must be in \[0, 1\)"),
        (dict(pad_id=20), r"pad_id \(20\) must be a token, from 0 to 19"),
        (
            dict(tgt_vocab=10, pad_id=15),
            r"pad_id \(15\) must be a token, from 0 to 9",
        ),
    ],
)
def test_bad_settings(options, words):
    with pytest.raises(ValueError, match=words):
        small(**options)


def test_torch_with_another_activation():
    theirs = nn.Transformer(
        8, 2, 1, 1, 8, 0.0, activation=torch.tanh, batch_first=True
    ).double()
    ours, x = from_torch(theirs, 20), torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(ours.encoder(x), theirs.encoder(x), rtol=0, atol=1e-10)


def test_torch_with_layers_that_differ():
    """Activation, eps, order of norms, width, and heads are those of each layer."""
    torch.manual_seed(0)
    options = dict(dropout=0.0, batch_first=True)
    layers = [
        nn.TransformerEncoderLayer(8, 2, 8, activation="gelu", layer_norm_eps=0.1, **options),
        nn.TransformerEncoderLayer(8, 4, 12, norm_first=True, activation=nn.PReLU(), **options),
    ]
    encoder = nn.TransformerEncoder(layers[0], 2, nn.LayerNorm(8, eps=0.3))
    encoder.layers[1] = layers[1]
    layer = nn.TransformerDecoderLayer(
        8, 2, 16, activation=torch.tanh, norm_first=True, layer_norm_eps=0.2, **options
    )
    theirs = nn.Transformer(
        8,
        2,
        custom_encoder=encoder,
        custom_decoder=nn.TransformerDecoder(layer, 3),
        batch_first=True,
    ).double()
    shake(theirs)
    ours = from_torch(theirs, 20, max_length=9)
    x, y = (torch.randn(2, n, 8, dtype=torch.float64) for n in (5, 4))
    mask = ~causal_mask(4)
    torch.testing.assert_close(
        ours.decoder(y, ours.encoder(x), "causal"), theirs(x, y, tgt_mask=mask), **EXACT
    )
    assert ours.decoder.norm is None and ours.positions.table.dtype == torch.float64
    given, copied = layers[1].activation, ours.encoder.layers[1].feed_forward.activation
    assert copied is not given and torch.equal(copied.weight, given.weight)


def test_torch_with_what_ours_has_not():
    theirs = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    for options in (dict(norm_first=True), dict(final_norm=False), dict(d_model=4)):
        with pytest.raises(TypeError, match=rf"{next(iter(options))} .* is no option"):
            from_torch(theirs, 20, **options)
    theirs.decoder.layers[0].multihead_attn.add_zero_attn = True
    with pytest.raises(
        ValueError, match=r"multihead_attn of the layer must have add_zero_attn"
    ):
        from_torch(theirs, 20)
    theirs.encoder.layers[0] = nn.Linear(8, 8)
    with pytest.raises(TypeError, match=r"layer \(Linear\)"):
        from_torch(theirs, 20)
    with pytest.raises(RuntimeError, match="bias"):
        from_torch(nn.Transformer(8, 2, 1, 1, 8, bias=False, batch_first=True), 20)


def test_layers_do_not_share_the_parameters_of_an_activation():
    activation = nn.PReLU()
    model = small(activation=activation)
    own = {id(part) for part in model.modules() if isinstance(part, nn.PReLU)}
    assert len(own) == 5 and id(activation) not in own
    label_smoothing_loss(model(sentences(2, 5), sentences(2, 4)), sentences(2, 4, seed=2))[
        0
    ].backward()
    layers = [*model.encoder.layers, *model.decoder.layers]
    grads = [layer.feed_forward.activation.weight.grad.item() for layer in layers]
    assert len(set(grads)) == 5


def test_a_failed_step_leaves_the_cache_as_it_was():
    model, cache = small(), None
    src, tgt = torch.randint(3, 20, (2, 6)), torch.randint(3, 20, (2, 4))
    memory, mask = model.encode(src)
    cache = KVCache()
    model.decode(tgt[:, :2], memory, mask, cache)
    narrow = (torch.arange(4) < 3).expand(2, 1, 1, 4)
    fresh = KVCache()  # a memory counts in the first call only
    for own, wrong in ((cache, (memory, narrow)), (fresh, (memory[..., :8], mask))):
        before = len(own)
        with pytest.raises((ValueError, RuntimeError)):
            model.decode(tgt[:, 2:], *wrong, own)
        assert len(own) == before
    with pytest.raises(ValueError, match="cache has 2 rows and cannot take 1"):
        model.decode(tgt[:1, 2:], memory[:1], mask[:1], cache)
    model.decoder.layers[2].feed_forward.linear1.forward = None
    with pytest.raises(TypeError):  # in the last layer, when the others have read
        model.decode(tgt[:, 2:], memory + 1, mask, cache)
    with pytest.raises(TypeError):
        model.decode(tgt, memory + 1, mask, fresh)
    del model.decoder.layers[2].feed_forward.linear1.forward
    whole = model.decode(tgt, memory, mask)
    found = model.decode(tgt[:, 2:], memory, mask, cache)
    torch.testing.assert_close(found, whole[:, 2:], rtol=0, atol=1e-10)
    torch.testing.assert_close(
        model.decode(tgt, memory, mask, fresh), whole, rtol=0, atol=1e-10
    )


def test_label_smoothing_in_half_precision_and_bad_input():
    logits, targets = torch.randn(2, 5, 8000), torch.randint(1, 8000, (2, 5))
    exact, count = label_smoothing_loss(logits.half().double(), targets)
    found, _ = label_smoothing_loss(logits.half(), targets.int())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match=r"targets of shape \(5, 2\)"):
        label_smoothing_loss(logits, targets.mT)
    for smoothing in (-0.1, math.nan, 2):
        with pytest.raises(ValueError, match=r"smoothing \(.*\)"):
            label_smoothing_loss(logits, targets, smoothing=smoothing)


def test_attention_maps_leave_every_part_in_its_mode():
    model = small().train()
    model.encoder.eval()
    model.attention_maps(torch.randint(3, 20, (2, 6)), torch.randint(3, 20, (2, 4)))
    assert (
        model.decoder.training
        and not model.encoder.training
        and not model.encoder.layers[0].training
    )


@pytest.mark.parametrize("layers", [-1, 2.0, None])
def test_numbers_of_layers(layers):
    for name in ("num_encoder_layers", "num_decoder_layers"):
        with pytest.raises(ValueError, match=rf"{name} \(.*\)"):
            small(**{name: layers})


# --- PyTorch's own tools ----------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
def test_hooks_see_every_layer(norm_first):
    model, src, tgt = small(norm_first=norm_first), sentences(2, 5), sentences(2, 4)
    kinds = (nn.Linear, nn.LayerNorm, nn.Embedding, EncoderLayer, DecoderLayer, Encoder)
    parts = {part: name for name, part in model.named_modules() if isinstance(part, kinds)}
    seen = set()
    for part in parts:
        part.register_forward_hook(lambda part, args, out: seen.add(parts[part]))
    model(src, tgt)
    assert seen == set(parts.values()) and len(seen) > 30


@pytest.mark.parametrize("cached", [False, True])
def test_a_replaced_forward_is_called(cached):
    model = small(tie_weights=False)  # so that half a weight is not half an embedding, too
    src, tgt = sentences(2, 5, shortest=5), sentences(2, 4, shortest=4)
    with torch.no_grad():
        expected = model(src, tgt)
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.forward = lambda x, part=part: 2 * F.linear(x, part.weight, part.bias)
                part.weight /= 2
                if part.bias is not None:
                    part.bias /= 2
        found = model.decode(tgt, *model.encode(src), KVCache() if cached else None)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_quantization():
    model, src, tgt = small(d_model=64).float(), sentences(3, 7), sentences(3, 5, seed=1)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert not any(isinstance(part, nn.Linear) for part in quantized.modules())
    with torch.no_grad():
        found, expected = quantized(src, tgt), model(src, tgt)
        cached = quantized.decode(tgt, *quantized.encode(src), KVCache())
    error = (found - expected).abs().max() / expected.std()
    assert 0 < error < 0.1
    torch.testing.assert_close(cached, found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", ["sinusoidal", "relative", "rotary"])
def test_compiled_in_one_graph(position):
    model = small(position=position, num_encoder_layers=1, num_decoder_layers=1)
    src, tgt = sentences(3, 7), sentences(3, 5, seed=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(src, tgt), model(src, tgt), **EXACT)


def test_compiled_decoding_with_a_cache():
    model, src = small(num_decoder_layers=1), sentences(2, 7)
    tgt = sentences(2, 4, seed=1, shortest=4)
    decode = torch.compile(model.decode, fullgraph=True, backend="aot_eager")
    cache = KVCache()
    with torch.no_grad():
        memory, mask = model.encode(src)
        parts = [decode(part, memory, mask, cache) for part in tgt.split(1, dim=1)]
        expected = model.decode(tgt, memory, mask)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, **EXACT)


def test_export_for_any_batch_and_length():
    model, auto = small(), torch.export.Dim.AUTO
    shapes = {"src": {0: auto, 1: auto}, "tgt": {0: auto, 1: auto}}
    program = torch.export.export(
        model, (sentences(2, 6), sentences(2, 5)), dynamic_shapes=shapes
    )
    src, tgt = sentences(3, 9), sentences(3, 4, seed=1)
    torch.testing.assert_close(program.module()(src, tgt), model(src, tgt), **EXACT)


def test_vmap_over_models():
    models, src, tgt = [shake(small()) for _ in range(3)], sentences(2, 5), sentences(2, 4)
    weights, buffers = torch.func.stack_module_state(models)
    found = torch.vmap(
        lambda *state: torch.func.functional_call(
            models[0], state, (src, tgt), tie_weights=False
        )
    )(weights, buffers)
    expected = torch.stack([model(src, tgt) for model in models])
    torch.testing.assert_close(found, expected, **EXACT)


def test_a_tied_model_refuses_an_untied_state_dict():
    options = dict(d_model=8, nhead=2, num_encoder_layers=1, num_decoder_layers=1)
    untied = Transformer(11, **options, tie_weights=False)
    with pytest.raises(ValueError, match=r"'src_embed.weight' and 'tgt_embed.weight'"):
        Transformer(11, **options).load_state_dict(untied.state_dict())
    Transformer(11, **options).load_state_dict(Transformer(11, **options).state_dict())
