"""What is trained: each variant's flags, and vanilla against itself."""

from collections.abc import Mapping, Sequence

from scripts.quickstart.settings import Settings

__all__ = ["CONTROLS", "VANILLA", "VARIANTS", "script_of", "words_of"]

VANILLA = "vanilla"
_LOW_RANK_BACKWARD = "--compressed-backprop --compressed-backprop-rank {rank}"
_PAPER = "--optimus-cc --compressed-backprop-rank {rank} --dp-compression-rank {dp_rank}"
# All stages: which ones `auto` would choose depends on the machine, and here it is the loss that is asked for.
_BALANCED = "--optimus-cc balanced --dp-compression-stages all"
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
    "forward-fp8": "--pipeline-forward-format fp8",
    "forward-int8": "--pipeline-forward-format int8",
    "backward-int8": "--compressed-backprop-format int8",
    "backward-fp8": "--compressed-backprop-format fp8",
    "backward-int4": "--compressed-backprop-format int4",
    "backward-low-rank": _LOW_RANK_BACKWARD,
    "backward-low-rank-all": f"{_LOW_RANK_BACKWARD} --compressed-backprop-messages all",
    "dp-int8": "--dp-compression-format int8",
    "dp-int4": "--dp-compression-format int4",
    "dp-low-rank": "--dp-compression --dp-compression-rank {dp_rank}",
    "dp-low-rank-int8": "--dp-compression --dp-compression-rank {dp_rank} --low-rank-wire int8",
    "embedding-int8": "--fused-embedding-sync-format int8",
    "embedding-int4": "--fused-embedding-sync-format int4",
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
