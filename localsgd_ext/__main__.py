"""`python -m localsgd_ext`: the same as the console script `localsgd-ext`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
