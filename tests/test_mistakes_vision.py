"""The reference models of images in small steps, and the mistakes that replace a step."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from signatures import unchecked
from torch import Tensor

from attnlib import mistakes, mistakes_vision
from attnlib.mistakes import REFERENCES, REFERENCES_OF, Mistake, Probe, Reference, drawn
from attnlib.mistakes_vision import _swin_reference_of as swin_reference_of
from attnlib.mistakes_vision import _vit_reference_of as vit_reference_of
from attnlib.swin import SwinTransformer
from attnlib.swinv2 import SwinBlockV2, SwinTransformerV2
from attnlib.vit import VisionTransformer

NBS = Path(__file__).parent.parent / "nbs"
CATALOGUE = [
    entry
    for entry in mistakes.CATALOGUE
    if entry.replace.__module__ == "attnlib.mistakes_vision"
]
SMALL = dict(img_size=(16, 24), patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5)
SWIN = dict(patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5)


def vit_with_everything() -> Reference:
    """Registers, layer scale, normalized queries, and a norm before the blocks."""
    return vit_reference_of(
        VisionTransformer(
            **SMALL,
            reg_tokens=2,
            no_embed_class=True,
            init_values=0.1,
            qk_norm=True,
            pre_norm=True,
        )
    )


def swin_of_odd_windows() -> Reference:
    """Maps of 10 by 15 and of 5 by 8 tokens: the latter are padded."""
    return swin_reference_of(SwinTransformer((20, 30), window_size=5, **SWIN))


def swin_of_small_maps() -> Reference:
    """Maps of 4 by 12 and of 2 by 6 tokens, with windows of 4."""
    return swin_reference_of(SwinTransformer((8, 24), window_size=4, **SWIN))


def swinv2_of_larger_windows() -> Reference:
    """Windows of 4 of a model that was trained with 6."""
    return swin_reference_of(
        SwinTransformerV2((32, 48), window_size=4, pretrained_window_sizes=6, **SWIN)
    )


CASES = [
    ("patch_embed", {}),
    ("patch_embed", dict(patch_size=(2, 3), img_size=(8, 12))),
    ("vit_block", {}),
    ("vit_block", dict(dim=24, num_heads=3, mlp_ratio=2.0)),
    ("vit", {}),
    ("vit", dict(global_pool="avg")),
    ("vit", dict(class_token=False)),
    ("vit", dict(global_pool="")),
    (vit_with_everything, {}),
    ("deit", {}),
    ("window_attention", {}),
    ("window_attention", dict(window_size=4)),
    ("swin_block", {}),
    ("swin_block", dict(shift_size=0)),
    ("swin_block", dict(input_resolution=(3, 12))),
    ("swin_block", dict(input_resolution=(7, 11))),
    ("swin_block", dict(window_size=(3, 4), shift_size=(1, 2), input_resolution=(6, 12))),
    ("patch_merging", {}),
    ("patch_merging", dict(version=2)),
    ("swin", {}),
    (swin_of_odd_windows, {}),
    (swin_of_small_maps, {}),
    ("swinv2_attention", {}),
    ("swinv2_block", {}),
    ("swinv2", {}),
    (swinv2_of_larger_windows, {}),
    ("tnt_block", {}),
    ("tnt", {}),
    ("mae_unshuffle", {}),
    ("mae_decoder", {}),
    ("patchify", {}),
    ("mae_loss", {}),
    ("mae_loss", dict(norm_pix_loss=True)),
    ("box_cxcywh_to_xyxy", {}),
    ("box_iou", {}),
    ("generalized_box_iou", {}),
    ("hard_distillation_loss", {}),
    ("soft_distillation_loss", {}),
    ("soft_distillation_loss", dict(temperature=2.0)),
]

MODELS = ("vit", "deit", "swin", "swinv2", "tnt")  # of which mistakes are tried on one probe

SAME = [  # mistakes with equal outputs, and why
    # one is for a model that has the parameter, the other for a model without it
    {"positions not used", "no positions of the patches"},
    {"class token not used", "class token of zeros"},
    {"position bias not used", "no position bias"},
    {"norm of the patches not used", "patches not normalized"},
    # in a square window, exchanging the axes of the tokens exchanges those of the table, and of
    # the coordinates from which it is computed; windows of 3 by 4 tell the first two apart
    {
        "rows and columns of the table exchanged",
        "tokens of a window numbered column by column",
        "coordinates exchanged",
    },
    # the network of Swin V2 sees the offset only
    {"distances instead of offsets", "sign of the offset lost"},
    # maps with one row of windows (swin_of_small_maps) are not shifted along it
    {"no shift", "no shift along both axes"},
    {"no mask of shifted windows", "mask of rows only"},
]


def label(i: int) -> str:
    name = CASES[i][0]
    return f"{name if isinstance(name, str) else name.__name__}-{i}"


def fill(reference: Reference) -> Reference:
    """The reference in float64 with random parameters."""
    if not isinstance(reference.module, nn.Module):
        return reference
    reference.module.double().eval()
    for number, (name, parameter) in enumerate(reference.module.named_parameters()):
        parameter.requires_grad_()  # MAE's positions are fixed
        with torch.no_grad():
            values = drawn(*parameter.shape, seed=100 + number)
            if name.endswith("logit_scale"):  # some above the clamp, log 100 = 4.6
                parameter.copy_(torch.linspace(5.5, 1.0, len(values))[:, None, None])
            elif name.endswith(("_token", "pos_embed", "table", "_pos")):
                parameter.copy_(values)
            elif parameter.ndim > 1:
                fan = parameter[0].numel()
                parameter.copy_(values * 1.5 / math.sqrt(fan))
            else:
                parameter.copy_(0.3 * values + (0.8 if "norm" in name else 0.2))
    return reference


@cache
def case(i: int) -> Reference:
    build, arguments = CASES[i]
    torch.manual_seed(0)
    if isinstance(build, str):
        build = REFERENCES[build]
    return fill(build(**arguments))


def roles_of(reference: Reference) -> dict[str, Tensor]:
    """Copies of the parameters by role, as leaves."""
    if not isinstance(reference.module, nn.Module):
        return {}
    roles = reference.roles(dict(reference.module.named_parameters()))
    return {role: x.detach().clone().requires_grad_() for role, x in roles.items()}


def with_gradients(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, of which real numbers are leaves with the same strides."""
    found = {}
    for name, x in inputs.items():
        if x.is_floating_point():
            x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        found[name] = x
    return found


