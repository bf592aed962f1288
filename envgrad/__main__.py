"""``python -m envgrad`` is the ``envgrad`` command."""

from __future__ import annotations

from envgrad.cli.main import main

if __name__ == "__main__":
    main()
