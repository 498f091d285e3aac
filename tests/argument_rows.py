"""The table of tests/test_arguments.py: calls of the library's functions, and for each of their
arguments another value, which must have an effect."""

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn as nn
from small_models import small_supernet

from attnlib import (
    autoformer,
    beit,
    cost,
    decoding,
    detr,
    gpt,
    models,
    scaling,
    spatial,
    swin,
    transformer,
    translation,
    vit_variants,
)


def advice(requires):
    """What an import that fails in this context says."""
    try:
        with requires:
            raise ModuleNotFoundError(name="package")
    except ImportError as error:
        return str(error)


@dataclass
class Row:
    """A call by keywords, other values for each of them, and how the result is used.

    Of a function that changes an argument, `after` takes the arguments by name when it is done.
    """

    base: dict
    others: dict
    use: object = None
    after: object = None


@dataclass
class Fails:
    """Another value, with which the call must raise this."""

    value: object
    message: str
    error: type = ValueError


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image(size=16, chans=3, n=4):
    return numbers(n, chans, size, size)


def tokens(rows=3, n=6, low=3, high=20):
    generator = torch.Generator().manual_seed(n)
    return torch.randint(low, high, (rows, n), generator=generator)


# --- how modules are used ---------------------------------------------------------------------


def state(module):
    """Parameters and buffers, as they are initialized."""
    flags = {name: p.requires_grad for name, p in module.named_parameters()}
    return [dict(module.state_dict()), flags, [str(type(x)) for x in module.modules()]]


def trained(*inputs, call=None):
    """What a module is used for: a pass in training mode with weights none of which is zero.

    Where a call raises an error, its message stands for the result.
    """

    def use(module):
        found = [state(module)]
        if any(x.is_meta for x in module.parameters()):
            return found
        torch.manual_seed(1)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.2 * torch.randn_like(p))
        for one in inputs or [()]:
            one = one if isinstance(one, tuple) else (one,)
            dtype = next((p.dtype for p in module.parameters()), torch.float32)
            one = [x.to(dtype) if is_float(x) else x for x in one]
            torch.manual_seed(2)
            try:
                found.append(module(*one) if call is None else call(module, *one))
            except ValueError as error:
                found.append(str(error))
        return found

    return use


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


# --- vision models ----------------------------------------------------------------------------

META = dict(device="meta", dtype=torch.float64)
ON_IMAGES = trained(image(16), image(24))
SHAPE = dict(img_size=16, patch_size=4, in_chans=3, num_classes=5, embed_dim=12, depth=2)
SHAPE_OTHERS = dict(img_size=24, patch_size=8, in_chans=1, num_classes=7, embed_dim=24, depth=3)
RATES = dict(drop_rate=0.5, proj_drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5)
SWIN = dict(img_size=32, patch_size=4, in_chans=3, num_classes=5, embed_dim=8)
SWIN |= dict(depths=(2, 2), num_heads=(1, 2), window_size=8)
SWIN_OTHERS = dict(img_size=64, patch_size=2, in_chans=1, num_classes=7, embed_dim=16)
SWIN_OTHERS |= dict(depths=(1, 2), num_heads=(2, 2), window_size=4, global_pool="")
SWIN_OTHERS |= dict(mlp_ratio=2.0, qkv_bias=False, small_maps="pad", **RATES, **META)
ON_MAPS = trained(image(32), image(64))
LAYER = dict(dim=12, num_heads=3)
LAYER_OTHERS = dict(dim=24, num_heads=2)
TOKENS = numbers(4, 16, 12)
WIDE = numbers(4, 16, 24)
MAP = numbers(4, 8, 8, 12)


def either(*inputs, call=None):
    """`trained` on several inputs, of which a module may take some: those of its width."""

    def use(module):
        found = []
        for one in inputs:
            try:
                found.append(trained(one, call=call)(module))
            except (RuntimeError, TypeError) as error:
                found.append(type(error).__name__)
        return found

    return use


ON_TOKENS = either(TOKENS, WIDE)


def if_fits(call):
    """A call of layers of width 12; of other layers the state says enough."""

    def use(module, *inputs):
        first = next(module.parameters())
        return call(module, *inputs) if 12 in first.shape else 0

    return use


ON_MAP = either(MAP, numbers(4, 8, 8, 24), numbers(1, 16, 16, 12))
WINDOW = dict(dim=12, num_heads=3, window_size=4)
WINDOW_OTHERS = dict(dim=24, num_heads=2, window_size=16, shift_size=2, qkv_bias=False)
WINDOW_OTHERS |= dict(attn_drop=0.5, proj_drop=0.5, small_maps="pad", **META)

VISION = {
    "vit.VisionTransformer": Row(
        SHAPE | dict(num_heads=3, global_pool="avg"),
        SHAPE_OTHERS
        | RATES
        | META
        | dict(
            global_pool="token",
            num_heads=4,
            mlp_ratio=2.0,
            qkv_bias=False,
            class_token=False,
            pos_drop_rate=0.5,
            dynamic_img_size=True,
            reg_tokens=2,
            no_embed_class=True,
            pre_norm=True,
            norm_layer=nn.RMSNorm,
            qk_norm=True,
            init_values=0.1,
            mlp_layer=vit_variants.SwiGLU,
        ),
        ON_IMAGES,
    ),
    "deit.DistilledVisionTransformer": Row(
        SHAPE | dict(num_heads=3),
        SHAPE_OTHERS | RATES | META | dict(num_heads=4, mlp_ratio=2.0, qkv_bias=False),
        ON_IMAGES,
    ),
    "tnt.TNT": Row(
        SHAPE | dict(inner_dim=8, num_heads_inner=2, num_heads_outer=3, first_stride=2),
        SHAPE_OTHERS
        | RATES
        | META
        | dict(
            global_pool="avg",
            inner_dim=16,
            num_heads_inner=4,
            num_heads_outer=2,
            mlp_ratio=2.0,
            qkv_bias=True,
            pos_drop_rate=0.5,
            first_stride=4,
            legacy=True,
        ),
        ON_IMAGES,
    ),
    "beit.Beit": Row(
        SHAPE | dict(num_heads=3),
        SHAPE_OTHERS
        | RATES
        | META
        | dict(
            global_pool="token",
            num_heads=2,
            qkv_bias=False,
            mlp_ratio=2.0,
            pos_drop_rate=0.5,
            init_values=0.1,
        ),
        ON_IMAGES,
    ),
    "beit.BeitForMaskedImageModeling": Row(
        dict(img_size=16, patch_size=4, in_chans=3, embed_dim=12, depth=2, num_heads=3)
        | dict(vocab_size=9),
        dict(img_size=24, patch_size=8, in_chans=1, vocab_size=11, embed_dim=24, depth=3)
        | dict(num_heads=2, mlp_ratio=2.0, drop_path_rate=0.5, init_values=None)
        | META,
        trained((image(16), torch.arange(64).view(4, 4, 4) % 3 == 0)),
    ),
    "autoformer.AutoFormer": Row(
        dict(img_size=16, patch_size=4, in_chans=3, num_classes=5, embed_dim=12)
        | dict(num_heads=(1, 2), mlp_ratio=(2, 1), head_dim=8, max_distance=2),
        dict(img_size=24, patch_size=8, in_chans=1, num_classes=7, embed_dim=24)
        | dict(num_heads=(2, 2), mlp_ratio=(2, 2), head_dim=4, max_distance=1)
        | dict(global_pool="token", drop_rate=0.5, drop_path_rate=0.5)
        | META,
        ON_IMAGES,
    ),
    "swin.SwinTransformer": Row(SWIN, SWIN_OTHERS, ON_MAPS),
    "swinv2.SwinTransformerV2": Row(
        SWIN, SWIN_OTHERS | dict(pretrained_window_sizes=4), ON_MAPS
    ),
    "mae.MaskedAutoencoder": Row(
        dict(img_size=16, patch_size=4, in_chans=3, embed_dim=12, depth=2, num_heads=3)
        | dict(decoder_embed_dim=8, decoder_depth=1, decoder_num_heads=2),
        dict(img_size=24, patch_size=8, in_chans=1, embed_dim=24, depth=3, num_heads=2)
        | dict(decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=1, mlp_ratio=2.0)
        | dict(norm_pix_loss=True)
        | META,
        trained(image(16), call=lambda m, x: m(x)[0]),
    ),
    "vit.PatchEmbed": Row(
        dict(img_size=16, patch_size=4, in_chans=3, embed_dim=12),
        dict(img_size=24, patch_size=8, in_chans=1, embed_dim=24, norm_layer=nn.LayerNorm)
        | dict(flatten=False, strict_img_size=False, bias=False)
        | META,
        trained(image(16), image(24)),
    ),
    "vit.Mlp": Row(
        dict(in_features=12),
        dict(in_features=24, hidden_features=8, out_features=5, drop=0.5, act_layer=nn.ReLU)
        | META,
        ON_TOKENS,
    ),
    "vit.LayerNorm": Row(dict(dim=12), dict(dim=24) | META, ON_TOKENS),
    "vit.Attention": Row(
        LAYER,
        LAYER_OTHERS | dict(qkv_bias=False, attn_drop=0.5, proj_drop=0.5, qk_norm=True) | META,
        ON_TOKENS,
    ),
    "vit.Attention, 2": Row(LAYER | dict(qk_norm=True), dict(norm_layer=nn.RMSNorm), ON_TOKENS),
    "vit.LayerScale": Row(
        dict(dim=12, init_values=0.1), dict(dim=24, init_values=0.2) | META, ON_TOKENS
    ),
    "vit.Block": Row(
        LAYER,
        LAYER_OTHERS
        | dict(mlp_ratio=2.0, qkv_bias=False, proj_drop=0.5, attn_drop=0.5, drop_path=0.5)
        | dict(
            qk_norm=True, init_values=0.1, norm_layer=nn.RMSNorm, mlp_layer=vit_variants.SwiGLU
        )
        | META,
        ON_TOKENS,
    ),
    "vit_variants.SwiGLU": Row(
        dict(in_features=12),
        dict(in_features=24, hidden_features=8, drop=0.5, bias=False) | META,
        ON_TOKENS,
    ),
    "tnt.PixelEmbed": Row(
        dict(img_size=16, patch_size=4, in_chans=3, in_dim=6, stride=2),
        dict(img_size=24, patch_size=8, in_chans=1, in_dim=8, stride=1, legacy=True) | META,
        trained(image(16), image(24), call=lambda m, x: m(x, x.new_zeros(1))),
    ),
    "tnt.SplitAttention": Row(
        LAYER,
        LAYER_OTHERS | dict(qkv_bias=True, attn_drop=0.5, proj_drop=0.5) | META,
        ON_TOKENS,
    ),
    "swin.PatchMerging": Row(dict(dim=12), dict(dim=24) | META, ON_MAP),
    "swinv2.PatchMergingV2": Row(dict(dim=12), dict(dim=24) | META, ON_MAP),
    "swin.ShiftedWindows": Row(
        dict(window_size=4, shift_size=0, small_maps="shrink"),
        dict(window_size=5, shift_size=2, small_maps="pad"),
        lambda windows: windows.layout((3, 9)),
    ),
    "swin.WindowAttention": Row(WINDOW | dict(window_size=12), WINDOW_OTHERS, ON_MAP),
    "swinv2.WindowAttentionV2": Row(WINDOW | dict(window_size=12), WINDOW_OTHERS, ON_MAP),
    "swin.SwinBlock": Row(
        WINDOW | dict(window_size=12),
        WINDOW_OTHERS | dict(mlp_ratio=2.0, drop_path=0.5),
        ON_MAP,
    ),
    "swinv2.SwinBlockV2": Row(
        WINDOW | dict(window_size=12),
        WINDOW_OTHERS | dict(mlp_ratio=2.0, drop_path=0.5),
        ON_MAP,
    ),
    "beit.BeitAttention": Row(
        LAYER | dict(window_size=(3, 5)),
        LAYER_OTHERS
        | dict(window_size=(5, 5), qkv_bias=False, attn_drop=0.5, proj_drop=0.5)
        | META,
        ON_TOKENS,
    ),
    "beit.BeitBlock": Row(
        LAYER | dict(window_size=(3, 5)),
        LAYER_OTHERS
        | dict(window_size=(5, 5), qkv_bias=False, mlp_ratio=2.0, proj_drop=0.5)
        | dict(attn_drop=0.5, drop_path=0.5, init_values=0.1)
        | META,
        ON_TOKENS,
    ),
    "beit.BeitPositionBias": Row(
        dict(window_size=(3, 5), num_heads=2),
        dict(window_size=(5, 5), num_heads=3) | META,
        trained(),
    ),
    "autoformer.Linear": Row(
        dict(in_features=12, out_features=6),
        dict(in_features=24, out_features=7, bias=False) | META,
        ON_TOKENS,
    ),
    "autoformer.InterleavedLinear": Row(
        dict(in_features=12, out_features=6),
        dict(in_features=24, out_features=9, bias=False) | META,
        ON_TOKENS,
    ),
    "autoformer.LayerNorm": Row(
        dict(normalized_shape=12),
        dict(normalized_shape=24, eps=0.5, elementwise_affine=False, bias=False) | META,
        ON_TOKENS,
    ),
    "autoformer.RelativePositions": Row(
        dict(head_dim=4, max_distance=2),
        dict(head_dim=6, max_distance=3) | META,
        state,
    ),
    "autoformer.Attention": Row(
        LAYER | dict(head_dim=4, grid_size=(3, 5), max_distance=2),
        LAYER_OTHERS | dict(head_dim=6, grid_size=(5, 3), max_distance=1, elastic=False) | META,
        ON_TOKENS,
    ),
    "autoformer.Block": Row(
        LAYER | dict(head_dim=4, grid_size=(3, 5)),
        LAYER_OTHERS | dict(mlp_ratio=2.0, drop_path=0.5, elastic=False) | META,
        ON_TOKENS,
    ),
    "backbone.DropPath": Row(dict(drop_prob=0.0), dict(drop_prob=0.5), ON_TOKENS),
    "detr.FrozenBatchNorm2d": Row(dict(num_features=3), dict(num_features=4), state),
}


