"""Setting of these tests: jobs run the package's own entry, whatever checkout other tests use."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _without_a_checkout() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MEGATRON_LM", raising=False)
        yield
