"""The language for LM programs: generation as ordinary Python.

A program is a function under `@function`; it appends text and expressions such as `gen(...)` to its state. docs/lang.md
has examples.
"""

from graftlm.lang.backend import Backend, Generation, GenerationRequest, SpeculatingBackend
from graftlm.lang.backends.endpoint import RuntimeEndpoint
from graftlm.lang.backends.engine import EngineBackend
from graftlm.lang.backends.openai import OpenAI
from graftlm.lang.backends.usage import ApiUsage
from graftlm.lang.choices import (
    ChoiceScore,
    ChoicesMethod,
    Decision,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from graftlm.lang.compiler import CompiledProgram
from graftlm.lang.default_backend import flush_cache, set_default_backend
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
from graftlm.lang.sampling import Sampling
from graftlm.lang.state import ProgramState, ProgramStateGroup

__all__ = [
    "ApiUsage",
    "Backend",
    "ChoiceScore",
    "ChoicesMethod",
    "CompiledProgram",
    "Decision",
    "EngineBackend",
    "Generation",
    "GenerationRequest",
    "Graph",
    "OpenAI",
    "Program",
    "ProgramState",
    "ProgramStateGroup",
    "RuntimeEndpoint",
    "Sampling",
    "SpeculatingBackend",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
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
