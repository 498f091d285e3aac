"""Swin Transformer V2 against timm, torchvision and Hugging Face where they are right, and a brute-force oracle."""
import copy
import itertools
import math
import pickle

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from hypothesis import given, settings, strategies as st
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmSwinV2, WindowAttention as TimmAttention

from attnlib.models import create_model, list_models, load_pretrained
from attnlib.swin import may_meet
from attnlib.swinv2 import (
    PatchMergingV2, SwinBlockV2, SwinTransformerV2, WindowAttentionV2, log_coordinates, normalize,
    train_processes, train_small
)
from attnlib.train import peak_memory

torch.set_num_threads(1)
SMALL = dict(embed_dim=16, depths=(2, 2), num_heads=(1, 2), num_classes=7, drop_path_rate=0.0)
COUNTS = {
    "swinv2_tiny_window8_256": 28_347_154, "swinv2_tiny_window16_256": 28_347_154,
    "swinv2_small_window8_256": 49_728_418, "swinv2_small_window16_256": 49_728_418,
    "swinv2_base_window8_256": 87_918_816, "swinv2_base_window16_256": 87_918_816,
    "swinv2_base_window12_192": 87_918_816, "swinv2_base_window12to16_192to256": 87_918_816,
    "swinv2_base_window12to24_192to384": 87_918_816, "swinv2_large_window12_192": 196_739_932,
    "swinv2_large_window12to16_192to256": 196_739_932, "swinv2_large_window12to24_192to384": 196_739_932,
}


def randomize(model, seed=0):
    """Values that hide no error: biases that are not zero, norms that are not one, scales about their bound."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim == 1 or "mlp.0" in name and p.shape[1] == 2 or "logit_scale" in name:
            value = 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            value = 4 + 4 * value if "logit_scale" in name else value
            p.data.copy_(value + (p.ndim == 1 and name.endswith("weight")))
    return model.eval()


def pair(img_size=128, dtype=torch.float64, **options):
    """timm's model and ours with the same weights."""
    options = SMALL | dict(window_size=8) | options
    theirs = randomize(TimmSwinV2(img_size=img_size, **options).to(dtype))
    ours = SwinTransformerV2(img_size=img_size, **options).to(dtype).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


@pytest.mark.parametrize("name", COUNTS)
def test_names_keys_and_counts_are_timms(name):
    with torch.device("meta"):
        theirs, ours = timm.create_model(name, num_classes=1000), create_model(name)
    assert {k: v.shape for k, v in theirs.state_dict().items()} == {k: v.shape for k, v in ours.state_dict().items()}
    assert sum(p.numel() for p in ours.parameters()) == COUNTS[name]
    assert sorted(theirs.no_weight_decay()) == sorted(ours.no_weight_decay())
    for a, b in zip(theirs.layers, ours.layers, strict=True):
        assert [x.attn.window_size for x in a.blocks] == [x.attn.window_size for x in b.blocks]
        assert [x.attn.pretrained_window_size for x in a.blocks] == [x.attn.pretrained_window_size for x in b.blocks]
    assert name in list_models("swinv2_*")


