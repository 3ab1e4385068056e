"""Communication hooks of torch's DistributedDataParallel on hosts with links of a given rate: seconds, bytes and loss.

    .venv/bin/python -m scripts.bench.ddp_hooks --rate 50mbit --seeds 3 --output results/ddp_hooks

A small language model learns the bytes of Python sources on four hosts with one rank each. Hooks take turns with the
same seed and data. Each finished run is a row of OUTPUT/rows.csv at once, and a second call goes on with the missing
ones; the table is printed from the rows. It takes iproute2, util-linux, and root or a machine whose users may make
namespaces.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from optimus_cc_ext import ddp_hook
from optimus_cc_ext.errors import OptimusError, run_command
from scripts.experiments.runs import commit
from scripts.experiments.texts import TEXTS
from scripts.hosts.network import INTERFACE, network

HOOKS = ("none", "bf16", "powersgd4", "int8", "int4")
HOSTS, HIDDEN, LAYERS, LENGTH, BATCH, UNTIMED = 4, 256, 4, 128, 4, 15
BYTES_OF_TEXT = 8_000_000
COLUMNS = ("hook", "rate", "seed", "iterations", "seconds", "sent_bytes", "loss", "commit")
_LIMIT_SECONDS = 900.0


class Model(nn.Module):
    """Language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
        self.last = nn.Linear(HIDDEN, 256)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        given, expected = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        hidden = self.bytes(given) + self.places(torch.arange(given.shape[1]))
        found = self.last(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(found.flatten(0, 1), expected.flatten())


def train(hook: str, seed: int, iterations: int) -> dict[str, float]:
    """Train on this rank; return the median seconds and the sent bytes of an iteration, and the last losses' mean."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    # PowerSGD starts a bucket's second sum when the first has ended: with several buckets ranks differ in the order.
    model = DistributedDataParallel(Model(), bucket_cap_mb=1000 if hook.startswith("powersgd") else None)
    _register(model, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text, draws = _text(), torch.Generator().manual_seed(seed * HOSTS + dist.get_rank())
    seconds, losses, sent = [], [], 0
    for iteration in range(iterations):
        if iteration == UNTIMED:
            sent = _sent()
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=draws)
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts]).long()
        begin = time.monotonic()
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        seconds.append(time.monotonic() - begin)
        losses.append(float(mean) / HOSTS)
    sent = _sent() - sent
    return {
        "seconds": statistics.median(seconds[UNTIMED:]), "sent_bytes": sent / (iterations - UNTIMED),
        "loss": statistics.fmean(losses[-iterations // 5 :]),
    }  # fmt: skip


def _register(model: DistributedDataParallel, hook: str) -> None:
    if hook == "bf16":
        model.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook)
    elif hook.startswith("powersgd"):
        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=int(hook.removeprefix("powersgd")), start_powerSGD_iter=10
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook != "none":
        model.register_comm_hook(*ddp_hook(hook))


def _text() -> torch.Tensor:
    read = bytearray()
    for path in sorted(TEXTS["python"].source.rglob(TEXTS["python"].pattern)):
        read += path.read_bytes()
        if len(read) >= BYTES_OF_TEXT:
            break
    return torch.frombuffer(read, dtype=torch.uint8)


def _sent() -> int:
    """Return the bytes that this host's interface has sent."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if INTERFACE in line)
    return int(line.partition(":")[2].split()[8])


def run_hosts(rate: str, hook: str, seed: int, iterations: int) -> dict[str, float]:
    """Train once with one rank on each host; return the measurements of rank 0."""
    words = ["--rank", "--hooks", hook, "--seeds", f"{seed}", "--iterations", f"{iterations}"]
    command, processes = [sys.executable, "-m", "scripts.bench.ddp_hooks", *words], []
    with network(HOSTS) as hosts:
        hosts.set_rate(rate)
        for rank in range(HOSTS):
            places = {"RANK": f"{rank}", "WORLD_SIZE": f"{HOSTS}", "MASTER_ADDR": hosts.address(0)}
            fixed = {"MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE, "OPTIMUS_CC_NODE": f"host{rank}"}
            environment = os.environ | places | fixed | {"OMP_NUM_THREADS": "1"}
            processes.append(hosts.popen(rank, command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate(timeout=_LIMIT_SECONDS)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise OptimusError(f"{hook}, seed {seed}: a rank failed; see above")
    return dict(json.loads(outputs[0].splitlines()[-1]))


def table(rows: list[dict[str, str]]) -> str:
    """Return medians over seeds by hook; losses as the mean of the differences from DDP's own at the same seed."""
    lines = [
        "| rate | hook | seconds | of DDP's | MB sent by a host | loss | against DDP |",
        "|---|---|---|---|---|---|---|",
    ]
    for rate in dict.fromkeys(row["rate"] for row in rows):
        by_hook = {hook: [row for row in rows if (row["rate"], row["hook"]) == (rate, hook)] for hook in HOOKS}
        plain = {row["seed"]: row for row in by_hook["none"]}
        for hook, found in by_hook.items():
            pairs = [(row, plain[row["seed"]]) for row in found if row["seed"] in plain]
            if pairs:
                seconds, sent = (statistics.median(float(r[c]) for r, _ in pairs) for c in ("seconds", "sent_bytes"))
                ratio = statistics.median(float(r["seconds"]) / float(p["seconds"]) for r, p in pairs)
                more = statistics.fmean(float(r["loss"]) / float(p["loss"]) - 1 for r, p in pairs)
                loss = statistics.fmean(float(r["loss"]) for r, _ in pairs)
                lines.append(
                    f"| {rate} | {hook} | {seconds:.3f} | {ratio:.2f} | {sent / 1e6:.2f} | {loss:.4f} | {more:+.2%} |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.ddp_hooks", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rate", default="50mbit", help="rate of all links (default: %(default)s)")
    parser.add_argument("--hooks", default=",".join(HOOKS), help="hooks, comma-separated (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=100, help="iterations of a run (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results/ddp_hooks"), help="default: %(default)s")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(train(options.hooks, options.seeds, options.iterations)), flush=True)
        dist.barrier()
        os._exit(0)
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "rows.csv"
    rows = list(csv.DictReader(file.open())) if file.exists() else []
    for seed in range(1, options.seeds + 1):
        hooks = options.hooks.split(",")
        for hook in hooks if seed % 2 else hooks[::-1]:
            key = (hook, options.rate, f"{seed}", f"{options.iterations}")
            if any((row["hook"], row["rate"], row["seed"], row["iterations"]) == key for row in rows):
                continue
            found = run_hosts(options.rate, hook, seed, options.iterations)
            rows.append(
                dict(zip(COLUMNS, (*key, *(f"{found[name]:.6g}" for name in COLUMNS[4:7]), commit()), strict=True))
            )
            with file.open("a", newline="") as out:
                writer = csv.DictWriter(out, COLUMNS)
                if len(rows) == 1:
                    writer.writeheader()
                writer.writerow(rows[-1])
    print(table([row for row in rows if row["iterations"] == f"{options.iterations}"]))


if __name__ == "__main__":
    run_command(main)