def outcome(reference: Reference, probe: Probe, entry: Mistake | None = None) -> list[Tensor]:
    """The output of the steps, and the gradients of all parameters and inputs."""
    weights = roles_of(reference)
    steps = reference.steps
    if entry is not None:
        steps = entry.applied_to(steps)
    inputs = with_gradients(probe.inputs)
    output = steps(weights, **reference.config).run(**inputs)
    leaves = [*weights.values(), *(x for x in inputs.values() if x.requires_grad)]
    gradients = torch.autograd.grad(
        (output * drawn(*output.shape, seed=5)).sum(), leaves, allow_unused=True
    )
    filled = []
    for x, leaf in zip(gradients, leaves):
        filled.append(torch.zeros_like(leaf) if x is None else x)
    return [output.detach(), *filled]


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest value; 0 where one is undefined."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel() or not (a.isfinite().all() and b.isfinite().all()):
        return 0.0
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


@pytest.mark.parametrize("i", range(len(CASES)), ids=label)
def test_steps_equal_the_library(i):
    reference = case(i)
    for probe in reference.probes:
        inputs = with_gradients(probe.inputs)
        expected = reference.call(reference.module, **inputs)
        found = outcome(reference, probe)
        assert found[0].shape == expected.shape
        assert difference(found[0], expected) < 1e-12, probe.name
        assert found[0].isfinite().all()
        parameters = {}
        if isinstance(reference.module, nn.Module):
            parameters = dict(reference.module.named_parameters())
        leaves = [x for x in inputs.values() if x.requires_grad]
        gradients = torch.autograd.grad(
            (expected * drawn(*expected.shape, seed=5)).sum(),
            [*parameters.values(), *leaves],
            allow_unused=True,
        )
        by_name = {}
        for (name, parameter), x in zip(parameters.items(), gradients):
            by_name[name] = torch.zeros_like(parameter) if x is None else x
        by_role = list(reference.roles(by_name).values()) + list(gradients[len(by_name) :])
        for ours, theirs in zip(found[1:], by_role, strict=True):
            if theirs is not None:
                assert ((ours - theirs).abs() <= 1e-9 * (1 + theirs.abs())).all(), probe.name


