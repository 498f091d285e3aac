"""Texts and captions that are not in the library: TinyStories and Flickr8k."""

from pathlib import Path

import torch

from attnlib.data import BOS, CAPTION_WORDS, EOS, PAD, UNK, book_text, fetch

# --- text for language models -----------------------------------------------------------------

_STORIES = (
    "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/"
    "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/"
)
_STORY_FILES = {  # split: name of the file, its sources with their SHA-256
    "train": (
        "TinyStoriesV2-GPT4-train.txt",
        {_STORIES: "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443"},
    ),
    "valid": (
        "TinyStoriesV2-GPT4-valid.txt",
        {_STORIES: "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d"},
    ),
}


def text_corpus(name="book", split="train", folder=None):
    """A text for a language model, by its name.

    Parameters
    ----------
    name : {"book", "tinystories"}
        This book's prose (`book_text`), or stories written by GPT-4 in words of small children
        (Eldan and Li 2023), 2.2 GB, whose ends are marked ``<|endoftext|>``.
    split : {"train", "valid", "test"}
        The stories have no "test".
    folder : path, optional
        Where files are kept; "tinystories" in `torch.hub`'s folder by default.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        If there is no such text or split, or a file is not the published one.
    ConnectionError
        If the file is neither there nor can be fetched.
    """
    if name not in ("book", "tinystories"):
        raise ValueError(f"name ({name!r}) must be 'book' or 'tinystories'")
    if name == "book":
        return book_text(split)
    if split not in _STORY_FILES:
        splits = ", ".join(map(repr, _STORY_FILES))
        raise ValueError(f"split ({split!r}) must be one of {splits}")
    path = fetch(*_STORY_FILES[split], folder or Path(torch.hub.get_dir()) / "tinystories")
    return path.read_text(encoding="utf-8")


# --- captions ---------------------------------------------------------------------------------


def flickr8k(folder, split="train"):
    """Photographs of Flickr8k and their captions, from a folder in the usual layout.

    The folder holds "Flickr8k.token.txt", "Flickr_8k.trainImages.txt" and its likes for "dev"
    and "test", and the photographs in "Flicker8k_Dataset" (the name is spelled so).

    Parameters
    ----------
    folder : path
    split : {"train", "dev", "test"}

    Returns
    -------
    paths : list of Path
    captions : list of list of str
        Those of each photograph: words in lower case, without punctuation before, after, or
        between them. Hyphens and apostrophes within words stay, as in "t-shirt" and "'s".

    Raises
    ------
    ValueError
        If there is no such split, or a photograph has no caption.
    FileNotFoundError
        If a file is missing.
    """
    folder = Path(folder)
    if split not in ("train", "dev", "test"):
        raise ValueError(f"split ({split!r}) must be 'train', 'dev' or 'test'")
    captions_file = folder / "Flickr8k.token.txt"
    names_file = folder / f"Flickr_8k.{split}Images.txt"
    for path in (captions_file, names_file):
        if not path.exists():
            raise FileNotFoundError(
                f"folder ({folder}) must hold {path.name}: the text files "
                "of Flickr8k, and Flicker8k_Dataset with its photographs"
            )
    texts = {}
    for line in captions_file.read_text(encoding="utf-8").split("\n"):
        name, _, text = line.partition("\t")
        words = []
        for word in text.lower().split():
            word = word.strip('.,;:!?"()[]')
            if any(letter.isalnum() for letter in word):
                words.append(word)
        photograph = name.partition("#")[0]
        texts.setdefault(photograph, []).append(" ".join(words))
    names = names_file.read_text(encoding="utf-8").split()
    missing = [name for name in names if name not in texts]
    if missing:
        raise ValueError(
            f"{captions_file.name} must have captions of all photographs in "
            f"{names_file.name}; it has none of {missing[0]}"
        )
    paths = [folder / "Flicker8k_Dataset" / name for name in names]
    captions = [texts[name] for name in names]
    return paths, captions


def encode_captions(captions, words=CAPTION_WORDS):
    """Token numbers of captions, each between start and end, padded to one length.

    Parameters
    ----------
    captions : sequence of str
        Words with spaces between them.
    words : sequence of str
        The vocabulary, which begins with "<pad>", "<s>", "</s>", "<unk>".

    Returns
    -------
    int64 Tensor

    Raises
    ------
    ValueError
        If there are no captions, or one is empty or has an unknown word. The special tokens are
        no words of a caption.
    """
    if isinstance(captions, str) or len(captions) == 0:
        raise ValueError(
            f"captions ({captions!r}) must be a sequence of str, at least one; "
            "a single caption goes into a list"
        )
    numbers = {word: i for i, word in enumerate(words) if i > UNK}
    rows = []
    for caption in captions:
        unknown = [word for word in caption.split() if word not in numbers]
        if unknown or not caption.split():
            what = f"the unknown word {unknown[0]!r}" if unknown else "no word"
            raise ValueError(
                f"captions ({caption!r}) has {what}; a caption must have one or "
                f"more of the {len(words) - 4} words"
            )
        tokens = [numbers[word] for word in caption.split()]
        rows.append(torch.tensor([BOS, *tokens, EOS]))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
