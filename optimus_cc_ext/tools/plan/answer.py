"""The answer of a plan: for each class of traffic, if compressing it pays beside the others, and the flags to use."""

from collections.abc import Sequence
from dataclasses import dataclass

from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.config.classes import TrafficClass
from optimus_cc_ext.config.trials import LEAST_GAIN
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.hardware import Cluster
from optimus_cc_ext.tools.plan.iteration import breakdown, iteration, rank_costs
from optimus_cc_ext.tools.plan.memory import SLICES_COST, check_memory, enough_memory, slicing
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.variants import SHORT, WORTH, Band, Variant, config_in

ADMITTED = {
    traffic: traffic.presets["balanced"][traffic.format_field]
    for traffic in classes.CLASSES
    if "balanced" in traffic.presets
}
"""The format of each class in the preset `balanced`. All of them together cost a GPT of 7.4 million parameters +0.006 %
of loss; the gather costs none, and gradients of tokens too little to measure: docs/evidence.md has the bounds.
Gradients in int4 cost the GPT +0.045 %, with a bound of 0.06 %, and a Llama-like model 0.1 %.
"""

BALANCED = ("--optimus-cc", "balanced")

UNPRICED = {traffic: "int8" for traffic in classes.CLASSES if traffic not in ADMITTED}
"""The format of each class whose price in loss the study could not bound by 0.05 %. The answer gives the seconds of the
class and does not recommend it.
"""

NO_PRICE = "six seeds cannot rule out a price of 0.05 % of loss (docs/evidence.md)"
PRICE = "together +0.006 % of loss for a GPT of 7 million parameters (docs/evidence.md)"
CLASS_WORTH = WORTH / 4
"""Smallest share of vanilla's seconds that a class must save to be recommended."""


@dataclass(frozen=True)
class Answer:
    """The answer for one class of traffic."""

    traffic: TrafficClass
    form: str
    saved: tuple[float, ...]
    """Seconds that this class saves if all others are compressed: as planned, at least, at most; empty if the layout
    or an option of Megatron does not allow it.
    """

    taken: bool
    reason: str = ""
    """The reason for which the class is not compressed, if seconds are not the reason."""

    def sentence(self, vanilla: float) -> str:
        """Return the answer as a sentence; `vanilla` is the seconds of vanilla's iteration."""
        tag = self.traffic.tag
        if not self.saved:
            return f"{tag}: no, {self.reason}"
        planned, least, most = self.saved
        what = f"{'saves' if planned >= 0 else 'costs'} {abs(planned):.3f} s an iteration beside the others"
        share = f"{round(100 * planned / vanilla, 1) + 0.0:.1f} % of vanilla's seconds"  # without a minus before 0.0
        why_not = self.reason or f"it does not surely save {100 * CLASS_WORTH:g} %"
        return f"{tag}: {'yes' if self.taken else 'no'}, {self.form} {what} ({least:.3f} to {most:.3f} s; {share})" + (
            "" if self.taken else f": {why_not}"
        )


def _flags(chosen: Sequence[TrafficClass]) -> list[str]:
    return [word for traffic in chosen for word in (traffic.format_flag, (ADMITTED | UNPRICED)[traffic])]


