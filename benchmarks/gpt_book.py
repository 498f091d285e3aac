"""A small GPT on the book's own prose, one minute a run: `python -m benchmarks.gpt_book`.

Vocabulary and learning rate are chosen on the text's validation part, among vocabularies whose
run takes a minute; three seeds of the chosen setting are judged on the test part, beside bz2,
xz and an n-gram model of characters, which saw the same training text. The record is
FOLDER/gpt_book.json. With --tiny everything runs in seconds, to see that it works; such a
record means nothing.

`longer` is for a GPU (see `benchmarks.runs`): 12 million parameters on this book, or 29 million
on TinyStories.
"""

import argparse
import bz2
import itertools
import json
import lzma
import time
from collections import Counter
from math import log2
from pathlib import Path

import torch
from accelerate import Accelerator

from attnlib.data import book_text, text_corpus, train_tokenizer
from attnlib.gpt import GPT, GPTConfig, text_batches, text_bits, text_loss
from attnlib.train import fit, write_record

VOCABULARIES, RATES, SEEDS = (1024, 2048, 4096), (2e-3, 4e-3, 8e-3), (0, 1, 2)
MINUTE = 2048  # with a larger vocabulary the run takes more
LENGTH, BATCH, STEPS = 128, 16, 400
SHAPE = dict(block_size=LENGTH, n_layer=2, n_head=4, n_embd=128)


