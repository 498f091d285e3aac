"""The command `attnlib`: what it prints, what it writes, and what it says to mistakes."""

import sys
from functools import partial
from importlib.abc import MetaPathFinder

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from attnlib import __version__, attention_backend, cli
from attnlib.data import cifar, collages
from attnlib.detr import DETR
from attnlib.models import (
    MODELS,
    create_model,
    list_models,
    load_model,
    save_model,
    unwrap_state_dict,
)
from attnlib.train import fit
from attnlib.vit import VisionTransformer
from tools import torchvision_ops  # noqa: F401  before timm

timm = pytest.importorskip("timm")
COLLAGES = ("vit_collages", "swin_collages", "tnt_collages")


@pytest.fixture
def picture(tmp_path):
    """A collage as a file."""
    image = collages(1, "test", seed=9)["image"][0]
    path = tmp_path / "picture.png"
    Image.fromarray((255 * image).round().byte().permute(1, 2, 0).numpy()).save(path)
    return path


def said(capsys, *arguments):
    cli.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def refused(*arguments):
    """The line of an error, whose exit status is 1."""
    with pytest.raises(SystemExit) as problem:
        cli.main([str(argument) for argument in arguments])
    assert str(problem.value).startswith("attnlib: ")
    return str(problem.value)


def test_all_models_are_listed(capsys):
    assert said(capsys, "models").split() == list_models()


# --- show -------------------------------------------------------------------------------------


def test_facts_agree_with_the_model(capsys):
    lines = said(capsys, "show", "vit_base_patch16_224").splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines)
    assert facts["parameters"] == "86,567,656"
    assert facts["operations"] == "35.1 billion"  # 17.56 billion multiplications (timm: 17.58)
    assert facts["input"] == "3 × 224 × 224" and facts["mean"] == "0.5, 0.5, 0.5"
    assert facts["accuracy"].startswith("85.108 %") and facts["license"] == "Apache-2.0"
    assert facts["weights"] == "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k on the hub"


def test_operations_that_hang_on_the_image_are_not_counted():
    facts = cli.describe("detr_resnet50_panoptic")
    assert facts["operations"] == "depend on what is in the image"
    assert facts["class"] == "attnlib.panoptic.PanopticDETR"
    assert facts["parameters"] == "42,899,288"
    assert facts["accuracy"].startswith("43.4 PQ") and facts["license"] == "Apache-2.0"
    assert facts["weights"] == "facebook/detr-resnet-50-panoptic on the hub"


def test_operations_are_those_of_real_numbers():
    """The meta device counts what a forward pass with numbers does."""
    from torch.utils.flop_counter import FlopCounterMode

    model, x = create_model("swin_collages").eval(), torch.randn(1, 3, 64, 64)
    counter = FlopCounterMode(display=False)  # which knows no fused attention of CPUs
    with torch.no_grad(), attention_backend("reference"), counter:
        model(x)
    wanted = f"{counter.get_total_flops() / 1e9:.3g} billion"
    assert cli.describe("swin_collages")["operations"] == wanted


def test_licenses_are_those_that_timm_knows():
    for name, (_, hub, _) in MODELS.items():
        if hub and hub.startswith("timm/"):
            known = timm.get_pretrained_cfg(hub.partition("/")[2]).license
            found = next(own for pattern, own in cli._LICENSES if cli.fnmatch(hub, pattern))
            assert found.lower() == known, name


def test_an_accuracy_belongs_to_weights_that_classify():
    for name in cli._TOP1:
        weights = timm.get_pretrained_cfg(MODELS[name][1].partition("/")[2])
        assert weights.num_classes == 1000, name
    assert set(cli._REPORTED) <= set(MODELS)


def test_what_is_not_known_is_not_invented():
    facts = cli.describe("mae_vit_base_patch16")
    assert facts["accuracy"] == facts["license"] == cli._UNKNOWN
    assert cli.describe("autoformer_tiny")["weights"] == "none are published"


# --- classify ---------------------------------------------------------------------------------


def test_a_picture_is_named_and_the_map_written(capsys, picture, tmp_path):
    first = said(capsys, "classify", "vit_collages", picture, "--map", tmp_path / "map.png")
    lines = first.splitlines()
    assert len(lines) == 5 and lines[0].split()[1] == "zero"
    assert Image.open(tmp_path / "map.png").size == (64, 64)


