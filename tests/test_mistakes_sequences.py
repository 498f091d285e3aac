"""The reference models of sequences in small steps, and the mistakes that replace a step."""

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

from attnlib import mistakes
from attnlib.gpt import GPT, GPT2_STYLE, GPTConfig
from attnlib.mistakes import REFERENCES, REFERENCES_OF, Mistake, Probe, Reference, drawn
from attnlib.multihead import MultiHeadAttention
from attnlib.transformer import (
    CrossAttention,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    SelfAttention,
    Transformer,
)
from attnlib.vit_variants import SwiGLU

NBS = Path(__file__).parent.parent / "nbs"
CATALOGUE = [
    entry for entry in mistakes.CATALOGUE if entry.replace.__module__ == "attnlib.mistakes"
]
CASES = [
    ("attention", {}),
    ("multihead", {}),
    ("multihead", dict(bias=False)),
    ("multihead", dict(embed_dim=24, num_heads=3)),
    ("causal_attention", {}),
    ("causal_attention", dict(embed_dim=24, num_heads=3, bias=False)),
    ("grouped_attention", {}),
    ("grouped_attention", dict(embed_dim=24, num_heads=6, num_kv_heads=3, bias=True)),
    ("cross_attention", {}),
    ("cached_attention", {}),
    ("layer_norm", {}),
    ("layer_norm", dict(eps=1e-6)),
    ("rms_norm", {}),
    ("rms_norm", dict(dim=12, eps=1e-3)),
    ("mlp", {}),
    ("mlp", dict(act="relu")),
    ("mlp", dict(act="gelu_tanh")),
    ("mlp", dict(act="silu")),
    ("swiglu", {}),
    ("encoder_layer", {}),
    ("encoder_layer", dict(norm_first=True, act="gelu")),
    ("decoder_layer", {}),
    ("decoder_layer", dict(norm_first=True, act="gelu")),
    ("sinusoids", {}),
    ("rotary", {}),
    ("rotary", dict(base=500000.0)),
    ("gpt", {}),
    ("gpt", dict(n_layer=3, n_head=2)),
    ("llama", {}),
    ("llama", dict(n_head=6, n_kv_head=3, n_embd=24)),
    ("llama", dict(tied=False)),
    ("transformer", dict(padding=True)),
    ("cross_entropy", {}),
    ("next_token_loss", {}),
    ("padded_cross_entropy", {}),
    ("padded_cross_entropy", dict(pad_id=3)),
    ("label_smoothing_loss", {}),
    ("label_smoothing_loss", dict(smoothing=0.3, pad_id=2)),
]

TRIED = []  # cases in which all mistakes are tried: of models, which take long, one each
for number, (name, arguments) in enumerate(CASES):
    if name not in ("gpt", "llama") or arguments in ({}, dict(tied=False)):
        TRIED.append(number)
MODELS = ("gpt", "llama", "transformer")  # of which mistakes are tried on two probes

SAME = [  # mistakes with equal outputs, and why
    # one is for a model that has the parameter, the other for a model without it
    {"output projection not used", "no output projection"},
    {"final norm not used", "no final norm"},
    {"projections by the matrices q, q, v", "no matrix of keys"},
    # in self-attention both are the product q qᵀ, or k kᵀ
    {
        "queries compared with queries",
        "projections by the matrices q, q, v",
        "no matrix of keys",
    },
    {"keys compared with keys", "projections by the matrices k, k, v"},
    # a transposed causal mask leaves no row without a key, so that -inf and -1e9 are the same
    {"mask transposed", "mask transposed, with a finite number"},
    # where the causal mask is the only one
    {"mask ignored", "no causal mask"},
    # 100^(2 i / d) = 10000^(i / d)
    {"base of 100 in the rotation", "exponent of the rotation half as large"},
    # (a + ib) (sin + i cos) = i (a + ib) exp(-iθ), and the i of queries and keys cancel
    {"rotated the other way", "sine and cosine of the rotation exchanged"},
    # where nothing precedes: rotations by one angle cancel
    {"no rotation", "all new tokens at one position"},
    # where the variance is of the order of one, 1e-12 is less than rounding
    {"epsilon of 1e-12", "epsilon of 0"},
    # where no positions are added
    {"embeddings scaled", "positions scaled with the embeddings"},
]


