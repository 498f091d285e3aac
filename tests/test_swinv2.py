"""What Swin Transformer V2 changes: norms, cosines, a bias for every window, less memory."""

import copy
import math

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmSwinV2
from timm.models.swin_transformer_v2 import WindowAttention as TimmAttention

from attnlib.attention import attention_backend, record_attention, reference
from attnlib.models import create_model, list_models, load_pretrained
from attnlib.swinv2 import (
    PatchMergingV2,
    SwinBlockV2,
    SwinTransformerV2,
    WindowAttentionV2,
    log_coordinates,
    normalize,
)
from attnlib.train import peak_memory
from helpers import backbone, build, close, exact_log_coordinates, images, in_float64

SMALL = dict(embed_dim=16, depths=(2, 2), num_heads=(1, 2), num_classes=7, drop_path_rate=0.0)


def test_published_windows_and_those_that_were_trained_are_timms():
    for name in list_models("swinv2_*"):
        with torch.device("meta"):
            theirs, ours = timm.create_model(name), create_model(name)
        for a, b in zip(theirs.layers, ours.layers, strict=True):
            for key in ("window_size", "pretrained_window_size"):
                found = [[getattr(x.attn, key) for x in stage.blocks] for stage in (a, b)]
                assert found[0] == found[1], (name, key)


@pytest.mark.parametrize("size", [(128, 128), (100, 72), (84, 140)])
def test_hugging_face(size):
    config = transformers.Swinv2Config(
        image_size=128,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[1, 2],
        window_size=8,
        num_labels=7,
        pretrained_window_sizes=[6, 3],
    )
    torch.manual_seed(0)
    theirs = in_float64(transformers.Swinv2ForImageClassification(config)).eval()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    options = dict(window_size=8, pretrained_window_sizes=(6, 3), small_maps="pad")
    ours = SwinTransformerV2(128, **options, **SMALL).double().eval()
    assert load_pretrained(ours, theirs.state_dict()) == []
    assert [b.attn.window_size for b in ours.blocks] == [(8, 8)] * 4
    x, other = images(1, size), images(1, (60, 140))  # 8 rows in stage 2 of the other
    with torch.no_grad():
        close(ours(x), theirs(x).logits)
        assert (
            ours(other) - theirs(other).logits
        ).abs().max() > 1e-7  # it cuts a window in two
        close(ours(x), theirs(x).logits)  # and forgets it again


# --- the properties of the chapter ----------------------------------------------------------


def products(layer, x):
    """Queries, keys and bias that a layer's attention is given for a map."""
    seen = []

    def keep(q, k, v, mask, bias, scale, dropout_p):
        seen.append((q, k, bias))
        return v

    with attention_backend(keep):
        layer(x)
    return seen[0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(-3, 3), st.floats(-8, 12))
def test_logits_are_bounded_and_free_of_the_amplitude(seed, magnitude, scale):
    torch.manual_seed(seed)
    layer = WindowAttentionV2(12, 3, 4, dtype=torch.float64)
    nn.init.constant_(layer.logit_scale, scale)
    x = 10**magnitude * torch.randn(1, 4, 4, 12, dtype=torch.float64)
    with torch.no_grad():
        q, k, bias = products(layer, x)
        assert (q @ k.mT).abs().max() <= min(math.exp(scale), 100) * (1 + 1e-12)
        assert bias.min() > 0 and bias.max() < 16
        assert torch.allclose(torch.linalg.vector_norm(k, dim=-1), torch.ones(()).double())
        with record_attention() as maps:
            layer(x), layer(7 * x)
    close(maps[0], maps[1], 1e-9)


def test_normalize_in_every_precision():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=dtype)
        wanted = torch.tensor([[6.0, 8.0], [0.0, 0.0]], dtype=dtype)
        torch.testing.assert_close(normalize(x, 10.0), wanted)
    with torch.no_grad():
        half = backbone("swinv2", img_size=64, window_size=5).eval().half()
        assert torch.isfinite(half(images(1, 64).half())).all()  # with padding of length zero


