"""The parts of training runs are what short formulas say, for batches of every size."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from draws import batches, drawn, layouts, map_sizes, normal, seeds, tolerance
from hypothesis import strategies as st

from attnlib import recipes
from attnlib.decoding import greedy
from attnlib.deit import DistillationLoss
from attnlib.recipes import accuracy, classification_loss, crop_and_flip, train_classifier
from attnlib.train import shuffled_batches

pytestmark = pytest.mark.usefixtures("quiet")


def linear(classes=3, seed=0):
    """Logits of images (B, 1, 2, 2)."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, classes))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(normal(p.shape, torch.float32, seed))
    return model


def pairs(n, classes, seed=0):
    labels = torch.arange(n) % classes
    return normal((n, 1, 2, 2), torch.float32, seed), labels


@drawn(st.integers(1, 9), st.integers(1, 4), st.integers(1, 12), seeds)
def test_accuracy(n, classes, batch_size, seed):
    """One by one, whatever the batch."""
    model, (images, labels) = linear(classes, seed), pairs(n, classes, seed)
    with torch.no_grad():
        right = [model(x[None])[0].argmax() == y for x, y in zip(images, labels)]
        found = accuracy(model, (images, labels), batch_size)["accuracy"]
    assert found.item() == pytest.approx(sum(right).item() / n)


@drawn(
    batches, st.integers(1, 4), st.sampled_from((torch.float64, torch.float32, torch.bfloat16))
)
def test_classification_loss(n, classes, dtype):
    """The sum of the negative logarithms of the labels' probabilities, 0 for no image."""
    model, (images, labels) = linear(classes).to(dtype), pairs(n, classes)
    found, count = classification_loss(model, (images.to(dtype), labels))
    assert count == n
    logits = model(images.to(dtype)).double()
    wanted = -logits.log_softmax(-1)[torch.arange(n), labels].sum()
    assert found.dtype == dtype and found.shape == ()
    assert (found - wanted).abs() <= tolerance(dtype) * max(1, wanted.abs())


@drawn(
    batches,
    map_sizes(5),
    st.integers(0, 6),
    layouts,
    seeds,
    st.sampled_from((torch.float32, torch.bfloat16, torch.uint8)),
)
def test_crops_and_mirrors(n, size, padding, layout, seed, dtype):
    """Each image is one of the windows of the padded one, or its mirror image, of any dtype."""
    x = normal((n, 2, *size), torch.float32, seed, layout)
    x = (20 * x.abs() + 1).to(dtype)
    before = x.clone()
    torch.manual_seed(seed)
    found = crop_and_flip(x, padding)
    assert found.shape == x.shape and found.dtype == dtype and torch.equal(x, before)
    wide = F.pad(x, (padding,) * 4)
    shifts = range(2 * padding + 1)
    for image, y in zip(wide, found):
        windows = [image[:, i : i + size[0], j : j + size[1]] for i in shifts for j in shifts]
        assert any(torch.equal(y, w) or torch.equal(y, w.flip(-1)) for w in windows)


def test_a_padding_is_not_negative():
    with pytest.raises(ValueError, match=r"padding \(-1\)"):
        crop_and_flip(torch.zeros(1, 1, 2, 2), -1)


@drawn(
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.integers(1, 4), max_size=3),
    map_sizes(6),
    batches,
)
def test_convolutional_teachers(channels, classes, widths, size, batch):
    """Layer by layer by PyTorch's functions, half the resolution at each further width."""
    model = recipes.small_convnet(channels, classes, tuple(widths)).double().eval()
    x = images = normal((batch, channels, *size))
    layers = iter(model)
    for i, width in enumerate(widths):
        for stride in (2 if i else 1, 1):
            conv, norm, _ = next(layers), next(layers), next(layers)
            x = F.conv2d(x, conv.weight, None, stride, padding=1)
            moments = norm.running_mean, norm.running_var, norm.weight, norm.bias
            x = F.relu(F.batch_norm(x, *moments))
        assert x.shape[1] == width
    wanted = F.linear(x.mean((2, 3)), model[-1].weight, model[-1].bias)
    with torch.no_grad():
        torch.testing.assert_close(model(images), wanted, rtol=0, atol=1e-12)


# --- runs -------------------------------------------------------------------------------------


