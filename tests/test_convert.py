"""Weights of other libraries load under their own names and compute what they did there."""

import re

import pytest
import torch
import torch.nn as nn
import torchvision
import transformers
from hypothesis import given
from hypothesis import strategies as st

from attnlib.convert import convert_state_dict, fuse_qkv, rename_keys
from attnlib.models import create_model, list_models, load_pretrained
from helpers import build, close, images

TOKENS = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96)
TOKENS |= dict(image_size=32, patch_size=8, num_labels=5, layer_norm_eps=1e-6)
WINDOWS = dict(image_size=32, embed_dim=16, depths=[2, 2], num_heads=[1, 2], window_size=4)
WINDOWS |= dict(num_labels=5)
swin_v2 = torchvision.models.swin_transformer
PEERS = {  # the backbone here, the library: what makes the model there
    ("vit", "torchvision"): lambda: torchvision.models.VisionTransformer(
        32, 8, 3, 3, 24, 96, num_classes=5
    ),
    ("swin", "torchvision"): lambda: torchvision.models.SwinTransformer(
        [4, 4], 16, [2, 2], [1, 2], [4, 4], num_classes=5
    ),
    ("swinv2", "torchvision"): lambda: torchvision.models.SwinTransformer(
        *([4, 4], 16, [2, 2], [1, 2], [4, 4]),
        num_classes=5,
        block=swin_v2.SwinTransformerBlockV2,
        downsample_layer=swin_v2.PatchMergingV2,
    ),
    ("vit", "transformers"): lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**TOKENS)
    ),
    ("deit", "transformers"): lambda: transformers.DeiTForImageClassificationWithTeacher(
        transformers.DeiTConfig(**TOKENS)
    ),
    ("swin", "transformers"): lambda: transformers.SwinForImageClassification(
        transformers.SwinConfig(**WINDOWS)
    ),
    ("swinv2", "transformers"): lambda: transformers.Swinv2ForImageClassification(
        transformers.Swinv2Config(**WINDOWS)
    ),
}


def peer(name, library):
    """A small model of another library, in float64, with no weight that is 0 or 1."""
    torch.manual_seed(0)
    model = PEERS[name, library]().double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def loaded(name, state_dict, **options):
    """Our small model with these weights, all of which it must have found."""
    model = build(name, **options).double().eval()
    assert load_pretrained(model, state_dict) == []
    return model


