"""What leaves a run: saved models with their card, and uploads to the Hub.

::

    _save_checkpoint --> whole checkpoint, renamed --> card and weights into output_dir --upload, beside training--> Hub

An upload begins when the checkpoint lies where it stays. Checkpoints, episodes, completions and what is half written
are never uploaded beside the model. An upload that fails is named, and the run goes on.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy
from transformers.utils import hub as transformers_hub
from transformers.utils.hub import PushInProgress

from envgrad.config.reporting import public_copy
from envgrad.environments.boundary import Raised, guard
from envgrad.episodes.log import FOLDER_NAME
from envgrad.errors import first_line
from envgrad.training.checkpoint import LEFTOVERS, AtomicCheckpoints
from envgrad.training.model_card import CARD_NAME, card_facts, existing_tags, is_ours, render_card
from envgrad.training.reference import REFERENCE_NAME
from envgrad.training.teacher import TEACHER_NAME

if TYPE_CHECKING:
    from envgrad.training.trainer import RolloutTrainer

logger = logging.getLogger(__name__)

NOT_UPLOADED = (
    "_*", f"{PREFIX_CHECKPOINT_DIR}-*", f"{FOLDER_NAME}/*", "completions/*", *(f"{name}-*" for name in LEFTOVERS),
    "wandb/*", "trackio/*",
)  # fmt: skip
"""of ``output_dir``: everything but the model, its card and TensorBoard's folder"""
_NOT_OF_MODEL = (
    "optimizer", "scheduler", "scaler", "rng_state", "trainer_state", "rollout_", REFERENCE_NAME, TEACHER_NAME,
)  # fmt: skip
"""beginnings of a checkpoint's files that only resuming needs"""


