"""Kernels for windows are attention by its formula in float64, for maps of every size."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

pytest.importorskip("triton")

from draws import batches, drawn, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import strategies as st

from attnlib import flash, windows
from attnlib.attention import attention_backend, current_backend, record_attention
from attnlib.swin import (
    PatchMerging,
    SwinBlock,
    SwinTransformer,
    WindowAttention,
    WindowLayout,
    window_layout,
)
from attnlib.swinv2 import SwinTransformerV2, WindowAttentionV2
from attnlib.windows import fused_linear, window_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
dtypes = st.sampled_from(flash._DTYPES)
shifts = st.tuples(st.integers(0, 3), st.integers(0, 3))  # often on one axis only


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def close(name, a, b):
    """Equal up to 16 roundings of the largest number, at least of 1."""
    assert a.shape == b.shape and torch.isfinite(a).all(), name
    largest = max(1.0, b.detach().abs().max().item()) if b.numel() else 1.0
    limit = max(tolerance(a.dtype), 1e-5 if a.dtype == torch.float32 else 0) * largest
    error = (a.detach().double().cpu() - b.detach()).abs().max().item() if b.numel() else 0.0
    assert error <= limit, (name, error, limit)


@st.composite
def cut_maps(draw):
    """A layout by `window_layout`: windows larger than the map, padded, shifted on any axis."""
    size, window = draw(map_sizes(6)), draw(map_sizes(4))
    shift = tuple(min(s, w - 1) for s, w in zip(draw(shifts), window))
    return window_layout(size, window, shift, shrink=draw(st.booleans()))


def tokens_of_windows(layout):
    """Where in the padded map the tokens of each window are, and which seams they crossed."""
    (rows, row_seams), (columns, column_seams) = (
        ((torch.arange(p) + s) % p, torch.arange(p) + s >= p)
        for p, s in zip(layout.padded, layout.shift)
    )
    place = rows[:, None] * layout.padded[1] + columns
    seams = 2 * row_seams[:, None] + column_seams.int()
    high, wide = layout.window
    found = []
    for top in range(0, layout.padded[0], high):
        for left in range(0, layout.padded[1], wide):
            part = slice(top, top + high), slice(left, left + wide)
            found.append((place[part].flatten(), seams[part].flatten()))
    return found


def direct(qkv, bias, layout, heads, scale, cosine_scale, pad):
    """Attention window by window; a map that is not padded is padded with `pad` or zeros."""
    batch, rows, columns, channels = qkv.shape
    high, wide = layout.padded
    padded = torch.zeros(channels, dtype=qkv.dtype) if pad is None else pad
    whole = padded.expand(batch, high, wide, channels).clone()
    whole[:, :rows, :columns] = qkv
    whole = whole.flatten(1, 2).unflatten(-1, (3, heads, -1))  # (B, HW, 3, h, d)
    out = torch.zeros_like(whole[:, :, 0])
    for place, seams in tokens_of_windows(layout):
        q, k, v = whole[:, place].permute(2, 0, 3, 1, 4)  # (B, h, N, d) each
        if cosine_scale is None:
            s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        else:
            s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
            s = s * cosine_scale[:, None, None]
        s = (s + bias).masked_fill(seams[:, None] != seams, -torch.inf)
        out = out.index_copy(1, place, (s.softmax(-1) @ v).transpose(1, 2))
    return out.flatten(2).unflatten(1, (high, wide))[:, :rows, :columns]


@drawn(
    cut_maps(),
    st.data(),
    batches,
    st.integers(1, 2),
    st.sampled_from((4, 1, 16, 20)),
    dtypes,
    st.booleans(),
)
def test_window_attention(layout, data, batch, heads, d, dtype, cosine):
    """Outputs and the gradients of the map, the bias, the padding and the cosines' factor."""
    seed, tokens = data.draw(seeds), layout.window[0] * layout.window[1]
    size = data.draw(st.sampled_from((layout.size, layout.padded)))
    qkv = normal((batch, *size, 3 * heads * d), dtype, seed, data.draw(layouts))
    bias = normal((heads, tokens, tokens), dtype, seed + 1, data.draw(layouts))
    given = {"qkv": qkv, "bias": bias}
    if cosine:
        given["cosine_scale"] = 1 + normal((heads,), torch.float32, seed + 2).abs()
    if data.draw(st.booleans()):
        given["pad"] = normal((3 * heads * d,), dtype, seed + 3)
    scale = data.draw(st.sampled_from((None, 0.0, -0.5)))
    ours = {name: x.detach().to(DEVICE).requires_grad_() for name, x in given.items()}
    theirs = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    out = window_attention(layout=layout, num_heads=heads, scale=scale, **ours)
    wanted = direct(
        layout=layout, heads=heads, scale=scale, **dict(cosine_scale=None, pad=None) | theirs
    )
    assert out.dtype == dtype
    close("output", out, wanted)
    grad = normal(out.shape, dtype, 7)
    found = torch.autograd.grad(out, [*ours.values()], grad.to(DEVICE), allow_unused=True)
    exact = torch.autograd.grad(wanted, [*theirs.values()], grad.double(), allow_unused=True)
    for (name, x), a, b in zip(given.items(), found, exact, strict=True):
        close(
            name,
            torch.zeros_like(x) if a is None else a,
            torch.zeros_like(x).double() if b is None else b,
        )


