"""What was run for 24_gpt: `python -m benchmarks.gpt COMMAND --out FOLDER`.

    book       train on the book's text for a minute per run, next to programs that compress it
    options    compare today's design choices with those of 2019, one change at a time
    scaling    measure the loss against the number of parameters and of training tokens
    induction  train two layers to copy what followed last time; find and remove heads
    sampling   compare temperature, top-k, top-p, and min-p with the statistics of unseen text
    nanogpt    compare GPT with nanoGPT, and time both
    shakespeare  train on tiny Shakespeare, in nanoGPT's published setting or a better one
    growth     train each stage of the page's GPT on tiny Shakespeare
    drawn      write with a model of Shakespeare; keep logits that an explorer shows

The text of most commands is the book's own prose: models are trained on its training part,
settings are chosen on its validation part, and the test part judges. Each experiment writes
FOLDER/gpt_COMMAND.json.
`longer` trains a larger model on a GPU (`python -m benchmarks.runs gpt`).
"""

import bz2
import itertools
import lzma
import math
import runpy
import time
from collections import Counter
from dataclasses import replace
from math import log2
from pathlib import Path
from statistics import median, stdev
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator

from attnlib import data
from attnlib import train as train_module
from attnlib.attention import record_attention
from attnlib.data import book_text, train_tokenizer
from attnlib.gpt import (
    GPT,
    GPT2_STYLE,
    GPTConfig,
    text_batches,
    text_bits,
    text_loss,
)
from attnlib.models import load_model
from attnlib.train import fit
from benchmarks.chapter import run_cells
from benchmarks.corpora import text_corpus
from benchmarks.records import write_record
from benchmarks.runner import RESULTS, Commands, start, write
from benchmarks.timing import OURS, ratio, take_turns

LENGTH = 64
BATCH = 16
VOCAB = 512
SEEDS = (0, 1, 2)
MODERN = dict(block_size=LENGTH, n_layer=2, n_head=4, n_embd=64)
OPTIONS = {  # what is changed in MODERN
    "modern": {},
    "2019": dict(norm="layer", position="learned", mlp="gelu", bias=True),
    "LayerNorm": dict(norm="layer"),
    "learned positions": dict(position="learned"),
    "no positions": dict(position="none"),
    "GELU": dict(mlp="gelu"),
    "one key head": dict(n_kv_head=1),
    "QK-norm": dict(qk_norm=True),
    "untied": dict(tied=False),
    "window of 16": dict(window=16),
}
RATES = (2e-3, 4e-3, 8e-3)


def texts(tiny, vocab=VOCAB):
    """The tokens of the three parts of the book's text, and their bytes."""
    parts = {name: book_text(name) for name in ("train", "valid", "test")}
    if tiny:
        parts = {name: text[:3000] for name, text in parts.items()}
    tokenizer = train_tokenizer(parts["train"], 300 if tiny else vocab)
    ids = {name: torch.tensor(tokenizer.encode(text).ids) for name, text in parts.items()}
    return ids, {name: len(text.encode()) for name, text in parts.items()}


