"""Wraps megatron/core/pipeline_parallel/p2p_communication.py: gradients between stages travel compressed.

`_batched_p2p_ops` returns a list of requests that are waited for in order, `_p2p_ops` a dict of them. Both get the
packed message in place of `tensor_send_prev`, and a packed buffer in place of `tensor_recv_next`; a request that
decompresses after the real ones have finished is added. Once all are posted, and before any is waited for, the sender
computes what it has to remember of its message: that needs not be on the way of the wire.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Session
from optimus_cc_ext.traffic import TrafficClass

__all__ = ["wraps"]

_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
_PARAMETERS = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next", "group")


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
        def p2p_ops(
            *,
            tensor_send_prev: torch.Tensor | None,
            tensor_recv_prev: torch.Tensor | None,
            tensor_recv_next: torch.Tensor | None,
            tensor_send_next: torch.Tensor | None,
            group: torch.distributed.ProcessGroup,
            **rest: Any,
        ) -> Any:
            tensors = {"tensor_send_prev": tensor_send_prev, "tensor_recv_next": tensor_recv_next}
            finish: dict[str, Callable[[], None]] = {}
            if session.active and session.grid is not None and group is session.grid.pipeline_group:
                tensors, finish = _exchange(session, tensor_send_prev, tensor_recv_next)
                if tensor_send_next is not None:
                    nbytes = tensor_send_next.nbytes
                    session.traffic.add(TrafficClass.PIPELINE_FORWARD, raw=nbytes, sent=nbytes)
                if tensor_recv_prev is not None and session.sending is not None and session.sending.statistics.on:
                    finish["recv_prev"] = partial(session.sending.statistics.activation, tensor_recv_prev)
            received = {"tensor_recv_prev": tensor_recv_prev, "tensor_send_next": tensor_send_next}
            requests = original(group=group, **received, **tensors, **rest)
            if "send_prev" in finish and session.sending is not None:
                session.sending.remember()  # while the message travels, and before anybody waits for it
            return _finish_with(requests, finish)

        return p2p_ops

    return [(Seam(f"{_MODULE}:{name}", _PARAMETERS), wrap) for name in ("_batched_p2p_ops", "_p2p_ops")]


def _exchange(
    session: Session, send_prev: torch.Tensor | None, recv_next: torch.Tensor | None
) -> tuple[dict[str, torch.Tensor | None], dict[str, Callable[[], None]]]:
    """The tensors to put on the wire, and what to do when `send_prev` and `recv_next` have finished."""
    tensors: dict[str, torch.Tensor | None] = {"tensor_send_prev": send_prev, "tensor_recv_next": recv_next}
    finish: dict[str, Callable[[], None]] = {}
    if send_prev is not None:
        sent = send_prev
        if session.sending is not None:
            sent, finish["send_prev"] = session.sending.send(send_prev)
            tensors["tensor_send_prev"] = sent
        session.traffic.add(TrafficClass.PIPELINE_BACKWARD, raw=send_prev.nbytes, sent=sent.nbytes)
    if recv_next is not None and session.receiving is not None:
        tensors["tensor_recv_next"], finish["recv_next"] = session.receiving.receive(recv_next)
    return tensors, finish


def _finish_with(requests: Any, finish: dict[str, Callable[[], None]]) -> Any:
    if isinstance(requests, dict):
        return {name: _Then(request, finish[name]) if name in finish else request for name, request in requests.items()}
    return [*requests, *(_Then(None, action) for action in finish.values())]
