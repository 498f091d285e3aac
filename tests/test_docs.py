"""What docstrings say of parameters: each of a public name is described, and none is invented.

A parameter is described by an entry under Parameters or by prose that names it; by the
docstring of another name to which its own refers ("those of `attention`"); `x`, where it comes
first, by a first sentence with its shape; `device` and `dtype`, None by default, by PyTorch.
"""

import ast
import re
from pathlib import Path
from textwrap import indent

import pytest

import attnlib

LIBRARY = Path(__file__).resolve().parent.parent / "attnlib"
FACTORY = {"device", "dtype"}  # of what is made
REFERENCE = r"(?:those of|[Aa]s (?:of|for|in))\s+`(?:[\w.]+\.)?(\w+)`"
SHAPE = r"\((?:\.\.\.|[A-Z])[^()]*,[^()]*\)"


def parameters(node):
    """{name: default} of a function or class; None where there is no default."""
    if isinstance(node, ast.ClassDef):
        methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
        init = next((x for x in methods if x.name == "__init__"), None)
        if init is None:  # a dataclass, or what is made like its base
            fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
            return {x.target.id: x.value for x in fields if node.decorator_list}
        found = parameters(init)
        del found[init.args.args[0].arg]
        return found
    a = node.args
    names = [x.arg for x in (*a.posonlyargs, *a.args)]
    found = dict.fromkeys(names) | dict(zip(names[::-1], a.defaults[::-1]))
    found |= {x.arg: default for x, default in zip(a.kwonlyargs, a.kw_defaults)}
    return found | {x.arg: None for x in (a.vararg, a.kwarg) if x}


def docstring(node):
    """That of a function, or of a class and its `__init__`."""
    inits = [x for x in ast.iter_child_nodes(node) if getattr(x, "name", "") == "__init__"]
    return "\n\n".join(ast.get_docstring(x) or "" for x in [node, *inits])


def entries(text):
    """The names under Parameters, whether a type stands behind them or not."""
    blocks = re.findall(r"(?s)(?:^|\n)Parameters\n-+\n(.*?)(?=\n\n|\Z)", text)
    lines = re.findall(r"(?m)^\S.*$", "\n".join(blocks))
    names = ",".join(line.partition(" : ")[0] for line in lines).split(",")
    return {name.strip().lstrip("*") for name in names if name.strip()}


def described(node, others):
    """The names of parameters that a docstring describes; `others` are {name: node}."""
    text, given = docstring(node), parameters(node)
    found = set(given) & entries(text)
    for name, default in given.items():
        word = rf"`\*{{0,2}}{name}\b" if name == "a" else rf"(?<![\w.]){name}\b"  # an article
        nothing = isinstance(default, ast.Constant) and default.value is None
        if re.search(word, text) or (name in FACTORY and nothing):
            found.add(name)
    if next(iter(given), "") == "x" and re.search(SHAPE, text.split("\n\n")[0]):
        found.add("x")
    for other in re.findall(REFERENCE, text):
        if others.get(other, node) is not node:
            found |= described(others[other], others)
    return found


def public(code):
    """The public functions and classes of a module, a function with `overload`s once."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = [x for x in ast.parse(code).body if isinstance(x, kinds) and x.name[0] != "_"]
    return [x for x in found if "overload" not in map(ast.unparse, x.decorator_list)]


def missing(code, others):
    """ "name(parameter)" of what the public names of a module's code do not describe."""
    return [
        f"{node.name}({name})"
        for node in public(code)
        for name in parameters(node)
        if name not in described(node, others)
    ]


def invented(code):
    """ "name(parameter)" of what a docstring, also of a method, describes and nothing has."""
    return [
        f"{node.name}({name})"
        for node in ast.walk(ast.parse(code))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        for name in sorted(entries(docstring(node)) - set(parameters(node)))
    ]


def silent(code):
    """The public functions, classes and methods without a docstring."""
    found = {node.name: node for node in public(code)}
    for name, node in list(found.items()):
        if isinstance(node, ast.ClassDef):
            methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
            found |= {f"{name}.{x.name}": x for x in methods if x.name[0] != "_"}
    return [name for name, node in found.items() if not ast.get_docstring(node)]


def modules():
    return {path.stem: path.read_text("utf-8") for path in LIBRARY.glob("[!_]*.py")}


