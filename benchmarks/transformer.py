"""What was run for 21_transformer: `python -m benchmarks.transformer COMMAND --out FOLDER`.

    ablations  find out what a deep Transformer needs
    speed      time the Transformer next to its peers

`benchmarks.runner` says how runs are resumed and recorded.
"""

import copy
import itertools
import math
import statistics
import warnings
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from attnlib.decoding import greedy
from attnlib.inference import optimize_for_inference
from attnlib.position import sinusoidal_encoding
from attnlib.train import fit
from attnlib.transformer import EncoderLayer, label_smoothing_loss
from attnlib.translation import from_marian
from benchmarks import runner, timing
from benchmarks.runner import Commands, Runs

DEPTH = 12
WIDTH = 32
HEADS = 4
HIDDEN = 64
DIGITS = 5
LENGTH = 8
BATCH = 32
WARMUP = 100
SMALL_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # post-norm fails with larger ones
RATES = {"stack": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)}
STEPS = {"stack": 400}
VARIANTS = {  # of each part: its names, and what is different
    "stack": {
        "pre": dict(norm="pre"),
        "pre, no warm-up": dict(norm="pre", warmup=False),
        "post": dict(norm="post"),
        "post, no warm-up": dict(norm="post", warmup=False),
        "pre, no network": dict(norm="pre", network=False),
        "no skip": dict(norm="post", skip=False),
    },
}
GRID = ("pre", "pre, no warm-up")  # all seeds with every rate


class Layer(EncoderLayer):
    """An encoder layer, or one without its skips or its network."""

    def __init__(self, norm, skip=True, network=True):
        super().__init__(WIDTH, HEADS, HIDDEN, dropout=0.0, norm_first=norm == "pre")
        self.skip = skip
        if not network:
            self.feed_forward = self.norm2 = None
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def residual(self, x, norm, f, *inputs):
        return super().residual(x, norm, f, *inputs) if self.skip else norm(f(x, *inputs))

    def forward(self, x, mask=None, bias=None):
        x = self.residual(x, self.norm1, self.self_attn, mask, bias)
        if self.feed_forward is None:
            return x
        return self.residual(x, self.norm2, self.feed_forward)


