"""What was run for 40_mae: `python -m benchmarks.mae COMMAND --out FOLDER`.

    digits       pre-train on scanned digits, and measure what the features are worth
    sweeps       vary positions, masking ratio, decoder, targets, and learning rate
    photographs  train the small model that comes with the library
    speed        time a pre-training step next to the transformers library

The records are written after every run. `cifar` trains on a GPU
(`python -m benchmarks.runs mae_cifar`).
"""

import itertools
import math
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F

from attnlib import mae, multihead
from attnlib.attention import attention
from attnlib.data import small_images
from attnlib.finetune import normalize_for
from attnlib.mae import MaskedAutoencoder, masked_loss, patchify, random_masking, unpatchify
from attnlib.models import create_model, load_pretrained
from attnlib.recipes import crop_and_flip
from attnlib.train import fit, shuffled_batches
from attnlib.vit import VisionTransformer
from benchmarks import runner, timing
from benchmarks.chapter import run_cells
from benchmarks.hidden import (
    COUNTS,
    SEEDS,
    STEPS,
    TUNING_RATES,
    digit_parts,
    fine_tuned,
    more_steps,
    probe,
)
from benchmarks.records import machine
from benchmarks.runner import Commands, Runs, save_half, tune


def load_sample_images():
    from sklearn import datasets  # which not every machine has

    return datasets.load_sample_images()


