"""Which weights a call brings: one compiled graph can serve several modules, and weights can move.

Contract (C1). Dynamo gives all modules of one class one graph and does not guard where their weights lie, and a
recording reads weights in place. So recordings are kept per *instance*, a set of addresses of the weights that
segments read: two modules each have their own, and neither drops the other's. An instance whose memory is gone is
dropped. Weights that move at almost every call (a buffer assigned anew, offloading hooks) are named by ``restless``:
they are better copied in than recorded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_graph_backend.passes.torch_api import StorageWeakRef, data_ptrs_equal

#: After so many moves in a row that did not pay, a weight is restless.
MAX_MOVES = 3


@dataclass(eq=False)
class Instance:
    """One set of weights: addresses by argument index (0 where it is none), and whether that memory still exists."""

    number: int
    pointers: list[int]
    memory: dict[int, StorageWeakRef]
    paid: bool = False

    @property
    def gone(self) -> bool:
        return any(ref.expired() for ref in self.memory.values())


class Instances:
    """The instances of one compiled graph. ``weights``: indices of the arguments that they are made of."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = list(weights)
        self.known: dict[int, Instance] = {}
        self.moves: Counter[int] = Counter()
        self._by_address: dict[int, list[Instance]] = {}
        self._last: Instance | None = None
        self._next = 0

    def find(self, args: list[Any]) -> Instance | None:
        """The instance of these arguments, if it is known."""
        last = self._last
        if last is not None and data_ptrs_equal(args, last.pointers, self.weights):
            return last
        for found in self._by_address.get(self._address(args), ()):
            if data_ptrs_equal(args, found.pointers, self.weights):
                self._last = found
                return found
        return None

    def peek(self, args: list[Any]) -> Instance | None:
        """``find`` without any effect: which instance came last tells moved weights from another module's."""
        known = list(self.known.values())
        return next((i for i in known if data_ptrs_equal(args, i.pointers, self.weights) and not i.gone), None)

    def drop_gone(self) -> list[int]:
        """The numbers of the instances whose memory is gone; they are forgotten, the caller drops their recordings."""
        gone = [n for n, instance in self.known.items() if instance.gone]
        for n in gone:
            del self.known[n]
        return gone

    def add(self, args: list[Any]) -> Instance:
        """A new instance: these arguments are none that is known."""
        pointers = [0] * len(args)
        for i in self.weights:
            pointers[i] = args[i].data_ptr()
        memory = {i: StorageWeakRef(args[i].untyped_storage()) for i in self.weights if args[i].numel()}
        made = Instance(self._next, pointers, memory)
        self._next += 1
        self._count_moves(made)
        self.known[made.number] = self._last = made
        self._by_address = {}
        for instance in self.known.values():
            first = instance.pointers[self.weights[0]] if self.weights else 0
            self._by_address.setdefault(first, []).append(instance)
        return made

    def restless(self) -> list[int]:
        """Arguments that moved too often in a row without a recording that paid."""
        return [i for i, n in self.moves.items() if n >= MAX_MOVES]

    def _count_moves(self, made: Instance) -> None:
        """Other weights are another module's, unless the old ones are gone or some are the same as before."""
        last = self._last
        if last is None:
            return
        if last.paid:
            self.moves.clear()
            return
        other = [i for i in self.weights if made.pointers[i] != last.pointers[i]]
        if len(other) == len(self.weights):
            other = [i for i in other if i not in last.memory or last.memory[i].expired()]
        self.moves.update(other)

    def _address(self, args: Sequence[torch.Tensor]) -> int:
        return args[self.weights[0]].data_ptr() if self.weights else 0
