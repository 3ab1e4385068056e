"""A tokenizer and a text of random sentences for BERT and T5, which have no mock data."""

import random
from pathlib import Path

__all__ = ["flags"]

_WORDS, _DOCUMENTS = 400, 200


def flags(folder: Path) -> list[str]:
    """Write the tokenizer and the text to a folder; return Megatron's flags for both."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_idx_path
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    extra = [f"<extra_id_{number}>" for number in range(50)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *extra]
    vocabulary = {word: number for number, word in enumerate([*special, *(f"w{n}" for n in range(_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", bos_token="[CLS]", eos_token="[SEP]", additional_special_tokens=extra,
    ).save_pretrained(folder / "tokenizer")  # fmt: skip
    numbers, prefix = random.Random(1), folder / "text_sentence"
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for _ in range(_DOCUMENTS):
        for _ in range(4):
            builder.add_item(torch.tensor([numbers.randrange(len(special), len(vocabulary)) for _ in range(12)]))
        builder.end_document()
    builder.finalize(get_idx_path(str(prefix)))
    return [
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer"), "--data-path",
        str(prefix), "--split", "100,0,0", "--data-cache-path", str(folder / "cache"),
        "--tokenizer-special-tokens", *extra,
    ]  # fmt: skip
