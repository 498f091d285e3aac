"""Models that come with the library: they load by name, their cards are complete, and the
commands that use them need no network."""

import io
import json
import socket
import sys
from pathlib import Path

import pytest
import torch

from attnlib import cli, models
from attnlib.backbone import describe_model
from attnlib.data import encode, train_bpe, train_tokenizer
from attnlib.gpt import GPT, GPTConfig, text_batches
from attnlib.models import (
    list_models,
    load_model,
    read_weights,
    save_model,
    shipped_folder,
    shipped_models,
)
from attnlib.train import fit
from attnlib.transformer import Transformer, from_torch
from attnlib.translation import translate, translation_loss
from benchmarks import ship
from benchmarks.multi30k import make_model
from benchmarks.runner import save_half

pytestmark = pytest.mark.usefixtures("quiet")

MB = 10**6
FOLDERS = {path.name: path for path in sorted(ship.SHIPPED.glob("*/")) if path.is_dir()}
LIMITS = {"en-de": 6 * MB, "shakespeare": 4 * MB}
PAIRS = {  # written for these tests
    "A man rides a red bike.": "Ein Mann fährt ein rotes Rad.",
    "Two dogs run on the beach.": "Zwei Hunde laufen am Strand.",
    "A girl reads a book.": "Ein Mädchen liest ein Buch.",
}
EXPECTED = {  # own sentences, and words of which one of each group is in the translation
    "Two children play football in a park.": (["zwei"], ["kinder"], ["park"]),
    "A woman in a red coat is riding a horse.": (["frau"], ["rote"], ["pferd"]),
}
needs_translator = pytest.mark.skipif("en-de" not in FOLDERS, reason="en-de does not ship yet")
SPEECH = "ROMEO: O that I were a glove upon that hand, that I might touch that cheek!\n"


@pytest.fixture
def offline(monkeypatch):
    """Let every attempt to reach a network fail."""

    def refuse(*args, **options):
        raise AssertionError("a shipped model asked for the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


# --- what ships -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_a_shipped_model_loads_and_has_a_card(name, offline):
    folder = FOLDERS[name]
    files = {"README.md", "config.json", "model.safetensors"}
    assert {file.name for file in folder.iterdir()} == files
    assert sum(file.stat().st_size for file in folder.iterdir()) <= LIMITS[name]
    model = load_model(name)
    assert not model.training and model.tokenizer.get_vocab_size() > 0
    floating = {x.dtype for x in model.state_dict().values() if x.is_floating_point()}
    assert floating == {torch.float32}
    stored = read_weights(folder / "model.safetensors")
    names = {name for name, _ in model.named_parameters()}
    assert {key for key, x in stored.items() if x.dtype == torch.float16} == names
    card = (folder / "README.md").read_text(encoding="utf-8")
    for heading in ("Data", "Training", "Scores", "What it cannot do", "License"):
        assert f"\n## {heading}\n" in card
    assert "Apache-2.0" in card and name in card
    assert card.startswith(f"# {shipped_models()[name]}\n")


@pytest.mark.parametrize("name", FOLDERS)
def test_the_scores_of_a_card_are_those_of_the_record(name):
    folder = FOLDERS[name]
    card = (folder / "README.md").read_text(encoding="utf-8")
    scores = json.loads((folder / "config.json").read_text(encoding="utf-8"))["scores"]
    if "bits_per_character" in scores:
        assert f"**{scores['bits_per_character']:.3f} bits per character**" in card
    else:
        for year, row in scores.items():
            assert (
                f"| Multi30k, test {year} | {row['sentences']:,} | {row['bleu']:.1f} |" in card
            )
        assert "| Multi30k, test 2016 | 1,000 |" in card


@needs_translator
@pytest.mark.parametrize("beam", [1, 5])
def test_the_shipped_translator_translates(offline, capsys, beam):
    cli.main(["translate", *EXPECTED, "--to", "de", "--beam", str(beam)])
    said = capsys.readouterr().out.lower().splitlines()
    assert len(said) == len(EXPECTED)
    for translation, groups in zip(said, EXPECTED.values()):
        for words in groups:
            assert any(word in translation for word in words), translation


@needs_translator
def test_a_direction_without_a_translator():
    with pytest.raises(SystemExit, match=r"--from de --to fr .* --from en --to de"):
        cli.main("translate Hallo --from de --to fr".split())


@needs_translator
def test_show_tells_where_the_card_is(capsys):
    cli.main(["show", "en-de"])
    said = capsys.readouterr().out
    assert "Transformer" in said and "README.md" in said and "tokens" in said


@pytest.mark.skipif("shakespeare" not in FOLDERS, reason="shakespeare does not ship yet")
def test_the_shipped_gpt_continues_a_text(offline, capsys):
    cli.main(["generate", "ROMEO:", "--tokens", "40", "--seed", "1"])
    first = capsys.readouterr().out
    cli.main(["generate", "ROMEO:", "--tokens", "40", "--seed", "1"])
    assert first.startswith("ROMEO:") and capsys.readouterr().out == first


def test_all_that_ships_is_listed_and_loads_by_name(offline):
    lines = shipped_models()
    classifiers = {"swin_collages", "tnt_collages", "vit_collages"}
    assert set(lines) == {*FOLDERS, *classifiers} and classifiers <= set(list_models())
    assert all(line and not line.startswith("#") for line in lines.values())
    assert load_model("vit_collages").num_classes == 10
    assert shipped_folder("vit_collages") is None
    with pytest.raises(FileNotFoundError, match=r"fr-it is not a file.*vit_collages"):
        load_model("fr-it")


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "_shipped", lambda: {"mine": tmp_path / "elsewhere"})
    assert shipped_folder("mine") == tmp_path / "elsewhere"
    save_model(small(), tmp_path / "mine")
    assert shipped_folder("mine") is None
    assert isinstance(load_model("mine"), Transformer)


