"""What the comparison says is so, by other libraries, NumPy, and broken layers written here."""

import math
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn as nn
from draws import drawn, normal, seeds
from hypothesis import strategies as st

import attnlib
from attnlib import mistakes, mistakes_vision

module = import_module("attnlib.compare")
widths = st.sampled_from((8, 12))


class TorchAttention(nn.Module):
    """PyTorch's own layer, whose logits can be multiplied by a factor."""

    def __init__(self, dim, heads, factor=1.0):
        super().__init__()
        self.layer = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.factor = factor

    def forward(self, x):
        dim = x.shape[-1]
        packed = self.layer.in_proj_weight
        rows = torch.ones_like(packed[:, :1])
        rows[:dim] = self.factor  # of the queries
        bias = self.layer.in_proj_bias
        return nn.functional.multi_head_attention_forward(
            *[x.transpose(0, 1)] * 3,
            dim,
            self.layer.num_heads,
            packed * rows,
            bias * rows[:, 0],
            None,
            None,
            False,
            0.0,
            self.layer.out_proj.weight,
            self.layer.out_proj.bias,
            need_weights=False,
        )[0].transpose(0, 1)


@drawn(st.sampled_from(((8, 2), (12, 3), (12, 1))))
def test_pytorchs_layer_is_equal(shape):
    dim, heads = shape
    wanted = attnlib.reference("multihead", embed_dim=dim, num_heads=heads)
    report = attnlib.compare(TorchAttention(dim, heads), wanted)
    assert report.verdict == "equal" and report.difference < 1e-12, str(report)
    attnlib.assert_equal(TorchAttention(dim, heads), wanted)


def test_the_scale_is_named():
    """√d of the model instead of that of a head, by a factor in the queries."""
    wanted = attnlib.reference("multihead", embed_dim=24, num_heads=2)
    mine = TorchAttention(24, 2, math.sqrt(12) / math.sqrt(24))
    report = attnlib.compare(mine, wanted)
    assert isinstance(report, module.Report) and report.verdict == "different"
    (finding,) = [one for one in report.findings if len(one.names) == 1]
    assert isinstance(finding, module.Finding)
    assert finding.names == ("scaled by the model's width",) and finding.error < 1e-12
    with pytest.raises(AssertionError, match="embed_dim"):
        attnlib.assert_equal(mine, wanted)


def test_every_name_makes_a_reference():
    names = module.references()
    assert names == sorted(names)
    assert {"attention", "multihead", "gpt", "vit", "swin"} <= set(names)
    for name in names:
        found = module.reference(name)
        assert isinstance(found, mistakes.Reference) and found.name == name
        assert all(isinstance(probe, mistakes.Probe) for probe in found.probes)


@drawn(widths, st.sampled_from((1e-5, 1e-2)), seeds)
def test_norms_are_numpys(dim, eps, seed):
    x = normal((2, 3, dim), seed=seed)
    gain, bias = normal((dim,), seed=seed + 1), normal((dim,), seed=seed + 2)
    weights = {"norm.weight": gain, "norm.bias": bias}
    y = x.numpy()
    centered = y - y.mean(-1, keepdims=True)
    for norm, z in (("layer", centered), ("rms", y)):
        wanted = z / np.sqrt((z**2).mean(-1, keepdims=True) + eps) * gain.numpy() + bias.numpy()
        found = mistakes.NormSteps(weights, norm=norm, eps=eps).run(x)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_mistake_replaces_a_step():
    """The variance over N - 1, as `Tensor.std` has it."""
    (entry,) = [one for one in mistakes.CATALOGUE if one.name == "variance over N - 1"]
    x = normal((2, 3, 8))
    found = entry.applied_to(mistakes.NormSteps)({}, eps=0.0).run(x)
    wanted = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)
    torch.testing.assert_close(found, wanted)


