"""Calls of image models that once went wrong without a word, or with an unclear error."""

import json

import numpy as np
import pytest
import torch
import torch.nn as nn
from safetensors.torch import save_file
from signatures import unchecked

from attnlib.backbone import check_counts, check_naturals, check_sizes, is_plain
from attnlib.finetune import gradient_map, mask_patches, occlusion_map
from attnlib.models import (
    class_names,
    create_model,
    load_pretrained,
    pretrained_cfg,
    read_weights,
)
from attnlib.tnt import TNT
from attnlib.vit import PatchEmbed, VisionTransformer
from attnlib.vit_variants import use_rotary

SMALL = dict(img_size=16, patch_size=4, num_classes=3, embed_dim=16, depth=2, num_heads=2)


def small_vit(**options):
    torch.manual_seed(0)
    return VisionTransformer(**SMALL | options).eval()


# --- hooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
def test_a_layer_with_a_backward_hook_is_not_plain(kind):
    layer = nn.Linear(2, 2)
    handle = getattr(layer, f"register_{kind}")(lambda *gradients: None)
    assert not is_plain(layer, nn.Linear)
    handle.remove()
    assert is_plain(layer, nn.Linear)


@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_no_layer_is_plain_while_all_have_a_hook(kind):
    layer = nn.Linear(2, 2)
    register = getattr(nn.modules.module, f"register_module_{kind}")
    handle = register(lambda *given: None)
    try:
        assert not is_plain(layer, nn.Linear)
    finally:
        handle.remove()
    assert is_plain(layer, nn.Linear)


# --- loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_learned_positions_do_not_come_back_on_top_of_rotary_ones(assign):
    stored = small_vit().state_dict()
    learned = stored["pos_embed"].clone()
    model = use_rotary(small_vit())
    model.load_state_dict(stored, assign=assign)
    assert not model.pos_embed.any() and not model.pos_embed.requires_grad
    assert torch.equal(stored["pos_embed"], learned) and learned.any()
    torch.testing.assert_close(model.head.weight, stored["head.weight"])

    model = use_rotary(small_vit(img_size=32))
    load_pretrained(model, stored)
    assert not model.pos_embed.any()

    wrapped = nn.Sequential(use_rotary(small_vit()))
    wrapped.load_state_dict({f"0.{key}": x for key, x in stored.items()})
    assert not wrapped[0].pos_embed.any()


def test_a_checkpoint_without_a_model_is_refused(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "x.json").write_text(json.dumps({"tensors": "x.safetensors"}))
    with pytest.raises(ValueError, match=r"x\.json holds no weights: none of the tensors"):
        read_weights(tmp_path / "x.json")


def test_the_largest_vit_is_published_without_classes():
    name = "vit_huge_patch14_224"
    assert pretrained_cfg(name)["num_classes"] == 0
    assert create_model(name, device="meta").num_classes == 0
    assert create_model(name, device="meta", num_classes=5).head.out_features == 5
    with pytest.raises(ValueError, match="1000 classes; it has 0"):
        class_names(name)


@pytest.mark.parametrize(
    "name, given",
    [
        ("detr_resnet50", dict(img_size=64)),
        ("detr_resnet50_panoptic", dict(img_size=64)),
        ("mae_photographs", dict(num_classes=5)),
    ],
)
def test_an_argument_that_a_model_does_not_take_is_named(name, given):
    with pytest.raises(ValueError, match=f"{next(iter(given))} cannot be given for '{name}'"):
        create_model(name, **given)


@pytest.mark.parametrize("explain", [gradient_map, occlusion_map])
@pytest.mark.parametrize("size, patch", [((16, 16), 5), ((16, 18), 4), ((2, 2), 4)])
def test_maps_of_patches_that_do_not_divide_the_image_are_refused(explain, size, patch):
    model = small_vit(dynamic_img_size=True)
    with pytest.raises(ValueError, match="must divide the image's size"):
        explain(model, torch.randn(2, 3, *size), patch)
    with pytest.raises(ValueError, match="must divide the image's size"):
        mask_patches(torch.randn(2, 3, *size), torch.zeros(2, 1, dtype=torch.long), patch)


# --- arguments --------------------------------------------------------------------------------


def test_integers_of_numpy_are_integers():
    number = np.int64(4)
    with unchecked():
        check_counts(embed_dim=number)
        check_naturals(num_classes=np.int32(0))
        check_sizes(img_size=number, patch_size=(number, np.uint8(2)))
        options = {key: np.int64(value) for key, value in SMALL.items()}
        torch.manual_seed(0)
        model = VisionTransformer(**options).eval()
        x = torch.randn(2, 3, 16, 16)
        assert torch.equal(model(x), small_vit()(x))
        maps = model.forward_intermediates(x, indices=np.int64(1), intermediates_only=True)
        assert len(maps) == 1
        words = dict(inner_dim=8, num_heads_inner=2, first_stride=np.int64(2))
        TNT(16, 4, embed_dim=16, depth=1, num_heads_outer=2, **words)
        for wrong in (True, np.bool_(True), np.float64(4.0), 4.0):
            with pytest.raises(ValueError, match="embed_dim"):
                check_counts(embed_dim=wrong)


def test_the_arguments_of_the_models_have_one_order():
    torch.manual_seed(0)
    given = 16, 4, 1, 5, "avg", 16, 2, 4, 2.0, True
    vit = VisionTransformer(*given)
    tnt = TNT(*given, inner_dim=8, num_heads_inner=2, first_stride=2)
    for model in (vit, tnt):
        assert (model.num_classes, model.global_pool, model.embed_dim) == (5, "avg", 16)
        assert len(model.blocks) == 2 and model.blocks[0].mlp.fc1.out_features == 32
    assert vit.blocks[0].attn.num_heads == tnt.blocks[0].attn_out.num_heads == 4
    assert tnt.blocks[0].attn_out.qk.bias is not None


def test_a_patch_projection_without_bias():
    embed = PatchEmbed(16, 4, 3, 8, bias=False)
    assert embed.proj.bias is None
    assert not embed(torch.zeros(1, 3, 16, 16)).any()
    assert small_vit(pre_norm=True).patch_embed.proj.bias is None


@pytest.mark.parametrize("dynamic", [False, True])
def test_prefix_tokens_without_positions(dynamic):
    options = dict(reg_tokens=2, no_embed_class=True, dynamic_img_size=dynamic)
    model = small_vit(**options)
    x = torch.randn(2, 3, 16, 16)
    tokens = model.embed(x)
    assert torch.equal(tokens[:, :1], model.cls_token.expand(2, -1, -1))
    assert torch.equal(tokens[:, 1:3], model.reg_token.expand(2, -1, -1))
    patches = model.patch_embed(x).flatten(1, 2) + model.pos_embed
    assert torch.equal(tokens[:, 3:], patches)
