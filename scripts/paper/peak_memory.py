"""Run a command, `peak_memory.py COMMAND...`, and print at its end the peak memory of its largest process.

Megatron reports the memory of GPUs. Without a GPU, figure 12 is drawn from this line:

    peak resident memory (MB) | 812.41
"""

import resource
import signal
import subprocess
import sys


def main(argv: list[str]) -> int:
    """Run `argv`, and pass on signals that end a job. Returns the command's exit status, 128 + N after signal N."""
    process = subprocess.Popen(argv)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, _: process.send_signal(received))
    status = process.wait()
    # The kernel reports the maximum over all descendants that were waited for, in KiB on Linux; torchrun itself takes
    # less than a rank.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"peak resident memory (MB) | {peak / 1024:.2f}", flush=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: peak_memory.py COMMAND...")
    sys.exit(main(sys.argv[1:]))
