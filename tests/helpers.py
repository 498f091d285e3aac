"""What several test files share: `from helpers import close, images, same_weights`."""

from contextlib import contextmanager
from functools import partial
from pkgutil import resolve_name

import numpy as np
import pytest
import torch


def images(n=2, size=32, chans=3, seed=1):
    """Random images in float64; `size` is that of both sides, or height and width."""
    size = (size, size) if isinstance(size, int) else size
    return torch.randn(
        n, chans, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@contextmanager
def finer_precision(cuda=None, cpu=None):
    """Set the float32 precision of one library each, as PyTorch 2.9 and later allow.

    Afterwards the setting for all libraries is "highest", and those of each are what they were.
    """
    libraries = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    libraries = [library for library in libraries if hasattr(library, "fp32_precision")]
    before = [library.fp32_precision for library in libraries]
    try:
        for library, name in zip(libraries, (cuda, cpu)):
            if name is not None:
                library.fp32_precision = name
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for library, name in zip(libraries, before):
            library.fp32_precision = name


def same_weights(ours, theirs, seed=0, **options):
    """A model of two classes with the same weights; norms and biases are not one and zero."""
    torch.manual_seed(seed)
    ours = ours(**options)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs = theirs(**options)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


TOKENS = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_classes=5)
WINDOWS = dict(
    img_size=32,
    embed_dim=16,
    depths=(2, 2),
    num_heads=(1, 2),
    num_classes=5,
    drop_path_rate=0.0,
)
BACKBONES = {  # the class here, timm's, and a small model's options
    "vit": ("vit:VisionTransformer", "vision_transformer:VisionTransformer", dict(num_heads=3)),
    "deit": (
        "deit:DistilledVisionTransformer",
        "deit:VisionTransformerDistilled",
        dict(num_heads=3),
    ),
    "tnt": ("tnt:TNT", "tnt:TNT", dict(inner_dim=8, num_heads_inner=2, num_heads_outer=3)),
    "beit": ("beit:Beit", "beit:Beit", dict(num_heads=3)),
    "swin": ("swin:SwinTransformer", "swin_transformer:SwinTransformer", dict(window_size=4)),
    "swinv2": (
        "swinv2:SwinTransformerV2",
        "swin_transformer_v2:SwinTransformerV2",
        dict(window_size=4),
    ),
}

TIMM = {"beit": dict(use_abs_pos_emb=False, use_rel_pos_bias=True)}  # what ours always does


def build(name, peer=False, **options):
    """A small backbone of the family as it is initialized, or timm's."""
    ours, theirs, small = BACKBONES[name]
    small = small | TIMM.get(name, {}) if peer else small
    cls = resolve_name(f"timm.models.{theirs}" if peer else f"attnlib.{ours}")
    return cls(**(WINDOWS if name.startswith("swin") else TOKENS) | small | options)


def pair(name, seed=0, **options):
    """A small backbone of the family and timm's, with the same weights."""
    return same_weights(partial(build, name), partial(build, name, peer=True), seed, **options)


def backbone(name, **options):
    """A small backbone of the family in float64."""
    return pair(name, **options)[0].double()


def tiny_marian(**options):
    """A small MarianMTModel of the transformers library, with random weights."""
    import transformers

    settings = dict(
        vocab_size=30,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=29,
        eos_token_id=0,
        bos_token_id=None,
        decoder_start_token_id=29,
        forced_eos_token_id=None,
        dropout=0.0,
        attention_dropout=0.0,
        share_encoder_decoder_embeddings=True,
        decoder_vocab_size=30,
    )
    config = transformers.MarianConfig(**settings | options)
    return transformers.MarianMTModel(config).eval()


def in_float64(model):
    """A model in float64, with the coordinates of Swin V2 in this precision, too.

    Other libraries compute them in float32, so that `double` alone changes no digit.
    """
    model = model.double()
    for module in model.modules():
        table = getattr(module, "relative_coords_table", None)
        if table is not None:
            exact = exact_log_coordinates(module.window_size, module.pretrained_window_size)
            close(table.flatten(0, -2).double(), exact, 1e-6)
            module.relative_coords_table = exact.view_as(table)
    return model


def exact_log_coordinates(window, trained):
    """Equation 4 in float64, by NumPy."""
    offsets = [np.arange(1 - side, side, dtype=np.float64) for side in window]
    units = [max((own or side) - 1, 1) for own, side in zip(trained, window)]
    rows, columns = (8 * x / unit for x, unit in zip(offsets, units))
    rows, columns = (np.sign(x) * np.log2(1 + abs(x)) / 3 for x in (rows, columns))
    pairs = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1)
    return torch.from_numpy(pairs.reshape(-1, 2))


# --- tests of kernels -------------------------------------------------------------------------


def kernel_grid(names, cases, kept):
    """Parametrize a test of kernels; where they are interpreted, only some cases are quick.

    Without a GPU all cases except those in `kept` are slow, so that only `pytest -m slow` runs
    them. On a GPU all cases run.
    """
    several = "," in names
    parameters = []
    for case in cases:
        values = case if several else (case,)
        is_slow = case not in kept and not torch.cuda.is_available()
        marks = [pytest.mark.slow] if is_slow else []
        parameters.append(pytest.param(*values, marks=marks))
    assert all(case in list(cases) for case in kept), "a case that is kept is none of the grid"
    return pytest.mark.parametrize(names, parameters)
