"""After a plain `pip install attnlib` a missing package is an error that names the extra."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPTIONAL = [  # what the extras bring; PyTorch itself brings sympy
    *("accelerate", "cycler", "huggingface_hub", "IPython", "matplotlib", "num2words"),
    *("onnx", "onnxruntime", "pycocotools", "sacrebleu", "scipy", "safetensors"),
    *(
        "sentencepiece",
        "sklearn",
        "timm",
        "tokenizers",
        "torchvision",
        "tqdm",
        "transformers",
        "triton",
    ),
]
CASES = {  # what is tried: the extra that its error names
    "import attnlib.train": "train",
    "import attnlib.plot": "plot",
    "from attnlib.data import number_words; number_words([7], 'de')": "data",
    "from attnlib.data import train_bpe; train_bpe(['one'], 300)": "data",
    "from attnlib.data import digits; digits()": "data",
    "from attnlib.models import read_weights; read_weights('x.safetensors')": "hub",
    "from attnlib.models import fetch_weights; fetch_weights('timm/vit')": "hub",
    "from attnlib.attention import attention_backend\nwith attention_backend('triton'): pass": (
        "triton"
    ),
    "from attnlib.detr import ResNet; ResNet()": "detection",
    "from attnlib.detr import HungarianMatcher as Matcher\n"
    "Matcher()(torch.zeros(0, 1, 2), torch.zeros(0, 1, 4), [])": "detection",
    "import attnlib.flash": "triton",
    "import attnlib.windows": "triton",
}
ALONE = [  # what needs PyTorch and NumPy alone
    "import attnlib.cost, attnlib.decoding, attnlib.backbone, attnlib.convert",
    "from attnlib.data import scenes; assert len(scenes(2)[0]) == 2",
    "x = torch.ones(1, 3, 224, 224)\n"
    "assert attnlib.create_model('vit_tiny_patch16_224')(x).shape == (1, 1000)",
]
PROGRAM = """
import json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # None: an import of it fails
import torch
import attnlib
said = {}
for code in json.loads(sys.argv[2]):
    try:
        exec(code)
        said[code] = ["", ""]
    except Exception as error:
        said[code] = [type(error).__name__, str(error)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """{code: [kind of error, message]} of every case, in a process without the extras."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "x.safetensors").write_bytes(b"")
    lists = json.dumps(OPTIONAL), json.dumps([*CASES, *ALONE])
    command = [sys.executable, "-c", PROGRAM, *lists]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("code", CASES)
def test_a_missing_package_is_an_error_that_names_the_extra(said, code):
    kind, message = said[code]
    assert kind in ("ImportError", "ModuleNotFoundError"), f"{kind}: {message}"
    assert f'pip install "attnlib[{CASES[code]}]"' in message


@pytest.mark.parametrize("code", ALONE)
def test_the_models_need_pytorch_and_numpy_alone(said, code):
    assert said[code] == ["", ""]
