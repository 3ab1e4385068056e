"""Variants that are compared: our flags by the variant's name, from variants.toml."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.config.classes import DP_GRADIENTS, EMBEDDING, PIPELINE_BACKWARD, PIPELINE_FORWARD, TrafficClass
from scripts.experiments.models import Layout

VANILLA = "vanilla"
_TABLES = tomllib.loads(Path(__file__).with_name("variants.toml").read_text(encoding="utf-8"))
_CLASSES = {
    "forward": PIPELINE_FORWARD, "backward": PIPELINE_BACKWARD, "dp": DP_GRADIENTS, "embedding": EMBEDDING,
}  # fmt: skip


def _block_format_flags(traffic: TrafficClass) -> dict[str, str]:
    """Return the flags of each block format of one class, with the other classes dense."""
    return {format: f"{traffic.format_flag} {format}" for format in traffic.block_formats}


def _settings(traffic: TrafficClass) -> dict[str, str]:
    """Return the settings of a class: those of the table, its block formats, and its rotated formats without
    rotation.
    """
    blocks = _block_format_flags(traffic)
    unrotated = {f"{name}, not rotated": f"{flags} --no-block-rotation" for name, flags in blocks.items()
                 if FORMATS[name].rotated}  # fmt: skip
    return _TABLES["gradients"].get(traffic.tag, {}) | blocks | unrotated


STUDY: Mapping[str, str] = {
    **_TABLES["common"],
    **_TABLES["study"],
    **_TABLES["levels"],
    **_TABLES["screen"],
    **{
        f"{name}-{form}": flags
        for name, traffic in _CLASSES.items()
        for form, flags in _block_format_flags(traffic).items()
    },
}
EXPERTS: Mapping[str, str] = _TABLES["experts"]
PRICE: Mapping[str, str] = _TABLES["price"]
CLUSTER: Mapping[str, str] = _TABLES["common"] | _TABLES["levels"] | EXPERTS | _TABLES["cluster"]
GRADIENTS: Mapping[str, Mapping[str, str]] = {
    traffic.tag: _settings(traffic) for traffic in (PIPELINE_BACKWARD, PIPELINE_FORWARD, DP_GRADIENTS)
}
"""Flags of each setting, by class of traffic and by the setting's name."""

_PAPERS_SHARE_OF_STAGES = 0.75


def papers_ranks(hidden: int) -> tuple[int, int]:
    """Return (CB's, SC's) compression ranks in the paper's ratios to the hidden size: 16 and 128 of 3072, rounded
    up.
    """
    return math.ceil(hidden / 192), math.ceil(hidden / 24)


def larger_ranks(hidden: int) -> tuple[int, int]:
    """Return (CB's, SC's) compression ranks for short trainings: larger fractions of the hidden size than the paper's.

    Error feedback delays gradients by about hidden / rank iterations, which a short run notices.
    """
    return hidden // 32, hidden // 4


def flags_of(text: str, layout: Layout, ranks: tuple[int, int], further: Sequence[str] = ()) -> list[str]:
    """Return the flags of a variant's `text`, without those of classes of traffic that `layout` does not have.

    `further` flags come last and override the others. Vanilla, whose text is empty, gets none: its traffic is still
    counted.
    """
    stages = math.ceil(_PAPERS_SHARE_OF_STAGES * layout.stages)
    words = text.format(rank=ranks[0], dp_rank=ranks[1], papers_stages=stages).split()
    absent = (
        *(("--pipeline-forward", "--compressed-backprop", "--fused-embedding-sync") if layout.stages == 1 else ()),
        *(("--dp-compression",) if layout.replicas == 1 else ()),
        *(() if layout.sharded else ("--param-gather",)),
    )
    kept: list[str] = []
    keeps = True
    for word in words:
        if word.startswith("--"):  # the words up to the next flag are the values of this one
            keeps = not word.startswith(absent)
        kept += [word] * keeps
    return [*kept, *further] if text else []
