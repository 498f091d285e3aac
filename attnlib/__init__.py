"""Attention and the transformers built on it: the library of the book."""

__version__ = "0.3.0"

from .attention import (
    AdditiveAttention,
    attention,  # in this package the name of the function, no longer of its module
    attention_backend,
    attention_weights,
    causal_mask,
    padding_mask,
    record_attention,
    register_backend,
)
from .autoformer import AutoFormer, SuperTransformer
from .beit import Beit, BeitForMaskedImageModeling
from .deit import DistilledVisionTransformer
from .detr import DETR
from .gpt import GPT, GPTConfig
from .mae import MaskedAutoencoder
from .models import create_model, list_models, load_pretrained
from .multihead import MultiHeadAttention
from .panoptic import PanopticDETR
from .position import (
    LearnedPositionalEmbedding,
    RelativePositionBias,
    alibi_bias,
    apply_rotary,
    sincos_2d,
    sinusoidal_encoding,
)
from .seq2seq import Seq2Seq
from .swin import SwinTransformer
from .swinv2 import SwinTransformerV2
from .tnt import TNT
from .transformer import Transformer
from .vit import VisionTransformer
from .vit_variants import SwiGLU, apply_rotary_2d, use_rotary

__all__ = [
    "AdditiveAttention",
    "AutoFormer",
    "Beit",
    "BeitForMaskedImageModeling",
    "DETR",
    "DistilledVisionTransformer",
    "GPT",
    "GPTConfig",
    "LearnedPositionalEmbedding",
    "MaskedAutoencoder",
    "MultiHeadAttention",
    "PanopticDETR",
    "RelativePositionBias",
    "Seq2Seq",
    "SuperTransformer",
    "SwiGLU",
    "SwinTransformer",
    "SwinTransformerV2",
    "TNT",
    "Transformer",
    "VisionTransformer",
    "alibi_bias",
    "apply_rotary",
    "apply_rotary_2d",
    "attention",
    "attention_backend",
    "attention_weights",
    "causal_mask",
    "create_model",
    "list_models",
    "load_pretrained",
    "padding_mask",
    "record_attention",
    "register_backend",
    "sincos_2d",
    "sinusoidal_encoding",
    "use_rotary",
]
