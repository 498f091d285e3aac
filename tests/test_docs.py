"""What docstrings say of parameters: each of a public name is described, and none is invented.

A parameter is described by an entry under Parameters or by prose that names it; by the docstring
of another name to which its own refers ("those of `attention`"); `x`, where it comes first, by
a first sentence with its shape; `device` and `dtype`, None by default, as everywhere in PyTorch.
"""

import ast
import re
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parent.parent / "attnlib"
FACTORY = {"device", "dtype"}  # of what is made
REFERENCE = r"(?:those of|[Aa]s (?:of|for|in))\s+`(?:[\w.]+\.)?(\w+)`"
SHAPE = r"\((?:\.\.\.|[A-Z])[^()]*,[^()]*\)"


def parameters(node):
    """{name: default} of a function or class; None where there is no default."""
    init = node
    if isinstance(node, ast.ClassDef):
        fields = {x.target.id: x.value for x in node.body if isinstance(x, ast.AnnAssign)}
        methods = (x for x in node.body if isinstance(x, ast.FunctionDef))
        init = next((x for x in methods if x.name == "__init__"), None)
        if init is None:
            return fields if node.decorator_list or node.bases[:1] == ["NamedTuple"] else {}
    a = init.args
    names = [x.arg for x in (*a.posonlyargs, *a.args)]
    found = dict.fromkeys(names) | dict(zip(names[::-1], a.defaults[::-1]))
    found |= {x.arg: default for x, default in zip(a.kwonlyargs, a.kw_defaults)}
    found |= {x.arg: None for x in (a.vararg, a.kwarg) if x}
    return {name: found[name] for name in found if name not in ("self", "cls")}


def docstring(node):
    """That of a function, or of a class and its `__init__`."""
    inits = [x for x in ast.iter_child_nodes(node) if getattr(x, "name", "") == "__init__"]
    return "\n\n".join(ast.get_docstring(x) or "" for x in [node, *inits])


def entries(text):
    """The names under Parameters, whether a type stands behind them or not."""
    found = re.findall(r"(?s)(?:^|\n)Parameters\n-+\n(.*?)(?=\n\n+[A-Z]\w*\n---|\Z)", text)
    lines = re.findall(r"(?m)^\S.*$", "\n".join(block.split("\n\n")[0] for block in found))
    names = ",".join(line.partition(" : ")[0] for line in lines).split(",")
    return {name.strip().lstrip("*") for name in names if name.strip()}


def described(node, others):
    """The names of parameters that a docstring describes; `others` are {name: node}."""
    text, given = docstring(node), parameters(node)
    found = set(given) & entries(text)
    for name, default in given.items():
        word = rf"`\*{{0,2}}{name}\b" if name == "a" else rf"(?<![\w.]){name}(?!\w)"
        nothing = isinstance(default, ast.Constant) and default.value is None
        if re.search(word, text) or (name in FACTORY and nothing):
            found.add(name)
    if next(iter(given), "") == "x" and re.search(SHAPE, text.split("\n\n")[0]):
        found.add("x")
    for other in re.findall(REFERENCE, text):
        if other in others and others[other] is not node:
            found |= described(others[other], others)
    return found


def missing(code, others):
    """ "name(parameter)" of what the public names of a module's code do not describe."""
    return [
        f"{node.name}({name})"
        for node in ast.parse(code).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"
        for name in parameters(node)
        if name not in described(node, others)
    ]


def invented(code):
    """ "name(parameter)" of what a docstring describes and the signature does not have."""
    return [
        f"{node.name}({name})"
        for node in ast.walk(ast.parse(code))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        for name in sorted(entries(docstring(node)) - set(parameters(node)))
    ]


def modules():
    return {path.stem: path.read_text("utf-8") for path in LIBRARY.glob("[!_]*.py")}


def names():
    """{name: node} of all public names."""
    bodies = (node for code in modules().values() for node in ast.parse(code).body)
    return {x.name: x for x in bodies if isinstance(x, (ast.FunctionDef, ast.ClassDef))}


LEFT = {"inference"}

def test_every_parameter_is_described():
    others = names()
    found = {module: missing(code, others) for module, code in modules().items()}
    for m, f in found.items(): print(m, f)
    assert {module for module, some in found.items() if some} == LEFT


def test_no_docstring_invents_a_parameter():
    found = {module: invented(code) for module, code in modules().items()}
    assert {module: some for module, some in found.items() if some} == {}
