"""What the figures that move show, computed with the library: `python -m tools.explorers`.

An explorer (_static/explorers.js) computes in the browser what a few lines can compute. What
needs a trained model is computed here and written to _static/explorers/NAME.js. Each explorer
also has a picture, NAME.png, for readers without scripts: it is what the script draws at the
start, taken by Chromium. With --only-data no browser is needed.
"""

import argparse
import base64
import io
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import matplotlib.image
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_sample_image

from attnlib import decoding
from attnlib.data import collages, encode
from attnlib.decoding import beam_search, beam_step
from attnlib.finetune import normalize_for
from attnlib.models import create_model, load_model
from attnlib.recipes import translator
from attnlib.train import read_record
from attnlib.translation import translate

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "book" / "_static"
FOLDER = STATIC / "explorers"
EXPLORERS = """
saturation sinusoids rotary shift-mask patches heads crossover beams sampling
""".split()
PAGE = """<!doctype html><html lang="en" data-theme="{theme}"><body style="margin: 0">
<article class="bd-article" style="width: {width}px; background: var(--paper)">
<figure class="explorer explorer-{name}" style="margin: 0; border: 0"><img alt=""></figure>
</article></body></html>"""


# --- data of trained models -------------------------------------------------------------------


def packed(weights):
    """Weights as base64: a byte each, for the square root, so that small ones keep digits."""
    steps = (255 * weights.double().sqrt()).round().to(torch.uint8)
    return base64.b64encode(steps.flatten().numpy().tobytes()).decode()


def unpacked(text, shape):
    """The weights of `packed`, in float64."""
    steps = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return (steps.double() / 255).square().view(shape)


