"""Types for checkers: `python -m tools.stubs` writes attnlib/*.pyi from the modules.

The book's code is for reading and carries few annotations; its docstrings say the types, in
words. A stub has the signatures of a module's public names, and for each parameter and result
what the docstring says of it: "int or (int, int), optional" is `int | tuple[int, int] | None`.
Where a docstring says nothing, the name does: in this library a name means one thing (NAMES),
or at least within a module, if all docstrings there agree and NAMES does not object. Next, a
default value tells the type; where there is none either, or the words are none of those below,
the type is `Any`. `make run` calls this file, and a test lets mypy compare the stubs with the
modules.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "attnlib"
WORDS = {  # what docstrings call a type
    **{name: name for name in ("int", "float", "bool", "str", "bytes", "type")},
    **{"integer": "int", "None": "None", "object": "Any", "sequence": "Sequence[Any]"},
    **{"Tensor": "torch.Tensor", "torch.Tensor": "torch.Tensor", "Path": "Path"},
    **{"Module": "torch.nn.Module", "torch.device": "torch.device"},
    **{"torch.dtype": "torch.dtype", "torch.Generator": "torch.Generator"},
    **{"random.Random": "random.Random"},
    **{"callable": "Callable[..., Any]", "function": "Callable[..., Any]"},
    **{"path": "str | os.PathLike[str]", "dict": "dict[Any, Any]", "list": "list[Any]"},
    **{"tuple": "tuple[Any, ...]", "set": "set[Any]"},
}
HOLDERS = {  # "list of int"
    **{"list": "list[{}]", "tuple": "tuple[{}, ...]", "sequence": "Sequence[{}]"},
    **{"iterable": "Iterable[{}]", "collection": "Collection[{}]", "set": "set[{}]"},
}
NAMES = {  # what a name stands for in the whole library, unless a docstring says otherwise
    "torch.Tensor": """
        x q k v z a b h g query images image tokens logits memory memory_mask src tgt
        src_mask boxes labels places noise keep queries keys anchors columns
        patches patch words sentences lse grad qkv pixel_pos index dist_logits
        teacher_logits target_boxes positions pos_embed canvas summary decoded
        frequencies noised shortcut out""",
    'torch.Tensor | Literal["causal"] | None': "mask",
    "torch.Tensor | None": "bias cosine_scale attention_mask",
    "int": """
        num_heads dim in_dim out_dim depth count embed_dim in_chans num_classes num_features
        vocab_size pad_id eos_id bos_id max_length max_new_tokens n m nhead d_model vocab
        dim_feedforward num_embeddings num_queries num_patches num_masked rank ranks steps seed
        batch_size every width layer element_size units micros out_chans in_features
        out_features rd_divisor kernel_size top_k src_vocab tgt_vocab groups limit repeats
        stride length number nonzero""",
    "float": """
        dropout dropout_p mlp_ratio mask_ratio rate lr decay weight_decay top_p min_p p
        factor temperature mutate_prob depth_prob num_boxes rd_ratio seconds init_values
        intensity flops iou""",
    "float | None": "scale clip",
    "bool": "causal balanced sharded is_causal",
    "str": "name language operation rope_type tag_on global_pool text family",
    "torch.device | str": "device",
    "torch.dtype": "dtype",
    "torch.nn.Module": "model module block norm conv attn merging",
    "torch.optim.Optimizer": "optimizer",
    "torch.Generator": "generator",
    "random.Random": "rng",
    "Callable[..., Any]": "loss_fn norm_layer call function kernel make fits f",
    "dict[str, torch.Tensor]": "state_dict named",
    "int | tuple[int, int]": "img_size patch_size window_size shift_size",
    "tuple[int, int]": "grid_size grid new_size old_size new_window old_window size window",
    "tuple[int, ...]": "shape",
    "tuple[float, float]": "betas",
    "str | os.PathLike[str]": "path folder file",
    "str | os.PathLike[str] | None": "checkpoint",
    "Sequence[str]": "languages parts",
    "Sequence[tuple[str, str]]": "directions",
    "list[dict[str, torch.Tensor]]": "targets",
    "KVCache": "cache",
    "WindowLayout": "layout",
    "GPTConfig": "config",
    "tuple[Any, ...]": "inputs",
    "Any": "classes data features hidden key label picture pixel prediction score token truth",
}
HEAD = "# Made by `python -m tools.stubs` from {}.py: do not edit."
IMPORTS = (  # what a stub may need beside its module's own imports
    "import os",
    "import random",
    "import re",
    "from collections.abc import Callable, Collection, Iterable, Iterator, Sequence",
    "from contextlib import contextmanager",
    "from pathlib import Path",
    "from typing import Any, Literal, NamedTuple",
    "import torch",
)


# --- words into types -------------------------------------------------------------------------


def split(text, separator):
    """Parts of a text between separators that no bracket or quotation mark encloses."""
    parts, depth, quoted, begin = [], 0, False, 0
    for i, letter in enumerate(text):
        quoted ^= letter == '"'
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and not quoted and text.startswith(separator, i):
            parts.append(text[begin:i])
            begin = i + len(separator)
    return [*parts, text[begin:]]


def one_type(words, classes):
    """The type of a phrase without "or", such as "list of dict of str to Tensor"."""
    words = re.sub(
        r"^(bool|u?int\d*|float\d*|integer|complex\d*) (?=Tensor)", "", words.strip()
    )
    words = re.sub(r"^Tensors\b", "Tensor", words)
    if words in WORDS:
        return WORDS[words]
    if found := re.fullmatch(r"(?:torch\.)?((?:nn|optim)\.[A-Z]\w+)", words):
        return f"torch.{found[1]}"
    if re.sub(r"^attnlib\.\w+\.", "", words) in classes:
        return words.split(".")[-1]
    if re.fullmatch(r'"[^"]*"', words):
        return f"Literal[{words}]"
    if re.fullmatch(r"\{.*\}", words):
        return literal(words)
    if words.startswith("(") and words.endswith(")"):
        return (
            f"tuple[{', '.join(one_type(part, classes) for part in split(words[1:-1], ','))}]"
        )
    if found := re.fullmatch(r"dict of (.+?) to (.+)", words):
        return f"dict[{one_type(found[1], classes)}, {one_type(found[2], classes)}]"
    if found := re.fullmatch(r"(\w+) of (.+)", words):
        if found[1] in HOLDERS:
            return HOLDERS[found[1]].format(one_type(found[2], classes))
    known = re.match(r"(Module|dict|Tensor|callable) (?:that|from|with|of|as|in)\b", words)
    return WORDS[known[1]] if known else "Any"


def literal(words):
    """`Literal["a", "b"]` of {"a", "b"}; Any if the braces do not name all."""
    try:
        values = ast.literal_eval(f"[{words[1:-1]}]")
    except (SyntaxError, ValueError):
        return "Any"
    return "Any" if ... in values else f"Literal[{', '.join(map(repr, values))}]"


def union(words, classes):
    """The type of a whole phrase: "int or (int, int), optional"."""
    phrase, *rest = split(words, ",")
    found = [one_type(part, classes) for part in split(phrase, " or ")]
    for more in rest:  # ", or X"
        more = more.strip()
        if more.startswith("or "):
            found.append(one_type(more[3:], classes))
        elif any(name in more for name in (" or str", " or dict")):  # "path, str or dict"
            found += [one_type(part, classes) for part in split(more, " or ")]
        elif more == "optional":
            found.append("None")
    found = list(dict.fromkeys(found))
    return "Any" if "Any" in found else " | ".join(found)


def section(docstring, title):
    """The entries of a docstring's section: [(names, words), ...]."""
    block = re.search(rf"(?:^|\n){title}\n-+\n(.*?)(?=\n\n?[A-Z]\w*\n---|\Z)", docstring, re.S)
    entries = []
    for line in re.findall(r"(?m)^(?! ).+$", block[1] if block else ""):
        names, colon, words = line.partition(" : ")
        names = [name.strip().lstrip("*") for name in names.split(",")] if colon else []
        entries.append((names, words if colon else line))
    return entries


