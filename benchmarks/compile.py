"""Compile ahead, in many processes, what is timed on a GPU: `python -m benchmarks.compile`.

The kernels of `benchmarks.flash` and `benchmarks.windows`, FlexAttention in the same cases, the
compiled models of `benchmarks.vision` and the fused one of `benchmarks.fused`: each is called
once, which fills the caches that Triton and PyTorch's compiler keep on disk, and the benchmarks
find them there. What does not compile is printed, and told again by the benchmark.
"""

import functools
import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from benchmarks import common, flash, fused, vision, windows

MODELS = (
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "tnt_s_patch16_224",
    "vit_small_patch16_224",
)
WORKERS = {"kernels": 14, "models": 6}  # of models there is room for a few


def flash_call(device, shape, kind, step):
    torch.manual_seed(0)
    case = flash.make(shape, torch.bfloat16, device, kind, step == "backward")
    for function in (flash.ours, flash.flex):
        flash.PASSES[step](function, case)


def windows_call(device, name, stage, shifted, kind, batch, options):
    windows.register()
    calls, shape = windows.ways(name, stage, shifted, options, device, torch.bfloat16)
    x = torch.randn(batch, *shape, device=device, dtype=torch.bfloat16)
    x.requires_grad_(kind != "forward")
    for way in ("kernel", "flex, batch", "flex, sequence"):
        windows.run(calls[way], kind, x)


def model_call(device, name, library, kind, batch, options):
    found = vision.peers(name, **options)
    size, dtype = vision.image_size(found[common.OURS]), torch.bfloat16
    model = found["timm" if library == "timm" else common.OURS].to(device)
    images = itertools.repeat(torch.randn(batch, 3, size, size, device=device))
    if kind == "forward":
        call = vision.forward(torch.compile(model.to(dtype).eval()), images, dtype)
    else:
        call = vision.training(torch.compile(model.train()), images, dtype, device)
    vision.under("triton" if library == common.OPTIMIZED else "auto", call)()


def fused_call(device, name, library, kind, batch, options):
    models, size = fused.contestants(device, torch.bfloat16, options)
    images = torch.randn(batch, 3, size, size, device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        models[library](images)


def jobs(device, tiny):
    """{group: [(function, its arguments)]}, the most important first."""
    if tiny:
        cases = [
            (flash_call, (device, (1, 1, 4, 16), "causal", "forward")),
            (windows_call, (device, MODELS[0], 0, True, "forward", 1, windows.TINY)),
        ]
        options = "forward", 1, windows.TINY
        cases.append((fused_call, (device, fused.MODEL, fused.FUSED, *options)))
        return {"kernels": cases, "models": []}  # to compile one on a CPU takes a minute
    kernels = [
        (flash_call, (device, (*flash.SHAPES[n], n, width), kind, step))
        for width in (64, 128)
        for n in flash.SHAPES
        for kind in flash.KINDS
        for step in flash.PASSES
    ]
    kernels += [
        (windows_call, (device, name, stage, shifted, kind, 64, {}))
        for name in windows.MODELS
        for stage in range(4)
        for shifted in (False, True)
        for kind in ("forward", "training")
    ]
    models = [
        (model_call, (device, name, library, kind, 128, {}))
        for name in MODELS
        for kind in ("forward", "training")
        for library in (common.OURS, common.OPTIMIZED, "timm")
    ]
    models += [(fused_call, (device, fused.MODEL, fused.FUSED, "forward", 128, {}))]
    return {"kernels": kernels, "models": models}


def work(function, arguments):
    """In a process of its own: the error, or None."""
    torch.compiler.reset()  # or the compiler gives up after a number of shapes
    try:
        function(*arguments)
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:100]}"
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main():
    parser = common.timing_parser(__doc__, repeats=1)
    parser.add_argument("--workers", type=int, help="processes; 14 for kernels, 6 for models")
    parser.add_argument("--group", choices=WORKERS, default="kernels")
    arguments = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in each process
    start = functools.partial(
        ProcessPoolExecutor, mp_context=multiprocessing.get_context("spawn")
    )
    some, began = jobs(arguments.device, arguments.tiny)[arguments.group], time.monotonic()
    with start(arguments.workers or min(WORKERS[arguments.group], os.cpu_count())) as pool:
        waiting = {pool.submit(work, *job): job for job in some}
        for future in as_completed(waiting):
            if problem := future.result():
                function, (_, *given) = waiting[future]
                print(f"  {function.__name__} {given}: {problem}", flush=True)
    print(f"{len(some)} {arguments.group} in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
