from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from envgrad.cli import terminal
from envgrad.cli.main import main
from envgrad.cli.play import PlayRequest, draw_task
from envgrad.environments.contract import inspect_environment
from envgrad.errors import ConfigurationError

SOURCE = '''
from envgrad import StepResult, ToolResult
from envgrad.environments.policy import ask_policy, play_part, reward_part

CLOSED = []

class Shop:
    """Two tools; it pays for a call, and in the end by component."""
    def reset(self, seed):
        print("noise of the environment")
        self.bought = []
        said = "Buy \\x1b[31mred\\x1b[0m [b]tea[/b]."
        return [{"role": "system", "content": "You shop."}, {"role": "user", "content": said}]

    def buy(self, item: str, count: int = 1) -> ToolResult:
        """Buy something.

        Args:
            item: What to buy.
        """
        self.bought.append((item, count))
        return ToolResult(f"bought {count} {item}", reward=0.5)

    def leave(self) -> str:
        """Leave the shop."""
        self.done = True
        return "bye"

    done = False

    def get_reward(self):
        return {"tea": float(("tea", 2) in self.bought), "thrift": None}

    def close(self):
        CLOSED.append(1)

class Talk:
    def reset(self):
        return "Say a."
    def step(self, message):
        return StepResult("more" if message == "a" else f"heard {message!r}", reward=0.25, done=message != "a")

class Seats:
    async def reset(self):
        return "Your move."
    async def move(self, text: str) -> str:
        """Move."""
        other = await play_part("black", [{"role": "user", "content": f"White says {text}."}])
        asked = await ask_policy([{"role": "user", "content": "Who wins?"}])
        reward_part("black", -1.0)
        self.done = True
        return f"black: {other}, judge: {asked}"
    done = False
    def get_reward(self):
        return 1.0

class Breaks(Talk):
    def step(self, message):
        raise OSError("the disk is gone")

class Row(Talk):
    def reset(self, question):
        return question

class Agent:
    def reset(self):
        return "Go."
    async def run_agent(self, endpoint):
        pass
    def get_reward(self):
        return 0.0
'''


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "played_page", raising=False)
    (tmp_path / "played_page.py").write_text(SOURCE)
    return str(tmp_path / "played_page.py")


