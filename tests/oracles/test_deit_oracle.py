"""DeiT's two heads and its losses beside timm's and formulas in float64."""

import math

import pytest
import torch
from draws import batches, drawn, dtypes, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import example
from hypothesis import strategies as st

from attnlib import deit as module
from attnlib.deit import _check_losses, hard_distillation_loss, soft_distillation_loss
from helpers import close, pair

HALF = (torch.bfloat16, torch.float16)


@drawn(map_sizes(4), st.integers(1, 3), st.integers(0, 4), st.booleans(), seeds, layouts)
def test_both_heads_are_timms(grid, batch, classes, training, seed, layout):
    size = 8 * grid[0], 8 * grid[1]
    found, x = [], normal((batch, 3, *size), seed=seed, layout=layout)
    for model in pair("deit", seed, img_size=size, num_classes=classes):
        model.double().train(training).set_distilled_training()
        images = x.clone().requires_grad_()
        out = model(images)
        out = torch.stack(out) if training else out
        out.square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        features = model.forward_head(model.forward_features(x), pre_logits=True)
        found.append([out, features, images.grad, *grads])
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-9 * max(1, b.abs().max().item()))


# --- losses -----------------------------------------------------------------------------------


def cross_entropy(logits, targets):
    """The mean over images, one number after the other."""
    total = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        shift = max(row)
        log_sum = shift + math.log(sum(math.exp(z - shift) for z in row))
        shares = target if isinstance(target, list) else [i == target for i in range(len(row))]
        total += sum(share * (log_sum - z) for share, z in zip(shares, row))
    return total / len(logits)


def formula_rounding(call):
    """What the differences of large numbers in `cross_entropy` cost."""
    return tolerance(torch.float64) * max(x.double().abs().max().item() for x in call)


@st.composite
def answers(draw, least=1):
    """Logits of two heads and of a teacher, and labels: numbers or probabilities."""
    batch, classes = draw(st.integers(least, 4)), draw(st.integers(1, 6))
    seed, layout, dtype = draw(seeds), draw(layouts), draw(dtypes())
    spread = draw(st.sampled_from((1.0, 0.01, 20.0)))
    logits = [spread * normal((batch, classes), dtype, seed + i, layout) for i in range(3)]
    labels = torch.arange(batch) % classes
    if draw(st.booleans()):
        labels = normal((batch, classes), torch.float64, seed).softmax(-1).to(dtype)
    return [*logits, labels]


def derivatives(loss, logits, dtype):
    """A loss and the gradients of both heads, with logits in a dtype."""
    own, taught = (z.to(dtype).detach().requires_grad_() for z in logits)
    value = loss(own, taught)
    return [value, *torch.autograd.grad(value, (own, taught), allow_unused=True)]


@drawn(answers(), st.sampled_from((0.5, 0.0, 1.0, 0.3)))
def test_the_hard_loss_is_two_cross_entropies(call, weight):
    *logits, teacher, labels = call
    found = hard_distillation_loss(*logits, teacher, labels, weight=weight)
    own, taught, exact, truth = (x.double() if x.is_floating_point() else x for x in call)
    wanted = (1 - weight) * cross_entropy(own, truth)
    wanted += weight * cross_entropy(taught, exact.argmax(-1))
    allowed = tolerance(logits[0].dtype, 4) * max(1, abs(wanted)) + formula_rounding(call)
    assert found.double().item() == pytest.approx(wanted, abs=allowed)


