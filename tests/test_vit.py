"""The Vision Transformer against timm, torchvision and Hugging Face, its properties, and bad input."""
import copy
import re

import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from attnlib.attention import attention_backend
from attnlib.models import create_model, list_models, load_pretrained
from attnlib.vit import (
    Attention, Block, DropPath, Mlp, PatchEmbed, VisionTransformer, attention_distance, attention_rollout, block_indices,
    convert_names, crop_and_flip, drop_path_rates, resample_positions, train_classifier, train_small,
)
from backbones import close, images, same_weights

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)
NAMES = [f"vit_{size}_patch{patch}_224" for size, patch in
         (("tiny", 16), ("small", 16), ("base", 16), ("base", 32), ("large", 16), ("huge", 14))]
COUNTS = dict(zip(NAMES, (5_717_416, 22_050_664, 86_567_656, 88_224_232, 304_326_632, 632_045_800)))


def pair(seed=0, **options):
    """The same weights here and in timm."""
    return same_weights(VisionTransformer, TimmViT, seed, **SMALL | options)


def small(seed=0, **options):
    return pair(seed, **options)[0].double()


# --- the peers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_timms_keys_and_shapes(name):
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=1000)
    ours = create_model(name, device="meta")
    shapes = [{key: (x.shape, x.dtype) for key, x in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1] and list(shapes[0]) == list(shapes[1])
    assert sum(p.numel() for p in ours.parameters()) == COUNTS[name]
    assert set(NAMES) <= set(list_models("vit_*"))


@pytest.mark.parametrize("name", NAMES)
def test_published_sizes_agree_with_timm(name):
    """All of Ti; of the larger ones a few blocks."""
    torch.manual_seed(0)
    depth = dict(tiny=12, small=4, base=2, large=1, huge=1)[name.split("_")[1]]
    theirs = timm.create_model(name, num_classes=1000, depth=depth).eval()
    ours = create_model(name, depth=depth).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = images(1, 224).float()
    with torch.no_grad():
        close(ours(x), theirs(x), 1e-5)
        close(ours.forward_features(x), theirs.forward_features(x), 1e-5)
        ours, theirs = ours.double(), theirs.double()
        close(ours(x.double()), theirs(x.double()))


OPTIONS = [
    {}, {"global_pool": "avg"}, {"global_pool": "avg", "class_token": False}, {"global_pool": ""}, {"num_classes": 0},
    {"qkv_bias": False}, {"in_chans": 1}, {"img_size": (32, 48)}, {"patch_size": (8, 4)}, {"mlp_ratio": 2.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_outputs_features_and_gradients_are_timms(options, training):
    ours, theirs = (model.double().train(training) for model in pair(**options))
    x = images(2, 32, options.get("in_chans", 3))
    x = x if options.get("img_size", 32) == 32 else torch.cat([x, x[..., :16]], dim=-1)
    close(ours.forward_features(x), theirs.forward_features(x))
    close(ours.forward_head(ours.forward_features(x), pre_logits=True),
          theirs.forward_head(theirs.forward_features(x), pre_logits=True))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [model(x) for model, x in zip((ours, theirs), inputs)]
    close(*outputs)
    for out in outputs:
        out.square().sum().backward()
    close(inputs[0].grad, inputs[1].grad)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        close(p.grad, q.grad, 1e-10), name


def test_float32_within_1e_5():
    ours, theirs = pair()
    x = images().float()
    close(ours(x), theirs(x), 1e-5)


@pytest.mark.parametrize("arguments", [
    dict(), dict(indices=2), dict(indices=[0, -1], norm=True), dict(indices=[1], intermediates_only=True),
    dict(return_prefix_tokens=True), dict(output_fmt="NLC", indices=(2, 0)),
], ids=str)
@pytest.mark.parametrize("class_token", [True, False])
def test_intermediates_are_timms(arguments, class_token):
    pool = {} if class_token else {"class_token": False, "global_pool": "avg"}
    ours, theirs = (model.double().forward_intermediates(images(), **arguments) for model in pair(**pool))
    if not arguments.get("intermediates_only"):
        close(ours[0], theirs[0])
        ours, theirs = ours[1], theirs[1]
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [48, (16, 40), (64, 32)])
def test_input_size_is_changed_as_timm_does(size):
    ours, theirs = pair()
    ours.set_input_size(size)
    theirs.set_input_size(size)
    assert torch.equal(ours.pos_embed, theirs.pos_embed) and ours.pos_embed.requires_grad
    height, width = (size, size) if isinstance(size, int) else size
    x = torch.randn(2, 3, height, width)
    close(ours(x), theirs(x), 1e-5)
    with pytest.raises(ValueError, match="img_size"):
        ours(images().float())


def test_dynamic_size_is_timms():
    ours, theirs = (model.double() for model in pair(dynamic_img_size=True))
    for size in (32, 48, 16):
        close(ours(images(2, size)), theirs(images(2, size)))
    x = torch.cat([images(), images()[..., :8]], dim=-1)
    close(ours(x), theirs(x))
    assert ours.forward_intermediates(x)[1][0].shape == (2, 24, 4, 5)


def test_torchvision_weights():
    torch.manual_seed(0)
    theirs = torchvision.models.vision_transformer.VisionTransformer(32, 8, 3, 3, 24, 96, num_classes=5)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.1)
    ours = VisionTransformer(**SMALL)
    load_pretrained(ours, theirs.state_dict())
    close(ours(images().float()), theirs(images().float()), 1e-5)
    close(ours.double()(images()), theirs.double()(images()))
    with torch.device("meta"):
        names = torchvision.models.vit_b_16().state_dict()
    wanted = create_model("vit_base_patch16_224", device="meta").state_dict()
    assert {k: x.shape for k, x in convert_names(names).items()} == {k: x.shape for k, x in wanted.items()}


def older_names(state_dict):
    """The names that transformers used for its ViT until version 5."""
    rules = (
        (r"^vit\.layers\.", "vit.encoder.layer."), (r"attention\.q_proj", "attention.attention.query"),
        (r"attention\.k_proj", "attention.attention.key"), (r"attention\.v_proj", "attention.attention.value"),
        (r"attention\.o_proj", "attention.output.dense"), (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
    )
    renamed = {}
    for key, x in state_dict.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        renamed[key] = x
    return renamed


@pytest.mark.parametrize("generation", ["before version 5", "since version 5", "without head"])
def test_hugging_face_weights(generation):
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, image_size=32,
                       patch_size=8, num_labels=5, layer_norm_eps=1e-6)
    theirs = ViTForImageClassification(config).eval()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.1)
    state_dict = theirs.state_dict()
    newer = any("q_proj" in key for key in state_dict)  # what the installed version has
    if generation == "before version 5" and newer:
        state_dict = older_names(state_dict)
        assert "vit.encoder.layer.0.attention.attention.query.weight" in state_dict
    elif generation == "since version 5" and not newer:
        pytest.skip("an older transformers is installed")
    ours = VisionTransformer(**SMALL | dict(num_classes=0) if generation == "without head" else SMALL).eval()
    if generation == "without head":
        bare = {k.removeprefix("vit."): x for k, x in state_dict.items() if not k.startswith("classifier")}
        bare |= {"pooler.dense.weight": torch.zeros(24, 24), "pooler.dense.bias": torch.zeros(24)}
        load_pretrained(ours, bare)
        x = images().float()
        close(ours(x), theirs.vit(x).last_hidden_state[:, 0], 1e-5)
        return
    load_pretrained(ours, state_dict)
    close(ours(images().float()), theirs(images().float()).logits, 1e-5)
    close(ours.double()(images()), theirs.double()(images()).logits)


