"""Operations that read tensor data on the host, or wait for the device: none of them may be recorded.

Contract. ``host_read(node, device)`` says why, or ``None``. PyTorch's tags name operations whose *result* depends on
data. Many more read data on the way: they check it, or choose a path by it, and say so nowhere. Those are listed here,
with what they read. A value that was read while recording is frozen: replays would answer with it for ever.

Sources, read at torch 2.11 and 2.13: the tags of ``native_functions.yaml``; the operations for which
``torch/_subclasses/fake_impls.py`` raises ``DataDependentOutputException``; ``FORBIDDEN_CUDAGRAPH_OPS`` and
``is_cudagraph_unsafe_fx_node`` of ``torch/_inductor/utils.py``; and the kernels in ``aten/src/ATen/native`` that call
``item()`` or ``_linalg_check_errors``. On a GPU a test runs the samples of every captured operation while PyTorch
raises at each synchronisation (``tests/test_host_reads.py``).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .alias import arguments
from .reasons import Reason
from .torch_api import OpOverload

#: Tags of operations whose result (its shape, or a Python value) depends on data. (``cudagraph_unsafe``: torch 2.9.)
TAGS = frozenset(
    getattr(torch.Tag, name)
    for name in ("data_dependent_output", "dynamic_output_shape", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
)

_COUNTS = "the size of its result depends on data"
_ERRORS = "the host asks the device whether a matrix was singular or did not converge"

#: By ``packet`` or ``packet.overload``: what is read on the host, on every device.
EVERYWHERE: dict[str, str] = {
    **dict.fromkeys(("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"), "its result is a Python value"),
    **dict.fromkeys(("nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount"), _COUNTS),
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _COUNTS),
    **dict.fromkeys(("repeat_interleave.Tensor", "repeat_interleave.self_Tensor", "_ctc_loss.Tensor"), _COUNTS),
    "one_hot": "it looks for the smallest and the largest class",
    "narrow.Tensor": "it reads where to start",
    "tensor_split.tensor_indices_or_sections": "it reads where to split",
    **dict.fromkeys(
        ("linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor", "logspace.Tensor_Tensor",
         "logspace.Tensor_Scalar", "logspace.Scalar_Tensor"), "it reads the ends of the range"),
    **dict.fromkeys(("_assert_scalar", "_functional_assert_scalar"),
                    "it checks a value"),
    **dict.fromkeys(
        ("linalg_cholesky", "cholesky", "linalg_inv", "inverse", "linalg_solve", "linalg_tensorsolve",
         "linalg_tensorinv", "linalg_lu_factor", "linalg_ldl_factor", "linalg_eig", "linalg_eigvals", "linalg_eigh",
         "_linalg_eigh", "linalg_eigvalsh", "linalg_svd", "_linalg_svd", "linalg_svdvals", "svd", "linalg_lstsq",
         "linalg_pinv", "pinverse", "linalg_matrix_rank", "linalg_cond", "matrix_power",
         "linalg_matrix_power"), _ERRORS),
    **dict.fromkeys(("linalg_matrix_exp", "matrix_exp"), "it sorts matrices by their norms"),
    **dict.fromkeys(("histc", "histogram", "histogramdd"), "it looks for the smallest and the largest entry"),
    **dict.fromkeys(("_fused_moving_avg_obs_fq_helper", "_fused_moving_avg_obs_fq_helper_functional"),
                    "it asks whether observing is turned on"),
    "pin_memory": "it copies to the host",
}  # fmt: skip

#: The same on a device that runs on its own: what a CPU kernel may read, a recording for such a device may not.
ON_DEVICES: dict[str, str] = {
    **dict.fromkeys(("masked_fill.Tensor", "index_fill.int_Tensor"), "it reads its value"),
    "isin.Tensor_Tensor": "it counts distinct entries",
    "mode": "it counts equal entries",
}

#: Operations that index, by booleans too: how many rows they take, or write, depends on the mask.
_INDEXED = frozenset({"index", "index_put", "_unsafe_index", "_unsafe_index_put", "_index_put_impl"})


def host_read(node: Node, device: torch.device) -> Reason | None:
    """Why an ATen operation cannot be recorded because it reads data, or waits for it; ``None`` if it does not."""
    op = node.target
    assert isinstance(op, OpOverload)
    name = op.overloadpacket.__name__
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    shown = str(op).removesuffix(".default")
    if name in _INDEXED:
        if _boolean(node):
            return Reason("data-dependent", f"{shown} with a boolean mask: the number of rows depends on data")
        return None
    why = _listed(EVERYWHERE, op, name)
    if why is None and device.type != "cpu":
        why = _listed(ON_DEVICES, op, name)
    if why is not None and _is_told(name, node, device):
        return None  # whatever its tags say: they know no arguments
    if why is None and name in ("searchsorted", "bucketize") and arguments(node).get("sorter") is not None:
        why = "it checks the order that it is given"
    if why is not None:
        fix = "pass a number, or use torch.where" if "its value" in why else ""
        return Reason("data-dependent", f"{shown} reads tensor data on the host: {why}", fix=fix)
    if TAGS & set(op.tags):
        return Reason("data-dependent", f"{shown} reads tensor data on the host")
    return None


def _is_told(name: str, node: Node, device: torch.device) -> bool:
    """Whether an argument tells what the operation would else look for in the data."""
    given = arguments(node)
    if name == "histc":
        return bool(given.get("min", 0) != given.get("max", 0))
    # The CPU's kernel checks the classes even then; others leave that to the device.
    return name == "one_hot" and device.type != "cpu" and not (type(n := given.get("num_classes", -1)) is int and n < 0)


def _listed(table: dict[str, str], op: OpOverload, name: str) -> str | None:
    return table.get(f"{name}.{op._overloadname}") or table.get(name)


def _boolean(node: Node) -> bool:
    """Whether one of the index tensors is a mask."""
    indices = arguments(node).get("indices") or ()
    dtypes = [i.meta["val"].dtype for i in indices if isinstance(i, Node)]
    return any(d in (torch.bool, torch.uint8) for d in dtypes)
