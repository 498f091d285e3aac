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

import matplotlib.image
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_sample_image

from attnlib.data import collages, encode, number_words
from attnlib.decoding import greedy
from attnlib.models import create_model
from attnlib.practice import prepared
from attnlib.recipes import translator

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "_static"
FOLDER = STATIC / "explorers"
EXPLORERS = ["saturation", "sinusoids", "rotary", "shift-mask", "patches", "heads", "crossover"]
PAGE = """<!doctype html><html lang="en" data-theme="{theme}"><body style="margin: 0">
<article class="bd-article" style="width: {width}px; background: var(--paper)">
<figure class="explorer explorer-{name}" style="margin: 0; border: 0"><img alt=""></figure>
</article></body></html>"""


# --- data of trained models -------------------------------------------------------------------


def packed(weights):
    """Weights as base64: a byte each, for the square root, so that small ones keep digits."""
    steps = (255 * weights.double().sqrt()).round().to(torch.uint8)
    return base64.b64encode(steps.flatten().numpy().tobytes()).decode()


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
        maps = torch.cat(model.attention_maps(prepared(image, name)))  # (blocks, heads, 65, 65)
        picture = dict(title=title, blocks=maps.shape[0], heads=maps.shape[1])
        found.append(picture | dict(image=as_png(image[0]), maps=packed(maps)))
    return dict(pictures=found)


NUMBERS = [933274, 366396, 555555, 48021, 120012]


@torch.no_grad()
def heads():
    """Attention of the translator of numbers in all layers and heads, for its own answers."""
    model, tokenizer = translator()
    found = []
    for number in NUMBERS:
        source = encode(tokenizer, number_words([number], "en"))  # (1, M)
        target = F.pad(greedy(model, source, 48), (1, 0), value=tokenizer.token_to_id("<s>"))
        words = {
            side: [tokenizer.id_to_token(i).replace("▁", "_") for i in tokens[0].tolist()]
            for side, tokens in (("source", source), ("target", target))
        }
        maps = model.attention_maps(source, target[:, :-1])  # cross: (1, h, N, M) a layer
        packs = {kind: packed(torch.cat(layers)) for kind, layers in maps.items()}
        found.append(dict(number=number) | words | packs)
    layers, count = torch.cat(maps["cross"]).shape[:2]
    return dict(layers=layers, heads=count, numbers=found)


DATA = {"patches": patches, "heads": heads}


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
