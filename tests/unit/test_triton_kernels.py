"""Triton's kernels against float64 references.

Without a GPU the claims run in triton's interpreter, in a process of their own: triton reads TRITON_INTERPRET once,
when it is imported. With a GPU they run compiled, in this process, graphs and the absence of synchronisation included:

    pytest tests/unit/test_triton_kernels.py            # a GPU, or the interpreter
    TRITON_INTERPRET=1 pytest tests/unit/test_triton_kernels.py -k TestKernels      # the interpreter, by name

The interpreter multiplies fp32 as it is and cuts fp32 off to bf16 where a GPU rounds; only a GPU shows what 3xTF32
and the tensor cores' accumulation cost.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.compressors.orthogonalize import cholesky_qr, gram_schmidt
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.compressors.triton import launches
from optimus_cc_ext.compressors.triton.low_rank import TritonLowRank
from scripts.bench.compressors.compiled import compiling
from tests.allocations import Watch
from tests.cuda_graphs import assert_replays_without_synchronisation
from tests.interpreted import assert_holds_in_tritons_interpreter
from tests.low_rank_steps import EPS32, with_spectrum
from tests.low_rank_steps import gaussian as gaussian_on_cpu

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RUNS_HERE = launches.AVAILABLE and (GPU or launches.INTERPRETED)
# A product may be off by 2 eps (3xTF32 leaves 2^-22), and so may each partial sum of some hundred addends: in all, 8
# eps of the sum of the addends' sizes. Plain TF32 (2^-11) would be off by hundreds of eps.
PRODUCT = 8 * EPS32
CASES = pytest.mark.parametrize(
    "n, m, r, dtype", [(5, 7, 1, torch.float16), (70, 131, 3, torch.float32), (81, 65, 40, torch.bfloat16)]
)
SHARED_KIB = {80: 163, 90: 227, 100: 227, 120: 99}
"""Shared memory that a program can have, in KiB, by compute capability."""
needs_triton = pytest.mark.skipif(not launches.AVAILABLE, reason="triton is missing, or older than 3.6")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return gaussian_on_cpu(*shape, seed=seed, dtype=dtype).to(DEVICE)


def strided(t: Tensor, *, space: float = float("nan")) -> Tensor:
    """Return the same values as every second matrix of a batch, every second row, from the third column on."""
    batch, n, m = t.shape
    whole = torch.full((2 * batch, 2 * n, m + 5), space, dtype=t.dtype, device=t.device)
    return whole[::2, ::2, 3 : 3 + m].copy_(t)


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error of storing a number."""
    return torch.finfo(dtype).eps if dtype != torch.float32 else 0.0


def assert_product(found: Tensor, left: Tensor, right: Tensor) -> None:
    """Assert that `found` is left @ right up to the rounding of fp32 products and of storing it."""
    left, right = left.double(), right.double()
    exact = left @ right
    allowed = PRODUCT * (left.abs() @ right.abs()) + rounding(found.dtype) * exact.abs()
    if found.dtype == torch.float16:
        allowed += 1e-7  # 1e-7 is more than the smallest subnormal number of fp16
    worst = ((found.double() - exact).abs() / allowed.clamp_min(1e-300)).max().item()
    assert worst <= 1, f"{worst:.2g} times what is allowed"


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


@needs_triton
@pytest.mark.skipif(RUNS_HERE, reason="they run in this process")
@pytest.mark.full
def test_the_kernels_hold_in_tritons_interpreter() -> None:
    assert_holds_in_tritons_interpreter(__file__, "TestKernels")


@pytest.mark.skipif(RUNS_HERE, reason="the kernels run here")
def test_without_a_gpu_it_is_the_parent() -> None:
    m, q = gaussian(2, 9, 12), gaussian(2, 12, 3)
    assert not launches.supported(m, 3)
    p = TritonLowRank().project(m, q)
    assert torch.equal(p, FastLowRank().project(m, q))
    assert torch.equal(TritonLowRank().orthogonalize(p), FastLowRank().orthogonalize(p))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_torch_adds_projects_and_subtracts_alike(dtype: torch.dtype) -> None:
    """Covers tensors that the kernels do not take: here float64, and on a CPU without the interpreter all tensors."""
    compressor = TritonLowRank()
    matrices, residual, q = gaussian(2, 9, 12, dtype=dtype), gaussian(2, 9, 12, seed=1), gaussian(2, 12, 3, seed=2)
    total, p = torch.empty_like(residual), torch.empty(2, 9, 3, device=DEVICE)
    compressor.project_sum(matrices, residual, q, total=total, out=p)
    # An fp64 sum is rounded once, at the end.
    torch.testing.assert_close(total, matrices.float() + residual, rtol=2 * torch.finfo(torch.float32).eps, atol=1e-7)
    assert_product(p, total, q)
    remembered = total.clone()
    compressor.subtract_reconstruction(total, p.to(dtype), q.to(dtype))
    arrives = compressor.reconstruct(p.to(dtype), q.to(dtype), out=torch.empty_like(total, dtype=dtype))
    torch.testing.assert_close(total, (remembered - arrives).float(), rtol=0, atol=0)
    compressor.project_sum(matrices, None, q, total=total, out=p)
    assert torch.equal(total, matrices.float())


