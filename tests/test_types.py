"""The types that checkers see: made from signatures and docstrings, and held to both."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import stubs

ROOT = Path(__file__).resolve().parent.parent


def test_the_stubs_are_those_of_the_modules():
    texts = stubs.stubs()
    assert set(stubs.LIBRARY.glob("*.pyi")) == set(texts), "run `python -m tools.stubs`"
    old = [path.name for path, text in texts.items() if path.read_text("utf-8") != text]
    assert old == [], "run `python -m tools.stubs`"


def checked(folder, *modules):
    """What mypy says to the stubs of a folder, beside the modules themselves."""
    command = [sys.executable, "-m", "mypy.stubtest", *modules, "--concise"]
    config = ["--mypy-config-file", str(ROOT / "pyproject.toml")]
    return subprocess.run([*command, *config], cwd=folder, capture_output=True, text=True)


def test_stubs_and_modules_agree():
    """mypy, strict, finds every public name in the stubs with the signature it has."""
    done = checked(ROOT, "attnlib")
    assert done.returncode == 0, done.stdout + done.stderr


def mypy(cache, *files):
    """The errors of mypy, strict, a line each."""
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml"]
    done = subprocess.run(
        [*command, "--cache-dir", cache, *files], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if ": error: " in line]


def test_the_stubs_pass_a_strict_checker(tmp_path):
    assert mypy(tmp_path, *stubs.LIBRARY.glob("*.pyi")) == []


def test_a_changed_signature_is_noticed(tmp_path):
    """Control: another name of a parameter, another default, and a function that is missing."""
    shutil.copytree(ROOT / "attnlib", tmp_path / "attnlib")
    path = tmp_path / "attnlib" / "models.pyi"
    text = path.read_text("utf-8").replace("in_chans: int = ...", "channels: int = ...")
    text = text.replace("pattern: str = ...", "pattern: int = ...")
    path.write_text(text.replace("def hub_extra", "def hub"), "utf-8")
    done = checked(tmp_path, "attnlib.models")
    assert done.returncode == 1
    for name in ("create_model", "list_models", "hub_extra"):
        assert f"attnlib.models.{name} " in done.stdout


PROGRAM = """
import torch
from attnlib import create_model, list_models
from attnlib.models import classify, read_weights
from attnlib.vit import VisionTransformer

model: torch.nn.Module = create_model("vit_tiny_patch16_224", img_size=(224, 224))
best: list[tuple[str, float]] = classify(model, "picture.jpg")
weights: dict[str, torch.Tensor] = read_weights("weights.safetensors")
width: int = VisionTransformer(depth=2).embed_dim
"""
WRONG = """
create_model(7)
create_model("vit_tiny_patch16_224", img_size="224")
classify(model)
VisionTransformer(depth="2")
read_weights("weights.safetensors").ready
"""


def test_a_program_that_uses_the_library_is_checked(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + WRONG)
    errors = mypy(tmp_path / "cache", tmp_path / "program.py")
    first = PROGRAM.count("\n") + 2
    lines = [int(error.split("program.py:")[1].split(":")[0]) for error in errors]
    assert lines == list(range(first, first + 5)), errors


def test_most_types_are_known():
    """Of the parameters that docstrings describe, nine in ten have a type other than Any."""
    known = described = 0
    classes = {name: name for name in stubs.HOMES}
    for path in stubs.LIBRARY.glob("[!_]*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found = stubs.documented(ast.get_docstring(node) or "", classes)
                described += len(found)
                known += sum(kind != "Any" for kind in found.values())
    assert known > 0.9 * described > 500, f"{known} of {described}"


def parameters(text):
    """(function, parameter, type) of a stub, `self` and `cls` aside."""
    tree = ast.parse(text)
    for holder in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        for function in holder.body:
            if isinstance(function, ast.FunctionDef):
                a = function.args
                for each in (*a.posonlyargs, *a.args, *a.kwonlyargs):
                    if each.annotation:
                        yield function.name, each.arg, ast.unparse(each.annotation)


def test_few_parameters_are_of_any_type():
    found = [x for text in stubs.stubs().values() for x in parameters(text)]
    unknown = [f"{function}({name})" for function, name, kind in found if kind == "Any"]
    share = len(unknown) / len(found)
    assert len(found) > 2000 and share <= 0.1, f"{share:.1%} are Any: {unknown}"


def test_a_name_tells_a_type_unless_docstring_or_default_say_another():
    code = """
def f(x, tokens, device=None, seed="one", window_size=7):
    '''Look.

    Parameters
    ----------
    tokens : int
    '''
def g(tokens, other, window_size=None): ...  # `tokens` are Tensors elsewhere
"""
    tree = ast.parse(code)
    house = stubs.house_names(tree, {})
    kinds = [stubs.function_stub(node, {}, house)[0] for node in tree.body]
    size = "window_size: int | tuple[int, int]"
    assert kinds == [
        "def f(x: torch.Tensor, tokens: int, device: torch.device | str | None = ..., "
        f"seed: str = ..., {size} = ...) -> None: ...",
        f"def g(tokens: Any, other: Any, {size} | None = ...) -> None: ...",
    ]


@pytest.mark.parametrize(
    "words, kind",
    [
        ("int", "int"),
        ("int or (int, int), optional", "int | tuple[int, int] | None"),
        (
            'bool Tensor, broadcastable to (..., N, M), or "causal", optional',
            'torch.Tensor | Literal["causal"] | None',
        ),
        ("list of dict of str to Tensor", "list[dict[str, torch.Tensor]]"),
        ("path, str or dict", "str | os.PathLike[str] | str | dict[Any, Any]"),
        ('{"train", "test"}, optional', "Literal['train', 'test'] | None"),
        ('{"vit", "swin", ...}', "Any"),
        ("Module from images (B, C, H, W) to logits", "torch.nn.Module"),
        ("attnlib.backbone.Backbone", "Backbone"),
        ("nn.Linear", "torch.nn.Linear"),
        ("torch.optim.Optimizer", "torch.optim.Optimizer"),
        ("dict of str to set of int", "dict[str, set[int]]"),
        ("something else", "Any"),
    ],
)
def test_words_become_types(words, kind):
    assert stubs.union(words, {"Backbone": "Backbone"}) == kind
