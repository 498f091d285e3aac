"""Operations, bytes and memory as counters, sums by hand and the allocator have them."""

import math
import time

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from attnlib.attention import attention, attention_backend
from attnlib.cost import (
    _REGIMES,
    GPUS,
    GROUP_NAMES,
    OperationCount,
    Operator,
    Probe,
    Roofline,
    best_roofline,
    count_operations,
    diagnose,
    fastest_float32,
    matmul_precision,
    measure_roofline,
    operator_group,
    profile_groups,
    roofline_probes,
    saved_activations,
    seconds,
    take_turns,
    training_memory,
)
from attnlib.inference import PackedLinear, _PackedConv
from attnlib.models import create_model
from attnlib.train import memory_levels, peak_memory
from attnlib.vit import Block, VisionTransformer
from helpers import BACKBONES, build, finer_precision

torch.set_num_threads(1)
positive = st.floats(1e-3, 1e12)
sizes = st.integers(1, 12)
SMALL = dict(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=4, num_classes=5)


# --- the roofline -----------------------------------------------------------------------------


@given(
    positive,
    positive,
    st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), min_size=1, max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_the_sum_of_operators_is_between_the_whole_and_twice_the_whole(peak, bandwidth, pairs):
    roof = Roofline(peak, bandwidth)
    count = OperationCount(Operator("any", *pair) for pair in pairs)
    whole, total = roof.time(count.flops, count.bytes), count.time(roof)
    assert whole <= total * (1 + 1e-9) and total <= 2 * whole * (1 + 1e-9)


def test_roofline():
    roof = Roofline(100.0, 20.0)
    assert roof.ridge == 5 and roof.attainable(1) == 20
    assert roof.attainable(5) == roof.attainable(50) == 100
    assert roof.time(200, 0) == 2 and roof.time(100, 60) == 3
    for arguments in ((0, 1), (1, -1), (1, math.nan)):
        with pytest.raises(ValueError, match="peak_flops|bandwidth"):
            Roofline(*arguments)


def test_measured_roofline():
    roof = measure_roofline("cpu", size=128, megabytes=4, repeats=2)
    assert 1e6 < roof.peak_flops < 1e16 and 1e6 < roof.bandwidth < 1e14
    with pytest.raises(TypeError, match=r"dtype \(torch.int64\)"):
        measure_roofline("cpu", torch.int64)


def test_seconds_counts_its_calls():
    calls = []
    assert seconds(lambda: calls.append(1), repeats=4) >= 0 and len(calls) == 5
    with pytest.raises(ValueError, match=r"repeats \(0\)"):
        seconds(lambda: None, repeats=0)


# --- overhead and diagnosis -------------------------------------------------------------------


def test_overhead_is_paid_for_each_operator():
    machine = Roofline(100.0, 20.0, 0.5)
    assert machine.time(200, 0) == 2 and machine.time(200, 0, 3) == 3.5
    count = OperationCount([Operator("a", 200, 0), Operator("b", 0, 60)])
    assert count.time(machine) == 2 + 3 + 2 * 0.5
    for wrong in (-1, math.nan):
        with pytest.raises(ValueError, match="overhead"):
            Roofline(1, 1, wrong)


@pytest.mark.parametrize(
    "counts, regime, parts",
    [
        ((200, 0), "arithmetic", (2, 0, 0.5)),
        ((100, 60), "memory", (0, 3, 0.5)),
        ((100, 20), "arithmetic", (1, 0, 0.5)),
        ((10, 2), "overhead", (0.1, 0, 0.5)),
        ((200, 0, 5), "overhead", (2, 0, 2.5)),
        ((0, 0, 0), "arithmetic", (0, 0, 0)),
    ],
)
def test_diagnosis(counts, regime, parts):
    found = diagnose(Roofline(100.0, 20.0, 0.5), *counts)
    assert found.regime == regime in _REGIMES and found[2:] == parts
    assert found.seconds == sum(parts)


