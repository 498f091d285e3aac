"""Compile ahead, in many processes, what is timed on a GPU: `python -m benchmarks.compile`.

The kernels of `benchmarks.flash` and `benchmarks.windows`, FlexAttention in the same cases, the
compiled models of `benchmarks.vision`, and the Swin with fused blocks: each is called once,
which fills the caches that Triton and PyTorch's compiler keep on disk, and the benchmarks find
them there. The processes share the GPU, so a job starts when the memory that it needs is
free. What does not compile is printed, and told again by the benchmark. With --minutes no
further job begins after so many, and the command goes on when it is given again, quickly over
what the caches hold.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass

import torch

from benchmarks import flash, runner, timing, vision, windows

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
    calls, shape = windows.ways(name, stage, shifted, options, device, torch.bfloat16)
    x = torch.randn(batch, *shape, device=device, dtype=torch.bfloat16)
    x.requires_grad_(kind != "forward")
    for way in ("kernel", "flex, batch", "flex, sequence"):
        windows.run(calls[way], kind, x)


def model_call(device, name, library, kind, batch, options):
    found = vision.peers(name, **options)
    size = vision.image_size(found[timing.OURS])
    dtype = torch.bfloat16
    model = found["timm" if library == "timm" else timing.OURS].to(device)
    if library == timing.OPTIMIZED:
        model = vision.with_kernels(model)
    images = itertools.repeat(torch.randn(batch, 3, size, size, device=device))
    if kind == "forward":
        call = vision.forward(torch.compile(model.to(dtype).eval()), images, dtype)
    else:
        call = vision.training(torch.compile(model.train()), images, dtype, device)
    vision.under("triton" if library == timing.OPTIMIZED else "auto", call)()


def fused_call(device, name, library, kind, batch, options):
    models, size = windows.contestants(device, torch.bfloat16, options)
    images = torch.randn(batch, 3, size, size, device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        models[library](images)


@dataclass(frozen=True)
class Job:
    """A function to call, and the memory of the GPU that it takes at most, in GiB."""

    function: Callable
    arguments: tuple
    memory: float


CONTEXT = 0.6  # GiB that CUDA itself takes in each process
MODEL_MEMORY = {"forward": 6.0, "training": 24.0}  # GiB, of batch 128 and the largest model


def flash_memory(n, kind):
    """GiB of a case of `flash_call`: its tensors in bfloat16, and the bias as often as it is.

    FlexAttention sums the gradient of the bias in float32, beside the bias, its gradient and a
    copy of it.
    """
    batch, heads = flash.SHAPES[n]
    tensors = 16 * 2 * batch * heads * n * 128
    seen = 8 * n * n  # the rule as a matrix, and the numbers it is made of
    bias = 2 * heads * n * n * 6 if kind == "bias" else 0
    return 0.5 + (tensors + seen + bias) / 2**30


def jobs(device, tiny):
    """{group: [Job]}, the most important first."""
    if tiny:
        options = "forward", 1, windows.TINY
        cases = [
            Job(flash_call, (device, (1, 1, 4, 16), "causal", "forward"), 1.0),
            Job(windows_call, (device, MODELS[0], 0, True, *options), 1.0),
            Job(fused_call, (device, windows.SWIN, windows.FUSED, *options), 1.0),
        ]
        return {"kernels": cases, "models": []}  # to compile one on a CPU takes a minute
    kernels = [
        Job(
            flash_call,
            (device, (*flash.SHAPES[n], n, width), kind, step),
            flash_memory(n, kind),
        )
        for width in (64, 128)
        for n in flash.SHAPES
        for kind in flash.KINDS
        for step in flash.PASSES
    ]
    kernels += [
        Job(windows_call, (device, name, stage, shifted, kind, 64, {}), 6.0)
        for name in windows.MODELS
        for stage in range(4)
        for shifted in (False, True)
        for kind in ("forward", "training")
    ]
    models = [
        Job(model_call, (device, name, library, kind, 128, {}), MODEL_MEMORY[kind])
        for name in MODELS
        for kind in ("forward", "training")
        for library in (timing.OURS, timing.OPTIMIZED, "timm")
    ]
    arguments = device, windows.SWIN, windows.FUSED, "forward", 128, {}
    models += [Job(fused_call, arguments, MODEL_MEMORY["forward"])]
    return {"kernels": kernels, "models": models}


def work(job, memory):
    """In a process of its own: the error, or None.

    The process may take `memory` GiB of the GPU: more is its own error, and not a neighbor's.
    """
    torch.compiler.reset()  # or the compiler gives up after a number of shapes
    if torch.cuda.is_available():
        share = memory * 2**30 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    try:
        job.function(*job.arguments)
    except Exception as problem:
        return timing.reason(problem)
    finally:
        runner.free_memory()


def run(pool, waiting, workers, total, minutes):
    """Run jobs while their memory together is at most `total`; the jobs that time left over.

    A job that needs more than that runs alone. What does not compile is printed.
    """
    waiting = list(waiting)
    running = {}
    end = time.monotonic() + 60 * minutes
    while running or waiting and time.monotonic() < end:
        taken = sum(job.memory for job in running.values())
        fits = [job for job in waiting if taken + job.memory <= total]
        fits = fits or ([] if running else waiting)
        if fits and len(running) < workers and time.monotonic() < end:
            job = fits[0]
            waiting.remove(job)
            running[pool.submit(work, job, min(job.memory, total))] = job
            continue
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            job = running.pop(future)
            if problem := future.result():
                _, *given = job.arguments
                print(f"  {job.function.__name__} {given}: {problem}", flush=True)
    return waiting


def memory_of(device, workers):
    """GiB of the GPU that jobs can share; on a CPU nothing is counted."""
    if device == "cpu":
        return float("inf")
    free, _ = torch.cuda.mem_get_info()
    return free / 2**30 - workers * CONTEXT - 1


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.add_timing_options(parser, repeats=1)
    parser.add_argument("--workers", type=int, help="processes; 14 for kernels, 6 for models")
    parser.add_argument("--group", choices=WORKERS, default="kernels")
    arguments = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in each process
    workers = arguments.workers or min(WORKERS[arguments.group], os.cpu_count())
    some = jobs(arguments.device, arguments.tiny)[arguments.group]
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        total = memory_of(arguments.device, workers)
        left = run(pool, some, workers, total, arguments.minutes)
    done = len(some) - len(left)
    print(f"{done} {arguments.group} in {time.monotonic() - began:.0f} s", flush=True)
    if left:
        print(f"{len(left)} are left; give the command again to go on")
        sys.exit(runner.UNFINISHED)


if __name__ == "__main__":
    main()
