"""``python -m kvladder``: the same as the command ``kvladder``."""

import sys

from kvladder.cli import main

if __name__ == "__main__":
    sys.exit(main())
