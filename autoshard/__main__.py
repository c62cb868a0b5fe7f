"""`python -m autoshard`: the command line."""

from autoshard.cli import main

if __name__ == "__main__":
    main()
