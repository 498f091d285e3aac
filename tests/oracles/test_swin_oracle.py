"""Windows, shifts and bias tables beside torchvision's, timm's and loops, for unusual maps."""

import itertools
import math

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from draws import batches, drawn, dtypes, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import example
from hypothesis import strategies as st
from timm.models.swin_transformer import get_relative_position_index
from torchvision.models import swin_transformer as torchvisions

from attnlib import swin as module
from attnlib.attention import record_attention
from attnlib.models import load_pretrained
from attnlib.swin import (
    PatchMerging,
    SwinBlock,
    SwinStage,
    WindowAttention,
    WindowLayout,
    _block_shift,
    _pad_images,
    _resample_tables,
    _resampling_matrix,
    _source_window,
    _token_map,
    check_window,
    crop_map,
    cyclic_shift,
    merge_patches,
    pad_map,
    padded_size,
    pixel_maps,
    relative_position_index,
    resize_rel_pos_bias_table,
    reverse_cyclic_shift,
    round_up,
    shift_mask,
    stage_windows,
    window_bias,
    window_layout,
    window_partition,
    window_reverse,
)
from helpers import build, close

sides = st.tuples(st.integers(1, 5), st.integers(1, 5))


@st.composite
def layers(draw):
    """A map, a window, a shift of one axis, of both or of none, and what small maps get."""
    size, window = draw(map_sizes(8)), draw(sides)
    shift = tuple(draw(st.integers(0, side - 1)) for side in window)
    return size, window, shift, draw(st.sampled_from(("shrink", "pad")))


def used_layout(size, window, shift, small_maps):
    return window_layout(size, window, shift, small_maps == "shrink")


# --- maps -------------------------------------------------------------------------------------


@drawn(map_sizes(8), sides, batches, dtypes(), seeds, layouts)
def test_maps_and_images_are_padded_and_cropped(size, unit, batch, dtype, seed, layout):
    x = normal((batch, *size, 3), dtype, seed, layout)
    wanted = tuple(math.ceil(s / u) * u for s, u in zip(size, unit))
    assert round_up(size, unit) == wanted
    padded = pad_map(x, wanted)
    assert padded.shape == (batch, *wanted, 3) and torch.equal(crop_map(padded, size), x)
    padded = padded.clone()
    padded[:, : size[0], : size[1]] = 0
    assert not padded.any()
    images = x.movedim(3, 1)
    if all(s >= u for s, u in zip(size, unit)):
        assert padded_size(size, unit) == wanted
        found = _pad_images(images, unit)
        assert torch.equal(
            found, F.pad(images, (0, wanted[1] - size[1], 0, wanted[0] - size[0]))
        )
    else:
        with pytest.raises(ValueError, match="img_size"):
            padded_size(size, unit)
        with pytest.raises(ValueError, match="x of size"):
            _pad_images(images, unit)
    one = x.select(3, 0)  # what is no batch of images is left to the first layer
    assert _pad_images(one, unit) is one


@drawn(map_sizes(7), batches, st.integers(1, 3), dtypes(), seeds, layouts)
def test_merging_is_torchvisions(size, batch, dim, dtype, seed, layout):
    x = normal((batch, *size, dim), dtype, seed, layout)
    assert torch.equal(merge_patches(x), torchvisions._patch_merging_pad(x))
    ours, theirs = PatchMerging(dim), torchvisions.PatchMerging(dim)
    theirs.load_state_dict(ours.state_dict())
    x = x.double()
    close(ours.double()(x), theirs.double()(x))


@drawn(sides, sides, batches, st.integers(1, 3), dtypes(), seeds, layouts)
def test_windows_are_cut_one_by_one(counts, window, batch, heads, dtype, seed, layout):
    size = tuple(n * w for n, w in zip(counts, window))
    x = normal((batch, *size, 2 * heads), dtype, seed, layout)
    windows = window_partition(x, window, heads)
    number = 0
    for row, column in itertools.product(*(range(0, s, w) for s, w in zip(size, window))):
        cut = x[:, row : row + window[0], column : column + window[1]]
        for head in range(heads):
            one = cut[..., 2 * head : 2 * head + 2].flatten(1, 2)
            assert torch.equal(windows[:, number], one)
            number += 1
    assert windows.shape[1] == number and windows.dtype == dtype
    assert torch.equal(window_reverse(windows, window, size), x)


