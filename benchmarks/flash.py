"""Time the tiled kernels beside PyTorch's: `python -m benchmarks.flash --out FOLDER`.

Compared are the equation ("reference"), each backend of PyTorch that takes the inputs, and ours
("triton"); they take turns, so that a busy machine slows all alike. Before anything is timed
the outputs and gradients of the first and the last head are compared with the reference in
float64. Recorded are medians, ratios of our time to theirs with quartiles, errors, peak memory
(of forward and backward together, where the backward pass is timed), and operations per second:
two products forward, five backward, half of that if causal.

`--tune KERNEL ...` times other tiles than the table's instead and prints the fastest.
"""

import argparse
import itertools
import statistics
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlib import flash
from attnlib.attention import attention, attention_backend, causal_mask
from attnlib.flash import flash_attention, triton
from benchmarks import common

# tokens: (B, h)
SHAPES = {
    1024: (16, 16),
    2048: (8, 16),
    4096: (4, 16),
    8192: (2, 16),
    16384: (1, 16),
}
PYTORCH = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# rows, columns, warps, stages
CANDIDATES = list(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)))


def reference(q, k, v, bias, causal):
    mask = causal_mask(q.shape[-2], device=q.device) if causal else None
    with attention_backend("reference"):
        return attention(q, k, v, mask=mask, bias=bias)


def pytorch(backend):
    def call(q, k, v, bias, causal):
        if bias is not None and causal:
            bias, causal = (
                bias.masked_fill(~causal_mask(q.shape[-2], device=q.device), -torch.inf),
                False,
            )
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=causal
            )

    return call


def ours(q, k, v, bias, causal):
    return flash_attention(q, k, v, bias=bias, causal=causal)


def forward(function, inputs, bias, causal, grad):
    with torch.no_grad():
        return function(*inputs, bias, causal)


def training(function, inputs, bias, causal, grad):
    """Forward and backward."""
    return gradients(function(*inputs, bias, causal), inputs, bias, grad)


def gradients(out, inputs, bias, grad, **options):
    return torch.autograd.grad(
        out, [*inputs, *([bias] if bias is not None else [])], grad, **options
    )


def timed(function, step, inputs, bias, causal, grad):
    """What is timed: the forward pass, or the backward pass through a graph that stands."""
    if step is forward:
        return lambda: forward(function, inputs, bias, causal, grad)
    out = function(*inputs, bias, causal)
    return lambda: gradients(out, inputs, bias, grad, retain_graph=True)


def error(found, exact):
    """The largest difference, relative to the largest entry, over some tensors."""
    return max(
        ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
        for a, b in zip(found, exact)
    )


def memory(call, device):
    """MiB that a call takes beyond what is there before it."""
    return round(common.peak_memory(call, device))


def exact_result(step, inputs, bias, causal, grad):
    """Output or gradients of the equation, head by head, in float64, on rounded inputs."""
    results = []
    # the first and the last head
    for b, h in {
        (0, 0),
        tuple(size - 1 for size in inputs[0].shape[:2]),
    }:
        own = [
            x[b : b + 1, h : h + 1].detach().double().requires_grad_() for x in (*inputs, grad)
        ]
        with_bias = (
            None if bias is None else bias[:, h : h + 1].detach().double().requires_grad_()
        )
        made = step(reference, own[:3], with_bias, causal, own[3].detach())
        results.append(((b, h), made[:3] if step is training else [made]))
    return results


def compare(function, step, inputs, bias, causal, grad, exact):
    made = step(function, inputs, bias, causal, grad)
    made = made[:3] if step is training else [made]
    return max(
        error([x[b : b + 1, h : h + 1] for x in made], wanted) for (b, h), wanted in exact
    )


def measure(functions, step, inputs, bias, causal, grad, device, repeats):
    """{backend: times, error, memory} for those that take these inputs; why others do not."""
    exact, taken, left_out, backends = (
        exact_result(step, inputs, bias, causal, grad),
        {},
        {},
        {},
    )
    for name, function in functions.items():
        try:
            backends[name] = {
                "error": compare(function, step, inputs, bias, causal, grad, exact)
            }
            backends[name]["MiB"] = memory(
                lambda: step(function, inputs, bias, causal, grad), device
            )
            taken[name] = timed(function, step, inputs, bias, causal, grad)
        except RuntimeError as problem:  # not for these inputs, or no memory left
            left_out[name] = str(problem).splitlines()[0][:100]
    for name in list(taken):  # a last warm-up, now that the graphs of all stand
        try:
            taken[name]()
        except RuntimeError as problem:
            left_out[name] = str(problem).splitlines()[0][:100]
    for name in left_out:
        backends.pop(name, None), taken.pop(name, None)
    times = common.take_turns(taken, repeats, device)
    for name, own in backends.items():
        own.update(
            ms=round(statistics.median(times[name]), 4),
            **common.ratio(times["triton"], times[name]),
        )
    return backends, left_out


