"""Find the code that a piece of code depends on, by names.

A module or a notebook is a list of *parts*, its statements. A part uses names. The parts that
bind these names count with it, and so on through the modules of the project. A class is one
part, with all its methods; other packages are named, but not followed. Comments and docstrings
do not count. A class of which code only asks whether an object is of it (`isinstance`, a
key of a table, an annotation) does not count, because none of its code runs; it counts where
objects are made.

Names do not tell everything, so some parts count without being named:

- What runs when a module is imported (a call, a loop, a value that is set in a dictionary, a
  function whose decorator is not in `PLAIN_DECORATORS`) counts as soon as the module is used.
- A model may be named by a string, `create_model("swin_tiny_…")`. Where `MODELS` is used, a
  statement that fills it (`register_model`) counts if a name that it gives and a string of the
  counted functions or cells begin with the same word, "swin".
- A module that is used in any other way than `module.name` counts as a whole.

Modules that are imported under a computed name (`import_module`) are not followed. In the
library these are the kernels for a GPU, and no figure is drawn on a GPU.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
# what these decorators make is known by its name alone; others may enter it somewhere
PLAIN_DECORATORS = (
    "autocast cache contextmanager dataclass fixture former_arguments jit lru_cache no_grad "
    "overload seeded parametrize"
).split()
# functions that compare the class of their first argument with the others
TYPE_TESTS = ("isinstance", "issubclass", "is_unchanged", "is_plain", "is_as_built")
REGISTRY, REGISTER = "MODELS", "register_model"


# --- the text of code, without its words ------------------------------------------------------


def parsable(code):
    """Replace a notebook's magics, which are no Python, by `pass`."""
    return re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", code)


def blanked(code, tree):
    """Split code into lines, with comments and docstrings blanked."""
    lines = code.splitlines()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = ""
    if "#" in code:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
    return [line.rstrip() for line in lines]


# --- which names a statement uses and binds ---------------------------------------------------


def dotted(node):
    """Return "a.b.c" for that chain of attributes, None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return None


def first(name):
    return name.partition(".")[0]


def used_names(node):
    """Return the names, dotted if attributes follow, that code reads from outside itself.

    Classes with which it only compares that of an object are left out, see `compared_with`.
    """
    name = dotted(node)
    if name:
        return {name}
    names = set()
    compared = compared_with(node)
    for child in ast.iter_child_nodes(node):
        if child not in compared:
            names |= used_names(child)
    if isinstance(node, (*FUNCTIONS, *COMPREHENSIONS)):
        own = own_names(node)
        names = {name for name in names if first(name) not in own}
        for outside in evaluated_outside(node):
            names |= used_names(outside)
    return names


def compared_with(node):
    """Return those children of a node that only say of which class an object is.

    The annotations of a function or a variable, the names among the keys of a table, and what
    is compared with a class: in `isinstance(x, …)`, and after `type(x) is`, `==`, or `in`.
    """
    if isinstance(node, ast.arg | ast.AnnAssign):
        found = [node.annotation]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        found = [node.returns]
    elif isinstance(node, ast.Dict):
        found = [key for key in node.keys if key is not None and dotted(key)]
    elif isinstance(node, ast.Call) and dotted(node.func) in TYPE_TESTS:
        found = node.args[1:]
    elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
        found = node.comparators if dotted(node.left.func) == "type" else []
    else:
        found = []
    return [child for child in found if child is not None]


def compared_names(node):
    """Return the names in all places in some code that only say of which class an object is."""
    names = set()
    for found in ast.walk(node):
        for child in compared_with(found):
            names |= used_names(child)
    return names


def is_main(node):
    """True for `if __name__ == "__main__"`, which does not run when a module is imported."""
    return isinstance(node, ast.If) and "__name__" in used_names(node.test)


def evaluated_outside(node):
    """Return the parts of a function or comprehension that its own names do not reach."""
    if isinstance(node, COMPREHENSIONS):
        return [node.generators[0].iter]
    defaults = [default for default in node.args.kw_defaults if default is not None]
    return [*node.args.defaults, *defaults, *getattr(node, "decorator_list", [])]


def own_names(scope):
    """Return the arguments and local variables of a function or comprehension."""
    if isinstance(scope, COMPREHENSIONS):
        return set().union(*(bound_names(generator.target) for generator in scope.generators))
    arguments = scope.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [arguments.vararg, arguments.kwarg]
    names = {argument.arg for argument in every if argument is not None}
    if isinstance(scope, ast.Lambda):
        return names
    elsewhere = set()
    for statement in scope.body:
        names |= bound_names(statement)
        for node in ast.walk(statement):
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                elsewhere |= set(node.names)
    return names - elsewhere


def bound_names(node):
    """Return the names that a statement binds in its own scope, without those it imports."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    if isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
        return set()
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    names = {node.name} if isinstance(node, ast.ExceptHandler) and node.name else set()
    for child in ast.iter_child_nodes(node):
        names |= bound_names(child)
    return names


