"""What was run for 20_seq2seq: `python -m benchmarks.seq2seq COMMAND --out FOLDER`.

    numbers     translate names of numbers with one vector or with attention, evenly tuned
    bottleneck  measure how many bits of a random string one vector, or attention, delivers

`benchmarks.runner` says how runs are resumed and recorded.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from attnlib.data import PAD, decode, draw_numbers, encode, number_words, train_bpe
from attnlib.seq2seq import Seq2Seq
from attnlib.train import fit, shuffled_batches
from benchmarks.runner import Commands, Runs, start, tune

# of the strings
ALPHABET = 32
LONGEST = 16
LENGTHS = (1, 2, 4, 6, 8, 10, 12, 14, 16)
BITS = math.log2(ALPHABET)  # in a token
# seeds of strings that no training step draws
VALID = 10**9
TEST = 2 * 10**9
STRING_RATES = (5e-3, 1.2e-2, 3e-2, 6e-2, 0.12)
STRING_STEPS = 2000
TUNING_STEPS = 666  # of the shorter runs that choose the learning rate
LONG_STEPS = 8000  # of the narrowest vector
WIDTHS = {False: (16, 32, 64), True: (16,)}  # of the states, without and with attention
# of the numbers
NUMBER_RATES = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
NUMBER_STEPS = {False: (100, 200, 400, 800, 1600), True: (100, 200, 400, 800)}  # attention?
TEXT_STEPS = 200  # for which the wrong texts of one vector are kept
SEEDS = (0, 1, 2)


# --- random strings ---------------------------------------------------------------------------
def strings(count, length, seed):
    """Random strings as the source and, after the start token, as the target."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(3, 3 + ALPHABET, (count, length), generator=generator)
    return src, F.pad(src, (1, 0), value=1)


def string_batches(seed, size=64):
    """Batches of new strings, all of a batch of one random length, as `fit` wants them."""

    def batches(step):
        number = seed * 10**7 + step
        length = torch.randint(
            1, LONGEST + 1, (), generator=torch.Generator().manual_seed(number)
        )
        return strings(size, int(length), number)

    return batches


def loss_fn(model, batch):
    src, tgt = (x[:, : (x != PAD).sum(-1).max()] for x in batch)
    logits = model(src, tgt[:, :-1]).flatten(0, 1)
    wanted = tgt[:, 1:].flatten()
    loss = F.cross_entropy(logits, wanted, ignore_index=PAD, reduction="sum")
    return loss, (wanted != PAD).sum()


def bits_through(model, length, seed, count):
    """The bits of a string that the decoder's probabilities save, a mean over strings."""
    batch = strings(count, length, seed + length)
    return length * BITS - loss_fn(model, batch)[0].item() / count / math.log(2)


def string_score(model, count=128):
    """Bits through on validation strings, as a share of all, a mean over the lengths."""
    found = [bits_through(model, n, VALID, count) for n in LENGTHS]
    shares = [bits / n / BITS for bits, n in zip(found, LENGTHS)]
    return {"bits": round(found[-1], 2), "valid": round(sum(shares) / len(shares), 4)}


def string_test(model, count):
    """Bits through, right tokens and right strings of each length, on test strings."""
    rows = []
    for n in LENGTHS:
        src, _ = strings(count, n, TEST + n)
        out = model.greedy(src, n, eos_id=2)
        right = F.pad(out, (0, n - out.shape[1])) == src
        rows.append(
            {
                "length": n,
                "bits": round(bits_through(model, n, TEST, count), 2),
                "tokens": round(right.float().mean().item(), 4),
                "exact": round(right.all(-1).float().mean().item(), 4),
            }
        )
    return rows


