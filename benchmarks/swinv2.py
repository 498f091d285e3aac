"""What was run for 33_swinv2: `python -m benchmarks.swinv2 COMMAND --out FOLDER`.

    growth  measure how the residual stream of Swin V1 and V2 grows, and transfer to new windows

`python -m benchmarks.vision` times the model next to its peers.
"""

import copy

import nbformat
import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib.data import digits, standardize
from attnlib.swin import SwinTransformer
from attnlib.swinv2 import SwinTransformerV2
from attnlib.train import adamw, learning_rate, shuffled_batches
from benchmarks.runner import (
    Commands,
    Runs,
    accuracy,
    logistic_regression,
    tune,
)
from tools.notebooks import NBS, code_of

KINDS = {  # the class, and where the weights of the norms behind the branches begin
    "V1": (SwinTransformer, None),
    "V2, norms from 0": (SwinTransformerV2, 0.0),
    "V2, norms from 1": (SwinTransformerV2, 1.0),
}
RATES = (1.5e-3, 4e-3, 1e-2)
LOOKS = (0, 50, 100, 200, 400, 600, 800, 1000)
SIZES = (24, 28, 32, 48)
MODEL = dict(
    img_size=24,
    patch_size=4,
    in_chans=1,
    num_classes=10,
    embed_dim=24,
    depths=(2, 2),
    num_heads=(2, 4),
    window_size=3,
    drop_path_rate=0.0,
)


def parts():
    """Training, validation and test images with their labels, standardized."""
    (x, y) = digits("train", 24)
    (unseen, answers) = digits("test", 24)
    seen = standardize(x, x)
    return (seen[300:], y[300:]), (seen[:300], y[:300]), (standardize(unseen, x), answers)


def new_model(kind):
    make, start = KINDS[kind]
    model = make(**MODEL)
    for block in model.blocks if start is not None else ():
        (
            nn.init.constant_(block.norm1.weight, start),
            nn.init.constant_(block.norm2.weight, start),
        )
    return model


def stream_function():
    """The function of the chapter that measures the stream."""
    names = {"torch": torch}
    cells = {cell.id: cell for cell in nbformat.read(NBS / "33_swinv2.ipynb", 4).cells}
    exec(code_of(cells["stream"]), names)
    return names["sizes_of_the_stream"]


def train(kind, lr, seed, looks, data):
    """A trained model, and what was seen of it at each of the steps `looks`."""
    train_part, valid, _ = data
    torch.manual_seed(seed)
    model = new_model(kind)
    measure = stream_function()
    found = []
    optimizer = adamw(model, lr, (0.9, 0.999), 0.05)
    batches = shuffled_batches(*train_part, batch_size=32, seed=seed)
    steps = looks[-1]
    for step in range(steps + 1):
        if step in looks:
            sizes = measure(model.eval(), valid[0])
            sizes = [[round(size, 4) for size in stage] for stage in sizes]
            found.append({"step": step, "valid": accuracy(model, valid), "stream": sizes})
        if step < steps:
            model.train()
            images, labels = batches(step)
            factor = learning_rate(step, steps=steps, warmup=steps // 20, schedule="cosine")
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model, found


def transfer(trained, stretch):
    """Test accuracy with the window doubled, and at other sizes of images."""
    found = {}
    for pixels, window in ((24, 6), *((pixels, None) for pixels in SIZES)):
        model = copy.deepcopy(trained)
        model.set_input_size(pixels, window)
        for block in model.blocks if stretch else ():
            block.attn.set_pretrained_window(0)
        (images, labels) = digits("test", pixels)
        (reference, _) = digits("train", pixels)
        name = "doubled" if window else str(pixels)
        found[name] = accuracy(model, (standardize(images, reference), labels))
    return found


def logistic(data):
    """Test accuracy of scikit-learn's logistic regression, its C from the validation."""
    train, valid, test = (
        (images.flatten(1).numpy(), labels.numpy()) for images, labels in data
    )
    return logistic_regression(train, valid, test, strengths=(1e-4, 1e-3, 1e-2), max_iter=300)


class Growth(Runs):
    """The runs of the record."""

    def __init__(self, path, minutes, looks):
        super().__init__(path, minutes, best={})
        self.looks = looks
        self.data = parts()

    def run(self, kind, lr, seed):
        def make():
            model, looks = train(kind, lr, seed, self.looks, self.data)
            result = {"looks": looks, "test": accuracy(model, self.data[2])}
            result["transfer"] = {"kept": transfer(model, False)}
            if kind != "V1":
                result["transfer"]["stretched"] = transfer(model, True)
                norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)]
                result["norms"] = [round(norm.weight.abs().mean().item(), 4) for norm in norms]
            return result

        return self.once(dict(kind=kind, lr=lr, seed=seed), make)

    def tuned(self, kind, rates, seeds):
        """All rates with the first seed, all seeds with the rate that was best there."""
        best, _ = tune(
            lambda lr, seed: self.run(kind, lr, seed),
            rates=rates,
            seeds=seeds,
            score=lambda run: run["looks"][-1]["valid"],
        )
        self.record["best"][kind] = best
        self.write()


def growth(arguments):
    """Measure how the residual stream grows, and transfer to other windows.

    Small models learn the digits at 24 by 24 pixels: V1, V2 with norms that begin at 0 as in
    the published code, and V2 with norms that begin at 1. Each gets its learning rate from 300
    validation images and then three seeds. On the way the size of the stream is taken after
    every block; in the end the model is tried with other windows and sizes of images on the
    test images. The measuring functions are cells of the chapter's notebook, run here as they
    stand.

    The record, growth.json in the folder --out, is written after every model.
    """
    if arguments.tiny:
        looks = (0, 2)
        rates = RATES[:1]
        seeds = (0,)
    else:
        looks = LOOKS
        rates = RATES
        seeds = (0, 1, 2)
    bench = Growth(arguments.out / "growth.json", arguments.minutes, looks)
    bench.record["logistic regression"] = logistic(bench.data)

    def go():
        for kind in KINDS:
            bench.tuned(kind, rates, seeds)

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    commands.experiment("growth", growth)
    commands.run(arguments)


if __name__ == "__main__":
    main()
