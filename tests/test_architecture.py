"""Imports point one way, rooms that must be light are light, and the public names are these."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import envgrad

PACKAGE = Path(envgrad.__file__).parent

FLOW = [
    ["types", "errors"],
    ["environments", "chat"],
    ["sampling.sampler", "sampling.sessions", "sampling.scripted"],
    ["rollout", "advantages"],
    [
        "rewards",
        "evaluation",
        "episodes",
        "agents",
        "sampling.http_retry",
        "sampling.endpoint",
        "sampling.endpoint_chat",
        "sampling.endpoint_http",
    ],
    [
        "cores",
        "native",
        "attention",
        "split_attention",
        "flex_rows",
        "fused_layers",
        "last_layer",
        "layout",
        "batch",
        "packing",
        "probing",
        "row_layers",
        "divergence",
        "linear_head",
        "head",
        "logprobs",
        "losses",
        "sampling",
        "vllm",
    ],
    ["algorithms"],
    ["config"],
    ["training", "distributed", "scaling", "starter", "compat", "viewer"],
    ["cli", "__main__"],
]
"""Rooms from left to right; a room may import its own, and any room to its left."""

LIGHT = ["types", "errors", "environments", "chat", "rollout", "sampling.sampler", "sampling.sessions"]
LIGHT += ["sampling.scripted", "cli"]
LIGHT += [
    "evaluation",
    "episodes",
    "viewer",
    "agents",
    "scaling",
    "sampling.endpoint",
    "sampling.endpoint_chat",
    "sampling.endpoint_http",
]

PUBLIC = {
    *("AsyncGRPOConfig", "AsyncGRPOTrainer"),
    *("Algorithm", "ConfigurationError", "EnvgradError", "Environment", "EnvironmentContractError"),
    *("EnvironmentFailure", "Episode", "EpisodeDone", "GRPO", "GRPOConfig", "GRPOTrainer", "Group", "RolloutTrainer"),
    *("DatasetMixtureConfig", "ModelConfig", "RichProgressCallback", "ScriptArguments", "TrlParser", "get_dataset"),
    *("get_peft_config", "get_quantization_config", "init_zero_verbose"),
    *("check_environment", "custom", "export_episodes", "warm_start"),
    *("RLOO", "RLOOConfig", "RLOOTrainer", "SDPO", "SDPOConfig", "SDPOTrainer"),
    *("StepResult", "StopReason", "Task", "TooManyFailures", "ToolResult", "TrainingSample", "tool"),
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            yield name, path


def room_of(module: str) -> tuple[int, str]:
    found = [(len(room), level, room) for level, rooms in enumerate(FLOW) for room in rooms
             if module == room or module.startswith(room + ".")]  # fmt: skip
    assert found, f"{module} belongs to no room: add it to FLOW and to ARCHITECTURE.md"
    _, level, room = max(found)
    return level, room


def imports(path: Path, name: str):
    """Modules of envgrad that ``path`` imports when it is imported, or later inside functions; not for types only."""
    tree = ast.parse(path.read_text())
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("envgrad."))
        elif isinstance(node, ast.ImportFrom):
            base = ["envgrad", *package][: len(package) + 2 - node.level] if node.level else []
            target = ".".join([*base, node.module] if node.module else base)
            if target == "envgrad" or target.startswith("envgrad."):
                yield target


def test_imports_point_from_right_to_left_only():
    wrong = []
    for name, path in modules():
        level, room = room_of(name)
        for target in imports(path, name):
            if target == "envgrad":
                continue
            to_level, to_room = room_of(target.removeprefix("envgrad."))
            if to_level > level or (to_level == level and to_room != room and level == 1):
                wrong.append(f"{name} -> {target}")
    assert not wrong, wrong


def test_light_rooms_import_neither_torch_nor_transformers():
    light = [name for name, _ in modules() if room_of(name)[1] in LIGHT or name == "cli.main" or name == "starter"]
    light = [name for name in light if not name.startswith("cli.") or name == "cli.main"]
    code = "import sys, importlib\n" + "".join(f"importlib.import_module('envgrad.{name}')\n" for name in light)
    code += (
        "import envgrad\nprint([m for m in ('torch', 'transformers', 'datasets', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exceptions_are_caught_whole_in_one_place_only():
    broad = []
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                names = "" if node.type is None else ast.unparse(node.type)
                if not names or "Exception" in names.split() or "BaseException" in names:
                    broad.append(name)
    assert set(broad) <= {"environments.boundary", "sampling.local"}, broad


def test_files_and_functions_stay_readable():
    long = []
    for name, path in modules():
        text = path.read_text()
        if text.count("\n") > 400:
            long.append(f"{name}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno > 65:
                long.append(f"{name}.{node.name}: {node.end_lineno - node.lineno} lines")
    assert not long, long


def test_public_names():
    assert set(envgrad.__all__) == PUBLIC
    for name in envgrad.__all__:
        assert getattr(envgrad, name).__doc__, name
    assert set(PUBLIC) <= set(dir(envgrad))
    with pytest.raises(AttributeError, match="nope"):
        envgrad.nope  # noqa: B018
