"""Everything that needs a GPU, in one command: `make gpu`, or `python -m benchmarks.gpu`.

Checks the library on CUDA, times it beside its peers and makes the chapters' full training
runs, with the PyTorch that is there and without a network: the most important parts first. Each
part is a list of commands; `--part NAME` runs one, and `make gpu PART=NAME` does. No part goes
on for more than eight minutes, so each fits into a session of ten. `compile` and
`compile_models` fill the compilers' caches with many processes, for the parts that time.

Any command can be given again. A part that is finished is not run again while the code is the
same. A part that was not goes on: timings write a row as soon as they have it, training runs
keep checkpoints, and compilers fill their caches. So a part that needs longer than eight
minutes, or than --minutes allows, is split by giving its command several times. To measure
again, delete the record.

How each part ended, and why one did not, is recorded in FOLDER/gpu_DEVICE.json. The records of
the timings say themselves what they lack: under "left_out" who could not take part (a package
is missing, memory ran out), under "failed" what could not be measured at all. The command ends
with an error if a part has failed or is unfinished.

With --tiny and --device cpu all parts run at a size that means nothing, to see that they work
before a GPU is paid for.

The minutes of each part are estimates for an H100, since none has been run on a GPU:

"""

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.basics import ROOT, UNFINISHED, reason, version

RESULTS = ROOT / "benchmarks" / "results"
VISION = {  # record: model; in bfloat16 only, because compilation dominates
    "swin": "swin_tiny_patch4_window7_224",
    "swinv2": "swinv2_tiny_window8_256",
    "tnt": "tnt_s_patch16_224",
    "vit": "vit_small_patch16_224",
}
RUNS = ("translator", "lengths", "digits", "detr", "supernet", "captions", "gpt")
# runs that fetch their data: by name only
NETWORK = ("cifar10", "mae_cifar", "supernet_cifar10", "gpt_tinystories")
TRAIN = "accelerate", "safetensors", "tqdm"  # attnlib.train cannot do without
NEEDS = {  # packages without which nothing of a part runs; peers that lack are left out
    **dict.fromkeys(
        ("compile", "kernels", "sanitize", "flash", "windows", "fused", "flash_wide"),
        ("triton",),
    ),
    **dict.fromkeys(("checks", "kernels", "sanitize"), ("pytest",)),
    "compile_models": ("triton", "timm"),
    "translation": ("transformers",),
    **dict.fromkeys(
        ("detr_speed", "panoptic_speed"), ("transformers", "timm", "torchvision", "scipy")
    ),
    **dict.fromkeys(("run_translator", "run_lengths"), ("num2words", "tokenizers")),
    "run_multi30k": ("tokenizers", "sacrebleu"),
    "run_digits": ("sklearn",),
    **dict.fromkeys(("run_gpt", "run_gpt_tinystories"), ("tokenizers",)),
    **dict.fromkeys(("run_detr", "run_captions"), ("sklearn", "scipy", "pycocotools")),
    **dict.fromkeys(("run_mae_cifar", "run_supernet", "run_supernet_cifar10"), ("sklearn",)),
}
LIMIT = 480  # seconds for a part
LAST = 60  # of them in which a benchmark begins no further row


CODE = "attnlib", "benchmarks", "tests"


def script(name, *options):
    return [sys.executable, "-m", f"benchmarks.{name}", *options]


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
# what has tests on CUDA
CHECKS = [f"tests/test_{name}.py" for name in ("attention", "backbones", "cost", "decoding")]
KERNELS = [
    "tests/test_flash.py",
    "tests/test_rare_calls_5c.py",
    "tests/test_windows.py",
    "tests/test_windows_fused.py",
]


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
    """The edges of the kernels under NVIDIA's memory checker, where it is installed.

    PyTorch keeps freed memory, in which the checker sees no fault: it has to give it back.
    """
    tool = ["compute-sanitizer", "--target-processes", "all", "--error-exitcode", "1"]
    if tiny or not shutil.which(tool[0]):
        return []
    no_cache = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
    return [no_cache + tool + PYTEST + KERNELS + ["-k", "sanitize"]]


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


def multi30k(device, tiny):
    """Translate English to German, with three seeds."""
    seeds = range(1 if tiny else 3)
    return [script("multi30k", "train", "--seed", str(seed)) for seed in seeds]


PARTS = {  # the most important first
    "compile": lambda device, tiny: [script("compile")],
    "kernels": kernels,
    "checks": checks,
    "sanitize": sanitize,
    "roof": benchmark("cost", "roofline"),
    "flash": benchmark("flash", "speed", "--widths", "64"),
    "windows": benchmark("windows", "speed"),
    "compile_models": lambda device, tiny: [script("compile", "--group", "models")],
    "fused": benchmark("windows", "fused"),
    **{name: vision(name) for name in VISION},
    "flash_wide": benchmark(
        "flash", "speed", "--widths", "128"
    ),  # further rows of the same record
    "attention": benchmark("attention", "speed"),
    "translation": benchmark("transformer", "speed", "--dropout", "0", "0.1"),
    **{
        f"{name}_speed": benchmark(name, "speed")
        for name in ("mae", "detr", "panoptic", "autoformer")
    },
    "efficient": lambda device, tiny: [script("efficient", "crossover")],
    **{f"run_{name}": run(name) for name in RUNS + NETWORK},
    "run_multi30k": multi30k,
}


