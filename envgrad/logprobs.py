"""Log-probs and entropies of the trained tokens, computed inside the wrapped model's ``forward``.

``install_policy_forward(model)`` teaches a causal LM one more way to be called: ``model(policy=PolicyInputs(...))``
runs the decoder over the packed row and the head over the predicting positions only. It has to happen inside
``forward`` because DDP, FSDP and ZeRO-3 gather parameters and hook gradients there. Any other call is as before.

The head works in chunks: neither forward nor backward ever holds tokens x vocabulary. Logits are recomputed in backward
where they do not fit ``MAX_LOGITS``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from envgrad.attention import no_mask, use_envgrad_attention
from envgrad.errors import ConfigurationError
from envgrad.layout import PackedLayout
from envgrad.linear_head import MAX_LOGITS, linear_head_logprobs
from envgrad.packing import MicroBatch, pack
from envgrad.types import TrainingSample

if TYPE_CHECKING:
    from peft import PeftModel

EntropyMode: TypeAlias = Literal["none", "metric", "grad"]
"""``metric``: entropies without gradient; ``grad``: with"""


class PolicyInputs:
    """Arguments of one policy forward.

    Neither a dataclass nor a tuple on purpose: wrappers (FSDP, accelerate) look into those and would cast or move
    what is in them.
    """

    __slots__ = ("entropy", "input_ids", "layout", "position_ids", "predict_index", "target_ids", "temperature")

    def __init__(self, micro_batch: MicroBatch, *, temperature: float, entropy: EntropyMode) -> None:
        self.input_ids = micro_batch.input_ids
        self.position_ids = micro_batch.position_ids
        self.layout = micro_batch.layout
        self.predict_index = micro_batch.predict_index
        self.target_ids = micro_batch.target_ids
        self.temperature = temperature
        self.entropy = entropy


class PolicyOutputs(NamedTuple):
    """``(N,)`` float32 each. A tuple, because wrappers find the tensors that need gradient hooks in tuples."""

    logprobs: Tensor
    entropy: Tensor | None


def policy_logprobs(
    model: nn.Module, micro_batch: MicroBatch, *, temperature: float = 1.0, entropy: EntropyMode = "none"
) -> PolicyOutputs:
    """Log-probs of ``micro_batch``'s trained tokens under ``model``, which may be wrapped (DDP, FSDP, PEFT).

    Of the full distribution at ``temperature``, as the sampler's are, so the ratio of an unchanged policy is 1.

    Args:
        model: A model with ``install_policy_forward``, or a wrapper around one.
        micro_batch: On the model's device.
        temperature: Logits are divided by it; above 0.
        entropy: ``EntropyMode``.

    Raises:
        ConfigurationError: ``temperature`` is not above 0.
    """
    if not temperature > 0:
        raise ConfigurationError(
            f"temperature={temperature} must be above 0: a greedy policy has no log-probs to train; sample at 1.0"
        )
    outputs: PolicyOutputs = model(policy=PolicyInputs(micro_batch, temperature=temperature, entropy=entropy))
    return PolicyOutputs(*outputs)


def logprobs_from_hidden(
    hidden: Tensor, head: nn.Module, target_ids: Tensor, *, temperature: float = 1.0, entropy: EntropyMode = "none"
) -> PolicyOutputs:
    """``log softmax(head(hidden) / temperature)`` at ``target_ids``, in float32, and the entropy of the distribution.

    A plain ``nn.Linear`` takes a path of its own, which recomputes the least; any other head (adapters, hooks) is
    called chunk by chunk under activation checkpointing.

    Args:
        hidden: ``(N, D)`` last hidden states.
        head: ``(n, D)`` -> logits ``(n, V)``.
        target_ids: ``(N,)`` int64.
        temperature: Above 0.
        entropy: ``EntropyMode``.

    Example:
        >>> head = nn.Linear(2, 4, bias=False).requires_grad_(False)
        >>> outputs = logprobs_from_hidden(torch.zeros(3, 2), head, torch.tensor([0, 1, 2]), entropy="metric")
        >>> outputs.logprobs.exp().tolist(), outputs.entropy.exp().tolist()
        ([0.25, 0.25, 0.25], [4.0, 4.0, 4.0])
    """
    if isinstance(head, nn.Linear) and _is_plain(head):
        return PolicyOutputs(
            *linear_head_logprobs(hidden, head.weight, head.bias, target_ids, temperature=temperature, entropy=entropy)
        )
    width = head.out_features if isinstance(head, nn.Linear) else 2**16
    rows = max(1, MAX_LOGITS // int(width))

    def chunk(part: Tensor, targets: Tensor) -> PolicyOutputs:
        logits: Tensor = head(part)
        return logprobs_from_logits(logits, targets, temperature=temperature, entropy=entropy)

    if hidden.shape[0] <= rows:
        return chunk(hidden, target_ids)
    parts = [
        PolicyOutputs(*checkpoint(chunk, part, targets, use_reentrant=False))
        for part, targets in zip(torch.split(hidden, rows), torch.split(target_ids, rows), strict=True)
    ]
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return PolicyOutputs(torch.cat([part.logprobs for part in parts]), torch.cat(entropies) if entropies else None)


def _is_plain(head: nn.Linear) -> bool:
    """Whether calling ``head`` is nothing but ``x @ weight.T + bias`` with the weight in memory."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    ordinary = type(head) is nn.Linear and "forward" not in vars(head) and type(head.weight) is nn.Parameter
    return ordinary and not any(hooks) and head.weight.dim() == 2


