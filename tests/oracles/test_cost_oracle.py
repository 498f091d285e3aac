"""Times, rooflines and memory by short formulas, and by what PyTorch itself says."""

import math
import time

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from draws import drawn, normal, seeds
from hypothesis import strategies as st

from attnlib import cost
from attnlib.cost import Probe, Roofline, diagnose, saved_activations, seconds, take_turns
from attnlib.vit import VisionTransformer

positive, counts = st.floats(1e-3, 1e15), st.floats(0, 1e15)
rooflines = st.builds(Roofline, positive, positive, st.floats(0, 1e3))


@drawn(rooflines, counts, counts, st.integers(0, 1000))
def test_rooflines(machine, flops, moved, starts):
    """The longer of computing and moving, and the starts (Williams et al. 2009)."""
    compute, move = flops / machine.peak_flops, moved / machine.bandwidth
    wanted = np.maximum(compute, move) + starts * machine.overhead
    assert machine.time(flops, moved, starts) == pytest.approx(wanted)
    assert machine.ridge == machine.peak_flops / machine.bandwidth
    if moved > 0:
        reached = flops / machine.time(flops, moved) if flops else 0
        assert machine.attainable(flops / moved) == pytest.approx(reached, rel=1e-9)
    found = diagnose(machine, flops, moved, starts)
    assert found.seconds == pytest.approx(wanted)
    parts = (
        compute if compute >= move else 0,
        move if move > compute else 0,
        starts * machine.overhead,
    )
    assert found[2:] == parts and found.regime == cost._REGIMES[int(np.argmax(parts))]


@pytest.mark.parametrize("numbers", [(0, 1, 0), (1, 0, 0), (1, 1, -1), (math.nan, 1, 0)])
def test_a_roofline_is_positive(numbers):
    with pytest.raises(ValueError, match="must (be positive|not be negative)"):
        Roofline(*numbers)


# --- time -------------------------------------------------------------------------------------


class Clock:
    """A clock that stands, until a call lets it go on by what it takes."""

    def __init__(self, takes):
        self.now, self.takes, self.calls = 0.0, list(takes), 0

    def __call__(self):
        return self.now

    def call(self):
        self.now += self.takes[self.calls % len(self.takes)]
        self.calls += 1


@drawn(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=7))
def test_the_least_time_counts(takes):
    """But for the first call, which is not timed."""
    clock, known = Clock(takes), (time.process_time, time.perf_counter)
    time.process_time = time.perf_counter = clock
    try:
        found = seconds(clock.call, repeats=len(takes) - 1)
    finally:
        time.process_time, time.perf_counter = known
    assert clock.calls == len(takes)
    assert found == pytest.approx(min(takes[1:]), rel=1e-6)


@drawn(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=4), st.integers(1, 4), seeds)
def test_turns(takes, rounds, seed):
    """Each function in each round, as often as makes up for the least time."""
    clock, known = Clock([0.0]), (time.process_time, time.perf_counter)
    order = []

    def function(name, took):
        def call():
            order.append(name)
            clock.now += took

        return call

    calls = {i: function(i, took) for i, took in enumerate(takes)}
    time.process_time = time.perf_counter = clock
    try:
        found = take_turns(calls, rounds=rounds, least=0.01, seed=seed)
    finally:
        time.process_time, time.perf_counter = known
    for i, took in enumerate(takes):
        times = max(1, math.ceil(0.01 / took * (1 - 1e-9)))
        assert abs(order.count(i) - 2 - rounds * times) <= rounds  # rounding of the clock
        assert found[i] == pytest.approx([took] * rounds, rel=1e-6)


@drawn(
    st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=5), st.integers(1, 5), st.integers(1, 5)
)
def test_the_best_makes_the_roof(times, flops, moved):
    probes = {
        "a": Probe(None, flops, 0),
        "b": Probe(None, 2 * flops, 0),
        "c": Probe(None, 0, moved),
        "d": Probe(None, 0, 0),
        "e": Probe(None, 0, 0),
    }
    measured = {name: [2 * t, t] for name, t in zip(probes, times)}
    found = cost.best_roofline(probes, measured)
    a, b, c, d, e = times
    assert found == Roofline(max(flops / a, 2 * flops / b), moved / c, min(d, e))


@drawn(
    st.lists(st.tuples(*[st.integers(1, 9)] * 3), max_size=2, unique=True),
    st.lists(st.sampled_from((0.01, 0.1)), max_size=2, unique=True),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
)
def test_probes_do_what_they_say(shapes, megabytes, dtype):
    probes = cost.roofline_probes("cpu", dtype, shapes=shapes, megabytes=megabytes)
    assert len(probes) == len(shapes) + 3 * len(megabytes) + 3
    for name, probe in probes.items():
        out = probe.call()
        if name.startswith("product"):
            m, k, n = (int(x) for x in name.split()[1::2])
            assert out.shape == (m, n) and out.dtype == dtype and probe.flops == 2 * m * k * n
        elif name.endswith("MB"):
            arrays = {"copy": 2, "sum": 3, "read": 1}[name.split()[0]]
            assert probe.bytes == pytest.approx(arrays * float(name.split()[1]) * 1e6)
        else:
            assert probe[1:] == (0, 0) and out.numel() == 1


