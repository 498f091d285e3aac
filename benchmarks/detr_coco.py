"""A published DETR on COCO's validation pictures, judged by pycocotools.

    python -m benchmarks.detr_coco --coco FOLDER [--model detr_resnet50] [--weights FILE]

FOLDER holds `annotations/instances_val2017.json` and `val2017`, as COCO's archives unpack:
https://s3.amazonaws.com/images.cocodataset.org/annotations/annotations_trainval2017.zip and
https://s3.amazonaws.com/images.cocodataset.org/zips/val2017.zip. Without --weights those of the
name are fetched from the hub. Pictures are scaled as by the authors, to 800 pixels on the
shorter side and at most 1333 on the longer, and given one by one. The record is
OUT/detr_coco.json.
"""

import contextlib
import io
from pathlib import Path

import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchvision.transforms.functional import normalize, resize, to_tensor

from attnlib.detr import postprocess
from attnlib.models import IMAGENET, create_model
from attnlib.train import write_record
from benchmarks.runner import experiment_parser


def scaled_size(width, height, shorter=800, longer=1333):
    """Height and width with these limits, rounded as by the authors."""
    low, high = min(width, height), max(width, height)
    if high / low * shorter > longer:
        shorter = round(longer * low / high)
    if width < height:
        return int(shorter * height / width), shorter
    return shorter, int(shorter * width / height)


def prepare(picture, shorter=800):
    """A PIL picture as a batch of one."""
    small = resize(picture.convert("RGB"), scaled_size(*picture.size, shorter))
    return normalize(to_tensor(small), IMAGENET["mean"], IMAGENET["std"])[None]


def read_truth(folder):
    """The annotations of the validation pictures."""
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(Path(folder) / "annotations" / "instances_val2017.json"))


@torch.no_grad()
def detections(model, folder, truth, images, device="cpu", shorter=800):
    """What a model finds in pictures, in COCO's format of results."""
    model, found = model.eval().to(device), []
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
    with contextlib.redirect_stdout(io.StringIO()):
        score = COCOeval(truth, truth.loadRes(found), "bbox")
        score.params.imgIds = images
        score.evaluate(), score.accumulate(), score.summarize()
    return {key: round(float(x), 4) for key, x in zip(("ap", "ap50", "ap75"), score.stats)}


def main():
    parser = experiment_parser(__doc__)
    parser.add_argument("--coco", required=True, help="the folder with COCO's files")
    parser.add_argument("--model", default="detr_resnet50")
    parser.add_argument("--weights", help="a file of weights, or a repository on the hub")
    parser.add_argument("--images", type=int, help="take the first so many pictures only")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    # tiny: random weights and small pictures, to see that all runs
    weights = False if arguments.tiny else arguments.weights or True
    model = create_model(arguments.model, pretrained=weights)
    truth = read_truth(arguments.coco)
    images = sorted(truth.getImgIds())[: arguments.images]
    shorter = 64 if arguments.tiny else 800
    found = detections(model, arguments.coco, truth, images, arguments.device, shorter)
    record = dict(model=arguments.model, images=len(images), **judge(truth, found, images))
    print(record)
    write_record(arguments.out / "detr_coco.json", record)


if __name__ == "__main__":
    main()
