"""The translators of 23_translation: `python -m benchmarks.multi30k COMMAND --out FOLDER`.

    train      train English to German, or all directions from and to English
    score      compute the BLEU of a trained translator, and keep some of its translations
    tokens     compare the tokenization of published scores with the published files

    python -m benchmarks.multi30k train --data multi30k --checkpoints runs --seed 0 --out runs
    python -m benchmarks.multi30k score --data multi30k --runs runs --name pair-50-0 --out out

All commands need the sentences of Multi30k, which `attnlib.data.multi30k` fetches into --data.
The size and the optimizer follow the text-only baseline of Wu et al. 2021 ("Good for
Misconceived Reasons"): 4 + 4 layers of width 128, one vocabulary with all embeddings shared,
dropout 0.3.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
from accelerate import Accelerator

from attnlib import data, translation
from attnlib.data import decode, multi30k, train_bpe
from attnlib.decoding import greedy
from attnlib.train import fit, seeded
from attnlib.transformer import Transformer
from attnlib.translation import tag, translate, translation_loss, trim
from benchmarks import moses
from benchmarks.chapter import run_cells
from benchmarks.records import write_record
from benchmarks.runner import save_half

page = run_cells(
    "23_translation",
    "sentence-batches",
    modules=[translation, data],
    names=dict(pad_sequence=torch.nn.utils.rnn.pad_sequence),
)

SIZE = dict(
    vocab_size=5000,
    d_model=128,
    nhead=4,
    num_encoder_layers=4,
    num_decoder_layers=4,
    dim_feedforward=256,
    dropout=0.3,
    max_tokens=4096,
    warmup=1000,
    ema=0.999,
)
PAIR = [("en", "de")]
OTHERS = ("de", "fr", "cs")
FROM_AND_TO_ENGLISH = [*(("en", x) for x in OTHERS), *((x, "en") for x in OTHERS)]
TINY = SIZE | dict(
    vocab_size=300, d_model=32, num_encoder_layers=1, num_decoder_layers=1, warmup=2
)


def languages_of(directions):
    """Return the languages of some directions, English first."""
    return list(dict.fromkeys(language for pair in directions for language in pair))


def sentence_tokenizer(texts, vocab_size, directions):
    """Learn a byte-pair encoding for all languages, with tags if there are many directions."""
    extra = []
    if len(directions) > 1:
        extra = [tag(language) for language in languages_of(directions)]
    everything = [sentence for own in texts.values() for sentence in own]
    return train_bpe(everything, vocab_size, extra=extra, punctuation=True)


def make_model(tokenizer, size):
    """Make a translator with random weights."""
    names = ("d_model", "nhead", "num_encoder_layers", "num_decoder_layers")
    options = {name: size[name] for name in (*names, "dim_feedforward", "dropout")}
    return Transformer(tokenizer.get_vocab_size(), **options, norm_first=True, max_length=256)


@torch.no_grad()
def validation_loss(model, src, tgt, rows=256):
    """Return the cross-entropy per token in nats, without label smoothing."""
    device = next(model.parameters()).device
    total = 0.0
    count = 0
    for first in range(0, len(src), rows):
        x = trim(src[first : first + rows]).to(device)
        y = trim(tgt[first : first + rows]).to(device)
        logits = model(x, y[:, :-1]).flatten(0, 1)  # (B, N - 1, vocab) -> (B (N - 1), vocab)
        targets = y[:, 1:].flatten()
        total += torch.nn.functional.cross_entropy(
            logits, targets, ignore_index=0, reduction="sum"
        ).item()
        count += (targets != 0).sum().item()
    return total / count


def greedy_bleu(model, tokenizer, src, references, max_length=80, rows=128):
    """Return the BLEU (sacrebleu) of greedy translations of a table of source tokens."""
    import sacrebleu

    device = next(model.parameters()).device
    said = []
    for first in range(0, len(src), rows):
        out = greedy(model, trim(src[first : first + rows]).to(device), max_length)
        said += decode(tokenizer, out.cpu())
    return sacrebleu.corpus_bleu(said, [references]).score


def train(arguments):
    """Train one model, from its last checkpoint if there is one; write weights and record."""
    torch.set_num_threads(arguments.threads)
    directions = PAIR if arguments.languages == "pair" else FROM_AND_TO_ENGLISH
    size = TINY if arguments.tiny else SIZE
    languages = languages_of(directions)
    texts = {}
    for split in ("train", "valid"):
        found = multi30k(split, arguments.data, languages=languages)
        texts[split] = dict(zip(languages, found))
    if arguments.tiny:
        for own in texts.values():
            for language in own:
                own[language] = own[language][:40]
    tokenizer = sentence_tokenizer(texts["train"], size["vocab_size"], directions)
    src, tgt = page.tagged_pairs(tokenizer, texts["train"], directions)
    valid_src, valid_tgt = page.tagged_pairs(tokenizer, texts["valid"], directions)
    references = [sentence for _, b in directions for sentence in texts["valid"][b]]
    if len(directions) > 1:  # every sixth sentence, of every direction
        valid_src, valid_tgt = valid_src[::6], valid_tgt[::6]
        references = references[::6]
    batches = page.TokenBatches(src, tgt, size["max_tokens"], seed=arguments.seed)
    with seeded(arguments.seed):
        model = make_model(tokenizer, size)
    name = f"{arguments.languages}-{arguments.epochs}-{arguments.seed}"
    folder = arguments.checkpoints
    folder.mkdir(parents=True, exist_ok=True)

    def evaluate(model):
        bleu = greedy_bleu(model, tokenizer, valid_src, references)
        loss = validation_loss(model, valid_src, valid_tgt)
        return {"valid": round(loss, 4), "bleu": round(bleu, 2)}

    began = time.process_time()
    history = fit(
        model,
        batches,
        loss_fn=translation_loss,
        steps=arguments.epochs * len(batches),
        lr=arguments.lr,
        warmup=size["warmup"],
        schedule=arguments.schedule,
        weight_decay=0.0,
        ema=size["ema"],
        evaluate=evaluate,
        log_every=arguments.log_epochs * len(batches),
        verbose=True,
        checkpoint=folder / f"{name}.json",
        seed=arguments.seed,
        accelerator=Accelerator(mixed_precision="bf16", cpu=not torch.cuda.is_available()),
    )
    model = model.eval().cpu()
    stem = arguments.out / f"multi30k_{name}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_half(model.state_dict(), stem.with_suffix(".safetensors"))
    stem.with_suffix(".tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    record = {
        "languages": arguments.languages,
        "directions": directions,
        "seed": arguments.seed,
        "epochs": arguments.epochs,
        "steps": arguments.epochs * len(batches),
        "lr": arguments.lr,
        "schedule": arguments.schedule,
        "size": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "processor_seconds_of_this_leg": round(time.process_time() - began),
        "history": history,
    }
    write_record(stem.with_suffix(".json"), record)


# --- scores -----------------------------------------------------------------------------------

TESTS = {"test": "2016", "test_2017": "2017"}
BEAMS = 5
OWN = (  # written for this book; no captions of Multi30k
    "A dog runs along the beach with a ball in its mouth.",
    "Two women in red coats are waiting for the bus in the rain.",
    "A little boy is building a sand castle while his father takes a picture.",
    "An old man plays the accordion on the steps of a church.",
    "The parliament postponed the vote on the new law.",
)


def load_run(folder, name):
    """Read a trained translator.

    Parameters
    ----------
    folder : Path
        The folder into which `train` wrote.
    name : str
        Languages, epochs, and seed of the run, such as "pair-50-0".

    Returns
    -------
    model : Transformer
        In evaluation mode.
    tokenizer : tokenizers.Tokenizer
    record : dict
    """
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    stem = folder / f"multi30k_{name}"
    record = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_str(
        stem.with_suffix(".tokenizer.json").read_text(encoding="utf-8")
    )
    model = make_model(tokenizer, record["size"])
    weights = load_file(stem.with_suffix(".safetensors"))
    model.load_state_dict({key: x.float() for key, x in weights.items()})
    return model.eval(), tokenizer, record


def tokenized_bleu(said, references):
    """Return the BLEU of German on lowercased tokens of Moses, as published scores are."""
    import sacrebleu

    metric = sacrebleu.BLEU(tokenize="none", force=True)
    tokens = [moses.tokenize(text) for text in said]
    wanted = [moses.tokenize(text) for text in references]
    return metric.corpus_score(tokens, [wanted]).score


def raw_bleu(said, references):
    """Return the BLEU of cased text under sacrebleu's own tokenization, with its signature."""
    import sacrebleu

    metric = sacrebleu.BLEU()
    score = metric.corpus_score(said, [references]).score
    return score, str(metric.get_signature())


