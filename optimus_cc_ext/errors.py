"""What goes wrong by a user's hand or by another version of Megatron: each error says what, why and what to do."""

__all__ = ["FlagError", "OptimusError", "RanksDisagree", "UnsupportedMegatron"]


class OptimusError(RuntimeError):
    """Base of every error that this package raises on purpose."""


class FlagError(OptimusError, ValueError):
    """A flag that cannot work. The message names the flag, the reason and the cure."""

    def __init__(self, flag: str, reason: str, cure: str) -> None:
        super().__init__(f"{flag}: {reason}. {cure}.")
        self.flag = flag


class UnsupportedMegatron(OptimusError):
    """A Megatron whose version is not known, or whose seams are not where they were."""


class RanksDisagree(OptimusError):
    """Two ranks hold different ideas of what is sent. The message names both."""
