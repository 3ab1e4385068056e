"""Law: the command line and a custom training loop give the same facts about one run, and so the same configuration."""

import argparse
import functools
import logging
import shlex
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.config.refusals import conflicts, remarks
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.hooks import start
from optimus_cc_ext.hooks.registry import SUPPORTED_MEGATRON
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops
from tests.megatron_runs import run_megatron

OF_THE_TRAINING_LOOP = {
    "ckpt_convert_format", "enable_msc", "inprocess_restart", "load", "non_persistent_ckpt_type",
    "non_persistent_global_ckpt_dir", "perform_rl_step", "pretrained_checkpoint", "save", "save_wgrads_interval",
    "use_sharp", "use_torch_fsdp2",
}  # fmt: skip
"""The options that no configuration of a model holds: they belong to Megatron's own loop, checkpoints or network."""

EVERYTHING = OptimusConfig(
    compressed_backprop_format="low-rank", dp_compression_format="low-rank", fused_embedding_sync_format="int8",
    param_gather_format="int8",
    pipeline_forward_format="int8", expert_dispatch_format="int8", expert_gradient_format="int8",
)  # fmt: skip


class Read(argparse.Namespace):
    """Options that note which of them are read."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "_names").add(name)
        return super().__getattribute__(name)


def names_read(options: argparse.Namespace) -> set[str]:
    """Return the names of all options on which a refusal or a remark depends."""
    noted = Read(_names=set(), **vars(options))
    remarks(noted, EVERYTHING)
    conflicts(noted, EVERYTHING)
    return set(vars(noted)["_names"])


def both_ways(models: list[torch.nn.Module], optimizer: Any) -> tuple[Any, Any, dict[str, tuple[Any, Any]]]:
    """Return the layouts of the command line and of the built model, and the options that differ."""
    from megatron.training import get_args

    from optimus_cc_ext.hooks import attaching
    from optimus_cc_ext.hooks.distributed_data_parallel import grid_of
    from optimus_cc_ext.hooks.facts import is_tied, layout_from, options_of

    args, wrapped = get_args(), [attaching._wrapped(model) for model in models]
    tied = any(map(is_tied, wrapped))
    options = options_of(wrapped[0], grid_of(wrapped[0]), optimizer, args.train_iters, tied=tied)
    pairs = {name: (getattr(args, name, None), getattr(options, name, None)) for name in names_read(args)}
    # What is off is None, False or empty.
    differ = {
        name: (repr(one), repr(other)) for name, (one, other) in pairs.items() if (one or None) != (other or None)
    }
    return layout_from(args), layout_from(options), {"unknown": names_read(args) - vars(options).keys(), **differ}


MODELS = {
    "tied": (2, "--bf16 --use-distributed-optimizer --ddp-reduce-scatter-with-fp32-accumulation "
        "--overlap-grad-reduce --overlap-param-gather"),
    "untied, interleaved": (
        2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--untie-embeddings-and-output-weights --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --optimizer sgd",
    ),
    "experts": (
        2, "--hidden-size 128 --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
        "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity "
        "--recompute-granularity selective --recompute-modules moe --disable-bias-linear",
    ),
    "multi-token prediction apart": (
        3, "--pipeline-model-parallel-size 3 --mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion "
        "--num-layers 2 "
        "--pipeline-model-parallel-layout Et|tm|L",
    ),
    "instances": (
        4, "--fp16 --use-distributed-optimizer --num-distributed-optimizer-instances 2 "
        "--ddp-pad-buckets-for-high-nccl-busbw",
    ),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("model", MODELS)
def test_the_command_line_and_a_built_model_give_the_same_facts(model: str) -> None:
    ranks, flags = MODELS[model]
    for run in run_megatron(ranks, shlex.split(f"{flags} --train-iters 1"), probe=both_ways):
        assert run.ended is None, run.printed[-5:]
        of_flags, of_model, options = run.probed
        assert of_flags == of_model
        assert of_flags.exact_bits != Layout.exact_bits, "bits of exact messages follow from the learning rate"
        assert options.pop("unknown") <= OF_THE_TRAINING_LOOP
        assert not options


# -- what a model decides by itself -----------------------------------------------------------------------------------


def a_model_that_is_tied(tied: bool) -> None:
    """Let GPT tie its embeddings whatever the command line says, as Megatron's vision-language model does."""
    from megatron.core.models.gpt import GPTModel

    built = GPTModel.__init__

    def init(self: Any, *args: Any, share_embeddings_and_output_weights: bool, **rest: Any) -> None:
        built(self, *args, share_embeddings_and_output_weights=tied, **rest)

    GPTModel.__init__ = init
    start()


