"""Panoptic segmentation of drawn scenes: `python -m benchmarks.panoptic PART --out FOLDER`.

Two photographs meet at a line, and one to three shapes lie on them: two classes of stuff, four
of things, 48 × 48 pixels. Three seeds, tested on unseen parts of the photographs. The parts are

- queries: as the authors do it, in two stages. A small DETR learns the boxes of things and
  stuff, on a backbone that has learned to name single pixels; then it is frozen, and the
  attention maps and the convolutions of `PanopticDETR` learn the masks. The variants have one
  softmax over all heads, as the published weights, or one of the two losses alone;
- pixels: a forest of scikit-learn that names single pixels from those around them, and a
  network that does so with the same backbone; connected pixels are their things.

Learning rates and thresholds are chosen on other scenes from the training parts of the
photographs, with the first seed. The records, FOLDER/panoptic.json and panoptic_pixels.json,
are written after every run; weights go to FOLDER/checkpoints, those of the first seed to
FOLDER/panoptic_shapes.safetensors. With --minutes the command stops after that time, and goes
on when it is given again. With --tiny a few runs take a few steps, to see that all works; such
a record means nothing.
"""

import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from scipy import ndimage
from sklearn.ensemble import ExtraTreesClassifier

from attnlib.data import box_targets
from attnlib.detr import Features, HungarianMatcher, SetLoss, SmallBackbone, small_detr
from attnlib.panoptic import (
    confident,
    label_maps,
    mask_loss,
    merge,
    panoptic_quality,
    panoptic_scenes,
    small_panoptic,
)
from attnlib.train import epochs, fit
from benchmarks.runner import Runs, experiment_parser

SEEDS, SIZE, THINGS = (0, 1, 2), 48, range(4)
NO_OBJECT = 0.3  # more than in COCO: 4 of 10 queries have an object, there 7 of 100
RATES, HEAD_RATES, PIXEL_RATES = (5e-4, 1e-3, 2e-3), (3e-3, 1e-2, 3e-2), (1e-3, 3e-3, 1e-2)
THRESHOLDS = (0.35, 0.5, 0.7, 0.85, 0.95)
STEPS = dict(pretraining=400, tuning=400, detector=2400, head=500, pixels=1600)
TINY = dict(pretraining=2, tuning=3, detector=4, head=4, pixels=4)
VARIANTS = {  # what differs from the first: the softmax, or the weights of the losses
    "per head": {},
    "joint softmax": dict(joint_softmax=True),
    "dice alone": dict(weights={"mask": 0, "dice": 1}),
    "focal alone": dict(weights={"mask": 1, "dice": 0}),
}


