"""What a teacher sees besides the task: a solved sibling's transcript, and words about the attempt itself.

Consumes a round's groups and samples; produces the samples with ``teacher_prompt``: the ids of the opening whose last
user message was extended by the templates. Wordings and thresholds are trl's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Formatter

from envgrad.chat.base import Renderer
from envgrad.chat.template import content_text
from envgrad.errors import ConfigurationError
from envgrad.types import Episode, Group, Message, TrainingSample, Turn

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
REPROMPT_TEMPLATE = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
SOLUTION_TEMPLATE = "\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
FEEDBACK_TEMPLATE = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"
FEEDBACK_COLUMN = "privileged_context"
"""a dataset's own column of feedback, which trl reads"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reprompted:
    """Samples with their teachers' prompts, and how many have what."""

    samples: list[TrainingSample]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reprompting:
    """How a teacher's prompt is made of a task, a demonstration and feedback. Names and defaults are trl's.

    Example:
        >>> how = Reprompting(include_environment_feedback=True)
        >>> how.text("2+3?", solution=None, feedback="wrong: 6").splitlines()[:3]
        ['2+3?', 'The following is feedback from your unsuccessful earlier attempt:', '']
        >>> Reprompting(solution_template="Look:")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: solution_template='Look:' must have the field {successful_previous...

    Raises:
        ConfigurationError: a template without its field, a value out of range, or an option that cannot act.
    """

    use_successful_as_teacher: bool = True
    success_reward_threshold: float = 1.0
    """least reward of an episode that can be shown as a demonstration"""
    dont_reprompt_on_self_success: bool = True
    """an episode is not its own demonstration"""
    include_environment_feedback: bool = False
    environment_feedback_only_without_solution: bool = False
    remove_thinking_from_demonstration: bool = False
    max_reprompt_len: int = 10240
    """tokens of the teacher's prompt; a longer one loses its beginning"""
    reprompt_template: str = REPROMPT_TEMPLATE
    solution_template: str = SOLUTION_TEMPLATE
    feedback_template: str = FEEDBACK_TEMPLATE

    def __post_init__(self) -> None:
        needed = ["prompt"]
        if self.use_successful_as_teacher:
            needed.append("solution")
            _check_template("solution_template", self.solution_template, ["successful_previous_attempt"])
        if self.include_environment_feedback:
            needed.append("feedback")
            _check_template("feedback_template", self.feedback_template, ["feedback_raw"])
        _check_template("reprompt_template", self.reprompt_template, needed, ["prompt", "solution", "feedback"])
        if self.max_reprompt_len < 1:
            raise ConfigurationError(f"max_reprompt_len={self.max_reprompt_len} must be at least 1 token")
        if not (self.use_successful_as_teacher or self.include_environment_feedback):
            raise ConfigurationError(
                "use_successful_as_teacher=False and include_environment_feedback=False leave the teacher nothing that "
                "the student does not see; turn one of them on"
            )
        if self.remove_thinking_from_demonstration and not self.use_successful_as_teacher:
            raise ConfigurationError(
                "remove_thinking_from_demonstration=True cannot act without demonstrations; drop it, or set "
                "use_successful_as_teacher=True"
            )
        both = self.use_successful_as_teacher and self.include_environment_feedback
        if self.environment_feedback_only_without_solution and not both:
            raise ConfigurationError(
                "environment_feedback_only_without_solution=True chooses between demonstrations and feedback, so it "
                "needs both: set use_successful_as_teacher=True and include_environment_feedback=True"
            )

    def text(self, prompt: str, *, solution: str | None, feedback: str | None) -> str:
        """The last user message (or the plain prompt) as the teacher sees it."""
        shown = "" if solution is None else self.solution_template.format(successful_previous_attempt=solution)
        said = "" if feedback is None else self.feedback_template.format(feedback_raw=feedback)
        return self.reprompt_template.format(prompt=prompt, solution=shown, feedback=said)

    def apply(
        self,
        groups: Sequence[Group],
        samples: Sequence[TrainingSample],
        renderer: Renderer,
        max_context: int | None = None,
    ) -> Reprompted:
        """Give each sample the prompt of its teacher, if there is a demonstration or feedback for it.

        Siblings of one group with one demonstration get one prompt, whose forward they share.

        Args:
            groups: The round.
            samples: Of its episodes.
            renderer: Renders the extended opening, tools included.
            max_context: Longest row of the teacher in tokens.
        """
        work = _Work(self, {group.task.key: group for group in groups}, renderer, max_context)
        out = [work.reprompt(sample) for sample in samples]
        solved = [any(self.is_success(episode) for episode in group.episodes) for group in groups]
        count = max(1, len(out))
        reprompted = sum(sample.teacher_prompt is not None for sample in out)
        names = {name: total / count for name, total in work.counts.items()}
        metrics = {
            "success_group_fraction": sum(solved) / max(1, len(groups)),
            **names,
            "reprompt_sample_fraction": reprompted / count,
        }
        return Reprompted(samples=out, metrics={f"self_distillation/{name}": value for name, value in metrics.items()})

    def is_success(self, episode: Episode) -> bool:
        return episode.reward is not None and episode.reward >= self.success_reward_threshold

    def demonstration(self, episode: Episode, group: Group) -> str | None:
        """The transcript of the first sibling that solved the same task; None without one."""
        if not self.use_successful_as_teacher:
            return None
        opening = opening_messages(episode)
        for sibling in group.episodes:
            itself = sibling.sibling == episode.sibling
            if (itself and self.dont_reprompt_on_self_success) or not self.is_success(sibling):
                continue
            if opening_messages(sibling) == opening:  # siblings whose starts differ have another task
                return transcript(sibling, thinking=not self.remove_thinking_from_demonstration)
        return None

    def feedback(self, episode: Episode) -> str | None:
        """What ``get_feedback()`` said, else the row's ``privileged_context``, else what the tools answered.

        The last is taken for attempts that did not succeed only: it says what went wrong.
        """
        if not self.include_environment_feedback:
            return None
        given = episode.feedback if episode.feedback is not None else (episode.task.row or {}).get(FEEDBACK_COLUMN)
        if isinstance(given, str):
            return given if given.strip() else None
        return None if self.is_success(episode) else own_feedback(episode)


