"""Translation: batches, answers, scores, and Marian's weights, over unusual calls and texts."""

import re

import pytest
import torch
from draws import DTYPES, batches, drawn, seeds
from draws import tolerance as rounding
from hypothesis import assume, example
from hypothesis import strategies as st

from attnlib import translation
from attnlib.data import BOS, EOS, LANGUAGES, PAD, decode, encode, number_words
from attnlib.decoding import beam_search, greedy
from attnlib.transformer import Transformer
from attnlib.translation import (
    DIRECTIONS,
    _check_side,
    _marian_weights,
    direction_batches,
    from_marian,
    number_table,
    number_tokenizer,
    tag,
    translate,
    translate_numbers,
    translation_loss,
    trim,
)
from benchmarks import translation as runs
from benchmarks.translation import sparse_numbers
from helpers import tiny_marian

torch.set_num_threads(1)
LIMIT = 10**9 - 1
TOKENIZER = number_tokenizer([*range(0, 3000, 7), 10**6, 321_123_456], 300)
FEW = ("en", "de", "es")  # whose names are looked through: it takes a second for each
PAIRS = [pair for pair in DIRECTIONS if set(pair) <= set(FEW)]
directions = st.lists(st.sampled_from(DIRECTIONS), min_size=1, max_size=4, unique=True)
some_numbers = st.lists(st.integers(0, LIMIT), min_size=1, max_size=5, unique=True)
texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ("", " ", "</s>", "<pad> <pad>", "<de>", "<unk> x", "<s>", "▁▁", "a\u2028b")
    ),
    st.builds(
        lambda n, b: number_words([n], b)[0], st.integers(0, LIMIT), st.sampled_from(LANGUAGES)
    ),
)


