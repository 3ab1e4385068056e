"""Converter of a Megatron checkpoint to a folder that transformers' AutoModelForCausalLM and AutoTokenizer read.

    python -m scripts.eval.convert --checkpoint DIR --output DIR [--tokenizer DIR] [--iteration N]

OUTPUT/config.json, model*.safetensors   Hugging Face's GPT-2, in the checkpoint's dtype OUTPUT/tokenizer.json, ...
the tokenizer's files, unchanged OUTPUT/conversion.json                   the checkpoint and the tokenizer that it was
made from
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from optimus_cc_ext.errors import FlagError, require_extra, run_command
from optimus_cc_ext.tools.data.output import check_replaceable, locked, replace
from scripts.eval.checkpoint import find_checkpoint, read_weights
from scripts.eval.gpt2 import gpt2_config, gpt2_weights, padded_vocab_size

_MADE_FROM = "conversion.json"
# The files of the tokenizer are copied by name, because another model's config.json may lie beside them.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt"),
)


def convert(checkpoint: Path, output: Path, *, tokenizer: Path | None = None, iteration: int | None = None) -> str:
    """Convert the latest checkpoint in a run's --save folder (or that of `iteration`) to Hugging Face's GPT-2.

    `tokenizer` is a folder that AutoTokenizer reads; by default the one that the checkpoint was trained with. The
    tensors are the checkpoint's own, merged over ranks, cut to the tokenizer's size, never rounded. `output` appears
    when it is complete, and replaces an earlier conversion. Returns a description of the conversion. Raises FlagError
    (bad input, another architecture), DataError (`output` holds other files) or OSError.
    """
    require_extra("eval", "transformers")
    source, target = checkpoint.resolve(), output.absolute()
    found = find_checkpoint(source, iteration)
    words_folder = tokenizer or _tokenizer_of(found.args)
    words = load_tokenizer(words_folder, "--tokenizer")
    config = gpt2_config(found.args, vocab_size=len(words), end_of_text=words.eos_token_id)
    padded = padded_vocab_size(found.args, len(words))
    if padded != found.args.padded_vocab_size:
        raise FlagError(
            "--tokenizer",
            f"{words_folder} has {len(words)} tokens, which Megatron would have padded to {padded};"
            f" the checkpoint's embedding has {found.args.padded_vocab_size} rows",
            "Give the tokenizer that made the training data",
        )
    for kept in (source, words_folder.resolve()):
        check_replaceable(target, kept, _made_here(target))
    model = _model(read_weights(found), config)
    with locked(target) as partial:
        partial.mkdir()
        model.save_pretrained(partial)
        for name in _TOKENIZER_FILES:
            if (words_folder / name).is_file():
                shutil.copy(words_folder / name, partial / name)
        made_from = {"checkpoint": str(found.folder), "tokenizer": str(words_folder)}
        files = sorted(path.name for path in partial.iterdir())
        text = json.dumps({"made_from": made_from, "files": files}, indent=2)
        (partial / _MADE_FROM).write_text(text + "\n", encoding="utf-8")
        replace(partial, target)
    return (
        f"{found.folder} -> {target}\n  {model.num_parameters():,} parameters, {model.dtype}, vocabulary {len(words):,}"
    )


def load_tokenizer(folder: Path, flag: str) -> Any:
    """Load the tokenizer that AutoTokenizer reads from `folder`, without a network. Raises FlagError naming `flag`."""
    from transformers import AutoTokenizer

    cure = "Give the folder of tokenizer.json, such as the tokenizer/ that python -m optimus_cc_ext.tools.data made"
    if not folder.is_dir():
        raise FlagError(flag, f"{folder} is not a folder", cure)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # transformers' loaders raise any exception that the file's contents provoke.
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise FlagError(flag, f"transformers finds no tokenizer in {folder} ({reason})", cure) from error


def _tokenizer_of(args: argparse.Namespace) -> Path:
    trained_with = getattr(args, "tokenizer_model", None)
    if getattr(args, "tokenizer_type", None) == "HuggingFaceTokenizer" and trained_with and os.path.isdir(trained_with):
        return Path(trained_with)
    raise FlagError(
        "--tokenizer",
        "needed: the checkpoint's own is "
        + (f"{trained_with}, which is not a folder here" if trained_with else f"a {args.tokenizer_type}"),
        "Give the folder of the tokenizer that made the training data",
    )


def _made_here(target: Path) -> set[str]:
    try:
        files = json.loads((target / _MADE_FROM).read_text(encoding="utf-8"))["files"]
        return {_MADE_FROM, *map(str, files)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _model(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        # The model is built without memory of its own: its parameters become the tensors that were read.
        model = GPT2LMHeadModel(GPT2Config(**config))
    try:
        model.load_state_dict(gpt2_weights(weights, config), strict=True, assign=True)
    except FlagError:
        raise
    except RuntimeError as error:
        reason = (
            f"holds parameters of other shapes than its saved arguments say ({str(error).splitlines()[-1].strip()})"
        )
        raise FlagError("--checkpoint", reason, "Give a checkpoint as Megatron's pretrain_gpt.py saves it") from error
    model.tie_weights()
    model.config.dtype = model.dtype
    return model


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status of `run_command`."""
    parser = argparse.ArgumentParser(
        prog="convert", description="Convert a Megatron checkpoint to Hugging Face's GPT-2."
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR",
        help="the --save folder of the training (its latest checkpoint), or one of its iter_*",
    )  # fmt: skip
    parser.add_argument("--iteration", type=int, metavar="N", help="convert this iteration instead of the latest")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR",
        help="a folder that AutoTokenizer reads (default: that of the training, if it is on this machine)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    options = parser.parse_args(arguments)
    return run_command(lambda: print(f"done: {convert(**vars(options))}"))


if __name__ == "__main__":
    sys.exit(main())
