"""Wraps megatron/core/pipeline_parallel/p2p_communication.py: what passes between stages travels compressed.

`_batched_p2p_ops` returns a list of requests that are waited for in order, `_p2p_ops` a dict of them by role. Both are
given other tensors in place of some (`Transfer`); what is to be done once these have travelled becomes a request.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.metrics.traffic import TrafficClass
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.transfer import Transfer

__all__ = ["wraps"]

_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
_ROLES = ("send_prev", "recv_prev", "send_next", "recv_next")
_CLASSES = {"send_prev": TrafficClass.PIPELINE_BACKWARD, "send_next": TrafficClass.PIPELINE_FORWARD}


class _Request(Protocol):
    def wait(self) -> Any: ...


class _Then:
    """A request that, once waited for, finishes what our side of the exchange left to do."""

    def __init__(self, request: _Request | None, finish: Callable[[], None]) -> None:
        self._request = request
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        if self._request is not None:
            self._request.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None


def wraps(session: Session) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seams of this file, with what wraps them."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def p2p_ops(*, group: torch.distributed.ProcessGroup, **rest: Any) -> Any:
            if not session.active or session.grid is None or group is not session.grid.pipeline_group:
                return original(group=group, **rest)
            tensors = {role: rest[f"tensor_{role}"] for role in _ROLES}
            transfers = session.transfers(tensors)
            _count(session, tensors, transfers)
            posted = {f"tensor_{role}": transfer.tensor for role, transfer in transfers.items()}
            requests = original(group=group, **rest | posted)
            for transfer in transfers.values():
                transfer.after_post()
            if isinstance(requests, dict):
                return {role: _then(request, transfers.get(role)) for role, request in requests.items()}
            return [*requests, *(_Then(None, transfer.after_wait) for transfer in transfers.values())]

        return p2p_ops

    parameters = (*(f"tensor_{role}" for role in _ROLES), "group")
    return [(Seam(f"{_MODULE}:{name}", parameters), wrap) for name in ("_batched_p2p_ops", "_p2p_ops")]


def _then(request: _Request, transfer: Transfer | None) -> _Request:
    return request if transfer is None else _Then(request, transfer.after_wait)


def _count(session: Session, tensors: Mapping[str, torch.Tensor | None], transfers: Mapping[str, Transfer]) -> None:
    for role, traffic_class in _CLASSES.items():
        tensor = tensors[role]
        if tensor is not None:
            sent = transfers[role].tensor if role in transfers else tensor
            session.traffic.add(traffic_class, raw=tensor.nbytes, sent=sent.nbytes)
