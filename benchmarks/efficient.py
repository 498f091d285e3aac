"""What was run for 54_efficient: `python -m benchmarks.efficient COMMAND --out FOLDER`.

    recall     fetch the symbol that stood after the first of a pair
    cliff      copy the token that stood a given number of positions back
    text       train on the book's own prose, in bits per byte
    swap       replace the attention of a trained ViT, without training and with some
    crossover  time forward passes against the length of the sequence

Every method is the same model of the library inside `attention_backend`. Learning rates are
chosen for each method on other data than those that judge. The record is
FOLDER/efficient_COMMAND.json.
"""

import time
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnlib import efficient
from attnlib.attention import attention, attention_backend, attention_weights
from attnlib.data import collages
from attnlib.gpt import GPT, GPTConfig
from attnlib.models import create_model
from attnlib.recipes import accuracy
from attnlib.train import shuffled_batches
from benchmarks import runner, timing
from benchmarks.gpt import text_run, texts, train
from benchmarks.runner import Commands, start
from benchmarks.tnt import pixels

SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3, 1e-2)


def swapped(method):
    """A context in which every attention of a model is `method(q, k, v)`; None: exact."""

    def backend(q, k, v, mask, bias, scale, dropout_p):
        with attention_backend("auto"):  # the method may use exact attention itself
            return method(q, k, v)

    return attention_backend("auto" if method is None else backend)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# --- decoders ---------------------------------------------------------------------------------
WINDOW = 8
GLOBAL = 2


def delta(q, k, v):
    """The delta rule with a rate of one: what a key held before is replaced."""
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    return efficient.delta_attention(q, k, v, k.new_ones(k.shape[:-1]))[0]


def window_and_global(q, k, v):
    n = q.shape[-2]
    mask = efficient.sparse_mask(n, window=WINDOW, global_tokens=GLOBAL, causal=True)
    return attention(q, k, v, mask=mask)


def decoders(width, seed):
    """What stands for causal attention with heads of a width."""
    features = efficient.random_features(64, width, generator=seeded(seed))
    return {
        "exact": None,
        f"window {WINDOW}": lambda q, k, v: efficient.local_attention(q, k, v, WINDOW),
        f"window {WINDOW}, {GLOBAL} global": window_and_global,
        "linear, elu + 1": lambda q, k, v: efficient.linear_attention(q, k, v, causal=True)[0],
        "delta rule": delta,
        "Performer 64": lambda q, k, v: efficient.performer_attention(
            q, k, v, features, causal=True
        ),
        "LSH 4 × 2": lambda q, k, v: efficient.lsh_attention(
            q, k, v, 4, 2, causal=True, generator=seeded(seed)
        ),
    }


