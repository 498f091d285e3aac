"""What every backbone must do alike: train, compile, export, be changed and be looked into."""

import copy
import itertools
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from small_models import LOADED, outputs
from torch import nn
from torch.func import functional_call, grad, vmap

from attnlib import models
from attnlib.attention import attention_backend, current_backend, record_attention, reference
from attnlib.autoformer import AutoFormer
from attnlib.backbone import (
    Backbone,
    DropPath,
    check_rates,
    drop_path_rates,
    feature_take_indices,
    resample_abs_pos_embed,
    resample_parameter,
)
from attnlib.detr import DETR
from attnlib.mae import MaskedAutoencoder
from attnlib.models import load_pretrained
from attnlib.seq2seq import RecurrentDecoder, RecurrentEncoder
from attnlib.transformer import Transformer
from attnlib.vit import Mlp, VisionTransformer
from attnlib.vit_variants import SwiGLU
from helpers import BACKBONES, backbone, build, close, images

TINY = dict(embed_dim=12, depth=1, num_heads=1, num_classes=2)
every = pytest.mark.parametrize("name", BACKBONES)
tokens = pytest.mark.parametrize("name", ["vit", "deit", "tnt"])
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


NINE_BY_SIXTEEN = {  # 144 patches, as many as 12 by 12 has
    "vit": partial(build, "vit"),
    "deit": partial(build, "deit"),
    "tnt": partial(build, "tnt"),
    "beit": partial(build, "beit"),
    "autoformer": partial(
        AutoFormer, patch_size=8, embed_dim=24, num_heads=(2,), mlp_ratio=(2,), head_dim=8
    ),
}


def linear_layers(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


# --- training ------------------------------------------------------------------------------


@every
def test_checkpointing_changes_no_gradient(name):
    model, x, gradients = backbone(name, drop_path_rate=0.3).train(), images(4), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(model(x).square().sum(), model.parameters()))
    for a, b in zip(*gradients, strict=True):
        close(a, b, 1e-12)


def sharper(q, k, v, mask, bias, scale, dropout_p):
    """A backend whose results are others than those of attention."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return reference(q, k, v, mask, bias, 2 * scale, dropout_p)


def in_a_thread(function):
    """The result of a function that another thread calls, as CUDA's backward passes are."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@every
@pytest.mark.parametrize("backend", [sharper, "reference", "sdpa"])
def test_checkpointing_keeps_the_backend(name, backend):
    model, x, gradients = backbone(name).train(), images(), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        with attention_backend(backend):
            loss = model(x).square().sum()
        grad = partial(torch.autograd.grad, loss, list(model.parameters()), retain_graph=True)
        gradients += [grad(), in_a_thread(grad)]  # one after the other, so it repeats it twice
        with attention_backend(sharper):
            gradients.append(grad())
        assert current_backend() == "auto"
    for found in gradients[1:]:
        for a, b in zip(gradients[0], found, strict=True):
            close(a, b, 1e-12)


@every
def test_checkpointing_records_weights_once(name):
    model, x, recorded, gradients = backbone(name).train(), images(), [], []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        with record_attention() as maps:
            loss = model(x).square().sum()
            gradients.append(torch.autograd.grad(loss, model.parameters()))
        recorded.append(maps)
    assert len(recorded[0]) > 1
    for a, b in zip(*recorded, strict=True):
        close(a, b, 1e-12)
    for a, b in zip(*gradients, strict=True):
        close(a, b, 1e-12)


def gradients_at(model, state, x, enable):
    """Gradients for other parameters than the model's own, with checkpointing or without."""
    model.set_grad_checkpointing(enable)
    torch.manual_seed(0)  # of stochastic depth
    loss = functional_call(model, state, (x,)).square().sum()
    return torch.autograd.grad(loss, list(state.values()))


