"""The former name of `attnlib.vit_variants`."""

from ._renamed import former_module


def __getattr__(name):
    return former_module("modern", name)
