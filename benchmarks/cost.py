"""What was run for 50_cost: `python -m benchmarks.cost COMMAND --out FOLDER`.

    roofline  measure the three numbers of this machine

`benchmarks.runner` says how runs are resumed and recorded.
"""

import re
from functools import partial

import torch

from attnlib.cost import GPUS, best_roofline, roofline_probes, take_turns
from benchmarks import runner, timing
from benchmarks.runner import Commands

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def sheet(device):
    """The data sheet's numbers of this GPU, or None if the chapter has none."""
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    return next((GPUS[gpu] for gpu in GPUS if gpu in re.split(r"[\s-]", name)), None)


def measure(dtype, arguments, left_out):
    """The row of a dtype."""
    if arguments.device == "cuda":
        sizes = (4096, 8192)
        megabytes = (1024, 4096)
    else:
        sizes = (1024,)
        megabytes = (128,)
    if arguments.tiny:
        sizes = (32,)
        megabytes = (0.1,)
    shapes = [(size, size, size) for size in sizes]
    probes = roofline_probes(
        arguments.device, DTYPES[dtype], shapes=shapes, megabytes=megabytes
    )
    calls = {name: probe.call for name, probe in probes.items()}
    warm = timing.attempt_all(calls, left_out)  # the largest may find no memory
    probes = {name: probes[name] for name in warm}
    calls = {name: calls[name] for name in warm}
    del warm
    roof = best_roofline(
        probes, take_turns(calls, torch.device(arguments.device), arguments.repeats)
    )
    row = {"flops": roof.peak_flops, "bytes": roof.bandwidth}
    row["overhead_us"] = 1e6 * roof.overhead
    known = sheet(arguments.device)
    if known and dtype != "float32":  # the sheet's products have 16 bits
        row["of_sheet"] = [roof.peak_flops / known.peak_flops, roof.bandwidth / known.bandwidth]
    print(
        f"{dtype:9} {roof.peak_flops / 1e12:8.3f} TFLOP/s   {roof.bandwidth / 1e9:7.1f} GB/s   "
        f"{row['overhead_us']:6.1f} us to start an operator",
        *(f"  {share:.0%} of the data sheet" for share in row.get("of_sheet", ())),
        flush=True,
    )
    return [row]


def roofline(arguments):
    """Measure the three numbers of this machine.

    The best product in each dtype, the best bandwidth of copying, adding and reading, and the
    cheapest start of an operator, as `attnlib.cost` measures them, all in turns; on a GPU that
    the chapter on cost knows, beside its data sheet. The record is FOLDER/roof_DEVICE.json.
    """
    path = arguments.out and arguments.out / f"roof_{arguments.device}.json"
    bench = runner.Rows(path, arguments.device, arguments.minutes, arguments.tiny)

    def go():
        for dtype in DTYPES:
            bench.once({"dtype": dtype}, partial(measure, dtype, arguments))

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    commands.timing("roofline", roofline, repeats=20)
    commands.run(arguments)


if __name__ == "__main__":
    main()