page = run_cells(
    *("40_mae", "pieces", "harmonic", "kernel", "lean-step"),
    modules=[mae, multihead],
    names=dict(F=F, attention=attention, load_sample_images=load_sample_images),
)
SHAPE = dict(img_size=8, patch_size=2, in_chans=1, embed_dim=64, depth=4, num_heads=4)
DECODER = dict(decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=4)
STEPS_LONG = 3000
STEPS_SWEEP = 2000
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
    """The mean squared error of masked patches, over the same masks for every model."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(draws):
        noise = torch.rand(len(images), model.patch_embed.num_patches, generator=generator)
        errors.append(model.eval()(images, mask_ratio, noise).loss)
    return round(torch.stack(errors).mean().item(), 4)


def filler_error(fill, images, mask_ratio=0.75, draws=4):
    """The same of a function of images and masked pixels."""
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    count = 0
    for _ in range(draws):
        noise = torch.rand(len(images), 16, generator=generator)
        _, masked = random_masking(noise, mask_ratio)
        masked = page.masked_pixels(masked, (4, 4), 2)
        total += ((fill(images, masked) - images).square() * masked).sum().item()
        count += masked.sum().item()
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
        self.parts = digit_parts()
        self.tiny = tiny
        self.trained = {}
        if tiny:
            self.parts = {name: (x[:100], y[:100]) for name, (x, y) in self.parts.items()}

    def pretrained(self, variant, seed, steps, **options):
        """Pre-train once; a run that was interrupted goes on from its checkpoint."""
        rate = options.pop("mask_ratio", 0.75)
        lr = options.pop("lr", 2e-3)
        batch = 64 if variant in VARIANTS else 128
        torch.manual_seed(seed)
        model = network(**options)
        began = time.process_time()
        history = fit(
            model,
            shuffled_batches(self.parts["train"][0], batch_size=4 if self.tiny else batch),
            loss_fn=lambda model, batch: masked_loss(model, batch, rate),
            **dict(steps=steps, lr=lr, warmup=steps // 10, betas=(0.9, 0.95)),
            **dict(weight_decay=0.05, seed=seed, log_every=max(1, steps // 6)),
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
            model = self.trained[variant, seed]
            test = self.parts["test"][0]
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
            w: filler_error(lambda x, h, w=w: page.kernel_fill(x, train, h, w), valid)
            for w in widths
        }
        width = min(scores, key=scores.get)
        for name, fill in {
            "harmonic": lambda x, h: page.harmonic_fill(x, h, 100),
            "mean image": lambda x, h: train.mean(0, keepdim=True).expand_as(x),
            "linear": lambda x, h: page.linear_fill(x, train, h),
            "kernel": lambda x, h: page.kernel_fill(x, train, h, width),
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
            rates = (1e-3,) if self.tiny else TUNING_RATES
            tune(
                lambda lr, seed, name=name: self.tune(name, labels, steps, lr, seed),
                rates=rates,
                seeds=seeds,
                score=lambda run: run["valid"],
            )

    def equal_time(self, labels, seeds):
        """From scratch for the seconds that pre-training and fine-tuning have taken."""
        steps = 3 if self.tiny else STEPS[labels]
        runs = [r for r in self.record["tuning"] if r["contestant"] == "from scratch"]
        short = [r for r in runs if r["labels"] == labels and r["steps"] == steps]
        lr = max(short, key=lambda r: (r["seed"] == seeds[0], r["valid"]))["lr"]
        longs = [r["seconds"] for r in self.record["runs"] if r["variant"] == "long"]
        seconds = [r["seconds"] for r in short]
        pre = sum(longs) / len(longs)
        own = max(0.01, sum(seconds) / len(seconds))
        more = 6 if self.tiny else 100 * math.ceil(more_steps(steps, own, pre) / 100)
        for seed in seeds:
            known = [r for r in runs if (r["labels"], r["seed"]) == (labels, seed)]
            if not any(r["steps"] > steps for r in known):
                self.tune("from scratch", labels, more, lr, seed)

    def all(self):
        if self.tiny:
            seeds = (0,)
            counts = COUNTS[:1]
        else:
            seeds = SEEDS
            counts = COUNTS
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
    if tiny:
        steps = 2
        batch = 4
    else:
        steps = 20_000
        batch = 512
    history = fit(
        model,
        shuffled_batches(x, batch_size=batch),
        loss_fn=lambda model, batch: masked_loss(model, (crop_and_flip(batch[0]),)),
        **dict(steps=steps, lr=1e-3, warmup=steps // 10, betas=(0.9, 0.95)),
        **dict(weight_decay=0.05, log_every=max(1, steps // 10)),
        checkpoint=folder / "mae.json",
    )
    found = cifar_probe(features(model.encoder()), (x, y), test, tiny)
    return dict(history=history, probe=found)


def cifar_probe(of, train, test, tiny):
    """Logistic regression on 10,000 labelled images, its strength chosen on 5,000 others."""
    counts = (20, 10) if tiny else (10_000, 5000)
    (x, y) = train
    first = -counts[1]
    parts = {"train": (x[:first], y[:first]), "valid": (x[first:], y[first:]), "test": test}
    return probe(of, parts, counts[0], 0)


# --- two photographs -------------------------------------------------------------------------

PHOTOGRAPHS = "mae_photographs"
PHOTOGRAPH_RATES = (0.125, 0.25, 0.5, 0.75, 0.875)


def filled(model, images, noise, rate):
    """Patches (B, N, p·q·C) from the model and from two fillers, and which were masked."""
    grid = model.patch_embed.grid_size
    size = model.patch_size
    _, masked = random_masking(noise, rate)
    pixels = page.masked_pixels(masked, grid, size[0])
    seen = (images * ~pixels).sum((2, 3), keepdim=True) / (~pixels).sum((2, 3), keepdim=True)
    prediction = model.eval()(images, rate, noise).prediction
    found = {"masked autoencoder": unpatchify(prediction, grid, size)}
    found["mean color"] = seen.expand_as(images)
    found["harmonic"] = page.harmonic_fill(images, pixels)
    return {name: patchify(x, size) for name, x in found.items()}, masked


@torch.no_grad()
def errors(model, images, seed=0):
    """The mean squared error of masked pixels at each masking rate, {name: [...]}."""
    torch.manual_seed(seed)
    noise = torch.rand(len(images), model.patch_embed.num_patches)
    target = patchify(images, model.patch_size)
    found = {}
    for rate in PHOTOGRAPH_RATES:
        some, masked = filled(model, images, noise, rate)
        for name, x in some.items():
            error = ((x - target).square().mean(-1) * masked).sum() / masked.sum()
            found.setdefault(name, []).append(round(error.item(), 4))
    return found


def train_on_photographs(seed, images, test, steps, out):
    """A model trained with a seed, and the history of its training."""
    torch.manual_seed(seed)
    noise = torch.rand(len(test[:100]), 64)
    model = create_model(PHOTOGRAPHS)
    history = fit(
        model,
        shuffled_batches(images, batch_size=min(32, len(images)), seed=seed),
        loss_fn=lambda model, batch: masked_loss(
            model, (normalize_for(batch[0] / 255, PHOTOGRAPHS),)
        ),
        steps=steps,
        lr=2e-3,
        warmup=steps // 10,
        betas=(0.9, 0.95),
        weight_decay=0.05,
        log_every=max(1, steps // 10),
        evaluate=lambda model: {"test": model(test[:100], noise=noise).loss},
        checkpoint=out / "checkpoints" / f"{PHOTOGRAPHS}_{seed}.json",
    )
    return model, history


def photographs(arguments):
    """Train the small masked autoencoder that comes with the library on two photographs.

    It sees pieces of the left part of scikit-learn's photographs, 64 × 64 pixels with patches
    of 8 × 8, and is tested on pieces of the right part. Beside it stands what fills the same
    hidden patches without learning: the mean of the visible pixels, and harmonic interpolation.
    All are tested at several masking rates; the model was trained at one, 75%. The weights of
    seed 0 go to mae_photographs.safetensors in float16, the errors with each seed to
    mae_photographs.json, where those of other --seeds stay.
    """
    count = 64 if arguments.tiny else 8192
    steps = 4 if arguments.tiny else arguments.steps
    tests = 4 if arguments.tiny else 200
    images = (255 * page.photo_crops(count)).round().byte()
    test = normalize_for(page.photo_crops(tests, "test", seed=1), PHOTOGRAPHS)
    seen = normalize_for(page.photo_crops(tests, "train", seed=1), PHOTOGRAPHS)
    path = arguments.out / f"{PHOTOGRAPHS}.json"
    parameters = sum(p.numel() for p in create_model(PHOTOGRAPHS).parameters())
    bench = Runs(
        path, arguments.minutes, parameters=parameters, rates=PHOTOGRAPH_RATES, runs=[]
    )

    def run(seed):
        model, history = train_on_photographs(seed, images, test, steps, arguments.out)
        if seed == 0:
            save_half(model.state_dict(), path.with_suffix(".safetensors"), bits=7)
        return dict(history=history, test=errors(model, test), train=errors(model, seen))

    def go():
        for seed in arguments.seeds:
            bench.once(dict(seed=seed), partial(run, seed))

    bench.work(go)


# --- speed -----------------------------------------------------------------------------------

PEER = "transformers"


def pair(tiny):
    """Ours, and a function that makes theirs, whose weights ours then has."""
    if tiny:
        width = 24
        depth = 1
        heads = 3
    else:
        width = 768
        depth = 12
        heads = 12
    if tiny:
        decoder = 20
        blocks = 1
        decoder_heads = 5
    else:
        decoder = 512
        blocks = 8
        decoder_heads = 16
    torch.manual_seed(0)
    ours = MaskedAutoencoder(224, 16, 3, width, depth, heads, decoder, blocks, decoder_heads)

    def peer():
        import transformers  # which not every machine has

        config = transformers.ViTMAEConfig(
            **dict(hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads),
            **dict(intermediate_size=4 * width, decoder_hidden_size=decoder),
            **dict(decoder_num_hidden_layers=blocks, decoder_num_attention_heads=decoder_heads),
            **dict(decoder_intermediate_size=4 * decoder, layer_norm_eps=1e-6),
        )
        theirs = transformers.ViTMAEForPreTraining(config)
        load_pretrained(ours, theirs.state_dict())
        return theirs

    return ours, peer


def steps(tiny, device, dtype, batch, left_out):
    """A training step of each, and how far their losses differ; None without the peer."""
    ours, peer = pair(tiny)
    theirs = timing.attempt(left_out, PEER, lambda: peer().to(device, dtype))
    ours = ours.to(device, dtype)
    x = torch.randn(batch, 3, 224, 224, device=device, dtype=dtype)
    noise = torch.rand(batch, 196, device=device)
    losses = {
        "attnlib": lambda: ours(x, noise=noise).loss,
        "lean": lambda: page.lean_loss(ours, x, noise),
    }
    if theirs is not None:
        losses[PEER] = lambda: theirs(x, noise=noise).loss

    def step(name):
        def call():
            ours.zero_grad()
            if theirs is not None:
                theirs.zero_grad()
            losses[name]().backward()

        return call

    both = {name: losses[name] for name in ("attnlib", PEER) if name in losses}
    values = timing.attempt_all(
        {name: lambda f=f: f().item() for name, f in both.items()}, left_out
    )
    difference = None
    if len(values) == 2:
        difference = abs(values["attnlib"] - values[PEER])
    losses = {name: loss for name, loss in losses.items() if name not in left_out}
    return {name: step(name) for name in losses}, difference


def measure(dtype, batch, arguments, clock, left_out):
    """The row of a dtype."""
    device = arguments.device
    calls, difference = steps(arguments.tiny, device, getattr(torch, dtype), batch, left_out)
    times = timing.warm_turns(calls, arguments.repeats, device, left_out, clock)
    row = dict(difference=difference)
    row["ms"] = {name: round(statistics.median(ms), 1) for name, ms in times.items()}
    if PEER in times:
        for name, own in (("attnlib", row), ("lean", row.setdefault("lean", {}))):
            if name in times:
                own |= timing.ratio(times[name], times[PEER])
    return [row] if times else []


@torch.no_grad()
def encoder(arguments, clock, left_out):
    """The ratio of the encoder's times, for a quarter of the patches and for all."""
    device = arguments.device
    small = dict(embed_dim=24, depth=1, num_heads=3) if arguments.tiny else {}
    model = create_model("mae_vit_base_patch16", decoder_depth=1, **small)
    model.eval().to(device)
    x = torch.randn(4, 3, 224, 224, device=device)
    noise = torch.rand(4, 196, device=device)
    rates = {"quarter": 0.75, "all": 0.0}
    calls = {
        name: lambda rate=rate: model.forward_encoder(x, rate, noise)
        for name, rate in rates.items()
    }
    times = timing.warm_turns(calls, arguments.repeats, device, left_out, clock)
    return [timing.ratio(times["quarter"], times["all"])] if len(times) == 2 else []


