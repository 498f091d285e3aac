"""Attention and the transformers built on it: the library of the book."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

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
from .compare import assert_equal, compare, reference  # `compare` is the function, too
from .deit import DistilledVisionTransformer
from .detr import DETR
from .gpt import GPT, GPTConfig
from .mae import MaskedAutoencoder
from .models import (
    classify,
    create_model,
    list_models,
    load_model,
    load_pretrained,
    preprocess,
    save_model,
)
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

if TYPE_CHECKING:
    from .data import image_folder as image_folder
    from .train import fit as fit

# what needs further packages is imported when it is asked for
_LATER = {"fit": "train", "image_folder": "data"}


def __getattr__(name: str) -> Any:
    """A function that needs further packages, or a module of the library."""
    if name in _LATER:
        return getattr(import_module(f"attnlib.{_LATER[name]}"), name)
    if not name.startswith("_") and find_spec(f"attnlib.{name}") is not None:
        return import_module(f"attnlib.{name}")
    raise AttributeError(f"module 'attnlib' has no attribute {name!r}")


def __dir__() -> list[str]:
    """All names, also of what is imported when it is asked for, if it can be."""
    return sorted({*globals(), *__all__})


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
    "assert_equal",
    "attention",
    "attention_backend",
    "attention_weights",
    "causal_mask",
    "classify",
    "compare",
    "create_model",
    "image_folder",
    "list_models",
    "load_model",
    "load_pretrained",
    "padding_mask",
    "preprocess",
    "record_attention",
    "reference",
    "register_backend",
    "save_model",
    "sincos_2d",
    "sinusoidal_encoding",
    "use_rotary",
]
# where these are missing, `import *` and `help` must not fail
if all(find_spec(package) is not None for package in ("accelerate", "safetensors", "tqdm")):
    __all__.append("fit")
