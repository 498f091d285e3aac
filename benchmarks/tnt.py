"""What was run for 34_tnt: `python -m benchmarks.tnt COMMAND --out FOLDER`.

    compare   train small backbones side by side on scanned digits
    collages  train the small ViT, Swin, and TNT that come with the library

`python -m benchmarks.vision` times the model next to its peers.
"""

import itertools
import time
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from attnlib.data import collages
from attnlib.models import create_model
from attnlib.recipes import accuracy
from attnlib.swin import SwinTransformer
from attnlib.swinv2 import SwinTransformerV2
from attnlib.tnt import TNT
from attnlib.train import fit, shuffled_batches
from attnlib.vit import VisionTransformer
from benchmarks.hidden import digit_parts
from benchmarks.records import write_record
from benchmarks.runner import Commands, Runs, save_half

RATES = (1e-3, 3e-3, 9e-3)
TASKS = {  # the steps of a run, those of a run that tunes, the rates that it tries
    "digits": (1000, 500, RATES),
    "digits, longer": (3000, 1000, RATES[1:]),
}
SHORT = ("TNT, no word positions", "residual CNN", "logistic regression")  # not in the second
BATCH = 16


# --- the contestants --------------------------------------------------------------------------
class Residual(nn.Module):
    """Two 3 × 3 convolutions with batch norm beside a shortcut."""

    def __init__(self, in_chans, width, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_chans, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = stride == 1 and in_chans == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_chans, width, 1, stride)

    def forward(self, x):
        return F.relu(self.shortcut(x) + self.body(x))


def residual_network():
    """Three residual blocks, one at 16 × 16 pixels and two at 8 × 8."""
    blocks = Residual(20, 20), Residual(20, 59, 2), Residual(59, 59)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(59, 10)
    return nn.Sequential(nn.Conv2d(1, 20, 3, padding=1), *blocks, *head)


def without_inner_blocks(model):
    """A TNT whose words stay as they were embedded; the parameters that changed them go."""
    for block in model.blocks:
        block.inner = lambda words: words
        del block.norm_in, block.attn_in, block.norm_mlp_in, block.mlp_in
    return model


def without_word_positions(model):
    """A TNT whose words have no position: zero for good."""
    nn.init.zeros_(model.pixel_pos.requires_grad_(False))
    return model


def backbones():
    """{name: what makes the network} for gray images of 16 × 16 pixels and ten classes."""
    images = dict(img_size=16, in_chans=1, num_classes=10, global_pool="avg")
    vit = dict(class_token=False, embed_dim=48, depth=3, num_heads=4, mlp_ratio=5.875)
    swin = dict(patch_size=2, embed_dim=28, depths=(2, 2), num_heads=(2, 4), window_size=4)
    swin["drop_path_rate"] = 0.0
    tnt = dict(patch_size=4, embed_dim=48, inner_dim=8, depth=3, num_heads_inner=2)
    tnt = partial(TNT, num_heads_outer=4, first_stride=1, **tnt, **images)  # words are pixels
    return {
        "ViT, patches of 4": partial(VisionTransformer, patch_size=4, **vit, **images),
        "ViT, patches of 2": partial(VisionTransformer, patch_size=2, **vit, **images),
        "Swin": partial(SwinTransformer, mlp_ratio=4.6, **swin, **images),
        "Swin V2": partial(SwinTransformerV2, mlp_ratio=3.9, **swin, **images),
        "TNT": tnt,
        "TNT, no inner blocks": lambda: without_inner_blocks(tnt()),
        "TNT, no word positions": lambda: without_word_positions(tnt()),
        "residual CNN": residual_network,
    }


# --- training ---------------------------------------------------------------------------------
@torch.no_grad()
def scores(model, data):
    """Mean cross-entropy and accuracy."""
    logits = torch.cat([model(x) for x in data[0].split(128)])
    right = (logits.argmax(-1) == data[1]).float().mean().item()
    return F.cross_entropy(logits, data[1]).item(), right


