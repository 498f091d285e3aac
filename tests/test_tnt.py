"""Transformer in Transformer against timm and the authors' names, its properties, and bad input."""
import re

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.tnt import TNT as TimmTNT
from timm.models.tnt import checkpoint_filter_fn
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnlib.attention import attention_backend
from attnlib.data import describe_scenes
from attnlib.models import create_model, list_models, load_pretrained
from attnlib.tnt import (
    TNT, Block, PixelEmbed, SplitAttention, compare_small, cut, small_backbones, small_task, train_small,
)
from backbones import close, images, same_weights

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, inner_dim=8, depth=3, num_heads_inner=2, num_heads_outer=3,
             first_stride=4, num_classes=5)
COUNTS = {"tnt_s_patch16_224": 23_768_584, "tnt_b_patch16_224": 65_428_680, "tnt_s_legacy_patch16_224": 23_755_336}


def pair(seed=0, **options):
    """The same weights here and in timm."""
    return same_weights(TNT, TimmTNT, seed, **SMALL | options)


def small(seed=0, **options):
    return pair(seed, **options)[0].double()


# --- the peer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
def test_every_name_has_timms_keys_and_shapes(name):
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=1000)
    ours = create_model(name, device="meta")
    shapes = [{key: (x.shape, x.dtype) for key, x in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1] and list(shapes[0]) == list(shapes[1])
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert sum(p.numel() for p in ours.parameters()) == COUNTS[name] and name in list_models("tnt_*")


@pytest.mark.parametrize("name", COUNTS)
def test_published_sizes_agree_with_timm(name):
    torch.manual_seed(0)
    depth = 4 if name.startswith("tnt_s") else 2
    theirs = timm.create_model(name, num_classes=1000, depth=depth).eval()
    ours = create_model(name, depth=depth).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = images(1, 224).float()
    with torch.no_grad():
        close(ours(x), theirs(x), 1e-5)
        close(ours.forward_features(x), theirs.forward_features(x), 1e-5)
        ours, theirs = ours.double(), theirs.double()
        close(ours(x.double()), theirs(x.double()))


OPTIONS = [
    {}, {"global_pool": "avg"}, {"global_pool": ""}, {"num_classes": 0}, {"qkv_bias": True}, {"in_chans": 1},
    {"img_size": (32, 48)}, {"patch_size": (8, 4)}, {"mlp_ratio": 2.5}, {"legacy": True}, {"first_stride": 2},
    {"first_stride": 8}, {"legacy": True, "patch_size": (16, 8), "global_pool": "avg"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_outputs_features_and_gradients_are_timms(options, training):
    ours, theirs = (model.double().train(training) for model in pair(**options))
    x = images(2, options.get("img_size", 32), options.get("in_chans", 3))
    close(ours.forward_features(x), theirs.forward_features(x))
    close(ours.forward_head(ours.forward_features(x), pre_logits=True),
          theirs.forward_head(theirs.forward_features(x), pre_logits=True))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [model(x) for model, x in zip((ours, theirs), inputs)]
    close(*outputs)
    for out in outputs:
        out.square().sum().backward()
    close(inputs[0].grad, inputs[1].grad)
    unused = [p.grad is None for p in ours.parameters()]
    assert unused == [p.grad is None for p in theirs.parameters()] and not any(unused)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        close(p.grad, q.grad)


@pytest.mark.parametrize("legacy", [False, True])
def test_float32_within_1e_5(legacy):
    ours, theirs = pair(legacy=legacy)
    x = images().float()
    outputs = ours(x), theirs(x)
    close(*outputs, 1e-5)
    for out in outputs:
        out.sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        close(p.grad, q.grad, 1e-5 * max(1, q.grad.abs().max().item()))


@pytest.mark.parametrize("arguments", [
    dict(), dict(indices=2), dict(indices=[0, -1], norm=True), dict(indices=[1], intermediates_only=True),
    dict(return_prefix_tokens=True), dict(output_fmt="NLC", indices=(2, 0)),
], ids=str)
def test_intermediates_are_timms(arguments):
    ours, theirs = (model.double().forward_intermediates(images(), **arguments) for model in pair())
    if not arguments.get("intermediates_only"):
        close(ours[0], theirs[0])
        ours, theirs = ours[1], theirs[1]
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def authors_names(model):
    """A state dict as the authors' repository names and shapes it."""
    rules = (
        (r"norm([12])_proj", r"proj_norm\1"), (r"pixel_embed", "patch_embed"), (r"patch_pos", "outer_pos"),
        (r"pixel_pos", "inner_pos"), (r"norm_mlp_in", "inner_norm2"), (r"norm_in", "inner_norm1"),
        (r"attn_in", "inner_attn"), (r"mlp_in", "inner_mlp"), (r"norm_out", "outer_norm1"),
        (r"attn_out", "outer_attn"), (r"norm_mlp", "outer_norm2"), (r"\.mlp\.", ".outer_mlp."),
    )
    named = {}
    for key, x in model.state_dict().items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        named[key] = x.flatten(2).mT if key == "inner_pos" else x
    return named | {"outer_tokens": torch.zeros(1, model.pixel_embed.num_patches, model.embed_dim)}


@pytest.mark.parametrize("options", [{}, {"patch_size": (8, 16)}], ids=str)
def test_the_authors_weights(options):
    model = pair(seed=1, **options)[0]
    published = authors_names(model)
    assert {"outer_tokens", "inner_pos", "blocks.0.outer_attn.qk.weight", "blocks.1.proj_norm2.bias"} <= set(published)
    other = TNT(**SMALL | options)
    assert load_pretrained(other, published) == []
    close(other(images().float()), model(images().float()), 0)
    if not options:
        theirs = TimmTNT(**SMALL)
        theirs.load_state_dict(checkpoint_filter_fn(dict(published), theirs))
        close(other(images().float()), theirs(images().float()), 1e-5)


def test_the_unused_parameter_makes_the_published_count():
    for name, million in (("tnt_s_patch16_224", 23.8), ("tnt_b_patch16_224", 65.6)):
        model = create_model(name, device="meta")
        unused = model.pixel_embed.num_patches * model.embed_dim
        assert round((COUNTS[name] + unused) / 1e6, 1) == million
    assert round(COUNTS["tnt_b_patch16_224"] / 1e6, 1) == 65.4


def test_conversion_leaves_own_names_alone():
    state_dict = small().state_dict()
    converted = TNT.convert_state_dict(state_dict)
    assert list(converted) == list(state_dict) and all(converted[k] is x for k, x in state_dict.items())


def test_positions_of_a_state_dict_are_resampled_as_timm_does():
    ours, theirs = pair(img_size=64)
    state_dict = small().float().state_dict()
    got, wanted = ours.resample_state_dict(state_dict), checkpoint_filter_fn(dict(state_dict), theirs)
    assert torch.equal(got["patch_pos"], wanted["patch_pos"]) and got["patch_pos"].shape == (1, 65, 24)
    assert torch.equal(got["pixel_pos"], state_dict["pixel_pos"]) and state_dict["patch_pos"].shape == (1, 17, 24)
    load_pretrained(ours, state_dict)
    theirs.load_state_dict(wanted)
    close(ours(images(1, 64).float()), theirs(images(1, 64).float()), 1e-5)
    wide = TNT(**SMALL | dict(img_size=(16, 64)))  # as many patches as the square has, in another grid
    assert not torch.equal(wide.resample_state_dict(state_dict)["patch_pos"], state_dict["patch_pos"])
    odd = TNT(**SMALL | dict(img_size=(16, 40)))
    with pytest.raises(ValueError, match="10 positions of patches"):
        ours.resample_state_dict(odd.state_dict())


@pytest.mark.parametrize("size", [48, (16, 40), (64, 32)])
def test_input_size_can_be_changed(size):
    ours = small()
    before, x = ours.state_dict(), images(2, size)
    ours.set_input_size(size)
    assert ours.patch_pos.requires_grad and torch.equal(ours.pixel_pos, before["pixel_pos"])
    theirs = TimmTNT(**SMALL | dict(img_size=size)).double()
    theirs.load_state_dict(checkpoint_filter_fn(dict(before), theirs))
    close(ours(x), theirs(x))
    assert ours.forward_intermediates(x)[1][0].shape[2:] == tuple(s // 8 for s in x.shape[2:])
    with pytest.raises(ValueError, match="img_size"):
        ours(images())


# --- what it computes --------------------------------------------------------------------------------------------


@given(p=st.integers(1, 4), q=st.integers(1, 4), rows=st.integers(1, 3), columns=st.integers(1, 3), chans=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_cut_is_unfold(p, q, rows, columns, chans):
    x = torch.randn(2, chans, rows * p, columns * q)
    unfolded = nn.functional.unfold(x, (p, q), stride=(p, q)).mT  # (B, n, C p q)
    assert torch.equal(cut(x, (p, q)), unfolded.reshape(-1, chans, p, q))


@pytest.mark.parametrize("legacy", [False, True])
def test_the_neighbors_of_a_patch_reach_its_words_in_the_legacy_variant_only(legacy):
    torch.manual_seed(0)
    embed, position = PixelEmbed(16, 8, 1, 6, 4, legacy, dtype=torch.float64), torch.zeros(1, 6, 2, 2).double()
    x = images(1, 16, 1)
    other = x.clone()
    other[..., :8, 5:8] += 1  # the last columns of the first patch
    changed = ((embed(x, position) - embed(other, position)).abs() > 1e-9).any(-1)  # (4 patches, 4 words)
    neighbors = [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]] if legacy else [[0] * 4] * 3
    assert changed.int().tolist() == [[0, 1, 0, 1], *neighbors]


def test_words_of_one_sentence_do_not_see_another():
    model, x = small(), images(1)
    other = x.clone()
    other[..., :8, :8] += 1  # the first patch
    words, others = model.embed(x)[0], model.embed(other)[0]
    for block in model.blocks:
        words, others = block.inner(words), block.inner(others)
    changed = ((words - others).abs() > 1e-9).flatten(1).any(1)
    assert changed.tolist() == [True] + [False] * 15


def test_word_positions_order_the_words():
    """Without them the words of a patch are a set to the inner block; the projection still tells them apart."""
    torch.manual_seed(0)
    block, words = Block(8, 24, 4, 2, 3, dtype=torch.float64), torch.randn(6, 4, 8, dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])
    close(block.inner(words)[:, order], block.inner(words[:, order]), 1e-12)
    sentences = torch.zeros(2, 4, 24, dtype=torch.float64)
    assert (block.add_words(words, sentences) - block.add_words(words[:, order], sentences)).abs().max() > 1e-3
    assert torch.equal(block.add_words(words, sentences + 3)[:, 0], sentences[:, 0] + 3)  # the class token has no words


def test_words_and_sentences_step_by_step():
    """The block against the equations, written out for one sentence and one head at a time."""
    torch.manual_seed(0)
    n, m, c, d = 3, 4, 6, 10
    block = Block(c, d, m, 2, 2, dtype=torch.float64)
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    words, sentences = torch.randn(2 * n, m, c).double(), torch.randn(2, 1 + n, d).double()

    def attend(layer, x, heads):
        q, k = layer.qk(x).chunk(2, -1)
        parts = [torch.softmax(a @ b.T * a.shape[-1] ** -0.5, -1) @ v for a, b, v in
                 zip(q.chunk(heads, -1), k.chunk(heads, -1), layer.v(x).chunk(heads, -1))]
        return layer.proj(torch.cat(parts, -1))

    got_words, got = block(words, sentences)
    for b in range(2):
        z = sentences[b].clone()
        for i in range(n):
            y = words[b * n + i]
            y = y + attend(block.attn_in, block.norm_in(y), 2)
            y = y + block.mlp_in(block.norm_mlp_in(y))
            close(got_words[b * n + i], y, 1e-12)
            z[1 + i] = z[1 + i] + block.norm2_proj(block.proj(block.norm1_proj(y.reshape(m * c))))
        z = z + attend(block.attn_out, block.norm_out(z), 2)
        close(got[b], z + block.mlp(block.norm_mlp(z)), 1e-12)


def test_the_shortcut_saves_what_it_should():
    def count(f):
        with FlopCounterMode(display=False) as counter, attention_backend("reference"):  # it knows matrix products
            f(torch.zeros(1, 3, 32, 32, dtype=torch.float64))
        return counter.get_total_flops() // 2

    model = small().eval()
    full = count(lambda x: model.forward_head(model.forward_features(x)))
    n, d = 17, 24  # of the last block N - 1 sentences are spared attention, projection and MLP; no word is
    assert full - count(model) == (n - 1) * (2 * n * d + d * d + 8 * d * d)


def test_attention_maps_reproduce_the_blocks():
    model, x = small(), images()
    words, sentences = model.embed(x)
    for inner, outer, block in zip(model.attention_maps(x, "word"), model.attention_maps(x), model.blocks, strict=True):
        assert inner.shape == (2, 16, 2, 4, 4) and outer.shape == (2, 3, 17, 17)
        close(inner.sum(-1), torch.ones(2, 16, 2, 4, dtype=torch.float64), 1e-12)
        close(outer.sum(-1), torch.ones(2, 3, 17, dtype=torch.float64), 1e-12)
        v = block.attn_in.heads(block.norm_in(words))[2]
        expected = words + block.attn_in.proj((inner.flatten(0, 1) @ v).transpose(1, 2).flatten(2))
        expected = expected + block.mlp_in(block.norm_mlp_in(expected))
        told = block.add_words(expected, sentences)
        v = block.attn_out.heads(block.norm_out(told))[2]
        told = told + block.attn_out.proj((outer @ v).transpose(1, 2).flatten(2))
        words, sentences = block(words, sentences)
        close(words, expected, 1e-12)
        close(sentences, told + block.mlp(block.norm_mlp(told)), 1e-12)


def test_word_map_puts_words_where_their_pixels_are():
    model = TNT(**SMALL | dict(img_size=(16, 24), inner_dim=2, num_heads_inner=1, first_stride=2))
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(12.0), indexing="ij")  # of sub-patches
    place = torch.stack([rows, columns])[None]  # (1, 2, 8, 12)
    words = cut(place, model.pixel_embed.word_grid).flatten(2).mT  # as the pixel embedding orders them
    assert words.shape == (6, 16, 2) and torch.equal(model.word_map(words), place)


def test_what_weight_decay_spares():
    model = small()
    assert model.no_weight_decay() == {"patch_pos", "pixel_pos", "cls_token"} <= dict(model.named_parameters()).keys()


def test_attributes_and_initialization():
    torch.manual_seed(0)
    model = create_model("tnt_s_patch16_224", depth=1, drop_path_rate=0.1)
    assert (model.num_classes, model.num_features, model.embed_dim, model.inner_dim) == (1000, 384, 384, 24)
    assert model.num_prefix_tokens == 1 and model.blocks[0].attn_in.num_heads == 4
    for x in (model.blocks[0].mlp.fc1.weight, model.patch_pos, model.pixel_pos, model.proj.weight):
        assert abs(x.std() - 0.02) < 2e-3
    assert all((p == 0).all() for n, p in model.named_parameters() if re.search(r"(fc\d|attn_\w+\.proj|head)\.bias", n))
    assert {m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)} == {1e-5}
    half = TNT(**SMALL, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and half(images().bfloat16()).isfinite().all()


def test_split_attention_is_timms():
    torch.manual_seed(0)
    for bias in (False, True):
        theirs = timm.models.tnt.Attention(24, 24, 3, qkv_bias=bias).double()
        ours = SplitAttention(24, 3, bias).double()
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(2, 7, 24, dtype=torch.float64)
        close(ours(x), theirs(x), 1e-12)
        close(ours(x, 2), theirs(x)[:, :2], 1e-12)


def test_small_training_runs():
    model, history = train_small(steps=3, batch_size=16)
    assert history[-1]["step"] == 3 and 0 <= history[-1]["accuracy"] <= 1 and model.num_classes == 10


# --- compile and export ------------------------------------------------------------------------------------------


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, message", [
    (dict(embed_dim=25), r"embed_dim \(25\) must be divisible by num_heads_outer \(3\)"),
    (dict(inner_dim=9), r"inner_dim \(9\) must be divisible by num_heads_inner \(2\)"),
    (dict(img_size=30), r"patch_size \(8, 8\) must divide the image's size, and that is \(30, 30\)"),
    (dict(img_size=(32, 4)), r"patch_size \(8, 8\) must divide the image's size, and that is \(32, 4\)"),
    (dict(first_stride=3), r"first_stride \(3\) must be at least 1 and divide patch_size \(8, 8\)"),
    (dict(first_stride=16), r"first_stride \(16\) must be at least 1 and divide patch_size \(8, 8\)"),
    (dict(first_stride=0), r"first_stride \(0\) must be at least 1 and divide patch_size \(8, 8\)"),
    (dict(patch_size=(8, 4), first_stride=8), r"first_stride \(8\) must be at least 1 and divide patch_size \(8, 4\)"),
    (dict(global_pool="max"), r"global_pool \('max'\) must be one of 'token', 'avg', ''"),
    (dict(drop_path_rate=1.0), r"drop_path_rate \(1.0\) must be in \[0, 1\)"),
])
def test_impossible_models(options, message):
    with pytest.raises(ValueError, match=message):
        TNT(**SMALL | options)


