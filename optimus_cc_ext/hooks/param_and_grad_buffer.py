"""Wraps bucket groups of megatron/core/distributed/param_and_grad_buffer.py, to replace their reductions and gathers.

Megatron calls `start_grad_sync` through the instance, so it is replaced on the instances that need it. Before its
collective, the method drains hooks, waits, copies extra main gradients, checks for NaN and scales; after the collective
it does nothing. We keep everything but the collective: the original runs with a single-rank process group, for which
its all-reduce is a no-op, and then ours runs. The same goes for `start_param_sync` and its gather.

Our reduction is always a sum. Megatron scales by 1/D before it, except that with --ddp-average-in-collective it leaves
the division to the collective, and with --calculate-per-token-loss divides by the number of tokens at the end.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.announce import say
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Bytes, bytes_of
from optimus_cc_ext.collectives.nodes import Levels
from optimus_cc_ext.collectives.reducers import Reduction
from optimus_cc_ext.compressors.formats import EXACT_FORECAST
from optimus_cc_ext.config.classes import DP_GRADIENTS, PARAM_GATHER, TrafficClass
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.patching import Patches
from optimus_cc_ext.techniques.bucket import Bucket
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord, replaced_group
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP
from optimus_cc_ext.techniques.crossing import stays_dense
from optimus_cc_ext.techniques.param_gather import Gather, Shards
from optimus_cc_ext.techniques.selective_stage_compression import BucketGroup
from optimus_cc_ext.techniques.session import Session


def attach(
    session: Session,
    bucket_group: Any,
    patches: Patches,
    experts: Collection[Any] = (),
    routers: Collection[Any] = (),
    *,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Take over, or at least count, the reductions and gathers of one `_ParamAndGradBucketGroup`.

    Args:
        patches: holds the replaced attributes of the bucket group.
        experts: the weights of routed experts, whose gradients low rank does not compress.
        routers: the weights of routers, which stay dense in block formats.
        replicas: the ranks that hold the same parameters, in all instances of the distributed optimizer.
    """
    config, gradients = bucket_group.ddp_config, session.gradients
    sharded: bool = config.use_distributed_optimizer
    owners = getattr(bucket_group, replaced_group(sharded))
    instances = _instances(bucket_group)
    replicas = owners if replicas is None or instances == 1 else replicas
    records = [_record(bucket, experts, routers) for bucket in bucket_group.buckets]
    fused = None if session.embedding.group is None else session.embedding
    groups, left_dense = _groups(session, replicas, bucket_group)
    rules = BucketRules.of(
        session.config, ranks=replicas.size(), sharded=sharded, fused=fused is not None,
        levels=groups.levels, place=groups.place, beside=groups.beside, left_dense=left_dense,
        in_fp32=getattr(config, "reduce_scatter_with_fp32_accumulation", False),
        exact_bits=session.layout.exact_bits if session.layout else EXACT_FORECAST,
    )  # fmt: skip
    plan = GroupPlan.of(records, rules)
    _refuse_several_stages(session, replicas)
    extra = (getattr(bucket, "params_with_extra_main_grads", ()) for bucket in bucket_group.buckets)  # missing in 0.16
    if gradients.reduces(plan) and any(extra):
        raise FlagError(
            "--ddp-param-name-patterns-for-fp32-local-accumulation",
            "gradients that are accumulated outside of the gradient buffer are not supported by Optimus-CC",
            "Leave it out",
        )
    found = [
        Bucket(bucket_group, index, record, bucket_group.buckets[index].grad_data.device)
        for index, record in enumerate(records)
    ]
    buckets = gradients.add_group(plan, found, groups, overlapped=config.overlap_grad_reduce, fused=fused)
    line = gradients.note_single_rank(plan.kept_dense)
    if line is not None and dist.get_rank() == 0:
        say(f"optimus-cc: {line}")
    together = config.overlap_param_gather or len(found) > 1
    shards = [
        session.parameters.add_bucket(bucket, bucket_plan.gather, Groups(owners), together=together)
        for bucket, bucket_plan in zip(found, plan.buckets, strict=True)
        if bucket_plan.gather is not None
    ]
    patches.wrap(bucket_group, "start_grad_sync", partial(_start_grad_sync, session, bucket_group, buckets, shards))
    if instances > 1 and config.overlap_grad_reduce:
        patches.wrap(bucket_group, "finish_grad_sync", partial(_finish_grad_sync, bucket_group))
    if plan.gathered[0].sent:
        patches.wrap(bucket_group, "start_param_sync", partial(_start_param_sync, session, bucket_group, plan, shards))


