"""What was run for 41_beit: `python -m benchmarks.beit COMMAND --out FOLDER`.

    digits    pre-train on scanned digits, and measure what the features are worth
    variants  compare tokenizers and masks

A record is written after every run.
"""

import itertools
import math
import random
import statistics
import time
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.cluster import KMeans

from attnlib.beit import (
    Beit,
    BeitForMaskedImageModeling,
    DiscreteVAE,
    FeatureEncoder,
    VectorQuantizer,
    VQAutoencoder,
    block_mask,
    conv_decoder,
    conv_encoder,
    dvae_loss,
    masked_loss,
    perplexity,
)
from attnlib.train import fit, shuffled_batches
from benchmarks import mae
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
from benchmarks.runner import Commands, Runs, save_half, tune
from benchmarks.timing import ratio, take_turns

SHAPE = dict(img_size=8, patch_size=2, in_chans=1, embed_dim=64, depth=4, num_heads=4)
SCALE = dict(init_values=0.1)  # LayerScale
# tokens; hidden patches, and of the smallest block
VOCABULARY = 64
HIDDEN = 6
SMALLEST = 2
# steps
LONG = 2800
SHORT = 1000
TUNING = 600
TOKENIZING = 600
RATES = 2e-3, 4e-3, 8e-3, 1.6e-2  # of pre-training
TOKENIZERS = {  # what differs: the start of the codes, the weight of the divergence
    "VQ": dict(kmeans_steps=10),
    "VQ, random start": dict(kmeans_steps=0),
    "dVAE": dict(beta=0.0),
    "dVAE with KL": dict(beta=0.1),
}
BEST = 8e-3  # of these rates, found by "main"
VARIANTS = {  # tokens, and how patches are hidden
    "blocks": ("VQ", "blocks"),
    "random": ("VQ", "random"),  # as many patches, one by one
    "dVAE tokens": ("dVAE", "blocks"),
    "teacher": ("teacher", "blocks"),
}


def masks(kind, count=4000, seed=0):
    """Masks (count, 4, 4) that hide at most `HIDDEN` patches: blocks, or as many at random."""
    rng = random.Random(seed)
    draw = [block_mask((4, 4), HIDDEN, SMALLEST, rng=rng) for _ in range(count)]
    blocks = torch.stack(draw)
    if kind == "blocks":
        return blocks
    noise = torch.rand(count, 16, generator=torch.Generator().manual_seed(seed))
    ranks = noise.argsort(1).argsort(1)
    return (ranks < blocks.flatten(1).sum(1, keepdim=True)).unflatten(1, (4, 4))


def vq(kmeans_steps=10):
    """The tokenizer of the chapter."""
    return VQAutoencoder(
        conv_encoder(1, 32, 8, 2),
        VectorQuantizer(VOCABULARY, 8, kmeans_steps=kmeans_steps),
        conv_decoder(8, 32, 1, 2),
    )


def vq_loss(model, batch):
    x = batch[0]
    target = batch[-1]
    found, _, commitment = model(x)
    return len(x) * (F.mse_loss(found, target) + commitment), len(x)


def teacher_loss(model, batch):
    """One minus the cosine between the decoder's output and the teacher's features."""
    x, target = batch
    found, _, commitment = model(x)
    return len(x) * (1 - F.cosine_similarity(found, target).mean() + commitment), len(x)


