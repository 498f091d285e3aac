"""What was run for 23_translation: `python -m benchmarks.translation COMMAND --out FOLDER`.

    zero_shot  find out why directions fail that were not trained

The chapter's long runs are those of `benchmarks.runs`: numbers, lengths, and multi30k.
"""

import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from attnlib.data import PAD, draw_numbers, encode, number_words
from attnlib.train import fit
from attnlib.transformer import Transformer
from attnlib.translation import (
    answer_kind,
    direction_batches,
    number_table,
    number_tokenizer,
    tag,
    translate_numbers,
    translation_loss,
)
from benchmarks.records import write_record
from benchmarks.runner import Commands

LANGUAGES = ("en", "de", "es", "fi", "tr")
RING = LANGUAGES[1:]


def ahead(k):
    """The directions from each language but English to the one k places ahead of it."""
    return [(a, RING[(i + k) % len(RING)]) for i, a in enumerate(RING)]


UNSEEN = ahead(1)
ONE = [(a, b) for a in LANGUAGES for b in LANGUAGES if a != b and "en" in (a, b)]
TWO = [*ONE, *ahead(2)]
THREE = [*TWO, *ahead(3)]  # all but the unseen
CONDITIONS = {  # by the number of targets that each language but English has
    "one target": dict(directions=ONE),
    "two targets": dict(directions=TWO),
    "three targets": dict(directions=THREE),
    "three, own numbers": dict(directions=THREE, shared=False),
    "one, decoder's tag": dict(directions=ONE, tag_on="target"),
    "one, own numbers": dict(directions=ONE, shared=False),
}
LONG = ("one target", "two targets", "three targets")  # once more, with four times the steps
SIZE = dict(
    steps=1000,
    numbers=40_000,
    valid=120,
    tests=300,
    vocab_size=300,
    d_model=64,
    layers=2,
    batch_size=64,
    warmup=100,
    lr=4e-3,
)
TINY = SIZE | dict(
    steps=4, numbers=300, valid=6, tests=6, d_model=16, layers=1, batch_size=8, warmup=2
)
SEEDS = (0, 1, 2)
# above the numbers, and of their tokens
LIMIT = 10**5
LONGEST = 40


def numbers_of(size):
    """Numbers for test and validation, at least 1000, and for training; all are different."""
    test = draw_at_least_1000(size["tests"], seed=1)
    valid = draw_at_least_1000(size["valid"], seed=2, exclude=test)
    seen = draw_numbers(size["numbers"], LIMIT, seed=3, exclude=[*test, *valid])
    return test, valid, list(dict.fromkeys(seen))


def draw_at_least_1000(count, **options):
    drawn = dict.fromkeys(draw_numbers(4 * count, LIMIT, **options))
    return [n for n in drawn if n >= 1000][:count]


def share_right(model, tokenizer, numbers, pairs, tag_on):
    """The share of names that are right; number i is asked in direction i mod their count."""
    asked = [(n, *pairs[i % len(pairs)]) for i, n in enumerate(numbers)]
    names = [number_words([n], a)[0] for n, a, _ in asked]
    said = translate_numbers(
        model, tokenizer, names, [b for *_, b in asked], tag_on=tag_on, max_length=LONGEST
    )
    right = [text == number_words([n], b)[0] for text, (n, _, b) in zip(said, asked)]
    return sum(right) / len(right)


def unseen_direction(model, tokenizer, numbers, source, target, tag_on):
    """What the model says in a direction that it was not trained in, and its encoder's part."""
    names = number_words(numbers, source)
    options = dict(tag_on=tag_on, max_length=LONGEST)
    said = translate_numbers(model, tokenizer, names, target, **options)
    english = translate_numbers(model, tokenizer, names, "en", **options)
    kinds = [
        answer_kind(tokenizer, text, n, source, target, LANGUAGES)
        for text, n in zip(said, numbers)
    ]
    shown = Counter()
    examples = []
    for kind, n, text in zip(kinds, numbers, said):
        shown[kind] += 1
        if kind != "right" and shown[kind] <= 3:
            examples.append([kind, n, text])
    return {
        "kinds": dict(Counter(kinds)),
        "as_english": sum(a == b for a, b in zip(said, english)),
        "examples": examples,
        "memory": shared_memory(model, tokenizer, numbers, source, target, tag_on),
    }


