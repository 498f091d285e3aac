"""The directive of a figure that moves, and the script for the pages that have one.

    :::{explorer} saturation
    :alt: What the picture shows, for a reader who does not see it.
    What to try, and what to see.
    :::

It makes a figure of the picture _static/explorers/saturation.png, with the text as its caption.
_static/explorers.js puts controls and a drawing in the place of the picture; where scripts are
off, and in print, the picture stays.
"""

from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.parsers.rst.directives.images import Figure

SCRIPT, PICTURES = "explorers.js", "book/_static/explorers"


class Explorer(Figure):
    """{explorer} name, with the option :alt: and a caption; a link to it is #explorer-name."""

    option_spec = {"alt": directives.unchanged_required}

    def run(self):
        name = self.arguments[0]
        source = Path(self.state.document.settings.env.srcdir)
        known = sorted(path.stem for path in (source / PICTURES).glob("*.png"))
        if name not in known:
            raise self.error(f"explorer {name!r} has no picture; allowed are {known}")
        if not self.options.get("alt") or not self.content:
            raise self.error(f"explorer {name!r} needs the option :alt: and a caption")
        self.arguments[0] = f"/{PICTURES}/{name}.png"
        self.options["figclass"] = ["explorer", f"explorer-{name}"]
        return [nodes.container("", *super().run(), ids=[f"explorer-{name}"])]


def has_explorer(doctree):
    return any("explorer" in figure["classes"] for figure in doctree.findall(nodes.figure))


def load_script(app, pagename, templatename, context, doctree):
    """Load the script on the pages that need it."""
    if doctree and has_explorer(doctree):
        app.add_js_file(SCRIPT, loading_method="defer")


def setup(app):
    app.add_directive("explorer", Explorer)
    app.connect("html-page-context", load_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