def older_names(state_dict):
    """The names that transformers had until version 5, whichever version is installed."""
    table = (
        (r"^(vit|deit)\.layers\.", r"\1.encoder.layer."),
        (r"(^swin.*attention)\.relative_position_bias\.", r"\1.self."),
        (r"(^swin.*attention)\.([qkv])_proj", r"\1.self.\2_proj"),
        (r"(layer\.\d+\.attention)\.([qkv])_proj", r"\1.attention.\2_proj"),
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        ("o_proj", "output.dense"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
    )
    return rename_keys(state_dict, table)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# --- other libraries --------------------------------------------------------------------------


@pytest.mark.parametrize("name, library", PEERS, ids=["-".join(key) for key in PEERS])
def test_outputs_are_those_of_the_library(name, library):
    theirs = peer(name, library)
    logits = theirs(images())
    ours = loaded(name, theirs.state_dict())
    close(ours(images()), getattr(logits, "logits", logits))


@pytest.mark.parametrize("name", ["vit", "deit", "swin"])
def test_older_names_of_transformers(name):
    theirs = peer(name, "transformers")
    older = older_names(theirs.state_dict())
    wanted = r"layers?\.0\..*attention\.(self|attention)\.query\.weight"
    assert any(re.search(wanted, key) for key in older)
    close(loaded(name, older)(images()), theirs(images()).logits)


def test_the_heads_of_a_distilled_model_are_not_exchanged():
    theirs = peer("deit", "transformers")
    ours = loaded("deit", theirs.state_dict()).train()
    ours.set_distilled_training()
    for own, other in zip(ours(images()), ("cls_logits", "distillation_logits")):
        close(own, theirs(images())[other])


@pytest.mark.parametrize("prefix", ["", "vit."])
def test_a_model_without_classifier_and_with_a_pooler(prefix):
    theirs = peer("vit", "transformers").vit
    state_dict = {prefix + key: x for key, x in theirs.state_dict().items()}
    state_dict |= {f"{prefix}pooler.dense.{key}": torch.zeros(1) for key in ("weight", "bias")}
    ours = loaded("vit", state_dict, num_classes=0)
    close(ours(images()), theirs(images()).last_hidden_state[:, 0])


TORCHVISION = {  # their model: the name here
    "vit_b_16": "vit_base_patch16_224",
    "vit_h_14": "vit_huge_patch14_224",
    "swin_t": "swin_tiny_patch4_window7_224",
    "swin_b": "swin_base_patch4_window7_224",
    "swin_v2_t": "swinv2_tiny_window8_256",
    "swin_v2_b": "swinv2_base_window8_256",
}


@pytest.mark.parametrize("other", TORCHVISION)
def test_torchvisions_names_fit_the_published_sizes(other):
    with torch.device("meta"):
        theirs = torchvision.models.get_model(other)
        ours = create_model(TORCHVISION[other], num_classes=1000)
    found = convert_state_dict(theirs.state_dict(), ours.family)
    shapes = [{key: x.shape for key, x in d.items()} for d in (found, ours.state_dict())]
    assert shapes[0] == shapes[1]


# --- the authors, and timm --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["swin", "swinv2"])
def test_the_authors_names_of_swin(name):
    wanted = build(name).state_dict()
    table = (r"^layers\.1\.downsample", "layers.0.downsample"), (r"^head\.fc", "head")
    theirs = rename_keys(wanted, table)
    tables = "attn_mask", "attn.relative_coords_table", "attn.relative_position_index"
    theirs |= {f"layers.0.blocks.1.{key}": torch.zeros(1) for key in tables}
    assert same(convert_state_dict(theirs, name), wanted)


def test_the_authors_names_of_tnt():
    table = (
        (r"norm([12])_proj", r"proj_norm\1"),
        ("pixel_embed", "patch_embed"),
        ("patch_pos", "outer_pos"),
        ("pixel_pos", "inner_pos"),
        ("norm_mlp_in", "inner_norm2"),
        ("norm_in", "inner_norm1"),
        ("(attn|mlp)_in", r"inner_\1"),
        ("norm_out", "outer_norm1"),
        ("attn_out", "outer_attn"),
        ("norm_mlp", "outer_norm2"),
        (r"\.mlp\.", ".outer_mlp."),
    )
    model = build("tnt")
    theirs = rename_keys(model.state_dict(), table) | {"outer_tokens": torch.zeros(1, 16, 24)}
    assert {"inner_pos", "blocks.0.outer_attn.qk.weight", "proj_norm2.bias"} <= theirs.keys()
    assert same(convert_state_dict(theirs, "tnt"), model.state_dict())
    theirs["inner_pos"] = theirs["inner_pos"].flatten(2).mT  # a list of words, not a map
    close(loaded("tnt", theirs)(images()), model.double().eval()(images()))


@pytest.mark.parametrize("name", list_models())
def test_names_of_timm_stay_as_they_are(name):
    with torch.device("meta"):
        own = (model := create_model(name)).state_dict()
    converted = convert_state_dict(own, model.family)
    assert list(converted) == list(own) and all(converted[key] is x for key, x in own.items())


# --- the two tools ----------------------------------------------------------------------------


@given(size=st.integers(1, 6), order=st.permutations("qkv"), bias=st.booleans())
def test_three_matrices_become_one_in_any_order(size, order, bias):
    rows = dict(zip("qkv", torch.randn(3 * size, size).chunk(3)))
    found = {f"a.attn.{one}.weight": rows[one] for one in order} | {"x": torch.ones(1)}
    found |= {f"a.attn.{one}.bias": rows[one][0] for one in order if bias}
    before = dict(found)
    fused = fuse_qkv(found)
    assert torch.equal(fused["a.attn.qkv.weight"], torch.cat([rows[one] for one in "qkv"]))
    assert len(fused) == 2 + bias and fused["x"] is found["x"]
    assert same(before, found)


def test_fused_names_are_those_asked_for():
    found = {f"b.{one}_proj.bias": torch.full((1,), i) for i, one in enumerate("qkv")}
    fused = fuse_qkv(found, r"(.*)\.([qkv])_proj\.(weight|bias)", "{}.in_proj_{}")
    assert list(fused) == ["b.in_proj_bias"] and fused["b.in_proj_bias"].tolist() == [0, 1, 2]


def test_lines_of_a_table_apply_one_after_the_other():
    found = dict.fromkeys(("a.x", "b.x", "c.x"), torch.ones(1))
    table = ("^a", "b.a"), ("^b", "d"), ("^c", None), ("x$", lambda m: m[0].upper())
    assert list(rename_keys({"a.x": torch.ones(1)}, table)) == ["d.a.X"]
    assert list(rename_keys(found, table)) == ["d.a.X", "d.X"]
    assert list(rename_keys(found, [])) == list(found)


@pytest.mark.parametrize("missing", "qkv")
@pytest.mark.parametrize("name", ["vit", "swin"])
def test_a_part_of_the_attention_is_missing(name, missing):
    state_dict = peer(name, "transformers").state_dict()
    (key,) = (
        key
        for key in state_dict
        if re.search(rf"(?<!\d\.)layers\.1\.(blocks\.1\.)?attention\.{missing}_proj\.bias", key)
    )
    del state_dict[key]
    model = build(name).double()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    rest = ", ".join(sorted(set("qkv") - {missing}))
    with pytest.raises(
        ValueError, match=rf"attn\.qkv\.bias needs q, k and v; the state dict has only {rest}$"
    ):
        load_pretrained(model, state_dict)
    assert same(before, model.state_dict())


def test_two_keys_do_not_become_one():
    with pytest.raises(ValueError, match="b.x becomes c.x, and so does another key"):
        rename_keys({"a.x": torch.ones(1), "b.x": torch.ones(1)}, [("^[ab]", "c")])


def test_a_family_without_a_table():
    with pytest.raises(ValueError, match=r"family \('resnet'\)"):
        convert_state_dict({}, "resnet")
