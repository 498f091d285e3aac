"""Captions by soft and by hard attention: `python -m benchmarks.captions PART --out FOLDER`.

The scenes are those of `attnlib.data`, the model is `attnlib.spatial.Captioner`. The parts are

- compare: soft attention, soft attention with the penalty of Xu et al. (2015), hard attention,
  and hard attention that takes the mean for half of the captions, on `caption_scenes`;
- bias: soft attention on `context_scenes`, in which a shape beside a disc tells its color in
  90% of the training scenes, in half of them, or in 90% of which all but as many are left out
  as there are others;
- flickr: soft attention on Flickr8k, with --flickr FOLDER, the photographs in 64 x 64 pixels.

Each contestant of the first two has three seeds. Its learning rate is chosen on validation
scenes, which are of the training's distribution; what is reported is of test scenes: in
"compare" of pairs of things that no training scene has. There soft attention without the
penalty and both kinds of hard attention have runs of four times the steps as well. A pipeline
without a network takes part in "compare": bright connected parts (SciPy), whose color and kind
support vector machines name (scikit-learn).

The record, FOLDER/captions_PART.json, is written after every run; the weights of the first seed
of soft attention go to captions_compare.safetensors, and trained on correlated scenes to
captions_bias.safetensors. With --minutes the command begins no run after that time, and goes on
when it is given again. With --tiny the runs take a few steps, to see that all works; such a
record means nothing.
"""

import collections
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.svm import SVC

from attnlib.data import (
    CAPTION_WORDS,
    KINDS,
    PLURALS,
    caption_scenes,
    context_scenes,
    decode_captions,
    encode_captions,
    flickr8k,
)
from attnlib.decoding import beam_search, greedy
from attnlib.models import open_picture
from attnlib.spatial import (
    Captioner,
    HardAttention,
    PlaceEncoder,
    SoftAttention,
    caption_loss,
    changed_attention,
    reinforce_loss,
    weight_on_objects,
)
from attnlib.train import epochs, fit
from benchmarks.detr import bright_parts, stamp
from benchmarks.runner import Runs, experiment_parser, save_half

BATCH, SEEDS, LOOKS, LENGTH = 64, (0, 1, 2), 10, 10
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
        tokens, targets = captions[:, :-1], captions[:, 1:]
        logits, weights, *looks = model(images, tokens)
        if looks:
            found = reinforce_loss(logits, targets, *looks, baseline)
        else:
            found = caption_loss(logits, targets, weights, penalty)
        return len(images) * found, len(images)

    return loss


def trained(model, images, captions, *, steps, lr, seed, batch=BATCH, **options):
    """The history of a training."""
    return fit(
        model,
        options.pop("loss", None)
        or loss_function(options.pop("penalty", 0.0), getattr(model, "baseline", None)),
        epochs(images, captions, batch_size=min(batch, len(images)), seed=seed),
        **dict(steps=steps, lr=lr, warmup=max(1, steps // 20), betas=(0.9, 0.999)),
        **dict(weight_decay=0.01, clip=5.0, seed=seed, every=max(1, steps // LOOKS)),
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
    weights = model.eval()(pixels(scenes["image"]), scenes["caption"][:, :-1])[1]
    mass, peak, area = weight_on_objects(weights, scenes["mask"])
    named, found = scenes["named"][:, 1:], {"chance": round(area.mean().item(), 4)}
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
    images, captions = pixels(scenes["image"]), scenes["caption"]
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
        logits = model.eval()(images[differ], captions[differ, :2])[0][:, 1]
    word = logits.argmax(-1) - CAPTION_WORDS.index("red")
    for name, i in (("stays", 0), ("follows", 1)):
        found[name] = round((word == scenes["color"][differ, i]).float().mean().item(), 4)
    return found


# --- a pipeline without a network that looks --------------------------------------------------


def described(image, boxes, threshold):
    """The mean color and a small picture of what is in each box: (n, 3), (n, 100)."""
    colors, stamps = [], []
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
    names, number = CAPTION_WORDS[8:14], {1: ("a", SINGULAR), 2: ("two", PLURALS)}
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
        self.tiny, counts = tiny, dict.fromkeys(COUNTS, 24) if tiny else COUNTS
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
            model, train = captioner(attention), self.scenes["train"]
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
            read, found = by_parts(few), {}
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
        logits, weights = model.eval()(pixels(scenes["image"]), tokens[:, :-1])
    else:
        with changed_attention(model, change):
            logits, weights = model.eval()(pixels(scenes["image"]), tokens[:, :-1])
    logits = logits[n, at]
    return logits[:, RED] > logits[:, BLUE], weights[n, at]


def on_subject(scenes):
    """Weights (n, L) spread evenly over the disc."""
    mask = scenes["mask"][torch.arange(len(scenes["subject"])), scenes["subject"]]
    on = F.adaptive_avg_pool2d(mask[:, None].float(), 8).flatten(1) > 0
    return on / on.sum(1, keepdim=True)


def bias_scores(model, pair):
    """Of scenes that agree and the same scenes that conflict: how often the color is right, how
    often it changes with the shape, and where the model looks."""
    found, answers = {}, []
    for name, scenes in pair.items():
        scenes = placed(model, scenes)
        red, weights = named_red(model, scenes)
        right, n = red == scenes["red"], torch.arange(len(red), device=red.device)
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
        self.tiny, self.counts = tiny, dict.fromkeys(COUNTS, 48) if tiny else COUNTS
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
            model, train = captioner(), self.scenes(name, 1)
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
        self.tiny, self.folder = tiny, folder

    def all(self):
        steps, size = (3, 32) if self.tiny else (20_000, 64)

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
            model = Captioner(len(words), PlaceEncoder(256, size), hidden_dim=256)

            def loss(model, batch):
                rows, captions = batch
                logits, _ = model(images[rows.cpu()].to(rows.device), captions[:, :-1])
                return len(rows) * caption_loss(logits, captions[:, 1:]), len(rows)

            history = trained(model, which, tokens, loss=loss, steps=steps, lr=1e-3, seed=0)
            unseen, truth = flickr8k(self.folder, "test")
            written, _ = beam_search(model, photographs(unseen, size), 20, 5)
            examples = list(zip(decode_captions(written, words), (some[0] for some in truth)))
            return dict(words=len(words), history=history, examples=examples[:20])

        self.once(dict(data="flickr8k", steps=steps), make)


def longer(folder, tiny):
    """For a GPU (see `benchmarks.runs`): wider networks and larger pictures."""
    size, steps, counts = (16, 2, (24, 8)) if tiny else (64, 8000, (16_000, 1000))
    train, test = (
        caption_scenes(count, split, size) for count, split in zip(counts, ("train", "test"))
    )
    runs = []
    for name in ("soft", "hard"):
        torch.manual_seed(0)
        model = Captioner(
            len(CAPTION_WORDS),
            PlaceEncoder(64 if tiny else 256, size),
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


PARTS = {"compare": Compared, "bias": Biased, "flickr": Flickr}


def main():
    parser = experiment_parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--flickr", type=Path, help="the folder of Flickr8k")
    arguments = parser.parse_args()
    (arguments.out / "checkpoints").mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"captions_{arguments.part}.json"
    options = [path, arguments.tiny, arguments.minutes]
    options += [arguments.flickr] if arguments.part == "flickr" else []
    bench = PARTS[arguments.part](*options)
    bench.work(bench.all)


if __name__ == "__main__":
    main()