@every
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_checkpointing_with_parameters_from_outside(name, kind, monkeypatch):
    model, x = backbone(name, drop_path_rate=0.3).train(), images()
    state = {key: p.detach() * 1.5 for key, p in model.named_parameters()}
    state = {
        key: nn.Parameter(p) if kind is nn.Parameter else p.requires_grad_()
        for key, p in state.items()
    }
    wanted = gradients_at(model, state, x, enable=False)
    for a, b in zip(wanted, gradients_at(model, state, x, enable=True), strict=True):
        close(a, b, 1e-9 * max(1.0, a.abs().max().item()))
    monkeypatch.setattr(sys.modules["attnlib.attention"], "_SameTensors", lambda block: block)
    with pytest.raises((RuntimeError, AssertionError)):  # it has no gradient, or a wrong one
        for a, b in zip(wanted, gradients_at(model, state, x, enable=True), strict=True):
            close(a, b, 1e-9 * max(1.0, a.abs().max().item()))


def test_checkpointing_compiles():
    model, x, gradients = backbone("vit", depth=1).train(), images(), []
    torch._dynamo.reset()
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        call = torch.compile(model, fullgraph=True, backend="eager") if enable else model
        with attention_backend(sharper):
            loss = call(x).square().sum()
        gradients.append(torch.autograd.grad(loss, model.parameters()))
    for a, b in zip(*gradients, strict=True):
        close(a, b, 1e-12)


@every
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_a_step_on_every_device(name, device):
    """Logits and gradients in float64 are those of the CPU; bfloat16 is near them."""
    model, x = backbone(name).eval(), images(3)
    other = copy.deepcopy(model).to(device)
    expected, found = model(x), other(x.to(device))
    close(found.cpu(), expected, 1e-9)
    expected.square().sum().backward()
    found.square().sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        close(b.grad.cpu(), a.grad, 1e-7)
    with torch.no_grad():
        half = other.bfloat16()(x.to(device).bfloat16()).cpu().double()
    assert (half - expected).abs().max() < 0.1 * expected.abs().max()


@every
def test_pickle_and_copies(name):
    model, x = backbone(name).eval(), images()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


@every
def test_the_present_size_leaves_the_parameters_alone(name):
    """An optimizer may hold them."""
    model = backbone(name)
    old = list(model.parameters())
    model.set_input_size(32)
    assert all(a is b for a, b in zip(old, model.parameters(), strict=True))


@every
def test_what_weight_decay_spares(name):
    model = backbone(name)
    spared = {key for key, _ in model.named_parameters() if "token" in key or "pos" in key}
    assert spared - {key for key in spared if "cpb" in key or "relative" in key} <= (
        model.no_weight_decay()
    )


# --- plain layers: they can be looked into, replaced and changed ----------------------------


@every
@pytest.mark.parametrize("training", [False, True])
def test_hooks_on_every_linear_layer_are_called(name, training):
    model, seen = backbone(name).train(training), []
    for layer in linear_layers(model):
        model.get_submodule(layer).register_forward_hook(
            lambda module, args, out, layer=layer: seen.append(layer)
        )
    with torch.set_grad_enabled(training):
        model(images())
    assert sorted(seen) == sorted(linear_layers(model))


@every
def test_another_forward_of_a_layer_is_used(name):
    """Libraries that move or adapt weights replace `forward`."""
    model, x = backbone(name).eval(), images()
    with torch.no_grad():
        usual = model(x)
        for layer in linear_layers(model):
            module = model.get_submodule(layer)
            forward = module.forward
            module.forward = lambda x, forward=forward: forward(x).roll(1, 0)
            assert (model(x) - usual).abs().max() > 1e-9, layer
            module.forward = forward
        close(model(x), usual, 0)


@every
def test_dynamic_quantization_replaces_the_layers(name):
    model, x = backbone(name).float().eval(), images().float()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert linear_layers(model) and not linear_layers(quantized)
    usual, found = model(x), quantized(x)
    assert 0 < (found - usual).abs().max() < 0.1 * usual.abs().max()


