"""Explanations, rates by layer and preparations beside loops, timm and torchvision."""

import math

import pytest
import torch
import torch.nn.functional as F
from draws import batches, drawn, dtypes, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import example
from hypothesis import strategies as st
from timm.optim._param_groups import param_groups_layer_decay

from attnlib import finetune as module
from attnlib.finetune import (
    MixupCrossEntropy,
    _check_pixels,
    gradient_map,
    layer_numbers,
    layer_scales,
    mask_patches,
    mixup,
    normalize_for,
    occlusion_map,
    rollout_map,
)
from attnlib.models import data_config
from attnlib.train import fit
from helpers import BACKBONES, build, close, pair

# --- explanations -----------------------------------------------------------------------------


@drawn(map_sizes(4), st.integers(1, 4), batches, st.integers(0, 3), dtypes(), seeds, layouts)
def test_hidden_patches_are_zero_and_others_stay(
    grid, patch, batch, count, dtype, seed, layout
):
    n = math.prod(grid)
    x = normal((batch, 2, grid[0] * patch, grid[1] * patch), dtype, seed, layout)
    rows = torch.stack([normal((n,), seed=seed + i).argsort() for i in range(batch + 1)])
    rows = rows[:batch, : min(count, n)]
    found = mask_patches(x, rows, patch)
    wanted = x.clone()
    for image, numbers in zip(wanted, rows.tolist(), strict=True):
        for number in numbers:
            top, left = number // grid[1] * patch, number % grid[1] * patch
            image[:, top : top + patch, left : left + patch] = 0
    assert torch.equal(found, wanted) and found.dtype == dtype


families = st.sampled_from(sorted(BACKBONES))


def model_and_images(name, grid, batch, seed):
    size = 8 * grid[0], 8 * grid[1]
    torch.manual_seed(seed)
    model = build(name, img_size=size).double().eval()
    return model, normal((batch, 3, *size), seed=seed)


