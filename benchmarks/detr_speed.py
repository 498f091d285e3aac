"""DETR beside transformers': time of a forward pass and of a training step, and the ratio.

    python -m benchmarks.detr_speed --out FOLDER

Both have the same random weights and get the same picture, 480 × 640 pixels. The forward pass
is timed of the plain model, and of the copy that `optimize_for_inference` makes. A training
step is the forward pass, the loss of all six decoder layers, and the gradient; both freeze the
same part of the backbone. (With losses after each layer transformers computes another network,
see the chapter, but in about the same time.) The matching is timed on its own, as a share of
the step. On a CPU one thread is used, and its own time counts, without that of other programs.
The record is FOLDER/detr_speed_DEVICE.json; with --tiny its numbers mean nothing.
"""

import statistics
import time
from functools import partial

import torch
import transformers

from attnlib.detr import DETR, SetLoss
from attnlib.inference import optimize_for_inference
from attnlib.models import load_pretrained
from benchmarks import runner, timing
from benchmarks.timing import OPTIMIZED, OURS

PEER = "transformers"


def peer_config(backbone, width, layers, **options):
    """The configuration of a DETR of transformers that is made without a network."""
    timm = dict(model_type="timm_backbone", backbone=backbone, num_channels=3)
    timm |= dict(features_only=True, use_pretrained_backbone=False, out_indices=[1, 2, 3, 4])
    return transformers.DetrConfig(
        **dict(backbone_config=timm, d_model=width, encoder_layers=layers),
        **dict(decoder_layers=layers, **options),
    )


def pair(tiny, auxiliary):
    """Ours and theirs, with the same weights, both without dropout."""
    backbone, width, layers = ("resnet18", 32, 1) if tiny else ("resnet50", 256, 6)
    options = dict(num_labels=91, auxiliary_loss=auxiliary, dropout=0.0)
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
    ours, theirs = (model.eval().to(x) for model in pair(tiny, auxiliary=False))
    calls = {OURS: lambda: ours(x), PEER: lambda: theirs(x)}
    if x.device.type == "cpu":
        fast = timing.attempt(left_out, OPTIMIZED, lambda: optimize_for_inference(ours))
        if fast is not None:
            calls[OPTIMIZED] = lambda: fast(x)
    return calls


def step_calls(tiny, x):
    ours, theirs = (model.train().to(x) for model in pair(tiny, auxiliary=True))
    wanted, loss = targets(7, x.device), SetLoss(91)
    labels = [dict(class_labels=t["labels"], boxes=t["boxes"]) for t in wanted]

    def step():
        ours.zero_grad()
        loss(ours(x), wanted)["total"].backward()

    def their_step():
        theirs.zero_grad()
        theirs(x, labels=labels).loss.backward()

    with torch.no_grad():
        output = ours(x)
    layers = [*output.auxiliary, output]
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


def main():
    parser = runner.timing_parser(__doc__, repeats=9)
    arguments = parser.parse_args()
    device, size = arguments.device, (64, 96) if arguments.tiny else (480, 640)
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


if __name__ == "__main__":
    main()
