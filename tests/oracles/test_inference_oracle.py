"""Optimized copies and packed layers give what PyTorch's own functions give."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from draws import batches, counts, drawn, layouts, map_sizes, masks, normal, seeds, tolerance
from hypothesis import strategies as st

from attnlib import inference
from attnlib.gpt import GPT, GPTConfig
from attnlib.inference import PackedLinear, _PackedConv, optimize_for_inference
from attnlib.swin import SwinTransformer
from attnlib.swinv2 import SwinTransformerV2
from attnlib.tnt import TNT
from attnlib.transformer import Transformer
from attnlib.vit import VisionTransformer

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
dtypes = st.sampled_from(DTYPES)


@pytest.fixture(autouse=True)
def packing_pays(monkeypatch):
    """Whatever the processor: packed products are what is tested here."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


def close(a, b, dtype):
    """Up to 16 roundings of the largest number; oneDNN sums in float32."""
    assert a.shape == b.shape and a.dtype == dtype and torch.isfinite(a).all()
    largest = max(1.0, b.abs().max().item()) if b.numel() else 1.0
    limit = max(tolerance(dtype), 1e-5 if dtype == torch.float32 else 0) * largest
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=limit)


def filled(model):
    """No weight or bias is 0 or 1, in evaluation mode."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.1 * normal(p.shape, torch.float32, i))
    return model.eval()


# --- layers -----------------------------------------------------------------------------------


@drawn(
    st.data(),
    st.lists(st.sampled_from((2, 1, 0, 5)), max_size=3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(sorted(inference.FUNCTIONS)),
    dtypes,
)
def test_packed_layers(data, lead, fan_in, fan_out, activation, dtype):
    """Any leading axes, strides and activations; also without a bias or a row."""
    weight = normal((fan_out, fan_in), dtype, 1, data.draw(layouts))
    bias = normal((fan_out,), dtype, 2) if data.draw(st.booleans()) else None
    x = normal((*lead, fan_in), dtype, 3, data.draw(layouts))
    layer = PackedLinear(weight, bias, activation)
    functions = {
        "none": lambda y: y,
        "relu": F.relu,
        "gelu": F.gelu,
        "swish": F.silu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    }
    own = None if bias is None else bias.double()
    wanted = functions[activation](F.linear(x.double(), weight.double(), own))
    with torch.no_grad():
        close(layer(x), wanted, dtype)
        close(copy.deepcopy(layer)(x), wanted, dtype)
    assert inference._can_pack(dtype) is (layer.packed is not None)


@drawn(
    st.data(),
    batches,
    st.integers(1, 3),
    st.integers(1, 2),
    map_sizes(7),
    map_sizes(3),
    st.booleans(),
    st.sampled_from((torch.float32, torch.float64)),
)
def test_packed_convolutions(data, batch, channels, groups, size, kernel, relu, dtype):
    """With any stride, padding, dilation, and groups, on maps that are not square."""
    options = dict(
        stride=data.draw(map_sizes(2)),
        padding=kernel,
        groups=groups,
        dilation=data.draw(map_sizes(2)),
        bias=data.draw(st.booleans()),
    )
    conv = nn.Conv2d(channels * groups, 2 * groups, kernel, **options).to(dtype)
    norm = filled(nn.BatchNorm2d(2 * groups))
    norm.running_mean.copy_(normal(norm.running_mean.shape, torch.float32, 5))
    norm.running_var.copy_(1 + normal(norm.running_var.shape, torch.float32, 6).abs())
    norm, x = (
        norm.to(dtype),
        normal((batch, channels * groups, *size), dtype, 3, data.draw(layouts)),
    )
    packed = _PackedConv(conv.eval(), norm, relu)
    with torch.no_grad():
        wanted = copy.deepcopy(norm).double()(copy.deepcopy(conv).double()(x.double()))
        close(packed(x), wanted.relu() if relu else wanted, dtype)
        shortcut = normal(wanted.shape, dtype, 4, data.draw(layouts))
        if relu:
            close(packed(x, shortcut), (wanted + shortcut.double()).relu(), dtype)


@drawn(st.data(), batches, counts, counts, st.sampled_from((torch.float32, torch.float64)))
def test_attend(data, batch, n, m, dtype):
    """Attention, zeros where a query may attend to nothing."""
    shape = (batch, 2, n, m)
    q, k, v = (
        normal((batch, 2, length, 4), dtype, i, data.draw(layouts))
        for i, length in enumerate((n, m, m))
    )
    mask = data.draw(st.none() | masks(shape))
    bias = normal(shape, dtype, 5) if data.draw(st.booleans()) else None
    scale = data.draw(st.sampled_from((None, 0.0, 2.0)))
    s = q.double() @ k.double().mT * (0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    s = s if mask is None else s.masked_fill(~mask, -torch.inf)
    empty = (s == -torch.inf).all(-1, keepdim=True)
    wanted = s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ v.double()
    close(inference.fast_attention(q, k, v, mask, bias, scale), wanted, dtype)


@drawn(st.integers(1, 3), st.integers(1, 5), dtypes, seeds)
def test_inputs_that_do_not_fit_are_named(channels, other, dtype, seed):
    weight = torch.zeros(2, channels, dtype=dtype)
    inference._check_packed(normal((2, channels), dtype), weight, channels, -1)
    if other != channels:
        with pytest.raises(TypeError, match=f"with {channels} channels in axis -1"):
            inference._check_packed(normal((2, other), dtype), weight, channels, -1)
    x = normal((channels,), dtype).requires_grad_()
    with pytest.raises(RuntimeError, match="requires a gradient"):
        inference._check_packed(x, weight, channels, -1)


@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_a_bias_with_gaps_in_memory(layout):
    weight, x = normal((4, 3), torch.float32, 1), normal((2, 3), torch.float32, 3)
    bias = normal((4,), torch.float32, 2, layout)
    with torch.no_grad():
        close(PackedLinear(weight, bias)(x), F.linear(x, weight, bias), torch.float32)


# --- models -----------------------------------------------------------------------------------


@st.composite
def backbones(draw):
    """A tiny model of images that need not be square, and their height and width."""
    size = tuple(4 * n for n in draw(map_sizes(4)))
    common = dict(img_size=size, num_classes=draw(st.integers(1, 3)))
    kind = draw(st.sampled_from(("vit", "swin", "swinv2", "tnt")))
    if kind == "vit":
        model = VisionTransformer(
            patch_size=4,
            embed_dim=8,
            depth=draw(st.integers(1, 2)),
            num_heads=2,
            global_pool=draw(st.sampled_from(("token", "avg"))),
            **common,
        )
    elif kind == "tnt":
        model = TNT(
            patch_size=4,
            embed_dim=8,
            inner_dim=4,
            depth=draw(st.integers(1, 2)),
            num_heads_inner=1,
            num_heads_outer=2,
            **common,
        )
    else:
        cls = SwinTransformer if kind == "swin" else SwinTransformerV2
        model = cls(
            patch_size=2,
            embed_dim=8,
            depths=(2,),
            num_heads=(2,),
            window_size=draw(st.integers(1, 4)),
            **common,
        )
    return filled(model), size


def test_no_images():
    """A batch of 0, with shifted windows."""
    sizes = dict(embed_dim=8, depths=(2,), num_heads=(2,), window_size=2)
    model = SwinTransformer((8, 8), 2, 3, 5, **sizes).eval()
    x = torch.zeros(0, 3, 8, 8)
    assert model(x).shape == (0, 5)
    with torch.no_grad():
        assert optimize_for_inference(model)(x).shape == (0, 5)


@drawn(backbones(), st.integers(1, 3), st.sampled_from((torch.float32, torch.float64)), layouts)
def test_images(model_and_size, batch, dtype, layout):
    """Logits and features of the copy are those of the model, which stays as it was."""
    model, size = model_and_size
    model = model.to(dtype)
    before = copy.deepcopy(model.state_dict())
    fast = optimize_for_inference(model)
    x = normal((batch, 3, *size), dtype, 3, layout)
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()
        close(fast(x), wanted(x.double()), dtype)
        close(fast.forward_features(x), wanted.forward_features(x.double()), dtype)
    assert type(fast) is type(model) and fast is not model and not fast.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert inference.devices(fast) == ["cpu"]
    with pytest.raises(RuntimeError, match="keeps no attention maps"):
        fast.attention_maps(x)


@drawn(
    st.integers(1, 3),
    counts,
    counts,
    st.sampled_from(("sinusoidal", "relative", "rotary")),
    st.booleans(),
    st.sampled_from(("relu", "gelu", "silu")),
    seeds,
)
def test_sentences(batch, n, m, position, norm_first, activation, seed):
    """A Transformer's logits, for sources with padding, or of nothing else."""
    model = filled(
        Transformer(
            12,
            12,
            8,
            2,
            1,
            1,
            16,
            position=position,
            norm_first=norm_first,
            activation=activation,
            max_length=8,
        )
    )
    fast = optimize_for_inference(model)
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(12, (batch, n), generator=generator)
    tgt = torch.randint(1, 12, (batch, m), generator=generator)
    lengths = torch.randint(n + 1, (batch, 1), generator=generator)
    src = src.clamp(min=1).masked_fill(torch.arange(n) >= lengths, 0)
    with torch.no_grad():
        close(fast(src, tgt), model.double()(src, tgt), torch.float32)


