"""What was run for 51_flash: `python -m benchmarks.flash COMMAND --out FOLDER`.

    speed   time the tiled kernels next to PyTorch's backends
    tune    time other tiles than those of the table
    static  compile every kernel for GPUs that need not be there

`benchmarks.runner` says how runs are resumed and recorded.
"""

import contextlib
import csv
import functools
import hashlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnlib import flash
from attnlib.attention import attention, attention_backend
from attnlib.flash import (
    _SHARED_MEMORY,
    compile_for,
    flash_attention,
    packed_ranges,
    tiling,
    triton,
)
from benchmarks import runner, timing
from benchmarks.runner import Commands

SHAPES = {  # tokens: (B, h)
    1024: (16, 16),
    2048: (8, 16),
    4096: (4, 16),
    8192: (2, 16),
    16384: (1, 16),
}
KINDS = {  # what a case has beside q, k, v
    "plain": {},
    "causal": dict(causal=True),
    "bias": dict(bias=True),
    "sliding": dict(causal=True, window=1024),
    "packed": dict(causal=True, packed=8),
}
PYTORCH = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
OURS = "triton"
ALLOWED = 0.05  # error, relative to the largest entry; in bfloat16


@dataclass(eq=False, repr=False)
class Case:
    """The inputs of one case, and the gradient of its output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    bias: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None  # keys that a query sees at most, itself included
    packed: int = 1  # sequences that follow each other

    @property
    def leaves(self):
        return [x for x in (self.q, self.k, self.v, self.bias) if x is not None]

    @property
    def tokens(self):
        return self.q.shape[-2]

    def rule(self):
        """Whether query i sees key j, as FlexAttention asks."""
        window = self.window or self.tokens
        own = self.tokens // self.packed

        def sees(b, h, i, j):
            return (i >= j) & (i - j < window) & (i // own == j // own)

        return sees

    @functools.cached_property
    def seen(self):
        """The rule as a matrix, or None where all is seen."""
        at = torch.arange(self.tokens, device=self.q.device)
        return self.rule()(0, 0, at[:, None], at) if self.causal else None

    @functools.cached_property
    def blocks(self):
        """The rule as FlexAttention reads it: which blocks it can skip."""
        n = self.tokens
        device = self.q.device
        return create_block_mask(self.rule(), None, None, n, n, device) if self.causal else None

    @functools.cached_property
    def added(self):
        """The rule as PyTorch's backends add it to the logits, with the bias."""
        if self.bias is None or self.seen is None:
            return self.seen if self.bias is None else self.bias
        return self.bias.masked_fill(~self.seen, -torch.inf)

    def pairs(self):
        """How many pairs of query and key there are."""
        own = self.tokens // self.packed
        width = min(self.window or own, own)
        below = self.packed * (own * width - width * (width - 1) // 2)
        return below if self.causal else self.tokens**2

    @functools.cached_property
    def ranges(self):
        """The rule as our kernels read it, where it is more than causal."""
        own = [self.tokens // self.packed] * self.packed
        device = self.q.device
        if self.window or self.packed > 1:
            return packed_ranges(own, causal=True, window=self.window, device=device)

    def head(self, h):
        """One head of the case, of the whole batch, in float64."""
        one = {
            name: x[:, h : h + 1].detach().double().requires_grad_(name != "grad")
            for name in ("q", "k", "v", "grad", "bias")
            if (x := getattr(self, name)) is not None
        }
        return replace(self, **one)


def make(shape, dtype, device, kind, needs=True):
    """Random inputs (B, h, N, d) of a kind."""
    options = dict(device=device, dtype=dtype)
    q, k, v = (torch.randn(shape, **options, requires_grad=needs) for _ in range(3))
    kind = dict(KINDS[kind])
    if kind.pop("bias", False):
        bias = torch.randn(1, shape[1], shape[2], shape[2], **options, requires_grad=needs)
        kind["bias"] = bias
    if "window" in kind:
        kind["window"] = min(kind["window"], max(1, shape[2] // 4))
    if "packed" in kind:
        kind["packed"] = math.gcd(kind["packed"], shape[2])  # all of one length
    return Case(q, k, v, torch.randn(shape, **options), **kind)


# --- contestants ------------------------------------------------------------------------------
def reference(case):
    with attention_backend("reference"):
        return attention(case.q, case.k, case.v, mask=case.seen, bias=case.bias)


def pytorch(backend):
    def call(case):
        told = case.bias is None and case.ranges is None  # by a flag, with nothing to add
        options = dict(is_causal=case.causal) if told else dict(attn_mask=case.added)
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                case.q, case.k, case.v, **options
            )

    return call


def ours(case):
    options = dict(causal=case.causal) if case.ranges is None else dict(ranges=case.ranges)
    return flash_attention(case.q, case.k, case.v, bias=case.bias, **options)


@functools.cache
def compiled_flex():
    """Compiled for each shape; never the plain version, which writes all the logits down."""
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex(case):
    """FlexAttention: the bias as a change of the score, what is seen as a mask of blocks."""
    bias = case.bias

    def add(score, b, h, i, j):
        return score + bias[0, h, i, j]

    call = compiled_flex() if case.q.is_cuda else flex_attention
    options = {} if bias is None else dict(score_mod=add)
    return call(case.q, case.k, case.v, block_mask=case.blocks, **options)


def contestants(device):
    some = PYTORCH if device == "cuda" else ("flash", "math")
    return {
        OURS: ours,
        **{name: pytorch(PYTORCH[name]) for name in some},
        "flex": flex,
        "reference": reference,
    }


# --- passes -----------------------------------------------------------------------------------
def forward(function, case):
    with torch.no_grad():
        return [function(case)]


def gradients(out, case, **options):
    return torch.autograd.grad(out, case.leaves, case.grad, **options)


def training(function, case):
    """Forward and backward: the gradients of q, k, v, and of the bias."""
    return gradients(function(case), case)


PASSES = {"forward": forward, "backward": training}


def timed(function, step, case):
    """What is timed: the forward pass, or the backward pass through a graph that stands."""
    if step is forward:
        return lambda: forward(function, case)
    out = function(case)
    return lambda: gradients(out, case, retain_graph=True)


def error(found, exact):
    """The largest difference, relative to the largest entry, over some tensors."""
    return max(
        ((a.double() - b).abs().max() / b.abs().max()).item()
        for a, b in zip(found, exact, strict=True)
    )


def exact_results(step, case):
    """Output or gradients of the equation for the first and the last head: {head: tensors}."""
    return {h: step(reference, case.head(h)) for h in {0, case.q.shape[1] - 1}}


def compare(function, step, case, exact):
    """The error of a contestant: of its output, or of every gradient."""
    found = step(function, case)
    return max(error([x[:, h : h + 1] for x in found], wanted) for h, wanted in exact.items())


def prepare(function, step, case, exact, device):
    """The error and the memory of a contestant, and what of it is timed."""
    row = {"error": compare(function, step, case, exact) if exact else None}
    row["MiB"] = round(timing.peak_mib(lambda: step(function, case), device))
    return row, timed(function, step, case)


def warmed(calls, rows, device, left_out):
    """The calls that run while the graphs of all stand.

    Where ours finds no memory beside the graphs of others, the largest of them has to go.
    """
    while True:
        failed = {}
        warm = timing.take_turns(calls, 1, device, left_out=failed)
        others = [name for name in calls if name != OURS]
        if OURS not in failed or not others:
            left_out |= failed
            return {name: calls[name] for name in warm}
        largest = max(others, key=lambda name: rows[name]["MiB"])
        left_out[largest] = f"leaves {OURS} no memory ({failed[OURS]})"
        calls = {name: call for name, call in calls.items() if name != largest}
        runner.free_memory()


def measure(functions, step, case, device, repeats, left_out):
    """{backend: times, error, memory} for those that take these inputs; why others do not.

    Without memory for the exact results the errors are None.
    """
    exact = timing.attempt(left_out, "exact results", lambda: exact_results(step, case))
    made = timing.attempt_all(
        {
            name: functools.partial(prepare, function, step, case, exact, device)
            for name, function in functions.items()
        },
        left_out,
    )
    rows = {name: row for name, (row, _) in made.items()}
    calls = {name: call for name, (_, call) in made.items()}
    del made  # or the graph of one that fails would stand until the end
    calls = warmed(calls, rows, device, left_out)
    times = timing.measured(calls, repeats, device, ours=OURS, left_out=left_out)
    backends = {}
    for name, own in times.items():
        ms = own.get("kernel", own)["ms"]
        products = 2 * (2 if step is forward else 5) * case.q[..., 0, :].numel() * case.pairs()
        speed = round(products / ms / 1e9, 1)
        backends[name] = {**rows[name], **own, "Tflop/s": speed}
    if not backends:
        raise RuntimeError("no contestant could be timed")
    return {"backends": backends, "left_out": dict(left_out)}


def row_of(setting, lead, dtype, device, repeats, left_out):
    """One row: a case, its contestants and a line about them."""
    torch.compiler.reset()  # or the compiler gives up after a number of shapes
    step = PASSES[setting["pass"]]
    n = setting["tokens"]
    shape = (*lead, n, setting["width"])
    case = make(shape, dtype, device, setting["kind"], step is training)
    row = measure(contestants(device), step, case, device, repeats, left_out)
    said = ""
    for name, own in row["backends"].items():
        times = own.get("kernel", own)
        said += f"{name:>10} {times['ms']:8.3f} ms ({times.get('ratio', math.nan):.2f})"
    print(*(f"{x!s:>9}" for x in setting.values()), said, flush=True)
    for name, own in row["backends"].items():
        known = own["error"] is not None
        assert not known or own["error"] < ALLOWED, f"{name} is off by {own['error']:.3f}"
    return [{"batch": lead[0], "heads": lead[1], "allowed": ALLOWED, **row}]


# --- tiles ------------------------------------------------------------------------------------
TILE = "BLOCK_M", "BLOCK_N", "num_warps", "num_stages"
CANDIDATES = list(itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3)))
TUNED = {  # kernel: in which kinds it is tuned
    **dict.fromkeys(("forward", "query", "key"), tuple(KINDS)),
    "bias": ("bias",),
}


@contextlib.contextmanager
def cut(kernel, tile):
    """Within it a kernel is cut and started by this tile: rows, columns, warps, stages."""
    before = flash.tiling

    def tiling(name, *arguments, **options):
        found = before(name, *arguments, **options)
        return found | dict(zip(TILE, tile)) if name == kernel and tile else found

    flash.tiling = tiling
    try:
        yield
    finally:
        flash.tiling = before


def launch_of(kernel, case, tile=None):
    """A kernel's launch in a case, as a function, and the tile with which it was started.

    Without `tile` that is the table's.
    """
    found = []
    launch = flash.launch

    def noted(function, *arguments, **options):
        if kernel in function.fn.__name__:
            found.append((functools.partial(launch, function, *arguments, **options), options))
        launch(function, *arguments, **options)

    flash.launch = noted
    try:
        with cut(kernel, tile):
            training(ours, case)
    finally:
        flash.launch = launch
    ((call, options),) = found
    return call, tuple(options[name] for name in TILE)


def compile_tile(kernel, kind, width, dtype, tile):
    """What a process that compiles ahead does: the launch, at few tokens."""
    with contextlib.suppress(Exception):  # the tile will be tried again, and the error told
        launch_of(kernel, make((2, 16, 256, width), dtype, "cuda", kind), tile)


def tune(kernel, case, candidates, repeats, device):
    """The times of a kernel's tiles: those of the table and all candidates that compile.

    Each is timed alone; the best three and the table's then take turns. Returns the table's
    tile and {tile: milliseconds of each round}, the fastest first.
    """

    def turns(calls):
        if device == "cuda":
            return timing.kernel_turns(calls, repeats, times=5)
        return timing.take_turns(calls, repeats, device)

    table = launch_of(kernel, case)[1]
    alone = {}
    for tile in dict.fromkeys([table, *candidates]):
        try:
            call, started = launch_of(kernel, case, tile)
            assert device == "cpu" or started == tile, (started, tile)
            alone[tile] = statistics.median(turns({tile: call})[tile])
        except (RuntimeError, triton.runtime.errors.TritonError) as problem:
            print(f"  {tile}: {str(problem).splitlines()[0][:80]}")  # shared memory, say
    best = dict.fromkeys([*sorted(alone, key=alone.get)[:3], table])
    times = turns({tile: launch_of(kernel, case, tile)[0] for tile in best})
    return table, dict(sorted(times.items(), key=lambda item: statistics.median(item[1])))


def tune_all(kernels, bench, arguments):
    """Tune kernels in all kinds, and print what is found."""
    shape = (*SHAPES[4096], 4096)
    candidates = CANDIDATES
    if arguments.tiny:
        shape = (1, 1, 20)
        candidates = [(16, 16, 4, 1)]
    work = [
        (kernel, kind, width, getattr(torch, dtype))
        for kernel in kernels
        for dtype in arguments.dtypes
        for width in ((16,) if arguments.tiny else (64, 128))
        for kind in TUNED[kernel]
    ]
    spawn = dict(mp_context=multiprocessing.get_context("spawn"))
    pool = ProcessPoolExecutor(arguments.workers, **spawn) if arguments.workers else None
    ahead = {
        what: [pool.submit(compile_tile, *what, tile) for tile in candidates] if pool else []
        for what in work
    }

    def rows(kernel, kind, width, dtype, left_out):
        for future in ahead[kernel, kind, width, dtype]:
            future.result()
        case = make((*shape, width), dtype, arguments.device, kind)
        table, times = tune(kernel, case, candidates, arguments.repeats, arguments.device)
        for tile in times:
            ms, low, high = statistics.median(times[tile]), *timing.quartiles(times[tile])
            row = {"tile": tile, "table": tile == table, "ms": round(ms, 4)}
            row["quartiles"] = [round(low, 4), round(high, 4)]
            said = f"{tile} {ms:.3f} ms ({low:.3f} to {high:.3f})"
            print(f"{kernel:8}{kind:8}{width:4} {said}" + "  <- the table's" * row["table"])
            yield row

    for what in work:
        setting = dict(zip(("kernel", "kind", "width"), what)) | {"dtype": str(what[3])[6:]}
        bench.once(setting, functools.partial(rows, *what))
    if pool:
        pool.shutdown()


def record_rows(name, arguments):
    """Return the rows of FOLDER/NAME_DEVICE.json; the GPU is ready to be timed."""
    torch.manual_seed(0)
    timing.own_stream(arguments.device)
    path = arguments.out and arguments.out / f"{name}_{arguments.device}.json"
    known = dict(tiny=arguments.tiny, triton=triton.__version__)
    return runner.Rows(path, arguments.device, arguments.minutes, **known)


def tune_tiles(arguments):
    """Time other tiles than those of the table.

    Each launch is timed alone, in every kind of attention, and the fastest tiles are printed.
    The record is FOLDER/tiles_DEVICE.json.
    """
    bench = record_rows("tiles", arguments)
    bench.work(lambda: tune_all(arguments.kernels, bench, arguments))


def speed(arguments):
    """Time the tiled kernels next to PyTorch's backends.

    Compared are the equation ("reference"), each backend of PyTorch that takes the inputs,
    FlexAttention ("flex"), compiled on a GPU, and ours ("triton"); they take turns. The kinds
    are plain, causal, with a bias, a sliding window, and eight sequences packed into one. Ours
    gets the last two as ranges, PyTorch's backends as a mask. Before anything is timed the
    outputs and all gradients, of the bias as well, of the first and the last head are compared
    with the reference in float64.

    Recorded are medians and quartiles of the times and of the ratios of our time to theirs,
    errors, peak memory (of forward and backward together, where the backward pass is timed),
    and operations per second: two products forward, five backward, of what is seen. On a GPU
    each contestant has the time on the wall and, under "kernel", that between two events: of a
    CUDA graph, without Python and launches, or of the calls themselves where they are long. The
    rows are written as they come.
    """
    bench = record_rows(arguments.name, arguments)
    shapes = {n: SHAPES[n] for n in arguments.tokens}
    if arguments.tiny:
        shapes = {12: (1, 1)}
        arguments.widths = [16]

    def go():
        cases = (arguments.dtypes, shapes, arguments.widths, arguments.kinds, PASSES)
        for dtype, n, width, kind, step in itertools.product(*cases):
            setting = dict(zip(("dtype", "tokens", "width", "kind"), (dtype, n, width, kind)))
            setting["pass"] = step
            rest = shapes[n], getattr(torch, dtype), arguments.device, arguments.repeats
            bench.once(setting, functools.partial(row_of, setting, *rest))

    bench.work(go)


# --- compiling for other GPUs ----------------------------------------------------------------


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
    room = _SHARED_MEMORY[int(gpu[3:])] << 10
    more = "m" in extra or "b" in extra
    found = tiling(kernel, width, width, DTYPES[dtype], more, room)
    return [found[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")]


def compiled(*job):
    """A row of the record: the tile, and what the compiler made of it."""
    kernel, gpu, dtype, width, extra = job
    capability = int(gpu[3:])
    tile = tile_of(*job)
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


def least_registers(row, sums):
    """The registers below which a thread cannot hold its share of a program's sums.

    The sums are numbers in float32. A thread that has fewer registers keeps them in slow
    memory, whatever the stack says. On sm_100 the sums lie in a memory of their own.
    """
    if row["gpu"] == "sm_100":
        return COLLAPSED + 1
    own = sums // (32 * int(row["warps"]))
    return max(COLLAPSED + 1, own)


def shortages(row, sums):
    """What a kernel lacks on its GPU, a list of words, if its program adds so many sums."""
    room = _SHARED_MEMORY[int(row["gpu"][3:])] << 10
    least = least_registers(row, sums)
    wrong = []
    if int(row["stack"]) > STACK:
        wrong.append(f"a stack of {row['stack']} bytes, above {STACK}")
    if int(row["registers"]) < least:
        wrong.append(f"{row['registers']} registers, below {least}")
    if int(row["shared"]) > room:
        wrong.append(f"{row['shared']} bytes of shared memory, above {room}")
    if int(row["programs"]) < 1:
        wrong.append("no program fits")
    return wrong


def sums_of(row):
    """How many sums a program has: its tile of O, dQ, dK and dV or dB."""
    rows = int(row["rows"])
    cols = int(row["cols"])
    width = max(16, triton.next_power_of_2(int(row["width"])))
    sums = {"key": 2 * cols * width, "bias": rows * cols}
    return sums.get(row["kernel"], rows * width)


def broken(row):
    """What is wrong with a kernel, in words; nothing, if nothing is."""
    wrong = shortages(row, sums_of(row))
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
        backend = triton.compiler.make_backend(target)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        options = backend.parse_options(dict(options))
        stages = {}
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


def static(arguments):
    """Compile every tiled kernel for GPUs that need not be there.

    Compiled are the kernel for decoding, and the four others with and without a mask, a bias
    and the causal mask or ranges, in float32, float16 and bfloat16, for heads of several
    widths, for GPUs from Ampere (sm_80) to Blackwell (sm_100), each with the tile that
    `attnlib.flash.tiling` gives it. What a kernel may not do is said by `broken`. The record is
    also the memory of what has been compiled: a second command goes on where the first one
    ended. It drops all rows if Triton's version has changed, and those whose tile has, or whose
    code: each row has a hash of what Triton makes of the kernel's source before it knows the
    GPU. A compilation takes about a second of one core.
    """
    path = arguments.out / "kernels_static.json"
    os.environ["TRITON_INTERPRET"] = "0"  # for the processes that compile
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        rows = of_today(read(path), pool)
        failed = {}
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


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.timing("speed", speed, repeats=15)
    parser.add_argument("--tokens", type=int, nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--name", default="flash", help="name of the record")
    parser = commands.timing("tune", tune_tiles, repeats=15)
    parser.add_argument("--kernels", nargs="+", choices=TUNED, default=list(TUNED))
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--workers", type=int, default=0, help="that compile tiles ahead")
    parser = commands.add("static", static)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--only", default="", help="words such as sm_90,bfloat16,64,key,mbc")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--most", type=int, help="compile this many at most")
    commands.run(arguments)


if __name__ == "__main__":
    main()