def _check_template(name: str, template: str, needed: Sequence[str], known: Sequence[str] | None = None) -> None:
    try:
        found = {key for _, key, _, _ in Formatter().parse(template) if key is not None}
    except ValueError as error:
        raise ConfigurationError(
            f"{name}={template!r} is no template ({error}); write a literal brace twice"
        ) from error
    for key in needed:
        if key not in found:
            raise ConfigurationError(f"{name}={template!r} must have the field {{{key}}}, or it would not be shown")
    unknown = found - set(known or needed)
    if unknown:
        raise ConfigurationError(
            f"{name}={template!r} has the unknown field {{{min(unknown)}}}; known: {', '.join(known or needed)}"
        )


_COUNTED = (
    "success_sample_fraction",
    "feedback_available_fraction",
    "feedback_used_fraction",
    "reprompt_cut_fraction",
)


@dataclass(slots=True)
class _Work:
    """One round's teachers' prompts: what was rendered once is not rendered again."""

    how: Reprompting
    groups: Mapping[str, Group]
    renderer: Renderer
    max_context: int | None
    rendered: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    def reprompt(self, sample: TrainingSample) -> TrainingSample:
        episode = sample.episode
        # An agent's other rows and parts begin with chats of their own, which no demonstration fits: no teacher.
        if episode is None or not episode.turns or sample.row or episode.part:
            return sample
        solution = self.how.demonstration(episode, self.groups[sample.group])
        feedback = self.how.feedback(episode)
        self.counts["success_sample_fraction"] += solution is not None
        self.counts["feedback_available_fraction"] += feedback is not None
        if solution is not None and self.how.environment_feedback_only_without_solution:
            feedback = None
        self.counts["feedback_used_fraction"] += feedback is not None
        if solution is None and feedback is None:
            return sample
        ids = self._render(episode, solution, feedback)
        limit = self.how.max_reprompt_len
        if self.max_context is not None:
            limit = min(limit, self.max_context - episode.rows[0].completion_length)
        self.counts["reprompt_cut_fraction"] += len(ids) > limit
        return replace(sample, teacher_prompt=ids[-limit:]) if limit > 0 else sample

    def _render(self, episode: Episode, solution: str | None, feedback: str | None) -> tuple[int, ...]:
        key = (episode.task.key, episode.token_ids[: episode.prompt_length], solution, feedback)
        if key not in self.rendered:
            if episode.plain_prompt is not None:
                text = self.how.text(episode.plain_prompt, solution=solution, feedback=feedback)
                ids = self.renderer.open_text(text)
            else:
                messages = self._extended(opening_messages(episode), solution, feedback)
                ids = self.renderer.open(messages, list(episode.tools) or None)
            self.rendered[key] = tuple(ids)
        return self.rendered[key]

    def _extended(self, opening: Sequence[Message], solution: str | None, feedback: str | None) -> list[Message]:
        """``opening`` with its last user message extended; with a new one where it has none."""
        messages = list(opening)
        places = [place for place, message in enumerate(messages) if message.get("role") == "user"]
        if not places:
            messages.append({"role": "user", "content": ""})
        place = places[-1] if places else len(messages) - 1
        prompt = content_text(messages[place].get("content"))
        text = self.how.text(prompt, solution=solution, feedback=feedback)
        messages[place] = {**messages[place], "content": text}
        return messages


