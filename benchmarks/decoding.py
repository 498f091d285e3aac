"""What was run for 22_decoding: `python -m benchmarks.decoding COMMAND --out FOLDER`.

    search     measure what a better search gains, on names of numbers
    sentences  compare greedy decoding with beam search, on real sentences

`benchmarks.runner` says how runs are resumed and recorded.
"""

import itertools
import json
from functools import partial
from pathlib import Path

import torch

from attnlib import recipes
from attnlib.backbone import evaluation
from attnlib.data import BOS, EOS, decode, encode, multi30k, number_words
from attnlib.decoding import beam_search
from attnlib.models import read_weights
from benchmarks.multi30k import make_model
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


# --- real sentences ---------------------------------------------------------------------------

MOST = 80  # tokens of a translation
SETTINGS = [
    *((0.0, k) for k in (1, 2, 4, 5, 8, 16)),
    *((1.0, k) for k in (1, 2, 4, 5, 8, 16)),
    (0.5, 5),
    (1.5, 5),
]
STEPS_OF = "A dog runs on the beach."
OWN = (  # written for this book; no captions of Multi30k
    "A dog runs along the beach with a ball in its mouth.",
    "Two women in red coats are waiting for the bus in the rain.",
    "A little boy is building a sand castle while his father takes a picture.",
    "An old man plays the accordion on the steps of a church.",
    "A girl in a blue dress feeds the ducks at the edge of a pond.",
    "Three children are sitting on a wall and eating ice cream.",
    "A man with a beard repairs a bicycle in front of his shop.",
    "Several people are standing around a fire on a cold night.",
    "A woman reads a newspaper while she waits for her train.",
    "A brown horse jumps over a fence in a green field.",
    "Two boys are throwing snowballs at each other in a park.",
    "A cook cuts vegetables in the kitchen of a small restaurant.",
    "A young couple is dancing in the street at night.",
    "The goalkeeper catches the ball and falls to the ground.",
    "A band is playing music on a stage in front of a large crowd.",
    "A cat sleeps on the roof of an old car.",
)


def load_translator(stem):
    """Load a run of `benchmarks.multi30k train`: model, tokenizer, and record."""
    import tokenizers

    record = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
    tokenizer = tokenizers.Tokenizer.from_file(f"{stem}.tokenizer.json")
    model = make_model(tokenizer, record["size"])
    model.load_state_dict(read_weights(Path(f"{stem}.safetensors")))
    return model.float().eval(), tokenizer, record


