# Made by `python -m tools.stubs` from multihead.py: do not edit.
import torch
import torch.nn as nn
from typing import Any, Literal
__all__ = ['split_heads', 'merge_heads', 'check_heads', 'MultiHeadAttention']
def split_heads(x: torch.Tensor, num_heads: int) -> Any: ...
def merge_heads(x: torch.Tensor) -> Any: ...
def check_heads(num_heads: int, **widths: Any) -> None: ...
class MultiHeadAttention(nn.Module):
    embed_dim: int
    num_heads: int
    dropout: float
    kdim: int | None
    vdim: int | None
    fused: Any
    in_proj_bias: Any
    out_proj: torch.nn.Linear
    in_proj_weight: torch.nn.Parameter
    q_proj_weight: torch.nn.Parameter
    k_proj_weight: torch.nn.Parameter
    v_proj_weight: torch.nn.Parameter
    def __init__(self, embed_dim: int, num_heads: int, *, kdim: int | None = ..., vdim: int | None = ..., bias: bool = ..., dropout: float = ...) -> None: ...
    def project(self, *inputs: Any) -> Any: ...
    def forward(self, query: torch.Tensor, key: torch.Tensor | None = ..., value: torch.Tensor | None = ..., *, mask: torch.Tensor | Literal["causal"] | None = ..., bias: torch.Tensor | None = ...) -> Any: ...
    def attention_maps(self, query: torch.Tensor, key: Any = ..., *, mask: torch.Tensor | Literal["causal"] | None = ..., bias: bool | None = ...) -> Any: ...
