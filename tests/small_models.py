"""A small model of every kind: `from small_models import LOADED, outputs`."""

from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from attnlib.autoformer import AutoFormer, ClassicalSharing, Space, SuperTransformer
from attnlib.beit import (
    BeitForMaskedImageModeling,
    DiscreteVAE,
    VectorQuantizer,
    VQAutoencoder,
)
from attnlib.detr import DETR, SmallBackbone
from attnlib.gpt import GPT, GPTConfig
from attnlib.mae import MaskedAutoencoder
from attnlib.panoptic import PanopticDETR
from attnlib.spatial import Captioner, ConvEncoder, Draw
from attnlib.transformer import Transformer
from helpers import BACKBONES, build, images


def small_detr():
    return DETR(5, 4, 1, 1, SmallBackbone(), 32, 2, 16)


def small_supernet(sharing=SuperTransformer, **options):
    """The supernet of 22,140 networks that 44_autoformer trains."""
    space = Space((16, 32, 48), (1, 2, 3, 4), (1, 2, 3), (1, 2, 4))
    shape = dict(img_size=10, patch_size=2, in_chans=1, num_classes=10, head_dim=16)
    return sharing(space, **shape | dict(max_distance=4) | options)


LOADED = {
    **{name: partial(build, name) for name in BACKBONES},
    "registers": partial(build, "vit", reg_tokens=2, pre_norm=True, qk_norm=True),
    "legacy": partial(build, "tnt", legacy=True),
    "autoformer": partial(
        AutoFormer, 32, patch_size=8, embed_dim=24, num_heads=(2,), mlp_ratio=(2,), head_dim=8
    ),
    "supernet": partial(small_supernet),
    "classical": partial(small_supernet, ClassicalSharing),
    "mae": partial(
        MaskedAutoencoder,
        32,
        8,
        3,
        24,
        1,
        2,
        decoder_embed_dim=16,
        decoder_depth=1,
        decoder_num_heads=2,
    ),
    "masked beit": partial(BeitForMaskedImageModeling, 32, 8, 3, 16, 24, 1, 3),
    "detr": small_detr,
    "panoptic": lambda: PanopticDETR(small_detr(), num_groups=2),
    "dvae": partial(DiscreteVAE, 8, dim=8),
    "quantizer": lambda: VQAutoencoder(
        nn.Conv2d(3, 8, 4, 4), VectorQuantizer(4, 8), nn.ConvTranspose2d(8, 3, 4, 4)
    ),
    "gpt": lambda: GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=16)),
    "llama": lambda: GPT(
        GPTConfig(
            vocab_size=11,
            block_size=8,
            n_layer=1,
            n_head=2,
            n_embd=16,
            position="rotary",
            norm="rms",
            mlp="swiglu",
            n_kv_head=1,
        )
    ),
    **{
        f"transformer, {position}": partial(
            Transformer, 11, None, 16, 2, 1, 1, 16, max_length=8, position=position
        )
        for position in ("sinusoidal", "learned", "relative", "alibi", "rotary", "none")
    },
    "captioner": lambda: Captioner(11, ConvEncoder(16, 32), hidden_dim=16, max_length=6),
    "draw": partial(Draw, (8, 8), steps=2, glimpse=3, hidden_dim=8, latent_dim=4),
}


def outputs(model, name):
    """All tensors that a model returns for an input that it takes, without randomness."""
    torch.manual_seed(0)
    x = images(2, (32, 32)).float()
    tokens = torch.randint(1, 11, (2, 6))
    if name in ("supernet", "classical"):
        x = torch.randn(2, 1, 10, 10)
    if name == "masked beit":
        found = model(x, torch.rand(2, 4, 4) < 0.5)
    elif name in ("gpt", "llama"):
        found = model(tokens)
    elif name.startswith("transformer"):
        found = model(tokens, tokens)
    elif name == "captioner":
        found = model(x, tokens)
    elif name == "draw":
        found = model(torch.rand(2, 1, 8, 8))
    else:
        found = model(x)
    return [y for y in tree_leaves(found) if torch.is_tensor(y)]
