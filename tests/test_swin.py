"""Windows of both versions against a brute-force oracle, and Swin beside its peers."""

import copy
import itertools
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
import transformers
from timm.models.swin_transformer import get_relative_position_index

from attnlib.attention import masked_softmax, record_attention
from attnlib.models import create_model, load_pretrained
from attnlib.swin import (
    PatchMerging,
    SwinBlock,
    SwinTransformer,
    WindowAttention,
    WindowLayout,
    crop_map,
    cyclic_shift,
    pad_map,
    pixel_maps,
    relative_position_index,
    resize_rel_pos_bias_table,
    reverse_cyclic_shift,
    shift_mask,
    window_layout,
    window_partition,
    window_reverse,
)
from attnlib.swinv2 import WindowAttentionV2
from helpers import backbone, build, close, images, pair

both = pytest.mark.parametrize("name", ["swin", "swinv2"])
SMALL = dict(embed_dim=16, depths=(2, 2), num_heads=(1, 2), num_classes=7, drop_path_rate=0.0)
SIZES = (1, 1), (2, 5), (3, 3), (4, 4), (5, 3), (6, 6), (7, 4)
WINDOWS = (1, 1), (2, 2), (3, 3), (2, 3), (4, 4), (7, 7)


def double(size):
    return torch.randn(*size, dtype=torch.float64)


# --- windows --------------------------------------------------------------------------------