# --- round trips ------------------------------------------------------------------------------


def small(**options):
    """A small translator with a tokenizer."""
    torch.manual_seed(0)
    size = dict(d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=1)
    size |= dict(dim_feedforward=32, max_length=64)
    tokenizer = train_bpe([*PAIRS, *PAIRS.values()], 70, punctuation=True)
    model = Transformer(tokenizer.get_vocab_size(), **size | options).eval()
    model.tokenizer = tokenizer
    return model


def batch(model):
    return encode(model.tokenizer, list(PAIRS)), encode(model.tokenizer, list(PAIRS.values()))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(norm_first=True, position="rotary", dropout=0.0),
        dict(tie_weights=False, output_bias=True, position="learned", activation="gelu"),
        dict(tgt_vocab=80, position="relative", final_norm=True, pad_id=0),
    ],
)
def test_a_transformer_comes_back_exactly(tmp_path, options):
    model = small(**options)
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert not again.training and describe_model(again) == describe_model(model)
    assert again.tokenizer.to_str() == model.tokenizer.to_str()
    assert torch.equal(again(*batch(model)), model(*batch(model)))
    shares = again.output.weight is again.tgt_embed.weight
    assert shares == options.get("tie_weights", True)


@pytest.mark.parametrize("ema", [None, 0.5])
def test_a_checkpoint_of_a_transformer_is_a_model(tmp_path, ema):
    model = small()
    path = tmp_path / "run.json"
    fit(model, lambda step: batch(model), loss_fn=translation_loss, steps=3, lr=1e-2, ema=ema,
        checkpoint=path)  # fmt: skip
    again = load_model(path)
    assert torch.equal(again(*batch(model)), model.eval()(*batch(model)))
    said = [translate(x, x.tokenizer, list(PAIRS), max_length=20) for x in (again, model)]
    assert said[0] == said[1]


def test_a_checkpoint_of_an_averaged_gpt_is_a_model(tmp_path):
    model = gpt()
    ids = torch.tensor(model.tokenizer.encode(SPEECH * 3).ids)
    fit(model, text_batches(ids, 8, 2), steps=3, lr=1e-2, ema=0.5,
        checkpoint=tmp_path / "run.json")  # fmt: skip
    again = load_model(tmp_path / "run.json")
    assert torch.equal(again(ids[None, :8]), model.eval()(ids[None, :8]))


