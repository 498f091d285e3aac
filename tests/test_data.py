"""Text and images: right names, disjoint splits, texts restored exactly; scenes that
ask what they should."""

import gzip
import hashlib
import io
import pickle
import sys
import tarfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from number_names import RULES

from attnlib import data
from attnlib.data import (
    BOS,
    EOS,
    KINDS,
    LANGUAGES,
    PAD,
    UNK,
    cifar,
    decode,
    describe_scenes,
    digits,
    draw_numbers,
    draw_scenes,
    encode,
    number_words,
    scenes,
    small_images,
    standardize,
    train_bpe,
)


def test_number_words():
    assert number_words([321, 0], "de") == ["dreihunderteinundzwanzig", "null"]
    assert number_words([92], "da") == ["tooghalvfems"]
    assert len(LANGUAGES) >= 10


@pytest.mark.parametrize("language", LANGUAGES)
def test_names_follow_the_rules_of_each_language(language):
    """All names below 1,000, all whole thousands, and a thousand mixed numbers."""
    numbers = [*range(1000), *range(1000, 10**6, 1000)]
    numbers += [1000 * count + (617 * count) % 1000 for count in range(1, 1000, 2)]
    numbers += draw_numbers(250, 10**9, seed=5)
    one_and_more = [0, 1, 2, 21, 22, 100, 101, 118, 201]
    for count in one_and_more:
        millions = 10**6 * count
        numbers += [millions + 1000 * a + b for a in one_and_more[:6] for b in one_and_more]
    expected = [RULES[language](number) for number in numbers]
    assert number_words(numbers, language) == expected


@pytest.mark.parametrize(
    "number, language, name",
    [
        (901_000, "de", "neunhunderteintausend"),
        (101_000_000, "de", "einhunderteine Millionen"),
        (1000, "sv", "ettusen"),
        (40, "sv", "fyrtio"),
        (1_000_001, "sv", "en miljon ett"),
        (2_000_002, "sv", "två miljoner två"),
        (60, "da", "tres"),
        (50, "da", "halvtreds"),
        (1_000_000, "da", "en million"),
        (101_001, "da", "ethundrede og ettusinde og et"),
        (21_000, "es", "veintiún mil"),
        (31_000_000, "es", "treinta y un millones"),
        (118, "it", "centodiciotto"),
        (3_000_003, "it", "tre milioni e tre"),
        (1_000_023, "it", "un milione e ventitré"),
        (2_001_202, "pt", "dois milhões mil duzentos e dois"),
        (2_000_000, "fi", "kaksi miljoonaa"),
        (102, "hu", "százkettő"),
        (22_000, "hu", "huszonkétezer"),
        (101_001, "tr", "yüzbirbinbir"),
    ],
)
def test_names_that_num2words_gets_wrong(number, language, name):
    assert number_words([number], language) == [name]


@pytest.mark.parametrize("language", LANGUAGES)
def test_different_numbers_have_different_names(language):
    numbers = draw_numbers(300, 10**9, seed=1)
    assert len(set(number_words(numbers, language))) == len(set(numbers))


@pytest.mark.parametrize(
    "numbers, language, message",
    [
        ([1], "xx", r"language \('xx'\) must be one of en, de"),
        ([10**9], "en", r"numbers \(1000000000\) must be from 0 to 999,999,999"),
        ([-1], "en", r"numbers \(-1\) must be from 0"),
    ],
)
def test_number_words_refuses(numbers, language, message):
    with pytest.raises(ValueError, match=message):
        number_words(numbers, language)


def test_drawn_numbers_avoid_the_excluded_and_cover_all_lengths():
    test = set(draw_numbers(500, 10**6, seed=1))
    numbers = draw_numbers(2000, 10**6, seed=2, exclude=test)
    assert (
        len(numbers) == 2000
        and not test & set(numbers)
        and 0 <= min(numbers)
        and max(numbers) < 10**6
    )
    shares = [
        sum(len(str(n)) == k for n in draw_numbers(6000, 10**6)) / 6000 for k in range(1, 7)
    ]
    assert min(shares) > 0.12 and draw_numbers(9, 100, seed=3) == draw_numbers(9, 100, seed=3)


