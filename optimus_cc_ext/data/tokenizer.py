"""Byte-level BPE in the folder format that Megatron's HuggingFaceTokenizer reads without a network."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["END_OF_DOCUMENT", "MIN_VOCAB_SIZE", "train_tokenizer"]

END_OF_DOCUMENT = "<|endoftext|>"
# One token for each byte, so that any text can be written, and the end of a document.
MIN_VOCAB_SIZE = 256 + 1


def train_tokenizer(texts: Iterator[str], vocab_size: int, folder: Path) -> Any:
    """Train a byte-level BPE (GPT-2's word boundaries) on `texts`; the same texts give the same tokenizer.

    Makes `folder` with tokenizer.json and tokenizer_config.json, and returns the tokenizers.Tokenizer. A short text
    may fill less than `vocab_size`: ask its get_vocab_size(). END_OF_DOCUMENT is token 0, the config's eos.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        # Otherwise decoding may join "a ," into "a,".
        "clean_up_tokenization_spaces": False,
        # No limit of its own: Megatron cuts documents into sequences. Larger numbers lose digits in JSON.
        "model_max_length": 2**53,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer
