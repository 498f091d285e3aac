"""What was run for 43_panoptic: `python -m benchmarks.panoptic COMMAND --out FOLDER`.

    queries  train `PanopticDETR` in two stages, and the variants of its softmax and its losses
    pixels   classify single pixels with a forest and with a network
    coco     measure the panoptic quality of the published weights on COCO
    speed    time a forward pass next to the panoptic DETR of the transformers library

The scenes of the first two have two photographs that meet at a line, and one to three shapes on
them: two classes of stuff, four of things, 48 × 48 pixels. There are three seeds, and the test
scenes show unseen parts of the photographs. Learning rates and thresholds are chosen with the
first seed on other scenes from the training parts of the photographs.

The records, FOLDER/panoptic.json and panoptic_pixels.json, are written after every run; weights
go to FOLDER/checkpoints, those of the first seed to FOLDER/panoptic_shapes.safetensors.
"""

import json
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy import ndimage

from attnlib import data, detr, panoptic
from attnlib.data import box_targets
from attnlib.detr import (
    DETR,
    Features,
    HungarianMatcher,
    SetCriterion,
    SmallBackbone,
    small_detr,
)
from attnlib.inference import optimize_for_inference
from attnlib.models import create_model, load_pretrained
from attnlib.panoptic import (
    PanopticDETR,
    confident_queries,
    mask_loss,
    panoptic_postprocess,
    panoptic_quality,
)
from attnlib.train import fit, shuffled_batches
from benchmarks import runner, timing
from benchmarks.chapter import run_cells
from benchmarks.detr import peer_config
from benchmarks.records import write_record
from benchmarks.runner import Commands, Runs
from benchmarks.timing import OPTIMIZED, OURS