def test_conversion_leaves_own_names_alone():
    state_dict = small().state_dict()
    converted = VisionTransformer.convert_state_dict(state_dict)
    assert list(converted) == list(state_dict) and all(converted[k] is x for k, x in state_dict.items())


def test_conversion_names_an_incomplete_attention():
    with pytest.raises(ValueError, match="blocks.1.attn.qkv.weight needs q, k and v; the state dict has only k, q"):
        convert_names({f"vit.layers.1.attention.{n}_proj.weight": torch.zeros(2, 2) for n in "qk"})


def test_positions_of_a_state_dict_are_resampled_as_timm_does():
    ours, theirs = pair(img_size=64)
    state_dict = small(img_size=32).float().state_dict()
    got = ours.resample_state_dict(state_dict)
    wanted = timm.models.vision_transformer.checkpoint_filter_fn(dict(state_dict), theirs)
    assert torch.equal(got["pos_embed"], wanted["pos_embed"]) and got["pos_embed"].shape == (1, 65, 24)
    assert state_dict["pos_embed"].shape == (1, 17, 24)
    wide, theirs = pair(img_size=(16, 64))  # as many patches as the square has, in another grid
    theirs.pretrained_cfg = dict(input_size=(3, 32, 32))
    wanted = timm.models.vision_transformer.checkpoint_filter_fn(dict(state_dict), theirs)
    assert torch.equal(wide.resample_state_dict(state_dict)["pos_embed"], wanted["pos_embed"])
    odd = pair(img_size=(16, 40))[0]  # ten patches are no square: these positions can only be its own
    assert torch.equal(odd.resample_state_dict(odd.state_dict())["pos_embed"], odd.pos_embed)
    with pytest.raises(ValueError, match="10 positions of patches"):
        ours.resample_state_dict(odd.state_dict())


