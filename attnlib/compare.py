"""Check an implementation of your own: match its parameters with those of a reference, find the first difference, and name the mistake."""

import contextlib
import copy
import inspect
import io
import itertools
import linecache
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import mistakes_vision  # noqa: F401  its references and mistakes join the others
from .mistakes import (CATALOGUE, REFERENCES, REFERENCES_OF, Mistake, Probe, Reference, Steps,
                       Stopped)

# %% names
_WORDS = {  # piece of a parameter's name: what it says
    **dict.fromkeys(["q", "wq", "query", "queries", "qs", "bq", "qproj", "toq", "qw"], "q"),
    **dict.fromkeys(["k", "wk", "key", "keys", "ks", "bk", "kproj", "tok_k", "tok"], "k"),
    **dict.fromkeys(["v", "wv", "value", "values", "val", "vs", "bv", "vproj", "tov"], "v"),
    **dict.fromkeys(["qkv", "kqv", "wqkv", "bqkv", "qvk", "vqk", "kvq", "vkq", "pack",
                     "packed", "qkvw", "qkvb"], "qkv"),
    **dict.fromkeys(["kv", "wkv", "bkv"], "kv"),
    **dict.fromkeys(["o", "wo", "bo", "out", "output", "proj", "projection", "unify",
                     "unifyheads", "merge", "combine", "dense"], "out"),
    **dict.fromkeys(["attn", "attention", "mha", "sa", "msa", "mhsa", "att", "selfattn",
                     "selfattention", "multihead", "heads"], "attn"),
    **dict.fromkeys(["cross", "xattn", "encdec", "src", "memory", "inter", "crossattn",
                     "crossattention", "ca"], "cross"),
    **dict.fromkeys(["mlp", "ff", "ffn", "ffwd", "feedforward", "feed", "pwff",
                     "positionwise"], "mlp"),
    **dict.fromkeys(["norm", "ln", "layernorm", "rms", "rmsnorm", "rn"], "norm"),
    **dict.fromkeys(["up", "expand", "intermediate", "hidden", "fci", "wup"], "up"),
    **dict.fromkeys(["down", "contract", "wdown"], "down"),
    **dict.fromkeys(["gate", "wgate", "wg"], "gate"),
    **dict.fromkeys(["wte", "token", "tokens", "vocab", "word", "embedding", "embed", "emb",
                     "embeddings", "tokemb", "embs"], "token"),
    **dict.fromkeys(["wpe", "pos", "position", "positional", "positions", "pe"], "pos"),
    **dict.fromkeys(["cls", "class"], "cls"),
    **dict.fromkeys(["dist", "distill", "distillation", "distilled"], "dist"),
    **dict.fromkeys(["head", "classifier", "unembed", "lmhead", "logits"], "head"),
    **dict.fromkeys(["patch", "patches", "patchify"], "patch"),
    **dict.fromkeys(["final", "f", "last", "post"], "final"),
    **dict.fromkeys(["enc", "encoder"], "encoder"),
    **dict.fromkeys(["dec", "decoder"], "decoder"),
    **dict.fromkeys(["relative", "rel", "table"], "relative"),
    **dict.fromkeys(["reduction", "reduce", "merging"], "reduction"),
    **dict.fromkeys(["tau", "logit", "temperature"], "logit"),
    **dict.fromkeys(["cpb", "meta"], "cpb"),
}
_PAIRS = {  # two pieces that stand next to each other
    ("c", "attn"): "qkv", ("in", "proj"): "qkv", ("c", "proj"): "out", ("c", "fc"): "fc1",
    ("to", "out"): "out", ("w", "pack"): "qkv", ("lm", "head"): "head",
    ("tok", "emb"): "token", ("tok", "embed"): "token", ("tok", "embedding"): "token",
    ("tok", "embeddings"): "token", ("feed", "forward"): "mlp", ("layer", "norm"): "norm",
    ("fc", "in"): "fc1", ("fc", "out"): "out", ("in", "layer"): "fc1",
}
_LAYERS = {"fc", "linear", "lin", "dense", "w", "b", "layer", "l", "conv", "proj", "d", "ff"}
_ACCEPTED = {  # slot of a role: words that name it
    "q": {"q"}, "k": {"k"}, "v": {"v"}, "o": {"out"}, "fc1": {"fc1", "up"},
    "fc2": {"fc2", "down"}, "gate": {"gate", "fc1"}, "up": {"up", "fc3"},
    "norm1": {"norm1"}, "norm2": {"norm2"}, "norm3": {"norm3"}, "norm": {"final"},
    "token": {"token"}, "pos": {"pos"}, "cls": {"cls"}, "dist": {"dist"}, "head": {"head"},
    "patch": {"patch"},
}
_SLOTS = set().union(*_ACCEPTED.values()) | {"qkv", "kv"}
_BIASES = {"b", "bias", "beta", "shift", "bq", "bk", "bv", "bo", "bqkv", "bkv", "offset"}


def _pieces(name: str) -> list[str]:
    """Split "blocks.0.attn.W_q" into "blocks", "0", "attn", "w", "q"."""
    name = re.sub(r"([a-z])([A-Z])", r"\1.\2", name)
    name = re.sub(r"(\d+)", r".\1.", name.lower())
    return [piece for piece in re.split(r"[^a-z0-9]+", name) if piece]


def _words(name: str) -> set[str]:
    """Return what a parameter's name says, in the words of `_ACCEPTED`."""
    pieces = _pieces(name)
    found = {_WORDS[piece] for piece in pieces if piece in _WORDS}
    if "tok" in pieces:
        found.discard("k")
        found.add("token")
    for first, second in zip(pieces, pieces[1:]):
        if (first, second) in _PAIRS:
            found.add(_PAIRS[first, second])
        if first in _LAYERS and second in ("1", "2", "3"):
            found.add(f"fc{second}")
        if _WORDS.get(first) == "norm" and second in ("1", "2", "3"):
            found.add(f"norm{second}")
    if found & {"q", "k", "v", "qkv", "kv", "gate", "up", "down", "fc1", "fc2"}:
        found.discard("out")  # as in q_proj
    if ("c", "attn") in zip(pieces, pieces[1:]):
        found.discard("attn") if pieces.count("attn") == 1 else None
    return found


def _kind(name: str, tensor: Tensor) -> str:
    """Return "bias" or "weight"."""
    last = _pieces(name)[-1:]
    tail = [piece for piece in _pieces(name) if not piece.isdigit()][-2:]
    is_bias = (last and last[0] in _BIASES) or (tail and tail[-1] in _BIASES)
    is_bias = is_bias or (tail and tail[0] == "b" and tensor.ndim == 1)
    return "bias" if is_bias else "weight"


# %% units
@dataclass
class _Unit:
    """The weight of a layer, and its bias if it has one."""

    name: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    kind: str = ""  # "linear", "norm", "embedding", "conv", or "" where nothing says it
    words: set[str] = field(default_factory=set)
    group: tuple = ()  # side and number of the block
    transposed: bool | None = None  # None where only the values can tell
    order: int = 0


def _type_of(module: nn.Module | None) -> tuple[str, bool | None]:
    """Return the kind of a layer, and whether its matrix is (in, out)."""
    if module is None:
        return "", None
    name = type(module).__name__.lower()
    if isinstance(module, nn.Embedding):
        return "embedding", False
    if "norm" in name:
        return "norm", False
    if isinstance(module, nn.Linear):
        return "linear", False
    if name == "conv1d" and not isinstance(module, nn.Conv1d):
        return "linear", True  # transformers' Conv1D keeps (in, out)
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return "conv", False
    if isinstance(module, nn.MultiheadAttention):
        return "linear", False
    return "", None


def _number_of_block(names: list[str]) -> dict[str, int]:
    """Return for each name of a part of a repeated block the number of the block.

    The number is the first in the name under which the same rests of names return.
    """
    found = {}
    rests: dict[tuple[str, int], dict[int, set[str]]] = {}
    splits = {}
    for name in names:
        numbers = list(re.finditer(r"\d+", name))
        splits[name] = [(name[: m.start()], int(m.group()), name[m.end():]) for m in numbers]
        for before, number, rest in splits[name]:
            if rest.strip("._/"):
                rests.setdefault((before, 0), {}).setdefault(number, set()).add(rest)
    for name in names:
        for before, number, rest in splits[name]:
            others = rests.get((before, 0), {})
            repeated = [n for n, some in others.items() if some == others.get(number)]
            if len(repeated) == len(others) and len(others.get(number, ())) > 2:
                found[name] = sorted(others).index(number)
                break
            if before.strip("._/").lower().split(".")[-1] in (
                    "blocks", "layers", "h", "block", "layer", "resblocks") and rest:
                found[name] = sorted(others).index(number)
                break
    return found


_NORM_LETTERS = {"g", "gamma", "beta", "gain", "scale", "shift", "a"}


def _key_of_array(pieces: list[str]) -> str:
    """Return what "Wq" and "bq", or "gamma1" and "beta1", have in common."""
    found = []
    for piece in pieces:
        piece = re.sub(r"^[wb](?=[a-z]$|qkv$|kv$|out$)|^[wb]$", "", piece)
        if piece and piece not in _NORM_LETTERS | {"weight", "bias"}:
            found.append(piece)
    is_norm = any(piece in _NORM_LETTERS for piece in pieces)
    if is_norm and not any(_WORDS.get(piece) == "norm" for piece in pieces):
        found.insert(0, "norm")
    return ".".join(found)


def _units(parameters: dict[str, Tensor], owners: dict[str, nn.Module | None]) -> list[_Unit]:
    """Group parameters into layers, in their order."""
    numbers = _number_of_block(list(parameters))
    units: dict[str, _Unit] = {}
    for order, (name, tensor) in enumerate(parameters.items()):
        kind = _kind(name, tensor)
        stem = re.sub(r"[._/]?(weight|bias|kernel)$", "", name)
        pieces = _pieces(stem)
        if owners.get(name) is None or stem == name:  # an array: "Wq" and "bq" belong together
            key = _key_of_array(pieces)
        else:
            key = stem
        if key in units and kind in units[key].tensors:
            key = name
        owner, transposed = _type_of(owners.get(name))
        unit = units.setdefault(key, _Unit(stem or name, kind=owner, transposed=transposed,
                                           order=order))
        unit.tensors[kind] = tensor
        unit.names[kind] = name
        unit.words |= _words(name)
        side = ""
        for candidate in ("decoder", "encoder"):
            if candidate in unit.words and not side:
                side = candidate
        unit.group = (side, numbers.get(name))
    for key, unit in units.items():
        if not unit.kind and ("norm" in unit.words or key.startswith("norm")):
            unit.kind = "norm"
    return list(units.values())


