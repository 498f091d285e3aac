# Made by `python -m tools.stubs` from modern.py: do not edit.