@drawn(cut_maps(), st.sampled_from((torch.float64, *flash._DTYPES)))
def test_a_reason_is_given_for_what_the_kernels_do_not_take(layout, dtype):
    tokens = layout.window[0] * layout.window[1]
    qkv = normal((1, *layout.size, 24), dtype).to(DEVICE)
    bias = normal((2, tokens, tokens), dtype, 1).to(DEVICE)
    reason = windows.not_served(qkv, 2, layout.window)
    assert (reason is None) is (dtype != torch.float64)
    if reason is None:
        assert window_attention(qkv, bias, layout, 2).dtype == dtype
    else:
        with pytest.raises(TypeError, match="must be float32, bfloat16 or float16"):
            window_attention(qkv, bias, layout, 2)


def test_a_window_has_a_token():
    layout = WindowLayout((4, 4), (0, 2), (0, 0), (4, 4))
    with pytest.raises(ValueError, match=r"window=\(0, 2\).* at least \(1, 1\)"):
        window_attention(torch.randn(1, 4, 4, 12), torch.randn(1, 0, 0), layout, 1)


def test_queries_that_may_attend_to_nothing():
    """All biases of a row are -inf: zeros, and gradients of zero."""
    layout = window_layout((2, 4), (2, 2))
    qkv = torch.randn(1, 2, 4, 12, requires_grad=True)
    bias = torch.zeros(1, 4, 4).masked_fill(torch.arange(4)[:, None] == 1, -torch.inf)
    out = window_attention(qkv.to(DEVICE), bias.to(DEVICE), layout, 1)
    assert not out[0, 0, [1, 3]].any() and out[0, 0, [0, 2]].any()
    out.square().sum().backward()
    assert torch.isfinite(qkv.grad).all() and not qkv.grad[0, 0, [1, 3], :4].any()


# --- layers -----------------------------------------------------------------------------------

kinds = st.sampled_from((WindowAttention, WindowAttentionV2))
backends = st.sampled_from(("auto", "triton", "reference", "sdpa", "record"))


def inside(backend):
    """The context of a backend, or of one that records weights."""
    return record_attention() if backend == "record" else attention_backend(backend)