@torch.no_grad()
def inside(model, data):
    """Of a trained TNT: over how many words a word's weights are spread, in each block; and the
    accuracy if every word must attend to all words of its patch alike."""
    maps = model.attention_maps(data[0][:200], "word")  # (B, n, h, m, m) each
    spread = [(-(w * w.clamp(min=1e-12).log()).sum(-1)).exp().mean().item() for w in maps]
    for block in model.blocks:
        nn.init.zeros_(block.attn_in.qk.weight)
    return {"spread": [round(s, 3) for s in spread], "uniform": scores(model, data)[1]}


def train(make, parts, *, lr, seed, steps, log_every):
    """Train one network; the curves of its row."""
    train, valid, test = parts
    torch.manual_seed(seed)
    model = make()
    began = time.process_time()
    tests = 0.0

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    def evaluate(model):
        nonlocal tests
        now = time.process_time()
        found = dict(zip(("valid_loss", "valid"), scores(model, valid)))
        found |= {"accuracy": scores(model, test)[1], "seconds": now - began - tests}
        tests += time.process_time() - now
        return found

    history = fit(
        model,
        shuffled_batches(*train, batch_size=BATCH, seed=seed),
        loss_fn=loss_fn,
        steps=steps,
        lr=lr,
        warmup=steps // 10,
        weight_decay=0.05,
        betas=(0.9, 0.999),
        evaluate=evaluate,
        log_every=log_every,
        seed=seed,
    )
    names = dict(step="steps", seconds="seconds", loss="loss", valid="valid")
    names |= dict(valid_loss="valid_loss", accuracy="accuracy")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    words = hasattr(model, "pixel_pos") and hasattr(model.blocks[0], "attn_in")
    return {
        "parameters": trained,
        **(inside(model.eval(), test) if words else {}),
        **{to: [round(row[name], 4) for row in history] for name, to in names.items()},
    }


def logistic_baseline(parts):
    """Scikit-learn's model of the pixels; validation chooses the regularization."""
    (x, y), valid, test = ((images.flatten(1).numpy(), labels) for images, labels in parts)
    models = [LogisticRegression(C=c, max_iter=500).fit(x, y) for c in (1e-3, 1e-2, 1e-1, 1)]
    best = max(models, key=lambda model: model.score(*valid))
    return {
        "parameters": best.coef_.size + best.intercept_.size,
        "C": best.C,
        "accuracy": [round(best.score(*test), 4)],
    }


