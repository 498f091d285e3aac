"""The parts of the Vision Transformer beside timm's and formulas, for unusual calls."""

import itertools
import math
from functools import partial

import pytest
import timm.layers
import timm.models.vision_transformer as timms
import torch
from draws import batches, counts, drawn, dtypes, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import example
from hypothesis import strategies as st

from attnlib import vit as module
from attnlib.attention import record_attention
from attnlib.vit import (
    SIZES,
    Attention,
    Block,
    LayerNorm,
    LayerScale,
    Mlp,
    PatchEmbed,
    VisionTransformer,
    _learned_tokens,
    attention_distance,
    attention_rollout,
    check_divides,
    check_images,
    patch_shares,
)
from helpers import build, close, pair, same_weights

OLDER = partial(torch.nn.LayerNorm, eps=1e-6)


def near(found, wanted, dtype, steps=16):
    """`found` of a dtype beside numbers in float64."""
    assert found.dtype == dtype and found.shape == wanted.shape
    largest = wanted.abs().max().item() if wanted.numel() else 0
    close(found.double(), wanted, tolerance(dtype, steps) * max(1, largest))


def gradients(layer, x):
    """What a layer returns, and the gradients of x and of its parameters."""
    x = x.detach().clone().requires_grad_()
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def compare(ours, theirs, x, dtype, steps=64):
    """A layer in a dtype beside timm's in float64, of the same rounded weights and inputs."""
    ours = ours.to(dtype)
    theirs.load_state_dict(ours.state_dict())
    for a, b in zip(gradients(ours, x), gradients(theirs.double(), x.double()), strict=True):
        near(a, b, dtype, steps)


# --- layers -----------------------------------------------------------------------------------


@drawn(map_sizes(3), map_sizes(5), batches, dtypes(), st.booleans(), seeds, layouts)
def test_patches_are_projected_as_timm_does(grid, patch, batch, dtype, norm, seed, layout):
    size = tuple(g * p for g, p in zip(grid, patch))
    options = dict(img_size=size, patch_size=patch, in_chans=2, embed_dim=5)
    norm_layer = torch.nn.LayerNorm if norm else None
    ours, theirs = same_weights(PatchEmbed, timm.layers.PatchEmbed, seed, **options)
    if norm:
        ours.norm, theirs.norm = norm_layer(5), norm_layer(5)
        dtype = torch.float64  # it may divide by the difference of nearly equal numbers
    x = normal((batch, 2, *size), dtype, seed, layout)
    compare(ours, theirs, x, dtype)
    grid_of = ours.grid_of(size)
    assert grid_of == ours.grid_size == theirs.grid_size == grid
    ours.flatten = False
    assert torch.equal(ours(x).flatten(1, 2), PatchEmbed.forward(_flat(ours), x))


def _flat(layer):
    """The same layer, but for a sequence."""
    other = PatchEmbed(layer.img_size, layer.patch_size, layer.in_chans, 5)
    other.proj, other.norm = layer.proj, layer.norm
    return other


SIDES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@drawn(SIDES, SIDES)
@example((4, 4), (8, 2))
@example((2, 2), (0, 4))
def test_a_patch_divides_an_image_or_is_refused(patch, size):
    fits = len(patch) == len(size) == 2 and min(patch) > 0
    if fits and all(s > 0 and s % p == 0 for s, p in zip(size, patch)):
        check_divides(patch, size)
    else:
        with pytest.raises(ValueError, match="patch_size"):
            check_divides(patch, size)


@drawn(st.lists(st.integers(0, 3), max_size=5).map(tuple), st.sampled_from((None, (2, 3))))
def test_images_are_four_axes_of_floats(shape, size):
    fits = len(shape) == 4 and shape[1] == 2 and size in (None, shape[2:])
    if fits:
        check_images(torch.zeros(shape), 2, size)
    else:
        with pytest.raises(ValueError, match=r"x of shape"):
            check_images(torch.zeros(shape), 2, size)
    for dtype in (torch.uint8, torch.bool, torch.int64):
        with pytest.raises(TypeError, match=r"x of dtype"):
            check_images(torch.zeros(shape, dtype=dtype), 2, size)


