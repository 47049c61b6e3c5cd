"""Makes ``python -m spingrad`` run the command ``spingrad``."""

from spingrad.cli import main

if __name__ == "__main__":
    main()
