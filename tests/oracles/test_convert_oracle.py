"""Weights of other libraries, of models of every shape, under the names of ours."""

import copy
import re

import pytest
import torch
import torch.nn as nn
import torchvision
import transformers
from draws import drawn, normal, seeds, tolerance
from hypothesis import strategies as st

from attnlib import convert
from attnlib.convert import _drop_key_bias, convert_state_dict, fuse_qkv, rename_keys
from attnlib.deit import DistilledVisionTransformer
from attnlib.models import load_pretrained
from attnlib.swin import SwinTransformer
from attnlib.swinv2 import SwinTransformerV2
from attnlib.vit import VisionTransformer

words = st.text("abc", min_size=1, max_size=3)
keys = st.lists(words, min_size=1, max_size=3).map(".".join)
tables = st.lists(st.tuples(words, st.none() | words), max_size=3)


@drawn(st.lists(keys, unique=True, max_size=6), tables)
def test_names_by_a_table(names, table):
    """One line after the other, of plain words here; a key that two become is refused."""
    tensors = {name: torch.tensor(i) for i, name in enumerate(names)}
    wanted, twice = {}, False
    for name, x in tensors.items():
        new, kept = name, True
        for old, replacement in table:
            if replacement is None:
                kept = kept and old not in new
            elif kept:
                new = new.replace(old, replacement)
        if kept:
            twice = twice or new in wanted
            wanted[new] = x
    if twice:
        with pytest.raises(ValueError, match="and so does another key"):
            rename_keys(tensors, table)
    else:
        assert list(rename_keys(tensors, table).items()) == list(wanted.items())


@drawn(
    st.data(), st.lists(words, unique=True, max_size=3), st.integers(0, 3), st.integers(0, 3)
)
def test_parts_are_fused(data, layers, rows, width):
    """Queries, keys and values in any order among other tensors, also without rows."""
    tensors, wanted = {"other": torch.zeros(1)}, {"other": torch.zeros(1)}
    for layer in layers:
        for name, shape in (("weight", (width,)), ("bias", ())):
            own = {part: normal((rows, *shape), seed=ord(part)) for part in "qkv"}
            for part in data.draw(st.permutations("qkv")):
                tensors[f"{layer}.attn.{part}.{name}"] = own[part]
            wanted[f"{layer}.attn.qkv.{name}"] = torch.cat([*own.values()])
    found = fuse_qkv(tensors)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(x, wanted[name]) for name, x in found.items())
    both = convert_state_dict(tensors, "swinv2")  # the bias of the keys is left out
    assert both.keys() == _drop_key_bias(dict(wanted)).keys()
    for layer in layers:
        for one, part in (("q", 0), ("v", 2)):
            bias = wanted[f"{layer}.attn.qkv.bias"].chunk(3)[part] if rows else torch.zeros(0)
            assert torch.equal(both[f"{layer}.attn.{one}_bias"], bias)


def test_parts_that_do_not_fit_are_named():
    parts = {f"a.attn.{part}.weight": torch.zeros(2, 2) for part in "qkv"}
    whole = {"a.attn.qkv.weight": torch.zeros(6, 2)}
    with pytest.raises(ValueError, match="a.attn.qkv.weight is in the state dict, and so are"):
        fuse_qkv(whole | parts)
    wide = parts | {"a.attn.k.weight": torch.zeros(2, 3)}
    with pytest.raises(
        ValueError, match=r"parts of a.attn.qkv.weight have shapes .*'k': \(2, 3\)"
    ):
        fuse_qkv(wide)


# --- whole models -----------------------------------------------------------------------------


def drawn_weights(model):
    """The model in float64, no weight of which is 0 or 1."""
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model.double().eval()


def compare(ours, theirs, x):
    weights = {key: x.clone() for key, x in theirs.state_dict().items()}
    ours = ours.double().eval()
    assert load_pretrained(ours, weights) == []
    assert all(torch.equal(x, weights[key]) for key, x in theirs.state_dict().items())
    with torch.no_grad():
        found, wanted = ours(x), theirs(x)
    wanted = getattr(wanted, "logits", wanted)
    limit = tolerance(torch.float64, 2**14) * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit)