@drawn(answers(), st.sampled_from((0.5, 0.0, 1.0, 0.3)), st.sampled_from((1.0, 3.0, 0.5, 30.0)))
def test_the_soft_loss_is_the_divergence(call, weight, tau):
    logits, teacher, labels = call[:2], call[2], call[3]
    dtype = teacher.dtype

    def loss(own, taught, teacher=teacher, labels=labels):
        return soft_distillation_loss(
            own, taught, teacher, labels, weight=weight, temperature=tau
        )

    found = derivatives(loss, logits, dtype)
    own, taught, exact, truth = (x.double() if x.is_floating_point() else x for x in call)
    p, q = (z.div(tau).softmax(-1) for z in (exact, taught))
    divergence = (p * (p / q.clamp(min=1e-300)).clamp(min=1e-300).log()).sum() / p.numel()
    wanted = (1 - weight) * cross_entropy(own, truth) + weight * tau**2 * divergence.item()
    scale = max(1, abs(wanted))
    exact_cross_entropy = tolerance(dtype, 4) * (weight < 1)
    allowed = exact_cross_entropy + tau**2 * tolerance(
        torch.promote_types(dtype, torch.float32)
    )
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    allowed = allowed * scale + formula_rounding(call)
    assert found[0].double().item() == pytest.approx(wanted, abs=allowed)
    slope = weight * tau * (q - p) / p.numel()
    if weight > 0:
        close(found[2].double(), slope, tau * tolerance(dtype, 4))


@pytest.mark.parametrize("dtype", HALF)
def test_the_soft_loss_of_half_precision_at_a_high_temperature(dtype):
    """The distributions differ by less than the rounding of their logarithms."""
    logits = [normal((4, 10), dtype, seed) for seed in range(3)]
    options = dict(weight=1.0, temperature=20.0)
    found = soft_distillation_loss(*logits, torch.arange(4), **options)
    wanted = soft_distillation_loss(*(z.double() for z in logits), torch.arange(4), **options)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-3) and wanted > 0.01


SHAPES = st.sampled_from(((2, 3), (3, 2), (2, 1), (0, 3)))


@drawn(SHAPES, SHAPES, SHAPES, st.floats(-1, 2) | st.just(float("nan")))
@example((2, 3), (2, 3), (2, 3), 1.0)
@example((0, 3), (0, 3), (0, 3), 0.0)
def test_other_shapes_and_weights_are_refused(a, b, c, weight):
    logits = [torch.zeros(shape) for shape in (a, b, c)]
    if a == b == c and 0 <= weight <= 1:
        _check_losses(*logits, weight)
    else:
        with pytest.raises(ValueError, match=r"logits \(|weight \("):
            _check_losses(*logits, weight)


@drawn(batches)
def test_the_shape_of_a_batch_does_not_matter_to_the_mean(batch):
    """The loss of a batch is the mean of those of its images."""
    if batch == 0:
        return
    logits = [normal((batch, 5), seed=seed) for seed in range(3)]
    labels = torch.arange(batch)
    for loss in (hard_distillation_loss, soft_distillation_loss):
        each = [loss(*(z[i : i + 1] for z in (*logits, labels))) for i in range(batch)]
        close(loss(*logits, labels), torch.stack(each).mean())


@drawn(answers(least=1), st.sampled_from((0.1, 0.5, 1.0)))
def test_labels_are_smoothed_and_decisions_are_not(call, smoothing):
    """(1 - ε) of a target and ε / C for each class (Szegedy et al. 2016)."""
    *logits, teacher, labels = (x.double() if x.is_floating_point() else x for x in call)
    classes = teacher.shape[1]
    shares = labels
    if not labels.is_floating_point():
        shares = torch.eye(classes, dtype=torch.float64)[labels]
    smooth = (1 - smoothing) * shares + smoothing / classes
    for loss in (hard_distillation_loss, soft_distillation_loss):
        found = loss(*logits, teacher, labels, label_smoothing=smoothing, weight=0.3)
        wanted = loss(*logits, teacher, smooth, weight=0.3)
        close(found, wanted, 1e-9 * max(1, abs(wanted.item())))


ORACLES = {
    "DistilledVisionTransformer": test_both_heads_are_timms,
    "_check_losses": test_other_shapes_and_weights_are_refused,
    "hard_distillation_loss": test_the_hard_loss_is_two_cross_entropies,
    "soft_distillation_loss": test_the_soft_loss_is_the_divergence,
}
NOT_HERE = {
    "DistillationLoss": "tests/test_teacher.py",
    "SIZES": "widths and heads of the paper, compared with timm's in test_parity.py",
}


def test_every_public_name_is_tested_here_or_has_a_reason():
    names = ORACLES.keys() | NOT_HERE.keys()
    assert {name for name in names if name[0] != "_"} == set(module.__all__)
