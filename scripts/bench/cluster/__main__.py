"""Benchmark of compression on links of a given rate: real Megatron on hosts made of network namespaces.

    .venv/bin/python -m scripts.bench.cluster --layouts pp2dp2 --rates 25mbit,50mbit,100mbit,none
    .venv/bin/python -m scripts.bench.cluster --device gpu    four hosts on one GPU, over NCCL: planned runs, each once

There is one host for each pipeline stage of each replica, or of L replicas with the suffix nL, and torchrun on every
host. Vanilla and compressed variants take turns with the same seed and data, in alternating blocks. A run is one
variant: the rate of all links is changed while it trains, once through all rates and back; a variant that chooses by
the links when it starts (by a trial) gets a run per rate. The results are OUTPUT/cluster.json with
everything, cluster.md and plots. It takes iproute2, util-linux, and root or a machine whose users may make
namespaces. Flags after -- are added to all variants but vanilla.
"""

import argparse
import itertools
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from optimus_cc_ext.errors import run_command
from scripts.bench.cluster import on_gpu
from scripts.bench.cluster.model import proportions
from scripts.bench.cluster.page import JSON_NAME, load, write
from scripts.bench.cluster.rates import Plan, plans
from scripts.bench.cluster.results import BOUND, chooses_by_the_links, payload
from scripts.bench.cluster.run import Iteration, Run, free_coding, train
from scripts.experiments.command import add_text_options, told, words_and_further
from scripts.experiments.models import MODELS, ExperimentError, Layout, Training
from scripts.experiments.runs import claimed, commit
from scripts.experiments.texts import hash_of, text_of
from scripts.experiments.variants import CLUSTER, VANILLA, flags_of, papers_ranks
from scripts.hosts.launch import RunFailed
from scripts.hosts.network import UNSHAPED, NetworkError, bits_per_second, why_not

TRAINED = tuple(name for name in MODELS if name in ("tiny", "small", "deep", "wide", "experts", "experts-top8"))
"""Names of the models: four with the paper's proportions, and one with experts, for layouts of one stage."""

ON_GPU = ("gpt-1b", "llama-1b", "moe-1b")
"""Names of the models that are trained on a GPU."""