@every
def test_gradients_of_every_example(name):
    model, x = backbone(name).eval(), images(3)
    parameters = {key: p.detach() for key, p in model.named_parameters()}

    def loss(parameters, x):
        return functional_call(model, parameters, (x[None],)).square().sum()

    found = vmap(grad(loss), (None, 0))(parameters, x)
    for i in range(3):
        wanted = torch.autograd.grad(
            model(x[i : i + 1]).square().sum(), model.parameters(), allow_unused=True
        )
        for key, g in zip(parameters, wanted, strict=True):
            close(found[key][i], torch.zeros_like(parameters[key]) if g is None else g, 1e-9)


@every
def test_attention_maps_are_those_of_the_blocks(name):
    model, x = backbone(name).eval(), images()
    usual, maps = model(x), model.attention_maps(x)
    assert len(maps) == (4 if name.startswith("swin") else 3)
    for weights in maps:
        close(weights.sum(-1), torch.ones_like(weights[..., 0]), 1e-10)
    close(model(x), usual, 0)


# --- compile and export ----------------------------------------------------------------------


@every
def test_compiles_without_graph_breaks(name):
    torch._dynamo.reset()
    model, x = backbone(name), images()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x), model(x))
    compiled(x).sum().backward()
    model.eval()
    with torch.no_grad():
        close(compiled(x), model(x))


@tokens
@pytest.mark.parametrize("options", [{}, {"legacy": True}], ids=str)
def test_exports_with_any_batch(name, options):
    if options and name != "tnt":
        pytest.skip("an option of TNT's")
    model, batch = backbone(name, **options).eval(), {0: torch.export.Dim("batch")}
    program = torch.export.export(model, (images(),), dynamic_shapes={"x": batch})
    for n in (1, 5):
        close(program.module()(images(n)), model(images(n)))


@pytest.mark.parametrize("name", ["swin", "swinv2"])
def test_exports_with_any_height_and_width(name):
    options = dict(depths=(2,), num_heads=(2,), window_size=7)
    model, auto = backbone(name, **options).eval(), torch.export.Dim.AUTO
    shapes = {"x": {2: auto, 3: auto}}
    program = torch.export.export(model, (images(2, (64, 72)),), dynamic_shapes=shapes)
    for size in ((64, 72), (97, 45), (33, 120)):
        close(program.module()(images(2, size)), model(images(2, size)))


@tokens
def test_onnx_runs(name, tmp_path):
    model, path = backbone(name).float().eval(), str(tmp_path / "model.onnx")
    torch.onnx.export(
        model,
        images().float(),
        path,
        dynamo=True,
        dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
        verbose=False,
    )
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for n in (1, 3):
        x = images(n).float()
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        close(torch.from_numpy(got), model(x).detach(), 1e-5)


@every
def test_traces_without_gradient(name):
    model, x = backbone(name).float().eval(), images(1).float()
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        for n in (1,) if name.startswith("swin") else (1, 3):
            close(traced(images(n).float()), model(images(n).float()), 1e-5)


EXPORTED = {
    **{name: partial(backbone, name) for name in BACKBONES},
    "swin, many windows": partial(backbone, "swin", img_size=72),
    "swinv2, many windows": partial(backbone, "swinv2", img_size=72),
    "autoformer": partial(NINE_BY_SIXTEEN["autoformer"], img_size=32),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPORTED)
def test_a_trace_passes_its_own_check(name):
    """PyTorch traces a second time without gradient and compares both graphs and outputs."""
    model = EXPORTED[name]().float().eval()
    x = images(1, model_size(model)).float()
    traced = torch.jit.trace(model, x)
    close(traced(x), model(x), 1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPORTED)
