"""The code that a page defines, for a benchmark that runs the same at length."""

import json
from pathlib import Path
from types import SimpleNamespace

NOTEBOOKS = Path(__file__).resolve().parent.parent / "nbs"


def run_cells(notebook, *cells, names):
    """Run some cells of a page, and return all names that are then defined.

    Parameters
    ----------
    notebook : str
        Name of the page, such as "40_mae".
    *cells : str
        Ids of the cells, in the order in which they run.
    names : dict
        Modules and objects that the cells use, by their names.

    Returns
    -------
    SimpleNamespace
        With `names`, and with what the cells define.
    """
    page = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))
    sources = {cell["id"]: "".join(cell["source"]) for cell in page["cells"]}
    found = dict(names)
    for cell in cells:
        exec(sources[cell], found)
    return SimpleNamespace(**found)