# --- what it computes --------------------------------------------------------------------------------------------


def test_the_shortcut_saves_what_it_should():
    from torch.utils.flop_counter import FlopCounterMode

    def count(f):
        with FlopCounterMode(display=False) as counter, attention_backend("reference"):  # it knows matrix products
            f(torch.zeros(1, 3, 32, 32, dtype=torch.float64))
        return counter.get_total_flops() // 2

    model = small().eval()
    full = count(lambda x: model.forward_head(model.forward_features(x)))
    n, d = 17, 24  # of the last block N - 1 tokens are spared attention, projection and MLP
    assert full - count(model) == (n - 1) * (2 * n * d + d * d + 8 * d * d)


def test_attention_maps_reproduce_the_blocks():
    model, x = small(), images()
    maps, inputs = model.attention_maps(x), []
    tokens = model.embed(x)
    assert len(maps) == 3
    for weights, block in zip(maps, model.blocks):
        assert weights.shape == (2, 3, 17, 17)
        close(weights.sum(-1), torch.ones(2, 3, 17, dtype=torch.float64), 1e-12)
        v = block.attn.heads(block.norm1(tokens))[2]
        attended = block.attn.proj((weights @ v).transpose(1, 2).flatten(2))
        tokens = tokens + attended
        tokens = tokens + block.mlp(block.norm2(tokens))
        inputs.append(tokens)
    for a, b in zip(inputs, model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)):
        close(a[:, 1:], b, 1e-12)


def test_attention_maps_of_other_sizes():
    maps = small(dynamic_img_size=True).attention_maps(images(1, 48))
    assert maps[0].shape == (1, 3, 37, 37)


def test_without_positions_patches_have_no_order():
    model, x = small(global_pool="avg"), images(1)
    nn.init.zeros_(model.pos_embed)
    swapped = x.clone()
    swapped[..., :8, :8], swapped[..., 16:24, 8:16] = x[..., 16:24, 8:16], x[..., :8, :8]
    close(model(x), model(swapped), 1e-12)
    nn.init.normal_(model.pos_embed)
    assert (model(x) - model(swapped)).abs().max() > 1e-4


@given(p=st.integers(1, 5), rows=st.integers(1, 4), columns=st.integers(1, 4), chans=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_patches_three_ways(p, rows, columns, chans):
    embed = PatchEmbed((rows * p, columns * p), p, chans, 6, dtype=torch.float64)
    x = torch.randn(2, chans, rows * p, columns * p, dtype=torch.float64)
    cut = x.reshape(2, chans, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5).reshape(2, rows * columns, -1)
    close(cut, nn.functional.unfold(x, p, stride=p).mT, 0)
    close(embed(x), cut @ embed.proj.weight.flatten(1).T + embed.proj.bias, 1e-12)


def test_patch_embed_as_a_grid_with_a_norm():
    torch.manual_seed(0)
    embed = PatchEmbed(16, 4, 3, 8, norm_layer=nn.LayerNorm, flatten=False)
    grid = embed(torch.randn(2, 3, 16, 16))
    assert grid.shape == (2, 4, 4, 8) and grid.mean(-1).abs().max() < 1e-5
    assert set(embed.state_dict()) == {"proj.weight", "proj.bias", "norm.weight", "norm.bias"}


def test_positions_are_kept_where_the_grid_is():
    pos = torch.randn(1, 17, 6)
    assert resample_positions(pos, (4, 4)) is pos
    wide = resample_positions(pos, (4, 8))
    assert wide.shape == (1, 33, 6) and torch.equal(wide[:, 0], pos[:, 0])
    assert resample_positions(pos.bfloat16(), (2, 2)).dtype == torch.bfloat16
    assert resample_positions(torch.randn(1, 12, 6), (4, 4), (2, 6), 0).shape == (1, 16, 6)
    with pytest.raises(ValueError, match=r"16 positions of patches; old_size \(3, 5\)"):
        resample_positions(pos, (4, 4), (3, 5))
    with pytest.raises(ValueError, match=r"15 positions of patches; old_size \(3, 3\)"):
        resample_positions(pos[:, :-1], (4, 4))


def test_drop_path():
    torch.manual_seed(0)
    drop, x = DropPath(0.25), torch.ones(4000, 3, 2)
    y = drop(x)
    assert set(y.flatten().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (y == y[:, :1, :1]).all() and abs(y.mean().item() - 1) < 0.05
    assert drop.eval()(x) is x and DropPath()(x) is x and "0.25" in repr(drop)
    assert drop_path_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3]) and drop_path_rates(0.3, 1) == [0.0]


