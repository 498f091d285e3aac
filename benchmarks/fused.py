"""Time Swin with fused blocks, the whole network: `python -m benchmarks.fused --out FOLDER`.

Logits of Swin-T in evaluation: the copy that `attnlib.inference.optimize_for_inference` makes
on a GPU, whose blocks are five kernels each; our model through PyTorch, and with the kernel for
its windows alone; timm's, as it is and compiled. Weights are copied and logits compared before
anything is timed, and all take turns. On a GPU each has the time on the wall and, under
"kernel", that of a CUDA graph, without Python and launches, or of the calls themselves where
they are long. With --minutes the command ends after so many, and goes on when it is given
again. Without timm the others are compared with PyTorch's way.
"""

import itertools
from functools import partial

import torch

from attnlib import windows  # first: without a GPU it has Triton interpreted
from attnlib.inference import optimize_for_inference
from attnlib.models import create_model
from benchmarks import runner, timing
from benchmarks.windows import TINY, through

MODEL = "swin_tiny_patch4_window7_224"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FUSED = "fused"


def contestants(device, dtype, options, left_out=None):
    """{name: function of images}, all with the same weights; and the images' size."""
    torch.manual_seed(0)
    ours = create_model(MODEL, drop_path_rate=0.0, **options)
    theirs = timing.attempt(left_out, "timm", partial(timing.timm_like, ours, MODEL, options))
    ours = ours.to(device, dtype).eval()
    fuse = optimize_for_inference if device == "cuda" else windows.fuse_swin
    found = timing.attempt_all({FUSED: partial(fuse, ours)}, left_out)
    found |= {
        "kernel": partial(through, "triton", ours),
        "PyTorch": partial(through, "sdpa", ours),
    }
    if theirs is not None:
        theirs = theirs.to(device, dtype).eval()
        backend = "eager" if options else "inductor"  # a tiny model is not worth a minute
        found |= {"timm": theirs, "timm, compiled": torch.compile(theirs, backend=backend)}
    return found, ours.patch_embed.img_size[0]


def measure(dtype, batch, arguments, left_out):
    torch.compiler.reset()
    options, device = TINY if arguments.tiny else {}, arguments.device
    models, size = contestants(device, DTYPES[dtype], options, left_out)
    pool = [torch.randn(batch, 3, size, size, device=device, dtype=DTYPES[dtype])]
    pool += [torch.randn_like(pool[0]) for _ in range(2)]
    images = {name: itertools.cycle(pool) for name in models}

    @torch.inference_mode()
    def call(name):
        return models[name](next(images[name]))

    calls = {name: partial(call, name) for name in models}
    logits = timing.attempt_all(calls, left_out)  # compiles, too
    wanted = logits.get("timm", logits.get("PyTorch"))
    if wanted is None:
        raise RuntimeError("neither timm nor PyTorch has run, to compare with")
    wanted = wanted.float()
    differences = {
        name: ((found.float() - wanted).abs().max() / wanted.abs().max()).item()
        for name, found in logits.items()
    }
    assert max(differences.values()) < (1e-3 if dtype == "float32" else 0.05), differences
    label = f"{MODEL} {dtype} batch {batch:3}"
    calls = {name: calls[name] for name in logits}
    rows = timing.race(calls, label, arguments, FUSED, left_out)
    return [{"way": name, "difference": differences[name], **row} for name, row in rows.items()]


def main():
    parser = runner.timing_parser(__doc__, repeats=20)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=DTYPES)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 1])
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.batch, arguments.dtypes = [1], ["float32"]
    timing.own_stream(arguments.device)
    path = arguments.out and arguments.out / f"fused_{arguments.device}.json"
    bench = runner.Rows(path, arguments.device, arguments.minutes, arguments.tiny)

    def go():
        for dtype, batch in itertools.product(arguments.dtypes, arguments.batch):
            setting = dict(model=MODEL, dtype=dtype, batch=batch)
            bench.once(setting, partial(measure, dtype, batch, arguments))

    bench.work(go)


if __name__ == "__main__":
    main()