class Comparison(Runs):
    """The runs of the record; "tuning" holds the shorter ones that chose the rates."""

    def __init__(self, path, minutes):
        super().__init__(path, minutes, runs=[], batch=BATCH, tuning=[])
        self.parts = [*digit_parts(16).values()]  # training, validation, test

    def contestant(self, task, name, steps, tuning, rates, seeds):
        """Tune a network and train it with each seed."""
        if name == "logistic regression":
            what = dict(task=task, model=name)
            return self.once(what, lambda: logistic_baseline(self.parts))
        make = backbones()[name]

        def go(kind, lr, seed, steps):
            what = dict(task=task, model=name, lr=lr, seed=seed, of=steps)
            options = dict(lr=lr, seed=seed, steps=steps, log_every=max(1, steps // 20))
            return self.once(what, lambda: train(make, self.parts, **options), kind)

        tried = [go("tuning", lr, 0, tuning) for lr in rates]
        best = min(tried, key=lambda row: row["valid_loss"][-1])["lr"]
        return [go("runs", best, seed, steps) for seed in seeds]


def compare(arguments):
    """Train small backbones side by side on scanned digits.

    Networks of about 114,000 parameters name scanned digits, images of 16 × 16 pixels. For each
    network some learning rates are tried in shorter runs of one seed; the one with the lowest
    loss on validation images is trained with three seeds. Most networks are trained three times
    as long, too. Scikit-learn's logistic regression takes part with its regularization chosen
    likewise.

    The record, FOLDER/compare.json, has a row for each run: task, model, parameters, lr, seed,
    and at several steps the seconds of training so far (of the process), the loss on the
    training images since the last row, and the accuracy on the test images. It is written after
    every run.
    """
    bench = Comparison(arguments.out / "compare.json", arguments.minutes)

    def go():
        for task, name in itertools.product(arguments.tasks, arguments.models):
            if task == "digits, longer" and name in SHORT:
                continue
            steps, tuning, rates = (2, 1, RATES[:1]) if arguments.tiny else TASKS[task]
            seeds = (0,) if arguments.tiny else (0, 1, 2)
            bench.contestant(task, name, steps, tuning, rates, seeds)

    bench.work(go)


# --- the models that come with the library ---------------------------------------------------

COLLAGE_STEPS = {"vit_collages": 6000, "swin_collages": 3600, "tnt_collages": 6000}


def shares(mask, side):
    """The share of each class, 11 of them, in the patches of a mask: (B, 11, H', W')."""
    classes = F.one_hot(mask.long(), 11).permute(0, 3, 1, 2)  # (B, H, W, 11) -> (B, 11, H, W)
    return F.avg_pool2d(classes.float(), side)


def last_map(tokens):
    """Patches' tokens (B, H', W', D): a Swin's map, or a sequence after a class token."""
    if tokens.ndim == 4:
        return tokens
    side = int((tokens.shape[1] - 1) ** 0.5)
    return tokens[:, 1:].unflatten(1, (side, side))


class Both(nn.Module):
    """A model and the second head that it has while it learns."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.places = nn.Linear(model.num_features, 11)

    def forward(self, x):
        tokens = self.model.forward_features(x)
        places = self.places(last_map(tokens)).permute(0, 3, 1, 2)  # -> (B, 11, H', W')
        return self.model.forward_head(tokens), places


def collage_loss(both, batch):
    """Cross-entropy of the label and of the places, summed over a batch."""
    images, labels, mask = batch
    shift = torch.randint(-4, 5, (2,)).tolist()  # of the whole batch, by up to four pixels
    images, mask = (x.roll(shift, (-2, -1)) for x in (images, mask))
    logits, places = both(images.float() / 127.5 - 1)
    wanted = shares(mask, mask.shape[-1] // places.shape[-1])
    total = F.cross_entropy(logits, labels) + F.cross_entropy(places, wanted)
    return total * len(labels), len(labels)


def pixels(found):
    """Images from -1 to 1, and labels, as the models that come with the library want them."""
    return 2 * found["image"] - 1, found["label"]


def train_collages(arguments):
    """Train a small model that comes with the library: a ViT, a Swin, or a TNT, on collages.

    Each sees digits pasted on photographs (`attnlib.data.collages`) and names the largest.
    While it learns, a second linear layer names the digits under every place of the last map,
    and is thrown away afterwards: a picture then teaches many times and not once. Without it a
    ViT of this size was still guessing after 700 steps. Weights go to NAME.safetensors in
    float16, and the accuracy on collages of other digits and other pieces of the photographs to
    NAME.json.
    """
    if arguments.tiny:
        count = 256
        steps = 4
    else:
        count = 16_384
        steps = COLLAGE_STEPS[arguments.model]
    found = collages(count, seed=0)
    images = (255 * found["image"]).round().byte()
    data = images, found["label"], found["mask"].byte()
    test = pixels(collages(100 if arguments.tiny else 2000, "test", seed=1))
    torch.manual_seed(0)
    both = Both(create_model(arguments.model, num_classes=10))
    began = time.process_time()
    history = fit(
        both,
        shuffled_batches(*data, batch_size=64),
        loss_fn=collage_loss,
        steps=steps,
        lr=2e-3,
        warmup=min(200, steps // 2),
        weight_decay=0.05,
        betas=(0.9, 0.999),
        log_every=max(1, steps // 12),
        evaluate=lambda both: accuracy(both.model, test),
    )
    seconds = time.process_time() - began
    model = both.model.cpu()
    save_half(model.state_dict(), arguments.out / f"{arguments.model}.safetensors")
    history = [{key: float(value) for key, value in row.items()} for row in history]
    count = sum(p.numel() for p in model.parameters())
    record = dict(parameters=count, seconds=round(seconds), history=history)
    write_record(arguments.out / f"{arguments.model}.json", record)
    accuracy_at_end = history[-1]["accuracy"]
    print(f"{arguments.model}: {count:,} parameters, {accuracy_at_end:.3f} after {steps} steps")


def main(arguments=None):
    commands = Commands(__doc__)
    names = [*backbones(), "logistic regression"]
    parser = commands.experiment("compare", compare)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser = commands.experiment("collages", train_collages)
    parser.add_argument("model", choices=COLLAGE_STEPS)
    commands.run(arguments)


if __name__ == "__main__":
    main()