def run(texts, vocab, lr, seed, steps, part):
    """Train once; bits a character of a part of the text, the first token apart."""
    tokenizer = train_tokenizer(texts["train"], vocab)
    train, held = (torch.tensor(tokenizer.encode(texts[name]).ids) for name in ("train", part))
    torch.manual_seed(seed)
    model, began = GPT(GPTConfig(vocab, **SHAPE)), time.process_time()
    batches = text_batches(train, LENGTH, BATCH, seed)
    options = dict(steps=steps, lr=lr, warmup=steps // 15, betas=(0.9, 0.95), weight_decay=0.1)
    accelerator = Accelerator(cpu=True)
    history = fit(
        *(model, text_loss, batches),
        **options,
        every=max(1, steps // 20),
        seed=seed,
        accelerator=accelerator,
    )
    seconds = time.process_time() - began
    bits = text_bits(model, held, LENGTH) / len(texts[part])
    return dict(
        **dict(vocab=vocab, lr=lr, seed=seed, steps=steps, part=part, bits=round(bits, 4)),
        parameters=sum(p.numel() for p in model.parameters()),
        seconds=round(seconds, 1),
        loss=[[row["step"], round(row["loss"], 3)] for row in history],
    )


def compressed(pack, train, text):
    """Bits a character of a text by a program that has compressed the training text before."""
    sizes = [len(pack(x.encode("utf-8"))) for x in (train, train + text)]
    return round(8 * (sizes[1] - sizes[0]) / len(text), 4)


def n_grams(train, text, n):
    """Bits a character by an interpolated n-gram model of characters (Witten and Bell 1991)."""
    counts, follow, totals, symbols = Counter(), Counter(), Counter(), len(set(train)) + 1
    for order in range(n):
        new = Counter(train[i : i + order + 1] for i in range(len(train) - order))
        counts += new
        for gram, count in new.items():  # how often a context is followed, by how many others
            totals[gram[:-1]] += count
            follow[gram[:-1]] += 1
    total = 0.0
    for i in range(len(text)):
        p = 1 / symbols
        for order in range(min(n, i + 1)):
            context = text[i - order : i]
            if seen := totals[context]:
                types = follow[context]
                p = (counts[context + text[i]] + types * p) / (seen + types)
        total -= log2(p)
    return round(total / len(text), 4)


# --- for a GPU --------------------------------------------------------------------------------

LARGE = {  # of the model, of a batch, of the run, and how a sample begins
    "book": dict(
        shape=dict(vocab_size=4096, block_size=256, n_layer=6, n_head=6, n_embd=384),
        dropout=0.3,
        batch=64,
        steps=2000,
        prompt="## The cost of attention\n\n",
    ),
    "tinystories": dict(
        shape=dict(vocab_size=8192, block_size=512, n_layer=8, n_head=8, n_embd=512),
        dropout=0.0,
        batch=64,
        steps=3000,
        prompt="Once upon a time",
    ),
}
TINY = dict(
    shape=dict(vocab_size=300, block_size=16, n_layer=1, n_head=2, n_embd=16),
    **dict(dropout=0.0, batch=2, steps=4, prompt="The"),
)
MILLION = 1_000_000


def parts(data, tiny):
    """The three parts of a text; of TinyStories 200 million characters, 1 and 1."""
    if data == "book":
        found = {name: book_text(name) for name in ("train", "valid", "test")}
    else:
        held = text_corpus(data, "valid")
        found = dict(train=text_corpus(data, "train")[: 200 * MILLION])
        found |= dict(valid=held[:MILLION], test=held[MILLION : 2 * MILLION])
    return {name: text[:3000] for name, text in found.items()} if tiny else found


def encoded(tokenizer, text):
    """The tokens of a long text, a million characters at a time."""
    starts = range(0, len(text), MILLION)
    pieces = [tokenizer.encode(text[start : start + MILLION]).ids for start in starts]
    return torch.cat([torch.tensor(piece) for piece in pieces])


def longer(data, folder, tiny):
    """Train once, and write three samples.

    The row "best" has the least bits a character of the validation part; its "test" is the
    result.
    """
    options, texts = TINY if tiny else LARGE[data], parts(data, tiny)
    shape, steps, batch = options["shape"], options["steps"], options["batch"]
    tokenizer = train_tokenizer(texts["train"][: 20 * MILLION], shape["vocab_size"])
    ids = {name: encoded(tokenizer, text) for name, text in texts.items()}
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape, dropout=options["dropout"]))

    def evaluate(model):
        device, length = next(model.parameters()).device, shape["block_size"]
        return {
            name: text_bits(model, ids[name].to(device), length) / len(texts[name])
            for name in ("valid", "test")
        }

    history = fit(
        *(model, text_loss, text_batches(ids["train"], shape["block_size"], batch)),
        **dict(steps=steps, lr=1e-3, warmup=steps // 20, betas=(0.9, 0.95), weight_decay=0.1),
        **dict(evaluate=evaluate, every=max(1, steps // 20), checkpoint=folder / "gpt.json"),
    )
    prompt = torch.tensor([tokenizer.encode(options["prompt"]).ids] * 3)
    prompt = prompt.to(next(model.parameters()).device)
    written = model.generate(prompt, shape["block_size"] // 2, temperature=0.8, top_p=0.9)
    return dict(
        **dict(data=data, shape=shape, batch=batch, steps=steps, tokens=len(ids["train"])),
        parameters=sum(p.numel() for p in model.parameters()),
        **dict(history=history, best=min(history, key=lambda row: row["valid"])),
        samples=[tokenizer.decode(row) for row in written.tolist()],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = {name: book_text(name) for name in ("train", "valid", "test")}
    vocabularies, rates, seeds, steps = VOCABULARIES, RATES, SEEDS, STEPS
    if arguments.tiny:
        texts = {name: text[:3000] for name, text in texts.items()}
        vocabularies, rates, seeds, steps = (300,), (4e-3,), (0,), 2
    record = dict(length=LENGTH, batch=BATCH, shape=SHAPE, tiny=arguments.tiny)
    train, test = texts["train"], texts["test"]
    record["baselines"] = dict(bz2=compressed(bz2.compress, train, test))
    record["baselines"]["xz"] = compressed(lzma.compress, train, test)
    for n in (3, 5, 7):
        record["baselines"][f"{n}-gram"] = n_grams(train, test, n)
    print(record["baselines"], flush=True)
    path, tuning = arguments.out / "gpt_book.json", []
    if path.exists():  # an earlier call was cut off
        tuning = json.loads(path.read_text())["tuning"]
    done = {(row["vocab"], row["lr"]) for row in tuning}
    for vocab, lr in sorted(set(itertools.product(vocabularies, rates)) - done):
        tuning.append(run(texts, vocab, lr, 100, steps, "valid"))
        print({key: x for key, x in tuning[-1].items() if key != "loss"}, flush=True)
        write_record(path, record | dict(tuning=tuning, runs=[]))
    best = min((row for row in tuning if row["vocab"] <= MINUTE), key=lambda row: row["bits"])
    runs = [run(texts, best["vocab"], best["lr"], seed, steps, "test") for seed in seeds]
    write_record(path, record | dict(tuning=tuning, runs=runs))
    print([row["bits"] for row in runs])


if __name__ == "__main__":
    main()
