"""What was run for 23_translation: `python -m benchmarks.translation COMMAND --out FOLDER`.

    zero_shot  find out why directions fail that were not trained

The run "lengths" is a part of `benchmarks.runs`, and the translators of sentences are in
`benchmarks.multi30k`.
"""

import json
import re
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path

import torch

from attnlib.data import LANGUAGES as ALL_LANGUAGES
from attnlib.data import (
    PAD,
    decode,
    draw_numbers,
    encode,
    number_words,
    train_bpe,
)
from attnlib.decoding import greedy
from attnlib.train import (
    fit,
    seeded,
    shuffled_batches,
)
from attnlib.transformer import Transformer
from attnlib.translation import (
    direction_batches,
    number_table,
    number_tokenizer,
    tag,
    translate_numbers,
    translation_loss,
    trim,
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


# --- in which language an answer is ----------------------------------------------------------


@cache
def number_pieces(language):
    """Return the set of pieces from which a language puts its names of numbers below 10⁹."""
    thousands = range(1000, 10**6, 1000)
    counts = [*range(1, 102), *range(200, 1000, 100)]  # the others are compounds of these
    millions = [count * 10**6 for count in counts]
    numbers = [*range(1000)]
    for large in (*thousands, *millions):
        numbers += [large, large + 1]
    pieces = set()
    for name in number_words(numbers, language):
        pieces.update(re.split("[ ,-]+", name))
    return pieces


def is_in(text, language):
    """Return whether each word of a text is made of pieces of a language's numbers."""
    pieces = number_pieces(language)
    longest = max(len(piece) for piece in pieces)

    def spelled(word):
        ends = [0]  # where the beginnings end that are put together from pieces
        for end in range(1, len(word) + 1):
            if any(word[start:end] in pieces for start in ends[-longest:]):
                ends.append(end)
        return ends[-1] == len(word)

    words = [word for word in re.split("[ ,-]+", text) if word]
    return len(words) > 0 and all(spelled(word) for word in words)


@cache
def own_tokens(tokenizer, languages):
    """Return, for each language, the tokens of its names that none of the others uses."""
    numbers = [*range(1000), *range(1000, 10**6, 4321)]
    used = {}
    for language in languages:
        tokens = encode(tokenizer, number_words(numbers, language))  # (numbers, longest)
        used[language] = set(tokens.flatten().tolist())
    own = {}
    for language in languages:
        others = [used[other] for other in languages if other != language]
        own[language] = used[language].difference(*others)
    return own


def answer_kind(tokenizer, text, number, source, target, languages=ALL_LANGUAGES):
    """Return the kind of an answer to a number's name in `source`, asked for in `target`.

    "right"; "named in xx", if it is the number's name in another language; "in xx", if it is
    another text in that language; "mixed", in several of them; or "none".
    """
    order = dict.fromkeys((target, "en", source, *languages))
    for language in order:
        if text == number_words([number], language)[0]:
            return "right" if language == target else f"named in {language}"
    for language in order:
        if is_in(text, language):
            return f"in {language}"
    tokens = set(encode(tokenizer, [text])[0].tolist())
    mixed = 0  # languages of which the text has tokens
    for own in own_tokens(tokenizer, tuple(languages)).values():
        if own & tokens:
            mixed += 1
    return "mixed" if mixed > 1 else "none"


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
        batches,
        loss_fn=translation_loss,
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


# --- longer than in training ----------------------------------------------------------------


def sparse_numbers(count, nonzero, *, seed=0):
    """Random numbers below 10⁹ with `nonzero` digits that are not zero.

    Few of them make a short name, many a long one.

    Parameters
    ----------
    count : int
        How many numbers; some may be the same.
    nonzero : int
        From 1 to 9.
    seed : int

    Returns
    -------
    list of int

    Raises
    ------
    ValueError
        If a number is outside its range.
    """
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"count ({count!r}) must be an integer of at least 0")
    if not isinstance(nonzero, int) or not 1 <= nonzero <= 9:
        raise ValueError(f"nonzero ({nonzero}) must be from 1 to 9")
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.rand(count, 9, generator=generator).argsort(1)  # the 9 places, in each row
    places = shuffled[:, :nonzero]  # all different
    digits = torch.randint(1, 10, (count, nonzero), generator=generator)
    numbers = (digits * 10**places).sum(1)  # (count, nonzero) -> (count,)
    return numbers.tolist()


def length_run(
    position,
    *,
    longest=5,
    steps=1500,
    numbers=30_000,
    tests=300,
    d_model=64,
    seed=0,
    accelerator=None,
):
    """Train English to German on short names of numbers, test on longer ones.

    In training at most `longest` digits are not zero, in the test 1 to 9.

    Parameters
    ----------
    position : str
        The scheme, see `attnlib.transformer.Positions`.
    longest, numbers : int
        Most digits in training, and how many numbers are drawn for it.
    steps, d_model, seed : int
        Of the training run and of the model.
    tests : int
        Numbers drawn for each number of digits of the test.
    accelerator : accelerate.Accelerator, optional
        As in `train.fit`.

    Returns
    -------
    dict
        "accuracy", a list with the share of exactly right names for 1, ..., 9 digits, and the
        settings.
    """
    test_numbers = {}  # of each number of digits
    all_tests = []
    for digits in range(1, 10):
        drawn = sparse_numbers(tests, digits, seed=1000 + digits)
        test_numbers[digits] = list(dict.fromkeys(drawn))  # each number once
        all_tests += test_numbers[digits]
    hidden = {n for n in all_tests if n >= 1000}
    seen = []
    for digits in range(1, longest + 1):
        drawn = sparse_numbers(numbers // longest, digits, seed=seed * 100 + digits)
        seen += [n for n in drawn if n not in hidden]
    english = number_words(seen, "en")
    german = number_words(seen, "de")
    tokenizer = train_bpe([*english, *german], 150)
    with seeded(seed):
        model = Transformer(
            150,
            d_model=d_model,
            nhead=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=2 * d_model,
            dropout=0.0,
            norm_first=True,
            max_length=128,
            position=position,
        )
    pairs = shuffled_batches(
        encode(tokenizer, english), encode(tokenizer, german), batch_size=64, seed=seed
    )

    def batches(step):
        src, tgt = pairs(step)
        return trim(src), trim(tgt)

    fit(
        model,
        batches,
        loss_fn=translation_loss,
        steps=steps,
        lr=3e-3,
        warmup=steps // 10,
        weight_decay=0.0,
        log_every=steps,
        seed=seed,
        accelerator=accelerator,
    )
    src = encode(tokenizer, number_words(all_tests, "en"))
    src = src.to(next(model.parameters()).device)
    out = greedy(model, src, 120)
    said = decode(tokenizer, out.cpu())
    right = {}
    for number, text in zip(all_tests, said):
        right[number] = text == number_words([number], "de")[0]
    accuracy = []
    for own in test_numbers.values():
        share = sum(right[number] for number in own) / len(own)
        accuracy.append(round(share, 4))
    return dict(
        position=position,
        longest=longest,
        steps=steps,
        numbers=len(seen),
        d_model=d_model,
        seed=seed,
        accuracy=accuracy,
    )


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.experiment("zero_shot", zero_shot)
    parser.add_argument("--parts", type=Path, help="folder of finished runs")
    parser.add_argument("--only", choices=CONDITIONS, nargs="+", help="these; no record")
    commands.run(arguments)


if __name__ == "__main__":
    main()
