"""A Swin block as five kernels is the block, and says what it cannot do."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_memory import watched

from attnlib import inference, windows
from attnlib.cost import count_operations
from attnlib.inference import optimize_for_inference
from attnlib.swin import (
    PatchMerging,
    SwinBlock,
    SwinTransformer,
    WindowAttention,
    window_layout,
)
from attnlib.swinv2 import SwinTransformerV2, WindowAttentionV2
from attnlib.vit import VisionTransformer
from attnlib.windows import (
    FusedBlock,
    FusedMerging,
    FusedWindowAttentionV2,
    fuse_swin,
    fused_linear,
)
from helpers import kernel_grid

ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = {torch.float32: 1e-4 if DEVICE == "cuda" else 2e-6, torch.bfloat16: 2e-2}
LIMIT[torch.float16] = 3e-3


def randomized(module):
    """The module on the device, no norm or bias of which is one or zero."""
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5 if p.ndim == 2 else 1.0)
    return module.to(DEVICE).requires_grad_(False)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(list(LIMIT)),
    st.tuples(st.integers(1, 140), st.integers(1, 70), st.integers(1, 70)),
    st.tuples(*[st.booleans()] * 4),
)
def test_products(dtype, sizes, options):
    rows, fan_in, fan_out = sizes
    normed, gelu, added, biased = options
    layer, norm = randomized(nn.Linear(fan_in, fan_out, biased)), nn.LayerNorm(fan_in)
    norm, layer = randomized(norm).to(dtype) if normed else None, layer.to(dtype)
    x = (3 + torch.randn(2, rows, fan_in, device=DEVICE)).to(dtype)
    residual = torch.randn(2, rows, fan_out, device=DEVICE).to(dtype) if added else None
    with torch.no_grad():
        found = fused_linear(x, layer, norm=norm, gelu=gelu, residual=residual)
        wide = x.double()
        if normed:
            wide = F.layer_norm(wide, (fan_in,), norm.weight.double(), norm.bias.double())
        bias = layer.bias.double() if biased else None
        exact = F.linear(wide, layer.weight.double(), bias)
        exact = F.gelu(exact) if gelu else exact
        exact = exact + residual.double() if added else exact
    assert found.dtype == dtype and found.shape == exact.shape
    assert (found - exact).abs().max() <= LIMIT[dtype] * max(exact.abs().max().item(), 1)


def test_rows_far_from_zero_keep_their_variance():
    layer, norm = randomized(nn.Linear(64, 8)), nn.LayerNorm(64).to(DEVICE)
    x = 1000 + torch.randn(5, 64, device=DEVICE)
    with torch.no_grad():
        found = fused_linear(x, layer, norm=norm)
        exact = F.linear(norm.double()(x.double()), layer.weight.double(), layer.bias.double())
    assert (found - exact).abs().max() < 1e-3


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is what is watched")
def test_a_block_touches_only_what_is_its_own():
    block = randomized(SwinBlock(16, 2, (3, 2), (1, 1))).eval()
    x = torch.randn(1, 5, 4, 16)
    with watched(windows) as names, torch.no_grad():
        found = FusedBlock(block)(x)
    assert names == ["_product", "_forward", "_product", "_product", "_product"]
    torch.testing.assert_close(found, block(x), rtol=1e-4, atol=1e-4)


@kernel_grid("size", [(16, 16), (12, 20)], kept=[(12, 20)])
def test_models(size):
    torch.manual_seed(0)
    options = dict(embed_dim=16, depths=(2, 1), num_heads=(1, 2), window_size=2)
    model = randomized(SwinTransformer(16, 4, 1, 3, **options)).eval()
    fused, x = fuse_swin(model), torch.randn(2, 1, *size, device=DEVICE)
    assert fused.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-3, atol=1e-4)  # a known bias


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Models are on a GPU, or as far as `optimize_for_inference` knows they are."""
    if DEVICE == "cpu":
        monkeypatch.setattr(inference, "devices", lambda model: ["cuda:0"])


SMALL = dict(embed_dim=8, depths=(1, 1), num_heads=(1, 2), window_size=2)


