"""Time the tiled kernels beside PyTorch's: `python -m benchmarks.flash --out FOLDER`.

Compared are the equation ("reference"), each backend of PyTorch that takes the inputs,
FlexAttention ("flex"), compiled on a GPU, and ours ("triton"); they take turns. The kinds are
plain, causal, with a bias, a sliding window, and eight sequences packed into one. Ours gets the
last two as ranges, PyTorch's backends as a mask. Before anything is timed the outputs and all
gradients, of the bias as well, of the first and the last head are compared with the reference
in float64.

Recorded are medians and quartiles of the times and of the ratios of our time to theirs, errors,
peak memory (of forward and backward together, where the backward pass is timed), and operations
per second: two products forward, five backward, of what is seen. On a GPU each contestant has
the time on the wall and, under "kernel", that between two events: of a CUDA graph, without
Python and launches, or of the calls themselves where they are long. The rows are written as
they come; with --minutes the command ends after so many, and goes on when it is given again.

`--tune [KERNEL ...]` times other tiles than the table's instead, each launch alone, in every
kind, and prints the fastest; `--workers N` has as many processes compile ahead.
"""

import contextlib
import functools
import itertools
import math
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnlib import flash
from attnlib.attention import attention, attention_backend
from attnlib.flash import flash_attention, packed_ranges, triton
from benchmarks import runner, timing

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
        window, own = self.window or self.tokens, self.tokens // self.packed

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
        n, device = self.tokens, self.q.device
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
        own, device = [self.tokens // self.packed] * self.packed, self.q.device
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
    row["MiB"] = round(timing.peak_memory(lambda: step(function, case), device))
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
    step, n = PASSES[setting["pass"]], setting["tokens"]
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
    found, launch = [], flash.launch

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

    table, alone = launch_of(kernel, case)[1], {}
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
    shape, candidates = (*SHAPES[4096], 4096), CANDIDATES
    if arguments.tiny:
        shape, candidates = (1, 1, 20), [(16, 16, 4, 1)]
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


# --- command ----------------------------------------------------------------------------------


def options():
    parser = runner.timing_parser(__doc__, repeats=15)
    parser.add_argument("--tokens", type=int, nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--name", default="flash", help="name of the record")
    parser.add_argument("--tune", nargs="*", choices=TUNED, metavar="KERNEL")
    parser.add_argument("--workers", type=int, default=0, help="that compile tiles ahead")
    return parser.parse_args()


def main():
    arguments = options()
    torch.manual_seed(0)
    timing.own_stream(arguments.device)
    name = "tiles" if arguments.tune is not None else arguments.name
    path = arguments.out and arguments.out / f"{name}_{arguments.device}.json"
    known = dict(tiny=arguments.tiny, triton=triton.__version__)
    bench = runner.Rows(path, arguments.device, arguments.minutes, **known)
    if arguments.tune is not None:
        kernels = arguments.tune or list(TUNED)
        bench.work(lambda: tune_all(kernels, bench, arguments))
        return
    shapes = {n: SHAPES[n] for n in arguments.tokens}
    if arguments.tiny:
        shapes, arguments.widths = {12: (1, 1)}, [16]

    def go():
        cases = (arguments.dtypes, shapes, arguments.widths, arguments.kinds, PASSES)
        for dtype, n, width, kind, step in itertools.product(*cases):
            setting = dict(zip(("dtype", "tokens", "width", "kind"), (dtype, n, width, kind)))
            setting["pass"] = step
            rest = shapes[n], getattr(torch, dtype), arguments.device, arguments.repeats
            bench.once(setting, functools.partial(row_of, setting, *rest))

    bench.work(go)


if __name__ == "__main__":
    main()
