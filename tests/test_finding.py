"""Descriptions, cards, the list of statements: what leads a reader to a page."""

import re

import chapters
import finding
from tools import plain


def test_every_chapter_is_described_by_its_own_sentence():
    found = finding.described()
    for chapter in chapters.modules():
        text = found[chapter.page]
        assert 40 <= len(text) <= 300 and not re.search(r"[`${}]", text), chapter.page
    assert len(set(found.values())) == len(found)
    assert finding.words("{doc}`windows <32_swin>` of $M$ `tokens`") == "windows of M tokens"


def test_a_card_is_escaped_and_whole():
    card = finding.tags('A "title"', "x < y", "https://a/b.html", "https://a/p.png", "A curve")
    assert "&quot;title&quot;" in card and "x &lt; y" in card
    for name in ("og:title", "og:description", "og:url", "og:image", "og:image:alt"):
        assert f'"{name}"' in card


BODY = """<img alt="Lines" src="../_images/lines.svg" /><img alt="&lt;A&gt; matrix" class="wide"
 src="../_images/page.png" style="width: 100%;" />"""


def test_the_first_picture_stands_on_the_card():
    assert finding.first_picture(BODY) == ("_images/page.png", "<A> matrix")
    assert finding.first_picture("<p>No picture.</p>") == finding.COVER


def test_pictures_say_how_large_they_are():
    page = finding.ROOT / "book" / "_static" / "page.png"
    sized = finding.with_sizes(BODY, {"page.png": page, "other.png": page})
    assert 'src="../_images/page.png" width="1280" height="1010"' in sized
    assert sized.count("width=") == 1  # nothing is known of the other


def test_the_list_holds_every_statement_with_a_label():
    known = plain.Names().labels
    wanted = {name for name, (called, _) in known.items() if called[0] in "TPLCDRE"}
    wanted -= {name for name in wanted if known[name][0].startswith(("Exercise", "("))}
    listed = {label for _, boxes in finding.statements() for _, label in boxes}
    assert listed == wanted
    assert all(f"`{label}`" in finding.listed() for label in listed)
    assert all(title for _, boxes in finding.statements() for title, _ in boxes)
