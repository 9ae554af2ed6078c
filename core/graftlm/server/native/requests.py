"""The bodies of the native API's requests, with SGLang's names."""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from graftlm.contracts import MAX_CHOICES
from graftlm.intake import MAX_TTL_S
from graftlm.sampling_params import MAX_LOGPROBS
from graftlm.server.wire import (
    NUMBER,
    UNICODE,
    WHOLE,
    LogitsProcessors,
    OneOrMany,
    OneOrManyPrompts,
    PromptIds,
    ReasoningBegin,
    ReasoningEnd,
    SchemaField,
    Text,
    TextOrObject,
    TokenIdList,
    Unsupported,
    WireModel,
    one_or_many,
)

__all__ = [
    "AbortRequest",
    "ClassifyRequest",
    "ContinueRequest",
    "GenerateRequest",
    "LoadAdapterRequest",
    "PauseRequest",
    "PinRequest",
    "PrefixRequest",
    "ProfileRequest",
    "SamplingRequest",
    "UnloadAdapterRequest",
    "UpdateFromDiskRequest",
    "WeightRequest",
]

_Id = Annotated[str, Field(min_length=1, max_length=256), UNICODE]
_Adapter = Annotated[str, Field(min_length=1, max_length=256), UNICODE]
_Salt = Annotated[str, Field(max_length=1024), UNICODE]
_StopString = Annotated[str, Field(min_length=1, max_length=1024), UNICODE]
# Every one of them is followed through every character of the output, between two steps of all requests.
_Stops = Annotated[
    Annotated[_StopString, Tag("one")] | Annotated[list[_StopString], Field(max_length=64), Tag("many")],
    Discriminator(one_or_many),
]


