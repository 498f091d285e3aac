"""What the benchmarks share that needs no package."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNFINISHED = 75  # the exit status of a command that ran out of time, and can be given again


def version(*folders):
    """A fingerprint of the code of some folders, which also a copy without git has."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def reason(problem):
    """An error in one line: its class, and the first line of what it says."""
    words = str(problem).strip() or "no message"
    return f"{type(problem).__name__}: {words.splitlines()[0][:150]}"
