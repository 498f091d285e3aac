"""Attention over places, over glimpses and over channels: `python -m benchmarks.glimpses PART`.

The parts are the experiments of the second half of the chapter on spatial attention, whose
cells make the pictures and the networks with gates. They are run here as they stand.

- attend: which pooling of local features finds the shape that has the color asked for. The test
  has two or three shapes of different kinds. Two poolings have a run of four times the steps.
- draw: bounds on the cost of digits at random places, by DRAW with and without attention.
  Both are also trained for four times the steps. A mixture of Bernoulli distributions
  (scikit-learn's k-means and naive Bayes) takes part.
- channels: gates behind the layers of a small network that names the largest digit of a
  collage, all with about as many parameters.

The learning rate of each contestant is chosen on validation pictures with the first seed;
photographs and digits of the test are unseen in training. A support vector machine of
scikit-learn takes part where there are classes.

The record, FOLDER/glimpses_PART.json, is written after every run; the weights of a DRAW go to
glimpses_draw.safetensors. With --minutes the command begins no run after that time, and goes on
when it is given again. With --tiny the runs take a few steps, to see that all works; such a
record means nothing.
"""

import nbformat
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.naive_bayes import BernoulliNB
from sklearn.svm import SVC

from attnlib import data, spatial
from attnlib.data import collages
from attnlib.spatial import AttentiveConvnet, Draw, draw_loss
from attnlib.train import epochs, fit
from benchmarks.runner import Runs, experiment_parser, save_half
from tools.notebooks import NBS, code_of

SEEDS, LOOKS = (0, 1, 2), 6
POOLS = ("dot", "additive", "max", "global")
ATTEND = (8000, 4000, 6000)  # pictures drawn; of the last two only the hard ones are kept
ATTEND_STEPS = 700
LONGER = ("additive", "max")
RATES = {"attend": (1e-3, 3e-3), "channels": (5e-4, 1e-3), "draw": (3e-3, 1e-2, 2e-2)}
DRAW = dict(image_size=16, steps=8, hidden_dim=64, latent_dim=8)
GLIMPSES = {"attention": 5, "whole image": None}
DRAW_STEPS, CHANNEL_STEPS = 1500, 1200
BATCH = {"attend": 32, "channels": 32, "draw": 64}


def cells(*names):
    """What some cells of the chapter define."""
    found = {**vars(data), **vars(spatial)}
    sources = {cell.id: cell for cell in nbformat.read(NBS / "45_spatial.ipynb", 4).cells}
    for name in names:
        exec(code_of(sources[name]), found)
    return found


def as_bytes(images):
    return (255 * images).round().byte()


def pixels(images):
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
    made, splits = cells("asked-scenes"), ("train", "train", "test")
    found = []
    for seed, (count, split) in enumerate(zip(counts, splits)):
        make = made["asked_scenes"] if seed == 0 else made["hard_scenes"]
        found.append(make(count, split, seed))
        found[-1]["image"] = as_bytes(found[-1]["image"])
    return found


