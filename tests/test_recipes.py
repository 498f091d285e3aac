"""The training runs: their loop, their table, the teacher."""

from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib.deit import DistillationLoss
from attnlib.recipes import (
    SMALL,
    _small_run,
    crop_and_flip,
    distill_small,
    number_pairs,
    small_convnet,
    train_classifier,
    train_small,
    train_translator,
)
from helpers import build, images

ROOT = Path(__file__).parent.parent


def halves(n=64):
    """Gray images of 8 × 8 pixels, and whether the left half is the lighter one."""
    x = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return x, (x[..., :4].mean((1, 2, 3)) > x[..., 4:].mean((1, 2, 3))).long()


def student(name="vit"):
    torch.manual_seed(0)
    small = dict(img_size=8, patch_size=4, in_chans=1, num_classes=2, embed_dim=12, depth=1)
    return build(name, **small, num_heads=2)


# --- the loop ---------------------------------------------------------------------------------


def test_every_image_is_shifted_and_mirrored_on_its_own():
    torch.manual_seed(0)
    x = torch.arange(1.0, 37.0).reshape(1, 1, 6, 6).expand(64, 2, 6, 6)
    y = crop_and_flip(x, 2)
    padded = F.pad(x[:1, :1], (2,) * 4)[0, 0]
    windows = [padded[i : i + 6, j : j + 6] for i in range(5) for j in range(5)]
    windows += [w.flip(-1) for w in windows]
    found = {next(k for k, w in enumerate(windows) if torch.equal(w, im[0])) for im in y}
    assert y.shape == x.shape and torch.equal(y[:, 0], y[:, 1]) and len(found) > 25
    assert torch.equal(crop_and_flip(x, 0).sum(), x.sum())


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    x = images(64).float()
    y = (x[:, 0, :8, :8].mean((1, 2)) > 0).long()
    options = dict(steps=40, batch_size=32, lr=3e-3, log_every=20, augment=lambda x: x + 0)
    history = train_classifier(build("vit", num_classes=2), (x, y), (x, y), **options)
    assert [record["step"] for record in history] == [20, 40]
    assert history[1]["loss"] < history[0]["loss"] and history[-1]["accuracy"] > 0.6


def test_training_with_another_loss():
    def loss(model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)

    def twice(model, batch):
        total, count = loss(model, batch)
        return 2 * total, count

    losses, data = [], halves(32)
    for option in ({}, {"loss_fn": loss}, {"loss_fn": twice}):
        history = train_classifier(student(), data, data, steps=1, batch_size=32, **option)
        losses.append(history[0]["loss"])
    assert losses[0] == losses[1] == losses[2] / 2


def test_accuracy_counts_every_test_image_once():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.tensor([0.0, 1.0]))

        def forward(self, x):
            return self.logits.expand(len(x), 2)

    labels = torch.tensor([1] * 9 + [0] * 2)  # the batches of the test, of 4, leave 3
    test = torch.zeros(11, 1, 8, 8), labels
    history = train_classifier(Constant(), halves(), test, steps=1, batch_size=1, lr=1e-9)
    assert history[-1]["accuracy"] == pytest.approx(9 / 11)


# --- the table --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_every_row_of_the_table_trains(name):
    model, history = train_small(name, steps=2, batch_size=8)
    assert history[-1]["step"] == 2 and 0 <= history[-1]["accuracy"] <= 1
    assert type(model) is SMALL[name].model_class and model.num_classes == 10


@pytest.mark.parametrize("name", SMALL)
def test_rows_fit_their_images(name):
    make, (x, y), (unseen, _), _ = _small_run(name, "digits")
    assert make()(x[:2]).shape == (2, 10) and (len(x), len(unseen)) == (1437, 360)


@pytest.mark.parametrize("name", SMALL)
def test_rows_for_cifar_fit_its_images(name):
    model = SMALL[name].model_class(**SMALL[name].cifar, in_chans=3, num_classes=100)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 7e6


