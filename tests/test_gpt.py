"""GPT: parity with transformers, cache, padding, sampling, counts, bad input, the corpus."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.attention import record_attention
from attnlib.data import book_text, train_tokenizer
from attnlib.decoding import KVCache, min_p_filter, next_token
from attnlib.gpt import (
    GPT,
    PUBLISHED,
    GPTConfig,
    _token_positions,
    decoder_mask,
    grouped_attention,
    pad_left,
    rope_cos_sin,
    rope_scaling_factors,
    text_bits,
    text_loss,
)
from attnlib.inference import optimize_for_inference
from attnlib.position import apply_rotary
from helpers import close

torch.set_num_threads(1)
NONE = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
LLAMA = dict(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    **NONE,
)
LONGER = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
GPT2 = dict(vocab_size=60, n_positions=64, n_embd=32, n_layer=3, n_head=4, **NONE)
PEERS = {
    "gpt2": ("GPT2", "GPT2LMHeadModel", GPT2),
    "llama": ("Llama", "LlamaForCausalLM", LLAMA),
    "llama 3.1": (
        "Llama",
        "LlamaForCausalLM",
        LLAMA | dict(rope_parameters=LONGER, tie_word_embeddings=True),
    ),
    "linear": (
        "Llama",
        "LlamaForCausalLM",
        LLAMA | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)),
    ),
    "mistral": ("Mistral", "MistralForCausalLM", LLAMA | dict(sliding_window=8)),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", LLAMA | dict(rms_norm_eps=1e-6)),
    "qwen3": (
        "Qwen3",
        "Qwen3ForCausalLM",
        LLAMA | dict(head_dim=16, tie_word_embeddings=True),
    ),
}
every = pytest.mark.parametrize("name", PEERS)
SMALL = dict(vocab_size=40, block_size=32, n_layer=2, n_head=4, n_embd=32)
OPTIONS = {
    "default": {},
    "2019": dict(norm="layer", position="learned", mlp="gelu", bias=True),
    "grouped": dict(n_kv_head=2),
    "one head of keys": dict(n_kv_head=1, head_dim=6),
    "window": dict(window=5),
    "normalised": dict(qk_norm=True, tied=False, qkv_bias=True),
    "no positions": dict(position="none"),
    "all": dict(n_kv_head=2, window=5, qk_norm=True, rope_base=500.0, n_inner=24),
}
optional = pytest.mark.parametrize("option", OPTIONS)


def peer(name, **options):
    """A small model of the transformers library, every one of its parameters random."""
    config, model, settings = PEERS[name]
    config = getattr(transformers, f"{config}Config")(**settings | options)
    torch.manual_seed(0)
    model = getattr(transformers, model)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(float(p.ndim == 1), 0.1)
    return model


def small(option="default", seed=0, **options):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SMALL | OPTIONS[option] | options)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def some_tokens(batch=2, n=20, vocab=40, seed=1):
    return torch.randint(1, vocab, (batch, n), generator=torch.Generator().manual_seed(seed))


@every
def test_logits_and_gradients_are_those_of_transformers(name):
    theirs = peer(name)
    ours, tokens = GPT.from_pretrained(theirs), some_tokens(n=40, vocab=60)
    outputs = ours(tokens), theirs(tokens).logits
    close(*outputs, 1e-5)
    leaves = ours.wte.weight, theirs.get_input_embeddings().weight
    grads = [torch.autograd.grad(y.logsumexp(-1).mean(), x)[0] for x, y in zip(leaves, outputs)]
    close(*grads, 1e-6)


class Norm(torch.nn.Module):
    """Their RMSNorm, without its step through float32."""

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class Angles(torch.nn.Module):
    """Their rotary embedding, without its step through float32."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x, position_ids):
        cos, sin = rope_cos_sin(self.config, position_ids[0], torch.float64)
        return cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]


@every
def test_logits_in_float64(name):
    """As of GPT-2 as it is; the others take norms and angles in float32, which is replaced."""
    theirs = peer(name).double()
    ours = GPT.from_pretrained(theirs)
    if name != "gpt2":
        theirs.model.rotary_emb = Angles(ours.config)
        for key, part in list(theirs.named_modules()):
            if type(part).__name__.endswith("RMSNorm"):
                theirs.set_submodule(key, Norm(part.weight, part.variance_epsilon))
    tokens = some_tokens(n=40, vocab=60)
    close(ours(tokens), theirs(tokens).logits, 1e-10)


