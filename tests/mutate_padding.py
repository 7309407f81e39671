"""Mutation test of the padding rules: every refusal, made permissive, must make a *numeric* check fail.

    python tests/mutate_padding.py [--only NAME] [--write]

A *site* is one place where a rule refuses: a ``raise RefusedError``, a call of a function that only refuses
(``forbid``), or a ``return`` of "not provable". A mutant leaves one site out. It is *killed* by a case of
``padding_cases.CASES`` whose numbers come out wrong under it (expected refusals are not looked at). ``--write`` stores
which case kills which site, so that CI repeats each kill without the search (``test_padding_mutants.py``).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from padding_cases import CASES
from padding_harness import BUCKET, FILLS, EagerFailsError, Traced, analysed, check, trace, valid_at

from torch_graph_backend.passes import (
    layout,
    padding,
    padding_rules_base,
    padding_rules_contraction,
    padding_rules_declared,
    padding_rules_factory,
    padding_rules_index,
    padding_rules_more,
    padding_rules_pointwise,
    padding_rules_reduction,
    padding_rules_shape,
    padding_values,
)

KILLS = Path(__file__).with_name("padding_kills.json")
MODULES: tuple[ModuleType, ...] = (
    layout, padding, padding_rules_base, padding_rules_contraction, padding_rules_declared, padding_rules_factory,
    padding_rules_index, padding_rules_more, padding_rules_pointwise, padding_rules_reduction, padding_rules_shape,
    padding_values,
)  # fmt: skip

#: Functions that do nothing but refuse.
CHECKERS = {
    "forbid", "check_exact", "oblige", "in_range", "look_up", "_plain_filter", "_aligned",
    "_no_new_zero", "_from_front",
}  # fmt: skip


#: Functions whose answer "not provable" refuses, and the answer that lets everything pass.
PREDICATES: dict[str, Callable[..., Any]] = {
    "layout.rising": lambda *_: True,
    "padding_rules_base.never_negative": lambda *_: True,
    "padding._Interpreter.consistent": lambda *_: True,
    "padding._Interpreter.track_window": lambda *_: None,
    "padding._Interpreter.escaping": lambda *_: {},
    "padding_rules_pointwise._bound": lambda *_: sympy.Integer(0),  # noqa: F821 (runs in that module)
    "padding_values._not_negative": lambda *_: True,
}

#: Sites that no case can show, and why. They are second lines: kept, since they cost nothing.
NETS = {
    "padding._Interpreter.finish#0": "no rule leaves out a size",
    "padding._Interpreter.consistent#-1": "claims stay true one by one, but no buffer can be cut by two of them",
    "padding._Interpreter.write#1 'the written rows": "no rule of an in-place form has another layout than its target",
    "padding_rules_base.Call.dim#0": "a schema's dim is never a size",
    "padding_rules_base.check_exact#": "no rule leaves out a size",
    "padding_rules_contraction.attention#3": "the kernels on a CPU agree; whether all do on a GPU is in doubt",
    "padding_rules_factory.arange#": "a step or a lone end that is a size is refused before",
    "padding_rules_index._indexed#0": "the number of rows depends on data, so there is nothing to compare",
    "padding_rules_index.one_hot#0": "cannot be traced with a padded size",
    "padding_rules_shape.unbind#0": "fixes the size while it is traced",
}


@dataclass(frozen=True)
class Site:
    """One refusal: the ``index``-th of a function, named by what it says; or a predicate as a whole (index -1)."""

    function: Callable[..., Any]
    name: str
    index: int
    text: str

    @property
    def key(self) -> str:
        return f"{self.name}#{self.index} {self.text}"


class _LeaveOut(ast.NodeTransformer):
    """Counts the sites of a function and replaces one of them by ``pass``."""

    def __init__(self, which: int = -1) -> None:
        self.which = which
        self.texts: list[str] = []

    def at(self, node: ast.stmt, text: str) -> ast.stmt:
        self.texts.append(text)
        return ast.copy_location(ast.Pass(), node) if len(self.texts) - 1 == self.which else node

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        call = node.exc
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "RefusedError":
            code = ast.literal_eval(call.args[1]) if len(call.args) > 1 and _literal(call.args[1]) else "padding"
            if code != "unknown-op":  # says that a schema is not what the rule was written for: no input reaches it
                return self.at(node, _text(call.args[0]))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if isinstance(node.value, ast.Call):
            name = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
            if name in CHECKERS:
                return self.at(node, _text(node.value))
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        if not self.texts and self.which >= -1:  # the outermost function; inner ones are part of it
            self.generic_visit(node)
        return node


def _text(node: ast.expr) -> str:
    """Source with one kind of quotation mark: which ones an f-string gets depends on Python's version."""
    return re.sub(r"['\"]+", "'", ast.unparse(node))[:60]


def _literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _functions() -> Iterator[tuple[Callable[..., Any], str]]:
    """Every plain function and method of the rule modules."""
    for module in MODULES:
        for name, value in vars(module).items():
            plain = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else None
            if inspect.isfunction(plain) and plain.__module__ == module.__name__:
                yield plain, f"{module.__name__.rpartition('.')[2]}.{name}"
            if isinstance(value, type) and value.__module__ == module.__name__:
                for method, member in vars(value).items():
                    member = member.__func__ if isinstance(member, staticmethod) else member
                    if inspect.isfunction(member) and member.__qualname__.startswith(name):
                        yield member, f"{module.__name__.rpartition('.')[2]}.{name}.{method}"