def known_in(module, codes):
    """{name: node} of what a name means in a module: its own, what it imports, the package's.

    Several modules have a `Block`, and both `attention` and `compare` have a `reference`.
    """
    nodes = {name: {x.name: x for x in public(code)} for name, code in codes.items()}
    found = {name: node for some in nodes.values() for name, node in some.items()}
    for name in found:
        home = getattr(getattr(attnlib, name, None), "__module__", "").rpartition(".")[2]
        found[name] = nodes.get(home, {}).get(name, found[name])
    for node in ast.parse(codes[module]).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            source = nodes.get(node.module, {})
            names = {x.asname or x.name: x.name for x in node.names if x.name in source}
            found |= {name: source[original] for name, original in names.items()}
    return found | nodes[module]


def test_every_parameter_is_described():
    codes = modules()
    found = {name: missing(code, known_in(name, codes)) for name, code in codes.items()}
    assert {m: some for m, some in found.items() if some} == {}


def test_a_name_means_what_it_means_in_its_module():
    """Whatever the order of the modules: imported, of the package, or its own."""
    code = "def reference(depth):\n    '''Of a `depth`.'''\n"
    user = "from .{} import reference\ndef f(depth):\n    '''As of `reference`.'''\n"
    nothing = "def reference(width):\n    '''Nothing.'''\n"
    for names in (("a", "b"), ("b", "a")):
        codes = {name: {"a": code, "b": nothing}[name] for name in names}
        for source, wanted in (("a", []), ("b", ["f(depth)"])):
            codes["user"] = user.format(source)
            assert missing(codes["user"], known_in("user", codes)) == wanted
    found = known_in("cost", modules())["reference"]  # cost imports neither
    assert set(parameters(found)) == {"name", "config"}  # attnlib.reference


def test_every_public_name_has_a_docstring():
    found = {m: silent(code) for m, code in modules().items()}
    assert {module: some for module, some in found.items() if some} == {}


def test_no_docstring_invents_a_parameter():
    found = {module: invented(code) for module, code in modules().items()}
    assert {module: some for module, some in found.items() if some} == {}


SECTION = "Do.\n\nParameters\n----------\n{}\n\nReturns\n-------\nresult : int"
OTHER = "def other(depth, width):\n    '''Do with a `depth` and a `width`.'''\n"


@pytest.mark.parametrize(
    "signature, text, wanted",
    [
        ("depth, width", SECTION.format("depth, width : int"), []),
        ("depth, *width", SECTION.format("depth : int\n    How deep.\n*width\n    More."), []),
        ("depth, width", SECTION.format("depth : int\n    How deep."), ["f(width)"]),
        ("depth, width", "Dig down to a depth.", ["f(width)"]),
        ("depth", "Dig down to n depths.", ["f(depth)"]),
        ("a, b", "Join a to `b`.", ["f(a)"]),
        ("a, b", "Join `a` to `b`.", []),
        ("x, depth", "Maps (B, H, W, C) up to a depth.", []),
        ("x, depth", "Maps up to a depth (Liu et al. 2021).", ["f(x)"]),
        ("y, depth", "Maps (B, H, W, C) up to a depth.", ["f(y)"]),
        ("depth, device=None, dtype=None", "Down to a depth.", []),
        ("depth, device='cpu', dtype=None", "Down to a depth.", ["f(device)"]),
        ("depth, width", "The parameters are those of `other`.", []),
        ("depth, more", "The parameters are as in `other`.", ["f(more)"]),
        ("depth", "Unlike `other`.", ["f(depth)"]),
    ],
)
def test_a_parameter_that_is_not_described_is_found(signature, text, wanted):
    code = f"def f({signature}):\n    '''{text}'''\n"
    others = {node.name: node for node in public(OTHER + code)}
    assert missing(code, others) == wanted


def test_classes_describe_what_they_are_made_of():
    body = "\n    def __init__(self, depth, width): pass\n"
    code = f"class A:\n    '''Of a depth.'''\n{body}\n@dataclass\nclass B:\n    depth: int\n"
    assert missing(code, {}) == ["A(width)", "B(depth)"]


def test_a_method_without_a_docstring_is_found():
    code = "class A:\n    '''An A.'''\n    def {}(self): pass\ndef g(): '''G.'''"
    assert silent(code.format("f")) == ["A.f"] and silent(code.format("_f")) == []


def test_an_invented_parameter_is_found():
    text = SECTION.format("depth, height : int\n    Both.")
    code = f"def f(depth, width):\n    '''{text}'''\n"
    assert invented(code) == ["f(height)"] == invented("class A:\n" + indent(code, "    "))