@drawn(
    kinds,
    map_sizes(6),
    map_sizes(4),
    st.booleans(),
    st.sampled_from(("shrink", "pad")),
    batches,
    st.booleans(),
    backends,
    st.sampled_from((torch.float64, *flash._DTYPES)),
)
def test_a_layer(kind, size, window, shifted, small_maps, batch, bias, backend, dtype):
    """Outputs and all gradients are those of the plain layer in float64, for every backend."""
    shift = tuple(w // 2 for w in window) if shifted else 0
    layer = filled(kind(16, 2, window, shift, qkv_bias=bias, small_maps=small_maps)).to(dtype)
    fused = windows.fuse_attention(layer)
    assert type(fused) in (windows.FusedWindowAttention, windows.FusedWindowAttentionV2)
    x = normal((batch, *size, 16), dtype).to(DEVICE).requires_grad_()
    with inside(backend):
        assert windows._uses_kernel(fused) is (current_backend() in ("auto", "triton"))
        out = fused(x)
    names = ["x", *dict(fused.named_parameters())]
    grad = normal(out.shape, dtype, 7)
    leaves = [x, *fused.parameters()]
    found = torch.autograd.grad(out, leaves, grad.to(DEVICE), allow_unused=True)
    assert all(a is b for a, b in zip(fused.parameters(), layer.parameters(), strict=True))
    wide = copy.deepcopy(layer).double()
    exact_x = x.detach().double().requires_grad_()
    with attention_backend("reference"):
        wanted = wide(exact_x)
    exact = torch.autograd.grad(
        wanted, [exact_x, *wide.parameters()], grad.double().to(DEVICE), allow_unused=True
    )
    assert out.dtype == dtype
    near("output", out, wanted)
    for name, a, b in zip(names, found, exact, strict=True):
        if batch == 0 and (a is None) is not (b is None):
            continue  # of no window; a kernel gives none where the equation gives zeros
        assert (a is None) is (b is None), name
        if a is not None and "cpb" not in name:  # a network of PyTorch's
            near(name, a, b)


def near(name, a, b):
    """Equal up to a few roundings in each of a layer's steps, of the largest number."""
    assert a.shape == b.shape and torch.isfinite(a).all(), name
    if b.numel() == 0:
        return
    limits = {torch.bfloat16: 0.1, torch.float16: 0.015, torch.float32: 2e-4}
    limit = limits.get(a.dtype, 1e-9) * max(1.0, b.detach().abs().max().item())
    error = (a.detach().double() - b.detach()).abs().max().item()
    assert error <= limit, (name, error, limit)


@drawn(kinds, st.booleans(), st.sampled_from((0.0, 0.5)))
def test_dropped_weights_are_no_work_of_the_kernel(kind, training, p):
    layer = filled(kind(16, 2, 2, attn_drop=p)).train(training)
    fused = windows.fuse_attention(layer)
    x = normal((1, 3, 4, 16), torch.float32).to(DEVICE)
    assert windows._uses_kernel(fused) is not (training and p > 0)
    results = []
    for module in (layer, fused):
        torch.manual_seed(0)
        results.append(module(x))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# --- products ---------------------------------------------------------------------------------


def vector(n, dtype, seed, layout):
    """A parameter, which may lie in memory with gaps."""
    return nn.Parameter(normal((n,), dtype, seed, layout).to(DEVICE), requires_grad=False)


@drawn(
    st.data(),
    st.lists(st.sampled_from((2, 1, 0, 5)), max_size=3),
    st.integers(0, 40),
    st.integers(0, 70),
    dtypes,
)
def test_fused_linear(data, lead, fan_in, fan_out, dtype):
    """Any leading axes and strides, also of the parameters, and no features."""
    seed = data.draw(seeds)
    layer = nn.Linear(fan_in, fan_out, bias=False, device="meta")
    layer.weight = nn.Parameter(
        normal((fan_out, fan_in), dtype, seed, data.draw(layouts)).to(DEVICE), False
    )
    if data.draw(st.booleans()):
        layer.bias = vector(fan_out, dtype, 1, data.draw(layouts))
    norm, gelu = None, data.draw(st.booleans())
    if fan_in and data.draw(st.booleans()):
        kinds = data.draw(st.sampled_from((dtype, torch.float32)))
        norm = nn.LayerNorm(fan_in, eps=1e-3)
        norm.weight = vector(fan_in, kinds, 2, data.draw(layouts))
        norm.bias = vector(fan_in, kinds, 3, data.draw(layouts))
    x = normal((*lead, fan_in), dtype, 4, data.draw(layouts)).to(DEVICE)
    residual = None
    if data.draw(st.booleans()):
        residual = normal((*lead, fan_out), dtype, 5, data.draw(layouts)).to(DEVICE)
    with torch.no_grad():
        found = fused_linear(x, layer, norm=norm, gelu=gelu, residual=residual)
        wide = x.double()
        if norm is not None:
            weights = norm.weight.double(), norm.bias.double()
            wide = F.layer_norm(wide, (fan_in,), *weights, 1e-3)
        bias = None if layer.bias is None else layer.bias.double()
        wanted = F.linear(wide, layer.weight.double(), bias)
        wanted = F.gelu(wanted) if gelu else wanted
        wanted = wanted if residual is None else wanted + residual.double()
    assert found.dtype == dtype
    close("product", found, wanted.cpu())


def test_parameters_with_gaps_in_memory():
    """The bias and the norm's parameters were once read as if there were none."""
    layer, norm = nn.Linear(3, 5), nn.LayerNorm(3)
    layer.bias = vector(5, torch.float32, 1, "strided")
    norm.weight = vector(3, torch.float32, 2, "strided")
    norm.bias = vector(3, torch.float32, 3, "strided")
    layer, norm, x = layer.to(DEVICE), norm.to(DEVICE), torch.randn(4, 3, device=DEVICE)
    with torch.no_grad():
        found, wanted = fused_linear(x, layer, norm=norm), layer(norm(x))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


# --- blocks and models ------------------------------------------------------------------------


def filled(module):
    """Every parameter drawn, so that no norm or bias is trivial."""
    for i, p in enumerate(module.parameters()):
        scale = p.shape[-1] ** -0.5 if p.ndim == 2 else 0.5
        with torch.no_grad():
            p.copy_(normal(p.shape, torch.float32, i) * scale)
    return module.to(DEVICE).eval()


@drawn(map_sizes(5), map_sizes(3), st.booleans(), st.sampled_from(("shrink", "pad")), batches)
def test_a_block(size, window, shifted, small_maps, batch):
    """A `SwinBlock` in float64 on maps of any size, one after the other."""
    with torch.no_grad():
        shift = tuple(w // 2 for w in window) if shifted else 0
        block = filled(SwinBlock(8, 2, window, shift, small_maps=small_maps))
        assert windows._can_fuse(block) and not windows._can_fuse(block.mlp)
        fused = windows.FusedBlock(block)
        maps = (
            normal((batch, *size, 8), torch.float32),
            normal((1, size[1], 3, 8), torch.float32),
        )
        found = [fused(x.to(DEVICE)) for x in maps]
        block.double()
        for x, y in zip(maps, found):
            close("block", y, block(x.double().to(DEVICE)).cpu())


@drawn(map_sizes(7), batches, st.integers(1, 9))
def test_merging(size, batch, dim):
    """A quarter of the tokens, the odd ones at the end padded."""
    with torch.no_grad():
        merging = filled(PatchMerging(dim))
        assert windows._can_fuse_merging(merging) and not windows._can_fuse_merging(
            nn.Identity()
        )
        x = normal((batch, *size, dim), torch.float32)
        found = windows.FusedMerging(merging)(x.to(DEVICE))
        close("merging", found, merging.double()(x.double().to(DEVICE)).cpu())


@drawn(map_sizes(3), st.integers(1, 2), st.sampled_from(("shrink", "pad")), st.integers(0, 2))
def test_a_model(size, window, small_maps, batch):
    """A whole `SwinTransformer`, also for images of another size than it was made for."""
    with torch.no_grad():
        made = tuple(3 * s for s in size)
        model = filled(
            SwinTransformer(
                made,
                2,
                3,
                5,
                embed_dim=8,
                depths=(1, 1),
                num_heads=(1, 2),
                window_size=window,
                small_maps=small_maps,
            )
        )
        fused, x = windows.fuse_swin(model), normal((batch, 3, *made), torch.float32)
        found = fused(x.to(DEVICE))
        close("model", found, model.double()(x.double().to(DEVICE)).cpu())


@drawn(
    st.sampled_from((SwinTransformer, SwinTransformerV2)),
    map_sizes(3),
    st.integers(1, 2),
    st.sampled_from(("shrink", "pad")),
    st.integers(0, 2),
    st.booleans(),
)
def test_a_model_with_fused_attention(kind, size, window, small_maps, batch, training):
    """Logits and gradients of a trainable copy, which has the model's parameters."""
    made = tuple(3 * s for s in size)
    shape = dict(embed_dim=8, depths=(1, 1), num_heads=(1, 2), window_size=window)
    model = kind(made, 2, 3, 5, drop_path_rate=0.0, small_maps=small_maps, **shape)
    model = filled(model).train(training)
    fused, x = (
        windows.fuse_swin(model, trainable=True),
        normal((batch, 3, *made), torch.float32),
    )
    assert fused.training is training
    assert all(a is b for a, b in zip(fused.parameters(), model.parameters(), strict=True))
    x = x.to(DEVICE)
    results = []
    for own in (model, fused):
        out = own(x)
        leaves = [p for name, p in own.named_parameters() if "cpb" not in name]
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        largest = max(1.0, a.detach().abs().max().item()) if a.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * largest)


@drawn(
    st.sampled_from(sorted(windows.TILES)),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.integers(1, 128),
    st.sampled_from((2, 4)),
)
def test_blocks_cover_a_window(kernel, window, width, size):
    if size == 4 and width > 64:
        return  # which `not_served` refuses
    options, tokens = windows.tiling(kernel, window, width, size), window[0] * window[1]
    block, blocks = options["BLOCK"], options["BLOCKS"]
    assert block >= 16 and block.bit_count() == 1 and blocks == -(-tokens // block)
    assert options["LANES"] == max(16, 2 ** (width - 1).bit_length())
    one = windows.tiling("whole", window, width, size)["BLOCKS"] == 1
    assert windows.passes(window, width, size) == (
        ("whole",) if one else ("query", "key", "bias")
    )


ORACLES = {
    "window_attention": test_window_attention,
    "not_served": test_a_reason_is_given_for_what_the_kernels_do_not_take,
    "_uses_kernel": test_dropped_weights_are_no_work_of_the_kernel,
    "FusedWindowAttention": test_a_layer,
    "FusedWindowAttentionV2": test_a_layer,
    "_sharing_copy": test_a_layer,
    "fuse_attention": test_a_layer,
    "fused_linear": test_fused_linear,
    "FusedBlock": test_a_block,
    "_can_fuse": test_a_block,
    "FusedMerging": test_merging,
    "_can_fuse_merging": test_merging,
    "fuse_swin": test_a_model,
    "tiling": test_blocks_cover_a_window,
    "passes": test_blocks_cover_a_window,
}
NOT_HERE = {
    "compile_for": "compiles for a GPU in a process of its own: tests/test_kernels.py",
    "_compile_linear": "compiles for a GPU in a process of its own: tests/test_kernels.py",
    "jit": "triton.jit with options",
    "TILES": "a table, read by `tiling`",
    "_SEVERAL": "a table, read by `tiling`",
    "_MAKES": "a table of kernels, which are run above",
    "FUNCTIONS": "a table of kernels, which are run above",
    "_FUSED": "a table of classes, read by `fuse_attention`",
    "_PRODUCT_TILES": "a table, read by `fused_linear`",
    "_PARTS": "a table of classes, read by `_can_fuse`",
}


def test_every_public_name_is_here_or_said_to_be_elsewhere():
    assert not ORACLES.keys() & NOT_HERE.keys()
    assert set(windows.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
