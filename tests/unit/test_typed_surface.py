"""Law: a type checker finds typos in what a training loop calls, and Python refuses typos that it cannot find."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from optimus_cc_ext import FlagError, OptimusConfig

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
from __future__ import annotations
import torch
import optimus_cc_ext
from optimus_cc_ext import FlagError, OptimusConfig, OptimusError, UnfitState


def main(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    vanilla = optimus_cc_ext.compress(model, optimizer, OptimusConfig(compressed_backprop_format="int8"))
    vanilla.remove()
    config = OptimusConfig(dp_compression_rank=8)
    with optimus_cc_ext.compress([model], optimizer, config, train_iters=10) as compression:
        with compression.step(1, measured=True) as step:
            step.done(applied=True, grad_norm=1.0, clip_grad=1.0)
        try:
            compression.load_state_dict(compression.state_dict())
        except (UnfitState, FlagError, OptimusError):
            compression.remove()
        return compression.metrics()
"""

TYPOS = {
    "optimizer, config,": "optimizer, 1,",
    "dp_compression_rank=8": "dp_compresion_rank=8",
    'compressed_backprop_format="int8"': 'compressed_backprop_format="int5"',
    "train_iters=10": 'train_iters="10"',
    "grad_norm=1.0": "norm=1.0",
}


def errors_of_mypy(script: str, folder: Path) -> list[str]:
    path = folder / "user.py"
    path.write_text(script)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "mypy.ini"), str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return [line for line in run.stdout.splitlines() if line.startswith(str(path)) and ": error:" in line]


@pytest.mark.full
def test_mypy_finds_five_mistakes_and_nothing_else(tmp_path: Path) -> None:
    assert errors_of_mypy(SCRIPT, tmp_path) == []
    with_typos = SCRIPT
    for right, wrong in TYPOS.items():
        assert with_typos.count(right) == 1
        with_typos = with_typos.replace(right, wrong)
    errors = errors_of_mypy(with_typos, tmp_path)
    assert len(errors) == len(TYPOS) and len({error.split(":")[1] for error in errors}) >= 4, errors


def test_a_keyword_that_is_no_field_is_refused_by_its_name() -> None:
    for make in (OptimusConfig, OptimusConfig().replace):
        with pytest.raises(TypeError, match="dp_compresion_rank"):
            make(dp_compresion_rank=8)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("compressed_backprop_rank", "8", "'8' is not of type int"),
        ("compressed_backprop_rank", 8.0, "8.0 is not of type int"),
        ("compressed_backprop_rank", True, "True is not of type int"),
        ("fused_embedding_sync", "no", "'no' is not of type bool"),
        ("dp_compression_warmup", "0.1", "'0.1' is not of type float"),
        ("dp_error_feedback", 1, "1 is not of type bool"),
        ("compressed_backprop_format", "fp8", "fp8 is gone, because int8 has a fourth of its error"),
        ("pipeline_forward_format", "int4", "'int4' is not one of dense, int8"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_field(field: str, value: object, said: str) -> None:
    for make in (OptimusConfig, OptimusConfig().replace):
        with pytest.raises(FlagError) as refused:
            make(**{field: value})  # type: ignore[arg-type]
        assert str(refused.value).startswith(f"{field}: {said}")


def test_every_field_has_its_help_where_python_shows_it() -> None:
    for field in dataclasses.fields(OptimusConfig):
        assert (f"{field.name}: " in (OptimusConfig.__doc__ or "")) == bool(field.metadata["help"])
