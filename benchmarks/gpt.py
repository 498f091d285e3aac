"""Small experiments with a GPT: `python -m benchmarks.gpt NAME --out FOLDER`.

    options    today's choices against those of 2019, one changed at a time
    scaling    the loss against the number of parameters and of training tokens, with a fit
    induction  two layers learn to copy what followed last time; heads are found and removed
    sampling   temperature, top-k, top-p, min-p against the statistics of unseen text; and how
               much attention falls on the first token
    groups     a step of decoding with grouped queries, beside copies of keys and values

The text is the book's own prose: trained on its training part, chosen on its validation part,
judged on its test part. A record, FOLDER/gpt_NAME.json, is written after each run, and a second
command goes on where the first one ended. With --tiny the numbers mean nothing.
"""

import math
import resource
import time
from dataclasses import replace
from statistics import median

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from attnlib import gpt
from attnlib.attention import attention, record_attention
from attnlib.data import book_text, train_tokenizer
from attnlib.gpt import (
    GPT,
    GPTConfig,
    grouped_attention,
    text_batches,
    text_bits,
    text_loss,
)
from attnlib.train import fit
from benchmarks.common import Record, experiment_parser, ratio, take_turns

LENGTH, BATCH, VOCAB, SEEDS = 64, 16, 512, (0, 1, 2)
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
        *(model, loss, batches),
        **dict(steps=steps, lr=lr, warmup=steps // 15, betas=(0.9, 0.95), weight_decay=0.1),
        **dict(evaluate=evaluate, every=max(1, steps // times), seed=seed),
        accelerator=Accelerator(cpu=True),
    )


def text_run(ids, sizes, config, steps, lr, seed, judge="valid"):
    """A model of the text, and a row: bits a byte of a part as the training goes on."""
    torch.manual_seed(seed)
    model, began = GPT(config), time.process_time()

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


def options(record, tiny):
    """For each option a learning rate by the validation part, then three seeds on the test."""
    ids, sizes = texts(tiny)
    steps, vocab = (4, 300) if tiny else (400, VOCAB)
    some = dict(list(OPTIONS.items())[:2]) if tiny else OPTIONS
    for name, change in some.items():
        config, tuned = GPTConfig(vocab, **MODERN | change), {}
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

WIDTHS, FRACTIONS = (16, 32, 64, 128), (1 / 16, 1 / 4, 1)


def scaling(record, tiny):
    """The least validation loss of each width on each fraction of the training text."""
    ids, sizes = texts(tiny)
    steps, vocab = (4, 300) if tiny else (600, VOCAB)
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

SYMBOLS, HALF = 16, 16


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
    logits, told = model(tokens[:, :-1])[:, HALF:].flatten(0, 1), tokens[:, HALF + 1 :]
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
        before, match = [], []
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
    proj, d = model.h[layer].attn.c_proj.weight, model.config.head_width
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
        *(model, copy_loss, copies(seed)),
        **dict(
            steps=steps, lr=3e-3, warmup=min(50, steps), weight_decay=0.0, schedule="constant"
        ),
        **dict(evaluate=lambda model: dict(nats=copying(model)), every=max(1, steps // 40)),
        **dict(seed=seed, accelerator=Accelerator(cpu=True)),
    )
    model.eval()
    ablated = [[without(model, n, head) for head in range(2)] for n in range(layers)]
    return dict(
        **dict(layers=layers, seed=seed, steps=steps, nats=round(copying(model), 4)),
        curve=[[row["step"], round(row["nats"], 4)] for row in history],
        **dict(heads=heads(model), without=ablated),
    )


def induction(record, tiny):
    """Two layers, and one layer with four times the steps."""
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


# --- sampling, and the first token ------------------------------------------------------------

SETTINGS = {
    **{f"temperature {t}": dict(temperature=t) for t in (0.0, 0.5, 0.7, 0.85, 1.0, 1.2)},
    **{f"top-k {k}": dict(top_k=k) for k in (5, 20, 80)},
    **{f"top-p {p}": dict(top_p=p) for p in (0.7, 0.8, 0.9, 0.95)},
    **{f"min-p {p}": dict(min_p=p) for p in (0.02, 0.05, 0.1, 0.2)},
}
PROMPT, NEW = 16, 96


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


@torch.no_grad()
def first_token(model, ids, sizes, length):
    """How much attention falls on the first token, and what it is worth under a window."""
    pieces = ids["test"][: length * 16].view(16, length)
    with record_attention() as maps:
        model(pieces)
    late = slice(length // 2, None)
    even = (1 / torch.arange(1, length + 1.0))[late].mean().item()
    share = [w[:, :, late, 0].mean((0, 2)).tolist() for w in maps]
    plain, window, bits = gpt.decoder_mask, length // 4, {}
    test = ids["test"][: 8 * length]

    def score(keep, sees):
        gpt.decoder_mask = lambda n, m, *_, **__: (
            (plain(n, m, sees, torch.ones(1, m)) | (torch.arange(m) < keep))
            & torch.ones(n, m, dtype=torch.bool).tril(m - n)
        )
        try:
            return round(text_bits(model, test, length), 1)
        finally:
            gpt.decoder_mask = plain

    bits["all"] = score(0, length)
    bits["window"] = score(0, window)
    bits["window and the first token"] = score(1, window)
    bits["window and the first four"] = score(4, window)
    return dict(even=even, share=share, bits=bits, tokens=len(test) - 1, window=window)


def sampling(record, tiny):
    """Three models of a minute each; each writes, and the next one judges."""
    ids, sizes = texts(tiny, 1024)
    length, steps, rows = (PROMPT + NEW, 3, 2) if tiny else (128, 400, 48)
    config = GPTConfig(300 if tiny else 1024, **MODERN | dict(block_size=length, n_embd=128))
    config, models = replace(config, n_embd=32) if tiny else config, []
    for seed in SEEDS[: 2 if tiny else None]:
        model, row = text_run(ids, sizes, config, steps, 2e-3, seed, "test")
        models.append(model.eval())
        record.add(f"model {seed}", lambda row=row: row)
    for seed, model in enumerate(models):
        record.add(
            f"first {seed}",
            lambda model=model: first_token(model, ids, sizes, 16 if tiny else length),
        )
        record.add(
            f"texts {seed}", lambda seed=seed: dict(found=sampled(models, ids, seed, rows))
        )
    record.write(settings=SETTINGS, prompt=PROMPT, new=NEW, texts=rows)


# --- grouped queries --------------------------------------------------------------------------

QUERIES, WIDTH = 32, 64  # heads of queries, and the width of a head


def page_faults(call):
    """How many pages of memory the operating system hands out during a call."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@torch.no_grad()
def groups_run(groups, keys, repeats):
    """CPU time of one query in each of 32 heads, for so many heads of keys in a cache.

    "copied" repeats keys and values for each query head, in new memory in every step; "kept"
    does so in memory that it keeps. The ratios are to `grouped_attention`, without copies.
    """
    shapes = (QUERIES, 1), (groups, keys), (groups, keys)
    q, k, v = (torch.randn(1, heads, n, WIDTH) for heads, n in shapes)
    room = torch.empty(2, 1, QUERIES, keys, WIDTH)

    def copied():
        return attention(q, *(x.repeat_interleave(QUERIES // groups, 1) for x in (k, v)))

    def kept():
        for own, x in zip(
            room, (k, v), strict=True
        ):  # (1, g, 1, n, d) into (1, g, h / g, n, d)
            own.unflatten(1, (groups, -1)).copy_(x[:, :, None])
        return attention(q, *room)

    calls = dict(copied=copied, kept=kept, grouped=lambda: grouped_attention(q, k, v))
    take_turns(calls, 2, "cpu")  # the first rounds are slower
    times = take_turns(calls, repeats, "cpu", clock=time.process_time)
    row = dict(groups=groups, keys=keys, ms={}, ratios={}, faults=page_faults(copied))
    for name, own in times.items():
        row["ms"][name] = round(median(own), 3)
        row["ratios"][name] = ratio(own, times["grouped"])
    return row


def grouped(record, tiny):
    """One step of decoding for several numbers of key heads and lengths of the cache."""
    for groups in (8, 4, 1):
        for keys in (16, 32) if tiny else (1024, 8192, 32768):
            record.add(
                f"{groups} heads, {keys} keys",
                lambda groups=groups, keys=keys: groups_run(groups, keys, 2 if tiny else 21),
            )
    record.write(queries=QUERIES, width=WIDTH)


RUNS = dict(
    options=options, scaling=scaling, induction=induction, sampling=sampling, groups=grouped
)


def main():
    parser = experiment_parser(__doc__)
    parser.add_argument("what", choices=RUNS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    RUNS[arguments.what](Record("gpt", arguments), arguments.tiny)


if __name__ == "__main__":
    main()
