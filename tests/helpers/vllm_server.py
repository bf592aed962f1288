"""A stand-in for vLLM's server: the paths that the sampler uses, over a Hugging Face model and the real extension.

Run as a script it holds the weights of a file until its standard input is closed:
``python -m helpers.vllm_server FILE NUM_WORKERS``.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "envgrad" / "vllm"))

from envgrad_vllm_worker import WeightSync  # as vLLM's process imports it

Interfere = Callable[[str, dict[str, Any], int], "tuple[int, str] | None"]
"""``(path, body, number of the request to that path) -> (status, text)``, or None to answer as usual"""


class Loaded:
    """What vLLM has as its model: takes the names of the Hugging Face model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.hf = model
        self.fail_after: int | None = None

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.hf.named_parameters())
        with torch.no_grad():
            for number, (name, tensor) in enumerate(tensors):
                if self.fail_after == number:
                    raise RuntimeError(f"cannot place {name}")
                if name in own:
                    own[name].copy_(tensor)

    def modules(self) -> Iterator[torch.nn.Module]:
        return self.hf.modules()


class Worker(WeightSync):
    """vLLM's worker, as far as the extension looks at it."""

    def __init__(self, model: torch.nn.Module, rank: int, world_size: int, **facts: Any) -> None:
        self.rank = rank
        self.device = torch.device("cpu")
        self.loaded = Loaded(model)
        self.model_runner = SimpleNamespace(model=self.loaded)
        model_config = SimpleNamespace(
            hf_text_config=model.config,
            dtype=facts.get("dtype", torch.float32),
            logprobs_mode=facts.get("logprobs_mode", "processed_logprobs"),
            max_model_len=facts.get("max_model_len", 256),
        )
        self.vllm_config = SimpleNamespace(
            model_config=model_config,
            lora_config=object() if facts.get("lora") else None,
            parallel_config=SimpleNamespace(world_size=world_size, data_parallel_size=facts.get("replicas", 1)),
        )

    def sums(self) -> dict[str, Any]:
        """What this worker has, to be compared."""
        found = {name: float(tensor.double().sum()) for name, tensor in self.loaded.hf.named_parameters()}
        return {"rank": self.rank, "sums": found}


