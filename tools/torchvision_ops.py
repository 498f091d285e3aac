"""Let torchvision be imported beside a PyTorch without CUDA.

The package index has one torchvision, built for the CUDA version of PyTorch. Beside a CPU
version its compiled half does not load and the import fails over two operators that nobody here
calls: their signatures are all it asks for. Where torchvision is whole, as on Colab, nothing
needs this file. Tests import it in conftest.py, notebooks by IPython's startup folder
(tools/notebooks.py), benchmarks by name.
"""

import importlib.util

import torch

if torch.version.cuda is None and importlib.util.find_spec("torchvision") is not None:
    # kept: the definitions go when it goes
    library = torch.library.Library("torchvision", "FRAGMENT")
    for signature in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        try:
            library.define(signature)
        except RuntimeError:  # a torchvision that is whole has defined it
            pass
