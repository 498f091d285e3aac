"""Compile the kernels of `attnlib.windows` for GPUs that need not be there.

    python -m benchmarks.windows_static --out FOLDER                  all
    python -m benchmarks.windows_static --out FOLDER --only sm_90,bfloat16,7

Compiled are all launches of the attention in windows: float32, float16 and bfloat16, heads and
windows of several sizes, with the mask of shifted windows (s), with the logits of Swin V2 (c)
and with a map that is not padded (p); and the products of the fused blocks. The gates are those
of `benchmarks.kernels`. The record, FOLDER/windows_static.json, is also the memory of what has
been compiled: a second command goes on where the first one ended, and compiles again what its
source, its tile or Triton's version has made old.
"""

import argparse
import ast
import csv
import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from attnlib import flash, windows
from attnlib.flash import SHARED, triton
from benchmarks.kernels import COLLAPSED, GPUS, STACK, programs

ROOT = Path(__file__).parent.parent
WINDOWS = (7, 16, 8, 12, 14, 24)
WIDTHS = {"bfloat16": (32, 64, 16, 128, 96), "float16": (32, 64, 16, 128, 96)}
WIDTHS["float32"] = (32, 64, 16)
MORE = {(32, 7): ("", "sp"), (32, 8): ("sc",), (32, 14): ("sp",), (32, 16): ("sc",)}
PRODUCTS = {  # of a fused block: widths in and out, in units of the map's, and what is fused
    "qkv": (1, 3, dict(norm=True)),
    "proj": (1, 1, dict(residual=True)),
    "fc1": (1, 4, dict(norm=True, gelu=True)),
    "fc2": (4, 1, dict(residual=True)),
    "merging": (4, 2, dict(norm=True)),
}
NAMES = "kernel gpu dtype width window options".split()  # what is compiled
TILE = "block warps stages".split()
COLUMNS = [*NAMES, *TILE, *"registers stack shared programs product buffers source".split()]


def jobs(only=()):
    """Tuples of NAMES, all as strings: what is compiled, the most usual first."""
    gpus = sorted((f"sm_{c}" for c in GPUS), key=lambda gpu: gpu not in ("sm_80", "sm_90"))
    found = []
    for gpu, dtype in itertools.product(gpus, WIDTHS):
        size = getattr(torch, dtype).itemsize
        for width, window in itertools.product(WIDTHS[dtype], WINDOWS):
            for options in ("s", *MORE.get((width, window), ())):
                kernels = ("forward", *windows.passes((window,) * 2, width, size))
                found += [
                    (k, gpu, dtype, str(width), str(window), options or "none") for k in kernels
                ]
        widths, names = ("96", "384"), tuple(PRODUCTS)
        found += [(k, gpu, dtype, w, "-", "-") for k in names for w in widths]
    return [job for job in found if set(only) <= set(job)]


# --- what a row depends on --------------------------------------------------------------------


@functools.cache
def functions():
    """{name: (source without docstring, names in it)} of both modules; windows come first."""
    found = {}
    for module in (flash, windows):
        for node in ast.parse(Path(module.__file__).read_text()).body:
            given = ast.unparse(getattr(node, "targets", [node])[0])
            name = getattr(node, "name", given)
            if isinstance(node, ast.FunctionDef):
                node.body = node.body[ast.get_docstring(node) is not None :]
                node.decorator_list = []
            names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} - {"_"}
            found[name] = ast.unparse(node), names
    return found


def source_hash(kernel, cosine=False):
    """A fingerprint of a launch's function and of all that it calls; words do not count.

    `_through_length` is one branch, `if COSINE`: without it nothing of it is compiled.
    """
    left_out = () if cosine else ("_through_length",)
    first = "_product" if kernel in PRODUCTS else windows.FUNCTIONS[kernel].__name__
    todo, seen = [first, "compile_kernel"], set()
    while todo:
        name = todo.pop()
        if name in functions() and name not in seen and name not in left_out:
            seen.add(name)
            todo += functions()[name][1]
    text = "\n".join(functions()[name][0] for name in sorted(seen))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def tile_of(job):
    """Block, warps and stages of a launch."""
    kernel, _, dtype, width, window, _ = job
    size = getattr(torch, dtype).itemsize
    if kernel in PRODUCTS:
        rows, _, _, warps, stages = windows.PRODUCT_TILES[size]
        return [str(rows), str(warps), str(stages)]
    found = windows.tiling(kernel, (int(window),) * 2, int(width), size)
    return [str(found[name]) for name in ("BLOCK", "num_warps", "num_stages")]


def current(row):
    """Whether a row of a record is of today's source and tile."""
    job = tuple(row[name] for name in NAMES)
    source = source_hash(row["kernel"], cosine="c" in row["options"])
    return row["source"] == source and [row[c] for c in TILE] == tile_of(job)


# --- compiling, and what it may not give -----------------------------------------------------