def speed(arguments):
    """Time a pre-training step next to the transformers library.

    A step of the whole base model is the loss and its gradient; all have the same weights and
    are given the same noise. "lean" leaves out what the loss does not need. Then the encoder
    takes a quarter of the patches, and all of them, in turns. On a processor without
    instructions for bfloat16 only float32 is timed. On a CPU one thread is used, and its own
    time counts. The record is FOLDER/mae_speed_DEVICE.json.
    """
    device = arguments.device
    batch = 2
    torch.set_num_threads(1)
    fast_half = arguments.tiny or "bf16" in machine("cpu")["device"] or device == "cuda"
    clock = time.process_time if device == "cpu" else time.perf_counter
    path = arguments.out and arguments.out / f"mae_speed_{device}.json"
    bench = runner.Rows(path, device, arguments.minutes, arguments.tiny, rows=[], encoders=[])

    def go():
        for dtype in ("float32", "bfloat16") if fast_half else ("float32",):
            work = partial(measure, dtype, batch, arguments, clock)
            print(*bench.once(dict(dtype=dtype, batch=batch), work))
        work = partial(encoder, arguments, clock)
        for found in bench.once(dict(batch=4), work, kind="encoders"):
            bench.record["encoder"] = found

    bench.work(go)


def digits(arguments):
    """Pre-train on scanned digits, and measure what the features are worth.

    The model sees the 1,200 digits of the training part without their labels: patches of 2 × 2
    pixels, 12 of 16 masked, an encoder of width 64 with 4 blocks, a decoder of width 32 with
    one block. Then

    - its error on masked patches of test digits is compared with the mean image, the best
      linear prediction, kernel regression, and harmonic interpolation;
    - its features are used with 20, 50, 100, and 1,200 labels, frozen and fine-tuned, next to
      raw pixels, an untrained encoder, and a network from scratch, also at equal time.

    The record is FOLDER/mae.json. The weights of the first seed go to
    FOLDER/mae_digits.safetensors, unfinished runs and all weights to FOLDER/checkpoints.
    """
    bench = Masked(arguments.out / "mae.json", arguments.minutes, arguments.tiny)
    bench.work(bench.all)


def sweeps(arguments):
    """Vary positions, masking ratio, decoder depth, targets, and learning rate.

    Each run has 2,000 steps with half the batch size of "digits". The record is
    FOLDER/mae_sweeps.json.
    """
    bench = Masked(arguments.out / "mae_sweeps.json", arguments.minutes, arguments.tiny)
    bench.work(bench.sweeps)


def main(arguments=None):
    commands = Commands(__doc__)
    commands.experiment("digits", digits)
    commands.experiment("sweeps", sweeps)
    parser = commands.experiment("photographs", photographs)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    commands.timing("speed", speed, repeats=9)
    commands.run(arguments)


if __name__ == "__main__":
    main()
