"""Documents -> tokens, by several processes, in the documents' order."""

import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from optimus_cc_ext.data.documents import Document
from optimus_cc_ext.data.tokenizer import END_OF_DOCUMENT

__all__ = ["EncodedBatch", "encode_documents"]

# Large enough to hide the pipes, small enough for the bar to move and for every worker to have work.
_BATCH_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Consecutive documents: int32 `tokens` in a row, `lengths` in tokens, `size` of the text in bytes."""

    tokens: npt.NDArray[np.int32]
    lengths: list[int]
    size: int


def encode_documents(
    documents: Iterator[Document], tokenizer_file: Path, workers: int
) -> Generator[EncodedBatch, None, None]:
    """Encode each document and put the token of END_OF_DOCUMENT behind it.

    The result does not depend on `workers`. At most a few batches per worker are in memory.
    Raises RuntimeError if a worker process dies.
    """
    # Left in reverse: the processes end first, which frees the threads that wait for them.
    with ThreadPoolExecutor(workers) as threads, _start_workers(tokenizer_file, workers) as idle:
        pending: deque[Future[EncodedBatch]] = deque()
        for batch in _group(documents):
            pending.append(threads.submit(_encode, batch, idle))
            if len(pending) >= 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _group(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _start_workers(tokenizer_file: Path, workers: int) -> Iterator["queue.SimpleQueue[subprocess.Popen[bytes]]"]:
    script = Path(__file__).with_name("worker.py")
    # -P: beside the script are modules that would hide others of the same name.
    command = [sys.executable, "-P", str(script), str(tokenizer_file), END_OF_DOCUMENT]
    # One thread per process: the processes are the parallelism that --workers asked for.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    processes: list[subprocess.Popen[bytes]] = []
    idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    try:
        for _ in range(workers):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            processes.append(process)
            idle.put(process)
        yield idle
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # closing flushes, into a pipe that nobody reads any more
                        pipe.close()


def _encode(batch: list[Document], idle: "queue.SimpleQueue[subprocess.Popen[bytes]]") -> EncodedBatch:
    process = idle.get()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump([document.text for document in batch], process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        tokens, lengths = pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        raise RuntimeError(f"a tokenizing process ended early (exit code {process.wait()})") from error
    finally:
        # A dead one goes back too: whoever waits for it must get the same error, not wait for ever.
        idle.put(process)
    return EncodedBatch(tokens, lengths, sum(document.size for document in batch))