def logprobs_from_logits(
    logits: Tensor, target_ids: Tensor, *, temperature: float = 1.0, entropy: EntropyMode = "none"
) -> PolicyOutputs:
    """``(N, V)`` logits -> log-probs of ``target_ids`` and entropies, in float32."""
    logs = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = logs.gather(-1, target_ids[:, None]).squeeze(-1)
    if entropy == "none":
        return PolicyOutputs(chosen, None)
    logs = logs if entropy == "grad" else logs.detach()
    return PolicyOutputs(chosen, -(logs.exp() * logs).sum(-1))


class PolicyForward:
    """The instance's ``forward``: answers ``policy=``, and hands any other call to the forward that was there before.

    It lives in the instance's ``__dict__`` and knows the model as an ordinary attribute, so a deep copy or a pickle of
    the model carries a policy forward of its own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.previous: Callable[..., Any] | None = vars(model).get("forward")
        self.path: Literal["head", "logits"] = "head"
        """``head``: decoder, then head on the trained tokens in chunks; ``logits``: the model's own logits, for models
        that change them after the head"""
        # transformers reads the names of forward's parameters.
        self.__signature__ = inspect.signature(self._plain())

    def _plain(self) -> Callable[..., Any]:
        return MethodType(type(self.model).forward, self.model) if self.previous is None else self.previous

    def __call__(self, *args: Any, policy: PolicyInputs | None = None, **kwargs: Any) -> Any:
        if policy is None:
            return self._plain()(*args, **kwargs)
        if self.path == "logits":
            return self._from_logits(policy)
        hidden = self.last_hidden(policy.input_ids, policy.position_ids, policy.layout)
        return logprobs_from_hidden(
            hidden[0].index_select(0, policy.predict_index), self.head, policy.target_ids,
            temperature=policy.temperature, entropy=policy.entropy,
        )  # fmt: skip

    @property
    def head(self) -> nn.Module:
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def last_hidden(self, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout | None) -> Tensor:
        """``(1, T, D)`` last hidden states of the decoder."""
        decoder: nn.Module = self.model.base_model
        output: Tensor = decoder(**_row_arguments(input_ids, position_ids, layout))[0]
        return output

    def _from_logits(self, policy: PolicyInputs) -> PolicyOutputs:
        arguments = _row_arguments(policy.input_ids, policy.position_ids, policy.layout)
        if "logits_to_keep" in self.__signature__.parameters:
            logits: Tensor = self._plain()(**arguments, logits_to_keep=policy.predict_index).logits[0]
        else:
            logits = self._plain()(**arguments).logits[0].index_select(0, policy.predict_index)
        return logprobs_from_logits(logits, policy.target_ids, temperature=policy.temperature, entropy=policy.entropy)

    def uninstall(self) -> None:
        """Give the model its former ``forward`` back, unless someone (accelerate) has wrapped this one since."""
        if vars(self.model).get("forward") is self:
            if self.previous is None:
                del self.model.forward
            else:
                self.model.forward = self.previous


def _row_arguments(input_ids: Tensor, position_ids: Tensor, layout: PackedLayout | None) -> dict[str, Any]:
    if layout is None:  # a plain row from position 0: what every model knows
        return {"input_ids": input_ids, "use_cache": False, "return_dict": True}
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "attention_mask": no_mask(input_ids.device),
        "attention_layout": layout,
        "use_cache": False,
        "return_dict": True,
    }


def inner_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformers model itself, inside its adapters if it has any.

    Raises:
        ConfigurationError: prompt learning, or not a transformers model.
    """
    if isinstance(model, PreTrainedModel):
        return model
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise ConfigurationError(f"the policy must be a transformers or PEFT model, got {type(model).__name__}")
    if model.active_peft_config.is_prompt_learning:
        raise ConfigurationError(
            f"PEFT method {model.active_peft_config.peft_type} learns prompts, which packed rows cannot carry; use LoRA"
        )
    base = model.get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise ConfigurationError(f"the PEFT model's base must be a transformers model, got {type(base).__name__}")
    return base


