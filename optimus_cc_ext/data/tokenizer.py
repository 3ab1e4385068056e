"""Byte-level BPE in the folder format that Megatron's HuggingFaceTokenizer reads without a network."""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from optimus_cc_ext.data.documents import DataError

__all__ = ["END_OF_DOCUMENT", "TOKENIZER_FILE", "check_vocab_size", "save_tokenizer", "train_tokenizer"]

END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
# One token for each byte, so that any text can be written, and the end of a document.
_MIN_VOCAB_SIZE = 256 + 1


def check_vocab_size(vocab_size: int) -> None:
    """Raise DataError if `vocab_size` has no room for the bytes."""
    if vocab_size < _MIN_VOCAB_SIZE:
        raise DataError(
            f"--vocab-size {vocab_size}: too small, a byte-level vocabulary has at least {_MIN_VOCAB_SIZE}"
            " tokens (256 bytes and the end of a document). Give a larger one"
        )


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's word boundaries) on `texts`; the same texts give the same tokenizer.

    A short text may fill less than `vocab_size` (see check_vocab_size): ask the result's get_vocab_size().
    END_OF_DOCUMENT is token 0.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Make `folder` with tokenizer.json and tokenizer_config.json, which names END_OF_DOCUMENT as eos."""
    folder.mkdir()
    tokenizer.save(str(folder / TOKENIZER_FILE))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        # Otherwise decoding may join "a ," into "a,".
        "clean_up_tokenization_spaces": False,
        # No limit of its own: Megatron cuts documents into sequences. Larger numbers lose digits in JSON.
        "model_max_length": 2**53,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
