"""Values that tests of Megatron runs read from Optimus-CC in a rank: the only module that knows its internals."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from optimus_cc_ext.collectives.exchange import Exchange
from optimus_cc_ext.collectives.legs import sent
from optimus_cc_ext.hooks import handle
from optimus_cc_ext.metrics.error_statistics import ErrorStatistics
from optimus_cc_ext.techniques.compressed_backprop import CompressedBackprop, PipelineLink
from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync
from optimus_cc_ext.techniques.low_rank_gradients import LowRankReducer
from optimus_cc_ext.techniques.messages import BlockMessages, LowRankMessages
from optimus_cc_ext.techniques.param_gather import Shards
from optimus_cc_ext.techniques.session import Session
from optimus_cc_ext.techniques.state import FactorStates
from optimus_cc_ext.techniques.transfer import Transfer
from tests.allocations import Watch

__all__ = [
    "Messages", "Ours", "current", "hash_of", "hot_path", "memory", "observe_links", "read", "slices", "watch_reports",
]  # fmt: skip


def hash_of(tensor: torch.Tensor) -> str:
    """Return the sha256 of the bytes of ``tensor``, of any shape and dtype; of a DTensor, those of the own shard."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(own.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()).hexdigest()


def current() -> Session | None:
    """Return the session of this rank's model; None if the model has none, or is not built yet."""
    return None if handle._shared is None else next(iter(handle._shared[0]), None)


# -- state ------------------------------------------------------------------------------------------------------------


def residuals(session: Session) -> list[torch.Tensor]:
    """Return the residuals of the pipeline link, then those of the gradient buckets."""
    return [residual for technique in session.techniques for residual in technique.states.residuals()]


def memory(session: Session, loss_scale: float = 1.0) -> Iterator[torch.Tensor]:
    """Yield the compression state: residuals, in units of unscaled gradients, and warm starts."""
    for technique in session.techniques:
        for state in technique.states:
            # The division is exact, because a loss scale is a power of two.
            yield state.residual.value.double() / loss_scale
            yield state.warm_start.value


def iteration_of(session: Session) -> int:
    """Return the number of the current iteration, counted from 0."""
    return session.step.iteration


# -- messages ---------------------------------------------------------------------------------------------------------


@dataclass
class Messages:
    """Messages of one end of a link: the decisions, and the sums over all compressed messages, in fp64."""

    history: list[list[bool]] = field(default_factory=list)
    """Decision for each message, by iteration: True if it was compressed."""

    total: torch.Tensor | float = 0.0
    """Sum of the gradients that compression was given (sending end), or of those that it returned (receiving end)."""

    left: torch.Tensor | float = 0.0
    """Sum of the changes of the residual in all iterations, over the chunks; of the sending end."""


def observe_links() -> dict[str, Messages]:
    """Watch the links of this rank; "sent" and "received" appear once there are such links."""
    seen: dict[str, Messages] = {}
    begin, end = CompressedBackprop.begin, CompressedBackprop.end
    send, receive = PipelineLink.send, PipelineLink.receive

    def messages(end: str) -> Messages:
        return seen.setdefault(end, Messages())

    def residual(technique: CompressedBackprop) -> torch.Tensor | float:
        return sum((residual[0].double() for residual in technique.states.residuals()), start=0.0)

    def noting_begin(self: CompressedBackprop, *args: Any) -> None:
        begin(self, *args)
        if self.sending is not None:
            messages("sent").left = messages("sent").left - residual(self)

    def noting_end(self: CompressedBackprop) -> None:
        end(self)
        for name, link in (("sent", self.sending), ("received", self.receiving)):
            if link is not None:
                messages(name).history.append(list(link.compressed))
        if self.sending is not None:
            messages("sent").left = messages("sent").left + residual(self)

    def sending(self: PipelineLink, gradient: torch.Tensor) -> Transfer:
        offered = gradient.detach().double().flatten(0, 1)
        result = send(self, gradient)
        if self.compressed[-1]:
            messages("sent").total = messages("sent").total + offered
        return result

    def receiving(self: PipelineLink, gradient: torch.Tensor) -> Transfer:
        arriving = receive(self, gradient)
        if not self.compressed[-1]:
            return arriving

        def finish_and_add() -> None:
            arriving.after_wait()
            messages("received").total = messages("received").total + gradient.detach().double().flatten(0, 1)

        return replace(arriving, after_wait=finish_and_add)

    CompressedBackprop.begin, CompressedBackprop.end = noting_begin, noting_end  # type: ignore[method-assign]
    PipelineLink.send, PipelineLink.receive = sending, receiving  # type: ignore[method-assign]
    return seen


# -- at the end -------------------------------------------------------------------------------------------------------


