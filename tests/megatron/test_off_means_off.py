"""Laws: off means off, random numbers are ours, evaluation touches nothing; several ways to install give the same
run.
"""

from tests.megatron import runs as table
from tests.megatron.interventions import compress_by_config
from tests.megatron.specs import RunSpec, full, uses


@uses(
    (table.VANILLA, table.INSTALLED),
    full(table.VANILLA_TP2, table.INSTALLED_TP2),
    full(table.VANILLA, table.UNINSTALLED),
)
def test_without_a_technique_a_run_is_bit_identical_to_vanilla(runs):
    vanilla, off = runs
    for theirs, mine in zip(vanilla.ranks, off.ranks, strict=True):
        # `==` compares floats by their bits: every loss, gradient norm and weight is the same.
        assert mine.losses == theirs.losses and len(mine.losses) >= 4
        assert mine.evaluation_losses == theirs.evaluation_losses and mine.evaluation_losses
        assert mine.grad_norms == theirs.grad_norms
        assert mine.weights == theirs.weights
        assert mine.random_states == theirs.random_states


@uses((table.VANILLA, table.LOSSY_EVALUATED))
def test_compression_does_not_draw_from_the_random_generators(runs):
    vanilla, lossy = runs
    for theirs, mine in zip(vanilla.ranks, lossy.ranks, strict=True):
        assert mine.random_states == theirs.random_states
        assert len(set(theirs.random_states)) == 8, "dropout draws from them"
    assert lossy.ranks[-1].losses != vanilla.ranks[-1].losses, "compression was on, and must have been felt"


@uses((table.LOSSY_RUN, table.LOSSY_EVALUATED))
def test_evaluation_touches_nothing(runs):
    without, evaluated = runs
    assert len(evaluated.ranks[-1].evaluation_losses) >= 2 and not without.ranks[-1].evaluation_losses
    for quiet, mine in zip(without.ranks, evaluated.ranks, strict=True):
        assert quiet.losses == mine.losses
        assert quiet.weights == mine.weights
        assert quiet.ours.traffic == mine.ours.traffic
        assert quiet.steps == mine.steps and all(step.memory for step in mine.steps)
        assert quiet.ours.remembered == mine.ours.remembered


@uses(full(table.LOSSY_RUN, table.BY_CONFIG))
def test_a_configuration_and_its_flags_train_alike(runs):
    by_flags, by_config = runs
    for a, b in zip(by_flags.ranks, by_config.ranks, strict=True):
        assert a.losses == b.losses
        assert a.weights == b.weights
        assert a.ours.traffic == b.ours.traffic


REFUSED = {
    "--ddp-reduce-scatter": (
        "--use-distributed-optimizer --ddp-reduce-scatter-with-fp32-accumulation",
        "dp_compression: ",
    ),
    "--fused-embedding-sync": ("--untie-embeddings-and-output-weights", "fused_embedding_sync: "),
}


@uses(
    *(
        RunSpec(name=f"refused: {named}", layout=table.PP2_DP2, flags=flags, before=(compress_by_config,), ends=True)
        for named, (flags, _) in REFUSED.items()
    )
)
def test_what_is_not_supported_is_refused_to_a_configuration_too(runs):
    _, named = REFUSED[runs.spec.name.removeprefix("refused: ")]
    for rank in runs.ranks:
        assert not rank.losses
        assert isinstance(rank.ended, str) and rank.ended.startswith(named)