def test_a_transformer_with_other_layers_is_not_described(tmp_path):
    torch_model = torch.nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    with pytest.raises(ValueError, match=r"model \(Transformer\) must be made by create_model"):
        save_model(from_torch(torch_model, 30), tmp_path)
    with pytest.raises(ValueError, match=r"model \(Transformer\)"):
        save_model(small(activation=torch.tanh), tmp_path)
    model = small()
    model.encoder.layers = model.encoder.layers[:0]
    with pytest.raises(ValueError, match="no longer what create_model makes"):
        save_model(model, tmp_path)


def test_half_precision_is_for_storage(tmp_path):
    """A file in float16, each matrix once, is a model in float32 if the config says so."""
    model = small()
    ship.write_folder(model, tmp_path, bits=11)
    again = load_model(tmp_path)
    assert {x.dtype for x in again.state_dict().values()} == {torch.float32}
    for name, x in again.state_dict().items():
        wanted = model.state_dict()[name]
        exact = torch.equal(x, wanted)
        assert exact if name == "positions.table" else torch.equal(x, wanted.half().float())
    assert "output.weight" not in read_weights(tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"dtype": "float64"}))
    assert load_model(tmp_path).src_embed.weight.dtype == torch.float64
    file.write_text(json.dumps(config | {"dtype": "int8"}))
    with pytest.raises(ValueError, match=r"dtype \('int8'\) must be one of float16, bfloat16"):
        load_model(tmp_path)
    del config["dtype"]
    file.write_text(json.dumps(config))
    weights = {name: x.half() for name, x in model.state_dict().items()}
    save_half(weights, tmp_path / "model.safetensors")
    assert load_model(tmp_path).src_embed.weight.dtype == torch.float16


# --- the commands that make the folders -------------------------------------------------------

SIZE = dict(d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=1)
SIZE |= dict(dim_feedforward=32, dropout=0.1)


def make_run(folder, **more):
    """The files of a run of benchmarks/multi30k.py, with random weights."""
    torch.manual_seed(1)
    tokenizer = train_bpe([*PAIRS, *PAIRS.values()], 70, punctuation=True)
    model = make_model(tokenizer, SIZE).eval()
    stem = folder / "multi30k_pair-1-0"
    save_half(model.state_dict(), stem.with_suffix(".safetensors"))
    stem.with_suffix(".tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    record = dict(
        directions=[["en", "de"]], size=SIZE, epochs=1, seed=0, history=[{"valid": 4}]
    )
    stem.with_suffix(".json").write_text(json.dumps(record | more))
    return stem, model


def shipping(monkeypatch, folder):
    """Let the library find what ships in another folder."""
    found = {path.name: path for path in folder.iterdir()}
    monkeypatch.setattr(models, "_shipped", lambda: found)


