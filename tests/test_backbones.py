"""What every backbone must do alike: train, compile, export, and give the same answer by every way to it."""
import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import test_swin
import test_swinv2
import test_tnt
import test_vit
from attnlib.attention import attention_backend
from attnlib.swin import Memory, window_reverse
from backbones import close, images

TOKENS = {"vit": test_vit, "tnt": test_tnt}  # each has `pair`: ours and timm's with the same weights
WINDOWS = {"swin": test_swin, "swinv2": test_swinv2}


def some(name):
    """A small model of the kind with random weights."""
    if name in TOKENS:
        return TOKENS[name].pair()[0]
    cls = {"swin": "SwinTransformer", "swinv2": "SwinTransformerV2"}[name]
    return WINDOWS[name].randomize(getattr(WINDOWS[name], cls)(**WINDOWS[name].SMALL))


@pytest.fixture(params=TOKENS)
def pair(request):
    return TOKENS[request.param].pair


@pytest.fixture
def small(pair):
    return lambda **options: pair(**options)[0].double()


# --- models of one sequence of tokens ----------------------------------------------------------------------------


def test_drop_path_and_dropout_draw_as_timm_does(pair):
    outputs = []
    for model in pair(drop_path_rate=0.5, drop_rate=0.2, pos_drop_rate=0.1, global_pool="avg"):
        torch.manual_seed(7)
        outputs.append(model.double().train()(images(8)))
    close(*outputs)


@pytest.mark.parametrize("options", [{}, {"global_pool": "avg"}, {"num_classes": 0}], ids=str)
def test_the_last_block_may_be_cut_short(small, options):
    """forward equals head(features) in value and gradient, though its last block computes the class token only."""
    model, x = small(**options), images()
    results = []
    for f in (model, lambda x: model.forward_head(model.forward_features(x))):
        model.zero_grad()
        x = x.detach().requires_grad_()
        out = f(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-12)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_backends_agree(pair, backend):
    ours, theirs = (model.double().eval() for model in pair())
    with attention_backend(backend):
        out = ours(images())
    close(out, theirs(images()))


def test_drop_path_drops_whole_examples_in_the_shortcut_too(small):
    model, x = small(drop_path_rate=0.5).train(), images(16)
    outputs = []
    for f in (model, lambda x: model.forward_head(model.forward_features(x))):
        torch.manual_seed(3)
        outputs.append(f(x))
    close(*outputs)


def test_checkpointing_gives_the_same_gradients(small):
    model, x = small(drop_path_rate=0.3).train(), images(4)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(0)
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients):
        close(a, b, 1e-12)


def test_heads_can_be_replaced(small):
    model, x = small(), images()
    model.reset_classifier(7)
    assert model(x).shape == (2, 7) and model.num_classes == 7 and model.head.weight.dtype == torch.float64
    model.reset_classifier(0, "avg")
    close(model(x), model.forward_features(x)[:, 1:].mean(1), 1e-12)
    assert isinstance(model.head, nn.Identity)
    model.eval().reset_classifier(3, "token")
    assert not model.head.training and model.global_pool == "token"


def test_compiles_without_graph_breaks(small):
    torch._dynamo.reset()
    model, x = small(depth=2), images()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x), model(x))
    compiled(x).sum().backward()
    model.eval()
    with torch.no_grad():
        close(compiled(x), model(x))


