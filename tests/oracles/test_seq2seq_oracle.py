"""attnlib.seq2seq by the equations of its GRUs in float64, one sentence at a time."""

import pytest
import torch
from dense import agree
from draws import drawn, dtypes, normal, seeds
from hypothesis import example
from hypothesis import strategies as st
from signatures import unchecked

import attnlib.seq2seq as library
from attnlib.seq2seq import (
    RecurrentDecoder,
    RecurrentEncoder,
    Seq2Seq,
    check_padding,
    check_some_tokens,
    check_token,
    check_tokens,
)

SOURCE, TARGET, EMBED, HIDDEN = 9, 8, 3, 4  # sizes of vocabularies and layers
steps = st.integers(min_value=1, max_value=6)
sentences = st.lists(steps, min_size=1, max_size=3)  # their lengths
paddings = st.sampled_from((0, 3))


def random(module, dtype, seed):
    """The module with random parameters; the padding's embedding stays zero."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(module.named_parameters()):
            parameter.copy_(0.5 * normal(parameter.shape, seed=seed + number))
    for part in module.modules():
        if isinstance(part, torch.nn.Embedding):
            part.weight.data[part.padding_idx] = 0
    return module.to(dtype)


def tokens(lengths, vocab, pad_id, extra, seed):
    """Random sentences of these lengths with padding behind, the longest with `extra` of it."""
    padding = pad_id % vocab
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(vocab - 1, (len(lengths), max(lengths) + extra), generator=generator)
    found = found + (found >= padding)  # every token but the padding
    for row, length in zip(found, lengths):
        row[length:] = padding
    return found


def exact(module):
    """Its parameters by their names, in float64."""
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def cell(x, h, weight_ih, weight_hh, bias_ih, bias_hh):
    """One step of a GRU (Cho et al. 2014) with PyTorch's order of the gates."""
    inputs, states = weight_ih @ x + bias_ih, weight_hh @ h + bias_hh
    (reset, update, new), (r, z, old) = inputs.chunk(3), states.chunk(3)
    reset, update = torch.sigmoid(reset + r), torch.sigmoid(update + z)
    return (1 - update) * torch.tanh(new + reset * old) + update * h


def encode(p, sentence):
    """Annotations (M, 2 hidden) and summary (2 hidden) of one sentence without padding."""
    halves, last = [], []
    for suffix, order in (("", 1), ("_reverse", -1)):
        kinds = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
        own = [p[f"gru.{kind}_l0{suffix}"] for kind in kinds]
        h, states = torch.zeros(HIDDEN, dtype=torch.float64), []
        for token in sentence[::order]:
            h = cell(p["embed.weight"][token], h, *own)
            states.append(h)
        halves.append(torch.stack(states[::order]))
        last.append(h)
    return torch.cat(halves, dim=-1), torch.cat(last)


