# Made by `python -m tools.stubs` from plot.py: do not edit.
import torch
from collections.abc import Sequence
from typing import Any
__all__ = ['BLUE', 'ORANGE', 'GREEN', 'RED', 'PURPLE', 'SKY', 'BLACK', 'STYLE', 'set_style', 'show', 'plot_attention', 'plot_history']
BLUE: str
ORANGE: str
GREEN: str
RED: str
PURPLE: str
SKY: str
BLACK: str
STYLE: dict[Any, Any]
def set_style() -> None: ...
def show(figure: Any, alt: str, caption: str | None = ...) -> None: ...
def plot_attention(weights: torch.Tensor, queries: Any = ..., keys: Any = ..., *, titles: Sequence[str] | None = ..., vmax: float | None = ..., values: bool | None = ...) -> Any: ...
def plot_history(history: list[dict[Any, Any]] | dict[Any, Any], *, x: str = ..., log: str | Sequence[str] = ...) -> Any: ...