def answers(band: Band, job: Job) -> list[Answer]:
    """Return the answer for every class of traffic. The class that saves least is left out first, until every other one
    surely saves `CLASS_WORTH`.
    """
    sent, refused = list[TrafficClass](), dict[TrafficClass, str]()
    for traffic in classes.CLASSES:
        try:
            config_in(_flags([traffic]), job)
            sent.append(traffic)
        except FlagError as error:
            refused[traffic] = error.reason
    allowed = [traffic for traffic in sent if traffic in ADMITTED]

    def seconds(chosen: Sequence[TrafficClass]) -> list[float]:
        return band.seconds(config_in(_flags(chosen), job))

    def saved(chosen: Sequence[TrafficClass]) -> dict[TrafficClass, tuple[float, float, float]]:
        whole, found = seconds(chosen), {}
        for traffic in chosen:
            without = seconds([each for each in chosen if each is not traffic])
            gains = [before - after for before, after in zip(without, whole, strict=True)]
            found[traffic] = gains[0], min(gains), max(gains)
        return found

    first = left = saved(allowed)
    while left:
        smallest = min(left, key=lambda traffic: left[traffic][1])
        if left[smallest][1] >= CLASS_WORTH * band.vanilla.seconds:
            break
        left = saved([traffic for traffic in left if traffic is not smallest])
    if len(sent) > len(allowed):
        everything = saved(sent)
        first = first | {traffic: everything[traffic] for traffic in sent if traffic in UNPRICED}
        refused |= {traffic: NO_PRICE for traffic in sent if traffic in UNPRICED}
    return [
        Answer(
            traffic, (ADMITTED | UNPRICED)[traffic], first.get(traffic, ()), traffic in left, refused.get(traffic, "")
        )
        for traffic in classes.CLASSES
    ]  # fmt: skip


def recommended(cluster: Cluster, job: Job, band: Band, found: Sequence[Answer], vanilla: Variant) -> Variant:
    """Return the variant that follows from the answers, under its preset's name if it has one; vanilla if no class is
    taken, or all together do not surely gain enough.
    """
    flags = _flags([answer.traffic for answer in found if answer.taken])
    config, preset = config_in(flags, job), config_in(BALANCED, job)
    if flags and all(config.format_of(traffic) == preset.format_of(traffic) for traffic in classes.CLASSES):
        flags, config = [*BALANCED], preset
    gain = band.gain(config)
    if not flags or gain.word != "yes":
        return vanilla
    used = check_memory(cluster, job, config)
    return Variant("recommended", " ".join(flags), config, band.results(config)[0], gain, used)


def in_bf16(job: Job) -> Job | None:
    """Return the job with `--grad-reduce-in-bf16`; None if its gradients are in 16 bits already, or fp32 throughout."""
    return job.replace(gradient_bytes=2) if job.gradient_bytes == 4 and job.value_bytes == 2 else None


def answer_lines(cluster: Cluster, job: Job, found: Sequence[Answer], chosen: Variant, all_of_them: Sequence[Variant],
                 megatron: str) -> list[str]:  # fmt: skip
    """Return the answer: one sentence with one number, the command line to use, a sentence for each class, and what
    equals it.
    """
    vanilla = all_of_them[0].result.seconds
    classes_said = [answer.sentence(vanilla) for answer in found]
    if not chosen.flags:
        preset = next((v for v in all_of_them if v.flags == " ".join(BALANCED)), None)
        if preset and preset.gain.word != "no":
            return [_headline("maybe", preset), *classes_said]
        return [
            f"no: compression saves less than {100 * LEAST_GAIN:g} % of an iteration here. Most seconds go to "
            f"{limits(job, all_of_them[0])}", *classes_said,
        ]  # fmt: skip
    gain = chosen.gain
    said = [_headline("yes", chosen), f"use: {megatron} {chosen.flags}   ({PRICE})", *classes_said]
    int4 = config_in([*chosen.flags.split(), classes.DP_GRADIENTS.format_flag, "int4"], job)
    if chosen.config.format_of(classes.DP_GRADIENTS) == "int8":
        more = chosen.result.seconds - iteration(cluster, job, int4).seconds
        said.append(
            f"left out for its loss, +0.045 % with a bound of 0.06 %: DP gradients in int4 would save {more:.3f} s more"
        )
    equal = [v.name for v in all_of_them[1:] if v.flags != chosen.flags and gain.least <= v.gain.planned <= gain.most]
    return said + ([f"within the band of it, without regard to loss: {', '.join(equal)}"] if equal else [])


def _headline(word: str, variant: Variant) -> str:
    gain = variant.gain
    return (
        f"{word}: {100 * gain.planned:.0f} % less time with {variant.flags} "
        f"({100 * gain.least:.0f} to {100 * gain.most:.0f} %)"
    ) + ("" if word == "yes" else "; it measures itself in the run's first iterations, and goes dense if it is slower")


