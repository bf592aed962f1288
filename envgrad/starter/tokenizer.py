"""The starter's tokenizer and chat template.

A byte-level BPE of a few hundred tokens, so any text goes in and comes out unchanged. Roles, the start of a call and
the end of a turn are one special token each, and the fixed parts of a call's JSON are one ordinary token each, which
makes a call short::

    <|tools|>move(direction: north|east|south|west)
    <|user|>Reach the goal in six moves.
    <|assistant|><|call|>{"name": "move", "arguments": {"direction": "north"}}<|end|>
    <|tool|>east north
    <|assistant|>

(The template writes no line breaks; they are for reading.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, SYSTEM, TOOLS, USER, ASSISTANT, TOOL, CALL, END = (
    f"<|{name}|>" for name in ("pad", "system", "tools", "user", "assistant", "tool", "call", "end")
)
SPECIAL_TOKENS = (PAD, SYSTEM, TOOLS, USER, ASSISTANT, TOOL, CALL, END)
CALL_PIECES = ('{"name": "', '", "arguments": {"', '", "arguments": {', '": "', '": ', '", "', ', "', '"}}', "}}")
"""the fixed parts of a call's JSON"""
VOCABULARY_SIZE = 600

CHAT_TEMPLATE = """\
{%- macro kind(property) -%}
    {%- if property.enum is defined -%}
        {{- property.enum | join("|") -}}
    {%- elif property.anyOf is defined -%}
        {%- for choice in property.anyOf -%}{{- kind(choice) -}}{%- if not loop.last -%}|{%- endif -%}{%- endfor -%}
    {%- elif property.type is defined and property.type is not string -%}
        {{- property.type | join("|") -}}
    {%- else -%}
        {{- property.type | default("any") -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for block in content -%}{{- block.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- "<|tools|>" -}}
    {%- for tool in tools -%}
        {%- set function = tool.function | default(tool) -%}
        {%- set parameters = function.parameters | default({}) -%}
        {%- set required = parameters.required | default([]) -%}
        {{- function.name -}}(
        {%- for name, property in (parameters.properties | default({})).items() -%}
            {{- name -}}{%- if name not in required -%}?{%- endif -%}{{- ": " -}}{{- kind(property) -}}
            {%- if not loop.last -%}{{- ", " -}}{%- endif -%}
        {%- endfor -%}
        )
        {%- if not loop.last -%}{{- "\\n" -}}{%- endif -%}
    {%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant", "tool"] -%}
        {{- raise_exception("the roles are system, user, assistant and tool, not " ~ message.role) -}}
    {%- endif -%}
    {{- "<|" ~ message.role ~ "|>" -}}{{- text(message.content) -}}
    {%- if message.role == "assistant" -%}
        {%- for call in message.tool_calls | default([], true) -%}
            {%- set function = call.function | default(call) -%}
            {%- set arguments = function.arguments | default({}) -%}
            {{- '<|call|>{"name": ' -}}{{- function.name | tojson -}}{{- ', "arguments": ' -}}
            {%- if arguments is string -%}{{- arguments -}}{%- else -%}{{- arguments | tojson -}}{%- endif -%}
            {{- "}" -}}
        {%- endfor -%}
        {{- "<|end|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from rendered chats.

    Example:
        >>> tokenizer = build_tokenizer(["<|user|>north<|assistant|>east<|end|>"] * 9)
        >>> tokenizer.decode(tokenizer.encode("north \\u00fc {")) == "north \\u00fc {"
        True
    """
    tokenizer = Tokenizer(models.BPE())
    # Words keep no leading space, so that a word is one token wherever it stands: in a reply, a schema or an argument.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[A-Za-z]+|[0-9]+|\s+|[^A-Za-z0-9\s]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(CALL_PIECES),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_ordinary_text(texts), trainer)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in CALL_PIECES])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(SPECIAL_TOKENS[1:-1]),
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _ordinary_text(texts: Iterable[str]) -> Iterator[str]:
    """The text between the tokens that are given, not learned."""
    given = re.compile(
        "|".join(re.escape(token) for token in sorted(SPECIAL_TOKENS + CALL_PIECES, key=len, reverse=True))
    )
    for text in texts:
        yield from (part for part in given.split(text) if part)
