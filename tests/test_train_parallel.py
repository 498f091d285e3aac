"""A model that is shared among processes trains like one that is whole, its checkpoints go on
with any number of them, and a run survives the death of a process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate import Accelerator
from processes import SECONDS, SHARDED, together
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from attnlib import train
from attnlib.beit import VectorQuantizer
from attnlib.gpt import GPT, GPTConfig, text_loss
from attnlib.train import fit, load_checkpoint, save_checkpoint, shard_blocks

ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("quiet")


# --- the run ----------------------------------------------------------------------------------

RUN = dict(steps=20, lr=1e-2, warmup=2, log_every=5, seed=3)


def model_of(seed=0, **changes):
    """A GPT with a matrix that is used twice, one that is frozen, and one that is not used."""
    torch.manual_seed(seed)
    shape = dict(vocab_size=20, block_size=8, n_layer=2, n_head=2, n_embd=16, norm="layer")
    model = GPT(GPTConfig(**{**shape, **changes}))
    model.h[0].mlp.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(4, 2))
    return model


def batches(step, rows=17):  # which neither 2 nor 3 nor 4 processes can share equally
    generator = torch.Generator().manual_seed(step)
    start, stride = torch.randint(20, (2, rows, 1), generator=generator)
    return ((start + stride * torch.arange(8)) % 20,)


def evaluate(model):
    total, terms = text_loss(model, batches(1000))
    return {"test_loss": total / terms}


def mean_loss(model, batch):
    """A wrong `loss_fn`: the mean of the processes' means."""
    total, terms = text_loss(model, batch)
    return total / terms, 1


def train_once(path, parallel, stop=None, loss_fn=text_loss, precision="no", **changes):
    """A run in a process; the first also notes how much of the model it has."""
    model = model_of(seed=0 if dist.get_rank() == 0 else 1, **changes)  # those of rank 0 count
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    options = dict(evaluate=evaluate, checkpoint=path, parallel=parallel, stop_after=stop)
    fit(model, batches, loss_fn=loss_fn, **RUN, **options, accelerator=accelerator)
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    note = [dist.get_world_size(), sum(x.numel() for x in own)]
    path.with_suffix(f".rank{dist.get_rank()}").write_text(json.dumps(note))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing has disturbed, on one process: tensors and history."""
    path = tmp_path_factory.mktemp("whole") / "run.json"
    options = dict(evaluate=evaluate, checkpoint=path, accelerator=Accelerator(cpu=True))
    fit(model_of(), batches, loss_fn=text_loss, **RUN, **options)
    tensors, state = load_checkpoint(path)
    return tensors, state["history"]


def apart(path, whole):
    """The largest differences of tensors and history from those of the undisturbed run."""
    (tensors, state), (expected, history) = load_checkpoint(path), whole
    assert tensors.keys() == expected.keys()
    assert [r["step"] for r in state["history"]] == [r["step"] for r in history]
    tensors = max((x - expected[name]).abs().max().item() for name, x in tensors.items())
    pairs = [(a[key], b[key]) for a, b in zip(state["history"], history) for key in a]
    return tensors, max(abs(a - b) for a, b in pairs)


@SHARDED
@pytest.mark.parametrize("ranks", [2, 3])
def test_shared_model_trains_like_a_whole_one(ranks, tmp_path, whole):
    path = tmp_path / "run.json"
    assert together(ranks, tmp_path, train_once, path, "fsdp") == [0] * ranks
    tensors, history = apart(path, whole)
    assert tensors < 1e-5 and history < 1e-6, (tensors, history)
    notes = [json.loads(file.read_text()) for file in tmp_path.glob("run.rank*")]
    total = sum(p.numel() for p in model_of().parameters())
    assert sum(own for _, own in notes) == total
    assert max(own for _, own in notes) < 1.03 * total / ranks + 4 * 16  # rows that are left


def rows_of(step):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return x, 3 * x.roll(1, 1) + x.square()  # which ranks see differently


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(), y.numel()


def train_with_batch_norm(folder):
    """Runs in a process, which then writes down its own buffers."""
    for name, parallel, stops in (
        ("whole", "ddp", (None,)),
        ("shared", "fsdp", (None,)),
        ("resumed", "fsdp", (10, None)),
    ):
        for stop in stops:
            torch.manual_seed(0)
            norm = nn.BatchNorm1d(8)
            first = nn.Linear(4, 8, bias=False)  # a bias would have no gradient but noise
            model = nn.Sequential(first, norm, nn.ReLU(), nn.Linear(8, 4))
            path = folder / f"{name}.json"
            options = dict(checkpoint=path, parallel=parallel, stop_after=stop)
            fit(
                model,
                rows_of,
                loss_fn=squares,
                **RUN,
                **options,
                accelerator=Accelerator(cpu=True),
            )
            torch.save(dict(norm.named_buffers()), folder / f"{name}.rank{dist.get_rank()}")


@SHARDED
def test_buffers_that_change_are_those_of_the_first_process(tmp_path):
    assert together(2, tmp_path, train_with_batch_norm, tmp_path) == [0, 0]
    stored = {}
    for name in ("whole", "shared", "resumed"):
        stored[name], _ = load_checkpoint(tmp_path / f"{name}.json")
    for name in ("shared", "resumed"):
        for rank in range(2):  # neither has drifted
            for key, x in torch.load(tmp_path / f"{name}.rank{rank}").items():
                assert torch.equal(x, stored[name][f"model.1.{key}"]), (name, rank, key)
    for key, x in stored["shared"].items():
        torch.testing.assert_close(x, stored["whole"][key], rtol=1e-3, atol=1e-5)
        assert torch.equal(x, stored["resumed"][key]), key


def quantizers():
    """A quantizer that starts from random codes, and one that starts by k-means."""
    torch.manual_seed(0)
    first = VectorQuantizer(4, 2, decay=0.5, kmeans_steps=0)
    return first, VectorQuantizer(9, 2, kmeans_steps=3)


def vectors():
    return torch.randn(9, 2, generator=torch.Generator().manual_seed(1))


def quantize_together(folder):
    """Two ranks with 5 and 4 of 9 vectors; DDP would hide that their codes differ."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    for name, quantizer in zip(("random", "k-means"), quantizers()):
        torch.manual_seed(10 + rank)  # as in `fit`, the ranks draw different numbers
        quantizer(vectors()[rank::2])
        torch.save(quantizer.embedding, folder / f"{name}.rank{rank}")