@every
def test_angles_are_theirs(name):
    """The formula that replaces theirs in float64 agrees with theirs in float32."""
    if name != "gpt2":
        theirs, positions = peer(name), torch.arange(64)
        config = GPT.from_pretrained(theirs).config
        wanted = theirs.model.rotary_emb(torch.zeros(1), positions[None])
        for ours, both in zip(rope_cos_sin(config, positions), wanted):
            close(ours, both[0, :, : config.resolved_head_dim // 2], 1e-5)


@every
def test_greedy_tokens_are_theirs(name):
    theirs, tokens = peer(name), some_tokens(n=6, vocab=60)
    ours = GPT.from_pretrained(theirs)
    wanted = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=40,
        do_sample=False,
        use_cache=True,
    )
    assert torch.equal(ours.generate(tokens, 40, temperature=0), wanted)


@every
def test_padded_prompts_are_theirs(name):
    theirs = peer(name)
    ours = GPT.from_pretrained(theirs)
    tokens, mask = pad_left([[5, 6, 7, 8, 9, 10], [3, 4]])
    wanted = theirs.generate(
        tokens, attention_mask=mask.long(), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert torch.equal(ours.generate(tokens, 20, temperature=0, attention_mask=mask), wanted)


def test_weights_are_copies():
    theirs = peer("gpt2")
    ours = GPT.from_pretrained(theirs)
    with torch.no_grad():
        ours.wte.weight.zero_()
    assert theirs.transformer.wte.weight.abs().sum() > 0
    assert ours.lm_head.weight is ours.wte.weight


COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_sizes_have_the_published_counts(name):
    with torch.device("meta"):
        model = GPT(PUBLISHED[name])
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]


@optional
def test_a_cache_changes_nothing(option):
    model, tokens = small(option), some_tokens()
    whole, cache, parts = model(tokens), KVCache(), []
    for start, end in ((0, 7), (7, 8), (8, 12), *((i, i + 1) for i in range(12, 20))):
        parts.append(model(tokens[:, start:end], cache=cache))
    close(torch.cat(parts, dim=1), whole)
    assert len(cache) == 20 and cache.room[0].shape[2] == model.config.resolved_n_kv_head


@optional
def test_no_token_sees_a_later_one(option):
    model, tokens = small(option), some_tokens()
    other = tokens.clone()
    other[:, 11:] = other[:, 11:] % 39 + 1
    close(model(tokens)[:, :11], model(other)[:, :11], 0)
    assert (model(tokens)[:, 11:] - model(other)[:, 11:]).abs().amax(-1).min() > 1e-6


@optional
def test_padding_on_the_left_changes_nothing(option):
    model = small(option)
    prompts = [[5, 6, 7, 8, 9], [3, 4], [11]]
    tokens, mask = pad_left(prompts)
    together = model.generate(tokens, 12, temperature=0, attention_mask=mask)
    for row, prompt in zip(together, prompts):
        alone = model.generate(torch.tensor([prompt]), 12, temperature=0)[0]
        assert torch.equal(row[5 - len(prompt) :], alone)
    logits = model(tokens, mask)
    close(logits[1, -2:], model(torch.tensor([prompts[1]]))[0])


def test_a_window_reaches_layers_times_its_width():
    model = small("window", n_layer=3, window=4, position="none")
    x = y = model.wte(some_tokens(1, 20)).detach().requires_grad_()
    for block in model.h:
        y = block(y, mask=decoder_mask(20, 20, 4))
    grad = torch.autograd.grad(y[0, -1].sum(), x)[0][0].abs().sum(-1)
    assert grad.nonzero()[0] == 19 - 3 * (4 - 1)


@optional
def test_a_block_alone_has_its_window_and_its_positions(option):
    """As in the model, with the defaults, at once and token by token."""
    model = small(option)
    fast, config = optimize_for_inference(small(option).float()), model.config
    for block, dtype, tolerance in (
        (model.h[0], torch.float64, 1e-10),
        (fast.h[0], None, 1e-4),
    ):
        x, cache = torch.randn(2, 9, 32, dtype=dtype), KVCache()
        rope = None
        if config.position == "rotary":
            rope = rope_cos_sin(config, torch.arange(9), x.dtype)
        wanted = block(x, rope, decoder_mask(9, 9, config.window))
        close(block(x), wanted, tolerance)
        parts = [block(part, cache=cache) for part in x.split([1, 4, 1, 3], dim=1)]
        close(torch.cat(parts, dim=1), wanted, tolerance)


@optional
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_anywhere_changes_nothing(option, dtype):
    """Against the rows without their padding."""
    model = small(option)
    mask = torch.tensor([[0, 1, 0, 0, 1, 1, 1, 0, 1, 1], [1] * 10, [0] * 6 + [1] * 4]) == 1
    tokens = some_tokens(3, 10)
    found = model(tokens, mask.to(dtype))
    for row, own, logits in zip(tokens, mask, found):
        close(logits[own], model(row[own][None])[0])


@pytest.mark.parametrize("value", [2.0, -1.0, -math.inf, math.nan, 0.5])
def test_masks_that_are_not_0_or_1(value):
    model, tokens = small(), some_tokens(n=5)
    mask = torch.ones(2, 5)
    mask[1, 2] = value
    calls = [
        lambda: model(tokens, mask),
        lambda: model.generate(tokens, 2, attention_mask=mask),
        lambda: decoder_mask(5, 5, attention_mask=mask),
        lambda: _token_positions(5, 0, mask),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"attention_mask holds .*; it must be boolean"):
            call()


def test_grouped_attention_repeats_keys():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8, generator=g, dtype=torch.float64) for h in (6, 2, 2))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    close(grouped_attention(q, k, v, "causal"), wanted)
    close(grouped_attention(q[:, :, -1:], k, v), wanted[:, :, -1:])


