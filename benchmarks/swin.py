"""What was run for 32_swin: `python -m benchmarks.swin COMMAND --out FOLDER`.

    dense  train backbones to name the digit under each pixel

`python -m benchmarks.vision` times the model next to its peers.
"""

import itertools
import time
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib.data import collages
from attnlib.swin import SwinTransformer
from attnlib.train import fit, shuffled_batches
from attnlib.vit import VisionTransformer
from benchmarks.runner import Commands, Runs
from tools import torchvision_ops  # noqa: F401  before timm imports torchvision

SIZE = 48
CLASSES = 11
BATCH = 32
STEPS = 400
RATES = (3e-3, 9e-3, 2.7e-2)
GROUND = 0.3  # weight of the ground in the loss: nine pixels of ten show it


# --- the contestants --------------------------------------------------------------------------
class Segmenter(nn.Module):
    """Logits (B, 11, H, W) for every pixel from the maps of a backbone."""

    def __init__(self, backbone, maps):
        super().__init__()
        # maps: images -> list of (B, C, H', W')
        self.backbone = backbone
        self.maps = maps
        with torch.no_grad():
            widths = [x.shape[1] for x in maps(backbone, torch.zeros(1, 3, SIZE, SIZE))]
        self.heads = nn.ModuleList(nn.Conv2d(width, CLASSES, 1) for width in widths)

    def forward(self, x):
        found = [head(y) for head, y in zip(self.heads, self.maps(self.backbone, x))]
        enlarge = partial(F.interpolate, mode="bilinear")
        total = sum(enlarge(y, found[0].shape[2:]) for y in found)
        return enlarge(total, x.shape[2:])


def pyramid(backbone, x):
    return backbone.forward_intermediates(x, intermediates_only=True)


def swin(shift=True):
    backbone = SwinTransformer(
        *(SIZE, 4, 3, 0),
        embed_dim=24,
        depths=(2, 2, 2),
        num_heads=(2, 4, 8),
        window_size=3,
        drop_path_rate=0.0,
    )
    if not shift:
        for block in backbone.blocks:
            block.attn.shift_size = (0, 0)
    return Segmenter(backbone, pyramid)


def vit():
    backbone = VisionTransformer(
        *(SIZE, 6, 3, 0), embed_dim=66, depth=6, num_heads=3, drop_path_rate=0.0
    )
    return Segmenter(backbone, lambda backbone, x: pyramid(backbone, x)[-1:])


def convnext():
    import timm

    backbone = timm.create_model(
        "convnext_atto",
        features_only=True,
        out_indices=(0, 1, 2),
        depths=(2, 2, 3, 1),
        dims=(24, 48, 96, 8),
        drop_path_rate=0.0,
    )
    return Segmenter(backbone, lambda backbone, x: backbone(x))


CONTESTANTS = {
    "Swin": swin,
    "Swin without shift": partial(swin, shift=False),
    "ViT": vit,
    "ConvNeXt": convnext,
}


# --- images and scores ------------------------------------------------------------------------
def parts(counts=(4096, 400, 500)):
    """Images from -1 to 1 and masks: training, validation and test."""
    found = [
        collages(count, split, SIZE, seed=seed)
        for count, split, seed in zip(counts, ("train", "train", "test"), (0, 1, 2))
    ]
    return [(2 * some["image"] - 1, some["mask"]) for some in found]


def mean_iou(found, wanted, classes=CLASSES):
    """Mean over the classes of |found and wanted| / |found or wanted|, over all images."""
    pairs = torch.bincount((wanted * classes + found).flatten(), minlength=classes**2)
    pairs = pairs.view(classes, classes).double()
    both = pairs.diag()
    either = pairs.sum(0) + pairs.sum(1) - pairs.diag()
    return (both / either.clamp(min=1))[either > 0].mean().item()


def ink_iou(found, wanted):
    """IoU of the pixels of any digit."""
    found = found > 0
    wanted = wanted > 0
    return ((found & wanted).sum() / (found | wanted).sum().clamp(min=1)).item()


@torch.no_grad()
def predict(model, images):
    return torch.cat([model(x).argmax(1) for x in images.split(100)])


