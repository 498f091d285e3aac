"""The runner that all chapters share: a grid of runs, seeds, resuming, and the record.

Each chapter has one module, and each of its experiments is a command:

    python -m benchmarks.CHAPTER COMMAND --out FOLDER

A *run* is one entry of a record: the settings that identify it (method, learning rate, seed,
steps), and the results that a function computed for these settings. A record is a JSON file,
which is written after every run. When a command is given again, it reads the record, skips all
runs that are in it, and continues with the first missing one; so an interrupted command loses
at most one run. `--minutes` starts no run after that time. `--tiny` shortens everything to a
few steps, to see that the command works; the numbers of such a record mean nothing.

`Runs` holds the runs of an experiment, and `Rows` the rows of a timing, which also depend on
the machine and on the code. `tune` tries all learning rates with the first seed, and runs the
best of them with all seeds. `Commands` reads the command line.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from pathlib import Path

import torch

from attnlib import recipes
from benchmarks.basics import ROOT, UNFINISHED, reason, version
from benchmarks.records import machine, write_record
from tools import torchvision_ops  # noqa: F401  before any peer that imports torchvision

RESULTS = ROOT / "benchmarks" / "results"


# --- the command line -------------------------------------------------------------------------


class Commands:
    """The commands of a chapter.

    Parameters
    ----------
    description : str
        The docstring of the chapter's module.
    """

    def __init__(self, description):
        self.parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.commands = self.parser.add_subparsers(
            title="commands", metavar="COMMAND", dest="command", required=True
        )

    def add(self, name, function):
        """Add a command without options.

        Parameters
        ----------
        name : str
        function : callable
            Called with the parsed arguments. Its docstring is the help of the command.

        Returns
        -------
        argparse.ArgumentParser
            The parser of this command, for its options.
        """
        parser = self.commands.add_parser(
            name,
            help=function.__doc__.splitlines()[0],
            description=function.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(function=function)
        return parser

    def experiment(self, name, function, record=None):
        """Add a command that trains models: it has `--out`, `--minutes`, and `--tiny`.

        With `record`, a name, the function returns the whole record, a dict, which is written
        to FOLDER/RECORD.json with the seconds of CPU time.
        """
        parser = self.add(name, function)
        parser.set_defaults(record=record)
        parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
        add_shared_options(parser)
        return parser

    def timing(self, name, function, repeats):
        """Add a command that measures time: it has `--device` and `--repeats` as well."""
        parser = self.add(name, function)
        add_timing_options(parser, repeats)
        return parser

    def run(self, arguments=None):
        """Call the command that the command line names."""
        parsed = self.parser.parse_args(arguments)
        out = getattr(parsed, "out", None)
        if getattr(parsed, "tiny", False) and out is not None and out.resolve() == RESULTS:
            self.parser.error("--tiny would replace a real record: give --out another folder")
        began = time.process_time()
        try:
            found = parsed.function(parsed)
            if getattr(parsed, "record", None):
                seconds = round(time.process_time() - began)
                path = parsed.out / f"{parsed.record}.json"
                write_record(path, {**found, "seconds": seconds})
                print(f"{seconds} s, recorded in {path}")
        except TimeoutError:
            print("the time is up; give the command again to continue")


def add_timing_options(parser, repeats):
    """Add the options of a timing; a file without commands calls this for its own parser."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds of a measurement")
    add_shared_options(parser)


def add_shared_options(parser):
    """Add the options that all commands share."""
    parser.add_argument(
        "--minutes", type=float, default=1000.0, help="start no run after this time"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a few steps, to see that the command works"
    )


# --- experiments ------------------------------------------------------------------------------