# --- detection --------------------------------------------------------------------------------


def small_backbone():
    torch.manual_seed(0)
    return detr.SmallBackbone((8, 8, 8, 8))


def of_output(model, x):
    output = model(x)
    return [output.logits, output.boxes]


ENCODER = dict(embed_dim=12, num_heads=3, dim_feedforward=24, dropout=0.0)
ENCODER_OTHERS = dict(embed_dim=24, num_heads=2, dim_feedforward=16, dropout=0.5)
QUERIES = numbers(5, 12)
DETECTION = {
    "detr.DETR": Row(
        dict(num_classes=5, num_queries=4, num_encoder_layers=1, num_decoder_layers=1)
        | dict(backbone=small_backbone(), embed_dim=12, num_heads=2, dim_feedforward=24)
        | dict(dropout=0.0),
        dict(num_classes=6, num_queries=5, num_encoder_layers=2, num_decoder_layers=2)
        | dict(backbone=detr.SmallBackbone((8, 8, 8, 16)), embed_dim=24, num_heads=3)
        | dict(dim_feedforward=16, dropout=0.5, temperature=20),
        trained(image(32), call=of_output),
    ),
    "detr.BoxQueryDETR": Row(
        dict(num_classes=5, num_queries=4, num_encoder_layers=1, num_decoder_layers=1)
        | dict(backbone=small_backbone(), embed_dim=12, num_heads=2, dim_feedforward=24),
        dict(num_classes=6, num_queries=5, temperature=10000),
        trained(image(32), call=of_output),
    ),
    "detr.ResNet": Row(
        dict(name="resnet18"),
        dict(
            name="resnet34",
            dilation=Fails(True, "Dilation > 1", NotImplementedError),
            in_chans=1,
        ),
        state,
    ),
    "detr.SmallBackbone": Row(
        dict(widths=(8, 8, 8, 8)), dict(widths=(8, 8, 8, 16)), trained(image(32))
    ),
    "detr.EncoderLayer": Row(
        ENCODER,
        ENCODER_OTHERS,
        trained(TOKENS, call=if_fits(lambda m, x: m(x, x.flip(1)))),
    ),
    "detr.DecoderLayer": Row(
        ENCODER,
        ENCODER_OTHERS,
        trained(
            TOKENS,
            call=lambda m, x: (
                m(x[:, :5], QUERIES, x, x.flip(1)) if m.linear1.in_features == 12 else 0
            ),
        ),
    ),
    "detr.AnchorDecoderLayer": Row(
        ENCODER,
        ENCODER_OTHERS,
        trained(
            TOKENS,
            call=lambda m, x: (
                m(x[:, :5], x[:, 5:10], x[:, 3:8], x, x.flip(1))
                if m.linear1.in_features == 12
                else 0
            ),
        ),
    ),
    "detr._PlacedAttention": Row(
        dict(embed_dim=12, num_heads=3),
        dict(embed_dim=24, num_heads=2, kdim=6, vdim=6, bias=False, dropout=0.5),
        trained(
            TOKENS,
            call=lambda m, x: (
                m(x, x, x, x) if (m.embed_dim, m.kdim, m.vdim) == (12,) * 3 else 0
            ),
        ),
    ),
    "panoptic.AttentionMaps": Row(
        dict(embed_dim=12, num_heads=3),
        dict(embed_dim=24, num_heads=2, joint_softmax=True),
        trained(
            TOKENS,
            call=if_fits(lambda m, x: m(x, numbers(4, 12, 2, 3))),
        ),
    ),
    "panoptic.MaskHead": Row(
        dict(embed_dim=16, num_heads=4, channels=(6, 6), num_groups=2),
        dict(embed_dim=32, num_heads=6, channels=(6, 8), num_groups=1),
        trained(
            numbers(2, 20, 2, 2),
            call=lambda m, x: [norm.num_groups for norm in m.norms],
        ),
    ),
}


# --- sequences --------------------------------------------------------------------------------

SEQUENCE = dict(d_model=12, nhead=2, dim_feedforward=24, dropout=0.0)
SEQUENCE_OTHERS = dict(d_model=24, nhead=3, dim_feedforward=16, dropout=0.5)
SEQUENCE_OTHERS |= dict(activation="gelu", norm_first=True, rotary=True)
PADDED = torch.where(torch.arange(6) < torch.tensor([6, 4, 3])[:, None], tokens(), 0)
CONFIG = dict(vocab_size=20, block_size=8, n_layer=2, n_head=4, n_embd=16)
CONFIG_OTHERS = dict(
    vocab_size=21,
    block_size=16,
    n_layer=1,
    n_head=2,
    n_kv_head=2,
    n_embd=32,
    head_dim=8,
    n_inner=24,
    norm="layer",
    position="learned",
    mlp="gelu",
    qk_norm=True,
    tied=False,
    window=2,
    rope_base=100.0,
    rope_scaling={"rope_type": "linear", "factor": 4.0},
    bias=True,
    qkv_bias=True,
    norm_eps=0.5,
    dropout=0.5,
)


def as_gpt(config):
    return trained(tokens(), tokens(n=12))(gpt.GPT(config))


def config(**options):
    return gpt.GPTConfig(**CONFIG | options)


