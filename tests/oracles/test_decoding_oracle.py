"""Decoding: filters against transformers, search against lists, over unusual calls."""

import copy
import math

import pytest
import torch
from draws import DTYPES, drawn, layouts, normal, seeds
from hypothesis import assume, example
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attnlib import decoding
from attnlib.decoding import (
    KVCache,
    _check_decoding,
    _vocabulary_size,
    beam_search,
    beam_step,
    generate,
    greedy,
    min_p_filter,
    next_log_probs,
    next_token,
    sample,
    top_k_filter,
    top_p_filter,
)
from attnlib.transformer import Transformer

torch.set_num_threads(1)
shapes = st.sampled_from(((), (1,), (0,), (3,), (2, 3), (2, 1, 2)))
vocabularies = st.sampled_from((1, 2, 5, 33, 1000))


# --- filters ----------------------------------------------------------------------------------


def kept_values(logits):
    """The entries that are not -inf, in order, row by row, filled up with -inf."""
    return logits.double().sort(dim=-1, descending=True).values


def some_logits(shape, vocab, dtype, seed, layout, scale, cut):
    logits = normal((*shape, vocab), torch.float64, seed, layout) * scale
    logits = logits.masked_fill(normal(logits.shape, seed=seed + 1) < cut, -torch.inf)
    logits[..., :1] = logits[..., :1].nan_to_num(neginf=0.0)  # a row has a token
    return logits.to(dtype)


all_logits = (
    shapes,
    vocabularies,
    st.sampled_from(DTYPES),
    seeds,
    layouts,
    st.sampled_from((1.0, 0.01, 30.0)),
    st.sampled_from((-9.0, 0.0)),
)


@drawn(st.tuples(*all_logits), st.sampled_from((1, 2, 3, 40, 10**6)))
def test_top_k_keeps_the_values_that_transformers_keeps(call, k):
    logits = some_logits(*call)
    found = top_k_filter(logits, k)
    wanted = kept_values(TopKLogitsWarper(k)(None, logits.double()))
    wanted[..., k:] = -torch.inf  # transformers keeps all that are equal to the last
    assert found.dtype == logits.dtype and torch.equal(kept_values(found), wanted)
    kept = found > -torch.inf
    assert torch.equal(found[kept], logits[kept])


@drawn(st.tuples(*all_logits), st.floats(1e-6, 1.0))
@example(((), 1000, torch.float16, 0, "contiguous", 0.01, -9.0), 0.999)
@example(((2, 3), 1000, torch.bfloat16, 3, "strided", 1.0, 0.0), 0.5)
def test_top_p_keeps_the_values_that_transformers_keeps(call, p):
    logits = some_logits(*call)
    sums = kept_values(logits).softmax(-1).cumsum(-1)
    assume(p == 1 or ((sums - p).abs() > 1e-6).all())  # no sum rounds to the other side
    found = top_p_filter(logits, p)
    rows = logits.double().flatten(end_dim=-2) if logits.ndim > 1 else logits[None].double()
    wanted = kept_values(TopPLogitsWarper(p)(None, rows)).reshape(logits.shape)
    assert found.dtype == logits.dtype and torch.equal(kept_values(found), wanted)
    kept = found > -torch.inf
    assert torch.equal(found[kept], logits[kept])


@drawn(st.tuples(*all_logits), st.sampled_from((1, 3)), st.sampled_from((0.1, 0.9, 1.0)))
def test_gradients_of_filters_reach_what_is_kept(call, k, p):
    for keep, limit in ((top_k_filter, k), (top_p_filter, p)):
        logits = some_logits(*call).requires_grad_()
        found = keep(logits, limit)
        kept = found > -torch.inf
        weight = normal(found.shape, logits.dtype, 7)
        (grad,) = torch.autograd.grad((found[kept] * weight[kept]).sum(), logits)
        assert torch.equal(grad, weight * kept)


def half_logits(rows, vocab, dtype, seed, layout, scale):
    return (normal((rows, vocab), torch.float64, seed, layout) * scale).to(dtype)


logit_calls = st.tuples(
    st.integers(1, 4),
    st.sampled_from((1, 2, 40, 1000)),
    st.sampled_from(DTYPES),
    seeds,
    layouts,
    st.sampled_from((1.0, 0.01, 20.0)),
)


