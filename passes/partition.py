"""Order nodes into captured segments and eager regions, as few as dependences allow.

Contract. Every scheduled node gets a *phase*: the least number that respects its inputs and the memory order, where
crossing from one kind to the other costs one phase. Phases alternate captured / eager, so the number of steps is the
length of the longest chain of crossings, which no schedule can beat; whether the first phase is captured or eager is
tried both ways. Inside a phase nodes keep their program order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Phase:
    """One captured segment or one eager region: its nodes in program order."""

    captured: bool
    nodes: tuple[Node, ...]


def partition(
    nodes: Sequence[Node], captured: Collection[Node], needs: Callable[[Node], Sequence[Node]]
) -> tuple[Phase, ...]:
    """Phases of ``nodes`` (in program order). ``needs(n)`` lists what must have run before ``n``."""
    first = _schedule(nodes, captured, needs, captured_first=True)
    other = _schedule(nodes, captured, needs, captured_first=False)
    return min(first, other, key=lambda phases: (sum(p.captured for p in phases), len(phases)))


def _schedule(
    nodes: Sequence[Node], captured: Collection[Node], needs: Callable[[Node], Sequence[Node]], captured_first: bool
) -> tuple[Phase, ...]:
    level: dict[Node, int] = {}
    for node in nodes:
        mine = node in captured
        start = int(mine != captured_first)
        for dep in needs(node):
            if dep in level:
                start = max(start, level[dep] + int((dep in captured) != mine))
        level[node] = start
    phases: dict[int, list[Node]] = {}
    for node in nodes:
        phases.setdefault(level[node], []).append(node)
    return tuple(Phase((k % 2 == 0) == captured_first, tuple(phases[k])) for k in sorted(phases))
