"""Reference models in small steps, and mistakes, each of which replaces one step."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .attention import attention as library_attention
from .decoding import KVCache
from .gpt import GPT, GPT2_STYLE, CausalSelfAttention, GPTConfig
from .multihead import MultiHeadAttention
from .position import apply_rotary, sinusoidal_encoding
from .transformer import (CrossAttention, DecoderLayer, EncoderLayer, FeedForward,
                          SelfAttention, Transformer, label_smoothing_loss)
from .vit_variants import SwiGLU

# %% steps
class Stopped(Exception):
    """The run has reached the step after which it was to stop."""


class Steps:
    """A model in small methods, so that a mistake can replace one of them.

    Parameters
    ----------
    weights : dict of str to Tensor
        Values by role, such as "blocks.0.attn.q.weight". A role that is missing counts as a
        bias or a norm that the model does not have.
    **config
        Sizes and options; a class lists those it knows, with defaults, in `options`.
    """

    options: dict[str, Any] = {}

    def __init__(self, weights: dict[str, Tensor], **config: Any):
        self.weights = weights
        self.config = SimpleNamespace(**{**self.options, **config})
        self.scope = ""
        self.notes: dict[str, Tensor] = {}
        self.stop_after = ""

    def weight(self, name: str) -> Tensor | None:
        """The values of a role of the present part, or None."""
        return self.weights.get(self.scope + name)

    def note(self, name: str, value: Tensor) -> Tensor:
        """Keep an intermediate result under the name of its step, and return it."""
        self.notes.pop(self.scope + name, None)  # a name that comes again moves to the end
        self.notes[self.scope + name] = value
        if self.scope + name == self.stop_after:
            raise Stopped
        return value

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Let `weight` and `note` speak of a part, such as "blocks.0"."""
        before = self.scope
        self.scope = f"{before}{part}."
        try:
            yield
        finally:
            self.scope = before

    def run(self, *inputs: Tensor, **masks: Tensor) -> Tensor:
        """Return the output for the inputs of a probe."""
        raise NotImplementedError

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x Wᵀ + b with the weights of a role."""
        return F.linear(x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))


# %% norm
class NormSteps(Steps):
    """Layer norm or RMS norm."""

    options = dict(norm="layer", eps=1e-5)

    def eps(self) -> float:
        """The small number under the root."""
        return self.config.eps

    def norm_axis(self, x: Tensor) -> int:
        """The axis, or axes, of mean and variance."""
        return -1

    def center(self, x: Tensor) -> Tensor:
        """Subtract the mean."""
        return x - x.mean(self.norm_axis(x), keepdim=True)

    def spread(self, centered: Tensor) -> Tensor:
        """The standard deviation, or the root mean square."""
        variance = centered.square().mean(self.norm_axis(centered), keepdim=True)
        return (variance + self.eps()).sqrt()

    def is_centered(self) -> bool:
        """Whether the mean is subtracted."""
        return self.config.norm == "layer"

    def affine(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        """The learned gain and bias, where there are any."""
        if gain is not None:
            x = x * gain
        if bias is not None:
            x = x + bias
        return x

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Normalize x by the norm called `name`."""
        if self.is_centered():
            x = self.center(x)
        x = x / self.spread(x)
        x = self.affine(x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))
        return self.note(name, x)

    def run(self, x: Tensor) -> Tensor:
        """The norm of tokens."""
        return self.norm("norm", x)


