"""Wraps megatron/core/pipeline_parallel/p2p_communication.py: compresses the messages between pipeline stages.

`_batched_p2p_ops` returns a list of requests that are waited for in order, `_p2p_ops` a dict of requests by role. Both
get other tensors in place of some of their own (`Transfer`); the work that has to follow the transfer becomes a
request.

Megatron's schedules wait for a send before they free the tensor that is sent. A compressed message lies in a buffer of
ours instead, so that nothing has to wait: its request is parked with the buffer (`Transfer.park`), and Megatron gets a
request that is complete at once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from optimus_cc_ext.config.classes import PIPELINE_BACKWARD, PIPELINE_FORWARD
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.patching import around
from optimus_cc_ext.techniques.session import Session
from optimus_cc_ext.techniques.transfer import Transfer

_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
_ROLES = ("send_prev", "recv_prev", "send_next", "recv_next")
_CLASSES = {"send_prev": PIPELINE_BACKWARD, "send_next": PIPELINE_FORWARD}


class _Request(Protocol):
    def wait(self) -> Any: ...


class _Then:
    """Request whose first wait runs a list of steps; without steps, Megatron has nothing to wait for."""

    def __init__(self, *steps: Callable[[], Any]) -> None:
        self._steps = steps

    def wait(self) -> None:
        steps, self._steps = self._steps, ()
        for step in steps:
            step()


def wraps(sessions: Sessions) -> list[tuple[Seam, Callable[[Any], Any]]]:
    parameters = (*(f"tensor_{role}" for role in _ROLES), "group", "prev_pipeline_rank", "next_pipeline_rank")
    return [
        (Seam(f"{_MODULE}:{name}", parameters), around(_communicate, sessions))
        for name in ("_batched_p2p_ops", "_p2p_ops")
    ]


def _communicate(
    sessions: Sessions, original: Callable[..., Any], *, group: torch.distributed.ProcessGroup, **rest: Any
) -> Any:
    """Post the messages of one call between two stages, compressed if they belong to an open pass of a session."""
    session = sessions.with_pipeline(group)
    if session is None:
        return original(group=group, **rest)
    tensors = {role: rest[f"tensor_{role}"] for role in _ROLES}
    transfers = session.transfers(tensors)
    _count(session, tensors, transfers)
    posted = {f"tensor_{role}": transfer.tensor for role, transfer in transfers.items()}
    requests = original(group=group, **rest | posted)
    for transfer in transfers.values():
        transfer.after_post()
    peers = {"send_prev": rest["prev_pipeline_rank"], "send_next": rest["next_pipeline_rank"]}
    if isinstance(requests, dict):
        return {role: _then(request, transfers.get(role), peers.get(role)) for role, request in requests.items()}
    roles = [role for role in _ROLES if tensors[role] is not None]
    if len(roles) != 1:
        # NCCL makes one request for all messages that a batched call posts: after waiting for it, all of them are
        # finished.
        return [*requests, *(_Then(transfer.after_wait) for transfer in transfers.values())]
    (role,) = roles
    return [_then(request, transfers.get(role), peers.get(role)) for request in requests]


def _then(request: _Request, transfer: Transfer | None, receiver: int | None) -> _Request:
    """Return the request for which Megatron waits in place of `request`."""
    if transfer is None:
        return request
    if transfer.park is None or receiver is None:
        return _Then(request.wait, transfer.after_wait)
    transfer.park(lambda: _wait_for(request, receiver))
    return _Then()


def _wait_for(request: _Request, receiver: int) -> None:
    """Wait until a parked message has left.

    Raises:
        OptimusError: the message could not be sent; the error names both ranks.
    """
    try:
        request.wait()
    except RuntimeError as error:
        rank = torch.distributed.get_rank()
        raise OptimusError(f"rank {rank} could not send a compressed message to rank {receiver}: {error}") from error


@contextmanager
def without_device_synchronisation(session: Session, model_config: Any) -> Iterator[None]:
    """Switch `batch_p2p_sync` off for an iteration in which messages between stages are compressed.

    With it, Megatron stops the host after each batched call until the device has done all its work, because of a fault
    in `batch_isend_irecv` that is mended in all supported versions of torch. That would undo the gain of parked sends.
    """
    before = model_config.batch_p2p_sync
    model_config.batch_p2p_sync = before and not session.compresses_between_stages
    try:
        yield
    finally:
        model_config.batch_p2p_sync = before


def _count(session: Session, tensors: Mapping[str, torch.Tensor | None], transfers: Mapping[str, Transfer]) -> None:
    for role, traffic_class in _CLASSES.items():
        tensor = tensors[role]
        if tensor is not None:
            sent = transfers[role].tensor if role in transfers else tensor
            leaving = role in session.leaving_roles
            session.traffic.add(
                traffic_class, (tensor.nbytes, tensor.nbytes * leaving), (sent.nbytes, sent.nbytes * leaving)
            )  # fmt: skip
