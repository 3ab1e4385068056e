"""Training whose data-parallel gradients are in block formats that no flag offers.

torchrun ... -m optimus_cc_ext scripts/study/in_formats.py MATRICES VOCABULARY <flags>

VOCABULARY is the format of word embeddings and output layers that are not tied, MATRICES the format of all other
matrices. Both are formats of the product, or of `ROWS`, which are packed in six bits: `int5` has the error of five bits
and the bytes of six. The two formats take the place of the one that --dp-compression-format names.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Leg
from optimus_cc_ext.collectives.messages import BlockCodecs, Tools
from optimus_cc_ext.collectives.reducers import Reducer
from optimus_cc_ext.collectives.ring import Ring
from optimus_cc_ext.compressors import formats
from optimus_cc_ext.compressors.formats import Format
from optimus_cc_ext.patching import around
from optimus_cc_ext.techniques import bucket_plan
from optimus_cc_ext.techniques.bucket_rules import BucketRecord, BucketRules, ParameterRecord
from optimus_cc_ext.tools import pretrain_gpt

ROWS = {
    name: Format(name=name, packing="integers", bits=6, largest=largest, rotated=True, gaussian_error=error)
    for name, largest, error in (
        ("int2", 1.0, 0.767), ("int3", 3.0, 0.274), ("int5", 15.0, 0.055), ("int6", 31.0, 0.0265),
    )
}  # fmt: skip
"""Formats of the study that are not in the product's table."""


@dataclass(frozen=True, eq=False)
class PartsPlan:
    """Plan of a bucket's sum in parts, each with a block format of its own."""

    parts: Sequence[ExchangePlan]

    def bind(self, groups: Groups, tools: Tools) -> "PartsReducer":
        """Make the reducer that follows this plan."""
        assert tools.codecs is not None, "--dp-compression-format names no block format"
        sums = tools.codecs.sums
        # The parts are under way at the same time, so each has memory and scratch tensors of its own.
        return PartsReducer(self, [
            part.bind(groups, dataclasses.replace(
                tools, lane=Ring().lane(),
                codecs=BlockCodecs(type(sums)(part.formats.gradients, signs=sums._signs), sums),
            ))
            for part in self.parts
        ])  # fmt: skip

    @property
    def matrices(self) -> int:
        """Number of encoded parameters."""
        return sum(part.matrices for part in self.parts)

    @property
    def wire_bytes(self) -> int:
        """Bytes of memory for messages."""
        return sum(part.wire_bytes for part in self.parts)

    def legs(self, beside: int = 1, whole: bool = False) -> list[Leg]:
        """Return the collectives of one rank, with the arguments of `ExchangePlan.legs`."""
        return [leg for part in self.parts for leg in part.legs(beside, whole)]


class PartsReducer(Reducer):
    """Reducer that sums the parts of a bucket, one after the other, in the same order on all ranks."""

    def __init__(self, plan: PartsPlan, parts: Sequence[Reducer]) -> None:
        self.plan, self._parts = plan, parts

    def start(self, flat: torch.Tensor, whole: bool = False) -> None:
        """Start the exchanges of all parts."""
        for part in self._parts:
            part.start(flat, whole)
        self.encoded = sum(part.encoded for part in self._parts)

    def second_phase(self) -> None:
        """Begin the second phase of all parts."""
        for part in self._parts:
            part.second_phase()

    def finish(self) -> None:
        """Wait for all parts."""
        for part in self._parts:
            part.finish()


def use(matrices: str, vocabulary: str) -> None:
    """Let this process reduce gradients of matrices and of the vocabulary in these block formats."""
    formats.FORMATS = {**formats.FORMATS, **ROWS}
    for name in (matrices, vocabulary):
        formats.format_named(name)

    def planned(
        original: Callable[..., Any], record: BucketRecord, rules: BucketRules, format: str,
        coded: Sequence[ParameterRecord], others: Sequence[ParameterRecord],
    ) -> Any:  # fmt: skip
        """Plan a compressed sum in parts; warm-ups and tied embeddings stay as they are."""
        if not coded or any(parameter.tied for parameter in coded):
            return original(record, rules, format, coded, others)
        if rules.levels.two and rules.sharded:
            raise ValueError("each part would add up the whole bucket inside a node: give each replica a node")
        chosen = {matrices: [p for p in coded if not p.embedding]}
        chosen[vocabulary] = chosen.get(vocabulary, []) + [p for p in coded if p.embedding]
        parts = []
        for name, parameters in chosen.items():
            if parameters:
                parts.append(original(record, dataclasses.replace(rules, format=name), name, parameters, others))
                others = ()
        return PartsPlan(parts)

    bucket_plan._reduction = around(planned)(bucket_plan._reduction)


if __name__ == "__main__":
    script, matrices, vocabulary, *flags = sys.argv
    sys.argv = [script, *flags]
    use(matrices, vocabulary)
    print(f"matrices in {matrices}, vocabulary in {vocabulary}", flush=True)
    pretrain_gpt.main()
