"""Small chat templates, one for each habit of the published ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from envgrad.chat import ChatRenderer
from helpers.tokenizers import CHATML, bpe_tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "inc",
            "description": "Increase the counter.",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer", "description": "By how much."},
                    "note": {"type": "string", "description": "Why."},
                },
                "required": ["n"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at the counter.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]

_SYSTEM_WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
)
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_HERMES = (
    "{{ '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\n</tool_call>' }}"
)


def _chatml(assistant: str, *, prompt: str = _PROMPT, content: str = "message.content", before: str = "") -> str:
    return (
        before + _SYSTEM_WITH_TOOLS + "{% for message in messages %}"
        "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}" + assistant + "{{ '<|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>' + message.role + '\n' + " + content + " + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}" + prompt
    )


def _calls(one: str, between: str = "\n") -> str:
    return (
        "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '"
        + between.replace("\n", "\\n")
        + "' }}{% endif %}"
        + one
        + "{% endfor %}"
    )


_DROP_THINK = (
    "{% set last = namespace(user=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)
_THINK_TURN = (
    "{% set content = message.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if message.reasoning_content and loop.last %}"
    "{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ content }}"
)

_MERGED_RESULTS = (
    _SYSTEM_WITH_TOOLS + "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    + _calls(_HERMES)
    + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + _PROMPT
)

_LLAMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% elif message.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{% if tools and loop.first %}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{% endif %}"
    "{{ message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

_NO_TOOLS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start>' + message.role + '\n' + message.content | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)

_AS_ASSISTANT = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + ' </s>' }}{% endif %}{% endfor %}"
)

_BLOCKS = (
    "{% for message in messages %}{{ message.role | capitalize + ': ' }}"
    "{% for block in message.content %}{% if block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}"
    "{{ '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)

_CHANNELS = (
    "{% if tools %}{{ '<|start|>developer<|message|># Tools' }}"
    "{% for tool in tools %}{{ '\n' + tool.function.name }}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% set last = namespace(name=none) %}{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}"
    "{% if message.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}{% set last.name = call.name %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson + '<|call|>' }}"
    "{% elif message.role == 'assistant' %}"
    "{% if message.thinking and loop.last %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% set last.name = none %}"
    "{% elif message.role == 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('a tool message needs a call before it') }}{% endif %}"
    "{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ message.content | tojson + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

_MISTRAL = (
    "{{ bos_token }}{% set last = namespace(user=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% if tools and loop.index0 == last.user %}"
    "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + message.content + '[/INST]' }}"
    "{% elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}"
    "{% if call.id is undefined or call.id | length != 9 %}"
    "{{ raise_exception('ids must have 9 characters') }}{% endif %}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']</s>' }}"
    "{% elif message.role == 'tool' %}"
    "{% if message.tool_call_id is undefined or message.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids must have 9 characters') }}{% endif %}"
    "{{ '[TOOL_RESULTS] ' + {'content': message.content, 'call_id': message.tool_call_id} | tojson }}"
    "{{ '[/TOOL_RESULTS]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + '</s>' }}"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)

_TAGGED_CALL = (
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\n' }}"
    "{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}"
)
_KEY_VALUE_CALL = (
    "{{ '<tool_call>' + call.function.name + '\n' }}"
    "{% for key, value in call.function.arguments | items %}{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' }}"
    "{{ value if value is string else value | tojson }}{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}"
)
_TEXT_ARGUMENTS = (
    "{{ '<|calls|><|call|>function<|sep|>' + call.function.name }}"
    "{{ '\n```json\n' + call.function.arguments + '\n```<|done|>' }}"
)
_BARE_CALL = (
    "{% macro show(value) %}{% if value is string %}{{ '<|q|>' + value + '<|q|>' }}{% elif value is mapping %}{{ '{' }}"
    "{% for k, v in value | items %}{{ k + ':' + show(v) + ('' if loop.last else ',') }}{% endfor %}{{ '}' }}"
    "{% elif value is iterable %}{{ '[' }}{% for v in value %}{{ show(v) + ('' if loop.last else ',') }}{% endfor %}"
    "{{ ']' }}{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A template and its tokenizer's terminators.

    ``history``: it prints earlier turns as they were sampled, so a whole row equals its own rendering.
    ``values``: which argument values its calls can carry: any JSON, or text that its marks cannot contain.
    """

    source: str
    eos: str = "<|im_end|>"
    stops: tuple[str, ...] = ()
    bos: str | None = None
    specials: tuple[str, ...] = ()
    history: bool = True
    values: str = "json"
    many_calls: bool = True
    tool_role: bool = True
    marks: tuple[str, ...] = field(default=())

    def tokenizer(self, **options: Any) -> PreTrainedTokenizerFast:
        specials = tuple(dict.fromkeys([*self.specials, *self.stops, self.eos, "<|endoftext|>", "<|im_start|>"]))
        return bpe_tokenizer(self.source, specials=specials, eos=self.eos, bos=self.bos, **options)

    def renderer(self, **options: Any) -> ChatRenderer:
        tokenizer = self.tokenizer()
        stops = [tokenizer.convert_tokens_to_ids(stop) for stop in self.stops]
        return ChatRenderer(tokenizer, eos_token_ids=stops, **options)


