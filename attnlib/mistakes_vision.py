"""Reference models of images in small steps, and mistakes that are made in them."""

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from . import deit as deit_library
from . import detr, mae
from . import tnt as tnt_library
from .attention import attention
from .backbone import to_2tuple
from .deit import DistilledVisionTransformer
from .mistakes import (
    REFERENCES_OF, AttentionSteps, BlockSteps, NormSteps, Probe, Reference, Steps, drawn,
    mistake, no_roles, reference_of,
)
from .swin import PatchMerging, SwinBlock, SwinTransformer, WindowAttention
from .swinv2 import PatchMergingV2, SwinBlockV2, SwinTransformerV2, WindowAttentionV2
from .vit import Block, Mlp, PatchEmbed, VisionTransformer

# %% roles
def split_projection(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The roles in a packed projection called "…qkv.weight" or "…qk.weight"."""
    prefix, _, rest = name.rpartition("qk")
    letters = "qk"
    kind = rest.removeprefix(".")
    if rest.startswith("v."):
        letters = "qkv"
        kind = rest.removeprefix("v.")
    found = {}
    for letter, part in zip(letters, tensor.chunk(len(letters))):
        found[f"{prefix}{letter}.{kind}"] = part
    return found


def layer_roles(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Roles of the parameters of an attention layer, a block, or a stack of them.

    Parameters
    ----------
    tensors : dict of str to Tensor
        By the library's names.
    names : dict of str to str
        Parts of these names, and what to put in their place.
    """
    found = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if name.endswith(("qkv.weight", "qkv.bias", "qk.weight", "qk.bias")):
            found.update(split_projection(name, tensor))
        else:
            found[name] = tensor
    return found


def vit_roles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Roles of the parameters of a Vision Transformer or of its parts."""
    names = {"patch_embed.proj": "patch", "attn.proj": "attn.o", "fc_norm": "norm",
             "ls1.gamma": "ls1", "ls2.gamma": "ls2", "norm_pre": "pre_norm",
             "head_dist": "dist_head"}
    found = {}
    for name, tensor in layer_roles(tensors, names).items():
        if name in ("cls_token", "dist_token"):
            found[name.removesuffix("_token")] = tensor[0, 0]  # (1, 1, D) -> (D,)
        elif name == "reg_token":
            found["registers"] = tensor[0]  # (1, k, D) -> (k, D)
        elif name == "pos_embed":
            found["pos"] = tensor[0]  # (1, N, D) -> (N, D)
        else:
            found[name] = tensor
    return found


def swin_roles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Roles of the parameters of a Swin Transformer of either version, or of its parts."""
    names = {"patch_embed.proj": "patch", "patch_embed.norm": "patch_norm",
             "attn.proj": "attn.o", "layers.": "stages.", "downsample.": "merge.",
             "relative_position_bias_table": "table", "q_bias": "q.bias", "v_bias": "v.bias",
             "cpb_mlp.0": "cpb1", "cpb_mlp.2": "cpb2", "head.fc": "head"}
    return layer_roles(tensors, names)


def window_roles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Roles of the parameters of attention in windows."""
    inside = {f"attn.{name}": tensor for name, tensor in tensors.items()}
    found = swin_roles(inside)
    return {name.removeprefix("attn."): tensor for name, tensor in found.items()}


def tnt_roles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Roles of the parameters of TNT or of its block: those of the words have "words."."""
    names = {"attn_in.proj": "words.attn.o", "attn_in": "words.attn", "norm_in": "words.norm1",
             "norm_mlp_in": "words.norm2", "mlp_in": "words.mlp", "attn_out.proj": "attn.o",
             "attn_out": "attn", "norm_out": "norm1", "norm_mlp": "norm2",
             "norm1_proj": "proj_norm1", "norm2_proj": "proj_norm2",
             "pixel_embed.proj": "patch"}
    found = {}
    for name, tensor in layer_roles(tensors, names).items():
        if name == "cls_token":
            found["cls"] = tensor[0, 0]
        elif name == "patch_pos":
            found["pos"] = tensor[0]
        elif name == "pixel_pos":
            found["word_pos"] = tensor[0]  # (1, c, h, w) -> (c, h, w)
        else:
            found[name] = tensor
    return found


# %% patches
class PatchSteps(Steps):
    """Images cut into patches, each of which is projected."""

    options = dict(patch_size=(4, 4))

    def colors(self, images: Tensor) -> Tensor:
        """The images as they are cut."""
        return images

    def cut(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, H', W', C, p, q)."""
        p, q = self.config.patch_size
        x = images.unflatten(3, (-1, q))
        x = x.unflatten(2, (-1, p))
        return x.permute(0, 2, 4, 1, 3, 5)

    def patch_vector(self, patches: Tensor) -> Tensor:
        """(..., C, p, q) -> (..., C p q), the order of a convolution's weight."""
        return patches.flatten(-3)

    def project_patches(self, patches: Tensor) -> Tensor:
        weight = self.weight("patch.weight").flatten(1)
        return F.linear(patches, weight, self.weight("patch.bias"))

    def sequence(self, x: Tensor) -> Tensor:
        """(B, H', W', D) -> (B, H' W', D), row by row."""
        return x.flatten(1, 2)

    def patch_map(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to a map of tokens (B, H', W', D)."""
        patches = self.patch_vector(self.cut(self.colors(images)))
        self.note("patches", patches)
        return self.note("projected patches", self.project_patches(patches))

    def patch_tokens(self, images: Tensor) -> Tensor:
        return self.note("patch tokens", self.sequence(self.patch_map(images)))

    def run(self, x: Tensor) -> Tensor:
        return self.patch_tokens(x)


# %% vit
class VitBlockSteps(BlockSteps):
    """A block of a Vision Transformer, possibly with layer scale and normalized queries."""

    options = {**BlockSteps.options, "eps": 1e-6, "qk_norm": False}

    def normalize_queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm("q_norm", q), self.norm("k_norm", k)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.config.qk_norm:
            q, k = self.normalize_queries_and_keys(q, k)
        return super().weigh(q, k, v, mask)

    def layer_scale(self, name: str, x: Tensor) -> Tensor:
        gamma = self.weight(name)
        return x if gamma is None else x * gamma

    def attention_branch(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.layer_scale("ls1", super().attention_branch(x, mask))

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.layer_scale("ls2", super().mlp_branch(x))


class VitSteps(PatchSteps, VitBlockSteps):
    """A Vision Transformer or DeiT: patches, learned tokens before them, positions, blocks, and
    a head."""

    options = {**VitBlockSteps.options, **PatchSteps.options, "depth": 1, "pool": "token",
               "place_prefix": True}

    def prefix(self, batch: int) -> list[Tensor]:
        """The learned tokens (B, k, D) before the patches: class, distillation, registers."""
        tokens = []
        for name in ("cls", "dist", "registers"):
            token = self.weight(name)
            if token is not None:
                token = token.reshape(1, -1, token.shape[-1])
                tokens.append(token.expand(batch, -1, -1))
        return tokens

    def prefix_length(self) -> int:
        return sum(token.shape[1] for token in self.prefix(1))

    def join_prefix(self, prefix: list[Tensor], patches: Tensor) -> Tensor:
        return torch.cat([*prefix, patches], dim=1)

    def place(self, x: Tensor, k: int) -> Tensor:
        """Add the positions to k prefix tokens and the patches."""
        pos = self.weight("pos")
        if self.config.place_prefix:
            return x + pos
        return torch.cat([x[:, :k], x[:, k:] + pos], dim=1)

    def embed_image(self, images: Tensor) -> Tensor:
        patches = self.patch_tokens(images)
        prefix = self.prefix(images.shape[0])
        x = self.note("tokens without positions", self.join_prefix(prefix, patches))
        x = self.note("tokens with positions", self.place(x, self.prefix_length()))
        if self.weight("pre_norm.weight") is not None:
            x = self.norm("pre_norm", x)
        return x

    def before_block(self, x: Tensor) -> Tensor:
        """The tokens that a block is given: here unchanged."""
        return x

    def block(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().block(self.before_block(x), mask)

    def pool(self, x: Tensor) -> Tensor:
        """Choose the head's input of the tokens (B, k + N, D)."""
        if self.config.pool == "token":
            return self.token_of_class(x)
        if self.config.pool == "avg":
            return self.mean_of_patches(x)
        return x

    def token_of_class(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def mean_of_patches(self, x: Tensor) -> Tensor:
        return x[:, self.prefix_length():].mean(1)

    def norm_and_pool(self, x: Tensor) -> Tensor:
        """The norm behind the mean, or before one token is taken."""
        if self.config.pool == "avg":
            return self.final_norm(self.pool(x))
        return self.pool(self.final_norm(x))

    def class_logits(self, x: Tensor) -> Tensor:
        if self.weight("head.weight") is None:
            return x
        return self.linear("head", x)

    def answer(self, logits: Tensor) -> Tensor:
        """Return the logits of the model: here unchanged."""
        return logits

    def read(self, x: Tensor) -> Tensor:
        """The logits of the tokens behind the last block."""
        x = self.note("what the head reads", self.norm_and_pool(x))
        return self.class_logits(x)

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(self.embed_image(x))
        return self.answer(self.note("logits of the classes", self.read(x)))


class DeitSteps(VitSteps):
    """DeiT: a class and a distillation token, each with a head; their logits are averaged."""

    def two_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the head of the classes and of the head of the distillation."""
        return x[:, 0], x[:, 1]

    def both_heads(self, x_cls: Tensor, x_dist: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear("head", x_cls), self.linear("dist_head", x_dist)

    def average_heads(self, logits: Tensor, dist_logits: Tensor) -> Tensor:
        return (logits + dist_logits) / 2

    def read(self, x: Tensor) -> Tensor:
        x_cls, x_dist = self.two_tokens(self.final_norm(x))
        logits, dist_logits = self.both_heads(x_cls, x_dist)
        self.note("logits of the class token", logits)
        self.note("logits of the distillation token", dist_logits)
        return self.average_heads(logits, dist_logits)


# %% windows
class WindowAttentionSteps(AttentionSteps):
    """Attention in windows (B nW, N, C) with a bias for each offset of two tokens."""

    options = {**AttentionSteps.options, "window_size": (7, 7)}

    def window(self) -> tuple[int, int]:
        """Rows and columns of a window, as they are now."""
        return self.config.window_size

    def offsets(self) -> tuple[Tensor, Tensor]:
        """Row of the query minus row of the key (N, N), and the same for columns."""
        height, width = self.window()
        y = torch.arange(height).repeat_interleave(width)
        x = torch.arange(width).repeat(height)
        return y[:, None] - y, x[:, None] - x

    def table_row(self, dy: Tensor, dx: Tensor) -> Tensor:
        """The row of the table that holds the bias of an offset."""
        rows, columns = self.config.window_size
        return (dy + rows - 1) * (2 * columns - 1) + dx + columns - 1

    def table(self) -> Tensor:
        """The bias of each offset and head, ((2M - 1)², h)."""
        return self.weight("table")

    def by_head(self, bias: Tensor) -> Tensor:
        """(N, N, h) -> (h, N, N)."""
        return bias.permute(2, 0, 1)

    def position_bias(self) -> Tensor:
        """(h, N, N)."""
        return self.by_head(self.table()[self.table_row(*self.offsets())])

    def add_bias(self, logits: Tensor) -> Tensor:
        bias = self.note("relative position bias", self.position_bias())
        return logits + bias

    def window_weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        logits = self.note("logits with the position bias", self.add_bias(logits))
        return self.attention_weights(logits, mask)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        logits = self.note("logits", self.logits(q, k))
        weights = self.note("attention weights", self.window_weights(logits, mask))
        weights = self.drop(weights, mask)
        return self.note("weighted values", self.average(weights, v))


class CosineWindowSteps(WindowAttentionSteps):
    """Attention in windows of Swin V2: cosines, and a bias computed from the offset."""

    options = {**WindowAttentionSteps.options, "pretrained_window": None}

    def unit(self, x: Tensor) -> Tensor:
        """Queries or keys (B, h, N, d) of length 1."""
        return F.normalize(x, dim=-1)

    def cosines(self, q: Tensor, k: Tensor) -> Tensor:
        return self.unit(q) @ self.unit(k).transpose(-2, -1)

    def temperature(self, logit_scale: Tensor) -> Tensor:
        """The factor of the cosines of each head, at most 100."""
        return logit_scale.clamp(max=math.log(100)).exp()

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        return self.cosine_logits(q, k)

    def cosine_logits(self, q: Tensor, k: Tensor) -> Tensor:
        cosines = self.note("cosines", self.cosines(q, k))
        return cosines * self.temperature(self.weight("logit_scale"))

    def relative(self, offset: Tensor, length: int) -> Tensor:
        """An offset in units of the largest one of a window."""
        return offset / max(length - 1, 1)

    def spacing(self, x: Tensor) -> Tensor:
        """Logarithmic coordinates of relative offsets."""
        return x.sign() * torch.log2(1 + 8 * x.abs()) / 3

    def coordinates(self, dy: Tensor, dx: Tensor) -> Tensor:
        """The input of the network, ((2M - 1)², 2)."""
        return torch.stack([dy, dx], dim=-1)

    def network_activation(self, x: Tensor) -> Tensor:
        return x.relu()

    def squash(self, x: Tensor) -> Tensor:
        return 16 * x.sigmoid()

    def table(self) -> Tensor:
        height, width = self.config.window_size
        trained = self.config.pretrained_window or self.config.window_size
        like = self.weight("cpb1.weight")
        y = torch.arange(1 - height, height, dtype=like.dtype)
        x = torch.arange(1 - width, width, dtype=like.dtype)
        y = self.spacing(self.relative(y, trained[0]))
        x = self.spacing(self.relative(x, trained[1]))
        dy = y.repeat_interleave(2 * width - 1)
        dx = x.repeat(2 * height - 1)
        coordinates = self.note("log-spaced coordinates", self.coordinates(dy, dx))
        hidden = self.network_activation(self.linear("cpb1", coordinates))
        return self.note("bias of all offsets", self.squash(self.linear("cpb2", hidden)))


# %% swin blocks
class SwinBlockSteps(WindowAttentionSteps, BlockSteps):
    """A block of Swin: attention in windows, shifted or not, and an MLP; maps (B, H, W, C)."""

    options = {**BlockSteps.options, **WindowAttentionSteps.options, "shift_size": (0, 0),
               "shrink": True}
    present_window: tuple[int, int] | None = None  # of the map that is attended

    def window(self) -> tuple[int, int]:
        return self.present_window or self.config.window_size

    def window_of(self, size: torch.Size) -> tuple[int, int]:
        """The window, or a smaller one where the map is smaller."""
        height, width = self.config.window_size
        if not self.config.shrink:
            return height, width
        return min(height, size[0]), min(width, size[1])

    def shift_of(self, padded: torch.Size, window: tuple[int, int]) -> tuple[int, int]:
        """The shift; none along an axis with a single window."""
        down, across = self.config.shift_size
        if padded[0] <= window[0]:
            down = 0
        if padded[1] <= window[1]:
            across = 0
        return down, across

    def missing(self, size: torch.Size, window: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that are missing for whole windows."""
        return -size[0] % window[0], -size[1] % window[1]

    def pad(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Zeros below and on the right."""
        return F.pad(x, (0, 0, 0, columns, 0, rows))

    def crop(self, x: Tensor, size: torch.Size) -> Tensor:
        return x[:, : size[0], : size[1]]

    def direction(self) -> int:
        """The sign of the roll: up and to the left."""
        return -1

    def rolled_axes(self) -> tuple[int, int]:
        return 1, 2

    def roll(self, x: Tensor, shift: tuple[int, int]) -> Tensor:
        sign = self.direction()
        return x.roll((sign * shift[0], sign * shift[1]), dims=self.rolled_axes())

    def roll_back(self, x: Tensor, shift: tuple[int, int]) -> Tensor:
        sign = -self.direction()
        return x.roll((sign * shift[0], sign * shift[1]), dims=self.rolled_axes())

    def windows_first(self, x: Tensor) -> Tensor:
        """Exchange rows inside a window with columns of windows, on the way and back."""
        return x.transpose(2, 3)

    def partition(self, x: Tensor, window: tuple[int, int]) -> Tensor:
        """(B, H, W, C) -> (B nW, N, C), windows and tokens row by row."""
        x = x.unflatten(2, (-1, window[1]))
        x = x.unflatten(1, (-1, window[0]))
        x = self.windows_first(x)  # (B, Y, y, X, x, C) -> (B, Y, X, y, x, C)
        return x.reshape(-1, window[0] * window[1], x.shape[-1])

    def put_together(self, x: Tensor, window: tuple[int, int], size: torch.Size) -> Tensor:
        """(B nW, N, C) -> (B, H, W, C)."""
        x = x.unflatten(1, window)
        x = x.unflatten(0, (-1, size[0] // window[0], size[1] // window[1]))
        x = self.windows_first(x)  # (B, Y, X, y, x, C) -> (B, Y, y, X, x, C)
        return x.reshape(-1, size[0], size[1], x.shape[-1])

    def wrapped(self, length: int, shift: int) -> Tensor:
        """True for rows that the roll has carried over the edge."""
        return torch.arange(length) >= length - shift

    def regions(self, size: torch.Size, shift: tuple[int, int]) -> Tensor:
        """A number for each place of the rolled map (H, W)."""
        rows = self.wrapped(size[0], shift[0])
        columns = self.wrapped(size[1], shift[1])
        return 2 * rows[:, None] + columns[None, :]

    def window_mask(self, size: torch.Size, window: tuple[int, int],
                    shift: tuple[int, int]) -> Tensor | None:
        """True where tokens of a window of the rolled map may attend, (nW, N, N)."""
        if not any(shift):
            return None
        regions = self.regions(size, shift)[None, :, :, None]
        regions = self.partition(regions, window)
        return regions == regions.transpose(1, 2)

    def mask_of_batch(self, mask: Tensor, windows: Tensor) -> Tensor:
        """(nW, N, N) -> (B nW, 1, N, N)."""
        return mask.repeat(len(windows) // len(mask), 1, 1)[:, None]

    def shifted_attention(self, x: Tensor) -> Tensor:
        """A map (B, H, W, C) to a map."""
        size = x.shape[1:3]
        window = self.window_of(size)
        self.present_window = window
        x = self.pad(x, *self.missing(size, window))
        padded = x.shape[1:3]
        shift = self.shift_of(padded, window)
        x = self.note("shifted map", self.roll(x, shift))
        windows = self.note("windows", self.partition(x, window))
        mask = self.window_mask(padded, window, shift)
        if mask is not None:
            mask = self.mask_of_batch(mask, windows)
        windows = self.attend(windows, windows, mask)
        x = self.put_together(windows, window, padded)
        x = self.note("map put together", self.roll_back(x, shift))
        return self.crop(x, size)

    def attention_branch(self, x: Tensor, mask: Tensor | None) -> Tensor:
        with self.inside("attn"):
            return self.shifted_attention(x)


class SwinV2BlockSteps(CosineWindowSteps, SwinBlockSteps):
    """A block of Swin V2, whose norms are at the ends of the branches."""

    options = {**SwinBlockSteps.options, **CosineWindowSteps.options}

    def norm_place(self) -> str:
        return "end of the branch"

    def sublayer(self, name: str, x: Tensor, branch: Any) -> Tensor:
        place = self.norm_place()
        if place == "start of the branch":
            normed = self.norm(name, x)
            return self.add(x, normed, branch(normed))
        if place == "behind the sum":
            return self.norm(name, self.add(x, x, branch(x)))
        return self.add(x, x, self.norm(name, branch(x)))


# %% swin
class MergingSteps(NormSteps):
    """Patch merging, with the norm first (Swin) or last (Swin V2)."""

    options = {**NormSteps.options, "merge_norm_first": True}

    def even(self, x: Tensor) -> Tensor:
        """The map with zeros below and on the right if it has an odd size."""
        return F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))

    def squares(self, x: Tensor) -> list[Tensor]:
        """The four tokens of each square: upper left, lower left, upper right, lower right."""
        return [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]

    def join_square(self, squares: list[Tensor]) -> Tensor:
        return torch.cat(squares, dim=-1)

    def merging_norm(self, x: Tensor) -> Tensor:
        return self.norm("norm", x)

    def reduce_patches(self, x: Tensor) -> Tensor:
        return self.note("reduced patches", self.linear("reduction", x))

    def merging(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H/2, W/2, 2C)."""
        x = self.note("merged patches", self.join_square(self.squares(self.even(x))))
        if self.config.merge_norm_first:
            return self.reduce_patches(self.merging_norm(x))
        return self.merging_norm(self.reduce_patches(x))

    def run(self, x: Tensor) -> Tensor:
        return self.merging(x)


class SwinSteps(PatchSteps, MergingSteps, SwinBlockSteps):
    """A Swin Transformer: stages of blocks with patch merging between them."""

    options = {**SwinBlockSteps.options, **MergingSteps.options, **PatchSteps.options,
               "depths": (2, 2), "heads": (2, 4), "windows": ((7, 7), (7, 7)),
               "pretrained": (None, None), "pool": "avg"}

    def shifts(self, number: int) -> bool:
        """Decide if a block of a stage shifts its windows."""
        return number % 2 == 1

    def shift_length(self, window: int) -> int:
        return window // 2

    def whole_patches(self, images: Tensor) -> Tensor:
        """The images with zeros below and on the right up to whole patches."""
        p, q = self.config.patch_size
        return F.pad(images, (0, -images.shape[3] % q, 0, -images.shape[2] % p))

    def patch_norm(self, x: Tensor) -> Tensor:
        return self.norm("patch_norm", x)

    def embed_map(self, images: Tensor) -> Tensor:
        return self.patch_norm(self.patch_map(self.whole_patches(images)))

    def stage(self, number: int, x: Tensor) -> Tensor:
        config = self.config
        config.depth = config.depths[number]
        config.num_heads = config.heads[number]
        config.window_size = config.windows[number]
        config.pretrained_window = config.pretrained[number]
        height, width = config.window_size
        with self.inside(f"stages.{number}"):
            if number > 0:
                with self.inside("merge"):
                    x = self.merging(x)
            for i in range(config.depth):
                config.shift_size = (0, 0)
                if self.shifts(i):
                    config.shift_size = (self.shift_length(height), self.shift_length(width))
                with self.inside(f"blocks.{self.layer_number(i)}"):
                    x = self.block(x)
        return x

    def pool_map(self, x: Tensor) -> Tensor:
        return x.mean((1, 2))

    def norm_and_pool_map(self, x: Tensor) -> Tensor:
        x = self.final_norm(x)
        if self.config.pool == "avg":
            x = self.pool_map(x)
        return x

    def answer(self, logits: Tensor) -> Tensor:
        return logits

    def run(self, x: Tensor) -> Tensor:
        x = self.note("first map", self.embed_map(x))
        for number in range(len(self.config.depths)):
            x = self.note(f"map of stage {number}", self.stage(number, x))
        x = self.note("what the head reads", self.norm_and_pool_map(x))
        if self.weight("head.weight") is not None:
            x = self.linear("head", x)
        return self.answer(self.note("logits of the classes", x))


class SwinV2Steps(SwinSteps, SwinV2BlockSteps):
    """A Swin Transformer V2."""

    options = {**SwinSteps.options, **SwinV2BlockSteps.options, "merge_norm_first": False}


# %% tnt
def words_and_sentences(words: Tensor, sentences: Tensor) -> Tensor:
    """Both results of a block in a row."""
    return torch.cat([words.flatten(), sentences.flatten()])


class TntBlockSteps(BlockSteps):
    """A block of TNT: words (B n, m, c) of each sentence, and sentences (B, 1 + n, d)."""

    options = {**BlockSteps.options, "word_heads": 1}

    def heads_of(self, among_words: bool) -> int:
        return self.config.word_heads if among_words else self.config.num_heads

    def head_count(self) -> tuple[int, int]:
        heads = self.heads_of("words." in self.scope)
        return heads, heads

    def flatten_words(self, words: Tensor) -> Tensor:
        """(B n, m, c) -> (B n, m c)."""
        return words.flatten(1)

    def norm_of_projected_words(self, x: Tensor) -> Tensor:
        return self.norm("proj_norm2", x)

    def words_as_sentences(self, words: Tensor) -> Tensor:
        """(B n, m, c) -> (B n, d)."""
        x = self.norm("proj_norm1", self.flatten_words(words))
        x = self.note("projected words", self.linear("proj", x))
        return self.norm_of_projected_words(x)

    def add_words(self, sentences: Tensor, added: Tensor) -> Tensor:
        """The words of a sentence are added to it; the class token has none."""
        return torch.cat([sentences[:, :1], sentences[:, 1:] + added], dim=1)

    def words_for_sentences(self, before: Tensor, after: Tensor) -> Tensor:
        """The words that are added, of those before and behind the inner block."""
        return after

    def words_passed_on(self, before: Tensor, after: Tensor) -> Tensor:
        """The words that the next block is given."""
        return after

    def both(self, words: Tensor, sentences: Tensor) -> tuple[Tensor, Tensor]:
        with self.inside("words"):
            after = self.block(words)
        added = self.words_as_sentences(self.words_for_sentences(words, after))
        added = added.unflatten(0, (sentences.shape[0], -1))
        sentences = self.add_words(sentences, added)
        self.note("sentences with words", sentences)
        return self.words_passed_on(words, after), self.block(sentences)

    def run(self, words: Tensor, sentences: Tensor) -> Tensor:
        return words_and_sentences(*self.both(words, sentences))


class TntSteps(PatchSteps, TntBlockSteps):
    """Transformer in Transformer."""

    options = {**TntBlockSteps.options, **PatchSteps.options, "depth": 1, "stride": 4,
               "pool": "token"}

    def words_of(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to words (B n, c, h, w): a convolution inside each patch."""
        patches = self.cut(self.colors(images)).flatten(0, 2)
        return F.conv2d(patches, self.weight("patch.weight"), self.weight("patch.bias"),
                        stride=self.config.stride, padding=3)

    def place_words(self, words: Tensor) -> Tensor:
        return words + self.weight("word_pos")

    def place(self, x: Tensor, k: int) -> Tensor:
        """Add the positions to k prefix tokens and the patches."""
        return x + self.weight("pos")

    def pool(self, x: Tensor) -> Tensor:
        if self.config.pool == "token":
            return self.token_of_class(x)
        if self.config.pool == "avg":
            return self.mean_of_patches(x)
        return x

    def prefix_length(self) -> int:
        return 1

    def token_of_class(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def mean_of_patches(self, x: Tensor) -> Tensor:
        return x[:, 1:].mean(1)

    def answer(self, logits: Tensor) -> Tensor:
        return logits

    def run(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        words = self.place_words(self.note("words", self.words_of(x)))
        words = words.flatten(2).transpose(1, 2)  # (B n, c, h, w) -> (B n, m, c)
        sentences = self.words_as_sentences(words).unflatten(0, (batch, -1))
        cls = self.weight("cls").expand(batch, 1, -1)
        sentences = self.place(torch.cat([cls, sentences], dim=1), 1)
        self.note("sentences with positions", sentences)
        for i in range(self.config.depth):
            with self.inside(f"blocks.{self.layer_number(i)}"):
                words, sentences = self.both(words, sentences)
        x = self.pool(self.final_norm(sentences))
        if self.weight("head.weight") is not None:
            x = self.linear("head", x)
        return self.answer(self.note("logits of the classes", x))


# %% masked images
class UnshuffleSteps(Steps):
    """The decoder's sequence: visible tokens in their places, and mask tokens elsewhere."""

    def fill(self, visible: Tensor, mask_token: Tensor, count: int) -> Tensor:
        """The visible tokens (B, k, D) and so many mask tokens behind them."""
        mask_tokens = mask_token.expand(visible.shape[0], count, -1)
        return torch.cat([visible, mask_tokens], dim=1)

    def restore(self, x: Tensor, order: Tensor) -> Tensor:
        """Token i of the result is token order[i] of x."""
        return x.take_along_dim(order[..., None], dim=1)

    def visible_order(self, order: Tensor, visible: int) -> Tensor:
        """The order with so many visible tokens as it is used: here unchanged."""
        return order

    def run(self, visible: Tensor, mask_token: Tensor, ids_restore: Tensor) -> Tensor:
        count = ids_restore.shape[1] - visible.shape[1]
        ids_restore = self.visible_order(ids_restore, visible.shape[1])
        x = self.note("visible tokens, then mask tokens", self.fill(visible, mask_token, count))
        return self.note("all tokens in their places", self.restore(x, ids_restore))


class PatchifySteps(Steps):
    """Images as rows of pixels, the targets of MAE."""

    options = dict(patch_size=(4, 4))

    def grid_of_pixels(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, H', W', p, q, C)."""
        p, q = self.config.patch_size
        x = images.unflatten(3, (-1, q))
        x = x.unflatten(2, (-1, p))
        return x.permute(0, 2, 4, 3, 5, 1)

    def pixel_order(self, x: Tensor) -> Tensor:
        """(B, H', W', p, q, C) -> (B, H', W', p q C)."""
        return x.flatten(3)

    def patch_order(self, x: Tensor) -> Tensor:
        """(B, H', W', P) -> (B, H' W', P)."""
        return x.flatten(1, 2)

    def patchify(self, images: Tensor) -> Tensor:
        x = self.pixel_order(self.grid_of_pixels(images))
        return self.note("pixels of the patches", self.patch_order(x))

    def run(self, images: Tensor) -> Tensor:
        return self.patchify(images)


class MaeLossSteps(PatchifySteps):
    """The loss of MAE: the mean squared error of the pixels of masked patches."""

    options = {**PatchifySteps.options, "norm_pix_loss": False}

    def pixel_spread(self, centered: Tensor) -> Tensor:
        """The standard deviation of each patch, with N - 1."""
        count = centered.shape[-1] - 1
        return (centered.square().sum(-1, keepdim=True) / count + 1e-6).sqrt()

    def normalize_pixels(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / self.pixel_spread(centered)

    def target(self, images: Tensor) -> Tensor:
        target = self.patchify(images)
        if self.config.norm_pix_loss:
            target = self.note("normalized pixels", self.normalize_pixels(target))
        return target

    def pixel_error(self, difference: Tensor) -> Tensor:
        return difference.square()

    def patch_error(self, error: Tensor) -> Tensor:
        """(B, N, P) -> (B, N)."""
        return error.mean(-1)

    def counted(self, masked: Tensor) -> Tensor:
        """The patches whose error counts."""
        return masked

    def average_error(self, error: Tensor, counted: Tensor) -> Tensor:
        return (error * counted).sum() / counted.sum()

    def run(self, prediction: Tensor, images: Tensor, masked: Tensor) -> Tensor:
        target = self.target(images)
        error = self.patch_error(self.pixel_error(prediction - target))
        self.note("error of each patch", error)
        return self.note("loss", self.average_error(error, self.counted(masked)))


# %% distillation losses
class HardDistillationSteps(Steps):
    """The loss of DeiT: cross-entropy with the labels and with the teacher's decisions."""

    def decisions(self, teacher_logits: Tensor) -> Tensor:
        """The targets of the second head."""
        return teacher_logits.argmax(-1)

    def teach(self, logits: Tensor, dist_logits: Tensor) -> tuple[Tensor, Tensor]:
        """The logits that learn from the labels, and those that learn from the teacher."""
        return logits, dist_logits

    def mix_losses(self, own: Tensor, taught: Tensor) -> Tensor:
        return (own + taught) / 2

    def run(self, logits: Tensor, dist_logits: Tensor, teacher_logits: Tensor,
            labels: Tensor) -> Tensor:
        first, second = self.teach(logits, dist_logits)
        own = self.note("loss of the labels", F.cross_entropy(first, labels))
        taught = F.cross_entropy(second, self.decisions(teacher_logits))
        return self.mix_losses(own, self.note("loss of the teacher", taught))


class SoftDistillationSteps(HardDistillationSteps):
    """The loss with the teacher's probabilities at a temperature."""

    options = dict(temperature=3.0)

    def soften(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of both at the temperature."""
        return teacher / self.config.temperature, student / self.config.temperature

    def divergence(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Of the student q from the teacher p, for each image and class."""
        return log_p.exp() * (log_p - log_q)

    def average_divergence(self, divergence: Tensor) -> Tensor:
        """Divided by images and classes, as in the authors' code."""
        return divergence.mean()

    def gradient_scale(self) -> float:
        """The factor that makes up for the temperature."""
        return self.config.temperature**2

    def run(self, logits: Tensor, dist_logits: Tensor, teacher_logits: Tensor,
            labels: Tensor) -> Tensor:
        first, second = self.teach(logits, dist_logits)
        own = self.note("loss of the labels", F.cross_entropy(first, labels))
        teacher, student = self.soften(teacher_logits, second)
        divergence = self.divergence(teacher.log_softmax(-1), student.log_softmax(-1))
        taught = self.gradient_scale() * self.average_divergence(divergence)
        return self.mix_losses(own, self.note("loss of the teacher", taught))


# %% mae decoder
class MaeDecoderSteps(UnshuffleSteps, VitBlockSteps):
    """The decoder of MAE: from the encoder's tokens to the pixels of all patches."""

    options = {**VitBlockSteps.options, "depth": 1}

    def decoder_places(self, x: Tensor) -> Tensor:
        """Add the positions to the class token and all patches."""
        return x + self.weight("pos")

    def predicted_tokens(self, x: Tensor) -> Tensor:
        """The tokens whose pixels are predicted: not the class token."""
        return x[:, 1:]

    def run(self, x: Tensor, ids_restore: Tensor) -> Tensor:
        x = self.note("tokens in the decoder's width", self.linear("embed", x))
        visible = x[:, 1:]
        count = ids_restore.shape[1] - visible.shape[1]
        ids_restore = self.visible_order(ids_restore, visible.shape[1])
        patches = self.restore(self.fill(visible, self.weight("mask"), count), ids_restore)
        x = torch.cat([x[:, :1], self.note("all tokens in their places", patches)], dim=1)
        x = self.note("tokens with positions", self.decoder_places(x))
        x = self.final_norm(self.blocks(x))
        return self.note("predicted pixels", self.linear("pred", self.predicted_tokens(x)))


# %% boxes
class CornersSteps(Steps):
    """Boxes by center and size as corners."""

    def low_and_high(self, center: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        return center - size / 2, center + size / 2

    def center_and_size(self, boxes: Tensor) -> tuple[Tensor, Tensor]:
        return boxes[..., :2], boxes[..., 2:]

    def corners(self, low: Tensor, high: Tensor) -> Tensor:
        return torch.cat([low, high], dim=-1)

    def run(self, boxes: Tensor) -> Tensor:
        low, high = self.low_and_high(*self.center_and_size(boxes))
        return self.corners(low, high)


class IouSteps(Steps):
    """Intersection over union of boxes by corners."""

    def overlap(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Upper left and lower right corner of the intersection."""
        return torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])

    def sides(self, low: Tensor, high: Tensor) -> Tensor:
        return high - low

    def overlap_area(self, sides: Tensor) -> Tensor:
        return sides.clamp(min=0).prod(-1)

    def area(self, boxes: Tensor) -> Tensor:
        return self.sides(boxes[..., :2], boxes[..., 2:]).prod(-1)

    def union(self, first: Tensor, second: Tensor, intersection: Tensor) -> Tensor:
        return first + second - intersection

    def ratio(self, part: Tensor, whole: Tensor) -> Tensor:
        return part / torch.where(whole == 0, 1, whole)

    def iou(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.overlap(a, b)
        sides = self.sides(low, high)
        intersection = self.note("intersection", self.overlap_area(sides))
        union = self.union(self.area(a), self.area(b), intersection)
        self.note("union", union)
        return self.note("IoU", self.ratio(intersection, union)), union

    def run(self, a: Tensor, b: Tensor) -> Tensor:
        return self.iou(a[:, None], b)[0]  # (N, 1, 4), (M, 4) -> (N, M)


class GiouSteps(IouSteps):
    """Generalized intersection over union, IoU - (H - U) / H with the hull H of both boxes."""

    def around(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Upper left and lower right corner of the smallest box around both."""
        return torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])

    def penalty(self, hull: Tensor, union: Tensor) -> Tensor:
        return self.ratio(hull - union, hull)

    def combine(self, iou: Tensor, penalty: Tensor) -> Tensor:
        return iou - penalty

    def run(self, a: Tensor, b: Tensor) -> Tensor:
        a = a[:, None]  # (N, 1, 4) with (M, 4) gives (N, M)
        iou, union = self.iou(a, b)
        low, high = self.around(a, b)
        hull = self.note("hull", self.sides(low, high).prod(-1))
        return self.combine(iou, self.note("penalty", self.penalty(hull, union)))


# %% references of library models
def image_probes(channels: int, size: tuple[int, int], many: bool = True) -> list[Probe]:
    """Probes of a model of images (B, C, H, W) of a size."""
    height, width = size
    probes = [Probe("two images", dict(x=drawn(2, channels, height, width, seed=1))),
              Probe("one image", dict(x=drawn(1, channels, height, width, seed=2)))]
    if many:
        turned = drawn(3, channels, width, height, seed=3).transpose(2, 3)
        probes.append(Probe("non-contiguous images", dict(x=turned)))
    return probes


def map_probes(width: int, size: tuple[int, int]) -> list[Probe]:
    """Probes of a layer of maps (B, H, W, C) of a size."""
    rows, columns = size
    turned = drawn(2, width, rows, columns, seed=3).permute(0, 2, 3, 1)
    return [Probe("three maps", dict(x=drawn(3, rows, columns, width, seed=1))),
            Probe("one map", dict(x=drawn(1, rows, columns, width, seed=2))),
            Probe("a non-contiguous map", dict(x=turned))]


def on_x(module: Any, x: Tensor) -> Tensor:
    """Call a module with its only input."""
    return module(x)


def check_plain(model: nn.Module) -> None:
    """Raise a ValueError if a model has other blocks, norms, or MLPs than the chapters'."""
    for name, module in model.named_modules():
        if name.split(".")[-1] == "mlp" and type(module) is not Mlp:
            raise ValueError(f"model has a {type(module).__name__} at {name}, for which there "
                             "are no steps: only Mlp has")
        if name.endswith(("norm", "norm1", "norm2")) and type(module) not in (
                nn.LayerNorm, nn.Identity):
            raise ValueError(f"model has a {type(module).__name__} at {name}, for which there "
                             "are no steps: only LayerNorm has")


def few_probes(model: nn.Module, size: tuple[int, int]) -> list[Probe]:
    """Probes of images for a model, fewer if they are large."""
    channels = model.patch_embed.proj.in_channels
    return image_probes(channels, size, many=size[0] * size[1] < 10_000)


def vit_reference_of(model: VisionTransformer) -> Reference:
    """Build the `Reference` of a Vision Transformer or DeiT of the library.

    Parameters
    ----------
    model : VisionTransformer
        Of any size; the reference uses it as it is, without a copy.

    Raises
    ------
    ValueError
        If it has other MLPs or norms than the chapter's.
    """
    check_plain(model)
    distilled = isinstance(model, DistilledVisionTransformer)
    first = model.blocks[0]
    grid = model.patch_embed.grid_size
    has_prefix = "a class token, " if model.cls_token is not None else "no class token, "
    if distilled:
        has_prefix = "a class token and a distillation token (in this order), "
    reads = {"token": "the class token of the normalized tokens",
             "avg": "the mean of the patches' tokens, normalized behind the mean",
             "": "all normalized tokens"}[model.global_pool]
    if distilled:
        reads = ("the normalized class token; a second head reads the distillation token; "
                 "the model returns the mean of both heads' logits")
    steps = DeitSteps if distilled else VitSteps
    return Reference(
        name="deit" if distilled else "vit", module=model, call=on_x, steps=steps,
        config=dict(patch_size=model.patch_size, depth=len(model.blocks),
                    num_heads=first.attn.num_heads, pool=model.global_pool,
                    eps=first.norm1.eps, place_prefix=not model.no_embed_class,
                    qk_norm=isinstance(first.attn.q_norm, nn.LayerNorm)),
        roles=vit_roles, probes=few_probes(model, model.patch_embed.img_size),
        says=f"Images (B, C, H, W) -> logits (B, num_classes): {grid[0]} × {grid[1]} patches "
             f"row by row, each projected linearly as by a convolution with bias; {has_prefix}"
             "before them; learned positions added to all of them. Then depth pre-norm blocks: "
             "x + attention(norm(x)), x + MLP(norm(x)); attention with biases and an output "
             "projection; the MLP has mlp_ratio · embed_dim hidden units and exact GELU; layer "
             f"norms with eps {first.norm1.eps:g}. The linear head reads {reads}.")


def swin_reference_of(model: SwinTransformer) -> Reference:
    """Build the `Reference` of a Swin Transformer of either version.

    Parameters
    ----------
    model : SwinTransformer
        Of any size; the reference uses it as it is, without a copy.
    """
    check_plain(model)
    second = isinstance(model, SwinTransformerV2)
    firsts = [stage.blocks[0].attn for stage in model.layers]
    windows = [layer.window_size for layer in firsts]
    trained = [None] * len(firsts)
    if second:
        trained = [layer.trained_window() for layer in firsts]
    kind = "attention in windows with a relative position bias"
    order = "x + attention(norm(x)), x + MLP(norm(x)); merging normalizes, then projects"
    if second:
        kind = "cosine attention in windows with a continuous position bias"
        order = "x + norm(attention(x)), x + norm(MLP(x)); merging projects, then normalizes"
    return Reference(
        name="swinv2" if second else "swin", module=model, call=on_x,
        steps=SwinV2Steps if second else SwinSteps,
        config=dict(patch_size=model.patch_size, depths=model.depths,
                    heads=[layer.num_heads for layer in firsts], windows=windows,
                    pretrained=trained, pool=model.global_pool, eps=model.norm.eps,
                    shrink=model.small_maps == "shrink"),
        roles=swin_roles, probes=few_probes(model, model.patch_embed.img_size),
        says=f"Images (B, C, H, W) -> logits (B, num_classes): patches of {model.patch_size} "
             f"pixels projected with bias and normalized; stages of {model.depths} blocks, "
             f"each with {kind} of {windows[0]} tokens (every second block of a stage shifts "
             f"them by half a window) and an MLP with exact GELU: {order}. Between stages the "
             "tokens of each square of 2 by 2 are joined (upper left, lower left, upper right, "
             f"lower right) and projected to twice the width. Layer norms with eps "
             f"{model.norm.eps:g}; a last norm, the mean over all tokens, a linear head.")


def tnt_reference_of(model: tnt_library.TNT) -> Reference:
    """Build the `Reference` of a Transformer in Transformer.

    Parameters
    ----------
    model : TNT
        Of any size, but not with `legacy`.

    Raises
    ------
    ValueError
        If it is a legacy model.
    """
    embed = model.pixel_embed
    if embed.legacy:
        raise ValueError("model must not be a legacy one, for which there are no steps")
    first = model.blocks[0]
    channels = embed.proj.in_channels
    height, width = embed.img_size
    return Reference(
        name="tnt", module=model, call=on_x, steps=TntSteps,
        config=dict(patch_size=model.patch_size, stride=embed.proj.stride[0],
                    depth=len(model.blocks), num_heads=first.attn_out.num_heads,
                    word_heads=first.attn_in.num_heads, pool=model.global_pool,
                    eps=model.norm.eps),
        roles=tnt_roles,
        probes=image_probes(channels, (height, width), many=height * width < 10_000),
        says="Images (B, C, H, W) -> logits (B, num_classes): each patch is cut out and a "
             "convolution of 7 × 7 with padding 3 turns it into words (inner_dim channels), to "
             "which learned positions are added. All words of a patch side by side, "
             "normalized, projected, and normalized again are its sentence; a class token "
             "comes first, and positions are added. Each block: a pre-norm block among the "
             "words of each patch; the words, normalized, projected without bias, and "
             "normalized, are added to the sentences (not to the class token); a pre-norm "
             "block among the sentences. Queries, keys, and values have no bias; eps 1e-5. A "
             "last norm; the head reads the class token.")


# %% named references of images
@reference_of("patch_embed")
def patch_embed(img_size: int | tuple[int, int] = (16, 24),
                patch_size: int | tuple[int, int] = 4, in_chans: int = 3, embed_dim: int = 24
                ) -> Reference:
    """Patches of images, projected (chapter 30)."""
    module = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
    return Reference(
        name="patch_embed", module=module, call=on_x, steps=PatchSteps,
        config=dict(patch_size=module.patch_size),
        roles=lambda tensors: {f"patch.{name.removeprefix('proj.')}": tensor
                               for name, tensor in tensors.items()},
        probes=image_probes(in_chans, module.img_size),
        says="Images (B, C, H, W) -> tokens (B, N, embed_dim): patches of patch_size × "
             "patch_size pixels, row by row, each flattened as channel, row, column and "
             "projected linearly with a bias (which a convolution with this kernel and stride "
             "does). No norm, no positions.")


def block_probes(width: int) -> list[Probe]:
    """Probes of a layer of tokens (B, N, width), without masks."""
    return [Probe("three images of seven tokens", dict(x=drawn(3, 7, width, seed=1))),
            Probe("one image of five tokens", dict(x=drawn(1, 5, width, seed=2))),
            Probe("one token", dict(x=drawn(2, 1, width, seed=3))),
            Probe("a non-contiguous input",
                  dict(x=drawn(2, width, 6, seed=4).transpose(1, 2)))]


@reference_of("vit_block")
def vit_block(dim: int = 32, num_heads: int = 4, mlp_ratio: float = 4.0) -> Reference:
    """A block of the Vision Transformer (chapter 30)."""
    return vit_block_reference_of(Block(dim, num_heads, mlp_ratio=mlp_ratio))


def vit_block_reference_of(module: Block) -> Reference:
    """Build the `Reference` of a block of a Vision Transformer, used as it is."""
    check_plain(module)
    eps = module.norm1.eps
    return Reference(
        name="vit_block", module=module, call=on_x, steps=VitBlockSteps,
        config=dict(num_heads=module.attn.num_heads, eps=eps,
                    qk_norm=isinstance(module.attn.q_norm, nn.LayerNorm)),
        roles=vit_roles, probes=block_probes(module.attn.proj.out_features),
        says="x (B, N, dim) -> (B, N, dim): x + attention(norm1(x)), then x + MLP(norm2(x)). "
             "Multi-head attention over all tokens with biases and an output projection; the "
             "MLP is linear to mlp_ratio · dim, exact GELU, linear to dim; layer norms with "
             f"eps {eps:g}.")


@reference_of("vit")
def vit(img_size: int | tuple[int, int] = (16, 24), patch_size: int = 4, embed_dim: int = 32,
        depth: int = 3, num_heads: int = 4, num_classes: int = 5, class_token: bool = True,
        global_pool: str = "token") -> Reference:
    """The Vision Transformer (chapter 30)."""
    if not class_token and global_pool == "token":
        global_pool = "avg"
    model = VisionTransformer(img_size, patch_size, num_classes=num_classes,
                              global_pool=global_pool, embed_dim=embed_dim, depth=depth,
                              num_heads=num_heads, class_token=class_token)
    return vit_reference_of(model)


@reference_of("deit")
def deit(img_size: int | tuple[int, int] = (16, 24), patch_size: int = 4, embed_dim: int = 32,
         depth: int = 3, num_heads: int = 4, num_classes: int = 5) -> Reference:
    """DeiT with its distillation token, in evaluation (chapter 31)."""
    model = DistilledVisionTransformer(img_size, patch_size, num_classes=num_classes,
                                       embed_dim=embed_dim, depth=depth, num_heads=num_heads)
    return vit_reference_of(model)


# %% named references of windows
def call_windows(module: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of the library in windows (B nW, N, C), for which it has maps.

    With a mask (B nW, 1, N, N) the parts of the module are put together here.
    """
    window = module.window_size
    if mask is None:
        return module(x.unflatten(1, window)).flatten(1, 2)
    layout = module.layout(window)
    bias = module.bias(layout, masked=False)  # (h, N, N)
    bias = torch.where(mask, bias, -torch.inf)  # (B nW, h, N, N)
    scale = None
    if isinstance(module, WindowAttentionV2):
        qkv = module.project(x)
    else:
        qkv = module.qkv(x)
    q, k, v = qkv.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    if isinstance(module, WindowAttentionV2):
        q = F.normalize(q, dim=-1) * module.cosine_scale()[:, None]
        k = F.normalize(k, dim=-1)
        scale = 1.0
    x = attention(q, k, v, bias=bias, scale=scale)
    return module.proj(x.transpose(1, 2).flatten(2))


def window_probes(width: int, tokens: int) -> list[Probe]:
    """Probes of attention in windows (B nW, N, C)."""
    turned = drawn(2, width, tokens, seed=3).transpose(1, 2)
    mask = drawn(4, 1, tokens, tokens, seed=5) > 0
    mask = mask | torch.eye(tokens, dtype=torch.bool)
    return [Probe("six windows", dict(x=drawn(6, tokens, width, seed=1))),
            Probe("one window", dict(x=drawn(1, tokens, width, seed=2))),
            Probe("non-contiguous windows", dict(x=turned)),
            Probe("a mask", dict(x=drawn(4, tokens, width, seed=4), mask=mask))]


@reference_of("window_attention")
def window_attention(dim: int = 24, window_size: int | tuple[int, int] = (3, 4),
                     num_heads: int = 3) -> Reference:
    """Attention in windows of Swin (chapter 32)."""
    return window_attention_reference_of(WindowAttention(dim, num_heads, window_size))


def window_attention_reference_of(module: WindowAttention) -> Reference:
    """Build the `Reference` of an attention layer of Swin, which is given windows."""
    window = module.window_size
    return Reference(
        name="window_attention", module=module, call=call_windows, steps=WindowAttentionSteps,
        config=dict(num_heads=module.num_heads, window_size=window), roles=window_roles,
        probes=window_probes(module.proj.out_features, window[0] * window[1]),
        says="Windows (B·nW, N, dim) -> (B·nW, N, dim), the N tokens of a window row by row: "
             "softmax(q kᵀ / √head_dim + bias) v in each head, with biases of q, k, v and an "
             "output projection. The bias of query i and key j is the row (yᵢ - yⱼ + Mₕ - 1) · "
             "(2 M_w - 1) + xᵢ - xⱼ + M_w - 1 of a learned table ((2 Mₕ - 1)(2 M_w - 1), "
             "num_heads). An optional mask is True where a query may attend.")


@reference_of("swinv2_attention")
def swinv2_attention(dim: int = 24, window_size: int | tuple[int, int] = (3, 4),
                     num_heads: int = 3) -> Reference:
    """Cosine attention in windows of Swin V2 (chapter 33)."""
    return swinv2_attention_reference_of(WindowAttentionV2(dim, num_heads, window_size))


def swinv2_attention_reference_of(module: WindowAttentionV2) -> Reference:
    """Build the `Reference` of an attention layer of Swin V2, which is given windows."""
    window = module.window_size
    return Reference(
        name="swinv2_attention", module=module, call=call_windows, steps=CosineWindowSteps,
        config=dict(num_heads=module.num_heads, window_size=window,
                    pretrained_window=module.trained_window()),
        roles=window_roles,
        probes=window_probes(module.proj.out_features, window[0] * window[1]),
        says="Windows (B·nW, N, dim) -> (B·nW, N, dim): the logits are cos(q, k) · "
             "exp(min(s, log 100)) + bias, with a learned s for each head, (num_heads, 1, 1); "
             "q and v have biases, k has none; an output projection. The bias of an offset is "
             "16 · sigmoid(MLP(Δy, Δx)) with a linear layer to 512 units, ReLU, and a linear "
             "layer without bias to num_heads; the offset, divided by M - 1, enters as sign(x) "
             "log₂(1 + 8 |x|) / log₂ 8.")


@reference_of("swin_block")
def swin_block(dim: int = 24, input_resolution: tuple[int, int] = (10, 15), num_heads: int = 3,
               window_size: int | tuple[int, int] = 5, shift_size: int | tuple[int, int] = 2
               ) -> Reference:
    """A block of Swin (chapter 32)."""
    module = SwinBlock(dim, num_heads, window_size, shift_size)
    return swin_block_reference_of(module, to_2tuple(input_resolution))


def swin_block_reference_of(module: SwinBlock, size: tuple[int, int] | None = None
                            ) -> Reference:
    """Build the `Reference` of a block of Swin for maps of a size, or of 2 by 3 windows."""
    attn = module.attn
    if size is None:
        size = (2 * attn.window_size[0], 3 * attn.window_size[1])
    return Reference(
        name="swin_block", module=module, call=on_x, steps=SwinBlockSteps,
        config=dict(num_heads=attn.num_heads, window_size=attn.window_size,
                    shift_size=attn.shift_size, shrink=attn.small_maps == "shrink"),
        roles=swin_roles, probes=map_probes(attn.proj.out_features, size),
        says="A map (B, H, W, dim) -> a map: x + attention(norm1(x)), then x + MLP(norm2(x)). "
             "The attention rolls the map up and to the left by shift_size, cuts it into "
             "windows, attends in each as window_attention does, puts them together, and rolls "
             "back. In windows with rows or columns from both ends of the map, only tokens of "
             "the same side see each other. Exact GELU, mlp_ratio 4, eps 1e-5.")


@reference_of("swinv2_block")
def swinv2_block(dim: int = 24, input_resolution: tuple[int, int] = (10, 15),
                 num_heads: int = 3, window_size: int | tuple[int, int] = 5,
                 shift_size: int | tuple[int, int] = 2) -> Reference:
    """A block of Swin V2 (chapter 33)."""
    module = SwinBlockV2(dim, num_heads, window_size, shift_size)
    return swinv2_block_reference_of(module, to_2tuple(input_resolution))


def swinv2_block_reference_of(module: SwinBlockV2, size: tuple[int, int] | None = None
                              ) -> Reference:
    """Build the `Reference` of a block of Swin V2 for maps of a size, or of 2 by 3 windows."""
    attn = module.attn
    if size is None:
        size = (2 * attn.window_size[0], 3 * attn.window_size[1])
    return Reference(
        name="swinv2_block", module=module, call=on_x, steps=SwinV2BlockSteps,
        config=dict(num_heads=attn.num_heads, window_size=attn.window_size,
                    shift_size=attn.shift_size, shrink=attn.small_maps == "shrink",
                    pretrained_window=attn.trained_window()),
        roles=swin_roles, probes=map_probes(attn.proj.out_features, size),
        says="A map (B, H, W, dim) -> a map: x + norm1(attention(x)), then x + norm2(MLP(x)). "
             "Shifted windows and their mask as in swin_block, attention in each as in "
             "swinv2_attention. Exact GELU, mlp_ratio 4, eps 1e-5.")


@reference_of("patch_merging")
def patch_merging(dim: int = 8, version: int = 1) -> Reference:
    """Patch merging of Swin (chapter 32), or with `version` 2 of Swin V2."""
    if version not in (1, 2):
        raise ValueError(f"version ({version!r}) must be 1 or 2")
    module = PatchMerging(dim) if version == 1 else PatchMergingV2(dim)
    last = "normalized, and projected" if version == 1 else "projected, and then normalized"
    probes = map_probes(dim, (4, 6))
    odd = Probe("a map of odd height and width", dict(x=drawn(2, 5, 7, dim, seed=4)))
    return Reference(
        name="patch_merging", module=module, call=on_x, steps=MergingSteps,
        config=dict(merge_norm_first=version == 1), roles=dict, probes=[*probes, odd],
        says="A map (B, H, W, dim) -> (B, H/2, W/2, 2 dim): the four tokens of each square of "
             "2 by 2 side by side (upper left, lower left, upper right, lower right), "
             f"{last}, without bias, to 2 dim. A map of odd height or width gets zeros below "
             "or on the right first. eps 1e-5.")


@reference_of("swin")
def swin(img_size: int | tuple[int, int] = (32, 48), patch_size: int = 2, embed_dim: int = 16,
         depths: tuple[int, ...] = (2, 2), num_heads: tuple[int, ...] = (2, 4),
         window_size: int | tuple[int, int] = 4, num_classes: int = 5) -> Reference:
    """The Swin Transformer (chapter 32)."""
    return swin_reference_of(SwinTransformer(
        img_size, patch_size, num_classes=num_classes, embed_dim=embed_dim, depths=depths,
        num_heads=num_heads, window_size=window_size))


@reference_of("swinv2")
def swinv2(img_size: int | tuple[int, int] = (32, 48), patch_size: int = 2, embed_dim: int = 16,
           depths: tuple[int, ...] = (2, 2), num_heads: tuple[int, ...] = (2, 4),
           window_size: int | tuple[int, int] = 4, num_classes: int = 5) -> Reference:
    """The Swin Transformer V2 (chapter 33)."""
    return swin_reference_of(SwinTransformerV2(
        img_size, patch_size, num_classes=num_classes, embed_dim=embed_dim, depths=depths,
        num_heads=num_heads, window_size=window_size))


# %% named references of tnt
@reference_of("tnt_block")
def tnt_block(dim: int = 8, dim_out: int = 24, num_pixel: int = 4, num_heads_in: int = 2,
              num_heads_out: int = 4) -> Reference:
    """A block of Transformer in Transformer, of which the sentences count (chapter 34)."""
    module = tnt_library.Block(dim, dim_out, num_pixel, num_heads_in, num_heads_out)
    probes = []
    for name, batch, n in (("two images", 2, 6), ("one image of one patch", 1, 1)):
        probes.append(Probe(name, dict(words=drawn(batch * n, num_pixel, dim, seed=1),
                                       sentences=drawn(batch, 1 + n, dim_out, seed=2))))
    turned = drawn(9, dim, num_pixel, seed=3).transpose(1, 2)
    probes.append(Probe("non-contiguous words",
                        dict(words=turned, sentences=drawn(3, 4, dim_out, seed=4))))
    return Reference(
        name="tnt_block", module=module,
        call=lambda module, **both: words_and_sentences(*module(tuple(both.values()))),
        join=words_and_sentences, steps=TntBlockSteps,
        config=dict(num_heads=num_heads_out, word_heads=num_heads_in), roles=tnt_roles,
        probes=probes,
        says="Words (B·n, m, dim) and sentences (B, 1 + n, dim_out) -> both. "
             "A pre-norm block among the m words of each sentence (MLP of 4 · dim); "
             "the new words of a sentence side by side, normalized, projected to dim_out "
             "without bias, and normalized, are added to it, but not to the class token; a "
             "pre-norm block among the sentences. q, k, v without bias, exact GELU, eps 1e-5.")


@reference_of("tnt")
def tnt(img_size: int | tuple[int, int] = (16, 24), patch_size: int = 8, embed_dim: int = 24,
        depth: int = 2, num_heads_outer: int = 4, inner_dim: int = 8, num_heads_inner: int = 2,
        first_stride: int = 4, num_classes: int = 5) -> Reference:
    """Transformer in Transformer (chapter 34)."""
    return tnt_reference_of(tnt_library.TNT(
        img_size, patch_size, num_classes=num_classes, embed_dim=embed_dim, depth=depth,
        num_heads_outer=num_heads_outer, inner_dim=inner_dim, num_heads_inner=num_heads_inner,
        first_stride=first_stride))


REFERENCES_OF.update({
    VisionTransformer: vit_reference_of, DistilledVisionTransformer: vit_reference_of,
    SwinTransformer: swin_reference_of, SwinTransformerV2: swin_reference_of,
    tnt_library.TNT: tnt_reference_of, Block: vit_block_reference_of,
    WindowAttention: window_attention_reference_of,
    WindowAttentionV2: swinv2_attention_reference_of, SwinBlock: swin_block_reference_of,
    SwinBlockV2: swinv2_block_reference_of})


# %% named references of masked images
def unshuffle(visible: Tensor, mask_token: Tensor, ids_restore: Tensor) -> Tensor:
    """Put visible tokens in their places, as `attnlib.mae.MaskedAutoencoder` does.

    Parameters
    ----------
    visible : Tensor, shape (B, k, D)
    mask_token : Tensor, shape (1, 1, D)
    ids_restore : int64 Tensor, shape (B, N)
        ``ids_shuffle.argsort(dim=1)``, where the first k of `ids_shuffle` are visible.
    """
    keep = ids_restore.argsort(dim=1)[:, : visible.shape[1]]  # (B, k)
    index = keep[..., None].expand_as(visible)  # (B, k, D)
    mask_tokens = mask_token.expand(len(visible), ids_restore.shape[1], -1)  # (B, N, D)
    return mask_tokens.scatter(1, index, visible)


@reference_of("mae_unshuffle")
def mae_unshuffle(dim: int = 8) -> Reference:
    """The sequence of the masked autoencoder's decoder (chapter 40)."""
    probes = []
    for name, batch, n, k in (("two images", 2, 12, 3), ("one image", 1, 9, 4),
                              ("one visible token", 3, 7, 1)):
        ids_restore = drawn(batch, n, seed=n).argsort(1).argsort(1)
        inputs = dict(visible=drawn(batch, k, dim, seed=1), mask_token=drawn(1, 1, dim, seed=2),
                      ids_restore=ids_restore)
        probes.append(Probe(name, inputs))
    return Reference(
        name="mae_unshuffle", module=unshuffle,
        call=lambda module, **inputs: module(**inputs), steps=UnshuffleSteps, config={},
        roles=no_roles, probes=probes,
        says="Visible tokens (B, k, D), the mask token (1, 1, D), and ids_restore (B, N) -> "
             "(B, N, D). Patches were ordered by ids_shuffle, of which the first k are visible "
             "in this order; ids_restore is argsort(ids_shuffle). The result has each visible "
             "token in the place of its patch, and the mask token in all others. No class "
             "token, no positions.")


@reference_of("patchify")
def patchify(patch_size: int | tuple[int, int] = (2, 3)) -> Reference:
    """Images as rows of pixels, in MAE's order (chapter 40)."""
    p, q = to_2tuple(patch_size)
    probes = []
    for probe in image_probes(3, (4 * p, 3 * q)):
        probes.append(Probe(probe.name, dict(images=probe.inputs["x"])))
    return Reference(
        name="patchify", module=mae.patchify,
        call=lambda module, images: module(images, (p, q)), steps=PatchifySteps,
        config=dict(patch_size=(p, q)), roles=no_roles, probes=probes,
        says="Images (B, C, H, W) -> (B, N, p·q·C): patches of p rows and q columns, row by "
             "row; in each of them pixels row by row, and the C channels of a pixel side by "
             "side.")


@reference_of("mae_loss")
def mae_loss(patch_size: int = 4, norm_pix_loss: bool = False) -> Reference:
    """The loss of the masked autoencoder (chapter 40)."""
    model = mae.MaskedAutoencoder(
        (4 * patch_size, 3 * patch_size), patch_size, embed_dim=4, depth=1, num_heads=1,
        decoder_embed_dim=4, decoder_depth=1, decoder_num_heads=1, norm_pix_loss=norm_pix_loss)
    probes = []
    values = 3 * patch_size**2
    for name, batch, shares in (("three images", 3, [9, 5, 7]), ("one image", 1, [9]),
                                ("one masked patch", 2, [1, 1])):
        images = drawn(batch, 3, 4 * patch_size, 3 * patch_size, seed=1)
        images = 0.5 + 0.3 * images
        ranks = drawn(batch, 12, seed=2).argsort(1).argsort(1)
        masked = ranks < torch.tensor(shares)[:, None]
        prediction = drawn(batch, 12, values, seed=3)
        probes.append(Probe(name, dict(prediction=prediction, images=images, masked=masked)))
    normalized = ""
    if norm_pix_loss:
        normalized = ("The target of each patch is first normalized by its own mean and "
                      "standard deviation (variance with N - 1, plus 1e-6). ")
    return Reference(
        name="mae_loss", module=model.forward_loss,
        call=lambda module, prediction, images, masked: module(images, prediction, masked),
        steps=MaeLossSteps,
        config=dict(patch_size=(patch_size, patch_size), norm_pix_loss=norm_pix_loss),
        roles=no_roles, probes=probes,
        says="Prediction (B, N, p·p·C), images (B, C, H, W), masked (B, N; True where a patch "
             f"was hidden) -> a scalar. The target is patchify(images). {normalized}The "
             "squared error is averaged over the values of each patch, and then over all "
             "masked patches of the batch together.")


def mae_decoder_roles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Roles of the parameters of a masked autoencoder's decoder."""
    kept = {}
    for name, tensor in tensors.items():
        if name == "mask_token":
            kept["mask"] = tensor[0, 0]
        elif name == "decoder_pos_embed":
            kept["pos"] = tensor[0]
        elif name.startswith("decoder_"):
            kept[name.removeprefix("decoder_")] = tensor
    return layer_roles(kept, {"attn.proj": "attn.o"})


@reference_of("mae_decoder")
def mae_decoder(img_size: int | tuple[int, int] = (12, 16), patch_size: int = 4,
                embed_dim: int = 24, decoder_embed_dim: int = 16, decoder_depth: int = 2,
                decoder_num_heads: int = 2) -> Reference:
    """The decoder of the masked autoencoder (chapter 40)."""
    model = mae.MaskedAutoencoder(
        img_size, patch_size, embed_dim=embed_dim, depth=1, num_heads=1,
        decoder_embed_dim=decoder_embed_dim, decoder_depth=decoder_depth,
        decoder_num_heads=decoder_num_heads)

    def call(module: nn.Module, x: Tensor, ids_restore: Tensor) -> Tensor:
        keep = ids_restore.argsort(dim=1)[:, : x.shape[1] - 1]
        return module.forward_decoder(x, keep)

    n = model.patch_embed.num_patches
    probes = []
    for name, batch, k in (("two images", 2, 3), ("one image", 1, 5), ("one token", 3, 1)):
        probes.append(Probe(name, dict(x=drawn(batch, 1 + k, embed_dim, seed=k),
                                       ids_restore=drawn(batch, n, seed=n).argsort(1))))
    return Reference(
        name="mae_decoder", module=model, call=call, steps=MaeDecoderSteps,
        config=dict(depth=decoder_depth, num_heads=decoder_num_heads), roles=mae_decoder_roles,
        probes=probes,
        says="Encoded tokens (B, 1 + k, embed_dim), the class token first, and ids_restore "
             "(B, N) -> pixels (B, N, p·p·3): a linear layer to the decoder's width; "
             "mask_token behind the visible tokens, and all of them gathered by ids_restore; "
             "the class token before them; positions added to all; pre-norm blocks as in "
             "vit_block; a norm (eps 1e-6); a linear layer to the pixels, without the class "
             "token.")


# %% named references of distillation
def distillation_probes() -> list[Probe]:
    """Probes of losses of two heads' logits, the teacher's logits, and labels."""
    probes = []
    for name, batch, classes in (("four images", 4, 5), ("one image", 1, 3),
                                 ("seven images", 7, 10)):
        inputs = dict(logits=2 * drawn(batch, classes, seed=1),
                      dist_logits=2 * drawn(batch, classes, seed=2),
                      teacher_logits=3 * drawn(batch, classes, seed=3),
                      labels=drawn(batch, classes, seed=4).argmax(1))
        probes.append(Probe(name, inputs))
    return probes


@reference_of("hard_distillation_loss")
def hard_distillation_loss() -> Reference:
    """The loss with the teacher's decisions (chapter 31)."""
    return Reference(
        name="hard_distillation_loss", module=deit_library.hard_distillation_loss,
        call=lambda module, **inputs: module(**inputs), steps=HardDistillationSteps, config={},
        roles=no_roles, probes=distillation_probes(),
        says="logits, dist_logits, teacher_logits (B, C), labels (B,) -> a scalar: half the "
             "cross-entropy of logits with the labels, and half that of dist_logits with the "
             "teacher's most probable classes, each a mean over the images.")


@reference_of("soft_distillation_loss")
def soft_distillation_loss(temperature: float = 3.0) -> Reference:
    """The loss with the teacher's probabilities (chapter 31)."""
    return Reference(
        name="soft_distillation_loss", module=deit_library.soft_distillation_loss,
        call=lambda module, **inputs: module(**inputs, temperature=temperature),
        steps=SoftDistillationSteps, config=dict(temperature=temperature), roles=no_roles,
        probes=distillation_probes(),
        says="logits, dist_logits, teacher_logits (B, C), labels (B,) -> a scalar: half the "
             "cross-entropy of logits with the labels, and half τ² KL(p ‖ q), where p and q "
             f"are softmax of the teacher's and of dist_logits over τ = {temperature:g}; the "
             "divergence is summed over all entries and divided by B · C.")


# %% named references of boxes
def box_probes() -> list[Probe]:
    """Probes of functions of two boxes by corners, among them boxes apart and inside."""
    generator = drawn(40, 8, seed=1).sigmoid()
    low_a, size_a, low_b, size_b = generator.chunk(4, dim=-1)
    size_a = 0.7 * size_a
    size_b = 0.5 * size_b
    a = torch.cat([low_a, low_a + size_a], dim=-1)
    b = torch.cat([low_b, low_b + size_b], dim=-1)
    apart = b + 2.0
    inside = torch.cat([low_a + size_a / 4, low_a + size_a / 2], dim=-1)
    diagonal = torch.cat([low_a + size_a + 0.1, low_a + size_a + 0.4], dim=-1)
    pixels = torch.tensor([[10.0, 20.0, 50.0, 60.0], [0.0, 0.0, 4.0, 9.0]]).double()
    other = torch.tensor([[30.0, 40.0, 90.0, 70.0], [1.0, 2.0, 3.0, 12.0]]).double()
    return [Probe("boxes that overlap or not", dict(a=a[:20], b=b[:30])),
            Probe("boxes apart", dict(a=a[:4], b=apart[:3])),
            Probe("boxes inside others", dict(a=a[:5], b=inside[:8])),
            Probe("boxes apart in both directions", dict(a=a[:6], b=diagonal[:3])),
            Probe("boxes in pixels", dict(a=pixels, b=other))]


@reference_of("box_cxcywh_to_xyxy")
def box_cxcywh_to_xyxy() -> Reference:
    """Boxes by center and size as corners (chapter 42)."""
    boxes = drawn(5, 4, seed=1).sigmoid()
    probes = [Probe("five boxes", dict(boxes=boxes)),
              Probe("boxes of two images", dict(boxes=drawn(2, 3, 4, seed=2).sigmoid())),
              Probe("one box", dict(boxes=boxes[:1])),
              Probe("a non-contiguous input", dict(boxes=drawn(4, 6, seed=3).sigmoid().mT))]
    return Reference(
        name="box_cxcywh_to_xyxy", module=detr.box_cxcywh_to_xyxy,
        call=lambda module, boxes: module(boxes), steps=CornersSteps, config={},
        roles=no_roles, probes=probes,
        says="Boxes (..., 4) as center x, center y, width, height -> (..., 4) as left, top, "
             "right, bottom.")


@reference_of("box_iou")
def box_iou() -> Reference:
    """Intersection over union (chapter 42)."""
    return Reference(
        name="box_iou", module=detr.box_iou, call=lambda module, a, b: module(a[:, None], b)[0],
        steps=IouSteps, config={}, roles=no_roles, probes=box_probes(),
        says="Two tensors of boxes (N, 4) and (M, 4) by corners (left, top, right, bottom) -> "
             "(N, M), the intersection over union of each pair. Boxes that do not meet have 0.")


@reference_of("generalized_box_iou")
def generalized_box_iou() -> Reference:
    """Generalized intersection over union (chapter 42)."""
    return Reference(
        name="generalized_box_iou", module=detr.generalized_box_iou,
        call=lambda module, a, b: module(a[:, None], b), steps=GiouSteps, config={}, roles=no_roles,
        probes=box_probes(),
        says="Two tensors of boxes (N, 4) and (M, 4) by corners -> (N, M): IoU - (H - U) / H, where U is "
             "the area of the union and H that of the smallest box around both.")


# %% mistakes with patches
PATCHES = "30_vit: Pictures as sequences"
TOKENS = "30_vit: One more token, and positions"
MODEL = "30_vit: The model"


@mistake("sequence", "patches column by column",
         says="The patches are put in a row column by column, so that every patch but a few "
              "gets the position of another one; they should be read row by row.",
         right="(B, H', W', D).flatten(1, 2)", wrong="(B, W', H', D).flatten(1, 2)",
         read=PATCHES)
def _patches_by_column(self, x):
    return x.transpose(1, 2).flatten(1, 2)


@mistake("sequence", "tokens by reshape instead of transpose",
         says="The map (B, D, H', W') of the convolution is reshaped to (B, N, D), which mixes "
              "channels and places; its channels must be moved to the last axis first.",
         right="x.flatten(2).transpose(1, 2)", wrong="x.reshape(B, N, D)", read=PATCHES)
def _tokens_by_reshape(self, x):
    return x.permute(0, 3, 1, 2).reshape(x.shape[0], -1, x.shape[3])


@mistake("cut", "patches by reshape alone",
         says="The image is reshaped to patches without moving axes, so that a “patch” is a "
              "run of pixels of one channel instead of a square.",
         right="(B, C, H', p, W', q) -> (B, H', W', C, p, q)",
         wrong="images.reshape(B, H', W', C, p, q)", read=PATCHES)
def _patches_by_reshape(self, images):
    p, q = self.config.patch_size
    batch, channels, height, width = images.shape
    return images.reshape(batch, height // p, width // q, channels, p, q)


@mistake("cut", "patches by reshape after moving the channels",
         says="The image with its channels last is reshaped to patches without moving axes, so "
              "that a “patch” is a run of pixels of a row instead of a square.",
         right="(B, H', p, W', q, C) -> (B, H', W', p, q, C)",
         wrong="(B, H, W, C).reshape(B, N, p q C)", read=PATCHES)
def _patches_by_reshape_of_pixels(self, images):
    p, q = self.config.patch_size
    batch, channels, height, width = images.shape
    x = images.permute(0, 2, 3, 1)
    x = x.reshape(batch, height // p, width // q, p, q, channels)
    return x.movedim(-1, -3)


@mistake("cut", "pixels of a patch far apart",
         says="The axes of the image are split in the wrong order, (p, H') instead of (H', p), "
              "so that a “patch” has every H'-th pixel of the image instead of neighbors.",
         right="(h p) (w q)", wrong="(p h) (q w)", read=PATCHES)
def _scattered_patches(self, images):
    p, q = self.config.patch_size
    x = images.unflatten(3, (q, -1))
    x = x.unflatten(2, (p, -1))
    return x.permute(0, 3, 5, 1, 2, 4)


@mistake("patch_vector", "channels last in a patch", convention=True,
         says="Pixels are flattened as row, column, channel, and not as channel, row, column, "
              "as a convolution does; a projection trained from the start can learn either.",
         right="(C p q)", wrong="(p q C)", read=PATCHES)
def _channels_last_in_a_patch(self, patches):
    return patches.movedim(-3, -1).flatten(-3)


@mistake("patch_vector", "pixels of a patch column by column", convention=True,
         says="The pixels of each patch are flattened column by column and not row by row; a "
              "projection trained from the start can learn either.",
         right="(C p q)", wrong="(C q p)", read=PATCHES)
def _pixels_by_column(self, patches):
    return patches.mT.flatten(-3)


@mistake("colors", "channels reversed",
         says="The channels are read as blue, green, red; they should be red, green, blue.",
         right="x", wrong="x.flip(1)", read=PATCHES)
def _channels_reversed(self, images):
    return images.flip(1)


@mistake("colors", "height and width exchanged",
         says="The image is read as (B, C, W, H), so that rows and columns are exchanged.",
         right="(B, C, H, W)", wrong="(B, C, W, H)", read=PATCHES)
def _height_and_width_exchanged(self, images):
    return images.transpose(2, 3)


@mistake("project_patches", "no bias in the patch projection", lacks=("patch.bias",),
         says="The projection of the patches has no bias; it should have one.",
         right="W x + b", wrong="W x", read=PATCHES)
def _no_patch_bias(self, patches):
    return F.linear(patches, self.weight("patch.weight").flatten(1))


@mistake("project_patches", "an activation behind the patch projection",
         says="A ReLU follows the projection of the patches; it should be linear.",
         right="W x + b", wrong="relu(W x + b)", read=PATCHES)
def _activated_patches(self, patches):
    weight = self.weight("patch.weight").flatten(1)
    return F.linear(patches, weight, self.weight("patch.bias")).relu()


@mistake("project_patches", "a GELU behind the patch projection",
         says="A GELU follows the projection of the patches; it should be linear.",
         right="W x + b", wrong="gelu(W x + b)", read=PATCHES)
def _gelu_of_patches(self, patches):
    weight = self.weight("patch.weight").flatten(1)
    return F.gelu(F.linear(patches, weight, self.weight("patch.bias")))


# %% mistakes with tokens and positions
@mistake("join_prefix", "class token last, but the first token read",
         says="The class token is put behind the patches, and the head still reads the first "
              "token, a patch; it should come first.",
         right="cat([cls, patches])", wrong="cat([patches, cls])", read=TOKENS)
def _prefix_behind(self, prefix, patches):
    return torch.cat([patches, *prefix], dim=1)


@mistake("place", "class token last",
         says="The class token is put behind the patches and read there, so that all tokens "
              "have other positions; it should come first.",
         right="cat([cls, patches]) + pos", wrong="cat([patches, cls]) + pos", read=TOKENS)
def _placed_last(self, x, k):
    return x + self.weight("pos").roll(k, 0)


@mistake("place", "no position for the class token",
         says="Positions are added to the patches only; the class token has one, too.",
         right="cat([cls, patches]) + pos", wrong="cat([cls, patches + pos])", read=TOKENS)
def _class_token_without_position(self, x, k):
    count = x.shape[1] - k
    return torch.cat([x[:, :k], x[:, k:] + self.weight("pos")[-count:]], dim=1)


@mistake("place", "positions of the patches off by one",
         says="The patches get the first positions, which begin with that of the class token, "
              "and the class token gets none.",
         right="patches + pos[1:]", wrong="patches + pos[:N]", read=TOKENS)
def _positions_off_by_one(self, x, k):
    count = x.shape[1] - k
    return torch.cat([x[:, :k], x[:, k:] + self.weight("pos")[:count]], dim=1)


@mistake("place", "no positions of the patches", lacks=("pos",),
         says="No positions are added, so that the model does not know where a patch is.",
         right="x + pos", wrong="x", read=TOKENS)
def _no_positions(self, x, k):
    return x


@mistake("place", "positions not used",
         says="The model has positions and never adds them.",
         right="x + pos", wrong="x", read=TOKENS)
def _positions_not_used(self, x, k):
    return x


@mistake("place", "positions of the patches added twice",
         says="The positions are added twice.",
         right="x + pos", wrong="x + pos + pos", read=TOKENS)
def _positions_twice(self, x, k):
    return x + 2 * self.weight("pos")


@mistake("place", "tokens scaled before the positions",
         says="The tokens are multiplied by √embed_dim before positions are added, as in the "
              "Transformer of 2017; in a Vision Transformer they are not.",
         right="x + pos", wrong="√D x + pos", read=TOKENS)
def _tokens_scaled(self, x, k):
    return x * x.shape[-1] ** 0.5 + self.weight("pos")


@mistake("place", "tokens multiplied by positions",
         says="The tokens are multiplied by the positions, which should be added.",
         right="x + pos", wrong="x * pos", read=TOKENS)
def _tokens_times_positions(self, x, k):
    return x * self.weight("pos")


@mistake("place", "the first patch's position for all patches",
         says="All patches get the position of the first one, as when an index is lost in a "
              "broadcast.",
         right="x + pos", wrong="x + pos[1]", read=TOKENS)
def _one_position_for_all(self, x, k):
    pos = self.weight("pos")
    first = pos[k : k + 1].expand(x.shape[1] - k, -1)
    return x + torch.cat([pos[:k], first])


@mistake("place", "positions are not trained",
         says="The positions get no gradient, as when they are detached or not a parameter.",
         right="x + pos", wrong="x + pos.detach()", read=TOKENS)
def _positions_not_trained(self, x, k):
    return x + self.weight("pos").detach()


@mistake("before_block", "positions added before every block",
         says="The positions are added before every block; they should be added once, before "
              "the first.",
         right="z₀ = x + pos", wrong="zₗ = block(zₗ₋₁ + pos)", read=TOKENS)
def _positions_in_every_block(self, x):
    if self.scope == "blocks.0.":
        return x
    pos = self.weights["pos"]
    return torch.cat([x[:, : -len(pos)], x[:, -len(pos):] + pos], dim=1)


@mistake("prefix", "class token of zeros", lacks=("cls",),
         says="The class token is a tensor of zeros and is not learned.",
         right="nn.Parameter", wrong="torch.zeros", read=TOKENS)
def _zero_class_token(self, batch):
    return [self.weight("pos").new_zeros(batch, 1, self.weight("pos").shape[1])]


@mistake("prefix", "class token not used", around=True,
         says="A class token of zeros stands before the patches, although there is a learned "
              "one.",
         right="cat([cls, patches])", wrong="cat([0, patches])", read=TOKENS)
def _class_token_not_used(self, before, batch):
    tokens = before(self, batch)
    return [torch.zeros_like(tokens[0]), *tokens[1:]] if tokens else tokens


@mistake("prefix", "class token is not trained", around=True,
         says="The class token gets no gradient, as when it is expanded from its data.",
         right="cls.expand(B, -1, -1)", wrong="cls.data.expand(B, -1, -1)", read=TOKENS)
def _class_token_not_trained(self, before, batch):
    tokens = before(self, batch)
    return [tokens[0].detach(), *tokens[1:]] if tokens else tokens


@mistake("layer_scale", "no layer scale", lacks=("ls1", "ls2"),
         says="What attention and MLP return is not multiplied by a learned factor for each "
              "channel (layer scale).",
         right="x + γ f(x)", wrong="x + f(x)", read="30_vit: The encoder")
def _no_layer_scale(self, name, x):
    return x


@mistake("normalize_queries_and_keys", "queries and keys not normalized",
         lacks=("q_norm.weight", "k_norm.weight"),
         says="The queries and keys of each head are not normalized.",
         right="norm(q) norm(k)ᵀ", wrong="q kᵀ", read="30_vit: The encoder")
def _queries_and_keys_not_normalized(self, q, k):
    return q, k


@mistake("normalize_queries_and_keys", "one norm for queries and keys",
         says="Queries and keys are normalized by the same layer; each has its own.",
         right="q_norm(q) k_norm(k)ᵀ", wrong="norm(q) norm(k)ᵀ", read="30_vit: The encoder")
def _one_norm_for_queries_and_keys(self, q, k):
    return self.norm("q_norm", q), self.norm("q_norm", k)


# %% mistakes with the head
@mistake("token_of_class", "mean of all tokens instead of the class token",
         says="The head reads the mean of all tokens; it should read the class token.",
         right="x[:, 0]", wrong="x.mean(1)", read=MODEL)
def _mean_instead_of_class_token(self, x):
    return x.mean(1)


@mistake("token_of_class", "mean of the patches instead of the class token",
         says="The head reads the mean of the patches; it should read the class token.",
         right="x[:, 0]", wrong="x[:, 1:].mean(1)", read=MODEL)
def _patches_instead_of_class_token(self, x):
    return x[:, self.prefix_length():].mean(1)


@mistake("token_of_class", "last token instead of the class token",
         says="The head reads the last token, a patch; it should read the class token, which "
              "is the first.",
         right="x[:, 0]", wrong="x[:, -1]", read=MODEL)
def _last_instead_of_class_token(self, x):
    return x[:, -1]


@mistake("token_of_class", "token 1 instead of the class token",
         says="The head reads token 1, a patch; the class token is token 0.",
         right="x[:, 0]", wrong="x[:, 1]", read=MODEL)
def _next_to_class_token(self, x):
    return x[:, 1]


@mistake("token_of_class", "maximum instead of the class token",
         says="The head reads the maximum over the tokens; it should read the class token.",
         right="x[:, 0]", wrong="x.amax(1)", read=MODEL)
def _maximum_instead_of_class_token(self, x):
    return x.amax(1)


@mistake("mean_of_patches", "class token in the mean",
         says="The mean includes the class token; it should be that of the patches.",
         right="x[:, 1:].mean(1)", wrong="x.mean(1)", read=MODEL)
def _class_token_in_the_mean(self, x):
    return x.mean(1)


@mistake("mean_of_patches", "first token instead of the mean",
         says="The head reads the first token; it should read the mean of the patches.",
         right="x[:, 1:].mean(1)", wrong="x[:, 0]", read=MODEL)
def _first_instead_of_mean(self, x):
    return x[:, 0]


@mistake("mean_of_patches", "sum instead of the mean",
         says="The head reads the sum of the patches; it should read their mean.",
         right="x[:, 1:].mean(1)", wrong="x[:, 1:].sum(1)", read=MODEL)
def _sum_of_patches(self, x):
    return x[:, self.prefix_length():].sum(1)


@mistake("mean_of_patches", "maximum instead of the mean",
         says="The head reads the maximum over the patches; it should read their mean.",
         right="x[:, 1:].mean(1)", wrong="x[:, 1:].amax(1)", read=MODEL)
def _maximum_of_patches(self, x):
    return x[:, self.prefix_length():].amax(1)


@mistake("norm_and_pool", "norm before the mean", convention=True,
         says="The tokens are normalized before their mean is taken; here the norm comes "
              "behind the mean (timm's fc_norm).",
         right="norm(x.mean(1))", wrong="norm(x).mean(1)", read=MODEL)
def _norm_before_pooling(self, x):
    return self.pool(self.final_norm(x))


@mistake("class_logits", "no bias in the head", lacks=("head.bias",),
         says="The head has no bias; it should have one.",
         right="W x + b", wrong="W x", read=MODEL)
def _no_head_bias(self, x):
    return F.linear(x, self.weight("head.weight"))


@mistake("class_logits", "tanh before the head",
         says="A tanh stands before the head, as in BERT's pooler; the head should read the "
              "normalized token itself.",
         right="head(x)", wrong="head(tanh(x))", read=MODEL)
def _tanh_before_the_head(self, x):
    return self.linear("head", x.tanh())


@mistake("class_logits", "GELU before the head",
         says="A GELU stands before the head, which should read the normalized token itself.",
         right="head(x)", wrong="head(gelu(x))", read=MODEL)
def _gelu_before_the_head(self, x):
    return self.linear("head", F.gelu(x))


@mistake("answer", "softmax in the model",
         says="The model returns probabilities; it should return logits, since cross_entropy "
              "computes the softmax itself.",
         right="head(x)", wrong="softmax(head(x))", read=MODEL)
def _softmax_in_the_model(self, logits):
    return logits.softmax(-1)


@mistake("answer", "log-softmax in the model",
         says="The model returns log-probabilities; it should return logits.",
         right="head(x)", wrong="log_softmax(head(x))", read=MODEL)
def _log_softmax_in_the_model(self, logits):
    return logits.log_softmax(-1)


@mistake("answer", "sigmoid in the model",
         says="The model returns a sigmoid of each logit; it should return logits.",
         right="head(x)", wrong="sigmoid(head(x))", read=MODEL)
def _sigmoid_in_the_model(self, logits):
    return logits.sigmoid()


@mistake("answer", "activation of the logits",
         says="A ReLU follows the head and removes all negative logits.",
         right="head(x)", wrong="relu(head(x))", read=MODEL)
def _relu_of_logits(self, logits):
    return logits.relu()


# %% mistakes with distillation
SECOND_TOKEN = "31_deit: A second token"
TWO_HEADS = "31_deit: Two heads, one answer"


@mistake("prefix", "distillation token before the class token", around=True,
         says="The distillation token comes first, so that each head reads the other's token; "
              "the class token should be first.",
         right="cat([cls, dist, patches])",
         wrong="cat([dist, cls, patches])", read=SECOND_TOKEN)
def _distillation_token_first(self, before, batch):
    return before(self, batch)[::-1]


@mistake("place", "positions of class and distillation token exchanged",
         says="The class token gets the second position and the distillation token the first; "
              "it should be the other way round.",
         right="cat([cls, dist, patches]) + pos", wrong="cat([dist, cls, patches]) + pos",
         read=SECOND_TOKEN)
def _two_positions_exchanged(self, x, k):
    pos = self.weight("pos")
    if k < 2:
        return x + pos
    return x + torch.cat([pos[:k].flip(0), pos[k:]])


@mistake("place", "distillation token last",
         says="The distillation token is put behind the patches, so that it and the patches "
              "have other positions; it should be the second token.",
         right="cat([cls, dist, patches]) + pos", wrong="cat([cls, patches, dist]) + pos",
         read=SECOND_TOKEN)
def _distillation_token_last(self, x, k):
    pos = self.weight("pos")
    if k < 2:
        return x + pos
    return x + torch.cat([pos[:1], pos[-1:], pos[1:-1]])


@mistake("two_tokens", "heads exchanged",
         says="The head of the classes reads the distillation token, and the other head the "
              "class token.",
         right="head(x[:, 0]), head_dist(x[:, 1])", wrong="head(x[:, 1]), head_dist(x[:, 0])",
         read=TWO_HEADS)
def _heads_exchanged(self, x):
    return x[:, 1], x[:, 0]


@mistake("two_tokens", "both heads read the class token",
         says="Both heads read the class token; the second one should read the distillation "
              "token.",
         right="head(x[:, 0]), head_dist(x[:, 1])", wrong="head(x[:, 0]), head_dist(x[:, 0])",
         read=TWO_HEADS)
def _both_read_the_class_token(self, x):
    return x[:, 0], x[:, 0]


@mistake("two_tokens", "the second head reads the last token",
         says="The second head reads the last token, a patch; it should read the distillation "
              "token, which is token 1.",
         right="head_dist(x[:, 1])", wrong="head_dist(x[:, -1])", read=TWO_HEADS)
def _second_head_reads_the_last(self, x):
    return x[:, 0], x[:, -1]


@mistake("two_tokens", "both heads read the mean of both tokens",
         says="Both heads read the mean of class and distillation token; each should read its "
              "own.",
         right="(head(cls) + head_dist(dist)) / 2",
         wrong="head and head_dist of (cls + dist) / 2", read=TWO_HEADS)
def _both_read_the_mean(self, x):
    mean = x[:, :2].mean(1)
    return mean, mean


@mistake("both_heads", "one head for both tokens", lacks=("dist_head.weight", "dist_head.bias"),
         says="The same head reads both tokens; each should have its own.",
         right="head(cls), head_dist(dist)", wrong="head(cls), head(dist)", read=TWO_HEADS)
def _one_head_for_both(self, x_cls, x_dist):
    return self.linear("head", x_cls), self.linear("head", x_dist)


@mistake("average_heads", "sum of both heads",
         says="In evaluation the logits of both heads are added; they should be averaged.",
         right="(a + b) / 2", wrong="a + b", read=TWO_HEADS)
def _sum_of_heads(self, logits, dist_logits):
    return logits + dist_logits


@mistake("average_heads", "only the head of the classes",
         says="In evaluation only the head of the classes is used; both heads' logits should "
              "be averaged.",
         right="(a + b) / 2", wrong="a", read=TWO_HEADS)
def _only_the_first_head(self, logits, dist_logits):
    return logits


@mistake("average_heads", "only the head of the distillation",
         says="In evaluation only the head of the distillation token is used; both heads' "
              "logits should be averaged.",
         right="(a + b) / 2", wrong="b", read=TWO_HEADS)
def _only_the_second_head(self, logits, dist_logits):
    return dist_logits


@mistake("average_heads", "mean of probabilities",
         says="In evaluation the probabilities of both heads are averaged; here the logits "
              "are, as in the authors' code.", convention=True,
         right="(a + b) / 2", wrong="(softmax(a) + softmax(b)) / 2", read=TWO_HEADS)
def _mean_of_probabilities(self, logits, dist_logits):
    return (logits.softmax(-1) + dist_logits.softmax(-1)) / 2


# %% mistakes with the position bias of windows
BIAS = "32_swin: The relative position bias"
SHIFT = "32_swin: Shifted windows"
WINDOWS = "32_swin: Windows"
SWIN = "32_swin: The block and the model"
OTHERS = "32_swin: Parity, and where others err"


@mistake("table_row", "offset negated",
         says="The bias is that of key minus query; it should be that of query minus key.",
         right="yᵢ - yⱼ, xᵢ - xⱼ", wrong="yⱼ - yᵢ, xⱼ - xᵢ", read=BIAS)
def _offset_negated(self, dy, dx):
    rows, columns = self.config.window_size
    return (rows - 1 - dy) * (2 * columns - 1) + columns - 1 - dx


@mistake("table_row", "rows and columns of the table exchanged",
         says="The table is ordered by columns first; it should have all offsets of columns "
              "for the first offset of rows, then for the second, and so on.",
         right="Δy (2 M_w - 1) + Δx", wrong="Δx (2 Mₕ - 1) + Δy", read=BIAS)
def _table_transposed(self, dy, dx):
    rows, columns = self.config.window_size
    return (dx + columns - 1) * (2 * rows - 1) + dy + rows - 1


@mistake("table_row", "factor of the window's width",
         says="The offset of rows is multiplied by M instead of 2M - 1, so that different "
              "offsets share a bias.",
         right="Δy (2M - 1) + Δx", wrong="Δy M + Δx", read=BIAS)
def _factor_of_the_window(self, dy, dx):
    rows, columns = self.config.window_size
    return (dy + rows - 1) * columns + dx + columns - 1


@mistake("table_row", "factor of the other axis",
         says="The offset of rows is multiplied by 2 Mₕ - 1; a row of the table has 2 M_w - 1 "
              "offsets of columns.",
         right="Δy (2 M_w - 1) + Δx", wrong="Δy (2 Mₕ - 1) + Δx", read=BIAS)
def _factor_of_the_other_axis(self, dy, dx):
    rows, columns = self.config.window_size
    return (dy + rows - 1) * (2 * rows - 1) + dx + columns - 1


@mistake("table_row", "offsets added without a factor",
         says="The offsets of rows and columns are added, so that different offsets share a "
              "bias; the one of rows should be multiplied by 2 M_w - 1 first.",
         right="Δy (2 M_w - 1) + Δx", wrong="Δy + Δx", read=BIAS)
def _offsets_added(self, dy, dx):
    rows, columns = self.config.window_size
    return dy + rows - 1 + dx + columns - 1


@mistake("table_row", "offsets not counted from zero",
         says="The offsets are not shifted to begin with zero, so that negative ones count "
              "from the end of the table.",
         right="(Δy + Mₕ - 1)(2 M_w - 1) + Δx + M_w - 1", wrong="Δy (2 M_w - 1) + Δx",
         read=BIAS)
def _offsets_not_from_zero(self, dy, dx):
    return dy * (2 * self.config.window_size[1] - 1) + dx


@mistake("table_row", "distances instead of offsets",
         says="The bias depends on |Δy| and |Δx|; it should tell left from right and above "
              "from below.",
         right="Δy, Δx", wrong="|Δy|, |Δx|", read=BIAS)
def _distances(self, dy, dx):
    rows, columns = self.config.window_size
    return (dy.abs() + rows - 1) * (2 * columns - 1) + dx.abs() + columns - 1


@mistake("offsets", "tokens of a window numbered column by column",
         says="For the bias, tokens of a window are numbered column by column (meshgrid with "
              "“xy”); in the windows they are in rows.",
         right="meshgrid(..., indexing='ij')", wrong="meshgrid(..., indexing='xy')", read=BIAS)
def _tokens_numbered_by_column(self):
    height, width = self.window()
    y = torch.arange(height).repeat(width)
    x = torch.arange(width).repeat_interleave(height)
    return y[:, None] - y, x[:, None] - x


@mistake("by_head", "bias by view instead of permute",
         says="The bias (N, N, h) is viewed as (h, N, N), which mixes heads and tokens; its "
              "axes must be permuted.",
         right="bias.permute(2, 0, 1)", wrong="bias.view(h, N, N)", read=BIAS)
def _bias_by_view(self, bias):
    return bias.reshape(bias.shape[2], bias.shape[0], bias.shape[1])


@mistake("by_head", "one bias for all heads",
         says="All heads get the bias of the first; each has its own.",
         right="bias[h]", wrong="bias[0]", read=BIAS)
def _one_bias_for_all_heads(self, bias):
    return bias[..., 0].expand(bias.shape[2], -1, -1)


@mistake("add_bias", "no position bias", lacks=("table",),
         says="The logits have no relative position bias.",
         right="softmax(q kᵀ / √d + B)", wrong="softmax(q kᵀ / √d)", read=BIAS)
def _no_position_bias(self, logits):
    return logits


@mistake("add_bias", "position bias not used",
         says="The layer has a relative position bias and does not add it.",
         right="softmax(q kᵀ / √d + B)", wrong="softmax(q kᵀ / √d)", read=BIAS)
def _position_bias_not_used(self, logits):
    return logits


@mistake("add_bias", "position bias scaled",
         says="The bias is added before the logits are scaled; it should be added behind.",
         right="q kᵀ / √d + B", wrong="(q kᵀ + B) / √d", read=BIAS)
def _position_bias_scaled(self, logits):
    width = self.weight("q.weight").shape[0] // logits.shape[1]
    return logits + self.position_bias() * width**-0.5


@mistake("add_bias", "position bias subtracted",
         says="The bias is subtracted from the logits; it should be added.",
         right="q kᵀ / √d + B", wrong="q kᵀ / √d - B", read=BIAS)
def _position_bias_subtracted(self, logits):
    return logits - self.position_bias()


@mistake("add_bias", "position bias is not trained",
         says="The table of biases gets no gradient, as when it is not a parameter.",
         right="nn.Parameter(table)", wrong="table.detach()", read=BIAS)
def _position_bias_not_trained(self, logits):
    return logits + self.position_bias().detach()


@mistake("window_weights", "position bias behind the softmax",
         says="The bias is added to the weights behind the softmax; it belongs to the logits.",
         right="softmax(q kᵀ / √d + B) v", wrong="(softmax(q kᵀ / √d) + B) v", read=BIAS)
def _bias_behind_the_softmax(self, logits, mask):
    return self.add_bias(self.attention_weights(logits, mask))


@mistake("window_weights", "mask multiplied with the logits",
         says="The mask is multiplied with the logits, so that what it forbids has the logit "
              "0; it should have -inf.",
         right="masked_fill(~mask, -inf)", wrong="logits * mask", read=SHIFT)
def _mask_multiplied(self, logits, mask):
    logits = self.add_bias(logits)
    if mask is not None:
        logits = logits * mask
    return self.softmax(logits)


# %% mistakes with shifted windows
@mistake("direction", "rolled down and to the right",
         says="The map is rolled down and to the right, with the mask for up and left; it "
              "should be rolled by the negative shift.",
         right="roll(x, (-s, -s))", wrong="roll(x, (s, s))", read=SHIFT)
def _rolled_down(self):
    return 1


@mistake("direction", "not rolled",
         says="The map is not rolled, although the mask of the shifted windows is used.",
         right="roll(x, (-s, -s))", wrong="x", read=SHIFT)
def _not_rolled(self):
    return 0


@mistake("rolled_axes", "rolled along batch and rows",
         says="The map (B, H, W, C) is rolled along axes 0 and 1, that is among the images; it "
              "should be along 1 and 2.",
         right="roll(x, shifts, dims=(1, 2))", wrong="roll(x, shifts, dims=(0, 1))", read=SHIFT)
def _rolled_among_images(self):
    return 0, 1


@mistake("rolled_axes", "rolled along columns and channels",
         says="The map (B, H, W, C) is rolled along axes 2 and 3, those of a map with channels "
              "first; it should be along 1 and 2.",
         right="roll(x, shifts, dims=(1, 2))", wrong="roll(x, shifts, dims=(2, 3))", read=SHIFT)
def _rolled_along_channels(self):
    return 2, 3


@mistake("roll_back", "not rolled back",
         says="The map is not rolled back behind the attention, so that the residual "
              "connection adds other tokens.",
         right="roll(x, (s, s))", wrong="x", read=SHIFT)
def _not_rolled_back(self, x, shift):
    return x


@mistake("roll_back", "rolled again instead of back",
         says="Behind the attention the map is rolled by the negative shift again; it should "
              "be rolled back.",
         right="roll(x, (s, s))", wrong="roll(x, (-s, -s))", read=SHIFT)
def _rolled_twice(self, x, shift):
    return x.roll((-shift[0], -shift[1]), dims=(1, 2))


@mistake("shift_of", "no shift",
         says="The windows are not shifted, so that tokens of different windows never meet.",
         right="shift = window // 2", wrong="shift = 0", read=SHIFT)
def _no_shift(self, padded, window):
    return 0, 0


@mistake("shift_of", "shift of a single window",
         says="The windows are shifted although one window has all tokens of an axis, which "
              "only splits it; no shift is needed then.",
         right="shift = 0 if the map has a single window", wrong="shift = window // 2",
         read=OTHERS)
def _shift_of_a_single_window(self, padded, window):
    return self.config.shift_size


@mistake("shift_of", "no shift along both axes", convention=True,
         says="If one window has all tokens of one axis, the other axis is not shifted either, "
              "as in the authors' code; here (as in timm) the axes are independent.",
         right="shift = 0 along an axis with one window", wrong="shift = 0 along both axes",
         read=OTHERS)
def _no_shift_along_both(self, padded, window):
    if padded[0] <= window[0] or padded[1] <= window[1]:
        return 0, 0
    return self.config.shift_size


@mistake("window_mask", "no mask of shifted windows",
         says="The shifted windows have no mask, so that tokens from opposite edges of the map "
              "see each other.",
         right="softmax(logits + mask)", wrong="softmax(logits)", read=SHIFT)
def _no_window_mask(self, size, window, shift):
    return None


@mistake("window_mask", "mask of the last window for all windows",
         says="All windows get the mask of the last one; each window has its own.",
         right="mask[window]", wrong="mask[-1]", read=SHIFT)
def _mask_of_the_last_window(self, size, window, shift):
    if not any(shift):
        return None
    regions = self.partition(self.regions(size, shift)[None, :, :, None], window)
    mask = regions == regions.transpose(1, 2)
    return mask[-1:].expand(len(mask), -1, -1)


@mistake("window_mask", "mask of the windows in another order",
         says="The masks of the windows are ordered column by column; the windows are ordered "
              "row by row.",
         right="windows row by row", wrong="windows column by column", read=SHIFT)
def _masks_by_column(self, size, window, shift):
    if not any(shift):
        return None
    regions = self.partition(self.regions(size, shift)[None, :, :, None], window)
    mask = regions == regions.transpose(1, 2)
    mask = mask.unflatten(0, (size[0] // window[0], size[1] // window[1]))
    return mask.transpose(0, 1).flatten(0, 1)


@mistake("regions", "mask of rows only",
         says="The mask separates rows from opposite edges, but not columns.",
         right="regions of rows and columns", wrong="regions of rows", read=SHIFT)
def _regions_of_rows(self, size, shift):
    rows = self.wrapped(size[0], shift[0])
    return rows[:, None].expand(size).long()


@mistake("regions", "mask of columns only",
         says="The mask separates columns from opposite edges, but not rows.",
         right="regions of rows and columns", wrong="regions of columns", read=SHIFT)
def _regions_of_columns(self, size, shift):
    columns = self.wrapped(size[1], shift[1])
    return columns[None, :].expand(size).long()


@mistake("regions", "regions share a number",
         says="The numbers of the regions of rows and columns are added, so that the lower "
              "left and the upper right region have the same; each needs its own.",
         right="0, 1, 2, 3", wrong="0, 1, 1, 2", read=SHIFT)
def _regions_share_a_number(self, size, shift):
    rows = self.wrapped(size[0], shift[0])
    columns = self.wrapped(size[1], shift[1])
    return rows[:, None].long() + columns[None, :].long()


@mistake("regions", "mask of another map",
         says="The mask is that of a map with height and width exchanged.",
         right="regions (H, W)", wrong="regions (W, H)", read=SHIFT)
def _regions_of_another_map(self, size, shift):
    rows = self.wrapped(size[1], shift[0])
    columns = self.wrapped(size[0], shift[1])
    regions = 2 * rows[:, None] + columns[None, :]
    return regions.reshape(size)


@mistake("wrapped", "mask of the map before the roll",
         says="The mask separates the first rows and columns of the map, where they were "
              "before the roll; behind it they are the last ones.",
         right="the last s rows", wrong="the first s rows", read=SHIFT)
def _wrapped_first(self, length, shift):
    return torch.arange(length) < shift


@mistake("mask_of_batch", "masks in the order of another batch",
         says="Each mask is repeated for all images before the next one; windows have all "
              "masks of the first image, then those of the second.",
         right="mask.repeat(B, 1, 1)", wrong="mask.repeat_interleave(B, 0)", read=SHIFT)
def _masks_interleaved(self, mask, windows):
    return mask.repeat_interleave(len(windows) // len(mask), 0)[:, None]


@mistake("windows_first", "windows by reshape alone",
         says="The map is reshaped to windows and back without moving axes, so that a “window” "
              "is a run of tokens of a row instead of a square.",
         right="(B, Y, y, X, x, C) -> (B, Y, X, y, x, C)", wrong="x.reshape(-1, M M, C)",
         read=WINDOWS)
def _windows_by_reshape(self, x):
    return x


@mistake("put_together", "windows put together by reshape alone",
         says="The windows are reshaped to a map without moving axes, so that tokens come to "
              "lie elsewhere than they were.",
         right="(B, Y, X, y, x, C) -> (B, Y, y, X, x, C)", wrong="x.reshape(B, H, W, C)",
         read=WINDOWS)
def _put_together_by_reshape(self, x, window, size):
    return x.reshape(-1, size[0], size[1], x.shape[-1])


@mistake("partition", "tokens of a window column by column",
         says="The tokens of each window are in columns, but for the bias, the mask, and the "
              "way back they are in rows.",
         right="(y x)", wrong="(x y)", read=WINDOWS)
def _window_by_column(self, x, window):
    x = x.unflatten(2, (-1, window[1]))
    x = x.unflatten(1, (-1, window[0]))
    return x.permute(0, 1, 3, 4, 2, 5).reshape(-1, window[0] * window[1], x.shape[-1])


@mistake("partition", "windows of tokens far apart",
         says="The map is split as (M, H / M) instead of (H / M, M), so that a window has "
              "tokens at a distance, as a grid does.",
         right="(Y y) (X x)", wrong="(y Y) (x X)", read=WINDOWS)
def _windows_as_grid(self, x, window):
    x = x.unflatten(2, (window[1], -1))
    x = x.unflatten(1, (window[0], -1))
    return x.permute(0, 2, 4, 1, 3, 5).reshape(-1, window[0] * window[1], x.shape[-1])


@mistake("pad", "padded above and on the left",
         says="A map that has no whole number of windows gets zeros above and on the left; "
              "they belong below and on the right.",
         right="F.pad(x, (0, 0, 0, columns, 0, rows))",
         wrong="F.pad(x, (0, 0, columns, 0, rows, 0))", read="32_swin: The layer")
def _padded_above(self, x, rows, columns):
    return F.pad(x, (0, 0, columns, 0, rows, 0))


@mistake("crop", "wrong part of the padded map kept",
         says="Behind the attention, the lower right part of the padded map is kept; the upper "
              "left part is the map.",
         right="x[:, :H, :W]", wrong="x[:, -H:, -W:]", read="32_swin: The layer")
def _lower_right_kept(self, x, size):
    return x[:, -size[0]:, -size[1]:]


@mistake("window_of", "small maps padded to the window", convention=True,
         says="A map that is smaller than the window is padded to it, as in torchvision; here "
              "the window shrinks to the map, as in timm.",
         right="window = min(M, H)", wrong="window = M, with zeros", read=OTHERS)
def _small_maps_padded(self, size):
    return self.config.window_size


# %% mistakes with merging and stages
PYRAMID = "32_swin: A pyramid of maps"


@mistake("squares", "merged row by row", convention=True,
         says="The tokens of a square are joined row by row; in the published weights their "
              "order is upper left, lower left, upper right, lower right.",
         right="(0, 0), (1, 0), (0, 1), (1, 1)", wrong="(0, 0), (0, 1), (1, 0), (1, 1)",
         read=PYRAMID)
def _merged_by_row(self, x):
    return [x[:, 0::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 0::2], x[:, 1::2, 1::2]]


@mistake("squares", "quarters merged instead of squares",
         says="The four quarters of the map are joined; it should be the four neighbors of "
              "each square of 2 by 2.",
         right="x[:, 0::2, 0::2], …", wrong="x[:, : H / 2, : W / 2], …", read=PYRAMID)
def _quarters_merged(self, x):
    h = x.shape[1] // 2
    w = x.shape[2] // 2
    return [x[:, :h, :w], x[:, h:, :w], x[:, :h, w:], x[:, h:, w:]]


@mistake("squares", "merged by reshape alone",
         says="The map is reshaped to (B, H / 2, W / 2, 4 C), which joins four tokens of a "
              "row; it should join those of a square.",
         right="cat of x[:, 0::2, 0::2], …", wrong="x.reshape(B, H / 2, W / 2, 4 C)",
         read=PYRAMID)
def _merged_by_reshape(self, x):
    batch, rows, columns, width = x.shape
    return list(x.reshape(batch, rows // 2, columns // 2, 4 * width).chunk(4, dim=-1))


@mistake("squares", "the same token twice",
         says="Two of the four slices are the same, so that a quarter of the tokens is lost.",
         right="(0, 0), (1, 0), (0, 1), (1, 1)", wrong="(0, 0), (1, 0), (0, 1), (0, 1)",
         read=PYRAMID)
def _same_token_twice(self, x):
    return [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 0::2, 1::2]]


@mistake("merging", "norm of merging on the other side",
         says="Norm and reduction are exchanged; Swin normalizes the 4C channels before it "
              "reduces them, and Swin V2 afterwards.",
         right="reduction(norm(x))", wrong="norm(reduction(x))", read=PYRAMID)
def _merging_in_another_order(self, x):
    x = self.join_square(self.squares(self.even(x)))
    x = self.linear("reduction", x)
    width = x.shape[-1]
    gain = self.weight("norm.weight")
    x = self.center(x) / self.spread(self.center(x))
    return x if gain is None or len(gain) != width else x * gain


@mistake("join_square", "merged by channel", convention=True,
         says="The four values of each channel are side by side, as nn.Unfold and "
              "pixel_unshuffle order them; in the published weights all channels of a token "
              "are.",
         right="(4 C)", wrong="(C 4)", read=PYRAMID)
def _merged_by_channel(self, squares):
    first, below, right, last = squares
    return torch.stack([first, right, below, last], dim=-1).flatten(-2)


@mistake("even", "odd maps padded above and on the left",
         says="A map of odd size gets zeros above and on the left before it is merged; they "
              "belong below and on the right.",
         right="F.pad(x, (0, 0, 0, 1, 0, 1))", wrong="F.pad(x, (0, 0, 1, 0, 1, 0))",
         read=PYRAMID)
def _even_above(self, x):
    return F.pad(x, (0, 0, x.shape[2] % 2, 0, x.shape[1] % 2, 0))


@mistake("merging_norm", "merged patches not normalized",
         says="Patch merging has a norm and does not use it.",
         right="W norm(x)", wrong="W x", read=PYRAMID)
def _merging_without_norm(self, x):
    return x


@mistake("reduce_patches", "activation in patch merging",
         says="A GELU follows the projection of patch merging, which should be linear.",
         right="W norm(x)", wrong="gelu(W norm(x))", read=PYRAMID)
def _activated_merging(self, x):
    return F.gelu(self.linear("reduction", x))


@mistake("patch_norm", "patches not normalized", lacks=("patch_norm.weight", "patch_norm.bias"),
         says="The projected patches are not normalized; Swin has a norm behind the "
              "projection.",
         right="norm(W x + b)", wrong="W x + b", read=SWIN)
def _no_patch_norm(self, x):
    return x


@mistake("patch_norm", "norm of the patches not used",
         says="The model has a norm behind the projection of the patches and does not use it.",
         right="norm(W x + b)", wrong="W x + b", read=SWIN)
def _patch_norm_not_used(self, x):
    return x


@mistake("shifts", "even blocks shifted",
         says="The first block of each stage shifts its windows and the second does not; it "
              "should be the other way round.",
         right="shift if i % 2 == 1", wrong="shift if i % 2 == 0", read=SWIN)
def _even_blocks_shift(self, number):
    return number % 2 == 0


@mistake("shifts", "all blocks shifted",
         says="All blocks shift their windows; only every second one should.",
         right="shift if i % 2 == 1", wrong="shift", read=SWIN)
def _all_blocks_shift(self, number):
    return True


@mistake("shift_length", "shift of one token",
         says="The windows are shifted by one token; it should be half a window.",
         right="window // 2", wrong="1", read=SWIN)
def _shift_of_one(self, window):
    return min(1, window - 1)


@mistake("shift_length", "shift rounded up",
         says="The shift is half of the window rounded up; it should be rounded down.",
         right="window // 2", wrong="(window + 1) // 2", read=SWIN)
def _shift_rounded_up(self, window):
    return min((window + 1) // 2, window - 1)


@mistake("pool_map", "maximum over the map",
         says="The head reads the maximum over the map; it should read the mean.",
         right="x.mean((1, 2))", wrong="x.amax((1, 2))", read=SWIN)
def _maximum_of_map(self, x):
    return x.amax((1, 2))


@mistake("pool_map", "first token of the map",
         says="The head reads the first token, as if it were a class token; it should read "
              "the mean of all.",
         right="x.mean((1, 2))", wrong="x[:, 0, 0]", read=SWIN)
def _first_token_of_map(self, x):
    return x[:, 0, 0]


@mistake("pool_map", "sum over the map",
         says="The head reads the sum over the map; it should read the mean.",
         right="x.mean((1, 2))", wrong="x.sum((1, 2))", read=SWIN)
def _sum_of_map(self, x):
    return x.sum((1, 2))


@mistake("norm_and_pool_map", "norm behind the mean", convention=True,
         says="The norm follows the mean over the map; in Swin it stands before.",
         right="norm(x).mean((1, 2))", wrong="norm(x.mean((1, 2)))", read=SWIN)
def _norm_behind_the_mean(self, x):
    return self.final_norm(self.pool_map(x))


# %% mistakes with swin v2
COSINE = "33_swinv2: Scaled cosine attention"
CONTINUOUS = "33_swinv2: A bias that is a function of the offset"
V2_NORM = "33_swinv2: The norm moves to the end of the branch"


@mistake("cosine_logits", "dot products instead of cosines", lacks=("logit_scale",),
         says="The logits are scaled dot products, as in Swin; they should be cosines with a "
              "learned temperature.",
         right="cos(q, k) / τ", wrong="q kᵀ / √d", read=COSINE)
def _dot_products(self, q, k):
    return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5


@mistake("cosines", "queries and keys not normalized before the temperature",
         says="The temperature multiplies dot products; queries and keys should have length 1.",
         right="cos(q, k) / τ", wrong="q kᵀ / τ", read=COSINE)
def _no_cosines(self, q, k):
    return q @ k.transpose(-2, -1)


@mistake("cosines", "only queries normalized",
         says="Queries have length 1, but keys do not; both should.",
         right="q kᵀ / (|q| |k|)", wrong="q kᵀ / |q|", read=COSINE)
def _only_queries_normalized(self, q, k):
    return self.unit(q) @ k.transpose(-2, -1)


@mistake("cosines", "cosines divided by the root of the width",
         says="The cosines are divided by √d as well; the temperature replaces this scale.",
         right="cos(q, k) / τ", wrong="cos(q, k) / (τ √d)", read=COSINE)
def _cosines_scaled(self, q, k):
    return self.unit(q) @ self.unit(k).transpose(-2, -1) * q.shape[-1] ** -0.5


@mistake("unit", "normalized over the tokens",
         says="Queries and keys are normalized over the tokens of a window (axis -2); it "
              "should be over the channels of a head (axis -1).",
         right="normalize(q, dim=-1)", wrong="normalize(q, dim=-2)", read=COSINE)
def _normalized_over_tokens(self, x):
    return F.normalize(x, dim=-2)


@mistake("unit", "normalized over all heads",
         says="Queries and keys are normalized before they are split into heads; each head's "
              "should have length 1.",
         right="normalize(q of a head)", wrong="normalize(q)", read=COSINE)
def _normalized_over_heads(self, x):
    return F.normalize(x, dim=(1, 3))


@mistake("temperature", "no clamp of the temperature",
         says="The learned scale of the cosines is not clamped; it should be at most 100.",
         right="exp(min(s, log 100))", wrong="exp(s)", read=COSINE)
def _no_clamp(self, logit_scale):
    return logit_scale.exp()


@mistake("temperature", "clamp behind the exponential",
         says="The exponential is clamped to log 100; the logarithm should be.",
         right="exp(min(s, log 100))", wrong="min(exp(s), log 100)", read=COSINE)
def _clamp_behind_exp(self, logit_scale):
    return logit_scale.exp().clamp(max=math.log(100))


@mistake("temperature", "clamp from below",
         says="The scale is clamped to at least 100; it should be at most 100.",
         right="clamp(s, max=log 100)", wrong="clamp(s, min=log 100)", read=COSINE)
def _clamp_from_below(self, logit_scale):
    return logit_scale.clamp(min=math.log(100)).exp()


@mistake("temperature", "decimal logarithm in the clamp",
         says="The scale is clamped with the decimal logarithm, 2; it should be the natural "
              "one, 4.6.",
         right="min(s, ln 100)", wrong="min(s, log₁₀ 100)", read=COSINE)
def _decimal_clamp(self, logit_scale):
    return logit_scale.clamp(max=2.0).exp()


@mistake("temperature", "no exponential of the scale",
         says="The cosines are multiplied by the learned logarithm itself; it should be its "
              "exponential.",
         right="exp(min(s, log 100))", wrong="min(s, log 100)", read=COSINE)
def _no_exponential(self, logit_scale):
    return logit_scale.clamp(max=math.log(100))


@mistake("temperature", "divided by the scale",
         says="The cosines are divided by the exponential of the learned scale; they should "
              "be multiplied by it.",
         right="cos(q, k) exp(s)", wrong="cos(q, k) / exp(s)", read=COSINE)
def _divided_by_scale(self, logit_scale):
    return 1 / logit_scale.clamp(max=math.log(100)).exp()


@mistake("relative", "offsets not relative to the window",
         says="The offsets are not divided by the largest one of the window, M - 1.",
         right="Δ / (M - 1)", wrong="Δ", read=CONTINUOUS)
def _offsets_not_relative(self, offset, length):
    return offset


@mistake("relative", "offsets relative to the window's length",
         says="The offsets are divided by M; they should be divided by the largest one, M - 1.",
         right="Δ / (M - 1)", wrong="Δ / M", read=CONTINUOUS)
def _offsets_by_length(self, offset, length):
    return offset / length


@mistake("relative", "offsets relative to the present window",
         says="The offsets are divided by the largest one of the present window; it should be "
              "that of the window for which the weights were trained.",
         right="Δ / (M_trained - 1)", wrong="Δ / (M - 1)", read=CONTINUOUS)
def _offsets_of_present_window(self, offset, length):
    return offset / offset.max().clamp(min=1)


@mistake("spacing", "linear coordinates",
         says="The bias network sees linear coordinates; they should be logarithmic.",
         right="sign(x) log₂(1 + 8 |x|) / 3", wrong="x", read=CONTINUOUS)
def _linear_coordinates(self, x):
    return x


@mistake("spacing", "coordinates not divided by log₂ 8",
         says="The logarithm of the coordinates is not divided by log₂ 8 = 3.",
         right="log₂(1 + 8 |x|) / 3", wrong="log₂(1 + 8 |x|)", read=CONTINUOUS)
def _logarithm_not_divided(self, x):
    return x.sign() * torch.log2(1 + 8 * x.abs())


@mistake("spacing", "coordinates as in the paper", convention=True,
         says="The coordinates are sign(x) ln(1 + |x|), as in the paper's equation 4; the "
              "authors' code has a factor 8 and another base.",
         right="sign(x) log₂(1 + 8 |x|) / 3", wrong="sign(x) ln(1 + |x|)", read=CONTINUOUS)
def _natural_logarithm(self, x):
    return x.sign() * x.abs().log1p()


@mistake("spacing", "no factor 8 in the coordinates",
         says="The relative offsets are not multiplied by 8 before the logarithm.",
         right="log₂(1 + 8 |x|) / 3", wrong="log₂(1 + |x|) / 3", read=CONTINUOUS)
def _no_factor_eight(self, x):
    return x.sign() * torch.log2(1 + x.abs()) / 3


@mistake("spacing", "natural logarithm divided by log₂ 8",
         says="The coordinates mix bases: a natural logarithm is divided by log₂ 8.",
         right="log₂(1 + 8 |x|) / log₂ 8", wrong="ln(1 + 8 |x|) / log₂ 8", read=CONTINUOUS)
def _mixed_bases(self, x):
    return x.sign() * torch.log1p(8 * x.abs()) / 3


@mistake("spacing", "sign of the offset lost",
         says="The logarithmic coordinates lose their sign, so that left and right are the "
              "same.",
         right="sign(x) log₂(1 + 8 |x|) / 3", wrong="log₂(1 + 8 |x|) / 3", read=CONTINUOUS)
def _sign_lost(self, x):
    return torch.log2(1 + 8 * x.abs()) / 3


@mistake("coordinates", "coordinates exchanged",
         says="The bias network is given column and row; the published weights expect row and "
              "column.",
         right="(Δy, Δx)", wrong="(Δx, Δy)", read=CONTINUOUS)
def _coordinates_exchanged(self, dy, dx):
    return torch.stack([dx, dy], dim=-1)


@mistake("network_activation", "GELU in the bias network",
         says="The bias network has a GELU; it should have a ReLU.",
         right="W₂ relu(W₁ x + b)", wrong="W₂ gelu(W₁ x + b)", read=CONTINUOUS)
def _gelu_in_bias_network(self, x):
    return F.gelu(x)


@mistake("network_activation", "no activation in the bias network",
         says="The bias network has no activation and is linear; it should have a ReLU.",
         right="W₂ relu(W₁ x + b)", wrong="W₂ (W₁ x + b)", read=CONTINUOUS)
def _linear_bias_network(self, x):
    return x


@mistake("squash", "bias without 16 σ",
         says="The output of the bias network is added itself; it should pass 16 · sigmoid.",
         right="16 σ(MLP)", wrong="MLP", read=CONTINUOUS)
def _bias_not_squashed(self, x):
    return x


@mistake("squash", "no factor 16 of the bias",
         says="The sigmoid of the bias is not multiplied by 16.",
         right="16 σ(MLP)", wrong="σ(MLP)", read=CONTINUOUS)
def _no_factor_sixteen(self, x):
    return x.sigmoid()


@mistake("squash", "factor 16 inside the sigmoid",
         says="The factor 16 is inside the sigmoid; it should be outside.",
         right="16 σ(MLP)", wrong="σ(16 MLP)", read=CONTINUOUS)
def _sixteen_inside(self, x):
    return (16 * x).sigmoid()


@mistake("norm_place", "norm at the start of the branch",
         says="The norms stand before attention and MLP, as in Swin; in Swin V2 they are at "
              "the ends of the branches.",
         right="x + norm(f(x))", wrong="x + f(norm(x))", read=V2_NORM)
def _norm_at_the_start(self):
    return "start of the branch"


@mistake("norm_place", "norm behind the sum",
         says="The norms follow the sums, as in the Transformer of 2017; in Swin V2 they are "
              "at the ends of the branches.",
         right="x + norm(f(x))", wrong="norm(x + f(x))", read=V2_NORM)
def _norm_behind_the_sum(self):
    return "behind the sum"


# %% mistakes with words
WORDS = "34_tnt: From pixels to words"
WORD_BLOCK = "34_tnt: A block"


@mistake("flatten_words", "words by channel", convention=True,
         says="The words of a sentence are flattened channel by channel; the projection of the "
              "published weights expects word by word.",
         right="(m c)", wrong="(c m)", read=WORD_BLOCK)
def _words_by_channel(self, words):
    return words.transpose(1, 2).flatten(1)


@mistake("add_words", "words replace the sentences",
         says="The projected words replace the sentences; they should be added to them.",
         right="sentence + words", wrong="words", read=WORD_BLOCK)
def _words_replace(self, sentences, added):
    return torch.cat([sentences[:, :1], added], dim=1)


@mistake("add_words", "words added one token too early",
         says="The words of patch i are added to token i, so that the class token gets those "
              "of the first patch; patch i is token i + 1.",
         right="sentences[:, 1:] + words", wrong="sentences[:, :-1] + words", read=WORD_BLOCK)
def _words_too_early(self, sentences, added):
    return torch.cat([sentences[:, :-1] + added, sentences[:, -1:]], dim=1)


@mistake("add_words", "words not added",
         says="The words are never added to the sentences.",
         right="sentence + words", wrong="sentence", read=WORD_BLOCK)
def _words_not_added(self, sentences, added):
    return sentences


@mistake("add_words", "words are not trained",
         says="No gradient reaches the words, as when they are detached before they are added.",
         right="sentence + words", wrong="sentence + words.detach()", read=WORD_BLOCK)
def _words_detached(self, sentences, added):
    return torch.cat([sentences[:, :1], sentences[:, 1:] + added.detach()], dim=1)


@mistake("words_for_sentences", "words before their block",
         says="The words are added to the sentences as they were before the inner block; it "
              "should be as they are behind it.",
         right="inner, then add", wrong="add, then inner", read=WORD_BLOCK)
def _words_of_before(self, before, after):
    return before


@mistake("words_passed_on", "words not passed on",
         says="Every block begins with the first words; it should continue with those of the "
              "block before.",
         right="words, x = block(words, x)", wrong="_, x = block(words, x)", read=WORD_BLOCK)
def _words_not_passed_on(self, before, after):
    return before


@mistake("heads_of", "numbers of heads exchanged",
         says="The words have the number of heads of the sentences and the other way round.",
         right="inner heads among words", wrong="outer heads among words", read=WORD_BLOCK)
def _heads_of_the_other(self, among_words):
    return self.config.num_heads if among_words else self.config.word_heads


@mistake("norm_of_projected_words", "projected words not normalized",
         lacks=("proj_norm2.weight", "proj_norm2.bias"),
         says="The projected words are not normalized before they are added.",
         right="norm(W norm(words))", wrong="W norm(words)", read=WORD_BLOCK)
def _projected_words_not_normalized(self, x):
    return x


@mistake("words_of", "words from the whole image", convention=True,
         says="The convolution runs over the whole image and reads neighboring patches, as in "
              "the authors' first code (legacy); here each patch is cut out first.",
         right="conv(patches)", wrong="patches of conv(image)", read=WORDS)
def _words_from_the_image(self, images):
    words = F.conv2d(images, self.weight("patch.weight"), self.weight("patch.bias"),
                     stride=self.config.stride, padding=3)
    p, q = self.config.patch_size
    words = words.unflatten(3, (-1, q // self.config.stride))
    words = words.unflatten(2, (-1, p // self.config.stride))
    return words.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


@mistake("place_words", "no positions of words", lacks=("word_pos",),
         says="The words have no positions in their sentence.",
         right="words + pos", wrong="words", read="34_tnt: Two kinds of position")
def _no_word_positions(self, words):
    return words


@mistake("place_words", "positions of words transposed",
         says="The positions of the words are exchanged across the diagonal of a patch.",
         right="words + pos", wrong="words + pos.mT", read="34_tnt: Two kinds of position")
def _word_positions_transposed(self, words):
    return words + self.weight("word_pos").mT


# %% mistakes with masked images
UNSHUFFLE = "40_mae: No order to restore"
PIXELS = "40_mae: Images as rows of pixels"
LOSS = "40_mae: What the loss asks for"


@mistake("restore", "unshuffled by the shuffling order",
         says="The tokens are gathered by ids_shuffle, or scattered by ids_restore; they "
              "should be gathered by ids_restore.",
         right="gather(x, ids_restore)", wrong="gather(x, ids_shuffle)", read=UNSHUFFLE)
def _unshuffled_by_shuffle(self, x, order):
    return x.take_along_dim(order.argsort(1)[..., None], dim=1)


@mistake("restore", "not unshuffled",
         says="The visible tokens stay in front and the mask tokens behind; each must be put "
              "in its place.",
         right="gather(x, ids_restore)", wrong="x", read=UNSHUFFLE)
def _not_unshuffled(self, x, order):
    return x


@mistake("restore", "unshuffled by the first image's order",
         says="All images are restored in the order of the first; each has its own.",
         right="ids_restore[b]", wrong="ids_restore[0]", read=UNSHUFFLE)
def _first_order_for_all(self, x, order):
    return x[:, order[0]]


@mistake("fill", "mask tokens in front",
         says="The mask tokens come before the visible ones, but the order expects them "
              "behind.",
         right="cat([visible, mask])", wrong="cat([mask, visible])", read=UNSHUFFLE)
def _mask_tokens_in_front(self, visible, mask_token, count):
    mask_tokens = mask_token.expand(visible.shape[0], count, -1)
    return torch.cat([mask_tokens, visible], dim=1)


@mistake("fill", "zeros instead of the mask token",
         says="Zeros stand in the places of hidden patches; it should be the learned mask "
              "token.",
         right="mask_token", wrong="0", read=UNSHUFFLE)
def _zeros_instead_of_mask_token(self, visible, mask_token, count):
    mask_tokens = torch.zeros_like(mask_token).expand(visible.shape[0], count, -1)
    return torch.cat([visible, mask_tokens], dim=1)


@mistake("fill", "mask token is not trained",
         says="The mask token gets no gradient, as when it is detached or not a parameter.",
         right="mask_token.expand(B, n, D)", wrong="mask_token.data.expand(B, n, D)",
         read=UNSHUFFLE)
def _mask_token_not_trained(self, visible, mask_token, count):
    mask_tokens = mask_token.detach().expand(visible.shape[0], count, -1)
    return torch.cat([visible, mask_tokens], dim=1)


@mistake("fill", "gradient of visible tokens cut",
         says="The visible tokens are detached before the decoder, so that the encoder is not "
              "trained.",
         right="visible", wrong="visible.detach()", read=UNSHUFFLE)
def _visible_tokens_detached(self, visible, mask_token, count):
    mask_tokens = mask_token.expand(visible.shape[0], count, -1)
    return torch.cat([visible.detach(), mask_tokens], dim=1)


@mistake("visible_order", "visible tokens in sorted places",
         says="The visible tokens are put in the visible places from the first to the last, as "
              "when x[~masked] = visible is used; they are in the order of the shuffle.",
         right="gather(x, ids_restore)", wrong="x[~masked] = visible", read=UNSHUFFLE)
def _visible_in_sorted_places(self, order, visible):
    hidden = order >= visible
    rank = (~hidden).cumsum(1) - 1
    return torch.where(hidden, order, rank)


@mistake("pixel_order", "channels first in a patch of pixels",
         says="The pixels of a patch are flattened as channel, row, column; in MAE the "
              "channels of a pixel are side by side.",
         right="(p q C)", wrong="(C p q)", read=PIXELS)
def _channels_first_in_pixels(self, x):
    return x.movedim(-1, 3).flatten(3)


@mistake("pixel_order", "pixels of a patch in columns",
         says="The pixels of a patch are flattened column by column; it should be row by row.",
         right="(p q C)", wrong="(q p C)", read=PIXELS)
def _pixels_in_columns(self, x):
    return x.transpose(3, 4).flatten(3)


@mistake("patch_order", "rows of pixels column by column",
         says="The patches are in a row column by column; they should be row by row.",
         right="(H' W')", wrong="(W' H')", read=PIXELS)
def _pixel_patches_by_column(self, x):
    return x.transpose(1, 2).flatten(1, 2)


@mistake("grid_of_pixels", "rows of pixels by reshape alone",
         says="The image is reshaped to (B, N, p·q·C) without moving axes.",
         right="(B, C, H', p, W', q) -> (B, H', W', p, q, C)", wrong="images.reshape(B, N, -1)",
         read=PIXELS)
def _pixels_by_reshape(self, images):
    p, q = self.config.patch_size
    batch, channels, height, width = images.shape
    return images.reshape(batch, height // p, width // q, p, q, channels)


@mistake("grid_of_pixels", "pixels of a row of patches mixed",
         says="The axes are moved as (H', p, W', q) -> (H', W', q, p) only in name: rows "
              "inside a patch and columns of patches are not exchanged.",
         right="(B, H', W', p, q, C)", wrong="(B, H', p, W', q, C) as (B, H', W', p, q, C)",
         read=PIXELS)
def _pixel_axes_not_exchanged(self, images):
    p, q = self.config.patch_size
    x = images.permute(0, 2, 3, 1)
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // p, width // q, p, q, channels)


@mistake("grid_of_pixels", "pixels far apart in a row of pixels",
         says="The image is split as (p, H') instead of (H', p), so that a “patch” has every "
              "H'-th pixel.",
         right="(h p) (w q)", wrong="(p h) (q w)", read=PIXELS)
def _scattered_pixels(self, images):
    p, q = self.config.patch_size
    x = images.unflatten(3, (q, -1))
    x = x.unflatten(2, (p, -1))
    return x.permute(0, 3, 5, 2, 4, 1)


@mistake("counted", "loss on visible patches",
         says="The loss is that of the visible patches; it should be that of the hidden ones.",
         right="error * masked", wrong="error * ~masked", read=LOSS)
def _loss_on_visible(self, masked):
    return ~masked


@mistake("counted", "loss on all patches",
         says="The loss is the mean over all patches; it should be over the hidden ones.",
         right="(error * masked).sum() / masked.sum()", wrong="error.mean()", read=LOSS)
def _loss_on_all(self, masked):
    return torch.ones_like(masked)


@mistake("average_error", "loss divided by all patches",
         says="The errors of the hidden patches are divided by the number of all patches; it "
              "should be that of the hidden ones.",
         right="(error * masked).sum() / masked.sum()", wrong="(error * masked).mean()",
         read=LOSS)
def _divided_by_all_patches(self, error, counted):
    return (error * counted).mean()


@mistake("average_error", "loss summed over the patches",
         says="The errors of the hidden patches are added; their mean should be taken.",
         right="(error * masked).sum() / masked.sum()", wrong="(error * masked).sum()",
         read=LOSS)
def _error_summed(self, error, counted):
    return (error * counted).sum()


@mistake("average_error", "mean of the images' means", convention=True,
         says="The mean is taken in each image and then over the images; here it is over all "
              "hidden patches of the batch, which differs if images have different numbers.",
         right="(error * masked).sum() / masked.sum()",
         wrong="((error * masked).sum(1) / masked.sum(1)).mean()", read=LOSS)
def _mean_of_images(self, error, counted):
    return ((error * counted).sum(1) / counted.sum(1)).mean()


@mistake("average_error", "loss divided by the images",
         says="The errors of the hidden patches are divided by the number of images; it should "
              "be that of the hidden patches.",
         right="(error * masked).sum() / masked.sum()", wrong="(error * masked).sum() / B",
         read=LOSS)
def _divided_by_images(self, error, counted):
    return (error * counted).sum() / len(error)


@mistake("patch_error", "error summed over the pixels",
         says="The squared errors of a patch's pixels are added; their mean should be taken.",
         right="error.mean(-1)", wrong="error.sum(-1)", read=LOSS)
def _error_of_pixels_summed(self, error):
    return error.sum(-1)


@mistake("patch_error", "root of the mean squared error",
         says="The root of the mean squared error of each patch is taken; it should be the "
              "mean itself.",
         right="error.mean(-1)", wrong="error.mean(-1).sqrt()", read=LOSS)
def _root_of_error(self, error):
    return error.mean(-1).sqrt()


@mistake("pixel_error", "absolute error",
         says="The loss is the absolute error; it should be the squared error.",
         right="(p - t)²", wrong="|p - t|", read=LOSS)
def _absolute_error(self, difference):
    return difference.abs()


@mistake("pixel_error", "half of the squared error",
         says="The squared error is halved; it should not be.",
         right="(p - t)²", wrong="(p - t)² / 2", read=LOSS)
def _half_squared_error(self, difference):
    return difference.square() / 2


@mistake("pixel_error", "smooth absolute error",
         says="The loss is the smooth L1 error, as in some followers of MAE; it should be the "
              "squared error.",
         right="(p - t)²", wrong="smooth_l1(p - t)", read=LOSS)
def _smooth_error(self, difference):
    return F.smooth_l1_loss(difference, torch.zeros_like(difference), reduction="none")


@mistake("normalize_pixels", "pixels not normalized",
         says="The target is the pixels themselves; with norm_pix_loss each patch should be "
              "normalized by its own mean and deviation.",
         right="(t - mean) / √(var + 1e-6)", wrong="t", read=LOSS)
def _pixels_not_normalized(self, x):
    return x


@mistake("normalize_pixels", "pixels only centered",
         says="The mean of each patch is subtracted, but it is not divided by its deviation.",
         right="(t - mean) / √(var + 1e-6)", wrong="t - mean", read=LOSS)
def _pixels_only_centered(self, x):
    return x - x.mean(-1, keepdim=True)


@mistake("normalize_pixels", "pixels normalized over the image",
         says="The target is normalized by mean and deviation of the whole image; it should be "
              "those of each patch.",
         right="mean over a patch", wrong="mean over the image", read=LOSS)
def _normalized_over_image(self, x):
    variance, mean = torch.var_mean(x, dim=(1, 2), keepdim=True)
    return (x - mean) / (variance + 1e-6).sqrt()


@mistake("normalize_pixels", "pixels normalized by channel",
         says="Each channel of a patch is normalized by itself; mean and deviation should be "
              "those of all its values.",
         right="mean over (p q C)", wrong="mean over (p q)", read=LOSS)
def _normalized_by_channel(self, x):
    p, q = self.config.patch_size
    x = x.unflatten(-1, (p * q, -1))
    variance, mean = torch.var_mean(x, dim=-2, keepdim=True)
    return ((x - mean) / (variance + 1e-6).sqrt()).flatten(-2)


@mistake("pixel_spread", "deviation of pixels with N",
         convention=True,
         says="The variance of a patch is divided by N; the authors' code divides it by N - 1.",
         right="Σ (t - mean)² / (N - 1)", wrong="Σ (t - mean)² / N", read=LOSS)
def _spread_with_n(self, centered):
    return (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@mistake("pixel_spread", "epsilon outside of the root of a patch", convention=True,
         says="The epsilon is added to the deviation of a patch; here it is added to the "
              "variance.",
         right="√(var + 1e-6)", wrong="√var + 1e-6", read=LOSS)
def _epsilon_outside(self, centered):
    return centered.square().sum(-1, keepdim=True).div(centered.shape[-1] - 1).sqrt() + 1e-6


@mistake("pixel_spread", "divided by the variance of pixels",
         says="Each patch is divided by its variance; it should be by its standard deviation.",
         right="√(var + 1e-6)", wrong="var + 1e-6", read=LOSS)
def _divided_by_variance(self, centered):
    return centered.square().sum(-1, keepdim=True) / (centered.shape[-1] - 1) + 1e-6


# %% mistakes with boxes
BOXES = "42_detr: Boxes"


@mistake("low_and_high", "size not halved",
         says="The whole width and height are subtracted from the center and added to it; it "
              "should be half of them.",
         right="c ± s / 2", wrong="c ± s", read=BOXES)
def _size_not_halved(self, center, size):
    return center - size, center + size


@mistake("low_and_high", "center taken for the upper left corner",
         says="The center is taken for the upper left corner.",
         right="c - s / 2, c + s / 2", wrong="c, c + s", read=BOXES)
def _center_as_corner(self, center, size):
    return center, center + size


@mistake("low_and_high", "size as the lower right corner",
         says="The upper left corner is right, but the lower right one is the center plus the "
              "whole size.",
         right="c - s / 2, c + s / 2", wrong="c - s / 2, c + s", read=BOXES)
def _second_corner_not_halved(self, center, size):
    return center - size / 2, center + size


@mistake("low_and_high", "size behind the upper left corner",
         says="The result is the upper left corner and the size; it should be both corners.",
         right="c - s / 2, c + s / 2", wrong="c - s / 2, s", read=BOXES)
def _corner_and_size(self, center, size):
    return center - size / 2, size


@mistake("low_and_high", "corners exchanged",
         says="The lower right corner comes first; it should be the upper left one.",
         right="c - s / 2, c + s / 2", wrong="c + s / 2, c - s / 2", read=BOXES)
def _corners_exchanged(self, center, size):
    return center + size / 2, center - size / 2


@mistake("low_and_high", "corners cut off at the image", convention=True,
         says="The corners are clamped to [0, 1]; here they may lie outside of the image.",
         right="c ± s / 2", wrong="(c ± s / 2).clamp(0, 1)", read=BOXES)
def _corners_clamped(self, center, size):
    return (center - size / 2).clamp(0, 1), (center + size / 2).clamp(0, 1)


@mistake("center_and_size", "width and height exchanged",
         says="Width and height are exchanged; the third value is the width.",
         right="(cx, cy, w, h)", wrong="(cx, cy, h, w)", read=BOXES)
def _size_exchanged(self, boxes):
    return boxes[..., :2], boxes[..., 2:].flip(-1)


@mistake("center_and_size", "values read as (cx, w, cy, h)",
         says="The values of a box are read as center x, width, center y, height; they are "
              "center x, center y, width, height.",
         right="(cx, cy, w, h)", wrong="(cx, w, cy, h)", read=BOXES)
def _values_interleaved(self, boxes):
    return boxes[..., 0::2], boxes[..., 1::2]


@mistake("corners", "corners as (x₀, x₁, y₀, y₁)",
         says="The result is left, right, top, bottom; it should be left, top, right, bottom.",
         right="(x₀, y₀, x₁, y₁)", wrong="(x₀, x₁, y₀, y₁)", read=BOXES)
def _corners_by_axis(self, low, high):
    return torch.stack([low, high], dim=-1).flatten(-2)


@mistake("corners", "corners as (y₀, x₀, y₁, x₁)",
         says="The result is top, left, bottom, right; it should be left, top, right, bottom.",
         right="(x₀, y₀, x₁, y₁)", wrong="(y₀, x₀, y₁, x₁)", read=BOXES)
def _rows_before_columns(self, low, high):
    return torch.cat([low.flip(-1), high.flip(-1)], dim=-1)


@mistake("overlap_area", "negative sides not clamped",
         says="The sides of the intersection are not clamped at 0, so that boxes that are "
              "apart in both directions have a positive intersection.",
         right="(high - low).clamp(min=0)", wrong="high - low", read=BOXES)
def _sides_not_clamped(self, sides):
    return sides.prod(-1)


@mistake("overlap_area", "area clamped instead of the sides",
         says="The area of the intersection is clamped at 0 instead of its sides, of which two "
              "negative ones have a positive product.",
         right="(high - low).clamp(min=0).prod(-1)", wrong="(high - low).prod(-1).clamp(min=0)",
         read=BOXES)
def _area_clamped(self, sides):
    return sides.prod(-1).clamp(min=0)


@mistake("overlap_area", "absolute sides of the intersection",
         says="The absolute values of the sides are multiplied; negative sides mean that the "
              "boxes do not meet, and should count as 0.",
         right="(high - low).clamp(min=0)", wrong="(high - low).abs()", read=BOXES)
def _absolute_sides(self, sides):
    return sides.abs().prod(-1)


@mistake("overlap", "hull instead of the intersection",
         says="The intersection is computed with minimum and maximum exchanged, which is the "
              "box around both.",
         right="max of lows, min of highs", wrong="min of lows, max of highs", read=BOXES)
def _hull_as_intersection(self, a, b):
    return torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])


@mistake("sides", "one pixel more",
         says="Each side is one longer, as for boxes of whole pixels; here coordinates are "
              "continuous.", convention=True,
         right="x₁ - x₀", wrong="x₁ - x₀ + 1", read=BOXES)
def _one_pixel_more(self, low, high):
    return high - low + 1


@mistake("area", "size read as corners",
         says="The third and fourth value are taken for width and height in the area of a "
              "box; they are its lower right corner.",
         right="(x₁ - x₀)(y₁ - y₀)", wrong="x₁ y₁", read=BOXES)
def _area_of_corners(self, boxes):
    return boxes[..., 2:].prod(-1)


@mistake("union", "intersection not subtracted",
         says="The union is the sum of both areas; the intersection is in both and must be "
              "subtracted once.",
         right="A + B - I", wrong="A + B", read=BOXES)
def _intersection_not_subtracted(self, first, second, intersection):
    return first + second


@mistake("union", "intersection added",
         says="The intersection is added to both areas; it must be subtracted once.",
         right="A + B - I", wrong="A + B + I", read=BOXES)
def _intersection_added(self, first, second, intersection):
    return first + second + intersection


@mistake("union", "intersection subtracted twice",
         says="The intersection is subtracted from both areas; it must be subtracted once.",
         right="A + B - I", wrong="A + B - 2 I", read=BOXES)
def _intersection_subtracted_twice(self, first, second, intersection):
    return first + second - 2 * intersection


@mistake("union", "smaller area instead of the union",
         says="The intersection is divided by the smaller area; it should be by the union.",
         right="I / (A + B - I)", wrong="I / min(A, B)", read=BOXES)
def _smaller_area(self, first, second, intersection):
    return torch.minimum(first, second)


@mistake("ratio", "1e-6 in the denominator", convention=True,
         says="The denominator has 1e-6 added against a division by zero.",
         right="I / U", wrong="I / (U + 1e-6)", read=BOXES)
def _ratio_with_1e6(self, part, whole):
    return part / (whole + 1e-6)


@mistake("ratio", "1e-7 in the denominator", convention=True,
         says="The denominator has 1e-7 added against a division by zero.",
         right="I / U", wrong="I / (U + 1e-7)", read=BOXES)
def _ratio_with_1e7(self, part, whole):
    return part / (whole + 1e-7)


@mistake("ratio", "1e-5 in the denominator", convention=True,
         says="The denominator has 1e-5 added against a division by zero.",
         right="I / U", wrong="I / (U + 1e-5)", read=BOXES)
def _ratio_with_1e5(self, part, whole):
    return part / (whole + 1e-5)


@mistake("around", "intersection instead of the hull",
         says="The hull is computed with minimum and maximum exchanged, which is the "
              "intersection.",
         right="min of lows, max of highs", wrong="max of lows, min of highs", read=BOXES)
def _intersection_as_hull(self, a, b):
    return torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])


@mistake("around", "hull from the larger of the upper left corners",
         says="The upper left corner of the hull is the maximum of both corners; it should be "
              "the minimum.",
         right="min of lows, max of highs", wrong="max of lows, max of highs", read=BOXES)
def _hull_from_larger_lows(self, a, b):
    return torch.maximum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])


@mistake("around", "hull to the smaller of the lower right corners",
         says="The lower right corner of the hull is the minimum of both corners; it should be "
              "the maximum.",
         right="min of lows, max of highs", wrong="min of lows, min of highs", read=BOXES)
def _hull_to_smaller_highs(self, a, b):
    return torch.minimum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])


@mistake("penalty", "penalty divided by the union",
         says="The empty part of the hull is divided by the union; it should be by the hull.",
         right="(H - U) / H", wrong="(H - U) / U", read=BOXES)
def _penalty_by_union(self, hull, union):
    return (hull - union) / union


@mistake("penalty", "share of the union instead of the empty part",
         says="The share of the union in the hull is subtracted; it should be the share of the "
              "empty part.",
         right="(H - U) / H", wrong="U / H", read=BOXES)
def _share_of_union(self, hull, union):
    return union / hull


@mistake("penalty", "penalty not divided",
         says="The area of the empty part of the hull is subtracted; it should be its share.",
         right="(H - U) / H", wrong="H - U", read=BOXES)
def _penalty_not_divided(self, hull, union):
    return hull - union


@mistake("combine", "penalty added",
         says="The penalty is added to the IoU; it should be subtracted.",
         right="IoU - (H - U) / H", wrong="IoU + (H - U) / H", read=BOXES)
def _penalty_added(self, iou, penalty):
    return iou + penalty


@mistake("combine", "loss instead of the value",
         says="The function returns 1 - GIoU, the loss; it should return GIoU itself.",
         right="IoU - (H - U) / H", wrong="1 - IoU + (H - U) / H", read=BOXES)
def _loss_of_giou(self, iou, penalty):
    return 1 - iou + penalty


@mistake("combine", "no penalty",
         says="The penalty is missing, so that the value is the plain IoU.",
         right="IoU - (H - U) / H", wrong="IoU", read=BOXES)
def _no_penalty(self, iou, penalty):
    return iou


@mistake("combine", "value moved to [0, 1]",
         says="The value is moved to the range [0, 1]; here it is in [-1, 1].",
         right="GIoU", wrong="(GIoU + 1) / 2", read=BOXES)
def _giou_moved(self, iou, penalty):
    return (iou - penalty + 1) / 2


# %% mistakes of the decoder
DECODER = "40_mae: The model"


@mistake("decoder_places", "no positions in the decoder",
         says="The decoder adds no positions, so that all mask tokens are the same.",
         right="x + decoder_pos", wrong="x", read=DECODER)
def _no_decoder_positions(self, x):
    return x


@mistake("decoder_places", "positions of the decoder twice",
         says="The positions of the decoder are added twice.",
         right="x + decoder_pos", wrong="x + 2 decoder_pos", read=DECODER)
def _decoder_positions_twice(self, x):
    return x + 2 * self.weight("pos")


@mistake("decoder_places", "no position for the class token in the decoder",
         says="The decoder adds positions to the patches only; the class token has one, too.",
         right="cat([cls, patches]) + pos", wrong="cat([cls, patches + pos])", read=DECODER)
def _no_decoder_position_of_class(self, x):
    return torch.cat([x[:, :1], x[:, 1:] + self.weight("pos")[1:]], dim=1)


@mistake("decoder_places", "positions of the decoder off by one",
         says="The patches get the first positions of the decoder, which begin with that of "
              "the class token.",
         right="patches + pos[1:]", wrong="patches + pos[:N]", read=DECODER)
def _decoder_positions_off(self, x):
    return torch.cat([x[:, :1], x[:, 1:] + self.weight("pos")[:-1]], dim=1)


@mistake("predicted_tokens", "pixels of the first tokens",
         says="Pixels are predicted from the first N tokens, which include the class token; it "
              "should be left out.",
         right="x[:, 1:]", wrong="x[:, :-1]", read=DECODER)
def _first_tokens_predicted(self, x):
    return x[:, :-1]


# %% mistakes with distillation losses
LOSSES = "31_deit: Two losses"
TEMPERATURE = "31_deit: What the temperature does"


@mistake("teach", "heads exchanged in the loss",
         says="The head of the classes learns from the teacher and the other one from the "
              "labels; it should be the other way round.",
         right="CE(cls, labels), CE(dist, teacher)", wrong="CE(dist, labels), CE(cls, teacher)",
         read=LOSSES)
def _heads_exchanged_in_the_loss(self, logits, dist_logits):
    return dist_logits, logits


@mistake("teach", "only the first head learns",
         says="The head of the classes learns from the labels and from the teacher; the second "
              "head should learn from the teacher.",
         right="CE(cls, labels), CE(dist, teacher)", wrong="CE(cls, labels), CE(cls, teacher)",
         read=LOSSES)
def _only_the_first_head_learns(self, logits, dist_logits):
    return logits, logits


@mistake("teach", "both learn from their mean",
         says="Labels and teacher are compared with the mean of both heads; each head has its "
              "own target.",
         right="CE(cls, labels), CE(dist, teacher)",
         wrong="CE and KL of (cls + dist) / 2", read=LOSSES)
def _mean_learns(self, logits, dist_logits):
    mean = (logits + dist_logits) / 2
    return mean, mean


@mistake("decisions", "teacher's probabilities instead of decisions",
         says="The second head learns the teacher's probabilities; in hard distillation it "
              "should learn its decisions.",
         right="CE(dist, argmax t)", wrong="CE(dist, softmax t)", read=LOSSES)
def _probabilities_of_the_teacher(self, teacher_logits):
    return teacher_logits.softmax(-1)


@mistake("mix_losses", "losses added",
         says="The two losses are added; each should count half.",
         right="(a + b) / 2", wrong="a + b", read=LOSSES)
def _losses_added(self, own, taught):
    return own + taught


@mistake("mix_losses", "only the labels count",
         says="The loss of the teacher is left out.",
         right="(a + b) / 2", wrong="a", read=LOSSES)
def _only_labels(self, own, taught):
    return own


@mistake("mix_losses", "only the teacher counts",
         says="The loss of the labels is left out.",
         right="(a + b) / 2", wrong="b", read=LOSSES)
def _only_teacher(self, own, taught):
    return taught


@mistake("gradient_scale", "no τ² in the loss",
         says="The divergence is not multiplied by τ², so that its gradient shrinks with the "
              "temperature.",
         right="τ² KL", wrong="KL", read=TEMPERATURE)
def _no_square_of_temperature(self):
    return 1.0


@mistake("gradient_scale", "τ instead of τ²",
         says="The divergence is multiplied by τ; it should be by τ².",
         right="τ² KL", wrong="τ KL", read=TEMPERATURE)
def _temperature_not_squared(self):
    return self.config.temperature


@mistake("soften", "temperature of the teacher only",
         says="Only the teacher's logits are divided by the temperature; the student's should "
              "be, too.",
         right="t / τ, s / τ", wrong="t / τ, s", read=TEMPERATURE)
def _only_teacher_softened(self, teacher, student):
    return teacher / self.config.temperature, student


@mistake("soften", "temperature of the student only",
         says="Only the student's logits are divided by the temperature; the teacher's should "
              "be, too.",
         right="t / τ, s / τ", wrong="t, s / τ", read=TEMPERATURE)
def _only_student_softened(self, teacher, student):
    return teacher, student / self.config.temperature


@mistake("soften", "multiplied by the temperature",
         says="The logits are multiplied by the temperature; they should be divided by it.",
         right="t / τ, s / τ", wrong="τ t, τ s", read=TEMPERATURE)
def _sharpened(self, teacher, student):
    return teacher * self.config.temperature, student * self.config.temperature


@mistake("soften", "no temperature",
         says="The logits are not divided by the temperature.",
         right="t / τ, s / τ", wrong="t, s", read=TEMPERATURE)
def _not_softened(self, teacher, student):
    return teacher, student


@mistake("divergence", "divergence the other way round",
         says="The divergence is that of the teacher from the student, KL(q ‖ p); it should be "
              "KL(p ‖ q) with the teacher p.",
         right="Σ p log(p / q)", wrong="Σ q log(q / p)", read=LOSSES)
def _divergence_reversed(self, log_p, log_q):
    return log_q.exp() * (log_q - log_p)


@mistake("divergence", "cross-entropy instead of the divergence",
         says="The cross-entropy with the teacher's probabilities is used, which has the same "
              "gradient but includes the teacher's entropy.", convention=True,
         right="Σ p log(p / q)", wrong="-Σ p log q", read=LOSSES)
def _cross_entropy_with_teacher(self, log_p, log_q):
    return -log_p.exp() * log_q


@mistake("divergence", "probabilities where kl_div expects logarithms",
         says="kl_div is given probabilities of the student; it expects their logarithms.",
         right="kl_div(log q, p)", wrong="kl_div(q, p)", read=LOSSES)
def _probabilities_in_kl(self, log_p, log_q):
    return log_p.exp() * (log_p - log_q.exp())


@mistake("average_divergence", "divergence divided by the images", convention=True,
         says="The divergence is divided by the number of images (batchmean), as its "
              "definition is; the authors' code also divides it by the number of classes.",
         right="Σ / (B C)", wrong="Σ / B", read=LOSSES)
def _divided_by_the_batch(self, divergence):
    return divergence.sum() / len(divergence)


@mistake("average_divergence", "divergence summed",
         says="The divergence is summed over the images; it should be a mean.",
         right="Σ / (B C)", wrong="Σ", read=LOSSES)
def _divergence_summed(self, divergence):
    return divergence.sum()
