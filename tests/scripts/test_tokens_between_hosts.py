"""Tokens between hosts: all bytes that leave a host, by the kernel's counters, are those that the log counts."""

from dataclasses import replace
from pathlib import Path

import pytest

from optimus_cc_ext.metrics.traffic import BETWEEN_NODES
from scripts.bench.cluster.rates import plans
from scripts.bench.cluster.run import Run, train
from scripts.experiments.models import MODELS, Layout, Training
from scripts.hosts.network import UNSHAPED
from tests.shaped_links import needs_namespaces

# Tokens are most of the traffic. The gradients of all ranks are sent in blocks, because gloo's own all-reduce is not
# the ring whose bytes the log counts.
OURS = "--dp-compression-format int4 --log-interval 1"
INT8 = "--expert-dispatch-format int8 --expert-gradient-format int8 --expert-exchange"
WIDE = replace(MODELS["experts-top8"], micro_batch=4, vocabulary=512)


@needs_namespaces
@pytest.mark.full
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("hosts", "way"),
    [
        ("pp1dp4n2", f"{INT8} direct"), ("pp1dp4n2", f"{INT8} once-a-node"), ("pp1dp8n4", f"{INT8} once-a-node"),
        ("pp1dp8n2", f"{INT8} once-a-node"), ("pp1dp4n2", "--expert-exchange once-a-node"),
    ],
)  # fmt: skip
def test_all_that_leaves_a_host_is_what_the_log_counts(tmp_path: Path, hosts: str, way: str) -> None:
    layout = Layout.parsed(hosts)
    [plan] = plans([UNSHAPED], chooses=False, each=3, cycles=1, warm_up=1)
    experts = f"{WIDE.flags} --expert-model-parallel-size {layout.replicas}"
    training = Training(
        model=replace(WIDE, flags=experts), layout=layout, iterations=len(plan.rates), evaluation_iterations=0
    )  # fmt: skip
    text = "--mock-data --tokenizer-type NullTokenizer --vocab-size 500"
    ours = [*OURS.split(), *way.split()]
    flags = [*training.flags(), *text.split(), *ours]
    run = train(Run("experts", str(layout), "experts", 0, ours), layout, flags, tmp_path, plan, seconds=480)
    assert len(run.iterations) == training.iterations
    # Sums over the run, because a log line that is read late moves bytes from one iteration to the next.
    sent = sum(sum(each.payload) for each in run.iterations)
    (tokens, _), (counted, dense) = (
        [sum(each.traffic[tag][side] for each in run.iterations for tag in tags) for side in (0, 1)]
        for tags in (("expert dispatch", "expert gradient"), (BETWEEN_NODES,))
    )
    print(
        f"{hosts}, {way}: {sent / 1e6:.1f} MB by the kernel, {counted / 1e6:.1f} MB by the log, {sent / counted:.4f}; "
        f"vanilla {dense / 1e6:.1f} MB, {counted / dense:.3f}"
    )
    if way.endswith("direct"):  # Two of the three other ranks are on the other host; experts get about equally many.
        assert 0.8 < tokens * 2 / 3 / counted < 1.05
    assert sent == pytest.approx(counted, rel=0.03)