# --- memory -----------------------------------------------------------------------------------


@drawn(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from((torch.float32, torch.float64)),
)
def test_saved_activations(rows, width, hidden, trained, dtype):
    """Two layers keep their inputs, and what ReLU gives counts once."""
    layers = nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 3)
    model = nn.Sequential(*layers).to(dtype).requires_grad_(trained)
    x = normal((rows, width), dtype)
    wanted = rows * (width + hidden) * dtype.itemsize if trained else 0
    assert saved_activations(model, x) == wanted
    without = wanted - x.nbytes if trained else 0
    assert saved_activations(model, x, exclude=[x]) == without
    with torch.no_grad():  # it asks for gradients itself
        assert saved_activations(model, x) == wanted


@drawn(st.integers(1, 9), st.integers(1, 4))
def test_a_storage_is_saved_once_and_whole(n, times):
    """Views of one tensor, also a small part of it: all that is kept alive."""
    x = torch.ones(2, n, dtype=torch.float64, requires_grad=True)

    def call(x):
        return sum((x[0] * x[0]).sum() for _ in range(times))

    assert saved_activations(call, x) == x.nbytes
    recorder = cost._Recorder()
    with recorder.watch():
        call(x)
    assert {saved.bytes for saved in recorder.order} == {x.nbytes}
    assert [saved.segment for saved in recorder.order] == [None] * len(recorder.order)


@drawn(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.booleans())
def test_training_memory(batch, depth, moments, frozen):
    """Parameters, gradients and moments; and what is saved, as `saved_activations` finds it."""
    model = VisionTransformer(8, 4, embed_dim=8, depth=depth, num_heads=2, num_classes=3)
    model.pos_embed.requires_grad_(not frozen)
    x = torch.randn(batch, 3, 8, 8)
    found = cost.training_memory(model, x, moments=moments)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert found.parameters == sum(p.nbytes for p in model.parameters())
    assert (found.gradients, found.optimizer) == (trained, moments * trained)
    assert found.activations == saved_activations(model, x, exclude=[x])
    kept = found.parameters + found.optimizer
    assert found.peak >= kept + max(found.activations, trained)


# --- the precision of products ----------------------------------------------------------------


@drawn(st.permutations(cost._PRECISIONS), st.booleans())
def test_precisions_are_restored(order, fails):
    """One inside the other, and also after an error."""
    before, seen = torch.get_float32_matmul_precision(), []
    try:
        for name in order:
            torch.set_float32_matmul_precision(name)
            try:
                with cost.matmul_precision(order[0]):
                    seen.append(torch.get_float32_matmul_precision())
                    if fails:
                        raise KeyError
            except KeyError:
                pass
            assert torch.get_float32_matmul_precision() == name
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [order[0]] * 3


@drawn(st.tuples(*[st.integers(1, 20)] * 3).filter(lambda shape: shape[0] * shape[2] > 1))
def test_errors_of_products(shape):
    """Of the highest precision, against float64: the least of those that there are."""
    times, errors = cost._measure_precisions("cpu", [shape], 1)
    m, k, n = shape
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    exact = F.linear(x.double(), weight.double())
    with cost.matmul_precision("highest"):
        apart = F.linear(x, weight).double() - exact
    assert errors["highest"] == pytest.approx(
        (apart.square().mean().sqrt() / exact.std()).item()
    )
    assert times.keys() == errors.keys() == {*cost._PRECISIONS} and min(times.values()) >= 0


COUNTED = "what counts operators: tests/test_cost.py"
ORACLES = {
    "Roofline": test_rooflines,
    "diagnose": test_rooflines,
    "Diagnosis": test_rooflines,
    "_REGIMES": test_rooflines,
    "seconds": test_the_least_time_counts,
    "take_turns": test_turns,
    "best_roofline": test_the_best_makes_the_roof,
    "roofline_probes": test_probes_do_what_they_say,
    "Probe": test_probes_do_what_they_say,
    "saved_activations": test_saved_activations,
    "_Recorder": test_a_storage_is_saved_once_and_whole,
    "Saved": test_a_storage_is_saved_once_and_whole,
    "training_memory": test_training_memory,
    "TrainingMemory": test_training_memory,
    "matmul_precision": test_precisions_are_restored,
    "_PRECISIONS": test_precisions_are_restored,
    "_measure_precisions": test_errors_of_products,
}
NOT_HERE = {
    "count_operations": COUNTED,
    "OperationCount": COUNTED,
    "_OperatorWatch": COUNTED,
    "Operator": COUNTED,
    "_FORMULAS": COUNTED,
    "_NO_PRODUCTS": COUNTED,
    "operator_group": COUNTED,
    "GROUPS": COUNTED,
    "GROUP_NAMES": COUNTED,
    "profile_groups": "measures time: tests/test_cost.py",
    "measure_roofline": "measures time: tests/test_cost.py",
    "fastest_float32": "measures time: tests/test_cost.py",
    "Precision": "a row of `fastest_float32`",
    "PrecisionChoice": "what `fastest_float32` returns",
    "_SHAPES": "a constant",
    "GPUS": "a table of data sheets",
}


def test_every_public_name_is_here_or_said_to_be_elsewhere():
    assert not ORACLES.keys() & NOT_HERE.keys()
    assert set(cost.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
