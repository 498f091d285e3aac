"""What a second fresh user ran into: the shell, checkpoints, messages."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import attnlib
from attnlib import cli
from attnlib.data import image_folder
from attnlib.deit import DistillationLoss
from attnlib.gpt import GPT, GPTConfig
from attnlib.models import create_model, load_model, save_model
from attnlib.train import fit

ROOT = Path(__file__).parent.parent
SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2)
RUN = ["--epochs", "1", "--batch-size", "4", "--workers", "0", "--lr", "1e-12"]


def fill(folder, *names, count=5):
    for name in names:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (40, 40), name).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture
def colors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return fill(tmp_path / "colors", "blue", "red")


def small(classes=("blue", "red")):
    torch.manual_seed(1)
    model = create_model("vit_tiny_patch16_224", num_classes=len(classes), **SMALL)
    model.label_names = list(classes)
    return model


def refused(*arguments):
    with pytest.raises(SystemExit) as problem:
        cli.main([str(x) for x in arguments])
    assert isinstance(problem.value.code, str)
    assert problem.value.code.startswith("attnlib: ") and "\n" not in problem.value.code
    return problem.value.code


# --- the README -------------------------------------------------------------------------------


def test_the_two_recipes_of_the_readme_have_files_of_their_own():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    python, shell = readme.split("attnlib train flowers")[:2]
    shell = shell.split("```")[0]
    assert "--checkpoint shell.json" in shell and "run.json" not in shell
    assert 'checkpoint="run.json"' in python


# --- attnlib train ----------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["start", "start/model.safetensors", "start.json"])
def test_the_classifier_of_the_same_classes_is_kept(colors, capsys, source):
    start = small()
    if source == "start.json":
        train, valid = image_folder(colors)
        fit(start, train, valid, epochs=1, batch_size=4, checkpoint=source)
    else:
        save_model(start, "start")
    cli.main(["train", "colors", "--weights", source, "--checkpoint", "a.json", *RUN])
    said = capsys.readouterr().out
    assert "new classifier" not in said and "for validation: blue, red" in said
    for name, x in load_model("a.json").state_dict().items():
        torch.testing.assert_close(x, start.state_dict()[name], msg=name)


def test_another_classifier_is_announced(colors, capsys):
    save_model(small(("red", "blue")), "start")
    cli.main(["train", "colors", "--weights", "start", "--checkpoint", "a.json", *RUN])
    said = capsys.readouterr().out
    assert "new classifier: the run had the classes red, blue\n" in said
    model = load_model("a.json")
    assert model.label_names == ["blue", "red"]
    assert not torch.allclose(model.head.weight, small().head.weight, atol=1e-3)


def test_without_names_the_number_decides(colors, capsys):
    model = small()
    model.label_names = None
    save_model(model, "start")
    cli.main(["train", "colors", "--weights", "start", "--checkpoint", "a.json", *RUN])
    assert "new classifier" not in capsys.readouterr().out
    torch.testing.assert_close(load_model("a.json").head.weight, model.head.weight)


def test_a_run_goes_on_with_its_own_model(colors, capsys):
    save_model(small(), "start")
    cli.main(["train", "colors", "--weights", "start", *RUN])
    capsys.readouterr()
    cli.main(["train", "colors", *RUN])
    said = capsys.readouterr().out
    assert said.startswith("vit_tiny_patch16_224:") and "has ended" in said
    assert "--weights" in refused("train", "colors", "--weights", "run.json", *RUN)


def test_weights_alone_need_a_name(colors):
    save_file(small().state_dict(), "model.safetensors")
    problem = refused("train", "colors", "--weights", "model.safetensors", *RUN)
    assert "--model must be given" in problem


def test_names_that_cannot_be_trained(colors):
    problem = refused("train", "colors", "--model", "detr_resnet50", *RUN)
    assert "has no classifier" in problem and "nearest names: detr" not in problem
    problem = refused("train", "colors", "--model", "detr_tiny_patch16_224", *RUN)
    assert "deit_tiny_patch16_224" in problem and "detr_resnet" not in problem


def test_numbers_out_of_range(colors):
    assert "batch_size (0)" in refused("train", "colors", "--batch-size", "0")
    problem = refused("train", "colors", "--model", "vit_collages", *RUN[:-1], "1e30")
    assert "is nan" in problem or "is inf" in problem


def test_an_interruption_is_one_line(colors, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(attnlib.train, "fit", interrupted)
    assert "goes on" in refused("train", "colors", "--model", "vit_collages", *RUN)


def test_what_the_models_of_the_library_have_seen(capsys):
    cli.main(["show", "vit_collages"])
    assert "trained on collages of digits" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("share", [0.2, 0.8])  # where the truncated one is for training or not
def test_a_truncated_picture_is_one_line(colors, workers, share):
    for file in colors.glob("red/*.png"):
        picture = Image.effect_noise((40, 40), 80).convert("RGB")
        picture.save(file.with_suffix(".jpg"))
        file.unlink()
    bad = image_folder(colors, share)[share > 0.5].samples[-1][0]
    Path(bad).write_bytes(Path(bad).read_bytes()[:-300])
    run = [*RUN, "--workers", workers, "--valid", share, "--model", "vit_collages"]
    problem = refused("train", "colors", *run)
    assert problem.startswith(f"attnlib: {Path(bad).relative_to(Path.cwd())} cannot be read")
    assert "--check" in problem
    with pytest.warns(UserWarning, match="cannot be read and are left out: 1"):
        cli.main(["train", "colors", "--check", *map(str, run)])


def test_hidden_folders_are_no_classes(colors):
    wanted = image_folder(colors)[0].samples
    for name in ("__MACOSX", ".thumbnails", "red/.thumbnails"):
        (colors / name).mkdir()
        (colors / name / "._0.png").write_bytes(b"no picture")
        (colors / name / "0.png").write_bytes((colors / "red" / "0.png").read_bytes())
    (colors / "red" / "._0.png").write_bytes(b"no picture")
    train, _ = image_folder(colors)
    assert train.classes == ["blue", "red"] and train.samples == wanted


# --- training ---------------------------------------------------------------------------------


def test_a_refused_run_names_what_was_changed(colors, tmp_path):
    train, valid = image_folder(colors)
    options = dict(epochs=2, batch_size=4, checkpoint=tmp_path / "run.json")
    fit(small(), train, valid, **options)
    with pytest.raises(ValueError, match=r"^epochs \(3, or steps: 6\) must be 2, or steps: 4"):
        fit(small(), train, valid, **options | dict(epochs=3))
    with pytest.raises(ValueError, match="batch_size and train must make epochs of 2 steps"):
        fit(small(), train, valid, **options | dict(batch_size=2))


def test_a_loaded_model_of_other_classes_is_warned_of(colors):
    train, _ = image_folder(colors)
    with pytest.warns(UserWarning, match="model has the classes red, blue, and train has blue"):
        fit(small(("red", "blue")), train, epochs=1, batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(small(), train, epochs=1, batch_size=4)
        fit(small(), train, epochs=1, batch_size=4, loss_fn=DistillationLoss(small()))
    with pytest.raises(ValueError, match="teacher has the classes red, blue"):
        loss_fn = DistillationLoss(small(("red", "blue")))
        fit(small(), train, epochs=1, batch_size=4, loss_fn=loss_fn)


def test_a_rate_that_is_text():
    with pytest.raises(ValueError, match="a number, not text"):
        fit(small(), lambda step: None, steps=1, lr="1e-3")


def test_a_mistyped_argument_of_fit_has_a_nearest_one():
    with pytest.raises(TypeError, match="'epoch'; the nearest is 'epochs'"):
        fit(small(), None, epoch=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'zzz'"):
        fit(small(), None, zzz=3)


@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("length", [1, 5, 8, 12])
def test_a_text_may_get_longer_than_the_block(position, length):
    """As nanoGPT crops it: the most probable token after the last 8, each time."""
    torch.manual_seed(0)
    config = GPTConfig(40, block_size=8, n_layer=1, n_head=2, n_embd=16, position=position)
    gpt = GPT(config).eval()
    gpt.tokenizer = Numbers()
    wanted = torch.randint(40, (1, length))
    prompt = gpt.tokenizer.decode(wanted[0].tolist())
    for _ in range(10):
        with torch.no_grad():
            logits = gpt(wanted[:, -8:])[:, -1]
        wanted = torch.cat([wanted, logits.argmax(-1, keepdim=True)], dim=1)
    written = gpt.write(prompt, 10, temperature=0)
    assert written == gpt.tokenizer.decode(wanted[0].tolist())
    end = wanted[0, length + 9].item()  # at the latest it ends here
    first = length + wanted[0, length:].tolist().index(end) + 1
    written = gpt.write(prompt, 100, temperature=0, eos_id=end)
    assert written == gpt.tokenizer.decode(wanted[0, :first].tolist())


class Numbers:
    """A tokenizer whose tokens are numbers."""

    def encode(self, text):
        return SimpleNamespace(ids=[int(word) for word in text.split()])

    def decode(self, tokens):
        return " ".join(str(token) for token in tokens)


# --- models that were changed -----------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A linear layer with low-rank weights beside its own, as LoRA's."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.down = torch.nn.Linear(linear.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))

    def merged(self):
        with torch.no_grad():
            self.linear.weight += self.up.weight @ self.down.weight
        return self.linear


def test_adapters_must_be_merged_before_a_model_is_saved(tmp_path):
    model = small().eval()
    model.blocks[0].attn.qkv = Adapted(model.blocks[0].attn.qkv)
    x = torch.randn(2, 3, 32, 32)
    wanted = model(x)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="no longer what create_model makes.*merge adapters"):
        save_model(model, tmp_path / "model")
    assert torch.equal(state, torch.get_rng_state()) and not list(tmp_path.iterdir())
    model.blocks[0].attn.qkv = model.blocks[0].attn.qkv.merged()
    save_model(model, tmp_path / "model")
    torch.testing.assert_close(load_model(tmp_path / "model")(x), wanted)


def test_a_compiled_model_is_refused_and_what_was_compiled_is_not(tmp_path):
    model = small()
    with pytest.raises(ValueError, match="save the one that was compiled"):
        save_model(torch.compile(model), tmp_path)
    save_model(model, tmp_path)


def test_a_run_of_a_changed_model_warns_and_its_checkpoint_says_why(tmp_path):
    model = small()
    model.blocks[0].attn.qkv = Adapted(model.blocks[0].attn.qkv)
    data = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
    with pytest.warns(UserWarning, match="load_model will not read this"):
        fit(model, data, steps=1, batch_size=4, checkpoint=tmp_path / "run.json")
    with pytest.raises(ValueError, match="modules were replaced, as by adapters"):
        load_model(tmp_path / "run.json")


def test_weights_may_be_read_by_those_who_may_read_their_json(tmp_path):
    model = small()
    data = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
    before = os.umask(0o027)
    try:
        save_model(model, tmp_path)
        fit(model, data, steps=1, batch_size=4, checkpoint=tmp_path / "run.json")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert len(modes) == 4 and set(modes.values()) == {0o640}, modes


def test_a_warning_of_the_shell_is_one_line(colors, capsys):
    (colors / "red" / "9.png").write_bytes(b"no picture")
    usual = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *what: print(warnings.formatwarning(*what[:4]), end="")
        cli.main(["train", "colors", "--model", "vit_collages", *RUN])
    said = capsys.readouterr().out
    assert said.startswith("attnlib: files that cannot be read and are left out: 1 (")
    assert said.splitlines()[1].startswith("vit_collages: ")
    assert warnings.formatwarning is usual
