"""Data: unusual strings, drawings pixel by pixel, boxes of masks, images of any size."""

import math

import numpy as np
import pytest
import torch
from draws import DTYPES, batches, drawn, layouts, normal, seeds
from draws import tolerance as rounding
from hypothesis import assume, example
from hypothesis import strategies as st
from number_names import RULES
from sklearn.datasets import load_digits
from torchvision.ops import box_convert, masks_to_boxes

from attnlib import data
from attnlib.data import (
    _BOOK_PARTS,
    _CAPTION_COLORS,
    BOS,
    CAPTION_WORDS,
    EOS,
    KINDS,
    LANGUAGES,
    PAD,
    UNK,
    book_text,
    box_targets,
    caption_scenes,
    collages,
    context_scenes,
    decode,
    decode_captions,
    describe_scenes,
    detection_scenes,
    digits,
    draw_numbers,
    draw_scenes,
    encode,
    number_words,
    scenes,
    small_images,
    standardize,
    train_bpe,
    train_tokenizer,
)

torch.set_num_threads(1)
ALPHABET = "abcdef </s>pudnk" + "éß漢🤖\u0301\u00a0\u2028\n\t"
strings = st.one_of(
    st.text(ALPHABET, max_size=12),
    st.sampled_from(
        ("", " ", "  ", "</s>", "<pad>", "<s> <unk>", "<2de>", "a</s>b", "<pad", "\n")
    ),
)
TOKENIZER = train_bpe(
    [ALPHABET * 3, "deaf cab </s> <pad> <2de> u2"], 80, extra=["<2de>", "<2en>"]
)
BYTES = train_tokenizer(["the cat and the dog", "漢字 🤖"], 280)


# --- numbers ----------------------------------------------------------------------------------


@drawn(st.lists(st.integers(0, 10**9 - 1), max_size=4), st.sampled_from(LANGUAGES))
def test_names_follow_the_rules(numbers, language):
    wanted = [RULES[language](number) for number in numbers]
    assert number_words(numbers, language) == wanted
    assert number_words(torch.tensor(numbers, dtype=torch.int64), language) == wanted
    assert number_words(iter(numbers), language) == wanted


@drawn(
    st.sampled_from((5, 0, 1, 2.5, -1)),
    st.one_of(st.integers(-3, 10**10), st.sampled_from([10**k for k in range(11)])),
    st.lists(st.integers(0, 9), unique=True),
    seeds,
)
def test_numbers_that_are_drawn(count, limit, exclude, seed):
    allowed = limit in [10**k for k in range(1, 10)] and count in (5, 0, 1)
    if not allowed or limit == 10 and len(exclude) == 10:
        with pytest.raises(ValueError, match="limit|count"):
            draw_numbers(count, limit, seed=seed, exclude=exclude)
        return
    found = draw_numbers(count, limit, seed=seed, exclude=exclude)
    assert len(found) == count and not set(found) & set(exclude)
    assert all(type(number) is int and 0 <= number < limit for number in found)
    assert found == draw_numbers(count, limit, seed=seed, exclude=iter(exclude))


# --- texts ------------------------------------------------------------------------------------


@drawn(st.lists(strings, min_size=1, max_size=4), st.booleans())
@example(["one </s> two", "</s>", "<pad>", ""], True)
def test_texts_come_back(texts, tagged):
    """A first space is lost: the tokenizer puts one before each text."""
    prefix = ["<2en>"] * len(texts) if tagged else None
    tokens = encode(TOKENIZER, texts, prefix=prefix)
    assert tokens.dtype == torch.int64 and (tokens[:, 0] == BOS).all()
    for text, row in zip(texts, tokens.tolist()):
        assert row.count(EOS) == 1 and row.count(BOS) == 1
        inner, rest = row[1 : row.index(EOS)], row[row.index(EOS) + 1 :]
        assert PAD not in inner and set(rest) <= {PAD}
        if tagged:
            assert inner.pop(0) == TOKENIZER.token_to_id("<2en>")
        pieces = "".join(TOKENIZER.id_to_token(token) for token in inner)
        if UNK not in inner:
            assert pieces.replace("▁", " ").removeprefix(" ") == text.removeprefix(" ")
        assert TOKENIZER.token_to_id("<2de>") not in inner
    assert (tokens[:, -1] != PAD).any()  # as long as the longest
    assert not TOKENIZER.encode_special_tokens  # as it was
    if not (tokens == UNK).any():
        wanted = [text.removeprefix(" ") for text in texts]
        assert decode(TOKENIZER, tokens) == wanted == decode(TOKENIZER, tokens[:, 1:])


