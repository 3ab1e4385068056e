"""Formats of gradients that only the study has: their errors, their bytes, and sums in parts on real ranks."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optimus_cc_ext.compressors import formats
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.config.classes import DP_GRADIENTS
from optimus_cc_ext.techniques import bucket_plan
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan, ParameterRecord
from scripts.experiments.models import MODELS, Training
from scripts.experiments.texts import text_of
from scripts.hosts.launch import run
from scripts.study.grid import measured, shrunk
from scripts.study.in_formats import ROWS, PartsPlan, use
from tests.formats import SIGNS


@pytest.fixture(autouse=True)
def own_formats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what `use` replaces in this process."""
    for owner, name in (
        (formats, "FORMATS"), (bucket_plan, "_reduction"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    yield


@pytest.mark.parametrize("name", ROWS)
def test_a_format_of_the_study_has_the_error_that_its_row_says(name: str) -> None:
    """The measured error is a mean over 1,000 blocks, which is exact to 1 %."""
    use(name, name)
    values, layout = torch.randn(128_000, generator=torch.Generator().manual_seed(1)), BlockLayout.of_one(128_000)
    codec = Codec(name, signs=SIGNS)
    message, decoded = torch.zeros(codec.message_bytes(layout, values.dtype), dtype=torch.uint8), values.clone()
    codec.encode(values, layout, message)
    codec.decode(message, layout, decoded)
    assert ((decoded - values).norm() / values.norm()).item() == pytest.approx(ROWS[name].gaussian_error, rel=0.05)


def planned(embedding: bool) -> GroupPlan:
    parameters = [
        ParameterRecord(shape=(512, 64), start=0, embedding=embedding),
        ParameterRecord(shape=(128, 64), start=512 * 64), ParameterRecord(shape=(64,), start=640 * 64),
    ]  # fmt: skip
    record = BucketRecord(numel=641 * 64, dtype=torch.float32, parameters=parameters)
    return GroupPlan.of([record], BucketRules(ranks=2, format="int4"))


def compressed_bytes(plan: GroupPlan) -> int:
    return plan.bytes_by_class(True)[DP_GRADIENTS].sent


def test_the_vocabulary_has_a_format_of_its_own_and_every_value_is_sent_once() -> None:
    in_one = compressed_bytes(planned(embedding=True))
    use("int4", "int8")
    plan = planned(embedding=True)
    (bucket,) = plan.buckets
    assert isinstance(bucket.compressed, PartsPlan)
    assert [(part.formats.gradients, part.numel) for part in bucket.compressed.parts] == [
        ("int4", 641 * 64), ("int8", 641 * 64)
    ]  # fmt: skip
    assert [list(part.coded) for part in bucket.compressed.parts] == [[(512 * 64, 128 * 64)], [(0, 512 * 64)]]
    # Each of two replicas sends half of the gradients; an int8 code has half a byte more than an int4 code.
    extra = compressed_bytes(plan) - in_one
    assert extra == pytest.approx(512 * 64 / 2 * 0.5, abs=64), "the sections of a message are padded to 16 bytes"
    (alone,) = planned(embedding=False).buckets
    assert isinstance(alone.compressed, PartsPlan) and len(alone.compressed.parts) == 1


@pytest.mark.full
@pytest.mark.timeout(600)
def test_parts_add_up_to_vanillas_sums(tmp_path: Path) -> None:
    """The pass-through format leaves the losses as they are, in every digit; int4 for the vocabulary changes them."""
    model = shrunk(MODELS["llama"])
    training = Training(model=model, iterations=4, evaluation_iterations=1)
    data = text_of(None).prepared(tmp_path / "text", model.vocabulary, 1.0)
    found = {}
    for name, script, ours in (
        ("vanilla", [], []),
        ("exact", ["fp32", "fp32"], ["--dp-compression-format", "int4", "--exact-blocks"]),
        ("vocabulary", ["fp32", "int4"], ["--dp-compression-format", "int4", "--exact-blocks"]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        flags = [*(["scripts/study/in_formats.py", *script] if script else []), *training.megatron_flags(data), *ours]
        flags += ["--eval-interval", "1"]
        run(flags, folder, lambda line: None, time.monotonic() + 150, ranks=training.processes)
        found[name] = measured(folder, ["DP gradients"] if name == "vocabulary" else [])["validations"]
    assert found["exact"] == found["vanilla"] != found["vocabulary"]


def test_a_format_that_is_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="'int7' is no block format: there are int8, int4, fp32, int2, int3,"):
        use("int7", "int4")
