"""Everything that needs a GPU, in one command: `python benchmarks/gpu.py --out FOLDER`, or `make gpu`.

Checks the library on CUDA, times it beside its peers and makes the chapters' full training runs, with the PyTorch that
is there and without a network. Each part is a list of commands; `--part NAME` runs one. A part that is finished leaves a
mark in the folder of the records and is not run again for the same commit, so an interrupted command can be given again;
training runs go on from their last checkpoint. With --tiny and --device cpu all parts run at a size that means nothing,
to see that they work before a GPU is paid for.
"""
import argparse
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
VISION = {  # record: model; in bfloat16 only, for a part has nine minutes and to compile takes most of them
    "vit": "vit_small_patch16_224",
    "swin": "swin_tiny_patch4_window7_224",
    "swinv2": "swinv2_tiny_window8_256",
    "tnt": "tnt_s_patch16_224",
}
RUNS = ("numbers", "lengths", "digits", "backbones")
NETWORK = ("cifar10", "multi30k")  # runs that fetch their data: by name only
WORDS = ("run_numbers", "run_lengths")  # runs on number words, from a package that not every machine has


def script(name, *options):
    return [sys.executable, str(HERE / f"{name}.py"), *options]


def checks(device, tiny):
    """The library's own tests of what runs on a GPU, and the kernels' once more under compute-sanitizer."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    kernels = ["tests/test_flash.py", "tests/test_windows.py"]
    if tiny:
        return [pytest + ["tests/test_attention.py", "-k", "agree_with_float64"]]
    found = [pytest + ["tests", "--ignore", "tests/test_browser.py", "-k", device], pytest + kernels]
    if shutil.which("compute-sanitizer"):
        sanitizer = ["compute-sanitizer", "--target-processes", "all", "--error-exitcode", "1"]
        found.append(sanitizer + pytest + kernels + ["-k", f"{device} and sanitize"])
    return found


def vision(name):
    def commands(device, tiny):
        small = ["--modes", "bfloat16"] + (["--batch", "2", "--repeats", "2"] if tiny else ["--compile"])
        return [script("vision", "--models", VISION[name], "--name", name, *small)]

    return commands


def benchmark(name, *options):
    return lambda device, tiny: [script(name, *options, *(["--repeats", "2"] if tiny else []))]


def run(name):
    return lambda device, tiny: [script("runs", name)]


PARTS = {
    "checks": checks,
    **{name: benchmark(name) for name in ("attention", "flash", "windows")},
    "translation": benchmark("translation", "--dropout", "0", "0.1"),
    **{name: vision(name) for name in VISION},
    **{f"run_{name}": run(name) for name in RUNS + NETWORK},
}


def commit():
    """The commit alone: the records of finished parts are files of the repository and make it differ from it."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return found.stdout.strip() or "unknown"


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
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS),
                        default=[name for name in PARTS if name not in {f"run_{run}" for run in NETWORK}])
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the records")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a size that means nothing, to see that all runs")
    parser.add_argument("--again", action="store_true", help="also what has been done for this commit")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    marks, now, failed = arguments.out / "gpu.done", commit(), []
    done = set(marks.read_text().split("\n")) if marks.exists() and not arguments.again else set()
    for name in arguments.part:
        if f"{now} {name}" in done:
            print(f"== {name}: done for {now} (--again repeats it)", flush=True)
            continue
        if name in WORDS and find_spec("num2words") is None:
            print(f"== {name}: left out, since the package num2words is missing", flush=True)
            continue
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        if execute(name, arguments):
            with marks.open("a") as file:
                file.write(f"{now} {name}\n")
        else:
            failed.append(name)
        print(f"== {name}: {'failed after' if name in failed else 'done in'} {time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