@pytest.mark.parametrize(
    "limit, exclude, message",
    [
        (500, (), r"limit \(500\) must be a power of ten"),
        (1, (), r"limit \(1\) must be a power of ten"),
        (10**10, (), r"limit \(10000000000\) must be a power of ten"),
        (10, range(10), r"exclude holds all numbers below limit \(10\)"),
    ],
)
def test_draw_numbers_refuses(limit, exclude, message):
    with pytest.raises(ValueError, match=message):
        draw_numbers(3, limit, exclude=exclude)


@pytest.fixture(scope="module")
def tokenizer():
    texts = [
        word
        for language in LANGUAGES
        for word in number_words(draw_numbers(500, 10**9, seed=4), language)
    ]
    return train_bpe(texts, 400, extra=[f"<2{language}>" for language in LANGUAGES])


@given(number=st.integers(0, 10**9 - 1), language=st.sampled_from(LANGUAGES))
@settings(max_examples=100, deadline=None)
def test_decoding_restores_the_text(tokenizer, number, language):
    text = number_words([number], language)
    assert decode(tokenizer, encode(tokenizer, text)) == text


def test_encode_pads_and_marks(tokenizer):
    tokens = encode(
        tokenizer, ["uno", "novecientos ochenta y siete millones"], prefix=["<2de>", "<2en>"]
    )
    assert tokens.dtype == torch.int64 and (tokens[:, 0] == BOS).all()
    assert tokens[:, 1].tolist() == [
        tokenizer.token_to_id("<2de>"),
        tokenizer.token_to_id("<2en>"),
    ]
    assert (
        tokens[0, -1] == PAD
        and ((tokens == EOS).sum(1) == 1).all()
        and not (tokens == UNK).any()
    )
    assert tokenizer.get_vocab_size() == 400
    assert [tokenizer.token_to_id(t) for t in ("<pad>", "<s>", "</s>", "<unk>")] == [
        PAD,
        BOS,
        EOS,
        UNK,
    ]


def test_unknown_letters_become_unknown_tokens(tokenizer):
    assert UNK in encode(tokenizer, ["日"])[0].tolist()


def test_prefixes_must_be_one_for_each_text(tokenizer):
    with pytest.raises(ValueError):
        encode(tokenizer, ["one", "two"], prefix=["<2de>"])
    with pytest.raises(ValueError, match=r"prefix \('<2xx>'\)"):
        encode(tokenizer, ["one", "two"], prefix=["<2de>", "<2xx>"])


@pytest.mark.parametrize("text", ["A dog runs.", "Two men (in red) cook, eat; rest.", "l'été"])
def test_punctuation_stands_alone(text):
    texts = ["A dog.", "A dog runs.", "The dog, a cat (red), l'été; it rests.", text] * 9
    plain = train_bpe(texts, 200)
    apart = train_bpe(texts, 200, punctuation=True)
    assert "▁dog." in plain.get_vocab() and "▁dog." not in apart.get_vocab()
    marks = [
        token for token in apart.get_vocab() if token[0] != "<" and set(token) & set(".,;()'")
    ]
    assert set(marks) == set(".,;()'")  # none is a part of a longer token
    for tokenizer in (plain, apart):
        assert decode(tokenizer, encode(tokenizer, [text])) == [text]
    first, second = (apart.encode(x).tokens for x in ("A dog.", "A dog"))
    assert first == [*second, "."]


# --- Multi30k, on small files of the same form ------------------------------------------------

