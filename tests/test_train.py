"""The training loop: schedules, exact resume, several processes, checkpoints
that say what is wrong."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType
from small_models import small_supernet

from attnlib import train
from attnlib.autoformer import ClassicalSharing
from attnlib.beit import BeitForMaskedImageModeling
from attnlib.train import (
    adamw,
    fit,
    learning_rate,
    load_checkpoint,
    memory_levels,
    peak_memory,
    save_checkpoint,
    shuffled_batches,
)
from attnlib.vit import VisionTransformer
from benchmarks.records import write_record

ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("quiet")


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def data(n=64):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, 5, generator=g)
    return x, x[:, :3].argmax(-1)


# --- schedules and batches
# -------------------------------------------------------------------------------------------


def test_schedules():
    settings = dict(steps=100, warmup=10)
    for schedule in ("cosine", "inverse_sqrt", "constant"):
        rates = [learning_rate(step, schedule=schedule, **settings) for step in range(100)]
        assert (
            rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)]) and max(rates) == 1
        )
        assert all(a >= b for a, b in zip(rates[9:], rates[10:]))
    assert learning_rate(55, schedule="cosine", **settings) == pytest.approx(0.5)
    assert learning_rate(39, schedule="inverse_sqrt", **settings) == pytest.approx(0.5)
    assert learning_rate(99, schedule="cosine", steps=100, warmup=0) < 1e-3
    with pytest.raises(ValueError, match="schedule"):
        learning_rate(0, schedule="linear", **settings)  # in the first step, too


def test_inverse_sqrt_is_the_schedule_of_2017():
    d_model, warmup = 512, 4000
    paper = [d_model**-0.5 * min(s**-0.5, s * warmup**-1.5) for s in range(1, 20_000)]
    ours = [
        (d_model * warmup) ** -0.5
        * learning_rate(s - 1, steps=20_000, warmup=warmup, schedule="inverse_sqrt")
        for s in range(1, 20_000)
    ]
    assert ours == pytest.approx(paper, rel=1e-12)


def test_every_pass_shows_every_row_once():
    batches = shuffled_batches(torch.arange(12), torch.arange(12) * 2, batch_size=4, seed=3)
    passes = [[batches(step) for step in range(3 * e, 3 * e + 3)] for e in range(4)]
    orders = [torch.cat([x for x, _ in batches_of_pass]) for batches_of_pass in passes]
    for order in orders:
        assert sorted(order.tolist()) == list(range(12))
    assert not torch.equal(orders[0], orders[1])
    assert all(torch.equal(y, 2 * x) for one in passes for x, y in one)


@pytest.mark.parametrize(
    "tensors, size, message",
    [
        ((torch.zeros(3), torch.zeros(4)), 2, r"tensors have \[3, 4\] rows"),
        (
            (torch.zeros(3),),
            4,
            r"batch_size \(4\) must be between 1 and the number of rows \(3\)",
        ),
        ((torch.zeros(3),), 0, r"batch_size \(0\) must be between 1"),
    ],
)
def test_epochs_refuses(tensors, size, message):
    with pytest.raises(ValueError, match=message):
        shuffled_batches(*tensors, batch_size=size)


# --- the loop ---------------------------------------------------------------------------------


def test_fit_learns_and_equals_a_plain_loop():
    """Without dropout, the loop is AdamW on the mean loss with the schedule and
    clipping, and nothing else."""
    batches = shuffled_batches(*data(), batch_size=16)
    model, plain = network(), network()
    model[3], plain[3] = nn.Identity(), nn.Identity()
    history = fit(model, batches, loss_fn=loss_fn, steps=40, lr=1e-2, warmup=5, log_every=10)
    optimizer = adamw(plain, 1e-2, (0.9, 0.98), 0.01)
    for step in range(40):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * learning_rate(step, steps=40, warmup=5, schedule="cosine")
        x, y = batches(step)
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert [record["step"] for record in history] == [10, 20, 30, 40]
    assert history[-1]["loss"] < history[0]["loss"]


def test_what_the_model_spares_does_not_decay():
    """Learned positions have three axes; timm spares them, and so do we."""
    model = VisionTransformer(8, 4, 1, 2, embed_dim=8, depth=1, num_heads=2)
    decaying, spared = (
        {id(p) for p in group["params"]}
        for group in adamw(model, 1e-3, (0.9, 0.98), 0.1).param_groups
    )
    assert {id(model.pos_embed), id(model.cls_token), id(model.head.bias)} <= spared
    assert id(model.blocks[0].attn.qkv.weight) in decaying and not decaying & spared
    assert len(decaying) + len(spared) == len(list(model.parameters()))


def test_biases_and_norms_do_not_decay():
    groups = adamw(network(), 1e-3, (0.9, 0.98), 0.1).param_groups
    assert {p.ndim for p in groups[0]["params"]} == {2} and groups[0]["weight_decay"] == 0.1
    assert {p.ndim for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0


def spared(model):
    groups = adamw(model, 1e-3, (0.9, 0.98), 0.1).param_groups
    still = {p for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    return {name for name, p in model.named_parameters() if p in still and p.ndim > 1}


def test_tokens_positions_and_tables_do_not_decay_within_another_module():
    wide = dict(embed_dim=8, num_heads=2, depth=1)
    vit = VisionTransformer(8, 4, num_classes=2, **wide)
    assert spared(vit) == {"cls_token", "pos_embed"}
    wrapped = nn.ModuleDict(dict(inner=nn.Sequential(vit), other=nn.Linear(2, 2)))
    assert spared(wrapped) == {"inner.0.cls_token", "inner.0.pos_embed"}
    classical = small_supernet(ClassicalSharing)
    tokens = {
        name
        for name, _ in classical.named_parameters()
        if name.endswith(("cls_token", "pos_embed"))
    }
    assert spared(classical) == tokens and len(tokens) == 2 * 3  # for each of three widths
    beit = BeitForMaskedImageModeling(8, 4, vocab_size=5, **wide)
    table = "rel_pos_bias.relative_position_bias_table"
    assert spared(beit) == {"cls_token", "mask_token", table}


def test_parameters_learn_with_their_own_rates():
    """A scale of 0 leaves the weights where they are; of 2 it equals twice the rate."""
    batches = shuffled_batches(*data(), batch_size=16)
    scaled, twice = network(), network()
    run = dict(steps=5, log_every=5, max_grad_norm=None, weight_decay=0.0)
    names = [name for name, _ in scaled.named_parameters()]
    before = {name: p.detach().clone() for name, p in scaled.named_parameters()}
    scale = dict.fromkeys(names[1:], 2.0) | {names[0]: 0.0}
    fit(scaled, batches, loss_fn=loss_fn, lr=1e-2, lr_scale=scale, **run)
    twice.get_parameter(names[0]).requires_grad_(False)
    fit(twice, batches, loss_fn=loss_fn, lr=2e-2, **run)
    for name, p in scaled.named_parameters():
        torch.testing.assert_close(p, twice.get_parameter(name), atol=1e-6, rtol=0)
        assert torch.equal(p, before[name]) == (name == names[0])
    with pytest.raises(ValueError, match=r"lr_scale names \['no'\]"):
        fit(scaled, batches, loss_fn=loss_fn, lr_scale={"no": 1.0}, **run)


@pytest.mark.parametrize("stop", [10, 20])
def test_resumed_run_equals_the_whole_one_bit_for_bit(tmp_path, stop):
    batches = shuffled_batches(*data(), batch_size=16)
    run = dict(steps=30, lr=1e-2, warmup=3, log_every=10, seed=5)
    # the last one's weights are replaced
    whole, first, second = network(), network(), network(seed=9)
    history = fit(whole, batches, loss_fn=loss_fn, **run)
    fit(first, batches, loss_fn=loss_fn, **run, checkpoint=tmp_path / "a.json", stop_after=stop)
    torch.manual_seed(12345)  # what else draws random numbers must not matter
    torch.rand(17)
    again = fit(second, batches, loss_fn=loss_fn, **run, checkpoint=tmp_path / "a.json")
    for a, b in zip(whole.state_dict().values(), second.state_dict().values()):
        assert torch.equal(a, b)
    assert again == history
    assert len(list(tmp_path.iterdir())) == 2  # the JSON file and the newest tensors


def test_finished_run_is_not_run_again(tmp_path):
    run = dict(steps=10, log_every=5, checkpoint=tmp_path / "a.json")
    history = fit(network(), shuffled_batches(*data(), batch_size=16), loss_fn=loss_fn, **run)
    never = lambda step: pytest.fail("a batch was asked for")  # noqa: E731
    assert fit(network(), never, loss_fn=loss_fn, **run) == history


def test_resuming_with_other_settings_is_refused(tmp_path):
    run = dict(steps=10, log_every=5, checkpoint=tmp_path / "a.json")
    fit(network(), shuffled_batches(*data(), batch_size=16), loss_fn=loss_fn, **run)
    batches = shuffled_batches(*data(), batch_size=16)
    with pytest.raises(ValueError, match=r"lr \(0.5\)"):
        fit(network(), batches, loss_fn=loss_fn, **run, lr=0.5)
    for name, value in dict(
        betas=(0.9, 0.999), weight_decay=0.1, max_grad_norm=None, seed=3, warmup=1
    ).items():
        with pytest.raises(ValueError, match=rf"{name} \("):
            fit(network(), batches, loss_fn=loss_fn, **run, **{name: value})
    with pytest.raises(
        ValueError, match=r"(?s)a.json belongs to another model: .*size mismatch for 0.weight"
    ):
        fit(nn.Sequential(nn.Linear(5, 3)), batches, loss_fn=loss_fn, **run)
    other = nn.Sequential(
        nn.Linear(5, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
    )
    frozen = network(1)
    frozen[0].requires_grad_(False)
    for model, words in (
        (other, "another model"),
        (frozen, r"other parameters: 0.bias, 0.weight differ"),
    ):
        before = [x.clone() for x in model.parameters()]
        with pytest.raises(ValueError, match=words):
            fit(model, batches, loss_fn=loss_fn, **run)
        # not even half of it was loaded
        assert all(map(torch.equal, before, model.parameters()))
    save_checkpoint(tmp_path / "b.json", {"x": torch.ones(1)}, {"step": 1})
    with pytest.raises(
        ValueError, match="b.json is a checkpoint, but not one that `fit` wrote"
    ):
        fit(network(), batches, loss_fn=loss_fn, steps=10, checkpoint=tmp_path / "b.json")


def test_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(tmp_path):
    batches = shuffled_batches(*data(), batch_size=16)
    calls = []

    def breaks(model, batch):
        calls.append(None)
        total, count = loss_fn(model, batch)
        return total * (math.nan if len(calls) == 8 else 1), count

    with pytest.raises(FloatingPointError, match="the loss is nan: a smaller lr"):
        fit(
            network(),
            batches,
            loss_fn=breaks,
            steps=20,
            log_every=5,
            checkpoint=tmp_path / "a.json",
        )
    assert len(calls) == 8 and load_checkpoint(tmp_path / "a.json")[1]["step"] == 5


def test_loss_that_no_step_looked_at_does_not_reach_the_checkpoint(tmp_path, monkeypatch):
    """On a GPU only some steps look at the loss; the record before a checkpoint does."""
    original, calls = train._train_step, []

    def blind(*arguments, **options):
        loss, terms = original(*arguments, **options)
        calls.append(None)
        return loss * (math.nan if len(calls) == 8 else 1), terms

    monkeypatch.setattr(train, "_train_step", blind)
    with pytest.raises(FloatingPointError, match="the loss before step 10 is nan"):
        fit(
            network(),
            shuffled_batches(*data(), batch_size=16),
            loss_fn=loss_fn,
            steps=20,
            log_every=5,
            checkpoint=tmp_path / "a.json",
        )
    assert load_checkpoint(tmp_path / "a.json")[1]["step"] == 5


def test_gradient_that_is_no_number_ends_the_run_before_the_checkpoint(tmp_path):
    """The loss of such a step is finite; saved, its weights would not be."""
    calls = []

    def breaks(model, batch):
        calls.append(None)
        total, count = loss_fn(model, batch)
        if len(calls) == 10:
            # 0, with an infinite derivative
            total = total + (model[0].weight * 0).abs().sqrt().sum()
        return total, count

    for clip in (1.0, None):
        calls.clear()
        path = tmp_path / f"{clip}.json"
        with pytest.raises(
            FloatingPointError, match="the norm of the gradient is nan: a smaller lr"
        ):
            fit(
                network(),
                shuffled_batches(*data(), batch_size=16),
                loss_fn=breaks,
                steps=20,
                log_every=5,
                max_grad_norm=clip,
                checkpoint=path,
            )
        assert len(calls) == 10 and load_checkpoint(path)[1]["step"] == 5


def test_no_clipping_leaves_the_gradient_as_it_is():
    model, other = network(), network()
    for one, clip in ((model, None), (other, 1e9)):
        fit(
            one,
            shuffled_batches(*data(), batch_size=16),
            loss_fn=loss_fn,
            steps=3,
            max_grad_norm=clip,
        )
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_evaluation_sees_the_model_in_evaluation_mode():
    def evaluate(model):
        assert not model.training and not torch.is_grad_enabled()
        return {"answer": 42}

    history = fit(
        network(),
        shuffled_batches(*data(), batch_size=16),
        loss_fn=loss_fn,
        steps=4,
        log_every=2,
        evaluate=evaluate,
    )
    assert [record["answer"] for record in history] == [42, 42]


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(steps=0), r"steps \(0\) must be an integer of at least 1"),
        (dict(steps=2.5), r"steps \(2.5\) must be an integer"),
        (dict(steps=5, log_every=0), r"log_every \(0\) must be an integer of at least 1"),
        (dict(steps=5, warmup=6), r"warmup \(6\) must be at most steps \(5\)"),
        (dict(steps=5, lr=0.0), r"lr \(0.0\) must be positive"),
        (
            dict(steps=5, max_grad_norm=-1.0),
            r"max_grad_norm \(-1.0\) must be positive, or None",
        ),
        (
            dict(steps=5, schedule="linear"),
            r"schedule \('linear'\) must be 'cosine', 'inverse_sqrt' or 'constant'",
        ),
        (
            dict(steps=50, log_every=10, stop_after=15),
            r"stop_after \(15\) must be a multiple of log_every \(10\)",
        ),
    ],
)
def test_bad_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        fit(network(), shuffled_batches(*data(), batch_size=16), loss_fn=loss_fn, **wrong)


# --- checkpoints ------------------------------------------------------------------------------


def test_checkpoint_carries_tensors_exactly(tmp_path):
    tensors = {
        "model.a": torch.randn(3, 4),
        "b": torch.arange(5),
        "half": torch.randn(2).bfloat16(),
    }
    save_checkpoint(
        tmp_path / "deep" / "c.json", tensors, {"step": 7, "history": [{"loss": 0.1}]}
    )
    loaded, state = load_checkpoint(tmp_path / "deep" / "c.json")
    assert all(
        torch.equal(loaded[key], x) and loaded[key].dtype == x.dtype
        for key, x in tensors.items()
    )
    assert state["step"] == 7 and state["history"] == [{"loss": 0.1}]


def test_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    save_checkpoint(path, {"a": torch.ones(3)}, {"step": 1})
    monkeypatch.setattr(
        json, "dumps", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError):
        save_checkpoint(path, {"a": torch.zeros(3)}, {"step": 2})
    monkeypatch.undo()
    tensors, state = load_checkpoint(path)
    assert state["step"] == 1 and torch.equal(tensors["a"], torch.ones(3))


def test_two_runs_in_one_folder_keep_out_of_each_others_files(tmp_path):
    """One name may begin with the other."""
    for name in ("run.json", "run-2.json", "run-2-00000001.json"):
        save_checkpoint(tmp_path / name, {"a": torch.ones(3)}, {"step": 1})
    save_checkpoint(tmp_path / "run.json", {"a": torch.zeros(3)}, {"step": 2})
    for name, value in (("run.json", 0.0), ("run-2.json", 1.0), ("run-2-00000001.json", 1.0)):
        assert load_checkpoint(tmp_path / name)[0]["a"].tolist() == [value] * 3
    assert len(list(tmp_path.iterdir())) == 6


def test_broken_checkpoints_are_described(tmp_path):
    path = tmp_path / "c.json"
    with pytest.raises(FileNotFoundError):
        load_checkpoint(path)
    save_checkpoint(path, {"a": torch.ones(100)}, {"step": 1})
    file = next(tmp_path.glob("*.safetensors"))
    whole = file.read_bytes()
    for broken in (whole[:-50], whole[:4], b"PK\x03\x04 a zip file, such as torch.save writes"):
        file.write_bytes(broken)
        with pytest.raises(
            ValueError, match=r"c-00000001.safetensors is truncated or no safetensors file"
        ):
            load_checkpoint(path)
    file.unlink()
    with pytest.raises(
        ValueError, match=r"c.json belongs to .*c-00000001.safetensors, which is missing"
    ):
        load_checkpoint(path)
    for foreign in (
        "{",
        "[1, 2]",
        '{"step": 3}',
        '{"tensors": 3}',
        '{"tensors": {}}',
        '{"tensors": ""}',
        "\x00\x01",
    ):
        path.write_text(foreign)
        with pytest.raises(ValueError, match="c.json is not a checkpoint's JSON file"):
            load_checkpoint(path)


# --- several processes ------------------------------------------------------------------------

SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_train import network, data
from attnlib.train import fit, shuffled_batches
import torch.nn as nn, torch.nn.functional as F

def uneven(model, batch):  # counts differ between the processes: only some terms count
    x, y = batch
    keep = (x[:, 4] > 0.3).float()
    return (F.cross_entropy(model(x), y, reduction="none") * keep).sum(), keep.sum()

model = network()
model[3] = nn.Identity()
batches = shuffled_batches(*data(), batch_size=16)
history = fit(model, uneven, batches, steps=20, lr=1e-2, log_every=5, checkpoint={out!r})
"""


