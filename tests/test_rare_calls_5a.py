"""Calls of models, caches and copies that once went wrong without a word."""

import copy
import io
import json
from pkgutil import resolve_name

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, stack_module_state

import tools.torchvision_ops  # noqa: F401
from attnlib.attention import attention, attention_backend
from attnlib.beit import Beit
from attnlib.decoding import KVCache
from attnlib.deit import DistilledVisionTransformer
from attnlib.detr import HungarianMatcher, ResNet, SetCriterion, small_detr
from attnlib.finetune import fold_normalization
from attnlib.gpt import GPT, GPTConfig
from attnlib.inference import FastResNet, optimize_for_inference
from attnlib.models import load_pretrained
from attnlib.panoptic import MaskHead
from attnlib.swin import SwinTransformer
from attnlib.swinv2 import SwinTransformerV2
from attnlib.train import fit
from attnlib.transformer import DecoderLayer, EncoderLayer, FeedForward
from attnlib.vit import VisionTransformer
from helpers import BACKBONES, TOKENS, WINDOWS

SMALL = dict(img_size=16, patch_size=4, num_classes=3, embed_dim=16, depth=2, num_heads=2)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# --- parts that somebody has changed ----------------------------------------------------------


def stages(model, x):
    """A ResNet's maps, by calls of its parts alone."""
    x = model.maxpool(model.bn1(model.conv1(x)).relu())
    maps = []
    for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
        x = layer(x)
        maps.append(x)
    return maps


def with_a_subclass(model):
    from torchvision.models.resnet import BasicBlock

    class Doubled(BasicBlock):
        def forward(self, x):
            return 2 * super().forward(x)

    model.layer2[1].__class__ = Doubled


def with_a_longer_shortcut(model):
    shortcut = model.layer3[0].downsample
    model.layer3[0].downsample = nn.Sequential(*shortcut, nn.Sigmoid())


def with_a_nested_stage(model):
    model.layer4 = nn.Sequential(model.layer4[0], nn.Sequential(model.layer4[1], nn.Tanh()))


def with_another_convolution(model):
    conv = model.layer1[0].conv2
    model.layer1[0].conv2 = nn.Sequential(conv, nn.ReLU())


