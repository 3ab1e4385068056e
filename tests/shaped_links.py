"""Helpers for tests that need hosts with shaped links, and for tests of machines that forbid such hosts."""

from collections.abc import Sequence

import pytest

from scripts.hosts.network import why_not

needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

_FORBID = 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -all --inh-caps -all "$@"'


def without_namespaces(command: Sequence[str]) -> list[str]:
    """Return `command` wrapped so that it may make no namespaces, whoever runs it."""
    return ["unshare", "--user", "--map-root-user", "sh", "-c", _FORBID, "sh", *command]
