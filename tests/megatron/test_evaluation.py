"""A converted checkpoint is the model that Megatron trained: the same logits, the same words, the same loss."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools.data import prepare
from scripts.eval.convert import convert, main
from tests.megatron.evaluation_runs import LENGTH, NEW_TOKENS, PROMPTS, Answers, train

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "scripts" / "eval" / "tasks"
FETCHED = ROOT / ".eval" / hashlib.sha256((ROOT / "requirements-eval.lock").read_bytes()).hexdigest()[:12]
"""Folder into which scripts/eval/tasks.sh has put lm-evaluation-harness, if it was called here."""

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None and not FETCHED.is_dir(),
    reason="lm-evaluation-harness is not installed (extra: eval), and scripts/eval/tasks.sh has not fetched it",
)

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    # This run saves the default format, has Megatron's default gelu (the approximation), and an output layer of its
    # own.
    "TP1-PP1": (1, "--untie-embeddings-and-output-weights", {"gelu_fusion": True}),
    # This run saves one file per rank, then the same as a distributed checkpoint; its embeddings are tied, its gelu
    # exact.
    "TP2-PP2": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --ckpt-format torch",
        {"other_format": "torch_dist"},
    ),
    # Each stage has two chunks of one layer: the layers of a rank are not neighbours. The vocabulary has no padding.
    "PP2-interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --ckpt-format torch "
        "--make-vocab-size-divisible-by 300",
        {},
    ),
}
TOLERANCE = 1e-4
"""Tolerance of logits of magnitude 1 to 10, in fp32: sums in another order differ in the sixth digit."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("data") / "text"
    prepare(ROOT / "README.md", folder, vocab_size=300, workers=1, progress=False)
    return folder


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(data / "tokenizer")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("text") / "held_out.txt"
    path.write_text((ROOT / "CHANGELOG.md").read_text()[:3000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: Path, tokenizer: Any, text: Path) -> Any:
    """Make each layout's run once: Megatron's answers, its checkpoint, and the converted checkpoint."""

    @functools.cache
    def run(name: str) -> tuple[Answers, Path, Path]:
        world_size, flags, settings = LAYOUTS[name]
        folder = tmp_path_factory.mktemp(name)
        prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
        stream = [tokenizer.eos_token_id, *tokenizer(text.read_text())["input_ids"]]
        save = folder / "checkpoint"
        answers = train(world_size, flags.split(), data=data, save=save, prompts=prompts, text=stream, **settings)
        convert(save, folder / "converted")
        return answers, save, folder / "converted"

    return run


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_converted_checkpoint_answers_as_megatron_does(runs: Any, tokenizer: Any, layout: str) -> None:
    answers, _, folder = runs(layout)
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(folder)
    model = load(folder)
    assert model.config.vocab_size == len(own) == len(tokenizer) == 300
    assert answers["logits"].shape[-1] == {"TP1-PP1": 384, "TP2-PP2": 512, "PP2-interleaved": 300}[layout]
    assert model.config.activation_function == ("gelu_new" if layout == "TP1-PP1" else "gelu")
    for index, prompt in enumerate(PROMPTS):
        tokens = own(prompt, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            logits = model(tokens).logits[0]
        expected = answers["logits"][index, : tokens.shape[1], : len(own)]
        assert expected.std() > 0.1, "logits that are all alike would prove nothing"
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
        # Megatron goes on after an end-of-text token.
        continued = model.generate(
            tokens, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert continued[0, tokens.shape[1] :].tolist() == answers["continuations"][index]


@pytest.mark.full
def test_both_formats_give_the_same_model(runs: Any, tmp_path: Path) -> None:
    _, save, folder = runs("TP2-PP2")
    convert(save.with_name("torch_dist"), tmp_path / "converted")
    assert (save.with_name("torch_dist") / "iter_0000003" / "metadata.json").is_file()
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "converted" / name).read_bytes() == (folder / name).read_bytes()


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., dict[str, dict[str, float]]]:
    """Return a function that runs scripts.eval.harness with its flags and returns the metrics by task."""

    def run(*flags: str | Path) -> dict[str, dict[str, float]]:
        output = tmp_path / "results.json"
        for old in tmp_path.glob("results*"):
            old.unlink()
        command = [sys.executable, "-P", "-m", "scripts.eval.harness", *map(str, flags), "--output-path", str(output)]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        environment = {**os.environ, **offline, "PYTHONPATH": f"{FETCHED}:{ROOT}"}
        ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        [written] = tmp_path.glob("results*.json")
        results: dict[str, dict[str, float]] = json.loads(written.read_text())["results"]
        assert all(name in ended.stdout for name in results)
        return results

    return run


@needs_harness
def test_the_harness_measures_megatrons_loss_of_a_text(
    runs: Any, tokenizer: Any, text: Path, tmp_path: Path, ask: Any
) -> None:
    # The vocabulary has no padding: Megatron's softmax includes padding, which has a share of the likelihood early in
    # training.
    answers, _, folder = runs("PP2-interleaved")

    def nats(path: Path) -> float:
        bits = ask("--model", folder, "--text", path, "--batch-size", "3")["local_text"]["bits_per_byte,none"]
        return bits * math.log(2) * len(path.read_bytes())

    # The expected bits, computed by hand: each token from the tokens before it in its window.
    ids = [tokenizer.eos_token_id, *tokenizer(text.read_text())["input_ids"]]
    assert len(ids) - 1 > 3 * LENGTH
    model, total = load(folder), 0.0
    with torch.inference_mode():
        for at in range(0, len(ids) - 1, LENGTH):
            end = min(at + LENGTH, len(ids) - 1)
            begin = max(0, end - LENGTH)
            likelihoods = model(torch.tensor([ids[begin:end]])).logits[0].log_softmax(-1)
            total -= sum(float(likelihoods[now - begin, ids[now + 1]]) for now in range(at, end))
    assert nats(text) == pytest.approx(total, rel=1e-5)

    # Megatron's perplexity is of whole windows only, so the text is cut to them.
    whole = tmp_path / "whole.txt"
    whole.write_text(tokenizer.decode(ids[1 : answers["losses"].numel() + 1]), encoding="utf-8")
    assert nats(whole) == pytest.approx(answers["losses"].double().sum().item(), rel=1e-5)


@needs_harness
def test_the_harness_runs_local_tasks_offline_and_lines_of_ones_own(runs: Any, tmp_path: Path, ask: Any) -> None:
    _, _, folder = runs("TP2-PP2")
    results = ask("--model", folder, "--local")
    assert results.keys() == {"local_last_word", "local_choice", "local_text"}
    assert 0 <= results["local_choice"]["acc,none"] <= 1
    own = tmp_path / "own.jsonl"
    own.write_text((TASKS / "last_word.jsonl").read_text().replace('"text"', '"body"'))
    same = ask("--model", folder, "--text", own, "--json-key", "body")["local_text"]
    assert same["byte_perplexity,none"] == pytest.approx(results["local_text"]["byte_perplexity,none"], rel=1e-6)


@pytest.mark.full
def test_the_command_line_converts(runs: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, save, folder = runs("TP1-PP1")
    target = tmp_path / "new" / "converted"
    arguments = ["--checkpoint", str(save / "iter_0000003"), "--output", str(target)]
    assert main([*arguments, "--tokenizer", str(data / "tokenizer")]) == 0
    assert "float32, vocabulary 300" in capsys.readouterr().out
    assert main(arguments) == 0, "what was made here is replaced"
    assert json.loads((target / "conversion.json").read_text())["files"]
    assert (target / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.full
def test_what_is_missing_or_foreign_is_named_and_nothing_is_written(runs: Any, data: Path, tmp_path: Path) -> None:
    _, save, _ = runs("TP2-PP2")
    distributed = save.with_name("torch_dist")
    target = tmp_path / "target"

    def refusal(checkpoint: Path, **settings: Any) -> str:
        with pytest.raises(FlagError) as refused:
            convert(checkpoint, target, **settings)
        assert not target.exists() and sorted(tmp_path.glob(".*")) == []
        return str(refused.value)

    assert "no iter_0000099 (there: iter_0000003)" in refusal(save, iteration=99)
    assert "--checkpoint: " in (said := refusal(data)) and "is no checkpoint of Megatron" in said

    broken = tmp_path / "broken"
    shutil.copytree(save, broken)
    (broken / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    assert "incomplete: mp_rank_01_001/model_optim_rng.pt missing" in refusal(broken)
    (broken / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt").write_bytes(b"PK no such thing")
    assert "mp_rank_01_001/model_optim_rng.pt cannot be read" in refusal(broken)

    shutil.copytree(distributed, tmp_path / "shards")
    (tmp_path / "shards" / "iter_0000003" / "__2_0.distcp").unlink()
    assert "incomplete: __2_0.distcp missing" in refusal(tmp_path / "shards")

    prepare(ROOT / "README.md", tmp_path / "other", vocab_size=600, workers=1, progress=False)
    said = refusal(save, tokenizer=tmp_path / "other" / "tokenizer")
    assert said.startswith("--tokenizer: ") and "has 600 tokens" in said and "512 rows" in said
    assert "--tokenizer: " in refusal(save, tokenizer=data)
