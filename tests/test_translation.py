"""Translation: directions, tags, scores, published tokenizers, long runs at a tiny size."""

import hashlib
import io
import json
import math
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
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
from benchmarks import translation as translation_runs
from benchmarks.translation import (
    keep_best,
    length_run,
    lowest_row,
    multi30k_run,
    page,
    sparse_numbers,
)

pytestmark = pytest.mark.usefixtures("quiet")
of_page = page.number_run.__globals__  # the names that the page's functions use


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
    assert page.is_in(name, language) and not page.is_in(name + "x", language)


def test_a_name_of_a_large_number_is_not_in_another_language():
    four = ("en", "de", "es", "fi")
    for number in draw_numbers(60, 10**9, seed=5):
        for a in four if number else ():
            (name,) = number_words([number], a)
            assert [b for b in four if page.is_in(name, b)] == [a]


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
    assert page.answer_kind(tokenizer, text, 77, "de", "es", four) == kind


def test_answers_above_a_million_are_sorted():
    own, number = ("en", "de", "es"), 41_002_077
    tokenizer = number_tokenizer(draw_numbers(300, 10**6, seed=3), 300, own)
    for language in own:
        (right,), (wrong,) = (number_words([n], language) for n in (number, number + 1))
        kinds = [
            page.answer_kind(tokenizer, x, number, "en", "es", own) for x in (right, wrong)
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
        lambda: tag("fr"),
        lambda: translate_numbers(model, tokenizer, ["one"], "fr"),
        lambda: translate_numbers(model, tokenizer, ["one", "two"], ["de", "xx"]),
    ):
        with pytest.raises(ValueError, match=r"language \('(fr|xx)'\)"):
            call()


def test_accuracy_counts_right_answers_and_those_in_another_language(monkeypatch, tokenizer):
    def answers(model, tokenizer, texts, languages, **options):
        numbers = [known[text] for text in texts]
        return [
            de[n] if b == "de" else en[n] if b == "es" else "?"
            for n, b in zip(numbers, languages)
        ]

    en, de = number_words(range(2000), "en"), number_words(range(2000), "de")
    known = {text: n for texts in (en, de) for n, text in enumerate(texts)}
    monkeypatch.setitem(of_page, "translate_numbers", answers)
    directions = [("en", "de"), ("en", "es"), ("en", "fi")]
    numbers = list(range(1001, 1031))
    for size in (7, 500):
        found = page.direction_accuracy(None, tokenizer, numbers, directions, batch_size=size)
        assert found == {("en", "de"): (1, 0), ("en", "es"): (0, 1), ("en", "fi"): (0, 0)}
    scores = page.number_scores(
        None, tokenizer, numbers, [("en", "de"), ("en", "es"), ("en", "fi")][:1]
    )
    assert scores["supervised"]["right"] == 1 and "de-en" in scores["zero_shot"]["directions"]