def string_run(attention, width, steps, lr, seed, tested, tiny):
    torch.manual_seed(seed)
    size = 3 + ALPHABET
    model = Seq2Seq(size, size, embed_dim=32, hidden_dim=width, attention=attention)
    score = (lambda model: string_score(model, 4)) if tiny else string_score
    history = train(model, string_batches(seed), steps, lr, score, max(1, steps // 8))
    return {
        "history": history,
        "valid": history[-1]["valid"],
        "test": string_test(model, 4 if tiny else 512) if tested else [],
    }


# --- names of numbers -------------------------------------------------------------------------
def number_data(tiny=False):
    """The texts and vocabularies of 20_seq2seq: {part: (numbers, sources, targets)}."""
    shown = [4_321, 87_654, 653_978]
    drawn = [n for n in draw_numbers(2000, 10**6, seed=1) if n >= 1000]
    test = sorted({*shown, *drawn})
    valid = sorted({n for n in draw_numbers(1000, 10**6, seed=3, exclude=test) if n >= 1000})
    held_out = {*test, *valid}
    training = draw_numbers(300 if tiny else 20_000, 10**6, seed=2, exclude=held_out)
    bpe = {
        language: train_bpe(number_words(training, language), 60) for language in ("en", "de")
    }
    if tiny:
        valid = valid[:10]
        test = test[:10]
    parts = {
        name: (numbers, *(encode(bpe[x], number_words(numbers, x)) for x in ("en", "de")))
        for name, numbers in (("train", training), ("valid", valid), ("test", test))
    }
    return bpe, parts


def written(model, bpe, parts, part):
    """The German texts that a model writes."""
    longest = parts["train"][2].shape[1]
    return decode(bpe["de"], model.greedy(parts[part][1], longest))


@torch.no_grad()
def loss_per_token(model, sources, targets):
    loss, count = loss_fn(model, (sources, targets))
    return (loss / count).item()


def number_run(bpe, parts, attention, steps, lr, seed):
    torch.manual_seed(seed)
    model = Seq2Seq(60, 60, embed_dim=32, hidden_dim=64, attention=attention)
    batches = shuffled_batches(*parts["train"][1:], batch_size=64, seed=seed)
    history = train(model, batches, steps, lr, None, max(1, steps // 8))
    answers = {name: number_words(parts[name][0], "de") for name in ("valid", "test")}
    texts = written(model, bpe, parts, "valid")
    right = sum(x == y for x, y in zip(texts, answers["valid"]))
    valid_loss = loss_per_token(model, *parts["valid"][1:])
    texts = written(model, bpe, parts, "test")
    pairs = list(zip(parts["test"][0], texts, answers["test"]))
    result = {
        "history": history,
        "valid": round(right / len(answers["valid"]), 4),
        "valid_loss": float(f"{valid_loss:.4g}"),
        "right": "".join(str(int(x == y)) for _, x, y in pairs),  # in the order of the test
    }
    if not attention and steps == TEXT_STEPS:
        result["wrong"] = {str(number): x for number, x, y in pairs if x != y}
    return result


# --- all runs ---------------------------------------------------------------------------------
def train(model, batches, steps, lr, evaluate, log_every):
    history = fit(
        model,
        batches,
        loss_fn=loss_fn,
        steps=steps,
        lr=lr,
        warmup=steps // 10,
        evaluate=evaluate,
        log_every=log_every,
    )
    model.eval()
    return [{key: round(x, 5) for key, x in row.items() if key != "lr"} for row in history]


def numbers(arguments):
    """Translate names of numbers with one vector or with attention, evenly tuned.

    English names of numbers below a million are translated into German. For every number of
    training steps, the models try the same learning rates with the first seed. The rate with
    the most validation numbers right is chosen, and of equals the one with the lowest
    validation loss. It is run with all seeds. The record says of every test number whether its
    translation is right, and holds the wrong texts of one vector after 200 steps. Only the
    model with one vector, which still improves, is trained for 1,600 steps.
    """
    bench = start("seq2seq", arguments, rates=NUMBER_RATES, runs=[])
    tiny = arguments.tiny

    def go():
        bpe, parts = number_data(tiny)
        for attention, budgets in NUMBER_STEPS.items():
            for steps in (2, 4) if tiny else budgets:

                def run(lr, seed, attention=attention, steps=steps):
                    settings = dict(attention=attention, steps=steps, lr=lr, seed=seed)
                    make = partial(number_run, bpe, parts, **settings)
                    return bench.once(settings, make)

                rates = NUMBER_RATES[:2] if tiny else NUMBER_RATES
                tune(run, rates, SEEDS[:1] if tiny else SEEDS, number_score)

    bench.work(go)


def number_score(run):
    """Rank runs by validation numbers that are right, then by the validation loss."""
    return run["valid"], -run["valid_loss"]


def bottleneck(arguments):
    """Measure how many bits of a random string one vector, or attention, delivers.

    Random strings must be written down again, so that a string of n tokens carries
    n·log2(alphabet) bits and none of them can be guessed. Each model tries the same learning
    rates, in runs of a third of the steps. The rate that delivers most on validation strings is
    run with all seeds, and the models are tested on other strings. The narrowest vector is also
    trained for four times as many steps.
    """
    tiny = arguments.tiny
    path = arguments.out / "bottleneck.json"
    bench = Runs(path, arguments.minutes, alphabet=ALPHABET, longest=LONGEST, runs=[])
    rates = STRING_RATES[:2] if tiny else STRING_RATES
    seeds = SEEDS[:1] if tiny else SEEDS

    def run(part, attention, width, steps, lr, seed):
        settings = dict(part=part, attention=attention, width=width, steps=steps)
        settings |= dict(lr=lr, seed=seed)
        job = attention, width, 2 if tiny else steps, lr, seed, part != "tune", tiny
        return bench.once(settings, partial(string_run, *job))

    def go():
        for attention, widths in WIDTHS.items():
            for width in widths:
                tuned = {lr: run("tune", attention, width, TUNING_STEPS, lr, 0) for lr in rates}
                best = max(rates, key=lambda lr: tuned[lr]["valid"])
                for seed in seeds:
                    run("run", attention, width, STRING_STEPS, best, seed)
                    if not attention and width == 16:
                        run("longer", attention, width, LONG_STEPS, best, seed)

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    commands.experiment("numbers", numbers)
    commands.experiment("bottleneck", bottleneck)
    commands.run(arguments)


if __name__ == "__main__":
    main()
