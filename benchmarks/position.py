"""The experiment of 12_position: `python -m benchmarks.position COMMAND --out FOLDER`.

    schemes  train each scheme of position embeddings on two tasks

The networks, their training, and their tests are cells of the chapter's notebook, which are run
here as they stand.
"""

import itertools

import nbformat

from attnlib import position
from benchmarks.runner import Commands, Runs
from tools.notebooks import NBS, code_of

CELLS = ("imports", "setup", "layer", "network", "fit", "tasks")
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
TABLE_RATES = (1e-3, 3e-3, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
OF_THE_EXERCISE = [  # settings of the relative bias that exercise ex-optimizer compares
    {"lr": lr, "table_lr": table_lr} for lr in RATES[:3] for table_lr in TABLE_RATES[1:4]
]
SCHEMES = {  # scheme and number of heads
    "none": ("none", 2),
    "sinusoidal": ("sinusoidal", 2),
    "learned": ("learned", 2),
    "relative bias": ("relative bias", 2),
    "ALiBi": ("ALiBi", 2),
    "ALiBi, 8 heads": ("ALiBi", 8),
    "rotary": ("rotary", 2),
}
TASKS = ("three back", "the first")
STEPS = 400  # of a short run


def chapter():
    """Return the names that the chapter's cells define."""
    names = {name: getattr(position, name) for name in position.__all__}
    cells = {cell.id: cell for cell in nbformat.read(NBS / "12_position.ipynb", 4).cells}
    for cell in CELLS:
        exec(code_of(cells[cell]), names)
    return names


def settings(name):
    """Return the grid of settings from which the validation data choose."""
    axes = {"lr": RATES}
    if name == "relative bias":
        axes["table_lr"] = TABLE_RATES
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


class Schemes(Runs):
    """The runs of the record, with the notebook's networks."""

    def __init__(self, path, minutes):
        super().__init__(path, minutes)
        self.names = chapter()

    def run(self, task, name, setting, steps, seed):
        settings = dict(task=task, scheme=name, setting=setting, steps=steps, seed=seed)
        return self.once(settings, lambda: self.train(task, name, steps, seed, setting))

    def train(self, task, name, steps, seed, setting):
        scheme, heads = SCHEMES[name]
        run = self.names["extrapolation_run"]
        _, valid, right = run(task, scheme, heads=heads, steps=steps, seed=seed, **setting)
        bins = [round(x, 4) for x in right.unflatten(0, (-1, 16)).nanmean(-1).tolist()]
        return {"valid": round(valid, 5), "accuracy": [x for x in bins if x == x]}

    def scheme(self, task, name, steps, seeds, times):
        """Tune one scheme, and train it with every seed, `times` as long."""
        grid = settings(name)
        tried = [self.run(task, name, setting, steps, seeds[0]) for setting in grid]
        best = min(tried, key=lambda run: run["valid"])["setting"]
        for seed in seeds:
            self.run(task, name, best, times * steps, seed)

    def exercise(self, task, name, steps, seeds, times):
        """Train one scheme with nine settings and every seed, for an exercise of the page."""
        for setting, seed in itertools.product(OF_THE_EXERCISE, seeds):
            self.run(task, name, setting, times * steps, seed)


def schemes(arguments):
    """Train each scheme of position embeddings on two tasks.

    The networks, their training, and their tests are cells of the chapter's notebook, which are
    run here as they stand. For each scheme, every setting of a small grid trains one network;
    the setting with the lowest loss on validation data is trained with three seeds, and again
    with four times the steps. The record, FOLDER/positions.json, is written after every
    network. With --minutes the command stops after that time, and continues when it is given
    again. With --tiny a few networks take a few steps, to see that everything runs; the numbers
    of such a record mean nothing.
    """
    bench = Schemes(arguments.out / "positions.json", arguments.minutes)
    names = dict.fromkeys(arguments.tasks, SCHEMES)
    if arguments.tiny:
        names = {"three back": ["ALiBi, 8 heads"], "the first": ["learned"]}
    work = [
        (bench.scheme, task, name, times)
        for task in names
        for times in (1, 4)
        for name in names[task]
        if name in (arguments.schemes or names[task])
    ]
    if "the first" in names and not arguments.tiny:
        work.append((bench.exercise, "the first", "relative bias", 1))

    def go():
        for do, task, name, times in work:
            if arguments.tiny:
                steps = 2
                seeds = (0,)
            else:
                steps = STEPS
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
