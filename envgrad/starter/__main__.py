"""``python -m envgrad.starter``: make the starter model again from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envgrad.starter import STARTER_PATH


def main(
    folder: Annotated[Path, typer.Option(help="where to save model and tokenizer")] = STARTER_PATH,
    examples: Annotated[Path, typer.Option(help="the folder of the example environments")] = Path("examples"),
    seed: Annotated[int, typer.Option(help="decides every draw")] = 0,
) -> None:
    """Make the starter model: tokenizer, random transcripts, supervised training, figures."""
    import torch

    from envgrad.starter.recipe import Recipe, make_starter

    # Another count would round differently and so make other weights; so narrow a model gains little from more.
    torch.set_num_threads(1)
    make_starter(folder, examples=examples, recipe=Recipe(seed=seed))


if __name__ == "__main__":
    typer.run(main)
