"""Command line of `prepare()`: `python -m optimus_cc_ext.tools.data`."""

import argparse
import sys
from pathlib import Path

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.data.prepare import SKIPPED, prepare

# Megatron's --split cuts between documents, so that with fewer documents the validation part can be empty.
_FEW_DOCUMENTS = 100


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status of `run_command`."""
    parser = argparse.ArgumentParser(
        prog="python -m optimus_cc_ext.tools.data",
        description="Make a byte-level BPE tokenizer and Megatron's indexed dataset from text.",
    )
    add = parser.add_argument
    add("--input", type=Path, required=True, help="a directory, a .jsonl file, or a text file; also .gz")
    add("--output", type=Path, help="folder to write (default: optimus-cc-data/<name of the input>)")
    add("--vocab-size", type=int, default=8192, help="largest size of the vocabulary (default: %(default)s)")
    add("--workers", type=int, help="number of tokenizing threads (default: one per core)")
    add("--pattern", default="*.txt", help="pattern of the file names to read in a directory (default: %(default)s)")
    add("--max-mb", type=float, help="read whole documents up to this size in MB (default: all)")
    add("--json-key", default="text", help="key of the text in each line of a .jsonl file (default: %(default)s)")
    add("--skip-bad", action="store_true", help="leave out records that are cut, null or without text, and name them")
    settings = vars(parser.parse_args(arguments))
    return run_command(lambda: _prepare(settings))


def _prepare(settings: dict[str, object]) -> None:
    source = settings["input"]
    assert isinstance(source, Path)
    settings["output"] = settings["output"] or Path("optimus-cc-data") / source.resolve().name
    prepared = prepare(**settings)  # type: ignore[arg-type]
    print(
        f"{'up to date' if prepared.up_to_date else 'done'}: {prepared.documents:,} documents,"
        f" {prepared.text_bytes / 1e6:.1f} MB, {prepared.tokens:,} tokens, vocabulary {prepared.vocab_size:,}\n"
        f"  --data-path {prepared.data_prefix}\n"
        f"  --tokenizer-type HuggingFaceTokenizer --tokenizer-model {prepared.tokenizer_dir}"
    )
    if prepared.left_out:
        print(f"  left out: {prepared.left_out}")
    if prepared.skipped:
        names = prepared.tokenizer_dir.with_name(SKIPPED)
        with names.open(encoding="utf-8") as lines:
            print(
                f"warning: {prepared.skipped:,} bad records skipped ({names}); first: {next(lines)}",
                end="",
                file=sys.stderr,
            )
    if prepared.documents < _FEW_DOCUMENTS:
        print(
            f"warning: only {prepared.documents} documents. Megatron's --split cuts between documents, so its"
            " validation part may be empty",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