def test_two_processes_train_like_one(tmp_path):
    results = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}.json"
        script = tmp_path / f"run{processes}.py"
        script.write_text(SCRIPT.format(tests=str(ROOT / "tests"), out=str(out)))
        launch = [
            "-m",
            "accelerate.commands.launch",
            "--cpu",
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
        ]
        launch += [
            "--dynamo_backend",
            "no",
            "--num_processes",
            str(processes),
            "--main_process_port",
            "0",
        ]
        env = dict(os.environ, OMP_NUM_THREADS="1", TQDM_DISABLE="1", PYTHONPATH=str(ROOT))
        done = subprocess.run(
            [sys.executable, *launch, script],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(load_checkpoint(out))
    (one, state_one), (two, state_two) = results
    for key in one:
        torch.testing.assert_close(two[key], one[key], atol=1e-5, rtol=1e-4)
    assert [r["loss"] for r in state_two["history"]] == pytest.approx(
        [r["loss"] for r in state_one["history"]], rel=1e-4
    )


def test_peak_memory_is_that_of_the_tensors_that_live_together():
    numbers = 2**20  # 4 MiB in float32, beside which PyTorch's own small allocations vanish
    kept = []

    def call():
        kept.append(torch.ones(numbers))
        torch.ones(3 * numbers)  # released at once
        kept.append(kept[0] + 1)

    assert abs(peak_memory(call) / (4 * numbers) - 4) < 0.01
    levels = memory_levels(lambda: torch.ones(numbers).sum())
    assert levels[0] == 0 and abs(max(levels) / (4 * numbers) - 1) < 0.01 and levels[-1] < 4096


def rows(memory=30.0, optimized=False):
    """What `benchmarks/vision.py` writes of one case."""
    case = {
        "mode": "bfloat16",
        "pass": "forward",
        "batch": 4,
        "compiled": False,
        "memory": memory,
    }
    ours = {**case, "library": "attnlib", "ms": 100.0, "ratio": 1.0, "quartiles": [1.0, 1.0]}
    half = {
        **case,
        "library": "attnlib, optimized",
        "ms": 50.0,
        "ratio": 2.0,
        "quartiles": [2.0, 2.0],
    }
    timm = {
        **case,
        "library": "timm",
        "ms": 200.0,
        "memory": memory and 40.0,
        "ratio": 0.5,
        "quartiles": [0.4, 0.6],
        "rounds": 9,
    }
    if not optimized:
        return [ours, timm]
    return [
        ours,
        half,
        {**timm, "optimized": {"ratio": 0.25, "quartiles": [0.2, 0.3], "rounds": 9}},
    ]


def test_print_speed_prints_every_device_that_has_a_record(tmp_path, monkeypatch, capsys):
    found = {
        name: tmp_path / f"{name}.json"
        for name in ("vit_cpu", "vit_cpu_old", "vit_cuda", "swin_cuda")
    }
    for name, path in found.items():
        write_record(path, {"rows": rows(None if name == "vit_cpu_old" else 30.0)})
    monkeypatch.setattr(train, "find_records", lambda: found)
    train.print_speed("vit")
    printed = capsys.readouterr().out
    assert (
        printed.count("ours 100 ms") == 3
        and printed.count("timm          0.50 (0.40 to 0.60)") == 3
    )
    assert (
        printed.count("memory 0.75") == 2
        and printed.count("30 MiB") == 2
        and "not measured" not in printed
    )
    del found["vit_cuda"]
    train.print_speed("vit")
    assert capsys.readouterr().out.endswith("GPU: not measured\n")


def test_print_speed_prints_the_optimized_model_beside_the_plain_one(
    tmp_path, monkeypatch, capsys
):
    write_record(tmp_path / "vit_cpu.json", {"rows": rows(optimized=True)})
    monkeypatch.setattr(train, "find_records", lambda: {"vit_cpu": tmp_path / "vit_cpu.json"})
    train.print_speed("vit")
    first, case, timm, _ = capsys.readouterr().out.splitlines()
    assert case.endswith("batch 4: ours 100 ms, 30 MiB; optimized 50 ms, 30 MiB")
    assert timm.endswith("0.50 (0.40 to 0.60); optimized  0.25 (0.20 to 0.30); memory 0.75")


@pytest.mark.parametrize("package", ["accelerate", "safetensors", "tqdm"])
def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "attnlib.train")
    with pytest.raises(
        ImportError, match=rf'{package} is missing: pip install "attnlib\[train\]"'
    ):
        importlib.import_module("attnlib.train")


