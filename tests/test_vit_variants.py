"""The options of today's ViT: timm's names and numbers, positions in the plane, bad input."""

import copy
from functools import partial

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import RotaryEmbeddingCat, SwiGLUPacked, apply_rot_embed_cat
from torch import nn

from attnlib.inference import optimize_for_inference
from attnlib.models import create_model, list_models
from attnlib.vit import Attention, Mlp, PatchEmbed, VisionTransformer
from attnlib.vit_variants import (
    QuickGELU,
    RotaryAttention,
    SwiGLU,
    apply_rotary_2d,
    use_rotary,
)
from helpers import build, close, images

GATED = dict(mlp_layer=SwiGLU), dict(mlp_layer=SwiGLUPacked, act_layer=nn.SiLU)
QUICK = dict(mlp_layer=partial(Mlp, act_layer=QuickGELU)), dict(act_layer="quick_gelu")
CLIP = dict(pre_norm=True)
REGISTERS = dict(reg_tokens=4, no_embed_class=True)
CASES = {  # options of both, of ours, of timm's
    "LayerScale": (dict(init_values=1e-5), {}, {}),
    "QK-norm": (dict(qk_norm=True), {}, {}),
    "registers": (REGISTERS, {}, {}),
    "registers with positions": (dict(reg_tokens=2), {}, {}),
    "no class token": (REGISTERS | dict(class_token=False, global_pool="avg"), {}, {}),
    "class token without position": (dict(no_embed_class=True, global_pool="avg"), {}, {}),
    "DINOv2": (REGISTERS | dict(init_values=1e-5, num_classes=0), {}, {}),
    "giant": (REGISTERS | dict(init_values=1e-5, mlp_ratio=2 * 2.66667), *GATED),
    "CLIP": (
        CLIP,
        QUICK[0] | dict(norm_layer=nn.LayerNorm),
        QUICK[1] | dict(norm_layer=partial(nn.LayerNorm, eps=1e-5)),
    ),
    "all": (REGISTERS | CLIP | dict(init_values=1e-5, qk_norm=True), *GATED),
}
every = pytest.mark.parametrize("case", CASES)


def twins(case, **options):
    """A small ViT and timm's with the same weights, every one of them random."""
    both, ours, theirs = CASES[case]
    torch.manual_seed(0)
    theirs = build("vit", peer=True, **both | theirs | options)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.3)
    ours = build("vit", **both | ours | options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    return ours.double().eval(), theirs.double().eval()


@every
def test_outputs_and_gradients_are_timms(case):
    ours, theirs = twins(case)
    x, grads = images(), []
    for model in (ours, theirs):
        out = model(x)
        out.square().sum().backward()
        grads.append({key: p.grad for key, p in model.named_parameters()} | {"out": out})
    assert grads[0].keys() == grads[1].keys()
    for key, wanted in grads[1].items():
        close(grads[0][key], wanted, 1e-9 * max(1, wanted.abs().max().item()))


@every
def test_other_sizes_are_timms(case):
    ours, theirs = twins(case, dynamic_img_size=True)
    rounding = 1e-6  # timm resamples in float32
    close(ours(images(2, 48)), theirs(images(2, 48)), rounding)
    for model in (ours, theirs):
        model.set_input_size((16, 40))
    assert ours.pos_embed.shape == theirs.pos_embed.shape
    close(ours(images(2, (16, 40))), theirs(images(2, (16, 40))), rounding)


@every
def test_stored_positions_are_resampled_as_timm_does(case):
    small, _ = twins(case)
    ours, theirs = twins(case, img_size=48)
    found = ours.resample_state_dict(small.state_dict())
    wanted = timm.models.vision_transformer.checkpoint_filter_fn(small.state_dict(), theirs)
    assert found["pos_embed"].shape == ours.pos_embed.shape
    close(found["pos_embed"], wanted["pos_embed"], 1e-6)  # timm resamples in float32


@every
def test_features_maps_and_a_new_head(case):
    ours, theirs = twins(case)
    x, k = images(), ours.num_prefix_tokens
    found = ours.forward_intermediates(x, [0, 2], norm=True, return_prefix_tokens=True)[1]
    wanted = theirs.forward_intermediates(x, [0, 2], norm=True, return_prefix_tokens=True)[1]
    for mine, other in zip(found, wanted, strict=True):
        for a, b in zip(mine, other, strict=True):
            close(a, b, 1e-9)
    maps = ours.attention_maps(x)
    assert [m.shape for m in maps] == 3 * [(2, 3, k + 16, k + 16)]
    close(maps[0].sum(-1), torch.ones_like(maps[0][..., 0]), 1e-12)
    ours.reset_classifier(7)
    assert ours(x).shape == (2, 7)


@every
def test_an_optimized_copy_gives_the_same(case):
    ours, _ = twins(case)
    ours = ours.float()
    fast, x = optimize_for_inference(ours), images().float()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), ours(x), rtol=1e-4, atol=1e-4)


