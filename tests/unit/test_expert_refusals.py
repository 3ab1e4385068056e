"""Options of Megatron with which tokens to experts stay dense: a flag is refused, and the rest of a run goes on."""

from argparse import Namespace
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
import torch

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.collectives.nodes import Levels
from optimus_cc_ext.config.classes import EXPERT_DISPATCH, EXPERT_GRADIENT
from optimus_cc_ext.config.flags import Request
from optimus_cc_ext.config.presets import Layout, check_layout, describe, direct_of, resolve, row_width_of
from optimus_cc_ext.config.refusals import conflicts, remarks
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.hooks import attaching
from optimus_cc_ext.hooks.facts import _routing
from optimus_cc_ext.tools.doctor.tokens import ExpertLayers, Tokens

TOKENS = OptimusConfig(expert_dispatch_format="int8", expert_gradient_format="int8")
LAYOUT = {"stages": 1, "data_parallel": 2, "tied_embeddings": False, "expert_parallel": 2, "row_width": 256}


class Module(Enum):
    """Stand-in for Megatron's enumeration of the modules of a layer."""

    attn, moe, moe_router = range(3)


def options(**given: Any) -> Namespace:
    alltoall = {"num_experts": 8, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    return Namespace(**alltoall | given)


@pytest.mark.parametrize("dispatcher", ["flex", "allgather"])
def test_other_dispatchers_conflict_with_tokens_alone_and_one_line_says_that_their_traffic_stays(dispatcher) -> None:
    args = options(moe_token_dispatcher_type=dispatcher)
    found = conflicts(args, TOKENS.replace(dp_compression_format="low-rank"))
    assert found.keys() == {EXPERT_DISPATCH, EXPERT_GRADIENT}
    (line,) = remarks(args, OptimusConfig(dp_compression_format="low-rank"))
    assert line.startswith(f"--moe-token-dispatcher-type {dispatcher}: tokens are exchanged as in vanilla")
    assert remarks(options(), TOKENS) == remarks(args, OptimusConfig()) == []
    assert remarks(options(moe_token_dispatcher_type=dispatcher, num_experts=None), TOKENS) == []


@pytest.mark.parametrize("name", ["cuda_graph_modules", "cuda_graph_scope"])
@pytest.mark.parametrize(
    ("implementation", "modules", "conflict"),
    [
        ("none", [], False),
        ("local", [], True),
        ("transformer_engine", [Module.attn, Module.moe], True),
        ("transformer_engine", [Module.attn, Module.moe_router], False),
        ("full_iteration", [], True),
    ],
)
def test_graphs_that_hold_the_moe_layer_conflict_with_tokens(name, implementation, modules, conflict) -> None:
    found = conflicts(options(cuda_graph_impl=implementation, **{name: modules}), TOKENS)
    assert bool(found) is conflict


@pytest.mark.parametrize(
    "option",
    [
        {"overlap_moe_expert_parallel_comm": True},
        {"moe_permute_fusion": True},
        {"moe_router_padding_for_quantization": True},
        {"expert_tensor_parallel_size": 2},
        {"moe_shared_expert_overlap": True},
        {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.5},
    ],
)
def test_options_beside_which_tokens_are_compressed_conflict_with_nothing(option) -> None:
    assert conflicts(options(**option), TOKENS) == {}


@pytest.mark.parametrize(
    ("facts", "given", "line"),
    [
        ({}, {}, None),
        ({"expert_parallel": 0}, {}, None),
        ({"expert_parallel": 1}, {}, None),
        ({"row_width": 0}, {}, "a token's values do not divide into blocks of 128"),
        ({}, {"moe_token_dispatcher_type": "flex"}, "only the tokens of the dispatcher alltoall can be compressed"),
        ({}, {"cuda_graph_impl": "local"}, "a graph of the MoE layer would compress tokens in evaluation"),
    ],
)
def test_the_preset_leaves_gradients_of_tokens_dense_with_one_line(facts, given, line) -> None:
    found = resolve(Request({}, {}, preset="balanced"), Layout(**LAYOUT | facts), options(**given))
    assert found.config.expert_dispatch_format == "dense"
    assert (found.config.expert_gradient_format == "int8") is not bool(line or facts)
    said = [note for note in found.notes if "expert gradient" in note]
    assert len(said) == bool(line) and all(line in note for note in said)


def test_a_custom_loops_preset_leaves_tokens_of_another_dispatcher_dense(monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(attaching.dist, "get_rank", lambda: 0)
    dispatcher = options(moe_token_dispatcher_type="allgather")
    config, _ = attaching._chosen("balanced", {}, Layout(**LAYOUT), dispatcher)
    assert config.expert_gradient_format == "dense" and config.dp_compression_format == "int8"
    assert "leaves out expert gradient" in caplog.text


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, None),
        ({"expert_parallel": 0}, "no token is sent"),
        ({"expert_parallel": 1}, "no token is sent"),
        ({"row_width": 0}, "do not divide into blocks of 128"),
    ],
)
def test_a_layout_without_tokens_in_whole_blocks_is_refused(facts, reason) -> None:
    layout = Layout(**LAYOUT | facts)
    if reason is None:
        check_layout(TOKENS, layout)
        return
    with pytest.raises(FlagError, match=reason) as refused:
        check_layout(TOKENS, layout)
    assert refused.value.flag == "--expert-dispatch-format"