def train(model, loss, batches, steps, lr, seed, evaluate=None, times=4):
    """Train on the CPU; the history has `times` rows."""
    return fit(
        model,
        batches,
        loss_fn=loss,
        **dict(steps=steps, lr=lr, warmup=steps // 15, betas=(0.9, 0.95), weight_decay=0.1),
        **dict(evaluate=evaluate, log_every=max(1, steps // times), seed=seed),
        accelerator=Accelerator(cpu=True),
    )


def text_run(ids, sizes, config, steps, lr, seed, judge="valid"):
    """A model of the text, and a row: bits a byte of a part as the training goes on."""
    torch.manual_seed(seed)
    model = GPT(config)
    began = time.process_time()

    def evaluate(model):
        return dict(bits=text_bits(model, ids[judge], config.block_size) / sizes[judge])

    batches = text_batches(ids["train"], config.block_size, BATCH, seed)
    history = train(model, text_loss, batches, steps, lr, seed, evaluate)
    row = dict(lr=lr, seed=seed, steps=steps, judge=judge)
    row["parameters"] = sum(p.numel() for p in model.parameters())
    row["curve"] = [[each["step"], round(each["bits"], 4)] for each in history]
    row["seconds"] = round(time.process_time() - began, 1)
    return model, row


# --- options ----------------------------------------------------------------------------------
def options(arguments):
    """For each option a learning rate by the validation part, then three seeds on the test."""
    tiny = arguments.tiny
    record = start("gpt", arguments, rows=[])
    ids, sizes = texts(tiny)
    if tiny:
        steps = 4
        vocab = 300
    else:
        steps = 400
        vocab = VOCAB
    some = dict(list(OPTIONS.items())[:2]) if tiny else OPTIONS
    for name, change in some.items():
        config = GPTConfig(vocab, **MODERN | change)
        tuned = {}
        for lr in RATES[: 1 if tiny else None]:
            row = record.add(
                f"{name}, {lr}, tuning",
                lambda config=config, lr=lr: text_run(ids, sizes, config, steps, lr, 100)[1],
            )
            tuned[lr] = row["curve"][-1][1]
        lr = min(tuned, key=tuned.get)
        for seed in SEEDS[: 1 if tiny else None]:
            record.add(
                f"{name}, {seed}",
                lambda config=config, lr=lr, seed=seed: text_run(
                    ids, sizes, config, steps, lr, seed, "test"
                )[1],
            )
    record.write(shape=MODERN, vocab=vocab, options=some, rates=RATES)


# --- scaling ----------------------------------------------------------------------------------
WIDTHS = (16, 32, 64, 128)
FRACTIONS = (1 / 16, 1 / 4, 1)


def scaling(arguments):
    """The least validation loss of each width on each fraction of the training text."""
    tiny = arguments.tiny
    record = start("gpt", arguments, rows=[])
    ids, sizes = texts(tiny)
    if tiny:
        steps = 4
        vocab = 300
    else:
        steps = 600
        vocab = VOCAB
    for width in WIDTHS[:2] if tiny else WIDTHS:
        for fraction in FRACTIONS[1:] if tiny else FRACTIONS:
            for seed in SEEDS[: 1 if tiny else None]:
                part = ids | dict(train=ids["train"][: int(fraction * len(ids["train"]))])
                config = GPTConfig(vocab, **MODERN | dict(n_embd=width, n_head=width // 16))

                def run(part=part, config=config, seed=seed):
                    row = text_run(part, sizes, config, steps, 4e-3, seed)[1]
                    own = dict(width=config.n_embd, tokens=len(part["train"]))
                    return row | own | dict(best=min(bits for _, bits in row["curve"]))

                record.add(f"{width}, {fraction:.4f}, {seed}", run)
    record.write(vocab=vocab, lr=4e-3)


# --- induction --------------------------------------------------------------------------------
SYMBOLS = 16
HALF = 16


def copies(seed, rows=64):
    """Rows (B, 2 HALF) of random tokens; the second half is the first, begun elsewhere."""

    def batches(step):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        first = torch.randint(SYMBOLS, (rows, HALF), generator=generator)
        shift = torch.randint(HALF // 2, (rows, 1), generator=generator)
        second = first.gather(1, (shift + torch.arange(HALF)) % HALF)
        return (torch.cat([first, second], 1),)

    return batches


def copy_loss(model, batch):
    """Nats of the second half but its first token, and their number."""
    (tokens,) = batch
    logits = model(tokens[:, :-1])[:, HALF:].flatten(0, 1)
    told = tokens[:, HALF + 1 :]
    return F.cross_entropy(logits, told.flatten(), reduction="sum"), told.numel()


@torch.no_grad()
def copying(model, seed=999, batches=8):
    """Mean nats of a token that is a copy, in new rows."""
    found = [copy_loss(model, copies(seed)(step)) for step in range(batches)]
    return sum(loss.item() for loss, _ in found) / sum(count for _, count in found)


@torch.no_grad()
def heads(model, most=4):
    """For each layer and head: attention to tokens 1 to 4 back, and 1 to 4 behind the same."""
    (tokens,) = copies(998)(0)
    with record_attention() as maps:
        model(tokens)
    found = []
    for weights in maps:  # (B, h, N, N)
        before = []
        match = []
        for back in range(1, most + 1):
            before.append(weights.diagonal(-back, -2, -1).mean((0, 2)))  # (h,)
            behind = F.pad(tokens[:, :-back], (back, 0), value=-1)  # the token `back` before
            same = (tokens[:, :, None] == behind[:, None]).tril(-1)  # (B, N, N)
            match.append((weights * same[:, None]).sum(-1)[..., HALF:].mean((0, 2)))
        scores = torch.stack([torch.stack(before, -1), torch.stack(match, -1)])  # (2, h, most)
        before, match = (
            [[round(x, 3) for x in own] for own in each] for each in scores.tolist()
        )
        found.append(dict(before=before, match=match))
    return found


def without(model, layer, head):
    """The loss when a head gives nothing."""
    proj = model.h[layer].attn.c_proj.weight
    d = model.config.resolved_head_dim
    kept = proj.detach().clone()
    with torch.no_grad():
        proj[:, head * d : (head + 1) * d] = 0
        found = copying(model)
        proj.copy_(kept)
    return round(found, 4)


def induction_run(layers, steps, seed):
    torch.manual_seed(seed)
    config = GPTConfig(SYMBOLS, 2 * HALF, n_layer=layers, n_head=2, n_embd=64)
    model = GPT(config).train()
    history = fit(
        model,
        copies(seed),
        loss_fn=copy_loss,
        **dict(
            steps=steps, lr=3e-3, warmup=min(50, steps), weight_decay=0.0, schedule="constant"
        ),
        **dict(evaluate=lambda model: dict(nats=copying(model)), log_every=max(1, steps // 40)),
        **dict(seed=seed, accelerator=Accelerator(cpu=True)),
    )
    model.eval()
    ablated = [[without(model, n, head) for head in range(2)] for n in range(layers)]
    return dict(
        **dict(layers=layers, seed=seed, steps=steps, nats=round(copying(model), 4)),
        curve=[[row["step"], round(row["nats"], 4)] for row in history],
        **dict(heads=heads(model), without=ablated),
    )


def induction(arguments):
    """Two layers, and one layer with four times the steps."""
    tiny = arguments.tiny
    record = start("gpt", arguments, rows=[])
    steps = 40 if tiny else 1000
    for layers, times in ((2, 1), (1, 4)):
        for seed in SEEDS[: 1 if tiny else None]:
            record.add(
                f"{layers} layers, {seed}",
                lambda layers=layers, times=times, seed=seed: induction_run(
                    layers, times * steps, seed
                ),
            )
    record.write(symbols=SYMBOLS, half=HALF, chance=round(math.log(SYMBOLS), 4))


# --- sampling ------------------------------------------------------------------------------
SETTINGS = {
    **{f"temperature {t}": dict(temperature=t) for t in (0.0, 0.5, 0.7, 0.85, 1.0, 1.2)},
    **{f"top-k {k}": dict(top_k=k) for k in (5, 20, 80)},
    **{f"top-p {p}": dict(top_p=p) for p in (0.7, 0.8, 0.9, 0.95)},
    **{f"min-p {p}": dict(min_p=p) for p in (0.02, 0.05, 0.1, 0.2)},
}
PROMPT = 16
NEW = 96


@torch.no_grad()
def statistics(tokens, judge):
    """Of texts (B, PROMPT + NEW): repeated 4-grams, different 2-grams, nats for the judge."""
    written = tokens[:, PROMPT:]
    fours = [{tuple(x) for x in row.unfold(0, 4, 1).tolist()} for row in written]
    pairs = {tuple(x) for row in written for x in row.unfold(0, 2, 1).tolist()}
    logits = judge(tokens[:, :-1])[:, PROMPT - 1 :]
    nats = F.cross_entropy(logits.flatten(0, 1), written.flatten())
    return dict(
        repeated=1 - sum(map(len, fours)) / (len(written) * (NEW - 3)),
        different=len(pairs) / (len(written) * (NEW - 1)),
        nats=nats.item(),
    )


def sampled(models, ids, seed, rows):
    """Statistics of what a model writes behind prompts, by setting; the others judge."""
    generator = torch.Generator().manual_seed(seed)
    most = len(ids["test"]) - PROMPT - NEW
    starts = torch.randint(most, (rows, 1), generator=generator)
    texts = ids["test"][starts + torch.arange(PROMPT + NEW)]  # (B, PROMPT + NEW)
    judge = models[(seed + 1) % len(models)]
    found = dict(unseen=statistics(texts, judge))
    for name, setting in SETTINGS.items():
        written = models[seed].generate(
            texts[:, :PROMPT], NEW, **setting, generator=torch.Generator().manual_seed(seed)
        )
        found[name] = statistics(written, judge)
    return {name: {k: round(x, 4) for k, x in own.items()} for name, own in found.items()}


def sampling(arguments):
    """Three models of a minute each; each writes, and the next one judges."""
    tiny = arguments.tiny
    record = start("gpt", arguments, rows=[])
    ids, sizes = texts(tiny, 1024)
    if tiny:
        length = PROMPT + NEW
        steps = 3
        rows = 2
    else:
        length = 128
        steps = 400
        rows = 48
    config = GPTConfig(300 if tiny else 1024, **MODERN | dict(block_size=length, n_embd=128))
    config = replace(config, n_embd=32) if tiny else config
    models = []
    for seed in SEEDS[: 2 if tiny else None]:
        model, row = text_run(ids, sizes, config, steps, 2e-3, seed, "test")
        models.append(model.eval())
        record.add(f"model {seed}", lambda row=row: row)
    for seed, model in enumerate(models):
        record.add(
            f"texts {seed}", lambda seed=seed: dict(found=sampled(models, ids, seed, rows))
        )
    record.write(settings=SETTINGS, prompt=PROMPT, new=NEW, texts=rows)


# --- the book, a minute per run, and longer on a GPU -----------------------------------------

BOOK_VOCABULARIES = (1024, 2048, 4096)
BOOK_RATES = (2e-3, 4e-3, 8e-3)
MINUTE = 2048  # with a larger vocabulary the run takes more
BOOK_LENGTH = 128
BOOK_BATCH = 16
BOOK_STEPS = 400
BOOK_SHAPE = dict(block_size=BOOK_LENGTH, n_layer=2, n_head=4, n_embd=128)


def book_run(texts, vocab, lr, seed, steps, part):
    """Train once; bits a character of a part of the text, the first token apart."""
    tokenizer = train_tokenizer(texts["train"], vocab)
    train, held = (torch.tensor(tokenizer.encode(texts[name]).ids) for name in ("train", part))
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab, **BOOK_SHAPE))
    began = time.process_time()
    batches = text_batches(train, BOOK_LENGTH, BOOK_BATCH, seed)
    options = dict(steps=steps, lr=lr, warmup=steps // 15, betas=(0.9, 0.95), weight_decay=0.1)
    accelerator = Accelerator(cpu=True)
    history = fit(
        model,
        batches,
        loss_fn=text_loss,
        **options,
        log_every=max(1, steps // 20),
        seed=seed,
        accelerator=accelerator,
    )
    seconds = time.process_time() - began
    bits = text_bits(model, held, BOOK_LENGTH) / len(texts[part])
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
    counts = Counter()
    follow = Counter()
    totals = Counter()
    symbols = len(set(train)) + 1
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
TINY_LARGE = dict(
    shape=dict(vocab_size=300, block_size=16, n_layer=1, n_head=2, n_embd=16),
    **dict(dropout=0.0, batch=2, steps=4, prompt="The"),
)
MILLION = 1_000_000


def text_parts(data, tiny):
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
    options = TINY_LARGE if tiny else LARGE[data]
    texts = text_parts(data, tiny)
    shape = options["shape"]
    steps = options["steps"]
    batch = options["batch"]
    tokenizer = train_tokenizer(texts["train"][: 20 * MILLION], shape["vocab_size"])
    ids = {name: encoded(tokenizer, text) for name, text in texts.items()}
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape, dropout=options["dropout"]))

    def evaluate(model):
        device = next(model.parameters()).device
        length = shape["block_size"]
        return {
            name: text_bits(model, ids[name].to(device), length) / len(texts[name])
            for name in ("valid", "test")
        }

    history = fit(
        model,
        text_batches(ids["train"], shape["block_size"], batch),
        loss_fn=text_loss,
        **dict(steps=steps, lr=1e-3, warmup=steps // 20, betas=(0.9, 0.95), weight_decay=0.1),
        **dict(
            evaluate=evaluate, log_every=max(1, steps // 20), checkpoint=folder / "gpt.json"
        ),
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


def book(arguments):
    """Train on the book's own text, one minute per run, next to programs that compress it.

    Vocabulary and learning rate are chosen on the validation part, among vocabularies whose run
    takes a minute. Three seeds of the chosen setting are judged on the test part, next to bz2,
    xz, and an n-gram model of characters, which see the same training text. The record is
    FOLDER/gpt_book.json.
    """
    vocabularies = BOOK_VOCABULARIES
    rates = BOOK_RATES
    seeds = SEEDS
    steps = BOOK_STEPS
    texts = {name: book_text(name) for name in ("train", "valid", "test")}
    if arguments.tiny:
        vocabularies = (300,)
        rates = (4e-3,)
        seeds = (0,)
        steps = 2
        texts = {name: text[:3000] for name, text in texts.items()}
    baselines = {
        "bz2": compressed(bz2.compress, texts["train"], texts["test"]),
        "xz": compressed(lzma.compress, texts["train"], texts["test"]),
    }
    for n in (3, 5, 7):
        baselines[f"{n}-gram"] = n_grams(texts["train"], texts["test"], n)
    print(baselines, flush=True)
    shape = dict(length=BOOK_LENGTH, batch=BOOK_BATCH, shape=BOOK_SHAPE, tiny=arguments.tiny)
    record = start("gpt", arguments, **shape, baselines=baselines, tuning=[], runs=[])

    def once(vocab, lr, seed, part, kind):
        settings = dict(vocab=vocab, lr=lr, seed=seed, part=part)
        return record.once(
            settings, lambda: book_run(texts, vocab, lr, seed, steps, part), kind
        )

    def go():
        tried = [
            once(vocab, lr, 100, "valid", "tuning")
            for vocab, lr in itertools.product(vocabularies, rates)
        ]
        fast = [run for run in tried if run["vocab"] <= MINUTE]
        best = min(fast, key=lambda run: run["bits"])
        for seed in seeds:
            once(best["vocab"], best["lr"], seed, "test", "runs")

    record.work(go)


# --- nanoGPT ---------------------------------------------------------------------------------

NANOGPT = "nanoGPT"
PEAK = 989e12  # operations per second of an H100 in bfloat16
SHAPES = {
    "tiny": dict(vocab_size=60, block_size=16, n_layer=2, n_head=3, n_embd=48),
    "cpu": dict(vocab_size=8192, block_size=256, n_layer=6, n_head=6, n_embd=384),
    "cuda": dict(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768),
}


def step(model, loss):
    """Forward, loss and backward of a model, as a function."""

    def run():
        model.zero_grad(set_to_none=True)
        loss().backward()

    return run


def utilisation(model, batch, length, ms, peak):
    """The share of a processor's operations a second that the model's own operations are."""
    c = model.config
    n = sum(p.numel() for p in model.parameters())
    n -= model.wpe.weight.numel() if model.wpe is not None else 0
    work = 6 * n + 12 * c.n_layer * c.n_head * c.resolved_head_dim * length
    return round(work * batch * length / (ms / 1000) / peak, 3)


def nanogpt_pair(path, shape):
    """nanoGPT's model of a shape, and ours with its weights, which have the same names."""
    theirs = runpy.run_path(str(path), run_name="nanogpt")
    torch.manual_seed(0)
    theirs = theirs["GPT"](theirs["GPTConfig"](**shape, dropout=0.0, bias=True))
    ours = GPT(GPTConfig(**shape, **GPT2_STYLE))
    weights = {k.removeprefix("transformer."): v for k, v in theirs.state_dict().items()}
    ours.load_state_dict(weights, strict=True)
    return theirs, ours


def largest(x, y):
    """The largest difference of two tensors, in parts of the largest entry."""
    return float(((x - y).abs().max() / y.abs().max()).detach())


def differences(theirs, ours, tokens, targets):
    """The largest relative difference of the logits, and of all gradients."""
    theirs.zero_grad(), ours.zero_grad()
    their_logits, their_loss = theirs(tokens, targets)
    logits = ours(tokens)
    their_loss.backward()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    grads = {k.removeprefix("transformer."): p.grad for k, p in theirs.named_parameters()}
    return {
        "logits": largest(logits, their_logits),
        "gradients": max(largest(p.grad, grads[k]) for k, p in ours.named_parameters()),
    }


def set_tanh(model):
    for block in model.transformer.h:
        block.mlp.gelu = nn.GELU(approximate="tanh")


def nanogpt(arguments):
    """Compare GPT with nanoGPT, and time training steps of both.

    The same random weights in both, in the shape of GPT-2. nanoGPT computes the exact GELU,
    GPT-2 its tanh approximation: outputs and gradients are compared as nanoGPT stands
    ("exact"), and with the approximation in its place ("tanh"). Then training steps take turns;
    a row has the ratio to nanoGPT. On a CPU one thread is used, and its own time counts. On a
    GPU weights are in bfloat16, both are compiled, and the model utilisation is recorded:
    6 operations for each parameter and token, and 12 L d N for attention (Chowdhery et al.
    2022, appendix B), over --peak. The record is FOLDER/nanogpt_DEVICE.json.
    """
    device = arguments.device
    if device == "cpu":
        torch.set_num_threads(1)
    shape = SHAPES["tiny" if arguments.tiny else device]
    theirs, ours = nanogpt_pair(arguments.model, shape)
    length = min(shape["block_size"], 128 if device == "cpu" else 1024)
    batch = 4 if device == "cpu" else 16
    tokens, targets = torch.randint(shape["vocab_size"], (2, batch, length))
    record = dict(shape=shape, batch=batch, length=length, tiny=arguments.tiny)
    record["exact"] = differences(theirs, ours, tokens[:1], targets[:1])
    set_tanh(theirs)
    record["tanh"] = differences(theirs, ours, tokens[:1], targets[:1])
    tokens = tokens.to(device)
    targets = targets.to(device)
    models = (theirs, ours)
    if device == "cuda":
        models = [torch.compile(m.to(device, torch.bfloat16)) for m in models]
    calls = {
        NANOGPT: step(models[0], lambda: models[0](tokens, targets)[1]),
        OURS: step(
            models[1],
            lambda: F.cross_entropy(models[1](tokens).flatten(0, 1), targets.flatten()),
        ),
    }
    clock = time.process_time if device == "cpu" else time.perf_counter
    take_turns(calls, 3, device)  # first rounds are not counted
    times = take_turns(calls, arguments.repeats, device, clock=clock)
    rows = []
    for name in calls:
        ms = round(median(times[name]), 2)
        rows.append({"what": name, "ms": ms, **ratio(times[name], times[NANOGPT])})
        if device == "cuda":
            rows[-1]["utilisation"] = utilisation(ours, batch, length, ms, arguments.peak)
    write(arguments.out, "nanogpt", device, record | {"rows": rows})


# --- tiny Shakespeare ------------------------------------------------------------------------

NANO_MODEL = GPT2_STYLE | dict(bias=False, block_size=64, n_layer=4, n_head=4, n_embd=128)
SHAKESPEARE = {
    "nanogpt": dict(
        model=NANO_MODEL, batch=12, steps=2000, log_every=250, lr=1e-3, precision="no"
    ),
    "best": dict(  # the learning rate is the best of five for four layers ("growth")
        model=dict(block_size=256, n_layer=6, n_head=5, n_embd=160, dropout=0.1),
        batch=16,
        steps=6000,
        log_every=500,
        lr=3e-3,
        precision="bf16",
    ),
}
TINY_SHAKESPEARE = dict(
    model=dict(block_size=16, n_layer=1, n_head=2, n_embd=16),
    **dict(batch=2, steps=4, log_every=2, lr=1e-3, precision="no"),
)
LEAST_RATE = 0.1  # of the peak
SHAKESPEARE_WARMUP = 100


def learning_rate_with_floor(step, *, steps, warmup, schedule):
    """Return the factor of nanoGPT's schedule: half a cosine down to a tenth of the peak."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))


def character_tokenizer(text):
    """Return a tokenizer whose tokens are the characters of a text, in sorted order."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: i for i, character in enumerate(sorted(set(text)))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=min(vocab)))
    each = Regex(r"[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(each, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def shakespeare_run(texts, name, seed, folder, setting):
    """Train once, from its checkpoint if there is one, and measure the whole validation text.

    The loss in nats is nanoGPT's: windows of `block_size` characters that do not overlap, in
    which a character is predicted from those before it in its window. "bits_overlapping" gives
    each character at least half a window.
    """
    tokenizer = character_tokenizer(texts["train"] + texts["valid"])
    ids = {part: torch.tensor(tokenizer.encode(text).ids) for part, text in texts.items()}
    torch.manual_seed(seed)
    model = GPT(GPTConfig(tokenizer.get_vocab_size(), **setting["model"]))
    model.tokenizer = tokenizer
    length = setting["model"]["block_size"]
    count = len(ids["valid"]) - 1

    def evaluate(model):
        return dict(valid=text_bits(model, ids["valid"], length, length) / count * math.log(2))

    folder.mkdir(parents=True, exist_ok=True)
    with mock.patch.object(train_module, "learning_rate", learning_rate_with_floor):
        history = fit(
            model,
            text_batches(ids["train"], length, setting["batch"], seed),
            loss_fn=text_loss,
            steps=setting["steps"],
            lr=setting["lr"],
            warmup=min(SHAKESPEARE_WARMUP, setting["steps"]),
            betas=(0.9, 0.99),
            weight_decay=0.1,
            evaluate=evaluate,
            log_every=setting["log_every"],
            verbose=True,
            checkpoint=folder / f"shakespeare_{name}_{seed}.json",
            seed=seed,
            accelerator=Accelerator(cpu=True, mixed_precision=setting["precision"]),
        )
    nats = history[-1]["valid"]
    return dict(
        parameters=sum(p.numel() for p in model.parameters()),
        steps=setting["steps"],
        nats=round(nats, 4),
        bits=round(nats / math.log(2), 4),
        bits_overlapping=round(text_bits(model, ids["valid"], length) / count, 4),
        curve=[[row["step"], round(row["loss"], 4), round(row["valid"], 4)] for row in history],
        sample=model.write(
            "ROMEO:", 24 if setting is TINY_SHAKESPEARE else 400, temperature=0.8,
            generator=torch.Generator().manual_seed(seed),
        ),
    )  # fmt: skip


def shakespeare(arguments):
    """Train on tiny Shakespeare with nanoGPT's split, the first 90% and the last 10%.

    "nanogpt" is the CPU setting of nanoGPT's README, whose validation loss is 1.88: 4 layers, 4
    heads, width 128, windows of 64, batches of 12, 2,000 steps, no dropout, a learning rate
    from 1e-3 to 1e-4. "best" is a larger model with today's options, whose matrix products run
    in bfloat16, for at most 150 minutes of one core. A run goes on from its checkpoint in
    --checkpoints, from which benchmarks/ship.py makes the
    model that ships. All runs are in FOLDER/gpt_shakespeare.json.
    """
    setting = TINY_SHAKESPEARE if arguments.tiny else SHAKESPEARE[arguments.setting]
    if arguments.steps is not None:
        setting = setting | dict(steps=arguments.steps)
    texts = read_shakespeare(arguments)
    if arguments.tiny:
        texts = {part: text[:2000] for part, text in texts.items()}
    record = start("gpt", arguments, tiny=arguments.tiny, settings=SHAKESPEARE, runs=[])
    torch.set_num_threads(arguments.threads)
    known = dict(setting=arguments.setting, seed=arguments.seed, steps=setting["steps"])
    record.once(
        known,
        lambda: shakespeare_run(
            texts, arguments.setting, arguments.seed, arguments.checkpoints, setting
        ),
    )


def read_shakespeare(arguments):
    """Return the training and validation text of a parsed command."""
    if arguments.data is None:
        return {part: data.shakespeare(part) for part in ("train", "valid")}
    text = arguments.data.read_text(encoding="utf-8")
    boundary = int(0.9 * len(text))
    return dict(train=text[:boundary], valid=text[boundary:])


# --- how the model grows ----------------------------------------------------------------------

page = run_cells(
    "24_gpt",
    *("bigram", "training", "one-step", "self-attention", "listing"),
    names=dict(math=math, torch=torch, nn=nn, F=F),
)
GROWTH_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
GROWTH_STEPS = 2000
TUNED_ON = 0.05  # of the training text, its end
STAGES = {  # vocabulary and width to a model
    "bigram": lambda V, C: page.Bigram(V),
    "average": lambda V, C: page.OneStep(V, C, page.Average(C)),
    "one head": lambda V, C: page.OneStep(V, C, page.SelfAttention(C, 1)),
    "four heads": lambda V, C: page.OneStep(V, C, page.SelfAttention(C, 4)),
    "one layer": lambda V, C: page.SmallGPT(V, C, 4, 1),
    "four layers": lambda V, C: page.SmallGPT(V, C, 4, 4),
}


def growth(arguments):
    """Train each stage of the page's GPT on tiny Shakespeare, with nanoGPT's width and steps.

    The learning rate of a stage has the least loss on the last twentieth of the training text,
    which the training of these runs leaves out. Three seeds then train on the whole training
    text, and the loss on the validation text is recorded.
    """
    tiny = arguments.tiny
    texts = read_shakespeare(arguments)
    symbols = sorted(set(texts["train"] + texts["valid"]))
    index = {symbol: i for i, symbol in enumerate(symbols)}
    ids = {part: torch.tensor([index[x] for x in text]) for part, text in texts.items()}
    ids = {part: x[: 2000 if tiny else None] for part, x in ids.items()}
    cut = int((1 - TUNED_ON) * len(ids["train"]))
    steps = 3 if tiny else GROWTH_STEPS
    width = 16 if tiny else 128
    record = start("gpt", arguments, tiny=tiny, width=width, steps=steps, tuning=[], runs=[])

    def once(stage, lr, seed, fit_on, judge, kind):
        def make():
            torch.manual_seed(seed)
            model = STAGES[stage](len(symbols), width)
            page.train(model, fit_on, steps, lr, seed=seed)
            count = sum(p.numel() for p in model.parameters())
            return dict(parameters=count, nats=round(page.validate(model, judge), 4))

        return record.once(dict(stage=stage, lr=lr, seed=seed, steps=steps), make, kind)

    def go():
        for stage in STAGES:
            tried = []
            for lr in GROWTH_RATES[: 1 if tiny else None]:
                rows = ids["train"][:cut], ids["train"][cut:]
                tried.append(once(stage, lr, 100, *rows, "tuning"))
            best = min(tried, key=lambda run: run["nats"])
            for seed in SEEDS[: 1 if tiny else None]:
                once(stage, best["lr"], seed, ids["train"], ids["valid"], "runs")

    record.work(go)


# --- what a model of Shakespeare writes -------------------------------------------------------

DRAWN = {
    "temperature 0": dict(temperature=0.0),
    "temperature 0.5": dict(temperature=0.5),
    "temperature 0.8": dict(temperature=0.8),
    "temperature 1": dict(),
    "temperature 1.5": dict(temperature=1.5),
    "top-k 5": dict(top_k=5),
    "top-p 0.9": dict(top_p=0.9),
}
BEGINNING = "ROMEO:\n"
CONTEXTS = (  # an explorer shows the distribution after each
    "ROMEO:\nWhat, art thou q",
    "KING RICHARD III:\nMy lor",
    "JULIET:\nO, speak again, my ",
    "First Citizen:\nWe are the ",
    "GLOUCESTER:\nI will not go",
)


def drawn(arguments):
    """Write with a model of Shakespeare, from its checkpoint, under several settings.

    The record also has the logits after a few beginnings, and the mean and the deviation of
    nanoGPT's estimate of the validation loss, from 20 batches of 12 random windows.
    """
    model = load_model(arguments.model)
    model.eval()
    tokenizer = model.tokenizer
    samples = {}
    for name, setting in DRAWN.items():
        generator = torch.Generator().manual_seed(0)
        count = 8 if arguments.tiny else 300
        samples[name] = model.write(BEGINNING, count, **setting, generator=generator)
    contexts = []
    for text in CONTEXTS:
        tokens = torch.tensor([tokenizer.encode(text).ids[-model.config.block_size :]])
        with torch.no_grad():
            logits = model(tokens)[0, -1]
        contexts.append(dict(text=text, logits=[round(x, 3) for x in logits.tolist()]))
    symbols = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    valid = torch.tensor(tokenizer.encode(read_shakespeare(arguments)["valid"]).ids)
    batches = text_batches(valid, model.config.block_size, 20 * 12)
    estimates = []
    for i in range(2 if arguments.tiny else 100):
        with torch.no_grad():
            total, count = text_loss(model, batches(i))
        estimates.append(total.item() / count)
    mean = sum(estimates) / len(estimates)
    deviation = stdev(estimates)
    record = dict(
        tiny=arguments.tiny,
        parameters=sum(p.numel() for p in model.parameters()),
        estimate=dict(mean=round(mean, 4), deviation=round(deviation, 4)),
        beginning=BEGINNING,
        samples=samples,
    )
    write_record(
        arguments.out / "gpt_drawn.json",
        record | dict(symbols=symbols, contexts=contexts),
    )


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.experiment("growth", growth)
    parser.add_argument("--data", type=Path, help="the text's file; by default it is fetched")
    parser = commands.experiment("drawn", drawn)
    parser.add_argument("--data", type=Path, help="the text's file; by default it is fetched")
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint, or its folder")
    parser = commands.experiment("shakespeare", shakespeare)
    parser.add_argument("--data", type=Path, help="the text's file; by default it is fetched")
    parser.add_argument("--setting", choices=SHAKESPEARE, default="nanogpt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="instead of the setting's own number")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    commands.experiment("book", book)
    for function in (options, scaling, induction, sampling):
        commands.experiment(function.__name__, function)
    parser = commands.timing("nanogpt", nanogpt, repeats=15)
    parser.add_argument("--model", type=Path, required=True, help="nanoGPT's model.py")
    parser.set_defaults(out=RESULTS)
    parser.add_argument("--peak", type=float, default=PEAK, help="operations per second")
    commands.run(arguments)


if __name__ == "__main__":
    main()
