"""A tokenizing process: batches of texts come in on stdin, their tokens go out on stdout, until stdin ends.

Run by path, not imported: `python -P worker.py TOKENIZER_JSON END_OF_DOCUMENT`. So it loads neither this
package nor torch, needs nothing of the caller's __main__, and ends by itself when its parent is gone. The
messages are pickles between two processes of one program.
"""

import itertools
import pickle
import signal
import sys
from typing import BinaryIO

import numpy as np
from tokenizers import Tokenizer


def main(tokenizer_file: str, end_of_document: str, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer each list of texts with (int32 tokens of all in a row, list of their lengths in tokens)."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    # A text that spells out the special token is text, not the end of a document.
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(end_of_document)
    while True:
        try:
            texts: list[str] = pickle.load(requests)
        except (EOFError, pickle.UnpicklingError):
            return  # nothing comes any more, or only half of it did: the parent is gone
        tokens = [[*encoding.ids, end] for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        flat = np.fromiter(itertools.chain.from_iterable(tokens), dtype=np.int32)
        pickle.dump((flat, [len(document) for document in tokens]), replies, protocol=pickle.HIGHEST_PROTOCOL)
        replies.flush()


if __name__ == "__main__":
    # Ctrl-C reaches every process of the terminal: the parent ends this one, quietly.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1], sys.argv[2], sys.stdin.buffer, sys.stdout.buffer)
