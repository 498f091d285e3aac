"""Everything that needs a GPU, in one command: `make gpu`, or `python -m benchmarks.gpu`.

Checks the library on CUDA, times it beside its peers and makes the chapters' full training
runs, with the PyTorch that is there and without a network: the most important parts first, none
for more than eight minutes. Each part is a list of commands; `--part NAME` runs one. `compile`
and `compile_models` fill the compilers' caches with many processes, for the parts that time.

An interrupted command can be given again. A part that is finished leaves a mark in the folder
of the records and is not run again while the code is the same. What the timings of `flash`, of
`windows` and of the models have recorded is kept, and the training runs go on from their last
checkpoint. With --minutes no part begins after that time, and none goes on for longer. With
--tiny and --device cpu all parts run at a size that means nothing, to see that they work before
a GPU is paid for.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.common import UNFINISHED, version

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
VISION = {  # record: model; in bfloat16 only, for to compile takes most of a part's minutes
    "swin": "swin_tiny_patch4_window7_224",
    "swinv2": "swinv2_tiny_window8_256",
    "tnt": "tnt_s_patch16_224",
    "vit": "vit_small_patch16_224",
}
RUNS = ("numbers", "translator", "lengths", "digits", "detr", "supernet", "captions", "gpt")
# runs that fetch their data: by name only
NETWORK = ("cifar10", "mae_cifar", "supernet_cifar10", "multi30k", "gpt_tinystories")
NEEDS = {  # packages that not every machine has
    **dict.fromkeys(
        ("run_numbers", "run_translator", "run_lengths"), ("num2words", "tokenizers")
    ),
    "run_digits": ("sklearn",),
    **dict.fromkeys(("run_gpt", "run_gpt_tinystories"), ("tokenizers",)),
    **dict.fromkeys(("run_detr", "run_captions"), ("sklearn", "scipy", "pycocotools")),
    **dict.fromkeys(("run_mae_cifar", "run_supernet", "run_supernet_cifar10"), ("sklearn",)),
    **dict.fromkeys(
        ("compile", "compile_models", "flash", "windows", "fused", "flash_wide"), ("triton",)
    ),
    **dict.fromkeys(("translation", "vit", "swin", "swinv2", "mae_speed"), ("transformers",)),
    "detr_speed": ("transformers", "timm", "scipy", "torchvision"),
    "panoptic_speed": ("transformers", "timm", "scipy", "torchvision"),
}
LIMIT = 480  # seconds for a part
LAST = 60  # of them in which a benchmark that can go on begins no further row
RESUMED = ("flash", "windows", "fused", "flash_wide", *VISION)


CODE = "attnlib", "benchmarks", "tests"


def script(name, *options):
    return [sys.executable, "-m", f"benchmarks.{name}", *options]


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
# what has tests on CUDA
CHECKS = [f"tests/test_{name}.py" for name in ("attention", "backbones", "cost", "decoding")]
KERNELS = ["tests/test_flash.py", "tests/test_windows.py", "tests/test_windows_fused.py"]


def checks(device, tiny):
    """The library's own tests of what runs on a GPU."""
    return [
        PYTEST + CHECKS + ["-k", "agree_with_float64 and cpu" if tiny else "cuda or on_a_gpu"]
    ]


def kernels(device, tiny):
    """All tests of the kernels, on a GPU compiled, and in parallel where xdist is there."""
    many = ["-n", str(min(14, os.cpu_count()))] if find_spec("xdist") else []
    return [PYTEST + KERNELS + (["-k", "sanitize"] if tiny else many)]


def sanitize(device, tiny):
    """The edges of the kernels under NVIDIA's memory checker, where it is installed."""
    tool = ["compute-sanitizer", "--target-processes", "all", "--error-exitcode", "1"]
    return (
        []
        if tiny or not shutil.which(tool[0])
        else [tool + PYTEST + KERNELS + ["-k", "sanitize"]]
    )


def vision(name):
    def commands(device, tiny):
        small = ["--modes", "bfloat16"] + (
            ["--batch", "2", "--repeats", "2"] if tiny else ["--compile"]
        )
        return [script("vision", "--models", VISION[name], "--name", name, *small)]

    return commands