SEQUENCES = {
    "gpt.GPTConfig": Row(CONFIG, CONFIG_OTHERS, as_gpt),
    "gpt.GPT": Row(dict(config=config()), dict(config=config(window=2)), trained(tokens())),
    "gpt.Block": Row(
        dict(config=config()),
        dict(config=config(bias=True)),
        state,
    ),
    "gpt.CausalSelfAttention": Row(
        dict(config=config()), dict(config=config(qkv_bias=True)), state
    ),
    "gpt.MLP": Row(
        dict(config=config()), dict(config=config(mlp="gelu")), trained(numbers(2, 5, 16))
    ),
    "gpt._make_norm": Row(
        dict(config=config()), dict(config=config(norm_eps=0.5)), trained(numbers(2, 5, 16))
    ),
    "transformer.Transformer": Row(
        dict(src_vocab=20, d_model=12, nhead=2, num_encoder_layers=1, num_decoder_layers=1)
        | dict(dim_feedforward=24, dropout=0.0, max_length=8),
        dict(
            src_vocab=21,
            tgt_vocab=22,
            d_model=24,
            nhead=3,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=16,
            dropout=0.5,
            activation="gelu",
            norm_first=True,
            final_norm=True,
            max_length=4,
            pad_id=5,
            tie_weights=False,
            output_bias=True,
            position="learned",
        ),
        trained((PADDED, PADDED)),
    ),
    "transformer.EncoderLayer": Row(SEQUENCE, SEQUENCE_OTHERS, ON_TOKENS),
    "transformer.DecoderLayer": Row(
        SEQUENCE,
        SEQUENCE_OTHERS,
        either((TOKENS, TOKENS.flip(1)), (WIDE, WIDE.flip(1))),
    ),
    "transformer.SelfAttention": Row(
        dict(embed_dim=12, num_heads=3),
        dict(embed_dim=24, num_heads=2, rotary=True),
        ON_TOKENS,
    ),
    "transformer.CrossAttention": Row(
        dict(embed_dim=12, num_heads=3),
        dict(embed_dim=24, num_heads=2, kdim=24, vdim=24, bias=False, dropout=0.5),
        either((TOKENS, TOKENS.flip(1)), (TOKENS, WIDE)),
    ),
    "transformer.FeedForward": Row(
        dict(d_model=12, dim_feedforward=24),
        dict(d_model=24, dim_feedforward=16, activation="gelu"),
        ON_TOKENS,
    ),
    "transformer.Encoder": Row(
        dict(layers=[nn.Linear(2, 2)]),
        dict(layers=[nn.Linear(2, 3)], norm=nn.LayerNorm(2)),
        state,
    ),
    "transformer.Decoder": Row(
        dict(layers=[nn.Linear(2, 2)]),
        dict(layers=[nn.Linear(2, 3)], norm=nn.LayerNorm(2)),
        state,
    ),
    "transformer.Positions": Row(
        dict(scheme="learned", d_model=12, nhead=2, max_length=8),
        dict(scheme="relative", d_model=24, max_length=4),
        state,
    ),
    "transformer.Positions, 2": Row(
        dict(scheme="relative", d_model=12, nhead=2, max_length=8),
        dict(nhead=3),
        state,
    ),
    "multihead.MultiHeadAttention": Row(
        dict(embed_dim=12, num_heads=3),
        dict(embed_dim=24, num_heads=2, kdim=24, vdim=24, bias=False, dropout=0.5),
        either((TOKENS, TOKENS, TOKENS), (TOKENS, WIDE, TOKENS), (TOKENS, TOKENS, WIDE)),
    ),
    "attention.AdditiveAttention": Row(
        dict(query_dim=12, key_dim=12, hidden_dim=8),
        dict(query_dim=24, key_dim=24, hidden_dim=6),
        state,
    ),
    "seq2seq.RecurrentEncoder": Row(
        dict(vocab_size=20, embed_dim=8, hidden_dim=6),
        dict(vocab_size=21, embed_dim=6, hidden_dim=8, pad_id=5),
        trained(PADDED),
    ),
    "seq2seq.RecurrentDecoder": Row(
        dict(vocab_size=20, embed_dim=8, hidden_dim=6),
        dict(vocab_size=21, embed_dim=6, hidden_dim=8, attention=False, pad_id=5),
        state,
    ),
    "seq2seq.Seq2Seq": Row(
        dict(src_vocab=20, tgt_vocab=20, embed_dim=8, hidden_dim=6),
        dict(src_vocab=21, tgt_vocab=21, embed_dim=6, hidden_dim=8, attention=False)
        | dict(pad_id=5),
        trained((PADDED, PADDED)),
    ),
    "position.LearnedPositionalEmbedding": Row(
        dict(max_length=16, embed_dim=12), dict(max_length=8, embed_dim=24) | META, ON_TOKENS
    ),
    "position.RelativePositionBias": Row(
        dict(num_heads=3),
        dict(num_heads=2, bidirectional=False, num_buckets=16, max_distance=20),
        trained((40,)),
    ),
}


# --- other layers -----------------------------------------------------------------------------

LAYERS = {
    "beit.DiscreteVAE": Row(
        dict(num_embeddings=6, in_chans=3, patch_size=4, dim=8),
        dict(num_embeddings=7, in_chans=1, patch_size=8, dim=12),
        state,
    ),
    "beit.VectorQuantizer": Row(
        dict(num_embeddings=5, embedding_dim=3, decay=0.9, kmeans_steps=0),
        dict(num_embeddings=6, embedding_dim=4, decay=0.5, kmeans_steps=2),
        lambda m: [m(numbers(20, m.embedding.shape[1])), state(m)],
    ),
    "beit.conv_encoder": Row(
        dict(in_chans=3, dim=8, out_dim=4, patch_size=4),
        dict(in_chans=1, dim=6, out_dim=5, patch_size=8),
        state,
    ),
    "beit.conv_decoder": Row(
        dict(in_dim=4, dim=8, out_chans=3, patch_size=4),
        dict(in_dim=5, dim=6, out_chans=1, patch_size=8),
        state,
    ),
    "backbone.classifier": Row(
        dict(num_features=12, num_classes=5), dict(num_features=24, num_classes=0) | META, state
    ),
    "spatial.SoftAttention": Row(
        dict(feature_dim=6, hidden_dim=5, attention_dim=4),
        dict(feature_dim=7, hidden_dim=6, attention_dim=5),
        state,
    ),
    "spatial.HardAttention": Row(
        dict(feature_dim=6, hidden_dim=5, attention_dim=4),
        dict(feature_dim=7, hidden_dim=6, attention_dim=5, soft_share=1.0),
        lambda m: [
            state(m),
            m(
                numbers(3, 8, m.scores.key_proj.in_features),
                numbers(3, m.scores.query_proj.in_features),
            ),
        ],
    ),
    "spatial.ConvEncoder": Row(dict(), dict(dim=32, img_size=48), state),
    "spatial.Captioner": Row(
        dict(vocab_size=20, hidden_dim=8, max_length=8),
        dict(
            vocab_size=21,
            encoder=spatial.ConvEncoder(32),
            attention=spatial.HardAttention,
            hidden_dim=6,
            max_length=5,
            pad_id=19,
        ),
        lambda m: [state(m), decoding.greedy(m, image(32, n=3), 5), m.pad_id, m.max_length],
    ),
    "spatial.RewardBaseline": Row(
        dict(max_length=6),
        dict(max_length=5, decay=0.5),
        lambda m: [m.update(numbers(2, 3), torch.ones(2, 3, dtype=torch.bool)), state(m)],
    ),
    "spatial.AttentionGate": Row(
        dict(dim=6), dict(dim=8, score="additive"), trained((image(4, 6), numbers(4, 6)))
    ),
    "spatial.AttentiveConvnet": Row(
        dict(num_classes=5, img_size=32, dim=8),
        dict(num_classes=6, pool="max", questions=3, img_size=48, dim=6),
        state,
    ),
    "spatial.FilterBank": Row(
        dict(img_size=8, glimpse=3),
        dict(img_size=10, glimpse=4),
        lambda m: m.filters(torch.zeros(1, 5)),
    ),
    "spatial.Draw": Row(
        dict(img_size=8, steps=2, glimpse=3, hidden_dim=8, latent_dim=3),
        dict(img_size=10, steps=3, glimpse=None, hidden_dim=6, latent_dim=4),
        trained(image(8, 1), call=lambda m, x: m(x).canvas),
    ),
    "spatial.SqueezeExcite": Row(
        dict(channels=16, rd_ratio=0.25, rd_divisor=1),
        dict(channels=32, rd_ratio=0.5, rd_divisor=8),
        either(image(8, 16), image(8, 32)),
    ),
    "spatial.EfficientChannelAttention": Row(
        dict(kernel_size=3), dict(kernel_size=5), trained(image(8, 16))
    ),
    "spatial.ChannelSpatialAttention": Row(
        dict(channels=16, rd_ratio=0.25),
        dict(
            channels=32, rd_ratio=0.5, rd_divisor=16, kernel_size=3, mlp_bias=True, first="max"
        ),
        either(image(8, 16), image(8, 32)),
    ),
    "recipes.small_convnet": Row(
        dict(widths=(4, 6)), dict(in_chans=1, num_classes=7, widths=(4, 8)), state
    ),
}

CLASSES = VISION | DETECTION | SEQUENCES | LAYERS


# --- functions --------------------------------------------------------------------------------

