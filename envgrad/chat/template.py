"""A chat template as text: rendering, and what the template can and cannot print.

Everything known about a template is found by rendering small probe chats, never by a list of known templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import ChatTemplateError, ConfigurationError
from ..types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolSchemas: TypeAlias = Sequence[Mapping[str, Any]] | None
"""JSON schemas of the tools, as ``transformers.utils.get_json_schema`` writes them."""

PROBE_USER = "envgradquestion"
SENTINEL = "envgradsentinel"
PROBE_RESULT = "envgradresult"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "envgradtool",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"envgradkey": {"type": "string", "description": "A probe."}},
            "required": ["envgradkey"],
        },
    },
}

HERMES_SCHEMAS = """# Tools

You can call these functions; each line is the JSON schema of one:
<tools>
{schemas}
</tools>

To call a function, write its name and its arguments as one JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": "function_name", "arguments": {{"argument_name": "value"}}}}
</tool_call>"""


@cache
def _template_errors() -> tuple[type[Exception], ...]:
    """What a Jinja template raises on a chat that it cannot print: its own errors, and those of Python's operators."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """Renders chats with a tokenizer's template, in the form of messages that this template prints.

    Attributes:
        source: a template that replaces the tokenizer's own.
        variables: extra template variables, given to every rendering.
        content_blocks: the template prints ``content`` only as ``[{"type": "text", "text": ...}]``.
        arguments_as_text: the template prints tool-call arguments only as a JSON string.
        knows_tools: the template prints tool schemas; if not, they go into the system prompt in Hermes form.
        system_role: the template prints system messages; if not, schemas go into the first user message.
    """

    tokenizer: PreTrainedTokenizerBase
    source: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    content_blocks: bool = False
    arguments_as_text: bool = False
    knows_tools: bool = True
    system_role: bool = True

    @classmethod
    def probe(
        cls, tokenizer: PreTrainedTokenizerBase, source: str | None, variables: Mapping[str, Any]
    ) -> ChatTemplate:
        """Find the forms that this template prints.

        Raises:
            ChatTemplateError: not even a single user message can be rendered.
        """
        template = cls(tokenizer=tokenizer, source=source, variables=variables)
        user = {"role": "user", "content": PROBE_USER}
        if PROBE_USER not in (template.try_render([user]) or ""):
            template = replace(template, content_blocks=True)
            if PROBE_USER not in (template.try_render([user]) or ""):
                replace(template, content_blocks=False).render([user])  # the template's own error, if it has one
                raise ChatTemplateError(
                    "the chat template does not print the content of a user message, neither as a string nor as text "
                    "blocks: pass another template as chat_template="
                )
        system = template.try_render([{"role": "system", "content": SENTINEL}, user])
        with_tools = template.try_render([user], [PROBE_TOOL])
        return replace(
            template,
            system_role=system is not None and SENTINEL in system,
            knows_tools=with_tools is not None and PROBE_TOOL["function"]["name"] in with_tools,
        )

    def try_render(
        self, messages: Sequence[Message], tools: ToolSchemas = None, *, generation: bool = True
    ) -> str | None:
        """``render``, or None if the template raises."""
        try:
            return self.render(messages, tools, generation=generation)
        except ChatTemplateError:
            return None

    def render(self, messages: Sequence[Message], tools: ToolSchemas = None, *, generation: bool = True) -> str:
        """The chat as text, with the generation prompt if ``generation``.

        Raises:
            ChatTemplateError: the template refuses this chat; its own error is chained.
        """
        if tools and not self.knows_tools:
            messages = self._with_schemas(messages, tools)
            tools = None
        prepared = [self._prepare(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                prepared,
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self.source,
                add_generation_prompt=generation,
                tokenize=False,
                **self.variables,
            )
        except _template_errors() as error:
            roles = [message.get("role") for message in messages]
            raise ChatTemplateError(
                f"the chat template cannot print a chat with the roles {roles}: {type(error).__name__}: {error}. "
                "Change the messages, or pass another template as chat_template="
            ) from error
        if not isinstance(text, str):
            raise AssertionError(f"apply_chat_template(tokenize=False) returned {type(text).__name__}")
        return text

    def generation_prompt(self) -> str:
        """What the template writes before an answer, e.g. ``<|im_start|>assistant\\n``; empty if it writes nothing."""
        user = [{"role": "user", "content": PROBE_USER}]
        closed, opened = self.render(user, generation=False), self.render(user)
        return opened[len(closed) :] if opened.startswith(closed) else opened[opened.find(PROBE_USER) :]

    def _prepare(self, message: Message) -> Message:
        prepared = dict(message)
        prepared["content"] = self._content(message.get("content"))
        if message.get("tool_calls"):
            prepared["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return prepared

    def _content(self, content: object) -> str | list[dict[str, Any]]:
        text = content_text(content)
        return [{"type": "text", "text": text}] if self.content_blocks else text

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(call.get("function"), Mapping):
            return dict(call)
        function = dict(call["function"])
        arguments = function.get("arguments")
        if self.arguments_as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif not self.arguments_as_text and isinstance(arguments, str):
            try:
                decoded = json.loads(arguments)
            except ValueError:
                decoded = None
            # A template that needs a mapping cannot print anything else; a malformed string is left to its own error.
            function["arguments"] = decoded if isinstance(decoded, dict) else arguments
        return {**call, "function": function}

    def _with_schemas(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = HERMES_SCHEMAS.format(schemas=schemas)
        role = "system" if self.system_role else "user"
        if messages and messages[0].get("role") == role:
            first = content_text(messages[0].get("content"))
            joined = f"{first}\n\n{text}" if role == "system" else f"{text}\n\n{first}"
            return [{**messages[0], "content": joined}, *messages[1:]]
        return [{"role": role, "content": text}, *messages]


def content_text(content: object) -> str:
    """Message content as one string: a string, None, or text blocks, which are joined.

    Raises:
        ConfigurationError: an image or another block that is not text.

    Example:
        >>> content_text([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
        'ab'
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(_block_text(block) for block in content)
    raise ConfigurationError(
        f"message content must be a string or a list of text blocks, got {type(content).__name__}: {content!r}"
    )


def _block_text(block: object) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Mapping) and isinstance(block.get("text"), str) and block.get("type", "text") == "text":
        return str(block["text"])
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    raise ConfigurationError(
        f"message content holds a block of type {kind!r}: only text is supported. "
        'Return text blocks {"type": "text", "text": ...} or a string'
    )
