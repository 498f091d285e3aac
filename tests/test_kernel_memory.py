"""The kernels touch only what is theirs, at the tiles of a GPU, and the watch can tell."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from kernel_memory import (
    MemoryFault,
    Room,
    gpu_tiles,
    interpreter_watched,
    run_watched,
    watched,
)

from attnlib import flash, windows
from attnlib.attention import attention, attention_backend
from attnlib.swin import window_layout

pytestmark = pytest.mark.skipif(
    flash.triton_mode("cpu") != "interpreted", reason="the interpreter is what is watched"
)


# --- the kernels ------------------------------------------------------------------------------

FLASH = {  # heads of queries, of keys, N, M, width, dtype, mask, bias, causal
    "plain": (1, 1, 150, 70, 64, torch.float32, False, False, False),
    "causal, grouped": (2, 1, 130, 140, 32, torch.bfloat16, False, False, True),
    "all, in float16": (2, 2, 70, 135, 64, torch.float16, True, True, True),
    "all, wide": (1, 1, 40, 65, 128, torch.float32, True, True, False),
    "odd width": (1, 1, 65, 129, 20, torch.bfloat16, True, True, True),
}


@pytest.mark.parametrize("case", FLASH)
def test_flash(case):
    heads, own, n, m, d, dtype, masked, biased, causal = FLASH[case]
    torch.manual_seed(0)
    joined = torch.randn(1, n, heads, 2 * d, dtype=dtype)  # queries with gaps between them
    q = joined[..., :d].transpose(1, 2).detach().requires_grad_()
    k, v = (torch.randn(1, own, m, d, dtype=dtype, requires_grad=True) for _ in range(2))
    mask = torch.rand(n, m) < 0.8 if masked else None
    bias = torch.randn(heads, n, m, requires_grad=True) if biased else None
    leaves = [x for x in (q, k, v, bias) if x is not None]

    def found(*x, **options):
        out = flash.flash_attention(*x, mask=mask, causal=causal, **options)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    with gpu_tiles(), watched(flash) as names:
        watching = found(q, k, v, bias=bias)
    kernels = ["_forward_kernel", "_query_kernel", "_key_kernel", *["_bias_kernel"] * biased]
    assert names == kernels
    with attention_backend("reference"):
        doubles = [x.detach().double() for x in (q, k, v)]
        if causal:
            seen = torch.ones(n, m).tril(m - n).bool()
            mask = seen if mask is None else mask & seen
        some = None if bias is None else bias.detach().double()
        keys, values = (x.repeat_interleave(heads // own, 1) for x in doubles[1:])
        exact = attention(doubles[0], keys, values, mask=mask, bias=some)
    limit = 1e-4 if dtype == torch.float32 else 0.06
    assert (watching[0] - exact).abs().max() < limit * exact.abs().max()


@pytest.mark.parametrize("dtype, width", [(torch.float32, 64), (torch.bfloat16, 20)])
def test_decoding(dtype, width):
    """From a cache with room for more keys, tokens first; parts begin at any key."""
    torch.manual_seed(0)
    q = torch.randn(1, 4, 5, width, dtype=dtype)
    k, v = (torch.randn(1, 150, 2, width, dtype=dtype).transpose(1, 2) for _ in range(2))
    k, v = k[:, :, :133], v[:, :, :133]
    with gpu_tiles(), watched(flash) as names:
        found = flash.flash_decode(q, k, v, splits=2)
    assert names == ["_decode_kernel"]
    keys, values = (x.double().repeat_interleave(2, 1) for x in (k, v))
    exact = attention(q.double(), keys, values)
    assert (found - exact).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)


WINDOWS = {  # map, window, shift, heads, width, dtype, cosines, padded before
    "Swin": ((14, 14), (7, 7), (3, 3), 2, 32, torch.bfloat16, False, True),
    "Swin in float32": ((7, 14), (7, 7), (0, 3), 1, 32, torch.float32, False, True),
    "Swin V2": ((8, 16), (8, 8), (4, 4), 1, 32, torch.float16, True, True),
    "several blocks": ((12, 12), (12, 12), (0, 0), 1, 32, torch.bfloat16, True, True),
    "not padded": ((9, 10), (7, 7), (3, 3), 2, 32, torch.bfloat16, False, False),
    "not padded, float32": ((6, 5), (5, 4), (2, 2), 1, 24, torch.float32, True, False),
    "wide": ((7, 7), (7, 7), (0, 0), 1, 128, torch.float16, False, True),
}


def window_case(size, window, shift, heads, width, dtype, cosine, padded, batch=1):
    """A call of the kernels, and what gradients are asked of."""
    torch.manual_seed(0)
    layout = window_layout(size, window, shift)
    size, tokens = layout.padded if padded else size, window[0] * window[1]
    qkv = torch.randn(batch, *size, 3 * heads * width, dtype=dtype, requires_grad=True)
    bias = torch.randn(heads, tokens, tokens, requires_grad=True)
    pad = torch.randn(3 * heads * width, requires_grad=True)
    tau = torch.full((heads,), 2.0, requires_grad=True) if cosine else None
    leaves = [qkv, bias, *([] if size == layout.padded else [pad]), *([tau] if cosine else [])]

    def call():
        out = windows.window_attention(qkv, bias, layout, heads, cosine_scale=tau, pad=pad)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    return call


@pytest.mark.parametrize("case", WINDOWS)
def test_windows(case):
    call = window_case(*WINDOWS[case])
    with watched(windows) as names:
        found = call()
    assert names[0] == "_forward" and set(names[1:]) == {"_backward"}
    for a, b in zip(found, call(), strict=True):
        assert torch.equal(a, b)


def test_random_windows():
    """A dozen small maps, windows, shifts and widths, whatever comes."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(12):
        height, width, rows, columns, y, x, d, coin = (
            int(i) for i in torch.randint(0, 2**31, (8,), generator=draw)
        )
        size, window = (1 + height % 6, 1 + width % 6), (1 + rows % 4, 1 + columns % 4)
        window = tuple(map(min, window, size))
        shift = y % window[0], x % window[1]
        call = window_case(
            size, window, shift, 1, 1 + d % 20, torch.float32, coin % 2 == 0, coin % 3 == 0
        )
        with watched(windows):
            call()