# %% matching
@dataclass
class _Role:
    """A layer of the reference: its weight, and its bias if it has one."""

    stem: str  # "blocks.0.attn.q"
    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def slot(self) -> str:
        """The last part of the name, such as "q"."""
        return self.stem.rpartition(".")[2]

    @property
    def parts(self) -> set[str]:
        """Words of the parts in which it is, such as {"attn"}."""
        return set(self.stem.split(".")[:-1])

    @property
    def group(self) -> tuple:
        """Side, which is "encoder", "decoder", or "", and number of the block."""
        parts = self.stem.split(".")
        numbers = [int(part) for part in parts if part.isdigit()]
        side = parts[0] if parts[0] in ("encoder", "decoder") else ""
        return side, numbers[0] if numbers else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, or of the bias where there is no weight."""
        return tuple(next(iter(self.tensors.values())).shape)


@dataclass
class _Assignment:
    """A layer of the reader's model, and the roles whose values it gets.

    `part` is (i, n) where it gets the i-th of n equal parts of the rows, as in one module per
    head; `rows` are the rows that it gets, if not all.
    """

    unit: _Unit
    roles: list[_Role]
    part: tuple[int, int] | None = None
    rows: slice | None = None


@dataclass
class _Matching:
    """All assignments, what is left over on both sides, and what names did not decide."""

    assignments: list[_Assignment]
    missing: list[str]
    extra: list[str]
    by_order: list[tuple[_Role, _Unit]]


def _roles(values: dict[str, Tensor]) -> list[_Role]:
    """Group the roles of a reference into layers."""
    found: dict[str, _Role] = {}
    for name, value in values.items():
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            stem = name
            kind = "weight"
        role = found.setdefault(stem, _Role(stem))
        role.tensors[kind] = value
        role.names[kind] = name
    return list(found.values())


def _fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether values of a shape can be arranged as the target."""
    if math.prod(shape) != math.prod(target):
        return False
    ours = sorted(n for n in shape if n > 1)
    theirs = sorted(n for n in target if n > 1)
    by_head = len(target) == 3
    is_patch = len(shape) == 4
    return ours == theirs or by_head or is_patch or len(shape) == 1


def _missing_rows(role: _Role, unit: _Unit) -> int:
    """Return the number of rows of position embeddings that the reader's model lacks."""
    shape = tuple(unit.tensors["weight"].shape) if "weight" in unit.tensors else ()
    if role.slot != "pos" or len(shape) < 2 or shape[-1] != role.shape[-1]:
        return 0
    return max(0, role.shape[-2] - shape[-2])


def _can_take(role: _Role, unit: _Unit) -> bool:
    """Whether the shapes allow it."""
    kinds = [kind for kind in role.tensors if kind in unit.tensors]
    for kind in kinds:
        if not _fits(tuple(role.tensors[kind].shape), tuple(unit.tensors[kind].shape)):
            return 0 < _missing_rows(role, unit) <= 2
    return bool(kinds)


def _words_of(role: _Role) -> set[str]:
    """Return the words that name a role."""
    if role.slot in _ACCEPTED:
        return _ACCEPTED[role.slot]
    pieces = _pieces(role.slot)
    return set(pieces) | {_WORDS.get(piece, piece) for piece in pieces}


def _score(role: _Role, unit: _Unit, has_cross: bool) -> int:
    """Return how well name and type of a layer fit a role."""
    words = unit.words
    accepted = set(_words_of(role))
    if role.slot == "fc2" and "mlp" in words:
        accepted.add("out")
    if role.slot in ("norm1", "norm2", "norm3"):
        before = {"norm1": "attn", "norm2": "mlp", "norm3": "mlp"}[role.slot]
        if has_cross and role.slot == "norm2":
            before = "cross"
        if "final" not in words:
            accepted.add(before)
    score = 8 if words & accepted else 0
    if not score and (words & _SLOTS) - {"token", "out", "cls", "head"}:
        score -= 8
    for part, others in (("attn", {"mlp", "cross"}), ("mlp", {"attn", "cross"}),
                         ("cross", {"mlp"})):
        if part in role.parts:
            score += 3 * (part in words)
            score -= 6 * bool(others & words)
    if role.slot.startswith("norm") != (unit.kind == "norm"):
        score -= 10 if unit.kind else 1
    if unit.kind == "embedding":
        score += 2 if role.slot in ("token", "pos") else -8
    score += sum(kind in unit.tensors for kind in role.tensors)
    return score


def _match_packed(units: list[_Unit], roles: list[_Role]) -> list[_Assignment]:
    """Assign layers that hold several roles, such as q, k, and v, and take both away."""
    found = []
    for unit in list(units):
        best = None
        for slots in (("q", "k", "v"), ("k", "v"), ("gate", "up")):
            parents = dict.fromkeys(role.stem.rpartition(".")[0] for role in roles)
            for parent in parents:
                some = [role for role in roles if role.stem.rpartition(".")[0] == parent
                        and role.slot in slots]
                some.sort(key=lambda role: slots.index(role.slot))
                size = sum(math.prod(role.shape) for role in some)
                mine = math.prod(next(iter(unit.tensors.values())).shape)
                if len(some) == len(slots) and size == mine and best is None:
                    best = some
        if best is None or "norm" == unit.kind:
            continue
        alone = any(_can_take(role, unit) for role in roles)
        if not alone or unit.words & {"qkv", "kv"}:
            found.append(_Assignment(unit, best))
            units.remove(unit)
            for role in best:
                roles.remove(role)
    return found


def _match_heads(units: list[_Unit], roles: list[_Role], num_heads: int) -> list[_Assignment]:
    """Assign one layer per head, as in `heads.0.key`, and take both away."""
    found = []
    for role in [role for role in roles if role.slot in ("q", "k", "v")]:
        size = math.prod(role.shape) // num_heads
        some = [unit for unit in units if role.slot in unit.words and "weight" in unit.tensors
                and unit.tensors["weight"].numel() == size]
        if num_heads > 1 and len(some) == num_heads:
            for i, unit in enumerate(some):
                found.append(_Assignment(unit, [role], part=(i, num_heads)))
                units.remove(unit)
            roles.remove(role)
    return found


def _match_named(
    units: list[_Unit], roles: list[_Role]
) -> tuple[list[_Assignment], list[tuple[_Role, _Unit]]]:
    """Assign one layer to one role, best fit first; also return what only the order decided."""
    scores = []
    has_cross = any(role.slot == "norm3" for role in roles)
    for i, role in enumerate(roles):
        for unit in units:
            if _can_take(role, unit):
                score = _score(role, unit, has_cross)
                scores.append((-score, i, unit.order, role, unit))
    scores.sort(key=lambda entry: entry[:3])
    found = []
    by_order = []
    while scores and scores[0][0] <= 6:
        score, i, order, role, unit = scores[0]
        rivals = [entry for entry in scores if entry[0] == score
                  and (entry[1] == i) != (entry[2] == order)]
        if rivals:
            by_order.append((role, unit))
        missing = _missing_rows(role, unit)
        rows = slice(missing, None) if missing else None
        found.append(_Assignment(unit, [role], rows=rows))
        scores = [entry for entry in scores if entry[1] != i and entry[2] != order]
    return found, by_order


def _rest_of(role: _Role, found: list[_Assignment]) -> _Role | None:
    """Return the parameters of a role that no layer has got, such as a bias of its own."""
    kinds = {kind for one in found if any(other.stem == role.stem for other in one.roles)
             for kind in one.unit.tensors}
    tensors = {kind: x for kind, x in role.tensors.items() if kind not in kinds}
    names = {kind: name for kind, name in role.names.items() if kind not in kinds}
    return _Role(role.stem, tensors, names) if tensors else None


def _match_group(
    units: list[_Unit], roles: list[_Role], num_heads: int
) -> tuple[list[_Assignment], list[tuple[_Role, _Unit]]]:
    """Assign the layers of one block to its roles; also return what only the order decided."""
    free = list(units)
    wanted = list(roles)
    found = _match_packed(free, wanted)
    found += _match_heads(free, wanted, num_heads)
    named, by_order = _match_named(free, wanted)
    found += named
    used = [id(one.unit) for one in found]
    free = [unit for unit in free if id(unit) not in used]
    rests = [_rest_of(role, found) for role in roles]
    wanted = [rest for rest in rests if rest is not None]
    if free and wanted and len(free) < len(units):
        more, undecided = _match_group(free, wanted, num_heads)
        found += more
        by_order += undecided
    return found, by_order


def _match_renamed(
    units: list[_Unit], roles: list[_Role], rename: dict[str, str]
) -> list[_Assignment]:
    """Assign what the reader has settled, {parameter: role or "role | role"}."""
    found = []
    for name, wanted in rename.items():
        some = [unit for unit in units if name in (unit.name, *unit.names.values())]
        if not some:
            known = [name for unit in units for name in unit.names.values()]
            raise ValueError(f"rename has the parameter {name!r}, which your model lacks; it "
                             f"has {', '.join(known)}")
        chosen = []
        for part in wanted.split("|"):
            part = part.strip()
            fitting = [role for role in roles if part in (role.stem, *role.names.values())]
            if not fitting:
                known = [role.stem for role in roles]
                raise ValueError(f"rename gives {name!r} the role {part!r}; it must be of "
                                 f"{', '.join(known)}")
            chosen += fitting
        found.append(_Assignment(some[0], chosen))
    return found