MASKS = {  # of queries (2, 4, n, d) and keys (2, 2, 5, d)
    "none": lambda n: None,
    "causal": lambda n: "causal",
    "for all": lambda n: torch.rand(n, 5) > 0.4,
    "of keys": lambda n: torch.rand(5) > 0.4,
    "per head": lambda n: torch.rand(4, n, 5) > 0.4,
    "per head and row": lambda n: torch.rand(2, 4, n, 5) > 0.4,
    "per head, of queries": lambda n: torch.rand(4, n, 1) > 0.4,
    "padding": lambda n: torch.rand(2, 1, 1, 5) > 0.4,
}


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("bias_shape", [None, (5,), (4, 1, 1), (2, 1, 1, 5), (2, 4, 1, 5)])
def test_grouped_attention_is_that_of_repeated_keys(n, groups, name, bias_shape):
    torch.manual_seed(0)
    q = torch.randn(2, 4, n, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, groups, 5, 8, dtype=torch.float64)
    mask = MASKS[name](n)
    bias = None if bias_shape is None else torch.randn(bias_shape, dtype=torch.float64)
    found = grouped_attention(q, k, v, mask, bias=bias)
    own = torch.arange(4) // (4 // groups)  # the head of keys that each head of queries has
    logits = q @ k[:, own].mT / 8**0.5
    if bias is not None:
        logits = logits + bias
    if isinstance(mask, str):
        mask = torch.arange(5) <= torch.arange(5 - n, 5)[:, None]
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0)  # zeros where a query has no key
    close(found, weights @ v[:, own], 1e-12)


def test_grouped_attention_of_one_key_and_wide_values():
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 3)
    for mask in (None, "causal"):
        found = grouped_attention(q, k, v, mask)
        close(found, v.repeat_interleave(2, 1), 1e-6)  # the one value


@pytest.mark.parametrize(
    "k_shape, mask, message",
    [
        ((2, 3, 5, 8), None, r"k of shape \(2, 3, 5, 8\) has 3 heads; they must divide the 4"),
        ((2, 2, 5, 8), torch.ones(2, 1, 5) > 0, r"mask of shape \(2, 1, 5\) must broadcast"),
        ((2, 2, 5, 8), torch.ones(2, 5) > 0, r"mask of shape \(2, 5\) must broadcast"),
        ((2, 2, 5, 8), "all", r"mask \('all'\) must be boolean, or 'causal'"),
        ((2, 2, 0, 8), "causal", r"mask \('causal'\) must be .* as many keys \(0\)"),
    ],
)
def test_grouped_attention_refuses(k_shape, mask, message):
    k = torch.randn(k_shape)
    with pytest.raises(ValueError, match=message):
        grouped_attention(torch.randn(2, 4, 1, 8), k, k, mask)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 1e-4)]
)
def test_the_loss_of_a_text_keeps_float64(dtype, tolerance):
    logits, tokens = torch.randn(2, 5, 9).to(dtype), torch.randint(9, (2, 6))
    total, count = text_loss(lambda _: logits, (tokens,))
    wide = logits.double()
    wanted = wide.exp().sum(-1).log() - wide.gather(2, tokens[:, 1:, None])[..., 0]
    assert count == 10 and total.dtype == torch.promote_types(dtype, torch.float32)
    close(total.double(), wanted.sum(), tolerance)


