"""Models here have the shape of timm's: its tools work on them, its names mean the same."""

from functools import partial

import pytest
import torch
from processes import together
from small_models import LOADED
from torch.nn.parallel import DistributedDataParallel

import attnlib
from attnlib.backbone import FeatureExtractor, FeatureInfo
from attnlib.models import (
    _FOREIGN_NAMES,
    MODELS,
    _arguments_of,
    data_config,
    list_models,
    pretrained_cfg,
    register_model,
)
from attnlib.vit import VisionTransformer
from helpers import BACKBONES, build, images, pair
from tools import torchvision_ops  # noqa: F401  before timm

timm = pytest.importorskip("timm")
from timm.data import create_transform, resolve_model_data_config  # noqa: E402
from timm.models import _features as timm_features  # noqa: E402
from timm.models import group_parameters  # noqa: E402
from timm.optim import create_optimizer_v2, param_groups_layer_decay  # noqa: E402
from timm.utils import ModelEmaV3  # noqa: E402

FAMILIES = {**{name: partial(build, name) for name in BACKBONES},
            "autoformer": LOADED["autoformer"]}  # fmt: skip
SMALL = dict(depth=3, embed_dim=24, num_heads=3)
REGISTERED = {  # names of every family, and what makes them small
    "vit_tiny_patch16_224": SMALL,
    "vit_small_patch14_reg4_dinov2": SMALL | dict(img_size=56),
    "vit_base_patch32_clip_224": SMALL,
    "deit_tiny_patch16_224": SMALL,
    "deit_tiny_distilled_patch16_224": SMALL,
    "beit_base_patch16_224": SMALL,
    "tnt_s_patch16_224": dict(depth=3, embed_dim=24, num_heads_outer=3, inner_dim=8,
                              num_heads_inner=2),
    "swin_tiny_patch4_window7_224": dict(embed_dim=12, depths=(1, 1, 2, 1),
                                         num_heads=(1, 1, 2, 2)),
    "swinv2_tiny_window8_256": dict(embed_dim=12, depths=(1, 1, 2, 1), num_heads=(1, 1, 2, 2)),
}  # fmt: skip
WINDOWED = ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256")


def small_pair(name, **options):
    """The model of a name, smaller, and timm's with the same weights."""
    settings = REGISTERED[name] | options
    torch.manual_seed(0)
    ours = attnlib.create_model(name, **settings)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs = timm.create_model(name, **settings)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


# what a model says of its maps


@pytest.mark.parametrize("name", REGISTERED)
def test_feature_info_is_that_of_timm(name):
    ours, theirs = small_pair(name)
    keys = ("module", "num_chs", "reduction")
    described = [{key: info[key] for key in keys} for info in theirs.feature_info]
    assert [{key: info[key] for key in keys} for info in ours.feature_info] == described
    modules = dict(ours.named_modules())
    assert all(info["module"] in modules for info in ours.feature_info)


@pytest.mark.parametrize("indices", [(0, 2), (-1,), None])
def test_feature_info_answers_as_timms_class(indices):
    infos = [dict(module=f"layers.{i}", num_chs=8 + i, reduction=4 * 2**i) for i in range(4)]
    ours = FeatureInfo(infos, indices)
    theirs = timm_features.FeatureInfo([dict(info) for info in infos], indices or (0, 1, 2, 3))
    for idx in (None, 2, -1, (3, 0), [1]):
        assert ours.channels(idx) == theirs.channels(idx)
        assert ours.reduction(idx) == theirs.reduction(idx)
        assert ours.module_name(idx) == theirs.module_name(idx)
        assert ours.get("num_chs", idx) == theirs.get("num_chs", idx)
        keys = ["module", "num_chs"]
        assert ours.get_dicts(keys, idx) == theirs.get_dicts(keys, idx)
    assert ours[1]["num_chs"] == theirs[1]["num_chs"] == 9
    assert len(ours) == len(theirs) == 4


# maps in place of logits


