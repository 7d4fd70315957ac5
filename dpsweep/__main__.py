"""`python -m dpsweep` is the `dpsweep` command."""

from dpsweep.cli import main

if __name__ == "__main__":
    main()
