"""graftlm: a plugin-based engine for serving large language models.

The names below are the public interface. They are imported on first use, so that `import graftlm` is fast and a command
line that needs no tensors does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graftlm.runtime.huge_pages import enable_huge_pages
from graftlm.runtime.openmp import load_openmp

if TYPE_CHECKING:
    from graftlm.config import EngineConfig
    from graftlm.contracts import Options, Provider
    from graftlm.engine.engine import Engine
    from graftlm.errors import GraftlmError
    from graftlm.hookspecs import hookimpl
    from graftlm.lang import (
        Anthropic,
        ApiUsage,
        Backend,
        ChoiceScore,
        ChoicesDecision,
        ChoicesMethod,
        CompiledProgram,
        Decision,
        EngineBackend,
        Generation,
        GenerationRequest,
        Graph,
        LiteLLM,
        OpenAI,
        Program,
        ProgramState,
        ProgramStateGroup,
        Runtime,
        RuntimeEndpoint,
        Sampling,
        ServerArgs,
        SpeculatingBackend,
        VertexAI,
        assistant,
        assistant_begin,
        assistant_end,
        flush_cache,
        function,
        gen,
        gen_int,
        gen_string,
        get_server_info,
        global_config,
        greedy_token_selection,
        image,
        select,
        separate_reasoning,
        set_default_backend,
        system,
        system_begin,
        system_end,
        token_length_normalized,
        unconditional_likelihood_normalized,
        user,
        user_begin,
        user_end,
        video,
    )
    from graftlm.types import ClassificationOutput, EmbeddingOutput, FinishReason, RequestOutput, SamplingParams, Usage

__version__ = "0.1.0"

__all__ = [
    "Anthropic",
    "ApiUsage",
    "Backend",
    "ChoiceScore",
    "ChoicesDecision",
    "ChoicesMethod",
    "ClassificationOutput",
    "CompiledProgram",
    "Decision",
    "EmbeddingOutput",
    "Engine",
    "EngineBackend",
    "EngineConfig",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "GraftlmError",
    "Graph",
    "LiteLLM",
    "OpenAI",
    "Options",
    "Program",
    "ProgramState",
    "ProgramStateGroup",
    "Provider",
    "RequestOutput",
    "Runtime",
    "RuntimeEndpoint",
    "Sampling",
    "SamplingParams",
    "ServerArgs",
    "SpeculatingBackend",
    "Usage",
    "VertexAI",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "hookimpl",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

_LANGUAGE = (
    "Anthropic",
    "ApiUsage",
    "Backend",
    "ChoiceScore",
    "ChoicesDecision",
    "ChoicesMethod",
    "CompiledProgram",
    "Decision",
    "EngineBackend",
    "Generation",
    "GenerationRequest",
    "Graph",
    "LiteLLM",
    "OpenAI",
    "Program",
    "ProgramState",
    "ProgramStateGroup",
    "Runtime",
    "RuntimeEndpoint",
    "Sampling",
    "ServerArgs",
    "SpeculatingBackend",
    "VertexAI",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
)

_HOME = {
    "ClassificationOutput": "graftlm.types",
    "EmbeddingOutput": "graftlm.types",
    "Engine": "graftlm.engine.engine",
    "EngineConfig": "graftlm.config",
    "FinishReason": "graftlm.types",
    "GraftlmError": "graftlm.errors",
    "Options": "graftlm.contracts",
    "Provider": "graftlm.contracts",
    "RequestOutput": "graftlm.types",
    "SamplingParams": "graftlm.types",
    "Usage": "graftlm.types",
    "hookimpl": "graftlm.hookspecs",
    **dict.fromkeys(_LANGUAGE, "graftlm.lang"),
}


load_openmp()  # before PyTorch loads its own OpenMP runtime
enable_huge_pages()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'graftlm' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