@given(positive, positive, st.floats(0, 1), st.floats(0, 1e12), st.floats(0, 1e12))
@settings(max_examples=100, deadline=None)
def test_regimes_are_the_three_sides_of_the_roofline(peak, bandwidth, overhead, flops, bytes):
    machine = Roofline(peak, bandwidth, overhead)
    found = diagnose(machine, flops, bytes)
    assert math.isclose(found.seconds, machine.time(flops, bytes, 1))
    work = machine.time(flops, bytes)
    assert (found.regime == "overhead") == (overhead > work)
    if bytes and found.regime != "overhead" and flops / bytes != machine.ridge:
        assert found.regime in ("arithmetic" if flops / peak >= bytes / bandwidth else "memory")


def test_the_diagnosis_of_a_model_is_the_sum_over_its_operators():
    pairs = [(200, 0), (0, 60), (100, 20), (1, 1)]
    machine = Roofline(100.0, 20.0, 0.5)
    count = OperationCount(Operator("any", *pair) for pair in pairs)
    found, each = count.diagnose(machine), [diagnose(machine, *pair) for pair in pairs]
    for name in _REGIMES:
        assert math.isclose(getattr(found, name), sum(getattr(one, name) for one in each))
    assert math.isclose(found.seconds, count.time(machine)) and found.regime == "memory"
    empty = OperationCount().diagnose(machine)
    assert empty.seconds == 0 and empty.regime in _REGIMES


@pytest.mark.parametrize("name", ["flops", "bytes", "operators"])
def test_diagnosis_refuses_negative_counts(name):
    counts = {"flops": 1, "bytes": 1, "operators": 1} | {name: -1}
    with pytest.raises(ValueError, match=rf"{name} \(-1\)"):
        diagnose(Roofline(1, 1), **counts)


def test_predicted_gpus_are_ordered_as_their_generations():
    assert list(GPUS) == ["H200", "H100", "A100", "T4"]
    machines = list(GPUS.values())
    assert all(a.bandwidth > b.bandwidth for a, b in zip(machines, machines[1:]))
    assert all(m.overhead > 0 and m.ridge > 100 for m in machines)


# --- measuring in turns -----------------------------------------------------------------------


