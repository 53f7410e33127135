"""`python -m unisono` is the command `unisono`."""

from __future__ import annotations

import sys

from unisono.cli import main

if __name__ == "__main__":
    sys.exit(main())
