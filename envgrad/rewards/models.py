"""Reward models: a sequence classifier with one label, or any module that scores rows of token ids."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from envgrad.chat.renderer import ChatRenderer
from envgrad.environments.boundary import Raised, call_user, guard
from envgrad.errors import ConfigurationError, first_line
from envgrad.rewards.exchange import Exchange, exchange_of
from envgrad.rewards.results import read_rewards, value_of
from envgrad.rollout.scoring import RewardBatch

MAX_BATCH_TOKENS = 1 << 14
"""tokens of one forward pass, padding included; a longer row goes alone"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelOptions:
    """How reward models are loaded and run.

    Attributes:
        model_init_kwargs: for ``from_pretrained``, of models that are given by name.
        trust_remote_code: whether such a model may bring its own code.
        chat_template_kwargs: template variables for rendering chats with the reward model's template.
        device: where the models are put; None: they stay where they are.
        has_tools: see ``exchange_of``.
    """

    model_init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device | str | None = None
    has_tools: bool = False


class RewardModel:
    """A reward model as a source of rewards: one score per completion, without gradients, in evaluation mode.

    A chat is rendered by the reward model's own chat template, plain text is the prompt with its completion; which of
    the two it is is read from the episode. Rows are padded on the right. Runs in a worker thread, one call at a time.

    Args:
        model: it is called as ``model(input_ids=..., attention_mask=...)``, both ``(n, length)`` on its device, and
            returns a tensor, or something with ``.logits``, of shape ``(n,)`` or ``(n, 1)``. It is called once here.
        name: its name in logs, messages and weights.
        tokenizer: its tokenizer. It is copied.
        options: see ``RewardModelOptions``.

    Raises:
        ConfigurationError: a processor instead of a tokenizer, no token to pad with, or a module that cannot be called
            like this, or does not return one score per row.
        ChatTemplateError: a chat template that cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        options: RewardModelOptions | None = None,
    ) -> None:
        if isinstance(tokenizer, ProcessorMixin) or not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ConfigurationError(
                f"reward model {name!r}: its processing class is a {type(tokenizer).__name__}; pass a text tokenizer"
            )
        self._options = options or RewardModelOptions()
        if self._options.device is not None:
            model.to(self._options.device)
        self._model = model
        self._name = name
        self._lock = threading.Lock()
        self._config = _text_config(model)
        # A copy of its own, since a tokenizer is not made for two threads.
        self._tokenizer: PreTrainedTokenizerBase = copy.deepcopy(tokenizer)
        self._pad = self._pad_token()
        self._renderer: ChatRenderer | None = None
        if self._tokenizer.chat_template is not None:
            kwargs = self._options.chat_template_kwargs
            self._renderer = ChatRenderer(self._tokenizer, chat_template_kwargs=kwargs)
        self._try()

    @property
    def name(self) -> str:
        return self._name

    @property
    def model(self) -> nn.Module:
        return self._model

    async def score(self, batch: RewardBatch) -> list[float | None]:
        """One finite score per episode; None where the model gives NaN.

        Raises:
            RewardFailure: the model raised, or gave an infinite score.
            RewardTimeout: it took longer than ``batch.timeout`` seconds.
            ConfigurationError: a chat, and the tokenizer has no chat template.
        """
        if not batch.episodes:
            return []
        where = f"reward model {self._name!r}"
        exchanges = [exchange_of(episode, has_tools=self._options.has_tools) for episode in batch.episodes]
        outcome = await call_user(where, self._score_exchanges, exchanges, workers=batch.workers, timeout=batch.timeout)
        return read_rewards(value_of(outcome, where, batch.timeout), batch.episodes, self._name)

    def score_texts(self, texts: Sequence[str]) -> list[float]:
        """The model's score of each text, in order. No special tokens are added: a template writes its own."""
        with self._lock:
            rows = [list(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]
            return [score for chunk in bounded(rows, MAX_BATCH_TOKENS) for score in self._forward(chunk)]

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> list[float]:
        return self.score_texts([self._text(exchange) for exchange in exchanges])

    def _text(self, exchange: Exchange) -> str:
        prompt, completion = exchange.prompt, exchange.completion
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        if isinstance(prompt, str) or isinstance(completion, str):
            raise AssertionError("an episode is a chat or plain text, never both")
        if self._renderer is None:
            raise ConfigurationError(
                f"reward model {self._name!r} has to score chats, and its tokenizer has no chat template; pass a "
                "tokenizer that has one in reward_processing_classes"
            )
        return self._renderer.render([*prompt, *completion])

    def _pad_token(self) -> int:
        configured = None if self._config is None else self._config.pad_token_id
        for token in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, configured):
            if isinstance(token, int):
                return token
        raise ConfigurationError(
            f"reward model {self._name!r}: its tokenizer has neither a pad nor an eos token; set tokenizer.pad_token"
        )

    def _try(self) -> None:
        """Score two short rows, so that a module of another kind is found before anything is sampled."""
        outcome = guard(self._forward, [[self._pad, self._pad], [self._pad]])
        match outcome:
            case Raised(error=ConfigurationError() as error):
                raise error
            case Raised(error=error):
                raise ConfigurationError(
                    f"reward model {self._name!r} cannot be called with input_ids and attention_mask: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[self._pad] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        device = _device(self._model)
        with torch.inference_mode(), _evaluating(self._model), _padding(self._config, self._pad):
            output = self._model(input_ids=ids.to(device), attention_mask=mask.to(device))
        scores = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
        if not isinstance(scores, torch.Tensor):
            raise ConfigurationError(
                f"reward model {self._name!r} returned {type(output).__name__}; it must return a tensor, or something "
                "with .logits"
            )
        if tuple(scores.shape) not in ((len(rows),), (len(rows), 1)):
            raise ConfigurationError(
                f"reward model {self._name!r} returned scores of shape {tuple(scores.shape)} for {len(rows)} rows; it "
                f"must return one per row: ({len(rows)},) or ({len(rows)}, 1). A sequence classifier has num_labels=1"
            )
        flat: list[float] = scores.reshape(-1).float().cpu().tolist()
        return flat


def load_reward_model(
    source: str | Path | nn.Module,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    options: RewardModelOptions | None = None,
) -> RewardModel:
    """A reward model from a name or path, a transformers model, or any module (which needs ``tokenizer``).

    Raises:
        ConfigurationError: it cannot be loaded, has no trained score head, or has no tokenizer.
    """
    options = options or RewardModelOptions()
    model = source if isinstance(source, nn.Module) else _load(str(source), name, options)
    if tokenizer is None:
        tokenizer = _load_tokenizer(source_of(source), name, options, loaded=not isinstance(source, nn.Module))
    return RewardModel(model, name, tokenizer, options)


def source_of(source: str | Path | nn.Module) -> str:
    """The name or path of a reward model; empty for a module that does not know it."""
    if isinstance(source, nn.Module):
        config = getattr(source, "config", None)
        return str(config._name_or_path or "") if isinstance(config, PreTrainedConfig) else ""
    return str(source)


def bounded(rows: Sequence[Sequence[int]], most: int) -> Iterator[Sequence[Sequence[int]]]:
    """Rows in order, in chunks that have at most ``most`` tokens once they are padded.

    Example:
        >>> list(bounded([[1, 2], [3], [4, 5, 6]], 5))
        [[[1, 2], [3]], [[4, 5, 6]]]
    """
    start, longest = 0, 0
    for end, row in enumerate(rows):
        longest = max(longest, len(row))
        if end > start and longest * (end + 1 - start) > most:
            yield rows[start:end]
            start, longest = end, len(row)
    if start < len(rows):
        yield rows[start:]


def _load(source: str, name: str, options: RewardModelOptions) -> PreTrainedModel:
    kwargs = {"trust_remote_code": options.trust_remote_code} | dict(options.model_init_kwargs)
    load: Callable[..., tuple[PreTrainedModel, Mapping[str, Any]]] = AutoModelForSequenceClassification.from_pretrained
    try:
        model, loading = load(source, num_labels=1, output_loading_info=True, **kwargs)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"reward model {source!r} cannot be loaded: {first_line(error)}") from error
    if loading["missing_keys"]:
        raise ConfigurationError(
            f"reward model {source!r} has no weights for {sorted(loading['missing_keys'])}, so its scores would be "
            "random; give a sequence classifier with one label that was trained to score"
        )
    return model


