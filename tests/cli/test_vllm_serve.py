"""``envgrad vllm-serve``: the command line that it makes, and the life of the process that it starts."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envgrad.cli.vllm_serve import ServeRequest, find_python, run_serve, serve_command
from envgrad.errors import ConfigurationError
from envgrad.starter import STARTER_PATH
from envgrad.vllm import EXTENSION_PATH

STAND_IN = """#!{python}
import http.server, os, signal, subprocess, sys, time
if sys.argv[1] == "-c":
    sys.exit(0)
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen(["sleep", "600"])
open({pids!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
if "--die" in sys.argv:
    sys.exit(7)
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def request(**changes: object) -> ServeRequest:
    options: dict[str, object] = {
        "model": "m", "python": None, "host": "127.0.0.1", "port": 8000, "api_key_env": None, "startup_timeout": 10.0,
        "arguments": [],
    }  # fmt: skip
    return ServeRequest(**(options | changes))  # type: ignore[arg-type]


def test_what_vllm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("MY_KEY", "hush")
    asked = request(model="starter", port=9, api_key_env="MY_KEY", arguments=["--enable-lora", "--dtype", "float32"])
    command = serve_command(asked, Path("/py"))
    assert list(command.words) == [
        "/py", "-m", "vllm.entrypoints.openai.api_server", "--model", str(STARTER_PATH), "--host", "127.0.0.1",
        "--port", "9", "--worker-extension-cls", "envgrad_vllm_worker.WeightSync", "--logprobs-mode",
        "processed_logprobs", "--middleware", "envgrad_vllm_guard.Guard", "--enable-lora", "--dtype", "float32",
    ]  # fmt: skip
    assert command.environment == {
        "PYTHONPATH": f"{EXTENSION_PATH}:/mine", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_API_KEY": "hush",
    }  # fmt: skip
    assert "hush" not in command.shown() and "VLLM_API_KEY='***'" in command.shown()
    raw = serve_command(request(arguments=["--logprobs-mode=raw_logprobs"]), Path("/py"))
    assert "processed_logprobs" not in raw.words and "--middleware" not in raw.words


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arguments": ["--api-key", "k"]}, "name its variable with --api-key-env"),
        ({"arguments": ["--worker-extension-cls=x.Y"]}, "it is envgrad's"),
        ({"arguments": ["--data-parallel-size", "2"]}, "start one server for each replica"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "export NOT_SET_ANYWHERE="),
    ],
)
def test_what_cannot_be_passed_on(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        serve_command(request(**changes), Path("/py"))


def test_others_reach_it_with_a_key_only() -> None:
    with pytest.raises(ConfigurationError, match=r"--host 0\.0\.0\.0 lets others reach .* --api-key-env"):
        run_serve(request(host="0.0.0.0"))


def test_a_python_without_vllm_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no vLLM, .*pip install vllm.*--python"):
        find_python(Path(sys.executable))
    with pytest.raises(ConfigurationError, match="cannot be run"):
        find_python(tmp_path / "python")
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "other"))
    with pytest.raises(ConfigurationError, match="other cannot be run"):
        find_python(None)


def start(tmp_path: Path, *more: str) -> tuple[subprocess.Popen[str], int, Path]:
    pids = tmp_path / "pids"
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, pids=str(pids)))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "envgrad", "vllm-serve", "--model", "m", "--python", str(python)]
    command += ["--port", str(port), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True), port, pids


def gone(pids: Path) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(_runs(int(pid)) for pid in pids.read_text().split()):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
def test_it_says_when_it_is_ready_and_ends_with_its_children(tmp_path: Path) -> None:
    process, port, pids = start(tmp_path)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(f"ready: http://127.0.0.1:{port}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    assert gone(pids)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
def test_its_end_is_the_commands_end_and_a_killed_command_leaves_no_server(tmp_path: Path) -> None:
    process, _, pids = start(tmp_path, "--die")
    assert process.wait(10) == 7 and gone(pids)
    if sys.platform != "linux":
        return
    process, _, pids = start(tmp_path)
    assert process.stderr is not None and process.stderr.readline().startswith("ready")
    process.kill()
    process.wait()
    server = int(pids.read_text().split()[0])
    deadline = time.monotonic() + 60
    while _runs(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(server)
    os.kill(int(pids.read_text().split()[1]), signal.SIGKILL)  # vLLM's own children watch their parent


def test_one_that_does_not_get_ready_is_ended(tmp_path: Path) -> None:
    process, _, pids = start(tmp_path, "--startup-timeout", "0.0")
    assert process.stderr is not None
    assert process.wait(20) in (0, 1)
    assert gone(pids) if pids.exists() else True
