"""The bodies of requests to the native API, with SGLang's field names."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from graftlm.contracts import MAX_CHOICES
from graftlm.intake import MAX_TTL_S
from graftlm.sampling_params import MAX_LOGPROB_IDS, MAX_LOGPROBS
from graftlm.server.shared_fields import MaskedLogprobs, StopPatterns
from graftlm.server.wire import (
    MAX_PROMPTS,
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
    "DestroyGroupRequest",
    "GenerateRequest",
    "InitGroupRequest",
    "LoadAdapterRequest",
    "MemoryRequest",
    "MemoryTag",
    "PauseRequest",
    "PinRequest",
    "PrefixRequest",
    "ProfileRequest",
    "SamplingRequest",
    "UnloadAdapterRequest",
    "UpdateFromDiskRequest",
    "UpdateFromGroupRequest",
    "WeightRequest",
    "WeightVersionRequest",
]

_Id = Annotated[str, Field(min_length=1, max_length=256), UNICODE]
_Adapter = Annotated[str, Field(min_length=1, max_length=256), UNICODE]
_Salt = Annotated[str, Field(max_length=1024), UNICODE]
_StopString = Annotated[str, Field(min_length=1, max_length=1024), UNICODE]
# The number of stop strings is limited, because each string is searched in the output of every step. This search delays
# all requests.
_Stops = Annotated[
    Annotated[_StopString, Tag("one")] | Annotated[list[_StopString], Field(max_length=64), Tag("many")],
    Discriminator(one_or_many),
]


def _shape_of_ids(value: Any) -> str:
    """Return the tag for a list of token ids, or for a list of such lists. The first element decides."""
    first = value[0] if isinstance(value, list) and value else 0
    return "many" if first is None or isinstance(first, list) else "one"


_LogprobIdList = Annotated[TokenIdList, Field(max_length=MAX_LOGPROB_IDS)]
_LogprobIds = Annotated[
    Annotated[_LogprobIdList, Tag("one")]
    | Annotated[list[_LogprobIdList | None], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("many")],
    Discriminator(_shape_of_ids),
]


_Picture = Annotated[str, Field(min_length=1)]
_Images = _Picture | list[_Picture | list[_Picture] | None]


class SamplingRequest(WireModel):
    """Sampling parameters. Null means the default."""

    known_at: ClassVar[str | None] = "/generate#sampling_params"

    max_new_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = Field(
        default=128,
        description="Maximum number of tokens to generate. Null: generate until the context or the memory is full. "
        "0: only compute the prompt, to return its log-probabilities or to cache it.",
    )
    min_new_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = Field(
        default=0,
        description="Minimum number of tokens to generate. Stop tokens and stop strings have no effect before this "
        "number is reached.",
    )
    temperature: Annotated[float, Field(ge=0, le=100), NUMBER] | None = Field(
        default=1.0, description="Temperature of sampling. 0: select the most likely token."
    )
    top_p: Annotated[float, Field(gt=0, le=1), NUMBER] | None = Field(
        default=1.0,
        description="Sample only from the smallest set of the most likely tokens whose total probability is at least "
        "this number.",
    )
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = Field(
        default=-1, description="Sample only from this number of the most likely tokens. -1: from all tokens."
    )
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = Field(
        default=0.0,
        description="Sample only from tokens whose probability is at least this fraction of the most likely token's "
        "probability.",
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = Field(
        default=0.0,
        description="Number that is subtracted from a token's logit for each occurrence of the token in the output.",
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = Field(
        default=0.0,
        description="Number that is subtracted once from the logit of each token that occurs in the output.",
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100), NUMBER] | None = Field(
        default=1.0,
        description="Penalty on the logits of tokens that occur in the prompt or the output. A value above 1 makes "
        "these tokens less likely.",
    )
    stop: _Stops | None = Field(default=None, description="Strings that end the output.")
    stop_regex: StopPatterns = None
    stop_token_ids: TokenIdList | None = Field(default=None, description="Tokens that end the output.")
    ignore_eos: bool | None = Field(default=False, description="Do not stop at the end-of-sequence token.")
    skip_special_tokens: bool | None = Field(default=True, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool | None = Field(
        default=True, description="Accepted without effect: the tokenizer determines the spaces."
    )
    no_stop_trim: bool | None = Field(
        default=False, description="Keep the match of a stop string, expression or token in the text."
    )
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = Field(
        default=1, description="Number of completions per prompt."
    )
    json_schema: SchemaField | None = Field(
        default=None, description="A JSON schema that the output must match, as text or as an object."
    )
    regex: Text | None = Field(default=None, description="A regular expression that the output must match.")
    ebnf: Text | None = Field(default=None, description="A grammar in EBNF that the output must match.")
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        default=None, description="A list of strings. The output must be one of them."
    )
    structural_tag: TextOrObject | None = Field(
        default=None,
        description="Schemas for parts of the output, as text or as an object. Each part starts with a trigger text.",
    )
    reasoning_end: ReasoningEnd = None
    reasoning_begin: ReasoningBegin = None
    strict: bool | None = Field(
        default=True,
        description="Refuse a JSON schema that cannot be enforced in full. If false, the parts that cannot be enforced "
        "are ignored and listed in `unenforced`.",
    )
    grammar_backend: Text | None = Field(
        default=None, description="The name of the grammar backend to use. Null: the server's `grammar.name`."
    )
    jump_forward: bool | None = Field(
        default=None,
        description="If false, every token under a grammar is sampled, even if the grammar allows only one. If "
        "null or true, the server's `grammar.jump_forward` applies.",
    )
    speculation: bool | None = Field(
        default=None,
        description="If false, no tokens are drafted. If null or true, the server's `speculation` section applies. "
        "The output is the same.",
    )
    masked_logprobs: MaskedLogprobs = False
    logit_bias: (
        dict[Annotated[int, Field(strict=False, ge=0)], Annotated[float, Field(ge=-1000, le=1000), NUMBER]] | None
    ) = Field(default=None, description="Number that is added to a token's logit, by token id as a string.")
    logits_processors: LogitsProcessors | None = Field(
        default=None,
        description="Options of logits processors, by the name of the processor. Plugins provide the processors.",
    )
    sampling_seed: Annotated[int, Field(ge=0, le=2**63 - 1), WHOLE] | None = Field(
        default=None,
        description="Seed of sampling. With a seed, the output is reproducible and does not depend on the other "
        "requests in the batch. Null: a random seed.",
    )


class GenerateRequest(WireModel):
    """One or several prompts, and their parameters. A list has one entry per prompt."""

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

    text: OneOrMany[Text] | None = Field(default=None, description="The prompt or prompts as text.")
    input_ids: OneOrManyPrompts | None = Field(
        default=None, description="The prompt or prompts as token ids, instead of `text`."
    )
    image_data: _Images | None = Field(
        default=None,
        description="Pictures: a data URL, base64 text or the URL of an allowed host, or a list of these. The prompt "
        "has one marker of the model, such as `<image>`, for each picture, or none. For several prompts: a list with "
        "one entry per prompt, each a picture, a list of pictures or null.",
    )
    sampling_params: OneOrMany[SamplingRequest] | None = Field(
        default=None,
        description="Sampling parameters: one object for all prompts, or a list with one object for each prompt.",
    )
    rid: OneOrMany[_Id] | None = Field(
        default=None,
        description="The request's id, for /abort_request. Null: the server creates one. If there are several "
        "prompts but only one id, `_0`, `_1` and so on are appended to the id.",
    )
    stream: bool | None = Field(
        default=False, description="Answer with server-sent events. Each event has the complete output so far."
    )
    return_logprob: OneOrMany[bool] | None = Field(
        default=False, description="Return the log-probabilities of the output's tokens."
    )
    logprob_start_len: OneOrMany[Annotated[int, Field(ge=-1, le=2**31 - 2), WHOLE]] | None = Field(
        default=-1,
        description="Also return the log-probabilities of the prompt's tokens, from this index on. -1: none.",
    )
    top_logprobs_num: OneOrMany[Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE]] | None = Field(
        default=0, description="Also return this number of the most likely tokens at each position."
    )
    token_ids_logprob: _LogprobIds | None = Field(
        default=None,
        description="With `return_logprob`: token ids whose log-probabilities are reported at each position. One list "
        "for all prompts, or a list with one list per prompt.",
    )
    return_text_in_logprobs: bool | None = Field(
        default=False, description="Add the text of each token to the log-probabilities."
    )
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="The request's priority, for scheduling policies that use priorities. Null: 0."
    )
    extra_key: OneOrMany[_Salt] | None = Field(
        default=None,
        description="A salt of the prefix cache: requests share cached prefixes only if they have the same salt.",
    )
    cache_salt: OneOrMany[_Salt] | None = Field(
        default=None,
        description="Has the same effect as `extra_key`. If both are given, the salt is their combination.",
    )
    lora_path: OneOrMany[_Adapter | None] | None = Field(
        default=None, description="The name of a loaded adapter. Null: the model without an adapter."
    )
    model: Text | None = Field(
        default=None, description="Accepted without effect: the server has one model, and `lora_path` names an adapter."
    )
    # fields for logs and bookkeeping, which do not affect the answer
    log_metrics: bool | None = Field(default=True, description="Accepted without effect: every request is counted.")
    no_logs: bool | None = Field(
        default=False, description="Accepted without effect: prompts and outputs are never logged."
    )
    conversation_id: str | None = Field(
        default=None, description="Accepted without effect: cached prefixes are found by their content."
    )
    session_id: str | None = Field(
        default=None, description="Accepted without effect: cached prefixes are found by their content."
    )
    routing_key: str | None = Field(
        default=None, description="Accepted without effect: it is for routers in front of the server."
    )
    custom_labels: dict[str, str] | None = Field(
        default=None, description="Accepted without effect: metrics have fixed labels."
    )


class ClassifyRequest(WireModel):
    """One or several texts, for which the model's score head computes scores."""

    text: OneOrMany[Text] | None = Field(default=None, description="The text or texts.")
    input_ids: OneOrManyPrompts | None = Field(
        default=None, description="The text or texts as token ids, instead of `text`."
    )
    rid: OneOrMany[_Id] | None = Field(
        default=None, description="The request's id, one for each text. Null: the server creates the ids."
    )
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="The request's priority, for scheduling policies that use priorities. Null: 0."
    )
    cache_salt: _Salt | None = Field(
        default=None, description="Requests share cached prefixes only if they have the same salt."
    )
    lora_path: _Adapter | None = Field(
        default=None, description="The name of a loaded adapter. Null: the model without an adapter."
    )
    model: Text | None = Field(
        default=None, description="Accepted without effect: the server has one model, and `lora_path` names an adapter."
    )


