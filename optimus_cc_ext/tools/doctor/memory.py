"""Memory that compression takes on a rank, by the plans of the runtime."""

from collections.abc import Iterator, Sequence

from optimus_cc_ext.announce import COMMUNICATORS, COMPRESSION_STATE, MESSAGE_BUFFERS
from optimus_cc_ext.collectives.exact import ExactPlan
from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.slots import Exchanged, slot_bytes, slots_bytes
from optimus_cc_ext.techniques.bucket_plan import GroupPlan
from optimus_cc_ext.techniques.fused_embedding_sync import plan_of_union
from optimus_cc_ext.techniques.groups import communicator_bytes
from optimus_cc_ext.techniques.low_rank_gradients import LowRankPlan
from optimus_cc_ext.techniques.messages import message_bytes
from optimus_cc_ext.techniques.schedule import Schedule
from optimus_cc_ext.techniques.state import state_dtype
from optimus_cc_ext.tools.doctor.estimate import UNKNOWN, Gpt, OnNodes, embedding_formats, links_of, plans_of


def compression_memory(
    gpt: Gpt, layout: Layout, config: OptimusConfig, schedule: Schedule, on: OnNodes = UNKNOWN, *, nccl: bool
) -> dict[str, int]:
    """Return the bytes of memory that compression takes, by kind. The rank that needs most of a kind counts.

    Residuals and low-rank factors are kept twice, so that a step can be repeated. Block formats keep no state across
    iterations, and with lazy error propagation the residual of one message within an iteration.

    Args:
        nccl: True if NCCL runs the collectives, on GPUs, whose kernels have tables; the bytes of its communicators are
            an upper bound.
    """
    dtype = state_dtype(config.compression_state_dtype)
    links = links_of(config, schedule) if config.is_on(classes.PIPELINE_BACKWARD) else ()
    senders = {plan.sending_stage for plan, stage in links if any(
        plan.compresses(message, gpt.message) for message in schedule.messages(stage)
    )}  # fmt: skip
    width = gpt.pipeline_dtype.itemsize if config.lazy_error_propagation else 0
    width = 2 * dtype.itemsize if config.remembers(classes.PIPELINE_BACKWARD) else width
    link = schedule.chunks * gpt.message.numel() * width
    stages = [plans_of(gpt, layout, config, stage, on) for stage in range(layout.stages)]
    reductions = [[bucket.compressed for plan in plans for bucket in plan.buckets] for plans in stages]
    states = (sum(r.state_bytes(dtype) for r in found if isinstance(r, LowRankPlan)) for found in reductions)
    return {
        COMPRESSION_STATE: max(nbytes + link * (stage in senders) for stage, nbytes in enumerate(states)),
        MESSAGE_BUFFERS: max(_messages(plans, gpt, layout, config, on, tables=nccl) for plans in stages),
        COMMUNICATORS: sum(map(communicator_bytes, _new_groups(layout, config, on))) if nccl else 0,
    }


def _new_groups(layout: Layout, config: OptimusConfig, on: OnNodes) -> Iterator[int]:
    """Yield the numbers of ranks of the process groups that a rank gets: those of a tied embedding, and the node and
    the rail of each sum in two levels and of tokens that go once a node. Megatron has groups for several instances.
    """
    in_levels = [on.experts]
    if on.levels.two and not on.levels.instances:
        in_levels.append(on.levels)
    if config.is_on(classes.EMBEDDING) and not layout.distributed_optimizer:
        yield 2 * layout.data_parallel
        if embedding_formats(config, on) is not None:
            in_levels.append(on.union)
    for levels in in_levels:
        if levels.two:
            yield from (levels.members, levels.nodes)


def _messages(
    plans: Sequence[GroupPlan], gpt: Gpt, layout: Layout, config: OptimusConfig, on: OnNodes, *, tables: bool
) -> int:
    """Return a rank's bytes for messages of its gradients and parameters, for a slice's old values, and with `tables`
    for those of the kernels.
    """
    layouts = set[BlockLayout]()
    found, inside, change, formats, dtype = 0, 0, 0, embedding_formats(config, on), gpt.gradient_dtype
    gradients, parameters, embedding = list[Exchanged](), list[Exchanged](), list[Exchanged]()
    for bucket in (bucket for plan in plans for bucket in plan.buckets):
        reduction, gather = bucket.compressed, bucket.gather
        if isinstance(reduction, LowRankPlan):
            found += reduction.wire_bytes
        elif isinstance(reduction, ExchangePlan):
            gradients.append(Exchanged(reduction.slice_bytes, gpt.overlaps_gradients))
            layouts.update(reduction.layouts)
            inside = max(inside, reduction.inside_bytes)
        if gather is not None:
            parameters.append(Exchanged(gather.gather_bytes, gpt.overlaps_parameters))
            width = gpt.parameter_dtype.itemsize
        if isinstance(gather, ExactPlan):
            found += sum(gather.kept)
            change = max(change, max((span.stop - span.start for span in gather.spans), default=0) * width)
        elif gather is not None:
            found += gather.message_bytes[0]
            layouts.update(gather.layouts)
            change = max(change, max(sum(n for _, n in layout.spans(0)) for layout in gather.layouts) * width)
    for numel in (plan.tied_bytes // dtype.itemsize for plan in plans if plan.tied_bytes):
        if config.is_on(classes.EMBEDDING) and formats is not None:
            if layout.distributed_optimizer:
                found += 2 * message_bytes(formats.gradients, numel // layout.owners, dtype)
                layouts.add(BlockLayout.of_one(numel // layout.owners))
            else:
                union = plan_of_union(
                    numel, dtype, 2 * layout.data_parallel, formats, on.union, 0, slot_bytes(config.message_memory)
                )
                embedding.append(Exchanged(union.slice_bytes, together=False))
                layouts.update(union.layouts)
    found += sum(each.table_bytes for each in layouts) if tables else 0
    return found + inside + change + slots_bytes((gradients, parameters, embedding))