def _load_tokenizer(source: str, name: str, options: RewardModelOptions, *, loaded: bool) -> PreTrainedTokenizerBase:
    fix = "pass it in reward_processing_classes, at the reward model's place"
    if not source:
        raise ConfigurationError(f"reward model {name!r} needs a tokenizer; {fix}")
    kept = ("revision", "subfolder", "cache_dir", "token", "local_files_only") if loaded else ()
    kwargs = {key: options.model_init_kwargs[key] for key in kept if key in options.model_init_kwargs}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=options.trust_remote_code, **kwargs
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"reward model {name!r}: no tokenizer can be loaded from {source!r} ({first_line(error)}); {fix}"
        ) from error
    return tokenizer


def _text_config(model: nn.Module) -> PreTrainedConfig | None:
    config = getattr(model, "config", None)
    return config.get_text_config() if isinstance(config, PreTrainedConfig) else None


def _device(model: nn.Module) -> torch.device:
    tensors = [*(p for p, _ in zip(model.parameters(), range(1), strict=False)), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; every submodule's own mode is put back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _padding(config: PreTrainedConfig | None, pad: int) -> Iterator[None]:
    """Transformers' classifiers score the last token that is no pad token, by their configuration's id for it."""
    if config is None:
        yield
        return
    before = config.pad_token_id
    config.pad_token_id = pad
    try:
        yield
    finally:
        config.pad_token_id = before
