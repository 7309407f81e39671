"""Recognising the user's tensors later, without keeping them alive.

Contract. A mark tells whether its tensor is still there and whether a tensor is that one. A weak reference is the best
mark, but ``torch.utils.swap_tensors`` refuses tensors that have one, and ``module.to()`` swaps what it converts where
weights are wrapper subclasses (quantised ones, say), or everywhere after
``torch.__future__.set_swap_module_params_on_conversion(True)``. Those are told by their ``id`` and their storage. (A
swapped tensor has another storage: it is not recognised.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_graph_backend.passes.torch_api import StorageWeakRef


class Mark:
    """Of one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.id = id(tensor)
        self._storage = _storage(tensor) if _may_be_swapped(tensor) else None
        self._ref = weakref.ref(tensor) if self._storage is None else None

    @property
    def alive(self) -> bool:
        if self._storage is not None:
            return not self._storage.expired()
        return self._ref is not None and self._ref() is not None

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it marks this very tensor."""
        if id(tensor) != self.id or not self.alive:
            return False
        return self._ref() is tensor if self._ref is not None else self._storage == _storage(tensor)

    def among(self, tensors: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """Its tensor, if that is one of these (by their ``id``)."""
        found = tensors.get(self.id)
        return found if found is not None and self.is_of(found) else None


class Marks:
    """Marks of tensors that were seen and are still there."""

    def __init__(self) -> None:
        self._marks: dict[int, Mark] = {}

    def __iter__(self) -> Iterator[Mark]:
        return iter([mark for mark in list(self._marks.values()) if mark.alive])

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for t in tensors:
            mark = self._marks.get(id(t))
            if mark is None or not mark.is_of(t):
                self._marks = {k: m for k, m in self._marks.items() if m.alive}
                self._marks[id(t)] = Mark(t)


def _may_be_swapped(tensor: torch.Tensor) -> bool:
    return is_traceable_wrapper_subclass(tensor) or torch.__future__.get_swap_module_params_on_conversion()


def _storage(tensor: torch.Tensor) -> StorageWeakRef | None:
    """``None`` for a tensor without one (a sparse tensor)."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None
