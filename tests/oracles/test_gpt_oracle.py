"""GPT against its equations in float64, row by row without padding, over unusual calls."""

import copy
import math

import pytest
import torch
import transformers
from draws import DTYPES, batches, counts, drawn, layouts, masks, normal, paddings, seeds
from draws import tolerance as rounding
from hypothesis import example
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attnlib import gpt
from attnlib.decoding import KVCache
from attnlib.gpt import (
    GPT,
    LLAMA_31,
    MLP,
    Block,
    CausalSelfAttention,
    GPTConfig,
    _boolean_mask,
    _check_generation,
    _check_input,
    _check_published,
    _for_groups,
    _make_norm,
    _read_transformers,
    _tie_weights,
    _token_positions,
    config_from_transformers,
    decoder_mask,
    grouped_attention,
    init_weights,
    layer_inputs,
    pad_left,
    rope_cos_sin,
    rope_scaling_factors,
    text_batches,
    text_bits,
    text_loss,
)

torch.set_num_threads(1)
VOCAB = 11
SLOW = LLAMA_31 | dict(factor=8.0, original_max_position_embeddings=16)


@st.composite
def configs(draw):
    """Configurations with any of the options together."""
    heads = draw(st.sampled_from((1, 2, 3, 4, 6)))
    width = draw(st.sampled_from((2, 4, 6)))
    return GPTConfig(
        vocab_size=VOCAB,
        block_size=16,
        n_layer=draw(st.integers(1, 2)),
        n_head=heads,
        n_kv_head=draw(st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0])),
        n_embd=draw(st.sampled_from((heads * width, 5))),
        head_dim=width,
        n_inner=draw(st.sampled_from((None, 1, 7))),
        norm=draw(st.sampled_from(("rms", "layer"))),
        position=draw(st.sampled_from(("rotary", "learned", "none"))),
        mlp=draw(st.sampled_from(("swiglu", "gelu"))),
        qk_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
        window=draw(st.sampled_from((None, 1, 2, 5, 99))),
        rope_base=draw(st.sampled_from((1e4, 5.0))),
        rope_scaling=draw(st.sampled_from((None, dict(rope_type="linear", factor=3.0), SLOW))),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.sampled_from((None, True, False))),
        norm_eps=draw(st.sampled_from((1e-5, 0.1))),
    )


