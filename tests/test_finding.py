"""Descriptions, the list of statements: what leads a reader to a page."""

import json
import re
import shutil

import chapters
import finding
import speed
from tools import plain


def test_every_chapter_is_described_by_its_own_sentence():
    found = set()
    for chapter in chapters.modules():
        source = (chapters.ROOT / f"{chapter.page}.ipynb").read_text("utf-8")
        metadata = json.loads(finding.described(source))["metadata"]
        text = metadata["og:description"]
        assert 40 <= len(text) <= 300 and not re.search(r"[`${}]", text), chapter.page
        assert metadata["myst"]["html_meta"]["description"] == text
        found.add(text)
    assert len(found) == len(chapters.modules())
    assert finding.words("{doc}`windows <32_swin>` of $M$ `tokens`") == "windows of M tokens"


def test_pictures_say_how_large_they_are(tmp_path):
    (tmp_path / "_images").mkdir()
    (tmp_path / "nbs").mkdir()
    shutil.copy(chapters.ROOT / "book" / "_static" / "page.png", tmp_path / "_images")
    page = '<img alt="a" src="../_images/page.png" /><img src="../_images/other.png" />'
    sized = speed.with_sizes(page, tmp_path / "nbs")
    assert '<img width="1280" height="1010" alt="a" src="../_images/page.png" />' in sized
    assert sized.count("width=") == 1  # nothing is known of the other


def test_the_list_holds_every_statement_with_a_label():
    known = plain.Names().labels
    wanted = {name for name, (called, _) in known.items() if called[0] in "TPLCDRE"}
    wanted -= {name for name in wanted if known[name][0].startswith(("Exercise", "("))}
    listed = {label for _, boxes in finding.statements() for _, label in boxes}
    assert listed == wanted
    assert all(f"`{label}`" in finding.listed() for label in listed)
    assert all(title for _, boxes in finding.statements() for title, _ in boxes)
