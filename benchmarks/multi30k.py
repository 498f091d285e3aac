"""The translators of 23_translation: `python -m benchmarks.multi30k COMMAND --out FOLDER`.

    train      English to German, or all directions from and to English, from scratch
    score      BLEU of a trained translator on both test sets, and some of its translations

    python -m benchmarks.multi30k train --data multi30k --checkpoints runs --seed 0 --out records

Both want the sentences of Multi30k, which `attnlib.data.multi30k` fetches into --data. The size
and the optimizer follow the text-only baseline of Wu et al. 2021 ("Good for misconceived
reasons"): 4 + 4 layers of width 128, one vocabulary with all embeddings shared, dropout 0.3.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from attnlib.data import BOS, decode, encode, multi30k, train_bpe
from attnlib.decoding import greedy
from attnlib.train import fit, seeded
from attnlib.transformer import Transformer
from attnlib.translation import tag, translation_loss, trim
from benchmarks.records import write_record
from benchmarks.runner import save_half

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
    """The languages of some directions, English first."""
    return list(dict.fromkeys(language for pair in directions for language in pair))


def sentence_tokenizer(texts, vocab_size, directions):
    """One byte-pair encoding for all languages; with several directions it has their tags."""
    extra = []
    if len(directions) > 1:
        extra = [tag(language) for language in languages_of(directions)]
    everything = [sentence for own in texts.values() for sentence in own]
    return train_bpe(everything, vocab_size, extra=extra, punctuation=True)


def source_tokens(tokenizer, sentences, target, tagged):
    """Source sentences as token numbers, after the tag of the target language if `tagged`."""
    prefix = [tag(target)] * len(sentences) if tagged else None
    return encode(tokenizer, sentences, prefix=prefix)


def encoded_pairs(tokenizer, texts, directions):
    """All sentences of all directions as two tables of tokens, padded to one length."""
    tagged = len(directions) > 1
    sources = []
    targets = []
    for source, target in directions:
        sources.extend(source_tokens(tokenizer, texts[source], target, tagged).unbind())
        targets.extend(encode(tokenizer, texts[target]).unbind())
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(sources, batch_first=True), pad(targets, batch_first=True)


class TokenBatches:
    """Batches of about equally many tokens, of sentences of similar length.

    An object is the function of the step that `train.fit` takes. Every epoch has the same
    number of batches, and draws anew which sentences of a length share a batch, and the order.

    Parameters
    ----------
    src, tgt : int64 Tensor, shape (n, M) and (n, N)
    max_tokens : int
        Rows of a batch times the length of its longest sentence, at most.
    seed : int
    """

    def __init__(self, src, tgt, max_tokens, seed):
        self.src = src
        self.tgt = tgt
        self.seed = seed
        own = (src != 0).sum(1)
        others = (tgt != 0).sum(1)
        self.lengths = torch.maximum(own, others)
        self.bounds = []  # first and last row of each batch, in the order of lengths
        in_order = self.lengths.sort().values.tolist()
        first = 0
        for row, length in enumerate(in_order):
            if (row + 1 - first) * length > max_tokens:
                self.bounds.append((first, row))
                first = row
        self.bounds.append((first, len(in_order)))
        self.epoch = None

    def __len__(self):
        return len(self.bounds)

    def __call__(self, step):
        epoch, number = divmod(step, len(self))
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            shuffled = torch.randperm(len(self.src), generator=generator)
            by_length = self.lengths[shuffled].argsort(stable=True)
            self.order = shuffled[by_length]
            self.turn = torch.randperm(len(self), generator=generator).tolist()
            self.epoch = epoch
        first, end = self.bounds[self.turn[number]]
        rows = self.order[first:end]
        return trim(self.src[rows]), trim(self.tgt[rows])


def make_model(tokenizer, size):
    names = ("d_model", "nhead", "num_encoder_layers", "num_decoder_layers")
    options = {name: size[name] for name in (*names, "dim_feedforward", "dropout")}
    return Transformer(
        tokenizer.get_vocab_size(), **options, norm_first=True, max_length=256
    )


@torch.no_grad()
def validation_loss(model, src, tgt, rows=256):
    """Cross-entropy per token in nats, without smoothing."""
    total = 0.0
    count = 0
    for first in range(0, len(src), rows):
        x = trim(src[first : first + rows])
        y = trim(tgt[first : first + rows])
        logits = model(x, y[:, :-1]).flatten(0, 1)  # (B, N - 1, vocab) -> (B (N - 1), vocab)
        targets = y[:, 1:].flatten()
        total += torch.nn.functional.cross_entropy(
            logits, targets, ignore_index=0, reduction="sum"
        ).item()
        count += (targets != 0).sum().item()
    return total / count


def greedy_bleu(model, tokenizer, src, references, max_length=80, rows=128):
    """BLEU (sacrebleu) of greedy translations of token tables."""
    import sacrebleu

    said = []
    for first in range(0, len(src), rows):
        out = greedy(model, trim(src[first : first + rows]), max_length)
        said += decode(tokenizer, out)
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
    src, tgt = encoded_pairs(tokenizer, texts["train"], directions)
    valid_src, valid_tgt = encoded_pairs(tokenizer, texts["valid"], directions)
    references = [sentence for _, b in directions for sentence in texts["valid"][b]]
    if len(directions) > 1:  # every sixth sentence, of every direction
        valid_src, valid_tgt = valid_src[::6], valid_tgt[::6]
        references = references[::6]
    batches = TokenBatches(src, tgt, size["max_tokens"], arguments.seed)
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


def add_options(parser):
    parser.add_argument("--data", type=Path, help="the folder of Multi30k's files")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--languages", choices=("pair", "four"), default="pair")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--log-epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--schedule", default="cosine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("train", help=train.__doc__)
    add_options(command)
    command.set_defaults(run=train)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
