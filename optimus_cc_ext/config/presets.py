"""Rules that turn a request into a configuration: presets, needs of the layout, and flags that cannot work.

The rules are pure functions without Megatron or process groups, so that each can be tested by itself.
"""

import argparse
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import Any

from optimus_cc_ext.compressors.formats import BLOCK, EXACT, EXACT_FORECAST, block_format
from optimus_cc_ext.config import classes
from optimus_cc_ext.config.artifact import ARTIFACT_DEFAULTS
from optimus_cc_ext.config.classes import Need, TrafficClass, classes_among
from optimus_cc_ext.config.flags import PRESETS, Request, add_flags, request_from
from optimus_cc_ext.config.optimus_config import MOST_COPIES, OptimusConfig
from optimus_cc_ext.config.options import flag_of
from optimus_cc_ext.config.refusals import Refusal, conflicts, refusal_of, remarks
from optimus_cc_ext.errors import FlagError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The facts about a run that decide which techniques can work."""

    stages: int
    """The number of pipeline stages, P."""

    data_parallel: int
    """The number of data-parallel replicas, D, those of context parallelism included."""

    tied_embeddings: bool
    """True if the last stage holds a copy of the first stage's word embedding, as output weight or for multi-token
    prediction.
    """

    one_pair: bool = True
    """True if no third stage holds a copy of the word embedding."""

    distributed_optimizer: bool = False
    """True if each replica's optimizer reads only its own shard of the gradients."""

    instances: int = 1
    """Number of distributed-optimizer instances: equal runs of replicas, each of which holds all shards."""

    sums_in_fp32: bool = False
    """True with Megatron's `--ddp-reduce-scatter-with-fp32-accumulation`."""

    optimizer: str = "adam"

    exact_bits: tuple[float, float] = dataclasses.field(default=EXACT_FORECAST, compare=False)
    """Forecast of the bits per value in exact messages: the mean of the run, and the peak of the learning rate. Ranks
    do not compare it, because a rank without an optimizer knows no learning rate.
    """

    master_copies: bool = False
    """True if Megatron keeps parameters in bf16 or fp16, and copies them from fp32 master copies after each step."""

    expert_parallel: int = 0
    """Expert-parallel size: the number of ranks that share the experts of a layer; 0 for a model without experts."""

    row_width: int = 0
    """The number of values of a token on its way to the experts; 0 if they do not divide into blocks."""

    routing: tuple[int, int, int] = (0, 0, 0)
    """The routing of a token: it goes to `picks` of a `pool` of experts, or of groups of experts, and to `top` experts
    in all. Zeros: it is not known.
    """

    direct: str = ""
    """The option of Megatron with which tokens cannot go once a node, and the reason; empty: there is none."""

    train_iters: int | None = None
    seed: int = 1234

    @property
    def owners(self) -> int:
        """Number of replicas among which the distributed optimizer's shards are dealt."""
        return self.data_parallel // self.instances

    @property
    def scales_errors(self) -> bool:
        """True for Muon and its relatives: they take as much from the small part of a gradient as from the large one,
        and so amplify the error of 4 bits and of low rank.
        """
        return self.optimizer not in ("adam", "sgd")


@dataclass(frozen=True)
class Resolution:
    """A validated configuration, and the lines about everything that was changed or left out on the way."""

    config: OptimusConfig
    notes: tuple[str, ...] = ()


def row_width_of(model: Any) -> int:
    """Return `Layout.row_width`, from a model's configuration or from Megatron's arguments."""
    values: int = getattr(model, "moe_latent_size", None) or getattr(model, "hidden_size", None) or 1
    return 0 if values % BLOCK else values


def direct_of(options: argparse.Namespace) -> str:
    """Return `Layout.direct`, from Megatron's arguments or from a model's options."""
    if getattr(options, "moe_pad_expert_input_to_capacity", False):
        return "--moe-pad-expert-input-to-capacity has static numbers of rows, and those of distinct tokens are not"
    if (getattr(options, "expert_tensor_parallel_size", None) or 1) > 1:
        return "--expert-tensor-parallel-size above 1 gathers rows in another order"
    if getattr(options, "overlap_moe_expert_parallel_comm", False):
        return "--overlap-moe-expert-parallel-comm sends rows in another stream than their numbers"
    return ""


