"""What is trained: each variant's flags, and vanilla against itself."""

from collections.abc import Mapping, Sequence

from optimus_cc_ext.config.classes import DP_GRADIENTS, EMBEDDING, PIPELINE_BACKWARD, PIPELINE_FORWARD, TrafficClass
from scripts.quickstart.settings import Settings

__all__ = ["CONTROLS", "VANILLA", "VARIANTS", "script_of", "words_of"]

VANILLA = "vanilla"
_LOW_RANK_BACKWARD = "--compressed-backprop --compressed-backprop-rank {rank}"
_PAPER = "--optimus-cc --compressed-backprop-rank {rank} --dp-compression-rank {dp_rank}"
# All stages: which ones `auto` would choose depends on the machine, and here it is the loss that is asked for.
_BALANCED = "--optimus-cc balanced --dp-compression-stages all"


def _alone(name: str, traffic: TrafficClass) -> dict[str, str]:
    return {f"{name}-{format}": f"{traffic.format_flag} {format}" for format in traffic.block_formats}


VARIANTS: Mapping[str, str] = {
    VANILLA: "",
    "paper": _PAPER,
    "paper-carry": f"{_PAPER} --residual-across-iterations carry",
    "balanced": _BALANCED,
    "unrotated": f"{_BALANCED} --no-block-rotation",
    "gradients-int4": f"{_BALANCED} --compressed-backprop-format int4",
    "gradients-int4-lep": f"{_BALANCED} --compressed-backprop-format int4 --lazy-error-propagation",
    "int4": f"{_BALANCED} --compressed-backprop-format int4 --fused-embedding-sync-format int4",
    "int8": f"{_BALANCED} --pipeline-forward-format int8 --dp-compression-format int8",
    "fewest": f"--pipeline-forward-format fp8 {_LOW_RANK_BACKWARD} --compressed-backprop-messages all "
    "--dp-compression --dp-compression-rank {dp_rank} --fused-embedding-sync-format int4",
    **_alone("forward", PIPELINE_FORWARD),
    **_alone("backward", PIPELINE_BACKWARD),
    "backward-low-rank": _LOW_RANK_BACKWARD,
    "backward-low-rank-all": f"{_LOW_RANK_BACKWARD} --compressed-backprop-messages all",
    **_alone("dp", DP_GRADIENTS),
    "dp-low-rank": "--dp-compression --dp-compression-rank {dp_rank}",
    "dp-low-rank-int8": "--dp-compression --dp-compression-rank {dp_rank} --low-rank-wire int8",
    **_alone("embedding", EMBEDDING),
}
"""Name to flags; {rank} and {dp_rank} are the quickstart's."""

CONTROLS: Mapping[str, str] = {"one-ulp": "weights one ulp away", "other-order": "batches in another order"}
"""Vanilla against itself: name to what differs."""


def words_of(variant: str, settings: Settings) -> list[str]:
    """The flags of a variant, behind Megatron's."""
    if variant == "one-ulp":
        # Of an fp32 weight an ulp is between 6e-8 and 1.2e-7 of its value.
        return ["--init-method-std", repr(settings.hidden**-0.5 * (1 + 1.2e-7))]
    return VARIANTS.get(variant, "").format(rank=settings.backprop_rank, dp_rank=settings.dp_rank).split()


def script_of(variant: str) -> Sequence[str]:
    """The training script, where it is not the package's own."""
    # From the folder that holds scripts/: where a checkout lies does not make it another run.
    return ["scripts/study/other_order.py"] if variant == "other-order" else []