Q, K, V = numbers(3, 2, 2, 6, 4).unbind()
MASK = torch.ones(6, 6, dtype=torch.bool).tril()
BIAS = numbers(2, 6, 6)
OTHER = numbers(2, 2, 6, 4, seed=1)
QKV = dict(q=Q, k=K, v=V)
QKV_OTHERS = dict(q=OTHER, k=OTHER, v=OTHER)
LONG = dict(zip("qkv", numbers(3, 1, 2, 16, 4).unbind()))
LONG_OTHERS = dict.fromkeys("qkv", numbers(1, 2, 16, 4, seed=1))
LOGITS = numbers(3, 7)
TEACHER = torch.nn.Linear(5, 5)
BOXES = torch.tensor([[0.5, 0.5, 0.2, 0.4], [0.3, 0.4, 0.2, 0.2]])
OTHER_BOXES = torch.tensor([[0.5, 0.6, 0.3, 0.4], [0.3, 0.4, 0.2, 0.1]])
KNOWN = (torch.arange(16) < 9).view(1, 1, 1, 16)
FILL = torch.zeros(2, 4, 4, dtype=torch.bool)


def generator():
    return torch.Generator().manual_seed(3)


def called(*arguments):
    """How a function that a call has returned is used."""
    return lambda function: function(*arguments)


def make_transformer(**options):
    torch.manual_seed(0)
    sizes = dict(num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=24, max_length=16)
    model = transformer.Transformer(20, d_model=12, nhead=2, dropout=0.0, **sizes | options)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.7)  # so that its answers differ
    return model.eval()


SEARCH = dict(model=make_transformer(), src=tokens(32), max_length=6)
SEARCH_OTHERS = dict(
    model=make_transformer(norm_first=True),
    src=tokens(32).flip(0),
    max_length=3,
    bos_id=7,
)
FUNCTIONS = {
    "attention.masked_softmax": Row(
        dict(logits=LOGITS), dict(logits=2 * LOGITS, mask=LOGITS > 0)
    ),
    "attention.causal_mask": Row(dict(n=4), dict(n=5, m=6, device="meta")),
    "attention.padding_mask": Row(
        dict(lengths=torch.tensor([2, 3])), dict(lengths=torch.tensor([1, 3]), m=5)
    ),
    "attention.broadcasts": Row(dict(shape=(1, 3), to=(2, 3)), dict(shape=(3, 3), to=(2, 4))),
    "attention.check_fits": Row(
        dict(name="mask", x=MASK, shape=(2, 6, 6)),
        dict(
            name=Fails("bias", "bias", TypeError),
            x=Fails(MASK[:, :5], "mask"),
            shape=Fails((2, 6, 7), "mask"),
        ),
    ),
    "attention.check_attention": Row(
        QKV,
        dict(
            q=Fails(Q[..., :3], "q"),
            k=Fails(K[..., :3], "k"),
            v=Fails(V[..., :3, :], "v"),
            mask=Fails(MASK[:, :5], "mask"),
            bias=Fails(BIAS[..., :5], "bias"),
            dropout_p=Fails(1.5, "dropout_p"),
        ),
    ),
    "attention.combined_bias": Row(
        dict(mask="causal", bias=None, q=Q, k=K),
        dict(mask=None, bias=BIAS, q=Q[..., :5, :], k=numbers(2, 2, 7, 4)),
    ),
    "attention.attention_weights": Row(
        dict(q=Q, k=K), dict(q=OTHER, k=OTHER, mask=MASK, bias=BIAS, scale=2.0)
    ),
    "attention.reference": Row(
        QKV | dict(mask=None, bias=None, scale=None, dropout_p=0.0),
        QKV_OTHERS | dict(mask=MASK, bias=BIAS, scale=2.0, dropout_p=0.5),
    ),
    "attention.sdpa": Row(
        QKV | dict(mask=None, bias=None, scale=None, dropout_p=0.0),
        QKV_OTHERS | dict(mask=MASK, bias=BIAS, scale=2.0, dropout_p=0.5),
    ),
    "attention.attention": Row(
        QKV, QKV_OTHERS | dict(mask="causal", bias=BIAS, scale=2.0, dropout_p=0.5)
    ),
    "attention._narrow_bias": Row(
        dict(bias=300 + BIAS, q=Q.bfloat16()), dict(bias=300 + 2 * BIAS, q=Q.half())
    ),
    "attention.fastest_backend": Row(
        dict(q=Q, k=K, dropout_p=0.5),
        dict(q=Q.to("meta"), k=numbers(2, 2, 600, 4), dropout_p=0.0),
    ),
    "attention.fastest_backend, 2": Row(
        dict(q=Q, k=K), dict(bias=BIAS.clone().requires_grad_())
    ),
    "multihead.split_heads": Row(dict(x=TOKENS, num_heads=3), dict(x=2 * TOKENS, num_heads=2)),
    "multihead.merge_heads": Row(dict(x=Q), dict(x=OTHER)),
    "multihead.check_heads": Row(
        dict(num_heads=3, embed_dim=12), dict(num_heads=Fails(5, "num_heads"))
    ),
    "position.position_angles": Row(
        dict(positions=torch.arange(5), dim=6),
        dict(positions=torch.arange(6), dim=8, base=100.0),
    ),
    "position.sinusoidal_encoding": Row(
        dict(length=5, dim=6), dict(length=6, dim=8, offset=2, base=100.0) | META
    ),
    "position.relative_positions": Row(dict(n=4), dict(n=5, m=6, device="meta")),
    "position.relative_position_bucket": Row(
        dict(relative_position=torch.arange(-150, 150)),
        dict(
            relative_position=torch.arange(100),
            bidirectional=False,
            num_buckets=16,
            max_distance=64,
        ),
    ),
    "position.alibi_slopes": Row(dict(num_heads=4), dict(num_heads=6) | META),
    "position.alibi_bias": Row(dict(num_heads=4, n=5), dict(num_heads=6, n=4, m=7) | META),
    "position.sincos_2d": Row(
        dict(height=2, width=3, dim=8), dict(height=3, width=2, dim=12) | META
    ),
    "position.rotate_halves": Row(
        dict(x=TOKENS, cos=TOKENS[..., :6].cos(), sin=TOKENS[..., :6].sin()),
        dict(x=2 * TOKENS, cos=TOKENS[..., :6].sin(), sin=TOKENS[..., :6].cos()),
    ),
    "position.rotate_pairs": Row(
        dict(x=TOKENS, angles=TOKENS[..., :6]), dict(x=2 * TOKENS, angles=TOKENS[..., 6:])
    ),
    "position.apply_rotary": Row(
        dict(x=TOKENS, positions=torch.arange(16)),
        dict(x=2 * TOKENS, positions=torch.arange(1, 17) ** 2, base=100.0, interleaved=False),
    ),
    "decoding.greedy": Row(SEARCH, SEARCH_OTHERS | dict(eos_id=Fails(0, "eos_id"))),
    "decoding.sample": Row(
        SEARCH,
        SEARCH_OTHERS
        | dict(temperature=9.0, top_k=1, top_p=0.01, generator=generator())
        | dict(eos_id=Fails(0, "eos_id")),
    ),
    "decoding.beam_search": Row(
        SEARCH | dict(beam_size=3),
        SEARCH_OTHERS
        | dict(beam_size=Fails(0, "beam_size"), length_penalty=-9.0, eos_id=Fails(0, "eos_id")),
    ),
    "decoding._check_decoding": Row(
        SEARCH | dict(bos_id=1, eos_id=2),
        dict(
            model=Fails(make_transformer(max_length=4), "max_length"),
            src=Fails(0 * PADDED, "src"),
            max_length=Fails(17, "max_length"),
            bos_id=Fails(20, "bos_id"),
            eos_id=Fails(0, "eos_id"),
            beam_size=Fails(0, "beam_size"),
            length_penalty=Fails("1", "length_penalty", TypeError),
        ),
    ),
    "decoding.next_log_probs": Row(
        dict(model=make_transformer(), tokens=tokens(), memory=numbers(3, 5, 12)),
        dict(
            model=make_transformer(norm_first=True),
            tokens=tokens().flip(1),
            memory=numbers(3, 4, 12),
            src_mask=(torch.arange(5) < 3).view(1, 1, 1, 5).expand(3, 1, 1, 5),
            cache=decoding.KVCache(),
        ),
    ),
    "decoding._vocabulary_size": Row(
        dict(model=make_transformer()), dict(model=transformer.Transformer(9, None, 4, 2, 0, 0))
    ),
    "decoding.top_k_filter": Row(dict(logits=LOGITS, k=2), dict(logits=-LOGITS, k=3)),
    "decoding.top_p_filter": Row(dict(logits=LOGITS, p=0.3), dict(logits=-LOGITS, p=0.9)),
    "decoding.beam_step": Row(
        dict(scores=numbers(2, 3), log_probs=numbers(6, 5), eos_id=2),
        dict(scores=numbers(2, 3, seed=1), log_probs=numbers(6, 5, seed=1), eos_id=0),
    ),
    "decoding.min_p_filter": Row(dict(logits=LOGITS, p=0.3), dict(logits=-LOGITS, p=0.9)),
    "decoding.next_token": Row(
        dict(logits=numbers(50, 7)),
        dict(
            logits=numbers(50, 7, seed=1),
            temperature=0.5,
            top_k=2,
            top_p=0.3,
            min_p=0.5,
            generator=generator(),
        ),
    ),
    "gpt.pad_left": Row(dict(prompts=[[3, 4], [5]]), dict(prompts=[[3], [5]], pad_id=9)),
    "gpt.decoder_mask": Row(
        dict(n=4, m=6, window=3),
        dict(
            n=3,
            m=8,
            window=2,
            attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]).bool(),
            device="meta",
        ),
    ),
    "gpt.grouped_attention": Row(
        dict(q=Q, k=K[:, :1], v=V[:, :1]),
        dict(q=OTHER, k=OTHER[:, :1], v=OTHER[:, :1], mask="causal", dropout_p=0.5, bias=BIAS),
    ),
    "gpt.text_batches": Row(
        dict(tokens=torch.arange(50), length=5, batch_size=3),
        dict(tokens=torch.arange(60), length=6, batch_size=4, seed=1),
        called(2),
    ),
    "gpt.text_bits": Row(
        dict(model=gpt.GPT(config()), tokens=tokens(1, 30)[0], length=8),
        dict(model=gpt.GPT(config(n_layer=1)), tokens=tokens(1, 31)[0], length=4, stride=1),
    ),
    "backbone.drop_path_rates": Row(dict(rate=0.3, depth=4), dict(rate=0.2, depth=3)),
    "backbone.hidden_width": Row(dict(dim=12, mlp_ratio=4.0), dict(dim=24, mlp_ratio=2.0)),
    "backbone.to_2tuple": Row(dict(x=3), dict(x=(3, 4))),
    "backbone.requires": Row(dict(extra="data"), dict(extra="plot"), advice),
    "backbone.feature_take_indices": Row(
        dict(indices=2, depth=5), dict(indices=[0, 1], depth=6)
    ),
    "backbone.as_map": Row(
        dict(x=TOKENS, grid=(3, 5), num_prefix_tokens=1),
        dict(
            x=2 * TOKENS,
            grid=(5, 3),
            num_prefix_tokens=Fails(2, "", RuntimeError),
            output_fmt="NHWC",
        ),
    ),
    "backbone._source_grid": Row(
        dict(count=16, new_size=(2, 8)), dict(count=9, new_size=(3, 3))
    ),
    "backbone.resample_abs_pos_embed": Row(
        dict(pos_embed=numbers(1, 17, 6), new_size=(3, 5)),
        dict(
            pos_embed=numbers(1, 17, 6, seed=1),
            new_size=(5, 3),
            old_size=(2, 8),
            num_prefix_tokens=2,
        ),
    ),
    "backbone.resample_stored": Row(
        dict(state_dict=dict(a=numbers(1, 17, 6)), key="a", grid_size=(3, 5)),
        dict(
            state_dict=dict(a=numbers(1, 17, 6, seed=1)),
            key="b",
            grid_size=(5, 3),
            num_prefix_tokens=2,
            old_size=(2, 8),
        ),
    ),
    "data.draw_numbers": Row(
        dict(count=5, limit=1000), dict(count=6, limit=100, seed=1, exclude=range(500))
    ),
    "data.number_words": Row(
        dict(numbers=[21, 3], language="en"), dict(numbers=[4], language="de")
    ),
    "data.digits": Row(dict(split="train", size=8), dict(split="test", size=6, seed=1)),
    "data.describe_scenes": Row(dict(count=3), dict(count=4, seed=1)),
    "data.scenes": Row(dict(count=4), dict(count=6, size=16, seed=1, task="color")),
    "data.collages": Row(dict(count=2, size=32), dict(count=3, split="test", size=48, seed=1)),
    "data.detection_scenes": Row(
        dict(count=2),
        dict(count=3, split="test", size=32, kinds="digits", objects=1, photographs=2, seed=1),
    ),
    "data.caption_scenes": Row(dict(count=2), dict(count=3, split="test", size=48, seed=1)),
    "data.context_scenes": Row(dict(count=8), dict(count=9, agree=1.0, size=48, seed=1)),
    "data.box_targets": Row(
        dict(kind=torch.tensor([[1, -1]]), box=torch.arange(8.0).view(1, 2, 4), size=16),
        dict(kind=torch.tensor([[1, 2]]), box=torch.arange(1.0, 9).view(1, 2, 4), size=8),
    ),
    "data.decode_captions": Row(
        dict(tokens=torch.tensor([[1, 4, 8, 14, 2]])),
        dict(tokens=torch.tensor([[1, 4, 9, 14, 2]]), words=tuple("abcdefghijklmnopqrs")),
    ),
    "data.standardize": Row(
        dict(images=image(), reference=image(8)),
        dict(images=2 * image(), reference=2 * image(8) + 1),
    ),
    "data.book_text": Row(dict(split="valid"), dict(split="test")),
    "data.small_images": Row(dict(size=8), dict(name=Fails("mnist", "name"), size=6)),
    "efficient.sparse_mask": Row(
        dict(n=9, window=2),
        dict(n=8, window=3, global_tokens=1, random_keys=2, causal=True),
    ),
    "efficient.sparse_mask, 2": Row(
        dict(n=9, window=2, random_keys=2), dict(generator=generator())
    ),
    "efficient.local_attention": Row(
        LONG | dict(window=2), LONG_OTHERS | dict(window=4, causal=False)
    ),
    "efficient.axial_attention": Row(
        LONG | dict(grid=(2, 8), axis=0), LONG_OTHERS | dict(grid=(4, 4), axis=1)
    ),
    "efficient.pooled_attention": Row(
        LONG | dict(grid=(4, 4), ratio=2), LONG_OTHERS | dict(grid=(2, 8), ratio=1)
    ),
    "efficient.linformer_attention": Row(
        LONG | dict(e=numbers(5, 16), f=numbers(5, 16)),
        LONG_OTHERS | dict(e=numbers(5, 16, seed=1), f=numbers(5, 16, seed=1)),
    ),
    "efficient._segment_means": Row(
        dict(x=TOKENS, count=4), dict(x=2 * TOKENS, count=2, mask=torch.arange(16) < 9)
    ),
    "efficient.nystrom_attention": Row(
        LONG | dict(landmarks=4),
        LONG_OTHERS | dict(landmarks=8, mask=torch.arange(16) < 9, iterations=2),
    ),
    "efficient.random_features": Row(
        dict(m=6, d=4), dict(m=8, d=5, orthogonal=False, generator=generator())
    ),
    "efficient.linear_attention": Row(
        LONG,
        LONG_OTHERS
        | dict(feature_map=torch.exp, causal=True, mask=KNOWN)
        | dict(state=numbers(1, 2, 4, 5))
        | dict(chunk=Fails(0, "chunk")),
    ),
    "efficient.performer_attention": Row(
        LONG | dict(w=numbers(6, 4)),
        LONG_OTHERS | dict(w=numbers(6, 4, seed=1), causal=True, mask=KNOWN),
    ),
    "efficient.lsh_attention": Row(
        LONG | dict(buckets=4),
        LONG_OTHERS
        | dict(buckets=2, rounds=2, causal=True, mask=torch.arange(16) < 9)
        | dict(generator=generator()),
    ),
    "detr.box_cxcywh_to_xyxy": Row(dict(boxes=BOXES), dict(boxes=OTHER_BOXES)),
    "detr.box_xyxy_to_cxcywh": Row(dict(boxes=BOXES), dict(boxes=OTHER_BOXES)),
    "detr.box_area": Row(dict(boxes=BOXES.cumsum(-1)), dict(boxes=OTHER_BOXES.cumsum(-1))),
    "detr.sine_position_embedding": Row(
        dict(mask=~FILL, dim=8),
        dict(mask=(~FILL)[:, :3], dim=12, temperature=20),
    ),
    "train.learning_rate": Row(
        dict(step=3, steps=10, warmup=2, schedule="cosine"),
        dict(step=4, steps=12, warmup=5, schedule="constant"),
    ),
}


