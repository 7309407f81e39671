"""The host recorder's tape: which operation is executed, logged or refused while a segment is recorded.

Contract. Views and other metadata operations run for real. Everything else is described by a fake (meta) run,
gets its results from the pool, and is logged with frozen arguments; no kernel touches the segment's data. What cannot
be described without data, or would copy from or to the host, raises ``CaptureError``. A tape holds no tensor
that keeps a pool block taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_graph_backend.errors import CaptureError
from torch_graph_backend.recorders.base import OpaqueSegment
from torch_graph_backend.recorders.host_pool import Block, HostPool

aten = torch.ops.aten
Op = Any  # torch._ops.OpOverload; its attributes are not typed


#: They return views of their argument, though their schemas do not say so.
_UNDECLARED_VIEWS = frozenset(
    [aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default]
)
#: They allocate and execute nothing: the contents are whatever the block holds.
_ALLOCATIONS = frozenset(
    [
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_permuted.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    ]
)
#: Methods that copy tensor data to Python without a dispatched operation.
_HOST_READS = frozenset([torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__])

_CPU = torch.device("cpu")
_METADATA_UNKNOWN = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


@dataclass(eq=False, slots=True)
class Step:
    """One recorded operation with its frozen arguments, and where its results go (none: it only mutates)."""

    func: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor | None, ...]

    def run(self) -> None:
        """Execute, and copy every fresh result to its recorded address."""
        fresh = self.func(*self.args, **self.kwargs)
        if not self.results:
            return
        if len(self.results) == 1 and isinstance(fresh, torch.Tensor):
            values: Sequence[Any] = (fresh,)
        else:
            values = pytree.tree_leaves(fresh)
        for target, value in zip(self.results, values, strict=True):
            if target is None or value is None:  # None: an optional result that this kernel does not make
                continue
            if value.shape != target.shape:
                raise RuntimeError(
                    f"{self.func}: the result has shape {tuple(value.shape)} but {tuple(target.shape)} was recorded; "
                    "its fake (meta) implementation disagrees with its kernel"
                )
            target.copy_(value)


@dataclass(eq=False, slots=True)
class OpaqueStep:
    """A whole segment that the dispatcher does not see, on its frozen inputs, and where its results go."""

    segment: OpaqueSegment
    inputs: tuple[Any, ...]
    results: tuple[torch.Tensor, ...]

    def run(self) -> None:
        """Execute, and copy every result to its recorded address."""
        for target, value in zip(self.results, self.segment.compute(self.inputs), strict=True):
            target.copy_(value)


class Log:
    """What a ``Recording`` holds as its handle: the steps, and the blocks to poison before the first one."""

    def __init__(self, steps: list[Step | OpaqueStep], poisoned: tuple[Block, ...]) -> None:
        self.steps = steps
        self.poisoned = poisoned

    def run(self) -> None:
        for block in self.poisoned:
            block.poison()
        for step in self.steps:
            step.run()

    def clear(self) -> None:
        self.steps = []
        self.poisoned = ()


class NoHostReads(TorchFunctionMode):
    """Refuses what would read tensor data into Python without passing the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            raise CaptureError(f"Tensor.{func.__name__}", "it copies data to the host")
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """The dispatch mode that records one segment into ``steps``. It holds no tensor on pool memory, nor on ``weak``
    storages (addresses)."""

    def __init__(self, pool: HostPool, weak: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._weak = weak
        self.steps: list[Step | OpaqueStep] = []
        self._pool = pool
        self._fake_mode = fake_tensor.FakeTensorMode()
        self._host_scalars: dict[int, torch.Tensor] = {}  # by storage address

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            _check_plain(func, tensor)
            if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                raise CaptureError(str(func), f"a tensor is a {type(tensor).__name__}")
        if func is aten.lift_fresh.default:
            return self._host_tensor(args[0])
        if _is_composite(func):  # reaches us whole only for inference tensors
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if func is aten.resize_.default:
            return self._resize(func, *args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if func in _UNDECLARED_VIEWS or _is_view(func):
            return _view(func, args, kwargs, tensors)
        return self._record(func, args, kwargs, has_tensors=bool(tensors))

    def opaque(self, segment: OpaqueSegment, args: Sequence[Any]) -> tuple[Any, ...]:
        """Log a segment as one call; nothing runs. (Not under the mode: it makes no operation.)"""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        for tensor in tensors:
            _check_plain("a compiled segment", tensor)
        with torch._C.DisableTorchFunction():
            made = [self._on_pool(torch.empty(0, dtype=dtype), shape, st) for shape, st, dtype in segment.layouts]
            frozen = tuple(self._freeze(a) if isinstance(a, torch.Tensor) else a for a in args)
            self.steps.append(OpaqueStep(segment, frozen, tuple(self._freeze(t) for t in made)))
            return segment.assemble(args, made)

    def _record(self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], has_tensors: bool) -> Any:
        """Log ``func``; return the written arguments, and fresh results allocated from the pool."""
        fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        fake_out = self._run_fake(func, fake_args, fake_kwargs)
        written = self._written(func, args, kwargs, fake_args, fake_kwargs)
        single = len(func._schema.returns) == 1
        fresh: list[torch.Tensor | None] = []
        outputs: list[Any] = []
        for spec, value in zip(func._schema.returns, (fake_out,) if single else fake_out or (), strict=True):
            if spec.alias_info is not None and spec.alias_info.is_write:
                outputs.append(next(arg for names, arg in written if names & spec.alias_info.before_set))
                fresh.append(None)
                continue
            leaves, tree = pytree.tree_flatten(value)
            made = [self._allocate_like(func, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            outputs.append(pytree.tree_unflatten(made, tree))
            fresh += [tensor if isinstance(tensor, torch.Tensor) else None for tensor in made]
        targets = tuple(self._freeze(tensor) if tensor is not None else None for tensor in fresh)
        has_results = any(target is not None for target in targets)
        if func not in _ALLOCATIONS and (has_results or written or not targets):
            kwargs = kwargs if has_tensors else _with_dtype(func, kwargs, fresh)
            frozen_args, frozen_kwargs = pytree.tree_map_only(torch.Tensor, self._freeze, (args, kwargs))
            self.steps.append(Step(func, frozen_args, frozen_kwargs, targets if has_results else ()))
        if not func._schema.returns:
            return None
        return outputs[0] if single else tuple(outputs)

    def _written(
        self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], fake_args: Any, fake_kwargs: Any
    ) -> list[tuple[set[str], Any]]:
        """The arguments that ``func`` writes, with their alias sets. ``out=`` tensors get their final shape here."""
        written = []
        for position, spec in enumerate(func._schema.arguments):
            if spec.alias_info is None or not spec.alias_info.is_write:
                continue
            by_name = spec.name in kwargs
            if not by_name and position >= len(args):
                continue
            value = kwargs[spec.name] if by_name else args[position]
            fake_value = fake_kwargs[spec.name] if by_name else fake_args[position]
            for tensor, fake in zip(pytree.tree_leaves(value), pytree.tree_leaves(fake_value), strict=True):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if tensor.untyped_storage().data_ptr() in self._host_scalars:
                    raise CaptureError(str(func), "it writes to a scalar tensor that lives on the host")
                if spec.kwarg_only and tensor.shape != fake.shape:
                    self._reshape(func, tensor, tuple(fake.shape), tuple(fake.stride()))
            written.append((set(spec.alias_info.before_set), value))
        return written

    def _run_fake(self, func: Op, fake_args: Any, fake_kwargs: Any) -> Any:
        """The metadata of the results, without data. Torch's own operations raise what they would raise eagerly."""
        try:
            with self._fake_mode:
                return func(*fake_args, **fake_kwargs)
        except _METADATA_UNKNOWN as error:
            raise CaptureError(
                str(func), f"its result cannot be described without data: {type(error).__name__}"
            ) from error
        except RuntimeError as error:
            if func.namespace in ("aten", "prims"):
                raise
            raise CaptureError(str(func), f"its fake implementation is missing or failed: {error}") from error

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake CPU tensor of this layout; made directly, which is four times faster than under the mode."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = fake_tensor.FakeTensor(self._fake_mode, meta, _CPU)
        with self._fake_mode:
            return _with_bits(fake, tensor)

    def _allocate_like(self, func: Op, fake: torch.Tensor) -> torch.Tensor:
        _check_plain(func, fake)
        shape, stride = tuple(fake.shape), tuple(fake.stride())
        overlaps = any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True))
        if overlaps and func not in _ALLOCATIONS:
            stride = torch.empty(shape, device="meta").stride()  # an expanded result needs memory of its own
        return self._on_pool(torch.empty(0, dtype=fake.dtype, device="cpu"), shape, stride)

    def _on_pool(self, tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """Give ``tensor`` this layout on fresh pool memory (an empty tensor needs none)."""
        nbytes = extent(shape, stride) * tensor.element_size()
        storage = self._pool.storage(nbytes) if nbytes else torch.UntypedStorage(0)
        return tensor.set_(storage, 0, shape, stride)

    def _reshape(self, func: Op, tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        """Change a tensor's layout in place, as ``out=`` and ``resize_`` do. Memory that exists never grows."""
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        if (offset + extent(shape, stride)) * tensor.element_size() <= storage.nbytes():
            tensor.set_(storage, offset, shape, stride)
        elif storage.nbytes() == 0:
            self._on_pool(tensor, shape, stride)
        else:
            raise CaptureError(str(func), "it would reallocate a tensor's memory")

    def _resize(self, func: Op, tensor: torch.Tensor, size: Any, memory_format: Any = None) -> torch.Tensor:
        layout = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
        self._reshape(func, tensor, tuple(layout.shape), layout.stride())
        return tensor

    def _host_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Data that Python just made. A scalar is baked in, as ``x[0] = 1.0`` is on CUDA; more is a host copy."""
        if tensor.dim() > 0:
            raise CaptureError(
                str(aten.lift_fresh.default), "it copies data from the host, as torch.tensor([...]) does"
            )
        self._host_scalars[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _freeze(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of the memory that ``tensor`` lies on now; on pool memory one that does not keep the block."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._weak or self._pool.block_at(address) is not None:
            return unleased(self._pool, tensor)
        alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return _with_bits(alias, tensor)


def unleased(pool: HostPool, tensor: torch.Tensor) -> torch.Tensor:
    """An alias of the memory that ``tensor`` lies on now, which does not keep it."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    memory = pool.address_only(storage.data_ptr(), nbytes) if nbytes else torch.UntypedStorage(0)
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return _with_bits(alias.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride()), tensor)


def _check_plain(func: Op, tensor: torch.Tensor) -> None:
    """Arguments and (fake) results must be strided CPU memory."""
    if tensor.device.type != "cpu":
        raise CaptureError(str(func), f"a tensor is on {tensor.device}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_mkldnn:
        raise CaptureError(str(func), f"a tensor has layout {tensor.layout} or is quantised")


def _is_composite(func: Op) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")


def _is_view(func: Op) -> bool:
    """Whether every result is declared to alias an argument and nothing is written."""
    schema = func._schema
    infos = [spec.alias_info for spec in schema.returns]
    return bool(infos) and not schema.is_mutable and all(info is not None and not info.is_write for info in infos)


def _view(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Run a view for real. An operation that only *may* alias would run a kernel here: refuse the result."""
    out = func(*args, **kwargs)
    bases = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in bases:
            raise CaptureError(str(func), "it is declared as a view but made a copy")
    return out


def _with_bits(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``target`` with the lazy conjugation and negation of ``source``."""
    target = torch._conj(target) if source.is_conj() else target
    return torch._neg_view(target) if source.is_neg() else target


def _with_dtype(func: Op, kwargs: dict[str, Any], results: Sequence[torch.Tensor | None]) -> dict[str, Any]:
    """Freeze the default dtype of a factory: at replay another one may be set."""
    takes_dtype = any(spec.name == "dtype" for spec in func._schema.arguments)
    if takes_dtype and kwargs.get("dtype") is None and results and results[0] is not None:
        return {**kwargs, "dtype": results[0].dtype}
    return kwargs


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one, inclusive."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
