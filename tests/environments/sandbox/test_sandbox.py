"""Model-written programs run, within limits; what they try beyond comes to nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from envgrad.environments.sandbox import Sandbox, SandboxLimits, SandboxUnavailable, unavailable
from envgrad.environments.sandbox import command as command_module
from envgrad.errors import ConfigurationError, EnvironmentFailure

needs_sandbox = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox here: {unavailable()}")


@pytest.fixture
def sandbox():
    made = Sandbox(SandboxLimits(seconds=10, processes=32, memory_mb=256, disk_mb=8, output_bytes=10_000))
    yield made
    made.close()


@needs_sandbox
def test_programs_run_and_the_workspace_stays(sandbox):
    sandbox.write("data/numbers.txt", "1 2 3")
    code = "print(sum(map(int, open('data/numbers.txt').read().split()))); open('out', 'w').write('x')"
    done = sandbox.run_python(code)
    assert (done.stdout, done.exit_code, done.ok) == ("6\n", 0, True)
    assert sandbox.read("out") == "x" and sandbox.read("/workspace/out") == "x"
    failed = sandbox.run_shell("cat out; echo no >&2; exit 3")
    assert (failed.stdout, failed.stderr, failed.exit_code, failed.killed) == ("x", "no\n", 3, None)
    assert sandbox.run(["cat"], stdin="hello").stdout == "hello"
    assert asyncio.run(sandbox.arun(["echo", "a b"])).stdout == "a b\n"


@needs_sandbox
def test_limits_are_named(sandbox):
    assert sandbox.run_shell("sleep 60", seconds=0.3).killed == "seconds"
    assert sandbox.run_python("while True: pass", seconds=0.3).killed == "seconds"
    loud = sandbox.run_shell("yes | head -c 1000000")
    assert loud.truncated and len(loud.stdout) == 10_000 and "[output cut]" in loud.text()
    assert "MemoryError" in sandbox.run_python("bytearray(10**9)").stderr
    busy = Sandbox(SandboxLimits(seconds=60, cpu_seconds=1))
    done = busy.run_python("while True: pass")  # SIGXCPU, or SIGKILL
    assert done.exit_code in (128 + 24, 128 + 9) and done.killed is None
    busy.close()
    many = Sandbox(SandboxLimits(files=50))
    assert many.run_python("for i in range(200): open(f'f{i}', 'w')").killed == "disk_mb"
    many.close()


@needs_sandbox
def test_a_fork_has_its_own_copy(sandbox):
    sandbox.run_shell("echo one > f; ln -s f link; mkfifo pipe")
    other = sandbox.fork()
    other.run_shell("echo two > f")
    assert (sandbox.read("f"), other.read("f"), other.read("link")) == ("one\n", "two\n", "two\n")
    other.close()


@needs_sandbox
def test_read_only_folders_and_variables():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        read_a_folder(Path(name))


def read_a_folder(folder: Path) -> None:
    (folder / "d.txt").write_text("given")
    box = Sandbox(read_only={"/data": folder}, variables={"NAME": "value"})
    assert box.run_shell("cat /data/d.txt; echo $NAME; echo x > /data/d.txt || echo refused").stdout == (
        "givenvalue\nrefused\n"
    )
    box.close()
    with pytest.raises(ConfigurationError, match="must be absolute"):
        Sandbox(read_only={"data": folder})
    with pytest.raises(ConfigurationError, match=r"seconds=0"):
        SandboxLimits(seconds=0)


@needs_sandbox
def test_closing_removes_the_workspace_whatever_was_left_in_it():
    box = Sandbox()
    before = os.stat(tempfile.gettempdir()).st_mode & 0o777
    box.run_shell("mkdir -p a/b; echo x > a/b/c; chmod 000 a/b; chmod 000 a; ln -s / root; chmod 000 .")
    box.close()
    box.close()
    assert not box.workspace.parent.exists()
    assert os.stat(tempfile.gettempdir()).st_mode & 0o777 == before
    with pytest.raises(EnvironmentFailure, match="closed"):
        box.run_shell("true")


@needs_sandbox
def test_runs_end_with_the_process_that_started_them():
    mark = f"4242{os.getpid()}"
    script = (
        "import os, threading, time\n"
        "from envgrad.environments.sandbox import Sandbox, SandboxLimits\n"
        "box = Sandbox(SandboxLimits(seconds=100))\n"
        f"threading.Thread(target=box.run_shell, args=('sleep {mark} & sleep {mark}',), daemon=True).start()\n"
        "time.sleep(1.5)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60)
    assert_none_runs(mark)


def assert_none_runs(mark):
    """No process has ``mark`` in its command; one that was killed may take a moment to end."""
    end = time.monotonic() + 20
    while [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in read_quietly(path)]:
        assert time.monotonic() < end
        time.sleep(0.02)


def read_quietly(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_without_bubblewrap_it_refuses(monkeypatch):
    monkeypatch.setattr(command_module.shutil, "which", lambda tool: None)
    command_module.unavailable.cache_clear()
    try:
        with pytest.raises(SandboxUnavailable, match="nothing is run without one: bwrap is not installed"):
            Sandbox()
    finally:
        monkeypatch.undo()
        command_module.unavailable.cache_clear()


def test_a_machine_that_forbids_namespaces_is_named(monkeypatch):
    def fails(*args, **kwargs):
        return subprocess.CompletedProcess(args, 1, "", "bwrap: setting up uid map: Permission denied\n")

    monkeypatch.setattr(command_module.shutil, "which", lambda tool: "/usr/bin/" + tool)
    monkeypatch.setattr(command_module.subprocess, "run", fails)
    command_module.unavailable.cache_clear()
    try:
        assert "does not let it make user namespaces" in str(command_module.unavailable())
    finally:
        monkeypatch.undo()
        command_module.unavailable.cache_clear()


# -- attempts to get out: each prints ESCAPED if it worked

LIBC = "import ctypes; l = ctypes.CDLL(None)\n"

PYTHON_ATTEMPTS = {
    "reads the password file": "print('ESCAPED' if 'root' in open('/etc/passwd').read() else '')",
    "reads another user's home": "import os; print('ESCAPED', os.listdir('/root'))",
    "reads the machine's temporary files": "import os; print('ESCAPED' if 'host-secret' in os.listdir('/tmp') else '')",
    "follows a link out of the workspace": (
        "import os; os.symlink(HIDDEN, 'link'); print('ESCAPED', open('link').read())"
    ),
    "goes up from the workspace": "print('ESCAPED', open('../../..' + HIDDEN).read())",
    "writes to the system": "open('/usr/bin/escaped', 'w'); print('ESCAPED')",
    "replaces a program": "import os; os.rename('/usr/bin/env', '/usr/bin/env2'); print('ESCAPED')",
    "opens a network connection": "import socket; socket.create_connection(('127.0.0.1', PORT), 2); print('ESCAPED')",
    "reaches an abstract socket": (
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0envgrad-test-PORT'); print('ESCAPED')"
    ),
    "sees other processes": "import os; print('ESCAPED' if os.path.exists(f'/proc/PARENT/environ') else '')",
    "signals the parent": "import os; os.kill(PARENT, 0); print('ESCAPED')",
    "signals everybody": "import os, signal\nsignal.signal(15, 1)\nos.kill(-1, 15)\nprint('')",
    "reads our environment variables": "import os; print('ESCAPED' if 'SANDBOX_SECRET' in os.environ else '')",
    "reads them from the first process": (
        "print('ESCAPED' if b'SANDBOX_SECRET' in open('/proc/1/environ', 'rb').read() else '')"
    ),
    "becomes root": "import os; os.setuid(0); print('ESCAPED')",
    "mounts a file system": (LIBC + "print('ESCAPED' if l.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 else '')"),
    "makes a namespace of its own": (LIBC + "print('ESCAPED' if l.unshare(0x10000000) == 0 else '')"),
    "traces a process": LIBC + "print('ESCAPED' if l.ptrace(0, 0, 0, 0) == 0 else '')",
    "reads the kernel's keys": LIBC + "print('ESCAPED' if l.syscall(250, 0, -3) >= 0 else '')",
    "makes a device": "import os; os.mknod('dev', 0o600 | 0o20000, os.makedev(1, 1)); print('ESCAPED')",
    "opens a disk": "open('/dev/vda', 'rb'); print('ESCAPED')",
    "changes a kernel setting": "open('/proc/sys/kernel/hostname', 'w').write('escaped'); print('ESCAPED')",
    "raises its limits": ("import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,) * 2); print('ESCAPED')"),
    "keeps a file of ours open": (
        "import os\nfor n in range(3, 256):\n"
        "    try: print('ESCAPED' if 'secret' in os.readlink(f'/proc/self/fd/{n}') else '')\n"
        "    except OSError: pass"
    ),
    "types into the terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); print('ESCAPED')",
}


@needs_sandbox
@pytest.mark.parametrize("name", PYTHON_ATTEMPTS)
def test_attempt(name, sandbox, tmp_path, monkeypatch):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    monkeypatch.setenv("SANDBOX_SECRET", "x")
    host = Path("/tmp/host-secret")
    host.write_text("x")
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0envgrad-test-{port}")
    abstract.listen()
    code = PYTHON_ATTEMPTS[name].replace("HIDDEN", repr(str(secret)))
    code = code.replace("PORT", str(port)).replace("PARENT", str(os.getpid()))
    try:
        with secret.open():
            done = sandbox.run_python(code)
    finally:
        server.close()
        abstract.close()
        host.unlink()
    assert "ESCAPED" not in done.stdout, done
    assert not Path("/usr/bin/escaped").exists() and Path("/usr/bin/env").exists()


BOMBS = {
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "forks a memory bomb": (
        "import os\nfor _ in range(16):\n    if not os.fork():\n        held = []\n"
        "        while True: held.append(bytearray(b'x' * 2**20))\nimport time\ntime.sleep(60)"
    ),
    "fills the workspace": "n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(b'x' * 2**20); n += 1",
    "writes without end": "while True: print('x' * 10000)",
    "ignores every signal": "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except OSError: pass\nwhile True: pass",
}


def sandbox_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("envgrad-sandbox")}


@needs_sandbox
@pytest.mark.parametrize("name", BOMBS)
def test_bomb(name):
    box = Sandbox(SandboxLimits(seconds=3, processes=24, memory_mb=256, disk_mb=16, output_bytes=10_000))
    before, began = set(threading.enumerate()), time.monotonic()
    done = box.run_python(BOMBS[name])
    assert time.monotonic() - began < 20
    assert done.killed in ("seconds", "memory_mb", "disk_mb") or done.exit_code != 0, done
    assert box.run_shell("echo alive", seconds=5).stdout == "alive\n" or name == "fills the workspace"
    used = sum(path.lstat().st_size for path in box.workspace.rglob("*"))
    assert used < 2**30  # looked at from outside: what is written between two looks comes on top of the limit
    box.close()
    end = time.monotonic() + 20
    while (left := sandbox_threads() - before) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


@needs_sandbox
def test_what_a_program_leaves_running_ends_with_it(sandbox):
    mark = f"5151{os.getpid()}"
    done = sandbox.run_shell(f"(setsid nohup sleep {mark} >/dev/null 2>&1 &) ; echo started")
    assert done.stdout == "started\n"
    assert_none_runs(mark)


@needs_sandbox
def test_links_in_the_workspace_do_not_lead_our_own_reads_out(sandbox, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    sandbox.run_python(f"import os; os.symlink({str(secret)!r}, 'a'); os.symlink({str(tmp_path)!r}, 'd')")
    for path in ("a", "d/secret.txt", "../../etc/passwd", "/workspace/../x"):
        with pytest.raises(EnvironmentFailure, match="outside of the workspace"):
            sandbox.read(path)
    with pytest.raises(EnvironmentFailure, match="outside of the workspace"):
        sandbox.write("d/new.txt", "x")
    assert not (tmp_path / "new.txt").exists()


# -- a workspace that is the whole file system


@pytest.fixture
def whole():
    made = Sandbox(SandboxLimits(processes=32, disk_mb=8), whole=True)
    yield made
    made.close()


@needs_sandbox
def test_a_whole_file_system_of_its_own(whole):
    assert (
        whole.run_shell("id -un; pwd; mkdir -p /srv/app; echo one > /srv/app/f; echo t > /tmp/t").stdout == "root\n/\n"
    )
    assert whole.run_shell("cat /srv/app/f /tmp/t").stdout == "one\nt\n"
    assert whole.read("/srv/app/f") == "one\n"
    whole.write("/etc/motd", "hello")
    assert whole.run_shell("cat /etc/motd; ls /home /var 2>&1 | wc -l; touch /usr/x").stdout == "hello2\n"
    assert "Read-only" in whole.run_shell("touch /usr/x").stderr
    packed = whole.run_shell("tar cf - /srv 2>/dev/null | tar xf - -C /tmp && cat /tmp/srv/app/f")
    assert packed.stdout == "one\n", packed


@needs_sandbox
@pytest.mark.parametrize("trick", ["rm /lib; mkdir /lib", "rm /bin; ln -s /tmp /bin", "mv /etc /gone; ln -s / /etc",
                                   "mv /etc /e; mkfifo /etc", "rmdir /root; ln -s SECRET /root"])  # fmt: skip
def test_a_whole_file_system_is_mended_before_each_run(whole, trick, tmp_path):
    before = sorted(os.listdir("/etc")), sorted(os.listdir("/"))
    program = f"import subprocess; subprocess.run({trick.replace('SECRET', str(tmp_path))!r}, shell=True)"
    whole.run_python(program)
    assert whole.run_shell("echo alive; cat /etc/passwd | head -1").stdout == "alive\nroot:x:0:0:root:/root:/bin/sh\n"
    assert (sorted(os.listdir("/etc")), sorted(os.listdir("/"))) == before and os.listdir(tmp_path) == []


@needs_sandbox
@pytest.mark.parametrize("name", PYTHON_ATTEMPTS)
def test_attempt_from_a_whole_file_system(name, whole, tmp_path, monkeypatch):
    if name in ("becomes root", "writes to the system", "reads the password file", "reads another user's home"):
        pytest.skip("it looks like root there, with a password file and a home of its own")
    test_attempt(name, whole, tmp_path, monkeypatch)


@needs_sandbox
def test_files_go_in_and_out_past_links_and_pipes(whole, tmp_path):
    given = tmp_path / "given"
    (given / "sub").mkdir(parents=True)
    (given / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (given / "run.sh").chmod(0o755)
    (given / "sub" / "f").write_text("deep")
    whole.run_shell("mkdir -p /a /real; mkfifo /a/sub; mkdir /a/run.sh; ln -s /real /link; ln -s SECRET /real/out")
    whole.put(given, "/a")
    assert whole.run_shell("/a/run.sh; cat /a/sub/f").stdout == "ran\ndeep"
    whole.put(given / "sub" / "f", "/link/f")  # a link is read as a program there reads it
    assert whole.read("/real/f") == "deep"
    secret = tmp_path / "secret"
    secret.write_text("s")
    whole.run_shell(f"cd /real; ln -s {secret} s; mkfifo p; ln -s loop loop")
    whole.get("/real", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["f"]
    for path in ("/real/s", "/nothing"):
        with pytest.raises(FileNotFoundError):
            whole.get(path, tmp_path / "x")
    with pytest.raises(EnvironmentFailure, match="too many links"):
        whole.read("/real/loop")
    with pytest.raises(EnvironmentFailure, match="through a file"):
        whole.put(secret, "/real/f/below")
    assert whole.read("../../../etc/hosts").startswith("127.0.0.1") and secret.read_text() == "s"


@needs_sandbox
def test_writing_over_a_pipe_or_a_link_writes_a_file(sandbox):
    sandbox.run_shell("mkfifo p; ln -s other l; touch ro; chmod 000 ro")
    for name in ("p", "l", "ro"):
        sandbox.write(name, "x")
        assert sandbox.run(["cat", name]).stdout == "x"


@needs_sandbox
def test_closing_or_cancelling_ends_the_run_in_hand():
    box = Sandbox(SandboxLimits(seconds=60))
    began = time.monotonic()
    thread = threading.Thread(target=box.run_shell, args=("sleep 60",))
    thread.start()
    time.sleep(0.3)
    box.close()
    thread.join(10)
    assert not thread.is_alive() and not box.workspace.exists() and time.monotonic() - began < 15

    box = Sandbox(SandboxLimits(seconds=60))

    async def cancelled():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.arun(["sleep", "60"]), 0.3)
        return (await box.arun(["echo", "free"])).stdout

    assert asyncio.run(cancelled()) == "free\n" and time.monotonic() - began < 30
    box.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, "AppArmor forbids them"),
        ({"kernel/unprivileged_userns_clone": "0"}, "sysctl kernel.unprivileged_userns_clone=1"),
        ({"user/max_user_namespaces": "0"}, "sysctl user.max_user_namespaces"),
        ({}, "in a container"),
    ],
)
def test_who_forbids_namespaces_is_named(monkeypatch, settings, words):
    monkeypatch.setattr(command_module, "_setting", settings.get)
    assert words in command_module._refusal("bwrap: setting up uid map: Permission denied")
    assert command_module._refusal("bwrap: unknown option --x") == "bwrap fails: bwrap: unknown option --x"
