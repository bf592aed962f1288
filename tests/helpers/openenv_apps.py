"""Small servers that speak OpenEnv's protocol, as ASGI apps without any package: run them with uvicorn.

``guess:   number: int -> a hint``       step-style, seeded; paid at the end
``sums:    tools add and submit``        MCP tools
``words:   message: str``                tasks by split and index, two places, observations that repeat what was before
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os


class Invalid(Exception):
    """What the action's schema refuses: field and reason."""


class Guess:
    """Guess a number from 1 to 16."""

    schema = {
        "title": "GuessAction", "type": "object", "description": "Guess the number.",
        "properties": {
            "number": {"type": "integer", "minimum": 1, "maximum": 16, "description": "Your guess."},
            "metadata": {"type": "object", "additionalProperties": True},
        },
        "required": ["number"], "additionalProperties": False,
    }  # fmt: skip
    seeded = True
    draws = itertools.count()

    def reset(self, seed=None, sleep=0.0, **_):
        self.hidden = (seed if self.seeded else next(self.draws)) % 16 + 1
        self.turns, self.sleep = 0, sleep
        return {"hint": "I think of a number from 1 to 16."}, None, False

    async def step(self, action):
        number = action.get("number")
        if not isinstance(number, int) or not 1 <= number <= 16:
            raise Invalid("number", "Input should be from 1 to 16")
        self.turns += 1
        right = number == self.hidden
        hint = "correct" if right else "higher" if self.hidden > number else "lower"
        return {"hint": hint}, 1.0 if right else 0.0, right or self.turns == 4

    @property
    def state(self):
        return {"episode_id": os.urandom(4).hex(), "step_count": self.turns, "hidden": self.hidden}


class Noisy(Guess):
    """The same opening, and a number that the seed does not choose."""

    seeded = False


class Traps(Guess):
    """Raises on 13, hangs on 14, dies on 15."""

    async def step(self, action):
        number = action.get("number")
        if number == 13:
            raise RuntimeError("thirteen brings bad luck")
        if number == 14:
            await asyncio.sleep(30)
        if number == 15:
            os._exit(3)
        return await super().step(action)


class Sums:
    """Tools as MCP lists them; each right sum is paid."""

    schema = {
        "title": "CallToolAction", "type": "object", "required": ["tool_name"],
        "properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"},
                       "arguments": {"type": "object"}, "metadata": {"type": "object"}},
    }  # fmt: skip
    TOOLS = [
        {"name": "add", "description": "Add two numbers.", "inputSchema": {
            "type": "object", "required": ["a", "b"], "title": "addArguments",
            "properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}},
        {"name": "submit", "description": "Submit the sum.", "inputSchema": {
            "type": "object", "required": ["value"], "properties": {"value": {"type": "integer"}}}},
    ]  # fmt: skip

    def reset(self, seed=0, **_):
        self.a, self.b, self.done = seed % 7, seed % 5, False
        return {}, None, False

    async def step(self, action):
        name, arguments = action["tool_name"], action.get("arguments", {})
        if name == "add":
            return self.result(name, str(arguments["a"] + arguments["b"])), 0.25, False
        if name == "submit":
            return self.result(name, "thanks"), 1.0, True
        error = {"error_type": "tool_not_found", "message": f"no tool {name}"}
        return {"tool_name": name, "result": None, "error": error}, None, False

    def result(self, name, text):
        return {"tool_name": name, "result": {"content": [{"type": "text", "text": text}]}, "error": None}

    state = {}


class Words:
    """Repeat the word of the task; every observation repeats the whole game."""

    schema = {
        "title": "WordAction", "type": "object", "required": ["message"],
        "properties": {"message": {"type": "string"}, "loud": {"type": "boolean", "default": False}},
    }  # fmt: skip
    SPLITS = {"train": ["ant", "bee", "cat", "dog", "eel"], "test": ["fox", "gnu"]}

    def reset(self, split="train", index=0, seed=None, **_):
        self.word, self.said = self.SPLITS[split][index], []
        return self.view(), None, False

    async def step(self, action):
        if not isinstance(action.get("message"), str):
            raise Invalid("message", "Field required")
        self.said.append(action["message"])
        right = self.word in action["message"]
        return self.view(), float(right), right or len(self.said) == 3

    def view(self):
        lines = [f"Say the word {self.word}.", *(f"You said {said!r}." for said in self.said)]
        return {"text": "\n".join(lines), "words_left": 3 - len(self.said)}

    state = {}


class App:
    """An ASGI app that serves one environment class. ``GET /counts`` tells the sessions: open, opened, most."""

    def __init__(self, kind, capacity=64):
        self.kind, self.capacity = kind, capacity
        self.open = self.opened = self.most = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            body = (await receive()).get("body", b"")
            status, answer = self.answer(scope["path"], json.loads(body) if body else None)
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
        else:
            await self.session(receive, send)

    def answer(self, path, body):
        splits = getattr(self.kind, "SPLITS", None)
        if path == "/schema":
            return 200, {"action": self.kind.schema, "observation": {}, "state": {}}
        if path == "/counts":
            return 200, {"open": self.open, "opened": self.opened, "most": self.most}
        if path == "/list_environments":
            return 200, ["game"]
        if path == "/game/splits" and splits:
            return 200, [{"name": name, "type": "train"} for name in splits]
        if path == "/game/num_tasks" and splits:
            return 200, {"num_tasks": len(splits[body["split"]])}
        return 501, {"detail": "not supported"}

    async def session(self, receive, send):
        await receive()
        await send({"type": "websocket.accept"})

        async def reply(kind, data):
            await send({"type": "websocket.send", "text": json.dumps({"type": kind, "data": data})})

        if self.open >= self.capacity:
            counts = {"active_sessions": self.open, "max_sessions": self.capacity}
            await reply("error", {"message": "at capacity", "code": "CAPACITY_REACHED", **counts})
            await send({"type": "websocket.close"})
            return
        self.open, self.opened = self.open + 1, self.opened + 1
        self.most = max(self.most, self.open)
        try:
            environment = self.kind()
            while (event := await receive())["type"] == "websocket.receive":
                message = json.loads(event["text"])
                if message["type"] == "close":
                    await send({"type": "websocket.close"})
                    break
                await reply(*await self.handle(environment, message))
        finally:
            self.open -= 1

    async def handle(self, environment, message):
        try:
            if message["type"] == "reset":
                return "observation", self.seen(*environment.reset(**message["data"]))
            if message["type"] == "step":
                return "observation", self.seen(*await environment.step(message["data"]))
            if message["type"] == "state":
                return "state", dict(environment.state)
            if message["type"] == "mcp":
                return "mcp", {"jsonrpc": "2.0", "id": message["data"]["id"], "result": {"tools": environment.TOOLS}}
        except Invalid as error:
            problem = {"type": "value_error", "loc": [error.args[0]], "msg": error.args[1]}
            return "error", {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [problem]}
        except Exception as error:
            return "error", {"message": str(error), "code": "EXECUTION_ERROR"}
        return "error", {"message": "unknown type", "code": "UNKNOWN_TYPE"}

    def seen(self, observation, reward, done):
        return {"observation": observation, "reward": reward, "done": done}


guess = App(Guess)
noisy = App(Noisy)
traps = App(Traps)
sums = App(Sums)
words = App(Words, capacity=2)
