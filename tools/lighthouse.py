"""Lighthouse on the first page and the heaviest chapters of the built book: `make lighthouse`.

It needs `npx` and Chromium, and comes from npm at its first run. The pages are served as a
static host serves them: below a path, compressed, for ten minutes from the reader's cache.
Printed are the four scores of each page, on a desktop and on a phone, medians of some runs, and
what cost it points in the last.
"""

import argparse
import functools
import gzip
import http.server
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

VERSION = "12.8.2"
ROOT = Path(__file__).resolve().parent.parent
BASE = "/attnlib/"
FORMS = {"desktop": ["--preset=desktop"], "phone": []}
KINDS = ("performance", "accessibility", "best-practices", "seo")
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run"
PACKED = (".html", ".css", ".js", ".svg", ".json")


class Host(http.server.SimpleHTTPRequestHandler):
    """The folder below BASE, as a static host sends it; elsewhere its page 404."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        inside = self.path.startswith(BASE)
        path = Path(self.translate_path("/" + self.path.removeprefix(BASE)))
        path = path / "index.html" if path.is_dir() else path
        found = inside and path.is_file()
        path = path if found else Path(self.directory) / "404.html"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Cache-Control", "max-age=600")
        body = path.read_bytes()
        if path.suffix in PACKED and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 6)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hosted(book):
    """The address of the book's first folder while it is served."""
    host = functools.partial(Host, directory=str(book))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{BASE}"
    finally:
        server.shutdown()
        server.server_close()


def weight(path):
    """The bytes that a browser fetches for this page alone: the page and its pictures."""
    html = path.read_text(encoding="utf-8")
    pictures = {path.parent / name for name in re.findall(r'<img[^>]* src="([^":?]+)', html)}
    sizes = [picture.stat().st_size for picture in pictures if picture.is_file()]
    return len(gzip.compress(html.encode())) + sum(sizes)


def heaviest(book, count=3):
    """The names of the heaviest chapters."""
    pages = sorted(book.glob("nbs/*.html"), key=weight, reverse=True)
    return [page.relative_to(book).as_posix() for page in pages[:count]]


def chromium():
    """Where the browser is: $CHROMIUM, `chromium` or `google-chrome`."""
    found = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    return found or sys.exit("no Chromium: install it, or set CHROMIUM to its path")


def report(address, form):
    """What Lighthouse says of a page, parsed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        command = ["npx", "--yes", f"lighthouse@{VERSION}", address, *FORMS[form], "--quiet"]
        command += ["--output=json", f"--output-path={out}", f"--chrome-flags={FLAGS}"]
        subprocess.run(command, check=True, env=os.environ | {"CHROME_PATH": chromium()})
        return json.loads(out.read_text(encoding="utf-8"))


def scores(found):
    """The four scores out of 100."""
    return [round(100 * (found["categories"][kind]["score"] or 0)) for kind in KINDS]


def medians(reports):
    """The medians of the scores of several runs."""
    return [round(statistics.median(column)) for column in zip(*map(scores, reports))]


def lost(found):
    """[(audit, what it says), ...] of what did not get its full points."""
    counted = {
        ref["id"]
        for kind in KINDS
        for ref in found["categories"][kind]["auditRefs"]
        if ref["weight"]
    }
    audits = [found["audits"][name] for name in sorted(counted)]
    return [
        (
            audit["id"],
            audit.get("displayValue", ""),
            audit.get("details", {}).get("items", [])[:4],
        )
        for audit in audits
        if audit["score"] is not None and audit["score"] < 0.9
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pages", nargs="*", help="index.html nbs/10_attention.html ...")
    parser.add_argument("--runs", type=int, default=1, help="of which the median is printed")
    parser.add_argument("--book", type=Path, default=ROOT / "_build" / "html")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs {args.runs}: allowed are 1 and more")
    if not (args.book / "index.html").is_file():
        parser.error(f"no book in {args.book}: make book")
    print("| page | form |", " | ".join(KINDS), "|\n|---|---|" + "---|" * len(KINDS))
    with hosted(args.book) as site:
        for name in args.pages or ["index.html", *heaviest(args.book)]:
            for form in FORMS:
                found = [report(site + name, form) for _ in range(args.runs)]
                print(f"| {name} | {form} |", " | ".join(map(str, medians(found))), "|")
                for audit in lost(found[-1]):
                    print("   ", *audit)


if __name__ == "__main__":
    main()
