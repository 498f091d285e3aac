"""Calls without tokens, keys, or images, and sizes that a compiler keeps open.

Without keys a query gets zeros; without tokens or images the result is empty, of the right
shape, and gradients are zero. What cannot be empty is refused by name.
"""

import pytest
import torch
from small_models import small_supernet
from torch._dynamo.testing import CompileCounter
from torch.utils._pytree import tree_leaves

from attnlib import (
    beit,
    decoding,
    detr,
    efficient,
    gpt,
    mae,
    panoptic,
    seq2seq,
    spatial,
    transformer,
    vit_variants,
)
from attnlib.attention import AdditiveAttention, attention, attention_backend
from attnlib.multihead import MultiHeadAttention
from helpers import BACKBONES, build, close, images

F64 = torch.float64
NOT_EMPTY = r"must be \(B, N\), neither 0"


def vectors(*shape):
    return torch.randn(*shape, dtype=F64, requires_grad=True)


def tokens(*shape):
    return torch.randint(1, 11, shape)


def check_empty(call, shape, inputs=(), model=None, but=()):
    """A result of this shape, without NaN; all gradients are there and zero, `but` some."""
    found = tree_leaves(call(*inputs))
    found = [x for x in found if isinstance(x, torch.Tensor)]
    assert tuple(found[0].shape) == shape
    assert not any(x.isnan().any() for x in found if x.is_floating_point())
    sum(x.sum() for x in found if x.requires_grad).backward()
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            assert x.grad is not None and not x.grad.any()
    for name, p in model.named_parameters() if model is not None else ():
        if p.requires_grad and not name.endswith(tuple(but) or ("nothing",)):
            assert p.grad is not None and not p.grad.any(), name


# --- attention --------------------------------------------------------------------------------

SIZES = [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 2, 0, 0), (0, 0, 0, 0)]


