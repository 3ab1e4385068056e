"""Tokens between hosts: all bytes that leave a host, by the kernel's counters, are those that the log counts."""

from pathlib import Path

import pytest

from optimus_cc_ext.metrics.traffic import BETWEEN_NODES
from scripts.bench.cluster.rates import plans
from scripts.bench.cluster.run import Run, train
from scripts.experiments.models import MODELS, Layout, Model, Training
from scripts.hosts.network import UNSHAPED
from tests.shaped_links import needs_namespaces

# Tokens are most of the traffic. The gradients of all ranks are sent in blocks, because gloo's own all-reduce is not
# the ring whose bytes the log counts.
OURS = "--expert-dispatch-format int8 --expert-gradient-format int8 --dp-compression-format int4 --log-interval 1"
WIDE = Model(
    2, hidden=512, heads=4, sequence=128, vocabulary=512, micro_batch=4, micro_batches=4, flags=MODELS["experts"].flags
)


@needs_namespaces
@pytest.mark.full
@pytest.mark.timeout(500)
@pytest.mark.parametrize("way", ["direct", "once-a-node"])
def test_all_that_leaves_a_host_is_what_the_log_counts(tmp_path: Path, way: str) -> None:
    layout = Layout.parsed("pp1dp4n2")
    [plan] = plans([UNSHAPED], chooses=False, each=3, cycles=1, warm_up=1)
    training = Training(model=WIDE, layout=layout, iterations=len(plan.rates), evaluation_iterations=0)
    text = "--mock-data --tokenizer-type NullTokenizer --vocab-size 500"
    ours = [*OURS.split(), "--expert-exchange", way]
    flags = [*training.flags(), *text.split(), *ours]
    run = train(Run("experts", str(layout), "experts", 0, ours), layout, flags, tmp_path, plan, seconds=480)
    assert len(run.iterations) == training.iterations
    # Sums over the run, because a log line that is read late moves bytes from one iteration to the next.
    sent = sum(sum(each.payload) for each in run.iterations)
    tokens, counted = (
        sum(each.traffic[tag][0] for each in run.iterations for tag in tags)
        for tags in (("expert dispatch", "expert gradient"), (BETWEEN_NODES,))
    )
    print(f"{sent / 1e6:.1f} MB by the kernel, {counted / 1e6:.1f} MB by the log, {sent / counted:.4f}")
    if way == "direct":  # Two of the three other ranks are on the other host.
        assert 0.8 < tokens * 2 / 3 / counted < 1
    assert sent == pytest.approx(counted, rel=0.02)