class Runs:
    """The runs of a record; a run that the record has is not made again.

    Parameters
    ----------
    path : Path
        The record. If it exists, its lists are read.
    minutes : float
        No run starts after this time.
    **record
        The content of a new record. Its lists are lists of runs; without any there is one,
        "runs".
    """

    def __init__(self, path, minutes=1000.0, **record):
        self.path = path
        self.end = time.monotonic() + 60 * minutes
        if not any(isinstance(value, list) for value in record.values()):
            record = {"runs": []} | record
        self.record = record
        self.lists = [key for key, value in record.items() if isinstance(value, list)]
        if path.exists():
            old = json.loads(path.read_text())
            for name in self.lists:
                self.record[name] = old.get(name, [])

    def once(self, settings, make, kind="runs"):
        """Return the run with these settings; if there is none, make it.

        Parameters
        ----------
        settings : dict
            What identifies the run; becomes part of it.
        make : callable
            Called without arguments; returns a dict with the results.
        kind : str
            The list of the record that the run belongs to.

        Returns
        -------
        dict
            The settings, the results, and the "seconds" of CPU time.
        """
        runs = self.record[kind]
        for run in runs:
            if all(run.get(key) == value for key, value in settings.items()):
                return run
        if time.monotonic() > self.end:
            raise TimeoutError("the time is up")
        began = time.process_time()
        run = {**settings, **make()}
        run.setdefault("seconds", round(time.process_time() - began, 1))
        runs.append(run)
        self.write()
        print(*settings.values(), flush=True)
        return run

    def add(self, name, make):
        """Return the row of this name in the list "rows"; if there is none, make it."""
        return self.once({"name": name}, make, "rows")

    def write(self, **more):
        """Write the record, with more content if it is given."""
        self.record |= more
        write_record(self.path, self.record)

    def work(self, go):
        """Call `go`, which asks for runs, and print how far it came."""
        torch.set_num_threads(1)  # the networks are too small to gain from more
        try:
            go()
            ending = f", recorded in {self.path}"
        except TimeoutError:
            ending = " so far; give the command again to continue"
        count = len(self.record[self.lists[0]])
        print(f"{count} runs{ending}")


def start(chapter, arguments, **record):
    """Return the `Runs` of FOLDER/CHAPTER_COMMAND.json for a parsed command, on one thread."""
    torch.set_num_threads(1)  # the networks are too small to gain from more
    path = arguments.out / f"{chapter}_{arguments.command}.json"
    return Runs(path, arguments.minutes, **record)


def tune(run, rates, seeds, score):
    """Try all learning rates with the first seed, and run the best of them with all seeds.

    Parameters
    ----------
    run : callable
        ``run(lr, seed)`` returns a dict.
    rates, seeds : sequence
    score : callable
        From what `run` returned to a number; the highest wins, and of equals the first. It
        must come from validation data.

    Returns
    -------
    best : float
        The learning rate.
    runs : list of dict
        Its runs, one per seed.
    """
    first = {lr: run(lr, seeds[0]) for lr in rates}
    best = max(rates, key=lambda lr: score(first[lr]))
    others = [run(best, seed) for seed in seeds[1:]]
    return best, [first[best], *others]


@torch.no_grad()
def accuracy(model, data):
    """The accuracy of a classifier, which is put into evaluation mode."""
    return round(recipes.accuracy(model.eval(), data)["accuracy"].item(), 4)


def logistic_regression(train, valid, test, strengths, max_iter=1000):
    """Fit scikit-learn's logistic regression, with C chosen on validation data.

    Parameters
    ----------
    train, valid, test : (array, array)
        Features (n, D) and labels (n,).
    strengths : sequence of float
        The values of C to try; of equals the first wins.

    Returns
    -------
    dict
        "C", and the accuracies "valid" and "test".
    """
    from sklearn.linear_model import LogisticRegression  # which not every machine has

    models = [LogisticRegression(C=C, max_iter=max_iter).fit(*train) for C in strengths]
    scores = [model.score(*valid) for model in models]
    best = scores.index(max(scores))
    return {
        "C": models[best].C,
        "valid": round(scores[best], 4),
        "test": round(models[best].score(*test), 4),
    }


# --- timings ----------------------------------------------------------------------------------


def free_memory():
    """Give back what calls that have failed still hold."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


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
        self.path = path
        self.device = device
        self.end = time.monotonic() + 60 * minutes
        self.kinds = [key for key, value in record.items() if isinstance(value, list)]
        if not self.kinds:
            self.kinds = ["rows"]
            record = {**record, "rows": []}
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
        made = []
        left_out = {}
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


# --- files ------------------------------------------------------------------------------------


def write(folder, name, device, record):
    """Put a record into `folder`/NAME_DEVICE.json, with the machine that made it."""
    path = folder / f"{name}_{device}.json"
    write_record(path, record, device)
    print(f"recorded in {path}")


def save_half(state, path, bits=11, exact=()):
    """Write weights in float16, rounded to `bits` significant bits of its eleven.

    The tensors whose names are in `exact` are written as they are.

    The bits that are left are 0, so a wheel, which is a zip file, packs them well; the file is
    read like any other. With seven bits the error is 0.33% of the weights, root mean square.
    """
    from safetensors.torch import save_file  # which not every machine has

    small = {}
    for key, x in state.items():
        if x.is_floating_point() and key not in exact:
            share, exponent = torch.frexp(x.float())  # share · 2^exponent, 0.5 ≤ |share| < 1
            x = torch.ldexp((share * 2**bits).round() / 2**bits, exponent).half()
        small[key] = x.contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(small, path)
