"""The private PyTorch names this project uses, in one place, with what they were checked on.

Everything here exists under the same name in torch 2.11 and 2.13 unless a line says otherwise. No other module but
``dynamo_api`` may import from a private torch module; a new torch version is checked by reading these two pages.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "CustomGraphPass",
    "FakeTensor",
    "FakeTensorMode",
    "FloorDiv",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "PythonPrinter",
    "ShapeEnv",
    "StorageWeakRef",
    "TracingContext",
    "all_operations",
    "allocate_to_pool",
    "below_autograd",
    "call_eager_kernel",
    "clear_cublas_workspaces",
    "compile_session",
    "compile_with_inductor",
    "cpp_compiler_error",
    "cpp_rounds_halves",
    "cuda_alias",
    "cuda_bytes",
    "cuda_settings",
    "current_raw_stream",
    "data_ptrs_equal",
    "destroy_library",
    "dispatch_mode_active",
    "enable_python_dispatcher",
    "end_allocate_to_pool",
    "enter_autocast",
    "exit_autocast",
    "free_unbacked_symbols",
    "function_mode_active",
    "is_composite",
    "log_api_usage",
    "make_fx",
    "map_aggregate",
    "pool_segments",
    "set_grad_enabled",
    "size_hint",
    "storage_uses",
    "symbolic_sizes",
    "takes_ambient_device",
    "triton_error",
    "unset_fake_temporarily",
    "without_autocast",
]

#: What Dynamo emits for ``with torch.autocast(...)`` and ``with torch.no_grad()`` inside a graph.
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast
set_grad_enabled = torch._C._set_grad_enabled
#: A call for statistics that Dynamo keeps in the graph; it computes nothing.
log_api_usage = torch._C._log_api_usage_once

#: C++ comparison of addresses; only CUDA builds have it.
_compare = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors (and other owners) hold the memory of a tensor."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def data_ptrs_equal(tensors: list[Any], pointers: Sequence[int], which: Sequence[int]) -> bool:
    """Whether ``tensors[i]`` lies at ``pointers[i]`` for every ``i`` of ``which`` (both lists are equally long)."""
    if _compare is not None:
        return bool(_compare(tensors, pointers, which))
    return all(tensors[i].data_ptr() == pointers[i] for i in which)


def clear_cublas_workspaces() -> None:
    """Drop the cuBLAS workspaces of every handle and stream (a no-op without CUDA)."""
    torch._C._cuda_clearCublasWorkspaces()


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


def current_raw_stream(device: torch.device) -> int:
    """The current stream of a CUDA device, as the number that CUDA knows it by. (``torch.cuda.current_stream`` makes
    an object: four times the cost.)"""
    return int(torch._C._cuda_getCurrentRawStream(_index(device)))


def end_allocate_to_pool(device: torch.device, pool: Any, release: bool) -> None:
    """Take the CUDA allocator off a graph pool (what ``capture_end`` does, unless it fails before); ``release``: give
    up the use of the pool that ``capture_begin`` counted (as a graph does in the end whose capture was ended)."""
    torch._C._cuda_endAllocateToPool(_index(device), pool)
    if release:
        torch._C._cuda_releasePool(_index(device), pool)


@contextlib.contextmanager
def allocate_to_pool(device: torch.device, pool: Any) -> Iterator[None]:
    """This thread's CUDA allocations come from a graph pool (as cudagraph trees do for their warm-up). Some graph must
    hold the pool: leaving the context gives up one use of it."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(_index(device), pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(_index(device), pool)
        torch._C._cuda_releasePool(_index(device), pool)


def cuda_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor on the same memory that does not keep the memory."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def cuda_bytes(device: torch.device, address: int, nbytes: int) -> torch.Tensor:
    """Raw memory as a uint8 tensor that does not keep it."""
    memory = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(memory, 0, (nbytes,), (1,))


def cuda_settings() -> tuple[Any, ...]:
    """What the libraries of a CUDA device look at when a kernel is launched, and Dynamo does not guard: cuDNN on, its
    deterministic kernels, the precision of convolutions and of recurrent layers (TF32), sums in float16, and which
    kernels attention may take. (Checked on torch 2.13: Dynamo guards the precision of matmuls and their reductions.)"""
    c = torch._C
    precision = c._get_fp32_precision_getter
    return (
        c._get_cudnn_enabled(),
        c._get_cudnn_deterministic(),
        precision("cuda", "conv"),
        precision("cuda", "rnn"),
        c._get_cublas_allow_fp16_accumulation(),
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
    )


def pool_segments(pool: tuple[int, int]) -> list[tuple[int, int]]:
    """Address and bytes of every piece of memory of a CUDA graph pool.

    ``torch.cuda.memory_snapshot(mempool_id=pool)`` would be shorter, but up to torch 2.13 at least it gives up a
    reference to each number of the tuple that it does not own: the id of a pool (above 256, the numbers that Python
    keeps forever) was freed while in use, and the process crashed much later (pytorch/pytorch#196366). ``None`` as
    argument takes no tuple apart.
    """
    found = torch._C._cuda_memorySnapshot(None)["segments"]
    return [(s["address"], s["total_size"]) for s in found if tuple(s["segment_pool_id"]) == tuple(pool)]