@cache
def case(i: int) -> Reference:
    """A reference in float64 with random parameters."""
    name, arguments = CASES[i]
    torch.manual_seed(0)
    reference = REFERENCES[name](**arguments)
    if isinstance(reference.module, nn.Module):
        reference.module.double().eval()
        for number, (name, parameter) in enumerate(reference.module.named_parameters()):
            with torch.no_grad():
                values = drawn(*parameter.shape, seed=100 + number)
                if parameter.ndim > 1:
                    parameter.copy_(values * 1.5 / math.sqrt(parameter.shape[-1]))
                else:
                    parameter.copy_(0.3 * values + (0.8 if "norm" in name else 0.2))
    return reference


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
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        found[name] = x
    return found


def outcome(reference: Reference, probe: Probe, entry: Mistake | None = None) -> list[Tensor]:
    """The output of the steps, and the gradients of all parameters and inputs."""
    weights = roles_of(reference)
    steps = reference.steps
    if entry is not None:
        steps = entry.applied_to(steps)
        for ending in entry.has:
            if ending == "head.weight":
                weights[ending] = drawn(*weights["token.weight"].shape, seed=9).requires_grad_()
    inputs = with_gradients(probe.inputs)
    output = steps(weights, **reference.config).run(**inputs)
    leaves = [*weights.values()]
    leaves += [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
    if not output.requires_grad:
        return [output]
    gradients = torch.autograd.grad(
        (output * drawn(*output.shape, seed=5)).sum(), leaves, allow_unused=True
    )
    filled = []
    for x in gradients:
        filled.append(torch.zeros(()) if x is None else x)
    return [output.detach(), *filled]


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest value; 0 where one is undefined."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel() or not (a.isfinite().all() and b.isfinite().all()):
        return 0.0
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


@pytest.mark.parametrize("i", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_steps_equal_the_library(i):
    reference = case(i)
    for probe in reference.probes:
        inputs = with_gradients(probe.inputs)
        expected = reference.call(reference.module, **inputs)
        found = outcome(reference, probe)
        assert found[0].shape == expected.shape
        assert difference(found[0], expected) < 1e-12, probe.name
        assert found[0].isfinite().all()
        if not expected.requires_grad:
            continue
        parameters = {}
        if isinstance(reference.module, nn.Module):
            parameters = dict(reference.module.named_parameters())
        leaves = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
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
            assert ((ours - theirs).abs() <= 1e-9 * (1 + theirs.abs())).all(), probe.name


def effects(i: int) -> tuple[dict[str, float], dict[str, list]]:
    """For each mistake that applies: its largest effect, and what all probes gave."""
    reference = case(i)
    probes = reference.probes
    if reference.name in MODELS:
        probes = [probes[0], probes[-1]]  # the last one has padding, or other strides
    elif reference.name in ("encoder_layer", "decoder_layer"):
        probes = [probes[0], *probes[-2:]]  # these have masks
    usual = [outcome(reference, probe) for probe in probes]
    largest = {}
    results = {}
    for entry in CATALOGUE:
        if not entry.applies_to(reference.steps):
            continue
        if any(
            not any(role.endswith(end) for role in roles_of(reference)) for end in entry.lacks
        ):
            continue  # the reference lacks it, too
        largest[entry.name] = 0.0
        found = []
        for probe, right in zip(probes, usual):
            try:
                wrong = outcome(reference, probe, entry)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                found.append(type(error).__name__)
                continue
            found.append(wrong)
            if len(wrong) != len(right):  # more parameters, or none with a gradient
                wrong = wrong[:1]
            for a, b in zip(wrong, right):
                largest[entry.name] = max(largest[entry.name], difference(a, b))
        results[entry.name] = found
    return largest, results


@cache
def cached_effects(i: int) -> tuple[dict[str, float], dict[str, list]]:
    with unchecked():  # a mistake may break the signature of its step
        return effects(i)


def test_every_mistake_changes_something():
    largest = {entry.name: 0.0 for entry in CATALOGUE}
    for i in TRIED:
        found, _ = cached_effects(i)
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
        if len(a) != len(b):
            return False
        for x, y in zip(a, b):
            if x.shape != y.shape:
                return False
            if not torch.equal(x.isfinite(), y.isfinite()):
                return False
            if difference(x, y) > 1e-11:
                return False
        seen = True
    return seen


def is_known(first: str, second: str) -> bool:
    return any({first, second} <= names for names in SAME)


@pytest.mark.parametrize("i", TRIED, ids=lambda i: f"{CASES[i][0]}-{i}")
def test_mistakes_differ(i):
    largest, results = cached_effects(i)
    names = [name for name in results if largest[name] > 1e-6]
    same = []
    for j, first in enumerate(names):
        for second in names[:j]:
            if equal_results(results[first], results[second]) and not is_known(first, second):
                same.append((second, first))
    assert not same


def test_mistakes_of_models_without_a_parameter():
    for i in range(len(CASES)):
        reference = case(i)
        roles = roles_of(reference)
        for entry in CATALOGUE:
            lacking = [role for role in roles if role.endswith(entry.lacks)]
            applies = all(any(role.endswith(x) for role in roles) for x in entry.lacks)
            if not entry.applies_to(reference.steps) or not entry.lacks or not applies:
                continue
            weights = {role: x for role, x in roles.items() if role not in lacking}
            steps = entry.applied_to(reference.steps)
            inputs = reference.probes[0].inputs
            try:
                steps(roles, **reference.config).run(**inputs)
            except RuntimeError:
                continue  # as with fewer heads of keys than of queries
            assert steps(weights, **reference.config).run(**inputs).isfinite().all()


def test_two_mistakes_can_be_combined():
    by_name = {entry.name: entry for entry in CATALOGUE}
    reference = case([name for name, _ in CASES].index("gpt"))
    first = by_name["positions added twice"]
    second = by_name["activation after the second layer, too"]
    third = by_name["no scale"]
    steps = third.applied_to(second.applied_to(first.applied_to(reference.steps)))
    tokens = reference.probes[0].inputs["tokens"]
    output = steps(roles_of(reference), **reference.config).run(tokens)
    alone = first.applied_to(reference.steps)(roles_of(reference), **reference.config)
    assert difference(output, alone.run(tokens)) > 1e-6


MODULES = [  # what REFERENCES_OF knows
    lambda: MultiHeadAttention(24, 3, bias=False),
    lambda: SelfAttention(16, 2),
    lambda: CrossAttention(16, 4),
    lambda: FeedForward(8, 12, "silu"),
    lambda: FeedForward(8, 12, nn.GELU("tanh")),
    lambda: SwiGLU(8, 20, bias=False),
    lambda: nn.LayerNorm(12, 1e-3),
    lambda: nn.RMSNorm(12, 1e-6),
    lambda: EncoderLayer(16, 4, 24, norm_first=True),
    lambda: DecoderLayer(16, 4, 24, activation="gelu"),
    lambda: GPT(GPTConfig(20, 9, 2, 4, n_kv_head=2, n_embd=16, rope_base=500.0, bias=True)),
    lambda: GPT(GPTConfig(20, 4, 1, 2, n_embd=16, tied=False, **GPT2_STYLE)),
    lambda: Transformer(
        20,
        d_model=16,
        nhead=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dim_feedforward=24,
        activation="gelu",
        max_length=16,
    ),
]


@pytest.mark.parametrize("i", range(len(MODULES)))
def test_references_of_modules(i):
    torch.manual_seed(0)
    module = MODULES[i]().double().eval()
    reference = REFERENCES_OF[type(module)](module)
    assert reference.module is module
    for probe in reference.probes:
        weights = reference.roles(dict(module.named_parameters()))
        with torch.no_grad():
            found = reference.steps(weights, **reference.config).run(**probe.inputs)
            expected = reference.call(module, **probe.inputs)
        assert difference(found, expected) < 1e-12


def test_modules_without_steps_are_refused():
    for module in (
        GPT(GPTConfig(20, 9, 1, 2, n_embd=16, qk_norm=True)),
        MultiHeadAttention(16, 2, kdim=8),
        FeedForward(8, 12, torch.tanh),
    ):
        with pytest.raises(ValueError, match="there are no steps"):
            REFERENCES_OF[type(module)](module)


def test_names_are_unique():
    names = [entry.name for entry in CATALOGUE]
    assert len(set(names)) == len(names)


def test_headings_exist():
    headings = set()
    for path in NBS.glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                for line in "".join(cell["source"]).splitlines():
                    if line.startswith("#"):
                        headings.add(f"{path.stem}: {line.lstrip('# ')}")
    missing = {entry.read for entry in mistakes.CATALOGUE} - headings
    assert not missing


def test_sentences():
    for entry in CATALOGUE:
        assert entry.says.endswith("."), entry.name
        assert entry.right != entry.wrong, entry.name