def plain_loop(model, batches, loss_fn, steps, lr):
    """AdamW with half a cosine, after a warm-up of a tenth of the steps."""
    decay, rest = (
        [p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False)
    )
    groups = [dict(params=decay, weight_decay=0.05), dict(params=rest, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    assert steps < 10  # no warm-up
    for step in range(steps):
        rate = 0.5 * (1 + torch.tensor(torch.pi * step / steps).cos().item())
        for group in optimizer.param_groups:
            group["lr"] = lr * rate
        optimizer.zero_grad()
        loss_fn(model, *batches(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@drawn(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), seeds)
def test_classifiers_are_trained_as_by_a_plain_loop(steps, batch_size, classes, seed):
    train, test = pairs(5, classes, seed), pairs(4, classes, seed + 1)
    model, plain = linear(classes), linear(classes)
    options = dict(steps=steps, batch_size=batch_size, lr=0.01, seed=seed)
    history = train_classifier(model, train, test, **options)
    batches = shuffled_batches(*train, batch_size=batch_size, seed=seed)
    plain_loop(plain, batches, lambda m, x, y: F.cross_entropy(m(x), y), steps, 0.01)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        right = (model(test[0]).argmax(-1) == test[1]).float().mean().item()
    assert [row["step"] for row in history] == [steps] and history[0]["accuracy"] == right


@drawn(st.integers(1, 3), st.integers(1, 5), seeds)
def test_students_learn_from_labels_and_teacher(steps, batch_size, seed):
    """A student with one head: half of each cross-entropy; the teacher stays as it is."""
    train, test = pairs(5, 3, seed), pairs(4, 3, seed + 1)
    student, plain = linear(3), linear(3)
    teacher = nn.Sequential(nn.Dropout(0.9), linear(3, 5)).train()
    before = copy.deepcopy(teacher.state_dict())
    options = dict(steps=steps, batch_size=batch_size, lr=0.01, seed=seed)
    train_classifier(student, train, test, loss_fn=DistillationLoss(teacher), **options)
    assert teacher.training
    assert all(torch.equal(x, before[name]) for name, x in teacher.state_dict().items())

    teacher.eval()

    def loss(model, x, y):
        taught = teacher(x).argmax(-1)
        logits = model(x)
        return 0.5 * F.cross_entropy(logits, y) + 0.5 * F.cross_entropy(logits, taught)

    batches = shuffled_batches(*train, batch_size=batch_size, seed=seed)
    plain_loop(plain, batches, loss, steps, 0.01)
    for a, b in zip(student.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- numbers ----------------------------------------------------------------------------------


@drawn(st.lists(st.integers(0, 999_999), min_size=1, max_size=3))
def test_names_that_are_right(numbers):
    """Said letter by letter: by the recorded translator, which knows most."""
    model, tokenizer = recipes.translator()
    assert not model.training and model.max_length == recipes.small_transformer().max_length
    src = recipes.encode(tokenizer, recipes.number_words(numbers, "en"))
    part = dict(numbers=numbers, src=src)
    wanted = recipes.number_words(numbers, "de")
    right = 0
    for row, name in zip(src, wanted):
        kept = row[None, : int((row != 0).sum())]  # alone, without padding
        right += recipes.decode(tokenizer, greedy(model, kept, 48)) == [name]
    found = recipes.translation_accuracy(model, tokenizer, part)
    assert found == right / len(numbers)
    assert recipes.translation_accuracy(model, tokenizer, part, max_length=1) == 0.0


EXPERIMENT = "an experiment: tests/test_recipes.py"
ORACLES = {
    "accuracy": test_accuracy,
    "classification_loss": test_classification_loss,
    "crop_and_flip": test_crops_and_mirrors,
    "small_convnet": test_convolutional_teachers,
    "train_classifier": test_classifiers_are_trained_as_by_a_plain_loop,
    "translation_accuracy": test_names_that_are_right,
    "translator": test_names_that_are_right,
    "small_transformer": test_names_that_are_right,
}
NOT_HERE = {
    "CIFAR_RECIPE": "settings",
    "_VIT": "settings",
    "_WORDS": "settings",
    "_SWIN_DIGITS": "settings",
    "_SWIN_RECIPE": "settings",
    "_SWIN_CIFAR": "settings",
    "SmallRun": "a row of the table",
    "SMALL": "a table of settings: tests/test_recipes.py",
    "train_small": EXPERIMENT,
    "_small_run": EXPERIMENT,
    "distill_small": EXPERIMENT,
    "number_pairs": EXPERIMENT,
    "train_translator": EXPERIMENT,
}


def test_every_public_name_is_here_or_said_to_be_elsewhere():
    assert not ORACLES.keys() & NOT_HERE.keys()
    assert set(recipes.__all__) == {
        name for name in ORACLES.keys() | NOT_HERE.keys() if name[0] != "_"
    }
