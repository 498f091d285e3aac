"""What every test needs before it starts."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

from tools import torchvision_ops  # noqa: F401  before any test that imports torchvision