@drawn(logit_calls, st.floats(0, 1))
@example((2, 1000, torch.float16, 0, "contiguous", 0.01), 0.97)
def test_min_p_keeps_what_transformers_keeps(call, p):
    logits = half_logits(*call).requires_grad_()
    found = min_p_filter(logits, p)
    warper = MinPLogitsWarper(p)
    wanted = warper(None, logits.detach().double()) > -torch.inf
    differs = (found > -torch.inf) != wanted
    ratio = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
    assert found.dtype == logits.dtype
    assert ((ratio - p).abs()[differs] < 1e-6 * p).all()  # only where float32 rounds
    kept = found > -torch.inf
    (grad,) = torch.autograd.grad(found[kept].sum(), logits)
    assert torch.equal(found[kept], logits[kept]) and torch.equal(grad, kept.to(grad))


@drawn(
    logit_calls,
    st.sampled_from((1.0, 0.2, 7.0)),
    st.sampled_from((None, 1, 3, 2000)),
    st.sampled_from((None, 0.3, 0.9, 1.0)),
    st.sampled_from((None, 0.0, 0.2, 1.0)),
)
def test_tokens_are_those_that_transformers_draws(call, temperature, k, p, least):
    logits = half_logits(*call)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z - z.amax(-1, keepdim=True)
    if k is not None and k < z.shape[1]:  # transformers keeps all that are equal to the last
        best = z.topk(k + 1).values
        assume((best[:, k - 1] > best[:, k]).all())
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(k)] if k is not None else []
    warpers += [TopPLogitsWarper(p)] if p is not None else []
    warpers += [MinPLogitsWarper(least)] if least is not None else []
    for warper in warpers:
        if isinstance(warper, TopPLogitsWarper):
            sums = z.double().sort(descending=True).values.softmax(-1).cumsum(-1)
            near = (sums - p).abs() < 1e-5
            values = z.sort(descending=True).values
            tied = (values[:, 1:] == values[:, :-1]).any() and p < 1
            assume(not near.any() and not tied or p == 1)
        z = warper(None, z)
    if p == 1:  # theirs loses the last ones, whose sum is below rounding
        assume((z > -torch.inf).all() or k is not None or least is not None)
    generator = torch.Generator().manual_seed(3)
    wanted = torch.multinomial(z.softmax(-1), 1, generator=generator)[:, 0]
    found = next_token(
        logits, temperature, k, p, least, generator=torch.Generator().manual_seed(3)
    )
    assert torch.equal(found, wanted)
    assert torch.equal(next_token(logits, 0), logits.double().argmax(-1))


# --- a model whose next token depends on all before ------------------------------------------


class Prefixes:
    """Logits from a table, at a row that source and prefix determine.

    With a cache it is given new tokens only, and reads the others from there.
    """

    def __init__(self, vocab, seed, pad_id=0, max_length=8, dtype=torch.float64, cut=-9.0):
        self.table = some_logits((97,), vocab, dtype, seed, "contiguous", 2.0, cut)
        self.table[:, 1 if pad_id == 0 else 0] = 0.5  # one that is not padding can follow
        self.output = torch.nn.Linear(1, vocab)
        self.pad_id, self.max_length = pad_id, max_length

    def modules(self):
        return []

    def encode(self, src):
        memory = src[..., None].to(self.table.dtype)  # (B, M) -> (B, M, 1)
        return memory, (src != self.pad_id)[:, None, None, :]

    def decode(self, tgt, memory, src_mask=None, cache=None):
        if cache is not None:
            new = tgt[:, None, :, None]
            tgt = cache.update(0, new, new)[0][:, 0, :, 0]
            cache.advance(new.shape[2])
        state = (memory[..., 0] * src_mask[:, 0, 0]).sum(1).long()
        logits = []
        for token in tgt.T:
            state = (state * 31 + token + 1) % 97
            logits.append(self.table[state])
        return torch.stack(logits, dim=1)

    def log_probs(self, source, prefix):
        """Of the token after a prefix, a list of floats."""
        state = sum(source)
        for token in prefix:
            state = (state * 31 + token + 1) % 97
        row = self.table[state].double().log_softmax(-1)
        row[self.pad_id] = -torch.inf
        return row.tolist()


