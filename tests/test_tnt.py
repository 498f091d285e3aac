"""Transformer in Transformer: weights and sizes, what it computes, and bad input."""

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.tnt import checkpoint_filter_fn
from torch import nn

from attnlib.models import create_model, load_pretrained
from attnlib.tnt import Block, PixelEmbed, SplitAttention, patchify, unpatchify
from helpers import backbone, build, close, images, pair


def small(**options):
    return backbone("tnt", **options)


def test_a_list_of_positions_of_words_becomes_a_map():
    """The authors store (1, m, c), in reading order."""
    model = build("tnt", patch_size=(8, 16))
    stored = model.state_dict() | {"pixel_pos": model.pixel_pos.flatten(2).mT}
    assert stored["pixel_pos"].shape == (1, 8, 8)
    assert torch.equal(model.resample_state_dict(stored)["pixel_pos"], model.pixel_pos)


def test_the_unused_parameter_makes_the_published_count():
    for name, million in (("tnt_s_patch16_224", 23.8), ("tnt_b_patch16_224", 65.6)):
        model = create_model(name, device="meta")
        count = sum(p.numel() for p in model.parameters())
        unused = model.pixel_embed.num_patches * model.embed_dim
        assert round((count + unused) / 1e6, 1) == million
    assert round(count / 1e6, 1) == 65.4


def test_positions_of_a_state_dict_are_resampled_as_timm_does():
    ours, theirs = pair("tnt", img_size=64)
    state_dict = small().float().state_dict()
    got = ours.resample_state_dict(state_dict)
    wanted = checkpoint_filter_fn(dict(state_dict), theirs)
    assert torch.equal(got["patch_pos"], wanted["patch_pos"])
    assert got["patch_pos"].shape == (1, 65, 24) and state_dict["patch_pos"].shape == (
        1,
        17,
        24,
    )
    assert torch.equal(got["pixel_pos"], state_dict["pixel_pos"])
    load_pretrained(ours, state_dict)
    theirs.load_state_dict(wanted)
    close(ours(images(1, 64).float()), theirs(images(1, 64).float()), 1e-5)
    wide = build("tnt", img_size=(16, 64))  # as many patches as the square has, in another grid
    found = wide.resample_state_dict(state_dict, img_size=32)["patch_pos"]
    assert found.shape == (1, 17, 24) and not torch.equal(found, state_dict["patch_pos"])
    found = wide.resample_state_dict(state_dict)["patch_pos"]
    assert torch.equal(found, state_dict["patch_pos"])
    odd = build("tnt", img_size=(16, 40))
    with pytest.raises(ValueError, match=r"old_size \(None\)"):
        ours.resample_state_dict(odd.state_dict())


