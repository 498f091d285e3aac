"""Decoding: cache, beam search against enumeration and Marian, sampling, filters, bad input."""

import copy
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.decoding import (
    KVCache,
    beam_search,
    generate,
    greedy,
    next_log_probs,
    sample,
    top_k_filter,
    top_p_filter,
)
from attnlib.transformer import POSITIONS, Transformer
from attnlib.translation import from_marian
from helpers import tiny_marian

torch.set_num_threads(1)


def small(vocab=12, seed=0, **options):
    """A random model; its distributions are neither flat nor all on one token."""
    torch.manual_seed(seed)
    settings = dict(
        d_model=16,
        nhead=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        dim_feedforward=24,
        max_length=32,
    )
    model = Transformer(vocab, None, output_bias=True, **(settings | options)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.output_bias[2] += 1.0  # rows should end at different places
    return model


def sources(batch, length=6, vocab=12, seed=0):
    """Random tokens from 3 on, with padding 0 behind all rows but the first."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, vocab, (batch, length), generator=generator)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    lengths[0] = length
    return tokens.masked_fill(torch.arange(length) >= lengths, 0)


def check_form(tokens, batch, most, pad=0, eos=2):
    assert (
        tokens.dtype == torch.int64
        and tokens.shape[0] == batch
        and 1 <= tokens.shape[1] <= most
    )
    for row in tokens.tolist():
        end = row.index(eos) if eos in row else len(row) - 1
        assert pad not in row[: end + 1] and set(row[end + 1 :]) <= {pad}
    assert (tokens[:, -1] != pad).any()


def score(model, src, tokens, length_penalty, eos=2):
    """The score of one sequence for one source, from a pass over the whole of it."""
    tgt = torch.tensor([[1, *tokens[:-1]]])
    log_probs = model(src, tgt).log_softmax(-1)[0]
    return (
        sum(log_probs[i, token] for i, token in enumerate(tokens)).item()
        / len(tokens) ** length_penalty
    )


# --- cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
def test_cached_log_probs_are_the_uncached(position):
    model, src = small(position=position), sources(4)
    memory, mask = model.encode(src)
    tokens = torch.cat(
        [torch.ones(4, 1, dtype=torch.int64), torch.randint(3, 12, (4, 10))], dim=1
    )
    cache = KVCache()
    for n in range(1, 12):
        cached = next_log_probs(model, tokens[:, :n], memory, mask, cache)
        plain = next_log_probs(model, tokens[:, :n], memory, mask)
        torch.testing.assert_close(cached, plain, rtol=0, atol=1e-12)
        assert (cached[:, 0] == -math.inf).all() and cached[:, 1:].isfinite().all()


@pytest.mark.parametrize("seed", range(4))
def test_cached_decoding_is_the_uncached(seed):
    model, src = small(seed=seed), sources(4, seed=seed)
    assert torch.equal(greedy(model, src, 20), greedy(model, src, 20, use_cache=False))
    draws = [
        sample(model, src, 20, generator=torch.Generator().manual_seed(1), use_cache=c)
        for c in (True, False)
    ]
    assert torch.equal(*draws)
    (tokens, scores), (plain, plain_scores) = (
        beam_search(model, src, 20, 3, use_cache=c) for c in (True, False)
    )
    assert torch.equal(tokens, plain)
    torch.testing.assert_close(scores, plain_scores, rtol=0, atol=1e-12)


def test_reorder_cache():
    model, src = small(), sources(3)
    memory, mask = model.encode(src[:1].expand(3, -1))  # three beams of one sentence
    tokens, cache, rows = (
        torch.tensor([[1, 4, 5], [1, 6, 7], [1, 8, 9]]),
        KVCache(),
        torch.tensor([2, 0, 0]),
    )
    model.decode(tokens, memory, mask, cache)
    cache.reorder(rows)
    tokens = torch.cat([tokens[rows], torch.tensor([[3], [4], [5]])], dim=1)
    moved = next_log_probs(model, tokens, memory, mask, cache)
    torch.testing.assert_close(
        moved, next_log_probs(model, tokens, memory, mask), rtol=0, atol=1e-12
    )


# --- greedy and batches -----------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 50))
def test_greedy_by_hand(batch, most, seed):
    model, src = small(seed=seed % 5), sources(batch, seed=seed)
    out = greedy(model, src, most)
    check_form(out, batch, most)
    for row, source in zip(out.tolist(), src):
        tokens = []
        while len(tokens) < most and 2 not in tokens:
            logits = model(source[None], torch.tensor([[1, *tokens]]))[0, -1]
            logits[0] = -math.inf
            tokens.append(logits.argmax().item())
        assert row == tokens + [0] * (len(row) - len(tokens))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0]), st.integers(0, 50))
def test_a_batch_is_its_rows(beam_size, length_penalty, seed):
    model, src = small(seed=seed % 5), sources(4, seed=seed)
    tokens, scores = beam_search(model, src, 12, beam_size, length_penalty=length_penalty)
    check_form(tokens, 4, 12)
    for i, source in enumerate(src):
        source = source[source != 0][None]
        alone, alone_score = beam_search(
            model, source, 12, beam_size, length_penalty=length_penalty
        )
        assert (
            alone[0].tolist() == tokens[i, : alone.shape[1]].tolist()
            and not tokens[i, alone.shape[1] :].any()
        )
        torch.testing.assert_close(scores[i], alone_score[0], rtol=0, atol=1e-12)
        assert (
            abs(score(model, source, alone[0].tolist(), length_penalty) - scores[i].item())
            < 1e-12
        )


@pytest.mark.parametrize("seed", range(5))
def test_beam_of_one_without_penalty_is_greedy(seed):
    model, src = small(seed=seed), sources(5, seed=seed)
    assert torch.equal(
        beam_search(model, src, 15, 1, length_penalty=0.0)[0], greedy(model, src, 15)
    )


def test_a_row_that_never_ends_is_cut():
    model, src = small(), sources(3)
    with torch.no_grad():
        model.output_bias[2] = -1e9
    for tokens in (
        greedy(model, src, 7),
        sample(model, src, 7),
        beam_search(model, src, 7, 2)[0],
    ):
        assert tokens.shape == (3, 7) and not (tokens == 2).any() and not (tokens == 0).any()


def test_all_positions_can_be_used():
    model = small(max_length=8)
    with torch.no_grad():
        model.output_bias[2] = -1e9
    assert greedy(model, sources(2), 8).shape == (2, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_on_a_gpu():
    model, src = small(), sources(4)
    expected = greedy(model, src, 15), *beam_search(model, src, 15, 3)
    model, src = model.cuda(), src.cuda()
    for out, here in zip((greedy(model, src, 15), *beam_search(model, src, 15, 3)), expected):
        torch.testing.assert_close(out.cpu(), here, rtol=0, atol=1e-10)
    check_form(
        sample(
            model, src, 15, top_p=0.9, generator=torch.Generator("cuda").manual_seed(0)
        ).cpu(),
        4,
        15,
    )


# --- beam search against all sequences --------------------------------------------------------


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_wide_beam_is_exact(length_penalty, seed):
    model, src, most = small(vocab=5, seed=seed), sources(1, vocab=5, seed=seed), 4
    others = (1, 3, 4)
    every = [(*p, 2) for n in range(most) for p in itertools.product(others, repeat=n)]
    every += list(itertools.product(others, repeat=most))  # cut
    scored = {tokens: score(model, src, tokens, length_penalty) for tokens in every}
    if length_penalty == 0:  # they are all there is, but for what goes through padding
        assert sum(math.exp(value) for value in scored.values()) < 1
    tokens, value = beam_search(
        model, src, most, 36, length_penalty=length_penalty
    )  # (W + 1) W^(N - 2), W = 3
    best = max(scored, key=scored.get)
    assert tuple(tokens[0].tolist()) == best
    assert abs(value.item() - scored[best]) < 1e-12


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0])
@pytest.mark.parametrize("beam_size", [1, 2, 3, 6])
def test_no_probable_sentence_is_missed(beam_size, length_penalty):
    for seed in range(3):
        model, src, most = small(vocab=5, seed=seed), sources(1, vocab=5, seed=seed), 4
        every = [(*p, 2) for n in range(most) for p in itertools.product((1, 3, 4), repeat=n)]
        every += list(itertools.product((1, 3, 4), repeat=most))
        _, found = beam_search(model, src, most, beam_size, length_penalty=length_penalty)
        for tokens in every:
            log_p = score(model, src, tokens, 0)
            if math.exp(log_p) > 1 / (beam_size + 1):
                assert log_p / len(tokens) ** length_penalty <= found.item() + 1e-12


# --- MarianMTModel ----------------------------------------------------------------------------


def marian(seed):
    pytest.importorskip("transformers")
    torch.manual_seed(seed)
    theirs = tiny_marian(num_beams=1, init_std=0.3).double()
    theirs.final_logits_bias.normal_()
    theirs.final_logits_bias[0, 0] += 2
    src = sources(4, vocab=29, seed=seed)
    return (
        theirs,
        from_marian(theirs.config, theirs.state_dict()).eval(),
        src.masked_fill(src == 0, 29),
    )


@pytest.mark.parametrize(
    "beam_size, length_penalty",
    [(None, None), (2, 1.0), (4, 1.0), (4, 0.6), (3, 0.0), (5, -0.5)],
)
def test_parity_with_marian(beam_size, length_penalty):
    ends = 0
    for seed in range(4):
        theirs, ours, src = marian(seed)
        inputs = dict(
            input_ids=src,
            attention_mask=(src != 29).long(),
            max_new_tokens=15,
            do_sample=False,
            bad_words_ids=[[29]],
        )  # as in the configuration of published Marian models
        if beam_size is None:
            expected = theirs.generate(**inputs, num_beams=1)[:, 1:]
            tokens = greedy(ours, src, 15, bos_id=29, eos_id=0)
        else:
            out = theirs.generate(
                **inputs,
                num_beams=beam_size,
                length_penalty=length_penalty,
                early_stopping="never",
                return_dict_in_generate=True,
                output_scores=True,
            )
            expected = out.sequences[:, 1:]
            tokens, scores = beam_search(
                ours, src, 15, beam_size, length_penalty=length_penalty, bos_id=29, eos_id=0
            )
            torch.testing.assert_close(
                scores.float(), out.sequences_scores.float(), rtol=0, atol=1e-5
            )
        assert torch.equal(tokens, expected)
        ends += int((tokens == 0).any(1).sum())
    assert 0 < ends


# --- sampling ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(temperature=0.5),
        dict(temperature=2.0, top_k=4),
        dict(top_p=0.7),
        dict(temperature=1.5, top_k=6, top_p=0.8),
    ],
)
def test_sampling_frequencies(options):
    model, source, count = small(), sources(1), 20_000
    z = next_log_probs(model, torch.tensor([[1]]), *model.encode(source))[
        0
    ].detach() / options.get("temperature", 1)
    z = top_k_filter(z, options["top_k"]) if "top_k" in options else z
    p = (top_p_filter(z, options["top_p"]) if "top_p" in options else z).softmax(-1)
    drawn = sample(
        model,
        source.expand(count, -1),
        1,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    observed = drawn.flatten().bincount(minlength=12)
    assert not observed[p == 0].any()
    possible = p > 0
    chi2 = ((observed - count * p).square() / (count * p))[possible].sum().item()
    freedom = int(possible.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom), (chi2, freedom)


def test_sampling_is_greedy_in_the_limit():
    model, src = small(), sources(4)
    expected = greedy(model, src, 15)
    for options in (
        dict(temperature=1e-6),
        dict(top_k=1),
        dict(top_p=1e-9),
        dict(temperature=1e-30),
        dict(temperature=0),
    ):
        assert torch.equal(sample(model, src, 15, **options), expected)
        assert torch.equal(sample(model.float(), src, 15, **options), greedy(model, src, 15))
        model.double()


def test_generator_fixes_the_draw():
    model, src = small(), sources(4)
    one, two, other = (
        sample(model, src, 15, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4)
    )
    assert torch.equal(one, two) and not torch.equal(one, other)
    check_form(one, 4, 15)


# --- filters ----------------------------------------------------------------------------------

logit_lists = st.lists(st.floats(-20, 20), min_size=1, max_size=12)


@given(logit_lists, st.integers(1, 15))
def test_top_k_keeps_the_k_largest(values, k):
    z = torch.tensor([values, values[::-1]], dtype=torch.float64)
    out = top_k_filter(z, k)
    kept = out > -math.inf
    assert (kept.sum(-1) == min(k, len(values))).all() and torch.equal(out[kept], z[kept])
    for row, mask in zip(z, kept):
        assert mask.all() or row[mask].min() >= row[~mask].max()


@given(logit_lists, st.floats(0.001, 1))
def test_top_p_keeps_the_smallest_set(values, p):
    z = torch.tensor(values, dtype=torch.float64)
    out = top_p_filter(z, p)
    kept, probs = out > -math.inf, z.softmax(-1)
    assert kept[z.argmax()] or z[kept].max() == z.max()
    assert torch.equal(out[kept], z[kept])
    assert probs[kept].sum() >= p - 1e-12
    fewest = int((probs.sort(descending=True).values.cumsum(-1) < p).sum()) + 1
    if p < 1:
        assert kept.sum() <= fewest
        assert (
            kept.sum() == 1 or probs[kept].sum() - probs[kept].min() < p + 1e-12
        )  # one fewer is not enough
        assert kept.all() or probs[kept].min() >= probs[~kept].max()


def test_filters_leave_their_input_alone():
    z = torch.randn(2, 3, 8)
    copy = z.clone()
    assert top_k_filter(z, 2).shape == top_p_filter(z, 0.5).shape == z.shape
    assert torch.equal(z, copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_top_p_in_half_precision_keeps_what_float64_keeps(dtype, p):
    """The number of tokens, up to ties with the last; a vocabulary so large that sums round."""
    generator = torch.Generator().manual_seed(0)
    z = torch.stack([torch.randn(20_000, generator=generator), torch.zeros(20_000)]).to(dtype)
    out = top_p_filter(z, p)
    assert out.dtype == dtype
    sums = z.double().sort(descending=True).values.softmax(-1).cumsum(-1)
    wanted = (sums < p).sum(-1) + 1
    assert ((out > -math.inf).sum(-1) - wanted).abs().max() <= 1


def test_top_p_one_keeps_the_least_token():
    z = torch.tensor([0.0, -30.0, -90.0])  # in float32 the first probability is 1
    assert torch.equal(top_p_filter(z, 1.0), z)


# --- mode, gradients, bad input ---------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_restored_and_dropout_off(training):
    model, src = small(dropout=0.5).train(training), sources(3)
    out = [greedy(model, src, 9) for _ in range(2)] + [
        beam_search(model, src, 9, 2)[1] for _ in range(2)
    ]
    assert model.training is training and not out[2].requires_grad
    assert torch.equal(out[0], out[1]) and torch.equal(out[2], out[3])
    with pytest.raises(TypeError):
        greedy(model, src.double(), 5)
    assert model.training is training


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda m, s: greedy(m, s, 0), r"max_length \(0\) must be an integer of at least 1"),
        (
            lambda m, s: greedy(m, s, 2.5),
            r"max_length \(2.5\) must be an integer of at least 1",
        ),
        (
            lambda m, s: greedy(m, s, 33),
            r"max_length \(33\) must be at most the model's max_length \(32\)",
        ),
        (
            lambda m, s: greedy(m, s, 5, bos_id=12),
            r"bos_id \(12\) must be a token, from 0 to 11",
        ),
        (
            lambda m, s: greedy(m, s, 5, eos_id=-1),
            r"eos_id \(-1\) must be a token, from 0 to 11",
        ),
        (
            lambda m, s: greedy(m, s, 5, eos_id=0),
            r"eos_id \(0\) must not be the model's pad_id \(0\)",
        ),
        (lambda m, s: greedy(m, s[0], 5), r"src of shape \(6,\) must be \(B, N\)"),
        (
            lambda m, s: greedy(m, s[:0], 5),
            r"src of shape \(0, 6\) must be \(B, N\), neither 0",
        ),
        (
            lambda m, s: greedy(m, s + 12, 5),
            r"src holds the token \d+; it must be from 0 to 11",
        ),
        (
            lambda m, s: sample(m, s * torch.tensor([[1], [0]]), 5),
            r"src holds nothing but padding \(0\) in row 1",
        ),
        (
            lambda m, s: beam_search(m, s, 5, 0),
            r"beam_size \(0\) must be an integer of at least 1",
        ),
        (
            lambda m, s: beam_search(m, s, 5, True),
            r"beam_size \(True\) must be an integer of at least 1",
        ),
        (
            lambda m, s: beam_search(m, s, 0, 2),
            r"max_length \(0\) must be an integer of at least 1",
        ),
        (
            lambda m, s: beam_search(m, s, 5, 2, length_penalty=math.nan),
            r"length_penalty \(nan\) must be a finite number",
        ),
        (
            lambda m, s: sample(m, s, 5, temperature=-1.0),
            r"temperature \(-1.0\) must be at least 0",
        ),
        (
            lambda m, s: sample(m, s, 5, temperature=math.inf),
            r"temperature \(inf\) must be at least 0.* finite",
        ),
        (
            lambda m, s: sample(m, s, 5, top_k=0),
            r"top_k \(0\) must be an integer of at least 1",
        ),
        (lambda m, s: sample(m, s, 5, top_p=0.0), r"top_p \(0.0\) must be in \(0, 1\]"),
        (lambda m, s: sample(m, s, 5, top_p=1.5), r"top_p \(1.5\) must be in \(0, 1\]"),
        (
            lambda m, s: top_k_filter(torch.zeros(3), 0),
            r"top_k \(0\) must be an integer of at least 1",
        ),
        (
            lambda m, s: top_p_filter(torch.zeros(3), math.nan),
            r"top_p \(nan\) must be in \(0, 1\]",
        ),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call(small(), sources(2))


def test_decoding_leaves_every_part_in_its_mode():
    model = small().train()
    model.encoder.eval()
    greedy(model, torch.randint(3, 12, (2, 5)), 4)
    assert (
        model.training
        and model.decoder.layers[0].training
        and not model.encoder.layers[0].training
    )


def test_log_probs_have_gradients():
    model = small()
    memory, mask = model.encode(torch.randint(3, 12, (2, 5)))
    log_probs = next_log_probs(model, torch.ones(2, 1, dtype=torch.long), memory, mask)
    log_probs[:, 3].sum().backward()
    assert (
        log_probs[:, model.pad_id].eq(-math.inf).all()
        and model.output.weight.grad.isfinite().all()
    )


def test_a_copied_cache_goes_its_own_way():
    model, src = small(), sources(2)
    memory, mask = model.encode(src)
    tokens, cache = torch.tensor([[1, 4, 5], [1, 6, 7]]), KVCache()
    with torch.no_grad():
        model.decode(tokens[:, :2], memory, mask, cache)
        copied = copy.deepcopy(cache)
        model.decode(tokens[:, :1], memory, mask, copied)
        found = model.decode(tokens[:, 2:], memory, mask, cache)[:, 0]
        expected = model.decode(tokens, memory, mask)[:, 2]
    assert len(cache) == len(copied) == 3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_any_way_to_choose():
    model, src = small(), sources(3)
    least = generate(
        lambda log_probs: log_probs.where(log_probs.isfinite(), torch.inf).argmin(-1),
        model,
        src,
        5,
    )
    assert least.shape[0] == 3 and torch.equal(
        generate(lambda x: x.argmax(-1), model, src, 5), greedy(model, src, 5)
    )


def test_reordering_an_empty_cache():
    cache = KVCache()
    cache.reorder(torch.tensor([0, 0]))
    assert len(cache) == 0


@pytest.mark.parametrize("token", [None, 1.0, -1, 12])
def test_tokens_that_are_none(token):
    with pytest.raises(ValueError, match=r"bos_id \(.*\)"):
        greedy(small(), torch.randint(3, 12, (2, 5)), 4, bos_id=token)


@pytest.mark.slow
def test_the_recorded_runs_run(tmp_path):
    """`benchmarks.decoding` at a tiny size; what is not run again stays in the record."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.decoding",
        "search",
        "--tiny",
        "--out",
        tmp_path,
    ]
    for seed in ("1", "2"):
        done = subprocess.run(
            [*command, "--seeds", seed],
            cwd=Path(__file__).parent.parent,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "decoding.json").read_text())
    assert [run["seed"] for run in record["search"]] == [1, 2]
    for run in record["search"]:
        assert run["valid"]["chosen"] in run["valid"]["rows"]
        for row in run["test"]["rows"]:
            assert row["right"] + row["missed"] <= run["test"]["numbers"] == 6


def test_rows_of_real_sentences():
    """What `benchmarks.decoding sentences` records, with an untrained model."""
    pytest.importorskip("sacrebleu")
    from attnlib.data import decode, encode, train_bpe
    from benchmarks import decoding as runs

    texts = ["A dog runs.", "A cat sleeps on the roof of a car."]
    tokenizer = train_bpe(texts, 60)
    torch.manual_seed(0)
    model = Transformer(tokenizer.get_vocab_size(), None, 16, 2, 1, 1, 24, max_length=96).eval()
    src = encode(tokenizer, texts)
    plain = runs.translated(model, src, 1, 0.0)
    row = runs.search_row(model, tokenizer, (src, src[:, 1:], texts), plain, 0.0, 1)
    assert row["differ"] == row["better"] == 0 and row["log_p"] < 0
    wide = runs.search_row(model, tokenizer, (src, src[:, 1:], texts), plain, 0.0, 3)
    assert wide["log_p"] >= row["log_p"] - 1e-3
    steps = runs.next_tokens(model, tokenizer, texts[0])
    said = decode(tokenizer, plain[:1])[0]
    assert said.startswith(steps["said"]) and len(steps["steps"][0]["p"]) == 3