# --- losses, windows, plans -------------------------------------------------------------------

CAPTIONS = dict(logits=numbers(3, 6, 20), targets=PADDED)
LAYOUT = swin.window_layout((8, 8), (4, 4), (2, 2))
PLAIN_LAYOUT = swin.window_layout((8, 8), (4, 4))
WINDOWED = dict(q=numbers(2, 8, 16, 4), k=numbers(2, 8, 16, 4), v=numbers(2, 8, 16, 4))
MANY = dict(vocab_size=50, block_size=64, n_layer=4, n_head=4, n_embd=64)
CLUSTER = scaling.Cluster(16, memory=1e9)
PLAN = scaling.Plan(4, 2, 2)
PLANNED = dict(plan=PLAN, config=gpt.GPTConfig(**MANY), cluster=CLUSTER, batch=64)
PLANNED_OTHERS = dict(
    plan=scaling.Plan(8),
    config=gpt.GPTConfig(**MANY | dict(n_layer=8, n_embd=128)),
    cluster=scaling.Cluster(16, flops=1e9, inside=1e9, between=1e9),
    batch=128,
)
SUBNET = autoformer.Subnet(16, (1, 2), (1, 2))
SPACE = autoformer.Space((16, 32, 48), (1, 2, 3), (1, 2, 3), (1, 2, 3))