def test_tiny_equals_timm():
    theirs = randomize(timm.create_model("swinv2_tiny_window8_256", drop_path_rate=0.0))
    ours = create_model("swinv2_tiny_window8_256", drop_path_rate=0.0).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(1, 3, 256, 256, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
        scale = ours(x).abs().max()
        assert (copy.deepcopy(ours).bfloat16()(x.bfloat16()).float() - ours(x)).abs().max() < 0.1 * scale
        with torch.autocast("cpu", torch.bfloat16):
            assert (ours(x).float() - theirs(x).float()).abs().max() < 0.1 * scale


@pytest.mark.parametrize("options", [dict(), dict(pretrained_window_sizes=(6, 3)), dict(qkv_bias=False)])
def test_float64_features_gradients_and_intermediates_equal_timm(options):
    theirs, ours = pair(**options)
    x = torch.randn(2, 3, 128, 128, dtype=torch.float64)
    torch.testing.assert_close(ours.forward_features(x), theirs.forward_features(x), rtol=0, atol=1e-10)
    for norm in (False, True):
        (a, maps), (b, others) = (m.forward_intermediates(x, norm=norm) for m in (ours, theirs))
        for u, v in zip([a, *maps], [b, *others], strict=True):
            torch.testing.assert_close(u, v, rtol=0, atol=1e-10)
    found = [dict(m.named_parameters()) for m in (ours, theirs)]
    g, h = (dict(zip(p, torch.autograd.grad(m(x).square().sum(), [*p.values()])))
            for p, m in zip(found, (ours, theirs)))
    for key in h:
        torch.testing.assert_close(g[key], h[key], rtol=1e-8, atol=1e-10, msg=key)
    pre = ours.forward_head(ours.forward_features(x), pre_logits=True)
    torch.testing.assert_close(pre, theirs.forward_head(theirs.forward_features(x), pre_logits=True))


@pytest.mark.parametrize("img_size", [24, (64, 128), 4])
def test_small_and_rectangular_models_equal_timm(img_size):
    theirs, ours = pair(img_size)
    x = torch.randn(1, 3, *theirs.patch_embed.img_size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [(128, 128), (100, 60), (36, 20), (28, 144)])
def test_torchvision(size):
    kinds = dict(block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
                 downsample_layer=torchvision.models.swin_transformer.PatchMergingV2)
    theirs = torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [1, 2], [8, 8], num_classes=7, **kinds)
    randomize(theirs.double(), 1)
    ours = SwinTransformerV2(small_maps="pad", window_size=8, **SMALL).double().eval()
    assert load_pretrained(ours, theirs.state_dict()) == []
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-10)


def test_torchvisions_names_fit_the_published_sizes():
    for name, make, count in (("tiny", "swin_v2_t", 28_351_570), ("small", "swin_v2_s", 49_737_442),
                              ("base", "swin_v2_b", 87_930_848)):
        with torch.device("meta"):
            theirs, ours = getattr(torchvision.models, make)(), create_model(f"swinv2_{name}_window8_256")
        found = ours.convert_state_dict(theirs.state_dict())
        assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in ours.state_dict().items()}
        assert sum(p.numel() for p in theirs.parameters()) == count  # with biases of the keys that are always zero
        keys = sum(b.attn.q_bias.numel() for b in ours.blocks)
        assert count - keys == sum(p.numel() for p in ours.parameters())


@pytest.mark.parametrize("size", [(128, 128), (100, 72), (84, 140)])
def test_hugging_face(size):
    transformers = pytest.importorskip("transformers")
    config = transformers.Swinv2Config(image_size=128, embed_dim=16, depths=[2, 2], num_heads=[1, 2], window_size=8,
                                       num_labels=7, pretrained_window_sizes=[6, 3])
    theirs = randomize(transformers.Swinv2ForImageClassification(config).double())
    ours = SwinTransformerV2(128, window_size=8, pretrained_window_sizes=(6, 3), small_maps="pad", **SMALL)
    ours = ours.double().eval()
    assert load_pretrained(ours, theirs.state_dict()) == []
    assert [b.attn.window_size for b in ours.blocks] == [(8, 8)] * 4
    x = torch.randn(1, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x).logits, rtol=0, atol=1e-10)
        other = torch.randn(1, 3, 60, 140, dtype=torch.float64)  # 8 rows in stage 2: it cuts the only window in two
        assert (ours(other) - theirs(other).logits).abs().max() > 1e-7
        torch.testing.assert_close(ours(x), theirs(x).logits, rtol=0, atol=1e-10)  # and forgets it again


