"""GPT beside transformers' own GPT-2 and Llama: `python -m benchmarks.gpt_speed --out
FOLDER`.

The same random weights in both. A training step is forward, loss and backward; decoding writes
tokens greedily behind a prompt of 32, with a cache in both, plain and as
`optimize_for_inference` makes it (on a CPU). "products" multiplies by the same matrices as
often and does nothing else: no program can do without that. Contestants take turns; a row has
the ratio to transformers. On a CPU one thread is used, and its own time counts, without that of
other programs. On a GPU weights are in bfloat16, and a training step is timed compiled as well,
with its model utilisation: 6 operations for each parameter and token, and 12 L d N for
attention (Chowdhery et al. 2022, appendix B), over --peak. The record is
FOLDER/gpt_speed_DEVICE.json; with --tiny its numbers mean nothing.
"""

import itertools
import time
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib.gpt import GPT
from attnlib.inference import optimize_for_inference
from benchmarks import common
from benchmarks.common import OPTIMIZED, OURS

# the peers import torchvision, which needs what `common` imports
# isort: split
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

PEER, PRODUCTS = "transformers", "products"
PROMPT = 32
SIZES = {  # layers, heads, heads of keys and values, width, vocabulary, new tokens
    "tiny": (2, 3, 1, 48, 60, 3),
    "14M": (6, 6, 2, 384, 8192, 48),
    "124M": (12, 12, 4, 768, 50257, 16),
}


def peer(kind, size):
    """A model of the transformers library with random weights, without dropout."""
    layers, heads, groups, width, vocab, _ = SIZES[size]
    torch.manual_seed(0)
    same = dict(vocab_size=vocab, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    if kind == "GPT-2":
        drop = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        shape = dict(n_positions=1024, n_embd=width, n_layer=layers, n_head=heads)
        return GPT2LMHeadModel(GPT2Config(**same, **drop, **shape)).eval()
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * round(width / 3),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **same,
    )
    return LlamaForCausalLM(config).eval()


def pair(kind, size, device):
    """The peer, and ours with its weights."""
    theirs = peer(kind, size)
    if device == "cuda":
        theirs = theirs.to(device, torch.bfloat16)
    return theirs, GPT.from_pretrained(theirs)


def products(model, batch, new):
    """All matrix products of writing `new` tokens behind a prompt, as a function."""
    layers = [m for m in model.h.modules() if isinstance(m, nn.Linear)]
    x = {
        (n, width): torch.randn(batch, n, width)
        for n in (PROMPT, 1)
        for width in {layer.in_features for layer in layers}
    }

    def run():
        for n in [PROMPT] + [1] * (new - 1):
            for layer in layers:
                layer(x[n, layer.in_features])
            model.lm_head(x[1, model.config.n_embd])  # of the last token only

    return run


def decoding_calls(theirs, ours, batch, new, device, left_out):
    vocab = ours.config.vocab_size
    tokens = torch.randint(vocab, (batch, PROMPT), device=device)
    models = {OURS: ours}
    if device == "cpu":
        copies = {OPTIMIZED: partial(optimize_for_inference, ours)}
        models |= common.attempt_all(copies, left_out)
    options = dict(max_new_tokens=new, do_sample=False, use_cache=True)
    options["attention_mask"] = torch.ones_like(tokens)
    calls = {name: lambda m=m: m.generate(tokens, new, 0.0) for name, m in models.items()}
    if device == "cpu":
        calls[PRODUCTS] = products(ours, batch, new)
    return calls | {PEER: lambda: theirs.generate(tokens, **options)}


def step(model, loss):
    """Forward, loss and backward of a model, as a function."""

    def run():
        model.zero_grad(set_to_none=True)
        loss().backward()

    return run


def training_calls(theirs, ours, batch, length, device):
    tokens = torch.randint(ours.config.vocab_size, (batch, length), device=device)
    calls, targets = {}, F.pad(tokens[:, 1:], (0, 1), value=-100).flatten()  # the last has none
    theirs.train()
    models = {OURS: ours.train()}
    if device == "cuda":
        models[f"{OURS}, compiled"] = torch.compile(ours)
    for name, m in models.items():
        calls[name] = step(
            m, lambda m=m: F.cross_entropy(m(tokens).flatten(0, 1).float(), targets)
        )

    def their_loss():
        return theirs(input_ids=tokens, labels=tokens, use_cache=False).loss

    return calls | {PEER: step(theirs, their_loss)}


def utilisation(model, batch, length, ms, peak):
    """The share of a processor's operations a second that the model's own operations are."""
    c, n = model.config, sum(p.numel() for p in model.parameters())
    n -= model.wpe.weight.numel() if model.wpe is not None else 0
    work = 6 * n + 12 * c.n_layer * c.n_head * c.head_width * length
    return round(work * batch * length / (ms / 1000) / peak, 3)


def measure(setting, length, arguments, clock, left_out):
    """A row for each contestant of a setting."""
    device, batch = arguments.device, setting["batch"]
    theirs, ours = pair(setting["kind"], setting["size"], device)
    training = setting["task"] == "training"
    with torch.set_grad_enabled(training):
        if training:
            calls = training_calls(theirs, ours, batch, length, device)
        else:
            calls = decoding_calls(theirs, ours, batch, setting["new"], device, left_out)
        warm_up = 1 if device == "cpu" else 3
        turns = arguments.repeats, device, left_out, clock, warm_up
        times = common.warm_turns(calls, *turns)
    rows = []
    for name in calls:
        if name in times:
            row = dict(what=name, **common.median_row(times, name, PEER, digits=2))
            if training and device == "cuda":
                row["utilisation"] = utilisation(ours, batch, length, row["ms"], arguments.peak)
            print(setting, row, flush=True)
            rows.append(row)
    return rows


def settings(device, tiny, batch):
    """What is timed, in order."""
    sizes = ["tiny"] if tiny else ["14M", "124M"] if device == "cpu" else ["124M"]
    for size, kind in itertools.product(sizes, ("GPT-2", "Llama")):
        new = SIZES[size][-1] if device == "cpu" else 64
        for rows_of in (1, 16):
            yield dict(kind=kind, size=size, task="decoding", batch=rows_of, new=new)
        if size != "124M" or device == "cuda":  # a step of it takes seconds on a CPU
            yield dict(kind=kind, size=size, task="training", batch=batch)


def main():
    parser = common.timing_parser(__doc__, repeats=7)
    parser.add_argument("--peak", type=float, default=989e12, help="operations a second")
    arguments = parser.parse_args()
    device, tiny = arguments.device, arguments.tiny
    if device == "cpu":
        torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else time.perf_counter
    batch, length = (1, 8) if tiny else (4, 128) if device == "cpu" else (16, 1024)
    path = arguments.out and arguments.out / f"gpt_speed_{device}.json"
    known = dict(tiny=tiny, length=length, peak=arguments.peak)
    bench = common.Rows(path, device, arguments.minutes, **known)

    def go():
        for setting in settings(device, tiny, batch):
            bench.once(setting, partial(measure, setting, length, arguments, clock))

    bench.work(go)


if __name__ == "__main__":
    main()