def test_an_unknown_record_is_answered_by_those_that_there_are():
    with pytest.raises(FileNotFoundError, match=r"name \('speed'\)"):
        train.read_record("speed")


@pytest.mark.parametrize("found", [{"loss": 1.0}, {"step": 1}, None, 0.5])
def test_what_evaluate_may_return(found):
    with pytest.raises(
        ValueError, match="evaluate returned .* must be a dict of numbers without 'step'"
    ):
        fit(
            network(),
            shuffled_batches(*data(), batch_size=16),
            loss_fn=loss_fn,
            steps=1,
            evaluate=lambda model: found,
        )


def test_a_batch_of_nothing():
    with pytest.raises(ValueError, match="loss_fn counted 0 terms"):
        fit(
            network(),
            shuffled_batches(*data(), batch_size=16),
            loss_fn=lambda model, batch: (model(batch[0]).sum() * 0, 0),
            steps=1,
        )


def test_a_checkpoint_is_json(tmp_path):
    for name in ("model.v2", "model"):
        with pytest.raises(ValueError, match="must end in '.json'"):
            fit(
                network(),
                shuffled_batches(*data(), batch_size=16),
                loss_fn=loss_fn,
                steps=1,
                checkpoint=tmp_path / name,
            )
        with pytest.raises(ValueError, match="must end in '.json'"):
            save_checkpoint(tmp_path / name, {}, {"step": 1})