FUNCTIONS |= {
    "spatial.caption_loss": Row(
        CAPTIONS | dict(weights=numbers(3, 6, 4), penalty=1.0),
        dict(
            logits=numbers(3, 6, 20, seed=1),
            targets=PADDED.flip(1),
            weights=numbers(3, 6, 4, seed=1),
            penalty=0.5,
            pad_id=7,
        ),
    ),
    "spatial.reinforce_loss": Row(
        CAPTIONS
        | dict(log_prob=-numbers(3, 6).abs(), entropy=numbers(3, 6).abs())
        | dict(baseline=spatial.RewardBaseline(6)),
        dict(
            logits=numbers(3, 6, 20, seed=1),
            targets=PADDED.flip(1),
            log_prob=numbers(3, 6, seed=1),
            entropy=numbers(3, 6, seed=1),
            baseline=Fails(spatial.RewardBaseline(5), "max_length"),
            reward_weight=2.0,
            entropy_weight=1.0,
            pad_id=7,
        ),
    ),
    "spatial._reduced_channels": Row(
        dict(channels=64, rd_ratio=0.25, rd_divisor=8),
        dict(channels=32, rd_ratio=0.5, rd_divisor=32),
    ),
    "spatial._check_odd": Row(dict(kernel_size=3), dict(kernel_size=Fails(4, "kernel_size"))),
    "transformer.label_smoothing_loss": Row(
        CAPTIONS,
        dict(logits=numbers(3, 6, 20, seed=1), targets=PADDED.flip(1), smoothing=0.3, pad_id=7),
    ),
    "deit.hard_distillation_loss": Row(
        dict(logits=LOGITS, dist_logits=2 * LOGITS, teacher_logits=-LOGITS)
        | dict(labels=torch.tensor([1, 2, 3])),
        dict(logits=3 * LOGITS, dist_logits=4 * LOGITS, teacher_logits=LOGITS.flip(0))
        | dict(labels=torch.tensor([1, 2, 4]), weight=0.2, label_smoothing=0.3),
    ),
    "deit.soft_distillation_loss": Row(
        dict(logits=LOGITS, dist_logits=2 * LOGITS, teacher_logits=-LOGITS)
        | dict(labels=torch.tensor([1, 2, 3])),
        dict(logits=3 * LOGITS, dist_logits=4 * LOGITS, teacher_logits=LOGITS.flip(0))
        | dict(labels=torch.tensor([1, 2, 4]), weight=0.2)
        | dict(temperature=1.0, label_smoothing=0.3),
    ),
    "deit.DistillationLoss": Row(
        dict(teacher=TEACHER, kind="soft"),
        dict(
            teacher=torch.nn.Linear(5, 5),
            kind="hard",
            weight=0.1,
            temperature=1.0,
            label_smoothing=0.3,
            mixup=9.0,
            augment=torch.neg,
        ),
        lambda loss: loss(torch.nn.Identity(), (numbers(4, 5), torch.arange(4))),
    ),
    "deit._check_losses": Row(
        dict(logits=LOGITS, dist_logits=LOGITS, teacher_logits=LOGITS, weight=0.5),
        dict(
            logits=Fails(LOGITS[:1], "logits"),
            dist_logits=Fails(LOGITS[:1], "dist_logits"),
            teacher_logits=Fails(LOGITS[:1], "teacher_logits"),
            weight=Fails(2, "weight"),
        ),
    ),
    "beit.dvae_loss": Row(
        dict(model=beit.DiscreteVAE(5, dim=8), batch=(image(),), beta=1.0),
        dict(model=beit.DiscreteVAE(6, dim=8), batch=(3 * image(),), beta=0.5, tau=0.2),
    ),
    "beit.perplexity": Row(
        dict(tokens=tokens(), num_embeddings=20),
        dict(tokens=tokens() // 2, num_embeddings=Fails(5, "num_embeddings")),
    ),
    "beit.block_mask": Row(
        dict(grid_size=(8, 8), num_masked=30, min_patches=4, rng=random.Random(0)),
        dict(
            grid_size=(6, 8),
            num_masked=20,
            min_patches=12,
            min_aspect=0.9,
            rng=random.Random(1),
        ),
    ),
    "beit._random_rectangle": Row(
        dict(area=12, min_aspect=0.3, rng=random.Random(0)),
        dict(area=40, min_aspect=1.0, rng=random.Random(2)),
    ),
    "beit._resize_beit_table": Row(
        dict(table=numbers(28, 2), new_window=(3, 5)),
        dict(table=numbers(28, 2, seed=1), new_window=(5, 3), old_window=(1, 13)),
    ),
    "beit.beit_position_index": Row(
        dict(window_size=(3, 2)), dict(window_size=(2, 3), device="meta")
    ),
    "detr.box_iou": Row(
        dict(a=BOXES.cumsum(-1), b=BOXES.cumsum(-1)),
        dict.fromkeys("ab", OTHER_BOXES.cumsum(-1)),
    ),
    "detr.generalized_box_iou": Row(
        dict(a=BOXES.cumsum(-1), b=BOXES.cumsum(-1)),
        dict.fromkeys("ab", OTHER_BOXES.cumsum(-1)),
    ),
    "detr.noised_targets": Row(
        dict(targets=[dict(labels=torch.tensor([1, 2]), boxes=BOXES)], num_classes=5),
        dict(
            targets=[dict(labels=torch.tensor([1, 2]), boxes=OTHER_BOXES)],
            num_classes=50,
            copies=2,
            shift=0.1,
            flip=1.0,
        ),
    ),
    "swin.window_layout": Row(
        dict(size=(6, 6), window_size=(4, 4)),
        dict(size=(8, 6), window_size=(8, 8), shift_size=(2, 2)),
    ),
    "swin.window_layout, 2": Row(dict(size=(3, 3), window_size=(4, 4)), dict(shrink=False)),
    "swin.window_bias": Row(
        dict(table=numbers(81, 2), table_window=(4, 4), layout=LAYOUT),
        dict(
            table=numbers(81, 2, seed=1),
            table_window=(5, 5),
            layout=PLAIN_LAYOUT,
            masked=False,
        ),
    ),
    "swin.shift_mask": Row(dict(layout=LAYOUT), dict(layout=PLAIN_LAYOUT, device="meta")),
    "swin.resize_rel_pos_bias_table": Row(
        dict(table=numbers(25, 2), new_window=(3, 5)),
        dict(table=numbers(25, 2, seed=1), new_window=(5, 3), old_window=(1, 13)),
    ),
    "swin.relative_position_index": Row(
        dict(window_size=(2, 3)),
        dict(window_size=(3, 2), table_window=(4, 4), device="meta"),
    ),
    "swin._pad_images": Row(
        dict(x=image(14), patch_size=(4, 4)),
        dict(x=2 * image(14), patch_size=(5, 5), value=0.5),
    ),
    "swin.round_up": Row(dict(size=(5, 6), unit=(4, 4)), dict(size=(9, 6), unit=(3, 4))),
    "swin.pad_map": Row(dict(x=MAP, size=(8, 9)), dict(x=2 * MAP, size=(9, 9))),
    "swin.crop_map": Row(dict(x=MAP, size=(8, 7)), dict(x=2 * MAP, size=(7, 7))),
    "swin.window_partition": Row(
        dict(x=MAP, window_size=(4, 4)), dict(x=2 * MAP, window_size=(2, 4), num_heads=3)
    ),
    "swin.check_window": Row(
        dict(window_size=(4, 4)),
        dict(window_size=(5, 4), shift_size=1, small_maps=Fails("crop", "small_maps")),
    ),
    "swin.padded_size": Row(
        dict(img_size=30, patch_size=(4, 4)),
        dict(img_size=40, patch_size=(9, 9)),
    ),
    "swinv2.normalize": Row(dict(x=TOKENS), dict(x=TOKENS + 1, length=2.0)),
    "swinv2.log_coordinates": Row(
        dict(window_size=(3, 4)),
        dict(window_size=(4, 3), pretrained_window_size=(8, 8)) | META,
    ),
    "swinv2._sequential_attention": Row(
        WINDOWED | dict(bias=numbers(2, 16, 16), mask=torch.ones(4, 16, 16).bool().tril()),
        dict.fromkeys("qkv", numbers(2, 8, 16, 4, seed=1))
        | dict(bias=numbers(2, 16, 16, seed=1), mask=torch.ones(4, 16, 16).bool())
        | dict(dropout_p=0.5),
    ),
    "vit.attention_distance": Row(
        dict(weights=numbers(2, 3, 17, 17).softmax(-1), grid_size=(4, 4)),
        dict(
            weights=numbers(2, 3, 17, 17, seed=1).softmax(-1),
            grid_size=(2, 8),
            patch_size=(2, 1),
            num_prefix_tokens=Fails(0, ""),
        ),
    ),
    "mae.MaskedAutoencoderOutput": Row(
        dict(loss=numbers(1), prediction=numbers(2, 4, 12), masked=numbers(2, 4) > 0),
        dict(loss=-numbers(1), prediction=-numbers(2, 4, 12), masked=numbers(2, 4) < 0),
    ),
    "mae.random_masking": Row(
        dict(noise=numbers(2, 16), mask_ratio=0.75),
        dict(noise=-numbers(2, 16), mask_ratio=0.5),
    ),
    "mae._position_embeddings": Row(
        dict(grid_size=(2, 3), dim=8), dict(grid_size=(3, 2), dim=12) | META
    ),
    "mae.patchify": Row(
        dict(images=image(), patch_size=(4, 4)), dict(images=2 * image(), patch_size=(8, 4))
    ),
    "gpt.rope_cos_sin": Row(
        dict(config=config(), positions=torch.arange(5)),
        dict(config=config(rope_base=100.0), positions=torch.arange(6), dtype=torch.float64),
    ),
    "gpt._token_positions": Row(
        dict(n=3, past=2),
        dict(n=4, past=3, attention_mask=torch.tensor([[0, 0, 1, 1, 1]]).bool(), device="meta"),
    ),
    "gpt.rope_scaling_factors": Row(
        dict(frequencies=torch.logspace(-5, 0, 20), rope_type="llama3", factor=4.0),
        dict(
            frequencies=torch.logspace(-4, 0, 20),
            rope_type="linear",
            factor=8.0,
            low_freq_factor=2.0,
            high_freq_factor=8.0,
            original_max_position_embeddings=4096,
        ),
    ),
    "recipes.crop_and_flip": Row(dict(x=image()), dict(x=2 * image(), padding=1)),
    "finetune.mixup": Row(
        dict(images=image(), targets=torch.eye(4), alpha=5.0),
        dict(images=2 * image(), targets=torch.eye(4).flip(0), alpha=0.0),
    ),
    "finetune.mask_patches": Row(
        dict(x=image(), rows=torch.tensor([[1]] * 4), patch_size=4),
        dict(x=2 * image(), rows=torch.tensor([[2]] * 4), patch_size=8),
    ),
    "scaling.plan": Row(
        {key: PLANNED[key] for key in ("config", "cluster", "batch")},
        dict(
            config=gpt.GPTConfig(**MANY | dict(n_layer=48, n_embd=512)),
            cluster=scaling.Cluster(4),
            batch=8,
        ),
    ),
    "scaling.memory_per_device": Row(
        {key: PLANNED[key] for key in ("plan", "config", "batch")},
        {key: PLANNED_OTHERS[key] for key in ("plan", "config")} | dict(batch=4),
    ),
    "scaling.step_time": Row(PLANNED, PLANNED_OTHERS),
    "scaling._compute_seconds": Row(PLANNED, PLANNED_OTHERS),
    "scaling._parameter_counts": Row(
        dict(config=PLANNED["config"]), dict(config=PLANNED_OTHERS["config"])
    ),
    "scaling.flops_per_token": Row(
        dict(config=PLANNED["config"]), dict(config=PLANNED_OTHERS["config"])
    ),
    "scaling._activation_bytes": Row(
        dict(config=PLANNED["config"]), dict(config=PLANNED_OTHERS["config"])
    ),
    "scaling.Cluster": Row(
        dict(devices=16, memory=1e9, node=4),
        dict(
            devices=8,
            node=2,
            memory=Fails(1e3, "memory"),
            flops=1e9,
            inside=1e9,
            between=1e9,
            efficiency=0.1,
        ),
        lambda cluster: [
            list(scaling._possible_plans(PLANNED["config"], cluster, 64)),
            scaling.plan(PLANNED["config"], cluster, 64),
            scaling.step_time(**PLANNED | dict(cluster=cluster)),
        ],
    ),
    "scaling.Plan": Row(
        dict(data=2, tensor=2, pipeline=2, micro=2),
        dict(
            data=4,
            tensor=4,
            pipeline=4,
            context=2,
            micro=4,
            interleave=2,
            zero=3,
            recompute=True,
        ),
        lambda plan: [
            scaling.memory_per_device(plan, PLANNED["config"], 64),
            scaling.step_time(plan, PLANNED["config"], CLUSTER, 64),
        ],
    ),
    "scaling.shard_sequence": Row(
        dict(x=TOKENS, rank=0, ranks=2),
        dict(x=2 * TOKENS, rank=1, ranks=4, dim=-1, balanced=True),
    ),
    "scaling.sequence_chunks": Row(
        dict(rank=0, ranks=2, balanced=True), dict(rank=1, ranks=3, balanced=False)
    ),
    "scaling._block_weights": Row(
        dict(q=Q, k=K), dict(q=OTHER, k=OTHER, lse=numbers(2, 2, 6), causal=True)
    ),
    "scaling._block_attention": Row(QKV, QKV_OTHERS | dict(causal=True)),
    "scaling.ring_schedule": Row(
        dict(rank=1, ranks=4, causal=True),
        dict(rank=2, ranks=3, causal=False, balanced=True),
        list,
    ),
    "efficient.delta_attention": Row(
        LONG | dict(beta=torch.rand(1, 2, 16, generator=torch.Generator().manual_seed(0))),
        LONG_OTHERS
        | dict(
            beta=torch.full((1, 2, 16), 0.5), state=numbers(1, 2, 4, 4), chunk=Fails(0, "chunk")
        ),
    ),
    "efficient._iterated_inverse": Row(
        dict(a=LOGITS.softmax(-1)[:, :3], steps=3), dict(a=LOGITS.softmax(-1)[:, 1:4], steps=4)
    ),
    "flash.tiled_attention": Row(QKV, QKV_OTHERS | dict(bias=BIAS, scale=2.0)),
    "flash.packed_ranges": Row(
        dict(lengths=[3, 4]),
        dict(lengths=[4, 3], causal=True, window=2),
        lambda ranges: [ranges.by_query, ranges.by_key],
    ),
    "flash.predicted_times": Row(
        dict(card="H100", batch=2, heads=4, n=512, d=64),
        dict(
            card="A100",
            batch=4,
            heads=2,
            n=1024,
            d=128,
            causal=True,
            bias=True,
            backward=True,
        ),
    ),
    "models.data_config": Row(
        dict(name="vit_tiny_patch16_224"),
        dict(name="swin_tiny_patch4_window7_224", img_size=64, in_chans=1),
    ),
    "models.create_model": Row(
        dict(name="vit_tiny_patch16_224", depth=1),
        dict(name="deit_tiny_patch16_224", num_classes=5, in_chans=1, img_size=64),
        lambda model: [state(model), model.data_config],
    ),
    "models.create_model, maps": Row(
        dict(
            name="vit_tiny_patch16_224",
            features_only=True,
            out_indices=(0,),
            depth=2,
            img_size=32,
        ),
        dict(features_only=Fails(False, "out_indices"), out_indices=(0, 1)),
        state,
    ),
    "models.list_models": Row(dict(), dict(pattern="vit*")),
    "models.adapt_input_conv": Row(
        dict(weight=numbers(4, 3, 2, 2), in_chans=1),
        dict(weight=numbers(4, 3, 2, 2, seed=1), in_chans=4),
    ),
    "convert.rename_keys": Row(
        dict(state_dict=dict(a=LOGITS), table=[("a", "b")]),
        dict(state_dict=dict(a=2 * LOGITS), table=[("a", "c")]),
    ),
    "autoformer.mutate": Row(
        dict(subnet=SUBNET, space=SPACE, mutate_prob=0.5, depth_prob=0.5, rng=random.Random(0)),
        dict(
            subnet=autoformer.Subnet(32, (2, 2), (1, 1)),
            space=autoformer.Space((48,), (3,), (3,), (3,)),
            mutate_prob=0.0,
            depth_prob=1.0,
            rng=random.Random(5),
        ),
    ),
    "autoformer.sample_subnet": Row(
        dict(space=SPACE, seed=0), dict(space=autoformer.Space((64,), (1,), (1,), (1,)), seed=1)
    ),
    "autoformer._relative_index": Row(
        dict(grid_size=(2, 3)), dict(grid_size=(3, 2), max_distance=1, device="meta")
    ),
    "panoptic.dice_loss": Row(
        dict(logits=LOGITS, targets=(LOGITS > 0).float()),
        dict(logits=2 * LOGITS, targets=(LOGITS < 0).float()),
    ),
    "panoptic.focal_loss": Row(
        dict(logits=LOGITS, targets=(LOGITS > 0).float()),
        dict(logits=2 * LOGITS, targets=(LOGITS < 0).float(), alpha=0.5, gamma=1.0),
    ),
    "panoptic.confident_queries": Row(
        dict(logits=5 * LOGITS), dict(logits=LOGITS, threshold=0.1)
    ),
    "train.learning_rate, 2": Row(
        dict(step=3, steps=10, warmup=0, schedule="inverse_sqrt"), dict(schedule="constant")
    ),
    "cost.Roofline": Row(
        dict(peak_flops=1e9, bandwidth=1e9),
        dict(peak_flops=1e8, bandwidth=1e8, overhead=1.0),
        lambda machine: cost.diagnose(machine, 1e6, 1e6),
    ),
    "cost.diagnose": Row(
        dict(machine=cost.Roofline(1e9, 1e9, 1e-3), flops=1e6, bytes=1e6),
        dict(machine=cost.Roofline(1e8, 1e9, 1e-3), flops=1e7, bytes=1e7, operators=9),
    ),
}


# --- training, detection and translation ------------------------------------------------------


def regressor(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, 4))


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(), y.numel()