def limits(mask):
    """What needs no network: all ground, and the best that a map of patches could say."""
    classes = F.one_hot(mask, CLASSES).permute(0, 3, 1, 2).float()
    found = {"all ground": mean_iou(torch.zeros_like(mask), mask)}
    for patch in (4, 6):
        shares = F.interpolate(F.avg_pool2d(classes, patch), mask.shape[1:], mode="bilinear")
        found[f"patches of {patch}"] = mean_iou(shares.argmax(1), mask)
    return {name: round(value, 4) for name, value in found.items()}


def train(make, data, *, lr, seed, steps, log_every):
    """Train a network; its curves on test images, and its score on validation images."""
    (images, masks), valid, test = data
    torch.manual_seed(seed)
    model = make()
    weight = torch.tensor([GROUND] + [1.0] * (CLASSES - 1))
    began = time.process_time()
    tests = 0.0

    def loss(model, batch):
        total = F.cross_entropy(model(batch[0]), batch[1], weight)
        return total * len(batch[0]), len(batch[0])

    def evaluate(model):
        nonlocal tests
        now = time.process_time()
        found = predict(model, test[0])
        scores = dict(test=mean_iou(found, test[1]), ink=ink_iou(found, test[1]))
        scores["seconds"] = now - began - tests
        tests += time.process_time() - now
        return scores

    history = fit(
        model,
        shuffled_batches(images, masks, batch_size=BATCH, seed=seed),
        loss_fn=loss,
        steps=steps,
        lr=lr,
        warmup=steps // 10,
        weight_decay=0.05,
        betas=(0.9, 0.999),
        evaluate=evaluate,
        log_every=log_every,
        seed=seed,
    )
    model.eval()
    names = dict(step="steps", seconds="seconds", loss="loss", test="test", ink="ink")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **{to: [round(float(row[name]), 4) for row in history] for name, to in names.items()},
        "valid": round(ink_iou(predict(model, valid[0]), valid[1]), 4),
    }


class Segmentation(Runs):
    """The runs of the record."""

    def __init__(self, path, minutes, counts):
        super().__init__(path, minutes, batch=BATCH, images=counts, size=SIZE)
        self.record["images"] = counts
        self.counts = counts
        self.data = None

    def run(self, name, lr, seed, steps, log_every):
        def make():
            self.data = self.data or parts(self.counts)
            self.record["limits"] = limits(self.data[2][1])
            options = dict(lr=lr, seed=seed, steps=steps, log_every=log_every)
            return train(CONTESTANTS[name], self.data, **options)

        return self.once(dict(model=name, lr=lr, seed=seed, of=steps), make)


def dense(arguments):
    """Train backbones to name the digit under each pixel.

    Semantic segmentation of collages (`attnlib.data.collages`) of 48 × 48 pixels: eleven
    classes, the ground and ten digits. Small backbones of about 0.32 million parameters are
    trained from scratch with the same plain head: a linear layer on each of the maps, brought
    to the finest map's size and added (which is the same as to concatenate the maps and apply
    one linear layer), then enlarged to the image. They are a Swin Transformer, the same one
    without shifts, a ViT with larger patches, and timm's ConvNeXt.

    For each network three learning rates are tried with one seed; the one with the best score
    on validation images gets two more seeds. (With --times 4 all runs are four times as long.)
    The score is the IoU of ink, any digit against the ground; the mean IoU of the classes is
    recorded as well. Validation images show the digits and photographs of the training images
    in other collages; test images show other digits on other parts of the photographs.

    The record, FOLDER/dense.json, has the curves of each run on test images, with the seconds
    of training so far (of the process). It is written after every run.
    """
    steps = arguments.times * STEPS
    rates = RATES
    seeds = (0, 1, 2)
    counts = (4096, 400, 500)
    if arguments.tiny:
        steps = 2
        rates = RATES[:1]
        seeds = (0, 1)
        counts = (64, 8, 8)
    bench = Segmentation(arguments.out / "dense.json", arguments.minutes, counts)
    every = max(1, steps // 10)

    def go():
        best = {}
        for name in arguments.models:
            tried = [bench.run(name, lr, 0, steps, every) for lr in rates]
            best[name] = max(tried, key=lambda row: row["valid"])["lr"]
        for seed, name in itertools.product(seeds[1:], arguments.models):
            bench.run(name, best[name], seed, steps, every)

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    names = list(CONTESTANTS)
    parser = commands.experiment("dense", dense)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--times", type=int, default=1, help="factor of the number of steps")
    commands.run(arguments)


if __name__ == "__main__":
    main()
