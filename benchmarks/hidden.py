"""How features are judged that were learned without labels: what `mae` and `beit` share.

Scanned digits in three parts, of which few are labelled. Features are judged frozen, by
logistic regression on them, and fine-tuned; raw pixels, an untrained encoder and a network that
starts from scratch are judged in the same way. Nothing is chosen on test images: strengths and
rates are those that do best on the validation part, rates with the first seed alone.

Equal time: a network from scratch is trained once as long as the other is fine-tuned, and once
with as many more steps as fit into the seconds that the other's pre-training took, so that both
have cost the same; `more_steps` counts them.
"""

import time
from functools import cache

import torch
import torch.nn.functional as F

from attnlib.data import digits, standardize
from attnlib.finetune import layer_scales
from attnlib.train import fit
from benchmarks.runner import accuracy, logistic_regression

COUNTS = 20, 50, 100, 1200  # labels; 1,200 are all
STEPS = {20: 150, 50: 150, 100: 200, 1200: 400}  # of fine-tuning
TUNING_RATES = 1e-3, 2e-3, 4e-3  # of the head; with `decay` lower layers have less
STRENGTHS = 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0  # C of the logistic regression
SEEDS = 0, 1, 2


@cache
def digit_parts(size=8):
    """Scanned digits of so many pixels a side, standardized by the training part.

    Returns
    -------
    dict
        "train", 1,200, "valid", 237, and "test", 360: images (n, 1, size, size) and their
        labels (n,).
    """
    (x, y) = digits("train", size)
    (unseen, answers) = digits("test", size)
    parts = {
        "train": (x[:1200], y[:1200]),
        "valid": (x[1200:], y[1200:]),
        "test": (unseen, answers),
    }
    return {name: (standardize(x, parts["train"][0]), y) for name, (x, y) in parts.items()}


def few(data, count, seed):
    """`count` images with their labels, as many of each class as of the others where possible.

    The same seed gives the same ones; of a larger count they are the beginning.
    """
    images, labels = data
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    classes = F.one_hot(labels[order])  # (n, K)
    rank = (classes.cumsum(0) * classes).sum(1)  # the how-manieth of its class each image is
    rows = order[rank.argsort(stable=True)[:count]]
    return images[rows], labels[rows]


def probe(features, parts, labels, seed):
    """Logistic regression on frozen features, its strength C chosen on validation images.

    Parameters
    ----------
    features : callable
        From images (n, C, H, W) to an array (n, D).
    parts : dict
        As of `digit_parts`.
    labels, seed : int
        How many training images are labelled, and which.

    Returns
    -------
    dict
        "C" and the accuracies "valid" and "test".
    """
    known = few(parts["train"], labels, seed)
    known, valid, test = (
        (features(x), y.numpy()) for x, y in (known, parts["valid"], parts["test"])
    )
    return logistic_regression(known, valid, test, STRENGTHS, max_iter=3000)


def fine_tuned(make, parts, labels, seed, steps, lr, decay):
    """Train a classifier with some labels and test its averaged weights.

    Parameters
    ----------
    make : callable
        Returns a new classifier with ten classes, with or without trained weights; called after
        `torch.manual_seed`.
    parts, labels, seed
        As in `probe`.
    steps, lr, decay
        Of `attnlib.finetune.layer_scales`: with a decay of 1 all layers learn with one rate.

    Returns
    -------
    dict
        The accuracies "valid" and "test", and "seconds" of CPU time.
    """
    torch.manual_seed(seed)
    began = time.process_time()
    data = few(parts["train"], labels, seed)
    model = make()
    fit(
        model,
        data,
        steps=steps,
        batch_size=min(32, labels),
        lr=lr,
        warmup=max(1, steps // 10),
        weight_decay=0.05,
        lr_scale=layer_scales(model, decay),
        ema=0.9,
        seed=seed,
    )
    model.eval()
    seconds = round(time.process_time() - began, 1)
    found = {name: accuracy(model, parts[name]) for name in ("valid", "test")}
    return dict(**found, seconds=seconds)


def more_steps(steps, seconds, pretraining):
    """Steps that fit into the time of a pre-training and of `steps` that took `seconds`."""
    return round(steps * (1 + pretraining / seconds))