@drawn(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(("vit", "deit", "torchvision")),
    st.integers(1, 2),
)
def test_vit(depth, heads, grid, classes, kind, batch):
    """One block, one head, one patch, one class; by transformers and torchvision."""
    width, size = 4 * heads, 4 * grid
    options = dict(
        img_size=size,
        patch_size=4,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=2,
        num_classes=classes,
    )
    if kind == "torchvision":
        theirs = torchvision.models.VisionTransformer(
            size, 4, depth, heads, width, 2 * width, num_classes=classes
        )
    else:
        name = {"vit": "ViT", "deit": "DeiT"}[kind]
        head = {"vit": "", "deit": "WithTeacher"}[kind]
        config = getattr(transformers, f"{name}Config")(
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            intermediate_size=2 * width,
            image_size=size,
            patch_size=4,
            num_labels=classes,
            layer_norm_eps=1e-6,
        )
        theirs = getattr(transformers, f"{name}ForImageClassification{head}")(config)
    ours = DistilledVisionTransformer if kind == "deit" else VisionTransformer
    compare(ours(**options), drawn_weights(theirs), normal((batch, 3, size, size)))


@drawn(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 2),
)
def test_swin(stages, heads, depth, classes, second, batch):
    """One stage or two, of both versions; by transformers."""
    size, numbers = 16 if second else 12, [heads * 2**i for i in range(stages)]
    window = 2 if second else 3
    width = 4 * heads
    name = "Swinv2" if second else "Swin"
    config = getattr(transformers, f"{name}Config")(
        image_size=size,
        patch_size=2,
        embed_dim=width,
        depths=[depth] * stages,
        num_heads=numbers,
        window_size=window,
        num_labels=classes,
    )
    theirs = getattr(transformers, f"{name}ForImageClassification")(config)
    theirs = drawn_weights(theirs)
    for name, x in theirs.named_buffers():
        if name.endswith("relative_coords_table"):  # computed in float32, of -1, 0 and 1
            x.copy_(x.sign() * torch.tensor(9.0, dtype=x.dtype).log2() / 3)
    ours = (SwinTransformerV2 if second else SwinTransformer)(
        size,
        2,
        num_classes=classes,
        embed_dim=width,
        depths=(depth,) * stages,
        num_heads=numbers,
        window_size=window,
    )
    compare(ours, theirs, normal((batch, 3, size, size)))


@drawn(st.sampled_from(sorted(convert._TABLES)), seeds)
def test_own_names_stay(family, seed):
    """Of the small models that have timm's names, a copy: nothing is renamed or shared."""
    kinds = {
        "vit": lambda: VisionTransformer(
            img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2, num_classes=2
        ),
        "swin": lambda: SwinTransformer(
            8, 2, num_classes=2, embed_dim=8, depths=(1, 1), num_heads=(1, 2), window_size=2
        ),
        "swinv2": lambda: SwinTransformerV2(
            8, 2, num_classes=2, embed_dim=8, depths=(1, 1), num_heads=(1, 2), window_size=2
        ),
    }
    if family not in kinds:
        with pytest.raises(
            ValueError, match=re.escape(f"family ({family.upper()!r}) must be one")
        ):
            convert_state_dict({}, family.upper())
        return
    tensors = kinds[family]().state_dict()
    found = convert_state_dict(copy.copy(tensors), family)
    assert found.keys() == tensors.keys() and found is not tensors
    assert all(x is tensors[key] or torch.equal(x, tensors[key]) for key, x in found.items())


ORACLES = {
    "rename_keys": test_names_by_a_table,
    "fuse_qkv": test_parts_are_fused,
    "_drop_key_bias": test_parts_are_fused,
    "convert_state_dict": test_own_names_stay,
    "VIT": test_vit,
    "BLOCK": test_vit,
    "SWIN": test_swin,
    "SWINV2": test_swin,
    "_TABLES": test_own_names_stay,
}
NOT_HERE = {
    "MAE": "tests/test_mae.py, with weights of transformers",
    "BEIT": "tests/test_beit.py, with weights of transformers",
    "TNT": "tests/test_tnt.py, with the authors' names",
    "DETR": "tests/test_detr.py, with weights of transformers",
    "DETR_PANOPTIC": "tests/test_panoptic.py, with weights of transformers",
    "AUTOFORMER": "tests/test_autoformer.py, with the authors' names",
    "MARIAN": "tests/test_transformer.py, with weights of transformers",
    "GPT2": "tests/test_gpt.py, with weights of transformers",
    "LLAMA": "tests/test_gpt.py, with weights of transformers",
    "FUSED": "a table of arguments for `fuse_qkv`",
}


def test_every_public_name_is_here_or_said_to_be_elsewhere():
    assert not ORACLES.keys() & NOT_HERE.keys()
    assert set(convert.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
