"""The tree of graftlm's exceptions.

    GraftlmError
    ├── ConfigError                    a configuration is wrong; has file, line, dotted path, nearest valid name
    ├── PluginError                    a plugin or provider cannot be used
    │   ├── PluginLoadError            importing or registering a plugin failed
    │   ├── ApiVersionError            a provider was built for another plugin API version
    │   ├── DuplicateProviderError     two distributions provide the same name
    │   ├── UnknownProviderError       no distribution provides the name
    │   └── ProviderUnavailableError   the provider exists, but cannot run on this machine
    ├── ModelError                     a checkpoint cannot be used
    │   ├── CheckpointError            a file is missing, truncated or malformed
    │   ├── WeightError                a tensor is missing, unexpected or of the wrong shape
    │   ├── AdapterError               a LoRA adapter cannot be loaded: wrong files, rank, shapes or modules
    │   └── UnsupportedArchitectureError
    ├── RequestError                   one request is invalid or failed; other requests are not affected
    │   ├── SamplingParamsError
    │   ├── GrammarError               a JSON schema, regular expression or grammar is malformed or not enforceable
    │   ├── AdapterNotFoundError       the request's adapter is not loaded; has the loaded adapters
    │   ├── InvalidPromptError         the prompt is empty, or has a token id outside the vocabulary
    │   ├── MediaError                 a picture is malformed, too large, or from a host that is not allowed
    │   ├── PromptTooLongError         the prompt is longer than the model's context
    │   ├── NeverFitsError             the request needs more KV pages than the engine has
    │   ├── QueueFullError             max_queued_requests requests are already waiting (back-pressure)
    │   ├── UnsupportedFeatureError    the request needs a feature that this engine was not assembled with
    │   ├── RequestTimeoutError        the request was aborted after its maximum time
    │   └── RequestFailedError         the request failed while running: bad logits, a failed step
    ├── EngineError                    the engine itself failed
    │   ├── EngineClosedError          the engine was closed
    │   ├── RankFailedError            a rank of a replica ended, raised or missed a deadline; has rank and reason
    │   ├── GraphCaptureError          a model or an attention backend cannot be captured in a CUDA graph
    │   ├── UnavailableError           a server process is down, starting or draining; try again later
    │   └── InvariantError             the engine's own state is inconsistent; has the owner
    └── ProgramError                   an LM program failed; has the program's line; `__cause__` is the reason
        ├── ProgramCancelledError      the program's run was cancelled
        └── TraceError                 the program cannot be traced; has the line that needs a value

Raise the most specific class; catch the class that you can handle.
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
    "MediaError",
    "ModelError",
    "NeverFitsError",
    "PluginError",
    "PluginLoadError",
    "ProgramCancelledError",
    "ProgramError",
    "PromptTooLongError",
    "ProviderUnavailableError",
    "QueueFullError",
    "RankFailedError",
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


#: Limits of the length of an error message. It may quote a client's input, which can have any length.
_MAX_LINE_CHARS: Final = 2000
_MAX_LINES: Final = 100


class GraftlmError(Exception):
    """Base class of graftlm's errors. Its text is limited in lines and in characters per line."""

    def __str__(self) -> str:
        lines = super().__str__().split("\n")
        shown = [shortened(line, _MAX_LINE_CHARS) for line in lines[:_MAX_LINES]]
        more = len(lines) - _MAX_LINES
        return "\n".join([*shown, f"and {more:,} more lines"] if more > 0 else shown)


class ConfigError(GraftlmError, ValueError):
    """A configuration is wrong."""


class PluginError(GraftlmError):
    """A plugin or provider cannot be used."""


class PluginLoadError(PluginError):
    """Importing or registering a plugin failed; `__cause__` is the plugin's error."""


class ApiVersionError(PluginLoadError):
    """A provider was built for another plugin API version."""


class DuplicateProviderError(PluginError):
    """Two distributions provide the same name in one family."""


class UnknownProviderError(PluginError, ConfigError):
    """A configuration has a provider name that no distribution provides."""


class ProviderUnavailableError(PluginError):
    """A provider exists but cannot run on this machine."""


class ModelError(GraftlmError):
    """A checkpoint cannot be used."""


class CheckpointError(ModelError):
    """A checkpoint file is missing, truncated or malformed."""


class WeightError(ModelError):
    """A weight tensor is missing, unexpected or of the wrong shape."""


class AdapterError(ModelError):
    """A LoRA adapter cannot be loaded into this engine."""


class UnsupportedArchitectureError(ModelError):
    """No model provider supports the checkpoint's architecture, or a feature of it."""


class RequestError(GraftlmError, ValueError):
    """One request is invalid or failed; other requests are not affected.

    Attributes:
        param: name of the wrong argument or HTTP field; None if the error is not about a single one.
    """

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SamplingParamsError(RequestError):
    """A sampling parameter is out of range."""


class GrammarError(RequestError):
    """A JSON schema, regular expression or grammar is malformed, or the backend cannot enforce it in full."""


class AdapterNotFoundError(RequestError):
    """A request's adapter is not loaded."""


class InvalidPromptError(RequestError):
    """A prompt is empty or contains a token id outside the vocabulary."""


class MediaError(RequestError):
    """A picture is malformed, too large, of an unsupported form, or from a host that is not allowed."""


class PromptTooLongError(RequestError):
    """A prompt leaves no room for output in the model's context."""


class NeverFitsError(RequestError):
    """A request needs more KV pages than the engine has."""


class QueueFullError(RequestError):
    """The waiting queue is full; try again later."""


class UnsupportedFeatureError(RequestError):
    """A request needs a feature that this engine was not assembled with."""


class RequestTimeoutError(RequestError):
    """A request did not finish in its maximum time."""


class RequestFailedError(RequestError):
    """A running request failed: its logits were not finite, or its step failed."""


class EngineError(GraftlmError, RuntimeError):
    """The engine itself failed."""


class EngineClosedError(EngineError):
    """The engine was closed."""


class UnavailableError(EngineError):
    """A server process is down, starting or draining; the request may be sent again."""


class RankFailedError(EngineError):
    """A rank of a replica ended, raised or missed a deadline; the message has the rank and the reason."""


class GraphCaptureError(EngineError):
    """A model or an attention backend does something that a CUDA graph cannot repeat."""


class InvariantError(EngineError):
    """The engine's own state is inconsistent; the message has the owner of the state."""


class ProgramError(GraftlmError, RuntimeError):
    """A part of an LM program failed; `__cause__` is the original error.

    Attributes:
        filename, lineno: the line of the program that started the failed part; None if no line did.
    """

    def __init__(self, message: str, filename: str | None = None, lineno: int | None = None) -> None:
        super().__init__(message)
        self.filename = filename
        self.lineno = lineno

    def again(self) -> Self:
        """Return a copy, to be raised at another place."""
        error = type(self)(str(self), self.filename, self.lineno)
        error.__cause__ = self.__cause__
        return error


class ProgramCancelledError(ProgramError):
    """The run of an LM program was cancelled before this part was done."""


class TraceError(ProgramError):
    """A program cannot be traced: one of its lines needs a value that exists only at run time."""
