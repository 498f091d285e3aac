"""A masked autoencoder on scanned digits: `python -m benchmarks.mae --out FOLDER`.

Pre-trains on the 1,200 digits of the training part without their labels: patches of 2 × 2
pixels, 12 of 16 hidden, an encoder 64 wide with 4 blocks, a decoder 32 wide with one. Then

- how well it fills hidden patches of test digits, beside the mean image, the best linear
  prediction, kernel regression and harmonic interpolation;
- what its features are worth with 20, 50, 100 and 1,200 labels, frozen and fine-tuned, beside
  raw pixels, an untrained encoder and a network from scratch, the latter also at equal time;

and with --sweeps, in runs of 2,000 steps with half of the batch,

- what positions, the masking rate, the depth of the decoder, normalized targets and the
  learning rate change.

The record, FOLDER/mae.json or mae_sweeps.json, is written after every run. The weights of the
first seed go to FOLDER/mae_digits.safetensors, unfinished runs and those of all seeds to
FOLDER/checkpoints. With --minutes the command stops after that time, and goes on when it is
given again. With --tiny a few runs take a few steps, to see that all works; such a record means
nothing.
"""

import itertools
import math
import time

import torch

from attnlib.data import small_images
from attnlib.mae import (
    MaskedAutoencoder,
    harmonic_fill,
    hidden_pixels,
    kernel_fill,
    linear_fill,
    masked_loss,
    random_masking,
)
from attnlib.recipes import crop_and_flip
from attnlib.train import epochs, fit
from attnlib.vit import VisionTransformer
from benchmarks.hidden import (
    COUNTS,
    SEEDS,
    STEPS,
    digit_parts,
    fine_tuned,
    more_steps,
    probe,
    tuned,
)
from benchmarks.runner import Runs, experiment_parser, save_half

SHAPE = dict(img_size=8, patch_size=2, in_chans=1, embed_dim=64, depth=4, num_heads=4)
DECODER = dict(decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=4)
STEPS_LONG, STEPS_SWEEP = 3000, 2000
RATES = 0.25, 0.5, 0.75, 0.875
VARIANTS = {  # what differs from the first, which hides 75% and learns with a rate of 2e-3
    "base": {},
    **{f"rate {rate}": dict(mask_ratio=rate) for rate in RATES if rate != 0.75},
    "normalized": dict(norm_pix_loss=True),
    **{f"decoder {depth}": dict(decoder_depth=depth) for depth in (2, 4)},
    **{f"lr {lr}": dict(lr=lr) for lr in (1e-3, 4e-3)},
    "positions in the decoder": dict(without=("pos_embed",)),
    "positions in the encoder": dict(without=("decoder_pos_embed",)),
    "no positions": dict(without=("pos_embed", "decoder_pos_embed")),
}


def network(without=(), **options):
    """A masked autoencoder of the experiment; positions named in `without` are zero."""
    model = MaskedAutoencoder(**SHAPE, **DECODER | options)
    for name in without:
        getattr(model, name).data.zero_()
    return model


@torch.no_grad()
def masked_error(model, images, mask_ratio=0.75, draws=4):
    """The mean squared error of hidden patches, over the same masks for every model."""
    generator, errors = torch.Generator().manual_seed(0), []
    for _ in range(draws):
        noise = torch.rand(len(images), model.patch_embed.num_patches, generator=generator)
        errors.append(model.eval()(images, mask_ratio, noise)[0])
    return round(torch.stack(errors).mean().item(), 4)


def filler_error(fill, images, mask_ratio=0.75, draws=4):
    """The same of a function of images and hidden pixels."""
    generator, total, count = torch.Generator().manual_seed(0), 0.0, 0
    for _ in range(draws):
        noise = torch.rand(len(images), 16, generator=generator)
        hidden = hidden_pixels(random_masking(noise, mask_ratio)[1], (4, 4), 2)
        total += ((fill(images, hidden) - images).square() * hidden).sum().item()
        count += hidden.sum().item()
    return round(total / count, 4)


def features(encoder):
    """Tokens of patches after the last norm, their mean: (n, D) as an array."""
    device = next(encoder.parameters()).device

    @torch.no_grad()
    def of(images):
        parts = [encoder.eval().forward_features(x.to(device)) for x in images.split(1000)]
        return torch.cat([x[:, 1:].mean(1).cpu() for x in parts]).numpy()

    return of