SENTENCES = {
    "en": ["A dog runs.", "Two men cook."],
    "de": ["Ein Hund rennt.", "Zwei Männer kochen."],
    "fr": ["Un chien court.", "Deux hommes cuisinent."],
    "cs": ["Pes běží.", "Dva muži vaří."],
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder with two sentences per language in each split; Multi30k's table points to it."""
    folder = tmp_path / "server"
    folder.mkdir()
    sums = {}
    for name in data._MULTI30K_FILES:
        text = "\n".join(SENTENCES[name.split(".")[1]]) + "\n"
        (folder / name).write_bytes(gzip.compress(text.encode()))
        sums[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(data, "_MULTI30K", folder.as_uri() + "/")
    monkeypatch.setattr(data, "_MULTI30K_FILES", sums)
    return folder


def test_multi30k_fetches_a_file_per_language_and_keeps_it(server, tmp_path):
    kept = tmp_path / "kept"
    assert data.multi30k("train", kept) == (SENTENCES["en"], SENTENCES["de"])
    assert sorted(path.name for path in kept.iterdir()) == ["train.de.gz", "train.en.gz"]
    for file in server.iterdir():
        file.unlink()
    assert data.multi30k("train", kept, languages=["de"]) == (SENTENCES["de"],)
    with pytest.raises(ConnectionError, match=r"train\.fr\.gz could not be fetched"):
        data.multi30k("train", kept, languages=("en", "fr"))


@pytest.mark.parametrize(
    "split, stem",
    [
        ("train", "train"),
        ("valid", "val"),
        ("test", "test_2016_flickr"),
        ("test_2017", "test_2017_flickr"),
    ],
)
def test_multi30k_has_four_splits_and_the_languages_in_the_order_asked(
    server, tmp_path, split, stem
):
    languages = ["fr", "en", "de"] if split == "test_2017" else ["cs", "fr", "en", "de"]
    found = data.multi30k(split, tmp_path / "kept", languages=languages)
    assert found == tuple(SENTENCES[language] for language in languages)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        f"{stem}.{language}.gz" for language in languages
    }


def test_multi30k_refuses_a_file_that_is_not_the_published_one(server, tmp_path):
    file = server / "train.en.gz"
    file.write_bytes(file.read_bytes() + b"x")
    kept = tmp_path / "kept"
    with pytest.raises(
        ConnectionError, match=r"could not be fetched.*invalid hash.*Put it at .*train.en.gz"
    ):
        data.multi30k("train", kept)
    assert not list(kept.iterdir())  # nothing half-done stays
    (kept / "train.en.gz").write_bytes(b"something else")
    with pytest.raises(
        ValueError, match="has another SHA-256 than the published file: delete it"
    ):
        data.multi30k("train", kept)


def test_multi30k_refuses_languages_of_different_lengths(server, tmp_path, monkeypatch):
    file = server / "val.de.gz"
    file.write_bytes(gzip.compress(b"Ein Hund.\n"))
    sums = data._MULTI30K_FILES | {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    monkeypatch.setattr(data, "_MULTI30K_FILES", sums)
    with pytest.raises(ValueError, match=r"equally many sentences of 'valid', not 1, 2"):
        data.multi30k("valid", tmp_path / "kept")


@pytest.mark.parametrize(
    "split, languages, message",
    [
        (
            "dev",
            ("en", "de"),
            r"split \('dev'\) must be one of 'train', 'valid', 'test', 'test_2",
        ),
        ("train", ("it",), r"languages \('it'\) must be of cs, de, en, fr for the split"),
        (
            "test_2017",
            ("cs",),
            r"languages \('cs'\) must be of de, en, fr for the split 'test_2",
        ),
    ],
)
def test_multi30k_refuses(tmp_path, split, languages, message):
    with pytest.raises(ValueError, match=message):
        data.multi30k(split, tmp_path, languages=languages)


def test_multi30k_table_is_complete():
    stems = set(data._MULTI30K_SPLITS.values())
    wanted = {f"{stem}.{language}.gz" for stem in stems for language in SENTENCES}
    assert set(data._MULTI30K_FILES) == wanted - {"test_2017_flickr.cs.gz"}
    assert all(len(sum) == 64 and int(sum, 16) for sum in data._MULTI30K_FILES.values())
    assert len(set(data._MULTI30K_FILES.values())) == 15


# --- a file from one of several servers -------------------------------------------------------


def test_a_file_comes_from_the_second_server_if_the_first_is_dead(server, tmp_path):
    name = "train.en.gz"
    checksum = data._MULTI30K_FILES[name]
    sources = {"http://127.0.0.1:9/": checksum, server.as_uri() + "/": checksum}
    path = data.fetch(name, sources, tmp_path / "kept")
    assert path.read_bytes() == (server / name).read_bytes()
    (server / name).unlink()
    assert data.fetch(name, sources, tmp_path / "kept") == path
    with pytest.raises(ConnectionError, match=rf"{name} could not be fetched from http://127"):
        data.fetch(name, sources, tmp_path / "other")


# --- tiny Shakespeare, on a small file -------------------------------------------------------


@pytest.fixture
def play(tmp_path, monkeypatch):
    """A server folder with a short `input.txt`, to which the loader's address points."""
    server = tmp_path / "server"
    server.mkdir()
    file = server / "input.txt"
    file.write_bytes(b"First Citizen:\nSpeak, speak.\n" * 3)
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(data, "_SHAKESPEARE", server.as_uri() + "/")
    monkeypatch.setattr(data, "_SHAKESPEARE_SHA256", checksum)
    return file


def test_shakespeare_splits_at_ninety_percent_and_keeps_the_file(play, tmp_path):
    text = play.read_text(encoding="utf-8")
    kept = tmp_path / "kept"
    train = data.shakespeare("train", kept)
    play.unlink()
    assert train == text[: int(0.9 * len(text))]
    assert train + data.shakespeare("valid", kept) == text


def test_shakespeare_refuses_a_file_that_is_not_the_published_one(play, tmp_path):
    kept = tmp_path / "kept"
    play.write_bytes(play.read_bytes() + b"x")
    with pytest.raises(ConnectionError, match=r"could not be fetched.*invalid hash"):
        data.shakespeare("train", kept)
    assert not list(kept.iterdir())
    (kept / "input.txt").write_bytes(b"something else")
    with pytest.raises(ValueError, match="has another SHA-256 than the published file"):
        data.shakespeare("train", kept)


def test_shakespeare_offline_says_what_was_wanted(play, tmp_path):
    play.unlink()
    with pytest.raises(ConnectionError, match="input.txt could not be fetched from"):
        data.shakespeare("train", tmp_path / "kept")


def test_shakespeare_unknown_split():
    with pytest.raises(ValueError, match=r"split \('test'\)"):
        data.shakespeare("test")


# --- digits -----------------------------------------------------------------------------------


def test_digits_are_scikit_learns_split_in_two():
    from sklearn.datasets import load_digits

    (train, train_labels), (test, test_labels) = digits("train"), digits("test")
    assert (
        train.shape == (1437, 1, 8, 8)
        and test.shape == (360, 1, 8, 8)
        and train.dtype == torch.float32
    )
    assert train_labels.dtype == torch.int64 and test_labels.dtype == torch.int64
    found = sorted(
        (*x.flatten().tolist(), y)
        for x, y in zip(torch.cat([train, test]), [*train_labels, *test_labels])
    )
    data = load_digits()
    wanted = sorted((*(x / 16).tolist(), int(y)) for x, y in zip(data.data, data.target))
    assert found == wanted


def test_digits_are_the_same_for_a_seed_and_others_for_another():
    assert torch.equal(digits("test")[0], digits("test", seed=0)[0])
    assert not torch.equal(digits("test")[0], digits("test", seed=1)[0])


@pytest.mark.parametrize("size", [1, 5, 8, 28, 32])
def test_digits_at_other_sizes(size):
    images, labels = digits("test", size)
    assert images.shape == (360, 1, size, size) and torch.equal(labels, digits("test")[1])
    assert images.min() >= 0 and images.max() <= 1 + 1e-6
    torch.testing.assert_close(
        images.mean((1, 2, 3)), digits("test")[0].mean((1, 2, 3)), rtol=0, atol=0.1
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("dev",), r"split \('dev'\) must be 'train' or 'test'"),
        (("train", 0), r"size \(0\) must be an integer of at least 1"),
        (("train", 8.5), r"size \(8.5\) must be an integer of at least 1"),
    ],
)
def test_digits_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        digits(*arguments)


