"""``envgrad view``: where the page is, and how to reach it."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import typer

from envgrad.viewer.serve import ViewAddress, serve


def run_view(folders: Sequence[Path], *, host: str, port: int | None, open_browser: bool) -> None:
    """Serve the viewer until Ctrl-C.

    Raises:
        ConfigurationError: an extra is missing, a folder holds no episode log, or the address cannot be had.
    """
    address = ViewAddress(host=host, port=port)

    def ready(url: str) -> None:
        typer.echo(f"The viewer is at {url}")
        if os.environ.get("SSH_CONNECTION") and address.local:
            place = urlsplit(url)
            typer.echo(
                f"From your own machine: ssh -L {place.port}:{place.hostname}:{place.port} THIS_MACHINE, then open it."
            )
        if not address.local:
            typer.echo("Everybody who has this address can read the run: traffic is not encrypted.")
        typer.echo("Ctrl-C ends it.")
        if open_browser and has_display():
            webbrowser.open(url)

    serve(folders, address, ready)


def has_display() -> bool:
    """Whether a browser window can be opened here: never a text browser in the terminal."""
    if sys.platform == "darwin":
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
