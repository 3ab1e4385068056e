"""A Megatron checkpoint -> a folder that transformers' AutoModelForCausalLM and AutoTokenizer read, or nothing.

OUTPUT/config.json, model*.safetensors   Hugging Face's GPT-2, in the checkpoint's dtype
OUTPUT/tokenizer.json, ...               the tokenizer's files, as they are
OUTPUT/conversion.json                   what it was made from
"""

import argparse
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optimus_cc_ext.data.output import check_replaceable, locked, replace
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.evaluation.architecture import Architecture, architecture_of, padded_to
from optimus_cc_ext.evaluation.checkpoint import find_checkpoint, read_weights
from optimus_cc_ext.evaluation.gpt2 import gpt2_config, gpt2_weights
from optimus_cc_ext.evaluation.merge import Weights

__all__ = ["Converted", "convert", "load_tokenizer"]

_MADE_FROM = "conversion.json"
# By name: beside them may lie another model's config.json.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True, slots=True)
class Converted:
    """What was made: `folder`, from a checkpoint of `iteration_folder`; parameters count a tied embedding once."""

    folder: Path
    iteration_folder: Path
    parameters: int
    vocab_size: int
    dtype: torch.dtype


def convert(
    checkpoint: str | Path,
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    iteration: int | None = None,
) -> Converted:
    """Convert the latest checkpoint in a run's --save folder (or that of `iteration`) to Hugging Face's GPT-2.

    `tokenizer` is a folder that AutoTokenizer reads; by default the one that the checkpoint was trained with. The
    tensors are the checkpoint's own, merged over ranks, cut to the tokenizer's size, never rounded. `output` appears
    when it is complete; one that was made here before is replaced.
    Raises FlagError (bad input, another architecture), DataError (`output` holds something else) or OSError.
    """
    source, target = Path(checkpoint).resolve(), Path(output).absolute()
    found = find_checkpoint(source, iteration)
    model = architecture_of(found.args)
    words_folder = _tokenizer_folder(tokenizer, found.args)
    words = load_tokenizer(words_folder, "--tokenizer")
    _check_vocab_size(len(words), model, words_folder)
    check_replaceable(target, source, _made_here(target))
    check_replaceable(target, words_folder.resolve(), _made_here(target))
    weights = gpt2_weights(read_weights(found), model, vocab_size=len(words))
    config = gpt2_config(model, vocab_size=len(words), end_of_text=words.eos_token_id)
    with locked(target) as partial:
        partial.mkdir()
        converted = _save_model(weights, config, partial)
        for name in _TOKENIZER_FILES:
            if (words_folder / name).is_file():
                shutil.copy(words_folder / name, partial / name)
        made_from = {"checkpoint": str(found.folder), "tokenizer": str(words_folder)}
        files = sorted(path.name for path in partial.iterdir())
        text = json.dumps({"made_from": made_from, "files": files}, indent=2)
        (partial / _MADE_FROM).write_text(text + "\n", encoding="utf-8")
        replace(partial, target)
    return Converted(target, found.folder, converted.num_parameters(), len(words), converted.dtype)


def load_tokenizer(folder: Path, flag: str) -> Any:
    """The tokenizer that AutoTokenizer reads from `folder`, without a network. Raises FlagError naming `flag`."""
    from transformers import AutoTokenizer

    cure = "Give the folder of tokenizer.json, such as the tokenizer/ that python -m optimus_cc_ext.data made"
    if not folder.is_dir():
        raise FlagError(flag, f"{folder} is not a folder", cure)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # transformers' loaders raise whatever the file's contents provoke.
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise FlagError(flag, f"transformers finds no tokenizer in {folder} ({reason})", cure) from error


def _tokenizer_folder(given: str | Path | None, args: argparse.Namespace) -> Path:
    if given is not None:
        return Path(given)
    trained_with = getattr(args, "tokenizer_model", None)
    if getattr(args, "tokenizer_type", None) == "HuggingFaceTokenizer" and trained_with and os.path.isdir(trained_with):
        return Path(trained_with)
    raise FlagError(
        "--tokenizer",
        "needed: the checkpoint's own is "
        + (f"{trained_with}, which is not a folder here" if trained_with else f"a {args.tokenizer_type}"),
        "Give the folder of the tokenizer that made the training data",
    )


def _check_vocab_size(size: int, model: Architecture, folder: Path) -> None:
    if padded_to(size, model.vocab_multiple) != model.padded_vocab_size:
        raise FlagError(
            "--tokenizer",
            f"{folder} has {size} tokens, which Megatron would have padded to {padded_to(size, model.vocab_multiple)};"
            f" the checkpoint's embedding has {model.padded_vocab_size} rows",
            "Give the tokenizer that made the training data",
        )


def _made_here(target: Path) -> set[str]:
    try:
        files = json.loads((target / _MADE_FROM).read_text(encoding="utf-8"))["files"]
        return {_MADE_FROM, *map(str, files)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _save_model(weights: Weights, config: dict[str, Any], folder: Path) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        # Without memory of its own: the parameters become the tensors that were read.
        model = GPT2LMHeadModel(GPT2Config(**config))
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.config.dtype = model.dtype
    model.save_pretrained(folder)
    return model
