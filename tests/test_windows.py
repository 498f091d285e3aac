"""The window kernel, compiled or interpreted, against the layers it serves."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from torch.utils.flop_counter import FlopCounterMode

from attnlib import swin, swinv2, windows
from attnlib.attention import attention_backend, record_attention
from attnlib.swin import SwinBlock, WindowAttention, WindowLayout, pad_map, window_layout
from attnlib.swinv2 import WindowAttentionV2
from attnlib.windows import (
    _FUSED,
    _uses_kernel,
    fuse_attention,
    fuse_swin,
    not_served,
    passes,
    window_attention,
)
from helpers import kernel_grid

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # compiled there, interpreted here
on_device = pytest.mark.parametrize("device", [DEVICE])
both_kinds = pytest.mark.parametrize("kind", [WindowAttention, WindowAttentionV2])

CASES = {  # map, window, shift, heads, width of a head, small maps
    "one window": ((4, 4), (4, 4), (2, 2), 1, 16, "shrink"),
    "shifted": ((4, 8), (4, 4), (2, 2), 2, 16, "shrink"),
    "padded": ((5, 4), (3, 4), (1, 0), 2, 24, "shrink"),
    "padded and shifted, rectangular": ((3, 5), (2, 3), (1, 2), 1, 32, "shrink"),
    "smaller than the window, padded": ((3, 5), (4, 4), (2, 2), 1, 8, "pad"),
    "smaller than the window, shrunk": ((2, 5), (4, 4), (2, 2), 1, 64, "shrink"),
    "windows of one token": ((2, 3), (1, 1), (0, 0), 1, 16, "shrink"),
    "two blocks of keys": ((9, 8), (9, 8), (0, 0), 1, 16, "shrink"),
    "two blocks of keys, padded and shifted": ((10, 8), (9, 8), (4, 0), 1, 16, "shrink"),
}
if DEVICE == "cuda":
    CASES |= {
        "full size": ((56, 56), (7, 7), (3, 3), 3, 32, "shrink"),
        "full size, padded": ((60, 43), (7, 7), (3, 3), 3, 32, "shrink"),
        "large windows": ((40, 48), (16, 16), (8, 8), 2, 32, "shrink"),
        "larger windows": ((50, 50), (24, 24), (12, 12), 2, 32, "shrink"),
    }


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """A list to which each call of the kernel adds True."""
    calls = []

    def counted(*arguments, **options):
        calls.append(True)
        return window_attention(*arguments, **options)

    monkeypatch.setattr(windows, "window_attention", counted)
    return calls


def fused(block):
    """The block with the kernel in place of its window attention; the tensors are the same."""
    block = windows._sharing_copy(block)
    block.attn = fuse_attention(block.attn)
    return block


def gradients(module, x, grad, backend="auto"):
    """The output of a module with a backend, and the gradients of input and parameters."""
    x, leaves = x.detach().clone().requires_grad_(), [*module.parameters()]
    with attention_backend(backend):
        out = module(x)
    found = torch.autograd.grad(out, [x, *leaves], grad.to(out.dtype), allow_unused=True)
    return dict(zip(["output", "x", *dict(module.named_parameters())], [out, *found]))


def layer_of(kind, case, device=DEVICE):
    size, window, shift, heads, width, small_maps = CASES[case]
    torch.manual_seed(0)
    layer = kind(heads * width, heads, window, shift, small_maps=small_maps)
    for p in layer.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5 if p.ndim == 2 else 1.0)
    x = torch.randn(2 if case == "padded" else 1, *size, heads * width, device=device)
    return layer.to(device), x


@on_device
@both_kinds
@kernel_grid(
    "case",
    CASES,
    kept=["padded and shifted, rectangular", "two blocks of keys, padded and shifted"],
)
def test_outputs_and_all_gradients_equal_the_layers_sanitize(device, kind, case, served):
    layer, x = layer_of(kind, case, device)
    grad = torch.randn_like(x)
    exact = gradients(copy.deepcopy(layer).double(), x.double(), grad, "reference")
    assert served == []
    found = gradients(fuse_attention(layer), x, grad)
    assert served == [True] and found.keys() == exact.keys()
    for name, b in exact.items():
        assert (found[name] is None) == (b is None), name
        if b is not None:
            error = (found[name] - b).abs().max() / max(b.abs().max(), 1e-3)
            assert error < (2e-5 if device == "cpu" else 1e-4), (name, error)


@kernel_grid(
    "dtype, limit",
    [(torch.bfloat16, 0.06), (torch.float16, 0.01)],
    kept=[(torch.float16, 0.01)],
)
@both_kinds
@on_device
def test_lower_precision(device, kind, dtype, limit):
    layer, x = layer_of(kind, "padded and shifted, rectangular", device)
    layer, x, grad = layer.to(dtype), x.to(dtype), torch.randn_like(x).to(dtype)
    exact = gradients(copy.deepcopy(layer).double(), x.double(), grad, "reference")
    for name, found in gradients(fuse_attention(layer), x, grad).items():
        if "cpb" not in name:  # a network of PyTorch's
            error = (found - exact[name]).abs().max()
            assert found.dtype == dtype and error < limit * exact[name].abs().max(), name


@on_device
def test_autocast_keeps_the_gradient_of_the_bias_in_float32(device, served):
    layer, x = layer_of(WindowAttention, "shifted", device)
    with torch.autocast(device, torch.bfloat16):
        out = fuse_attention(layer)(x)
    out.float().sum().backward()
    assert served == [True] and out.dtype == torch.bfloat16
    assert layer.relative_position_bias_table.grad.dtype == torch.float32


@pytest.mark.parametrize("model", [swin.SwinTransformer, swinv2.SwinTransformerV2])
@kernel_grid(
    "size", [(16, 16), (12, 20)], kept=[(12, 20)]
)  # maps of 4 by 4 and 2 by 2; 3 by 5, …
@on_device
def test_models(device, model, size, served):
    torch.manual_seed(0)
    options = dict(embed_dim=16, depths=(2, 1), num_heads=(1, 2), window_size=2)
    model = model(16, 4, 1, 3, drop_path_rate=0.0, **options).to(device)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            nn.init.normal_(p, mean=float(name.endswith("norm.weight")), std=0.5)
    x, grad = torch.randn(1, 1, *size, device=device), torch.ones(1, 3, device=device)
    theirs = gradients(model, x, grad, "sdpa")
    assert served == []
    ours = gradients(fuse_swin(model, trainable=True), x, grad)
    assert served == [True] * 3
    for name, b in theirs.items():
        if b is not None:
            error = (ours[name] - b).abs().max()
            assert error <= (5e-5 if device == "cpu" else 1e-3) * max(b.abs().max(), 1e-2), name


def test_a_block_alone(served):
    torch.manual_seed(0)
    block, x = SwinBlock(16, 2, 3, 1).to(DEVICE), torch.randn(1, 4, 3, 16, device=DEVICE)
    grad = torch.ones_like(x)
    theirs = gradients(block, x, grad, "sdpa")
    ours = gradients(fused(block), x, grad)
    assert served == [True]
    for name, b in theirs.items():
        torch.testing.assert_close(ours[name], b, rtol=1e-4, atol=1e-5)


@both_kinds
@on_device
def test_what_the_kernel_cannot_serve_goes_through_pytorch(device, kind, served):
    layer, x = layer_of(kind, "shifted", device)
    layer.attn_drop = 0.5
    fast = fuse_attention(layer)
    fast.eval()(x)
    assert served == [True]
    results = []
    for module in (fast, layer):
        torch.manual_seed(1)
        results.append(module.train()(x))  # the kernel drops no weights
    assert torch.equal(*results)
    double = copy.deepcopy(fast.eval()).double()(x.double())
    assert served == [True]
    torch.testing.assert_close(double, layer.eval().double()(x.double()))


@both_kinds
@on_device
def test_a_backend_that_is_asked_for_comes_before_the_kernel(device, kind, served):
    """Weights are recorded; "auto" and "triton" leave windows to the kernel."""
    layer, x = layer_of(kind, "padded and shifted, rectangular", device)
    fast = fuse_attention(layer)
    with record_attention() as found:
        out = fast(x)
    with record_attention() as wanted:
        assert torch.equal(layer(x), out)
    assert torch.equal(*found, *wanted)
    for backend in ("reference", "sdpa"):
        with attention_backend(backend):
            assert not _uses_kernel(fast) and torch.equal(fast(x), layer(x))
    assert served == []
    with attention_backend("triton"):
        assert _uses_kernel(fast)
        fast(x)
    assert served == [True]


@both_kinds
def test_a_plain_layer_has_only_its_attention_by_the_backend_triton(kind, served):
    layer, x = layer_of(kind, "padded and shifted, rectangular")
    grad = torch.randn_like(x)
    theirs, ours = (gradients(layer, x, grad, backend) for backend in ("sdpa", "triton"))
    assert served == []
    for name, b in theirs.items():
        if b is not None:
            error = (ours[name] - b).abs().max()
            assert error <= (5e-5 if DEVICE == "cpu" else 1e-3) * max(b.abs().max(), 1e-2), name


@both_kinds
def test_a_fused_layer_is_the_layer_with_another_forward_pass(kind, served):
    """The same tensors, names, flags, mode, settings and hooks; the layer stays as it is."""
    layer, x = layer_of(kind, "shifted")
    layer.proj_drop.p, layer.attn_drop = 0.25, 0.5
    layer.eval().qkv.weight.requires_grad_(False)
    seen = []
    for part in (layer, layer.qkv, layer.proj):
        part.register_forward_hook(lambda part, *_: seen.append(type(part)))
    fast = fuse_attention(layer)
    assert type(layer) is kind and type(fast) is _FUSED[kind] and not fast.training
    assert vars(layer).keys() == vars(fast).keys()
    pairs = dict(layer.named_parameters()), dict(fast.named_parameters())
    assert pairs[0].keys() == pairs[1].keys()
    assert all(pairs[1][name] is p for name, p in pairs[0].items())
    assert fast.attn_drop == 0.5 and fast.proj_drop.p == 0.25
    fast(x)
    assert seen == [nn.Linear, nn.Linear, _FUSED[kind]] and served == [True]
    layer.load_state_dict({name: 2 * y for name, y in fast.state_dict().items()})
    fast.load_state_dict(layer.state_dict())
    torch.testing.assert_close(fast(x), layer(x), rtol=1e-4, atol=1e-4)
    fast.set_window_size(3, 1)
    assert fast.layout((6, 6)).window == (3, 3) and layer.layout((6, 6)).window == (4, 4)
    assert fast(x).shape == x.shape
    again = copy.deepcopy(fast)
    assert not {id(p) for p in again.parameters()} & {id(p) for p in fast.parameters()}
    assert torch.equal(again(x), fast(x))


def test_the_trained_window_goes_with_a_fused_layer():
    layer, x = layer_of(WindowAttentionV2, "shifted")
    layer.set_pretrained_window((6, 6))
    fast = fuse_attention(layer)
    other = fuse_attention(layer_of(WindowAttentionV2, "shifted")[0])
    other.load_state_dict(fast.state_dict())
    assert fast.trained_window() == other.trained_window() == (6, 6)
    assert torch.equal(other(x), fast(x))


def test_layers_that_are_not_fused():
    class Own(WindowAttention):
        pass

    layer = WindowAttention(8, 1, 2)
    for other in (Own(8, 1, 2), nn.Linear(2, 2), fuse_attention(layer)):
        with pytest.raises(TypeError, match=f"layer .{type(other).__name__}. must be a Window"):
            fuse_attention(other)
    layer.forward = layer.forward
    with pytest.raises(TypeError, match="without methods of its own"):
        fuse_attention(layer)


def test_a_pruned_layer_is_fused(served):
    """Its weight is computed before each call, and is no parameter."""
    from torch.nn.utils import prune

    layer, x = layer_of(WindowAttention, "shifted")
    prune.l1_unstructured(layer.qkv, "weight", amount=0.5)
    torch.testing.assert_close(fuse_attention(layer)(x), layer(x), rtol=1e-4, atol=1e-4)
    assert served == [True]


def operands(size=(4, 4), window=(2, 2), shift=(1, 1), heads=1, width=16):
    torch.manual_seed(0)
    layout = window_layout(size, window, shift)
    tokens = layout.window[0] * layout.window[1]
    qkv, bias = torch.randn(1, *size, 3 * heads * width), torch.randn(heads, tokens, tokens)
    return qkv.to(DEVICE), bias.to(DEVICE), layout


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_maps_need_no_padding(data):
    """A map as it is, of any size, gives what it gives when it is padded before, and cut."""
    size, window = (data.draw(st.tuples(st.integers(1, n), st.integers(1, n))) for n in (5, 5))
    shift = tuple(data.draw(st.integers(0, w - 1)) for w in window)
    shrink, cosine, bias_there = (data.draw(st.booleans()) for _ in range(3))
    heads, batch, width = data.draw(st.integers(1, 2)), 1, 8
    layout = window_layout(size, window, shift, shrink)
    tokens = layout.window[0] * layout.window[1]
    shapes = (batch, *size, heads * 8), (3 * heads * 8, heads * 8), (heads, tokens, tokens)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, device=DEVICE) for shape in shapes)
    weight = weight / 4
    pad = torch.randn(3 * heads * width, device=DEVICE) if bias_there else None
    tau = torch.full((heads,), 2.0, device=DEVICE) if cosine else None
    leaves = [y.requires_grad_() for y in (x, weight, bias, pad, tau) if y is not None]

    def found(native):
        own = x if native else pad_map(x, layout.padded)
        out = window_attention(
            F.linear(own, weight, pad),
            bias,
            layout,
            heads,
            cosine_scale=tau,
            pad=pad if native else None,
        )
        out = out[:, : size[0], : size[1]]
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for a, b in zip(found(True), found(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [(4, 4), (5, 4)])  # one launch, and three
def test_gradients_that_nobody_asks_for_are_not_computed(window, monkeypatch):
    from attnlib import windows

    layout, heads = window_layout((6, 5), window, (1, 0)), 2
    tokens = window[0] * window[1]
    qkv = torch.randn(1, 6, 5, 96, device=DEVICE)
    bias, pad = torch.randn(heads, tokens, tokens, device=DEVICE), torch.randn(96).to(DEVICE)
    leaves, made = (qkv, bias, pad), []

    def launch(kernel, *arguments, **options):
        names = ("QUERIES", "KEYS", "BIAS")
        made.append("".join(name[0] for name in names if options.get(name)))
        return start(kernel, *arguments, **options)

    start = windows.launch
    monkeypatch.setattr(windows, "launch", launch)
    one, several = ["", "QKB"], ["", "Q", "K", "B"]
    whole = len(passes(window, 16, 4)) == 1
    wanted = {
        (True, True, True): one if whole else several,
        (True, False, False): ["", "QK"] if whole else several[:3],
        (False, True, False): ["", "B"],
        (False, False, True): ["", "QK"] if whole else several[:3],
        (False, False, False): [""],
    }
    expected = None
    for needed, launches in wanted.items():
        for x, need in zip(leaves, needed):
            x.requires_grad_(need)
        made.clear()
        out = window_attention(qkv, bias, layout, heads, pad=pad)
        some = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(out.square().sum(), some) if some else ())
        assert made == launches
        found = [next(found) if need else None for need in needed]
        expected = expected or found
        for a, b in zip(found, expected):
            assert a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_heads_that_no_tile_fits_are_refused_in_a_line():
    """Float32 heads wider than 64 would spill; PyTorch serves them."""
    layer = WindowAttention(96, 1, 4).to(DEVICE)
    x = torch.randn(1, 4, 4, 96, device=DEVICE)
    reason = not_served(layer.qkv(x), 1, (4, 4))
    assert "heads of width 96: no tile of the kernels fits them in float32" in reason
    assert "\n" not in reason and not_served(layer.qkv(x).half(), 1, (4, 4)) is None
    with pytest.raises(TypeError, match="no tile of the kernels"):
        window_attention(layer.qkv(x), torch.zeros(1, 16, 16), window_layout((4, 4), (4, 4)), 1)
    torch.testing.assert_close(fuse_attention(layer)(x), layer(x))


def test_torchvision_on_a_rectangular_padded_shifted_map():
    from torchvision.models.swin_transformer import shifted_window_attention

    torch.manual_seed(0)
    shapes = (1, 3, 5, 32), (96, 32), (32, 32), (96,), (2, 4, 4)
    x, weight, proj, qkv_bias, bias = (torch.randn(*shape, device=DEVICE) for shape in shapes)
    window, layout = ([2, 2], 2, [1, 1]), window_layout((3, 5), (2, 2), (1, 1))
    theirs = shifted_window_attention(
        x, weight / 6, proj, bias[None], *window, qkv_bias=qkv_bias, proj_bias=None
    )
    qkv = F.linear(pad_map(x, layout.padded), weight / 6, qkv_bias)
    ours = F.linear(window_attention(qkv, bias, layout, 2)[:, :3, :5], proj)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_scale_is_used():
    qkv, bias, layout = operands()
    plain = window_attention(qkv, bias, layout, 1)
    torch.testing.assert_close(plain, window_attention(qkv, bias, layout, 1, scale=0.25))
    assert not torch.allclose(plain, window_attention(qkv, bias, layout, 1, scale=1.0))


def test_zero_vectors_have_no_direction_and_infinite_biases_no_weight():
    qkv, bias, layout = operands((2, 2))
    qkv[..., :32] = 0  # queries and keys
    qkv.requires_grad_()
    tau = torch.tensor([5.0], requires_grad=True, device=DEVICE)
    bias[0, 0, 1:], bias[0, 1] = -torch.inf, -torch.inf
    out = window_attention(qkv, bias, layout, 1, cosine_scale=tau)
    torch.testing.assert_close(out[0, 0, 0], qkv[0, 0, 0, 32:])
    assert (out[0, 0, 1] == 0).all()  # nothing to attend to
    out[..., 0].sum().backward()
    assert tau.grad.item() == 0 and qkv.grad.isfinite().all()


def test_operator_checks_and_compiles():
    qkv, bias, layout = operands((4, 2))
    tau = torch.full((1,), 2.0, device=DEVICE, requires_grad=True)
    qkv.requires_grad_(), bias.requires_grad_()
    tensors = [x.detach() for x in (qkv, bias, tau)]
    arguments = (*tensors, None, 1, layout.window, layout.shift, 0.25)
    torch.library.opcheck(torch.ops.attnlib.window_attention.default, arguments)

    def call(qkv, bias):
        return window_attention(qkv, bias, layout, 1)

    compiled, leaves = torch.compile(call, fullgraph=True, backend="aot_eager"), (qkv, bias)
    results = [torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (compiled, call)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@on_device
def test_compiled_in_lower_precision_on_a_padded_map(device):
    """A compiler trusts the dtypes and strides that the operators announce."""
    qkv, bias, layout = operands((4, 2))
    qkv = qkv.bfloat16().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)  # not contiguous
    tau, options = torch.full((1,), 2.0, device=device), (1, layout.window, layout.shift, 0.25)
    tensors = (qkv, bias.mT.contiguous().mT, tau, None)
    out, norms = torch.ops.attnlib.window_attention.default(*tensors, *options)
    torch.library.opcheck(
        torch.ops.attnlib.window_attention_backward.default,
        (torch.randn_like(out), *tensors, out, norms, *options, True, True),
        test_utils=("test_schema", "test_faketensor"),
    )
    layer, x = layer_of(WindowAttention, "padded", device)
    layer = fuse_attention(layer)
    wanted = copy.deepcopy(layer)
    for module, call in ((wanted, wanted), (layer, torch.compile(layer, backend="aot_eager"))):
        with torch.autocast(device, torch.bfloat16):
            call(x).float().sum().backward()
    for a, b in zip(layer.parameters(), wanted.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        torch.testing.assert_close(a.grad, b.grad, rtol=0.02, atol=0.02)


def test_empty_batch_and_strides():
    qkv, bias, layout = operands(heads=2)
    assert window_attention(qkv[:0], bias, layout, 2).shape == (0, 4, 4, 32)
    other = qkv.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    tau = torch.tensor([3.0], device=DEVICE).expand(2)
    leaves = [x.detach().requires_grad_() for x in (other, bias.mT.contiguous().mT, tau)]
    rows = dict(memory_format=torch.contiguous_format)
    wanted = [x.detach().clone(**rows).requires_grad_() for x in leaves]
    assert not any(x.is_contiguous() for x in leaves)
    results = []
    for qkv, bias, tau in (leaves, wanted):
        out = window_attention(qkv, bias, layout, 2, cosine_scale=tau)
        results.append([out, *torch.autograd.grad(out.square().sum(), (qkv, bias, tau))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


HUGE = torch.empty(2**31, device="meta").as_strided((2**28, 4, 4, 48), (0, 0, 0, 1))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(qkv=torch.ones(1, 4, 48)), ValueError, r"qkv of shape \(1, 4, 48\) must be \(B"),
        (dict(num_heads=5), ValueError, r"5 heads in C"),
        (dict(num_heads=0), ValueError, r"0 heads in C"),
        (dict(qkv=HUGE), TypeError, "too large"),
        (dict(qkv=torch.ones(1, 4, 4, 48).double()), TypeError, "64 on .* must be float32"),
        (dict(qkv=torch.ones(1, 4, 4, 129 * 3)), TypeError, "at most 128 wide, not 129"),
        (dict(qkv=torch.ones(1, 4, 6, 48)), ValueError, r"the size of qkv, \(4, 6\)"),
        (dict(shift=(2, 0)), ValueError, "shifts less than its windows"),
        (dict(window=(3, 2)), ValueError, "padded to whole windows"),
        (dict(pad=torch.ones(16)), ValueError, r"pad of shape \(16,\) must be .* \(48,\)"),
        (dict(bias=torch.ones(1, 4, 5)), ValueError, r"bias of shape \(1, 4, 5\) must be"),
        (dict(bias=torch.ones(1, 4, 4).long()), TypeError, "bias .torch.int64"),
        (dict(cosine_scale=torch.ones(2)), ValueError, r"cosine_scale of shape \(2,\)"),
    ],
)
def test_bad_input(change, error, message):
    qkv, bias, _ = operands()
    given = dict(qkv=qkv, bias=bias, num_heads=1, window=(2, 2), shift=(0, 0)) | change
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and not x.is_meta:
            given[name] = x.to(DEVICE)
    layout = WindowLayout((4, 4), given.pop("window"), given.pop("shift"), (4, 4))
    with pytest.raises(error, match=message):
        window_attention(layout=layout, **given)


@kernel_grid(
    "window, size, backward",
    [((4, 4), (8, 8), 5), ((9, 9), (18, 9), 9)],
    kept=[((4, 4), (8, 8), 5)],
)
def test_operations_are_counted(window, size, backward):
    tokens = window[0] * window[1]
    qkv = torch.randn(2, *size, 3 * 32, device=DEVICE, requires_grad=True)
    bias = torch.randn(2, tokens, tokens, device=DEVICE, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = window_attention(qkv, bias, window_layout(size, window, (1, 1)), 2)
    with FlopCounterMode(display=False) as gradient:
        out.sum().backward()
    q = torch.empty(2 * size[0] * size[1] // tokens, tokens, 32, device="meta")  # each window
    with FlopCounterMode(display=False) as plain:
        (q @ q.mT) @ q
    assert forward.get_total_flops() == plain.get_total_flops()
    assert gradient.get_total_flops() == backward * forward.get_total_flops() // 2