class ShiftedEmbedding(nn.Module):
    """A token's vector, and a linear map of the one before it: e_t + A e_(t-1)."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.own = nn.Embedding(vocab_size, width)
        self.before = nn.Linear(width, width, False)

    def forward(self, tokens):
        x = self.own(tokens)  # (B, N, C)
        return x + self.before(F.pad(x, (0, 0, 1, 0))[:, :-1])


def symbol_run(method, config, batches, judge, steps, lr, seed, shift):
    """Train a small GPT on (tokens, targets), -100 where nothing is asked."""
    torch.manual_seed(seed)
    model = GPT(config)
    began = time.process_time()
    for parameter in model.parameters():
        if parameter.ndim == 2:  # GPT-2's deviation of 0.02 is for wide models
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    if shift:
        model.wte = ShiftedEmbedding(config.vocab_size, config.n_embd)

    def loss(model, batch):
        tokens, targets = batch
        total = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        return total, (targets >= 0).sum().item()

    @torch.no_grad()
    def right(model):
        asked = judge[1] >= 0
        return dict(right=(model(judge[0]).argmax(-1) == judge[1])[asked].float().mean().item())

    with swapped(method):
        history = train(model, loss, batches(seed), steps, lr, seed, right, times=20)
    curve = [[row["step"], round(row["right"], 4)] for row in history]
    seconds = round(time.process_time() - began, 1)
    return dict(lr=lr, seed=seed, steps=steps, right=curve[-1][1], curve=curve, seconds=seconds)


def best_rate(record, name, run, rates):
    """The rate with which a model of seed 100 does best on the validation data."""
    found = {
        lr: record.add(f"{name}, {lr}, tuning", lambda lr=lr: run(lr, 100, "valid"))
        for lr in rates
    }
    return max(found, key=lambda lr: found[lr]["right"])


def tuned(record, name, run, rates, seeds):
    """Choose a rate, then run the seeds: run(lr, seed, judge) gives a row."""
    lr = best_rate(record, name, run, rates)
    for seed in seeds:
        record.add(f"{name}, {seed}", lambda seed=seed: run(lr, seed, "test"))


# --- recall -----------------------------------------------------------------------------------
PAIRS = 16
KEYS = 64
VALUES = 64


def recall_batches(rows=32, pairs=PAIRS):
    """Of a seed: tokens (B, 4 pairs), k v k v ... twice, and targets at the second keys."""

    def of(seed):
        def batches(step):
            g = seeded(seed * 1_000_003 + step)
            keys = torch.rand(rows, KEYS, generator=g).argsort(1)[:, :pairs]  # all different
            values = KEYS + torch.randint(VALUES, (rows, pairs), generator=g)
            order = torch.rand(rows, pairs, generator=g).argsort(1)
            asked = keys.gather(1, order)
            told = values.gather(1, order)
            first = torch.stack([keys, values], -1).flatten(1)  # (B, P, 2) -> (B, 2 P)
            again = torch.stack([asked, told], -1).flatten(1)
            silent = torch.full_like(told, -100)
            answers = torch.stack([told, silent], -1).flatten(1)
            return torch.cat([first, again], 1), torch.cat(
                [torch.full_like(first, -100), answers], 1
            )

        return batches

    return of


def recall(arguments):
    """Associative recall: every key is told once, and asked once."""
    tiny = arguments.tiny
    record = start("efficient", arguments, rows=[])
    if tiny:
        steps = 4
        pairs = 4
    else:
        steps = 2000
        pairs = PAIRS
    shape = dict(n_layer=2, n_head=1, n_embd=32, position="none", tied=False)
    config = GPTConfig(KEYS + VALUES, 4 * pairs, **shape)
    batches = recall_batches(pairs=pairs)
    judges = {name: recall_batches(256, pairs)(seed)(0) for name, seed in JUDGES.items()}
    for name, method in decoders(config.resolved_head_dim, 0).items():

        def run(lr, seed, judge, method=method):
            own = symbol_run(method, config, batches, judges[judge], steps, lr, seed, True)
            return own | dict(judge=judge)

        tuned(record, name, run, RATES[: 1 if tiny else None], SEEDS[: 1 if tiny else None])
    record.write(pairs=pairs, values=VALUES, shape=shape, rates=RATES)


# --- the cliff --------------------------------------------------------------------------------
JUDGES = dict(valid=998, test=999)
SYMBOLS = 16
LENGTH = 64
BACK = (14, 15, 30)


def copy_batches(back, rows=32):
    """Of a seed: random tokens (B, LENGTH), and those that stood `back` places before them."""

    def of(seed):
        def batches(step):
            tokens = torch.randint(
                SYMBOLS, (rows, LENGTH), generator=seeded(seed * 1_000_003 + step)
            )
            return tokens, F.pad(tokens, (back, 0), value=-100)[:, :LENGTH]

        return batches

    return of


def cliff(arguments):
    """Copy from a distance: two layers with a window of 8 reach 14 places back."""
    tiny = arguments.tiny
    record = start("efficient", arguments, rows=[])
    if tiny:
        steps = 4
        seeds = SEEDS[:1]
    else:
        steps = 600
        seeds = SEEDS
    shape = dict(n_layer=2, n_head=4, n_embd=64, position="rotary")
    config = GPTConfig(SYMBOLS, LENGTH, **shape)
    for name, method in decoders(config.resolved_head_dim, 0).items():

        def run(lr, seed, judge, back, method=method):
            tokens = copy_batches(back, 128)(JUDGES[judge])(0)
            own = symbol_run(method, config, copy_batches(back), tokens, steps, lr, seed, False)
            return own | dict(judge=judge, back=back)

        rates = (1e-3, 3e-3)[: 1 if tiny else None]
        lr = best_rate(record, name, lambda *own: run(*own, BACK[0]), rates)
        for back in BACK[:1] if tiny else BACK:
            for seed in seeds:
                record.add(
                    f"{name}, {back}, {seed}",
                    lambda seed=seed, back=back: run(lr, seed, "test", back),
                )
    record.write(window=WINDOW, symbols=SYMBOLS, length=LENGTH, shape=shape, back=BACK)


# --- text -------------------------------------------------------------------------------------
def text(arguments):
    """Bits a byte of the book's prose; what was learned is judged on its test part."""
    tiny = arguments.tiny
    record = start("efficient", arguments, rows=[])
    ids, sizes = texts(tiny)
    shape = dict(block_size=64, n_layer=2, n_head=4, n_embd=64)
    config = GPTConfig(300 if tiny else 512, **shape)
    steps = 4 if tiny else 400
    for name, method in decoders(config.resolved_head_dim, 0).items():

        def run(lr, seed, judge, method=method):
            with swapped(method):
                row = text_run(ids, sizes, config, steps, lr, seed, judge)[1]
            return row | dict(right=-row["curve"][-1][1])  # the more the better

        rates = (4e-3,) if tiny else (2e-3, 4e-3, 8e-3)
        tuned(record, name, run, rates, SEEDS[: 1 if tiny else None])
    record.write(shape=shape)


