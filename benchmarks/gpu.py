"""Everything that needs a GPU, in one command: `make gpu`, or `python -m benchmarks.gpu`.

Checks the library on CUDA, times it beside its peers and makes the chapters' full training
runs, with the PyTorch that is there and without a network. Each part is a list of commands;
`--part NAME` runs one. A part that is finished leaves a mark in the folder of the records and
is not run again for the same commit, so an interrupted command can be given again; the runs
`numbers`, `digits`, `detr` and `supernet` go on from their last checkpoint. With --tiny and
--device cpu all parts run at a size that means nothing, to see that they work before a GPU is
paid for.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# record: model; in bfloat16 only, for a part has nine minutes and to compile takes most of them
VISION = {
    "vit": "vit_small_patch16_224",
    "swin": "swin_tiny_patch4_window7_224",
    "swinv2": "swinv2_tiny_window8_256",
    "tnt": "tnt_s_patch16_224",
}
RUNS = ("numbers", "translator", "lengths", "digits", "detr", "supernet")
# runs that fetch their data: by name only
NETWORK = ("cifar10", "mae_cifar", "supernet_cifar10", "multi30k")
NEEDS = {  # packages that not every machine has
    **dict.fromkeys(
        ("run_numbers", "run_translator", "run_lengths"), ("num2words", "tokenizers")
    ),
    "run_digits": ("sklearn",),
    "run_detr": ("sklearn", "scipy", "pycocotools"),
    **dict.fromkeys(("run_mae_cifar", "run_supernet", "run_supernet_cifar10"), ("sklearn",)),
    **dict.fromkeys(("flash", "windows"), ("triton",)),
    **dict.fromkeys(("translation", "vit", "swin", "swinv2", "mae_speed"), ("transformers",)),
    "detr_speed": ("transformers", "timm", "scipy", "torchvision"),
    "panoptic_speed": ("transformers", "timm", "scipy", "torchvision"),
}
LIMIT = 540  # seconds for a command: a part must end within nine minutes


def script(name, *options):
    return [sys.executable, "-m", f"benchmarks.{name}", *options]


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
# what has tests on CUDA
CHECKS = [f"tests/test_{name}.py" for name in ("attention", "backbones", "cost", "decoding")]
KERNELS = ["tests/test_flash.py", "tests/test_windows.py"]


def checks(device, tiny):
    """The library's own tests of what runs on a GPU."""
    return [
        PYTEST + CHECKS + ["-k", "agree_with_float64 and cpu" if tiny else "cuda or on_a_gpu"]
    ]


def kernels(device, tiny):
    """All tests of the kernels, compiled where there is a GPU."""
    return [PYTEST + KERNELS + (["-k", "sanitize"] if tiny else [])]


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


PARTS = {
    "checks": checks,
    "kernels": kernels,
    "sanitize": sanitize,
    **{name: benchmark(name) for name in ("attention", "flash", "windows")},
    "translation": benchmark("translation", "--dropout", "0", "0.1"),
    **{name: vision(name) for name in VISION},
    **{
        name: benchmark(name)
        for name in ("mae_speed", "detr_speed", "panoptic_speed", "autoformer_speed")
    },
    **{f"run_{name}": run(name) for name in RUNS + NETWORK},
}


def commit():
    """The commit alone: the records of finished parts are files that make the tree differ."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
        )
    except OSError:  # no git
        return None
    return found.stdout.strip() or None


def execute(name, arguments):
    """Run the commands of a part; True if all of them succeed."""
    common = ["--out", str(arguments.out)] + ["--tiny"] * arguments.tiny
    for command in PARTS[name](arguments.device, arguments.tiny):
        if "pytest" not in command:
            command = command + common
            if not name.startswith("run_"):
                command += ["--device", arguments.device]
            elif not arguments.tiny:
                command += ["--checkpoints", str(arguments.out / "checkpoints")]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")
        try:
            if subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT).returncode:
                return False
        except subprocess.TimeoutExpired:
            print(f"== {name}: out of time after {LIMIT} s", flush=True)
            return False
    return True


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
        "--again", action="store_true", help="also what has been done for this commit"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "PyTorch finds no CUDA device; --tiny --device cpu shows that all parts run"
        )
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    marks, now, failed = arguments.out / "gpu.done", commit(), []
    known = now and marks.exists() and not arguments.again
    done = set(marks.read_text().split("\n")) if known else set()
    for name in arguments.part:
        if f"{now} {name}" in done:
            print(f"== {name}: done for {now} (--again repeats it)", flush=True)
            continue
        missing = [package for package in NEEDS.get(name, ()) if find_spec(package) is None]
        if missing:
            print(
                f"== {name}: left out, since {', '.join(missing)} cannot be imported",
                flush=True,
            )
            continue
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        if execute(name, arguments):
            with marks.open("a") as file:
                file.write(f"{now} {name}\n")
        else:
            failed.append(name)
        result = "failed after" if name in failed else "done in"
        print(f"== {name}: {result} {time.perf_counter() - began:.0f} s", flush=True)
    if arguments.out == RESULTS and not arguments.tiny:
        subprocess.run([sys.executable, "-m", "tools.speed_table"], cwd=ROOT, check=True)
        print(
            "== the README has the new speeds; run the notebooks that show records again, "
            "and read what they say of them"
        )
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