def first_words(texts):
    """Return the "swin" of "swin_tiny_…", for those of some strings that have such a word."""
    return {text.partition("_")[0] for text in texts if "_" in text} - {""}


def strings(node):
    """Return the strings in some code."""
    constants = [found for found in ast.walk(node) if isinstance(found, ast.Constant)]
    return {constant.value for constant in constants if isinstance(constant.value, str)}


def model_words(node):
    """Return the first words of the names under which a statement registers models."""
    texts = set()
    for found in ast.walk(node):
        if isinstance(found, ast.Call) and dotted(found.func) == REGISTER:
            texts |= strings(found.args[0])
        elif isinstance(found, ast.Assign):
            texts |= strings(found.value)  # as in `name = f"swin_{size}"`
    words = first_words(texts)
    if words:
        return words
    words = {text.partition("_")[0] for text in strings(node)}  # the name begins in a table
    return words - {""}


# --- parts and modules ------------------------------------------------------------------------


@dataclass(eq=False)
class Part:
    """A statement of a module or a notebook."""

    node: ast.stmt
    text: str
    module: "Module"
    binds: set = field(default_factory=set)
    uses: set = field(default_factory=set)
    compares: set = field(default_factory=set)

    @cached_property
    def defines(self):
        """True if this only gives a name to something: a function, a class, a value."""
        if isinstance(self.node, ast.Assign):
            bound = self.node.targets
            return not any(isinstance(node, ast.Subscript | ast.Attribute) for node in bound)
        if isinstance(self.node, ast.AnnAssign):
            return isinstance(self.node.target, ast.Name)
        return self.is_definition

    @cached_property
    def is_definition(self):
        """True for a function or class whose decorators enter it nowhere."""
        if not isinstance(self.node, DEFINITIONS):
            return False
        if self.node.name.startswith("test_"):
            return True
        for decorator in self.node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if (dotted(called) or "").rpartition(".")[2] not in PLAIN_DECORATORS:
                return False
        return True

    @cached_property
    def named_words(self):
        """The first words of the strings that may name a model."""
        if self.module.name and not self.is_definition:
            return set()  # a table of the library
        return first_words(strings(self.node))


