"""The distilled Vision Transformer and its losses against timm, PyTorch's formulas and finite differences; bad input."""
import functools

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.deit import VisionTransformerDistilled as TimmDeiT
from torch import nn
from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher

from attnlib.deit import (
    DistilledVisionTransformer, distill, distill_small, hard_distillation_loss, small_convnet, soft_distillation_loss,
)
from attnlib.models import create_model, list_models, load_pretrained
from attnlib.vit import VisionTransformer
from backbones import close, images, same_weights

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)
COUNTS = {
    "deit_tiny_patch16_224": 5_717_416, "deit_small_patch16_224": 22_050_664, "deit_base_patch16_224": 86_567_656,
    "deit_tiny_distilled_patch16_224": 5_910_800, "deit_small_distilled_patch16_224": 22_436_432,
    "deit_base_distilled_patch16_224": 87_338_192,
}


def pair(seed=0, **options):
    """The same weights here and in timm."""
    return [model.double() for model in same_weights(DistilledVisionTransformer, TimmDeiT, seed, **SMALL | options)]


# --- timm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
def test_every_name_has_timms_keys_and_shapes(name):
    with torch.device("meta"):
        theirs = timm.create_model(name)
    ours = create_model(name, device="meta")
    shapes = [{key: (x.shape, x.dtype) for key, x in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1] and list(shapes[0]) == list(shapes[1])
    assert sum(p.numel() for p in ours.parameters()) == COUNTS[name] and name in list_models("deit_*")


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_published_sizes_agree_with_timm(name):
    torch.manual_seed(0)
    theirs, ours = timm.create_model(name).eval(), create_model(name).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = images(1, 224)
    with torch.no_grad():
        close(ours(x.float()), theirs(x.float()), 1e-5)
        close(ours.double()(x), theirs.double()(x))


@pytest.mark.parametrize("options", [{}, {"num_classes": 0}, {"qkv_bias": False}, {"in_chans": 1}, {"img_size": (32, 48)}],
                         ids=str)
@pytest.mark.parametrize("distilled", [False, True])
def test_outputs_features_and_gradients_are_timms(options, distilled):
    ours, theirs = (model.train(distilled) for model in pair(**options))
    x = images(2, 32, options.get("in_chans", 3))
    x = torch.cat([x, x[..., :16]], dim=-1) if "img_size" in options else x
    features = ours.forward_features(x)
    close(features, theirs.forward_features(x))
    close(ours.forward_head(features, pre_logits=True), theirs.forward_head(features, pre_logits=True))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    if not options.get("num_classes", 1):
        distilled = False  # without heads there is nothing to return for each
    outputs = []
    for model, y in zip((ours, theirs), inputs):
        model.set_distilled_training(distilled)
        out = model(y)
        assert isinstance(out, tuple) == distilled
        outputs.append(torch.stack(out) if distilled else out)
        (outputs[-1].square() * (torch.arange(len(outputs[-1]))[:, None] + 1.0 if not distilled else 1.0)).sum().backward()
    close(*outputs)
    close(inputs[0].grad, inputs[1].grad)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            close(p.grad, q.grad)


def test_float32_within_1e_5():
    ours, theirs = (model.float().eval() for model in pair())
    close(ours(images().float()), theirs(images().float()), 1e-5)


@pytest.mark.parametrize("arguments", [
    dict(), dict(indices=[0, -1], norm=True), dict(indices=1, intermediates_only=True), dict(return_prefix_tokens=True),
    dict(output_fmt="NLC"),
], ids=str)
def test_intermediates_are_timms(arguments):
    ours, theirs = (model.forward_intermediates(images(), **arguments) for model in pair())
    if not arguments.get("intermediates_only"):
        close(ours[0], theirs[0])
        ours, theirs = ours[1], theirs[1]
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [48, (16, 40)])
def test_input_size_is_changed_as_timm_does(size):
    ours, theirs = (model.float().eval() for model in pair())
    ours.set_input_size(size)
    theirs.set_input_size(size)
    assert torch.equal(ours.pos_embed, theirs.pos_embed)
    x = torch.randn(2, 3, *((size, size) if isinstance(size, int) else size))
    close(ours(x), theirs(x), 1e-5)
    with pytest.raises(ValueError, match="img_size"):
        ours(images().float())