def _number_flat_blocks(units: list[_Unit], roles: list[_Role]) -> None:
    """Number the layers of blocks that stand in one flat list, attention, MLP, attention, ...

    They are cut into as many equal parts as the reference has blocks.
    """
    depth = len({role.group for role in roles if role.group[1] is not None})
    listed = [unit for unit in units if re.match(r"\D*\d+\.", unit.name)]
    prefixes: dict[str, list[_Unit]] = {}
    for unit in listed:
        prefixes.setdefault(re.match(r"\D*", unit.name).group(), []).append(unit)
    numbered = {unit.group[1] for unit in units} - {None}
    if depth < 2 or len(numbered) == depth or not prefixes:
        return
    some = max(prefixes.values(), key=len)
    if len(some) % depth == 0 and len(some) >= 4 * depth:
        for i, unit in enumerate(some):
            unit.group = (unit.group[0], i // (len(some) // depth))


def _match(
    units: list[_Unit], roles: list[_Role], num_heads: int, rename: dict[str, str]
) -> _Matching:
    """Find the role or roles of each layer of the reader's model."""
    _number_flat_blocks(units, roles)
    assignments = _match_renamed(units, roles, rename)
    settled = [id(one.unit) for one in assignments]
    given = [role.stem for one in assignments for role in one.roles]
    sides = {role.group[0] for role in roles}
    numbered = any(role.group[1] is not None for role in roles)
    by_order = []
    for group in dict.fromkeys(role.group for role in roles):
        mine = []
        for unit in units:
            side = unit.group[0] if sides != {""} else ""
            number = unit.group[1] if numbered else None
            if (side, number) == group and id(unit) not in settled:
                mine.append(unit)
        wanted = [role for role in roles if role.group == group and role.stem not in given]
        found, undecided = _match_group(mine, wanted, num_heads)
        assignments += found
        by_order += undecided
    covered = set()
    used = set()
    for one in assignments:
        for kind, name in one.unit.names.items():
            if all(kind in role.names for role in one.roles):
                used.add(name)
                covered.update(role.names[kind] for role in one.roles)
    missing = [name for role in roles for name in role.names.values() if name not in covered]
    extra = [name for unit in units for name in unit.names.values() if name not in used]
    return _Matching(assignments, missing, extra, by_order)


# %% layouts
_PACKINGS = {  # the order of axes in the rows of a packed matrix, h heads of d channels
    "q, k, and v one after the other": (0, 1, 2),
    "q, k, and v of each head together": (1, 0, 2),
    "q, k, and v of each channel together": (1, 2, 0),
    "channels of all heads together": (0, 2, 1),
    "channels before q, k, and v": (2, 0, 1),
    "channels before heads": (2, 1, 0),
}


def _packed(parts: list[Tensor], heads: int, packing: str) -> Tensor:
    """Stack parts of equally many rows (h d, ...) in a packing."""
    unequal = len({part.shape for part in parts}) > 1  # as with grouped heads
    if packing == next(iter(_PACKINGS)) or unequal:
        return torch.cat(parts)
    stacked = torch.stack([part.unflatten(0, (heads, -1)) for part in parts])
    order = _PACKINGS[packing]
    rest = range(3, stacked.ndim)
    return stacked.permute(*order, *rest).flatten(0, 2)


def _arranged(
    values: list[Tensor], one: _Assignment, kind: str, choice: dict[str, Any], heads: int
) -> Tensor:
    """Arrange the values of roles, (out, in) or (out,), as the reader's parameter wants them."""
    target = tuple(one.unit.tensors[kind].shape)
    slot = one.roles[0].slot
    values = [_interleaved(value, role.slot, heads, choice)
              for value, role in zip(values, one.roles)]
    if len(values) > 1:
        order = _order_in(one)
        if choice.get("gate") == "second":
            order = order[::-1]
        values = [values[i] for i in order]
        value = _packed(values, heads, choice.get("packing", next(iter(_PACKINGS))))
    else:
        value = values[0]
    if one.part:
        i, n = one.part
        value = value.chunk(n)[i]
    if one.rows:
        value = value[..., one.rows, :]
    if value.ndim == 4 and math.prod(value.shape[2:]) > 1 and len(target) == 2:
        if choice.get("pixels") == "channels last":
            value = value.permute(0, 2, 3, 1)
        value = value.flatten(1)  # (D, C, p, p) -> (D, C p p)
    squeezed = [n for n in target if n > 1]
    if slot == "table":
        return _table(value, target, choice)
    if value.ndim == 2 and kind == "weight" and slot not in ("pos", "token", "cls"):
        if len(squeezed) == 3 and slot in ("q", "k", "v", "o"):
            return _by_head(value, slot, squeezed, choice).reshape(target)
        turned = one.unit.transposed
        if turned is None and value.shape[0] == value.shape[1]:
            turned = choice.get("in x out", True)
        elif turned is None:
            turned = squeezed[:2] != list(value.shape)
        if turned:
            value = value.T
    return value.reshape(target)


def _table(value: Tensor, target: tuple[int, ...], choice: dict[str, Any]) -> Tensor:
    """Arrange a table of biases ((2M - 1)², h); with three axes it may run the other way."""
    if len(target) == 3 and choice.get("table") == "negated":
        value = value.flip(0)
    if target[-1] != value.shape[-1]:
        value = value.T
    return value.reshape(target)


def _order_in(one: _Assignment) -> list[int]:
    """Return the order of the roles in a packed matrix, which a name such as "kqv" tells."""
    slots = [role.slot for role in one.roles]
    pieces = _pieces(one.unit.name)
    for piece in pieces:
        if sorted(piece) == sorted("".join(slots)):
            return [slots.index(letter) for letter in piece]
    return list(range(len(slots)))


def _interleaved(value: Tensor, slot: str, heads: int, choice: dict[str, Any]) -> Tensor:
    """Let channels of a head stand apart, (h d) -> (d h), in the rows or in o's columns."""
    if slot in ("q", "k", "v") and choice.get("split") == "interleaved":
        return value.unflatten(0, (heads, -1)).transpose(0, 1).flatten(0, 1)
    if slot == "o" and value.ndim == 2 and choice.get("merge") == "interleaved":
        return value.unflatten(1, (heads, -1)).transpose(1, 2).flatten(1, 2)
    return value


def _by_head(value: Tensor, slot: str, target: list[int], choice: dict[str, Any]) -> Tensor:
    """Give each head a matrix of its own: (out, in) -> (h, in, d), (h, d, in) or (in, h, d)."""
    if slot == "o":
        value = value.T  # (in, out) with in = h d
    if target[0] != value.shape[1] or target[0] * target[1] == value.shape[0]:
        heads = value.unflatten(0, (target[0], -1))  # (h, d, in)
        return heads if list(heads.shape) == target else heads.transpose(1, 2)
    heads = value.unflatten(0, (target[1], -1))
    return heads.permute(2, 0, 1)  # (in, h, d)


# %% the reader's implementation
def _hidden_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return modules in plain lists, tuples, or dicts, which PyTorch does not register."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_"):
                continue
            if isinstance(value, (list, tuple)):
                some = {f"{name}.{i}": one for i, one in enumerate(value)}
            elif isinstance(value, dict):
                some = {f"{name}.{key}": one for key, one in value.items()}
            else:
                some = {}
            for key, one in some.items():
                if isinstance(one, nn.Module):
                    found[f"{path}.{key}".strip(".")] = one
    registered = set(module.modules())
    return {name: one for name, one in found.items() if one not in registered}


def _flat(arrays: Any, before: str = "") -> dict[str, Any]:
    """Flatten nested dicts and lists of arrays: {"blocks.0.wq": array}."""
    if isinstance(arrays, dict):
        items = list(arrays.items())
    elif isinstance(arrays, (list, tuple)):
        items = list(enumerate(arrays))
    else:
        return {before: arrays}
    found = {}
    for key, value in items:
        found.update(_flat(value, f"{before}.{key}".strip(".")))
    return found


def _nested(like: Any, values: dict[str, Any], before: str = "") -> Any:
    """Undo `_flat` with other values."""
    if isinstance(like, dict):
        return {key: _nested(one, values, f"{before}.{key}".strip("."))
                for key, one in like.items()}
    if isinstance(like, (list, tuple)):
        return type(like)(_nested(one, values, f"{before}.{i}".strip("."))
                          for i, one in enumerate(like))
    return values[before]


def _to_array(x: Any) -> Any:
    """Return the values of a Tensor as an array, and anything else as it is."""
    return x.detach().numpy() if isinstance(x, Tensor) else x


_BATCH = r"(b|B|bs|bsz|batch\w*|n_batch\w*|num_batch\w*)"
_SHAPE = r"[^=\n]*=\s*\w[\w.]*\.(shape|size\(\))"
_BATCH_FIRST = (
    rf"\b{_BATCH}\s*,\s*\w+{_SHAPE}|batch_first\s*=\s*True|['\"]b n|\(B, [NTLS]\b"
    rf"|\b{_BATCH}\s*=\s*\w+\.(shape\[0\]|size\(0\))")
_SEQUENCE_FIRST = (
    rf"\b\w+\s*,\s*{_BATCH}\b{_SHAPE}|batch_first\s*=\s*False|['\"][ntsl] b|\([NTLS], B\b"
    rf"|transpose\(0, 1\)|permute\(1, 0|seq\w*, batch"
    rf"|\b{_BATCH}\s*=\s*\w+\.(shape\[1\]|size\(1\))")