def test_layouts_of_rotary_positions():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 9, 8, generator=g, dtype=torch.float64)
    sort = torch.cat([torch.arange(0, 8, 2), torch.arange(1, 8, 2)])
    positions = torch.arange(9)
    wanted = apply_rotary(x, positions)[..., sort]
    close(apply_rotary(x[..., sort], positions, interleaved=False), wanted)


def test_slower_rotations():
    frequencies = torch.tensor([1.0, 0.01, 1e-5], dtype=torch.float64)
    kept = rope_scaling_factors(
        frequencies, **{k: v for k, v in LONGER.items() if k != "rope_theta"}
    )
    close(kept, torch.tensor([1.0, 1 / 8, 1 / 8], dtype=torch.float64), 1e-12)


# --- generation -------------------------------------------------------------------------------


def test_streaming_gives_the_same_tokens():
    model, tokens = small(), some_tokens(n=5)
    new = list(model.stream(tokens, 9, temperature=0))
    whole = model.generate(tokens, 9, temperature=0)
    assert torch.equal(torch.stack(new, dim=1), whole[:, 5:]) and len(new) == 9
    assert torch.is_grad_enabled() and not model.training


def test_hooks_and_subclasses_take_part_in_generation():
    """A hook bans a token; a subclass adds to the logits."""
    tokens = some_tokens(n=5)
    plain = small().generate(tokens, 6, temperature=0)[:, 5:]
    banned = int(plain[0, 0])
    model = small()
    model.register_forward_hook(lambda module, args, out: out.index_fill(-1, here, -math.inf))
    here = torch.tensor([banned])
    found = model.generate(tokens, 6, temperature=0)[:, 5:]
    assert not (found == banned).any() and (plain == banned).any()

    class Other(GPT):
        def forward(self, tokens, attention_mask=None, cache=None, last_only=False):
            out = super().forward(tokens, attention_mask, cache)
            return out.index_fill(-1, here, -math.inf)

    other = Other(small().config).double()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.generate(tokens, 6, temperature=0)[:, 5:], found)


def test_only_the_last_logits_are_computed():
    model, shapes = small(), []
    model.lm_head.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    model.generate(some_tokens(n=5), 3, temperature=0)
    assert shapes == [(2, 1, 40)] * 3
    close(model(some_tokens(), last_only=True), model(some_tokens())[:, -1:])


def test_streams_in_turns_and_a_training_step_between():
    """Dropout is off in every step and on in training; afterwards all modes are as before."""
    model, tokens = small(dropout=0.9).train(), some_tokens(n=5)
    model.h[0].eval()
    before = [part.training for part in model.modules()]
    wanted = small(dropout=0.9).generate(tokens, 4, temperature=0)[:, 5:]
    first, second = (model.stream(tokens, 4, temperature=0) for _ in range(2))
    rows = []
    for i in range(4):
        rows += [next(first), next(second)]
        assert [part.training for part in model.modules()] == before
        assert (model(tokens) - model(tokens)).abs().max() > 0 and torch.is_grad_enabled()
        assert torch.equal(rows[-1], wanted[:, i]) and torch.equal(rows[-2], wanted[:, i])
    assert next(first, None) is None
    del second
    assert [part.training for part in model.modules()] == before


def test_a_row_ends():
    model, tokens = small(), some_tokens(3, 4)
    plain = model.generate(tokens, 20, temperature=0)[:, 4:]
    eos = int(plain[0, 3])
    ended = model.generate(tokens, 20, temperature=0, eos_id=eos)[:, 4:]
    for row, free in zip(ended.tolist(), plain.tolist()):
        stop = free.index(eos) + 1 if eos in free else len(row)
        assert row[:stop] == free[: min(stop, len(row))] and set(row[stop:]) <= {eos}


def test_training_mode_is_restored():
    model = small(dropout=0.5).train()
    first = model.generate(some_tokens(), 4, temperature=0)
    assert (
        torch.equal(first, model.generate(some_tokens(), 4, temperature=0)) and model.training
    )


