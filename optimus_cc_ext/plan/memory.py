"""Bytes that a rank of the fullest stage needs, and what compression adds: residuals and factors."""

from optimus_cc_ext.compressors.formats import block_format, format_named
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.plan import PlanError
from optimus_cc_ext.plan.hardware import Cluster, Constant
from optimus_cc_ext.plan.model import Job
from optimus_cc_ext.plan.traffic import DENSE, low_rank_values

__all__ = ["check_memory", "memory"]

CONTEXT = Constant(3e9, "assumed", "CUDA's context, NCCL's buffers, fragments")


def memory(job: Job, config: OptimusConfig = DENSE) -> dict[str, float]:
    """Of the first stage's ranks, by what it is for."""
    parameters = job.stage_parameters + job.embedding_share
    width, ours = 4 if config.compression_state_dtype == "fp32" else 2, 0.0
    if config.dp_compression and config.dp_compression_format == "low-rank":
        small, covered = low_rank_values(job, config)
        ours += width * ((covered if config.dp_error_feedback else 0) + small)
    elif config.dp_compression and block_format(config.dp_compression_format):
        # Messages of gradients for both ways; sums go where these lay.
        ours += 2 * format_named(config.dp_compression_format).bits_per_value / 8 * job.stage_parameters
    if config.compressed_backprop and block_format(config.compressed_backprop_format) and config.lazy_error_propagation:
        ours += job.value_bytes * job.vpp * job.message_rows * job.model.hidden
    if config.backprop_remembers:
        residual = job.message_rows if config.lazy_error_propagation else 0
        ours += width * job.vpp * (residual + config.compressed_backprop_rank) * job.model.hidden
    if block_format(config.param_gather_format):
        # Messages of all shards; the own one before the step, and what changed in one.
        ours += (
            format_named(config.param_gather_format).bits_per_value / 8 + 2 * job.value_bytes / job.dp
        ) * parameters
    return {
        "weights": 2.0 * parameters,
        "gradients": float(job.gradient_bytes * parameters),
        # Master weights and two moments, fp32.
        "optimizer": 12.0 * parameters / (job.dp if job.distributed_optimizer else 1),
        "activations": _activations(job),
        "compression": ours,
        "context": CONTEXT,
    }


def _activations(job: Job) -> float:
    """Korthikanti et al. 2022, table 2: s b h (10 + 24 / t + 5 a s / (h t)) bytes a layer, all over t with sequence
    parallelism, without the last term where scores are not kept; only the layer's input with full recomputation."""
    model, t = job.model, job.tp
    tokens = job.rows * model.hidden
    scores = 5 * model.heads * model.sequence / model.hidden / t
    whole = 34 / t if job.sequence_parallel else 10 + 24 / t
    if job.precision == "fp8":
        whole -= 7 / t  # What four GEMMs keep of their inputs, 14 bytes of the 34, in one byte a value.
    layer = tokens * (whole + (0 if job.flash or job.recompute == "sel" else scores))
    layers = job.layers_per_stage
    # 1F1B keeps as many micro-batches as there are stages, interleaved 1 + (P - 1) / (P V) times as many.
    kept = min(job.pp * (1 + (job.pp - 1) / (job.pp * job.vpp) if job.vpp > 1 else 1), job.micro_batches)
    head = 6.0 * job.rows * model.vocabulary / t if job.pp == 1 else 0.0
    if job.recompute == "full":
        return kept * layers * 2 * tokens / (t if job.sequence_parallel else 1) + layer + head
    return kept * layers * layer + head


def check_memory(cluster: Cluster, job: Job, config: OptimusConfig = DENSE) -> float:
    """Bytes in use.

    Raises:
        PlanError: more than the GPU has, and by how much.
    """
    needs = memory(job, config)
    used = sum(needs.values())
    if used > cluster.gpu.memory:
        most = max(needs, key=lambda name: needs[name])
        raise PlanError(
            f"it does not fit: a rank needs {used / 1e9:.1f} GB, {(used - cluster.gpu.memory) / 1e9:.1f} GB more than "
            f"the {cluster.gpu.name} has ({needs[most] / 1e9:.1f} GB of it {most}). More tensor or pipeline ranks, a "
            "smaller micro-batch, --recompute-granularity full or --use-distributed-optimizer need less"
        )
    return used
