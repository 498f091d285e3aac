"""The models that come with the library: `python -m benchmarks.ship NAME --run RUN ...`.

    en-de         a translator from a run of benchmarks/multi30k.py
    shakespeare   a GPT from a checkpoint of `train.fit`, with its tokenizer

    python -m benchmarks.ship en-de --run runs/multi30k_pair-50-0 --data multi30k
    python -m benchmarks.ship shakespeare --run runs/shakespeare.json --data input.txt

Each command writes a folder that `attnlib.load_model` reads by its name: the weights in half
precision, config.json, and the model card, README.md. The scores of a translator are those that
`python -m benchmarks.multi30k score` has added to the record of its run; where there are none,
they are computed, which takes ten minutes of one core. Those of a GPT are always computed.
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
TESTS = {"test": "2016", "test_2017": "2017"}
BEAM = 5  # as `attnlib translate`

CARDS = ROOT / "benchmarks" / "cards"  # their text, with names in braces for the numbers


def card(kind, **facts):
    """The card of a kind of model, "translator" or "text", with its facts."""
    return (CARDS / f"{kind}.md").read_text(encoding="utf-8").format(**facts)


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
    """Compute BLEU (sacrebleu, raw and cased) on the test sets that have both languages.

    The result has the entries that `python -m benchmarks.multi30k score` adds to the record of
    a run: "scores" by the year of the test set, "signature", and "beams".
    """
    import sacrebleu

    scores = {}
    for split, year in TESTS.items():
        try:
            sentences, references = multi30k(split, data, languages=(source, target))
        except ValueError:  # no Czech in 2017
            continue
        said = translate(model, model.tokenizer, sentences, beam_size=BEAM)
        metric = sacrebleu.BLEU()
        score = metric.corpus_score(said, [references]).score
        scores[year] = {"bleu": round(score, 2), "sentences": len(said)}
    return {"scores": scores, "signature": str(metric.get_signature()), "beams": BEAM}


def translator_card(name, model, record):
    """Fill the card of a translator with the numbers of its run's record."""
    source, target = record["directions"][0]
    rows = []
    for year, row in record["scores"].items():
        rows.append(f"| Multi30k, test {year} | {row['sentences']:,} | {row['bleu']:.1f} |")
    facts = record["size"] | {
        "name": name,
        "source": LANGUAGES[source],
        "target": LANGUAGES[target],
        "to": target,
        "millions": millions(model),
        "vocab_size": model.tokenizer.get_vocab_size(),
        "epochs": record["epochs"],
        "seed": record["seed"],
        "beam": record["beams"],
        "rows": "\n".join(rows),
        "signature": record["signature"],
        "valid": f"{record['history'][-1]['valid']:.3f}",
    }
    return card("translator", **facts)


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
    if "scores" not in record:
        record |= bleu_scores(model, arguments.data, *direction)
    add_scores(folder, record["scores"])
    return translator_card(name, model, record)


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
    return card(
        "text",
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
        text = COMMANDS[arguments.name](arguments, arguments.name, folder)
        (folder / "README.md").write_text(text, encoding="utf-8")
        target = arguments.out / arguments.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{target}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
