"""Runs are those of a plain loop, and what is stored comes back, whatever it is."""

import contextlib
import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from draws import drawn, layouts, normal, seeds
from hypothesis import strategies as st

from attnlib import train
from attnlib.train import fit, learning_rate, load_checkpoint, save_checkpoint, shuffled_batches

pytestmark = pytest.mark.usefixtures("quiet")
names = st.text("ab.", min_size=1, max_size=3)


# --- rates and batches ------------------------------------------------------------------------


@drawn(st.data(), st.integers(1, 40), st.sampled_from(("cosine", "inverse_sqrt", "constant")))
def test_rates(data, steps, schedule):
    """PyTorch's schedulers give the same, from the first step after the warm-up on."""
    warmup = data.draw(st.integers(0, steps))
    found = [
        learning_rate(i, steps=steps, warmup=warmup, schedule=schedule) for i in range(steps)
    ]
    assert found[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, max(1, steps - warmup)
        ),
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        "inverse_sqrt": lambda: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: (max(1, warmup) / (warmup + i + 1)) ** 0.5
        ),
    }[schedule]()
    for rate in found[warmup:]:
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        scheduler.step()


@drawn(st.data(), st.integers(1, 9), seeds, layouts)
def test_passes_show_rows_once(data, n, seed, layout):
    """Rows stay together, those of a pass differ, and each pass has an order of its own."""
    size = data.draw(st.integers(1, n))
    rows = torch.arange(n)
    x = normal((n, 2, 3), seed=seed, layout=layout)
    batches = shuffled_batches(rows, x, batch_size=size, seed=seed)
    for epoch in range(2):
        steps = range(epoch * (n // size), (epoch + 1) * (n // size))
        shown = [batches(step) for step in reversed(steps)]  # in any order
        for numbers, values in shown:
            assert len(numbers) == size and torch.equal(values, x[numbers])
        numbers = torch.cat([numbers for numbers, _ in shown])
        assert len(numbers.unique()) == len(numbers) == n // size * size
    assert all(torch.equal(a, b) for a, b in zip(batches(3), batches(3)))


@pytest.mark.parametrize("size", [0, 4, 1.5])
def test_a_batch_has_a_number_of_rows(size):
    with pytest.raises(ValueError, match=rf"batch_size \({size}\)"):
        shuffled_batches(torch.zeros(3), batch_size=size)


@drawn(seeds, st.booleans())
def test_seeds_hold_inside(seed, fails):
    """Behind the block the numbers go on as before it, also if it failed."""
    torch.manual_seed(seed + 1)
    wanted = torch.rand(3), torch.rand(3)
    torch.manual_seed(seed + 1)
    first = torch.rand(3)
    with contextlib.suppress(KeyError), train.seeded(seed):
        inside = torch.rand(3)
        if fails:
            raise KeyError
    assert torch.equal(first, wanted[0]) and torch.equal(torch.rand(3), wanted[1])
    assert torch.equal(inside, torch.rand(3, generator=torch.Generator().manual_seed(seed)))


# --- checkpoints ------------------------------------------------------------------------------

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


@drawn(
    st.data(),
    st.lists(st.tuples(names, st.lists(st.integers(0, 3), max_size=3)), max_size=4),
    st.integers(0, 10**9),
)
def test_checkpoints_come_back(data, shapes, step):
    """Tensors of any dtype and memory, also empty and tied ones; and any state of JSON."""
    tensors = {}
    for name, shape in shapes:
        x = normal(shape, torch.float32, 0, data.draw(layouts))
        dtype = data.draw(st.sampled_from(DTYPES))
        tensors[name] = x if dtype == torch.float32 else (9 * x).to(dtype)
    tensors |= {f"tied {name}": x for name, x in tensors.items()}
    state = data.draw(
        st.dictionaries(names, st.none() | st.integers() | st.lists(st.text(max_size=3)))
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deep" / "er.json"
        save_checkpoint(path, {"older": torch.zeros(1)}, {"step": step + 1})
        save_checkpoint(path, tensors, {**state, "step": step})
        found, kept = load_checkpoint(path)
        assert len([*path.parent.iterdir()]) == 2  # nothing is left of the older one
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x)
    assert kept.pop("tensors") and kept == {**state, "step": step}


@pytest.mark.parametrize("state", [{}, {"step": -1}, {"step": 1.0}])
def test_a_checkpoint_has_a_step(state, tmp_path):
    with pytest.raises(ValueError, match=r"state\['step'\] \(.*\)"):
        save_checkpoint(tmp_path / "a.json", {}, state)
    assert not [*tmp_path.iterdir()]


# --- steps ------------------------------------------------------------------------------------


class Net(nn.Module):
    """Matrices, biases, norms, a token that does not decay, and tied and frozen weights."""

    def __init__(self, width, tied, frozen):
        super().__init__()
        self.token = nn.Parameter(normal((1, width), torch.float32, 1))
        self.first, self.norm = nn.Linear(3, width), nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.last = self.inner if tied else nn.Linear(width, 2)
        self.inner.requires_grad_(not frozen)

    def no_weight_decay(self):
        return {"token"}

    def forward(self, x):
        x = self.norm(self.first(x) + self.token)
        return self.last(self.inner(x).tanh())


networks = st.builds(Net, st.integers(1, 4), st.booleans(), st.booleans())


@drawn(
    networks,
    st.sampled_from((0.0, 0.1)),
    st.dictionaries(
        st.sampled_from(("first.weight", "token", "norm.bias")),
        st.sampled_from((0.1, 0.0, 2.0)),
    ),
)
def test_each_parameter_is_in_one_group(model, weight_decay, scale):
    optimizer = train.adamw(model, 0.5, (0.9, 0.99), weight_decay, scale)
    assert train._without_decay(nn.ModuleDict({"a": model})) == {"a.token"}
    found = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert p not in found
            found[p] = group["weight_decay"], group["lr_scale"], group["lr"], group["betas"]
    wanted = {}
    for name, p in model.named_parameters():
        decays = p.ndim == 2 and name != "token"
        factor = scale.get(name, 1.0)
        if p.requires_grad:
            wanted[p] = weight_decay if decays else 0.0, factor, 0.5 * factor, (0.9, 0.99)
    assert found == wanted


@drawn(networks, st.data(), st.integers(1, 5), st.sampled_from((None, 0.05)), seeds)
def test_fit_is_a_plain_loop(model, data, steps, max_grad_norm, seed):
    """Losses, rates and weights, of float32 in the same order of operations."""
    warmup, every = data.draw(st.integers(0, steps)), data.draw(st.integers(1, 3))
    size, stop = data.draw(st.integers(1, 4)), data.draw(st.sampled_from((None, every)))
    x, y = (
        normal((5, 3), torch.float32, seed),
        normal((5, model.last.out_features), torch.float32),
    )
    plain = Net(
        model.first.out_features,
        model.last is model.inner,
        not model.inner.weight.requires_grad,
    )
    plain.load_state_dict(model.state_dict())
    batches = shuffled_batches(x, y, batch_size=size, seed=seed)

    def loss_fn(model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])

    modes = [m.train(data.draw(st.booleans())).training for m in model.modules()]
    modes = [m.training for m in model.modules()]
    random = torch.get_rng_state()
    history = fit(
        model,
        batches,
        loss_fn=loss_fn,
        steps=steps,
        lr=0.01,
        warmup=warmup,
        max_grad_norm=max_grad_norm,
        log_every=every,
        stop_after=stop,
        seed=seed,
        weight_decay=0.1,
    )
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)

    decay = [p for name, p in plain.named_parameters() if p.ndim == 2 and name != "token"]
    rest = [p for name, p in plain.named_parameters() if p.ndim < 2 or name == "token"]
    optimizer = torch.optim.AdamW(
        [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)],
        betas=(0.9, 0.98),
    )
    records, total, count = [], 0.0, 0
    for step in range(steps if stop is None else min(steps, stop)):
        rate = (
            (step + 1) / warmup
            if step < warmup
            else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        )
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * rate
        loss, terms = loss_fn(plain, batches(step))
        optimizer.zero_grad()
        (loss / terms).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
        optimizer.step()
        total, count = total + loss.item(), count + terms
        if (step + 1) % every == 0 or step + 1 == steps:
            records.append({"step": step + 1, "loss": total / count, "lr": 0.01 * rate})
            total, count = 0.0, 0
    assert [r["step"] for r in history] == [r["step"] for r in records]
    for a, b in zip(history, records):
        assert a == pytest.approx(b, rel=1e-4)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@drawn(networks, st.integers(1, 2), seeds)