def options_of(b, h, n, m):
    yield {}
    yield dict(mask=torch.ones(b, 1, 1, m, dtype=torch.bool))
    yield dict(bias=torch.zeros(h, n, m, dtype=F64), scale=0.5)
    yield dict(dropout_p=0.5)
    if n <= m:
        yield dict(mask="causal")


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_attention_without_anything(size, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    b, h, n, m = size
    dtype = torch.float32 if backend == "triton" else F64
    for options in options_of(*size):
        inputs = [vectors(b, h, *rest) for rest in ((n, 4), (m, 4), (m, 5))]
        inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
        with attention_backend(backend):
            check_empty(
                lambda q, k, v, o=options: attention(q, k, v, **o), (b, h, n, 5), inputs
            )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("b, n, m", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_multihead_attention_without_anything(b, n, m, bias):
    layer = MultiHeadAttention(8, 2, bias=bias, dropout=0.1).double()
    mask = torch.ones(b, 1, 1, m, dtype=torch.bool)
    for options in ({}, dict(mask=mask)):
        inputs = vectors(b, n, 8), vectors(b, m, 8)
        check_empty(
            lambda q, x, o=options: layer(q, x, **o),
            (b, n, 8),
            inputs,
            layer,
            but=["out_proj.bias"],
        )
        layer.zero_grad()
    if b == 0 or n == 0:
        check_empty(layer, (b, n, 8), [vectors(b, n, 8)], layer)
    if m == 0 and n > 0:
        out = layer(*inputs)
        expected = layer.out_proj.bias if bias else torch.zeros(8, dtype=F64)
        close(out, expected.expand_as(out), 0)


def test_additive_attention_without_keys():
    layer = AdditiveAttention(4, 4, 6).double()
    inputs = vectors(2, 3, 4), vectors(2, 0, 4), vectors(2, 0, 5)
    check_empty(layer, (2, 3, 5), inputs, layer)


MIX = torch.randn(3, 6, dtype=F64)
WITHOUT_BATCH = {
    "local": lambda q, k, v: efficient.local_attention(q, k, v, 4),
    "columns": lambda q, k, v: efficient.axial_attention(q, k, v, (2, 3), 0),
    "rows": lambda q, k, v: efficient.axial_attention(q, k, v, (2, 3), 1),
    "pooled": lambda q, k, v: efficient.pooled_attention(q, k, v, (2, 3), 1),
    "Linformer": lambda q, k, v: efficient.linformer_attention(q, k, v, MIX, MIX),
    "Nyström": lambda q, k, v: efficient.nystrom_attention(q, k, v, 2),
    "Nyström, iterated": lambda q, k, v: efficient.nystrom_attention(q, k, v, 2, iterations=6),
    "linear": lambda q, k, v: efficient.linear_attention(q, k, v),
    "causal": lambda q, k, v: efficient.linear_attention(q, k, v, causal=True),
    "Performer": lambda q, k, v: efficient.performer_attention(q, k, v, MIX[:, :4]),
    "delta": lambda q, k, v: efficient.delta_attention(q, k, v, q.detach()[..., 0]),
    "LSH": lambda q, k, v: efficient.lsh_attention(q, k, v, 4),
}
NONE = torch.randn(3, 0, dtype=F64)
WITHOUT_TOKENS = {
    name: call
    for name, call in WITHOUT_BATCH.items()
    if name in ("local", "linear", "causal", "Performer", "delta", "LSH")
} | {
    "no rows, along columns": lambda *x: efficient.axial_attention(*x, (0, 3), 0),
    "no rows, along rows": lambda *x: efficient.axial_attention(*x, (0, 3), 1),
    "no columns": lambda *x: efficient.axial_attention(*x, (3, 0), 0),
    "no grid": lambda *x: efficient.axial_attention(*x, (0, 0), 1),
    "no cells": lambda *x: efficient.pooled_attention(*x, (0, 4), 2),
    "Linformer": lambda *x: efficient.linformer_attention(*x, NONE, NONE),
}


@pytest.mark.parametrize("name", WITHOUT_BATCH)
def test_efficient_attention_without_a_batch(name):
    inputs = [vectors(0, 2, 6, 4) for _ in range(3)]
    check_empty(WITHOUT_BATCH[name], (0, 2, 6, 4), inputs)


@pytest.mark.parametrize("name", WITHOUT_TOKENS)
def test_efficient_attention_without_tokens(name):
    inputs = [vectors(2, 2, 0, 4) for _ in range(3)]
    check_empty(WITHOUT_TOKENS[name], (2, 2, 0, 4), inputs)


def test_efficient_attention_of_no_queries_or_to_no_mixture():
    q, k, v = vectors(2, 2, 0, 4), vectors(2, 2, 6, 4), vectors(2, 2, 6, 4)
    for name in ("pooled", "Linformer"):
        check_empty(WITHOUT_BATCH[name], (2, 2, 0, 4), (q, k, v))
    none = torch.randn(0, 6, dtype=F64)
    inputs = [vectors(2, 2, 6, 4) for _ in range(3)]
    check_empty(lambda *x: efficient.linformer_attention(*x, none, none), (2, 2, 6, 4), inputs)
    with pytest.raises(ValueError, match=r"landmarks \(2\)"):
        efficient.nystrom_attention(*(x[..., :0, :] for x in inputs), 2)


# --- text -------------------------------------------------------------------------------------

TEXT = dict(d_model=8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, max_length=32)
EMPTY = [(0, 3), (2, 0), (0, 0)]


def translator(position="sinusoidal"):
    model = transformer.Transformer(11, dim_feedforward=8, position=position, **TEXT)
    return model.double().eval()


@pytest.mark.parametrize("size", EMPTY, ids=str)
def test_a_transformer_refuses_what_is_empty(size):
    model, memory = translator(), torch.randn(size[0], 4, 8, dtype=F64)
    for call in (
        lambda: model.encode(tokens(*size)),
        lambda: model.decode(tokens(*size), memory),
        lambda: model(tokens(*size), tokens(*size)),
        lambda: model(tokens(2, 3), tokens(*size)),
    ):
        with pytest.raises(ValueError, match=NOT_EMPTY):
            call()
    for decode in (decoding.greedy, decoding.sample):
        with pytest.raises(ValueError, match=r"src .*(neither 0|nothing but padding)"):
            decode(model, tokens(*size), 4)
    with pytest.raises(ValueError, match=r"src .*(neither 0|nothing but padding)"):
        decoding.beam_search(model, tokens(*size), 4, 2)


def test_a_memory_of_no_tokens_is_one_that_nobody_may_see():
    model, tgt = translator(), tokens(2, 3)
    none, hidden = torch.zeros(2, 1, 1, 4, dtype=torch.bool), vectors(2, 4, 8)
    empty = vectors(2, 0, 8)
    wanted = model.decode(tgt, hidden, none)
    close(model.decode(tgt, empty), wanted, 1e-12)
    close(model.decode(tgt, empty, none[..., :0]), wanted, 1e-12)
    wanted.sum().backward()
    assert not hidden.grad.any()


def test_layers_of_a_transformer_take_no_tokens():
    model = translator()
    for size in EMPTY:
        check_empty(model.encoder, (*size, 8), [vectors(*size, 8)])
        inputs = vectors(*size, 8), vectors(size[0], 4, 8)
        check_empty(lambda x, memory: model.decoder(x, memory), (*size, 8), inputs)


@pytest.mark.parametrize("size", EMPTY, ids=str)
@pytest.mark.parametrize("options", [{}, dict(position="learned"), dict(window=2)], ids=str)
def test_a_gpt_refuses_what_is_empty(options, size):
    shape = dict(vocab_size=11, block_size=32, n_layer=1, n_head=2, n_embd=8)
    model = gpt.GPT(gpt.GPTConfig(**shape, **options))
    for call in (
        lambda: model(tokens(*size)),
        lambda: model.generate(tokens(*size), 3),
        lambda: next(model.stream(tokens(*size), 3)),
        lambda: gpt.text_loss(model, (tokens(size[0], size[1] + 1),)),
    ):
        with pytest.raises(ValueError, match=NOT_EMPTY):
            call()


def test_no_prompt_and_an_empty_one_are_refused():
    for prompts, empty in (([], r"\[\]"), ([[3], []], r"\[1\]")):
        with pytest.raises(ValueError, match=rf"with a token in each; empty: {empty}"):
            gpt.pad_left(prompts)


def test_no_sentences_and_no_codes_are_refused():
    with pytest.raises(ValueError, match=r"src of shape \(0, 3\)"):
        seq2seq.Seq2Seq(11, 11)(tokens(0, 3), tokens(0, 2))
    with pytest.raises(ValueError, match=r"tokens of shape \(0,\)"):
        beit.perplexity(tokens(0), 11)


# --- images -----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_without_images(name, training):
    model = build(name).double().train(training)
    shapes = [tuple(x.shape[1:]) for x in tree_leaves(model.eval()(images()))]
    shape = (0, *shapes[0])
    model.train(training)
    check_empty(model, shape, [images(0).requires_grad_()], model)
    kept = model.forward_intermediates(images(0), 1, intermediates_only=True)
    wanted = model.forward_intermediates(images(2), 1, intermediates_only=True)
    assert [x.shape[1:] for x in kept] == [x.shape[1:] for x in wanted]
    assert all(len(x) == 0 for x in kept)


@pytest.mark.parametrize("name", BACKBONES)
def test_maps_of_no_images(name):
    model, x = build(name).double().eval(), images(0)
    for level in ("sentence", "word") if name == "tnt" else (None,):
        options = {} if level is None else dict(level=level)
        found, wanted = (model.attention_maps(y, **options) for y in (x, images(2)))
        assert [a.shape[1:] for a in found] == [b.shape[1:] for b in wanted]
        assert not any(a.numel() for a in found)


@pytest.mark.parametrize("name", ["swin", "swinv2"])
def test_windows_with_padding_without_images(name):
    model = build(name, depths=(2,), num_heads=(2,), window_size=5).double()
    check_empty(model, (0, 5), [images(0, (36, 44)).requires_grad_()], model)


@pytest.mark.parametrize("detector", [detr.DETR, detr.BoxQueryDETR])
def test_a_detector_without_images(detector):
    model = detr.small_detr(3, detector).double()
    x, mask = images(0, 48), torch.ones(0, 48, 48, dtype=torch.bool)
    check_empty(model, (0, 10, 4), (x, mask), model)
    model.zero_grad()
    out = model(x)
    assert detr.postprocess(out, torch.zeros(0, 2)) == []
    losses = detr.SetCriterion(3)(out, [])
    assert all(not value.any() for value in losses.values())
    losses["total"].backward()
    for p in model.class_embed.parameters():
        assert not p.grad.any()
    with pytest.raises(ValueError, match=r"targets \(0\)"):
        detr.noised_targets([], 3)


def test_panoptic_segmentation_without_images():
    model = panoptic.PanopticDETR(detr.small_detr(6), num_groups=4).double()
    found = model(images(0, 48), torch.ones(0, 48, 48, dtype=torch.bool))
    assert found.masks.shape[0] == 0 and found.masks.shape[1:] == (10, 24, 24)
    found.masks.sum().backward()


def rotary():
    model = build("vit", num_heads=2)
    vit_variants.use_rotary(model)
    return model


def test_other_models_without_images():
    model = rotary().double()
    check_empty(model, (0, 5), [images(0)], model)
    model = small_supernet().double()
    check_empty(model, (0, 10), [images(0, 10, 1)])
    model = mae.MaskedAutoencoder(32, 8, 3, 24, 1, 3, 16, 1, 2).double()
    check_empty(model, (), [images(0)], model)
    model = spatial.Draw(16, 2).double()
    check_empty(model, (0, 2, 16, 16), [images(0, 16, 1)], model)


def test_pretraining_of_beit_without_images():
    model = beit.BeitForMaskedImageModeling(32, 8, 3, 16, 24, 1, 3).double()
    mask = torch.zeros(0, 4, 4, dtype=torch.bool)
    loss = lambda x: beit.masked_loss(model, (x, mask.long(), mask))[0]  # noqa: E731
    check_empty(loss, (), [images(0)], model)
    quantizer = beit.VectorQuantizer(4, 8, kmeans_steps=0).double()
    before = quantizer.embedding.clone()
    check_empty(quantizer, (0, 8), [vectors(0, 8)])
    close(quantizer.embedding, before, 0)


# --- symbolic sizes ---------------------------------------------------------------------------


def check_compiled(model, calls, graphs, tolerance=1e-12):
    """One graph for sizes from 2 on; a size of 1 may have its own, and none is made twice.

    `graphs` are the numbers of graphs after each of the `calls`.
    """
    torch._dynamo.reset()
    counter, found = CompileCounter(), []
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    with torch.no_grad():
        for inputs in calls:
            wanted = tree_leaves(model(*inputs))
            for x, y in zip(tree_leaves(compiled(*inputs)), wanted, strict=True):
                close(x, y, tolerance)
            found.append(counter.frame_count)
    torch._dynamo.reset()
    assert found == graphs


@pytest.mark.parametrize("name", BACKBONES)
def test_one_graph_for_all_batches(name):
    one_stage = dict(depths=(2,), num_heads=(2,))
    model = build(name, **(one_stage if name.startswith("swin") else dict(depth=1)))
    calls = [(images(n),) for n in (2, 3, 1, 4, 1)]
    check_compiled(model.double().eval(), calls, [1, 1, 2, 2, 2])


@pytest.mark.parametrize("position", ["sinusoidal", "relative", "alibi", "rotary"])
def test_one_graph_for_all_sentences(position):
    sizes = (2, 6, 5), (3, 9, 4), (1, 6, 5), (4, 7, 8), (1, 9, 3)
    calls = [(tokens(b, n), tokens(b, m)) for b, n, m in sizes]
    check_compiled(translator(position), calls, [1, 1, 2, 2, 2])


@pytest.mark.parametrize("options", [{}, dict(window=3, n_kv_head=1, qk_norm=True)], ids=str)
def test_one_graph_for_all_texts(options):
    shape = dict(vocab_size=11, block_size=32, n_layer=1, n_head=2, n_embd=8)
    model = gpt.GPT(gpt.GPTConfig(**shape, **options)).double().eval()
    calls = [(tokens(b, n),) for b, n in ((2, 6), (3, 9), (1, 6), (4, 5), (1, 7))]
    check_compiled(model, calls, [1, 1, 2, 2, 2])


@pytest.mark.parametrize(
    "backend, kind",
    [
        ("reference", "bias"),
        ("sdpa", "causal"),
        ("sdpa", "mask"),
        ("triton", "causal"),
        ("triton", "bias"),
    ],
)
def test_one_graph_for_all_lengths(backend, kind):
    dtype = F64
    if backend == "triton":
        pytest.importorskip("triton")
        dtype = torch.float32

    def call(q, k, v, mask, bias):
        options = dict(causal=dict(mask="causal"), mask=dict(mask=mask), bias=dict(bias=bias))
        with attention_backend(backend):
            return attention(q, k, v, **options[kind])

    calls = []
    for b, h, n, m in ((2, 3, 5, 7), (3, 4, 6, 9), (1, 3, 5, 7), (4, 2, 8, 11), (1, 4, 6, 9)):
        shapes = (b, h, n, 16), (b, h, m, 16), (b, h, m, 20)
        q, k, v = (torch.randn(*shape, dtype=dtype) for shape in shapes)
        mask, bias = torch.randn(b, 1, 1, m) > -1, torch.randn(h, n, m, dtype=dtype)
        calls.append((q, k, v, mask, bias))
    check_compiled(call, calls, [1, 1, 2, 2, 2])


def test_kernels_with_one_graph_for_more_axes_and_fewer_heads():
    pytest.importorskip("triton")
    from attnlib.flash import flash_attention

    def call(q, k, v):
        return flash_attention(q, k, v, causal=True)

    sizes = (3, 4, 5, 7), (4, 5, 6, 9), (5, 3, 8, 11)
    grouped, five = [], []
    for b, h, n, m in sizes:
        keys, values = torch.randn(b, h, m, 16), torch.randn(b, h, m, 20)
        grouped.append((torch.randn(b, 2 * h, n, 16), keys, values))
        shapes = (n, 16), (m, 16), (m, 20)
        five.append([torch.randn(b, 2, h, *shape) for shape in shapes])
    check_compiled(call, grouped, [1, 1, 1], 1e-5)
    check_compiled(call, five, [1, 1, 1], 1e-5)