STAGES = "--pipeline-model-parallel-size 2 --train-iters 2"
UNTIED = "--untie-embeddings-and-output-weights"
ON = f" on megatron-core {SUPPORTED_MEGATRON[-1]}"


@pytest.mark.full
@pytest.mark.parametrize(("tied", "flags", "other_flags"), [(False, "", UNTIED), (True, UNTIED, "")])
def test_a_preset_follows_a_model_that_ties_its_embeddings_otherwise_than_the_command_line(
    tied: bool, flags: str, other_flags: str
) -> None:
    for ours in (
        "--optimus-cc balanced --no-compression-trial",
        "--optimus-cc --dp-compression-rank 4 --compressed-backprop-rank 4",
    ):
        its_own_way = run_megatron(
            4, shlex.split(f"{STAGES} {flags} {ours}"), before=functools.partial(a_model_that_is_tied, tied)
        )
        by_flags = run_megatron(4, shlex.split(f"{STAGES} {other_flags} {ours}"), before=start)
        for one, other in zip(its_own_way, by_flags, strict=True):
            assert one.ended is None, one.printed[-5:]
            assert (one.losses, one.weights) == (other.losses, other.weights)
        described = [line for line in its_own_way[0].said if line.endswith(ON)]
        assert len(described) == 2 and ("embedding" in described[1]) == tied


@pytest.mark.ci
def test_a_flag_that_the_built_model_cannot_follow_is_refused_in_a_sentence() -> None:
    before = functools.partial(a_model_that_is_tied, False)
    for run in run_megatron(2, shlex.split(f"{STAGES} --fused-embedding-sync"), before=before):
        assert run.ended == 2
        assert any(
            "optimus-cc: error: --fused-embedding-sync: the embeddings are not tied" in line for line in run.printed
        )


# -- what an optimizer decides ----------------------------------------------------------------------------------------


def with_muon() -> tuple[str, str, str, list[str]]:
    """Return the gradients' formats of a preset and of a configuration, the refusal of a compressed gather, and the
    lines about the optimizer.
    """
    own_loops.start(1)
    logger, lines = logging.getLogger("optimus_cc_ext"), list[str]()
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: bool(lines.append(record.getMessage())) or True)
    found, low_rank = [], OptimusConfig(dp_compression_format="low-rank", dp_compression_rank=2)
    gather = OptimusConfig(param_gather_format="int8")
    for config in ("paper", low_rank, gather):
        model = own_loops.build(1, in_bf16=True, use_distributed_optimizer=config is gather)
        optimizer = own_loops.optimizer_of(model)
        optimizer.config.optimizer = "muon"  # Megatron's Muon needs a package of its own
        try:
            found.append(optimus_cc_ext.compress(model, optimizer, config)._session.config.dp_compression_format)
        except OptimusError as error:
            found.append(str(error))
    return found[0], found[1], found[2], [line for line in lines if "muon" in line]


def test_a_preset_sends_int8_with_muon_in_a_custom_loop_as_on_the_command_line() -> None:
    ranks = run_ranks(2, with_muon, timeout=150)
    preset_line, explicit_line = ranks[0][3]
    assert "sends DP gradients in int8" in preset_line and "low-rank: " in explicit_line
    for preset, explicit, gather, _ in ranks:
        assert (preset, explicit) == ("int8", "low-rank")
        assert gather.startswith("param_gather_format: the distributed optimizers of Muon and others copy shards")
