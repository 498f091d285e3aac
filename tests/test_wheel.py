"""What is installed: the command, types, records, and how large and how quick all of it is."""

import os
import statistics
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from attnlib.models import read_weights
from benchmarks.runner import save_half
from tools import notebooks

MB = 10**6
LIBRARY = Path(__file__).parent.parent / "attnlib"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder in which the wheel is installed; the wheel lies beside it."""
    return notebooks.install(tmp_path_factory.mktemp("wheel"))


def run(site, *command):
    """What a command prints, run in an empty folder beside the installed wheel."""
    env = dict(os.environ, PYTHONPATH=str(site), OMP_NUM_THREADS="1")
    folder = site.parent / "elsewhere"
    folder.mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_command_runs(site):
    command = site / "bin" / "attnlib"
    assert run(site, sys.executable, command, "models", "vit_tiny*") == "vit_tiny_patch16_224\n"
    facts = run(site, sys.executable, command, "show", "swin_collages")
    assert "parameters   568,198" in facts


def test_the_wheel_is_small(site):
    """The library at most 1 MB; with records and trained weights 25 MB."""
    (wheel,) = (site.parent / "dist").glob("*.whl")
    sizes = {each.filename: each.compress_size for each in zipfile.ZipFile(wheel).infolist()}
    data = ("attnlib/results/", "attnlib/shipped/")
    library = sum(size for name, size in sizes.items() if not name.startswith(data))
    assert wheel.stat().st_size <= 25 * MB, f"{wheel.stat().st_size:,} bytes"
    assert library <= 1 * MB, f"{library:,} bytes"
    assert sum("results/" in name for name in sizes) > 60  # and the records are there
    shipped = {f"attnlib/{file.relative_to(LIBRARY)}" for file in LIBRARY.glob("shipped/*/*")}
    assert shipped == {name for name in sizes if "attnlib/shipped/" in name}


def test_rounded_weights_are_read_like_others_and_pack_better(tmp_path):
    torch.manual_seed(0)
    state = {"w": torch.randn(64, 256) / 16, "zero": torch.zeros(3), "count": torch.tensor(5)}
    packed = {}
    for bits in (11, 7):
        path = tmp_path / f"{bits}.safetensors"
        save_half(state, path, bits)
        found, packed[bits] = read_weights(path), len(zlib.compress(path.read_bytes()))
        assert found["w"].dtype == torch.float16 and found["count"] == 5
        off = (found["w"].float() - state["w"]).abs()
        assert (off <= 2.0**-bits * state["w"].abs() + 2.0**-24).all()
        assert not found["zero"].any()
    assert packed[7] < 0.85 * packed[11]


def test_types_are_installed(site):
    """Checkers read the modules themselves, and a stub would hide one."""
    assert (site / "attnlib" / "py.typed").exists()
    assert list((site / "attnlib").rglob("*.pyi")) == []


def test_the_import_is_quick(site):
    """`import attnlib` takes less than 0.3 s beyond `import torch`: the median of three."""
    program = (
        "import time, torch; began = time.process_time(); import attnlib;"
        "print(time.process_time() - began, attnlib.__file__)"
    )
    said = [run(site, sys.executable, "-c", program).split() for _ in range(3)]
    assert all(Path(path).is_relative_to(site) for _, path in said)
    assert statistics.median(float(seconds) for seconds, _ in said) < 0.3


def test_importing_brings_no_extra(site):
    """What an extra brings is imported where it is needed, not with the library."""
    program = (
        "import torch, sys; before = set(sys.modules); import attnlib;"
        "print(*set(sys.modules) - before)"
    )
    found = {name.split(".")[0] for name in run(site, sys.executable, "-c", program).split()}
    assert "attnlib" in found
    extras = {"matplotlib", "timm", "torchvision", "transformers", "sklearn", "PIL", "triton"}
    assert not found & extras
