"""What was run for 42_detr: `python -m benchmarks.detr COMMAND --out FOLDER`.

    shapes  train plain DETR on shapes, with its backbone pre-trained or not
    digits  train DETR with anchors as queries on digits, with and without denoising
    slow    train plain DETR on digits
    coco    judge a published DETR on COCO's validation images
    speed   time DETR next to the DETR of the transformers library

The scenes of the first three are those of `attnlib.data.detection_scenes`: one to three objects
in 48 × 48 pixels; photographs and digits of the test scenes are not in the training scenes. The
detectors are `small_detr`. Each has three seeds, and some have runs that are four times as
long. The backbone is pre-trained, as in the paper, by classifying the object in crops of other
scenes. The learning rate is chosen on validation scenes, which show the digits and photographs
of the training scenes in new scenes; the results are those of test scenes. During training,
each run records AP and AP50 on the test scenes (pycocotools), the entropy of the
cross-attention of the matched queries, and how many objects have changed their query since the
last evaluation.

A pipeline that learns no boxes is the baseline: bright pixels, their connected components
(SciPy), each classified by a support vector machine (scikit-learn).

The record, FOLDER/detr_COMMAND.json, is written after every run; the weights of one detector go
to detr_shapes.safetensors and detr_digits.safetensors, all others to FOLDER/checkpoints.
`longer` trains on a GPU (`python -m benchmarks.runs detr`).
"""

import contextlib
import io
import math
import shutil
import statistics
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

from attnlib.attention import record_attention
from attnlib.data import box_targets, detection_scenes
from attnlib.detr import (
    DETR,
    AnchorDecoderLayer,
    BoxQueryDETR,
    IdentityMatcher,
    SetCriterion,
    SmallBackbone,
    noised_targets,
    postprocess,
    small_detr,
)
from attnlib.inference import optimize_for_inference
from attnlib.models import _IMAGENET, create_model, load_pretrained
from attnlib.train import fit, shuffled_batches
from benchmarks import runner, timing
from benchmarks.records import write_record
from benchmarks.runner import Commands, Runs
from benchmarks.timing import OPTIMIZED, OURS

SIZE = 48
BATCH = 16
SEEDS = (0, 1, 2)
CLASSES = {"shapes": 4, "digits": 10}
COUNTS = {"train": 4000, "valid": 300, "test": 400}
LOOKS = 12
PRETRAINING = 900


class RecordedBoxQueryDETR(BoxQueryDETR):
    """`BoxQueryDETR` as the recorded runs start: its decoder keeps the start of its layers,
    because in these runs it was made after DETR's own initialization."""

    def init_layers(self, layers):
        if not any(isinstance(layer, AnchorDecoderLayer) for layer in layers):
            super().init_layers(layers)


VARIANTS = {  # name: detector, copies to denoise, is the backbone pre-trained?
    "plain": (DETR, 0, True),
    "not pre-trained": (DETR, 0, False),
    "anchors": (RecordedBoxQueryDETR, 0, True),
    "denoising": (RecordedBoxQueryDETR, 3, True),
}
PARTS = {  # objects, variants, learning rates that each of them tries, steps
    "shapes": ("shapes", ("plain", "not pre-trained"), (5e-4, 1e-3, 2e-3), 1800),
    "digits": ("digits", ("anchors", "denoising"), (5e-4, 1e-3, 2e-3), 1200),
    "slow": ("digits", ("plain",), (5e-4, 1e-3, 2e-3), 1200),
}
LONGER = ("slow", "digits")  # parts whose first variant has a run of four times the steps
KEPT = ("shapes", "digits")  # parts whose first variant's weights are stored
TEMPERATURE = {DETR: 10_000, RecordedBoxQueryDETR: 20}  # the papers'
THRESHOLDS = 0.5, 0.55, 0.6, 0.65, 0.7  # of the pipeline without a network


# --- scenes, scores ---------------------------------------------------------------------------
def parts(kinds, counts):
    """Scenes for training, validation and test."""
    splits = {"train": "train", "valid": "train", "test": "test"}
    return {
        part: detection_scenes(counts[part], splits[part], SIZE, kinds=kinds, seed=seed)
        for seed, part in enumerate(splits)
    }


