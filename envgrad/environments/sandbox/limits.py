"""What a sandboxed program may use, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from envgrad.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one run; each is for all processes of the run together unless it says otherwise.

    Raises:
        ConfigurationError: a limit that is not above 0.

    Example:
        >>> SandboxLimits(seconds=2.0).memory_mb
        512
    """

    seconds: float = 10.0
    """wall-clock seconds; then everything is killed"""
    cpu_seconds: int = 10
    """of each process"""
    memory_mb: int = 512
    """resident memory of all processes, looked at every few hundredths of a second; each alone can never map more"""
    processes: int = 64
    """processes and threads at once"""
    disk_mb: int = 64
    """files of the workspace together, and each alone; temporary files have as much again, in memory"""
    files: int = 10_000
    """files and folders in the workspace"""
    output_bytes: int = 100_000
    """of standard output and of standard error each; what is more is read and thrown away"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                raise ConfigurationError(f"SandboxLimits({field.name}={value}) must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A run that has ended, whatever ended it."""

    stdout: str
    stderr: str
    exit_code: int
    """of the program; 128 + a signal's number where a signal ended it"""
    killed: str | None = None
    """the limit that ended it: ``seconds``, ``memory_mb`` or ``disk_mb`` (its size, or ``files``); None if none did"""
    truncated: bool = False
    """whether there was more output than ``output_bytes``"""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.killed is None

    def text(self) -> str:
        """Output, errors and what ended it, as one text for a model to read.

        Example:
            >>> RunResult(stdout="3\\n", stderr="", exit_code=0).text()
            '3'
            >>> print(RunResult(stdout="", stderr="no such file\\n", exit_code=1).text())
            no such file
            [exit code 1]
        """
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.truncated:
            parts.append("[output cut]")
        if self.killed is not None:
            parts.append(f"[killed: past its limit of {self.killed}]")
        elif self.exit_code:
            parts.append(f"[exit code {self.exit_code}]")
        return "\n".join(part for part in parts if part) or "(no output)"