def test_mlp_and_attention_are_timms():
    torch.manual_seed(0)
    theirs = timm.models.vision_transformer.Block(24, 3, qkv_bias=True).double()
    ours = Block(24, 3).double()
    ours.load_state_dict({k: torch.randn_like(x) for k, x in theirs.state_dict().items()})
    theirs.load_state_dict(ours.state_dict())
    theirs.norm1.eps = theirs.norm2.eps = 1e-6
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    close(ours.attn(x), theirs.attn(x), 1e-9)
    close(ours.mlp(x), theirs.mlp(x), 1e-9)
    close(ours(x), theirs(x), 1e-8)
    close(ours(x, 2), ours(x)[:, :2], 1e-8)
    assert Mlp(4, 8, 2)(torch.zeros(3, 4)).shape == (3, 2) and Mlp(4).fc1.out_features == 4


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("rows", [3, 40, 9000])
def test_mlp_without_gradient_is_mlp_with(dtype, error, rows):
    """Whichever way it takes: in one call or several, all rows at once or in pieces (9000 rows of 400)."""
    torch.manual_seed(0)
    mlp, x = Mlp(24, 400).to(dtype), torch.randn(3, rows // 3, 24, dtype=dtype)
    with torch.no_grad():
        out = mlp(x)
    exact = copy.deepcopy(mlp).double()(x.double())
    assert out.dtype == dtype and exact.requires_grad
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=error)


def test_mlp_is_seen_and_changed_as_any_other():
    """Hooks on its layers are called, once a pass; another layer or activation is used; dropout drops."""
    mlp, x, seen = Mlp(8, 400), torch.randn(9000, 8), []
    usual = mlp.requires_grad_()(x).detach()
    with torch.no_grad():
        for layer in mlp.children():
            handle = layer.register_forward_hook(lambda layer, inputs, out: seen.append(len(out)))
            close(mlp(x), usual, 1e-6)
            handle.remove()
        assert seen == [9000] * 5  # dropout is called twice
        parametrized = copy.deepcopy(mlp)
        nn.utils.parametrizations.weight_norm(parametrized.fc1)
        parametrized.fc1.parametrizations.weight.original0.zero_()  # the weights' lengths
        close(parametrized(x), mlp.fc2(nn.functional.gelu(mlp.fc1.bias)).expand(9000, -1), 1e-6)
        replaced = copy.deepcopy(mlp)
        replaced.act = nn.ReLU()
        close(replaced(x), mlp.fc2(mlp.fc1(x).relu()), 1e-6)
        dropping = Mlp(8, 400, drop=0.5)
        assert (dropping(x) == 0).any() and not (dropping.eval()(x) == 0).any()
        dropping.drop.train()  # as for dropout at evaluation
        assert (dropping(x) == 0).any()
        wrapped, usual_forward = copy.deepcopy(mlp), mlp.fc1.forward  # as libraries that move weights do it
        wrapped.fc1.forward = lambda x: usual_forward(x) + 1
        close(wrapped(x), mlp.fc2(nn.functional.gelu(mlp.fc1(x) + 1)), 1e-6)
        seen.clear()
        with nn.modules.module.register_module_forward_hook(lambda layer, inputs, out: seen.append(type(layer))):
            mlp(x)
        assert len(seen) == 6


def test_what_weight_decay_spares():
    model = small()
    assert model.no_weight_decay() == {"pos_embed", "cls_token"} <= dict(model.named_parameters()).keys()


