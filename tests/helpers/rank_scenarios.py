"""Training runs on several processes of this machine; ``zygote`` starts them, and the tests look at what they leave.

``ranks(folder, case, size, ...)`` forks ``size`` processes, as a launcher would, and lets each run the function
``case(folder, ...)``. What rank r prints lies in ``rank<r>.out``; ``codes.json`` says how and when each ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import envgrad
import envgrad.training.trainers
from envgrad.rollout.runner import Round
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.training import rollouts
from envgrad.training import trainer as trainer_module
from envgrad.training.phases import Laps
from envgrad.training.rounds import InlineRounds
from envgrad.training.signals import Terminated
from helpers.models import Letters, flat, tiny_llama, tokenizer_of
from helpers.world import call, turn

# -- processes


def ranks(folder: Path, case: str, size: str, *words: str) -> None:
    """Fork, wait, write ``codes.json``: ``[[exit code, seconds after the first rank ended], ...]``."""
    port = _free_port()
    pids = []
    for rank in range(int(size)):
        pid = os.fork()
        if pid == 0:
            _become(folder, rank, int(size), port)
            globals()[case](folder, *words)
            return
        pids.append(pid)
    (folder / "pids.json").write_text(json.dumps(pids))
    codes: dict[int, tuple[int, float]] = {}
    first = None
    deadline = time.monotonic() + 100
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            first = first or time.monotonic()
            codes[pid] = (os.waitstatus_to_exitcode(status), time.monotonic() - first)
        elif time.monotonic() > deadline:
            for one in set(pids) - set(codes):
                os.kill(one, signal.SIGKILL)
            deadline = math.inf
        else:
            time.sleep(0.01)
    (folder / "codes.json").write_text(json.dumps([codes[pid] for pid in pids]))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _become(folder: Path, rank: int, size: int, port: int) -> None:
    file = os.open(folder / f"rank{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(where | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.environ.update({"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)})


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


# -- trainers

OPTIONS: dict[str, Any] = {
    "max_steps": 10, "num_generations": 4, "max_completion_length": 96, "lr_scheduler_type": "constant",
    "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
    "deterministic": True, "ddp_timeout": 60, "max_grad_norm": 0.0,
}  # fmt: skip

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optim": "sgd", "learning_rate": 0.5},
    "adamw": {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0},
}


def make(folder: Path, environment: Any, algorithm: str = "GRPO", callbacks: Any = (), **options: Any) -> Any:
    """A trainer whose step has 16 episodes, whatever the number of processes."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    settings = OPTIONS | {"output_dir": str(folder / "run"), "per_device_train_batch_size": 16 // size}
    settings |= options
    model = settings.pop("model", None) or tiny_llama()
    return getattr(envgrad, f"{algorithm}Trainer")(
        model, args=getattr(envgrad, f"{algorithm}Config")(**settings), processing_class=tokenizer_of(),
        environment_factory=environment, callbacks=list(callbacks),
    )  # fmt: skip


