"""Environments on the package openenv's own server classes; run by its Python."""

from __future__ import annotations

import random

from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from pydantic import Field


class EchoEnvironment(MCPEnvironment):
    """The package's example: tools that give back what they are given."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("echo")

        @server.tool()
        def echo_message(message: str) -> str:
            """Give the message back."""
            return message

        @server.tool()
        def echo_with_length(message: str, times: int = 1) -> dict:
            """Give the message back, and its length."""
            return {"message": message * times, "length": len(message) * times}

        super().__init__(server)
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(done=False, reward=0.0, metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=False, reward=0.0, metadata={"error": "unknown action"})

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        self._state.step_count += 1
        observation.reward = 1.0 if isinstance(action, CallToolAction) and "hello" in str(action.arguments) else 0.0
        observation.done = self._state.step_count == 3
        return observation

    @property
    def state(self):
        return self._state


class GuessAction(Action):
    """Guess the number."""

    number: int = Field(ge=1, le=16, description="Your guess, from 1 to 16.")


class GuessObservation(Observation):
    hint: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.hidden = random.Random(seed).randint(1, 16)
        self._state = State(episode_id=episode_id, step_count=0)
        return GuessObservation(hint="I think of a number from 1 to 16.")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        right = action.number == self.hidden
        hint = "correct" if right else "higher" if self.hidden > action.number else "lower"
        return GuessObservation(hint=hint, reward=float(right), done=right or self._state.step_count == 5)

    @property
    def state(self):
        return self._state


class WordAction(Action):
    message: str


class WordObservation(Observation):
    text: str


class WordEnvironment(Environment):
    """Tasks by split and index, and two places for sessions."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    TASKS = {"train": ["ant", "bee", "cat"], "test": ["dog"]}

    def list_splits(self):
        return list(self.TASKS)

    def list_tasks(self, split):
        return self.TASKS[split]

    def num_tasks(self, split):
        return len(self.TASKS[split])

    def get_task(self, split, index):
        return self.TASKS[split][index]

    def reset(self, seed=None, episode_id=None, split="train", index=0, **kwargs):
        self.word = self.TASKS[split][index]
        return WordObservation(text=f"Say {self.word}.")

    def step(self, action, timeout_s=None, **kwargs):
        right = self.word in action.message
        return WordObservation(text="thanks", reward=float(right), done=True)

    @property
    def state(self):
        return State()


echo = create_fastapi_app(EchoEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=16)
guess = create_fastapi_app(GuessEnvironment, GuessAction, GuessObservation, max_concurrent_envs=16)
words = create_fastapi_app(WordEnvironment, WordAction, WordObservation, max_concurrent_envs=2)