def decode_step(p, token, state, annotations, summary):
    """Logits, state and weights (or None) of one step of one sentence."""
    context, weights = summary, None
    if "attend.score.weight" in p:
        hidden = p["attend.query_proj.weight"] @ state
        hidden = torch.tanh(hidden + annotations @ p["attend.key_proj.weight"].T)
        weights = torch.softmax(hidden @ p["attend.score.weight"][0], dim=0)
        context = weights @ annotations
    y = p["embed.weight"][token]
    own = [p[f"cell.{kind}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    state = cell(torch.cat([y, context]), state, *own)
    logits = p["readout.weight"] @ torch.cat([state, y, context]) + p["readout.bias"]
    return logits, state, weights


def first_state(p, summary):
    return torch.tanh(p["start.weight"] @ summary[HIDDEN:] + p["start.bias"])


def unpadded(src, pad_id, vocab):
    """The sentences as lists."""
    return [[t for t in row if t != pad_id % vocab] for row in src.tolist()]


@drawn(sentences, st.integers(0, 2), paddings, dtypes(), seeds)
def test_the_encoder(lengths, extra, pad_id, dtype, seed):
    encoder = RecurrentEncoder(SOURCE, EMBED, HIDDEN, pad_id=pad_id)
    encoder = random(encoder, dtype, seed)
    src = tokens(lengths, SOURCE, pad_id, extra, seed)
    states, summary, mask = encoder(src)
    p = exact(encoder)
    total, wanted = 0, 0
    for b, sentence in enumerate(unpadded(src, pad_id, SOURCE)):
        annotations, last = encode(p, sentence)
        m = len(sentence)
        agree(states[b, :m], annotations, dtype)
        agree(summary[b], last, dtype)
        assert not states[b, m:].any() and mask[b, :m].all() and not mask[b, m:].any()
        weighting = normal((m, 2 * HIDDEN), seed=b)
        total = total + (states[b, :m] * weighting.to(dtype)).sum() + summary[b].sum()
        wanted = wanted + (annotations * weighting).sum() + last.sum()
    total.backward()
    wanted.backward()
    p["embed.weight"].grad[pad_id] = 0
    for name, parameter in encoder.named_parameters():
        agree(parameter.grad, p[name].grad, dtype, steps=64)


@drawn(sentences, steps, st.booleans(), paddings, dtypes(), seeds)
def test_the_whole_model(lengths, n, attention, pad_id, dtype, seed):
    options = dict(embed_dim=EMBED, hidden_dim=HIDDEN, attention=attention)
    model = random(Seq2Seq(SOURCE, TARGET, pad_id=pad_id, **options), dtype, seed)
    src = tokens(lengths, SOURCE, pad_id, 1, seed)
    tgt = torch.randint(
        TARGET, (len(lengths), n), generator=torch.Generator().manual_seed(seed)
    )
    logits = model(src, tgt)
    assert logits.dtype == dtype
    weighting = normal(logits.shape, seed=seed + 1).to(dtype)
    logits.backward(weighting)
    encoder, decoder = exact(model.encoder), exact(model.decoder)
    rows, maps = [], torch.zeros(*tgt.shape, src.shape[1], dtype=torch.float64)
    for b, sentence in enumerate(unpadded(src, pad_id, SOURCE)):
        annotations, summary = encode(encoder, sentence)
        state = first_state(decoder, summary)
        for i, token in enumerate(tgt[b].tolist()):
            row, state, weights = decode_step(decoder, token, state, annotations, summary)
            rows.append(row)
            if weights is not None:
                maps[b, i, : len(sentence)] = weights.detach()
    wanted = torch.stack(rows).view(logits.shape)
    agree(logits, wanted, dtype, steps=32)
    wanted.backward(weighting.double())
    for part, p in ((model.encoder, encoder), (model.decoder, decoder)):
        p["embed.weight"].grad[pad_id] = 0  # which PyTorch never trains
        for name, parameter in part.named_parameters():
            agree(parameter.grad, p[name].grad, dtype, steps=64)
    if attention:
        agree(model.attention_maps(src, tgt), maps, dtype)


@drawn(sentences, st.integers(1, 5), st.booleans(), st.integers(0, TARGET - 1), seeds)
@example([1], 1, False, 0, 0)  # the end is the padding
def test_greedy(lengths, max_length, attention, end, seed):
    options = dict(embed_dim=EMBED, hidden_dim=HIDDEN, attention=attention)
    model = random(Seq2Seq(SOURCE, TARGET, **options), torch.float64, seed)
    src = tokens(lengths, SOURCE, 0, 1, seed)
    before, state = model.training, torch.get_rng_state()
    found = model.greedy(src, max_length, bos_id=1, eos_id=end)
    assert model.training == before and torch.equal(torch.get_rng_state(), state)
    encoder, decoder = exact(model.encoder), exact(model.decoder)
    rows = []
    for sentence in unpadded(src, 0, SOURCE):
        annotations, summary = encode(encoder, sentence)
        hidden, row, token = first_state(decoder, summary), [], 1
        while len(row) < max_length and (not row or row[-1] != end):
            logits, hidden, _ = decode_step(decoder, token, hidden, annotations, summary)
            allowed = logits.clone()
            if end != 0:  # padding is no symbol of a sentence
                allowed[0] = -torch.inf
            token = int(allowed.argmax())
            row.append(token)
        rows.append(row)
    longest = max(map(len, rows))
    wanted = [row + [0] * (longest - len(row)) for row in rows]
    assert found.tolist() == wanted


@drawn(sentences, steps, st.booleans(), dtypes(torch.bfloat16, torch.float16), seeds)
def test_autocast(lengths, n, attention, cast, seed):
    options = dict(embed_dim=EMBED, hidden_dim=HIDDEN, attention=attention)
    model = random(Seq2Seq(SOURCE, TARGET, **options), torch.float32, seed)
    src = tokens(lengths, SOURCE, 0, 0, seed)
    tgt = torch.ones(len(lengths), n, dtype=torch.int64)
    wanted = model(src, tgt)
    with torch.autocast("cpu", cast):
        logits = model(src, tgt)
    agree(logits, wanted, cast, steps=32)


@drawn(sentences, st.booleans(), dtypes(), seeds)
def test_one_step_of_the_decoder(lengths, attention, dtype, seed):
    decoder = RecurrentDecoder(TARGET, EMBED, HIDDEN, attention=attention)
    decoder, b, m = random(decoder, dtype, seed), len(lengths), max(lengths)
    states = normal((b, m, 2 * HIDDEN), dtype, seed)
    summary = normal((b, 2 * HIDDEN), dtype, seed + 1)
    mask = torch.arange(m) < torch.tensor(lengths)[:, None]
    state = decoder.first_state(summary)
    logits, after, weights = decoder.step(
        torch.full((b,), 2, dtype=torch.int64), state, (states, summary, mask)
    )
    p = exact(decoder)
    for i, length in enumerate(lengths):
        agree(state[i], first_state(p, summary[i].double()), dtype)
        memory = states[i, :length].double(), summary[i].double()
        wanted = decode_step(p, 2, state[i].detach().double(), *memory)
        agree(logits[i], wanted[0], dtype, steps=32)
        agree(after[i], wanted[1], dtype)
        if attention:
            agree(weights[i, :length], wanted[2], dtype)
            assert not weights[i, length:].any()
    assert (weights is None) == (not attention)


@pytest.mark.parametrize(
    "shape, message",
    [((2, 0), "neither 0"), ((3, 2), "each of the 2 sentences in memory")],
)
def test_targets_that_do_not_fit_the_memory(shape, message):
    model = Seq2Seq(SOURCE, TARGET, embed_dim=EMBED, hidden_dim=HIDDEN)
    memory = model.encoder(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"tgt of shape .*{message}"):
        model.decoder(torch.ones(shape, dtype=torch.int64), memory)


def passes(call, *errors):
    """Whether a call passes; it may raise only errors that say what is allowed."""
    try:
        with unchecked():
            call()
    except errors as error:
        assert "must" in str(error) or "there are" in str(error)
        return False
    return True


@drawn(
    st.lists(st.lists(st.integers(-1, 4), min_size=0, max_size=4), max_size=3),
    st.sampled_from((torch.int64, torch.int32, torch.int16, torch.float32)),
    st.integers(0, 3),
    st.sampled_from((0, 3)),
)
def test_which_tokens_can_be_read(rows, dtype, offset, pad_id):
    longest = max(map(len, rows), default=0)
    rows = [row + [pad_id] * (longest - len(row)) for row in rows]
    tokens = torch.tensor(rows, dtype=dtype).reshape(len(rows), longest)
    allowed = dtype in (torch.int64, torch.int32) and 0 < longest <= 5 - offset
    allowed = allowed and all(0 <= token < 4 for row in rows for token in row)
    call = lambda: check_tokens("src", tokens, 4, 5, offset)  # noqa: E731
    assert passes(call, ValueError, TypeError) == allowed
    assert passes(lambda: check_tokens("src", tokens, 4), ValueError, TypeError) >= allowed
    behind = all(
        row[i] != pad_id or row[i + 1] == pad_id for row in rows for i in range(longest - 1)
    )
    if rows:
        assert passes(lambda: check_padding("src", tokens, pad_id), ValueError) == behind
        some = all(any(token != pad_id for token in row) for row in rows)
        assert passes(lambda: check_some_tokens("src", tokens, pad_id), ValueError) == some


@drawn(st.sampled_from((0, 3, 4, -1, 1.0, True, None, "0")))
def test_which_numbers_are_tokens(token):
    found = passes(lambda: check_token("eos_id", token, 4), ValueError)
    assert found == (type(token) is int and 0 <= token < 4)


ORACLES = {
    "RecurrentEncoder": test_the_encoder,
    "RecurrentDecoder": test_one_step_of_the_decoder,
    "Seq2Seq": test_the_whole_model,
    "check_token": test_which_numbers_are_tokens,
    "check_tokens": test_which_tokens_can_be_read,
    "check_padding": test_which_tokens_can_be_read,
    "check_some_tokens": test_which_tokens_can_be_read,
}
NOT_HERE = {"can_read": "says whether check_tokens may look; tests/test_transformations.py"}


def test_nothing_is_left_out():
    assert set(library.__all__) == (ORACLES | NOT_HERE).keys()
