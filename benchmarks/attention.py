"""What was run for 10_attention: `python -m benchmarks.attention COMMAND --out FOLDER`.

    speed        time the attention backends side by side

`benchmarks.runner` says how runs are resumed and recorded.
"""

import functools
import itertools
import math
import statistics

import torch

from attnlib.attention import attention, attention_backend
from benchmarks import runner, timing
from benchmarks.runner import Commands

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


def measure(shape, dtype, device, with_bias, training, repeats, left_out):
    inputs = [
        torch.randn(shape, device=device, dtype=dtype, requires_grad=training) for _ in range(3)
    ]
    bias = None
    if with_bias:
        bias = torch.randn(shape[1], shape[2], shape[2], device=device, dtype=dtype)
    calls = {name: functools.partial(call, name, inputs, bias, training) for name in BACKENDS}
    outputs = timing.attempt_all(calls, left_out)  # warms up, too
    row = {"difference": None}
    if "reference" in outputs:
        wanted = outputs["reference"]
        row["difference"] = max((out - wanted).abs().max().item() for out in outputs.values())
    calls = {name: calls[name] for name in outputs}
    del outputs
    times = timing.take_turns(calls, repeats, device, left_out=left_out)
    for name in times:
        row[name] = {"ms": round(statistics.median(times[name]), 4)}
        if "reference" in times:
            row[name] |= timing.ratio(times[name], times["reference"])
    return [row] if times else []


def line(setting, row):
    """A row in words."""
    cells = []
    for name in BACKENDS:
        own = row.get(name, {})
        cells.append(f"{own.get('ms', math.nan):10.2f} ms {own.get('ratio', math.nan):8.2f}")
    words = (
        f"{setting['name']:10} {setting['dtype']:9} {setting['bias']!s:5} {setting['pass']:8}"
    )
    return words + "".join(f"{cell:>22}" for cell in cells)


def speed(arguments):
    """Time the attention backends side by side.

    The backends take turns, so that a busy machine slows all of them alike. Recorded are
    medians, the number of rounds, the quartiles of the ratio to the reference, and the largest
    difference between the outputs. The rows are written as they come, and the command can be
    given again.
    """
    device = arguments.device
    shapes = {"tiny": (1, 2, 8, 4)} if arguments.tiny else SHAPES
    path = arguments.out and arguments.out / f"attention_{device}.json"
    bench = runner.Rows(path, device, arguments.minutes, arguments.tiny)

    def go():
        options = (torch.float32, torch.bfloat16), (False, True), (False, True)
        for name, (dtype, with_bias, training) in itertools.product(
            shapes, itertools.product(*options)
        ):
            setting = {
                "name": name,
                "shape": list(shapes[name]),
                "dtype": str(dtype)[6:],
                "bias": with_bias,
                "pass": "training" if training else "forward",
            }
            torch.manual_seed(0)
            rest = shapes[name], dtype, device, with_bias, training, arguments.repeats
            for row in bench.once(setting, functools.partial(measure, *rest)):
                print(line(setting, row), flush=True)

    print(f"{'':35}" + "".join(f"{name:>22}" for name in BACKENDS))
    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    commands.timing("speed", speed, repeats=15)
    commands.run(arguments)


if __name__ == "__main__":
    main()