def searched(model, source, bos, eos, most, width, penalty):
    """Beam search over lists: the best sequence that ended or was cut, and its score."""
    beams, best = [(0.0, [])], (-math.inf, [])
    for n in range(1, most + 1):
        grown = []
        for score, prefix in beams:
            log_probs = model.log_probs(source, [bos, *prefix])
            for token, log_p in enumerate(log_probs):
                if log_p > -math.inf:
                    grown.append((score + log_p, [*prefix, token]))
        grown.sort(key=lambda beam: -beam[0])
        for score, prefix in grown[:width]:
            if prefix[-1] == eos or n == most:
                best = max(best, (score / n**penalty, prefix), key=lambda pair: pair[0])
        beams = [beam for beam in grown if beam[1][-1] != eos][:width]
        could = [score / m**penalty for score, _ in beams[:1] for m in range(n + 1, most + 1)]
        if best[0] >= max(could, default=-math.inf):
            break
    return best[1], best[0]


@st.composite
def searches(draw):
    """A model, sources, and the tokens that begin and end."""
    vocab = draw(st.integers(3, 7))
    pad_id = draw(st.sampled_from((0, vocab - 1)))
    token = st.integers(0, vocab - 1)
    bos, eos = draw(token), draw(token.filter(lambda t: t != pad_id))
    dtype = draw(st.sampled_from((torch.float64, torch.float32)))
    model = Prefixes(vocab, draw(seeds), pad_id, 8, dtype, draw(st.sampled_from((-9.0, -1.0))))
    generator = torch.Generator().manual_seed(draw(seeds))
    rows = draw(st.integers(1, 3))
    src = torch.randint(0, vocab, (rows, draw(st.integers(1, 3))), generator=generator)
    src[:, 0] = 1 if pad_id != 1 else 0
    return model, src, dict(bos_id=bos, eos_id=eos), draw(st.integers(1, 6))


def source_of(model, row):
    return [token for token in row.tolist() if token != model.pad_id]


def padded(model, rows):
    longest = max(map(len, rows))
    return [row + [model.pad_id] * (longest - len(row)) for row in rows]


@drawn(
    searches(),
    st.integers(1, 9),
    st.sampled_from((1.0, 0.0, -0.5, 0.6, 3.0)),
    st.booleans(),
)
def test_beam_search_is_that_of_lists(call, width, penalty, use_cache):
    model, src, ends, most = call
    wanted = [
        searched(model, source_of(model, row), *ends.values(), most, width, penalty)
        for row in src
    ]
    tokens, scores = beam_search(
        model, src, most, width, length_penalty=penalty, use_cache=use_cache, **ends
    )
    near = torch.tensor([score for _, score in wanted])
    torch.testing.assert_close(scores.double(), near.double(), rtol=1e-5, atol=1e-5)
    assert tokens.tolist() == padded(model, [row for row, _ in wanted])


@drawn(searches(), st.booleans(), st.sampled_from((0, 1)))
def test_generating_is_choosing_from_lists(call, use_cache, rank):
    """Greedy; and the second best token where there are two."""
    model, src, ends, most = call
    rows = []
    for source in src:
        row = []
        while len(row) < most and ends["eos_id"] not in row:
            prefix = [ends["bos_id"], *row]
            log_probs = model.log_probs(source_of(model, source), prefix)
            order = sorted(range(len(log_probs)), key=lambda i: -log_probs[i])
            second = rank and log_probs[order[1]] > -math.inf
            row.append(order[1 if second else 0])
        rows.append(row)

    def choose(log_probs):
        best = log_probs.topk(2)
        second = (best.values[:, 1] > -torch.inf) & (rank == 1)
        return torch.where(second, best.indices[:, 1], best.indices[:, 0])

    found = generate(choose, model, src, most, use_cache=use_cache, **ends)
    assert found.tolist() == padded(model, rows)
    if rank == 0:
        assert torch.equal(greedy(model, src, most, use_cache=use_cache, **ends), found)


