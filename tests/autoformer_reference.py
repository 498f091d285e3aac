"""What the authors' AutoFormer computes: `python tests/autoformer_reference.py CHECKOUT`.

CHECKOUT is a checkout of github.com/microsoft/Cream. Its class needs `torch._six`, which is no
longer there, so the folder AutoFormer/model is copied and that one import is replaced. A small
supernet gets random weights, also where the authors start with zeros or ones. All are multiples
of 1/64, so that one byte each keeps them. The file holds the weights under the authors' names,
images, and the outputs of some subnets; `tests/test_autoformer.py` reads it.
"""

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

OUT = Path(__file__).parents[1] / "benchmarks" / "results" / "autoformer_reference.safetensors"
REPLACED = {
    "from torch._six import container_abcs": "from collections import abc as container_abcs"
}
SUPERNET = dict(
    img_size=20,
    patch_size=4,
    in_chans=1,
    num_classes=7,
    embed_dim=128,
    depth=2,
    num_heads=2,
    mlp_ratio=1.0,
    max_relative_position=3,
)
OPTIONS = dict(qkv_bias=True, gp=True, relative_position=True, change_qkv=True)
SUBNETS = [  # width, heads and MLP ratio of each layer
    (128, [2, 2], [1.0, 1.0]),
    (96, [1, 2], [0.5, 1.0]),
    (112, [2, 1], [1.0, 0.5]),
    (96, [1], [0.5]),
]


def authors_class(checkout, folder):
    """The class of a mended copy of the authors' code in a folder."""
    shutil.copytree(Path(checkout) / "AutoFormer" / "model", Path(folder) / "model")
    utils = Path(folder) / "model" / "utils.py"
    text = utils.read_text()
    for old, new in REPLACED.items():
        if old not in text:
            raise ValueError(f"{utils.name} of the checkout must contain {old!r}")
        text = text.replace(old, new)
    utils.write_text(text)
    package = sys.modules["model"] = types.ModuleType("model")
    package.__path__ = [str(utils.parent)]
    return importlib.import_module("model.supernet_transformer").Vision_TransformerSuper


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    generator, tensors = torch.Generator().manual_seed(0), {}
    with tempfile.TemporaryDirectory() as folder:
        model = authors_class(arguments.checkout, folder)(**SUPERNET, **OPTIONS).eval()
    for key, x in model.state_dict().items():
        stored = (20 * torch.randn(x.shape, generator=generator)).round().clamp(-127, 127)
        tensors[key] = stored.to(torch.int8)
        x.copy_(stored / 64)
    images = torch.randn(3, 1, 20, 20, generator=generator)
    tensors["images"] = images
    for i, (width, heads, ratios) in enumerate(SUBNETS):
        depth = len(heads)
        config = dict(embed_dim=[width] * depth, layer_num=depth)
        model.set_sample_config(config | dict(num_heads=heads, mlp_ratio=ratios))
        with torch.no_grad():
            tensors[f"logits.{i}"] = model(images)
        count = model.get_sampled_params_numel(config | dict(num_heads=heads, mlp_ratio=ratios))
        tensors[f"parameters.{i}"] = torch.tensor(int(count))
    arguments.out.parent.mkdir(exist_ok=True)
    about = dict(supernet=json.dumps(SUPERNET), subnets=json.dumps(SUBNETS))
    save_file(tensors, arguments.out, metadata=about)
    print(f"{arguments.out.stat().st_size / 1000:.0f} kB in {arguments.out}")


if __name__ == "__main__":
    main()
