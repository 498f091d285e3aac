"""What a deep Transformer needs: `python -m benchmarks.ablations --out FOLDER`.

Three parts, each with several learning rates and seeds:

stack    Twelve encoder layers learn to add: token i of the answer is the sum, modulo 5, of
         digit i and of the i-th digit from the end. Norm behind or in front, warm-up or none;
         without the networks; without the skips. What has not learned it gets four times the
         steps.
reverse  The same stack, with and without its networks, learns to reverse its digits.
output   The translator of numbers with the output matrix tied, untied, or with a smaller start.

The rate is chosen by the loss on validation data, with seed 0; then come the others. Two
variants get all seeds with all rates.

FOLDER/ablations.json is written after each run, and a run that it has is not made again: with
--minutes, --parts, --variants and --seeds the work can be done in pieces. --tiny takes a few
steps, to see that all works.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib import recipes
from attnlib.position import sinusoidal_encoding
from attnlib.train import epochs, fit, write_record
from attnlib.transformer import EncoderLayer
from attnlib.translation import translation_loss

DEPTH, WIDTH, HEADS, HIDDEN, DIGITS, LENGTH, BATCH = 12, 32, 4, 64, 5, 8, 32
WARMUP = 100
SMALL_RATES = (3e-4, 1e-3, 3e-3, 1e-2)  # post-norm fails with larger ones
RATES = {
    "stack": (3e-3, 1e-2, 3e-2),
    "reverse": (3e-3, 1e-2, 3e-2),
    "output": (1e-3, 3e-3, 1e-2),
}
STEPS = {"stack": 400, "reverse": 200, "output": 300}
VARIANTS = {  # of each part: its names, and what is different
    "stack": {
        "pre": dict(norm="pre"),
        "pre, no warm-up": dict(norm="pre", warmup=False),
        "post": dict(norm="post"),
        "post, no warm-up": dict(norm="post", warmup=False),
        "pre, no network": dict(norm="pre", network=False),
        "no skip": dict(norm="post", skip=False),
    },
    "reverse": {"pre": dict(norm="pre"), "pre, no network": dict(norm="pre", network=False)},
    "output": {name: dict(output=name) for name in ("tied", "untied", "tied, small start")},
}
GRID = ("pre", "pre, no warm-up")  # all seeds with every rate


class Layer(EncoderLayer):
    """An encoder layer, or one without its skips or its network."""

    def __init__(self, norm, skip=True, network=True):
        super().__init__(WIDTH, HEADS, HIDDEN, dropout=0.0, norm_first=norm == "pre")
        self.skip = skip
        if not network:
            self.feed_forward = self.norm2 = None
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def residual(self, x, norm, f, *inputs):
        return super().residual(x, norm, f, *inputs) if self.skip else norm(f(x, *inputs))

    def forward(self, x, mask=None, bias=None):
        x = self.residual(x, self.norm1, self.self_attn, mask, bias)
        if self.feed_forward is None:
            return x
        return self.residual(x, self.norm2, self.feed_forward)


class Stack(nn.Module):
    """Digits (B, N) to logits (B, N, 5)."""

    def __init__(self, depth=DEPTH, **options):
        super().__init__()
        self.embed = nn.Embedding(DIGITS, WIDTH)
        self.register_buffer("positions", sinusoidal_encoding(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer(**options) for _ in range(depth))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS)

    def forward(self, digits):
        x = self.embed(digits) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def digits(seed, count=BATCH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(DIGITS, (count, LENGTH), generator=generator)


def train_stack(task, variant, lr, seed, steps, warmup=True, depth=DEPTH, every=50, **options):
    """New digits in every step; validation and test have 512 sequences each."""
    torch.manual_seed(seed)
    model = Stack(depth, **options)

    def answers(x):
        return (x + x.flip(1)) % DIGITS if task == "stack" else x.flip(1)

    def loss_fn(model, batch):
        loss = F.cross_entropy(model(batch[0]).flatten(0, 1), answers(batch[0]).flatten())
        return loss * batch[0].numel(), batch[0].numel()

    valid, test = digits(10**9, 512), digits(10**9 + 1, 512)

    def evaluate(model, x=valid):
        logits = model(x)
        right = (logits.argmax(-1) == answers(x)).float().mean().item()
        loss = F.cross_entropy(logits.flatten(0, 1), answers(x).flatten()).item()
        return {"valid": right, "valid_loss": loss}

    start = evaluate(model.eval())
    history = fit(
        model,
        loss_fn,
        lambda step: (digits(seed * 10**6 + step),),
        steps=steps,
        lr=lr,
        warmup=min(WARMUP, steps // 2) * warmup,
        weight_decay=0.0,
        clip=None,
        evaluate=evaluate,
        every=every,
        seed=seed,
    )
    with torch.no_grad():
        share = evaluate(model.eval(), test)["valid"]
    return [{"step": 0, **start}, *history], share


def train_output(task, variant, lr, seed, steps, output, every=20):
    tokenizer, parts = recipes.number_pairs()
    torch.manual_seed(seed)
    model = recipes.small_transformer()
    if output == "untied":
        table = nn.Embedding(*model.tgt_embed.weight.shape)
        nn.init.normal_(table.weight, std=model.d_model**-0.5)
        model.output.weight = table.weight
    elif output == "tied, small start":
        nn.init.normal_(model.tgt_embed.weight, std=0.02)
    train, valid = (parts[part] for part in ("train", "valid"))
    batches = epochs(train["src"], train["tgt"], batch_size=BATCH, seed=seed)

    def evaluate(model):
        loss, count = translation_loss(model, (valid["src"][:256], valid["tgt"][:256]))
        return {"valid_loss": (loss / count).item()}

    with torch.no_grad():
        start = evaluate(model.eval())
    history = fit(
        model,
        translation_loss,
        batches,
        steps=steps,
        lr=lr,
        evaluate=evaluate,
        warmup=min(WARMUP, steps // 2),
        weight_decay=0.0,
        every=every,
        seed=seed,
    )
    history[-1]["valid"] = recipes.names_right(model.eval(), tokenizer, valid)
    return [{"step": 0, **start}, *history], recipes.names_right(
        model, tokenizer, parts["test"]
    )


class Record:
    """The runs made so far, in a file; they are not made again."""

    def __init__(self, path, seeds, tiny, minutes):
        self.path, self.seeds, self.tiny = path, seeds, tiny
        self.runs = json.loads(path.read_text())["runs"] if path.exists() else []
        self.end = time.monotonic() + 60 * minutes

    def run(self, part, variant, lr, seed, times=1):
        """The run with these settings, from the file or made now."""
        steps = 4 if self.tiny else STEPS[part] * times
        key = dict(part=part, variant=variant, lr=lr, seed=seed, steps=steps)
        for run in self.runs:
            if key.items() <= run.items():
                return run
        if time.monotonic() > self.end:
            raise TimeoutError("the minutes are over; call again to go on")
        options = VARIANTS[part][variant] | (dict(every=2) if self.tiny else {})
        options |= dict(depth=2) if self.tiny and part != "output" else {}
        train, began = (train_output if part == "output" else train_stack), time.process_time()
        try:
            curve, test = train(part, variant, lr, seed, steps, **options)
        except FloatingPointError as error:
            curve, test = (
                [{"step": 0, "valid_loss": 1e9, "valid": 0.0, "error": str(error)}],
                0.0,
            )
        curve = [
            {name: x if isinstance(x, str) else round(x, 7) for name, x in point.items()}
            for point in curve
        ]
        seconds = round(time.process_time() - began, 1)
        run = {**key, "test": round(test, 4), "seconds": seconds, "curve": curve}
        self.runs.append(run)
        settings = dict(depth=DEPTH, width=WIDTH, warmup=WARMUP, batch=BATCH, length=LENGTH)
        write_record(self.path, {**settings, "runs": self.runs})
        last = curve[-1]
        print(
            f"{part}: {variant}, lr {lr:g}, seed {seed}, {steps} steps: "
            f"loss {last['valid_loss']:.3f}, test {test:.3f}, {seconds} s",
            flush=True,
        )
        return run

    def variant(self, part, name):
        """All runs of a variant: each rate with seed 0, then the other seeds."""
        rates = SMALL_RATES if VARIANTS[part][name].get("norm") == "post" else RATES[part]
        first = [self.run(part, name, lr, 0) for lr in rates]
        best = min(first, key=lambda run: run["curve"][-1]["valid_loss"])
        for seed in self.seeds:
            for lr in rates if part == "stack" and name in GRID else [best["lr"]]:
                self.run(part, name, lr, seed)
        if part != "output" and best["curve"][-1]["valid"] < 0.9:  # before "it does not learn"
            for seed in self.seeds:
                self.run(part, name, best["lr"], seed, times=4)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--parts", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--variants", nargs="+", help="of these parts; by default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="stop before a run after these"
    )
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that all runs")
    options = parser.parse_args(arguments)
    seeds = [0] if options.tiny else options.seeds
    record = Record(options.out / "ablations.json", seeds, options.tiny, options.minutes)
    for part in options.parts:
        for name in options.variants or VARIANTS[part]:
            try:
                record.variant(part, name)
            except TimeoutError as error:
                print(error)
                return
    print(f"recorded in {record.path}")


if __name__ == "__main__":
    main()
