"""Token ids -> the text of each token, by the run's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from envgrad.environments.boundary import Ok, guard

_UNFINISHED = "\ufffd"
_CONTEXT = 4
"""tokens before the present one that are decoded with it: some decoders treat the first token of a text differently"""


def find_tokenizer(run: Path) -> Path | None:
    """The ``tokenizer.json`` of a run: beside its episodes, in its folder, or in its newest checkpoint.

    Example:
        >>> find_tokenizer(Path("/no/such/run")) is None
        True
    """
    checkpoints = sorted(run.glob("checkpoint-*"), key=_number, reverse=True)
    for folder in (run / "episodes", run, *checkpoints):
        path = folder / "tokenizer.json"
        if path.is_file():
            return path
    return None


def _number(checkpoint: Path) -> int:
    digits = checkpoint.name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1


def token_texts(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text that each token adds; joined they are the row's text.

    A character whose bytes lie in several tokens is the text of the last of them; the others have none.

    Args:
        ids: [T].
        decode: A tokenizer's decoder that keeps special tokens.

    Returns:
        [T] texts.

    Example:
        >>> token_texts([104, 105, 195, 188], lambda ids: bytes(ids).decode("utf-8", "replace"))
        ['h', 'i', '', '\u00fc']
    """
    texts: list[str] = []
    begin, read = 0, 0  # ids[begin:read] is decoded context, ids[read:] is not shown yet
    for end in range(1, len(ids) + 1):
        known = decode(ids[begin:read]) if read > begin else ""
        text = decode(ids[begin:end])
        whole = len(text) >= len(known) and not text.endswith(_UNFINISHED)
        # Four bytes make the longest character: what is unfinished after that is no character at all.
        if whole or end - read >= 4:
            texts.append(text[len(known) :])
            read = end
            begin = max(begin, read - _CONTEXT)
        else:
            texts.append("")
    return texts


class TokenDecoder:
    """A run's tokenizer, read when it is first needed.

    Args:
        run: The run's folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._decode: Callable[[Sequence[int]], str] | None = None

    def texts(self, ids: Sequence[int]) -> list[str] | None:
        """[T] texts; None where the run has no ``tokenizer.json`` yet, or one that cannot be read."""
        if self._decode is None:
            path = find_tokenizer(self._run)
            self._decode = None if path is None else _decoder(path)
        return None if self._decode is None else token_texts(ids, self._decode)


def _decoder(path: Path) -> Callable[[Sequence[int]], str] | None:
    from tokenizers import Tokenizer

    # A file that is being written, or of another version: the library raises a plain Exception.
    match guard(Tokenizer.from_file, str(path)):
        case Ok(value=tokenizer) if isinstance(tokenizer, Tokenizer):
            return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
        case _:
            return None