def share_of_copies(routing: tuple[int, int, int], nodes: int) -> float:
    """Return how many rows leave for nodes if a token goes once to each, as a share of its copies for experts.

    Args:
        routing: `Layout.routing`; experts, or groups of them, are dealt out evenly, and picked evenly.
    """
    pool, picks, top = routing
    if pool < nodes:
        each = nodes / pool  # nodes of a group, from which a token picks about top / picks experts
        return picks * each * (1 - (1 - 1 / each) ** (top / picks)) / top
    missed = comb(pool - pool // nodes, picks) / comb(pool, picks)
    return (1 - missed) * nodes / top


def too_many_copies(routing: tuple[int, int, int], nodes: int) -> str:
    """Return the reason for which a token once to each node saves too little; empty: it saves enough."""
    share = share_of_copies(routing, nodes)
    saves = share <= MOST_COPIES
    return "" if saves else f"a token once a node is {share:.2f} of its copies for {nodes} nodes, above {MOST_COPIES}"


def config_of(
    flags: Sequence[str], layout: Layout, *, ignore_others: bool = False, megatron: argparse.Namespace | None = None
) -> OptimusConfig:
    """Return the configuration that training would use for these Optimus-CC flags on a layout.

    Args:
        flags: words of a command line.
        layout: the run's layout.
        ignore_others: skip flags that are not ours, such as Megatron's, instead of refusing them.
        megatron: Megatron's arguments; None: there are no conflicts to look for.

    Raises:
        FlagError: a flag is not one of ours, or training would refuse it.
    """
    parser = add_flags(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    args, others = parser.parse_known_args(list(flags))
    if others and not ignore_others:
        raise FlagError(
            others[0], "not an Optimus-CC flag", "Leave it out: compared runs differ in Optimus-CC's flags only"
        )
    return resolve(request_from(args), layout, megatron).config


def resolve(request: Request, layout: Layout, megatron: argparse.Namespace | None = None) -> Resolution:
    """Apply the preset and the defaults, and refuse flags that cannot work on this layout or with Megatron's options.

    A class of traffic that conflicts with an option of Megatron stays dense if only the preset asked for it.

    Args:
        request: the flags of the command line.
        layout: the run's layout.
        megatron: Megatron's validated arguments; None: there are no conflicts to look for.

    Raises:
        FlagError: a flag that was given one by one cannot work, or is out of range.
    """
    resolution = _resolve(request, layout, {})
    found = conflicts(megatron, resolution.config) if megatron is not None else {}
    for traffic, refusal in tuple(found.items()):
        asked = {request.explicit.get(name) for name in (traffic.name, traffic.format_field)}
        if asked - {None, False, "dense"} or resolution.config.goes_once(traffic):
            if refusal.unless_asked(resolution.config):
                del found[traffic]
                continue
            flag = _written(request, resolution.config.flag_of(traffic))
            raise refusal_of(flag, refusal, resolution.config, found)
    resolution = _resolve(request, layout, found) if found else resolution
    lines = remarks(megatron, resolution.config) if megatron is not None else ()
    if resolution.config.format_of(classes.PARAM_GATHER) == EXACT and layout.exact_bits != EXACT_FORECAST:
        mean, peak = layout.exact_bits
        words = f"{mean:.1f} bits a value expected, {peak:.1f} at the highest learning rate"
        lines = (*lines, f"{classes.PARAM_GATHER.tag} exact: {words}")
    return Resolution(resolution.config, (*resolution.notes, *lines))


def _written(request: Request, flag: str) -> str:
    """Return a flag as the user wrote it; if a format switched the technique on, the flag of the format."""
    name = flag.removeprefix("--").replace("-", "_")
    return request.spelling.get(name) or request.spelling.get(f"{name}_format", flag)


def _resolve(request: Request, layout: Layout, left_dense: Mapping[TrafficClass, Refusal]) -> Resolution:
    """Resolve a request whose preset leaves some classes of traffic dense, each for a conflict with Megatron."""
    preset, notes = _preset(request.preset, request.explicit, layout, left_dense) if request.preset else ({}, [])
    fields = _with_formats({"compression_seed": layout.seed, **preset, **request.explicit}, request.explicit)
    stages = fields.get("dp_compression_stages")
    in_artifacts_spelling = request.spelling.get("dp_compression_stages", "").startswith("--selective_grad_comp")
    if in_artifacts_spelling and isinstance(stages, int) and stages > layout.stages:
        # The artifact's own 335M scripts ask for 3 compressed stages of a pipeline of 2; the artifact then compressed
        # both.
        fields["dp_compression_stages"] = layout.stages
        notes.append(f"--selective_grad_comp_way {stages}: clamped to the model's {layout.stages} stages")
    try:
        config = OptimusConfig(**fields)
        _check_formats(config, request)
        check_layout(config, layout)
    except FlagError as error:
        raise FlagError(_written(request, error.flag), error.reason, error.cure) from None
    notes += amplified(config, layout, _written(request, classes.DP_GRADIENTS.flag))
    notes += _without_effect(request.spelling, config)
    if request.artifact:
        notes += _inherited(request.spelling, config)
    return Resolution(config, tuple(notes))


def _with_formats(asked: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with formats in place of switches: a switch means the preset's format, or else low rank."""
    fields = dict(asked)
    for traffic in classes.CLASSES:
        on = explicit.get(traffic.name)
        if on is False and explicit.get(traffic.format_field) in (None, "low-rank"):
            fields[traffic.format_field] = "dense"
        if traffic.switch and fields.pop(traffic.name, None):
            fields.setdefault(traffic.format_field, "low-rank")
    return fields


def amplified(config: OptimusConfig, layout: Layout, flag: str = classes.DP_GRADIENTS.flag) -> list[str]:
    """Return the warning that this optimizer amplifies the error of the chosen format, if it does.

    Args:
        flag: the flag that chose the format, as the user wrote it.
    """
    chosen = config.format_of(classes.DP_GRADIENTS)
    if not layout.scales_errors or chosen not in ("int4", "low-rank"):
        return []
    return [
        f"{flag} {chosen}: --optimizer {layout.optimizer} amplifies its error; no study has measured by how much, and "
        "presets choose int8 with this optimizer"
    ]


def _preset(
    name: str, explicit: Mapping[str, Any], layout: Layout, left_dense: Mapping[TrafficClass, Refusal]
) -> tuple[dict[str, Any], list[str]]:
    """Return a preset's fields as far as layout and Megatron allow them, and the lines about classes left out."""
    fields: dict[str, Any] = {}
    flag, notes = "--optimus-cc" if name == PRESETS[0] else f"--optimus-cc {name}", []
    for traffic in classes.CLASSES:
        wanted = traffic.presets.get(name, {})
        need = _unmet(traffic, layout)
        if name == "exact" and not layout.distributed_optimizer:
            wanted = {}  # without its shards, one sum over both stages' replicas rounds in another order than two
        if refusal := left_dense.get(traffic):
            notes.append(f"{flag} leaves out {traffic.tag}: {refusal.reason} ({refusal.flag})")
        elif need is None:
            fields |= wanted
        elif wanted and need.left_out and explicit.keys().isdisjoint((traffic.name, traffic.format_field)):
            notes.append(f"{flag} leaves out {traffic.tag}: {need.left_out}")
    if name == "exact" and not layout.distributed_optimizer:
        notes.append(f"{flag}: nothing is left to compress without --use-distributed-optimizer")
    low_rank = {field for field, option in classes.DP_GRADIENTS.fields.items() if option.metadata["low_rank_only"]}
    coarse = (
        fields.get(classes.DP_GRADIENTS.format_field) == "low-rank"
        and explicit.get(classes.DP_GRADIENTS.name) is not False
    )
    if layout.scales_errors and coarse and explicit.keys().isdisjoint({classes.DP_GRADIENTS.format_field, *low_rank}):
        fields[classes.DP_GRADIENTS.format_field] = "int8"
        notes.append(
            f"{flag} sends {classes.DP_GRADIENTS.tag} in int8: --optimizer {layout.optimizer} amplifies coarser errors"
        )
    if name != PRESETS[0]:
        fields |= {"only_between_nodes": ",".join(_only_between_nodes(name, explicit)), "chosen_preset": name}
    shares = {field: share for field, share in fields.items() if isinstance(share, Fraction)}
    return fields | {field: math.ceil(share * layout.stages) for field, share in shares.items()}, notes


def _only_between_nodes(preset: str, explicit: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the classes that a preset alone compresses: only where they leave a node. The user asks for
    the others, by a flag of the class or by one level for all replicas.
    """
    for traffic in classes.CLASSES:
        asked = {traffic.name, traffic.format_field} & explicit.keys()
        one_level = "dp_compression_levels" in traffic.fields and explicit.get("dp_compression_levels") == "one"
        once = traffic.among == "experts" and explicit.get("expert_exchange") == "once-a-node"
        if preset in traffic.presets and not asked and not one_level and not once:
            yield traffic.name


def _unmet(traffic: TrafficClass, layout: Layout) -> Need | None:
    """Return the first need of a class of traffic that a layout does not meet, or None."""
    return next((need for need in traffic.needs if getattr(layout, need.fact) < need.at_least), None)


def _check_formats(config: OptimusConfig, request: Request) -> None:
    """Refuse options that have no effect on the chosen format. A dense format goes with every option."""
    for traffic in classes.CLASSES:
        chosen, flag = config.format_of(traffic), traffic.format_flag
        if chosen in ("dense", "low-rank"):
            continue
        if request.explicit.get(traffic.name) is False:
            contradiction = f"it contradicts {request.spelling[traffic.name]}"
            raise FlagError(flag, contradiction, "Give one of the two")
        for name, field in traffic.fields.items():
            if field.metadata["low_rank_only"] and name in request.spelling:
                reason = f"it has no effect on {flag} {chosen}, which has neither a rank nor state across iterations"
                raise FlagError(flag_of(name), reason, f"Leave it out, or give {flag} low-rank")


def check_layout(config: OptimusConfig, layout: Layout) -> None:
    """Refuse a configuration in which the layout leaves nothing to compress.

    Raises:
        FlagError: naming the flag, the reason and the cure.
    """
    for traffic in classes.CLASSES:
        if config.is_on(traffic) and (need := _unmet(traffic, layout)):
            raise FlagError(config.flag_of(traffic), need.reason, need.cure)
    if config.expert_exchange == "once-a-node" and layout.direct:
        raise FlagError("--expert-exchange", f"tokens cannot go once a node: {layout.direct}", "Give auto or direct")
    stages = config.dp_compression_stages
    if isinstance(stages, int) and stages > layout.stages:
        reason = f"{stages} stages are to be compressed, but the pipeline has only {layout.stages}"
        raise FlagError("--dp-compression-stages", reason, f"Give 'all' or a number up to {layout.stages}")
    for traffic in filter(config.is_on, classes.CLASSES):
        warmup = f"{traffic.name}_warmup"
        if getattr(config, warmup, 0) and layout.train_iters is None:
            reason = "a fraction of the training iterations is given, but their number is not known"
            raise FlagError(flag_of(warmup), reason, "Give --train-iters, or a warm-up of 0")


def describe(config: OptimusConfig, left_dense: Collection[TrafficClass] = ()) -> str:
    """Return one line that lists the techniques that are on, but for classes that are left dense."""
    on = [traffic for traffic in classes.CLASSES if config.is_on(traffic)]
    if on and set(on) <= set(left_dense):
        return "nothing is compressed, because nothing leaves a node"
    return ", ".join(_described(config, each) for each in on if each not in left_dense) or "every technique is off"


def saves_nothing(config: OptimusConfig, traffic: TrafficClass) -> str:
    """Return the warning that low rank sends nothing of a class in fewer bytes; doctor and log say it."""
    name = f"{traffic.name}_rank"
    return (
        f"{flag_of(name)} {getattr(config, name)}: saves nothing on this model: low rank would send more bytes, so "
        f"{traffic.tag} traffic is sent uncompressed. Lower the rank, or choose int8"
    )


def cost_of_shards(config: OptimusConfig, replicas: int) -> str | None:
    """Return the sentence that says how unpadded buckets cost the kernels time; None: they cost nothing.

    Args:
        replicas: the number of shards of a bucket.
    """
    if not any(block_format(config.format_of(each)) for each in (classes.DP_GRADIENTS, classes.PARAM_GATHER)):
        return None
    # Megatron pads a bucket to a multiple of 128 and of the replicas, and cuts it into as many shards.
    multiple = 128 // math.gcd(replicas, 128)
    if multiple >= 8:  # a load of 16 bytes takes 4 values in fp32, 8 in bf16
        return None
    return (
        f"{replicas} replicas' shards begin at multiples of {multiple} values: kernels need {8 // multiple} times as "
        f"many loads and stores in bf16, and {max(1, 4 // multiple)} in fp32, as with "
        "--ddp-pad-buckets-for-high-nccl-busbw (optimus_cc_ext.pad_buckets), which adds up to 65,535 values to a "
        "bucket; checkpoints saved without it still load"
    )


def _described(config: OptimusConfig, traffic: TrafficClass) -> str:
    chosen = config.format_of(traffic)
    details = [f"rank {getattr(config, f'{traffic.name}_rank')}" if chosen == "low-rank" else chosen]
    for name, field in traffic.fields.items():
        if said := field.metadata["said"]:
            value = getattr(config, name)
            details.append((said[value] if value in said else said[None]).format(value))
    if config.goes_once(traffic):
        details.append("once a node")
    return f"{traffic.tag} ({', '.join(details)})"


# -- lines about effects that the command line does not show ----------------------------------------------------------


def _without_effect(spelling: Mapping[str, str], config: OptimusConfig) -> Iterator[str]:
    """Yield a line for each flag that has no effect; `spelling` maps a field to the flag by which the user gave it."""
    idle: dict[str, str] = {}
    working: set[str] = set()
    for traffic in classes.CLASSES:
        itself = (traffic.name, traffic.format_field)
        flags = [spelling[name] for name in traffic.fields if name in spelling and name not in itself]
        if config.is_on(traffic):
            working.update(flags)
        else:
            idle |= dict.fromkeys(flags, traffic.flag)
    # The artifact's --use_error_feedback is an option of two techniques.
    for flag, switch in idle.items():
        if flag not in working:
            yield f"{flag}: no effect: {switch} is off"
    if "compression_forecast" in spelling:
        yield (
            f"{spelling['compression_forecast']}: no effect: a trial measures compression in the run "
            "(--compression-trial), and `optimus-cc plan` forecasts it"
        )
    if "expert_exchange" in spelling and not any(map(config.is_on, classes_among("experts"))):
        yield "--expert-exchange: no effect: the formats of tokens are off, and only once-a-node needs none"
    if "dp_compression_levels" in spelling and config.is_on(classes.DP_GRADIENTS) and not config.sums_in_blocks:
        yield "--dp-compression-levels: no effect: low-rank factors are added up on their way, which takes one level"
    lep = config.lazy_error_propagation or not config.is_on(classes.PIPELINE_BACKWARD)
    if "residual_across_iterations" in spelling and not lep:
        yield "--residual-across-iterations: no effect: --lazy-error-propagation is off"


def _inherited(spelling: Mapping[str, str], config: OptimusConfig) -> Iterator[str]:
    """Yield lines that name the artifact's defaults in force that no flag shows and that differ from our defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(OptimusConfig)}
    in_force = {name for traffic in classes.CLASSES if config.is_on(traffic) for name in traffic.fields}
    in_force.add("compression_seed")
    silent = {
        name: value
        for name, value in ARTIFACT_DEFAULTS.items()
        if name in in_force and name not in spelling and value != defaults[name]
    }
    carried = silent.pop("residual_across_iterations", None)
    if silent and config.any_technique:
        yield f"the published artifact's defaults: {', '.join(_as_flag(*item) for item in silent.items())}"
    if carried and config.lazy_error_propagation:
        yield (
            "--use_error_feedback: carries the residual across iterations, as the published artifact does. Carrying "
            "cost 3 % of loss; --residual-across-iterations drop, our default, avoids it"
        )


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag_of(name) if value else flag_of("no_" + name)
    return f"{flag_of(name)} {value}"
