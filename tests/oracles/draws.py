"""Calls that are legitimate and unusual, drawn by Hypothesis for the tests of this folder.

Each test compares the library with an oracle: another library, or a short formula in float64.
A strategy draws small numbers and a seed; tensors are made from them, so that Hypothesis
shrinks a failing call to its shapes and not to its elements.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn(*strategies, **named):
    """`given` with few calls, or under `pytest -m slow` with a hundred times as many."""

    def decorate(test):
        return settings(settings.get_profile("oracles"))(given(*strategies, **named)(test))

    return decorate


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
seeds = st.integers(min_value=0, max_value=99)
batches = st.sampled_from((2, 1, 0, 3))
counts = st.integers(min_value=1, max_value=6)  # of tokens, keys, or heads


def dtypes(*chosen):
    """One of the dtypes, float64 first; all four by default."""
    return st.sampled_from(chosen or DTYPES)


def tolerance(dtype, steps=16):
    """`steps` units of rounding of the dtype, for values of about 1."""
    return steps * torch.finfo(dtype).eps


def normal(shape, dtype=torch.float64, seed=0, layout="contiguous"):
    """Normal random numbers of a shape, the same for a seed, in one of the `layouts`.

    They are drawn in float64 and rounded, so that an oracle reads the same values. "expanded"
    repeats the first entry of the first axis that is longer than 1.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        wide = torch.full((*shape, 2), torch.nan, dtype=dtype)
        wide[..., 0] = x
        return wide[..., 0]
    if layout == "expanded":
        axis = next((i for i, n in enumerate(shape) if n > 1), None)
        return x if axis is None else x.narrow(axis, 0, 1).expand(shape)
    return x


layouts = st.sampled_from(("contiguous", "transposed", "strided", "expanded"))


@st.composite
def broadcasting(draw, shape):
    """A shape that broadcasts to `shape`: axes set to 1, and leading ones left out."""
    first = draw(st.integers(min_value=0, max_value=max(len(shape) - 2, 0)))
    return tuple(n if draw(st.booleans()) else 1 for n in shape[first:])


@st.composite
def masks(draw, shape):
    """A boolean mask that broadcasts to (B, h, N, M); rows may be wholly False."""
    smaller = draw(broadcasting(shape))
    generator = torch.Generator().manual_seed(draw(seeds))
    share = draw(st.sampled_from((0.7, 0.3, 1.0, 0.0)))
    return torch.rand(smaller, generator=generator) < share


@st.composite
def paddings(draw, batch, length, empty=True):
    """(batch, length), True at tokens: padded on the left, right, inside, or not at all."""
    kept = torch.ones(batch, length, dtype=torch.bool)
    for row in kept:
        side = draw(st.sampled_from(("none", "right", "left", "interior")))
        number = draw(st.integers(min_value=0, max_value=length if empty else length - 1))
        if side == "right":
            row[length - number :] = False
        elif side == "left":
            row[:number] = False
        elif side == "interior":
            start = draw(st.integers(min_value=0, max_value=length - number))
            row[start : start + number] = False
    return kept


@st.composite
def map_sizes(draw, largest=9):
    """Heights and widths of maps: mostly not square, and often not divisible by anything."""
    sides = st.integers(min_value=1, max_value=largest)
    return draw(sides), draw(sides)
