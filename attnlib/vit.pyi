# Made by `python -m tools.stubs` from vit.py: do not edit.
import torch
import torch.nn as nn
from attnlib.backbone import Backbone, DropPath
from collections.abc import Callable, Sequence
from typing import Any, Literal
__all__ = ['SIZES', 'PatchEmbed', 'check_divides', 'check_images', 'Mlp', 'LayerNorm', 'Attention', 'LayerScale', 'learned_tokens', 'Block', 'VisionTransformer', 'attention_distance', 'attention_rollout']
class PatchEmbed(nn.Module):
    patch_size: Any
    in_chans: int
    flatten: bool
    strict_img_size: bool
    proj: torch.nn.Conv2d
    norm: Any
    def __init__(self, img_size: int | tuple[int, int] = ..., patch_size: int | tuple[int, int] = ..., in_chans: int = ..., embed_dim: int = ..., *, norm_layer: Callable[..., Any] | None = ..., flatten: bool = ..., strict_img_size: bool = ..., device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> None: ...
    def set_input_size(self, img_size: int | tuple[int, int]) -> None: ...
    def forward(self, x: torch.Tensor) -> Any: ...
def check_divides(patch_size: tuple[int, int], img_size: tuple[int, int]) -> None: ...
def check_images(x: torch.Tensor, in_chans: int, img_size: tuple[int, int] | None = ...) -> None: ...
class Mlp(nn.Module):
    fc1: torch.nn.Linear
    act: Any
    fc2: torch.nn.Linear
    drop: torch.nn.Dropout
    def __init__(self, in_features: int, hidden_features: int | None = ..., out_features: int | None = ..., drop: float = ..., act_layer: Callable[..., Any] = ..., device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> None: ...
    def forward(self, x: torch.Tensor) -> Any: ...
def LayerNorm(dim: int, device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> torch.nn.LayerNorm: ...
class Attention(nn.Module):
    num_heads: int
    attn_drop: float
    qkv: torch.nn.Linear
    q_norm: Any
    k_norm: Any
    proj: torch.nn.Linear
    proj_drop: torch.nn.Dropout
    def __init__(self, dim: int, num_heads: int = ..., qkv_bias: bool = ..., attn_drop: float = ..., proj_drop: float = ..., qk_norm: bool = ..., norm_layer: Callable[..., Any] = ..., device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> None: ...
    def forward(self, x: torch.Tensor) -> Any: ...
class LayerScale(nn.Module):
    gamma: torch.nn.Parameter
    def __init__(self, dim: int, init_values: float, device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> None: ...
    def forward(self, x: torch.Tensor) -> Any: ...
def learned_tokens(count: int, dim: int, device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> torch.nn.Parameter | None: ...
class Block(nn.Module):
    norm1: Any
    attn: Attention
    ls1: Any
    norm2: Any
    mlp: Any
    ls2: Any
    drop_path: DropPath
    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = ..., qkv_bias: bool = ..., proj_drop: float = ..., attn_drop: float = ..., drop_path: float = ..., qk_norm: bool = ..., init_values: float | None = ..., norm_layer: Callable[..., Any] = ..., mlp_layer: Callable[..., Any] = ..., device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> None: ...
    def forward(self, x: torch.Tensor) -> Any: ...
class VisionTransformer(Backbone):
    family: str
    num_classes: int
    patch_size: Any
    embed_dim: int
    num_features: int
    num_prefix_tokens: Any
    num_bare_tokens: Any
    pools: Any
    patch_embed: PatchEmbed
    cls_token: Any
    reg_token: Any
    pos_embed: torch.nn.Parameter
    pos_drop: torch.nn.Dropout
    head_drop: torch.nn.Dropout
    norm_pre: Any
    blocks: torch.nn.Sequential
    norm: Any
    fc_norm: Any
    head: Any
    def __init__(self, img_size: int | tuple[int, int] = ..., patch_size: int | tuple[int, int] = ..., in_chans: int = ..., num_classes: int = ..., global_pool: Literal['token', 'avg', ''] = ..., embed_dim: int = ..., depth: int = ..., num_heads: int = ..., mlp_ratio: float = ..., qkv_bias: bool = ..., *, class_token: bool = ..., drop_rate: float = ..., pos_drop_rate: float = ..., proj_drop_rate: float = ..., attn_drop_rate: float = ..., drop_path_rate: float = ..., dynamic_img_size: bool = ..., reg_tokens: int = ..., no_embed_class: bool = ..., pre_norm: bool = ..., norm_layer: Callable[..., Any] = ..., device: torch.device | str | None = ..., dtype: torch.dtype | None = ..., **block: Any) -> None: ...
    def prefix_tokens(self) -> list[Any]: ...
    def embed(self, x: torch.Tensor) -> Any: ...
    def forward_features(self, x: torch.Tensor) -> Any: ...
    def forward_head(self, x: torch.Tensor, pre_logits: bool = ...) -> Any: ...
    def set_input_size(self, img_size: int | tuple[int, int]) -> None: ...
    def resample_state_dict(self, state_dict: dict[str, torch.Tensor]) -> Any: ...
SIZES: dict[Any, Any]
def attention_distance(weights: torch.Tensor, grid_size: int | tuple[int, int], patch_size: int | tuple[int, int] = ..., num_prefix_tokens: int = ...) -> torch.Tensor: ...
def attention_rollout(maps: Sequence[torch.Tensor]) -> torch.Tensor: ...
