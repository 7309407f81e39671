"""The command line: ``bcg check``, ``bcg demo`` and ``bcg version``, also as ``python -m torch_graph_backend``.

Contract: parsing needs no extra, and each command imports what it needs itself, so ``--help``, ``version`` and a usage
error work on any machine. Exit codes: 0 success, 1 the command ran and what it checks does not hold, 2 usage,
3 it could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION = "torch-graph-backend"


def version_text() -> str:
    """The versions that a bug report needs: ours, Python's and torch's.

    Torch's is what it says itself: the metadata of some builds leave out the local part (``+cu130``).
    """
    import torch

    return f"{DISTRIBUTION} {_version()}, torch {torch.__version__}, Python {platform.python_version()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (argparse itself exits with 2 on a usage error)."""
    args = _parser().parse_args(argv)
    if args.command == "version":
        print(version_text())
        return 0
    return _check(args) if args.command == "check" else _demo(args)


def _check(args: argparse.Namespace) -> int:
    from torch_graph_backend import check

    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the callable prints is not our output
            found = check.check(args.target, inputs=args.inputs, min_share=args.min_share, options=args.options)
    except check.TargetError as error:
        print(f"bcg check: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        traceback.print_exc()
        print(f"bcg check: {args.target} raised {type(error).__name__}", file=sys.stderr)
        return 3
    print(json.dumps({"version": version_text(), **found.to_dict()}, indent=2) if args.json else found)
    return 0 if found.ok else 1


def _demo(args: argparse.Namespace) -> int:
    from torch_graph_backend import demo, demo_model

    try:
        return demo.run(
            model_dir=args.model_dir, max_new_tokens=args.max_new_tokens, prompts=args.prompts, json_path=args.json
        )
    except demo_model.DemoError as error:
        print(f"bcg demo: {error}", file=sys.stderr)
        return 3


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bcg", description="The bcg backend for torch.compile.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("version", help="print the versions that a bug report needs")
    check = commands.add_parser(
        "check",
        help="say what is not captured of a callable, by line, with reason, cost and fix",
        epilog="Exit codes: 0 all kernels captured (or the share asked for), 1 not so, 2 usage, 3 the callable raised.",
    )
    check.add_argument("target", metavar="MODULE.py:CALLABLE", help="a function, a module, or a module class")
    check.add_argument(
        "--inputs",
        metavar="EXPR",
        help="arguments as Python, such as '(torch.randn(5, 8),)': a tuple, a dict, or a list of them, one for each "
        "call (default: what the module's function example_inputs() returns)",
    )
    check.add_argument(
        "--min-share",
        type=_share,
        metavar="X",
        help="pass if this share of the kernels is captured (default: all of them)",
    )
    check.add_argument("--options", type=_options, metavar="JSON", help="options of the backend, a JSON object")
    check.add_argument("--json", action="store_true", help="print JSON instead of text")
    demo = commands.add_parser(
        "demo",
        help="generate with a real language model, eager and compiled, and compare every token",
        epilog="Exit codes: 0 all tokens equal and something replayed, 1 not so, 2 usage, 3 the demo could not run.",
    )
    demo.add_argument(
        "--model-dir", type=Path, metavar="DIR", help="folder with one .gguf file (default: download once and cache)"
    )
    demo.add_argument("--max-new-tokens", type=_positive, default=16, metavar="N", help="default: %(default)s")
    demo.add_argument("--prompts", type=_positive, metavar="N", help="use the first N prompts only (default: all)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers shown to FILE")
    return parser


def _positive(text: str) -> int:
    """An argparse type; the error names the value."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return value


def _share(text: str) -> float:
    """An argparse type: 0.0 to 1.0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value


def _options(text: str) -> Any:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
