"""What every test needs before it starts."""

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import no_hypothesis
import pytest
import signatures
import torch

if find_spec("hypothesis") is None:  # as on a machine that is there for its GPU
    sys.modules["hypothesis"] = no_hypothesis
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

if find_spec("hypothesis") is None:
    collect_ignore = ["oracles"]  # nothing in there goes without it

signatures.install()  # before anything imports the library

from tools import torchvision_ops  # noqa: E402, F401  before any test that imports torchvision

pytest.register_assert_rewrite("world")  # its assertions say what differs
from world import changes, files, world  # noqa: E402

WITH_TRANSFORMERS_5 = "|".join(
    (
        r"test_a_part_of_the_attention_is_missing",
        r"test_detr\.py.*(transformers|published_size_in|tiny_speed|names_before)",
        r"test_gpt\.py.*\[(llama 3.1|linear)\]",
        r"test_mae\.py.*from_a_config",
        r"test_panoptic\.py.*(transformers|padded_batch|chosen_masks|authors_files)",
        r"test_transformer\.py.*marian",
    )
)
NEEDED = {  # (package, release): the tests that an older one cannot run
    ("triton", "3.4"): r"test_flash\.py|test_windows|triton",
    ("transformers", "5"): WITH_TRANSFORMERS_5,  # which itself needs PyTorch 2.6
    (
        "torch",
        "2.6",
    ): r"test_two_processes_share|test_scaling|test_exports_for_all_sizes_that_need",
}


def is_older(package, release):
    """Whether an older release of a package is installed; one that is missing is not."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return False
    numbers = [int(part) for part in re.findall(r"\d+", found)[:2]]
    return numbers < [int(part) for part in release.split(".")]


def pytest_configure(config):
    """Set how many calls `drawn` draws: a few, or under `-m slow` a hundred times as many."""
    from hypothesis import settings

    if hasattr(settings, "register_profile"):  # what stands in for Hypothesis has none
        number = 400 if config.option.markexpr == "slow" else 4
        settings.register_profile(
            "oracles", max_examples=number, deadline=None, derandomize=True, database=None
        )


def pytest_sessionstart(session):
    """Note which files there are."""
    session.files_before = files()


def pytest_sessionfinish(session):
    """Fail if tests have left files in the current directory, whichever worker ran them."""
    left = files() - session.files_before
    if left:
        print(f"\nthe tests have left {sorted(left)} in {os.getcwd()}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Skip what needs a later release than is installed, and say of what."""
    if config.option.markexpr == "slow":
        for item in items:
            if "/oracles/" in item.nodeid and hasattr(item.function, "hypothesis"):
                item.add_marker("slow")
    for (package, release), pattern in NEEDED.items():
        if is_older(package, release):
            skip = pytest.mark.skip(reason=f"needs {package} {release}")
            for item in items:
                if re.search(pattern, item.nodeid):
                    item.add_marker(skip)


@pytest.fixture
def quiet(monkeypatch):
    """No bars of progress, and one thread: with several, sums differ from run to run."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_world():
    """Each test leaves the settings of the process, and the current directory, as they were."""
    before = world()
    yield
    assert not changes(before, world())


@pytest.fixture
def fresh_accelerate():
    """Accelerate's state of a process that has not used it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states = (PartialState, AcceleratorState, GradientState)
    before = [dict(state._shared_state) for state in states]
    for state in states:
        state._shared_state.clear()
    yield
    for state, values in zip(states, before):
        state._shared_state.clear()
        state._shared_state.update(values)
