"""Texts as files, and the documents of an indexed dataset."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from optimus_cc_ext.tools.data import PreparedData

__all__ = ["load_documents", "read_back", "write_jsonl"]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def load_documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    # Megatron shuffles and splits documents, so there must be one document per text, with one sequence.
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [dataset[index].tolist() for index in range(len(dataset))]


def read_back(prepared: PreparedData) -> list[str]:
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_dir / "tokenizer.json"))
    documents = load_documents(prepared.data_prefix)
    return [tokenizer.decode(document[:-1], skip_special_tokens=False) for document in documents]