def model_of(config, dtype=torch.float64, seed=0):
    """A model, all of its parameters random, in evaluation mode."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(float(p.ndim == 1), 0.5 if p.ndim == 1 else 0.6 / p.shape[1] ** 0.5)
    return model.to(dtype).eval()


def tokens_of(batch, n, seed=0):
    return torch.randint(VOCAB, (batch, n), generator=torch.Generator().manual_seed(seed))


# --- the equations ----------------------------------------------------------------------------


def norm(x, part, kind, eps):
    """Of the last axis, with the weight and perhaps the bias of a module."""
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = part.weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if getattr(part, "bias", None) is None else x + part.bias.double()


def linear(x, part):
    x = x @ part.weight.double().T
    return x if part.bias is None else x + part.bias.double()


def speeds(config):
    """The angle by which one step turns each pair."""
    d, scaling = config.resolved_head_dim, config.rope_scaling
    found = []
    for i in range(d // 2):
        speed = config.rope_base ** (-2 * i / d)
        if scaling is None:
            factor = 1.0
        elif scaling["rope_type"] == "linear":
            factor = 1 / scaling["factor"]
        else:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = scaling["original_max_position_embeddings"] * speed / (2 * math.pi)
            share = min(max((turns - low) / (high - low), 0), 1)
            factor = share + (1 - share) / scaling["factor"]
        found.append(speed * factor)
    return torch.tensor(found, dtype=torch.float64)


def turned(x, config):
    """Heads (h, N, d), pair i and i + d / 2 turned as complex numbers."""
    first, second = x.chunk(2, -1)
    angles = torch.arange(x.shape[1])[:, None] * speeds(config)
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], -1)


def attended(x, part, config):
    """The heads' sum for tokens (N, C)."""
    n, d, h, g = len(x), config.resolved_head_dim, config.n_head, config.resolved_n_kv_head
    q, k, v = linear(x, part.c_attn).split((h * d, g * d, g * d), dim=1)
    q, k, v = (y.reshape(n, y.shape[1] // d, d).transpose(0, 1) for y in (q, k, v))
    if config.qk_norm:
        q = norm(q, part.q_norm, "rms", config.norm_eps)
        k = norm(k, part.k_norm, "rms", config.norm_eps)
    if config.position == "rotary":
        q, k = turned(q, config), turned(k, config)
    heads = []
    for i in range(h):
        own = i // (h // g)
        logits = q[i] @ k[own].T / d**0.5
        back = torch.arange(n)[:, None] - torch.arange(n)
        seen = (back >= 0) & (back < (config.window or n))
        heads.append(logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v[own])
    return linear(torch.cat(heads, dim=1), part.c_proj)


def through_mlp(x, part, config):
    if config.mlp == "gelu":
        z = linear(x, part.c_fc)
        inner = (2 / math.pi) ** 0.5 * (z + 0.044715 * z**3)
        return linear(0.5 * z * (1 + inner.tanh()), part.c_proj)
    gate, value = linear(x, part.fc1).chunk(2, dim=1)
    return linear(gate * gate.sigmoid() * value, part.fc2)


def through_block(x, block, config):
    x = x + attended(norm(x, block.ln_1, config.norm, config.norm_eps), block.attn, config)
    x = x + through_mlp(norm(x, block.ln_2, config.norm, config.norm_eps), block.mlp, config)
    return x


def equations(model, tokens):
    """Logits (N, vocab) in float64 of tokens (N,), none of which is padding."""
    config = model.config
    x = model.wte.weight.double()[tokens]
    if config.position == "learned":
        x = x + model.wpe.weight.double()[: len(tokens)]
    for block in model.h:
        x = through_block(x, block, config)
    return norm(x, model.ln_f, config.norm, config.norm_eps) @ model.lm_head.weight.double().T


# --- the model --------------------------------------------------------------------------------


def close(found, wanted, dtype=torch.float64, steps=64):
    scale = wanted.abs().max().item() if wanted.numel() else 0
    atol = rounding(dtype, steps) * max(1, scale)
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=atol)


def read(model, tokens, mask, parts):
    """Logits of all tokens, some at a time."""
    cache, found, end = KVCache(), [], 0
    for n in parts:
        seen = None if mask is None else mask[:, : end + n]
        found.append(model(tokens[:, end : end + n], seen, cache=cache))
        end += n
    assert len(cache) == end
    return torch.cat(found, dim=1)


@drawn(
    configs(), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data()
)
def test_any_configuration_is_its_equations(config, batch, parts, data):
    """Padding on any side, several new tokens at a time; outputs and all gradients."""
    model = model_of(config, seed=data.draw(seeds))
    n = sum(parts)
    tokens = tokens_of(batch, n, data.draw(seeds))
    mask = data.draw(st.one_of(st.none(), paddings(batch, n)))
    kept = torch.ones(batch, n, dtype=torch.bool) if mask is None else mask
    dtype = data.draw(st.sampled_from((torch.bool, torch.int64, torch.float32)))
    given = None if mask is None else mask.to(dtype)
    outputs = [model(tokens, given), read(model, tokens, given, parts)]
    rows = [equations(model, row[own]) for row, own in zip(tokens, kept)]
    wanted = torch.cat(rows)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(wanted.square().sum(), parameters, materialize_grads=True)
    for found in outputs:
        assert found.isfinite().all()
        close(found[kept], wanted)
        loss = found[kept].square().sum()
        grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
        for ours, theirs in zip(grads, expected):
            close(ours, theirs, steps=10_000)


@drawn(configs(), st.sampled_from(DTYPES[1:]), st.booleans(), seeds, st.data())
def test_narrow_numbers_are_near_the_equations(config, dtype, autocast, seed, data):
    autocast = autocast and dtype == torch.float32
    model, tokens = model_of(config, dtype, seed), tokens_of(2, 7, seed)
    kept = data.draw(paddings(2, 7))
    with torch.no_grad(), torch.autocast("cpu", enabled=autocast):
        outputs = model(tokens, kept), read(model, tokens, kept, (3, 1, 3))
    with torch.no_grad():
        rows = [equations(model, row[own]) for row, own in zip(tokens, kept)]
    coarse = torch.bfloat16 if autocast else dtype
    for found in outputs:
        assert found.isfinite().all()
        close(found[kept], torch.cat(rows), coarse, 32)


@drawn(configs(), seeds, st.integers(1, 6), st.sampled_from((None, 3)), st.data())
def test_generation_is_the_equations_again_and_again(config, seed, new, eos_id, data):
    model = model_of(config, seed=seed)
    prompts = data.draw(
        st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), min_size=1, max_size=3
        )
    )
    tokens, mask = pad_left(prompts, pad_id=data.draw(st.integers(0, VOCAB - 1)))
    rows = []
    for prompt in prompts:
        row = list(prompt)
        while len(row) < len(prompt) + new:
            ended = eos_id in row[len(prompt) :] and eos_id is not None
            row.append(
                eos_id if ended else equations(model, torch.tensor(row))[-1].argmax().item()
            )
        rows.append(row[len(prompt) :])
    options = dict(temperature=0, eos_id=eos_id, attention_mask=mask)
    found = model.generate(tokens, new, **options)
    assert torch.equal(found[:, : tokens.shape[1]], tokens)
    ended = max((row.index(eos_id) if eos_id in row else new) for row in rows) + 1
    length = new if eos_id is None else min(new, ended)
    assert found[:, tokens.shape[1] :].tolist() == [row[:length] for row in rows]
    assert torch.stack(list(model.stream(tokens, new, **options)), 1).shape[1] == length


