"""`python -m attnlib` is the command `attnlib`; so torchrun can start it."""

from attnlib.cli import main

if __name__ == "__main__":
    main()
