"""The kernels are compiled once for each machine, and nothing breaks where they cannot be."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from envgrad.native import compiler
from envgrad.native.compiler import OFF, library
from envgrad.sampling.fused import FusedDecoder
from envgrad.sampling.local import LocalSampler
from envgrad.sampling.native_decoder import NativeDecoder
from envgrad.sampling.sampler import Completion, SamplingParams, Session
from helpers.models import tiny_llama

needs_compiler = pytest.mark.skipif(compiler._compiler() is None, reason="needs a C++ compiler")
TINY = 'extern "C" int envgrad_kernels_version() { return 1; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, and no memory of an earlier answer, before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.delenv(OFF, raising=False)
    library.cache_clear()
    yield tmp_path / "cache" / "envgrad"
    library.cache_clear()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels that take no time to compile."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "one.cpp").write_text(TINY)
    monkeypatch.setattr(compiler, "_SOURCES", folder)
    return folder


Pretend = Callable[..., Path]


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Makes a compiler that says a version, and otherwise runs these lines. It notes its calls beside itself."""

    def made(*lines: str, version: str = "echo 1.0") -> Path:
        script = tmp_path / "pretend"
        ask = f'if [ "$1" = --version ]; then {version}; exit 0; fi'
        script.write_text("\n".join(["#!/bin/sh", ask, f"echo called >> {script}.calls", *lines]) + "\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return Path(f"{script}.calls")

    return made


def kept(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir()) if folder.exists() else []


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [one.levelno for one in caplog.records if one.name == "envgrad.native.compiler"]


# -- without kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cxx", [None, "no-such-compiler"])
def test_without_a_compiler_a_line_for_those_who_ask_says_so(
    cxx: str | None, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if cxx is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CXX", cxx)
    caplog.set_level(logging.INFO, "envgrad")
    assert library() is None and library() is None
    assert levels(caplog) == [logging.INFO] and "no C++ compiler" in caplog.text
    assert not cache.exists()


def test_they_can_be_left_out(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = pretend("exit 1")
    monkeypatch.setenv(OFF, "0")
    caplog.set_level(logging.INFO, "envgrad")
    assert library() is None
    assert not levels(caplog) and not calls.exists()


@pytest.mark.parametrize(
    ("lines", "version", "words"),
    [
        (["echo no room for $$$ >&2; exit 1"], "echo 1.0", "no room for"),
        (["exit 0"], "echo 1.0", "No such file"),
        (["kill -9 $$"], "echo 1.0", "SIGKILL"),
        ([r"printf 'bad \377\376 text' >&2; exit 4"], r"printf '\377'", "text"),
        (["exit 0"], "exit 3", "status 3"),
    ],
    ids=["fails", "writes nothing", "dies", "says what is no text", "has no version"],
)
def test_a_compiler_that_fails_is_told_once_and_leaves_nothing(
    lines: list[str], version: str, words: str, pretend: Pretend, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = pretend(*lines, version=version)
    assert library() is None and library() is None
    assert levels(caplog) == [logging.WARNING] and words in caplog.text and f"{OFF}=0" in caplog.text
    assert not kept(cache)
    assert not calls.exists() or len(calls.read_text().splitlines()) <= 2  # once in each folder


@needs_compiler
def test_a_compiler_s_command_may_have_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiler._compiler()
    monkeypatch.setenv("CXX", f"env {plain}")
    words = compiler._compiler()
    assert words is not None and words.endswith(f"/env {plain}")
    assert compiler._version_of(words) == compiler._version_of(plain or "")
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    assert compiler._compiler() is None


def test_what_it_writes_may_be_no_library(pretend: Pretend, caplog: pytest.LogCaptureFixture) -> None:
    pretend('for last in "$@"; do :; done; echo junk > "$last"')
    assert library() is None
    assert levels(caplog) == [logging.WARNING]


def test_a_compiler_that_does_not_end_is_not_waited_for(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_SECONDS", 0.5)
    pretend("sleep 20")
    started = time.perf_counter()
    assert library() is None
    assert time.perf_counter() - started < 10
    assert levels(caplog) == [logging.WARNING] and "timed out" in caplog.text


def sampled(seeds: int = 4, **options: object) -> tuple[type | None, list[Completion]]:
    """Answers of a model that is made anew, and what computed them."""
    sampler = LocalSampler(tiny_llama(hidden_size=64), max_sessions=4, max_context=128)
    sessions = [Session(key=f"t/{n}", group="t", order=(0, n, 0)) for n in range(seeds)]

    async def ask() -> list[Completion]:
        params = [SamplingParams(max_tokens=30, seed=n, **options) for n in range(seeds)]  # type: ignore[arg-type]
        asked = [sampler.sample([5, 6, 7, 8], *both) for both in zip(params, sessions, strict=True)]
        async with asyncio.timeout(60):
            return await asyncio.gather(*asked)

    for one in sessions:
        sampler.begin(one)
    try:
        answers = asyncio.run(ask())
    finally:
        sampler.close()
    fast = sampler._engine._fast
    return None if fast is None else type(fast), answers


@needs_compiler
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.9}])
def test_sampling_is_the_same_with_and_without_them(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch, compiled: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled))
    kind, answers = sampled(**options)
    assert kind is NativeDecoder
    monkeypatch.setenv(OFF, "0")
    library.cache_clear()
    kind, others = sampled(**options)
    assert kind is FusedDecoder
    for one, other in zip(answers, others, strict=True):
        assert one.token_ids == other.token_ids and one.stop_reason == other.stop_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_without_a_compiler_log_probs_are_the_model_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    kind, answers = sampled(seeds=2)
    assert kind is FusedDecoder
    for answer in answers:
        row = torch.tensor([[5, 6, 7, 8, *answer.token_ids]])
        logs = tiny_llama(hidden_size=64).eval()(input_ids=row).logits[0, 3:-1].log_softmax(-1)
        want = logs.gather(1, row[0, 4:, None])[:, 0].tolist()
        assert answer.logprobs == pytest.approx(want, abs=1e-4)


# -- where they are kept ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that two processes filled at the same time."""
    folder = tmp_path_factory.mktemp("compiled")
    code = "from envgrad.native.compiler import library; print(library().envgrad_kernels_version())"
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    environment.pop(OFF, None)
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [one.communicate(timeout=120)[0] for one in running] == ["1\n", "1\n"]
    return folder


@needs_compiler
def test_processes_that_compile_at_the_same_time_keep_one_library(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = kept(compiled / "envgrad")
    assert len(names) == 1 and names[0].startswith("kernels-") and names[0].endswith(".so")
    assert (compiled / "envgrad").stat().st_mode & 0o077 == 0, "others cannot put a library of theirs there"
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled))
    before = (compiled / "envgrad" / names[0]).stat().st_mtime_ns
    assert library() is not None
    assert (compiled / "envgrad" / names[0]).stat().st_mtime_ns == before and kept(compiled / "envgrad") == names