@drawn(
    configs(), st.integers(0, 3), st.lists(counts, min_size=1, max_size=3), seeds, st.booleans()
)
def test_parts_alone_are_their_equations(config, batch, parts, seed, train):
    """Attention, MLP, norm, and block, which find positions and window themselves."""
    block = model_of(config, seed=seed).h[0].train(train)
    x = normal((batch, sum(parts), config.n_embd), seed=seed, layout="strided")
    rows = {
        block: [through_block(row, block, config) for row in x],
        block.attn: [attended(row, block.attn, config) for row in x],
        block.mlp: [through_mlp(row, block.mlp, config) for row in x],
        block.ln_1: [norm(row, block.ln_1, config.norm, config.norm_eps) for row in x],
    }
    for part, wanted in rows.items():
        wanted = torch.stack(wanted) if batch else x
        close(part(x), wanted)
        if isinstance(part, (Block, CausalSelfAttention)):
            cache = KVCache()
            found = [part(piece, cache=cache) for piece in x.split(parts, dim=1)]
            close(torch.cat(found, dim=1), wanted)
    assert isinstance(block.mlp, MLP) == (config.mlp == "gelu")
    assert type(_make_norm(config)) is type(block.ln_1)


# --- heads, masks, positions ------------------------------------------------------------------


