"""`python -m optimus_cc_ext.evaluation`: the command line of convert(), perplexity() and run_tasks()."""

import argparse
import sys
from pathlib import Path

from optimus_cc_ext.errors import run_command
from optimus_cc_ext.evaluation.convert import convert
from optimus_cc_ext.evaluation.perplexity import perplexity
from optimus_cc_ext.evaluation.tasks import PAPER_TASKS, run_tasks

__all__ = ["main"]


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optimus_cc_ext.evaluation",
        description="A Megatron checkpoint -> Hugging Face's GPT-2, its perplexity, zero-shot tasks.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("convert", help="a Megatron checkpoint -> a folder for transformers")
    command.set_defaults(run=_convert)
    command.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR",
        help="the --save folder of the training (its latest checkpoint), or one of its iter_*",
    )  # fmt: skip
    command.add_argument("--iteration", type=int, metavar="N", help="that one instead of the latest")
    command.add_argument(
        "--tokenizer", type=Path, metavar="DIR",
        help="a folder that AutoTokenizer reads (default: the one it was trained with, if it is on this machine)",
    )  # fmt: skip
    command.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to make")

    command = commands.add_parser("perplexity", help="of a text, by a converted model")
    command.set_defaults(run=_perplexity)
    _add_model(command)
    command.add_argument("--text", type=Path, required=True, metavar="FILE", help="a text file, or a .jsonl file")
    command.add_argument("--json-key", default="text", help="where a .jsonl line has its text (%(default)s)")
    command.add_argument("--sequence-length", type=int, metavar="N", help="(default: the model's positions)")

    command = commands.add_parser("tasks", help="zero-shot tasks by lm-evaluation-harness")
    command.set_defaults(run=_tasks)
    _add_model(command)
    command.add_argument(
        "--tasks", default=",".join(PAPER_TASKS), metavar="A,B",
        help="names, separated by commas (default: the paper's, whose data come from the hub: %(default)s)",
    )  # fmt: skip
    command.add_argument("--include-path", type=Path, metavar="DIR", help="a folder of task files of your own")
    command.add_argument("--limit", type=int, metavar="N", help="only so many questions of each task")
    command.add_argument("--output", type=Path, metavar="FILE", help="write the results there as JSON")
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", type=Path, required=True, metavar="DIR", help="what convert made")
    command.add_argument("--batch-size", type=int, default=8, metavar="N", help="(default: %(default)s)")
    command.add_argument("--device", help="such as cuda:1 (default: the first GPU, else the CPU)")


def _convert(options: argparse.Namespace) -> None:
    made = convert(options.checkpoint, options.output, tokenizer=options.tokenizer, iteration=options.iteration)
    print(
        f"done: {made.iteration_folder} -> {made.folder}\n"
        f"  {made.parameters:,} parameters, {made.dtype}, vocabulary {made.vocab_size:,}"
    )


def _perplexity(options: argparse.Namespace) -> None:
    measured = perplexity(
        options.model,
        options.text,
        sequence_length=options.sequence_length,
        batch_size=options.batch_size,
        device=options.device,
        json_key=options.json_key,
    )
    print(
        f"loss {measured.loss:.6f} | perplexity {measured.perplexity:.4f} | bits per byte"
        f" {measured.bits_per_byte:.4f} | {measured.tokens:,} tokens, {measured.text_bytes:,} bytes"
    )


def _tasks(options: argparse.Namespace) -> None:
    _, table = run_tasks(
        options.model,
        [name for name in options.tasks.split(",") if name],
        include_path=options.include_path,
        limit=options.limit,
        batch_size=options.batch_size,
        device=options.device,
        output=options.output,
    )
    print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code that `run_command` gives."""
    options = _build_parser().parse_args(arguments)
    return run_command(lambda: options.run(options))


if __name__ == "__main__":
    sys.exit(main())
