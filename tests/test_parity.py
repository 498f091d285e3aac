"""Every backbone beside timm's with the same weights: names, outputs, gradients, features."""

import pytest
import timm
import torch

from attnlib.attention import attention_backend
from attnlib.models import create_model, list_models
from helpers import BACKBONES, build, close, images, in_float64, pair

every = pytest.mark.parametrize("name", BACKBONES)
COUNTS = {  # parameters
    "vit_tiny_patch16_224": 5_717_416,
    "vit_small_patch16_224": 22_050_664,
    "vit_base_patch16_224": 86_567_656,
    "vit_base_patch32_224": 88_224_232,
    "vit_large_patch16_224": 304_326_632,
    "vit_huge_patch14_224": 632_045_800,
    "deit_tiny_patch16_224": 5_717_416,
    "deit_small_patch16_224": 22_050_664,
    "deit_base_patch16_224": 86_567_656,
    "deit_tiny_distilled_patch16_224": 5_910_800,
    "deit_small_distilled_patch16_224": 22_436_432,
    "deit_base_distilled_patch16_224": 87_338_192,
    "swin_tiny_patch4_window7_224": 28_288_354,
    "swin_small_patch4_window7_224": 49_606_258,
    "swin_base_patch4_window7_224": 87_768_224,
    "swin_large_patch4_window7_224": 196_532_476,
    "swin_base_patch4_window12_384": 87_903_584,
    "swin_large_patch4_window12_384": 196_735_516,
    "swinv2_tiny_window8_256": 28_347_154,
    "swinv2_tiny_window16_256": 28_347_154,
    "swinv2_small_window8_256": 49_728_418,
    "swinv2_small_window16_256": 49_728_418,
    "swinv2_base_window8_256": 87_918_816,
    "swinv2_base_window16_256": 87_918_816,
    "swinv2_base_window12_192": 87_918_816,
    "swinv2_base_window12to16_192to256": 87_918_816,
    "swinv2_base_window12to24_192to384": 87_918_816,
    "swinv2_large_window12_192": 196_739_932,
    "swinv2_large_window12to16_192to256": 196_739_932,
    "swinv2_large_window12to24_192to384": 196_739_932,
    "tnt_s_patch16_224": 23_768_584,
    "tnt_b_patch16_224": 65_428_680,
    "tnt_s_legacy_patch16_224": 23_755_336,
}
OPTIONS = {
    "vit": [
        {"global_pool": "avg"},
        {"global_pool": "avg", "class_token": False},
        {"global_pool": ""},
        {"patch_size": (8, 4)},
    ],
    "deit": [{"distilled": True}],
    "tnt": [
        {"global_pool": "avg"},
        {"global_pool": ""},
        {"patch_size": (8, 4)},
        {"qkv_bias": True},
        {"legacy": True},
        {"first_stride": 2},
        {"first_stride": 8},
        {"legacy": True, "patch_size": (16, 8), "global_pool": "avg"},
    ],
    "beit": [{"global_pool": "token"}, {"global_pool": ""}, {"init_values": 0.1}],
    "swin": [{"global_pool": ""}, {"img_size": 24, "window_size": 7}],
    "swinv2": [
        {"global_pool": ""},
        {"pretrained_window_sizes": (6, 3)},
        {"img_size": 24, "window_size": 8},
        {"img_size": 4},
    ],
}
EVERY_OPTION = [
    {},
    {"num_classes": 0},
    {"qkv_bias": False},
    {"in_chans": 1},
    {"img_size": (32, 48)},
    {"mlp_ratio": 2.5},
]
CASES = [(name, options) for name in BACKBONES for options in EVERY_OPTION + OPTIONS[name]]