def test_an_optimized_copy_on_a_gpu(on_a_gpu):
    """A frozen copy of fused blocks with the same logits; the model stays as it is."""
    model = randomized(SwinTransformer(16, 4, 1, 3, **SMALL)).train()
    model.requires_grad_(True)
    fast, x = optimize_for_inference(model), torch.randn(2, 1, 16, 20, device=DEVICE)
    assert type(fast) is SwinTransformer and not fast.training
    assert {type(block) for block in fast.blocks} == {FusedBlock}
    assert {type(block) for block in model.blocks} == {SwinBlock} and model.training
    assert not any(p.requires_grad for p in fast.parameters())
    with torch.inference_mode():
        fast(x)  # what it keeps can be used outside as well
    found = fast(x)
    assert found.grad_fn is None
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-4)
        for p in model.parameters():  # control: other weights, which the copy does not have
            p.mul_(1.1)
        assert (found - model(x)).abs().max() > 1e-2
    with pytest.raises(RuntimeError, match="no gradients"):
        fast(x.requires_grad_())
    with pytest.raises(RuntimeError, match="attention maps"):
        fast.attention_maps(x)


def randomized_v2():
    torch.manual_seed(0)
    return randomized(SwinTransformerV2(16, 4, 1, 3, **SMALL)).eval()


def test_an_optimized_swin_v2_has_the_kernel_for_its_windows(on_a_gpu):
    model, x = randomized_v2(), torch.randn(2, 1, 16, 20, device=DEVICE)
    fast = optimize_for_inference(model)
    assert type(fast) is SwinTransformerV2
    assert {type(block.attn) for block in fast.blocks} == {FusedWindowAttentionV2}
    assert {type(block.attn) for block in model.blocks} == {WindowAttentionV2}
    with torch.no_grad():
        found = fast(x)
        torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-4)
        for p in model.parameters():  # control: other weights, which the copy does not have
            p.mul_(1.1)
        assert torch.equal(fast(x), found) and (found - model(x)).abs().max() > 1e-2
    with pytest.raises(RuntimeError, match="attention maps"):
        fast.attention_maps(x)
    with pytest.raises(RuntimeError, match="must be False"):
        fast.train()
    with pytest.raises(RuntimeError, match="load it into the model"):
        fast.load_state_dict(model.state_dict())


