"""Forward and backward of one optimizer step's micro-batches: one by one, or side by side, one on each core of a CPU.

A small model's operations are too short to be shared among cores, so its micro-batches are. Each is computed on one
core, forward and backward, and its gradient is added to the others' in the order of the micro-batches: the numbers are,
bit for bit, those of one core that computes one after the other.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from envgrad.cores import compute_alone, is_small
from envgrad.losses import LossOutputs
from envgrad.packing import MicroBatch
from envgrad.sampling.fused import FusedDecoder
from envgrad.training.model import has_dropout

ForwardLoss: TypeAlias = Callable[[MicroBatch], LossOutputs]


def passes_one_by_one(
    micro_batches: Sequence[MicroBatch],
    forward_loss: ForwardLoss,
    accelerator: Accelerator,
    model: nn.Module | None = None,
) -> Generator[LossOutputs]:
    """Each micro-batch's loss, in order, its backward done: what every engine of accelerate takes part in.

    Args:
        micro_batches: This process's; as many as every other one's.
        forward_loss: Its share of the whole step's loss, over all processes.
        accelerator: Does the backward.
        model: What ``forward_loss`` calls, where it is wrapped for several processes: gradients are summed over them
            behind the last micro-batch. Engines take the mean, so each loss counts as often as there are processes.
    """
    processes = accelerator.num_processes
    for index, micro_batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        accelerator.gradient_state._set_sync_gradients(last)
        apart = contextlib.nullcontext() if last or model is None else accelerator.no_sync(model)
        with apart:
            outputs = forward_loss(micro_batch.to(accelerator.device))
            accelerator.backward(outputs.loss if processes == 1 else outputs.loss * processes)
        yield outputs


def side_by_side_fits(model: nn.Module, base: PreTrainedModel) -> bool:
    """Whether ``model``'s micro-batches may run at once, in threads: it is small, in float32 on a CPU, unwrapped, draws
    nothing (dropout), and is made of layers that are known to keep no state of a call.

    Args:
        model: What the trainer calls: ``base``, or adapters around it.
        base: The causal language model inside.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
        >>> side_by_side_fits(model, model), side_by_side_fits(torch.nn.DataParallel(model), model)
        (True, False)
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    if not isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
        return False
    if not trained or not is_small(trained):  # each micro-batch in flight holds a gradient of its own
        return False
    if any(one._backward_hooks or one._post_accumulate_grad_hooks for one in trained):
        return False
    if base.is_activation_checkpointing or has_dropout(model):
        return False
    return FusedDecoder.of(base) is not None


class TrainingThreads:
    """Threads of a run that compute on one core each, started when they are needed, until the context is left.

    They stay from step to step: an allocator keeps memory that one thread has freed for that thread.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._cores = 0

    def __enter__(self) -> TrainingThreads:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for those that compute at this moment, and end them; what waits is not computed."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

    def of(self, cores: int) -> ThreadPoolExecutor:
        """``cores`` of them."""
        if self._pool is None or self._cores != cores:
            self.close()
            self._pool = ThreadPoolExecutor(cores, thread_name_prefix="envgrad-training", initializer=compute_alone)
            self._cores = cores
        return self._pool


def passes_side_by_side(
    micro_batches: Sequence[MicroBatch],
    forward_loss: ForwardLoss,
    trained: Sequence[nn.Parameter],
    threads: TrainingThreads,
    cores: int,
) -> Generator[LossOutputs]:
    """Each micro-batch's loss, in order; when it is yielded, its gradient has been added to ``trained``'s.

    An error of one is raised in its place. Whoever leaves early waits for those that compute at that moment; no more is
    added, and ``threads`` are closed.

    Args:
        micro_batches: On the model's device.
        forward_loss: Called in ``threads``, several at once.
        trained: The parameters to differentiate.
        threads: Of the run.
        cores: Micro-batches that compute at once, 2 or more.
    """

    def compute(micro_batch: MicroBatch) -> tuple[LossOutputs, tuple[Tensor | None, ...]]:
        outputs = forward_loss(micro_batch)
        return outputs, torch.autograd.grad(outputs.loss, trained, allow_unused=True)

    pool, waiting = threads.of(cores), iter(micro_batches)
    running: deque[Future[tuple[LossOutputs, tuple[Tensor | None, ...]]]] = deque()
    done = False
    try:
        for micro_batch in waiting:
            running.append(pool.submit(compute, micro_batch))
            if len(running) > cores:  # one waits, so that no core does
                break
        while running:
            outputs, gradients = running.popleft().result()
            following = next(waiting, None)
            if following is not None:
                running.append(pool.submit(compute, following))
            _add(gradients, trained)
            yield outputs
        done = True
    finally:
        if not done:
            threads.close()


def _add(gradients: Sequence[Tensor | None], trained: Sequence[nn.Parameter]) -> None:
    for one, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            # a copy: what autograd returns may be a view, or another parameter's too
            one.grad = gradient.clone() if one.grad is None else one.grad.add_(gradient)