def shift_mask_bruteforce(layout):
    """All tokens of the padded map, and which of them may meet: those of one shifted cell."""

    def cell(token):
        return [(t - s) // w for t, s, w in zip(token, layout.shift, layout.window)]

    tokens = list(itertools.product(*map(range, layout.padded)))
    return tokens, torch.tensor([[cell(a) == cell(b) for b in tokens] for a in tokens])


def offset_bias(layer, tokens):
    """The bias of every pair of tokens, (h, all, all), looked up or computed one by one."""
    place = torch.tensor(tokens)
    offset = place[:, None] - place  # (all, all, 2)
    if isinstance(layer, WindowAttention):
        (rows, columns), (dy, dx) = layer.window_size, offset.unbind(-1)
        known = (dy.abs() < rows) & (dx.abs() < columns)  # others never meet
        table = layer.relative_position_bias_table.unflatten(0, (2 * rows - 1, -1))
        bias = table[dy.where(known, 0) + rows - 1, dx.where(known, 0) + columns - 1]
        return bias.permute(2, 0, 1)
    trained = [p or w for p, w in zip(layer.pretrained_window_size, layer.window_size)]
    offset = offset.double() / torch.tensor([max(t - 1, 1) for t in trained])
    offset = offset.sign() * (1 + 8 * offset.abs()).log() / math.log(8)
    return 16 * torch.sigmoid(layer.cpb_mlp(offset)).permute(2, 0, 1)


def oracle(layer, x):
    """Attention among all tokens of the padded map; brute force says who meets."""
    layout, h = layer.layout(x.shape[1:3]), layer.num_heads
    tokens, meet = shift_mask_bruteforce(layout)
    rows, columns = (p - s for p, s in zip(layout.padded, layout.size))
    x = F.pad(x, (0, 0, 0, columns, 0, rows)).flatten(1, 2)
    if isinstance(layer, WindowAttention):
        q, k, v = layer.qkv(x).chunk(3, -1)
    else:
        biases = layer.q_bias, 0, layer.v_bias
        q, k, v = (x @ w.T + b for w, b in zip(layer.qkv.weight.chunk(3), biases))
    q, k, v = (y.unflatten(-1, (h, -1)).transpose(1, 2) for y in (q, k, v))
    if isinstance(layer, WindowAttention):
        logits = q @ k.mT / q.shape[-1] ** 0.5
    else:
        cosine = F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
        logits = cosine * layer.logit_scale.exp().clamp(max=100)
    out = masked_softmax(logits + offset_bias(layer, tokens), meet) @ v
    out = out.transpose(1, 2).flatten(2).unflatten(1, layout.padded)
    return layer.proj(crop_map(out, layout.size))


@pytest.mark.parametrize("kind", [WindowAttention, WindowAttentionV2])
@pytest.mark.parametrize("small_maps", ["shrink", "pad"])
def test_every_size_window_and_shift_is_right(kind, small_maps):
    torch.manual_seed(0)
    tolerance = 1e-12 if kind is WindowAttention else 1e-4  # V2's coordinates are float32
    for count, (size, window) in enumerate(itertools.product(SIZES, WINDOWS)):
        half, full = (tuple(w // 2 for w in window), tuple(w - 1 for w in window))
        for shift in {(0, 0), half, full, (0, full[1])}:
            layer = kind(4, 2, window, shift, small_maps=small_maps, dtype=torch.float64)
            for p in layer.parameters():
                nn.init.normal_(p)
            x = double((2, *size, 4))
            ways = [None]
            if kind is WindowAttentionV2:
                layer.set_pretrained_window(count % 3)
                ways = [None, 1 + count % 2]
            with torch.no_grad():
                wanted = oracle(layer, x)
                for layer.windows_at_once in ways:
                    close(layer(x), wanted, tolerance)


def test_the_mask_lets_meet_whom_brute_force_does():
    for size, window in itertools.product(SIZES, WINDOWS):
        for shift in {(0, 0), *((s, s // 2) for s in range(1, min(window)))}:
            layout = window_layout(size, window, shift)
            tokens, meet = shift_mask_bruteforce(layout)
            number = torch.arange(len(tokens)).view(1, *layout.padded, 1)
            windows = window_partition(cyclic_shift(number, layout), layout.window)[0, ..., 0]
            found = torch.zeros_like(meet)
            for inside, allowed in zip(windows, shift_mask(layout), strict=True):
                found[inside[:, None], inside] = allowed
            assert torch.equal(found, meet), layout


def test_partition_shift_and_padding_are_undone():
    x = torch.randn(2, 6, 8, 12)
    layout = WindowLayout((6, 8), (3, 2), (1, 0), (6, 8))
    assert torch.equal(reverse_cyclic_shift(cyclic_shift(x, layout), layout), x)
    assert torch.equal(crop_map(pad_map(x, (9, 8)), (6, 8)), x)
    for heads in (1, 3):
        windows = window_partition(x, (3, 2), heads)
        assert windows.shape == (2, 8 * heads, 6, 12 // heads)
        assert torch.equal(window_reverse(windows, (3, 2), (6, 8)), x)


def test_layouts_masks_and_indices():
    mask = shift_mask(window_layout((8, 8), (4, 4), (2, 2)))
    assert mask.shape == (4, 16, 16) and mask[0].all() and mask[3].sum() == 16 * 4
    for window in ((7, 7), (2, 5)):
        theirs = get_relative_position_index(*window)
        assert torch.equal(relative_position_index(window), theirs)
    assert window_layout((3, 9), (7, 7), (3, 3)) == ((3, 9), (3, 7), (0, 3), (3, 14))
    padded = window_layout((3, 9), (7, 7), (3, 3), shrink=False)
    assert padded == ((3, 9), (7, 7), (0, 3), (7, 14))


@pytest.mark.parametrize("kind", [WindowAttention, WindowAttentionV2])
def test_weights_and_values_make_the_output(kind):
    torch.manual_seed(0)
    layer, x = kind(8, 2, 4, 2, dtype=torch.float64), double((2, 11, 9, 8))
    layout = layer.layout((11, 9))
    with record_attention() as maps:
        wanted = layer(x)
    assert [w.shape for w in maps] == [(2, 9 * 2, 16, 16)]
    close(maps[0].sum(-1), torch.ones(2, 18, 16).double())
    padded = cyclic_shift(pad_map(x, layout.padded), layout)
    qkv = layer.qkv(padded) if kind is WindowAttention else layer.project(padded)
    v = window_partition(qkv.chunk(3, -1)[2], layout.window, 2)
    out = reverse_cyclic_shift(window_reverse(maps[0] @ v, (4, 4), layout.padded), layout)
    close(layer.proj(crop_map(out, (11, 9))), wanted)


def test_merging_takes_the_tokens_column_by_column():
    merging, x = PatchMerging(2), torch.randn(1, 3, 4, 2)
    padded = F.pad(x, (0, 0, 0, 0, 0, 1))
    four = [padded[:, i::2, j::2] for j in range(2) for i in range(2)]
    torch.testing.assert_close(merging(x), merging.reduction(merging.norm(torch.cat(four, -1))))


# --- models ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("small_maps", ["shrink", "pad"])
def test_no_answer_depends_on_earlier_ones(name, small_maps):
    model = backbone(name)
    for block in model.blocks:
        block.attn.small_maps = small_maps
    inputs = [images(1, size) for size in ((64, 64), (4, 4), (30, 21), (5, 90))]
    with torch.inference_mode():
        first = [model(x) for x in inputs]
    with torch.no_grad():
        again = [model(x) for x in reversed(inputs)][::-1]
    fresh = [copy.deepcopy(model)(x) for x in inputs]
    for a, b, c in zip(first, again, fresh, strict=True):
        close(a, b)
        close(a, c)
    model(inputs[0]).sum().backward()


@both
def test_threads_share_a_model(name):
    model = backbone(name).eval()
    inputs = [images(1, size) for size in ((64, 64), (32, 64), (64, 32))]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(model, inputs * 4))
    for i, y in enumerate(found):
        close(y, model(inputs[i % 3]))


@both
def test_images_are_padded_to_whole_patches(name):
    model, x = backbone(name), images(2, (30, 21))
    close(model(x), model(F.pad(x, (0, 3, 0, 2))))
    x = images(2, 40)
    close(model(x.to(memory_format=torch.channels_last)), model(x))
    model.reset_classifier(0, "")
    assert model(x).shape == (2, 5, 5, 32)
    maps = model.forward_intermediates(x, intermediates_only=True, output_fmt="NHWC")
    assert [tuple(y.shape) for y in maps] == [(2, 10, 10, 16), (2, 5, 5, 32)]
    maps = model.forward_intermediates(x, 1, intermediates_only=True, output_fmt="NLC")
    assert [tuple(y.shape) for y in maps] == [(2, 25, 32)]


@both
def test_compiles_for_one_size_after_the_other(name):
    torch._dynamo.reset()
    model = build(name, depths=(2,), num_heads=(2,), window_size=5).eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for size in ((64, 64), (40, 100)):
        x = images(1, size).float()
        with torch.no_grad():
            close(compiled(x), model(x), 1e-5)


@both
def test_exports_for_all_sizes_that_need_padding(name):
    model, auto = build(name, depths=(2,), num_heads=(2,), window_size=7), torch.export.Dim.AUTO
    shapes = {"x": {2: auto, 3: auto}}
    example = (images(2, (64, 72)).float(),)
    program = torch.export.export(model.eval(), example, dynamic_shapes=shapes)
    for size in ((64, 72), (97, 45), (33, 120)):
        x = images(2, size).float()
        with torch.no_grad():
            close(program.module()(x), model(x), 1e-5)


@both
def test_where_a_pixel_looks(name):
    model, x = backbone(name), images(1, (60, 44))
    found, places = pixel_maps(model, x, (33, 20)), ((8, 5), (8, 5), (4, 2), (4, 2))
    assert [w.shape for w in found] == [(1, 1, 15, 11)] * 2 + [(1, 2, 8, 6)] * 2
    for weights, place in zip(found, places):
        assert weights[0, 0][place] > 0 and (weights.sum((2, 3)) < 1 + 1e-12).all()
    one = pixel_maps(model, images(1, 32), (0, 0))[2]  # no padding: all of its weights
    close(one.sum((2, 3)), torch.ones(1, 2).double())
    with pytest.raises(ValueError, match=r"pixel \(60, 0\)"):
        pixel_maps(model, x, (60, 0))


# --- the bias table -------------------------------------------------------------------------


def test_the_bias_follows_its_table():
    layer, x = WindowAttention(8, 2, 4, 2).eval(), torch.randn(1, 8, 8, 8)
    with torch.no_grad():
        before = layer(x)
        layer.relative_position_bias_table.data.normal_(std=2.0)
        after = layer(x)
        other = pickle.loads(pickle.dumps(layer))
        torch.testing.assert_close(other(x), after)
        other.load_state_dict(WindowAttention(8, 2, 4, 2).state_dict())
        assert not torch.allclose(other(x), after) and not torch.allclose(before, after)


@pytest.mark.parametrize(
    "change",
    [
        dict(img_size=128),
        dict(img_size=(96, 160)),
        dict(window_size=5),
        dict(img_size=64),
        dict(img_size=80, window_size=(4, 5)),
    ],
    ids=str,
)
def test_set_input_size_equals_timm(change):
    ours, theirs = pair("swin", img_size=112, window_size=7)
    ours.set_input_size(**change)
    theirs.set_input_size(**change)
    for (key, a), b in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=key)
    x = torch.randn(1, 3, *theirs.patch_embed.img_size)
    if "window_size" not in change or "img_size" in change:  # there timm is right
        with torch.no_grad():
            close(ours(x), theirs(x), 1e-4)


def test_weights_of_another_window_are_resampled():
    source = SwinTransformer(**SMALL)
    target = SwinTransformer(img_size=128, window_size=8, **SMALL)
    load_pretrained(target, source.state_dict())
    old, new = (m.blocks[0].attn.relative_position_bias_table for m in (source, target))
    torch.testing.assert_close(new, resize_rel_pos_bias_table(old.detach(), (8, 8)))
    constant = resize_rel_pos_bias_table(torch.ones(13 * 13, 2), (5, 9))
    torch.testing.assert_close(constant, torch.ones(9 * 17, 2))
    with pytest.raises(ValueError, match=r"old_window \(None\) .* 168 rows .* needs 169"):
        resize_rel_pos_bias_table(torch.ones(168, 2), (7, 7))
    with pytest.raises(ValueError, match=r"168 rows; the window old_window \(7, 7\) needs 169"):
        resize_rel_pos_bias_table(torch.ones(168, 2), (9, 9), (7, 7))


def test_a_table_that_fits_is_loaded_as_it_is():
    """A window of 13 by 5 tokens has 25 · 9 = 15 · 15 offsets, as many as one of 8 by 8."""
    table = torch.randn(225, 2)
    assert resize_rel_pos_bias_table(table, (13, 5)) is table
    assert resize_rel_pos_bias_table(table, (8, 8)) is table
    resized = resize_rel_pos_bias_table(table, (13, 5), (8, 8))
    assert resized.shape == table.shape and not torch.equal(resized, table)
    model = SwinTransformer(img_size=(104, 40), window_size=(13, 5), **SMALL)
    stored = {key: x.clone() for key, x in model.state_dict().items()}
    load_pretrained(model, stored)
    assert all(torch.equal(x, stored[key]) for key, x in model.state_dict().items())


# --- the peers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"], ids=["swin", "swinv2"]
)
def test_tiny_equals_timm(name):
    torch.manual_seed(0)
    theirs = timm.create_model(name, drop_path_rate=0.0).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p) * (p.ndim == 1))
    ours = create_model(name, drop_path_rate=0.0).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = images(1, ours.patch_embed.img_size).float()
    with torch.no_grad():
        wanted = ours(x)
        torch.testing.assert_close(wanted, theirs(x), rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert (ours(x).float() - wanted).abs().max() < 0.1 * wanted.abs().max()
        half = ours.bfloat16()(x.bfloat16()).float()
    assert (half - wanted).abs().max() < 0.1 * wanted.abs().max()


@both
@pytest.mark.parametrize("size", [(112, 112), (100, 60), (36, 20), (28, 144)])
def test_torchvision_pads_as_we_do(name, size):
    kinds = dict(
        block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
    )
    theirs = torchvision.models.SwinTransformer(
        [4, 4], 16, [2, 2], [1, 2], [7, 7], num_classes=5, **kinds if name == "swinv2" else {}
    )
    torch.manual_seed(0)
    for p in theirs.double().eval().parameters():
        nn.init.normal_(p, std=0.1)
    ours = build(name, img_size=224, window_size=7, small_maps="pad").double().eval()
    assert load_pretrained(ours, theirs.state_dict()) == []
    close(ours(images(2, size)), theirs(images(2, size)))


def test_hugging_face_forgets_its_shift():
    config = transformers.SwinConfig(
        embed_dim=16, depths=[2, 2], num_heads=[1, 2], num_labels=7
    )
    torch.manual_seed(0)
    theirs = transformers.SwinForImageClassification(config).double().eval()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.1)
    ours = SwinTransformer(**SMALL).double().eval()
    assert load_pretrained(ours, theirs.state_dict()) == []
    x, small = images(1, (100, 72)), images(1, 56)
    with torch.no_grad():
        first = theirs.swin(x).last_hidden_state.unflatten(1, (13, 9))
        close(ours.forward_features(x), first)
        close(ours(x), theirs(x).logits)
        theirs(small), ours(small)
        changed = theirs.swin(x).last_hidden_state.unflatten(1, (13, 9)) - first
        assert changed.abs().max() > 1e-5
        close(ours.forward_features(x), first)
        with pytest.raises(RuntimeError, match="must match"):
            theirs(images(1, 40))


# --- bad input ------------------------------------------------------------------------------


def model(**options):
    return SwinTransformer(**SMALL | options)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: WindowAttention(8, 3),
            r"dim \(8\) must be divisible by num_heads \(3\)",
        ),
        (
            lambda: WindowAttention(8, 2, 0),
            r"window_size \(0, 0\) must be at least 1 token high and wide",
        ),
        (lambda: WindowAttention(8, 2, (4, -1)), r"window_size \(4, -1\) must be at least 1"),
        (
            lambda: SwinBlock(8, 2, 4, -1),
            r"shift_size \(-1, -1\) must be at least 0 and less than window_size \(4, 4\)",
        ),
        (
            lambda: SwinBlock(8, 2, 4, 4),
            r"shift_size \(4, 4\) must be at least 0 and less than window_size \(4, 4\)",
        ),
        (
            lambda: WindowAttention(8, 2, small_maps="crop"),
            r"small_maps \('crop'\) must be 'shrink' or 'pad'",
        ),
        (
            lambda: SwinTransformer(img_size=3),
            r"img_size \(3, 3\) must be at least as high and wide as a patch",
        ),
        (
            lambda: SwinTransformer(depths=(2, 2)),
            r"depths \(2, 2\) and num_heads .* must be of one length",
        ),
        (
            lambda: model(global_pool="token"),
            r"global_pool \('token'\) must be one of 'avg', ''",
        ),
        (lambda: model()(torch.ones(1, 3, 3, 9)), r"x of size \(3, 9\) must be at least"),
        (lambda: model()(torch.ones(1, 1, 32, 32)), r"in_chans = 3"),
        (lambda: model()(torch.ones(3, 32, 32)), r"must be images \(B, in_chans, H, W\)"),
        (lambda: model().set_input_size(window_size=0), r"window_size \(0, 0\) must be"),
        (
            lambda: model().forward_intermediates(torch.ones(1, 3, 9, 9), 3),
            r"indices \(3\) must be",
        ),
        (
            lambda: model().forward_intermediates(torch.ones(1, 3, 9, 9), output_fmt="HWC"),
            "output_fmt .'HWC'. must be",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
