"""The token row of one episode while it grows: append only, so that what was sampled is what is trained."""

from __future__ import annotations

from collections.abc import Sequence


class TokenRow:
    """Token ids with mask, log-prob and policy version on each.

    Example:
        >>> row = TokenRow([5, 6])
        >>> row.add_sampled([7, 8], [-0.1, -0.2], version=3)
        >>> row.add_given([9])
        >>> row.token_ids, row.mask, row.versions
        ([5, 6, 7, 8, 9], [0, 0, 1, 1, 0], [-1, -1, 3, 3, -1])
        >>> row.completion_length
        3
    """

    __slots__ = ("logprobs", "mask", "prompt_length", "token_ids", "versions")

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_length = len(prompt_ids)
        self.token_ids: list[int] = list(prompt_ids)
        self.mask: list[int] = [0] * self.prompt_length
        self.logprobs: list[float] = [0.0] * self.prompt_length
        self.versions: list[int] = [-1] * self.prompt_length

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def completion_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    def add_sampled(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        version: int,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Append what the policy produced: it is trained. ``versions``: each token's, where they differ."""
        own = [version] * len(token_ids) if versions is None else versions
        if not len(token_ids) == len(logprobs) == len(own):
            raise AssertionError(
                f"{len(token_ids)} sampled ids came with {len(logprobs)} log-probs and {len(own)} versions"
            )
        self.token_ids += token_ids
        self.mask += [1] * len(token_ids)
        self.logprobs += logprobs
        self.versions += own

    def add_given(self, token_ids: Sequence[int]) -> None:
        """Append what the policy did not produce: separators, tool results, the next header."""
        self.token_ids += token_ids
        self.mask += [0] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [-1] * len(token_ids)
