"""GPT beside nanoGPT: `python -m benchmarks.nanogpt --model PATH`, a copy of its model.py.

The same random weights in both, in the shape of GPT-2. nanoGPT computes the exact GELU, GPT-2
its tanh approximation: outputs and gradients are compared as nanoGPT stands ("exact"), and with
the approximation in its place ("tanh"). Then training steps take turns; a row has the ratio to
nanoGPT. On a CPU one thread is used, and its own time counts. On a GPU weights are in bfloat16,
both are compiled, and the model utilisation is recorded as by `benchmarks.gpt_speed`. The
record is FOLDER/nanogpt_DEVICE.json; with --tiny its numbers mean nothing.
"""

import runpy
import statistics
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib.gpt import GPT, OF_2019, GPTConfig
from benchmarks.common import OURS, experiment_parser, ratio, take_turns, write
from benchmarks.gpt_speed import step, utilisation

PEER = "nanoGPT"
SHAPES = {
    "tiny": dict(vocab_size=60, block_size=16, n_layer=2, n_head=3, n_embd=48),
    "cpu": dict(vocab_size=8192, block_size=256, n_layer=6, n_head=6, n_embd=384),
    "cuda": dict(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768),
}


def pair(path, shape):
    """nanoGPT's model of a shape, and ours with its weights, which have the same names."""
    theirs = runpy.run_path(str(path), run_name="nanogpt")
    torch.manual_seed(0)
    theirs = theirs["GPT"](theirs["GPTConfig"](**shape, dropout=0.0, bias=True))
    ours = GPT(GPTConfig(**shape, **OF_2019))
    weights = {k.removeprefix("transformer."): v for k, v in theirs.state_dict().items()}
    ours.load_state_dict(weights, strict=True)
    return theirs, ours


def largest(x, y):
    """The largest difference of two tensors, in parts of the largest entry."""
    return float(((x - y).abs().max() / y.abs().max()).detach())


def differences(theirs, ours, tokens, targets):
    """The largest relative difference of the logits, and of all gradients."""
    theirs.zero_grad(), ours.zero_grad()
    their_logits, their_loss = theirs(tokens, targets)
    logits = ours(tokens)
    their_loss.backward()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    grads = {k.removeprefix("transformer."): p.grad for k, p in theirs.named_parameters()}
    return {
        "logits": largest(logits, their_logits),
        "gradients": max(largest(p.grad, grads[k]) for k, p in ours.named_parameters()),
    }


def set_tanh(model):
    for block in model.transformer.h:
        block.mlp.gelu = nn.GELU(approximate="tanh")


def main():
    parser = experiment_parser(__doc__)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--model", type=Path, required=True, help="nanoGPT's model.py")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=here)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peak", type=float, default=989e12, help="operations a second")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cpu":
        torch.set_num_threads(1)
    shape = SHAPES["tiny" if arguments.tiny else device]
    theirs, ours = pair(arguments.model, shape)
    length = min(shape["block_size"], 128 if device == "cpu" else 1024)
    batch = 4 if device == "cpu" else 16
    tokens, targets = torch.randint(shape["vocab_size"], (2, batch, length))

    record = dict(shape=shape, batch=batch, length=length, tiny=arguments.tiny)
    record["exact"] = differences(theirs, ours, tokens[:1], targets[:1])
    set_tanh(theirs)
    record["tanh"] = differences(theirs, ours, tokens[:1], targets[:1])

    tokens, targets, models = tokens.to(device), targets.to(device), (theirs, ours)
    if device == "cuda":
        models = [torch.compile(m.to(device, torch.bfloat16)) for m in models]
    calls = {
        PEER: step(models[0], lambda: models[0](tokens, targets)[1]),
        OURS: step(
            models[1],
            lambda: F.cross_entropy(models[1](tokens).flatten(0, 1), targets.flatten()),
        ),
    }
    clock = time.process_time if device == "cpu" else time.perf_counter
    take_turns(calls, 3, device)  # first rounds are not counted
    times, rows = take_turns(calls, arguments.repeats, device, clock=clock), []
    for name in calls:
        ms = round(statistics.median(times[name]), 2)
        rows.append({"what": name, "ms": ms, **ratio(times[name], times[PEER])})
        if device == "cuda":
            rows[-1]["utilisation"] = utilisation(ours, batch, length, ms, arguments.peak)
    write(arguments.out, "nanogpt", device, record | {"rows": rows})


if __name__ == "__main__":
    main()
