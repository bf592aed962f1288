"""``python -m envgrad.cli`` is the ``envgrad`` command: what ``accelerate launch -m`` starts."""

from __future__ import annotations

from envgrad.cli.main import main

if __name__ == "__main__":
    main()
