"""Runs on a `DataLoader` with workers: killed, and on several processes."""

import os
import signal

import pytest
import torch
import torch.nn as nn
from processes import SHARDED, together
from torch.utils.data import DataLoader, Dataset

from attnlib.train import CrossEntropy, fit, load_checkpoint


class Noisy(Dataset):
    """Points whose class is their half plane, with noise that a worker draws."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        point = torch.full((1,), i / 20 - 1)
        return torch.cat([point, torch.rand(3)]), int(i >= 20)


def train(path, parallel="ddp", stop_after=None, killed_at=None):
    """Two epochs of five steps; the noise of the images is drawn by the workers."""
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    cross_entropy = CrossEntropy()

    def loss_fn(model, batch, step):
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return cross_entropy(model, batch)

    run = dict(epochs=2, lr=1e-2, seed=4, checkpoint=path, parallel=parallel)
    fit(model, loader, loss_fn=loss_fn, stop_after=stop_after, **run)


def weights(path):
    tensors, state = load_checkpoint(path)
    assert state["step"] == 10
    return {name: x for name, x in tensors.items() if name.startswith("model.")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one process learns that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    assert together(1, folder, train, folder / "run.json") == [0]
    return weights(folder / "run.json")


def test_a_killed_run_ends_as_one_that_nothing_disturbs(tmp_path, whole):
    """Bit for bit; it dies in the midst of an epoch, with batches that workers have loaded."""
    path = tmp_path / "run.json"
    assert together(1, tmp_path, train, path, "ddp", None, 7) == [-signal.SIGKILL]
    assert together(1, tmp_path, train, path) == [0]
    for name, x in weights(path).items():
        assert torch.equal(x, whole[name]), name


def test_two_processes_go_on_where_one_stopped(tmp_path, whole):
    """And learn what one learns, up to the rounding of sums."""
    _in_two_parts(tmp_path, whole, (1, "ddp"), (2, "ddp"))


@SHARDED
def test_one_process_goes_on_with_the_shards_of_two(tmp_path, whole):
    _in_two_parts(tmp_path, whole, (2, "fsdp"), (1, "ddp"))


def _in_two_parts(folder, whole, first, then):
    path = folder / "run.json"
    processes, parallel = first
    assert together(processes, folder, train, path, parallel, 5) == [0] * processes
    processes, parallel = then
    assert together(processes, folder, train, path, parallel) == [0] * processes
    found = weights(path)
    assert found.keys() == whole.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, whole[name], rtol=1e-4, atol=1e-5)
