"""In a chapter a docstring shows what a function does; shapes and errors unfold at a click.

So an equation and the code below it are seen together. The text of the page stays what the
notebook has: the line that unfolds a docstring has its words from the style sheet, and nothing
of them is copied with the code.
"""

import re

CODE = re.compile(r"(?<=<pre>).*?(?=</pre>)", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
FOLD = '<details class="docstring" style="--indent: {}ch"><summary aria-label="{}"></summary>'


def details(lines):
    """[(first line, line behind the last, names), ...] of the sections of each docstring."""
    words = [TAG.sub("", line) for line in lines]
    found, first, names = [], None, []
    for number, (line, word, below) in enumerate(zip(lines, words, [*words[1:], ""])):
        inside = line.startswith('<span class="sd">')
        if inside and re.fullmatch(r" *-{4,}", below):
            first = number if first is None else first
            names.append(word.strip().lower())
        elif first is not None and word.endswith('"""') and inside:
            found.append((first, number, names))
            first, names = None, []
    return found


def folded(html):
    """The page with the sections of each docstring in a fold of their own."""

    def fold(code):
        lines = code[0].split("\n")
        for first, last, names in reversed(details(lines)):
            indent = len(words := TAG.sub("", lines[last])) - len(words.lstrip())
            blank = first - 1 if not TAG.sub("", lines[first - 1]).strip() else first
            start = FOLD.format(indent, ", ".join(names))
            inside = "\n".join(lines[blank:last])
            lines[blank : last + 1] = [f"{start}{inside}\n</details>{lines[last]}"]
        return "\n".join(lines)

    return CODE.sub(fold, html)


def fold_docstrings(app, pagename, templatename, context, doctree):
    if pagename.startswith("nbs/") and "body" in context:
        context["body"] = folded(context["body"])


def setup(app):
    app.connect("html-page-context", fold_docstrings, priority=600)  # after the links of names
    return {"parallel_read_safe": True, "parallel_write_safe": True}
