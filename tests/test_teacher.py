"""A teacher in the one loop: its loss beside formulas in float64, and what it leaves alone."""

import numpy as np
import pytest
import torch
import torch.nn as nn
from processes import together
from torch.utils.data import DataLoader, TensorDataset

from attnlib.deit import DistillationLoss, DistilledVisionTransformer
from attnlib.finetune import layer_scales
from attnlib.recipes import small_convnet
from attnlib.train import CrossEntropy, fit, load_checkpoint

SMALL = dict(img_size=8, patch_size=4, in_chans=1, num_classes=3, embed_dim=12, depth=2)


def student(seed=0):
    torch.manual_seed(seed)
    return DistilledVisionTransformer(**SMALL, num_heads=2)


def teacher(seed=1):
    torch.manual_seed(seed)
    return small_convnet(1, 3, (4,))


def digits(n=12):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 3


def numbers(logits):
    return logits.detach().double().numpy()


def log_softmax(z):
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def by_the_paper(logits, dist_logits, taught, targets, kind, weight, tau):
    """Equations 2 and 3 of Touvron et al. 2021 in float64; KL per logit as in their code."""
    own = -(targets * log_softmax(logits)).sum(-1).mean()
    if kind == "hard":
        decisions = np.eye(3)[taught.argmax(-1)]
        other = -(decisions * log_softmax(dist_logits)).sum(-1).mean()
    else:
        log_p, log_q = log_softmax(taught / tau), log_softmax(dist_logits / tau)
        other = tau**2 * (np.exp(log_p) * (log_p - log_q)).sum() / log_p.size
    return (1 - weight) * own + weight * other


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("weight, tau, smoothing", [(0.5, 3.0, 0.0), (0.9, 1.0, 0.1)])
@pytest.mark.parametrize("make", ["two heads", "one head", "timm"])
def test_the_loss_is_the_papers(kind, weight, tau, smoothing, make):
    images, labels = digits()
    model, tutor = student().train(), teacher()
    if make == "one head":
        model = small_convnet(1, 3, (5,)).train()
    if make == "timm":
        shape = dict(img_size=8, patch_size=4, in_chans=1, num_classes=3, num_heads=3)
        timm = pytest.importorskip("timm")  # which a second process cannot import
        model = timm.create_model(
            "deit_tiny_distilled_patch16_224", embed_dim=12, depth=2, **shape
        )
    loss_fn = DistillationLoss(
        tutor, kind, weight=weight, temperature=tau, label_smoothing=smoothing
    )
    total, count = loss_fn(model, (images, labels))
    with torch.no_grad():
        taught = tutor.eval()(images)
        if make != "one head":
            model.set_distilled_training(True)
        found = model(images)
    logits, dist_logits = found if isinstance(found, tuple) else (found, found)
    targets = (1 - smoothing) * np.eye(3)[labels.numpy()] + smoothing / 3
    wanted = by_the_paper(
        *map(numbers, (logits, dist_logits, taught)), targets, kind, weight, tau
    )
    assert count == 12 and total.item() / 12 == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_blended_images_have_blended_labels_and_the_teachers_answer(kind):
    images, labels = digits()
    model, tutor = student().train(), teacher().eval()
    loss_fn = DistillationLoss(tutor, kind, mixup=0.8)
    torch.manual_seed(5)
    total, _ = loss_fn(model, (images, labels))
    torch.manual_seed(5)
    share = torch.distributions.Beta(0.8, 0.8).sample().item()
    order = torch.randperm(12)
    assert 0.01 < share < 0.99
    blended = share * images + (1 - share) * images[order]
    model.set_distilled_training(True)
    with torch.no_grad():
        logits, dist_logits = model(blended)
        taught = tutor(blended)
    one_hot = np.eye(3)[labels.numpy()]
    targets = share * one_hot + (1 - share) * one_hot[order.numpy()]
    wanted = by_the_paper(*map(numbers, (logits, dist_logits, taught)), targets, kind, 0.5, 3.0)
    assert total.item() / 12 == pytest.approx(wanted, abs=1e-5)
    # in evaluation nothing is blended, and nothing drawn
    before = torch.get_rng_state()
    loss_fn(model.eval(), (images, labels))
    assert torch.equal(torch.get_rng_state(), before)