@pytest.mark.parametrize("options", [{}, dict(top_k=3), dict(top_p=0.7), dict(min_p=0.2)])
def test_draws_have_their_probabilities(options):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]).log_softmax(-1)
    p = (logits / 0.8).softmax(-1)
    kept = {0: p >= 0, 1: p >= p[2], 2: p >= p[1], 3: p >= 0.2 * p[0]}[
        0 if not options else 1 + ["top_k", "top_p", "min_p"].index(*options)
    ]
    wanted = torch.where(kept, p, 0) / p[kept].sum()
    drawn = next_token(
        logits.expand(40_000, 5), 0.8, **options, generator=torch.Generator().manual_seed(0)
    )
    found = torch.tensor([Counter(drawn.tolist())[i] for i in range(5)]) / 40_000
    close(found, wanted, 0.012)


@settings(deadline=None, max_examples=30)
@given(st.floats(0.0, 1.0), st.integers(0, 100))
def test_min_p_keeps_the_best(p, seed):
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(seed))
    kept = min_p_filter(logits, p) > -math.inf
    assert kept.gather(1, logits.argmax(1, keepdim=True)).all()
    shares = logits.softmax(-1)
    assert (shares[kept] >= (p - 1e-5) * shares.amax(1, keepdim=True).expand(3, 9)[kept]).all()


@pytest.mark.parametrize("dtype, p", [(torch.float16, 0.09), (torch.bfloat16, 0.03)])
def test_min_p_in_half_precision_keeps_what_float64_keeps(dtype, p):
    logits = torch.linspace(290, 300, 41)[None].to(dtype)
    kept = min_p_filter(logits, p) > -math.inf
    shares = logits.double().softmax(-1)
    assert torch.equal(kept, shares >= p * shares.amax(1, keepdim=True))


# --- optimized --------------------------------------------------------------------------------


@optional
def test_an_optimized_copy_gives_the_same(option):
    model = small(option).float()
    fast, tokens = optimize_for_inference(model), some_tokens()
    with torch.no_grad():
        close(fast(tokens), model(tokens), 1e-4)
    wanted = model.generate(tokens[:, :6], 20, temperature=0)
    assert torch.equal(fast.generate(tokens[:, :6], 20, temperature=0), wanted)
    prompts, mask = pad_left([[5, 6, 7, 8, 9], [3, 4], [11]])
    wanted = model.generate(prompts, 12, temperature=0, attention_mask=mask)
    found = fast.generate(prompts, 12, temperature=0, attention_mask=mask)
    assert torch.equal(found, wanted)


# --- bad input --------------------------------------------------------------------------------

