"""The check of signatures while tests run: what it finds, and where it stays out of the way."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import signatures
import torch

from attnlib.attention import attention_weights, causal_mask, record_attention
from attnlib.vit import Attention

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("beartype")

MODULE = """
from collections.abc import Iterator
from contextlib import contextmanager
from jaxtyping import Float
from torch import Tensor


def square(x: Float[Tensor, "N M"]) -> Float[Tensor, "N N"]:
    return x


def count(x: Tensor, depth: int, rate: float = 0) -> str:
    return f"{depth}"


def plain(x):
    return x


class Layer:
    def forward(self, x: Float[Tensor, "B N"], y: Float[Tensor, "B M"]) -> Tensor:
        return x[:, :1] * y


@contextmanager
def lent(depth: int) -> Iterator[int]:
    yield depth


def refuse(depth: int):
    raise ValueError("depth")


def jit(function):
    return function


@jit
def kernel(depth: int):
    return depth
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module whose functions may return what their signatures do not say."""
    (tmp_path / "wrong_on_purpose.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    finder = signatures.Finder("wrong_on_purpose")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield import_module("wrong_on_purpose")
    del sys.modules["wrong_on_purpose"]


def mismatches(function, *args, **options):
    try:
        function(*args, **options)
    except signatures.Mismatch:
        return True
    return False


def test_a_call_is_held_to_its_signature(module):
    square, long = torch.ones(3, 3), torch.ones(3, 4)
    assert not mismatches(module.square, square) and mismatches(module.square, long)
    assert mismatches(module.square, square[0]) and mismatches(module.square, square.long())
    assert mismatches(module.count, square, 2.0) and not mismatches(module.count, square, 2)
    assert not mismatches(module.plain, "anything")
    forward = module.Layer().forward
    assert not mismatches(forward, square, long) and mismatches(forward, square, long[:2])
    with module.lent(3) as depth:
        assert depth == 3
    assert mismatches(module.lent("3").__enter__)


def test_errors_come_from_the_library_alone(module):
    with pytest.raises(ValueError, match="depth"):
        module.refuse("7")
    pytest.raises(ValueError, module.refuse, "7")
    assert mismatches(module.refuse, "7")  # the check is on again
    with signatures.unchecked():
        assert not mismatches(module.square, torch.ones(3, 4))
    assert module.kernel("7") == "7" and not hasattr(module.kernel, "__wrapped__")


def test_what_a_compiler_reads_is_not_checked(module):
    long = torch.ones(3, 4)
    compiled = torch.compile(module.square, backend="eager", fullgraph=True)
    assert torch.equal(compiled(long), long)
    assert mismatches(module.square, long)


def test_the_library_is_checked():
    q = torch.zeros(2, 4, 3)
    assert mismatches(attention_weights, q, q[0, 0]) and mismatches(causal_mask, "3")
    assert mismatches(Attention(8, 2), torch.zeros(3, 8))
    with record_attention() as maps:
        Attention(8, 2)(torch.zeros(1, 3, 8))
    assert len(maps) == 1


def undefined(*paths):
    """The names that ruff does not know in some code, the axes of shapes aside."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821"]
    done = subprocess.run(
        [*command, "--output-format", "json", *paths], capture_output=True, text=True
    )
    for each in json.loads(done.stdout):
        place = each["location"]
        line = Path(each["filename"]).read_text("utf-8").splitlines()[place["row"] - 1]
        if not line[: place["column"] - 1].endswith('[Tensor, "'):
            yield each["message"]


def test_no_name_is_undefined(tmp_path):
    """Ruff takes an axis such as "B" for a name: its rule F821 is off, and is held here."""
    assert list(undefined(*(ROOT / "attnlib").glob("[!_]*.py"))) == []
    (tmp_path / "control.py").write_text('def f(x: Int[Tensor, "B"]): return nowhere\n')
    assert len(list(undefined(tmp_path / "control.py"))) == 3  # Int, Tensor and nowhere