def play(monkeypatch: pytest.MonkeyPatch, typed: str, *words: str) -> int:
    """The exit code of ``envgrad play`` with these lines typed, in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    monkeypatch.setattr(sys, "argv", ["envgrad", "play", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_an_episode_from_the_opening_to_the_reward(
    monkeypatch: pytest.MonkeyPatch, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, "buy item=tea count=2\nleave\n", f"{page}:Shop") == 0
    said = capsys.readouterr()
    lines = [line.rstrip() for line in said.out.splitlines()]
    for line in (
        "Shop, task train/0",
        "system  You shop.",
        "user    Buy red [b]tea[/b].",
        "  buy(item: string, count?: integer)",
        "    Buy something.",
        "    item: What to buy.",
        "  leave()",
        '  -> buy(item="tea", count=2)',
        "tool buy  bought 2 tea",
        "tool leave  bye",
        "reward    1.50",
        "          0.500  paid in its turns",
        "          1.00  tea",
        "          none  thrift",
        "ended by  done: the environment ended it",
        "turns     2",
    ):
        assert any(found.endswith(line) for found in lines), line
    assert "noise" not in said.out and "noise of the environment" in said.err
    assert "\x1b" not in said.out
    assert len(sys.modules["played_page"].CLOSED) == 1


def test_arguments_are_asked_for_one_by_one(
    monkeypatch: pytest.MonkeyPatch, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, "buy\n\ntea\ntwo\n2\nI am done\n", f"{page}:Shop") == 0
    out = capsys.readouterr().out
    assert "item: string. What to buy." in out and "item is required" in out
    assert "count: integer; empty leaves it out" in out
    assert 'count must be an integer, got the string "two"' in out
    assert "bought 2 tea" in out and "ended by  answer" in out


def test_slips_cost_no_turn_and_calls_written_as_json_do(
    monkeypatch: pytest.MonkeyPatch, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = 'bye tea\nbuy tea extra=1\nby tea\n\n? buy\n{"name": "buy", "arguments": {"count": 1}}\nleave\n'
    assert play(monkeypatch, typed.removeprefix("bye tea\n"), f"{page}:Shop") == 0
    out = capsys.readouterr().out
    assert "did you mean buy?" in out
    assert "missing argument 'item'" in out  # as the agent is told
    assert "turns     3" in out  # tea extra=1 is an item


def test_free_text_goes_to_step_with_lines_that_go_on(
    monkeypatch: pytest.MonkeyPatch, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, "a\nb\\\n= c\n", f"{page}:Talk") == 0
    out = capsys.readouterr().out
    assert "user  more" in out and "heard 'b\\n= c'" in out
    assert "reward    0.500" in out and "turns     2" in out


def test_other_parts_of_the_policy_are_played_too(
    monkeypatch: pytest.MonkeyPatch, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, "move e4\ne5\nmove\n", f"{page}:Seats") == 0
    out = capsys.readouterr().out
    assert "White says e4." in out and "Who wins?" in out
    assert "black: e5, judge: move" in out  # text there, not a call
    assert "part black" in out and "-1.00" in out


def test_how_it_ends_early(monkeypatch: pytest.MonkeyPatch, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(monkeypatch, "buy tea\n", f"{page}:Shop") == 1
    assert "The input ended before the episode did." in capsys.readouterr().out
    assert play(monkeypatch, "q\n", f"{page}:Shop") == 0
    assert "reward" not in capsys.readouterr().out.split("leaves.")[1]
    assert play(monkeypatch, "x\n", f"{page}:Breaks") == 1
    assert "the episode failed (environment): Breaks.step raised OSError: the disk is gone" in capsys.readouterr().out
    assert play(monkeypatch, "buy tea\nbuy tea\n", f"{page}:Shop", "--max-turns", "2") == 0
    assert "ended by  max_turns" in capsys.readouterr().out


def test_an_interrupt_closes_the_environment(monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal.Terminal, "_line", interrupt)
    assert play(monkeypatch, "", f"{page}:Shop") == 130
    assert len(sys.modules["played_page"].CLOSED) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("Row",), "reset requires ['question'], which nothing supplies"),
        (("Row", "--row", "[1]"), "is not a JSON object"),
        (("Agent",), "Agent has an agent of its own (run_agent)"),
        (("Talk", "--split", "test"), "--split 'test' is no split: write train or eval"),
    ],
)
def test_what_cannot_be_played(
    monkeypatch: pytest.MonkeyPatch, page: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert play(monkeypatch, "", f"{page}:{words[0]}", *words[1:]) == 2
    assert message in capsys.readouterr().err


def test_a_row_feeds_reset(monkeypatch: pytest.MonkeyPatch, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(monkeypatch, "x\n", f"{page}:Row", "--row", '{"question": "What now?"}') == 0
    assert "user  What now?" in capsys.readouterr().out


def test_tasks_are_those_of_a_run_with_this_seed() -> None:
    class Dice:
        def reset(self, seed: int) -> str:
            return str(seed)

        def get_reward(self) -> float:
            return 0.0

    spec, _ = inspect_environment("Dice", Dice)
    first = [draw_task(PlayRequest(environment="", seed=42, task=number), spec) for number in range(3)]
    assert [task.position for task in first] == [0, 1, 2]
    assert len({task.seed for task in first}) == 3
    assert draw_task(PlayRequest(environment="", seed=7), spec).seed != first[0].seed
    with pytest.raises(ConfigurationError, match="is no split"):
        draw_task(PlayRequest(environment="", split="dev"), spec)


def test_the_prompt_is_a_terminals_where_there_is_one(page: str, tmp_path: Path) -> None:
    """In a pseudo-terminal, with real keys: line editing, and Ctrl-D leaves."""
    parent, child = pty.openpty()
    program = "import sys; from envgrad.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "play", f"{page}:Talk"],
        stdin=child, stdout=child, stderr=subprocess.DEVNULL, env=os.environ | {"TERM": "dumb", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(child)

    def read_until(wanted: bytes) -> bytes:
        """What is shown from now on, up to the prompt behind ``wanted``."""
        found = b""
        while b"> " not in found.partition(wanted)[2]:
            assert select.select([parent], [], [], 60)[0], found
            found += os.read(parent, 4096)
        return found

    try:
        read_until(b"Say a.")
        os.write(parent, b"ax\x7f\n")  # the backspace takes the x away
        read_until(b"more")
        os.write(parent, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def test_no_model_library_is_loaded(page: str) -> None:
    program = (
        "import sys\n"
        "from envgrad.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print('LOADED', sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program, "play", f"{page}:Shop"]
    done = subprocess.run(command, input="buy tea\nI am done\n", capture_output=True, text=True, check=True)
    assert "bought 1 tea" in done.stdout and "LOADED []" in done.stdout