_SCHEDULE = 200
"""Iterations of the learning rate's schedule, equal for all runs, so that their different lengths do not change their
losses.
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the benchmark's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.cluster", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    compared = parser.add_argument_group("what is compared")
    compared.add_argument(
        "--layouts", type=_list(Layout.parsed),
        help="[tpT]ppPdpD[z1][nL], such as pp4dp2,pp2dp2z1 (pp2dp2); nL: L replicas on a host",
    )  # fmt: skip
    compared.add_argument(
        "--models", type=_list(_one_of(TRAINED + ON_GPU)),
        help=f"models to train, of {', '.join(TRAINED)} (small); on a GPU of {', '.join(ON_GPU)} (gpt-1b)",
    )  # fmt: skip
    variants, said = _list(_one_of([*CLUSTER, on_gpu.FREE])), f"variants, of {', '.join(CLUSTER)}"
    compared.add_argument("--variants", type=variants, default=[VANILLA, "paper", "trial"], help=said)
    compared.add_argument(
        "--rates", type=_list(_rate),
        help="rates of every link, both ways, such as 25mbit,1gbit, or with a delay 100mbit+20ms; none: unshaped, as"
        " the shares need (50mbit,none; on a GPU none,10gbit,5gbit,1gbit)",
    )  # fmt: skip
    much = parser.add_argument_group("how much")
    much.add_argument("--blocks", type=_positive, default=2, help="how often all variants take turns (%(default)s)")
    much.add_argument("--iterations", type=_positive, default=3, help="measured per rate and cycle (%(default)s)")
    much.add_argument("--cycles", type=_positive, default=2, help="passes through the rates, and back (%(default)s)")
    warm_up = "first iterations, not counted (%(default)s; with a trial at least 14)"
    much.add_argument("--warm-up", type=_positive, default=3, help=warm_up)
    much.add_argument(
        "--bound", choices=("links", "coding"), nargs="?", const="links",
        help="one more run of each variant: vanilla on links that are faster by as much as the variant's bytes are"
        " fewer, or the variant with coding that takes almost no time and loses the values (default if given: links)",
    )  # fmt: skip
    much.add_argument("--timeout", type=_positive, default=30, metavar="MINUTES", help="limit of one run (%(default)s)")
    much.add_argument("--seed", type=int, default=1234)
    gpu = parser.add_argument_group("on a GPU (--device gpu): planned runs, or --layouts; each is made once")
    gpu.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="device of all ranks (%(default)s)")
    gpu.add_argument("--only", nargs="+", choices=on_gpu.SLICES, metavar="RUNS", help=", ".join(on_gpu.SLICES))
    gpu.add_argument("--rows", type=Path, default=on_gpu.ROWS, metavar="CSV", help="finished runs (%(default)s)")
    gpu.add_argument("--show", action="store_true", help="only show the runs, with the commands of those not yet made")
    gpu.add_argument("--dry-run-on-cpu", action="store_true", help="make all runs with tiny models, without a GPU")
    files = parser.add_argument_group("files")
    files.add_argument("--output", type=Path, default=Path("results/cluster"), metavar="DIR")
    files.add_argument("--append", action="store_true", help="keep the runs that are in OUTPUT/cluster.json, if any")
    add_text_options(files, max_mb=5.0)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cluster benchmark; return the exit status.

    Returns the exit status: 0; 1: a run failed; 2: bad input, or a machine that cannot make hosts; 130: interrupted.
    """
    words, further = words_and_further(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    options = parser.parse_args(words)
    on_a_gpu = options.device == "gpu"
    if not on_a_gpu:
        options.layouts, options.models = options.layouts or [Layout(1, 2, 2)], options.models or ["small"]
        options.rates = options.rates or ["50mbit", UNSHAPED]
    if options.bound and VANILLA not in options.variants:
        parser.error(f"--bound: it trains {VANILLA} again. Give {VANILLA} in --variants, too")
    if on_gpu.FREE in options.variants and not on_a_gpu:
        parser.error(f"--variants {on_gpu.FREE}: give --device gpu, or --bound coding")
    if wrong := [name for name in options.models or () if (name in ON_GPU) != on_a_gpu]:
        parser.error(f"--models {wrong[0]}: give --device gpu for {', '.join(ON_GPU)}, and only for these")
    return run_command(
        lambda: _do(options, further), "all hosts and processes have ended; finished runs are kept"
    )  # fmt: skip


def _do(options: argparse.Namespace, further: list[str]) -> int:
    if not options.show and (reason := why_not()) is not None:
        cure = (
            "Run the benchmark on Linux, as root or where users may make namespaces; in a container, with --privileged"
        )
        raise NetworkError(f"{reason}. {cure}")
    try:
        if options.device == "gpu":
            print(on_gpu.measure(options))
            return 0
        bench = Bench(options, further)
        for layout, model in itertools.product(options.layouts, options.models):
            print(f"{model}, {layout} on {layout.hosts} hosts: {proportions(MODELS[model], layout)}.", flush=True)
            bench.sweep(model, layout)
    except RunFailed as failure:
        return told(failure)
    if bench.text:
        print(f"\n{bench.text}\nwritten: {options.output}")
    return 0


class Bench:
    """Runs of one call, which are written to disk as they finish."""

    def __init__(self, options: argparse.Namespace, further: list[str]) -> None:
        self.options, self.further = options, further
        self.runs: list[Run] = []
        self.text = ""
        self._claimed = ExitStack()  # the lock lasts as long as the object that holds it
        self._claimed.enter_context(claimed(options.output))
        if not (options.output / JSON_NAME).exists():
            return
        if not options.append:
            raise ExperimentError(
                f"--output {options.output}: the folder has results. Give --append to keep them, or another folder"
            )
        earlier, self.runs = load(options.output)
        if any(earlier.get(name) != self.arguments()[name] for name in ("input", "max_mb")):
            raise ExperimentError(f"--append: {options.output} has results of another text. Give another --output")

    def sweep(self, name: str, layout: Layout) -> None:
        """Train all variants in alternating blocks, with all rates in each run."""
        options = self.options
        much = {"each": options.iterations, "cycles": options.cycles, "warm_up": options.warm_up}
        self.check_comparable(name, layout)
        earlier = [run.block for run in self.runs if (run.model, run.layout) == (name, str(layout))]
        first = 1 + max(earlier, default=-1)
        for block in range(first, first + options.blocks):
            # Odd blocks go backwards, so that a drift of the machine's speed affects all variants alike.
            for variant in options.variants if block % 2 == 0 else reversed(options.variants):
                chooses = chooses_by_the_links(self._flags(name, layout, variant), layout, name)
                for plan in plans(options.rates, chooses=chooses, **much):
                    label = f"block{block}" + (f"-{plan.rates[0]}" if chooses else "")
                    coded = self._train(name, layout, variant, plan, label, block)
                    self._keep(coded)
                    if options.bound == "coding" and variant != VANILLA:
                        script = free_coding(coded.iterations)
                        free = self._train(name, layout, variant, plan, f"{label}-{BOUND}it", block, script)
                        free.variant = BOUND + variant
                        self._keep(free)
            if options.bound == "links":
                self._measure_bounds(name, layout, block, much)

    def _measure_bounds(self, name: str, layout: Layout, block: int, much: Mapping[str, int]) -> None:
        """Train vanilla once more for each other run of a block, on links that are faster by as much as the run's bytes
        are fewer.
        """
        mine = [run for run in self.runs if (run.model, run.layout, run.block) == (name, str(layout), block)]
        # Bytes of all iterations together, because a log line that is read late moves bytes from one iteration to the
        # next.
        sent = [payload(run.iterations[self.options.warm_up :]) for run in mine]
        plain = sent[[run.variant for run in mine].index(VANILLA)]
        for run, ours in zip(mine, sent, strict=True):
            measured = dict.fromkeys(each.rate for each in run.iterations if each.measured and each.rate != UNSHAPED)
            rates = {f"{bits_per_second(rate) * plain / ours / 1e6:.2f}mbit": rate for rate in measured}
            if run.variant == VANILLA or not rates:
                continue
            [plan] = plans(list(rates), chooses=False, **much)
            label = f"block{block}-{BOUND}{run.variant}-{plan.rates[-1]}"
            bound = self._train(name, layout, VANILLA, plan, label, block)
            bound.variant = BOUND + run.variant
            for each in bound.iterations:
                each.rate = rates.get(each.rate, each.rate)
            self._keep(bound)

    def check_comparable(self, name: str, layout: Layout) -> None:
        """Check that --append adds to runs of the same training.

        Raises:
            ExperimentError: a variant has runs with other flags or another seed.
        """
        for run in self.runs:
            if (run.model, run.layout) == (name, str(layout)) and run.variant in self.options.variants:
                flags = self._flags(name, layout, run.variant)
                if (run.flags, run.seed) != (flags, self.options.seed):
                    raise ExperimentError(
                        f"--append: {self.options.output} has {run.variant} with other flags or another seed"
                        f" ({shlex.join(run.flags)}, seed {run.seed}). Give another --output"
                    )

    def _flags(self, name: str, layout: Layout, variant: str) -> list[str]:
        return flags_of(CLUSTER[variant], layout, papers_ranks(MODELS[name].hidden), self.further)

    def _train(
        self, name: str, layout: Layout, variant: str, plan: Plan, label: str, block: int, script: Sequence[str] = ()
    ) -> Run:
        options, ours = self.options, self._flags(name, layout, variant)
        training = Training(
            model=MODELS[name], layout=layout, iterations=len(plan.rates), schedule=_SCHEDULE, seed=options.seed,
            evaluation_iterations=0,
        )  # fmt: skip
        # The text is tokenized once for each size of the vocabulary.
        folder = options.output.with_name(f"{options.output.name}-data") / f"vocabulary-{training.model.vocabulary}"
        data = text_of(options.input).prepared(folder, training.model.vocabulary, options.max_mb)
        print(f"{variant}, {label}: {shlex.join(ours) or 'no flags of ours'}", flush=True)
        run = Run(name, str(layout), variant, block, ours, options.seed, commit=commit(), text=hash_of(data))
        flags = [*script, *training.megatron_flags(data), "--eval-interval", str(training.iterations), *ours]
        folder = options.output / "runs" / f"{name}-{layout}-{variant}-{label}".replace(" ", "-")
        return train(run, layout, flags, folder, plan, seconds=60 * options.timeout, on_iteration=_tell)

    def _keep(self, run: Run) -> None:
        self.runs.append(run)
        self.text = write(self.options.output, self.arguments(), self.runs)

    def arguments(self) -> dict[str, Any]:
        """Return the command line in the form that is kept with the results."""
        return json.loads(json.dumps(vars(self.options) | {"further": self.further}, default=str))


def _tell(iteration: Iteration) -> None:
    remark = "" if iteration.measured else "  (not counted)"
    print(f"  {iteration.number:4d}  {iteration.rate:>9}  {iteration.seconds:7.2f} s{remark}", flush=True)


def _list(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a parser of values that are separated by commas."""
    return lambda text: list(dict.fromkeys(parse(word) for word in text.split(",")))


def _positive(word: str) -> int:
    if not (word.isdecimal() and int(word)):
        raise ExperimentError(f"{word}: give 1 or more")
    return int(word)


def _one_of(known: Iterable[str]) -> Callable[[str], str]:
    def parse(word: str) -> str:
        if word not in known:
            raise ExperimentError(f"{word!r} is none of {', '.join(known)}")
        return word

    return parse


def _rate(word: str) -> str:
    try:
        bits_per_second(word)
    except ValueError as error:
        raise ExperimentError(str(error)) from None
    return word


if __name__ == "__main__":
    # Python's handler of SIGINT is set explicitly, because a shell's background job starts with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