def documented(docstring, classes, title="Parameters"):
    """{name: type} of a section of a docstring."""
    entries = section(docstring, title)
    return {name: union(words, classes) for names, words in entries for name in names}


def house_names(tree, classes):
    """{name: type} for parameters that their own docstring does not describe."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for name, kind in documented(ast.get_docstring(node) or "", classes).items():
                found.setdefault(name, set()).add(kind.removesuffix(" | None"))
    agreed = {name: kinds.pop() for name, kinds in found.items() if len(kinds) == 1}
    names = {name: kind for kind, line in NAMES.items() for name in line.split()}
    for name in names.keys() & agreed.keys():
        own, house = (set(kinds[name].split(" | ")) for kinds in (agreed, names))
        if own <= house:
            agreed[name] = names[name]
        elif not house <= own:  # a name of two meanings tells nothing
            agreed[name] = "Any"
    return {name: kind for name, kind in (names | agreed).items() if kind != "Any"}


def result(node, docstring, classes):
    """The type of what a function returns."""
    entries = section(docstring, "Returns")
    if entries:
        types = [union(words, classes) for names, words in entries for _ in names or [0]]
        one_unnamed = len(types) == 1 or not all(names for names, _ in entries)
        return types[0] if one_unnamed and len(types) == 1 else tuple_of(entries, types)
    returns, yields = returned(node)
    if yields:
        return "Iterator[Any]"
    kinds = {value_type(value, classes) for value in returns}
    return kinds.pop() if len(kinds) == 1 else "Any" if kinds else "None"


def tuple_of(entries, types):
    """Several named results are a tuple; several lines without a name are nothing known."""
    return f"tuple[{', '.join(types)}]" if all(names for names, _ in entries) else "Any"


def returned(function):
    """The values that a function returns, and whether it yields; nested functions aside."""
    returns, yields, left = [], False, list(function.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            returns.append(node.value)
        yields |= isinstance(node, (ast.Yield, ast.YieldFrom))
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            left += ast.iter_child_nodes(node)
    return returns, yields


# --- values into types ------------------------------------------------------------------------


def value_type(node, classes):
    """The type of an expression as far as its text tells it."""
    if isinstance(node, ast.Constant):
        return "Any" if node.value in (None, ...) else type(node.value).__name__
    if isinstance(node, ast.JoinedStr):
        return "str"
    if isinstance(node, ast.UnaryOp):
        return value_type(node.operand, classes)
    if isinstance(node, (ast.Dict, ast.DictComp)):
        return "dict[Any, Any]"
    if isinstance(node, (ast.List, ast.ListComp)):
        return "list[Any]"
    if isinstance(node, (ast.Set, ast.SetComp)):
        return "set[Any]"
    if isinstance(node, ast.Tuple):
        return "tuple[Any, ...]"
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if re.fullmatch(r"nn\.[A-Z]\w+", name):
            return f"torch.{name}"
        if name in classes:
            return name
        known = {"re.compile": "re.Pattern[str]", "torch.tensor": "torch.Tensor"}
        return known.get(name, "dict[Any, Any]" if name == "dict" else "Any")
    return "Any"


def annotated(node):
    """An annotation of the module itself; `dict` becomes `dict[Any, Any]`."""
    return re.sub(r"\b(dict|list|tuple)\b(?!\[)", lambda x: WORDS[x[0]], ast.unparse(node))


# --- signatures -------------------------------------------------------------------------------


def fitting(function, house, classes):
    """Those of the house's types that the default values of a function do not contradict."""
    a = function.args
    given = [*zip([*a.posonlyargs, *a.args][::-1], a.defaults[::-1])]
    found = dict(house)
    for argument, default in [*given, *zip(a.kwonlyargs, a.kw_defaults)]:
        own = value_type(default, classes).split("[")[0]
        kinds = {kind.split("[")[0] for kind in house.get(argument.arg, own).split(" | ")}
        accepted = {"int": {"int", "float"}, "str": {"str", "Literal"}}.get(own, {own})
        if own != "Any" and not accepted & kinds:
            del found[argument.arg]
    return found


