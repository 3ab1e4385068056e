"""Evaluation on a few numbers: which models are a GPT-2, how ranks are merged, and the harness's command line."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_cc_ext.errors import FlagError, OptimusError
from scripts.eval import convert, harness
from scripts.eval.gpt2 import gpt2_config, gpt2_weights, padded_vocab_size
from scripts.eval.merge import join_stages, merge_tensor_ranks, unstack_layers, with_local_names
from tests.shell_scripts import ROOT, run_script

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


def config_of(**changes: Any) -> dict[str, Any]:
    return gpt2_config(saved(**changes), vocab_size=7, end_of_text=0)


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
        config_of(**changes)
    assert str(refused.value).startswith(f"--checkpoint: the model was trained with {named}, which Hugging Face's")


@pytest.mark.full
def test_megatrons_fused_gelu_is_the_tanh_approximation() -> None:
    """Compares the formulas themselves: Megatron's two, and transformers' activations by our names."""
    from megatron.core.fusions.fused_bias_gelu import bias_gelu
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 101)
    fused, unfused = (config_of(bias_gelu_fusion=yes)["activation_function"] for yes in (True, False))
    torch.testing.assert_close(ACT2FN[fused](x), bias_gelu(torch.zeros(101), x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ACT2FN[unfused](x), torch.nn.functional.gelu(x), rtol=1e-6, atol=1e-6)
    assert fused != unfused


def test_padding_follows_the_ranks_that_the_vocabulary_was_split_over() -> None:
    assert [padded_vocab_size(saved(), size) for size in (1, 6, 7, 12)] == [6, 6, 12, 12]
    assert padded_vocab_size(saved(pad_vocab_size=False), 7) == 7


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


def test_parameters_that_a_gpt2_lacks_or_does_not_have_or_has_in_another_shape_are_named() -> None:
    config = config_of()
    with pytest.raises(FlagError, match=r"lacks 28 of a GPT-2's parameters, such as decoder\.final_layernorm\.bias"):
        gpt2_weights({}, config)
    with pytest.raises(FlagError, match=r"GPT-2 does not have, such as decoder\.router"):
        gpt2_weights({"decoder.router": torch.ones(1)}, config)
    tensors = {name: torch.zeros(8) for name in expected_names(2)} | {"decoder.final_layernorm.weight": torch.zeros(9)}
    with pytest.raises(FlagError, match="other shapes than its saved arguments say"):
        convert._model(tensors, config)


def expected_names(layers: int) -> list[str]:
    parts = "input_layernorm self_attention.linear_qkv self_attention.linear_proj pre_mlp_layernorm mlp.linear_fc1"
    whole = [
        f"decoder.layers.{number}.{part}" for number in range(layers) for part in f"{parts} mlp.linear_fc2".split()
    ]
    names = [f"{name}.{kind}" for name in [*whole, "decoder.final_layernorm"] for kind in ("weight", "bias")]
    return [*names, "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the files of a converted model that are read before the harness runs."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"n_positions": 64}')
    monkeypatch.setattr(harness, "load_tokenizer", lambda folder, flag: None)
    monkeypatch.setattr(harness, "require_extra", lambda extra, *modules: None)
    return folder


def test_a_text_is_asked_of_the_harness_in_its_own_flags(model: Path, tmp_path: Path) -> None:
    (tmp_path / "held out.txt").write_text("text")
    arguments = ["--model", str(model), "--text", str(tmp_path / "held out.txt"), "--sequence-length", "32"]
    command = harness.harness_command([*arguments, "--batch-size", "2", "--limit=3", "--output-path=a-b"])
    assert command[:5] == ["-m", "lm_eval", "run", "--model", "hf"]
    given = dict(zip(command[5::2], command[6::2], strict=False))
    expected = {"pretrained": str(model), "dtype": "auto", "max_length": 32}
    assert json.loads(given["--model_args"]) == expected
    assert json.loads(given["--metadata"])["text_file"] == str(tmp_path / "held out.txt")
    assert given["--tasks"].endswith("/scripts/eval/tasks/local_text.yaml")
    assert command[-4:] == ["--batch_size", "2", "--limit=3", "--output_path=a-b"]


def test_without_a_text_the_papers_tasks_are_asked_and_local_ones_without_a_network(model: Path) -> None:
    asked = harness.harness_command(["--model", str(model)])
    assert asked[asked.index("--tasks") + 1] == "lambada_openai,hellaswag,piqa,mathqa,winogrande,race"
    local = harness.harness_command(["--model", str(model), "--local"])
    assert local[local.index("--tasks") + 1] == "local_last_word,local_choice,local_text"


@pytest.mark.parametrize(
    ("flags", "content", "said"),
    [
        (["--sequence-length", "65"], b"text", "--sequence-length: 65 is not between 1 and the model's 64 positions"),
        (["--sequence-length", "0"], b"text", "--sequence-length: 0 is not between 1 and the model's 64 positions"),
        ([], b" \n", "text.txt holds no text"),
        ([], b"a\n\xff", "text.txt: line 2, byte offset 2: the text is not UTF-8"),
        ([], None, "text.txt is no file"),
        (["--text", "text.jsonl"], b'{"text": "a"}\n{"body": "b"}\n', "text.jsonl: line 2: no key 'text'"),
    ],
    ids=["too long", "too short", "no text", "not UTF-8", "no file", "no such key"],
)
def test_what_the_harness_would_not_survive_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], content: bytes | None, said: str
) -> None:
    monkeypatch.chdir(model)
    if content is not None:
        Path("text.jsonl" if "text.jsonl" in flags else "text.txt").write_bytes(content)
    with pytest.raises(OptimusError) as refused:
        harness.harness_command(["--model", str(model), "--text", "text.txt", *flags])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (convert.main, ["--checkpoint", "{}/none", "--output", "{}/out"], "--checkpoint: {}/none is not a folder"),
        (convert.main, ["--checkpoint", "{}", "--output", "{}/out"], "--checkpoint: {} has neither metadata.json nor"),
        (harness.main, ["--model", "{}", "--text", "{}/x.txt"], "--model: "),
        (harness.main, ["--model", "{}/none"], "--model: "),
    ],
    ids=["no folder", "no checkpoint", "no model", "no model for tasks"],
)
def test_bad_input_ends_with_status_2_and_one_line(
    main: Callable[[list[str]], int],
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(harness, "require_extra", lambda extra, *modules: None)
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("error: " + said.format(tmp_path)) and "\n" not in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["perplexity.sh", "tasks.sh"])
@pytest.mark.full
def test_help_fetches_nothing(script: str) -> None:
    installed = {path.name for path in (ROOT / ".eval").glob("*")}
    # In a job the virtual environment exists already, as it does in this test.
    shown = run_script(f"eval/{script}", "--help", env={"SLURM_JOB_ID": "1"}, limit=120)
    assert (shown.code, shown.errors) == (0, "") and "usage: harness" in shown.output
    assert {path.name for path in (ROOT / ".eval").glob("*")} == installed
