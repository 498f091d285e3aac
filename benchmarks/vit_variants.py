"""What was run for 35_vit_variants: `python -m benchmarks.vit_variants COMMAND --out FOLDER`.

    options  compare a small ViT on scanned digits, plain and with each option
    rates    raise the learning rate until training fails, with and without query-key norm
    larger   test learned and rotary positions on images larger than those of the training

Each method gets its learning rate from a validation split, which no later number uses. The
records are FOLDER/modern_COMMAND.json.
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib.data import digits
from attnlib.vit import VisionTransformer
from attnlib.vit_variants import SwiGLU, use_rotary
from benchmarks.runner import Commands, logistic_regression

SHAPE = dict(img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=48, depth=4)
OPTIONS = {  # what differs from the plain model
    "plain": {},
    "LayerScale": dict(init_values=0.1),
    "QK-norm": dict(qk_norm=True),
    "SwiGLU": dict(mlp_layer=SwiGLU, mlp_ratio=16 / 3),
    "registers": dict(reg_tokens=4, no_embed_class=True),
    "rotary": dict(rotary=True),
}
OPTIONS["all five"] = {key: x for options in OPTIONS.values() for key, x in options.items()}
RATES = (1e-3, 3e-3, 1e-2)


def make(rotary=False, **options):
    model = VisionTransformer(**SHAPE | dict(num_heads=4) | options)
    return use_rotary(model) if rotary else model


def parts():
    """Images and labels for training, validation and test: 1137, 300 and 360 digits."""
    (x, y) = digits("train")
    test = digits("test")
    mean = x.mean()
    std = x.std()
    x = (x - mean) / std
    test = ((test[0] - mean) / std, test[1])
    return (x[300:], y[300:]), (x[:300], y[:300]), test


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    right = [model(x).argmax(-1) == y for x, y in zip(data[0].split(100), data[1].split(100))]
    model.train()
    return round(torch.cat(right).float().mean().item(), 4)


def train(model, draw, steps, lr, look):
    """AdamW, warm-up over a tenth and then a cosine; [step, *what `look` says] on the way."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    curve = []
    for step in range(1, steps + 1):
        x, y = draw()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 8) == 0:
            curve.append([step, *look(model)])
    return curve


def batches(data, size=50):
    """What draws a random batch."""

    def draw():
        rows = torch.randint(len(data[0]), (size,))
        return data[0][rows], data[1][rows]

    return draw


def tuned(make, draw, valid, steps, seeds, score):
    """The first seed at every rate, all seeds at the one best on `valid`; `score` judges."""

    def run(lr, seed):
        torch.manual_seed(seed)
        model = make()
        curve = train(model, draw, steps, lr, lambda model: [accuracy(model, valid)])
        return dict(lr=lr, seed=seed, curve=curve, **score(model))

    tries = [run(lr, 0) for lr in RATES]
    best = max(tries, key=lambda found: found["curve"][-1][1])
    return {
        "parameters": sum(p.numel() for p in make().parameters() if p.requires_grad),
        "rates": {str(found["lr"]): found["curve"][-1][1] for found in tries},
        "runs": [best] + [run(best["lr"], seed) for seed in range(1, seeds)],
    }


# --- the options ------------------------------------------------------------------------------
def options(arguments):
    """Compare a small ViT on scanned digits, plain and with each option."""
    tiny = arguments.tiny
    if tiny:
        steps = 8
        seeds = 1
    else:
        steps = 800
        seeds = 3
    training, valid, test = parts()

    def contest(name):
        return tuned(
            lambda: make(**OPTIONS[name]),
            *(batches(training), valid, steps, seeds),
            lambda model: {"test": accuracy(model, test)},
        )

    found = {name: contest(name) for name in OPTIONS}
    pairs = ((x.flatten(1).numpy(), y.numpy()) for x, y in (training, valid, test))
    baseline = logistic_regression(*pairs, strengths=(0.01, 0.1, 1))["test"]
    return {"steps": steps, "contestants": found, "logistic regression": baseline}


# --- high learning rates ----------------------------------------------------------------------
@torch.no_grad()
def largest_logit(model, x):
    """The largest absolute logit of any head of any block, over a batch of images."""
    largest = 0.0
    x = model.embed(x)
    for block in model.blocks:
        q, k, _ = block.attn.qkv(block.norm1(x)).chunk(3, dim=-1)
        q, k = (y.unflatten(-1, (block.attn.num_heads, -1)).transpose(1, 2) for y in (q, k))
        q = block.attn.q_norm(q)
        k = block.attn.k_norm(k)
        logits = q @ k.mT / q.shape[-1] ** 0.5  # (B, h, N, N)
        largest = max(largest, logits.abs().max().item())
        x = block(x)
    return largest


def rates(arguments):
    """Raise the learning rate until training fails, with and without query-key norm."""
    tiny = arguments.tiny
    if tiny:
        steps = 8
        seeds = 1
    else:
        steps = 300
        seeds = 3
    training, valid, _ = parts()
    found = {}
    for name in ("plain", "QK-norm"):
        for lr in (3e-3, 1e-2, 3e-2, 1e-1):
            for seed in range(seeds):
                torch.manual_seed(seed)
                model = make(**OPTIONS[name])

                def look(model):
                    logit = largest_logit(model, valid[0][:100])
                    return [accuracy(model, valid), round(logit, 2)]

                curve = train(model, batches(training), steps, lr, look)
                found.setdefault(name, []).append(dict(lr=lr, seed=seed, curve=curve))
    return {"steps": steps, "runs": found}


# --- larger pictures --------------------------------------------------------------------------
def pasted(data, side, generator=None):
    """Each digit at a random place of an empty picture of so many pixels, and its label."""
    x, y = data
    out = x.new_full((len(x), 1, side, side), x.min().item())
    corners = 2 * torch.randint((side - 8) // 2 + 1, (len(x), 2), generator=generator)
    for image, digit, (row, column) in zip(out, x, corners.tolist()):
        image[:, row : row + 8, column : column + 8] = digit
    return out, y


def larger(arguments):
    """Test learned and rotary positions on images larger than those of the training."""
    tiny = arguments.tiny
    if tiny:
        steps = 8
        seeds = 1
    else:
        steps = 600
        seeds = 3
    training, valid, test = parts()
    few = batches(training)
    sides = (12, 16, 20, 24)
    exams = {side: pasted(test, side, torch.Generator().manual_seed(side)) for side in sides}
    valid = pasted(valid, 12, torch.Generator().manual_seed(0))

    def at_size(model, x):
        model = copy.deepcopy(model)
        model.set_input_size(x.shape[-1])
        return accuracy(model, (x, test[1]))

    def score(model):  # more to see at the same scale, or the same with more pixels
        small = exams[12][0]
        wider = {str(side): at_size(model, exams[side][0]) for side in sides}
        finer = {
            str(side): at_size(model, F.interpolate(small, (side, side), mode="bilinear"))
            for side in sides
        }
        return {"wider": wider, "finer": finer}

    def contest(name):
        return tuned(
            lambda: make(rotary=name == "rotary", img_size=12),
            *(lambda: pasted(few(), 12), valid, steps, seeds, score),
        )

    found = {name: contest(name) for name in ("learned", "rotary")}
    return {"steps": steps, "sides": sides, "contestants": found}


def main(arguments=None):
    commands = Commands(__doc__)
    for function in (options, rates, larger):
        name = function.__name__
        commands.experiment(name, function, record=f"modern_{name}")
    commands.run(arguments)


if __name__ == "__main__":
    main()
