"""attnlib.vit_variants by short formulas in float64, timm, and transformers."""

from functools import partial

import pytest
import torch
from dense import agree, compare, dense
from draws import batches, counts, drawn, dtypes, layouts, map_sizes, normal, seeds
from hypothesis import example
from hypothesis import strategies as st
from timm.layers import SwiGLUPacked
from torch import nn
from transformers.activations import QuickGELUActivation

import attnlib.vit_variants as library
from attnlib.vit import PatchEmbed
from attnlib.vit_variants import QuickGELU, RotaryAttention, SwiGLU, apply_rotary_2d, use_rotary
from helpers import build

lengths = st.integers(min_value=0, max_value=6)
halves = dtypes(torch.bfloat16, torch.float16)


def random(module, dtype, seed):
    """The module with random parameters."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(0.5 * normal(parameter.shape, seed=seed + number))
    return module.to(dtype)


@st.composite
def inputs(draw, width, dtype):
    """Tokens with none, one, or two leading axes."""
    leading = draw(st.sampled_from(((), (draw(batches),), (draw(batches), 2))))
    return normal((*leading, draw(lengths), width), dtype, draw(seeds), draw(layouts))


# --- networks ---------------------------------------------------------------------------------


@drawn(counts, st.none() | counts, st.booleans(), dtypes(), seeds, st.data())
@example(3, None, True, torch.float32, 0, None)  # 3 columns are no gate and value
def test_swiglu(width, half, bias, dtype, seed, data):
    hidden = None if half is None else 2 * half
    if hidden is None and width % 2:
        with pytest.raises(ValueError, match=rf"hidden_features \({width}\)"):
            SwiGLU(width)
        return
    layer = random(SwiGLU(width, hidden, bias=bias), dtype, seed)
    x = data.draw(inputs(width, dtype))
    both, last = (part.weight.detach().double() for part in (layer.fc1, layer.fc2))

    def oracle(x):
        y = x @ both.T + (layer.fc1.bias.detach().double() if bias else 0)
        gate, value = y[..., : len(both) // 2], y[..., len(both) // 2 :]
        y = (gate / (1 + (-gate).exp()) * value) @ last.T
        return y + (layer.fc2.bias.detach().double() if bias else 0)

    compare(layer, oracle, [x], dtype, steps=64)
    peer = SwiGLUPacked(width, hidden, bias=bias).to(dtype)
    peer.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), peer(x))


@drawn(seeds, st.sampled_from((0.2, 0.7)))
def test_swiglu_drops_what_timm_drops(seed, drop):
    layer = random(SwiGLU(4, 12, drop=drop), torch.float64, seed)
    peer = SwiGLUPacked(4, 12, drop=drop).double()
    peer.load_state_dict(layer.state_dict())
    x, found = normal((2, 5, 4), seed=seed), []
    for part in (layer, peer):
        torch.manual_seed(seed)
        found.append(part(x))
    assert torch.equal(*found)


@drawn(counts, dtypes(), st.data())
def test_quick_gelu(width, dtype, data):
    x = data.draw(inputs(width, dtype))
    compare(QuickGELU(), QuickGELUActivation(), [3 * x], dtype)


@drawn(halves, seeds)
def test_networks_in_autocast(cast, seed):
    layer = random(nn.Sequential(SwiGLU(4, 12), QuickGELU()), torch.float32, seed)
    x = normal((2, 5, 4), torch.float32, seed)
    wanted = layer.double()(x.double())
    with torch.autocast("cpu", cast):
        out = layer.float()(x)
    agree(out, wanted, cast, steps=32)


# --- rotary positions -------------------------------------------------------------------------


def turned(x, rows, columns, base=100.0):
    """x (..., N, d): its first half by the rows, its second half by the columns, in float64."""
    x, d = x.double(), x.shape[-1]
    out = []
    for part, places in ((x[..., : d // 2], rows), (x[..., d // 2 :], columns)):
        for i in range(d // 4):
            angle = places.double() / base ** (2 * i / (d // 2))
            a, b, c, s = part[..., 2 * i], part[..., 2 * i + 1], angle.cos(), angle.sin()
            out += [c * a - s * b, s * a + c * b]
    return torch.stack(out, dim=-1)


def grid(height, width):
    rows = torch.arange(height)[:, None].expand(height, width)
    columns = torch.arange(width).expand(height, width)
    return rows.reshape(-1), columns.reshape(-1)


@drawn(batches, lengths, counts, dtypes(), seeds, layouts, st.booleans(), st.data())
def test_rotary_in_the_plane(batch, n, quarter, dtype, seed, layout, whole, data):
    x = normal((batch, 2, n, 4 * quarter), dtype, seed, layout)
    rows, columns = (20 * normal((n,), seed=seed + i) for i in (1, 2))
    if whole:
        rows, columns = rows.round().long(), columns.round().long()
    base = data.draw(st.sampled_from((100.0, 10000.0, 7)))
    ours = partial(apply_rotary_2d, rows=rows, columns=columns, base=base)
    oracle = partial(turned, rows=rows, columns=columns, base=base)
    compare(ours, oracle, [x], dtype, steps=4 if dtype != torch.float64 else 256)


def rotary_by_heads(x, layer, size, prefix):
    """The whole layer (B, k + N, dim) in float64, head by head."""
    weight, bias = layer.qkv.weight.detach().double(), layer.qkv.bias
    bias = 0 if bias is None else bias.detach().double()
    q, k, v = (x.double() @ weight.T + bias).chunk(3, dim=-1)
    d, found = x.shape[-1] // layer.num_heads, []
    for h in range(layer.num_heads):
        part = slice(h * d, (h + 1) * d)
        own = []
        for y, norm in ((q[..., part], layer.q_norm), (k[..., part], layer.k_norm)):
            if isinstance(norm, nn.LayerNorm):
                y = y - y.mean(-1, keepdim=True)
                y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt()
                y = y * norm.weight.detach().double() + norm.bias.detach().double()
            patches = turned(y[:, prefix:], *grid(*size))
            own.append(torch.cat([y[:, :prefix], patches], dim=1))
        found.append(dense(*own, v[..., part]))
    out = torch.cat(found, dim=-1) @ layer.proj.weight.detach().double().T
    return out + layer.proj.bias.detach().double()


@drawn(batches, map_sizes(4), st.integers(0, 3), st.integers(1, 3), dtypes(), seeds, st.data())
def test_rotary_attention(batch, size, prefix, heads, dtype, seed, data):
    options = dict(qkv_bias=data.draw(st.booleans()), qk_norm=data.draw(st.booleans()))
    embed = PatchEmbed((2 * size[0], 2 * size[1]), 2)
    layer = RotaryAttention(embed, prefix, 8 * heads, heads, **options)
    layer = random(layer, dtype, seed).eval()
    n, layout = prefix + size[0] * size[1], data.draw(layouts)
    x = normal((batch, n, 8 * heads), dtype, seed, layout)
    oracle = partial(rotary_by_heads, layer=layer, size=size, prefix=prefix)
    half = dtype.itemsize == 2
    compare(layer, oracle, [x], dtype, steps=128 if half else 1024)
    embed.set_input_size(2)  # the layer follows
    x = x[:, : prefix + 1]
    agree(layer(x), rotary_by_heads(x, layer, (1, 1), prefix), dtype, steps=64)


@drawn(halves, seeds)
def test_rotary_attention_in_autocast(cast, seed):
    layer = RotaryAttention(PatchEmbed((4, 6), 2), 1, 16, 2, qk_norm=True)
    layer = random(layer, torch.float32, seed)
    x = normal((2, 7, 16), torch.float32, seed)
    with torch.autocast("cpu", cast):
        out = layer(x)
    agree(out, rotary_by_heads(x, layer, (2, 3), 1), cast, steps=64)


class TimmAttention(nn.Module):
    """An attention of timm's, computed by the formula above."""

    def __init__(self, layer, size, prefix):
        super().__init__()
        self.layer, self.size, self.prefix = layer, size, prefix

    def forward(self, x, **options):
        return rotary_by_heads(x, self.layer, self.size, self.prefix)