def test_codes_are_moved_by_the_vectors_of_all_processes(tmp_path):
    assert together(2, tmp_path, quantize_together, tmp_path) == [0, 0]
    found = {}
    for name in ("random", "k-means"):
        found[name], other = (torch.load(tmp_path / f"{name}.rank{rank}") for rank in range(2))
        assert torch.equal(found[name], other)
    alone, _ = quantizers()
    alone(vectors())
    torch.testing.assert_close(found["random"], alone.embedding)
    # with as many codes as vectors, k-means has them all, in some order
    unit = nn.functional.normalize(vectors(), dim=-1)
    cosines = found["k-means"] @ unit.T
    torch.testing.assert_close(cosines.amax(0), torch.ones(9))
    torch.testing.assert_close(cosines.amax(1), torch.ones(9))


@SHARDED
def test_mean_of_means_is_another_loss(tmp_path, whole):
    """Control: what the sum and the count of `loss_fn` prevent."""
    path = tmp_path / "run.json"
    arguments = (path, "fsdp", None, mean_loss)
    assert together(2, tmp_path, train_once, *arguments) == [0, 0]
    assert apart(path, whole)[1] > 1e-3


@SHARDED
def test_half_precision_is_close_and_weights_stay_in_float32(tmp_path, whole):
    path = tmp_path / "run.json"
    arguments = (path, "fsdp", None, text_loss, "bf16")
    assert together(2, tmp_path, train_once, *arguments) == [0, 0]
    tensors, history = apart(path, whole)
    assert 1e-5 < history < 3e-2
    assert {x.dtype for x in load_checkpoint(path)[0].values()} == {torch.float32}