@torch.no_grad()
def attend_scores(model, part):
    """Accuracy, and how much of the map lies on the object, and on others."""
    logits, weights = model.eval()(pixels(part["image"]), part["question"])
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
        rows, columns = near.any(1).nonzero()[:, 0], near.any(0).nonzero()[:, 0]
        cut = near[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        stamps.append(F.interpolate(cut[None, None].float(), (size, size))[0])
    return torch.stack(stamps)


class Attend(Runs):
    """The runs of the first part."""

    def __init__(self, path, minutes, tiny):
        super().__init__(path, minutes, runs=[], baselines=[])
        self.tiny, self.parts = tiny, attend_parts((40, 150, 150) if tiny else ATTEND)

    def run(self, pool, lr, seed, times=1):
        steps = times * (2 if self.tiny else ATTEND_STEPS)

        def make():
            train, valid, test = self.parts
            torch.manual_seed(seed)
            model = AttentiveConvnet(len(data.KINDS), pool, questions=6)

            def loss(model, batch):
                image, question, label = batch
                logits, _ = model(pixels(image), question)
                return F.cross_entropy(logits, label, reduction="sum"), len(label)

            tensors = (train[key] for key in ("image", "question", "label"))
            history = fit(
                model,
                loss,
                epochs(*tensors, batch_size=8 if self.tiny else BATCH["attend"], seed=seed),
                **dict(steps=steps, lr=lr, warmup=steps // 15, betas=(0.9, 0.999), seed=seed),
                **dict(evaluate=lambda m: attend_scores(m, test), every=max(1, steps // LOOKS)),
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
            palette = cells("asked-scenes")["PALETTE"]
            stamps = [color_stamps(part, palette) for part in self.parts]
            pairs = [(x[:3000], part["label"][:3000]) for x, part in zip(stamps, self.parts)]
            return svm_accuracy(*pairs)

        self.once(dict(name="support vectors"), make, "baselines")

    def all(self):
        self.baseline()
        first, *others = SEEDS[:1] if self.tiny else SEEDS
        for pool in POOLS:
            rates = RATES["attend"][: 1 if self.tiny else None]
            tried = {lr: self.run(pool, lr, first)["valid"]["accuracy"] for lr in rates}
            best = max(tried, key=tried.get)
            for seed in others:
                self.run(pool, best, seed)
            if pool in LONGER:
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
        self.tiny, make = tiny, cells("placed-digits")["placed_digits"]
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
                lambda model, batch: (draw_loss(model(*batch), *batch).sum(), len(batch[0])),
                epochs(train, batch_size=8 if self.tiny else BATCH["draw"], seed=seed),
                **dict(steps=steps, lr=lr, warmup=steps // 15, betas=(0.9, 0.999), seed=seed),
                **dict(weight_decay=0.0, clip=5.0, every=max(1, steps // LOOKS)),
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
            rates = RATES["draw"][: 1 if self.tiny else None]
            tried = {lr: self.run(name, lr, first)["valid"]["bound"] for lr in rates}
            best = min(tried, key=tried.get)
            for seed in others:
                self.run(name, best, seed)
            for seed in (first, *others):
                self.run(name, best, seed, times=4)


# --- channels ---------------------------------------------------------------------------------


@torch.no_grad()
def right(model, part):
    logits = torch.cat([model.eval()(pixels(x)) for x in part["image"].split(250)])
    return round((logits.argmax(1) == part["label"]).float().mean().item(), 4)


@torch.no_grad()
def gates_by_class(model, part):
    """Mean gates of the last squeeze-and-excitation for each class: rows of the record."""
    gates, layers = [], [m for m in model if isinstance(m, spatial.SqueezeExcite)]
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
        self.tiny, self.made = tiny, cells("gated-convnet")
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
            gate, widths = self.made["GATES"][name]
            model = self.made["gated_convnet"](gate, widths)

            def loss(model, batch):
                image, label = batch
                logits = model(pixels(image))
                return F.cross_entropy(logits, label, reduction="sum"), len(label)

            history = fit(
                model,
                loss,
                epochs(
                    train["image"],
                    train["label"],
                    batch_size=8 if self.tiny else BATCH["channels"],
                    seed=seed,
                ),
                **dict(steps=steps, lr=lr, warmup=steps // 15, betas=(0.9, 0.999), seed=seed),
                **dict(evaluate=lambda m: {"accuracy": right(m, test)}),
                every=max(1, steps // LOOKS),
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
        for name in self.made["GATES"]:
            rates = RATES["channels"][: 1 if self.tiny else None]
            tried = {lr: self.run(name, lr, first)["valid"] for lr in rates}
            for seed in others:
                self.run(name, max(tried, key=tried.get), seed)


PARTS = {"attend": Attend, "draw": Drawings, "channels": Channels}


def main():
    parser = experiment_parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    arguments = parser.parse_args()
    path = arguments.out / f"glimpses_{arguments.part}.json"
    bench = PARTS[arguments.part](path, arguments.minutes, arguments.tiny)
    bench.work(bench.all)


if __name__ == "__main__":
    main()
