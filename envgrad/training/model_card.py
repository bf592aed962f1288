"""The model card: a README.md beside a saved model that says what it was trained from, on what, how, and how well.

Names that a user typed are shown as text, never as markup; no path, address or secret gets into it.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from envgrad.starter import STARTER_PATH
from envgrad.training.reward_plot import reward_curves
from envgrad.training.run_facts import Paper, final_figures, hyperparameters, papers, versions

if TYPE_CHECKING:
    from envgrad.training.rollouts import Rollouts
    from envgrad.training.trainer import RolloutTrainer

CARD_NAME = "README.md"
MARK = "<!-- written by envgrad at each save; without this line it is left as it is -->"
_CURVE_POINTS = 10
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~$])")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card says."""

    name: str
    base_model: str
    """a name on the Hub, or of a folder"""
    on_hub: bool
    """whether ``base_model`` can be a link"""
    papers: tuple[Paper, ...]
    environments: tuple[str, ...]
    rewards: Mapping[str, float]
    """weights of the reward's components by name; a component seen in the run that has no weight of its own has 1"""
    figures: Mapping[str, float]
    curve: Sequence[tuple[int, float]]
    """steps and mean rewards"""
    steps: int
    best: str
    """which weights these are, where they are not the last; else empty"""
    settings: Mapping[str, object]
    adapters: Mapping[str, object]
    versions: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """license, language, datasets, tags, as the Hub has them"""


def card_facts(trainer: RolloutTrainer, *, name: str | None = None, base_model: str | None = None) -> CardFacts:
    """Gather from a trainer what its card says.

    Args:
        trainer: Before, in or after training.
        name: The model's name; by default that of the repository, or of the output folder.
        base_model: What it was trained from, if the model itself does not say it.
    """
    config, rollouts, state = trainer.user_args, trainer.rollouts, trainer.state
    source = base_model or str(rollouts.policy.base.config._name_or_path or "")
    is_local = base_model is None and (Path(source).expanduser().exists() or not _HUB_NAME.fullmatch(source))
    history: Sequence[Mapping[str, Any]] = state.log_history
    if _is_best(trainer):  # of these weights, not of later ones
        history = [entry for entry in history if entry.get("step", 0) <= state.best_global_step]
    own = trainer.hub_model_id or config.hub_model_id or Path(config.output_dir or "model").resolve().name
    return CardFacts(
        name=name or str(own).rpartition("/")[2],
        base_model=_base_name(source, is_local),
        on_hub=bool(_HUB_NAME.fullmatch(source)) and not is_local,
        papers=papers(trainer.algorithm),
        environments=tuple(name for name in rollouts.specs if name),
        rewards=_reward_weights(history, rollouts),
        figures={key: value for key, value in final_figures(history).items() if math.isfinite(value)},
        curve=reward_curves(history).get("reward", []),
        steps=state.global_step,
        best=_best(trainer),
        settings=hyperparameters(config),
        adapters=_adapters(trainer.model),
        versions=versions(),
    )


def _reward_weights(history: Sequence[Mapping[str, Any]], rollouts: Rollouts) -> dict[str, float]:
    """Of the components that have one, that a reward function gives, or that were seen."""
    seen = (name for entry in history for name in entry if name.startswith("rewards/") and name.endswith("/mean"))
    weights, sources = rollouts.reward_weights, (source.name for source in rollouts.reward_sources)
    names = (*weights.by_name, *sources, *(name.removeprefix("rewards/").removesuffix("/mean") for name in seen))
    return {name: weights.of(name) for name in dict.fromkeys(names)}


def _base_name(source: str, is_local: bool) -> str:
    if source == str(STARTER_PATH):
        return "starter, the small model that ships with envgrad"
    return (Path(source).name if is_local else source) or "a model without a name"


def _is_best(trainer: RolloutTrainer) -> bool:
    """Whether the weights of now are the best ones, loaded at the end of training."""
    return bool(trainer.args.load_best_model_at_end and not trainer.is_in_train and trainer.state.best_global_step)


def _best(trainer: RolloutTrainer) -> str:
    state, args = trainer.state, trainer.args
    if not _is_best(trainer):
        return ""
    return f"step {state.best_global_step}, the best by {args.metric_for_best_model} ({state.best_metric:.4g})"


def _adapters(model: Any) -> dict[str, object]:
    """The adapters' shape; empty where all weights were trained."""
    for config in (getattr(model, "peft_config", None) or {}).values():
        shape = {"kind": getattr(config.peft_type, "value", str(config.peft_type))}
        for name in ("r", "lora_alpha", "lora_dropout"):
            if getattr(config, name, None) is not None:
                shape[name] = getattr(config, name)
        return shape
    return {}


# -- text


def plain(text: object, limit: int = 120) -> str:
    """``text`` as one line of Markdown that shows it as it is: neither markup nor HTML.

    Example:
        >>> plain("a|b <b>[x](javascript:y)")
        'a\\\\|b &lt;b&gt;\\\\[x\\\\]\\\\(javascript:y\\\\)'
    """
    line = "".join(letter for letter in " ".join(str(text).split()) if letter.isprintable())
    line = line if len(line) <= limit else f"{line[:limit]}..."
    return html.escape(_MARKDOWN.sub(r"\\\1", line), quote=False)