@pytest.mark.parametrize("kind", [SwinTransformer, SwinTransformerV2])
def test_a_trainable_copy(kind):
    """It trains the model's parameters, records weights, and takes other sizes and weights."""
    model = randomized(kind(16, 4, 1, 3, drop_path_rate=0.0, **SMALL)).train()
    model.requires_grad_(True)
    model.patch_embed.requires_grad_(False)
    fast, x = fuse_swin(model, trainable=True), torch.randn(2, 1, 16, 20, device=DEVICE)
    assert type(fast) is kind and fast.training
    for block, own in zip(model.blocks, fast.blocks, strict=True):
        assert type(own.attn) is windows._FUSED[type(block.attn)]
    assert {name for name, p in fast.named_parameters() if not p.requires_grad} == {
        name for name, p in model.named_parameters() if not p.requires_grad
    }
    before = model(x)
    optimizer = torch.optim.SGD(fast.parameters(), 0.01)
    fast(x).square().sum().backward()
    optimizer.step()
    assert (model(x) - before).abs().max() > 1e-4  # the same parameters
    torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-4)
    for a, b in zip(fast.attention_maps(x), model.attention_maps(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    fast.eval()
    assert model.training
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        copied.load_state_dict(fast.state_dict())
        assert torch.equal(copied(x), fast(x))
    model.eval()
    fast.set_input_size(32, 3)
    model.set_input_size(32, 3)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-4)


def test_a_trainable_copy_has_known_window_attention_alone():
    class Own(WindowAttention):
        pass

    model = SwinTransformer(16, 4, 1, 3, **SMALL)
    model.blocks[-1].mlp.act = nn.ReLU()  # is called as it is
    model.blocks[-1].register_forward_hook(lambda *_: None)
    fuse_swin(model, trainable=True)
    model.blocks[-1].attn = Own(16, 2, 2)
    for kind, trainable in ((model, True), (randomized_v2(), False)):
        kind.blocks[-1].attn = Own(16, 2, 2)
        with pytest.raises(TypeError, match=r"layer \(Own\)"):
            fuse_swin(kind, trainable)


def test_what_the_kernels_do_not_serve_is_not_optimized(on_a_gpu):
    swin = SwinTransformer(16, 4, 1, 3, **SMALL)
    wide = SwinTransformer(16, 4, 1, 3, **SMALL | dict(embed_dim=130, num_heads=(1, 1)))
    narrow = SwinTransformer(16, 4, 1, 3, **SMALL | dict(embed_dim=80, num_heads=(1, 2)))
    other = SwinTransformer(16, 4, 1, 3, **SMALL)
    other.layers[0].blocks[0].mlp.act = nn.ReLU()
    token = VisionTransformer(16, 4, in_chans=1, embed_dim=8, depth=1, num_heads=1)
    for model, message in (
        (swin.double(), "float64 on .*it must be float32, bfloat16 or float16"),
        (wide.half(), "at most 128 wide, not 130"),
        (narrow, "heads of width 80: .*they take 64, or 128 in a dtype of 16 bits"),
        (other, "on .*SwinTransformer.* must be a SwinTransformer of SwinBlocks with GELU"),
        (token, r"model \(VisionTransformer\) must be a SwinTransformer"),
        (
            SwinTransformerV2(16, 4, 1, 3, **SMALL).double(),
            "float64 on .*it must be float32, bfloat16 or float16",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            optimize_for_inference(model.to(DEVICE))


@pytest.mark.parametrize("missing", [False, True])
def test_the_kernels_are_imported_for_a_model_on_a_gpu_alone(missing):
    """On a CPU nobody imports Triton; where it is missing, the extra is named."""
    code = f"""
import os, sys
from attnlib import inference
from attnlib.swin import SwinTransformer
model = SwinTransformer(8, 4, 1, 3, embed_dim=8, depths=(1,), num_heads=(1,), window_size=2)
inference.optimize_for_inference(model)
assert not {{"triton", "attnlib.windows"}} & set(sys.modules)
assert "TRITON_INTERPRET" not in os.environ
if {missing}:
    sys.modules["triton"] = None
inference.devices = lambda model: ["cuda:0"]
print(type(inference.optimize_for_inference(model).blocks[0]).__name__)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if missing:
        assert "ImportError: triton is missing: pip install" in done.stderr
    else:
        assert done.stdout == "FusedBlock\n", done.stderr


def test_merging():
    merging, x = randomized(PatchMerging(8)), torch.randn(1, 5, 3, 8, device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(FusedMerging(merging)(x), merging(x), rtol=1e-4, atol=1e-5)


def test_operator_checks_and_counts():
    x, weight = torch.randn(5, 16, device=DEVICE), torch.randn(8, 16, device=DEVICE)
    arguments = (x.T.contiguous().T, weight, None, None, None, 0.0, True, None)
    torch.library.opcheck(torch.ops.attnlib.fused_linear.default, arguments)
    layer = nn.Linear(16, 8, bias=False, device=DEVICE)
    with torch.no_grad():
        counted = count_operations(lambda: fused_linear(x, layer))
    assert counted.flops == 2 * 5 * 16 * 8 and counted.bytes == 4 * (80 + 128 + 40)


def test_bad_input():
    layer, x = nn.Linear(8, 4, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    with pytest.raises(RuntimeError, match="under torch.no_grad"):
        fused_linear(x, layer)
    with torch.no_grad():
        for arguments, options, error, message in (
            ((x[:, :7], layer), {}, ValueError, r"must be \(..., 8\)"),
            ((x, layer), dict(residual=x), ValueError, r"residual of shape \(3, 4\)"),
            ((x, layer), dict(norm=nn.LayerNorm(4)), ValueError, "norm of shape"),
            ((x.double(), layer), {}, TypeError, "float64"),
            ((x.half(), layer), {}, TypeError, "as layer and residual"),
        ):
            with pytest.raises(error, match=message):
                fused_linear(*arguments, **options)
    small = dict(embed_dim=8, depths=(1,), num_heads=(1,), window_size=2)
    with pytest.raises(TypeError, match="Linear"):
        fuse_swin(layer)
    model = SwinTransformer(8, 4, 1, 3, **small)
    model.layers[0].blocks[0].mlp.act = nn.ReLU()
    with pytest.raises(TypeError, match="with GELU"):
        fuse_swin(model)


@pytest.mark.parametrize("affine", [dict(elementwise_affine=False), dict(bias=False)])
def test_norms_without_parameters(affine):
    layer, norm = randomized(nn.Linear(24, 8)), nn.LayerNorm(24, **affine).to(DEVICE)
    norm = randomized(norm)
    x = 3 + torch.randn(5, 24, device=DEVICE)
    with torch.no_grad():
        found, exact = (
            fused_linear(x, layer, norm=norm),
            layer.double()(norm.double()(x.double())),
        )
    assert (found - exact).abs().max() <= LIMIT[torch.float32] * max(
        exact.abs().max().item(), 1
    )


@pytest.mark.parametrize("owner", ["layer.weight", "layer.bias", "norm.weight", "norm.bias"])
def test_no_gradient_is_lost(owner):
    """Each parameter alone asks for a gradient, which the kernel does not have."""
    parts = dict(layer=nn.Linear(8, 4), norm=nn.LayerNorm(8))
    layer, norm = (part.to(DEVICE).requires_grad_(False) for part in parts.values())
    name, _, parameter = owner.partition(".")
    getattr(parts[name], parameter).requires_grad_(True)
    x = torch.randn(3, 8, device=DEVICE)
    with pytest.raises(RuntimeError, match="fused_linear has no gradients"):
        fused_linear(x, layer, norm=norm)


def test_changed_parts_are_not_fused():
    """A block with a hook or an exchanged part is refused; a changed merging is called."""

    class Own(nn.LayerNorm):
        pass

    def changes(block):
        yield block.register_forward_hook(lambda *_: None)
        yield block.attn.register_forward_pre_hook(lambda *_: None)
        yield block.attn.qkv.register_forward_hook(lambda *_: None)
        yield block.mlp.fc2.register_forward_hook(lambda *_: None)
        yield block.norm1.register_forward_hook(lambda *_: None)

    model = randomized(SwinTransformer(16, 4, 1, 3, **SMALL))
    for change in changes(model.blocks[-1]):
        with pytest.raises(TypeError, match="without hooks or exchanged parts"):
            fuse_swin(model)
        change.remove()
    fuse_swin(model)
    for owner, name, part in (
        ("", "norm2", Own(16)),
        ("", "norm2", nn.RMSNorm(16)),
        ("attn", "qkv", nn.Sequential(nn.Linear(16, 48))),
        ("mlp", "fc1", nn.utils.parametrizations.weight_norm(nn.Linear(16, 64))),
        ("mlp", "drop", nn.ReLU()),
    ):
        model = randomized(SwinTransformer(16, 4, 1, 3, **SMALL))
        setattr(model.blocks[-1].get_submodule(owner), name, part.to(DEVICE))
        with pytest.raises(TypeError, match="without hooks or exchanged parts"):
            fuse_swin(model)
    model, x = (
        randomized(SwinTransformer(16, 4, 1, 3, **SMALL)).eval(),
        torch.randn(1, 1, 16, 16),
    )
    model.layers[1].downsample.norm.register_forward_hook(lambda norm, inputs, out: 2 * out)
    with torch.no_grad():
        found, wanted = fuse_swin(model)(x.to(DEVICE)), model(x.to(DEVICE))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_the_state_of_a_fused_copy():
    """Other weights and training mode are refused, and what is kept follows the weights."""
    options = SMALL | dict(depths=(1, 2))
    model = randomized(SwinTransformer(16, 4, 1, 3, **options)).eval()
    fused, x = fuse_swin(model), torch.randn(1, 1, 16, 16, device=DEVICE)
    with torch.no_grad():
        before = fused(x)
        with pytest.raises(RuntimeError, match="load it into the model"):
            fused.load_state_dict({key: 2 * y for key, y in model.state_dict().items()})
        with pytest.raises(RuntimeError, match="must be False"):
            fused.train()
        for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert torch.equal(copied(x), before)
            with pytest.raises(RuntimeError, match="load it into the model"):
                copied.load_state_dict(model.state_dict())
        for window in (4, 2, 3):  # the maps are 4 and 2 wide: the window of a map may stay
            fused.set_input_size(16, window)
            model.set_input_size(16, window)
            torch.testing.assert_close(fused(x), model(x), rtol=1e-3, atol=1e-4)
        fused.half()
        fused(x.half())
        bias = fused.blocks[0].last[2]
        assert bias.dtype == torch.float16


def test_a_gpu_or_triton_that_is_too_old_is_named(monkeypatch):
    """The reason of `flash.refusal` reaches the reader from all functions of the module."""
    reason = "A100 with Triton 3.3.1: the kernels need Triton 3.4 or later"
    monkeypatch.setattr(windows, "refusal", lambda x, width: reason)
    x, layout = torch.randn(1, 4, 4, 24), window_layout((4, 4), (2, 2))
    with pytest.raises(TypeError, match=f"x on {reason}"):
        fused_linear(x, nn.Linear(24, 8))
    with pytest.raises(TypeError, match=reason):
        windows.window_attention(x, torch.zeros(1, 4, 4), layout, 1)
