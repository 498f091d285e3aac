"""The former name of `attnlib.finetune`."""

from ._renamed import former_module


def __getattr__(name):
    return former_module("practice", name)