def pixels(images):
    return 2 * images - 1


def average_precision(found, scenes, any_class=False):
    """AP and AP50 of pycocotools.

    `found` has for each scene a dict of "scores", "labels" and "boxes", corners in pixels. With
    `any_class` all objects are of one class.
    """
    from pycocotools.coco import COCO  # which not every machine has
    from pycocotools.cocoeval import COCOeval

    truth = {"images": [], "annotations": [], "categories": []}
    results = []
    for i, (kind, box, one) in enumerate(zip(scenes["kind"], scenes["box"], found)):
        truth["images"].append({"id": i})
        for label, (x0, y0, x1, y1) in zip(kind.tolist(), box.tolist()):
            if label >= 0:
                width = x1 - x0
                height = y1 - y0
                truth["annotations"].append(
                    {"id": len(truth["annotations"]) + 1, "image_id": i, "iscrowd": 0}
                    | {"category_id": 1 if any_class else label + 1}
                    | {"bbox": [x0, y0, width, height], "area": width * height}
                )
        for label, (x0, y0, x1, y1), score in zip(
            one["labels"].tolist(), one["boxes"].tolist(), one["scores"].tolist()
        ):
            results.append(
                {"image_id": i, "category_id": 1 if any_class else label + 1}
                | {"bbox": [x0, y0, x1 - x0, y1 - y0], "score": score}
            )
    names = {a["category_id"] for a in truth["annotations"]}
    truth["categories"] = [{"id": name} for name in sorted(names)]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        if not results:
            return {"ap": 0.0, "ap50": 0.0}
        score = COCOeval(coco, coco.loadRes(results), "bbox")
        # of any size
        score.params.areaRng = [[0, 1e10]]
        score.params.areaRngLbl = ["all"]
        score.params.maxDets = [100]
        score.evaluate(), score.accumulate()
    precision = score.eval["precision"]  # (thresholds, recalls, classes, 1, 1), -1 if unknown
    ap, ap50 = (float(x[x > -1].mean()) for x in (precision, precision[0]))
    return {"ap": round(ap, 4), "ap50": round(ap50, 4)}


@torch.no_grad()
def detections(model, images):
    """What `postprocess` gives for images from 0 to 1."""
    device = next(model.parameters()).device
    found = []
    for x in images.split(100):
        sizes = torch.full((len(x), 2), images.shape[-1])
        found += postprocess(model.eval()(pixels(x.to(device))), sizes)
    return found


@torch.no_grad()
def inside(model, scenes, matcher):
    """The entropy of matched queries' cross-attention, 1 if uniform, a mean over heads and
    objects for each decoder layer; and which query each object has."""
    targets = box_targets(scenes["kind"], scenes["box"], SIZE)
    with record_attention() as maps:
        output = model.eval()(pixels(scenes["image"]))
    matched = matcher(output.logits, output.boxes, targets)
    queries = [i[j.argsort()].tolist() for i, j in matched]
    image = torch.tensor([b for b, own in enumerate(queries) for _ in own])
    query = torch.tensor([q for own in queries for q in own])
    entropies = []
    for weights in maps[len(model.encoder) + 1 :: 2]:  # (B, h, Q, N) of cross-attention
        entropy = torch.special.entr(weights).sum(-1) / math.log(weights.shape[-1])
        entropies.append(round(entropy[image, :, query].mean().item(), 4))
    return entropies, query


# --- training ---------------------------------------------------------------------------------
def crops(scenes, width=32, seed=0):
    """Pieces (n, 3, width, width) of scenes with one object, which is in them."""
    generator = torch.Generator().manual_seed(seed)
    box = scenes["box"][:, 0]  # (n, 4)
    jitter = 8 * torch.rand(len(box), 2, generator=generator) - 4
    corner = ((box[:, :2] + box[:, 2:] - width) / 2 + jitter).round()
    x, y = corner.clamp(0, SIZE - width).long().T[..., None, None]  # (n, 1, 1) each
    step = torch.arange(width)
    image = torch.arange(len(box))[:, None, None]
    pieces = scenes["image"].permute(0, 2, 3, 1)[image, y + step[:, None], x + step]
    return pieces.permute(0, 3, 1, 2).contiguous()  # (n, w, w, 3) -> (n, 3, w, w)