def benchmark(name, *options):
    return lambda device, tiny: [script(name, *options, *(["--repeats", "2"] if tiny else []))]


def run(name):
    return lambda device, tiny: [script("runs", name)]


PARTS = {  # the most important first
    "compile": lambda device, tiny: [script("compile")],
    "kernels": kernels,
    "checks": checks,
    "sanitize": sanitize,
    "roof": benchmark("roof"),
    "flash": benchmark("flash", "--widths", "64"),
    "windows": benchmark("windows"),
    "compile_models": lambda device, tiny: [script("compile", "--group", "models")],
    "fused": benchmark("fused"),
    **{name: vision(name) for name in VISION},
    "flash_wide": benchmark("flash", "--widths", "128"),  # further rows of the same record
    "attention": benchmark("attention"),
    "translation": benchmark("translation", "--dropout", "0", "0.1"),
    **{
        name: benchmark(name)
        for name in (
            "mae_speed",
            "detr_speed",
            "panoptic_speed",
            "autoformer_speed",
            "gpt_speed",
        )
    },
    "efficient": lambda device, tiny: [script("efficient", "crossover")],
    **{f"run_{name}": run(name) for name in RUNS + NETWORK},
}


def call(command, seconds):
    """The exit status of a command; None if time was up, and it and its children were ended."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")
    process = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=os.setpgrp)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def execute(name, arguments, seconds):
    """Run the commands of a part, for so long at most; say how it ended."""
    common = ["--out", str(arguments.out)] + ["--tiny"] * arguments.tiny
    end = time.monotonic() + seconds
    for command in PARTS[name](arguments.device, arguments.tiny):
        if "pytest" not in command:
            command = command + common
            if not name.startswith("run_"):
                command += ["--device", arguments.device]
            elif not arguments.tiny:
                command += ["--checkpoints", str(arguments.out / "checkpoints")]
            if name in RESUMED:
                command += ["--minutes", f"{(end - time.monotonic() - LAST) / 60:.2f}"]
        status = call(command, end - time.monotonic())
        if status is None:
            return f"out of time after {seconds:.0f} s"
        if status:
            return "unfinished" if status == UNFINISHED else "failed"
    return "done"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help=", ".join(PARTS),
        default=[name for name in PARTS if name not in {f"run_{run}" for run in NETWORK}],
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a size that means nothing, to see that all runs"
    )
    parser.add_argument(
        "--again", action="store_true", help="also what has been done with this code"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e4, help="for all; no part begins after so many"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "PyTorch finds no CUDA device; --tiny --device cpu shows that all parts run"
        )
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    marks, now, failed = arguments.out / "gpu.done", version(*CODE), []
    end = time.monotonic() + 60 * arguments.minutes
    known = marks.exists() and not arguments.again
    done = set(marks.read_text().split("\n")) if known else set()
    for name in arguments.part:
        if f"{now} {name}" in done:
            print(f"== {name}: done with this code (--again repeats it)", flush=True)
            continue
        missing = [package for package in NEEDS.get(name, ()) if find_spec(package) is None]
        if missing:
            print(
                f"== {name}: left out, since {', '.join(missing)} cannot be imported",
                flush=True,
            )
            continue
        seconds, began = min(LIMIT, end - time.monotonic()), time.perf_counter()
        if seconds <= 0:
            failed.append(name)
            print(f"== {name}: no time left", flush=True)
            continue
        print(f"== {name}", flush=True)
        how = execute(name, arguments, seconds)
        if how == "done":
            with marks.open("a") as file:
                file.write(f"{now} {name}\n")
        else:
            failed.append(name)
        print(f"== {name}: {how}, {time.perf_counter() - began:.0f} s", flush=True)
    if arguments.out == RESULTS and not arguments.tiny:
        subprocess.run([sys.executable, "-m", "tools.speed_table"], cwd=ROOT, check=True)
        print(
            "== the README has the new speeds; run the notebooks that show records again, "
            "and read what they say of them"
        )
    sys.exit(f"not done: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