def test_a_translator_is_shipped(tmp_path, monkeypatch, capsys, offline):
    run, model = make_run(tmp_path)
    monkeypatch.setattr(
        ship,
        "multi30k",
        lambda split, folder, languages: (list(PAIRS), list(PAIRS.values())),
    )
    out = tmp_path / "shipped"
    for _ in range(2):  # a folder that is there is replaced
        ship.main(["en-de", "--run", str(run), "--out", str(out)])
    assert "MB" in capsys.readouterr().out
    shipping(monkeypatch, out)
    again = load_model("en-de")
    src, tgt = batch(again)
    torch.testing.assert_close(again(src, tgt), model(src, tgt), rtol=0, atol=2e-2)
    card = (out / "en-de" / "README.md").read_text(encoding="utf-8")
    assert "| Multi30k, test 2017 | 3 |" in card and "{" not in card
    assert shipped_models()["en-de"].startswith("English to German: a Transformer of 0.0M")
    said = translate(again, again.tokenizer, list(PAIRS), beam_size=2)
    cli.main(["translate", *PAIRS, "--to", "de", "--beam", "2"])
    assert capsys.readouterr().out.splitlines() == said
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" + "\n".join(PAIRS) + "\n\n"))
    cli.main("translate --to de --beam 2".split())
    assert capsys.readouterr().out.splitlines() == said
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    for line, message in (
        ("translate --to de", "SENTENCE must be given"),
        (
            "translate Hallo --to fr",
            "--from en --to fr .* the directions are: --from en --to de",
        ),
        ("translate Hello --to de --beam 0", r"beam \(0\) must be an integer of at least 1"),
        (
            "generate Hello --model en-de",
            r"--model \(en-de\) is a Transformer; it must be a GPT",
        ),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main(line.split())


def test_the_scores_of_a_record_are_taken(tmp_path):
    scores = {"2016": {"bleu": 38.76, "sentences": 1000}}
    run, _ = make_run(tmp_path, scores=scores, signature="nrefs:1", beams=5)
    ship.main(["en-de", "--run", str(run), "--out", str(tmp_path / "shipped")])
    card = (tmp_path / "shipped" / "en-de" / "README.md").read_text(encoding="utf-8")
    assert "| Multi30k, test 2016 | 1,000 | 38.8 |" in card and "`nrefs:1`" in card


def test_a_run_of_several_directions_is_not_shipped(tmp_path):
    run, _ = make_run(tmp_path, directions=[["en", "de"], ["de", "en"]])
    with pytest.raises(ValueError, match="must be a run of one direction, not of 2"):
        ship.main(["en-de", "--run", str(run), "--out", str(tmp_path)])


def gpt():
    """A small GPT with a tokenizer."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(300, block_size=16, n_layer=1, n_head=2, n_embd=16)).eval()
    model.tokenizer = train_tokenizer(SPEECH, 300)
    return model


def test_a_gpt_is_shipped(tmp_path, monkeypatch, capsys, offline):
    model = gpt()
    text = tmp_path / "input.txt"
    text.write_text(SPEECH * 20, encoding="utf-8")
    ids = model.tokenizer.encode(SPEECH * 20).ids
    run = tmp_path / "run.json"
    fit(model, text_batches(ids, 8, 2), steps=3, checkpoint=run)
    capsys.readouterr()
    out = tmp_path / "shipped"
    ship.main(["shakespeare", "--run", str(run), "--data", str(text), "--out", str(out)])
    card = (out / "shakespeare" / "README.md").read_text(encoding="utf-8")
    assert "for 3 steps" in card and "bits per character" in card and "{" not in card
    shipping(monkeypatch, out)
    capsys.readouterr()
    line = "generate ROMEO: --tokens 12 --seed 3"
    said = []
    for options in ("", "", "--seed 4", "--temperature 0", "--top-p 0.1", "--tokens 3"):
        cli.main([*line.split(), *options.split()])
        said.append(capsys.readouterr().out)
    assert all(text.startswith("ROMEO:") for text in said) and said[0] == said[1]
    assert len(set(said)) == 5
    again = load_model("shakespeare")
    assert said[3] == again.write("ROMEO:", 12, temperature=0.0) + "\n"
    for options, message in (
        (["--model", "macbeth"], "macbeth is not a file.*shakespeare"),
        (["--tokens", "0"], "max_new_tokens"),
        (["--top-p", "2"], "top_p"),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main([*line.split(), *options])


def test_a_gpt_without_a_tokenizer_needs_one(tmp_path):
    model = gpt()
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(model.tokenizer.to_str(), encoding="utf-8")
    del model.tokenizer
    save_model(model, tmp_path / "gpt")
    text = tmp_path / "input.txt"
    text.write_text(SPEECH * 20, encoding="utf-8")
    command = ["shakespeare", "--run", str(tmp_path / "gpt"), "--data", str(text)]
    command += ["--out", str(tmp_path / "shipped")]
    with pytest.raises(ValueError, match="--tokenizer FILE must be given"):
        ship.main(command)
    ship.main([*command, "--tokenizer", str(tokenizer)])
    assert hasattr(load_model(tmp_path / "shipped" / "shakespeare"), "tokenizer")


def test_what_ships_is_small():
    """All folders together leave room in a wheel of 25 MB."""
    files = [file for folder in FOLDERS.values() for file in Path(folder).iterdir()]
    assert sum(file.stat().st_size for file in files) <= 10 * MB