class Stack(nn.Module):
    """Digits (B, N) to logits (B, N, 5)."""

    def __init__(self, depth=DEPTH, **options):
        super().__init__()
        self.embed = nn.Embedding(DIGITS, WIDTH)
        self.register_buffer("positions", sinusoidal_encoding(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer(**options) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, DIGITS)

    def forward(self, digits):
        x = self.embed(digits) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def digits(seed, count=BATCH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(DIGITS, (count, LENGTH), generator=generator)


def train_stack(lr, seed, steps, warmup=True, depth=DEPTH, log_every=50, **options):
    """New digits in every step; validation and test have 512 sequences each."""
    torch.manual_seed(seed)
    model = Stack(depth, **options)

    def answers(x):
        return (x + x.flip(1)) % DIGITS

    def loss_fn(model, batch):
        loss = F.cross_entropy(model(batch[0]).flatten(0, 1), answers(batch[0]).flatten())
        return loss * batch[0].numel(), batch[0].numel()

    valid = digits(10**9, 512)
    test = digits(10**9 + 1, 512)

    def evaluate(model, x=valid):
        logits = model(x)
        right = (logits.argmax(-1) == answers(x)).float().mean().item()
        loss = F.cross_entropy(logits.flatten(0, 1), answers(x).flatten()).item()
        return {"valid": right, "valid_loss": loss}

    start = evaluate(model.eval())
    history = fit(
        model,
        lambda step: (digits(seed * 10**6 + step),),
        loss_fn=loss_fn,
        steps=steps,
        lr=lr,
        warmup=min(WARMUP, steps // 2) * warmup,
        weight_decay=0.0,
        max_grad_norm=None,
        evaluate=evaluate,
        log_every=log_every,
        seed=seed,
    )
    with torch.no_grad():
        share = evaluate(model.eval(), test)["valid"]
    return [{"step": 0, **start}, *history], share


class Ablations(Runs):
    """The runs of the record."""

    def __init__(self, path, minutes, seeds, tiny):
        settings = dict(depth=DEPTH, width=WIDTH, warmup=WARMUP, batch=BATCH, length=LENGTH)
        super().__init__(path, minutes, **settings, runs=[])
        self.seeds = seeds
        self.tiny = tiny

    def run(self, part, variant, lr, seed, times=1):
        """The run with these settings, from the record or made now."""
        steps = 4 if self.tiny else STEPS[part] * times
        settings = dict(part=part, variant=variant, lr=lr, seed=seed, steps=steps)
        return self.once(settings, lambda: self.trained(part, variant, lr, seed, steps))

    def trained(self, part, variant, lr, seed, steps):
        options = dict(VARIANTS[part][variant])
        if self.tiny:
            options |= dict(log_every=2, depth=2)
        try:
            curve, test = train_stack(lr, seed, steps, **options)
        except FloatingPointError as error:
            curve = [{"step": 0, "valid_loss": 1e9, "valid": 0.0, "error": str(error)}]
            test = 0.0
        curve = [
            {name: x if isinstance(x, str) else round(x, 7) for name, x in point.items()}
            for point in curve
        ]
        return {"test": round(test, 4), "curve": curve}

    def variant(self, part, name):
        """All runs of a variant: each rate with seed 0, then the other seeds."""
        rates = SMALL_RATES if VARIANTS[part][name].get("norm") == "post" else RATES[part]
        first = [self.run(part, name, lr, 0) for lr in rates]
        best = min(first, key=lambda run: run["curve"][-1]["valid_loss"])
        for seed in self.seeds:
            for lr in rates if name in GRID else [best["lr"]]:
                self.run(part, name, lr, seed)
        if best["curve"][-1]["valid"] < 0.9:  # before "it does not learn"
            for seed in self.seeds:
                self.run(part, name, best["lr"], seed, times=4)


def ablations(arguments):
    """Find out what a deep Transformer needs.

    Twelve encoder layers learn to add: token i of the answer is the sum, modulo 5, of digit i
    and of the i-th digit from the end. The stack is trained with post-norm or pre-norm, with or
    without warm-up; without the feed-forward networks; and without the skips. A variant that
    has not learned the task gets four times the steps.

    The learning rate is chosen by the loss on validation data, with seed 0; then come the other
    seeds. Two variants get all seeds with all learning rates.

    FOLDER/ablations.json is written after each run, and a run that it has is not made again:
    with --minutes, --parts, --variants and --seeds the work can be done in pieces. --tiny takes
    a few steps, to see that all works.
    """
    seeds = [0] if arguments.tiny else arguments.seeds
    path = arguments.out / "ablations.json"
    bench = Ablations(path, arguments.minutes, seeds, arguments.tiny)

    def go():
        for part in arguments.parts:
            for name in arguments.variants or VARIANTS[part]:
                bench.variant(part, name)

    bench.work(go)


# --- speed next to other libraries -----------------------------------------------------------

warnings.filterwarnings("ignore", message=".*nested.tensor.*")  # of torch.nn.Transformer
SPEED_PARTS = ("decoding", "training")
SIZE = dict(vocab=8000, width=512, layers=6, heads=8, hidden=2048, batch=16, length=64)
TINY = dict(vocab=40, width=16, layers=2, heads=2, hidden=32, batch=2, length=8)

# name: (float32_matmul_precision, dtype of autocast in training and of weights in decoding)
MODES = {
    "float32": ("highest", None),
    "float32, medium": ("medium", None),
    "bfloat16": ("highest", torch.bfloat16),
}
# tokens; Marian starts a translation with the padding
END = 0
PAD = 1


# --- the same model four times ----------------------------------------------------------------
def marian(size, dropout, attention="sdpa"):
    import transformers  # which not every machine has

    torch.manual_seed(0)
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=size["vocab"],
            d_model=size["width"],
            encoder_layers=size["layers"],
            decoder_layers=size["layers"],
            encoder_attention_heads=size["heads"],
            decoder_attention_heads=size["heads"],
            encoder_ffn_dim=size["hidden"],
            decoder_ffn_dim=size["hidden"],
            activation_function="relu",
            scale_embedding=True,
            init_std=size["width"] ** -0.5,
            max_position_embeddings=2 * size["length"],
            dropout=dropout,
            pad_token_id=PAD,
            eos_token_id=END,
            bos_token_id=None,
            decoder_start_token_id=PAD,
            forced_eos_token_id=None,
            num_beams=1,
            attn_implementation=attention,
        )
    )


class MarianPeer(nn.Module):
    def __init__(self, size, dropout, attention):
        super().__init__()
        self.model = marian(size, dropout, attention)

    def forward(self, src, tgt):
        return self.model(
            input_ids=src, attention_mask=src != PAD, decoder_input_ids=tgt, use_cache=False
        ).logits


class TorchPeer(nn.Module):
    """torch.nn.Transformer with embeddings, positions and output, without its last norms."""

    def __init__(self, size, dropout, ours):
        super().__init__()
        self.embed = nn.Embedding(size["vocab"], size["width"])
        self.dropout = nn.Dropout(dropout)
        self.model = nn.Transformer(
            size["width"],
            size["heads"],
            size["layers"],
            size["layers"],
            size["hidden"],
            dropout,
            batch_first=True,
        )
        self.model.encoder.norm = self.model.decoder.norm = None
        self.register_buffer("table", ours.positions.table.clone())
        weights = {
            name.replace("feed_forward.", ""): x for name, x in ours.state_dict().items()
        }
        self.embed.weight.data.copy_(ours.src_embed.weight)
        self.model.load_state_dict(
            {name: weights[name] for name in self.model.state_dict()}, strict=True
        )

    def vectors(self, tokens):
        x = math.sqrt(self.table.shape[1]) * self.embed(tokens)
        return self.dropout(x + self.table[: tokens.shape[1]])

    def forward(self, src, tgt):
        causal = nn.Transformer.generate_square_subsequent_mask(
            tgt.shape[1], device=tgt.device, dtype=torch.bool
        )
        x = self.model(
            self.vectors(src),
            self.vectors(tgt),
            tgt_mask=causal,
            src_key_padding_mask=src == PAD,
            memory_key_padding_mask=src == PAD,
            tgt_is_causal=True,
        )
        return F.linear(x, self.embed.weight)


class XPeer(nn.Module):
    """x-transformers in its own form: norm first, no biases in attention."""

    def __init__(self, size, dropout, flash):
        super().__init__()
        # which not every machine has
        from x_transformers import Decoder, Encoder, TransformerWrapper

        layers = dict(
            dim=size["width"],
            depth=size["layers"],
            heads=size["heads"],
            attn_flash=flash,
            attn_dim_head=size["width"] // size["heads"],
            ff_mult=size["hidden"] // size["width"],
            layer_dropout=0.0,
            attn_dropout=0.0,
            ff_dropout=dropout,
            ff_custom_activation=nn.ReLU(),
        )
        shared = dict(
            num_tokens=size["vocab"], max_seq_len=2 * size["length"], emb_dropout=dropout
        )
        self.encoder = TransformerWrapper(
            attn_layers=Encoder(**layers), return_only_embed=True, **shared
        )
        self.decoder = TransformerWrapper(
            attn_layers=Decoder(cross_attend=True, **layers),
            tie_embedding=True,
            token_emb=self.encoder.token_emb,
            **shared,
        )

    def forward(self, src, tgt):
        mask = src != PAD
        return self.decoder(tgt, context=self.encoder(src, mask=mask), context_mask=mask)


def peers(size, dropout, left_out):
    """{name: model}, ours first; those after it that can have our weights have them."""
    theirs = marian(size, dropout)
    ours = from_marian(theirs.config, theirs.state_dict())
    ours.output_bias.requires_grad_(False)  # Marian does not train it either
    makers = {
        "torch.nn.Transformer": partial(TorchPeer, size, dropout, ours),
        "Marian": partial(MarianPeer, size, dropout, "sdpa"),  # the default
        "Marian, eager": partial(MarianPeer, size, dropout, "eager"),
        "x-transformers": partial(XPeer, size, dropout, False),  # the default
        "x-transformers, flash": partial(XPeer, size, dropout, True),
    }
    return {timing.OURS: ours, **timing.attempt_all(makers, left_out)}


def sentences(size, seed):
    """Random tokens (batch, length), each row at least three quarters full, padding behind."""
    generator = torch.Generator().manual_seed(seed)
    shape = size["batch"], size["length"]
    tokens = torch.randint(2, size["vocab"], shape, generator=generator)
    lengths = torch.randint(3 * shape[1] // 4, shape[1] + 1, (shape[0], 1), generator=generator)
    lengths[0] = shape[1]
    return tokens.masked_fill(torch.arange(shape[1]) >= lengths, PAD)


# --- training ---------------------------------------------------------------------------------
@torch.no_grad()
def errors(models, mode, device, size, left_out):
    """The error of the logits where weights are equal, against ours in float64.

    It is the root mean square over the deviation.
    """
    (precision, dtype) = MODES[mode]
    found = {}
    torch.set_float32_matmul_precision(precision)
    src, tgt = (sentences(size, seed).to(device) for seed in (7, 8))
    exact = copy.deepcopy(models[timing.OURS]).double()(src, tgt)

    def error(model):
        with torch.autocast(device, dtype, enabled=dtype is not None):
            logits = model(src, tgt)
        return ((logits.double() - exact).square().mean().sqrt() / exact.std()).item()

    for name, model in models.items():
        if not name.startswith("x-"):
            found[name] = timing.attempt(left_out, name, partial(error, model))
            assert name in left_out or found[name] < (1e-5 if mode == "float32" else 0.05), (
                f"{name}: logits differ by {found[name]:.1e}"
            )
    return found


def loss_of(name, logits, targets):
    if name == timing.OURS:
        loss, count = label_smoothing_loss(logits, targets, smoothing=0.1, pad_id=PAD)
        return loss / count
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=0.1
    )


def training_step(name, model, optimizer, device, dtype, size):
    """A function that makes a step with the next of three batches."""
    pairs = [
        (sentences(size, seed).to(device), sentences(size, seed + 3).to(device))
        for seed in range(3)
    ]

    def step():
        pairs.append(pairs.pop(0))
        src, tgt = pairs[0]
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = loss_of(name, model(src, F.pad(tgt[:, :-1], (1, 0), value=PAD)), tgt)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(size, device, repeats, mode, dropout, left_out):
    """A row for each contestant."""
    models = peers(size, dropout, left_out)
    counts = [sum(p.numel() for p in model.parameters()) for model in models.values()]
    assert max(counts) < 1.02 * min(counts) or size is TINY, counts
    placed = {name: partial(model.to, device) for name, model in models.items()}
    models = timing.attempt_all(placed, left_out)
    wrong = {}
    if dropout == 0:
        wrong = errors(models, mode, device, size, left_out)
        models = {name: models[name] for name in models if name not in left_out}
    precision, dtype = MODES[mode]
    torch.set_float32_matmul_precision(precision)
    steps = {}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        steps[name] = training_step(name, model.train(), optimizer, device, dtype, size)
    memory = timing.memories(steps, device, left_out)  # which warms up, too
    steps = {name: steps[name] for name in memory}
    times = timing.take_turns(steps, repeats, device, left_out=left_out)
    rows = []
    for name in times:
        row = {"model": name, "error": wrong.get(name), "memory": memory[name]}
        rows.append({**row, **timing.compared(times, name)})
        print(
            f"training {mode:16} dropout {dropout}  {name:22} {rows[-1]['ms']:9.1f} ms   "
            f"{timing.told(rows[-1], timing.OURS)}",
            flush=True,
        )
    return rows


# --- decoding ---------------------------------------------------------------------------------
def bandwidth(device, size):
    """Bytes per second read and written by a copy of 2^28 bytes (fewer for a tiny model)."""
    source = torch.zeros(2**16 if size is TINY else 2**26, device=device)
    target = torch.empty_like(source)
    times = timing.take_turns({"copy": lambda: target.copy_(source)}, 9, device)["copy"]
    return 2 * source.numel() * 4 / (statistics.median(times) / 1000)


def bytes_read(model, batch, size, width):
    """What a step of cached decoding reads: the decoder's weights, and a cache half full."""
    d = size["width"]
    layers = size["layers"]
    weights = sum(p.numel() for p in model.decoder.parameters()) + model.output.weight.numel()
    weights -= layers * 2 * (d * d + d)  # cross-attention's keys and values are made once
    # the memory's, and half of the tokens'
    cache = 2 * layers * d * batch * (size["length"] + size["length"] / 2)
    return width * weights, width * cache


@torch.no_grad()
def largest_gap(model, src, tokens, others):
    """How far apart the logits are where two decodings part, in deviations; 0 if never."""
    gaps = [0.0]
    for source, a, b in zip(src, tokens, others):
        if not torch.equal(a, b):
            i = int((a != b).nonzero()[0])
            read = F.pad(a[:i], (1, 0), value=PAD)
            logits = model(source[None], read[None])[0, -1]
            gaps.append(
                ((logits[a[i]] - logits[b[i]]).abs() / logits.clamp(min=-100).std()).item()
            )
    return max(gaps)


def decoders(theirs, ours, src, length, device, left_out):
    """{name: a function that decodes `src`}, ours first."""
    models = {timing.OURS: ours}
    if device == "cpu":
        copies = {timing.OPTIMIZED: partial(optimize_for_inference, ours)}
        models |= timing.attempt_all(copies, left_out)
    options = dict(max_new_tokens=length, num_beams=1, do_sample=False)
    options["attention_mask"] = torch.ones_like(src)

    def decoder(model):
        return lambda: greedy(model, src, length, bos_id=PAD, eos_id=END)

    calls = {name: decoder(model) for name, model in models.items()}
    return calls | {"Marian": lambda: theirs.generate(src, **options)[:, 1:]}


def compare(exact, src, mode, tokens):
    """{name: share of the tokens that are ours, largest gap of the logits where not}."""
    found = {}
    ours = tokens[timing.OURS]
    for name, others in tokens.items():
        assert others.shape == ours.shape
        same = (others == ours).float().mean().item()
        gap = largest_gap(exact, src, ours, others)
        assert same == 1 if mode == "float32" else gap < 0.1, (
            f"{mode}, {name}: {same:.1%} equal, gap {gap:.2f}"
        )
        found[name] = {"same_tokens": same, "gap": gap}
    return found


def decode_batch(theirs, ours, exact, mode, src, device, repeats, left_out):
    """A row for each contestant."""
    batch, length = src.shape
    calls = decoders(theirs, ours, src, length, device, left_out)
    tokens = timing.attempt_all(calls, left_out)  # warms up, too
    found = {}
    if timing.OURS in tokens:
        assert tokens[timing.OURS].shape == (batch, length)
        found = compare(exact, src, mode, tokens)
    calls = {name: calls[name] for name in tokens}
    memory = timing.memories(calls, device, left_out)
    calls = {name: calls[name] for name in memory}
    times = timing.take_turns(calls, repeats, device, left_out=left_out)
    rows = []
    for name in times:
        row = {"model": name, **found.get(name, {}), "memory": memory[name]}
        rows.append({**row, **timing.compared(times, name)})
        print(
            f"decoding {mode:16} batch {batch:2}  {name:18} {rows[-1]['ms']:9.1f} ms   "
            f"{timing.told(rows[-1], timing.OURS)}  "
            f"same tokens {row.get('same_tokens', math.nan):.1%}",
            flush=True,
        )
    return rows


@torch.no_grad()
def decode(size, device, repeats, mode, batch, speed, left_out):
    """The rows of `decode_batch`, and the time that reading from memory takes at least."""
    precision, dtype = MODES[mode]
    torch.set_float32_matmul_precision(precision)
    theirs = marian(size, 0.0).eval().to(device)
    theirs.final_logits_bias.normal_(generator=torch.Generator(device).manual_seed(1))
    theirs.final_logits_bias[0, [END, PAD]] = -1e4  # no sentence ends
    exact = from_marian(theirs.config, theirs.state_dict()).eval()
    theirs.to(dtype or torch.float32)
    ours = from_marian(theirs.config, theirs.state_dict()).eval()
    generator = torch.Generator().manual_seed(2)
    shape = (batch, size["length"])
    src = torch.randint(2, size["vocab"], shape, generator=generator).to(device)
    rows = decode_batch(theirs, ours, exact, mode, src, device, repeats, left_out)
    weights, cache = bytes_read(ours, batch, size, ours.output.weight.element_size())
    limit = {"weights_mb": round(weights / 1e6, 2), "cache_mb": round(cache / 1e6, 2)}
    if speed is not None:
        limit["limit_ms"] = round(1000 * size["length"] * (weights + cache) / speed, 2)
        print(f"  memory limit {limit['limit_ms']:.0f} ms", flush=True)
    return [row | limit for row in rows]


def speed(arguments):
    """Time the Transformer next to its peers.

    Training: forward, loss, backward and AdamW step of the base model of 2017, against
    torch.nn.Transformer, MarianMTModel of the transformers library and x-transformers.
    Decoding: 64 tokens, greedily and with cache, the plain model and the one that
    `optimize_for_inference` makes of it, against `generate` of the transformers library. Where
    weights can be copied they are, and outputs are compared before anything is timed. All take
    turns, and all run at the same precision of float32 matrix products, which is a setting: see
    `MODES`.
    """
    device = arguments.device
    repeats = arguments.repeats
    size = TINY if arguments.tiny else SIZE
    path = arguments.out and arguments.out / f"translation_{device}.json"
    lists = {kind: [] for kind in arguments.parts}
    bench = runner.Rows(path, device, arguments.minutes, arguments.tiny, size=size, **lists)

    def decode_all():
        speed = bench.guarded(dict(task="a copy"), partial(bandwidth, device, size))
        if speed is not None:
            bench.record["copy_gb_per_s"] = round(speed / 1e9, 2)
            print(f"a copy moves {speed / 1e9:.1f} GB/s")
        for mode, batch in itertools.product(MODES, (1, size["batch"])):
            work = partial(decode, size, device, repeats, mode, batch, speed)
            bench.once({"mode": mode, "batch": batch}, work, "decoding")

    def train_all():
        for dropout, mode in itertools.product(arguments.dropout, MODES):
            work = partial(train, size, device, repeats, mode, dropout)
            bench.once({"mode": mode, "dropout": dropout}, work, "training")

    def go():
        if "decoding" in arguments.parts:
            decode_all()
        if "training" in arguments.parts:
            train_all()
        torch.set_float32_matmul_precision("highest")

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.experiment("ablations", ablations)
    parser.add_argument("--parts", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--variants", nargs="+", help="of these parts; by default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser = commands.timing("speed", speed, repeats=5)
    parser.add_argument("--parts", nargs="+", choices=SPEED_PARTS, default=list(SPEED_PARTS))
    parser.add_argument(
        "--dropout", type=float, nargs="+", default=[0.0], help="of the models in training"
    )
    commands.run(arguments)


if __name__ == "__main__":
    main()
