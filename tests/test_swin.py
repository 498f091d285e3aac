"""The Swin Transformer against timm, torchvision and Hugging Face where they are right, and a brute-force oracle."""
import copy
import itertools
import pickle

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from timm.models.swin_transformer import SwinTransformer as TimmSwin, get_relative_position_index

from attnlib.attention import attention
from attnlib.models import create_model, list_models, load_pretrained
from attnlib.swin import (
    PatchMerging, Plan, SwinBlock, SwinTransformer, WindowAttention, may_meet, plan_windows, relative_position_index,
    resize_bias_table, window_mask, window_partition, window_reverse
)

torch.set_num_threads(1)
SMALL = dict(embed_dim=16, depths=(2, 2), num_heads=(1, 2), num_classes=7, drop_path_rate=0.0)
COUNTS = {
    "swin_tiny_patch4_window7_224": 28_288_354, "swin_small_patch4_window7_224": 49_606_258,
    "swin_base_patch4_window7_224": 87_768_224, "swin_large_patch4_window7_224": 196_532_476,
    "swin_base_patch4_window12_384": 87_903_584, "swin_large_patch4_window12_384": 196_735_516,
}


def randomize(model, seed=0):
    """Values that hide no error: biases and tables that are not zero, norms that are not one."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim == 1 or "bias_table" in name:
            value = 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.data.copy_(value + (p.ndim == 1 and name.endswith("weight")))
    return model.eval()


def pair(img_size=112, dtype=torch.float64, **options):
    """timm's model and ours with the same weights."""
    options = SMALL | options
    theirs = randomize(TimmSwin(img_size=img_size, **options).to(dtype))
    ours = SwinTransformer(img_size=img_size, **options).to(dtype).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


@pytest.mark.parametrize("name", COUNTS)
def test_names_keys_and_counts_are_timms(name):
    with torch.device("meta"):
        theirs, ours = timm.create_model(name), create_model(name)
    assert {k: v.shape for k, v in theirs.state_dict().items()} == {k: v.shape for k, v in ours.state_dict().items()}
    assert sum(p.numel() for p in ours.parameters()) == COUNTS[name]
    assert sorted(theirs.no_weight_decay()) == sorted(ours.no_weight_decay())
    assert name in list_models("swin_*")


def test_tiny_equals_timm():
    theirs = randomize(timm.create_model("swin_tiny_patch4_window7_224", drop_path_rate=0.0))
    ours = create_model("swin_tiny_patch4_window7_224", drop_path_rate=0.0).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
        half = copy.deepcopy(ours).bfloat16()(x.bfloat16()).float()
        assert (half - ours(x)).abs().max() < 0.05 * ours(x).abs().max()


def test_float64_features_gradients_and_intermediates_equal_timm():
    theirs, ours = pair()
    x = torch.randn(2, 3, 112, 112, dtype=torch.float64)
    torch.testing.assert_close(ours.forward_features(x), theirs.forward_features(x), rtol=0, atol=1e-10)
    for norm in (False, True):
        (a, maps), (b, others) = (m.forward_intermediates(x, norm=norm) for m in (ours, theirs))
        for u, v in zip([a, *maps], [b, *others], strict=True):
            torch.testing.assert_close(u, v, rtol=0, atol=1e-10)
    g, h = (torch.autograd.grad(m(x).square().sum(), [*m.parameters()]) for m in (ours, theirs))
    for u, v in zip(g, h, strict=True):
        torch.testing.assert_close(u, v, rtol=1e-9, atol=1e-10)
    pre = ours.forward_head(ours.forward_features(x), pre_logits=True)
    torch.testing.assert_close(pre, theirs.forward_head(theirs.forward_features(x), pre_logits=True))


@pytest.mark.parametrize("img_size", [24, (56, 112)])
def test_small_and_rectangular_models_equal_timm(img_size):
    theirs, ours = pair(img_size)
    x = torch.randn(1, 3, *theirs.patch_embed.img_size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [(112, 112), (100, 60), (36, 20), (28, 144)])