def opening_messages(episode: Episode) -> tuple[Message, ...]:
    """The messages before the first sampled one."""
    played = sum(1 + len(turn.outcomes) + (turn.observation is not None) for turn in episode.main_turns)
    return episode.messages[: len(episode.messages) - played]


def transcript(episode: Episode, *, thinking: bool = True) -> str:
    """A finished episode to read: the answer alone, or what was said, called and answered, turn by turn.

    Example:
        >>> from envgrad.types import StopReason, Task, ToolCall, ToolOutcome
        >>> call = ToolCall(id="c0", name="guess", arguments={"number": 3})
        >>> turns = (Turn(start=1, num_tokens=1, policy_version=0, message={"role": "assistant", "content": ""},
        ...     outcomes=(ToolOutcome(call=call, content="higher", ok=True),)),)
        >>> episode = Episode(task=Task(position=0, split="train", environment="e", group_id=1, seed=2), sibling=0,
        ...     token_ids=(5, 6), mask=(0, 1), logprobs=(0.0, -0.1), versions=(-1, 0), prompt_length=1, messages=(),
        ...     turns=turns, stop_reason=StopReason.DONE, reward=1.0)
        >>> print(transcript(episode))
        guess({"number": 3}) -> higher
    """
    turns = episode.main_turns
    if len(turns) == 1 and not turns[0].outcomes:
        return _said(turns[0], thinking)
    lines: list[str] = []
    for turn in turns:
        lines += [said] if (said := _said(turn, thinking)) else []
        lines += _answers(turn)
    return "\n".join(lines)


def own_feedback(episode: Episode) -> str | None:
    """What the tools or ``step`` answered to this attempt, one line each; None if nothing did."""
    lines = [line for turn in episode.turns for line in _answers(turn)]
    return "\n".join(lines) if lines else None


def _answers(turn: Turn) -> list[str]:
    lines = [f"{_written(outcome.call.name, outcome.call.arguments)} -> {outcome.content}" for outcome in turn.outcomes]
    return lines if turn.observation is None else [*lines, f"-> {turn.observation}"]


def _written(name: str | None, arguments: object) -> str:
    return f"{name or 'malformed call'}({json.dumps(arguments, ensure_ascii=False, default=str)})"


def _said(turn: Turn, thinking: bool) -> str:
    content = content_text(turn.message.get("content"))
    reasoning = turn.message.get("reasoning_content")
    if thinking:
        return f"<think>\n{reasoning}\n</think>\n{content}" if reasoning else content
    return _THOUGHT.sub("", content).strip()