def effects(i: int) -> tuple[dict[str, float], dict[str, list]]:
    """For each mistake that applies: its largest effect, and what all probes gave."""
    reference = case(i)
    probes = reference.probes
    if reference.name in MODELS:
        probes = probes[:1]
    usual = [outcome(reference, probe) for probe in probes]
    roles = list(roles_of(reference))
    largest = {}
    results = {}
    for entry in CATALOGUE:
        missing = [end for end in entry.lacks if not any(r.endswith(end) for r in roles)]
        if missing or not entry.applies_to(reference.steps):
            continue
        largest[entry.name] = 0.0
        found = []
        for probe, right in zip(probes, usual):
            try:
                wrong = outcome(reference, probe, entry)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                found.append(type(error).__name__)
                continue
            found.append(wrong)
            for a, b in zip(wrong, right, strict=True):
                largest[entry.name] = max(largest[entry.name], difference(a, b))
        results[entry.name] = found
    return largest, results


@cache
def all_effects() -> list[tuple[dict[str, float], dict[str, list]]]:
    with unchecked():  # a mistake may break the signature of its step
        return [effects(i) for i in range(len(CASES))]


def test_every_mistake_changes_something():
    largest = {entry.name: 0.0 for entry in CATALOGUE}
    for found, _ in all_effects():
        for name, value in found.items():
            largest[name] = max(largest[name], value)
    without_effect = [name for name, value in largest.items() if value < 1e-6]
    assert not without_effect


def equal_results(first: list, second: list) -> bool:
    """Whether two mistakes give the same on all probes that both can compute, and some does."""
    seen = False
    for a, b in zip(first, second):
        if isinstance(a, str) or isinstance(b, str):
            if isinstance(a, str) != isinstance(b, str):
                return False
            continue
        for x, y in zip(a, b, strict=True):
            if x.shape != y.shape or not torch.equal(x.isfinite(), y.isfinite()):
                return False
            if difference(x, y) > 1e-9:
                return False
        seen = True
    return seen


@pytest.mark.parametrize("i", range(len(CASES)), ids=label)
def test_mistakes_differ(i):
    largest, results = all_effects()[i]
    names = [name for name in results if largest[name] > 1e-6]
    same = []
    for j, first in enumerate(names):
        for second in names[:j]:
            known = any({first, second} <= group for group in SAME)
            if not known and equal_results(results[first], results[second]):
                same.append((second, first))
    assert not same


def test_names_are_unique():
    names = [entry.name for entry in mistakes.CATALOGUE]
    doubled = sorted({name for name in names if names.count(name) > 1})
    assert not doubled


def test_headings_exist():
    headings = set()
    for path in NBS.glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                for line in "".join(cell["source"]).splitlines():
                    if line.startswith("#"):
                        headings.add(f"{path.stem}: {line.lstrip('# ')}")
    missing = {entry.read for entry in CATALOGUE} - headings
    assert not missing


def test_sentences():
    for entry in CATALOGUE:
        assert entry.says.endswith("."), entry.name


def test_references_of_models():
    for kind, build in REFERENCES_OF.items():
        if build.__module__ != mistakes_vision.__name__:
            continue
        assert issubclass(kind, nn.Module)
    module = SwinBlockV2(16, 2, window_size=3, shift_size=1)
    reference = fill(REFERENCES_OF[SwinBlockV2](module))
    assert reference.probes[0].inputs["x"].shape == (3, 6, 9, 16)
    probe = reference.probes[0]
    expected = reference.call(reference.module, **probe.inputs)
    assert difference(outcome(reference, probe)[0], expected) < 1e-12


def test_vit_small_at_224_pixels():
    torch.manual_seed(0)
    model = VisionTransformer(embed_dim=384, depth=12, num_heads=6, num_classes=10).double()
    reference = vit_reference_of(model.eval())
    probe = reference.probes[1]
    with torch.no_grad():
        weights = reference.roles(dict(model.named_parameters()))
        found = reference.steps(weights, **reference.config).run(**probe.inputs)
        expected = reference.call(model, **probe.inputs)
    assert difference(found, expected) < 1e-12


def test_base_mistakes_act_on_images():
    """Mistakes of attention, norms, and blocks change these models, too."""
    reference = case([name for name, _ in CASES].index("swin_block"))
    right = outcome(reference, reference.probes[0])[0]
    changed = set()
    for entry in mistakes.CATALOGUE:
        if entry in CATALOGUE or not entry.applies_to(reference.steps):
            continue
        try:
            wrong = outcome(reference, reference.probes[0], entry)[0]
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
            continue
        if difference(wrong, right) > 1e-6:
            changed.add(entry.name)
    assert {
        "no scale",
        "softmax over the queries",
        "mask ignored",
        "norm in the other place",
        "no residual connections",
        "variance over N - 1",
    } <= changed
