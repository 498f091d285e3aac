"""Time attention in windows, map to map: `python -m benchmarks.windows --out FOLDER`.

For every stage of Swin-T and SwinV2-T, without and with a shift, the whole attention of a block
(roll, partition, projections, attention, and the way back), forward and with its backward pass:
timm's, ours through PyTorch, through the kernel, and through FlexAttention in two ways, with
the windows in the batch and as one sequence with a mask of blocks (compiled on a GPU; a CPU has
no backward pass of it). Weights are copied and outputs compared before anything is timed, and
gradients of the maps; all take turns. On a GPU each way has the time on the wall and, under
"kernel", that of a CUDA graph, without Python and launches, or of the calls themselves where
they are long. With --minutes the command ends after so many, and goes on when it is given
again. Without timm the others are compared with PyTorch's way.
"""

import functools
import itertools
from functools import partial

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnlib import flash  # noqa: F401  first: without a GPU it has Triton interpreted
from attnlib.attention import attention_backend, register_backend
from attnlib.models import create_model
from attnlib.swin import cyclic_shift, reverse_cyclic_shift, window_partition, window_reverse
from attnlib.swinv2 import normalize
from benchmarks import runner, timing

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
    places = 2 * y[:, None, None] + x[:, None]  # (H', 1, 1), (W', 1) -> (H', W', 1)
    return window_partition(places, layout.window)[..., 0]  # -> (windows, N)


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
    shape, region = q.shape, regions(layout, q.device)
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
    (_, windows, _, tokens, _), block_mask = q.shape, blocks(layout, q.device)

    def score(s, b, h, i, j):
        return s + bias[h, i % tokens, j % tokens]

    q, k, v = (x.transpose(1, 2).flatten(2, 3) for x in (q, k, v))  # -> (B, h, windows N, d)
    out = call(q, k, v, score_mod=score, block_mask=block_mask, scale=scale)
    return out.unflatten(2, (windows, tokens)).transpose(1, 2)


def flex(way, qkv, bias, layout, num_heads, *, scale=None, cosine_scale=None, dropout_p=0.0):
    """A backend of the layers' window attention, see `attnlib.windows.window_backend`."""
    x = cyclic_shift(qkv, layout).unflatten(-1, (3, num_heads, -1))
    q, k, v = x.unbind(-3)  # (B, H, W, h, d) each
    if cosine_scale is not None:
        q, k, scale = normalize(q, cosine_scale[:, None]), normalize(k), 1.0
    q, k, v = (
        window_partition(y.flatten(-2), layout.window, num_heads).unflatten(1, (-1, num_heads))
        for y in (q, k, v)
    )  # (B, windows, h, N, d) each
    call = compiled_flex() if qkv.is_cuda else flex_attention
    out = way(q, k, v, bias, layout, call, scale).flatten(1, 2)  # -> (B, windows h, N, d)
    return reverse_cyclic_shift(window_reverse(out, layout.window, layout.padded), layout)


def register():
    """Make the two ways backends; none of them is one for attention elsewhere."""
    for name, way in (("flex, batch", in_batch), ("flex, sequence", in_sequence)):
        register_backend(name, None)
        register_backend(name, partial(flex, way), operation="window_attention")


# --- what is timed ----------------------------------------------------------------------------


def through(backend, layer, x):
    """The layer as its chapter wrote it, or with all but its projections in a kernel."""
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
        "kernel": partial(through, "triton", own.attn),
        "flex, batch": partial(through, "flex, batch", own.attn),
        "flex, sequence": partial(through, "flex, sequence", own.attn),
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
    options, device = TINY if arguments.tiny else {}, arguments.device
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


def main():
    parser = runner.timing_parser(__doc__, repeats=20)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=DTYPES)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    register()
    timing.own_stream(arguments.device)
    path = arguments.out and arguments.out / f"windows_{arguments.device}.json"
    bench = runner.Rows(path, arguments.device, arguments.minutes, arguments.tiny)
    stages, shifts = range(4), (False, True)
    if arguments.tiny:
        arguments.batch, arguments.dtypes, stages, shifts = 1, ["float32"], (0,), (True,)

    def go():
        cases = (arguments.dtypes, arguments.models, stages, shifts, ("forward", "training"))
        for dtype, name, stage, shifted, kind in itertools.product(*cases):
            setting = dict(model=name, stage=stage + 1, shifted=shifted, dtype=dtype)
            setting |= {"pass": kind, "batch": arguments.batch}
            work = partial(measure, name, stage, shifted, kind, dtype, arguments)
            bench.once(setting, work)

    bench.work(go)


if __name__ == "__main__":
    main()