def test_weights_of_another_resolution_are_resampled():
    small, _ = pair()
    large = DistilledVisionTransformer(**SMALL | dict(img_size=48, num_classes=7)).double()
    kept = load_pretrained(large, small.state_dict())
    assert set(kept) == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}
    small.set_input_size(48)
    close(large.forward_features(images(2, 48)), small.forward_features(images(2, 48)))


def test_hugging_face_weights():
    torch.manual_seed(0)
    config = DeiTConfig(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, image_size=32,
                        patch_size=8, num_labels=5, layer_norm_eps=1e-6)
    theirs = DeiTForImageClassificationWithTeacher(config).double().eval()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.1)
    ours = DistilledVisionTransformer(**SMALL).double().eval()
    load_pretrained(ours, theirs.state_dict())
    close(ours(images()), theirs(images()).logits)
    tokens = ours.forward_features(images())
    close(ours.head_dist(tokens[:, 1]), theirs(images()).distillation_logits)  # and not with the heads exchanged


# --- two heads ---------------------------------------------------------------------------------------------------


def test_two_answers_in_distilled_training_and_their_average_else():
    model, x = pair()[0].train(), images()
    assert model(x).shape == (2, 5)
    model.set_distilled_training()
    a, b = model(x)
    tokens = model.forward_features(x)
    close(a, model.head(tokens[:, 0]), 1e-12)
    close(b, model.head_dist(tokens[:, 1]), 1e-12)
    close(model.eval()(x), (a + b) / 2, 1e-12)
    model.train().set_distilled_training(False)
    close(model(x), (a + b) / 2, 1e-12)


@pytest.mark.parametrize("num_classes", [5, 0])
def test_the_last_block_cut_short_changes_nothing(num_classes):
    model, x = pair(num_classes=num_classes)[0], images()
    close(model(x), model.forward_head(model.forward_features(x)), 1e-12)
    seen = []
    model.blocks[-1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    model(x), model.forward_features(x)
    assert seen == [2, 18]


def test_new_heads():
    model, x = pair()[0].eval(), images()
    model.reset_classifier(7, "token")
    assert model(x).shape == (2, 7) and model.num_classes == 7
    assert not model.head.training and not model.head_dist.training
    assert not torch.equal(model.head.weight, model.head_dist.weight)
    model.reset_classifier(0)
    assert isinstance(model.head, nn.Identity) and isinstance(model.head_dist, nn.Identity)
    close(model(x), model.forward_features(x)[:, :2].mean(1), 1e-12)
    assert model.no_weight_decay() == {"pos_embed", "cls_token", "dist_token"} <= dict(model.named_parameters()).keys()
    assert [m.shape for m in model.attention_maps(x)] == [(2, 3, 18, 18)] * 3


def test_checkpointing_changes_no_gradient():
    model, x, gradients = pair()[0].train(), images(), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        gradients.append(torch.autograd.grad(model(x).square().sum(), model.parameters()))
    for a, b in zip(*gradients):
        close(a, b, 1e-12)


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    model, x = pair()[0].train(), images()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x), model(x))
    model.set_distilled_training()
    for a, b in zip(compiled(x), model(x)):
        close(a, b)


