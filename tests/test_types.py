"""What checkers and editors learn from the library's signatures: mypy and pyright agree."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import attnlib
from attnlib.backbone import Backbone
from attnlib.models import MODELS, NoClassifier

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = (Path(__file__).parent / "user_script.py").read_text("utf-8")
README = "\n".join(
    re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"))
)
WRONG = """
create_model(7)
create_model("vit_tiny_patch16_224", img_size="224")
create_model("mae_photographs").reset_classifier(3)
model.reset_classifier("5")
model.data_config.append(3)
fit(model, loss_fn, 3, steps=2)
attention(q, k, v, mask="no")
padding_mask([6, 3])
MultiHeadAttention("16", 4)
GPT(GPTConfig(vocab_size="11"))
gpt.generate("text", 3)
from attnlib.models import no_such_name
"""


def mypy(folder):
    """(name, line) of the errors that mypy, strict, finds in programs, and all that it says."""
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml"]
    options = ["--cache-dir", folder / "cache", *sorted(folder.glob("*.py"))]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"(?m)^.*?(\w+\.py):(\d+): error: .*$", done.stdout)
    assert bool(found) == bool(done.returncode), done.stdout
    return sorted({(name, int(line)) for name, line in found}), done.stdout


def pyright(folder):
    """The same, as pyright finds them; it needs no network."""
    config = {"include": ["*.py"], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--project", folder]
    options = ["--pythonpath", sys.executable]
    environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(list(folder.glob("*.py")))
    errors = [x for x in found["generalDiagnostics"] if x["severity"] == "error"]
    places = {(Path(x["file"]).name, x["range"]["start"]["line"] + 1) for x in errors}
    return sorted(places), done.stdout


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_programs_that_use_the_library_are_checked(checker, tmp_path):
    """Those of the README and of a user pass, and each wrong line behind them is found."""
    assert "create_model" in README and "attention_maps" in README
    (tmp_path / "readme.py").write_text(README, "utf-8")
    (tmp_path / "right.py").write_text(SCRIPT, "utf-8")
    (tmp_path / "wrong.py").write_text(SCRIPT + WRONG, "utf-8")
    first = SCRIPT.count("\n") + 2
    found, said = checker(tmp_path)
    wanted = [("wrong.py", line) for line in range(first, first + len(WRONG.split("\n")) - 2)]
    assert found == wanted, said


def test_the_program_runs(tmp_path):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_the_models_that_are_no_classifiers_are_named():
    """`create_model` is said to return a `Backbone` for all other names, and does."""
    assert (ROOT / "attnlib" / "py.typed").exists() and attnlib.__file__.startswith(str(ROOT))
    others = [
        name
        for name, (made_by, _, _) in MODELS.items()
        if not (isinstance(made_by, type) and issubclass(made_by, Backbone))
    ]
    assert sorted(get_args(NoClassifier)) == sorted(others)


# --- every signature --------------------------------------------------------------------------


def signatures(tree):
    """(name, function) of the public functions and methods of a module, `__init__` included."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    holders = [("", tree), *((f"{node.name}.", node) for node in classes if not by_torch(node))]
    for owner, holder in holders:
        for node in holder.body:
            if isinstance(node, ast.FunctionDef):
                kernel = any("jit" in ast.unparse(x) for x in node.decorator_list)
                if (node.name[0] != "_" or node.name == "__init__") and not kernel:
                    yield owner + node.name, node


def by_torch(node):
    """Whether autograd calls a class's methods, with what it likes."""
    return any("autograd.Function" in ast.unparse(base) for base in node.bases)


def untyped(code):
    """The parameters and results without a type: "function(name)", "function ->"."""
    for name, node in signatures(ast.parse(code)):
        a = node.args
        given = [*a.posonlyargs, *a.args, *a.kwonlyargs]
        yield from (
            f"{name}({x.arg})"
            for x in given
            if x.annotation is None and x.arg not in ("self", "cls", "ctx")
        )
        if node.returns is None and node.name != "__init__":
            yield f"{name} ->"


def test_signatures_say_types():
    """Nearly all: some functions take or return anything, or one of many things."""
    paths = (ROOT / "attnlib").glob("[!_]*.py")
    codes = {path.stem: path.read_text("utf-8") for path in paths}
    number = sum(len(list(signatures(ast.parse(code)))) for code in codes.values())
    found = [f"{module}.{x}" for module, code in codes.items() for x in untyped(code)]
    assert number > 500 and len(found) < 0.03 * number, found
    # control
    code = "def f(x, y: int): pass\nclass A:\n    def __init__(self, z): pass"
    assert list(untyped(code)) == ["f(x)", "f ->", "A.__init__(z)"]
