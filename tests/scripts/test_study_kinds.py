"""The study of optimizers' steps by kind of matrix: its Adam is torch's, its Muon orthogonalises, kinds are found by
name, errors are relative.
"""

from pathlib import Path

import pytest
import torch

from scripts.study.kinds import BETAS, EPSILON, adam, compare, kind_of, main, muon


def test_steps_and_second_moments_are_those_of_torch() -> None:
    gradients = [torch.randn(20, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    weights = torch.nn.Parameter(torch.zeros(20))
    optimizer = torch.optim.Adam([weights], lr=1.0, betas=BETAS, eps=EPSILON)
    for gradient in gradients:
        before, weights.grad = weights.detach().clone(), gradient.clone()
        optimizer.step()
    step, root = adam(gradients)
    torch.testing.assert_close(before - weights.detach(), step, rtol=1e-4, atol=1e-5)  # the weights are rounded
    correction = 1 - BETAS[1] ** 5
    torch.testing.assert_close((optimizer.state[weights]["exp_avg_sq"] / correction).sqrt(), root)


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_muons_step_has_the_singular_vectors_of_the_momentum_and_singular_values_near_1(shape: tuple[int, int]) -> None:
    first, second = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    left, _, right = torch.linalg.svd(0.9 * first + second, full_matrices=False)  # the momentum, up to a factor
    values = left.T @ muon([first, second]) @ right.T
    # Five Newton-Schulz steps move all but the smallest singular values into the range from 0.68 to 1.21.
    assert values.diagonal().min() > 0.65 and values.diagonal().max() < 1.25
    torch.testing.assert_close(values, values.diagonal().diag(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mp_rank_00 decoder.layers.0.mlp.router.weight", "router"),
        ("mp_rank_00 decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", "experts"),
        ("mp_rank_01 decoder.layers.1.self_attention.linear_qkv.weight", "attention"),
        ("mp_rank_00 decoder.layers.0.mlp.linear_fc2.weight", "MLP"),
        ("mp_rank_00 embedding.word_embeddings.weight", "vocabulary"), ("mp_rank_01 output_layer.weight", "vocabulary"),
    ],
)  # fmt: skip
def test_the_kind_of_a_matrix_is_read_from_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_errors_are_relative_by_kind() -> None:
    exact = {"mlp.router.weight": torch.tensor([[3.0, 4.0]]), "output_layer.weight": torch.tensor([[1.0, 1.0]])}
    ours = exact | {"output_layer.weight": torch.tensor([[1.0, -1.0]])}
    found = compare([ours], [exact])
    assert found["router"] == [0.0, 0.0, 0.0, 0.0]
    # Adam's first step is the gradient's sign: one of two steps differs by 2, and second moments are equal.
    assert found["vocabulary"] == [pytest.approx(2**0.5), pytest.approx(2**0.5), 0.0, None], "Muon leaves it to Adam"
    with pytest.raises(ValueError, match="the same iterations and matrices"):
        compare([ours], [])


def test_bad_input_ends_with_status_2_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in ((["--models", "bert"], "'bert' is none of"), (["--points", "a"], "give whole numbers")):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert reason in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(600)  # six trainings, each of which starts four ranks
def test_the_study_prints_every_kind_of_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tiny", "--models", "moe", "--points", "1", "--iterations", "2", "--max-mb", "1"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    header, *rows = (tmp_path / "out" / "kinds.csv").read_text().splitlines()
    assert header.startswith("model,weights of,kind,") and [row.split(",")[2] for row in rows] == [
        "router", "experts", "attention", "vocabulary"
    ], printed  # fmt: skip
    for row in rows:
        int4, int5, int6, int8 = (float(row.split(",")[3 + 4 * place]) for place in range(4))
        assert int4 > int5 > int6 > int8 > 0 or row.split(",")[2] == "router"