@dataclass
class Ours:
    """Report of one rank's session at the end of a run."""

    traffic: dict[str, tuple[float, float]]
    """Bytes that vanilla sends, and bytes sent, by class."""

    leaving: tuple[int, int]
    """Raw and sent bytes that left the rank's node."""

    compressed_matrices: int
    """Number of gradients that this rank compresses."""

    reduced_bytes: list[int]
    """Bytes that each reduction of a bucket sends, in order."""

    remembered: Any
    """State that a checkpoint has, with the hash of every tensor."""

    groups: list[tuple[str, Any]]
    """Description and time limit of each process group that Optimus-CC made."""


def read(session: Session) -> Ours:
    groups = [session.alone, session.embedding.group]
    cpu = torch.device("cpu")
    return Ours(
        traffic={c.tag: counts for c, counts in session.traffic.total().items()},
        leaving=session.traffic.leaving,
        compressed_matrices=sum(reducer.plan.matrices for reducer in session.gradients.reducers),
        reduced_bytes=[sent(reducer.plan.legs()) for reducer in session.gradients.reducers],
        remembered=_hashed(session.state_dict()),
        groups=[(g.group_desc, g._get_backend(cpu).options._timeout) for g in groups if g is not None],
    )


def slices(model: list[torch.nn.Module], optimizer: Any) -> dict[str, int]:
    """Return the number of slices of the largest exchange of each class of traffic that uses the ring."""
    session = current()
    assert session is not None
    lanes = {technique.traffic.tag: technique.lane for technique in session.techniques}
    return {tag: max(len(each.nbytes) for each in lane.exchanges) for tag, lane in lanes.items() if lane.exchanges}


def _hashed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return hash_of(value)
    if isinstance(value, dict):
        return {key: _hashed(item) for key, item in value.items()}
    return [_hashed(item) for item in value] if isinstance(value, list) else value


# -- the hot path -----------------------------------------------------------------------------------------------------

HOT_PATH = {
    CompressedBackprop: ("begin", "end"),
    PipelineLink: ("send", "receive"),
    LowRankReducer: ("start", "second_phase", "finish"),
    BlockMessages: ("send", "receive"),
    Exchange: ("start", "second_phase", "finish"),
    FactorStates: ("commit", "rescale_residuals"),
    FusedEmbeddingSync: ("reduce",),
    Shards: ("encode", "start", "finish"),
}


def hot_path() -> dict[str, list[str]]:
    """Watch the hot path before other code wraps its methods; return each method's requests to torch after the first
    iteration.
    """
    asked: dict[str, list[str]] = {}

    def watched(name: str, original: Callable[..., Any], first: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            session = current()
            if session is None or iteration_of(session) <= first:
                return original(*args, **kwargs)
            with Watch() as watch:
                result = original(*args, **kwargs)
            asked.setdefault(name, []).extend(watch.allocated + watch.read_by_host)
            if isinstance(result, Transfer):
                calls = {call: getattr(result, call) for call in ("after_post", "after_wait", "park")}
                return replace(result, **{call: watched(f"{name}.{call}", f, first) for call, f in calls.items() if f})
            return result

        return method

    for owner, names in HOT_PATH.items():
        # The gather of the first step's changes can be overlapped, and then ends in the second iteration.
        first = int(owner is Shards)
        for name in names:
            setattr(owner, name, watched(f"{owner.__name__}.{name}", getattr(owner, name), first))
    return asked


# -- reports ----------------------------------------------------------------------------------------------------------

_reported: dict[str, Any] = {"reports": [], "links": {}, "residuals": {}, "statistics": 0}


def watch_reports() -> None:
    """Measure a report's values in another way: from the message that is sent, and from the gradient that it was
    made of.
    """
    report_of, compress, keep = Session.report, LowRankMessages.send, ErrorStatistics.error

    def reporting(session: Session, *args: Any) -> Any:
        report = report_of(session, *args)
        _reported["reports"].append(report)
        _reported["residuals"][iteration_of(session)] = [float(r.norm()) for r in residuals(session)]
        return report

    def compressing(self: LowRankMessages, gradient: torch.Tensor, chunk: int, number: int) -> Transfer:
        residual = self._state(gradient, chunk).residual.value.clone()
        transfer = compress(self, gradient, chunk, number)
        offered = residual.view_as(gradient) + gradient
        p, q = self._plan.factors(gradient.shape, gradient.dtype).split(transfer.tensor)
        lost = offered - (p @ q.T).view_as(gradient)
        session = current()
        assert session is not None
        sums = _reported["links"].setdefault(iteration_of(session), [0.0, 0.0])
        sums[0] += float(lost.square().sum())
        sums[1] += float(offered.square().sum())
        return transfer

    def keeping(self: ErrorStatistics, *args: Any) -> None:
        _reported["statistics"] += self.on
        keep(self, *args)

    Session.report, LowRankMessages.send, ErrorStatistics.error = reporting, compressing, keeping


def what_was_reported(model: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    return _reported