# --- seeded faults ----------------------------------------------------------------------------


@triton.jit
def copy_row(x, y, n, shift, step, BLOCK: tl.constexpr):
    """Program i copies its block of x to y, or does what its numbers make of that."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + (i // step) * step, tl.load(x + i + shift, mask=i < n), mask=i < n)


@triton.jit
def pass_on(x, y, n, BLOCK: tl.constexpr):
    """Program i adds what lies before its block, which program i - 1 stores."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(y + i - BLOCK, mask=(i >= BLOCK) & (i < n), other=0.0)
    tl.store(y + i, tl.load(x + i, mask=i < n) + before, mask=i < n)


def start(kernel, programs, *arguments, **options):
    run_watched(flash.launch, kernel, programs, torch.device("cpu"), *arguments, **options)


def test_a_copy_is_in_order():
    x, y = torch.randn(50), torch.zeros(50)
    start(copy_row, 4, x, y, 50, 0, 1, BLOCK=16)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    "numbers, message",
    [
        ((51, 0, 1), "outside of its tensor"),  # a row too many
        ((50, 1, 1), "loads outside"),  # one behind the end
        ((50, -1, 1), "loads outside"),  # one before the beginning
        ((50, 3000, 1), "loads outside"),  # far away: in the gap, not in the next tensor
        ((50, 0, 2), "stores twice to one address"),  # two of one program
        ((50, 0, 16), "stores twice"),
    ],
)
def test_strays_are_caught(numbers, message):
    x, y = torch.randn(50), torch.zeros(50)
    with pytest.raises(MemoryFault, match=message):
        start(copy_row, 4, x, y, *numbers, BLOCK=16)


def test_a_gap_between_rows_is_outside():
    x = torch.randn(100)[::2]  # every second number
    with pytest.raises(MemoryFault, match="program 0 loads outside"):
        start(copy_row, 4, x, torch.zeros(50), 50, 0, 1, BLOCK=16)


def test_two_writers_are_caught():
    x, y = torch.randn(64), torch.zeros(64)
    with pytest.raises(MemoryFault, match="program 1 stores where another has stored"):
        start(copy_row, 2, x, y, 2, 0, 2, BLOCK=1)  # blocks of one: 0 and 1 both go to 0


def test_a_read_of_what_another_writes_is_caught_in_each_order():
    x, y = torch.randn(64), torch.zeros(64)
    with pytest.raises(MemoryFault, match="program 1 loads what another has stored"):
        start(pass_on, 4, x, y, 64, BLOCK=16)
    for order, message in (((0, 1), "what another has stored"), ((1, 0), "another has loaded")):
        own = Room([x[:32].clone(), torch.zeros(32)])
        with pytest.raises(Exception, match=message), interpreter_watched(own, order):
            pass_on[(2,)](*own.copies, 32, BLOCK=16)


def test_an_order_that_matters_is_noticed(monkeypatch):
    """With the other checks off, the shuffled order is what gives a running sum away."""
    monkeypatch.setattr(Room, "load", lambda *_: None)
    monkeypatch.setattr(Room, "store", lambda *_: None)
    with pytest.raises(MemoryFault, match="order of the programs"):
        start(pass_on, 4, torch.ones(64), torch.zeros(64), 64, BLOCK=16)


def raised(arguments, place, by):
    """The arguments of a launch, one of its numbers raised."""
    at = [i for i, x in enumerate(arguments) if isinstance(x, int)][place]
    return [x + by if i == at else x for i, x in enumerate(arguments)]


@pytest.mark.parametrize(
    "place, message",
    [
        (0, "stores where another has stored"),  # a program too many, which begins again
        (1, "outside of its tensor"),  # a window too many
        (5, "stores twice"),  # a column more than the map has
    ],
)
def test_faults_in_the_window_kernel_are_caught(place, message):
    call = window_case((4, 4), (2, 2), (1, 1), 1, 8, torch.float32, False, True, batch=2)
    with pytest.raises(MemoryFault, match=message):
        with watched(windows, change=lambda arguments: raised(arguments, place, 1)):
            call()


@pytest.mark.parametrize("place", [0, 2, 3])
def test_faults_in_the_flash_kernel_are_caught(place):
    """A program too many; queries and keys that are not there."""
    q, k, v = (torch.randn(1, 1, 20, 8) for _ in range(3))
    with pytest.raises(MemoryFault, match="outside of its tensor"):
        with watched(flash, change=lambda arguments: raised(arguments, place, 1)):
            flash.flash_attention(q, k, v)


def test_tiles_are_those_of_a_gpu():
    """Without a word the interpreter has small ones."""
    q, seen = torch.randn(1, 1, 8, 64, dtype=torch.bfloat16), []
    for tiles in (contextlib.nullcontext(), gpu_tiles()):
        with tiles:
            seen.append(flash._options("forward", q, q, q, False)["BLOCK_M"])
    assert seen == [32, flash.TILES["forward"][2, 64][0]]
