"""What the chapters' models ask of a GPU: `python -m benchmarks.pages --out FOLDER`.

Nothing is timed. The operations and bytes of a training step in 16 bits are counted, and a
GPU's data sheet (`attnlib.cost.GPUS`) says how long that takes where nothing else holds it up.
Batches are those that fit the memory of a T4 by a count in float32, a tenth of it held back.
The tops of the plain copies (`python -m tools.plain`) show this record beside the measured
seconds of the page.
"""

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F

from attnlib import create_model
from attnlib.cost import GPUS, count_operations, training_memory
from attnlib.gpt import GPT, GPT2_STYLE, GPTConfig
from attnlib.models import data_config
from attnlib.recipes import CIFAR_RECIPE, SMALL
from benchmarks.records import write_record

T4_BYTES = 0.9 * 15e9
MODELS = {  # a published model for a chapter's copy
    "30_vit": "vit_base_patch16_224",
    "31_deit": "deit_base_distilled_patch16_224",
    "32_swin": "swin_tiny_patch4_window7_224",
    "33_swinv2": "swinv2_tiny_window8_256",
    "34_tnt": "tnt_s_patch16_224",
    "41_beit": "beit_base_patch16_224",
}


def classifier(name):
    """A published model, and images for it: f(batch) -> Tensor."""
    size = data_config(name)["input_size"]
    return create_model(name).train(), lambda batch: torch.zeros(batch, *size)


def small_classifier(name):
    """A row of the table of recipes at the size for CIFAR, and images for it."""
    row = SMALL[name]
    model = row.model_class(in_chans=3, num_classes=10, **row.cifar)
    return model.train(), lambda batch: torch.zeros(batch, 3, 32, 32)


class Loss(torch.nn.Module):
    """The loss of a language model: with a large vocabulary it takes much of the memory."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())


def gpt2():
    """GPT-2 with 124 million parameters and its loss, and sequences of 1,024 tokens."""
    model = Loss(GPT(GPTConfig(**GPT2_STYLE))).train()
    return model, lambda batch: torch.zeros(batch, 1024, dtype=torch.long)


def step_seconds(model, x):
    """{GPU: the seconds of a training step in 16 bits}, counted without computing."""
    model = copy.deepcopy(model).to("meta", torch.half)
    x = x.to("meta", torch.half if x.is_floating_point() else None)

    def step():
        out = model(x)
        (sum(out) if isinstance(out, tuple) else out).sum().backward()

    counted = count_operations(step)
    return {gpu: counted.time(GPUS[gpu]) for gpu in ("T4", "H200")}


def largest_batch(model, inputs):
    """The largest batch whose training step in float32 fits a T4."""
    memory = training_memory(model, inputs(1))
    fixed = memory.parameters + memory.gradients + memory.optimizer
    return int((T4_BYTES - fixed) // memory.activations)


def model_row(page, name, what, model, inputs):
    """What training a published model takes, with the largest batch that fits a T4."""
    batch = largest_batch(model, inputs)
    seconds = step_seconds(model, inputs(batch))
    rates = {gpu: float(f"{batch / s:.2g}") for gpu, s in seconds.items()}
    return {"page": page, "model": name, "what": what, "batch": batch, "rates": rates}


def run_row(page, name):
    """What the chapter's run on CIFAR takes."""
    model, inputs = small_classifier(name)
    steps = CIFAR_RECIPE["steps"]
    batch = CIFAR_RECIPE["batch_size"]
    seconds = step_seconds(model, inputs(batch))
    minutes = {gpu: float(f"{steps * s / 60:.2g}") for gpu, s in seconds.items()}
    return {"page": page, "run": f'train_small("{name}", "cifar10")', "minutes": minutes}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--tiny", action="store_true", help="one model, to see that it works")
    arguments = parser.parse_args()
    pages = {"34_tnt": MODELS["34_tnt"]} if arguments.tiny else MODELS
    rows = [
        model_row(page, f"`{name}`", "images", *classifier(name))
        for page, name in pages.items()
    ]
    rows += [run_row(page, page[3:]) for page in pages if page[3:] in SMALL]
    if not arguments.tiny:
        rows.append(model_row("24_gpt", "GPT-2 (124M)", "sequences of 1,024 tokens", *gpt2()))
    for row in rows:
        print(row)
    if arguments.out:
        write_record(arguments.out / "pages_estimated.json", {"estimated": True, "rows": rows})


if __name__ == "__main__":
    main()