def test_torchvision(size):
    theirs = randomize(torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [1, 2], [7, 7], num_classes=7), 1)
    ours = SwinTransformer(small_maps="pad", **SMALL).eval()
    assert load_pretrained(ours, theirs.state_dict()) == []
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_torchvisions_names_fit_the_published_sizes():
    for name, make in (("tiny", "swin_t"), ("small", "swin_s"), ("base", "swin_b")):
        with torch.device("meta"):
            theirs, ours = getattr(torchvision.models, make)(), create_model(f"swin_{name}_patch4_window7_224")
        found = ours.convert_state_dict(theirs.state_dict())
        assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in ours.state_dict().items()}


def test_hugging_face_and_its_memory():
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(embed_dim=16, depths=[2, 2], num_heads=[1, 2], num_labels=7)
    theirs = randomize(transformers.SwinForImageClassification(config))
    ours = SwinTransformer(**SMALL).eval()
    assert load_pretrained(ours, theirs.state_dict()) == []
    x = torch.randn(1, 3, 100, 72, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first = theirs.swin(x).last_hidden_state.unflatten(1, (13, 9))
        torch.testing.assert_close(ours.forward_features(x), first, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-5, atol=1e-5)
        theirs(torch.randn(1, 3, 56, 56)), ours(torch.randn(1, 3, 56, 56))
        changed = theirs.swin(x).last_hidden_state.unflatten(1, (13, 9)) - first  # it has forgotten its shift
        assert changed.abs().max() > 100 * 1e-5, changed.abs().max()
        torch.testing.assert_close(ours.forward_features(x), first, rtol=1e-5, atol=1e-5)
        with pytest.raises(RuntimeError, match="must match"):
            theirs(torch.randn(1, 3, 40, 40))


def test_older_names_of_hugging_face_and_those_of_the_authors():
    ours = SwinTransformer(**SMALL)
    state, authors, older = ours.state_dict(), {}, {}
    for key, x in state.items():
        key = key.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc", "head")
        authors[key] = x
        new = key.replace("layers.", "swin.encoder.layers.").replace("norm1", "layernorm_before")
        new = new.replace("norm2", "layernorm_after").replace("mlp.fc1", "intermediate.dense")
        new = new.replace("mlp.fc2", "output.dense").replace("attn.proj", "attention.output.dense")
        new = new.replace("attn.relative", "attention.self.relative")
        new = new.replace("patch_embed.norm", "swin.embeddings.norm")
        new = new.replace("patch_embed.proj", "swin.embeddings.patch_embeddings.projection")
        new = new.replace("head", "classifier")
        new = "swin.layernorm." + new.split(".")[-1] if new.startswith("norm.") else new
        if "attn.qkv" in new:
            for name, part in zip(("query", "key", "value"), x.chunk(3)):
                older[new.replace("attn.qkv", f"attention.self.{name}")] = part
        else:
            older[new] = x
    authors["layers.0.blocks.1.attn_mask"] = x
    older["swin.encoder.layers.0.blocks.0.attention.self.relative_position_index"] = x
    for other in (authors, older, state):
        found = ours.convert_state_dict(other)
        assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


def oracle(layer, x):
    """Attention among all tokens of the padded map; the oracle says who meets, the bias is looked up pair by pair."""
    plan, h = layer.plan(x.shape[1:3]), layer.num_heads
    (tokens, meet), (rows, columns) = may_meet(plan), layer.window_size
    table, bias = layer.bias_table().view(2 * rows - 1, 2 * columns - 1, h), x.new_zeros(h, *meet.shape)
    for i, j in meet.nonzero().tolist():
        bias[:, i, j] = table[tokens[i][0] - tokens[j][0] + rows - 1, tokens[i][1] - tokens[j][1] + columns - 1]
    padded = F.pad(x, (0, 0, 0, plan.padded[1] - x.shape[2], 0, plan.padded[0] - x.shape[1]))
    q, k, v = (y.flatten(1, 2).unflatten(-1, (h, -1)).transpose(1, 2) for y in layer.project(padded))
    out = attention(q, k, v, mask=meet, bias=bias).transpose(1, 2).flatten(2).unflatten(1, plan.padded)
    return layer.proj(out[:, : x.shape[1], : x.shape[2]])


def test_oracle_on_a_grid():
    torch.manual_seed(0)
    count = 0
    for size, window in itertools.product(((1, 1), (2, 5), (3, 3), (4, 4), (5, 3), (6, 6), (7, 4)),
                                          ((1, 1), (2, 2), (3, 3), (2, 3), (4, 4), (7, 7))):
        for shift in {(0, 0), (window[0] // 2, window[1] // 2), (window[0] - 1, window[1] - 1), (0, window[1] - 1)}:
            for small_maps in ("shrink", "pad"):
                layer = WindowAttention(4, 2, window, shift, small_maps=small_maps, dtype=torch.float64)
                nn.init.normal_(layer.relative_position_bias_table), nn.init.normal_(layer.qkv.bias)
                x = torch.randn(2, *size, 4, dtype=torch.float64)
                with torch.no_grad():
                    torch.testing.assert_close(layer(x), oracle(layer, x), rtol=0, atol=1e-12)
                count += 1
    assert count >= 200


def test_partition_and_mask():
    x = torch.randn(2, 6, 8, 12)
    for heads in (1, 3):
        assert torch.equal(window_reverse(window_partition(x, (3, 2), heads), (3, 2), (6, 8)), x)
    assert window_partition(x, (3, 2), 3).shape == (2, 8 * 3, 6, 4)
    mask = window_mask(Plan((8, 8), (4, 4), (2, 2), (8, 8)))
    assert mask.shape == (4, 16, 16) and mask[0].all() and mask[3].sum() == 16 * 4
    for window in ((7, 7), (2, 5)):
        assert torch.equal(relative_position_index(window), get_relative_position_index(*window))
    assert plan_windows((3, 9), (7, 7), (3, 3)) == ((3, 9), (3, 7), (0, 3), (3, 14))
    assert plan_windows((3, 9), (7, 7), (3, 3), shrink=False) == ((3, 9), (7, 7), (0, 3), (7, 14))


def test_the_bias_follows_its_table():
    layer, x = WindowAttention(8, 2, 4, 2).eval(), torch.randn(1, 8, 8, 8)
    with torch.no_grad():
        before = layer(x)
        assert torch.equal(layer(x), before)
        layer.relative_position_bias_table.normal_(std=2.0)
        after = layer(x)
        other = pickle.loads(pickle.dumps(layer))
        torch.testing.assert_close(other(x), after)
        other.load_state_dict(WindowAttention(8, 2, 4, 2).state_dict())
        assert not torch.allclose(other(x), after) and torch.equal(layer(x), after)
        torch.testing.assert_close(layer.double()(x.double()).float(), after, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("change", [
    dict(img_size=128), dict(img_size=(96, 160)), dict(window_size=5), dict(img_size=64),
    dict(img_size=80, window_size=(4, 5)),
])
def test_set_input_size_equals_timm(change):
    theirs, ours = pair(dtype=torch.float32)
    theirs.set_input_size(**change), ours.set_input_size(**change)
    for (key, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=key)
    x = torch.randn(1, 3, *theirs.patch_embed.img_size)
    if "window_size" not in change or "img_size" in change:  # there the window divides the maps, and timm is right
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_weights_of_another_window_are_resampled():
    source, target = SwinTransformer(**SMALL), SwinTransformer(img_size=128, window_size=8, **SMALL)
    load_pretrained(target, source.state_dict())
    old = source.layers[0].blocks[0].attn.relative_position_bias_table
    new = target.layers[0].blocks[0].attn.relative_position_bias_table
    torch.testing.assert_close(new, resize_bias_table(old.detach(), (8, 8)))
    constant = resize_bias_table(torch.ones(13 * 13, 2), (5, 9))
    torch.testing.assert_close(constant, torch.ones(9 * 17, 2))
    with pytest.raises(ValueError, match=r"table has 168 rows; the window \(7, 7\) needs 169"):
        resize_bias_table(torch.ones(168, 2), (7, 7))


def test_training_helpers():
    model = SwinTransformer(**SMALL | dict(drop_path_rate=0.2)).train()
    x = torch.randn(2, 3, 40, 40)
    torch.manual_seed(0)
    plain = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    model.set_grad_checkpointing()
    torch.manual_seed(0)
    again = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    for a, b in zip(plain, again):
        torch.testing.assert_close(a, b)
    model.eval().reset_classifier(3)
    assert model(x.to(memory_format=torch.channels_last)).shape == (2, 3)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), model(x))
    model.reset_classifier(0, "")
    assert model(x).shape == (2, 5, 5, 32)
    maps = model.forward_intermediates(x, [0, -1], intermediates_only=True, output_fmt="NHWC")
    assert [tuple(y.shape) for y in maps] == [(2, 10, 10, 16), (2, 5, 5, 32)]


@pytest.mark.parametrize("call, message", [
    (lambda: WindowAttention(8, 3), r"dim \(8\) must be divisible by num_heads \(3\)"),
    (lambda: WindowAttention(8, 2, 0), r"window_size \(0, 0\) must be at least 1 token high and wide"),
    (lambda: WindowAttention(8, 2, (4, -1)), r"window_size \(4, -1\) must be at least 1"),
    (lambda: SwinBlock(8, 2, 4, -1), r"shift_size \(-1, -1\) must be at least 0 and less than window_size \(4, 4\)"),
    (lambda: SwinBlock(8, 2, 4, 4), r"shift_size \(4, 4\) must be at least 0 and less than window_size \(4, 4\)"),
    (lambda: WindowAttention(8, 2, small_maps="crop"), r"small_maps \('crop'\) must be 'shrink' or 'pad'"),
    (lambda: SwinTransformer(img_size=3), r"img_size \(3, 3\) must be at least as high and wide as a patch"),
    (lambda: SwinTransformer(depths=(2, 2)), r"depths \(2, 2\) and num_heads .* must be of one length"),
    (lambda: SwinTransformer(global_pool="token", **SMALL), r"global_pool \('token'\) must be 'avg' or ''"),
    (lambda: SwinTransformer(**SMALL)(torch.ones(1, 3, 3, 9)), r"x of size \(3, 9\) must be at least"),
    (lambda: SwinTransformer(**SMALL)(torch.ones(1, 1, 32, 32)), r"in_chans = 3"),
    (lambda: SwinTransformer(**SMALL)(torch.ones(3, 32, 32)), r"must be images \(B, in_chans, H, W\)"),
    (lambda: SwinTransformer(**SMALL).set_input_size(window_size=0), r"window_size \(0, 0\) must be"),
    (lambda: SwinTransformer(**SMALL).forward_intermediates(torch.ones(1, 3, 9, 9), 3), r"indices \(3\) must be"),
    (lambda: SwinTransformer(**SMALL).forward_intermediates(torch.ones(1, 3, 9, 9), output_fmt="NLC"), "'NCHW' or"),
])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_merging_order():
    merging, x = PatchMerging(2), torch.randn(1, 3, 4, 2)
    x0, x1, x2, x3 = (F.pad(x, (0, 0, 0, 0, 0, 1))[:, i::2, j::2] for j in range(2) for i in range(2))
    torch.testing.assert_close(merging(x), merging.reduction(merging.norm(torch.cat([x0, x1, x2, x3], -1))))
