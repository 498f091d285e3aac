"""What was run for 52_windows: `python -m benchmarks.windows COMMAND --out FOLDER`.

    speed     time attention in windows, from feature map to feature map
    fused     time a whole Swin with fused blocks
    overhead  time what a call of the kernels costs before a kernel starts
    static    compile the kernels for GPUs that need not be there

`benchmarks.runner` says how runs are resumed and recorded.
"""

import ast
import cProfile
import csv
import functools
import hashlib
import itertools
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnlib import (
    flash,
    windows,  # first: without a GPU it has Triton interpreted
)
from attnlib.attention import attention, attention_backend
from attnlib.flash import triton
from attnlib.inference import optimize_for_inference
from attnlib.models import create_model
from attnlib.swin import (
    crop_map,
    cyclic_shift,
    pad_map,
    reverse_cyclic_shift,
    window_layout,
    window_partition,
    window_reverse,
)
from attnlib.swinv2 import WindowAttentionV2, normalize
from benchmarks import runner, timing
from benchmarks.basics import ROOT
from benchmarks.flash import GPUS, programs, shortages
from benchmarks.runner import Commands

MODELS = {"swin_tiny_patch4_window7_224": 224, "swinv2_tiny_window8_256": 256}
TINY = dict(
    img_size=16, window_size=2, num_classes=2, embed_dim=16, depths=(2, 2), num_heads=(1, 2)
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# --- FlexAttention ----------------------------------------------------------------------------
@functools.cache
def regions(layout, device):
    """Which seams each token was carried over, window by window: (windows, N)."""
    y, x = (
        torch.arange(p, device=device) >= p - s for p, s in zip(layout.padded, layout.shift)
    )
    places = 2 * y[:, None] + x  # (H', 1), (W',) -> (H', W')
    places = places[None, :, :, None]  # -> (1, H', W', 1)
    return window_partition(places, layout.window)[0, ..., 0]  # -> (windows, N)


@functools.cache
def blocks(layout, device):
    """For one sequence of all windows: who may attend to whom, and which blocks to skip."""
    region = regions(layout, device)
    count, tokens, region = *region.shape, region.flatten()

    def same(b, h, i, j):
        return (i // tokens == j // tokens) & (region[i] == region[j])

    return create_block_mask(same, None, None, count * tokens, count * tokens, device)


@functools.cache
def compiled_flex():
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def in_batch(q, k, v, bias, layout, call, scale):
    """Attention of (B, windows, h, N, d) with the windows in the batch."""
    shape = q.shape
    region = regions(layout, q.device)
    windows = len(region)

    def score(s, b, h, i, j):
        w = b % windows
        return torch.where(region[w, i] == region[w, j], s + bias[h, i, j], -torch.inf)

    def plain(s, b, h, i, j):
        return s + bias[h, i, j]

    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # -> (B windows, h, N, d)
    out = call(q, k, v, score_mod=score if any(layout.shift) else plain, scale=scale)
    return out.view(shape)


def in_sequence(q, k, v, bias, layout, call, scale):
    """The same with the windows one behind the other in a sequence with a mask of blocks."""
    (_, windows, _, tokens, _) = q.shape
    block_mask = blocks(layout, q.device)

    def score(s, b, h, i, j):
        return s + bias[h, i % tokens, j % tokens]

    q, k, v = (x.transpose(1, 2).flatten(2, 3) for x in (q, k, v))  # -> (B, h, windows N, d)
    out = call(q, k, v, score_mod=score, block_mask=block_mask, scale=scale)
    return out.unflatten(2, (windows, tokens)).transpose(1, 2)


def flex(way, qkv, bias, layout, num_heads, cosine_scale=None):
    """What `attnlib.windows.window_attention` computes, by FlexAttention."""
    x = cyclic_shift(qkv, layout).unflatten(-1, (3, num_heads, -1))
    q, k, v = x.unbind(-3)  # (B, H, W, h, d) each
    scale = None
    if cosine_scale is not None:
        q = normalize(q, cosine_scale)
        k = normalize(k)
        scale = 1.0
    q, k, v = (
        window_partition(y.flatten(-2), layout.window, num_heads).unflatten(1, (-1, num_heads))
        for y in (q, k, v)
    )  # (B, windows, h, N, d) each
    call = compiled_flex() if qkv.is_cuda else flex_attention
    out = way(q, k, v, bias, layout, call, scale).flatten(1, 2)  # -> (B, windows h, N, d)
    return reverse_cyclic_shift(window_reverse(out, layout.window, layout.padded), layout)


def through_flex(way, layer, x):
    """The layer with all between its projections by FlexAttention."""
    layout = layer.layout(x.shape[1:3])
    x = pad_map(x, layout.padded)  # (B, H, W, C) -> (B, H', W', C)
    if isinstance(layer, WindowAttentionV2):
        qkv, scale = layer.project(x), layer.cosine_scale()
    else:
        qkv, scale = layer.qkv(x), None
    out = flex(way, qkv, layer.bias(layout, masked=False), layout, layer.num_heads, scale)
    return layer.proj_drop(layer.proj(crop_map(out, layout.size)))


# --- what is timed ----------------------------------------------------------------------------
def through(backend, layer, x):
    """The layer, or model, with a backend for attention."""
    with attention_backend(backend):
        return layer(x)


def ways(name, stage, shifted, options, device, dtype, left_out=None):
    """{way: function of a map}, for one block of timm's and of ours; and a map's shape."""
    torch.manual_seed(0)
    ours = create_model(name, drop_path_rate=0.0, **options)
    theirs = timing.attempt(left_out, "timm", partial(timing.timm_like, ours, name, options))
    own = ours.layers[stage].blocks[int(shifted)].to(device, dtype).eval()
    side = ours.patch_embed.grid_size[0] // 2**stage
    calls = {}
    if theirs is not None:
        block = theirs.layers[stage].blocks[int(shifted)].to(device, dtype).eval()
        calls["timm"] = block._attn
    calls |= {
        "PyTorch": partial(through, "sdpa", own.attn),
        "kernel": windows.fuse_attention(own.attn),
        "flex, batch": partial(through_flex, in_batch, own.attn),
        "flex, sequence": partial(through_flex, in_sequence, own.attn),
    }
    return calls, (side, side, own.attn.proj.in_features)


def run(call, kind, x):
    """The output, or in training the gradient of the map."""
    if kind == "forward":
        with torch.no_grad():
            return call(x)
    x.grad = None
    call(x).backward(torch.ones_like(x))
    return x.grad


def difference(found, wanted):
    """The largest, relative to the largest entry."""
    return ((found.float() - wanted).abs().max() / wanted.abs().max()).item()


def measure(name, stage, shifted, kind, dtype, arguments, left_out):
    torch.compiler.reset()  # or the compiler gives up after a number of shapes
    options = TINY if arguments.tiny else {}
    device = arguments.device
    calls, shape = ways(name, stage, shifted, options, device, DTYPES[dtype], left_out)
    size = (arguments.batch, *shape)
    pool = [torch.randn(size, device=device, dtype=DTYPES[dtype]) for _ in range(3)]
    pool = [x.requires_grad_(kind != "forward") for x in pool]

    def found(call):
        return run(call, kind, pool[0]).detach().float().clone()

    # FlexAttention fails on a CPU and backward
    maps = timing.attempt_all({way: partial(found, calls[way]) for way in calls}, left_out)
    wanted = maps.get("timm", maps.get("PyTorch"))
    if wanted is None:
        raise RuntimeError("neither timm nor PyTorch has run, to compare with")
    differences = {way: difference(maps[way], wanted) for way in maps}
    assert max(differences.values()) < (1e-4 if dtype == "float32" else 0.05), differences
    del maps

    def cycled(call):
        maps = itertools.cycle(pool)
        return lambda: run(call, kind, next(maps))

    runs = {way: cycled(calls[way]) for way in differences}
    turn = "shifted" if shifted else "plain"
    label = f"{name} stage {stage + 1} {turn:7} {kind:8} {dtype}"
    rows = timing.race(runs, label, arguments, "kernel", left_out)
    bytes_moved = 4 * pool[0].numel() * pool[0].element_size()
    return [
        {
            "way": way,
            "difference": differences[way],
            "kernel_bytes": bytes_moved,
            "left_out": dict(left_out),
            **row,
        }
        for way, row in rows.items()
    ]


def speed(arguments):
    """Time attention in windows, from feature map to feature map.

    For every stage of Swin-T and SwinV2-T, without and with a shift, the whole attention of a
    block (roll, partition, projections, attention, and the way back), forward and with its
    backward pass: timm's, ours through PyTorch, through the kernel, and through FlexAttention
    in two ways, with the windows in the batch and as one sequence with a mask of blocks
    (compiled on a GPU; a CPU has no backward pass of it). Weights are copied and outputs
    compared before anything is timed, and gradients of the maps; all take turns. On a GPU each
    way has the time on the wall and, under "kernel", that of a CUDA graph, without Python and
    launches, or of the calls themselves where they are long. Without timm the others are
    compared with PyTorch's way.
    """
    timing.own_stream(arguments.device)
    path = arguments.out and arguments.out / f"windows_{arguments.device}.json"
    bench = runner.Rows(path, arguments.device, arguments.minutes, arguments.tiny)
    stages = range(4)
    shifts = (False, True)
    if arguments.tiny:
        arguments.batch = 1
        arguments.dtypes = ["float32"]
        stages = (0,)
        shifts = (True,)

    def go():
        cases = (arguments.dtypes, arguments.models, stages, shifts, ("forward", "training"))
        for dtype, name, stage, shifted, kind in itertools.product(*cases):
            setting = dict(model=name, stage=stage + 1, shifted=shifted, dtype=dtype)
            setting |= {"pass": kind, "batch": arguments.batch}
            work = partial(measure, name, stage, shifted, kind, dtype, arguments)
            bench.once(setting, work)

    bench.work(go)


# --- a whole Swin with fused blocks ----------------------------------------------------------

SWIN = "swin_tiny_patch4_window7_224"
FUSED = "fused"


def contestants(device, dtype, options, left_out=None):
    """{name: function of images}, all with the same weights; and the images' size."""
    torch.manual_seed(0)
    ours = create_model(SWIN, drop_path_rate=0.0, **options)
    theirs = timing.attempt(left_out, "timm", partial(timing.timm_like, ours, SWIN, options))
    ours = ours.to(device, dtype).eval()
    fuse = optimize_for_inference if device == "cuda" else windows.fuse_swin
    found = timing.attempt_all({FUSED: partial(fuse, ours)}, left_out)
    found |= {
        "kernel": windows.fuse_swin(ours, trainable=True),
        "PyTorch": partial(through, "sdpa", ours),
    }
    if theirs is not None:
        theirs = theirs.to(device, dtype).eval()
        backend = "eager" if options else "inductor"  # a tiny model is not worth a minute
        found |= {"timm": theirs, "timm, compiled": torch.compile(theirs, backend=backend)}
    return found, ours.patch_embed.img_size[0]


def measure_fused(dtype, batch, arguments, left_out):
    torch.compiler.reset()
    options = TINY if arguments.tiny else {}
    device = arguments.device
    models, size = contestants(device, DTYPES[dtype], options, left_out)
    pool = [torch.randn(batch, 3, size, size, device=device, dtype=DTYPES[dtype])]
    pool += [torch.randn_like(pool[0]) for _ in range(2)]
    images = {name: itertools.cycle(pool) for name in models}

    @torch.inference_mode()
    def call(name):
        return models[name](next(images[name]))

    calls = {name: partial(call, name) for name in models}
    logits = timing.attempt_all(calls, left_out)  # compiles, too
    wanted = logits.get("timm", logits.get("PyTorch"))
    if wanted is None:
        raise RuntimeError("neither timm nor PyTorch has run, to compare with")
    wanted = wanted.float()
    differences = {
        name: ((found.float() - wanted).abs().max() / wanted.abs().max()).item()
        for name, found in logits.items()
    }
    assert max(differences.values()) < (1e-3 if dtype == "float32" else 0.05), differences
    label = f"{SWIN} {dtype} batch {batch:3}"
    calls = {name: calls[name] for name in logits}
    rows = timing.race(calls, label, arguments, FUSED, left_out)
    return [{"way": name, "difference": differences[name], **row} for name, row in rows.items()]


def fused(arguments):
    """Time a whole Swin with fused blocks.

    Logits of Swin-T in evaluation: the copy that `attnlib.inference.optimize_for_inference`
    makes on a GPU, whose blocks are five kernels each; our model through PyTorch, and with the
    kernel for its windows alone; timm's, as it is and compiled. Weights are copied and logits
    compared before anything is timed, and all take turns. On a GPU each has the time on the
    wall and, under "kernel", that of a CUDA graph, without Python and launches, or of the calls
    themselves where they are long. Without timm the others are compared with PyTorch's way.
    """
    if arguments.tiny:
        arguments.batch = [1]
        arguments.dtypes = ["float32"]
    timing.own_stream(arguments.device)
    path = arguments.out and arguments.out / f"fused_{arguments.device}.json"
    bench = runner.Rows(path, arguments.device, arguments.minutes, arguments.tiny)

    def go():
        for dtype, batch in itertools.product(arguments.dtypes, arguments.batch):
            setting = dict(model=SWIN, dtype=dtype, batch=batch)
            bench.once(setting, partial(measure_fused, dtype, batch, arguments))

    bench.work(go)


# --- the overhead of a call ------------------------------------------------------------------

WANTED = 25  # microseconds


def kernel_calls():
    """{name: function}: the kernels and PyTorch's, at the smallest sizes that are usual."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    bias = torch.randn(1, 2, 2)
    mask = torch.ones(2, 2, dtype=torch.bool)
    qkv = torch.randn(1, 4, 4, 24)
    own = torch.randn(1, 4, 4)
    layout = window_layout((4, 4), (2, 2))
    graph = [x.clone().requires_grad_() for x in (q, k, v)]
    learnt = qkv.clone().requires_grad_()

    def backend():
        with attention_backend("triton"):
            return attention(q, k, v)

    return {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v),
        "flash": lambda: flash.flash_attention(q, k, v),
        "flash, causal": lambda: flash.flash_attention(q, k, v, causal=True),
        "flash, mask and bias": lambda: flash.flash_attention(q, k, v, mask=mask, bias=bias),
        "flash, backend": backend,
        "windows": lambda: windows.window_attention(qkv, own, layout, 1),
        "SDPA, graph": lambda: F.scaled_dot_product_attention(*graph),
        "flash, graph": lambda: flash.flash_attention(*graph),
        "windows, graph": lambda: windows.window_attention(learnt, own, layout, 1),
    }


def without_launches(call):
    """Call it while no kernel is started."""
    before = flash.launch, windows.launch
    flash.launch = windows.launch = lambda *arguments, **options: None
    try:
        return call()
    finally:
        flash.launch, windows.launch = before


def measure_overhead(repeats, times):
    """{name: microseconds of a call in each round}."""

    def often(call):
        def run():
            for _ in range(times):
                call()

        return run

    runs = {name: often(call) for name, call in kernel_calls().items()}
    timing.take_turns(runs, 1, "cpu")  # a first round is not counted
    found = timing.take_turns(runs, repeats, "cpu", clock=time.process_time)
    return {name: [1000 * ms / times for ms in some] for name, some in found.items()}


def profile(times):
    """Print, for each call, the functions in which most of the time is spent."""
    for name, call in kernel_calls().items():
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(times):
            call()
        profiler.disable()
        print(f"== {name}")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


def overhead(arguments):
    """Time what a call of the kernels costs before a kernel starts.

    The launch is replaced by nothing, so what is timed is Python: checks, shapes, room for the
    output, the operator. Beside it stands PyTorch's own call at a size at which the work itself
    counts little. All take turns, many calls at a time, by the process' own clock on one
    thread. The record, FOLDER/overhead_cpu.json, has microseconds a call: medians and quartiles
    over the rounds, forward without a graph and forward with one. Triton's own launcher is not
    in them. With --profile the functions are printed in which most of the time is spent.
    """
    torch.set_num_threads(1)
    times = 5 if arguments.tiny else 2000
    if arguments.profile:
        without_launches(lambda: profile(times))
        return
    found = without_launches(lambda: measure_overhead(arguments.repeats, times))
    rows = []
    for name, some in found.items():
        us, low, high = statistics.median(some), *timing.quartiles(some)
        peer = "SDPA, graph" if "graph" in name else "SDPA"
        row = {
            "name": name,
            "us": round(us, 2),
            "peer": peer,
            **timing.ratio(some, found[peer]),
        }
        rows.append(row | {"us_quartiles": [round(low, 2), round(high, 2)]})
        print(
            f"{name:22} {us:7.2f} us ({low:.2f} to {high:.2f}), "
            f"{row['ratio']:5.1f} times as long as {peer}"
        )
    if arguments.out:
        runner.write(arguments.out, "overhead", "cpu", {"wanted": WANTED, "rows": rows})


# --- compiling for other GPUs ----------------------------------------------------------------

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
        widths = ("96", "384")
        names = tuple(PRODUCTS)
        found += [(k, gpu, dtype, w, "-", "-") for k in names for w in widths]
    return [job for job in found if set(only) <= set(job)]


# --- what a row depends on --------------------------------------------------------------------
def drop_types(function):
    """Remove the annotations of a function's tree, except Triton's `tl.constexpr`."""
    function.returns = None
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg) and argument.annotation is not None:
            if ast.unparse(argument.annotation) != "tl.constexpr":
                argument.annotation = None


@functools.cache
def functions():
    """{name: (source without words and types, names in it)}; that of `windows` comes first."""
    found = {}
    for module in (flash, windows):
        for node in ast.parse(Path(module.__file__).read_text()).body:
            given = ast.unparse(getattr(node, "targets", [node])[0])
            name = getattr(node, "name", given)
            if isinstance(node, ast.FunctionDef):
                node.body = node.body[ast.get_docstring(node) is not None :]
                node.decorator_list = []
                drop_types(node)
            names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} - {"_"}
            found[name] = ast.unparse(node), names
    return found


def source_hash(kernel, cosine=False):
    """A fingerprint of a launch's function and of all that it calls; words do not count.

    `_through_length` is one branch, `if COSINE`: without it nothing of it is compiled.
    """
    left_out = () if cosine else ("_through_length",)
    first = "_product" if kernel in PRODUCTS else windows.FUNCTIONS[kernel].__name__
    todo = [first, "compile_kernel"]
    seen = set()
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
        rows, _, _, warps, stages = windows._PRODUCT_TILES[size]
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
    capability = int(gpu[3:])
    tile = tile_of(job)
    number = getattr(torch, dtype)
    if kernel in PRODUCTS:
        *widths, fused = PRODUCTS[kernel]
        widths = [int(width) * w for w in widths]
        made = windows._compile_linear(capability, number, *widths, **fused)
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


def sums_of(row):
    """How many sums a program has: its tiles of O, dQ, dK and dV, dB, or of a product."""
    if row["kernel"] in PRODUCTS:
        block, lanes, *_ = windows._PRODUCT_TILES[getattr(torch, row["dtype"]).itemsize]
    else:
        block = int(row["block"])
        lanes = max(16, triton.next_power_of_2(int(row["width"])))
    tiles = {"forward": 1, "query": 1, "key": 2, "whole": 3, "bias": 0}.get(row["kernel"], 1)
    return tiles * block * lanes + (row["kernel"] in ("whole", "bias")) * block**2


def broken(row):
    """What is wrong with a kernel, in words; nothing, if nothing is."""
    wrong = shortages(row, sums_of(row))
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
    rows = csv.DictReader(record["rows"])
    wanted = set(jobs())
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


def static(arguments):
    """Compile the kernels of `attnlib.windows` for GPUs that need not be there.

    Compiled are all launches of the attention in windows: float32, float16 and bfloat16, heads
    and windows of several sizes, with the mask of shifted windows (s), with the logits of Swin
    V2 (c) and with a map that is not padded (p); and the products of the fused blocks. The
    gates are those of `benchmarks.flash static`. The record, FOLDER/windows_static.json, is
    also the memory of what has been compiled: a second command goes on where the first one
    ended, and compiles again what its source, its tile or Triton's version has made old.
    """
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


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.timing("speed", speed, repeats=20)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=DTYPES)
    parser.add_argument("--batch", type=int, default=64)
    parser = commands.timing("fused", fused, repeats=20)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=DTYPES)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 1])
    parser = commands.timing("overhead", overhead, repeats=9)
    parser.add_argument("--profile", action="store_true", help="print where the time is spent")
    parser = commands.add("static", static)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--only", default="", help="words such as sm_90,bfloat16,32,7,key,s")
    parser.add_argument("--most", type=int, help="compile this many at most")
    commands.run(arguments)


if __name__ == "__main__":
    main()
