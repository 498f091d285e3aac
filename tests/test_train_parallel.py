"""A model that is shared among processes trains like one that is whole, its checkpoints go on
with any number of them, and a run survives the death of a process."""

import datetime
import json
import multiprocessing
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
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from attnlib import train
from attnlib.gpt import GPT, GPTConfig, text_loss
from attnlib.train import fit, load_checkpoint, save_checkpoint, shard_blocks

ROOT = Path(__file__).parent.parent
SECONDS = 60  # for all that processes do together; quiet machines need five
SHARDED = pytest.mark.skipif(torch.__version__ < (2, 9), reason="needs PyTorch 2.9")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- processes --------------------------------------------------------------------------------


def rank_of(folder, rank, ranks, function, arguments):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "TQDM_DISABLE": "1"}
    wait = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", f"file://{folder}/group", wait, ranks, rank)
    function(*arguments)
    dist.destroy_process_group()


def together(ranks, folder, function, *arguments):
    """Run a function on so many processes; their exit codes, of which 0 is good."""
    context = multiprocessing.get_context("forkserver")  # they share what takes long to import
    context.set_forkserver_preload(["attnlib.gpt", "attnlib.train", "torch._dynamo"])
    (folder / "group").unlink(missing_ok=True)
    arguments = [(folder, rank, ranks, function, arguments) for rank in range(ranks)]
    processes = [context.Process(target=rank_of, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


# --- the run ----------------------------------------------------------------------------------

RUN = dict(steps=20, lr=1e-2, warmup=2, every=5, seed=3)


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
    fit(model, loss_fn, batches, **RUN, **options, accelerator=accelerator)
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    note = [dist.get_world_size(), sum(x.numel() for x in own)]
    path.with_suffix(f".rank{dist.get_rank()}").write_text(json.dumps(note))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing has disturbed, on one process: tensors and history."""
    path = tmp_path_factory.mktemp("whole") / "run.json"
    options = dict(evaluate=evaluate, checkpoint=path, accelerator=Accelerator(cpu=True))
    fit(model_of(), text_loss, batches, **RUN, **options)
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
