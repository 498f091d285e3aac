"""What was run for 45_spatial: `python -m benchmarks.spatial COMMAND --out FOLDER`.

    compare   caption scenes with soft and with hard attention
    bias      caption scenes whose context is correlated with a color
    flickr    caption Flickr8k with soft attention
    attend    compare ways to pool local features
    draw      bound the cost of digits with DRAW, with and without attention
    channels  compare gates on the channels of a small network

The first three are recorded as FOLDER/captions_COMMAND.json, the others as
FOLDER/glimpses_COMMAND.json, after every run. Each method has three seeds (Flickr8k has one
run). Its learning rate is chosen on validation scenes, which have the distribution of the
training scenes; photographs and digits of the test scenes are not in the training scenes.
`longer` trains on a GPU (`python -m benchmarks.runs captions`).
"""

import collections
import contextlib
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.naive_bayes import BernoulliNB
from sklearn.svm import SVC

from attnlib import data, spatial
from attnlib.data import (
    _PLURALS,
    CAPTION_WORDS,
    KINDS,
    caption_scenes,
    collages,
    context_scenes,
    decode_captions,
)
from attnlib.decoding import beam_search, greedy
from attnlib.models import open_picture
from attnlib.spatial import (
    AttentiveConvnet,
    Captioner,
    ConvEncoder,
    Draw,
    HardAttention,
    SoftAttention,
    caption_loss,
    draw_loss,
    reinforce_loss,
)
from attnlib.train import fit, shuffled_batches
from benchmarks.chapter import run_cells
from benchmarks.corpora import encode_captions, flickr8k
from benchmarks.detr import bright_parts, stamp
from benchmarks.runner import Commands, Runs, save_half

BATCH = 64
SEEDS = (0, 1, 2)
LOOKS = 10
LENGTH = 10
RATES = (2e-3, 4e-3)
STEPS = {"compare": 500, "bias": 300}
COUNTS = {"train": 8000, "valid": 500, "test": 1000, "novel": 1000}
CONTESTANTS = {  # attention, penalty
    "soft": (SoftAttention, 0.0),
    "half": (partial(HardAttention, soft_share=0.5), 0.0),
    "hard": (HardAttention, 0.0),
    "penalty": (SoftAttention, 1.0),
}
CORRELATIONS = {"correlated": 0.9, "independent": 0.5, "balanced": 0.9}
SINGULAR = tuple(KINDS)
RED, BLUE = (CAPTION_WORDS.index(word) for word in ("red", "blue"))


def page_cells(*names):
    """The names that some cells of the chapter define."""
    return run_cells("45_spatial", *names, modules=[data, spatial, contextlib])


changed_attention = page_cells("changed-attention").changed_attention
weight_on_objects = page_cells("on-objects").weight_on_objects


def pixels(images):
    return 2 * images - 1


def captioner(attention=SoftAttention):
    return Captioner(len(CAPTION_WORDS), attention=attention)


def placed(model, scenes):
    """The scenes on the device of the model."""
    device = next(model.parameters()).device
    return {key: x.to(device) for key, x in scenes.items()}


def loss_function(penalty=0.0, baseline=None):
    """The loss of a batch of images and captions, for `fit`; with the baseline of a model with
    hard attention REINFORCE."""

    def loss(model, batch):
        images, captions = batch
        tokens = captions[:, :-1]
        targets = captions[:, 1:]
        output = model(images, tokens)
        if output.log_prob is None:
            found = caption_loss(output.logits, targets, output.weights, penalty)
        else:
            found = reinforce_loss(
                output.logits, targets, output.log_prob, output.entropy, baseline
            )
        return len(images) * found, len(images)

    return loss


