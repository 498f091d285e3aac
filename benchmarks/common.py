"""What the benchmarks share: where they ran, turns, medians with quartiles, and the record."""

import argparse
import hashlib
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from attnlib import recipes, train
from attnlib.train import machine, write_record
from tools import torchvision_ops  # noqa: F401  before any peer that imports torchvision

OURS, OPTIMIZED = "attnlib", "attnlib, optimized"  # names in every record
LONG = 30  # milliseconds, see `measured`
ROOT = Path(__file__).resolve().parent.parent


def version(*folders):
    """A fingerprint of the code of some folders, which also a copy without git has."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def rounds(calls, repeats, timer, seed=0):
    """What `timer` finds of some functions, {name: [one for each round]}.

    A round calls each of them once, in an order drawn anew: a busy machine slows all alike, and
    none always runs behind the same other, whose data are still in the cache.
    """
    times, names, draw = {name: [] for name in calls}, list(calls), random.Random(seed)
    for _ in range(repeats):
        draw.shuffle(names)
        for name in names:
            times[name].append(timer(calls[name]))
    return times


def take_turns(calls, repeats, device, seed=0, clock=time.perf_counter):
    """Milliseconds of some functions, {name: [one for each round]}, by the clock on the wall.

    With ``clock=time.process_time`` the time in which other programs have the processor is left
    out.
    """

    def timer(call):
        synchronize(device)
        began = clock()
        call()
        synchronize(device)
        return 1000 * (clock() - began)

    return rounds(calls, repeats, timer, seed)


def own_stream(device):
    """Make a stream of its own the present one: nothing can be captured on the default one."""
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())


def captured(call, times):
    """A CUDA graph of some calls in a row, as a function; None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(times):
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        new_random_state()
        return None
    return graph.replay