# --- what a run leaves behind -----------------------------------------------------------------


def test_a_loss_that_asks_for_the_step_receives_it(tmp_path):
    seen = []

    def asks(model, batch, *, step):
        seen.append(step)
        return loss_fn(model, batch)

    def has_its_own(model, batch, step=7):
        assert step == 7
        return loss_fn(model, batch)

    batches = shuffled_batches(*data(), batch_size=16)
    run = dict(steps=6, log_every=2, checkpoint=tmp_path / "a.json")
    fit(network(), batches, loss_fn=asks, **run, stop_after=4)
    fit(network(), batches, loss_fn=asks, **run)
    assert seen == [0, 1, 2, 3, 4, 5]
    fit(network(), batches, loss_fn=has_its_own, steps=2)


def test_random_numbers_go_on_as_if_there_had_been_no_run():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    state = torch.get_rng_state()
    fit(model, shuffled_batches(*data(), batch_size=16), loss_fn=loss_fn, steps=3, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    fit(model, shuffled_batches(*data(), batch_size=16), loss_fn=loss_fn, steps=3, seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_networks_made_after_runs_differ():
    """Each draws other initial weights, although all runs have the same seed."""
    first_weights = []
    for _ in range(4):
        model = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.Linear(16, 3))
        first_weights.append(model[0].weight.detach().clone())
        fit(model, shuffled_batches(*data(), batch_size=16), loss_fn=loss_fn, steps=2)
    for i, weights in enumerate(first_weights):
        assert not any(torch.equal(weights, other) for other in first_weights[:i])


@pytest.mark.parametrize("evaluate", [None, lambda model: {"answer": 42}])
@pytest.mark.parametrize("training", [True, False])
def test_modes_are_as_before(evaluate, training):
    model = network().train(training)
    model[3].train(not training)
    modes = [module.training for module in model.modules()]
    batches = shuffled_batches(*data(), batch_size=16)
    fit(model, batches, loss_fn=loss_fn, steps=2, log_every=1, evaluate=evaluate)
    assert [module.training for module in model.modules()] == modes

    def fails(model, batch):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fit(model, batches, loss_fn=fails, steps=2)
    assert [module.training for module in model.modules()] == modes


def test_frozen_parts_stay_in_evaluation_mode():
    """A frozen BatchNorm and a Dropout in a frozen part; what learns is trained as ever."""
    frozen = nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 5))
    frozen.requires_grad_(False).eval()
    model = nn.Sequential(frozen, nn.Dropout(0.3), nn.BatchNorm1d(5), nn.Linear(5, 3))
    before = {name: x.clone() for name, x in frozen.state_dict().items()}
    modes = []

    def looks(model, batch):
        modes.append([module.training for module in model.modules()])
        return loss_fn(model, batch)

    batches = shuffled_batches(*data(), batch_size=16)
    run = dict(steps=4, log_every=2, evaluate=lambda model: {"answer": 42})
    fit(model, batches, loss_fn=looks, **run)
    for name, x in frozen.state_dict().items():
        assert torch.equal(x, before[name])
    expected = [module not in set(frozen.modules()) for module in model.modules()]
    assert modes == [expected] * 4
    # what learns is trained, even if the model came in evaluation mode
    fit(model.eval(), batches, loss_fn=looks, **run)
    assert modes == [expected] * 8
    # a frozen part that was left in training mode stays in it
    fit(model.train(), batches, loss_fn=looks, **run)
    assert modes[8:] == [[True] * len(expected)] * 4
    assert not torch.equal(frozen[0].running_mean, before["0.running_mean"])


