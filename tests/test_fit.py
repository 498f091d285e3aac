"""`fit` with datasets, loaders and tensors: what it draws, reports, keeps, and goes on with."""

import random
import sys

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from processes import together
from signatures import unchecked
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from attnlib.finetune import layer_scales
from attnlib.train import CrossEntropy, fit, load_checkpoint, shuffled_batches
from attnlib.vit import VisionTransformer


class Noisy(Dataset):
    """Points whose class is their half plane, with noise of all three kinds of generators."""

    classes = ["left", "right"]

    def __init__(self, length=40):
        self.points = torch.linspace(-1, 1, length)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([self.points[i], *noise]), int(self.points[i] > 0)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def same(one, two):
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def weighted():
    """A loader whose sampler has weights and a generator of its own."""
    weights = torch.linspace(0.1, 1, 40)
    generator = torch.Generator().manual_seed(7)
    sampler = WeightedRandomSampler(weights, 40, generator=generator)
    return DataLoader(Noisy(), batch_size=8, sampler=sampler)


def shuffling():
    return RandomSampler(Noisy(), generator=torch.Generator().manual_seed(9))


SOURCES = {
    "dataset": Noisy,
    "shuffled loader": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True),
    "uneven loader": lambda: DataLoader(Noisy(), batch_size=7, shuffle=True),
    "loader with workers": lambda: DataLoader(
        Noisy(), batch_size=8, shuffle=True, num_workers=2
    ),
    "loader with weights": weighted,
    "loader with batches": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(shuffling(), batch_size=8, drop_last=False)
    ),
    "tensors": lambda: (torch.linspace(-1, 1, 160).view(40, 4), torch.arange(40) % 2),
}
RUN = dict(epochs=3, batch_size=8, lr=1e-2, log_every=2, seed=4)


# --- resuming ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("stop", [4, 6, 10])
def test_a_resumed_run_is_an_uninterrupted_one(tmp_path, source, stop):
    """Also in the midst of an epoch; and Python's and NumPy's generators are left alone."""
    make = SOURCES[source]
    whole, first, second = network(), network(), network()
    valid = SOURCES["tensors"]()
    run = dict(RUN, ema=0.8)
    history = fit(whole, make(), valid, **run)
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    kept = dict(checkpoint=tmp_path / "a.json")
    fit(first, make(), valid, **run, **kept, stop_after=stop)
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    random.seed(2)
    np.random.seed(2)
    again = fit(second, make(), valid, **run, **kept)
    assert again == history
    assert same(whole, second) and not same(first, second)


def test_draws_do_not_depend_on_the_number_of_workers():
    one, two = network(), network()
    fit(one, Noisy(), **RUN)
    fit(two, Noisy(), **RUN, num_workers=2)
    assert same(one, two)


def test_an_epoch_has_each_item_once_and_another_order_than_the_last():
    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0][:, 0])
        return model(batch[0]).square().mean()

    fit(network(), Noisy(), loss_fn=loss_fn, epochs=2, batch_size=8)
    first, second = torch.cat(seen[:5]), torch.cat(seen[5:])
    assert torch.equal(first.sort().values, Noisy().points)
    assert torch.equal(second.sort().values, Noisy().points) and not torch.equal(first, second)


def test_noise_differs_from_epoch_to_epoch_and_from_item_to_item():
    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0][:, 1:])
        return model(batch[0]).square().mean()

    fit(network(), Noisy(), loss_fn=loss_fn, epochs=2, batch_size=8)
    assert len(torch.cat(seen).unique()) == 2 * 40 * 3


@pytest.mark.parametrize("source", ["loader with weights", "loader with batches"])
def test_generators_of_a_loader_go_on_as_before(source):
    loader = SOURCES[source]()
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    before = sampler.generator.get_state()
    fit(network(), loader, **RUN | dict(batch_size=None))
    assert torch.equal(sampler.generator.get_state(), before)


def test_workers_that_draw_on_are_refused(tmp_path):
    loader = DataLoader(Noisy(), batch_size=8, num_workers=1, persistent_workers=True)
    with pytest.raises(ValueError, match=r"persistent_workers \(True\)"):
        fit(network(), loader, epochs=1, checkpoint=tmp_path / "a.json")