def new_random_state():
    """After a capture that failed: the old state waits for its end, and gives no numbers."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator(device="cuda").graphsafe_get_state())


def kernel_turns(calls, repeats, graphs=(), times=3, seed=0):
    """Milliseconds on the GPU itself, {name: [one for each round]}, between two events.

    Between them are some calls in a row. Those named in `graphs` are captured, and replayed
    without Python and launches; what cannot be captured is left out. All have been called
    before.
    """

    def often(call):
        def run():
            for _ in range(times):
                call()

        return run

    found = {
        name: captured(call, times) if name in graphs else often(call)
        for name, call in calls.items()
    }
    found = {name: run for name, run in found.items() if run}

    def timer(run):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times

    rounds(found, 1, timer)  # a first replay also uploads the graph
    return rounds(found, repeats, timer, seed)


def quartiles(numbers):
    ordered, quarter = sorted(numbers), len(numbers) // 4
    return ordered[quarter], ordered[-1 - quarter]


def ratio(times, others):
    """The median and the quartiles of time / other time over the rounds, and their number."""
    ratios = [a / b for a, b in zip(times, others, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(x, 3) for x in quartiles(ratios)],
        "rounds": len(ratios),
    }


def compared(times, name, ours=OURS):
    """What a row records of a contestant: its times, and the ratios ours / its.

    `ratio` and `quartiles` are those of the plain model; those of the optimized one, where it
    has taken part under the name "attnlib, optimized", stand under "optimized".
    """
    row = {
        "ms": round(statistics.median(times[name]), 4),
        "ms_quartiles": [round(x, 4) for x in quartiles(times[name])],
        **ratio(times[ours], times[name]),
    }
    if OPTIMIZED in times:
        row["optimized"] = ratio(times[OPTIMIZED], times[name])
    return row


def measured(calls, repeats, device, ours=OURS, graphs=None):
    """{name: its row}: time on the wall, and on a GPU under "kernel" that of the kernels.

    The latter is that of CUDA graphs for the contestants in `graphs`, all by default, and the
    others do not have it. No graph is made of calls of more than LONG milliseconds, behind
    whose work the launches disappear, nor of any if `graphs` is empty: these are timed by
    events around the calls.
    """
    times = take_turns(calls, repeats, device)
    rows = {name: compared(times, name, ours) for name in calls}
    if device == "cuda":
        some = {name: calls[name] for name in calls if not graphs or name in graphs}
        short = {name for name in some if rows[name]["ms"] < LONG and graphs != ()}
        times = kernel_turns(some, repeats, short)
        for name in times if ours in times else ():
            rows[name]["kernel"] = compared(times, name, ours) | {"graph": name in short}
    return rows


def race(calls, label, arguments, ours):
    """{name: its row} with its memory in MiB; each row is printed behind the label."""
    memory = {name: peak_memory(call, arguments.device) for name, call in calls.items()}
    take_turns(calls, 0 if arguments.tiny else 5, arguments.device)
    rows = measured(calls, arguments.repeats, arguments.device, ours)
    for name, row in rows.items():
        own = row.get("kernel", row)
        print(
            f"{label} {name:14} {own['ms']:8.3f} ms   "
            f"{ours} / it {own['ratio']:.3f} {own['quartiles']}",
            flush=True,
        )
    return {name: {"memory": memory[name], **row} for name, row in rows.items()}


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


UNFINISHED = 75  # the exit status of a command that ran out of time, and can be given again


def save_half(state, path, bits=11):
    """Write weights in float16, rounded to `bits` significant bits of its eleven.

    The bits that are left are 0, so a wheel, which is a zip file, packs them well; the file is
    read like any other. With seven bits the error is 0.33% of the weights, root mean square.
    """
    from safetensors.torch import save_file  # which not every machine has

    small = {}
    for key, x in state.items():
        if x.is_floating_point():
            share, exponent = torch.frexp(x.float())  # share · 2^exponent, 0.5 ≤ |share| < 1
            x = torch.ldexp((share * 2**bits).round() / 2**bits, exponent).half()
        small[key] = x.contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(small, path)


class Rows:
    """The rows of a record of timings, written as they come: what is there is not made again.

    Parameters
    ----------
    path : Path or None
        The record. Rows of other code, another device or PyTorch are dropped; None records
        nothing.
    device : str
    minutes : float
        After so many no further row is begun.
    **record
        What else the record holds.
    """

    def __init__(self, path, device, minutes=1000.0, **record):
        self.path, self.device, self.end = path, device, time.monotonic() + 60 * minutes
        self.record = {**record, "code": version("attnlib", "benchmarks"), "rows": []}
        if path and path.exists():
            old, now = json.loads(path.read_text()), machine(device) | self.record
            if all(old.get(key) == now[key] for key in ("code", "device", "torch")):
                self.record["rows"] = old["rows"]

    def once(self, setting, make):
        """The rows of a setting: those of the record, or `make`'s, each with the setting."""
        rows = self.record["rows"]
        found = [row for row in rows if setting.items() <= row.items()]
        if found:
            return found
        if time.monotonic() > self.end:
            raise TimeoutError
        found = [{**setting, **row} for row in make()]
        rows += found
        if self.path:
            write_record(self.path, self.record, self.device)
        return found

    def work(self, go):
        """Call `go`, which asks for rows; if the time is up, end with the status UNFINISHED."""
        try:
            go()
        except TimeoutError:
            print(f"{len(self.record['rows'])} rows so far; give the command again to go on")
            sys.exit(UNFINISHED)
        if self.path:
            write_record(self.path, self.record, self.device)
            print(f"recorded in {self.path}")


def timing_parser(description, repeats):
    """The options that all timings have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=here, choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds of a measurement")
    parser.add_argument("--minutes", type=float, default=1000.0, help="stop after so many")
    parser.add_argument("--tiny", action="store_true", help="to see that all runs")
    return parser


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


class Record:
    """Rows by name, kept in FOLDER/FAMILY_EXPERIMENT.json; none is run again.

    Parameters
    ----------
    family : str
    arguments
        Of an `experiment_parser` with the name of the experiment as `what`.
    """

    def __init__(self, family, arguments):
        self.path = arguments.out / f"{family}_{arguments.what}.json"
        self.tiny, self.found = arguments.tiny, dict(rows=[])
        if self.path.exists() and not arguments.tiny:
            self.found = json.loads(self.path.read_text())

    def add(self, name, run):
        """The row of this name, run if it is not there."""
        for row in self.found["rows"]:
            if row["name"] == name:
                return row
        self.found["rows"].append(dict(name=name, **run()))
        print(self.found["rows"][-1], flush=True)
        self.write()
        return self.found["rows"][-1]

    def write(self, **more):
        self.found |= dict(more, tiny=self.tiny)
        write_record(self.path, self.found)


def experiment_parser(description):
    """The options that all experiments have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--minutes", type=float, default=1000.0, help="stop after so many")
    parser.add_argument("--tiny", action="store_true", help="to see that all runs")
    return parser
