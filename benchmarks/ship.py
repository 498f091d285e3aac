"""The models that come with the library: `python -m benchmarks.ship NAME --run RUN --data DATA`.

    en-de         a translator from a run of benchmarks/multi30k.py
    shakespeare   a GPT from a checkpoint of `train.fit`, with its tokenizer

    python -m benchmarks.ship en-de --run runs/multi30k_pair-50-0 --data multi30k
    python -m benchmarks.ship shakespeare --run runs/shakespeare.json --data input.txt

Each command writes a folder that `attnlib.load_model` reads by its name: the weights in half
precision, config.json, and the model card, README.md. The scores on the card are those of the
weights in the folder, which the command computes before it writes the card.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer

from attnlib.data import multi30k
from attnlib.gpt import text_bits
from attnlib.models import load_model, read_weights, save_model
from attnlib.translation import translate
from benchmarks.basics import ROOT
from benchmarks.multi30k import make_model
from benchmarks.runner import save_half

SHIPPED = ROOT / "attnlib" / "shipped"
LANGUAGES = {"en": "English", "de": "German", "fr": "French", "cs": "Czech"}
TESTS = {"test": "Multi30k, test 2016", "test_2017": "Multi30k, test 2017"}
BEAM = 5  # as `attnlib translate`

TRANSLATOR_CARD = """\
# {source} to {target}: a Transformer of {millions} million parameters for captions of photographs

    attnlib translate "A dog runs on the beach." --to {to}

```python
model = attnlib.load_model("{name}")
attnlib.translation.translate(model, model.tokenizer, ["A dog runs on the beach."])
```

## Data

The training set of Multi30k (Elliott et al. 2016): 29,000 English captions of photographs from \
Flickr with their translations by professional translators. The sentences do not come with the \
library.

## Training

An encoder-decoder with {num_encoder_layers} + {num_decoder_layers} layers of width {d_model} and \
one vocabulary of {vocab_size:,} byte pairs for both languages, trained from random weights for \
{epochs} epochs with dropout {dropout} on two cores of a CPU. The weights are their exponential \
moving average at the end of the run with the seed {seed}; no other run was looked at to choose \
it. They are stored in half precision, and the model computes in single precision. The chapter \
on translation describes the run, and `python -m benchmarks.multi30k train` repeats it.

## Scores

BLEU by sacrebleu on raw, cased text, of the weights in this folder, with beam search (beam \
{beam}):

| test set | sentences | BLEU |
|---|---|---|
{rows}

The signature of the scores is `{signature}`. On the validation sentences the run ended with a \
cross-entropy of {valid} nats per token.

## What it cannot do

- It knows what captions of photographs say: people, animals, clothes, sports, and streets, in \
the present tense. Questions, news, conversations, and names are far from what it has read, and \
it translates them badly or into something else.
- Long sentences and several sentences at once are outside of its training data.
- It has learned the prejudices of its captions, for example which jobs are done by men and \
which by women, and it puts them into translations: English leaves open whether "a doctor" is a \
woman, and German does not.
- It may leave out or invent words. Do not rely on a translation that nobody has read.

## License

The weights are ours, under the license of the library (Apache-2.0). They were trained on \
Multi30k, whose maintainers distribute it under the terms of Flickr30k \
(<https://github.com/multi30k/dataset/issues/8>), which allow research and education without \
commercial use. Read these terms before any other use of the weights.
"""

TEXT_CARD = """\
# A GPT of {millions} million parameters that writes in the manner of Shakespeare's plays

    attnlib generate "ROMEO:"

```python
model = attnlib.load_model("{name}")
print(model.write("ROMEO:", 200, temperature=0.8))
```

## Data

"Tiny Shakespeare": 1.1 million characters of Shakespeare's plays, collected by Andrej Karpathy \
for char-rnn (2015). The first 90% of the characters were used for training and the last 10% for \
validation, as in nanoGPT. The text is in the public domain, and it does not come with the \
library.

## Training

A GPT with {n_layer} layers, {n_head} heads, width {n_embd}, a context of {block_size} tokens, and \
a vocabulary of {vocab_size:,} tokens, trained from random weights{steps}. The weights are stored \
in half precision, and the model computes in single precision. The chapter on GPT describes the \
run.

## Scores

On the validation part, the weights in this folder need **{bits:.3f} bits per character** \
({nats:.3f} nats), where each token is predicted from at least {least} tokens before it.

## What it cannot do

- It answers no questions and follows no instructions; it continues a text.
- It knows the letters and the layout of plays from four centuries ago. Characters that are not \
in its training data cannot be part of a prompt.
- Its sentences sound like sentences, but they do not make sense, and no thought lasts longer \
than its context.
- The plays speak of people in the words of their time, and so does the model.

## License

The weights are ours, under the license of the library (Apache-2.0). The text is in the public \
domain.
"""


def millions(model):
    """The number of a model's parameters in millions, for the first line of its card."""
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}"


