from __future__ import annotations

import pytest

from envgrad.errors import ConfigurationError
from envgrad.evaluation.cost import Cost, Prices


def test_a_side_without_a_price_is_free() -> None:
    cost = Cost(tokens_in=2_000_000, tokens_out=500_000, seconds=1.0, prices=Prices(per_million_out=4.0))
    assert cost.price == 2.0
    assert cost.as_dict()["price"] == 2.0
    assert Cost(tokens_in=1, tokens_out=1, seconds=1.0).price is None


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(ConfigurationError, match="price-in"):
        Prices(per_million_in=price)
