"""The code that a page defines, for a benchmark that runs the same at length."""

from types import SimpleNamespace

import nbformat

from tools.notebooks import NBS, code_of


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
    sources = {cell.id: cell for cell in nbformat.read(NBS / f"{notebook}.ipynb", 4).cells}
    found = dict(names)
    for cell in cells:
        exec(code_of(sources[cell]), found)
    return SimpleNamespace(**found)