@pytest.mark.usefixtures("fresh_accelerate")
def test_half_precision_ends_with_the_run():
    """Neither the model, nor the next run, nor the next accelerator stays in autocast."""
    model = network().eval()
    names = set(vars(model))
    batches = shuffled_batches(*data(), batch_size=16)
    x = data()[0]
    kinds = []

    def looks(model, batch):
        kinds.append(model[0](batch[0]).dtype)
        return loss_fn(model, batch)

    half = Accelerator(mixed_precision="bf16")
    fit(model, batches, loss_fn=looks, steps=2, accelerator=half)
    assert set(vars(model)) == names and "forward" not in vars(model)
    assert model(x).dtype == torch.float32
    with torch.no_grad():
        plain = x
        for module in model:
            plain = module(plain)
        assert torch.equal(model(x), plain)
    fit(model, batches, loss_fn=looks, steps=2)
    assert kinds == [torch.bfloat16] * 2 + [torch.float32] * 2
    # the caller's own accelerator is as it was, and holds on to nothing
    assert half.mixed_precision == "bf16" and Accelerator().mixed_precision == "bf16"
    fit(model, batches, loss_fn=looks, steps=2, accelerator=half)
    assert kinds[4:] == [torch.bfloat16] * 2
    assert half._models == [] and half._optimizers == []


