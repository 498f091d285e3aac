"""Positions: the formulas entry by entry, the published codes, the symmetries, bad input."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.attention import attention, causal_mask
from attnlib.position import (
    LearnedPositionalEmbedding,
    RelativePositionBias,
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    position_angles,
    relative_position_bucket,
    relative_positions,
    rotate_pairs,
    sincos_2d,
    sinusoidal_encoding,
)
from attnlib.train import read_record

close = torch.testing.assert_close
few = settings(max_examples=40, deadline=None)


# --- sinusoids --------------------------------------------------------------------------------


@few
@given(
    st.integers(0, 20),
    st.integers(1, 24),
    st.integers(-5, 100_000),
    st.sampled_from([10.0, 10000.0]),
)
def test_sinusoids_are_the_formula(length, half, offset, base):
    dim = 2 * half
    encoding = sinusoidal_encoding(length, dim, offset=offset, base=base, dtype=torch.float64)
    assert encoding.shape == (length, dim)
    for row in range(length):
        for i in range(half):
            angle = (offset + row) * base ** (-2 * i / dim)
            assert abs(encoding[row, 2 * i] - math.sin(angle)) < 1e-10
            assert abs(encoding[row, 2 * i + 1] - math.cos(angle)) < 1e-10


@few
@given(st.integers(0, 5000), st.integers(-2000, 2000), st.integers(1, 32))
def test_a_shift_is_a_rotation(position, k, half):
    dim = 2 * half
    here, there = (
        sinusoidal_encoding(1, dim, offset=p, dtype=torch.float64)[0]
        for p in (position, position + k)
    )
    angles = position_angles(torch.tensor(k), dim)
    sin, cos = here[0::2], here[1::2]
    c, s = angles.cos(), angles.sin()
    close(
        torch.stack((sin * c + cos * s, cos * c - sin * s), -1).flatten(),
        there,
        rtol=0,
        atol=1e-11,
    )
    close(here.norm() ** 2, torch.tensor(dim / 2).double(), rtol=1e-12, atol=0)


def test_sinusoids_in_float32_are_the_rounded_ones():
    exact = sinusoidal_encoding(3, 64, offset=1_000_000, dtype=torch.float64)
    rounded = sinusoidal_encoding(3, 64, offset=1_000_000)
    assert rounded.dtype == torch.float32
    close(rounded.double(), exact, rtol=0, atol=1e-7)
    assert sinusoidal_encoding(3, 4, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_the_base_sets_the_wavelengths():
    angles = position_angles(torch.tensor([1.0]), 8, base=16.0)
    close(angles, torch.tensor([[1, 0.5, 0.25, 0.125]]).double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dim", [7, 0, -2])
def test_bad_widths(dim):
    with pytest.raises(ValueError, match=rf"dim \({dim}\)"):
        sinusoidal_encoding(4, dim)


def test_bad_lengths_bases_and_dtypes():
    with pytest.raises(ValueError, match=r"length \(-1\)"):
        sinusoidal_encoding(-1, 4)
    with pytest.raises(ValueError, match=r"base \(0\)"):
        sinusoidal_encoding(1, 4, base=0)
    with pytest.raises(
        TypeError,
        match="positions of dtype torch.bfloat16",
    ):
        position_angles(torch.arange(4, dtype=torch.bfloat16), 4)


# --- a learned table --------------------------------------------------------------------------


def test_the_table_adds_its_rows():
    table = LearnedPositionalEmbedding(10, 4)
    assert list(table.state_dict()) == ["weight"] and table.weight.shape == (10, 4)
    x = torch.randn(2, 3, 4)
    close(table(x), x + table.weight[:3])
    close(table(x, offset=7), x + table.weight[7:])
    table(x, offset=7).sum().backward()
    assert table.weight.grad[7:].eq(2).all() and table.weight.grad[:7].eq(0).all()


def test_the_table_has_an_end():
    table = LearnedPositionalEmbedding(10, 4)
    with pytest.raises(
        ValueError, match=r"x at the positions 0 to 10 must lie in 0 to 9 \(max_length - 1\)"
    ):
        table(torch.zeros(1, 11, 4))
    with pytest.raises(ValueError, match="x at the positions 8 to 10 must lie in 0 to 9"):
        table(torch.zeros(1, 3, 4), offset=8)
    with pytest.raises(ValueError, match="x at the positions -1 to 1 must lie in 0 to 9"):
        table(torch.zeros(1, 3, 4), offset=-1)
    with pytest.raises(
        ValueError, match=r"x of width 5 must have the width of the table, embed_dim \(4\)"
    ):
        table(torch.zeros(1, 3, 5))
    with pytest.raises(ValueError, match=r"max_length \(0\)"):
        LearnedPositionalEmbedding(0, 4)
    with pytest.raises(ValueError, match=r"embed_dim \(-1\)"):
        LearnedPositionalEmbedding(4, -1)


# --- relative biases --------------------------------------------------------------------------


def test_offsets():
    assert relative_positions(3).tolist() == [[0, 1, 2], [-1, 0, 1], [-2, -1, 0]]
    # one query after three cached keys
    assert relative_positions(1, 4).tolist() == [[-3, -2, -1, 0]]
    with pytest.raises(ValueError, match=r"m \(2\)"):
        relative_positions(3, 2)


def bucket_by_integers(distance, buckets, max_distance):
    """The published formula with integers only: the largest b with
    (n / E)^(K - E) >= (D / E)^b."""
    exact = buckets // 2
    if distance < exact:
        return distance
    steps = buckets - exact
    b = 0
    while (
        b < steps - 1
        and distance**steps * exact ** (b + 1) >= max_distance ** (b + 1) * exact**steps
    ):
        b += 1
    return exact + b


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    "num_buckets, max_distance", [(32, 128), (32, 20), (8, 50), (64, 1000), (20, 33), (6, 9)]
)
def test_buckets_are_those_of_t5(bidirectional, num_buckets, max_distance):
    offsets = torch.arange(-300, 301)
    found = relative_position_bucket(
        offsets, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    one_way = num_buckets // 2 if bidirectional else num_buckets
    for offset, bucket in zip(offsets.tolist(), found.tolist()):
        if bidirectional:
            expected = bucket_by_integers(abs(offset), one_way, max_distance) + one_way * (
                offset > 0
            )
        else:
            expected = bucket_by_integers(max(-offset, 0), one_way, max_distance)
        assert bucket == expected, offset


def test_buckets_known_by_heart():
    far = torch.tensor(
        [-1000, -128, -127, -91, -90, -64, -16, -12, -11, -8, -7, -1, 0, 1, 7, 8, 16, 128]
    )
    expected = [15, 15, 15, 15, 14, 14, 10, 9, 8, 8, 7, 1, 0, 17, 23, 24, 26, 31]
    assert relative_position_bucket(far).tolist() == expected
    causal = relative_position_bucket(
        torch.tensor([5, 0, -15, -16, -18, -19, -112, -113, -5000]), bidirectional=False
    )
    assert causal.tolist() == [0, 0, 15, 16, 16, 17, 30, 31, 31]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_and_bias_of_hugging_face(bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    from transformers import T5Config

    offsets = torch.arange(-400, 401)
    for num_buckets, max_distance in (32, 128), (32, 20), (64, 512):
        options = dict(
            bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
        )
        theirs = t5.T5Attention._relative_position_bucket(offsets, **options)
        assert torch.equal(relative_position_bucket(offsets, **options), theirs)
    config = T5Config(num_heads=4, d_model=16, d_kv=4, is_decoder=not bidirectional)
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = RelativePositionBias(4, bidirectional=bidirectional)
    ours.relative_attention_bias.load_state_dict(theirs.relative_attention_bias.state_dict())
    close(ours(50), theirs.compute_bias(50, 50)[0])


def test_bad_buckets():
    with pytest.raises(ValueError, match=r"num_buckets \(3\)"):
        relative_position_bucket(torch.tensor([1]), num_buckets=3)
    with pytest.raises(ValueError, match=r"num_buckets \(1\)"):
        relative_position_bucket(torch.tensor([1]), num_buckets=1, bidirectional=False)
    with pytest.raises(ValueError, match=r"max_distance \(8\)"):
        RelativePositionBias(2, max_distance=8)
    with pytest.raises(TypeError, match="relative_position of dtype torch.float32"):
        relative_position_bucket(torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"num_heads \(0\)"):
        RelativePositionBias(0)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_bias_is_one_number_for_each_head_and_offset(bidirectional):
    bias = RelativePositionBias(3, bidirectional=bidirectional)
    assert list(bias.state_dict()) == ["relative_attention_bias.weight"]
    assert bias.relative_attention_bias.weight.shape == (32, 3)
    square = bias(9)
    assert square.shape == (3, 9, 9)
    close(square[:, 1:, 1:], square[:, :-1, :-1])  # constant along diagonals
    close(bias(2, 9), square[:, -2:])  # two new queries with seven keys in the cache
    assert torch.equal(square, square.mT) is False
    square.sum().backward()
    assert bias.relative_attention_bias.weight.grad.sum() == 3 * 81


def test_slopes_of_alibi():
    close(alibi_slopes(8), 2.0 ** -torch.arange(1, 9), rtol=0, atol=0)
    close(alibi_slopes(16), 2.0 ** (-torch.arange(1, 17) / 2), rtol=1e-6, atol=0)
    close(alibi_slopes(1), torch.tensor([2.0**-8]), rtol=0, atol=0)
    # the published rule
    twelve = [2.0**-h for h in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    close(alibi_slopes(12), torch.tensor(twelve), rtol=1e-6, atol=0)
    for heads in range(1, 40):
        slopes = alibi_slopes(heads)
        assert (
            slopes.shape == (heads,) and slopes.unique().numel() == heads and (slopes > 0).all()
        )
    with pytest.raises(ValueError, match=r"num_heads \(0\)"):
        alibi_slopes(0)


def test_alibi_is_the_published_bias_under_a_causal_mask():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 6, 10, 8, dtype=torch.float64)
    # their code: slope · j
    published = alibi_slopes(6).double()[:, None, None] * torch.arange(10)
    ours = attention(q, k, v, mask=causal_mask(10), bias=alibi_bias(6, 10, dtype=torch.float64))
    close(ours, attention(q, k, v, mask=causal_mask(10), bias=published), rtol=0, atol=1e-12)
    bias = alibi_bias(6, 10)
    assert torch.equal(bias, bias.mT) and torch.equal(alibi_bias(6, 3, 10), bias[:, -3:])
    with pytest.raises(ValueError, match=r"m \(2\)"):
        alibi_bias(2, 3, 2)


# --- two dimensions ---------------------------------------------------------------------------


def mae(height, width, dim):
    """MAE's encoding, derived again from its description: width first, sin | cos, omega =
    10000^(-i / (dim / 4))."""
    rows = []
    for r in range(height):
        for c in range(width):
            omega = [10000 ** (-i / (dim / 4)) for i in range(dim // 4)]
            rows.append([f(t * w) for t in (c, r) for f in (math.sin, math.cos) for w in omega])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    "height, width, dim", [(1, 1, 4), (14, 14, 32), (3, 7, 64), (7, 3, 20)]
)
def test_sincos_2d_is_that_of_mae(height, width, dim):
    close(
        sincos_2d(height, width, dim, dtype=torch.float64),
        mae(height, width, dim),
        rtol=0,
        atol=1e-13,
    )
    assert torch.equal(
        sincos_2d(height, width, dim),
        sincos_2d(height, width, dim, dtype=torch.float64).float(),
    )


def test_sincos_2d_bad_input():
    for dim in 6, 0, -4:
        with pytest.raises(ValueError, match=rf"dim \({dim}\)"):
            sincos_2d(2, 2, dim)
    with pytest.raises(ValueError, match=r"height \(-1\)"):
        sincos_2d(-1, 2, 8)
    assert sincos_2d(0, 3, 8).shape == (0, 8)


# --- rotary -----------------------------------------------------------------------------------


def test_rotary_is_the_block_matrix():
    def block(angle):
        c, s = math.cos(angle), math.sin(angle)
        return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)

    x = torch.randn(1, 4, dtype=torch.float64)
    close(
        apply_rotary(x, torch.tensor([5]), base=100.0),
        x @ torch.block_diag(block(5), block(0.5)).T,
    )


@few
@given(
    st.integers(0, 4000),
    st.integers(0, 4000),
    st.integers(-2000, 2000),
    st.integers(1, 16),
    st.integers(0, 9),
)
def test_rotary_logits_depend_on_the_offset(m, n, shift, half, seed):
    q, k = torch.randn(
        2, 1, 2 * half, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    here = apply_rotary(q, torch.tensor([m])) @ apply_rotary(k, torch.tensor([n])).T
    there = (
        apply_rotary(q, torch.tensor([m + shift]))
        @ apply_rotary(k, torch.tensor([n + shift])).T
    )
    close(here, there, rtol=0, atol=1e-9)
    close(apply_rotary(q, torch.tensor([m])).norm(), q.norm(), rtol=1e-12, atol=0)
    close(
        apply_rotary(apply_rotary(q, torch.tensor([m])), torch.tensor([-m])),
        q,
        rtol=0,
        atol=1e-10,
    )


def test_rotary_in_the_other_layout_is_permuted():
    torch.manual_seed(1)
    x, positions = torch.randn(2, 5, 8, dtype=torch.float64), torch.arange(5)
    sort = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    angles = position_angles(positions, 8).repeat(1, 2)
    low, high = x[..., sort].chunk(2, -1)
    half = x[..., sort] * angles.cos() + torch.cat((-high, low), -1) * angles.sin()
    close(half, apply_rotary(x, positions)[..., sort], rtol=0, atol=1e-12)


def test_rotary_of_hugging_face_llama():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(2)
    q, k = torch.randn(2, 1, 3, 7, 16, dtype=torch.float64)
    sort = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    angles = position_angles(torch.arange(7), 16).repeat(1, 2)[None]
    theirs = llama.apply_rotary_pos_emb(q[..., sort], k[..., sort], angles.cos(), angles.sin())
    for x, turned in zip((q, k), theirs):
        close(apply_rotary(x, torch.arange(7))[..., sort], turned, rtol=0, atol=1e-12)


def test_positions_of_each_sequence():
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)  # (B, h, N, d)
    starts = torch.tensor([0, 10])
    turned = apply_rotary(x, (starts[:, None] + torch.arange(4))[:, None])  # (B, 1, N)
    for b, start in enumerate(starts):
        close(turned[b], apply_rotary(x[b], start + torch.arange(4)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.randn(2, 5, 3, 8).transpose(1, 2),
        lambda: torch.randn(3, 5, 9)[..., :8],
        lambda: torch.randn(3, 5, 9)[..., 1:],
        lambda: torch.randn(3, 8, 5).mT,
        lambda: torch.randn(8).expand(3, 5, 8),
        lambda: torch.randn(2, 0, 8),
    ],
)
def test_any_memory_layout_is_turned(view):
    x = view()
    positions = torch.arange(x.shape[-2])
    close(
        apply_rotary(x, positions),
        apply_rotary(x.clone(memory_format=torch.contiguous_format), positions),
    )


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 0)]
)
def test_rotary_in_low_precision_rounds_once(dtype, tolerance):
    torch.manual_seed(3)
    x, positions = torch.randn(4, 50, 64).to(dtype), torch.arange(100_000, 100_050)
    turned = apply_rotary(x, positions)
    exact = apply_rotary(x.double(), positions)
    assert turned.dtype == dtype
    # half an ulp, and float32's error
    assert ((turned.double() - exact).abs() <= tolerance * exact.abs() + 2e-6).all()


def test_rotary_gradients():
    torch.manual_seed(4)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, torch.tensor([0, 3, 100])), x)
    angles = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotate_pairs, (x, angles))


def test_rotary_bad_input():
    with pytest.raises(ValueError, match=r"dim \(5\)"):
        apply_rotary(torch.zeros(3, 5), torch.arange(3))
    with pytest.raises(ValueError, match=r"positions of shape \(4,\)"):
        apply_rotary(torch.zeros(2, 3, 6), torch.arange(4))
    with pytest.raises(ValueError, match=r"positions of shape \(1, 1, 3\)"):
        apply_rotary(torch.zeros(2, 3, 6), torch.arange(3)[None, None])
    with pytest.raises(ValueError, match=r"x of shape \(3, 5\)"):
        rotate_pairs(torch.zeros(3, 5), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"angles of shape \(3, 4\)"):
        rotate_pairs(torch.zeros(3, 6), torch.zeros(3, 4))
    with pytest.raises(TypeError, match="positions of dtype torch.float16"):
        apply_rotary(torch.zeros(3, 6), torch.arange(3).half())


# --- together with attention ------------------------------------------------------------------


def test_decoding_with_a_cache_is_the_causal_pass():
    torch.manual_seed(5)
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)  # (B, h, N, d)
    positions, relative = torch.arange(9), RelativePositionBias(4, bidirectional=False).double()
    bias = relative(9) + alibi_bias(4, 9)
    turned_q, turned_k = apply_rotary(q, positions), apply_rotary(k, positions)
    at_once = attention(turned_q, turned_k, v, mask=causal_mask(9), bias=bias)
    for t in range(9):
        now = slice(t, t + 1)
        step = attention(
            apply_rotary(q[:, :, now], positions[now]),
            turned_k[:, :, : t + 1],
            v[:, :, : t + 1],
            bias=relative(1, t + 1) + alibi_bias(4, 1, t + 1),
        )
        close(step, at_once[:, :, now], rtol=0, atol=1e-6)  # ALiBi's bias is float32


def test_sinusoids_with_an_offset_continue_the_table():
    close(sinusoidal_encoding(3, 16, offset=7), sinusoidal_encoding(10, 16)[7:], rtol=0, atol=0)


# --- the experiment of the chapter ------------------------------------------------------------


@pytest.mark.slow
def test_the_experiment_runs(tmp_path):
    """A tiny run records its networks, and a second run takes them from the record."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.position",
        "schemes",
        "--tiny",
        "--out",
        str(tmp_path),
    ]
    root = Path(__file__).resolve().parent.parent
    records = []
    for _ in range(2):
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        records.append(json.loads((tmp_path / "positions.json").read_text())["runs"])
    assert records[0] == records[1]
    assert {run["task"] for run in records[0]} == {"three back", "the first"}
    assert {run["steps"] for run in records[0]} == {2, 8}
    assert all(run["valid"] > 0 and run["accuracy"] for run in records[0])


def test_the_record_is_complete():
    """Each scheme has three seeds at both lengths of training, with the setting chosen."""
    runs = read_record("positions")["runs"]
    for task, name in {(run["task"], run["scheme"]) for run in runs}:
        mine = [run for run in runs if (run["task"], run["scheme"]) == (task, name)]
        short = min(run["steps"] for run in mine)
        tried = [run for run in mine if run["steps"] == short and run["seed"] == 0]
        best = min(tried, key=lambda run: run["valid"])["setting"]
        for rate in best:  # the best learning rate lies inside the grid
            rates = [run["setting"][rate] for run in tried]
            assert min(rates) < best[rate] < max(rates), (task, name)
        for steps in short, 4 * short:
            final = [run for run in mine if run["steps"] == steps and run["setting"] == best]
            assert sorted(run["seed"] for run in final) == [0, 1, 2]