# --- scenes -----------------------------------------------------------------------------------


@given(
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(0, 2**40),
    st.sampled_from(["kind", "color"]),
)
@settings(max_examples=40, deadline=None)
def test_scenes_are_images_with_balanced_labels(count, size, seed, task):
    images, labels = scenes(count, size, seed=seed, task=task)
    assert images.shape == (count, 3, size, size) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    assert labels.dtype == torch.int64 and labels.sum() == (count + 1) // 2


def test_labels_say_what_the_scenes_show():
    found = describe_scenes(500, seed=1)
    for task in ("kind", "color"):
        labels = scenes(500, 8, seed=1, task=task)[1].bool()
        first, second = found[task].reshape(500, 2, -1).unbind(1)
        assert torch.equal((first == second).all(-1), labels)
    apart = (found["color"][:, 0] - found["color"][:, 1]).norm(dim=-1)
    assert ((apart == 0) | (apart >= 0.4)).all()
    assert ((found["center"][:, 0] - found["center"][:, 1]).norm(dim=-1) > 0.46).all()
    radius = found["radius"][..., None]
    assert (found["center"] - radius >= 0).all() and (found["center"] + radius <= 1).all()


def test_a_single_shape_says_nothing_about_the_answer():
    n = 40_000
    found = describe_scenes(n, seed=2)
    same_kind = found["kind"][:, 0] == found["kind"][:, 1]
    same_color = (found["color"][:, 0] == found["color"][:, 1]).all(-1)
    error = 4 * (0.25 / (n / 4)) ** 0.5  # four standard deviations
    for answer in (same_kind, same_color):
        for i in range(2):
            for kind in range(4):
                assert abs(answer[found["kind"][:, i] == kind].float().mean() - 0.5) < error
            left = found["center"][:, i, 0] < 0.5
            bright = found["color"][:, i].sum(-1) > found["color"][:, i].sum(-1).median()
            big = found["radius"][:, i] > 0.095
            for feature in (left, bright, big):
                assert abs(answer[feature].float().mean() - 0.5) < error
    assert abs((same_kind == same_color).float().mean() - 0.5) < error