@pytest.mark.parametrize("size", [48, (16, 40), (64, 32)])
def test_input_size_can_be_changed(size):
    ours = small()
    before, x = ours.state_dict(), images(2, size)
    ours.set_input_size(size)
    assert ours.patch_pos.requires_grad and torch.equal(ours.pixel_pos, before["pixel_pos"])
    theirs = build("tnt", peer=True, img_size=size).double()
    theirs.load_state_dict(checkpoint_filter_fn(dict(before), theirs))
    close(ours(x), theirs(x), 1e-6)  # timm resamples in float32
    assert ours.forward_intermediates(x)[1][0].shape[2:] == tuple(s // 8 for s in x.shape[2:])
    with pytest.raises(ValueError, match="img_size"):
        ours(images())


# --- what it computes --------------------------------------------------------------------


@given(
    p=st.integers(1, 4),
    q=st.integers(1, 4),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    chans=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_patches_are_those_of_unfold(p, q, rows, columns, chans):
    x = torch.randn(2, chans, rows * p, columns * q)
    unfolded = nn.functional.unfold(x, (p, q), stride=(p, q)).mT  # (B, n, C p q)
    assert torch.equal(patchify(x, (p, q)), unfolded.reshape(-1, chans, p, q))
    assert torch.equal(unpatchify(patchify(x, (p, q)), (rows, columns)), x)


@pytest.mark.parametrize("legacy", [False, True])
def test_the_neighbors_of_a_patch_reach_its_words_in_the_legacy_variant_only(legacy):
    torch.manual_seed(0)
    embed = PixelEmbed(16, 8, 1, 6, 4, legacy, dtype=torch.float64)
    position, x = torch.zeros(1, 6, 2, 2).double(), images(1, 16, 1)
    other = x.clone()
    other[..., :8, 5:8] += 1  # the last columns of the first patch
    changed = ((embed(x, position) - embed(other, position)).abs() > 1e-9).any(-1)  # (4, 4)
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
    """Without them words are a set to the inner block; the projection tells them apart."""
    torch.manual_seed(0)
    block = Block(8, 24, 4, 2, 3, dtype=torch.float64)
    words, order = torch.randn(6, 4, 8, dtype=torch.float64), torch.tensor([2, 0, 3, 1])
    close(block.inner(words)[:, order], block.inner(words[:, order]), 1e-12)
    sentences = torch.zeros(2, 4, 24, dtype=torch.float64)
    told, other = (block.add_words(x, sentences) for x in (words, words[:, order]))
    assert (told - other).abs().max() > 1e-3
    assert torch.equal(told[:, 0], sentences[:, 0])  # the class token has no words


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
        parts = [
            torch.softmax(a @ b.T * a.shape[-1] ** -0.5, -1) @ v
            for a, b, v in zip(
                q.chunk(heads, -1), k.chunk(heads, -1), layer.v(x).chunk(heads, -1)
            )
        ]
        return layer.proj(torch.cat(parts, -1))

    got_words, got = block((words, sentences))
    for b in range(2):
        z = sentences[b].clone()
        for i in range(n):
            y = words[b * n + i]
            y = y + attend(block.attn_in, block.norm_in(y), 2)
            y = y + block.mlp_in(block.norm_mlp_in(y))
            close(got_words[b * n + i], y, 1e-12)
            z[1 + i] = z[1 + i] + block.norm2_proj(
                block.proj(block.norm1_proj(y.reshape(m * c)))
            )
        z = z + attend(block.attn_out, block.norm_out(z), 2)
        close(got[b], z + block.mlp(block.norm_mlp(z)), 1e-12)


def attended(layer, weights, x):
    """What a layer returns if its attention has these weights (..., h, N, N)."""
    v = layer.v(x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)  # (B, h, N, d)
    return layer.proj((weights @ v).transpose(1, 2).flatten(2))


def test_attention_maps_reproduce_the_blocks():
    model, x = small(), images()
    words, sentences = model.embed(x)
    maps = zip(
        model.attention_maps(x, "word"), model.attention_maps(x), model.blocks, strict=True
    )
    for inner, outer, block in maps:
        assert inner.shape == (2, 16, 2, 4, 4) and outer.shape == (2, 3, 17, 17)
        close(inner.sum(-1), torch.ones(2, 16, 2, 4, dtype=torch.float64), 1e-12)
        read = words + attended(block.attn_in, inner.flatten(0, 1), block.norm_in(words))
        read = read + block.mlp_in(block.norm_mlp_in(read))
        told = block.add_words(read, sentences)
        told = told + attended(block.attn_out, outer, block.norm_out(told))
        words, sentences = block((words, sentences))
        close(words, read, 1e-12)
        close(sentences, told + block.mlp(block.norm_mlp(told)), 1e-12)
    with pytest.raises(ValueError, match=r"level \('letter'\)"):
        model.attention_maps(x, "letter")


def test_word_map_puts_words_where_their_pixels_are():
    embed = PixelEmbed((16, 24), 8, 3, 2, stride=2)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(12.0), indexing="ij")
    place = torch.stack([rows, columns])[None]  # of sub-patches, (1, 2, 8, 12)
    words = patchify(place, embed.word_grid).flatten(2).mT  # as the pixel embedding orders them
    assert words.shape == (6, 16, 2) and torch.equal(embed.word_map(words), place)


def test_attributes_and_dtype():
    model = create_model("tnt_s_patch16_224", depth=1)
    assert (model.num_classes, model.num_features, model.embed_dim) == (1000, 384, 384)
    assert (model.inner_dim, model.num_prefix_tokens, model.patch_size) == (24, 1, (16, 16))
    assert {m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)} == {1e-5}
    half = build("tnt", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(images().bfloat16()).isfinite().all()


def test_split_attention_is_timms():
    torch.manual_seed(0)
    for bias in (False, True):
        theirs = timm.models.tnt.Attention(24, 24, 3, qkv_bias=bias).double()
        ours = SplitAttention(24, 3, bias).double()
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(2, 7, 24, dtype=torch.float64)
        close(ours(x), theirs(x), 1e-12)


# --- bad input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(embed_dim=25), r"embed_dim \(25\) must be divisible by num_heads \(3\)"),
        (dict(inner_dim=9), r"inner_dim \(9\) must be divisible by num_heads \(2\)"),
        (dict(img_size=30), r"patch_size \(8, 8\) must divide the image's size \(30, 30\)"),
        (dict(img_size=(32, 4)), r"patch_size \(8, 8\) must divide the image's size \(32, 4\)"),
        (
            dict(first_stride=3),
            r"first_stride \(3\) must be at least 1 and divide patch_size \(8, 8\)",
        ),
        (
            dict(first_stride=16),
            r"first_stride \(16\) must be at least 1 and divide patch_size \(8, 8\)",
        ),
        (
            dict(first_stride=0),
            r"first_stride \(0\) must be at least 1 and divide patch_size \(8, 8\)",
        ),
        (
            dict(patch_size=(8, 4), first_stride=8),
            r"first_stride \(8\) must be at least 1 and divide patch_size \(8, 4\)",
        ),
        (dict(global_pool="max"), r"global_pool \('max'\) must be one of 'token', 'avg', ''"),
        (dict(drop_path_rate=1.0), r"drop_path_rate \(1.0\) must be in \[0, 1\)"),
    ],
)
def test_impossible_models(options, message):
    with pytest.raises(ValueError, match=message):
        build("tnt", **options)


@pytest.mark.parametrize("legacy", [False, True])
def test_another_size_than_the_models_is_refused(legacy):
    model = small(legacy=legacy)
    with pytest.raises(ValueError, match=r"\(2, 3, 40, 40\)"):
        model(images(2, 40))
    with pytest.raises(ValueError, match=r"patch_size \(8, 8\)"):
        model.set_input_size(33)
    assert model(images()).shape == (2, 5)  # it still accepts what it did


def test_other_weights_are_refused():
    state = small().float().state_dict()
    with pytest.raises(ValueError, match="missing: blocks.0.norm2_proj.weight"):
        load_pretrained(small(), {k: x for k, x in state.items() if "norm2_proj" not in k})
    with pytest.raises(ValueError, match="of another shape: pixel_pos"):
        load_pretrained(small(first_stride=2).float(), state)
