"""The first use of a word of the glossary in a chapter leads to its entry.

glossary.md holds the words. A chapter that an entry names explains the word itself, so there
the word is no link. Links stand in running text only: not in headings, titles of theorems,
tables, other links, code, formulas, captions, or the box of a chapter.
"""

import re
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[2]
MOST = 15  # links in a chapter
LOOSE = {"bias", "decoder", "mask", "window"}  # words that the book also uses in another sense
ENTRY = re.compile(r"(?m)^(\S[^\n]*)\n((?:  \S[^\n]*\n)+)")
NOT_WITHIN = (
    nodes.title,
    nodes.caption,
    nodes.table,
    nodes.block_quote,
    nodes.reference,
    nodes.literal,
    nodes.math,
    addnodes.pending_xref,
)


class Term(NamedTuple):
    entry: str  # the line of the glossary, which may hold several words
    meaning: str
    pages: tuple  # of the chapters that explain it


def entries(root=ROOT):
    """{word in lower case: Term} of glossary.md."""
    text = (root / "book" / "glossary.md").read_text(encoding="utf-8")
    block, found = text.split("```{glossary}\n")[1].split("```")[0], {}
    for line, about in ENTRY.findall(block):
        pages = tuple(re.findall(r"\{doc\}`/?(nbs/\w+)`", about))
        meaning = " ".join(re.sub(r"\s*\(\{doc\}[^)]*\)", "", about).split())
        words = [word.lower() for word in line.split(", ")]
        for word in [word for word in words if word not in LOOSE]:
            found[word] = Term(line, meaning, pages)
    return found


def pattern(words):
    """Any of the words, also as a plural, the longest first; no part of a compound."""
    some = [
        re.escape(word).replace(r"\ ", r"\s+")
        + ("(?:es)?" if word.endswith(("ch", "s", "x")) else "s?")
        for word in sorted(words, key=len, reverse=True)
    ]
    return re.compile(rf"(?i)(?<![\w–-])(?:{'|'.join(some)})(?![\w–-])")


def word_of(text, words):
    """The word of which a text is the singular or the plural."""
    text = " ".join(text.lower().split())
    return next(text[:end] for end in (None, -1, -2) if text[:end] in words)


def is_name(match):
    """Whether capitals make it a part of a name, as in "Mask R-CNN"."""
    before, after = match.string[: match.start()], match.string[match.end() :]
    starts = not before.strip() or re.search(r"[.:?!]\s+$", before)
    capital = any(letter.isupper() for letter in match[0])
    inner = match[0][1:] != match[0][1:].lower()
    return capital and (not starts or inner or bool(re.match(r"\s+[A-Z]", after)))


def running_text(doctree):
    """The pieces of text in which a word may be a link, in their order."""
    for paragraph in doctree.findall(nodes.paragraph):
        for text in paragraph.findall(nodes.Text):
            above, fits = text.parent, True
            while above is not None and fits:
                classes = above.get("classes", ())
                fits = not isinstance(above, NOT_WITHIN) and "chapter-box" not in classes
                fits = fits and above.get("nb_element") is None
                above = above.parent
            if fits:
                yield text


def link(doctree, known, address):
    """Make the first use of each word a link to `address(entry)`; the words that became one."""
    left, made = dict(known), []
    for text in list(running_text(doctree)):
        pieces, end = [], 0
        for match in pattern(known).finditer(text) if left else ():
            word = word_of(match[0], known)
            if word not in left or is_name(match) or len(made) == MOST:
                continue
            about = left[word]
            left = {name: term for name, term in left.items() if term.entry != about.entry}
            made.append(word)
            to = nodes.reference("", match[0], internal=True, classes=["glossary-term"])
            to["refuri"], to["reftitle"] = address(about.entry), about.meaning
            pieces += [nodes.Text(text[end : match.start()]), to]
            end = match.end()
        if pieces:
            pieces.append(nodes.Text(text[end:]))
            text.parent.replace(text, [piece for piece in pieces if piece.astext()])
    return made


# --- as an extension --------------------------------------------------------------------------


def link_words(app, doctree, docname):
    if docname.startswith("nbs/"):
        objects = app.env.get_domain("std").objects
        page = app.builder.get_relative_uri(docname, "book/glossary")
        known = entries(Path(app.srcdir))
        known = {word: term for word, term in known.items() if docname not in term.pages}
        link(doctree, known, lambda entry: f"{page}#{objects['term', entry][1]}")


def read_again(app, env, added, changed, removed):
    """All chapters, when the glossary has changed."""
    changes = "book/glossary" in added | changed
    return {page for page in env.found_docs if changes and page.startswith("nbs/")}


def setup(app):
    app.connect("doctree-resolved", link_words)
    app.connect("env-get-outdated", read_again)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