@needs_compiler
def test_other_sources_flags_compilers_and_processors_have_libraries_of_their_own(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_anew() -> int:
        library.cache_clear()
        assert library() is not None
        return len(kept(cache))

    assert compile_anew() == 1 and compile_anew() == 1
    (sources / "one.cpp").write_text(TINY + "// changed\n")
    assert compile_anew() == 2
    (sources / "part.h").write_text("// new\n")
    assert compile_anew() == 3
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-DOTHER"))
    assert compile_anew() == 4
    monkeypatch.setattr(compiler, "_processor", lambda: "another one")
    assert compile_anew() == 5
    link = tmp_path / "another-c++"
    link.symlink_to(compiler._compiler() or "")
    monkeypatch.setenv("CXX", str(link))
    assert compile_anew() == 6
    (sources / "README").write_text("is no source")
    assert compile_anew() == 6


@needs_compiler
def test_sources_that_do_not_compile_or_are_others_are_told(
    sources: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (sources / "one.cpp").write_text("int f() { return missing; }\n")
    assert library() is None
    assert levels(caplog) == [logging.WARNING] and "missing" in caplog.text and not kept(cache)
    caplog.clear()
    library.cache_clear()
    (sources / "one.cpp").write_text("int nothing;\n")
    assert library() is None
    assert levels(caplog) == [logging.WARNING] and "envgrad_kernels_version" in caplog.text


@needs_compiler
def test_where_the_cache_cannot_be_written_the_temporary_folder_serves(
    sources: Path, cache: Path, tmp_path: Path
) -> None:
    cache.parent.write_text("a file, where the folder should be")
    assert library() is not None
    found = tmp_path / "temporary" / f"envgrad-{os.getuid()}"
    assert len(kept(found)) == 1 and found.stat().st_mode & 0o077 == 0


@needs_compiler
@pytest.mark.parametrize("given", [None, "relative/folder"])
def test_a_user_without_a_home_has_the_temporary_folder_and_nothing_appears_where_the_run_began(
    given: str | None, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where no home can be found
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert library() is not None
    assert kept(tmp_path / "here") == [] and len(kept(tmp_path / "temporary" / f"envgrad-{os.getuid()}")) == 1


@needs_compiler
def test_another_user_s_folder_is_not_used(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It could hold another's library under the right name."""
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert library() is None
    assert levels(caplog) == [logging.WARNING] and "no folder" in caplog.text
    assert not kept(cache) and not kept(tmp_path / "temporary" / f"envgrad-{me + 1}")


def test_where_no_folder_can_be_written_torch_does_the_work(
    pretend: Pretend, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = pretend("exit 1")
    cache.parent.write_text("")
    (tmp_path / "temporary").rmdir()
    (tmp_path / "temporary").write_text("")
    assert library() is None
    assert levels(caplog) == [logging.WARNING] and "no folder" in caplog.text and not calls.exists()
