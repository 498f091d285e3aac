"""What the figures that move show, computed with the library: `python -m tools.explorers`.

An explorer (_static/explorers.js) computes in the browser what a few lines can compute. What
needs a trained model is computed here and written to _static/explorers/NAME.js. Each explorer
also has a picture, NAME.png, for readers without scripts: it is what the script draws at the
start, taken by Chromium. With --only-data no browser is needed.
"""

import argparse
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "_static"
FOLDER = STATIC / "explorers"
EXPLORERS = ["saturation", "sinusoids", "rotary", "shift-mask"]
PAGE = """<!doctype html><html lang="en" data-theme="{theme}"><body style="margin: 0">
<article class="bd-article" style="width: {width}px; background: var(--paper)">
<figure class="explorer explorer-{name}" style="margin: 0; border: 0"><img alt=""></figure>
</article></body></html>"""


def opened(browser, name, width=752, theme="light"):
    """A page with one explorer and no book around it."""
    page = browser.new_page(viewport={"width": width, "height": 900}, device_scale_factor=1.5)
    page.set_content(PAGE.format(name=name, width=width, theme=theme))
    page.add_style_tag(path=STATIC / "book.css")
    if (FOLDER / f"{name}.js").exists():
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
            page.locator("figure.explorer").screenshot(path=folder / f"{name}.png")
            page.close()
        browser.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"some of {EXPLORERS}; all by default")
    parser.add_argument("--only-data", action="store_true", help="no pictures, no browser")
    arguments = parser.parse_args()
    take_pictures(arguments.names or EXPLORERS)


if __name__ == "__main__":
    main()
