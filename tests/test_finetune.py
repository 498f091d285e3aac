"""Layers of a fine-tuning run against timm's, mixtures, averages, and maps of importance."""

import copy

import numpy as np
import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay

from attnlib.deit import DistilledVisionTransformer
from attnlib.finetune import (
    MixupCrossEntropy,
    fold_normalization,
    gradient_map,
    layer_numbers,
    layer_scales,
    mask_patches,
    mixup,
    normalize_for,
    occlusion_map,
    rollout_map,
    transfer,
)
from attnlib.mae import MaskedAutoencoder
from attnlib.models import classify, create_model, data_config, preprocess
from attnlib.swin import SwinTransformer
from attnlib.tnt import TNT
from attnlib.train import adamw, fit
from attnlib.vit import VisionTransformer
from helpers import build, close

SMALL = dict(img_size=16, patch_size=4, num_classes=3, embed_dim=12, depth=3, num_heads=3)


def small(**options):
    torch.manual_seed(0)
    return VisionTransformer(**SMALL | options)


def images(n=4, size=16):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(1))


def rates(groups, model):
    """{name: (rate, weight decay)} of some groups."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: (group["lr"], group["weight_decay"])
        for group in groups
        for p in group["params"]
    }


@pytest.mark.parametrize(
    "name, cls, pool",
    [
        ("vit_tiny_patch16_224", VisionTransformer, "token"),
        ("vit_tiny_patch16_224", VisionTransformer, "avg"),
        ("deit_tiny_distilled_patch16_224", DistilledVisionTransformer, "token"),
    ],
)
def test_rates_are_timms(name, cls, pool):
    """The same rate and the same weight decay for every parameter."""
    options = dict(embed_dim=12, depth=3, num_heads=3)
    theirs = timm.create_model(name, global_pool=pool, **options)
    ours = cls(global_pool=pool, **options)
    groups = param_groups_layer_decay(
        theirs, 0.05, no_weight_decay_list=theirs.no_weight_decay(), layer_decay=0.6
    )
    wanted = rates([{**group, "lr": 0.1 * group["lr_scale"]} for group in groups], theirs)
    optimizer = adamw(ours, 0.1, (0.9, 0.98), 0.05, lr_scale=layer_scales(ours, 0.6))
    found = rates(optimizer.param_groups, ours)
    assert found.keys() == wanted.keys()
    for key, pair in wanted.items():
        assert found[key] == pytest.approx(pair), key


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_layers_of_a_swin_transformer_are_timms(name):
    with torch.device("meta"):
        theirs, ours = timm.create_model(name), create_model(name)
    groups = param_groups_layer_decay(theirs, layer_decay=0.6)
    scales = {p: group["lr_scale"] for group in groups for p in group["params"]}
    wanted = {name: scales[p] for name, p in theirs.named_parameters()}
    assert layer_scales(ours, 0.6) == pytest.approx(wanted)
    assert max(layer_numbers(ours).values()) == 2 + 2 + 6 + 2 + 1  # and the head


def test_every_parameter_has_a_layer():
    swin = SwinTransformer(
        32, 4, num_classes=3, embed_dim=8, depths=(1, 2), num_heads=(1, 2), window_size=4
    )
    tnt = TNT(16, 4, num_classes=3, embed_dim=12, inner_dim=4, depth=2, num_heads_outer=3)
    for model in (small(), swin, tnt):
        numbers = layer_numbers(model)
        assert numbers.keys() == {name for name, _ in model.named_parameters()}
        first = {name for name, number in numbers.items() if number == 0}
        last = {name for name, number in numbers.items() if number == max(numbers.values())}
        assert any(name.startswith(("patch_embed", "pixel_embed")) for name in first)
        assert all(name.startswith("head") for name in last) and last


def test_without_decay_one_rate_and_with_zero_the_head_alone():
    model = small()
    assert set(layer_scales(model, 1.0).values()) == {1.0}
    moving = {name for name, scale in layer_scales(model, 0.0).items() if scale > 0}
    assert moving == {"head.weight", "head.bias"}
    before = copy.deepcopy(model.state_dict())
    data = images(8), torch.arange(8) % 3
    fit(model, data, steps=3, lr=0.1, batch_size=4, lr_scale=layer_scales(model, 0.0))
    changed = {key for key, x in model.state_dict().items() if not torch.equal(x, before[key])}
    assert changed == {"head.weight", "head.bias"}


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_mixup_blends_images_and_targets_alike(alpha):
    torch.manual_seed(0)
    x, y = images(6), torch.arange(6) % 3
    targets = F.one_hot(y, 3).float()
    # the image carries its own number, so that the share can be read off the blend
    carried = F.one_hot(torch.arange(6), 6).float().view(6, 6, 1, 1)
    blend, mixed = mixup(carried, targets, alpha)
    shares = blend.flatten(1)  # (6, 6)
    assert torch.allclose(shares.sum(1), torch.ones(6))
    assert torch.allclose(shares @ targets, mixed, atol=1e-6)
    assert (shares > 1e-3).sum() > 6  # something was blended
    same, unchanged = mixup(x, targets, 0)
    assert same is x and unchanged is targets


def test_the_mixed_loss_is_the_mean_of_two():
    torch.manual_seed(0)
    logits, y, other = torch.randn(5, 3), torch.arange(5) % 3, torch.tensor([2, 2, 0, 1, 0])
    soft = torch.lerp(F.one_hot(other, 3).float(), F.one_hot(y, 3).float(), 0.3)
    parts = 0.3 * F.cross_entropy(logits, y) + 0.7 * F.cross_entropy(logits, other)
    assert torch.isclose(F.cross_entropy(logits, soft), parts)


def test_fine_tuning_learns_and_repeats():
    x = images(32)
    y = (x.mean((1, 2, 3)) > 0).long()
    x = x + y[:, None, None, None]
    found = []
    for _ in range(2):
        model = small()
        history = fit(
            model,
            (x, y),
            loss_fn=MixupCrossEntropy(3),
            steps=30,
            batch_size=16,
            lr=1e-2,
            lr_scale=layer_scales(model, 0.75),
            log_every=20,
            evaluate=lambda model: dict(right=(model(x).argmax(-1) == y).float().mean()),
        )
        found.append((model.state_dict(), history))
    assert [record["step"] for record in found[0][1]] == [20, 30]
    assert found[0][1][-1]["right"] > 0.9 and found[0][1] == found[1][1]
    assert all(torch.equal(a, b) for a, b in zip(found[0][0].values(), found[1][0].values()))


@pytest.mark.parametrize("mean, std", [((0.5,) * 3, (0.5,) * 3), ((0.1, 0.5, 0.9), (1, 2, 3))])
def test_folded_normalization(mean, std):
    x, model = images().sigmoid(), small().eval()
    channels = [torch.tensor(t).view(1, 3, 1, 1) for t in (mean, std)]
    before = copy.deepcopy(model.state_dict())
    folded = fold_normalization(model, mean, std)
    assert torch.allclose(folded(x), model((x - channels[0]) / channels[1]), atol=1e-5)
    assert all(torch.equal(a, before[key]) for key, a in model.state_dict().items())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_bias_that_is_folded_in_is_as_trainable_as_its_layer(frozen):
    model = small(pre_norm=True)  # whose first layer has no bias
    model.patch_embed.requires_grad_(not frozen)
    folded = fold_normalization(model, (0.5,) * 3, (0.5,) * 3)
    assert folded.patch_embed.proj.bias.requires_grad == (not frozen)


@pytest.mark.parametrize("name", ["swin", "swinv2"])
@pytest.mark.parametrize("size", [30, (29, 27), 32])
def test_a_folded_swin_pads_with_the_mean(name, size):
    """Zeros that complete a patch stand for the mean pixel, twice folded as well."""
    model, mean, std = build(name).double().eval(), (0.1, 0.5, 0.9), (0.2, 0.3, 2.0)
    size = (size, size) if isinstance(size, int) else size
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1)).double()
    means, stds = (torch.tensor(t, dtype=torch.float64).view(3, 1, 1) for t in (mean, std))
    folded = fold_normalization(model, mean, std)
    close(folded(x), model((x - means) / stds), 1e-6)
    again = fold_normalization(folded, std, mean)
    close(again(x), folded((x - stds) / means), 1e-6)


def test_a_folded_model_is_classified_and_described_as_it_is():
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    model = create_model("vit_collages").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    config = model.data_config
    folded = fold_normalization(model, config["mean"], config["std"])
    for name in ("data_config", "pretrained_cfg"):
        described = getattr(folded, name)
        assert described["mean"] == (0, 0, 0) and described["std"] == (1, 1, 1)
    assert model.data_config is config and config["mean"] == (0.5, 0.5, 0.5)
    for found, wanted in zip(classify(folded, picture), classify(model, picture)):
        assert found[0] == wanted[0] and abs(found[1] - wanted[1]) < 1e-5
    other = fold_normalization(model, (0.1, 0.2, 0.3), (0.25, 0.5, 2.0))  # not what it expects
    for found, wanted in zip(classify(other, picture), classify(model, picture)):
        assert found[0] == wanted[0] and abs(found[1] - wanted[1]) < 1e-5


def test_what_cannot_be_folded_is_refused():
    hooked = small()
    hooked.patch_embed.proj.register_forward_hook(lambda *_: None)
    tnt = build("tnt")
    mae = MaskedAutoencoder(
        16,
        8,
        embed_dim=8,
        depth=1,
        num_heads=2,
        decoder_embed_dim=8,
        decoder_depth=1,
        decoder_num_heads=2,
    )
    for model in (hooked, tnt, mae, nn.Linear(3, 3)):
        with pytest.raises(ValueError, match="must begin with the convolution"):
            fold_normalization(model, (0.5,) * 3, (0.5,) * 3)
    for mean, std, name in (((0.5,), (1,) * 3, "mean"), ((0.5,) * 3, (1, 0, 1), "std")):
        with pytest.raises(ValueError, match=name):
            fold_normalization(small(), mean, std)


def test_a_padded_first_layer_is_refused():
    model = small()
    model.patch_embed.proj.padding = (1, 1)
    with pytest.raises(ValueError, match="pads its first layer"):
        fold_normalization(model, (0.5,) * 3, (0.5,) * 3)


def test_hide():
    x = torch.ones(2, 3, 8, 12)
    hidden = mask_patches(x, torch.tensor([[0], [5]]), 4)  # 2 × 3 patches
    assert hidden[0, :, :4, :4].sum() == 0 and hidden[1, :, 4:, 8:].sum() == 0
    assert hidden.sum() == x.sum() - 2 * 3 * 16


def test_maps_have_a_number_for_each_patch():
    model, x = small(), images(3)
    for function in (rollout_map, gradient_map, occlusion_map):
        found = function(model, x, 4)
        assert found.shape == (3, 16) and torch.isfinite(found).all()
    assert torch.allclose(rollout_map(model, x, 4).sum(1), torch.ones(3), atol=0.5)


def test_rollout_is_of_the_tokens_that_the_head_reads():
    """The class token's row of the product of the blocks' maps, or the mean of the patches'."""
    x = images(2, 32)
    for options, prefix in (
        (dict(), 1),
        (dict(global_pool="avg"), 1),
        (dict(class_token=False, global_pool="avg"), 0),
        (dict(reg_tokens=2), 3),
    ):
        torch.manual_seed(0)
        model = build("vit", **options).eval()
        step = torch.eye(16 + prefix)
        for weights in model.attention_maps(x[1:]):
            step = (weights[0].mean(0) / 2 + torch.eye(16 + prefix) / 2) @ step
        row = step[0] if model.global_pool == "token" else step[prefix:].mean(0)
        close(rollout_map(model, x, 8)[1], row[prefix:], 1e-6)


