"""The language for LM programs: generation in ordinary Python code.

A program is a function under `@function`; it appends text and expressions such as `gen(...)` to its state. docs/lang.md
has examples.
"""

from importlib import import_module
from typing import Any

from graftlm.lang.backend import Backend, Generation, GenerationRequest, SpeculatingBackend
from graftlm.lang.backends.anthropic import Anthropic
from graftlm.lang.backends.endpoint import RuntimeEndpoint
from graftlm.lang.backends.engine import EngineBackend
from graftlm.lang.backends.litellm import LiteLLM
from graftlm.lang.backends.openai import OpenAI
from graftlm.lang.backends.usage import ApiUsage
from graftlm.lang.choices import (
    ChoiceScore,
    ChoicesDecision,
    ChoicesMethod,
    Decision,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from graftlm.lang.compiler import CompiledProgram
from graftlm.lang.default_backend import flush_cache, get_server_info, set_default_backend
from graftlm.lang.graph import Graph
from graftlm.lang.primitives import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from graftlm.lang.program import Program, function
from graftlm.lang.refused_names import REFUSED_NAMES
from graftlm.lang.runtime import Runtime
from graftlm.lang.sampling import Sampling
from graftlm.lang.state import ProgramState, ProgramStateGroup

__all__ = [
    "Anthropic",
    "ApiUsage",
    "Backend",
    "ChoiceScore",
    "ChoicesDecision",
    "ChoicesMethod",
    "CompiledProgram",
    "Decision",
    "Engine",
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

ServerArgs = REFUSED_NAMES["ServerArgs"]
VertexAI = REFUSED_NAMES["VertexAI"]
global_config = REFUSED_NAMES["global_config"]


def __getattr__(name: str) -> Any:
    """Return a name of graftlm that SGLang's programs import from the language, although it is not part of it."""
    if name not in ("Engine", "__version__"):
        raise AttributeError(f"module 'graftlm.lang' has no attribute {name!r}")
    return getattr(import_module("graftlm"), name)
