#!/usr/bin/env python3
"""What compression gains on links of a given rate: real Megatron on hosts that are network namespaces of this machine.

    sudo .venv/bin/python scripts/bench/cluster.py --layouts pp2dp2 --rates 25mbit,50mbit,100mbit,none --variants vanilla,paper,auto
    sudo .venv/bin/python scripts/bench/cluster.py --find-rate             the rate at which half of vanilla's time is communication
    sudo .venv/bin/python scripts/bench/cluster.py --loss-iterations 200 --ranks-of-interest 2:11,4:22
    sudo .venv/bin/python scripts/bench/cluster.py --clean                 removes what a killed one has left

One host for each pipeline stage of each replica, torchrun on every one, vanilla and ours in turn with the same seed and
data, in alternating blocks. A run is one variant: the rate of all links is changed while it trains, once through all
rates and back; a variant that chooses by the links when it starts (--dp-compression-stages auto) gets a run per rate. Writes OUTPUT/cluster.json with everything, cluster.md and plots. Takes root, `ip` and `tc`. What
follows -- is added to the flags of all variants but vanilla.
"""  # noqa: E501

import argparse
import fcntl
import shlex
import signal
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from cluster_bound import chooses_by_the_links
from cluster_model import (  # also puts the checkout on the path
    MODELS,
    PAPER,
    VANILLA,
    VARIANTS,
    Layout,
    Model,
    compression_ranks,
    megatron_flags,
    parse_layout,
    proportions,
    variant_flags,
)
from cluster_network import (
    UNSHAPED,
    Network,
    NetworkError,
    bits_per_second,
    clean,
    living_owners,
    network,
    why_not,
)
from cluster_plan import FindRate, Plan, Sweep, plans
from cluster_report import JSON_NAME, LossRun, load, save
from cluster_run import Iteration, Run, RunFailed, train

from optimus_cc_ext.data import DataError, PreparedData, prepare

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EVALUATION_ITERATIONS = 20
_SAME_DATA = ("input", "max_mb")
_SCHEDULE_ITERATIONS = 200
"""Of the learning rate where times are compared: runs differ in length, and their losses should not by that."""


