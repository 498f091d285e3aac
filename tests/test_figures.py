"""The list of figures holds every figure of the book."""

import json
import re

import pytest

import chapters
import figures

NOTEBOOKS = [chapter.page for _, some in chapters.parts() for chapter in some]


def test_every_figure_is_found_and_its_anchor_is_its_own():
    for page in NOTEBOOKS:
        text = (chapters.ROOT / f"{page}.ipynb").read_text(encoding="utf-8")
        drawn = sum(
            "image/png" in output.get("data", {})
            for cell in json.loads(text)["cells"]
            for output in cell.get("outputs", ())
        )
        anchors = [place for place, _ in figures.figures(page)]
        assert len(anchors) == drawn + text.count(":::{explorer}"), page
        assert len(set(anchors)) == len(anchors), page


def test_the_list_names_every_figure():
    lines = [line for line in figures.listed().splitlines() if line.startswith("- ")]
    wanted = [
        f"#{figures.label(page, place)})"
        for page in NOTEBOOKS
        for place, _ in figures.figures(page)
    ]
    assert [line.split("](")[1] for line in lines] == wanted
    assert all(re.match(r"- \[.{10,}[^ ]\]\(#", line) for line in lines)


@pytest.mark.parametrize(
    "sentences",
    [
        ["A sentence that is long enough.", "Another."],
        ["Too short. The next one goes along.", "And no more."],
        ["At 4.5 of 10 points (cf. the text) all is well.", "No."],
        ["without an end"],
    ],
)
def test_a_caption_is_cut_behind_a_sentence(sentences):
    assert figures.beginning(" ".join(sentences)) == sentences[0]


def test_signs_of_markdown_in_a_caption_are_letters():
    output = {"data": {"text/html": ['<p class="caption">in_proj [x] &lt; *y*</p>']}}
    assert figures.caption({"outputs": [output]}) == r"in\_proj \[x\] \< \*y\*"