def parameter(argument, default, types, classes):
    """One parameter: its name, type and whether it has a default."""
    kind = annotated(argument.annotation) if argument.annotation else types.get(argument.arg)
    if kind is None:
        kind = value_type(default, classes) if default is not None else "Any"
        kind = "Any" if kind.startswith("tuple") else kind  # (1, 2) may stand for a size
    is_none = isinstance(default, ast.Constant) and default.value is None
    if is_none and "None" not in kind and kind != "Any" and not argument.annotation:
        kind += " | None"
    return f"{argument.arg}: {kind}" + (" = ..." if default is not None else "")


def signature(function, types, classes, first=None):
    """The parameters of a function; `first` is "self" or "cls" in a method."""
    a = function.args
    given = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(given) - len(a.defaults)) + a.defaults
    found = [parameter(*pair, types, classes) for pair in zip(given, defaults)]
    if first:
        found[0] = given[0].arg
    if a.posonlyargs:
        found.insert(len(a.posonlyargs), "/")
    if a.vararg:
        found.append(f"*{a.vararg.arg}: Any")
    elif a.kwonlyargs:
        found.append("*")
    pairs = zip(a.kwonlyargs, a.kw_defaults)
    found += [parameter(*pair, types, classes) for pair in pairs]
    return ", ".join(found + ([f"**{a.kwarg.arg}: Any"] if a.kwarg else []))