def test_two_processes_load_their_own_rows(tmp_path):
    """The mean over both is that of one process, up to rounding; there is no dropout."""
    for processes in (1, 2):
        codes = together(processes, tmp_path, _train, tmp_path / f"{processes}.json")
        assert codes == [0] * processes
    (one, state), (two, other) = (load_checkpoint(tmp_path / f"{n}.json") for n in (1, 2))
    for a, b in zip(state["history"], other["history"], strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)


def _train(path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    fit(model, Noisy(), **RUN, checkpoint=path)


# --- losses -----------------------------------------------------------------------------------


def test_a_mean_is_a_total_and_a_number():
    def mean(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def total(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    one, two, three = network(), network(), network()
    history = fit(one, Noisy(), loss_fn=mean, **RUN)
    others = fit(two, Noisy(), loss_fn=total, **RUN)
    losses = [record["loss"] for record in history]
    assert [record["loss"] for record in others] == pytest.approx(losses)
    fit(three, Noisy(), **RUN)  # the loss of a classifier is the default
    for a, b, c in zip(one.parameters(), two.parameters(), three.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert torch.equal(b, c)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy(smoothing, dtype):
    torch.manual_seed(0)
    model = nn.Linear(5, 3).to(dtype)
    images, labels = torch.randn(7, 5, dtype=dtype), torch.randint(3, (7,))
    logs = model(images).double().log_softmax(-1)
    targets = (1 - smoothing) * F.one_hot(labels, 3) + smoothing / 3
    loss_fn = CrossEntropy(label_smoothing=smoothing)
    total, count = loss_fn(model, (images, labels))
    assert count == 7
    torch.testing.assert_close(total.double(), -(targets * logs).sum(), rtol=1e-5, atol=1e-5)
    found = loss_fn.metrics(model, (images, labels))
    assert found["accuracy"][0] == (logs.argmax(-1) == labels).sum()
    expected = -logs[torch.arange(7), labels].sum()
    torch.testing.assert_close(found["valid_loss"][0].double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"label_smoothing \(1.5\)"):
        CrossEntropy(1.5)


def test_batches_may_be_dicts():
    class Named(Noisy):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return {"x": x, "y": y}

    one, two = network(), network()
    fit(one, Named(), loss_fn=lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), **RUN)
    fit(two, Noisy(), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]), **RUN)
    assert same(one, two)


# --- what is reported and kept ----------------------------------------------------------------


def test_validation_is_the_mean_over_all_rows():
    valid = torch.randn(23, 4), torch.randint(2, (23,))
    for some in (valid, TensorDataset(*valid), DataLoader(TensorDataset(*valid), 5)):
        records = {}

        def look(model, record, records=records):
            with torch.no_grad():
                logits = model.eval()(valid[0]).double()
            records[record["step"]] = F.cross_entropy(logits, valid[1]).item()
            assert record["accuracy"] == pytest.approx(
                (logits.argmax(-1) == valid[1]).double().mean().item()
            )

        history = fit(network(), Noisy(), some, callback=look, **RUN)
        expected = [records[record["step"]] for record in history]
        assert [record["valid_loss"] for record in history] == pytest.approx(expected)


def test_a_loss_without_metrics_is_reported_itself():
    history = fit(
        network(), Noisy(), Noisy(), loss_fn=lambda m, b: m(b[0]).square().mean(), **RUN
    )
    assert all(set(record) == {"step", "loss", "lr", "valid_loss"} for record in history)
    assert history[-1]["valid_loss"] < history[0]["valid_loss"]


def test_records_are_printed_if_there_is_validation_or_a_wish(capsys, monkeypatch):
    fit(network(), Noisy(), **RUN)
    fit(network(), Noisy(), Noisy(), verbose=False, **RUN)
    assert capsys.readouterr().out == ""
    history = fit(network(), Noisy(), verbose=True, **RUN)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(history) and lines[0].endswith(f"loss {history[0]['loss']:.4g}")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    fit(network(), Noisy(), **RUN)
    assert capsys.readouterr().out.splitlines() == lines
    history = fit(network(), Noisy(), Noisy(), **dict(RUN, log_every=None))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 == len(history) and lines[1].startswith("epoch 2, loss 0.")
    assert f"accuracy {history[-1]['accuracy']:.4g}" in lines[-1]


def test_the_model_has_its_best_weights(tmp_path):
    states = {}

    def look(model, record):
        states[record["step"]] = {k: x.clone() for k, x in model.state_dict().items()}

    class Falling(CrossEntropy):
        """Its accuracy is best at the third record."""

        values = [0.1, 0.5, 0.9, 0.9, 0.3, 0.2, 0.2, 0.2]

        def metrics(self, model, batch):
            found = super().metrics(model, batch)
            return found | {"accuracy": (self.values[len(states)], 1)}

    model = network()
    valid = TensorDataset(torch.randn(8, 4), torch.randint(2, (8,)))
    path = tmp_path / "a.json"
    run = dict(RUN, checkpoint=path)
    history = fit(model, Noisy(), valid, loss_fn=Falling(), callback=look, **run)
    assert [record["accuracy"] for record in history][2] == 0.9
    best, last = states[history[2]["step"]], states[history[-1]["step"]]
    assert all(torch.equal(x, best[name]) for name, x in model.state_dict().items())
    tensors, _ = load_checkpoint(path)
    for name in best:
        assert torch.equal(tensors[f"best.{name}"], best[name])
        assert torch.equal(tensors[f"model.{name}"], last[name])


def test_patience_and_callbacks_stop_a_run(tmp_path):
    class Constant(CrossEntropy):
        def metrics(self, model, batch):
            return {"valid_loss": (1.0, 1)}

    run = dict(RUN, checkpoint=tmp_path / "a.json", patience=3)
    history = fit(network(), Noisy(), Noisy(), loss_fn=Constant(), **run)
    assert [record["step"] for record in history] == [2, 4, 6, 8]  # the first is the best
    assert fit(network(), Noisy(), Noisy(), loss_fn=Constant(), **run) == history
    stopped = fit(network(), Noisy(), callback=lambda m, record: record["step"] == 4, **RUN)
    assert [record["step"] for record in stopped] == [2, 4]
    with pytest.raises(ValueError, match=r"patience \(0\)"):
        fit(network(), Noisy(), Noisy(), **dict(RUN, patience=0))


def test_the_moving_average_is_pytorchs():
    model = network()
    peer = AveragedModel(network(), multi_avg_fn=get_ema_multi_avg_fn(0.7))
    seen = []

    def loss_fn(net, batch):
        if seen:  # the weights after the step before
            peer.update_parameters(net)
        seen.append(1)
        return F.cross_entropy(net(batch[0]), batch[1])

    fit(model, Noisy(), loss_fn=loss_fn, ema=0.7, **RUN)
    plain = network()
    fit(plain, Noisy(), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]), **RUN)
    peer.update_parameters(plain)
    for a, b in zip(model.parameters(), peer.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not same(model, plain)
    with pytest.raises(ValueError, match=r"ema \(1.0\)"):
        fit(network(), Noisy(), ema=1.0, **RUN)


def test_the_average_is_what_is_evaluated():
    seen = []

    def evaluate(model):
        seen.append([p.clone() for p in model.parameters()])
        return {}

    model = network()
    fit(model, Noisy(), ema=0.9, evaluate=evaluate, **RUN)
    for a, b in zip(model.parameters(), seen[-1], strict=True):
        assert torch.equal(a, b)


def test_rates_by_layer():
    torch.manual_seed(0)
    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2,
                              in_chans=1, num_classes=2)  # fmt: skip
    before = {name: p.clone() for name, p in model.named_parameters()}
    data = torch.randn(16, 1, 8, 8), torch.randint(2, (16,))
    fit(model, data, epochs=1, batch_size=8, lr_scale=layer_scales(model, 0.0))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_losses_of_torch_are_explained(loss_fn):
    with pytest.raises(TypeError, match="lambda model, batch"):
        fit(network(), Noisy(), loss_fn=loss_fn, **RUN)


