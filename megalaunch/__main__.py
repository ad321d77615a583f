"""`python -m megalaunch` is `megalaunch`."""

from megalaunch.cli.app import main

if __name__ == "__main__":
    main()
