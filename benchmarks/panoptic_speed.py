"""Panoptic DETR beside transformers': time of a forward pass, and the ratio.

    python -m benchmarks.panoptic_speed --out FOLDER

Both have the same random weights and get the same picture, 320 × 320 pixels. transformers
computes a mask for each of 100 queries. Ours does so too, and then for ten alone, as many as
are kept of a usual picture; both of the plain model and of its copy that is optimized for
inference. The masks are timed on their own as well: without the detector, whose features are
given. The record is FOLDER/panoptic_speed_DEVICE.json; with --tiny its numbers mean nothing.
"""

from functools import partial

import torch
import transformers

from attnlib.detr import DETR
from attnlib.inference import optimize_for_inference
from attnlib.models import load_pretrained
from attnlib.panoptic import PanopticDETR
from benchmarks import runner, timing
from benchmarks.detr_speed import peer_config
from benchmarks.timing import OPTIMIZED, OURS

PEER, KEPT = "transformers", "10 masks"


def pair(tiny):
    """Ours and theirs, with the same weights."""
    backbone, width, layers = ("resnet18", 128, 1) if tiny else ("resnet50", 256, 6)
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


def main():
    parser = runner.timing_parser(__doc__, repeats=7)
    arguments = parser.parse_args()
    device, size = arguments.device, 64 if arguments.tiny else 320
    torch.set_num_threads(1)
    x = torch.randn(1, 3, size, size, device=device)
    path = arguments.out and arguments.out / f"panoptic_speed_{device}.json"
    known = dict(tiny=arguments.tiny, size=f"{size} × {size}")
    bench = runner.Rows(path, device, arguments.minutes, **known)

    def go():
        print(*bench.once(dict(task="forward"), partial(measure, x, arguments)), sep="\n")

    bench.work(go)


if __name__ == "__main__":
    main()