def test_short_vectors_are_normalized_in_float16():
    torch.manual_seed(0)
    for size in (1e-6, 1e-4, 1e-3, 1.0, 3e4):
        x = (size * torch.randn(5, 8).sign()).half()
        wanted = 10 * F.normalize(x.double(), dim=-1)
        torch.testing.assert_close(normalize(x, 10.0).double(), wanted, atol=0, rtol=2e-3)
    zero = torch.zeros(2, 8, dtype=torch.half, requires_grad=True)  # padding
    normalize(zero, torch.tensor([[100.0], [1.0]])).sum().backward()
    assert torch.equal(zero.grad, torch.zeros_like(zero))


def test_a_float16_layer_with_short_queries_and_keys():
    torch.manual_seed(0)
    layer = WindowAttentionV2(16, 2, 4, qkv_bias=False).double()
    with torch.no_grad():
        layer.qkv.weight[:32].mul_(1e-3)
        half = copy.deepcopy(layer).half()
        x = torch.randn(1, 4, 4, 16).half()
        wanted = copy.deepcopy(half).double()(x.double())
        close(half(x).double(), wanted, 0.01 * wanted.abs().max())


def test_coordinates_and_extrapolation():
    far, near = (log_coordinates((w, w), (8, 8)).max().item() for w in (16, 8))
    assert near == pytest.approx(math.log(9) / math.log(8))
    assert far / near == pytest.approx(math.log(1 + 120 / 7) / math.log(9))
    for window, trained in (
        ((8, 8), (0, 0)),
        ((5, 3), (0, 0)),
        ((16, 12), (8, 4)),
        ((1, 1), (0, 0)),
    ):
        theirs = TimmAttention(8, window, 2, pretrained_window_size=trained)
        wanted = theirs.relative_coords_table.flatten(0, 2)
        torch.testing.assert_close(log_coordinates(window, trained), wanted)
    assert torch.equal(log_coordinates((1, 1)), torch.zeros(1, 2))


@pytest.mark.parametrize(
    "window, trained",
    [((8, 8), (0, 0)), ((5, 3), (0, 0)), ((16, 12), (8, 4)), ((1, 1), (0, 0))],
)
def test_coordinates_and_bias_keep_float64(window, trained):
    exact = exact_log_coordinates(window, trained)
    close(log_coordinates(window, trained, dtype=torch.float64), exact, 1e-15)
    half = log_coordinates(window, trained, dtype=torch.bfloat16)
    assert torch.equal(half, log_coordinates(window, trained).bfloat16())
    for layer in (
        WindowAttentionV2(8, 2, window).double(),
        WindowAttentionV2(8, 2, window, dtype=torch.float64),
    ):
        layer.pretrained_window_size = trained
        first, _, last = layer.cpb_mlp
        hidden = (exact @ first.weight.T + first.bias).clamp(min=0)
        wanted = 16 / (1 + (-hidden @ last.weight.T).exp())
        close(layer.bias_table(), wanted, 1e-12)


def test_a_block_starts_as_the_identity_and_its_branches_are_bounded():
    torch.manual_seed(0)
    block, x = SwinBlockV2(8, 2, 4, 2), torch.randn(2, 6, 6, 8)
    assert torch.equal(block(x), x)
    for p in block.parameters():
        nn.init.normal_(p, std=100.0)
    nn.init.constant_(block.norm1.weight, 0.5), nn.init.zeros_(block.norm1.bias)
    branch = block.norm1(block.attn(x))
    assert torch.linalg.vector_norm(branch, dim=-1).max() <= 0.5 * 8**0.5 + 1e-5
    merging = PatchMergingV2(8)
    assert merging(x).shape == (2, 3, 3, 16)
    assert torch.allclose(merging(1000 * x), merging(x), atol=1e-3)


# --- windows and memory -----------------------------------------------------------------------


