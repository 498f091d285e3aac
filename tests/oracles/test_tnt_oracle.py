"""TNT's words and sentences beside timm's, `fold` and formulas, for unusual calls."""

import math

import pytest
import timm.models.tnt as timms
import torch
import torch.nn.functional as F
from draws import batches, counts, drawn, dtypes, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import strategies as st

from attnlib import tnt as module
from attnlib.backbone import resample_abs_pos_embed
from attnlib.tnt import TNT, Block, PixelEmbed, SplitAttention, patchify, unpatchify
from helpers import build, close, pair, same_weights

patches = st.sampled_from(((8, 8), (4, 8), (8, 4), (4, 4)))


def compare(ours, theirs, inputs, dtype, steps=64):
    """A layer in a dtype beside timm's in float64, of the same rounded weights and inputs."""
    ours = ours.to(dtype)
    theirs.load_state_dict(ours.state_dict())
    found = []
    for layer, d in ((ours, dtype), (theirs.double(), torch.float64)):
        own = [x.to(d).detach().clone().requires_grad_() for x in inputs]
        out = layer(*own)
        out = out if isinstance(out, tuple) else (out,)
        total = sum(y.square().sum() for y in out)
        found.append([*out, *torch.autograd.grad(total, [*own, *layer.parameters()])])
    for a, b in zip(*found, strict=True):
        largest = b.abs().max().item() if b.numel() else 0
        assert a.dtype == dtype
        close(a.double(), b, tolerance(dtype, steps) * max(1, largest))


@drawn(map_sizes(4), map_sizes(4), batches, st.integers(1, 3), dtypes(), seeds, layouts)
def test_patches_are_cut_and_put_together(grid, size, batch, channels, dtype, seed, layout):
    image = grid[0] * size[0], grid[1] * size[1]
    x = normal((batch, channels, *image), dtype, seed, layout).requires_grad_()
    found = patchify(x, size)
    number = 0
    for b in range(batch):
        for row in range(0, image[0], size[0]):
            for column in range(0, image[1], size[1]):
                cut = x[b, :, row : row + size[0], column : column + size[1]]
                assert torch.equal(found[number], cut)
                number += 1
    assert len(found) == number
    again = unpatchify(found, grid)
    assert torch.equal(again, x)
    if batch:
        (slope,) = torch.autograd.grad(again.sum(), x)
        assert slope.eq(1).all()


@drawn(
    map_sizes(4),
    patches,
    st.sampled_from((1, 2, 4)),
    st.booleans(),
    st.integers(1, 3),
    seeds,
    layouts,
)
def test_words_are_timms(grid, patch, stride, legacy, batch, seed, layout):
    size = grid[0] * patch[0], grid[1] * patch[1]
    options = dict(img_size=size, patch_size=patch, in_chans=2, in_dim=5, stride=stride)
    options["legacy"] = legacy
    ours, theirs = same_weights(PixelEmbed, timms.PixelEmbed, seed, **options)
    position = normal((1, 5, *ours.word_grid), seed=seed)
    x = normal((batch, 2, *size), seed=seed, layout=layout)
    compare(ours, theirs, (x, position), torch.float64)
    words = ours(x, position)
    maps = ours.word_map(words)
    wide = ours.word_grid[1] * grid[1]
    assert maps.shape == (batch, 5, ours.word_grid[0] * grid[0], wide)
    if legacy:  # then words are a convolution of the whole image
        tiled = position.repeat(1, 1, *grid)
        close(maps, ours.proj(x) + tiled, 1e-12)


@drawn(
    st.sampled_from((1, 2, 4)),
    st.integers(1, 3),
    st.booleans(),
    batches,
    counts,
    dtypes(),
    seeds,
    layouts,
)
def test_attention_is_timms(heads, width, bias, batch, length, dtype, seed, layout):
    dim = heads * width
    ours, _ = same_weights(
        SplitAttention, SplitAttention, seed, dim=dim, num_heads=heads, qkv_bias=bias
    )
    theirs = timms.Attention(dim, dim, heads, qkv_bias=bias)
    if batch == 0:  # theirs fails for no sentences
        assert ours(torch.zeros(0, length, dim)).shape == (0, length, dim)
        return
    compare(ours, theirs, (normal((batch, length, dim), dtype, seed, layout),), dtype, 256)


