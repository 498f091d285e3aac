"""The masked autoencoder step by step."""

import math

import numpy as np
import pytest
import timm.models.vision_transformer as timms
import torch
import torch.nn.functional as F
from draws import batches, counts, drawn, dtypes, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import example
from hypothesis import strategies as st

from attnlib import mae as module
from attnlib.mae import (
    MaskedAutoencoder,
    _check_noise,
    _check_widths,
    _init_weights,
    _position_embeddings,
    check_encoder_options,
    load_encoder,
    masked_loss,
    normalize_patches,
    patchify,
    random_masking,
    unpatchify,
)
from helpers import close

HALF = (torch.bfloat16, torch.float16)
SMALL = dict(embed_dim=12, depth=2, num_heads=3, in_chans=2)
SMALL |= dict(decoder_embed_dim=8, decoder_depth=2, decoder_num_heads=2)


# --- patches ----------------------------------------------------------------------------------


@drawn(map_sizes(4), map_sizes(4), batches, st.integers(1, 3), dtypes(), seeds, layouts)
def test_patches_are_those_of_unfold(grid, patch, batch, channels, dtype, seed, layout):
    size = grid[0] * patch[0], grid[1] * patch[1]
    images = normal((batch, channels, *size), dtype, seed, layout)
    found = patchify(images, patch)
    n, pixels = math.prod(grid), math.prod(patch)
    assert found.shape == (batch, n, pixels * channels) and found.dtype == dtype
    if batch:
        columns = F.unfold(images.double(), patch, stride=patch)  # (B, C p q, N)
        wanted = columns.unflatten(1, (channels, pixels)).permute(0, 3, 2, 1).flatten(2)
        assert torch.equal(found.double(), wanted)
    assert torch.equal(unpatchify(found, grid, patch), images)
    other = size[0] + 1, size[1]
    if patch[0] > 1:
        with pytest.raises(ValueError, match="patch_size"):
            patchify(torch.zeros(batch, channels, *other), patch)


@drawn(
    batches,
    counts,
    st.integers(1, 5),
    dtypes(torch.float64, torch.float32),
    st.sampled_from((1.0, 1e-3, 30.0)),
    seeds,
)
@example(2, 3, 1, torch.float64, 1.0, 0)
def test_patches_lose_mean_and_deviation(batch, count, width, dtype, scale, seed):
    """In half precision there may be no number between two others, to be their mean."""
    patches = scale * normal((batch, count, width), dtype, seed)
    if width == 1:
        with pytest.raises(ValueError, match="at least two"):
            normalize_patches(patches)
        return
    exact = patches.double().numpy()
    mean = exact.mean(-1, keepdims=True)
    wanted = (exact - mean) / np.sqrt(exact.var(-1, ddof=1, keepdims=True) + 1e-6)
    close(
        normalize_patches(patches).double(), torch.from_numpy(wanted), tolerance(dtype, 2**14)
    )


@drawn(batches, st.integers(1, 12), st.integers(-5, 105), dtypes(), seeds, layouts)
@example(1, 10, 90, torch.float32, 0, "contiguous")
def test_the_patches_of_the_smallest_noise_stay(batch, count, percent, dtype, seed, layout):
    noise = normal((batch, count), dtype, seed, layout)
    kept = count * (100 - percent) // 100
    if not 0 <= percent < 100 or kept < 1:
        with pytest.raises(ValueError, match="mask_ratio"):
            random_masking(noise, percent / 100)
        return
    keep, masked = random_masking(noise, percent / 100)
    assert keep.shape == (batch, kept) and masked.shape == noise.shape
    for row, numbers, gone in zip(noise, keep, masked, strict=True):
        assert len(set(numbers.tolist())) == kept
        assert torch.equal(row[numbers], row.sort().values[:kept])
        assert not gone[numbers].any() and gone.sum() == count - kept


# --- the model --------------------------------------------------------------------------------


def small(seed=0, **options):
    """A small autoencoder in float64 with no weight that is 0 or 1."""
    torch.manual_seed(seed)
    model = MaskedAutoencoder(**SMALL | options)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model.double()


def timms_blocks(blocks, heads):
    """timm's blocks, as functions of the weights of ours."""
    layers = []
    for block in blocks:
        dim = block.norm1.weight.shape[0]
        layer = timms.Block(dim, heads, qkv_bias=True).double()
        layer.norm1.eps = layer.norm2.eps = 1e-6
        weights = dict(block.named_parameters())
        layers.append(lambda x, f=layer, w=weights: torch.func.functional_call(f, w, (x,)))
    return layers