_LLAMA_SPECIALS = ("<|start_header_id|>", "<|end_header_id|>")
_CHANNEL_SPECIALS = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|constrain|>")

CASES: dict[str, Case] = {
    "chatml": Case(source=CHATML),
    "drops_earlier_thinking": Case(source=_chatml(_THINK_TURN + _calls(_HERMES), before=_DROP_THINK)),
    "prompt_opens_thinking": Case(
        source=_chatml(
            "{{ message.content }}" + _calls(_HERMES),
            prompt="{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
        ),
        history=False,
    ),
    "dict_arguments": Case(
        source=_chatml(
            "{{ message.content }}{% for call in message.tool_calls or [] %}"
            "{% for key, value in call.function.arguments.items() %}{% endfor %}{% endfor %}" + _calls(_HERMES)
        )
    ),
    "text_arguments": Case(
        source=_chatml("{{ message.content }}" + _calls(_TEXT_ARGUMENTS)),
        specials=("<|calls|>", "<|call|>", "<|sep|>", "<|done|>"),
    ),
    "content_is_needed": Case(
        source=_chatml(
            "{% if message.content is not string %}{{ raise_exception('content is needed') }}{% endif %}"
            "{{ message.content }}" + _calls(_HERMES)
        )
    ),
    "trims_content": Case(
        source=_chatml("{{ message.content | trim }}" + _calls(_HERMES), content="message.content | trim")
    ),
    "merges_results": Case(source=_MERGED_RESULTS),
    "llama": Case(
        source=_LLAMA, eos="<|eot_id|>", bos="<s>", specials=_LLAMA_SPECIALS, many_calls=False, stops=("<|eom_id|>",)
    ),
    "no_tools": Case(source=_NO_TOOLS, eos="<end>", bos="<s>", specials=("<start>",), tool_role=False),
    "results_as_answers": Case(source=_AS_ASSISTANT, eos="</s>", history=False, tool_role=False),
    "blocks": Case(source=_BLOCKS, eos="<end>"),
    "channels": Case(
        source=_CHANNELS,
        eos="<|return|>",
        stops=("<|call|>",),
        specials=_CHANNEL_SPECIALS,
        history=False,
        many_calls=False,
    ),
    "mistral": Case(
        source=_MISTRAL, eos="</s>", bos="<s>", history=False, specials=("[INST]", "[/INST]", "[TOOL_CALLS]")
    ),
    "tagged": Case(
        source=_chatml("{{ message.content }}" + _calls(_TAGGED_CALL)), values="text", marks=("</parameter>",)
    ),
    "key_value": Case(
        source=_chatml("{{ message.content }}" + _calls(_KEY_VALUE_CALL)), values="text", marks=("</arg_value>",)
    ),
    "python": Case(
        source=_chatml(
            "{{ message.content }}{% if message.tool_calls %}{{ '<|calls|>[' }}{% for call in message.tool_calls %}"
            "{{ call.function.name + '(' }}{% for key, value in call.function.arguments | items %}"
            "{{ key + '=' + value | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}"
            "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']<|done|>' }}{% endif %}"
        ),
        specials=("<|calls|>", "<|done|>"),
    ),
    "bare": Case(
        source=_chatml(
            "{{ message.content }}"
            + _calls("{{ '<|call|>call:' + call.function.name + show(call.function.arguments) + '<|done|>' }}"),
            before=_BARE_CALL,
        ),
        specials=("<|call|>", "<|done|>", "<|q|>"),
        marks=("<|q|>",),
    ),
}
