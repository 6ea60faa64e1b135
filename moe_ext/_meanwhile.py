"""What a layer computes while its tokens are sent to other ranks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing


class Meanwhile:
    """Computes what needs no experts, while the tokens of a layer are sent to other ranks.

    1. the shared expert
    2. importance and load, summed over the ranks

    Args:
        gate: a function with the arguments of the gate's `forward`.
        sums_later: whether the gate needs ranks only for importance and load.
        shared: computes the output of the shared expert; None: the layer has no shared expert.

    Attributes:
        shared: the output of the shared expert; None before `__call__`, or without one.
    """

    def __init__(
        self,
        gate: Callable[..., Routing],
        sums_later: bool,
        shared: Callable[[], Tensor] | None,
    ) -> None:
        self._gate = gate
        self._sums_later = sums_later
        self._compute_shared = shared
        self._ranks: Ranks | None = None
        self._statistics: tuple[Tensor, ...] = ()
        self.shared: Tensor | None = None

    def routed(self, tokens: Tensor, ranks: Ranks | None, **options: Any) -> Routing:
        """Calls the gate; see `Gate.forward`. Importance and load may be those of this rank."""
        if not self._sums_later or ranks is None:
            return self._gate(tokens, ranks, **options)
        routing = self._gate(tokens, ranks, sums_later=True, **options)
        self._ranks, self._statistics = ranks, (routing.importance, routing.load)
        return routing

    def __call__(self) -> None:
        """Computes everything."""
        if self._compute_shared is not None:
            self.shared = self._compute_shared()
        if self._ranks is not None:
            self._statistics = self._ranks.sum(*self._statistics)

    def completed(self, routing: Routing) -> Routing:
        """Returns a routing decision with the importance and load of all ranks."""
        if self._ranks is None:
            return routing
        importance, load = self._statistics
        return routing._replace(importance=importance, load=load)
