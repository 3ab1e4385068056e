"""The group "Optimus-CC" in Megatron's own parser, and the way from parsed flags to what the user asked for.

Every flag defaults to None, so that "not given" can be told from "given": a preset must give way to an
individual flag, and two spellings of one option must not be mixed.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import FlagError

__all__ = ["ARTIFACT_DEFAULTS", "ARTIFACT_STAGES_FLAG", "Request", "add_flags", "request_from"]

GROUP = "Optimus-CC"
_PREFIX = "optimus_cc_"
_ARTIFACT_PREFIX = "optimus_cc_artifact_"


def _stages(text: str) -> int | str:
    return text if text in ("all", "auto") else int(text)


_stages.__name__ = "'all' or number of stages"


@dataclass(frozen=True)
class _ArtifactFlag:
    """One option of the published artifact: its spelling, and what it says in ours."""

    spelling: str
    means: Callable[[Any], dict[str, Any]]
    parse: Callable[[str], Any] | None = None
    """None: a switch."""

    also_sets: tuple[str, ...] = ()
    """Fields of `OptimusConfig` that it stands for."""


_ARTIFACT_FLAGS = (
    _ArtifactFlag("--inter_grad_comp", lambda on: {"compressed_backprop": on}, also_sets=("compressed_backprop",)),
    _ArtifactFlag(
        "--inter_grad_comp_rank",
        lambda rank: {"compressed_backprop_rank": rank},
        int,
        ("compressed_backprop_rank",),
    ),
    _ArtifactFlag(
        "--inter_grad_comp_epilogue_only",
        lambda on: {"compressed_backprop_messages": "epilogue"},
        also_sets=("compressed_backprop_messages",),
    ),
    _ArtifactFlag(
        "--use_error_feedback",
        lambda on: {"lazy_error_propagation": on, "dp_error_feedback": on},
        also_sets=("lazy_error_propagation", "dp_error_feedback"),
    ),
    _ArtifactFlag("--emb_comm_opt", lambda on: {"fused_embedding_sync": on}, also_sets=("fused_embedding_sync",)),
    _ArtifactFlag("--grad_comp", lambda on: {"dp_compression": on}, also_sets=("dp_compression",)),
    _ArtifactFlag("--grad_comp_rank", lambda rank: {"dp_compression_rank": rank}, int, ("dp_compression_rank",)),
    _ArtifactFlag(
        "--grad_comp_warm_up",
        lambda part: {"dp_compression_warmup": part},
        float,
        ("dp_compression_warmup",),
    ),
    _ArtifactFlag("--selective_grad_comp", lambda on: {}, also_sets=("dp_compression_stages",)),
    _ArtifactFlag("--selective_grad_comp_way", lambda stages: {}, int, ("dp_compression_stages",)),
    _ArtifactFlag(
        "--check_orth_error_acti",
        lambda on: {"compression_error_statistics": on},
        also_sets=("compression_error_statistics",),
    ),
    _ArtifactFlag("--comp_seed", lambda seed: {"compression_seed": seed}, int, ("compression_seed",)),
)

ARTIFACT_DEFAULTS: Mapping[str, Any] = {
    "compressed_backprop_rank": 12,
    "compressed_backprop_messages": "all",
    "lazy_error_propagation": False,
    "residual_across_iterations": "carry",
    "dp_error_feedback": False,
    "dp_compression_rank": 4,
    "dp_compression_warmup": 0.1,
    "compression_seed": 714,
}
"""What the artifact does where its command line is silent (its megatron/arguments.py)."""

ARTIFACT_DEFAULT = "the artifact's default"
"""The spelling of what such a command line leaves out."""

ARTIFACT_STAGES_FLAG = "--selective_grad_comp_way"
_ARTIFACT_STAGES = 2
"""The artifact's default of it."""


