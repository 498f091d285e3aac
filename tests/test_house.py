"""The rules of the house: what CONTRIBUTING.md asks of code, held over notebooks and library.

A rule is a function of a place's name and its code that returns complaints. Each has a control:
a seeded violation that it must find, beside code that it must let pass.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import nbformat
import pytest
import torch
import torch.nn as nn

from tools import notebooks

ROOT = Path(__file__).resolve().parent.parent
CELL, FUNCTION, COLUMNS = 150, 80, 96  # lines of code of each, columns of a line
OPTIONAL = {  # packages of the extras, which a function may import
    *("accelerate", "huggingface_hub", "IPython", "matplotlib", "num2words", "onnx"),
    *("onnxruntime", "PIL", "pycocotools", "sacrebleu", "safetensors", "scipy"),
    *("sentencepiece", "sklearn", "timm", "tokenizers", "torchvision", "tqdm"),
    *("transformers", "triton"),
}
TORCH = {"torch", "nn", "F", "dist", "tl", "triton"}  # names under which they are imported
ALLOWED = {  # private names of PyTorch that a notebook may use, and why
    "50_cost": {"_python_dispatch": "PyTorch's notes import TorchDispatchMode from there"},
}
LATE = {  # modules of the library that a function may import, and why
    "inference": {"windows": "without a GPU its import would have Triton interpreted"},
    "cli": {"train": "it needs an extra, and most commands do not need it"},
}


def private_attributes():
    """The private names on what PyTorch's functions take and return."""
    weight = nn.Parameter(torch.ones(1))
    some = (
        *(weight, weight.untyped_storage(), weight.device, weight.grad_fn, nn.Linear(1, 1)),
        *(torch.optim.SGD([weight]), torch.ops.aten.add.Tensor, torch.ops.aten.add),
    )
    return {name for one in some for name in dir(one) if is_private(name)} | {"_version"}


# --- reading ----------------------------------------------------------------------------------


def code_lines(code):
    """The numbers of the lines that hold code: no comments, docstrings, blank lines."""
    free = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type not in (*free, tokenize.ENDMARKER):
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                found -= set(range(node.lineno, node.end_lineno + 1))
    return found


def dotted(node):
    """["torch", "_C", "x"] for torch._C.x; empty for what is no chain of names."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and [*before, node.attr]
    return []


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def imports(tree):
    """(node, module, names) of every import; a relative one is from attnlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            inside = "attnlib." * (node.level > 0)
            module = f"{inside}{node.module or ''}".rstrip(".")
            yield node, module, [alias.name for alias in node.names]


def neighbours(tree):
    """The modules of the library that some code imports."""
    for node, module, names in imports(tree):
        if module == "attnlib":
            yield from ((node, name, []) for name in names if name in NUMBERS)
        elif module.startswith("attnlib."):
            yield node, module.split(".")[1], names


# --- the rules --------------------------------------------------------------------------------


def long_cells(where, code):
    """A cell, and so a class, has at most 150 lines of code."""
    count = len(code_lines(code))
    return [f"{where}: {count} lines of code, more than {CELL}"] if count > CELL else []


def long_functions(where, code):
    """A function of the library has at most 80 lines of code; a kernel for a GPU, a cell."""
    found, lines = [], code_lines(code)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any(dotted(x)[-1:] == ["jit"] for x in node.decorator_list):
                continue
            count = len(lines & set(range(node.lineno, node.end_lineno + 1)))
            if count > FUNCTION:
                found.append(f"{where}: {node.name} has {count} lines of code, over {FUNCTION}")
    return found


def wide_lines(where, code):
    """A line has at most 96 columns."""
    lines = enumerate(code.splitlines(), 1)
    return [f"{where}:{i}: {len(x)} columns" for i, x in lines if len(x) > COLUMNS]


