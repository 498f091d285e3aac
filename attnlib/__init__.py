"""Attention and the transformers built on it: the library of the book."""

__version__ = "0.1.0"

from .attention import AdditiveAttention, attention_backend, attention_weights, causal_mask, padding_mask

__all__ = ["AdditiveAttention", "attention_backend", "attention_weights", "causal_mask", "padding_mask"]
