"""Train the small masked autoencoder that comes with the library, on two photographs.

    python -m benchmarks.mae_photographs --out benchmarks/results

It sees pieces of the left part of scikit-learn's photographs, 64 × 64 pixels with patches of
8 × 8, and is tested on pieces of the right part. Beside it stands what fills the same hidden
patches without learning: the mean of the visible pixels, and harmonic interpolation. All are
tested at several masking rates; the model was trained at one, 75%. The weights of seed 0 go to
mae_photographs.safetensors in float16, the errors with each seed to mae_photographs.json, where
those of other --seeds stay. With --tiny it takes a few steps, to see that it runs; such a
record means nothing.
"""

import json
import time

import torch

from attnlib.mae import (
    harmonic_fill,
    hidden_pixels,
    masked_loss,
    patchify,
    pieces,
    random_masking,
    unpatchify,
)
from attnlib.models import create_model
from attnlib.practice import prepared
from attnlib.train import epochs, fit, write_record
from benchmarks.runner import experiment_parser, save_half

NAME, RATES = "mae_photographs", (0.125, 0.25, 0.5, 0.75, 0.875)


def filled(model, images, noise, rate):
    """All patches (B, N, p·q·C) from the model and from two fillers, and the mask."""
    grid, size = model.patch_embed.grid_size, model.patch_size
    _, mask = random_masking(noise, rate)
    hidden = hidden_pixels(mask, grid, size)
    seen = (images * ~hidden).sum((2, 3), keepdim=True) / (~hidden).sum((2, 3), keepdim=True)
    model.eval()
    found = {"masked autoencoder": unpatchify(model(images, rate, noise)[1], grid, size)}
    found["mean color"] = seen.expand_as(images)
    found["harmonic"] = harmonic_fill(images, hidden)
    return {name: patchify(x, size) for name, x in found.items()}, mask


@torch.no_grad()
def errors(model, images, seed=0):
    """The mean squared error of hidden pixels at each masking rate, {name: [...]}."""
    torch.manual_seed(seed)
    noise = torch.rand(len(images), model.patch_embed.num_patches)
    target, found = patchify(images, model.patch_size), {}
    for rate in RATES:
        some, mask = filled(model, images, noise, rate)
        for name, x in some.items():
            error = ((x - target).square().mean(-1) * mask).sum() / mask.sum()
            found.setdefault(name, []).append(round(error.item(), 4))
    return found


def train(seed, images, test, steps, out):
    """A model trained with a seed, and the history of its training."""
    torch.manual_seed(seed)
    noise = torch.rand(len(test[:100]), 64)
    model = create_model(NAME)
    history = fit(
        model,
        lambda model, batch: masked_loss(model, (prepared(batch[0] / 255, NAME),)),
        epochs(images, batch_size=min(32, len(images)), seed=seed),
        steps=steps,
        lr=2e-3,
        warmup=steps // 10,
        betas=(0.9, 0.95),
        weight_decay=0.05,
        every=max(1, steps // 10),
        evaluate=lambda model: {"test": model(test[:100], noise=noise)[0]},
        checkpoint=out / "checkpoints" / f"{NAME}_{seed}.json",
    )
    return model, history


def main():
    parser = experiment_parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    count, steps, tests = (64, 4, 4) if args.tiny else (8192, args.steps, 200)
    images = (255 * pieces(count)).round().byte()
    test, seen = (prepared(pieces(tests, part, seed=1), NAME) for part in ("test", "train"))
    path, runs = args.out / f"{NAME}.json", []
    if path.exists():
        runs = [
            run for run in json.loads(path.read_text())["runs"] if run["seed"] not in args.seeds
        ]
    for seed in args.seeds:
        began = time.process_time()
        model, history = train(seed, images, test, steps, args.out)
        run = dict(seed=seed, seconds=round(time.process_time() - began), history=history)
        run |= dict(test=errors(model, test), train=errors(model, seen))
        runs = sorted([*runs, run], key=lambda run: run["seed"])
        if seed == 0:
            save_half(model.state_dict(), args.out / f"{NAME}.safetensors", bits=7)
        parameters = sum(p.numel() for p in model.parameters())
        write_record(path, dict(parameters=parameters, rates=RATES, runs=runs))
        print(f"seed {seed}: {run['seconds']} s", run["test"], run["train"])


if __name__ == "__main__":
    main()
