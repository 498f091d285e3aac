"""What was run for 22_decoding: `python -m benchmarks.decoding COMMAND --out FOLDER`.

    search  measure what a better search gains

`benchmarks.runner` says how runs are resumed and recorded.
"""

import itertools
from functools import partial

import torch

from attnlib import recipes
from attnlib.data import decode, number_words
from attnlib.decoding import beam_search
from benchmarks.runner import Commands, Runs

LIMIT = 24  # tokens of a result; the longest right name has 13
FULL = dict(
    brief=(120, 150),
    numbers=2000,
    beams=(1, 2, 4, 8, 16, 32),
    penalties=(0.0, 0.5, 1.0),
    proofs=(4, 16, 64, 256, 1024, 4096),
)
TINY = FULL | dict(brief=(3,), numbers=6, beams=(1, 2), proofs=(2, 4))


def searched(model, src, beam_size, length_penalty=0.0, rows=4096):
    """`beam_search` in batches of sources of like length: at most so many beams at a time."""
    tokens = torch.zeros(len(src), LIMIT, dtype=torch.int64)
    scores = torch.zeros(len(src))
    lengths = (src != 0).sum(1)
    for part in lengths.argsort(stable=True).split(max(1, rows // beam_size)):
        own = src[part, : lengths[part].max()]
        found, score = beam_search(model, own, LIMIT, beam_size, length_penalty=length_penalty)
        tokens[part, : found.shape[1]] = found
        scores[part] = score
    return tokens, scores


def proved(model, src, sizes):
    """The most probable sentence of each source, and how many beams it took to prove it.

    K beams prove a sentence whose probability is above 1 / (K + 1). Zero: none of `sizes` did.
    """
    tokens = torch.zeros(len(src), LIMIT, dtype=torch.int64)
    beams = torch.zeros(len(src))
    left = torch.arange(len(src))
    for k in sizes:
        if len(left):
            tokens[left], scores = searched(model, src[left], k)
            certain = scores.exp() * (k + 1) > 1 + 1e-4
            beams[left[certain]] = k
            left = left[~certain]
    return tokens, beams


@torch.no_grad()
def token_log_probs(model, src, tokens):
    """log p of each token (B, N) of a result, 0 for padding."""
    start = torch.ones(len(tokens), 1, dtype=torch.int64)
    before = torch.cat([start, tokens[:, :-1]], dim=1)
    log_probs = model(src, before).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    return log_probs.masked_fill(tokens == 0, 0.0)


class Numbers:
    """Some numbers of a part, their sources, and what is right."""

    def __init__(self, tokenizer, part, count):
        self.tokenizer = tokenizer
        self.numbers = part["numbers"][:count]
        self.src = part["src"][:count]
        self.tgt = part["tgt"][:count, 1:]
        self.names = number_words(self.numbers, "de")

    def right(self, tokens):
        said = decode(self.tokenizer, tokens)
        return torch.tensor([a == b for a, b in zip(said, self.names)])


def counts(model, test, tokens, scores, plain, length_penalty=0.0):
    """One row of the record: how many are right, and how that differs from greedy decoding."""
    right = test.right(tokens)
    before = test.right(plain)
    length = (test.tgt != 0).sum(1)
    wanted = token_log_probs(model, test.src, test.tgt).sum(1) / length**length_penalty
    return {
        "right": int(right.sum()),
        "mended": int((right & ~before).sum()),
        "broken": int((before & ~right).sum()),
        "missed": int((~right & (wanted > scores + 1e-4)).sum()),  # by the search
        "tokens": round((tokens != 0).sum(1).float().mean().item(), 3),
    }


def example(model, test, row, outputs):
    """A number, and what each search says for it, token by token."""
    found = {"number": test.numbers[row], "right": test.names[row]}
    for name, tokens in outputs.items():
        own = tokens[row][tokens[row] != 0]
        log_probs = token_log_probs(model, test.src[row : row + 1], own[None])[0]
        found[name] = {
            "text": decode(test.tokenizer, own[None])[0],
            "tokens": [test.tokenizer.id_to_token(i) for i in own.tolist()],
            "p": [round(p, 4) for p in log_probs.exp().tolist()],
        }
    return found


def examples(model, test, outputs):
    """Of the sentences that beams mend, and of those they break, the one of median gain."""
    total = {
        name: token_log_probs(model, test.src, tokens).sum(1)
        for name, tokens in outputs.items()
    }
    gain = total["beams"] - total["greedy"]
    plain, beams = (test.right(outputs[name]) for name in ("greedy", "beams"))
    found = {}
    for kind, chosen in (("mended", beams & ~plain), ("broken", plain & ~beams)):
        rows = chosen.nonzero()[:, 0]
        if len(rows):
            row = rows[gain[rows].argsort(stable=True)[len(rows) // 2]].item()
            found[kind] = example(model, test, row, outputs)
    return found


def search_run(seed, steps, tokenizer, parts, size):
    options = dict(steps=steps, log_every=steps, seed=seed, warmup=min(100, steps))
    model, _ = recipes.train_translator(tokenizer, parts, **options)
    model = model.cpu().eval()
    valid, test = (Numbers(tokenizer, parts[n], size["numbers"]) for n in ("valid", "test"))
    grid = []
    for alpha, k in itertools.product(size["penalties"], size["beams"]):
        right = valid.right(searched(model, valid.src, k, alpha)[0])
        grid.append({"beams": k, "penalty": alpha, "right": int(right.sum())})
    chosen = max(grid, key=lambda row: (row["right"], -row["beams"], -row["penalty"]))
    plain = searched(model, test.src, 1)[0]
    rows = []
    outputs = {}
    cases = [(0.0, k) for k in size["beams"]] + [(chosen["penalty"], chosen["beams"])]
    for alpha, k in dict.fromkeys(cases):
        tokens, scores = searched(model, test.src, k, alpha)
        row = {"beams": k, "penalty": alpha}
        row |= counts(model, test, tokens, scores, plain, alpha)
        if alpha == 0:
            row["proved"] = int((scores.exp() * (k + 1) > 1 + 1e-4).sum())
            outputs[k] = tokens
        rows.append(row)
    tokens, beams = proved(model, test.src, size["proofs"])
    scores = token_log_probs(model, test.src, tokens).sum(1)
    best = counts(model, test, tokens, scores, plain)
    best |= {"proved": int((beams > 0).sum()), "most": int(beams.max())}
    compared = {"greedy": plain, "beams": outputs[min(4, size["beams"][-1])]}
    return {
        "seed": seed,
        "steps": steps,
        "valid": {"numbers": len(valid.numbers), "rows": grid, "chosen": chosen},
        "test": {"numbers": len(test.numbers), "rows": rows, "perfect": best},
        "examples": examples(model, test, compared),
    }


def search(arguments):
    """Measure what a better search gains.

    Translators of numbers are trained too briefly, so that they are unsure, and searched with
    beams of several sizes. Size and length penalty are chosen on the validation numbers; the
    test numbers are counted once. A perfect search is one whose result is proved to be the most
    probable.

    The record is FOLDER/decoding.json. What an older record there has of other seeds stays, so
    the runs can be made one at a time.
    """
    size = TINY if arguments.tiny else FULL
    tokenizer, parts = recipes.number_pairs()
    bench = Runs(arguments.out / "decoding.json", arguments.minutes, search=[])

    def go():
        for steps, seed in itertools.product(size["brief"], arguments.seeds):
            work = partial(search_run, seed, steps, tokenizer, parts, size)
            bench.once(dict(seed=seed, steps=steps), work, "search")

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.experiment("search", search)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    commands.run(arguments)


if __name__ == "__main__":
    main()