def render_card(facts: CardFacts) -> str:
    """The whole file: metadata as YAML, then the text."""
    parts = [f"---\n{_metadata(facts)}---\n", f"{MARK}\n", f"# {plain(facts.name)}\n", *_introduction(facts)]
    parts += _figures(facts)
    parts += ["## Settings\n", _table(("setting", "value"), facts.settings.items())]
    if facts.adapters:
        parts += ["Only adapters were trained:\n", _table(("adapters", "value"), facts.adapters.items())]
    parts += ["## Versions\n", _table(("package", "version"), facts.versions.items())]
    parts += ["## Papers\n", "\n".join(_paper(paper) for paper in facts.papers) + "\n"]
    return "\n".join(parts)


def _introduction(facts: CardFacts) -> list[str]:
    shown = plain(facts.base_model)
    base = f"[{shown}](https://huggingface.co/{facts.base_model})" if facts.on_hub else f"**{shown}**"
    count = f"{facts.steps} optimizer step{'' if facts.steps == 1 else 's'}"
    first = f"Trained from {base} with {plain(facts.papers[0].name)}, by envgrad, in {count}."
    lines = [first + (f" The weights are those of {plain(facts.best)}." if facts.best else "") + "\n"]
    if facts.environments:
        lines += ["## Environments\n", "\n".join(f"- {plain(name)}" for name in facts.environments) + "\n"]
    if facts.rewards:
        lines += ["## Reward\n", _table(("component", "weight"), facts.rewards.items())]
    return lines


def _figures(facts: CardFacts) -> list[str]:
    if not facts.figures and not facts.curve:
        return []
    lines = ["## Results\n"]
    if facts.figures:
        lines.append(_table(("last figure", "value"), facts.figures.items()))
        lines.append(
            "`reward` is a mean over the episodes since the log before; `eval_` ones are of tasks kept apart.\n"
        )
    if len(facts.curve) > 1:
        last = len(facts.curve) - 1
        count = min(_CURVE_POINTS, len(facts.curve))
        chosen = sorted({round(index * last / (count - 1)) for index in range(count)})
        lines.append(_table(("step", "mean reward"), (facts.curve[index] for index in chosen)))
    return lines


def _table(head: tuple[str, str], rows: Iterable[tuple[object, object]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    lines += [
        f"| {plain(name)} | {plain(f'{value:.6g}' if isinstance(value, float) else value)} |" for name, value in rows
    ]
    return "\n".join(lines) + "\n"


def _paper(paper: Paper) -> str:
    title = f"[{plain(paper.title)}]({paper.url})" if paper.url else plain(paper.title)
    return f"- {plain(paper.name)}: {title}"


def _metadata(facts: CardFacts) -> str:
    """The Hub's YAML block, which ``huggingface_hub.ModelCardData`` reads."""
    own = ["envgrad", "reinforcement-learning", facts.papers[0].name.lower(), *(["lora"] if facts.adapters else [])]
    given = {name: value for name, value in facts.metadata.items() if value}
    tags = list(dict.fromkeys([*own, *_listed(given.pop("tags", None))]))
    found: dict[str, Any] = {"library_name": "peft" if facts.adapters else "transformers"}
    if facts.on_hub:
        found["base_model"] = facts.base_model
    found |= {"pipeline_tag": "text-generation", "tags": tags, "model_name": facts.name} | given
    results = _model_index(facts)
    if results:
        found["model-index"] = [{"name": facts.name, "results": results}]
    text: str = yaml.safe_dump(found, sort_keys=False, allow_unicode=False, width=10_000)
    return text


def _model_index(facts: CardFacts) -> list[dict[str, Any]]:
    """The evaluation's figures; of each environment where there are several."""
    names = facts.environments or ("evaluation",)
    whole = ", ".join(names)
    results = []
    for name, value in facts.figures.items():
        if name == "eval_reward":
            results.append(_result(whole, "mean_reward", value))
        elif name.startswith("eval_pass@") and "_ci95" not in name and "/" not in name:
            results.append(_result(whole, name.removeprefix("eval_"), value))
        elif name.startswith("eval_reward/"):
            results.append(_result(name.partition("/")[2], "mean_reward", value))
    return results


def _result(dataset: str, metric: str, value: float) -> dict[str, Any]:
    return {
        "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
        "dataset": {"name": dataset, "type": "environment"},
        "metrics": [{"type": metric, "name": metric, "value": round(value, 6)}],
    }


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else [str(one) for one in value]


# -- files


def is_ours(path: Path) -> bool:
    """Whether the card at ``path`` may be written again: there is none, it is ours, or peft's unfilled one."""
    if not path.exists():
        return True
    text = path.read_text(encoding="utf-8", errors="replace")
    return MARK in text or ("library_name: peft" in text and "[More Information Needed]" in text)


def existing_tags(path: Path) -> list[str]:
    """The tags of the card that is at ``path``; none where it has none that can be read."""
    if not path.exists():
        return []
    found = re.match(r"---\n(.*?)\n---", path.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        data = yaml.safe_load(found.group(1)) if found else None
    except yaml.YAMLError:
        return []
    tags = data.get("tags") if isinstance(data, dict) else None
    return _listed(tags) if isinstance(tags, (str, list)) else []
