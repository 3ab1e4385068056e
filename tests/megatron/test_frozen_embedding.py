"""Law: a tied embedding that is not trained (adapters, frozen language models) is left out with a line, not refused."""

import logging
import shlex
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.hooks import start
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops
from tests.megatron_runs import run_megatron

pytestmark = pytest.mark.ci

LEFT_OUT = "leaves out embedding: the tied embedding is frozen, so nothing of it is summed"


def freeze_tied_embeddings() -> None:
    """Freeze the tied embedding of every GPT that is built from now on, before it is wrapped in DDP."""
    from megatron.core.models.gpt import GPTModel

    build = GPTModel.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for parameter in self.parameters():
            if getattr(parameter, "shared_embedding", False):
                parameter.requires_grad_(False)

    GPTModel.__init__ = built


def gradients(model: Any) -> dict[str, torch.Tensor]:
    trained = (item for item in model.module.named_parameters() if item[1].requires_grad)
    return {name: parameter.main_grad.clone() for name, parameter in trained}


def frozen(way: str, preset: str, ddp: dict[str, Any]) -> tuple[list[str], float, int, bool]:
    """Return the lines about what is left out, the largest error of a gradient, the number of steps, and whether there
    is a process group for the embedding.
    """
    own_loops.start(2)
    freeze_tied_embeddings()
    logger, lines = logging.getLogger("optimus_cc_ext"), list[str]()
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: bool(lines.append(record.getMessage())) or True)
    vanilla = own_loops.build(2, **ddp)
    own_loops.pass_of(vanilla)
    expected = gradients(vanilla)
    model = own_loops.build(2, **ddp)
    optimizer = own_loops.optimizer_of(model)
    config: Any = OptimusConfig(fused_embedding_sync=True) if way == "explicit" else preset
    session = optimus_cc_ext.compress(model, optimizer, config, train_iters=10, compression_trial=False)._session
    own_loops.pass_of(model)
    far = error(gradients(model), expected)
    optimizer.step()
    said = [line for line in lines if "leaves out embedding" in line]
    return said, far, session.completed_steps, session.embedding.group is not None


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - of).norm() / of.norm()) for name, of in expected.items())


@pytest.mark.parametrize(
    ("way", "preset", "ddp"),
    [
        ("compress", "balanced", {"overlap_grad_reduce": True}), ("bridge", "paper", {}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("compress", "paper", {}), ("compress", "balanced", {"use_distributed_optimizer": True}),
                ("explicit", "", {}),
            )
        ),
    ],
)  # fmt: skip
def test_a_frozen_tied_embedding_is_left_out_with_a_line(way: str, preset: str, ddp: dict[str, Any]) -> None:
    (first, *_), *_ = ranks = run_ranks(4, frozen, way, preset, ddp, timeout=150)
    assert first == [f"optimus-cc: {LEFT_OUT}"]
    for said, far, steps, has_group in ranks:
        assert steps == 1 and far < 0.5
        assert not has_group, "a process group costs memory"
        assert said == first or not said, "one rank speaks for all"


@pytest.mark.ci
def test_the_launcher_leaves_a_frozen_tied_embedding_out() -> None:
    flags = shlex.split("--pipeline-model-parallel-size 2 --train-iters 2 --optimus-cc balanced --no-compression-trial")
    runs = run_megatron(4, flags, before=frozen_and_installed)
    assert [run.ended for run in runs] == [None] * 4
    assert LEFT_OUT in runs[0].said
    assert all(loss < 7 for run in runs for loss in run.losses if loss is not None)


def frozen_and_installed() -> None:
    freeze_tied_embeddings()
    start()
