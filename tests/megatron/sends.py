"""Notes of a rank's sends between pipeline stages: which of them are waited for before other work is computed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

_sends: list[dict[str, Any]] = []
_synchronised = [0]


def note_sends() -> None:
    """Note every send between stages, when its request is waited for, and how often a call stops for the device.

    The real requests are wrapped below Optimus-CC, so that a noted wait is one that the device makes.
    """
    from megatron.core.pipeline_parallel import p2p_communication, schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    computations = itertools.count(1)
    computing = [0]

    class Noting:
        def __init__(self, request: Any, send: dict[str, Any]) -> None:
            self._request, self._send, self._posted = request, send, computing[0]

        def wait(self) -> None:
            self._send["waits before computing" if computing[0] == self._posted else "waits later"] += 1
            self._request.wait()

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def p2p_ops(**arguments: Any) -> Any:
            requests = original(**arguments)
            roles = [role for role in _BATCHED_ORDER if arguments[f"tensor_{role}"] is not None]
            each = requests.items() if isinstance(requests, dict) else zip(roles, requests, strict=True)
            wrapped = {}
            for role, request in each:
                wrapped[role] = request
                if role.startswith("send"):
                    send = {
                        "role": role,
                        # Megatron's activations and their gradients have three dimensions, compressed messages are
                        # flat.
                        "compressed": arguments[f"tensor_{role}"].dim() == 1,
                        "receives": any(other.startswith("recv") for other in roles),
                        "batched": isinstance(requests, list), "waits before computing": 0, "waits later": 0,
                    }  # fmt: skip
                    _sends.append(send)
                    wrapped[role] = Noting(request, send)
            return wrapped if isinstance(requests, dict) else list(wrapped.values())

        return p2p_ops

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            computing[0] = next(computations)
            return step(*args, **kwargs)

        return counted

    def ending(schedule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(schedule)
        def ended(*args: Any, **kwargs: Any) -> Any:
            result = schedule(*args, **kwargs)
            computing[0] = next(computations)  # at its end the schedule has started all computation of the pass
            return result

        return ended

    communicate = P2PCommunicator._communicate

    @functools.wraps(communicate)
    def watching(self: Any, **arguments: Any) -> Any:
        synchronize = torch.cuda.synchronize

        def counted(*args: Any) -> None:
            _synchronised[0] += 1
            synchronize(*args)

        torch.cuda.synchronize = counted
        try:
            return communicate(self, **arguments)
        finally:
            torch.cuda.synchronize = synchronize

    P2PCommunicator._communicate = watching
    for name in ("_batched_p2p_ops", "_p2p_ops"):
        setattr(p2p_communication, name, noting(getattr(p2p_communication, name)))
    for name in ("forward_step", "backward_step"):
        setattr(schedules, name, counting(getattr(schedules, name)))
    for name in ("with", "without"):
        name = f"forward_backward_pipelining_{name}_interleaving"
        setattr(schedules, name, ending(getattr(schedules, name)))


_BATCHED_ORDER = ("send_prev", "recv_prev", "send_next", "recv_next")
"""Order in which a batched call posts its tensors; over gloo each has a request of its own."""


def noted_sends(model: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    from megatron.core.utils import get_model_config

    return {
        "sends": _sends, "synchronised": _synchronised[0], "batch_p2p_sync": get_model_config(model[0]).batch_p2p_sync
    }  # fmt: skip