@dataclass(frozen=True)
class Request:
    """What a command line asks for, before the cluster's layout is known.

    `explicit` holds fields of `OptimusConfig` that were given one by one; `preset` whether `--optimus-cc` was
    given; `spelling` the flag that each explicit field was given by; `artifact` whether it is written in the
    published artifact's names.
    """

    explicit: Mapping[str, Any]
    spelling: Mapping[str, str]
    preset: bool = False
    artifact: bool = False


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "Optimus-CC": our flags, and the published artifact's names for them."""
    group = parser.add_argument_group(GROUP, "Compression of 3D-parallel traffic (arXiv 2301.09830).")

    def flag(spelling: str, help: str, **kwargs: Any) -> None:
        dest = _PREFIX + spelling.removeprefix("--").replace("-", "_")
        group.add_argument(spelling, dest=dest, default=None, help=help, **kwargs)

    on_off = argparse.BooleanOptionalAction
    group.add_argument(
        "--optimus-cc",
        dest="optimus_cc_preset",
        action="store_true",
        help="The paper's setting, as far as the layout allows it: rank 16 on the epilogue with lazy error "
        "propagation, fused embedding synchronisation, rank 128 on ceil(0.75 P) stages. Individual flags win.",
    )
    flag("--compressed-backprop", "Compress activation gradients between pipeline stages.", action=on_off)
    flag("--compressed-backprop-rank", "Rank of their factorisation (16).", type=int, metavar="R")
    flag(
        "--compressed-backprop-messages",
        "Which of them: only those of the receiver's cooldown, or all (epilogue).",
        choices=("epilogue", "all"),
    )
    flag(
        "--compressed-backprop-warmup",
        "Fraction of the iterations that come first and send them uncompressed (0.0).",
        type=float,
        metavar="F",
    )
    flag("--lazy-error-propagation", "Add the error to the link's next message (on).", action=on_off)
    flag(
        "--residual-across-iterations",
        "What becomes of the error after an iteration's last message (drop).",
        choices=("carry", "drop"),
    )
    flag("--fused-embedding-sync", "Reduce the tied embedding in one collective.", action=on_off)
    flag("--dp-compression", "Compress data-parallel gradients with PowerSGD.", action=on_off)
    flag("--dp-compression-rank", "Rank of their factorisation (128).", type=int, metavar="R")
    flag(
        "--dp-compression-warmup",
        "Fraction of the iterations that come first and stay uncompressed (0.0).",
        type=float,
        metavar="F",
    )
    flag("--dp-error-feedback", "Add the error to the next iteration's gradient (on).", action=on_off)
    flag(
        "--dp-compression-stages",
        "Compress on the first N pipeline stages, or on those where measured times say that it pays (all).",
        type=_stages,
        metavar="{all,auto,N}",
    )
    flag("--compression-seed", "Seed of the compressors (Megatron's --seed).", type=int, metavar="S")
    flag("--compression-state-dtype", "What residuals and factors are kept in (fp32).", choices=("fp32", "bf16"))
    flag("--compression-metrics", "Log traffic, errors, residuals and times (on).", action=on_off)
    flag("--compression-forecast", "Measure the links, and say what will not pay (on).", action=on_off)
    flag("--compression-error-statistics", "Log errors against activation differences (off).", action=on_off)
    group.add_argument(
        "--force-compression", dest=_PREFIX + "force_compression", action="store_true", default=None,
        help=argparse.SUPPRESS,
    )  # fmt: skip
    for artifact in _ARTIFACT_FLAGS:
        kwargs: dict[str, Any] = (
            {"action": "store_true"} if artifact.parse is None else {"type": artifact.parse, "metavar": "X"}
        )
        group.add_argument(
            artifact.spelling,
            dest=_ARTIFACT_PREFIX + artifact.spelling.removeprefix("--"),
            default=None,
            help=f"The published artifact's name (see --{artifact.also_sets[0].replace('_', '-')}).",
            **kwargs,
        )
    return parser


def request_from(args: argparse.Namespace) -> Request:
    """Read what was asked for out of the parsed arguments.

    Raises:
        FlagError: one option was given in both spellings, or the artifact's names together with `--optimus-cc`.
    """
    given = {
        field.name: getattr(args, _PREFIX + field.name)
        for field in fields(OptimusConfig)
        if getattr(args, _PREFIX + field.name, None) is not None
    }
    spelling = {name: "--" + name.replace("_", "-") for name in given}
    artifact_given = [flag for flag in _ARTIFACT_FLAGS if getattr(args, _artifact_dest(flag), None) is not None]
    preset = bool(getattr(args, "optimus_cc_preset", False))
    if not artifact_given:
        return Request(explicit=given, spelling=spelling, preset=preset)

    for flag in artifact_given:
        twice = [name for name in flag.also_sets if name in given]
        if twice:
            raise FlagError(
                flag.spelling, f"it is the published artifact's name of {spelling[twice[0]]}, which is given too",
                "Give one of the two",
            )  # fmt: skip
    if preset:
        raise FlagError(
            "--optimus-cc",
            f"the preset cannot be combined with the published artifact's names ({artifact_given[0].spelling})",
            "Write the command line in one spelling",
        )
    explicit = dict(ARTIFACT_DEFAULTS)
    spelled = {name: ARTIFACT_DEFAULT for name in explicit}
    for flag in artifact_given:
        for name, value in flag.means(getattr(args, _artifact_dest(flag))).items():
            explicit[name] = value
            spelled[name] = flag.spelling
    if getattr(args, _ARTIFACT_PREFIX + "selective_grad_comp", None):
        way = getattr(args, _ARTIFACT_PREFIX + "selective_grad_comp_way", None)
        explicit["dp_compression_stages"] = _ARTIFACT_STAGES if way is None else way
        spelled["dp_compression_stages"] = ARTIFACT_STAGES_FLAG
    return Request(explicit=explicit | given, spelling=spelled | spelling, artifact=True)


def _artifact_dest(flag: _ArtifactFlag) -> str:
    return _ARTIFACT_PREFIX + flag.spelling.removeprefix("--")
