"""Every refusal of the padding rules, made permissive, makes a numeric check fail (``mutate_padding.py`` finds which).

Would catch: a rule that nobody would miss, and a numeric check that no longer sees what it saw.
"""

from __future__ import annotations

import json

import pytest
from mutate_padding import KILLS, Site, is_net, sites, without, without_nets, wrong

STORED = json.loads(KILLS.read_text(encoding="utf-8"))
SITES = sites()


def test_every_site_is_killed_or_listed() -> None:
    """A new refusal needs a case: run ``python tests/mutate_padding.py --write``, and read what survives."""
    known = {**STORED["alone"], **STORED["without second lines"]}
    missing = [site.key for site in SITES if site.key not in known and not is_net(site)]
    assert not missing, missing
    assert set(known) <= {site.key for site in SITES}, "a stored kill is of a site that is gone"
    assert len(known) > 90


@pytest.mark.parametrize("site", [s for s in SITES if s.key in STORED["alone"]], ids=lambda s: s.key)
def test_killed(site: Site) -> None:
    """As the product is."""
    name = STORED["alone"][site.key]
    assert wrong(name) is None
    with without(site):
        assert wrong(name) is not None, f"{name!r} passes without {site.key}"


@pytest.mark.parametrize("site", [s for s in SITES if s.key in STORED["without second lines"]], ids=lambda s: s.key)
def test_killed_without_second_lines(site: Site) -> None:
    """With the check of every output's sizes, and the guards, out of the way."""
    name = STORED["without second lines"][site.key]
    with without_nets():
        assert wrong(name) is None
        with without(site):
            assert wrong(name, nets=False) is not None, f"{name!r} passes without {site.key}"
