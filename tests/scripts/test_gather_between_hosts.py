"""The exact gather between hosts: it saves as many bytes by the kernel's counters as the log says."""

from pathlib import Path

import pytest

from optimus_cc_ext.config.classes import PARAM_GATHER
from optimus_cc_ext.metrics.traffic import BETWEEN_NODES
from scripts.bench.cluster.rates import plans
from scripts.bench.cluster.run import Iteration, Run, train
from scripts.experiments.models import MODELS, Layout, Training
from scripts.hosts.network import UNSHAPED
from tests.shaped_links import needs_namespaces


@needs_namespaces
@pytest.mark.full
@pytest.mark.timeout(500)
@pytest.mark.parametrize("hosts", ["pp1dp2z1", "pp1dp4z1n2"])
def test_what_an_exact_gather_saves_between_hosts_is_what_the_log_counts(tmp_path: Path, hosts: str) -> None:
    layout, model = Layout.parsed(hosts), MODELS["small"]
    [plan] = plans([UNSHAPED], chooses=False, each=8, cycles=1, warm_up=1)
    training = Training(model=model, layout=layout, iterations=len(plan.rates), evaluation_iterations=0)
    text = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --log-interval 1"
    found: dict[str, list[Iteration]] = {}
    for variant, ours in (("vanilla", []), ("exact", ["--param-gather-format", "exact"])):
        flags = [*training.flags(), *text.split(), *ours]
        run = Run("small", str(layout), variant, 0, ours)
        found[variant] = train(run, layout, flags, tmp_path / variant, plan, seconds=240).iterations
    assert [each.loss for each in found["exact"]] == [each.loss for each in found["vanilla"]]
    # Sums over the run, because a log line that is read late moves bytes from one iteration to the next.
    dense, exact = (sum(sum(each.payload) for each in found[variant]) for variant in ("vanilla", "exact"))
    # Where each rank is alone on its host, all of its bytes leave the host.
    tag = BETWEEN_NODES if layout.beside > 1 else PARAM_GATHER.tag
    (counted, raw), (gathered, whole) = (
        [sum(each.traffic[name][side] for each in found["exact"]) for side in (0, 1)]
        for name in (tag, PARAM_GATHER.tag)
    )
    saved, megabytes = (dense - exact) / (raw - counted), [each / 1e6 for each in (dense - exact, raw - counted)]
    print(f"{hosts}: saved {megabytes[0]:.2f} MB by the kernel, {megabytes[1]:.2f} MB by the log, {saved:.4f}")
    assert gathered < 0.4 * whole and saved == pytest.approx(1, abs=0.02)
