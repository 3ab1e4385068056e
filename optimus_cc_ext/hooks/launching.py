"""Compression of the model that Megatron's own training loop sets up: flags on its command line, then a handle.

`start` wraps the argument parser and `setup_model_and_optimizer`. Once the model is built, the launch attaches the same
handle that `optimus_cc_ext.compress` makes, and wraps the training loop, which announces its steps.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from optimus_cc_ext.announce import on_standard_output, say
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import DP_GRADIENTS
from optimus_cc_ext.config.presets import Layout, Resolution, describe
from optimus_cc_ext.errors import ends_the_run, exit_with, is_first_rank
from optimus_cc_ext.hooks import arguments, checkpointing, training
from optimus_cc_ext.hooks.attaching import attach
from optimus_cc_ext.hooks.facts import as_built
from optimus_cc_ext.hooks.handle import Handle, close_unless_used, shared_sessions, shared_wraps
from optimus_cc_ext.hooks.parts import check_megatron, importable, parts_of
from optimus_cc_ext.hooks.registry import AppliedWraps, Seam, megatron_version
from optimus_cc_ext.hooks.sessions import Sessions, layers_of
from optimus_cc_ext.patching import around
from optimus_cc_ext.techniques.session import Session

_Wraps = list[tuple[Seam, Callable[[Any], Any]]]

_launch: "Launch | None" = None


def start() -> "Launch":
    """Let Megatron's parser know our flags in this process. A second call changes nothing.

    Raises:
        UnsupportedMegatron: the version is not supported, or a part of it that we need does not hold.
    """
    global _launch
    if _launch is None:
        launch = Launch()
        launch.begin()
        _launch = launch
    return _launch


def launched() -> "Launch | None":
    """Return the launch of this process; None before `start`."""
    return _launch


class Launch:
    """Compression by Megatron's command line. `config` and `layout` are None until the command line is valid, and
    `handle` is None until Megatron has set up its model.
    """

    def __init__(self) -> None:
        self._applied, self._setting_up = AppliedWraps(), AppliedWraps()
        self._loading = checkpointing.Loading()
        self.config: OptimusConfig | None = None
        self.layout: Layout | None = None
        self.handle: Handle | None = None

    @property
    def session(self) -> Session | None:
        """The session of the model; None until Megatron has set up the model."""
        return None if self.handle is None else self.handle._session

    def begin(self) -> None:
        """Check Megatron, and apply the wraps that are needed before the configuration is known."""
        on_standard_output()
        line = check_megatron(all_seams())
        if line is not None and is_first_rank():
            say(f"optimus-cc: {line}")
        self._applied.apply(arguments.wraps(self._resolved))
        self._setting_up.apply(_setup_wraps(self._set_up))

    def remove(self) -> None:
        """Remove every wrap; the model trains on as vanilla (`Handle.remove`)."""
        global _launch
        if self.handle is not None:
            self.handle.remove()
        shared_sessions().awaits_model = False
        close_unless_used()
        self._applied.close()
        self._setting_up.close()
        _launch = None

    def _resolved(self, resolve: Callable[[Layout], Resolution], layout: Layout) -> None:
        """Take the configuration of the command line; `resolve` makes another one if the built model differs."""
        known: list[str] = []

        def configured(layout: Layout) -> OptimusConfig:
            resolution = resolve(layout)
            on = f"{describe(resolution.config)} on megatron-core {megatron_version()}"
            for line in (*resolution.notes, on):
                if line not in known and is_first_rank():
                    say(f"optimus-cc: {line}")
                known.append(line)
            return resolution.config

        if self.config is not None:
            return
        self.config, self.layout, self._configured = configured(layout), layout, configured
        if not (self.config.any_technique or self.config.compression_metrics):
            self._setting_up.close()
            return
        for seam, _ in _loop_wraps(Session(self.config)):  # refused now, and not after the model is built
            seam.resolve()
        if self.config.any_technique:
            shared_sessions().awaits_model = True
        self._applied.apply(self._loading.wraps())

    def _set_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Attach the handle to the model that Megatron sets up, then resume from the checkpoint that Megatron has
        loaded.
        """
        result = original(*args, **kwargs)
        if self.config is None:
            if (reason := arguments.bypassed()) is not None:
                exit_with(reason)
            return result
        models = [] if self.handle is not None else [model for chunk in result[0] for model in _wrapped(chunk)]
        if models:
            with ends_the_run():
                self.handle = attach(models, self._as_built, on=self.config.any_technique)
            shared_sessions().awaits_model = False
            session = self.handle._session
            self._applied.apply(_loop_wraps(session))
            self._loading.resume(session)
        elif self.config.is_on(DP_GRADIENTS) and (sharded := list(filter(_is_sharded, result[0]))):
            _compress_fsdp2(sharded, self.config.format_of(DP_GRADIENTS))
            shared_sessions().awaits_model = False
        return result

    def _as_built(self, built: Layout, _options: Any) -> tuple[OptimusConfig, Layout]:
        assert self.config is not None and self.layout is not None
        layout = as_built(self.layout, built)
        if layout != self.layout:
            self.config = self._configured(layout)
        return self.config, layout


def _wrapped(chunk: Any) -> Iterator[Any]:
    """Yield the DistributedDataParallel that a model chunk is, or wraps; those of the parts of a multimodal model."""
    whole = next((layer for layer in layers_of(chunk) if hasattr(layer, "bucket_groups")), None)
    yield from [whole] if whole is not None else (part for part in chunk.modules() if hasattr(part, "bucket_groups"))


def _is_sharded(chunk: torch.nn.Module) -> bool:
    return any(hasattr(module, "set_requires_gradient_sync") for module in chunk.modules())  # as every FSDPModule has


def _compress_fsdp2(chunks: list[torch.nn.Module], format: str) -> None:
    from optimus_cc_ext.fsdp2 import compress

    with ends_the_run():
        for chunk in chunks:
            compress(chunk, format)
    if is_first_rank():
        say(f"optimus-cc: FSDP2 reduces gradients in {format}, those of each micro-batch by themselves")


def all_seams() -> list[Seam]:
    """Return every seam that some configuration wraps."""
    first = [*arguments.wraps(lambda *_: None), *_setup_wraps(lambda *_: None), *checkpointing.Loading().wraps()]
    wraps = [*first, *shared_wraps(Sessions()), *_loop_wraps(Session(OptimusConfig()))]
    return [seam for seam, _ in wraps if importable(seam.target)]


def parts_of_megatron() -> dict[str, str | None]:
    """Return every seam and every attribute that some configuration needs, with the reason why it does not hold; None:
    it does.
    """
    return parts_of(all_seams())


def _setup_wraps(set_up: Callable[..., Any]) -> _Wraps:
    return [(Seam(training.SETUP), around(set_up))]


def _loop_wraps(session: Session) -> _Wraps:
    wraps = [*training.wraps(session, partial(checkpointing.prove_saves, session)), *checkpointing.wraps(session)]
    return [wrap for wrap in wraps if importable(wrap[0].target)]
