"""In place of hypothesis on a machine without it: tests by drawn examples are skipped."""

import pytest


def given(*arguments, **options):
    return pytest.mark.skip(reason="needs hypothesis")


def settings(*arguments, **options):
    return lambda function: function


class Strategy:
    """Any strategy, and any way to make one."""

    def __getattr__(self, name):
        return self

    def __call__(self, *arguments, **options):
        return self


strategies = Strategy()