@drawn(
    searches(),
    seeds,
    st.sampled_from((1.0, 0.3, 5.0)),
    st.sampled_from((None, 1, 3)),
    st.sampled_from((None, 0.4, 0.95, 1.0)),
    st.booleans(),
)
def test_draws_are_those_of_transformers_warpers(call, seed, temperature, k, p, use_cache):
    model, src, ends, most = call
    model.table = model.table.double()
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(k)] if k is not None else []
    warpers += [TopPLogitsWarper(p)] if p is not None else []
    generator, rows = torch.Generator().manual_seed(seed), [[] for _ in src]
    ended = [False] * len(src)
    for _ in range(most):
        z = torch.tensor(
            [
                model.log_probs(source_of(model, source), [ends["bos_id"], *row])
                for source, row in zip(src, rows)
            ],
            dtype=torch.float64,
        )
        for warper in warpers:
            z = warper(None, z)
        drawn_tokens = torch.multinomial(z.softmax(-1), 1, generator=generator)[:, 0]
        for i, token in enumerate(drawn_tokens.tolist()):
            rows[i].append(model.pad_id if ended[i] else token)
            ended[i] |= token == ends["eos_id"]
        if all(ended):
            break
    found = sample(
        model,
        src,
        most,
        temperature=temperature,
        top_k=k,
        top_p=p,
        generator=torch.Generator().manual_seed(seed),
        use_cache=use_cache,
        **ends,
    )
    assert found.tolist() == rows


@drawn(st.integers(1, 3), st.integers(1, 5), st.integers(2, 6), seeds, st.booleans())
def test_a_step_of_beams_is_sorting(batch, width, vocab, seed, dead):
    scores = normal((batch, width), seed=seed)
    scores[:, 1:] = -torch.inf if dead else scores[:, 1:]
    log_probs = normal((batch * width, vocab), seed=seed + 1)
    score, beam, token, alive = beam_step(scores, log_probs, vocab - 1)
    for b in range(batch):
        grown = []
        for k in range(width):
            for t in range(vocab):
                grown.append((scores[b, k] + log_probs[b * width + k, t], k, t))
        grown.sort(key=lambda one: -one[0])
        grown = grown[: 2 * width]
        assert score[b].tolist() == [one[0].item() for one in grown]
        possible = [one[1:] for one in grown if one[0] > -math.inf]
        assert list(zip(beam[b].tolist(), token[b].tolist()))[: len(possible)] == possible
        goes_on = [i for i in range(2 * width) if token[b, i] != vocab - 1]
        assert alive[b].tolist() == goes_on[:width]


# --- log-probabilities and the cache ---------------------------------------------------------


def small(dtype=torch.float64, vocab=9):
    torch.manual_seed(0)
    model = Transformer(
        vocab, None, 8, 2, 1, 2, 12, dropout=0.0, max_length=16, output_bias=True
    )
    return model.to(dtype).eval()


@drawn(
    st.sampled_from(DTYPES),
    st.integers(1, 3),
    st.lists(st.integers(1, 3), max_size=3),
    seeds,
    st.booleans(),
)
def test_log_probs_are_those_of_float64(dtype, batch, parts, seed, autocast):
    model = small(dtype)
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(1, 9, (batch, 4), generator=generator)
    src[1:, 2:] = 0
    n = sum(parts) + 1
    tokens = torch.randint(0, 9, (batch, n), generator=generator)
    wanted = copy.deepcopy(model).double()(src, tokens)[:, -1].log_softmax(-1)
    wanted[:, 0] = -torch.inf
    tolerance = 1e-10 if dtype == torch.float64 else 0.3 if autocast else 1e-4
    tolerance = 0.3 if dtype in DTYPES[2:] else tolerance
    with torch.no_grad(), torch.autocast("cpu", enabled=autocast and dtype == torch.float32):
        memory, mask = model.encode(src)
        cache = KVCache()
        for part in tokens[:, :-1].split(parts, dim=1):
            model.decode(part, memory, mask, cache)
        for found in (
            next_log_probs(model, tokens, memory, mask),
            next_log_probs(model, tokens, memory, mask, cache),
        ):
            assert found.dtype == torch.promote_types(dtype, torch.float32)
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)
    assert len(cache) == n


