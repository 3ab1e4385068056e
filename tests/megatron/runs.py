"""Table of Megatron runs: each run is made once in a test session, when a test first asks for it, and recorded in full.

Runs with equal specifications are one run, whatever their names. Most have 2 stages and 2 replicas, and 2
tensor-parallel ranks where that matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tests.megatron import interventions, recording, sends
from tests.megatron.specs import Layout, RunSpec

PP2: Layout = (2, "--pipeline-model-parallel-size 2")
PP2_DP2: Layout = (4, "--pipeline-model-parallel-size 2")
PP4: Layout = (4, "--pipeline-model-parallel-size 4")
TP2_PP2_DP2: Layout = (8, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2")

# -- flags ------------------------------------------------------------------------------------------------------------

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
EVALUATED = "--eval-interval 4 --eval-iters 1"
EIGHT = f"{DROPOUT} --train-iters 8 --lr-decay-iters 8"
SHORT = "--global-batch-size 8 --lr-decay-iters 8 --train-iters 8"
TWENTY = "--train-iters 20"
SHARDED = "--use-distributed-optimizer"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1"
SMALL_BUCKETS = "--ddp-bucket-size 40000"  # of the first stage's gradients, Megatron makes several buckets of this size
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

OFF = ""
FE = "--fused-embedding-sync"
# With hidden size 64, FFN size 256 and 64 x 2 rows no gradient has a matrix rank above 128. Compression is forced,
# because low rank saves nothing at this size.
LOSSLESS_EPILOGUE = "--compressed-backprop --compressed-backprop-rank 128 --force-compression"
LOSSLESS_CB = f"{LOSSLESS_EPILOGUE} --compressed-backprop-messages all"
LOSSLESS_SC = "--dp-compression --dp-compression-rank 256 --force-compression"
LOSSLESS = f"{LOSSLESS_CB} {LOSSLESS_SC} {FE}"
# These flags switch every technique on, at a compression rank at which each has an error. Residuals are carried, so
# that steps, and resumed runs, depend on those of the iteration before.
_CARRIED = "--residual-across-iterations carry"
DROPPED = "--residual-across-iterations drop"
LOSSY = f"--optimus-cc --compressed-backprop-rank 4 --dp-compression-rank 4 --dp-compression-stages all {_CARRIED}"
CB4 = f"--compressed-backprop --compressed-backprop-rank 4 {_CARRIED}"
SC4 = "--dp-compression --dp-compression-rank 4"
BALANCED = "--optimus-cc balanced --dp-compression-stages all"
BLOCKS = f"{BALANCED} --dp-compression-format int4"
BLOCKS_WITH_LEP = f"{BLOCKS} --lazy-error-propagation"
GATHER = "--param-gather-format int4"
EXACT_BLOCKS = f"{BLOCKS_WITH_LEP} --exact-blocks"
ALL_MESSAGES = f"{CB4} --compressed-backprop-messages all {FE} {SC4}"

# -- off, and lossy ---------------------------------------------------------------------------------------------------

VANILLA = RunSpec(name="vanilla", flags=f"{EIGHT} {EVALUATED}")
INSTALLED = VANILLA.but("off", ours=OFF)
VANILLA_TP2 = RunSpec(name="TP2 vanilla", layout=TP2_PP2_DP2, flags=f"{DROPOUT} {EVALUATED}")
INSTALLED_TP2 = VANILLA_TP2.but("TP2 off", ours=OFF)
UNINSTALLED = VANILLA.but("uninstalled", before=(interventions.start_and_remove,))

LOSSY_RUN = RunSpec(name="lossy", flags=EIGHT, ours=LOSSY)
LOSSY_EVALUATED = LOSSY_RUN.but("lossy, evaluated", flags=EVALUATED)
LOSSY_TP2 = RunSpec(name="TP2 lossy", layout=TP2_PP2_DP2, flags=EIGHT, ours=LOSSY)
BLOCKS_RUN = RunSpec(name="blocks", flags=EIGHT, ours=BLOCKS)
BLOCKS_EVALUATED = BLOCKS_RUN.but("blocks, evaluated", flags=EVALUATED)
BLOCKS_TP2 = RunSpec(name="TP2 blocks", layout=TP2_PP2_DP2, flags=EIGHT, ours=BLOCKS_WITH_LEP)
GATHER_TP2 = RunSpec(name="TP2 gather", layout=TP2_PP2_DP2, flags=f"{EIGHT} --bf16 {SHARDED}", ours=BLOCKS)
BY_CONFIG = RunSpec(name="by configuration", flags=EIGHT, before=(interventions.compress_by_config,))
WARMUPS = VANILLA.but(
    "warm-ups", ours=f"{CB4} {SC4} --compressed-backprop-warmup 0.5 --dp-compression-warmup 0.5"
)  # fmt: skip
FUSED = VANILLA.but("FE", ours=FE)
UNBATCHED = RunSpec(
    name="unbatched, PP4", layout=PP4, flags="--train-iters 3 --global-batch-size 8",
    ours=f"{CB4} --pipeline-forward-format int8", before=(interventions.unbatched,),
)  # fmt: skip
INTERLEAVED_RUN = RunSpec(
    name="interleaved, PP4", layout=PP4,
    flags=f"{INTERLEAVED} --num-layers 8 --train-iters 3 --global-batch-size 8 --no-overlap-p2p-communication",
    ours=f"{CB4} {DROPPED} --pipeline-forward-format int8",
)  # fmt: skip
# Compressed in both directions, every message.
_BETWEEN_STAGES = "--pipeline-forward-format int8 --compressed-backprop-format int8"
_OVERLAPPED_SENDS = RunSpec(
    name="overlapped p2p", layout=PP2, flags=f"{INTERLEAVED} --train-iters 3", ours=_BETWEEN_STAGES,
    before=(sends.note_sends,), probe=sends.noted_sends,
)  # fmt: skip
SENDS = [
    _OVERLAPPED_SENDS,
    _OVERLAPPED_SENDS.but("overlapped p2p, warm-up and flush", flags="--overlap-p2p-communication-warmup-flush"),
    _OVERLAPPED_SENDS.but(
        "overlapped p2p, low rank",
        ours=f"--compressed-backprop-format low-rank {CB4} --compressed-backprop-messages all {DROPPED}",
    ),
]
BATCHED_SENDS = replace(_OVERLAPPED_SENDS, name="batched p2p", flags="--train-iters 3")
BATCHED_SENDS_OFF = replace(BATCHED_SENDS, name="batched p2p, off", ours=OFF)
WATCHED = RunSpec(
    name="watched, bf16 buckets", flags="--bf16 --grad-reduce-in-bf16 --train-iters 3", ours=ALL_MESSAGES, watched=True
)
REPORTED = RunSpec(
    name="metrics", before=(recording.watch_reports,), probe=recording.what_was_reported,
    flags=(
        # TensorBoard gets Megatron's scalars of every iteration.
        "--train-iters 6 --log-interval 2 --eval-interval 3 --eval-iters 1 --tensorboard-dir {here}"
        " --log-timers-to-tensorboard"
    ),
    ours=(
        f"{CB4} --compressed-backprop-messages all {SC4} --dp-compression-stages 1 --compression-error-statistics"
    ),
)  # fmt: skip

# -- steps that are skipped or repeated -------------------------------------------------------------------------------

# With a static loss scale Megatron skips steps whose gradients are not finite, in bf16 as well.
_STATIC = "--bf16 --loss-scale 1 --no-check-for-nan-in-loss-and-grad --train-iters 6"
POISONED, POISONED_SHARDED = (
    RunSpec(name=f"poisoned, {name}", flags=f"{_STATIC} {flags}", ours=LOSSY, before=(interventions.poison,))
    for name, flags in (("whole", ""), ("sharded", f"{SHARDED} --overlap-grad-reduce"))
)
POISONED_BLOCKS = RunSpec(
    name="poisoned, blocks", flags=f"{_STATIC} {SHARDED} --overlap-grad-reduce", ours=BLOCKS,
    before=(interventions.poison,),
)  # fmt: skip
POISONED_GATHER = RunSpec(
    name="poisoned, gather", flags=f"{_STATIC} {SHARDED} --overlap-grad-reduce --overlap-param-gather",
    ours=f"{GATHER} --fused-embedding-sync", before=(interventions.poison,),
)  # fmt: skip
POISONED_TO_THE_END = RunSpec(
    name="poisoned, checked by Megatron", flags="--save {here} --save-interval 100 --ckpt-format torch",
    ours=LOSSY, before=(interventions.poison,), ends=True,
)  # fmt: skip
# So large at first that gradients overflow; doubled again after every two applied steps.
SCALED = RunSpec(
    name="fp16, loss scaled", ours=f"{CB4} {SC4}",
    flags="--fp16 --initial-loss-scale 4194304 --hysteresis 1 --loss-scale-window 2 --train-iters 10",
)  # fmt: skip

OUTLIER = 4
"""Number of the iteration, counted from 0, whose loss is multiplied by 100."""
USUAL = RunSpec(name="clipped as usual", flags=f"--clip-grad 1 --train-iters {OUTLIER + 11}", ours=f"{CB4} {SC4}")
CLIPPED = USUAL.but("an outlier clipped", before=(partial(interventions.outlier, OUTLIER, 100.0),))

# In a checkpoint that Megatron 0.19 saves in the middle of a step, the states of dropout's generators are not those
# before the step (the second restoring uses the very dict that the repeated pass changed), so these runs have no
# dropout. Of Megatron's checks, this is the only one whose failure does not end the run: training goes on from the
# repeated pass.
_INJECTED = "--rerun-mode validate_results --error-injection-rate 1 --error-injection-type"
_NOT_FATAL = "--check-for-large-grads --no-check-for-nan-in-loss-and-grad"
_CALM = RunSpec(
    name="-", ours=ALL_MESSAGES,
    flags=f"{SHORT} --train-iters 5 {NO_DROPOUT} --ckpt-format torch_dist",
)  # fmt: skip
CALM = _CALM.but("no step repeated", flags=_NOT_FATAL)
REPEATED = CALM.but("every step repeated", flags=f"{_INJECTED} transient_error")
STOPPED = _CALM.but(
    "stopped in a step", flags=f"{_INJECTED} persistent_error --save {{here}} --save-interval 100", ends=True
)  # fmt: skip
AFTER_STOP = _CALM.but("resumed in that step", loaded=STOPPED, flags="--load {loaded} --rerun-mode disabled")

# -- checkpoints ------------------------------------------------------------------------------------------------------

_IN_BACKGROUND = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"


def saving(name: str, flags: str, ours: str = ALL_MESSAGES, *, interval: int = 4, **settings: Any) -> RunSpec:
    flags = f"{SHORT} {flags} --save {{here}} --save-interval {interval}"
    return RunSpec(name=name, flags=flags, ours=ours, **settings)


def resumed(run: RunSpec, iteration: int) -> RunSpec:
    """Resume `run` from `iteration` on, without a background writer, whose start would take longer than the run.

    `--ckpt-step` cannot be used: with the distributed optimizer and `torch` Megatron takes the last checkpoint.
    """
    return replace(
        run, name=f"{run.name}, resumed at {iteration}", watched=False,
        flags=f"{run.flags.replace(_IN_BACKGROUND, '')} --load {{here}}",
        copies=run, spoil=partial(interventions.only, iteration),
    )  # fmt: skip


SAVED = saving("torch_dist", "--ckpt-format torch_dist")
SAVED_AGAIN = resumed(SAVED, 4)
SAVED_SHARDED = saving(
    "torch, bf16, sharded, interleaved",
    f"--ckpt-format torch --bf16 {SHARDED} --overlap-grad-reduce {INTERLEAVED}", f"{ALL_MESSAGES} {DROPPED}",
    watched=True,
)  # fmt: skip
# Two ranks only, because each starts a process that imports Megatron, to write.
SAVED_IN_BACKGROUND = saving(
    "async", f"--ckpt-format torch_dist {_IN_BACKGROUND}", CB4, layout=PP2, before=(interventions.hold_up_writers,)
)
FAILED_IN_BACKGROUND = replace(
    SAVED_IN_BACKGROUND,
    name="async, not written",
    ends=True,
    before=(interventions.fail_to_write_the_last_on_rank_1, interventions.impatient),
)
AFTER_FAILURE = replace(resumed(FAILED_IN_BACKGROUND, 4), spoil=None, before=(), ends=False)
SAVED_BLOCKS = saving(
    "blocks, bf16 buckets, overlapped, interleaved",
    f"--ckpt-format torch_dist --bf16 --grad-reduce-in-bf16 {OVERLAPPED} {INTERLEAVED} {SMALL_BUCKETS}",
    f"{BLOCKS_WITH_LEP} --param-gather-format dense", watched=True, before=(interventions.count_gathers,),
    probe=interventions.counted_gathers,
)  # fmt: skip
SAVED_GATHER = SAVED_BLOCKS.but("gather, overlapped, interleaved", ours=GATHER)
SAVED_OFTEN = [
    replace(
        run, name=f"{run.name}, often", flags=run.flags.replace("--save-interval 4", "--save-interval 2"), before=()
    )
    for run in (SAVED, SAVED_SHARDED, SAVED_IN_BACKGROUND)
]
SAVED_OFTEN += [
    saving(name, f"--ckpt-format {flags}", f"{ALL_MESSAGES} {ours}", interval=2)
    for name, flags, ours in (
        ("torch, fp32, deterministic, sharded", f"torch --deterministic-mode {SHARDED}", ""),
        ("torch_dist, fp32, interleaved", f"torch_dist {INTERLEAVED}", ""),
        ("torch_dist, bf16, overlapped", f"torch_dist --bf16 {OVERLAPPED}", ""),
        ("async, overlapped, interleaved", f"torch_dist {_IN_BACKGROUND} {OVERLAPPED} {INTERLEAVED}", ""),
        ("async, bf16, bf16 state", f"torch_dist {_IN_BACKGROUND} --bf16", "--compression-state-dtype bf16"),
    )
]


def loading(name: str, ours: str, flags: str = "", **settings: Any) -> RunSpec:
    """Make a run that goes on from iteration 4 of SAVED, unless `settings` say otherwise, to iteration 8."""
    settings = {"loaded": SAVED, **settings}
    flags = f"{SHORT} --ckpt-format torch_dist --load {{loaded}} --ckpt-step 4 {flags}"
    return RunSpec(name=name, flags=flags, ours=ours, **settings)


IN_FOUR_STAGES = loading("loaded in 4 stages", CB4, layout=PP4)
AT_ANOTHER_RANK = loading("loaded at rank 8", f"{ALL_MESSAGES} --compressed-backprop-rank 8")
IN_OTHER_BUCKETS = loading("loaded in other buckets", ALL_MESSAGES, "--overlap-grad-reduce --ddp-num-buckets 2")
FINETUNED = loading("finetuned", ALL_MESSAGES, "--finetune")
WITHOUT_OPTIMIZER = loading("loaded without optimizer", ALL_MESSAGES, "--no-load-optim")
SWITCHED_OFF = loading("switched off", OFF, "--save {here} --save-interval 100 --exit-interval 5")
SWITCHED_ON = loading("switched on again", ALL_MESSAGES, "--ckpt-step 5", loaded=SWITCHED_OFF)
OVERWRITTEN = RunSpec(
    name="overwritten by vanilla", copies=SAVED,
    flags=f"{SHORT} --ckpt-format torch_dist --save {{here}} --save-interval 100 --exit-interval 4",
)  # fmt: skip
AFTER_VANILLA = loading("loaded after vanilla", ALL_MESSAGES, loaded=OVERWRITTEN)
DAMAGED = loading(
    "loaded with a damaged file", ALL_MESSAGES, "--load {here}", copies=SAVED, spoil=interventions.damage,
    before=(interventions.impatient,), ends=True,
)  # fmt: skip
CURED = loading(
    "loaded without that state", ALL_MESSAGES, "--load {here}", copies=SAVED, spoil=interventions.take_the_state_out
)
ELSEWHERE = loading(
    "loaded from two folders", ALL_MESSAGES, "--load {other} --ckpt-step 8", other=SAVED_AGAIN, ends=True,
    before=(interventions.last_load_on_rank_1_only, interventions.impatient),
)  # fmt: skip
DISK_FULL = RunSpec(
    name="disk full", flags=f"{SHORT} --ckpt-format torch_dist --train-iters 1 --save {{here}} --save-interval 1",
    ours=ALL_MESSAGES, before=(interventions.full_disk_on_rank_1, interventions.impatient), ends=True,
)  # fmt: skip

# -- lossless limits --------------------------------------------------------------------------------------------------

# fp32 rounding alone, amplified by 20 steps of Adam, changes a loss by a tenth of this tolerance.
TOLERANCE = 1e-5
# A bf16 value has 8 bits, a relative rounding of 2^-9. Sums over two replicas are rounded, and Q. 5 iterations lower
# the loss by 4 %, so that rounding moves the loss by some 2^-9 of these 4 %; twice that is allowed. (Seen: 2e-5, as
# much as between vanilla with bf16 and with fp32 buckets.) Gradient norms belong to weights that are rounded in the
# same way.
BF16_BUCKETS = (2 * 2**-9 * 0.04, 2**-8)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Lossless limit: at full rank these flags must give vanilla's losses, and gradients' norms in the first 5
    iterations.
    """

    vanilla: RunSpec
    ours: str = LOSSLESS
    loss: float = TOLERANCE
    norm: float = TOLERANCE

    @property
    def run(self) -> RunSpec:
        return self.vanilla.but(f"{self.vanilla.name}, at full rank", ours=self.ours)


