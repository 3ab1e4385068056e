"""`python -m optimus_cc_ext.data`: the command line of prepare()."""

import argparse
import sys
from pathlib import Path

from optimus_cc_ext.data.prepare import PreparedData, default_workers, prepare
from optimus_cc_ext.errors import run_command

__all__ = ["main"]

# Megatron's --split cuts between documents: with a few of them the validation part is empty.
_FEW_DOCUMENTS = 100


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optimus_cc_ext.data",
        description="Text -> byte-level BPE tokenizer and Megatron's indexed dataset.",
    )
    parser.add_argument(
        "--input", type=Path, required=True, help="a directory of text files, a .jsonl file, or a text file"
    )
    parser.add_argument("--output", type=Path, help="folder to make (default: optimus-cc-data/<name of the input>)")
    parser.add_argument("--vocab-size", type=int, default=8192, help="tokens at most (default: %(default)s)")
    parser.add_argument("--workers", type=int, help=f"tokenizing processes (default here: {default_workers()})")
    parser.add_argument(
        "--pattern", default="*.txt", help="names of the files to read in a directory (default: %(default)s)"
    )
    parser.add_argument("--max-mb", type=float, help="take this much of the text, whole documents only")
    parser.add_argument("--json-key", default="text", help="where a .jsonl line has its text (%(default)s)")
    return parser


def _report(prepared: PreparedData) -> None:
    state = "up to date" if prepared.up_to_date else "done"
    print(
        f"{state}: {prepared.documents:,} documents, {prepared.text_bytes / 1e6:.1f} MB,"
        f" {prepared.tokens:,} tokens, vocabulary {prepared.vocab_size:,}"
    )
    print(f"  --data-path {prepared.data_prefix}")
    print(f"  --tokenizer-type HuggingFaceTokenizer --tokenizer-model {prepared.tokenizer_dir}")
    if prepared.documents < _FEW_DOCUMENTS:
        print(
            f"warning: only {prepared.documents} documents. Megatron's --split cuts between documents, so its"
            " validation part may be empty",
            file=sys.stderr,
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code that `run_command` gives."""
    options = _build_parser().parse_args(arguments)
    return run_command(lambda: _report(_prepare(options)))


def _prepare(options: argparse.Namespace) -> PreparedData:
    return prepare(
        options.input,
        options.output or Path("optimus-cc-data") / options.input.resolve().name,
        vocab_size=options.vocab_size,
        workers=options.workers,
        pattern=options.pattern,
        max_mb=options.max_mb,
        json_key=options.json_key,
    )


if __name__ == "__main__":
    sys.exit(main())
