"""Names, pictures and weights are treated as timm, Pillow and fnmatch treat them."""

import copy
import fnmatch

import numpy as np
import pytest
import timm
import torch
import torch.nn as nn
from draws import drawn, layouts, normal, seeds, tolerance
from hypothesis import strategies as st
from PIL import Image
from timm.models._manipulate import adapt_input_conv as timms_adapt

from attnlib import models
from attnlib.models import (
    adapt_input_conv,
    classify,
    create_model,
    data_config,
    list_models,
    load_pretrained,
    preprocess,
    unwrap_state_dict,
)
from attnlib.vit import VisionTransformer

NAMES = sorted(name for name in models.MODELS if timm.is_model(name))
names = st.sampled_from(NAMES)
patterns = st.text("vit*?[]_14", max_size=6)


@drawn(patterns)
def test_patterns_are_those_of_a_shell(pattern):
    found = list_models(pattern)
    assert sorted(found) == sorted(n for n in models.MODELS if fnmatch.fnmatchcase(n, pattern))
    assert len(found) == len({*found})


@drawn(names, st.none() | st.integers(1, 600), st.none() | st.integers(0, 9), st.integers(1, 7))
def test_what_a_name_wants(name, size, classes, channels):
    """As timm says of its own name, adapted to other sizes and channels."""
    theirs = timm.get_pretrained_cfg(models.MODELS[name][1].removeprefix("timm/"))
    ours = models.pretrained_cfg(name, classes, size, channels)
    assert data_config(name, size, channels).items() <= ours.items()
    assert ours["architecture"] == name
    usual = models.MODELS[name][2].get("num_classes", 1000)
    assert ours["num_classes"] == (usual if classes is None else classes)
    sides = theirs.input_size[1:] if size is None else (size, size)
    assert ours["input_size"] == (channels, *sides)
    for key in ("mean", "std"):
        three = getattr(theirs, key)
        wanted = [three[i % 3] for i in range(channels)]
        wanted = [sum(three) / 3] if channels == 1 else wanted
        assert ours[key] == pytest.approx(wanted)
    for key in ("crop_pct", "interpolation", "crop_mode"):
        assert ours[key] == getattr(theirs, key)


@pytest.mark.parametrize("size, channels", [(0, 3), ((224, 0), 3), (None, 0), (-1, 3)])
def test_images_have_pixels(size, channels):
    """A size of 0 was once that of the name."""
    with pytest.raises(ValueError, match=r"img_size \(.*\) and in_chans \(.*\)"):
        data_config("vit_tiny_patch16_224", size, channels)


@drawn(
    st.integers(1, 4),
    st.integers(1, 9),
    seeds,
    layouts,
    st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.float16)),
)
def test_first_layers_are_adapted(width, channels, seed, layout, dtype):
    """As timm does with weights for three channels, which it computes in float32."""
    weight = normal((width, 3, 2, 1), dtype, seed, layout)
    found = adapt_input_conv(weight, channels)
    numbers = torch.arange(channels) % 3
    wanted = weight.double()[:, numbers] * (3 / channels)
    if channels == 1:
        wanted = weight.double().sum(1, keepdim=True)
    torch.testing.assert_close(wanted.float(), timms_adapt(channels, weight.float()))
    assert found.dtype == dtype and found.shape == (width, channels, 2, 1)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance(dtype, 4) * 3)


@pytest.mark.parametrize("channels", [0, -1])
def test_a_first_layer_has_channels(channels):
    with pytest.raises(ValueError, match=rf"in_chans \({channels}\)"):
        adapt_input_conv(torch.zeros(1, 3, 1, 1), channels)


@drawn(st.data(), st.lists(st.text("ab.", min_size=1, max_size=4), unique=True, max_size=4))
def test_weights_are_unwrapped(data, keys):
    """From the wrappers of training scripts, one in the other or not, and their prefixes."""
    tensors = {f"x{key}": torch.tensor(float(i)) for i, key in enumerate(keys)}
    prefixes = ("", "module.", "_orig_mod.", "module._orig_mod.")
    prefix = data.draw(st.sampled_from(prefixes))
    source = {prefix + key: x for key, x in tensors.items()}
    wrapper = data.draw(
        st.sampled_from((None, "state_dict_ema", "model_ema", "state_dict", "model", "module"))
    )
    if wrapper is not None:
        source = {wrapper: source, "epoch": 3}
    before = copy.copy(source)
    found = unwrap_state_dict(source)
    assert found.keys() == tensors.keys() and found is not source
    assert all(found[key] is x for key, x in tensors.items()) and source == before


# --- models -----------------------------------------------------------------------------------

TINY = dict(img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2)


@pytest.fixture(autouse=True)
def tiny_names(monkeypatch):
    """A name of a tiny model beside those of the library."""
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    models.register_model("tiny_vit", VisionTransformer, **TINY, num_classes=3)