def test_states_are_the_weights_and_moments(model, steps, seed):
    """By the names of `training_state`, of which `_resume` makes the same run."""
    batches = shuffled_batches(normal((4, 3), torch.float32, seed), batch_size=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        fit(
            model,
            batches,
            loss_fn=lambda m, batch: (m(batch[0]).square().sum(), 2),
            steps=steps,
            checkpoint=path,
            log_every=1,
        )
        tensors, state = load_checkpoint(path)
        optimizer = train.adamw(model, 1e-3, (0.9, 0.98), 0.01)
        optimizer.scaler = None
        kept = train._Kept(model, None)
        step, history = train._resume(path, model, optimizer, kept, state["settings"])
    assert step == steps == len(history)
    again = train._training_state(model, optimizer, kept)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(x, tensors[name]) for name, x in again.items())
    for name, x in model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], x)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(trained):
        assert tensors[f"optimizer.{i}.exp_avg"].shape == p.shape
        assert tensors[f"optimizer.{i}.step"] == steps


def test_a_run_does_not_stop_before_it_began():
    with pytest.raises(ValueError, match=r"stop_after \(-2\)"):
        fit(
            nn.Linear(1, 1),
            shuffled_batches(torch.ones(2, 1), batch_size=1),
            loss_fn=lambda m, b: (m(b[0]).sum(), 1),
            steps=4,
            log_every=2,
            stop_after=-2,
        )


