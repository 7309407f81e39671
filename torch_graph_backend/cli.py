"""The command line: ``bcg demo`` and ``bcg version``, also as ``python -m torch_graph_backend``.

Contract: parsing needs no extra, and each command imports what it needs itself, so ``--help``, ``version`` and a usage
error work on any machine. Exit codes: 0 success, 1 the demo ran and its check failed, 2 usage,
3 the demo could not run.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "torch-graph-backend"


def version_text() -> str:
    """The versions that a bug report needs: ours, Python's and torch's."""
    return f"{DISTRIBUTION} {_version(DISTRIBUTION)}, torch {_version('torch')}, Python {platform.python_version()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (argparse itself exits with 2 on a usage error)."""
    args = _parser().parse_args(argv)
    if args.command == "version":
        print(version_text())
        return 0
    return _demo(args)


def _demo(args: argparse.Namespace) -> int:
    from torch_graph_backend import demo, demo_model

    try:
        return demo.run(
            model_dir=args.model_dir, max_new_tokens=args.max_new_tokens, prompts=args.prompts, json_path=args.json
        )
    except demo_model.DemoError as error:
        print(f"bcg demo: {error}", file=sys.stderr)
        return 3


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bcg", description="The bcg backend for torch.compile.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("version", help="print the versions that a bug report needs")
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
