"""Every error that envgrad raises on purpose.

::

    EnvgradError
    |-- ConfigurationError (ValueError)       an option or argument that cannot work; raised at construction
    |   |-- EnvironmentContractError          a class that breaks the environment contract
    |   |-- ChatTemplateError                 a chat template or tool format that cannot be used
    |   `-- CheckpointError                   a checkpoint that is torn, foreign, or of another run
    |-- EpisodeFailure                        an episode that could not be finished; retried, then dropped
    |   |-- EnvironmentFailure                reset, get_reward or the environment's own word; user code may raise it
    |   |-- ResetTimeout                      reset took longer than reset_timeout
    |   |-- RewardTimeout                     get_reward took longer than reward_timeout
    |   |-- RewardFailure                     a reward function or reward model raised
    |   |-- SamplerFailure                    the sampler could not answer
    |   `-- NotFinite                         beside one of the others: a reward or log-prob that is no finite number
    |-- NonFiniteError                        a number that is not finite, where on_nonfinite="raise"
    |-- TooManyFailures                       max_consecutive_failed_groups groups in a row were dropped
    |-- SamplerDied                           the sampler's process or server is gone: the run ends
    |-- WeightTransferError                   weights did not arrive whole at a sampler, which keeps those it had
    |-- EpisodeLogError                       the episode log could not be written: the run ends
    |-- RankFailed                            another process of the run failed or is gone: the run ends here too
    |   `-- RankStopped                       the same, with an error that leaves a checkpoint behind
    |-- StoppedTogether                       a signal came to some process of the run; raised as that signal
    |-- ToolCallError                         a call that does not fit its tool; its text goes back to the model
    `-- EpisodeDone                           not an error: a tool raises it to end the episode

Messages say the value, the rule and the fix.
"""

from __future__ import annotations


class EnvgradError(Exception):
    """Base of all errors raised on purpose by envgrad."""


class ConfigurationError(EnvgradError, ValueError):
    """An option or argument that cannot work, named with the rule it breaks and the fix."""


class EnvironmentContractError(ConfigurationError, TypeError):
    """An environment class that breaks the contract; the message names the member and the fix."""


class ChatTemplateError(ConfigurationError):
    """A chat template that cannot render what the episode needs."""


class CheckpointError(ConfigurationError):
    """A checkpoint that cannot be resumed: a file of it is missing, torn, foreign, or of another run or version."""


class EpisodeFailure(EnvgradError):
    """An episode that could not be finished. Never a reward of 0: the episode is retried, then dropped and counted."""

    kind = "episode"


class EnvironmentFailure(EpisodeFailure):
    """The environment failed. Environments may raise it themselves from any member, with a message.

    Example:
        >>> raise EnvironmentFailure("the browser crashed")
        Traceback (most recent call last):
        envgrad.errors.EnvironmentFailure: the browser crashed
    """

    kind = "environment"


class ResetTimeout(EpisodeFailure):
    """``reset`` took longer than ``reset_timeout`` seconds."""

    kind = "reset_timeout"


class RewardTimeout(EpisodeFailure):
    """``get_reward`` took longer than ``reward_timeout`` seconds."""

    kind = "reward_timeout"


class RewardFailure(EpisodeFailure):
    """A reward function or reward model raised: its group has no reward, which is never 0, and is dropped."""

    kind = "reward"


class SamplerFailure(EpisodeFailure):
    """The sampler could not answer a request."""

    kind = "sampler"


class NotFinite(EpisodeFailure):
    """A number of an episode is NaN or infinite; what kind of failure that is, the other base says."""


class NonFiniteReward(NotFinite, EnvironmentFailure):
    """An environment gave an infinite reward, or rewards that add up to one."""

    kind = EnvironmentFailure.kind


class NonFiniteScore(NotFinite, RewardFailure):
    """A reward function or model gave an infinite reward, or one that makes the weighted sum infinite."""

    kind = RewardFailure.kind


class NonFiniteLogprob(NotFinite, SamplerFailure):
    """A sampler gave a token with a log-prob that is not finite."""

    kind = SamplerFailure.kind


class NonFiniteError(EnvgradError, ArithmeticError):
    """A reward, log-prob, loss or gradient is NaN or infinite, and ``on_nonfinite="raise"``; or updates were skipped
    for it too often in a row, or the weights themselves are no longer finite. It ends the run."""


class TooManyFailures(EnvgradError, RuntimeError):
    """Too many groups in a row were dropped; the cause is chained."""


class SamplerDied(EnvgradError, RuntimeError):
    """The sampler's process or server is gone, so that nothing can be sampled any more: it ends the run."""


class WeightTransferError(EnvgradError, RuntimeError):
    """A policy's weights did not arrive whole at a sampler; it still serves the version that it had."""


class EpisodeLogError(EnvgradError, RuntimeError):
    """The episode log could not be written (the disk is full, say); the cause is chained."""


class RankFailed(EnvgradError, RuntimeError):
    """Another process of the run has failed, or is gone; the message has its words where it left some."""


class RankStopped(RankFailed):
    """Another process of the run has failed with an error before which all processes save a checkpoint."""


class StoppedTogether(EnvgradError):
    """A signal came to some process of the run: all stop at the same place, as if it had come to each of them.

    Example:
        >>> StoppedTogether(15).signal
        15
    """

    def __init__(self, signal: int) -> None:
        super().__init__(f"signal {signal} came to a process of the run")
        self.signal = signal


class ToolCallError(EnvgradError):
    """A tool call that does not fit its tool. Its text goes back to the model as the tool's result."""


class EpisodeDone(Exception):
    """Raise it from a tool to end the episode; ``observation`` is the tool's last result.

    Example:
        >>> EpisodeDone("You win.").observation
        'You win.'
    """

    def __init__(self, observation: object = "") -> None:
        super().__init__(observation)
        self.observation = observation


def first_line(error: BaseException) -> str:
    """The first line of what ``error`` says, to be quoted in a message of ours.

    Example:
        >>> first_line(OSError("no such folder\\nand much more")), first_line(KeyError())
        ('no such folder', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