def derivatives(model, x):
    """What the model returns, and the gradients of x and of all parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out = torch.stack(out) if isinstance(out, tuple) else out
    out.square().sum().backward()
    return {"out": out, "x": x.grad} | {key: p.grad for key, p in model.named_parameters()}


def compare(ours, theirs, x, tolerance):
    """Output and gradients, in units of the largest entry where that is above 1."""
    found, wanted = derivatives(ours, x), derivatives(theirs, x)
    assert found.keys() == wanted.keys()
    for key, y in wanted.items():
        assert (found[key] is None) == (y is None), key
        if y is not None:
            close(found[key], y, tolerance * max(1, y.abs().max().item()))


@pytest.mark.parametrize("name", COUNTS)
def test_every_published_name_has_timms_keys_and_shapes(name):
    with torch.device("meta"):
        theirs, ours = (
            make(name, num_classes=1000) for make in (timm.create_model, create_model)
        )
    keys = [
        {key: (x.shape, x.dtype) for key, x in m.state_dict().items()} for m in (ours, theirs)
    ]
    assert keys[0] == keys[1] and list(keys[0]) == list(keys[1])
    names = [key for key, _ in ours.named_parameters()]  # an optimizer's state has their order
    assert names == [key for key, _ in theirs.named_parameters()]
    assert ours.no_weight_decay() == theirs.no_weight_decay() & set(names)
    assert sum(p.numel() for p in ours.parameters()) == COUNTS[name]


def test_every_name_is_counted():
    families = ("vit_*_patch??_224", "deit_*", "swin_*_window*", "swinv2_*", "tnt_*_224")
    assert {name for family in families for name in list_models(family)} == set(COUNTS)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_outputs_features_and_gradients(name, options, training):
    distilled = training and options.get("distilled", False)
    options = {key: value for key, value in options.items() if key != "distilled"}
    ours, theirs = (in_float64(model).train(training) for model in pair(name, **options))
    x = images(2, options.get("img_size", 32), options.get("in_chans", 3))
    features = ours.forward_features(x)
    close(features, theirs.forward_features(x))
    heads = [model.forward_head(features, pre_logits=True) for model in (ours, theirs)]
    close(*heads)
    for model in (ours, theirs):
        if distilled:
            model.set_distilled_training()
    compare(ours, theirs, x, 1e-10)


@every
def test_float32(name):
    compare(*pair(name), images().float(), 1e-5)


@every
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_backends_agree(name, backend):
    ours, theirs = (in_float64(model).eval() for model in pair(name))
    with attention_backend(backend):
        out = ours(images())
    close(out, theirs(images()))


@every
@pytest.mark.parametrize(
    "arguments",
    [
        dict(),
        dict(indices=2),
        dict(indices=[0, -1], norm=True),
        dict(indices=[1], intermediates_only=True),
        dict(return_prefix_tokens=True),
        dict(output_fmt="NLC", indices=(1, 0)),
    ],
    ids=str,
)
def test_intermediates(name, arguments):
    if name.startswith("swin") and {"return_prefix_tokens", "output_fmt"} & set(arguments):
        pytest.skip("timm's has no such argument")
    models = (in_float64(model) for model in pair(name))
    ours, theirs = (model.forward_intermediates(images(), **arguments) for model in models)
    if not arguments.get("intermediates_only"):
        close(ours[0], theirs[0])
        ours, theirs = ours[1], theirs[1]
    assert len(ours) == len(theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@every
def test_another_classifier(name):
    """timm's own `reset_classifier` leaves the norm where another pooling does not want it."""
    ours, theirs = (in_float64(model).eval() for model in pair(name))
    for num_classes, pool in ((7, None), (0, None), (3, "token" if name == "deit" else "avg")):
        ours.reset_classifier(num_classes, pool)
        if pool is None:
            theirs.reset_classifier(num_classes)
        else:
            theirs = build(name, True, num_classes=num_classes, global_pool=pool)
            theirs = in_float64(theirs).eval()
        assert ours.num_classes == num_classes and not any(m.training for m in ours.modules())
        theirs.load_state_dict(ours.state_dict(), strict=True)
        close(ours(images()), theirs(images()))


@pytest.mark.parametrize("name", ["vit", "deit"])
@pytest.mark.parametrize("size", [48, (16, 40), (64, 32)])
def test_another_size(name, size):
    """Swin's change of windows and TNT's positions have tests of their own."""
    ours, theirs = pair(name)
    ours.set_input_size(size)
    theirs.set_input_size(size)
    assert torch.equal(ours.pos_embed, theirs.pos_embed) and ours.pos_embed.requires_grad
    close(ours(images(2, size).float()), theirs(images(2, size).float()), 1e-5)
    with pytest.raises(ValueError, match="img_size"):
        ours(images().float())


@every
def test_drop_path_and_dropout_draw_as_timm_does(name):
    rates = dict(drop_path_rate=0.5, drop_rate=0.2)
    if not name.startswith("swin"):
        rates["pos_drop_rate"] = 0.1
    outputs = []
    for model in pair(name, **rates):
        torch.manual_seed(7)
        outputs.append(model.double().train()(images(8)))
    close(*outputs, 1e-7)  # timm computes the rates of Swin's blocks in float32


@every
def test_models_start_as_timms_do(name):
    """Which parameters are zero or one, and the spread of the others."""
    torch.manual_seed(0)
    theirs = dict(build(name, peer=True).named_parameters())
    for key, p in build(name).named_parameters():
        found, wanted = (x.square().mean().sqrt() for x in (p, theirs[key]))
        assert abs(found - wanted) <= (0.2 if p.numel() > 200 else 0.7) * wanted, key
