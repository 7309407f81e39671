"""Which way the slots of a key are filled: grouped copies, or one kernel. A bench decides ``FUSED_FROM``.

Contract. Either way leaves the same bits in the buffers. Where the kernel cannot be used (no CUDA, no Triton, a buffer
that it cannot fill) the copies are used without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from torch_graph_backend.passes.padding_tails import Tail
from torch_graph_backend.plan import TensorSpec
from torch_graph_backend.slots import Filler, Sizes, Window, evaluate

if TYPE_CHECKING:
    from torch_graph_backend.recorders.fill_triton import FusedFiller

#: The kernel is used from so many slots on; ``None``: never. Set by ``tests/bench/fill.py`` on a GPU, which writes
#: ``docs/bench/fill.json``; a test compares the two. (2 is the least that is measured.)
FUSED_FROM: int | None = 2
#: ``python tests/bench/fill_check.py`` on a GPU says whether this line may say ``True``: whole calls through the kernel
#: and through copies leave the same bits, and none is slower (``docs/bench/fill_check.json``; a test compares the two).
ENABLED = True
#: Kinds of devices that the kernel runs on (tests add the CPU, with Triton's interpreter).
DEVICES = {"cuda"}


def make_filler(
    buffers: Sequence[torch.Tensor],
    windows: Sequence[Window],
    sizes: Sizes,
    specs: Sequence[TensorSpec] | None,
    filled: Collection[int] = (),
    tails: Sequence[Tail | None] = (),
    numbers: Sequence[tuple[torch.Tensor, int]] = (),
) -> Filler | FusedFiller:
    """What fills the slots of a key at one real size: the arguments of ``Filler``, and the ``specs`` of the sources
    (``None``: it will serve one call, and the kernel's table would cost more than it saves)."""
    if specs is not None and FUSED_FROM is not None and len(buffers) >= FUSED_FROM and fusable(buffers):
        from torch_graph_backend.recorders.fill_triton import fused

        strides = [tuple(evaluate(s, sizes) for s in spec.stride) for spec in specs]
        found = fused(buffers, windows, sizes, strides, filled, tails, numbers)
        if found is not None:
            return found
    return Filler(buffers, windows, sizes, filled, tails, numbers)


def fusable(buffers: Sequence[torch.Tensor]) -> bool:
    """Whether these buffers are where the kernel can run: all on one device, on which it was tried out."""
    devices = {b.device for b in buffers}
    if not ENABLED or len(devices) != 1 or not all(d.type in DEVICES for d in devices):
        return False
    from torch_graph_backend.recorders import fill_triton

    return not fill_triton.missing() and not fill_triton.failure(next(iter(devices)))