def function_stub(node, classes, house, indent="", inherited=None):
    """The lines of a function or method."""
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any("jit" in name or "custom_op" in name or "register" in name for name in names):
        return [f"{indent}{node.name}: Any"]
    kept = ("contextmanager", "staticmethod", "classmethod", "property")
    lines = [f"{indent}@{name}" for name in names if name in kept or name.endswith(".setter")]
    docstring = ast.get_docstring(node) or ""
    types = fitting(node, house, classes) | (inherited or {}) | documented(docstring, classes)
    first = indent and "staticmethod" not in names
    kind = annotated(node.returns) if node.returns else result(node, docstring, classes)
    if "contextmanager" in names:
        kind = f"Iterator[{'Any' if section(docstring, 'Returns') else kind[9:-1]}]"
    shape = signature(node, types, classes, first)
    return [*lines, f"{indent}def {node.name}({shape}) -> {kind}: ..."]


def attributes(node, types, classes):
    """{name: type} of what a class's `__init__` sets on self."""
    found = {}
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for each in ast.walk(method):
                for target, value in assigned(each):
                    if ast.unparse(target).startswith("self.") and target.attr.isidentifier():
                        if isinstance(target.value, ast.Name) and target.attr[0] != "_":
                            own = isinstance(value, ast.Name) and types.get(value.id)
                            kind = own or value_type(value, classes)
                            if found.setdefault(target.attr, kind) != kind:
                                found[target.attr] = "Any"
    return found


