"""Integration modules: they import nothing of the packages they are about, register names, and call what is there."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from graph_harness import assert_same, compiled
from torch import Tensor

import torch_graph_backend as tgb
from torch_graph_backend import integrations


def test_importing_ours_imports_none_of_theirs() -> None:
    code = (
        "import sys, torch_graph_backend as tgb\n"
        "from torch_graph_backend import integrations\n"
        "integrations.register_all()\n"
        "theirs = set(integrations.MODULES) - {'torch'}\n"
        "assert not theirs & set(sys.modules), theirs & set(sys.modules)\n"
        "assert 'flash_attn_3::fwd' in tgb.break_ops() and 'flashinfer::*' in tgb.break_ops()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("module", integrations.MODULES.values())
def test_names_are_names_and_matching_nothing_is_no_news(module: str, caplog: pytest.LogCaptureFixture) -> None:
    found = importlib.import_module(f"torch_graph_backend.integrations.{module}")
    integrations.register(found.OPERATIONS)
    registered = {r.target: r.by for r in tgb.break_ops()}
    assert all(registered[name] == "integration" for name in found.OPERATIONS)
    with compiled(lambda x: x.sin() + 1) as g:
        g(torch.randn(3))
    assert "matched nothing" not in caplog.text


#: Operations that older versions do not have, and a version that does.
LATER = {"torch_attn::_varlen_attn_out": "2.13"}


def test_torchs_own_operations_exist() -> None:
    """Checked against the installed torch; the other packages cannot be installed here."""
    from torch.nn.attention import varlen  # noqa: F401 (defines two of them)

    from torch_graph_backend.integrations import torch_ops

    for name in torch_ops.OPERATIONS:
        library, op = name.split("::")
        missing = not hasattr(getattr(torch.ops, library), op)
        assert not missing or torch.__version__ < LATER.get(name, "0"), name


def install(monkeypatch: pytest.MonkeyPatch, path: str, **functions: Any) -> None:
    """A stand-in for a package that is not there, with the functions that ours call."""
    parts = path.split(".")
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules[path].__dict__.update(functions)


def scan_reference(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Any,
    z: Any,
    bias: Any,
    softplus: bool,
    return_last_state: bool,
) -> Any:
    """The recurrence that mamba's kernel computes."""
    assert return_last_state
    delta = delta if bias is None else delta + bias[:, None]
    delta = torch.nn.functional.softplus(delta) if softplus else delta
    state, ys = A.new_zeros(u.shape[0], *A.shape), []
    for t in range(u.shape[2]):
        state = state * torch.exp(delta[:, :, t, None] * A) + (delta * u)[:, :, t, None] * B[:, None, :, t]
        ys.append((state * C[:, None, :, t]).sum(-1))
    y = torch.stack(ys, 2)
    y = y if D is None else y + u * D[:, None]
    y = y if z is None else y * torch.nn.functional.silu(z)
    return y, state.transpose(1, 2).contiguous().transpose(1, 2)  # any strides