@drawn(
    batches,
    st.sampled_from(((1, 1), (2, 1), (4, 2), (6, 3), (6, 1), (3, 3))),
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from(DTYPES),
    layouts,
    seeds,
    st.data(),
)
def test_groups_of_heads_are_repeated_keys(batch, heads, n, m, dtype, layout, seed, data):
    h, g = heads
    q = normal((batch, h, n, 4), dtype, seed, layout).requires_grad_()
    k = normal((batch, g, m, 4), dtype, seed + 1, layout).requires_grad_()
    v = normal((batch, g, m, 3), dtype, seed + 2, layout).requires_grad_()
    choices = [st.none(), masks((batch, h, n, m))]
    choices += [st.just("causal")] if m >= n else []
    mask = data.draw(st.one_of(choices))
    found = grouped_attention(q, k, v, mask)
    wide = [x.double() for x in (q, k, v)]
    own = torch.arange(h) // (h // g)
    logits = wide[0] @ wide[1][:, own].mT / 2
    if isinstance(mask, str):
        seen = torch.arange(m) <= torch.arange(m - n, m)[:, None]
    else:
        seen = torch.ones((), dtype=torch.bool) if mask is None else mask
    logits = logits.masked_fill(~seen, -torch.inf)
    dead = ~seen.expand(logits.shape).any(-1, keepdim=True)
    wanted = logits.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0) @ wide[2][:, own]
    close(found, wanted, dtype, 16)
    assert found.dtype == dtype
    weight = normal(wanted.shape, dtype, seed + 3)
    grads = torch.autograd.grad((found * weight).sum(), (q, k, v), materialize_grads=True)
    wanted = torch.autograd.grad(
        (wanted * weight.double()).sum(), (q, k, v), materialize_grads=True
    )
    for ours, theirs in zip(grads, wanted):
        close(ours, theirs, dtype, 64)


@pytest.mark.parametrize("n", [1, 2])
def test_one_query_of_a_batch_for_all(n):
    """Whether there is one query or more, a batch of 1 has the keys of 3."""
    q, k = normal((1, 4, n, 8)), normal((3, 2, 5, 8), seed=1)
    close(grouped_attention(q, k, k), grouped_attention(q.expand(3, -1, -1, -1), k, k))


@drawn(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.data())
def test_masks_of_groups(groups, each, batch, m, data):
    """An entry of the laid out mask is that of its head."""
    h = groups * each
    mask = data.draw(masks((batch, h, 1, m)))
    found = _for_groups(mask, groups).broadcast_to(batch, groups, each, m)
    wanted = mask.broadcast_to(batch, h, 1, m)
    for head in range(h):
        assert torch.equal(found[:, head // each, head % each], wanted[:, head, 0])


@drawn(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from((None, 1, 2, 3, 9)),
    st.sampled_from((torch.bool, torch.int64, torch.float16)),
    st.data(),
)
def test_masks_and_positions_count_tokens(batch, n, past, window, dtype, data):
    m = past + n
    kept = data.draw(st.one_of(st.none(), paddings(batch, m)))
    given = None if kept is None else kept.to(dtype)
    positions = _token_positions(n, past, given).expand(batch, n)
    mask = decoder_mask(n, m, window, given)
    if isinstance(mask, str):
        assert mask == "causal" and n > 1
        mask = torch.ones(n, m, dtype=torch.bool).tril(past)
    mask = torch.ones(n, m, dtype=torch.bool) if mask is None else mask
    mask = mask.broadcast_to(batch, 1, n, m)
    rows = [[True] * m] * batch if kept is None else kept.tolist()
    for b, row in enumerate(rows):
        places = [max(sum(row[: i + 1]) - 1, 0) for i in range(m)]
        assert positions[b].tolist() == places[past:]
        for i in range(n):
            at = past + i
            for j in range(m):
                near = window is None or places[at] - places[j] < window
                if row[at]:  # what padding sees is of no use
                    assert mask[b, 0, i, j].item() == (j <= at and row[j] and near)
    if kept is not None:
        assert torch.equal(_boolean_mask(given), kept)


@drawn(configs(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 4), st.booleans())
def test_what_a_layer_finds_itself(config, batch, n, past, given):
    x = torch.zeros(batch, n, config.n_embd)
    own = (
        rope_cos_sin(config, torch.arange(9)) if given and config.position == "rotary" else None
    )
    rope, mask = layer_inputs(config, x, own, "causal", past)
    if config.position == "rotary":
        wanted = own or rope_cos_sin(config, torch.arange(past, past + n))
        assert all(map(torch.equal, rope, wanted))
    else:
        assert rope is None
    wanted = decoder_mask(n, past + n, config.window)
    assert type(mask) is type(wanted)
    assert torch.equal(mask, wanted) if isinstance(mask, torch.Tensor) else mask == wanted
    other = torch.ones(n, past + n, dtype=torch.bool)
    assert layer_inputs(config, x, own, other, past)[1] is other


@drawn(configs(), st.sampled_from(DTYPES), st.data())
def test_rotations_are_those_of_the_equations(config, dtype, data):
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=4)))
    angles = positions[:, None] * speeds(config)
    for found in (
        rope_cos_sin(config, positions, dtype),
        [x[0, 0] for x in rope_cos_sin(config, positions[None], dtype)],
    ):
        for ours, wanted in zip(found, (angles.cos(), angles.sin())):
            assert ours.dtype == dtype
            torch.testing.assert_close(
                ours.double(), wanted, rtol=0, atol=max(1e-9, rounding(dtype, 1))
            )