@drawn(
    st.lists(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=6), max_size=3)
)
def test_tokens_are_read_up_to_their_end(rows):
    longest = max(map(len, rows), default=0)
    rows = [row + [PAD] * (longest - len(row)) for row in rows]
    tokens = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), longest)
    wanted = []
    for row in rows:
        row = row[: row.index(EOS)] if EOS in row else row
        pieces = [TOKENIZER.id_to_token(i) for i in row if i > 5]
        wanted.append("".join(pieces).replace("▁", " ").removeprefix(" "))
    assert decode(TOKENIZER, tokens) == wanted


@drawn(st.one_of(strings, st.text(max_size=12)))
@example("\x00\r\n\t\u2028")
def test_bytes_come_back(text):
    assume("<|endoftext|>" not in text)
    ids = BYTES.encode(text).ids
    assert BYTES.decode(ids) == text
    assert b"".join(map(bytes_of, map(BYTES.id_to_token, ids))) == text.encode()
    end = BYTES.encode(text + "<|endoftext|>" + text).ids
    assert end == [*ids, BYTES.get_vocab_size() - 1, *ids]


def bytes_of(piece):
    """GPT-2's printable characters as the bytes that they stand for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printable]
    table = {chr(i): i for i in printable}
    table |= {chr(256 + n): i for n, i in enumerate(others)}
    return bytes(table[letter] for letter in piece)


@drawn(st.sampled_from((None, *_BOOK_PARTS, "dev")))
def test_the_book_in_parts(split):
    if split == "dev":
        with pytest.raises(ValueError, match=r"split \('dev'\)"):
            book_text(split)
        return
    whole, part = book_text(), book_text(split)
    cuts = {None: (0, 100), "train": (0, 90), "valid": (90, 95), "test": (95, 100)}
    start, end = (percent * len(whole) // 100 for percent in cuts[split])
    assert part == whole[start:end]


@drawn(
    st.lists(st.lists(st.sampled_from(CAPTION_WORDS[4:]), max_size=4), min_size=1, max_size=3)
)
def test_captions_come_back(captions):
    longest = max(map(len, captions))
    numbers = [[CAPTION_WORDS.index(word) for word in caption] for caption in captions]
    rows = [[BOS, *row, EOS] + [PAD] * (longest - len(row)) for row in numbers]
    tokens = torch.tensor(rows)
    wanted = [" ".join(caption) for caption in captions]
    assert decode_captions(tokens) == wanted == decode_captions(tokens[:, 1:])


# --- images -----------------------------------------------------------------------------------


@drawn(st.sampled_from(("train", "test")), st.integers(1, 20), seeds)
def test_digits_are_interpolated(split, size, seed):
    """By a triangle as wide as the larger of the two pixels."""
    images, labels = digits(split, size, seed=seed)
    found, scale = load_digits(), 8 / size
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(seed))
    rows = order[360:] if split == "train" else order[:360]
    distance = (torch.arange(8) + 0.5) - (torch.arange(size)[:, None] + 0.5) * scale
    weights = (1 - distance.double().abs() / max(1, scale)).clamp(min=0)
    weights = weights / weights.sum(1, keepdim=True)  # (size, 8)
    wanted = weights @ torch.tensor(found.images)[rows] @ weights.T / 16
    torch.testing.assert_close(images[:, 0].double(), wanted, rtol=0, atol=1e-5)
    assert labels.tolist() == found.target[rows].tolist()


@st.composite
def drawings(draw):
    """Scenes of any number of shapes, which may lie outside or be missing (kind -1)."""
    n, count, seed = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(seeds)
    generator = torch.Generator().manual_seed(seed)
    return dict(
        kind=torch.randint(-1, 4, (n, count), generator=generator),
        center=1.6 * torch.rand(n, count, 2, generator=generator) - 0.3,
        radius=0.01 + 0.4 * torch.rand(n, count, generator=generator),
        color=torch.rand(n, count, 3, generator=generator),
        background=torch.rand(n, 2, 3, generator=generator),
    )


def distance_to(kind, x, y):
    """How far outside a shape of radius 1 a point is, less than 0 inside."""
    if kind == "disc":
        return math.hypot(x, y) - 1
    if kind == "square":
        return max(abs(x), abs(y)) - 0.85
    if kind == "triangle":
        return max(y - 0.65, 0.87 * abs(x) - 0.5 * y - 0.5)
    return max(min(abs(x), abs(y)) - 0.32, max(abs(x), abs(y)) - 1)


@drawn(drawings(), st.integers(1, 7))
def test_scenes_are_drawn_pixel_by_pixel(scene, size):
    found = draw_scenes(scene, size)
    parts = {key: x.double().numpy() for key, x in scene.items()}
    for n in range(len(found)):
        for i in range(size):
            for j in range(size):
                x, y = (j + 0.5) / size, (i + 0.5) / size
                top, bottom = parts["background"][n]
                color = top + (bottom - top) * y
                for k, kind in enumerate(scene["kind"][n].tolist()):
                    if kind >= 0:
                        (cx, cy), radius = parts["center"][n, k], parts["radius"][n, k]
                        away = distance_to(
                            list(KINDS)[kind], (x - cx) / radius, (y - cy) / radius
                        )
                        covered = min(max(0.5 - away * radius * size, 0), 1)
                        color = color + covered * (parts["color"][n, k] - color)
                np.testing.assert_allclose(found[n, :, i, j].numpy(), color, rtol=0, atol=1e-4)


@drawn(st.integers(1, 9), st.integers(1, 12), seeds, st.sampled_from(("kind", "color")))
def test_labels_and_images_are_those_of_descriptions(count, size, seed, task):
    scene = describe_scenes(count, seed=seed)
    images, labels = scenes(count, size, seed=seed, task=task)
    assert torch.equal(images, draw_scenes(scene, size))
    for i in range(count):
        first, second = scene[task][i].tolist()
        assert labels[i] == (first == second)
    assert labels.sum() == (count + 1) // 2


def check_boxes(box, mask):
    """Boxes (n, 4) hold the True pixels of masks (n, H, W); they are 0 where there is none."""
    full = mask.flatten(1).any(1)
    wanted = torch.zeros(len(mask), 4)
    wanted[full] = masks_to_boxes(mask[full]) + torch.tensor([0.0, 0, 1, 1])  # ends inclusive
    assert torch.equal(box, wanted)


@drawn(
    st.integers(1, 4),
    st.sampled_from(("train", "test")),
    st.integers(1, 40),
    st.sampled_from(("shapes", "digits")),
    st.integers(1, 5),
    st.sampled_from((1, 2)),
    seeds,
)
def test_boxes_of_objects(count, split, size, kinds, objects, photographs, seed):
    options = dict(kinds=kinds, objects=objects, photographs=photographs, seed=seed)
    found = detection_scenes(count, split, size, **options)
    check_boxes(found["box"].flatten(0, 1), found["mask"].flatten(0, 1))
    there = found["mask"].flatten(2).any(2)
    assert torch.equal(found["kind"] >= 0, there)
    assert found["kind"].max() < (4 if kinds == "shapes" else 10)
    assert (found["mask"].sum(1) <= 1).all()  # none hides another
    assert found["stuff"].max() < photographs
    assert 0 <= found["image"].min() and found["image"].max() <= 1
    for targets, kind, box in zip(
        box_targets(found["kind"], found["box"], size), found["kind"], found["box"]
    ):
        wanted = box_convert(box[kind >= 0] / size, "xyxy", "cxcywh")
        torch.testing.assert_close(targets["boxes"], wanted)
        assert torch.equal(targets["labels"], kind[kind >= 0])


@drawn(
    st.integers(0, 3),
    st.integers(0, 4),
    st.sampled_from(DTYPES),
    layouts,
    st.integers(1, 99),
    seeds,
)
def test_targets_of_any_boxes(batch, objects, dtype, layout, size, seed):
    kind = normal((batch, objects), seed=seed).round().long().clamp(min=-1)
    low = normal((batch, objects, 2), seed=seed + 1).abs() * size / 4
    box = torch.cat([low, low + normal((batch, objects, 2), seed=seed + 2).abs()], -1).to(dtype)
    box = box.expand(box.shape) if layout == "expanded" else box
    found = box_targets(kind, box, size)
    assert len(found) == batch
    for targets, k, b in zip(found, kind, box):
        wanted = box_convert(b[k >= 0].double() / size, "xyxy", "cxcywh")
        assert targets["boxes"].dtype == dtype and torch.equal(targets["labels"], k[k >= 0])
        torch.testing.assert_close(
            targets["boxes"].double(), wanted, rtol=0, atol=rounding(dtype, 4)
        )


@drawn(st.integers(1, 3), st.sampled_from(("train", "test")), st.integers(1, 40), seeds)
def test_digits_of_collages_are_in_their_boxes(count, split, size, seed):
    found = collages(count, split, size, seed=seed)
    for i in range(count):
        mask, shown = found["mask"][i], torch.zeros(size, size, dtype=torch.bool)
        for kind, box in zip(found["kind"][i].tolist(), found["box"][i].int().tolist()):
            x0, y0, x1, y1 = box
            part = mask[y0:y1, x0:x1] == kind + 1
            shown[y0:y1, x0:x1] = True
            if kind < 0:
                assert box == [0, 0, 0, 0]
            elif x1 > x0:  # ink touches all four sides
                assert (
                    part[0].any() and part[-1].any() and part[:, 0].any() and part[:, -1].any()
                )
        assert not mask[~shown].any()
        first = found["kind"][i, 0]
        assert found["label"][i] >= 0  # also of a digit without a pixel
        assert first in (-1, found["label"][i])
    assert 0 <= found["image"].min() and found["image"].max() <= 1


@drawn(
    st.integers(1, 4),
    st.sampled_from(("train", "test", "novel", "context")),
    st.integers(1, 24),
    seeds,
)
def test_boxes_and_words_of_captions(count, split, size, seed):
    if split == "context":
        found = context_scenes(count, 0.5, size, seed=seed)
    else:
        found = caption_scenes(count, split, size, seed=seed)
    check_boxes(found["box"].flatten(0, 1), found["mask"].flatten(0, 1))
    for i, caption in enumerate(decode_captions(found["caption"])):
        said = [word for word in caption.split() if word in _CAPTION_COLORS]
        assert said == [list(_CAPTION_COLORS)[c] for c in found["color"][i].tolist()]
        assert ("two" in caption) == (2 in found["number"][i])
        numbers = [CAPTION_WORDS.index(word) for word in caption.split()]
        tokens = [BOS, *numbers, EOS]
        assert found["caption"][i].tolist() == tokens + [PAD] * (10 - len(tokens))
    if split == "context":
        place = torch.arange(count), found["subject"]
        assert (found["kind"][place] == 0).all()
        red = [list(_CAPTION_COLORS)[c] == "red" for c in found["color"][place].tolist()]
        assert red == found["red"].tolist()
        white = found["kind"][torch.arange(count), 1 - found["subject"]]
        square = [list(KINDS)[k] == "square" for k in white.tolist()]
        assert found["agrees"].tolist() == [a == b for a, b in zip(red, square)]


@drawn(
    batches,
    st.integers(1, 4),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(0, 3),
    st.sampled_from(DTYPES),
    layouts,
    seeds,
)
@example(1, 3, (1, 1), 1, torch.float32, "contiguous", 0)
def test_standardized_images(batch, channels, shape, others, dtype, layout, seed):
    images = normal((batch, channels, *shape), dtype, seed, layout)
    reference = normal((others, channels, *shape), dtype, seed + 1, layout)
    if others * shape[0] * shape[1] < 2:
        with pytest.raises(ValueError, match=r"reference of shape \(.*\)"):
            standardize(images, reference)
        return
    wide = reference.double().transpose(0, 1).flatten(1).numpy()
    mean, deviation = wide.mean(1), np.maximum(wide.std(1, ddof=1), 1e-6)
    assume(deviation.min() > 0.1)
    found = standardize(images, reference)
    wanted = (images.double() - torch.tensor(mean)[:, None, None]) / torch.tensor(deviation)[
        :, None, None
    ]
    assert found.dtype == dtype
    atol = (
        rounding(dtype, 16)
        * max(1, wanted.abs().max().item() if batch else 0)
        / deviation.min()
    )
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol)


@drawn(st.integers(1, 9))
def test_small_images_are_standardized_digits(size):
    train, test = small_images("digits", size)
    reference = digits("train", size)[0]
    for (x, y), split in ((train, "train"), (test, "test")):
        images, labels = digits(split, size)
        wanted = (images - reference.mean()) / reference.std()
        torch.testing.assert_close(x, wanted, rtol=0, atol=1e-4)
        assert torch.equal(y, labels)


ORACLES = {
    "number_words": test_names_follow_the_rules,
    "draw_numbers": test_numbers_that_are_drawn,
    "train_bpe": test_texts_come_back,
    "encode": test_texts_come_back,
    "decode": test_tokens_are_read_up_to_their_end,
    "book_text": test_the_book_in_parts,
    "train_tokenizer": test_bytes_come_back,
    "digits": test_digits_are_interpolated,
    "describe_scenes": test_labels_and_images_are_those_of_descriptions,
    "draw_scenes": test_scenes_are_drawn_pixel_by_pixel,
    "scenes": test_labels_and_images_are_those_of_descriptions,
    "collages": test_digits_of_collages_are_in_their_boxes,
    "detection_scenes": test_boxes_of_objects,
    "box_targets": test_targets_of_any_boxes,
    "decode_captions": test_captions_come_back,
    "caption_scenes": test_boxes_and_words_of_captions,
    "context_scenes": test_boxes_and_words_of_captions,
    "standardize": test_standardized_images,
    "small_images": test_small_images_are_standardized_digits,
}
NOT_HERE = {
    "ImageFolder": "photographs in folders: tests/test_way_in.py",
    "image_folder": "photographs in folders: tests/test_way_in.py",
    "LANGUAGES": "a table, which the tests above use",
    "PAD": "a number, which the tests above use",
    "BOS": "a number, which the tests above use",
    "EOS": "a number, which the tests above use",
    "UNK": "a number, which the tests above use",
    "_BOOK_PARTS": "a table, which the tests above use",
    "KINDS": "a table, which the tests above use",
    "_CAPTION_COLORS": "a table, which the tests above use",
    "_PLURALS": "a table, which tests/test_captions.py uses",
    "CAPTION_WORDS": "a table, which the tests above use",
    "_MULTI30K": "addresses and checksums",
    "_STORY_FILES": "addresses and checksums",
    "fetch": "downloads",
    "multi30k": "downloads; tests/test_data.py reads files that it writes",
    "shakespeare": "downloads; tests/test_data.py reads a file that it writes",
    "cifar": "downloads; tests/test_data.py reads archives that it writes",
}


def test_nothing_is_left_out():
    assert set(data.__all__) == {name for name in ORACLES | NOT_HERE if name[0] != "_"}