class _Implementation:
    """The reader's module as a copy in float64 and evaluation mode, or a function of arrays."""

    def __init__(self, mine: Any):
        self.module = None
        self.arrays = None
        self.takes_arrays = False
        self.hidden: list[str] = []
        self.untrained: list[str] = []
        self.owners: dict[str, nn.Module | None] = {}
        if isinstance(mine, nn.Module):
            self.module = copy.deepcopy(mine).cpu().double().eval()
            self.parameters = self._of_module(self.module)
            self.function = self.module
            self.signature = inspect.signature(self.module.forward)
        else:
            self.function = mine
            self.parameters = {}
            if isinstance(mine, tuple):
                self.function, self.arrays = mine
                for name, value in _flat(self.arrays).items():
                    self.parameters[name] = torch.tensor(np.asarray(value)).double()
            self.signature = inspect.signature(self.function)
        skipped = 1 if self.arrays is not None else 0
        self.arguments = list(self.signature.parameters.values())[skipped:]

    def _of_module(self, module: nn.Module) -> dict[str, Tensor]:
        """All parameters in order, also those that are not registered."""
        found = dict(module.named_parameters())
        for path, part in module.named_modules():
            for name, _ in part.named_parameters(recurse=False):
                self.owners[f"{path}.{name}".strip(".")] = part
        known = {id(parameter) for parameter in found.values()}
        for path, part in _hidden_modules(module).items():
            part.cpu().double().eval()
            for inner, owner in part.named_modules():
                for name, parameter in owner.named_parameters(recurse=False):
                    full = ".".join(x for x in (path, inner, name) if x)
                    if id(parameter) not in known:
                        known.add(id(parameter))
                        found[full] = parameter
                        self.owners[full] = owner
                        self.hidden.append(full)
        return found

    def take_buffers(self, missing: list[str], values: dict[str, Tensor]) -> bool:
        """Count buffers as parameters where they stand for missing ones; return if any does."""
        if self.module is None:
            return False
        for name, buffer in self.module.named_buffers():
            for role in missing:
                shape = tuple(values[role].shape)
                named = _words(role.split(".")[0]) & _words(name)
                if named and buffer.is_floating_point() and _fits(shape, tuple(buffer.shape)):
                    self.parameters[name] = buffer
                    self.owners[name] = None
                    self.untrained.append(name)
        return bool(self.untrained)

    def set(self, values: dict[str, Tensor]) -> None:
        """Give parameters new values."""
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the implementation; arrays go to and come from functions of arrays."""
        if self.module is not None:
            return self.function(*args, **kwargs)
        if self.arrays is None:
            return self._run_function(args, kwargs)
        like = next(iter(_flat(self.arrays).values()))
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(like, jax.Array):
            with jax.enable_x64(True):
                return self._run_with(jax.numpy.asarray, args, kwargs)
        make = torch.as_tensor if isinstance(like, Tensor) else np.asarray
        return self._run_with(make, args, kwargs)

    def _run_function(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function without parameters, with arrays if it does not take tensors."""
        if not self.takes_arrays:
            try:
                return self.function(*args, **kwargs)
            except (TypeError, AttributeError):
                self.takes_arrays = True
        args = tuple(_to_array(x) for x in args)
        kwargs = {name: _to_array(x) for name, x in kwargs.items()}
        return self.function(*args, **kwargs)

    def _run_with(self, make: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function of arrays, which `make` makes."""
        values = {name: make(value.detach().numpy()) for name, value in
                  self.parameters.items()}
        args = tuple(make(_to_array(x)) if isinstance(x, Tensor) else x for x in args)
        kwargs = {name: make(_to_array(x)) if isinstance(x, Tensor) else x
                  for name, x in kwargs.items()}
        return self.function(_nested(self.arrays, values), *args, **kwargs)

    def sources(self) -> str:
        """Return the source code of the reader's classes or function."""
        functions = [self.function]
        if self.module is not None:
            kinds = dict.fromkeys(type(part) for part in self.module.modules())
            functions = [kind.__init__ for kind in kinds] + [kind.forward for kind in kinds]
        found = []
        for function in functions:
            if str(getattr(function, "__module__", "torch")).startswith("torch"):
                continue
            with contextlib.suppress(OSError, TypeError):
                found.append(inspect.getsource(function))
        return "\n".join(found)

    def is_batch_first(self) -> bool:
        """Whether the code says that the batch is the first axis, as in ``B, N, C = x.shape``.

        A layer around PyTorch's attention without ``batch_first=True`` counts, too, unless
        something in it speaks of the sequence as the first axis: to forget this argument is a
        common mistake.
        """
        source = self.sources()
        if re.search(_BATCH_FIRST, source):
            return True
        if not source or re.search(_SEQUENCE_FIRST, source) or self.module is None:
            return False
        return any(isinstance(part, nn.MultiheadAttention) and not part.batch_first
                   for part in self.module.modules())

    def uses_tensors(self) -> bool:
        """Whether operations of the implementation are PyTorch's, and so can be recorded."""
        if self.arrays is None:
            return not self.takes_arrays
        return isinstance(next(iter(_flat(self.arrays).values())), Tensor)

    def shared_blocks(self) -> list[str]:
        """Return the places of one module that is registered several times."""
        if self.module is None:
            return []
        places: dict[int, list[str]] = {}
        for name, part in self.module.named_modules(remove_duplicate=False):
            if any(True for _ in part.parameters()):
                places.setdefault(id(part), []).append(name)
        return next((some for some in places.values() if len(some) > 1), [])


# %% calls
@dataclass(frozen=True)
class _MaskStyle:
    """One way to hand over a mask: its values and its number of axes."""

    values: str  # "keep", "hide", "ones", or "added"
    axes: int

    def convert(self, mask: Tensor) -> Tensor | None:
        """Convert a mask (B, 1, N, M), True where a query may attend; None if it cannot be."""
        if self.axes == 3:
            mask = mask[:, 0]
        elif self.axes == 2 and mask.shape[2] == 1:
            mask = mask[:, 0, 0]  # (B, M)
        elif self.axes == 2 and mask.shape[0] == 1:
            mask = mask[0, 0]  # (N, M)
        elif self.axes == 2:
            return None
        if self.values == "hide":
            return ~mask
        if self.values == "ones":
            return mask.long()
        if self.values == "added":
            zeros = torch.zeros(mask.shape, dtype=torch.float64)
            return zeros.masked_fill(~mask, -math.inf)
        return mask


_STYLES = [_MaskStyle(values, axes) for values in ("keep", "ones", "hide", "added")
           for axes in (4, 2, 3)]


class _NotCallable(Exception):
    """The reader's implementation cannot be called as the probe wants it."""


def _tensor_of(found: Any, shapes: list[tuple[int, ...]]) -> Tensor:
    """Return the first Tensor of a result that has one of the shapes, best first."""
    if isinstance(found, dict):
        some = list(found.values())
    elif isinstance(found, (list, tuple)):
        some = list(found)
    else:
        some = [found]
    tensors = []
    for one in some:
        if isinstance(one, Tensor):
            tensors.append(one)
        elif hasattr(one, "__array__") or isinstance(one, float):
            tensors.append(torch.tensor(np.asarray(one)))
    for shape in shapes:
        for tensor in tensors:
            if tuple(tensor.shape) == shape:
                return tensor
    got = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or type(found).__name__
    raise _NotCallable(f"it returns {got} where the reference returns {shapes[0]}")


def _is_mask(name: str) -> bool:
    """Whether an argument is a mask of attention."""
    others = ("masked", "mask_token", "mask_tokens")
    return ("mask" in name and name not in others) or name in ("is_causal", "causal")


class _Caller:
    """Calls the reader's implementation with the inputs of a probe.

    Parameters
    ----------
    mine : _Implementation
    call : callable, optional
        The reader's own ``call(mine, **inputs)``.
    sequence_first : bool
        Hand over tokens as (N, B, C) and read the output so.
    join : callable, optional
        Makes one Tensor of several that are returned.
    """

    def __init__(self, mine: _Implementation, call: Callable | None, sequence_first: bool,
                 join: Callable | None):
        self.mine = mine
        self.call = call
        self.sequence_first = sequence_first
        self.join = join

    def arguments(self, inputs: dict[str, Any], style: _MaskStyle | None) -> tuple[list, dict]:
        """Return the positional and keyword arguments of a call."""
        main = [value for name, value in inputs.items() if name != "mask"]
        if self.sequence_first:
            main = [x.transpose(0, 1) if x.ndim >= 2 else x for x in main]
        names = [one.name for one in self.mine.arguments]
        empty = inspect.Parameter.empty
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [one.name for one in self.mine.arguments
                  if one.default is empty and one.kind not in variadic]
        keywords: dict[str, Any] = {}
        masks = [name for name in names if _is_mask(name)]
        needed_masks = [name for name in needed if _is_mask(name)]
        plain = [name for name in needed if not _is_mask(name)]
        if "mask" not in inputs and len(plain) < len(main):  # it is one of the inputs
            plain = needed
            masks = []
            needed_masks = []
        switches = [name for name in plain if name in ("train", "training", "deterministic")]
        for name in switches:
            keywords[name] = name == "deterministic"
            plain.remove(name)
        if len(main) == 1 and len(plain) == 3:
            main = main * 3
        elif len(main) == 2 and len(plain) == 3:
            main = [main[0], main[1], main[1]]
        elif len(plain) > len(main):
            raise _NotCallable(f"it needs {', '.join(plain)}")
        mask = inputs.get("mask")
        if mask is not None:
            if not masks:
                raise _NotCallable("it takes no mask")
            keywords[self._mask_name(masks, mask)] = style.convert(mask)
        for name in needed_masks:
            keywords.setdefault(name, None)
        return main, keywords

    def _mask_name(self, masks: list[str], mask: Tensor) -> str:
        """Choose the argument for a padding mask or a mask of queries and keys."""
        padding = [name for name in masks if "pad" in name]
        if padding and mask.shape[2] == 1:
            return padding[0]
        return next((name for name in masks if name not in padding), masks[0])

    def __call__(
        self, inputs: dict[str, Any], style: _MaskStyle | None, expected: Tensor
    ) -> Tensor:
        """Return the output for a probe, in the shape of the reference."""
        copies = {name: x.clone() if isinstance(x, Tensor) and not x.requires_grad else x
                  for name, x in inputs.items()}
        if self.call is not None:
            target = self.mine.function
            if self.mine.arrays is not None:
                target = self.mine.run
            found = self.call(target, **copies)
        else:
            args, keywords = self.arguments(copies, style)
            if style is not None and any(value is None for name, value in keywords.items()
                                         if _is_mask(name) and "mask" in inputs):
                raise _NotCallable("it takes no mask of this form")
            found = self.mine.run(*args, **keywords)
        if self.join is not None and isinstance(found, (list, tuple)):
            return self.join(*(torch.as_tensor(np.asarray(x)) if not isinstance(x, Tensor)
                               else x for x in found))
        shape = tuple(expected.shape)
        shapes = [shape]
        if self.sequence_first and len(shape) > 1:
            shapes = [(shape[1], shape[0], *shape[2:])]
        if "tokens" in inputs and len(shape) == 3:  # some models return the last logits only
            shapes += [(shape[0], 1, shape[2]), (shape[0], shape[2])]
        out = _tensor_of(found, shapes)
        if self.sequence_first and tuple(out.shape) == shapes[0] and len(shape) > 1:
            out = out.transpose(0, 1)
        return out


# %% recording
def _fingerprint(x: Tensor) -> tuple[int, Tensor]:
    """Return the number of elements and sums that do not depend on their order."""
    x = x.detach().double().flatten()
    finite = torch.isfinite(x)
    x = torch.where(finite, x, 0.0)
    sums = torch.stack([x.sum(), x.square().sum(), (x * x.abs()).sum(), x.abs().sum(),
                        x.sin().sum(), finite.sum().double()])
    return x.numel(), sums


def _same(first: tuple[int, Tensor], second: tuple[int, Tensor], tolerance: float) -> bool:
    """Whether two fingerprints are those of the same elements."""
    if first[0] != second[0]:
        return False
    scale = 1 + first[1][3]
    return bool(((first[1] - second[1]).abs() <= tolerance * scale).all())


@dataclass
class _Record:
    """One intermediate result of the reader's code."""

    fingerprint: tuple[int, Tensor]
    dtype: torch.dtype
    line: tuple[str, int]
    operation: str


_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (torch, np))


def _line_of_caller() -> tuple[str, int]:
    """Return file and number of the line of the reader's code that runs at present."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == __file__:
            return "", 0  # not the reader's code
        if not name.startswith(_LIBRARIES) and "einops" not in name:
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0


class _Recorder(TorchFunctionMode):
    """Keep fingerprints of all intermediate results, or switch dropout off.

    Parameters
    ----------
    without_dropout : bool
        Let calls of dropout return their input.
    """

    def __init__(self, without_dropout: bool = False):
        super().__init__()
        self.records: list[_Record] = []
        self.dropouts: list[tuple[float, tuple[str, int]]] = []
        self.without_dropout = without_dropout

    def __torch_function__(self, function, types, args=(), kwargs=None):  # noqa: D105
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name in ("dropout", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d"):
            rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2
                                                         else True))
            if training and rate > 0:
                self.dropouts.append((float(rate), _line_of_caller()))
                if self.without_dropout:
                    return args[0]
        if name == "scaled_dot_product_attention" and kwargs.get("dropout_p"):
            self.dropouts.append((float(kwargs["dropout_p"]), _line_of_caller()))
            if self.without_dropout:
                kwargs["dropout_p"] = 0.0
        out = function(*args, **kwargs)
        if isinstance(out, Tensor) and out.is_floating_point() and out.numel() > 1:
            self.records.append(_Record(_fingerprint(out), out.dtype, _line_of_caller(), name))
        return out


# %% comparison
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 3e-2,
               torch.float16: 5e-3}


def _difference(out: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest element of the reference."""
    out = out.detach().double()
    if out.shape != expected.shape and expected.ndim == 3:  # logits of the last token only
        expected = expected[:, -1:] if out.ndim == expected.ndim else expected[:, -1]
    if out.shape != expected.shape:
        return math.inf
    undefined = torch.isfinite(expected).logical_not()
    if not torch.equal(torch.isfinite(out).logical_not(), undefined):
        return math.inf
    out = out.masked_fill(undefined, 0.0)
    expected = expected.masked_fill(undefined, 0.0)
    scale = max(expected.abs().max().item(), 1e-12)
    return ((out - expected).abs().max() / scale).item()


@dataclass(frozen=True)
class _Attempt:
    """One way to read the reader's code: an arrangement of the values, and a layout."""

    choice: dict[str, Any]
    sequence_first: bool


