"""Which models are a GPT-2, and what merging ranks and cutting windows means, on a few numbers."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.evaluation.__main__ import main
from optimus_cc_ext.evaluation.architecture import architecture_of, padded_to
from optimus_cc_ext.evaluation.gpt2 import gpt2_weights
from optimus_cc_ext.evaluation.merge import join_stages, merge_tensor_ranks, unstack_layers, with_local_names
from optimus_cc_ext.evaluation.perplexity import windows

SAVED = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "group_query_attention": False,
    "kv_channels": 4,
    "ffn_hidden_size": 16,
    "max_position_embeddings": 6,
    "padded_vocab_size": 12,
    "make_vocab_size_divisible_by": 2,
    "tensor_model_parallel_size": 3,
    "pipeline_model_parallel_size": 1,
    "layernorm_epsilon": 1e-5,
    "bias_gelu_fusion": True,
    "untie_embeddings_and_output_weights": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "swiglu": False,
    "num_experts": None,
    "softmax_type": "vanilla",
}


def saved(**changes: Any) -> Namespace:
    return Namespace(**{**SAVED, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position_embedding_type": "rope"}, "--position-embedding-type rope"),
        ({"normalization": "RMSNorm"}, "--normalization RMSNorm"),
        ({"swiglu": True}, "--swiglu"),
        ({"squared_relu": True}, "--squared-relu"),
        ({"add_bias_linear": False}, "--disable-bias-linear"),
        ({"group_query_attention": True, "num_query_groups": 1}, "--group-query-attention --num-query-groups 1"),
        ({"kv_channels": 16}, "--kv-channels 16"),
        ({"num_experts": 8}, "--num-experts 8"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1"),
        ({"window_size": (128, 0)}, "--window-size (128, 0)"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm"),
        ({"use_te_activation_func": True}, "--use-te-activation-func"),
        ({"swiglu": True, "normalization": "RMSNorm"}, "--normalization RMSNorm, --swiglu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_architecture_is_refused_by_the_flags_that_made_it(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(FlagError) as refused:
        architecture_of(saved(**changes))
    assert str(refused.value).startswith(f"--checkpoint: the model was trained with {named}, which Hugging Face's")


def test_megatrons_fused_gelu_is_the_tanh_approximation() -> None:
    """The formulas themselves: Megatron's two, against transformers' activations by the names we give."""
    from megatron.core.fusions.fused_bias_gelu import bias_gelu
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 101)
    fused, unfused = architecture_of(saved()).gelu, architecture_of(saved(bias_gelu_fusion=False)).gelu
    torch.testing.assert_close(ACT2FN[fused](x), bias_gelu(torch.zeros(101), x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ACT2FN[unfused](x), torch.nn.functional.gelu(x), rtol=1e-6, atol=1e-6)
    assert fused != unfused


def test_padding_follows_the_ranks_that_the_vocabulary_was_split_over() -> None:
    assert architecture_of(saved()).vocab_multiple == 6
    assert [padded_to(size, 6) for size in (1, 6, 7, 12)] == [6, 6, 12, 12]
    assert architecture_of(saved(pad_vocab_size=False)).vocab_multiple == 1


def test_shards_are_joined_along_the_dimension_that_was_split_and_replicas_must_agree() -> None:
    def rank(number: int) -> dict[str, torch.Tensor]:
        return {
            "decoder.layers.0.mlp.linear_fc1.weight": torch.full((2, 3), float(number)),
            "decoder.layers.0.mlp.linear_fc1.bias": torch.full((2,), float(number)),
            "decoder.layers.0.mlp.linear_fc2.weight": torch.full((3, 2), float(number)),
            "decoder.layers.0.mlp.linear_fc2.bias": torch.ones(3),
        }

    merged = merge_tensor_ranks([rank(0), rank(1)])
    assert merged["decoder.layers.0.mlp.linear_fc1.weight"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert merged["decoder.layers.0.mlp.linear_fc1.bias"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert merged["decoder.layers.0.mlp.linear_fc2.weight"].tolist() == [[0.0, 0.0, 1.0, 1.0]] * 3
    assert merged["decoder.layers.0.mlp.linear_fc2.bias"].tolist() == [1.0] * 3

    other = rank(1) | {"decoder.layers.0.mlp.linear_fc2.bias": torch.zeros(3)}
    with pytest.raises(FlagError, match=r"tensor-parallel ranks hold different copies of .*linear_fc2\.bias"):
        merge_tensor_ranks([rank(0), other])


def test_layers_are_numbered_through_stages_of_any_depth() -> None:
    words, one = torch.arange(6.0), torch.ones(1)
    stages = [
        {"embedding.word_embeddings.weight": words, "decoder.layers.0.x": one, "decoder.layers.1.x": 2 * one},
        {"decoder.layers.0.x": 3 * one},
        {"decoder.layers.0.x": 4 * one, "decoder.layers.1.x": 5 * one, "output_layer.weight": words.clone()},
    ]
    joined = join_stages(stages, tied=True)
    assert [float(joined[f"decoder.layers.{number}.x"]) for number in range(5)] == [1, 2, 3, 4, 5]
    assert "output_layer.weight" not in joined
    assert "output_layer.weight" in join_stages(stages, tied=False)
    stages[2]["output_layer.weight"] += 1
    with pytest.raises(FlagError, match="first and the last stage hold different copies of the tied word embedding"):
        join_stages(stages, tied=True)


def test_both_ways_of_naming_and_stacking_layers_become_one() -> None:
    fused: dict[str, object] = {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": torch.arange(2.0),
        "decoder.layers.mlp.linear_fc1.layer_norm_bias": torch.arange(2.0),
        "decoder.layers.mlp.linear_fc1._extra_state": None,
        "decoder.final_layernorm.weight": torch.ones(3),
    }
    expected = {
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.0.pre_mlp_layernorm.bias",
        "decoder.layers.1.pre_mlp_layernorm.bias",
        "decoder.final_layernorm.weight",
    }
    assert set(unstack_layers(with_local_names(fused))) == expected
    numbered = {"decoder.layers.1.input_layernorm.weight": torch.ones(3)}
    assert unstack_layers(numbered) == numbered


def test_parameters_that_a_gpt2_lacks_or_does_not_have_are_named() -> None:
    model = architecture_of(saved())
    with pytest.raises(FlagError, match=r"lacks 28 of a GPT-2's parameters, such as decoder\.final_layernorm\.bias"):
        gpt2_weights({}, model, vocab_size=7)
    with pytest.raises(FlagError, match=r"GPT-2 does not have, such as decoder\.router"):
        gpt2_weights({"decoder.router": torch.ones(1)}, model, vocab_size=7)


@pytest.mark.parametrize("tokens", [2, 4, 5, 6, 9, 14])
def test_windows_predict_every_token_once_and_never_exceed_the_length(tokens: int) -> None:
    cut = list(windows(tokens, 4))
    assert [at for _, first, end in cut for at in range(first, end)] == list(range(tokens - 1))
    assert all(0 <= begin <= first and end - begin == min(4, tokens - 1) for begin, first, end in cut)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "--checkpoint", "{}/none", "--output", "{}/out"], "--checkpoint: {}/none is not a folder"),
        (["convert", "--checkpoint", "{}", "--output", "{}/out"], "--checkpoint: {} has neither metadata.json nor"),
        (["perplexity", "--model", "{}", "--text", "{}/x.txt"], "--model: "),
        (["tasks", "--model", "{}/none"], ""),
    ],
    ids=["no folder", "no checkpoint", "no model", "no model for tasks"],
)
def test_bad_input_ends_with_status_2_and_one_line(
    arguments: list[str], said: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("error: " + said.format(tmp_path)) and "\n" not in printed
    assert list(tmp_path.iterdir()) == []