def install_policy_forward(model: PreTrainedModel | PeftModel) -> PolicyForward:
    """Teach ``model`` to be called with ``policy=``. Before it is wrapped, on one process's whole parameters.

    The decoder with its head is compared with the model's own logits on a random row; where they differ (soft-capped or
    scaled logits) log-probs come from the model's own forward, whose logits are of trained tokens but not in chunks.

    Returns:
        The policy forward; ``uninstall()`` removes it. Calling again returns the one in place.

    Raises:
        ConfigurationError: a model without a language-model head, or with a PEFT method that learns prompts.
    """
    base = inner_model(model)
    present = vars(base).get("forward")
    if isinstance(present, PolicyForward):
        return present
    if base.get_output_embeddings() is None or base.base_model is base:
        raise ConfigurationError(
            f"{type(base).__name__} has no decoder with a language-model head; load it with AutoModelForCausalLM"
        )
    forward = PolicyForward(base)
    ids = _random_ids(base, 8)
    with _probing(base):
        positions = torch.arange(8, device=ids.device)[None]
        from_head: Tensor = forward.head(forward.last_hidden(ids, positions, None))
        own: Tensor = forward._plain()(input_ids=ids, use_cache=False, return_dict=True).logits
    if _relative_difference(from_head, own) > 1e-5:
        forward.path = "logits"
    base.forward = forward
    return forward


def check_packed_forward(model: PreTrainedModel | PeftModel) -> str | None:
    """Whether the packed forward gives what plain rows give: None, or why not, in words.

    Two groups with uneven siblings, random tokens, against one eager row each; beyond the sliding window if that is
    shorter than about 60 tokens. Models that attend otherwise (soft-capping, sinks, ALiBi, linear attention) are found
    here, not by their names, and are trained with ``pack(mode="single")``. Leaves the attention implementation as it
    was.
    """
    base = inner_model(model)
    batch = pack(_probe_samples(base), [1.0] * 5)
    micro_batch = batch.micro_batches[0].to(base.device)
    forward = PolicyForward(base)
    before: str = base.config._attn_implementation
    with _probing(base):
        try:
            base.set_attn_implementation("eager")
            plain = [
                forward.last_hidden(ids, torch.arange(ids.shape[1], device=ids.device)[None], None)[0]
                for ids in (
                    torch.tensor([sample.token_ids[:-1]], device=base.device) for sample in batch.samples
                )
            ]  # fmt: skip
            use_envgrad_attention(base)
            packed = forward.last_hidden(micro_batch.input_ids, micro_batch.position_ids, micro_batch.layout)[0]
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            return f"{type(base).__name__} cannot run a packed row: {type(error).__name__}: {error}"
        finally:
            if base.config._attn_implementation != before:
                base.set_attn_implementation(before)
    expected = torch.cat(
        [row[sample.prompt_length - 1 :] for row, sample in zip(plain, batch.samples, strict=True)]
    )  # fmt: skip
    difference = _relative_difference(packed.index_select(0, micro_batch.predict_index), expected)
    limit = 1e-3 if expected.dtype == torch.float32 else 5e-2
    if difference <= limit:
        return None
    return (
        f"{type(base).__name__}'s packed forward differs from its plain one by {difference:.1e} (relative; at most "
        f"{limit:.0e} allowed): its attention does something that a packed row cannot express"
    )


def _probe_samples(model: PreTrainedModel) -> list[TrainingSample]:
    shapes = [("a", 40, 24), ("a", 40, 3), ("a", 40, 9), ("b", 5, 30), ("b", 5, 2)]
    ids = _random_ids(model, 200)[0].tolist()
    samples = []
    for number, (group, prompt, own) in enumerate(shapes):
        first = 0 if group == "a" else 40
        token_ids = (*ids[first : first + prompt], *ids[50 + 30 * number : 50 + 30 * number + own])
        size = prompt + own
        samples.append(
            TrainingSample(
                token_ids=token_ids, mask=(0,) * prompt + (1,) * own, logprobs=(0.0,) * size, versions=(0,) * size,
                advantages=(0.0,) * size, prompt_length=prompt, group=group,
            )
        )  # fmt: skip
    return samples


def _random_ids(model: PreTrainedModel, count: int) -> Tensor:
    """``(1, count)`` from a generator of its own, so that nobody's random stream moves."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, int(vocabulary), (1, count), generator=generator).to(model.device)


def _relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-12))


@contextmanager
def _probing(model: nn.Module) -> Iterator[None]:
    """No gradients, dropout off; every module's mode is put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