def takes_ambient_device(gm: torch.fx.GraphModule) -> bool:
    """Whether an operation of a Dynamo graph makes a tensor wherever the default device is when it runs. (torch 2.13
    writes the device into the graph when it was compiled under a default device, torch 2.11 does not.)"""
    from torch.utils._device import _device_constructors

    made = _device_constructors()
    calls = [n for m in gm.modules() if isinstance(m, torch.fx.GraphModule) for n in m.graph.nodes]
    return any(n.op == "call_function" and n.target in made and n.kwargs.get("device") is None for n in calls)


def function_mode_active() -> bool:
    """Whether the caller is under a ``TorchFunctionMode``, such as a default device."""
    return torch._C._len_torch_function_stack() > 0


def dispatch_mode_active() -> bool:
    """Whether the caller is under a ``TorchDispatchMode``."""
    return torch._C._len_torch_dispatch_stack() > 0


def size_hint(value: Any) -> int | None:
    """The value of a size at the example that was traced; ``None`` for one that depends on data."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    try:
        hint = value.node.hint
    except Exception:  # unbacked: torch says so with one error type or another, by version
        return None
    return None if hint is None else int(hint)


def is_composite(op: OpOverload) -> bool:
    """Whether the operator is made of others (``aten.linear``, ``aten.matmul``) on every backend."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def below_autograd(op: OpOverload, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Go on with a call of ``op`` under autograd: what a kernel for the key ``Autograd`` does that records nothing."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)


def all_operations() -> list[str]:
    """The names of all operators that exist, such as ``"aten::add.Tensor"``."""
    return list(torch._C._dispatch_get_all_op_names())


def destroy_library(library: torch.library.Library) -> None:
    """Take back everything that ``library`` defined, so that its names can be defined again."""
    library._destroy()


def symbolic_sizes(values: Sequence[int]) -> tuple[FakeTensorMode, list[torch.SymInt]]:
    """A fake mode of its own, with a dynamic size for each of ``values`` (2 or more each: 0 and 1 are constants)."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    example = torch.empty(tuple(values), device="meta")
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(values))
    sizes: Any = mode.from_tensor(example, symbolic_context=dynamic).shape
    return mode, list(sizes)


def compile_with_inductor(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, patches: dict[str, Any]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Inductor's code for ``gm`` at the layouts of ``inputs``: fake tensors (and sizes) of ``mode``. ``patches`` of
    Inductor's config that this version does not have are left out.

    ``from_tracing_context`` is the one kind of ``dynamic_shapes`` that takes fake inputs in 2.11 as well, also where a
    graph returns nothing (2.13 could be given the mode).
    """
    from torch._guards import tracing
    from torch._inductor import config, standalone_compile

    known = {name: value for name, value in patches.items() if name in config._config}  # type: ignore[attr-defined]
    with tracing(TracingContext(mode)), _without("torch._inductor.standalone_compile", "artifact generation failed"):
        made = standalone_compile(
            gm,
            list(inputs),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": known},
        )
    return made


@contextlib.contextmanager
def compile_session() -> Iterator[None]:
    """Around tracing and compiling outside of Dynamo: what Dynamo holds and sets in its own compiles. Tracers set a
    flag of the process, at which compiled code that another thread calls raises, unless a session is announced.
    (Torch 2.13 does that in Dynamo's compiles too; 2.11 has the flag, and sets it in ``torch.export`` alone.)

    The wait for the lock ends: ``torch._dynamo.reset`` holds it while it waits for calls that are running, as ours."""
    from torch._dynamo.convert_frame import compile_lock

    held = compile_lock.acquire(timeout=30)
    before = torch.compiler._is_compiling_flag
    try:
        torch.compiler._is_compiling_flag = True
        yield
    finally:
        torch.compiler._is_compiling_flag = before
        if held:
            compile_lock.release()


@contextlib.contextmanager
def _without(logger: str, text: str) -> Iterator[None]:
    """What this thread logs to ``logger`` with ``text`` in it is dropped. (That the code cannot be saved as a file,
    which nobody asked for: it is so where Inductor's caches are off.)"""
    thread = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        return record.thread != thread or text not in str(record.msg)

    found = logging.getLogger(logger)
    found.addFilter(keep)
    try:
        yield
    finally:
        found.removeFilter(keep)


@functools.cache
def cpp_rounds_halves() -> bool:
    """Whether Inductor's C++ keeps a cast to a half precision and back, if ``emulate_precision_casts`` is set. (Torch
    2.13 does; 2.11 has the option for Triton alone, and its C++ takes the number from before the cast.)"""
    from torch._inductor.codegen.cpp import CppOverrides

    return "emulate_precision_casts" in inspect.getsource(CppOverrides.to_dtype)


def call_eager_kernel(op: OpOverload, original: OpOverload) -> None:
    """Have Inductor's code call ``original``, at the strides that eager code would have, in the place of ``op``, an
    operation of ours of the same schema."""
    from torch._inductor import lowering

    call = lowering.fallback_handler(original, add_to_fallback_set=False)
    lowering.register_lowering(op, type_promotion_kind=None)(call)
    lowering.add_layout_constraint(op, lowering.constrain_to_fake_tensors)


def cpp_compiler_error() -> str:
    """What Inductor lacks to compile for the CPU; empty if nothing."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        return str(error) or "no C++ compiler works"
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    return "" if os.path.exists(header) else f"there is no {os.path.basename(header)}: Python's headers are missing"


def triton_error() -> str:
    """What Inductor lacks to compile for a GPU; empty if nothing."""
    from torch.utils._triton import has_triton

    return "" if has_triton() else "Triton does not work here"


def without_autocast() -> Any:
    """Around code in which autocast has been applied already."""
    return torch._C._DisableAutocast()