def test_the_bias_follows_the_network_and_the_window_that_was_trained():
    torch.manual_seed(0)
    layer, x = WindowAttentionV2(8, 2, 4, 2), torch.randn(1, 8, 8, 8)
    with torch.no_grad():
        before = layer(x)
        layer.cpb_mlp[2].weight.data.normal_(std=2.0)
        after = layer(x)
        layer.set_pretrained_window(8)
        other = layer(x)
        layer.set_pretrained_window(0)
        torch.testing.assert_close(layer(x), after)
    assert not torch.allclose(before, after) and not torch.allclose(after, other)


def test_a_larger_window_keeps_the_bias_of_the_offsets_that_were_trained():
    layer = WindowAttentionV2(8, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        before = layer.bias_table().unflatten(0, (7, 7))
        layer.set_window_size((6, 5))
        after = layer.bias_table().unflatten(0, (11, 9))
        torch.testing.assert_close(after[2:9, 1:8], before)
        layer.set_window_size(9)
        after = layer.bias_table().unflatten(0, (17, 17))
        torch.testing.assert_close(after[5:12, 5:12], before)
        layer.set_window_size(4)
        torch.testing.assert_close(layer.bias_table().unflatten(0, (7, 7)), before)
    assert layer.pretrained_window_size == (4, 4)


@pytest.mark.parametrize(
    "change",
    [
        dict(img_size=256),
        dict(img_size=(96, 160)),
        dict(window_size=4),
        dict(img_size=80, window_size=(4, 5)),
    ],
    ids=str,
)
def test_set_input_size_equals_timms_model_with_pretrained_windows(change):
    ours = backbone("swinv2", img_size=64, window_size=8).eval()
    ours.set_input_size(**change)
    windows = [stage.blocks[0].attn.window_size for stage in ours.layers]
    options = SMALL | dict(num_classes=5, pretrained_window_sizes=(8, 8), window_size=windows)
    theirs = in_float64(TimmSwinV2(change.get("img_size", 64), **options)).eval()
    theirs.load_state_dict(ours.state_dict())
    for a, b in zip(ours.blocks, [b for stage in theirs.layers for b in stage.blocks]):
        assert a.attn.window_size == b.window_size
    x = images(1, theirs.patch_embed.img_size)
    with torch.no_grad():
        close(ours(x), theirs(x))


def same(a, b):
    x = images(1, 32)
    with torch.no_grad():
        return torch.equal(a.eval()(x), b.eval()(x))


@pytest.mark.parametrize("window_size", [8, 4, (6, 16)])
@pytest.mark.parametrize("img_size", [64, 32, (96, 128)])
def test_weights_remember_the_window_they_were_trained_with(tmp_path, img_size, window_size):
    source = backbone("swinv2", img_size=64, window_size=8)  # windows of 8 in both stages
    wanted = copy.deepcopy(source)
    wanted.set_input_size(img_size, window_size)
    path = tmp_path / "weights.pt"
    torch.save(source.state_dict(), path)

    def fresh():
        return build("swinv2", img_size=img_size, window_size=window_size).double()

    model = fresh()
    model.load_state_dict(source.state_dict())
    assert same(model, wanted)
    again = fresh()
    again.load_state_dict(model.state_dict())
    assert same(again, wanted)
    for weights in (source.state_dict(), path):
        model = fresh()
        assert load_pretrained(model, weights) == [] and same(model, wanted)
    model = fresh()
    model.load_state_dict(dict(source.state_dict()))  # without a note
    windows = {block.attn.window_size for block in model.blocks}
    assert same(model, wanted) == (windows == {(8, 8)})


def test_the_size_that_weights_were_trained_at_tells_their_windows(tmp_path):
    source = backbone("swinv2", img_size=64, window_size=8)
    wanted = copy.deepcopy(source)
    wanted.set_input_size(32, 8)  # windows of 8 and 4
    weights = dict(source.state_dict())  # as from a safetensors file
    model = build("swinv2", img_size=32, window_size=8).double()
    load_pretrained(model, weights, img_size=64)
    assert same(model, wanted)
    given = build("swinv2", img_size=32, window_size=8, pretrained_window_sizes=(3, 3)).double()
    load_pretrained(given, weights, img_size=64)
    assert {block.attn.trained_window() for block in given.blocks} == {(3, 3)}


@pytest.mark.parametrize("size", [(40, 40), (66, 35)])
def test_windows_one_after_the_other_change_no_number(size):
    model = backbone("swinv2", drop_path_rate=0.2).train()
    x, found = images(2, size), []
    for windows in (None, 2):
        model.set_sequential_attention(windows)
        torch.manual_seed(0)
        found.append(torch.autograd.grad(model(x).square().sum(), model.parameters()))
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-9)