def as_png(image):
    """A picture (3, H, W), from 0 to 1, as an address that holds it."""
    file = io.BytesIO()
    matplotlib.image.imsave(file, image.permute(1, 2, 0).numpy(), format="png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@torch.no_grad()
def patches():
    """Attention of every patch to every other, in all blocks and heads of two small models."""
    flower = torch.tensor(load_sample_image("flower.jpg")).permute(2, 0, 1)[None] / 255
    flower = F.interpolate(
        flower[..., 50:250, 190:390], (64, 64), mode="bicubic", antialias=True
    ).clamp(0, 1)
    collage = collages(12, "test", seed=3)["image"][5:6]  # that of the chapter's first figure
    found = []
    for title, name, image in (
        ("a flower (masked autoencoder)", "mae_photographs", flower),
        ("a collage (names the largest digit)", "vit_collages", collage),
    ):
        model = create_model(name, pretrained=True)
        model = (model.encoder() if name == "mae_photographs" else model).eval()
        maps = torch.cat(
            model.attention_maps(normalize_for(image, name))
        )  # (blocks, heads, 65, 65)
        picture = dict(title=title, blocks=maps.shape[0], heads=maps.shape[1])
        found.append(picture | dict(image=as_png(image[0]), maps=packed(maps)))
    return dict(pictures=found)


SENTENCES = [
    "A man with a beard is repairing an old bicycle.",
    "A dog runs on the beach.",
    "Two young women are playing soccer in the park.",
    "A woman who is wearing a blue dress walks down the street.",
]


@torch.no_grad()
def heads():
    """Attention of the book's translator in all layers and heads, for its own translations."""
    model = load_model("en-de").eval()
    tokenizer = model.tokenizer
    found = []
    for sentence in SENTENCES:
        source = encode(tokenizer, [sentence])  # (1, M)
        said = translate(model, tokenizer, [sentence], beam_size=5)[0]
        target = encode(tokenizer, [said])  # (1, N)
        words = dict(source=tokens_of(tokenizer, source), target=tokens_of(tokenizer, target))
        maps = model.attention_maps(source, target[:, :-1])  # cross: (1, h, N, M) a layer
        packs = {kind: packed(torch.cat(layers)) for kind, layers in maps.items()}
        found.append(dict(title=sentence) | words | packs)
    layers, count = torch.cat(maps["cross"]).shape[:2]
    return dict(layers=layers, heads=count, sentences=found)


def tokens_of(tokenizer, tokens):
    """A row of tokens (1, N) as text, with a space's mark as an underscore."""
    return [tokenizer.id_to_token(i).replace("▁", "_") for i in tokens[0].tolist()]


class Tree(nn.Module):
    """A model of three words, a table: that of a figure in the chapter on decoding."""

    pad_id, max_length = 0, 128
    after = {
        "": dict(a=0.4, b=0.35, c=0.25),
        "a": dict(a=0.34, b=0.33, c=0.33),
        "b": dict(a=0.51, b=0.49),
        "ba": dict(a=0.34, b=0.33, c=0.33),
        "bb": dict(a=0.34, b=0.33, c=0.33),
    } | dict.fromkeys(("c", "aa", "ab", "ac", "ca"), dict(a=1.0))
    words = ["<pad>", "<s>", "</s>", "a", "b", "c"]

    def __init__(self):
        super().__init__()
        self.output = nn.Embedding(len(self.words), 1)

    def encode(self, src):
        return src[..., None].double(), (src != 0)[:, None, None, :]

    def decode(self, tgt, memory, src_mask=None, cache=None):
        p = torch.zeros(len(tgt), len(self.words), dtype=torch.float64)
        for row, tokens in zip(p, tgt.tolist()):
            text = "".join(self.words[token] for token in tokens[1:])
            for word, value in self.after.get(text, {"</s>": 1.0}).items():
                row[self.words.index(word)] = value
        return p.log()[:, None]  # (B, 1, vocab)


def search_steps(model, source, words, k):
    """What each step of `beam_search` weighs and keeps, and what the search returns."""
    steps = []

    def watched(*arguments):
        steps.append(beam_step(*arguments))
        return steps[-1]

    with mock.patch.object(decoding, "beam_step", watched):
        tokens, score = beam_search(model, source, 24, k, length_penalty=0.0, use_cache=False)
    found = []
    for score_, beam, token, alive in (map(torch.squeeze, step) for step in steps):
        alive = alive.reshape(-1).tolist()
        found.append(
            [
                dict(beam=b, token=words[t], p=float(f"{s:.3g}")) | {"kept": i in alive}
                for i, (s, b, t) in enumerate(
                    zip(score_.exp().tolist(), beam.tolist(), token.tolist())
                )
                if s > 0  # in the first step all beams but one count nothing
            ]
        )
    text = [words[token] for token in tokens[0].tolist() if words[token] != "</s>"]
    return dict(steps=found, text="".join(text), p=float(f"{score.exp().item():.3g}"))


@torch.no_grad()
def beams():
    """Beam search with one to four beams, step by step: in a table, and in the translator."""
    model, tokenizer = translator()
    words = [tokenizer.id_to_token(i).replace("▁", "_") for i in range(150)]
    found = [dict(title="a table of three words", model=Tree(), source=torch.tensor([[3]]))]
    for text in (
        "eighty hundred and three",
        "nineteen hundred and eighty-four",
        "forty-eight thousand and twenty-one",
    ):
        found.append(dict(title=text, model=model, source=encode(tokenizer, [text])))
    for case in found:
        model, source = case.pop("model"), case.pop("source")
        own = model.words if isinstance(model, Tree) else words
        case["searches"] = [search_steps(model, source, own, k) for k in (1, 2, 3, 4)]
    return dict(cases=found)


def sampling():
    """Logits of the next character after a few beginnings, by the recorded model."""
    record = read_record("gpt_drawn")
    return dict(symbols=record["symbols"], contexts=record["contexts"])


DATA = {"patches": patches, "heads": heads, "beams": beams, "sampling": sampling}


def write_data(name, folder=FOLDER):
    """A script that keeps an explorer's data where explorers.js looks for them."""
    text = json.dumps(DATA[name](), ensure_ascii=False, separators=(",", ":"))
    (folder / f"{name}.js").write_text(f'explorerData["{name}"] = {text};\n', encoding="utf-8")


def read_data(name, folder=FOLDER):
    text = (folder / f"{name}.js").read_text(encoding="utf-8")
    return json.loads(text.split(" = ", 1)[1].rstrip(";\n"))


# --- pictures for readers without scripts -----------------------------------------------------


def opened(browser, name, width=752, theme="light"):
    """A page with one explorer and no book around it."""
    page = browser.new_page(viewport={"width": width, "height": 900}, device_scale_factor=1.5)
    page.set_content(PAGE.format(name=name, width=width, theme=theme))
    page.add_style_tag(path=STATIC / "book.css")
    page.evaluate("globalThis.explorerData = {}")
    if name in DATA:
        page.add_script_tag(path=FOLDER / f"{name}.js")
    page.add_script_tag(path=STATIC / "explorers.js")
    page.wait_for_selector("figure.explorer svg *", state="attached")
    return page


def chromium(playwright):
    """The browser that $CHROMIUM names, or one that is installed."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    program = program or shutil.which("google-chrome")
    if not program:
        raise SystemExit("no Chromium: install it, or set CHROMIUM to its path")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic"]
    return playwright.chromium.launch(executable_path=program, args=flags)


def take_pictures(names, folder=FOLDER):
    """Write what each explorer shows at the start, as a picture."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = chromium(playwright)
        for name in names:
            page = opened(browser, name)
            picture = page.locator("figure.explorer").screenshot()
            few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(128)
            few.save(folder / f"{name}.png", optimize=True)
            page.close()
        browser.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"some of {EXPLORERS}; all by default")
    parser.add_argument("--only-data", action="store_true", help="no pictures, no browser")
    arguments = parser.parse_args()
    names = arguments.names or EXPLORERS
    for name in names:
        if name in DATA:
            write_data(name)
    if not arguments.only_data:
        take_pictures(names)


if __name__ == "__main__":
    main()