@drawn(counts, counts, counts, st.sampled_from(((), (2, 3), (0, 2))), dtypes(), seeds, layouts)
def test_the_network_of_a_position_is_timms(width, hidden, out, shape, dtype, seed, layout):
    ours, theirs = same_weights(
        Mlp,
        timm.layers.Mlp,
        seed,
        in_features=width,
        hidden_features=hidden,
        out_features=out,
    )
    compare(ours, theirs, normal((*shape, width), dtype, seed, layout), dtype)


attentions = st.fixed_dictionaries(
    dict(num_heads=st.sampled_from((1, 2, 4)), qkv_bias=st.booleans(), qk_norm=st.booleans())
)


@drawn(attentions, st.integers(1, 3), batches, counts, dtypes(), seeds, layouts)
def test_attention_is_timms(options, width, batch, length, dtype, seed, layout):
    """Heads of one channel, whose norm is their bias, are among the calls."""
    if options["qk_norm"]:
        dtype = torch.float64  # a norm of few channels may divide by rounding errors
    dim = width * options["num_heads"]
    theirs = partial(timms.Attention, norm_layer=OLDER)
    ours, theirs = same_weights(Attention, theirs, seed, dim=dim, **options)
    compare(ours, theirs, normal((batch, length, dim), dtype, seed, layout), dtype, 256)


@drawn(attentions, batches, counts, dtypes(torch.float64, torch.float32), seeds, layouts)
def test_a_block_is_timms(options, batch, length, dtype, seed, layout):
    if layout == "expanded":
        dtype = torch.float64  # tokens of equal channels, whose deviation is that of rounding
    options = options | dict(dim=12, init_values=seed % 2 / 2 or None, mlp_ratio=2.5)
    theirs = partial(timms.Block, norm_layer=OLDER)
    ours, theirs = same_weights(Block, theirs, seed, **options)
    compare(ours, theirs, normal((batch, length, 12), dtype, seed, layout), dtype, 1024)


@drawn(counts, st.sampled_from(((), (2, 3), (0, 2))), dtypes(), st.floats(1e-5, 2), seeds)
def test_scales_are_timms(dim, shape, dtype, value, seed):
    ours, theirs = (cls(dim, value) for cls in (LayerScale, timms.LayerScale))
    assert torch.equal(ours.gamma, theirs.gamma)
    compare(ours, theirs, normal((*shape, dim), dtype, seed), dtype)


@drawn(st.integers(2, 9), batches, dtypes(), seeds, layouts)
def test_the_norm_is_that_of_the_paper(dim, batch, dtype, seed, layout):
    x = 1e-3 * normal((batch, dim), dtype, seed, layout)  # so small that ε counts
    exact = x.double()
    exact = exact - exact.mean(-1, keepdim=True)
    wanted = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    near(LayerNorm(dim, dtype=dtype)(x), wanted, dtype)


@drawn(st.integers(0, 3), counts, dtypes())
def test_learned_tokens_start_near_zero(count, dim, dtype):
    tokens = _learned_tokens(count, dim, dtype=dtype)
    if count == 0:
        assert tokens is None
        return
    assert tokens.shape == (1, count, dim) and tokens.dtype == dtype and tokens.requires_grad
    assert tokens.abs().max() < 1e-5


# --- the model --------------------------------------------------------------------------------


@drawn(
    st.fixed_dictionaries(
        dict(
            class_token=st.booleans(),
            reg_tokens=st.sampled_from((0, 1, 3)),
            no_embed_class=st.booleans(),
            pre_norm=st.booleans(),
            qk_norm=st.booleans(),
            init_values=st.sampled_from((None, 0.1)),
        )
    ),
    map_sizes(4),
    st.integers(1, 3),
    seeds,
)
@example(dict(class_token=False, reg_tokens=2, no_embed_class=True), (1, 3), 1, 0)
def test_prefixes_and_dynamic_sizes_are_timms(options, grid, batch, seed):
    if not options["class_token"]:
        options = options | dict(global_pool="avg")
    ours, theirs = pair("vit", seed, dynamic_img_size=True, **options)
    x = normal((batch, 3, 8 * grid[0], 8 * grid[1]), seed=seed)
    found, wanted = (model.double().eval()(x) for model in (ours, theirs))
    close(found, wanted, 1e-5 * max(1, wanted.abs().max().item()))  # timm resamples in float32


# --- looking into it --------------------------------------------------------------------------


