"""What was run for 36_finetune: `python -m benchmarks.finetune COMMAND --out FOLDER`.

    finetune  fine-tune with few labels
    sizes     measure speed and memory of the backbones in one setting

`benchmarks.runner` says how runs are resumed and recorded.
"""

import itertools
import statistics
from functools import cache

import torch

from attnlib import (  # noqa: F401  they register their models
    deit,
    swin,
    swinv2,
    tnt,
    vit,
)
from attnlib.data import describe_scenes, draw_scenes
from attnlib.finetune import MixupCrossEntropy, layer_scales
from attnlib.models import create_model
from attnlib.train import fit
from benchmarks.records import write_record
from benchmarks.runner import (
    Commands,
    Runs,
    accuracy,
    logistic_regression,
    tune,
)
from benchmarks.timing import peak_mib, take_turns

MODEL = "vit_collages"
CONTESTANTS = {  # pretrained, layer decay and mixup, rates
    "from scratch": (False, dict(decay=1.0), (5e-4, 1e-3, 2e-3)),
    "one rate": (True, dict(decay=1.0), (3e-4, 1e-3, 3e-3)),
    "layer decay": (True, dict(decay=0.65), (1e-3, 3e-3, 1e-2)),
    "layer decay, mixup": (True, dict(decay=0.65, alpha=0.2), (1e-3, 3e-3, 1e-2)),
}
STEPS = {100: 100, 1000: 200}
SEEDS = (0, 1, 2)


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
        self.tiny = tiny
        sizes = (20, 20) if tiny else (200, 600)
        self.valid = shapes(sizes[0], 50)
        self.test = shapes(sizes[1], 51)

    def probe(self, labels, seed):
        """Logistic regression, its strength chosen on validation images."""

        def train():
            pairs = shapes(labels, 100 + seed), self.valid, self.test
            known, valid, test = ((features(images), answers) for images, answers in pairs)
            strengths = (0.1, 1.0, 10.0, 100.0)
            return logistic_regression(known, valid, test, strengths, max_iter=3000)

        what = dict(contestant="head alone", labels=labels, steps=0, lr=None, seed=seed)
        return self.once(what, train)

    def network(self, name, labels, steps, lr, seed):
        def train():
            pretrained, options, _ = CONTESTANTS[name]
            torch.manual_seed(seed)
            model = network(pretrained)
            curve = []
            tested = {}

            def look(model, record):
                """The accuracy of the weights themselves, and not of their average."""
                model.eval()
                curve.append((record["step"], accuracy(model, self.valid)))
                tested["test"] = accuracy(model, self.test)

            fit(
                model,
                shapes(labels, 100 + seed),
                loss_fn=MixupCrossEntropy(10, options.get("alpha", 0.0)),
                steps=steps,
                batch_size=16,
                lr=lr,
                warmup=max(1, steps // 10),
                weight_decay=0.05,
                lr_scale=layer_scales(model, options["decay"]),
                ema=0.9,
                seed=seed,
                log_every=max(1, steps // 4),
                callback=look,
            )
            model.eval()
            return dict(
                curve=curve,
                valid=curve[-1][1],
                valid_averaged=accuracy(model, self.valid),
                test=tested["test"],
                test_averaged=accuracy(model, self.test),
            )

        what = dict(contestant=name, labels=labels, steps=steps, lr=lr, seed=seed)
        return self.once(what, train)

    def contestant(self, name, labels, steps, seeds, rates):
        """All rates with the first seed, the best of them with all."""
        best, _ = tune(
            lambda lr, seed: self.network(name, labels, steps, lr, seed),
            rates=rates,
            seeds=seeds,
            score=lambda run: run["valid"],
        )
        return best

    def all(self):
        if not self.tiny:
            sizes = STEPS
            seeds = SEEDS
        else:
            sizes = {20: 3}
            seeds = (0,)
        for labels, seed in itertools.product(sizes, seeds):
            self.probe(labels, seed)
        best = {}
        for (labels, steps), name in itertools.product(sizes.items(), CONTESTANTS):
            rates = CONTESTANTS[name][2][: 1 if self.tiny else None]
            best[labels, name] = self.contestant(name, labels, steps, seeds, rates)
        for labels, steps in sizes.items():
            lr = best[labels, "from scratch"]
            self.network("from scratch", labels, 4 * steps, lr, seeds[0])


def finetune(arguments):
    """Fine-tune with few labels.

    The ViT that comes with the library names the largest digit of a collage. Here it learns to
    name the kinds of the two shapes in a drawn scene, ten pairs, from 100 or 1,000 labelled
    scenes. Contestants: logistic regression on the class token; the network from scratch; and
    from its weights, with one rate for all layers, with rates by layer, and with mixup as well.
    Each takes its learning rate from validation scenes, on the first seed, and is then trained
    with the other two, each with labelled scenes of its own. Every run is tested with its last
    and with its averaged weights. From scratch there are also runs four times as long.

    The record, FOLDER/finetune.json, is written after every run.
    """
    path = arguments.out / "finetune.json"
    bench = FineTuning(path, arguments.minutes, arguments.tiny)
    bench.work(bench.all)


# --- speed and memory ------------------------------------------------------------------------

SIZES_NAMES = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch32_224",
    "vit_base_patch16_224",
    "deit_small_distilled_patch16_224",
    "swin_tiny_patch4_window7_224",
    "swin_small_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "swinv2_tiny_window16_256",
    "tnt_s_patch16_224",
)
SIZES_BATCH = 4


def forward(name, device):
    """A function that passes a batch through a model of this name."""
    model = create_model(name, device=device).eval()
    side = 256 if name.endswith("256") else 224
    x = torch.rand(SIZES_BATCH, 3, side, side, device=device)

    def call():
        with torch.no_grad():
            return model(x)

    return call


def sizes(arguments):
    """Measure speed and memory of the backbones in one setting.

    For the small sizes a forward pass of four images in float32 and in evaluation, without
    gradients: images per second, from the median of the rounds, in which all models take turns,
    and the MiB by which the pass raises the memory in use. The record is FOLDER/sizes.json.
    """
    if arguments.tiny:
        names = SIZES_NAMES[:1]
        rounds = 1
    else:
        names = SIZES_NAMES
        rounds = 7
    calls = {name: forward(name, arguments.device) for name in names}
    memory = {name: peak_mib(call, arguments.device) for name, call in calls.items()}
    times = take_turns(calls, rounds, arguments.device)
    rows = [
        {
            "model": name,
            "images_per_second": round(1000 * SIZES_BATCH / statistics.median(times[name]), 2),
            "memory": memory[name],
        }
        for name in names
    ]
    path = arguments.out / "sizes.json"
    write_record(
        path, {"batch": SIZES_BATCH, "dtype": "float32", "rows": rows}, arguments.device
    )
    print(f"{len(rows)} models, recorded in {path}")


def main(arguments=None):
    commands = Commands(__doc__)
    commands.experiment("finetune", finetune)
    parser = commands.experiment("sizes", sizes)
    parser.add_argument("--device", default="cpu")
    commands.run(arguments)


if __name__ == "__main__":
    main()