page = run_cells("43_panoptic", "scenes", modules=[data, detr, panoptic])
panoptic_scenes = page.panoptic_scenes
label_maps = page.label_maps
small_panoptic = page.small_panoptic
SEEDS = (0, 1, 2)
SIZE = 48
THINGS = range(4)
NO_OBJECT = 0.3  # more than in COCO: 4 of 10 queries have an object, there 7 of 100
RATES = (5e-4, 1e-3, 2e-3)
HEAD_RATES = (3e-3, 1e-2, 3e-2)
PIXEL_RATES = (1e-3, 3e-3, 1e-2)
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
    batches = shuffled_batches(
        data["image"], classes(data)[:, 4::8, 4::8], batch_size=32, seed=seed
    )

    def loss_fn(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) * len(y), len(y)

    fit(
        model,
        batches,
        loss_fn=loss_fn,
        steps=steps,
        lr=2e-3,
        warmup=steps // 10,
        log_every=steps,
    )
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
        out = model.eval()(x, choose=lambda out: confident_queries(out.logits, threshold))
        found += [
            panoptic_postprocess(logits, masks, THINGS, (SIZE, SIZE), threshold)
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
        segments = np.zeros(kind.shape, dtype=np.int64)
        infos = []
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
    from sklearn.ensemble import ExtraTreesClassifier  # which not every machine has

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
        self.tiny = tiny
        self.kept = {}
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
        log_every = max(1, steps // 8)
        options = (
            dict(warmup=steps // 20, max_grad_norm=0.5, weight_decay=1e-4, log_every=log_every)
            | options
        )
        return fit(model, batches, loss_fn=loss_fn, steps=steps, lr=lr, **options)

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
        path = self.weights(seed, lr, steps)
        data = self.train
        criterion = SetCriterion(6, no_object=NO_OBJECT)

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
            batches = shuffled_batches(*rows, batch_size=16, seed=seed)
            history = self.fit(model, loss_fn, batches, steps, lr, seed=seed, evaluate=evaluate)
            save_file(model.state_dict(), path)
            return dict(history=history)

        return self.once(dict(seed=seed, lr=lr, steps=steps), make, "detectors")

    def weights(self, seed, lr, steps):
        return self.folder / f"panoptic-detector-{seed}-{lr}-{steps}.safetensors"

    def detector(self, seed):
        """The detector of a seed, its features and matching, at the rate that is best for the
        first seed in shorter runs."""
        tuning = self.steps["tuning"]
        steps = self.steps["detector"]
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

        batches = shuffled_batches(matched, masks, *features, batch_size=16, seed=seed)
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

            batches = shuffled_batches(
                self.train["image"], classes(self.train), batch_size=16, seed=seed
            )
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


# --- the published model on COCO -------------------------------------------------------------

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def read_picture(path, shorter=800, longer=1333):
    """A standardized picture (1, 3, H, W), and its size (rows, columns) in the file."""
    picture = Image.open(path).convert("RGB")
    size = picture.size[::-1]
    scale = min(shorter / min(size), longer / max(size))
    x = picture.resize([round(n * scale) for n in picture.size], Image.BILINEAR)
    x = torch.from_numpy(np.array(x)).permute(2, 0, 1) / 255  # (H, W, 3) -> (3, H, W)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return ((x - mean) / std)[None], size


def read_truth(path, infos):
    """A label map (H, W) whose numbers are R + 256 G + 65,536 B, and its list."""
    rgb = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).long()  # (H, W, 3)
    segments = (rgb * torch.tensor([1, 256, 65536])).sum(-1)
    there = set(segments.unique().tolist())
    return segments, [info for info in infos if info["id"] in there]


@torch.inference_mode()
def evaluate(model, images, annotations, threshold=0.85, count=None):
    """`panoptic_quality` of a model on COCO's pictures, or on the first so many.

    `images` is a folder, `annotations` the path of the panoptic annotations.
    """
    data = json.loads(Path(annotations).read_text())
    names = {row["id"]: row["file_name"] for row in data["images"]}
    things = {row["id"] for row in data["categories"] if row["isthing"]}
    device = next(model.parameters()).device
    found = []
    truths = []
    for row in data["annotations"][:count]:
        x, size = read_picture(Path(images) / names[row["image_id"]])
        out = model.eval()(
            x.to(device), choose=lambda found: confident_queries(found.logits, threshold)
        )
        # as the authors do: to the size that the model saw, and from there to the picture's
        segments, infos = panoptic_postprocess(
            out.logits[0].cpu(), out.masks[0].cpu(), things, x.shape[2:], threshold
        )
        segments = F.interpolate(segments[None, None].double(), size)[0, 0].long()
        there = set(segments.unique().tolist())
        found.append((segments, [info for info in infos if info["id"] in there]))
        masks = Path(annotations).with_suffix("") / row["file_name"]
        truths.append(read_truth(masks, row["segments_info"]))
    return panoptic_quality(found, truths, things)


def coco(arguments):
    """Measure the panoptic quality of `detr_resnet50_panoptic` on COCO.

    The published weights of `detr_resnet50_panoptic` on the 5,000 validation pictures; the
    authors report a PQ of 43.4. B is panoptic_val2017.json; its masks lie beside it in the
    folder panoptic_val2017, A is the folder val2017. One picture at a time, its shorter side
    scaled to 800 pixels, but the longer to at most 1,333; the label map has the picture's own
    size.

    The record is FOLDER/panoptic_coco.json.
    """
    weights = True if arguments.weights == "True" else arguments.weights
    model = create_model("detr_resnet50_panoptic", pretrained=weights).to(arguments.device)
    count = 2 if arguments.tiny else None
    found = evaluate(model, arguments.images, arguments.annotations, count=count)
    print({name: found[name] for name in ("all", "things", "stuff")})
    write_record(arguments.out / "panoptic_coco.json", found, arguments.device)


# --- speed -----------------------------------------------------------------------------------

PEER = "transformers"
KEPT = "10 masks"


def pair(tiny):
    """Ours and theirs, with the same weights."""
    import transformers  # which not every machine has

    if tiny:
        backbone = "resnet18"
        width = 128
        layers = 1
    else:
        backbone = "resnet50"
        width = 256
        layers = 6
    config = peer_config(backbone, width, layers, num_labels=250)
    torch.manual_seed(0)
    theirs = transformers.DetrForSegmentation(config)
    ours = PanopticDETR(DETR(250, 100, layers, layers, backbone, width), joint_softmax=True)
    load_pretrained(ours, theirs.state_dict())
    return ours, theirs


def ten(found):
    """Of each image the ten queries that are surest of a class."""
    score = found.logits.softmax(-1)[..., :-1].amax(-1)  # (B, Q)
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, score.topk(10).indices, True)


def forward_calls(tiny, x, left_out):
    """The whole models, and the masks alone."""
    ours, theirs = (model.eval().to(x) for model in pair(tiny))
    features = ours.detr.forward_features(x)
    found = ours.detr.forward_head(features.decoded)
    every = torch.ones_like(found.logits[..., 0], dtype=torch.bool)
    calls = {
        PEER: lambda: theirs(x),
        OURS: lambda: ours(x),
        f"{OURS}, {KEPT}": lambda: ours(x, choose=ten),
        "masks alone": lambda: ours.forward_masks(features, every),
        f"masks alone, {KEPT}": lambda: ours.forward_masks(features, ten(found)),
    }
    if x.device.type == "cpu":
        fast = timing.attempt(left_out, OPTIMIZED, lambda: optimize_for_inference(ours))
        if fast is not None:
            calls[OPTIMIZED] = lambda: fast(x)
            calls[f"{OPTIMIZED}, {KEPT}"] = lambda: fast(x, choose=ten)
    return calls


@torch.inference_mode()
def measure(x, arguments, left_out):
    """A row for each contestant."""
    calls = forward_calls(arguments.tiny, x, left_out)
    times = timing.warm_turns(calls, arguments.repeats, arguments.device, left_out)
    return [dict(what=name, **timing.median_row(times, name, PEER)) for name in times]


def speed(arguments):
    """Time a forward pass next to the panoptic DETR of the transformers library.

    Both have the same random weights and get the same picture, 320 × 320 pixels. transformers
    computes a mask for each of 100 queries. Ours does so too, and then for ten alone, as many
    as are kept of a usual picture; both of the plain model and of its copy that is optimized
    for inference. The masks are timed on their own as well: without the detector, whose
    features are given. The record is FOLDER/panoptic_speed_DEVICE.json.
    """
    device = arguments.device
    size = 64 if arguments.tiny else 320
    torch.set_num_threads(1)
    x = torch.randn(1, 3, size, size, device=device)
    path = arguments.out and arguments.out / f"panoptic_speed_{device}.json"
    known = dict(tiny=arguments.tiny, size=f"{size} × {size}")
    bench = runner.Rows(path, device, arguments.minutes, **known)

    def go():
        print(*bench.once(dict(task="forward"), partial(measure, x, arguments)), sep="\n")

    bench.work(go)


def queries(arguments):
    """Train `PanopticDETR` in two stages, as its authors do.

    First a small DETR learns the boxes of things and stuff, on a backbone that has learned to
    classify single pixels. Then it is frozen, and the attention maps and convolutions of
    `PanopticDETR` learn the masks. The variants have one softmax over all heads, as the
    published weights do, or one of the two losses alone.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = Panoptic(arguments.out / "panoptic.json", arguments.minutes, arguments.tiny)
    bench.work(bench.queries)


def pixels(arguments):
    """Classify single pixels; connected pixels of a class are the things.

    The methods are a forest of scikit-learn, which sees the pixels around, and a network with
    the same backbone as the detector.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = Panoptic(arguments.out / "panoptic_pixels.json", arguments.minutes, arguments.tiny)
    bench.work(bench.pixels)


def main(arguments=None):
    commands = Commands(__doc__)
    commands.experiment("queries", queries)
    commands.experiment("pixels", pixels)
    parser = commands.experiment("coco", coco)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--annotations", type=Path, required=True)
    parser.add_argument("--weights", default="True", help="a file, else they are fetched")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    commands.timing("speed", speed, repeats=7)
    commands.run(arguments)


if __name__ == "__main__":
    main()