def trained(model, images, captions, *, steps, lr, seed, batch=BATCH, **options):
    """The history of a training."""
    return fit(
        model,
        shuffled_batches(images, captions, batch_size=min(batch, len(images)), seed=seed),
        loss_fn=options.pop("loss", None)
        or loss_function(options.pop("penalty", 0.0), getattr(model, "baseline", None)),
        **dict(steps=steps, lr=lr, warmup=max(1, steps // 20), betas=(0.9, 0.999)),
        **dict(
            weight_decay=0.01, max_grad_norm=5.0, seed=seed, log_every=max(1, steps // LOOKS)
        ),
        **options,
    )


# --- scores -----------------------------------------------------------------------------------
def exact(written, captions):
    """The share of captions that are right from the first word to the last."""
    targets = captions[:, 1:]
    written = F.pad(written, (0, targets.shape[1]))[:, : targets.shape[1]]
    return round((written == targets).all(1).float().mean().item(), 4)


@torch.no_grad()
def looks(model, scenes):
    """At the words that name color and kind: weight on the object, and is the peak on it?"""
    weights = model.eval()(pixels(scenes["image"]), scenes["caption"][:, :-1]).weights
    mass, peak, area = weight_on_objects(weights, scenes["mask"])
    named = scenes["named"][:, 1:]
    found = {"chance": round(area.mean().item(), 4)}
    color = (scenes["caption"][:, 1:] >= 8) & (scenes["caption"][:, 1:] < 14)
    for name, word in (("color", (named >= 0) & color), ("kind", (named >= 0) & ~color)):
        of = named[word][:, None]
        found[f"mass_{name}"] = round(mass[word].gather(1, of).mean().item(), 4)
        found[f"hit_{name}"] = round(peak[word].gather(1, of).float().mean().item(), 4)
    return found


def scores(model, scenes):
    scenes = placed(model, scenes)
    found = greedy(model, pixels(scenes["image"]), LENGTH)
    return {"exact": exact(found, scenes["caption"]), **looks(model, scenes)}


def on_other(scenes):
    """Weights (n, L) spread evenly over the places of the object that is named second."""
    on = F.adaptive_avg_pool2d(scenes["mask"][:, 1:].float(), 8).flatten(1) > 0
    return on / on.sum(1, keepdim=True)


@torch.no_grad()
def interventions(model, scenes):
    """What is written when the attention reads elsewhere than it would."""
    scenes = placed(model, scenes)
    images = pixels(scenes["image"])
    captions = scenes["caption"]
    changes = {
        "uniform": lambda weights: torch.full_like(weights, 1 / weights.shape[1]),
        "shuffled": lambda weights: weights[:, torch.randperm(weights.shape[1])],
    }
    found = {}
    torch.manual_seed(0)
    for name, change in changes.items():
        with changed_attention(model, change):
            found[name] = exact(greedy(model, images, LENGTH), captions)
    differ = (scenes["color"][:, 0] != scenes["color"][:, 1]).nonzero()[:, 0]
    moved = on_other({key: x[differ] for key, x in scenes.items()})
    with changed_attention(model, lambda weights: moved):  # at "a" and at the first color
        logits = model.eval()(images[differ], captions[differ, :2]).logits[:, 1]
    word = logits.argmax(-1) - CAPTION_WORDS.index("red")
    for name, i in (("stays", 0), ("follows", 1)):
        found[name] = round((word == scenes["color"][differ, i]).float().mean().item(), 4)
    return found


# --- a pipeline without a network that looks --------------------------------------------------
def described(image, boxes, threshold):
    """The mean color and a small picture of what is in each box: (n, 3), (n, 100)."""
    colors = []
    stamps = []
    for box in boxes:
        x0, y0, x1, y1 = box.int().tolist()
        part = image[:, y0:y1, x0:x1].flatten(1)
        bright = part.amax(0) > threshold
        colors.append(part[:, bright | ~bright.any()].mean(1).numpy())
        stamps.append(stamp(image, box))
    return np.stack(colors), np.stack(stamps)


def composed(things):
    """The caption of things: the centers of equal shapes, by the numbers of color and kind."""
    if len(things) != 2 or max(map(len, things.values())) > 2:
        return "a"
    (one, a), (other, b) = things.items()
    step = torch.stack(b).mean(0) - torch.stack(a).mean(0)
    axis = int(step.abs().argmax())
    order = (one, other) if step[axis] > 0 else (other, one)
    names = CAPTION_WORDS[8:14]
    number = {1: ("a", SINGULAR), 2: ("two", _PLURALS)}
    first, second = (
        f"{article} {names[color]} {kinds[kind]}"
        for color, kind in order
        for article, kinds in [number[len(things[color, kind])]]
    )
    return f"{first} {('left of', 'above')[axis]} {second}"


def by_parts(scenes, threshold=0.45):
    """A function of images to captions, from bright parts and support vector machines.

    They learn from the things of which there is one.
    """
    single = scenes["number"] == 1
    features = [
        described(image, boxes[one], threshold)
        for image, boxes, one in zip(scenes["image"], scenes["box"], single)
        if one.any()
    ]
    colors, stamps = (np.concatenate(some) for some in zip(*features))
    of_color = SVC(C=10.0).fit(colors, scenes["color"][single])
    of_kind = SVC(C=10.0).fit(stamps, scenes["kind"][single])

    def caption(image):
        boxes = bright_parts(image, threshold, least=6)
        if len(boxes) < 2:
            return "a"
        color, kind = (
            model.predict(x)
            for model, x in zip((of_color, of_kind), described(image, boxes, threshold))
        )
        things = collections.defaultdict(list)
        for thing, box in zip(zip(color, kind), boxes):
            things[thing].append(box.view(2, 2).mean(0))
        return composed(things)

    return lambda images: [caption(image) for image in images]


# --- soft and hard ----------------------------------------------------------------------------
class Compared(Runs):
    """The runs of the part "compare"."""

    def __init__(self, path, tiny, minutes):
        super().__init__(path, minutes, runs=[], baseline=[])
        self.tiny = tiny
        counts = dict.fromkeys(COUNTS, 24) if tiny else COUNTS
        parts = {"train": "train", "valid": "train", "test": "test", "novel": "novel"}
        self.scenes = {
            part: caption_scenes(counts[part], split, seed=part == "valid")
            for part, split in parts.items()
        }
        self.few = {key: x[:300] for key, x in self.scenes["test"].items()}

    def run(self, name, seed, lr, times=1):
        steps = times * (3 if self.tiny else STEPS["compare"])
        attention, penalty = CONTESTANTS[name]

        def make():
            torch.manual_seed(seed)
            model = captioner(attention)
            train = self.scenes["train"]
            history = trained(
                *(model, pixels(train["image"]), train["caption"]),
                **dict(steps=steps, lr=lr, seed=seed, penalty=penalty),
                evaluate=lambda model: scores(model, self.few),
            )
            found = {
                part: scores(model, self.scenes[part]) for part in ("valid", "test", "novel")
            }
            test = placed(model, self.scenes["test"])
            written, _ = beam_search(model, pixels(test["image"]), LENGTH, 5)
            found["beam"] = exact(written, test["caption"])
            if (name, seed, times) == ("soft", SEEDS[0], 1):
                save_half(model.state_dict(), self.checkpoint(lr))
            if name in ("soft", "penalty"):
                found["interventions"] = interventions(model, test)
            return found | dict(history=history)

        return self.once(dict(contestant=name, steps=steps, lr=lr, seed=seed), make)

    def checkpoint(self, lr):
        return self.path.parent / "checkpoints" / f"captions-soft-{lr}.safetensors"

    def parts(self):
        few = {key: x[:2000] for key, x in self.scenes["train"].items()}

        def make():
            read = by_parts(few)
            found = {}
            for part in ("test", "novel"):
                some = self.scenes[part]
                pairs = zip(read(some["image"]), decode_captions(some["caption"]))
                found[part] = round(sum(a == b for a, b in pairs) / len(some["image"]), 4)
            return found

        self.once(dict(contestant="bright parts"), make, "baseline")

    def all(self):
        self.parts()
        best = {}
        for name in CONTESTANTS:
            tried = {}
            for lr in RATES[:1] if self.tiny else RATES:
                tried[lr] = self.run(name, SEEDS[0], lr)["valid"]["exact"]
            best[name] = max(tried, key=tried.get)
            for seed in SEEDS[:1] if self.tiny else SEEDS:
                self.run(name, seed, best[name])
            if name == "soft" and self.checkpoint(best[name]).exists():
                kept = self.path.with_suffix(".safetensors")
                shutil.copyfile(self.checkpoint(best[name]), kept)
        for name in ("hard", "half", "soft"):
            for seed in SEEDS[:1] if self.tiny else SEEDS:
                self.run(name, seed, best[name], times=4)


# --- bias -------------------------------------------------------------------------------------
def balanced(scenes, seed):
    """As many agreeing scenes as there are others, in random order."""
    generator = torch.Generator().manual_seed(seed)
    agree, other = (x.nonzero()[:, 0] for x in (scenes["agrees"], ~scenes["agrees"]))
    agree = agree[torch.randperm(len(agree), generator=generator)[: len(other)]]
    rows = torch.cat([agree, other]).sort().values
    return {key: x[rows] for key, x in scenes.items()}


@torch.no_grad()
def named_red(model, scenes, change=None):
    """Whether the model calls the disc red, (n,), and its attention for that word, (n, L).

    The words before are given. `change` moves the attention at all of them, if it is there.
    """
    tokens = scenes["caption"]
    n = torch.arange(len(tokens), device=tokens.device)
    at = (scenes["named"] == scenes["subject"][:, None]).int().argmax(1) - 1  # the step
    if change is None:
        output = model.eval()(pixels(scenes["image"]), tokens[:, :-1])
    else:
        with changed_attention(model, change):
            output = model.eval()(pixels(scenes["image"]), tokens[:, :-1])
    logits = output.logits[n, at]
    return logits[:, RED] > logits[:, BLUE], output.weights[n, at]


def on_subject(scenes):
    """Weights (n, L) spread evenly over the disc."""
    mask = scenes["mask"][torch.arange(len(scenes["subject"])), scenes["subject"]]
    on = F.adaptive_avg_pool2d(mask[:, None].float(), 8).flatten(1) > 0
    return on / on.sum(1, keepdim=True)


def bias_scores(model, pair):
    """Of scenes that agree and the same scenes that conflict: how often the color is right, how
    often it changes with the shape, and where the model looks."""
    found = {}
    answers = []
    for name, scenes in pair.items():
        scenes = placed(model, scenes)
        red, weights = named_red(model, scenes)
        right = red == scenes["red"]
        n = torch.arange(len(red), device=red.device)
        answers.append(red)
        mass, _, _ = weight_on_objects(weights[:, None], scenes["mask"])
        subject = mass[n, 0, scenes["subject"]]
        beside = mass[n, 0, 1 - scenes["subject"]]
        found[name] = {"right": round(right.float().mean().item(), 4)}
        for part, rows in (("right", right), ("wrong", ~right)):
            for what, x in (("subject", subject), ("beside", beside)):
                value = x[rows].mean().item() if rows.any() else 0.0
                found[name][f"{what}_when_{part}"] = round(value, 4)
        disc = on_subject(scenes)
        red, _ = named_red(model, scenes, lambda weights, disc=disc: disc)
        forced = (red == scenes["red"]).float().mean().item()
        found[name]["right_when_forced"] = round(forced, 4)
    found["changed"] = round((answers[0] != answers[1]).float().mean().item(), 4)
    return found


class Biased(Runs):
    """The runs of the part "bias"."""

    def __init__(self, path, tiny, minutes):
        super().__init__(path, minutes)
        self.tiny = tiny
        self.counts = dict.fromkeys(COUNTS, 48) if tiny else COUNTS
        count = self.counts["test"]
        self.test = {
            name: context_scenes(count, agree, seed=3)
            for name, agree in (("agree", 1.0), ("conflict", 0.0))
        }

    def scenes(self, name, seed):
        count = self.counts["valid" if seed == 2 else "train"]
        scenes = context_scenes(count, CORRELATIONS[name], seed=seed)
        return balanced(scenes, seed) if name == "balanced" else scenes

    def run(self, name, seed, lr):
        steps = 3 if self.tiny else STEPS["bias"]

        def make():
            torch.manual_seed(seed)
            model = captioner()
            train = self.scenes(name, 1)
            history = trained(
                *(model, pixels(train["image"]), train["caption"]),
                **dict(steps=steps, lr=lr, seed=seed),
            )
            valid = placed(model, self.scenes(name, 2))
            red, _ = named_red(model, valid)
            right = round((red == valid["red"]).float().mean().item(), 4)
            if name == "correlated" and seed == SEEDS[0]:
                path = self.path.parent / "checkpoints" / f"captions-bias-{lr}.safetensors"
                save_half(model.state_dict(), path)
            found = dict(scenes=len(train["image"]), valid=right)
            return found | bias_scores(model, self.test) | dict(loss=history[-1]["loss"])

        return self.once(dict(contestant=name, steps=steps, lr=lr, seed=seed), make)

    def all(self):
        for name in CORRELATIONS:
            rates = RATES[:1] if self.tiny else RATES
            tried = {lr: self.run(name, SEEDS[0], lr)["valid"] for lr in rates}
            best = max(tried, key=tried.get)
            for seed in SEEDS[:1] if self.tiny else SEEDS:
                self.run(name, seed, best)
            kept = self.path.parent / "checkpoints" / f"captions-bias-{best}.safetensors"
            if name == "correlated" and kept.exists():
                shutil.copyfile(kept, self.path.with_suffix(".safetensors"))


# --- Flickr8k ---------------------------------------------------------------------------------
def photographs(paths, size):
    """Photographs (n, 3, size, size), from -1 to 1: the middle square of each."""
    from PIL import ImageOps

    found = [ImageOps.fit(open_picture(path), (size, size)) for path in paths]
    return pixels(torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).float() / 255)


class Flickr(Runs):
    """One run on Flickr8k; the network is small and has never seen another photograph."""

    def __init__(self, path, tiny, minutes, folder):
        super().__init__(path, minutes)
        self.tiny = tiny
        self.folder = folder

    def all(self):
        if self.tiny:
            steps = 3
            size = 32
        else:
            steps = 20_000
            size = 64

        def make():
            paths, captions = flickr8k(self.folder)
            count = collections.Counter(" ".join(map(" ".join, captions)).split())
            least = 1 if self.tiny else 5
            words = [*CAPTION_WORDS[:4], *(w for w, n in count.items() if n >= least)]
            known = set(words)
            texts = [
                " ".join(w if w in known else "<unk>" for w in c.split()[:20])
                for some in captions
                for c in some
            ]
            tokens = encode_captions(texts, words)
            images = photographs(paths, size)
            which = torch.tensor([i for i, some in enumerate(captions) for _ in some])
            torch.manual_seed(0)
            model = Captioner(len(words), ConvEncoder(256, size), hidden_dim=256)

            def loss(model, batch):
                rows, captions = batch
                output = model(images[rows.cpu()].to(rows.device), captions[:, :-1])
                return len(rows) * caption_loss(output.logits, captions[:, 1:]), len(rows)

            history = trained(model, which, tokens, loss=loss, steps=steps, lr=1e-3, seed=0)
            unseen, truth = flickr8k(self.folder, "test")
            written, _ = beam_search(model, photographs(unseen, size), 20, 5)
            examples = list(zip(decode_captions(written, words), (some[0] for some in truth)))
            return dict(words=len(words), history=history, examples=examples[:20])

        self.once(dict(data="flickr8k", steps=steps), make)


def longer(folder, tiny):
    """For a GPU (see `benchmarks.runs`): wider networks and larger pictures."""
    if tiny:
        size = 16
        steps = 2
        counts = (24, 8)
    else:
        size = 64
        steps = 8000
        counts = (16_000, 1000)
    train, test = (
        caption_scenes(count, split, size) for count, split in zip(counts, ("train", "test"))
    )
    runs = []
    for name in ("soft", "hard"):
        torch.manual_seed(0)
        model = Captioner(
            len(CAPTION_WORDS),
            ConvEncoder(64 if tiny else 256, size),
            attention=CONTESTANTS[name][0],
            hidden_dim=16 if tiny else 384,
        )
        history = trained(
            *(model, pixels(train["image"]), train["caption"]),
            **dict(steps=steps, lr=1e-3, seed=0),
            checkpoint=folder / f"captions-{name}.json",
        )
        runs.append(dict(contestant=name, history=history, test=scores(model, test)))
    return dict(size=size, runs=runs)


# --- glimpses and channels -------------------------------------------------------------------

GLIMPSE_LOOKS = 6
POOLS = ("dot", "additive", "max", "global")
ATTEND = (8000, 4000, 6000)  # pictures drawn; of the last two only the hard ones are kept
ATTEND_STEPS = 700
LONGER_POOLS = ("additive", "max")
GLIMPSE_RATES = {"attend": (1e-3, 3e-3), "channels": (5e-4, 1e-3), "draw": (3e-3, 1e-2, 2e-2)}
DRAW = dict(img_size=16, steps=8, hidden_dim=64, latent_dim=8)
GLIMPSES = {"attention": 5, "whole image": None}
DRAW_STEPS = 1500
CHANNEL_STEPS = 1200
GLIMPSE_BATCH = {"attend": 32, "channels": 32, "draw": 64}


def as_bytes(images):
    return (255 * images).round().byte()


def from_bytes(images):
    """Bytes from 0 to 255 as numbers from -1 to 1."""
    return images.float() / 127.5 - 1


def svm_accuracy(train, valid, test):
    """A support vector machine on vectors, its C chosen on validation pictures."""
    (x, y), *others = (
        [part[0].flatten(1).numpy(), part[1].numpy()] for part in (train, *(valid, test))
    )
    machines = [SVC(C=C).fit(x, y) for C in (1.0, 10.0, 100.0)]
    best = max(machines, key=lambda machine: machine.score(*others[0]))
    return {"C": best.C, "test": round(best.score(*others[1]), 4)}


def small_gray(images, size=16):
    gray = images.float().mean(1, keepdim=True) / 255
    return F.interpolate(gray, (size, size), mode="bilinear", antialias=True)


# --- attend -----------------------------------------------------------------------------------
def attend_parts(counts):
    """Pictures, questions, labels and masks for training, validation and test."""
    made = page_cells("asked-scenes")
    splits = ("train", "train", "test")
    found = []
    for seed, (count, split) in enumerate(zip(counts, splits)):
        make = made.asked_scenes if seed == 0 else made.hard_scenes
        found.append(make(count, split, seed))
        found[-1]["image"] = as_bytes(found[-1]["image"])
    return found


@torch.no_grad()
def attend_scores(model, part):
    """Accuracy, and how much of the map lies on the object, and on others."""
    logits, weights = model.eval()(from_bytes(part["image"]), part["question"])
    scores = {"accuracy": (logits.argmax(1) == part["label"]).float().mean().item()}
    if weights is not None:
        share = F.avg_pool2d(part["mask"].float(), 4)  # of each place, (n, objects, H, W)
        mass = (weights[:, None] * share).sum((2, 3)).mean(0)
        scores |= {"mass": mass[0].item(), "others": mass[1:].sum().item()}
    return {key: round(score, 4) for key, score in scores.items()}


def color_stamps(part, palette, size=12):
    """Where a picture has the color asked for, cut out and scaled."""
    stamps = []
    for image, question in zip(part["image"].float() / 255, part["question"]):
        near = (image - palette[question, :, None, None]).norm(dim=0) < 0.05
        rows = near.any(1).nonzero()[:, 0]
        columns = near.any(0).nonzero()[:, 0]
        cut = near[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        stamps.append(F.interpolate(cut[None, None].float(), (size, size))[0])
    return torch.stack(stamps)


class Attend(Runs):
    """The runs of the first part."""

    def __init__(self, path, minutes, tiny):
        super().__init__(path, minutes, runs=[], baselines=[])
        self.tiny = tiny
        self.parts = attend_parts((40, 150, 150) if tiny else ATTEND)

    def run(self, pool, lr, seed, times=1):
        steps = times * (2 if self.tiny else ATTEND_STEPS)

        def make():
            train, valid, test = self.parts
            torch.manual_seed(seed)
            model = AttentiveConvnet(len(data.KINDS), pool, questions=6)

            def loss(model, batch):
                image, question, label = batch
                logits, _ = model(from_bytes(image), question)
                return F.cross_entropy(logits, label, reduction="sum"), len(label)

            tensors = (train[key] for key in ("image", "question", "label"))
            history = fit(
                model,
                shuffled_batches(
                    *tensors, batch_size=8 if self.tiny else GLIMPSE_BATCH["attend"], seed=seed
                ),
                loss_fn=loss,
                **dict(steps=steps, lr=lr, warmup=steps // 15, betas=(0.9, 0.999), seed=seed),
                **dict(
                    evaluate=lambda m: attend_scores(m, test),
                    log_every=max(1, steps // GLIMPSE_LOOKS),
                ),
            )
            return dict(
                parameters=sum(p.numel() for p in model.parameters()),
                valid=attend_scores(model, valid),
                test=attend_scores(model, test),
                history=history,
            )

        return self.once(dict(pool=pool, lr=lr, seed=seed, steps=steps), make)

    def baseline(self):
        def make():
            palette = page_cells("asked-scenes").PALETTE
            stamps = [color_stamps(part, palette) for part in self.parts]
            pairs = [(x[:3000], part["label"][:3000]) for x, part in zip(stamps, self.parts)]
            return svm_accuracy(*pairs)

        self.once(dict(name="support vectors"), make, "baselines")

    def all(self):
        self.baseline()
        first, *others = SEEDS[:1] if self.tiny else SEEDS
        for pool in POOLS:
            rates = GLIMPSE_RATES["attend"][: 1 if self.tiny else None]
            tried = {lr: self.run(pool, lr, first)["valid"]["accuracy"] for lr in rates}
            best = max(tried, key=tried.get)
            for seed in others:
                self.run(pool, best, seed)
            if pool in LONGER_POOLS:
                self.run(pool, best, first, times=4)


# --- draw -------------------------------------------------------------------------------------
@torch.no_grad()
def bound(model, images, times=4):
    """The mean bound in nats, its part that the latents cost, over several draws of them."""
    torch.manual_seed(0)
    drawings = [model.eval()(images) for _ in range(times)]
    costs = torch.stack([draw_loss(drawing, images) for drawing in drawings])
    latents = torch.stack([drawing.kl.sum(1) for drawing in drawings])
    return {"bound": round(costs.mean().item(), 3), "kl": round(latents.mean().item(), 3)}


def mixture_cost(train, images, components, alpha):
    """Nats of images under a mixture of Bernoulli distributions, one for each cluster."""
    x = train.flatten(1).numpy()
    clusters = KMeans(components, n_init=1, max_iter=50, random_state=0).fit_predict(x)
    joint = BernoulliNB(alpha=alpha).fit(x, clusters)
    logs = joint.predict_joint_log_proba(images.flatten(1).numpy())
    return float(-np.logaddexp.reduce(logs, axis=1).mean())


class Drawings(Runs):
    """The runs of the second part."""

    def __init__(self, path, minutes, tiny):
        super().__init__(path, minutes, runs=[], baselines=[])
        self.tiny = tiny
        make = page_cells("placed-digits").placed_digits
        counts = (80, 40, 40) if tiny else (20_000, 500, 1000)
        splits = ("train", "train", "test")
        self.parts = [make(n, s, seed=seed) for seed, (n, s) in enumerate(zip(counts, splits))]

    def run(self, name, lr, seed, times=1):
        steps = times * (2 if self.tiny else DRAW_STEPS)

        def make():
            train, valid, test = self.parts
            torch.manual_seed(seed)
            model = Draw(glimpse=GLIMPSES[name], **DRAW)
            history = fit(
                model,
                shuffled_batches(
                    train, batch_size=8 if self.tiny else GLIMPSE_BATCH["draw"], seed=seed
                ),
                loss_fn=lambda model, batch: (
                    draw_loss(model(*batch), *batch).sum(),
                    len(batch[0]),
                ),
                **dict(steps=steps, lr=lr, warmup=steps // 15, betas=(0.9, 0.999), seed=seed),
                **dict(
                    weight_decay=0.0,
                    max_grad_norm=5.0,
                    log_every=max(1, steps // GLIMPSE_LOOKS),
                ),
                evaluate=lambda model: bound(model, test, 1),
            )
            found = dict(
                parameters=sum(p.numel() for p in model.parameters()),
                valid=bound(model, valid),
                test=bound(model, test),
                history=history,
            )
            kept = [run["valid"]["bound"] for run in self.record["runs"] if run["name"] == name]
            better = found["valid"]["bound"] < min(kept, default=np.inf)
            if name == "attention" and better:
                save_half(model.state_dict(), self.path.with_suffix(".safetensors"))
            return found

        return self.once(dict(name=name, lr=lr, seed=seed, steps=steps), make)

    def baseline(self):
        def make():
            train, valid, test = self.parts
            sizes = (4,) if self.tiny else (100, 300, 1000)
            tried = {
                (components, alpha): mixture_cost(train, valid, components, alpha)
                for components in sizes
                for alpha in (0.1, 1.0)
            }
            components, alpha = min(tried, key=tried.get)
            cost = mixture_cost(train, test, components, alpha)
            return dict(components=components, alpha=alpha, test=round(cost, 3))

        self.once(dict(name="mixture"), make, "baselines")

    def all(self):
        self.baseline()
        first, *others = SEEDS[:1] if self.tiny else SEEDS
        for name in GLIMPSES:
            rates = GLIMPSE_RATES["draw"][: 1 if self.tiny else None]
            tried = {lr: self.run(name, lr, first)["valid"]["bound"] for lr in rates}
            best = min(tried, key=tried.get)
            for seed in others:
                self.run(name, best, seed)
            for seed in (first, *others):
                self.run(name, best, seed, times=4)


# --- channels ---------------------------------------------------------------------------------
@torch.no_grad()
def right(model, part):
    logits = torch.cat([model.eval()(from_bytes(x)) for x in part["image"].split(250)])
    return round((logits.argmax(1) == part["label"]).float().mean().item(), 4)


@torch.no_grad()
def gates_by_class(model, part):
    """Mean gates of the last squeeze-and-excitation for each class: rows of the record."""
    gates = []
    layers = [m for m in model if isinstance(m, spatial.SqueezeExcite)]
    hook = layers[-1].register_forward_hook(
        lambda m, x, _: gates.append(m.gate(x[0])[..., 0, 0])
    )
    right(model, part)
    hook.remove()
    gates = torch.cat(gates)  # (n, channels)
    means = torch.stack([gates[part["label"] == k].mean(0) for k in range(10)])
    return dict(
        gates=(1000 * means).round().div(1000).tolist(),
        spread_within=round(gates.std(0).mean().item(), 4),
        spread_between=round(means.std(0).mean().item(), 4),
    )


class Channels(Runs):
    """The runs of the third part."""

    def __init__(self, path, minutes, tiny):
        super().__init__(path, minutes, runs=[], baselines=[])
        self.tiny = tiny
        self.made = page_cells("gated-convnet")
        counts = (40, 40, 200) if tiny else (8000, 1000, 2000)
        splits = ("train", "train", "test")
        self.parts = []
        for seed, (count, split) in enumerate(zip(counts, splits)):
            part = collages(count, split, 48, seed=seed)
            self.parts.append(dict(image=as_bytes(part["image"]), label=part["label"]))

    def run(self, name, lr, seed):
        steps = 2 if self.tiny else CHANNEL_STEPS

        def make():
            train, valid, test = self.parts
            torch.manual_seed(seed)
            gate, widths = self.made.GATES[name]
            model = self.made.gated_convnet(gate, widths)

            def loss(model, batch):
                image, label = batch
                logits = model(from_bytes(image))
                return F.cross_entropy(logits, label, reduction="sum"), len(label)

            history = fit(
                model,
                shuffled_batches(
                    train["image"],
                    train["label"],
                    batch_size=8 if self.tiny else GLIMPSE_BATCH["channels"],
                    seed=seed,
                ),
                loss_fn=loss,
                **dict(steps=steps, lr=lr, warmup=steps // 15, betas=(0.9, 0.999), seed=seed),
                **dict(evaluate=lambda m: {"accuracy": right(m, test)}),
                log_every=max(1, steps // GLIMPSE_LOOKS),
            )
            found = dict(
                parameters=sum(p.numel() for p in model.parameters()),
                valid=right(model, valid),
                test=right(model, test),
                history=history,
            )
            return found | (gates_by_class(model, test) if name == "SE" else {})

        return self.once(dict(name=name, lr=lr, seed=seed, steps=steps), make)

    def all(self):
        def svm():
            pairs = [
                (small_gray(part["image"])[:3000], part["label"][:3000]) for part in self.parts
            ]
            return svm_accuracy(*pairs)

        self.once(dict(name="support vectors"), svm, "baselines")
        first, *others = SEEDS[:1] if self.tiny else SEEDS
        for name in self.made.GATES:
            rates = GLIMPSE_RATES["channels"][: 1 if self.tiny else None]
            tried = {lr: self.run(name, lr, first)["valid"] for lr in rates}
            for seed in others:
                self.run(name, max(tried, key=tried.get), seed)


def compare(arguments):
    """Caption scenes with soft and with hard attention.

    The methods are soft attention, soft attention with the penalty of Xu et al. (2015), hard
    attention, and hard attention that takes the mean for half of the captions. The test scenes
    have pairs of things that no training scene has. Soft attention without the penalty and both
    kinds of hard attention have runs of four times the steps as well. The baseline is a
    pipeline without a network: bright connected components (SciPy), whose color and kind are
    classified by support vector machines (scikit-learn). The weights of the first seed of soft
    attention go to captions_compare.safetensors.
    """
    bench = Compared(captions_record(arguments), arguments.tiny, arguments.minutes)
    bench.work(bench.all)


def bias(arguments):
    """Caption scenes whose context is correlated with a color.

    In `context_scenes` a shape next to a disc tells its color in 90% of the training scenes, in
    half of them, or in 90% of which so many are left out that both kinds are equally frequent.
    The weights trained on correlated scenes go to captions_bias.safetensors.
    """
    bench = Biased(captions_record(arguments), arguments.tiny, arguments.minutes)
    bench.work(bench.all)


def flickr(arguments):
    """Caption Flickr8k with soft attention, the photographs scaled to 64 × 64 pixels."""
    path = captions_record(arguments)
    bench = Flickr(path, arguments.tiny, arguments.minutes, arguments.flickr)
    bench.work(bench.all)


def captions_record(arguments):
    (arguments.out / "checkpoints").mkdir(parents=True, exist_ok=True)
    return arguments.out / f"captions_{arguments.command}.json"


def run_glimpses(arguments, experiment):
    path = arguments.out / f"glimpses_{arguments.command}.json"
    bench = experiment(path, arguments.minutes, arguments.tiny)
    bench.work(bench.all)


def attend(arguments):
    """Compare ways to pool local features, for finding the shape of a requested color.

    The test scenes have two or three shapes of different kinds. Two poolings also have a run of
    four times the steps. The baseline is a support vector machine of scikit-learn. The cells of
    the notebook that make the scenes are run as they stand.
    """
    run_glimpses(arguments, Attend)


def draw(arguments):
    """Bound the cost of digits at random positions with DRAW, with and without attention.

    Both are also trained for four times the steps. The baseline is a mixture of Bernoulli
    distributions (scikit-learn's k-means and naive Bayes). The weights of one DRAW go to
    glimpses_draw.safetensors.
    """
    run_glimpses(arguments, Drawings)


def channels(arguments):
    """Compare gates after the layers of a small network that finds the largest digit.

    All networks have about the same number of parameters. The baseline is a support vector
    machine. The cells of the notebook that make the networks are run as they stand.
    """
    run_glimpses(arguments, Channels)


def main(arguments=None):
    commands = Commands(__doc__)
    commands.experiment("compare", compare)
    commands.experiment("bias", bias)
    parser = commands.experiment("flickr", flickr)
    parser.add_argument("--flickr", type=Path, required=True, help="the folder of Flickr8k")
    for function in (attend, draw, channels):
        commands.experiment(function.__name__, function)
    commands.run(arguments)


if __name__ == "__main__":
    main()
