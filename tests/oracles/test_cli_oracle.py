"""What the command says of models and pictures is what NumPy, Pillow and timm say."""

import argparse
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from draws import drawn, map_sizes, normal, seeds
from hypothesis import strategies as st
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from attnlib import cli, models
from attnlib.attention import attention_backend
from attnlib.models import data_config, list_models
from attnlib.swin import SwinTransformer
from attnlib.vit import VisionTransformer


@drawn(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9), st.sampled_from((1.0, 1e-3)))
def test_medians_and_quartiles(numbers, unit):
    low, median, high = np.quantile(np.array(numbers) / unit, (0.25, 0.5, 0.75))
    found = cli._median_iqr(numbers, unit).replace("(", "").replace(")", "").replace(" to", "")
    for a, b in zip(map(float, found.split()), (median, low, high), strict=True):
        assert a == pytest.approx(b, abs=0.00501, rel=1e-9)


SMALL = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "vit_collages",
    "swin_tiny_patch4_window7_224",
    "beit_base_patch16_224",
)


@drawn(st.sampled_from(SMALL))
def test_facts(name):
    """Of the model without weights, its products counted by PyTorch."""
    facts = cli.describe(name)
    with torch.device("meta"):
        model = models.create_model(name).eval()
    size = model.data_config["input_size"]
    with (
        torch.no_grad(),
        attention_backend("reference"),
        FlopCounterMode(display=False) as counter,
    ):
        model(torch.empty(1, *size, device="meta"))
    assert facts["operations"] == f"{counter.get_total_flops() / 1e9:.3g} billion"
    count = sum(p.numel() for p in model.parameters())
    assert int(facts["parameters"].replace(",", "")) == count
    assert facts["class"].endswith(f".{type(model).__name__}")
    assert facts["input"] == " × ".join(map(str, size))
    assert [float(x) for x in facts["mean"].split(",")] == list(model.data_config["mean"])
    assert [float(x) for x in facts["std"].split(",")] == list(model.data_config["std"])
    if timm.is_model(name):
        with torch.device("meta"):
            theirs = timm.create_model(name)
        assert count == sum(p.numel() for p in theirs.parameters())


# --- where a model looks ----------------------------------------------------------------------


@drawn(map_sizes(4), st.integers(1, 3), st.booleans(), seeds)
def test_a_vit_looks_by_rollout(grid, depth, token, seed):
    """(A₁ + I)/2 · (A₂ + I)/2 · …, on grids that are not square (Abnar and Zuidema 2020)."""
    torch.manual_seed(seed)
    size = tuple(4 * n for n in grid)
    model = (
        VisionTransformer(
            size,
            4,
            embed_dim=8,
            depth=depth,
            num_heads=2,
            class_token=token,
            global_pool="token" if token else "avg",
        )
        .double()
        .eval()
    )
    x = normal((1, 3, *size), seed=seed)
    with torch.no_grad():
        maps = model.attention_maps(x)
    rolled = np.eye(maps[0].shape[-1])
    for weights in maps:
        rolled = (weights[0].mean(0).numpy() + np.eye(len(rolled))) / 2 @ rolled
    wanted = rolled[0, 1:] if token else rolled.mean(0)
    found = cli._attention_map(model, x)
    assert found.shape == grid and np.allclose(found.flatten(), wanted, rtol=0, atol=1e-12)


@drawn(map_sizes(5), st.integers(1, 5), st.sampled_from(("shrink", "pad")), seeds)
def test_a_swin_looks_in_its_only_window(grid, window, small_maps, seed):
    """Or says that there are several, or a padded one."""
    torch.manual_seed(seed)
    size = tuple(2 * n for n in grid)
    model = (
        SwinTransformer(
            size,
            2,
            embed_dim=8,
            depths=(1,),
            num_heads=(2,),
            window_size=window,
            small_maps=small_maps,
        )
        .double()
        .eval()
    )
    x = normal((1, 3, *size), seed=seed)
    one = all(n <= window if small_maps == "shrink" else n == window for n in grid)
    if not one:
        with pytest.raises(ValueError, match=rf"there must be one of {grid[0]} by {grid[1]}"):
            cli._last_window(model, x)
        return
    with torch.no_grad():
        (weights,) = model.attention_maps(x)
    wanted = weights[0].mean(0).mean(0).view(grid)  # of both heads, and of all queries
    assert torch.allclose(cli._last_window(model, x), wanted, rtol=0, atol=1e-12)
    assert torch.equal(cli._attention_map(model, x), cli._last_window(model, x))


