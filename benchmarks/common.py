"""What the benchmarks share: where they ran, turns, medians with quartiles, and the file a record goes to."""
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import torchvision_ops  # noqa: E402, F401  (before any peer that imports torchvision)

from attnlib import train  # noqa: E402
from attnlib.train import write_record  # noqa: E402


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def take_turns(calls, repeats, device):
    """Milliseconds of some functions, {name: [...]}: one call of each in turn, so that a busy machine slows all."""
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            synchronize(device)
            began = time.perf_counter()
            call()
            synchronize(device)
            times[name].append(1000 * (time.perf_counter() - began))
    return times


def ratio(times, others):
    """The median and the quartiles of time / other time over the rounds."""
    ratios = sorted(a / b for a, b in zip(times, others, strict=True))
    quarter = len(ratios) // 4
    return {"ratio": round(statistics.median(ratios), 3),
            "quartiles": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)]}


def peak_memory(call, device):
    """MiB by which a call raises the memory in use at most; a first call, not counted, makes what is made only once."""
    call()
    return round(train.peak_memory(call, device) / 2**20, 3)


def write(folder, name, device, record):
    """Put a record into `folder`/NAME_DEVICE.json, with the machine that made it."""
    path = folder / f"{name}_{device}.json"
    write_record(path, record, device)
    print(f"recorded in {path}")
