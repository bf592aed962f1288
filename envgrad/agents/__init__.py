"""Agents that own the loop: any program that speaks to an OpenAI-compatible endpoint can be trained.

An environment with ``run_agent(self, endpoint)`` plays its episode by itself; every call that arrives at
``endpoint.base_url`` is answered by the trainer's sampler and recorded token by token.
"""

from __future__ import annotations

from envgrad.agents.endpoint import AgentEndpoint, AgentTimeLimit
from envgrad.agents.program import AgentProgram, ProgramResult

__all__ = ["AgentEndpoint", "AgentProgram", "AgentTimeLimit", "ProgramResult"]
