"""``python -m specrag``: the command line without its script."""

from __future__ import annotations

from specrag.cli.main import main

if __name__ == "__main__":
    main()
