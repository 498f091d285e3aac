"""From a folder of images to a prediction: the lines of the README, and what goes wrong."""

import json
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets

import attnlib
from attnlib import cli
from attnlib.backbone import describe_model
from attnlib.data import ImageFolder, image_folder, train_tokenizer
from attnlib.gpt import GPT, GPTConfig, text_batches, text_loss
from attnlib.models import (
    classify,
    create_model,
    data_config,
    list_models,
    load_model,
    preprocess,
    save_model,
    shipped_models,
)
from attnlib.train import fit, load_checkpoint

ROOT = Path(__file__).parent.parent
SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2)
COLORS = {"lemon": (230, 220, 40), "plum": (90, 30, 110), "tomato": (200, 30, 30)}


def picture(color, seed=0, size=(48, 40)):
    noise = np.random.default_rng(seed).normal(0, 30, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.array(color) + noise, 0, 255).astype(np.uint8))


def fill(folder, counts, ending="png"):
    """A folder for each class with so many pictures of its color."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            picture(COLORS[name], i).save(folder / name / f"{i:02}.{ending}")
    return folder


@pytest.fixture
def fruits(tmp_path):
    return fill(tmp_path / "fruits", {"lemon": 10, "plum": 10, "tomato": 5})


def small(**options):
    torch.manual_seed(0)
    return create_model("vit_tiny_patch16_224", **SMALL | dict(num_classes=3) | options)


# --- from a folder to a prediction ------------------------------------------------------------


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_the_readmes_lines(tmp_path, monkeypatch, ending):
    """As they stand there, with a model that ships and a batch as small as the folder."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "flowers", {"lemon": 10, "tomato": 10}, ending)
    picture(COLORS["tomato"], 99).save("mine.jpg")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(import attnlib\nimport.*?)```", readme, re.DOTALL)
    lines = lines.replace("swin_tiny_patch4_window7_224", "vit_collages")
    lines = lines.replace("lr=1e-4", "lr=1e-3, batch_size=8")
    found = {}
    torch.manual_seed(0)
    exec(lines, found)
    assert found["name"] == "lemon" and found["probability"] < 0.5  # the other is the best
    assert found["trained"].label_names == ["lemon", "tomato"]


def test_the_same_from_the_shell(fruits, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    picture(COLORS["plum"], 99).save("mine.jpg")
    command = "train fruits --model vit_collages --epochs 3 --batch-size 8 --lr 1e-3"
    cli.main([*command.split(), "--workers", "0"])
    out = capsys.readouterr().out
    assert "20 photographs of 3 classes, and 5 for validation" in out and "epoch 3" in out
    cli.main("classify run.json mine.jpg --map where.png".split())
    assert capsys.readouterr().out.split("\n")[0].endswith("plum")
    assert Image.open("where.png").size == (48, 40)
    with pytest.raises(SystemExit, match="weights"):
        cli.main("classify run.json mine.jpg --weights other.safetensors".split())


def test_without_a_network_the_error_names_what_ships(fruits, monkeypatch):
    import huggingface_hub

    def offline(*args, **options):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", offline)
    monkeypatch.setattr(attnlib.models, "_in_cache", lambda repository: None)
    with pytest.raises(ConnectionError, match="vit_collages"):
        create_model("vit_small_patch16_224", pretrained=True)
    classifiers = {"swin_collages", "tnt_collages", "vit_collages"}
    assert classifiers <= set(shipped_models()) and classifiers <= set(list_models())


# --- folders ----------------------------------------------------------------------------------


def test_files_and_classes_are_torchvisions(fruits):
    train, valid = image_folder(fruits, valid=0.2)
    peer = datasets.ImageFolder(str(fruits))
    assert train.classes == valid.classes == peer.classes
    assert sorted(train.samples + valid.samples) == sorted(peer.samples)
    assert [label for _, label in valid.samples] == [0, 0, 1, 1, 2]
    again, _ = image_folder(fruits, valid=0.2)
    other, _ = image_folder(fruits, valid=0.2, seed=1)
    assert again.samples == train.samples != other.samples


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "swin_tiny_patch4_window7_224"])
def test_validation_images_are_what_timm_makes(fruits, name):
    _, valid = image_folder(fruits)
    valid = valid.for_model(create_model(name, **dict(depth=1) if "vit" in name else {}))
    config = timm.data.resolve_model_data_config(timm.create_model(name))
    wanted = timm.data.create_transform(**config)
    for (path, label), (x, y) in zip(valid.samples, valid, strict=True):
        assert y == label and x.dtype == torch.float32
        torch.testing.assert_close(
            x, wanted(Image.open(path).convert("RGB")), atol=1e-5, rtol=0
        )


def test_training_images_are_random_crops_in_the_models_normalization(fruits):
    train, _ = image_folder(fruits)
    train = train.for_model(small())
    one, two = train[0][0], train[0][0]
    assert one.shape == (3, 32, 32) and not torch.equal(one, two)
    assert type(one) is torch.Tensor
    config = data_config("vit_tiny_patch16_224", 32)
    assert train.data_config == config
    back = one * torch.tensor(config["std"]).view(3, 1, 1)
    back = back + torch.tensor(config["mean"]).view(3, 1, 1)
    assert -0.01 < back.min() and back.max() < 1.01
    yellow = torch.tensor(COLORS["lemon"]) / 255
    torch.testing.assert_close(back.mean((1, 2)), yellow, atol=0.06, rtol=0)
    plain, _ = image_folder(fruits, augment=False, img_size=(16, 24))
    assert plain[0][0].shape == (3, 16, 24) and torch.equal(plain[0][0], plain[0][0])
    own, _ = image_folder(fruits, augment=lambda image: torch.tensor([image.width]))
    assert own[0] == (torch.tensor([48]), 0)


def test_a_size_that_was_asked_for_stays(fruits):
    train, valid = image_folder(fruits, img_size=16)
    for part in (train, valid):
        assert part.for_model(small())[0][0].shape == (3, 16, 16)


def test_fit_gives_a_model_its_own_normalization(fruits, tmp_path):
    train, valid = image_folder(fruits)
    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0])
        return model(batch[0]).square().mean()

    before = dict(train.data_config)
    fit(small(), train, loss_fn=loss_fn, epochs=1, batch_size=20)
    mean = torch.tensor(data_config("vit_tiny_patch16_224")["mean"]).view(3, 1, 1)
    assert seen[0].shape == (20, 3, 32, 32)
    assert (seen[0] * 0.5 + mean).min() > -0.01  # each vit is normalized by 0.5 and 0.5
    assert train.data_config == before  # the caller's dataset is as it was
    with pytest.raises(ValueError, match="for_model"):
        fit(small(), DataLoader(train, batch_size=5), loss_fn=loss_fn, epochs=1)
    loader = DataLoader(train.for_model(small()), batch_size=5)
    fit(small(), loader, loss_fn=loss_fn, epochs=1)


def test_workers_load_what_one_process_loads(fruits):
    train, _ = image_folder(fruits)
    one, two = small(), small()
    fit(one, train, epochs=1, batch_size=5)
    fit(two, train, epochs=1, batch_size=5, num_workers=2)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_folders_that_are_split_already(tmp_path):
    fill(tmp_path / "train", {"lemon": 3, "plum": 3})
    fill(tmp_path / "val", {"lemon": 2, "plum": 1})
    train, valid = image_folder(tmp_path)
    assert (len(train), len(valid)) == (6, 3)
    fill(tmp_path / "test", {"lemon": 9, "plum": 9})
    assert len(image_folder(tmp_path)[1]) == 3  # still those of "val"
    assert len(image_folder(tmp_path, tmp_path / "test")[1]) == 18
    (tmp_path / "val").rename(tmp_path / "away")
    train, valid = image_folder(tmp_path, 0.34)
    assert (len(train), len(valid)) == (4, 2)  # the training images are split
    assert all("train" in file for file, _ in train.samples + valid.samples)
    fill(tmp_path / "other", {"lemon": 1, "tomato": 1})
    with pytest.raises(ValueError, match="only one has plum, tomato"):
        image_folder(tmp_path / "train", tmp_path / "other")


def test_a_dataset_can_be_sent_to_another_process(fruits):
    import pickle

    _, valid = image_folder(fruits)
    again = pickle.loads(pickle.dumps(valid))
    assert torch.equal(again[0][0], valid[0][0])


# --- what is no clean folder ------------------------------------------------------------------


def test_a_run_belongs_to_its_folder(fruits, tmp_path, capsys):
    """Another folder with as many classes is refused; a run that has ended says so."""
    other = fill(tmp_path / "others", {"lemon": 10, "plum": 10, "tomato": 5})
    (other / "plum").rename(other / "pear")
    run = dict(epochs=1, batch_size=20, checkpoint=tmp_path / "run.json")
    model = small()
    fit(model, *image_folder(fruits), **run)
    assert model.label_names == ["lemon", "plum", "tomato"]
    found = classify(model, fruits / "plum" / "00.png")
    assert {name for name, _ in found} == {"lemon", "plum", "tomato"}
    with pytest.raises(ValueError, match=r"classes \(\['lemon', 'pear', 'tomato'\]\) must be"):
        fit(small(), *image_folder(other), **run)
    for i in range(5):
        picture(COLORS["plum"], i).save(fruits / "plum" / f"more{i}.png")
    with pytest.raises(ValueError, match=r"examples \(24\) must be 20"):
        fit(small(), *image_folder(fruits), **run)
    for i in range(5):
        (fruits / "plum" / f"more{i}.png").unlink()
    capsys.readouterr()
    fit(small(), *image_folder(fruits), **run)
    assert "this run of 1 steps has ended" in capsys.readouterr().out
    with pytest.raises(ValueError, match="belongs to another model: vit_tiny_patch16_224, not"):
        deit = create_model("deit_tiny_patch16_224", num_classes=3, **SMALL)
        fit(deit, *image_folder(fruits), **run)


def test_files_that_are_no_images_are_counted(fruits):
    (fruits / "plum" / "notes.txt").write_text("no ending of an image")
    (fruits / "plum" / "text.jpg").write_text("no image")
    (fruits / "plum" / "empty.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot be read and are left out: 2") as found:
        train, valid = image_folder(fruits)
    assert "empty.png" in str(found[0].message) and len(train) + len(valid) == 25


def test_a_photograph_that_is_cut_off(fruits):
    path = fruits / "plum" / "cut.jpg"
    picture(COLORS["plum"], size=(400, 300)).save(path)
    path.write_bytes(path.read_bytes()[:5000])
    train, valid = image_folder(fruits)
    part = train if str(path) in dict(train.samples) else valid
    i = [file for file, _ in part.samples].index(str(path))
    with pytest.raises(ValueError, match=r"cut\.jpg cannot be read .*check=True"):
        part[i]
    with pytest.warns(UserWarning, match=r"files that cannot be read .*: 1 .*cut\.jpg"):
        train, valid = image_folder(fruits, check=True)
    assert len(train) + len(valid) == 25


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "LA", "I;16", "1"])
def test_other_kinds_of_images_are_colors(fruits, mode):
    path = fruits / "plum" / "other.tiff"
    gray = picture((90, 90, 90)).convert("L")
    if mode == "I;16":
        Image.fromarray(np.asarray(gray).astype(np.uint16) * 257).save(path)
    else:
        gray.convert("RGB" if mode in ("CMYK", "RGBA", "P") else "L").convert(mode).save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = ImageFolder([(path, 0)], ["plum", "lemon"], img_size=32)
        train, valid = image_folder(fruits)
    x, _ = whole[0]
    assert x.shape == (3, 32, 32) and x.isfinite().all()
    assert len(train) + len(valid) == 26


def test_animated_images_give_their_first_picture(fruits):
    frames = [picture(color) for color in COLORS.values()]
    path = fruits / "lemon" / "moving.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    (fruits / "lemon" / "moving.gif").rename(fruits / "lemon" / "moving.png")
    with pytest.warns(UserWarning, match="the first picture of each is taken: 1"):
        image_folder(fruits)
    x, _ = ImageFolder([(fruits / "lemon" / "moving.png", 0)], ["lemon", "plum"], img_size=32)[
        0
    ]
    y = preprocess(data_config("deit_base_patch16_224", 32))(frames[0].quantize())
    torch.testing.assert_close(x, y[0], atol=0.2, rtol=0)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda path: path / "nowhere", FileNotFoundError, "nowhere is no folder"),
        (
            lambda path: path / "lemon",
            FileNotFoundError,
            "lemon has no folder in it; .* for each class",
        ),
        (lambda path: (path / "empty").mkdir() or path, FileNotFoundError, "empty"),
    ],
)
def test_folders_without_images(fruits, change, error, message):
    with pytest.raises(error, match=message):
        image_folder(change(fruits))


def test_too_little_to_split(tmp_path):
    fill(tmp_path / "one", {"lemon": 4})
    with pytest.raises(ValueError, match="at least two classes; it has only lemon"):
        image_folder(tmp_path / "one")
    fill(tmp_path / "few", {"lemon": 1, "plum": 1})
    with pytest.raises(ValueError, match="no image for validation"):
        image_folder(tmp_path / "few")
    for valid in (0, 1, 1.5, -0.1):
        with pytest.raises(ValueError, match=rf"valid \({valid}\)"):
            image_folder(tmp_path / "few", valid)
    (tmp_path / "broken" / "lemon").mkdir(parents=True)
    fill(tmp_path / "broken", {"plum": 3})
    (tmp_path / "broken" / "lemon" / "a.png").write_bytes(b"no image")
    with pytest.warns(UserWarning), pytest.raises(FileNotFoundError, match="in lemon"):
        image_folder(tmp_path / "broken")


def test_calls_draw_nothing_from_global_generators(fruits):
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    image_folder(fruits)
    assert random.getstate() == state[0] and np.random.get_state()[1].tolist() == state[1]
    assert torch.equal(torch.get_rng_state(), state[2])


# --- a checkpoint is a model ------------------------------------------------------------------

NAMES = ("vit_collages", "swin_collages", "tnt_collages", "deit_tiny_distilled_patch16_224")


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_model_is_the_trained_one(tmp_path, name):
    torch.manual_seed(0)
    size = {} if "collages" in name else SMALL
    model = create_model(name, num_classes=4, drop_path_rate=0.1, **size)
    side = model.data_config["input_size"][-1]
    data = torch.randn(8, 3, side, side), torch.randint(4, (8,))
    path = tmp_path / "run.json"
    fit(model, data, steps=2, batch_size=4, log_every=1, checkpoint=path)
    for again in (load_model(path), create_model(name, path, num_classes=4, **size).eval()):
        assert type(again) is type(model) and again.data_config == model.data_config
        with torch.no_grad():
            assert torch.equal(again(data[0]), model.eval()(data[0]))
    save_model(model, tmp_path / "saved")
    saved = load_model(tmp_path / "saved")
    assert not saved.training and describe_model(saved) == describe_model(model)
    with torch.no_grad():
        assert torch.equal(saved(data[0]), model(data[0]))
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_the_best_weights_are_loaded(fruits, tmp_path):
    train, valid = image_folder(fruits)
    path = tmp_path / "run.json"
    history = fit(
        small(), train, valid, epochs=6, batch_size=5, lr=5e-3, ema=0.5, checkpoint=path
    )
    model = load_model(path)
    assert model.label_names == ["lemon", "plum", "tomato"]
    x, y = zip(*valid.for_model(model), strict=True)
    with torch.no_grad():
        right = (model(torch.stack(x)).argmax(-1) == torch.tensor(y)).float().mean().item()
    assert right == pytest.approx(max(record["accuracy"] for record in history))
    tensors, _ = load_checkpoint(path)
    assert torch.equal(tensors["best.head.weight"], model.head.weight)


def test_a_swin_v2_remembers_the_window_of_its_training(tmp_path):
    torch.manual_seed(0)
    model = create_model("swinv2_tiny_window8_256", img_size=64, window_size=4, depths=(2, 2),
                         embed_dim=16, num_heads=(1, 2), num_classes=3)  # fmt: skip
    model.set_input_size(img_size=128, window_size=8)
    expected = [part.trained_window() for part in layers(model)]
    save_model(model, tmp_path)
    data = torch.randn(4, 3, 128, 128), torch.arange(4) % 3
    again = load_model(tmp_path)
    assert [part.trained_window() for part in layers(again)] == expected
    with torch.no_grad():
        torch.testing.assert_close(again(data[0]), model.eval()(data[0]))


def layers(model):
    return [part for part in model.modules() if hasattr(part, "trained_window")]


CHANGED = {
    "vit_tiny_patch16_224": dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2),
    "deit_tiny_distilled_patch16_224": SMALL,
    "beit_base_patch16_224": SMALL,
    "tnt_s_patch16_224": dict(img_size=32, patch_size=8, embed_dim=24, depth=2, inner_dim=8,
                              num_heads_outer=2, num_heads_inner=2),
    "swin_tiny_patch4_window7_224": dict(img_size=32, window_size=4, depths=(2, 2), embed_dim=8,
                                         num_heads=(1, 2)),
    "swinv2_tiny_window8_256": dict(img_size=32, window_size=4, depths=(2, 2), embed_dim=8,
                                    num_heads=(1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("pool", ["avg", None])
def test_a_model_that_was_changed_after_it_was_made(tmp_path, name, pool):
    """Another head, pooling, size of the images, and window; the loaded model is the same."""
    torch.manual_seed(0)
    model = create_model(name, **CHANGED[name])
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.set_input_size(64, **dict(window_size=8) if "swin" in name else {})
    if "distilled" not in name:
        model.reset_classifier(7, pool)
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again(x), model.eval()(x))
    assert again.data_config == model.data_config and again.num_classes == model.num_classes


@pytest.mark.parametrize("options", [dict(device="cpu"), dict(dtype=torch.float64)])
def test_where_a_model_was_is_not_stored(tmp_path, options):
    model = small(**options)
    save_model(model, tmp_path)
    assert not {"device", "dtype"} & describe_model(model)["model_args"].keys()
    again = load_model(tmp_path)
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_gpt_comes_with_its_tokenizer(tmp_path):
    tokenizer = train_tokenizer(["to be or not to be that is the question"] * 3, 300)
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=tokenizer.get_vocab_size(), block_size=16, n_layer=1,
                       n_head=2, n_embd=16, rope_scaling=None)  # fmt: skip
    model = GPT(config)
    model.tokenizer = tokenizer
    ids = torch.tensor(tokenizer.encode("to be or not to be that is the question").ids * 4)
    path = tmp_path / "gpt.json"
    fit(model, text_batches(ids, 8, 2), loss_fn=text_loss, steps=2, checkpoint=path)
    again = load_model(path)
    assert again.config == config and again.tokenizer.to_str() == tokenizer.to_str()
    assert torch.equal(again(ids[None, :8]), model.eval()(ids[None, :8]))


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json is not a file"):
        load_model(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"other\.json does not say how its model was made"):
        load_model(tmp_path / "other.json")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(tmp_path)
    path = tmp_path / "plain.json"
    fit(torch.nn.Linear(3, 2), (torch.randn(8, 3), torch.arange(8) % 2), steps=1, batch_size=4,
        checkpoint=path)  # fmt: skip
    with pytest.raises(ValueError, match=r"plain\.json does not say"):
        load_model(path)
    with pytest.raises(ValueError, match=r"model \(Linear\)"):
        save_model(torch.nn.Linear(3, 2), tmp_path / "x")
    assert describe_model(small(norm_layer=torch.nn.LayerNorm)) is None


def test_a_checkpoint_of_another_version(tmp_path):
    save_model(small(), tmp_path)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    for change in (
        dict(architecture="vit_of_tomorrow"),
        dict(model_args=stored["model_args"] | dict(no_such_option=1)),
        dict(model_args=stored["model_args"] | dict(depth=3)),
    ):
        file.write_text(json.dumps(stored | change | dict(attnlib="9.9")))
        with pytest.raises(ValueError, match=r"config\.json, written by version 9\.9"):
            load_model(tmp_path)


def test_classes_have_the_names_of_the_folders(tmp_path, fruits):
    model = small()
    model.label_names = ["a", "b", "c"]
    found = classify(model.eval(), fruits / "plum" / "00.png")
    assert {name for name, _ in found} == {"a", "b", "c"}
    assert [name for name, _ in classify(model, fruits / "plum" / "00.png", names="xyz")] != []


def test_the_root_imports_little_and_finds_the_rest():
    assert attnlib.fit is fit and attnlib.image_folder is image_folder
    assert (
        attnlib.load_model is load_model and attnlib.finetune is sys.modules["attnlib.finetune"]
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        attnlib.nothing  # noqa: B018


def test_a_star_import_has_what_help_lists_and_needs_no_torchvision():
    code = """
import sys
from attnlib import *
import attnlib, pydoc
assert fit is attnlib.train.fit and image_folder is attnlib.data.image_folder
text = pydoc.plaintext.document(attnlib)
for name in attnlib.__all__:
    assert f"{name}(" in text or name in ("attention",), name
assert "\\n    fit(" in text and "\\n    image_folder(" in text
assert "torchvision" not in sys.modules and "timm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_without_the_training_extra_a_star_import_works():
    """`fit` is then missing, and said to need it; `help` works as well."""
    code = """
import importlib.util, sys
for name in ("accelerate", "tqdm"):
    sys.modules[name] = None
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: (
    None if name in ("accelerate", "tqdm") else find(name, *rest))
from attnlib import *
import attnlib, pydoc
assert "fit" not in globals() and image_folder
pydoc.plaintext.document(attnlib)
try:
    attnlib.fit
except ImportError as error:
    assert "attnlib[train]" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# --- a text of one's own ----------------------------------------------------------------------


def test_the_readmes_gpt(tmp_path, monkeypatch, capsys):
    """As it stands there, in fewer steps; what it wrote is what `generate` writes."""
    monkeypatch.chdir(tmp_path)
    text = "the cat sat on the mat and the dog sat on the log. " * 60
    Path("mine.txt").write_text(text, encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(import attnlib\n\ntext.*?)```", readme, re.DOTALL)
    assert len([line for line in lines.splitlines() if line.strip()]) == 8
    lines = lines.replace("length=128", "length=32").replace("steps=500", "steps=60")
    found = {}
    torch.manual_seed(0)
    exec(lines.replace("n_layer=4", "n_layer=1"), found)
    said = capsys.readouterr().out
    assert said.startswith("step 60 of 60, loss ") and "\nOnce upon a time" in said
    again = load_model("gpt.json")
    assert again.write("the cat", 8, temperature=0.0).startswith("the cat sat on the")
    ids = again.tokenizer.encode("the cat").ids
    wanted = again.generate(torch.tensor([ids]), 8, temperature=0.0)[0].tolist()
    assert again.write("the cat", 8, temperature=0.0) == again.tokenizer.decode(wanted)


