"""What was run for 10_attention: `python -m benchmarks.attention COMMAND --out FOLDER`.

    speed        time the attention backends side by side
    association  compare attention, a convolution, and a network of pairs at finding partners

`benchmarks.runner` says how runs are resumed and recorded.
"""

import functools
import itertools
import math
import statistics

import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib.attention import attention, attention_backend
from benchmarks import runner, timing
from benchmarks.runner import Commands, Runs

SHAPES = {  # (B, h, N, d): where such attention occurs
    "sentence": (32, 8, 32, 64),
    "window": (256, 4, 49, 32),
    "patches": (8, 6, 197, 64),
    "text": (2, 8, 1024, 64),
    "long text": (1, 8, 4096, 64),
}
BACKENDS = ["reference", "sdpa", "auto"]


def call(backend, inputs, bias, training):
    with attention_backend(backend), torch.set_grad_enabled(training):
        out = attention(*inputs, bias=bias)
        if training:
            torch.autograd.grad(out.sum(), inputs)
    return out


def measure(shape, dtype, device, with_bias, training, repeats, left_out):
    inputs = [
        torch.randn(shape, device=device, dtype=dtype, requires_grad=training) for _ in range(3)
    ]
    bias = None
    if with_bias:
        bias = torch.randn(shape[1], shape[2], shape[2], device=device, dtype=dtype)
    calls = {name: functools.partial(call, name, inputs, bias, training) for name in BACKENDS}
    outputs = timing.attempt_all(calls, left_out)  # warms up, too
    row = {"difference": None}
    if "reference" in outputs:
        wanted = outputs["reference"]
        row["difference"] = max((out - wanted).abs().max().item() for out in outputs.values())
    calls = {name: calls[name] for name in outputs}
    del outputs
    times = timing.take_turns(calls, repeats, device, left_out=left_out)
    for name in times:
        row[name] = {"ms": round(statistics.median(times[name]), 4)}
        if "reference" in times:
            row[name] |= timing.ratio(times[name], times["reference"])
    return [row] if times else []


def line(setting, row):
    """A row in words."""
    cells = []
    for name in BACKENDS:
        own = row.get(name, {})
        cells.append(f"{own.get('ms', math.nan):10.2f} ms {own.get('ratio', math.nan):8.2f}")
    words = (
        f"{setting['name']:10} {setting['dtype']:9} {setting['bias']!s:5} {setting['pass']:8}"
    )
    return words + "".join(f"{cell:>22}" for cell in cells)


def speed(arguments):
    """Time the attention backends side by side.

    The backends take turns, so that a busy machine slows all of them alike. Recorded are
    medians, the number of rounds, the quartiles of the ratio to the reference, and the largest
    difference between the outputs. The rows are written as they come, and the command can be
    given again.
    """
    device = arguments.device
    shapes = {"tiny": (1, 2, 8, 4)} if arguments.tiny else SHAPES
    path = arguments.out and arguments.out / f"attention_{device}.json"
    bench = runner.Rows(path, device, arguments.minutes, arguments.tiny)

    def go():
        options = (torch.float32, torch.bfloat16), (False, True), (False, True)
        for name, (dtype, with_bias, training) in itertools.product(
            shapes, itertools.product(*options)
        ):
            setting = {
                "name": name,
                "shape": list(shapes[name]),
                "dtype": str(dtype)[6:],
                "bias": with_bias,
                "pass": "training" if training else "forward",
            }
            torch.manual_seed(0)
            rest = shapes[name], dtype, device, with_bias, training, arguments.repeats
            for row in bench.once(setting, functools.partial(measure, *rest)):
                print(line(setting, row), flush=True)

    print(f"{'':35}" + "".join(f"{name:>22}" for name in BACKENDS))
    bench.work(go)


# --- who finds partners? ---------------------------------------------------------------------

# width of a token, tokens in a sequence, channels inside
D = 8
N = 8
WIDTH = 64
RATES = (0.001, 0.003, 0.01)
ODD = torch.arange(1, N, 2)
EVEN = torch.arange(2, N, 2)


