"""Every table of the README is made by a command, and is as it would make it now."""

from pathlib import Path

import pytest

from tools import readme

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_are_those_that_are_made():
    assert readme.updated(TEXT) == TEXT, "run `python -m tools.readme`"


def test_no_table_is_written_by_hand():
    assert readme.unmade(TEXT) == []
    # control: one that is
    assert readme.unmade(TEXT + "\n| a | b |\n|---|---|\n") == ["| a | b |", "|---|---|"]


def test_commands_and_models_are_all_there():
    for name in ("book", "new", "test", "gpu"):
        assert f"| `make {name}` |" in readme.commands()
    assert "| `swin.SwinTransformer` |" in TEXT


@pytest.mark.parametrize(
    "names, text",
    [
        (["vit_tiny_patch16_224", "vit_large_patch16_224"], "75.5–85.9"),
        (["autoformer_tiny"], "74.7"),
        (["detr_resnet50"], ""),  # which has another measure
    ],
)
def test_an_accuracy_is_a_span(names, text):
    assert readme.accuracy(names) == text