def translated(model, src, beam_size, length_penalty, rows=256):
    """Search all rows of a table of sources, in batches of similar length."""
    lengths = (src != 0).sum(1)
    tokens = torch.zeros(len(src), MOST, dtype=torch.int64)
    for part in lengths.argsort(stable=True).split(max(1, rows // beam_size)):
        own = src[part, : lengths[part].max()]
        found, _ = beam_search(model, own, MOST, beam_size, length_penalty=length_penalty)
        tokens[part, : found.shape[1]] = found
    return tokens


@torch.no_grad()
def log_probability(model, src, tokens, rows=128):
    """Return log P of each row of `tokens` given its source."""
    parts = []
    for first in range(0, len(src), rows):
        own = tokens[first : first + rows]
        own = own[:, : (own != 0).sum(1).max()]
        source = src[first : first + rows]
        source = source[:, : (source != 0).sum(1).max()]
        parts.append(token_log_probs(model, source, own).sum(1))
    return torch.cat(parts)


def search_row(model, tokenizer, texts, plain, length_penalty, beam_size):
    """Return one row of the record: BLEU, log-probabilities, and what is proved."""
    import sacrebleu

    src, target, references = texts
    tokens = plain
    if (length_penalty, beam_size) != (0.0, 1):
        tokens = translated(model, src, beam_size, length_penalty)
    log_p = log_probability(model, src, tokens)
    reference = log_probability(model, src, target)
    greedy = log_probability(model, src, plain)
    said = decode(tokenizer, tokens)
    return {
        "bleu": round(sacrebleu.corpus_bleu(said, [references]).score, 2),
        "log_p": round(log_p.mean().item(), 3),
        "tokens": round((tokens != 0).sum(1).float().mean().item(), 3),
        "proved": int((log_p.exp() * (beam_size + 1) > 1 + 1e-4).sum()),
        "missed": int((reference > log_p + 1e-3).sum()),  # the reference is more probable
        "differ": int((tokens != plain).any(1).sum()),  # from greedy decoding
        "better": int((log_p > greedy + 1e-3).sum()),
        "empty": int((tokens[:, 0] == EOS).sum()),
    }


def next_tokens(model, tokenizer, sentence, count=3):
    """Return the most probable tokens of each step of greedy decoding, and their chances."""
    steps = []
    tokens = [BOS]
    src = encode(tokenizer, [sentence])
    with torch.no_grad(), evaluation(model):
        while tokens[-1] != EOS and len(tokens) < MOST:
            p = model(src, torch.tensor([tokens]))[0, -1].softmax(-1)
            best = p.topk(count)
            words = [tokenizer.id_to_token(i) for i in best.indices.tolist()]
            steps.append({"tokens": words, "p": [round(x, 4) for x in best.values.tolist()]})
            tokens.append(best.indices[0].item())
    return {
        "sentence": sentence,
        "steps": steps,
        "said": decode(tokenizer, torch.tensor([tokens]))[0],
    }


def own_sentences(model, tokenizer):
    """Translate each sentence of `OWN` by greedy decoding and with five beams."""
    src = encode(tokenizer, OWN)
    outputs = {
        "greedy": translated(model, src, 1, 0.0),
        "beams": translated(model, src, 5, 0.0),
    }
    said = {name: decode(tokenizer, tokens) for name, tokens in outputs.items()}
    log_p = {name: log_probability(model, src, tokens) for name, tokens in outputs.items()}
    found = []
    for i, sentence in enumerate(OWN):
        row = {"sentence": sentence}
        for name in outputs:
            row[name] = {"text": said[name][i], "log_p": round(log_p[name][i].item(), 3)}
        found.append(row)
    return found


def sentences(arguments):
    """Compare greedy decoding with beam search, on real sentences.

    The translator is a run of `benchmarks.multi30k train`; the sentences are the test set of
    2016. Each setting of beams and length penalty is a row of FOLDER/decoding_sentences.json.
    """
    torch.set_num_threads(1)
    model, tokenizer, trained = load_translator(arguments.run)
    english, german = multi30k("test", arguments.data)
    count = 4 if arguments.tiny else arguments.sentences
    settings = [(0.0, 1), (0.0, 2)] if arguments.tiny else SETTINGS
    english, german = english[:count], german[:count]
    src = encode(tokenizer, english)
    target = encode(tokenizer, german)[:, 1:]
    texts = (src, target, german)
    path = arguments.out / "decoding_sentences.json"
    about = {key: trained.get(key) for key in ("seed", "epochs", "languages")}
    bench = Runs(path, arguments.minutes, rows=[], sentences=len(english), translator=about)

    def go():
        bench.record["steps"] = next_tokens(model, tokenizer, STEPS_OF)
        bench.record["own"] = own_sentences(model, tokenizer)
        plain = translated(model, src, 1, 0.0)
        for alpha, k in settings:
            work = partial(search_row, model, tokenizer, texts, plain, alpha, k)
            bench.once(dict(penalty=alpha, beams=k), work, "rows")

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.experiment("sentences", sentences)
    parser.add_argument("--run", required=True, help="a run, without the end .json")
    parser.add_argument("--data", type=Path, help="the folder of Multi30k's files")
    parser.add_argument("--sentences", type=int, default=1000, help="the first of the test set")
    parser = commands.experiment("search", search)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    commands.run(arguments)


if __name__ == "__main__":
    main()