def test_attributes_and_initialization():
    torch.manual_seed(0)
    model = VisionTransformer(depth=1, drop_path_rate=0.1)
    assert (model.num_classes, model.num_features, model.embed_dim, model.num_prefix_tokens) == (1000, 768, 768, 1)
    assert abs(model.blocks[0].mlp.fc1.weight.std() - 0.02) < 1e-3 and abs(model.pos_embed.std() - 0.02) < 1e-3
    assert all((p == 0).all() for n, p in model.named_parameters() if re.search(r"(fc\d|qkv|attn\.proj|head)\.bias", n))
    half = VisionTransformer(**SMALL, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and half(images().bfloat16()).isfinite().all()


# --- looking inside, and training ---------------------------------------------------------------------------------


def test_attention_distance():
    even = torch.full((2, 3, 5, 5), 0.2)
    expected = (0 + 4 + 3 + 5) / 4  # a 2 × 2 grid of patches of 3 × 4 pixels
    close(attention_distance(even, 2, (3, 4)), torch.full((3,), expected), 1e-6)
    close(attention_distance(torch.eye(6)[None, None], (2, 3), 8, 0), torch.zeros(1), 0)
    close(attention_distance(even.bfloat16(), 2, (3, 4)), torch.full((3,), expected), 1e-6)
    with pytest.raises(ValueError, match=r"grid_size \(3, 3\) has 9 patches; weights have 4"):
        attention_distance(even, 3)


def test_rollout_is_the_product_over_the_layers():
    maps = [m.detach() for m in small().attention_maps(images())]
    rollout = attention_rollout(maps)
    close(rollout.sum(-1), torch.ones(2, 17, dtype=torch.float64), 1e-12)
    eye = torch.eye(17, dtype=torch.float64)
    expected = eye
    for m in maps:
        expected = (0.5 * m[0].mean(0) + 0.5 * eye) @ expected
    close(rollout[0], expected, 1e-12)
    assert rollout.diagonal(dim1=1, dim2=2).min() >= 1 / 8


def test_crop_and_flip():
    torch.manual_seed(0)
    x = torch.arange(1.0, 37.0).reshape(1, 1, 6, 6).expand(64, 2, 6, 6)
    y = crop_and_flip(x, 2)
    padded = nn.functional.pad(x[:1, :1], (2,) * 4)[0, 0]
    windows = [padded[i : i + 6, j : j + 6] for i in range(5) for j in range(5)]
    windows += [w.flip(-1) for w in windows]
    found = {next(k for k, w in enumerate(windows) if torch.equal(w, image[0])) for image in y}
    assert y.shape == x.shape and torch.equal(y[:, 0], y[:, 1]) and len(found) > 25
    assert torch.equal(crop_and_flip(x, 0).sum(), x.sum())


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    x = images(64).float()
    y = (x[:, 0, :8, :8].mean((1, 2)) > 0).long()
    model = VisionTransformer(**SMALL | dict(num_classes=2))
    history = train_classifier(model, (x, y), (x, y), steps=40, batch_size=32, lr=3e-3, every=20, augment=lambda x: x + 0)
    assert [record["step"] for record in history] == [20, 40] and history[1]["loss"] < history[0]["loss"]
    assert history[-1]["accuracy"] > 0.6


def test_training_with_another_loss():
    def loss(model, images, labels):
        return nn.functional.cross_entropy(model(images), labels, reduction="sum")

    x, y = images(32).float(), torch.arange(32) % 2
    losses = []
    for option in ({}, {"loss": loss}, {"loss": lambda *batch: 2 * loss(*batch)}):
        torch.manual_seed(0)
        model = VisionTransformer(**SMALL | dict(num_classes=2))
        losses.append(train_classifier(model, (x, y), (x, y), steps=1, batch_size=32, **option)[0]["loss"])
    assert losses[0] == losses[1] == losses[2] / 2


def test_small_training_runs():
    model, history = train_small(steps=3, batch_size=16)
    assert history[-1]["step"] == 3 and 0 <= history[-1]["accuracy"] <= 1 and model.num_classes == 10


# --- compile and export ------------------------------------------------------------------------------------------


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, message", [
    (dict(embed_dim=25), r"embed_dim \(25\) must be divisible by num_heads \(3\)"),
    (dict(img_size=30), r"patch_size \(8, 8\) must divide the image's size, and that is \(30, 30\)"),
    (dict(img_size=(32, 4)), r"patch_size \(8, 8\) must divide the image's size, and that is \(32, 4\)"),
    (dict(global_pool="max"), r"global_pool \('max'\) must be one of 'token', 'avg', ''"),
    (dict(class_token=False), r"global_pool \('token'\) must be one of 'avg', '': there is no class token"),
    (dict(drop_path_rate=1.0), r"drop_path_rate \(1.0\) must be in \[0, 1\)"),
])
def test_impossible_models(options, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**SMALL | options)


