"""Exceptions that ds_vpipe raises on purpose; every message is one line that says what to do."""


class VPipeError(RuntimeError):
    """Base of all errors raised by ds_vpipe."""


class VPipeConfigError(VPipeError, ValueError):
    """A setting is wrong: the message names the key, the value given, what is allowed and what to do."""


class PipelinePeerError(VPipeError):
    """A wait on another stage ended without what was waited for: time limit, lost peer, or its own failure.

    ``reason`` is the part that other stages should hear too: the first failure.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message


class PipelineProtocolError(VPipeError):
    """Stages disagree about what comes next; a defect in ds_vpipe or different code on different ranks."""


class CallOrderError(VPipeError, AssertionError):
    """A script's ``engine(...)``, ``backward()`` and ``step()`` do not follow each other as DeepSpeed demands."""