@drawn(
    st.sampled_from(("linear", "llama3")),
    st.floats(1, 64),
    st.floats(0.1, 4),
    st.floats(0.1, 8),
    st.sampled_from((8, 100, 8192)),
)
def test_slower_frequencies_are_those_of_transformers(kind, factor, low, more, length):
    settings = dict(rope_type=kind, factor=factor)
    if kind == "llama3":
        settings |= dict(
            low_freq_factor=low,
            high_freq_factor=low + more,
            original_max_position_embeddings=length,
        )
    theirs = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=1,
        max_position_embeddings=8 * length,
        rope_parameters=settings | dict(rope_theta=500.0),
    )
    frequencies = 500.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    wanted, _ = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    found = frequencies * rope_scaling_factors(frequencies, **settings)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=0)


# --- weights ----------------------------------------------------------------------------------


@drawn(configs())
def test_weights_start_as_gpt2s_do(config):
    torch.manual_seed(0)
    wide = GPTConfig(**vars(config) | dict(vocab_size=500, n_embd=300, n_inner=200))
    model = GPT(wide)
    init_weights(model)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all()
        else:
            writes = name.endswith(("attn.c_proj.weight", "mlp.c_proj.weight", "fc2.weight"))
            deviation = 0.02 / (2 * wide.n_layer) ** 0.5 if writes else 0.02
            ratio = p.std(correction=0).item() / deviation
            assert abs(ratio - 1) < 6 / p.numel() ** 0.5 and abs(p.mean()) < deviation / 5


@drawn(configs(), st.booleans())
def test_tied_weights_are_one(config, assign):
    model, other = model_of(config), model_of(config, seed=1)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert (model.lm_head.weight is model.wte.weight) == config.tied
    tokens = tokens_of(1, 4)
    close(model(tokens), other(tokens))
    _tie_weights(model)
    assert model.lm_head.weight is model.wte.weight


HF = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None, vocab_size=VOCAB)


@st.composite
def published(draw):
    """A model of transformers with a configuration that is none of the published ones."""
    kind = draw(st.sampled_from(("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3")))
    heads, tied = draw(st.sampled_from((1, 2, 4))), draw(st.booleans())
    inner = draw(st.sampled_from((5, 32)))
    if kind == "GPT2":
        options = dict(
            n_positions=16,
            n_embd=8,
            n_layer=2,
            n_head=heads,
            n_inner=draw(st.sampled_from((None, inner))),
            layer_norm_epsilon=draw(st.sampled_from((1e-5, 0.1))),
            activation_function=draw(st.sampled_from(("gelu_new", "gelu_pytorch_tanh"))),
        )
    else:
        theta = draw(st.sampled_from((1e4, 50.0)))
        scaling = draw(st.sampled_from((dict(rope_type="default"), SLOW)))
        options = dict(
            hidden_size=8,
            intermediate_size=inner,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=draw(st.sampled_from([g for g in (1, 2, 4) if g <= heads])),
            max_position_embeddings=16,
            rms_norm_eps=draw(st.sampled_from((1e-6, 0.1))),
            rope_parameters=scaling | dict(rope_theta=theta),
        )
        if kind != "Qwen2":
            options["head_dim"] = draw(st.sampled_from((2, 6)))
        if kind == "Mistral":
            options["sliding_window"] = draw(st.sampled_from((None, 1, 3)))
        if kind.startswith("Qwen"):
            slides = draw(st.booleans())
            options |= dict(use_sliding_window=slides, sliding_window=3, max_window_layers=0)
    config = getattr(transformers, f"{kind}Config")(**HF | options, tie_word_embeddings=tied)
    torch.manual_seed(draw(seeds))
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(float(p.ndim == 1), 0.3)
    return model