@drawn(families, map_sizes(3), batches, st.booleans(), seeds)
def test_slopes_are_summed_over_patches(name, grid, batch, strided, seed):
    model, x = model_and_images(name, grid, batch, seed)
    x = x.transpose(2, 3).contiguous().transpose(2, 3) if strided else x
    with torch.set_grad_enabled(not strided):
        found = gradient_map(model, x, 8)
    assert found.shape == (batch, math.prod(grid)) and not x.requires_grad
    for image, row in zip(x, found, strict=True):
        own = image[None].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(own).max(), own)
        for number, value in enumerate(row):
            top, left = 8 * (number // grid[1]), 8 * (number % grid[1])
            cut = slope[..., top : top + 8, left : left + 8]
            close(value, cut.abs().sum(), 1e-9)


@drawn(families, map_sizes(3), batches, seeds)
def test_the_largest_logit_falls_by_the_difference(name, grid, batch, seed):
    model, x = model_and_images(name, grid, batch, seed)
    found = occlusion_map(model, x, 8)
    assert found.shape == (batch, math.prod(grid)) and not found.requires_grad
    with torch.no_grad():
        for image, row in zip(x, found, strict=True):
            logits = model(image[None])[0]
            for number, value in enumerate(row):
                top, left = 8 * (number // grid[1]), 8 * (number % grid[1])
                other = image.clone()
                other[:, top : top + 8, left : left + 8] = 0
                best = logits.argmax()
                close(value, logits[best] - model(other[None])[0, best], 1e-10)


@drawn(st.sampled_from(("vit", "deit", "beit", "tnt")), map_sizes(3), batches, seeds)
def test_a_rollout_is_that_of_the_maps(name, grid, batch, seed):
    model, x = model_and_images(name, grid, batch, seed)
    maps = model.attention_maps(x)
    k, n = model.num_prefix_tokens, math.prod(grid)
    found = rollout_map(model, x, 8)
    assert found.shape == (batch, n)
    for i in range(batch):
        product = torch.eye(k + n, dtype=torch.float64)
        for weights in maps:
            product = (weights[i].mean(0) + torch.eye(k + n)) @ product / 2
        heads = 2 if name == "deit" else 1  # each reads a token
        read = product[:heads] if model.global_pool == "token" else product[k:]
        close(found[i], read[:, k:].mean(0))


# --- training ---------------------------------------------------------------------------------


@drawn(families.filter(lambda name: name != "tnt"), st.integers(1, 4), st.floats(0.1, 1), seeds)
def test_rates_by_layer_are_timms(name, depth, decay, seed):
    """timm's TNT does not group its parameters by blocks."""
    depths = dict(depths=(depth, 1 + seed % 3)) if "swin" in name else dict(depth=depth)
    ours, theirs = pair(name, **depths)
    groups = param_groups_layer_decay(theirs, layer_decay=decay)
    scales = {p: group["lr_scale"] for group in groups for p in group["params"]}
    wanted = {key: scales[p] for key, p in theirs.named_parameters()}
    assert layer_scales(ours, decay) == pytest.approx(wanted)
    numbers = layer_numbers(ours)
    last = max(numbers.values())
    assert {key: decay ** (last - number) for key, number in numbers.items()} == pytest.approx(
        wanted
    )


@drawn(
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from((0, 0.2, 1.0)),
    dtypes(),
    seeds,
    layouts,
)
def test_images_and_targets_are_blended_alike(batch, classes, alpha, dtype, seed, layout):
    images, targets = (
        normal((batch, 1, 2, 3), dtype, seed, layout),
        normal((batch, classes), dtype),
    )
    torch.manual_seed(seed)
    found = mixup(images, targets, alpha)
    torch.manual_seed(seed)
    share, order = 1.0, torch.arange(batch)
    if alpha:
        share = torch.distributions.Beta(float(alpha), float(alpha)).sample().item()
        order = torch.randperm(batch)
    for x, y in zip(found, (images, targets)):
        wanted = share * y.double() + (1 - share) * y[order].double()
        assert x.dtype == dtype
        close(x.double(), wanted, tolerance(dtype, 8))


@drawn(st.integers(1, 4), st.sampled_from((1.0, 0.5, 0.0)), seeds)
def test_fine_tuning_is_these_steps(steps, decay, seed):
    """AdamW by hand, for a model whose head alone counts."""

    class Head(torch.nn.Module):
        classifiers, num_classes, blocks, stages = ("head",), 3, (), ()

        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(4, 3).double()

        def forward(self, x):
            return self.head(x.flatten(1))

        def no_weight_decay(self):
            return set()

    torch.manual_seed(seed)
    model = Head()
    weight, bias = (p.detach().clone().requires_grad_() for p in model.parameters())
    images, labels = normal((3, 1, 2, 2), seed=seed), torch.arange(3)
    seen = []
    fit(
        model, (images, labels), steps=steps, lr=0.1, warmup=1, batch_size=3, ema=0.7,
        weight_decay=0.05, lr_scale=layer_scales(model, decay), log_every=1,
        callback=lambda m, record: seen.append(m.head.weight.detach().clone()),
    )  # fmt: skip
    groups = [dict(params=[weight], weight_decay=0.05), dict(params=[bias], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.98))
    mean = None
    for step in range(1, steps + 1):
        loss = F.cross_entropy(F.linear(images.flatten(1), weight, bias), labels)
        grads = torch.autograd.grad(loss, (weight, bias))
        norm = math.sqrt(sum(g.square().sum().item() for g in grads))
        for p, g in zip((weight, bias), grads):
            p.grad = g * min(1, 1 / (norm + 1e-6))
        rate = 0.1  # it rises in the first step alone
        if step > 1:
            rate = 0.05 * (1 + math.cos(math.pi * (step - 2) / (steps - 1)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        mean = weight.detach().clone() if mean is None else 0.7 * mean + 0.3 * weight.detach()
        close(seen[step - 1], weight, 1e-9)
    assert len(seen) == steps
    close(model.head.weight, mean, 1e-9)


@drawn(st.sampled_from((0.0, 0.4, 3.0)), st.sampled_from((0.0, 0.3)), dtypes(), seeds)
def test_the_loss_of_blended_images(alpha, smoothing, dtype, seed):
    """The targets of both images of each blend, in their shares."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 4)).to(dtype)
    images, labels = normal((5, 6, 1, 1), dtype, seed), torch.arange(5) % 4
    loss_fn = MixupCrossEntropy(4, alpha, smoothing)
    torch.manual_seed(seed)
    total, count = loss_fn(model, (images, labels))
    torch.manual_seed(seed)
    share, order = 1.0, torch.arange(5)
    if alpha:
        share = torch.distributions.Beta(alpha, alpha).sample().item()
        order = torch.randperm(5)
    blended = share * images.double() + (1 - share) * images[order].double()
    logs = model(blended.to(dtype)).double().log_softmax(-1)
    one = F.one_hot(labels, 4).double()
    targets = share * one + (1 - share) * one[order]
    targets = (1 - smoothing) * targets + smoothing / 4
    wanted = -(targets * logs).sum()
    assert count == 5
    close(total.double(), wanted, 40 * tolerance(dtype))
    plain, _ = loss_fn(model.eval(), (images, labels))
    logs = model(images).double().log_softmax(-1)
    targets = (1 - smoothing) * one + smoothing / 4
    close(plain.double(), -(targets * logs).sum(), 40 * tolerance(dtype))


# --- pictures ---------------------------------------------------------------------------------


@drawn(st.sampled_from((-0.6, -0.5, 0.0, 1.0, 1.5, 1.6, math.nan, math.inf)), dtypes(), seeds)
@example(math.nan, torch.float64, 0)
def test_pixels_are_from_black_to_white(value, dtype, seed):
    x = normal((2, 3, 4, 5), dtype, seed).sigmoid()
    x[1, 2, 3, seed % 5] = value
    if -0.5 <= value <= 1.5:
        _check_pixels("these", x)
    else:
        with pytest.raises(ValueError, match="these has values"):
            _check_pixels("these", x)
    for other in (torch.uint8, torch.int64, torch.bool):
        with pytest.raises(TypeError, match="these of dtype"):
            _check_pixels("these", x.nan_to_num(0, 1).to(other))


names = st.sampled_from(("deit_tiny_patch16_224", "vit_collages", "swin_collages"))


@drawn(
    names,
    map_sizes(60),
    st.sampled_from((None, 16, (24, 40))),
    st.integers(1, 2),
    dtypes(),
    seeds,
    layouts,
)
def test_images_are_scaled_and_standardized(name, size, img_size, batch, dtype, seed, layout):
    images = normal((batch, 3, *size), dtype, seed, layout).sigmoid()
    config = data_config(name)
    target = config["input_size"][1:] if img_size is None else img_size
    target = (target, target) if isinstance(target, int) else tuple(target)
    wanted = F.interpolate(
        images.double(), target, mode=config["interpolation"], antialias=True
    )
    found = normalize_for(images, name, img_size)
    assert found.dtype == dtype and found.shape == (batch, 3, *target)
    # a place among 60 pixels is rounded like 60, in float32 at least
    limit = max(tolerance(dtype), 60 * tolerance(torch.promote_types(dtype, torch.float32)))
    limit = limit if dtype != torch.float64 else 1e-11
    for channel in range(3):
        own = wanted[:, channel].clamp(0, 1) - config["mean"][channel]
        close(found[:, channel].double(), own / config["std"][channel], limit)


ORACLES = {
    "mask_patches": test_hidden_patches_are_zero_and_others_stay,
    "rollout_map": test_a_rollout_is_that_of_the_maps,
    "gradient_map": test_slopes_are_summed_over_patches,
    "occlusion_map": test_the_largest_logit_falls_by_the_difference,
    "layer_numbers": test_rates_by_layer_are_timms,
    "layer_scales": test_rates_by_layer_are_timms,
    "mixup": test_images_and_targets_are_blended_alike,
    "MixupCrossEntropy": test_the_loss_of_blended_images,
    "_check_pixels": test_pixels_are_from_black_to_white,
    "normalize_for": test_images_are_scaled_and_standardized,
}
NOT_HERE = {
    "fold_normalization": "tested in test_finetune.py",
    "_check_folding": "part of fold_normalization",
    "_folded_config": "part of fold_normalization",
    "transfer": "an experiment of create_model and fit, tested in test_finetune.py",
}


def test_every_public_name_is_tested_here_or_has_a_reason():
    names = ORACLES.keys() | NOT_HERE.keys()
    assert {name for name in names if name[0] != "_"} == set(module.__all__)
