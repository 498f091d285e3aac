"""What a test, or a call, must leave as it was: `world` and `unchanged`; and all functions."""

import os
import random
import sys
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import torch
from torch.nn.modules import module as nn_module

import attnlib
from attnlib._renamed import MODULES

attention = import_module("attnlib.attention")  # `attnlib.attention` is the function
CACHES = {".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}
OTHERS = {  # variables that pytest, PyTorch's compiler and scikit-learn set for themselves
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}
PLAIN = (bool, int, float, str, tuple, type(None))  # kinds of attributes that are compared
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


# --- the world: what is one for the whole process ---------------------------------------------


def precision():
    """The float32 precision of matrix products, by whichever interface PyTorch has."""
    libraries = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}
    found = {name: attention.float32_products(name) for name in libraries}
    try:
        found["all"] = torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch 2.9 refuses to answer once the libraries differ
        found["all"] = "they differ"
    return found


def autocast():
    devices = "cpu", "cuda"
    return {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in devices
    }


def deterministic():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )


def kernels():
    """Which kernels PyTorch may choose from."""
    return (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def environment():
    """The environment without what other libraries set."""
    others = {name for name in os.environ if name in OTHERS or "TORCHINDUCTOR" in name}
    return {name: value for name, value in os.environ.items() if name not in others}


def backends():
    """Registered backends, without those that attnlib's own modules add on import."""
    own = "attnlib."
    return {
        key: function
        for key, function in attention.BACKENDS.items()
        if not getattr(function, "__module__", "").startswith(own)
    }


def model_names():
    """The names of models, if the module that holds them is imported."""
    models = sys.modules.get("attnlib.models")
    return None if models is None else set(models.MODELS)


def hooks_of_all():
    """The numbers of hooks that are called for every module."""
    names = [name for name in vars(nn_module) if name.startswith("_global_")]
    tables = [getattr(nn_module, name) for name in sorted(names)]
    return [len(table) for table in tables if isinstance(table, dict)]


def files():
    """The names in the current directory but for those of caches.

    With several workers the files of one test would be counted against another's: there only
    the session as a whole is held to them.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return set()
    return set(os.listdir()) - CACHES


WORLD = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "threads": torch.get_num_threads,
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "autocast": autocast,
    "float32 precision": precision,
    "deterministic algorithms": deterministic,
    "kernels": kernels,
    "process group": torch.distributed.is_initialized,
    "environment": environment,
    "current directory": os.getcwd,
    "attention backend": attention.current_backend,
    "registered backends": backends,
    "registered models": model_names,
    "global hooks": hooks_of_all,
    "files": files,
}


def world():
    """The state of the process, {name: value}."""
    return {name: look() for name, look in WORLD.items()}


def changes(before, after):
    """What differs between two states, {name: (before, after)}; of a dict its entries only."""
    found = {}
    for name in before:
        a, b = before[name], after[name]
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            keys = [key for key in a.keys() | b.keys() if a.get(key) != b.get(key)]
            a, b = ({key: x[key] for key in keys if key in x} for x in (a, b))
        found[name] = (a, b)
    return found


# --- a call: what it must leave as it was -----------------------------------------------------


def same(a, b):
    """Whether two values are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return alike and torch.equal(a.nan_to_num(), b.nan_to_num())
    return a is b or a == b


def generators():
    """The states of the global random number generators."""
    name, keys, *rest = np.random.get_state()
    found = {
        "PyTorch": torch.get_rng_state(),
        "NumPy": (name, keys.tobytes(), *rest),
        "Python": random.getstate(),
    }
    for number in range(torch.cuda.device_count()):
        found[f"GPU {number}"] = torch.cuda.get_rng_state(number)
    return found


def tensors_of(model):
    """Parameters and buffers by name: which they are, their values, flags and gradients."""
    found = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        found |= {
            f"{name} (which)": id(x),
            f"{name} (value)": x.detach().clone(),
            f"{name} (requires_grad)": x.requires_grad,
            f"{name} (gradient)": None if x.grad is None else x.grad.clone(),
            f"{name} (hooks)": len(x._backward_hooks or ()),
        }
    for name, x in model.named_buffers(remove_duplicate=False):
        found[f"{name} (value)"] = x.clone()
    return found


def modules_of(model):
    """Modules by name: which they are, their types, modes, hooks and plain attributes."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        name = name or "model"
        found |= {
            f"{name} (which)": id(module),
            f"{name} (type)": type(module),
            f"{name} (training)": module.training,
            f"{name} (methods)": sorted(x for x in vars(module) if callable(vars(module)[x])),
        }
        found |= {f"{name} ({kind})": len(getattr(module, kind, ())) for kind in HOOKS}
        for key, value in vars(module).items():
            if isinstance(value, PLAIN) and key != "training":
                found[f"{name}.{key}"] = value
    return found


def state_of(model):
    """All that a call on a model must leave, {name: value}."""
    return tensors_of(model) | modules_of(model)


def differences(before, after):
    """The names of what differs between two states."""
    names = list(dict.fromkeys([*before, *after]))
    missing = object()
    return [
        name for name in names if not same(before.get(name, missing), after.get(name, missing))
    ]


@contextmanager
def unchanged(*models, numbers=True):
    """Raise AssertionError if the `with` block changes a model, or the world.

    Parameters
    ----------
    *models : torch.nn.Module
        Held are type, identity, mode, hooks and plain attributes of each module, identity,
        value, gradient and `requires_grad` of each parameter, and the values of buffers.
    numbers : bool
        Whether the block may draw no random number, by PyTorch, NumPy or Python.
    """
    states = [state_of(model) for model in models]
    drawn, outside = generators(), world()
    yield
    assert not changes(outside, world())
    for model, before in zip(models, states):
        assert not differences(before, state_of(model))
    if numbers:
        assert not differences(drawn, generators())


# --- all functions ----------------------------------------------------------------------------


@cache
def public_functions():
    """The library's public functions and classes, {"module.name": object}."""
    found = {}
    for name in sorted(one.name for one in iter_modules(attnlib.__path__)):
        if name.startswith("_") or name in MODULES:  # a former name
            continue
        module = import_module(f"attnlib.{name}")
        for key in module.__all__:
            one = getattr(module, key)
            if callable(one) and getattr(one, "__module__", None) == module.__name__:
                found[f"{name}.{key}"] = one
    return found


def function_named(name):
    """A function or class of the library, "module.name"; it may be private."""
    module, key = name.split(".")
    return getattr(import_module(f"attnlib.{module}"), key)