def test_batches_without_labels_need_a_loss():
    with pytest.raises(TypeError, match="loss_fn=text_loss"):
        fit(network(), (torch.randn(8, 4),), steps=1, batch_size=4)


# --- what is refused --------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(4), 1


@pytest.mark.parametrize(
    "train, options, error, message",
    [
        (Noisy(), dict(batch_size=8), ValueError, r"epochs \(None\) or steps \(None\)"),
        (
            Noisy(),
            dict(steps=3, epochs=3, batch_size=8),
            ValueError,
            r"epochs \(3\) or steps",
        ),
        (Noisy(), dict(epochs=0, batch_size=8), ValueError, r"epochs \(0\)"),
        (Noisy(3), dict(epochs=1), ValueError, r"batch_size \(64\)"),
        (lambda step: None, dict(epochs=2), ValueError, r"epochs \(2\)"),
        (lambda step: None, dict(steps=2), TypeError, "train gave None"),
        (Endless(), dict(steps=2), TypeError, r"train \(of type Endless\)"),
        (DataLoader(Endless()), dict(steps=2), TypeError, r"train \(of type DataLoader\)"),
    ],
)
def test_data_that_cannot_be_trained_on(train, options, error, message):
    with pytest.raises(error, match=message):
        fit(network(), train, **options)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: Subset(x, range(16)), DataLoader])
