"""What was run for 11_multihead: `python -m benchmarks.multihead COMMAND --out FOLDER`.

    payloads  compare layers with 1 to 8 heads with the bound for four payloads
    digits    compare layers with 0 to 8 heads on scanned digits

Each method gets its learning rate from a validation split, which no later number uses. The
records are FOLDER/heads_COMMAND.json.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC

from attnlib.multihead import MultiHeadAttention
from benchmarks.runner import Commands

RATES = (3e-3, 1e-2, 3e-2)
DIGIT_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)


def fit(model, batch, loss, steps, lr, evaluate, log_every):
    """Adam with a rate that rises and falls once; [step, what `evaluate` says] on the way."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps)
    curve = []
    for step in range(1, steps + 1):
        inputs, target = batch()
        optimizer.zero_grad()
        loss(model(*inputs), target).backward()
        optimizer.step()
        schedule.step()
        if step % log_every == 0 or step == steps:
            curve.append([step, round(evaluate(model), 4)])
    return curve


@torch.no_grad()
def squared_error(model, data):
    inputs, target = data
    return F.mse_loss(model(*inputs), target).item()


def drawn(make, seed, *arguments):
    """What a function draws from a seed of its own, without touching the generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(*arguments)


def tuned(make, batch, valid, test, steps, rates, seeds):
    """A contestant's runs: the first seed at every rate, all seeds at the one best there."""

    def run(lr, seed):
        torch.manual_seed(seed)
        model = make()
        curve = fit(
            model,
            *(batch, F.mse_loss, steps, lr),
            lambda model: squared_error(model, valid),
            max(1, steps // 20),
        )
        return model, dict(lr=lr, seed=seed, curve=curve)

    tries = [run(lr, 0) for lr in rates]
    best = min(tries, key=lambda pair: pair[1]["curve"][-1][1])
    runs = [best] + [run(best[1]["lr"], seed) for seed in range(1, seeds)]
    for model, found in runs:
        found["test"] = round(squared_error(model, test), 4)
    return {
        "parameters": sum(p.numel() for p in make().parameters()),
        "rates": {str(found["lr"]): found["curve"][-1][1] for _, found in tries},
        "runs": [found for _, found in runs],
    }, [model for model, _ in runs]


# --- four payloads ----------------------------------------------------------------------------
def named_payloads(size, n=8, k=4, p=8):
    """(query, addresses, payloads) and the k payloads that the query names, side by side."""
    names = torch.rand(size, n).argsort(-1)[:, :k]  # (B, k), all different
    payloads = torch.randn(size, n, p)
    query = F.one_hot(names, n).float().flatten(1)[:, None]  # (B, 1, k n)
    index = names[..., None].expand(-1, -1, p)
    target = payloads.gather(1, index).flatten(1)[:, None]  # (B, k, p) -> (B, 1, k p)
    return (query, torch.eye(n).expand(size, n, n), payloads), target


def payloads(arguments):
    """Compare layers with 1 to 8 heads, which fetch four payloads, with the bound."""
    tiny = arguments.tiny
    if tiny:
        steps = 4
        seeds = 1
    else:
        steps = 1200
        seeds = 3
    valid = drawn(named_payloads, 100, 5000)
    test = drawn(named_payloads, 101, 20_000)
    found = {}
    for h in (1, 2, 4, 8):
        found[h], _ = tuned(
            lambda: MultiHeadAttention(32, h, kdim=8, vdim=8, bias=False),
            lambda: named_payloads(256),
            *(valid, test, steps, RATES, seeds),
        )
    return {"steps": steps, "heads": found}


# --- digits -----------------------------------------------------------------------------------
class RowClassifier(nn.Module):
    """Rows of an image as tokens, one layer of self-attention, the mean token to 10 classes.

    Without heads the tokens do not attend.
    """

    def __init__(self, num_heads, d=16):
        super().__init__()
        self.embed = nn.Linear(8, d)
        self.position = nn.Parameter(0.02 * torch.randn(8, d))
        self.norm = nn.LayerNorm(d)
        self.attend = MultiHeadAttention(d, num_heads) if num_heads else None
        self.classify = nn.Linear(d, 10)

    def forward(self, images):
        x = self.embed(images) + self.position  # (B, 8, 8) -> (B, 8, d)
        if self.attend is not None:
            x = x + self.attend(self.norm(x))
        return self.classify(x.mean(1))  # (B, 8, d) -> (B, d) -> (B, 10)


def digit_parts():
    """1,000 training images, 300 for validation and 497 for the test, with their labels."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float().unflatten(-1, (8, 8)) / 16  # (1797, 8, 8), from 0 to 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return [(images[part], labels[part]) for part in order.split([1000, 300, 497])]


@torch.no_grad()
def accuracy(model, part):
    return (model(part[0]).argmax(-1) == part[1]).float().mean().item()


def digits(arguments):
    """Compare layers with 0 to 8 heads, all of one width, on scanned digits."""
    tiny = arguments.tiny
    train, valid, test = digit_parts()
    if tiny:
        steps = 4
        seeds = 1
        tries = 1
    else:
        steps = 1000
        seeds = 5
        tries = 2

    def batch():
        chosen = torch.randint(len(train[0]), (128,))
        return (train[0][chosen],), train[1][chosen]

    def run(h, lr, seed):
        torch.manual_seed(seed)
        model = RowClassifier(h)
        log_every = max(1, steps // 10)
        curve = fit(
            model, batch, F.cross_entropy, steps, lr, lambda m: accuracy(m, valid), log_every
        )
        return model, dict(lr=lr, seed=seed, curve=curve)

    found = {}
    for h in (0, 1, 2, 4, 8):
        runs = {(lr, seed): run(h, lr, seed) for lr in DIGIT_RATES for seed in range(tries)}
        rates = {
            lr: sum(runs[lr, seed][1]["curve"][-1][1] for seed in range(tries)) / tries
            for lr in DIGIT_RATES
        }
        best = max(rates, key=rates.get)
        kept = [runs.get((best, seed)) or run(h, best, seed) for seed in range(seeds)]
        for model, own in kept:
            own["test"] = round(accuracy(model, test), 4)
        found[h] = {
            "rates": {str(lr): round(rate, 4) for lr, rate in rates.items()},
            "runs": [own for _, own in kept],
        }
    return {"steps": steps, "heads": found, "baselines": baselines(train, valid, test)}


def baselines(train, valid, test):
    """Test accuracy of two models of scikit-learn, their one setting from the validation."""
    families = {
        "logistic regression": lambda c: LogisticRegression(C=c, max_iter=5000),
        "support vectors": lambda c: SVC(C=c),
    }
    (x, y), (x_valid, y_valid), (x_test, y_test) = (
        (images.flatten(1).numpy(), labels.numpy()) for images, labels in (train, valid, test)
    )
    found = {}
    for name, make in families.items():
        models = [make(c).fit(x, y) for c in (0.01, 0.1, 1, 10, 100, 1000)]
        best = max(models, key=lambda model: model.score(x_valid, y_valid))
        found[name] = {"C": best.C, "test": round(best.score(x_test, y_test), 4)}
    return found


def main(arguments=None):
    commands = Commands(__doc__)
    for function in (payloads, digits):
        name = function.__name__
        commands.experiment(name, function, record=f"heads_{name}")
    commands.run(arguments)


if __name__ == "__main__":
    main()
