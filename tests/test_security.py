"""Nothing that is read is run: no eval, no pickle of others, no shell, safe YAML; servers of ours listen at home."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import envgrad
from envgrad.compat.parser import TrlParser
from envgrad.config import GRPOConfig
from envgrad.errors import ConfigurationError

PACKAGE = Path(envgrad.__file__).parent

EXCEPTIONS = {
    # A process of this Python that was started from here gets the user's own factory, and what reset is given, over a
    # socket pair that nobody else holds. What it answers is JSON.
    ("environments/executors/hosts.py", "pickle"): "writes the user's factory for its own child process",
    ("environments/remote/wire.py", "pickle"): "the child reads what its own parent sent over their socket pair",
    ("environments/remote/server.py", "pickle"): "the same, for the factory",
    # Processes of one run give each other what they have played, over the process group that their launcher made.
    ("distributed/wire.py", "pickle"): "a rank reads what the other ranks of its own run wrote",
    # check_environment looks whether an instance of the user's could be pickled, and reads back its own bytes.
    ("environments/check/forks.py", "pickle"): "a round trip within one function",
}
"""(file, module or call) -> why it is safe"""


def found_in(tree: ast.AST) -> Iterator[str]:
    """What could run what it reads, or hand it to a shell."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            roots = {name.split(".")[0] for name in names}
            yield from roots & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if called in ("eval", "exec", "compile", "os.system", "os.popen", "__import__"):
            yield called
        if called.endswith("yaml.load") or called in ("yaml.full_load", "yaml.unsafe_load"):
            yield called
        if called == "torch.load" and ast.unparse(given.get("weights_only", ast.Constant(None))) != "True":
            yield "torch.load without weights_only=True"
        if called.endswith("numpy.load") or called == "np.load":
            yield called
        if "shell" in given and ast.unparse(given["shell"]) != "False":
            yield "shell"


def test_nothing_that_is_read_is_run():
    found = {
        (str(path.relative_to(PACKAGE)), what)
        for path in sorted(PACKAGE.rglob("*.py"))
        for what in found_in(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found - set(EXCEPTIONS) == set(), "give the reason in EXCEPTIONS, or write it otherwise"
    assert set(EXCEPTIONS) - found == set(), "no longer there"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("eval(text)", "eval"), ("import pickle", "pickle"), ("from pickle import loads", "pickle"),
        ("yaml.load(text)", "yaml.load"), ("torch.load(path)", "torch.load without weights_only=True"),
        ("torch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("subprocess.run(line, shell=True)", "shell"), ("os.system(line)", "os.system"),
    ],
)  # fmt: skip
def test_each_of_them_would_be_found(code, what):
    assert list(found_in(ast.parse(code))) == [what]
    assert not list(found_in(ast.parse("torch.load(p, weights_only=True); yaml.safe_load(t); re.compile(p)")))


EVIL = "output_dir: !!python/object/apply:os.mkdir ['{path}']\n"


def test_yaml_of_configurations_is_data(tmp_path):
    from envgrad.cli.train import _read_file

    made, config = tmp_path / "made", tmp_path / "train.yaml"
    config.write_text(EVIL.format(path=made))
    for read in (lambda: _read_file(config), lambda: TrlParser(GRPOConfig).parse_args_and_config(
        ["--config", str(config)])):  # fmt: skip
        with pytest.raises((ConfigurationError, yaml.YAMLError, ValueError, SystemExit)):
            read()
        assert not made.exists()


def test_the_trainers_files_are_read_as_weights_only(tmp_path):
    """transformers' own reading of optimizer, schedule, scaler and generators."""
    import transformers.trainer

    tree = ast.parse(Path(transformers.trainer.__file__).read_text())
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    assert len(loads) >= 8
    for node in loads:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert given.get("weights_only") == "True", ast.unparse(node)


SERVERS = {
    "agents/server.py": "what agents ask: loopback, and a token of each episode",
    "sampling/vllm_group.py": "where vLLM's workers meet the trainer: at the address that the servers reach it by",
    "viewer/serve.py": "the episode viewer: loopback by default, and a token",
}
"""every file that opens a listening socket"""


def test_every_server_is_known():
    listening = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parts[-2] == "vllm":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called.split(".")[-1] in (
                    "create_server",
                    "start_server",
                    "start_unix_server",
                    "HTTPServer",
                    "listen",
                    "TCPStore",
                ):
                    if called.endswith("address.listen"):
                        continue
                    listening.add(str(path.relative_to(PACKAGE)))
    assert listening == set(SERVERS), "say in SERVERS where it listens and who may ask"


def test_servers_listen_on_this_machine_only_unless_told_otherwise():
    pytest.importorskip("uvicorn")
    from envgrad.agents.host import LoopbackHost
    from envgrad.viewer.serve import ViewAddress

    assert ViewAddress().local and len(ViewAddress().secret()) >= 16
    assert inspect.signature(LoopbackHost).parameters["address"].default == "127.0.0.1"