def test_a_model_with_other_classes_is_refused(wrap):
    model = network()
    model.num_classes = 1000
    with pytest.raises(ValueError, match="1000 classes, and train has 2"):
        fit(model, wrap(Noisy()), epochs=1, batch_size=None if wrap is DataLoader else 8)


@pytest.mark.parametrize("name", ["batch_size", "num_workers"])
def test_what_a_loader_or_a_function_decides_is_not_given(name):
    """Unless there is other data, for which it counts."""
    data = torch.randn(8, 4), torch.arange(8) % 2
    loader = DataLoader(TensorDataset(*data), batch_size=4)
    batches = shuffled_batches(*data, batch_size=4)
    for train, kind in ((loader, "DataLoader"), (batches, "function")):
        with pytest.raises(ValueError, match=rf"{name} \(2\) must be left out if .* {kind}"):
            fit(network(), train, steps=1, **{name: 2})
        with pytest.raises(ValueError, match=rf"{name} \(2\) must be left out"):
            fit(network(), train, loader, steps=1, **{name: 2})
    fit(network(), batches, data, steps=1, batch_size=2)
    fit(network(), loader, data, steps=1, batch_size=2)


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), 0, -1.0, True, None])
def test_a_rate_is_a_positive_number(lr):
    with pytest.raises(ValueError, match=r"lr \(.*\) must be positive, a finite number"):
        with unchecked():
            fit(network(), Noisy(), epochs=1, batch_size=8, lr=lr)
    for kind in (np.float32, np.float64, int):
        with unchecked():
            fit(network(), Noisy(), epochs=1, batch_size=8, lr=kind(1))


def test_a_model_may_bring_its_own_loss():
    class Halver(nn.Linear):
        @staticmethod
        def default_loss(model, batch):
            return (model(batch[0]) - batch[0] / 2).square().mean()

    model = Halver(3, 3)
    x = torch.randn(16, 3)
    history = fit(model, (x,), steps=200, batch_size=16, lr=0.1, log_every=100)
    assert history[-1]["loss"] < 0.01
    with pytest.raises(TypeError, match="a batch is a tuple of length 1"):
        fit(nn.Linear(3, 3), (x,), steps=1, batch_size=16)  # control


def test_the_former_order_of_arguments_still_works():
    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    batches = shuffled_batches(*SOURCES["tensors"](), batch_size=8)
    one, two = network(), network()
    fit(one, batches, loss_fn=loss_fn, steps=3)
    with pytest.warns(DeprecationWarning, match="since version 0.3"), unchecked():
        fit(two, loss_fn, batches, steps=3)
    assert same(one, two)
