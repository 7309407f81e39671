"""The documentation is true: its code runs and prints what it shows, its tables list what exists, its links lead on.

A page's ```python blocks form one script, run in a process of its own as a user would run it. A block after
``<!-- not run: reason -->`` is skipped. A ```text block after ``<!-- output -->`` is what the last block printed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from torch_graph_backend import errors
from torch_graph_backend.config import Config
from torch_graph_backend.passes.reasons import CODES, SOFT

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Page -> the name of the script that it forms.
SCRIPTS = {
    "README.md": "readme.py",
    "docs/getting-started.md": "getting_started.py",
    "docs/padding.md": "padding_page.py",
