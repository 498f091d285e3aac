"""What was run for 55_scaling: `python -m benchmarks.scaling COMMAND --out FOLDER`.

    links    time messages and all-reduces between two processes of this machine
    traffic  count what one rank of 4, 64, and 512 passes to collectives in a step with FSDP

The records are FOLDER/scaling_COMMAND.json.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from attnlib.gpt import GPT, GPTConfig
from attnlib.train import shard_blocks
from benchmarks.runner import Commands


def time_sizes(rank, folder, sizes, repeats):
    """Let this process be a rank of two, and write the `seconds` of messages of these bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
    found = [seconds(size // 4, repeats) for size in sizes]
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def seconds(numbers, repeats):
    """Least and median time of a message and an all-reduce of so many numbers, in turns."""
    x = torch.ones(numbers)
    rank = dist.get_rank()

    def there_and_back():
        for source in (0, 1):
            dist.send(x, 1 - rank) if rank == source else dist.recv(x, 1 - rank)

    calls = {"message": (there_and_back, 2), "all-reduce": (lambda: dist.all_reduce(x), 1)}
    times = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, (call, messages) in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) / messages)
    return {
        name: (min(found[2:]), statistics.median(found[2:])) for name, found in times.items()
    }


def fitted(sizes, times):
    """α and β that make the worst relative error of α + βn small, and that error.

    Each point counts relative to itself: least squares of (α + βn) / t against 1.
    """
    n, t = (torch.tensor(x, dtype=torch.float64) for x in (sizes, times))
    rows = torch.stack([1 / t, n / t], 1)
    alpha, beta = torch.linalg.lstsq(rows, torch.ones(len(n), 1, dtype=n.dtype)).solution[:, 0]
    return alpha.item(), beta.item(), ((alpha + beta * n) / t - 1).abs().max().item()


def links(arguments):
    """Time messages and all-reduces between two processes of this machine.

    Messages have 256 bytes to 16 MB, sent there and back, and summed by all-reduce; the line
    α + βn is fitted to each of them.
    """
    sizes = [2**i for i in range(8, 16 if arguments.tiny else 25)]  # bytes
    repeats = 3 if arguments.tiny else 100
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(time_sizes, (folder, sizes, repeats), nprocs=2)
        found = json.loads(Path(folder, "seconds.json").read_text())
    rows = {}
    for name in ("message", "all-reduce"):
        least, median = zip(*(row[name] for row in found))
        alpha, beta, miss = fitted(sizes, least)
        rows[name] = dict(
            least=[round(1e3 * t, 4) for t in least],
            median=[round(1e3 * t, 4) for t in median],
            **dict(alpha=alpha, beta=beta, miss=round(miss, 3)),
        )
        print(f"{name}: {1e3 * alpha:.2f} ms, {1e-9 / beta:.2f} GB/s, worst miss {miss:.0%}")
    return {"tiny": arguments.tiny, "bytes": sizes, "calls": rows}


class Count(TorchDispatchMode):
    """Adds up the numbers that collectives are given or give, whichever is more."""

    def __init__(self):
        super().__init__()
        self.numbers = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name.startswith("c10d::") and "barrier" not in name:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            size = max((x.numel() for x in tensors), default=0)
            self.numbers[name] = self.numbers.get(name, 0) + size
        return function(*args, **(kwargs or {}))


def step_numbers(ranks, config):
    """Numbers in the collectives of one rank's step, in units of the model's parameters."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        model = GPT(config)
        parameters = sum(p.numel() for p in model.parameters())
        blocks = sum(p.numel() for p in model.h.parameters())
        shard_blocks(model)
        held = sum(p.to_local().numel() for p in model.parameters())
        tokens = torch.zeros(1, config.block_size, dtype=torch.long)
        with Count() as count:
            model(tokens).sum().backward()
    finally:
        dist.destroy_process_group()
    numbers = {name: round(n / parameters, 4) for name, n in sorted(count.numbers.items())}
    return dict(
        ranks=ranks, parameters=parameters, blocks=blocks, held=held, collectives=numbers
    )


def traffic(arguments):
    """Count what one rank of 4, 64, and 512 passes to collectives in a step with FSDP.

    One process plays the rank; PyTorch's "fake" group answers for the others.
    """
    cases = [(64, 4), (64, 64)] if arguments.tiny else [
        (1024, 4), (1024, 64), (1024, 512), (768, 512)]  # fmt: skip
    rows = []
    for width, ranks in cases:
        config = GPTConfig(
            vocab_size=8192,
            block_size=64,
            n_layer=2 if arguments.tiny else 12,
            n_head=width // 64,
            n_embd=width,
            n_inner=width * 5 // 2,
            tied=False,
        )
        rows.append({"width": width, **step_numbers(ranks, config)})
        print(rows[-1])
    return {"tiny": arguments.tiny, "rows": rows}


def main(arguments=None):
    commands = Commands(__doc__)
    commands.experiment("links", links, record="scaling_links")
    commands.experiment("traffic", traffic, record="scaling_traffic")
    commands.run(arguments)


if __name__ == "__main__":
    main()
