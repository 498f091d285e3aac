"""What the benchmarks share: where they ran, turns, medians with quartiles, and the record."""

import argparse
import functools
import gc
import json
import random
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

from attnlib import recipes, train
from attnlib.train import machine, write_record
from benchmarks.basics import UNFINISHED, reason, version
from tools import torchvision_ops  # noqa: F401  before any peer that imports torchvision

OURS, OPTIMIZED = "attnlib", "attnlib, optimized"  # names in every record
LONG = 30  # milliseconds, see `measured`


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory():
    """Give back what calls that have failed still hold."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def attempt(left_out, name, function):
    """Call a function of one contestant; if it fails, say why in `left_out`.

    Parameters
    ----------
    left_out : dict or None
        {name: reason} of what has failed, to which a failure is added: out of memory, a package
        that is missing, a kernel that does not take the inputs. With None errors are raised.
        A wrong result (AssertionError) and the end of the time (TimeoutError) always are.
    name : str
    function : callable
        Without arguments.

    Returns
    -------
    object
        What the function returns; None after a failure.
    """
    if left_out is None:
        return function()
    try:
        return function()
    except (AssertionError, TimeoutError):
        raise
    except Exception as problem:
        left_out[name] = reason(problem)
    free_memory()  # now that the error no longer holds the tensors of the call
    return None


def attempt_all(functions, left_out):
    """{name: what its function returns}, for those that do not fail; see `attempt`."""
    found = {name: attempt(left_out, name, function) for name, function in functions.items()}
    return {name: value for name, value in found.items() if name not in (left_out or {})}


def rounds(calls, repeats, timer, seed=0, left_out=None):
    """What `timer` finds of some functions, {name: [one for each round]}.

    A round calls each of them once, in an order drawn anew: a busy machine slows all alike, and
    none always runs behind the same other, whose data are still in the cache. A function that
    fails takes part no longer; without `left_out` its error is raised, see `attempt`.
    """
    times, names, draw = {name: [] for name in calls}, list(calls), random.Random(seed)
    for _ in range(repeats):
        draw.shuffle(names)
        for name in list(names):
            took = attempt(left_out, name, functools.partial(timer, calls[name]))
            if took is None:
                names.remove(name)
                del times[name]
            else:
                times[name].append(took)
    return times


def take_turns(calls, repeats, device, seed=0, clock=time.perf_counter, left_out=None):
    """Milliseconds of some functions, {name: [one for each round]}, by the clock on the wall.

    With ``clock=time.process_time`` the time in which other programs have the processor is left
    out. For `left_out` see `rounds`.
    """

    def timer(call):
        synchronize(device)
        began = clock()
        call()
        synchronize(device)
        return 1000 * (clock() - began)

    return rounds(calls, repeats, timer, seed, left_out)


def warm_turns(calls, repeats, device, left_out, clock=time.perf_counter, warm_up=1):
    """`take_turns` after some rounds that are not counted, by those that do not fail."""
    warm = take_turns(calls, warm_up, device, left_out=left_out)
    calls = {name: calls[name] for name in warm}
    return take_turns(calls, repeats, device, clock=clock, left_out=left_out)


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


def kernel_turns(calls, repeats, graphs=(), times=3, seed=0, left_out=None):
    """Milliseconds on the GPU itself, {name: [one for each round]}, between two events.

    Between them are some calls in a row. Those named in `graphs` are captured, and replayed
    without Python and launches; what cannot be captured is left out. All have been called
    before. For `left_out` see `rounds`.
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

    warm = rounds(found, 1, timer, left_out=left_out)  # a first replay uploads the graph, too
    return rounds({name: found[name] for name in warm}, repeats, timer, seed, left_out)


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

    `ratio` and `quartiles` are those of the plain model, where it has taken part; those of the
    optimized one, where it has, under the name "attnlib, optimized", stand under "optimized".
    """
    row = {
        "ms": round(statistics.median(times[name]), 4),
        "ms_quartiles": [round(x, 4) for x in quartiles(times[name])],
        "rounds": len(times[name]),
    }
    if ours in times:
        row |= ratio(times[ours], times[name])
    if OPTIMIZED in times:
        row["optimized"] = ratio(times[OPTIMIZED], times[name])
    return row


def measured(calls, repeats, device, ours=OURS, graphs=None, left_out=None):
    """{name: its row}: time on the wall, and on a GPU under "kernel" that of the kernels.

    The latter is that of CUDA graphs for the contestants in `graphs`, all by default, and the
    others do not have it. No graph is made of calls of more than LONG milliseconds, behind
    whose work the launches disappear, nor of any if `graphs` is empty: these are timed by
    events around the calls. For `left_out` see `rounds`.
    """
    times = take_turns(calls, repeats, device, left_out=left_out)
    rows = {name: compared(times, name, ours) for name in times}
    if device == "cuda":
        some = {name: calls[name] for name in rows if not graphs or name in graphs}
        short = {name for name in some if rows[name]["ms"] < LONG and graphs != ()}
        failed = None if left_out is None else {}
        times = kernel_turns(some, repeats, short, left_out=failed)
        for name in times:
            rows[name]["kernel"] = compared(times, name, ours) | {"graph": name in short}
        for name in failed or ():  # it has the time on the wall all the same
            left_out[f"{name}, kernel"] = failed[name]
    return rows


def memories(calls, device, left_out):
    """{name: the MiB that its call takes}, for those that do not fail; they are warm then."""
    watched = {
        name: functools.partial(peak_memory, call, device) for name, call in calls.items()
    }
    return attempt_all(watched, left_out)


def timm_like(ours, name, options):
    """timm's model of this name, whose weights ours then has."""
    import timm  # which not every machine has

    theirs = timm.create_model(name, **dict(drop_path_rate=0.0) | options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs


def median_row(times, name, rival, digits=1):
    """The median of a contestant's times, and its ratio to a rival's that has run, too."""
    row = {"ms": round(statistics.median(times[name]), digits), "rounds": len(times[name])}
    if rival in times:
        row |= ratio(times[name], times[rival])
    return row


def told(row, ours):
    """The ratio of a row and its quartiles in words, where it has them."""
    if "ratio" not in row:
        return ""
    return f"{ours} / it {row['ratio']:.3f} {row['quartiles']}"


def race(calls, label, arguments, ours, left_out):
    """{name: its row} with its memory in MiB; each row is printed behind the label."""
    memory = memories(calls, arguments.device, left_out)
    calls = {name: calls[name] for name in memory}
    repeats = 0 if arguments.tiny else 5
    take_turns(calls, repeats, arguments.device, left_out=left_out)
    calls = {name: call for name, call in calls.items() if name not in left_out}
    rows = measured(calls, arguments.repeats, arguments.device, ours, left_out=left_out)
    for name, row in rows.items():
        own = row.get("kernel", row)
        print(f"{label} {name:14} {own['ms']:8.3f} ms   {told(own, ours)}", flush=True)
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

    What is missing stands in the record, too, with the reason: under "left_out" contestants of
    a setting, under "failed" settings without any rows. The latter are tried again when the
    command is given again, except for one that has ended the process twice.

    Parameters
    ----------
    path : Path or None
        The record. Rows of other code, another device, PyTorch or size are dropped; None
        records nothing.
    device : str
    minutes : float
        After so many no further row is begun.
    tiny : bool
        Whether the numbers mean nothing.
    **record
        What else the record holds. Lists are lists of rows; by default there is one, "rows".
    """

    def __init__(self, path, device, minutes=1000.0, tiny=False, **record):
        self.path, self.device, self.end = path, device, time.monotonic() + 60 * minutes
        self.kinds = [key for key, value in record.items() if isinstance(value, list)]
        if not self.kinds:
            self.kinds, record = ["rows"], {**record, "rows": []}
        code = version("attnlib", "benchmarks")
        self.record = {**record, "code": code, "tiny": tiny, "left_out": [], "failed": []}
        self.record["begun"] = []  # settings that a process did not come back from
        if path and path.exists():
            self.take_over(json.loads(path.read_text()))

    def take_over(self, old):
        """Keep the rows of an older record if they are of the same code and machine."""
        now = machine(self.device) | self.record
        if all(old.get(key) == now[key] for key in ("code", "device", "torch", "tiny")):
            for key in (*self.kinds, "left_out", "begun"):
                self.record[key] = old[key]

    def once(self, setting, make, kind="rows"):
        """The rows of a setting: those of the record, or those that are made now.

        Parameters
        ----------
        setting : dict
            Becomes part of each row.
        make : callable
            Called with a dict for {contestant: why it is left out}; returns the rows.
        kind : str
            The list of rows in the record.
        """
        rows = self.record[kind]
        found = [row for row in rows if setting.items() <= row.items()]
        if found:
            return found
        if time.monotonic() > self.end:
            raise TimeoutError
        if self.record["begun"].count(setting) == 2:
            self.fail(setting, "it has ended the process twice")
            return []
        self.record["begun"].append(setting)
        self.write()
        made, left_out = [], {}
        try:
            made = list(make(left_out))
            if not made:
                raise RuntimeError("nothing could be timed")
        except TimeoutError:
            raise
        except Exception as problem:
            self.fail(setting, reason(problem))
            traceback.print_exc()
        free_memory()
        self.record["begun"] = [other for other in self.record["begun"] if other != setting]
        for name, why in left_out.items():
            print(*setting.values(), f"without {name}: {why}", flush=True)
        others = [row for row in self.record["left_out"] if not setting.items() <= row.items()]
        missing = [{**setting, "what": name, "why": why} for name, why in left_out.items()]
        self.record["left_out"] = others + missing
        found = [{**setting, **row} for row in made]
        rows += found
        self.write()
        return found

    def guarded(self, setting, function):
        """What a function returns that makes no rows; None if it fails, which is recorded."""
        try:
            return function()
        except Exception as problem:
            self.fail(setting, reason(problem))
            traceback.print_exc()
            return None

    def fail(self, setting, why):
        print(*setting.values(), f"failed: {why}", flush=True)
        self.record["failed"].append({**setting, "why": why})
        self.write()

    def write(self):
        if self.path:
            write_record(self.path, self.record, self.device)

    def work(self, go):
        """Call `go`, which asks for rows, and end with the status that says how it went.

        That is UNFINISHED if the time is up, and 1 if a setting has failed.
        """
        try:
            go()
        except TimeoutError:
            count = sum(len(self.record[kind]) for kind in self.kinds)
            print(f"{count} rows so far; give the command again to go on")
            self.write()
            sys.exit(UNFINISHED)
        self.write()
        if self.path:
            print(f"recorded in {self.path}")
        if self.record["failed"]:
            sys.exit(f"{len(self.record['failed'])} settings have failed")


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