@pytest.mark.parametrize("indices", [(0, 2), (1,), (-1,), 2])
@pytest.mark.parametrize("name", REGISTERED)
def test_features_only_returns_timms_maps(name, indices):
    """The same weights, hence the same numbers; timm's Swin has its channels last."""
    settings = REGISTERED[name]
    ours, _ = small_pair(name)
    weights = ours.state_dict()
    whole = timm.create_model(name, **settings)
    whole.load_state_dict(weights)
    theirs = timm.create_model(name, features_only=True, out_indices=indices, **settings)
    if name in WINDOWED:
        assert isinstance(theirs, timm_features.FeatureListNet)
        renamed = {key.replace("layers.", "layers_", 1): x for key, x in weights.items()}
        known = {key: x for key, x in renamed.items() if key in theirs.state_dict()}
        theirs.load_state_dict(known, strict=True)
    else:
        known = {f"model.{key}": x for key, x in weights.items()}
        theirs.load_state_dict({key: known[key] for key in theirs.state_dict()}, strict=True)
    ours = attnlib.create_model(name, weights, features_only=True, out_indices=indices,
                                **settings)  # fmt: skip
    size = data_config(name, settings.get("img_size"))["input_size"][1:]
    x = images(2, size).float()
    expected = theirs.eval()(x)
    if name in WINDOWED:
        expected = [y.permute(0, 3, 1, 2) for y in expected]
    found = ours.eval()(x)
    assert len(found) == len(expected)
    for y, target in zip(found, expected):
        torch.testing.assert_close(y, target, rtol=1e-4, atol=1e-4)
    assert ours.feature_info.channels() == [y.shape[1] for y in found]
    assert ours.feature_info.reduction() == [size[0] // y.shape[2] for y in found]
    assert ours.feature_info.channels() == theirs.feature_info.channels()


def test_all_maps_by_default_in_order_of_depth():
    model = attnlib.create_model("vit_tiny_patch16_224", features_only=True, **SMALL)
    assert model.out_indices == (0, 1, 2)
    model = attnlib.create_model(
        "vit_tiny_patch16_224", features_only=True, out_indices=(2, 0, -1), **SMALL
    )
    assert model.out_indices == (0, 2)


def spare(model, call=None):
    """The names of the parameters that have no gradient after a step on all maps."""
    maps = (call or model)(images(2, 32).float())
    sum(y.square().sum() for y in maps).backward()
    return [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize("pool", ["avg", None])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_parameter_is_without_a_gradient(name, pool):
    if pool is not None and name == "deit":
        pytest.skip("DeiT's heads read its two tokens")
    options = {} if pool is None else dict(global_pool=pool)
    for indices in (None, (0,)):
        whole = FAMILIES[name](**options)
        assert spare(FeatureExtractor(whole, indices)) == []
    whole = FAMILIES[name](**options)  # the control: nothing is removed
    idle = spare(whole, partial(whole.forward_intermediates, intermediates_only=True))
    heads = tuple(f"{head}." for head in whole.classifiers)
    assert any(key.startswith(heads) for key in idle)


class Whole(torch.nn.Module):
    """A model that returns maps, and still has its head."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.forward_intermediates(x, intermediates_only=True)


def step_twice(model):
    """Step on every process; a parameter without a gradient makes the second step fail."""
    model = DistributedDataParallel(model)
    for _ in range(2):
        loss = sum(y.square().sum() for y in model(images(2, 32).float()))
        loss.backward()


def two_steps(names):
    for name in names:
        torch.manual_seed(0)
        step_twice(FeatureExtractor(FAMILIES[name](), (0,)))
        with pytest.raises(RuntimeError, match="did not receive grad|were not used"):
            step_twice(Whole(FAMILIES[name]()))


def test_on_two_processes(tmp_path):
    assert together(2, tmp_path, two_steps, list(FAMILIES)) == [0, 0]


def test_what_has_no_maps_is_refused():
    with pytest.raises(ValueError, match=r"features_only \(True\).*mae_photographs"):
        attnlib.create_model("mae_photographs", features_only=True)
    with pytest.raises(ValueError, match=r"out_indices \(2\)"):
        attnlib.create_model("vit_tiny_patch16_224", out_indices=2)
    with pytest.raises(ValueError, match="indices"):
        attnlib.create_model("vit_collages", features_only=True, out_indices=(7,))


@pytest.mark.parametrize("name", BACKBONES)
def test_timms_own_extractor_prunes_our_model(name):
    ours, theirs = pair(name)
    x = images(2, 32).float()
    expected = theirs.eval().forward_intermediates(x, indices=[0], intermediates_only=True)
    extractor = timm_features.FeatureGetterNet(ours.eval(), out_indices=[0])
    found = extractor(x)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert extractor.feature_info.channels() == [found[0].shape[1]]
    assert len(ours.stages) == 1


# the classifier


@pytest.mark.parametrize("name", FAMILIES)
def test_get_classifier_is_what_reset_classifier_makes(name):
    model = FAMILIES[name]()
    for num_classes in (7, 0):
        model.reset_classifier(num_classes)
        heads = model.get_classifier()
        heads = heads if isinstance(heads, tuple) else (heads,)
        assert len(heads) == (2 if name == "deit" else 1)
        for head in heads:
            if num_classes == 0:
                assert isinstance(head, torch.nn.Identity)
            else:
                assert head.out_features == num_classes


@pytest.mark.parametrize("name", BACKBONES)
def test_get_classifier_is_timms(name):
    def names(model):
        heads = model.get_classifier()
        heads = heads if isinstance(heads, tuple) else (heads,)
        return [key for head in heads for key, x in model.named_modules() if x is head]

    ours, theirs = pair(name)
    assert names(ours) == names(theirs)


# groups by depth


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", REGISTERED)
def test_parameters_have_timms_groups(name, coarse):
    ours, theirs = small_pair(name)
    found = group_parameters(ours, ours.group_matcher(coarse=coarse), reverse=True)
    expected = group_parameters(theirs, theirs.group_matcher(coarse=coarse), reverse=True)
    assert found == expected
    assert len(set(found.values())) > 3


@pytest.mark.parametrize("name", REGISTERED)
def test_layer_decay_is_timms(name):
    def scales(model):
        groups = param_groups_layer_decay(model, 0.05, layer_decay=0.5)
        keys = {id(p): key for key, p in model.named_parameters()}
        return {keys[id(p)]: (group["lr_scale"], group["weight_decay"])
                for group in groups for p in group["params"]}  # fmt: skip

    ours, theirs = small_pair(name)
    assert scales(ours) == scales(theirs)
    optimizer = create_optimizer_v2(ours, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    found = {group["lr_scale"] for group in optimizer.param_groups}
    assert found == {scale for scale, _ in scales(theirs).values()}


def test_layers_of_autoformer():
    """timm has no AutoFormer: the depth is that of a ViT."""
    model = FAMILIES["autoformer"]()
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    assert layers["cls_token"] == layers["pos_embed"] == layers["patch_embed.proj.weight"] == 0
    assert layers["blocks.0.attn.proj.weight"] == layers["norm.weight"] == 1
    assert layers["head.weight"] == 2


# timm's other tools


@pytest.mark.parametrize("name", REGISTERED)
def test_transform_and_average(name):
    ours, theirs = small_pair(name)
    ema = ModelEmaV3(ours, decay=0.5)
    before = {key: x.clone() for key, x in ours.state_dict().items()}
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1)
    ema.update(ours)
    for key, x in ema.module.named_parameters():
        torch.testing.assert_close(x, before[key] + 0.5)
    features = attnlib.create_model(name, features_only=True, **REGISTERED[name])
    transform = create_transform(**resolve_model_data_config(ours), is_training=False)
    expected = resolve_model_data_config(features)
    assert str(transform) == str(create_transform(**expected, is_training=False))
    if "img_size" not in REGISTERED[name]:  # timm's description keeps the size of the name
        assert expected == resolve_model_data_config(theirs)
    assert ModelEmaV3(features).module.feature_info == features.feature_info


# tags


def test_a_tag_changes_nothing_but_what_it_says():
    name, tag = "vit_tiny_patch16_224", "augreg_in21k_ft_in1k"
    tagged = attnlib.create_model(f"{name}.{tag}", **SMALL)
    plain = attnlib.create_model(name, **SMALL)
    assert tagged.pretrained_cfg == plain.pretrained_cfg == pretrained_cfg(f"{name}.{tag}")
    assert tagged.pretrained_cfg["tag"] == tag
    assert tagged.data_config == data_config(name) == data_config(f"{name}.{tag}")
    assert data_config(name)["mean"] == (0.5, 0.5, 0.5)
    assert list(tagged.state_dict()) == list(plain.state_dict())


def test_every_tag_is_one_of_timms():
    tags = {name: pretrained_cfg(name)["tag"] for name in list_models()}
    names = [name for name in tags if timm.is_model(name)]
    assert len(names) > 40
    assert [name for name in names if not tags[name]] == []
    wrong = [name for name in names if timm.get_pretrained_cfg(f"{name}.{tags[name]}") is None]
    assert wrong == []


def test_another_tag_is_refused_by_name():
    known = "augreg_in21k_ft_in1k"
    for call in (attnlib.create_model, data_config, pretrained_cfg):
        with pytest.raises(ValueError, match=f"in21k_only.*{known}"):
            call("vit_tiny_patch16_224.in21k_only")
    with pytest.raises(ValueError, match="there are no tags"):
        attnlib.create_model("autoformer_tiny.in1k")
    with pytest.raises(ValueError, match="nearest names: vit_tiny_patch16_224"):
        attnlib.create_model("vit_tin_patch16_224.augreg_in21k_ft_in1k")


def test_names_with_tags_are_listed():
    found = list_models("vit_*_patch16_224.augreg*")
    assert "vit_tiny_patch16_224.augreg_in21k_ft_in1k" in found
    assert set(found) <= set(timm.list_models("vit_*_patch16_224.augreg*", pretrained=True))
    assert all("." not in name for name in list_models())


def test_a_registered_name_with_a_period_is_itself():
    register_model("contract.own", VisionTransformer, img_size=32, patch_size=8, **SMALL)
    try:
        assert attnlib.create_model("contract.own").pretrained_cfg["tag"] == ""
        assert data_config("contract.own")["input_size"] == (3, 32, 32)
        assert list_models("contract.*") == ["contract.own"]
    finally:
        del MODELS["contract.own"]


def test_the_command_line_takes_tags(capsys):
    from attnlib.cli import main

    outputs = []
    for name in ("vit_collages", "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
                 "vit_tiny_patch16_224"):  # fmt: skip
        main(["show", name])
        outputs.append(capsys.readouterr().out)
    assert outputs[1] == outputs[2] != outputs[0]


# arguments of other libraries

DROPOUTS = ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")


@pytest.mark.parametrize(
    "name, word, near",
    [
        ("vit_tiny_patch16_224", "dropout", DROPOUTS),
        ("beit_base_patch16_224", "dropout", DROPOUTS),
        ("autoformer_tiny", "dropout", ("drop_rate", "drop_path_rate")),
        ("deit_tiny_distilled_patch16_224", "dropout", DROPOUTS),
        ("vit_tiny_patch16_224", "num_layers", ("depth",)),
        ("swin_tiny_patch4_window7_224", "depth", ("depths",)),
        ("swinv2_tiny_window8_256", "num_layers", ("depths",)),
        ("tnt_s_patch16_224", "num_heads", ("num_heads_outer",)),
        ("vit_tiny_patch16_224", "image_size", ("img_size",)),
        ("vit_tiny_patch16_224", "num_labels", ("num_classes",)),
        ("vit_tiny_patch16_224", "drop_path_rates", ("drop_path_rate",)),
        ("vit_tiny_patch16_224", "stochastic_depth_prob", ("drop_path_rate",)),
        ("vit_tiny_patch16_224", "zzzz", ("it takes num_classes", "norm_layer")),
        ("detr_resnet50", "droput", ("dropout",)),
        ("mae_vit_base_patch16", "decoder_dim", ("decoder_embed_dim",)),
    ],
)
def test_an_unknown_argument_has_neighbors(name, word, near):
    with pytest.raises(TypeError, match=rf"{word} \(0.1\) is no argument of") as caught:
        attnlib.create_model(name, **{word: 0.1})
    advice = str(caught.value).partition(";")[2]
    assert [one for one in near if one not in advice] == []
    if word == "dropout":
        listed = advice.partition(":")[2].split(",")
        assert sorted(one.strip() for one in listed) == sorted(near)


def test_the_table_of_foreign_names_leads_to_arguments_that_exist():
    known = {word for cls, _, _ in MODELS.values() for word in _arguments_of(cls)}
    assert set(_FOREIGN_NAMES) <= known
