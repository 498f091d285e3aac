# Made by `python -m tools.stubs` from practice.py: do not edit.