def test_the_plain_model_has_none_of_it():
    keys = " ".join(VisionTransformer(depth=1, device="meta").state_dict())
    assert not any(part in keys for part in ("ls1", "q_norm", "reg_token", "norm_pre"))


@pytest.mark.parametrize("name", list_models("*dinov2") + list_models("*clip*"))
def test_every_name_has_timms_keys_and_shapes(name):
    with torch.device("meta"):
        theirs, ours = timm.create_model(name, num_classes=3), create_model(name, num_classes=3)
    shapes = [{key: x.shape for key, x in m.state_dict().items()} for m in (ours, theirs)]
    assert shapes[0] == shapes[1] and list(shapes[0]) == list(shapes[1])
    assert ours.patch_embed.img_size == theirs.patch_embed.img_size
    assert ours.norm.eps == theirs.norm.eps and ours.blocks[0].norm1.eps == ours.norm.eps
    assert type(ours.blocks[0].mlp.act).__name__ in (
        type(theirs.blocks[0].mlp.act).__name__, "QuickGELU"
    ) if hasattr(ours.blocks[0].mlp, "act") else "giant" in name  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch14_dinov2",
        "vit_small_patch14_reg4_dinov2",
        "vit_giant_patch14_reg4_dinov2",
        "vit_base_patch32_clip_quickgelu_224",
        "vit_base_patch32_clip_224",
    ],
)
def test_logits_are_timms(name):
    """Two blocks at a small size; widths, patches and all that is not depth are the name's."""
    torch.manual_seed(0)
    options = dict(depth=2, img_size=56 if "14" in name else 64, num_classes=5)
    theirs = timm.create_model(name, **options).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.05)
    ours = create_model(name, **options).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = images(1, options["img_size"]).float()
    with torch.no_grad():
        found, wanted = ours(x), theirs(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * max(1, wanted.abs().max()))


# --- positions in the plane -------------------------------------------------------------------


def grid(height, width):
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return rows.flatten(), columns.flatten()


@pytest.mark.parametrize("height, width, d", [(4, 4, 16), (3, 5, 8), (1, 7, 32)])
def test_rotary_is_timms(height, width, d):
    embed = RotaryEmbeddingCat(d, temperature=100.0, in_pixels=False, feat_shape=None)
    q = torch.randn(2, 3, height * width, d)
    wanted = apply_rot_embed_cat(q, embed.get_embed((height, width)))
    close(apply_rotary_2d(q, *grid(height, width), base=100.0), wanted, 1e-5)


@given(
    st.tuples(*[st.integers(-20, 20)] * 4), st.tuples(st.integers(-30, 30), st.integers(-9, 9))
)
@settings(max_examples=30, deadline=None)
def test_a_logit_depends_on_both_offsets_alone(places, shift):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 16, dtype=torch.float64)
    places = torch.tensor(places).view(4, 1)

    def logit(dy, dx):
        turned = apply_rotary_2d(q[None], places[0] + dy, places[1] + dx)
        other = apply_rotary_2d(k[None], places[2] + dy, places[3] + dx)
        return (turned * other).sum()

    close(logit(0, 0), logit(*shift), 1e-10)