@drawn(map_sizes(4), map_sizes(4), batches, counts, st.integers(0, 2), dtypes(), seeds)
@example((2, 2), (1, 1), 2, 2, 1, torch.float32, 101)
@example((1, 1), (3, 2), 1, 2, 2, torch.float32, 0)
def test_distances_are_those_of_each_pair(grid, patch, batch, heads, prefix, dtype, seed):
    n = math.prod(grid) + prefix
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(batch, heads, n, n, generator=generator, dtype=torch.float64)
    weights[torch.rand(batch, heads, n, generator=generator) < seed / 100] = 0
    weights = weights.to(dtype)
    places = list(itertools.product(range(grid[0]), range(grid[1])))
    wanted = torch.zeros(heads, dtype=torch.float64)
    for head in range(heads):
        found = []
        for image in weights.double():
            for query, row in zip(places, image[head, prefix:, prefix:].tolist(), strict=True):
                lengths = [
                    math.hypot(patch[0] * (query[0] - key[0]), patch[1] * (query[1] - key[1]))
                    for key in places
                ]
                if sum(row) > 0:
                    found.append(sum(map(float.__mul__, row, lengths)) / sum(row))
        wanted[head] = sum(found) / max(1, len(found))
    out = attention_distance(weights, grid, patch, prefix)
    near(out, wanted, torch.promote_types(dtype, torch.float32))


@drawn(st.integers(1, 4), batches, counts, counts, dtypes(), seeds)
def test_a_rollout_is_the_product_of_all_steps(depth, batch, heads, length, dtype, seed):
    maps = [
        normal((batch, heads, length, length), torch.float64, seed + i).softmax(-1).to(dtype)
        for i in range(depth)
    ]
    wanted = torch.eye(length, dtype=torch.float64).expand(batch, -1, -1)
    for weights in maps:
        mean = weights.double().mean(1)
        wanted = torch.einsum("bij,bjk->bik", (mean + torch.eye(length)) / 2, wanted)
    near(attention_rollout(maps), wanted, dtype)


def test_a_rollout_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"maps \(\[\]\)"):
        attention_rollout([])


@drawn(
    st.sampled_from(("vit", "deit", "beit", "tnt")),
    st.sampled_from(("token", "avg", "")),
    map_sizes(4),
    batches,
    seeds,
)
def test_shares_are_those_of_what_the_head_reads(name, pool, grid, batch, seed):
    pool = "token" if name == "deit" else pool
    size = 8 * grid[0], 8 * grid[1]
    torch.manual_seed(seed)
    model = build(name, img_size=size, global_pool=pool).double().eval()
    x = normal((batch, 3, *size), seed=seed)
    with record_attention() as maps:
        model(x)
    maps = maps[1::2] if name == "tnt" else maps  # of sentences
    k, n = model.num_prefix_tokens, math.prod(grid)
    wanted = torch.zeros(batch, n, dtype=torch.float64)
    for i in range(batch):
        product = torch.eye(k + n, dtype=torch.float64)
        for weights in maps:
            product = (weights[i].mean(0) / 2 + torch.eye(k + n) / 2) @ product
        heads = 2 if name == "deit" else 1  # each reads a token of its own
        rows = product[:heads] if pool == "token" else product[k:]
        wanted[i] = rows.mean(0)[k:]
    found = patch_shares(model, x)
    close(found, wanted)
    assert not found.requires_grad


ORACLES = {
    "PatchEmbed": test_patches_are_projected_as_timm_does,
    "check_divides": test_a_patch_divides_an_image_or_is_refused,
    "check_images": test_images_are_four_axes_of_floats,
    "Mlp": test_the_network_of_a_position_is_timms,
    "LayerNorm": test_the_norm_is_that_of_the_paper,
    "Attention": test_attention_is_timms,
    "LayerScale": test_scales_are_timms,
    "_learned_tokens": test_learned_tokens_start_near_zero,
    "Block": test_a_block_is_timms,
    "VisionTransformer": test_prefixes_and_dynamic_sizes_are_timms,
    "attention_distance": test_distances_are_those_of_each_pair,
    "attention_rollout": test_a_rollout_is_the_product_of_all_steps,
    "patch_shares": test_shares_are_those_of_what_the_head_reads,
}
NOT_HERE = {"SIZES": "widths and depths of the paper, compared with timm's in test_parity.py"}


def test_every_public_name_is_tested_here_or_has_a_reason():
    names = ORACLES.keys() | NOT_HERE.keys()
    assert {name for name in names if name[0] != "_"} == set(module.__all__)
    assert VisionTransformer is module.VisionTransformer and SIZES is module.SIZES