FETCHING = {"run_multi30k", *(f"run_{name}" for name in NETWORK)}
MINUTES = {  # what a part takes on an H100, estimated; more than 8 need the command again
    **dict(compile=8, kernels=8, checks=3, sanitize=6, roof=1, flash=7, windows=5),
    **dict(compile_models=8, fused=2, swin=7, swinv2=8, tnt=8, vit=6, flash_wide=7),
    **dict(attention=1, translation=6, mae_speed=2, detr_speed=2, panoptic_speed=2),
    **dict(autoformer_speed=2, efficient=3, run_translator=5),
    **dict(run_lengths=6, run_digits=12, run_detr=10, run_supernet=10, run_captions=12),
    **dict(run_gpt=12, run_cifar10=60, run_mae_cifar=40, run_supernet_cifar10=40),
    **dict(run_multi30k=30, run_gpt_tinystories=60),
}


def call(command, seconds):
    """Run a command and print what it says.

    Returns
    -------
    status : int or None
        None if time was up, and the command and its children were ended.
    last : str
        The last line that it said.
    """
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")
    environment.setdefault("TQDM_MININTERVAL", "20")  # seconds: a bar is a line each time here
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        preexec_fn=os.setpgrp,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = collections.deque(maxlen=1)

    def read():
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.strip():
                lines.append(line.strip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reader.join(10)
    return status, "".join(lines)


def execute(name, arguments, seconds):
    """Run the commands of a part, for so long at most; say how it ended, and why."""
    common = ["--out", str(arguments.out)] + ["--tiny"] * arguments.tiny
    end = time.monotonic() + seconds
    for command in PARTS[name](arguments.device, arguments.tiny):
        if "pytest" not in command:
            command = command + common
            if name.startswith("run_"):
                if not arguments.tiny:
                    command += ["--checkpoints", str(arguments.out / "checkpoints")]
            else:
                left = (end - time.monotonic() - LAST) / 60
                command += ["--minutes", f"{left:.2f}"]
                if name != "efficient":  # which takes the GPU that is there
                    command += ["--device", arguments.device]
        try:
            status, last = call(command, end - time.monotonic())
        except OSError as problem:
            return "failed", reason(problem)
        if status is None:
            return "out of time", f"after {seconds:.0f} s"
        if status:
            return "unfinished" if status == UNFINISHED else "failed", last
    return "done", ""


class Suite:
    """How the parts have ended, written after each of them.

    Parameters
    ----------
    path : Path
        The record; a part that is done there with the same code is done.
    device : str
    again : bool
        Whether nothing counts as done.
    """

    def __init__(self, path, device, again):
        self.path = path
        self.device = device
        self.parts = {}
        self.code = version(*CODE)
        if path.exists() and not again:
            self.parts = json.loads(path.read_text())["parts"]

    def is_done(self, name):
        row = self.parts.get(name, {})
        return row.get("how") == "done" and row.get("code") == self.code

    def end(self, name, how, why, seconds):
        row = dict(how=how, why=why, seconds=round(seconds), code=self.code)
        self.parts[name] = {key: value for key, value in row.items() if value != ""}
        record = {"torch": torch.__version__, "parts": self.parts}
        if self.device == "cuda":
            record["device"] = torch.cuda.get_device_name()
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)
        because = f" ({why})" if why else ""
        print(f"== {name}: {how}{because}, {seconds:.0f} s", flush=True)


def needed(name):
    """The packages without which a part cannot begin."""
    return *TRAIN, *NEEDS.get(name, ())


def run_part(name, suite, arguments, end):
    """Run a part unless it is done; whether nothing of it is left to do here."""
    if suite.is_done(name):
        print(f"== {name}: done with this code (--again repeats it)", flush=True)
        return True
    missing = [package for package in needed(name) if find_spec(package) is None]
    if missing:
        suite.end(name, "left out", f"since {', '.join(missing)} cannot be imported", 0)
        return True
    seconds = min(LIMIT, end - time.monotonic())
    began = time.monotonic()
    if seconds <= 0:
        suite.end(name, "not begun", "no time left", 0)
        return False
    print(f"== {name}", flush=True)
    try:
        how, why = execute(name, arguments, seconds)
    except Exception as problem:  # the next part can still run
        how = "failed"
        why = reason(problem)
    suite.end(name, how, why, time.monotonic() - began)
    return how == "done"


def options():
    parser = argparse.ArgumentParser(
        description=__doc__ + "\n".join(f"  {name:22}{MINUTES[name]:4}" for name in PARTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--part",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help="one or several; by default all but those that fetch their data",
        default=[name for name in PARTS if name not in FETCHING],
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
        "--minutes",
        type=float,
        default=1e4,
        help="for all; no part begins after so many, and none goes on for longer",
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "PyTorch finds no CUDA device; --tiny --device cpu shows that all parts run"
        )
    return arguments


def main():
    arguments = options()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    name = "gpu_tiny" if arguments.tiny else "gpu"
    path = arguments.out / f"{name}_{arguments.device}.json"
    suite = Suite(path, arguments.device, arguments.again)
    left = [name for name in arguments.part if not run_part(name, suite, arguments, end)]
    print(f"recorded in {path}")
    if arguments.out == RESULTS and not arguments.tiny:
        print("== run the notebooks that show records again, and read what they say of them")
    sys.exit(f"not done: {', '.join(left)}" if left else 0)


if __name__ == "__main__":
    main()
