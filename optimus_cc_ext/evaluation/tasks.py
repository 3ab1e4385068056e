"""Zero-shot tasks by lm-evaluation-harness, which does all of the work; here is what it is called with."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.evaluation.convert import load_tokenizer

__all__ = ["PAPER_TASKS", "run_tasks"]

PAPER_TASKS = ("lambada_openai", "hellaswag", "piqa", "mathqa", "winogrande", "race")
"""The paper's table of zero-shot accuracies, by the harness's names. Their data come from the hub."""


def run_tasks(
    model: str | Path,
    tasks: Sequence[str] = PAPER_TASKS,
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    output: str | Path | None = None,
) -> tuple[dict[str, Any], str]:
    """Evaluate the converted model in the folder `model`, without examples in the prompt.

    `include_path` is a folder of task files of your own; `limit` takes that many questions of each task. Returns
    the harness's results (metrics by task) and its table; `output` is a file that gets the former as JSON.
    Raises FlagError: no harness, no such model or task, data that cannot be fetched.
    """
    folder = Path(model)
    _check(folder, include_path, output)
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    own = None if include_path is None else str(include_path)
    # Reading the harness's own thousands of task files takes longer than evaluating a small model.
    manager = TaskManager(include_path=own, include_defaults=False)
    if _unknown(tasks, manager):
        manager = TaskManager(include_path=own)
    _check_names(tasks, manager)
    try:
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "auto"},
            tasks=list(tasks),
            num_fewshot=0,
            batch_size=batch_size,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            limit=limit,
            log_samples=False,
            task_manager=manager,
        )
    except OSError as error:
        # Also what the hub's libraries raise without a network: ConnectionError, OfflineModeIsEnabled, LocalEntry...
        raise FlagError(
            "--tasks",
            f"the data of {', '.join(tasks)} cannot be had ({str(error).strip().splitlines()[0]})",
            "Run it once where the hub can be reached and copy its cache (HF_HOME), or give tasks whose data are"
            " files of yours: --include-path",
        ) from error
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        kept = {key: results[key] for key in ("results", "versions", "n-shot", "n-samples") if key in results}
        Path(output).write_text(json.dumps(kept, indent=2, default=str) + "\n", encoding="utf-8")
    return results["results"], make_table(results)


def _check(folder: Path, include_path: str | Path | None, output: str | Path | None) -> None:
    if find_spec("lm_eval") is None:
        raise FlagError(
            "tasks",
            "lm-evaluation-harness is not installed",
            "Run scripts/eval/tasks.sh, which fetches it, or install it: pip install 'lm_eval[hf]'",
        )
    if not (folder / "config.json").is_file():
        cure = "Give a folder that python -m optimus_cc_ext.evaluation convert made"
        raise FlagError("--model", f"{folder} holds no config.json", cure)
    load_tokenizer(folder, "--model")
    if include_path is not None and not any(Path(include_path).glob("**/*.yaml")):
        raise FlagError("--include-path", f"{include_path} holds no task file (*.yaml)", "Give a folder that does")
    if output is not None and Path(output).is_dir():
        raise FlagError("--output", f"{output} is a folder", "Give the name of a file, such as results.json")


def _check_names(tasks: Sequence[str], manager: Any) -> None:
    if unknown := _unknown(tasks, manager):
        raise FlagError(
            "--tasks",
            f"no task is called {', '.join(unknown)}",
            "Take names that 'lm-eval ls tasks' lists, or give the folder of your own task files: --include-path",
        )


def _unknown(tasks: Sequence[str], manager: Any) -> list[str]:
    return [task for task in tasks if not manager.match_tasks([task])]
