"""Operations that read tensor data on the host are never captured: by tag, by table, and as a GPU sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from test_padding_table import ALL, CORE
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from torch_graph_backend.passes.capturable import capture_reason
from torch_graph_backend.passes.host_reads import EVERYWHERE, ON_DEVICES, TAGS, host_read
from torch_graph_backend.passes.padding import is_known

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
INDEXED = ("index", "index_put", "_unsafe_index", "_unsafe_index_put", "_index_put_impl")


def call(op: OpOverload, device: torch.device, *args: Any, **kwargs: Any) -> Node:
    """A node that calls ``op``; tensor arguments become placeholders with metadata, and so does its result."""
    graph = Graph()
    made = []

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made.append(graph.placeholder(f"x{len(made)}"))
        made[-1].meta["val"] = value
        return made[-1]

    with torch._subclasses.fake_tensor.FakeTensorMode():
        node = graph.call_function(op, *pytree.tree_map(placed, (args, kwargs)))
        node.meta["val"] = torch.empty(3, device=device)
    return node


def code(node: Node, device: torch.device) -> str | None:
    reason = capture_reason(node, device, lambda n: None)
    return reason.code if reason else None


def fake(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> torch.Tensor:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device=device)


def tagged(ops: list[OpOverload]) -> Iterator[OpOverload]:
    for op in ops:
        if TAGS & set(op.tags) and op.overloadpacket.__name__ not in INDEXED:
            yield op


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_no_tagged_operation_is_captured(device: torch.device) -> None:
    """Every ATen overload that PyTorch tags as data dependent, core ones among them."""
    found = list(tagged(ALL))
    assert len(found) >= 20
    assert {"aten._local_scalar_dense.default", "aten.nonzero.default"} <= {str(op) for op in tagged(CORE)}
    let_through = [str(op) for op in found if code(call(op, device), device) != "data-dependent"]
    assert not [name for name in let_through if "out" not in name], let_through


#: Operations that torch does not have any more, from that version on.
REMOVED = {"cholesky": (2, 14)}
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@pytest.mark.parametrize("table", [EVERYWHERE, ON_DEVICES], ids=["everywhere", "on devices"])
def test_no_listed_operation_is_captured(table: dict[str, str]) -> None:
    """Also those that the padding rules know; and each entry names an operation that some version has."""
    for key, why in table.items():
        packet, _, wanted = key.partition(".")
        ops = [op for op in ALL if op.overloadpacket.__name__ in (packet, f"{packet}_")]
        ops = [op for op in ops if not wanted or op._overloadname == wanted]
        assert ops or "_functional" in key or REMOVED.get(packet, (99,)) <= VERSION, key
        for op in ops:
            reason = host_read(call(op, CUDA), CUDA)
            assert reason is not None, op
            assert why in reason.text
            assert code(call(op, CUDA), CUDA) in ("data-dependent", "random")
            assert (host_read(call(op, CPU), CPU) is None) == (table is ON_DEVICES)


def test_the_table_closes_gaps() -> None:
    """Would catch a table that lists only what no rule would let through anyway."""
    known = {str(op) for op in ALL if is_known(op) and host_read(call(op, CUDA), CUDA) is not None}
    assert {
        "aten.narrow.Tensor",
        "aten.tensor_split.tensor_indices_or_sections",
        "aten.linspace.Tensor_Tensor",
    } <= known
    assert {"aten.isin.Tensor_Tensor", "aten.mode.default", "aten.masked_fill.Tensor", "aten.one_hot.default"} <= known


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_masks_as_indices(name: str, dtype: torch.dtype) -> None:
    """Refused in every form of indexing; integers are not."""
    for packet in (name, f"{name}_"):
        found = getattr(torch.ops.aten, packet, None)
        op = getattr(found, "Tensor", None) or getattr(found, "default", None)
        if op is None:
            continue
        x, index = fake(3), fake(3, dtype=dtype)
        rest = () if op._overloadname == "Tensor" else (x,)
        reason = host_read(call(op, CPU, x, [None, index], *rest), CPU)
        assert (reason is None) == (dtype is torch.int64), op
        by_name = call(op, CPU, self=x, indices=[index], **({"values": x} if rest else {}))
        assert (host_read(by_name, CPU) is None) == (dtype is torch.int64), op


def test_an_order_that_is_checked() -> None:
    op = torch.ops.aten.searchsorted.Tensor
    x, order = fake(3), fake(3, dtype=torch.int64)
    assert code(call(op, CPU, x, x), CPU) is None
    assert code(call(op, CPU, x, x, sorter=order), CPU) == "data-dependent"


def test_a_range_that_is_given() -> None:
    """``histc`` looks for the range only if it is told none."""
    op = torch.ops.aten.histc.default
    assert host_read(call(op, CUDA, fake(3), 4), CUDA) is not None
    assert host_read(call(op, CUDA, fake(3), 4, min=0, max=3), CUDA) is None
    assert code(call(op, CPU, fake(3), 4, min=0, max=3), CPU) == "unknown-op"


def test_a_number_of_classes_that_is_given() -> None:
    """Mixtures of experts route by ``one_hot``: on a GPU it looks at no data if it knows how many experts there are."""
    op, x = torch.ops.aten.one_hot.default, fake(3, dtype=torch.int64)
    assert host_read(call(op, CUDA, x), CUDA) is not None
    assert host_read(call(op, CUDA, x, -1), CUDA) is not None
    assert host_read(call(op, CUDA, x, 4), CUDA) is None
    assert host_read(call(op, CUDA, x, num_classes=4), CUDA) is None
    assert host_read(call(op, CPU, x, 4), CPU) is not None


# -- what a GPU says ---------------------------------------------------------------------------------------------------


class Sync(Interpreter):
    """Runs the operations of a graph one by one, and notes those that synchronise."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.waited: list[Node] = []

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function" or not isinstance(n.target, OpOverload):
            return super().run_node(n)
        super_args = self.fetch_args_kwargs_from_env(n)
        n.target(*super_args[0], **super_args[1])  # plans, workspaces and compiled kernels are made once
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return super().run_node(n)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            self.waited.append(n)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return super().run_node(n)


