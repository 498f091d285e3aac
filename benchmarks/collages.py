"""Train the small models that come with the library: a ViT, a Swin and a TNT on collages.

    python -m benchmarks.collages vit_collages --out benchmarks/results

Each sees digits pasted on photographs (`attnlib.data.collages`) and names the largest. While it
learns, a second linear layer names the digits under every place of the last map, and is thrown
away afterwards: a picture then teaches many times and not once. Without it a ViT of this size
was still guessing after 700 steps. Weights go to NAME.safetensors in float16, and the accuracy
on collages of other digits and other pieces of the photographs to NAME.json.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib.data import collages
from attnlib.models import create_model
from attnlib.recipes import accuracy
from attnlib.train import epochs, fit, write_record
from benchmarks.runner import save_half

STEPS = {"vit_collages": 6000, "swin_collages": 3600, "tnt_collages": 6000}


def shares(mask, side):
    """The share of each class, 11 of them, in the patches of a mask: (B, 11, H', W')."""
    classes = F.one_hot(mask.long(), 11).permute(0, 3, 1, 2)  # (B, H, W, 11) -> (B, 11, H, W)
    return F.avg_pool2d(classes.float(), side)


def last_map(tokens):
    """Patches' tokens (B, H', W', D): a Swin's map, or a sequence after a class token."""
    if tokens.ndim == 4:
        return tokens
    side = int((tokens.shape[1] - 1) ** 0.5)
    return tokens[:, 1:].unflatten(1, (side, side))


class Both(nn.Module):
    """A model and the second head that it has while it learns."""

    def __init__(self, model):
        super().__init__()
        self.model, self.places = model, nn.Linear(model.num_features, 11)

    def forward(self, x):
        tokens = self.model.forward_features(x)
        places = self.places(last_map(tokens)).permute(0, 3, 1, 2)  # -> (B, 11, H', W')
        return self.model.forward_head(tokens), places


def loss(both, batch):
    """Cross-entropy of the label and of the places, summed over a batch."""
    images, labels, mask = batch
    shift = torch.randint(-4, 5, (2,)).tolist()  # of the whole batch, by up to four pixels
    images, mask = (x.roll(shift, (-2, -1)) for x in (images, mask))
    logits, places = both(images.float() / 127.5 - 1)
    wanted = shares(mask, mask.shape[-1] // places.shape[-1])
    total = F.cross_entropy(logits, labels) + F.cross_entropy(places, wanted)
    return total * len(labels), len(labels)


def pixels(found):
    """Images from -1 to 1, and labels, as the models that come with the library want them."""
    return 2 * found["image"] - 1, found["label"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=STEPS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs")
    args = parser.parse_args()

    count, steps = (256, 4) if args.tiny else (16_384, STEPS[args.model])
    found = collages(count, seed=0)
    images = (255 * found["image"]).round().byte()
    data = images, found["label"], found["mask"].byte()
    test = pixels(collages(100 if args.tiny else 2000, "test", seed=1))
    torch.manual_seed(0)
    both, began = Both(create_model(args.model, num_classes=10)), time.process_time()
    history = fit(
        both,
        loss,
        epochs(*data, batch_size=64),
        steps=steps,
        lr=2e-3,
        warmup=min(200, steps // 2),
        weight_decay=0.05,
        betas=(0.9, 0.999),
        every=max(1, steps // 12),
        evaluate=lambda both: accuracy(both.model, test),
    )
    seconds = time.process_time() - began
    model = both.model.cpu()
    save_half(model.state_dict(), args.out / f"{args.model}.safetensors")
    history = [{key: float(value) for key, value in row.items()} for row in history]
    count = sum(p.numel() for p in model.parameters())
    record = dict(parameters=count, seconds=round(seconds), history=history)
    write_record(args.out / f"{args.model}.json", record)
    print(
        f"{args.model}: {count:,} parameters, {history[-1]['accuracy']:.3f} after {steps} steps"
    )


if __name__ == "__main__":
    main()
