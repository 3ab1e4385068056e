"""Loop that docs/custom-loops.md of commit d851e77 showed, word for word."""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import optimus_cc_ext

VOCABULARY, SEQUENCE, MICRO_BATCH, CLIP_GRAD = 512, 64, 2, 1.0


def forward_step(data_iterator, model):
    tokens = torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE)).cuda()
    positions = torch.arange(SEQUENCE).cuda().expand(MICRO_BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).cuda()
    output = model(tokens, positions, mask, labels=tokens)
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def build():
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).cuda()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=CLIP_GRAD), [model])
    config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer


def train_step(model, optimizer):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=[model],
        num_microbatches=4,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    updated, grad_norm, _ = optimizer.step()
    return updated, grad_norm


def train(train_iters):
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    replicas = parallel_state.get_data_parallel_world_size()
    compression = optimus_cc_ext.preset(
        "paper",
        stages=2,
        data_parallel=replicas,
        compressed_backprop_rank=4,
        dp_compression_rank=8,
        compressed_backprop_warmup=0.25,
        dp_compression_warmup=0.25,
    )
    optimus_cc_ext.install(compression, train_iters=train_iters)  # install() comes before the model is built

    model, optimizer = build()
    log = []
    for iteration in range(train_iters):
        optimus_cc_ext.begin_step(iteration, measured=True)
        updated, grad_norm = train_step(model, optimizer)
        optimus_cc_ext.end_step(applied=updated, grad_norm=grad_norm, clip_grad=CLIP_GRAD)
        log.append(optimus_cc_ext.collect_metrics())
    return log, optimus_cc_ext.state_dict()