def test_rotary_attention_turns_patches_alone():
    torch.manual_seed(0)
    layer = RotaryAttention(PatchEmbed((8, 16), 4), 2, 16, num_heads=2).double()
    x = torch.randn(1, 2, 2 + 8, 8, dtype=torch.float64)
    y = layer.turn(x)
    assert torch.equal(y[:, :, :2], x[:, :, :2])  # no position
    assert torch.equal(y[:, :, 2], x[:, :, 2])  # row 0, column 0
    close(y.norm(dim=-1), x.norm(dim=-1), 1e-12)
    close(y[:, :, 2:], apply_rotary_2d(x[:, :, 2:], *grid(2, 4)), 0)


def test_a_rotary_model():
    torch.manual_seed(0)
    model = build("vit", embed_dim=24, num_heads=3, qk_norm=True, reg_tokens=1)
    keys = set(model.state_dict())
    use_rotary(model)
    assert set(model.state_dict()) == keys and not model.pos_embed.requires_grad
    assert model.pos_embed.abs().max() == 0
    x = images().float()
    out = model(x)
    out.sum().backward()
    assert model.blocks[0].attn.qkv.weight.grad.abs().max() > 0
    moved = model(x.flip(-1))  # places matter
    assert (out - moved).abs().max() > 1e-6
    model.set_input_size((16, 64))  # a copy follows its own grid
    wide = copy.deepcopy(model)
    model.set_input_size(32)
    assert wide(torch.zeros(1, 3, 16, 64)).shape == model(torch.zeros(1, 3, 32, 32)).shape
    with pytest.raises(ValueError, match="dynamic_img_size"):
        use_rotary(build("vit", dynamic_img_size=True))


def test_rotary_positions_keep_what_is_frozen_and_the_mode():
    model = build("vit", attn_drop_rate=0.5).eval().requires_grad_(False)
    model.blocks[0].attn.proj.weight.requires_grad_(True)
    before = dict(model.named_parameters())
    use_rotary(model)
    assert not any(part.training for part in model.modules())
    x = images().float()
    assert torch.equal(model(x), model(x))  # no dropout of the weights
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is p for name, p in before.items())  # an optimizer may hold them
    trainable = [name for name, p in after.items() if p.requires_grad]
    assert trainable == ["blocks.0.attn.proj.weight"]
    assert all(part.training for part in use_rotary(build("vit")).modules())


# --- bad input --------------------------------------------------------------------------------


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"hidden_features \(7\)"):
        SwiGLU(4, 7)
    with pytest.raises(ValueError, match=r"must have a last axis that 4 divides"):
        apply_rotary_2d(torch.ones(1, 6), torch.zeros(1), torch.zeros(1))
    with pytest.raises(TypeError, match="no_such"):
        VisionTransformer(no_such=1)
    with pytest.raises(ValueError, match=r"global_pool \('token'\)"):
        build("vit", class_token=False, reg_tokens=4)


def test_swiglu_with_two_thirds_has_the_same_parameters():
    plain, gated = Mlp(48, 192), SwiGLU(48, 256)
    count = [sum(p.numel() for p in m.parameters() if p.ndim == 2) for m in (plain, gated)]
    assert count[0] == count[1]


def test_quick_gelu_is_near_gelu():
    x = torch.linspace(-6, 6, 1001)
    assert 0.02 < (QuickGELU()(x) - nn.functional.gelu(x)).abs().max() < 0.021


def test_normed_logits_are_bounded():
    layer = Attention(24, 3, qk_norm=True)
    x = 1e3 * torch.randn(2, 9, 24)
    q, k, _ = layer.qkv(x).chunk(3, dim=-1)
    q, k = (y.unflatten(-1, (3, 8)).transpose(1, 2) for y in (q, k))
    logits = layer.q_norm(q) @ layer.k_norm(k).mT / 8**0.5
    assert logits.abs().max() <= 8**0.5 + 1e-3 < (q @ k.mT / 8**0.5).abs().max()