def ranked_examples(sources, said, references, count=9):
    """Return translations from the best to the worst by chrF, at equal steps of the rank."""
    import sacrebleu

    metric = sacrebleu.CHRF()
    scores = [metric.sentence_score(a, [b]).score for a, b in zip(said, references)]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    picked = [order[round(k * (len(order) - 1) / (count - 1))] for k in range(count)]
    return [
        dict(
            source=sources[i], output=said[i], reference=references[i], chrf=round(scores[i], 1)
        )
        for i in picked
    ]


def language_classifier(texts):
    """Train a classifier of languages on character n-grams.

    Parameters
    ----------
    texts : dict
        The training sentences of each language.

    Returns
    -------
    sklearn.pipeline.Pipeline
        `predict` returns the language of each sentence.
    """
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    grams = HashingVectorizer(
        analyzer="char_wb", ngram_range=(1, 3), n_features=2**16, alternate_sign=False
    )
    classifier = make_pipeline(grams, MultinomialNB())
    sentences = [sentence for own in texts.values() for sentence in own]
    labels = [language for language, own in texts.items() for _ in own]
    return classifier.fit(sentences, labels)


def score_pair(model, tokenizer, folder, count):
    """Score English to German on both test sets; return scores and translations."""
    scores = {}
    for split, year in TESTS.items():
        english, german = (own[:count] for own in multi30k(split, folder))
        said = translate(model, tokenizer, english, beam_size=BEAMS, max_length=80)
        raw, signature = raw_bleu(said, german)
        scores[year] = {
            "bleu": round(raw, 2),
            "bleu_tokenized": round(tokenized_bleu(said, german), 2),
            "reference_tokens": sum(len(moses.tokenize(text).split()) for text in german),
            "exact": sum(a == b for a, b in zip(said, german)),
            "sentences": len(german),
        }
        if year == "2016":
            examples = ranked_examples(english, said, german)
    own = translate(model, tokenizer, OWN, beam_size=BEAMS, max_length=80)
    return {
        "scores": scores,
        "signature": signature,
        "beams": BEAMS,
        "examples": examples,
        "own": [list(pair) for pair in zip(OWN, own)],
    }


