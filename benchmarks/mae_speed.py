"""A pre-training step of the masked autoencoder beside transformers': times and ratios.

    python -m benchmarks.mae_speed --out FOLDER

A step of the whole base model is the loss and its gradient; all have the same weights and are
given the same noise. "lean" leaves out what the loss does not need. Then the encoder takes a
quarter of the patches, and all of them, in turns. On a processor without instructions for
bfloat16 only float32 is timed. On a CPU one thread is used, and its own time counts.
The record is FOLDER/mae_speed_DEVICE.json; with --tiny its numbers mean nothing.
"""

import statistics
import time
from functools import partial

import torch

from attnlib.mae import MaskedAutoencoder, lean_loss
from attnlib.models import create_model, load_pretrained
from attnlib.train import machine
from benchmarks import runner, timing

PEER = "transformers"


def pair(tiny):
    """Ours, and a function that makes theirs, whose weights ours then has."""
    width, depth, heads = (24, 1, 3) if tiny else (768, 12, 12)
    decoder, blocks, decoder_heads = (20, 1, 5) if tiny else (512, 8, 16)
    torch.manual_seed(0)
    ours = MaskedAutoencoder(224, 16, 3, width, depth, heads, decoder, blocks, decoder_heads)

    def peer():
        import transformers  # which not every machine has

        config = transformers.ViTMAEConfig(
            **dict(hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads),
            **dict(intermediate_size=4 * width, decoder_hidden_size=decoder),
            **dict(decoder_num_hidden_layers=blocks, decoder_num_attention_heads=decoder_heads),
            **dict(decoder_intermediate_size=4 * decoder, layer_norm_eps=1e-6),
        )
        theirs = transformers.ViTMAEForPreTraining(config)
        load_pretrained(ours, theirs.state_dict())
        return theirs

    return ours, peer


def steps(tiny, device, dtype, batch, left_out):
    """A training step of each, and how far their losses differ; None without the peer."""
    ours, peer = pair(tiny)
    theirs = timing.attempt(left_out, PEER, lambda: peer().to(device, dtype))
    ours = ours.to(device, dtype)
    x = torch.randn(batch, 3, 224, 224, device=device, dtype=dtype)
    noise = torch.rand(batch, 196, device=device)
    losses = {
        "attnlib": lambda: ours(x, noise=noise)[0],
        "lean": lambda: lean_loss(ours, x, noise),
    }
    if theirs is not None:
        losses[PEER] = lambda: theirs(x, noise=noise).loss

    def step(name):
        def call():
            ours.zero_grad()
            if theirs is not None:
                theirs.zero_grad()
            losses[name]().backward()

        return call

    both = {name: losses[name] for name in ("attnlib", PEER) if name in losses}
    values = timing.attempt_all(
        {name: lambda f=f: f().item() for name, f in both.items()}, left_out
    )
    difference = None
    if len(values) == 2:
        difference = abs(values["attnlib"] - values[PEER])
    losses = {name: loss for name, loss in losses.items() if name not in left_out}
    return {name: step(name) for name in losses}, difference


def measure(dtype, batch, arguments, clock, left_out):
    """The row of a dtype."""
    device = arguments.device
    calls, difference = steps(arguments.tiny, device, getattr(torch, dtype), batch, left_out)
    times = timing.warm_turns(calls, arguments.repeats, device, left_out, clock)
    row = dict(difference=difference)
    row["ms"] = {name: round(statistics.median(ms), 1) for name, ms in times.items()}
    if PEER in times:
        for name, own in (("attnlib", row), ("lean", row.setdefault("lean", {}))):
            if name in times:
                own |= timing.ratio(times[name], times[PEER])
    return [row] if times else []


@torch.no_grad()
def encoder(arguments, clock, left_out):
    """The ratio of the encoder's times, for a quarter of the patches and for all."""
    device = arguments.device
    small = dict(embed_dim=24, depth=1, num_heads=3) if arguments.tiny else {}
    model = create_model("mae_vit_base_patch16", decoder_depth=1, **small)
    model.eval().to(device)
    x, noise = torch.randn(4, 3, 224, 224, device=device), torch.rand(4, 196, device=device)
    rates = {"quarter": 0.75, "all": 0.0}
    calls = {
        name: lambda rate=rate: model.forward_encoder(x, rate, noise)
        for name, rate in rates.items()
    }
    times = timing.warm_turns(calls, arguments.repeats, device, left_out, clock)
    return [timing.ratio(times["quarter"], times["all"])] if len(times) == 2 else []


def main():
    parser = runner.timing_parser(__doc__, repeats=9)
    arguments = parser.parse_args()
    device, batch = arguments.device, 2
    torch.set_num_threads(1)
    fast_half = arguments.tiny or "bf16" in machine("cpu")["device"] or device == "cuda"
    clock = time.process_time if device == "cpu" else time.perf_counter
    path = arguments.out and arguments.out / f"mae_speed_{device}.json"
    bench = runner.Rows(path, device, arguments.minutes, arguments.tiny, rows=[], encoders=[])

    def go():
        for dtype in ("float32", "bfloat16") if fast_half else ("float32",):
            work = partial(measure, dtype, batch, arguments, clock)
            print(*bench.once(dict(dtype=dtype, batch=batch), work))
        work = partial(encoder, arguments, clock)
        for found in bench.once(dict(batch=4), work, kind="encoders"):
            bench.record["encoder"] = found

    bench.work(go)


if __name__ == "__main__":
    main()
