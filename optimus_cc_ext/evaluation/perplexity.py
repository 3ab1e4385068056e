"""Perplexity of a text, in the windows in which Megatron measures its validation loss.

Every token is predicted once, from at most `sequence_length` tokens before it: window i predicts the tokens from
i x sequence_length to (i + 1) x sequence_length, as GPTDataset cuts them. Only the last window is cut otherwise:
Megatron drops what does not fill one, and here it begins earlier instead, as in lm-evaluation-harness. Megatron's
softmax also spans the padding of the vocabulary, to which a trained model gives next to nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from optimus_cc_ext.data.documents import find_corpus
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.evaluation.convert import load_tokenizer

__all__ = ["Perplexity", "load_model", "perplexity", "windows"]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """`loss` is Megatron's validation loss: the mean negative log-likelihood of a token, in nats."""

    loss: float
    tokens: int
    text_bytes: int

    @property
    def perplexity(self) -> float:
        """exp(loss): per token, so comparable between models of one tokenizer only."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes


def perplexity(
    model: str | Path,
    text: str | Path,
    *,
    sequence_length: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    json_key: str = "text",
) -> Perplexity:
    """How well the converted model in the folder `model` predicts a text file, or the documents of a .jsonl file.

    The first token is predicted from the end-of-text token, and that stands between documents, as in training.
    `sequence_length` is by default the model's number of positions. Logits are compared in fp32.
    Raises FlagError for what cannot be used, DataError for a text that cannot be read.
    """
    folder = Path(model)
    words = load_tokenizer(folder, "--model")
    network = load_model(folder, device)
    length = _checked_length(sequence_length, network.config.n_positions)
    if batch_size < 1:
        raise FlagError("--batch-size", f"{batch_size} is not a number of windows", "Give 1 or more")
    stream, text_bytes = _token_stream(Path(text), words, json_key)
    total = 0.0
    with torch.inference_mode():
        for tokens, targets in _batches(stream, length, batch_size):
            logits = network(tokens.to(network.device)).logits.float()
            # 'ignore_index' by default: what targets are filled with where nothing is predicted.
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device), reduction="sum")
            total += loss.double().item()
    predicted = len(stream) - 1
    return Perplexity(total / predicted, predicted, text_bytes)


def load_model(folder: Path, device: str | None) -> Any:
    """The converted model, in evaluation mode, on `device` (by default the first GPU, if any). Raises FlagError."""
    from transformers import AutoModelForCausalLM

    cure = "Give a folder that python -m optimus_cc_ext.evaluation convert made"
    if not (folder / "config.json").is_file():
        raise FlagError("--model", f"{folder} holds no config.json", cure)
    try:
        network = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise FlagError("--model", f"{folder} cannot be loaded ({str(error).splitlines()[0]})", cure) from error
    return network.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def windows(tokens: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first, end) of each window over a stream of `tokens`: tokens begin..end-1 go in, of which those from
    `first` on predict the token that follows them; `end - begin` is at most `length`."""
    for first in range(0, tokens - 1, length):
        end = min(first + length, tokens - 1)
        yield max(0, end - length), first, end


def _batches(stream: torch.Tensor, length: int, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets, int64 [up to batch_size, up to length]; a target of -100 is not counted."""
    rows = []
    for begin, first, end in windows(len(stream), length):
        targets = stream[begin + 1 : end + 1].clone()
        targets[: first - begin] = -100
        rows.append((stream[begin:end], targets))
    # All are of one length: a stream shorter than that has one window only.
    for at in range(0, len(rows), batch_size):
        batch = rows[at : at + batch_size]
        yield torch.stack([tokens for tokens, _ in batch]), torch.stack([targets for _, targets in batch])


def _checked_length(asked: int | None, positions: int) -> int:
    if asked is None:
        return positions
    if not 1 <= asked <= positions:
        reason = f"{asked} is not between 1 and the model's {positions} positions"
        raise FlagError("--sequence-length", reason, "Give one of these, or leave the flag out")
    return asked


def _token_stream(path: Path, words: Any, json_key: str) -> tuple[torch.Tensor, int]:
    documents = _documents(path, json_key)
    size = sum(len(text.encode()) for text in documents)
    if not any(text.strip() for text in documents):
        raise FlagError("--text", f"{path} holds no text", "Give a file that has some")
    if words.eos_token_id is None:
        raise FlagError(
            "--model", "its tokenizer has no end-of-text token", "Convert with the tokenizer of the training"
        )
    ids: list[int] = []
    for text in documents:
        ids += [words.eos_token_id, *words(text, add_special_tokens=False, verbose=False)["input_ids"]]
    return torch.tensor(ids), size


def _documents(path: Path, json_key: str) -> list[str]:
    if path.suffix == ".jsonl":
        corpus = find_corpus(path, pattern="*", json_key=json_key, max_bytes=None, exclude=path)
        return [document.text for document in corpus.documents()]
    try:
        # Whole: the documents that training cuts a text file into have no meaning of their own.
        return [path.read_bytes().decode("utf-8")]
    except UnicodeDecodeError as error:
        raise FlagError("--text", f"{path} is not UTF-8 ({error.reason})", "Convert it to UTF-8") from error
    except OSError as error:
        raise FlagError(
            "--text", f"{path} cannot be read ({error.strerror})", "Give a text file or a .jsonl"
        ) from error