def test_the_same_seed_gives_the_same_scenes_at_every_size_and_for_both_questions():
    large, small = scenes(50, 128, seed=3)[0], scenes(50, 32, seed=3)[0]
    # at corners the covered part is a rough estimate
    difference = (F.avg_pool2d(large, 4) - small).abs()
    assert (
        difference.mean() < 1e-3
        and difference.max() < 0.3
        and (difference > 0.1).float().mean() < 2e-3
    )
    assert torch.equal(scenes(50, 32, seed=3, task="color")[0], small)
    assert not torch.equal(scenes(50, 32, seed=4)[0], small)


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_the_drawn_area_is_the_shapes(kind):
    """Covered pixels add up to the shape's area, counted on a grid 20 times finer
    without any smoothing."""
    scene = describe_scenes(1, seed=5)
    scene["kind"][:] = kind
    scene["radius"][:] = 0.1
    scene["color"][:], scene["background"][:] = 1, 0
    grid = (torch.arange(2000) + 0.5) / 1000 - 1
    # [-1, 1]² has area 4
    inside = (list(KINDS.values())[kind](grid[None, :], grid[:, None]) < 0).double().mean() * 4
    for size in (48, 100):
        area = draw_scenes(scene, size)[0, 0].double().sum() / size**2
        assert abs(area / (2 * 0.1**2 * inside) - 1) < 0.04


def test_drawing_in_parts_gives_the_same():
    scene = describe_scenes(300, seed=6)
    rows = {key: x[100:200] for key, x in scene.items()}
    assert torch.equal(draw_scenes(scene, 96)[100:200], draw_scenes(rows, 96))


def test_scenes_of_no_size_are_refused():
    with pytest.raises(ValueError, match=r"size \(0\)"):
        draw_scenes(describe_scenes(1), 0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(count=0), r"count \(0\) must be an integer of at least 1"),
        (dict(count=2.0), r"count \(2.0\) must be an integer of at least 1"),
        (dict(count=2, size=0), r"size \(0\) must be an integer of at least 1"),
        (dict(count=2, task="same"), r"task \('same'\) must be 'kind' or 'color'"),
    ],
)
def test_scenes_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenes(**arguments)


# --- CIFAR, on small files of the same form ---------------------------------------------------


