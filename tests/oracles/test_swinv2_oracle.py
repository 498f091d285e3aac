"""Cosine attention in windows beside torchvision's, and its bias beside NumPy's coordinates."""

import math

import pytest
import torch
import torch.nn.functional as F
from draws import batches, drawn, dtypes, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import example
from hypothesis import strategies as st
from torchvision.models import swin_transformer as torchvisions

from attnlib import swinv2 as module
from attnlib.attention import record_attention
from attnlib.models import load_pretrained
from attnlib.swin import WindowLayout, relative_position_index, window_layout
from attnlib.swinv2 import (
    MAX_LOGIT_SCALE,
    PatchMergingV2,
    SwinBlockV2,
    SwinTransformerV2,
    WindowAttentionV2,
    _check_pretrained_window,
    _sequential_attention,
    log_coordinates,
    normalize,
)
from helpers import build, close, exact_log_coordinates

sides = st.tuples(st.integers(1, 5), st.integers(1, 5))


@st.composite
def calls(draw):
    """A map, and the arguments of a layer: a shift of one axis, of both or of none."""
    size, window = draw(map_sizes(8)), draw(sides)
    shift = tuple(draw(st.integers(0, side - 1)) for side in window)
    return size, window, shift, draw(st.sampled_from(("shrink", "pad")))


def random_layer(call, seed, **options):
    size, window, shift, small_maps = call
    torch.manual_seed(seed)
    layer = WindowAttentionV2(4, 2, window, shift, small_maps=small_maps, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    torch.nn.init.normal_(layer.logit_scale, mean=2.0, std=2.0)  # some are above the limit
    return layer


# --- lengths and offsets ----------------------------------------------------------------------


@drawn(
    st.sampled_from(((), (3,), (2, 5), (0, 4))),
    st.integers(1, 8),
    st.sampled_from((1.0, 1e-3, 1e3)),
    dtypes(),
    seeds,
    layouts,
)
def test_vectors_have_the_length_asked_for(shape, width, scale, dtype, seed, layout):
    x = scale * normal((*shape, width), dtype, seed, layout)
    length = normal((*shape, 1), torch.float64, seed).abs().add(0.5).to(dtype)
    ours, theirs = (x.to(d).detach().requires_grad_() for d in (dtype, torch.float64))
    found = normalize(ours, length)
    wanted = length.double() * F.normalize(theirs, dim=-1)
    assert found.dtype == dtype
    close(found.double(), wanted, tolerance(dtype, 8))
    if dtype in (torch.float64, torch.float32):
        slopes = [
            torch.autograd.grad(y.pow(3).sum(), z)[0].double()
            for y, z in ((found, ours), (wanted, theirs))
        ]
        largest = slopes[1].abs().max().item() if x.numel() else 0
        near = (3 * length.double().pow(3) / x.double().norm(dim=-1, keepdim=True)).flatten()
        limit = max([largest, *near.tolist()])
        close(slopes[0], slopes[1], tolerance(dtype, 64) * max(1, limit))


@drawn(sides, sides | st.just((0, 0)), dtypes())
@example((1, 4), (1, 1), torch.float16)
def test_offsets_are_those_of_the_equation(window, trained, dtype):
    found = log_coordinates(window, trained, dtype=dtype)
    wanted = exact_log_coordinates(window, trained)
    assert found.dtype == dtype and found.shape == wanted.shape
    close(found.double(), wanted, tolerance(dtype, 4))


@drawn(st.one_of(st.integers(-1, 9), st.lists(st.integers(-1, 9), max_size=3).map(tuple)))
@example((0, 0))
@example((0, 4))
def test_a_trained_window_is_one_or_the_models_own(window):
    pair = window if isinstance(window, tuple) else (window, window)
    if len(pair) == 2 and (min(pair) > 0 or pair == (0, 0)):
        assert _check_pretrained_window(window) == pair
    else:
        with pytest.raises(ValueError, match="pretrained_window_size"):
            _check_pretrained_window(window)


# --- attention --------------------------------------------------------------------------------


def exact_bias(layer, window):
    """The bias (h, N, N) among the tokens of a window, by NumPy's coordinates."""
    trained = layer.pretrained_window_size
    offsets = exact_log_coordinates(layer.window_size, trained)
    first, _, last = layer.cpb_mlp
    hidden = F.linear(offsets, first.weight.double(), first.bias.double()).clamp(min=0)
    table = 16 / (1 + (-F.linear(hidden, last.weight.double())).exp())
    return table[relative_position_index(window, layer.window_size)].permute(2, 0, 1)


def torchvision_attention(layer, x):
    """torchvision's function for the weights of a layer; it knows no trained window."""
    window = layer.layout(x.shape[1:3]).window
    weights = {key: p.double() for key, p in layer.named_parameters()}
    bias = None
    if layer.q_bias is not None:
        nothing = torch.zeros_like(weights["q_bias"])
        bias = torch.cat([weights["q_bias"], nothing, weights["v_bias"]])
    return torchvisions.shifted_window_attention(
        x,
        weights["qkv.weight"],
        weights["proj.weight"],
        exact_bias(layer, window)[None],
        list(window),
        layer.num_heads,
        shift_size=list(layer.shift_size),
        qkv_bias=bias,
        proj_bias=weights["proj.bias"],
        logit_scale=weights["logit_scale"],
    )


trained_windows = st.sampled_from((0, 1, (3, 2), 8))


@drawn(calls(), st.booleans(), trained_windows, st.integers(1, 3), seeds, layouts)
@example(((4, 9), (4, 4), (2, 2), "shrink"), True, 0, 2, 0, "expanded")
@example(((7, 2), (3, 5), (0, 4), "pad"), False, (3, 2), 1, 0, "strided")
def test_window_attention_is_torchvisions(call, qkv_bias, trained, batch, seed, layout):
    """-100 stands for -inf there, so that a large cosine reaches over a seam: e^-100 + 32."""
    layer = random_layer(call, seed, qkv_bias=qkv_bias, dtype=torch.float64)
    layer.logit_scale.data.clamp_(max=2.5)  # exp(-100 + 2 · 12 + 16) is 0 in float64
    layer.set_pretrained_window(trained)
    x, found = normal((batch, *call[0], 4), seed=seed, layout=layout), []
    for function in (layer, lambda x: torchvision_attention(layer, x)):
        images = x.detach().clone().requires_grad_()
        out = function(images)
        inputs = [images, *layer.parameters()]
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-8 * max(1, b.abs().max().item()))


