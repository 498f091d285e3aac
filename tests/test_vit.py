"""The Vision Transformer: other sizes, what it computes, and bad input."""

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attnlib.vit import (
    Attention,
    Block,
    Mlp,
    PatchEmbed,
    VisionTransformer,
    attention_distance,
    attention_rollout,
)
from helpers import backbone, build, close, images, pair


def small(**options):
    return backbone("vit", **options)


def test_dynamic_size_is_timms():
    ours, theirs = (model.double() for model in pair("vit", dynamic_img_size=True))
    for size in (32, 48, 16):  # timm resamples in float32
        close(ours(images(2, size)), theirs(images(2, size)), 1e-6)
    x = torch.cat([images(), images()[..., :8]], dim=-1)
    close(ours(x), theirs(x), 1e-6)
    assert ours.forward_intermediates(x)[1][0].shape == (2, 24, 4, 5)


def test_positions_of_a_state_dict_are_resampled_as_timm_does():
    ours, theirs = pair("vit", img_size=64)
    state_dict = small(img_size=32).float().state_dict()
    got = ours.resample_state_dict(state_dict)
    wanted = timm.models.vision_transformer.checkpoint_filter_fn(dict(state_dict), theirs)
    assert torch.equal(got["pos_embed"], wanted["pos_embed"]) and got["pos_embed"].shape == (
        1,
        65,
        24,
    )
    assert state_dict["pos_embed"].shape == (1, 17, 24)
    # as many patches as the square has, in another grid: whose they are must be said
    wide, theirs = pair("vit", img_size=(16, 64))
    theirs.pretrained_cfg = dict(input_size=(3, 32, 32))
    wanted = timm.models.vision_transformer.checkpoint_filter_fn(dict(state_dict), theirs)
    found = wide.resample_state_dict(state_dict, img_size=32)
    assert torch.equal(found["pos_embed"], wanted["pos_embed"])
    assert not torch.equal(found["pos_embed"], state_dict["pos_embed"])
    found = wide.resample_state_dict(wide.state_dict())
    assert torch.equal(found["pos_embed"], wide.pos_embed)
    # ten patches are no square: these positions can only be its own
    odd = build("vit", img_size=(16, 40))
    assert torch.equal(odd.resample_state_dict(odd.state_dict())["pos_embed"], odd.pos_embed)
    with pytest.raises(ValueError, match=r"old_size \(None\)"):
        ours.resample_state_dict(odd.state_dict())


# --- what it computes --------------------------------------------------------------------


def test_attention_maps_reproduce_the_blocks():
    model, x = small(), images()
    tokens = model.embed(x)
    after = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)
    for weights, block, y in zip(model.attention_maps(x), model.blocks, after, strict=True):
        assert weights.shape == (2, 3, 17, 17)
        v = block.attn.qkv(block.norm1(tokens))[..., 48:]  # (B, N, 24)
        v = v.unflatten(-1, (3, 8)).transpose(1, 2)  # -> (B, N, 3, 8) -> (B, 3, N, 8)
        tokens = tokens + block.attn.proj((weights @ v).transpose(1, 2).flatten(2))
        tokens = tokens + block.mlp(block.norm2(tokens))
        close(tokens[:, 1:], y, 1e-12)


def test_attention_maps_of_other_sizes():
    maps = small(dynamic_img_size=True).attention_maps(images(1, 48))
    assert maps[0].shape == (1, 3, 37, 37)


def test_without_positions_patches_have_no_order():
    model, x = small(global_pool="avg"), images(1)
    nn.init.zeros_(model.pos_embed)
    swapped = x.clone()
    swapped[..., :8, :8], swapped[..., 16:24, 8:16] = x[..., 16:24, 8:16], x[..., :8, :8]
    close(model(x), model(swapped), 1e-12)
    nn.init.normal_(model.pos_embed)
    assert (model(x) - model(swapped)).abs().max() > 1e-4