def cut_classes(where, code):
    """A class stands whole: no private base, no patched method, no docstring from afar."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ClassDef):
            bases = [dotted(base)[-1] for base in node.bases if dotted(base)]
            found += [f"{node.name} is built on {base}" for base in bases if is_private(base)]
        for decorator in getattr(node, "decorator_list", ()):
            name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if name and name[-1] in ("patch", "patch_to"):
                found.append(f"{node.name} is patched into a class")
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            names = [dotted(target)[-1:] for target in targets]
            found += ["__doc__ is assigned"] * (["__doc__"] in names)
    return [f"{where}: {what}" for what in found]


def private_names(where, code):
    """No private or undocumented name of PyTorch, whether imported, named or asked for."""
    tree, found = ast.parse(code), []
    stored = (node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", 0), ast.Store))
    own = {dotted(node)[-1] for node in stored if dotted(node)}
    own |= {getattr(node, "name", "") for node in ast.walk(tree)}
    foreign = private_attributes() - own
    for _, module, names in imports(tree):
        parts = [*module.split("."), *names]
        if parts[0] in ("torch", "triton"):
            found += [part for part in parts if is_private(part) or part == "mkldnn"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = dotted(node)
            of_torch = chain[:1] and chain[0] in TORCH and is_private(node.attr)
            if of_torch or node.attr in foreign or chain == ["torch", "ops", "mkldnn"]:
                found.append(node.attr)
        elif isinstance(node, ast.Call) and dotted(node.func) in (["getattr"], ["hasattr"]):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            found += [name] * (name in foreign or (is_private(name) and name[1:2].isupper()))
    allowed = ALLOWED.get(where, {})
    return [f"{where}: {name} is private" for name in sorted(set(found) - set(allowed))]


def borrowed_names(where, code):
    """No private name of another module of the library."""
    tree = ast.parse(code)
    return [
        f"{where}: {name} is private in attnlib.{module}"
        for _, module, names in neighbours(tree)
        for name in names
        if is_private(name)
    ]


def late_imports(where, code):
    """A function imports nothing but packages that may be missing."""
    found = []
    for function in ast.walk(ast.parse(code)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            some = {module for _, module, _ in imports(function)}
            some -= {f"attnlib.{name}" for name in LATE.get(where, ())}
            late = sorted(module for module in some if module.split(".")[0] not in OPTIONAL)
            found += [f"{where}: {function.name} imports {module or '.'}" for module in late]
    return found


def path_edits(where, code):
    """Nobody edits sys.path: the packages of the repository are found from its root."""
    chains = (dotted(node) for node in ast.walk(ast.parse(code)))
    return [f"{where}: sys.path"] * (["sys", "path"] in chains)


def borrowed_tests(where, code):
    """No test imports another: what they share is in tests/helpers.py and conftest.py."""
    found = (module for _, module, _ in imports(ast.parse(code)))
    return [f"{where}: imports {module}" for module in found if module.startswith("test_")]


# --- the graph of imports ---------------------------------------------------------------------

# 1x and the tools 9x are the ground, 2x and 3x stand on it, 4x, 5x and the runs on all of them
FLOORS = {"1": 0, "9": 0, "2": 1, "3": 1, "4": 2, "5": 2}
NUMBERS = {path.stem[3:]: path.stem[:2] for path in notebooks.notebooks()}


def floor(module):
    above = ("recipes", "cli", "compare", "mistakes", "mistakes_vision")
    return 2 if module in above else FLOORS[NUMBERS[module][0]]


def wrong_ways(graph):
    """Imports from a lower floor into a higher one, and circles, in {module: its imports}."""
    found = [
        f"{module} imports {other}, which stands above it"
        for module, others in graph.items()
        for other in others
        if floor(other) > floor(module)
    ]
    left = {module: set(others) & set(graph) for module, others in graph.items()}
    while free := [module for module, others in left.items() if not others]:
        left = {name: others - set(free) for name, others in left.items() if name not in free}
    return found + [f"a circle of imports: {', '.join(sorted(left))}"] * bool(left)


# --- what they are held over ------------------------------------------------------------------


def cells(exported=False):
    """("notebook:cell", code) of the code cells, or of those alone that make the library."""
    found = []
    for path in notebooks.notebooks():
        for cell in nbformat.read(path, 4).cells:
            directives = re.findall(r"(?m)^#\|\s*(\w+)", cell.source)
            if cell.cell_type == "code" and ("export" in directives or not exported):
                code = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", notebooks.code_of(cell))
                found.append((f"{path.stem}:{cell.id}", code))
    return found


def chapters():
    """(notebook, code) of all cells of each notebook."""
    found = {}
    for where, code in cells():
        found.setdefault(where.split(":")[0], []).append(code)
    return [(where, "\n".join(codes)) for where, codes in found.items()]


def library():
    """(module, code) of the library's modules."""
    paths = [ROOT / "attnlib" / f"{name}.py" for name in NUMBERS]
    return [(path.stem, path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def repository():
    """(path, code) of tests, tools, benchmarks and what makes the pages."""
    for folder in ("tests", "tools", "benchmarks", "book/_ext", "book/_static"):
        for path in sorted((ROOT / folder).glob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def held(rule, places):
    return [complaint for where, code in places for complaint in rule(where, code)]


@pytest.mark.parametrize("rule", [long_cells, wide_lines, cut_classes, path_edits])
def test_every_cell_keeps(rule):
    assert held(rule, cells()) == []


def test_every_function_of_the_library_is_short():
    assert held(long_functions, cells(exported=True)) == []


@pytest.mark.parametrize("rule", [borrowed_names, late_imports])
def test_every_module_keeps(rule):
    assert held(rule, library()) == []


def test_no_private_name_outside_of_inference():
    places = [place for place in chapters() if place[0] != "53_inference"]
    assert held(private_names, places) == []


def test_inference_says_which_private_names_it_uses():
    """Each stands in a row of a table of the chapter, and each row is used."""
    path = ROOT / "nbs" / "53_inference.ipynb"
    prose = "\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type != "code")
    code = dict(chapters())["53_inference"]
    used = re.findall(r"(?:_onednn|torch\.ops\.mkldnn)\.(_\w+)", code)
    assert sorted(set(used)) == sorted(re.findall(r"(?m)^\| `(_\w+)` \|", prose)) != []
    found = {line.split()[1] for line in private_names("53_inference", code)}
    assert "mkldnn" in found and found <= {"mkldnn", *used}


def test_an_exception_is_used():
    """A list of exceptions does not outlive what it excuses."""
    codes = dict(chapters())
    for where, names in ALLOWED.items():
        assert all(name in codes[where] for name in names), where
    for where, names in LATE.items():
        code = dict(library())[where]
        assert {name for _, name, _ in neighbours(ast.parse(code))} >= set(names), where
        assert late_imports(where, code) == [] != late_imports("another", code)


def test_imports_go_one_way():
    graph = {
        module: {name for _, name, _ in neighbours(ast.parse(code))} - {module, "_renamed"}
        for module, code in library()
    }
    assert wrong_ways(graph) == []


@pytest.mark.parametrize("rule", [path_edits, borrowed_tests])
def test_every_file_of_the_repository_keeps(rule):
    assert held(rule, repository()) == []


# --- the rules find what they forbid, and let pass what they allow ----------------------------

SEEDED = [
    (
        long_cells,
        "x = 1\n" * (CELL + 1),
        '"""A docstring.\n' + "\n" * 50 + '"""\n# x\n' + "x = 1\n" * 80,
    ),
    (
        long_functions,
        "def f():\n" + "    x = 1\n" * FUNCTION,
        "def f():\n" + "    # a comment\n" * FUNCTION + "    x = 1\n" * (FUNCTION - 1),
    ),
    (wide_lines, "x" * 97, "x" * 96),
    (cut_classes, "class A(_B): pass", "class A(nn.Module): pass\nclass _B(A): pass"),
    (cut_classes, "class A(swin._B): pass", "class A(swin.B): pass"),
    (cut_classes, "@patch\ndef f(self: A): pass", "@property\ndef patches(self): pass"),
    (cut_classes, "@patch_to(A)\ndef f(self): pass", "@no_grad()\ndef f(self): pass"),
    (cut_classes, "A.f.__doc__ = 'x'", "doc = A.f.__doc__"),
    (private_names, "torch._C._set_x(1)", "torch.set_x(1)"),
    (private_names, "import torch._dynamo", "import torch.compiler"),
    (
        private_names,
        "from torch.nn.modules.module import _has_hook",
        "import _thread",
    ),
    (private_names, "torch.ops.mkldnn.f(x)", "torch.ops.attnlib.f(x)"),
    (private_names, "F._in_projection(q)", "F.linear(q, weight)"),
    (private_names, "x = parameter._version", "self._x = 1\nmodel._x"),
    (private_names, "x = self._forward_hooks", "def _f(self): pass\nself._f()"),
    (private_names, "getattr(torch, '_C')", "getattr(torch, 'compile')"),
    (private_names, "getattr(x, '_version')", "layout._replace(shift=(0, 0))"),
    (borrowed_names, "from .vit import Block, _check", "from .vit import Block"),
    (borrowed_names, "from attnlib.swin import _SIZES", "from attnlib.swin import SIZES"),
    (late_imports, "def f():\n    from .vit import Block", "from .vit import Block"),
    (late_imports, "def f():\n    import math", "def f():\n    import timm.layers"),
    (path_edits, "sys.path.insert(0, 'x')", "os.path.join('x')"),
    (borrowed_tests, "from test_vit import images", "from helpers import images"),
]


@pytest.mark.parametrize("rule, bad, good", SEEDED)
def test_a_rule_finds_what_it_forbids(rule, bad, good):
    assert rule("x", bad) != [] and rule("x", good) == []


def test_exceptions_belong_to_their_place():
    code = "from torch.utils._python_dispatch import TorchDispatchMode"
    assert private_names("50_cost", code) == [] and len(private_names("32_swin", code)) == 1


def test_the_graph_of_imports_shows_what_is_wrong():
    assert (
        wrong_ways({"vit": {"attention", "models"}, "attention": set(), "models": set()}) == []
    )
    assert wrong_ways({"recipes": {"vit"}, "cost": {"vit", "recipes"}, "vit": set()}) == []
    assert wrong_ways({"swin": {"windows"}, "windows": set()}) == [
        "swin imports windows, which stands above it"
    ]
    assert wrong_ways({"models": {"vit"}, "vit": set()})[0].startswith("models imports vit")
    assert wrong_ways({"vit": {"swin"}, "swin": {"tnt"}, "tnt": {"vit"}, "deit": {"vit"}}) == [
        "a circle of imports: deit, swin, tnt, vit"
    ]
