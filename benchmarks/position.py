"""What was run for 12_position: `python -m benchmarks.position COMMAND --out FOLDER`.

    schemes  train each scheme of position embeddings on three tasks

The networks, their training, and their tests are cells of the chapter's notebook, which are run
here as they stand.
"""

import itertools

import nbformat

from attnlib import position
from benchmarks.runner import Commands, Runs
from tools.notebooks import NBS, code_of

CELLS = ("imports", "setup", "grid", "layer", "network", "fit", "tasks", "digits")
RATES = (1e-3, 3e-3, 1e-2)
TABLE_RATES = (3e-3, 3e-2, 1e-1)
BASES = (10.0, 100.0, 10000.0)
SEQUENCES = {  # scheme and number of heads
    "none": ("none", 2),
    "sinusoidal": ("sinusoidal", 2),
    "learned": ("learned", 2),
    "relative bias": ("relative bias", 2),
    "ALiBi": ("ALiBi", 2),
    "ALiBi, 8 heads": ("ALiBi", 8),
    "rotary": ("rotary", 2),
}
TASKS = {"three back": 400, "the first": 400, "digits": 300}  # and the steps of a short run
GRIDS = ("none", "sinusoidal", "row and column", "learned", "2-D bias", "2-D rotary")


def chapter():
    """The names that the chapter's cells define."""
    names = {name: getattr(position, name) for name in position.__all__}
    cells = {cell.id: cell for cell in nbformat.read(NBS / "12_position.ipynb", 4).cells}
    for cell in CELLS:
        exec(code_of(cells[cell]), names)
    return names


def settings(task, name):
    """The grid of settings from which the validation data choose."""
    axes = {"lr": RATES[1:] if task == "digits" else RATES}
    if "bias" in name:
        axes["table_lr"] = TABLE_RATES
    if task == "digits" and name in ("sinusoidal", "row and column", "2-D rotary"):
        axes["base"] = BASES
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


class Schemes(Runs):
    """The runs of the record, with the notebook's networks."""

    def __init__(self, path, minutes):
        super().__init__(path, minutes)
        self.names = chapter()

    def run(self, task, name, setting, steps, seed):
        settings = dict(task=task, scheme=name, setting=setting, steps=steps, seed=seed)
        train = self.digits if task == "digits" else self.sequences
        return self.once(settings, lambda: train(task, name, steps=steps, seed=seed, **setting))

    def sequences(self, task, name, **options):
        scheme, heads = SEQUENCES[name]
        run = self.names["extrapolation_run"]
        _, valid, right = run(task, scheme, heads=heads, **options)
        bins = [round(x, 4) for x in right.unflatten(0, (-1, 16)).nanmean(-1).tolist()]
        return {"valid": round(valid, 5), "accuracy": [x for x in bins if x == x]}

    def digits(self, task, name, **options):
        loss, right = self.names["digits_run"](name, **options)
        accuracy = {part: round(x, 4) for part, x in right.items()}
        return {"valid": round(loss["valid"], 5), "accuracy": accuracy}

    def scheme(self, task, name, steps, seeds, times):
        """Tune one scheme, and train it with every seed, `times` as long."""
        grid = settings(task, name)
        tried = [self.run(task, name, setting, steps, seeds[0]) for setting in grid]
        if min(run["valid"] for run in tried) > 1:  # who fails gets one more chance
            tried.append(self.run(task, name, {**grid[-1], "lr": 0.03}, steps, seeds[0]))
        best = min(tried, key=lambda run: run["valid"])["setting"]
        for seed in seeds:
            self.run(task, name, best, times * steps, seed)

    def every_setting(self, task, name, steps, seeds, times):
        """Train one scheme with every setting and every seed: does the choice matter?"""
        for setting, seed in itertools.product(settings(task, name), seeds):
            self.run(task, name, setting, steps, seed)


def schemes(arguments):
    """Train each scheme of position embeddings on three tasks.

    The networks, their training and their tests are cells of the chapter's notebook, which are
    run here as they stand. For each scheme every setting of a small grid trains one network;
    the one with the lowest loss on validation data is trained with three seeds, and again with
    four times the steps. The record, FOLDER/positions.json, is written after every network.
    With --minutes the command stops after that time, and goes on when it is given again. With
    --tiny a few networks take a few steps, to see that all runs; such a record means nothing.
    """
    bench = Schemes(arguments.out / "positions.json", arguments.minutes)
    names = {task: GRIDS if task == "digits" else SEQUENCES for task in arguments.tasks}
    if arguments.tiny:
        names = {
            "three back": ["ALiBi, 8 heads"],
            "the first": ["learned"],
            "digits": ["2-D bias"],
        }
    work = [
        (bench.scheme, task, name, times)
        for task in names
        for times in (1, 4)
        for name in names[task]
        if name in (arguments.schemes or names[task])
    ]
    if "the first" in names and not arguments.tiny:
        work.append((bench.every_setting, "the first", "relative bias", 1))

    def go():
        for do, task, name, times in work:
            if arguments.tiny:
                steps = 2
                seeds = (0,)
            else:
                steps = TASKS[task]
                seeds = (0, 1, 2)
            do(task, name, steps, seeds, times)

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.experiment("schemes", schemes)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--schemes", nargs="+", help="all by default")
    commands.run(arguments)


if __name__ == "__main__":
    main()