def loss_by_steps(model, images, hidden_of, normalize):
    """The loss of one image after the other, of which the patches `hidden_of` are hidden."""
    p = dict(model.named_parameters())
    size, rows = model.patch_size, []
    encoder = timms_blocks(model.blocks, SMALL["num_heads"])
    decoder = timms_blocks(model.decoder_blocks, SMALL["decoder_num_heads"])
    for image, hidden in zip(images, hidden_of, strict=True):
        maps = F.conv2d(
            image[None], p["patch_embed.proj.weight"], p["patch_embed.proj.bias"], stride=size
        )
        tokens = maps.flatten(2)[0].T + p["pos_embed"][0, 1:]
        seen = [i for i in range(len(tokens)) if i not in hidden]
        x = torch.cat([p["cls_token"][0] + p["pos_embed"][0, :1], tokens[seen]])[None]
        for block in encoder:
            x = block(x)
        x = F.layer_norm(x, x.shape[-1:], p["norm.weight"], p["norm.bias"], 1e-6)
        x = F.linear(x, p["decoder_embed.weight"], p["decoder_embed.bias"])[0]
        places = {number: x[1 + i] for i, number in enumerate(seen)}
        every = [places.get(i, p["mask_token"][0, 0]) for i in range(len(tokens))]
        x = (torch.stack([x[0], *every]) + p["decoder_pos_embed"][0])[None]
        for block in decoder:
            x = block(x)
        x = F.layer_norm(
            x, x.shape[-1:], p["decoder_norm.weight"], p["decoder_norm.bias"], 1e-6
        )
        x = F.linear(x, p["decoder_pred.weight"], p["decoder_pred.bias"])[0, 1:]
        pixels = F.unfold(image[None], size, stride=size)[0].T
        pixels = pixels.unflatten(1, (len(image), -1)).transpose(1, 2).flatten(1)
        if normalize:
            deviation = (pixels.var(1, keepdim=True) + 1e-6).sqrt()
            pixels = (pixels - pixels.mean(1, keepdim=True)) / deviation
        rows += [(x[i] - pixels[i]).square().mean() for i in sorted(hidden)]
    return torch.stack(rows).mean()


@drawn(
    map_sizes(3).filter(lambda grid: math.prod(grid) > 1),
    st.sampled_from(((4, 4), (2, 6), (4, 1))),
    st.integers(1, 3),
    st.floats(0.1, 0.95),
    st.booleans(),
    seeds,
    layouts,
)
@example((2, 3), (2, 6), 2, 0.75, True, 0, "expanded")
def test_loss_and_gradients_are_those_of_the_steps(
    grid, patch, batch, rate, norm, seed, layout
):
    size = grid[0] * patch[0], grid[1] * patch[1]
    model = small(seed, img_size=size, patch_size=patch, norm_pix_loss=norm)
    images = normal((batch, 2, *size), seed=seed, layout=layout)
    n = math.prod(grid)
    noise = normal((batch, n), seed=seed + 1)
    kept = int(n * (1 - rate))
    if not 0 < kept < n:
        with pytest.raises(ValueError, match="mask_ratio"):
            model(images, rate, noise)
        return
    hidden = [set(order[kept:]) for order in noise.argsort(1).tolist()]
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted = loss_by_steps(model, images, hidden, norm)
    loss, prediction, masked = model(images, rate, noise)
    close(loss, wanted, 1e-9 * max(1, wanted.item()))
    slopes = torch.autograd.grad(wanted, trained)
    for a, b in zip(torch.autograd.grad(loss, trained), slopes, strict=True):
        close(a, b, 1e-8 * max(1, b.abs().max().item()))
    assert prediction.shape == (batch, n, math.prod(patch) * 2)
    assert [set(row.nonzero().flatten().tolist()) for row in masked] == hidden


@drawn(st.sampled_from((torch.float32, *HALF)), st.booleans(), st.booleans(), seeds)
def test_lower_precision_is_near_float64(dtype, autocast, norm, seed):
    exact = small(seed, img_size=(12, 8), patch_size=4, norm_pix_loss=norm)
    images, noise = normal((2, 2, 12, 8), dtype, seed), normal((2, 6), seed=seed).float()
    used = small(seed, img_size=(12, 8), patch_size=4, norm_pix_loss=norm)
    used = used.float() if autocast else used.to(dtype)
    exact.load_state_dict({key: x.double() for key, x in used.state_dict().items()})
    wanted = exact(images.double(), 0.5, noise).loss
    own = images.float() if autocast else images
    with torch.autocast("cpu", dtype, enabled=autocast and dtype in HALF):
        found = used(own, 0.5, noise).loss
    close(found.double(), wanted, tolerance(dtype, 32) * max(1, wanted.item()))


@drawn(map_sizes(3), seeds)
def test_no_images_have_no_loss(grid, seed):
    grid = grid[0] + 1, grid[1]
    size = 4 * grid[0], 4 * grid[1]
    model = small(seed, img_size=size, patch_size=4)
    images, noise = torch.zeros(0, 2, *size).double(), torch.zeros(0, math.prod(grid))
    loss = model(images, 0.5, noise).loss
    assert loss == 0
    loss.backward()
    assert masked_loss(model, (images,), 0.5) == (0, 0)


