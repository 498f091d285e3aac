"""A copied, stored, wrapped, or transformed model computes what the model computes."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from small_models import LOADED, outputs
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from attnlib.inference import optimize_for_inference

MODELS = [name for name in LOADED if name != "draw"]  # which draws random numbers
TOKENS = "gpt", "llama", "transformer"


def make(name, seed=0):
    """A model in evaluation mode none of whose parameters is still 0 or 1."""
    torch.manual_seed(seed)
    model = LOADED[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def loss(name, model):
    return sum(y.double().square().sum() for y in outputs(model, name) if y.is_floating_point())


def results(name, model):
    """Outputs and the gradients of all parameters, by name."""
    model.zero_grad()
    found = {str(i): y.detach() for i, y in enumerate(outputs(model, name))}
    loss(name, model).backward()
    return found | {key: p.grad for key, p in model.named_parameters()}


def same(found, wanted, tolerance=0.0):
    assert found.keys() == wanted.keys()
    for key, x in wanted.items():
        if x is None or found[key] is None:
            assert found[key] is x, key
            continue
        if x.dtype == torch.bool:
            assert torch.equal(found[key], x), key
            continue
        size = max(1.0, x.abs().max().item()) if x.numel() else 1.0
        torch.testing.assert_close(found[key], x, rtol=0, atol=tolerance * size, msg=key)


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "file": through_a_file}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_the_model_and_shares_nothing(name, way):
    model = make(name)
    wanted = results(name, model)
    other = COPIES[way](model)
    same(results(name, other), wanted)
    addresses = {x.data_ptr() for x in itertools.chain(model.parameters(), model.buffers())}
    for x in itertools.chain(other.parameters(), other.buffers()):
        assert x.numel() == 0 or x.data_ptr() not in addresses
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.5)
    same(results(name, model), wanted)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_makes_another_model_the_same(name, assign):
    model, other = make(name), make(name, seed=1)
    wanted = results(name, model)
    before = results(name, other)
    assert any(not torch.equal(before[key], x) for key, x in wanted.items() if x is not None)
    number = len(list(other.parameters()))
    other.load_state_dict({k: x.clone() for k, x in model.state_dict().items()}, assign=assign)
    same(results(name, other), wanted)
    assert number == len(list(other.parameters()))  # what was tied stays tied


@pytest.mark.parametrize("name", MODELS)
def test_functional_call_uses_the_tensors_it_is_given(name):
    model, other = make(name), make(name, seed=1)
    wanted = results(name, other)
    own = {key: x.clone() for key, x in model.state_dict().items()}
    state = dict(other.named_parameters()) | dict(other.named_buffers())

    def called(*inputs):
        return functional_call(model, state, inputs)

    other.zero_grad()
    found = {str(i): y.detach() for i, y in enumerate(outputs(called, name))}
    loss(name, called).backward()
    found |= {key: p.grad for key, p in other.named_parameters()}
    same(found, wanted, 1e-5)
    assert all(torch.equal(own[key], x) for key, x in model.state_dict().items())


# what a model of this name computes depends on the values, which vmap refuses to look at
LOOKS_AT_VALUES = "detr", "panoptic", "quantizer", "masked beit", "mae", "captioner", "dvae"


def called_with(name, model):
    """The model's inputs in the test, taken from the call itself."""
    kept = []
    handle = model.register_forward_pre_hook(lambda module, inputs: kept.append(inputs))
    outputs(model, name)
    handle.remove()
    return kept[0]