@drawn(
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(("add", "fail", "reorder", "copy")), seeds), max_size=9),
    st.booleans(),
)
@example(2, 1, [("add", 0)] * 8, True)
@example(2, 1, [("add", 0), ("copy", 0), ("add", 1)], True)
def test_a_cache_is_a_list_of_what_was_put_in(batch, heads, steps, grad):
    """Keys of two layers, values wider or not; with gradients they are those of the list."""
    cache, lists, inputs = KVCache(), {0: [], 1: []}, []
    total = wanted = torch.zeros((), dtype=torch.float64)
    for what, seed in steps:
        if what == "reorder" and batch:
            rows = torch.randint(batch, (batch,), generator=torch.Generator().manual_seed(seed))
            cache.reorder(rows)
            lists = {i: [pair[:, rows] for pair in own] for i, own in lists.items()}
        elif what == "copy":
            cache = copy.deepcopy(cache)
        elif what in ("add", "fail"):
            n = 1 + seed % 3
            for layer in (0,) if what == "fail" else (0, 1):
                new = normal((2, batch, heads, n, 2), seed=seed + layer)
                inputs.append(new.requires_grad_(grad))
                found = torch.stack(cache.update(layer, *inputs[-1]))
                held = torch.cat([*lists[layer], inputs[-1]], dim=3)
                assert torch.equal(found, held)
                total, wanted = total + found.square().sum(), wanted + held.square().sum()
                if what == "add":
                    lists[layer].append(inputs[-1])
            if what == "fail":
                cache.rewind()
            else:
                cache.advance(n)
        assert len(cache) == sum(pair.shape[3] for pair in lists[0]) == cache.tokens_of(1)
    if grad and inputs:
        for ours, theirs in zip(*(torch.autograd.grad(x, inputs) for x in (total, wanted))):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# --- checks -----------------------------------------------------------------------------------

anything = st.one_of(
    st.integers(-2, 12), st.floats(), st.booleans(), st.none(), st.just("2"), st.just([1])
)


@drawn(anything, anything, st.integers(-2, 9), anything, st.floats(allow_infinity=False))
@example(4, True, 2, 2, 1.0)
@example(4, 1, 2, 2, 2000.0)
@example(4, 1, 2, 2, -2000.0)
@example(1, 1, 2, 2, 2000.0)
def test_what_can_be_decoded(most, bos, eos, width, penalty):
    """An error, and never a number that overflows, for what is out of range."""
    model = Prefixes(7, 0)
    src = torch.tensor([[1, 2, 0], [3, 0, 0]])
    allowed = type(most) is int and 1 <= most <= 8 and type(width) is int and width >= 1
    allowed = allowed and type(bos) is int and 0 <= bos < 7 and 1 <= eos < 7
    if allowed:
        allowed = math.isfinite(penalty) and abs(penalty) * math.log(most) <= 80
    if not allowed:
        with pytest.raises(ValueError, match="must be|must not be"):
            _check_decoding(model, src, most, bos, eos, width, penalty)
        return
    _check_decoding(model, src, most, bos, eos, width, penalty)
    _, scores = beam_search(
        model, src, most, width, length_penalty=penalty, bos_id=bos, eos_id=eos
    )
    assert scores.isfinite().all()


@drawn(st.integers(3, 9), st.booleans())
def test_sizes_of_vocabularies(vocab, tied):
    model = Transformer(4, vocab, 8, 2, 0, 0, tie_weights=tied)
    assert _vocabulary_size(model) == vocab == _vocabulary_size(Prefixes(vocab, 0))


ORACLES = {
    "next_log_probs": test_log_probs_are_those_of_float64,
    "generate": test_generating_is_choosing_from_lists,
    "greedy": test_generating_is_choosing_from_lists,
    "_vocabulary_size": test_sizes_of_vocabularies,
    "_check_decoding": test_what_can_be_decoded,
    "KVCache": test_a_cache_is_a_list_of_what_was_put_in,
    "beam_step": test_a_step_of_beams_is_sorting,
    "beam_search": test_beam_search_is_that_of_lists,
    "top_k_filter": test_top_k_keeps_the_values_that_transformers_keeps,
    "top_p_filter": test_top_p_keeps_the_values_that_transformers_keeps,
    "min_p_filter": test_min_p_keeps_what_transformers_keeps,
    "next_token": test_tokens_are_those_that_transformers_draws,
    "sample": test_draws_are_those_of_transformers_warpers,
}


def test_nothing_is_left_out():
    assert set(decoding.__all__) == {name for name in ORACLES if name[0] != "_"}