def test_names_of_the_authors():
    ours = SwinTransformerV2(**SMALL)
    state, authors = ours.state_dict(), {}
    for key, x in state.items():
        authors[key.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc", "head")] = x
    for name in ("attn_mask", "attn.relative_coords_table", "attn.relative_position_index"):
        authors[f"layers.0.blocks.1.{name}"] = torch.zeros(1)
    for other in (authors, state):
        found = ours.convert_state_dict(other)
        assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


# --- the definition ---------------------------------------------------------------------------------------------------


def oracle(layer, x):
    """Cosine attention among all tokens of the padded map; a judge says who meets, biases are computed pair by pair."""
    plan, h = layer.plan(x.shape[1:3]), layer.num_heads
    tokens, meet = may_meet(plan)
    place = torch.tensor(tokens).double()
    trained = [p or w for p, w in zip(layer.pretrained_window_size, layer.window_size)]
    offset = (place[:, None] - place) / torch.tensor([max(t - 1, 1) for t in trained])  # (all, all, 2)
    offset = offset.sign() * (1 + 8 * offset.abs()).log() / math.log(8)
    bias = 16 * torch.sigmoid(layer.cpb_mlp(offset)).permute(2, 0, 1)  # (h, all, all)
    x = F.pad(x, (0, 0, 0, plan.padded[1] - x.shape[2], 0, plan.padded[0] - x.shape[1])).flatten(1, 2)
    q, k, v = (x @ w.T + b for w, b in zip(layer.qkv.weight.chunk(3), (layer.q_bias, 0, layer.v_bias)))
    q, k, v = (y.unflatten(-1, (h, -1)).transpose(1, 2) for y in (q, k, v))
    cosine = F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    logits = cosine * layer.logit_scale.exp().clamp(max=100) + bias
    out = logits.masked_fill(~meet, -torch.inf).softmax(-1) @ v
    out = out.transpose(1, 2).flatten(2).unflatten(1, plan.padded)
    return layer.proj(out[:, : plan.size[0], : plan.size[1]])


def test_oracle_on_a_grid():
    torch.manual_seed(0)
    count = 0
    for size, window in itertools.product(((1, 1), (2, 5), (3, 3), (4, 4), (5, 3), (6, 6), (7, 4)),
                                          ((1, 1), (2, 2), (3, 3), (2, 3), (4, 4), (7, 7))):
        for shift in {(0, 0), (window[0] // 2, window[1] // 2), (window[0] - 1, window[1] - 1), (0, window[1] - 1)}:
            for small_maps in ("shrink", "pad"):
                layer = WindowAttentionV2(4, 2, window, shift, small_maps=small_maps, dtype=torch.float64)
                layer.set_pretrained_window((count % 3, count % 3))
                for p in layer.parameters():
                    nn.init.normal_(p)
                x = torch.randn(2, *size, 4, dtype=torch.float64)
                with torch.no_grad():
                    wanted = oracle(layer, x)  # its coordinates are float64, the layer's float32
                    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-4)
                    layer.windows_at_once = 1 + count % 2
                    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-4)
                count += 1
    assert count >= 200


def test_the_kept_bias_follows_the_network_and_the_windows():
    layer, x = randomize(WindowAttentionV2(8, 2, 4, 2)), torch.randn(1, 8, 8, 8)
    with torch.no_grad():
        before = layer(x)
        assert torch.equal(layer(x), before)
        layer.cpb_mlp[2].weight.normal_(std=2.0)
        after = layer(x)
        torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), after)
        layer.set_pretrained_window(8)
        other = layer(x)
        torch.testing.assert_close(layer.double()(x.double()).float(), other, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, after) and not torch.allclose(after, other)
    layer.float().set_pretrained_window(0)
    torch.testing.assert_close(layer(x), after)


# --- the properties of the chapter ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(-3, 3), st.floats(-8, 12))
def test_logits_are_bounded_and_free_of_the_amplitude(seed, magnitude, scale):
    torch.manual_seed(seed)
    layer = WindowAttentionV2(12, 3, 4, dtype=torch.float64)
    nn.init.constant_(layer.logit_scale, scale)
    x = 10**magnitude * torch.randn(1, 4, 4, 12, dtype=torch.float64)
    with torch.no_grad():
        q, k, v, bias = layer.heads(x, layer.plan((4, 4)))
        logits = q @ k.mT
        assert logits.abs().max() <= min(math.exp(scale), 100) * (1 + 1e-12)
        assert bias.min() > 0 and bias.max() < 16
        torch.testing.assert_close(layer.attention_maps(x), layer.attention_maps(7 * x), rtol=0, atol=1e-9)
        assert torch.allclose(torch.linalg.vector_norm(k, dim=-1), torch.ones(()).double())


