"""The exceptions graftlm raises on purpose, as one tree.

    GraftlmError
    ├── ConfigError                    a configuration is wrong: says file, line, dotted path, nearest valid name
    ├── PluginError                    a plugin or provider cannot serve
    │   ├── PluginLoadError            importing or registering it failed
    │   ├── ApiVersionError            it was built for another api_version
    │   ├── DuplicateProviderError     two distributions provide one name
    │   ├── UnknownProviderError       nobody provides the name
    │   └── ProviderUnavailableError   it exists, but cannot run on this machine
    ├── ModelError                     a checkpoint cannot be served
    │   ├── CheckpointError            a file is missing, truncated or not what it says
    │   ├── WeightError                a tensor is missing, surplus or of the wrong shape
    │   ├── AdapterError               a low-rank adapter cannot be loaded: files, rank, shapes or modules do not fit
    │   └── UnsupportedArchitectureError
    ├── RequestError                   one request is at fault; others go on
    │   ├── SamplingParamsError
    │   ├── GrammarError               a JSON schema, regular expression or grammar is malformed or not enforceable
    │   ├── AdapterNotFoundError       names an adapter that is not loaded: says which are
    │   ├── InvalidPromptError         empty, or a token id outside the vocabulary
    │   ├── PromptTooLongError         longer than the model's context
    │   ├── NeverFitsError             needs more KV pages than the engine has
    │   ├── QueueFullError             back-pressure: max_queued_requests are waiting
    │   ├── UnsupportedFeatureError    asks for something that this engine was not assembled with
    │   ├── RequestTimeoutError        it was given up because its time was over
    │   └── RequestFailedError         it was running and failed: bad logits, a failing step
    ├── EngineError                    the engine itself
    │   ├── EngineClosedError
    │   ├── GraphCaptureError          a model or an attention backend cannot be captured in a CUDA graph
    │   ├── UnavailableError           a process of the server is down, starting or draining; try again later
    │   └── InvariantError             our own bookkeeping is wrong: names the owner
    └── ProgramError                   an LM program failed: says the program's line; `__cause__` is why
        ├── ProgramCancelledError      its run was cancelled
        └── TraceError                 it cannot be traced: says the line that needs a value

Raise the leaf that fits; catch the branch you can handle.
"""

from typing import Final, Self

from graftlm.shortening import shortened

__all__ = [
    "AdapterError",
    "AdapterNotFoundError",
    "ApiVersionError",
    "CheckpointError",
    "ConfigError",
    "DuplicateProviderError",
    "EngineClosedError",
    "EngineError",
    "GraftlmError",
    "GrammarError",
    "GraphCaptureError",
    "InvalidPromptError",
    "InvariantError",
    "ModelError",
    "NeverFitsError",
    "PluginError",
    "PluginLoadError",
    "ProgramCancelledError",
    "ProgramError",
    "PromptTooLongError",
    "ProviderUnavailableError",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "RequestTimeoutError",
    "SamplingParamsError",
    "TraceError",
    "UnavailableError",
    "UnknownProviderError",
    "UnsupportedArchitectureError",
    "UnsupportedFeatureError",
    "WeightError",
]


#: What is shown of a message: a client's input may stand in it, and be of any length.
_MAX_LINE_CHARS: Final = 2000
_MAX_LINES: Final = 100


class GraftlmError(Exception):
    """Base of every error graftlm raises on purpose. Its text is bounded, in lines and in characters of a line."""

    def __str__(self) -> str:
        lines = super().__str__().split("\n")
        shown = [shortened(line, _MAX_LINE_CHARS) for line in lines[:_MAX_LINES]]
        more = len(lines) - _MAX_LINES
        return "\n".join([*shown, f"and {more:,} more lines"] if more > 0 else shown)


class ConfigError(GraftlmError, ValueError):
    """A configuration is wrong."""


class PluginError(GraftlmError):
    """A plugin or provider cannot serve."""


class PluginLoadError(PluginError):
    """Importing or registering a plugin failed; `__cause__` is its own error."""


class ApiVersionError(PluginLoadError):
    """A provider was built for another plugin API."""


class DuplicateProviderError(PluginError):
    """Two distributions provide one name in one family."""


class UnknownProviderError(PluginError, ConfigError):
    """A configuration names a provider that nobody provides."""


class ProviderUnavailableError(PluginError):
    """A provider exists but cannot run on this machine."""


class ModelError(GraftlmError):
    """A checkpoint cannot be served."""


class CheckpointError(ModelError):
    """A checkpoint file is missing, truncated or not what it says."""


class WeightError(ModelError):
    """A weight tensor is missing, surplus or of the wrong shape."""


class AdapterError(ModelError):
    """A low-rank adapter cannot be loaded into this engine."""


class UnsupportedArchitectureError(ModelError):
    """No model provider claims the checkpoint's architecture, or the one that does lacks a feature it asks for."""


class RequestError(GraftlmError, ValueError):
    """One request is at fault.

    Attributes:
        param: the argument at fault, which is a field of that name over HTTP; None where it is not one alone.
    """

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SamplingParamsError(RequestError):
    """A sampling parameter is out of range."""


class GrammarError(RequestError):
    """A JSON schema, regular expression or grammar is malformed, or asks for what the backend cannot enforce."""


class AdapterNotFoundError(RequestError):
    """A request names an adapter that is not loaded."""


class InvalidPromptError(RequestError):
    """A prompt is empty or holds a token id outside the vocabulary."""


class PromptTooLongError(RequestError):
    """A prompt leaves no room for output in the model's context."""


class NeverFitsError(RequestError):
    """A request needs more KV pages than the engine has."""


class QueueFullError(RequestError):
    """The waiting queue is full; try again later."""


class UnsupportedFeatureError(RequestError):
    """A request asks for something this engine was not assembled with."""


class RequestTimeoutError(RequestError):
    """A request's time was over before it ended."""


class RequestFailedError(RequestError):
    """A running request failed: its logits were not finite, or its step failed."""


class EngineError(GraftlmError, RuntimeError):
    """The engine itself cannot go on."""


class EngineClosedError(EngineError):
    """The engine was closed."""


class UnavailableError(EngineError):
    """A process of the server is down, starting or draining; the request may be sent again."""


class GraphCaptureError(EngineError):
    """A model or an attention backend does what a CUDA graph cannot repeat."""


class InvariantError(EngineError):
    """The engine's own bookkeeping is wrong; the message names the owner."""


class ProgramError(GraftlmError, RuntimeError):
    """Part of an LM program failed; `__cause__` is its own error.

    Attributes:
        filename, lineno: the line of the program that asked for what failed; None where no line did.
    """

    def __init__(self, message: str, filename: str | None = None, lineno: int | None = None) -> None:
        super().__init__(message)
        self.filename = filename
        self.lineno = lineno

    def again(self) -> Self:
        """Return another one that says the same, for one more place that raises it."""
        error = type(self)(str(self), self.filename, self.lineno)
        error.__cause__ = self.__cause__
        return error


class ProgramCancelledError(ProgramError):
    """The run of an LM program was cancelled before this part of it was done."""


class TraceError(ProgramError):
    """A program cannot be traced: a line of it needs a value that is only there when it runs."""