def test_accuracy_with_the_tag_on_the_target(tokenizer):
    """As by hand; the model says "zwei" after the tag <de>, and else nothing."""

    class Speaker(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_model(320)
            self.output, self.max_length, self.pad_id = self.inner.output, 128, 0

        def encode(self, src):
            return self.inner.encode(src)

        def decode(self, tgt, memory, src_mask=None, cache=None):
            past = 0 if cache is None else len(cache)
            row = encode(tokenizer, ["zwei"])[0, 1:].tolist()
            if past == 0:
                self.starts = tgt[:, 0] == tokenizer.token_to_id("<de>")
            says = torch.where(self.starts, row[min(past, len(row) - 1)], data.EOS)
            if cache is not None:
                cache.advance(1)
            return 9.0 * F.one_hot(says, 320)[:, None]

    model, directions = Speaker(), [("en", "de"), ("en", "es")]
    numbers = [2, 2, 3, 3]
    found = page.direction_accuracy(model, tokenizer, numbers, directions, tag_on="target")
    assert found == {("en", "de"): (0.5, 0), ("en", "es"): (0, 0)}
    scores = page.number_scores(model, tokenizer, numbers, directions, tag_on="target")
    assert scores["supervised"]["right"] == 0.25
    assert page.direction_accuracy(model, tokenizer, numbers, directions)["en", "de"] == (0, 0)
    with pytest.raises(ValueError, match="tag_on"):
        page.direction_accuracy(model, tokenizer, numbers, directions, tag_on="both")


def test_number_run_partitions_directions_and_records_its_settings():
    directions = [("en", "de"), ("de", "en"), ("en", "es")]
    _, _, record = page.number_run(
        directions,
        limit=10**4,
        steps=4,
        numbers=100,
        tests=30,
        vocab_size=300,
        d_model=16,
        layers=1,
        batch_size=8,
        log_every=2,
    )
    assert set(record["supervised"]["directions"]) == {"en-de", "de-en", "en-es"}
    assert set(record["zero_shot"]["directions"]) == {"de-es", "es-de", "es-en"}
    assert [row["step"] for row in record["history"]] == [2, 4] and record["settings"][
        "limit"
    ] == 10**4
    json.dumps(record)


def test_the_history_is_that_of_numbers_which_are_in_no_other_part(monkeypatch):
    asked, trained = [], []
    scores, table = page.number_scores, number_table
    monkeypatch.setitem(
        of_page,
        "number_scores",
        lambda *arguments: asked.append(set(arguments[2])) or scores(*arguments),
    )
    monkeypatch.setitem(
        of_page,
        "number_table",
        lambda *arguments: trained.append(set(arguments[1])) or table(*arguments),
    )
    page.number_run(
        [("en", "de")],
        limit=10**4,
        steps=1,
        numbers=300,
        tests=20,
        vocab_size=100,
        d_model=16,
        layers=1,
        batch_size=4,
    )
    (valid, test), (seen,) = asked, trained
    large = {n for n in valid if n >= 1000}  # the few short ones are in all parts
    assert large and not large & seen and not valid & test and not test & seen


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


def test_multi30k_run_scores_with_bleu(monkeypatch):
    english = [
        "a man rides a red bike .",
        "two dogs run on the beach .",
        "a girl reads a book .",
    ] * 4
    german = [
        "ein mann fährt ein rotes rad .",
        "zwei hunde laufen am strand .",
        "ein mädchen liest ein buch .",
    ] * 4
    monkeypatch.setattr(translation_runs, "multi30k", lambda split, folder: (english, german))
    sizes = dict(
        vocab_size=80, d_model=32, layers=1, dropout=0.0, batch_size=12, lr=5e-3, beam_size=2
    )
    model, tokenizer, record = multi30k_run(steps=150, **sizes)
    assert (
        record["bleu"] > 99.9 and "nrefs:1" in record["signature"]
    )  # twelve sentences are learned by heart
    assert (
        translate(model, tokenizer, english[:3])
        == german[:3]
        == [row[1] for row in record["examples"][:3]]
    )
    _, _, untrained = multi30k_run(steps=1, **sizes)
    assert untrained["bleu"] < 50


PAIRS = {"a man": "ein mann", "two dogs": "zwei hunde", "a book": "ein buch"}


def write_archives(folder, monkeypatch):
    """Three sentences in archives of the published format, and their checksums in the table."""
    known = {}
    for split, (stem, name, sources) in data._MULTI30K.items():
        with tarfile.open(folder / name, "w:gz") as tar:
            for ending, lines in (("en", PAIRS), ("de", PAIRS.values())):
                text = "\n".join(lines).encode() + b"\n"
                member = tarfile.TarInfo(f"./{stem}.{ending}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
        checksum = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        known[split] = (stem, name, dict.fromkeys(sources, checksum))
    monkeypatch.setattr(data, "_MULTI30K", known)


def test_multi30k_run_reads_the_archives_and_goes_on_from_a_checkpoint(tmp_path, monkeypatch):
    write_archives(tmp_path, monkeypatch)
    sizes = dict(
        steps=6, vocab_size=60, d_model=16, layers=1, batch_size=3, log_every=2, beam_size=1
    )
    model, _, record = multi30k_run(tmp_path, **sizes)
    path = tmp_path / "runs" / "multi30k.json"
    again, _, other = multi30k_run(tmp_path, checkpoint=path, **sizes)
    assert other == record and [row["step"] for row in record["history"]] == [2, 4, 6]
    third, _, finished = multi30k_run(tmp_path, checkpoint=path, **sizes)  # nothing is left
    assert finished == record
    for name, x in model.state_dict().items():
        assert torch.equal(x, again.state_dict()[name])
        assert torch.equal(x, third.state_dict()[name])


def test_two_runs_in_one_folder_keep_their_own_weights(tmp_path, monkeypatch):
    write_archives(tmp_path, monkeypatch)
    sizes = dict(vocab_size=60, d_model=16, layers=1, batch_size=3, log_every=2, beam_size=1)
    alone, _, record = multi30k_run(tmp_path, steps=2, seed=1, **sizes)
    runs = tmp_path / "runs"
    multi30k_run(tmp_path, steps=16, lr=2e-2, checkpoint=runs / "a.json", **sizes)  # is better
    path = runs / "b.json"
    for _ in range(2):  # the second time after the checkpoint, but not all of it, was removed
        model, _, found = multi30k_run(tmp_path, steps=2, seed=1, checkpoint=path, **sizes)
        assert found == record
        for name, x in alone.state_dict().items():
            assert torch.equal(x, model.state_dict()[name])
        path.unlink()
    weights, _ = translation_runs.load_checkpoint(runs / "a-best.json")
    multi30k_run(tmp_path, steps=2, seed=1, checkpoint=path, **sizes)
    translation_runs.save_checkpoint(runs / "b-best.json", weights, {"step": 0, "loss": 1e9})
    with pytest.raises(ValueError, match="b-best.json has weights of the loss"):
        multi30k_run(tmp_path, steps=2, seed=1, checkpoint=path, **sizes)


def test_a_loss_that_is_nan_is_replaced(tmp_path, monkeypatch):
    losses = iter([math.nan, 3.0, math.nan, 2.0, 4.0])
    monkeypatch.setattr(
        translation_runs,
        "translation_loss",
        lambda *_: (torch.tensor(next(losses)), torch.tensor(1)),
    )
    path, src = tmp_path / "best.json", torch.ones(1, 3, dtype=torch.int64)
    look, kept, rows = keep_best(path, src, src), [], []
    model = small_model(30)
    for step in range(5):
        rows.append({"step": step} | look(model))
        kept.append(translation_runs.load_checkpoint(path)[1]["loss"])
    assert math.isnan(kept[0]) and kept[1:] == [3.0, 3.0, 2.0, 2.0]
    assert lowest_row(rows)["step"] == 3
    assert lowest_row(rows[:1])["step"] == 0


def test_the_weights_with_the_lowest_validation_loss_are_kept(tmp_path):
    tokenizer = train_bpe([*PAIRS, *PAIRS.values()], 60)
    pair = (encode(tokenizer, list(PAIRS)), encode(tokenizer, list(PAIRS.values())))
    look = keep_best(tmp_path / "best.json", *pair, batch_size=2)
    losses, kept = [], []
    for seed in (3, 4, 5, 6):
        torch.manual_seed(seed)
        model = Transformer(60, None, 16, 1, 1, 1, 32, dropout=0.0).eval()
        losses.append(look(model)["valid"])
        kept.append(model)
        total, count = translation.translation_loss(model, pair)
        assert losses[-1] == pytest.approx(float(total / count), rel=1e-5)
    weights, state = translation_runs.load_checkpoint(tmp_path / "best.json")
    best = losses.index(min(losses))
    assert state["loss"] == losses[best]
    for name, x in kept[best].state_dict().items():
        assert torch.equal(x, weights[name])


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


def test_the_committed_record_is_the_run_that_the_chapter_describes():
    record = read_record("numbers")
    trained = {f"{a}-{b}" for a, b in DIRECTIONS if (a, b) not in HELD_OUT}
    assert (
        set(record["supervised"]["directions"]) == trained
        and record["supervised"]["numbers"] == 10_000
    )
    assert set(record["zero_shot"]["directions"]) == {f"{a}-{b}" for a, b in HELD_OUT}
    assert record["supervised"]["right"] >= 0.99 and record["settings"]["limit"] == 10**9


def test_trim_looks_for_the_last_token():
    for row, columns in (([5, 0, 0, 6], 4), ([0, 5, 6], 3), ([5, 6, 0, 0], 2), ([0, 0], 0)):
        assert translation.trim(torch.tensor([row])).shape == (1, columns)
    assert translation.trim(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 0)


def test_translate_wants_a_list():
    with pytest.raises(TypeError, match=r"texts \('Hello'\)"):
        translation.translate(None, None, "Hello")
    with pytest.raises(ValueError, match=r"batch_size \(0\)"):
        translation.translate(None, None, ["Hello"], batch_size=0)
