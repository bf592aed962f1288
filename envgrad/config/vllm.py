"""vLLM servers that sample for the trainer: where they are, and how weights get to them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from envgrad.config.checks import choice
from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from envgrad.config.rollout import RolloutConfig
    from envgrad.sampling.vllm_options import InFlight, VLLMOptions

COLOCATED = (
    "vLLM runs in a process and an environment of its own here: start `envgrad vllm-serve --model ...` and set "
    "vllm_mode='server'"
)
_ANYWHERE = ("0.0.0.0", "::", "")
"""hosts that a server listens on, and nobody can connect to"""


@dataclass
class VLLMFields:
    """The fields; ``RolloutConfig`` has them. Names and defaults are those of trl wherever it has one."""

    use_vllm: bool = field(
        default=False, metadata={"help": "Sample from vLLM servers: the same as --sampler vllm; see vllm_mode."}
    )
    vllm_mode: str = field(
        default="colocate", metadata={"help": "With use_vllm: server. (colocate, trl's default, is not supported.)"}
    )
    vllm_server_base_url: list[str] | str | None = field(
        default=None, metadata={"help": "Address of the vLLM server, http://host:port, or of several."}
    )
    vllm_server_host: str = field(
        default="0.0.0.0", metadata={"help": "Host of the vLLM server where there is no vllm_server_base_url."}
    )
    vllm_server_port: int = field(default=8000, metadata={"help": "Its port."})
    vllm_server_timeout: float = field(
        default=240.0, metadata={"help": "Seconds to wait for the vLLM servers to be there."}
    )
    vllm_request_timeout: float = field(
        default=600.0, metadata={"help": "Seconds that a vLLM server may take for one answer."}
    )
    vllm_retry_timeout: float = field(
        default=60.0, metadata={"help": "Seconds that a failing request to a vLLM server is tried again."}
    )
    vllm_api_key_env: str | None = field(
        default=None, metadata={"help": "Environment variable that holds the vLLM servers' key."}
    )
    vllm_sync: str = field(
        default="file", metadata={"help": "How weights get to the vLLM servers: file, or nccl (trainer on a GPU)."}
    )
    vllm_sync_dir: str | None = field(
        default=None,
        metadata={"help": "Folder that trainer and vLLM servers share; shared memory where they share the machine."},
    )
    vllm_group_port: int = field(
        default=51216, metadata={"help": "Port on the trainer's machine where the nccl group meets."}
    )

    def vllm_urls(self) -> tuple[str, ...]:
        """The servers' addresses."""
        given = self.vllm_server_base_url
        if given is None:
            host = "127.0.0.1" if self.vllm_server_host in _ANYWHERE else self.vllm_server_host
            return (f"http://{host}:{self.vllm_server_port}",)
        return (given,) if isinstance(given, str) else tuple(given)


def resolve_vllm(config: RolloutConfig) -> None:
    """Let the fields say that vLLM samples (``sampler="vllm"``), and check that all of them can act.

    Raises:
        ConfigurationError: fields that contradict each other, or would do nothing.
    """
    _read_urls(config)
    if config.use_vllm:
        choice("vllm_mode", config.vllm_mode, ("colocate", "server"))
        if config.vllm_mode == "colocate" and config.sampler != "vllm":
            raise ConfigurationError(f"use_vllm=True with vllm_mode='colocate' cannot act in envgrad: {COLOCATED}")
        if config.sampler not in ("local", "vllm"):
            raise ConfigurationError(f"use_vllm=True and sampler={config.sampler!r} contradict each other; set one")
        config.sampler = "vllm"
    elif config.asynchronous and config.vllm_server_base_url is not None and config.sampler == "local":
        config.sampler = "vllm"  # as in trl, whose asynchronous trainer knows no other
    defaults = {f.name: f.default for f in fields(VLLMFields)}
    given = {name: getattr(config, name) for name, value in defaults.items() if getattr(config, name) != value}
    if config.sampler != "vllm":
        for name, value in given.items():
            raise ConfigurationError(
                f"{name}={value!r} acts only where a vLLM server samples: set sampler='vllm' too (or use_vllm=True and "
                "vllm_mode='server')"
            )
        return
    _check(config, given)


def _read_urls(config: RolloutConfig) -> None:
    """Several addresses may come as JSON text from the command line."""
    given = config.vllm_server_base_url
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            config.vllm_server_base_url = json.loads(given)
        except json.JSONDecodeError as error:
            raise ConfigurationError(
                f"vllm_server_base_url={given!r} is not JSON ({error}); write one address or a list of them"
            ) from error


def _check(config: RolloutConfig, given: dict[str, object]) -> None:
    for name in ("vllm_server_host", "vllm_server_port"):
        if name in given and config.vllm_server_base_url is not None:
            raise ConfigurationError(
                f"{name}={given[name]!r} cannot act: vllm_server_base_url={config.vllm_server_base_url!r} says where "
                "the server is; remove one"
            )
    choice("vllm_sync", config.vllm_sync, ("file", "nccl"))
    if config.vllm_sync == "nccl" and config.vllm_sync_dir is not None:
        raise ConfigurationError(f"vllm_sync_dir={config.vllm_sync_dir!r} acts only with vllm_sync='file'; remove it")
    if config.vllm_sync == "file" and "vllm_group_port" in given:
        raise ConfigurationError(f"vllm_group_port={config.vllm_group_port} acts only with vllm_sync='nccl'; remove it")
    options = vllm_options(config)
    if config.vllm_sync == "file" and config.vllm_sync_dir is None and not options.is_local:
        raise ConfigurationError(
            f"the vLLM servers {', '.join(options.base_urls)} are not on this machine, so that its shared memory "
            "cannot bring weights to them: give a folder that all share under one path (vllm_sync_dir), or set "
            "vllm_sync='nccl'"
        )
    if config.deterministic:
        raise ConfigurationError(
            f"deterministic=True is promised for the samplers of this package, and sampler={config.sampler!r}; a vLLM "
            "server batches by the clock"
        )
    if config.max_kv_tokens is not None:
        raise ConfigurationError(
            f"max_kv_tokens={config.max_kv_tokens} cannot act: the vLLM server keeps keys and values; give it "
            "--gpu-memory-utilization or --kv-cache-memory-bytes"
        )


def vllm_options(config: RolloutConfig) -> VLLMOptions:
    """The sampler's options (``sampling.vllm_options.VLLMOptions``) that the fields describe.

    Raises:
        ConfigurationError: one is out of range.
    """
    from envgrad.config.mixture import own_temperatures
    from envgrad.sampling.sampler import SamplingParams
    from envgrad.sampling.vllm_options import VLLMOptions

    temperatures = {config.temperature, *own_temperatures(config).values()}
    in_flight: InFlight = "abort" if config.asynchronous and config.inflight_weight_updates else "wait"
    return VLLMOptions(
        base_urls=config.vllm_urls(),
        api_key_env=config.vllm_api_key_env,
        server_timeout=config.vllm_server_timeout,
        request_timeout=config.vllm_request_timeout,
        retry_timeout=config.vllm_retry_timeout,
        in_flight=in_flight,
        max_context=config.max_context,
        exact_for=tuple(
            SamplingParams(
                max_tokens=1,
                temperature=temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                min_p=config.min_p or 0.0,
                repetition_penalty=config.repetition_penalty,
            )
            for temperature in sorted(temperatures)
        ),
    )