@dataclass(frozen=True)
class Finding:
    """Mistakes that together reproduce the reader's output to rounding.

    Attributes
    ----------
    names, says, right, wrong, read : tuple of str
        As in `attnlib.mistakes.Mistake`, one for each mistake.
    convention : bool
        Whether all of them are conventions.
    error : float
        Largest relative difference between the reader's output and the model with the mistakes.
    """

    names: tuple[str, ...]
    says: tuple[str, ...]
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    read: tuple[str, ...]
    convention: bool
    error: float


@dataclass
class Report:
    """The result of a comparison; `print(report)` explains it.

    Attributes
    ----------
    verdict : {"equal", "equal up to a convention", "different", "not compared"}
    reason : str
        One sentence, where nothing could be compared.
    matched, parameters : int
        Number of the reader's parameters that were matched, and of all.
    notes : list of str
        Packed and unmatched parameters, and what was decided by order.
    adapted : list of str
        Conventions of the call and of the layout that were adapted.
    difference : float
        Largest relative difference of outputs over all probes.
    probes : dict of str to float or str
        The difference for each probe, or why it was not compared.
    located : str
        First step whose result differs.
    line : str
        The reader's line that computes it, if it is known.
    findings : list of Finding
        Every mistake, or pair of mistakes, that reproduces the reader's output.
    faults : list of str
        Mistakes of the structure, such as parameters that are not registered.
    agreement : dict of str to float
        For each step of the reference the relative difference to the closest intermediate
        result of the reader's code.
    """

    verdict: str = "not compared"
    reason: str = ""
    matched: int = 0
    parameters: int = 0
    notes: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)
    difference: float = math.nan
    probes: dict[str, float | str] = field(default_factory=dict)
    located: str = ""
    line: str = ""
    findings: list[Finding] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    agreement: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, which JSON can store."""
        return asdict(self)

    def __str__(self) -> str:
        """Explain the result in a few lines."""
        return "\n".join(_lines_of(self))


def _lines_of(report: Report) -> list[str]:
    """Return the lines of a report as text."""
    lines = []
    if report.parameters:
        lines.append(f"Parameters matched: {report.matched} of {report.parameters}.")
    lines += report.notes
    lines += [f"Adapted: {one}." for one in report.adapted]
    if report.verdict == "not compared":
        return [*lines, f"Not compared: {report.reason}."]
    if report.verdict == "different":
        found = f"Different. Outputs differ by {report.difference:.2g} (relative)"
        if report.difference < 1e-9:
            found = "Different, although the outputs agree"
        elif report.located:
            found += f"; the first difference is in: {report.located}"
        lines.append(f"{found}.")
        if report.line:
            lines.append(f"Your line: {report.line}")
    else:
        lines.append(f"{report.verdict.capitalize()} (relative difference "
                     f"{report.difference:.1g}).")
    lines += report.faults
    for finding in report.findings:
        lines += _lines_of_finding(finding)
    if report.verdict == "different" and not report.findings and not report.faults:
        lines.append("No catalogued mistake reproduces your output.")
    for name, value in report.probes.items():
        if isinstance(value, str):
            lines.append(f"Not compared on {name}: {value}.")
    return lines


def _lines_of_finding(finding: Finding) -> list[str]:
    """Return the lines about one finding."""
    lines = []
    for says, right, wrong, read in zip(finding.says, finding.right, finding.wrong,
                                        finding.read):
        chapter, _, heading = read.partition(": ")
        lines.append(f"{says} (reference: {right}; yours: {wrong})")
        lines.append(f"  Read: \"{heading}\" (chapter {chapter[:2]}).")
    lines.append(f"  This reproduces your output to {max(finding.error, 1e-17):.0e}.")
    return lines


# %% the comparison
class _Comparison:
    """Everything that is known about a reader's implementation and a reference."""

    def __init__(self, mine: _Implementation, reference: Reference, call: Callable | None,
                 rename: dict[str, str]):
        self.mine = mine
        self.reference = reference
        self.call = call
        self.report = Report()
        self.module = reference.module
        if isinstance(self.module, nn.Module):
            self.module = copy.deepcopy(self.module).cpu().double().eval()
        self.values = self._draw_values()
        if self._is_large():
            self.reference = reference = replace(reference, probes=_shortened(reference.probes))
        self.expected = [self._run_reference(probe) for probe in reference.probes]
        self.heads = int(reference.config.get("num_heads", 1) or 1)
        self.matching = self._match(rename)
        if mine.take_buffers([role for role in self.matching.missing
                              if role.split(".")[0] in ("pos", "cls", "dist", "token")],
                             self.values):
            self.matching = self._match(rename)
        self.without_dropout = False
        self.seconds = 60.0
        self.tolerance = _TOLERANCES[torch.float64]

    def _is_large(self) -> bool:
        """Whether one probe has to do."""
        if not isinstance(self.module, nn.Module):
            return False
        return sum(parameter.numel() for parameter in self.module.parameters()) > 3_000_000

    def _match(self, rename: dict[str, str]) -> _Matching:
        """Match the reader's parameters with the roles."""
        units = _units(self.mine.parameters, self.mine.owners)
        return _match(units, _roles(self.values), self.heads, rename)

    def _own_roles(self) -> dict[str, Tensor]:
        """The parameters of the reference by role, as views."""
        if not isinstance(self.module, nn.Module):
            return {}
        return self.reference.roles(dict(self.module.named_parameters()))

    def _draw_values(self) -> dict[str, Tensor]:
        """Give the reference random parameters, so that no bias is zero and no gain is one."""
        values = {}
        with torch.no_grad():
            for i, (role, view) in enumerate(self._own_roles().items()):
                generator = torch.Generator().manual_seed(1000 + i)
                value = torch.randn(view.shape, generator=generator, dtype=torch.float64)
                fan_in = view[0].numel() if view.ndim > 1 else 10
                value = value * fan_in**-0.5
                if view.ndim == 1 and role.endswith("weight"):
                    value = 1 + value
                if role.endswith("logit_scale"):  # some above the clamp of log 100
                    value = torch.linspace(1, 5.5, view.numel()).reshape(view.shape)
                view.copy_(value)
                values[role] = value
        return values

    def _run_reference(self, probe: Probe) -> Tensor:
        with torch.no_grad():
            return self.reference.call(self.module, **probe.inputs).detach().double()

    def attempts(self) -> Iterator[_Attempt]:
        """All readings of the reader's code, the usual ones first."""
        assignments = self.matching.assignments
        packed = [one for one in assignments if len(one.roles) > 1]
        slots = {role.slot for one in assignments for role in one.roles}
        unknown = [one for one in assignments
                   if one.unit.transposed is None and len(one.roles) == 1
                   and len(one.roles[0].shape) == 2
                   and one.roles[0].shape[0] == one.roles[0].shape[1]]
        patches = any(len(role.shape) == 4 for one in assignments for role in one.roles)
        choices: list[dict[str, Any]] = [{}]
        if packed and self.heads > 1:
            choices += [{"packing": name} for name in list(_PACKINGS)[1:]]
        if "q" in slots and self.heads > 1:
            if not packed:
                choices.append({"split": "interleaved"})
            choices += [{**choice, "merge": "interleaved"} for choice in choices]
        if any(role.slot == "gate" for one in packed for role in one.roles):
            choices.append({"gate": "second"})
        if any(role.slot == "table" and len(one.unit.tensors["weight"].shape) == 3
               for one in assignments for role in one.roles):
            choices += [{**choice, "table": "negated"} for choice in choices]
        if patches:
            choices += [{**choice, "pixels": "channels last"} for choice in choices[:3]]
        if unknown:
            choices = [{**choice, "in x out": turned} for turned in (True, False)
                       for choice in choices]
        inputs = self.reference.probes[0].inputs
        tokens = [x for x in inputs.values() if isinstance(x, Tensor) and x.ndim in (2, 3)]
        layouts = [False]
        if tokens and self.values and not self.mine.is_batch_first():
            layouts.append(True)
        for sequence_first in layouts:
            for choice in choices:
                yield _Attempt(choice, sequence_first)

    def load(self, attempt: _Attempt) -> None:
        """Give the reader's parameters the reference's values."""
        values = {}
        for one in self.matching.assignments:
            for kind, name in one.unit.names.items():
                if all(kind in role.names for role in one.roles):
                    parts = [self.values[role.names[kind]] for role in one.roles]
                    values[name] = _arranged(parts, one, kind, attempt.choice, self.heads)
        self.mine.set(values)

    def output(
        self, attempt: _Attempt, number: int, style: _MaskStyle | None = None,
        recorder: _Recorder | None = None,
    ) -> Tensor:
        """Run the reader's code on a probe; raise `_NotCallable` with the reason if it fails."""
        caller = _Caller(self.mine, self.call, attempt.sequence_first, self.reference.join)
        mode = recorder or _Recorder(without_dropout=self.without_dropout)
        watched = recorder is not None or self.without_dropout
        try:
            with torch.no_grad(), (mode if watched else contextlib.nullcontext()):
                return caller(self.reference.probes[number].inputs, style,
                              self.expected[number])
        except _NotCallable:
            raise
        except Exception as error:
            message = str(error).strip().splitlines() or [""]
            raise _NotCallable(f"it raised {type(error).__name__}: {message[0]}") from error

    def plain_probes(self) -> list[int]:
        """Numbers of the probes without a mask."""
        return [i for i, probe in enumerate(self.reference.probes)
                if "mask" not in probe.inputs]

    def masked_probes(self) -> list[int]:
        """Numbers of the probes with a mask."""
        return [i for i, probe in enumerate(self.reference.probes) if "mask" in probe.inputs]

    def variant(
        self, mistakes: tuple[Mistake, ...], number: int, gradients: bool = False
    ) -> Tensor | dict[str, Tensor]:
        """Run the reference's steps with mistakes on a probe."""
        model = _model_with(self, mistakes)
        if not gradients:
            with torch.no_grad():
                return model.run(**self.reference.probes[number].inputs)
        weights = {role: x.clone().requires_grad_() for role, x in model.weights.items()}
        model.weights = weights
        inputs = _with_gradients(self.reference.probes[number].inputs)
        return _gradients(model.run(**inputs), {**weights, **_inputs_of(inputs)})


def _shortened(probes: list[Probe]) -> list[Probe]:
    """Keep the first probe, with its first two rows."""
    first = probes[0]
    inputs = {name: x[:2] if isinstance(x, Tensor) else x for name, x in first.inputs.items()}
    return [Probe(first.name, inputs)]