def test_normalize_in_every_precision():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=dtype)
        torch.testing.assert_close(normalize(x, 10.0), torch.tensor([[6.0, 8.0], [0.0, 0.0]], dtype=dtype))
    with torch.no_grad():
        half, x = randomize(SwinTransformerV2(64, window_size=5, **SMALL)).half(), torch.randn(1, 3, 64, 64)
        assert torch.isfinite(half(x.half())).all()


def test_coordinates_and_extrapolation():
    far = log_coordinates((16, 16), (8, 8)).max().item(), log_coordinates((8, 8)).max().item()
    assert far[1] == pytest.approx(math.log(9) / math.log(8))
    assert far[0] / far[1] == pytest.approx(math.log(1 + 120 / 7) / math.log(9))
    for window, trained in (((8, 8), (0, 0)), ((5, 3), (0, 0)), ((16, 12), (8, 4)), ((1, 1), (0, 0))):
        theirs = TimmAttention(8, window, 2, pretrained_window_size=trained).relative_coords_table
        torch.testing.assert_close(log_coordinates(window, trained), theirs.flatten(0, 2))
    assert torch.equal(log_coordinates((1, 1)), torch.zeros(1, 2))


def test_a_block_starts_as_the_identity_and_its_branches_are_bounded():
    torch.manual_seed(0)
    block, x = SwinBlockV2(8, 2, 4, 2), torch.randn(2, 6, 6, 8)
    assert torch.equal(block(x), x)
    for p in block.parameters():
        nn.init.normal_(p, std=100.0)
    nn.init.constant_(block.norm1.weight, 0.5), nn.init.zeros_(block.norm1.bias)
    branch = block.norm1(block.attn(x))
    assert torch.linalg.vector_norm(branch, dim=-1).max() <= 0.5 * 8**0.5 + 1e-5
    merging = PatchMergingV2(8)
    assert merging(x).shape == (2, 3, 3, 16) and torch.allclose(merging(1000 * x), merging(x), atol=1e-3)


# --- sizes, windows, tools --------------------------------------------------------------------------------------------


def test_a_larger_window_keeps_the_bias_of_the_offsets_that_were_trained():
    layer = randomize(WindowAttentionV2(8, 2, 4, dtype=torch.float64))
    with torch.no_grad():
        before = layer.bias_table().unflatten(0, (7, 7))
        layer.set_window_size((6, 5))
        after = layer.bias_table().unflatten(0, (11, 9))
        torch.testing.assert_close(after[2:9, 1:8], before)
        layer.set_window_size(9)
        torch.testing.assert_close(layer.bias_table().unflatten(0, (17, 17))[5:12, 5:12], before)
        layer.set_window_size(4)
        torch.testing.assert_close(layer.bias_table().unflatten(0, (7, 7)), before)
    assert layer.pretrained_window_size == (4, 4)


@pytest.mark.parametrize("change", [
    dict(img_size=256), dict(img_size=(96, 160)), dict(window_size=4), dict(img_size=80, window_size=(4, 5)),
])
def test_set_input_size_equals_timms_model_with_pretrained_windows(change):
    _, ours = pair(64, window_size=8)
    ours.set_input_size(**change)
    windows = [stage.blocks[0].attn.window_size for stage in ours.layers]
    theirs = TimmSwinV2(change.get("img_size", 64), window_size=windows, pretrained_window_sizes=(8, 8),
                        **SMALL).double().eval()
    theirs.load_state_dict(ours.state_dict())
    for a, b in zip(ours.blocks, [b for stage in theirs.layers for b in stage.blocks]):
        assert a.attn.window_size == b.window_size
    x = torch.randn(1, 3, *theirs.patch_embed.img_size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [(40, 40), (66, 35)])
def test_saving_memory_changes_no_number(size):
    model = randomize(SwinTransformerV2(window_size=4, **SMALL | dict(drop_path_rate=0.2))).train()
    x = torch.randn(2, 3, *size)

    def gradients():
        torch.manual_seed(0)
        return torch.autograd.grad(model(x).square().sum(), [*model.parameters()])

    plain = gradients()
    model.set_grad_checkpointing()
    again = gradients()
    model.set_grad_checkpointing(False)
    model.set_sequential_attention(2)
    sequential = gradients()
    for a, b, c in zip(plain, again, sequential):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-6)


