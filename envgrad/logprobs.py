"""Log-probs and entropies of the trained tokens, computed inside the wrapped model's ``forward``.

``install_policy_forward(model)`` teaches a causal LM one more way to be called: ``model(policy=PolicyInputs(...))``
runs the decoder over the packed row and the head over the predicting positions only. It has to happen inside
``forward`` because DDP, FSDP and ZeRO-3 gather parameters and hook gradients there. Any other call is as before.

The head works in chunks (``head``): neither forward nor backward ever holds tokens x vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from envgrad.attention import no_mask, use_envgrad_attention
from envgrad.divergence import TeacherSignal
from envgrad.errors import ConfigurationError
from envgrad.head import EntropyMode, PolicyOutputs, logprobs_from_hidden, logprobs_from_logs
from envgrad.last_layer import WORTHWHILE, Predicting
from envgrad.layout import PackedAttention, PackedLayout
from envgrad.packing import MicroBatch, pack
from envgrad.probing import probing, random_ids, relative_difference
from envgrad.row_layers import install_row_layers, remove_row_layers
from envgrad.types import TrainingSample

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = [
    "EntropyMode",
    "PolicyForward",
    "PolicyInputs",
    "PolicyOutputs",
    "check_packed_forward",
    "inner_model",
    "install_policy_forward",
    "logprobs_from_hidden",
    "policy_logprobs",
    "predicting_states",
]


class PolicyInputs:
    """Arguments of one policy forward.

    Neither a dataclass nor a tuple on purpose: wrappers (FSDP, accelerate) look into those and would cast or move
    what is in them.
    """

    __slots__ = (
        "entropy", "input_ids", "layout", "position_ids", "predict_index", "states", "target_ids", "teacher",
        "temperature",
    )  # fmt: skip

    def __init__(
        self,
        micro_batch: MicroBatch,
        *,
        temperature: float,
        entropy: EntropyMode,
        teacher: TeacherSignal | None = None,
        states: bool = False,
    ) -> None:
        self.input_ids = micro_batch.input_ids
        self.position_ids = micro_batch.position_ids
        self.layout = micro_batch.layout
        self.predict_index = micro_batch.predict_index
        self.target_ids = micro_batch.target_ids
        self.temperature = temperature
        self.entropy = entropy
        self.teacher = teacher
        self.states = states


def policy_logprobs(
    model: nn.Module,
    micro_batch: MicroBatch,
    *,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    teacher: TeacherSignal | None = None,
) -> PolicyOutputs:
    """Log-probs of ``micro_batch``'s trained tokens under ``model``, which may be wrapped (DDP, FSDP, PEFT).

    Of the full distribution at ``temperature``, as the sampler's are, so the ratio of an unchanged policy is 1.

    Args:
        model: A model with ``install_policy_forward``, or a wrapper around one.
        micro_batch: On the model's device.
        temperature: Logits are divided by it; above 0. A micro-batch with a temperature of its own takes that.
        entropy: ``EntropyMode``.
        teacher: What the divergence from a teacher needs, if there is one (``divergence.TeacherSignal``).

    Raises:
        ConfigurationError: ``temperature`` is not above 0.
    """
    temperature = temperature if micro_batch.temperature is None else micro_batch.temperature
    if not temperature > 0:
        raise ConfigurationError(
            f"temperature={temperature} must be above 0: a greedy policy has no log-probs to train; sample at 1.0"
        )
    inputs = PolicyInputs(micro_batch, temperature=temperature, entropy=entropy, teacher=teacher)
    outputs: PolicyOutputs = model(policy=inputs)
    return PolicyOutputs(*outputs)


def predicting_states(model: nn.Module, micro_batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
    """``(N, D)`` last hidden states that predict the trained tokens, for ``PolicyForward.state_logits``.

    ``(N, V)`` logits over the temperature instead, for models whose logits are not the head's alone
    (``PolicyForward.path``).
    """
    temperature = temperature if micro_batch.temperature is None else micro_batch.temperature
    states: Tensor = model(policy=PolicyInputs(micro_batch, temperature=temperature, entropy="none", states=True))
    return states


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
        self.packed_attention: PackedAttention = "auto"
        """of the rows that it is given"""
        self.chooses_rows = False
        """the last layer can be computed for the predicting tokens only"""
        # transformers reads the names of forward's parameters.
        self.__signature__ = inspect.signature(self._plain())

    def _plain(self) -> Callable[..., Any]:
        return MethodType(type(self.model).forward, self.model) if self.previous is None else self.previous

    def __call__(self, *args: Any, policy: PolicyInputs | None = None, **kwargs: Any) -> Any:
        if policy is None:
            return self._plain()(*args, **kwargs)
        if policy.layout is not None:
            policy.layout = policy.layout.by(self.packed_attention)
        if policy.states:
            return self._logits(policy) / policy.temperature if self.path == "logits" else self._states(policy)
        signal = policy.teacher
        if signal is not None and not signal.divergence.reads_distributions:
            outputs = self._outputs(policy, None)
            return outputs._replace(divergence=signal.of_sampled(outputs.logprobs))
        return self._outputs(policy, signal)

    def _outputs(self, policy: PolicyInputs, teacher: TeacherSignal | None) -> PolicyOutputs:
        if self.path == "head":
            return logprobs_from_hidden(
                self._states(policy), self.head, policy.target_ids,
                temperature=policy.temperature, entropy=policy.entropy, teacher=teacher,
            )  # fmt: skip
        logs = torch.log_softmax(self._logits(policy).float() / policy.temperature, dim=-1)
        outputs = logprobs_from_logs(logs, policy.target_ids, policy.entropy)
        return outputs if teacher is None else outputs._replace(divergence=teacher.of_logs(logs, 0, len(teacher.index)))

    def state_logits(self, states: Tensor, *, temperature: float) -> Tensor:
        """``predicting_states`` -> ``(n, V)`` logits over the temperature."""
        if self.path == "logits":
            return states
        logits: Tensor = self.head(states)
        return logits.float() / temperature

    @property
    def head(self) -> nn.Module:
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def last_hidden(self, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout | Predicting | None) -> Tensor:
        """``(1, T, D)`` last hidden states of the decoder; where the layout is ``Predicting``, of those tokens only."""
        decoder: nn.Module = self.model.base_model
        output: Tensor = decoder(**_row_arguments(input_ids, position_ids, layout))[0]
        return output

    def _states(self, policy: PolicyInputs) -> Tensor:
        """``(N, D)`` at the predicting positions."""
        layout: PackedLayout | Predicting | None = policy.layout
        index = policy.predict_index
        if policy.layout is not None and self.chooses_rows:
            # The last token of a prompt predicts for every sibling.
            wanted, place = torch.unique(index, return_inverse=True)
            if len(wanted) <= WORTHWHILE * policy.layout.num_tokens:
                layout, index = Predicting(policy.layout, wanted), place
        hidden = self.last_hidden(policy.input_ids, policy.position_ids, layout)
        if isinstance(layout, Predicting) and hidden.shape[1] != len(layout.wanted):
            index = policy.predict_index  # a wrapper calls the layer's class past its own forward
        return hidden[0].index_select(0, index)

    def _logits(self, policy: PolicyInputs) -> Tensor:
        """``(N, V)`` at the predicting positions, as the model's own forward gives them."""
        arguments = _row_arguments(policy.input_ids, policy.position_ids, policy.layout)
        if "logits_to_keep" in self.__signature__.parameters:
            kept: Tensor = self._plain()(**arguments, logits_to_keep=policy.predict_index).logits[0]
            return kept
        whole: Tensor = self._plain()(**arguments).logits[0]
        return whole.index_select(0, policy.predict_index)

    def uninstall(self) -> None:
        """Give the model its former ``forward`` back, unless someone (accelerate) has wrapped this one since."""
        if vars(self.model).get("forward") is self:
            if self.previous is None:
                del self.model.forward
            else:
                self.model.forward = self.previous
            remove_row_layers(self.model)


