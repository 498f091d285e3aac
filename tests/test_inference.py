"""An optimized copy answers as the model does, within rounding, and leaves the model alone."""

import copy
import io
import json
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import prune

from attnlib import inference
from attnlib.decoding import KVCache, beam_search, greedy, sample
from attnlib.detr import DETR, FrozenBatchNorm2d, ResNet
from attnlib.gpt import GPT, GPT2_STYLE, GPTConfig
from attnlib.inference import PackedLinear, optimize_for_inference
from attnlib.mae import MaskedAutoencoder
from attnlib.swin import SwinTransformer, WindowAttention
from attnlib.swinv2 import SwinTransformerV2
from attnlib.tnt import TNT
from attnlib.transformer import CrossAttention, Transformer
from attnlib.vit import Mlp, VisionTransformer
from attnlib.vit_variants import use_rotary
from helpers import BACKBONES, build

SIZES = dict(
    src_vocab=30, d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2,
    dim_feedforward=48, max_length=32,
)  # fmt: skip


@pytest.fixture(autouse=True)
def packing_pays(monkeypatch):
    """Whatever the processor: packed products are what is tested here."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


def noisy(model, seed=0, dtype=torch.float32):
    """The model with weights of which none is zero or one, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def images(n=2, size=32, chans=3):
    size = (size, size) if isinstance(size, int) else size
    return torch.randn(n, chans, *size, generator=torch.Generator().manual_seed(1))


def same(a, b, tolerance=1e-5):
    assert a.shape == b.shape and a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def translator(**options):
    return noisy(Transformer(**SIZES | options))


def sentences(n=3, length=9, padding=True):
    generator = torch.Generator().manual_seed(2)
    src = torch.randint(3, 30, (n, length), generator=generator)
    if padding:
        src[1:, -3:] = 0
    return src


# --- the same numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_gives_the_same_logits(name, batch):
    model, x = noisy(build(name)), images(batch)
    fast = optimize_for_inference(model)
    with torch.no_grad():
        same(fast(x), model(x))
        same(fast(x), model(x))  # with what it has kept