def score_four(model, tokenizer, folder, count, trained):
    """Score all twelve directions on the test set of 2016, the untrained ones in two ways."""
    languages = ("en", *OTHERS)
    texts = {}
    for split in ("train", "valid", "test"):
        found = multi30k(split, folder, languages=languages)
        texts[split] = {a: own[: 40 * count] for a, own in zip(languages, found)}
    classifier = language_classifier(texts["train"])
    right = 0
    total = 0
    for language, own in texts["valid"].items():
        right += sum(found == language for found in classifier.predict(own))
        total += len(own)
    test = {language: own[:count] for language, own in texts["test"].items()}

    def ask(sentences, target):
        return translate(
            model, tokenizer, sentences, language=target, beam_size=BEAMS, max_length=80
        )

    english = {a: ask(test[a], "en") for a in OTHERS}
    rows = {}
    for a in languages:
        for b in languages:
            if a == b:
                continue
            said = english[a] if b == "en" else ask(test[a], b)
            bleu, signature = raw_bleu(said, test[b])
            counts = Counter(str(found) for found in classifier.predict(said))
            row = {
                "trained": [a, b] in trained,
                "bleu": round(bleu, 2),
                "in_language": round(counts[b] / len(said), 4),
                "in_english": round(counts["en"] / len(said), 4),
            }
            if not row["trained"]:
                through = ask(english[a], b)
                as_english = sum(x == y for x, y in zip(said, english[a]))
                row["bleu_through_english"] = round(raw_bleu(through, test[b])[0], 2)
                row["same_as_under_en"] = round(as_english / len(said), 4)
                row["examples"] = ranked_examples(test[a], said, test[b], count=3)
            rows[f"{a}-{b}"] = row
    return {
        "directions_scored": rows,
        "signature": signature,
        "beams": BEAMS,
        "sentences": count,
        "classifier": {"accuracy": round(right / total, 5), "sentences": total},
    }


def score(arguments):
    """Score a trained translator, and add the scores to the record of its training."""
    torch.set_num_threads(arguments.threads)
    model, tokenizer, record = load_run(arguments.runs, arguments.name)
    count = 6 if arguments.tiny else 1000
    began = time.process_time()
    if record["languages"] == "pair":
        found = score_pair(model, tokenizer, arguments.data, count)
    else:
        found = score_four(model, tokenizer, arguments.data, count, record["directions"])
    found["processor_seconds_of_scoring"] = round(time.process_time() - began)
    write_record(arguments.out / f"multi30k_{arguments.name}.json", {**record, **found})


def tokens(arguments):
    """Compare the tokenization of published scores with the files of multi30k/dataset."""
    rows = {}
    for split, stem in {"test": "test_2016_flickr", "test_2017": "test_2017_flickr"}.items():
        (german,) = multi30k(split, arguments.data, languages=("de",))
        path = arguments.published / f"{stem}.lc.norm.tok.de"
        published = path.read_text(encoding="utf-8").strip().split("\n")
        ours = [moses.tokenize(text) for text in german]
        rows[TESTS[split]] = {
            "lines": len(published),
            "tokens": sum(len(line.split()) for line in ours),
            "published_tokens": sum(len(line.split()) for line in published),
            "lines_that_differ": sum(a != b.strip() for a, b in zip(ours, published)),
        }
    write_record(arguments.out / "multi30k_tokens.json", {"german": rows})


def add_common(parser):
    """Add the options that all commands have."""
    parser.add_argument("--data", type=Path, help="the folder of Multi30k's files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a few steps or sentences")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function in (train, score, tokens):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        add_common(command)
        command.set_defaults(run=function)
        if function is train:
            command.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
            command.add_argument("--languages", choices=("pair", "four"), default="pair")
            command.add_argument("--seed", type=int, default=0)
            command.add_argument("--epochs", type=int, default=50)
            command.add_argument("--log-epochs", type=int, default=5)
            command.add_argument("--lr", type=float, default=5e-3)
            command.add_argument("--schedule", default="cosine")
        elif function is score:
            command.add_argument("--runs", type=Path, required=True, help="--out of train")
            command.add_argument("--name", required=True, help="such as pair-50-0")
        else:
            command.add_argument("--published", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
