"""An MCP server over stdio with state: notes. Run as a program; PIDS names a file to which its process id is added."""

from __future__ import annotations

import os
from typing import Literal

from mcp.server.fastmcp import FastMCP

server = FastMCP("notes", log_level="ERROR")
notes: list[str] = []


@server.tool()
def keep(text: str, where: Literal["top", "bottom"] = "bottom", times: int = 1) -> str:
    """Keep a note."""
    if not text:
        raise ValueError("a note needs a text")
    notes[:] = [text] * times + notes if where == "top" else notes + [text] * times
    return f"{len(notes)} kept"


@server.tool()
def listed() -> str:
    """All notes."""
    return "|".join(notes)


@server.tool()
def crash() -> str:
    """End the process."""
    os._exit(3)


if __name__ == "__main__":
    if "PIDS" in os.environ:
        with open(os.environ["PIDS"], "a") as file:
            print(os.getpid(), file=file)
    server.run()
