"""One rank of a run of thousands: Megatron's real loop, its groups made with torch's fake process group.

    python -m tests.megatron.one_of_many --ranks 2048 --rank 0 -- --optimus-cc balanced <Megatron's flags>

prints JSON: CPU-seconds and peak memory of the rank, the lines that it printed, and the files that it saved. Without
flags of ours it is vanilla Megatron's rank. The fake group answers every collective at once, with what this rank gave:
no number that is trained means anything. What ranks tell each other would be one answer for all, so `Grid.gather`
is given an answer for each rank: its own, with the place of another rank and the node of another host. `--odd-one` lets
one rank, in the middle of the run, answer with other settings.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import pickle
import resource
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RANKS_PER_NODE = 8
MODEL = shlex.split("""
    --num-layers 200 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32
    --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --num-workers 0 --micro-batch-size 1
    --train-iters 3 --lr 1e-3 --eval-iters 0 --eval-interval 1000 --log-interval 1 --bf16 --use-distributed-optimizer
    --overlap-grad-reduce --ddp-num-buckets 16 --transformer-impl local --distributed-backend gloo
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-check-for-nan-in-loss-and-grad --ckpt-format torch
""")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--odd-one", action="store_true")
    own, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"]
    os.environ |= {
        "RANK": str(own.rank), "LOCAL_RANK": str(own.rank % RANKS_PER_NODE), "WORLD_SIZE": str(own.ranks),
        "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        "OPTIMUS_CC_NODE": f"ranks:{RANKS_PER_NODE}", "OPTIMUS_CC_DEVICE": "cpu",
    }  # fmt: skip
    said, ended, started = io.StringIO(), None, dict[str, float]()
    use_fake_groups()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            train(
                [*MODEL, *flags, *(("--save", str(own.save), "--save-interval", "3") if own.save else ())], own, started
            )
        except SystemExit as stopped:
            ended = stopped.code
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
    used = resource.getrusage(resource.RUSAGE_SELF)
    files = {str(path.relative_to(own.save)): path.stat().st_size for path in own.save.rglob("*")} if own.save else {}
    # The activations of other stages are whatever memory held, so their compression errors may be NaN, and warnings are
    # left out.
    lines = [line for line in said.getvalue().splitlines() if "optimus-cc" in line and "warning |" not in line]
    print(json.dumps({
        "start_up": started, "ended": ended,
        "cpu_seconds": round(time.process_time(), 2), "mb": round(used.ru_maxrss / 1e3, 1),
        "lines": lines, "ours": [name for name in files if "optimus_cc" in name], "files": len(files),
        "tail": said.getvalue().splitlines()[-5:] if ended else [],
    }, indent=1))  # fmt: skip


def use_fake_groups() -> None:
    """Replace every process group that is made in this process from now on by a fake one."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401, registers the backend

    start, new_group, barrier, broadcast = dist.init_process_group, dist.new_group, dist.barrier, dist.broadcast

    def init_process_group(*_: Any, rank: int, world_size: int, **__: Any) -> None:
        start("fake", rank=rank, world_size=world_size, store=dist.HashStore())

    def new_fake_group(ranks: Any = None, *args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return new_group(ranks, *args, **kwargs)

    def barrier_at_once(*args: Any, **kwargs: Any) -> Any:
        barrier(*args, **kwargs)
        # Torch's fake barrier never completes by itself.
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def broadcast_of_ones(tensor: Any, src: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Receive ones: flags that are set, and tokens that the vocabulary has."""
        if src != dist.get_rank():
            tensor.fill_(1)
        return broadcast(tensor, src, *args, **kwargs)

    dist.broadcast = broadcast_of_ones
    dist.init_process_group, dist.new_group, dist.barrier = init_process_group, new_fake_group, barrier_at_once


def answer_for_all(ranks: int, tensor: int, stages: int, *, odd_one: bool) -> None:
    """Let `Grid.gather` return an answer for each rank, with as many bytes as the real answers."""
    from optimus_cc_ext.collectives.nodes import Node
    from optimus_cc_ext.config import OptimusConfig
    from optimus_cc_ext.techniques.grid import Grid, RankPlace

    replicas = ranks // tensor // stages

    def of_rank(answer: Any, rank: int) -> Any:
        stage = rank // (tensor * replicas)
        if isinstance(answer, tuple):
            return tuple(of_rank(part, rank) for part in answer)
        if isinstance(answer, RankPlace):
            node = Node(f"ranks:{rank // RANKS_PER_NODE}", f"host {rank // RANKS_PER_NODE}", chosen=answer.node.chosen)
            first = rank % (tensor * replicas)
            return dataclasses.replace(
                answer, rank=rank, stage=stage, tensor_rank=rank % tensor, node=node,
                pipeline=tuple(range(first, ranks, tensor * replicas)) if stages > 1 else (),
            )  # fmt: skip
        if isinstance(answer, OptimusConfig) and odd_one and rank == ranks // 2:
            return answer.replace(compression_seed=answer.compression_seed + 1)
        return answer

    def gather(self: Grid, value: Any) -> list[Any]:
        answer = pickle.dumps(value)
        return [of_rank(pickle.loads(answer), rank) for rank in range(ranks)]

    def add_up(self: Grid, table: Any) -> None:
        table.copy_(table.sum(0, keepdim=True).expand_as(table))  # every stage reports the numbers of this one

    Grid.gather, Grid.sum = gather, add_up  # type: ignore[method-assign]


def time_start_up(found: dict[str, float]) -> None:
    """Note the CPU-seconds and the memory that it takes until the buckets of a model have joined their session."""
    from optimus_cc_ext.hooks import handle

    join = handle.join

    def timed(*args: Any) -> None:
        seconds, memory = time.process_time(), resident()
        join(*args)
        found["cpu_seconds"] = round(found.get("cpu_seconds", 0) + time.process_time() - seconds, 2)
        found["mb"] = round(found.get("mb", 0) + resident() - memory, 1)

    handle.join = timed


def resident() -> float:
    """Return the megabytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def train(flags: list[str], own: argparse.Namespace, started: dict[str, float]) -> None:
    from optimus_cc_ext import startup

    startup.prepare()
    from optimus_cc_ext.tools import pretrain_gpt

    time_start_up(started)

    def size(name: str) -> int:
        return int(flags[flags.index(name) + 1]) if name in flags else 1

    tensor, stages = size("--tensor-model-parallel-size"), size("--pipeline-model-parallel-size")
    answer_for_all(own.ranks, tensor, stages, odd_one=own.odd_one)
    batch = own.ranks // tensor // stages * stages * 2
    sys.argv = ["pretrain_gpt.py", *flags, "--global-batch-size", str(batch)]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