@pytest.mark.usefixtures("fresh_accelerate")
def test_the_next_accelerator_may_have_another_precision():
    fit(network(), shuffled_batches(*data(), batch_size=16), loss_fn=loss_fn, steps=1)
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"


@pytest.mark.usefixtures("fresh_accelerate")
def test_an_earlier_accelerator_keeps_its_accumulation():
    earlier = Accelerator(gradient_accumulation_steps=8)
    fit(network(), shuffled_batches(*data(), batch_size=16), loss_fn=loss_fn, steps=1)
    assert earlier.gradient_accumulation_steps == 8


@pytest.mark.usefixtures("fresh_accelerate")
def test_fit_ignores_an_unfinished_accumulation():
    """Accelerate's optimizers do nothing in the midst of one, for all accelerators."""
    batches = shuffled_batches(*data(), batch_size=16)
    earlier = Accelerator(gradient_accumulation_steps=2)
    other = network()
    earlier.prepare(other)
    with earlier.accumulate(other):
        assert not earlier.sync_gradients
        model, expected = network(), network()
        fit(model, batches, loss_fn=loss_fn, steps=3)
        with pytest.raises(ValueError, match=r"accelerator.gradient_accumulation_steps \(2\)"):
            fit(model, batches, loss_fn=loss_fn, steps=3, accelerator=earlier)
        earlier.gradient_accumulation_steps = 1
        with pytest.raises(ValueError, match=r"accelerator.sync_gradients \(False\)"):
            fit(model, batches, loss_fn=loss_fn, steps=3, accelerator=earlier)
    optimizer = adamw(expected, 1e-3, (0.9, 0.98), 0.01)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * learning_rate(step, steps=3, warmup=0, schedule="cosine")
        torch.manual_seed(step)
        x, y = batches(step)
        optimizer.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
    for a, b in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(gradient_accumulation_steps=8),
            r"accelerator.gradient_accumulation_steps \(8\) must be 1",
        ),
        (
            dict(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)),
            r"accelerator.dispatch_batches \(True\) must be None or False",
        ),
    ],
)
def test_settings_of_an_accelerator_that_fit_does_not_follow(options, message):
    model = network()
    before = [x.clone() for x in model.parameters()]
    with pytest.raises(ValueError, match=message):
        fit(
            model,
            shuffled_batches(*data(), batch_size=16),
            loss_fn=loss_fn,
            steps=3,
            accelerator=Accelerator(**options),
        )
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    "name, value, message",
    [
        ("mixed_precision", "fp8", r"accelerator.mixed_precision \('fp8'\) must be 'no'"),
        (
            "distributed_type",
            DistributedType.FSDP,
            r"accelerator.distributed_type \('FSDP'\) must be 'NO'",
        ),
        (
            "distributed_type",
            DistributedType.DEEPSPEED,
            r"accelerator.distributed_type \('DEEPSPEED'\) must be 'NO'",
        ),
    ],
)
def test_kinds_of_accelerators_that_fit_does_not_follow(monkeypatch, name, value, message):
    """These need packages or processes that a test does not have."""
    monkeypatch.setattr(Accelerator, name, value)
    batches = shuffled_batches(*data(), batch_size=16)
    with pytest.raises(ValueError, match=message):
        fit(network(), batches, loss_fn=loss_fn, steps=3, accelerator=Accelerator())