# --- a trained ViT ----------------------------------------------------------------------------
SIDE = 8  # patches of `vit_collages` along a side; a class token stands before them


def near(reach):
    """Patches at most `reach` rows and columns apart, and the class token: bool (65, 65)."""
    rows = torch.arange(SIDE**2) // SIDE
    columns = torch.arange(SIDE**2) % SIDE
    apart = [(x[:, None] - x).abs() for x in (rows, columns)]
    return F.pad((apart[0] <= reach) & (apart[1] <= reach), (1, 0, 1, 0), value=True)


def crosses():
    """Patches of the same row or column, and the class token."""
    rows = torch.arange(SIDE**2) // SIDE
    columns = torch.arange(SIDE**2) % SIDE
    same = (rows[:, None] == rows) | (columns[:, None] == columns)
    return F.pad(same, (1, 0, 1, 0), value=True)


def masked(mask):
    return lambda q, k, v: attention(q, k, v, mask=mask)


def pooled(q, k, v):
    """Keys and values are the means of 2 × 2 patches; the class token stays what it is."""

    def means(x):  # (B, h, 65, d) -> (B, h, 17, d)
        cells = x[:, :, 1:].unflatten(2, (SIDE // 2, 2, SIDE // 2, 2)).mean((3, 5))
        return torch.cat([x[:, :, :1], cells.flatten(2, 3)], 2)

    return attention(q, means(k), means(v))


def of_rank(rank):
    """The nearest matrix of a rank in place of the weights: what no cheap method knows."""

    def method(q, k, v):
        u, s, vh = torch.linalg.svd(attention_weights(q, k))
        return (u[..., :rank] * s[..., None, :rank]) @ (vh[..., :rank, :] @ v)

    return method


def best_keys(count):
    """Softmax over the `count` keys with the greatest weights, found by looking at all."""

    def method(q, k, v):
        weights = attention_weights(q, k)
        least = weights.topk(count, -1).values[..., -1:]
        return attention(q, k, v, mask=weights >= least)

    return method


def performer(count, seed):
    features = efficient.random_features(count, 16, generator=seeded(seed))
    return lambda q, k, v: efficient.performer_attention(q, k, v, features)


def hashed(buckets, times, seed):
    return lambda q, k, v: efficient.lsh_attention(
        q, k, v, buckets, times, generator=seeded(seed)
    )


def encoders(seed):
    """What stands for the attention of a `vit_collages`."""
    return {
        "exact": None,
        **{f"rank {r}": of_rank(r) for r in (2, 4, 8)},
        **{f"best {m} keys": best_keys(m) for m in (4, 8, 16)},
        **{
            f"Nyström {m}": lambda q, k, v, m=m: efficient.nystrom_attention(q, k, v, m)
            for m in (4, 8, 16)
        },
        **{f"local {2 * r + 1} × {2 * r + 1}": masked(near(r)) for r in (1, 2, 3)},
        "row and column": masked(crosses()),
        "pooled 2 × 2": pooled,
        **{f"LSH 8 × {r}": hashed(8, r, seed) for r in (1, 4)},
        **{f"Performer {m}": performer(m, seed) for m in (16, 64, 256, 1024)},
        "linear, elu + 1": lambda q, k, v: efficient.linear_attention(q, k, v)[0],
        "average": lambda q, k, v: v.mean(-2, keepdim=True).expand_as(v),
    }


RANDOM = ("LSH", "Performer")
LEARNED = (
    *("exact", "Nyström 8", "local 3 × 3", "row and column", "pooled 2 × 2", "LSH 8 × 1"),
    *("Performer 64", "linear, elu + 1", "average"),
)


@torch.no_grad()
def layer_errors(model, images, method):
    """For each layer, the relative error of what comes out when its input is exact."""
    errors = []

    def backend(q, k, v, mask, bias, scale, dropout_p):
        with attention_backend("auto"):
            exact = attention(q, k, v)
            errors.append(((method(q, k, v) - exact).norm() / exact.norm()).item())
        return exact

    with attention_backend(backend):
        model(images)
    return [round(error, 4) for error in errors]


def right(model, images, labels):
    return round(accuracy(model, (images, labels))["accuracy"].item(), 4)


def label_loss(model, batch):
    images, labels = batch
    shift = torch.randint(-4, 5, (2,)).tolist()
    logits = model(images.float().div(127.5).sub(1).roll(shift, (-2, -1)))
    return F.cross_entropy(logits, labels, reduction="sum"), len(labels)


def learned(method, data, judge, steps, lr, seed):
    """The trained ViT, trained further with another attention; accuracy along the way."""
    torch.manual_seed(seed)
    model = create_model("vit_collages", pretrained=True)
    began = time.process_time()

    def evaluate(model):
        return dict(right=right(model, *judge))

    with swapped(method):
        model.eval()
        before = evaluate(model)["right"]
        batches = shuffled_batches(*data, batch_size=32, seed=seed)
        history = train(model.train(), label_loss, batches, steps, lr, seed, evaluate, times=6)
    curve = [[0, before]] + [[row["step"], round(row["right"], 4)] for row in history]
    seconds = round(time.process_time() - began, 1)
    return dict(lr=lr, seed=seed, steps=steps, right=curve[-1][1], curve=curve, seconds=seconds)


def swap(arguments):
    """First without a step of training, then with some."""
    tiny = arguments.tiny
    record = start("efficient", arguments, rows=[])
    if tiny:
        steps = 2
        count = 64
    else:
        steps = 400
        count = 2000
    model = create_model("vit_collages", pretrained=True).eval()
    test = pixels(collages(count, "test", seed=1))
    for seed in SEEDS[: 1 if tiny else None]:
        for name, method in encoders(seed).items():
            if seed and not name.startswith(RANDOM):
                continue

            def drop_in(method=method, seed=seed):
                with swapped(method):
                    found = dict(right=right(model, *test), seed=seed)
                method = method or attention
                return found | dict(errors=layer_errors(model, test[0][:100], method))

            record.add(f"{name}, as it is, {seed}", drop_in)
    found = collages(64 if tiny else 8192 + count, seed=5)
    data, valid = (
        (found["image"][part], found["label"][part])
        for part in (slice(count // 2 if tiny else count, None), slice(count))
    )
    data = ((data[0] * 255).round().byte(), data[1])
    judges = dict(valid=(2 * valid[0] - 1, valid[1]), test=test)
    for name in LEARNED[:2] if tiny else LEARNED:

        def run(lr, seed, judge, name=name):
            return learned(encoders(seed)[name], data, judges[judge], steps, lr, seed)

        rates = (3e-4,) if tiny else (3e-4, 1e-3)
        tuned(record, name, run, rates, SEEDS[: 1 if tiny else None])
    record.write(pictures=count, learned=LEARNED)


# --- crossover --------------------------------------------------------------------------------
def lengths(device, tiny):
    if tiny:
        return (64, 128)
    return (
        (256, 512, 1024, 2048, 4096, 8192)
        if device == "cpu"
        else tuple(2**n for n in range(9, 17))
    )


def flexible_window(n, device):
    """A window of 128 as a kernel of FlexAttention; on a CPU no compiler is asked for."""
    if device == "cpu":
        return {}
    block_mask = create_block_mask(
        lambda b, h, i, j: (j <= i) & (i - j < 128), None, None, n, n
    )
    compiled = torch.compile(flex_attention)
    return {
        "FlexAttention 128, causal": lambda q, k, v: compiled(q, k, v, block_mask=block_mask)
    }


def contestants(n, d, device):
    """Functions of q, k, v: bidirectional ones, then causal ones."""
    features = efficient.random_features(256, d, generator=seeded(0)).to(device)
    e = torch.randn(128, n, generator=seeded(0)).to(device) / n**0.5
    return {
        "exact": attention,
        "linear": lambda q, k, v: efficient.linear_attention(q, k, v)[0],
        "Performer 256": lambda q, k, v: efficient.performer_attention(q, k, v, features),
        "Nyström 64": lambda q, k, v: efficient.nystrom_attention(q, k, v, 64, iterations=6),
        "Linformer 128": lambda q, k, v: efficient.linformer_attention(
            q, k, v, e.to(q.dtype), e.to(q.dtype)
        ),
        "exact, causal": lambda q, k, v: attention(q, k, v, mask="causal"),
        "window 128, causal": lambda q, k, v: efficient.local_attention(q, k, v, 128),
        "linear, causal": lambda q, k, v: efficient.linear_attention(
            q, k, v, causal=True, chunk=128
        )[0],
        "delta rule, causal": lambda q, k, v: efficient.delta_attention(
            q, F.normalize(k, dim=-1), v, k.new_ones(k.shape[:-1])
        )[0],
        **flexible_window(n, device),
    }


@torch.no_grad()
def crossover(arguments):
    """Forward, one sequence of four heads of width 64; a ratio is to exact attention."""
    tiny = arguments.tiny
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        dtype = torch.float32
        heads = 4
    else:
        dtype = torch.bfloat16
        heads = 16
    torch.set_num_threads(1) if device == "cpu" else None
    if device == "cpu":
        clock = time.process_time
        repeats = 7
    else:
        clock = time.perf_counter
        repeats = 15
    path = arguments.out / f"efficient_crossover_{device}.json"
    bench = runner.Rows(path, device, arguments.minutes, tiny)

    def measure(n, left_out):
        q, k, v = torch.randn(3, 1, heads, n, 64, device=device, dtype=dtype).unbind()
        methods = contestants(n, 64, device)
        calls = {name: lambda f=f: f(q, k, v) for name, f in methods.items()}
        turns = 2 if tiny else repeats, device, left_out, clock
        times = timing.warm_turns(calls, *turns, warm_up=2)
        rows = []
        for name, own in times.items():
            exact = "exact, causal" if "causal" in name else "exact"
            low, high = timing.quartiles(own)
            spread = dict(low=round(low, 3), high=round(high, 3))
            rows.append(
                dict(name=name, **timing.median_row(times, name, exact, digits=3), **spread)
            )
            print(n, rows[-1], flush=True)
        return rows

    def go():
        for n in lengths(device, tiny):
            bench.once(dict(n=n), partial(measure, n))

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    for function in (recall, cliff, text, swap, crossover):
        commands.experiment(function.__name__, function)
    commands.run(arguments)


if __name__ == "__main__":
    main()