@pytest.mark.parametrize("shape, message", [
    ((2, 3, 40, 40), r"\(2, 3, 40, 40\) must be of the model's img_size \(32, 32\); set_input_size changes it"),
    ((2, 1, 32, 32), r"\(2, 1, 32, 32\) must be images \(B, in_chans, H, W\) with in_chans = 3"),
    ((3, 32, 32), r"\(3, 32, 32\) must be images"),
])
@pytest.mark.parametrize("legacy", [False, True])
def test_impossible_images(shape, message, legacy):
    with pytest.raises(ValueError, match=message):
        small(legacy=legacy)(torch.zeros(shape, dtype=torch.float64))


def test_impossible_calls():
    model = small()
    for indices, message in ((4, r"indices \(4\) must be from 1 to 3"), ([3], r"indices \[3\] must be from -3 to 2")):
        with pytest.raises(ValueError, match=message):
            model.forward_intermediates(images(), indices)
    with pytest.raises(ValueError, match="output_fmt \\('NHWC'\\) must be 'NCHW' or 'NLC'"):
        model.forward_intermediates(images(), output_fmt="NHWC")
    with pytest.raises(ValueError, match=r"level \('letter'\) must be 'sentence' or 'word'"):
        model.attention_maps(images(), "letter")
    with pytest.raises(ValueError, match=r"patch_size \(8, 8\) must divide"):
        model.set_input_size(33)
    model(images())  # and it still accepts what it did
    with pytest.raises(ValueError, match="global_pool"):
        model.reset_classifier(3, "max")
    assert model(images()).shape == (2, 5)


