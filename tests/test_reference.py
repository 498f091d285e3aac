"""The reference and the chapters lead to each other; test_browser reads the built pages."""

import json
from pathlib import Path

import chapters

ROOT = Path(__file__).resolve().parent.parent


def notebook(folder, *cells):
    made = [{"cell_type": kind, "source": source} for kind, source in cells]
    folder.joinpath("page.ipynb").write_text(json.dumps({"cells": made}))


def test_a_name_belongs_to_the_section_before_it(tmp_path):
    notebook(
        tmp_path,
        ("markdown", "# Title\n\n> One sentence."),
        ("code", "#| export\ndef first():\n    def inside(): pass"),
        ("markdown", "## Two\n\nText.\n\n:::{exercise} A\n# not a heading\n:::\n\n### Three"),
        ("code", "def of_the_page(): pass"),
        ("code", "#| export\nclass Second:\n    def method(self): pass\n\n\ndef third(): pass"),
        ("markdown", "```python\n# a comment\n```\n\n## Four"),
        ("code", "#| export\ndef _private(): pass\n\n\ndef fourth(): pass"),
    )
    found = chapters.definitions("page", tmp_path)
    assert found == {"first": 0, "Second": 2, "third": 2, "fourth": 3}


def test_every_documented_name_is_defined_in_its_chapter():
    for chapter in chapters.modules():
        names = chapters.public_names(ROOT / "attnlib" / f"{chapter.module}.py")
        assert set(names) <= set(chapters.definitions(chapter.page)), chapter.page


def test_the_first_definition_becomes_a_link():
    def code(word, name, kind="f"):
        start = f'<span class="k">{word}</span><span class="w"> </span>'
        return f'{start}<span class="n{kind}">{name}</span>'

    first, inner, other = code("def", "f"), code("def", "g"), code("class", "A", "c")
    html = f"<pre><span></span>{first}(x):\n    {inner}()\n{other}:"
    assert [found[2] for found in chapters.DEFINED.finditer(html)] == ["f", "A"]


def test_a_name_in_a_docstring_means_one_entry_or_none():
    known = ["attnlib.gpt.GPT", "attnlib.gpt.GPT.generate", "attnlib.decoding.generate"]
    known += ["attnlib.vit.Block", "attnlib.tnt.Block", "attnlib.swin", "attnlib.swin.pad_map"]
    known += ["attnlib.train.fit", "attnlib.tnt.Block.init_values"]
    words = ["GPT", "GPT.generate", "gpt.GPT", "pad_map", "pad_map()", "tnt.Block"]
    found = [chapters.meant(word, known) for word in words]
    assert [name.removeprefix("attnlib.") for name in found] == [
        *("gpt.GPT", "gpt.GPT.generate", "gpt.GPT", "swin.pad_map", "swin.pad_map", "tnt.Block")
    ]
    for word in ("Block", "fit", "generate", "swin", "map", "T", "*.pad_map", "init_values"):
        assert chapters.meant(word, known) is None, word