def test_numbers_are_drawn_as_torch_draws_them():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    found = mistakes.drawn(2, 3, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    assert torch.equal(found, torch.randn(2, 3, dtype=torch.float64))
    assert mistakes.no_roles({"weight": found}) == {}


def test_a_run_stops_after_a_step():
    layer = mistakes.MlpSteps({"fc1.weight": normal((6, 8)), "fc2.weight": normal((8, 6))})
    layer.stop_after = "activation"
    with pytest.raises(mistakes.Stopped):
        layer.run(normal((1, 2, 8)))
    assert list(layer.notes) == ["hidden layer", "activation"]


@drawn(seeds)
def test_boxes_are_a_count_of_pixels(seed):
    """Areas as numbers of cells of a grid, for boxes with corners on it."""
    corners = normal((6, 2, 2), seed=seed).mul(4).round().clamp(-9, 9)
    low, high = corners.amin(1), corners.amax(1) + 1
    boxes = torch.cat([low, high], dim=1)
    cells = torch.arange(-10, 11) + 0.5
    inside = (cells > low[..., None]) & (cells < high[..., None])  # (6, 2, 21)
    areas = inside[:, 0, :, None] & inside[:, 1, None, :]
    a, b = areas[:3, None], areas[3:]
    union = (a | b).sum((-2, -1)).double()
    wanted = (a & b).sum((-2, -1)) / union
    torch.testing.assert_close(mistakes_vision.IouSteps({}).run(boxes[:3], boxes[3:]), wanted)
    rows = (a | b).any(-1).double()
    columns = (a | b).any(-2).double()
    sides = []
    for some in (rows, columns):
        numbers = torch.where(some > 0, torch.arange(21.0), torch.nan)
        last = numbers.nan_to_num(nan=-99.0).amax(-1)
        sides.append(last - numbers.nan_to_num(nan=99.0).amin(-1) + 1)
    hull = sides[0].double() * sides[1]
    found = mistakes_vision.GiouSteps({}).run(boxes[:3], boxes[3:])
    torch.testing.assert_close(found, wanted - (hull - union) / hull)


ORACLES = {
    "Finding": test_the_scale_is_named,
    "Report": test_the_scale_is_named,
    "compare": test_pytorchs_layer_is_equal,
    "reference": test_every_name_makes_a_reference,
    "references": test_every_name_makes_a_reference,
    "assert_equal": test_pytorchs_layer_is_equal,
    "REFERENCES": test_every_name_makes_a_reference,
    "CATALOGUE": test_a_mistake_replaces_a_step,
    "Mistake": test_a_mistake_replaces_a_step,
    "Stopped": test_a_run_stops_after_a_step,
    "NormSteps": test_norms_are_numpys,
    "Probe": test_every_name_makes_a_reference,
    "Reference": test_every_name_makes_a_reference,
    "drawn": test_numbers_are_drawn_as_torch_draws_them,
    "no_roles": test_numbers_are_drawn_as_torch_draws_them,
    "IouSteps": test_boxes_are_a_count_of_pixels,
    "GiouSteps": test_boxes_are_a_count_of_pixels,
}
SEQUENCES = "equals the library's own module: tests/test_mistakes_sequences.py"
VISION = "equals the library's own module: tests/test_mistakes_vision.py"
NOT_HERE = {
    "REFERENCES_OF": SEQUENCES,
    "Steps": "the base of all steps, which has none",
    "reference_of": "fills REFERENCES: tests/test_arguments.py",
    "mistake": "fills CATALOGUE: tests/test_arguments.py",
}
for library, reason in ((mistakes, SEQUENCES), (mistakes_vision, VISION)):
    steps = [name for name in library.__all__ if name.endswith("Steps")]
    NOT_HERE |= {name: reason for name in steps if name not in ORACLES | NOT_HERE}


def test_every_public_name_is_tested_here_or_has_a_reason():
    assert not ORACLES.keys() & NOT_HERE.keys()
    names = {*module.__all__, *mistakes.__all__, *mistakes_vision.__all__}
    assert ORACLES.keys() | NOT_HERE.keys() == names
