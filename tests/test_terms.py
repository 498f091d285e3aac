"""The first use of a word of the glossary is a link, in running text."""

import pytest
from docutils import nodes
from docutils.utils import new_document

import terms

KNOWN = terms.entries()


def linked(*texts, known=KNOWN):
    """What becomes a link in paragraphs, with the entry that it leads to."""
    document = new_document("page")
    document += [nodes.paragraph("", "", nodes.Text(text)) for text in texts]
    terms.link(document, known, lambda entry: f"#{entry}")
    assert document.astext() == "\n\n".join(texts)
    return [(a.astext(), a["refuri"][1:]) for a in document.findall(nodes.reference)]


def test_entries_know_their_words_meanings_and_chapters():
    assert KNOWN["pre-norm"].entry == "post-norm, pre-norm, res-post-norm"
    assert KNOWN["patch"].meaning == "A square of pixels that becomes one token."
    assert KNOWN["additive attention"].pages == ("nbs/10_attention", "nbs/20_seq2seq")
    assert all(term.meaning and "{" not in term.meaning for term in KNOWN.values())
    for term in KNOWN.values():
        assert all((terms.ROOT / f"{page}.ipynb").exists() for page in term.pages)


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("A patch, two patches.", [("patch", "patch")]),
        ("Patches and rooflines.", [("Patches", "patch"), ("rooflines", "roofline")]),
        ("the class tokens first", [("class tokens", "class token")]),
        ("Multi-head attention.", [("Multi-head attention", "multi-head attention")]),
        ("pre-norm or post-norm", [("pre-norm", KNOWN["pre-norm"].entry)]),
        ("patchwork, patch-wise, a non-token", []),
        ("with Patch R-CNN", []),
        ("a mask and a bias", []),
        ("Attention Is All You Need", []),
    ],
)
def test_words_are_whole_and_the_longest_wins(text, wanted):
    assert linked(text) == wanted


def test_a_word_is_linked_once_and_a_page_has_few_links():
    assert linked("a patch", "one more patch, a roofline") == [
        ("patch", "patch"),
        ("roofline", "roofline"),
    ]
    many = {
        f"word{letter}": terms.Term(letter, "", ()) for letter in "abcdefghijklmnopqrstuvwxyz"
    }
    assert len(linked(" ".join(many), known=many)) == terms.MOST


def test_only_running_text_has_links():
    document = new_document("page")
    for around in (nodes.literal, nodes.math, nodes.reference, nodes.emphasis):
        document += nodes.paragraph("", "", around("", "", nodes.Text("a patch")))
    document += nodes.section("", nodes.title("", "A backbone"))
    box = nodes.container("", nodes.paragraph("", "a roofline"), classes=["chapter-box"])
    output = nodes.container("", nodes.paragraph("", "a softmax"), nb_element="cell_code")
    document += [box, output]
    assert terms.link(document, KNOWN, str) == ["patch"]
    assert [type(a.parent) for a in document.findall(nodes.reference)][-1] == nodes.emphasis