def traced(op: Any, sample: Any) -> tuple[GraphModule, list[torch.Tensor]] | None:
    """A sample as a graph of ATen operations, whole composites among them; ``None`` if it depends on data."""
    leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        values = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            values[i] = t
        x, args, kwargs = pytree.tree_unflatten(values, tree)
        return op(x, *args, **kwargs)

    given = [leaves[i].detach() for i in where]
    try:
        return make_fx(run, tracing_mode="fake", pre_dispatch=True)(*given), given
    except Exception:
        return None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_captured_never_waits_for_the_device() -> None:
    """All operator samples: an operation at which PyTorch sees a synchronisation has a reason not to be captured."""
    wrong, quiet = {}, 0
    with torch.no_grad():
        for op in op_db:
            dtypes = [d for d in (torch.float32, torch.int64) if d in op.supported_dtypes("cuda")]
            for dtype in dtypes:
                for k, sample in enumerate(op.sample_inputs("cuda", dtype)):
                    found = traced(op, sample) if k < 4 else None
                    if found is None:
                        continue
                    runner = Sync(found[0])
                    with suppress(Exception):  # of samples that expect an error
                        runner.run(*found[1])
                    for n in found[0].graph.nodes:
                        waits = n in runner.waited
                        open_ = n.op == "call_function" and "val" in n.meta and isinstance(n.target, OpOverload)
                        if open_ and capture_reason(n, torch.device("cuda", 0), lambda n: None) is None:
                            quiet += not waits
                            if waits:
                                wrong[str(n.target)] = f"{op.name}: {n.format_node()}"
    assert not wrong, wrong
    assert quiet > 500