# --- checkpoints ------------------------------------------------------------------------------


@SHARDED
def test_checkpoint_goes_on_with_another_number_of_processes(tmp_path, whole):
    """4, 2, 1, 3: from a folder and from a file, with the model shared and whole."""
    path = tmp_path / "run.json"
    assert together(4, tmp_path, train_once, path, "fsdp", 5) == [0] * 4
    folder = tmp_path / "run-00000005.shards"
    files = sorted(file.name for file in folder.iterdir())
    assert len(files) == 4 and all(name.endswith(".safetensors") for name in files)  # no pickle
    assert together(2, tmp_path, train_once, path, "fsdp", 10) == [0] * 2
    assert not folder.exists()  # the older one
    options = dict(evaluate=evaluate, checkpoint=path, accelerator=Accelerator(cpu=True))
    fit(model_of(1), batches, loss_fn=text_loss, **RUN, **options, stop_after=15)
    assert (tmp_path / "run-00000015.safetensors").is_file()
    assert together(3, tmp_path, train_once, path, "fsdp", 20) == [0] * 3
    tensors, history = apart(path, whole)
    assert tensors < 1e-5 and history < 1e-6, (tensors, history)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes save at step 5."""
    path = tmp_path_factory.mktemp("folder")
    assert together(2, path, train_once, path / "run.json", "fsdp", 5) == [0, 0]
    return path


def copy_of(folder, to):
    to.mkdir()
    (to / "run-00000005.shards").mkdir()
    for file in [folder / "run.json", *folder.glob("*.shards/*")]:
        (to / file.relative_to(folder)).write_bytes(file.read_bytes())
    return to / "run.json", to / "run-00000005.shards"


@SHARDED
def test_broken_folders_are_described(folder, tmp_path):
    path, shards = copy_of(folder, tmp_path / "a")
    load_checkpoint(path)
    one = sorted(shards.iterdir())[1]
    one.write_bytes(one.read_bytes()[:-50])
    with pytest.raises(ValueError, match="00005.shards is truncated or no safetensors file"):
        load_checkpoint(path)
    one.unlink()
    with pytest.raises(ValueError, match=r"00005.shards has \d+ of \d+ numbers:"):
        load_checkpoint(path)


@SHARDED
@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(n_embd=8), "(?s)another model: .*size mismatch for wte.weight"),
        (dict(n_layer=1), '(?s)another model: .*Unexpected key.* "h.1'),
        (dict(position="learned"), '(?s)another model: .*Missing key.* "wpe.weight'),
    ],
)
def test_folder_of_another_model_is_refused(folder, tmp_path, changes, message):
    path, _ = copy_of(folder, tmp_path / "a")
    model = model_of(**changes)
    before = [p.clone() for p in model.parameters()]
    options = dict(evaluate=evaluate, checkpoint=path, accelerator=Accelerator(cpu=True))
    with pytest.raises(ValueError, match=message):
        fit(model, batches, loss_fn=text_loss, **RUN, **options)
    assert all(map(torch.equal, before, model.parameters()))


def test_older_tensors_are_removed_and_nothing_else(tmp_path):
    kept = ["run-2", "run-2.safetensors.d", "run-x.shards", "other-00000001.shards"]
    kept += ["run-7.shards", "run-00000003.shards"]
    for name in [*kept, "run-00000001.shards"]:
        (tmp_path / name).mkdir()
    # only this one is the folder of the older checkpoint
    (tmp_path / "run.json").write_text('{"tensors": "run-00000001.shards"}')
    save_checkpoint(tmp_path / "run.json", {"a": torch.ones(1)}, {"step": 2})
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {*kept, "run.json", "run-00000002.safetensors"}


# --- death ------------------------------------------------------------------------------------


def die_while_saving(path):
    """Rank 0 dies when the folder of step 10 is complete, and the JSON file the old one."""
    point_to = train._point_to

    def fatal(name, *arguments):
        if "-00000010" in name:
            os.kill(os.getpid(), signal.SIGKILL)
        point_to(name, *arguments)

    train._point_to = fatal
    train_once(path, "fsdp")


@SHARDED
def test_death_while_saving_loses_nothing(tmp_path, whole):
    path = tmp_path / "run.json"
    first, second = together(2, tmp_path, die_while_saving, path)
    assert first == -signal.SIGKILL and second != 0
    assert (tmp_path / "run-00000010.shards").exists()
    assert json.loads(path.read_text())["step"] == 5
    assert together(2, tmp_path, train_once, path, "fsdp") == [0, 0]
    tensors, history = apart(path, whole)
    assert tensors < 1e-5 and history < 1e-6, (tensors, history)


SCRIPT = """
import os, signal, sys
from pathlib import Path
import test_train_parallel as run
from attnlib.train import fit

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]