def test_a_token_is_as_wide_as_the_latent_size_if_there_is_one() -> None:
    def width(**model: int | None) -> int:
        return row_width_of(Namespace(**model))

    assert width(hidden_size=512, moe_latent_size=None) == width(hidden_size=512) == 512
    assert width(hidden_size=512, moe_latent_size=256) == 256
    assert width(hidden_size=512, moe_latent_size=200) == width(hidden_size=64) == 0


@pytest.mark.parametrize(
    ("model", "rows", "again"),
    [
        ({}, 2, False),
        ({"moe_expert_capacity_factor": 1.5}, 2, False),
        ({"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}, 3, False),
        ({"recompute_granularity": "full"}, 2, True),
        ({"moe_layer_recompute": True}, 2, True),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, 2, False),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}, 2, True),
    ],
)
def test_capacity_padding_counts_as_tokens_and_recomputation_sends_them_again(model, rows, again) -> None:
    megatrons = {
        "num_experts": 4, "expert_model_parallel_size": 2, "moe_layer_freq": 1, "num_layers": 2,
        "moe_router_topk": 2, "moe_router_dtype": None, "params_dtype": torch.float32,
        "moe_pad_expert_input_to_capacity": False, "moe_expert_capacity_factor": None,
        "recompute_granularity": None, "recompute_modules": None, "moe_layer_recompute": False,
    }  # fmt: skip
    found = ExpertLayers.of(Namespace(**megatrons | model))
    assert (found.rows_per_token, found.recomputed) == (rows, again)


ONCE = Request({"expert_exchange": "once-a-node"}, {"expert_exchange": "--expert-exchange"})


@pytest.mark.parametrize(
    ("facts", "given", "reason"),
    [
        ({}, {}, None),
        ({"expert_parallel": 0}, {}, "no token is sent"),
        ({"direct": "--some-flag moves rows"}, {}, "tokens cannot go once a node: --some-flag moves rows"),
        ({}, {"cuda_graph_impl": "local"}, "a graph of the MoE layer"),
        ({}, {"moe_token_dispatcher_type": "allgather"}, "only the tokens of the dispatcher alltoall"),
    ],
)
def test_once_a_node_by_itself_switches_tokens_on_in_dense_formats_or_is_refused_by_its_flag(
    facts, given, reason
) -> None:
    if reason is None:
        config = resolve(ONCE, Layout(**LAYOUT | facts), options(**given)).config
        assert config.is_on(EXPERT_DISPATCH) and config.is_on(EXPERT_GRADIENT) and config.any_technique
        assert config.expert_dispatch_format == config.expert_gradient_format == "dense"
        assert describe(config) == "expert dispatch (dense, once a node), expert gradient (dense, once a node)"
        return
    for preset in (None, "balanced"):
        with pytest.raises(FlagError, match=reason) as refused:
            resolve(replace(ONCE, preset=preset), Layout(**LAYOUT | facts), options(**given))
        assert refused.value.flag == "--expert-exchange"


def test_a_preset_beside_once_a_node_does_not_try_tokens_and_auto_alone_has_no_effect() -> None:
    layout = Layout(**LAYOUT)
    both = resolve(replace(ONCE, preset="balanced"), layout, options()).config
    assert both.expert_gradient_format == "int8" and not both.only_by_preset(EXPERT_GRADIENT)
    (line,) = resolve(Request({"expert_exchange": "auto"}, {"expert_exchange": "x"}), layout, options()).notes
    assert line.startswith("--expert-exchange: no effect")


@pytest.mark.parametrize(
    ("given", "direct"),
    [
        ({}, ""),
        ({"moe_pad_expert_input_to_capacity": True}, "--moe-pad-expert-input-to-capacity"),
        ({"expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size"),
        ({"expert_tensor_parallel_size": 1}, ""),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
    ],
)
def test_options_with_which_tokens_go_direct_are_named(given, direct) -> None:
    found = direct_of(options(**given))
    assert found.startswith(direct) and bool(found) is bool(direct)


def test_a_token_picks_experts_or_with_limited_routing_groups_of_them() -> None:
    assert _routing(options(moe_router_topk=2)) == (8, 2, 2)
    limited = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    assert _routing(options(moe_router_topk=4, **limited)) == (4, 2, 4)
    assert _routing(options(num_experts=None)) == (0, 0, 0)
    for number in (1, 4):
        all_groups = dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk"), number)
        assert _routing(options(moe_router_topk=2, **all_groups)) == (8, 2, 2), "all groups are no limit"


def test_doctor_counts_the_rows_of_both_hops() -> None:
    # Each of 10 tokens goes to all 4 experts, on 2 nodes of 2 ranks: 2 rows between nodes, 4 copies inside of them.
    mixture = ExpertLayers(layers=1, experts=4, probability=4, rows_per_token=4)
    tokens = Tokens(number=40, dtype=torch.bfloat16, hidden=256, mixture=mixture)
    levels, routing = Levels(nodes=2, members=2), (4, 4, 4)
    for chosen, row in (("dense", 512), ("int8", 260)):
        # To the other node go 10 rows and come 10 sums; half of 40 copies goes to the rank beside, and back dense.
        outside, inside = 10 * row + 10 * row, 20 * row + 20 * 512
        found = tokens.once(EXPERT_GRADIENT, chosen, levels, routing)
        assert found == (outside + inside + 40 * 4 * 3 // 4, outside + 40 * 4 // 2)
        # A byte of experts' bits beside each row of the dispatch, and 3 numbers for the other node.
        ahead = 10 + 3 * 8
        there = tokens.once(EXPERT_DISPATCH, chosen, levels, routing)
        assert (there.sent - found.sent, there.leaving - found.leaving) == (ahead, ahead)