@needs_triton
@pytest.mark.skipif(launches.INTERPRETED or GPU, reason="compiles without a GPU what a GPU would compile anyway")
@pytest.mark.parametrize(
    "capability, r",
    [
        pytest.param(capability, r, marks=pytest.mark.ci if (capability, r) == (90, 16) else pytest.mark.full)
        for capability in (80, 90, 100, 120)
        for r in (16, 40, 128)
    ],
)
def test_they_compile_for_gpus(tmp_path, capability: int, r: int) -> None:
    """Compile the kernels without a GPU, because the compiler may refuse code that the interpreter runs."""
    matrices, residual = gaussian(1, 128, 256, dtype=torch.bfloat16), gaussian(1, 128, 256)
    p, q = gaussian(1, 128, r), gaussian(1, 256, r)
    with compiling(capability, tmp_path) as compiled:
        launches.project_sum(matrices, residual, q, total=residual, out=p)
        launches.back_project(residual, p, q)
        for copied in (residual, residual[:, :1]):
            launches.copy_unless(torch.ones((), dtype=torch.bool), copied, copied)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):  # messages have one of these dtypes
            launches.reconstruct(p.to(dtype), q.to(dtype), matrices.to(dtype))
            launches.subtract_reconstruction(residual, p.to(dtype), q.to(dtype))
        for dtype in (torch.float32, torch.bfloat16) if r <= launches.MAX_ORTHOGONALIZED_RANK else ():
            launches.orthogonalize(p.to(dtype), p)
    assert len(compiled) == (22 if r <= launches.MAX_ORTHOGONALIZED_RANK else 12)
    assert max(kernel.metadata.shared for kernel in compiled) <= SHARED_KIB[capability] * 1024


def test_launches_ask_torch_for_nothing_once_the_scratch_has_seen_the_shapes(monkeypatch) -> None:
    class Launched:
        def __getitem__(self, grid):
            assert all(isinstance(size, int) and size > 0 for size in grid)
            return lambda *args, **kwargs: None

    names = ("sum_and_project", "add_up", "multiply_out", "partial_grams", "inverse_factor", "copy_unless")
    fake = SimpleNamespace(**dict.fromkeys((*names, "orthonormal"), Launched()))
    monkeypatch.setattr(launches, "kernels", fake, raising=False)
    pytest.importorskip("triton")
    scratch, m, q, p = Scratch(), gaussian(1, 64, 512), gaussian(1, 512, 4), gaussian(1, 64, 4)
    finite = torch.ones((), dtype=torch.bool, device=DEVICE)

    def message() -> None:
        launches.project_sum(m, m, q, total=m, out=p, scratch=scratch)
        launches.orthogonalize(p, p, scratch)
        launches.back_project(m, p, q, scratch)
        launches.subtract_reconstruction(m, p, q)
        launches.reconstruct(p, q, m)
        launches.copy_unless(finite, m, m)

    message()
    assert scratch.nbytes > 0
    with Watch() as watch:
        message()
    assert watch.allocated == watch.read_by_host == []