class SamplingRequest(WireModel):
    """How to sample. Null stands for the default."""

    known_at: ClassVar[str | None] = "/generate#sampling_params"

    max_new_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = Field(
        default=128,
        description="Tokens to generate at most; null: until the context or the memory is full. 0 only "
        "computes the prompt, for its log-probabilities or to have it cached.",
    )
    min_new_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = Field(
        default=0, description="No end of sequence and no stop before this many tokens."
    )
    temperature: Annotated[float, Field(ge=0, le=100), NUMBER] | None = Field(
        default=1.0, description="0 takes the most likely token."
    )
    top_p: Annotated[float, Field(gt=0, le=1), NUMBER] | None = Field(
        default=1.0, description="Keep the smallest set of tokens whose probability reaches this."
    )
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = Field(
        default=-1, description="Keep the k most likely tokens; -1 keeps all."
    )
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = Field(
        default=0.0, description="Keep tokens at least this share as likely as the most likely one."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = Field(
        default=0.0, description="Subtracted from a token's logit for each time the output holds it."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = Field(
        default=0.0, description="Subtracted once from the logit of a token that the output holds."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100), NUMBER] | None = Field(
        default=1.0, description="Divides the logits of tokens in prompt and output; above 1 discourages them."
    )
    stop: _Stops | None = Field(default=None, description="Strings that end the output.")
    stop_token_ids: TokenIdList | None = Field(default=None, description="Tokens that end the output.")
    ignore_eos: bool | None = Field(default=False, description="Go on past the end-of-sequence token.")
    skip_special_tokens: bool | None = Field(default=True, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool | None = Field(
        default=True, description="Accepted; the tokenizer decides where spaces go."
    )
    no_stop_trim: bool | None = Field(default=False, description="Keep the stop string or token in the text.")
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = Field(default=1, description="Completions per prompt.")
    json_schema: SchemaField | None = Field(
        default=None, description="A JSON schema that the output has to follow, as text or as an object."
    )
    regex: Text | None = Field(default=None, description="A regular expression that the output has to match.")
    ebnf: Text | None = Field(default=None, description="A grammar that the output has to follow.")
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        default=None, description="Strings, one of which the output has to be."
    )
    structural_tag: TextOrObject | None = Field(
        default=None,
        description="Parts of the output, each to follow a schema from where a trigger begins it, as text or as an "
        "object.",
    )
    reasoning_end: ReasoningEnd = None
    reasoning_begin: ReasoningBegin = None
    strict: bool | None = Field(
        default=True,
        description="Refuse a JSON schema that cannot be enforced in full; false leaves out what cannot be, and names "
        "it in `unenforced`.",
    )
    grammar_backend: Text | None = Field(default=None, description="Which grammar backend enforces it, by name.")
    jump_forward: bool | None = Field(
        default=None,
        description="False samples every token under a grammar, also where the grammar leaves no choice. Null and "
        "true: as the server's `grammar.jump_forward` says.",
    )
    speculation: bool | None = Field(
        default=None,
        description="False drafts no tokens. Null and true: as the server's `speculation` section says. The answer is "
        "the same.",
    )
    logit_bias: (
        dict[Annotated[int, Field(strict=False, ge=0)], Annotated[float, Field(ge=-1000, le=1000), NUMBER]] | None
    ) = Field(default=None, description="Token id (as a string) -> number added to its logit.")
    logits_processors: LogitsProcessors | None = Field(
        default=None, description="Logits processors that plugins provide, by name, each with its options."
    )
    sampling_seed: Annotated[int, Field(ge=0, le=2**63 - 1), WHOLE] | None = Field(
        default=None, description="Makes sampling reproducible, alone or in any batch."
    )


class GenerateRequest(WireModel):
    """One prompt or several, and what to generate from them. Lists have one entry for each prompt."""

    known_at: ClassVar[str | None] = "/generate"

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
                {"text": ["One", "Two"], "sampling_params": {"stop": ["."], "n": 2}, "stream": True},
                {"input_ids": [1, 2, 3], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
            ]
        }
    )

    text: OneOrMany[Text] | None = Field(default=None, description="The prompt or prompts; or give `input_ids`.")
    input_ids: OneOrManyPrompts | None = Field(default=None, description="The prompt or prompts as token ids.")
    sampling_params: OneOrMany[SamplingRequest] | None = Field(
        default=None, description="How to sample: one object for all prompts, or one for each."
    )
    rid: OneOrMany[_Id] | None = Field(
        default=None,
        description="The request's id, for /abort_request; drawn when absent. One id for several prompts is extended "
        "by `_0`, `_1` and so on.",
    )
    stream: bool | None = Field(
        default=False, description="Answer by server-sent events, each with everything generated so far."
    )
    return_logprob: OneOrMany[bool] | None = Field(
        default=False, description="Report log-probabilities of the output's tokens."
    )
    logprob_start_len: OneOrMany[Annotated[int, Field(ge=-1, le=2**31 - 2), WHOLE]] | None = Field(
        default=-1, description="Also report those of the prompt's tokens from here on; -1: of none."
    )
    top_logprobs_num: OneOrMany[Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE]] | None = Field(
        default=0, description="Also report this many most likely tokens for each place."
    )
    return_text_in_logprobs: bool | None = Field(
        default=False, description="Give the text of each token in log-probabilities."
    )
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="For scheduling policies that look at it; 0 by default."
    )
    extra_key: OneOrMany[_Salt] | None = Field(
        default=None, description="Requests with different keys share no cached prefix."
    )
    cache_salt: OneOrMany[_Salt] | None = Field(default=None, description="As `extra_key`; both may be given.")
    lora_path: OneOrMany[_Adapter | None] | None = Field(
        default=None, description="The name of a loaded adapter; null: the model alone."
    )
    # Wishes about logs and bookkeeping that change no answer.
    log_metrics: bool | None = Field(default=True, description="Accepted; every request is counted.")
    no_logs: bool | None = Field(default=False, description="Accepted; prompts and outputs are never logged.")
    conversation_id: str | None = Field(default=None, description="Accepted; prefixes are found by their content.")
    session_id: str | None = Field(default=None, description="Accepted; prefixes are found by their content.")
    routing_key: str | None = Field(default=None, description="Accepted; for routers in front of the server.")
    custom_labels: dict[str, str] | None = Field(default=None, description="Accepted; metrics have fixed labels.")


