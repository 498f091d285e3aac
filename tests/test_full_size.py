"""The published models, whole, beside timm's with the same weights: logits, features, and
gradients of all parameters.

By default the smallest of each family; under `-m slow` those of at most 30 million parameters,
and with ATTNLIB_FULL=1 every name whose two models fit into memory. Float32 within 1e-5, as
sums of some thousand terms near 1 are rounded; float64 within 1e-10.
"""

import os

import pytest
import timm
import torch

from attnlib.models import create_model, list_models
from helpers import in_float64

FULL = os.environ.get("ATTNLIB_FULL") == "1"
FAMILIES = ("vit_*_patch??_224", "deit_*", "swin_*_window*", "swinv2_*", "tnt_*_224")


def available():
    """Bytes of free memory, or many where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            return next(
                1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return 2**40


def pair(name):
    with torch.device("meta"):
        count = sum(p.numel() for p in create_model(name).parameters())
    if not FULL and count > 30e6:
        pytest.skip(f"{count / 1e6:.0f} million parameters: set ATTNLIB_FULL=1")
    if 2 * 8 * count * 2.2 > available():  # both in float64, and their gradients
        pytest.skip(f"{count / 1e6:.0f} million parameters do not fit into memory twice")
    # a fresh one each time; pytest prints it when the test fails
    print("seed", seed := torch.seed() % 2**31)
    torch.manual_seed(seed)
    theirs = timm.create_model(name, num_classes=1000, drop_path_rate=0.0)
    # timm starts with zeros here and ones there, which would hide a mistake
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.02 * torch.randn_like(p))
    ours = create_model(name, drop_path_rate=0.0)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def largest(a, b):
    """The largest difference, in units of the largest entry where that is above 1."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()


def sizes():
    """All names; of each family only the smallest is quick enough for every run."""
    smallest = (
        "vit_tiny_patch16_224",
        "deit_tiny_patch16_224",
        "swin_tiny_patch4_window7_224",
        "swinv2_tiny_window8_256",
        "tnt_s_patch16_224",
    )
    cases = []
    for family in FAMILIES:
        for name in list_models(family):
            marks = [] if name in smallest else [pytest.mark.slow]
            cases.append(pytest.param(name, marks=marks))
    return cases


@pytest.mark.parametrize("name", sizes())
def test_equals_timm(name):
    ours, theirs = (model.eval() for model in pair(name))
    patches = ours.pixel_embed if name.startswith("tnt_") else ours.patch_embed
    x = torch.randn(1, 3, *patches.img_size)
    with torch.no_grad():
        assert largest(ours(x), theirs(x)) < 1e-5
        assert largest(ours.forward_features(x), theirs.forward_features(x)) < 1e-5
    ours, theirs, x = in_float64(ours), in_float64(theirs), x.double()
    out, expected = ours(x), theirs(x)
    assert largest(out, expected) < 1e-10
    out.square().sum().backward()
    expected.square().sum().backward()
    theirs = dict(theirs.named_parameters())
    for key, p in ours.named_parameters():
        assert (p.grad is None) == (theirs[key].grad is None), key
        assert p.grad is None or largest(p.grad, theirs[key].grad) < 1e-10, key
