"""What the parts of the theme are called, and a formula that keeps its comma.

A button says what it opens, to the eye and to a screen reader; one that would open nothing is
left out. No line begins with the punctuation that follows a formula: to a browser a formula is
a box, and it would break the line behind any box.
"""

import re
from pathlib import Path

NAMES = {  # title of the theme's button: what it is called here
    "Toggle primary sidebar": "Contents of the book",
    "Toggle secondary sidebar": "Contents of this page",
    "Launch on Colab": "Open in Colab",
    "Launch on Kaggle": "Open in Kaggle",
}
TITLE = re.compile(rf'title="({"|".join(NAMES)})"')
DIALOGS = {  # what opens over a page: its name
    "pst-search-dialog": "Search",
    "pst-primary-sidebar-modal": "Contents of the book",
    "pst-secondary-sidebar-modal": "Contents of this page",
}
CONTENTS = re.compile(r'(?s)<button class="sidebar-toggle secondary-toggle.*?</button>')
FOLD = ' aria-label="Toggle hidden content"'  # in place of words that say more
FORMULA = re.compile(
    r'[(\[“‘]?<span class="math notranslate nohighlight">[^<]*</span>[^\s<]{0,12}'
)


def named(html):
    """The page whose buttons and folds say what they open."""
    if 'class="bd-sidebar-secondary' not in html:
        html = CONTENTS.sub("", html)
    html = TITLE.sub(lambda f: 'title="{0}" aria-label="{0}"'.format(NAMES[f[1]]), html)
    for place, name in DIALOGS.items():
        opened = f'<dialog id="{place}"'
        html = html.replace(f"{opened}>", f'{opened} aria-label="{name}">')
    return html.replace(f"<summary{FOLD}>", "<summary>")


def kept_together(html):
    """The page whose formulas stay on one line with what touches them."""

    def keep(found):
        alone = found[0].startswith("<") and found[0].endswith(">")
        return found[0] if alone else f'<span class="unbroken">{found[0]}</span>'

    return FORMULA.sub(keep, html)


def mend(app, problem):
    if problem is None and app.builder.name == "html":
        for page in app.env.found_docs | {"404", "genindex", "py-modindex", "search"}:
            path = Path(app.outdir, f"{page}.html")
            if path.exists():
                html = path.read_text("utf-8")
                found = named(html)
                if 'class="unbroken"' not in html:  # the page is new
                    found = kept_together(found)
                if found != html:
                    path.write_text(found, "utf-8")


def setup(app):
    app.connect("build-finished", mend, priority=890)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