def sites() -> list[Site]:
    """Every place where a rule refuses, in the order of the source."""
    found = []
    for function, name in _functions():
        tree = _tree(function)
        if tree is None:
            continue
        visitor = _LeaveOut()
        visitor.visit(tree)
        found += [Site(function, name, i, text) for i, text in enumerate(visitor.texts)]
        found += [Site(function, name, -1, "always passes")] if name in PREDICATES else []
    return found


def _tree(function: Callable[..., Any]) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _mutated(site: Site) -> CodeType:
    """The function's code with the site left out."""
    if site.index < 0:
        return PREDICATES[site.name].__code__
    tree = _tree(site.function)
    assert tree is not None
    definition = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    definition.decorator_list = []
    _LeaveOut(site.index).visit(tree)
    ast.fix_missing_locations(tree)
    names = site.function.__code__.co_freevars
    if names:  # rebuild the closure's shape around it
        outer = ast.parse(f"def outer({', '.join(names)}):\n    pass\n    return {definition.name}")
        outer.body[0].body[0] = definition  # type: ignore[attr-defined]
        tree = ast.fix_missing_locations(outer)
    code = compile(
        tree, site.function.__code__.co_filename, "exec", flags=__import__("__future__").annotations.compiler_flag
    )
    return _find_code(code, definition.name)


def _find_code(code: CodeType, name: str) -> CodeType:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if const.co_name == name:
                return const
            try:
                return _find_code(const, name)
            except LookupError:
                pass
    raise LookupError(name)


def forget() -> None:
    """Empty every cache that remembers a verdict."""
    for module in MODULES:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextmanager
def without(site: Site) -> Iterator[None]:
    """The rules with one refusal left out."""
    before = site.function.__code__
    site.function.__code__ = _mutated(site)  # type: ignore[attr-defined]
    forget()
    try:
        yield
    finally:
        site.function.__code__ = before  # type: ignore[attr-defined]
        forget()


_TRACES: dict[str, Any] = {}


def traced(name: str) -> Traced:
    """A case, traced once and analysed now."""
    if name not in _TRACES:
        function, specs, _ = CASES[name]
        _TRACES[name] = trace(function, specs)
    return analysed(*_TRACES[name])


def wrong(name: str, nets: bool = True) -> str | None:
    """What goes wrong numerically in a case under the rules as they are now; ``None`` if nothing does."""
    try:
        found = traced(name)
        if nets and not valid_at(found, BUCKET):
            return None
        for how in FILLS:
            torch.manual_seed(0)
            check(found, CASES[name][1], how)
    except EagerFailsError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return None


def verdicts(name: str) -> object:
    """What the proof says of a case, to see whether a mutant changes anything."""
    try:
        result = traced(name).result
    except Exception as error:
        return repr(error)
    return ({n: r.text for n, r in result.reasons.items()}, result.layouts, result.obligations)


def search(site: Site, baseline: dict[str, object], nets: bool = True) -> tuple[str | None, list[str]]:
    """A case that kills a site's mutant (and the cases that reach the site, if none kills it)."""
    with without(site):
        changed = [name for name in CASES if verdicts(name) != baseline[name]]
        return next((name for name in changed if wrong(name, nets) is not None), None), changed


@contextmanager
def without_nets() -> Iterator[None]:
    """The rules without the second lines behind them: the check of every output's sizes, and the traced guards.

    A mutant that they catch is no danger, but the corpus must be able to see it all the same.
    """
    before = padding.check_exact
    padding.check_exact = lambda call, index, layout: None
    try:
        yield
    finally:
        padding.check_exact = before


def hunt(chosen: list[Site]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Kills by site: as the product is, and with the second lines out of the way; and what survives both."""
    alone: dict[str, str] = {}
    behind: dict[str, str] = {}
    baseline = {name: verdicts(name) for name in CASES}
    for site in chosen:
        killer, _ = search(site, baseline)
        if killer is not None:
            alone[site.key] = killer
    survivors = []
    with without_nets():
        baseline = {name: verdicts(name) for name in CASES}
        dirty = [name for name in CASES if wrong(name) is not None]
        for site in chosen:
            if site.key in alone:
                continue
            killer, reached = search(site, baseline, nets=False)
            if killer is None or killer in dirty:
                if is_net(site):
                    continue
                survivors.append(f"{site.key} (reached by {reached[:3] or 'no case'})")
            else:
                behind[site.key] = killer
    return alone, behind, survivors


def is_net(site: Site) -> bool:
    """Whether the site is listed as a second line."""
    return any(site.key.startswith(prefix) for prefix in NETS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="sites whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"store the kills in {KILLS.name}")
    options = parser.parse_args()
    chosen = [site for site in sites() if options.only in site.key]
    alone, behind, survivors = hunt(chosen)
    killed, total = len(alone) + len(behind), len(chosen)
    nets = total - killed - len(survivors)
    share = f"{100 * killed / max(total - nets, 1):.1f} %"
    sys.stdout.write(
        f"{killed} of {total - nets} mutants killed ({share}), {len(behind)} of them with the second lines taken away; "
        f"{nets} more sites are second lines\n"
    )
    sys.stdout.write("".join(f"SURVIVOR {key}\n" for key in survivors))
    if options.write:
        stored = {"alone": dict(sorted(alone.items())), "without second lines": dict(sorted(behind.items()))}
        KILLS.write_text(json.dumps(stored, indent=1) + "\n")
    return bool(survivors)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