@pytest.mark.parametrize(
    "change",
    [with_a_subclass, with_a_longer_shortcut, with_a_nested_stage, with_another_convolution],
)
def test_a_changed_resnet_computes_what_its_parts_do(change):
    torch.manual_seed(0)
    model = ResNet("resnet18").eval()
    x = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        before = model(x)[-1]
        change(model)
        wanted = stages(model, x)
        found = model(x)
        fast = optimize_for_inference(model)(x)
    assert not torch.allclose(before, wanted[-1], rtol=1e-2)
    for a, b, c in zip(wanted, found, fast):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(c, a, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_an_unchanged_resnet_is_packed(name):
    assert isinstance(optimize_for_inference(ResNet(name)), FastResNet)


@pytest.mark.parametrize(
    "options",
    [
        dict(padding=1),
        dict(padding=1, padding_mode="circular"),
        dict(padding=2, dilation=2),
        dict(padding=1, groups=4),
        dict(padding=1, stride=2),
        dict(padding="same"),
        dict(padding=1, bias=False),
    ],
)
def test_a_mask_head_calls_its_first_convolution_as_it_is(options):
    torch.manual_seed(0)
    head = MaskHead(embed_dim=32, num_heads=8, channels=[16, 8], num_groups=1).double()
    head.layers[0] = nn.Conv2d(40, 40, kernel_size=3, **options).double()
    x = torch.randn(2, 32, 6, 6).double()
    maps = torch.rand(3, 8, 6, 6).double()
    image = torch.tensor([0, 1, 1])
    wanted = head.layers[0](torch.cat([x[image], maps], dim=1))
    close(head.first_layer(x, maps, image), wanted, 1e-12)


def test_a_normalization_is_not_folded_into_groups():
    model = VisionTransformer(**SMALL)
    model.patch_embed.proj = nn.Conv2d(3, 18, kernel_size=4, stride=4, groups=3)
    with pytest.raises(ValueError, match="3 groups"):
        fold_normalization(model, [0.5] * 3, [0.5] * 3)


# --- a look does not change the model ---------------------------------------------------------


def modes(model):
    return [part.training for part in model.modules()]


def test_the_maps_of_a_detector_leave_its_norms_alone():
    torch.manual_seed(0)
    model = small_detr(3).train()
    model.decoder.eval()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    kept = modes(model)
    x = torch.randn(2, 3, 48, 48)
    found = model.attention_maps(x)
    assert modes(model) == kept
    for key, now in model.state_dict().items():
        assert torch.equal(now, before[key]), key
    for a, b in zip(found, model.eval().attention_maps(x)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", sorted(BACKBONES))
def test_the_maps_of_a_backbone_have_no_dropout(family):
    cls, _, options = BACKBONES[family]
    sizes = WINDOWS if family.startswith("swin") else TOKENS
    torch.manual_seed(0)
    rates = dict(proj_drop_rate=0.5, drop_path_rate=0.5)
    if family == "tnt":
        rates = dict(proj_drop_rate=0.5)
    model = resolve_name(f"attnlib.{cls}")(**sizes | options | rates).train()
    kept = modes(model)
    x = torch.randn(2, 3, 32, 32)
    found = model.attention_maps(x)
    assert modes(model) == kept and all(kept)
    for a, b in zip(found, model.eval().attention_maps(x), strict=True):
        assert torch.equal(a, b)


# --- new heads --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(BACKBONES))
def test_a_new_head_has_the_scale_of_the_first(family):
    cls, _, options = BACKBONES[family]
    sizes = WINDOWS if family.startswith("swin") else TOKENS
    torch.manual_seed(0)
    model = resolve_name(f"attnlib.{cls}")(**sizes | options | dict(num_classes=2000))
    first = [model.get_submodule(name).weight.std().item() for name in model.classifiers]
    model.reset_classifier(2000)
    for name, scale in zip(model.classifiers, first, strict=True):
        head = model.get_submodule(name)
        assert head.weight.std().item() == pytest.approx(scale, rel=0.05)
        assert not head.bias.any()
    model.reset_classifier(0)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, model.num_features)


# --- state dicts ------------------------------------------------------------------------------


def test_a_copy_for_inference_has_no_state_dict():
    torch.manual_seed(0)
    model = VisionTransformer(**SMALL).eval()
    fast = optimize_for_inference(model)
    for part in (fast, nn.Sequential(fast), fast.blocks[0], copy.deepcopy(fast)):
        with pytest.raises(RuntimeError, match="state_dict of a copy .* save the model itself"):
            part.state_dict()
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        stored = io.BytesIO()
        torch.save(fast, stored)
        again = torch.load(io.BytesIO(stored.getvalue()), weights_only=False)
        close(again(x), model(x))
    assert len(model.state_dict()) == 32


# --- caches -----------------------------------------------------------------------------------


def small_gpt():
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=11, n_layer=2, n_head=2, n_embd=8, block_size=32)
    return GPT(config).double().eval()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_cache_goes_on_by_itself(copied):
    model = small_gpt()
    tokens = torch.randint(11, (1, 9))
    cache = KVCache()
    with torch.no_grad():
        model(tokens[:, :4], cache=cache)
        other = copied(cache)
        model(tokens[:, 4:6], cache=cache)
        model(tokens[:, 6:8], cache=other)
        first = model(tokens[:, 8:], cache=cache)
        second = model(tokens[:, 8:], cache=other)
        texts = [tokens[:, [0, 1, 2, 3, 4, 5, 8]], tokens[:, [0, 1, 2, 3, 6, 7, 8]]]
        close(first[:, -1], model(texts[0])[:, -1], 1e-12)
        close(second[:, -1], model(texts[1])[:, -1], 1e-12)


