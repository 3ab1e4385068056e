"""Installation of one handle for all models of the process: every new DistributedDataParallel joins the handle.

`Installation.start` wraps the argument parser (or, with a given configuration, activates at once);
`Installation.activate` wraps the training loop, once the configuration is known.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from optimus_cc_ext.announce import on_standard_output, say
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.presets import Layout, Resolution, describe
from optimus_cc_ext.errors import ends_the_run, exit_with, is_first_rank
from optimus_cc_ext.hooks import arguments, checkpointing, distributed_data_parallel, training
from optimus_cc_ext.hooks.handle import Handle, Off, shared_wraps
from optimus_cc_ext.hooks.parts import check_megatron, importable, parts_of
from optimus_cc_ext.hooks.registry import AppliedWraps, Seam, megatron_version
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.techniques.session import Session

__all__ = ["Installation", "all_seams", "parts_of_megatron"]


class Installation:
    """Installation on one process; `session` and `handle` are None until the configuration is known."""

    def __init__(self) -> None:
        self._applied, self._attaching = AppliedWraps(), AppliedWraps()
        self.handle: Handle | None = None
        self.session: Session | None = None

    def start(self, config: OptimusConfig | None, train_iters: int | None = None) -> None:
        """Check Megatron, and apply the wraps that are needed before the configuration is known.

        Args:
            config: the configuration; None: read it from Megatron's command line.
            train_iters: iterations of the run, if there is no command line.

        Raises:
            UnsupportedMegatron: the version is not supported, or a part of it that we need does not hold.
        """
        on_standard_output()
        line = check_megatron(all_seams())
        if line is not None and is_first_rank():
            say(f"optimus-cc: {line}")
        if config is None:
            self._applied.apply(arguments.wraps(self._resolved))
        self._attaching.apply(distributed_data_parallel.wraps(self._attach))
        if config is not None:
            self.activate(config, None, train_iters)

    def activate(self, config: OptimusConfig, layout: Layout | None, train_iters: int | None = None) -> None:
        """Wrap the functions that `config` needs; none if it switches nothing on."""
        if self.session is not None:
            return
        self.session = Session(config, layout, train_iters)
        if not (config.any_technique or config.compression_metrics):
            self.handle = Off()
            self._attaching.close()
            return
        self.handle = Handle(self.session)
        self.handle._sessions.of_every_model = self.session
        self._applied.apply(_loop_wraps(self.session))

    def remove(self) -> None:
        """Remove every wrap. Models that were built in the meantime train on as vanilla (`Handle.remove`)."""
        if self.handle is not None:
            self.handle.remove()
        self._applied.close()
        self._attaching.close()
        self.session = self.handle = None

    def _attach(self, model: Any) -> None:
        if self.handle is None or self.session is None:
            if (reason := arguments.bypassed()) is not None:
                exit_with(reason)
            return  # a training loop of one's own, without Megatron's command line
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
    """Return every seam that some configuration wraps."""
    session = Session(OptimusConfig())
    first = [*arguments.wraps(lambda *_: None), *distributed_data_parallel.wraps(lambda _: None)]
    wraps = [*first, *shared_wraps(Sessions()), *_loop_wraps(session)]
    return [seam for seam, _ in wraps if importable(seam.target)]


def parts_of_megatron() -> dict[str, str | None]:
    """Return every seam and every attribute that some configuration needs, with the reason why it does not hold; None:
    it does.
    """
    return parts_of(all_seams())


def _loop_wraps(session: Session) -> list[tuple[Seam, Callable[[Any], Any]]]:
    wraps = [*training.wraps(session, partial(checkpointing.prove_saves, session)), *checkpointing.wraps(session)]
    return [wrap for wrap in wraps if importable(wrap[0].target)]