def pretrained(data, steps, seed):
    """A backbone that has learned to name the pixel in the middle of each cell of its last map;
    DETR's own backbone comes from ImageNet."""
    torch.manual_seed(seed)
    model = nn.Sequential(SmallBackbone(), Last(), nn.Conv2d(64, 6, 1))
    batches = epochs(data["image"], classes(data)[:, 4::8, 4::8], batch_size=32, seed=seed)

    def loss_fn(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) * len(y), len(y)

    fit(model, loss_fn, batches, steps=steps, lr=2e-3, warmup=steps // 10, every=steps)
    return model[0]


class Last(nn.Module):
    """The last map."""

    def forward(self, maps):
        return maps[-1]


@torch.no_grad()
def all_features(detr, images):
    """The `Features` of many images that the masks are made of, as a tuple of tensors: the last
    layer's queries, the memory, the projected map, and the finer maps."""
    parts = []
    for x in images.split(250):
        f = detr.eval().forward_features(x)
        parts.append((f.decoded[-1], f.memory, f.projected, *f.maps[:-1]))
    return tuple(torch.cat(part) for part in zip(*parts))


def as_features(decoded, memory, projected, *maps):
    """The `Features` of a batch of such rows."""
    return Features(decoded[None], memory, [*maps, None], projected, None)


@torch.no_grad()
def predict(model, images, threshold=0.35):
    """Label maps of many images."""
    found = []
    for x in images.split(100):
        out = model.eval()(x, choose=lambda out: confident(out.logits, threshold))
        found += [
            merge(logits, masks, THINGS, (SIZE, SIZE), threshold)
            for logits, masks in zip(out.logits, out.masks)
        ]
    return found


def rounded(found):
    """What a record keeps of `panoptic_quality`."""
    return {
        name: {key: round(value, 4) for key, value in found[name].items()}
        for name in ("all", "things", "stuff")
    }


class PixelNet(nn.Module):
    """Names each pixel: the same backbone, its maps brought to one size, two convolutions."""

    def __init__(self, width=48):
        super().__init__()
        self.backbone = SmallBackbone()
        self.adapters = nn.ModuleList(
            nn.Conv2d(c, width, 1) for c in SmallBackbone().num_channels
        )
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.output = nn.Conv2d(width, 6, 3, padding=1)

    def forward(self, x):
        """Logits (B, 6, 48, 48)."""
        maps = [adapter(x) for adapter, x in zip(self.adapters, self.backbone(x))]
        size = maps[0].shape[2:]
        x = sum(F.interpolate(x, size, mode="bilinear") for x in maps).relu()
        return F.interpolate(self.output(self.mix(x).relu()), (SIZE, SIZE), mode="bilinear")


def classes(data):
    """The class of each pixel (n, 48, 48); -1 where there is none."""
    chosen = data["mask"] & (data["label"] >= 0)[..., None, None]
    of_pixel = torch.where(chosen, data["label"][..., None, None], -1)
    return of_pixel.amax(1)  # no two masks overlap


def connected(maps, smallest=4):
    """Label maps from the class of each pixel (n, H, W): stuff as it is, connected pixels of
    things; a piece takes the class that most of its pixels have."""
    found = []
    for kind in maps.numpy():
        segments, infos = np.zeros(kind.shape, dtype=np.int64), []
        pieces = [(kind == c, c) for c in (4, 5)]
        lumps, count = ndimage.label((kind >= 0) & (kind < 4))
        pieces += [
            (lumps == i, np.bincount(kind[lumps == i]).argmax()) for i in range(1, count + 1)
        ]
        for there, c in pieces:
            if there.sum() > smallest:
                infos.append(dict(id=len(infos) + 1, category_id=int(c)))
                segments[there] = len(infos)
        found.append((torch.from_numpy(segments), infos))
    return found


def around(images, rows, columns):
    """Colors at 81 places around each of k pixels of an image, and where it is: (n, k, 245)."""
    far = torch.tensor([-14, -8, -4, -2, 0, 2, 4, 8, 14])
    padded = F.pad(images, (14, 14, 14, 14), mode="reflect")
    i = rows[..., None, None] + 14 + far[:, None]  # (n, k, 9, 1)
    j = columns[..., None, None] + 14 + far  # (n, k, 1, 9)
    image = torch.arange(len(images)).view(-1, 1, 1, 1)
    colors = padded[image, :, i, j].flatten(2)  # (n, k, 9, 9, 3) -> (n, k, 243)
    return torch.cat([colors, rows[..., None], columns[..., None]], dim=2)


def forest(train, test, trees, per_image=15):
    """The class of each pixel of the test images, by a forest on the pixels around it."""
    torch.manual_seed(0)
    rows, columns = torch.randint(0, SIZE, (2, len(train["image"]), per_image))
    kinds = classes(train)[torch.arange(len(rows))[:, None], rows, columns].flatten()
    model = ExtraTreesClassifier(trees, min_samples_leaf=2, random_state=0)
    model.fit(around(train["image"], rows, columns).flatten(0, 1).numpy(), kinds.numpy())
    every = torch.cartesian_prod(torch.arange(SIZE), torch.arange(SIZE))  # (48 · 48, 2)
    found = [
        model.predict(around(image[None], *every.T[:, None])[0].numpy())
        for image in test["image"]
    ]
    return torch.from_numpy(np.stack(found)).view(-1, SIZE, SIZE)


class Panoptic(Runs):
    """The runs of the record."""

    def __init__(self, path, minutes, tiny):
        super().__init__(path, minutes, runs=[], detectors=[])
        self.tiny, self.kept = tiny, {}
        self.steps = TINY if tiny else STEPS
        counts = (32, 8, 8) if tiny else (4000, 300, 1000)
        self.train, self.valid, self.test = (
            panoptic_scenes(count, split, seed=seed)
            for count, (split, seed) in zip(counts, (("train", 0), ("train", 1), ("test", 2)))
        )
        self.true = {name: label_maps(getattr(self, name)) for name in ("valid", "test")}
        self.folder = path.parent / "checkpoints"
        self.folder.mkdir(parents=True, exist_ok=True)

    def quality(self, found, part):
        return panoptic_quality(found, self.true[part], THINGS)

    def fit(self, model, loss_fn, batches, steps, lr, **options):
        every = max(1, steps // 8)
        options = dict(warmup=steps // 20, clip=0.5, weight_decay=1e-4, every=every) | options
        return fit(model, loss_fn, batches, steps=steps, lr=lr, **options)

    # the detector

    def backbone(self, seed):
        """The state of a backbone that has learned to name pixels; it is stored."""
        path = self.folder / f"panoptic-backbone-{seed}.safetensors"
        if not path.exists():
            model = pretrained(self.train, self.steps["pretraining"], seed)
            save_file(model.state_dict(), path)
        return load_file(path)

    def detector_run(self, seed, lr, steps):
        """The entry of a detector, whose weights are stored; its loss on validation scenes."""
        path, data = self.weights(seed, lr, steps), self.train
        criterion = SetLoss(6, no_object=NO_OBJECT)

        def loss_fn(model, batch):
            image, label, box = batch
            loss = criterion(model(image), box_targets(label, box, SIZE))["total"]
            return loss * len(image), len(image)

        def evaluate(model):
            some = self.valid
            wanted = box_targets(some["label"], some["box"], SIZE)
            return {"valid": criterion(model(some["image"]), wanted)["total"].item()}

        def make():
            torch.manual_seed(seed)
            model = small_detr(6)
            model.backbone.load_state_dict(self.backbone(seed))
            rows = [data[key] for key in ("image", "label", "box")]
            batches = epochs(*rows, batch_size=16, seed=seed)
            history = self.fit(model, loss_fn, batches, steps, lr, seed=seed, evaluate=evaluate)
            save_file(model.state_dict(), path)
            return dict(history=history)

        return self.once(dict(seed=seed, lr=lr, steps=steps), make, "detectors")

    def weights(self, seed, lr, steps):
        return self.folder / f"panoptic-detector-{seed}-{lr}-{steps}.safetensors"

    def detector(self, seed):
        """The detector of a seed, its features and matching, at the rate that is best for the
        first seed in shorter runs."""
        tuning, steps = self.steps["tuning"], self.steps["detector"]
        rates = RATES[:1] if self.tiny else RATES
        tried = {lr: self.detector_run(0, lr, tuning) for lr in rates}
        lr = min(rates, key=lambda lr: tried[lr]["history"][-1]["valid"])
        self.detector_run(seed, lr, steps)
        if seed not in self.kept:
            model = small_detr(6)
            model.load_state_dict(load_file(self.weights(seed, lr, steps)))
            model.eval().requires_grad_(False)
            found = self.train
            features = all_features(model, found["image"])
            matched = self.matched(model, features[0], found)
            self.kept = {seed: (model, features, matched)}  # one at a time
        return self.kept[seed]

    @torch.no_grad()
    def matched(self, model, decoded, data):
        """For each query the number of the object that it is matched to, or -1: (n, Q)."""
        found = torch.full(decoded.shape[:2], -1)
        wanted = box_targets(data["label"], data["box"], SIZE)
        out = model.forward_head(decoded[None])
        matched = HungarianMatcher()(out.logits[None], out.boxes[None], wanted)[0]
        for row, (i, j) in zip(found, matched):
            row[i] = j
        return found

    # the masks

    def head(self, seed, steps, lr, weights=None, **options):
        """Train attention maps and convolutions on a frozen detector: model and history."""
        detr, features, matched = self.detector(seed)
        torch.manual_seed(seed)
        model = small_panoptic(**options)
        model.detr = detr
        weights = weights or {"mask": 1, "dice": 1}
        # objects that are there come first in each row, as `targets` has them
        order = (self.train["label"] < 0).int().argsort(dim=1, stable=True)
        masks = self.train["mask"].take_along_dim(order[..., None, None], 1)

        def loss_fn(model, batch):
            matched, masks, *features = batch
            pairs = [((row >= 0).nonzero()[:, 0], row[row >= 0]) for row in matched]
            wanted = [dict(labels=x, masks=x) for x in masks]
            found = model.forward_masks(as_features(*features), matched >= 0)
            terms = mask_loss(found, wanted, pairs)
            return sum(weights[key] * x for key, x in terms.items()) * len(masks), len(masks)

        def evaluate(model):
            some = {key: x[:100] for key, x in self.valid.items()}
            found = predict(model, some["image"], 0.5)
            truth = self.true["valid"][:100]
            return {"valid": panoptic_quality(found, truth)["all"]["pq"]}

        batches = epochs(matched, masks, *features, batch_size=16, seed=seed)
        history = self.fit(model, loss_fn, batches, steps, lr, seed=seed, evaluate=evaluate)
        return model, history

    def run(self, variant, seed, lr):
        """The entry of a model: a threshold chosen on validation scenes, quality on others."""
        steps = self.steps["head"]

        def make():
            self.detector(seed)
            began = time.process_time()
            model, history = self.head(seed, steps, lr, **VARIANTS[variant])
            seconds = round(time.process_time() - began, 1)
            save_file(model.state_dict(), self.head_weights(variant, seed, lr))
            return dict(
                history=history,
                seconds=seconds,
                **self.judge(
                    lambda part, t: predict(model, getattr(self, part)["image"], t), THRESHOLDS
                ),
            )

        return self.once(dict(variant=variant, seed=seed, lr=lr, steps=steps), make)

    def head_weights(self, variant, seed, lr):
        return self.folder / f"panoptic-{variant.replace(' ', '-')}-{seed}-{lr}.safetensors"

    def judge(self, found, thresholds=(None,)):
        """Quality on validation scenes at each threshold, and on test scenes at the best."""
        valid = {t: self.quality(found("valid", t), "valid")["all"]["pq"] for t in thresholds}
        threshold = max(valid, key=valid.get)
        test = rounded(self.quality(found("test", threshold), "test"))
        return dict(valid=round(valid[threshold], 4), threshold=threshold, test=test)

    def tuned(self, run, rates, seeds=SEEDS):
        """Runs of all seeds at the rate that is best for the first; that rate."""
        lr = max(rates, key=lambda lr: run(seeds[0], lr)["valid"])
        for seed in seeds[1:]:
            run(seed, lr)
        return lr

    # what has no queries

    def pixel_network(self, seed, lr):
        """The entry of a network that names pixels, and whose segments are connected."""
        steps = self.steps["pixels"]

        def make():
            torch.manual_seed(seed)
            model = PixelNet()
            model.backbone.load_state_dict(self.backbone(seed))

            def loss_fn(model, batch):
                return F.cross_entropy(model(batch[0]), batch[1]) * len(batch[1]), len(batch[1])

            batches = epochs(self.train["image"], classes(self.train), batch_size=16, seed=seed)
            history = self.fit(model, loss_fn, batches, steps, lr, seed=seed)

            @torch.no_grad()
            def found(part, _):
                images = getattr(self, part)["image"].split(250)
                return connected(torch.cat([model.eval()(x).argmax(1) for x in images]))

            return dict(history=history, **self.judge(found))

        what = dict(baseline="pixel network", seed=seed, lr=lr, steps=steps)
        return self.once(what, make)

    def forest(self):
        def make():
            trees = 2 if self.tiny else 30
            kinds = forest(self.train, self.test, trees)
            return dict(test=rounded(self.quality(connected(kinds), "test")), trees=trees)

        return self.once(dict(baseline="forest"), make)

    def queries(self):
        """The model of the chapter and its variants."""
        for variant in VARIANTS:
            rates, seeds = self.choice(HEAD_RATES)
            lr = self.tuned(lambda seed, lr, v=variant: self.run(v, seed, lr), rates, seeds)
            if variant == "per head":
                tensors = load_file(self.head_weights(variant, seeds[0], lr))
                tensors = {
                    k: x.half() if x.is_floating_point() else x for k, x in tensors.items()
                }
                save_file(tensors, self.path.parent / "panoptic_shapes.safetensors")

    def pixels(self):
        """What has no queries."""
        self.forest()
        self.tuned(self.pixel_network, *self.choice(PIXEL_RATES))

    def choice(self, rates):
        return (rates[:1], SEEDS[:1]) if self.tiny else (rates, SEEDS)


def main():
    parser = experiment_parser(__doc__)
    parser.add_argument("part", choices=["queries", "pixels"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "panoptic" if arguments.part == "queries" else "panoptic_pixels"
    path = arguments.out / f"{name}.json"
    bench = Panoptic(path, arguments.minutes, arguments.tiny)
    bench.work(getattr(bench, arguments.part))


if __name__ == "__main__":
    main()
