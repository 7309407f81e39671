"""All models, by name."""

from __future__ import annotations

from . import language, media, odd
from .case import Case

ZOO: dict[str, Case] = {c.name: c for c in (*language.CASES, *media.CASES, *odd.CASES)}