SCALED_SUMS = "--calculate-per-token-loss --eod-mask-loss"
"""Flags with which end-of-document tokens do not count: micro-batches then have different numbers of tokens, and a mean
per token is not the mean over micro-batches.
"""

# Megatron saves gradients after iterations 2, 4 and 6, for which it all-reduces them; after 7 they are shards.
VANILLA_SHARDED = RunSpec(
    name="sharded", flags=f"{EIGHT} --train-iters 7 {SHARDED} --ckpt-format torch --save {{here}} --save-interval 100 "
    "--save-wgrads-interval 2",
)  # fmt: skip
FUSED_SHARDED = VANILLA_SHARDED.but("sharded, FE", ours=FE)
SHARDED_LIMIT = Limit(vanilla=VANILLA_SHARDED)
LIMITS = [
    Limit(vanilla=VANILLA),
    Limit(vanilla=VANILLA_TP2),
    Limit(
        vanilla=RunSpec(
            name="sequence parallel, recomputed", layout=TP2_PP2_DP2, flags=f"--sequence-parallel {RECOMPUTED}"
        )
    ),
    SHARDED_LIMIT,
    # SC (data-parallel gradients) compresses the first stage only, so that the last stage's buckets go through
    # Megatron's own collective.
    Limit(
        vanilla=RunSpec(
            name="overlapped, interleaved, per token",
            flags=f"{OVERLAPPED} {INTERLEAVED} {SMALL_BUCKETS} {SCALED_SUMS} --train-iters 5",
        ),
        ours=f"{LOSSLESS} --dp-compression-stages 1",
    ),
    Limit(
        vanilla=RunSpec(
            name="averaged in the collective",
            flags="--overlap-grad-reduce --ddp-num-buckets 3 --ddp-average-in-collective --train-iters 5",
        )
    ),
    Limit(
        vanilla=RunSpec(
            name="bf16 buckets",
            flags="--bf16 --grad-reduce-in-bf16 --overlap-grad-reduce --ddp-num-buckets 3 --train-iters 5",
        ),
        loss=BF16_BUCKETS[0], norm=BF16_BUCKETS[1],
    ),
]  # fmt: skip
EXACT = [
    limit.vanilla.but(f"{limit.vanilla.name}, in exact blocks", ours=f"{EXACT_BLOCKS} {stages}")
    for limit in LIMITS
    for stages in ["--dp-compression-stages 1" if "--dp-compression-stages 1" in limit.ours else ""]
]
"""Runs compared with the same vanilla runs: pass-through messages in place of codes, through the same exchange."""
VANILLA_GATHERS = [
    RunSpec(name=f"bf16 gather{name}", flags=f"--bf16 {flags} --train-iters 8")
    for name, flags in (("", SHARDED), (", overlapped, interleaved", f"{OVERLAPPED} {INTERLEAVED} {SMALL_BUCKETS}"))
]
EXACT_GATHERS = [run.but(f"{run.name}, exact", ours=f"{GATHER} --exact-blocks") for run in VANILLA_GATHERS]
EXACT_DIFFERENCES = [
    run.but(f"{run.name}, exact differences", ours="--param-gather-format exact") for run in VANILLA_GATHERS
]
SOME_IN_FP32 = RunSpec(
    name="norms in fp32, interleaved", flags=f"--bf16 {OVERLAPPED} {INTERLEAVED} --train-iters 3", ours=GATHER,
    before=(interventions.norms_in_fp32,),
)  # fmt: skip
FP16_DENSE = SCALED.but("fp16, loss scaled, dense gather", flags=SHARDED)
FP16_EXACT = FP16_DENSE.but("fp16, loss scaled, exact differences", ours="--param-gather-format exact")
FP16_GATHER = SCALED.but("fp16, loss scaled, gather", flags=SHARDED, ours=GATHER)
# The stages have 2, 1, 0 and 1 of 4 layers, and the batch grows: from the 12th sequence of 64 tokens on an iteration
# has 6 sequences, from the 24th on 8, in micro-batches of 2. megatron-core 0.19.2 still parses `--rampup-batch-size`,
# but its training loop ignores it; there, `--step-batch-size-schedule` changes the batch size.
GROWING = RunSpec(
    name="uneven stages, growing batch", before=(partial(interventions.without, "--global-batch-size"),),
    layout=(4, f"{PP4[1]} --pipeline-model-parallel-layout Ett|t||tL"),
    flags="--step-batch-size-schedule '0:4 768:6 1536:8' --train-iters 7",
)  # fmt: skip
GROWING_MICRO_BATCHES = [2, 2, 2, 3, 3, 4, 4]
GROWING_LIMIT = Limit(vanilla=GROWING, ours=f"{LOSSLESS_EPILOGUE} {FE}")