def test_exports_with_any_batch():
    model = pair()[0].eval()
    program = torch.export.export(model, (images(),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    for n in (1, 5):
        close(program.module()(images(n)), model(images(n)))


# --- losses ------------------------------------------------------------------------------------------------------


def logits(seed=0):
    return torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LABELS = torch.tensor([0, 5, 2, 2])


def test_hard_loss_is_two_cross_entropies():
    a, b, v = logits()
    want = 0.3 * F.cross_entropy(a, LABELS) + 0.7 * F.cross_entropy(b, v.argmax(1))
    close(hard_distillation_loss(a, b, v, LABELS, weight=0.7), want, 1e-12)
    mixed = F.one_hot(LABELS, 6).double()
    close(hard_distillation_loss(a, b, v, mixed, weight=0.7), want, 1e-12)


@pytest.mark.parametrize("tau", [1.0, 3.0, 20.0])
def test_soft_loss_is_the_authors(tau):
    a, b, v = logits()
    kl = F.kl_div(F.log_softmax(b / tau, 1), F.log_softmax(v / tau, 1), reduction="sum", log_target=True)
    want = 0.4 * F.cross_entropy(a, LABELS) + 0.6 * kl * tau**2 / b.numel()
    close(soft_distillation_loss(a, b, v, LABELS, weight=0.6, temperature=tau), want, 1e-12)


@pytest.mark.parametrize("loss", [hard_distillation_loss, soft_distillation_loss])
def test_losses_have_the_derivatives_of_finite_differences(loss):
    a, b, v = logits()
    assert torch.autograd.gradcheck(lambda a, b: loss(a, b, v, LABELS, weight=0.3), (a.requires_grad_(), b.requires_grad_()))


def test_student_like_its_teacher_has_no_soft_loss():
    a, b, v = logits()
    assert soft_distillation_loss(a, v + 3.0, v, LABELS, weight=1.0) < 1e-12
    assert soft_distillation_loss(a, b, v, LABELS, weight=1.0) > 0


def test_soft_gradient_at_high_temperature_matches_logits():
    z, _, v = logits()
    z.requires_grad_()
    loss = 6 * 4 * soft_distillation_loss(z, z, v, LABELS, weight=1.0, temperature=1e5)
    difference = (z - v).detach()
    close(torch.autograd.grad(loss, z)[0], (difference - difference.mean(1, keepdim=True)) / 6, 1e-4)


# --- training ----------------------------------------------------------------------------------------------------


def data(n=64):
    x = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0, :, :4].mean((1, 2)) > x[:, 0, :, 4:].mean((1, 2))).long()
    return x, y


@pytest.mark.parametrize("cls", [VisionTransformer, DistilledVisionTransformer])
@pytest.mark.parametrize("loss", [hard_distillation_loss, functools.partial(soft_distillation_loss, weight=0.9)])
def test_distill_trains_the_student_and_leaves_the_teacher(cls, loss):
    torch.manual_seed(0)
    teacher = small_convnet(1, 2, (4, 8))
    before = {key: x.clone() for key, x in teacher.state_dict().items()}
    student = cls(img_size=8, patch_size=4, in_chans=1, num_classes=2, embed_dim=12, depth=1, num_heads=2)
    start = {key: x.clone() for key, x in student.state_dict().items()}
    history = distill(student, teacher, data(), data(16), steps=4, batch_size=16, loss=loss, augment=lambda x: x + 0.1)
    assert history[-1]["step"] == 4 and 0 <= history[-1]["accuracy"] <= 1
    assert all(torch.equal(x, before[key]) for key, x in teacher.state_dict().items()) and not teacher.training
    assert not any(torch.equal(x, start[key]) for key, x in student.state_dict().items() if "token" in key)
    assert not getattr(student, "distilled_training", False)


def test_distill_small_runs():
    student, teacher, history = distill_small(steps=2)
    assert student(torch.zeros(1, 1, 8, 8)).shape == teacher(torch.zeros(2, 1, 8, 8))[:1].shape == (1, 10)
    assert history[-1]["step"] == 2


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, message", [
    (dict(global_pool="avg"), r"global_pool \('avg'\) must be 'token'"),
    (dict(class_token=False), r"class_token True"),
    (dict(embed_dim=25), r"embed_dim \(25\) must be divisible by num_heads \(3\)"),
])
def test_impossible_models(options, message):
    with pytest.raises(ValueError, match=message):
        DistilledVisionTransformer(**SMALL | options)


def test_impossible_calls():
    model = pair()[0]
    with pytest.raises(ValueError, match=r"global_pool \('avg'\) must be 'token'"):
        model.reset_classifier(3, "avg")
    assert model(images()).shape == (2, 5)
    with pytest.raises(ValueError, match=r"\(2, 1, 32, 32\) must be images \(B, in_chans, H, W\) with in_chans = 3"):
        model(images(chans=1))


@pytest.mark.parametrize("loss", [hard_distillation_loss, soft_distillation_loss])
def test_impossible_losses(loss):
    a, b, v = logits()
    with pytest.raises(ValueError, match=r"weight \(1.5\) must be from 0 to 1"):
        loss(a, b, v, LABELS, weight=1.5)
    with pytest.raises(ValueError, match=r"teacher_logits of shape \(4, 5\) must have that of logits, \(4, 6\)"):
        loss(a, b, v[:, :5], LABELS)


@pytest.mark.parametrize("tau", [0, -1.0, float("nan")])
def test_impossible_temperature(tau):
    with pytest.raises(ValueError, match=r"temperature \(.*\) must be positive"):
        soft_distillation_loss(*logits(), LABELS, temperature=tau)
