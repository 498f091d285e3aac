"""Translation: directions, tags, scores, published tokenizers, long runs at a tiny size."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import data, translation
from attnlib.data import LANGUAGES, decode, draw_numbers, encode, number_words, train_bpe
from attnlib.decoding import greedy
from attnlib.train import read_record
from attnlib.transformer import POSITIONS, Transformer
from attnlib.translation import (
    DIRECTIONS,
    HELD_OUT,
    direction_batches,
    load_marian,
    number_table,
    number_tokenizer,
    tag,
    translate,
    translate_numbers,
    trim,
)
from benchmarks import moses, multi30k
from benchmarks import translation as translation_runs
from benchmarks.translation import length_run, sparse_numbers

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def tokenizer():
    return number_tokenizer(draw_numbers(200, 10**6, seed=3), 320)


def small_model(vocab, **options):
    torch.manual_seed(0)
    return Transformer(vocab, None, 32, 4, 1, 1, 64, dropout=0.0, **options).eval()


def test_held_out_directions_leave_each_language_nine_of_either_kind():
    trained = [pair for pair in DIRECTIONS if pair not in HELD_OUT]
    assert len(DIRECTIONS) == 132 and len(set(HELD_OUT)) == 24 and len(trained) == 108
    for side in (0, 1):
        assert {
            language: sum(pair[side] == language for pair in trained) for language in LANGUAGES
        } == dict.fromkeys(LANGUAGES, 9)


def test_batches_are_names_of_one_number_in_the_languages_of_a_direction(tokenizer):
    numbers = draw_numbers(50, 10**6, seed=4)
    directions = [("de", "fi"), ("fi", "en")]
    batches = direction_batches(
        tokenizer, number_table(tokenizer, numbers), directions, batch_size=40
    )
    src, tgt = batches(7)
    assert all(torch.equal(a, b) for a, b in zip((src, tgt), batches(7))) and not torch.equal(
        src, batches(8)[0]
    )
    names = {language: number_words(numbers, language) for language in ("de", "fi", "en")}
    seen = set()
    for said, wanted, asked in zip(
        decode(tokenizer, src), decode(tokenizer, tgt), src[:, 1].tolist()
    ):
        target = tokenizer.id_to_token(asked)[1:-1]
        source = {"fi": "de", "en": "fi"}[target]
        assert names[source].index(said) == names[target].index(wanted)
        seen.add(target)
    assert seen == {"fi", "en"}
    assert (src[:, -1] != 0).any() and (tgt[:, -1] != 0).any()  # trimmed


def numbers_seen(batches, tokenizer, numbers, steps):
    """{target language: the numbers whose names it has been given} of English sources."""
    names, seen = number_words(numbers, "en"), {}
    for step in range(steps):
        src, tgt = batches(step)
        for said, asked in zip(decode(tokenizer, src), src[:, 1].tolist()):
            seen.setdefault(tokenizer.id_to_token(asked), set()).add(names.index(said))
    return seen


def test_directions_have_numbers_of_their_own_unless_they_share_all(tokenizer):
    numbers = list(range(1000, 1031))
    table, directions = number_table(tokenizer, numbers), [("en", "de"), ("en", "es")]
    for shared in (True, False):
        batches = direction_batches(tokenizer, table, directions, batch_size=50, shared=shared)
        seen = numbers_seen(batches, tokenizer, numbers, 10)
        common = seen["<de>"] & seen["<es>"]
        assert len(common) == 31 if shared else not common
        assert len(seen["<de>"]) == (31 if shared else 15)


def test_the_tag_can_stand_on_the_side_of_the_target(tokenizer):
    table = number_table(tokenizer, [1001, 2002, 3003])
    sides = {
        side: direction_batches(
            tokenizer, table, [("en", "de"), ("en", "es")], batch_size=6, tag_on=side
        )(3)
        for side in ("source", "target")
    }
    (src, tgt), (bare, tagged) = sides["source"], sides["target"]
    assert torch.equal(src[:, 2:], bare[:, 1:]) and torch.equal(src[:, 1], tagged[:, 0])
    assert torch.equal(tgt[:, 1:], tagged[:, 1:]) and (tgt[:, 0] == data.BOS).all()
    assert (table[:, :, 0] != tagged[0, 0]).all()  # the table is as it was

    model = small_model(320)
    texts, wanted = ["one", "two", "three"], ["de", "es", "de"]
    for languages in (wanted[:2], [*wanted, "de"]):
        for side in sides:
            with pytest.raises(ValueError, match=r"language has [24] languages for 3 texts"):
                translate_numbers(model, tokenizer, texts, languages, tag_on=side)
    with pytest.raises(TypeError, match=r"texts \('one'\)"):
        translate_numbers(model, tokenizer, "one", "de")
    said = translate_numbers(model, tokenizer, texts, wanted, tag_on="target", max_length=9)
    for text, language, own in zip(texts, wanted, said):
        start = tokenizer.token_to_id(tag(language))
        alone = greedy(model, encode(tokenizer, [text]), 9, bos_id=start)
        assert decode(tokenizer, alone) == [own]
    for call in (
        lambda: direction_batches(tokenizer, table, [], batch_size=1, tag_on="both"),
        lambda: translate_numbers(model, tokenizer, texts, "de", tag_on="both"),
    ):
        with pytest.raises(ValueError, match=r"tag_on \('both'\)"):
            call()


def test_a_table_of_some_languages_is_that_of_all_elsewhere_padding(tokenizer):
    whole = number_table(tokenizer, [12, 345])
    part = number_table(tokenizer, [12, 345], ("de", "fi"))
    for i, language in enumerate(LANGUAGES):
        own = trim(whole[i]) if language in ("de", "fi") else torch.zeros(2, 0)
        assert torch.equal(trim(part[i]), own.long())


# --- kinds of answers -------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9 - 1), st.sampled_from(LANGUAGES))
def test_a_name_is_in_its_language(number, language):
    (name,) = number_words([number], language)
    assert translation_runs.is_in(name, language) and not translation_runs.is_in(
        name + "x", language
    )


def test_a_name_of_a_large_number_is_not_in_another_language():
    four = ("en", "de", "es", "fi")
    for number in draw_numbers(60, 10**9, seed=5):
        for a in four if number else ():
            (name,) = number_words([number], a)
            assert [b for b in four if translation_runs.is_in(name, b)] == [a]


@pytest.mark.parametrize(
    "text, kind",
    [
        ("setenta y siete", "right"),
        ("seventy-seven", "named in en"),
        ("siebenundsiebzig", "named in de"),
        ("seitsemänkymmentäseitsemän", "named in fi"),
        ("seventy-eight", "in en"),
        ("setenta y ocho", "in es"),
        ("mil mil cien", "in es"),
        ("achtundsiebzig", "in de"),
        ("siebzigtausendeintausend", "in de"),
        ("setenta-seven", "mixed"),
        ("siebenundventy-seven thousand", "mixed"),
        ("", "none"),
        ("x", "none"),
    ],
)
def test_answers_are_sorted(text, kind):
    four = ("en", "de", "es", "fi")
    tokenizer = number_tokenizer(draw_numbers(500, 10**6, seed=3), 300, four)
    assert translation_runs.answer_kind(tokenizer, text, 77, "de", "es", four) == kind


def test_answers_above_a_million_are_sorted():
    own, number = ("en", "de", "es"), 41_002_077
    tokenizer = number_tokenizer(draw_numbers(300, 10**6, seed=3), 300, own)
    for language in own:
        (right,), (wrong,) = (number_words([n], language) for n in (number, number + 1))
        kinds = [
            translation_runs.answer_kind(tokenizer, x, number, "en", "es", own)
            for x in (right, wrong)
        ]
        named = "right" if language == "es" else f"named in {language}"
        assert kinds == [named, f"in {language}"]


def test_trim():
    assert trim(torch.tensor([[1, 5, 2, 0, 0], [1, 2, 0, 0, 0]])).tolist() == [
        [1, 5, 2],
        [1, 2, 0],
    ]


def test_unknown_language(tokenizer):
    model = small_model(320)
    for call in (
        lambda: tag("xx"),
        lambda: translate_numbers(model, tokenizer, ["one"], "fr"),
        lambda: translate_numbers(model, tokenizer, ["one", "two"], ["de", "xx"]),
    ):
        with pytest.raises(ValueError, match=r"language \('(fr|xx)'\)"):
            call()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6))
def test_sparse_numbers_have_the_digits_asked_for(nonzero, seed):
    for number in sparse_numbers(20, nonzero, seed=seed):
        assert sum(digit != "0" for digit in str(number)) == nonzero and number < 10**9


def test_sparse_numbers_out_of_range():
    for nonzero in (0, 10):
        with pytest.raises(ValueError, match=rf"nonzero \({nonzero}\)"):
            sparse_numbers(3, nonzero)


def test_length_run_tests_every_length_and_refuses_an_unknown_scheme():
    result = length_run(POSITIONS[0], steps=2, numbers=100, tests=4, d_model=16)
    assert len(result["accuracy"]) == 9 and result["position"] == POSITIONS[0]
    with pytest.raises(ValueError, match=r"position \('spiral'\)"):
        length_run("spiral", steps=2, numbers=100, tests=4, d_model=16)


# --- published models -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def marian_folder(tmp_path_factory):
    """A Marian model in the published format: SentencePiece models, a table, random weights."""
    import sentencepiece
    from transformers import MarianConfig, MarianMTModel

    folder = tmp_path_factory.mktemp("marian")
    pieces = ["</s>", "<unk>"]
    for side, language in (("source", "en"), ("target", "de")):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(number_words(range(1500), language)),
            model_prefix=str(folder / side),
            vocab_size=60,
            model_type="unigram",
            minloglevel=2,
        )
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
        reader = sentencepiece.SentencePieceProcessor(str(folder / f"{side}.spm"))
        pieces += [reader.id_to_piece(i) for i in range(3, reader.get_piece_size())]
    table = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, "<pad>"]))}
    (folder / "vocab.json").write_text(json.dumps(table))
    config = MarianConfig(
        vocab_size=len(table),
        decoder_vocab_size=len(table),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        init_std=0.4,
        max_position_embeddings=48,
        scale_embedding=True,
        activation_function="swish",
        pad_token_id=table["<pad>"],
        eos_token_id=0,
        decoder_start_token_id=table["<pad>"],
        forced_eos_token_id=None,
    )
    torch.manual_seed(torch.seed() % 2**31)  # fresh weights at every run
    MarianMTModel(config).save_pretrained(folder)
    return folder


TEXTS = ["nine", "seven hundred and twelve", "one thousand, four hundred and forty-two", "ten"]


@pytest.mark.parametrize("beams", [1, 3])
def test_marian_translates_as_transformers_does(marian_folder, beams):
    from transformers import MarianMTModel

    theirs = MarianMTModel.from_pretrained(marian_folder).eval()
    model, tokenizer = load_marian(marian_folder)
    pad = tokenizer.pad_token_id
    options = dict(num_beams=beams, do_sample=False, max_new_tokens=15, bad_words_ids=[[pad]])
    if beams > 1:
        options["early_stopping"] = "never"
    wanted = tokenizer.batch_decode(
        theirs.generate(**tokenizer(TEXTS, return_tensors="pt", padding=True), **options),
        skip_special_tokens=True,
    )
    for size in (1, 3, 64):  # neither batches nor their padding change anything
        assert (
            translate(model, tokenizer, TEXTS, beam_size=beams, max_length=15, batch_size=size)
            == wanted
        )
    assert translate(model, tokenizer, [], beam_size=beams) == []


def test_a_sentence_longer_than_the_positions_is_refused(marian_folder):
    model, tokenizer = load_marian(marian_folder)
    with pytest.raises(
        ValueError, match=r"src ends at token \d+; there are max_length \(48\) positions"
    ):
        translate(model, tokenizer, ["nine " * 60], max_length=10)


def test_marian_files_that_are_missing(marian_folder, tmp_path):
    (tmp_path / "config.json").write_text((marian_folder / "config.json").read_text())
    with pytest.raises(
        FileNotFoundError, match=r"must hold vocab.json, source.spm, target.spm as well"
    ):
        load_marian(tmp_path)


def test_marian_offline_says_what_was_wanted(monkeypatch):
    import huggingface_hub

    def offline(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        OSError,
        match=r"'Helsinki-NLP/opus-mt-en-de'\) is no folder and cannot be fetched.*no network",
    ):
        load_marian("Helsinki-NLP/opus-mt-en-de")


# --- sentences --------------------------------------------------------------------------------


PAIRS = {
    "en": ["a man", "two dogs run", "a book"],
    "de": ["ein mann", "zwei hunde laufen", "ein buch"],
    "fr": ["un homme", "deux chiens courent", "un livre"],
    "cs": ["muž", "dva psi běží", "kniha"],
}


def sentence_tokenizer(**options):
    everything = [text for own in PAIRS.values() for text in own]
    return train_bpe(everything, 120, extra=[tag(a) for a in PAIRS], **options)


def test_pairs_of_all_directions_have_the_tag_of_their_target():
    tokenizer = sentence_tokenizer()
    src, tgt = multi30k.page.tagged_pairs(tokenizer, PAIRS, [("en", "de"), ("cs", "en")])
    assert decode(tokenizer, src) == PAIRS["en"] + PAIRS["cs"]
    assert decode(tokenizer, tgt) == PAIRS["de"] + PAIRS["en"]
    tags = [tokenizer.id_to_token(number) for number in src[:, 1].tolist()]
    assert tags == ["<de>"] * 3 + ["<en>"] * 3
    src, _ = multi30k.page.tagged_pairs(tokenizer, PAIRS, [("en", "de")])
    assert torch.equal(src, encode(tokenizer, PAIRS["en"]))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 40), st.integers(0, 5)
)
def test_an_epoch_has_every_pair_once_and_no_batch_is_too_large(lengths, limit, seed):
    src = torch.zeros(len(lengths), 9, dtype=torch.int64)
    for row, length in enumerate(lengths):
        src[row, :length] = row + 1
    batches = multi30k.page.TokenBatches(src, src.flip(0), limit, seed=seed)
    for epoch in range(2):
        rows = []
        for number in range(len(batches)):
            first, second = batches(epoch * len(batches) + number)
            rows += first[:, 0].tolist()
            longest = max(first.shape[1], second.shape[1])
            assert len(first) * longest <= limit or len(first) == 1
        assert sorted(rows) == list(range(1, len(lengths) + 1))


def test_translate_asks_for_a_language():
    tokenizer = sentence_tokenizer()
    model = small_model(tokenizer.get_vocab_size())
    said = translate(model, tokenizer, PAIRS["en"], language="fr", beam_size=1, max_length=9)
    src = encode(tokenizer, PAIRS["en"], prefix=["<fr>"] * 3)
    assert said == decode(tokenizer, greedy(model, src, 9))
    with pytest.raises(ValueError, match=r"language \('xx'\)"):
        translate(model, tokenizer, PAIRS["en"], language="xx")
    with pytest.raises(ValueError, match="prefix"):
        translate(model, tokenizer, PAIRS["en"], language="fi")


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("Ein Mann, der liest.", "ein mann , der liest ."),
        ("Sie sagt: „Komm!“", "sie sagt : &quot; komm ! &quot;"),
        ("Ein T-Shirt (rot) kostet 3,50 Euro.", "ein t-shirt ( rot ) kostet 3,50 euro ."),
        ("Mutter u. Kind am 3. Mai ...", "mutter u. kind am 3. mai ..."),
        ("Ein Haus bzw. Hof & Garten", "ein haus bzw. hof &amp; garten"),
        ("Levi's Laden.", "levi &apos; s laden ."),
        ("Er liest „Fabrik.“", "er liest &quot; fabrik &quot; ."),
        ("", ""),
    ],
)
def test_tokens_of_published_scores(text, tokens):
    assert moses.tokenize(text) == tokens


def test_the_tokens_of_the_references_are_the_published_ones():
    rows = read_record("multi30k_tokens")["german"]
    assert {year: row["tokens"] for year, row in rows.items()} == {"2016": 12103, "2017": 10758}
    assert all(row["lines_that_differ"] == 0 for row in rows.values())


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("languages", ["pair", "four"])
def test_a_translator_is_trained_and_scored(languages, tmp_path, monkeypatch):
    numbers = {"train": range(30), "valid": range(30, 40), "test": range(40, 46)}
    numbers["test_2017"] = range(50, 56)
    known = {"en": "en", "de": "de", "fr": "es", "cs": "fi"}  # names of numbers as sentences

    def sentences(split, folder, languages=("en", "de")):
        return tuple(number_words(numbers[split], known[a]) for a in languages)

    monkeypatch.setattr(multi30k, "multi30k", sentences)
    common = dict(data=None, threads=1, tiny=True, out=tmp_path / "runs")
    training = dict(checkpoints=tmp_path / "at", epochs=2, log_epochs=1, lr=1e-3, seed=0)
    multi30k.train(
        SimpleNamespace(languages=languages, schedule="cosine", **common, **training)
    )
    common["out"] = tmp_path / "records"
    name = f"{languages}-2-0"
    multi30k.score(SimpleNamespace(runs=tmp_path / "runs", name=name, **common))
    record = json.loads((tmp_path / "records" / f"multi30k_{name}.json").read_text())
    assert record["epochs"] == 2 and "nrefs:1" in record["signature"]
    if languages == "pair":
        assert set(record["scores"]) == {"2016", "2017"} and len(record["own"]) == 5
        for own in record["scores"].values():
            assert 0 <= own["bleu"] <= 100 and own["exact"] <= own["sentences"] == 6
    else:
        rows = record["directions_scored"]
        assert len(rows) == 12 and record["classifier"]["accuracy"] > 0.8
        for pair, row in rows.items():
            assert row["trained"] == ("en" in pair) != ("bleu_through_english" in row)


def test_bleu_of_perfect_translations():
    texts = ["Ein Hund läuft am Strand.", "Zwei Männer, die lesen, lachen."]
    assert multi30k.tokenized_bleu(texts, texts) == pytest.approx(100)
    assert multi30k.raw_bleu(texts, texts)[0] == pytest.approx(100)
    shouted = [text.upper() for text in texts]
    assert multi30k.tokenized_bleu(shouted, texts) == pytest.approx(100)
    assert multi30k.raw_bleu(shouted, texts)[0] < 50
    ranked = multi30k.ranked_examples(["a", "b"], [texts[0], "x"], texts, count=2)
    assert [row["source"] for row in ranked] == ["a", "b"] and ranked[0]["chrf"] == 100


# --- why directions fail ----------------------------------------------------------------------


@pytest.mark.slow
def test_the_zero_shot_experiment_runs(tmp_path):
    root = Path(__file__).resolve().parent.parent
    command = [
        sys.executable,
        "-m",
        "benchmarks.translation",
        "zero_shot",
        "--tiny",
        "--parts",
        tmp_path,
        "--out",
        tmp_path / "out",
    ]
    subprocess.run([*command, "--only", "one target"], check=True, cwd=root)
    assert len(list(tmp_path.glob("[0-9]*.json"))) == 2  # with the long run
    subprocess.run(command, check=True, cwd=root)
    record = json.loads((tmp_path / "out" / "zero_shot.json").read_text())
    assert len({run["condition"] for run in record["runs"]}) == 6 == len(record["runs"])
    assert [run["steps"] for run in record["long"]] == [16, 16, 16]
    for run in record["runs"]:
        for own in run["unseen"].values():
            assert sum(own["kinds"].values()) == 6 >= own["as_english"]


def test_the_zero_shot_record_has_equal_steps_and_three_seeds():
    record = read_record("zero_shot")
    found, unseen = {}, {"de-es", "es-fi", "fi-tr", "tr-de"}
    for run in record["runs"]:
        found.setdefault(run["condition"], []).append(run)
        assert run["steps"] == record["size"]["steps"]
        assert not set(run["supervised"]) & unseen and set(run["unseen"]) == unseen
        for own in run["unseen"].values():
            assert sum(own["kinds"].values()) == record["size"]["tests"]
    assert [len(runs[0]["supervised"]) for runs in found.values()] == [8, 12, 16, 16, 8, 8]
    assert all([run["seed"] for run in runs] == [0, 1, 2] for runs in found.values())
    assert len(record["long"]) == 9
    assert all(run["steps"] == 4 * record["size"]["steps"] for run in record["long"])


def test_trim_looks_for_the_last_token():
    for row, columns in (([5, 0, 0, 6], 4), ([0, 5, 6], 3), ([5, 6, 0, 0], 2), ([0, 0], 0)):
        assert translation.trim(torch.tensor([row])).shape == (1, columns)
    assert translation.trim(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 0)


def test_translate_wants_a_list():
    with pytest.raises(TypeError, match=r"texts \('Hello'\)"):
        translation.translate(None, None, "Hello")
    with pytest.raises(ValueError, match=r"batch_size \(0\)"):
        translation.translate(None, None, ["Hello"], batch_size=0)
