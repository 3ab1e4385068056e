"""Training lines of Megatron-LM's functional tests, shrunken so that at most 8 ranks of a CPU train them."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scripts.compat.lines import Line

__all__ = ["SMALL", "SmallLine", "distinct_layouts"]

MOST_RANKS = 8
_CAPPED = {
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 4,
    "--context-parallel-size": 2,
    "--expert-model-parallel-size": 2,
    "--expert-tensor-parallel-size": 2,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 2,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--num-distributed-optimizer-instances": 2,
    "--num-experts": 4,
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 64,
    "--moe-shared-expert-intermediate-size": 64,
    "--num-query-groups": 2,
    "--mtp-num-layers": 1,
}
"""Flags that are kept with at most this number."""

_KEPT = frozenset(
    (
        "--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
        "--overlap-param-gather-with-optimizer-step", "--ddp-average-in-collective", "--ddp-num-buckets",
        "--use-tp-pp-dp-mapping", "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split", "--overlap-p2p-communication-warmup-flush",
        "--untie-embeddings-and-output-weights", "--position-embedding-type", "--disable-bias-linear", "--swiglu",
        "--squared-relu", "--group-query-attention", "--moe-router-load-balancing-type",
        "--moe-token-dispatcher-type", "--moe-aux-loss-coeff", "--calculate-per-token-loss", "--bf16", "--fp16",
        "--optimizer", "--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--clip-grad",
    )
)  # fmt: skip
"""Flags that are kept as they are: layout, overlap, precision of gradients, kind of model."""

SMALL = shlex.split("""
    --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --num-workers 0 --hidden-size 64 --ffn-hidden-size 128
    --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --train-iters 20 --lr 1e-3
    --lr-decay-style constant --eval-iters 0 --eval-interval 1000 --log-interval 1 --transformer-impl local
    --distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
    --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --hidden-dropout 0
    --attention-dropout 0 --distributed-timeout-minutes 3
""")


@dataclass(frozen=True)
class SmallLine:
    """A shrunken training line."""

    case: str
    """Folder and name of the test case."""

    script: str
    ranks: int
    layout: tuple[str, ...]
    """The flags that the line keeps."""

    sizes: tuple[str, ...]
    """The flags that its layout demands: layers and batch."""

    @property
    def flags(self) -> list[str]:
        """All flags of the line for Megatron."""
        return [*SMALL, *self.layout, *self.sizes]


def distinct_layouts(lines: Sequence[Line]) -> list[SmallLine]:
    """Return one shrunken line for each layout that fits, hybrid models apart, which need a GPU."""
    small = [each for line in lines if "hybrid" not in line.script and (each := _shrunken(line)) is not None]
    return list({(each.ranks, frozenset(_pairs(each.layout))): each for each in reversed(small)}.values())[::-1]


def _shrunken(line: Line) -> SmallLine | None:
    given = dict(_pairs(line.flags))
    kept = {flag: value for flag, value in given.items() if flag in _KEPT}
    kept |= {flag: str(min(int(given[flag]), most)) for flag, most in _CAPPED.items() if flag in given}
    if kept.get("--moe-token-dispatcher-type") == "flex":
        kept["--moe-token-dispatcher-type"] = "alltoall"  # flex needs a GPU's communication library

    def size(name: str, default: int = 1) -> int:
        return int(kept.get(f"--{name}", default))

    tensor, stages, context = (size(f"{kind}-parallel-size") for kind in ("tensor-model", "pipeline-model", "context"))
    experts = size("expert-tensor-parallel-size", tensor) * size("expert-model-parallel-size")
    unit = tensor * context
    data = 1 if context > 1 or tensor * stages == MOST_RANKS else 2
    instances = size("num-distributed-optimizer-instances")
    while data * unit % (experts * instances) or data % instances:
        data += 1
    ranks = data * unit * stages
    if ranks > MOST_RANKS or stages * context * data == 1:
        return None
    chunks = 2 if "virtual" in " ".join(kept) and stages > 1 else 1
    layers = max(2, stages * chunks)
    if "--pipeline-model-parallel-layout" in given and stages > 1:
        predictor = "m" if "--mtp-num-layers" in kept else ""
        kept["--pipeline-model-parallel-layout"] = f"Ett{'|t' * (stages * chunks - 2)}|{predictor}L"
        layers = stages * chunks
    sizes = ["--num-layers", str(layers), "--global-batch-size", str(2 * data * 2 * stages)]
    if stages == 1 or "--pipeline-model-parallel-layout" in kept:
        for flag in [flag for flag in kept if "virtual" in flag or "decoder-" in flag or "account-" in flag]:
            del kept[flag]
    layout = [word for flag, value in sorted(kept.items()) for word in (flag, *([value] if value else []))]
    return SmallLine(line.case, line.script, ranks, tuple(layout), tuple(sizes))


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag of `words` with its values."""
    starts = [at for at, word in enumerate(words) if word.startswith("--")]
    for at, end in zip(starts, [*starts[1:], len(words)], strict=True):
        yield words[at], " ".join(words[at + 1 : end])