ROWS = (numbers(8, 4), 9 * numbers(8, 4).roll(1, 1))


@cache
def words():
    """A tokenizer of number names, two models that do not know them, and a table."""
    tokenizer = translation.number_tokenizer(range(100), 150)
    models = []
    for norm_first in (False, True):
        torch.manual_seed(0)
        sizes = dict(dropout=0.0, max_length=128, norm_first=norm_first)
        model = transformer.Transformer(150, None, 16, 2, 1, 1, 24, **sizes)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.7)
            model.decoder.layers[0].multihead_attn.out_proj.weight.mul_(30)
        models.append(model.eval())
    return tokenizer, models, translation.number_table(tokenizer, range(50))


def found(**options):
    """Logits and boxes as a detector gives them."""
    shape = dict(logits=numbers(1, 4, 6), boxes=numbers(1, 4, 4).sigmoid(), aux_outputs=[])
    return detr.Output(**shape | options)


SURE = 9 * torch.eye(4)[[0, 0, 1, 1]]
TARGETS = [dict(labels=torch.tensor([1, 2]), boxes=BOXES)]
OTHER_TARGETS = [dict(labels=torch.tensor([3, 2]), boxes=OTHER_BOXES)]
SEGMENTS = [
    (
        torch.tensor([[1, 1, 2], [1, 2, 2]]),
        [dict(id=1, category_id=0), dict(id=2, category_id=1)],
    )
]
OTHER_SEGMENTS = [(torch.tensor([[1, 1, 1], [1, 2, 2]]), SEGMENTS[0][1])]
FUNCTIONS |= {
    "train.fit": Row(
        dict(
            model=regressor(),
            train=ROWS,
            valid=ROWS,
            loss_fn=squares,
            epochs=3,
            batch_size=4,
            log_every=2,
            lr=0.1,
        ),
        dict(
            model=regressor(5),
            train=tuple(x + 1 for x in ROWS),
            valid=tuple(x + 1 for x in ROWS),
            loss_fn=lambda model, batch: (squares(model, batch)[0], 7),
            epochs=4,
            steps=Fails(8, "steps"),
            batch_size=5,
            num_workers=Fails(-1, "num_workers"),
            ema=0.5,
            patience=Fails(0, "patience"),
            callback=lambda model, record: record["step"] == 4,
            lr=0.2,
            warmup=2,
            schedule="constant",
            betas=(0.5, 0.98),
            weight_decay=0.9,
            max_grad_norm=1e-9,
            evaluate=lambda model: dict(answer=42),
            log_every=3,
            stop_after=4,
            seed=1,
            lr_scale={"0.weight": 0.1},
            parallel=Fails("zero", "parallel"),
        ),
    ),
    "train.CrossEntropy": Row(
        dict(),
        dict(label_smoothing=0.3, augment=torch.neg),
        lambda loss: loss(torch.nn.Identity(), (numbers(4, 5), torch.arange(4))),
    ),
    "train.adamw": Row(
        dict(model=regressor(), lr=0.1, betas=(0.9, 0.99), weight_decay=0.1),
        dict(
            model=regressor(5),
            lr=0.2,
            betas=(0.5, 0.99),
            weight_decay=0.2,
            lr_scale={"0.weight": 0.1},
        ),
        lambda optimizer: [
            optimizer.state_dict()["param_groups"],
            [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]],
        ],
    ),
    "train._without_decay": Row(
        dict(model=regressor()),
        dict(model=models.create_model("vit_tiny_patch16_224", depth=1)),
        sorted,
    ),
    "detr.HungarianMatcher": Row(
        dict(),
        dict(cost_class=50, cost_box=0, cost_giou=-9),
        lambda matcher: matcher(numbers(1, 40, 6), numbers(1, 40, 4).sigmoid(), TARGETS),
    ),
    "detr.SetCriterion": Row(
        dict(num_classes=5),
        dict(
            num_classes=Fails(6, "logits"),
            weights={"class": 2, "box": 5, "giou": 2},
            no_object=0.5,
            matcher=detr.HungarianMatcher(0, 0, -9),
        ),
        lambda loss: loss(found(), TARGETS),
    ),
    "detr.postprocess": Row(
        dict(output=found(), sizes=torch.tensor([[20, 30]])),
        dict(output=found(logits=numbers(1, 4, 6, seed=1)), sizes=torch.tensor([[30, 20]])),
    ),
    "panoptic.panoptic_postprocess": Row(
        dict(logits=SURE, masks=5 * numbers(4, 8, 8), things=[0]),
        dict(
            logits=SURE.flip(0),
            masks=5 * numbers(4, 8, 8, seed=1),
            things=[0, 1, 2],
            size=(16, 16),
            threshold=0.9999,
            smallest=30,
            mask=torch.ones(16, 12, dtype=torch.bool),
        ),
    ),
    "panoptic.panoptic_quality": Row(
        dict(predictions=SEGMENTS, truths=SEGMENTS),
        dict(predictions=OTHER_SEGMENTS, truths=OTHER_SEGMENTS, things=[0]),
    ),
    "panoptic.mask_loss": Row(
        dict(
            masks=numbers(1, 4, 4, 4),
            targets=[dict(labels=torch.tensor([1, 2]), masks=(numbers(2, 8, 8) > 0).float())],
        )
        | dict(matched=[(torch.tensor([0, 1]), torch.tensor([1, 0]))]),
        dict(masks=numbers(1, 4, 4, 4, seed=1))
        | dict(
            targets=[dict(labels=torch.tensor([1, 2]), masks=(numbers(2, 8, 8) < 0).float())]
        )
        | dict(matched=[(torch.tensor([2, 1]), torch.tensor([1, 0]))], num_boxes=7.0),
    ),
    "translation.direction_batches": Row(
        dict(tokenizer=words()[0], table=words()[2], directions=[("en", "de"), ("de", "en")])
        | dict(batch_size=4),
        dict(
            table=words()[2].flip(1),
            directions=[("en", "nl")],
            batch_size=3,
            seed=1,
            shared=False,
            tag_on="target",
        ),
        called(1),
    ),
    "translation.translate_numbers": Row(
        dict(
            model=words()[1][0],
            tokenizer=words()[0],
            texts=["one", "two", "five", "nine", "seven"],
            language="de",
        ),
        dict(
            model=words()[1][1],
            texts=["three", "four", "six"],
            language="nl",
            max_length=3,
            tag_on="target",
        ),
    ),
    "translation.translate": Row(
        dict(
            model=words()[1][0],
            tokenizer=words()[0],
            texts=["one", "two", "five", "nine", "seven"],
            max_length=8,
        ),
        dict(
            model=words()[1][1],
            texts=["three", "four", "six"],
            language="de",
            beam_size=1,
            length_penalty=Fails("1", "length_penalty", TypeError),
            max_length=4,
            batch_size=Fails(0, "batch_size"),
        ),
    ),
    "translation.number_table": Row(
        dict(tokenizer=words()[0], numbers=[1, 2]), dict(numbers=[3], languages=("en", "de"))
    ),
    "translation.tag": Row(dict(language="de"), dict(language="en")),
    "data.encode": Row(
        dict(tokenizer=words()[0], texts=["one", "two", "five", "nine", "seven"]),
        dict(texts=["six"]),
    ),
    "autoformer.evolutionary_search": Row(
        dict(score=lambda subnet: sum(subnet.num_heads), supernet=small_supernet())
        | dict(population=6, generations=2, parents=3, crossovers=2, mutations=2),
        dict(
            score=lambda subnet: -subnet.embed_dim,
            supernet=autoformer.SuperTransformer(SPACE, 8, 4, 1, 5, 8),
            population=8,
            generations=1,
            parents=2,
            crossovers=3,
            mutations=3,
            mutate_prob=0.9,
            depth_prob=0.9,
            seed=1,
            max_params=20_000,
        ),
        lambda pair: [[vars(one), score] for one, score in pair[1]],
    ),
    "autoformer.SuperTransformer": Row(
        dict(space=SPACE, img_size=8, patch_size=4, num_classes=5, head_dim=8, in_chans=1),
        dict(
            space=autoformer.Space((16, 32), (1, 2), (1, 2), (1, 2)),
            img_size=16,
            patch_size=2,
            num_classes=6,
            head_dim=4,
            in_chans=3,
            embed_dim=64,
        ),
        state,
    ),
    "finetune.layer_scales": Row(
        dict(model=models.create_model("vit_tiny_patch16_224", depth=2)),
        dict(model=models.create_model("vit_tiny_patch16_224", depth=3), decay=0.5),
    ),
    "finetune.normalize_for": Row(
        dict(images=image(16).sigmoid(), name="vit_tiny_patch16_224", img_size=32),
        dict(
            images=image(16).sigmoid() ** 2,
            name="deit_tiny_patch16_224",
            img_size=48,
        ),
    ),
    "models.classify": Row(
        dict(model=models.create_model("vit_tiny_patch16_224", depth=1).eval())
        | dict(picture=np.full((40, 40, 3), 9, np.uint8)),
        dict(
            model=models.create_model("vit_tiny_patch16_224", depth=2).eval(),
            picture=np.full((40, 40, 3), 200, np.uint8),
            k=3,
            names=[str(number) for number in range(1000)],
        ),
    ),
}