class Tokens(Runs):
    """The runs of a record; what was trained is kept."""

    def __init__(self, path, minutes, tiny):
        super().__init__(
            path, minutes, runs=[], tokenizers=[], rates=[], probes=[], tuning=[], pace=[]
        )
        self.parts = digit_parts()
        self.tiny = tiny
        self.kept = {}
        if tiny:
            self.parts = {name: (x[:100], y[:100]) for name, (x, y) in self.parts.items()}
        if tiny:
            self.long = 4
            self.short = 3
        else:
            self.long = LONG
            self.short = SHORT
        self.seeds = (0,) if tiny else SEEDS
        self.masks = {kind: masks(kind) for kind in ("blocks", "random")}

    def train(self, model, loss_fn, batches, steps, lr, seed, **options):
        """Train; returns the history and the seconds of CPU time."""
        began = time.process_time()
        kept = dict(warmup=steps // 10, seed=seed, log_every=max(1, steps // 6))
        history = fit(model, batches, loss_fn=loss_fn, steps=steps, lr=lr, **kept, **options)
        return history, round(time.process_time() - began, 1)

    def batches(self, seed, *tensors):
        return shuffled_batches(*tensors, batch_size=4 if self.tiny else 64, seed=seed)

    # --- tokenizers ---------------------------------------------------------------------------

    def trained_tokenizer(self, name, seed):
        torch.manual_seed(seed)
        x = self.parts["train"][0]
        steps = 3 if self.tiny else TOKENIZING
        if name.startswith("dVAE"):
            model = DiscreteVAE(VOCABULARY, 1, 2, 32)
            beta = TOKENIZERS[name]["beta"]

            def loss_fn(model, batch, *, step):
                tau = 0.3 ** (step / steps)  # the temperature falls from 1 to 0.3
                loss, count = dvae_loss(model, batch, beta, tau)
                return loss / 64, count

            tensors = (x,)
        elif name == "teacher":
            teacher = self.teacher()
            model = VQAutoencoder(
                FeatureEncoder(Beit(**SHAPE | dict(depth=2), num_classes=0), 8),
                VectorQuantizer(VOCABULARY, 8),
                nn.Sequential(nn.Conv2d(8, 64, 1), nn.GELU(), nn.Conv2d(64, 64, 1)),
            )
            loss_fn = teacher_loss
            tensors = (x, teacher(x))
        else:
            model = vq(**TOKENIZERS[name])
            loss_fn = vq_loss
            tensors = (x,)
        batches = self.batches(seed, *tensors)
        _, seconds = self.train(model, loss_fn, batches, steps, 3e-3, seed, weight_decay=0.0)
        return model.eval(), seconds

    def teacher(self):
        """Features (n, 64, 4, 4) of the masked autoencoder, standardized place by place."""
        model = mae.network()
        path = self.path.parent / "mae_digits.safetensors"
        if path.exists():
            model.load_state_dict({k: x.float() for k, x in load_file(path).items()})
        elif not self.tiny:
            raise FileNotFoundError(
                f"{path}: give the command `python -m benchmarks.mae digits` first"
            )
        encoder = model.encoder().eval()

        @torch.no_grad()
        def features(x):
            return encoder.forward_intermediates(x, 1, norm=True, intermediates_only=True)[0]

        known = features(self.parts["train"][0])
        return lambda x: (features(x) - known.mean(0)) / known.std(0)

    def tokenizer(self, name, seed):
        """The trained tokenizer; what it is worth is recorded."""
        key = "tokenizer", name, seed

        def make():
            self.kept[key], seconds = self.trained_tokenizer(name, seed)
            return self.judged(self.kept[key]) | dict(seconds=seconds)

        self.once(dict(tokenizer=name, seed=seed), make, "tokenizers")
        if key not in self.kept:  # it is in the record, and has to be trained again
            self.kept[key], _ = self.trained_tokenizer(name, seed)
        return self.kept[key]

    @torch.no_grad()
    def judged(self, model):
        """Codes that occur in test images, their perplexity, the error of reconstructions."""
        x = self.parts["test"][0]
        tokens = model.tokens(x)
        found = dict(used=len(tokens.unique()), perplexity=perplexity(tokens, VOCABULARY))
        y = model.decode(tokens)
        found["error"] = F.mse_loss(y, x).item() if y.shape == x.shape else None
        return found | dict(counts=self.histogram(model.tokens))

    def histogram(self, tokens):
        """Accuracy of logistic regression on how often each token occurs in an image."""

        @torch.no_grad()
        def features(x):
            return F.one_hot(tokens(x).flatten(1), VOCABULARY).sum(1).float().numpy()

        return probe(features, self.parts, COUNTS[-1], 0)["test"]

    def clusters(self, seed):
        """The same numbers of k-means on the pixels of patches."""

        def make():
            train, test = (
                F.unfold(self.parts[name][0], 2, stride=2).mT.flatten(0, 1).numpy()
                for name in ("train", "test")
            )
            count = 16 if self.tiny else VOCABULARY
            model = KMeans(count, n_init=1, random_state=seed).fit(train)
            tokens = torch.tensor(model.predict(test)).long()
            error = float(((model.cluster_centers_[tokens] - test) ** 2).mean())
            values = dict(used=len(tokens.unique()), perplexity=perplexity(tokens, count))
            return values | dict(error=error)

        self.once(dict(tokenizer="k-means", seed=seed), make, "tokenizers")

    # --- pre-training -------------------------------------------------------------------------

    @torch.no_grad()
    def guessed(self, model, name, tokens, draws=4):
        """Masked accuracy and cross-entropy, over the same masks by blocks for every model."""
        x = self.parts[name][0]
        pool = masks("blocks", seed=1)
        total = right = count = 0
        for draw in range(draws):
            masked = pool[draw * len(x) : (draw + 1) * len(x)]
            logits = model(x, masked)
            wanted = tokens[masked]
            total += F.cross_entropy(logits, wanted, reduction="sum").item()
            right += (logits.argmax(-1) == wanted).sum().item()
            count += len(wanted)
        return dict(accuracy=round(right / count, 4), entropy=round(total / count, 4))

    def by_place(self, train, test):
        """What is known of a token from its place alone, counted in training images."""
        counts = 0.1 + F.one_hot(train, VOCABULARY).sum(0)  # (4, 4, K)
        log_p = (counts / counts.sum(-1, keepdim=True)).log()

        def model(x, masked):
            return log_p.expand(len(x), -1, -1, -1)[masked]

        found = self.guessed(model, "test", test)
        return dict(place_accuracy=found["accuracy"], place_entropy=found["entropy"])

    def pretrained(self, variant, seed, steps, lr):
        """Pre-train; returns the model and what is recorded of it."""
        name, kind = VARIANTS[variant]
        tokenizer = self.tokenizer(name, seed)
        pool = self.masks[kind]
        with torch.no_grad():
            tokens = {part: tokenizer.tokens(x) for part, (x, _) in self.parts.items()}
        torch.manual_seed(seed)
        model = BeitForMaskedImageModeling(**SHAPE, **SCALE, vocab_size=VOCABULARY)
        some = self.batches(seed, self.parts["train"][0], tokens["train"])

        def batches(step):
            drawn = torch.Generator().manual_seed(1_000_003 * seed + step)
            x, wanted = some(step)
            return x, wanted, pool[torch.randint(len(pool), (len(x),), generator=drawn)]

        history, seconds = self.train(
            *(model, masked_loss, batches, steps, lr, seed),
            weight_decay=0.05,
            evaluate=lambda model: self.guessed(model, "valid", tokens["valid"]),
            checkpoint=self.path.parent
            / "checkpoints"
            / f"beit-{variant}-{seed}-{steps}-{lr}.json",
        )
        entry = dict(history=history, seconds=seconds)
        entry |= self.guessed(model.eval(), "test", tokens["test"])
        return model, entry | self.by_place(tokens["train"], tokens["test"])

    def model(self, variant, seed, steps, lr):
        """The pre-trained model; its run is recorded."""
        key = variant, seed, steps, lr
        if key not in self.kept:
            self.kept[key], entry = self.pretrained(*key)
            what = dict(variant=variant, seed=seed, steps=steps, lr=lr)
            self.once(what, lambda: entry)
        return self.kept[key]

    def best_rate(self):
        """Of pre-training, by the masked cross-entropy on validation images."""
        steps = 2 if self.tiny else TUNING
        found = {}
        for lr in RATES[:1] if self.tiny else RATES:
            make = lambda lr=lr: self.pretrained("blocks", 0, steps, lr)[1]  # noqa: E731
            entry = self.once(dict(lr=lr, steps=steps, seed=0), make, "rates")
            found[lr] = entry["history"][-1]["entropy"]
        return min(found, key=found.get)

    # --- what features are worth --------------------------------------------------------------

    def probes(self, contestants, seed, counts):
        for name, labels in itertools.product(contestants, counts):
            what = dict(contestant=name, labels=labels, seed=seed)
            make = lambda n=name, k=labels: probe(contestants[n], self.parts, k, seed)  # noqa: E731
            self.once(what, make, "probes")

    def fine_tune(self, contestant, labels, steps, lr, seed):
        def make():
            if contestant == "from scratch":
                return fine_tuned(
                    lambda: Beit(**SHAPE, **SCALE, num_classes=10),
                    *(self.parts, labels, seed, steps, lr, 1.0),
                )
            model = self.model("blocks", seed, self.long, self.lr)
            return fine_tuned(
                lambda: model.encoder(10), self.parts, labels, seed, steps, lr, 0.75
            )

        what = dict(contestant=contestant, labels=labels, steps=steps, lr=lr, seed=seed)
        return self.once(what, make, "tuning")

    def tuning(self, labels):
        """BEiT and a network from scratch; returns the latter's best rate and its seconds."""
        steps = 3 if self.tiny else STEPS[labels]
        for name in ("BEiT", "from scratch"):
            rate, entries = tune(
                lambda lr, seed, name=name: self.fine_tune(name, labels, steps, lr, seed),
                rates=(1e-3,) if self.tiny else TUNING_RATES,
                seeds=self.seeds,
                score=lambda run: run["valid"],
            )
        return steps, rate, sum(entry["seconds"] for entry in entries) / len(entries)

    def equal_time(self, labels):
        """From scratch, for as long as tokenizer, pre-training and fine-tuning have taken."""
        steps, rate, own = self.tuning(labels)
        lists = self.record["runs"], self.record["tokenizers"]
        pre = sum(r["seconds"] for runs in lists for r in runs) / len(self.seeds)
        known = [r for r in self.record["tuning"] if r["labels"] == labels]
        more = 100 * math.ceil(more_steps(steps, max(own, 0.01), pre) / 100)
        more = max(
            [6 if self.tiny else more, *(r["steps"] for r in known if r["steps"] > steps)]
        )
        for seed in self.seeds:
            self.fine_tune("from scratch", labels, more, rate, seed)

    def pace(self):
        """Milliseconds of a training step of the tokenizer, of BEiT and of the autoencoder."""
        x = self.parts["train"][0]
        steps = 1 if self.tiny else 10
        model = BeitForMaskedImageModeling(**SHAPE, **SCALE, vocab_size=VOCABULARY)
        wanted = torch.randint(VOCABULARY, (len(x), 4, 4))
        both = self.batches(0, x, wanted, self.masks["blocks"][: len(x)])
        wide = shuffled_batches(x, batch_size=4 if self.tiny else 128)
        what = {
            "tokenizer": (vq(), self.batches(0, x), vq_loss),
            "BEiT": (model, both, masked_loss),
            "MAE": (mae.network(), wide, mae.masked_loss),
        }
        calls = {
            name: partial(fit, model, data, loss_fn=loss, steps=steps, lr=1e-3, log_every=steps)
            for name, (model, data, loss) in what.items()
        }
        take_turns(calls, 1, "cpu")  # a first round is not counted
        times = take_turns(calls, 2 if self.tiny else 9, "cpu")
        return {name: round(statistics.median(ms) / steps, 2) for name, ms in times.items()} | {
            "BEiT / MAE": ratio(times["BEiT"], times["MAE"])
        }

    # --- the parts ----------------------------------------------------------------------------

    def main(self):
        self.once(dict(), self.pace, "pace")
        self.lr = self.best_rate()
        for seed in self.seeds:
            model = self.model("blocks", seed, self.long, self.lr)
            if seed == 0:
                both = nn.ModuleDict(dict(tokenizer=self.tokenizer("VQ", 0), model=model))
                save_half(both.state_dict(), self.path.parent / "beit_digits.safetensors")
            torch.manual_seed(seed)
            contestants = {
                "raw pixels": lambda x: x.flatten(1).numpy(),
                "untrained": pooled(Beit(**SHAPE, **SCALE, num_classes=0)),
                "BEiT": pooled(model.encoder()),
            }
            self.probes(contestants, seed, COUNTS[:1] if self.tiny else COUNTS)
        for labels in COUNTS[:1] if self.tiny else (100, 20, 1200, 50):
            self.tuning(labels)
        for labels in COUNTS[:1] if self.tiny else (100, 1200, 50, 20):
            self.equal_time(labels)

    def variants(self):
        for seed in self.seeds:
            for name in (*TOKENIZERS, "teacher"):
                known = self.record["tokenizers"]
                if not any((r["tokenizer"], r["seed"]) == (name, seed) for r in known):
                    self.tokenizer(name, seed)
            self.clusters(seed)
        for variant, seed in itertools.product(VARIANTS, self.seeds):
            model = self.model(variant, seed, self.short, BEST)
            counts = COUNTS[:1] if self.tiny else (100, 1200)
            self.probes({variant: pooled(model.encoder())}, seed, counts)


def pooled(encoder):
    """What the head of an encoder would be given, as an array (n, D)."""

    @torch.no_grad()
    def of(images):
        return torch.cat([encoder.eval()(x) for x in images.split(256)]).numpy()

    return of


def run_part(arguments, name, part):
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = Tokens(arguments.out / f"{name}.json", arguments.minutes, arguments.tiny)
    bench.work(partial(part, bench))


def digits(arguments):
    """Learn visual tokens of scanned digits, pre-train BEiT on them, and judge its features.

    A vector quantizer makes 64 tokens of patches of 2 × 2 pixels. BEiT, of width 64 with 4
    blocks, learns to predict the tokens of 6 masked patches of 16, masked in blocks. Then its
    features are used with 20, 50, 100, and 1,200 labels, frozen and fine-tuned, next to raw
    pixels, an untrained network, and a network from scratch, also at equal time. The learning
    rate of the pre-training is the best of four on validation images after a shorter run.
    Tokenizer and network together take the time of the masked autoencoder of
    `benchmarks.mae digits`; the list "pace" has the time of a step of each. The record is
    FOLDER/beit.json; FOLDER/beit_digits.safetensors has tokenizer and network of the first
    seed.
    """
    run_part(arguments, "beit", Tokens.main)


def variants(arguments):
    """Compare tokenizers, and shorter pre-training with other tokens and with random masks.

    The tokenizer with a teacher learns features of the masked autoencoder in
    FOLDER/mae_digits.safetensors. The record is FOLDER/beit_variants.json.
    """
    run_part(arguments, "beit_variants", Tokens.variants)


def main(arguments=None):
    commands = Commands(__doc__)
    commands.experiment("digits", digits)
    commands.experiment("variants", variants)
    commands.run(arguments)


if __name__ == "__main__":
    main()
