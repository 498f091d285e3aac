"""The window kernel, compiled or interpreted, against the layers it stands in for; and what it compiles to."""
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from attnlib import swin, swinv2, windows
from attnlib.attention import attention_backend
from attnlib.swin import Plan, SwinBlock, WindowAttention, plan_windows
from attnlib.swinv2 import MAX_LOGIT_SCALE, WindowAttentionV2
from attnlib.windows import kernel_takes, window_attention

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)
pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # compiled there, interpreted here
on_device = pytest.mark.parametrize("device", [DEVICE])

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
    CASES |= {"full size": ((56, 56), (7, 7), (3, 3), 3, 32, "shrink"),
              "full size, padded": ((60, 43), (7, 7), (3, 3), 3, 32, "shrink"),
              "large windows": ((40, 48), (16, 16), (8, 8), 2, 32, "shrink"),
              "larger windows": ((50, 50), (24, 24), (12, 12), 2, 32, "shrink")}


def kernel_forward(self, x):
    """What `WindowAttention.forward` and `WindowAttentionV2.forward` do where the kernel serves them."""
    plan, options = self.plan(x.shape[1:3]), {}
    if isinstance(self, WindowAttentionV2):
        pad = None if self.q_bias is None else torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv, options = F.linear(x, self.qkv.weight, pad), dict(pad=pad)
        options["cosine_scale"] = self.logit_scale.clamp(max=MAX_LOGIT_SCALE).exp().flatten()
    else:
        qkv, options = self.qkv(x), dict(pad=self.qkv.bias, scale=self.scale)
    bias = self.bias(plan._replace(shift=(0, 0)), qkv)
    return self.proj_drop(self.proj(window_attention(qkv, bias, plan, self.num_heads, **options)))


def layer_of(kind, case, device=DEVICE, seed=0):
    size, window, shift, heads, width, small_maps = CASES[case]
    torch.manual_seed(seed)
    layer = kind(heads * width, heads, window, shift, small_maps=small_maps)
    for p in layer.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5 if p.ndim == 2 else 1.0)
    return layer.to(device), torch.randn(2 if case == "padded" else 1, *size, heads * width, device=device)


def gradients(forward, layer, x, grad):
    x, leaves = x.clone().requires_grad_(), [*layer.parameters()]
    out = forward(layer, x)
    found = torch.autograd.grad(out, [x, *leaves], grad.to(out.dtype), allow_unused=True)
    return [out, *found]


@on_device
@pytest.mark.parametrize("kind", [WindowAttention, WindowAttentionV2])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_all_gradients_equal_the_layers_sanitize(device, kind, case):
    layer, x = layer_of(kind, case, device)
    grad = torch.randn_like(x)
    exact = gradients(kind.forward, copy.deepcopy(layer).double(), x.double(), grad)
    found = gradients(kernel_forward, layer, x, grad)
    for name, a, b in zip(["output", "x", *dict(layer.named_parameters())], found, exact, strict=True):
        assert (a is None) == (b is None), name
        if b is not None:
            error = (a - b).abs().max() / max(b.abs().max(), 1e-3)
            assert error < (2e-5 if device == "cpu" else 1e-4), (name, error)


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 0.06), (torch.float16, 0.01)])
@pytest.mark.parametrize("kind", [WindowAttention, WindowAttentionV2])
@on_device
def test_lower_precision(device, kind, dtype, limit):
    layer, x = layer_of(kind, "padded and shifted, rectangular", device)
    grad = torch.randn_like(x)
    rounded = copy.deepcopy(layer).to(dtype)
    exact = gradients(kind.forward, copy.deepcopy(rounded).double(), x.to(dtype).double(), grad.to(dtype))
    found = gradients(kernel_forward, rounded, x.to(dtype), grad)
    for name, a, b in zip(["output", "x", *dict(layer.named_parameters())], found, exact, strict=True):
        if "cpb" not in name:  # a network of PyTorch's
            assert a.dtype == dtype and (a - b).abs().max() < limit * b.abs().max(), name