@given(
    p=st.integers(1, 5),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    chans=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_patches_three_ways(p, rows, columns, chans):
    embed = PatchEmbed((rows * p, columns * p), p, chans, 6, dtype=torch.float64)
    x = torch.randn(2, chans, rows * p, columns * p, dtype=torch.float64)
    cut = (
        x.reshape(2, chans, rows, p, columns, p)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(2, rows * columns, -1)
    )
    close(cut, nn.functional.unfold(x, p, stride=p).mT, 0)
    close(embed(x), cut @ embed.proj.weight.flatten(1).T + embed.proj.bias, 1e-12)


def test_patch_embed_as_a_grid_with_a_norm():
    torch.manual_seed(0)
    embed = PatchEmbed(16, 4, 3, 8, norm_layer=nn.LayerNorm, flatten=False)
    grid = embed(torch.randn(2, 3, 16, 16))
    assert grid.shape == (2, 4, 4, 8) and grid.mean(-1).abs().max() < 1e-5
    assert set(embed.state_dict()) == {"proj.weight", "proj.bias", "norm.weight", "norm.bias"}


def test_mlp_and_attention_are_timms():
    torch.manual_seed(0)
    theirs = timm.models.vision_transformer.Block(24, 3, qkv_bias=True).double()
    ours = Block(24, 3).double()
    ours.load_state_dict({k: torch.randn_like(x) for k, x in theirs.state_dict().items()})
    theirs.load_state_dict(ours.state_dict())
    theirs.norm1.eps = theirs.norm2.eps = 1e-6
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    close(ours.attn(x), theirs.attn(x), 1e-9)
    close(ours.mlp(x), theirs.mlp(x), 1e-9)
    close(ours(x), theirs(x), 1e-8)
    assert Mlp(4, 8, 2)(torch.zeros(3, 4)).shape == (3, 2) and Mlp(4).fc1.out_features == 4


def test_attributes_and_dtype():
    model = VisionTransformer(depth=1)
    assert (model.num_classes, model.num_features, model.embed_dim) == (1000, 768, 768)
    assert model.num_prefix_tokens == 1 and model.patch_size == (16, 16)
    half = build("vit", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(images().bfloat16()).isfinite().all()


# --- looking inside ----------------------------------------------------------------------


def test_attention_distance():
    even = torch.full((2, 3, 5, 5), 0.2)
    expected = (0 + 4 + 3 + 5) / 4  # a 2 × 2 grid of patches of 3 × 4 pixels
    close(attention_distance(even, 2, (3, 4)), torch.full((3,), expected), 1e-6)
    close(attention_distance(torch.eye(6)[None, None], (2, 3), 8, 0), torch.zeros(1), 0)
    close(attention_distance(even.bfloat16(), 2, (3, 4)), torch.full((3,), expected), 1e-6)
    with pytest.raises(ValueError, match=r"grid_size \(3, 3\) has 9 patches; weights have 4"):
        attention_distance(even, 3)


def test_rollout_is_the_product_over_the_layers():
    maps = [m.detach() for m in small().attention_maps(images())]
    rollout = attention_rollout(maps)
    close(rollout.sum(-1), torch.ones(2, 17, dtype=torch.float64), 1e-12)
    eye = torch.eye(17, dtype=torch.float64)
    expected = eye
    for m in maps:
        expected = (0.5 * m[0].mean(0) + 0.5 * eye) @ expected
    close(rollout[0], expected, 1e-12)
    assert rollout.diagonal(dim1=1, dim2=2).min() >= 1 / 8


# --- bad input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(embed_dim=25), r"embed_dim \(25\) must be divisible by num_heads \(3\)"),
        (dict(img_size=30), r"patch_size \(8, 8\) must divide the image's size \(30, 30\)"),
        (dict(img_size=(32, 4)), r"patch_size \(8, 8\) must divide the image's size \(32, 4\)"),
        (dict(global_pool="max"), r"global_pool \('max'\) must be one of 'token', 'avg', ''"),
        (dict(class_token=False), r"global_pool \('token'\) must be one of 'avg', ''"),
        (dict(drop_path_rate=1.0), r"drop_path_rate \(1.0\) must be in \[0, 1\)"),
        (dict(attn_drop_rate=1.5), r"attn_drop_rate \(1.5\) must be in \[0, 1\)"),
        (dict(num_heads=0), r"num_heads \(0\) must be"),
        (dict(num_heads=-3), r"num_heads \(-3\) must be"),
        (dict(depth=-1), r"depth \(-1\) must be an integer"),
        (dict(in_chans=0), r"in_chans \(0\) must be an integer"),
        (dict(patch_size=0), r"patch_size \(0\) must be an integer of at least 1, or two"),
        (dict(img_size=(32,)), r"img_size \(\(32,\)\) must be an integer .* or two of them"),
    ],
)
def test_impossible_models(options, message):
    with pytest.raises(ValueError, match=message):
        build("vit", **options)


def test_another_size_than_the_models_is_refused():
    message = r"\(2, 3, 40, 40\) must be of the model's img_size \(32, 32\); set_input_size"
    with pytest.raises(ValueError, match=message):
        small()(images(2, 40))


def test_dynamic_sizes_must_be_divisible_too():
    with pytest.raises(ValueError, match=r"patch_size \(8, 8\)"):
        small(dynamic_img_size=True)(torch.zeros(1, 3, 36, 32, dtype=torch.float64))


def test_an_impossible_size_changes_nothing():
    model = small()
    with pytest.raises(ValueError, match=r"patch_size \(8, 8\)"):
        model.set_input_size(33)
    assert model(images()).shape == (2, 5)


def test_attention_needs_divisible_width():
    with pytest.raises(ValueError, match=r"embed_dim \(10\)"):
        Attention(10, 3)


def test_other_blocks():
    model, x = small(), images()
    blocks = [nn.Identity(), nn.Sequential(nn.Identity(), model.blocks[1]), model.blocks[2]]
    expected = model.forward_head(model.norm(blocks[2](blocks[1](model.embed(x)))))
    model.blocks = nn.Sequential(*blocks)
    close(model(x), expected)