def test_turns_are_taken_in_a_drawn_order_and_short_calls_are_repeated():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = take_turns(calls, rounds=20, least=0.0)
    assert order[:6] == list("aabbcc")  # a call to warm up and one to see how long it takes
    rounds = [tuple(order[i : i + 3]) for i in range(6, len(order), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds) and len(set(rounds)) > 2
    assert len(rounds) == 20 == len(times["a"]) and all(t >= 0 for t in times["b"])
    order.clear()
    take_turns(calls, rounds=1, least=1e-3)
    assert len(order) > 100
    with pytest.raises(ValueError, match=r"rounds \(0\)"):
        take_turns(calls, rounds=0)


def test_the_time_of_other_programs_does_not_count():
    (spent,) = take_turns({"sleep": lambda: time.sleep(0.05)}, rounds=1)["sleep"]
    assert spent < 0.04 and seconds(lambda: time.sleep(0.05), repeats=1) < 0.04
    torch.set_num_threads(2)
    try:
        assert seconds(lambda: time.sleep(0.05), repeats=1) > 0.04
    finally:
        torch.set_num_threads(1)


def test_probes_say_what_they_compute_and_move():
    probes = roofline_probes("cpu", shapes=((8, 16, 4),), megabytes=(1,))
    (product,) = (probe for name, probe in probes.items() if name.startswith("product"))
    assert product.flops == 2 * 8 * 16 * 4 and product.call().shape == (8, 4)
    moved = {name.split()[0]: probe.bytes for name, probe in probes.items() if probe.bytes}
    assert moved == {"copy": 2 * 10**6, "sum": 3 * 10**6, "read": 10**6}
    for probe in probes.values():
        counted = count_operations(probe.call)
        assert counted.flops == (probe.flops or counted.flops)
        assert abs(counted.bytes - (probe.bytes or counted.bytes)) <= 4  # a sum of one number


def test_a_roof_is_the_best_of_each():
    probes = {
        "slow": Probe(None, 100, 0),
        "fast": Probe(None, 100, 0),
        "move": Probe(None, 0, 60),
        "start": Probe(None, 0, 0),
        "late": Probe(None, 0, 0),
    }
    times = {"slow": [9, 5], "fast": [3, 2], "move": [4, 3], "start": [0.5, 0.25], "late": [1]}
    assert best_roofline(probes, times) == Roofline(50.0, 20.0, 0.25)


# --- operations and bytes ---------------------------------------------------------------------


@given(sizes, sizes, sizes)
@settings(max_examples=30, deadline=None)
def test_bytes_of_a_product(m, k, n):
    a, b = torch.ones(m, k, dtype=torch.float64), torch.ones(k, n, dtype=torch.float64)
    count = count_operations(torch.matmul, a, b)
    assert count.flops == 2 * m * k * n and count.bytes == 8 * (m * k + k * n + m * n)
    assert count.arithmetic_intensity == count.flops / count.bytes


@pytest.mark.parametrize(
    "call, bytes",
    [
        (lambda x: x.transpose(0, 1).unflatten(0, (2, -1)).flatten(0, 1).detach(), 0),  # views
        (lambda x: torch.empty_like(x), 0),
        (lambda x: x + x, 2 * 96),  # one tensor is read once
        (lambda x: x[:1].expand(4, 6) + x, 24 + 2 * 96),  # an expanded row is a row
        (lambda x: x.t().reshape(-1), 2 * 96),  # must copy
        (lambda x: x.zero_(), 96),  # writes only
        (lambda x: x.add_(1), 2 * 96),
        (lambda x: x.normal_(), 96),
        (lambda x: torch.ones_like(x), 96),
        (lambda x: x.new_zeros(3), 12),
        (lambda x: x.copy_(x[:1].clone()), 24 + 24 + 24 + 96),
        (lambda x: torch.cat([x, x + 1]), 2 * 96 + 96 + 96 + 2 * 96),
    ],
)
def test_bytes_of_small_programs(call, bytes):
    assert count_operations(call, torch.ones(4, 6)).bytes == bytes


@pytest.mark.parametrize("b, n, d, h", [(2, 17, 16, 2), (3, 20, 24, 4), (2, 30, 64, 8)])
def test_block_as_derived(b, n, d, h):
    block, x, t = Block(d, h), torch.randn(b, n, d), b * n
    weights = 12 * d * d + 13 * d
    fused = 38 * t * d + (4 + h) * t, 16 * t * d + (4 + h) * t
    steps = 48 * t * d + 4 * h * b * n * n + 4 * t, 16 * t * d + 4 * t + h * b * n * n
    for backend, (moved, kept) in (("sdpa", fused), ("reference", steps)):
        with attention_backend(backend):
            with torch.no_grad():
                count = count_operations(block, x)
            assert count.flops == 24 * t * d * d + 4 * b * n * n * d
            assert count.bytes == 4 * (moved + weights)
            assert saved_activations(block, x) == 4 * kept


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_flops_are_pytorchs_and_do_not_depend_on_the_kernel(name):
    model, x = create_model(name).eval(), torch.randn(1, 3, 224, 224)
    with torch.no_grad(), attention_backend("reference"):
        with FlopCounterMode(display=False) as counter:
            model(x)
        plain = count_operations(model, x)
    with torch.no_grad(), attention_backend("sdpa"):
        fused = count_operations(model, x)
    assert plain.flops == fused.flops == counter.get_total_flops() and fused.bytes < plain.bytes
    parts = fused.groups()
    assert list(parts) == list(GROUP_NAMES)
    assert sum(p.flops for p in parts.values()) == fused.flops
    assert sum(p.bytes for p in parts.values()) == fused.bytes
    with torch.inference_mode(), attention_backend("sdpa"):
        again = count_operations(model, x)
    assert (again.flops, again.bytes) == (fused.flops, fused.bytes) and torch.is_grad_enabled()


def test_backward_is_counted():
    q, k, v = (torch.randn(2, 3, 10, 8, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 3 * 10 * 10 * 8
    for backend, products in (("sdpa", 7), ("reference", 6)):
        with attention_backend(backend):
            count = count_operations(lambda: attention(q, k, v).sum().backward())
        assert count.flops == products * product
    x, conv = torch.randn(1, 3, 8, 8), nn.Conv2d(3, 5, 2, stride=2, bias=False)
    assert count_operations(conv, x).flops == 2 * 16 * 12 * 5


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_grouped_convolutions_are_counted(groups, transposed):
    """Output and both gradients multiply the same pairs of numbers."""
    cls = nn.ConvTranspose2d if transposed else nn.Conv2d
    conv, x = cls(6, 12, 3, groups=groups), torch.randn(2, 6, 9, 7)
    places = 9 * 7 if transposed else 7 * 5  # of the input or output that the kernel visits
    forward = 2 * 2 * places * 9 * 6 * 12 // groups
    assert count_operations(conv, x).flops == forward
    assert count_operations(lambda: conv(x).sum().backward()).flops == 2 * forward
    x.requires_grad_()
    assert count_operations(lambda: conv(x).sum().backward()).flops == 3 * forward


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cls, gates", [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_counted(cls, gates, bidirectional):
    layer, x = cls(5, 8, 2, bidirectional=bidirectional), torch.randn(7, 3, 5)
    directions = 1 + bidirectional
    forward = 2 * 7 * 3 * directions * gates * 8 * ((5 + 8) + (8 * directions + 8))
    assert count_operations(layer, x).flops == forward


def test_the_backward_pass_of_an_lstm_is_counted():
    layer, x = nn.LSTM(5, 8), torch.randn(7, 3, 5, requires_grad=True)
    forward = 2 * 7 * 3 * 4 * 8 * (5 + 8)
    assert count_operations(lambda: layer(x)[0].sum().backward()).flops == 3 * forward


def test_vectors_are_counted():
    matrix, vector = torch.randn(3, 4), torch.randn(4)
    assert count_operations(torch.mv, matrix, vector).flops == 2 * 3 * 4
    assert count_operations(torch.addmv, torch.randn(3), matrix, vector).flops == 2 * 3 * 4
    assert count_operations(torch.dot, vector, vector).flops == 2 * 4


def test_packed_layers_are_counted(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    layer, x = PackedLinear(torch.randn(6, 4), torch.randn(6), "gelu"), torch.randn(5, 4)
    counted = count_operations(layer, x)
    assert counted.flops == 2 * 5 * 4 * 6 and counted.uncounted == []
    assert counted.bytes == 4 * (5 * 4 + 6 * 4 + 6 + 5 * 6)
    conv = _PackedConv(nn.Conv2d(3, 4, 3).eval(), nn.BatchNorm2d(4).eval())
    x, shortcut = torch.randn(1, 3, 8, 8), torch.randn(1, 4, 6, 6)
    for inputs in ((x,), (x, shortcut)):
        assert count_operations(conv, *inputs).flops == 2 * 36 * 9 * 3 * 4


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda x: torch.fft.fft(x), "_fft_r2c"),
        (lambda x: torch.cdist(x, x), "_euclidean_dist"),
        (lambda x: torch.linalg.matrix_exp(x), "linalg_matrix_exp"),
        (lambda x: torch.linalg.solve(x + 100 * torch.eye(30), x), "_linalg_solve_ex"),
    ],
)
def test_what_is_not_counted_is_named(call, name):
    with pytest.warns(UserWarning, match=f"{name}.* for which there is no formula"):
        counted = count_operations(call, torch.randn(30, 30))
    assert f"aten::{name}" in counted.uncounted and "without those of aten::" in repr(counted)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", BACKBONES)
def test_all_operators_of_a_backbone_are_known(name):
    model, x = build(name), torch.randn(2, 3, 32, 32)

    def step():
        out = model(x)
        out = out if isinstance(out, torch.Tensor) else out[0]
        F.cross_entropy(out, torch.arange(2)).backward()

    assert count_operations(step).uncounted == []


def test_counting_changes_nothing():
    block, x = Block(16, 2).eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        before = block(x)
        found = []
        count_operations(lambda: found.append(block(x)))
    assert torch.equal(before, found[0])
    matrix, vector = (torch.empty(10**5, columns, device="meta") for columns in (10**5, 1))
    meta = count_operations(torch.matmul, matrix, vector)
    assert meta.flops == 2 * 10**10
    assert "2 operators" in repr(OperationCount([Operator("a", 1, 2), Operator("b", 0, 3)]))
    with pytest.raises(TypeError, match="call"):
        count_operations(3)


@pytest.mark.parametrize(
    "name, group",
    [
        ("aten::addmm", "matrix products"),
        ("aten::bmm", "matrix products"),
        ("aten.mm", "matrix products"),
        ("aten::mkldnn_convolution", "matrix products"),
        ("aten::_softmax", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("attnlib::flash_forward", "attention"),
        ("aten::native_layer_norm", "norms"),
        ("aten::linalg_vector_norm", "norms"),
        ("aten::gelu_backward", "activations"),
        ("aten::exp", "activations"),
        ("aten::copy_", "copies, layout"),
        ("aten::roll", "copies, layout"),
        ("aten::cat", "copies, layout"),
        ("aten::add", "rest"),
        ("aten::expand", "rest"),
        ("aten::view", "rest"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "rest"),
    ],
)
def test_groups(name, group):
    assert operator_group(name) == group


def test_profile_has_every_group_and_finds_the_large_one():
    x = torch.randn(400, 400)
    times = profile_groups(lambda x: (x @ x @ x @ x @ x).tanh(), x)
    assert list(times) == list(GROUP_NAMES) and all(t >= 0 for t in times.values())
    assert times["matrix products"] > 0 and times["activations"] > 0 and times["attention"] == 0
    with pytest.raises(ValueError, match="repeats"):
        profile_groups(torch.tanh, x, repeats=0)


# --- memory -----------------------------------------------------------------------------------


def test_levels_of_a_program_known_by_hand():
    def call():
        a = torch.empty(1000)  # 4000 bytes
        b = torch.empty(2000)
        del a
        return torch.empty(500), b

    levels = memory_levels(lambda: call() and None)
    assert levels[0] == 0 and max(levels) == peak_memory(lambda: call() and None)
    # the CPU's allocator rounds up
    assert 12000 <= max(levels) <= 12200 and abs(levels[-1]) <= 200


def test_saved_counts_storages_once():
    x = torch.randn(10, 10, requires_grad=True)
    assert saved_activations(lambda: x.sigmoid().sum()) == 400  # its output
    assert saved_activations(lambda: (x.exp().t() @ x.exp().detach()).sum(), exclude=[x]) == 800
    assert saved_activations(lambda: x * x, exclude=[x]) == 0
    layer = nn.Linear(10, 10)
    assert saved_activations(layer, x) == 400  # the input and not the weight


def step_of(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, fused=True)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


@pytest.mark.parametrize(
    "name, batch", [("vit_tiny_patch16_224", 2), ("swin_tiny_patch4_window7_224", 1)]
)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_peak_of_a_training_step_within_5_percent(name, batch, checkpointing, backend):
    model, x = create_model(name).train(), torch.randn(batch, 3, 224, 224)
    model.set_grad_checkpointing(checkpointing)
    count = sum(p.numel() for p in model.parameters())
    with attention_backend(backend):
        predicted = training_memory(model, x)
        found = peak_memory(step_of(model, x)) + predicted.parameters + predicted.optimizer
    assert predicted.parameters == predicted.gradients == 4 * count
    assert predicted.optimizer == 8 * count
    assert abs(predicted.peak / found - 1) < 0.05
    assert model.grad_checkpointing == checkpointing  # as it was


def test_checkpointed_activations_are_the_inputs_of_blocks():
    model, x = VisionTransformer(**SMALL), torch.randn(2, 3, 16, 16)
    plain = training_memory(model, x)
    model.set_grad_checkpointing()
    kept = training_memory(model, x)
    inputs = 4 * 2 * 17 * 32 * 3  # three blocks, 16 tokens and the class token
    behind = inputs  # the last norm, its output, and less for the class token alone
    assert inputs <= kept.activations < inputs + behind < plain.activations
    assert kept.peak < plain.peak and all(p.grad is None for p in model.parameters())


def test_frozen_parameters_have_no_gradient():
    model, x = VisionTransformer(**SMALL), torch.randn(1, 3, 16, 16)
    for p in model.blocks.parameters():
        p.requires_grad_(False)
    memory = training_memory(model, x, moments=1)
    free = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert memory.gradients == memory.optimizer == 4 * free < memory.parameters
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        training_memory(model, x)
    with pytest.raises(ValueError, match=r"moments \(-1\)"):
        training_memory(VisionTransformer(**SMALL), x, moments=-1)
    other = nn.Linear(3, 3)
    other.grad_checkpointing = True
    with pytest.raises(ValueError, match="grad_checkpointing but no blocks"):
        training_memory(other, torch.ones(2, 3))


# --- the precision of float32 -----------------------------------------------------------------


def precision_state():
    backends = getattr(torch.backends.mkldnn, "matmul", None), torch.backends.cuda.matmul
    finer = [getattr(b, "fp32_precision", None) for b in backends]
    return torch.get_float32_matmul_precision(), finer


@pytest.mark.parametrize("name", ["highest", "high", "medium"])
def test_precision_is_set_and_restored_even_after_an_error(name):
    before = precision_state()
    with matmul_precision(name):
        assert torch.get_float32_matmul_precision() == name
        with matmul_precision("highest"):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == name
    assert precision_state() == before
    with pytest.raises(RuntimeError, match="inside"), matmul_precision(name):
        raise RuntimeError("inside")
    assert precision_state() == before


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="PyTorch before 2.9 has one setting for all",
)
def test_precision_is_restored_where_a_library_has_its_own():
    with finer_precision(cuda="tf32", cpu="bf16"):
        with matmul_precision("highest"):
            assert precision_state() == ("highest", ["ieee", "ieee"])
        matmul = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
        assert [backend.fp32_precision for backend in matmul] == ["bf16", "tf32"]


def test_unknown_precision():
    message = r"name \('low'\) must be one of 'highest', 'high', 'medium'"
    with pytest.raises(ValueError, match=message):
        with matmul_precision("low"):
            pass


def test_fastest_float32_is_float32_and_sets_nothing():
    before = precision_state()
    choice = fastest_float32("cpu", shapes=((64, 96, 128), (200, 300, 100)), repeats=2)
    assert precision_state() == before
    assert [row.name for row in choice.rows] == ["highest", "high", "medium"]
    rows = {row.name: row for row in choice.rows}
    assert rows["highest"].float32
    assert rows[choice.name].float32 and rows[choice.name].error < 1e-5
    assert all(row.flops > 0 and 1e-9 < row.error < 0.1 for row in choice.rows)
    for wrong in (dict(tolerance=0.5), dict(gain=0.9), dict(repeats=0)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fastest_float32("cpu", **wrong)


@pytest.mark.parametrize(
    "speeds, errors, chosen",
    [
        ((1, 1, 2), (1e-7, 1e-7, 2e-7), "medium"),
        ((1, 1, 9), (1e-7, 1e-7, 8e-3), "highest"),
        ((1, 1.05, 1.05), (1e-7, 1e-7, 1e-7), "highest"),
        ((1, 3, 9), (1e-7, 2e-7, 8e-3), "high"),
        ((1, 3, 3.1), (1e-7, 1e-7, 1e-7), "high"),
    ],
)
def test_choice_needs_a_gain_and_the_precision(monkeypatch, speeds, errors, chosen):
    names = ("highest", "high", "medium")
    times = {name: 1 / speed for name, speed in zip(names, speeds)}
    measured = times, dict(zip(names, errors))
    monkeypatch.setattr("attnlib.cost._measure_precisions", lambda *arguments: measured)
    assert fastest_float32("cpu").name == chosen


def test_an_emulated_bfloat16_is_found_out(monkeypatch):
    linear = F.linear

    def emulated(x, weight):
        if torch.get_float32_matmul_precision() == "medium":
            x, weight = x.bfloat16().float(), weight.bfloat16().float()
        return linear(x, weight)

    monkeypatch.setattr(F, "linear", emulated)
    highest, _, medium = fastest_float32("cpu", shapes=((64, 64, 64),), repeats=1).rows
    assert highest.float32 and not medium.float32 and medium.error > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    roof = measure_roofline("cuda", size=1024, megabytes=64)
    assert roof.peak_flops > 1e11
    assert fastest_float32("cuda").name in ("highest", "high", "medium")
    model = create_model("vit_tiny_patch16_224", device="cuda").train()
    x = torch.randn(8, 3, 224, 224, device="cuda")
    predicted = training_memory(model, x)
    found = peak_memory(step_of(model, x), "cuda") + predicted.parameters + predicted.optimizer
    assert abs(predicted.peak / found - 1) < 0.05
    with torch.no_grad():
        assert profile_groups(model.eval(), x)["matrix products"] > 0