def _with_gradients(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copy inputs, and let those of floating point require gradients."""
    found = {}
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.detach().clone().requires_grad_()
        found[name] = x
    return found


def _inputs_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Name the inputs of which a gradient is compared."""
    return {f"input {name}": x for name, x in inputs.items()
            if isinstance(x, Tensor) and x.requires_grad}


def _gradients(out: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a fixed weighted sum of the output."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    total = (out.double() * weights).sum()
    if not total.requires_grad:
        return {name: torch.zeros_like(x) for name, x in tensors.items()}
    found = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
    return {name: torch.zeros_like(x) if grad is None else grad.double()
            for (name, x), grad in zip(tensors.items(), found)}


# %% diagnosis
def _applicable(comparison: _Comparison) -> list[Mistake]:
    """Return the mistakes that the reader's model can contain."""
    missing = comparison.matching.missing
    found = []
    for one in CATALOGUE:
        lacking = all(any(role.endswith(end) for role in missing) for end in one.lacks)
        if one.applies_to(comparison.reference.steps) and lacking and not one.has:
            found.append(one)
    return found


class _Outputs:
    """The reader's outputs for all readings of the code, each computed when it is needed."""

    def __init__(self, comparison: _Comparison):
        self.comparison = comparison
        self.attempts = list(comparison.attempts())
        self.found: dict[tuple, Tensor | str] = {}
        self.loaded: _Attempt | None = None

    def get(self, attempt: _Attempt, number: int, style: _MaskStyle | None = None
            ) -> Tensor | str:
        """Return the output on a probe, or the reason why there is none."""
        key = (self.attempts.index(attempt), number, style)
        if key not in self.found:
            if self.loaded is not attempt:
                self.comparison.load(attempt)
                self.loaded = attempt
            try:
                self.found[key] = self.comparison.output(attempt, number, style)
            except _NotCallable as reason:
                self.found[key] = str(reason)
        return self.found[key]

    def difference(
        self, attempt: _Attempt, number: int, expected: Tensor, style: _MaskStyle | None = None
    ) -> float | str:
        """Return the relative difference on a probe, or the reason why there is none."""
        out = self.get(attempt, number, style)
        if isinstance(out, str):
            return out
        return _difference(out, expected)

    def agreement(
        self, attempt: _Attempt, expected: Callable[[int], Tensor]
    ) -> tuple[float, dict[str, float | str], str] | None:
        """Compare all probes; return the difference, those by probe, and the mask's values.

        Returns None as soon as one probe differs.
        """
        comparison = self.comparison
        tolerance = comparison.tolerance
        by_probe: dict[str, float | str] = {}
        largest = 0.0
        for number in comparison.plain_probes():
            found = self.difference(attempt, number, expected(number))
            if isinstance(found, str) and number == 0:
                return None
            if isinstance(found, float):
                if found > tolerance:
                    return None
                largest = max(largest, found)
            by_probe[comparison.reference.probes[number].name] = found
        masked = self._best_masked(attempt, expected)
        if masked is None:
            return None
        difference, some, values = masked
        by_probe.update(some)
        return max(largest, difference), by_probe, values

    def _best_masked(
        self, attempt: _Attempt, expected: Callable[[int], Tensor]
    ) -> tuple[float, dict[str, float | str], str] | None:
        """Find the meaning of a mask with which most probes agree; None if one runs, but none
        agrees."""
        best = (0.0, {}, "keep")
        most = -1
        ran = False
        for values in dict.fromkeys(style.values for style in _STYLES):
            found = self._masked(attempt, expected, values)
            if found is None:
                ran = True
                continue
            count = sum(isinstance(one, float) for one in found[1].values())
            if count > most:
                most = count
                best = (*found, values)
            if count == len(self.comparison.masked_probes()):
                break
        if ran and most <= 0:
            return None
        return best

    def _masked(
        self, attempt: _Attempt, expected: Callable[[int], Tensor], values: str
    ) -> tuple[float, dict[str, float | str]] | None:
        """Compare the probes with a mask, handed over with one meaning of its values."""
        largest = 0.0
        by_probe: dict[str, float | str] = {}
        for number in self.comparison.masked_probes():
            some = []
            for style in _STYLES:
                if style.values == values:
                    out = self.get(attempt, number, style)
                    if isinstance(out, Tensor):
                        out = _difference(out, expected(number))
                    some.append(out)
            numbers = [one for one in some if isinstance(one, float)]
            name = self.comparison.reference.probes[number].name
            if not numbers:
                by_probe[name] = some[0]
            elif min(numbers) > self.comparison.tolerance:
                return None
            else:
                largest = max(largest, min(numbers))
                by_probe[name] = min(numbers)
        return largest, by_probe


def _finding(mistakes: tuple[Mistake, ...], error: float) -> Finding:
    """Describe mistakes that reproduce the reader's output."""
    return Finding(
        names=tuple(one.name for one in mistakes), says=tuple(one.says for one in mistakes),
        right=tuple(one.right for one in mistakes), wrong=tuple(one.wrong for one in mistakes),
        read=tuple(one.read for one in mistakes),
        convention=all(one.convention for one in mistakes), error=error)


class _Screen:
    """A quick test of mistakes, for which only the first blocks are computed.

    At the end of the first block the model with a mistake must agree with the reference if the
    reader's code does; and at the end of the block with the first difference it must have a
    result that the reader's code has, too.
    """

    def __init__(self, comparison: _Comparison, outputs: _Outputs):
        self.comparison = comparison
        records = _records_of(comparison, outputs, outputs.attempts[0])
        steps = _steps_of(comparison)
        absent = _absent_steps(comparison, outputs, outputs.attempts[0])
        self.tests: list[tuple[str, list[Tensor]]] = []  # step, and results that are allowed
        if not records:
            return
        ends = [name for name in steps
                if name.rpartition(".")[2] in ("after attention", "after the MLP")]
        if ends and ends[0] not in absent:
            self.tests.append((ends[0], [steps[ends[0]][1]]))
        later = [name for name in ends if name in absent]
        if later:
            size = steps[later[0]][0]
            self.tests.append((later[0], [record.fingerprint[1] for record in records
                                          if record.fingerprint[0] == size]))

    def passes(self, chosen: tuple[Mistake, ...]) -> bool:
        """Whether the model with these mistakes may reproduce the reader's output."""
        comparison = self.comparison
        for step, allowed in self.tests:
            model = _model_with(comparison, chosen)
            model.stop_after = step
            try:
                with torch.no_grad():
                    model.run(**comparison.reference.probes[0].inputs)
            except Stopped:
                _, sums = _fingerprint(model.notes[step])
                limit = 100 * comparison.tolerance * (1 + sums[3])
                if not any(((one - sums).abs() <= limit).all() for one in allowed):
                    return False
            except _FAILURES:
                return False
        return True


_FAILURES = (TypeError, RuntimeError, KeyError, IndexError, AttributeError, ValueError)


def _diagnose(
    comparison: _Comparison, outputs: _Outputs
) -> list[tuple[tuple[Mistake, ...], _Attempt, tuple]]:
    """Find all mistakes, or else all pairs of them, that reproduce the reader's outputs."""
    started = time.monotonic()
    mistakes = _applicable(comparison)
    singles = [(one,) for one in mistakes]
    conventions = [one for one in mistakes if one.convention]
    others = [one for one in mistakes if not one.convention]
    pairs = list(itertools.product(conventions, others))
    pairs += list(itertools.combinations(conventions, 2))
    pairs += list(itertools.combinations(others, 2))
    declared = re.search(_SEQUENCE_FIRST, comparison.mine.sources()) is not None
    readings = [attempt for attempt in outputs.attempts
                if isinstance(outputs.get(attempt, 0), Tensor)
                and (declared or not attempt.sequence_first)]
    screen = _Screen(comparison, outputs)
    for some in ([()], singles, pairs):
        found = []
        for chosen in some:
            if time.monotonic() - started > comparison.seconds:
                break
            if len({one.step for one in chosen}) < len(chosen):
                continue
            if screen.passes(chosen):
                found += _reproducing(comparison, outputs, readings, chosen)
        if found:
            best = min(error for _, _, (error, _, _) in found)
            return [one for one in found if one[2][0] <= max(100 * best, 1e-13)]
    return []


def _model_with(comparison: _Comparison, mistakes: tuple[Mistake, ...]) -> Steps:
    """Return the reference's steps with mistakes, and with the parameters that yours has."""
    steps = comparison.reference.steps
    for one in mistakes:
        steps = one.applied_to(steps)
    weights = {role: value for role, value in comparison.values.items()
               if role not in comparison.matching.missing}
    return steps(weights, **comparison.reference.config)


def _notes(comparison: _Comparison, mistakes: tuple[Mistake, ...]) -> dict[str, Tensor]:
    """Return the intermediate results of the reference with mistakes."""
    model = _model_with(comparison, mistakes)
    with torch.no_grad():
        model.run(**comparison.reference.probes[0].inputs)
    return model.notes


def _reproducing(
    comparison: _Comparison, outputs: _Outputs, readings: list[_Attempt],
    chosen: tuple[Mistake, ...],
) -> list[tuple[tuple[Mistake, ...], _Attempt, tuple]]:
    """Return the first reading of the reader's code that equals the model with mistakes."""
    known: dict[int, Tensor] = {}

    def expected(number: int) -> Tensor:
        if number not in known:
            known[number] = comparison.variant(chosen, number)
        return known[number]

    try:
        first = expected(0)
    except _FAILURES:
        return []  # the model lacks a parameter that this step needs
    for attempt in readings:
        difference = outputs.difference(attempt, 0, first)
        if isinstance(difference, float) and difference <= comparison.tolerance:
            try:
                agreement = outputs.agreement(attempt, expected)
            except _FAILURES:
                continue
            if agreement is not None:
                return [(chosen, attempt, agreement)]
    return []


# %% location
def _relative(first: tuple[int, Tensor], second: tuple[int, Tensor]) -> float:
    """Return how far two fingerprints of equally many elements are apart."""
    scale = 1e-12 + second[1][3]
    return ((first[1] - second[1]).abs().max() / scale).item()


def _records_of(
    comparison: _Comparison, outputs: _Outputs, attempt: _Attempt
) -> list[_Record]:
    """Return the intermediate results of the reader's code on the first probe."""
    recorder = _Recorder(without_dropout=comparison.without_dropout)
    comparison.load(attempt)
    outputs.loaded = attempt
    try:
        comparison.output(attempt, 0, recorder=recorder)
    except _NotCallable:
        return []
    return recorder.records if comparison.mine.uses_tensors() else []


def _absent_steps(
    comparison: _Comparison, outputs: _Outputs, attempt: _Attempt
) -> list[str]:
    """Return the steps after the last one whose result the reader's code has, too."""
    records = _records_of(comparison, outputs, attempt)
    if not records:
        return []
    last = -1
    names = []
    for i, (name, fingerprint) in enumerate(_steps_of(comparison).items()):
        names.append(name)
        distances = [_relative(record.fingerprint, fingerprint) for record in records
                     if record.fingerprint[0] == fingerprint[0]]
        comparison.report.agreement[name] = min(distances, default=math.inf)
        if comparison.report.agreement[name] <= 10 * comparison.tolerance:
            last = i
    return names[last + 1:]


def _locate(comparison: _Comparison, outputs: _Outputs, attempt: _Attempt,
            wrong: dict[str, Tensor] | None) -> None:
    """Write the first different step, and the reader's line, into the report.

    Parameters
    ----------
    wrong : dict of str to Tensor, optional
        Intermediate results of the reference with the mistakes that were found.
    """
    report = comparison.report
    steps = _steps_of(comparison)
    tolerance = 10 * comparison.tolerance
    changed = []
    if wrong is not None:
        changed = [name for name in steps if name in wrong and not _same(
            _fingerprint(wrong[name]), steps[name], tolerance)]
        report.located = _spoken(changed[0]) if changed else ""
    absent = _absent_steps(comparison, outputs, attempt)
    records = _records_of(comparison, outputs, attempt)
    line = None
    for name in changed:
        wanted = _fingerprint(wrong[name])
        for record in records:
            if line is None and _same(record.fingerprint, wanted, tolerance):
                line = record.line
                report.located = _spoken(name)
    if line is None and absent:
        report.located = _spoken(absent[0])
        line = _first_unknown(records, list(steps.values()), tolerance)
    if line is not None and line[1]:
        text = linecache.getline(*line).strip()
        report.line = f"{Path(line[0]).name}:{line[1]}: {text}"


def _steps_of(comparison: _Comparison) -> dict[str, tuple[int, Tensor]]:
    """Return the reference's intermediate results on the first probe, in order."""
    reference = comparison.reference
    inputs = reference.probes[0].inputs
    with torch.no_grad():
        if reference.steps is not None:
            model = reference.steps(comparison.values, **reference.config)
            model.run(**inputs)
            return {name: _fingerprint(value) for name, value in model.notes.items()}
        with _Recorder() as recorder:
            reference.call(comparison.module, **inputs)
    found = {}
    for number, record in enumerate(recorder.records, start=1):
        file, line = record.line
        found[f"{record.operation}, operation {number}, {Path(file).name}:{line}"] = (
            record.fingerprint)
    return found


def _first_unknown(
    records: list[_Record], known: list[tuple[int, Tensor]], tolerance: float
) -> tuple[str, int] | None:
    """Return the line of the first result after the last one that the reference has, too."""
    last = -1
    for i, record in enumerate(records):
        if any(_same(record.fingerprint, one, tolerance) for one in known):
            last = i
    for record in records[last + 1:]:
        return record.line
    return None


def _spoken(name: str) -> str:
    """Name a step for a reader: "blocks.0.attn.logits" is "logits (blocks.0.attn)"."""
    if "operation" in name:
        return name
    where, _, what = name.rpartition(".")
    return f"{what} ({where})" if where else what


# %% compare
def _check_gradients(comparison: _Comparison, attempt: _Attempt) -> None:
    """Compare the gradients of parameters and inputs, and look for a mistake behind a difference."""
    mine = comparison.mine
    if mine.module is None:
        comparison.report.probes["gradients"] = "a function of arrays has none"
        return
    comparison.load(attempt)
    ours = _with_gradients(comparison.reference.probes[0].inputs)
    own = comparison._own_roles()
    out = comparison.reference.call(comparison.module, **ours)
    parameters = dict(comparison.module.named_parameters())
    grads = _gradients(out, {**parameters, **_inputs_of(ours)})
    expected = dict(comparison.reference.roles(
        {name: grads[name] for name in parameters}) if own else {})
    expected.update({name: grads[name] for name in _inputs_of(ours)})
    theirs = _with_gradients(comparison.reference.probes[0].inputs)
    caller = _Caller(mine, comparison.call, attempt.sequence_first,
                     comparison.reference.join)
    try:
        with _Recorder(without_dropout=comparison.without_dropout):
            out = caller(theirs, None, comparison.expected[0])
    except Exception as error:
        comparison.report.probes["gradients"] = f"it raised {type(error).__name__}"
        return
    if out.shape != comparison.expected[0].shape:
        return
    names = [name for one in comparison.matching.assignments
             for name in one.unit.names.values()]
    tensors = {name: mine.parameters[name] for name in names
               if mine.parameters[name].requires_grad}
    found = _gradients(out, {**tensors, **_inputs_of(theirs)})
    roles = _gradients_by_role(comparison, attempt, found)
    roles.update({name: found[name] for name in _inputs_of(theirs)})
    largest, where = _largest_difference(roles, expected)
    comparison.report.probes["gradients"] = largest
    if largest <= 1e3 * comparison.tolerance:
        return
    report = comparison.report
    report.verdict = "different"
    report.difference = largest
    report.located = f"gradient of {where}"
    for one in _applicable(comparison):
        try:
            same = _difference(comparison.variant((one,), 0), comparison.expected[0])
            if same > comparison.tolerance:
                continue
            wrong = comparison.variant((one,), 0, gradients=True)
        except _FAILURES:
            continue
        error, _ = _largest_difference(roles, wrong)
        if error <= 1e3 * comparison.tolerance:
            report.findings.append(_finding((one,), error))


def _gradients_by_role(
    comparison: _Comparison, attempt: _Attempt, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Add up the gradients of the reader's parameters where the roles' values went."""
    sums = {role: torch.zeros_like(value) for role, value in comparison.values.items()}
    for one in comparison.matching.assignments:
        for kind, name in one.unit.names.items():
            if name not in found or not all(kind in role.names for role in one.roles):
                continue
            numbers = []
            start = 0
            for role in one.roles:
                shape = role.tensors[kind].shape
                count = math.prod(shape)
                numbers.append(torch.arange(start, start + count).reshape(shape))
                start += count
            places = _arranged(numbers, one, kind, attempt.choice, comparison.heads)
            flat = torch.zeros(start, dtype=torch.float64)
            flat.index_add_(0, places.flatten(), found[name].flatten())
            start = 0
            for role in one.roles:
                shape = role.tensors[kind].shape
                count = math.prod(shape)
                sums[role.names[kind]] += flat[start : start + count].reshape(shape)
                start += count
    return sums


def _largest_difference(
    found: dict[str, Tensor], expected: dict[str, Tensor]
) -> tuple[float, str]:
    """Return the largest relative difference of gradients, and of which one it is."""
    scale = max(x.abs().max().item() for x in expected.values())
    largest = 0.0
    where = ""
    for name, wanted in expected.items():
        if name in found:
            difference = ((found[name] - wanted).abs().max() / (scale + 1e-12)).item()
            if difference > largest:
                largest = difference
                where = name
    return largest, where


@contextlib.contextmanager
def _undisturbed() -> Iterator[io.StringIO]:
    """Compute in float64, keep what is printed, and restore random numbers and defaults."""
    before = torch.get_default_dtype()
    printed = io.StringIO()
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(printed):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            yield printed
        finally:
            torch.set_default_dtype(before)


def _structure(comparison: _Comparison) -> None:
    """Note what the modules show without being run."""
    mine = comparison.mine
    report = comparison.report
    matching = comparison.matching
    if mine.hidden:
        report.faults.append(
            f"{len(mine.hidden)} of your parameters, such as {mine.hidden[0]}, are in a plain "
            "Python list or dict, so parameters() does not return them and no optimizer trains "
            "them: use nn.ModuleList.")
    for name in mine.untrained:
        report.faults.append(f"{name} is a buffer, so no optimizer trains it; it should be an "
                             "nn.Parameter.")
    shared = mine.shared_blocks()
    if shared and matching.missing:
        report.faults.append(
            f"{' and '.join(shared[:3])} are one module, so they share their parameters: "
            "[block] * n repeats a reference, it makes no copies.")
    for name in list(matching.extra):
        unit = next(one for one in _units(mine.parameters, mine.owners)
                    if name in one.names.values())
        token = [role for role in _roles(comparison.values) if role.slot == "token"]
        is_twin = token and name == unit.names.get("weight") and (
            tuple(unit.tensors["weight"].shape) == token[0].shape)
        if is_twin and "pos" not in unit.words:
            matching.assignments.append(_Assignment(unit, token))
            matching.extra.remove(name)
            report.faults.append(
                f"{name} and the token embedding are two parameters; the reference uses one "
                "matrix for both (tied).")
    report.parameters = len(mine.parameters)
    report.matched = report.parameters - len(matching.extra)
    packed = [one for one in matching.assignments if len(one.roles) > 1]
    if packed:
        slots = ", ".join(role.slot for role in packed[0].roles)
        others = f", and so in {len(packed) - 1} more" if len(packed) > 1 else ""
        report.notes.append(f"{packed[0].unit.name} holds {slots}{others}.")
    if matching.missing:
        report.notes.append(f"Yours lacks: {_listed(matching.missing)}.")
    if matching.extra:
        report.notes.append(f"The reference lacks: {_listed(matching.extra)}.")
    if matching.by_order:
        some = [f"{unit.name} is {role.stem}" for role, unit in matching.by_order]
        report.notes.append(f"Matched by order, as names do not tell: {_listed(some)}; "
                            "rename={...} settles it.")


def _listed(names: list[str], most: int = 4) -> str:
    """Join names, the first few of many."""
    text = ", ".join(names[:most])
    return text + (f", and {len(names) - most} more" if len(names) > most else "")


def _dropout(comparison: _Comparison, outputs: _Outputs) -> None:
    """Find dropout in evaluation, which is a fault, and note dropout in training."""
    report = comparison.report
    attempt = outputs.attempts[0]
    comparison.load(attempt)
    outputs.loaded = attempt
    recorder = _Recorder()
    try:
        torch.manual_seed(1)
        state = torch.get_rng_state()
        first = comparison.output(attempt, 0, recorder=recorder)
        second = first
        if not torch.equal(state, torch.get_rng_state()) or comparison.mine.module is None:
            torch.manual_seed(2)
            second = comparison.output(attempt, 0)
    except _NotCallable:
        return
    if first.shape == second.shape and first is not second and _difference(first, second.double()) > 1e-9:
        comparison.without_dropout = True
        rates = ", ".join(sorted({f"{rate:g}" for rate, _ in recorder.dropouts}))
        what = f"Dropout (p = {rates}) is" if rates else "Random numbers are"
        report.faults.append(f"{what} active in evaluation: two calls after eval() differ; "
                             "pass training=self.training.")
    dtypes = {record.dtype for record in recorder.records} & set(_TOLERANCES)
    dtypes |= {first.dtype} & set(_TOLERANCES)
    comparison.tolerance = max([_TOLERANCES[one] for one in dtypes], default=1e-9)
    low = [one for one in dtypes if one != torch.float64]
    if low:
        report.notes.append(f"Part of your code computes in {str(low[0])[6:]}, which limits "
                            f"the tolerance to {comparison.tolerance:g}.")


def _training(comparison: _Comparison, attempt: _Attempt) -> None:
    """Note where dropout acts in training, and whether anything else differs there."""
    mine = comparison.mine
    if mine.module is None or comparison.without_dropout:
        return
    recorder = _Recorder(without_dropout=True)
    mine.module.train()
    comparison.load(attempt)
    try:
        out = comparison.output(attempt, 0, recorder=recorder)
    except _NotCallable as reason:
        comparison.report.probes["training mode"] = str(reason)
        return
    finally:
        mine.module.eval()
    if recorder.dropouts:
        rates = sorted({rate for rate, _ in recorder.dropouts})
        lines = sorted({f"line {line[1]}" for _, line in recorder.dropouts})
        comparison.report.adapted.append(
            f"in training, dropout with p = {', '.join(f'{rate:g}' for rate in rates)} acts in "
            f"{', '.join(lines[:4])}; it was switched off")
    difference = _difference(out, comparison.expected[0])
    comparison.report.probes["training mode without dropout"] = difference


def _describe(comparison: _Comparison, attempt: _Attempt, values: str) -> None:
    """Name the conventions of a reading of the reader's code."""
    report = comparison.report
    if attempt.sequence_first:
        report.adapted.append("tokens are handed over as (N, B, C), the sequence first; if your "
                              "code expects (B, N, C), it attends over the batch axis")
    if "packing" in attempt.choice:
        report.adapted.append(f"packed rows: {attempt.choice['packing']}")
    for name in ("split", "merge"):
        if attempt.choice.get(name):
            report.adapted.append(f"heads are interleaved where they are {name}: channel i "
                                  "belongs to head i modulo the number of heads")
    if attempt.choice.get("table"):
        report.adapted.append("the table of biases is indexed by key minus query")
    if attempt.choice.get("gate"):
        report.adapted.append("the gate is the second half of the packed matrix")
    if attempt.choice.get("pixels"):
        report.adapted.append("pixels of a patch: channels last")
    if comparison.masked_probes() and values == "hide":
        report.adapted.append("your mask is True where a query may not attend")
    if comparison.masked_probes() and values == "added":
        report.adapted.append("your mask is added to the logits")


def _is_convention(attempt: _Attempt, values: str) -> bool:
    """Whether a reading differs from the reference by a convention."""
    unusual = {"packing", "split", "merge", "pixels", "gate", "table"} & set(attempt.choice)
    return attempt.sequence_first or bool(unusual) or values == "hide"


def _conclude(comparison: _Comparison, outputs: _Outputs) -> None:
    """Look for a reading that agrees, and otherwise for mistakes that reproduce the output."""
    report = comparison.report
    for attempt in outputs.attempts:
        found = outputs.agreement(attempt, lambda number: comparison.expected[number])
        if found is not None:
            report.difference, report.probes, values = found
            report.verdict = "equal"
            if _is_convention(attempt, values):
                report.verdict = "equal up to a convention"
            _describe(comparison, attempt, values)
            _check_gradients(comparison, attempt)
            _training(comparison, attempt)
            break
    else:
        _explain(comparison, outputs)
    if report.faults:
        report.verdict = "different"
    if math.isnan(report.difference):
        report.difference = 0.0


def _explain(comparison: _Comparison, outputs: _Outputs) -> None:
    """Say where the implementations differ, and by which mistake if it can be told."""
    report = comparison.report
    attempt = outputs.attempts[0]
    reasons = [outputs.get(one, 0) for one in outputs.attempts]
    if all(isinstance(reason, str) for reason in reasons):
        report.verdict = "not compared"
        report.reason = reasons[0]
        return
    report.verdict = "different"
    explained = _diagnose(comparison, outputs) if comparison.reference.steps else []
    values = "keep"
    wrong = None
    for chosen, reading, (error, by_probe, values) in explained:
        attempt = reading
        if chosen:
            report.findings.append(_finding(chosen, error))
        report.probes = {name: one for name, one in by_probe.items() if isinstance(one, str)}
    conventions = [one for one in report.findings if one.convention]
    if conventions:
        report.findings = conventions
        report.verdict = "equal up to a convention"
    elif explained and not report.findings:
        report.faults.append("Your output is that of the reference without "
                             f"{_listed(comparison.matching.missing)}, which your model lacks.")
    if explained:
        wrong = _notes(comparison, explained[0][0])
    differences = []
    for number in range(len(comparison.reference.probes)):
        style = _STYLES[0] if number in comparison.masked_probes() else None
        found = outputs.difference(attempt, number, comparison.expected[number], style)
        name = comparison.reference.probes[number].name
        if isinstance(found, str):
            report.probes[name] = found
        else:
            differences.append(found)
    report.difference = max(differences, default=math.inf)
    _describe(comparison, attempt, values)
    _locate(comparison, outputs, attempt, wrong)


def compare(
    mine: nn.Module | Callable | tuple[Callable, Any], reference: Reference | nn.Module, *,
    call: Callable | None = None, rename: dict[str, str] | None = None,
    inputs: dict[str, Tensor] | None = None,
) -> Report:
    """Compare an implementation with a reference, and name the mistake if there is one.

    Both get the same random parameters, in float64, and the same inputs; `mine` is copied and
    stays as it is.

    Parameters
    ----------
    mine : nn.Module, callable, or (callable, dict of arrays)
        A function of arrays is called as ``function(arrays, *inputs)``; numpy's and JAX's
        arrays are compared by values only.
    reference : Reference or nn.Module
        From `reference`, or a layer or model of the library.
    call : callable, optional
        ``call(mine, **inputs)`` calls an implementation of another signature.
    rename : dict of str to str, optional
        {your parameter: role}, where the report says that names do not tell; several roles in
        one parameter are written "q | k | v".
    inputs : dict of str to Tensor, optional
        One call of the reference by keyword, in place of its own probes.

    Returns
    -------
    Report
    """
    implementation = None
    report = Report()
    with _undisturbed() as printed:
        reference = _as_reference(reference, inputs)
        try:
            bad = _bad_parameter(mine)
            if bad:
                raise _NotCallable(bad)
            implementation = _Implementation(mine)
            comparison = _Comparison(implementation, reference, call, rename or {})
            report = comparison.report
            _structure(comparison)
            if comparison.values and not comparison.matching.assignments:
                raise _NotCallable(_no_match(comparison))
            outputs = _Outputs(comparison)
            _dropout(comparison, outputs)
            _conclude(comparison, outputs)
        except _NotCallable as reason:
            report.verdict = "not compared"
            report.reason = str(reason)
    if printed.getvalue():
        lines = len(printed.getvalue().splitlines())
        report.adapted.append(f"your code printed {lines} lines, which were withheld")
    return report


def _bad_parameter(mine: Any) -> str:
    """Return a sentence about the first parameter that is not finite."""
    if isinstance(mine, nn.Module):
        for name, parameter in mine.named_parameters():
            if not torch.isfinite(parameter).all():
                return f"your parameter {name} holds values that are not finite"
    return ""


def _no_match(comparison: _Comparison) -> str:
    """Say that no parameter fits."""
    ours = [f"{role} {tuple(value.shape)}" for role, value in comparison.values.items()]
    theirs = [f"{name} {tuple(value.shape)}"
              for name, value in comparison.mine.parameters.items()]
    return (f"none of your parameters ({_listed(theirs)}) fits those of the reference "
            f"({_listed(ours)})")


def reference(name: str, **config: Any) -> Reference:
    """Return a layer or model of the library with which `compare` compares.

    Parameters
    ----------
    name : str
        One of `references()`.
    **config
        Its sizes, such as ``embed_dim=64, num_heads=4``.

    Returns
    -------
    Reference
        ``reference(...).says`` specifies it in a few lines.

    Raises
    ------
    ValueError
        If there is no such name.
    TypeError
        If there is no such argument.
    """
    if name not in REFERENCES:
        raise ValueError(f"name ({name!r}) must be one of {', '.join(sorted(REFERENCES))}")
    build = REFERENCES[name]
    known = list(inspect.signature(build).parameters)
    unknown = [argument for argument in config if argument not in known]
    if unknown:
        raise TypeError(f"{unknown[0]} ({config[unknown[0]]!r}) is not an argument of the "
                        f"reference {name!r}; it takes {', '.join(known) or 'none'}")
    return build(**config)


def references() -> list[str]:
    """Return the names that `reference` knows."""
    return sorted(REFERENCES)


def _as_reference(given: Any, inputs: dict[str, Tensor] | None) -> Reference:
    """Return a Reference for what was given, with other inputs if there are some."""
    if isinstance(given, Reference):
        found = given
    elif type(given) in REFERENCES_OF:
        found = REFERENCES_OF[type(given)](given)
    elif isinstance(given, nn.Module):
        found = _of_module(given, inputs)
    else:
        raise TypeError(f"reference ({type(given).__name__}) must be a module, or come from "
                        "attnlib.reference(name, ...)")
    if inputs is not None:
        found = replace(found, probes=[Probe("your inputs", inputs)])
    return found


def _of_module(module: nn.Module, inputs: dict[str, Tensor] | None) -> Reference:
    """Return a Reference without steps for any other module."""
    if inputs is None:
        raise ValueError("inputs (None) must be given for a reference that is not of the "
                         "library, such as inputs={'x': torch.randn(2, 5, 64)}")
    implementation = _Implementation(module)
    units = _units(implementation.parameters, implementation.owners)
    stems = {unit.name: _stems_of(unit) for unit in units}
    names = [stem for some in stems.values() for stem in some]
    for name, some in stems.items():
        if any(names.count(stem) > 1 for stem in some):
            stems[name] = [f"{stem}_{name.replace('.', '_')}" for stem in some]

    def roles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for unit in units:
            for kind, name in unit.names.items():
                value = tensors[name]
                if kind == "weight" and unit.transposed:
                    value = value.T
                for stem, part in zip(stems[unit.name], value.chunk(len(stems[unit.name]))):
                    found[f"{stem}.{kind}"] = part
        return found

    def call(module: nn.Module, **some: Any) -> Tensor:
        found = module(*some.values())
        if isinstance(found, dict):
            found = list(found.values())
        return found[0] if isinstance(found, (list, tuple)) else found

    heads = [getattr(part, name) for part in module.modules()
             for name in ("num_heads", "n_head", "nhead", "num_attention_heads", "heads")
             if isinstance(getattr(part, name, None), int)]
    return Reference(
        name=type(module).__name__, module=module, call=call, steps=None,
        config=dict(num_heads=heads[0] if heads else 1), roles=roles,
        probes=[Probe("your inputs", inputs)], says="")


def _stems_of(unit: _Unit) -> list[str]:
    """Return the roles of a layer of any module, in the names of the library's references."""
    side, number = unit.group
    parts = [side] * bool(side) + [f"blocks.{number}"] * (number is not None)
    for part in ("cross", "attn", "mlp"):
        if part in unit.words:
            parts.append(part)
            break
    if "qkv" in unit.words:
        slots = ["q", "k", "v"]
    else:
        named = [slot for slot, words in _ACCEPTED.items() if words & unit.words]
        slots = named[:1] or [_pieces(unit.name)[-1]]
    return [".".join([*parts, slot]) for slot in slots]


def assert_equal(
    mine: nn.Module | Callable | tuple[Callable, Any], reference: Reference | nn.Module, *,
    conventions: bool = True, **options: Any,
) -> None:
    """Raise an AssertionError with the report unless an implementation equals the reference.

    Parameters
    ----------
    mine, reference
        As in `compare`.
    conventions : bool
        Also accept what is equal up to a convention.
    **options
        Further arguments of `compare`.

    Raises
    ------
    AssertionError
        If the implementations differ, or cannot be compared.
    """
    report = compare(mine, reference, **options)
    accepted = ["equal"] + ["equal up to a convention"] * conventions
    if report.verdict not in accepted:
        raise AssertionError(str(report))