# --- measurements -----------------------------------------------------------------------------


@drawn(st.lists(st.integers(1, 500), max_size=5), st.booleans())
def test_memory_is_what_lives_together(lengths, keep):
    """Tensors of float64, kept or freed one after the other, in blocks as allocated."""

    def call():
        kept = []
        for n in lengths:
            x = torch.empty(n, dtype=torch.float64)
            kept += [x] if keep else []
            del x

    sizes = [8 * n for n in lengths]
    wanted = (sum(sizes) if keep else max(sizes)) if sizes else 0
    assert train.peak_memory(call) == max(train.memory_levels(call)) == wanted
    assert train.memory_levels(call)[-1] == 0 and min(train.memory_levels(call)) == 0


def test_records_are_found_by_name():
    found = train.find_records()
    for name, path in found.items():
        assert path.stem == name
    name = min(found, key=lambda name: found[name].stat().st_size)
    assert train.read_record(name) == json.loads(found[name].read_text(encoding="utf-8"))


ORACLES = {
    "learning_rate": test_rates,
    "shuffled_batches": test_passes_show_rows_once,
    "seeded": test_seeds_hold_inside,
    "save_checkpoint": test_checkpoints_come_back,
    "load_checkpoint": test_checkpoints_come_back,
    "_without_decay": test_each_parameter_is_in_one_group,
    "adamw": test_each_parameter_is_in_one_group,
    "fit": test_fit_is_a_plain_loop,
    "_train_step": test_fit_is_a_plain_loop,
    "_prepare": test_fit_is_a_plain_loop,
    "_training_state": test_states_are_the_weights_and_moments,
    "_resume": test_states_are_the_weights_and_moments,
    "memory_levels": test_memory_is_what_lives_together,
    "peak_memory": test_memory_is_what_lives_together,
    "find_records": test_records_are_found_by_name,
    "read_record": test_records_are_found_by_name,
}
NOT_HERE = {
    "frozen_in_evaluation": "part of fit; tests/test_world.py",
    "modes_restored": "part of fit; tests/test_world.py",
    "shard_blocks": "needs processes: tests/test_train_parallel.py",
    "_share_buffers": "needs processes: tests/test_train_parallel.py",
    "_save_shards": "needs processes: tests/test_train_parallel.py",
    "print_speed": "prints: tests/test_train.py",
    "CrossEntropy": "tests/test_fit.py",
}


def test_every_public_name_is_here_or_said_to_be_elsewhere():
    assert not ORACLES.keys() & NOT_HERE.keys()
    assert set(train.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