def test_queries_learn_from_a_cache_of_frozen_keys():
    torch.manual_seed(0)
    k = torch.randn(1, 2, 3, 4).double()
    v = torch.randn(1, 2, 3, 4).double()
    q = torch.randn(1, 2, 1, 4).double().requires_grad_()
    cache = KVCache()
    total = 0
    wanted = 0
    for i in range(3):
        keys, values = cache.update(0, k[:, :, i : i + 1], v[:, :, i : i + 1])
        total = total + attention(q, keys, values).sum()
        logits = q @ k[:, :, : i + 1].mT / 2
        wanted = wanted + (logits.softmax(-1) @ v[:, :, : i + 1]).sum()
    (found,) = torch.autograd.grad(total, q)
    (gradient,) = torch.autograd.grad(wanted, q)
    close(found, gradient, 1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_cache_of_inference_mode_goes_on_outside(mode):
    model = small_gpt()
    tokens = torch.randint(11, (1, 8))
    cache = KVCache()
    with torch.inference_mode():
        model(tokens[:, :4], cache=cache)
    with mode():
        for i in range(4, 8):
            found = model(tokens[:, i : i + 1], cache=cache)
    with torch.no_grad():
        close(found[:, -1], model(tokens)[:, -1], 1e-12)
    if mode is torch.enable_grad:
        found.sum().backward()


# --- arguments --------------------------------------------------------------------------------


def test_fine_tuning_refuses_two_heads_without_a_teacher():
    torch.manual_seed(0)
    model = DistilledVisionTransformer(**SMALL)
    images = torch.rand(6, 3, 16, 16)
    labels = torch.arange(6) % 3
    model.set_distilled_training()
    with pytest.raises(TypeError, match=r"set_distilled_training\(False\)"):
        fit(model, (images, labels), steps=1, batch_size=3)
    model.set_distilled_training(False)
    fit(model, (images, labels), steps=1, batch_size=3)
    assert model(images).shape == (6, 3)


@pytest.mark.parametrize("make", [FeedForward, EncoderLayer, DecoderLayer])
def test_an_activation_is_no_class(make):
    with pytest.raises(ValueError, match=r"activation \(<class .*GELU'>\) must be"):
        make(8, 2, activation=nn.GELU)
    for activation in (nn.GELU(), F.gelu, "gelu"):
        make(8, 2, activation=activation)


def test_a_matcher_is_no_class():
    with pytest.raises(TypeError, match=r"matcher \(<class .*HungarianMatcher'>\) must be"):
        SetCriterion(3, matcher=HungarianMatcher)
    SetCriterion(3, matcher=HungarianMatcher())


# --- empty batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "sdpa", "auto"])
@pytest.mark.parametrize("batch, n, m", [(0, 4, 5), (1, 0, 5), (1, 4, 0)])
def test_a_bias_has_a_gradient_without_tokens(backend, batch, n, m):
    q = torch.randn(batch, 2, n, 8, requires_grad=True)
    k = torch.randn(batch, 2, m, 8, requires_grad=True)
    v = torch.randn(batch, 2, m, 8, requires_grad=True)
    bias = torch.randn(2, n, m, requires_grad=True)
    with attention_backend(backend):
        out = attention(q, k, v, bias=bias)
    assert out.shape == q.shape and not out.any()
    for x, gradient in zip((q, k, v, bias), torch.autograd.grad(out.sum(), (q, k, v, bias))):
        assert gradient.shape == x.shape and not gradient.any()


def test_an_empty_batch_leaves_no_parameter_without_a_gradient():
    torch.manual_seed(0)
    model = SwinTransformer(**WINDOWS, window_size=4)
    model(torch.zeros(0, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# --- ensembles by torch.func ------------------------------------------------------------------


def ensemble(cls, **options):
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = cls(**options).double().eval()
        for p in model.parameters():
            p.data.add_(0.1 * torch.randn_like(p))
        models.append(model)
    return models


ENSEMBLES = {
    "vit": (VisionTransformer, SMALL),
    "beit": (Beit, SMALL),
    "swin": (SwinTransformer, WINDOWS | dict(window_size=4)),
    "swinv2": (SwinTransformerV2, WINDOWS | dict(window_size=4)),
}


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("name", ENSEMBLES)
def test_an_ensemble_by_vmap_is_trained(name, backend):
    cls, options = ENSEMBLES[name]
    models = ensemble(cls, **options)
    size = options["img_size"]
    x = torch.randn(2, 3, size, size).double()
    wanted = [model(x) for model in models]
    gradients = []
    for model, y in zip(models, wanted):
        gradients.append(torch.autograd.grad(y.square().sum(), list(model.parameters())))
    parameters, buffers = stack_module_state(models)

    def one(parameters, buffers):
        return functional_call(models[0], (parameters, buffers), (x,))

    def loss(parameters):
        return torch.vmap(one)(parameters, buffers).square().sum()

    with attention_backend(backend):
        found = torch.vmap(one)(parameters, buffers)
        of_all = torch.autograd.grad(found.square().sum(), list(parameters.values()))
        by_func = torch.func.grad(loss)({key: p.detach() for key, p in parameters.items()})
    close(found, torch.stack(wanted), 1e-10)
    for a, b, parts in zip(of_all, by_func.values(), zip(*gradients), strict=True):
        close(a, torch.stack(parts), 1e-10)
        close(b, torch.stack(parts), 1e-10)


@pytest.mark.parametrize("name", ENSEMBLES)
def test_one_model_under_vmap_is_trained(name):
    cls, options = ENSEMBLES[name]
    model = ensemble(cls, **options)[0]
    size = options["img_size"]
    x = torch.randn(2, 1, 3, size, size).double()
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(model(x[:, 0]).square().sum(), parameters)
    found = torch.autograd.grad(torch.vmap(model)(x).square().sum(), parameters)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-10)


# --- windows that were trained ----------------------------------------------------------------


def swinv2(window_size):
    torch.manual_seed(0)
    return SwinTransformerV2(**WINDOWS, window_size=window_size).eval()


def trained_windows(model):
    return [block.attn.trained_window() for block in model.blocks]


def test_a_checkpoint_remembers_the_windows_that_were_trained(tmp_path):
    x = torch.randn(4, 3, 32, 32)
    labels = torch.arange(4)
    path = tmp_path / "run.json"

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), torch.tensor(4)

    def train(model, **options):
        return fit(
            model,
            lambda step: (x, labels),
            loss_fn=loss,
            steps=4,
            lr=0.05,
            log_every=2,
            **options,
        )

    model = swinv2(8)
    load_pretrained(model, swinv2(4).state_dict())
    assert trained_windows(model) == [(4, 4)] * 4
    train(model, checkpoint=path, stop_after=2)
    again = swinv2(8)
    assert trained_windows(again) != [(4, 4)] * 4
    train(again, checkpoint=path)
    assert trained_windows(again) == [(4, 4)] * 4
    whole = swinv2(8)
    load_pretrained(whole, swinv2(4).state_dict())
    train(whole)
    loaded = swinv2(8)
    load_pretrained(loaded, path)
    with torch.no_grad():
        wanted = whole(x)
        close(again(x), wanted, 1e-4)
        close(loaded(x), wanted, 1e-4)
        for block in loaded.blocks:
            block.attn.set_pretrained_window(0)
        assert (loaded(x) - wanted).abs().max() > 1e-3
    assert "trained_windows" in json.loads(path.read_text())


def test_a_checkpoint_of_another_model_changes_no_window(tmp_path):
    path = tmp_path / "run.json"
    x = torch.randn(4, 3, 32, 32)

    def loss(model, batch):
        return model(batch[0]).square().sum(), torch.tensor(4)

    fit(swinv2(4), lambda step: (x,), loss_fn=loss, steps=1, checkpoint=path)
    torch.manual_seed(0)
    other = SwinTransformerV2(**WINDOWS | dict(num_classes=7), window_size=8)
    before = trained_windows(other)
    with pytest.raises(ValueError, match="belongs to another model"):
        fit(other, lambda step: (x,), loss_fn=loss, steps=1, checkpoint=path)
    assert trained_windows(other) == before
