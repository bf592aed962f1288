"""A model's linear layers as plain weights, adapters included."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear layer, alone or under LoRA adapters, whose product with what they add to its weight is its output.

    Example:
        >>> found = Projection.of(nn.Linear(3, 2))
        >>> found.weight().shape, Projection.of(nn.GELU()) is None
        (torch.Size([2, 3]), True)
    """

    base: nn.Linear
    lora: Any = None
    """the adapted layer, of a class that peft does not type"""

    @classmethod
    def of(cls, module: nn.Module) -> Projection | None:
        """None for any other module: a subclass of ``nn.Linear`` computes something else, and so do DoRA and other
        variants of LoRA."""
        if type(module) is nn.Linear:
            return cls(base=module)
        layers: Any = sys.modules.get("peft.tuners.lora.layer")
        if layers is None or type(module) is not layers.Linear:
            return None
        lora: Any = module
        base = lora.base_layer
        adapters = [one.weight for part in (lora.lora_A, lora.lora_B) for one in part.values()]
        plain = not lora.lora_variant and not any(lora.lora_bias.values()) and not lora.fan_in_fan_out
        if (
            type(base) is not nn.Linear
            or not plain
            or sum(1 for _ in lora.parameters()) != len(adapters) + sum(1 for _ in base.parameters())
        ):
            return None
        return cls(base=base, lora=lora)

    @property
    def bias(self) -> Tensor | None:
        return None if self.base.bias is None else self.base.bias.detach()

    def weight(self) -> Tensor:
        """``(out, in)``, as it is now."""
        weight = self.base.weight.detach()
        for name in self.added:
            weight = weight + self.lora.get_delta_weight(name).detach().to(weight.dtype)
        return weight

    @property
    def undone(self) -> bool:
        """Adapters that are merged into the weight are switched off: the layer would take them out again."""
        return self.lora is not None and bool(self.lora.disable_adapters and self.lora.merged_adapters)

    @property
    def added(self) -> tuple[str, ...]:
        """Adapters that act and are not merged into the weight."""
        if self.lora is None or self.lora.disable_adapters:
            return ()
        known, merged = self.lora.lora_A.keys(), self.lora.merged_adapters
        return tuple(name for name in self.lora.active_adapters if name in known and name not in merged)
