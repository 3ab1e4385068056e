"""CB in Megatron's own 1F1B: which messages are compressed, and that LEP loses nothing, on both ends of every link."""

import functools
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext.techniques import compressed_backprop
from optimus_cc_ext.techniques.transfer import Transfer
from tests.megatron.optimus_runs import install, remembered, run_optimus

ITERATIONS = 3


def _record_links() -> None:
    """Log every iteration's decisions, and sum up what compression was offered and what came out of it."""
    sending, receiving = compressed_backprop.SendingLink, compressed_backprop.ReceivingLink

    for end in (sending, receiving):
        end.history, end.total = [], 0

    def recording_end(original: Any) -> Any:
        @functools.wraps(original)
        def end_iteration(self: Any) -> None:
            original(self)
            type(self).history.append(list(self.compressed))

        return end_iteration

    compressed_backprop.Link.end = recording_end(compressed_backprop.Link.end)
    send, receive = sending.send, receiving.receive

    def recording_send(self: Any, gradient: torch.Tensor) -> Any:
        result = send(self, gradient)
        if self.compressed[-1]:
            sending.total = sending.total + gradient.detach().double()
        return result

    def recording_receive(self: Any, gradient: torch.Tensor) -> Any:
        arriving = receive(self, gradient)
        if not self.compressed[-1]:
            return arriving

        def finish_and_add() -> None:
            arriving.after_wait()
            receiving.total = receiving.total + gradient.detach().double()

        return Transfer(arriving.tensor, after_wait=finish_and_add)

    sending.send, receiving.receive = recording_send, recording_receive


def _install_recording() -> None:
    _record_links()
    install()


def _install_unbatched() -> None:
    """Megatron batches its point-to-point calls whenever it does not interleave; ask for the other way."""
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def batched(**tensors: Any) -> None:
        raise AssertionError("this run was to send every tensor by itself")

    p2p_communication._batched_p2p_ops = functools.wraps(p2p_communication._batched_p2p_ops)(batched)
    original = P2PCommunicator.__init__

    def unbatched(self: Any, pp_group: Any, config: Any) -> None:
        config.batch_p2p_comm = False
        original(self, pp_group, config)

    P2PCommunicator.__init__ = unbatched
    _install_recording()


def _ends(model: Any, optimizer: Any) -> dict[str, Any]:
    session = optimus_cc_ext.current_session()
    assert session is not None
    sending, receiving = session.backprop.sending, session.backprop.receiving
    return {
        "sent": (sending.history, sending.total) if sending else None,
        "residual": [r[0].double() for r in session.backprop.states.residuals()] if sending else None,
        "received": (receiving.history, receiving.total) if receiving else None,
    }


def _expected(stages: int, micro_batches: int, receiving_stage: int) -> list[bool]:
    """Independent of the code under test: the receiver's last messages, as many as it had warm-up passes."""
    warmup = min(stages - 1 - receiving_stage, micro_batches)
    return [False] * (micro_batches - warmup) + [True] * warmup


LAYOUTS = [
    *[(stages, m, install_) for stages in (2, 4) for m in (2, 4, 8) for install_ in (_install_recording,)],
    (2, 4, _install_unbatched),
    (4, 2, _install_unbatched),
    (4, 8, _install_unbatched),
]


@pytest.mark.parametrize(
    ("stages", "micro_batches", "before"),
    LAYOUTS,
    ids=[f"P{p}-M{m}-{'unbatched' if b is _install_unbatched else 'batched'}" for p, m, b in LAYOUTS],
)
def test_epilogue_messages_follow_the_rule_on_both_ends_and_lep_loses_nothing(stages, micro_batches, before):
    flags = [
        "--compressed-backprop",
        "--compressed-backprop-rank",
        "4",
        "--no-compression-forecast",
        *("--residual-across-iterations", "carry"),
        "--train-iters",
        str(ITERATIONS),
    ]
    flags += ["--global-batch-size", str(2 * micro_batches)]
    layout = (stages, ["--pipeline-model-parallel-size", str(stages)])
    ends = [run.probed for run in run_optimus(layout, flags, before=before, probe=_ends)]
    for receiving_stage in range(stages - 1):
        receiver, sender = ends[receiving_stage], ends[receiving_stage + 1]
        rule = [_expected(stages, micro_batches, receiving_stage)] * ITERATIONS
        assert receiver["received"][0] == rule
        assert sender["sent"][0] == rule
        offered, got = sender["sent"][1], receiver["received"][1]
        (residual,) = sender["residual"]
        missing = offered - got - residual.view_as(offered)
        # Residuals start at zero. Up to 9 fp32 sums and one final subtraction, relative to what was summed.
        assert missing.abs().max() < 1e-5 * offered.abs().max()
        assert residual.abs().max() > 1e-3 * offered.abs().max(), "rank 4 must leave something out"


def test_in_their_warmup_messages_travel_as_they_are_on_both_ends() -> None:
    flags = ["--compressed-backprop", "--compressed-backprop-rank", "4", "--no-compression-forecast"]
    flags += ["--compressed-backprop-warmup", "0.5", "--train-iters", "4", "--global-batch-size", "8"]
    layout = (2, ["--pipeline-model-parallel-size", "2"])
    first, last = (run.probed for run in run_optimus(layout, flags, before=_install_recording, probe=_ends))
    rule = _expected(2, 4, 0)
    assert first["received"][0] == last["sent"][0] == [[False] * 4] * 2 + [rule] * 2


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    session = optimus_cc_ext.current_session()
    assert session is not None
    state = remembered(session)
    return {"state": [t.clone() for t in state], "traffic": session.traffic.as_list()}


def test_evaluation_touches_nothing():
    flags = ["--optimus-cc", "--compressed-backprop-rank", "4", "--dp-compression-rank", "4", "--train-iters", "4"]
    layout = (4, ["--pipeline-model-parallel-size", "2"])
    without = run_optimus(layout, flags, probe=_state)
    with_evaluation = run_optimus(layout, [*flags, "--eval-interval", "2", "--eval-iters", "2"], probe=_state)
    assert len(with_evaluation[-1].evaluation_losses) >= 2
    for quiet, evaluated in zip(without, with_evaluation, strict=True):
        assert quiet.losses == evaluated.losses
        assert quiet.weights == evaluated.weights
        assert quiet.probed["traffic"] == evaluated.probed["traffic"]
        assert len(quiet.probed["state"]) > 0
        for a, b in zip(quiet.probed["state"], evaluated.probed["state"], strict=True):
            assert torch.equal(a, b)