def compiled(job):
    """A row of the record: the tile, and what the compiler made of it."""
    kernel, gpu, dtype, width, window, options = job
    capability, tile = int(gpu[3:]), tile_of(job)
    number = getattr(torch, dtype)
    if kernel in PRODUCTS:
        *widths, fused = PRODUCTS[kernel]
        widths = [int(width) * w for w in widths]
        made = windows.compile_linear(capability, number, *widths, **fused)
    else:
        flags = dict(shifted="s" in options, cosine="c" in options, padded="p" in options)
        made = windows.compile_for(
            kernel, capability, (int(window),) * 2, int(width), number, **flags
        )
    fit = programs(capability, int(tile[1]), made["registers"], made["shared"])
    values = [made["registers"], made["spilled"], made["shared"], fit, made["product"]]
    source = source_hash(kernel, cosine="c" in options)
    row = [*job, *tile, *values, made["buffers"], source]
    return {name: str(x) for name, x in zip(COLUMNS, row, strict=True)}


def floor(row):
    """The registers below which a thread cannot hold its share of the sums in float32."""
    if row["kernel"] in PRODUCTS:
        block, lanes, *_ = windows.PRODUCT_TILES[getattr(torch, row["dtype"]).itemsize]
    else:
        block, lanes = int(row["block"]), max(16, triton.next_power_of_2(int(row["width"])))
    tiles = {"forward": 1, "query": 1, "key": 2, "whole": 3, "bias": 0}.get(row["kernel"], 1)
    sums = tiles * block * lanes + (row["kernel"] in ("whole", "bias")) * block**2
    own = sums // (32 * int(row["warps"]))
    return COLLAPSED + 1 if row["gpu"] == "sm_100" else max(COLLAPSED + 1, own)


def broken(row):
    """What is wrong with a kernel, in words; nothing, if nothing is."""
    room, wrong = SHARED[int(row["gpu"][3:])] << 10, []
    if int(row["stack"]) > STACK:
        wrong.append(f"a stack of {row['stack']} bytes, above {STACK}")
    if int(row["registers"]) < floor(row):
        wrong.append(f"{row['registers']} registers, below {floor(row)}")
    if int(row["shared"]) > room:
        wrong.append(f"{row['shared']} bytes of shared memory, above {room}")
    if int(row["programs"]) < 1:
        wrong.append("no program fits")
    group = row["product"] == "warp_group_dot"
    if row["gpu"] == "sm_90" and row["dtype"] != "float32" and int(row["block"]) >= 64:
        if not group:
            wrong.append(f"products by {row['product']} and not by warp groups")
    # a tile that goes through registers needs a buffer less: for warps that multiply alone,
    # past padding, or in float32 to be taken apart
    past = not group or "p" in row["options"] or row["dtype"] == "float32"
    least = int(row["stages"]) - past
    if row["gpu"] != "sm_100" and int(row["stages"]) > 1 and int(row["buffers"]) < least:
        wrong.append(f"{row['buffers']} buffers: the loop does not fetch ahead")
    return "; ".join(wrong)


# --- the record -------------------------------------------------------------------------------


def read(path):
    """The rows of a record that are of today: {job: row}."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    rows, wanted = csv.DictReader(record["rows"]), set(jobs())
    found = {tuple(row[name] for name in NAMES): row for row in rows}
    if record["triton"] != triton.__version__:
        return {}
    return {job: row for job, row in found.items() if job in wanted and current(row)}


def write(path, rows):
    """The record: a line of text for each kernel, and how many have not been compiled yet."""
    order = jobs()
    lines = [",".join(rows[job][c] for c in COLUMNS) for job in order if job in rows]
    failed = {" ".join(job): broken(row) for job, row in rows.items() if broken(row)}
    record = dict(triton=triton.__version__, compiled=len(lines), of=len(order), failed=failed)
    record["rows"] = [",".join(COLUMNS), *lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


def table(rows):
    """The worst of each (gpu, dtype): kernels, stack, least registers, least programs."""
    found = {}
    for row in rows:
        found.setdefault((row["gpu"], row["dtype"]), []).append(row)
    extremes = (("stack", max), ("registers", min), ("programs", min))
    return {
        name: (len(own), *(best(int(row[c]) for row in own) for c, best in extremes))
        for name, own in found.items()
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--only", default="", help="words such as sm_90,bfloat16,32,7,key,s")
    parser.add_argument("--most", type=int, help="compile this many at most")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "0":  # it counts when Triton is imported
        again = [sys.executable, "-W", "ignore", "-m", __spec__.name, *sys.argv[1:]]
        environment = os.environ | dict(TRITON_INTERPRET="0", PYTHONPATH=str(ROOT))
        raise SystemExit(subprocess.run(again, env=environment).returncode)
    path = arguments.out / "windows_static.json"
    rows = read(path)
    only = [word for word in arguments.only.split(",") if word]
    wanted = [job for job in jobs(only) if job not in rows][: arguments.most]
    for count, job in enumerate(wanted, 1):
        rows[job] = compiled(job)
        print(f"{count}/{len(wanted)} {' '.join(job)} {broken(rows[job])}", flush=True)
        if count % 20 == 0:
            write(path, rows)
    write(path, rows)
    for (gpu, dtype), (count, stack, registers, least) in table(rows.values()).items():
        print(
            f"{gpu:6} {dtype:9} {count:4} kernels: stack at most {stack}, registers at least "
            f"{registers}, programs at least {least}"
        )
    wrong = [f"{' '.join(job)}: {broken(row)}" for job, row in rows.items() if broken(row)]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
