"""A training step as two programs, called as one.

The gradient of a batch, and what becomes of the state, are compiled one after the other. XLA for
CPU holds about a megabyte for every kernel until all of a program's are compiled, and the update of
the state is many small ones, some for every shape of a parameter: apart from the gradient's they
are compiled in memory that is free again. Nothing is lost by it: all gradients must be there before
any is clipped by their norm.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hsvit_jax import host


@dataclasses.dataclass(frozen=True)
class Halves:
    """gradients: (state, *batch) → what they say; update: (state, that) → (state, metrics).

    Both jitted, or both compiled. Called as (state, *batch) → (state, metrics).
    """

    gradients: Any
    update: Any

    def __call__(self, state: dict, *batch: Any) -> tuple[dict, dict]:
        return self.update(state, self.gradients(state, *batch))

    def lower(self, state: dict, *batch: Any) -> "Lowered":
        """For these arguments, or arrays of their shapes; of jitted halves."""
        return Lowered(
            self.gradients.lower(state, *batch), lambda found: self.update.lower(state, found)
        )

    def as_text(self) -> tuple[str, str]:
        """The optimised modules of the compiled halves."""
        return self.gradients.as_text(), self.update.as_text()

    def cost_analysis(self) -> dict[str, float]:
        """What XLA counts in both compiled halves together."""
        costs = [half.cost_analysis() for half in (self.gradients, self.update)]
        return {key: sum(cost.get(key, 0.0) for cost in costs) for key in costs[0]}

    def memory_analysis(self) -> SimpleNamespace:
        """Bytes of the compiled halves as of one program, per device.

        What the first hands to the second is working memory of both; both take the state.
        """
        first, second = self.gradients.memory_analysis(), self.update.memory_analysis()
        working = max(first.temp_size_in_bytes, second.temp_size_in_bytes)
        return SimpleNamespace(
            argument_size_in_bytes=first.argument_size_in_bytes,
            output_size_in_bytes=second.output_size_in_bytes,
            alias_size_in_bytes=second.alias_size_in_bytes,
            temp_size_in_bytes=first.output_size_in_bytes + working,
        )


@dataclasses.dataclass(frozen=True)
class Lowered:
    """Halves that are yet to be compiled: the first, and the second for what the first gives."""

    gradients: Any
    update: Callable[[Any], Any]

    def compile(self) -> Halves:
        """The one, then the other."""
        gradients = self.gradients.compile()
        host.release_memory()
        return Halves(gradients, self.update(gradients.out_info).compile())