class PublishingTrainer(AtomicCheckpoints):
    """``Trainer`` that writes a card beside every saved model, and uploads what is whole."""

    args: Any
    _to_push: bool = False
    push_in_progress: PushInProgress | None = None

    # -- the card

    def create_model_card(
        self,
        language: str | Sequence[str] | None = None,
        license: str | None = None,
        tags: str | Sequence[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | Sequence[str] | None = None,
        dataset_tags: str | Sequence[str] | None = None,
        dataset: str | Sequence[str] | None = None,
        dataset_args: str | Sequence[str] | None = None,
        *,
        dataset_name: str | Sequence[str] | None = None,
    ) -> None:
        """Write ``output_dir/README.md``; arguments are those of ``transformers``.

        Args:
            language: The model's languages, as ISO codes.
            license: The model's license, as the Hub names it.
            tags: Further tags; those of a card that is there stay.
            model_name: By default the repository's name, or the output folder's.
            finetuned_from: What it was trained from, if the model does not say it.
            tasks: Task identifiers, added to the tags.
            dataset_tags: Datasets on the Hub.
            dataset: The same.
            dataset_args: What was taken of them (a configuration, a split), added to the tags.
            dataset_name: What trl calls ``dataset``.
        """
        folder = Path(self.args.output_dir)
        datasets = [*_listed(dataset_tags), *_listed(dataset), *_listed(dataset_name)]
        metadata = {
            "language": language if isinstance(language, str) else _listed(language),
            "license": license,
            "datasets": list(dict.fromkeys(datasets)),
            "tags": [*_listed(tags), *_listed(tasks), *_listed(dataset_args), *existing_tags(folder / CARD_NAME)],
        }
        self._write_card(folder, metadata, name=model_name, base_model=finetuned_from)

    def _write_card(self, folder: Path, metadata: Mapping[str, Any] | None = None, **given: str | None) -> None:
        if not self.is_world_process_zero():
            return
        facts = card_facts(cast("RolloutTrainer", self), **given)
        folder.mkdir(parents=True, exist_ok=True)
        text = render_card(replace(facts, metadata=metadata or {"tags": existing_tags(folder / CARD_NAME)}))
        (folder / CARD_NAME).write_text(text, encoding="utf-8")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """A card beside every model that is saved, unless somebody wrote one."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        free = is_ours(folder / CARD_NAME)
        kept = existing_tags(folder / CARD_NAME)  # peft writes a card of its own
        own, self.args = self.args, public_copy(self.args)  # the arguments are saved too, and uploaded
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args = own
        if free and self.args.should_save:
            self._write_card(folder, {"tags": kept})

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        output = super()._finalize_training(trial, num_train_samples, start_time)
        folder = Path(self.args.output_dir)
        if self.args.save_strategy != SaveStrategy.NO and is_ours(folder / CARD_NAME):
            self._write_card(folder)
        return output

    # -- the Hub

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload model, tokenizer and card to ``args.hub_model_id``; arguments are those of ``transformers``.

        ``kwargs`` go to ``create_model_card``. A README.md that somebody else wrote is uploaded as it is.

        Returns:
            The commit, or without ``blocking`` a future of it.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        folder = Path(self.args.output_dir)
        free = is_ours(folder / CARD_NAME)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        if free:
            own = [*_listed(kwargs.pop("tags", None)), *_listed(getattr(self.model, "model_tags", None))]
            self.create_model_card(tags=own, **kwargs)
        self._finish_current_push()
        message = commit_message or "End of training"
        return self._upload(folder, message, background=not blocking, token=token, revision=revision)

    def _upload(
        self, folder: Path, message: str, *, background: bool, token: str | None = None, revision: str | None = None,
        into: str | None = None,
    ) -> Any:  # fmt: skip
        return transformers_hub.hf_api().upload_folder(
            repo_id=str(self.hub_model_id),
            folder_path=str(folder),
            path_in_repo=into,
            commit_message=message,
            token=token or self.args.hub_token,
            run_as_future=background,
            ignore_patterns=None if into else list(NOT_UPLOADED),
            revision=revision or self.args.hub_revision,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Called while the checkpoint is being written; the upload begins when it is whole."""
        self._to_push = True

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._to_push = False
        super()._save_checkpoint(model, trial)
        if is_ours(Path(self.args.output_dir) / CARD_NAME):
            self._write_card(Path(self.args.output_dir))
        if self._to_push and self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self._push_checkpoint(Path(self._get_output_dir(trial)) / name)

    def _push_checkpoint(self, checkpoint: Path) -> None:
        """Upload a checkpoint's model, and the checkpoint itself where ``hub_strategy`` says so, in the background."""
        running = self.push_in_progress
        if running is not None and running.is_done():
            _tell_failures(running.jobs)
            running = self.push_in_progress = None
        if running is not None and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder = Path(self.args.output_dir)
        free = is_ours(folder / CARD_NAME)
        for path in sorted(checkpoint.iterdir()):
            if path.is_file() and not path.name.startswith(_NOT_OF_MODEL) and (free or path.name != CARD_NAME):
                shutil.copy(path, folder / path.name)
        message = f"Training in progress, step {self.state.global_step}"
        strategy = self.args.hub_strategy
        uploads = [partial(self._upload, folder, message, background=True)]
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            into = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint.name
            uploads.append(partial(self._upload, checkpoint, f"{message}, checkpoint", background=True, into=into))
        jobs = [upload() for upload in uploads]
        if running is None:
            self.push_in_progress = PushInProgress(jobs)
        else:
            running.jobs.extend(jobs)

    def _finish_current_push(self) -> None:
        """Wait for uploads that are under way; those that failed are named."""
        running, self.push_in_progress = self.push_in_progress, None
        if running is not None:
            running.wait_until_done()
            _tell_failures(running.jobs)


def _tell_failures(jobs: Sequence[Future[Any]]) -> None:
    for job in jobs:
        outcome = guard(job.result)
        if isinstance(outcome, Raised):
            logger.warning(
                "an upload to the Hub failed (%s); the run goes on, and the next checkpoint is uploaded as usual. The "
                "model is in output_dir: trainer.push_to_hub() uploads it",
                first_line(outcome.error),
            )


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else [str(one) for one in value]
