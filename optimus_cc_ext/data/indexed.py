"""Tokens -> Megatron's indexed dataset: the only module of this folder that imports Megatron."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

from optimus_cc_ext.data.encode import EncodedBatch

__all__ = ["Counts", "write_indexed"]


@dataclass(frozen=True, slots=True)
class Counts:
    """How much was written."""

    documents: int
    tokens: int


def write_indexed(prefix: Path, batches: Iterable[EncodedBatch], vocab_size: int) -> Counts:
    """Write `prefix`.bin and `prefix`.idx: one sequence per document, of uint16 where it fits, else int32.

    Format: megatron/core/datasets/indexed_dataset.py.
    """
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=DType.optimal_dtype(vocab_size))
    documents = tokens = 0
    for batch in batches:
        for document in torch.from_numpy(batch.tokens).split(batch.lengths):
            builder.add_item(document)
            builder.end_document()
        documents += len(batch.lengths)
        tokens += len(batch.tokens)
    builder.finalize(get_idx_path(str(prefix)))
    return Counts(documents, tokens)
