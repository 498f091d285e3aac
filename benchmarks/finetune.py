"""Fine-tuning with few labels: `python -m benchmarks.finetune --out FOLDER`.

The ViT that comes with the library names the largest digit of a collage. Here it learns to name
the kinds of the two shapes in a drawn scene, ten pairs, from 100 or 1,000 labelled scenes.
Contestants: logistic regression on the class token; the network from scratch; and from its
weights, with one rate for all layers, with rates by layer, and with mixup as well. Each takes
its learning rate from validation scenes, on the first seed, and is then trained with the other
two, each with labelled scenes of its own.
Every run is tested with its last and with its averaged weights. From scratch there are also
runs four times as long.

The record, FOLDER/finetune.json, is written after every run. With --minutes the command stops
after that time, and goes on when it is given again. With --tiny a few runs take a few steps, to
see that all works; such a record means nothing.
"""

import itertools
from functools import cache

import torch
from sklearn.linear_model import LogisticRegression

from attnlib import vit  # noqa: F401  registers the model
from attnlib.data import describe_scenes, draw_scenes
from attnlib.models import create_model
from attnlib.practice import fine_tune
from benchmarks.runner import Runs, accuracy, experiment_parser

MODEL = "vit_collages"
CONTESTANTS = {  # pretrained, settings of `fine_tune`, rates
    "from scratch": (False, dict(decay=1.0), (5e-4, 1e-3, 2e-3)),
    "one rate": (True, dict(decay=1.0), (3e-4, 1e-3, 3e-3)),
    "layer decay": (True, dict(decay=0.65), (1e-3, 3e-3, 1e-2)),
    "layer decay, mixup": (True, dict(decay=0.65, alpha=0.2), (1e-3, 3e-3, 1e-2)),
}
STEPS, SEEDS = {100: 100, 1000: 200}, (0, 1, 2)


@cache
def shapes(count, seed):
    """Scenes as the model wants them, and the pair of kinds in each, a number from 0 to 9."""
    found = describe_scenes(count, seed=seed)
    first, second = torch.triu_indices(4, 4)
    table = torch.zeros(4, 4, dtype=torch.long)  # number of each pair, in either order
    table[first, second] = table[second, first] = torch.arange(10)
    return 2 * draw_scenes(found, 64) - 1, table[tuple(found["kind"].T)]


def network(pretrained):
    """The model with a new head, also for ten classes."""
    model = create_model(MODEL, pretrained=pretrained)
    model.reset_classifier(10)
    return model


@torch.no_grad()
def features(images):
    """The class token after the last norm, (n, D): what the head is given."""
    model = network(True).eval()
    parts = (model.forward_head(model.forward_features(x), True) for x in images.split(100))
    return torch.cat(list(parts)).numpy()


class FineTuning(Runs):
    """The runs of the record."""

    def __init__(self, path, minutes, tiny):
        super().__init__(path, minutes)
        self.tiny, sizes = tiny, (20, 20) if tiny else (200, 600)
        self.valid, self.test = shapes(sizes[0], 50), shapes(sizes[1], 51)

    def probe(self, labels, seed):
        """Logistic regression, its strength chosen on validation images."""

        def train():
            pairs = shapes(labels, 100 + seed), self.valid, self.test
            known, valid, test = ((features(images), answers) for images, answers in pairs)
            models = [LogisticRegression(C=C, max_iter=3000) for C in (0.1, 1.0, 10.0, 100.0)]
            best = max((model.fit(*known) for model in models), key=lambda m: m.score(*valid))
            found = best.score(*valid), best.score(*test)
            return dict(C=best.C, valid=round(found[0], 4), test=round(found[1], 4))

        what = dict(contestant="head alone", labels=labels, steps=0, lr=None, seed=seed)
        return self.once(what, train)

    def network(self, name, labels, steps, lr, seed):
        def train():
            pretrained, options, _ = CONTESTANTS[name]
            torch.manual_seed(seed)
            model = network(pretrained)
            averaged, curve = fine_tune(
                model,
                *shapes(labels, 100 + seed),
                **dict(steps=steps, lr=lr, seed=seed, every=max(1, steps // 4)),
                **options,
                evaluate=lambda model: accuracy(model, self.valid),
            )
            return dict(
                curve=curve,
                valid=curve[-1][1],
                valid_averaged=accuracy(averaged, self.valid),
                test=accuracy(model, self.test),
                test_averaged=accuracy(averaged, self.test),
            )

        what = dict(contestant=name, labels=labels, steps=steps, lr=lr, seed=seed)
        return self.once(what, train)

    def contestant(self, name, labels, steps, seeds, rates):
        """All rates with the first seed, the best of them with all."""
        tried = [self.network(name, labels, steps, lr, seeds[0]) for lr in rates]
        best = max(tried, key=lambda run: run["valid"])["lr"]
        for seed in seeds[1:]:
            self.network(name, labels, steps, best, seed)
        return best

    def all(self):
        sizes, seeds = (STEPS, SEEDS) if not self.tiny else ({20: 3}, (0,))
        for labels, seed in itertools.product(sizes, seeds):
            self.probe(labels, seed)
        best = {}
        for (labels, steps), name in itertools.product(sizes.items(), CONTESTANTS):
            rates = CONTESTANTS[name][2][: 1 if self.tiny else None]
            best[labels, name] = self.contestant(name, labels, steps, seeds, rates)
        for labels, steps in sizes.items():
            lr = best[labels, "from scratch"]
            self.network("from scratch", labels, 4 * steps, lr, seeds[0])


def main():
    arguments = experiment_parser(__doc__).parse_args()
    path = arguments.out / "finetune.json"
    bench = FineTuning(path, arguments.minutes, arguments.tiny)
    bench.work(bench.all)


if __name__ == "__main__":
    main()
