"""Law: no sync on the hot path, in Megatron's own training loop with everything on."""

import functools
import shlex
from typing import Any

import pytest

import optimus_cc_ext
from optimus_cc_ext.techniques.compressed_backprop import ReceivingLink, SendingLink
from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync
from optimus_cc_ext.techniques.selective_stage_compression import BucketReducer
from tests.allocations import Watch
from tests.megatron.optimus_runs import PP2_DP2, install, run_optimus

EVERYTHING = shlex.split("""
    --compressed-backprop --compressed-backprop-rank 4 --compressed-backprop-messages all
    --fused-embedding-sync --dp-compression --dp-compression-rank 4
""")
WATCHED = {
    SendingLink: ("send", "remember", "commit", "begin_iteration"),
    ReceivingLink: ("receive", "begin_iteration"),
    BucketReducer: ("start", "turn", "finish", "commit"),
    FusedEmbeddingSync: ("reduce",),
}

_asked: dict[str, list[str]] = {}
"""By method: what its calls after the first iteration asked for."""


def _install_watched() -> None:
    install()
    for owner, names in WATCHED.items():
        for name in names:
            setattr(owner, name, _watched(f"{owner.__name__}.{name}", getattr(owner, name)))


def _watched(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        session = optimus_cc_ext.current_session()
        if session is None or session._step.iteration == 0:
            return original(*args, **kwargs)
        asked = _asked.setdefault(name, [])
        with Watch() as watch:
            result = original(*args, **kwargs)
        asked += watch.allocated + watch.read_by_host
        if name in ("SendingLink.send", "ReceivingLink.receive"):
            tensor, finish = result
            return tensor, _watched(name + ".finish", finish)
        return result

    return method


def _what_was_asked(model: Any, optimizer: Any) -> dict[str, list[str]]:
    return _asked


@pytest.mark.parametrize(
    "flags", [["--bf16", "--grad-reduce-in-bf16"], ["--use-distributed-optimizer", "--overlap-grad-reduce"]], ids=str
)
def test_after_the_first_iteration_nothing_is_allocated_and_the_host_asks_nothing(flags):
    runs = run_optimus(PP2_DP2, [*EVERYTHING, *flags], before=_install_watched, probe=_what_was_asked)
    asked = [run.probed for run in runs]
    seen = {name for rank in asked for name in rank}
    assert {"SendingLink.send", "ReceivingLink.receive.finish", "BucketReducer.finish"} < seen, "they were watched"
    assert {f"{name}: {what}" for rank in asked for name, calls in rank.items() for what in calls} == set()
