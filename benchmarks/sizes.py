"""Backbones in one setting, speed and memory: `python -m benchmarks.sizes --out FOLDER`.

For the small sizes a forward pass of four images in float32 and in evaluation, without
gradients: images per second, from the median of the rounds, in which all models take turns, and
the MiB by which the pass raises the memory in use. The record is FOLDER/sizes.json. With --tiny
one model takes one turn; such a record means nothing.
"""

import argparse
import statistics
from pathlib import Path

import torch

from attnlib import deit, swin, swinv2, tnt, vit  # noqa: F401  they register their models
from attnlib.models import create_model
from attnlib.train import write_record
from benchmarks.timing import peak_memory, take_turns

NAMES = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch32_224",
    "vit_base_patch16_224",
    "deit_small_distilled_patch16_224",
    "swin_tiny_patch4_window7_224",
    "swin_small_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "swinv2_tiny_window16_256",
    "tnt_s_patch16_224",
)
BATCH = 4


def forward(name, device):
    """A function that passes a batch through a model of this name."""
    model = create_model(name, device=device).eval()
    side = 256 if name.endswith("256") else 224
    x = torch.rand(BATCH, 3, side, side, device=device)

    def call():
        with torch.no_grad():
            return model(x)

    return call


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    names, rounds = (NAMES[:1], 1) if arguments.tiny else (NAMES, 7)
    calls = {name: forward(name, arguments.device) for name in names}
    memory = {name: peak_memory(call, arguments.device) for name, call in calls.items()}
    times = take_turns(calls, rounds, arguments.device)
    rows = [
        {
            "model": name,
            "images_per_second": round(1000 * BATCH / statistics.median(times[name]), 2),
            "memory": memory[name],
        }
        for name in names
    ]
    path = arguments.out / "sizes.json"
    write_record(path, {"batch": BATCH, "dtype": "float32", "rows": rows}, arguments.device)
    print(f"{len(rows)} models, recorded in {path}")


if __name__ == "__main__":
    main()
