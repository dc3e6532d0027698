"""Lets `python -m kubelend` do what the `kubelend` command does, where no script is on the PATH."""

from kubelend.cli import main

if __name__ == "__main__":
    main.main()
