"""The code that a page defines, for a benchmark that runs the same at length."""

import json
from pathlib import Path
from types import SimpleNamespace

NOTEBOOKS = Path(__file__).resolve().parent.parent / "nbs"


def run_cells(notebook, *cells, modules=(), names=None):
    """Run some cells of a page, and return all names that are then defined.

    Parameters
    ----------
    notebook : str
        Name of the page, such as "40_mae".
    *cells : str
        Ids of the cells, in the order in which they run.
    modules : sequence of modules
        The cells know them by their last name, such as "mae", and all names in them.
    names : dict, optional
        Other objects that the cells use, by their names.

    Returns
    -------
    SimpleNamespace
        With all these names, and with what the cells define.
    """
    page = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))
    sources = {cell["id"]: "".join(cell["source"]) for cell in page["cells"]}
    found = {}
    for module in modules:
        found.update(vars(module))
    for module in modules:
        found[module.__name__.rpartition(".")[2]] = module
    found.update(names or {})
    for cell in cells:
        exec(sources[cell], found)
    return SimpleNamespace(**found)