@drawn(map_sizes(4), st.integers(0, 2), st.booleans(), st.booleans(), seeds)
def test_a_model_with_rotary_positions(size, registers, class_token, qk_norm, seed):
    options = dict(
        img_size=(4 * size[0], 4 * size[1]),
        patch_size=4,
        embed_dim=24,
        num_heads=3,
        depth=2,
        reg_tokens=registers,
        class_token=class_token,
        global_pool="token" if class_token else "avg",
        qk_norm=qk_norm,
        init_values=0.3,
    )
    model = random(build("vit", **options), torch.float64, seed).eval()
    peer = build("vit", peer=True, **options).double().eval()
    peer.load_state_dict(model.state_dict())
    nn.init.zeros_(peer.pos_embed)
    for block in peer.blocks:
        block.attn = TimmAttention(block.attn, size, registers + class_token)
    state = torch.get_rng_state()
    assert use_rotary(model) is model and torch.equal(torch.get_rng_state(), state)
    x = normal((2, 3, 4 * size[0], 4 * size[1]), seed=seed)
    agree(model(x), peer(x), torch.float64, steps=1024)


ORACLES = {
    "SwiGLU": test_swiglu,
    "apply_rotary_2d": test_rotary_in_the_plane,
    "RotaryAttention": test_rotary_attention,
    "use_rotary": test_a_model_with_rotary_positions,
    "QuickGELU": test_quick_gelu,
}
NOT_HERE = {
    "_DINOV2": "options of names; tests/test_vit_variants.py compares them with timm",
    "_GIANT": "as DINOV2",
    "CLIP": "as DINOV2",
    "_QUICK": "as DINOV2",
}


def test_nothing_is_left_out():
    assert set(library.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
