"""Training beside rollouts on samplers with weights of their own: each token's, adapters, and loaded checkpoints."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from envgrad.sampling import process
from envgrad.sampling.local import LocalSampler
from envgrad.sampling.process import ProcessSampler
from envgrad.training.rollouts import Rollouts
from envgrad.types import Episode
from helpers.models import Letters, flat, tiny_llama, tokenizer_of, zoo
from helpers.trainers import Kind, logged, script
from helpers.world import turn

pytestmark = pytest.mark.filterwarnings("ignore")

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessSampler]:
    """One process for several runs; starting it is most of their time."""
    made = ProcessSampler(tiny_llama(), max_sessions=64, threads=1)
    yield made
    made.close()


class Lent:
    """The fixture's process, which a run that closes its sampler leaves open."""

    def __init__(self, child: ProcessSampler) -> None:
        self._child = child

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    def close(self) -> None:
        """The fixture closes it."""


class Rounds(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Keeps the rounds that are trained."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.played = trainer, []
        trainer.add_callback(self)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.played.append(self.trainer.last_round)

    @property
    def episodes(self) -> list[Episode]:
        return [one for played in self.played for group in played.groups for one in group.episodes]


def keep_published(monkeypatch: pytest.MonkeyPatch) -> dict[int, Weights]:
    """The trainer's weights at each publish, by version."""
    found: dict[int, Weights] = {}
    publish = Rollouts.publish

    def spying(self: Rollouts, version: int) -> None:
        found[version] = {name: tensor.clone() for name, tensor in self.policy.base.state_dict().items()}
        publish(self, version)

    monkeypatch.setattr(Rollouts, "publish", spying)
    return found


@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO", "SDPO"])
def test_a_process_samples_beside_training_for_every_algorithm(
    algorithm: str, child: ProcessSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(model: Any, *, weights: Any, version: int, **options: Any) -> Any:
        child.update_weights(version, weights)
        return Lent(child)

    monkeypatch.setattr(process, "make_process_sampler", start)
    published = keep_published(monkeypatch)
    own = {"success_reward_threshold": 0.3} if algorithm == "SDPO" else {}
    trainer = Kind(algorithm).make(
        tmp_path, tiny_llama(), environment_factory=Letters,
        options={
            "asynchronous": True, "sampler": "process", "max_staleness": 2, "max_steps": 8, "num_generations": 2,
            "max_completion_length": 48, "learning_rate": 0.02, **own,
        },
    )  # fmt: skip
    before, rounds = flat(trainer.model), Rounds(trainer)
    trainer.train()
    assert trainer.state.global_step == 8 and not torch.equal(before, flat(trainer.model))
    assert 0 < max(logged(trainer, "async/staleness_max")) <= 2 and set(logged(trainer, "async/dropped_share")) == {0.0}
    model = tiny_llama().eval()
    checked = set()
    for episode in rounds.episodes[-8:]:
        for version in {one for one in episode.versions if one >= 0}:
            model.load_state_dict(published[version])
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([episode.token_ids])).logits[0].log_softmax(-1)
            for at, one in enumerate(episode.versions):
                if one == version:
                    own_logprob = logits[at - 1, episode.token_ids[at]].item()
                    assert own_logprob == pytest.approx(episode.logprobs[at], abs=1e-4)
            checked.add(version)
    assert len(checked) > 1, "weights of several versions were sampled from"


def test_adapters_reach_a_process_merged_from_its_start_on(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = Kind("GRPO").make(
        tmp_path, tiny_llama(), environment_factory=Letters, peft_config=lora,
        options={"sampler": "process", "max_steps": 4, "max_completion_length": 16, "sampler_threads": 1},
    )  # fmt: skip
    before = flat(trainer.model)
    trainer.train()
    assert not torch.equal(before, flat(trainer.model)), "the adapters moved"
    # The process sampled with what training computes, adapters and all: at its start and after each publish.
    assert len(logged(trainer, "sampler_mismatch")) == 4 and max(logged(trainer, "sampler_mismatch")) < 1e-4


def test_the_thread_that_samples_has_weights_of_its_own_which_go_when_it_ends(tmp_path: Path) -> None:
    trainer = Kind("AsyncGRPO").make(
        tmp_path, tiny_llama(), environment_factory=Letters, options={"max_steps": 2, "max_completion_length": 8}
    )
    ours = {one.data_ptr() for one in trainer.model.parameters()}
    seen = []

    class Look(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append({one.data_ptr() for one in trainer.rollouts.sampler._engine._model.parameters()})

    trainer.add_callback(Look())
    trainer.train()
    assert len(seen) == 2 and len(seen[0]) == len(ours) and not seen[0] & ours
    assert trainer.rollouts._copy is None


def test_a_checkpoint_of_the_version_that_is_served_is_published_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler has opened with the weights of step 4, as version 3; then those of step 3 are loaded."""
    served: list[tuple[int, Weights]] = []
    update = LocalSampler.update_weights

    def spying(self: LocalSampler, version: int, named_tensors: Any) -> None:
        served.append((version, {name: tensor.clone() for name, tensor in named_tensors.items()}))
        update(self, version, named_tensors)

    monkeypatch.setattr(LocalSampler, "update_weights", spying)
    trainer = Kind("AsyncGRPO").make(
        tmp_path, tiny_llama(), environment_factory=Letters,
        options={"max_steps": 4, "max_completion_length": 8, "save_strategy": "steps", "save_steps": 3,
                 "max_staleness": 0},
    )  # fmt: skip
    trainer.train()
    of_step_3 = served[-1]
    assert of_step_3[0] == 3
    served.clear()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [version for version, _ in served] == [3, 3]
    assert any(not torch.equal(served[0][1][name], tensor) for name, tensor in of_step_3[1].items())
    assert all(torch.equal(served[1][1][name], tensor) for name, tensor in of_step_3[1].items())


def test_rollouts_are_opened_once_and_closed_by_the_last_of_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = script(monkeypatch, [turn("hello")])
    trainer = Kind("GRPO").make(tmp_path, environment_factory=Letters)
    start, gate, alone, wrong = Rollouts._start, threading.Barrier(8), threading.Lock(), []

    def slow(self: Rollouts) -> Any:
        if not alone.acquire(blocking=False):
            wrong.append("started twice at once")
        time.sleep(0.02)
        made = start(self)
        alone.release()
        return made

    monkeypatch.setattr(Rollouts, "_start", slow)

    def use(number: int) -> None:
        gate.wait()
        for turn_ in range(5):
            with trainer.rollouts.open():
                time.sleep(0.001 * ((number + turn_) % 3))
                if trainer.rollouts.sampler.closed:
                    wrong.append("closed while it was used")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and opened and all(one.closed for one in opened) and trainer.rollouts._open is None
    trainer.close()


def test_a_model_that_is_sampled_by_generate_trains_beside_its_rollouts(tmp_path: Path) -> None:
    model = zoo("bloom", len(tokenizer_of()))
    model.generation_config.eos_token_id = [*range(10, len(tokenizer_of()), 5)]  # a fifth of the tokens ends an answer
    trainer = Kind("AsyncGRPO").make(
        tmp_path, model, environment_factory=Letters,
        options={"max_steps": 4, "num_generations": 4, "max_completion_length": 24, "max_staleness": 1,
                 "max_context": 128},
    )  # fmt: skip
    before, rounds, kinds = flat(model), Rounds(trainer), []

    class Look(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            kinds.append(type(trainer.rollouts.sampler).__name__)

    trainer.add_callback(Look())
    trainer.train()
    assert set(kinds) == {"GenerateSampler"} and not torch.equal(before, flat(model))
    assert max(logged(trainer, "async/staleness_max")) <= 1
    assert len({version for one in rounds.episodes for version in one.versions if version >= 0}) > 1