def test_the_default_loss_of_a_gpt_is_that_of_the_next_token():
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=40, block_size=16, n_layer=1, n_head=2, n_embd=16)
    one, two = GPT(config), GPT(config)
    two.load_state_dict(one.state_dict())
    tokens = torch.arange(200) % 40
    runs = [fit(one, text_batches(tokens, 8, 4), steps=3, log_every=1)]
    runs.append(fit(two, text_batches(tokens.tolist(), 8, 4), loss_fn=text_loss, steps=3,
                    log_every=1))  # fmt: skip
    assert runs[0] == runs[1]
    (batch,) = text_batches(tokens, 8, 4)(0)
    with torch.no_grad():
        probabilities = one.eval()(batch[:, :-1]).double().softmax(-1)
        total, count = GPT.default_loss(one, (batch,))
    wanted = -probabilities.gather(-1, batch[:, 1:, None]).log().sum()
    assert count == 32 and torch.isclose(total.double(), wanted, rtol=1e-5)


def test_what_cannot_be_written():
    model = GPT(GPTConfig(vocab_size=300, block_size=16, n_layer=1, n_head=2, n_embd=16))
    with pytest.raises(ValueError, match=r"model\.tokenizer must be set"):
        model.write("to be")
    model.tokenizer = train_tokenizer("to be or not to be", 300)
    with pytest.raises(ValueError, match=r"prompt \(''\) must have at least one token"):
        model.write("")
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.write("to be", 0)