def batches(step):
    with (folder / f"log{rank}").open("a") as log:
        print(attempt, step, file=log)
    if (attempt, rank, step) == ("0", "1", 7):
        os.kill(os.getpid(), signal.SIGKILL)
    return run.batches(step)

fit(run.model_of(dropout=0.2), run.text_loss, batches, **run.RUN, evaluate=run.evaluate,
    checkpoint=folder / "run.json", parallel="fsdp")
"""


@SHARDED
def test_killed_process_changes_nothing(tmp_path):
    """torchrun starts all again; the end is that of a run which nothing has disturbed."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
    # the store of the first attempt would give the second one the addresses of the dead
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    launch += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.1"]
    done = subprocess.run(
        [sys.executable, *launch, script, tmp_path],
        env=env,
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = (tmp_path / "log1").read_text().splitlines()
    assert log == [f"0 {step}" for step in range(8)] + [f"1 {step}" for step in range(5, 20)]
    path = tmp_path / "undisturbed.json"
    assert together(2, tmp_path, train_with_dropout, path) == [0, 0]
    tensors, state = load_checkpoint(path)
    assert apart(tmp_path / "run.json", (tensors, state["history"])) == (0.0, 0.0)


def train_with_dropout(path):
    train_once(path, "fsdp", dropout=0.2)


# --- bad input, and what a GPU without bfloat16 does ------------------------------------------


def test_unknown_parallel():
    with pytest.raises(ValueError, match=r"parallel \('zero'\)"):
        fit(model_of(), batches, loss_fn=text_loss, steps=1, parallel="zero")


def test_old_pytorch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.1+cpu"))
    with pytest.raises(ValueError, match=r"needs PyTorch 2.9 or newer; this is 2.8.1\+cpu"):
        fit(model_of(), batches, loss_fn=text_loss, steps=1, parallel="fsdp")


def shard_two_blocks_with_one_matrix():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"two blocks: \[\('1.weight', '0.weight'\)\]"):
        shard_blocks(model)


@SHARDED
def test_matrix_of_two_blocks_is_refused(tmp_path):
    assert together(1, tmp_path, shard_two_blocks_with_one_matrix) == [0]


def test_float16_skips_steps_that_overflow_and_resumes_its_scale(tmp_path):
    """As on a GPU without bfloat16, but with a scaler for the CPU."""
    norms = []

    def run(path, **options):
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=4)
        model = model_of()
        hook = lambda p: norms.append(p.grad.isfinite().all().item())  # noqa: E731
        model.lm_head.weight.register_post_accumulate_grad_hook(hook)
        settings = dict(checkpoint=path, accelerator=accelerator, **options)
        history = fit(model, batches, loss_fn=overflowing, **RUN, **settings)
        return history, model.state_dict(), accelerator.scaler.state_dict()

    whole = run(tmp_path / "a.json")
    assert not norms[0] and any(norms)  # the first steps were skipped
    assert whole[2]["scale"] < 2.0**30
    run(tmp_path / "b.json", stop_after=10)
    again = run(tmp_path / "b.json")
    assert again[0] == whole[0] and again[2] == whole[2]
    assert all(map(torch.equal, again[1].values(), whole[1].values()))


def overflowing(model, batch):
    """A loss whose gradient passes through float16, as in autocast."""
    total, terms = text_loss(model, batch)
    return Half.apply(total), terms


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.half().float()