@torch.no_grad()
def shared_memory(model, tokenizer, numbers, source, target, tag_on):
    """How near the memory of a name is to that of the same number's English name.

    Memories are means over tokens, under the tag of the same target. "ratio" is the mean
    distance of the two names of a number, over that of the English names of two numbers;
    "nearest" the share of names whose nearest English one is that of the same number.
    """

    def means(language):
        prefix = [tag(target)] * len(numbers) if tag_on == "source" else None
        src = encode(tokenizer, number_words(numbers, language), prefix=prefix)
        memory = model.eval().encode(src)[0]
        used = (src != PAD)[..., None]
        return (memory * used).sum(1) / used.sum(1)  # (B, M, C) -> (B, C)

    own = means(source)
    english = means("en")
    across = torch.cdist(own, english)
    within = torch.cdist(english, english)
    others = within.sum() / (len(numbers) * (len(numbers) - 1))
    nearest = (across.argmin(1) == torch.arange(len(numbers))).float().mean()
    ratio = across.diag().mean() / others
    return {"ratio": round(ratio.item(), 4), "nearest": round(nearest.item(), 4)}


def run(size, *, directions, shared=True, tag_on="source", seed, checkpoint):
    """Train one model and test it, in trained directions and in those that were not."""
    began = time.process_time()
    test, valid, seen = numbers_of(size)
    tokenizer = number_tokenizer(seen[:3000], size["vocab_size"], LANGUAGES)
    batches = direction_batches(
        tokenizer,
        number_table(tokenizer, seen, LANGUAGES),
        directions,
        batch_size=size["batch_size"],
        seed=seed,
        shared=shared,
        tag_on=tag_on,
    )
    torch.manual_seed(seed)
    d = size["d_model"]
    layers = size["layers"]
    heads = max(1, d // 16)
    model = Transformer(
        size["vocab_size"],
        None,
        d,
        heads,
        layers,
        layers,
        2 * d,
        dropout=0.0,
        norm_first=True,
        max_length=128,
    )

    def evaluate(model):
        parts = {"supervised": directions, "unseen": UNSEEN}
        return {
            name: share_right(model, tokenizer, valid, part, tag_on)
            for name, part in parts.items()
        }

    history = fit(
        model,
        translation_loss,
        batches,
        steps=size["steps"],
        lr=size["lr"],
        warmup=size["warmup"],
        weight_decay=0.0,
        log_every=max(1, size["steps"] // 8),
        evaluate=evaluate,
        seed=seed,
        checkpoint=checkpoint,
    )
    found = [share_right(model, tokenizer, test, [pair], tag_on) for pair in directions]
    return {
        "supervised": {f"{a}-{b}": x for (a, b), x in zip(directions, found)},
        "unseen": {
            f"{a}-{b}": unseen_direction(model, tokenizer, test, a, b, tag_on)
            for a, b in UNSEEN
        },
        "history": history,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.process_time() - began),
    }


def kept_run(name, seed, size, parts, times=1):
    """One run of a condition, read if it is in the folder and computed otherwise."""
    stem = f"{list(CONDITIONS).index(name)}-{seed}-{times}"
    path = parts / f"{stem}.json"
    if not path.exists():
        size = size | dict(steps=times * size["steps"])
        found = run(size, **CONDITIONS[name], seed=seed, checkpoint=parts / f"at-{stem}.json")
        head = dict(condition=name, seed=seed, steps=size["steps"])
        path.write_text(json.dumps(head | found), encoding="utf-8")
        print(name, seed, found["history"][-1], f"{found['seconds']} s", flush=True)
    return json.loads(path.read_text(encoding="utf-8"))


def zero_shot(arguments):
    """Find out why directions fail that were not trained.

    Five languages, twenty directions; four of them are never trained and always tested. What
    the conditions differ in is said in CONDITIONS; each has the same number of steps and the
    same learning rate, and is run with three seeds. With --parts the finished runs are kept in
    a folder, so that a command that is given again goes on; --only NAMES does the runs of some
    conditions. The record, FOLDER/zero_shot.json, is written when all runs are there. With
    --tiny it means nothing.
    """
    torch.set_num_threads(1)
    if arguments.tiny:
        size = TINY
        seeds = SEEDS[:1]
    else:
        size = SIZE
        seeds = SEEDS
    with tempfile.TemporaryDirectory() as folder:
        parts = arguments.parts or Path(folder)
        parts.mkdir(parents=True, exist_ok=True)
        names = arguments.only or list(CONDITIONS)
        record = {"size": size}
        record["runs"] = [kept_run(name, seed, size, parts) for seed in seeds for name in names]
        record["long"] = [
            kept_run(name, seed, size, parts, times=4)
            for seed in seeds
            for name in names
            if name in LONG
        ]
        if not arguments.only:
            write_record(arguments.out / "zero_shot.json", record)


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.experiment("zero_shot", zero_shot)
    parser.add_argument("--parts", type=Path, help="folder of finished runs")
    parser.add_argument("--only", choices=CONDITIONS, nargs="+", help="these; no record")
    commands.run(arguments)


if __name__ == "__main__":
    main()