@drawn(st.booleans(), st.booleans(), counts, counts, st.integers(1, 3), seeds)
def test_a_block_is_timms(legacy, bias, words, sentences, batch, seed):
    options = dict(
        dim=6,
        dim_out=8,
        num_pixel=words,
        num_heads_in=2,
        num_heads_out=4,
        mlp_ratio=2.5,
        qkv_bias=bias,
        legacy=legacy,
    )
    ours, theirs = same_weights(Block, timms.Block, seed, **options)
    inputs = [
        normal((batch * sentences, words, 6), seed=seed),
        normal((batch, 1 + sentences, 8), seed=seed + 1),
    ]
    found = ours.double()(tuple(inputs))
    wanted = theirs.double()(*inputs)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-9 * max(1, b.abs().max().item()))
    nothing = ours((inputs[0][:0], inputs[1][:0]))
    assert [y.shape for y in nothing] == [(0, words, 6), (0, 1 + sentences, 8)]


@drawn(
    map_sizes(4),
    patches,
    st.sampled_from((1, 2, 4)),
    st.booleans(),
    st.sampled_from(("token", "avg", "")),
    st.integers(1, 2),
    seeds,
)
def test_a_model_is_timms(grid, patch, stride, legacy, pool, batch, seed):
    size = grid[0] * patch[0], grid[1] * patch[1]
    options = dict(img_size=size, patch_size=patch, first_stride=stride, legacy=legacy)
    found, x = [], normal((batch, 3, *size), seed=seed)
    for model in pair("tnt", seed, global_pool=pool, **options):
        images = x.clone().requires_grad_()
        out = model.double()(images)
        out.square().sum().backward()
        found.append([out, images.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b, 1e-9 * max(1, b.abs().max().item()))


@drawn(map_sizes(4), map_sizes(4), seeds)
def test_another_size_is_timms_with_resampled_positions(old, new, seed):
    old, new = (tuple(8 * side for side in size) for size in (old, new))
    ours, _ = pair("tnt", seed, img_size=old)
    stored = ours.state_dict()
    grids = [tuple(side // 8 for side in size) for size in (old, new)]
    ours.set_input_size(new)
    theirs = build("tnt", peer=True, img_size=new)
    exact = stored["patch_pos"].double()
    table = exact[:, 1:].unflatten(1, grids[0]).permute(0, 3, 1, 2)
    table = F.interpolate(table, grids[1], mode="bicubic", antialias=True).flatten(2).mT
    table = torch.cat([exact[:, :1], table], dim=1).float()
    theirs.load_state_dict({**stored, "patch_pos": table})
    x = normal((2, 3, *new), torch.float32, seed)
    close(ours(x), theirs(x), 1e-4)
    wanted = resample_abs_pos_embed(stored["patch_pos"], grids[1], grids[0])
    assert torch.equal(ours.patch_pos, wanted) and ours.patch_pos.requires_grad


@pytest.mark.parametrize("level", ["sentence", "word"])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_maps_have_an_entry_for_each_image(level, batch):
    model = build("tnt", img_size=(16, 24)).double().eval()
    assert isinstance(model, TNT)
    maps = model.attention_maps(normal((batch, 3, 16, 24)), level)
    n, m = model.pixel_embed.num_patches, math.prod(model.pixel_embed.word_grid)
    shape = (3, 1 + n, 1 + n) if level == "sentence" else (n, 2, m, m)
    assert [weights.shape for weights in maps] == [(batch, *shape)] * 3
    alone = model.attention_maps(normal((3, 3, 16, 24))[-1:], level)
    for weights, own in zip(maps, alone, strict=True):
        close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        if batch == 3:
            close(weights[-1:], own)


ORACLES = {
    "patchify": test_patches_are_cut_and_put_together,
    "unpatchify": test_patches_are_cut_and_put_together,
    "PixelEmbed": test_words_are_timms,
    "SplitAttention": test_attention_is_timms,
    "Block": test_a_block_is_timms,
    "TNT": test_a_model_is_timms,
}
NOT_HERE = {"SIZES": "widths and depths of the paper, compared with timm's in test_parity.py"}


def test_every_public_name_is_tested_here_or_has_a_reason():
    assert ORACLES.keys() | NOT_HERE.keys() == set(module.__all__)