def make(shape, dtype, device, with_bias, needs):
    q, k, v = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=needs) for _ in range(3)
    )
    bias = (
        torch.randn(1, *shape[1:3], shape[2], device=device, dtype=dtype, requires_grad=needs)
        if with_bias
        else None
    )
    return [q, k, v], bias, torch.randn(shape, device=device, dtype=dtype)


def tune(kernel, shape, dtype, causal, repeats):
    """Print the five fastest tiles of a kernel, among those that compile."""
    key, found = (torch.empty(0, dtype=dtype).element_size(), max(64, shape[-1])), {}
    inputs, bias, grad = make(shape, dtype, "cuda", kernel == "bias", True)
    step, before = forward if kernel == "forward" else training, flash.TILES[kernel][key]
    for tile in CANDIDATES:
        flash.TILES[kernel][key] = tile
        try:
            step(ours, inputs, bias, causal, grad)
            times = common.take_turns(
                {"": lambda: step(ours, inputs, bias, causal, grad)}, repeats, "cuda"
            )[""]
            found[tile] = statistics.median(times)
        except Exception as problem:  # too much shared memory, say
            print(f"  {tile}: {str(problem).splitlines()[0][:80]}")
    flash.TILES[kernel][key] = before
    for tile in sorted(found, key=found.get)[:5]:
        print(
            f"{kernel:8} {shape} causal {causal}: {tile} {found[tile]:.3f} ms "
            f"(the table's {before}: "
            f"{found.get(before, float('nan')):.3f})",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        choices=["cpu", "cuda"],
    )
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16"])
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, to see that the benchmark runs"
    )
    parser.add_argument(
        "--tune",
        nargs="+",
        choices=flash.TILES,
        help="kernels whose tiles are to be tried, on a GPU",
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.tune:
        for kernel, width in itertools.product(arguments.tune, (64, 128)):
            tune(kernel, (*SHAPES[4096], 4096, width), torch.bfloat16, False, 5)
        return
    shapes = {n: (*SHAPES[n], n) for n in arguments.tokens}
    dtypes, widths, backends = (
        [getattr(torch, name) for name in arguments.dtypes],
        (64, 128),
        PYTORCH,
    )
    if arguments.tiny:
        shapes, dtypes, widths = {20: (1, 1, 20)}, [torch.bfloat16], (16,)
    if arguments.device == "cpu":
        backends = {name: PYTORCH[name] for name in ("flash", "math")}
    functions = {
        "triton": ours,
        **{name: pytorch(kind) for name, kind in backends.items()},
        "reference": reference,
    }
    rows, passes = [], {forward: "forward", training: "backward"}
    for dtype, (n, lead), width in itertools.product(dtypes, shapes.items(), widths):
        for (kind, causal, with_bias), step in itertools.product(
            (("plain", False, False), ("causal", True, False), ("bias", False, True)),
            (forward, training),
        ):
            inputs, bias, grad = make(
                (*lead, width), dtype, arguments.device, with_bias, step is training
            )
            found, left_out = measure(
                functions, step, inputs, bias, causal, grad, arguments.device, arguments.repeats
            )
            products = (
                2
                * lead[0]
                * lead[1]
                * n
                * n
                * width
                * (5 if step is training else 2)
                / (2 if causal else 1)
            )
            for own in found.values():
                own["Tflop/s"] = round(products / own["ms"] / 1e9, 1)
            rows.append(
                {
                    "tokens": n,
                    "batch": lead[0],
                    "heads": lead[1],
                    "width": width,
                    "dtype": str(dtype)[6:],
                    "kind": kind,
                    "pass": passes[step],
                    "allowed": 0.05,
                    "backends": found,
                    "left_out": left_out,
                }
            )
            print(
                f"{str(dtype)[6:]:9}{n:6} x {width:3} {kind:6} {passes[step]:9}"
                + "".join(
                    f"{name:>10} {own['ms']:8.3f} ms ({own['ratio']:.2f})"
                    for name, own in found.items()
                ),
                flush=True,
            )
            for name, own in found.items():
                assert own["error"] < rows[-1]["allowed"], (
                    f"{name} is off by {own['error']:.3f}"
                )
            del inputs, bias, grad
    if arguments.out:
        common.write(
            arguments.out,
            "flash",
            arguments.device,
            {"triton": triton.__version__, "rows": rows},
        )


if __name__ == "__main__":
    main()