def test_labels_that_a_loader_has_blended():
    """Probabilities, as torchvision's MixUp in `collate_fn` gives them."""
    v2 = pytest.importorskip("torchvision.transforms.v2")
    mixed = v2.MixUp(num_classes=3, alpha=0.5)
    model, data = student(), digits()

    def collate(rows):
        return mixed(*torch.utils.data.default_collate(rows))

    loader = DataLoader(TensorDataset(*data), batch_size=4, collate_fn=collate)
    tutor = teacher()
    history = fit(model, loader, data, loss_fn=DistillationLoss(tutor), epochs=1)
    assert np.isfinite(history[-1]["loss"]) and 0 <= history[-1]["accuracy"] <= 1


def test_the_teacher_stays_and_is_no_part_of_the_checkpoint(tmp_path):
    tutor = nn.Sequential(nn.Dropout(0.5), teacher()).train()  # with batch norms
    before = {name: x.clone() for name, x in tutor.state_dict().items()}
    model, path = student(), tmp_path / "run.json"
    fit(model, digits(), digits(6), loss_fn=DistillationLoss(tutor), epochs=2, batch_size=4,
        checkpoint=path)  # fmt: skip
    assert all(torch.equal(x, before[name]) for name, x in tutor.state_dict().items())
    assert tutor.training and tutor[0].training
    assert all(p.grad is None for p in tutor.parameters())
    assert not model.distilled_training
    tensors, _ = load_checkpoint(path)
    own = {name.split(".", 1)[1] for name in tensors if name.startswith("model.")}
    assert own == set(model.state_dict())


def test_a_student_with_a_teacher_resumes_exactly(tmp_path):
    def run(path, **options):
        model = student()
        loss_fn = DistillationLoss(teacher(), "soft", mixup=0.5, augment=torch.neg)
        fit(model, digits(), loss_fn=loss_fn, epochs=4, batch_size=4, checkpoint=path,
            ema=0.5, lr_scale=layer_scales(model, 0.5), **options)  # fmt: skip
        return model

    whole = run(tmp_path / "a.json")
    run(tmp_path / "b.json", stop_after=6)
    again = run(tmp_path / "b.json")
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_two_processes_learn_what_one_learns(tmp_path):
    """Up to rounding; DDP wraps the student, whose heads are found nevertheless."""
    for processes in (1, 2):
        codes = together(processes, tmp_path, _taught, tmp_path / f"{processes}.json")
        assert codes == [0] * processes
    (one, state), (two, other) = (load_checkpoint(tmp_path / f"{n}.json") for n in (1, 2))
    for a, b in zip(state["history"], other["history"], strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4)
    start = student().head_dist.weight
    assert not torch.allclose(one["model.head_dist.weight"], start, atol=1e-4)


def _taught(path):
    tutor = teacher().eval()
    fit(student(), digits(), loss_fn=DistillationLoss(tutor), epochs=2, batch_size=4,
        checkpoint=path)  # fmt: skip


def test_validation_is_that_of_cross_entropy():
    model, data = student().eval(), digits()
    with torch.no_grad():
        found = DistillationLoss(teacher(), augment=torch.zeros_like).metrics(model, data)
        wanted = CrossEntropy().metrics(model, data)
    assert found == wanted


def test_images_are_augmented_in_training_only():
    images, labels = digits()
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append(x.mean().item())
            return super().forward(x.flatten(1))

    for make in (CrossEntropy, lambda **options: DistillationLoss(Watched(64, 3), **options)):
        seen.clear()
        loss_fn = make(augment=lambda x: 0 * x + 7)
        model = Watched(64, 3).train()
        loss_fn(model, (images, labels))
        assert set(seen) == {7.0}
        seen.clear()
        loss_fn(model.eval(), (images, labels))
        loss_fn.metrics(model, (images, labels))
        assert seen and 7.0 not in seen


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(teacher="resnet"), TypeError, r"teacher \('resnet'\) must be a module"),
        (dict(kind="firm"), ValueError, r"kind \('firm'\) must be 'hard' or 'soft'"),
        (dict(weight=1.5), ValueError, r"weight \(1.5\)"),
        (dict(label_smoothing=-1), ValueError, r"label_smoothing \(-1\)"),
        (dict(temperature=0), ValueError, r"temperature \(0\)"),
        (dict(mixup=-0.1), ValueError, r"mixup \(-0.1\)"),
        (dict(augment="flip"), TypeError, r"augment \('flip'\)"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        DistillationLoss(**dict(teacher=teacher()) | options)


def test_a_teacher_of_other_classes_or_without_logits():
    other = small_convnet(1, 4, (4,))
    with pytest.raises(ValueError, match=r"teacher_logits \(12, 4\) must have one shape"):
        DistillationLoss(other)(student().train(), digits())

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match="teacher returned a tuple; it must return logits"):
        DistillationLoss(Pair())(student().train(), digits())
