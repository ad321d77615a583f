"""`python -m megalaunch` is `megalaunch`."""

from megalaunch.cli.main import main

if __name__ == "__main__":
    main()