class _Interrupted(BaseException):
    """A signal asked for the end. Like KeyboardInterrupt, no handler of ordinary errors may swallow it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="cluster.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what is compared")
    what.add_argument("--layouts", type=_list(parse_layout), help="[tpT]ppPdpD, such as pp4dp2,tp2pp2dp2 (pp2dp2)")
    what.add_argument("--hosts", type=int, metavar="N", help="short for --layouts pp(N/2)dp2")
    what.add_argument("--models", type=_list(_one_of(MODELS)), default=["small"], help=f"of {', '.join(MODELS)}")
    what.add_argument(
        "--variants",
        type=_list(_one_of(VARIANTS)),
        default=[VANILLA, "paper", "auto"],
        help=f"of {', '.join(VARIANTS)}",
    )
    what.add_argument(
        "--rates", type=_list(_rate), default=["50mbit", UNSHAPED],
        help="of every link, both ways, such as 25mbit,1gbit; none: unshaped, which the shares need (50mbit,none)",
    )  # fmt: skip
    what.add_argument("--cb-rank", type=int, metavar="R", help="instead of hidden/192, the paper's ratio")
    what.add_argument("--sc-rank", type=int, metavar="R", help="instead of hidden/24")
    much = parser.add_argument_group("how much")
    much.add_argument("--blocks", type=int, default=2, help="how often all variants take their turn (%(default)s)")
    much.add_argument("--iterations", type=int, default=3, help="measured at a rate in a cycle (%(default)s)")
    much.add_argument("--cycles", type=int, default=2, help="through the rates, there and back, in a run (%(default)s)")
    much.add_argument(
        "--warm-up", type=int, default=3,
        help="iterations of a run that do not count (%(default)s: the third holds the package's own measuring)",
    )  # fmt: skip
    much.add_argument("--timeout", type=float, default=30.0, metavar="MINUTES", help="for one run (%(default)g)")
    much.add_argument("--seed", type=int, default=1234)
    other = parser.add_argument_group("instead of a sweep")
    other.add_argument("--find-rate", action="store_true", help="search where vanilla takes twice its unshaped time")
    other.add_argument(
        "--loss-iterations", type=int, metavar="N", help="train so long on unshaped links, compare losses"
    )
    other.add_argument("--ranks-of-interest", type=_list(_rank_pair), metavar="CB:SC,...", help="for the loss runs")
    other.add_argument("--clean", action="store_true", help="end and remove what killed owners have left, no more")
    other.add_argument("--redraw", action="store_true", help="tables and plots again, from OUTPUT/cluster.json")
    files = parser.add_argument_group("files")
    files.add_argument("--output", type=Path, default=Path("results/cluster"), metavar="DIR")
    files.add_argument("--append", action="store_true", help="keep the runs that are in OUTPUT/cluster.json, if any")
    files.add_argument(
        "--input", type=Path, help="text to train on (the Python sources of this environment's packages)"
    )
    files.add_argument("--max-mb", type=float, default=5.0, help="of it (%(default)g)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run it.

    Returns the exit status: 0; 1: a run failed; 2: bad input, or this machine cannot; 128 + the signal's number where
    a signal ended it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    options = parser.parse_args(words[:cut])
    _check(parser, options)
    for signum in _SIGNALS:
        signal.signal(signum, _interrupt)
    try:
        _do(options, words[cut + 1 :])
    except RunFailed as error:
        for line in error.tail:
            print(f"  | {line}", file=sys.stderr)
        print(f"error: {error}\nthe whole log: {error.log}", file=sys.stderr)
        return 1
    except (NetworkError, DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except _Interrupted as interruption:
        name = signal.Signals(interruption.signum).name
        print(f"interrupted ({name}): all hosts and processes are gone; finished runs are kept", file=sys.stderr)
        return 128 + interruption.signum
    return 0


def _do(options: argparse.Namespace, further: list[str]) -> None:
    if options.redraw:
        with _claimed(options.output):
            arguments, runs, losses, machine = load(options.output)
            print(save(options.output, arguments, runs, losses, machine))
        return
    if (reason := why_not()) is not None:
        raise NetworkError(f"{reason}. Run as root on a Linux machine with iproute2")
    if options.clean:
        names = clean()
        print(f"removed {len(names)} namespaces" + "".join(f"\n  {name}" for name in names))
        return
    if others := living_owners():
        print(f"note: process {others[0]} has a cluster, too: the times will disturb each other", file=sys.stderr)
    with _claimed(options.output):
        bench = _Bench(options, further)
        for layout in options.layouts:
            with network(layout.hosts) as hosts:
                for model in options.models:
                    bench.introduce(model, layout)
                    if options.find_rate:
                        bench.find_rate(hosts, model, layout)
                    elif options.loss_iterations:
                        bench.compare_losses(hosts, model, layout)
                    else:
                        bench.sweep(hosts, model, layout)
        if bench.text:
            print(f"\n{bench.text}\nwritten: {options.output}")


class _Bench:
    """The runs of one call, kept on disk as they come."""

    def __init__(self, options: argparse.Namespace, further: list[str]) -> None:
        self.options, self.further = options, further
        self.runs: list[Run] = []
        self.losses: list[LossRun] = []
        self.text = ""
        if not (options.output / JSON_NAME).exists():
            return
        if not (options.append or options.find_rate):
            raise ValueError(
                f"--output {options.output}: it has results. Give --append to keep them, or another folder"
            )
        if options.append:
            earlier, self.runs, self.losses, _ = load(options.output)
            mine = {name: value for name, value in self._said().items() if name in _SAME_DATA}
            if any(earlier.get(name) != value for name, value in mine.items()):
                raise ValueError(f"--append: {options.output} is of another text ({mine} now). Give another --output")

    def introduce(self, name: str, layout: Layout) -> None:
        """Say whether the model speaks for large ones."""
        model = MODELS[name]
        backprop, dp = self._ranks(model)
        print(f"{name}, {layout} on {layout.hosts} hosts. Traffic of a rank: {proportions(model, layout)}.")
        print(f"The paper's 8.3B: {PAPER}. Ranks: {backprop} (CB), {dp} (SC) at hidden {model.hidden}.", flush=True)

    def sweep(self, hosts: Network, name: str, layout: Layout) -> None:
        """All variants in alternating blocks, all rates in each run."""
        options = self.options
        self._check_comparable(name, layout)
        earlier = [run.block for run in self.runs if (run.model, run.layout) == (name, str(layout))]
        first = 1 + max(earlier, default=-1)
        for block in range(first, first + options.blocks):
            # There and back, so that a drift of the machine's speed weighs on all variants alike.
            for variant in options.variants if block % 2 == 0 else reversed(options.variants):
                ranks = self._ranks(MODELS[name])
                flags = variant_flags(variant, layout, ranks, self.further)
                chooses = chooses_by_the_links(flags, layout)
                much = {"each": options.iterations, "cycles": options.cycles, "warm_up": options.warm_up}
                for plan in plans(options.rates, chooses=chooses, **much):
                    label = f"block{block}" + (f"-{plan.rates[0]}" if len(plan.rates) == 1 else "")
                    self.runs.append(self._train(hosts, name, layout, variant, ranks, plan, label, block=block))
                    self._save()

    def _check_comparable(self, name: str, layout: Layout) -> None:
        """What is appended to has to be the same training.

        Raises:
            ValueError: it is not.
        """
        for run in self.runs:
            if (run.model, run.layout) == (name, str(layout)) and run.variant in self.options.variants:
                flags = variant_flags(run.variant, layout, self._ranks(MODELS[name]), self.further)
                if (run.flags, run.seed) != (flags, self.options.seed):
                    raise ValueError(
                        f"--append: {self.options.output} has {run.variant} with other flags or another seed"
                        f" ({shlex.join(run.flags)}, seed {run.seed}). Give another --output"
                    )

    def find_rate(self, hosts: Network, name: str, layout: Layout) -> None:
        """Print the rate at which half of vanilla's time is exposed communication."""
        options = self.options
        start = next((rate for rate in options.rates if rate != UNSHAPED), "50mbit")
        plan = FindRate(start, each=options.iterations, warm_up=options.warm_up)
        self._train(hosts, name, layout, VANILLA, (0, 0), plan, "find-rate")
        for rate, seconds in plan.tried:
            print(f"  {rate}: {seconds:.2f} s, {seconds / plan.unshaped:.2f} times unshaped")
        rate, seconds = plan.best
        print(
            f"{name}, {layout}: at {rate} vanilla takes {seconds:.2f} s, {plan.unshaped:.2f} s unshaped:"
            f" {1 - plan.unshaped / seconds:.0%} of the iteration is exposed communication"
        )

    def compare_losses(self, hosts: Network, name: str, layout: Layout) -> None:
        """Vanilla, unless the file that is appended to has it, and every other variant at every pair of ranks."""
        options = self.options
        pairs = options.ranks_of_interest or [self._ranks(MODELS[name])]
        ours = [(variant, pair) for variant in options.variants if variant != VANILLA for pair in pairs]
        steps = options.loss_iterations
        known = any(
            (run.model, run.layout, run.variant, run.iterations, run.seed)
            == (name, str(layout), VANILLA, steps, options.seed)
            for run in self.losses
        )
        for variant, ranks in ours if known else [(VANILLA, pairs[0]), *ours]:
            plan = Sweep([UNSHAPED], each=steps, cycles=1, warm_up=0)
            label = "losses" if variant == VANILLA else f"losses-{ranks[0]}-{ranks[1]}"
            run = self._train(hosts, name, layout, variant, ranks, plan, label, evaluations=_EVALUATION_ITERATIONS)
            if run.validation_loss is None:
                raise RunFailed("it ended without a validation loss", Path(run.log), [])
            last = [each.loss for each in run.iterations[-max(steps // 10, 1) :]]
            loss = LossRun(
                model=name, layout=str(layout), variant=variant, ranks=None if variant == VANILLA else ranks,
                iterations=steps, training_loss=statistics.mean(last), validation_loss=run.validation_loss,
                further="" if variant == VANILLA else shlex.join(self.further), seed=options.seed,
            )  # fmt: skip
            self.losses.append(loss)
            self._save()

    def _train(
        self, hosts: Network, name: str, layout: Layout, variant: str, ranks: tuple[int, int], plan: Plan, label: str,
        *, block: int = 0, evaluations: int = 0,
    ) -> Run:  # fmt: skip
        options, model = self.options, MODELS[name]
        ours = variant_flags(variant, layout, ranks, self.further)
        shared = megatron_flags(
            model, layout, self._data(model), iterations=plan.iterations, seed=options.seed,
            decay_iterations=options.loss_iterations or _SCHEDULE_ITERATIONS, evaluation_iterations=evaluations,
        )  # fmt: skip
        print(f"{variant}, {label}: {shlex.join(ours) or 'no flags of ours'}", flush=True)
        run = Run(model=name, layout=str(layout), variant=variant, block=block, flags=ours, seed=options.seed)
        folder = options.output / "runs" / f"{name}-{layout}-{variant}-{label}"
        deadline = time.monotonic() + 60 * options.timeout
        train(run, hosts, layout, [*shared, *ours], folder, plan, deadline=deadline, on_iteration=_tell)
        return run

    def _ranks(self, model: Model) -> tuple[int, int]:
        backprop, dp = compression_ranks(model)
        return self.options.cb_rank or backprop, self.options.sc_rank or dp

    def _data(self, model: Model) -> PreparedData:
        """The text, tokenized once for each size of vocabulary."""
        options = self.options
        folder = options.output.with_name(f"{options.output.name}-data") / f"vocabulary-{model.vocabulary}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        return prepare(
            options.input or Path(sysconfig.get_path("purelib")), folder.absolute(), vocab_size=model.vocabulary,
            pattern="*.txt" if options.input else "*.py", max_mb=options.max_mb, progress=False,
        )  # fmt: skip

    def _save(self) -> None:
        self.text = save(self.options.output, self._said(), self.runs, self.losses)

    def _said(self) -> dict[str, Any]:
        """The command line, as it is kept with the results."""
        said: dict[str, Any] = {"further": self.further}
        for key, value in vars(self.options).items():
            if isinstance(value, list):
                said[key] = [str(each) for each in value]
            elif value is None or isinstance(value, (int, float, str, Path)):
                said[key] = str(value) if isinstance(value, Path) else value
        return said


def _tell(iteration: Iteration) -> None:
    remark = "" if iteration.measured else "  (not counted)"
    print(f"  {iteration.number:4d}  {iteration.rate:>9}  {iteration.seconds:7.2f} s{remark}", flush=True)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Complete the options, or end with status 2 and the reason."""
    if options.hosts is not None:
        if options.layouts:
            parser.error("--hosts: it is short for --layouts, which is given, too. Give one of them")
        if options.hosts < 2 or options.hosts % 2:
            parser.error(
                f"--hosts {options.hosts}: two replicas take an even number of hosts. Give 4 or 8, or --layouts"
            )
        options.layouts = [Layout(1, options.hosts // 2, 2)]
    options.layouts = options.layouts or [Layout(1, 2, 2)]
    for name in ("blocks", "iterations", "cycles", "cb_rank", "sc_rank", "loss_iterations"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: give 1 or more")
    if options.warm_up < 1:
        parser.error(f"--warm-up {options.warm_up}: the first iteration makes the connections. Give 1 or more")
    if options.ranks_of_interest and not options.loss_iterations:
        parser.error(
            "--ranks-of-interest: they are for loss runs. Give --loss-iterations N, or --cb-rank and --sc-rank"
        )
    if options.find_rate and options.loss_iterations:
        parser.error("--find-rate and --loss-iterations: two things in one call. Give one of them")
    if not options.timeout > 0:
        parser.error(f"--timeout {options.timeout:g}: no time at all. Give a positive number of minutes")


def _list(parse):
    """A comma-separated list, for argparse, which prints the reason of ArgumentTypeError only."""

    def parse_list(text: str) -> list:
        try:
            return list(dict.fromkeys(parse(word) for word in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_list


def _one_of(known):
    def parse(word: str) -> str:
        if word not in known:
            raise ValueError(f"{word!r} is none of {', '.join(known)}")
        return word

    return parse


def _rate(word: str) -> str:
    bits_per_second(word)
    return word


def _rank_pair(word: str) -> tuple[int, int]:
    backprop, colon, dp = word.partition(":")
    if not (colon and backprop.isdecimal() and dp.isdecimal() and int(backprop) and int(dp)):
        raise ValueError(f"{word!r} is not a pair of ranks. Give CB:SC, such as 2:11")
    return int(backprop), int(dp)


@contextmanager
def _claimed(output: Path) -> Iterator[None]:
    """Hold the only right to write `output`.

    Raises:
        NetworkError: another process holds it.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    # Never removed: the kernel lets go of it with the process, however that ends.
    with output.with_name(f".{output.name}.lock").open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NetworkError(f"--output {output}: another cluster.py is writing there. Give another folder") from None
        yield


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    # Once: a second Ctrl-C must not end the cleaning up.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise _Interrupted(signum)


if __name__ == "__main__":
    sys.exit(main())
