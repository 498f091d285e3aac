"""Texts and captions of the benchmarks: what is read, and what is refused."""

import pytest

from attnlib.data import BOS, EOS, PAD, book_text, decode_captions
from benchmarks.corpora import encode_captions, flickr8k, text_corpus


def test_corpora(tmp_path):
    assert text_corpus("book", "valid") == book_text("valid")
    with pytest.raises(ValueError, match="name"):
        text_corpus("war and peace")
    with pytest.raises(ValueError, match="split"):
        text_corpus("tinystories", "test")
    (tmp_path / "TinyStoriesV2-GPT4-valid.txt").write_text("not the published file")
    with pytest.raises(ValueError, match="SHA-256"):
        text_corpus("tinystories", "valid", tmp_path)


def test_words_and_numbers():
    captions = ["a red square left of a blue disc", "a white cross above a green triangle"]
    tokens = encode_captions(captions)
    assert tokens.shape == (2, 10) and tokens[1].tolist()[-2:] == [EOS, PAD]
    assert tokens[0, 0] == BOS and decode_captions(tokens) == captions
    assert decode_captions(tokens[:, 1:]) == captions


@pytest.mark.parametrize(
    "caption, message",
    [
        ("a red dog", r"captions \('a red dog'\) has the unknown word 'dog'"),
        ("", r"captions \(''\) has no word; a caption must have one"),
        ("  ", "has no word"),
    ],
)
def test_words_refuse(caption, message):
    with pytest.raises(ValueError, match=message):
        encode_captions(["a red disc above a blue disc", caption])


def test_flickr_is_read_from_its_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="must hold Flickr8k.token.txt"):
        flickr8k(tmp_path)
    lines = [
        f"{name}.jpg#{i}\tA {name} runs , fast ." for name in ("dog", "cat") for i in (0, 1)
    ]
    (tmp_path / "Flickr8k.token.txt").write_text("\n".join(lines))
    (tmp_path / "Flickr_8k.testImages.txt").write_text("cat.jpg\n")
    paths, captions = flickr8k(tmp_path, "test")
    assert paths == [tmp_path / "Flicker8k_Dataset" / "cat.jpg"]
    assert captions == [["a cat runs fast"] * 2]
    line = (
        "cat.jpg#0\tA T-shirt , and the man 's black-and-white dog; (it does n't \" sit \") - ."
    )
    (tmp_path / "Flickr8k.token.txt").write_text(line)
    _, captions = flickr8k(tmp_path, "test")
    assert captions == [["a t-shirt and the man 's black-and-white dog it does n't sit"]]
    with pytest.raises(ValueError, match=r"split \('valid'\)"):
        flickr8k(tmp_path, "valid")
    line = "cat.jpg#0\tone\u2028two\x85three\x1cfour"  # one line, of four words
    (tmp_path / "Flickr8k.token.txt").write_text(line, encoding="utf-8")
    assert flickr8k(tmp_path, "test")[1] == [["one two three four"]]
    (tmp_path / "Flickr_8k.testImages.txt").write_text("dog.jpg\n")
    with pytest.raises(ValueError, match=r"it has none of dog\.jpg"):
        flickr8k(tmp_path, "test")
