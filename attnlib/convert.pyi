# Made by `python -m tools.stubs` from convert.py: do not edit.
import torch
from collections.abc import Sequence
from typing import Any
__all__ = ['BLOCK', 'VIT', 'MAE', 'SWIN', 'SWINV2', 'BEIT', 'TNT', 'DETR', 'DETR_PANOPTIC', 'AUTOFORMER', 'MARIAN', 'GPT2', 'LLAMA', 'FUSED', 'rename_keys', 'fuse_qkv', 'convert_state_dict']
def rename_keys(state_dict: dict[str, torch.Tensor], table: Sequence[tuple[Any, Any]]) -> dict[str, torch.Tensor]: ...
def fuse_qkv(state_dict: dict[str, torch.Tensor], pattern: str = ..., fused: str = ..., parts: Sequence[str] = ...) -> dict[str, torch.Tensor]: ...
BLOCK: tuple[Any, ...]
VIT: tuple[Any, ...]
MAE: tuple[Any, ...]
SWIN: tuple[Any, ...]
SWINV2: tuple[Any, ...]
BEIT: tuple[Any, ...]
TNT: tuple[Any, ...]
DETR: tuple[Any, ...]
DETR_PANOPTIC: tuple[Any, ...]
AUTOFORMER: tuple[Any, ...]
MARIAN: tuple[Any, ...]
GPT2: tuple[Any, ...]
LLAMA: tuple[Any, ...]
FUSED: dict[Any, Any]
def convert_state_dict(state_dict: dict[str, torch.Tensor], family: Any) -> dict[str, torch.Tensor]: ...