class ClassifyRequest(WireModel):
    """One text or several to be judged by the model's score head."""

    text: OneOrMany[Text] | None = Field(default=None, description="The text or texts; or give `input_ids`.")
    input_ids: OneOrManyPrompts | None = Field(default=None, description="The same as token ids.")
    rid: OneOrMany[_Id] | None = Field(default=None, description="The request's id, one for each text; drawn if null.")
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="For scheduling policies that look at it; 0 by default."
    )
    cache_salt: _Salt | None = Field(default=None, description="Requests with different salts share no prefix.")
    lora_path: _Adapter | None = Field(default=None, description="The name of a loaded adapter; null: the model alone.")
    model: Text | None = Field(default=None, description="Accepted; there is one model, and `lora_path` adapts it.")


class AbortRequest(WireModel):
    """Which requests to end."""

    rid: OneOrMany[_Id] | Literal[""] | None = Field(default=None, description="The id or ids given as `rid`.")
    abort_all: bool | None = Field(default=False, description="End every request; an operator's.")


class PrefixRequest(WireModel):
    """A prefix in the cache."""

    text: Annotated[str, UNICODE] | None = Field(default=None, description="The prefix as text.")
    input_ids: PromptIds | None = Field(default=None, description="The prefix as token ids.")
    cache_salt: _Salt | None = Field(default=None, description="The salt of the requests that use it.")
    lora_path: _Adapter | None = Field(default=None, description="The name of the adapter of the requests that use it.")


class PinRequest(PrefixRequest):
    """What to keep, and for how long."""

    ttl_s: Annotated[float, NUMBER] = Field(
        default=3600.0, gt=0, le=MAX_TTL_S, description="Seconds until the pin ends."
    )


class LoadAdapterRequest(WireModel):
    """An adapter to load."""

    lora_name: _Adapter = Field(description="What requests are to call it: no colon, no white space.")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096), UNICODE] = Field(
        description="A folder on the server, in the format of `peft`."
    )
    pinned: bool | None = Field(default=None, description="Accepted; no adapter is ever moved out.")


class UnloadAdapterRequest(WireModel):
    """An adapter to unload."""

    lora_name: _Adapter = Field(description="Its name.")


class PauseRequest(WireModel):
    """How to stop generating."""

    mode: Literal["abort", "in_place", "retract"] = Field(
        default="abort",
        description="`abort` ends what is under way, `in_place` keeps it as it stands, `retract` also gives its memory "
        "up. New requests wait in every case.",
    )


class ContinueRequest(WireModel):
    """Go on after a pause; has no fields."""


class UpdateFromDiskRequest(WireModel):
    """Which weights to serve with from now on."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096), UNICODE] = Field(
        description="The folder or GGUF file of a checkpoint of the same model, on the server's machine."
    )
    flush_cache: bool | None = Field(
        default=True,
        description="Forget what the former weights have computed; paused requests are computed again.",
    )
    abort_all_requests: bool | None = Field(
        default=False, description="End requests under way; else they end first, unless generation is paused."
    )
    weight_version: Annotated[str, Field(max_length=256), UNICODE] | None = Field(
        default=None, description="What the answers of /generate call these weights."
    )
    load_format: Literal["auto"] | None = Field(default=None, description="Accepted; it is found out.")


class WeightRequest(WireModel):
    """Which weight to show."""

    name: Annotated[str, Field(min_length=1, max_length=1024), UNICODE] = Field(description="Its name in a checkpoint.")
    truncate_size: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] = Field(
        default=100, description="Rows, or the numbers of a vector, from the first on."
    )


class ProfileRequest(WireModel):
    """What to record."""

    output_dir: Annotated[str, Field(max_length=200), UNICODE] | None = Field(
        default=None, description="A folder in `server.profile_dir` for the traces; null: that folder itself."
    )
    num_steps: Annotated[int, Field(ge=1, le=100_000), WHOLE] | None = Field(
        default=None, description="Stop by itself after this many steps; null: at /stop_profile."
    )
    activities: list[Literal["CPU", "GPU"]] | None = Field(
        default=None, min_length=1, max_length=2, description="What to record; a GPU that is not there is left out."
    )
    with_stack: bool | None = Field(default=False, description="Record Python stacks; slow.")
    record_shapes: bool | None = Field(default=False, description="Record the shapes of operators' inputs.")
    start_step: Unsupported = None
    profile_by_stage: Unsupported = None
    merge_profiles: Unsupported = None