@drawn(layers())
@example(((1, 8), (4, 4), (2, 2), "shrink"))
@example(((4, 9), (4, 4), (3, 1), "pad"))
def test_layouts_follow_the_rules_axis_by_axis(call):
    found = used_layout(*call)
    assert isinstance(found, WindowLayout) and found.size == call[0]
    for axis in range(2):
        size, window, shift = (part[axis] for part in call[:3])
        if call[3] == "shrink":
            window = min(window, size)
        count = -(-size // window)
        assert found.window[axis] == window and found.padded[axis] == count * window
        assert found.shift[axis] == (shift if count > 1 else 0)


def cells(layout):
    """For each token of the padded map the cell of the shifted grid that it is in."""
    return {
        token: tuple((t - s) // w for t, s, w in zip(token, layout.shift, layout.window))
        for token in itertools.product(*map(range, layout.padded))
    }


@drawn(layers(), batches, seeds)
def test_shifted_windows_hold_the_tokens_of_their_cell(call, batch, seed):
    layout = used_layout(*call)
    x = normal((batch, *layout.padded, 2), seed=seed)
    shifted = cyclic_shift(x, layout)
    assert torch.equal(reverse_cyclic_shift(shifted, layout), x)
    rows, columns = layout.padded
    for row, column in itertools.product(range(rows), range(columns)):
        source = (row + layout.shift[0]) % rows, (column + layout.shift[1]) % columns
        assert torch.equal(shifted[:, row, column], x[:, source[0], source[1]])


@drawn(layers(), seeds)
@example(((3, 9), (4, 4), (2, 2), "shrink"), 0)
@example(((9, 3), (4, 2), (0, 1), "pad"), 0)
def test_masks_and_biases_are_those_of_each_pair(call, seed):
    layout, heads = used_layout(*call), 2
    rows, columns = call[1]  # of the window that the table is for
    table = normal(((2 * rows - 1) * (2 * columns - 1), heads), seed=seed)
    offsets = table.view(2 * rows - 1, 2 * columns - 1, heads)
    cell, tokens = cells(layout), list(itertools.product(*map(range, layout.padded)))
    order = torch.arange(len(tokens)).view(1, *layout.padded, 1)
    order = window_partition(cyclic_shift(order, layout), layout.window)[0, ..., 0]
    mask, index = shift_mask(layout), relative_position_index(layout.window, call[1])
    bias = window_bias(table, call[1], layout).unflatten(0, (-1, heads))
    plain = window_bias(table, call[1], layout, masked=False)
    assert len(mask) == len(bias) == len(order)
    for window, (numbers, allowed) in enumerate(zip(order.tolist(), mask)):
        for i, j in itertools.product(range(len(numbers)), repeat=2):
            a, b = tokens[numbers[i]], tokens[numbers[j]]
            assert bool(allowed[i, j]) == (cell[a] == cell[b])
            if cell[a] != cell[b]:
                assert bias[window, :, i, j].eq(-math.inf).all()
                continue
            wanted = offsets[a[0] - b[0] + rows - 1, a[1] - b[1] + columns - 1]
            assert torch.equal(bias[window, :, i, j], wanted)
            assert torch.equal(plain[:, i, j], wanted)
            assert torch.equal(table[index[i, j]], wanted)


@drawn(sides)
def test_the_index_of_a_window_is_timms(window):
    theirs = get_relative_position_index(*window)
    assert torch.equal(relative_position_index(window), theirs)


# --- tables -----------------------------------------------------------------------------------


@drawn(sides, sides, st.integers(1, 2), dtypes(), seeds, layouts)
@example((1, 4), (3, 1), 2, torch.float64, 0, "contiguous")
def test_tables_are_resized_as_timm_does(old, new, heads, dtype, seed, layout):
    rows = [math.prod(2 * side - 1 for side in window) for window in (old, new)]
    table = normal((rows[0], heads), dtype, seed, layout)
    found = resize_rel_pos_bias_table(table, new, old)
    wanted = timm.layers.resize_rel_pos_bias_table(table, new, (rows[1], heads), old)
    assert found.dtype == dtype and found.shape == (rows[1], heads)
    close(found.double(), wanted.double(), max(1e-5, tolerance(dtype, 4)))  # timm's: float32
    fits = rows[0] == rows[1] or old[0] == old[1]
    if not fits and math.isqrt(rows[0]) ** 2 != rows[0]:
        with pytest.raises(ValueError, match=r"old_window \(None\)"):
            _source_window(rows[0], new)
    elif old[0] == old[1] and rows[0] != rows[1]:
        assert _source_window(rows[0], new) == old
        assert torch.equal(resize_rel_pos_bias_table(table, new), found)
    elif rows[0] == rows[1]:
        assert _source_window(rows[0], new) == new


@drawn(st.integers(1, 6), st.integers(1, 6))
def test_resampling_keeps_constants_and_symmetry(old, new):
    matrix = _resampling_matrix(2 * old - 1, 2 * new - 1)
    assert matrix.shape == (2 * new - 1, 2 * old - 1) and matrix.dtype == torch.float64
    close(matrix.sum(1), torch.ones(2 * new - 1, dtype=torch.float64), 1e-12)
    assert (matrix >= 0).all()
    close(matrix, matrix.flip(0, 1), 1e-12)
    assert matrix[new - 1, old - 1] == 1  # the offset 0 keeps its bias


@drawn(map_sizes(8), sides, seeds)
def test_tables_of_a_state_dict_are_resized_for_each_block(size, window, seed):
    source = build("swin", img_size=64, window_size=4)
    target = build("swin", img_size=(4 * size[0], 4 * size[1]), window_size=window)
    stored = source.state_dict()
    found = _resample_tables(stored, target)
    wanted = target.state_dict()
    assert {key: x.shape for key, x in found.items()} == {k: x.shape for k, x in wanted.items()}
    for key, x in found.items():
        if not key.endswith("bias_table"):
            assert x is stored[key]
    for stage in target.layers:
        for block in stage.blocks:
            own = block.attn.window_size
            assert block.attn.relative_position_bias_table.shape[0] == math.prod(
                2 * side - 1 for side in own
            )


@drawn(map_sizes(12), sides, st.sampled_from(("shrink", "pad")))
def test_windows_of_stages_are_as_large_as_their_maps_allow(size, window, small_maps):
    img_size = 4 * size[0], 4 * size[1]
    model = build("swin", img_size=img_size, window_size=window, small_maps=small_maps)
    found = stage_windows(window, size, size, len(model.layers), small_maps)
    for i, stage in enumerate(model.layers):
        maps = [math.ceil(side / 2**i) for side in size]
        limit = maps if small_maps == "shrink" else window
        assert found[i] == tuple(min(pair) for pair in zip(window, limit))
        for j, block in enumerate(stage.blocks):
            assert block.attn.window_size == found[i]
            assert block.attn.shift_size == tuple(w // 2 * (j % 2) for w in found[i])
    grown = stage_windows(window, size, (2 * size[0], 3 * size[1]), 2, "pad")
    assert grown == [(2 * window[0], 3 * window[1])] * 2


PAIR = st.one_of(st.integers(-1, 4), st.tuples(st.integers(-1, 4), st.integers(-1, 4)))


@drawn(PAIR, PAIR, st.sampled_from(("shrink", "pad", "cut")))
@example((3, 4), (0, 3), "pad")
@example(4, 2.0, "pad")
@example((1, 2, 3), 0, "pad")
def test_a_shift_is_less_than_its_window(window, shift, small_maps):
    pairs = [x if isinstance(x, tuple) else (x, x) for x in (window, shift)]
    whole = all(isinstance(x, int) for pair in pairs for x in pair)
    fits = whole and len(pairs[0]) == 2 and min(pairs[0]) > 0
    fits = fits and all(0 <= s < w for w, s in zip(*pairs))
    if fits and small_maps != "cut":
        assert check_window(window, shift, small_maps) == tuple(pairs)
    else:
        with pytest.raises(ValueError, match=r"window_size|shift_size|small_maps"):
            check_window(window, shift, small_maps)


# --- attention --------------------------------------------------------------------------------


def torchvision_attention(layer, x):
    """torchvision's function for the weights of a layer, which it takes one by one."""
    window = layer.layout(x.shape[1:3]).window
    bias = window_bias(
        layer.relative_position_bias_table.double(),
        layer.window_size,
        WindowLayout(window, window, (0, 0), window),
        masked=False,
    )
    weights = {key: p.double() for key, p in layer.named_parameters()}
    return torchvisions.shifted_window_attention(
        x,
        weights["qkv.weight"],
        weights["proj.weight"],
        bias[None],
        list(window),
        layer.num_heads,
        shift_size=list(layer.shift_size),
        qkv_bias=weights.get("qkv.bias"),
        proj_bias=weights["proj.bias"],
    )


def random_layer(kind, call, seed, **options):
    size, window, shift, small_maps = call
    torch.manual_seed(seed)
    layer = kind(4, 2, window, shift, small_maps=small_maps, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@drawn(layers(), st.booleans(), batches, dtypes(), seeds, layouts)
@example(((4, 9), (4, 4), (2, 2), "shrink"), True, 2, torch.float32, 0, "expanded")
@example(((7, 2), (3, 5), (0, 4), "pad"), False, 0, torch.float64, 0, "strided")
def test_window_attention_is_torchvisions(call, qkv_bias, batch, dtype, seed, layout):
    """-100 stands for -inf there, and exp(-100) for 0."""
    layer = random_layer(WindowAttention, call, seed, qkv_bias=qkv_bias).to(dtype)
    x = normal((batch, *call[0], 4), dtype, seed, layout)
    found = layer(x)
    if batch == 0:
        assert found.shape == x.shape  # theirs fails for no maps
        return
    ours, theirs = (x.to(d).detach().clone().requires_grad_() for d in (dtype, torch.float64))
    found, wanted = layer(ours), torchvision_attention(layer, theirs)
    limit = tolerance(dtype, 32) * max(1, wanted.abs().max().item())
    close(found.double(), wanted, limit)
    slopes = [
        torch.autograd.grad(y.square().sum(), z)[0]
        for y, z in ((found, ours), (wanted, theirs))
    ]
    close(slopes[0].double(), slopes[1], 16 * limit * max(1, slopes[1].abs().max().item()))


@drawn(layers(), sides, seeds)
def test_another_window_has_the_table_that_timm_makes(call, window, seed):
    layer = random_layer(WindowAttention, call, seed)
    before, old = layer.relative_position_bias_table, layer.window_size
    shift = tuple(side - 1 for side in window)
    layer.set_window_size(window, shift)
    assert (layer.window_size, layer.shift_size) == (window, shift)
    shape = (math.prod(2 * side - 1 for side in window), 2)
    wanted = timm.layers.resize_rel_pos_bias_table(before.detach(), window, shape, old)
    close(layer.relative_position_bias_table, wanted, 1e-5)
    assert (layer.relative_position_bias_table is before) == (window == old)


@drawn(layers(), st.integers(1, 3), batches, seeds)
def test_a_block_and_a_stage_add_their_branches(call, depth, batch, seed):
    size, window, _, small_maps = call
    torch.manual_seed(seed)
    blocks = [
        SwinBlock(
            4,
            2,
            window,
            _block_shift(i, window),
            2.5,
            small_maps=small_maps,
            dtype=torch.float64,
        )
        for i in range(depth)
    ]
    merging = PatchMerging(2, dtype=torch.float64)
    stage = SwinStage(merging, blocks)
    x = normal((batch, *size, 2), seed=seed)
    wanted = merging(x)
    for i, block in enumerate(blocks):
        assert block.attn.shift_size == tuple(side // 2 if i % 2 else 0 for side in window)
        wanted = wanted + block.attn(block.norm1(wanted))
        hidden = F.gelu(F.linear(block.norm2(wanted), block.mlp.fc1.weight, block.mlp.fc1.bias))
        assert hidden.shape[-1] == 10
        wanted = wanted + F.linear(hidden, block.mlp.fc2.weight, block.mlp.fc2.bias)
    close(stage(x), wanted)


@drawn(map_sizes(8), sides, st.integers(1, 2), seeds)
@example((1, 1), (4, 4), 1, 0)
@example((9, 2), (2, 3), 2, 0)
def test_models_of_any_map_are_torchvisions(size, window, batch, seed):
    """torchvision pads a map before it shifts it, also one that is smaller than a window."""
    torch.manual_seed(seed)
    theirs = torchvisions.SwinTransformer(
        [4, 4], 16, [2, 2], [1, 2], list(window), num_classes=5, stochastic_depth_prob=0.0
    )
    ours = build("swin", img_size=64, window_size=window, small_maps="pad").double().eval()
    assert load_pretrained(ours, theirs.double().eval().state_dict()) == []
    x = normal((batch, 3, 4 * size[0], 4 * size[1]), seed=seed)
    close(ours(x), theirs(x), 1e-9)


# --- where a pixel looks ----------------------------------------------------------------------


@drawn(layers(), st.integers(0, 2), seeds, st.data())
def test_a_token_looks_where_its_weights_are(call, batch, seed, data):
    """Values that mark one token each: what a query averages then are its weights."""
    layer = random_layer(WindowAttention, call, seed, dtype=torch.float64)
    size, heads = call[0], 2
    layout, count = layer.layout(size), math.prod(size)
    x = normal((batch, *size, 4), seed=seed)
    with record_attention() as maps:
        layer(x)
    row, column = (data.draw(st.integers(0, side - 1)) for side in size)
    weights = maps[0].unflatten(
        1, (math.prod(layout.padded) // math.prod(layout.window), heads)
    )
    found = _token_map(weights, layout, (row, column))
    assert found.shape == (batch, heads, *size)
    marks = torch.eye(count, dtype=torch.float64).view(1, *size, count)
    marks = window_partition(cyclic_shift(pad_map(marks, layout.padded), layout), layout.window)
    averages = weights @ marks[:, :, None]  # (B, windows, h, N, all tokens)
    averages = averages.transpose(2, 3).flatten(3)  # -> (B, windows, N, h · all tokens)
    averages = window_reverse(averages, layout.window, layout.padded)
    wanted = reverse_cyclic_shift(averages, layout)[:, row, column]
    close(found, wanted.view(batch, heads, *size), 1e-12)


@drawn(
    st.sampled_from(("swin", "swinv2")),
    map_sizes(9),
    st.sampled_from((None, 1, 2, 5)),
    st.integers(0, 2),
    seeds,
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@example("swinv2", (9, 5), 1, 2, 0, (0, 0), (0.9, 0.1))
@example("swinv2", (9, 5), 2, 1, 1, (2, 1), (0.3, 0.7))
def test_a_pixel_looks_with_the_weights_of_its_token(
    name, size, at_once, batch, seed, cuts, places
):
    torch.manual_seed(seed)
    model = build(name, window_size=(2, 3), drop_path_rate=0.0).double().eval()
    img_size = [max(4, 4 * side - cut) for side, cut in zip(size, cuts)]
    x = normal((batch, 3, *img_size), seed=seed)
    pixel = tuple(int(place * (side - 1)) for place, side in zip(places, img_size))
    wanted, token_maps = [], model.attention_maps(x)
    with torch.no_grad():
        for stage, weights in zip(range(4), token_maps, strict=True):
            block = model.blocks[stage]
            scale = 4 * 2 ** (stage // 2)
            own = tuple(-(-side // scale) for side in img_size)
            layout = block.attn.layout(own)
            token = tuple(place // scale for place in pixel)
            windows = weights.unflatten(1, (-1, block.attn.num_heads))
            wanted.append(_token_map(windows, layout, token))
    if name == "swinv2":
        model.set_sequential_attention(at_once)
    found = pixel_maps(model, x, pixel)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-12)
        if batch:
            assert (a.sum((2, 3)) <= 1 + 1e-9).all()  # the rest is on padding


ORACLES = {
    "WindowLayout": test_layouts_follow_the_rules_axis_by_axis,
    "round_up": test_maps_and_images_are_padded_and_cropped,
    "pad_map": test_maps_and_images_are_padded_and_cropped,
    "crop_map": test_maps_and_images_are_padded_and_cropped,
    "merge_patches": test_merging_is_torchvisions,
    "PatchMerging": test_merging_is_torchvisions,
    "window_partition": test_windows_are_cut_one_by_one,
    "window_reverse": test_windows_are_cut_one_by_one,
    "window_layout": test_layouts_follow_the_rules_axis_by_axis,
    "cyclic_shift": test_shifted_windows_hold_the_tokens_of_their_cell,
    "reverse_cyclic_shift": test_shifted_windows_hold_the_tokens_of_their_cell,
    "shift_mask": test_masks_and_biases_are_those_of_each_pair,
    "relative_position_index": test_the_index_of_a_window_is_timms,
    "_resampling_matrix": test_resampling_keeps_constants_and_symmetry,
    "_source_window": test_tables_are_resized_as_timm_does,
    "resize_rel_pos_bias_table": test_tables_are_resized_as_timm_does,
    "window_bias": test_masks_and_biases_are_those_of_each_pair,
    "check_window": test_a_shift_is_less_than_its_window,
    "ShiftedWindows": test_window_attention_is_torchvisions,
    "WindowAttention": test_window_attention_is_torchvisions,
    "SwinBlock": test_a_block_and_a_stage_add_their_branches,
    "_block_shift": test_a_block_and_a_stage_add_their_branches,
    "SwinStage": test_a_block_and_a_stage_add_their_branches,
    "padded_size": test_maps_and_images_are_padded_and_cropped,
    "_pad_images": test_maps_and_images_are_padded_and_cropped,
    "stage_windows": test_windows_of_stages_are_as_large_as_their_maps_allow,
    "_resample_tables": test_tables_of_a_state_dict_are_resized_for_each_block,
    "SwinTransformer": test_models_of_any_map_are_torchvisions,
    "_token_map": test_a_token_looks_where_its_weights_are,
    "pixel_maps": test_a_pixel_looks_with_the_weights_of_its_token,
}
NOT_HERE = {"SIZES": "widths and depths of the paper, compared with timm's in test_parity.py"}


def test_every_public_name_is_tested_here_or_has_a_reason():
    names = ORACLES.keys() | NOT_HERE.keys()
    assert {name for name in names if name[0] != "_"} == set(module.__all__)