def test_options_go_before_those_of_the_table_and_seeds_fix_a_run():
    def run(seed):
        torch.manual_seed(seed)
        model, history = train_small(
            "vit", steps=4, batch_size=8, log_every=2, lr=1e-4, seed=seed
        )
        assert [record["step"] for record in history] == [2, 4]
        assert history[0]["lr"] <= 1e-4
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


# --- a teacher --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "deit"])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_teacher_trains_the_student_and_stays(name, kind):
    learner, teacher = student(name), small_convnet(1, 2, (4, 8))
    before, start = (
        {key: x.clone() for key, x in model.state_dict().items()}
        for model in (teacher, learner)
    )
    loss_fn = DistillationLoss(teacher, kind, weight=0.9, augment=lambda x: x + 0.1)
    options = dict(steps=4, batch_size=16, loss_fn=loss_fn)
    history = train_classifier(learner, halves(), halves(16), **options)
    assert history[-1]["step"] == 4 and 0 <= history[-1]["accuracy"] <= 1
    assert all(torch.equal(x, before[key]) for key, x in teacher.state_dict().items())
    assert teacher.training and not getattr(learner, "distilled_training", False)
    tokens = [key for key in start if "token" in key]
    assert tokens and not any(torch.equal(learner.state_dict()[k], start[k]) for k in tokens)


def test_a_student_that_fails_answers_as_before():
    learner = student("deit")
    teacher = small_convnet(1, 3, (4,))  # of other classes
    with pytest.raises(ValueError, match="must have one shape"):
        train_classifier(
            learner, halves(), halves(), steps=1, loss_fn=DistillationLoss(teacher)
        )
    assert not learner.distilled_training


def test_distill_small_trains_both():
    learner, teacher, history = distill_small(steps=2)
    assert learner(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    assert teacher(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert history[-1]["step"] == 2


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: train_small("resnet"), r"model \('resnet'\) must be one of 'vit', 'deit'"),
        (lambda: train_small("vit", "cats"), r"data \('cats'\) must be one of 'digits', 'cif"),
        (lambda: distill_small("cats"), r"data \('cats'\) must be one of 'digits', 'cifar10'"),
        (lambda: train_small("vit", steps=0), r"steps \(0\) must be an integer of at least 1"),
        (lambda: train_small("vit", lr=0), r"lr \(0\) must be positive"),
        (
            lambda: train_small("vit", batch_size=2000),
            r"batch_size \(2000\) must be at most the n",
        ),
        (
            lambda: train_small("vit", augment=torch.neg, loss_fn=lambda model, batch: 0),
            "augment must be None",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_runs_without_a_seed_begin_with_different_networks():
    """Each begins with the next random numbers, although all take their steps with seed 0."""
    torch.manual_seed(0)
    found = [train_small("vit", steps=1, lr=1e-9)[0] for _ in range(3)]
    weights = [model.blocks[0].mlp.fc1.weight for model in found]
    for i, weight in enumerate(weights):
        for other in weights[:i]:
            assert (weight - other).abs().max() > 0.01
    assert not any(model.training for model in found)


def test_an_interrupted_student_has_a_teacher_that_was_trained_to_its_end():
    teachers = []
    for options in ({}, dict(stop_after=1)):
        torch.manual_seed(0)
        student, teacher, history = distill_small(steps=4, log_every=1, batch_size=8, **options)
        teachers.append(teacher.state_dict())
    assert [row["step"] for row in history] == [1]
    for name, x in teachers[0].items():
        assert torch.equal(x, teachers[1][name])
    assert not student.training


def test_a_translator_leaves_the_random_numbers_of_its_caller():
    tokenizer, parts = number_pairs()
    few = {name: {key: x[:64] for key, x in part.items()} for name, part in parts.items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model, _ = train_translator(tokenizer, few, steps=1, log_every=1, warmup=0)
    assert torch.equal(torch.rand(3), expected) and not model.training
