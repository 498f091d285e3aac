"""Every backbone beside timm's for unusual images, and its shared parts beside formulas."""

import inspect
import math

import pytest
import timm.layers
import torch
import torch.nn as nn
import torch.nn.functional as F
from draws import batches, drawn, dtypes, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import assume, example
from hypothesis import strategies as st
from signatures import unchecked
from timm.layers import calculate_drop_path_rates
from timm.models._features import feature_take_indices as timms_indices

from attnlib import backbone as module
from attnlib.backbone import (
    Backbone,
    DropPath,
    _source_grid,
    as_map,
    check_counts,
    check_naturals,
    check_numbers,
    check_positive,
    check_rates,
    check_sizes,
    classifier,
    drop_path_rates,
    evaluation,
    feature_take_indices,
    hidden_width,
    init_weights,
    is_as_built,
    is_plain,
    is_unchanged,
    requires,
    resample_abs_pos_embed,
    resample_parameter,
    resample_stored,
    to_2tuple,
)
from helpers import BACKBONES, build, close, in_float64, pair

families = st.sampled_from(sorted(BACKBONES))
HALF = (torch.bfloat16, torch.float16)


def whole_sides(window):
    """Sides of maps whose shifted windows all are whole, also behind a merging of patches.

    timm shifts other maps before it pads them, and torchvision afterwards, as we do: these
    are compared in test_swin_oracle.py.
    """
    maps = {side: (side, -(-side // 2)) for side in range(1, 15)}
    sides = [
        side for side, both in maps.items() if all(m <= window or m % window == 0 for m in both)
    ]
    return st.sampled_from(sides)


@st.composite
def calls(draw):
    """A family, options for its model, and the size of its images."""
    name = draw(families)
    rows, columns = draw(map_sizes(4))
    options = dict(in_chans=draw(st.sampled_from((3, 1))))
    if name.startswith("swin"):
        options["window_size"] = window = draw(st.sampled_from((4, (2, 3), (3, 5), 7, (1, 4))))
        rows, columns = (draw(whole_sides(side)) for side in to_2tuple(window))
        options["img_size"] = (4 * rows, 4 * columns)
        pools = ("avg", "")
    else:
        options["patch_size"] = patch = draw(st.sampled_from(((8, 8), (4, 8), (8, 4))))
        options["img_size"] = (patch[0] * rows, patch[1] * columns)
        pools = ("token",) if name == "deit" else ("token", "avg", "")
    return name, options | dict(global_pool=draw(st.sampled_from(pools)))


def image_batch(options, batch=2, dtype=torch.float64, seed=0, layout="contiguous"):
    return normal((batch, options["in_chans"], *options["img_size"]), dtype, seed, layout)


def models(call, seed=0):
    """Our model and timm's in float64, with the same weights."""
    name, options = call
    return [in_float64(model).eval() for model in pair(name, seed, **options)]


@drawn(calls(), st.integers(1, 3), seeds, layouts)
@example(("swin", dict(img_size=(4, 40), in_chans=3, window_size=(3, 5))), 2, 0, "expanded")
@example(("swinv2", dict(img_size=(32, 4), in_chans=1, window_size=4)), 1, 0, "strided")
def test_outputs_and_gradients_are_timms(call, batch, seed, layout):
    x = image_batch(call[1], batch, seed=seed, layout=layout)
    found = []
    for model in models(call, seed):
        images = x.clone().requires_grad_()
        out = model(images)
        out.square().sum().backward()
        found.append([out, images.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and a.numel():
            close(a, b, 1e-9 * max(1, b.abs().max().item()))


@drawn(calls(), st.booleans())
def test_no_images_have_no_gradient(call, training):
    name, options = call
    model, x = build(name, **options).train(training), image_batch(options, 0, torch.float32)
    x.requires_grad_()
    out = model(x)
    assert out.shape == (0, *model(image_batch(options, 2, torch.float32)).shape[1:])
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@drawn(calls(), dtypes(torch.float32, *HALF), st.booleans(), seeds)
def test_lower_precision_is_near_float64(call, dtype, autocast, seed):
    name, options = call
    columns = options["img_size"][1] // to_2tuple(options.get("patch_size", 4))[1]
    # PyTorch 2.13's convolution of 8 by 1 patches in bfloat16 returns uninitialized memory
    assume(dtype != torch.bfloat16 or columns > 1)
    torch.manual_seed(seed)
    model = build(name, **options).eval()
    used = model if autocast else model.to(dtype)
    x = image_batch(options, 2, torch.float32 if autocast else dtype, seed)
    kept = {key: value.clone() for key, value in used.state_dict().items()}
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast and dtype in HALF):
        found = used(x)
    exact = build(name, **options).double().eval()
    exact.load_state_dict({key: value.double() for key, value in kept.items()})
    with torch.no_grad():
        wanted = exact(x.double())
    limit = 16 * torch.finfo(dtype).eps * max(1, wanted.abs().max().item())
    close(found.double(), wanted, limit)


@drawn(calls(), st.data())
def test_intermediates_are_timms(call, data):
    x = image_batch(call[1], data.draw(st.integers(1, 3)))
    ours, theirs = models(call)
    depth = len(ours.stages)
    some = st.lists(st.integers(-depth, depth - 1), min_size=1, max_size=depth)
    options = dict(
        indices=data.draw(st.one_of(st.none(), st.integers(1, depth), some)),
        norm=data.draw(st.booleans()),
        intermediates_only=data.draw(st.booleans()),
    )
    if not call[0].startswith("swin"):  # timm's has no such arguments
        options["output_fmt"] = data.draw(st.sampled_from(("NCHW", "NLC")))
        options["return_prefix_tokens"] = data.draw(st.booleans())
    if call[0].startswith("swin"):
        options["norm"] = options["norm"] and options["indices"] == 1  # of one width
    found = ours.forward_intermediates(x, **options)
    wanted = theirs.forward_intermediates(x, **options)
    if not options["intermediates_only"]:
        close(found[0], wanted[0], 1e-9)
        found, wanted = found[1], wanted[1]
    assert len(found) == len(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@drawn(calls(), st.sampled_from(("NHWC", "NLC")))
def test_formats_of_intermediates_hold_the_same_numbers(call, output_fmt):
    """timm has these formats not for all families; NCHW is compared with timm above."""
    model, x = models(call)[0], image_batch(call[1])
    maps = model.forward_intermediates(x, intermediates_only=True)
    others = model.forward_intermediates(x, output_fmt=output_fmt, intermediates_only=True)
    for a, b in zip(maps, others, strict=True):
        a = a.movedim(1, -1)
        close(b, a if output_fmt == "NHWC" else a.flatten(1, 2), 0)


@drawn(calls(), st.sampled_from((1, 2)))
def test_attention_maps_are_the_weights_that_timm_drops_from(call, batch):
    ours, theirs = models(call)
    x, wanted = image_batch(call[1], batch), []
    for name, layer in theirs.named_modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = False
        if name.endswith("attn_drop"):
            layer.register_forward_hook(lambda layer, inputs, out: wanted.append(out))
    theirs(x)
    found = ours.attention_maps(x)
    if call[0] == "tnt":
        words = ours.attention_maps(x, level="word")
        found = [m for both in zip(words, found, strict=True) for m in both]
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        close(a, b.reshape(a.shape), 1e-9)


@pytest.mark.parametrize("name", BACKBONES)
def test_maps_of_no_images(name):
    model = build(name).eval()
    x = torch.zeros(0, 3, 32, 32)
    levels = ("sentence", "word") if name == "tnt" else ()
    for arguments in [dict(level=level) for level in levels] or [{}]:
        for none, some in zip(
            model.attention_maps(x, **arguments),
            model.attention_maps(torch.zeros(1, 3, 32, 32), **arguments),
            strict=True,
        ):
            assert none.shape == (0, *some.shape[1:])


@drawn(families.filter(lambda name: name != "tnt"), st.data(), seeds)
def test_another_size_is_timms(name, data, seed):
    """TNT of timm has no such method; ours is compared with a loaded one in test_tnt.py."""
    if name.startswith("swin"):
        windows, unit = ((2, 3), (3, 2)), 4
        options, change = (dict(window_size=window) for window in windows)
        sizes = [[data.draw(whole_sides(side)) for side in window] for window in windows]
    else:
        unit, options, change = 8, {}, {}
        sizes = [data.draw(map_sizes(5)) for _ in range(2)]
    old, new = (tuple(unit * side for side in size) for size in sizes)
    options["img_size"] = old
    ours, theirs = pair(name, seed, **options)
    trained = [block.attn.window_size for block in ours.blocks[::2]] if unit == 4 else None
    ours.set_input_size(new, **change)
    if name == "swinv2":  # timm's own method forgets for which windows it was trained
        change = change | dict(img_size=new, pretrained_window_sizes=trained)
        theirs = build(name, peer=True, **change)
        theirs.load_state_dict(ours.state_dict())
    else:
        theirs.set_input_size(new, **change)
    ours, theirs = (in_float64(model).eval() for model in (ours, theirs))
    x = normal((2, 3, *new), seed=seed)
    wanted = theirs(x)
    close(ours(x), wanted, 1e-5 * max(1, wanted.abs().max().item()))  # timm's is float32


# --- positions --------------------------------------------------------------------------------


@drawn(map_sizes(6), map_sizes(6), st.sampled_from((0, 1, 3)), dtypes(), seeds, layouts)
def test_positions_are_resampled_as_timm_does(old, new, prefix, dtype, seed, layout):
    table = normal((1, prefix + math.prod(old), 5), dtype, seed, layout)
    found = resample_abs_pos_embed(table, new, old, prefix)
    exact = table.double()
    wanted = timm.layers.resample_abs_pos_embed(exact, list(new), list(old), prefix)
    assert found.dtype == dtype and found.shape == (1, prefix + math.prod(new), 5)
    close(found.double(), wanted, max(1e-5, tolerance(dtype, 8)))  # timm's is float32
    grid = exact[:, prefix:].unflatten(1, old).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, new, mode="bicubic", antialias=True).flatten(2).mT
    close(found[:, prefix:].double(), grid, max(1e-10, tolerance(dtype, 8)))
    assert torch.equal(found[:, :prefix], table[:, :prefix])


@drawn(map_sizes(6), map_sizes(6), seeds)
def test_parameters_and_state_dicts_are_resampled_alike(old, new, seed):
    table = normal((1, 1 + math.prod(old), 4), seed=seed)
    wanted = resample_abs_pos_embed(table, new, old)
    for requires_grad in (True, False):
        parameter = torch.nn.Parameter(table, requires_grad)
        found = resample_parameter(parameter, new, old)
        assert torch.equal(found, wanted) and found.requires_grad == requires_grad
        assert (found is parameter) == (old == new)
    stored = {"pos": table, "other": table}
    found = resample_stored(stored, "pos", new, old_size=old)
    assert torch.equal(found["pos"], wanted) and found["other"] is stored["pos"] is table
    assert resample_stored(stored, "missing", new) == stored


@drawn(st.integers(-2, 40), map_sizes(6))
def test_a_grid_is_the_new_one_or_a_square(count, new):
    squares = {side * side: side for side in range(1, 7)}
    if count == math.prod(new):
        assert _source_grid(count, new) == new
    elif count in squares:
        assert _source_grid(count, new) == (squares[count],) * 2
    else:
        with pytest.raises(ValueError, match=rf"old_size \(None\).* {count} positions"):
            _source_grid(count, new)


# --- stages, formats, depth -------------------------------------------------------------------


@drawn(
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(-2, 8), st.lists(st.integers(-8, 8), max_size=4)),
)
def test_indices_are_timms(depth, indices):
    try:
        wanted, _ = timms_indices(depth, indices)
    except (AssertionError, ValueError):
        with pytest.raises(ValueError, match="indices"):
            feature_take_indices(indices, depth)
        return
    assert feature_take_indices(indices, depth) == wanted


@drawn(map_sizes(5), batches, st.sampled_from((0, 1, 2)), seeds, layouts)
def test_tokens_become_maps_one_by_one(grid, batch, count, seed, layout):
    tokens = normal((batch, count + math.prod(grid), 3), torch.float64, seed, layout)
    for output_fmt in ("NCHW", "NHWC", "NLC"):
        found, prefix = as_map(tokens, grid, count, output_fmt)
        assert torch.equal(prefix, tokens[:, :count])
        own, none = as_map(tokens[:, count:].unflatten(1, grid), None, 7, output_fmt)
        assert none is None and torch.equal(own, found)
        for row in range(grid[0]):
            for column in range(grid[1]):
                number = row * grid[1] + column
                at = {
                    "NCHW": (..., row, column),
                    "NHWC": (slice(None), row, column),
                    "NLC": (slice(None), number),
                }[output_fmt]
                assert torch.equal(found[at], tokens[:, count + number])


@drawn(st.floats(0, 0.99), st.integers(1, 30))
def test_depth_rates_are_timms(rate, depth):
    assert drop_path_rates(rate, depth) == pytest.approx(calculate_drop_path_rates(rate, depth))


@drawn(st.sampled_from(((), (3,), (2, 5), (1, 2, 3))), batches, dtypes(), seeds)
def test_whole_examples_are_dropped_as_timm_does(shape, batch, dtype, seed):
    x = normal((batch, *shape), dtype, seed).requires_grad_()
    layer = DropPath(0.4)
    torch.manual_seed(seed)
    found = layer(x)
    torch.manual_seed(seed)
    wanted = timm.layers.drop_path(x, 0.4, training=True)
    close(found, wanted, tolerance(dtype, 4))
    (grad,) = torch.autograd.grad(found.sum(), x)
    kept = (found != 0).flatten(1).any(1) if shape else found != 0
    for image, slope in zip(kept.tolist(), grad.double(), strict=True):
        close(slope, torch.full_like(slope, image / 0.6), tolerance(dtype, 4))
    assert layer.eval()(x) is x


# --- modes ------------------------------------------------------------------------------------


@drawn(st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 3), st.booleans())
def test_modes_come_back(modes, depth, fails):
    """Of each part, from blocks in blocks, also when an error ends them."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    parts = list(model.modules())
    for part, mode in zip(parts, modes):
        part.training = mode

    def inside(level):
        if level > 0:
            with evaluation(model, parts if level == 2 else None) as same:
                assert same is model and not any(part.training for part in parts)
                inside(level - 1)
                assert not any(part.training for part in parts)
        elif fails:
            raise KeyError

    if fails:
        with pytest.raises(KeyError):
            inside(depth)
    else:
        inside(depth)
    assert [part.training for part in parts] == modes


# --- heads and checks -------------------------------------------------------------------------


@drawn(st.integers(1, 9), st.integers(0, 9), dtypes())
def test_a_classifier_is_linear_or_nothing(features, classes, dtype):
    head = classifier(features, classes, dtype=dtype)
    x = normal((3, features), dtype)
    if classes == 0:
        assert head(x) is x
        return
    assert head.weight.shape == (classes, features) and not head.bias.any()
    close(head(x), x @ head.weight.T, tolerance(dtype))


def test_weights_are_initialized_as_timms():
    """A normal distribution of deviation 0.02; other layers stay as they are."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList((torch.nn.Linear(200, 300), torch.nn.Linear(3, 2, bias=False)))
    other = torch.nn.LayerNorm(4)
    layers.append(other).apply(init_weights)
    weight = layers[0].weight
    assert abs(weight.mean()) < 1e-3 and abs(weight.std() - 0.02) < 1e-3
    assert not layers[0].bias.any() and other.weight.eq(1).all()


WHOLE = st.one_of(st.integers(-2, 4), st.sampled_from((1.0, None, "2", float("nan"))))


@drawn(WHOLE)
def test_counts_are_whole_and_large_enough(count):
    for check, least in ((check_counts, 1), (check_naturals, 0)):
        if isinstance(count, int) and count >= least:
            check(width=count)
        else:
            with pytest.raises(ValueError, match=r"width \("):
                check(height=3, width=count)


@drawn(st.one_of(WHOLE, st.lists(WHOLE, max_size=3).map(tuple)))
def test_sizes_are_one_number_or_two(size):
    pair = size if isinstance(size, tuple) else (size, size)
    with unchecked():  # sizes may be anything here
        assert to_2tuple(size) == pair or size != size or any(s != s for s in pair)
    assert to_2tuple([1, 2]) == (1, 2)
    if len(pair) == 2 and all(isinstance(s, int) and s >= 1 for s in pair):
        check_sizes(patch=size)
    else:
        with pytest.raises(ValueError, match=r"patch \("):
            check_sizes(patch=size)


@drawn(st.floats(-0.5, 1.5) | st.just(float("nan")))
@example(1.0)
@example(0.0)
def test_rates_are_in_the_half_open_interval(rate):
    if 0 <= rate < 1:
        check_rates(drop=rate)
    else:
        with pytest.raises(ValueError, match=r"drop \("):
            check_rates(other=0.5, drop=rate)


anything = st.one_of(
    st.integers(-2, 12), st.floats(), st.booleans(), st.none(), st.just("2"), st.just([1])
)


@drawn(anything)
def test_numbers_are_real_and_may_have_to_be_positive(value):
    is_number = isinstance(value, (int, float))
    is_positive = is_number and 0 < value < math.inf
    for check, allowed, error in (
        (check_numbers, is_number, TypeError),
        (check_positive, is_positive, ValueError),
    ):
        if allowed:
            assert check(beams=value) is None
        else:
            with pytest.raises(error, match=r"beams \("):
                check(beams=value)


@drawn(st.sampled_from((ModuleNotFoundError, KeyError, RuntimeError, None)))
def test_missing_packages_are_named(error):
    if error is None:
        with requires("data"):
            pass
        return
    missing = error is ModuleNotFoundError
    with pytest.raises(
        ImportError if missing else error, match="attnlib.data" if missing else "words"
    ):
        with requires("data"):
            raise error(*["num2words"], **({"name": "num2words"} if missing else {}))


def test_a_torchvision_of_another_kind_is_an_import_error():
    with pytest.raises(ImportError, match="torchvision does not fit"):
        with requires("detection"):
            raise RuntimeError("operator torchvision::nms does not exist")


@drawn(st.integers(1, 40), st.floats(-1, 5))
@example(3, float("nan"))
@example(64, 8 / 3)
def test_a_hidden_width_is_rounded_down(dim, ratio):
    if ratio > 0 and math.floor(dim * ratio) >= 1:
        assert hidden_width(dim, ratio) == math.floor(dim * ratio)
    else:
        with pytest.raises(ValueError, match=r"mlp_ratio \("):
            hidden_width(dim, ratio)


def test_whoever_changes_a_layer_is_noticed():
    kind = torch.nn.Linear
    assert is_plain(kind(2, 2), kind) and is_unchanged(kind(2, 2), torch.nn.GELU, kind)
    changed = []
    for change in (
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: layer.register_forward_pre_hook(lambda *_: None),
        lambda layer: setattr(layer, "forward", layer.forward),
        torch.nn.utils.parametrizations.weight_norm,
    ):
        layer = kind(2, 2)
        change(layer)
        changed.append(layer)
    assert not any(is_plain(layer, kind) for layer in changed)
    assert [is_unchanged(layer, kind) for layer in changed] == [True, True, False, False]
    assert not is_plain(kind(2, 2), torch.nn.GELU)


class Pair(torch.nn.Module):
    """Two layers in a row, of which the second is nested."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(2)
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU())


@pytest.mark.parametrize(
    "change",
    [
        lambda pair: setattr(pair, "norm", torch.nn.RMSNorm(2)),  # of another class
        lambda pair: setattr(pair, "more", torch.nn.Identity()),
        lambda pair: delattr(pair, "norm"),
        lambda pair: pair.inner.append(torch.nn.Identity()),
        lambda pair: pair.inner[0].register_forward_hook(lambda *_: None),
        lambda pair: setattr(pair.inner[1], "forward", pair.inner[1].forward),
        lambda pair: setattr(pair, "forward", pair.inner.forward),
    ],
)
def test_whoever_changes_a_part_is_noticed(change):
    layers = {"0": [torch.nn.Linear], "1": [torch.nn.GELU, torch.nn.ReLU]}
    children = dict(norm=[torch.nn.LayerNorm], inner=[torch.nn.Sequential])
    parts = {Pair: children, torch.nn.Sequential: layers}
    pair = Pair()
    assert is_as_built(pair, parts) and is_as_built(pair.inner, parts)
    assert not is_as_built(pair.norm, parts)  # a class that the caller does not know
    change(pair)
    assert not is_as_built(pair, parts)


ORACLES = {
    Backbone: test_outputs_and_gradients_are_timms,
    DropPath: test_whole_examples_are_dropped_as_timm_does,
    as_map: test_tokens_become_maps_one_by_one,
    check_counts: test_counts_are_whole_and_large_enough,
    check_numbers: test_numbers_are_real_and_may_have_to_be_positive,
    check_positive: test_numbers_are_real_and_may_have_to_be_positive,
    requires: test_missing_packages_are_named,
    check_naturals: test_counts_are_whole_and_large_enough,
    check_rates: test_rates_are_in_the_half_open_interval,
    check_sizes: test_sizes_are_one_number_or_two,
    classifier: test_a_classifier_is_linear_or_nothing,
    drop_path_rates: test_depth_rates_are_timms,
    evaluation: test_modes_come_back,
    feature_take_indices: test_indices_are_timms,
    hidden_width: test_a_hidden_width_is_rounded_down,
    init_weights: test_weights_are_initialized_as_timms,
    is_as_built: test_whoever_changes_a_part_is_noticed,
    is_plain: test_whoever_changes_a_layer_is_noticed,
    is_unchanged: test_whoever_changes_a_layer_is_noticed,
    resample_abs_pos_embed: test_positions_are_resampled_as_timm_does,
    resample_parameter: test_parameters_and_state_dicts_are_resampled_alike,
    resample_stored: test_parameters_and_state_dicts_are_resampled_alike,
    _source_grid: test_a_grid_is_the_new_one_or_a_square,
    to_2tuple: test_sizes_are_one_number_or_two,
}
NOT_HERE = {
    "describe_model": "describes a model for a file: tests/test_way_in.py",
    "FeatureInfo": "beside timm's class in tests/test_timm_contract.py",
    "FeatureExtractor": "beside timm's models in tests/test_timm_contract.py",
    "_HOOKS": "names of PyTorch's attributes, read by is_plain",
    "frozen_copy": "copies a model, tested with the fused ones in test_windows_fused.py",
    "_refuse_weights": "raises only, tested with the fused models",
    "_keep_evaluation": "raises only, tested with the fused models",
    "guard": "makes a model refuse, tested with the fused models",
    "_SameParameters": "raises only; tests/test_transformations.py",
    "resize": "set_input_size of an optimized copy; tests/test_inference.py",
}


def test_every_public_name_is_tested_here_or_has_a_reason():
    names = {item.__name__ for item in ORACLES} | NOT_HERE.keys()
    assert {name for name in names if name[0] != "_"} == set(module.__all__)
    assert all(inspect.isfunction(test) for test in ORACLES.values())
