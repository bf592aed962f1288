"""The model card, and what is uploaded with it."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import TrainerCallback
from transformers.utils import hub as transformers_hub

from envgrad import GRPOTrainer, RLOOTrainer
from envgrad.algorithms.grpo import GRPO
from envgrad.training.model_card import CARD_NAME, MARK, CardFacts, is_ours, plain, render_card
from envgrad.training.run_facts import Paper, papers, versions
from helpers.fake_hub import FakeHub
from helpers.models import Constant, Letters, config, flat, tiny_llama, tokenizer_of
from helpers.trainers import NAMES, Kind

HOSTILE = "</table><script>alert(1)</script>\n---\nlicense: evil\n| x | [a](javascript:b) `c` **d**"


def make(folder, *, model=None, environment=Letters, peft_config=None, **changes):
    return GRPOTrainer(
        tiny_llama() if model is None else model, args=config(folder, **changes), processing_class=tokenizer_of(),
        environment_factory=environment, peft_config=peft_config,
    )  # fmt: skip


def facts(**changes) -> CardFacts:
    given = {
        "name": "mine", "base_model": "org/base", "on_hub": True, "papers": papers(GRPO()), "environments": ("Game",),
        "rewards": {"exact": 2.0}, "figures": {"reward": 0.25, "eval_reward": 0.5}, "curve": [(1, 0.0), (2, 0.5)],
        "steps": 2, "best": "", "settings": {"learning_rate": 0.05}, "adapters": {}, "versions": versions(),
    }  # fmt: skip
    return CardFacts(**(given | changes))


def card(folder) -> ModelCard:
    return ModelCard.load(folder / CARD_NAME)


def test_a_card_lies_beside_every_saved_model_and_says_what_it_is(tmp_path):
    trainer = make(tmp_path, environment={"letters": Letters, "constant": Constant}, max_steps=2, save_steps=1,
                   save_strategy="steps", eval_strategy="steps", eval_steps=2, eval_tasks=2)  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for folder in (tmp_path, tmp_path / "checkpoint-1", tmp_path / "checkpoint-2", tmp_path / "final"):
        assert MARK in (folder / CARD_NAME).read_text()
    found = card(tmp_path)
    assert found.data.library_name == "transformers" and found.data.pipeline_tag == "text-generation"
    assert found.data.tags == ["envgrad", "reinforcement-learning", "grpo"]
    final = trainer.state.log_history
    evaluation = next(entry for entry in final if "eval_reward" in entry)
    results = {(one.dataset_name, one.metric_type): one.metric_value for one in found.data.eval_results}
    assert results[("letters, constant", "mean_reward")] == pytest.approx(evaluation["eval_reward"], abs=1e-6)
    assert results[("constant", "mean_reward")] == pytest.approx(1.0)
    words = found.content
    for expected in ("- letters", "- constant", "https://arxiv.org/abs/2402.03300", "2 optimizer steps",
                     "| learning\\_rate | 0.05 |", "| num\\_generations | 4 |", f"| torch | {plain(torch.__version__)}",
                     "| transformers | ", "| envgrad | "):  # fmt: skip
        assert expected in words
    reward = [entry["reward"] for entry in final if "reward" in entry][-1]
    assert f"| reward | {plain(f'{reward:.6g}')} |" in words
    assert str(tmp_path) not in words


@pytest.mark.parametrize("name", NAMES)
def test_every_trainer_names_its_algorithm(tmp_path, name):
    trainer = Kind(name).make(tmp_path, tiny_llama(), environment_factory=Letters)
    trainer.create_model_card()
    first = {"AsyncGRPO": "GRPO"}.get(name, name)
    assert f"with {first}, by envgrad" in card(tmp_path).content
    trainer.close()


def test_hostile_names_are_text(tmp_path):
    text = render_card(facts(
        name=HOSTILE, base_model=HOSTILE, on_hub=False, environments=(HOSTILE, "---\nlicense: evil"),
        rewards={HOSTILE: 1.0}, papers=(Paper(name=HOSTILE, title=HOSTILE, url=None),),
        figures={"eval_reward": 0.5, f"eval_reward/{HOSTILE}": 0.25},
        metadata={"tags": [HOSTILE], "license": "mit\nevil: true", "datasets": [HOSTILE]},
    ))  # fmt: skip
    (tmp_path / CARD_NAME).write_text(text)
    found = card(tmp_path)
    assert found.data.license == "mit\nevil: true" and found.data.get("evil") is None
    assert found.data.model_name == HOSTILE and found.data.datasets == [HOSTILE] and HOSTILE in found.data.tags
    body = found.text
    assert "<script" not in body and "</table" not in body and "](javascript" not in body
    own_code = body.replace("`reward`", "").replace("`eval_`", "")
    assert not re.search(r"^---", body, re.MULTILINE) and not re.search(r"(?<!\\)`", own_code)
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in rows), "no name makes a cell"


def test_neither_paths_nor_secrets_nor_addresses_are_told(tmp_path):
    secret = tmp_path / "private" / "folder"
    model = tiny_llama()
    model.config._name_or_path = str(secret / "base-model")
    trainer = make(tmp_path / "out", model=model, hub_token="hf_abc", run_name="internal-run", project="internal-name")
    trainer.save_model()
    words = (tmp_path / "out" / CARD_NAME).read_text()
    assert "base-model" in words.replace("\\", "")
    for hidden in (str(tmp_path), "private", "hf_abc", "internal-run", "internal-name"):
        assert hidden not in words
    saved = torch.load(tmp_path / "out" / "training_args.bin", weights_only=False)
    assert saved.hub_token is None and saved.num_generations == 4


def test_a_model_of_the_hub_is_linked_and_its_name_is_metadata(tmp_path):
    model = tiny_llama()
    model.config._name_or_path = "org/some-model"
    trainer = make(tmp_path, model=model)
    trainer.create_model_card()
    assert card(tmp_path).data.base_model == "org/some-model"
    assert "(https://huggingface.co/org/some-model)" in card(tmp_path).content
    trainer.create_model_card(finetuned_from="other/base", model_name="x", license="mit", language="en", tags="mine",
                              dataset="a/b", dataset_args="split", tasks=["math"])  # fmt: skip
    data = card(tmp_path).data
    assert (data.base_model, data.license, data.language, data.datasets) == ("other/base", "mit", "en", ["a/b"])
    assert {"mine", "math", "split", "envgrad"} <= set(data.tags) and "# x\n" in card(tmp_path).content
    trainer.create_model_card(tags=["more"])
    assert {"mine", "more"} <= set(card(tmp_path).data.tags), "tags that are there stay"


def test_a_card_that_somebody_wrote_stays(tmp_path):
    (tmp_path / CARD_NAME).write_text("---\nlicense: mit\n---\n# By hand\n")
    trainer = make(tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    assert (tmp_path / CARD_NAME).read_text().endswith("# By hand\n")
    assert not is_ours(tmp_path / CARD_NAME)
    trainer.create_model_card()
    assert MARK in (tmp_path / CARD_NAME).read_text(), "asked for, it is written"


def test_adapters_are_named_and_pefts_unfilled_card_is_replaced(tmp_path):
    peft = pytest.importorskip("peft")
    trainer = make(tmp_path, peft_config=peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM"))
    trainer.save_model()
    found = card(tmp_path)
    assert found.data.library_name == "peft" and "lora" in found.data.tags
    assert "| r | 4 |" in found.content and "More Information Needed" not in found.content


def test_a_user_who_saves_without_training_gets_a_card_too(tmp_path):
    trainer = RLOOTrainer(
        tiny_llama(), args=Kind("RLOO").config(tmp_path), processing_class=tokenizer_of(), environment_factory=Letters
    )
    trainer.save_model()
    assert "in 0 optimizer steps" in card(tmp_path).content and "Results" not in card(tmp_path).content


# -- uploads


@pytest.fixture
def hub(monkeypatch) -> FakeHub:
    found = FakeHub()
    monkeypatch.setattr(transformers_hub, "_hf_api", found)
    return found


def pushed(folder, **changes):
    options = {"push_to_hub": True, "hub_model_id": "me/model", "save_strategy": "steps", "save_steps": 1,
               "max_steps": 2, "hub_token": "hf_abc"}  # fmt: skip
    return make(folder, **(options | changes))


@pytest.mark.parametrize(("strategy", "into"), [
    ("end", []), ("every_save", [None, None]),
    ("checkpoint", [None, "last-checkpoint", None, "last-checkpoint"]),
    ("all_checkpoints", [None, "checkpoint-1", None, "checkpoint-2"]),
])  # fmt: skip
def test_what_is_uploaded_and_when(tmp_path, hub, strategy, into):
    hub.delay = 0.05  # by then the checkpoint has its place
    trainer = pushed(tmp_path, hub_strategy=strategy, hub_always_push=True, hub_private_repo=True,
                     log_completions=True)  # fmt: skip
    trainer.train()
    assert hub.created == [{"name": "me/model", "token": "hf_abc", "private": True, "exist_ok": True}]
    assert [one.into for one in hub.uploads] == into
    for one in hub.uploads:
        assert {"config.json", "model.safetensors", CARD_NAME, "tokenizer.json"} <= set(one.files)
        assert one.token == "hf_abc" and b"hf_abc" not in b"".join(one.files.values())
        has_state = "rollout_state.json" in one.files and "optimizer.pt" in one.files
        assert has_state == (one.into is not None), "a checkpoint on the Hub can be resumed"
        if one.into is None:
            assert not [name for name in one.files if "/" in name and not name.startswith("runs/")]
    hub.uploads.clear()
    trainer.push_to_hub(commit_message="done")
    (last,) = hub.uploads
    assert last.message == "done" and b"2 optimizer steps" in last.files[CARD_NAME]
    assert not [name for name in last.files if name.startswith(("checkpoint", "episodes", "completions", "."))]


def test_a_save_by_the_user_is_uploaded_and_blocks(tmp_path, hub):
    trainer = pushed(tmp_path, save_strategy="no")
    trainer.train()
    assert not hub.uploads
    trainer.save_model()
    assert [one.message for one in hub.uploads] == ["Model save"]


def test_while_one_upload_runs_the_next_checkpoint_is_not_uploaded(tmp_path, hub):
    class Release(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            hub.gate.set()

    hub.gate.clear()
    trainer = pushed(tmp_path, max_steps=3)
    trainer.add_callback(Release())
    trainer.train()
    assert [one.message for one in hub.uploads] == ["Training in progress, step 1"]


def test_an_upload_that_fails_is_named_and_the_run_goes_on(tmp_path, hub, caplog):
    hub.fails = 1
    trainer = pushed(tmp_path, hub_always_push=True)
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 2
    told = [one.getMessage() for one in caplog.records if "upload" in one.getMessage()]
    assert len(told) == 1 and "the Hub is away" in told[0]
    assert [one.message for one in hub.uploads] == ["Training in progress, step 2"]


def test_a_repository_that_cannot_be_made_is_known_at_construction(tmp_path, hub, monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no such namespace")

    monkeypatch.setattr(hub, "create_repo", refuse)
    with pytest.raises(ConnectionError, match="no such namespace"):
        pushed(tmp_path)


def test_uploading_leaves_training_as_it_is(tmp_path, hub):
    ends = []
    for folder, options in (("plain", {"push_to_hub": False, "hub_model_id": None}), ("pushed", {})):
        trainer = pushed(tmp_path / folder, deterministic=True, **options)
        trainer.train()
        ends.append(flat(trainer.model))
    assert torch.equal(*ends)
