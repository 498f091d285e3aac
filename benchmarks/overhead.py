"""What a call of the kernels costs before a kernel starts: `python -m benchmarks.overhead`.

The launch is replaced by nothing, so what is timed is Python: checks, shapes, room for the
output, the operator. Beside it stands PyTorch's own call at a size at which the work itself
counts little. All take turns, many calls at a time, by the process' own clock on one thread.
The record, FOLDER/overhead_cpu.json, has microseconds a call: medians and quartiles over the
rounds, forward without a graph and forward with one. Triton's own launcher is not in them. With
--profile the functions are printed in which most of the time is spent.
"""

import cProfile
import pstats
import statistics
import time

import torch
import torch.nn.functional as F

from attnlib import flash, windows
from attnlib.attention import attention, attention_backend
from attnlib.swin import window_layout
from benchmarks import runner, timing

WANTED = 25  # microseconds


def calls():
    """{name: function}: the kernels and PyTorch's, at the smallest sizes that are usual."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    bias, mask = torch.randn(1, 2, 2), torch.ones(2, 2, dtype=torch.bool)
    qkv, own, layout = (
        torch.randn(1, 4, 4, 24),
        torch.randn(1, 4, 4),
        window_layout((4, 4), (2, 2)),
    )
    graph = [x.clone().requires_grad_() for x in (q, k, v)]
    learnt = qkv.clone().requires_grad_()

    def backend():
        with attention_backend("triton"):
            return attention(q, k, v)

    return {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v),
        "flash": lambda: flash.flash_attention(q, k, v),
        "flash, causal": lambda: flash.flash_attention(q, k, v, causal=True),
        "flash, mask and bias": lambda: flash.flash_attention(q, k, v, mask=mask, bias=bias),
        "flash, backend": backend,
        "windows": lambda: windows.window_attention(qkv, own, layout, 1),
        "SDPA, graph": lambda: F.scaled_dot_product_attention(*graph),
        "flash, graph": lambda: flash.flash_attention(*graph),
        "windows, graph": lambda: windows.window_attention(learnt, own, layout, 1),
    }


def without_launches(call):
    """Call it while no kernel is started."""
    before = flash.launch, windows.launch
    flash.launch = windows.launch = lambda *arguments, **options: None
    try:
        return call()
    finally:
        flash.launch, windows.launch = before


def measure(repeats, times):
    """{name: microseconds of a call in each round}."""

    def often(call):
        def run():
            for _ in range(times):
                call()

        return run

    runs = {name: often(call) for name, call in calls().items()}
    timing.take_turns(runs, 1, "cpu")  # a first round is not counted
    found = timing.take_turns(runs, repeats, "cpu", clock=time.process_time)
    return {name: [1000 * ms / times for ms in some] for name, some in found.items()}


def profile(times):
    """Print, for each call, the functions in which most of the time is spent."""
    for name, call in calls().items():
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(times):
            call()
        profiler.disable()
        print(f"== {name}")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


def main():
    parser = runner.timing_parser(__doc__, repeats=9)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    times = 5 if arguments.tiny else 2000
    if arguments.profile:
        without_launches(lambda: profile(times))
        return
    found, rows = without_launches(lambda: measure(arguments.repeats, times)), []
    for name, some in found.items():
        us, low, high = statistics.median(some), *timing.quartiles(some)
        peer = "SDPA, graph" if "graph" in name else "SDPA"
        row = {
            "name": name,
            "us": round(us, 2),
            "peer": peer,
            **timing.ratio(some, found[peer]),
        }
        rows.append(row | {"us_quartiles": [round(low, 2), round(high, 2)]})
        print(
            f"{name:22} {us:7.2f} us ({low:.2f} to {high:.2f}), "
            f"{row['ratio']:5.1f} times as long as {peer}"
        )
    if arguments.out:
        runner.write(arguments.out, "overhead", "cpu", {"wanted": WANTED, "rows": rows})


if __name__ == "__main__":
    main()