@pytest.mark.parametrize("shape, message", [
    ((2, 3, 40, 40), r"\(2, 3, 40, 40\) must be of the model's img_size \(32, 32\); set_input_size changes it"),
    ((2, 1, 32, 32), r"\(2, 1, 32, 32\) must be images \(B, in_chans, H, W\) with in_chans = 3"),
    ((3, 32, 32), r"\(3, 32, 32\) must be images"),
])
def test_impossible_images(shape, message):
    with pytest.raises(ValueError, match=message):
        small()(torch.zeros(shape, dtype=torch.float64))


def test_dynamic_sizes_must_be_divisible_too():
    with pytest.raises(ValueError, match=r"patch_size \(8, 8\) must divide the image's size, and that is \(36, 32\)"):
        small(dynamic_img_size=True)(torch.zeros(1, 3, 36, 32, dtype=torch.float64))


def test_impossible_calls():
    model = small()
    for indices, message in ((4, r"indices \(4\) must be from 1 to 3"), ([3], r"indices \[3\] must be from -3 to 2")):
        with pytest.raises(ValueError, match=message):
            model.forward_intermediates(images(), indices)
    with pytest.raises(ValueError, match="output_fmt \\('NHWC'\\) must be 'NCHW' or 'NLC'"):
        model.forward_intermediates(images(), output_fmt="NHWC")
    with pytest.raises(ValueError, match=r"patch_size \(8, 8\) must divide"):
        model.set_input_size(33)
    model(images())  # and it still accepts what it did
    with pytest.raises(ValueError, match="global_pool"):
        model.reset_classifier(3, "max")
    assert model(images()).shape == (2, 5) and block_indices([-1, 0], 3) == [2, 0]


def test_attention_needs_divisible_width():
    with pytest.raises(ValueError, match=r"embed_dim \(10\) must be divisible by num_heads \(3\)"):
        Attention(10, 3)


def test_the_present_size_leaves_the_parameters_alone():
    """An optimizer may hold them."""
    model = small()
    old = list(model.parameters())
    model.set_input_size(32)
    assert all(a is b for a, b in zip(old, model.parameters(), strict=True))


def test_other_blocks():
    model, x = small(), images()
    blocks = [nn.Identity(), nn.Sequential(nn.Identity(), model.blocks[1]), model.blocks[2]]
    expected = model.forward_head(model.norm(blocks[2](blocks[1](model.embed(x)))))
    model.blocks = nn.Sequential(*blocks)
    close(model(x), expected)


@pytest.mark.parametrize("error, words, call", [
    (TypeError, "x of dtype torch.uint8 must be floating point", lambda: small()(torch.zeros(1, 3, 32, 32).byte())),
    (ValueError, r"num_heads \(0\) must be an integer of at least 1", lambda: small(num_heads=0)),
    (ValueError, r"num_heads \(-3\) must be an integer", lambda: small(num_heads=-3)),
    (ValueError, r"depth \(-1\) must be an integer", lambda: small(depth=-1)),
    (ValueError, r"in_chans \(0\) must be an integer", lambda: small(in_chans=0)),
    (ValueError, r"patch_size \(0, 0\) and the image's size \(32, 32\)", lambda: small(patch_size=0)),
    (ValueError, r"the image's size \(32,\) must be two numbers", lambda: small(img_size=(32,))),
    (ValueError, r"attn_drop \(1.5\) must be in \[0, 1\)", lambda: small(attn_drop_rate=1.5)),
    (ValueError, r"drop_path_rate \(-0.1\) must be in \[0, 1\)", lambda: small(drop_path_rate=-0.1)),
    (ValueError, r"indices \[\] must be integers, and at least one",
     lambda: small().forward_intermediates(images(), [], intermediates_only=True)),
    (ValueError, r"indices \[0.5\] must be integers", lambda: small().forward_intermediates(images(), [0.5])),
])
def test_bad_input_is_named(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_indices_may_be_a_generator():
    model = small()
    found = model.forward_intermediates(images(), (i for i in (0, 2)), intermediates_only=True)
    assert len(found) == 2
