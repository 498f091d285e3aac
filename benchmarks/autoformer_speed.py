"""What slicing costs, and what extracting saves.

    python -m benchmarks.autoformer_speed --out FOLDER

- A training step of the supernet of AutoFormer-T with a random subnet, of the same subnet
  extracted, and of the largest subnet.
- A forward pass of the released AutoFormer-T, sliced from its supernet, extracted, and
  extracted with its relative positions left out, beside a ViT of the same width, depth and
  heads, which has none.
- The attention of AutoFormer-S with relative positions by rows and columns, and with the
  authors' table of all pairs of tokens.

Contestants take turns; a row has the ratio to the last named of its group. On a CPU one thread
is used, and its own time counts, without that of other programs. The record is
FOLDER/autoformer_speed_DEVICE.json; with --tiny its numbers mean nothing.
"""

import time
from functools import partial

import torch

from attnlib.attention import attention
from attnlib.autoformer import SPACES, Attention, Subnet, SuperTransformer, extract, sample
from attnlib.multihead import merge_heads
from attnlib.vit import VisionTransformer
from benchmarks import runner, timing

DRAWS = 3  # subnets of a round of training steps


def supernet(tiny):
    torch.manual_seed(0)
    return SuperTransformer(SPACES["tiny"], img_size=32 if tiny else 224)


def step_calls(tiny, device):
    """A round of each has `DRAWS` steps; of all rounds the same subnets."""
    model = supernet(tiny).to(device)
    subnets = [sample(model.space, seed) for seed in range(1 if tiny else DRAWS)]
    fixed = [extract(model, subnet) for subnet in subnets]
    images = torch.randn(1 if tiny else 4, 3, *model.patch_embed.img_size, device=device)

    def step(network, *subnet):
        network.zero_grad()
        network(images, *subnet).logsumexp(1).sum().backward()

    return {
        "random subnet": lambda: [step(model, subnet) for subnet in subnets],
        "random subnet, extracted": lambda: [step(network) for network in fixed],
        "largest subnet": lambda: [step(model) for _ in subnets],
    }


def bare(attn, x, _=None):
    """The attention without relative positions."""
    return attn.proj(merge_heads(attention(*attn.project(x, attn.num_heads))))


def forward_calls(tiny, device):
    model = supernet(tiny).to(device).eval()
    subnet = Subnet(192, (3,) * 12, (4,) * 12)
    fixed, size = extract(model, subnet).eval(), model.patch_embed.img_size
    without = extract(model, subnet).eval()
    for block in without.blocks:
        block.attn.forward = partial(bare, block.attn)
    shape = dict(embed_dim=192, depth=12, num_heads=3, global_pool="avg")
    vit = VisionTransformer(size, 16, **shape).to(device).eval()
    images = torch.randn(1 if tiny else 4, 3, *size, device=device)
    return {
        "sliced": lambda: model(images, subnet),
        "extracted": lambda: fixed(images),
        "extracted, no relative positions": lambda: without(images),
        "ViT": lambda: vit(images),
    }


def dense(attn, x):
    """The attention with the vectors of all pairs of tokens, as the authors' code has it."""
    q, k, v = attn.project(x, attn.num_heads)  # (B, h, N, d) each
    widths = attn.rows.shape[1], attn.columns.shape[1]
    row, column = (part.int().argmax(1) for part in attn.places.split(widths, dim=1))
    R_k, R_v = (
        table.vertical[attn.rows[:, row]] + table.horizontal[attn.columns[:, column]]
        for table in (attn.rel_k, attn.rel_v)
    )  # (N, N, d)
    logits = q @ k.mT + torch.einsum("bhnd,nmd->bhnm", q, R_k)
    weights = (logits * attn.head_dim**-0.5).softmax(-1)
    out = weights @ v + torch.einsum("bhnm,nmd->bhnd", weights, R_v)
    return attn.proj(merge_heads(out))


def attention_calls(tiny, device):
    torch.manual_seed(0)
    side = 4 if tiny else 14
    attn = Attention(384, 6, grid_size=(side, side)).to(device)
    x = torch.randn(1 if tiny else 8, 1 + side**2, 384, device=device)
    return {"rows and columns": lambda: attn(x), "all pairs": lambda: dense(attn, x)}


GROUPS = {
    "training step": step_calls,
    "forward": forward_calls,
    "attention": attention_calls,
}


def measure(group, arguments, clock, left_out):
    """A row for each contestant of a group, with its ratio to the last of them."""
    device = arguments.device
    with torch.set_grad_enabled(group == "training step"):
        calls = GROUPS[group](arguments.tiny, device)
        times = timing.warm_turns(calls, arguments.repeats, device, left_out, clock)
    *_, last = calls
    return [dict(what=name, **timing.median_row(times, name, last)) for name in times]


def main():
    parser = runner.timing_parser(__doc__, repeats=9)
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else time.perf_counter
    path = arguments.out and arguments.out / f"autoformer_speed_{device}.json"
    bench = runner.Rows(path, device, arguments.minutes, arguments.tiny)

    def go():
        for group in GROUPS:
            work = partial(measure, group, arguments, clock)
            print(*bench.once(dict(group=group), work), sep="\n")

    bench.work(go)


if __name__ == "__main__":
    main()
