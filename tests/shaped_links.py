"""For tests that take hosts with shaped links, and for those of machines that forbid them."""

from collections.abc import Sequence

import pytest

from scripts.hosts.network import why_not

needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

_FORBID = 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -all --inh-caps -all "$@"'


def without_namespaces(command: Sequence[str]) -> list[str]:
    """`command` where it may make no namespaces, whoever runs it."""
    return ["unshare", "--user", "--map-root-user", "sh", "-c", _FORBID, "sh", *command]