@drawn(
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2)),
    st.sampled_from(("rotary", "learned", "none")),
    st.sampled_from(("swiglu", "gelu")),
    st.booleans(),
    st.sampled_from((None, 1, 3)),
)
def test_texts(batch, n, kv, group, position, mlp, qk_norm, window):
    """A GPT of any kind, with grouped heads and a window."""
    config = GPTConfig(
        vocab_size=11,
        block_size=8,
        n_layer=2,
        n_head=kv * group,
        n_kv_head=kv,
        n_embd=4 * kv * group,
        position=position,
        mlp=mlp,
        qk_norm=qk_norm,
        window=window,
    )
    model = filled(GPT(config))
    fast = optimize_for_inference(model)
    tokens = torch.randint(11, (batch, n), generator=torch.Generator().manual_seed(n))
    with torch.no_grad():
        close(fast(tokens), model.double()(tokens), torch.float32)


MODELS = "inside of an optimized copy, above: tests/test_inference.py"
ORACLES = {
    "PackedLinear": test_packed_layers,
    "pack": test_texts,
    "_can_pack": test_packed_layers,
    "FUNCTIONS": test_packed_layers,
    "_PackedConv": test_packed_convolutions,
    "fast_attention": test_attend,
    "_check_packed": test_inputs_that_do_not_fit_are_named,
    "optimize_for_inference": test_images,
    "devices": test_images,
    "_refuse_maps": test_images,
    "forward_short": test_images,
    "_first_tokens": test_images,
    "FastWindowAttention": test_images,
    "_FastSelfAttention": test_sentences,
    "_FastCrossAttention": test_sentences,
    "_pack_feed_forward": test_sentences,
    "_FastCausalAttention": test_texts,
    "_pack_gpt_mlp": test_texts,
    "_pack_mlp": test_images,
    "_pack_all": test_images,
    "replace_module": test_images,
}
NOT_HERE = {
    "_SMALL": "a constant",
    "_EACH_TOKEN": "a table of classes",
    "_REPLACEMENTS": "a table of classes",
    "_NORMS": "a table of classes",
    "_PARTS": "a table of classes",
    "packing_pays": "depends on the processor: tests/test_inference.py",
    "_FastBlock": MODELS,
    "FastResNet": MODELS,
    "_can_shorten": MODELS,
    "_can_pack_resnet": MODELS,
    "_has_global_hooks": MODELS,
    "fuse": "needs a GPU: tests/test_windows_fused.py",
}


def test_every_public_name_is_here_or_said_to_be_elsewhere():
    assert not ORACLES.keys() & NOT_HERE.keys()
    assert set(inference.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