def write_folder(model, folder, bits, **more):
    """Write a model as `save_model` does, in half precision, each matrix once.

    Parameters
    ----------
    model : Module
        One that `save_model` takes.
    folder : Path
    bits : int
        Significant bits of the weights, at most eleven; see `save_half`.
    **more
        Further entries of config.json.
    """
    save_model(model, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"dtype": "float32", **more}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    state = model.state_dict()
    once = {name: state[name] for name, _ in model.named_parameters()}
    tables = {name: x for name, x in model.named_buffers() if name in state}
    path = folder / "model.safetensors"
    save_half(once | tables, path, bits, exact=tables)
    path.chmod(0o644)  # anybody may read it


def bleu_scores(model, data, source, target):
    """BLEU (sacrebleu, raw and cased) on the test sets that have both languages."""
    import sacrebleu

    found = {}
    for split in TESTS:
        try:
            sentences, references = multi30k(split, data, languages=(source, target))
        except ValueError:  # no Czech in 2017
            continue
        said = translate(model, model.tokenizer, sentences, beam_size=BEAM)
        metric = sacrebleu.BLEU()
        score = metric.corpus_score(said, [references]).score
        found[split] = {
            "sentences": len(said),
            "bleu": round(score, 2),
            "signature": str(metric.get_signature()),
        }
    return found


def translator_card(name, model, record, scores):
    """The card of a translator."""
    source, target = record["directions"][0]
    rows = []
    for split, row in scores.items():
        rows.append(f"| {TESTS[split]} | {row['sentences']:,} | {row['bleu']:.1f} |")
    facts = record["size"] | {
        "name": name,
        "source": LANGUAGES[source],
        "target": LANGUAGES[target],
        "to": target,
        "millions": millions(model),
        "vocab_size": model.tokenizer.get_vocab_size(),
        "epochs": record["epochs"],
        "seed": record["seed"],
        "beam": BEAM,
        "rows": "\n".join(rows),
        "signature": next(iter(scores.values()))["signature"],
        "valid": f"{record['history'][-1]['valid']:.3f}",
    }
    return TRANSLATOR_CARD.format(**facts)


def ship_translator(arguments, name, folder):
    """Write the folder of a translator from a run of benchmarks/multi30k.py."""
    run = arguments.run
    record = json.loads(run.with_name(run.name + ".json").read_text(encoding="utf-8"))
    if len(record["directions"]) != 1:
        raise ValueError(f"--run ({run}) must be a run of one direction, not of "
                         f"{len(record['directions'])}")  # fmt: skip
    tokenizer = Tokenizer.from_file(str(run.with_name(run.name + ".tokenizer.json")))
    model = make_model(tokenizer, record["size"])
    weights = read_weights(run.with_name(run.name + ".safetensors"))
    weights["positions.table"] = model.positions.table  # exact, where the file has it rounded
    model.load_state_dict(weights)
    model.tokenizer = tokenizer
    direction = record["directions"][0]
    write_folder(model, folder, arguments.bits, direction=direction)
    model = load_model(folder)
    scores = bleu_scores(model, arguments.data, *direction)
    add_scores(folder, scores)
    return translator_card(name, model, record, scores)


def add_scores(folder, scores):
    """Enter scores into the config.json of a folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"scores": scores}, indent=1), encoding="utf-8")


def ship_text_model(arguments, name, folder):
    """Write the folder of a language model from a checkpoint of `train.fit`."""
    model = load_model(arguments.run)
    if not hasattr(model, "tokenizer"):
        if arguments.tokenizer is None:
            raise ValueError("--tokenizer FILE must be given: the checkpoint has none")
        model.tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    write_folder(model, folder, arguments.bits)
    model = load_model(folder)
    text = arguments.data.read_text(encoding="utf-8")
    valid = text[int(0.9 * len(text)) :]
    tokens = torch.tensor(model.tokenizer.encode(valid).ids)
    config = model.config
    stride = max(1, config.block_size // 2)
    bits = text_bits(model, tokens, config.block_size, stride) / (len(valid) - 1)
    add_scores(folder, {"bits_per_character": round(bits, 4), "characters": len(valid)})
    steps = ""
    if arguments.run.is_file():
        state = json.loads(arguments.run.read_text(encoding="utf-8"))
        steps = f" for {state['step']:,} steps"
    sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    facts = {size: getattr(config, size) for size in sizes}
    return TEXT_CARD.format(
        name=name,
        millions=millions(model),
        steps=steps,
        bits=bits,
        nats=bits * 0.6931471805599453,
        least=config.block_size - stride,
        **facts,
    )


COMMANDS = {"en-de": ship_translator, "shakespeare": ship_text_model}


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=COMMANDS)
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        help="common part of the names of a run's files; or a checkpoint",
    )
    parser.add_argument("--data", type=Path, help="folder of Multi30k; file of the text")
    parser.add_argument("--tokenizer", type=Path, help="file of a tokenizer, if there is none")
    parser.add_argument("--bits", type=int, default=11, help="significant bits of a weight")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="where the folder is made")
    arguments = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:  # a folder is shipped with its card
        folder = Path(temporary) / arguments.name
        card = COMMANDS[arguments.name](arguments, arguments.name, folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        target = arguments.out / arguments.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{target}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