def test_memory_is_saved():
    def call(model, x):
        return lambda: model(x).sum().backward()

    model = randomize(SwinTransformerV2(128, window_size=8, **SMALL | dict(depths=(4,), num_heads=(4,))))
    x = torch.randn(2, 3, 128, 128)
    call(model, x)()
    plain = peak_memory(call(model, x))
    model.set_sequential_attention(1)
    sequential = peak_memory(call(model, x))
    model.set_sequential_attention(None)
    model.set_grad_checkpointing()
    recomputed = peak_memory(call(model, x))
    assert sequential < 0.8 * plain and recomputed < 0.6 * plain


def test_two_processes_share_what_they_are_told_to():
    (one,) = train_processes(1, False, 2)
    total = 4 * sum(x.numel() for x in one["parameters"].values())
    assert (one["state"], one["weights"]) == (2 * total, total)
    for shard, weights in ((True, 2 * total), ("all", total)):  # "all": together they have one copy
        shared = train_processes(2, shard, 2)
        assert sum(s["state"] for s in shared) == 2 * total and max(s["state"] for s in shared) < 1.2 * total
        assert sum(s["weights"] for s in shared) == weights
        for key, x in one["parameters"].items():
            for other in shared:
                # a tenth of a step of AdamW, which divides a gradient near zero by its own rounding
                torch.testing.assert_close(other["parameters"][key], x, rtol=1e-4, atol=1e-4)
            assert torch.equal(shared[0]["parameters"][key], shared[1]["parameters"][key])


def test_training_helpers():
    model = randomize(SwinTransformerV2(**SMALL))
    x = torch.randn(2, 3, 40, 40)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), model(x))
    model.reset_classifier(0, "")
    assert model(x).shape == (2, 5, 5, 32)
    maps = model.forward_intermediates(x, [0, -1], intermediates_only=True, output_fmt="NHWC")
    assert [tuple(y.shape) for y in maps] == [(2, 10, 10, 16), (2, 5, 5, 32)]
    _, history = train_small("digits", steps=2)
    assert 0 <= float(history[-1]["accuracy"]) <= 1


@pytest.mark.parametrize("call, message", [
    (lambda: WindowAttentionV2(8, 3), r"dim \(8\) must be divisible by num_heads \(3\)"),
    (lambda: WindowAttentionV2(8, 2, 0), r"window_size \(0, 0\) must be at least 1 token high and wide"),
    (lambda: SwinBlockV2(8, 2, 4, 4), r"shift_size \(4, 4\) must be at least 0 and less than window_size \(4, 4\)"),
    (lambda: SwinTransformerV2(img_size=3), r"img_size \(3, 3\) must be at least as high and wide as a patch"),
    (lambda: SwinTransformerV2(pretrained_window_sizes=(8, 8), **SMALL | dict(depths=(1,), num_heads=(1,))),
     r"pretrained_window_sizes \(8, 8\) must be one for each of 1 stages"),
    (lambda: SwinTransformerV2(pretrained_window_sizes=-1, **SMALL), r"pretrained_window_size \(-1, -1\) must be at"),
    (lambda: SwinTransformerV2(pretrained_window_sizes=((8, 0), 4), **SMALL), r"pretrained_window_size \(8, 0\) must"),
    (lambda: SwinTransformerV2(pretrained_window_sizes=((8, 8, 8), 4), **SMALL), r"pretrained_window_size \(8, 8, 8\)"),
    (lambda: SwinTransformerV2(**SMALL).set_sequential_attention(0), r"windows_at_once \(0\) must be at least 1"),
    (lambda: SwinTransformerV2(**SMALL)(torch.ones(1, 3, 3, 9)), r"x of size \(3, 9\) must be at least"),
    (lambda: SwinTransformerV2(**SMALL).set_input_size(window_size=0), r"window_size \(0, 0\) must be"),
    (lambda: load_pretrained(SwinTransformerV2(**SMALL), SwinTransformerV2(**SMALL | dict(embed_dim=8)).state_dict()),
     r"of another shape: patch_embed.proj.weight"),
    (lambda: train_small("letters"), r"name \('letters'\) must be"),
    (lambda: train_processes(2, "weights"), r"shard \('weights'\) must be False, True or 'all'"),
])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
