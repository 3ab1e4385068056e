"""Tiny GPT in a custom training loop, with Megatron's process groups or with groups that the user makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "MODEL", "build", "digest", "gradients", "groups_of_ones_own", "optimizer_of", "pass_of", "pass_without_schedule",
    "start", "unsynchronised",
]  # fmt: skip

VOCABULARY, SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 128, 32, 2, 2
MODEL = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "pipeline_dtype": torch.float32,
    "use_cpu_initialization": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
MIXTURE = {
    "moe_token_dispatcher_type": "alltoall", "moe_router_topk": 1, "moe_router_pre_softmax": True,
    "moe_router_load_balancing_type": "none", "add_bias_linear": False,
}  # fmt: skip
"""Settings of a model whose experts are dealt out over the replicas."""


def start(stages: int, expert_parallel: int = 1) -> None:
    """Join the ranks, and have Megatron make process groups of `stages` pipeline stages."""
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, expert_model_parallel_size=expert_parallel
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def groups_of_ones_own(stages: int) -> Any:
    """Make a ProcessGroupCollection of `stages` pipeline stages, with one replica for each group of `stages` ranks."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    rank, alone, pipeline = dist.get_rank(), None, None
    for other in range(dist.get_world_size()):
        group = dist.new_group([other])
        alone = group if other == rank else alone
    for first in range(0, dist.get_world_size(), stages):
        group = dist.new_group(list(range(first, min(first + stages, dist.get_world_size()))))
        pipeline = group if first <= rank < first + stages else pipeline
    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "ep", "expt_tp", "dp", "dp_cp", "expt_dp", "pos_embd", "tp_dp_cp"):
        setattr(groups, name, alone)
    groups.pp = groups.embd = pipeline
    return groups


def build(
    stages: int,
    groups: Any = None,
    *,
    finalize: bool = True,
    hidden: int = 32,
    tied: bool = True,
    in_bf16: bool = False,
    experts: int | None = None,
    **ddp: Any,
) -> Any:
    """Make a GPT in DistributedDataParallel, equal on every call. Without `finalize` the test reduces its gradients.

    `experts` is the number of experts of a mixture.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    pipeline = parallel_state.get_pipeline_model_parallel_group() if groups is None else groups.pp
    dtypes = dict.fromkeys(("params_dtype", "pipeline_dtype"), torch.bfloat16) | {"bf16": True} if in_bf16 else {}
    mixture = {} if experts is None else MIXTURE | {"num_moe_experts": experts}
    config = TransformerConfig(
        pipeline_model_parallel_size=stages, **MODEL | {"hidden_size": hidden} | dtypes | mixture,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size() if experts else 1,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(experts, moe_grouped_gemm=False),
        vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        pre_process=pipeline.rank() == 0, post_process=pipeline.rank() == stages - 1,
        share_embeddings_and_output_weights=tied, pg_collection=groups,
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads if finalize else None
    model = model.bfloat16() if in_bf16 else model
    model = DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), model, pg_collection=groups)
    config.no_sync_func = model.no_sync if ddp.get("overlap_grad_reduce") else None
    return model


def optimizer_of(model: Any, clip_grad: float = 1.0) -> Any:
    """Return Megatron's Adam for a model."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sharded = model.ddp_config.use_distributed_optimizer
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, clip_grad=clip_grad, use_distributed_optimizer=sharded, bf16=model.config.bf16,
        params_dtype=model.config.params_dtype, overlap_param_gather=model.ddp_config.overlap_param_gather,
    )  # fmt: skip
    return get_megatron_optimizer(config, [model])


def pass_of(
    model: Any,
    groups: Any = None,
    *,
    zero: bool = True,
    batch: int = 0,
    fail: bool = False,
    schedule: Any = None,
    forward_only: bool = False,
) -> None:
    """Run one forward-backward pass, over the same data for each `batch`; without `zero`, gradients add up."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    replica = parallel_state.get_data_parallel_rank() if groups is None else groups.dp.rank()
    generator = torch.Generator().manual_seed(100 * batch + replica)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        if fail:
            raise MemoryError("this batch is too large")
        tokens = torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE), generator=generator)
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        output = model(tokens, torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE), mask, labels=tokens)
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    own = {}
    if groups is not None:
        own = {"pg_collection": groups, "p2p_communicator": P2PCommunicator(groups.pp, model.config)}
    if zero and not forward_only:
        model.zero_grad_buffer()
    stages = model.config.pipeline_model_parallel_size
    schedule = schedule or get_forward_backward_func(pp_size=stages, vp_size=None)
    schedule(
        forward_step_func=forward_step, data_iterator=None, model=[model], num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE, micro_batch_size=MICRO_BATCH, forward_only=forward_only, **own,
    )  # fmt: skip


@contextmanager
def unsynchronised(model: Any) -> Iterator[None]:
    """Leave the gradients of all micro-batches unreduced; Megatron's schedules reduce behind the last one."""
    of_schedule, model.config.no_sync_func = model.config.no_sync_func, None
    with model.no_sync():
        yield
    model.config.no_sync_func = of_schedule


def pass_without_schedule(model: Any) -> None:
    """Run a backward pass over a batch by hand, and reduce its gradients."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    tokens = torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE), generator=generator)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    model.zero_grad_buffer()
    model(tokens, torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE), mask, labels=tokens).mean().backward()
    model.finish_grad_sync()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of all gradients, by the parameter's name."""
    return {name: parameter.main_grad.clone() for name, parameter in model.module.named_parameters()}


def digest(model: Any) -> str:
    """Return the sha256 of all gradients."""
    from tests.megatron.recording import hash_of

    return "".join(hash_of(gradient) for gradient in gradients(model).values())