@pytest.mark.parametrize("name", ["swin", "swinv2"])
def test_rollout_through_windows_is_refused(name):
    model = build(name).eval()
    with pytest.raises(ValueError, match=r"model \(Swin.* windows, which cannot be chained"):
        rollout_map(model, images(2, 32), 4)


def test_occlusion_finds_the_only_patch_that_counts():
    class Reader(nn.Module):
        def forward(self, x):  # the logits are pixels of one patch
            return x[:, :2, 6, 10]

    x = torch.rand(5, 3, 8, 12) + 0.5
    drop = occlusion_map(Reader(), x, 4)
    assert drop.argmax(1).eq(5).all() and (drop.abs() > 1e-6).sum() == 5
    gradient = gradient_map(Reader(), x, 4)
    assert gradient.argmax(1).eq(5).all() and torch.allclose(gradient.sum(1), torch.ones(5))


def test_prepared_is_preprocessed():
    name = "deit_tiny_patch16_224"
    picture = torch.randint(256, (224, 224, 3), generator=torch.Generator().manual_seed(0))
    picture = picture.to(torch.uint8)
    config = data_config(name) | dict(crop_pct=1.0)
    x = (picture.permute(2, 0, 1) / 255)[None]
    assert torch.allclose(
        normalize_for(x, name), preprocess(config)(picture.numpy()), atol=1e-5
    )
    assert normalize_for(x, name, 32).shape == (1, 3, 32, 32)


