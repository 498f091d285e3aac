"""Rows for tests/test_arguments.py: folders of photographs, and models in files."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from argument_rows import Fails, Row
from PIL import Image

from attnlib import models
from attnlib.train import seeded

CALLS = tempfile.TemporaryDirectory()  # it is removed when the tests end
FOLDER = Path(CALLS.name)


@cache
def photographs(classes=("lemon", "plum")):
    """A folder of four gray pictures for each class, and a broken one."""
    folder = FOLDER / "-".join(classes)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (24, 20), (9 * i, 50, 90)).save(folder / name / f"{i}.png")
    picture = folder / classes[0] / "9.jpg"
    Image.effect_noise((200, 200), 90).convert("RGB").save(picture)
    picture.write_bytes(picture.read_bytes()[:2000])
    return folder


def small(seed=0, **options):
    size = dict(img_size=16, patch_size=8, embed_dim=8, depth=1, num_heads=2, num_classes=2)
    with seeded(seed):
        return models.create_model("vit_tiny_patch16_224", **size | options)


@cache
def saved(number):
    models.save_model(small(number), FOLDER / f"model-{number}")
    return FOLDER / f"model-{number}"


def split(parts):
    """The names of the files of both parts with their labels, and a picture of each."""
    found = []
    for part in parts:
        whole = [i for i, (file, _) in enumerate(part.samples) if Path(file).suffix == ".png"]
        names = [(Path(file).parts[-3:], label) for file, label in part.samples]
        found.append((names, part[whole[0]][0]))
    return found


def weight(model):
    return model.head.weight.detach()


def stored(arguments):
    """The classifier in the folder of a call, if there is one; the folder is then removed."""
    folder = arguments["folder"]
    if not folder.is_dir():
        return None
    found = weight(models.load_model(folder))
    shutil.rmtree(folder)
    return found


THIRD = {
    "backbone.describe_model": Row(
        dict(model=small()), dict(model=small(depth=2), label_names=["a", "b"])
    ),
    "data.ImageFolder": Row(
        dict(samples=[(photographs() / "plum" / "0.png", 0)], classes=["plum", "lemon"]),
        dict(
            samples=[(photographs() / "plum" / "3.png", 0)],
            classes=["other", "lemon"],
            augment=lambda image: torch.zeros(3),
            config="vit_base_patch16_224",
            img_size=8,
        ),
        lambda folder: (folder.classes, folder[0]),
    ),
    "data.image_folder": Row(
        dict(path=photographs(), augment=False),
        dict(
            path=photographs(("lemon", "tomato")),
            valid=0.5,
            img_size=8,
            augment=lambda image: torch.zeros(3),
            seed=1,
            check=True,
        ),
        split,
    ),
    "models.load_model": Row(dict(path=saved(0)), dict(path=saved(1)), weight),
    "models.shipped_folder": Row(dict(name="none"), dict(name=Fails(3, "int", TypeError))),
    "models.save_model": Row(
        dict(model=small(), folder=FOLDER / "a"),
        dict(model=small(1), folder=Fails(saved(0) / "config.json", "exists", OSError)),
        after=stored,
    ),
}
