"""Attention and the transformers built on it: the library of the book."""

__version__ = "0.1.0"

from .attention import AdditiveAttention, attention_backend, attention_weights, causal_mask, padding_mask
from .multihead import MultiHeadAttention
from .position import (
    LearnedPositionalEmbedding,
    RelativePositionBias,
    alibi_bias,
    apply_rotary,
    sincos_2d,
    sinusoidal_encoding,
)
from .seq2seq import Seq2Seq
from .transformer import Transformer

__all__ = [
    "AdditiveAttention",
    "LearnedPositionalEmbedding",
    "MultiHeadAttention",
    "RelativePositionBias",
    "Seq2Seq",
    "Transformer",
    "alibi_bias",
    "apply_rotary",
    "attention_backend",
    "attention_weights",
    "causal_mask",
    "padding_mask",
    "sincos_2d",
    "sinusoidal_encoding",
]
