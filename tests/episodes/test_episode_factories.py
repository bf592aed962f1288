"""How an environment is made can be told and done again; what cannot be told is said."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from envgrad.environments.plain_start import NotPlain, restore_state, state_text
from envgrad.episodes.factories import describe_factory, load_factory
from envgrad.errors import ConfigurationError
from envgrad.starter.compass import Compass


class Door:
    def __init__(self, keys: int = 1, names: list[str] | None = None) -> None:
        self.keys, self.names = keys, names

    @classmethod
    def locked(cls) -> Door:
        return cls(7)


@dataclass(frozen=True)
class Doors:
    keys: int
    names: tuple[str, ...] = ()

    def __call__(self) -> Door:
        return Door(self.keys)


class Maker:
    """Keeps what it was made with under the names of its parameters."""

    def __init__(self, keys: int, **more: Any) -> None:
        self.keys, self.more = keys, more

    def __call__(self) -> Door:
        return Door(self.keys + len(self.more))


class Secretive:
    def __init__(self, keys: int) -> None:
        self._keys = keys

    def __call__(self) -> Door:
        return Door(self._keys)


def again(factory: object) -> Any:
    described = describe_factory(factory)
    return load_factory(json.loads(json.dumps(described)))


def test_what_has_a_name_or_plain_arguments_is_made_again() -> None:
    assert again(Compass) is Compass and again(Door) is Door
    assert again(Door.locked)().keys == 7
    assert again(functools.partial(Door, 3, names=["a"]))().names == ["a"]
    assert again(Doors(4))().keys == 4
    assert again(Maker(2, extra=1, other=2))().keys == 4
    assert describe_factory(None) is None


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda: Door(), "<lambda> has no name"),
        (functools.partial(lambda: Door()), "no name that can be imported"),
        (functools.partial(Door, Path("x")), "arguments that JSON does not hold"),
        (Doors(1, ("a",)), "arguments that JSON does not hold"),  # a tuple would come back as a list
        (Secretive(3), "whose arguments are not known"),
    ],
)
def test_what_cannot_be_told_is_said(factory: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        again(factory)


def test_a_script_of_the_user_is_found_by_its_file(tmp_path: Path) -> None:
    script = "class Mine:\n    pass\n\nif __name__ == '__main__':\n    raise SystemExit(3)\n"
    (tmp_path / "my_doors.py").write_text(script)
    found = load_factory({"path": f"{tmp_path / 'my_doors.py'}:Mine"})
    assert found.__name__ == "Mine"
    for path, said in ((f"{tmp_path / 'gone.py'}:Mine", "cannot be imported"), ("json:Nobody", "not there any more")):
        with pytest.raises(ConfigurationError, match=said):
            load_factory({"path": path})


class Plain:
    def __init__(self) -> None:
        import random

        self.random = random.Random(3)
        self.shared = [1, (2, "x"), {3}, frozenset({4}), b"five"]
        self.table = {1: self.shared, (2, 3): None, "door": Door(2, ["a"])}
        self.number = float("inf")


def test_plain_state_comes_back_as_it_was() -> None:
    one, other = Plain(), Plain()
    one.random.random()
    text = state_text(one)
    assert text is not None
    restore_state(other, text)
    assert other.shared == one.shared and other.table[1] is other.shared and other.table[(2, 3)] is None
    assert type(other.table["door"]) is Door and other.table["door"].names == ["a"]  # type: ignore[attr-defined]
    assert other.number == one.number and other.random.random() == one.random.random()


def test_arrays_and_generators_of_numpy_come_back() -> None:
    numpy = pytest.importorskip("numpy")
    one, other = Door(), Door()
    for name in ("PCG64", "MT19937"):
        one.keys = numpy.random.Generator(getattr(numpy.random, name)(5))
        one.names = [numpy.arange(6).reshape(2, 3), numpy.float32(1.5)]
        text = state_text(one)
        assert text is not None
        restore_state(other, text)
        assert other.keys.random() == one.keys.random()  # type: ignore[attr-defined]
        assert (other.names[0] == one.names[0]).all() and other.names[1] == one.names[1]  # type: ignore[attr-defined,index]


def test_what_is_not_plain_has_no_text_and_a_broken_text_is_refused() -> None:
    class Local:
        pass

    loop: list[object] = []
    loop.append(loop)
    for value in (open, loop, Local(), [0] * 30_000, Path("x"), lambda: None):
        door = Door()
        door.names = value  # type: ignore[assignment]
        assert state_text(door) is None, value
    for text in ('{"a": ["nope", 1]}', "[]", '{"a": ["object", "os", "system", {}]}', "{"):
        with pytest.raises((NotPlain, AttributeError)):
            restore_state(Door(), text)
