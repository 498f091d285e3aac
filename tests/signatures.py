"""While tests run, every call of the library is held to its signature: types and shapes.

`install` has modules of the library imported with their functions and methods wrapped. A call
whose arguments or result are not as the annotations say raises `Mismatch`; axes of one name
must be equally long within a call (jaxtyping), and types are those written (beartype). What
is wrong on purpose is not checked: see `unchecked`, which every `pytest.raises` enters. Nor is
what a compiler, an exporter or a tracer reads, and kernels and custom operators stay as they
are. Processes that a test starts import the library as it is.
"""

import ast
import functools
import importlib.machinery
import inspect
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

PLAIN = ("jit", "custom_op", "register", "overload")  # decorators that read what they decorate
_unchecked = []  # an entry for each block of `unchecked` that is entered


class Mismatch(AssertionError):
    """A call is not as its signature says."""


@contextmanager
def unchecked():
    """While the `with` block lasts, no signature is checked, in any thread."""
    _unchecked.append(True)
    try:
        yield
    finally:
        _unchecked.pop()


@functools.cache
def checker():
    """The decorator that checks each call of a function."""
    # of a list one item is checked: the first, and not a random one
    with mock.patch("random.getrandbits", lambda bits: 0):
        from beartype import BeartypeConf, beartype
    from jaxtyping import jaxtyped

    conf = BeartypeConf(is_pep484_tower=True, violation_type=Mismatch)
    return lambda function: jaxtyped(beartype(function, conf=conf), typechecker=None)


def checked(function):
    """A function whose calls are checked unless something compiles, or `unchecked` says no."""
    found = []  # made at the first call, when everything that annotations name is defined

    def chosen():
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return function
        if _unchecked:
            return function
        if not found:
            found.append(checker()(function))
        return found[0]

    def call(*args, **options):
        return chosen()(*args, **options)

    def generate(*args, **options):
        yield from chosen()(*args, **options)

    is_generator = inspect.isgeneratorfunction(function)
    return functools.wraps(function)(generate if is_generator else call)


def is_checked(node):
    """Whether a function has annotations and is no kernel."""
    a = node.args
    given = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    known = node.returns or any(x.annotation for x in given if x)
    names = " ".join(ast.unparse(x).split("(")[0] for x in node.decorator_list)
    return known and not any(plain in names for plain in PLAIN)


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with its functions and its classes' methods `checked`."""

    def path_stats(self, path):
        raise OSError("the code made here is not to be kept among that of others")

    def source_to_code(self, data, path, *, _optimize=-1):
        tree = ast.parse(data, path)
        holders = [tree, *(x for x in tree.body if isinstance(x, ast.ClassDef))]
        for node in [x for holder in holders for x in holder.body]:
            if isinstance(node, ast.FunctionDef) and is_checked(node):
                call = ast.parse("__import__('signatures').checked", mode="eval").body
                for each in ast.walk(call):
                    ast.copy_location(each, node)
                node.decorator_list.append(call)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


class Finder:
    """Finds the modules of a package for `Loader`."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != self.package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class Raises:
    """`pytest.raises` as a context in which no signature is checked."""

    def __init__(self, context):
        self.context, self.off = context, unchecked()

    def __enter__(self):
        self.off.__enter__()
        return self.context.__enter__()

    def __exit__(self, *error):
        self.off.__exit__(None, None, None)
        return self.context.__exit__(*error)


def install(package="attnlib"):
    """Check the package's calls from now on; it must not have been imported."""
    if find_spec("jaxtyping") is None or find_spec("beartype") is None:
        return  # as on a machine that is there for its GPU
    assert package not in sys.modules, f"{package} was imported before its checks"
    checker()
    sys.meta_path.insert(0, Finder(package))
    raises = pytest.raises

    @functools.wraps(raises)
    def unchecked_raises(expected=None, *args, **options):
        if args:  # pytest.raises(ValueError, function, argument)
            with unchecked():
                return raises(expected, *args, **options)
        given = () if expected is None else (expected,)
        return Raises(raises(*given, **options))

    pytest.raises = unchecked_raises