class AbortRequest(WireModel):
    """A request to abort other requests."""

    rid: OneOrMany[_Id] | Literal[""] | None = Field(
        default=None, description="The `rid` or list of `rid` of the requests to abort."
    )
    abort_all: bool | None = Field(
        default=False, description="Abort all requests. Only for operators and administrators."
    )


class PrefixRequest(WireModel):
    """A prefix in the cache."""

    text: Annotated[str, UNICODE] | None = Field(default=None, description="The prefix as text.")
    input_ids: PromptIds | None = Field(default=None, description="The prefix as token ids.")
    cache_salt: _Salt | None = Field(default=None, description="The `cache_salt` of the requests that use the prefix.")
    lora_path: _Adapter | None = Field(
        default=None, description="The name of the adapter of the requests that use the prefix. Null: no adapter."
    )


class PinRequest(PrefixRequest):
    """A prefix to pin, and the duration of the pin."""

    ttl_s: Annotated[float, NUMBER] = Field(
        default=3600.0, gt=0, le=MAX_TTL_S, description="Time in seconds after which the pin ends."
    )


class LoadAdapterRequest(WireModel):
    """An adapter to load."""

    known_at: ClassVar[str | None] = "/load_lora_adapter"

    lora_name: _Adapter = Field(description="The adapter's name in requests, without colons and white space.")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096), UNICODE] = Field(
        description="A folder on the server's machine that contains the adapter in the format of `peft`."
    )
    pinned: bool | None = Field(default=None, description="Accepted without effect: loaded adapters are never evicted.")