class TestKernels:
    __test__ = RUNS_HERE

    @CASES
    def test_sum_projection_and_back_projection(self, n, m, r, dtype) -> None:
        matrices, q = gaussian(2, n, m, dtype=dtype), gaussian(2, m, r, seed=2)
        residual = None if r == 1 else gaussian(2, n, m, seed=1, dtype=torch.bfloat16 if r == 40 else torch.float32)
        total, p = torch.empty(2, n, m, device=DEVICE), torch.empty(2, n, r, device=DEVICE)
        launches.project_sum(matrices, residual, q, total=total, out=p)
        assert torch.equal(total, matrices.float() if residual is None else matrices.float() + residual.float())
        assert_product(p, total, q)
        q_new, p_wire = torch.empty_like(q), p.to(dtype)
        launches.back_project(total, p_wire, q_new)
        assert_product(q_new, total.mT, p_wire)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("batch, n, m", [(1, 3, 5), (3, 40, 70), (700, 2, 3)])
    def test_a_copy_is_made_only_if_a_value_on_the_device_says_so(self, batch, n, m, dtype) -> None:
        before, out = gaussian(batch, n, m, dtype=dtype), torch.full((batch, n, m), float("nan"), dtype=dtype)
        launches.copy_unless(torch.tensor(True, device=DEVICE), before, out := out.to(DEVICE))
        assert out.isnan().all()
        launches.copy_unless(torch.tensor(False, device=DEVICE), before, out)
        assert torch.equal(bits(out), bits(before))

    @pytest.mark.skipif(not launches.INTERPRETED, reason="a matrix of 2^31 values would take 16 GB")
    @pytest.mark.parametrize("n, m", [(1, 64), (65536, 32768), (65536, 65536)])
    def test_a_matrix_of_2_to_the_31_values_is_copied(self, monkeypatch, n, m) -> None:
        from triton.runtime import interpreter

        def store(builder, pointers, *rest) -> None:
            raise ArithmeticError(f"{pointers.data.size} values are copied at a time")

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", store)
        finite, values = torch.tensor(False), torch.ones(1, 1, 64)
        tensors = ((t, *t.stride()) for t in (finite, values, values))
        with pytest.raises(interpreter.InterpreterError, match="64 values are copied at a time"):
            launches.kernels.copy_unless[(1, 1)](*tensors, (n, m), BLOCK=64)

    @CASES
    def test_what_is_remembered_is_what_arrives(self, n, m, r, dtype) -> None:
        p, q = gaussian(2, n, r, dtype=dtype), gaussian(2, m, r, seed=1, dtype=dtype)
        total = gaussian(2, n, m, seed=2)
        # The receiver's memory may have another layout than the sender's: this one goes column by column, and belongs
        # to a parameter.
        out = torch.empty(2, m, n, dtype=dtype, device=DEVICE, requires_grad=True).mT
        launches.reconstruct(p, q, out)
        arrives = out.detach()
        assert_product(arrives, p, q.mT)
        residual = total.clone()
        launches.subtract_reconstruction(residual, p, q)
        assert torch.equal(bits(residual), bits(total - arrives))
        # With a total of zero, the residual is the negative reconstruction itself, so that a wrong last bit shows.
        for share in (1.0, 0.25):
            launches.subtract_reconstruction(residual.zero_(), p, q, share=share)
            assert torch.equal(residual, -share * arrives.float())

    @pytest.mark.parametrize("programs", [1, 512], ids=["in one go", "in partial sums"])
    def test_strided_batches_a_sum_over_the_residual_and_a_rounded_projection(self, monkeypatch, programs) -> None:
        monkeypatch.setattr(launches, "PROGRAMS", programs)
        n, m, r = 70, 131, 5
        matrices, residual, q = gaussian(2, n, m, dtype=torch.bfloat16), gaussian(2, n, m, seed=1), gaussian(2, m, r)
        total, p, q_new = (strided(torch.zeros(2, *shape, device=DEVICE)) for shape in ((n, m), (n, r), (m, r)))
        launches.project_sum(strided(matrices), strided(residual), strided(q), total=total, out=p)
        assert torch.equal(total, matrices.float() + residual)
        assert_product(p, total, q)
        rounded = torch.empty_like(p, dtype=torch.bfloat16)
        launches.project_sum(matrices, residual, q, total=residual, out=rounded)
        assert torch.equal(residual, total)
        assert_product(rounded, total, q)
        launches.back_project(total, p, q_new)
        assert_product(q_new, total.mT, p)
        # The elements around the results keep their values.
        for view in (total, p, q_new):
            assert view._base is not None and view._base[1::2].isnan().all() and view._base[..., :3].isnan().all()
            assert view._base[..., 3 + view.shape[-1] :].isnan().all()

    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # in Triton's interpreter numpy warns of 0 / 0
    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    def test_what_is_not_finite_stays_in_its_row_its_column_and_its_matrix(self, poison: float) -> None:
        matrices, q = gaussian(2, 70, 131), gaussian(2, 131, 3, seed=1)
        matrices[1, 5, 7] = poison
        total, p, q_new = torch.empty_like(matrices), torch.empty(2, 70, 3, device=DEVICE), torch.empty_like(q)
        launches.project_sum(matrices, None, q, total=total, out=p)
        launches.back_project(matrices, gaussian(2, 70, 3), q_new)
        assert not p[1, 5].isfinite().any() and p[0].isfinite().all() and p[1, 6:].isfinite().all()
        assert not q_new[1, 7].isfinite().any() and q_new[0].isfinite().all() and q_new[1, 8:].isfinite().all()
        launches.subtract_reconstruction(total, p, q)
        assert not total[1, 5].isfinite().any() and total[0].isfinite().all() and total[1, 6:].isfinite().all()
        launches.orthogonalize(p, p)
        assert p[1].isnan().all() and p[0].isfinite().all()

    @pytest.mark.parametrize("n, r, dtype", [(1, 1, torch.float32), (130, 3, torch.float16), (20, 17, torch.bfloat16)])
    def test_orthogonalisation_is_that_of_torch(self, n, r, dtype) -> None:
        # The matrix is well-conditioned; otherwise float64's rounding and the shift would show: 16 n eps times the
        # condition.
        p = gaussian(2, n, r, dtype=dtype) + (2 * r**0.5 + 1) * torch.eye(n, r, dtype=dtype, device=DEVICE)
        out = launches.orthogonalize(p, torch.empty_like(p, dtype=torch.float32))
        torch.testing.assert_close(out, cholesky_qr(p), rtol=0, atol=EPS32)
        torch.testing.assert_close(out, gram_schmidt(p.double()).float(), rtol=0, atol=EPS32)
        launches.orthogonalize(p, p)
        torch.testing.assert_close(p.float(), out, rtol=rounding(dtype), atol=1e-7)

    def test_a_decaying_spectrum_gives_an_orthonormal_basis(self) -> None:
        p = with_spectrum(72, 24, -7, batch=1).to(DEVICE)
        basis = launches.orthogonalize(p, torch.empty_like(p)).double()
        identity = torch.eye(24, dtype=torch.float64, device=DEVICE)
        # The tolerance is the error of storing orthonormal columns in fp32.
        assert (basis.mT @ basis - identity).abs().max() < 2 * EPS32
        assert (p.double() - basis @ (basis.mT @ p.double())).abs().max() < 2 * EPS32

    def test_lengths_of_columns_cost_nothing_and_empty_ones_stay_empty(self) -> None:
        p = gaussian(1, 70, 12)
        expected = cholesky_qr(p)
        p *= torch.logspace(-30, 30, 12, device=DEVICE)
        torch.testing.assert_close(launches.orthogonalize(p, p), expected, rtol=0, atol=4 * EPS32)
        with_holes = gaussian(2, 70, 4)
        with_holes[0, :, 1] = 0
        with_holes[1] = 0
        basis = launches.orthogonalize(with_holes, with_holes.clone())
        assert (basis[0, :, 1] == 0).all() and (basis[1] == 0).all()
        torch.testing.assert_close(basis, cholesky_qr(with_holes), rtol=0, atol=EPS32)

    @pytest.mark.parametrize("r", [1, 40])
    def test_inverse_cholesky_factors_are_torchs(self, r: int) -> None:
        a = gaussian(1, 80, r, dtype=torch.float64) * torch.logspace(-20, 20, r, dtype=torch.float64, device=DEVICE)
        # A sum in three parts is tested, because three is no power of two.
        parts = torch.stack([part.mT @ part for part in a.split((30, 30, 20), dim=1)], dim=1).contiguous()
        gram = parts.sum(1)
        gram.diagonal(dim1=-2, dim2=-1).mul_(1 + 16 * 80 * torch.finfo(torch.float64).eps)
        identity = torch.eye(r, dtype=torch.float64, device=DEVICE).expand_as(gram)
        expected = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), identity, upper=False)
        found = launches.inverse_factor(parts.flatten(0, 1), 80, torch.full_like(gram, torch.nan))
        # The tolerance is relative to each column, because columns are 40 powers of ten apart: condition 1e2, squared,
        # times eps.
        sizes = expected.abs().amax(-2, keepdim=True)
        torch.testing.assert_close(found / sizes, expected / sizes, rtol=0, atol=1e-11)
        # The shift is included: without it, the difference would be 16 * 80 eps / 2 = 1.4e-13 of the diagonal.
        first = (found[:, 0, 0] * parts[:, :, 0, 0].sum(1).sqrt() - 1) / torch.finfo(torch.float64).eps
        assert ((first < -600) & (first > -680)).all()

    def test_equal_inputs_give_equal_bits_and_scratch_holds_no_memory_of_earlier_ones(self) -> None:
        scratch, results = Scratch(), []
        matrices, residual, q = gaussian(1, 70, 140), gaussian(1, 70, 140, seed=1), gaussian(1, 140, 5, seed=2)
        for poison in (float("nan"), 0.0, 0.0):
            total, p, q_new = torch.empty_like(matrices), torch.empty(1, 70, 5, device=DEVICE), torch.empty_like(q)
            launches.project_sum(matrices + poison, residual, q, total=total, out=p, scratch=scratch)
            launches.orthogonalize(p, p, scratch)
            launches.back_project(total, p, q_new, scratch)
            results.append((p, q_new))
        assert results[0][1].isnan().all()
        for found, again in zip(results[1], results[2], strict=True):
            assert found.isfinite().all() and torch.equal(bits(found), bits(again))

    def test_the_compressor_takes_what_is_supported_and_leaves_the_rest_to_torch(self, monkeypatch) -> None:
        compressor, taken = TritonLowRank(), []
        for name in ("project_sum", "back_project", "reconstruct", "subtract_reconstruction", "orthogonalize"):
            kernel = getattr(launches, name)
            monkeypatch.setattr(launches, name, lambda *a, n=name, k=kernel, **kw: taken.append(n) or k(*a, **kw))
        for m, q, supported in (
            (gaussian(2, 40, 50, dtype=torch.bfloat16), gaussian(2, 50, 3), True),
            (gaussian(2, 50, 40).mT, gaussian(2, 50, 3), False),
            (gaussian(2, 40, 50, dtype=torch.float64), gaussian(2, 50, 3), False),
            (gaussian(1, 140, 150), gaussian(1, 150, 129), False),
        ):
            assert launches.supported(m, q.shape[-1]) == supported
            taken.clear()
            p = compressor.project(m, q)
            q_new = compressor.back_project(m, p)
            assert taken == (["project_sum", "back_project"] if supported else [])
            assert_product(p, m, q)
            assert_product(q_new, m.mT, p)
        taken.clear()
        m, q = gaussian(2, 40, 50), gaussian(2, 50, 3)
        total, p = torch.empty_like(m), torch.empty(2, 40, 3, device=DEVICE)
        compressor.project_sum(m, None, q, total=total, out=p)
        torch.testing.assert_close(compressor.orthogonalize(p), cholesky_qr(p), rtol=0, atol=EPS32)
        compressor.subtract_reconstruction(total, p, q)
        assert torch.equal(total, m - compressor.reconstruct(p, q))
        assert taken == ["project_sum", "orthogonalize", "subtract_reconstruction", "reconstruct"]
        too_many = gaussian(1, 130, 65)
        torch.testing.assert_close(compressor.orthogonalize(too_many), cholesky_qr(too_many), rtol=0, atol=0)
        taken.clear()
        bases = torch.empty_like(p), torch.empty_like(too_many)
        compressor.orthogonalize_all([p, too_many], bases)
        assert taken == ["orthogonalize"]
        for found, of in zip(bases, (p, too_many), strict=True):
            torch.testing.assert_close(found, cholesky_qr(of), rtol=0, atol=EPS32)

    def test_shapes_that_do_not_fit_are_refused(self) -> None:
        m, p, q = gaussian(2, 9, 12), gaussian(2, 9, 3), gaussian(2, 12, 3)
        with pytest.raises(ValueError, match=r"need P .* got p \(2, 12, 3\)"):
            launches.reconstruct(q, p, m)
        with pytest.raises(ValueError, match=r"residual \(2, 12, 9\)"):
            launches.project_sum(m, m.mT, q, total=m, out=p)
        with pytest.raises(ValueError, match="r <= 64"):
            launches.orthogonalize(gaussian(1, 2, 3), gaussian(1, 2, 3))

    @needs_gpu
    @pytest.mark.parametrize("r", [16, 128])
    def test_a_cuda_graph_replays_a_message_without_synchronisation(self, r: int) -> None:
        compressor = TritonLowRank()
        gradient = gaussian(1, 1024, 3072, dtype=torch.bfloat16)
        residual, q = gaussian(1, 1024, 3072), gaussian(1, 3072, r)
        total, p, q_new = torch.empty_like(residual), torch.empty(1, 1024, r, device=DEVICE), torch.empty_like(q)

        def message() -> None:
            compressor.project_sum(gradient, residual, q, total=total, out=p)
            compressor.orthogonalize(p, out=p)
            compressor.back_project(total, p, out=q_new)
            compressor.subtract_reconstruction(total, p, q_new)

        assert_replays_without_synchronisation(message, (p, q_new, total))
