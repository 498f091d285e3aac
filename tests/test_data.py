"""Number words and tokens: right names, disjoint splits, texts restored exactly."""
import hashlib
import io
import tarfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import data
from attnlib.data import BOS, EOS, LANGUAGES, PAD, UNK, decode, draw_numbers, encode, number_words, train_bpe


def test_number_words():
    assert number_words([321, 0], "de") == ["dreihunderteinundzwanzig", "null"]
    assert number_words([92], "da") == ["tooghalvfems"]
    assert len(LANGUAGES) >= 10


@pytest.mark.parametrize("language", LANGUAGES)
def test_different_numbers_have_different_names(language):
    numbers = draw_numbers(300, 10**9, seed=1)
    assert len(set(number_words(numbers, language))) == len(set(numbers))


@pytest.mark.parametrize("numbers, language, message", [
    ([1], "xx", r"language \('xx'\) must be one of en, de"),
    ([10**9], "en", r"numbers \(1000000000\) must be from 0 to 999,999,999"),
    ([-1], "en", r"numbers \(-1\) must be from 0"),
])
def test_number_words_refuses(numbers, language, message):
    with pytest.raises(ValueError, match=message):
        number_words(numbers, language)


def test_drawn_numbers_avoid_the_excluded_and_cover_all_lengths():
    test = set(draw_numbers(500, 10**6, seed=1))
    numbers = draw_numbers(2000, 10**6, seed=2, exclude=test)
    assert len(numbers) == 2000 and not test & set(numbers) and 0 <= min(numbers) and max(numbers) < 10**6
    shares = [sum(len(str(n)) == k for n in draw_numbers(6000, 10**6)) / 6000 for k in range(1, 7)]
    assert min(shares) > 0.12 and draw_numbers(9, 100, seed=3) == draw_numbers(9, 100, seed=3)


@pytest.mark.parametrize("limit, exclude, message", [
    (500, (), r"limit \(500\) must be a power of ten"),
    (1, (), r"limit \(1\) must be a power of ten"),
    (10**10, (), r"limit \(10000000000\) must be a power of ten"),
    (10, range(10), r"exclude holds all numbers below limit \(10\)"),
])
def test_draw_numbers_refuses(limit, exclude, message):
    with pytest.raises(ValueError, match=message):
        draw_numbers(3, limit, exclude=exclude)


@pytest.fixture(scope="module")
def tokenizer():
    texts = [word for language in LANGUAGES for word in number_words(draw_numbers(500, 10**9, seed=4), language)]
    return train_bpe(texts, 400, extra=[f"<2{language}>" for language in LANGUAGES])


@given(number=st.integers(0, 10**9 - 1), language=st.sampled_from(LANGUAGES))
@settings(max_examples=100, deadline=None)
def test_decoding_restores_the_text(tokenizer, number, language):
    text = number_words([number], language)
    assert decode(tokenizer, encode(tokenizer, text)) == text


def test_encode_pads_and_marks(tokenizer):
    tokens = encode(tokenizer, ["uno", "novecientos ochenta y siete millones"], prefix=["<2de>", "<2en>"])
    assert tokens.dtype == torch.int64 and (tokens[:, 0] == BOS).all()
    assert tokens[:, 1].tolist() == [tokenizer.token_to_id("<2de>"), tokenizer.token_to_id("<2en>")]
    assert tokens[0, -1] == PAD and ((tokens == EOS).sum(1) == 1).all() and not (tokens == UNK).any()
    assert tokenizer.get_vocab_size() == 400
    assert [tokenizer.token_to_id(t) for t in ("<pad>", "<s>", "</s>", "<unk>")] == [PAD, BOS, EOS, UNK]


def test_unknown_letters_become_unknown_tokens(tokenizer):
    assert UNK in encode(tokenizer, ["日"])[0].tolist()


def test_prefixes_must_be_one_for_each_text(tokenizer):
    with pytest.raises(ValueError):
        encode(tokenizer, ["one", "two"], prefix=["<2de>"])


# --- Multi30k, on a small archive of the same form -------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A server folder with a small training.tar.gz; Multi30k's table points to it, after an address that is dead."""
    server = tmp_path / "server"
    server.mkdir()
    texts = {"train.en": "A dog runs.\nTwo men cook.\n", "train.de": "Ein Hund rennt.\nZwei Männer kochen.\n"}
    archive = server / "training.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in texts.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    sources = {"http://127.0.0.1:9/": checksum, server.as_uri() + "/": checksum}
    monkeypatch.setattr(data, "MULTI30K", {"train": ("train", "training.tar.gz", sources)})
    return archive


def test_multi30k_takes_the_second_source_and_keeps_the_file(small, tmp_path):
    english, german = data.multi30k("train", tmp_path / "kept")
    assert english == ["A dog runs.", "Two men cook."] and german == ["Ein Hund rennt.", "Zwei Männer kochen."]
    small.unlink()
    assert data.multi30k("train", tmp_path / "kept") == (english, german)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["training.tar.gz"]


def test_multi30k_refuses_a_file_that_is_not_the_published_one(small, tmp_path):
    small.write_bytes(small.read_bytes() + b"x")
    with pytest.raises(ConnectionError, match=r"could not be fetched.*invalid hash.*Put it at .*training.tar.gz"):
        data.multi30k("train", tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())  # nothing half-done stays
    (tmp_path / "kept" / "training.tar.gz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="has another SHA-256 than the published file: delete it"):
        data.multi30k("train", tmp_path / "kept")


def test_multi30k_offline_says_what_was_wanted(tmp_path, small):
    small.unlink()
    with pytest.raises(ConnectionError, match=r"training.tar.gz could not be fetched from http://127.0.0.1:9/training"):
        data.multi30k("train", tmp_path / "kept")


def test_multi30k_unknown_split():
    with pytest.raises(ValueError, match=r"split \('dev'\) must be one of 'train', 'valid', 'test'"):
        data.multi30k("dev")


def test_multi30k_table_is_complete():
    for _, name, sources in data.MULTI30K.values():
        assert name.endswith(".tar.gz") and len(sources) == 2
        assert all(len(checksum) == 64 and int(checksum, 16) for checksum in sources.values())