# All matrices have 64 rows or columns, so low rank saves nothing.
NOTHING_SHRINKS = RunSpec(
    name="nothing shrinks", flags=f"{SHARDED} --train-iters 4", ours="--optimus-cc"
)  # fmt: skip

# -- one replica ------------------------------------------------------------------------------------------------------

# The distributed optimizer shards the tied embedding's bucket, and the pair of stages sums the shards.
ONE_REPLICA = RunSpec(
    name="one replica, FE in int4", layout=PP2, flags=f"{SHARDED} --clip-grad 0 --train-iters 1",
    ours=f"{FE} --fused-embedding-sync-format int4",
)  # fmt: skip

# -- mixture of experts -----------------------------------------------------------------------------------------------

MIXTURE = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
    "--moe-ffn-hidden-size 64 --disable-bias-linear --train-iters 5"
)
# Every replica holds all experts, which low rank leaves dense. The distributed optimizer reduces them by a
# reduce-scatter; with factors they would be all-reduced. The one bucket of the second case has layers without experts.
EXPERTS_AMONG = RunSpec(
    name="local experts", layout=(2, ""), flags=f"{MIXTURE} --untie-embeddings-and-output-weights {SHARDED} "
    "--global-batch-size 4 --train-iters 2"
)  # fmt: skip
EXPERTS_UNPAID = EXPERTS_AMONG.but("low rank beside local experts", ours=SC4)
EXPERTS_IN_ONE_LAYER = EXPERTS_UNPAID.but(
    "low rank beside experts of one layer", flags=f"--overlap-grad-reduce {SMALL_BUCKETS} --moe-layer-freq [0,0,0,1]"
)
EXPERTS_APART = Limit(
    vanilla=RunSpec(
        name="experts apart",
        flags=(
            f"{MIXTURE} --expert-model-parallel-size 2 --overlap-grad-reduce --ddp-average-in-collective "
            "--distributed-timeout-minutes 7"
        ),
    )
)
EXPERTS_REPLICATED = RunSpec(
    name="experts on two replicas each", layout=(4, ""), ours=SC4,
    flags=f"{MIXTURE} --expert-model-parallel-size 2 --train-iters 2",
)  # fmt: skip
EXPERTS_IN_BLOCKS = replace(EXPERTS_REPLICATED, name="experts in blocks", ours="--dp-compression-format int4")
# In 2 stages of 2 replicas each stage deals its experts out over the replicas, so every expert has one replica.
# Gradients are not clipped, because the norm of compressed ones differs.
EXPERTS_ALONE = RunSpec(
    name="experts on one replica each", flags=f"{MIXTURE} --expert-model-parallel-size 2 --clip-grad 0 --train-iters 1"
)
EXPERTS_ALONE_IN_BLOCKS = EXPERTS_ALONE.but(
    "experts on one replica each, in blocks", ours="--dp-compression-format int4"
)
EXPERTS_GATHERED = EXPERTS_IN_BLOCKS.but("experts gathered", flags=f"--bf16 {SHARDED}", ours=GATHER)
# These are the flags of the preset `balanced` at full rank, without fused embedding synchronisation.
EXPERTS_AMONG_OTHERS = Limit(
    vanilla=RunSpec(name="experts among others", flags=f"{MIXTURE} --untie-embeddings-and-output-weights {SHARDED}"),
    ours=f"--optimus-cc {LOSSLESS_CB.split(maxsplit=1)[1]} {LOSSLESS_SC.split(maxsplit=1)[1]}",
)
