"""Rows for tests/test_arguments.py: comparisons, and the catalogue of mistakes."""

import inspect

import torch
import torch.nn as nn
from argument_rows import Fails, Row

import attnlib
from attnlib import mistakes, mistakes_vision

NORM = attnlib.reference("layer_norm", dim=8)
WIDE_NORM = attnlib.reference("layer_norm", dim=12)
FACTS = dict(says="It is wrong.", right="x", wrong="-x", read="10_attention: The softmax")


def told(report):
    """What a report says."""
    return str(report), report.verdict, report.probes, report.adapted


def small(reference):
    """What a reference of a norm is called, and what it is compared on."""
    return reference.name, reference.config, reference.probes, reference.says


def facts(reference):
    """What can be compared of a `Reference`."""
    join = reference.join or (lambda x: x)
    return (
        reference.name,
        reference.module(torch.ones(2, 8)),
        reference.call(reference.module, torch.ones(2, 8)),
        reference.steps.__name__,
        reference.config,
        reference.roles({"weight": torch.ones(2)}),
        [probe.name for probe in reference.probes],
        reference.says,
        join(torch.ones(1)),
    )


def effect(mistake):
    """What a `Mistake` says, and what becomes of a layer with it."""
    said = [getattr(mistake, key) for key in ("name", "step", "says", "right", "wrong", "read")]
    said += [mistake.convention, mistake.lacks, mistake.has, mistake.around]
    layer = mistake.applied_to(mistakes.NormSteps)({})
    try:
        return [*said, layer.run(torch.arange(6.0).view(1, 2, 3))]
    except TypeError as error:  # `around`: the function takes one argument more
        return [*said, type(error).__name__]


def registered(decorator):
    """The name under which a builder is registered; it is removed again."""
    before = set(mistakes.REFERENCES)
    decorator(lambda: NORM)
    (name,) = set(mistakes.REFERENCES) - before
    del mistakes.REFERENCES[name]
    return name


def catalogued(decorator):
    """The mistake that is added to the catalogue; it is removed again."""
    decorator(lambda self, x: -x)
    return effect(mistakes.CATALOGUE.pop())


def steps():
    """A row for each class of steps, whose weights are looked up by role."""
    found = {}
    for module in (mistakes, mistakes_vision):
        for name in module.__all__:
            kind = getattr(module, name)
            if inspect.isclass(kind) and issubclass(kind, mistakes.Steps):
                found[f"{module.__name__.rpartition('.')[2]}.{name}"] = Row(
                    dict(weights={"norm.weight": torch.zeros(2)}),
                    dict(weights={"norm.weight": torch.ones(2)}),
                    lambda model: model.weight("norm.weight"),
                )
    return found


FOURTH = steps() | {
    "compare.compare": Row(
        dict(mine=nn.LayerNorm(8), reference=NORM),
        dict(
            mine=nn.RMSNorm(8),
            reference=Fails("layer_norm", "reference", TypeError),
            call=lambda mine, x: -mine(x),
            rename=Fails({"gain": "norm.weight"}, "gain"),
            inputs={"x": torch.arange(48.0).view(2, 3, 8).double()},
        ),
        told,
    ),
    "compare.compare, 2": Row(
        dict(mine=nn.LayerNorm(8), reference=nn.LayerNorm(8)),
        dict(
            mine=nn.LayerNorm(8, eps=1e-6),
            reference=nn.LayerNorm(12),
            rename=Fails({"weight": "norm.gain"}, "norm.gain"),
        ),
        told,
    ),
    "compare.assert_equal": Row(
        dict(mine=nn.LayerNorm(8, eps=1e-6), reference=NORM),
        dict(
            mine=Fails(nn.RMSNorm(8), "Different", AssertionError),
            reference=Fails(WIDE_NORM, "none of your parameters", AssertionError),
            conventions=Fails(False, "convention", AssertionError),
            rename=Fails({"gain": "norm.weight"}, "gain"),
            width=Fails(8, "width", TypeError),
        ),
    ),
    "compare.reference": Row(
        dict(name="layer_norm", dim=8),
        dict(name="rms_norm", dim=12, eps=1e-3, width=Fails(8, "width", TypeError)),
        small,
    ),
    "compare.reference, 2": Row(
        dict(name="layer_norm"), dict(name=Fails("norm", "must be one of")), small
    ),
    "compare.Finding": Row(
        dict(
            names=("a",),
            says=("b",),
            right=("c",),
            wrong=("d",),
            read=("e",),
            convention=False,
            error=0.0,
        ),
        dict(
            names=("z",),
            says=("z",),
            right=("z",),
            wrong=("z",),
            read=("z",),
            convention=True,
            error=1.0,
        ),
    ),
    "compare.Report": Row(
        dict(difference=0.0),
        dict(
            verdict="equal",
            reason="No parameters.",
            matched=1,
            parameters=1,
            notes=["one"],
            adapted=["one"],
            difference=1.0,
            probes={"one token": 0.0},
            located="norm",
            line="mine.py:1",
            findings=[1],
            faults=["one"],
            agreement={"norm": 0.0},
        ),
        lambda report: report.to_dict(),
    ),
    "mistakes.Probe": Row(
        dict(name="one token", inputs={"x": torch.ones(1)}),
        dict(name="two tokens", inputs={"x": torch.ones(2)}),
    ),
    "mistakes.Reference": Row(
        dict(
            name="norm",
            module=nn.Identity(),
            call=lambda module, x: module(x),
            steps=mistakes.NormSteps,
            config=dict(norm="layer"),
            roles=lambda tensors: tensors,
            probes=[],
            says="A norm.",
        ),
        dict(
            name="other",
            module=nn.LayerNorm(8),
            call=lambda module, x: -module(x),
            steps=mistakes.MlpSteps,
            config=dict(norm="rms"),
            roles=lambda tensors: {},
            probes=[mistakes.Probe("one token", {})],
            says="Another norm.",
            join=lambda x: -x,
        ),
        facts,
    ),
    "mistakes.Mistake": Row(
        dict(name="sign", step="center", replace=lambda self, x: -x, **FACTS),
        dict(
            name="other",
            step="spread",
            replace=lambda self, x: 2 * x,
            says="It is.",
            right="y",
            wrong="-y",
            read="10_attention: Masks",
            convention=True,
            lacks=("norm.bias",),
            has=("norm.bias",),
            around=True,
        ),
        effect,
    ),
    "mistakes.reference_of": Row(dict(name="one"), dict(name="two"), registered),
    "mistakes.mistake": Row(
        dict(step="center", name="sign", **FACTS),
        dict(step="spread", name="other", convention=True, says="It is."),
        catalogued,
    ),
    "mistakes.drawn": Row({}, dict(seed=1)),
    "mistakes.no_roles": Row(dict(tensors={}), {}),
}
SPARED_FOURTH = {"mistakes.no_roles": dict(tensors="a function has none, whatever it gets")}
