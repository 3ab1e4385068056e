"""Installation of one handle for all models of the process: every new DistributedDataParallel joins the handle.

`Installation.start` wraps the argument parser (or, with a given configuration, activates at once);
`Installation.activate` wraps the training loop, once the configuration is known.
"""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from optimus_cc_ext.announce import on_standard_output, say
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.presets import Layout, Resolution, describe
from optimus_cc_ext.errors import ends_the_run, is_first_rank
from optimus_cc_ext.hooks import arguments, checkpointing, distributed_data_parallel, training
from optimus_cc_ext.hooks.handle import Handle, Off, shared_wraps
from optimus_cc_ext.hooks.registry import AppliedWraps, Seam, check_version, megatron_version
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.techniques.session import Session

__all__ = ["Installation", "all_seams"]

_Wraps = list[tuple[Seam, Callable[[Any], Any]]]


class Installation:
    """Installation on one process; `session` and `handle` are None until the configuration is known."""

    def __init__(self) -> None:
        self._applied = AppliedWraps()
        self.handle: Handle | None = None
        self.session: Session | None = None

    def start(self, config: OptimusConfig | None, train_iters: int | None = None) -> None:
        """Check Megatron's version, and apply the wraps that are needed before the configuration is known.

        Args:
            config: the configuration; None: read it from Megatron's command line.
            train_iters: iterations of the run, if there is no command line.

        Raises:
            UnsupportedMegatron: the version is not supported, or a seam does not hold.
        """
        check_version()
        on_standard_output()
        if config is None:
            self._applied.apply(arguments.wraps(self._resolved))
        else:
            self.activate(config, None, train_iters)

    def activate(self, config: OptimusConfig, layout: Layout | None, train_iters: int | None = None) -> None:
        """Wrap the functions that `config` needs; none if it switches nothing on."""
        if self.session is not None:
            return
        self.session = Session(config, layout, train_iters)
        if not (config.any_technique or config.compression_metrics):
            self.handle = Off()
            return
        self.handle = Handle(self.session)
        self.handle._sessions.of_every_model = self.session
        self._applied.apply(_loop_wraps(self._attach, self.session))

    def remove(self) -> None:
        """Remove every wrap. Models that were built in the meantime train on as vanilla (`Handle.remove`)."""
        if self.handle is not None:
            self.handle.remove()
        self._applied.close()
        self.session = self.handle = None

    def _attach(self, model: Any) -> None:
        assert self.handle is not None and self.session is not None, "the wrap is removed before the handle"
        with nullcontext() if self.session.resolve is None else ends_the_run():
            self.handle._attach(model)

    def _resolved(self, resolve: Callable[[Layout], Resolution], layout: Layout) -> None:
        known: list[str] = []

        def resolved(layout: Layout) -> OptimusConfig:
            resolution = resolve(layout)
            on = f"{describe(resolution.config)} on megatron-core {megatron_version()}"
            for line in (*resolution.notes, on):
                if line not in known and is_first_rank():
                    say(f"optimus-cc: {line}")
                known.append(line)
            return resolution.config

        self.activate(resolved(layout), layout)
        if self.session is not None:
            self.session.resolve = resolved


def all_seams() -> list[Seam]:
    """Return every seam that some configuration wraps, for `optimus-cc doctor`."""
    everything = Session(OptimusConfig())
    wraps = [*arguments.wraps(lambda *_: None), *shared_wraps(Sessions()), *_loop_wraps(print, everything)]
    return [seam for seam, _ in wraps if _importable(seam)]


def _loop_wraps(attach: Callable[[Any], None], session: Session) -> _Wraps:
    loop = [*training.wraps(session), *checkpointing.wraps(session)]
    return [*distributed_data_parallel.wraps(attach), *(wrap for wrap in loop if _importable(wrap[0]))]


def _importable(seam: Seam) -> bool:
    """Return whether the seam's package is installed: custom training loops work without megatron.training."""
    package = ".".join(seam.target.split(":")[0].split(".")[:2])
    return importlib.util.find_spec(package) is not None