@drawn(st.integers(1, 3), st.sampled_from((0.5, 0.75)), seeds)
def test_the_loss_of_a_batch_is_a_sum(batch, rate, seed):
    model, images = small(seed, img_size=8, patch_size=2), normal((batch, 2, 8, 8), seed=seed)
    torch.manual_seed(seed)
    wanted = batch * model(images, rate).loss
    torch.manual_seed(seed)
    loss, count = masked_loss(model, (images,), rate)
    close(loss, wanted, 1e-12)
    assert count == batch


@drawn(map_sizes(5), st.integers(1, 4), dtypes())
def test_positions_are_the_authors(grid, quarter, dtype):
    """Half of the channels tell the column, the others the row; sines before cosines."""
    dim = 4 * quarter
    rates = 1 / 10000 ** (np.arange(quarter) / quarter)
    rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
    parts = []
    for place in (columns, rows):
        angles = np.outer(place.ravel(), rates)
        parts += [np.sin(angles), np.cos(angles)]
    wanted = np.concatenate([np.zeros((1, dim)), np.concatenate(parts, 1)])
    found = _position_embeddings(grid, dim, dtype=dtype)
    assert not found.requires_grad and found.dtype == dtype
    close(found[0].double(), torch.from_numpy(wanted), tolerance(dtype, 4))


def test_layers_start_as_the_authors_start():
    torch.manual_seed(0)
    for layer, shape in (
        (torch.nn.Linear(40, 60), (40, 60)),
        (torch.nn.Conv2d(3, 50, 4), (48, 50)),
    ):
        _init_weights(layer)
        bound = math.sqrt(6 / sum(shape))
        assert 0.95 * bound < layer.weight.abs().max() <= bound and not layer.bias.any()
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    norm = torch.nn.LayerNorm(3)
    _init_weights(norm)
    assert norm.weight.eq(1).all()


# --- checks -----------------------------------------------------------------------------------


@drawn(st.integers(1, 9))
def test_widths_are_divisible_by_four(width):
    if width % 4 == 0:
        _check_widths(embed_dim=4, decoder_embed_dim=width)
        return
    with pytest.raises(ValueError, match=rf"decoder_embed_dim \({width}\)"):
        _check_widths(embed_dim=4, decoder_embed_dim=width)


@drawn(st.integers(0, 4), st.integers(0, 4))
def test_noise_must_fit(a, b):
    if a == b:
        _check_noise(torch.zeros(2, a), (2, b))
    else:
        with pytest.raises(ValueError, match="noise of shape"):
            _check_noise(torch.zeros(2, a), (2, b))


def test_an_encoder_is_given_all_that_was_trained():
    trained = dict(depth=2, img_size=32)
    check_encoder_options(dict(img_size=64, depth=2, global_pool="avg"), trained)
    with pytest.raises(ValueError, match=r"depth \(3\)"):
        check_encoder_options(dict(depth=3), trained)
    target = torch.nn.ModuleDict(dict(body=torch.nn.Linear(2, 3), head=torch.nn.Linear(3, 2)))
    stored = {f"body.{key}": x for key, x in torch.nn.Linear(2, 3).state_dict().items()}
    head = target["head"].weight.clone()
    load_encoder(target, stored)
    assert torch.equal(target["body"].weight, stored["body.weight"])
    assert torch.equal(target["head"].weight, head)
    for other in ({"body.weight": stored["body.weight"]}, stored | {"new": head}):
        with pytest.raises(ValueError, match="untrained"):
            load_encoder(target, other)


ORACLES = {
    "random_masking": test_the_patches_of_the_smallest_noise_stay,
    "patchify": test_patches_are_those_of_unfold,
    "unpatchify": test_patches_are_those_of_unfold,
    "normalize_patches": test_patches_lose_mean_and_deviation,
    "MaskedAutoencoder": test_loss_and_gradients_are_those_of_the_steps,
    "MaskedAutoencoderOutput": test_loss_and_gradients_are_those_of_the_steps,
    "check_encoder_options": test_an_encoder_is_given_all_that_was_trained,
    "load_encoder": test_an_encoder_is_given_all_that_was_trained,
    "_position_embeddings": test_positions_are_the_authors,
    "_init_weights": test_layers_start_as_the_authors_start,
    "_check_noise": test_noise_must_fit,
    "_check_widths": test_widths_are_divisible_by_four,
    "masked_loss": test_the_loss_of_a_batch_is_a_sum,
}


def test_every_public_name_is_tested_here_or_has_a_reason():
    assert {name for name in ORACLES if name[0] != "_"} == set(module.__all__)
