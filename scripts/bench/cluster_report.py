"""What is left of the runs: JSON with everything, Markdown tables, and plots."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster_model import MODELS, PAPER, VANILLA, compression_ranks, parse_layout, proportions
from cluster_network import FRAMING_BYTES, UNSHAPED
from cluster_results import Row, drift, losses_agree, rows
from cluster_run import Iteration, Run

__all__ = ["JSON_NAME", "LossRun", "load", "loss_table", "markdown", "save"]

JSON_NAME, MARKDOWN_NAME = "cluster.json", "cluster.md"
_FORMAT = 2


@dataclass(frozen=True)
class LossRun:
    """One long run on unshaped links."""

    model: str
    layout: str
    variant: str
    ranks: tuple[int, int] | None
    """CB's and SC's; None for vanilla."""

    iterations: int
    training_loss: float
    """Mean of the last tenth of the iterations."""

    validation_loss: float
    further: str = ""
    """Flags beyond the variant's own."""

    seed: int = 1234


def save(
    folder: Path, arguments: Mapping[str, Any], runs: Sequence[Run], losses: Sequence[LossRun],
    machine: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Write JSON, tables and plots of what there is so far; return the tables.

    Args:
        machine: where the runs ran; None: here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = rows(runs)
    machine = machine or _machine()
    models = {each.model: asdict(MODELS[each.model]) for each in (*runs, *losses)}
    content = {
        "format": _FORMAT, "machine": machine, "models": models, "arguments": dict(arguments),
        "rows": [asdict(row) for row in table], "losses": [asdict(loss) for loss in losses],
        "runs": [asdict(run) for run in runs],
    }  # fmt: skip
    _replace(folder / JSON_NAME, json.dumps(content, indent=1) + "\n")
    text = markdown(machine, arguments, runs, table, losses)
    _replace(folder / MARKDOWN_NAME, text)
    if any(row.rate != UNSHAPED for row in table):
        # Here, not above: matplotlib takes a second, which --help and bad input need not wait for.
        from cluster_plots import draw

        draw(table, folder)
    return text


def load(folder: Path) -> tuple[dict[str, Any], list[Run], list[LossRun], dict[str, Any]]:
    """Read what `save` wrote: the arguments, the runs, the loss runs, and the machine.

    Raises:
        OSError: there is no such file.
        ValueError: it is not ours, or of models that have changed since.
    """
    content = json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{folder / JSON_NAME}: not written by this script, or by another version of it")
    for name, model in content["models"].items():
        if name not in MODELS or asdict(MODELS[name]) != model:
            raise ValueError(f"{folder / JSON_NAME}: it is of another model called {name!r}. Give another --output")
    runs = []
    for saved in content["runs"]:
        iterations = [
            Iteration(**each | {"traffic": {name: (s, r) for name, (s, r) in each["traffic"].items()}})
            for each in saved["iterations"]
        ]
        runs.append(Run(**saved | {"iterations": iterations}))
    losses = [LossRun(**saved | {"ranks": saved["ranks"] and tuple(saved["ranks"])}) for saved in content["losses"]]
    return content["arguments"], runs, losses, content["machine"]


def markdown(
    machine: Mapping[str, Any], arguments: Mapping[str, Any], runs: Sequence[Run], table: Sequence[Row],
    losses: Sequence[LossRun],
) -> str:  # fmt: skip
    """All tables, with what has to be known to read them."""
    parts = [
        "# Training on shaped links\n",
        f"{machine['cores']} cores, {machine['system']}, Python {machine['python']}, torch {machine['torch']},"
        f" megatron-core {machine['megatron']}. Arguments: `{json.dumps(dict(arguments))}`.\n",
    ]
    for model, layout in dict.fromkeys((run.model, run.layout) for run in runs):
        here = [row for row in table if (row.model, row.layout) == (model, layout)]
        backprop, dp = compression_ranks(MODELS[model])
        parts += [
            f"## {model}, {layout}\n",
            f"Traffic of a rank and iteration: {proportions(MODELS[model], parse_layout(layout))}."
            f" The paper's 8.3B: {PAPER}. The paper's ratios give this model ranks {backprop} (CB) and {dp} (SC).\n",
            _times(here),
            _bytes(here),
            _quality([run for run in runs if (run.model, run.layout) == (model, layout)]),
        ]
    if losses:
        parts.append(loss_table(losses))
    return "\n".join(parts)


def _times(table: Sequence[Row]) -> str:
    lines = [
        "| rate | variant | s/iteration (quartiles) | exposed s | over vanilla (blocks) | recovered (blocks) | bound"
        " | recovered of bound | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        seconds = row.seconds
        of_bound = row.recovered / row.bound if row.recovered is not None and row.bound else None
        lines.append(
            f"| {row.rate} | {row.variant} | {seconds.median:.2f} ({seconds.lower:.2f}-{seconds.upper:.2f},"
            f" n={seconds.count}) | {_number(row.exposed, '.2f')}"
            f" | {_number(row.to_vanilla, '.3f')}{_blocks(row.to_vanilla_by_block, '.3f')}"
            f" | {_number(row.recovered, '.1%')}{_blocks(row.recovered_by_block, '.1%')}"
            f" | {_number(row.bound, '.1%')} | {_number(of_bound, '.0%')} | {row.loss:.4f} (of {row.loss_iteration}) |"
        )
    remarks = _compare_fixed_stages(table)
    return "\n".join([*lines, "", *remarks, *([""] if remarks else [])])


def _compare_fixed_stages(table: Sequence[Row]) -> list[str]:
    """How `auto` stands against the better of the paper's stages and nothing, at each rate."""
    seconds = {(row.rate, row.variant): row.seconds.median for row in table}
    said = []
    for rate in dict.fromkeys(row.rate for row in table):
        needed = [seconds.get((rate, variant)) for variant in ("auto", "paper", VANILLA)]
        if None not in needed:
            auto, paper, vanilla = (float(each or 0.0) for each in needed)
            better = "the paper's stages" if paper < vanilla else "vanilla"
            said.append(f"- {rate}: auto takes {auto / min(paper, vanilla):.3f} times the better of both ({better}).")
    return said


def _bytes(table: Sequence[Row]) -> str:
    """By the metrics and by the kernel; the rate of a link should not change them, so the slowest one is shown."""
    rate = table[-1].rate if table else UNSHAPED
    here = [row for row in table if row.rate == rate]
    names = list(dict.fromkeys(name for row in here for name in row.traffic))
    lines = [
        f"MB an iteration at {rate}, all hosts. Payload: the kernel's bytes less {FRAMING_BYTES} for each packet,"
        " which is Ethernet, IP and TCP framing; acknowledgements are nothing else.\n",
        f"| variant | {' | '.join(f'{name}: sent of raw' for name in names)} | metrics' sum | kernel: payload"
        " | over metrics | kernel: with framing | busiest host | segments sent again |",
        "|---" * (len(names) + 7) + "|",
    ]
    for row in here:
        traffic = {name: row.traffic.get(name, (0.0, 0.0)) for name in names}
        lines.append(
            f"| {row.variant} | {' | '.join(f'{sent / 1e6:.3f} of {raw / 1e6:.3f}' for sent, raw in traffic.values())}"
            f" | {sum(sent for sent, _ in traffic.values()) / 1e6:.3f} | {sum(row.payload_by_host) / 1e6:.3f}"
            f" | {_number(row.kernel_to_metrics, '.3f')} | {sum(row.sent_by_host) / 1e6:.3f}"
            f" | {max(row.payload_by_host) / 1e6:.3f} | {row.retransmitted:.1f} |"
        )
    return "\n".join([*lines, ""])


def _quality(runs: Sequence[Run]) -> str:
    drifts = [(abs(value), value, run, rate) for run in runs for rate, value in drift(run).items()]
    first = {run.variant: run for run in reversed(runs)}
    lines = [
        f"- {run.variant}: `{' '.join(run.flags) or 'no flags of ours'}`: {run.techniques or 'not said'}."
        for run in runs
        if run is first[run.variant]
    ]
    for run in runs:
        rates = ", ".join(dict.fromkeys(each.rate for each in run.iterations if each.measured))
        lines += [
            f"- {run.variant}, block {run.block}, {rates}: {said}." for said in run.forecast if "auto" in run.flags
        ]
    if drifts:
        _, value, run, rate = max(drifts, key=lambda each: each[0])
        lines.append(
            f"- Largest drift within a run, second half of the measurements against the first: {value:+.1%}"
            f" ({run.variant}, block {run.block}, {rate})."
        )
    same = "equal" if losses_agree(runs) else "NOT equal"
    lines.append(f"- Losses of the same variant in different blocks: {same} in every iteration.\n")
    return "\n".join(lines)


def loss_table(losses: Sequence[LossRun]) -> str:
    """Validation losses, and how far each is from vanilla's on the same model and layout."""

    def same_training(run: LossRun) -> tuple[str, str, int, int]:
        return run.model, run.layout, run.iterations, run.seed

    vanilla = {same_training(run): run.validation_loss for run in losses if run.variant == VANILLA}
    lines = [
        "## Losses on unshaped links\n",
        "| model | layout | variant | ranks CB:SC | iterations | seed | training loss | validation loss"
        " | gap to vanilla | further flags |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in losses:
        base = vanilla.get(same_training(run))
        gap = run.validation_loss / base - 1 if base and run.variant != VANILLA else None
        ranks = f"{run.ranks[0]}:{run.ranks[1]}" if run.ranks else "-"
        lines.append(
            f"| {run.model} | {run.layout} | {run.variant} | {ranks} | {run.iterations} | {run.seed}"
            f" | {run.training_loss:.4f} | {run.validation_loss:.4f} | {_number(gap, '+.2%')}"
            f" | {run.further and f'`{run.further}`'} |"
        )
    return "\n".join([*lines, ""])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _blocks(values: Mapping[int, float], form: str) -> str:
    return f" ({', '.join(format(value, form) for value in values.values())})" if len(values) > 1 else ""


def _machine() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "of a checkout"

    return {
        "cores": len(os.sched_getaffinity(0)), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "torch": installed("torch"), "megatron": installed("megatron-core"),
    }  # fmt: skip


def _replace(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