def _row_arguments(input_ids: Tensor, position_ids: Tensor, layout: PackedLayout | Predicting | None) -> dict[str, Any]:
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
    ids = random_ids(base, 8)
    with probing(base):
        positions = torch.arange(8, device=ids.device)[None]
        from_head: Tensor = forward.head(forward.last_hidden(ids, positions, None))
        own: Tensor = forward._plain()(input_ids=ids, use_cache=False, return_dict=True).logits
    if relative_difference(from_head, own) > 1e-5:
        forward.path = "logits"
    forward.chooses_rows = install_row_layers(base, forward.last_hidden, chooses_rows=forward.path == "head")
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
    with probing(base):
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
    difference = relative_difference(packed.index_select(0, micro_batch.predict_index), expected)
    limit = 1e-3 if expected.dtype == torch.float32 else 5e-2
    if difference <= limit:
        return None
    return (
        f"{type(base).__name__}'s packed forward differs from its plain one by {difference:.1e} (relative; at most "
        f"{limit:.0e} allowed): its attention does something that a packed row cannot express"
    )


def _probe_samples(model: PreTrainedModel) -> list[TrainingSample]:
    shapes = [("a", 40, 24), ("a", 40, 3), ("a", 40, 9), ("b", 5, 30), ("b", 5, 2)]
    ids = random_ids(model, 200)[0].tolist()
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
