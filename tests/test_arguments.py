"""No argument is ignored: another value has another result, or is refused."""

import copy
import dataclasses
import inspect
from functools import cache
from hashlib import sha256

import pytest
import torch
from argument_rows import CLASSES, FUNCTIONS, NOT_YET, SPARED, Fails
from argument_rows_first import FIRST, SPARED_FIRST
from argument_rows_fourth import FOURTH, SPARED_FOURTH
from argument_rows_second import ON_CPU, SECOND, SPARED_SECOND
from argument_rows_third import THIRD
from world import function_named, public_functions

pytestmark = pytest.mark.usefixtures("quiet")

FUNCTIONS = FUNCTIONS | FIRST | SECOND | THIRD | FOURTH
SPARED = SPARED | SPARED_FIRST | SPARED_SECOND | SPARED_FOURTH
TABLE = CLASSES | FUNCTIONS


def seen(x):
    """What can be compared of a result: dtypes, devices, shapes and values."""
    if isinstance(x, torch.Tensor):
        found = [str(x.dtype), x.device.type, tuple(x.shape)]
        if not x.is_meta:
            values = x.detach().double().nan_to_num(nan=1e300) + 0.0  # no -0.0
            found.append(sha256(values.cpu().contiguous().numpy().tobytes()).hexdigest())
        return found
    if isinstance(x, dict):
        return {key: seen(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return [seen(value) for value in x]
    if dataclasses.is_dataclass(x):
        return seen(vars(x))
    assert isinstance(x, (bool, int, float, str, bytes, set, frozenset, type(None))), type(x)
    return x


def function_of(name):
    """The function of a row; a second one for it is called "module.function, 2"."""
    return name.split(",")[0]


def result(name, arguments):
    """The result of a call whose random numbers are always the same."""
    row = TABLE[name]
    arguments = copy.deepcopy(arguments)
    torch.manual_seed(0)
    found = function_named(function_of(name))(**arguments)
    if row.after is not None:
        return seen([found if row.use is None else row.use(found), row.after(arguments)])
    return seen(found if row.use is None else row.use(found))


def skip_on_gpu(name):
    if torch.cuda.is_available() and function_of(name) in ON_CPU:
        pytest.skip("its arguments are tried on machines without a GPU")


@cache
def usual(name):
    return result(name, TABLE[name].base)


CASES = [(name, key) for name, row in TABLE.items() for key in row.others]


@pytest.mark.parametrize("name, key", CASES)
def test_an_argument_has_an_effect(name, key):
    row = TABLE[name]
    other = row.others[key]
    skip_on_gpu(name)
    if isinstance(other, Fails):
        with pytest.raises(other.error, match=other.message):
            result(name, row.base | {key: other.value})
        return
    assert usual(name) != result(name, row.base | {key: other})


@pytest.mark.parametrize("name", TABLE)
def test_a_call_repeats(name):
    """Control: chance alone changes nothing."""
    skip_on_gpu(name)
    assert usual(name) == result(name, TABLE[name].base)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.after])
def test_a_call_changes_its_argument(name):
    """Control: what is looked at after the call is not as it was before."""
    row = TABLE[name]
    assert seen(row.after(copy.deepcopy(row.base))) != usual(name)[1]


def names_of(function):
    """The names of a function's arguments, and whether it takes others by name."""
    try:
        kinds = inspect.signature(function).parameters
    except ValueError:  # PyTorch's own, in C
        return set(), False
    stars = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    names = {name for name, one in kinds.items() if one.kind not in stars}
    return names, any(one.kind == stars[1] for one in kinds.values())


def test_rows_have_every_argument():
    """A new argument needs a value that has an effect, or a reason why there is none."""
    found = {}
    for name, row in TABLE.items():
        found.setdefault(function_of(name), set()).update(row.others)
    wrong = {}
    for name, others in found.items():
        names, takes_more = names_of(function_named(name))
        listed = others | SPARED.get(name, {}).keys()
        missing, unknown = names - listed, set() if takes_more else listed - names
        if missing or unknown:
            wrong[name] = dict(missing=missing, unknown=unknown)
    assert not wrong


def test_every_function_has_a_row():
    """A new function needs a row: no name is added to `NOT_YET`."""
    named = {function_of(name) for name in TABLE}
    without = {name for name in public_functions() if names_of(public_functions()[name])[0]}
    assert named.isdisjoint(NOT_YET)
    assert without - named == NOT_YET