LIMITS = {
    "bubble": "the bubble of the pipeline", "tensor parallel": "tensor parallelism inside a node",
    "context parallel": "context parallelism", "expert dispatch": "the dispatcher of tokens",
    "expert gradient": "the dispatcher of tokens", "optimizer": "the optimizer's step",
}  # fmt: skip
"""Words for the parts of an iteration whose names do not say enough."""


def limits(job: Job, vanilla: Variant) -> str:
    """Return the two parts of vanilla's iteration that take most of its seconds, as words."""
    parts: dict[str, float] = {}
    for name, seconds in breakdown(job, vanilla.result).items():
        words = LIMITS.get(name, name)
        parts[words] = parts.get(words, 0.0) + seconds
    largest = sorted(parts, key=lambda words: -parts[words])[:2]
    return ", then ".join(f"{words} ({100 * parts[words] / vanilla.result.seconds:.0f} %)" for words in largest)


def trials(band: Band, found: Sequence[Variant]) -> list[str]:
    """Return a line for the user's variant if the trial of its preset would go dense."""
    return [
        f"{each.name}: 0 % from what its preset alone asks for, because a trial in the run that saves less than "
        f"{100 * LEAST_GAIN:g} % goes dense (--no-compression-trial compresses all the same)"
        for each in found
        if each.name == "yours" and band.goes_dense(each.config)
    ]


def bounds(cluster: Cluster, job: Job, found: Sequence[Variant]) -> list[str]:
    """Return a line for the user's variant if its bound of the message buffers costs much."""
    said = []
    for each in found:
        if each.name == "yours" and (enough := enough_memory(cluster, job, each.config, each.result.seconds)):
            cost = 100 * slicing(cluster, job, each.config) / each.result.seconds
            said.append(
                f"{each.name}: slices of --message-memory {each.config.message_memory} cost up to {cost:.0f} % of an "
                f"iteration; {enough} would be enough for {100 * SLICES_COST:g} %"
            )
    return said


def class_of(name: str) -> TrafficClass:
    """Return the class of traffic with this tag, title or name; raises PlanError if there is none."""
    wanted = name.lower().replace("-", " ").replace("_", " ")
    for traffic in classes.CLASSES:
        names = (traffic.tag, SHORT.get(traffic.name, ""), traffic.name)
        if wanted in (each.lower().replace("_", " ") for each in names):
            return traffic
    raise PlanError(f"--why: unknown class {name!r}: there are {', '.join(traffic.tag for traffic in classes.CLASSES)}")


def why(cluster: Cluster, job: Job, answer: Answer, vanilla: Variant) -> list[str]:
    """Return the lines that explain an answer: bytes and seconds of the class, hidden and exposed."""
    traffic, plain = answer.traffic, vanilla.result
    said = [answer.sentence(plain.seconds), f"  vanilla sends it by {traffic.collective} {traffic.group}"]
    exposed = breakdown(job, plain).get(traffic.tag)
    if exposed is not None:
        said.append(f"  exposed in vanilla's iteration, which nothing hides: {exposed:.3f} of {plain.seconds:.3f} s")
    if not answer.saved:
        return said
    config: OptimusConfig = config_in(_flags([traffic]), job)
    stage = min(1, job.pp - 1) if traffic is classes.PIPELINE_BACKWARD else 0
    for cost in rank_costs(cluster, job, config)[stage].classes:
        if cost.name == traffic.tag and cost.dense.nbytes:
            for form, sent in (("dense", cost.dense), (answer.form, cost.compressed)):
                coding = sent.encode + sent.decode + sent.remember
                said.append(
                    f"  {form}: {sent.nbytes / 1e6:.3f} MB of a rank {cost.when.value}, "
                    f"{1e3 * (sent.transfer + sent.second_phase):.3f} ms to transfer"
                    + (f", {1e3 * coding:.3f} ms to encode and decode" if coding else "")
                )
    return said
