"""`compare` judges implementations that were written by people who had not seen it.

The folder compare_cases holds correct and wrong implementations in the styles of nanoGPT,
einops, d2l, torch.nn, NumPy, and JAX. Those of development_* were there while the catalogue
was written; those of held_out_* were written afterwards, by authors who had not seen it.
"""

import importlib.util
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn as nn

import attnlib
from attnlib.compare import assert_equal, compare, reference, references
from attnlib.mistakes import CATALOGUE, REFERENCES

CASES = Path(__file__).parent / "compare_cases"
EXPECTED = json.loads((CASES / "expected.json").read_text())
SLOW = 0.6  # seconds; a case that takes longer is not run by `make test`


def load(path):
    """The cases of a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.CASES


def rows():
    for path in sorted(CASES.glob("*.py")):
        for case in load(path):
            case["key"] = f"{path.stem}:{case['name']}"
            wanted = EXPECTED[case["key"]]
            slow = wanted["seconds"] > SLOW and case["style"] != "jax"
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(case, id=case["key"], marks=marks)


@pytest.mark.parametrize("case", rows())
def test_verdicts(case):
    """No correct case is called different, no wrong one equal, and names stay as they are."""
    if case["style"] == "jax":
        pytest.importorskip("jax", reason="the case is written in JAX")
    name, sizes = case["reference"]
    renamed = {"norm_pix": "norm_pix_loss"}
    sizes = {renamed.get(key, key): value for key, value in sizes.items()}
    report = compare(case["build"](), reference(name, **sizes), call=case.get("call"))
    wanted = EXPECTED[case["key"]]
    forbidden = "different" if case["label"] == "correct" else "equal"
    assert not report.verdict.startswith(forbidden), str(report)
    if case["style"] != "jax":
        assert report.verdict == wanted["verdict"], str(report)
        assert sorted(list(one.names) for one in report.findings) == sorted(wanted["named"])


class Attention(nn.Module):
    """Multi-head self-attention whose scale can be wrong."""

    def __init__(self, embed_dim, num_heads, wrong=False):
        super().__init__()
        self.num_heads = num_heads
        self.wrong = wrong
        self.q = nn.Linear(embed_dim, embed_dim)
        self.k = nn.Linear(embed_dim, embed_dim)
        self.v = nn.Linear(embed_dim, embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        B, N, C = x.shape
        heads = (B, N, self.num_heads, C // self.num_heads)
        q = self.q(x).view(heads).transpose(1, 2)
        k = self.k(x).view(heads).transpose(1, 2)
        v = self.v(x).view(heads).transpose(1, 2)
        width = C if self.wrong else C // self.num_heads
        y = (q @ k.transpose(-2, -1) / width**0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(B, N, C))


def multihead():
    return reference("multihead", embed_dim=32, num_heads=4)


def test_the_report_of_a_wrong_scale():
    report = attnlib.compare(Attention(32, 4, wrong=True), multihead())
    assert report.verdict == "different" and report.matched == report.parameters == 8
    assert [one.names for one in report.findings] == [("scaled by the model's width",)]
    assert report.located == "logits" and "width**0.5" in report.line
    assert report.findings[0].error < 1e-13 and report.difference > 0.01
    text = str(report)
    assert "Parameters matched: 8 of 8." in text and "chapter 10" in text
    assert json.dumps(report.to_dict())
    figure = report.figure()
    assert figure.axes
    plt.close(figure)


def test_two_names_for_one_function_are_told_apart():
    """With one head the root of the model's width is that of a head's: nothing is wrong."""
    one_head = reference("multihead", embed_dim=32, num_heads=1)
    assert compare(Attention(32, 1, wrong=True), one_head).verdict == "equal"


def test_assert_equal():
    assert_equal(Attention(32, 4), multihead())
    with pytest.raises(AssertionError, match="embed_dim"):
        assert_equal(Attention(32, 4, wrong=True), multihead())
    turned = nn.MultiheadAttention(32, 4)  # the sequence first
    assert_equal(turned, multihead())
    with pytest.raises(AssertionError, match="convention"):
        assert_equal(turned, multihead(), conventions=False)


def test_a_call_leaves_everything_as_it_was():
    mine = Attention(32, 4).train()
    weights = {name: x.clone() for name, x in mine.state_dict().items()}
    state = torch.get_rng_state()
    compare(mine, multihead())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_default_dtype() == torch.float32 and mine.training
    assert all(torch.equal(x, weights[name]) for name, x in mine.state_dict().items())
    assert all(x.grad is None and x.dtype == torch.float32 for x in mine.parameters())


def test_rename_settles_what_names_do_not_tell():
    class Unhelpful(Attention):
        def __init__(self, embed_dim, num_heads):
            super().__init__(embed_dim, num_heads)
            self.a, self.b, self.c, self.d = self.v, self.q, self.out, self.k
            del self.q, self.k, self.v, self.out

        def forward(self, x):
            self.q, self.k, self.v, self.out = self.b, self.d, self.a, self.c
            y = Attention.forward(self, x)
            del self.q, self.k, self.v, self.out
            return y

    report = compare(Unhelpful(32, 4), multihead())
    assert "rename" in str(report)
    names = {"a": "v", "b": "q", "c": "o", "d": "k"}
    assert compare(Unhelpful(32, 4), multihead(), rename=names).verdict == "equal"
    with pytest.raises(ValueError, match="rename.*'z'"):
        compare(Unhelpful(32, 4), multihead(), rename={"z": "v"})
    with pytest.raises(ValueError, match="rename.*'y'"):
        compare(Unhelpful(32, 4), multihead(), rename={"a": "y"})


def test_models_of_the_library_and_others_are_references():
    ours = attnlib.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5
    )
    timm = pytest.importorskip("timm")
    theirs = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5
    )
    assert compare(theirs, ours).verdict == "equal"
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    other = attnlib.transformer.EncoderLayer(32, 4, 64, dropout=0.0)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    assert compare(other, layer, inputs={"x": x}).verdict == "equal"
    with pytest.raises(ValueError, match="inputs"):
        compare(other, layer)
    with pytest.raises(TypeError, match="reference.*int"):
        compare(other, 3)


class Broken(Attention):
    def forward(self, x):
        raise RuntimeError("not on this machine")


class Printing(Attention):
    def forward(self, x):
        print("x")
        return super().forward(x.mul_(1.0))


def test_answers_in_one_sentence(capsys):
    nan = Attention(32, 4)
    nn.init.constant_(nan.q.weight, torch.nan)
    for mine, words in (
        (Attention(16, 4), "fits"),
        (nn.ReLU(), "fits"),
        (nan, "q.weight"),
        (Broken(32, 4), "not on this machine"),
    ):
        report = compare(mine, multihead())
        assert report.verdict == "not compared" and words in report.reason
        assert len(report.reason.splitlines()) == 1
    report = compare(Printing(32, 4), multihead())
    assert report.verdict == "equal" and "printed" in str(report)
    assert capsys.readouterr().out == ""


def test_names_of_references():
    with pytest.raises(ValueError, match="'atention'"):
        reference("atention")
    with pytest.raises(TypeError, match="heads"):
        reference("multihead", heads=4)
    assert set(references()) == set(REFERENCES) and "multihead" in references()


def test_the_catalogue():
    """At least sixty mistakes, each with a sentence, formulas, and a section that exists."""
    names = [one.name for one in CATALOGUE]
    assert len(names) == len(set(names)) >= 60
    for one in CATALOGUE:
        assert one.says.endswith(".") and one.right != one.wrong
