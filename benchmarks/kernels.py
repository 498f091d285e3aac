"""Compile every tiled kernel for GPUs that need not be there, and say what it takes.

    python -m benchmarks.kernels --out FOLDER                    all, about 2,300 compilations
    python -m benchmarks.kernels --out FOLDER --only sm_90,bfloat16

Compiled are the kernel for decoding, and the four others with and without a mask, a bias and
the causal mask or ranges, in float32, float16 and bfloat16, for heads of several widths, for
GPUs from Ampere (sm_80) to Blackwell (sm_100), each with the tile that `attnlib.flash.tiling`
gives it. What a kernel may not do is said by `broken`. The record is also the memory of what
has been compiled: a second command goes on where the first one ended. It drops all rows if
Triton's version has changed, and those whose tile has, or whose code: each row has a hash of
what Triton makes of the kernel's source before it knows the GPU. A compilation takes about a
second of one core.
"""

import argparse
import contextlib
import csv
import hashlib
import inspect
import itertools
import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from attnlib import flash
from attnlib.flash import SHARED, compile_for, tiling, triton

# Of one multiprocessor: the largest shared memory (KiB), warps and programs. From the tables of
# compute capabilities in NVIDIA's CUDA C++ programming guide. All have 65,536 registers.
GPUS = {
    80: ("A100", 164, 64, 32),
    89: ("RTX 4090", 100, 48, 24),
    90: ("H100, H200", 228, 64, 32),
    100: ("B200", 228, 64, 32),
}
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
WIDTHS = (64, 128, 32, 16, 80, 256)
FIRST = ("sm_80", "sm_90")  # what most readers have
STACK = 128  # bytes of a thread's stack that are allowed: spilled, but not in every step
COLLAPSED = 32  # the registers that NVIDIA's assembler leaves a thread when it has given up
COLUMNS = (
    "kernel gpu dtype width extra rows cols warps stages registers stack shared programs "
    "product buffers code"
).split()


def options(kernel):
    """The combinations of mask (m), bias (b) and causal mask (c) or ranges (r)."""
    if kernel == "decode":  # has none of them
        return [""]
    found = ["".join(x) for n in range(4) for x in itertools.combinations("mbc", n)]
    found += ["r", "br"]
    return [extra for extra in found if kernel != "bias" or "b" in extra]


def jobs(only=()):
    """(kernel, gpu, dtype, width, extra) of all compilations, those of FIRST first."""
    gpus = sorted((f"sm_{capability}" for capability in GPUS), key=lambda gpu: gpu not in FIRST)
    found = [
        (kernel, gpu, dtype, width, extra)
        for dtype, width, gpu, kernel in itertools.product(DTYPES, WIDTHS, gpus, flash.TILES)
        for extra in options(kernel)
        # these are refused
        if (dtype, width) != ("float32", 256)
        and not (gpu == "sm_100" and "r" in extra)
        and set(only) <= {kernel, gpu, dtype, str(width), extra or "plain"}
    ]
    return sorted(found, key=lambda job: (job[1] not in FIRST, job[2] == "float32"))