BAD = [
    (dict(norm="batch"), "norm"),
    (dict(position="sinus"), "position"),
    (dict(mlp="relu"), "mlp"),
    (dict(n_head=5), "n_embd"),
    (dict(n_kv_head=3), "n_kv_head"),
    (dict(n_kv_head=0), "n_kv_head"),
    (dict(head_dim=7), "head_dim"),
    (dict(window=0), "window"),
    (dict(dropout=1.0), "dropout"),
    (dict(vocab_size=0), "vocab_size"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_scaling.*yarn"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=4.0)), "rope_scaling.*low_freq_factor"),
    (dict(rope_scaling="yarn"), "rope_scaling.*yarn"),
    (dict(rope_scaling=dict(rope_type="linear", factor=0)), "rope_scaling.*positive"),
    (dict(rope_base=0.0), "rope_base"),
    (dict(n_embd=0, head_dim=4), "n_embd"),
]


@pytest.mark.parametrize("options, message", BAD)
def test_an_impossible_configuration(options, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**SMALL | options)


def test_bad_tokens():
    model, tokens = small(), some_tokens()
    for wrong, message in (
        (tokens + 30, "tokens holds the token"),
        (some_tokens(n=33), "block_size"),
        (tokens[0], "tokens of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            model(wrong)
    with pytest.raises(TypeError, match="tokens of dtype"):
        model(tokens.float())
    with pytest.raises(ValueError, match="attention_mask of shape"):
        model(tokens, torch.ones(2, 19))
    with pytest.raises(ValueError, match="block_size"):
        model.generate(tokens, 14)
    assert model.generate(tokens, 13).shape == (2, 33)  # the last token need not be read


def test_bad_prompts():
    model, tokens = small(), some_tokens(n=5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1]])
    with pytest.raises(ValueError, match="attention_mask.* in row 1.*left"):
        model.generate(tokens, 3, attention_mask=mask)
    with pytest.raises(ValueError, match="row 0"):
        model.generate(tokens, 3, attention_mask=mask.flip(1) * 0)
    with pytest.raises(ValueError, match="prompts"):
        pad_left([[1, 2], []])
    for wrong, message in (
        (dict(temperature=-1.0), "temperature"),
        (dict(top_k=0), "top_k"),
        (dict(top_p=0.0), "top_p"),
        (dict(min_p=2.0), "min_p"),
        (dict(eos_id=40), "eos_id"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(tokens, 3, **wrong)
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(tokens, 0)


def test_a_model_that_cannot_be_read():
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=2.0)
    half = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    for model, message in (
        (peer("gpt2", activation_function="relu"), "activation_function"),
        (peer("llama", attention_bias=True), "attention_bias"),
        (peer("llama", hidden_act="gelu"), "hidden_act"),
        (peer("llama", rope_parameters=yarn), "rope_scaling.*yarn"),
        (peer("llama", rope_parameters=half), "rope_scaling.*partial_rotary_factor"),
        (peer("gpt2", add_cross_attention=True), "add_cross_attention"),
        (
            peer("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=1),
            "layer_types",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            GPT.from_pretrained(model)


def test_what_is_no_language_model():
    for source in (None, {}, peer("llama").model):
        with pytest.raises(TypeError, match="source .* language model"):
            GPT.from_pretrained(source)


@pytest.mark.parametrize("name", ["gpt2", "llama 3.1", "qwen3"])
def test_a_folder_is_read_in_float32(name, tmp_path):
    theirs = peer(name).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ours, tokens = GPT.from_pretrained(str(tmp_path)), some_tokens(vocab=60)
    assert ours.wte.weight.dtype == torch.float32
    close(ours(tokens), GPT.from_pretrained(theirs.float())(tokens), 0)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPTConfig().n_layer = 3
    assert dataclasses.replace(GPTConfig(), n_head=8).resolved_n_kv_head == 8


# --- the corpus -------------------------------------------------------------------------------


def test_the_pinned_text_comes_back():
    text = book_text()
    assert len(text) == 770_274 and text == "".join(map(book_text, ("train", "valid", "test")))
    tokenizer = train_tokenizer(book_text("test"), 400)
    for sample in (text[:20_000], "🙂 注意\t\u00a0\n\n  x", ""):
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample
    assert tokenizer.get_vocab_size() == 400
    assert tokenizer.token_to_id("<|endoftext|>") == 399


def test_bad_corpora():
    with pytest.raises(ValueError, match="split"):
        book_text("dev")
    with pytest.raises(ValueError, match="vocab_size"):
        train_tokenizer("text", 256)


def test_weights_of_attention_are_recorded():
    model, tokens = small("grouped"), some_tokens()
    with record_attention() as maps:
        model(tokens)
    assert [tuple(x.shape) for x in maps] == [(2, 4, 20, 20)] * 2


@pytest.mark.parametrize("empty", [False, True])
def test_tied_weights_stay_tied_when_a_state_dict_is_assigned(empty):
    config = GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=8)
    model = GPT(config)
    with torch.device("meta"):
        other = GPT(config)
    if empty:
        other = other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict(), assign=not empty)
    assert other.lm_head.weight is other.wte.weight
    assert sum(p.numel() for p in other.parameters()) == sum(
        p.numel() for p in model.parameters()
    )
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens), other(tokens))
    other(tokens).sum().backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert torch.equal(other.lm_head.weight, other.wte.weight)


def test_a_tied_model_refuses_two_different_matrices():
    config = dict(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=8)
    untied = GPT(GPTConfig(**config, tied=False))
    with pytest.raises(ValueError, match=r"'wte.weight' and 'lm_head.weight'"):
        GPT(GPTConfig(**config)).load_state_dict(untied.state_dict())
    with pytest.raises(ValueError, match=r"'0.wte.weight' and '0.lm_head.weight'"):
        torch.nn.Sequential(GPT(GPTConfig(**config))).load_state_dict(
            {f"0.{name}": x for name, x in untied.state_dict().items()}
        )


def test_a_stride_of_one_is_the_default_of_a_short_window():
    model = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=8))
    tokens = torch.tensor([1, 2, 3, 4])
    log_probs = model(tokens[:-1, None])[:, 0].double().log_softmax(-1)  # each token alone
    bits = -log_probs.gather(1, tokens[1:, None]).sum().item() / math.log(2)
    assert text_bits(model, tokens, 1) == pytest.approx(bits, abs=1e-6)
