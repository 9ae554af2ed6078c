"""The bodies of the native API's answers, with SGLang's names."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "AdaptersChanged",
    "AnswerBody",
    "CacheSnapshots",
    "ClassifyBody",
    "ClassifyMeta",
    "Done",
    "FinishReasonBody",
    "FlushDone",
    "HealthBody",
    "LoadBody",
    "LoadsBody",
    "MetaInfo",
    "ModelInfo",
    "Pinned",
    "ProfileStarted",
    "ReplicaLoad",
    "ServerInfo",
    "TracesWritten",
    "Unpinned",
    "VersionBody",
    "WeightsUpdated",
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FinishReasonBody(_Body):
    """Why a completion ended."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = Field(default=None, description="With `stop`: the stop string, or the token's id.")
    length: int | None = Field(default=None, description="With `length`: tokens generated.")
    message: str | None = Field(default=None, description="With `abort`: why.")


#: [log-probability, token id, text or null]
_Entry = tuple[float | None, int, str | None]


class MetaInfo(_Body):
    """What is to be said of a completion besides its text."""

    id: str = Field(description="The request's id.")
    finish_reason: FinishReasonBody | None = Field(description="Null in the events of a stream before the last.")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = Field(description="Of the prompt's tokens, those whose keys and values were reused.")
    cached_tokens_details: dict[str, int] = Field(description="The same by tier: `device`, `host`, `storage`.")
    jump_forward_tokens: int = Field(
        description="Of the completion's tokens, those that were not sampled, because a grammar forced them."
    )
    drafted_tokens: int = Field(
        description="Tokens that speculation drafted and steps verified; 0 until the completion has ended."
    )
    accepted_draft_tokens: int = Field(
        description="Of the completion's tokens, those that were drafted; 0 until the completion has ended."
    )
    unenforced: list[str] | None = Field(
        default=None, description="Keywords of a JSON schema, with paths, that were left out because it is not strict."
    )
    weight_version: str
    e2e_latency: float | None = Field(default=None, description="Seconds in the server, once ended.")
    input_token_logprobs: list[_Entry] | None = Field(
        default=None, description="[log-probability, token id, text] of the prompt's tokens; the first has no number."
    )
    output_token_logprobs: list[_Entry] | None = Field(default=None, description="The same of the output's tokens.")
    input_top_logprobs: list[list[_Entry] | None] | None = Field(
        default=None, description="The most likely tokens at each place of the prompt."
    )
    output_top_logprobs: list[list[_Entry]] | None = Field(default=None, description="The same of the output.")


class AnswerBody(_Body):
    """One completion; in a stream, what there is of it so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = Field(default=None, description="In a stream of several completions: which one.")


class HealthBody(_Body):
    """Whether requests are served."""

    status: Literal["ok", "degraded", "draining", "unavailable"] = Field(
        description="`degraded`: some replicas are down, others serve."
    )
    problems: list[str] = Field(default=[], description="What is wrong, one line each.")
    paused: bool = Field(default=False, description="Requests wait for /continue_generation.")


class ModelInfo(_Body):
    """The model."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool = Field(default=True, description="Whether it generates text.")
    architectures: list[str]
    dtype: str
    context_len: int
    max_context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    has_chat_template: bool
    chat_template: str | None = Field(default=None, description="How a chat becomes a prompt, as a Jinja template.")
    special_tokens: dict[str, str] = Field(default={}, description="The template's variables, such as `bos_token`.")
    prompt_prefix: str = Field(default="", description="What is put before each text prompt, such as `bos_token`.")
    preferred_sampling_params: dict[str, Any] | None = None
    has_image_understanding: bool = False
    has_audio_understanding: bool = False
    weight_version: str = "default"
    labels: list[str] = Field(
        default=[], description="What the numbers of its score head stand for; empty: it has none."
    )


