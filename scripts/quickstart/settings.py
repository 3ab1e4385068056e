"""Settings of the quickstart: model, links, and our flags of each of the two runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from optimus_cc_ext.tools.data import PreparedData
from scripts.experiments.models import MODELS, VALIDATION_SHARE, ExperimentError, Training
from scripts.experiments.variants import STUDY

RUNS = ("vanilla", "compressed")
"""Names of the runs, in their order. Their folders have the same names."""


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """A small GPT with tied embeddings on 2 pipeline stages x 2 data-parallel replicas, its schedule, and its links.

    The defaults take 8 minutes on 2 idle cores without AVX-512.
    """

    rate: str = "100mbit"
    """Rate of every link, both ways, if hosts can be made. Vanilla's iteration then waits for the network about as long
    as it computes, as large models do between nodes: that ratio counts, not the rate of so small a model's links.
    """

    shaped: bool = True
    """True if every rank has a host of its own, with links of this rate; otherwise all ranks share this machine."""

    shaped_iterations: int = 20
    """Largest number of iterations on shaped links, which is enough to time. At least half of a run has links without a
    limit: its iterations are faster there, and the losses do not depend on the links.
    """

    vanilla_band: float | None = 0.0035
    """Difference that the same batches in another order make in vanilla's own validation loss, as a fraction of it, by
    the study (`python -m scripts.study --variants vanilla,other-order --seeds 1 --iterations 80`); None: unknown for
    this training.
    """

    @property
    def shaping_ends(self) -> int:
        """Last iteration on shaped links; 0 without shaped links."""
        return min(self.shaped_iterations, self.iterations // 2) if self.shaped else 0

    @property
    def links(self) -> str:
        """Description of the shaped links."""
        return f"links of {self.rate[:-4]} {self.rate[-4].upper()}bit/s"

    @property
    def spans(self) -> dict[str, tuple[int, float]]:
        """First and last timed iteration, by the links that it ran on."""
        # The first three iterations set up. The iteration in which the links change belongs to neither kind.
        if not self.shaped:
            return {"on one machine": (4, inf)}
        return {self.links: (4, self.shaping_ends), "unshaped links": (self.shaping_ends + 2, inf)}

    @property
    def described(self) -> str:
        """Description of the trained model, for people."""
        model = self.model
        return (
            f"{self.layers} layers, hidden {model.hidden}, {model.heads} heads, sequence {model.sequence}, vocabulary"
            f" {model.vocabulary:,}, tied embeddings"
        )

    @property
    def arranged(self) -> str:
        """Description of the layout, for people."""
        return (
            f"{self.layout.stages} pipeline stages x {self.layout.replicas} data-parallel replicas = {self.processes}"
            f" processes, {self.model.micro_batches} micro-batches of {self.model.micro_batch} sequences per replica"
        )

    @property
    def hosts(self) -> str:
        """Description of the ranks' hosts, for people."""
        return (
            f"{self.processes} network namespaces of this machine, whose links the kernel holds at {self.rate} both"
            f" ways for the first {self.shaping_ends} iterations, and not at all for the others"
        )

    def flat(self) -> dict[str, Any]:
        """Return all settings by name, the model's and the layout's among them."""
        own = asdict(self)
        return {"layers": self.layers, **own.pop("model"), **own.pop("layout"), **own}

    def technique_flags(self, run: str, further: Sequence[str]) -> list[str]:
        """Return our flags of one run: none for vanilla, whose traffic is still counted. `further` flags come last and
        override.
        """
        # Without a trial: the links change during the run, and a trial would choose by the first of them.
        return [] if run == "vanilla" else [*STUDY["balanced"].split(), *further]


TINY = Settings(
    model=MODELS["test"], iterations=8, rate="20mbit", vanilla_band=None, evaluation_iterations=1
)  # fmt: skip
"""Settings for tests, which take seconds instead of minutes."""


def check_text(settings: Settings, data: PreparedData) -> None:
    """Refuse a text from which Megatron cannot cut a training and a validation part.

    Raises:
        ExperimentError: there are too few documents or too few tokens.
    """
    # Megatron cuts between documents, so 10 % must be at least one document, and a document of average length must fill
    # a sequence and the token after it.
    documents = 2 * 100 // VALIDATION_SHARE
    if data.documents < documents:
        raise ExperimentError(
            f"--input: {data.documents} documents cannot be cut into a training and a validation part, which are"
            f" whole documents. Give at least {documents}, or a single text file: it is cut every 16 KiB"
        )
    tokens = documents * (settings.model.sequence + 1)
    if data.tokens < tokens:
        raise ExperimentError(
            f"--input: {data.tokens} tokens are too few for sequences of {settings.model.sequence} in a training and a"
            f" validation part. Give a text of at least {tokens} tokens"
        )
