"""The chapters' full training runs: `python -m benchmarks.runs PART ... --out FOLDER`.

Each part is a function of a page, of the library, or of a module here; this file calls it and
records what it gives, as FOLDER/PART.json. With --checkpoints an interrupted part goes on when
the command is given again. With --tiny every part runs in seconds, to see that it works; such a
record means nothing.
"""

import argparse
import functools
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from attnlib import recipes
from attnlib.transformer import POSITIONS
from benchmarks.records import write_record
from benchmarks.runner import save_half
from benchmarks.translation import length_run


def half_precision():
    """A new engine in bfloat16, or in float16 on a GPU that lacks it."""
    cuda = torch.cuda
    lacks = cuda.is_available() and not cuda.is_bf16_supported(including_emulation=False)
    return Accelerator(mixed_precision="fp16" if lacks else "bf16")


def kept(path, make):
    """What a short run gave when the command was given before; else what ``make()`` gives."""
    if not path.exists():
        found = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(found))
        part.replace(path)
    return json.loads(path.read_text())


def translator(folder, tiny):
    """The translator of numbers with three seeds; the weights of the first are kept."""
    tokenizer, parts = recipes.number_pairs()
    size = dict(steps=4, log_every=4, warmup=1) if tiny else {}

    def run(seed):
        model, history = recipes.train_translator(tokenizer, parts, seed=seed, **size)
        shares = {
            part: round(recipes.translation_accuracy(model, tokenizer, parts[part]), 4)
            for part in ("valid", "test")
        }
        if seed == 0:
            save_half(model.cpu().state_dict(), folder / "weights.safetensors")
        return {"seed": seed, **shares, "history": history}

    runs = [
        kept(folder / f"run-{seed}.json", functools.partial(run, seed))
        for seed in range(1 if tiny else 3)
    ]
    return {"tokenizer": tokenizer.to_str(), "runs": runs}


def lengths(folder, tiny):
    small = dict(steps=5, numbers=500, tests=5, d_model=16) if tiny else {}

    def run(position, seed):
        return length_run(position, seed=seed, **small, accelerator=half_precision())

    runs = [
        kept(folder / f"{position}-{seed}.json", functools.partial(run, position, seed))
        for position in POSITIONS
        for seed in range(1 if tiny else 3)
    ]
    return {"runs": runs}


def small(data, folder, tiny):
    """Every row of the table of recipes, "deit" with its teacher, with three seeds."""
    # on a CPU its own seconds, however busy it is
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    runs = []
    for name in BACKBONES:
        train = functools.partial(recipes.train_small, name)
        train = recipes.distill_small if name == "deit" else train
        for seed in range(1 if tiny else 3):
            options = dict(checkpoint=folder / f"{name}-{seed}.json")
            if tiny:
                options = dict(steps=2, batch_size=4)
            torch.manual_seed(seed)
            began = clock()
            model, *_, history = train(data, seed=seed, accelerator=half_precision(), **options)
            runs.append(
                {
                    "model": name,
                    "seed": seed,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "seconds": round(clock() - began, 1),
                    "history": history,
                }
            )
    return {"data": data, "runs": runs}


def mae_cifar(folder, tiny):
    """Pre-training on CIFAR-10 without labels, and a probe of what it has learned."""
    from benchmarks import mae  # needs scikit-learn, which not every machine has

    return mae.cifar(folder, tiny)


def detr(folder, tiny):
    """A small detector with anchors and denoising on digits, for longer than a page can."""
    from benchmarks import detr  # needs SciPy and pycocotools, which not every machine has

    return detr.longer(folder, tiny)


def supernet(data, folder, tiny):
    """A supernet of AutoFormer, and the accuracy of many of its networks."""
    from benchmarks import autoformer  # needs scikit-learn, which not every machine has

    return autoformer.longer(folder, tiny, data)


def captions(folder, tiny):
    """Captioners four times as wide, with soft and with hard attention, trained for longer."""
    from benchmarks import spatial  # needs scikit-learn, SciPy and pycocotools

    return spatial.longer(folder, tiny)


def gpt(data, folder, tiny):
    """A GPT of 12 million parameters on this book, or of 29 million on TinyStories."""
    from benchmarks import gpt  # needs tokenizers, which not every machine has

    return gpt.longer(data, folder, tiny)


BACKBONES = ("vit", "deit", "swin", "swinv2", "tnt")
PARTS = {
    "translator": translator,
    "lengths": lengths,
    "digits": functools.partial(small, "digits"),
    "detr": detr,
    "supernet": functools.partial(supernet, "digits"),
    "captions": captions,
    "gpt": functools.partial(gpt, "book"),
    # these need a network, or the archives where attnlib.data looks for them
    "cifar10": functools.partial(small, "cifar10"),
    "mae_cifar": mae_cifar,
    "supernet_cifar10": functools.partial(supernet, "cifar10"),
    "gpt_tinystories": functools.partial(gpt, "tinystories"),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder of the records"
    )
    parser.add_argument(
        "--checkpoints", type=Path, help="folder of unfinished runs; a temporary one by default"
    )
    parser.add_argument(
        "--threads", type=int, help="threads on a CPU; PyTorch's own choice by default"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a few steps of small models, to see that all runs"
    )
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.parts:
            began = time.perf_counter()
            checkpoints = (arguments.checkpoints or Path(folder)) / name
            record = PARTS[name](checkpoints, arguments.tiny)
            record["seconds"] = round(time.perf_counter() - began)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            write_record(arguments.out / f"{name}.json", record, device)
            if (checkpoints / "weights.safetensors").exists():
                weights = arguments.out / f"{name}.safetensors"
                shutil.move(checkpoints / "weights.safetensors", weights)
            # or the next run would end before it began
            shutil.rmtree(checkpoints, ignore_errors=True)
            print(
                f"{name}: {record['seconds']} s, recorded in {arguments.out / name}.json",
                flush=True,
            )


if __name__ == "__main__":
    main()
