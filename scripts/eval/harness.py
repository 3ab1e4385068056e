"""Launcher of lm-evaluation-harness's own command for a model that scripts.eval.convert has written.

    python -m scripts.eval.harness --model DIR [--text FILE [--sequence-length N] | --local] [flags of `lm_eval run`]

Without --text and --local it runs the paper's zero-shot tasks, whose data come from Hugging Face's hub.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from optimus_cc_ext.errors import FlagError, require_extra, run_command
from optimus_cc_ext.tools.data.documents import find_corpus, json_lines
from scripts.eval.convert import load_tokenizer

_TASKS = Path(__file__).resolve().parent / "tasks"
_PAPER = "lambada_openai,hellaswag,piqa,mathqa,winogrande,race"
"""Tasks of the paper's table of zero-shot accuracies, by the harness's names."""


def harness_command(arguments: list[str] | None = None) -> list[str]:
    """Translate `arguments` to the harness's command line.

    Raises FlagError or DataError for input that would make the harness fail.
    """
    parser = argparse.ArgumentParser(
        prog="harness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="folder that scripts.eval.convert has written"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="measure the perplexity of a text file or a .jsonl file"
    )
    parser.add_argument(
        "--json-key", default="text", help="key of the text in each line of a .jsonl file (default: %(default)s)"
    )
    parser.add_argument(
        "--sequence-length", type=int, metavar="N", help="tokens in a sequence (default: the model's positions)"
    )
    parser.add_argument(
        "--local", action="store_true", help="run the questions in scripts/eval/tasks, without a network"
    )
    options, passed_on = parser.parse_known_args(arguments)
    require_extra("eval", "lm_eval", "transformers")
    positions = _positions(options.model)
    load_tokenizer(options.model, "--model")
    length = positions if options.sequence_length is None else options.sequence_length
    if not 1 <= length <= positions:
        reason = f"{length} is not between 1 and the model's {positions} positions"
        raise FlagError("--sequence-length", reason, "Give a length in this range, or leave the flag out")
    model = {"pretrained": str(options.model), "dtype": "auto", "max_length": length}
    defaults = ["--num_fewshot", "0", "--batch_size", "8", "--tasks", _PAPER]
    if options.text is not None:
        _check_text(options.text, options.json_key)
        settings = {"text_file": str(options.text.resolve()), "json_key": options.json_key}
        defaults[-1:] = [str(_TASKS / "local_text.yaml"), "--metadata", json.dumps(settings)]
    elif options.local:
        defaults[-1:] = ["local_last_word,local_choice,local_text", "--include_path", str(_TASKS)]
    # The harness takes the later of two equal flags, so a flag of the user's overrides a default.
    passed_on = [_in_their_spelling(flag) if flag[:2] == "--" else flag for flag in passed_on]
    return ["-m", "lm_eval", "run", "--model", "hf", "--model_args", json.dumps(model), *defaults, *passed_on]


def _in_their_spelling(flag: str) -> str:
    """Write a flag as the harness does, without dashes inside: --batch-size is --batch_size."""
    name, equals, value = flag[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _positions(folder: Path) -> int:
    try:
        return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["n_positions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{folder} holds no config.json of a GPT-2 ({error})"
        raise FlagError("--model", reason, "Give a folder that scripts/eval/convert.sh made") from error


def _check_text(path: Path, json_key: str) -> None:
    if not path.is_file():
        raise FlagError("--text", f"{path} is no file", "Give a text file or a .jsonl")
    if (json_lines(path) and path.suffix != ".jsonl") or path.suffix in (".gz", ".bz2", ".xz"):
        raise FlagError("--text", f"{path} is not named .jsonl", "Decompress it, and name JSON lines .jsonl")
    # Reading the text once raises DataError for anything that is wrong with it.
    corpus = find_corpus(path, pattern="*", json_key=json_key, max_bytes=None, exclude=path)
    if sum(1 for _ in corpus.documents()) == 0:
        raise FlagError("--text", f"{path} holds no text", "Give a file with text")


def main(arguments: list[str] | None = None) -> int:
    """Replace this process by the harness, or return the exit status of `run_command`."""
    # With -P, Python does not import from the current folder, which is the caller's.
    return run_command(lambda: os.execv(sys.executable, [sys.executable, "-P", *harness_command(arguments)]))


if __name__ == "__main__":
    sys.exit(main())
