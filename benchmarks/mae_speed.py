"""A pre-training step of the masked autoencoder beside transformers': time and ratio.

    python -m benchmarks.mae_speed --out FOLDER

Width and heads are those of the published model; the encoder has 2 blocks, the decoder one.
Both have the same weights and are given the same noise; a step is the loss and its gradient.
On a processor without units for bfloat16 only float32 is timed.
The record is FOLDER/mae_speed_DEVICE.json; with --tiny its numbers mean nothing.
"""

import statistics

import torch
import transformers

from attnlib.attention import HAS_AMX
from attnlib.mae import MaskedAutoencoder
from attnlib.models import load_pretrained
from benchmarks.common import experiment_parser, ratio, take_turns, write

PEER = "transformers"


def pair(tiny):
    """Ours and theirs, with the same weights."""
    width, depth, heads = (24, 1, 3) if tiny else (768, 2, 12)
    decoder, blocks, decoder_heads = (20, 1, 5) if tiny else (512, 1, 16)
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
        PEER: lambda: theirs(x, noise=noise).loss,
    }

    def step(name):
        def call():
            ours.zero_grad(), theirs.zero_grad()
            losses[name]().backward()

        return call

    difference = abs(losses["attnlib"]().item() - losses[PEER]().item())
    return {name: step(name) for name in losses}, difference


def main():
    parser = experiment_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, batch = [], 1
    fast_half = arguments.device == "cuda" or HAS_AMX or arguments.tiny
    for name in ("float32", "bfloat16") if fast_half else ("float32",):
        calls, difference = steps(arguments.tiny, arguments.device, getattr(torch, name), batch)
        take_turns(calls, 1, arguments.device)  # a first round is not counted
        times = take_turns(calls, arguments.repeats, arguments.device)
        row = dict(dtype=name, batch=batch, difference=difference)
        row["ms"] = {key: round(statistics.median(ms), 1) for key, ms in times.items()}
        rows.append(row | ratio(times["attnlib"], times[PEER]))
        print(rows[-1])
    write(arguments.out, "mae_speed", arguments.device, dict(rows=rows))


if __name__ == "__main__":
    main()