def _refuse_several_stages(session: Session, replicas: dist.ProcessGroup) -> None:
    """Refuse replicas that are on stages of which only some compress gradients: they would wait for each other."""
    if session.new_groups is None:
        return
    ranks, chosen = dist.get_process_group_ranks(replicas), session.gradients.compressed_stages
    stages = sorted({place.stage for place in session.new_groups.places if place.rank in ranks})
    if len(stages) > 1 and len({stage in chosen for stage in stages}) > 1:
        raise FlagError(
            "--dp-compression-stages",
            f"the replicas of a gradient bucket are on the stages {', '.join(map(str, stages))}, which do not all "
            "compress alike",
            "Give all",
        )


def finish(session: Session, bucket_group: Any) -> None:
    """Finish a reduction and a gather of the session that are under way, before the bucket group leaves the session.

    Collective over the replicas.
    """
    if isinstance(bucket_group.grad_reduce_handle, Reduction):
        bucket_group.grad_reduce_handle.wait()
        # With several instances Megatron waits for its stream, and never for a handle.
        bucket_group.grad_reduce_handle = _Done() if _instances(bucket_group) == 1 else None
    finish_gather(bucket_group, session.parameters.of(bucket_group.buckets))


def finish_gather(bucket_group: Any, shards: Sequence[Shards]) -> None:
    """Finish a gather of parameters that has been encoded and not decoded; its messages are then no longer needed.

    The forward pass has done so, unless it used no parameter of the bucket. Collective over the replicas.
    """
    if any(each.updated for each in shards) or isinstance(bucket_group.param_gather_handle, Gather):
        bucket_group.start_param_sync(force_sync=True)


class _Done:
    """Handle of a finished reduction, for Megatron to wait for."""

    def wait(self) -> None:
        pass


def _instances(bucket_group: Any) -> int:
    """Return the number of instances of the distributed optimizer."""
    return int(getattr(bucket_group.ddp_config, "num_distributed_optimizer_instances", 1))


def _groups(session: Session, replicas: dist.ProcessGroup, bucket_group: Any) -> tuple[Groups, frozenset[TrafficClass]]:
    """Return the groups whose ranks exchange gradients in blocks, and the classes that are left dense inside a node."""
    config, new_groups, instances = session.config, session.new_groups, _instances(bucket_group)
    if instances > 1:
        node, rail = (
            getattr(bucket_group, name)
            for name in (replaced_group(sharded=True), "inter_distributed_optimizer_instance_group")
        )
        levels = Levels(nodes=instances, members=node.size(), instances=True)
        beside = replicas.size() if new_groups is None else new_groups.beside(replicas)
        groups = Groups(replicas, levels, node, rail, beside)
    elif new_groups is None:
        return Groups(replicas, beside=replicas.size()), frozenset()
    else:
        two = config.sums_in_blocks and config.dp_compression_levels != "one"
        groups = new_groups.in_levels(replicas, two=two)
    own = None if session.grid is None else session.grid.replica_group
    if own is not None and dist.get_process_group_ranks(replicas) == dist.get_process_group_ranks(own):
        return groups, session.left_dense
    # The parameters of experts have replicas of their own.
    places = () if new_groups is None else new_groups.places
    among = {DP_GRADIENTS: replicas, PARAM_GATHER: groups.owners}
    return groups, frozenset(
        traffic for traffic, group in among.items()
        if stays_dense(config, traffic, places, [dist.get_process_group_ranks(group)])
    )  # fmt: skip


