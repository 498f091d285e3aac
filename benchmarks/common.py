"""What the benchmarks share: where they ran, turns, medians with quartiles, and the record."""

import random
import statistics
import time

import torch

from attnlib import train
from attnlib.train import write_record
from tools import torchvision_ops  # noqa: F401  before any peer that imports torchvision

OURS, OPTIMIZED = "attnlib", "attnlib, optimized"  # names in every record


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def take_turns(calls, repeats, device, seed=0):
    """Milliseconds of some functions, {name: [one for each round]}.

    A round calls each of them once, in an order drawn anew: a busy machine slows all alike, and
    none always runs behind the same other, whose data are still in the cache.
    """
    times, names, draw = {name: [] for name in calls}, list(calls), random.Random(seed)
    for _ in range(repeats):
        draw.shuffle(names)
        for name in names:
            synchronize(device)
            began = time.perf_counter()
            calls[name]()
            synchronize(device)
            times[name].append(1000 * (time.perf_counter() - began))
    return times


def ratio(times, others):
    """The median and the quartiles of time / other time over the rounds, and their number."""
    ratios = sorted(a / b for a, b in zip(times, others, strict=True))
    quarter = len(ratios) // 4
    return {
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
        "rounds": len(ratios),
    }


def compared(times, name):
    """What a row records of a contestant: its median, and the ratios ours / its.

    `ratio` and `quartiles` are those of the plain model; those of the optimized one, where it
    has taken part under the name "attnlib, optimized", stand under "optimized".
    """
    row = {"ms": round(statistics.median(times[name]), 2), **ratio(times[OURS], times[name])}
    if OPTIMIZED in times:
        row["optimized"] = ratio(times[OPTIMIZED], times[name])
    return row


def peak_memory(call, device):
    """MiB by which a call raises the memory in use at most.

    A first call is not counted: it makes what is made only once.
    """
    call()
    return round(train.peak_memory(call, device) / 2**20, 3)


def write(folder, name, device, record):
    """Put a record into `folder`/NAME_DEVICE.json, with the machine that made it."""
    path = folder / f"{name}_{device}.json"
    write_record(path, record, device)
    print(f"recorded in {path}")
