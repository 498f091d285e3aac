"""Panoptic quality on COCO: `python -m benchmarks.panoptic_coco --images A --annotations B`.

The published weights of `detr_resnet50_panoptic` on the 5,000 validation pictures; the authors
report a PQ of 43.4. B is panoptic_val2017.json; its masks lie beside it in the folder
panoptic_val2017, A is the folder val2017. One picture at a time, its shorter side scaled to 800
pixels, but the longer to at most 1,333; the label map has the picture's own size.

The record is FOLDER/panoptic_coco.json.
"""

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from attnlib.models import create_model
from attnlib.panoptic import confident, merge, panoptic_quality
from attnlib.train import write_record
from benchmarks.runner import experiment_parser

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
    device, found, truths = next(model.parameters()).device, [], []
    for row in data["annotations"][:count]:
        x, size = read_picture(Path(images) / names[row["image_id"]])
        out = model.eval()(
            x.to(device), choose=lambda found: confident(found.logits, threshold)
        )
        # as the authors do: to the size that the model saw, and from there to the picture's
        segments, infos = merge(
            out.logits[0].cpu(), out.masks[0].cpu(), things, x.shape[2:], threshold
        )
        segments = F.interpolate(segments[None, None].double(), size)[0, 0].long()
        there = set(segments.unique().tolist())
        found.append((segments, [info for info in infos if info["id"] in there]))
        masks = Path(annotations).with_suffix("") / row["file_name"]
        truths.append(read_truth(masks, row["segments_info"]))
    return panoptic_quality(found, truths, things)


def main():
    parser = experiment_parser(__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--annotations", type=Path, required=True)
    parser.add_argument("--weights", default="True", help="a file, else they are fetched")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    weights = True if arguments.weights == "True" else arguments.weights
    model = create_model("detr_resnet50_panoptic", pretrained=weights).to(arguments.device)
    count = 2 if arguments.tiny else None
    found = evaluate(model, arguments.images, arguments.annotations, count=count)
    print({name: found[name] for name in ("all", "things", "stuff")})
    write_record(arguments.out / "panoptic_coco.json", found, arguments.device)


if __name__ == "__main__":
    main()
