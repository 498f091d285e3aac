"""Modules that the chapters write with `%%writefile`, for tests."""

import json
from pathlib import Path

NBS = Path(__file__).resolve().parent.parent / "nbs"


def write_modules(notebook, folder):
    """Write into a folder what a notebook's cells write next to the notebook.

    Parameters
    ----------
    notebook : str
        Such as "55_scaling".
    folder : path

    Returns
    -------
    list of str
        The names of the modules.
    """
    names = []
    cells = json.loads((NBS / f"{notebook}.ipynb").read_text("utf-8"))["cells"]
    for cell in cells:
        first, _, code = "".join(cell["source"]).partition("\n")
        if cell["cell_type"] == "code" and first.startswith("%%writefile "):
            name = first.split()[1]
            Path(folder, name).write_text(code, "utf-8")
            names.append(name.removesuffix(".py"))
    return names
