"""Wraps megatron/core/transformer/moe/token_dispatcher.py: compresses the all-to-all of a mixture's tokens, and sends a
token once to each node.

The wrap is around the name `all_to_all` of this module, because other modules of Megatron use the function for other
traffic. The dispatcher `alltoall` calls it for rows of tokens, and for their probabilities, which stay dense. Three
methods of the dispatcher say whose rows these are, and when numbers of rows are copied to the host: ours with them.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from optimus_cc_ext.collectives.two_hops import Numbers, TwoHops
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.patching import around
from optimus_cc_ext.techniques.expert_rows import Direct, RowExchange

_MODULE = "megatron.core.transformer.moe.token_dispatcher"
_DISPATCHER = f"{_MODULE}:MoEAlltoAllTokenDispatcher"


class _Calls(threading.local):
    """The call of a dispatcher that is running in this thread; a recomputed layer runs in one of autograd's threads."""

    dispatcher: Any = None
    combines = False


class _Hops:
    """The numbers and the ways of dispatches that go once a node, by dispatcher, until its next dispatch."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions, self._calls = sessions, _Calls()
        self._numbers: WeakKeyDictionary[Any, Numbers] = WeakKeyDictionary()
        self._ways: WeakKeyDictionary[Any, TwoHops] = WeakKeyDictionary()

    def count(self, original: Callable[..., Any], dispatcher: Any, point: str, *args: Any, **kwargs: Any) -> Any:
        """Count the rows of a dispatch ahead of Megatron's copies to the host, for whose end Megatron waits."""
        if point == dispatcher.cuda_dtoh_point and not dispatcher.drop_and_pad:
            self._ways.pop(dispatcher, None)
            session = self._sessions.with_experts_on(dispatcher.ep_group) if dispatcher.ep_size > 1 else None
            if session is not None and (groups := session.expert_hops) is not None:
                numbers = Numbers(dispatcher.routing_map, dispatcher.input_splits, groups)
                side = dispatcher.cuda_dtoh_stream
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    numbers.to_host()
                self._numbers[dispatcher] = numbers
        return original(dispatcher, point, *args, **kwargs)

    def call(
        self, combines: bool, original: Callable[..., Any], dispatcher: Any, *args: Any, **kwargs: Any
    ) -> Any:  # fmt: skip
        """Run a call that sends rows."""
        self._calls.dispatcher, self._calls.combines = dispatcher, combines
        try:
            return original(dispatcher, *args, **kwargs)
        finally:
            self._calls.dispatcher = None

    def way(self) -> tuple[TwoHops | None, bool]:
        """Return the way of the running call's rows, and whether they are combined; None: they go direct."""
        dispatcher = self._calls.dispatcher
        if dispatcher is not None and (numbers := self._numbers.pop(dispatcher, None)) is not None:
            sent, received = dispatcher.input_splits, _numbers(dispatcher.output_splits)
            self._ways[dispatcher] = TwoHops(numbers, int(sum(sent)), received or [])
        return self._ways.get(dispatcher) if dispatcher is not None else None, self._calls.combines


def wraps(sessions: Sessions) -> list[tuple[Seam, Callable[[Any], Any]]]:
    hops = _Hops(sessions)
    parameters = ("group", "input_", "output_split_sizes_", "input_split_sizes")
    return [
        (Seam(f"{_MODULE}:all_to_all", parameters), around(_all_to_all, sessions, hops)),
        (Seam(f"{_DISPATCHER}._maybe_dtoh_and_synchronize", ("point",)), around(hops.count)),
        (Seam(f"{_DISPATCHER}.token_dispatch"), around(hops.call, False)),
        (Seam(f"{_DISPATCHER}.token_combine"), around(hops.call, True)),
    ]


def _all_to_all(
    sessions: Sessions, hops: _Hops, original: Callable[..., Any], group: torch.distributed.ProcessGroup,
    input_: torch.Tensor, output_split_sizes_: Any = None, input_split_sizes: Any = None, **rest: Any,
) -> Any:  # fmt: skip
    """Exchange tokens or probabilities; compress tokens that belong to an open pass of a session, or send them once."""
    session = sessions.with_experts_on(group) if group.size() > 1 else None
    if session is None:
        return original(group, input_, output_split_sizes_, input_split_sizes, **rest)
    received, sent = _numbers(output_split_sizes_), _numbers(input_split_sizes)
    equal = [input_.shape[0] // group.size()] * group.size()
    forward, backward = session.rows
    hop, combines = hops.way() if forward.is_row(input_) else (None, False)
    way: Any = hop or Direct(group, received, sent)
    there, back = (way.collect, way.spread) if hop is not None and combines else (way.spread, way.collect)
    forth, home = (
        hop if hop is None else partial(hop.nbytes, spread=spread, first=first)
        for spread, first in ((not combines, not combines), (combines, False))
    )
    forward.count(session.traffic, input_, group, sent or equal, forth)
    backward.seen |= forward.seen
    # Without gradients, in the first forward pass of a recomputed layer, no backward pass follows.
    if torch.is_grad_enabled() and input_.requires_grad:
        backward.count(session.traffic, input_, group, received or equal, home)
    if hop is None and forward.codec_of(input_) is None and backward.codec_of(input_) is None:
        return original(group, input_, output_split_sizes_, input_split_sizes, **rest)
    return RowExchange.apply(input_, forward, backward, there, back)


def _numbers(splits: Any) -> Sequence[int] | None:
    """Return Megatron's split sizes, a NumPy array or a list on the host, as numbers; None: all parts are equal."""
    return None if splits is None else [int(size) for size in splits]