@on_device
def test_autocast_keeps_the_gradient_of_the_bias_in_float32(device):
    layer, x = layer_of(WindowAttention, "shifted", device)
    with torch.autocast(device, torch.bfloat16):
        out = kernel_forward(layer, x)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and layer.relative_position_bias_table.grad.dtype == torch.float32


@pytest.mark.parametrize("module", [swin, swinv2])
@pytest.mark.parametrize("size", [(16, 16), (12, 20)])  # maps of 4 by 4 and 2 by 2; of 3 by 5, and 2 by 3
@on_device
def test_models(device, module, size, monkeypatch):
    kind = module.WindowAttention if module is swin else module.WindowAttentionV2
    model_class = module.SwinTransformer if module is swin else module.SwinTransformerV2
    torch.manual_seed(0)
    model = model_class(16, 4, 1, 3, embed_dim=16, depths=(2, 1), num_heads=(1, 2), window_size=2, drop_path_rate=0.0)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            nn.init.normal_(p, mean=float(name.endswith("norm.weight")), std=0.5)
    model, x, grad = model.to(device), torch.randn(1, 1, *size, device=device), torch.ones(1, 3, device=device)
    with attention_backend("sdpa"):
        theirs = gradients(lambda model, x: model(x), model, x, grad)
    calls = []
    monkeypatch.setattr(kind, "forward", lambda self, x: calls.append(x.shape) or kernel_forward(self, x))
    ours = gradients(lambda model, x: model(x), model, x, grad)
    assert len(calls) == 3
    for name, a, b in zip(["output", "x", *dict(model.named_parameters())], ours, theirs, strict=True):
        if b is not None:
            assert (a - b).abs().max() <= (5e-5 if device == "cpu" else 1e-3) * max(b.abs().max(), 1e-2), name


def test_a_block_alone(monkeypatch):
    torch.manual_seed(0)
    block, x = SwinBlock(16, 2, 3, 1, device=DEVICE), torch.randn(1, 4, 3, 16, device=DEVICE)
    grad = torch.randn_like(x)
    with attention_backend("sdpa"):
        theirs = gradients(SwinBlock.forward, block, x, grad)
    monkeypatch.setattr(WindowAttention, "forward", kernel_forward)
    for a, b in zip(gradients(SwinBlock.forward, block, x, grad), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [WindowAttention, WindowAttentionV2])