@pytest.mark.usefixtures("fresh_accelerate")
def test_settings_of_loaders_and_schedulers_change_nothing():
    """`fit` has neither."""
    batches = shuffled_batches(*data(), batch_size=16)
    found = []
    for options in (
        {},
        dict(step_scheduler_with_optimizer=False),
        dict(dataloader_config=DataLoaderConfiguration(split_batches=True)),
        dict(dataloader_config=DataLoaderConfiguration(even_batches=False)),
        dict(rng_types=["torch"]),
    ):
        model = network()
        fit(model, batches, loss_fn=loss_fn, steps=3, accelerator=Accelerator(**options))
        found.append(model[0].weight)
    assert all(torch.equal(weight, found[0]) for weight in found)


def test_a_checkpoint_leaves_the_files_of_others(tmp_path):
    """Their names look like those of a checkpoint's tensors."""
    others = ["vit-2.safetensors", "vit-00000001.safetensors", "vit-12345678.safetensors"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "vit-7.shards").mkdir()
    (tmp_path / "vit-7.shards" / "a").write_bytes(b"mine")
    for step in (10, 20, 30):
        save_checkpoint(tmp_path / "vit.json", {"a": torch.full((3,), step)}, {"step": step})
    assert load_checkpoint(tmp_path / "vit.json")[0]["a"].tolist() == [30] * 3
    for name in (*others, "vit-7.shards/a"):
        assert (tmp_path / name).read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("name", ["../mine.safetensors", "mine.safetensors", "", 3, None])