@drawn(calls(), dtypes(torch.float32, torch.bfloat16, torch.float16), batches, seeds)
def test_lower_precision_is_near_float64(call, dtype, batch, seed):
    """Logits of up to 40, of which a unit of rounding counts e^(40 · eps)."""
    layer = random_layer(call, seed).to(dtype)
    layer.logit_scale.data.clamp_(max=2.5)
    x = normal((batch, *call[0], 4), dtype, seed)
    found = layer(x)
    if batch == 0:
        assert found.shape == x.shape and found.dtype == dtype
        return
    wanted = torchvision_attention(layer, x.double())
    limit = tolerance(dtype, 64) * max(1, wanted.abs().max().item())
    close(found.double(), wanted, limit)


@drawn(calls(), st.integers(1, 5), batches, dtypes(torch.float64, torch.float32), seeds)
def test_a_few_windows_at_a_time_are_all_at_once(call, at_once, batch, dtype, seed):
    layout = window_layout(call[0], call[1], call[2], call[3] == "shrink")
    windows = math.prod(layout.padded) // math.prod(layout.window)
    n, heads = math.prod(layout.window), 2
    q, k, v = (normal((batch, windows * heads, n, 3), dtype, seed + i) for i in range(3))
    bias = normal((heads, n, n), dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(windows, n, n, generator=generator) < 0.6
    mask[:, 0] = seed % 2 == 0  # a row that may attend to nothing
    inputs = [x.requires_grad_() for x in (q, k, v, bias)]
    found = _sequential_attention(q, k, v, bias, mask, at_once)
    exact = [x.double().detach().requires_grad_() for x in inputs]
    logits = (exact[0] @ exact[1].mT).unflatten(1, (windows, heads)) + exact[3]
    weights = logits.masked_fill(~mask[:, None], -1e300).softmax(-1) * mask[:, None]
    wanted = weights.flatten(1, 2) @ exact[2]
    close(found.double(), wanted, tolerance(dtype, 64))
    slopes = [
        torch.autograd.grad(y.square().sum(), x) for y, x in ((found, inputs), (wanted, exact))
    ]
    for a, b in zip(*slopes, strict=True):
        assert a.isfinite().all()
        largest = b.abs().max().item() if b.numel() else 0
        close(a.double(), b, tolerance(dtype, 256) * max(1, largest))


@drawn(calls(), st.sampled_from((1, 2, 3, 7)), st.integers(1, 2), seeds)
def test_a_layer_with_few_windows_at_a_time_is_the_same(call, at_once, batch, seed):
    layer = random_layer(call, seed, dtype=torch.float64)
    x = normal((batch, *call[0], 4), seed=seed)
    with record_attention() as whole:
        wanted = layer(x)
    layer.windows_at_once = at_once
    with record_attention() as parts:
        found = layer(x)
    close(found, wanted)
    close(torch.cat(parts, dim=1), whole[0])


@drawn(calls(), sides, sides, seeds)
def test_windows_that_change_keep_the_offsets_that_were_trained(call, first, second, seed):
    """Also after two changes, and in a state dict: they are those of the first window."""
    layer = random_layer(call, seed, dtype=torch.float64)
    for window in (first, second):
        layer.set_window_size(window)
        assert layer.trained_window() == call[1]
        wanted = exact_log_coordinates(window, call[1])
        hidden = layer.cpb_mlp(wanted)
        close(layer.bias_table(), 16 * hidden.sigmoid(), 1e-12)
    other = WindowAttentionV2(4, 2, second, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    close(other.bias_table(), layer.bias_table(), 0)
    size = (9, 7)
    layout = other.layout(size)
    whole = WindowLayout(layout.window, layout.window, (0, 0), layout.window)
    close(other.bias(whole, masked=False), exact_bias(layer, layout.window), 1e-12)


# --- blocks and models ------------------------------------------------------------------------


@drawn(calls(), batches, seeds, layouts)
def test_blocks_and_merging_have_their_norms_behind(call, batch, seed, layout):
    size, window, shift, small_maps = call
    torch.manual_seed(seed)
    block = SwinBlockV2(4, 2, window, shift, 2.5, small_maps=small_maps, dtype=torch.float64)
    x = normal((batch, *size, 4), seed=seed, layout=layout)
    assert torch.equal(block(x), x)  # its norms start at zero
    for norm in (block.norm1, block.norm2):
        torch.nn.init.normal_(norm.weight)
    wanted = x + block.norm1(block.attn(x))
    hidden = F.gelu(F.linear(wanted, block.mlp.fc1.weight, block.mlp.fc1.bias))
    assert hidden.shape[-1] == 10
    wanted = wanted + block.norm2(F.linear(hidden, block.mlp.fc2.weight, block.mlp.fc2.bias))
    close(block(x), wanted)
    ours, theirs = PatchMergingV2(4), torchvisions.PatchMergingV2(4)
    theirs.load_state_dict(ours.state_dict())
    close(ours.double()(x), theirs.double()(x))


@drawn(map_sizes(8), sides, st.sampled_from((None, 1, 2)), st.integers(1, 2), seeds)
@example((1, 1), (4, 4), None, 1, 0)
@example((9, 2), (2, 3), 2, 2, 0)
def test_models_of_any_map_are_torchvisions(size, window, at_once, batch, seed):
    torch.manual_seed(seed)
    window = tuple(max(2, side) for side in window)  # theirs divides by a side less 1
    theirs = torchvisions.SwinTransformer(
        [4, 4],
        16,
        [2, 2],
        [1, 2],
        list(window),
        num_classes=5,
        stochastic_depth_prob=0.0,
        block=torchvisions.SwinTransformerBlockV2,
        downsample_layer=torchvisions.PatchMergingV2,
    )
    for name, buffer in theirs.named_buffers():
        if name.endswith("relative_coords_table"):
            exact = exact_log_coordinates(window, (0, 0)).view_as(buffer)
            close(buffer.double(), exact, 1e-6)
            theirs.get_submodule(name.rpartition(".")[0]).relative_coords_table = exact
    ours = build("swinv2", img_size=64, window_size=window, small_maps="pad").double().eval()
    assert isinstance(ours, SwinTransformerV2)
    assert load_pretrained(ours, theirs.double().eval().state_dict()) == []
    ours.set_sequential_attention(at_once)
    x = normal((batch, 3, 4 * size[0], 4 * size[1]), seed=seed)
    close(ours(x), theirs(x), 1e-9)


def test_the_largest_scale():
    assert MAX_LOGIT_SCALE == math.log(100)


ORACLES = {
    "MAX_LOGIT_SCALE": test_the_largest_scale,
    "normalize": test_vectors_have_the_length_asked_for,
    "log_coordinates": test_offsets_are_those_of_the_equation,
    "_check_pretrained_window": test_a_trained_window_is_one_or_the_models_own,
    "_sequential_attention": test_a_few_windows_at_a_time_are_all_at_once,
    "_store_trained_window": test_windows_that_change_keep_the_offsets_that_were_trained,
    "_restore_trained_window": test_windows_that_change_keep_the_offsets_that_were_trained,
    "WindowAttentionV2": test_window_attention_is_torchvisions,
    "SwinBlockV2": test_blocks_and_merging_have_their_norms_behind,
    "PatchMergingV2": test_blocks_and_merging_have_their_norms_behind,
    "SwinTransformerV2": test_models_of_any_map_are_torchvisions,
}


def test_every_public_name_is_tested_here():
    names = ORACLES.keys()
    assert {name for name in names if name[0] != "_"} == set(module.__all__)
