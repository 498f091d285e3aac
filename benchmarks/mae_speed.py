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

import torch
import transformers

from attnlib.mae import MaskedAutoencoder, lean_loss
from attnlib.models import create_model, load_pretrained
from attnlib.train import machine
from benchmarks.common import experiment_parser, ratio, take_turns, write

PEER = "transformers"


def pair(tiny):
    """Ours and theirs, with the same weights."""
    width, depth, heads = (24, 1, 3) if tiny else (768, 12, 12)
    decoder, blocks, decoder_heads = (20, 1, 5) if tiny else (512, 8, 16)
    config = transformers.ViTMAEConfig(
        **dict(hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads),
        **dict(intermediate_size=4 * width, decoder_hidden_size=decoder),
        **dict(decoder_num_hidden_layers=blocks, decoder_num_attention_heads=decoder_heads),
        **dict(decoder_intermediate_size=4 * decoder, layer_norm_eps=1e-6),
    )
    torch.manual_seed(0)
    theirs = transformers.ViTMAEForPreTraining(config)
    ours = MaskedAutoencoder(224, 16, 3, width, depth, heads, decoder, blocks, decoder_heads)
    load_pretrained(ours, theirs.state_dict())
    return ours, theirs


def steps(tiny, device, dtype, batch):
    """A training step of each, and how far their losses differ."""
    ours, theirs = (model.to(device, dtype) for model in pair(tiny))
    x = torch.randn(batch, 3, 224, 224, device=device, dtype=dtype)
    noise = torch.rand(batch, 196, device=device)
    losses = {
        "attnlib": lambda: ours(x, noise=noise)[0],
        "lean": lambda: lean_loss(ours, x, noise),
        PEER: lambda: theirs(x, noise=noise).loss,
    }

    def step(name):
        def call():
            ours.zero_grad(), theirs.zero_grad()
            losses[name]().backward()

        return call

    difference = abs(losses["attnlib"]().item() - losses[PEER]().item())
    return {name: step(name) for name in losses}, difference


@torch.no_grad()
def encoder(tiny, device, repeats, clock):
    """The ratio of the encoder's times, for a quarter of the patches and for all."""
    small = dict(embed_dim=24, depth=1, num_heads=3)
    model = create_model("mae_vit_base_patch16", decoder_depth=1, **small if tiny else {})
    model.eval().to(device)
    x, noise = torch.randn(4, 3, 224, 224, device=device), torch.rand(4, 196, device=device)
    rates = {"quarter": 0.75, "all": 0.0}
    calls = {
        name: lambda rate=rate: model.forward_encoder(x, rate, noise)
        for name, rate in rates.items()
    }
    take_turns(calls, 1, device)
    times = take_turns(calls, repeats, device, clock=clock)
    return dict(batch=4) | ratio(times["quarter"], times["all"])


def main():
    parser = experiment_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, batch = [], 2
    fast_half = (
        arguments.tiny or "bf16" in machine("cpu")["device"] or arguments.device == "cuda"
    )
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    for name in ("float32", "bfloat16") if fast_half else ("float32",):
        calls, difference = steps(arguments.tiny, arguments.device, getattr(torch, name), batch)
        take_turns(calls, 1, arguments.device)  # a first round is not counted
        times = take_turns(calls, arguments.repeats, arguments.device, clock=clock)
        row = dict(dtype=name, batch=batch, difference=difference)
        row["ms"] = {key: round(statistics.median(ms), 1) for key, ms in times.items()}
        row |= ratio(times["attnlib"], times[PEER])
        rows.append(row | dict(lean=ratio(times["lean"], times[PEER])))
        print(rows[-1])
    found = encoder(arguments.tiny, arguments.device, arguments.repeats, clock)
    record = dict(rows=rows, encoder=found)
    write(arguments.out, "mae_speed", arguments.device, record)


if __name__ == "__main__":
    main()