@drawn(
    st.none() | st.integers(0, 4),
    st.integers(1, 4),
    st.sampled_from((None, 4, 12, (8, 4), (4, 16))),
    seeds,
)
def test_created_models_with_weights(classes, channels, size, seed):
    """For other images, channels and classes: each weight is timm's, or starts at random."""
    models.register_model("tiny_vit", VisionTransformer, **TINY, num_classes=3)
    torch.manual_seed(seed)
    source = {
        key: torch.randn(x.shape)
        for key, x in VisionTransformer(**TINY, num_classes=3).state_dict().items()
    }
    size_ = (size, size) if isinstance(size, int) else size or (8, 8)
    model = create_model("tiny_vit", source, classes, channels, size)
    assert model.data_config["input_size"] == (channels, *size_) and model.training
    theirs = timm.models.VisionTransformer(
        img_size=size_,
        patch_size=4,
        embed_dim=8,
        depth=1,
        num_heads=2,
        in_chans=channels,
        num_classes=3 if classes is None else classes,
    )
    filtered = timm.models.vision_transformer.checkpoint_filter_fn(dict(source), theirs)
    for key, x in model.state_dict().items():
        if key.startswith("head") and classes not in (None, 3):
            continue
        wanted = filtered[key]
        if key == "patch_embed.proj.weight":
            wanted = timms_adapt(channels, wanted)
        torch.testing.assert_close(x, wanted, rtol=0, atol=2e-5)


@drawn(st.integers(1, 4), st.integers(1, 9), st.sampled_from((torch.float32, torch.bfloat16)))
def test_classes_are_those_of_the_softmax(classes, k, dtype):
    """Also of fewer than k, in any dtype of the weights."""
    model = VisionTransformer(**TINY, num_classes=classes).to(dtype).eval()
    model.head.weight.data.normal_(generator=torch.Generator().manual_seed(k))
    model.data_config = {**data_config("vit_tiny_patch16_224", 8), "crop_pct": 1.0}
    pixels = np.random.default_rng(k).integers(0, 256, (9, 12, 3), np.uint8)
    found = classify(model, pixels, k, [*"abcd"[:classes]])
    with torch.no_grad():
        x = preprocess(model.data_config)(pixels).to(dtype)
        wanted = model(x).float().softmax(-1)[0]
    assert len(found) == min(k, classes)
    assert [p for _, p in found] == sorted(wanted.tolist(), reverse=True)[:k]
    assert all(wanted["abcd".index(name)] == p for name, p in found)
    with pytest.raises(ValueError, match="names has 5 entries"):
        classify(model, pixels, k, [*"abcde"])
    model.num_classes = 0
    with pytest.raises(ValueError, match="has no classifier"):
        models.check_classifies(model)


def test_files_of_every_kind_hold_the_same(tmp_path):
    """Also empty tensors, and those that share memory."""
    from safetensors.torch import save_file

    x = torch.arange(6.0).view(2, 3)
    tensors = {"a": x, "b": torch.zeros(0, 3), "c": torch.ones((), dtype=torch.bfloat16)}
    torch.save(tensors | {"d": x.T}, tmp_path / "a.pt")
    save_file(tensors | {"d": x.T.contiguous()}, tmp_path / "a.safetensors")
    for ending in ("pt", "safetensors"):
        found = models.read_weights(tmp_path / f"a.{ending}")
        assert found.keys() == {*"abcd"} and torch.equal(found["d"], x.T)
        assert all(torch.equal(found[key], y) for key, y in tensors.items())


@drawn(st.integers(0, 2), seeds)
def test_what_does_not_fit_changes_nothing(part, seed):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before = copy.deepcopy(model.state_dict())
    source = {
        key: normal(x.shape, torch.float32, seed).to(x.dtype) for key, x in before.items()
    }
    wrong = dict(source)
    if part == 0:
        del wrong["1.running_var"]
    elif part == 1:
        wrong["more"] = torch.zeros(1)
    else:
        wrong["0.weight"] = torch.zeros(3, 1)
    with pytest.raises(ValueError, match=("missing", "unexpected", "of another shape")[part]):
        load_pretrained(model, wrong)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert load_pretrained(model, source) == []
    assert all(torch.equal(x, source[key]) for key, x in model.state_dict().items())


# --- pictures ---------------------------------------------------------------------------------


