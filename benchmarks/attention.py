"""Time the attention backends side by side: `python -m benchmarks.attention --out FOLDER`.

The backends take turns, so that a busy machine slows all of them alike. Recorded are medians,
the number of rounds, the quartiles of the ratio to the reference, and the largest difference
between the outputs.
"""

import argparse
import functools
import statistics
from pathlib import Path

import torch

from attnlib.attention import attention, attention_backend
from benchmarks import common

SHAPES = {  # (B, h, N, d): where such attention occurs
    "sentence": (32, 8, 32, 64),
    "window": (256, 4, 49, 32),
    "patches": (8, 6, 197, 64),
    "text": (2, 8, 1024, 64),
    "long text": (1, 8, 4096, 64),
}
BACKENDS = ["reference", "sdpa", "auto"]


def call(backend, inputs, bias, training):
    with attention_backend(backend), torch.set_grad_enabled(training):
        out = attention(*inputs, bias=bias)
        if training:
            torch.autograd.grad(out.sum(), inputs)
    return out


def measure(shape, dtype, device, with_bias, training, repeats):
    inputs = [
        torch.randn(shape, device=device, dtype=dtype, requires_grad=training) for _ in range(3)
    ]
    bias = (
        torch.randn(shape[1], shape[2], shape[2], device=device, dtype=dtype)
        if with_bias
        else None
    )
    outputs = {name: call(name, inputs, bias, training) for name in BACKENDS}  # warms up, too
    difference = max(
        (outputs[name] - outputs["reference"]).abs().max().item() for name in BACKENDS
    )
    calls = {name: functools.partial(call, name, inputs, bias, training) for name in BACKENDS}
    times = common.take_turns(calls, repeats, device)
    row = {"difference": difference}
    for name in BACKENDS:
        row[name] = {
            "ms": round(statistics.median(times[name]), 4),
            **common.ratio(times[name], times["reference"]),
        }
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        choices=["cpu", "cuda"],
    )
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, to see that the benchmark runs"
    )
    arguments = parser.parse_args()
    shapes = {"tiny": (1, 2, 8, 4)} if arguments.tiny else SHAPES

    rows = []
    print(
        f"{'':10} {'dtype':9} {'bias':5} {'pass':8}"
        + "".join(f"{name:>22}" for name in BACKENDS)
    )
    for name, shape in shapes.items():
        for dtype in (torch.float32, torch.bfloat16):
            for with_bias in (False, True):
                for training in (False, True):
                    torch.manual_seed(len(rows))
                    row = measure(
                        shape, dtype, arguments.device, with_bias, training, arguments.repeats
                    )
                    setting = {
                        "name": name,
                        "shape": shape,
                        "dtype": str(dtype)[6:],
                        "bias": with_bias,
                        "pass": "training" if training else "forward",
                    }
                    rows.append({**setting, **row})
                    cells = (
                        f"{row[b]['ms']:10.2f} ms {row[b]['ratio']:8.2f}" for b in BACKENDS
                    )
                    print(
                        f"{name:10} {setting['dtype']:9} {str(with_bias):5} {setting['pass']:8}"
                        + "".join(f"{cell:>22}" for cell in cells),
                        flush=True,
                    )
    if arguments.out:
        common.write(arguments.out, "attention", arguments.device, {"rows": rows})


if __name__ == "__main__":
    main()