# %% attention
class AttentionSteps(Steps):
    """Multi-head attention; `causal`, fewer heads of keys and values, and rotary positions are
    options."""

    options = dict(num_heads=1, num_kv_heads=None, causal=False, rotary=None, rope_base=10000.0)

    def project(self, name: str, x: Tensor) -> Tensor:
        """Queries, keys, or values: a linear layer."""
        return self.note(name, self.linear(name, x))

    def project_qkv(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of the context."""
        return self.project("q", x), self.project("k", context), self.project("v", context)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """(B, N, h d) -> (B, h, N, d)."""
        x = x.unflatten(-1, (heads, -1))
        return x.transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """(B, h, N, d) -> (B, N, h d)."""
        x = x.transpose(1, 2)
        return x.flatten(2)

    def first_position(self) -> int:
        """The position of the first token, where others were read before."""
        return 0

    def positions(self, n: int) -> Tensor:
        """The positions that rotate queries and keys."""
        return torch.arange(n, dtype=torch.float64) + self.first_position()

    def rope_base(self) -> float:
        """The base of the rotation's frequencies."""
        return self.config.rope_base

    def rope_exponents(self, d: int) -> Tensor:
        """One for each pair of channels of a head, from 0 to almost 1."""
        return torch.arange(0, d, 2, dtype=torch.float64) / d

    def frequencies(self, d: int) -> Tensor:
        """One for each pair of channels of a head."""
        return self.rope_base() ** -self.rope_exponents(d)

    def angles(self, n: int, d: int) -> Tensor:
        """The angles (n, d / 2) by which pairs are rotated."""
        return self.positions(n)[:, None] * self.frequencies(d)

    def pairing(self) -> str:
        """The channels that make a pair: "halves" or "pairs"."""
        return self.config.rotary

    def turn(self, first: Tensor, second: Tensor, cos: Tensor,
             sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate the points (first, second) counterclockwise."""
        return first * cos - second * sin, second * cos + first * sin

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate pairs of channels of queries or keys (B, h, N, d)."""
        angles = self.angles(*x.shape[-2:])
        cos = angles.cos()
        sin = angles.sin()
        if self.pairing() == "halves":  # channel i is paired with i + d/2
            first, second = x.chunk(2, dim=-1)
            return torch.cat(self.turn(first, second, cos, sin), dim=-1)
        first = x[..., 0::2]  # channel 2 i is paired with 2 i + 1
        second = x[..., 1::2]
        return torch.stack(self.turn(first, second, cos, sin), dim=-1).flatten(-2)

    def rotate_queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate both by their positions."""
        return self.rotate(q), self.rotate(k)

    def remember(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of earlier and new tokens: here the new ones only."""
        return k, v

    def share(self, x: Tensor) -> Tensor:
        """Repeat each head of keys or values for its group of query heads."""
        groups = self.config.num_heads // x.shape[1]
        return x.repeat_interleave(groups, dim=1)

    def scale(self, q: Tensor, k: Tensor) -> float:
        """The factor of the logits."""
        return q.shape[-1] ** -0.5

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """The scaled products of queries and keys."""
        return q @ k.transpose(-2, -1) * self.scale(q, k)

    def is_causal(self) -> bool:
        """Whether a causal mask is used."""
        return self.config.causal

    def causal_mask(self, n: int, m: int) -> Tensor:
        """True where a query may attend."""
        return torch.ones(n, m, dtype=torch.bool).tril(m - n)

    def hide(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Exclude what the mask, True where a query may attend, does not allow."""
        return logits.masked_fill(~mask, -math.inf)

    def softmax(self, logits: Tensor) -> Tensor:
        """Weights (B, h, N, M), whose rows sum to one."""
        return logits.softmax(-1)

    def attention_weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """The softmax of the logits that the mask allows."""
        if mask is not None:
            logits = self.note("masked logits", self.hide(logits, mask))
        return self.softmax(logits)

    def drop(self, weights: Tensor, mask: Tensor | None) -> Tensor:
        """The weights as they are used: here unchanged."""
        return weights

    def average(self, weights: Tensor, v: Tensor) -> Tensor:
        """Average the values with the weights."""
        return weights @ v

    def output(self, x: Tensor) -> Tensor:
        """The output projection of the merged heads."""
        return self.linear("o", x)

    def head_count(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values."""
        return self.config.num_heads, self.config.num_kv_heads or self.config.num_heads

    def allowed(self, n: int, m: int, mask: Tensor | None) -> Tensor | None:
        """The given mask and the causal one, of n queries and m keys, together."""
        if not self.is_causal():
            return mask
        causal = self.causal_mask(n, m)
        return causal if mask is None else mask & causal

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q kᵀ / √d) v for heads (B, h, N, d)."""
        logits = self.note("logits", self.logits(q, k))
        mask = self.allowed(q.shape[-2], k.shape[-2], mask)
        weights = self.note("attention weights", self.attention_weights(logits, mask))
        weights = self.drop(weights, mask)
        return self.note("weighted values", self.average(weights, v))

    def attend(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from x to the context: all steps of a layer."""
        q, k, v = self.project_qkv(x, context)
        h, g = self.head_count()
        q = self.note("queries by head", self.split(q, h))
        k = self.split(k, g)
        v = self.split(v, g)
        if self.config.rotary:
            q, k = self.rotate_queries_and_keys(q, k)
            self.note("rotated queries", q)
            self.note("rotated keys", k)
        k, v = self.remember(k, v)
        if g != h:
            k = self.share(k)
            v = self.share(v)
        x = self.weigh(q, k, v, mask)
        x = self.note("merged heads", self.merge(x))
        return self.note("output", self.output(x))

    def run(self, x: Tensor, context: Tensor | None = None,
            mask: Tensor | None = None) -> Tensor:
        """Attend from x to the context, by default x itself."""
        return self.attend(x, x if context is None else context, mask)


class HeadSteps(AttentionSteps):
    """Attention of given queries, keys, and values, without projections."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend in each head."""
        return self.weigh(q, k, v, mask)


class CrossSteps(AttentionSteps):
    """Attention from tokens to a context."""

    def run(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from x to the context."""
        return self.attend(x, context, mask)


class RotarySteps(AttentionSteps):
    """The rotation alone."""

    def run(self, x: Tensor) -> Tensor:
        """Rotate queries or keys."""
        return self.rotate(x)


def joined(output: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The output (B, N, C), then keys and values (B, h, M, d) with their heads merged, as one
    Tensor (B, N + 2 M, C)."""
    keys = keys.transpose(1, 2).flatten(2)
    values = values.transpose(1, 2).flatten(2)
    return torch.cat([output, keys, values], dim=1)


class CachedSteps(AttentionSteps):
    """Causal self-attention of new tokens to earlier ones, whose keys and values are given."""

    def first_position(self) -> int:
        """The number of tokens in the cache."""
        return self.past_keys.shape[2]

    def append(self, past: Tensor, new: Tensor) -> Tensor:
        """Earlier and new keys, or values, along the tokens."""
        return torch.cat([past, new], dim=2)

    def returned(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, for the next call."""
        return keys, values

    def remember(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values to those of the cache."""
        k = self.note("keys of all tokens", self.append(self.past_keys, k))
        v = self.note("values of all tokens", self.append(self.past_values, v))
        self.cache = self.returned(k, v)
        return k, v

    def run(self, x: Tensor, past_keys: Tensor, past_values: Tensor) -> Tensor:
        """Return output, keys, and values as one Tensor."""
        self.past_keys = past_keys
        self.past_values = past_values
        output = self.attend(x, x, None)
        return joined(output, *self.cache)


# %% mlp
class MlpSteps(Steps):
    """The position-wise network: two layers, or three with a gate."""

    options = dict(act="gelu")

    def activation(self, x: Tensor) -> Tensor:
        """Apply the function between the two layers."""
        kinds = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
        if self.config.act == "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        return kinds[self.config.act](x)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Of a SwiGLU: silu(gate) up."""
        return F.silu(gate) * up

    def mlp(self, x: Tensor) -> Tensor:
        """Map tokens by all layers of the network."""
        if self.config.act == "swiglu":
            gate = self.note("gate", self.linear("gate", x))
            up = self.note("up", self.linear("up", x))
            hidden = self.gated(gate, up)
        else:
            hidden = self.note("hidden layer", self.linear("fc1", x))
            hidden = self.activation(hidden)
        hidden = self.note("activation", hidden)
        return self.note("output", self.linear("fc2", hidden))

    def run(self, x: Tensor) -> Tensor:
        """Map tokens to tokens."""
        return self.mlp(x)


# %% blocks
class BlockSteps(AttentionSteps, MlpSteps, NormSteps):
    """A layer: attention and an MLP, each with a residual connection and a norm."""

    options = dict(**AttentionSteps.options, **MlpSteps.options, **NormSteps.options,
                   norm_first=True)

    def attention_branch(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of tokens to themselves."""
        with self.inside("attn"):
            return self.attend(x, x, mask)

    def mlp_branch(self, x: Tensor) -> Tensor:
        """The position-wise network."""
        with self.inside("mlp"):
            return self.mlp(x)

    def add(self, x: Tensor, normed: Tensor, branch: Tensor) -> Tensor:
        """The residual connection: x is the input of the norm, normed its output."""
        return x + branch

    def norm_first(self) -> bool:
        """Whether norms stand in front of their branches."""
        return self.config.norm_first

    def is_mlp(self, name: str) -> bool:
        """Whether the norm of this name belongs to the MLP."""
        return name == "norm2"

    def sublayer(self, name: str, x: Tensor, branch: Callable) -> Tensor:
        """One branch with its norm, called `name`."""
        if self.norm_first():
            normed = self.norm(name, x)
            return self.add(x, normed, branch(normed))
        return self.norm(name, self.add(x, x, branch(x)))

    def block(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A whole layer, with a mask of the tokens."""
        x = self.sublayer("norm1", x, lambda y: self.attention_branch(y, mask))
        self.note("after attention", x)
        x = self.sublayer("norm2", x, self.mlp_branch)
        return self.note("after the MLP", x)

    def layer_number(self, i: int) -> int:
        """The block whose parameters the layer i uses."""
        return i

    def blocks(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """All layers, one after the other."""
        for i in range(self.config.depth):
            with self.inside(f"blocks.{self.layer_number(i)}"):
                x = self.block(x, mask)
        return x

    def final_norm(self, x: Tensor) -> Tensor:
        """The norm after the last layer."""
        return self.norm("norm", x)

    def run(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map tokens to tokens by one layer."""
        return self.block(x, mask)


# %% gpt
class GPTSteps(BlockSteps):
    """A decoder-only language model."""

    options = {**BlockSteps.options, "causal": True, "tied": True, "learned": True, "depth": 1,
               "act": "gelu_tanh"}

    def embed_scale(self) -> float:
        """The factor of the embeddings."""
        return 1.0

    def token_positions(self, n: int) -> Tensor:
        """The rows of the table of positions."""
        return torch.arange(n)

    def position_table(self, n: int, d: int) -> Tensor:
        """The vectors (n, d) of the positions."""
        return self.weight("pos.weight")[self.token_positions(n)]

    def add_positions(self, x: Tensor) -> Tensor:
        """Add the vectors of the positions to embeddings."""
        return x + self.position_table(x.shape[1], x.shape[2])

    def embed(self, tokens: Tensor) -> Tensor:
        """The input of the first block."""
        x = self.weight("token.weight")[tokens] * self.embed_scale()
        if self.config.learned:
            x = self.add_positions(x)
        return self.note("embeddings", x)

    def head_matrix(self) -> Tensor:
        """The matrix that makes logits of tokens."""
        return self.weight("token.weight" if self.config.tied else "head.weight")

    def head(self, x: Tensor) -> Tensor:
        """The logits of the tokens."""
        return F.linear(x, self.head_matrix(), self.weight("head.bias"))

    def run(self, tokens: Tensor) -> Tensor:
        """Map tokens to logits."""
        x = self.blocks(self.embed(tokens))
        x = self.final_norm(x)
        return self.note("logits of the tokens", self.head(x))


# %% encoder and decoder
class DecoderSteps(BlockSteps):
    """A decoder layer: causal self-attention, attention to a memory, and an MLP."""

    def is_causal(self) -> bool:
        """Whether this is self-attention of a decoder."""
        return self.scope.endswith("attn.") and not self.scope.startswith("encoder.")

    def is_mlp(self, name: str) -> bool:
        """Whether the norm of this name belongs to the MLP."""
        return name == ("norm2" if self.scope.startswith("encoder.") else "norm3")

    def cross_branch(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of tokens to the memory."""
        with self.inside("cross"):
            return self.attend(x, memory, mask)

    def decoder_block(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """A decoder layer; the mask is that of the memory."""
        x = self.sublayer("norm1", x, lambda y: self.attention_branch(y, None))
        self.note("after self-attention", x)
        x = self.sublayer("norm2", x, lambda y: self.cross_branch(y, memory, mask))
        self.note("after cross-attention", x)
        x = self.sublayer("norm3", x, self.mlp_branch)
        return self.note("after the MLP", x)

    def run(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map tokens to tokens by one layer."""
        return self.decoder_block(x, context, mask)


class SinusoidSteps(Steps):
    """The table of sines and cosines."""

    options = dict(sinusoid_base=10000.0)

    def sinusoid_positions(self, n: int) -> Tensor:
        """The positions of the rows."""
        return torch.arange(n, dtype=torch.float64)

    def sinusoid_base(self) -> float:
        """The base of the wavelengths."""
        return self.config.sinusoid_base

    def sinusoid_exponents(self, d: int) -> Tensor:
        """One for each pair of columns."""
        return torch.arange(0, d, 2, dtype=torch.float64) / d

    def sinusoid_columns(self, sine: Tensor, cosine: Tensor) -> Tensor:
        """Sines in the even columns, cosines in the odd ones."""
        return torch.stack([sine, cosine], dim=-1).flatten(-2)

    def sinusoids(self, n: int, d: int) -> Tensor:
        """The table (n, d)."""
        frequencies = self.sinusoid_base() ** -self.sinusoid_exponents(d)
        angles = self.note("angles", self.sinusoid_positions(n)[:, None] * frequencies)
        return self.note("table", self.sinusoid_columns(angles.sin(), angles.cos()))

    def run(self, n: int, d: int) -> Tensor:
        """Return the table."""
        return self.sinusoids(n, d)


class TransformerSteps(DecoderSteps, SinusoidSteps, GPTSteps):
    """The encoder-decoder of 2017: sinusoids, one matrix for embeddings and output."""

    options = {**GPTSteps.options, **SinusoidSteps.options, "causal": False, "act": "relu",
               "norm_first": False, "width": 1, "pad_id": 0}

    def embed_scale(self) -> float:
        """The root of the width."""
        return math.sqrt(self.config.width)

    def position_table(self, n: int, d: int) -> Tensor:
        """The vectors (n, d) of the positions: sinusoids."""
        return self.sinusoids(n, d)

    def source_mask(self, src: Tensor) -> Tensor | None:
        """The mask (B, 1, 1, M) of the encoder, True at tokens."""
        return (src != self.config.pad_id)[:, None, None, :]

    def memory_mask(self, src: Tensor) -> Tensor | None:
        """The mask (B, 1, 1, M) of attention to the encoder's output."""
        return (src != self.config.pad_id)[:, None, None, :]

    def encode(self, src: Tensor) -> list[Tensor]:
        """The outputs of all encoder layers."""
        x = self.note("source embeddings", self.embed(src))
        states = []
        with self.inside("encoder"):
            for i in range(self.config.depth):
                with self.inside(f"blocks.{self.layer_number(i)}"):
                    x = self.block(x, self.source_mask(src))
                states.append(x)
        return states

    def memory_of(self, i: int, states: list[Tensor]) -> Tensor:
        """What the decoder layer i attends to."""
        return states[-1]

    def run(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Map sources and targets to logits."""
        states = self.encode(src)
        x = self.note("target embeddings", self.embed(tgt))
        mask = self.memory_mask(src)
        with self.inside("decoder"):
            for i in range(self.config.depth):
                with self.inside(f"blocks.{self.layer_number(i)}"):
                    x = self.decoder_block(x, self.memory_of(i, states), mask)
        return self.note("logits of the tokens", self.head(x))


# %% losses
class LossSteps(Steps):
    """Cross-entropy of logits (..., V) and targets (...): nats, averaged over what counts."""

    options = dict(pad_id=None, smoothing=0.0, shifted=False)

    def align(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The logits and what they are to predict."""
        if self.config.shifted:
            return logits[:, :-1], targets[:, 1:]
        return logits, targets

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """The logarithm of the softmax over the classes."""
        return logits.log_softmax(-1)

    def smoothing(self) -> float:
        """The share that is spread over all classes."""
        return self.config.smoothing

    def token_losses(self, log_p: Tensor, targets: Tensor) -> Tensor:
        """One loss for each target."""
        picked = -log_p.gather(-1, targets[..., None])[..., 0]
        everywhere = -log_p.mean(-1)
        return (1 - self.smoothing()) * picked + self.smoothing() * everywhere

    def counts(self, targets: Tensor) -> Tensor:
        """True for the targets that are no padding."""
        if self.config.pad_id is None:
            return torch.ones_like(targets, dtype=torch.bool)
        return targets != self.config.pad_id

    def reduce(self, losses: Tensor, counts: Tensor) -> Tensor:
        """The mean of the losses that count."""
        return (losses * counts).sum() / counts.sum()

    def run(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        logits, targets = self.align(logits, targets)
        log_p = self.note("log-probabilities", self.log_probabilities(logits))
        losses = self.note("losses of the targets", self.token_losses(log_p, targets))
        return self.note("loss", self.reduce(losses, self.counts(targets)))


# %% references
@dataclass(frozen=True)
class Probe:
    """One call on which two implementations are compared.

    Attributes
    ----------
    name : str
        What is special about it, such as "one token".
    inputs : dict of str to Tensor
        In the order of the call; a boolean `mask`, True where a query may attend and of shape
        (B, 1, N, M), comes last. Of "sinusoids" they are integers.
    """

    name: str
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """A layer or model of the library, as `compare` needs it.

    Attributes
    ----------
    name : str
    module : nn.Module or callable
        The library's own, called with the inputs of a probe by name.
    call : callable
        ``call(module, **inputs)``, which returns the Tensor to be compared.
    steps : subclass of Steps
        The same computation in small methods.
    config : dict
        Options of `steps`.
    roles : callable
        Maps {parameter of the module: Tensor} to {role: Tensor}, the latter as views.
    probes : list of Probe
    says : str
        The specification in a few lines, for somebody who writes it.
    join : callable, optional
        Where a call returns several tensors, makes one of them, which is compared. `call` and
        `steps` return it, and the results of other implementations must be given to it.
    """

    name: str
    module: Any
    call: Callable
    steps: type[Steps]
    config: dict[str, Any]
    roles: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    probes: list[Probe]
    says: str
    join: Callable | None = None


REFERENCES: dict[str, Callable[..., Reference]] = {}
REFERENCES_OF: dict[type, Callable[[Any], Reference]] = {}


def reference_of(name: str) -> Callable:
    """Register the decorated builder of a `Reference` under its name."""
    def add(build: Callable) -> Callable:
        REFERENCES[name] = build
        return build
    return add


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Draw normal numbers of a `shape` in float64, the same at each call with a `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def causal(n: int) -> Tensor:
    """The causal mask (1, 1, n, n), True where a query may attend."""
    return torch.ones(1, 1, n, n, dtype=torch.bool).tril()


def padded(lengths: list[int], n: int) -> Tensor:
    """The padding mask (B, 1, 1, n) of sequences of these `lengths`, True at tokens."""
    return (torch.arange(n) < torch.tensor(lengths)[:, None])[:, None, None, :]


def token_probes(width: int, *, masks: bool) -> list[Probe]:
    """Probes of a layer of tokens (B, N, width), also with `masks`."""
    probes = [
        Probe("three sequences of seven tokens", dict(x=drawn(3, 7, width, seed=1))),
        Probe("one sequence of five tokens", dict(x=drawn(1, 5, width, seed=2))),
        Probe("one token", dict(x=drawn(2, 1, width, seed=3))),
        Probe("a non-contiguous input", dict(x=drawn(2, width, 6, seed=4).transpose(1, 2))),
    ]
    if masks:
        probes += [
            Probe("a padding mask",
                  dict(x=drawn(3, 7, width, seed=5), mask=padded([7, 4, 5], 7))),
            Probe("a causal mask", dict(x=drawn(2, 6, width, seed=6), mask=causal(6))),
        ]
    return probes


def _tokens_drawn(*shape: int, vocab: int, seed: int, first: int = 0) -> Tensor:
    """Draw tokens from `first` to vocab - 1, the same at each call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(first, vocab, shape, generator=generator)


def no_roles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The roles of a function, which has no parameters: none, whatever the `tensors`."""
    return {}


def _packed_roles(tensors: dict[str, Tensor], before: str = "",
                 part: str = "") -> dict[str, Tensor]:
    """The roles of a `MultiHeadAttention` whose names begin with `before`."""
    found = {}
    for kind in ("weight", "bias"):
        if f"{before}in_proj_{kind}" in tensors:
            thirds = tensors[f"{before}in_proj_{kind}"].chunk(3)
            for name, third in zip("qkv", thirds):
                found[f"{part}{name}.{kind}"] = third
            found[f"{part}o.{kind}"] = tensors[f"{before}out_proj.{kind}"]
    return found


def _gpt_attention_roles(tensors: dict[str, Tensor], h: int, g: int, before: str = "",
                        part: str = "") -> dict[str, Tensor]:
    """The roles of a `CausalSelfAttention` with h heads of queries and g of keys."""
    found = {}
    for kind in ("weight", "bias"):
        if f"{before}c_attn.{kind}" in tensors:
            packed = tensors[f"{before}c_attn.{kind}"]
            d = len(packed) // (h + 2 * g)
            for name, rows in zip("qkv", packed.split([h * d, g * d, g * d])):
                found[f"{part}{name}.{kind}"] = rows
            found[f"{part}o.{kind}"] = tensors[f"{before}c_proj.{kind}"]
    return found


def _renamed(tensors: dict[str, Tensor], names: dict[str, str], before: str = "",
            part: str = "") -> dict[str, Tensor]:
    """Weights and biases of layers under the names of their roles."""
    found = {}
    for theirs, role in names.items():
        for kind in ("weight", "bias"):
            if f"{before}{theirs}.{kind}" in tensors:
                found[f"{part}{role}.{kind}"] = tensors[f"{before}{theirs}.{kind}"]
    return found


def _swiglu_roles(tensors: dict[str, Tensor], before: str = "",
                 part: str = "") -> dict[str, Tensor]:
    """The roles of a `SwiGLU`, whose first matrix makes gate and up."""
    found = _renamed(tensors, {"fc2": "fc2"}, before, part)
    for kind in ("weight", "bias"):
        if f"{before}fc1.{kind}" in tensors:
            for name, half in zip(("gate", "up"), tensors[f"{before}fc1.{kind}"].chunk(2)):
                found[f"{part}{name}.{kind}"] = half
    return found


def _layer_roles(tensors: dict[str, Tensor], before: str = "", part: str = "") -> dict:
    """The roles of an `EncoderLayer` or `DecoderLayer`."""
    names = {"feed_forward.linear1": "mlp.fc1", "feed_forward.linear2": "mlp.fc2",
             "norm1": "norm1", "norm2": "norm2", "norm3": "norm3"}
    return {**_packed_roles(tensors, f"{before}self_attn.", f"{part}attn."),
            **_packed_roles(tensors, f"{before}multihead_attn.", f"{part}cross."),
            **_renamed(tensors, names, before, part)}


# %% references of attention
@reference_of("attention")
def attention() -> Reference:
    """Scaled dot-product attention of heads (chapter 10)."""
    def heads(b: int, h: int, n: int, m: int, d: int, d_v: int, seed: int) -> dict[str, Tensor]:
        return dict(q=drawn(b, h, n, d, seed=seed), k=drawn(b, h, m, d, seed=seed + 1),
                    v=drawn(b, h, m, d_v, seed=seed + 2))

    strided = {}
    for name, x in heads(2, 4, 6, 6, 8, 8, 41).items():
        strided[name] = x.transpose(1, 2).contiguous().transpose(1, 2)
    return Reference(
        name="attention", module=library_attention,
        call=lambda module, q, k, v, mask=None: module(q, k, v, mask=mask), steps=HeadSteps,
        config={}, roles=no_roles,
        probes=[
            Probe("three sequences, two heads", heads(3, 2, 5, 5, 8, 8, 11)),
            Probe("one sequence, three heads", heads(1, 3, 4, 4, 16, 16, 15)),
            Probe("more keys than queries, wider values", heads(2, 3, 4, 6, 8, 10, 21)),
            Probe("one query", heads(2, 2, 1, 5, 8, 8, 31)),
            Probe("one token", heads(2, 2, 1, 1, 8, 8, 35)),
            Probe("a non-contiguous input", strided),
            Probe("a padding mask",
                  dict(**heads(3, 2, 7, 7, 8, 8, 51), mask=padded([7, 4, 5], 7))),
            Probe("a causal mask", dict(**heads(2, 2, 6, 6, 8, 8, 61), mask=causal(6)))],
        says="q (B, h, N, d), k (B, h, M, d), v (B, h, M, d_v) -> (B, h, N, d_v): softmax(q kᵀ "
             "/ √d) v, with the softmax over the M keys. An optional boolean mask, "
             "broadcastable to (B, h, N, M), is True where a query may attend; the other keys "
             "get weight zero.")


@reference_of("multihead")
def multihead(embed_dim: int = 64, num_heads: int = 4, bias: bool = True) -> Reference:
    """Multi-head self-attention (chapter 11).

    Parameters
    ----------
    embed_dim, num_heads, bias
        As of `MultiHeadAttention`.
    """
    return Reference(
        name="multihead", module=MultiHeadAttention(embed_dim, num_heads, bias=bias),
        call=lambda module, x, mask=None: module(x, mask=mask), steps=AttentionSteps,
        config=dict(num_heads=num_heads), roles=_packed_roles,
        probes=token_probes(embed_dim, masks=True),
        says="x (B, N, embed_dim) -> (B, N, embed_dim): q, k, v = three linear layers of x, "
             "split into heads; softmax(q kᵀ / √head_dim) v in each head; heads next to each "
             "other; one more linear layer. An optional mask is True where a query may attend.")


@reference_of("causal_attention")
def causal_attention(embed_dim: int = 64, num_heads: int = 4, bias: bool = True) -> Reference:
    """Multi-head self-attention to the token itself and those before it (chapter 24).

    Parameters
    ----------
    embed_dim, num_heads, bias
        As of `MultiHeadAttention`.
    """
    config = GPTConfig(n_embd=embed_dim, n_head=num_heads, position="none", bias=bias)
    return Reference(
        name="causal_attention", module=CausalSelfAttention(config),
        call=lambda module, x: module(x), steps=AttentionSteps,
        config=dict(num_heads=num_heads, causal=True),
        roles=lambda tensors: _gpt_attention_roles(tensors, num_heads, num_heads),
        probes=token_probes(embed_dim, masks=False),
        says="x (B, N, embed_dim) -> (B, N, embed_dim): multi-head self-attention, in which "
             "token i attends to the tokens 0, ..., i. q, k, v = three linear layers of x, "
             "split into heads; softmax(q kᵀ / √head_dim) v among the allowed keys; heads next "
             "to each other; one more linear layer. No positions, no dropout.")


@reference_of("grouped_attention")
def grouped_attention(embed_dim: int = 64, num_heads: int = 4, num_kv_heads: int = 2,
                      bias: bool = False) -> Reference:
    """Causal attention with fewer heads of keys and values (chapter 24).

    Parameters
    ----------
    embed_dim, num_heads, num_kv_heads : int
        Width, heads of queries, and heads of keys and values.
    bias : bool
        Whether linear layers add one.
    """
    config = GPTConfig(n_embd=embed_dim, n_head=num_heads, n_kv_head=num_kv_heads,
                       position="none", bias=bias)
    return Reference(
        name="grouped_attention", module=CausalSelfAttention(config),
        call=lambda module, x: module(x), steps=AttentionSteps,
        config=dict(num_heads=num_heads, num_kv_heads=num_kv_heads, causal=True),
        roles=lambda tensors: _gpt_attention_roles(tensors, num_heads, num_kv_heads),
        probes=token_probes(embed_dim, masks=False),
        says="x (B, N, embed_dim) -> (B, N, embed_dim): causal multi-head self-attention with "
             "num_heads heads of queries and num_kv_heads heads of keys and of values, all of "
             "width embed_dim / num_heads. Query head i uses the head i // (num_heads / "
             "num_kv_heads) of keys and values; the rest is as in multi-head attention. No "
             "positions, no dropout.")


@reference_of("cross_attention")
def cross_attention(embed_dim: int = 64, num_heads: int = 4) -> Reference:
    """Multi-head attention to a context (chapter 21).

    Parameters
    ----------
    embed_dim, num_heads
        As of `MultiHeadAttention`.
    """
    def inputs(b: int, n: int, m: int, seed: int) -> dict[str, Tensor]:
        return dict(x=drawn(b, n, embed_dim, seed=seed),
                    context=drawn(b, m, embed_dim, seed=seed + 1))

    strided = dict(x=drawn(2, embed_dim, 4, seed=41).transpose(1, 2),
                   context=drawn(6, 2, embed_dim, seed=42).transpose(0, 1))
    return Reference(
        name="cross_attention", module=CrossAttention(embed_dim, num_heads),
        call=lambda module, x, context, mask=None: module(x, context, mask=mask),
        steps=CrossSteps, config=dict(num_heads=num_heads), roles=_packed_roles,
        probes=[
            Probe("more context than tokens", inputs(3, 4, 7, 11)),
            Probe("one sequence, less context than tokens", inputs(1, 6, 3, 21)),
            Probe("as many tokens as context", inputs(2, 5, 5, 31)),
            Probe("one token", inputs(2, 1, 4, 35)),
            Probe("a non-contiguous input", strided),
            Probe("a padding mask", dict(**inputs(3, 4, 7, 51), mask=padded([7, 4, 5], 7)))],
        says="x (B, N, embed_dim), context (B, M, embed_dim) -> (B, N, embed_dim): q is a "
             "linear layer of x, k and v are two of the context, all with bias; heads; "
             "softmax(q kᵀ / √head_dim) v; heads next to each other; one more linear layer. An "
             "optional mask (B, 1, 1, M) is True where the context may be attended to.")


@reference_of("cached_attention")
def cached_attention(embed_dim: int = 64, num_heads: int = 4) -> Reference:
    """Causal self-attention with rotary positions and a cache (chapters 22 and 24).

    Parameters
    ----------
    embed_dim, num_heads
        As of `MultiHeadAttention`.
    """
    config = GPTConfig(n_embd=embed_dim, n_head=num_heads, position="rotary", bias=False)
    d = embed_dim // num_heads

    def call(module: nn.Module, x: Tensor, past_keys: Tensor, past_values: Tensor) -> Tensor:
        cache = KVCache()
        cache.update(0, past_keys, past_values)
        output = module(x, cache=cache)
        keys, values = cache.update(0, past_keys[:, :, :0], past_values[:, :, :0])
        return joined(output, keys, values)

    def inputs(b: int, n: int, past: int, seed: int) -> dict[str, Tensor]:
        return dict(x=drawn(b, n, embed_dim, seed=seed),
                    past_keys=drawn(b, num_heads, past, d, seed=seed + 1),
                    past_values=drawn(b, num_heads, past, d, seed=seed + 2))

    return Reference(
        name="cached_attention", module=CausalSelfAttention(config), call=call,
        steps=CachedSteps, config=dict(num_heads=num_heads, causal=True, rotary="halves"),
        roles=lambda tensors: _gpt_attention_roles(tensors, num_heads, num_heads),
        probes=[
            Probe("one new token after five", inputs(2, 1, 5, 11)),
            Probe("three new tokens after four", inputs(3, 3, 4, 21)),
            Probe("four new tokens after two", inputs(1, 4, 2, 31)),
            Probe("an empty cache", inputs(2, 5, 0, 41))],
        says="x (B, N, embed_dim), past_keys and past_values (B, h, P, d) -> output "
             "(B, N, embed_dim), keys and values (B, h, P + N, d). The tokens of x are at the "
             "positions P, ..., P + N - 1. q, k, v are linear layers of x without bias, split "
             "into heads; q and k are rotated by their positions (base 10000, channel i with "
             "i + d/2); the given keys have been rotated before. New keys and values are "
             "appended to the given ones, rotated as they are, and returned; new token i "
             "attends to the keys 0, ..., P + i; one more linear layer without bias.",
        join=joined)


# %% references of layers
@reference_of("layer_norm")
def layer_norm(dim: int = 32, eps: float = 1e-5) -> Reference:
    """Layer norm of `dim` channels with gain, bias, and `eps` (chapter 21)."""
    return Reference(
        name="layer_norm", module=nn.LayerNorm(dim, eps), call=lambda module, x: module(x),
        steps=NormSteps, config=dict(norm="layer", eps=eps),
        roles=lambda tensors: {f"norm.{name}": x for name, x in tensors.items()},
        probes=_norm_probes(dim),
        says="x (B, N, dim) -> (B, N, dim), for each token: subtract the mean of its dim "
             f"entries, divide by the root of their variance (the mean of squares) plus {eps}; "
             "times a learned gain, plus a learned bias, both of width dim.")


@reference_of("rms_norm")
def rms_norm(dim: int = 32, eps: float = 1e-5) -> Reference:
    """RMS norm of `dim` channels with a gain and `eps` (chapter 24)."""
    return Reference(
        name="rms_norm", module=nn.RMSNorm(dim, eps), call=lambda module, x: module(x),
        steps=NormSteps, config=dict(norm="rms", eps=eps),
        roles=lambda tensors: {f"norm.{name}": x for name, x in tensors.items()},
        probes=_norm_probes(dim),
        says="x (B, N, dim) -> (B, N, dim), for each token: divide by the root of the mean of "
             f"its dim squared entries plus {eps}; times a learned gain of width dim.")


def _norm_probes(dim: int) -> list[Probe]:
    """Those of tokens, and tokens so small or far from zero that details show."""
    small = 1e-2 * drawn(2, 4, dim, seed=7)
    far = 3 + drawn(2, 4, dim, seed=8)
    return token_probes(dim, masks=False) + [
        Probe("small numbers", dict(x=small)), Probe("numbers around three", dict(x=far))]


@reference_of("mlp")
def mlp(dim: int = 32, hidden: int = 64, act: str = "gelu") -> Reference:
    """The position-wise network of two layers (chapter 21).

    Parameters
    ----------
    dim, hidden : int
        Width of the tokens and of the hidden layer.
    act : {"gelu", "gelu_tanh", "relu", "silu"}
    """
    activation = nn.GELU(approximate="tanh") if act == "gelu_tanh" else act
    formula = {"gelu": "x Φ(x), the exact GELU", "gelu_tanh": "GELU in its tanh approximation",
               "relu": "max(x, 0)", "silu": "x sigmoid(x)"}[act]
    return Reference(
        name="mlp", module=FeedForward(dim, hidden, activation),
        call=lambda module, x: module(x), steps=MlpSteps, config=dict(act=act),
        roles=lambda tensors: _renamed(tensors, {"linear1": "fc1", "linear2": "fc2"}),
        probes=token_probes(dim, masks=False),
        says="x (B, N, dim) -> (B, N, dim): a linear layer to the width hidden, the activation "
             f"({formula}), and a linear layer back to dim; both with bias, no dropout.")


@reference_of("swiglu")
def swiglu(dim: int = 32, hidden: int = 48, bias: bool = False) -> Reference:
    """The position-wise network with a gate (chapter 35).

    Parameters
    ----------
    dim, hidden : int
        Width of the tokens, and of the gate.
    bias : bool
        Let the linear layers add a bias.
    """
    return Reference(
        name="swiglu", module=SwiGLU(dim, 2 * hidden, bias=bias), call=lambda module, x: module(x),
        steps=MlpSteps, config=dict(act="swiglu"), roles=_swiglu_roles,
        probes=token_probes(dim, masks=False),
        says="x (B, N, dim) -> (B, N, dim): W₂ (silu(W_g x) ⊙ W_u x) with W_g "
             "and W_u of shape (hidden, dim); silu(z) = z sigmoid(z). In the library the "
             "gate's rows are the first half of one packed matrix.")


def _order_of(norm_first: bool) -> str:
    """The formula of a layer's sublayers."""
    return "x = x + f(norm(x))" if norm_first else "x = norm(x + f(x))"


@reference_of("encoder_layer")
def encoder_layer(d_model: int = 32, nhead: int = 4, dim_feedforward: int = 64,
                  norm_first: bool = False, act: str = "relu") -> Reference:
    """A layer of the Transformer's encoder (chapter 21).

    Parameters
    ----------
    d_model, nhead, dim_feedforward, norm_first, act
        As of `EncoderLayer`, where `act` is called `activation`.
    """
    module = EncoderLayer(d_model, nhead, dim_feedforward, dropout=0.0, activation=act,
                          norm_first=norm_first)
    return Reference(
        name="encoder_layer", module=module,
        call=lambda module, x, mask=None: module(x, mask), steps=BlockSteps,
        config=dict(num_heads=nhead, act=act, norm_first=norm_first), roles=_layer_roles,
        probes=token_probes(d_model, masks=True),
        says="x (B, N, d_model) -> (B, N, d_model): two sublayers, each as "
             f"{_order_of(norm_first)}, first f = multi-head self-attention (biases, heads of "
             f"width d_model / nhead), then f = a linear layer to dim_feedforward, {act}, and "
             "a linear layer back. Two layer norms with gain and bias, eps 1e-5. An optional "
             "mask is True where a query may attend. No dropout.")


@reference_of("decoder_layer")
def decoder_layer(d_model: int = 32, nhead: int = 4, dim_feedforward: int = 64,
                  norm_first: bool = False, act: str = "relu") -> Reference:
    """A layer of the Transformer's decoder (chapter 21).

    Parameters
    ----------
    d_model, nhead, dim_feedforward, norm_first, act
        As of `DecoderLayer`, where `act` is called `activation`.
    """
    def inputs(b: int, n: int, m: int, seed: int) -> dict[str, Tensor]:
        return dict(x=drawn(b, n, d_model, seed=seed),
                    context=drawn(b, m, d_model, seed=seed + 1))

    def call(module: nn.Module, x: Tensor, context: Tensor,
             mask: Tensor | None = None) -> Tensor:
        return module(x, context, mask="causal", memory_mask=mask)

    strided = dict(x=drawn(2, d_model, 4, seed=41).transpose(1, 2),
                   context=drawn(6, 2, d_model, seed=42).transpose(0, 1))
    return Reference(
        name="decoder_layer",
        module=DecoderLayer(d_model, nhead, dim_feedforward, dropout=0.0, activation=act,
                            norm_first=norm_first),
        call=call, steps=DecoderSteps,
        config=dict(num_heads=nhead, act=act, norm_first=norm_first), roles=_layer_roles,
        probes=[
            Probe("more context than tokens", inputs(3, 4, 7, 11)),
            Probe("as many tokens as context", inputs(2, 5, 5, 31)),
            Probe("one token", inputs(2, 1, 4, 35)),
            Probe("a non-contiguous input", strided),
            Probe("a padding mask", dict(**inputs(3, 4, 7, 51), mask=padded([7, 4, 5], 7)))],
        says="x (B, N, d_model), context (B, M, d_model) -> (B, N, d_model): three sublayers, "
             f"each as {_order_of(norm_first)}: causal multi-head self-attention of x; "
             "multi-head attention with queries of x and keys and values of the context, where "
             "an optional mask (B, 1, 1, M) is True; a linear layer to dim_feedforward, "
             f"{act}, and a linear layer back. Three layer norms with gain and bias, eps 1e-5; "
             "the context gets no norm here. All linear layers have biases. No dropout.")


# %% references of positions
@reference_of("sinusoids")
def sinusoids() -> Reference:
    """The sinusoidal table (chapter 12)."""
    def call(module: Callable, n: int, d: int) -> Tensor:
        return module(n, d, dtype=torch.float64)

    return Reference(
        name="sinusoids", module=sinusoidal_encoding, call=call, steps=SinusoidSteps, config={},
        roles=no_roles,
        probes=[
            Probe("seven positions", dict(n=7, d=16)), Probe("two columns", dict(n=5, d=2)),
            Probe("one position", dict(n=1, d=8)), Probe("a wide table", dict(n=33, d=64))],
        says="Integers n and d (even) -> a table (n, d): row p has sin(p / 10000^(2 i / d)) in "
             "the column 2 i and the cosine of the same angle in the column 2 i + 1; positions "
             "begin at 0. Computed in float64.")


@reference_of("rotary")
def rotary(base: float = 10000.0) -> Reference:
    """Rotary position embedding of queries or keys, with a `base` (chapter 12)."""
    def call(module: Callable, x: Tensor) -> Tensor:
        return module(x, torch.arange(x.shape[-2]), base=base, interleaved=False)

    strided = drawn(2, 6, 3, 8, seed=4).transpose(1, 2)
    return Reference(
        name="rotary", module=apply_rotary, call=call, steps=RotarySteps,
        config=dict(rotary="halves", rope_base=base), roles=no_roles,
        probes=[
            Probe("three sequences, two heads", dict(x=drawn(3, 2, 7, 16, seed=1))),
            Probe("one sequence, four heads", dict(x=drawn(1, 4, 5, 8, seed=2))),
            Probe("one token", dict(x=drawn(2, 2, 1, 8, seed=3))),
            Probe("a non-contiguous input", dict(x=strided))],
        says="x (B, h, N, d) -> the same shape, d even: at position p = 0, ..., N - 1 the "
             "channels i and i + d/2 are rotated counterclockwise by the angle "
             f"p / {base:g}^(2 i / d): (a, b) -> (a cos - b sin, b cos + a sin).")


# %% references of models
def _gpt_roles(config: GPTConfig) -> Callable:
    """The roles of a `GPT`."""
    def roles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = _renamed(tensors, {"wte": "token", "wpe": "pos", "ln_f": "norm"})
        for i in range(config.n_layer):
            before = f"h.{i}."
            part = f"blocks.{i}."
            found |= _gpt_attention_roles(tensors, config.n_head, config.resolved_n_kv_head,
                                         f"{before}attn.", f"{part}attn.")
            found |= _renamed(tensors, {"ln_1": "norm1", "ln_2": "norm2"}, before, part)
            if config.mlp == "gelu":
                found |= _renamed(tensors, {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"},
                                 before, part)
            else:
                found |= _swiglu_roles(tensors, f"{before}mlp.", f"{part}mlp.")
        if not config.tied:
            found["head.weight"] = tensors["lm_head.weight"]
        return found

    return roles


def _text_probes(vocab: int, longest: int = 8) -> list[Probe]:
    """Probes of a language model, shorter than the longest text if that is not tiny."""
    n = max(min(7, longest - 1), 1)
    strided = _tokens_drawn(max(n - 1, 1), 2, vocab=vocab, seed=4).T
    return [
        Probe(f"three texts of {n} tokens",
              dict(tokens=_tokens_drawn(3, n, vocab=vocab, seed=1))),
        Probe("one text", dict(tokens=_tokens_drawn(1, max(n - 2, 1), vocab=vocab, seed=2))),
        Probe("one token", dict(tokens=_tokens_drawn(2, 1, vocab=vocab, seed=3))),
        Probe("a non-contiguous input", dict(tokens=strided))]


@reference_of("gpt")
def gpt(vocab_size: int = 29, block_size: int = 16, n_layer: int = 2, n_head: int = 4,
        n_embd: int = 32) -> Reference:
    """A language model in the style of GPT-2 (chapter 24).

    Parameters
    ----------
    vocab_size, block_size, n_layer, n_head, n_embd
        As of `GPTConfig`.
    """
    config = GPTConfig(vocab_size, block_size, n_layer, n_head, n_embd=n_embd, **GPT2_STYLE)
    return Reference(
        name="gpt", module=GPT(config), call=lambda module, tokens: module(tokens),
        steps=GPTSteps, config=dict(num_heads=n_head, depth=n_layer), roles=_gpt_roles(config),
        probes=_text_probes(vocab_size),
        says="tokens (B, N) -> logits (B, N, vocab_size), N <= block_size: token embedding "
             "plus a learned embedding of the positions 0, 1, ...; n_layer blocks x = x + "
             "attention(norm1(x)), x = x + mlp(norm2(x)); a final norm; the output matrix is "
             "the token embedding (tied, no bias). Causal multi-head attention, scale "
             "1/√head_dim; the MLP has hidden width 4 n_embd and GELU in its tanh "
             "approximation; layer norms with gain and bias, eps 1e-5; biases in all linear "
             "layers. No dropout.")


@reference_of("llama")
def llama(vocab_size: int = 29, n_layer: int = 2, n_head: int = 4, n_kv_head: int = 2,
          n_embd: int = 32, n_inner: int = 48, tied: bool = True,
          rope_base: float = 10000.0) -> Reference:
    """A language model in the style of Llama (chapter 24).

    Parameters
    ----------
    vocab_size, n_layer, n_head, n_kv_head, n_embd, n_inner, tied, rope_base
        As of `GPTConfig`.
    """
    config = GPTConfig(vocab_size, 64, n_layer, n_head, n_kv_head=n_kv_head, n_embd=n_embd,
                       n_inner=n_inner, tied=tied, rope_base=rope_base)
    return Reference(
        name="llama", module=GPT(config), call=lambda module, tokens: module(tokens),
        steps=GPTSteps,
        config=dict(num_heads=n_head, num_kv_heads=n_kv_head, depth=n_layer, norm="rms",
                    rotary="halves", act="swiglu", learned=False, tied=tied,
                    rope_base=rope_base),
        roles=_gpt_roles(config), probes=_text_probes(vocab_size),
        says="tokens (B, N) -> logits (B, N, vocab_size): token embedding; n_layer blocks x = "
             "x + attention(norm1(x)), x = x + mlp(norm2(x)); a final norm; the output "
             f"matrix is {'the embedding' if tied else 'one of its own'}. Causal attention with n_head heads of queries and n_kv_head of keys "
             "and values (query head i uses head i // (n_head / n_kv_head)), scale "
             "1/√head_dim; queries and keys are rotated by the positions 0, 1, ... (base "
             f"{rope_base:g}, channel i with i + d/2). MLP: W₂ (silu(W_g x) ⊙ W_u x) of width "
             "n_inner. RMS norms with gain, eps 1e-5. No biases, no dropout.")


@reference_of("transformer")
def transformer(vocab: int = 29, d_model: int = 32, nhead: int = 4, layers: int = 2,
                dim_feedforward: int = 64, padding: bool = False) -> Reference:
    """The encoder-decoder of 2017 (chapter 21).

    Parameters
    ----------
    vocab, d_model, nhead, layers, dim_feedforward : int
        Tokens of both languages, width, heads, layers of encoder and of decoder, and width of
        their hidden layers.
    padding : bool
        Also compare sources with padding (token 0), which the model must hide.
    """
    module = Transformer(vocab, d_model=d_model, nhead=nhead, num_encoder_layers=layers,
                         num_decoder_layers=layers, dim_feedforward=dim_feedforward,
                         dropout=0.0, max_length=64)

    def roles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {"token.weight": tensors["src_embed.weight"]}
        for stack in ("encoder", "decoder"):
            for i in range(layers):
                found |= _layer_roles(tensors, f"{stack}.layers.{i}.", f"{stack}.blocks.{i}.")
        return found

    def inputs(b: int, m: int, n: int, seed: int) -> dict[str, Tensor]:
        return dict(src=_tokens_drawn(b, m, vocab=vocab, seed=seed, first=1),
                    tgt=_tokens_drawn(b, n, vocab=vocab, seed=seed + 1, first=1))

    with_padding = inputs(3, 7, 5, 41)
    with_padding["src"] = with_padding["src"] * padded([7, 4, 5], 7)[:, 0, 0]
    last = [Probe("padding in the sources", with_padding)] if padding else []
    return Reference(
        name="transformer", module=module, call=lambda module, src, tgt: module(src, tgt),
        steps=TransformerSteps,
        config=dict(num_heads=nhead, depth=layers, width=d_model), roles=roles,
        probes=[
            Probe("three pairs of sentences", inputs(3, 7, 5, 11)),
            Probe("one pair of equal length", inputs(1, 6, 6, 21)),
            Probe("one target token", inputs(2, 5, 1, 31)), *last],
        says="src (B, M), tgt (B, N) -> logits (B, N, vocab). One matrix (vocab, d_model) "
             "embeds sources and targets and is the output matrix (no bias); embeddings are "
             "√d_model E[token] + sinusoids (sine in even, cosine in odd columns, base 10000). "
             "Encoder and decoder layers as `encoder_layer` and `decoder_layer` with "
             "norm(x + f(x)), relu, eps 1e-5; no norm after the last layer. Token 0 is padding "
             "of the source: neither encoder nor decoder attends to it. No dropout.")


# %% references of losses
def _loss_probes(vocab: int = 11) -> list[Probe]:
    """Logits (B, N, vocab) and targets (B, N) without padding."""
    probes = []
    for b, n, seed in ((3, 6, 1), (1, 5, 11), (2, 2, 21)):
        probes.append(Probe(f"{b} x {n} tokens",
                            dict(logits=2 * drawn(b, n, vocab, seed=seed),
                                 targets=_tokens_drawn(b, n, vocab=vocab, seed=seed + 1))))
    strided = 2 * drawn(2, vocab, 4, seed=31).transpose(1, 2)
    probes.append(Probe("a non-contiguous input",
                        dict(logits=strided,
                             targets=_tokens_drawn(2, 4, vocab=vocab, seed=32))))
    return probes


def _padding_probes(pad_id: int, vocab: int = 11) -> list[Probe]:
    """The same, and targets with padding of different lengths at the end."""
    probes = []
    for probe in _loss_probes(vocab):
        targets = probe.inputs["targets"]
        targets = torch.where(targets == pad_id, (pad_id + 1) % vocab, targets)
        probes.append(Probe(probe.name, dict(logits=probe.inputs["logits"], targets=targets)))
    for lengths, n, seed in (([6, 3, 1], 6, 41), ([2, 5], 5, 51)):
        b = len(lengths)
        targets = _tokens_drawn(b, n, vocab=vocab, seed=seed)
        targets = torch.where(targets == pad_id, (pad_id + 1) % vocab, targets)
        targets = torch.where(padded(lengths, n)[:, 0, 0], targets, pad_id)
        probes.append(Probe(f"padding after {lengths} tokens",
                            dict(logits=2 * drawn(b, n, vocab, seed=seed + 1),
                                 targets=targets)))
    return probes


@reference_of("cross_entropy")
def cross_entropy() -> Reference:
    """The cross-entropy of a classifier (chapter 24)."""
    probes = []
    for b, classes, seed in ((5, 7, 1), (1, 10, 11), (8, 3, 21)):
        probes.append(Probe(f"{b} of {classes} classes",
                            dict(logits=2 * drawn(b, classes, seed=seed),
                                 targets=_tokens_drawn(b, vocab=classes, seed=seed + 1))))
    strided = 2 * drawn(7, 4, seed=31).T
    probes.append(Probe("a non-contiguous input",
                        dict(logits=strided, targets=_tokens_drawn(4, vocab=7, seed=32))))
    return Reference(
        name="cross_entropy", module=F.cross_entropy,
        call=lambda module, logits, targets: module(logits, targets), steps=LossSteps,
        config={}, roles=no_roles, probes=probes,
        says="logits (B, C), targets (B) -> a number: minus the log of the softmax over the C "
             "classes at the target's class, averaged over the B rows. Natural logarithm.")


@reference_of("next_token_loss")
def next_token_loss() -> Reference:
    """The loss of a language model (chapter 24)."""
    def call(module: Callable, logits: Tensor, targets: Tensor) -> Tensor:
        return module(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    return Reference(
        name="next_token_loss", module=F.cross_entropy, call=call, steps=LossSteps,
        config=dict(shifted=True), roles=no_roles, probes=_loss_probes(),
        says="logits (B, N, V), tokens (B, N) -> a number: the logits at position i predict "
             "the token i + 1, the last ones nothing; the cross-entropy is averaged over the B "
             "(N - 1) predictions. Natural logarithm. (Probes call the tokens `targets`.)")


@reference_of("padded_cross_entropy")
def padded_cross_entropy(pad_id: int = 0) -> Reference:
    """The cross-entropy of targets with the padding `pad_id` (chapter 21)."""
    def call(module: Callable, logits: Tensor, targets: Tensor) -> Tensor:
        return module(logits.flatten(0, 1), targets.flatten(), ignore_index=pad_id)

    return Reference(
        name="padded_cross_entropy", module=F.cross_entropy, call=call, steps=LossSteps,
        config=dict(pad_id=pad_id), roles=no_roles, probes=_padding_probes(pad_id),
        says="logits (B, N, V), targets (B, N) -> a number: the cross-entropy at each target "
             f"other than {pad_id} (padding), averaged over these targets of all sequences "
             "together. Nothing is shifted. Natural logarithm.")


@reference_of("label_smoothing_loss")
def smoothed_loss(smoothing: float = 0.1, pad_id: int = 0) -> Reference:
    """The cross-entropy to smoothed targets, a mean (chapter 21).

    Parameters
    ----------
    smoothing, pad_id
        As of `label_smoothing_loss`.
    """
    def call(module: Callable, logits: Tensor, targets: Tensor) -> Tensor:
        loss, count = module(logits, targets, smoothing=smoothing, pad_id=pad_id)
        return loss / count

    return Reference(
        name="label_smoothing_loss", module=label_smoothing_loss, call=call, steps=LossSteps,
        config=dict(pad_id=pad_id, smoothing=smoothing), roles=no_roles,
        probes=_padding_probes(pad_id),
        says="logits (B, N, V), targets (B, N) -> a number: the cross-entropy to "
             f"{1 - smoothing:g} times the target's one-hot vector plus {smoothing:g} / V on "
             "each of all V tokens (the target and padding among them), averaged over the "
             f"targets other than {pad_id} (padding). Natural logarithm.")


# %% references of modules
_NAMES_OF_ACTIVATIONS = {F.relu: "relu", F.gelu: "gelu", F.silu: "silu"}


def _name_of_activation(module: FeedForward) -> str:
    """The name by which `mlp` knows an activation."""
    function = module.activation
    if isinstance(function, nn.GELU):
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    if function not in _NAMES_OF_ACTIVATIONS:
        raise ValueError(f"activation ({function}) must be relu, gelu, or silu: there are no "
                         "steps for others")
    return _NAMES_OF_ACTIVATIONS[function]


def _refuse_options(**options: Any) -> None:
    """Raise for the first option that is on, because there are no steps for it."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{name} ({value}) must be off: there are no steps for it")


def attention_reference_of(module: MultiHeadAttention) -> Reference:
    """Build the `Reference` of multi-head attention or of cross-attention.

    Parameters
    ----------
    module : MultiHeadAttention
        With keys and values as wide as queries.
    """
    _refuse_options(rotary=getattr(module, "rotary", False), other_widths=not module.fused)
    if isinstance(module, CrossAttention):
        return replace(cross_attention(module.embed_dim, module.num_heads), module=module)
    bias = module.in_proj_bias is not None
    found = multihead(module.embed_dim, module.num_heads, bias)
    return replace(found, module=module)


def mlp_reference_of(module: FeedForward) -> Reference:
    """Build the `Reference` of the position-wise network.

    Parameters
    ----------
    module : FeedForward
    """
    hidden, dim = module.linear1.weight.shape
    return replace(mlp(dim, hidden, _name_of_activation(module)), module=module)


def swiglu_reference_of(module: SwiGLU) -> Reference:
    """Build the `Reference` of the network with a gate.

    Parameters
    ----------
    module : SwiGLU
    """
    dim, hidden = module.fc2.weight.shape
    bias = module.fc2.bias is not None
    return replace(swiglu(dim, hidden, bias=bias), module=module)


def norm_reference_of(module: nn.LayerNorm | nn.RMSNorm) -> Reference:
    """Build the `Reference` of a norm over the last axis.

    Parameters
    ----------
    module : LayerNorm or RMSNorm
    """
    if len(module.normalized_shape) > 1 or module.eps is None:
        raise ValueError(f"module ({module}) must have one axis and an eps")
    build = layer_norm if isinstance(module, nn.LayerNorm) else rms_norm
    return replace(build(module.normalized_shape[0], module.eps), module=module)


def layer_reference_of(module: EncoderLayer) -> Reference:
    """Build the `Reference` of a layer of the Transformer.

    Parameters
    ----------
    module : EncoderLayer
        Or a `DecoderLayer`.
    """
    _refuse_options(rotary=module.self_attn.rotary)
    build = decoder_layer if isinstance(module, DecoderLayer) else encoder_layer
    found = build(module.self_attn.embed_dim, module.self_attn.num_heads,
                  module.feed_forward.linear1.out_features, module.norm_first,
                  _name_of_activation(module.feed_forward))
    eps = module.norm1.eps
    return replace(found, module=module, config={**found.config, "eps": eps},
                   says=found.says.replace("eps 1e-5", f"eps {eps:g}"))


def gpt_reference_of(module: GPT) -> Reference:
    """Build the `Reference` of a language model.

    Parameters
    ----------
    module : GPT
        Without a window, query-key norm, scaled rotation, and other widths of heads.
    """
    config = module.config
    _refuse_options(window=config.window, qk_norm=config.qk_norm,
                    rope_scaling=config.rope_scaling)
    rotates = config.position == "rotary"
    positions = {"rotary": f"queries and keys are rotated (base {config.rope_base:g}, channel "
                           "i with i + d/2)", "learned": "learned positions are added",
                 "none": "there are no positions"}[config.position]
    network = {"swiglu": "W₂ (silu(W_g x) ⊙ W_u x)",
               "gelu": "two layers with GELU in its tanh approximation"}[config.mlp]
    return Reference(
        name="gpt", module=module, call=lambda module, tokens: module(tokens), steps=GPTSteps,
        config=dict(num_heads=config.n_head, num_kv_heads=config.resolved_n_kv_head,
                    depth=config.n_layer, norm=config.norm, eps=config.norm_eps,
                    rotary="halves" if rotates else None, rope_base=config.rope_base,
                    act="swiglu" if config.mlp == "swiglu" else "gelu_tanh",
                    learned=config.position == "learned", tied=config.tied),
        roles=_gpt_roles(config), probes=_text_probes(config.vocab_size, config.block_size),
        says="tokens (B, N) -> logits (B, N, vocab_size): token embedding; "
             f"{config.n_layer} blocks x = x + attention(norm1(x)), x = x + mlp(norm2(x)); a "
             f"final norm; an output matrix that is {'' if config.tied else 'not '}the "
             f"embedding. Causal attention with {config.n_head} heads of queries and "
             f"{config.resolved_n_kv_head} of keys and values, scale 1/√head_dim; {positions}. "
             f"MLP: {network}, of width {config.resolved_n_inner}. {config.norm} norms, eps "
             f"{config.norm_eps:g}; {'' if config.bias else 'no '}biases.")


def transformer_reference_of(module: Transformer) -> Reference:
    """Build the `Reference` of an encoder-decoder.

    Parameters
    ----------
    module : Transformer
        With sinusoids, one matrix for both languages and the output, and norms behind.
    """
    layers = module.encoder.layers
    first = layers[0]
    _refuse_options(
        positions=module.positions.scheme != "sinusoidal", norm_first=first.norm_first,
        final_norm=module.encoder.norm is not None, output_bias=module.output_bias is not None,
        two_matrices=not (module.shares_embedding and module.ties_output),
        other_padding=module.pad_id != 0,
        different_depths=len(layers) != len(module.decoder.layers))
    found = transformer(module.vocab_size, module.d_model, first.self_attn.num_heads,
                        len(layers), first.feed_forward.linear1.out_features)
    act = _name_of_activation(first.feed_forward)
    return replace(found, module=module, config={**found.config, "act": act},
                   says=found.says.replace("relu", act))


REFERENCES_OF.update({
    MultiHeadAttention: attention_reference_of, CrossAttention: attention_reference_of,
    SelfAttention: attention_reference_of, FeedForward: mlp_reference_of,
    SwiGLU: swiglu_reference_of, nn.LayerNorm: norm_reference_of, nn.RMSNorm: norm_reference_of,
    EncoderLayer: layer_reference_of, DecoderLayer: layer_reference_of, GPT: gpt_reference_of,
    Transformer: transformer_reference_of})


# %% catalogue
@dataclass(frozen=True)
class Mistake:
    """A small change of a model that is often made by accident.

    Attributes
    ----------
    name : str
    step : str
        The method of `Steps` that the change replaces.
    replace : callable
        What stands in its place.
    says : str
        One sentence: what the code does, and what it should do.
    right, wrong : str
        Both formulas.
    read : str
        Chapter and heading that explain it, as in "10_attention: The softmax".
    convention : bool
        Whether both are in use, so that the difference is none of right and wrong.
    lacks : tuple of str
        Endings of roles that the model must lack, such as ("o.weight",); it is tried then only.
    has : tuple of str
        Endings of roles that the model must have in addition, such as ("head.weight",).
    around : bool
        Whether `replace` gets the method in whose place it stands, bound to nothing, as its
        second argument.
    """

    name: str
    step: str
    replace: Callable
    says: str
    right: str
    wrong: str
    read: str
    convention: bool = False
    lacks: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    around: bool = False

    def applies_to(self, steps: type[Steps]) -> bool:
        """Whether the model has the step."""
        return hasattr(steps, self.step)

    def applied_to(self, steps: type[Steps]) -> type[Steps]:
        """The class of the model with this mistake."""
        method = self.replace
        if self.around:
            method = partialmethod(method, getattr(steps, self.step))
        return type(steps.__name__, (steps,), {self.step: method})


CATALOGUE: list[Mistake] = []


def mistake(step: str, name: str, **facts: Any) -> Callable:
    """Add the decorated function to the catalogue as a replacement of a step.

    Parameters
    ----------
    step, name, **facts
        As of `Mistake`.
    """
    def add(function: Callable) -> Callable:
        CATALOGUE.append(Mistake(name=name, step=step, replace=function, **facts))
        return function
    return add


# %% mistakes: the scale and the softmax
ROOT = "10_attention: Why divide by the root of d"
SOFTMAX = "10_attention: The softmax"
MASKS = "10_attention: Entries that may not be chosen"
CAUSAL = "21_transformer: What the decoder sees, and what it must say"
HEADS = "11_multihead: Several heads"
PACKED = "11_multihead: One matrix for queries, keys and values"
USES = "11_multihead: The three uses in the Transformer"
ORDER = "12_position: Order is lost"
SINUSOIDS = "12_position: A code for each position"
ROTARY = "12_position: Rotary"
CACHE = "22_decoding: What a decoder can keep"
NORM = "21_transformer: Why a norm"
LAYER = "21_transformer: Add and norm: a layer"
NORM_PLACE = "21_transformer: Where the norm stands: gradients"
SKIP = "21_transformer: What the skip does, and what the network does"
MLP = "21_transformer: The position-wise network"
GATE = "35_vit_variants: SwiGLU: a gate in the MLP"
SINCE = "24_gpt: What changed since 2019"
EMBEDDING = "21_transformer: From tokens to vectors and back"
TYING = "21_transformer: What tying does to the first logits"
GPT_MODEL = "24_gpt: The model"
STEP = "21_transformer: One training step by hand"
NEXT = "24_gpt: One pass, all losses"
LOSS = "21_transformer: The loss"
STACK = "21_transformer: The whole model"


@mistake("scale", "no scale",
         says="The logits are not divided by the square root of a head's width.",
         right="softmax(q kᵀ / √d) v", wrong="softmax(q kᵀ) v", read=ROOT)
def _no_scale(self, q, k):
    return 1.0


@mistake("scale", "scaled by the model's width",
         says="The logits are divided by √embed_dim instead of √head_dim.",
         right="q kᵀ / √d", wrong="q kᵀ / √(h d)", read=ROOT)
def _scale_of_the_model(self, q, k):
    return (q.shape[-1] * q.shape[1]) ** -0.5


@mistake("scale", "scaled twice",
         says="The logits are divided by √d twice, for example once in the query and once in "
              "the product, or by d in place of its square root.",
         right="q kᵀ / √d", wrong="q kᵀ / d", read=ROOT)
def _scale_twice(self, q, k):
    return q.shape[-1] ** -1.0


@mistake("scale", "multiplied by the scale's inverse",
         says="The logits are multiplied by √head_dim, by which they should be divided.",
         right="q kᵀ / √d", wrong="q kᵀ √d", read=ROOT)
def _scale_inverted(self, q, k):
    return q.shape[-1] ** 0.5


@mistake("scale", "scaled by the number of heads",
         says="The logits are divided by the square root of the number of heads instead of "
              "√head_dim.",
         right="q kᵀ / √d", wrong="q kᵀ / √h", read=ROOT)
def _scale_of_the_heads(self, q, k):
    return q.shape[1] ** -0.5


@mistake("scale", "scaled by the number of keys",
         says="The logits are divided by the square root of the number of keys (the wrong axis "
              "of the shape) instead of √head_dim.",
         right="q kᵀ / √d", wrong="q kᵀ / √M", read=ROOT)
def _scale_of_the_keys(self, q, k):
    return k.shape[-2] ** -0.5


@mistake("weigh", "scale after the softmax",
         says="The division by √head_dim comes after the softmax, where it only makes the "
              "output smaller; it should act on the logits.",
         right="softmax(q kᵀ / √d) v", wrong="softmax(q kᵀ) / √d · v", read=ROOT)
def _scale_after_softmax(self, q, k, v, mask):
    logits = q @ k.transpose(-2, -1)
    mask = self.allowed(q.shape[-2], k.shape[-2], mask)
    weights = self.attention_weights(logits, mask) * self.scale(q, k)
    return self.average(self.drop(weights, mask), v)


@mistake("logits", "keys reshaped instead of transposed",
         says="The keys (B, h, M, d) are reshaped to (B, h, d, M), which scrambles their "
              "numbers; they should be transposed.",
         right="q @ k.transpose(-2, -1)", wrong="q @ k.reshape(B, h, d, M)", read=HEADS)
def _keys_reshaped(self, q, k):
    m, d = k.shape[-2:]
    return q @ k.reshape(*k.shape[:-2], d, m) * self.scale(q, k)


@mistake("logits", "queries compared with queries",
         says="The logits are products of queries with queries; they should be products of "
              "queries with keys.",
         right="q kᵀ", wrong="q qᵀ", read="10_attention: Looking up by content")
def _queries_with_queries(self, q, k):
    return q @ q.transpose(-2, -1) * self.scale(q, k)


@mistake("logits", "keys compared with keys",
         says="The logits are products of keys with keys; they should be products of queries "
              "with keys.",
         right="q kᵀ", wrong="k kᵀ", read="10_attention: Looking up by content")
def _keys_with_keys(self, q, k):
    return k @ k.transpose(-2, -1) * self.scale(q, k)


@mistake("softmax", "softmax over the queries",
         says="The softmax runs over the queries (axis -2) instead of over the keys (axis -1).",
         right="softmax over axis -1", wrong="softmax over axis -2", read=SOFTMAX)
def _softmax_over_queries(self, logits):
    return logits.softmax(-2)


@mistake("softmax", "softmax over the heads",
         says="The softmax runs over the heads (axis 1 of (B, h, N, M)) instead of over the "
              "keys (axis -1).",
         right="softmax over axis -1", wrong="softmax over axis 1", read=SOFTMAX)
def _softmax_over_heads(self, logits):
    return logits.softmax(1)


@mistake("softmax", "softmax over the batch",
         says="The softmax runs over the sequences of the batch (axis 0) instead of over the "
              "keys (axis -1).",
         right="softmax over axis -1", wrong="softmax over axis 0", read=SOFTMAX)
def _softmax_over_batch(self, logits):
    return logits.softmax(0)


@mistake("softmax", "softmax over queries and keys",
         says="The softmax runs over queries and keys together, so that a whole matrix of "
              "weights sums to one; each row should.",
         right="softmax over axis -1", wrong="softmax over the axes (-2, -1)", read=SOFTMAX)
def _softmax_over_matrix(self, logits):
    return logits.flatten(-2).softmax(-1).reshape(logits.shape)


@mistake("softmax", "softmax over everything",
         says="The exponentials are divided by the sum of all of them, because the sum is "
              "given no axis; each row should sum to one.",
         right="exp(x) / exp(x).sum(-1, keepdims=True)", wrong="exp(x) / exp(x).sum()",
         read=SOFTMAX)
def _softmax_over_everything(self, logits):
    return logits.flatten().softmax(0).reshape(logits.shape)


@mistake("softmax", "softmax twice",
         says="The weights go through a second softmax, which makes them almost equal; one is "
              "enough.",
         right="softmax(logits)", wrong="softmax(softmax(logits))", read=SOFTMAX)
def _softmax_twice(self, logits):
    return logits.softmax(-1).softmax(-1)


@mistake("softmax", "no softmax",
         says="The logits themselves are used as weights; they should go through a softmax "
              "first.",
         right="softmax(q kᵀ / √d) v", wrong="(q kᵀ / √d) v", read=SOFTMAX)
def _no_softmax(self, logits):
    return logits


@mistake("softmax", "attention weights are detached",
         says="The attention weights are cut from the graph by detach (or .data, or no_grad), "
              "so that queries and keys get no gradient.",
         right="logits.softmax(-1)", wrong="logits.softmax(-1).detach()", read=STEP)
def _detached_weights(self, logits):
    return logits.softmax(-1).detach()


# %% mistakes: masks
@mistake("hide", "mask inverted",
         says="The mask is read the wrong way around: what it allows is excluded, and what it "
              "excludes is allowed.",
         right="masked_fill(~mask, -inf)", wrong="masked_fill(mask, -inf)", read=MASKS)
def _mask_inverted(self, logits, mask):
    return logits.masked_fill(mask, -math.inf)


@mistake("hide", "mask inverted, with a finite number",
         says="The mask is read the wrong way around: what it allows is excluded by a large "
              "negative number, and what it excludes is allowed.",
         right="masked_fill(~mask, -inf)", wrong="masked_fill(mask, -1e9)", read=MASKS)
def _mask_inverted_finite(self, logits, mask):
    return logits.masked_fill(mask, -1e9)


@mistake("hide", "mask ignored",
         says="The mask has no effect on the logits; excluded ones should be -inf.",
         right="masked_fill(~mask, -inf)", wrong="logits unchanged", read=MASKS)
def _mask_ignored(self, logits, mask):
    return logits


@mistake("hide", "excluded logits are zero",
         says="Excluded logits are set to zero (or multiplied by the mask), but exp(0) = 1 is "
              "a weight as large as others; they should be -inf.",
         right="masked_fill(~mask, -inf)", wrong="logits * mask", read=MASKS)
def _hidden_by_zero(self, logits, mask):
    return logits.masked_fill(~mask, 0.0)


@mistake("hide", "excluded logits are 1e-9",
         says="Excluded logits are set to 1e-9, which is almost zero; -1e9 or -inf is meant.",
         right="masked_fill(~mask, -1e9)", wrong="masked_fill(~mask, 1e-9)", read=MASKS)
def _hidden_by_typing_error(self, logits, mask):
    return logits.masked_fill(~mask, 1e-9)


@mistake("hide", "mask of zeros and ones added",
         says="The boolean mask is added to the logits as zeros and ones; it should be turned "
              "into 0 and -inf first.",
         right="logits + where(mask, 0, -inf)", wrong="logits + mask", read=MASKS)
def _mask_added(self, logits, mask):
    return logits + mask.to(logits.dtype)


@mistake("hide", "mask transposed",
         says="The mask is applied with its two last axes exchanged, so that padding excludes "
              "queries in place of keys, and a causal mask lets tokens see the future only.",
         right="mask[:, None, None, :]", wrong="mask[:, None, :, None]", read=MASKS)
def _mask_transposed(self, logits, mask):
    return logits.masked_fill(~mask.transpose(-2, -1), -math.inf)


@mistake("hide", "mask transposed, with a finite number",
         says="The mask is applied with its two last axes exchanged, so that padding excludes "
              "queries in place of keys: all their logits are one large negative number, and "
              "their weights equal.",
         right="mask[:, None, None, :]", wrong="mask[:, None, :, None]", read=MASKS)
def _mask_transposed_finite(self, logits, mask):
    return logits.masked_fill(~mask.transpose(-2, -1), -1e9)


@mistake("hide", "mask of keys and of queries, with a finite number",
         says="The padding mask excludes padded queries, too: their rows of logits are one "
              "large negative number and their outputs a plain average; only keys should be "
              "excluded.",
         right="mask[:, None, None, :]",
         wrong="mask[:, None, None, :] & mask[:, None, :, None]", read=MASKS)
def _mask_of_both(self, logits, mask):
    return logits.masked_fill(~(mask & mask.transpose(-2, -1)), -1e9)


@mistake("attention_weights", "mask after the softmax",
         says="The mask sets weights to zero after the softmax, so that the rest no longer "
              "sums to one; it should act on the logits.",
         right="softmax(masked logits)", wrong="softmax(logits) * mask", read=MASKS)
def _mask_after_softmax(self, logits, mask):
    weights = self.softmax(logits)
    if mask is None:
        return weights
    return weights * mask


@mistake("attention_weights", "excluded weights are -1e9",
         says="The mask acts after the softmax and puts a large negative number in place of "
              "weights; it should act on the logits.",
         right="softmax(masked_fill(logits))", wrong="masked_fill(softmax(logits), -1e9)",
         read=MASKS)
def _mask_of_weights(self, logits, mask):
    weights = self.softmax(logits)
    if mask is None:
        return weights
    return weights.masked_fill(~mask, -1e9)


@mistake("causal_mask", "no causal mask",
         says="Every token sees the tokens that follow it; it should attend to itself and "
              "those before it only.",
         right="tril(ones(N, N))", wrong="ones(N, N)", read=CAUSAL)
def _no_causal_mask(self, n, m):
    return torch.ones(n, m, dtype=torch.bool)


@mistake("causal_mask", "causal mask shows one token too many",
         says="The causal mask includes the next token, the very one that is to be predicted; "
              "its last allowed key should be the token itself.",
         right="tril(ones, 0)", wrong="tril(ones, 1)", read=CAUSAL)
def _causal_mask_one_more(self, n, m):
    return torch.ones(n, m, dtype=torch.bool).tril(m - n + 1)


@mistake("causal_mask", "causal mask hides the token itself",
         says="The causal mask excludes the token itself, so that the first row has no key at "
              "all (NaN); a token should see itself.",
         right="tril(ones, 0)", wrong="tril(ones, -1)", read=CAUSAL)
def _causal_mask_strict(self, n, m):
    return torch.ones(n, m, dtype=torch.bool).tril(m - n - 1)


@mistake("hide", "causal mask hides the token itself, with a finite number",
         says="The causal mask excludes the token itself; the first token, which then has no "
              "key, averages all values, also those of the future.",
         right="tril(ones, 0)", wrong="tril(ones, -1)", read=CAUSAL)
def _causal_mask_strict_finite(self, logits, mask):
    if self.is_causal():
        n, m = logits.shape[-2:]
        mask = mask & torch.ones(n, m, dtype=torch.bool).tril(m - n - 1)
    return logits.masked_fill(~mask, -1e9)


@mistake("causal_mask", "causal mask aligned at the first key",
         says="With keys in a cache, the triangle of the causal mask begins at the first key, "
              "so that new token i sees the keys 0, ..., i; it should see 0, ..., P + i.",
         right="tril(ones(N, P + N), P)", wrong="tril(ones(N, P + N), 0)", read=CACHE)
def _causal_mask_at_first_key(self, n, m):
    return torch.ones(n, m, dtype=torch.bool).tril(0)


@mistake("is_causal", "causal mask where all may be seen",
         says="A causal mask hides later tokens in a layer in which all tokens may be seen, "
              "such as that of an encoder.",
         right="no causal mask", wrong="tril(ones(N, N))", read=CAUSAL)
def _causal_everywhere(self):
    return not self.scope.endswith("cross.")


# %% mistakes: heads
@mistake("merge", "heads merged without the transpose",
         says="The heads (B, h, N, d) are reshaped to (B, N, h d) at once, which mixes tokens; "
              "they should be transposed to (B, N, h, d) first.",
         right="x.transpose(1, 2).reshape(B, N, h d)", wrong="x.reshape(B, N, h d)", read=HEADS)
def _merge_without_transpose(self, x):
    b, h, n, d = x.shape
    return x.reshape(b, n, h * d)


@mistake("split", "heads split by view alone",
         says="The channels (B, N, h d) are viewed as (B, h, N, d) at once, which mixes "
              "tokens; they should be viewed as (B, N, h, d) and transposed.",
         right="x.view(B, N, h, d).transpose(1, 2)", wrong="x.view(B, h, N, d)", read=HEADS)
def _split_by_view(self, x, heads):
    b, n, width = x.shape
    return x.reshape(b, heads, n, width // heads)


@mistake("merge", "channels of the heads interleaved in merging",
         says="The heads are merged channel by channel, 'b h n d -> b n (d h)'; each head's "
              "channels should stand together.",
         right="b h n d -> b n (h d)", wrong="b h n d -> b n (d h)", read=HEADS)
def _merge_interleaved(self, x):
    return x.permute(0, 2, 3, 1).flatten(2)


@mistake("split", "channels of the heads interleaved in splitting",
         says="Every h-th channel goes to the same head, 'b n (d h) -> b h n d'; each head "
              "should get d neighboring channels.",
         right="b n (h d) -> b h n d", wrong="b n (d h) -> b h n d", read=HEADS)
def _split_interleaved(self, x, heads):
    return x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)


@mistake("split", "only one head",
         says="The channels are not divided among heads: one head of the full width attends.",
         right="h heads of width d", wrong="one head of width h d",
         read="11_multihead: One average is not enough")
def _one_head(self, x, heads):
    return x.unflatten(-1, (1, -1)).transpose(1, 2)


@mistake("weigh", "attention among the heads",
         says="The heads are not moved in front of the tokens, so that at each token the heads "
              "attend to each other and no token sees another one.",
         right="q: (B, h, N, d)", wrong="q: (B, N, h, d)", read=HEADS)
def _attention_among_heads(self, q, k, v, mask):
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    weights = self.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5)
    return (weights @ v).transpose(1, 2)


@mistake("attend", "attention over the batch", around=True,
         says="Tokens attend to those of the other sequences in the batch: the layer takes "
              "axis 0 for the tokens (batch_first is False in PyTorch unless it is set).",
         right="x: (B, N, C)", wrong="x read as (N, B, C)",
         read="11_multihead: Parity with PyTorch")
def _attention_over_batch(self, usual, x, context, mask):
    return usual(self, x.transpose(0, 1), context.transpose(0, 1), mask).transpose(0, 1)


@mistake("average", "attention weights transposed",
         says="The values are averaged with the transposed weights, whose rows do not sum to "
              "one.",
         right="weights @ v", wrong="weightsᵀ @ v", read=SOFTMAX)
def _weights_transposed(self, weights, v):
    return weights.transpose(-2, -1) @ v


@mistake("weigh", "keys averaged instead of values", around=True,
         says="The weights average the keys; they should average the values.",
         right="softmax(q kᵀ / √d) v", wrong="softmax(q kᵀ / √d) k",
         read="10_attention: Looking up by content")
def _keys_averaged(self, usual, q, k, v, mask):
    return usual(self, q, k, k, mask)


@mistake("average", "values are detached",
         says="The values are cut from the graph by detach (or .data, or no_grad), so that "
              "they get no gradient.",
         right="weights @ v", wrong="weights @ v.detach()", read=STEP)
def _values_detached(self, weights, v):
    return weights @ v.detach()


def _exchanged(first: str, second: str, third: str) -> Callable:
    """A projection to q, k, v that takes the matrices of these roles."""
    def project_qkv(self, x, context):
        return self.project(first, x), self.project(second, context), self.project(third,
                                                                                   context)
    return project_qkv


for _order in ("kqv", "qvk", "vkq", "kvq", "vqk"):
    mistake("project_qkv", f"projections in the order {', '.join(_order)}",
            says="The projections of queries, keys, and values are exchanged: the queries are "
                 f"made by W_{_order[0]}, the keys by W_{_order[1]}, the values by "
                 f"W_{_order[2]}.",
            right="q, k, v", wrong=", ".join(_order), read=PACKED)(_exchanged(*_order))


for _order in ("qqv", "kkv", "qvv"):
    mistake("project_qkv", f"projections by the matrices {', '.join(_order)}",
            says="A projection is made by the matrix of another one, as after copying a line: "
                 f"queries, keys, and values are made by {', '.join(_order)} in place of "
                 "q, k, v.",
            right="q, k, v", wrong=", ".join(_order), read=PACKED)(_exchanged(*_order))


@mistake("project_qkv", "no matrix of keys", lacks=("k.weight",),
         says="The model has no matrix of keys: the queries' makes the keys, too.",
         right="q = W_q x, k = W_k x", wrong="q = k = W_q x", read=PACKED)
def _keys_are_queries(self, x, context):
    return self.project("q", x), self.project("q", context), self.project("v", context)


@mistake("project_qkv", "no matrix of values", lacks=("v.weight",),
         says="The model has no matrix of values: the inputs themselves are averaged.",
         right="weights @ W_v x", wrong="weights @ x", read=PACKED)
def _values_are_inputs(self, x, context):
    return self.project("q", x), self.project("k", context), context


@mistake("project_qkv", "no bias in the projections", lacks=("q.bias", "k.bias", "v.bias"),
         says="The layers that make queries, keys, and values have no bias.",
         right="W x + b", wrong="W x", read=PACKED)
def _no_bias(self, x, context):
    projected = []
    for name, source in (("q", x), ("k", context), ("v", context)):
        projected.append(F.linear(source, self.weight(f"{name}.weight")))
    return tuple(projected)


@mistake("output", "no bias in the output projection", lacks=("o.bias",),
         says="The output projection has no bias.",
         right="W_o x + b_o", wrong="W_o x", read="11_multihead: The layer")
def _no_output_bias(self, x):
    return F.linear(x, self.weight("o.weight"))


@mistake("output", "output projection not used",
         says="The output projection is not applied to the merged heads.",
         right="W_o concat(heads)", wrong="concat(heads)", read="11_multihead: The layer")
@mistake("output", "no output projection", lacks=("o.weight",),
         says="The layer has no output projection, which mixes the merged heads.",
         right="W_o concat(heads)", wrong="concat(heads)", read="11_multihead: The layer")
def _no_output_projection(self, x):
    return x


@mistake("output", "output matrix not transposed",
         says="The output projection multiplies by W where x Wᵀ is right (an nn.Linear keeps "
              "its matrix as (out, in)).",
         right="x @ W.T + b", wrong="x @ W + b", read="11_multihead: The layer")
def _output_matrix_transposed(self, x):
    bias = self.weight("o.bias")
    x = x @ self.weight("o.weight")
    return x if bias is None else x + bias


@mistake("attend", "residual inside attention", around=True,
         says="The attention layer adds its input to its output; the residual connection "
              "belongs to the block, which adds it again.",
         right="attention(x)", wrong="x + attention(x)", read=LAYER)
def _residual_in_attention(self, usual, x, context, mask):
    return x + usual(self, x, context, mask)


@mistake("share", "grouped heads tiled",
         says="The heads of keys and values are repeated as a whole (k0, k1, k0, k1); each "
              "should be repeated for the query heads of its group (k0, k0, k1, k1).",
         right="repeat_interleave(groups, dim=1)", wrong="repeat(1, groups, 1, 1)", read=SINCE)
def _heads_tiled(self, x):
    return x.repeat(1, self.config.num_heads // x.shape[1], 1, 1)


# %% mistakes: cross-attention
@mistake("project_qkv", "cross-attention reads its own tokens",
         says="Keys and values are made of x, so that the context has no effect; they should "
              "be made of the context.",
         right="k, v of the context", wrong="k, v of x", read=USES)
def _context_ignored(self, x, context):
    return self.project("q", x), self.project("k", x), self.project("v", x)


@mistake("project_qkv", "queries and context exchanged",
         says="The queries are made of the context, and keys and values of x; it should be the "
              "other way around.",
         right="q of x, k and v of the context", wrong="q of the context, k and v of x",
         read=USES)
def _context_asks(self, x, context):
    return self.project("q", context), self.project("k", x), self.project("v", x)


@mistake("project_qkv", "values of the tokens in cross-attention",
         says="The keys are made of the context, but the values of x; both should be made of "
              "the context.",
         right="k, v of the context", wrong="k of the context, v of x", read=USES)
def _values_of_x(self, x, context):
    return self.project("q", x), self.project("k", context), self.project("v", x)


@mistake("project_qkv", "keys of the tokens in cross-attention",
         says="The values are made of the context, but the keys of x; both should be made of "
              "the context.",
         right="k, v of the context", wrong="k of x, v of the context", read=USES)
def _keys_of_x(self, x, context):
    return self.project("q", x), self.project("k", x), self.project("v", context)


@mistake("decoder_block", "cross-attention before self-attention",
         says="The decoder attends to the memory before it attends to itself; self-attention "
              "comes first.",
         right="self-attention, cross-attention, MLP",
         wrong="cross-attention, self-attention, MLP", read=CAUSAL)
def _cross_first(self, x, memory, mask=None):
    x = self.sublayer("norm2", x, lambda y: self.cross_branch(y, memory, mask))
    x = self.sublayer("norm1", x, lambda y: self.attention_branch(y, None))
    return self.sublayer("norm3", x, self.mlp_branch)


@mistake("decoder_block", "no residual connection around cross-attention",
         says="The output of cross-attention replaces the tokens; it should be added to them.",
         right="x + cross(x)", wrong="cross(x)", read=SKIP)
def _cross_without_residual(self, x, memory, mask=None):
    x = self.sublayer("norm1", x, lambda y: self.attention_branch(y, None))
    if self.norm_first():
        x = self.cross_branch(self.norm("norm2", x), memory, mask)
    else:
        x = self.norm("norm2", self.cross_branch(x, memory, mask))
    return self.sublayer("norm3", x, self.mlp_branch)


@mistake("decoder_block", "self-attention of the decoder left out",
         says="The decoder layer has no self-attention: it attends to the memory only.",
         right="self-attention, cross-attention, MLP", wrong="cross-attention, MLP",
         read=CAUSAL)
def _no_self_attention(self, x, memory, mask=None):
    x = self.sublayer("norm2", x, lambda y: self.cross_branch(y, memory, mask))
    return self.sublayer("norm3", x, self.mlp_branch)


@mistake("memory_mask", "padding of the source is seen by the decoder",
         says="The decoder attends to padding of the source; the source's mask should be given "
              "to cross-attention, too.",
         right="cross(x, memory, src_mask)", wrong="cross(x, memory)", read=CAUSAL)
def _no_memory_mask(self, src):
    return None


@mistake("source_mask", "padding of the source is seen by the encoder",
         says="The encoder attends to padding of the source; it needs the padding mask.",
         right="encoder(src, src_mask)", wrong="encoder(src)", read=MASKS)
def _no_source_mask(self, src):
    return None


@mistake("memory_of", "each decoder layer reads the encoder layer of its number",
         says="Decoder layer i attends to the output of encoder layer i; all of them should "
              "attend to the output of the last encoder layer.",
         right="memory = encoder(src)", wrong="memory_i = output of encoder layer i",
         read=STACK)
def _memory_by_layer(self, i, states):
    return states[i]


@mistake("memory_of", "memory is detached",
         says="The encoder's output is cut from the graph, so that the encoder gets no "
              "gradient through the decoder and does not learn.",
         right="memory", wrong="memory.detach()", read=STEP)
def _memory_detached(self, i, states):
    return states[-1].detach()


# %% mistakes: norms
@mistake("spread", "variance over N - 1",
         says="The variance is divided by N - 1 (the default of x.var and x.std); a norm "
              "divides by N.",
         right="x.var(-1, unbiased=False)", wrong="x.var(-1)", read=NORM)
def _unbiased_variance(self, centered):
    count = centered.square().sum(self.norm_axis(centered), keepdim=True)
    count = centered.numel() // count.numel()
    variance = centered.square().mean(self.norm_axis(centered), keepdim=True)
    return (variance * count / (count - 1) + self.eps()).sqrt()


@mistake("spread", "epsilon outside of the root",
         says="The epsilon is added to the standard deviation; it should be added to the "
              "variance, under the root.",
         right="x / √(var + ε)", wrong="x / (√var + ε)", read=NORM)
def _epsilon_outside(self, centered):
    variance = centered.square().mean(self.norm_axis(centered), keepdim=True)
    return variance.sqrt() + self.eps()


@mistake("spread", "deviation over N - 1, and epsilon outside of the root",
         says="The norm divides by x.std() + ε, as in the Annotated Transformer; the variance "
              "should be divided by N, and ε be added under the root.",
         right="x / √(var + ε)", wrong="x / (x.std(-1) + ε)", read=NORM)
def _annotated_norm(self, centered):
    count = centered.square().sum(self.norm_axis(centered), keepdim=True)
    count = centered.numel() // count.numel()
    variance = centered.square().mean(self.norm_axis(centered), keepdim=True)
    return (variance * count / (count - 1)).sqrt() + self.eps()


@mistake("spread", "divided by the variance",
         says="The norm divides by the variance; it should divide by its square root.",
         right="x / √(var + ε)", wrong="x / (var + ε)", read=NORM)
def _no_root(self, centered):
    variance = centered.square().mean(self.norm_axis(centered), keepdim=True)
    return variance + self.eps()


@mistake("spread", "sum of squares instead of their mean",
         says="The norm divides by the Euclidean length of a token; it should divide by the "
              "root of the mean of squares, which is smaller by √dim.",
         right="x / √(mean(x²) + ε)", wrong="x / √(sum(x²) + ε)", read=NORM)
def _sum_of_squares(self, centered):
    total = centered.square().sum(self.norm_axis(centered), keepdim=True)
    return (total + self.eps()).sqrt()


@mistake("norm_axis", "norm over the tokens",
         says="Mean and variance run over the tokens (axis -2); they should run over the "
              "channels of each token (axis -1).",
         right="x.mean(-1)", wrong="x.mean(-2)", read=NORM)
def _norm_over_tokens(self, x):
    return -2


@mistake("norm_axis", "norm over tokens and channels",
         says="Mean and variance run over all tokens and channels of a sequence together; each "
              "token should be normalized by itself.",
         right="x.mean(-1)", wrong="x.mean((-2, -1))", read=NORM)
def _norm_over_sequence(self, x):
    return (-2, -1)


@mistake("norm_axis", "norm over the batch",
         says="Mean and variance run over the sequences of the batch (axis 0); they should run "
              "over the channels of each token (axis -1).",
         right="x.mean(-1)", wrong="x.mean(0)", read=NORM)
def _norm_over_batch(self, x):
    return 0


@mistake("norm_axis", "norm over everything",
         says="Mean and variance are those of all numbers, because they are given no axis; "
              "each token should be normalized by itself.",
         right="x.mean(-1)", wrong="x.mean()", read=NORM)
def _norm_over_everything(self, x):
    return tuple(range(x.ndim))


@mistake("norm_axis", "norm over batch and tokens",
         says="Each channel is normalized over all tokens of the batch, as batch norm does; "
              "each token should be normalized over its channels.",
         right="x.mean(-1)", wrong="x.mean((0, 1))", read=NORM)
def _batch_norm(self, x):
    return tuple(range(x.ndim - 1))


def _epsilon(value: float) -> Callable:
    """A step `eps` that returns the value."""
    def eps(self):
        return value
    return eps


for _eps in (1e-3, 1e-5, 1e-6, 1e-8, 1e-12, 0.0):
    mistake("eps", f"epsilon of {_eps:g}", convention=True,
            says=f"The epsilon of the norms is {_eps:g}, another value than in the reference.",
            right="the reference's ε", wrong=f"ε = {_eps:g}", read=NORM)(_epsilon(_eps))


@mistake("is_centered", "mean not subtracted",
         says="The norm divides by the root mean square, as RMS norm does; layer norm "
              "subtracts the mean first.",
         right="(x - mean) / √(var + ε)", wrong="x / √(mean(x²) + ε)", read=SINCE)
def _rms_in_place_of_layer(self):
    return False


@mistake("is_centered", "mean subtracted",
         says="The norm subtracts the mean, as layer norm does; RMS norm only divides by the "
              "root mean square.",
         right="x / √(mean(x²) + ε)", wrong="(x - mean) / √(var + ε)", read=SINCE)
def _layer_in_place_of_rms(self):
    return True


@mistake("affine", "gain and bias of the norms not applied",
         says="The norm returns normalized tokens without the learned gain and bias.",
         right="gain * x + bias", wrong="x", read=NORM)
def _no_affine(self, x, gain, bias):
    return x


@mistake("affine", "bias of the norm before its gain",
         says="The bias is added before the multiplication by the gain; it should be added "
              "after it.",
         right="x * gain + bias", wrong="(x + bias) * gain", read=NORM)
def _bias_before_gain(self, x, gain, bias):
    if bias is not None:
        x = x + bias
    return x if gain is None else x * gain


@mistake("affine", "gain is one plus the parameter", convention=True,
         says="The norm multiplies by 1 + gain, as in Gemma, where the gain begins at zero.",
         right="x * gain", wrong="x * (1 + gain)", read=NORM)
def _gain_plus_one(self, x, gain, bias):
    if gain is not None:
        x = x * (1 + gain)
    return x if bias is None else x + bias


# %% mistakes: blocks
@mistake("norm_first", "norm in the other place", around=True,
         says="The norm stands in the other place: x + f(norm(x)) and norm(x + f(x)), pre-norm "
              "and post-norm, are exchanged.",
         right="the reference's order", wrong="pre-norm for post-norm, or the reverse",
         read=NORM_PLACE)
def _other_norm_place(self, usual):
    return not usual(self)


@mistake("add", "residual from the norm's output",
         says="The branch is added to the normalized tokens; it should be added to those "
              "before the norm.",
         right="x + f(norm(x))", wrong="norm(x) + f(norm(x))", read=SKIP)
def _residual_from_norm(self, x, normed, branch):
    return normed + branch


@mistake("add", "no residual connections",
         says="The branches replace the tokens; they should be added to them.",
         right="x + f(norm(x))", wrong="f(norm(x))", read=SKIP)
def _no_residual(self, x, normed, branch):
    return branch


@mistake("sublayer", "no residual connection around attention", around=True,
         says="The output of attention replaces the tokens; it should be added to them.",
         right="x + attention(norm(x))", wrong="attention(norm(x))", read=SKIP)
def _no_residual_of_attention(self, usual, name, x, branch):
    if self.is_mlp(name):
        return usual(self, name, x, branch)
    if self.norm_first():
        return branch(self.norm(name, x))
    return self.norm(name, branch(x))


@mistake("sublayer", "no residual connection around the MLP", around=True,
         says="The output of the MLP replaces the tokens; it should be added to them.",
         right="x + mlp(norm(x))", wrong="mlp(norm(x))", read=SKIP)
def _no_residual_of_mlp(self, usual, name, x, branch):
    if not self.is_mlp(name):
        return usual(self, name, x, branch)
    if self.norm_first():
        return branch(self.norm(name, x))
    return self.norm(name, branch(x))


@mistake("sublayer", "no norm before attention", around=True,
         says="The norm of the attention branch is not applied.",
         right="x + attention(norm1(x))", wrong="x + attention(x)", read=LAYER)
def _no_norm_of_attention(self, usual, name, x, branch):
    if self.is_mlp(name):
        return usual(self, name, x, branch)
    return self.add(x, x, branch(x))


@mistake("sublayer", "no norm before the MLP", around=True,
         says="The norm of the MLP branch is not applied.",
         right="x + mlp(norm2(x))", wrong="x + mlp(x)", read=LAYER)
def _no_norm_of_mlp(self, usual, name, x, branch):
    if not self.is_mlp(name):
        return usual(self, name, x, branch)
    return self.add(x, x, branch(x))


@mistake("sublayer", "norm at the end of the branch",
         says="The norm is applied to the branch's output, as in Swin V2, instead of to its "
              "input or to the sum.",
         right="x + f(norm(x)), or norm(x + f(x))", wrong="x + norm(f(x))",
         read="33_swinv2: The norm moves to the end of the branch")
def _norm_of_branch(self, name, x, branch):
    return x + self.norm(name, branch(x))


@mistake("add", "skip connections are detached",
         says="The skip connection is cut from the graph, so that the gradient reaches earlier "
              "layers through the branches only.",
         right="x + f(norm(x))", wrong="x.detach() + f(norm(x))", read=STEP)
def _skip_detached(self, x, normed, branch):
    return x.detach() + branch


@mistake("add", "branches are detached",
         says="The branch is cut from the graph, so that its layers get no gradient and do not "
              "learn.",
         right="x + f(norm(x))", wrong="x + f(norm(x)).detach()", read=STEP)
def _branch_detached(self, x, normed, branch):
    return x + branch.detach()


@mistake("block", "second residual from the block's input",
         says="The MLP's output is added to the input of the block, and attention reaches the "
              "output through the MLP only; it should be added to the sum after attention.",
         right="x = x + a; x + mlp(norm(x))", wrong="y = x + a; x + mlp(norm(y))", read=SKIP)
def _residual_from_input(self, x, mask=None):
    after = self.sublayer("norm1", x, lambda y: self.attention_branch(y, mask))
    if self.norm_first():
        return x + self.mlp_branch(self.norm("norm2", after))
    return self.norm("norm2", x + self.mlp_branch(after))


@mistake("block", "keys and values without the norm",
         says="The queries are made of the normalized tokens, but keys and values of those "
              "before the norm, as in attention(norm(x), x, x).",
         right="h = norm(x); attention(h, h, h)", wrong="attention(norm(x), x, x)", read=LAYER,
         around=True)
def _keys_without_norm(self, usual, x, mask=None):
    if not self.norm_first():
        return usual(self, x, mask)
    normed = self.norm("norm1", x)
    with self.inside("attn"):
        branch = self.attend(normed, x, mask)
    x = self.add(x, normed, branch)
    return self.sublayer("norm2", x, self.mlp_branch)


@mistake("block", "MLP before attention",
         says="The MLP comes before attention in the block; attention should come first.",
         right="attention, MLP", wrong="MLP, attention", read=LAYER)
def _mlp_first(self, x, mask=None):
    x = self.sublayer("norm2", x, self.mlp_branch)
    return self.sublayer("norm1", x, lambda y: self.attention_branch(y, mask))


@mistake("block", "attention and MLP in parallel",
         says="The MLP reads the input of the block, in parallel with attention, as in GPT-J; "
              "it should read the tokens after attention.",
         right="x = x + attention(norm1(x)); x + mlp(norm2(x))",
         wrong="x + attention(norm1(x)) + mlp(norm2(x))", read=LAYER)
def _parallel_branches(self, x, mask=None):
    first = self.sublayer("norm1", x, lambda y: self.attention_branch(y, mask))
    second = self.sublayer("norm2", x, self.mlp_branch)
    return first + second - x


@mistake("block", "one norm for both branches",
         says="The MLP branch uses the norm of the attention branch; it should have its own.",
         right="x + mlp(norm2(x))", wrong="x + mlp(norm1(x))", read=LAYER)
def _one_norm(self, x, mask=None):
    x = self.sublayer("norm1", x, lambda y: self.attention_branch(y, mask))
    normed = self.norm("norm1", x)
    if self.norm_first():
        return self.add(x, normed, self.mlp_branch(normed))
    return self.norm("norm1", self.add(x, x, self.mlp_branch(x)))


@mistake("block", "norms of the branches exchanged",
         says="The attention branch uses norm2, and the MLP branch norm1.",
         right="norm1 for attention, norm2 for the MLP",
         wrong="norm2 for attention, norm1 for the MLP", read=LAYER)
def _norms_exchanged(self, x, mask=None):
    parts = [("norm2", lambda y: self.attention_branch(y, mask)), ("norm1", self.mlp_branch)]
    for name, branch in parts:
        if self.norm_first():
            normed = self.norm(name, x)
            x = self.add(x, normed, branch(normed))
        else:
            x = self.norm(name, self.add(x, x, branch(x)))
    return x


@mistake("block", "no MLP in the block",
         says="The block ends after attention; the position-wise network is never called.",
         right="x = x + attention(norm1(x)); x + mlp(norm2(x))",
         wrong="x + attention(norm1(x))", read=LAYER)
def _no_mlp(self, x, mask=None):
    return self.sublayer("norm1", x, lambda y: self.attention_branch(y, mask))


@mistake("final_norm", "final norm not used",
         says="The norm after the last block is not applied.",
         right="head(norm(x))", wrong="head(x)", read=NORM_PLACE)
@mistake("final_norm", "no final norm", lacks=("norm.weight",),
         says="The model has no norm after the last block.",
         right="head(norm(x))", wrong="head(x)", read=NORM_PLACE)
def _no_final_norm(self, x):
    return x


@mistake("layer_number", "all blocks are one",
         says="All blocks have the same parameters, as [block] * n makes them; each should be "
              "constructed by itself.",
         right="[Block() for _ in range(n)]", wrong="[Block()] * n", read=STACK)
def _one_block(self, i):
    return 0


@mistake("layer_number", "blocks in reverse order",
         says="The blocks run from the last to the first.",
         right="block 0, 1, ..., n - 1", wrong="block n - 1, ..., 1, 0", read=STACK)
def _blocks_reversed(self, i):
    return self.config.depth - 1 - i


@mistake("blocks", "every block reads the embeddings",
         says="Each block is given the embeddings, and only the last block's output is used; "
              "it should be given the output of the block before it.",
         right="x = block(x)", wrong="y = block(x)", read=STACK)
def _blocks_read_embeddings(self, x, mask=None):
    with self.inside(f"blocks.{self.layer_number(self.config.depth - 1)}"):
        return self.block(x, mask)


@mistake("blocks", "last block left out",
         says="The last block is never called, as with range(n - 1).",
         right="for i in range(n)", wrong="for i in range(n - 1)", read=STACK)
def _last_block_left_out(self, x, mask=None):
    for i in range(self.config.depth - 1):
        with self.inside(f"blocks.{self.layer_number(i)}"):
            x = self.block(x, mask)
    return x


# %% mistakes: the MLP
def _quick_gelu(x: Tensor) -> Tensor:
    """The approximation of GELU in OpenAI's CLIP."""
    return x * torch.sigmoid(1.702 * x)


GELUS = ("gelu", "gelu_tanh", "quick_gelu")
_FORMS = {  # of GELU: formula and function
    "exact GELU": ("x Φ(x)", F.gelu),
    "GELU's tanh approximation": ("½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))",
                                  lambda x: F.gelu(x, approximate="tanh")),
    "QuickGELU": ("x sigmoid(1.702 x)", _quick_gelu),
}
_ACTIVATIONS = {
    **_FORMS, "ReLU": ("max(x, 0)", F.relu), "SiLU": ("x sigmoid(x)", F.silu),
    "tanh": ("tanh(x)", torch.tanh), "sigmoid": ("sigmoid(x)", torch.sigmoid),
    "the leaky ReLU": ("max(x, 0.01 x)", F.leaky_relu),
    "the exponential unit (ELU)": ("x if x > 0 else exp(x) - 1", F.elu),
    "squared ReLU": ("max(x, 0)²", lambda x: F.relu(x).square()),
    "the identity": ("x", lambda x: x),
}


def _other_form(function: Callable) -> Callable:
    """A step `activation` that applies the function where the reference has a GELU."""
    def activation(self, usual, x):
        return function(x) if self.config.act in GELUS else usual(self, x)
    return activation


def _other_activation(function: Callable, is_form: bool) -> Callable:
    """A step `activation` that applies the function, if it is no other form of GELU."""
    def activation(self, usual, x):
        if is_form and self.config.act in GELUS:
            return usual(self, x)
        return function(x)
    return activation


for _name, (_formula, _function) in _FORMS.items():
    mistake("activation", f"{_name} as the form of GELU", around=True, convention=True,
            says=f"GELU is computed as {_name}, another form than in the reference.",
            right="the reference's form of GELU", wrong=_formula,
            read=MLP)(_other_form(_function))

for _name, (_formula, _function) in _ACTIVATIONS.items():
    mistake("activation", f"{_name} as activation", around=True,
            says=f"The activation of the MLP is {_name}, and should be another function.",
            right="the reference's activation", wrong=_formula,
            read=MLP)(_other_activation(_function, _name in _FORMS))


@mistake("activation", "GELU with a factor of the cube left out",
         says="The tanh approximation of GELU lacks the factor 0.044715 of x³ or has it in "
              "another place.",
         right="tanh(√(2/π) (x + 0.044715 x³))", wrong="tanh(√(2/π) (x + x³))", read=MLP)
def _gelu_without_factor(self, x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + x**3)))


@mistake("mlp", "activation after the second layer, too", around=True,
         says="The MLP ends with an activation; nothing should follow its second layer.",
         right="W₂ σ(W₁ x)", wrong="σ(W₂ σ(W₁ x))", read=MLP)
def _activation_at_the_end(self, usual, x):
    x = usual(self, x)
    return F.silu(x) if self.config.act == "swiglu" else self.activation(x)


@mistake("mlp", "activation after the second layer",
         says="The activation follows the second layer; it should stand between both.",
         right="W₂ act(W₁ x)", wrong="act(W₂ W₁ x)", read=MLP)
def _activation_last(self, x):
    return self.activation(self.linear("fc2", self.linear("fc1", x)))


@mistake("mlp", "residual inside the MLP", around=True,
         says="The MLP adds its input to its output; the residual connection belongs to the "
              "block, which adds it again.",
         right="mlp(x)", wrong="x + mlp(x)", read=LAYER)
def _residual_in_mlp(self, usual, x):
    return x + usual(self, x)


@mistake("mlp", "no biases in the MLP", lacks=("fc1.bias", "fc2.bias"),
         says="The two layers of the MLP have no bias.",
         right="W₂ σ(W₁ x + b₁) + b₂", wrong="W₂ σ(W₁ x)", read=MLP)
def _no_mlp_bias(self, x):
    hidden = self.activation(F.linear(x, self.weight("fc1.weight")))
    return F.linear(hidden, self.weight("fc2.weight"))


@mistake("gated", "gate and value exchanged",
         says="The activation is applied to the value (up) instead of to the gate.",
         right="silu(W_g x) ⊙ W_u x", wrong="W_g x ⊙ silu(W_u x)", read=GATE)
def _gate_exchanged(self, gate, up):
    return gate * F.silu(up)


@mistake("gated", "sigmoid as gate",
         says="The gate is a sigmoid (a GLU); in SwiGLU it is SiLU.",
         right="silu(W_g x) ⊙ W_u x", wrong="sigmoid(W_g x) ⊙ W_u x", read=GATE)
def _sigmoid_gate(self, gate, up):
    return torch.sigmoid(gate) * up


@mistake("gated", "GELU as gate", convention=True,
         says="The gate is GELU (a GEGLU, as in Gemma's relatives and T5 1.1); in SwiGLU it is "
              "SiLU.",
         right="silu(W_g x) ⊙ W_u x", wrong="gelu(W_g x) ⊙ W_u x", read=GATE)
def _gelu_gate(self, gate, up):
    return F.gelu(gate) * up


@mistake("gated", "ReLU as gate",
         says="The gate is ReLU (a ReGLU); in SwiGLU it is SiLU.",
         right="silu(W_g x) ⊙ W_u x", wrong="relu(W_g x) ⊙ W_u x", read=GATE)
def _relu_gate(self, gate, up):
    return F.relu(gate) * up


@mistake("gated", "gate without activation",
         says="Gate and value are multiplied without an activation; the gate should go through "
              "SiLU.",
         right="silu(W_g x) ⊙ W_u x", wrong="W_g x ⊙ W_u x", read=GATE)
def _linear_gate(self, gate, up):
    return gate * up


@mistake("gated", "activation after the product",
         says="SiLU is applied to the product of gate and value; it should be applied to the "
              "gate alone.",
         right="silu(W_g x) ⊙ W_u x", wrong="silu(W_g x ⊙ W_u x)", read=GATE)
def _activation_of_product(self, gate, up):
    return F.silu(gate * up)


@mistake("gated", "gate multiplied with itself",
         says="The gate multiplies itself, and the value (up) is not used.",
         right="silu(W_g x) ⊙ W_u x", wrong="silu(W_g x) ⊙ W_g x", read=GATE)
def _gate_twice(self, gate, up):
    return F.silu(gate) * gate


@mistake("gated", "value multiplied with itself",
         says="The activation is applied to the value (up), which multiplies itself, and the "
              "gate is not used.",
         right="silu(W_g x) ⊙ W_u x", wrong="silu(W_u x) ⊙ W_u x", read=GATE)
def _value_twice(self, gate, up):
    return F.silu(up) * up


@mistake("gated", "gate added instead of multiplied",
         says="The gate is added to the value; it should multiply it.",
         right="silu(W_g x) ⊙ W_u x", wrong="silu(W_g x) + W_u x", read=GATE)
def _gate_added(self, gate, up):
    return F.silu(gate) + up


# %% mistakes: sinusoids
@mistake("sinusoid_exponents", "exponent twice as large",
         says="The exponent is doubled, as with 2 i / d where i already runs over 0, 2, 4, "
              "...; it should be 2 i / d with i = 0, 1, 2, ...",
         right="10000^(2 i / d), i = 0, 1, ...", wrong="10000^(4 i / d)", read=SINUSOIDS)
def _sinusoid_exponent_doubled(self, d):
    return 2 * torch.arange(0, d, 2, dtype=torch.float64) / d


@mistake("sinusoid_exponents", "exponent half as large",
         says="The exponent of pair i is i / d; it should be 2 i / d.",
         right="10000^(2 i / d)", wrong="10000^(i / d)", read=SINUSOIDS)
def _sinusoid_exponent_halved(self, d):
    return torch.arange(d // 2, dtype=torch.float64) / d


@mistake("sinusoid_exponents", "exponents up to one", convention=True,
         says="The exponents run from 0 to 1 (i / (d/2 - 1)), as in tensor2tensor and fairseq; "
              "in the paper they are 2 i / d.",
         right="10000^(2 i / d)", wrong="10000^(i / (d/2 - 1))", read=SINUSOIDS)
def _sinusoid_exponents_to_one(self, d):
    return torch.arange(d // 2, dtype=torch.float64) / max(d // 2 - 1, 1)


@mistake("sinusoid_positions", "positions from one",
         says="The positions begin at 1; they should begin at 0.",
         right="0, ..., N - 1", wrong="1, ..., N", read=SINUSOIDS)
def _sinusoids_from_one(self, n):
    return torch.arange(1, n + 1, dtype=torch.float64)


@mistake("sinusoid_base", "base of 1000 in the sinusoids",
         says="The base of the wavelengths is 1000; it should be 10000.",
         right="10000^(2 i / d)", wrong="1000^(2 i / d)", read=SINUSOIDS)
def _sinusoid_base_1000(self):
    return 1000.0


@mistake("sinusoid_base", "base of 100000 in the sinusoids",
         says="The base of the wavelengths is 100000; it should be 10000.",
         right="10000^(2 i / d)", wrong="100000^(2 i / d)", read=SINUSOIDS)
def _sinusoid_base_100000(self):
    return 100000.0


@mistake("sinusoid_columns", "sine and cosine exchanged",
         says="The cosines stand in the even columns and the sines in the odd ones; it should "
              "be the other way around.",
         right="sin, cos, sin, cos, ...", wrong="cos, sin, cos, sin, ...", read=SINUSOIDS)
def _cosine_first(self, sine, cosine):
    return torch.stack([cosine, sine], dim=-1).flatten(-2)


@mistake("sinusoid_columns", "sines in one half, cosines in the other", convention=True,
         says="All sines come first and then all cosines, as in tensor2tensor and MAE; in the "
              "paper they take turns.",
         right="sin, cos, sin, cos, ...", wrong="sin, sin, ..., cos, cos, ...", read=SINUSOIDS)
def _sines_then_cosines(self, sine, cosine):
    return torch.cat([sine, cosine], dim=-1)


@mistake("sinusoid_columns", "cosines in one half, sines in the other", convention=True,
         says="All cosines come first and then all sines, as in the time embeddings of "
              "diffusion models; in the paper they take turns.",
         right="sin, cos, sin, cos, ...", wrong="cos, cos, ..., sin, sin, ...", read=SINUSOIDS)
def _cosines_then_sines(self, sine, cosine):
    return torch.cat([cosine, sine], dim=-1)


@mistake("sinusoids", "cosines with frequencies of their own",
         says="Column j has the frequency of the exponent j / d, also where j is odd; a cosine "
              "should have the frequency of the sine to its left.",
         right="cos(p / 10000^((j - 1) / d)), j odd", wrong="cos(p / 10000^(j / d)), j odd",
         read=SINUSOIDS)
def _frequencies_by_column(self, n, d):
    exponents = torch.arange(d, dtype=torch.float64) / d
    angles = self.sinusoid_positions(n)[:, None] * self.sinusoid_base() ** -exponents
    return self.sinusoid_columns(angles[:, 0::2].sin(), angles[:, 1::2].cos())


@mistake("sinusoids", "sines only",
         says="All columns are sines; the odd ones should be cosines.",
         right="sin, cos, sin, cos, ...", wrong="sin, sin, sin, sin, ...", read=SINUSOIDS)
def _sines_only(self, n, d):
    angles = self.sinusoid_positions(n)[:, None]
    angles = angles * self.sinusoid_base() ** -self.sinusoid_exponents(d)
    return self.sinusoid_columns(angles.sin(), angles.sin())


@mistake("sinusoids", "frequencies multiplied where they divide",
         says="The position is multiplied by 10000^(2 i / d); it should be divided by it.",
         right="sin(p / 10000^(2 i / d))", wrong="sin(p · 10000^(2 i / d))", read=SINUSOIDS)
def _frequencies_inverted(self, n, d):
    frequencies = self.sinusoid_base() ** self.sinusoid_exponents(d)
    angles = self.sinusoid_positions(n)[:, None] * frequencies
    return self.sinusoid_columns(angles.sin(), angles.cos())


# %% mistakes: embeddings and positions
@mistake("add_positions", "no positions",
         says="No positions are added to the embeddings, so that order is lost, or known "
              "through the causal mask only.",
         right="E[token] + P[position]", wrong="E[token]", read=ORDER)
def _no_positions(self, x):
    return x


@mistake("add_positions", "positions added twice", around=True,
         says="The positions are added twice, for example in the embedding and again before "
              "the first block.",
         right="E[token] + P[position]", wrong="E[token] + 2 P[position]", read=EMBEDDING)
def _positions_twice(self, usual, x):
    return usual(self, usual(self, x))


@mistake("add_positions", "positions along the batch",
         says="Each sequence gets the vector of its number in the batch: the table is cut to "
              "x.shape[0] rows, which is the length only where the batch is the second axis.",
         right="pe[:x.shape[1]]", wrong="pe[:x.shape[0], None]", read=EMBEDDING)
def _positions_along_batch(self, x):
    return x + self.position_table(x.shape[0], x.shape[2])[:, None]


@mistake("add_positions", "positions multiplied",
         says="The embeddings are multiplied by the vectors of the positions; these should be "
              "added.",
         right="E[token] + P[position]", wrong="E[token] · P[position]",
         read="12_position: Appending, adding, learning")
def _positions_multiplied(self, x):
    return x * self.position_table(x.shape[1], x.shape[2])


@mistake("token_positions", "positions from one in the learned table",
         says="The first token gets row 1 of the position table; it should get row 0.",
         right="0, ..., N - 1", wrong="1, ..., N", read=EMBEDDING)
def _token_positions_from_one(self, n):
    return torch.arange(1, n + 1)


@mistake("token_positions", "positions from two in the learned table", convention=True,
         says="The first token gets row 2 of the position table, as in OPT and BART, where two "
              "rows are left free.",
         right="0, ..., N - 1", wrong="2, ..., N + 1", read=EMBEDDING)
def _token_positions_from_two(self, n):
    return torch.arange(2, n + 2)


@mistake("token_positions", "positions counted from the end",
         says="The positions are counted from the last token; they should be counted from the "
              "first.",
         right="0, ..., N - 1", wrong="N - 1, ..., 0", read=EMBEDDING)
def _token_positions_reversed(self, n):
    return torch.arange(n - 1, -1, -1)


@mistake("token_positions", "one position for all tokens",
         says="All tokens get row 0 of the position table; token i should get row i.",
         right="0, ..., N - 1", wrong="0, ..., 0", read=EMBEDDING)
def _token_positions_zero(self, n):
    return torch.zeros(n, dtype=torch.int64)


@mistake("embed_scale", "embeddings not scaled",
         says="The embeddings are not multiplied by √d_model, beside which the sinusoids are "
              "too large.",
         right="√d_model E[token] + P", wrong="E[token] + P", read=EMBEDDING)
def _no_embed_scale(self):
    return 1.0


@mistake("embed", "embeddings scaled", around=True,
         says="The embeddings are multiplied by √d_model, as in the Transformer of 2017; here "
              "they should be used as they are.",
         right="E[token]", wrong="√d_model E[token]", read=EMBEDDING)
def _embeddings_scaled(self, usual, tokens):
    x = self.weight("token.weight")[tokens] * self.weight("token.weight").shape[1] ** 0.5
    if self.config.learned:
        x = self.add_positions(x)
    return x


@mistake("embed", "embeddings divided by the root of the width",
         says="The embeddings are divided by √d_model; they should be multiplied by it, or "
              "used as they are.",
         right="√d_model E[token] + P", wrong="E[token] / √d_model + P", read=EMBEDDING)
def _embeddings_divided(self, tokens):
    x = self.weight("token.weight")[tokens] * self.weight("token.weight").shape[1] ** -0.5
    if self.config.learned:
        x = self.add_positions(x)
    return x


@mistake("embed", "embeddings scaled by the width",
         says="The embeddings are multiplied by d_model; its square root is meant.",
         right="√d_model E[token] + P", wrong="d_model E[token] + P", read=EMBEDDING)
def _embeddings_scaled_by_width(self, tokens):
    x = self.weight("token.weight")[tokens] * self.weight("token.weight").shape[1]
    if self.config.learned:
        x = self.add_positions(x)
    return x


@mistake("embed", "positions scaled with the embeddings",
         says="The sum of embeddings and positions is multiplied by √d_model; only the "
              "embeddings should be.",
         right="√d_model E[token] + P", wrong="√d_model (E[token] + P)", read=EMBEDDING)
def _positions_scaled(self, tokens):
    x = self.weight("token.weight")[tokens]
    if self.config.learned:
        x = self.add_positions(x)
    return x * x.shape[-1] ** 0.5


@mistake("embed", "embeddings are detached", around=True,
         says="The embeddings are cut from the graph, so that they get no gradient from the "
              "blocks.",
         right="embed(tokens)", wrong="embed(tokens).detach()", read=STEP)
def _embeddings_detached(self, usual, tokens):
    return usual(self, tokens).detach()


@mistake("head_matrix", "head not tied", has=("head.weight",),
         says="The output has a matrix of its own; it should be the embedding's.",
         right="logits = x Eᵀ", wrong="logits = x W_headᵀ", read=TYING)
def _head_untied(self):
    return self.weight("head.weight")


@mistake("head_matrix", "head tied", lacks=("head.weight",),
         says="The output matrix is the embedding's; it should be one of its own.",
         right="logits = x W_headᵀ", wrong="logits = x Eᵀ", read=TYING)
def _head_tied(self):
    return self.weight("token.weight")


@mistake("head", "model returns probabilities", around=True,
         says="The model ends with a softmax; it should return logits, because the loss "
              "(F.cross_entropy) has a softmax of its own.",
         right="logits", wrong="softmax(logits)", read=NEXT)
def _returns_probabilities(self, usual, x):
    return usual(self, x).softmax(-1)


@mistake("head", "model returns log-probabilities", around=True, convention=True,
         says="The model ends with a log-softmax, as in the Annotated Transformer; a loss "
              "without softmax (NLLLoss) has to follow.",
         right="logits", wrong="log_softmax(logits)", read=NEXT)
def _returns_log_probabilities(self, usual, x):
    return usual(self, x).log_softmax(-1)


# %% mistakes: rotary positions
@mistake("pairing", "channels paired in the other way", around=True, convention=True,
         says="The rotation pairs neighboring channels (2 i, 2 i + 1) where the reference "
              "pairs the halves (i, i + d/2), or the reverse; weights fit only one of the two.",
         right="the reference's pairs", wrong="halves for neighbors, or the reverse",
         read=ROTARY)
def _other_pairing(self, usual):
    return "pairs" if usual(self) == "halves" else "halves"


for _base in (100.0, 1000.0, 10000.0, 500000.0, 1000000.0):
    mistake("rope_base", f"base of {_base:.0f} in the rotation",
            convention=_base in (10000.0, 500000.0, 1000000.0),
            says=f"The base of the rotation's frequencies is {_base:.0f}, another one than in "
                 "the reference.",
            right="the reference's base", wrong=f"{_base:.0f}^(-2 i / d)",
            read=ROTARY)(_epsilon(_base))


@mistake("rope_exponents", "exponent of the rotation twice as large",
         says="The exponent is doubled, as with 2 i / d where i already runs over 0, 2, 4, "
              "...; it should be 2 i / d with i = 0, 1, 2, ...",
         right="10000^(-2 i / d)", wrong="10000^(-4 i / d)", read=ROTARY)
def _rope_exponent_doubled(self, d):
    return 2 * torch.arange(0, d, 2, dtype=torch.float64) / d


@mistake("rope_exponents", "exponent of the rotation half as large",
         says="The exponent of pair i is i / d; it should be 2 i / d.",
         right="10000^(-2 i / d)", wrong="10000^(-i / d)", read=ROTARY)
def _rope_exponent_halved(self, d):
    return torch.arange(d // 2, dtype=torch.float64) / d


@mistake("rope_exponents", "exponent of the rotation over the model's width",
         says="The exponent is divided by embed_dim; it should be divided by the width of a "
              "head, within which pairs are rotated.",
         right="10000^(-2 i / head_dim)", wrong="10000^(-2 i / embed_dim)", read=ROTARY)
def _rope_exponent_of_the_model(self, d):
    return torch.arange(0, d, 2, dtype=torch.float64) / (d * self.config.num_heads)


@mistake("angles", "rotated the other way",
         says="Queries and keys are rotated clockwise; they should be rotated the other way, "
              "counterclockwise.",
         right="(a cos - b sin, b cos + a sin)", wrong="(a cos + b sin, b cos - a sin)",
         read=ROTARY)
def _rotated_clockwise(self, n, d):
    return -self.positions(n)[:, None] * self.frequencies(d)


@mistake("turn", "no minus sign in the rotation",
         says="Both sums have a plus sign, which makes no rotation; the first should have a "
              "minus.",
         right="(a cos - b sin, b cos + a sin)", wrong="(a cos + b sin, b cos + a sin)",
         read=ROTARY)
def _no_minus(self, first, second, cos, sin):
    return first * cos + second * sin, second * cos + first * sin


@mistake("turn", "sine and cosine of the rotation exchanged",
         says="Sine and cosine are exchanged, so that position 0 is turned by a right angle.",
         right="(a cos - b sin, b cos + a sin)", wrong="(a sin - b cos, b sin + a cos)",
         read=ROTARY)
def _rotation_exchanged(self, first, second, cos, sin):
    return first * sin - second * cos, second * sin + first * cos


@mistake("rotate", "frequencies repeated for neighbors, channels paired by halves",
         says="The angles are repeated as θ0, θ0, θ1, θ1, ... although channels are paired by "
              "halves; for these they should be repeated as θ0, θ1, ..., θ0, θ1, ...",
         right="cat([θ, θ]) with halves", wrong="repeat_interleave(θ, 2) with halves",
         read=ROTARY)
def _mixed_angles_of_neighbors(self, x):
    angles = self.angles(*x.shape[-2:]).repeat_interleave(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


@mistake("rotate", "frequencies repeated for halves, neighboring channels paired",
         says="The angles are repeated as θ0, θ1, ..., θ0, θ1, ... although neighboring "
              "channels are paired; for these they should be repeated as θ0, θ0, θ1, θ1, ...",
         right="repeat_interleave(θ, 2) with neighbors", wrong="cat([θ, θ]) with neighbors",
         read=ROTARY)
def _mixed_angles_of_halves(self, x):
    angles = self.angles(*x.shape[-2:]).repeat(1, 2)
    turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    return x * angles.cos() + turned * angles.sin()


@mistake("rotate", "rotated by the number of the head", around=True,
         says="The rotation takes the heads for the tokens, because it is given (B, N, h, d) "
              "where it expects (B, h, N, d), or the reverse.",
         right="position = token", wrong="position = head", read=ROTARY)
def _rotated_by_head(self, usual, x):
    return usual(self, x.transpose(1, 2)).transpose(1, 2)


@mistake("rotate_queries_and_keys", "rotated before the split into heads",
         says="Queries and keys are rotated at their full width, so that heads get different "
              "frequencies; each head should be rotated by itself.",
         right="rotate(split(q))", wrong="split(rotate(q))", read=ROTARY)
def _rotated_before_split(self, q, k):
    rotated = []
    for x in (q, k):
        heads = x.shape[1]
        whole = self.rotate(self.merge(x)[:, None])[:, 0]
        rotated.append(self.split(whole, heads))
    return tuple(rotated)


@mistake("rotate_queries_and_keys", "keys not rotated",
         says="Only the queries are rotated; the keys should be, too.",
         right="rotate(q), rotate(k)", wrong="rotate(q), k", read=ROTARY)
def _keys_not_rotated(self, q, k):
    return self.rotate(q), k


@mistake("rotate_queries_and_keys", "queries not rotated",
         says="Only the keys are rotated; the queries should be, too.",
         right="rotate(q), rotate(k)", wrong="q, rotate(k)", read=ROTARY)
def _queries_not_rotated(self, q, k):
    return q, self.rotate(k)


@mistake("rotate_queries_and_keys", "no rotation",
         says="Queries and keys are not rotated, so that the model knows order through the "
              "causal mask only.",
         right="rotate(q), rotate(k)", wrong="q, k", read=ROTARY)
def _no_rotation(self, q, k):
    return q, k


@mistake("rotate_queries_and_keys", "rotated twice",
         says="Queries and keys are rotated twice, so that all distances count double.",
         right="rotate(q)", wrong="rotate(rotate(q))", read=ROTARY)
def _rotated_twice(self, q, k):
    return self.rotate(self.rotate(q)), self.rotate(self.rotate(k))


@mistake("average", "values rotated, too",
         says="The values are rotated by their positions; only queries and keys should be.",
         right="weights @ v", wrong="weights @ rotate(v)", read=ROTARY)
def _values_rotated(self, weights, v):
    return weights @ (self.rotate(v) if self.config.rotary else v)


@mistake("first_position", "positions one too large", around=True,
         says="The positions of the rotation are too large by one: they begin at 1, or, with P "
              "tokens in a cache, at P + 1.",
         right="P, ..., P + N - 1", wrong="P + 1, ..., P + N", read=ROTARY)
def _positions_one_larger(self, usual):
    return usual(self) + 1


@mistake("first_position", "positions one too small", around=True,
         says="With P tokens in a cache, the new ones begin at the position P - 1, that of the "
              "last cached token; they should begin at P.",
         right="P, ..., P + N - 1", wrong="P - 1, ..., P + N - 2", read=CACHE)
def _positions_one_smaller(self, usual):
    return max(usual(self) - 1, 0)


@mistake("first_position", "positions begin again at zero",
         says="New tokens get the positions 0, 1, ... although P tokens are in the cache; they "
              "should begin at P.",
         right="P, ..., P + N - 1", wrong="0, ..., N - 1", read=CACHE)
def _positions_from_zero(self):
    return 0


@mistake("positions", "all new tokens at one position",
         says="All new tokens get the position P, that of the first of them; they should get "
              "P, P + 1, ...",
         right="P, ..., P + N - 1", wrong="P, ..., P", read=CACHE)
def _one_position(self, n):
    return torch.zeros(n, dtype=torch.float64) + self.first_position()


# %% mistakes: the cache
@mistake("append", "new keys in front of the cached ones",
         says="New keys and values are put in front of those in the cache; they should follow "
              "them, in the order of the text.",
         right="cat([past, new], dim=2)", wrong="cat([new, past], dim=2)", read=CACHE)
def _new_keys_first(self, past, new):
    return torch.cat([new, past], dim=2)


@mistake("remember", "new tokens do not see themselves",
         says="New tokens attend to the cache as it was before them (and the new keys are only "
              "kept for the next call); they should attend to themselves, too.",
         right="attend to past and new keys", wrong="attend to past keys",
         read="22_decoding: The cache changes nothing")
def _new_keys_unseen(self, k, v):
    if not hasattr(self, "past_keys"):
        return k, v
    self.cache = self.returned(self.append(self.past_keys, k),
                               self.append(self.past_values, v))
    return self.past_keys, self.past_values


@mistake("remember", "cache ignored",
         says="New tokens attend to themselves only, and the cached keys and values have no "
              "effect.",
         right="attend to past and new keys", wrong="attend to new keys",
         read="22_decoding: The cache changes nothing")
def _cache_ignored(self, k, v):
    if hasattr(self, "past_keys"):
        self.cache = self.returned(self.append(self.past_keys, k),
                                   self.append(self.past_values, v))
    return k, v


@mistake("returned", "cache not extended",
         says="The layer returns the keys and values that it was given; the new ones should be "
              "appended.",
         right="keys, values of P + N tokens", wrong="keys, values of P tokens", read=CACHE)
def _cache_not_extended(self, keys, values):
    past = self.past_keys.shape[2]
    return keys[:, :, :past], values[:, :, :past]


@mistake("returned", "cache keeps the new tokens only",
         says="The layer returns the new keys and values only, so that the next call has "
              "forgotten the earlier ones; they should be appended to those.",
         right="keys, values of P + N tokens", wrong="keys, values of N tokens", read=CACHE)
def _cache_overwritten(self, keys, values):
    past = self.past_keys.shape[2]
    return keys[:, :, past:], values[:, :, past:]


@mistake("returned", "keys and values of the cache exchanged",
         says="The layer returns values as keys and keys as values.",
         right="return output, keys, values", wrong="return output, values, keys", read=CACHE)
def _cache_exchanged(self, keys, values):
    return values, keys


@mistake("remember", "cached keys rotated again", around=True,
         says="All keys are rotated at each call, although those in the cache have been "
              "rotated before; only new keys should be.",
         right="cat([past, rotate(k)])", wrong="rotate(cat([past, k]))", read=CACHE)
def _past_rotated_again(self, usual, k, v):
    if hasattr(self, "past_keys") and self.config.rotary:
        new = self.past_keys
        n, d = new.shape[-2:]
        angles = torch.arange(n, dtype=torch.float64)[:, None] * self.frequencies(d)
        first, second = new.chunk(2, dim=-1)
        turned = self.turn(first, second, angles.cos(), angles.sin())
        self.past_keys = torch.cat(turned, dim=-1)
    return usual(self, k, v)


@mistake("returned", "cached keys are not rotated", convention=True,
         says="The cache gets new keys before their rotation; here it should get them as they "
              "are after it.",
         right="keep rotate(k)", wrong="keep k, rotate at each call", read=CACHE)
def _cache_before_rotation(self, keys, values):
    past = self.past_keys.shape[2]
    n, d = keys[:, :, past:].shape[-2:]
    angles = self.angles(n, d)
    first, second = keys[:, :, past:].chunk(2, dim=-1)
    turned = self.turn(first, second, angles.cos(), -angles.sin())
    return torch.cat([keys[:, :, :past], *[torch.cat(turned, dim=-1)]], dim=2), values


# %% mistakes: losses
@mistake("align", "labels not shifted",
         says="The logits at position i are compared with token i, which the model has read; "
              "they should predict token i + 1.",
         right="loss(logits[:, :-1], tokens[:, 1:])", wrong="loss(logits, tokens)", read=NEXT)
def _labels_not_shifted(self, logits, targets):
    return logits, targets


@mistake("align", "labels not shifted, last position left out",
         says="Logits and tokens are both cut to N - 1, but not shifted: position i is "
              "compared with token i, which the model has read.",
         right="loss(logits[:, :-1], tokens[:, 1:])",
         wrong="loss(logits[:, :-1], tokens[:, :-1])", read=NEXT)
def _labels_not_shifted_but_cut(self, logits, targets):
    if not self.config.shifted:
        return logits, targets
    return logits[:, :-1], targets[:, :-1]


@mistake("align", "labels shifted twice", around=True,
         says="The labels are shifted once more than they should be, for example in the data "
              "and again in the loss: position i is asked for the token after the right one.",
         right="logits[:, :-1], tokens[:, 1:]", wrong="logits[:, :-2], tokens[:, 2:]",
         read=NEXT)
def _labels_shifted_twice(self, usual, logits, targets):
    logits, targets = usual(self, logits, targets)
    return logits[:, :-1], targets[:, 1:]


@mistake("align", "labels shifted the wrong way",
         says="The logits at position i are compared with token i - 1; they should predict "
              "token i + 1.",
         right="loss(logits[:, :-1], tokens[:, 1:])",
         wrong="loss(logits[:, 1:], tokens[:, :-1])", read=NEXT)
def _labels_shifted_back(self, logits, targets):
    return logits[:, 1:], targets[:, :-1]


@mistake("align", "labels rolled around",
         says="The tokens are rolled by one, so that the last position is asked for the first "
              "token; it has nothing to predict and should be left out.",
         right="loss(logits[:, :-1], tokens[:, 1:])", wrong="loss(logits, tokens.roll(-1, 1))",
         read=NEXT)
def _labels_rolled(self, logits, targets):
    return logits, targets.roll(-1, 1)


@mistake("align", "only the last prediction counts", around=True,
         says="The loss is that of the last position alone; all positions should count.",
         right="loss(logits, targets)", wrong="loss(logits[:, -1], targets[:, -1])", read=NEXT)
def _last_position_only(self, usual, logits, targets):
    logits, targets = usual(self, logits, targets)
    return logits[:, -1:], targets[:, -1:]


@mistake("align", "logits reshaped instead of transposed", around=True,
         says="The logits (B, N, V) are reshaped to (B, V, N) for F.cross_entropy, which "
              "scrambles them; they should be transposed, or flattened to (B N, V).",
         right="logits.transpose(1, 2)", wrong="logits.reshape(B, V, N)", read=NEXT)
def _logits_reshaped(self, usual, logits, targets):
    logits, targets = usual(self, logits, targets)
    b, n, vocab = logits.shape
    return logits.reshape(b, vocab, n).transpose(1, 2), targets


@mistake("log_probabilities", "softmax before cross-entropy",
         says="Probabilities are given to a loss that has a softmax of its own; it should be "
              "given logits.",
         right="cross_entropy(logits)", wrong="cross_entropy(softmax(logits))", read=LOSS)
def _softmax_before_loss(self, logits):
    return logits.softmax(-1).log_softmax(-1)


@mistake("log_probabilities", "probabilities in place of their logarithm",
         says="The loss is minus the probability of the target, as nll_loss gives it for a "
              "softmax; it should be minus its logarithm.",
         right="-log p[target]", wrong="-p[target]", read=LOSS)
def _no_logarithm(self, logits):
    return logits.softmax(-1)


@mistake("log_probabilities", "no softmax in the loss",
         says="The loss is minus the logit of the target, as nll_loss gives it for raw logits; "
              "they should go through log_softmax first.",
         right="-log_softmax(logits)[target]", wrong="-logits[target]", read=LOSS)
def _no_softmax_in_loss(self, logits):
    return logits


@mistake("log_probabilities", "softmax of the loss over the rows",
         says="The softmax of the loss runs over the rows or tokens (axis -2); it should run "
              "over the classes (axis -1).",
         right="log_softmax(logits, -1)", wrong="log_softmax(logits, -2)", read=LOSS)
def _loss_over_rows(self, logits):
    return logits.log_softmax(-2)


@mistake("log_probabilities", "softmax of the loss over everything",
         says="The exponentials are divided by the sum of all of them, because the sum is "
              "given no axis; the classes of each target should sum to one.",
         right="exp(x) / exp(x).sum(-1, keepdims=True)", wrong="exp(x) / exp(x).sum()",
         read=LOSS)
def _loss_over_everything(self, logits):
    return logits.flatten().log_softmax(0).reshape(logits.shape)


@mistake("log_probabilities", "logarithm with a constant",
         says="A constant of 1e-8 is added to the probabilities before the logarithm; "
              "log_softmax needs none and is exact.",
         right="log_softmax(logits)", wrong="log(softmax(logits) + 1e-8)", read=LOSS,
         convention=True)
def _logarithm_with_constant(self, logits):
    return (logits.softmax(-1) + 1e-8).log()


@mistake("reduce", "loss in bits", convention=True,
         says="The logarithm has the base two, so that the loss is in bits; the reference is "
              "in nats.",
         right="-ln p", wrong="-log₂ p", read="24_gpt: Bits, not perplexity")
def _loss_in_bits(self, losses, counts):
    return (losses * counts).sum() / counts.sum() / math.log(2)


@mistake("reduce", "perplexity in place of the loss", convention=True,
         says="The result is the perplexity, the exponential of the mean loss.",
         right="mean(-log p)", wrong="exp(mean(-log p))", read="24_gpt: Bits, not perplexity")
def _perplexity(self, losses, counts):
    return ((losses * counts).sum() / counts.sum()).exp()


@mistake("reduce", "mean over padding",
         says="The losses of padding are set to zero, but the sum is divided by the number of "
              "all positions; it should be divided by the number of those that count.",
         right="sum / number of tokens", wrong="sum / (B N)", read=LOSS)
def _mean_over_padding(self, losses, counts):
    return (losses * counts).mean()


@mistake("counts", "padding is learned",
         says="Positions whose target is padding count like others; they should be left out "
              "(ignore_index).",
         right="ignore_index=pad_id", wrong="no ignore_index", read=LOSS)
def _padding_learned(self, targets):
    return torch.ones_like(targets, dtype=torch.bool)


@mistake("counts", "padding and tokens exchanged", around=True,
         says="The loss is that of the padding, and the tokens are left out; it should be the "
              "other way around.",
         right="targets != pad_id", wrong="targets == pad_id", read=LOSS)
def _padding_only(self, usual, targets):
    return ~usual(self, targets)


@mistake("reduce", "sum in place of the mean",
         says="The losses are summed; they should be averaged.",
         right="mean(losses)", wrong="sum(losses)", read=LOSS)
def _loss_summed(self, losses, counts):
    return (losses * counts).sum()


@mistake("reduce", "sum over a sequence, mean over the batch",
         says="The sum of the losses is divided by the number of sequences; it should be "
              "divided by the number of tokens.",
         right="sum / number of tokens", wrong="sum / B", read=LOSS)
def _mean_over_batch(self, losses, counts):
    return (losses * counts).sum() / losses.shape[0]


@mistake("reduce", "mean of the sequences' means",
         says="Each sequence is averaged by itself, and then the means are, so that tokens of "
              "short sequences count more; all tokens should count the same.",
         right="sum of all / number of all tokens", wrong="mean over B of (sum / tokens)",
         read=LOSS)
def _mean_of_means(self, losses, counts):
    return ((losses * counts).sum(-1) / counts.sum(-1)).mean()


@mistake("token_losses", "mean over the classes",
         says="The products of one-hot targets and log-probabilities are averaged over the "
              "classes, too, which divides the loss by their number; they should be summed.",
         right="-(onehot * log_p).sum(-1).mean()", wrong="-(onehot * log_p).mean()",
         read=LOSS, around=True)
def _mean_over_classes(self, usual, log_p, targets):
    return usual(self, log_p, targets) / log_p.shape[-1]


@mistake("token_losses", "sign of the loss", around=True,
         says="The loss is the log-probability of the target; it should have a minus.",
         right="-log p[target]", wrong="log p[target]", read=LOSS)
def _wrong_sign(self, usual, log_p, targets):
    return -usual(self, log_p, targets)


@mistake("smoothing", "no label smoothing",
         says="The targets are not smoothed.",
         right="(1 - ε) one-hot + ε / V", wrong="one-hot", read=LOSS)
def _no_smoothing(self):
    return 0.0


@mistake("smoothing", "smoothing and confidence exchanged", around=True,
         says="The target gets the share ε and the rest 1 - ε; it should be the other way "
              "around.",
         right="(1 - ε) one-hot + ε / V", wrong="ε one-hot + (1 - ε) / V", read=LOSS)
def _smoothing_exchanged(self, usual):
    return 1 - usual(self)


@mistake("token_losses", "smoothing over the other tokens", convention=True,
         says="The share ε is spread over the V - 1 tokens other than the target, as in some "
              "implementations; here it is spread over all V.",
         right="(1 - ε) one-hot + ε / V", wrong="(1 - ε) one-hot + ε / (V - 1) elsewhere",
         read="21_transformer: Where the smoothed loss is least")
def _smoothing_over_others(self, log_p, targets):
    picked = -log_p.gather(-1, targets[..., None])[..., 0]
    others = (-log_p.sum(-1) - picked) / (log_p.shape[-1] - 1)
    return (1 - self.smoothing()) * picked + self.smoothing() * others


@mistake("token_losses", "smoothing over all but target and padding", convention=True,
         says="The share ε is spread over the V - 2 tokens other than target and padding, as "
              "in the Annotated Transformer; here it is spread over all V.",
         right="(1 - ε) one-hot + ε / V", wrong="(1 - ε) one-hot + ε / (V - 2) elsewhere",
         read="21_transformer: Where the smoothed loss is least")
def _smoothing_without_padding(self, log_p, targets):
    picked = -log_p.gather(-1, targets[..., None])[..., 0]
    if self.config.pad_id is None:
        return picked
    others = -log_p.sum(-1) - picked + log_p[..., self.config.pad_id]
    others = others / (log_p.shape[-1] - 2)
    return (1 - self.smoothing()) * picked + self.smoothing() * others


@mistake("token_losses", "smoothing share not divided by the vocabulary",
         says="Each token gets the share ε instead of ε / V, so that the targets do not sum to "
              "one.",
         right="(1 - ε) one-hot + ε / V", wrong="(1 - ε) one-hot + ε", read=LOSS)
def _smoothing_not_divided(self, log_p, targets):
    picked = -log_p.gather(-1, targets[..., None])[..., 0]
    return (1 - self.smoothing()) * picked - self.smoothing() * log_p.sum(-1)


@mistake("token_losses", "smoothed targets do not lose what they spread",
         says="The target keeps its whole weight of one although ε is spread over all tokens; "
              "it should keep 1 - ε.",
         right="(1 - ε) one-hot + ε / V", wrong="one-hot + ε / V", read=LOSS)
def _smoothing_added(self, log_p, targets):
    picked = -log_p.gather(-1, targets[..., None])[..., 0]
    return picked - self.smoothing() * log_p.mean(-1)


@mistake("token_losses", "divergence in place of the cross-entropy", around=True,
         convention=True,
         says="The loss is the Kullback-Leibler divergence, as nn.KLDivLoss gives it: less "
              "than the cross-entropy by the entropy of the smoothed targets, with equal "
              "gradients.",
         right="-Σ t log p", wrong="Σ t (log t - log p)",
         read="21_transformer: Where the smoothed loss is least")
def _divergence(self, usual, log_p, targets):
    vocab = log_p.shape[-1]
    share = self.smoothing() / vocab
    most = 1 - self.smoothing() + share
    entropy = -most * math.log(most)
    if share > 0:
        entropy -= (vocab - 1) * share * math.log(share)
    return usual(self, log_p, targets) - entropy