def first(output):
    """The first tensor of floating-point numbers that a model returns."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    found = (first(part) for part in output)
    return next((x for x in found if x is not None), None)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LOOKS_AT_VALUES])
def test_an_ensemble_by_vmap(name):
    members = [make(name, seed) for seed in (0, 1)]
    inputs = called_with(name, members[0])
    wanted = torch.stack([first(model(*inputs)) for model in members])
    parameters, buffers = stack_module_state(members)
    skeleton = copy.deepcopy(members[0])

    def one(parameters, buffers):
        return first(functional_call(skeleton, (parameters, buffers), inputs))

    with torch.no_grad():
        found = vmap(one, randomness="error")(parameters, buffers)
    same({"": found}, {"": wanted}, 1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LOOKS_AT_VALUES])
def test_gradients_of_every_example(name):
    model = make(name)
    inputs = called_with(name, model)
    parameters = {key: p.detach() for key, p in model.named_parameters()}

    def of_one(parameters, *one):
        x = [part[None] for part in one]
        return first(functional_call(model, parameters, tuple(x))).square().sum()

    found = vmap(grad(of_one), (None, *[0] * len(inputs)))(parameters, *inputs)
    for i in range(len(inputs[0])):
        model.zero_grad()
        first(model(*(part[i : i + 1] for part in inputs))).square().sum().backward()
        for key, p in model.named_parameters():
            wanted = torch.zeros_like(p) if p.grad is None else p.grad
            same({key: found[key][i]}, {key: wanted}, 1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_hooks_of_all_kinds_change_nothing_and_run(name):
    model = make(name)
    wanted, called = results(name, model), set()
    for key, module in model.named_modules():
        if not list(module.children()) and list(module.parameters()):
            module.register_forward_pre_hook(lambda *_, key=key: called.add((key, "pre")))
            module.register_forward_hook(lambda *_, key=key: called.add((key, "forward")))
            module.register_full_backward_hook(lambda *_, key=key: called.add((key, "back")))
    same(results(name, model), wanted, 1e-6)
    kinds = {kind for _, kind in called}
    assert kinds == {"pre", "forward", "back"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_models(name):
    torch._dynamo.reset()
    model = make(name)
    wanted = results(name, model)
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    found = {str(i): y.detach() for i, y in enumerate(outputs(compiled, name))}
    loss(name, compiled).backward()
    found |= {key: p.grad for key, p in model.named_parameters()}
    same(found, wanted, 1e-4)


# --- optimized copies ------------------------------------------------------------------------


def plain_outputs(model, name):
    with torch.no_grad():
        return {str(i): y for i, y in enumerate(outputs(model, name))}


@pytest.mark.parametrize("name", MODELS)
def test_an_optimized_copy_and_its_copies(name):
    model = make(name)
    wanted = plain_outputs(model, name)
    fast = optimize_for_inference(model)
    same(plain_outputs(fast, name), wanted, 1e-4)
    for way in COPIES.values():
        same(plain_outputs(way(fast), name), wanted, 1e-4)
    same(plain_outputs(model, name), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_an_optimized_copy_under_functional_call_is_right_or_refuses(name):
    model, other = make(name), make(name, seed=1)
    fast, wanted = optimize_for_inference(model), plain_outputs(other, name)
    state = dict(other.named_parameters()) | dict(other.named_buffers())

    def called(*inputs):
        return functional_call(fast, state, inputs)

    try:
        found = plain_outputs(called, name)
    except (RuntimeError, TypeError, AttributeError, KeyError):
        return
    same(found, wanted, 1e-4)


def shifted(cls):
    """A subclass that adds 1 to what the class computes, or nothing if that is no tensor."""

    class Shifted(cls):
        def forward(self, *inputs, **options):
            out = super().forward(*inputs, **options)
            return out + 1 if isinstance(out, torch.Tensor) else out

    return Shifted


@pytest.mark.parametrize("name", MODELS)
def test_a_subclass_of_any_layer_is_kept_by_an_optimized_copy(name):
    classes = {type(module) for module in make(name).modules()}
    for cls in classes - {nn.ModuleList, nn.Sequential, nn.Identity, nn.ModuleDict}:
        model = make(name)
        layer = next(module for module in model.modules() if type(module) is cls)
        layer.__class__ = shifted(cls)
        wanted = plain_outputs(model, name)
        same(plain_outputs(optimize_for_inference(model), name), wanted, 1e-3)