SAME = "the result is the same in less memory or time"
SPARED = {  # arguments without another value here, and why
    "data.small_images": dict(folder="of files that are downloaded"),
    "decoding.beam_search": dict(use_cache=SAME),
    "decoding.greedy": dict(use_cache=SAME),
    "decoding.sample": dict(use_cache=SAME),
    "detr.DETR": dict.fromkeys(("dilation", "in_chans"), "of a ResNet, which has a row"),
    "flash.tiled_attention": dict.fromkeys(("block_rows", "block_cols"), SAME),
    "flash.packed_ranges": dict(device="values are read, so it cannot be the device meta"),
    "models.create_model": dict(pretrained="downloads"),
    "data.encode": dict(tokenizer="has a test", prefix="has a test"),
    "train.fit": {
        **dict.fromkeys(("checkpoint", "accelerator"), "tests/test_train.py"),
        "verbose": "prints: tests/test_way_in_second.py",
    },
    "translation.direction_batches": dict(tokenizer="all have the same tags"),
    "translation.number_table": dict(tokenizer="another one has other tokens"),
    "translation.translate": dict(tokenizer="another one has other tokens"),
    "translation.translate_numbers": dict(tokenizer="another one has other tokens"),
    "swin.padded_size": dict(name="stands in the error"),
    "swinv2._sequential_attention": dict(windows_at_once=SAME),
}
NOT_YET = set(  # functions whose arguments have no other values here yet
    """
    backbone.is_plain
    models.check_loadable
    backbone.is_unchanged
    cost.Diagnosis
    cost.Operator
    cost.Precision
    cost.PrecisionChoice
    cost.Probe
    cost.Saved
    cost.TrainingMemory
    data.cifar
    data.multi30k
    data.shakespeare
    detr.BoxQueryOutput
    detr.Features
    detr.Output
    flash.compile_for
    flash.compile_kernel
    flash.launch
    flash.product_precision
    flash.refusal
    flash.refuse_derivative
    flash.triton_mode
    inference.FastResNet
    inference.fuse
    inference.packing_pays
    models.fetch_weights
    panoptic.PanopticOutput
    plot.show
    recipes.SmallRun
    scaling.copy_to_group
    scaling.ring_all_reduce
    scaling.ring_attention
    scaling.shard_module
    scaling.sum_gradient
    scaling.tensor_parallel
    spatial.AttentionOutput
    spatial.CaptionerOutput
    spatial.DrawOutput
    spatial.Window
    swin.WindowLayout
    train.load_checkpoint
    train.print_speed
    train.save_checkpoint
    train.shard_blocks
    train.shuffled_batches
    transformer.tie
    translation.from_marian
    translation.load_marian
    windows.compile_for
    """.split()
)