class Module:
    """The parts of some code, and what its imports mean.

    `name` is that of the module, dotted, to which relative imports refer.
    """

    def __init__(self, code="", name="", is_package=False):
        self.name = name
        self.is_package = is_package
        self.parts = []
        self.imports = {}  # name here: (module, name there or None for the module itself)
        self.add(code)

    def add(self, code):
        """Append the parts of more code, and return them."""
        code = parsable(code)
        tree = ast.parse(code)
        lines = blanked(code, tree)
        self.note_imports(tree)
        added = []
        for node in tree.body:
            if isinstance(node, IMPORTS) or is_main(node):
                continue
            starts = [node.lineno]
            starts += [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
            text = "\n".join(line for line in lines[min(starts) - 1 : node.end_lineno] if line)
            if text:
                uses = used_names(node)
                compares = compared_names(node) - uses
                added.append(Part(node, text, self, bound_names(node), uses, compares))
        self.parts += added
        return added

    def note_imports(self, tree):
        """Note the imports in some code, those inside of functions as well."""
        for found in ast.walk(tree):
            if isinstance(found, ast.Import):
                for alias in found.names:
                    module = alias.name if alias.asname else first(alias.name)
                    self.imports[alias.asname or module] = (module, None)
            elif isinstance(found, ast.ImportFrom):
                for alias in found.names:
                    module = self.absolute(found)
                    self.imports[alias.asname or alias.name] = (module, alias.name)

    def absolute(self, node):
        """Return the full name of the module from which a statement imports."""
        if node.level == 0:
            return node.module
        package = self.name.split(".")
        up = node.level - 1 if self.is_package else node.level
        package = package[: len(package) - up]
        return ".".join([*package, *filter(None, [node.module])])

    def binding(self, name):
        """Return the parts that bind a name."""
        return [part for part in self.parts if name in part.binds]


class Notebook(Module):
    """The code cells of a notebook, added one after another.

    All that ran before a cell counts for it, because it may have changed a variable, a setting,
    or the state of the random numbers. Functions and classes count where they are named.
    """

    def binding(self, name):
        """Return the functions and classes of this name; values were made by what ran."""
        return [part for part in super().binding(name) if part.is_definition]

    def ran(self):
        """Return the parts that did something so far."""
        return [part for part in self.parts if not part.is_definition]


class Project:
    """The modules in some folders, and which of their parts belong to a name.

    Parameters
    ----------
    folders : list of Path
        The folders in which modules are looked for, the first one first.
    packages : list of str, optional
        The packages and modules that are followed; by default all in these folders.
    texts : dict, optional
        The modules that were read before, by name and code; may be shared by several projects.
    """

    def __init__(self, folders, packages=None, texts=None):
        self.folders = folders
        self.packages = packages
        self.texts = {} if texts is None else texts
        self.modules = {}
        self.links = {}  # part: what the names that it uses mean
        self.registered = {}  # package: the statements that register models

    def module(self, name):
        """Return the module of this dotted name, None if it is not of the project."""
        if self.packages is not None and first(name) not in self.packages:
            return None
        if name not in self.modules:
            self.modules[name] = self.read(name)
        return self.modules[name]

    def read(self, name):
        for folder in self.folders:
            path = Path(folder, *name.split("."))
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.exists():
                    code = file.read_text(encoding="utf-8")
                    if (name, code) not in self.texts:
                        is_package = file.name == "__init__.py"
                        self.texts[name, code] = Module(code, name, is_package)
                    return self.texts[name, code]
        return None

    def meaning(self, module, name):
        """Return what a dotted name means in a module.

        Returns
        -------
        list of Part
            The parts that bind it; none if it is built in or of another package.
        str or None
            Its full name in another package, such as `torch.nn.functional.softmax`, or its
            name in the project if it was imported under another one.
        """
        own, _, rest = name.partition(".")
        parts = module.binding(own)
        if parts:
            return parts, None
        if own in module.imports:
            there, name_there = module.imports[own]
            name = ".".join(filter(None, [name_there, rest]))
            target = self.module(there)
            if target is None:
                return [], ".".join(filter(None, [there, name]))
            alias = None if name_there in (None, own) else name_there
            return self.member(target, name), alias
        if module.is_package:
            inner = self.module(f"{module.name}.{own}")
            return self.member(inner, rest) if inner else [], None
        return [], None

    def member(self, module, name):
        """Return the parts that bind an attribute of a module, all of them for ""."""
        if name in ("", "*"):
            return module.parts
        parts, _ = self.meaning(module, name)
        return parts

    def behind(self, part):
        """Return the parts behind the names that a part uses, and what imported names mean.

        Of a table that is only compared with, its text counts, and not what is in it.
        """
        if part not in self.links:
            parts = []
            meanings = set()
            for name in part.compares:
                found, _ = self.meaning(part.module, name)
                meanings |= {table.text for table in found if not table.is_definition}
            for name in sorted(part.uses):
                found, elsewhere = self.meaning(part.module, name)
                parts += found
                if elsewhere:
                    meanings.add(f"{name} = {elsewhere}")
            self.links[part] = parts, meanings
        return self.links[part]

    def closure(self, parts):
        """Return all that some parts depend on.

        Returns
        -------
        list of Part
            These parts and those behind the names that they use, transitively.
        set of str
            What the imported names that they use mean.
        """
        counted = []
        outside = set()
        seen = set()
        modules = set()
        todo = list(parts)
        while todo:
            while todo:
                part = todo.pop()
                if part in seen:
                    continue
                seen.add(part)
                counted.append(part)
                if part.module not in modules and part.module.name:
                    modules.add(part.module)
                    todo += [other for other in part.module.parts if not other.defines]
                found, meanings = self.behind(part)
                todo += found
                outside |= meanings
            todo += [part for part in self.registrations(counted) if part not in seen]
        return counted, outside

    def registrations(self, counted):
        """Return the statements that may enter a model which the counted code names."""
        found = []
        named = set()
        for part in counted:
            named |= part.named_words
        for home in {part.module for part in counted if REGISTRY in part.binds}:
            for part, words in self.registering(home.name.rpartition(".")[0]):
                if named & words:
                    found.append(part)
        return found

    def registering(self, package):
        """Return the statements of a package that register models, with the models' words."""
        if package not in self.registered:
            found = []
            for module in self.siblings(package):
                for part in module.parts:
                    if REGISTER in part.uses and not part.defines:
                        found.append((part, model_words(part.node)))
            self.registered[package] = found
        return self.registered[package]

    def siblings(self, package):
        """Return the modules of a package."""
        names = set()
        for folder in self.folders:
            for path in Path(folder, *package.split(".")).glob("[a-z]*.py"):
                names.add(f"{package}.{path.stem}")
        return [self.module(name) for name in sorted(names)]