@dataclass(eq=False)
class FakeVLLM:
    """The server's state, and what arrived."""

    workers: list[Worker]
    url: str = ""
    key: str | None = None
    interfere: Interfere = lambda path, body, number: None
    token_seconds: float = 0.0
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    paused: bool = False
    aborts: int = 0
    sampled: int = 0
    """tokens"""
    lock: threading.RLock = field(default_factory=threading.RLock)
    running: int = 0
    server: ThreadingHTTPServer | None = None
    sockets: set[Any] = field(default_factory=set)

    @property
    def model(self) -> Any:
        return self.workers[0].loaded.hf

    def bodies(self, path: str = "/v1/completions") -> list[dict[str, Any]]:
        return [body for at, body in self.requests if at == path]

    def answer(self, path: str, body: dict[str, Any], query: dict[str, list[str]]) -> tuple[int, Any]:
        with self.lock:
            number = sum(at == path for at, _ in self.requests)
            self.requests.append((path, body))
        said = self.interfere(path, body, number)
        if said is not None:
            return said
        if path == "/v1/models":
            return 200, {"data": [{"id": "served", "max_model_len": 256}]}
        if path == "/collective_rpc":
            return self.call(body)
        if path == "/pause":
            self.paused = True
            self.aborts += query["mode"] == ["abort"]
            while self.running:
                time.sleep(0.005)
        elif path == "/resume":
            self.paused = False
        elif path == "/reset_prefix_cache":
            return 200, {"success": True}
        elif path == "/v1/completions":
            return 200, self.complete(body)
        elif path == "/v1/load_lora_adapter":
            if not Path(body["lora_path"], "adapter_config.json").is_file():
                return 404, {"error": "no adapter"}
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"])
        elif path != "/health":
            return 404, {"error": f"no {path}"}
        return 200, {}

    def call(self, body: dict[str, Any]) -> tuple[int, Any]:
        def one(worker: Worker) -> None:
            try:
                results[worker.rank] = getattr(worker, body["method"])(**body["kwargs"])
            except Exception as error:  # as vLLM, which answers 500 whatever a worker raised
                results[worker.rank] = error

        results: dict[int, Any] = {}
        threads = [threading.Thread(target=one, args=(worker,), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = [error for error in results.values() if isinstance(error, Exception)]
        if failed:
            return 500, {"error": f"Worker failed with error '{failed[0]}'"}
        return 200, {"results": [results[worker.rank] for worker in self.workers]}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        while self.paused:
            time.sleep(0.005)
        with self.lock:
            self.running += 1
            aborts = self.aborts
        generator = torch.Generator().manual_seed(body["seed"] % (1 << 62))
        ids, logprobs, reason = [], [], "length"
        try:
            while len(ids) < body["max_tokens"]:
                time.sleep(self.token_seconds)
                if self.aborts != aborts:
                    reason = "abort"
                    break
                with self.lock, torch.no_grad():
                    logits = self.model(torch.tensor([body["prompt"] + ids])).logits[0, -1].float()
                found = (logits / (body["temperature"] or 1.0)).log_softmax(-1)
                token = (
                    int(torch.multinomial(found.exp(), 1, generator=generator))
                    if body["temperature"]
                    else int(found.argmax())
                )
                ids.append(token)
                self.sampled += 1
                logprobs.append(float(found[token]))
                if token in body["stop_token_ids"]:
                    reason = "stop"
                    break
        finally:
            with self.lock:
                self.running -= 1
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason, "text": ""}
        return {"choices": [choice]}

    def kill(self) -> None:
        """As kill -9: nobody listens any more, and open connections break."""
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.sockets):
            connection.close_hard()

    def kill_at(self, number: int) -> None:
        """Be killed by that request for an answer, while it is under way."""

        def interfere(path: str, body: dict[str, Any], at: int) -> tuple[int, str] | None:
            if path != "/v1/completions" or at != number:
                return None
            self.kill()
            return 500, "nobody hears this"

        self.interfere = interfere


def _handler(fake: FakeVLLM) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            fake.sockets.add(self)

        def finish(self) -> None:
            fake.sockets.discard(self)
            super().finish()

        def close_hard(self) -> None:
            import contextlib
            import socket

            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.reply(json.loads(raw or b"{}"))

        def reply(self, body: dict[str, Any]) -> None:
            parts = urlsplit(self.path)
            if fake.key and parts.path != "/health" and self.headers.get("Authorization") != f"Bearer {fake.key}":
                status, said = 401, {"error": "Unauthorized"}
            else:
                status, said = fake.answer(parts.path, body, parse_qs(parts.query))
            data = (said if isinstance(said, str) else json.dumps(said)).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                self.close_connection = True  # the client has gone

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def fake_vllm(
    model: torch.nn.Module, *, num_workers: int = 1, port: int = 0, key: str | None = None, **facts: Any
) -> Iterator[FakeVLLM]:
    """Serves ``model``, which updates change. ``facts`` are of the server: logprobs_mode, dtype, lora, ..."""
    models = [model, *(copy.deepcopy(model) for _ in range(num_workers - 1))]  # each worker has its own
    fake = FakeVLLM([Worker(each, rank, num_workers, **facts) for rank, each in enumerate(models)], key=key)
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(fake))
    server.daemon_threads = True
    fake.server = server
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.paused = False
        server.shutdown()
        server.server_close()
        thread.join()


class Stored(torch.nn.Module):
    """Weights by name, and no forward: enough to receive some, and quick to start."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.tensors = load_file(path)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.tensors.items()


if __name__ == "__main__":
    with fake_vllm(Stored(sys.argv[1]), num_workers=int(sys.argv[2])) as running:
        print(running.url, flush=True)
        sys.stdin.read()