@drawn(published(), seeds)
def test_models_of_transformers_in_other_shapes(theirs, seed):
    config, weights = _read_transformers(theirs)
    assert config == config_from_transformers(theirs.config)
    ours, tokens = GPT.from_pretrained(theirs), tokens_of(2, 12, seed)
    assert all(torch.equal(x, weights[key]) for key, x in ours.state_dict().items())
    with torch.no_grad():
        close(ours(tokens), theirs(tokens).logits, torch.float32, 200)
        rows = torch.stack([equations(ours, row) for row in tokens])
    close(ours(tokens), rows, torch.float32, 200)


@drawn(st.sampled_from(("silu", "gelu", "none")), st.booleans())
def test_entries_that_are_not_known(value, named):
    config = transformers.LlamaConfig(**HF, hidden_act="silu")
    config.hidden_act = value
    if value == "silu" or not named:
        _check_published(config, **({"hidden_act": ("silu", "relu")} if named else {}))
    else:
        with pytest.raises(ValueError, match=r"hidden_act \(.*\) of llama"):
            _check_published(config, hidden_act=("silu", "relu"))


# --- prompts and settings ---------------------------------------------------------------------


@drawn(
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4),
    st.integers(0, 9),
    st.sampled_from((list, tuple, iter)),
)
@example([[1], [2, 3]], 0, iter)
def test_prompts_with_padding_on_their_left(prompts, pad_id, kind):
    if not prompts or not all(prompts):
        with pytest.raises(ValueError, match="prompts must be at least one"):
            pad_left(kind(prompts), pad_id)
        return
    tokens, mask = pad_left(kind(prompts), pad_id)
    longest = max(map(len, prompts))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [[pad_id] * (longest - len(row)) + row for row in prompts]
    assert mask.tolist() == [
        [i >= longest - len(row) for i in range(longest)] for row in prompts
    ]


@drawn(
    st.integers(0, 2),
    st.integers(0, 6),
    st.integers(0, 4),
    st.integers(-1, 6),
    st.sampled_from((None, 0, VOCAB - 1, VOCAB, -1, 2.0)),
    st.data(),
)
def test_which_prompts_can_be_read(batch, n, past, new, eos_id, data):
    config = GPTConfig(VOCAB, 8, 1, 1, n_embd=2)
    tokens = tokens_of(batch, n)
    mask = data.draw(st.one_of(st.none(), paddings(batch, past + n)))
    fits = batch > 0 and n > 0 and past + n <= 8
    if fits:
        _check_input(tokens, mask, config, past)
    else:
        with pytest.raises(ValueError, match="tokens of shape"):
            _check_input(tokens, mask, config, past)
    own = None if mask is None else mask[:, past:]
    allowed = batch > 0 and n > 0 and new > 0 and n + new - 1 <= 8
    allowed = allowed and (eos_id is None or isinstance(eos_id, int) and 0 <= eos_id < VOCAB)
    if allowed and own is not None:
        for row in own.tolist():
            allowed = allowed and row[-1] and row == sorted(row)
    if allowed:
        _check_generation(tokens, new, own, config, eos_id)
    else:
        with pytest.raises(ValueError, match="must be|tokens of shape"):
            _check_generation(tokens, new, own, config, eos_id)


