"""``python -m specrag``: the command line without the installed script."""

from __future__ import annotations

from specrag.cli.main import main

if __name__ == "__main__":
    main()
