"""The records of long runs, with the machine that a record comes from.

A record is a JSON file; `attnlib.train.read_record` reads it for the pages.
"""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path

import torch

from benchmarks.basics import ROOT


def machine(device: torch.device | str = "cpu") -> dict:
    """Return what a measurement depends on: device, threads, versions, commit, and date."""
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _commit():
    """The commit of library and benchmarks, "-dirty" if they differ from it, or None."""

    def git(*arguments):
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "attnlib/train.py")  # else the repository is another
        code = (":(top)attnlib", ":(top,glob)benchmarks/*.py")  # records may be new
        changes = git("status", "--porcelain", "--untracked-files=no", "--", *code)
        commit = git("rev-parse", "--short", "HEAD")
        if changes:
            commit += "-dirty"
        return commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    """The processor's name, where the system tells it, and its widest instructions."""
    info = Path("/proc/cpuinfo")
    found = {}
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            found[key.strip()] = value.strip()
    name = found.get("model name", "CPU")
    flags = found.get("flags", "").split()
    for instructions in ("amx_bf16", "avx512_bf16", "avx512f", "avx2"):  # the widest first
        if instructions in flags:
            return f"{name} ({instructions})"
    return f"{name} ({platform.machine()})"


def write_record(path: str | Path, result: dict, device: torch.device | str = "cpu") -> None:
    """Write results to a JSON file, with the machine that they come from.

    An older file stands until the new one is complete.

    Parameters
    ----------
    path : path
    result : dict
        Anything JSON can hold; the keys of `machine` stand before its own.
    device : torch.device or str
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    record = {**machine(device), **result}
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
