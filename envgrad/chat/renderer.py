"""Messages -> token ids, append-only: the row of an episode only grows.

::

    row = renderer.open(messages, tools)               # the opening prompt, up to the generation prompt
    row += sampled_ids                                 # never re-encoded
    row += renderer.suffix(sampled_ids, results, tools)  # end of turn if missing, separator, results, next prompt
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ChatTemplateError, ConfigurationError
from ..types import Message, ToolCall
from .call_forms import RawCall
from .suffix import SuffixWriter, Terminators
from .template import PROBE_RESULT, PROBE_USER, ChatTemplate, ToolSchemas, content_text
from .tool_calls import SampledTurn, ToolParser, TurnReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatRenderer", "SampledTurn"]


ENCODINGS_KEPT, LONGEST_KEPT = 4096, 2000
"""texts whose encoding is remembered, and the characters of the longest of them"""


class ChatRenderer:
    """Turns chats into token ids with any chat template, and sampled ids into messages and tool calls.

    Args:
        tokenizer: a text tokenizer. Without a chat template, prompts are plain text: messages joined by newlines,
            observations on a line of their own.
        chat_template: replaces the tokenizer's template.
        chat_template_kwargs: template variables for every rendering, e.g. ``{"enable_thinking": False}``.
        tool_parser: how calls are read: a name from ``envgrad.chat.tool_calls.PARSERS``, or a callable. By default the
            tokenizer's ``response_template`` decides, else the template's own way to print calls.
        eos_token_ids: the stop tokens of the model's ``generation_config``.

    Raises:
        ConfigurationError: a processor instead of a tokenizer, or an unknown parser name.
        ChatTemplateError: a template that cannot print a user message.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str | ToolParser | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        from transformers import PreTrainedTokenizerBase

        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ConfigurationError(
                f"a chat is rendered by a text tokenizer, got {type(tokenizer).__name__}: only text is supported, "
                "so pass processor.tokenizer instead of a processor"
            )
        self.tokenizer = tokenizer
        self._encoded: dict[str, tuple[int, ...]] = {}
        self._eos_ids = tuple(dict.fromkeys([*eos_token_ids, *_eos(tokenizer)]))
        self._template: ChatTemplate | None = None
        end_of_turn = ""
        if chat_template is not None or tokenizer.chat_template is not None:
            self._template = ChatTemplate.probe(tokenizer, chat_template, chat_template_kwargs or {})
            end_of_turn = SuffixWriter(self._template, self._terminators()).user_style.end_of_turn
        self._reader = TurnReader(tokenizer, self._template, tool_parser, end_of_turn)
        self._template = self._reader.template
        self._suffixes: SuffixWriter | None = None
        if self._template is not None:
            self._suffixes = SuffixWriter(self._template, self._terminators(), self._reader.call_close)
        self._prompts = self._find_prompts()
        self._end_ids: dict[str, tuple[int, ...]] = {}
        self.stop_token_ids = self._stop_token_ids()

    def check(self, tools: ToolSchemas) -> None:
        """Make sure that a tool round can be rendered; without tools there is nothing to check.

        Raises:
            ChatTemplateError: there is no template, or it can render no tool round in any form.
        """
        if tools:
            self._need_template("tools")
            self.open([{"role": "user", "content": PROBE_USER}], tools)
            name = tools[0].get("function", tools[0]).get("name")
            self.suffix(
                (), [{"role": "tool", "name": name, "tool_call_id": "c00000000", "content": PROBE_RESULT}], tools
            )

    def render(self, messages: Sequence[Message], tools: ToolSchemas = None, *, generation: bool = False) -> str:
        """A whole chat as the template prints it: for reading and comparing, never for training."""
        if self._template is None:
            return _plain_opening(messages)
        return self._template.render(messages, tools, generation=generation)

    def open(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """Token ids of the opening prompt; they end with the generation prompt.

        Raises:
            ChatTemplateError: the template refuses these messages, or there are tools and no template.
        """
        if self._template is None:
            if tools:
                self._need_template("tools")
            return list(self.tokenizer.encode(_plain_opening(messages)))
        # As in apply_chat_template: the template writes BOS itself, if there is to be one.
        return self._encode(self._template.render(messages, tools))

    def open_text(self, text: str) -> list[int]:
        """Token ids of a prompt that is plain text, as the tokenizer encodes it by itself: no template."""
        return list(self.tokenizer.encode(text))

    def read_text(self, token_ids: Sequence[int]) -> SampledTurn:
        """What was sampled behind plain text: text, without special tokens and without calls."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return SampledTurn(message={"role": "assistant", "content": text}, calls=(), text=text)

    def suffix(self, turn_ids: Sequence[int], results: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """Token ids that follow a sampled turn: its end if that was not sampled, separator, results, next prompt.

        Args:
            turn_ids: the sampled ids, with the terminator if one was sampled.
            results: all messages that answer this turn: role ``tool`` (with ``name`` and ``tool_call_id``), or ``user``
                in environments that read free text.
            tools: the tools' schemas.

        Raises:
            ChatTemplateError: the template cannot print these results.
        """
        if self._suffixes is None:
            if any(message.get("role") == "tool" for message in results):
                self._need_template("tool results")
            observation = "\n".join(content_text(message.get("content")) for message in results)
            return self._encode(f"\n{observation}\n")
        end, tail = self._suffixes.write(results, tools)
        end_ids = self._end_of_turn_ids(end)
        ids = self._encode(end + tail)
        # Encoded behind the end of turn, as in a whole chat: some tokenizers treat the start of a text apart.
        tail_ids = ids[len(end_ids) :] if tuple(ids[: len(end_ids)]) == end_ids else self._encode(tail)
        return [*_missing(turn_ids, end_ids), *tail_ids]

    def read(self, token_ids: Sequence[int], tools: ToolSchemas, *, turn: int = 0) -> SampledTurn:
        """What a sampled turn says: never raises, whatever was sampled.

        Args:
            token_ids: the sampled ids.
            tools: the tools' schemas, for forms that write arguments as plain text; None if the environment has none.
            turn: the turn's number: it makes call ids unique in the episode, and tells an answer to the opening from an
                answer to tool results, since a template may open reasoning in only one of these prompts.
        """
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parsed = self._reader.read(text, tools, prompt=self._prompts[1 if turn and tools else 0])
        calls = _tool_calls(parsed.calls, turn)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        written = [_call_message(call) for call in calls if call.error is None]
        if written:
            message["tool_calls"] = written
        return SampledTurn(message=message, calls=calls, text=text)

    def _encode(self, text: str) -> list[int]:
        """Tool results and openings repeat, and encoding is the dearest part of a turn: the last ones are kept."""
        if len(text) > LONGEST_KEPT:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        known = self._encoded.pop(text, None)
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False)) if known is None else known
        self._encoded[text] = ids
        if len(self._encoded) > ENCODINGS_KEPT:
            del self._encoded[next(iter(self._encoded))]
        return list(ids)

    def _end_of_turn_ids(self, end: str) -> tuple[int, ...]:
        if end not in self._end_ids:
            self._end_ids[end] = tuple(self._encode(end)) if end else ()
        return self._end_ids[end]

    def _find_prompts(self) -> tuple[str, str]:
        """The ends of the prompts before a first answer and before an answer to tool results."""
        if self._template is None or self._suffixes is None:
            return "", ""
        first = self._template.generation_prompt()
        try:
            return first, self._suffixes.probe_tail()
        except ChatTemplateError:
            return first, first

    def _terminators(self) -> Terminators:
        added = self.tokenizer.added_tokens_decoder
        stops = [self.tokenizer.convert_ids_to_tokens(token) for token in self._eos_ids]
        specials = [token.content for token in added.values() if token.special]
        return Terminators(stops=tuple(stops), specials=tuple(specials))

    def _stop_token_ids(self) -> tuple[int, ...]:
        """The known ones, and the template's terminator if it is one special token that ends nothing but turns."""
        ids = list(self._eos_ids)
        if self._suffixes is not None:
            added = self.tokenizer.added_tokens_decoder
            for end in self._suffixes.ends_of_turn():
                last = self._end_of_turn_ids(end)[-1:]
                ids += [
                    token for token in last if token in added and added[token].content not in self._reader.marks.close
                ]
        return tuple(dict.fromkeys(ids))

    def _need_template(self, what: str) -> SuffixWriter:
        if self._suffixes is None:
            raise ChatTemplateError(
                f"{what} need a chat template, and this tokenizer has none: pass chat_template= or use a chat model"
            )
        return self._suffixes


def _eos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _missing(turn_ids: Sequence[int], end_ids: tuple[int, ...]) -> tuple[int, ...]:
    """What of the end of turn was not sampled."""
    if not end_ids or (turn_ids and turn_ids[-1] == end_ids[-1]):
        return ()
    for count in range(min(len(end_ids), len(turn_ids)), 0, -1):
        if tuple(turn_ids[-count:]) == end_ids[:count]:
            return end_ids[count:]
    return end_ids


def _plain_opening(messages: Sequence[Message]) -> str:
    return "\n".join(content_text(message.get("content")) for message in messages)


def _tool_calls(calls: Sequence[RawCall], turn: int) -> tuple[ToolCall, ...]:
    """Calls with ids: what the model wrote if it is unique in the turn, else nine letters and digits.

    That is the narrowest form of id that a published template asks for.
    """
    written = [call.id for call in calls]
    return tuple(
        ToolCall(
            id=call.id if call.id and written.count(call.id) == 1 else f"c{turn % 10**5:05d}{index % 10**3:03d}",
            name=call.name,
            arguments=call.arguments,
            error=call.error,
        )
        for index, call in enumerate(calls)
    )


def _call_message(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
