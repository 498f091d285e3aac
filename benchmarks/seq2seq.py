"""What was run for 20_seq2seq: `python -m benchmarks.seq2seq COMMAND --out FOLDER`.

    bottleneck  compare one vector with attention on copying and on names of numbers

`benchmarks.runner` says how runs are resumed and recorded.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from attnlib.data import PAD, decode, draw_numbers, encode, number_words, train_bpe
from attnlib.seq2seq import Seq2Seq
from attnlib.train import fit, shuffled_batches
from benchmarks.runner import Commands, Runs

# of the strings
ALPHABET = 32
LONGEST = 16
LENGTHS = (1, 2, 4, 6, 8, 10, 12, 14, 16)
BITS = math.log2(ALPHABET)  # in a token
# seeds of strings that no training step draws
VALID = 10**9
TEST = 2 * 10**9
RATES = {"copy": (5e-3, 1.2e-2, 3e-2, 6e-2), "numbers": (2e-3, 5e-3, 1.2e-2, 3e-2)}


# --- random strings ---------------------------------------------------------------------------
def strings(count, length, seed):
    """Random strings as source and, behind the start token, as target."""
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


def copy_run(attention, width, steps, lr, seed, part, tiny):
    torch.manual_seed(seed)
    size = 3 + ALPHABET
    model = Seq2Seq(size, size, embed_dim=32, hidden_dim=width, attention=attention)
    score = (lambda model: string_score(model, 4)) if tiny else string_score
    history = train(model, string_batches(seed), steps, lr, score, max(1, steps // 8))
    return {
        "history": history,
        "valid": history[-1]["valid"],
        "test": [] if part == "tune" else string_test(model, 4 if tiny else 512),
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


def number_run(attention, width, steps, lr, seed, part, tiny):
    bpe, parts = number_data(tiny)
    torch.manual_seed(seed)
    model = Seq2Seq(60, 60, embed_dim=32, hidden_dim=width, attention=attention)
    batches = shuffled_batches(*parts["train"][1:], batch_size=64, seed=seed)
    history = train(model, batches, steps, lr, None, max(1, steps // 8))
    model.eval()
    answers = {name: number_words(parts[name][0], "de") for name in ("valid", "test")}
    texts = written(model, bpe, parts, "valid")
    right = sum(x == y for x, y in zip(texts, answers["valid"]))
    result = {"history": history, "valid": round(right / len(texts), 4)}
    if part != "tune":
        texts = written(model, bpe, parts, "test")
        pairs = list(zip(parts["test"][0], texts, answers["test"]))
        result["right"] = "".join(str(int(x == y)) for _, x, y in pairs)  # in the test's order
        if not attention and steps in (4, 200):
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


def jobs(tiny):
    """(task, part, attention, width, steps, seed) of all runs, those for tuning first."""
    if tiny:
        sizes = {
            "copy": [(False, 4, 2), (True, 4, 2)],
            "numbers": [(False, 4, 2), (True, 4, 2)],
        }
        tuning = 1
        others = [("copy", False, 4, 4), ("numbers", False, 4, 4)]
        seeds = range(1)
    else:
        plain = [(False, width, 2000) for width in (16, 32, 64)]
        sizes = {
            "copy": [(True, 16, 1500), *plain],
            "numbers": [(False, 64, 400), (True, 64, 200)],
        }
        others = [("numbers", False, 64, 200), ("copy", False, 16, 8000)]
        tuning = 3
        seeds = range(3)
    for task, models in sizes.items():
        for model in models:
            steps = model[2] // tuning if task == "copy" else model[2]
            yield from (
                (task, "tune", *model[:2], steps, 0, lr)
                for lr in RATES[task][: 1 if tiny else None]
            )
    for seed in seeds:
        for task, models in sizes.items():
            yield from ((task, "run", *model, seed, None) for model in models)
        yield from ((task, "other", *model, seed, None) for task, *model in others)


def best_rate(runs, task, attention, width):
    tuned = [
        run
        for run in runs
        if run["part"] == "tune"
        and (run["task"], run["attention"], run["width"]) == (task, attention, width)
    ]
    return max(tuned, key=lambda run: run["valid"])["lr"]


def bottleneck(arguments):
    """Compare one vector with attention on copying and on names of numbers.

    Two tasks. "copy": random strings must be written down again, so that a string of n tokens
    carries n·log2(alphabet) bits and none of them can be guessed. "numbers": English names of
    numbers are translated into German. Each model's learning rate is chosen on validation data;
    then it is trained with three seeds and tested on other data. Some models are also trained
    for another number of steps.

    Every run is recorded in FOLDER/bottleneck.json when it is complete, and a run that is there
    is not repeated, so the work can be done in pieces: --seconds stops after the run in which
    so much time has passed.
    """
    path = arguments.out / "bottleneck.json"
    bench = Runs(path, arguments.minutes, alphabet=ALPHABET, longest=LONGEST, runs=[])

    def go():
        for task, part, attention, width, steps, seed, rate in jobs(arguments.tiny):
            if arguments.task not in (None, task):
                continue
            lr = rate or best_rate(bench.record["runs"], task, attention, width)
            settings = dict(task=task, part=part, attention=attention, width=width)
            settings |= dict(steps=steps, seed=seed, lr=lr)
            train_one = copy_run if task == "copy" else number_run
            job = attention, width, steps, lr, seed, part, arguments.tiny
            bench.once(settings, partial(train_one, *job))

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.experiment("bottleneck", bottleneck)
    parser.add_argument("--task", choices=("copy", "numbers"), help="only this task")
    commands.run(arguments)


if __name__ == "__main__":
    main()