def test_the_older_onnx_exporter_serves_every_backbone(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    model, path = EXPORTED[name]().float().eval(), str(tmp_path / "model.onnx")
    x = images(2, model_size(model)).float()
    torch.onnx.export(model, (x,), path, dynamo=False, opset_version=17)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    close(torch.from_numpy(got), model(x).detach(), 1e-4)


def model_size(model):
    embed = model.pixel_embed if hasattr(model, "pixel_embed") else model.patch_embed
    return embed.img_size


def test_every_size_is_exported_with_dynamic_sizes():
    """Also from an example of the model's own size, whose positions need no resampling."""
    model = backbone("vit", dynamic_img_size=True).eval()
    auto = torch.export.Dim.AUTO
    shapes = {"x": {2: auto, 3: auto}}
    program = torch.export.export(model, (images(),), dynamic_shapes=shapes)
    for size in ((32, 32), (48, 64), (16, 40)):
        close(program.module()(images(2, size)), model(images(2, size)))


# --- loading after the device "meta" ---------------------------------------------------------


@pytest.mark.parametrize("empty", [False, True], ids=["assign", "to_empty"])
@pytest.mark.parametrize("name", LOADED)
def test_a_model_from_the_device_meta_equals_the_one_whose_weights_it_gets(name, empty):
    """Also what is computed and not stored: every buffer that a state dict leaves out."""
    torch.manual_seed(0)
    original = LOADED[name]().eval()
    with torch.device("meta"):
        model = LOADED[name]().eval()
    if empty:
        model.to_empty(device="cpu")
        for x in itertools.chain(model.parameters(), model.buffers()):
            x.data.fill_(-1 if x.dtype != torch.bool else True)  # as bad as what may be there
    model.load_state_dict(original.state_dict(), assign=not empty)
    for a, b in zip(outputs(original, name), outputs(model, name), strict=True):
        assert torch.equal(a, b)
    assert not any(x.is_meta for x in itertools.chain(model.parameters(), model.buffers()))


def test_every_registered_class_is_loaded_from_meta_above():
    classes = {cls for cls, *_ in models.MODELS.values() if isinstance(cls, type)}
    assert classes <= {type(make()) for make in LOADED.values()}


# --- another pooling --------------------------------------------------------------------------

POOLED = {
    **{name: partial(build, name) for name in BACKBONES},
    "without class token": partial(build, "vit", class_token=False, global_pool="avg"),
    "modern": partial(build, "vit", reg_tokens=2, no_embed_class=True, init_values=0.1),
    "clip": partial(build, "vit", pre_norm=True, norm_layer=nn.LayerNorm),
    "autoformer": partial(NINE_BY_SIXTEEN["autoformer"], img_size=32),
}
SWITCHES = [
    (name, old, new)
    for name, make in POOLED.items()
    for old, new in itertools.product(make().pools, repeat=2)
]


@pytest.mark.parametrize("name, old, new", SWITCHES)
def test_a_new_head_makes_the_model_that_its_class_makes(name, old, new):
    """The same modules in the same places, and with the same weights the same outputs."""
    torch.manual_seed(0)
    model = POOLED[name](global_pool=old).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    norms = {x.data_ptr() for key, x in model.named_parameters() if "norm" in key}
    model.reset_classifier(3, new)
    other = POOLED[name](global_pool=new, num_classes=3).eval()
    found, wanted = ([(key, type(m)) for key, m in x.named_modules()] for x in (model, other))
    assert found == wanted
    other.load_state_dict(model.state_dict(), strict=True)
    close(model(images().float()), other(images().float()), 0)
    assert norms == {x.data_ptr() for key, x in model.named_parameters() if "norm" in key}


# --- impossible models ------------------------------------------------------------------------

MADE = {
    "vit": partial(build, "vit"),
    "deit": partial(build, "deit"),
    "tnt": partial(build, "tnt"),
    "beit": partial(build, "beit"),
    "swin": partial(build, "swin"),
    "swinv2": partial(build, "swinv2"),
    "autoformer": partial(NINE_BY_SIXTEEN["autoformer"], img_size=32),
}
WRONG = [
    ("num_classes", -1),
    ("num_classes", 2.0),
    ("img_size", 32.0),
    ("img_size", -32),
    ("img_size", "32"),
    ("patch_size", 8.0),
    ("patch_size", 0),
    ("in_chans", 0),
    ("embed_dim", -24),
    ("mlp_ratio", -1),
    ("mlp_ratio", 0),
    ("mlp_ratio", 0.01),
    ("mlp_ratio", float("nan")),
]


@pytest.mark.parametrize("argument, value", WRONG)
@pytest.mark.parametrize("name", MADE)
def test_an_impossible_value_is_named(name, argument, value):
    if name == "autoformer" and argument == "mlp_ratio":
        given = {argument: (value,)}  # one for each layer
    else:
        given = {argument: value}
    with pytest.raises(ValueError, match=rf"{argument} .*{re.escape(repr(value))}"):
        MADE[name](**given)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: build("vit", reg_tokens=-1), r"reg_tokens \(-1\)"),
        (lambda: build("vit").reset_classifier(-1), r"num_classes \(-1\)"),
        (lambda: LOADED["autoformer"]().reset_classifier(-1), r"num_classes \(-1\)"),
        (lambda: build("vit").set_input_size(48.0), r"img_size \(48.0\)"),
        (lambda: build("swin").set_input_size(48.0), r"img_size \(48.0\)"),
        (lambda: build("swin", depths=(2, -1)), r"depths\[1\] \(-1\)"),
        (lambda: build("swin", window_size=4.0), r"window_size \(4.0, 4.0\)"),
        (lambda: Mlp(8, 0), r"hidden_features \(0\)"),
        (lambda: SwiGLU(8, 0), r"hidden_features \(0\)"),
        (lambda: MaskedAutoencoder(32, 8, depth=-1), r"depth \(-1\)"),
        (lambda: MaskedAutoencoder(32, 8, decoder_depth=-1), r"decoder_depth \(-1\)"),
        (lambda: DETR(5, num_encoder_layers=-1), r"num_encoder_layers \(-1\)"),
        (lambda: DETR(5, dim_feedforward=-1), r"dim_feedforward \(-1\)"),
        (lambda: Transformer(9, dim_feedforward=-1), r"dim_feedforward \(-1\)"),
        (lambda: Transformer(9, max_length=-1), r"max_length \(-1\)"),
        (lambda: RecurrentEncoder(9, 4, -1), r"hidden_dim \(-1\)"),
        (lambda: RecurrentDecoder(9, -4, 1), r"embed_dim \(-4\)"),
    ],
)
def test_an_impossible_part_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- the shared parts ------------------------------------------------------------------------