def assigned(node):
    """(target, value) of an assignment, also of several names to several values."""
    for target in getattr(node, "targets", []) if isinstance(node, ast.Assign) else []:
        if isinstance(target, ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else []
            values = values if len(values) == len(target.elts) else [None] * len(target.elts)
            pairs = list(zip(target.elts, values))
        else:
            pairs = [(target, node.value)]
        yield from (pair for pair in pairs if isinstance(pair[0], (ast.Attribute, ast.Name)))


def class_stub(node, classes, house):
    """The lines of a class; `house` are types of parameters that no docstring describes."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"@{ast.unparse(x)}" for x in node.decorator_list]
    lines.append(f"class {node.name}({bases}):" if bases else f"class {node.name}:")
    init = next((x for x in node.body if getattr(x, "name", "") == "__init__"), None)
    types = documented(ast.get_docstring(node) or "", classes)
    if init:
        types |= documented(ast.get_docstring(init) or "", classes)
        defaults = {a.arg: d for a, d in zip(init.args.args[::-1], init.args.defaults[::-1])}
        types = {
            name: kind + " | None" * ("None" not in kind and kind != "Any")
            if isinstance(defaults.get(name), ast.Constant) and defaults[name].value is None
            else kind
            for name, kind in types.items()
        }
    methods = {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
    body = []
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            given = " = ..." if each.value else ""
            body.append(f"    {each.target.id}: {annotated(each.annotation)}{given}")
        for target, value in assigned(each):
            body.append(f"    {target.id}: {value_type(value, classes)}")
    told = documented(ast.get_docstring(node) or "", classes, "Attributes")
    present = {line.split(":")[0].strip() for line in body}
    for name, kind in (attributes(node, types, classes) | told).items():
        if name.isidentifier() and name not in methods | present:
            body.append(f"    {name}: {kind}")
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and (each.name[0] != "_" or each.name[:2] == "__"):
            body += function_stub(each, classes, house, "    ", types)
    return [*lines, *(body or ["    ..."])]


def fields(value):
    """The names in `namedtuple("name", fields)`, if a value is that and tells them all."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "namedtuple":
        return []
    given = value.args[1]
    if isinstance(given, ast.Constant):
        return given.value.replace(",", " ").split()
    names = [getattr(each, "value", None) for each in getattr(given, "elts", ())]
    return names if all(isinstance(name, str) for name in names) else []


# --- modules ----------------------------------------------------------------------------------


def module_stub(path):
    """The stub of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own, lines = set(defined(tree)), []
    classes = {*HOMES, *own}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            for name in (alias.name for alias in node.names):
                known = (node.module, name) in CLASSES
                classes = classes | {name} if known else classes - {name}
    house = house_names(tree, classes)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name[0] != "_":
            lines += function_stub(node, classes, house)
        elif isinstance(node, ast.ClassDef) and node.name[0] != "_":
            lines += class_stub(node, classes, house)
        for target, value in assigned(node):
            name = ast.unparse(target)
            if name == "__all__":
                lines += [f"__all__ = {ast.unparse(value)}"]
            elif name[0] != "_" and "." not in name:
                if names := fields(value):
                    lines += [f"class {name}(NamedTuple):", *(f"    {x}: Any" for x in names)]
                else:
                    lines += [f"{name}: {value_type(value, classes)}"]
    text = "\n".join(lines)
    return (
        "\n".join([HEAD.format(path.stem), *imports(tree, text, own, path.stem), text]) + "\n"
    )


def imports(tree, text, own, module):
    """The imports that a stub's text needs, a line for each module."""
    lines = "\n".join(IMPORTS)
    given = [x for x in ast.walk(tree) if isinstance(x, (ast.Import, ast.ImportFrom))]
    given += ast.parse(lines).body
    given += [ast.parse(f"from .{home} import {name}").body[0] for name, home in HOMES.items()]
    own = own | set(re.findall(r"(?m)^(?:def )?([A-Za-z_]\w*)[:(]", text))
    needed, found = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text)) - own, {}
    for node in given:
        start = f"from {'.' * node.level}{node.module or ''} " if hasattr(node, "level") else ""
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            if name in needed and start != f"from .{module} ":
                needed.discard(name)
                found.setdefault(start, []).append(ast.unparse(alias))
    simple = [f"import {name}" for name in sorted(found.pop("", []))]
    return [*simple, *(f"{start}import {', '.join(names)}" for start, names in found.items())]


CLASSES = set()  # (module, name) of all classes of the library
HOMES = {}  # {name: module} of those whose name no other has


def defined(tree):
    """The names of the classes of a module, named tuples among them."""
    for node in tree.body:
        yield from [node.name] if isinstance(node, ast.ClassDef) else []
        yield from (target.id for target, value in assigned(node) if fields(value))


def stubs():
    """{path: text} of all stubs."""
    paths = [path for path in sorted(LIBRARY.glob("*.py")) if path.name[0] != "_"]
    homes = {}
    for path in paths:
        for name in defined(ast.parse(path.read_text(encoding="utf-8"))):
            homes.setdefault(name, []).append(path.stem)
    CLASSES.update((home, name) for name, found in homes.items() for home in found)
    HOMES.update({name: found[0] for name, found in homes.items() if len(found) == 1})
    return {path.with_suffix(".pyi"): module_stub(path) for path in paths}


def main():
    texts = stubs()
    for path in LIBRARY.glob("*.pyi"):
        if path not in texts:
            path.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