@pytest.mark.parametrize("name", COLLAGES)
def test_the_map_is_brightest_on_the_digit_that_is_named(name, picture, tmp_path):
    """The digit covers the upper middle; the orange there is more than elsewhere."""
    cli.predict(name, picture, map=tmp_path / "map.png")
    drawn = np.asarray(Image.open(tmp_path / "map.png")).astype(float)
    orange = drawn[..., 0] - drawn[..., 2]  # 0 in gray
    inside = np.zeros((64, 64), bool)
    inside[:26, 24:48] = True
    assert orange[inside].mean() > 2 * orange[~inside].mean()


def test_shares_add_up_to_one():
    """Of a ViT's patches and its class token, of a Swin's last window alone."""
    x = torch.randn(1, 3, 64, 64)
    vit, swin = (create_model(f"{name}_collages").eval() for name in ("vit", "swin"))
    assert cli._attention_map(vit, x).shape == (8, 8) and cli._attention_map(vit, x).sum() < 1
    torch.testing.assert_close(cli._attention_map(swin, x).sum(), torch.tensor(1.0))
    token = cli._attention_map(vit, x)
    vit.set_pool("avg")  # another reader, other rows
    assert not torch.allclose(token, cli._attention_map(vit, x), rtol=0.01)


def test_shares_in_several_windows_are_refused():
    """Averaged over windows, they would say nothing of the map."""
    swin = create_model("swin_collages").eval()
    x = torch.randn(1, 3, 128, 128)
    with pytest.raises(ValueError, match="model has 4 windows of 16 tokens in its last block"):
        cli._attention_map(swin, x)


def test_shares_of_a_model_without_class_token():
    model = VisionTransformer(
        32, 8, embed_dim=12, depth=2, num_heads=2, class_token=False, global_pool="avg"
    )
    shares = cli._attention_map(model.eval(), torch.randn(1, 3, 32, 32))
    assert shares.shape == (4, 4)
    torch.testing.assert_close(shares.sum(), torch.tensor(1.0))


def test_a_model_without_a_classifier_is_no_matter_of_its_weights(picture):
    for name in ("mae_vit_base_patch16", "vit_small_patch14_dinov2"):
        assert "has no classifier" in refused("classify", name, picture)