def own_shard(bucket_group: Any, bucket: Any) -> torch.Tensor:
    """Return the flat part of a bucket that this rank's distributed optimizer reads."""
    shards: torch.Tensor = bucket.grad_data.view(bucket_group.intra_distributed_optimizer_instance_size, -1)
    return shards[bucket_group.intra_distributed_optimizer_instance_rank]


def _record(bucket: Any, experts: Collection[Any], routers: Collection[Any]) -> BucketRecord:
    parameters = [
        ParameterRecord(
            shape=tuple(parameter.shape),
            start=bucket.param_to_index[parameter][0],
            tied=getattr(parameter, "shared_embedding", False),
            expert=parameter in experts,
            router=parameter in routers,
            embedding=getattr(parameter, "is_embedding_or_output_parameter", False),
            norm_group=getattr(parameter, "grad_norm_group", MAIN_NORM_GROUP),
        )
        for parameter in bucket.params_list
    ]
    dtypes = [getattr(each, "dtype", torch.float32) for each in (bucket.grad_data, bucket.param_data)]
    return BucketRecord(
        numel=bucket.grad_data.numel(), dtype=dtypes[0], parameter_dtype=dtypes[1], parameters=parameters
    )  # fmt: skip


def _start_grad_sync(
    session: Session,
    bucket_group: Any,
    buckets: BucketGroup,
    shards: Sequence[Shards],
    original: Callable[..., None],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Reduce a bucket group, in place of `_ParamAndGradBucketGroup.start_grad_sync`.

    Its one parameter is `force_all_reduce`, which 0.16.0rc0 and older versions do not have.
    """
    force_all_reduce, original = any((*args, *kwargs.values())), partial(original, *args, **kwargs)
    session.before_reduction()
    reducers, in_step = buckets.reducers, session.in_step
    # Megatron starts a reduction of the first batch once more in some cases; those versions never do.
    started_already = getattr(bucket_group, "is_first_batch", False) and bucket_group.grad_reduce_handle is not None
    if force_all_reduce and buckets.plan.rules.instances > 1:
        reducers = []  # Megatron sums whole gradients inside one instance only, and so has no sum that we could replace
    if buckets.plan.tied_bytes and not started_already:
        session.embedding.left_out = in_step and buckets.leaves_out
    if not in_step or not reducers or started_already:
        original()
        if in_step and not started_already:
            _count(session, buckets.plan, buckets.plan.vanilla)
        return
    flats = buckets.gradients
    with _single_rank_group(session, bucket_group, buckets.plan, sums=True):
        original()
    if bucket_group.grad_reduce_handle is not None:
        # Even over one rank, Megatron's collective may still write the buffer; our reduction must not run beside it.
        bucket_group.grad_reduce_handle.wait()
    finish_gather(bucket_group, shards)
    handle = buckets.start(reducers, flats, whole=force_all_reduce)
    if buckets.overlapping:
        bucket_group.grad_reduce_handle = handle
    else:
        handle.wait()
    _count(session, buckets.plan, buckets.bytes_by_class(reducers, whole=force_all_reduce))


def _finish_grad_sync(bucket_group: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Wait for our reduction: with several instances Megatron's `finish_grad_sync` waits for its stream alone."""
    original(*args, **kwargs)
    if isinstance(bucket_group.grad_reduce_handle, Reduction):
        bucket_group.grad_reduce_handle.wait()
        bucket_group.grad_reduce_handle = None


def _start_param_sync(
    session: Session,
    bucket_group: Any,
    plan: GroupPlan,
    shards: Sequence[Shards],
    original: Callable[..., None],
    force_sync: bool = False,
) -> None:
    """Gather the parameters of a bucket group, in place of `_ParamAndGradBucketGroup.start_param_sync`.

    The gather starts with the optimizer's step, or with the forward pass that needs the parameters.
    """
    if force_sync and bucket_group.param_gather_handle is not None:
        original(force_sync)  # Megatron's function waits for the gather that has been started
        return
    # The first gather, and one after a skipped step, carry no update: leave them to Megatron.
    ours = bool(shards) and all(shard.updated for shard in shards)
    # A model with routed experts has two optimizers, one for the experts and one for all other parameters. Without
    # overlap each of the two gathers the buckets of both.
    at_once = not bucket_group.ddp_config.overlap_param_gather
    again = at_once and bool(shards) and all(shard.gathered and not shard.updated for shard in shards)
    if again:
        with _single_rank_group(session, bucket_group, plan):
            original(force_sync)
    elif ours:
        with _single_rank_group(session, bucket_group, plan):
            original(force_sync)
        overlapped = bucket_group.param_gather_handle is not None
        if overlapped:
            # Until its handle is waited for, Megatron's collective over one rank may write old parameters over those
            # that our gather decodes.
            bucket_group.param_gather_handle.wait()
        gather = session.parameters.gather(shards)
        if overlapped:
            bucket_group.param_gather_handle = gather
        else:
            gather.wait()
    else:
        original(force_sync)
    if session.grid is not None:
        raw, coded = plan.gathered
        if ours:
            coded = bytes_of(plan.gather_legs(coded=True, messages=[each.sent_bytes for each in shards]))
        session.traffic.add(PARAM_GATHER, raw, coded if ours else (0, 0) if again else raw)


def _count(session: Session, plan: GroupPlan, sent: dict[TrafficClass, Bytes]) -> None:
    """Count a reduction of a bucket group that sent these bytes."""
    for traffic, nbytes in sent.items():
        session.traffic.add(traffic, plan.vanilla[traffic], nbytes)


@contextmanager
def _single_rank_group(session: Session, bucket_group: Any, plan: GroupPlan, *, sums: bool = False) -> Iterator[None]:
    """Lend the bucket group a single-rank process group, in which this rank's only shard is the whole buffer.

    Args:
        sums: True if gradients are reduced, and not parameters gathered.
    """
    assert session.alone is not None, "the session was placed without a group of its own"
    lent: dict[str, Any] = {replaced_group(plan.rules.sharded): session.alone}
    if plan.rules.sharded:
        lent |= {
            "intra_distributed_optimizer_instance_size": 1,
            "intra_distributed_optimizer_instance_rank": 0,
            "cached_grad_buffer_shard_list": [None] * len(bucket_group.buckets),
            "cached_param_buffer_shard_list": [None] * len(bucket_group.buckets),
        }
    in_fp32 = sums and plan.rules.in_fp32
    if plan.rules.instances > 1 or in_fp32:
        # With one instance Megatron makes no all-reduce between instances, and returns a handle instead of using a
        # stream of its own.
        config = lent["ddp_config"] = copy.copy(bucket_group.ddp_config)
        config.num_distributed_optimizer_instances = 1
    if in_fp32:
        # Megatron's sum in fp32 copies the bucket, also over one rank; its all-reduce, without shards, does not.
        config.use_distributed_optimizer = False
        lent[replaced_group(sharded=False)] = session.alone
    scales = [bucket.gradient_scaling_factor for bucket in bucket_group.buckets]
    patches = Patches()
    for name, value in lent.items():
        patches.replace(bucket_group, name, value)
    if bucket_group.ddp_config.average_in_collective:
        # An average over one rank divides by 1, so the division that Megatron leaves to the collective is done before
        # it.
        for bucket, scale in zip(bucket_group.buckets, scales, strict=True):
            bucket.gradient_scaling_factor = scale / plan.rules.ranks
    try:
        yield
    finally:
        patches.close()
        for bucket, scale in zip(bucket_group.buckets, scales, strict=True):
            bucket.gradient_scaling_factor = scale