@pytest.mark.parametrize("options", [{}, {"legacy": True}], ids=str)
def test_exports_with_any_batch(request, small, options):
    if options and "tnt" not in request.node.name:
        pytest.skip("an option of TNT's")
    model = small(**options).eval()
    program = torch.export.export(model, (images(),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    for n in (1, 5):
        close(program.module()(images(n)), model(images(n)))


def test_onnx_runs(small, tmp_path):
    model, path, batch = small(depth=2).float().eval(), str(tmp_path / "model.onnx"), torch.export.Dim("batch")
    torch.onnx.export(model, (images().float(),), path, dynamo=True, dynamic_shapes={"x": {0: batch}}, verbose=False)
    session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    for n in (1, 3):
        x = images(n).float()
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        close(torch.from_numpy(got), model(x).detach(), 1e-5)


# --- models of windows -------------------------------------------------------------------------------------------


@pytest.fixture(params=WINDOWS)
def windows(request):
    """The module of tests, and a function that makes a small model of its class with random weights."""
    module = WINDOWS[request.param]
    cls = getattr(module, {"swin": "SwinTransformer", "swinv2": "SwinTransformerV2"}[request.param])
    return module, lambda **options: module.randomize(cls(**module.SMALL | options))


@pytest.mark.parametrize("small_maps", ["shrink", "pad"])
def test_no_answer_depends_on_earlier_ones(windows, small_maps):
    model = windows[1](small_maps=small_maps)
    images = [torch.randn(1, 3, *size) for size in ((64, 64), (4, 4), (30, 21), (112, 50), (5, 90))]
    with torch.inference_mode():
        first = [model(x) for x in images]
    with torch.no_grad():
        again = [model(x) for x in reversed(images)][::-1]
    fresh = [copy.deepcopy(model)(x) for x in images]
    for a, b, c in zip(first, again, fresh):
        close(a, b, 1e-6)
        close(a, c, 1e-6)
    model(images[0]).sum().backward()  # masks that inference made serve training


def test_maps_reproduce_the_output(windows):
    torch.manual_seed(0)
    model = windows[1]().double()
    x = torch.randn(1, 3, 60, 44, dtype=torch.float64)
    maps = model.attention_maps(x)
    assert len(maps) == 4 and all(torch.allclose(w.sum(-1), torch.ones_like(w.sum(-1))) for w in maps)
    layer, y = model.blocks[1].attn, torch.randn(1, 15, 11, 16, dtype=torch.float64)
    plan = layer.plan((15, 11))
    _, _, v, _ = layer.heads(y, plan)
    out = window_reverse(layer.attention_maps(y) @ v, plan.window, plan.padded)
    out = layer.proj(out.roll(plan.shift, (1, 2))[:, :15, :11])
    torch.testing.assert_close(out, layer(y))
    for weights, where in zip(model.pixel_maps(x, (33, 20)), ((8, 5), (8, 5), (4, 2), (4, 2))):
        assert weights.shape[:2] == (1, 1 if where == (8, 5) else 2) and weights[0, 0][where] > 0
    with pytest.raises(ValueError, match=r"pixel \(60, 0\) must be in x of shape"):
        model.pixel_maps(x, (60, 0))


def test_windows_compile(windows):
    torch._dynamo.reset()
    model = windows[1](depths=(2,), num_heads=(2,), window_size=5)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for size in ((64, 64), (40, 100)):
        x = torch.randn(1, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))


def test_export_with_dynamic_height_and_width(windows):
    model, auto = windows[1](depths=(2,), num_heads=(2,)), torch.export.Dim.AUTO
    program = torch.export.export(model, (torch.randn(2, 3, 64, 72),), dynamic_shapes={"x": {2: auto, 3: auto}})
    for size in ((64, 72), (97, 45), (33, 120)):
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["fused", "data", "pruned"])
def test_the_bias_is_that_of_the_present_weights(windows, change):
    """Whatever changed them: fused optimizers and `.data` leave no trace in a tensor's version."""
    model, x = windows[1](), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = model(x)
    bias = [p for block in model.layers[0].blocks for p in block.attn.bias_parameters()]
    if change == "fused":
        optimizer = torch.optim.AdamW(model.parameters(), 0.05, fused=True)
        model(x).square().sum().backward()
        optimizer.step()
    elif change == "data":
        for p in bias:
            p.data.add_(torch.randn_like(p))
    else:
        for block in model.layers[0].blocks:
            owner = getattr(block.attn, "cpb_mlp", [block.attn])[-1]
            name = "weight" if hasattr(owner, "weight") else "relative_position_bias_table"
            prune.random_unstructured(owner, name, 0.9)
    with torch.no_grad():
        after = model(x)
        for stage in model.layers:
            for block in stage.blocks:
                block.attn.memory = Memory()
        close(model(x), after, 0)
    assert not torch.equal(after, before)


def test_threads_share_a_model(windows):
    model = windows[1]().eval()
    inputs = [torch.randn(1, 3, *size) for size in ((64, 64), (32, 64), (64, 32))]
    with torch.no_grad():
        expected = [model(x) for x in inputs]

    def ask(i):
        with torch.no_grad():
            return i % 3, model(inputs[i % 3])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            for i, found in pool.map(ask, range(60)):
                close(found, expected[i], 1e-6)
    finally:
        sys.setswitchinterval(interval)


def test_the_present_window_leaves_the_parameters_alone(windows):
    model = windows[1]()
    old = list(model.parameters())
    model.set_input_size(model.patch_embed.img_size)
    assert all(a is b for a, b in zip(old, model.parameters(), strict=True))


@pytest.mark.parametrize("name", [*TOKENS, *WINDOWS])
def test_traces_without_gradient(name):
    model, x = some(name).float().eval(), images(1).float()
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        for n in (1, 3) if name in TOKENS else (1,):
            close(traced(images(n).float()), model(images(n).float()), 1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))])
@pytest.mark.parametrize("name", [*TOKENS, *WINDOWS])
def test_a_step_on_every_device(name, device):
    """Logits and gradients in float64 are those of the CPU, in evaluation too; bfloat16 is near them."""
    model, x = some(name).double().eval(), images(3)
    other = copy.deepcopy(model).to(device)
    expected, found = model(x), other(x.to(device))
    close(found.cpu(), expected, 1e-9)
    expected.square().sum().backward()
    found.square().sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        close(b.grad.cpu(), a.grad, 1e-7)
    with torch.no_grad():
        close(other(x.to(device)).cpu(), expected.detach(), 1e-9)
        half = other.bfloat16()(x.to(device).bfloat16()).cpu().double()
    assert (half - expected).abs().max() < 0.1 * expected.abs().max()
