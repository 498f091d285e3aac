"""The distilled Vision Transformer's two heads, and the losses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnlib.deit import hard_distillation_loss, soft_distillation_loss
from attnlib.models import load_pretrained
from helpers import backbone, build, close, images


def test_weights_of_another_resolution_are_resampled():
    small = backbone("deit")
    large = build("deit", img_size=48, num_classes=7).double()
    kept = load_pretrained(large, small.state_dict())
    assert set(kept) == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}
    small.set_input_size(48)
    close(large.forward_features(images(2, 48)), small.forward_features(images(2, 48)))


# --- two heads ---------------------------------------------------------------------------


def test_two_answers_in_distilled_training_and_their_average_else():
    model, x = backbone("deit").train(), images()
    assert model(x).shape == (2, 5)
    model.set_distilled_training()
    a, b = model(x)
    tokens = model.forward_features(x)
    close(a, model.head(tokens[:, 0]), 1e-12)
    close(b, model.head_dist(tokens[:, 1]), 1e-12)
    close(model.eval()(x), (a + b) / 2, 1e-12)
    model.train().set_distilled_training(False)
    close(model(x), (a + b) / 2, 1e-12)


def test_new_heads():
    model, x = backbone("deit").eval(), images()
    assert model.no_weight_decay() == {"pos_embed", "cls_token", "dist_token"}
    model.reset_classifier(7, "token")
    assert model(x).shape == (2, 7) and model.num_classes == 7
    assert not model.head.training and not model.head_dist.training
    assert not torch.equal(model.head.weight, model.head_dist.weight)
    model.reset_classifier(0)
    assert isinstance(model.head, nn.Identity) and isinstance(model.head_dist, nn.Identity)
    close(model(x), model.forward_features(x)[:, :2].mean(1), 1e-12)
    assert [m.shape for m in model.attention_maps(x)] == [(2, 3, 18, 18)] * 3


def test_both_answers_compile():
    torch._dynamo.reset()
    model, x = backbone("deit").train(), images()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x), model(x))
    model.set_distilled_training()
    for a, b in zip(compiled(x), model(x)):
        close(a, b)


# --- losses ------------------------------------------------------------------------------


def logits(seed=0):
    return torch.randn(
        3, 4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


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
    kl = F.kl_div(
        F.log_softmax(b / tau, 1), F.log_softmax(v / tau, 1), reduction="sum", log_target=True
    )
    want = 0.4 * F.cross_entropy(a, LABELS) + 0.6 * kl * tau**2 / b.numel()
    close(soft_distillation_loss(a, b, v, LABELS, weight=0.6, temperature=tau), want, 1e-12)


@pytest.mark.parametrize("loss", [hard_distillation_loss, soft_distillation_loss])
def test_losses_have_the_derivatives_of_finite_differences(loss):
    a, b, v = logits()
    assert torch.autograd.gradcheck(
        lambda a, b: loss(a, b, v, LABELS, weight=0.3), (a.requires_grad_(), b.requires_grad_())
    )


def test_student_like_its_teacher_has_no_soft_loss():
    a, b, v = logits()
    assert soft_distillation_loss(a, v + 3.0, v, LABELS, weight=1.0) < 1e-12
    assert soft_distillation_loss(a, b, v, LABELS, weight=1.0) > 0


def test_soft_gradient_at_high_temperature_matches_logits():
    z, _, v = logits()
    z.requires_grad_()
    loss = 6 * 4 * soft_distillation_loss(z, z, v, LABELS, weight=1.0, temperature=1e5)
    difference = (z - v).detach()
    close(
        torch.autograd.grad(loss, z)[0],
        (difference - difference.mean(1, keepdim=True)) / 6,
        1e-4,
    )


# --- bad input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(global_pool="avg"), r"global_pool \('avg'\) must be one of 'token'"),
        (dict(embed_dim=25), r"embed_dim \(25\) must be divisible by num_heads \(3\)"),
    ],
)
def test_impossible_models(options, message):
    with pytest.raises(ValueError, match=message):
        build("deit", **options)


def test_impossible_calls():
    model = backbone("deit")
    with pytest.raises(ValueError, match=r"global_pool \('avg'\)"):
        model.reset_classifier(3, "avg")
    assert model(images()).shape == (2, 5)
    with pytest.raises(TypeError, match="class_token"):  # a head reads it
        build("deit", class_token=False)


@pytest.mark.parametrize("loss", [hard_distillation_loss, soft_distillation_loss])
def test_impossible_losses(loss):
    a, b, v = logits()
    with pytest.raises(ValueError, match=r"weight \(1.5\)"):
        loss(a, b, v, LABELS, weight=1.5)
    with pytest.raises(ValueError, match=r"dist_logits \(4, 6\), teacher_logits \(4, 5\)"):
        loss(a, b, v[:, :5], LABELS)


@pytest.mark.parametrize("tau", [0, -1.0, float("nan")])
def test_impossible_temperature(tau):
    with pytest.raises(ValueError, match=r"temperature \(.*\)"):
        soft_distillation_loss(*logits(), LABELS, temperature=tau)