class LoadBody(_Body):
    """The load of one replica."""

    dp_rank: int
    num_reqs: int = Field(description="Prompts that have not ended, as of now.")
    num_held_reqs: int = Field(description="Prompts of all replicas that wait for one, or for the end of a pause.")
    num_waiting_reqs: int = Field(description="Requests that wait, as last reported, a fraction of a second ago.")
    num_tokens: int = Field(description="Tokens in use, and prompt tokens that wait.")
    num_pages: int = Field(description="Pages that running requests use.")
    num_cached_pages: int = Field(description="Pages of prefixes that may be evicted.")
    max_total_pages: int


class ReplicaLoad(_Body):
    """The load of one replica, as SGLang's `/v1/loads` writes it."""

    dp_rank: int
    num_running_reqs: int = Field(description="Requests in the batch, as last reported.")
    num_waiting_reqs: int = Field(description="Requests in the queue, as last reported.")
    num_total_reqs: int = Field(description="Prompts that have not ended.")
    num_used_tokens: int = Field(description="Tokens of KV memory that running requests use.")
    max_total_num_tokens: int = Field(description="Tokens that the KV memory holds.")
    token_usage: float = Field(description="`num_used_tokens` / `max_total_num_tokens`.")
    utilization: float = Field(description="`num_running_reqs` / `max_running_requests`.")
    max_running_requests: int


class LoadsBody(_Body):
    """The load of all replicas."""

    timestamp: str = Field(description="ISO 8601, UTC.")
    version: str
    dp_rank_count: int
    loads: list[ReplicaLoad]


class VersionBody(_Body):
    """The server's version."""

    version: str


class ServerInfo(_Body):
    """The configuration, without keys, and the state of each replica."""

    version: str
    uptime_s: float
    model_path: str
    tokenizer_path: str
    served_model_name: str
    dtype: str
    kv_dtype: str = Field(description="What keys and values are held in: the model's dtype, int8 or float8_e4m3fn.")
    context_length: int
    max_total_num_tokens: int = Field(description="Tokens that a replica's KV memory holds.")
    max_running_requests: int
    page_size: int
    tp_size: int = 1
    dp_size: int
    resolved: dict[str, dict[str, str]] = Field(
        description="The plugins in use: family -> name, distribution, and why this one."
    )
    config: dict[str, Any] = Field(description="The effective configuration.")
    internal_states: list[dict[str, Any]] = Field(description="What each replica last reported.")


class ClassifyMeta(_Body):
    """What is to be said of a judged text besides its scores."""

    id: str = Field(description="The request's id.")
    prompt_tokens: int
    e2e_latency: float = Field(description="Seconds in the server, of the whole call.")


class ClassifyBody(_Body):
    """What the score head says of a text."""

    embedding: list[float] = Field(description="The numbers of the head, one for each label: logits, or a reward.")
    label: str = Field(description="The label with the highest number, by its name in config.json.")
    meta_info: ClassifyMeta


class WeightsUpdated(_Body):
    """Every replica has new weights."""

    success: bool = True
    message: str
    num_paused_requests: int = Field(description="Requests that were paused meanwhile.")


class Done(_Body):
    """It was done."""

    success: bool = True
    status: Literal["ok"] = "ok"
    message: str


class FlushDone(_Body):
    """The cache was flushed."""

    success: bool = True
    flushed_tokens: int = Field(description="Tokens forgotten, in all replicas.")


class Pinned(_Body):
    """What is kept."""

    pinned_tokens: list[int] = Field(description="Tokens kept, by replica: 0 where nothing of the prefix is cached.")


class Unpinned(_Body):
    """A pin has ended."""

    was_pinned: bool = Field(description="Whether this very prefix was pinned in any replica.")


class CacheSnapshots(_Body):
    """The replicas' prefix caches."""

    replicas: list[dict[str, Any]] = Field(description="As `graftlm.memory.cache_snapshot` makes them, one a replica.")


class AdaptersChanged(_Body):
    """An adapter was loaded or unloaded."""

    success: bool = True
    message: str
    loaded_adapters: dict[str, str] = Field(description="Name -> folder of those that requests may ask for now.")


class ProfileStarted(_Body):
    """A recording has begun."""

    success: bool = True
    output_dir: str = Field(description="Where its traces will be.")


class TracesWritten(_Body):
    """A recording has ended."""

    success: bool = True
    files: list[str]