@pytest.fixture(params=["cifar10", "cifar100"])
def photographs(request, tmp_path, monkeypatch):
    """An archive like the published one, 2 images a file; torchvision's table has its
    checksums, no address works."""
    from torchvision import datasets

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[request.param]
    key = "labels" if request.param == "cifar10" else "fine_labels"
    generator, sums, images = np.random.default_rng(0), {}, {}
    archive = tmp_path / "kept" / kind.filename
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        for name in [
            *(name for name, _ in kind.train_list + kind.test_list),
            kind.meta["filename"],
        ]:
            images[name] = generator.integers(0, 256, (2, 3072), dtype=np.uint8)
            content = {
                "data": images[name],
                key: [len(images), 7],
                kind.meta["key"]: ["a", "b"],
            }
            raw = pickle.dumps(content)
            sums[name] = hashlib.md5(raw).hexdigest()
            info = tarfile.TarInfo(f"{kind.base_folder}/{name}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    monkeypatch.setattr(kind, "train_list", [[name, sums[name]] for name, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [[name, sums[name]] for name, _ in kind.test_list])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": sums[kind.meta["filename"]]})
    monkeypatch.setattr(kind, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(kind, "url", "http://127.0.0.1:9/nothing.tar.gz")
    return request.param, kind, archive, images


def test_cifar_reads_a_local_archive(photographs):
    name, kind, archive, images = photographs
    for split, files in ("train", kind.train_list), ("test", kind.test_list):
        pixels, labels = cifar(name, split, archive.parent)
        wanted = np.concatenate([images[file] for file, _ in files]).reshape(-1, 3, 32, 32)
        assert (
            pixels.dtype == torch.float32
            and pixels.is_contiguous()
            and labels.dtype == torch.int64
        )
        assert torch.equal(pixels, torch.from_numpy(wanted).float() / 255)
        assert labels.tolist() == [
            y for file, _ in files for y in (list(images).index(file) + 1, 7)
        ]


def test_cifar_refuses_a_changed_file(photographs):
    name, kind, archive, _ = photographs
    cifar(name, "test", archive.parent)
    changed = archive.parent / kind.base_folder / kind.test_list[0][0]
    changed.write_bytes(changed.read_bytes() + b"x")
    archive.write_bytes(archive.read_bytes()[:100])
    with pytest.raises(
        ConnectionError, match=rf"{kind.filename} could not be fetched from http://127.0.0.1:9/"
    ):
        cifar(name, "test", archive.parent)


def test_cifar_offline_says_what_was_wanted(photographs, tmp_path):
    name, kind, _, _ = photographs
    with pytest.raises(
        ConnectionError,
        match=rf"Put it, with MD5 {kind.tgz_md5}, at .*elsewhere.{kind.filename}",
    ):
        cifar(name, "train", tmp_path / "elsewhere")


def test_cifar_refuses(monkeypatch):
    with pytest.raises(ValueError, match=r"name \('cifar'\)"):
        cifar("cifar")
    with pytest.raises(ValueError, match=r"split \('valid'\)"):
        cifar("cifar10", "valid")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match=r"torchvision is missing: pip install"):
        cifar("cifar10", "test")


def test_standardize():
    reference = torch.rand(50, 3, 4, 4) * torch.tensor([1.0, 2.0, 3.0])[:, None, None] + 5
    images = standardize(reference, reference)
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(images.std((0, 2, 3)), torch.ones(3))
    torch.testing.assert_close(standardize(reference[:5], reference), images[:5])
    assert torch.isfinite(standardize(torch.ones(2, 1, 3, 3), torch.ones(2, 1, 3, 3))).all()


def test_small_images_are_standardized_by_the_training_images():
    (x, y), (unseen, answers) = small_images("digits", 12)
    assert (
        x.shape == (1437, 1, 12, 12)
        and unseen.shape == (360, 1, 12, 12)
        and len(y) == 1437
        and len(answers) == 360
    )
    assert x.mean().abs() < 1e-5 and abs(x.std() - 1) < 1e-4
    torch.testing.assert_close(
        unseen, standardize(digits("test", 12)[0], digits("train", 12)[0])
    )
    with pytest.raises(ValueError, match=r"name \('letters'\)"):
        small_images("letters")


def test_number_words_of_iterators_and_fractions():
    assert data.number_words((n for n in range(3)), "en") == ["zero", "one", "two"]
    with pytest.raises(ValueError, match=r"numbers \(2.7\)"):
        data.number_words([2.7], "en")
    with pytest.raises(ValueError, match=r"count \(-5\)"):
        data.draw_numbers(-5, 10)


@pytest.mark.parametrize(
    "package, call",
    [
        ("num2words", lambda: number_words([1], "en")),
        ("tokenizers", lambda: train_bpe(["one"], 50)),
        ("sklearn", lambda: digits("test")),
    ],
)
def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch, package, call):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=rf'{package}\S* is missing: pip install "attnlib\[data\]"'
    ):
        call()


@pytest.mark.parametrize("texts", ["one two", []])
def test_texts_are_a_sequence(texts):
    with pytest.raises(ValueError, match=r"texts \(.*\)"):
        data.encode(data.train_bpe(["one two"], 50), texts)
