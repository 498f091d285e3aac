"""The tokenization under which published scores of Multi30k were computed, for German.

Papers on Multi30k lowercase a text, normalize its punctuation, and split it into tokens with
the scripts of Moses before they compute BLEU. The scripts are written in Perl. This module does
for German what they do: lowercase.perl, then normalize-punctuation.perl -l de, then
tokenizer.perl -l de, without splitting hyphens. `python -m benchmarks.multi30k tokens` compares
its output with the tokenized files that the authors of Multi30k publish.
"""

import re
import string

# A period stays attached to these in lower case: letters, Roman numerals, abbreviations, and
# ordinal numbers. Abbreviations with a period inside have a rule of their own.
ABBREVIATIONS = set(
    "bzw vs usw etc ggf sogen ff sog evtl spp sen jun dgl dergl zzt usf bzgl ca".split()
)
ROMAN = set("i ii iii iv v vi vii viii ix x xi xii xiii xiv xv xvi xvii xviii xix xx".split())
ORDINALS = {str(n) for n in range(1, 100)}
WITH_PERIOD = set(string.ascii_lowercase) | ROMAN | ABBREVIATIONS | ORDINALS

PUNCTUATION = (  # of the normalization, in this order: a pattern and its replacement
    (r"\r", ""),
    (r"\(", " ("),
    (r"\)", ") "),
    (r" +", " "),
    (r"\) ([.!:?;,])", r")\1"),
    (r"\( ", "("),
    (r" \)", ")"),
    (r"(\d) %", r"\1%"),
    (r" :", ":"),
    (r" ;", ";"),
    (r"`", "'"),
    (r"''", ' " '),
    (r"[„“”]", '"'),
    (r"–", "-"),
    (r"—", " - "),
    (r" +", " "),
    (r"´", "'"),
    (r"([a-z])[‘’]([a-z])", r"\1'\2"),
    (r"[‘‚’]", '"'),
    (r"''", '"'),
    (r"…", "..."),
    (r" « ", ' "'),
    (r"« ?", '"'),
    (r" » ", '" '),
    (r" ?»", '"'),
    (r" %", "%"),
    (r" :", ":"),
    (r" \?", "?"),
    (r" !", "!"),
    (r" ;", ";"),
    (r" +", " "),
    (r',"', '",'),
    (r'(\.+)"(\s*[^<])', r'"\1\2'),
    (r"(\d) (\d)", r"\1,\2"),
)
ESCAPES = (
    ("&", "&amp;"),
    ("|", "&#124;"),
    ("<", "&lt;"),
    (">", "&gt;"),
    ("'", "&apos;"),
    ('"', "&quot;"),
    ("[", "&#91;"),
    ("]", "&#93;"),
)


def normalize(text):
    """Replace typographic punctuation by plain characters, and correct the spaces around it."""
    for pattern, replacement in PUNCTUATION:
        text = re.sub(pattern, replacement, text)
    return text


def split_periods(words):
    """Split the period from each word of a list, except after an abbreviation."""
    tokens = []
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        stem = word[:-1]
        if not word.endswith(".") or stem == "":
            tokens.append(word)
            continue
        dotted = "." in stem and any(letter.isalpha() for letter in stem)
        if dotted or stem in WITH_PERIOD or following[:1].islower():
            tokens.append(word)
        else:
            tokens += [stem, "."]
    return tokens


def tokenize(text):
    """Tokenize a German text as the published scores do.

    Parameters
    ----------
    text : str
        A sentence, in any case.

    Returns
    -------
    str
        The tokens in lower case, with a space between two.
    """
    text = normalize(text.lower() + "\n")  # the scripts read lines, and one rule sees their end
    text = " ".join(text.split())
    text = re.sub(r"([^\w\s.'`,-]|_)", r" \1 ", text)  # each other sign is a token
    text = re.sub(r"\.{2,}", lambda dots: f" {'․' * len(dots.group())} ", text)
    text = re.sub(r"(\D),", r"\1 , ", text)  # a comma is split unless it is between two digits
    text = re.sub(r",(\D)", r" , \1", text)
    text = re.sub(r"(\d),$", r"\1 ,", text)
    text = text.replace("'", " ' ")
    text = " ".join(split_periods(text.split()))
    text = text.replace("․", ".")
    for sign, escaped in ESCAPES:
        text = text.replace(sign, escaped)
    return text