class Mismatched(MetaPathFinder):
    """An import of torchvision that fails as beside a PyTorch of another kind."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torchvision", "timm"):
            raise RuntimeError("operator torchvision::nms does not exist")


@pytest.mark.parametrize(
    "call",
    [
        lambda: cli._benchmark("vit_tiny_patch16_224"),
        lambda: create_model("detr_resnet50"),
        lambda: DETR(91),
        lambda: cifar(),
    ],
)
def test_a_torchvision_of_another_kind_is_said_to_be_one(call, monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("torchvision", "timm"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Mismatched(), *sys.meta_path])
    with pytest.raises(ImportError, match="torchvision does not fit PyTorch .* of one kind"):
        call()


def test_weights_of_a_file_are_used(picture, tmp_path):
    tensors = unwrap_state_dict("attnlib/vit_collages")
    tensors["head.bias"] = tensors["head.bias"] + 100 * torch.eye(10)[7]
    save_file(tensors, tmp_path / "other.safetensors")
    (best, p), *_ = cli.predict("vit_collages", picture, tmp_path / "other.safetensors")
    assert best == "seven" and p > 0.99


def test_several_pictures(capsys, picture, tmp_path):
    """Each under its name, as alone; those that cannot be read are named at the end."""
    alone = said(capsys, "classify", "vit_collages", picture)
    other = tmp_path / "other.png"
    Image.new("RGB", (80, 70), (200, 30, 30)).save(other)
    found = said(capsys, "classify", "vit_collages", picture, other)
    second = said(capsys, "classify", "vit_collages", other)
    assert found == f"{picture}\n{alone}{other}\n{second}"
    (tmp_path / "notes.txt").write_text("no picture")
    problem = refused("classify", "vit_collages", tmp_path / "notes.txt", other)
    assert "notes.txt" in problem and "other.png" not in problem
    assert capsys.readouterr().out == f"{other}\n{second}"
    one = tmp_path / "map.png"
    problem = refused("classify", "vit_collages", picture, other, "--map", one)
    assert "can be drawn of one IMAGE; there are 2" in problem and not one.exists()


def test_the_map_of_a_photograph_has_its_size(tmp_path):
    Image.new("RGB", (300, 200), (90, 120, 30)).save(tmp_path / "wide.jpg")
    cli.predict("vit_collages", tmp_path / "wide.jpg", map=tmp_path / "map.png")
    assert Image.open(tmp_path / "map.png").size == (300, 200)


# --- mistakes ---------------------------------------------------------------------------------


def test_mistakes_have_one_line(picture, tmp_path):
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "cut.png").write_bytes(picture.read_bytes()[:200])
    assert "nearest names: vit_tiny_patch16_224" in refused("show", "vit_tiny_patch16_22")
    assert "('resnet*') fits no name" in refused("models", "resnet*")
    for name in ("notes.txt", "cut.png", "none.png"):
        problem = refused("classify", "vit_collages", tmp_path / name)
        assert name in problem and "must be an image that Pillow can read" in problem
    assert "none are published" in refused("classify", "autoformer_tiny", picture)
    missing = tmp_path / "no.safetensors"
    assert "is not a file" in refused("classify", "vit_collages", picture, "--weights", missing)
    assert "must be a model of timm's" in refused("bench", "swin_collages")
    assert "rounds (1) 2" in refused("bench", "vit_tiny_patch16_224", "--rounds", 1)


def test_without_a_part_the_help_lists_them(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert all(part in said for part in ("models", "show", "classify", "bench"))


def test_weights_without_a_classifier_are_refused(picture, tmp_path):
    headless = create_model("vit_collages", num_classes=0).state_dict()
    save_file(headless, tmp_path / "headless.safetensors")
    with pytest.warns(UserWarning, match="no classifier"):
        problem = refused(
            "classify", "vit_collages", picture, "--weights", tmp_path / "headless.safetensors"
        )
    assert "must have the classifier of vit_collages" in problem


def test_without_a_network_the_way_out_is_named(picture, monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    problem = refused("classify", "vit_tiny_patch16_224", picture)
    assert "no network" in problem and "--weights FILE" in problem
    assert "create_model" not in problem


def test_without_timm_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert 'pip install "attnlib[notebooks]"' in refused("bench", "vit_tiny_patch16_224")


def test_a_wrong_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as problem:
        cli.main(["draw"])
    assert problem.value.code == 2 and "invalid choice: 'draw'" in capsys.readouterr().err


# --- bench ------------------------------------------------------------------------------------


def test_both_take_turns_and_are_compared(capsys, monkeypatch):
    """The ratio printed is the median of those within the rounds."""
    times = {"attnlib": [0.1, 0.3, 0.2], "timm": [0.1, 0.1, 0.4]}
    cls, hub, config = MODELS["vit_tiny_patch16_224"]
    monkeypatch.setitem(MODELS, "vit_tiny_patch16_224", (cls, hub, config | {"depth": 1}))
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1))
    measured = cli._benchmark("vit_tiny_patch16_224", rounds=2)
    assert {name: len(each) for name, each in measured.items()} == {"attnlib": 2, "timm": 2}
    monkeypatch.setattr(cli, "_benchmark", lambda *_: times)
    *_, ours, theirs, ratio = said(capsys, "bench", "vit_tiny_patch16_224").splitlines()
    assert ours.split() == "attnlib 200.00 (150.00 to 250.00) ms".split()
    assert theirs.split() == "timm 100.00 (100.00 to 250.00) ms".split()
    assert ratio.split() == "attnlib / timm 1.00 (0.75 to 2.00)".split()


def test_another_model_is_not_timed(monkeypatch):
    """Control: a model that gives other logits is refused before anything is timed."""
    cls, hub, config = MODELS["vit_tiny_patch16_224"]
    monkeypatch.setitem(MODELS, "vit_tiny_patch16_224", (cls, hub, config | {"num_heads": 6}))
    with pytest.raises(ValueError, match="logits differ"):
        cli._benchmark("vit_tiny_patch16_224", rounds=2)


# --- what a run left behind -------------------------------------------------------------------


def trained(tmp_path, **options):
    """A checkpoint of a small ViT, trained on two colors."""
    images = torch.cat([torch.zeros(8, 3, 32, 32), torch.ones(8, 3, 32, 32)])
    data = images, torch.arange(16) // 8
    torch.manual_seed(0)
    shape = dict(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2, num_classes=2)
    model = create_model("vit_tiny_patch16_224", **shape)
    model.label_names = ["black", "white"]
    run = dict(epochs=3, batch_size=8, lr=1e-2, checkpoint=tmp_path / "run.json")
    history = fit(model, data, data, **run | options)
    return tmp_path / "run.json", model, history


def test_a_checkpoint_is_shown(capsys, tmp_path):
    path, model, history = trained(tmp_path)
    facts = dict(line.split(maxsplit=1) for line in shown(capsys, path))
    assert facts["class"] == "attnlib.vit.VisionTransformer"
    assert facts["name"] == "vit_tiny_patch16_224"
    assert int(facts["parameters"].replace(",", "")) == sum(
        p.numel() for p in model.parameters()
    )
    assert facts["input"] == "3 × 32 × 32" and facts["mean"] == "0.5, 0.5, 0.5"
    assert facts["classes"] == "2: black, white" and facts["trained"] == "epoch 3 of 3"
    best = max(record["accuracy"] for record in history)
    first = [record["accuracy"] for record in history].index(best) + 1
    assert facts["best"] == f"accuracy {best:.4g} after epoch {first}"
    bytes_there = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert facts["files"].startswith(f"{bytes_there / 1e6:.1f} MB")
    (with_what,) = [line for line in shown(capsys, path) if line.startswith("made with")]
    assert "img_size=32" in with_what and "num_classes=2" in with_what
    assert shown(capsys, path)[-1].split()[1] == __version__


def shown(capsys, path):
    return said(capsys, "show", path).splitlines()


def test_an_interrupted_run_and_a_folder_are_shown(capsys, tmp_path):
    path, model, _ = trained(tmp_path, epochs=None, steps=10, log_every=5, stop_after=5)
    facts = cli.describe(str(path))
    assert facts["trained"] == "epoch 2.5 of 5"
    save_model(model, tmp_path / "folder")
    facts = cli.describe(str(tmp_path / "folder"))
    assert facts["classes"] == "2: black, white"
    assert "trained" not in facts and "best" not in facts and facts["files"].endswith("MB")
    (tmp_path / "other.json").write_text("[1]")
    problem = refused("show", tmp_path / "other.json")
    assert "other.json does not say how its model was made" in problem


def folder_of_colors(path, colors):
    for name, color in colors.items():
        (path / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (40, 40), color).save(path / name / f"{i}.png")
    return path


def test_training_goes_on_from_weights_of_ones_own(capsys, tmp_path):
    """From a checkpoint, whose name and size are its own, or from a file for a name."""
    path, model, _ = trained(tmp_path)
    folder = folder_of_colors(tmp_path / "colors", dict(red="red", blue="blue", green="green"))
    run = ["--epochs", 1, "--batch-size", 4, "--workers", 0, "--lr", 1e-12]
    out = said(
        capsys, "train", folder, "--weights", path, *run, "--checkpoint", tmp_path / "a.json"
    )
    assert "vit_tiny_patch16_224: 9 photographs of 3 classes" in out
    again = load_model(tmp_path / "a.json")
    torch.testing.assert_close(again.blocks[0].mlp.fc1.weight, model.blocks[0].mlp.fc1.weight)
    assert again.num_classes == 3 and again.label_names == ["blue", "green", "red"]
    assert again.data_config["input_size"] == (3, 32, 32)
    other = ("--checkpoint", tmp_path / "other.json")
    problem = refused(
        "train", folder, "--model", "vit_collages", "--weights", path, *run, *other
    )
    assert "--model (vit_collages) must be left out, or be vit_tiny_patch16_224" in problem
    file = tmp_path / "weights.safetensors"
    save_file(create_model("vit_collages", pretrained=True).state_dict(), file)
    said(capsys, "train", folder, "--model", "vit_collages", "--weights", file, *run,
         "--checkpoint", tmp_path / "b.json")  # fmt: skip
    wanted = create_model("vit_collages", pretrained=True).blocks[0].mlp.fc1.weight
    torch.testing.assert_close(load_model(tmp_path / "b.json").blocks[0].mlp.fc1.weight, wanted)


def test_a_checkpoint_that_is_not_there(picture):
    for call in (("show", "nowhere.json"), ("classify", "nowhere.json", picture)):
        assert "nowhere.json is not a file" in refused(*call)


def test_weights_and_scratch_exclude_each_other(capsys):
    with pytest.raises(SystemExit) as problem:
        cli.main(["train", "flowers", "--scratch", "--weights", "run.json"])
    assert problem.value.code == 2 and "not allowed with" in capsys.readouterr().err