class Masked(Runs):
    """The runs of the record."""

    def __init__(self, path, minutes, tiny):
        super().__init__(path, minutes, runs=[], fillers=[], probes=[], tuning=[])
        self.parts, self.tiny, self.trained = digit_parts(), tiny, {}
        if tiny:
            self.parts = {name: (x[:100], y[:100]) for name, (x, y) in self.parts.items()}

    def pretrained(self, variant, seed, steps, **options):
        """Pre-train once; a run that was interrupted goes on from its checkpoint."""
        rate, lr = options.pop("mask_ratio", 0.75), options.pop("lr", 2e-3)
        batch = 64 if variant in VARIANTS else 128
        torch.manual_seed(seed)
        model, began = network(**options), time.process_time()
        history = fit(
            model,
            lambda model, batch: masked_loss(model, batch, rate),
            epochs(self.parts["train"][0], batch_size=4 if self.tiny else batch),
            **dict(steps=steps, lr=lr, warmup=steps // 10, betas=(0.9, 0.95)),
            **dict(weight_decay=0.05, seed=seed, every=max(1, steps // 6)),
            evaluate=lambda model: self.judged(model, rate, seed),
            checkpoint=self.path.parent / "checkpoints" / f"mae-{variant}-{seed}.json",
        )
        seconds = round(time.process_time() - began, 1)
        self.trained[variant, seed] = model
        return dict(history=history, seconds=seconds)

    def judged(self, model, rate, seed):
        """On validation images: the masked error, and the probe's accuracy with 100 labels."""
        found = probe(features(model.encoder()), self.parts, 20 if self.tiny else 100, seed)
        error = masked_error(model, self.parts["valid"][0], rate)
        return {"valid": error, "probe": found["valid"]}

    def run(self, variant, seed, steps, **options):
        """The entry of a pre-training: its history, its error on test digits when 75% of them
        is hidden and at its own rate, and probes of its features."""

        def make():
            entry = self.pretrained(variant, seed, steps, **options)
            model, test = self.trained[variant, seed], self.parts["test"][0]
            error = None if options.get("norm_pix_loss") else masked_error(model, test)
            own = masked_error(model, test, options.get("mask_ratio", 0.75))
            of = features(model.encoder())
            found = {
                n: probe(of, self.parts, n, seed) for n in (20 if self.tiny else 100, 1200)
            }
            return dict(**entry, error=error, own_error=own, probes=found)

        return self.once(dict(variant=variant, steps=steps, seed=seed), make)

    def model(self, variant, seed, steps, **options):
        """The trained model, from its checkpoint if it is not from this process."""
        self.run(variant, seed, steps, **options)
        if (variant, seed) not in self.trained:
            self.pretrained(variant, seed, steps, **options)
        return self.trained[variant, seed]

    def fillers(self):
        """What fills hidden patches without a network; the kernel's width is validated."""
        train, valid, test = (self.parts[name][0] for name in ("train", "valid", "test"))
        widths = (2.0,) if self.tiny else (0.3, 0.4, 0.5, 0.7, 1.0, 1.4)
        scores = {
            w: filler_error(lambda x, h, w=w: kernel_fill(x, train, h, w), valid)
            for w in widths
        }
        width = min(scores, key=scores.get)
        for name, fill in {
            "harmonic": lambda x, h: harmonic_fill(x, h, 100),
            "mean image": lambda x, h: train.mean(0, keepdim=True).expand_as(x),
            "linear": lambda x, h: linear_fill(x, train, h),
            "kernel": lambda x, h: kernel_fill(x, train, h, width),
        }.items():
            what = dict(filler=name)
            make = lambda fill=fill: dict(error=filler_error(fill, test))  # noqa: E731
            entry = self.once(what, make, "fillers")
        entry["width"] = width

    def probes(self, seed, steps):
        torch.manual_seed(seed)
        contestants = {
            "raw pixels": lambda x: x.flatten(1).numpy(),
            "untrained": features(network().encoder()),
            "MAE": features(self.model("long", seed, steps).encoder()),
        }
        for name, labels in itertools.product(contestants, COUNTS[:1] if self.tiny else COUNTS):
            what = dict(contestant=name, labels=labels, seed=seed)
            make = lambda n=name, k=labels: probe(contestants[n], self.parts, k, seed)  # noqa: E731
            self.once(what, make, "probes")

    def tune(self, contestant, labels, steps, lr, seed):
        """The entry of a fine-tuning; the class token is what the head is given."""
        options = dict(num_classes=10, global_pool="token")

        def make():
            if contestant == "from scratch":
                return fine_tuned(
                    lambda: VisionTransformer(**SHAPE, **options),
                    *(self.parts, labels, seed, steps, lr, 1.0),
                )
            model = self.model("long", seed, self.steps)
            return fine_tuned(
                lambda: model.encoder(**options), self.parts, labels, seed, steps, lr, 0.75
            )

        what = dict(contestant=contestant, labels=labels, steps=steps, lr=lr, seed=seed)
        return self.once(what, make, "tuning")

    def tuning(self, labels, seeds):
        steps = 3 if self.tiny else STEPS[labels]
        for name in ("MAE", "from scratch"):
            tuned(
                lambda seed, lr, name=name: self.tune(name, labels, steps, lr, seed),
                **(dict(rates=(1e-3,), seeds=seeds) if self.tiny else dict(seeds=seeds)),
            )

    def equal_time(self, labels, seeds):
        """From scratch for the seconds that pre-training and fine-tuning have taken."""
        steps = 3 if self.tiny else STEPS[labels]
        runs = [r for r in self.record["tuning"] if r["contestant"] == "from scratch"]
        short = [r for r in runs if r["labels"] == labels and r["steps"] == steps]
        lr = max(short, key=lambda r: (r["seed"] == seeds[0], r["valid"]))["lr"]
        longs = [r["seconds"] for r in self.record["runs"] if r["variant"] == "long"]
        seconds = [r["seconds"] for r in short]
        pre, own = sum(longs) / len(longs), max(0.01, sum(seconds) / len(seconds))
        more = 6 if self.tiny else 100 * math.ceil(more_steps(steps, own, pre) / 100)
        for seed in seeds:
            known = [r for r in runs if (r["labels"], r["seed"]) == (labels, seed)]
            if not any(r["steps"] > steps for r in known):
                self.tune("from scratch", labels, more, lr, seed)

    def all(self):
        seeds, counts = ((0,), COUNTS[:1]) if self.tiny else (SEEDS, COUNTS)
        self.steps = 3 if self.tiny else STEPS_LONG
        self.fillers()
        for seed in seeds:
            model = self.model("long", seed, self.steps)
            if seed == 0:
                save_half(model.state_dict(), self.path.parent / "mae_digits.safetensors")
            self.probes(seed, self.steps)
        for labels in sorted(counts, key=lambda n: n != 100):  # what matters most comes first
            self.tuning(labels, seeds)
        for labels in sorted(counts, key=(100, 1200, 50, 20).index):
            self.equal_time(labels, seeds)

    def sweeps(self):
        for name, seed in itertools.product(VARIANTS, (0,) if self.tiny else SEEDS):
            if name.startswith("lr") and seed > 0:  # rates are chosen with the first seed
                continue
            self.run(name, seed, 2 if self.tiny else STEPS_SWEEP, **VARIANTS[name])


def cifar(folder, tiny):
    """Pre-train on CIFAR-10 without labels and probe; for a GPU (see `benchmarks.runs`)."""
    (x, y), test = small_images("cifar10")
    shape = dict(img_size=32, patch_size=4, embed_dim=192, depth=12, num_heads=3)
    decoder = dict(decoder_embed_dim=96, decoder_depth=4, decoder_num_heads=3)
    small = dict(embed_dim=12, depth=1, decoder_embed_dim=12, decoder_depth=1)
    torch.manual_seed(0)
    model = MaskedAutoencoder(**shape | decoder | (small if tiny else {}), norm_pix_loss=True)
    steps, batch = (2, 4) if tiny else (20_000, 512)
    history = fit(
        model,
        lambda model, batch: masked_loss(model, (crop_and_flip(batch[0]),)),
        epochs(x, batch_size=batch),
        **dict(steps=steps, lr=1e-3, warmup=steps // 10, betas=(0.9, 0.95)),
        **dict(weight_decay=0.05, every=max(1, steps // 10)),
        checkpoint=folder / "mae.json",
    )
    found = cifar_probe(features(model.encoder()), (x, y), test, tiny)
    return dict(history=history, probe=found)


def cifar_probe(of, train, test, tiny):
    """Logistic regression on 10,000 labelled images, its strength chosen on 5,000 others."""
    counts = (20, 10) if tiny else (10_000, 5000)
    (x, y), first = train, -counts[1]
    parts = {"train": (x[:first], y[:first]), "valid": (x[first:], y[first:]), "test": test}
    return probe(of, parts, counts[0], 0)


def main():
    parser = experiment_parser(__doc__)
    parser.add_argument("--sweeps", action="store_true", help="the shorter runs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "mae_sweeps" if arguments.sweeps else "mae"
    bench = Masked(arguments.out / f"{name}.json", arguments.minutes, arguments.tiny)
    bench.work(bench.sweeps if arguments.sweeps else bench.all)


if __name__ == "__main__":
    main()