def finish(folder: Path, trainer: Any, before: torch.Tensor) -> None:
    """What the tests compare: weights, logs, where the tasks are; of every rank."""
    torch.save(flat(trainer.model) - before, folder / f"change{rank()}.pt")
    numbers = [
        {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        for entry in trainer.state.log_history
    ]
    (folder / f"log{rank()}.json").write_text(json.dumps(numbers))
    print("done at", trainer.state.global_step)


# -- recorded rollouts


class Adding:
    """A tool, uneven numbers of turns, and rewards that differ between siblings."""

    def reset(self, seed: int) -> str:
        self.total = 0
        return f"Reach {random.Random(seed).randrange(100)}" + " now" * (seed % 9)

    def add(self, number: int) -> str:
        """
        Add a number.

        Args:
            number: How much.
        """
        self.total += number
        return f"now {self.total} " + "x" * (self.total % 13)

    def get_reward(self) -> float:
        return self.total % 7 / 7


def _answers(prompt_ids: Any, params: Any, session: Any) -> tuple[list[int], list[float]]:
    position, sibling = session.order[:2]
    turns = _TURNS.setdefault(session.key, 0)
    _TURNS[session.key] += 1
    draw = random.Random(f"{position}/{sibling}")
    if turns < (position + sibling) % 4:
        ids = turn(call("add", number=draw.randrange(9) + turns))
    else:
        ids = turn("so " * (1 + draw.randrange(12)))
    odds = random.Random(f"{position}/{sibling}/{turns}")
    return ids, [-math.log(len(tokenizer_of())) + odds.uniform(-0.2, 0.2) for _ in ids]


_TURNS: dict[str, int] = {}


def record(folder: Path) -> None:
    """Play ten rounds of ``Adding`` and keep them as bytes: what all runs train on."""
    import pickle

    rollouts.make_local_sampler = lambda *_, **__: ScriptedSampler(_answers, max_context=4096)  # type: ignore[assignment]
    played: list[Round] = []
    original = InlineRounds.next

    def keep(self: InlineRounds, laps: Laps) -> Round:
        played.append(original(self, laps))
        return played[-1]

    InlineRounds.next = keep  # type: ignore[method-assign]
    model = tiny_llama()
    model.generation_config.eos_token_id = tokenizer_of().eos_token_id
    make(folder, Adding, model=model, learning_rate=0.0, max_completion_length=512).train()
    (folder / "rounds.pickle").write_bytes(pickle.dumps(played))
    print("recorded", [[len(episode.turns) for group in one.groups for episode in group.episodes] for one in played])


def recorded(folder: Path, rounds: str, algorithm: str, optimizer: str, passes: str = "") -> None:
    """Train on recorded rounds."""
    import pickle

    played = pickle.loads(Path(rounds).read_bytes())

    class Recorded(InlineRounds):
        def next(self, laps: Laps) -> Round:
            self._plan.publish()
            return played.pop(0)

    trainer_module.round_source = lambda config, plan, left: Recorded(plan)  # type: ignore[assignment]
    options = OPTIMIZERS[optimizer] | {"max_tokens_per_microbatch": 300}
    if passes == "reference":  # a pass without gradient, before the first update
        options |= {"beta": 0.05}
    if passes == "entropy":
        options |= {"top_entropy_quantile": 0.5}
    if passes.isdigit():
        options |= {"top_entropy_quantile": 0.5, "max_tokens_per_microbatch": int(passes)}
    if algorithm == "SDPO":
        options |= {"success_reward_threshold": 0.5}
    trainer = make(folder, Adding, algorithm, **options)
    if passes == "poisoned":
        _poison(trainer)
    before = flat(trainer.model)
    trainer.train()
    finish(folder, trainer, before)


def _poison(trainer: Any) -> None:
    """The last rank's loss is not a number in the third step."""
    kind = type(trainer.algorithm)
    plain, last = kind.loss, int(os.environ.get("WORLD_SIZE", "1")) - 1

    def poisoned(self: Any, inputs: Any) -> Any:
        found = plain(self, inputs)
        if trainer.state.global_step == 2 and rank() == last:
            found = replace(found, loss=found.loss * math.nan)
        return found

    kind.loss = poisoned


# -- real rollouts


def real(folder: Path, algorithm: str = "GRPO", steps: str = "4", resume: str = "", optimizer: str = "adamw",
         **options: Any) -> None:  # fmt: skip
    """Train on what is played."""
    torch.manual_seed(0)
    trainer = make(
        folder, Letters, algorithm, max_steps=6, max_completion_length=12, save_strategy="steps", save_steps=2,
        callbacks=[_StopsAt(int(steps))], **(OPTIMIZERS[optimizer] | {"learning_rate": 0.01} | options),
    )  # fmt: skip
    before = flat(trainer.model)
    trainer.train(resume_from_checkpoint=resume or None)
    finish(folder, trainer, before)


class _StopsAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def by_hand(folder: Path, rounds: str, algorithm: str, optimizer: str, engine: str) -> None:
    """Train on recorded rounds without ``Trainer``: whole, or cut by FSDP2, which accelerate has on GPUs only."""
    import pickle
    from functools import partial

    from accelerate import Accelerator
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from envgrad.attention import use_envgrad_attention
    from envgrad.batch import MicroBatch
    from envgrad.distributed.dealing import limit_for, share_of
    from envgrad.distributed.sharded import WholeWeights, is_cut
    from envgrad.logprobs import install_policy_forward, policy_logprobs
    from envgrad.losses import LossInputs, LossOutputs
    from envgrad.packing import pack
    from envgrad.training.passes import passes_one_by_one

    accelerator = Accelerator(cpu=True)
    size = accelerator.num_processes
    model = tiny_llama()
    use_envgrad_attention(model)
    install_policy_forward(model)
    before = flat(model)
    if engine == "fsdp2":
        mesh = init_device_mesh("cpu", (size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert is_cut(dict(model.named_parameters()))
    kind = {"GRPO": envgrad.GRPO(), "RLOO": envgrad.RLOO(beta=0.0)}[algorithm]
    settings = OPTIMIZERS[optimizer]
    make_optimizer = torch.optim.SGD if optimizer == "sgd" else partial(torch.optim.AdamW, weight_decay=0.0)
    steps = make_optimizer(model.parameters(), lr=settings["learning_rate"])

    def forward_loss(packed: MicroBatch) -> LossOutputs:
        outputs = policy_logprobs(model, packed, entropy=kind.entropy)
        return kind.loss(LossInputs.of(packed, outputs))

    counts = []
    for played in pickle.loads(Path(rounds).read_bytes()):
        samples = kind.credit(played.groups)
        totals = kind.totals(samples)
        limit = limit_for(samples, size, 300)
        batch = pack(samples, kind.weights(samples, totals), totals=totals, max_tokens=limit)
        own = share_of(batch, accelerator.process_index, size)
        counts.append((len(batch), len(own), sum(bool(packed.samples) for packed in own.micro_batches)))
        for _ in passes_one_by_one(own.micro_batches, forward_loss, accelerator, model):
            pass
        steps.step()
        steps.zero_grad()
    print("micro-batches of the step, of this rank, and not padding:", counts)
    after = torch.cat([one.flatten() for one in WholeWeights(dict(model.named_parameters())).values()])
    torch.save(after.detach() - before, folder / f"change{rank()}.pt")


# -- endings


class _OnStep(transformers.TrainerCallback):
    """Does something behind a step, on one rank."""

    def __init__(self, step: int, on: int, what: Any) -> None:
        self.step, self.on, self.what = step, on, what

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print("step", state.global_step, flush=True)
        if state.global_step == self.step and rank() == self.on:
            self.what()


def _raise() -> None:
    raise ZeroDivisionError("the callback's own fault")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Closing(Letters):
    """Says when it is closed."""

    def close(self) -> None:
        print("closed", flush=True)


class Broken(Closing):
    """Fails from the second round on."""

    def reset(self, seed: int, task_index: int = 0, group_id: int = 0) -> str:
        Broken.resets = getattr(Broken, "resets", 0) + 1
        if Broken.resets > 24:
            raise OSError("the simulator burnt down")
        return super().reset(seed)


class Breaks(Closing):
    """Fails once ``broken`` is set."""

    broken = False

    def reset(self, seed: int) -> str:
        if Breaks.broken:
            raise OSError("the simulator burnt down")
        return super().reset(seed)


class Waiting(Closing):
    """Waits in a later reset of one rank for what comes from outside."""

    def reset(self, seed: int) -> str:
        Waiting.resets = getattr(Waiting, "resets", 0) + 1
        if rank() == 1 and Waiting.resets == 12:
            print("waiting", flush=True)
            time.sleep(3600)
        return super().reset(seed)


ENDS: dict[str, tuple[type, Any]] = {
    "environment": (Broken, None),
    "callback": (Closing, _raise),
    "killed": (Closing, _kill),
    "signal": (Closing, _terminate),
    "waiting": (Waiting, None),
}


def ends(folder: Path, how: str, on: str = "1") -> None:
    environment, what = ENDS[how]
    trainer = make(
        folder, environment, max_steps=50, max_completion_length=8, save_strategy="steps", save_steps=100,
        max_consecutive_failed_groups=4, max_episode_retries=0, learning_rate=0.01, deterministic=False,
        reset_timeout=60.0, close_timeout=0.5, callbacks=[] if what is None else [_OnStep(2, int(on), what)],
    )  # fmt: skip
    trainer.train()


# -- one rank plays for all


def asynchronous(folder: Path, sampler: str, staleness: str = "2", resume: str = "") -> None:
    torch.manual_seed(0)
    trainer = make(
        folder, Closing, "AsyncGRPO", max_steps=6, max_completion_length=12, save_strategy="steps", save_steps=3,
        learning_rate=0.01, deterministic=False, sampler=sampler, max_staleness=int(staleness), eval_strategy="steps",
        eval_steps=3, eval_tasks=4,
    )  # fmt: skip
    before = flat(trainer.model)
    trainer.train(resume_from_checkpoint=resume or None)
    finish(folder, trainer, before)


def _break() -> None:
    Breaks.broken = True


def asynchronous_ends(folder: Path, how: str) -> None:
    environment, what = ENDS[how]
    environment = Breaks if what is None else environment
    trainer = make(
        folder, environment, "AsyncGRPO", max_steps=500, max_completion_length=8, save_strategy="steps", save_steps=999,
        max_consecutive_failed_groups=4, max_episode_retries=0, learning_rate=0.01, deterministic=False,
        reset_timeout=60.0, close_timeout=0.5, max_staleness=1,
        callbacks=[_OnStep(2, 0, _break) if what is None else _OnStep(2, 1, what)],
    )  # fmt: skip
    trainer.train()


class Stuck(Closing):
    """One reset does not end; a later one takes long enough for the first rank to look around."""

    def reset(self, seed: int) -> str:
        Stuck.resets = getattr(Stuck, "resets", 0) + 1
        if Stuck.resets == 33:
            time.sleep(3600)
        if 80 <= Stuck.resets < 84:
            time.sleep(2.0)
        return super().reset(seed)


def _terminate_later() -> None:
    threading.Timer(2.0, _terminate).start()


def again(folder: Path) -> None:
    """A run that a signal has ended goes on in the same processes; it came to a rank that waited for rollouts."""
    trainer = make(
        folder, Stuck, "AsyncGRPO", max_steps=9, max_completion_length=8, save_strategy="steps", save_steps=999,
        learning_rate=0.01, deterministic=False, max_staleness=1, reset_timeout=60.0, close_timeout=0.5, eval_tasks=2,
        callbacks=[_OnStep(2, 1, _terminate_later)],
    )  # fmt: skip
    with contextlib.suppress(Terminated):
        trainer.train()
    print("stopped behind step", trainer.state.global_step, flush=True)
    assert trainer.evaluate()["eval_reward"] >= 0
    trainer.train(resume_from_checkpoint=True)
    print("ended behind step", trainer.state.global_step, flush=True)


def served(folder: Path) -> None:
    """A server that runs vLLM's worker extension; rank 0 samples from it and sends it the weights."""
    from contextlib import nullcontext

    from envgrad.sampling import vllm_files
    from helpers.vllm_server import fake_vllm

    vllm_files.SHARED_MEMORY = folder
    with nullcontext() if rank() else fake_vllm(tiny_llama(seed=5)) as fake:
        trainer = make(
            folder, Letters, deterministic=False, use_vllm=True, vllm_mode="server",
            vllm_server_base_url="http://127.0.0.1:9" if fake is None else fake.url,
            **(OPTIMIZERS["adamw"] | {"max_steps": 3, "max_completion_length": 12, "learning_rate": 0.02}),
        )  # fmt: skip
        before = flat(trainer.model)
        trainer.train()
        finish(folder, trainer, before)
        if fake is not None:
            bodies = fake.bodies("/collective_rpc")
            print("updates", [one["kwargs"]["version"] for one in bodies if one["method"] == "envgrad_load_file"])