def small(seed=0, vocab=300):
    """A random model whose translations end at different places."""
    torch.manual_seed(seed)
    model = Transformer(
        vocab, None, 8, 2, 1, 1, 8, 0.0, max_length=128, output_bias=True
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        model.output_bias[EOS] += 4
    return model.eval()


# --- tables and batches -----------------------------------------------------------------------


@drawn(st.one_of(st.sampled_from(LANGUAGES), st.text(max_size=3)))
def test_tags(language):
    if language in translation.SENTENCE_LANGUAGES and language not in LANGUAGES:
        assert tag(language) == "<" + language + ">"
    elif language in LANGUAGES:
        assert tag(language) == "<" + language + ">"
        assert TOKENIZER.id_to_token(4 + LANGUAGES.index(language)) == tag(language)
    else:
        with pytest.raises(ValueError, match=r"language \(.*\)"):
            tag(language)


@drawn(some_numbers, st.lists(st.sampled_from(LANGUAGES), min_size=1, unique=True))
def test_tables_hold_the_tokens_of_names(numbers, languages):
    table = number_table(TOKENIZER, numbers, languages)
    rows = {}
    for language in languages:
        for i, name in enumerate(number_words(numbers, language)):
            rows[LANGUAGES.index(language), i] = [BOS, *TOKENIZER.encode(name).ids, EOS]
    longest = max(map(len, rows.values()))
    assert table.shape == (len(LANGUAGES), len(numbers), longest)
    for b in range(len(LANGUAGES)):
        for i in range(len(numbers)):
            row = rows.get((b, i), [])
            assert table[b, i].tolist() == row + [PAD] * (longest - len(row))


@drawn(batches, st.integers(0, 5), st.sampled_from((0.0, 0.3, 0.9)), seeds)
def test_trimming_leaves_the_columns_that_are_used(batch, n, share, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = (torch.rand(batch, n, generator=generator) < share).long() * 5
    rows = tokens.tolist()
    used = max((i + 1 for row in rows for i in range(n) if row[i] != PAD), default=0)
    assert trim(tokens).tolist() == [row[:used] for row in rows]
    assert trim(tokens).shape == (batch, used)


@drawn(
    directions,
    some_numbers,
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from(("source", "target", "both")),
    seeds,
)
@example([("en", "de"), ("de", "en")], [5], 3, False, "source", 0)
@example([("en", "de"), ("de", "en")], [5, 6, 7], 3, False, "target", 0)
def test_batches_name_one_number_in_two_languages(pairs, numbers, size, shared, side, seed):
    table = number_table(TOKENIZER, numbers)
    options = dict(batch_size=size, seed=seed, shared=shared, tag_on=side)
    if side == "both" or not shared and len(numbers) < len(pairs):
        with pytest.raises(ValueError, match="must be"):
            direction_batches(TOKENIZER, table, pairs, **options)
        return
    src, tgt = direction_batches(TOKENIZER, table, pairs, **options)(4)
    names = {b: number_words(numbers, b) for b in LANGUAGES}
    tags = (src if side == "source" else tgt)[:, int(side == "source") :][:, :1].flatten()
    for said, wanted, start in zip(
        decode(TOKENIZER, src), decode(TOKENIZER, tgt), tags.tolist()
    ):
        possible = []
        for place, (a, b) in enumerate(pairs):
            for i in range(len(numbers)):
                own = shared or i % len(pairs) == place
                if own and (names[a][i], names[b][i]) == (said, wanted):
                    possible.append(TOKENIZER.token_to_id(tag(b)))
        assert start in possible
    assert src.shape[0] == tgt.shape[0] == size


def test_batches_of_no_direction():
    table = number_table(TOKENIZER, [1])
    with pytest.raises(ValueError, match=r"table has 1 numbers for 0 directions"):
        direction_batches(TOKENIZER, table, [], batch_size=1)


@drawn(st.one_of(st.sampled_from(("source", "target")), st.text(max_size=6), st.none()))
def test_sides(side):
    if side in ("source", "target"):
        assert _check_side(side) is None
    else:
        with pytest.raises(ValueError, match=r"tag_on \(.*\)"):
            _check_side(side)


@drawn(st.integers(1, 3), st.integers(2, 5), st.sampled_from(DTYPES[:3]), seeds)
def test_the_loss_is_of_the_next_tokens(batch, n, dtype, seed):
    model = small(seed, 9).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    src, tgt = torch.randint(1, 9, (2, batch, n), generator=generator)
    tgt[:, n // 2 + 1 :] *= torch.arange(batch)[:, None] % 2  # padding behind every other row
    loss, count = translation_loss(model, (src, tgt))
    wanted, terms = 0.0, 0
    log_probs = model(src, tgt[:, :-1]).double().log_softmax(-1)
    for b in range(batch):
        for i in range(1, n):
            if tgt[b, i] != PAD:
                row = log_probs[b, i - 1]
                wanted -= 0.9 * row[tgt[b, i]].item() + 0.1 * row.mean().item()
                terms += 1
    assert count == terms
    assert abs(loss.item() - wanted) < rounding(loss.dtype, 16) * max(1, abs(wanted))


# --- translating ------------------------------------------------------------------------------


@drawn(st.lists(texts, min_size=1, max_size=5), st.sampled_from((1, 2, 64)), seeds)
@example(["</s>", "one </s> two", "<pad> one", "one"], 64, 0)
def test_texts_are_translated_as_each_alone(texts, size, seed):
    """Special tokens that are spelled out are text."""
    model = small(seed)
    found = translate(model, TOKENIZER, texts, beam_size=2, max_length=6, batch_size=size)
    for text, said in zip(texts, found):
        src = encode(TOKENIZER, [text])
        assert src[0, 1:-1].tolist().count(EOS) == src[0].tolist().count(PAD) == 0
        assert decode(TOKENIZER, beam_search(model, src, 6, 2)[0]) == [said]
    assert translate(model, TOKENIZER, []) == []


@drawn(
    st.lists(st.tuples(texts, st.sampled_from(LANGUAGES)), min_size=1, max_size=5),
    st.sampled_from(("source", "target")),
    seeds,
)
def test_names_are_translated_as_each_alone(pairs, side, seed):
    model = small(seed)
    names, wanted = zip(*pairs)
    found = translate_numbers(model, TOKENIZER, names, wanted, max_length=6, tag_on=side)
    for name, language, said in zip(names, wanted, found):
        start = TOKENIZER.token_to_id(tag(language))
        src = encode(TOKENIZER, [name])
        if side == "source":
            src = torch.cat([src[:, :1], torch.tensor([[start]]), src[:, 1:]], dim=1)
        out = greedy(model, src, 6, bos_id=BOS if side == "source" else start)
        assert decode(TOKENIZER, out) == [said]
    one = translate_numbers(model, TOKENIZER, names[:1], wanted[0], max_length=6, tag_on=side)
    assert one == found[:1]


def test_nothing_to_translate():
    for side in ("source", "target"):
        assert translate_numbers(small(), TOKENIZER, [], "de", tag_on=side) == []


# --- kinds of answers -------------------------------------------------------------------------


@drawn(
    st.sampled_from(LANGUAGES), st.lists(st.integers(0, 10**4), max_size=3), st.text(max_size=3)
)
@example("es", [], "y" * 3000)
@example("de", [], "hundert" * 1000)
@example("de", [], "hundert" * 1000 + "x")
def test_words_are_put_together_from_pieces(language, picks, more):
    """As by a regular expression; words may be as long as a model makes them."""
    pieces = runs.number_pieces(language) - {""}
    ordered = sorted(pieces)
    text = "".join(ordered[i % len(ordered)] for i in picks) + more
    words = [word for word in re.split("[ ,-]+", text) if word]
    pattern = re.compile("(?:" + "|".join(map(re.escape, ordered)) + ")+")
    wanted = bool(words)
    for word in words:
        wanted = wanted and pattern.fullmatch(word) is not None
    assert runs.is_in(text, language) == wanted


@drawn(st.lists(st.sampled_from(FEW), min_size=1, unique=True))
def test_tokens_of_one_language_only(languages):
    numbers = [*range(1000), *range(1000, 10**6, 4321)]
    used = {}
    for language in languages:
        used[language] = set()
        for name in number_words(numbers, language):
            used[language].update(TOKENIZER.encode(name).ids)
    found = runs.own_tokens(TOKENIZER, tuple(languages))
    for language in languages:
        rest = set().union({BOS, EOS, PAD}, *(used[b] for b in languages if b != language))
        own = found[language] if len(languages) > 1 else found[language] - {BOS, EOS, PAD}
        assert own == used[language] - rest


@drawn(st.integers(0, LIMIT), st.sampled_from(PAIRS), st.sampled_from(FEW), st.booleans())
def test_answers_that_are_names(number, pair, language, same):
    (text,) = number_words([number if same else (number + 1) % 10**9], language)
    names = {b: number_words([number], b)[0] for b in FEW}
    order = dict.fromkeys((pair[1], "en", pair[0], *FEW))
    kind = runs.answer_kind(TOKENIZER, text, number, *pair, FEW)
    if text == names[pair[1]]:
        assert kind == "right"
    elif text in names.values():
        assert kind == "named in " + next(b for b in order if names[b] == text)
    else:
        assert kind == "in " + next(b for b in order if runs.is_in(text, b))


@drawn(texts, st.integers(0, LIMIT), st.sampled_from(PAIRS))
def test_answers_that_may_be_anything(text, number, pair):
    kind = runs.answer_kind(TOKENIZER, text, number, *pair, FEW)
    assert re.fullmatch("right|mixed|none|(named )?in [a-z]{2}", kind)


@drawn(st.integers(-1, 5), st.sampled_from((*range(11), 2.0)), seeds)
def test_numbers_of_few_digits(count, nonzero, seed):
    if count < 0 or nonzero not in range(1, 10) or type(nonzero) is float:
        with pytest.raises(ValueError, match=r"(count|nonzero) \(.*\)"):
            sparse_numbers(count, nonzero, seed=seed)
        return
    found = sparse_numbers(count, nonzero, seed=seed)
    assert len(found) == count and found == sparse_numbers(count, nonzero, seed=seed)
    for number in found:
        assert len(str(number).replace("0", "")) == nonzero and 0 < number < 10**9


# --- Marian -----------------------------------------------------------------------------------


@st.composite
def marians(draw):
    """Options of a MarianMTModel."""
    heads, shared = draw(st.sampled_from((1, 2, 4))), draw(st.booleans())
    options = dict(
        d_model=16,
        encoder_layers=draw(st.integers(0, 2)),
        decoder_layers=draw(st.integers(0, 2)),
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        activation_function=draw(st.sampled_from(("swish", "silu", "relu", "gelu"))),
        share_encoder_decoder_embeddings=shared,
        tie_word_embeddings=draw(st.booleans()),
        pad_token_id=draw(st.sampled_from((29, 1))),
    )
    options["decoder_start_token_id"] = options["pad_token_id"]
    return options


@drawn(
    marians(),
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    seeds,
)
def test_marians_in_other_shapes(options, dtype, lengths, seed):
    torch.manual_seed(seed)
    theirs = tiny_marian(**options, init_std=0.2).to(dtype)
    with torch.no_grad():
        for p in theirs.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
        theirs.final_logits_bias.normal_()
    pad = options["pad_token_id"]
    tokens = torch.randint(2, 29, (len(lengths), max(lengths)))
    behind = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    src, tgt = tokens.masked_fill(behind, pad), torch.randint(2, 29, (len(lengths), 4))
    ours = from_marian(theirs.config, theirs.state_dict()).eval()
    assert ours.output.weight.dtype == dtype
    kinds = _marian_weights(theirs.state_dict())
    own = {key: x for key, x in ours.state_dict().items() if key != "positions.table"}
    assert all(torch.equal(x, kinds[key]) for key, x in own.items())
    wide = theirs.double()
    with torch.no_grad():
        found = ours(src, tgt)
        wanted = wide(
            input_ids=src, attention_mask=(src != pad).long(), decoder_input_ids=tgt
        ).logits
    assume(wanted.isfinite().all())
    atol = 1e-6 if dtype == torch.float64 else rounding(dtype, 64) * wanted.abs().max().item()
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol)


ORACLES = {
    "tag": test_tags,
    "number_tokenizer": test_tables_hold_the_tokens_of_names,
    "number_table": test_tables_hold_the_tokens_of_names,
    "trim": test_trimming_leaves_the_columns_that_are_used,
    "direction_batches": test_batches_name_one_number_in_two_languages,
    "_check_side": test_sides,
    "translation_loss": test_the_loss_is_of_the_next_tokens,
    "translate_numbers": test_names_are_translated_as_each_alone,
    "translate": test_texts_are_translated_as_each_alone,
    "from_marian": test_marians_in_other_shapes,
    "_marian_weights": test_marians_in_other_shapes,
}
NOT_HERE = {
    "DIRECTIONS": "a table of pairs",
    "HELD_OUT": "a table of pairs",
    "SENTENCE_LANGUAGES": "a table of languages",
    "load_marian": "reads files, which tests/test_translation.py writes",
}


def test_nothing_is_left_out():
    assert set(translation.__all__) == {name for name in ORACLES | NOT_HERE if name[0] != "_"}