def vocabularies(orbits=4):
    """Two sets of 3 · orbits unit vectors; U, a turn by 120 degrees, maps each to itself."""
    generator = torch.Generator().manual_seed(0)
    third = torch.tensor([[-0.5, -(0.75**0.5)], [0.75**0.5, -0.5]])
    basis = torch.linalg.qr(torch.randn(D, D, generator=generator))[0]
    U = basis @ torch.block_diag(*[third] * (D // 2)) @ basis.T
    sets = []
    for _ in range(2):
        words = F.normalize(torch.randn(orbits, D, generator=generator), dim=-1)
        sets.append(torch.cat([words, words @ U.T, words @ U.T @ U.T]))
    return sets


def examples(count, words, places, generator):
    """Sequences (count, N, D); in half of them the first token's partner is at a place."""
    i = torch.randint(len(words), (count, N), generator=generator)
    partner = (i[:, 0] + len(words) // 3) % len(words)
    i = torch.where(i == partner[:, None], (i + 1) % len(words), i)  # none by chance
    there = torch.rand(count, generator=generator) < 0.5
    at = places[torch.randint(len(places), (count,), generator=generator)]
    row = torch.arange(count)
    i[row[there], at[there]] = partner[there]
    return words[i], there.float()


class Attend(nn.Module):
    """The first token looks at all tokens and at a null key."""

    def __init__(self):
        super().__init__()
        self.query, self.key = (nn.Linear(D, 16, bias=False) for _ in range(2))
        self.value = nn.Linear(D, 32)
        self.null_key, self.null_value = (nn.Parameter(torch.randn(1, 1, n)) for n in (16, 32))

    def forward(self, x):
        null = self.null_key.expand(len(x), 1, -1), self.null_value.expand(len(x), 1, -1)
        k, v = (torch.cat(both, 1) for both in zip((self.key(x), self.value(x)), null))
        return attention(self.query(x[:, :1]), k, v)[:, 0]  # (B, N, D) -> (B, 32)


class Convolve(nn.Module):
    """A convolution of width 1 and one as wide as the sequence, each with a ReLU."""

    def __init__(self):
        super().__init__()
        self.each = nn.Conv1d(D, WIDTH, 1)
        self.all = nn.Conv1d(WIDTH, 32, N)

    def forward(self, x):
        return self.all(self.each(x.mT).relu())[..., 0].relu()  # (B, N, D) -> (B, 32)


class Pair(nn.Module):
    """A small network looks at the first token beside each other one; its outputs are added."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(2 * D, WIDTH)
        self.then = nn.Linear(WIDTH, 32)

    def forward(self, x):
        pairs = torch.cat([x[:, :1].expand_as(x), x], -1)  # (B, N, 2 D)
        return self.then(self.both(pairs).relu()).relu().sum(1)  # (B, N, 32) -> (B, 32)


CONTESTANTS = {"attention": Attend, "convolution": Convolve, "pairs": Pair}


@torch.no_grad()
def right(model, x, there):
    return ((model(x)[:, 0] > 0) == there.bool()).double().mean().item()


def one_run(name, examples_seen, rate, seed, steps):
    """Train one contestant; the state that is best on validation is tested."""
    known, new = vocabularies()
    generator = torch.Generator().manual_seed(seed)
    x, there = examples(examples_seen, known, ODD, generator)
    valid = examples(1000, known, ODD, generator)
    torch.manual_seed(seed)
    model = nn.Sequential(CONTESTANTS[name](), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), rate)
    best = -1.0
    curve = []
    for step in range(1, steps + 1):
        rows = torch.randint(examples_seen, (128,), generator=generator)
        loss = F.binary_cross_entropy_with_logits(model(x[rows])[:, 0], there[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 250 == 0 or step == steps:
            curve.append(round(right(model, *valid), 4))
            if curve[-1] > best:
                best = curve[-1]
                kept = {key: value.clone() for key, value in model.state_dict().items()}
            if best == 1:
                break
    model.load_state_dict(kept)
    tests = {"same": (known, ODD), "places": (known, EVEN), "words": (new, ODD)}
    tested = torch.Generator().manual_seed(1_000_000)
    shares = {
        part: round(right(model, *examples(4000, *where, tested)), 4)
        for part, where in tests.items()
    }
    parameters = sum(p.numel() for p in model.parameters())
    row = dict(name=name, examples=examples_seen, rate=rate, seed=seed, parameters=parameters)
    return {**row, "valid": best, **shares, "curve": curve}


def contest(bench, name, size, seeds, steps):
    """Choose the learning rate on validation data with the first seed, then run all seeds."""

    def run(rate, seed, kind):
        settings = dict(name=name, examples=size, rate=rate, seed=seed)
        for known in bench.record["tuning"]:
            if settings.items() <= known.items():
                return bench.once(settings, lambda: known, kind)
        return bench.once(settings, lambda: one_run(name, size, rate, seed, steps), kind)

    best = max(RATES, key=lambda rate: run(rate, seeds[0], "tuning")["valid"])
    for seed in seeds:
        run(best, seed, "rows")


def association(arguments):
    """Compare attention, a convolution, and a network of pairs at finding partners.

    For each method and number of examples, the learning rate is chosen on validation data with
    the first seed. The record is FOLDER/association.json.
    """
    sizes = arguments.examples
    seeds = (0, 1, 2)
    steps = 3000
    if arguments.tiny:
        sizes = (100,)
        seeds = (0,)
        steps = 2
    path = arguments.out / "association.json"
    bench = Runs(path, arguments.minutes, steps=steps, rows=[], tuning=[])

    def go():
        for name in arguments.contestants:
            for size in sizes:
                contest(bench, name, size, seeds, steps)

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    commands.timing("speed", speed, repeats=15)
    parser = commands.experiment("association", association)
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--examples", nargs="+", type=int, default=[250, 1000, 4000, 16000])
    commands.run(arguments)


if __name__ == "__main__":
    main()
