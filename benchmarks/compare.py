"""Chapter 98: wrong models that train well, and the judgment of the checker.

The command `losses` trains a small GPT and some wrong variants of it on the text of the book,
each with three seeds, and records the losses on held-out text. The command `cases` compares the
implementations in a folder, correct ones and wrong ones, with their references, and records
each verdict and the mistakes that were named.
"""

import importlib.util
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F

from attnlib import data, mistakes
from attnlib.compare import Report, compare, reference
from benchmarks.basics import reason
from benchmarks.runner import Commands, Runs

RENAMED = {"norm_pix": "norm_pix_loss"}  # arguments of references in some cases
SIZES = dict(num_heads=4, depth=2)
WIDTH = 64
LENGTH = 64
VARIANTS = (
    "none",
    "scaled by the model's width",
    "residual from the norm's output",
    "heads split by view alone",
)


# --- wrong models that train well -------------------------------------------------------------


def characters():
    """Return the book's text as numbers, for training and validation, and the vocabulary."""
    text = data.book_text()[:330_000]
    vocabulary = sorted(set(text))
    numbers = {character: i for i, character in enumerate(vocabulary)}
    tokens = torch.tensor([numbers[character] for character in text])
    return tokens[:300_000], tokens[300_000:], len(vocabulary)


def new_weights(vocabulary, generator):
    """Draw the parameters of a GPT by role."""
    shapes = {"token.weight": (vocabulary, WIDTH), "pos.weight": (LENGTH, WIDTH)}
    for i in range(SIZES["depth"]):
        for name in "qkvo":
            shapes[f"blocks.{i}.attn.{name}.weight"] = (WIDTH, WIDTH)
            shapes[f"blocks.{i}.attn.{name}.bias"] = (WIDTH,)
        shapes[f"blocks.{i}.mlp.fc1.weight"] = (4 * WIDTH, WIDTH)
        shapes[f"blocks.{i}.mlp.fc1.bias"] = (4 * WIDTH,)
        shapes[f"blocks.{i}.mlp.fc2.weight"] = (WIDTH, 4 * WIDTH)
        shapes[f"blocks.{i}.mlp.fc2.bias"] = (WIDTH,)
    weights = {}
    for role, shape in shapes.items():
        if role.endswith("bias"):
            weights[role] = torch.zeros(shape)
        else:
            weights[role] = 0.02 * torch.randn(shape, generator=generator)
    norms = [f"blocks.{i}.norm{j}" for i in range(SIZES["depth"]) for j in (1, 2)]
    for norm in [*norms, "norm"]:
        weights[f"{norm}.weight"] = torch.ones(WIDTH)
        weights[f"{norm}.bias"] = torch.zeros(WIDTH)
    return {role: value.requires_grad_() for role, value in weights.items()}


def loss(steps, weights, rows):
    """Return the mean cross-entropy of the next character."""
    logits = steps(weights, **SIZES).run(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(name, seed, steps, lr):
    """Train one variant; return its loss on held-out text during training."""
    variant = mistakes.GPTSteps
    for mistake in mistakes.CATALOGUE:
        if mistake.name == name and mistake.applies_to(mistakes.GPTSteps):
            variant = mistake.applied_to(mistakes.GPTSteps)
    tokens, held_out, vocabulary = characters()
    generator = torch.Generator().manual_seed(seed)
    weights = new_weights(vocabulary, generator)
    optimizer = torch.optim.AdamW(weights.values(), lr=lr)
    starts = range(0, len(held_out) - LENGTH, LENGTH)
    rows = [held_out[i : i + LENGTH + 1] for i in starts]
    rows = torch.stack([row for row in rows if len(row) == LENGTH + 1])
    losses = []
    for step in range(steps):
        chosen = torch.randint(len(tokens) - LENGTH - 1, (16,), generator=generator)
        batch = torch.stack([tokens[i : i + LENGTH + 1] for i in chosen])
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 100) * (1 - step / steps)
        optimizer.zero_grad()
        loss(variant, weights, batch).backward()
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            with torch.no_grad():
                losses.append(round(loss(variant, weights, rows).item(), 4))
    return {"losses": losses}


def losses(options):
    """Train a small GPT and wrong variants of it, and record their losses."""
    steps, seeds, rates = 2000, 3, (1e-3, 3e-3, 1e-2, 3e-2)
    if options.tiny:
        steps, seeds, rates = 20, 1, (3e-3,)
    runs = Runs(
        options.out / "compare_losses.json",
        options.minutes,
        steps=steps,
        data="the text of the book, 300,000 characters to train and 30,000 held out",
        tuning=[],
        runs=[],
    )
    for name in VARIANTS:
        found = {}
        for lr in rates:
            settings = dict(variant=name, lr=lr, steps=steps // 4 or 1)
            run = runs.once(settings, lambda: train(name, 0, steps // 4 or 1, lr), "tuning")
            found[lr] = run["losses"][-1]
        best = min(found, key=found.get)
        for seed in range(seeds):
            settings = dict(variant=name, lr=best, seed=seed)
            runs.once(settings, lambda: train(name, seed, steps, best))


# --- the judgment -----------------------------------------------------------------------------


def load_cases(folder):
    """Import the cases of a folder."""
    found = []
    for path in sorted(Path(folder).glob("cases*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # where inspect looks for it
        spec.loader.exec_module(module)
        found += module.CASES
    return found


def judge(case):
    """Compare one implementation with its reference, and return the verdict."""
    name, sizes = case["reference"]
    sizes = {RENAMED.get(argument, argument): value for argument, value in sizes.items()}
    began = time.monotonic()
    try:
        report = compare(case["build"](), reference(name, **sizes), call=case.get("call"))
    except Exception as error:
        report = Report(reason=f"compare raised {reason(error)}")
    return dict(
        style=case["style"],
        reference=name,
        label=case["label"],
        mistake=case["mistake"],
        repository=case.get("repo", ""),
        path=case.get("path", ""),
        verdict=report.verdict,
        reason=report.reason,
        matched=[report.matched, report.parameters],
        notes=report.notes,
        located=report.located,
        line=report.line,
        faults=report.faults,
        named=[list(finding.names) for finding in report.findings],
        adapted=report.adapted,
        probes={name: found for name, found in report.probes.items() if isinstance(found, str)},
        wall=round(time.monotonic() - began, 2),
    )


def cases(options):
    """Compare the implementations of a folder with their references."""
    some = load_cases(options.folder)
    runs = Runs(options.out / f"{options.name}.json", options.minutes, cases=[])
    for case in some[:3] if options.tiny else some:
        runs.once(dict(case=case["name"]), lambda: judge(case), "cases")
    print(Counter((row["label"], row["verdict"]) for row in runs.record["cases"]))


def main():
    commands = Commands(__doc__)
    commands.experiment("losses", losses)
    parser = commands.experiment("cases", cases)
    parser.add_argument("folder", type=Path, help="with cases*.py, each with a list CASES")
    parser.add_argument("--name", default="compare_cases", help="of the record")
    commands.run()


if __name__ == "__main__":
    main()