@drawn(
    st.sampled_from((1, 2, 3, 4, 0, 2.0, True)),
    st.sampled_from((None, 1, 2, 3, 0)),
    st.sampled_from((1, 2, 6, 12)),
    st.sampled_from((None, 1, 2)),
    st.sampled_from(("rotary", "learned", "round")),
    st.sampled_from((None, dict(factor=2.0), SLOW, SLOW | dict(low_freq_factor=4.0))),
)
@example(1, None, 1, None, "learned", None)
def test_which_configurations_are_possible(heads, groups, width, head_dim, position, scaling):
    def build():
        return GPTConfig(
            VOCAB,
            8,
            1,
            heads,
            groups,
            width,
            head_dim,
            position=position,
            rope_scaling=scaling,
        )

    allowed = type(heads) is int and heads > 0 and groups != 0 and scaling in (None, SLOW)
    allowed = allowed and heads % (groups or heads) == 0 and position != "round"
    allowed = allowed and (head_dim is not None or width % heads == 0)
    if allowed and position == "rotary":
        allowed = (head_dim or width // heads) % 2 == 0
    if not allowed:
        with pytest.raises(ValueError, match="must"):
            build()
        return
    config = build()
    assert config.resolved_n_kv_head == (groups or heads)
    assert config.resolved_head_dim == (head_dim or width // heads)
    assert GPT(config)(tokens_of(1, 3)).shape == (1, 3, VOCAB)


NUMBERS = [
    dict(rope_base=0.0),
    dict(rope_base=math.nan),
    dict(norm_eps=-1.0),
    dict(norm_eps="1e-5"),
    dict(rope_scaling=dict(rope_type="linear", factor=math.nan)),
    dict(rope_scaling=dict(rope_type="linear", factor="2")),
    dict(rope_scaling=SLOW | dict(high_freq_factor=1.0)),
    dict(dropout=math.nan),
]


@pytest.mark.parametrize("options", NUMBERS, ids=str)
def test_numbers_of_configurations(options):
    with pytest.raises(
        (ValueError, TypeError), match=r"(base|eps|factor|scaling|dropout).* must"
    ):
        GPTConfig(**options)


# --- texts ------------------------------------------------------------------------------------


@drawn(st.integers(0, 9), st.integers(1, 6), st.integers(1, 3), seeds, st.integers(0, 9))
def test_batches_are_pieces_of_the_text(count, length, batch_size, seed, step):
    text = torch.arange(count) * 7
    if count <= length:
        with pytest.raises(ValueError, match=r"tokens \(\d+\)"):
            text_batches(text, length, batch_size, seed)
        return
    batches = text_batches(text, length, batch_size, seed)
    (found,) = batches(step)
    assert found.shape == (batch_size, length + 1) and torch.equal(found, batches(step)[0])
    assert (found[:, 1:] - found[:, :-1] == 7).all() and (found >= 0).all()
    assert (found <= 7 * (count - 1)).all()


@drawn(
    st.integers(0, 2), st.integers(1, 5), st.sampled_from(DTYPES), layouts, st.booleans(), seeds
)
def test_the_loss_is_the_sum_of_surprises(batch, n, dtype, layout, autocast, seed):
    logits = normal((batch, n, VOCAB), dtype, seed, layout).requires_grad_()
    tokens = tokens_of(batch, n + 1, seed)
    with torch.autocast("cpu", enabled=autocast):
        loss, count = text_loss(lambda _: logits, (tokens,))
    assert text_loss(lambda _: logits, (tokens.int(),))[0] == loss or autocast
    surprises = -logits.double().log_softmax(-1).gather(2, tokens[:, 1:, None])
    assert count == batch * n and loss.dtype == torch.promote_types(dtype, torch.float32)
    close(loss, surprises.sum(), loss.dtype, 16)
    grads = [torch.autograd.grad(x.sum(), logits)[0] for x in (loss, surprises)]
    close(*grads, dtype, 4)


class Bigrams(torch.nn.Module):
    """Logits by the last token; it keeps how many tokens it has seen before each."""

    def __init__(self, seed):
        super().__init__()
        self.table, self.seen = normal((VOCAB, VOCAB), torch.float32, seed), []

    def forward(self, tokens):
        self.seen.append(tokens.shape[1])
        return self.table[tokens]


@drawn(st.integers(0, 30), st.integers(1, 9), st.sampled_from((None, 1, 2, 5, 9)), seeds)
def test_bits_of_a_text(count, length, stride, seed):
    """Each token once, none of them from more than `length` before it."""
    tokens, model = tokens_of(1, count, seed)[0], Bigrams(seed)
    if stride is not None and stride > length:
        with pytest.raises(ValueError, match=r"stride \(\d+\)"):
            text_bits(model, tokens, length, stride)
        return
    log_probs = model.table.double().log_softmax(-1)
    wanted = 0.0
    for before, token in zip(tokens.tolist(), tokens.tolist()[1:]):
        wanted -= log_probs[before, token].item() / math.log(2)
    for own in (tokens, tokens.int()):
        assert abs(text_bits(model, own, length, stride) - wanted) < 1e-9 * max(1, wanted)
    assert all(seen <= length for seen in model.seen)


@drawn(configs(), st.integers(2, 16), st.integers(1, 9), seeds)
def test_bits_are_from_as_many_tokens_before_as_promised(config, count, length, seed):
    model, tokens = model_of(config, seed=seed), tokens_of(1, count, seed)[0]
    wanted = 0.0
    for i in range(1, count):  # with a stride of 1 all have the full length before them
        row = equations(model, tokens[max(0, i - length) : i])[-1].log_softmax(-1)
        wanted -= row[tokens[i]].item() / math.log(2)
    assert abs(text_bits(model, tokens, length, 1) - wanted) < 1e-6 * max(1, wanted)


ORACLES = {
    "GPTConfig": test_which_configurations_are_possible,
    "_check_rope_scaling": test_which_configurations_are_possible,
    "_check_config": test_which_configurations_are_possible,
    "rope_cos_sin": test_rotations_are_those_of_the_equations,
    "rope_scaling_factors": test_slower_frequencies_are_those_of_transformers,
    "_boolean_mask": test_masks_and_positions_count_tokens,
    "_token_positions": test_masks_and_positions_count_tokens,
    "decoder_mask": test_masks_and_positions_count_tokens,
    "_for_groups": test_masks_of_groups,
    "_one_query_attention": test_groups_of_heads_are_repeated_keys,
    "grouped_attention": test_groups_of_heads_are_repeated_keys,
    "layer_inputs": test_what_a_layer_finds_itself,
    "CausalSelfAttention": test_parts_alone_are_their_equations,
    "MLP": test_parts_alone_are_their_equations,
    "_make_norm": test_parts_alone_are_their_equations,
    "Block": test_parts_alone_are_their_equations,
    "init_weights": test_weights_start_as_gpt2s_do,
    "_tie_weights": test_tied_weights_are_one,
    "_check_input": test_which_prompts_can_be_read,
    "_check_generation": test_which_prompts_can_be_read,
    "pad_left": test_prompts_with_padding_on_their_left,
    "config_from_transformers": test_models_of_transformers_in_other_shapes,
    "_check_published": test_entries_that_are_not_known,
    "_read_transformers": test_models_of_transformers_in_other_shapes,
    "GPT": test_any_configuration_is_its_equations,
    "text_batches": test_batches_are_pieces_of_the_text,
    "text_loss": test_the_loss_is_the_sum_of_surprises,
    "text_bits": test_bits_of_a_text,
}
NOT_HERE = {
    "_CHOICES": "a table of names",
    "_SCALINGS": "a table of names",
    "GPT2_STYLE": "a table of settings",
    "LLAMA_3": "a table of settings",
    "LLAMA_31": "a table of settings",
    "QWEN": "a table of settings",
    "PUBLISHED": "a table of settings, whose parameters tests/test_gpt.py counts",
}


def test_nothing_is_left_out():
    assert set(gpt.__all__) == {name for name in ORACLES | NOT_HERE if name[0] != "_"}