@pytest.mark.parametrize("name", BACKBONES)
def test_a_copy_of_other_weights_does_not(name):
    """The control: weights that are off by a thousandth are found out."""
    model, x = noisy(build(name)), images()
    fast = optimize_for_inference(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
        assert (fast(x) - model(x)).abs().max() > 1e-5


@pytest.mark.parametrize("name", BACKBONES)
def test_features_and_intermediates_are_whole(name):
    """Only the logits are computed from fewer tokens."""
    model, x = noisy(build(name)), images()
    fast = optimize_for_inference(model)
    with torch.no_grad():
        same(fast.forward_features(x), model.forward_features(x))
        for ours, theirs in zip(
            fast.forward_intermediates(x, intermediates_only=True),
            model.forward_intermediates(x, intermediates_only=True),
        ):
            same(ours, theirs)


@pytest.mark.parametrize("pool", ["token", "avg", ""])
@pytest.mark.parametrize("name", ["vit", "tnt"])
def test_every_pooling(name, pool):
    model, x = noisy(build(name, global_pool=pool)), images()
    with torch.no_grad():
        same(optimize_for_inference(model)(x), model(x))


@pytest.mark.parametrize("small_maps", ["shrink", "pad"])
@pytest.mark.parametrize("cls", [SwinTransformer, SwinTransformerV2])
def test_maps_of_any_size_in_any_order(cls, small_maps):
    model = noisy(
        cls(64, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4, num_classes=5,
            small_maps=small_maps)
    )  # fmt: skip
    fast = optimize_for_inference(model)
    with torch.no_grad():
        for size in (64, (36, 52), (8, 64), 64, (20, 20), 4):
            same(fast(images(2, size)), model(images(2, size)))


def test_images_of_any_size():
    model = noisy(build("vit", dynamic_img_size=True))
    fast = optimize_for_inference(model)
    with torch.no_grad():
        for size in (32, (16, 40), 8):
            same(fast(images(1, size)), model(images(1, size)))


@pytest.mark.parametrize("name", BACKBONES)
def test_bfloat16(name):
    model, x = noisy(build(name), dtype=torch.bfloat16), images().bfloat16()
    exact = copy.deepcopy(model).float()
    fast = optimize_for_inference(model)
    with torch.no_grad():
        ours, plain, wanted = fast(x).float(), model(x).float(), exact(x.float())
    assert fast(x).dtype == torch.bfloat16
    assert (ours - wanted).abs().max() < 2 * (plain - wanted).abs().max() + 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", ["vit", "swin", "swinv2"])
def test_a_dtype_that_is_not_packed(name, dtype):
    model, x = noisy(build(name), dtype=dtype), images().to(dtype)
    with torch.no_grad():
        same(
            optimize_for_inference(model)(x), model(x), 1e-10 if dtype == torch.float64 else 0.1
        )


@pytest.mark.parametrize("enabled", [False, True])
def test_without_onednn(enabled, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: enabled)
    layer = PackedLinear(torch.randn(5, 4), torch.randn(5), "gelu")
    assert (layer.packed is None) == (not enabled)
    x = torch.randn(7, 4)
    same(layer(x), F.gelu(F.linear(x, layer.weight, layer.bias)))


@pytest.mark.parametrize(
    "widest, pays", [("AVX2", False), ("DEFAULT", False), ("AVX512", True)]
)
def test_float32_is_packed_where_it_pays(widest, pays, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: widest)
    layer, x = nn.Linear(4, 6), torch.randn(7, 4)
    packed = PackedLinear(layer.weight, layer.bias, "gelu")
    assert (packed.packed is not None) == pays
    with torch.no_grad():
        same(packed(x), F.gelu(layer(x)))
    if inference._can_pack(torch.bfloat16):
        assert PackedLinear(layer.weight.bfloat16()).packed is not None


@pytest.mark.parametrize("missing", inference._NAMES)
def test_without_an_undocumented_function(missing, monkeypatch):
    """Another version of PyTorch may not have one: the usual layers compute instead."""
    there = {name: getattr(inference._onednn, name) for name in inference._NAMES}
    del there[missing]
    monkeypatch.setattr(inference, "_onednn", SimpleNamespace(**there))
    layer, x = nn.Linear(4, 6).requires_grad_(False), torch.randn(7, 4)
    assert PackedLinear(layer.weight, layer.bias).packed is None
    same(PackedLinear(layer.weight, layer.bias, "gelu")(x), F.gelu(layer(x)))
    conv, norm = nn.Conv2d(3, 5, 3).eval(), nn.BatchNorm2d(5).eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        same(inference._PackedConv(conv, norm)(x), norm(conv(x)).relu())


@pytest.mark.parametrize("activation", inference.FUNCTIONS)
@pytest.mark.parametrize("shape", [(4,), (1, 4), (0, 4), (7, 4), (2, 3, 4), (2, 1, 3, 4)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer(shape, bias, activation):
    layer, x = nn.Linear(4, 6, bias=bias), torch.randn(shape)
    packed = PackedLinear(layer.weight, layer.bias, activation)
    with torch.no_grad():
        same(packed(x), inference.FUNCTIONS[activation](layer(x)))
        same(packed(x.mT.contiguous().mT if x.ndim > 1 else x), packed(x))


# --- the Transformer --------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "relative", "alibi", "rotary"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer_gives_the_same_logits(position, norm_first):
    model = translator(position=position, norm_first=norm_first, output_bias=norm_first)
    fast, src = optimize_for_inference(model), sentences()
    with torch.no_grad():
        same(fast(src, src.flip(0)), model(src, src.flip(0)))


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", torch.tanh])
def test_activations(activation):
    model = translator(activation=activation)
    with torch.no_grad():
        same(
            optimize_for_inference(model)(sentences(), sentences()),
            model(sentences(), sentences()),
        )


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("position", ["sinusoidal", "relative", "rotary"])
def test_decoding_gives_the_same_tokens(position, batch, padding):
    model, src = translator(position=position), sentences(batch, padding=padding)
    fast = optimize_for_inference(model)
    for use_cache in (True, False):
        assert torch.equal(greedy(fast, src, 12, use_cache=use_cache), greedy(model, src, 12))
    ours, theirs = (beam_search(m, src, 8, beam_size=3) for m in (fast, model))
    assert torch.equal(ours[0], theirs[0])
    same(ours[1], theirs[1])
    drawn = [
        sample(m, src, 8, top_k=5, generator=torch.Generator().manual_seed(3))
        for m in (fast, model)
    ]
    assert torch.equal(*drawn)


def test_a_cache_in_pieces():
    model, src = translator(), sentences()
    fast, tgt = optimize_for_inference(model), sentences(length=7, padding=False)
    with torch.no_grad():
        memory, mask = model.encode(src)
        whole, cache = model.decode(tgt, memory, mask), KVCache()
        parts = [fast.decode(part, memory, mask, cache) for part in tgt.split([1, 3, 1, 2], 1)]
    same(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("rows", [[2, 0, 1], [1]])
def test_a_cache_with_other_sources(rows):
    model, src, cache = translator(), sentences(), KVCache()
    fast, tgt = optimize_for_inference(model), sentences(length=4, padding=False)
    with torch.no_grad():
        memory, mask = model.encode(src)
        fast.decode(tgt[:, :3], memory, mask, cache)
        cache.reorder(torch.tensor(rows))
        found = fast.decode(tgt[rows, 3:], memory[rows], mask[rows], cache)
        same(found, model.decode(tgt[rows], memory[rows], mask[rows])[:, 3:])
        with pytest.raises(ValueError, match="tgt has 1 rows; for 3 sources"):
            fast.decode(tgt[:1], memory, mask)


def test_a_source_of_nothing_but_padding_gives_zeros():
    model, src = translator(), sentences()
    src[1] = 0
    with torch.no_grad():
        out = optimize_for_inference(model)(src, sentences())
        assert out.isfinite().all()
        same(out, model(src, sentences()))


def test_bad_tokens_are_named():
    fast, src = optimize_for_inference(translator()), sentences()
    with pytest.raises(ValueError, match="token 30"):
        fast(src, torch.full_like(src, 30))
    with pytest.raises(ValueError, match="max_length"):
        fast(src, torch.ones(3, 33, dtype=torch.int64))


def test_a_failed_call_leaves_the_cache_as_it_was():
    fast, src = optimize_for_inference(translator()), sentences(padding=False)
    tgt, cache = sentences(length=4, padding=False), KVCache()
    with torch.no_grad():
        memory, mask = fast.encode(src)
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            fast.decode(tgt, memory[:, :, :5], mask, cache)
        same(fast.decode(tgt, memory, mask, cache), fast.decode(tgt, memory, mask))


# --- the copy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKBONES)
def test_the_model_stays_as_it_was(name):
    model, x = noisy(build(name)).train(), images()
    state, parts = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    fast = optimize_for_inference(model)
    assert model.training and not fast.training
    assert [type(m) for m in model.modules()] == parts
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in fast.parameters())
    before = fast(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out = model(x)
    (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    optimizer.step()
    same(fast(x), before, 0)  # the copy has weights of its own
    assert type(fast) is type(model)


def test_all_linear_layers_are_packed():
    for model in (*map(build, BACKBONES), translator()):
        left = [
            name
            for name, module in optimize_for_inference(model).named_modules()
            if type(module) is nn.Linear
        ]
        assert left == []


def test_it_needs_no_gradient_mode():
    """No graph is made even where gradients are enabled."""
    fast = optimize_for_inference(noisy(build("swin")))
    assert fast(images()).grad_fn is None


@pytest.mark.parametrize("name", BACKBONES)
def test_a_gradient_is_refused_and_not_lost(name):
    fast, x = optimize_for_inference(noisy(build(name))), images().requires_grad_()
    with pytest.raises(RuntimeError, match="use the model itself"):
        fast(x)
    with torch.no_grad():
        fast(x)  # nobody asks for one


def test_another_dtype_or_width_is_named():
    layer = PackedLinear(torch.randn(5, 4), torch.randn(5))
    with pytest.raises(TypeError, match="float64 must be .*float32"):
        layer(torch.randn(3, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"\(3, 7\)"):
        layer(torch.randn(3, 7))
    fast = optimize_for_inference(noisy(build("vit"))).bfloat16()
    with pytest.raises(TypeError, match="bfloat16 must be .*float32"):
        fast(images().bfloat16())
    with pytest.raises(ValueError, match=r"activation \('softmax'\)"):
        PackedLinear(torch.randn(5, 4), None, "softmax")


@pytest.mark.parametrize("places", [["cpu", "cuda:0"], ["cuda:0", "cuda:1"], ["xpu:0"]])
def test_a_model_that_is_elsewhere_is_refused(places, monkeypatch):
    message = "it must be on the CPU or on one GPU"
    with pytest.raises(ValueError, match=f"model is on meta; {message}"):
        optimize_for_inference(build("vit").to("meta"))
    monkeypatch.setattr(inference, "devices", lambda model: places)
    with pytest.raises(ValueError, match=f"model is on {', '.join(places)}; {message}"):
        optimize_for_inference(build("vit"))


def test_a_model_without_weights_is_copied():
    model = nn.Sequential(nn.ReLU())
    assert optimize_for_inference(model) is not model


def test_maps_are_refused():
    for model, inputs in ((build("swin"), (images(),)), (translator(), (sentences(),) * 2)):
        with pytest.raises(RuntimeError, match="attention maps"):
            optimize_for_inference(model).attention_maps(*inputs)
        assert len(model.eval().attention_maps(*inputs)) > 0


@pytest.mark.parametrize("name", BACKBONES)
def test_a_copy_can_be_copied_and_pickled(name):
    fast, x = optimize_for_inference(noisy(build(name))), images()
    stored = io.BytesIO()
    torch.save(fast, stored)
    stored.seek(0)
    others = copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))
    for other in (*others, torch.load(stored, weights_only=False)):
        assert other is not fast and all(
            a is not b for a, b in zip(other.modules(), fast.modules())
        )
        same(other(x), fast(x), 0)


def test_a_transformer_can_be_copied():
    fast, src = optimize_for_inference(translator()), sentences()
    other = copy.deepcopy(fast)
    assert torch.equal(greedy(other, src, 8), greedy(fast, src, 8))
    assert other.output is not fast.output


def test_a_copy_of_a_copy():
    fast, x = optimize_for_inference(noisy(build("swinv2"))), images()
    same(optimize_for_inference(fast)(x), fast(x), 0)


def test_threads_may_share_a_copy():
    fast = optimize_for_inference(noisy(build("swin")))
    batches = [images(1, size) for size in (32, 16, 24) * 4]
    with torch.no_grad():
        wanted = [fast(x) for x in batches]
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(torch.no_grad()(fast), batches))
    for a, b in zip(found, wanted):
        same(a, b)


# --- what is not the book's -------------------------------------------------------------------


def test_other_models_keep_what_they_do():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    fast, x = optimize_for_inference(model), torch.randn(5, 4)
    assert [type(m) for m in fast] == [PackedLinear, nn.ReLU, PackedLinear]
    same(fast(x), model(x).detach())


def test_an_exchanged_activation_stays():
    for act in (nn.ReLU(), nn.GELU("tanh"), nn.Sequential(nn.SiLU(), nn.Tanh())):
        layer, x = Mlp(8, 16).eval(), torch.randn(3, 5, 8)
        layer.act = act
        same(optimize_for_inference(layer)(x), layer(x).detach())


def test_an_own_class_keeps_its_forward():
    class Doubled(Mlp):
        def forward(self, x):
            return 2 * super().forward(x)

    class Pooled(VisionTransformer):
        def forward_features(self, x):
            return super().forward_features(x).flip(1)

    layer, x = Doubled(8, 16).eval(), torch.randn(3, 5, 8)
    same(optimize_for_inference(layer)(x), layer(x).detach())
    model = noisy(Pooled(32, 8, embed_dim=24, depth=2, num_heads=3, num_classes=5))
    with torch.no_grad():
        same(optimize_for_inference(model)(images()), model(images()))


# --- layers that somebody has changed ---------------------------------------------------------


def small_resnet():
    """A ResNet of the library with four narrow blocks."""
    from torchvision.models.resnet import BasicBlock

    model, width = ResNet("resnet18"), 64
    for i in range(1, 5):
        shortcut = nn.Sequential(nn.Conv2d(width, 8, 1, 2, bias=False), FrozenBatchNorm2d(8))
        options = dict(downsample=shortcut, norm_layer=FrozenBatchNorm2d)
        setattr(model, f"layer{i}", nn.Sequential(BasicBlock(width, 8, 2, **options)))
        width = 8
    model.num_channels = [8] * 4
    return model


def detector():
    sizes = dict(embed_dim=16, num_heads=2, dim_feedforward=24)
    return DETR(3, 4, 1, 1, small_resnet(), **sizes)


def language_model(**options):
    sizes = dict(vocab_size=30, block_size=16, n_layer=2, n_head=4, n_embd=16)
    return GPT(GPTConfig(**GPT2_STYLE | sizes | options))


MODERN = dict(norm="rms", position="rotary", mlp="swiglu", n_kv_head=2, qk_norm=True)
TINY = dict(img_size=16, depths=(1, 2), window_size=2), dict(img_size=16, depth=2)
CHANGEABLE = {
    name: lambda name=name: build(name, **TINY[0 if name.startswith("swin") else 1])
    for name in BACKBONES
} | {
    "mae encoder": lambda: MaskedAutoencoder(
        16, 8, embed_dim=24, depth=2, num_heads=3, decoder_embed_dim=16, decoder_depth=1,
        decoder_num_heads=2).encoder(num_classes=5),
    "transformer": lambda: Transformer(**SIZES),
    "gpt of 2019": language_model,
    "modern gpt": lambda: language_model(**MODERN),
    "detr": detector,
}  # fmt: skip


def output_of(model, dtype=torch.float32):
    """What a model makes of its usual input, as one tensor."""
    with torch.no_grad():
        if isinstance(model, Transformer):
            return model(sentences(), sentences(2).repeat(2, 1)[:3])
        if isinstance(model, GPT):
            return model(torch.arange(16).view(2, 8))
        if isinstance(model, DETR):
            output = model(images(1, 32).to(dtype))
            return torch.cat([output.logits, output.boxes], dim=-1)
        return model(images(1, 16).to(dtype))


def enlarged(value):
    """One and a half times a tensor, or all tensors of a tuple or list."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return 1.5 * value
    if type(value) in (tuple, list):
        return type(value)(map(enlarged, value))
    return value


class Enlarged(nn.Module):
    """A layer, or an adapter's idea of one, whose output or input is enlarged."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs, **options):
        return enlarged(inputs[0] if self.inner is None else self.inner(*inputs, **options))


def change_hook(parent, name, layer):
    layer.register_forward_hook(lambda layer, inputs, output: enlarged(output))


def change_pre_hook(parent, name, layer):
    layer.register_forward_pre_hook(lambda layer, inputs: (enlarged(inputs[0]), *inputs[1:]))


def change_method(parent, name, layer):
    forward = type(layer).forward
    layer.forward = lambda *inputs, **options: enlarged(forward(layer, *inputs, **options))


def change_class(parent, name, layer):
    cls = type(layer)

    def forward(self, *inputs, **options):
        return enlarged(cls.forward(self, *inputs, **options))

    layer.__class__ = type(f"Own{cls.__name__}", (cls,), dict(forward=forward))


def change_layer(parent, name, layer):
    setattr(parent, name, Enlarged(layer))


def change_weight(parent, name, layer):
    for key, _ in [*layer.named_parameters(recurse=False)]:
        nn.utils.parametrize.register_parametrization(layer, key, Enlarged(), unsafe=True)


def change_pruned(parent, name, layer):
    for key, _ in [*layer.named_parameters(recurse=False)]:
        prune.random_unstructured(layer, key, 0.5)


CHANGES = [
    *(change_hook, change_pre_hook, change_method, change_class, change_layer),
    *(change_weight, change_pruned),
]


def layers_to_change(model):
    """Of each kind of layers the last one: (name of the parent, own name)."""
    found = {}
    for name, layer in model.named_modules():
        parent, _, own = name.rpartition(".")
        kind = re.sub(r"^(conv|bn|layer|norm|ln_|dropout|)\d", r"\1", own)
        if name:
            found[type(layer), kind] = parent, own
    return list(found.values())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CHANGEABLE)
def test_a_changed_layer_is_called_as_it_is(name, change):
    """The oracle is the changed model itself; most changes must show in its output."""
    torch.manual_seed(0)
    if name == "detr":
        pytest.importorskip("torchvision")
    model, effective = noisy(CHANGEABLE[name]()), 0
    before, places = output_of(model), layers_to_change(model)
    for path, own in places:
        changed = copy.deepcopy(model)
        parent = changed.get_submodule(path)
        change(parent, own, getattr(parent, own))
        try:
            wanted = output_of(changed)
        except (AttributeError, TypeError, RuntimeError, KeyError, ValueError):
            continue  # the model itself does not allow it
        scale = max(1.0, wanted.abs().max().item())
        same(output_of(optimize_for_inference(changed)), wanted, 2e-5 * scale)
        effective += not torch.equal(wanted, before)
    assert effective >= 3


@pytest.mark.parametrize("name", ["vit", "transformer"])
def test_a_model_that_was_just_pruned(name):
    """Before the first call the pruned weights are results, which deepcopy refuses."""
    model = noisy(CHANGEABLE[name]())
    for layer in list(model.modules()):
        if type(layer) is nn.Linear:
            prune.l1_unstructured(layer, "weight", 0.5)
    same(output_of(optimize_for_inference(model)), output_of(model))


def test_a_replaced_last_attention_is_called():
    model = noisy(use_rotary(VisionTransformer(32, 8, embed_dim=24, depth=2, num_heads=3)))
    with torch.no_grad():
        same(optimize_for_inference(model)(images()), model(images()), 1e-4)


def test_a_last_block_that_mixes_tokens_is_whole():
    """The head reads one token, but this network makes it of all tokens."""

    class Mixer(nn.Module):
        def forward(self, x):
            return x.cumsum(1).flip(1)

    model = noisy(build("vit"))
    for part in ("mlp", "norm2", "ls2"):
        changed = copy.deepcopy(model)
        setattr(changed.blocks[-1], part, Mixer())
        with torch.no_grad():
            same(optimize_for_inference(changed)(images()), changed(images()), 1e-4)


def test_a_method_of_the_models_own_is_called():
    model = noisy(build("vit"))
    embed = model.embed
    model.embed = lambda x: 2 * embed(x)
    with torch.no_grad():
        same(optimize_for_inference(model)(images()), model(images()))


@pytest.mark.parametrize("name", ["vit", "swin", "transformer", "modern gpt"])
def test_a_hook_on_all_modules_sees_all_modules(name):
    model = noisy(CHANGEABLE[name]())

    def enlarge(module, inputs, output):
        return enlarged(output) if type(module) is nn.Linear else None

    hook = torch.nn.modules.module.register_module_forward_hook(enlarge)
    try:
        same(output_of(optimize_for_inference(model)), output_of(model), 1e-3)
    finally:
        hook.remove()


def test_a_bias_of_cross_attention_may_be_missing():
    layer = CrossAttention(8, 2, bias=False)
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    with torch.no_grad():
        same(optimize_for_inference(layer)(x, memory), layer(x, memory))
    layer = CrossAttention(8, 2, kdim=6, vdim=4)
    assert type(optimize_for_inference(layer)) is CrossAttention


def test_weights_that_are_computed_stay_computed():
    layer, x = Mlp(8, 16).eval(), torch.randn(3, 5, 8)
    layer.fc1 = nn.utils.parametrizations.weight_norm(layer.fc1)
    fast = optimize_for_inference(layer)
    same(fast(x), layer(x).detach())
    assert "Parametrized" in type(fast.fc1).__name__


@pytest.mark.filterwarnings("ignore")  # PyTorch moves quantization to another package
def test_a_quantized_model_stays_quantized():
    model, x = noisy(build("vit")), images()
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    fast = optimize_for_inference(small)
    assert not any(isinstance(m, PackedLinear) for m in fast.modules())
    with torch.no_grad():
        same(fast.forward_features(x), small.forward_features(x))
        same(fast(x), small(x))  # rounding to 8 bits depends on all tokens of the last block


def test_windows_one_by_one_stay_so():
    model, x = noisy(build("swinv2")), images()
    model.set_sequential_attention(2)
    fast = optimize_for_inference(model)
    assert not any(isinstance(m, inference.FastWindowAttention) for m in fast.modules())
    with torch.no_grad():
        same(fast(x), model(x))


def test_vectors_of_length_zero_give_no_nan():
    model = build("swinv2").eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.zero_()
    assert optimize_for_inference(model)(images()).isfinite().all()


def test_a_new_head():
    fast = optimize_for_inference(noisy(build("vit")))
    fast.reset_classifier(7)
    assert fast(images()).shape == (2, 7)


def test_one_size_of_map_is_kept():
    layer = inference.FastWindowAttention(WindowAttention(8, 2, 4, 2).requires_grad_(False))
    x = torch.randn(1, 12, 8, 8)
    layer(x)
    bias = layer.last[1]
    layer(x)
    assert layer.last[1] is bias and bias.shape == (6, 2, 16, 16)
    layer(torch.randn(1, 8, 8, 8))
    assert layer.last[1].shape == (4, 2, 16, 16)


def test_tnt_of_both_kinds():
    for legacy in (False, True):
        model = noisy(
            TNT(32, 8, embed_dim=24, inner_dim=8, depth=2, num_heads_inner=2,
                num_heads_outer=3, num_classes=5, first_stride=4, legacy=legacy)
        )  # fmt: skip
        with torch.no_grad():
            same(optimize_for_inference(model)(images()), model(images()))


# --- the state of a copy ----------------------------------------------------------------------


@pytest.mark.parametrize("name", CHANGEABLE)
def test_a_copy_takes_no_other_weights(name):
    """Not alone, not as a part of another model, and not in a part of its own."""
    if name == "detr":
        pytest.importorskip("torchvision")
    model = noisy(CHANGEABLE[name]())
    fast, other = optimize_for_inference(model), noisy(copy.deepcopy(model), 1)
    before, whole = output_of(fast), nn.Sequential(fast)
    parts = [part for part in fast.modules() if any(True for _ in part.parameters())]
    for copied in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        for strict in (True, False):
            with pytest.raises(RuntimeError, match="load it into the model and optimize that"):
                copied.load_state_dict(other.state_dict(), strict=strict)
        same(output_of(copied), before, 0)
    with pytest.raises(RuntimeError, match="load it into the model"):
        whole.load_state_dict(nn.Sequential(other).state_dict())
    with pytest.raises(RuntimeError, match="load it into the model"):
        parts[-1].load_state_dict({})
    same(output_of(fast), before, 0)
    model.load_state_dict(model.state_dict())  # which is not its copy


@pytest.mark.parametrize("name", CHANGEABLE)
def test_a_copy_has_no_training_mode(name):
    if name == "detr":
        pytest.importorskip("torchvision")
    fast = optimize_for_inference(CHANGEABLE[name]())
    before = output_of(fast)
    for copied in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with pytest.raises(RuntimeError, match=r"mode \(True\)"):
            copied.train()
        assert copied.eval() is copied
        same(output_of(copied), before, 0)


@pytest.mark.parametrize("name", CHANGEABLE)
def test_a_copy_in_another_dtype_or_place_is_refused(name):
    if name == "detr":
        pytest.importorskip("torchvision")
    model = noisy(CHANGEABLE[name]())
    for move in ("bfloat16", "half", "double"):
        fast = getattr(optimize_for_inference(model), move)()
        with pytest.raises(TypeError, match="as the packed weights are"):
            output_of(fast, next(fast.parameters()).dtype)
    layer = optimize_for_inference(nn.Linear(4, 3))
    with pytest.raises(TypeError, match="on meta .* must be on cpu"):
        layer(torch.randn(2, 4, device="meta"))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_packed_convolution_refuses_what_it_cannot_take(groups):
    conv, norm = nn.Conv2d(4, 6, 3, padding=1, groups=groups), noisy(nn.BatchNorm2d(6))
    packed, x = inference._PackedConv(conv.eval(), norm), torch.randn(2, 4, 5, 7)
    with torch.no_grad():
        same(packed(x), norm(conv(x)).relu())
        same(packed(x, x[:, :1].expand(-1, 6, -1, -1)), (norm(conv(x)) + x[:, :1]).relu())
    for inputs in (
        (x.clone().requires_grad_(),),
        (x, torch.zeros(2, 6, 5, 7).requires_grad_()),
    ):
        with pytest.raises(RuntimeError, match="requires a gradient"):
            packed(*inputs)
    for wrong in (x.bfloat16(), x.double(), x[:, :2], x.to("meta"), x.flatten()):
        with pytest.raises(TypeError, match="with 4 channels in axis -3"):
            packed(wrong)


@pytest.mark.parametrize("options", [dict(padding="same"), dict(padding_mode="reflect")])
def test_a_convolution_with_another_padding(options):
    conv, norm = nn.Conv2d(3, 4, 3, **dict(padding=1) | options), noisy(nn.BatchNorm2d(4))
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        same(inference._PackedConv(conv.eval(), norm)(x), norm(conv(x)).relu())


@pytest.mark.parametrize("name", ["swin", "swinv2"])
def test_a_failed_call_leaves_the_copy_as_it_was(name):
    model, x = noisy(build(name)), images()
    fast = optimize_for_inference(model)
    with torch.no_grad():
        with pytest.raises(TypeError, match="comes from torch.autocast"):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                fast(x)
        same(fast(x), model(x))


@pytest.mark.parametrize("name", BACKBONES)
def test_other_image_sizes_from_now_on(name):
    """`set_input_size` of a copy is that of the model."""
    model = noisy(build(name))
    fast = optimize_for_inference(model)
    with torch.no_grad():
        fast(images())
        for size in (48, 64, 32):
            model.set_input_size(size)
            fast.set_input_size(size)
            same(fast(images(1, size)), model(images(1, size)))


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    for package in ("timm", "onnx", "onnxruntime"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "benchmarks.inference", "speed", "--tiny"]
    command += ["--repeats", "2", "--models", "vit_small_patch16_224"]
    command += ["--modes", "float32", "bfloat16"]
    done = subprocess.run(
        [*command, "--parts", "models", "--out", tmp_path],
        cwd=Path(__file__).parent.parent,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "inference_cpu.json").read_text(encoding="utf-8"))
    assert set(record["mode"]) == {"float32", "bfloat16"} and record["threads"] == 1
    names = {row["name"] for row in record["rows"]}
    assert {"timm", "without packed weights", "without short last block"} <= names
    for row in record["rows"]:
        low, high = row["slower"]["quartiles"]
        assert row["ms"] > 0 and low <= row["slower"]["ratio"] <= high