@on_device
def test_the_backend_triton_reaches_the_kernel(device, kind, monkeypatch):
    layer, x = layer_of(kind, "padded and shifted, rectangular", device)
    grad, calls, check = torch.randn_like(x), [], windows._check_arguments
    with attention_backend("sdpa"):
        theirs = gradients(kind.forward, layer, x, grad)
    monkeypatch.setattr(windows, "_check_arguments", lambda *a: calls.append(a) or check(*a))
    with attention_backend("triton"):
        ours = gradients(kind.forward, layer, x, grad)
        assert len(calls) == 1
        layer.train().attn_drop = 0.5
        layer(x)
        assert len(calls) == 1  # the kernel drops no weights
    for a, b in zip(ours, theirs, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


def operands(size=(3, 4), window=(2, 2), shift=(1, 1), heads=1, width=16):
    torch.manual_seed(0)
    plan = plan_windows(size, window, shift)
    tokens = plan.window[0] * plan.window[1]
    qkv, bias = torch.randn(1, *size, 3 * heads * width), torch.randn(heads, tokens, tokens)
    return qkv.to(DEVICE), bias.to(DEVICE), plan


def test_torchvision_on_a_rectangular_padded_shifted_map():
    from torchvision.models.swin_transformer import shifted_window_attention

    qkv, bias, plan = operands((3, 5), (2, 2), (1, 1), 2)
    x, weight, projection, pad = torch.randn(1, 3, 5, 32), torch.randn(96, 32) / 6, torch.eye(32), torch.randn(96)
    x, weight, projection, pad = (y.to(DEVICE) for y in (x, weight, projection, pad))
    wanted = shifted_window_attention(x, weight, projection, bias[None], [2, 2], 2, [1, 1], qkv_bias=pad)
    found = window_attention(F.linear(x, weight, pad), bias, plan, 2, pad=pad)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_without_pad_the_padding_is_zero_and_scale_is_used():
    qkv, bias, plan = operands()
    torch.testing.assert_close(window_attention(qkv, bias, plan, 1),
                               window_attention(qkv, bias, plan, 1, scale=0.25, pad=torch.zeros(48, device=DEVICE)))
    assert not torch.allclose(window_attention(qkv, bias, plan, 1), window_attention(qkv, bias, plan, 1, scale=1.0))


def test_zero_vectors_have_no_direction_and_infinite_biases_no_weight():
    qkv, bias, plan = operands((2, 2))
    qkv[..., :32] = 0  # queries and keys
    qkv.requires_grad_()
    tau = torch.tensor([5.0], requires_grad=True, device=DEVICE)
    bias[0, 0, 1:], bias[0, 1] = -torch.inf, -torch.inf
    out = window_attention(qkv, bias, plan, 1, cosine_scale=tau)
    torch.testing.assert_close(out[0, 0, 0], qkv[0, 0, 0, 32:])
    assert (out[0, 0, 1] == 0).all()  # nothing to attend to
    out[..., 0].sum().backward()
    assert tau.grad.item() == 0 and qkv.grad.isfinite().all()


def test_operator_checks_and_compiles():
    qkv, bias, plan = operands((3, 2))
    tau, pad = (torch.full((n,), 2.0, device=DEVICE, requires_grad=True) for n in (1, 48))
    qkv.requires_grad_(), bias.requires_grad_()
    arguments = (qkv, bias, tau, pad, 1, plan.window, plan.shift, 0.25)
    torch.library.opcheck(torch.ops.attnlib.window_attention.default, arguments)

    def call(qkv, bias, pad):
        return window_attention(qkv, bias, plan, 1, pad=pad)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = (qkv, bias, pad)
    for a, b in zip(torch.autograd.grad(compiled(*leaves).square().sum(), leaves),
                    torch.autograd.grad(call(*leaves).square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


@on_device
def test_compiled_in_lower_precision_on_a_padded_map(device):
    """A compiler trusts the dtypes and strides that the operators announce."""
    qkv, bias, plan = operands((3, 2))
    qkv = qkv.bfloat16().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)  # not contiguous
    tau, pad = (torch.full((n,), 2.0, device=device) for n in (1, 48))
    arguments = (qkv, bias.mT.contiguous().mT, tau, pad, 1, plan.window, plan.shift, 0.25)
    out, norms = torch.ops.attnlib.window_attention.default(*arguments)
    torch.library.opcheck(torch.ops.attnlib.window_attention_backward.default,
                          (torch.randn_like(out), *arguments[:4], out, norms, *arguments[4:], True),
                          test_utils=("test_schema", "test_faketensor"))
    layer, x = layer_of(WindowAttention, "padded", device)
    wanted = copy.deepcopy(layer)
    for module, call in ((wanted, kernel_forward), (layer, torch.compile(kernel_forward, backend="aot_eager"))):
        with torch.autocast(device, torch.bfloat16):
            call(module, x).float().sum().backward()
    for a, b in zip(layer.parameters(), wanted.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        torch.testing.assert_close(a.grad, b.grad, rtol=0.02, atol=0.02)


def test_empty_batch_and_strides():
    qkv, bias, plan = operands((3, 3), heads=2)
    assert window_attention(qkv[:0], bias, plan, 2).shape == (0, 3, 3, 32)
    tau, pad = torch.tensor([3.0], device=DEVICE), torch.randn(192, device=DEVICE)
    other = qkv.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    leaves = [x.detach().requires_grad_() for x in (other, bias.mT.contiguous().mT, tau.expand(2), pad[::2])]
    wanted = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in leaves]
    assert not any(x.is_contiguous() for x in leaves)
    results = []
    for qkv, bias, tau, pad in (leaves, wanted):
        out = window_attention(qkv, bias, plan, 2, cosine_scale=tau, pad=pad)
        results.append([out, *torch.autograd.grad(out.square().sum(), (qkv, bias, tau, pad))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("change, error, message", [
    (dict(qkv=torch.ones(1, 3, 48)), ValueError, r"qkv of shape \(1, 3, 48\) must be \(B, H, W, 3C\)"),
    (dict(num_heads=5), ValueError, r"5 heads in C"),
    (dict(num_heads=0), ValueError, r"0 heads in C"),
    (dict(qkv=torch.empty(2**31, device="meta").as_strided((2**28, 3, 4, 48), (0, 0, 0, 1))), ValueError, "too large"),
    (dict(qkv=torch.ones(1, 3, 4, 48, dtype=torch.float64)), TypeError, "qkv .torch.float64.* must be float32"),
    (dict(qkv=torch.ones(1, 3, 4, 129 * 3)), TypeError, "width 129"),
    (dict(plan=plan_windows((4, 4), (2, 2))), ValueError, r"plan is for maps of \(4, 4\), and qkv has one of \(3, 4\)"),
    (dict(plan=Plan((3, 4), (2, 2), (2, 0), (4, 4))), ValueError, "must have shifts less than its windows"),
    (dict(plan=Plan((3, 4), (2, 2), (0, 0), (6, 4))), ValueError, "padded to whole windows"),
    (dict(bias=torch.ones(1, 4, 5)), ValueError, r"bias of shape \(1, 4, 5\) must be of shape \(1, 4, 4\)"),
    (dict(bias=torch.ones(1, 4, 4, dtype=torch.int64)), TypeError, "bias .torch.int64"),
    (dict(cosine_scale=torch.ones(2)), ValueError, r"cosine_scale of shape \(2,\) must be of shape \(1,\)"),
    (dict(pad=torch.ones(47)), ValueError, r"pad of shape \(47,\) must be of shape \(48,\)"),
])
def test_bad_input(change, error, message):
    qkv, bias, plan = operands()
    arguments = dict(qkv=qkv, bias=bias, plan=plan, num_heads=1) | change
    arguments = {k: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type != "meta" else x
                 for k, x in arguments.items()}
    with pytest.raises(error, match=message):
        window_attention(**arguments)


def test_what_the_kernel_takes():
    assert kernel_takes(torch.ones(1, device=DEVICE), 32) and kernel_takes(torch.ones(1, device="meta"), 32)
    assert not kernel_takes(torch.ones(1, device=DEVICE).double(), 32)
    assert not kernel_takes(torch.ones(1, device=DEVICE), 129)


def test_kernels_compile_for_gpus_that_are_not_here():
    """Every pass, number and option, for A100 or H100: they compile and need less shared memory than those have."""
    code = """
import json
from attnlib.windows import compile_for
cases = [(80, (7, 7), 32, "fp16", dict(padded=True)), (90, (7, 7), 32, "bf16", {}),
         (90, (8, 8), 32, "fp32", dict(cosine=True)), (80, (7, 7), 128, "fp32", dict(shifted=False)),
         (90, (16, 16), 32, "bf16", dict(cosine=True, padded=True, shifted=False))]
rows = [row | dict(capability=c, dtype=t) for c, w, d, t, o in cases for row in compile_for(c, w, d, t, **o)]
print(json.dumps(rows))
"""
    environment = dict(os.environ, TRITON_INTERPRET="0", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 2 + 2 + 2 + 2 + 4
    for row in rows:
        assert row["shared"] < (163 if row["capability"] == 80 else 227) * 1024, row
        assert row["registers"] <= 255 and (row["dtype"] == "fp32" or row["spilled"] < 400), row


@pytest.mark.parametrize("window, size, backward", [((4, 4), (8, 6), 5), ((9, 9), (18, 9), 9)])
def test_operations_are_counted(window, size, backward):
    qkv, tokens = torch.randn(2, *size, 3 * 32, requires_grad=True), window[0] * window[1]
    bias = torch.randn(2, tokens, tokens, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = window_attention(qkv, bias, plan_windows(size, window, (1, 1)), 2)
    with FlopCounterMode(display=False) as gradient:
        out.sum().backward()
    q = torch.empty(2 * -(-size[0] // window[0]) * -(-size[1] // window[1]), tokens, 32, device="meta")  # each window
    with FlopCounterMode(display=False) as plain:
        (q @ q.mT) @ q
    assert forward.get_total_flops() == plain.get_total_flops()
    assert gradient.get_total_flops() == backward * forward.get_total_flops() // 2