@pytest.mark.parametrize(
    "images, error, message",
    [
        (torch.full((2, 3, 8, 8), 200, dtype=torch.uint8), TypeError, "dtype torch.uint8"),
        (torch.full((2, 3, 8, 8), 200.0), ValueError, "values from 200 to 200"),
        (torch.full((2, 3, 8, 8), -2.0), ValueError, "values from -2 to -2"),
        (torch.full((2, 3, 8, 8), torch.nan), ValueError, "values from nan"),
    ],
)
def test_images_that_are_not_from_zero_to_one_are_refused(images, error, message):
    right, y = (torch.rand(2, 3, 8, 8), torch.arange(2)), torch.arange(2)
    options = dict(img_size=16, pretrained=False, steps=1, lr=1e-3, batch_size=1)
    with pytest.raises(error, match=f"images.* {message}"):
        normalize_for(images, "vit_collages")
    with pytest.raises(error, match=f"train: images.* {message}"):
        transfer("vit_collages", (images, y), right, **options)
    with pytest.raises(error, match=f"test: images.* {message}"):
        transfer("vit_collages", right, (images, y), **options)


def test_transfer_learns_a_task_at_another_size():
    y = torch.arange(40) % 2
    x = 0.2 * torch.rand(40, 3, 8, 8) + 0.6 * y[:, None, None, None]
    model, accuracy = transfer(
        *("vit_collages", (x, y), (x[:10], y[:10])),
        **dict(img_size=16, pretrained=False, steps=12, lr=3e-3),
    )
    assert model.num_classes == 2 and model.patch_embed.img_size == (16, 16)
    assert accuracy > 0.9


def test_a_new_head_for_as_many_classes():
    """Weights for ten digits and a task of ten others: `reset_classifier` starts anew."""
    model = create_model("vit_collages")
    before = model.head.weight.detach().clone()
    model.reset_classifier(10)
    assert not torch.equal(model.head.weight, before)
