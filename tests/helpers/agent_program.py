"""A program that owns its loop: it knows nothing of the library, only the variables that OpenAI's client reads.

Run with the prompt as its argument. MODE is ``plain``, ``stream``, ``async``, ``crash`` or ``hang``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "inc",
            "description": "Add to the counter.",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    }
]


def ask(client, messages, stream):
    if not stream:
        answer = client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        return answer.choices[0].message.model_dump(exclude_none=True)
    calls = {}
    content = ""
    for chunk in client.chat.completions.create(model="any", messages=messages, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            call = calls.setdefault(
                part.index,
                {"id": part.id, "type": "function", "function": {"name": part.function.name, "arguments": ""}},
            )
            call["function"]["arguments"] += part.function.arguments
    message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls.values())} if calls else message


def play(stream=False):
    import openai

    client, total = openai.OpenAI(), 0
    messages = [{"role": "user", "content": sys.argv[1]}]
    while True:
        answer = ask(client, messages, stream)
        messages.append(answer)
        if not answer.get("tool_calls"):
            return total
        for call in answer["tool_calls"]:
            total += json.loads(call["function"]["arguments"])["n"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"now {total}"})


async def play_async():
    import openai

    async with openai.AsyncOpenAI() as client:
        prompts = [[{"role": "user", "content": f"{sys.argv[1]} {part}"}] for part in range(3)]
        calls = [client.chat.completions.create(model="any", messages=messages) for messages in prompts]
        return len(await asyncio.gather(*calls))


def main():
    mode = os.environ.get("MODE", "plain")
    if mode == "crash":
        sys.exit("the program is broken")
    if mode == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["PIDS"]).write_text(f"{child.pid} {os.getpid()}")
        time.sleep(600)
    print(asyncio.run(play_async()) if mode == "async" else play(stream=mode == "stream"))


if __name__ == "__main__":
    main()