@drawn(
    names,
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from((8, (8, 12), (11, 5))),
    st.sampled_from((0.7, 0.9, 1.0)),
    seeds,
)
def test_pixels_are_timms(name, height, width, size, crop_pct, seed):
    """Of pictures of one pixel or of narrow ones, for inputs that are not square."""
    config = {**data_config(name, size), "crop_pct": crop_pct}
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    found = preprocess(config)(pixels)
    assert found.shape == (1, *config["input_size"])
    keys = ("input_size", "mean", "std", "crop_pct", "interpolation", "crop_mode")
    theirs = timm.data.create_transform(**{key: config[key] for key in keys})
    wanted = theirs(Image.fromarray(pixels))[None]
    assert (found - wanted).abs().max() <= 1e-5


@drawn(st.sampled_from(("L", "LA", "1", "P", "RGB", "RGBA", "CMYK", "YCbCr")), seeds)
def test_pictures_of_every_kind(mode, seed):
    """As Pillow converts them; and the picture stays as it is."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 5, 3), np.uint8)
    picture = Image.fromarray(pixels).convert("RGBA" if mode == "LA" else "RGB").convert(mode)
    before = picture.tobytes()
    found = models.open_picture(picture)
    assert found.mode == "RGB" and found.size == (5, 3) and picture.tobytes() == before
    assert np.array_equal(np.asarray(found), np.asarray(picture.convert("RGB")))


@drawn(
    st.integers(20, 90),
    st.integers(20, 90),
    st.sampled_from((1.0, 0.875, 0.5)),
    st.sampled_from(((32, 32), (32, 48), (17, 17))),
)
def test_the_box_is_what_preprocess_shows(width, height, crop_pct, size):
    """The brightness of a picture that is a ramp says which column and row a pixel was."""
    config = data_config("vit_tiny_patch16_224", size) | dict(
        crop_pct=crop_pct, interpolation="bilinear"
    )
    x = np.broadcast_to(np.arange(width)[None, :, None] * 2, (height, width, 1))
    y = np.broadcast_to(np.arange(height)[:, None, None] * 2, (height, width, 1))
    picture = np.concatenate([x, y, 0 * x], axis=-1).astype(np.uint8)
    shown = (models.preprocess(config)(picture)[0] * 0.5 + 0.5) * 255 / 2
    left, top, right, bottom = models.input_box(config, width, height)
    centers_x = left + (np.arange(size[1]) + 0.5) * (right - left) / size[1] - 0.5
    centers_y = top + (np.arange(size[0]) + 0.5) * (bottom - top) / size[0] - 0.5
    middle = size[0] // 2, size[1] // 2  # near an edge, the filter is cut off
    assert shown[0, middle[0], middle[1]] == pytest.approx(centers_x[middle[1]], abs=1.0)
    assert shown[1, middle[0], middle[1]] == pytest.approx(centers_y[middle[0]], abs=1.0)
    inside = (centers_x > 3) & (centers_x < width - 4)
    assert np.abs(shown[0, middle[0]].numpy() - centers_x)[inside].max(initial=0) < 1.0


ORACLES = {
    "list_models": test_patterns_are_those_of_a_shell,
    "data_config": test_what_a_name_wants,
    "pretrained_cfg": test_what_a_name_wants,
    "_IMAGENET": test_what_a_name_wants,
    "INCEPTION": test_what_a_name_wants,
    "CLIP": test_what_a_name_wants,
    "DATA_CONFIGS": test_what_a_name_wants,
    "adapt_input_conv": test_first_layers_are_adapted,
    "adapt_channels": test_first_layers_are_adapted,
    "unwrap_state_dict": test_weights_are_unwrapped,
    "state_dict_of": test_weights_are_unwrapped,
    "create_model": test_created_models_with_weights,
    "register_model": test_created_models_with_weights,
    "classify": test_classes_are_those_of_the_softmax,
    "check_classifies": test_classes_are_those_of_the_softmax,
    "read_weights": test_files_of_every_kind_hold_the_same,
    "load_pretrained": test_what_does_not_fit_changes_nothing,
    "preprocess": test_pixels_are_timms,
    "input_box": test_the_box_is_what_preprocess_shows,
    "open_picture": test_pictures_of_every_kind,
}
NOT_HERE = {
    "BUILDERS": "a registry",
    "load_model": "files: tests/test_way_in.py",
    "check_loadable": "adapters: tests/test_way_in_second.py",
    "save_model": "files: tests/test_way_in.py",
    "shipped_models": "names: tests/test_shipped.py",
    "shipped_folder": "names: tests/test_shipped.py",
    "MODELS": "the registry",
    "_WEIGHT_FILES": "names of files",
    "_FIRST_LAYER": "a pattern of names",
    "_CLASSIFIER": "a pattern of names",
    "NoClassifier": "names of models: tests/test_types.py",
    "fetch_weights": "downloads: tests/test_models.py",
    "class_names": "the names of ImageNet's classes: tests/test_models.py",
}


def test_every_public_name_is_here_or_said_to_be_elsewhere():
    assert not ORACLES.keys() & NOT_HERE.keys()
    assert set(models.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