def test_a_checkpoint_deletes_nothing_that_a_foreign_file_names(tmp_path, name):
    folder = tmp_path / "runs"
    folder.mkdir()
    for path in (tmp_path / "mine.safetensors", folder / "mine.safetensors"):
        path.write_bytes(b"mine")
    (folder / "a.json").write_text(json.dumps({"tensors": name}))
    save_checkpoint(folder / "a.json", {"a": torch.ones(3)}, {"step": 1})
    for path in (tmp_path / "mine.safetensors", folder / "mine.safetensors"):
        assert path.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "loss, message",
    [
        (
            lambda model, batch: model(batch[0])[:2, 0],
            r"loss_fn returned a Tensor of shape \(2,\)",
        ),
        (
            lambda model, batch: (model(batch[0]).sum(), 16, 0),
            r"loss_fn returned a tuple of length 3",
        ),
        (lambda model, batch: None, "loss_fn returned None"),
        (
            lambda model, batch: (model(batch[0]), 16),
            r"loss_fn returned a Tensor of shape \(16, 3\)",
        ),
        (lambda model, batch: (0.5, 16), r"loss_fn returned 0.5"),
        (3, r"loss_fn \(3\) must be a function of a model and a batch"),
    ],
)
def test_what_a_loss_may_return(loss, message):
    with pytest.raises(TypeError, match=message):
        fit(network(), shuffled_batches(*data(), batch_size=16), loss_fn=loss, steps=1)


@pytest.mark.parametrize("train", [list(range(3)), None, "text", torch.ones(3, 2), {}])
def test_what_is_no_data_is_refused(train):
    with pytest.raises(TypeError, match=rf"train \(of type {type(train).__name__}\)"):
        fit(network(), train, loss_fn=loss_fn, steps=1)


def test_a_finished_run_says_how_to_train_for_longer(tmp_path):
    run = dict(log_every=5, checkpoint=tmp_path / "a.json")
    fit(network(), shuffled_batches(*data(), batch_size=16), loss_fn=loss_fn, steps=5, **run)
    with pytest.raises(
        ValueError,
        match=r"steps \(10\)",
    ):
        fit(
            network(),
            shuffled_batches(*data(), batch_size=16),
            loss_fn=loss_fn,
            steps=10,
            **run,
        )