class Classifier(nn.Module):
    """The small backbone, and a linear layer on all of its last map."""

    def __init__(self, num_classes, width=32):
        super().__init__()
        self.backbone = SmallBackbone()
        places = (width // 8) ** 2
        self.head = nn.Linear(places * self.backbone.num_channels[-1], num_classes)

    def forward(self, x):
        return self.head(self.backbone(x)[-1].flatten(1))


def pretrained(kinds, seed, counts, steps):
    """The state of a backbone that has learned to name objects, and its validation accuracy."""
    data = [
        detection_scenes(count, "train", SIZE, kinds=kinds, objects=1, seed=number)
        for number, count in ((3, counts["train"]), (4, counts["valid"]))
    ]
    (x, y), (unseen, answers) = ((pixels(crops(some)), some["kind"][:, 0]) for some in data)
    torch.manual_seed(seed)
    model = Classifier(CLASSES[kinds])
    began = time.process_time()
    fit(
        model,
        shuffled_batches(x, y, batch_size=min(32, len(x)), seed=seed),
        loss_fn=lambda model, batch: (
            F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
            len(batch[1]),
        ),
        **dict(steps=steps, lr=2e-3, warmup=steps // 20, betas=(0.9, 0.999)),
        **dict(weight_decay=0.05, log_every=steps, seed=seed),
    )
    seconds = round(time.process_time() - began, 1)
    with torch.no_grad():
        accuracy = (model.eval()(unseen).argmax(1) == answers).float().mean()
    return model.backbone.state_dict(), {
        "accuracy": round(accuracy.item(), 4),
        "seconds": seconds,
    }


def loss_function(num_classes, copies):
    """The loss of a batch of images, kinds and boxes, for `fit`."""
    matched = SetCriterion(num_classes)
    restored = SetCriterion(num_classes, matcher=IdentityMatcher())

    def loss(model, batch):
        images, kind, box = batch
        targets = box_targets(kind, box, SIZE)
        if not copies:
            return len(images) * matched(model(images), targets)["total"], len(images)
        noised, wanted = noised_targets(targets, num_classes, copies)
        output = model(images, noised=noised)
        total = matched(output, targets)["total"]
        total = total + restored(output.denoised, wanted)["total"]
        return len(images) * total, len(images)

    return loss


class Look:
    """What a run's history records, and the seconds spent on the way, looks left out."""

    def __init__(self, scenes):
        self.scenes = scenes
        self.seconds = 0.0
        self.began = time.process_time()
        self.few = {key: x[:150] for key, x in scenes["valid"].items()}
        self.matcher = SetCriterion(1).matcher
        self.before = None

    def __call__(self, model):
        self.seconds += time.process_time() - self.began
        test = self.scenes["test"]
        scores = average_precision(detections(model, test["image"]), test)
        entropies, query = inside(model, self.few, self.matcher)
        changed = {}
        if self.before is not None:
            changed["changed"] = round((query != self.before).float().mean().item(), 4)
        self.before = query
        self.began = time.process_time()
        layers = {f"entropy{i}": entropy for i, entropy in enumerate(entropies)}
        return {"seconds": round(self.seconds, 1), **scores, **changed, **layers}


# --- a pipeline without a network -------------------------------------------------------------
def bright_parts(image, threshold, least=20):
    """Boxes (n, 4) in pixels of the connected bright parts of an image (3, H, W)."""
    labels, _ = ndimage.label(image.amax(0).numpy() > threshold, np.ones((3, 3)))
    boxes = [
        (columns.start, rows.start, columns.stop, rows.stop)
        for i, (rows, columns) in enumerate(ndimage.find_objects(labels))
        if (labels[rows, columns] == i + 1).sum() >= least
    ]
    return torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)


def stamp(image, box, size=10):
    """The brightest channel of what is in a box, as size² numbers."""
    x0, y0, x1, y1 = box.int().tolist()
    patch = image.amax(0)[None, None, y0:y1, x0:x1]
    small = F.interpolate(patch, (size, size), mode="bilinear", antialias=True).flatten()
    return (small / small.max().clamp(min=1e-6)).numpy()


def bright_detector(scenes, threshold):
    """A function of images: bright parts, named by a support vector machine."""
    from sklearn.svm import SVC  # which not every machine has

    pairs = [
        (stamp(image, box), label)
        for image, kind, boxes in zip(*(scenes[key] for key in ("image", "kind", "box")))
        for label, box in zip(kind.tolist(), boxes)
        if label >= 0
    ]
    x, y = zip(*pairs)
    machine = SVC(C=10.0).fit(np.stack(x), np.array(y))

    def detect(images):
        found = []
        for image in images:
            boxes = bright_parts(image, threshold)
            labels = np.zeros(0, int)
            scores = np.zeros(0)
            if len(boxes):
                margin = machine.decision_function(
                    np.stack([stamp(image, box) for box in boxes])
                )
                labels = machine.classes_[margin.argmax(1)]
                scores = margin.max(1)
            found.append(
                dict(
                    scores=torch.tensor(scores),
                    labels=torch.tensor(labels),
                    boxes=boxes,
                )
            )
        return found

    return detect


# --- the runs ---------------------------------------------------------------------------------
class Detectors(Runs):
    """The runs of the record of a part."""

    def __init__(self, path, minutes, tiny, part):
        super().__init__(path, minutes, runs=[], pretraining=[], baseline=[])
        self.part = part
        self.tiny = tiny
        self.kinds, self.variants, self.rates, self.steps = PARTS[part]
        if tiny:
            self.rates = self.rates[:1]
            self.steps = 3
        self.scenes = parts(self.kinds, dict.fromkeys(COUNTS, 24) if tiny else COUNTS)

    def checkpoint(self, name):
        """The path of a file that a command which goes on will need."""
        return self.path.parent / "checkpoints" / f"detr-{self.part}-{name}.safetensors"

    def backbone(self, seed):
        """The state of a pre-trained backbone, from its file if it is not from this process."""

        def make():
            counts = {part: len(some["kind"]) for part, some in self.scenes.items()}
            state, entry = pretrained(self.kinds, seed, counts, 2 if self.tiny else PRETRAINING)
            save_file(state, path)
            return entry

        path = self.checkpoint(f"backbone-{seed}")
        self.once(dict(seed=seed), make, "pretraining")
        if not path.exists():  # the record is there, and the file is not kept
            make()
        return load_file(path)

    def trained(self, variant, seed, steps, lr):
        """A trained detector and its history."""
        detector, copies, pre = VARIANTS[variant]
        torch.manual_seed(seed)
        model = small_detr(CLASSES[self.kinds], detector, TEMPERATURE[detector])
        if pre:
            model.backbone.load_state_dict(self.backbone(seed))
        train = self.scenes["train"]
        tensors = pixels(train["image"]), train["kind"], train["box"]
        history = fit(
            model,
            shuffled_batches(*tensors, batch_size=4 if self.tiny else BATCH, seed=seed),
            loss_fn=loss_function(CLASSES[self.kinds], copies),
            **dict(
                steps=steps, lr=lr, warmup=steps // 12, betas=(0.9, 0.999), max_grad_norm=0.5
            ),
            **dict(weight_decay=1e-4, seed=seed, evaluate=Look(self.scenes)),
            log_every=max(1, steps // LOOKS),
        )
        return model, history

    def run(self, variant, seed, lr, times=1):
        """The entry of a training: its history on test scenes, and its scores on others."""
        steps = times * self.steps

        def make():
            model, history = self.trained(variant, seed, steps, lr)
            scores = {}
            for part in ("valid", "test"):
                some = self.scenes[part]
                found = detections(model, some["image"])
                scores[part] = average_precision(found, some)
            scores["any"] = average_precision(found, some, any_class=True)
            weights = {
                key: x.half().contiguous() if x.is_floating_point() else x
                for key, x in model.state_dict().items()
            }
            save_file(weights, self.checkpoint(f"{variant}-{seed}-{lr}-{steps}"))
            return dict(**scores, seconds=history[-1]["seconds"], history=history)

        return self.once(dict(variant=variant, steps=steps, lr=lr, seed=seed), make)

    def baseline(self):
        """Bright parts; the threshold is chosen on validation scenes."""
        few = {key: x[:2000] for key, x in self.scenes["train"].items()}
        valid = self.scenes["valid"]
        test = self.scenes["test"]

        def make():
            tried = {}
            for threshold in THRESHOLDS[: 1 if self.tiny else None]:
                found = bright_detector(few, threshold)(valid["image"])
                tried[threshold] = average_precision(found, valid)["ap50"]
            best = max(tried, key=tried.get)
            found = bright_detector(few, best)(test["image"])
            return {
                "threshold": best,
                "test": average_precision(found, test),
                "any": average_precision(found, test, any_class=True),
            }

        self.once(dict(contestant="bright parts"), make, "baseline")

    def all(self):
        """For each variant the rate that does best on validation scenes with the first seed,
        then the other seeds."""
        first, *others = SEEDS[:1] if self.tiny else SEEDS
        if self.part in ("shapes", "digits"):
            self.baseline()
        for number, variant in enumerate(self.variants):
            tried = {lr: self.run(variant, first, lr)["valid"]["ap50"] for lr in self.rates}
            best = max(tried, key=tried.get)
            for seed in others:
                self.run(variant, seed, best)
            if number == 0 and self.part in KEPT:
                kept = self.checkpoint(f"{variant}-{first}-{best}-{self.steps}")
                if kept.exists():  # else the weights beside the record are these
                    shutil.copyfile(kept, self.path.with_suffix(".safetensors"))
            if number == 0 and self.part in LONGER:
                for seed in (first, *others):
                    self.run(variant, seed, best, times=4)


def longer(folder, tiny):
    """Anchors and denoising on digits for long; for a GPU (see `benchmarks.runs`)."""
    counts = dict.fromkeys(COUNTS, 24) if tiny else COUNTS | {"train": 20_000}
    scenes = parts("digits", counts)
    steps = 2 if tiny else 6000
    torch.manual_seed(0)
    model = small_detr(CLASSES["digits"], RecordedBoxQueryDETR, 20)
    train = scenes["train"]
    history = fit(
        model,
        shuffled_batches(
            pixels(train["image"]), train["kind"], train["box"], batch_size=4 if tiny else 64
        ),
        loss_fn=loss_function(CLASSES["digits"], copies=3),
        **dict(steps=steps, lr=1e-3, warmup=steps // 12, betas=(0.9, 0.999), max_grad_norm=0.5),
        **dict(weight_decay=1e-4, log_every=max(1, steps // LOOKS)),
        checkpoint=folder / "detr.json",
    )
    test = scenes["test"]
    return dict(history=history, **average_precision(detections(model, test["image"]), test))


# --- a published model on COCO ---------------------------------------------------------------


def scaled_size(width, height, shorter=800, longer=1333):
    """Height and width with these limits, rounded as by the authors."""
    low = min(width, height)
    high = max(width, height)
    if high / low * shorter > longer:
        shorter = round(longer * low / high)
    if width < height:
        return int(shorter * height / width), shorter
    return shorter, int(shorter * width / height)


def prepare(picture, shorter=800):
    """A PIL picture as a batch of one."""
    from torchvision.transforms.functional import normalize, resize, to_tensor

    small = resize(picture.convert("RGB"), scaled_size(*picture.size, shorter))
    return normalize(to_tensor(small), _IMAGENET["mean"], _IMAGENET["std"])[None]


def read_truth(folder):
    """The annotations of the validation pictures."""
    from pycocotools.coco import COCO  # which not every machine has

    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(Path(folder) / "annotations" / "instances_val2017.json"))


@torch.no_grad()
def coco_results(model, folder, truth, images, device="cpu", shorter=800):
    """What a model finds in pictures, in COCO's format of results."""
    model = model.eval().to(device)
    found = []
    for number in images:
        (entry,) = truth.loadImgs([number])
        picture = Image.open(Path(folder) / "val2017" / entry["file_name"])
        x = prepare(picture, shorter).to(device)
        (one,) = postprocess(model(x), [[picture.height, picture.width]])
        low, high = one["boxes"].split(2, -1)
        boxes = torch.cat([low, high - low], dim=-1).tolist()
        for box, label, score in zip(boxes, one["labels"].tolist(), one["scores"].tolist()):
            found.append(dict(image_id=number, category_id=label, bbox=box, score=score))
    return found


def judge(truth, found, images):
    """AP, AP50 and AP75 of results on these pictures."""
    from pycocotools.cocoeval import COCOeval  # which not every machine has

    with contextlib.redirect_stdout(io.StringIO()):
        score = COCOeval(truth, truth.loadRes(found), "bbox")
        score.params.imgIds = images
        score.evaluate(), score.accumulate(), score.summarize()
    return {key: round(float(x), 4) for key, x in zip(("ap", "ap50", "ap75"), score.stats)}


def coco(arguments):
    """Judge a published DETR on COCO's validation images with pycocotools.

    FOLDER holds `annotations/instances_val2017.json` and `val2017`, as COCO's archives unpack:
    https://s3.amazonaws.com/images.cocodataset.org/annotations/annotations_trainval2017.zip and
    https://s3.amazonaws.com/images.cocodataset.org/zips/val2017.zip. Without --weights those of
    the name are fetched from the hub. Pictures are scaled as by the authors, to 800 pixels on
    the shorter side and at most 1333 on the longer, and given one by one. The record is
    OUT/detr_coco.json.
    """
    weights = False if arguments.tiny else arguments.weights or True
    model = create_model(arguments.model, pretrained=weights)
    truth = read_truth(arguments.coco)
    images = sorted(truth.getImgIds())[: arguments.images]
    shorter = 64 if arguments.tiny else 800
    found = coco_results(model, arguments.coco, truth, images, arguments.device, shorter)
    record = dict(model=arguments.model, images=len(images), **judge(truth, found, images))
    print(record)
    write_record(arguments.out / "detr_coco.json", record)


# --- speed -----------------------------------------------------------------------------------

PEER = "transformers"


def peer_config(backbone, width, layers, **options):
    """The configuration of a DETR of transformers that is made without a network."""
    import transformers  # which not every machine has

    timm = dict(model_type="timm_backbone", backbone=backbone, num_channels=3)
    timm |= dict(features_only=True, use_pretrained_backbone=False, out_indices=[1, 2, 3, 4])
    return transformers.DetrConfig(
        **dict(backbone_config=timm, d_model=width, encoder_layers=layers),
        **dict(decoder_layers=layers, **options),
    )


def pair(tiny, aux_outputs):
    """Ours and theirs, with the same weights, both without dropout."""
    import transformers  # which not every machine has

    if tiny:
        backbone = "resnet18"
        width = 32
        layers = 1
    else:
        backbone = "resnet50"
        width = 256
        layers = 6
    options = dict(num_labels=91, auxiliary_loss=aux_outputs, dropout=0.0)
    config = peer_config(backbone, width, layers, **options)
    torch.manual_seed(0)
    theirs = transformers.DetrForObjectDetection(config)
    ours = DETR(91, 100, layers, layers, backbone, width, dropout=0.0)
    load_pretrained(ours, theirs.state_dict())
    for part in ("conv1", "layer1"):
        for model in (ours.backbone, theirs.model.backbone.model):
            getattr(model, part).requires_grad_(False)
    return ours, theirs


def targets(count, device, seed=0):
    """Random objects of one picture."""
    generator = torch.Generator().manual_seed(seed)
    center, size = torch.rand(2, count, 2, generator=generator)
    boxes = torch.cat([0.25 + 0.5 * center, 0.05 + 0.4 * size], dim=1)
    labels = torch.randint(91, (count,), generator=generator)
    return [dict(labels=labels.to(device), boxes=boxes.to(device))]


def forward_calls(tiny, x, left_out):
    ours, theirs = (model.eval().to(x) for model in pair(tiny, aux_outputs=False))
    calls = {OURS: lambda: ours(x), PEER: lambda: theirs(x)}
    if x.device.type == "cpu":
        fast = timing.attempt(left_out, OPTIMIZED, lambda: optimize_for_inference(ours))
        if fast is not None:
            calls[OPTIMIZED] = lambda: fast(x)
    return calls


def step_calls(tiny, x):
    ours, theirs = (model.train().to(x) for model in pair(tiny, aux_outputs=True))
    wanted = targets(7, x.device)
    loss = SetCriterion(91)
    labels = [dict(class_labels=t["labels"], boxes=t["boxes"]) for t in wanted]

    def step():
        ours.zero_grad()
        loss(ours(x), wanted)["total"].backward()

    def their_step():
        theirs.zero_grad()
        theirs(x, labels=labels).loss.backward()

    with torch.no_grad():
        output = ours(x)
    layers = [*output.aux_outputs, output]
    stacked = [torch.stack([layer[i] for layer in layers]) for i in (0, 1)]
    return {OURS: step, PEER: their_step}, lambda: loss.matcher(*stacked, wanted)


def forward(x, arguments, clock, left_out):
    """The rows of the forward pass."""
    with torch.inference_mode():
        calls = forward_calls(arguments.tiny, x, left_out)
        turns = arguments.repeats, arguments.device, left_out, clock
        times = timing.warm_turns(calls, *turns)
    return list(rows("forward", times))


def training(x, arguments, clock, left_out):
    """The rows of the training step, ours with the share that the matching takes."""
    calls, match = step_calls(arguments.tiny, x)
    turns = arguments.repeats, arguments.device, left_out, clock
    times = timing.warm_turns({**calls, "matching": match}, *turns)
    matching = times.pop("matching", None)
    found = list(rows("training step", times))
    if matching and OURS in times:
        share = statistics.median(matching) / statistics.median(times[OURS])
        found = [{**row, "matching": round(share, 4)} for row in found]
    return found


def rows(what, times):
    """A row for each of ours: its median, and the ratio to the peer's within a round."""
    for name in times:
        if name != PEER:
            label = f"{what}, optimized" if name == OPTIMIZED else what
            yield dict(what=label, **timing.median_row(times, name, PEER))
    if PEER in times:
        yield dict(what=f"{what}, {PEER}", **timing.median_row(times, PEER, PEER))


def speed(arguments):
    """Time a forward pass and a training step next to the DETR of transformers.

    Both have the same random weights and get the same picture, 480 × 640 pixels. The forward
    pass is timed of the plain model, and of the copy that `optimize_for_inference` makes. A
    training step is the forward pass, the loss of all six decoder layers, and the gradient;
    both freeze the same part of the backbone. (With losses after each layer transformers
    computes another network, see the chapter, but in about the same time.) The matching is
    timed on its own, as a share of the step. On a CPU one thread is used, and its own time
    counts, without that of other programs. The record is FOLDER/detr_speed_DEVICE.json; with
    --tiny its numbers mean nothing.
    """
    device = arguments.device
    size = (64, 96) if arguments.tiny else (480, 640)
    torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else time.perf_counter
    x = torch.randn(1, 3, *size, device=device)
    path = arguments.out and arguments.out / f"detr_speed_{device}.json"
    known = dict(tiny=arguments.tiny, size=" × ".join(map(str, size)))
    bench = runner.Rows(path, device, arguments.minutes, **known)

    def go():
        for task, measure in (("forward", forward), ("training step", training)):
            for row in bench.once(dict(task=task), partial(measure, x, arguments, clock)):
                print(row)
                if "matching" in row:
                    bench.record["matching"] = row["matching"]

    bench.work(go)


def train_detectors(arguments):
    (arguments.out / "checkpoints").mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"detr_{arguments.command}.json"
    bench = Detectors(path, arguments.minutes, arguments.tiny, arguments.command)
    bench.work(bench.all)


def shapes(arguments):
    """Train plain DETR on shapes, with its backbone pre-trained or not."""
    train_detectors(arguments)


def digits(arguments):
    """Train DETR with anchors as queries on digits, with and without denoising."""
    train_detectors(arguments)


def slow(arguments):
    """Train plain DETR on digits."""
    train_detectors(arguments)


def main(arguments=None):
    commands = Commands(__doc__)
    for function in (shapes, digits, slow):
        commands.experiment(function.__name__, function)
    parser = commands.experiment("coco", coco)
    parser.add_argument("--coco", required=True, help="the folder with COCO's files")
    parser.add_argument("--model", default="detr_resnet50")
    parser.add_argument("--weights", help="a file of weights, or a repository on the hub")
    parser.add_argument("--images", type=int, help="the number of images; by default all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    commands.timing("speed", speed, repeats=9)
    commands.run(arguments)


if __name__ == "__main__":
    main()
