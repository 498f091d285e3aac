"""What the benchmarks share: where they ran, turns, medians with quartiles, and the record."""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from attnlib import recipes, train
from attnlib.train import write_record
from tools import torchvision_ops  # noqa: F401  before any peer that imports torchvision

OURS, OPTIMIZED = "attnlib", "attnlib, optimized"  # names in every record


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def take_turns(calls, repeats, device, seed=0, clock=time.perf_counter):
    """Milliseconds of some functions, {name: [one for each round]}.

    A round calls each of them once, in an order drawn anew: a busy machine slows all alike, and
    none always runs behind the same other, whose data are still in the cache. With
    ``clock=time.process_time`` the time in which other programs have the processor is left out.
    """
    times, names, draw = {name: [] for name in calls}, list(calls), random.Random(seed)
    for _ in range(repeats):
        draw.shuffle(names)
        for name in names:
            synchronize(device)
            began = clock()
            calls[name]()
            synchronize(device)
            times[name].append(1000 * (clock() - began))
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


# --- experiments ------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model, data):
    """The share of images that a classifier names right; it is put into evaluation mode."""
    return round(recipes.accuracy(model.eval(), data)["accuracy"].item(), 4)


class Bench:
    """Makes the runs that a record does not have yet, until the time is up.

    Parameters
    ----------
    path : Path
        The record; its lists are read if it is there.
    minutes : float
        After so many no further run begins.
    **record
        What a new record holds; its lists grow.
    """

    def __init__(self, path, minutes, **record):
        self.path, self.end = path, time.monotonic() + 60 * minutes
        self.record = {"runs": []} | record
        old = json.loads(path.read_text()) if path.exists() else {}
        self.record |= {key: old[key] for key in self.record if isinstance(old.get(key), list)}

    def once(self, what, make, kind="runs"):
        """The entry of a list with these settings; if there is none, `make` makes it."""
        for entry in self.record[kind]:
            if all(entry.get(key) == value for key, value in what.items()):
                return entry
        if time.monotonic() > self.end:
            raise TimeoutError
        began = time.process_time()
        entry = {**what, **make()}
        entry.setdefault("seconds", round(time.process_time() - began, 1))
        self.record[kind].append(entry)
        write_record(self.path, self.record)
        return entry

    def work(self, go):
        """Call `go`, which asks for runs, and say how far it came."""
        torch.set_num_threads(1)  # the networks are too small to gain from more
        try:
            go()
        except TimeoutError:
            print(f"{len(self.record['runs'])} runs so far; give the command again to go on")
        else:
            print(f"{len(self.record['runs'])} runs, recorded in {self.path}")


def experiment_parser(description):
    """The options that all experiments have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--minutes", type=float, default=1000.0, help="stop after so many")
    parser.add_argument("--tiny", action="store_true", help="to see that all runs")
    return parser
