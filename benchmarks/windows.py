"""Time attention in windows, map to map: `python -m benchmarks.windows --out FOLDER`.

For every stage of Swin-T and SwinV2-T, without and with a shift, the whole attention of a block
(roll, partition, projections, attention, and the way back), forward and with its backward pass:
timm's, ours through PyTorch, and ours through the kernel. Weights are copied and outputs
compared before anything is timed; all take turns.
"""

import argparse
import itertools
import statistics
from functools import partial
from pathlib import Path

import torch

from attnlib import flash  # noqa: F401  first: without a GPU it has Triton interpreted
from attnlib.attention import attention_backend
from attnlib.models import create_model
from benchmarks import common

MODELS = {"swin_tiny_patch4_window7_224": 224, "swinv2_tiny_window8_256": 256}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def through(backend, layer, x):
    """The layer as its chapter wrote it, or with all but its projections in the kernel."""
    with attention_backend(backend):
        return layer(x)


def ways(name, stage, shifted, options, device, dtype):
    """{way: function of a map}, for one block of timm's and of ours; and a map's shape."""
    import timm

    torch.manual_seed(0)
    theirs = timm.create_model(name, drop_path_rate=0.0, **options)
    ours = create_model(name, drop_path_rate=0.0, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    block, own = (
        model.layers[stage].blocks[int(shifted)].to(device, dtype).eval()
        for model in (theirs, ours)
    )
    side = ours.patch_embed.grid_size[0] // 2**stage
    calls = {
        "timm": block._attn,
        "PyTorch": partial(through, "sdpa", own.attn),
        "kernel": partial(through, "triton", own.attn),
    }
    return (
        calls,
        [*block.parameters()],
        [*own.parameters()],
        (side, side, own.attn.proj.in_features),
    )


def caller(call, kind, maps):
    def run():
        x = next(maps)
        if kind == "forward":
            with torch.no_grad():
                return call(x)
        x.grad = None
        return call(x).backward(torch.ones_like(x))

    return run


def measure(name, stage, shifted, kind, dtype, arguments):
    small = dict(
        img_size=32, window_size=4, num_classes=2, embed_dim=16, depths=(2, 2), num_heads=(1, 2)
    )
    options = small if arguments.tiny else {}
    calls, *parameters, shape = ways(
        name, stage, shifted, options, arguments.device, DTYPES[dtype]
    )

    def make():
        size = (arguments.batch, *shape)
        return torch.randn(size, device=arguments.device, dtype=DTYPES[dtype])

    x = make()
    with torch.no_grad():
        outputs = {way: call(x).float() for way, call in calls.items()}
    scale = outputs["timm"].abs().max()
    differences = {
        way: ((y - outputs["timm"]).abs().max() / scale).item() for way, y in outputs.items()
    }
    assert max(differences.values()) < (1e-4 if dtype == "float32" else 0.05), differences
    pool = [make().requires_grad_(kind != "forward") for _ in range(3)]
    runs = {way: caller(call, kind, itertools.cycle(pool)) for way, call in calls.items()}
    memory = {way: common.peak_memory(run, arguments.device) for way, run in runs.items()}
    common.take_turns(runs, 1 if arguments.tiny else 5, arguments.device)
    times = common.take_turns(runs, arguments.repeats, arguments.device)
    bytes_moved = 4 * arguments.batch * shape[0] * shape[1] * shape[2] * x.element_size()
    return [
        {
            "model": name,
            "stage": stage + 1,
            "shifted": shifted,
            "pass": kind,
            "dtype": dtype,
            "way": way,
            "batch": arguments.batch,
            "ms": round(statistics.median(times[way]), 4),
            "memory": memory[way],
            "difference": differences[way],
            "kernel_bytes": bytes_moved,
            **common.ratio(times["kernel"], times[way]),
        }
        for way in runs
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        choices=["cpu", "cuda"],
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=DTYPES)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument(
        "--tiny", action="store_true", help="two small maps in float32, to see that it runs"
    )
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.batch, arguments.dtypes = 1, ["float32"]
    rows, stages = [], (1,) if arguments.tiny else range(4)
    for name, stage, dtype in itertools.product(arguments.models, stages, arguments.dtypes):
        for shifted, kind in itertools.product(
            (False,) if arguments.tiny else (False, True), ("forward", "training")
        ):
            rows += measure(name, stage, shifted, kind, dtype, arguments)
            for row in rows[-3:]:
                print(
                    f"{name} stage {row['stage']} {'shifted' if shifted else 'plain':7} "
                    f"{kind:8} {dtype} {row['way']:8} {row['ms']:8.3f} ms   "
                    f"kernel / it {row['ratio']:.3f} {row['quartiles']}",
                    flush=True,
                )
    if arguments.out:
        common.write(arguments.out, "windows", arguments.device, {"rows": rows})


if __name__ == "__main__":
    main()