def tile_of(kernel, gpu, dtype, width, extra):
    """Rows, columns, warps and stages by which a kernel is launched."""
    room, more = SHARED[int(gpu[3:])] << 10, "m" in extra or "b" in extra
    found = tiling(kernel, width, width, DTYPES[dtype], more, room)
    return [found[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")]


def compiled(*job):
    """A row of the record: the tile, and what the compiler made of it."""
    kernel, gpu, dtype, width, extra = job
    capability, tile = int(gpu[3:]), tile_of(*job)
    more = {name: name[0] in extra for name in ("mask", "bias", "causal", "ranges")}
    code = code_of(*job)
    made = compile_for(kernel, capability, getattr(torch, dtype), width, **more)
    row = [*job[:4], extra or "plain", *tile]
    row += [made["registers"], made["spilled"], made["shared"]]
    row += [programs(capability, tile[2], made["registers"], made["shared"])]
    return dict(zip(COLUMNS, [*row, made["product"], made["buffers"], code], strict=True))


def programs(capability, warps, registers, shared):
    """How many programs a multiprocessor holds at a time.

    Registers are dealt out to warps in portions of 256; the system takes 1 KiB of shared memory
    for each program.
    """
    _, memory, all_warps, most = GPUS[capability]
    of_warp = -(-registers * 32 // 256) * 256
    fit = 65536 // (of_warp * warps), (memory << 10) // (shared + 1024)
    return min(most, all_warps // warps, *fit)


def floor(row):
    """The registers below which a thread cannot hold its share of the sums.

    The sums of a program are its tile of O, dQ, dK and dV or dB, in float32. A thread that has
    fewer registers keeps them in slow memory, whatever the stack says. On sm_100 the sums lie
    in a memory of their own.
    """
    rows, cols = int(row["rows"]), int(row["cols"])
    width = max(16, triton.next_power_of_2(int(row["width"])))
    sums = {"key": 2 * cols * width, "bias": rows * cols}
    own = sums.get(row["kernel"], rows * width) // (32 * int(row["warps"]))
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
    if row["dtype"] != "float32" and row["gpu"] != "sm_100":
        large = int(row["rows" if row["kernel"] != "key" else "cols"]) >= 64
        if row["gpu"] == "sm_90" and large and row["product"] != "warp_group_dot":
            wrong.append(f"products by {row['product']} and not by warp groups")
        # warps that multiply alone copy a tile to registers first, and need a buffer less
        least = int(row["stages"]) - (row["product"] == "tt.dot")
        loop = int(row["stages"]) > 1 and row["kernel"] != "bias"  # whose loop loads all anew
        if loop and int(row["buffers"]) < least:
            wrong.append(f"{row['buffers']} buffers: the loop does not fetch ahead")
    return "; ".join(wrong)


class Translated(Exception):
    """Carries what Triton would have compiled."""


@contextlib.contextmanager
def only_translated():
    """Within it `triton.compile` stops when it has a kernel in its own language."""
    from triton._C.libtriton import ir

    before = triton.compile

    def translate(source, target, options):
        backend, context = triton.compiler.make_backend(target), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        options, stages = backend.parse_options(dict(options)), {}
        asked = dict(
            target=target,  # Triton 3.4 does not ask for it
            options=options,
            codegen_fns=backend.get_codegen_implementation(options),
            module_map=backend.get_module_map(),
            context=context,
        )
        names = inspect.signature(source.make_ir).parameters
        made = source.make_ir(*(asked[name] for name in names))
        backend.add_stages(stages, options, source.language)
        raise Translated(stages["ttir"](made, {}).str_nodebug())

    triton.compile = translate
    try:
        yield
    finally:
        triton.compile = before


def code_of(kernel, gpu, dtype, width, extra):
    """A hash of a kernel in Triton's language, in which names and comments do not count.

    Constants are put first, for their order there depends on the source's.
    """
    more = {name: name[0] in extra for name in ("mask", "bias", "causal", "ranges")}
    try:
        with only_translated():
            compile_for(kernel, int(gpu[3:]), getattr(torch, dtype), width, **more)
    except Translated as found:
        lines = str(found).splitlines()
    constants = sorted(line for line in lines if "arith.constant" in line)
    rest = [line for line in lines if "arith.constant" not in line]
    return hashlib.sha256("\n".join(constants + rest).encode()).hexdigest()[:8]


def key(row):
    return tuple(str(row[name]) for name in COLUMNS[:5])


def key_of(job):
    return tuple(map(str, (*job[:4], job[4] or "plain")))


def read(path):
    """The rows of a record of today's tiles and Triton: {key: row of strings}."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    if record["triton"] != triton.__version__:
        return {}
    today = {key_of(job): [str(x) for x in tile_of(*job)] for job in jobs()}
    rows = {key(row): row for row in csv.DictReader(record["rows"])}
    return {k: row for k, row in rows.items() if today[k] == [row[c] for c in COLUMNS[5:9]]}


def of_today(rows, pool):
    """Those of the rows whose kernels' code is today's."""
    today = [job for job in jobs() if key_of(job) in rows]
    codes = pool.map(code_of, *zip(*today, strict=True), chunksize=20) if today else []
    names = [
        key_of(job)
        for job, code in zip(today, codes, strict=True)
        if rows[key_of(job)]["code"] == code
    ]
    return {name: rows[name] for name in names}


def write(path, rows, failed):
    """The record: a line of text for each kernel, and what has not been compiled yet."""
    order = [key_of(job) for job in jobs()]
    lines = [",".join(str(rows[name][c]) for c in COLUMNS) for name in order if name in rows]
    missing = {}
    for name in order:
        if name not in rows:
            missing[" ".join(name[1:3])] = missing.get(" ".join(name[1:3]), 0) + 1
    record = {
        "triton": triton.__version__,
        "compiled": len(lines),
        "of": len(order),
        "not compiled yet": missing,
        "failed": failed,
        "rows": [",".join(COLUMNS), *lines],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


def table(rows):
    """The worst of each (gpu, dtype): kernels, stack, registers, programs."""
    found = {}
    for row in rows:
        found.setdefault((row["gpu"], row["dtype"]), []).append(row)
    return {
        name: (
            len(own),
            max(int(row["stack"]) for row in own),
            min(int(row["registers"]) for row in own),
            min(int(row["programs"]) for row in own),
        )
        for name, own in found.items()
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--only", default="", help="words such as sm_90,bfloat16,64,key,mbc")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--most", type=int, help="compile this many at most")
    arguments = parser.parse_args()
    path = arguments.out / "kernels_static.json"
    os.environ["TRITON_INTERPRET"] = "0"  # for the processes that compile
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        rows, failed = of_today(read(path), pool), {}
        words = [word for word in arguments.only.split(",") if word]
        wanted = [job for job in jobs(words) if key_of(job) not in rows][: arguments.most]
        running = {pool.submit(compiled, *job): job for job in wanted}
        for count, future in enumerate(as_completed(running), 1):
            job = running[future]
            try:
                row = future.result()
                rows[key(row)] = row
                wrong = broken(row)
            except Exception as problem:
                wrong = str(problem).strip().splitlines()[0][:90] if str(problem) else "failed"
            if wrong:
                failed[" ".join(key_of(job))] = wrong
            print(f"{count}/{len(wanted)} {' '.join(map(str, job))} {wrong}", flush=True)
            if count % 20 == 0:
                write(path, rows, failed)
    failed |= {" ".join(name): broken(row) for name, row in rows.items() if broken(row)}
    write(path, rows, failed)
    for (gpu, dtype), (count, stack, registers, least) in table(rows.values()).items():
        print(
            f"{gpu:6} {dtype:9} {count:4} kernels: stack at most {stack}, registers at least "
            f"{registers}, programs at least {least}"
        )
    if failed:
        raise SystemExit("\n".join(f"{name}: {wrong}" for name, wrong in failed.items()))


if __name__ == "__main__":
    main()
