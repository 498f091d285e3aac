# Made by `python -m tools.stubs` from tnt.py: do not edit.
import torch
import torch.nn as nn
from attnlib.backbone import Backbone, DropPath
from .vit import Mlp, PatchEmbed
from typing import Any, Literal
__all__ = ['SIZES', 'patchify', 'unpatchify', 'PixelEmbed', 'SplitAttention', 'Block', 'TNT']
def patchify(x: torch.Tensor, size: tuple[int, int]) -> Any: ...
def unpatchify(x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor: ...
class PixelEmbed(PatchEmbed):
    legacy: bool
    word_grid: tuple[Any, ...]
    proj: torch.nn.Conv2d
    def __init__(self, img_size: int | tuple[int, int] = ..., patch_size: int | tuple[int, int] = ..., in_chans: int = ..., in_dim: int = ..., stride: int = ..., legacy: bool = ..., *, device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> None: ...
    def forward(self, x: torch.Tensor, pixel_pos: torch.Tensor) -> Any: ...
    def word_map(self, words: torch.Tensor) -> Any: ...
class SplitAttention(nn.Module):
    num_heads: int
    attn_drop: float
    qk: torch.nn.Linear
    v: torch.nn.Linear
    proj: torch.nn.Linear
    proj_drop: torch.nn.Dropout
    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = ..., attn_drop: float = ..., proj_drop: float = ..., device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> None: ...
    def forward(self, x: torch.Tensor) -> Any: ...
class Block(nn.Module):
    legacy: bool
    norm_in: torch.nn.LayerNorm
    attn_in: SplitAttention
    norm_mlp_in: torch.nn.LayerNorm
    mlp_in: Mlp
    norm_out: torch.nn.LayerNorm
    attn_out: SplitAttention
    drop_path: DropPath
    norm_mlp: torch.nn.LayerNorm
    mlp: Mlp
    norm1_proj: torch.nn.LayerNorm
    proj: torch.nn.Linear
    norm2_proj: Any
    def __init__(self, dim: int, dim_out: int, num_pixel: int, num_heads_in: int = ..., num_heads_out: int = ..., mlp_ratio: float = ..., qkv_bias: bool = ..., proj_drop: float = ..., attn_drop: float = ..., drop_path: float = ..., legacy: bool = ..., device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> None: ...
    def inner(self, words: torch.Tensor) -> Any: ...
    def add_words(self, words: torch.Tensor, sentences: torch.Tensor) -> Any: ...
    def outer(self, sentences: torch.Tensor) -> Any: ...
    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]: ...
class TNT(Backbone):
    family: str
    num_prefix_tokens: int
    num_classes: int
    patch_size: Any
    inner_dim: int
    embed_dim: int
    num_features: int
    pixel_embed: PixelEmbed
    norm1_proj: torch.nn.LayerNorm
    proj: torch.nn.Linear
    norm2_proj: torch.nn.LayerNorm
    cls_token: torch.nn.Parameter
    patch_pos: torch.nn.Parameter
    pixel_pos: torch.nn.Parameter
    pos_drop: torch.nn.Dropout
    blocks: torch.nn.Sequential
    norm: torch.nn.LayerNorm
    head_drop: torch.nn.Dropout
    head: Any
    def __init__(self, img_size: int | tuple[int, int] = ..., patch_size: int | tuple[int, int] = ..., in_chans: int = ..., num_classes: int = ..., global_pool: Literal['token', 'avg', ''] = ..., embed_dim: int = ..., inner_dim: int = ..., depth: int = ..., num_heads_inner: int = ..., num_heads_outer: int = ..., mlp_ratio: float = ..., qkv_bias: bool = ..., *, drop_rate: float = ..., pos_drop_rate: float = ..., proj_drop_rate: float = ..., attn_drop_rate: float = ..., drop_path_rate: float = ..., first_stride: int = ..., legacy: bool = ..., device: torch.device | str | None = ..., dtype: torch.dtype | None = ...) -> None: ...
    def embed(self, x: torch.Tensor) -> tuple[Any, ...]: ...
    def forward_features(self, x: torch.Tensor) -> Any: ...
    def forward_head(self, x: torch.Tensor, pre_logits: bool = ...) -> Any: ...
    def forward(self, x: torch.Tensor) -> Any: ...
    def attention_maps(self, x: torch.Tensor, level: Literal['sentence', 'word'] = ...) -> list[torch.Tensor]: ...
    def set_input_size(self, img_size: int | tuple[int, int]) -> None: ...
    def resample_state_dict(self, state_dict: dict[str, torch.Tensor], img_size: int | tuple[int, int] | None = ...) -> Any: ...
SIZES: dict[Any, Any]