class UnloadAdapterRequest(WireModel):
    """An adapter to unload."""

    known_at: ClassVar[str | None] = "/unload_lora_adapter"

    lora_name: _Adapter = Field(description="The adapter's name.")


class PauseRequest(WireModel):
    """The treatment of the current requests during a pause."""

    mode: Literal["abort", "in_place", "retract"] = Field(
        default="abort",
        description="What happens to the current requests. `abort`: they are aborted. `in_place`: they are paused "
        "and keep their memory. `retract`: they are paused and their memory is freed. In every case, "
        "new requests wait.",
    )


class ContinueRequest(WireModel):
    """A request to end a pause. It has no fields."""


class UpdateFromDiskRequest(WireModel):
    """The new weights of the model."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096), UNICODE] = Field(
        description="The folder or GGUF file of a checkpoint of the same model, on the server's machine."
    )
    flush_cache: bool | None = Field(
        default=True,
        description="Discard the KV cache that was computed with the former weights. Paused requests are computed "
        "again.",
    )
    abort_all_requests: bool | None = Field(
        default=False,
        description="Abort the current requests. If false, the update waits until they have ended, unless generation "
        "is paused.",
    )
    weight_version: Annotated[str, Field(max_length=256), UNICODE] | None = Field(
        default=None,
        description="A name for the new weights, which the answers of /generate contain. Null: the name is unchanged.",
    )
    load_format: Literal["auto"] | None = Field(
        default=None, description="Accepted without effect: the format is detected."
    )


MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]


class MemoryRequest(WireModel):
    """The memory to release or to resume."""

    tags: list[MemoryTag] | None = Field(
        default=None,
        max_length=16,
        description="`kv_cache`: keys and values, and the prefix cache; `weights`: the model's weights; null or []: "
        "both. `cuda_graph` is accepted without effect.",
    )


_GroupName = Annotated[str, Field(min_length=1, max_length=256), UNICODE]
_Shape = Annotated[list[Annotated[int, Field(ge=0, le=2**40), WHOLE]], Field(max_length=16)]
_MAX_TENSORS = 1_000_000


class InitGroupRequest(WireModel):
    """The group of a trainer, which the server joins."""

    master_address: Annotated[str, Field(min_length=1, max_length=256), UNICODE] = Field(
        description="The address of the TCP store of rank 0: loopback, or in `server.trainer_hosts`."
    )
    master_port: Annotated[int, Field(ge=1, le=65535), WHOLE] = Field(description="The port of the TCP store.")
    rank_offset: Annotated[int, Field(ge=0, le=2**20), WHOLE] = Field(
        description="The rank of the first replica; the ranks of the other replicas follow."
    )
    world_size: Annotated[int, Field(ge=1, le=2**20), WHOLE] = Field(
        description="The number of ranks of trainer and replicas."
    )
    group_name: _GroupName = Field(default="weight_update_group", description="The name of the group.")
    backend: Literal["nccl", "gloo"] = Field(default="nccl", description="`nccl` needs a GPU.")


class UpdateFromGroupRequest(WireModel):
    """The tensors that rank 0 of a group broadcasts, in this order."""

    names: list[Annotated[str, Field(min_length=1, max_length=1024), UNICODE]] = Field(
        max_length=_MAX_TENSORS, description="The weights' names in a checkpoint."
    )
    dtypes: list[Annotated[str, Field(min_length=1, max_length=64), UNICODE]] = Field(
        max_length=_MAX_TENSORS, description="The name of each tensor's dtype, such as `bfloat16`."
    )
    shapes: list[_Shape] = Field(max_length=_MAX_TENSORS, description="The shape of each tensor.")
    group_name: _GroupName = Field(default="weight_update_group", description="The name of the group.")
    flush_cache: bool | None = Field(default=True, description="As for /update_weights_from_disk.")
    abort_all_requests: bool | None = Field(default=False, description="As for /update_weights_from_disk.")
    weight_version: Annotated[str, Field(max_length=256), UNICODE] | None = Field(
        default=None, description="The name of these weights, which the answers of /generate contain."
    )
    load_format: Literal["auto"] | None = Field(default=None, description="Accepted without effect.")
    torch_empty_cache: bool | None = Field(default=None, description="Accepted without effect.")


class DestroyGroupRequest(WireModel):
    """The group that the server leaves."""

    group_name: _GroupName = Field(default="weight_update_group", description="The name of the group.")


class WeightVersionRequest(WireModel):
    """A name for the weights."""

    new_version: Annotated[str, Field(min_length=1, max_length=256), UNICODE] = Field(
        description="The new name of the weights, which answers contain from now on."
    )
    abort_all_requests: bool | None = Field(default=True, description="Abort the current requests.")


class WeightRequest(WireModel):
    """The weight to read."""

    name: Annotated[str, Field(min_length=1, max_length=1024), UNICODE] = Field(
        description="The weight's name in a checkpoint."
    )
    truncate_size: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] = Field(
        default=100, description="Return at most this number of rows, or of elements of a vector."
    )


class ProfileRequest(WireModel):
    """Settings of a recording."""

    output_dir: Annotated[str, Field(max_length=200), UNICODE] | None = Field(
        default=None,
        description="A folder inside `server.profile_dir` for the traces. Null: `server.profile_dir` itself.",
    )
    num_steps: Annotated[int, Field(ge=1, le=100_000), WHOLE] | None = Field(
        default=None, description="Number of steps after which the recording stops. Null: it stops at /stop_profile."
    )
    activities: list[Literal["CPU", "GPU"]] | None = Field(
        default=None,
        min_length=1,
        max_length=2,
        description="Devices to record. Null: both. GPU is ignored if there is no GPU.",
    )
    with_stack: bool | None = Field(default=False, description="Record the Python stacks. This is slow.")
    record_shapes: bool | None = Field(default=False, description="Record the shapes of operators' inputs.")
    start_step: Unsupported = None
    profile_by_stage: Unsupported = None
    merge_profiles: Unsupported = None
