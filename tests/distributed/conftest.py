from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote("helpers.rank_scenarios")
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def rounds(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten rounds of recorded rollouts, in a file."""
    folder = tmp_path_factory.mktemp("record")
    code, scenario = zygote.run("record", folder)
    assert code == 0, scenario.stderr
    return str(folder / "rounds.pickle")
