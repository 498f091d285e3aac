"""Who finds partners? Attention, a convolution and a network of pairs, with the same readout.

`python -m benchmarks.association --out FOLDER` records FOLDER/association.json; with
--contestants or --examples only some run, and the other rows of an existing record stay. With
--tiny it runs in seconds, to see that it works; such a record means nothing.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib.attention import attention
from attnlib.train import write_record

D, N, WIDTH = 8, 8, 64  # width of a token, tokens in a sequence, channels inside
RATES = (0.001, 0.003, 0.01)
ODD, EVEN = torch.arange(1, N, 2), torch.arange(2, N, 2)


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
        self.each, self.all = nn.Conv1d(D, WIDTH, 1), nn.Conv1d(WIDTH, 32, N)

    def forward(self, x):
        return self.all(self.each(x.mT).relu())[..., 0].relu()  # (B, N, D) -> (B, 32)


class Pair(nn.Module):
    """A small network looks at the first token beside each other one; its outputs are added."""

    def __init__(self):
        super().__init__()
        self.both, self.then = nn.Linear(2 * D, WIDTH), nn.Linear(WIDTH, 32)

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
    best, curve = -1.0, []
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


def contest(name, sizes, seeds, steps):
    """For each number of examples the rate is the best on validation of the first seed."""
    rows = []
    for size in sizes:
        tried = [one_run(name, size, rate, 0, steps) for rate in RATES]
        best = max(tried, key=lambda row: row["valid"])
        rows += [best, *(one_run(name, size, best["rate"], s, steps) for s in range(1, seeds))]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--examples", nargs="+", type=int, default=[250, 1000, 4000, 16000])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = dict(sizes=options.examples, seeds=3, steps=3000)
    if options.tiny:
        size = dict(sizes=(100,), seeds=1, steps=2)
    path = options.out / "association.json"
    old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    again = {(name, n) for name in options.contestants for n in size["sizes"]}
    rows = [row for row in old if (row["name"], row["examples"]) not in again]
    for name in options.contestants:
        rows += contest(name, **size)
    write_record(path, {"steps": size["steps"], "rows": rows})


if __name__ == "__main__":
    main()