def test_other_weights_are_refused():
    state = small().float().state_dict()
    with pytest.raises(ValueError, match="missing: blocks.0.norm2_proj.weight"):
        load_pretrained(small(), {k: x for k, x in state.items() if "norm2_proj" not in k})
    with pytest.raises(ValueError, match="of another shape: pixel_pos"):
        load_pretrained(small(first_stride=2).float(), state)
    with pytest.raises(ValueError, match="cifar10"):
        train_small("imagenet", steps=1)


# --- the comparison of backbones ---------------------------------------------------------------------------------


def test_small_tasks():
    for name, channels, counts in (("digits", 1, (1437, 360)), ("scenes", 3, (8000, 1000))):
        (x, y), (unseen, answers) = small_task(name)
        assert x.shape == (counts[0], channels, 16, 16) and unseen.shape == (counts[1], channels, 16, 16)
        assert set(y.tolist()) == set(answers.tolist()) == set(range(10)) and len(y) == counts[0]
        assert abs(x.mean()) < 1e-3 and abs(x.std() - 1) < 0.05
    found = describe_scenes(8000, seed=0)["kind"]
    (_, labels), _ = small_task("scenes")
    pairs = {(*sorted(kinds), label) for kinds, label in zip(found.tolist(), labels.tolist())}
    assert len(pairs) == 10  # one label for each unordered pair
    with pytest.raises(ValueError, match=r"name \('cats'\) must be 'digits' or 'scenes'"):
        small_task("cats")


def test_small_backbones_are_of_one_size_and_lack_what_they_say():
    models = {name: make() for name, make in small_backbones().items()}
    counts = {name: sum(p.numel() for p in m.parameters() if p.requires_grad) for name, m in models.items()}
    assert max(counts.values()) < 1.35 * min(counts.values())
    assert all(model(torch.zeros(2, 1, 16, 16)).shape == (2, 10) for model in models.values())
    bare, words = models["TNT, no inner blocks"], torch.randn(16, 16, 8)
    assert bare.blocks[0].inner(words) is words and not any("attn_in" in n for n, _ in bare.named_parameters())
    model = models["TNT, no word positions"]
    assert (model.pixel_pos == 0).all() and not model.pixel_pos.requires_grad


def test_comparison_runs():
    rows = compare_small("digits", steps=1, seeds=[3], batch_size=4)
    assert len(rows) == 7 + 4 and {row["seed"] for row in rows} == {3}
    assert [row["equal"] for row in rows] == ["steps"] * 7 + ["time"] * 4
    assert all(0 <= row["accuracy"] <= 1 and row["steps"] >= 1 and row["seconds"] > 0 for row in rows)