@drawn(map_sizes(4), seeds, st.booleans())
def test_maps_are_drawn(grid, seed, black):
    """Gray, and orange where the model looked; also if it looked everywhere alike."""
    torch.manual_seed(seed)
    size = tuple(4 * n for n in grid)
    model = VisionTransformer(size, 4, embed_dim=8, depth=1, num_heads=1).eval()
    model.data_config = data_config("vit_tiny_patch16_224", size)
    pixels = np.zeros((*size, 3), np.uint8)
    if not black:
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    x = (torch.tensor(pixels).permute(2, 0, 1)[None] / 255 - 0.5) / 0.5
    model.data_config["crop_pct"] = 1.0
    with tempfile.TemporaryDirectory() as folder:
        cli._draw_map(model, Image.fromarray(pixels), Path(folder) / "map.png")
        drawn_pixels = np.asarray(Image.open(Path(folder) / "map.png")).astype(float)
    shares = cli._attention_map(model, x).numpy()
    light = (shares - shares.min()) / max(shares.max() - shares.min(), 1e-12)
    light = Image.fromarray(light.astype(np.float32)).resize(size[::-1], Image.BILINEAR)
    light = 0.75 * np.asarray(light)[..., None]
    gray = pixels.mean(-1, keepdims=True)
    wanted = (1 - light) * gray + light * 255 * np.array((0.9, 0.62, 0.0))
    assert np.abs(drawn_pixels - wanted).max() <= 0.51


@drawn(st.sampled_from((1.0, 0.875, 0.5)), st.sampled_from(((90, 60), (60, 90), (33, 32))))
def test_maps_have_the_size_of_the_photograph(crop_pct, size):
    """Light lies where the model's input was cut out, and nowhere else."""
    torch.manual_seed(0)
    model = VisionTransformer(32, 8, embed_dim=8, depth=1, num_heads=1).eval()
    model.data_config = data_config("vit_tiny_patch16_224", 32) | dict(crop_pct=crop_pct)
    photograph = Image.new("RGB", size, (100, 100, 100))
    with tempfile.TemporaryDirectory() as folder:
        cli._draw_map(model, photograph, Path(folder) / "map.png")
        found = Image.open(Path(folder) / "map.png")
        assert found.size == size
        colored = np.ptp(np.asarray(found).astype(int), axis=-1) > 1
    rows, columns = np.nonzero(colored.any(1))[0], np.nonzero(colored.any(0))[0]
    left, top, right, bottom = models.input_box(model.data_config, *size)
    assert left - 1 <= columns.min() and columns.max() <= right
    assert top - 1 <= rows.min() and rows.max() <= bottom
    # and it reaches half of the way to the edges at least
    assert columns.max() - columns.min() > (right - left) / 2
    assert rows.max() - rows.min() > (bottom - top) / 2


# --- the command ------------------------------------------------------------------------------


@drawn(st.text("vitswn*?_", min_size=1, max_size=5))
def test_names_are_listed(pattern):
    wanted = [name for name in list_models() if fnmatchcase(name, pattern)]
    options = cli._parser().parse_args(["models", "--", pattern])
    assert options.run is cli._print_models and options.pattern == pattern
    if not wanted:
        with pytest.raises(ValueError, match="fits no name"):
            cli._print_models(options)
    assert list_models(pattern) == wanted


def test_the_command_prints_facts_and_names(capsys):
    cli.main(["models", "vit_coll*"])
    assert capsys.readouterr().out.split() == ["vit_collages"]
    cli._print_facts(argparse.Namespace(name="vit_collages"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        [*item] for item in cli.describe("vit_collages").items()
    ]


ORACLES = {
    "_median_iqr": test_medians_and_quartiles,
    "describe": test_facts,
    "_attention_map": test_a_vit_looks_by_rollout,
    "_last_window": test_a_swin_looks_in_its_only_window,
    "_draw_map": test_maps_are_drawn,
    "_ORANGE": test_maps_are_drawn,
    "_parser": test_names_are_listed,
    "_print_models": test_names_are_listed,
    "_print_facts": test_the_command_prints_facts_and_names,
    "main": test_the_command_prints_facts_and_names,
}
NOT_HERE = {
    "_TOP1": "a table of timm's: tests/test_cli.py",
    "_REPORTED": "a table of what papers say",
    "_LICENSES": "a table of licenses: tests/test_cli.py",
    "_UNKNOWN": "a word",
    "_NAME": "a text of the help",
    "predict": "reads recorded weights: tests/test_cli.py",
    "_benchmark": "measures time: tests/test_cli.py",
    "_print_classes": "prints: tests/test_cli.py",
    "_DEFAULT_MODEL": "a name",
    "_print_times": "prints: tests/test_cli.py",
}


def test_every_public_name_is_here_or_said_to_be_elsewhere():
    assert not ORACLES.keys() & NOT_HERE.keys()
    assert set(cli.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
