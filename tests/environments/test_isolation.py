from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest

from envgrad.environments.contract import inspect_environment
from envgrad.environments.isolation import (
    Isolation,
    Stream,
    current_stream,
    detect_global_draws,
    loaded_generators,
    use,
)
from envgrad.errors import ConfigurationError


def python_draw() -> float:
    return random.random()


def numpy_draw() -> float:
    return float(np.random.rand())


def states() -> tuple[object, ...]:
    return random.getstate(), str(np.random.get_state())


class TestDetection:
    @pytest.mark.parametrize(
        ("call", "names"),
        [
            (python_draw, {"random"}),
            (lambda: random.seed(3), {"random"}),
            (numpy_draw, {"numpy"}),
            (lambda: np.random.standard_normal(), {"numpy"}),
            (lambda: np.random.seed(1), {"numpy"}),
            (lambda: (random.shuffle([1, 2]), np.random.randint(3)), {"random", "numpy"}),
            (lambda: random.Random(1).random() + np.random.default_rng(1).random(), set()),
            (lambda: random.SystemRandom().random(), set()),
            (lambda: random.setstate(random.getstate()), set()),
        ],
    )
    def test_names_the_generators(self, call, names):
        assert detect_global_draws(call) == names

    def test_leaves_them_as_they_were_even_where_the_call_raises(self):
        before = states()
        detect_global_draws(lambda: (python_draw(), numpy_draw()))

        def fails():
            python_draw()
            raise OSError("broken")

        with pytest.raises(OSError, match="broken"):
            detect_global_draws(fails)
        assert states() == before

    def test_sees_torch_only_where_it_is_loaded_and_loads_nothing(self):
        code = (
            "import sys, random\n"
            "from envgrad.environments.isolation import detect_global_draws, loaded_generators\n"
            "assert loaded_generators() == {'random'} and detect_global_draws(random.random) == {'random'}\n"
            "assert 'numpy' not in sys.modules and 'torch' not in sys.modules\n"
            "import torch\n"
            "before = torch.get_rng_state()\n"
            "assert detect_global_draws(lambda: torch.rand(1)) == {'torch'}\n"
            "assert detect_global_draws(lambda: torch.rand(1, generator=torch.Generator())) == set()\n"
            "assert torch.equal(before, torch.get_rng_state())\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_numpy_counts_as_loaded_before_its_first_draw(self):
        assert {"random", "numpy"} <= loaded_generators()


class TestStream:
    def test_equal_seeds_give_equal_numbers_and_interleaving_changes_nothing(self):
        def draws(stream, count):
            return [stream.run(lambda: (python_draw(), numpy_draw())) for _ in range(count)]

        alone = draws(Stream(5), 4)
        first, other = Stream(5), Stream(6)
        interleaved = [draws(stream, 1)[0] for stream in (first, other) * 4]
        assert interleaved[::2] == alone and interleaved[1::2] == draws(Stream(6), 4)
        assert alone != draws(Stream(6), 4)

    def test_python_and_numpy_do_not_give_the_same_numbers(self):
        first, other = Stream(2**62 + 5).run(lambda: (python_draw(), numpy_draw()))
        assert first != other

    def test_the_process_keeps_its_state_also_behind_an_exception(self):
        stream = Stream(5)
        np.random.standard_normal()  # leaves a second number cached
        before = states()
        with pytest.raises(ZeroDivisionError):
            stream.run(lambda: python_draw() / 0)
        stream.run(numpy_draw)
        assert states() == before
        assert stream.run(python_draw) == Stream(5).run(lambda: (python_draw(), python_draw()))[1]

    def test_names_limit_what_is_swapped(self):
        np.random.seed(0)
        stream = Stream(5, frozenset({"random"}))
        assert stream.run(numpy_draw) == pytest.approx(0.5488135)  # the process's own
        assert stream.drawn() == frozenset()

    def test_drawn_tells_what_changed(self):
        stream = Stream(5)
        stream.run(lambda: None)
        assert stream.drawn() == frozenset()
        stream.run(numpy_draw)
        assert stream.drawn() == {"numpy"}

    def test_a_copy_goes_on_alike_and_apart(self):
        stream = Stream(5)
        stream.run(python_draw)
        copied = stream.copy()
        assert stream.difference(copied) is None
        following = stream.run(python_draw)
        assert stream.difference(copied) == "random"
        assert copied.run(python_draw) == following and stream.difference(copied) is None

    def test_a_stream_that_never_ran_is_compared_by_its_seed(self):
        ran = Stream(5)
        ran.run(lambda: None)
        assert ran.difference(Stream(5)) is None
        assert ran.difference(Stream(6)) is not None


def test_use_nests_and_ends():
    first, other = Stream(1), Stream(2)
    with use(first):
        with use(other):
            assert current_stream() is other
        with use(None):
            assert current_stream() is None
        assert current_stream() is first
    assert current_stream() is None


class TestIsolation:
    def test_auto_waits_for_the_first_start(self, caplog):
        isolation = Isolation()
        assert not isolation.settled and isolation.stream(1) is None
        isolation.settle(frozenset(), "quiet")
        assert isolation.settled and isolation.stream(1) is None and not caplog.records
        isolation = Isolation()
        isolation.settle(frozenset({"numpy"}), "dice")
        assert isolation.names == {"random", "numpy"} and isolation.stream(1) is not None
        assert "dice draws from the process-global random generators (numpy)" in caplog.text

    def test_always_and_off(self):
        always, off = Isolation("always"), Isolation("off")
        assert always.stream(1) is not None and not always.settled
        always.settle(frozenset({"torch"}), "e")
        assert always.names == {"random", "numpy", "torch"}
        assert off.settled and off.stream(1) is None

    def test_another_mode_is_an_error(self):
        with pytest.raises(ConfigurationError, match="isolate_generators='yes' must be one of auto, always, off"):
            Isolation("yes")


def test_construction_tells_whether_the_factory_draws_and_leaves_the_process_alone():
    class Born:
        def __init__(self):
            self.secret = random.random()

        def reset(self):
            return "Go."

    class Quiet(Born):
        def __init__(self):
            self.secret = random.Random().random()

    before = states()
    assert inspect_environment("born", Born)[0].factory_draws == {"random"}
    assert inspect_environment("quiet", Quiet)[0].factory_draws == frozenset()
    assert states() == before