def test_windows_one_after_the_other_keep_the_backend():
    def sharper(q, k, v, mask, bias, scale, dropout_p):
        return reference(q, k, v, mask, bias, 2 * scale, dropout_p)

    model, x, found, counts = backbone("swinv2").train(), images(), [], []
    for windows in (None, 2):
        model.set_sequential_attention(windows)
        with attention_backend(sharper):
            loss = model(x).square().sum()
        found.append(torch.autograd.grad(loss, model.parameters()))
        with record_attention() as maps:
            model(x).sum().backward()
        counts.append(sum(weights.numel() for weights in maps))
    assert counts[0] == counts[1]
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-9)


def test_memory_is_saved():
    def call(model):
        return lambda: model(x).sum().backward()

    plain = backbone("swinv2", img_size=128, window_size=8, depths=(4,), num_heads=(4,)).float()
    sequential, recomputed = copy.deepcopy(plain), copy.deepcopy(plain)
    sequential.set_sequential_attention(1)
    recomputed.set_grad_checkpointing()
    x, peaks = images(2, 128).float(), []
    for model in (plain, sequential, recomputed):
        call(model)()
        peaks.append(peak_memory(call(model)))
    assert peaks[1] < 0.8 * peaks[0] and peaks[2] < 0.6 * peaks[0]


# --- bad input ------------------------------------------------------------------------------


def model(**options):
    return SwinTransformerV2(**SMALL | options)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: WindowAttentionV2(8, 3),
            r"dim \(8\) must be divisible by num_heads \(3\)",
        ),
        (
            lambda: WindowAttentionV2(8, 2, 0),
            r"window_size \(0, 0\) must be at least 1 token high and wide",
        ),
        (
            lambda: SwinBlockV2(8, 2, 4, 4),
            r"shift_size \(4, 4\) must be at least 0 and less than window_size \(4, 4\)",
        ),
        (lambda: model(img_size=3), r"img_size \(3, 3\) must be at least as high and wide"),
        (
            lambda: model(pretrained_window_sizes=(8, 8), depths=(1,), num_heads=(1,)),
            r"pretrained_window_sizes \(8, 8\) must be one for each of 1 stages",
        ),
        (
            lambda: model(pretrained_window_sizes=-1),
            r"pretrained_window_size \(-1, -1\) must be at",
        ),
        (
            lambda: model(pretrained_window_sizes=((8, 0), 4)),
            r"pretrained_window_size \(8, 0\) must",
        ),
        (
            lambda: model(pretrained_window_sizes=((8, 8, 8), 4)),
            r"pretrained_window_size \(8, 8, 8\)",
        ),
        (
            lambda: model().set_sequential_attention(0),
            r"windows_at_once \(0\) must be at least 1",
        ),
        (lambda: model()(torch.ones(1, 3, 3, 9)), r"x of size \(3, 9\) must be at least"),
        (lambda: model().set_input_size(window_size=0), r"window_size \(0, 0\) must be"),
        (
            lambda: load_pretrained(model(), build("swinv2", embed_dim=8).state_dict()),
            r"of another shape: patch_embed.proj.weight",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