def test_drop_path_keeps_or_drops_whole_examples():
    torch.manual_seed(0)
    drop, x = DropPath(0.25), torch.ones(4000, 3, 2)
    y = drop(x)
    assert set(y.flatten().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (y == y[:, :1, :1]).all() and abs(y.mean().item() - 1) < 0.05
    assert drop.eval()(x) is x and DropPath()(x) is x and "0.25" in repr(drop)
    assert drop_path_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert drop_path_rates(0.3, 1) == [0.0]


def test_indices():
    assert feature_take_indices(None, 3) == [0, 1, 2]
    assert feature_take_indices(2, 3) == [1, 2]
    assert feature_take_indices((i for i in (-1, 0)), 3) == [2, 0]


def test_positions_are_kept_where_the_grid_is():
    pos = nn.Parameter(torch.randn(1, 17, 6))
    assert resample_abs_pos_embed(pos, (4, 4)) is pos
    assert resample_parameter(pos, (4, 4), (4, 4)) is pos
    wide = resample_parameter(pos.requires_grad_(False), (4, 8), (4, 4))
    assert wide.shape == (1, 33, 6) and torch.equal(wide[:, 0], pos[:, 0])
    assert isinstance(wide, nn.Parameter) and not wide.requires_grad
    assert resample_abs_pos_embed(pos.bfloat16(), (2, 2)).dtype == torch.bfloat16
    assert resample_abs_pos_embed(pos[:, :12], (4, 4), (2, 6), 0).shape == (1, 16, 6)


@pytest.mark.parametrize("name", NINE_BY_SIXTEEN)
def test_weights_of_the_models_own_grid_are_loaded_as_they_are(name):
    """Every tensor keeps its values, although the number of patches is a square."""
    torch.manual_seed(0)
    trained, model = (NINE_BY_SIXTEEN[name](img_size=(72, 128)) for _ in range(2))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.normal_()
    load_pretrained(model, trained.state_dict())
    for key, x in trained.state_dict().items():
        assert torch.equal(model.state_dict()[key], x), key


@pytest.mark.parametrize("name", NINE_BY_SIXTEEN)
def test_weights_of_another_grid_are_resampled_if_it_is_given(name):
    """As `set_input_size` resamples them, also where no square could be meant."""
    sizes = ((96, 96), (72, 128)), ((16, 64), (64, 16)), ((16, 40), (24, 16))
    for old_size, new_size in sizes:
        trained, model = (NINE_BY_SIXTEEN[name](img_size=s) for s in (old_size, new_size))
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.normal_()
        load_pretrained(model, trained.state_dict(), img_size=old_size)
        trained.set_input_size(new_size)
        for key, x in trained.state_dict().items():
            assert torch.equal(model.state_dict()[key], x), key


def test_published_positions_fit_the_size_asked_for(monkeypatch):
    """The size that published weights belong to is that of the name: 14 by 14 patches."""
    monkeypatch.setitem(models.MODELS, "small", (VisionTransformer, "owner/small", TINY))
    published = VisionTransformer(**TINY)
    monkeypatch.setattr(models, "unwrap_state_dict", lambda source: published.state_dict())
    model = models.create_model("small", pretrained=True, img_size=(112, 448))
    wanted = resample_abs_pos_embed(published.pos_embed, (7, 28), (14, 14))
    assert torch.equal(model.pos_embed, wanted)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: check_rates(drop=1.5), r"drop \(1.5\) must be in \[0, 1\)"),
        (lambda: DropPath(-0.1), r"drop_prob \(-0.1\) must be in \[0, 1\)"),
        (lambda: drop_path_rates(0.1, 0), r"depth \(0\) must be an integer of at least 1"),
        (lambda: feature_take_indices(4, 3), r"indices \(4\) must be from 1 to 3"),
        (lambda: feature_take_indices([3], 3), r"indices \[3\] must be .* from -3 to 2"),
        (lambda: feature_take_indices([], 3), r"indices \[\] must be at least one integer"),
        (lambda: feature_take_indices([0.5], 3), r"indices \[0.5\] must be at least one"),
        (
            lambda: resample_abs_pos_embed(torch.zeros(1, 17, 6), (4, 4), (3, 5)),
            r"16 positions of patches; old_size \(3, 5\)",
        ),
        (
            lambda: resample_abs_pos_embed(torch.zeros(1, 16, 6), (4, 4)),
            r"old_size \(None\) must be given as \(rows, columns\): 15 positions",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@every
def test_bad_calls_change_nothing(name):
    model, x = backbone(name).eval(), images()
    usual = model(x)
    for call, message in (
        (lambda: model.forward_intermediates(x, output_fmt="NCL"), r"output_fmt \('NCL'\)"),
        (lambda: model.forward_intermediates(x, [9]), r"indices \[9\] must be"),
        (lambda: model.reset_classifier(3, "max"), r"global_pool \('max'\) must be one of"),
        (lambda: model(x[:, :1]), r"\(2, 1, 32, 32\) must be images \(B, in_chans, H, W\)"),
        (lambda: model(x[0]), r"\(3, 32, 32\) must be images"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="x of dtype torch.uint8"):
        model(x.byte())
    close(model(x), usual, 0)


def test_a_backbone_of_ones_own():
    """What the base class asks for, and nothing else."""

    class Toy(Backbone):
        def __init__(self):
            super().__init__()
            self.num_features, self.patch_size, self.global_pool = 4, (2, 2), "avg"
            self.proj = nn.Conv2d(1, 4, 2, 2)
            self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

        def embed(self, x):
            return self.proj(x).flatten(2).mT

        def forward_features(self, x):
            return self.norm(self.blocks(self.embed(x)))

        def forward_head(self, x):
            return self.head(self.pool(x))

    model, x = Toy(), torch.randn(2, 1, 4, 6)
    last, maps = model.forward_intermediates(x)
    assert [m.shape for m in maps] == [(2, 4, 2, 3)] * 2
    close(last, model.forward_features(x), 1e-6)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7) and model.attention_maps(x) == []