def test_mamba_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wiring of names, defaults, results and the changed state, with stand-ins for the kernels."""
    from torch_graph_backend.integrations.mamba_ssm import selective_scan, selective_state_update

    def update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kw: Any) -> Tensor:
        assert set(kw) == {"D", "z", "dt_bias", "dt_softplus"}
        state.mul_(torch.exp(dt[..., None] * A)).add_((dt * x)[..., None] * B[:, None])
        return (state * C[:, None]).sum(-1)

    install(monkeypatch, "mamba_ssm.ops.triton.selective_state_update", selective_state_update=update)
    interface = types.ModuleType("mamba_ssm.ops.selective_scan_interface")
    interface.selective_scan_fn = scan_reference  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    dim, n = 4, 3
    A, D, w = -torch.rand(dim, n), torch.randn(dim), torch.randn(dim, dim)

    def f(x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        u = (x @ w).transpose(1, 2)
        y, state = selective_scan(
            u, u.sigmoid(), A, u[:, :n].contiguous(), u[:, 1:].contiguous(), D=D, delta_softplus=True
        )
        out = selective_state_update(state, step, step.sigmoid(), A, step[:, :n], step[:, 1:])
        return y.transpose(1, 2) @ w, out @ w + state.sum(-1)

    with compiled(f) as g:
        for length in (5, 6, 5, 6):
            x, step = torch.randn(2, length, dim), torch.randn(2, dim)
            torch._dynamo.maybe_mark_dynamic(x, 1)
            torch.testing.assert_close(g(x, step), f(x, step))
        assert tgb.stats(g).replays >= 2


def test_flash_attention_over_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_graph_backend.integrations.flash_attn import flash_attn_with_kvcache

    def theirs(q: Tensor, kc: Tensor, vc: Tensor, k: Any, v: Any, cache_seqlens: Any, **kw: Any) -> Tensor:
        assert set(kw) == {"block_table", "softmax_scale", "causal"}
        outs = []
        for i, n in enumerate(cache_seqlens.tolist()):
            kc[i, n : n + q.shape[1]], vc[i, n : n + q.shape[1]] = k[i], v[i]
            keys, values = (c[i, : n + q.shape[1]].transpose(0, 1) for c in (kc, vc))
            outs.append(torch.softmax(q[i].transpose(0, 1) @ keys.transpose(1, 2), -1) @ values)
        return torch.stack(outs).transpose(1, 2).contiguous()

    install(monkeypatch, "flash_attn", flash_attn_with_kvcache=theirs)
    w = torch.randn(8, 8)

    def f(x: Tensor, kc: Tensor, vc: Tensor, lengths: Tensor) -> Tensor:
        h = (x @ w).view(2, 1, 2, 4)
        return flash_attn_with_kvcache(h, kc, vc, k=h, v=h + 1, cache_seqlens=lengths).reshape(2, 1, 8) @ w

    ours = [torch.zeros(2, 16, 2, 4) for _ in range(2)]
    eager = [torch.zeros(2, 16, 2, 4) for _ in range(2)]
    with compiled(f) as g:
        for n in range(4):
            x, lengths = torch.randn(2, 1, 8), torch.tensor([n, n + 2], dtype=torch.int32)
            torch.testing.assert_close(g(x, *ours, lengths), f(x, *eager, lengths))
            assert_same(ours, eager)
        assert tgb.stats(g).replays == 3


def test_gated_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_graph_backend.integrations.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    def theirs(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any) -> tuple[Tensor, Tensor]:
        assert kw.pop("output_final_state")
        state = torch.einsum("bthk,bthv->bhkv", k.float(), v.float())
        if kw["initial_state"] is not None:
            state = state + kw["initial_state"]
        return torch.einsum("bthk,bhkv->bthv", q.float(), state).to(v.dtype), state

    install(
        monkeypatch,
        "fla.ops.gated_delta_rule",
        chunk_gated_delta_rule=theirs,
        fused_recurrent_gated_delta_rule=theirs,
    )
    w = torch.eye(4)[[2, 0, 3, 1]] * torch.tensor([1.0, -1.0, -1.0, 1.0])

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        gate = h[..., 0].sigmoid()
        y, state = chunk_gated_delta_rule(h, h, h + 1, gate, gate)
        y, state = fused_recurrent_gated_delta_rule(y, h, y, gate, gate, initial_state=state)
        return y @ w, state

    with compiled(f) as g:
        for length in (5, 6, 5, 6):
            # Whole numbers, below 2 ** 24 throughout: exact in any order, where sums of thousands would cancel.
            x = torch.randint(-1, 2, (2, length, 3, 4)).float()
            torch._dynamo.maybe_mark_dynamic(x, 1)
            torch.testing.assert_close(g(x), f(x), rtol=0, atol=0)
        assert tgb.stats(g).replays >= 2
