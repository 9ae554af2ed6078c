"""The bodies of answers in the native API, with SGLang's field names."""

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
    "WeightsNamed",
    "WeightsUpdated",
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FinishReasonBody(_Body):
    """The reason why a completion ended."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = Field(
        default=None, description="With `stop`: the stop string or the id of the stop token."
    )
    length: int | None = Field(default=None, description="With `length`: the number of generated tokens.")
    message: str | None = Field(default=None, description="With `abort`: the reason.")


#: [log-probability or null, token id, text or null]
_Entry = tuple[float | None, int, str | None]


class MetaInfo(_Body):
    """Information about a completion, in addition to its text."""

    id: str = Field(description="The request's id.")
    finish_reason: FinishReasonBody | None = Field(description="Null in all events of a stream before the last one.")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = Field(description="Number of prompt tokens whose cached keys and values were reused.")
    cached_tokens_details: dict[str, int] = Field(
        description="Number of cached prompt tokens by tier: `device`, `host`, `storage`."
    )
    jump_forward_tokens: int = Field(
        description="Number of the completion's tokens that were not sampled, because a grammar forced them."
    )
    drafted_tokens: int = Field(
        description="Number of drafted tokens that were verified; 0 until the completion has ended."
    )
    accepted_draft_tokens: int = Field(
        description="Number of the completion's tokens that are accepted drafts; 0 until the completion has ended."
    )
    unenforced: list[str] | None = Field(
        default=None,
        description="Keywords of a JSON schema that are not enforced, with their paths. Only present if `strict` is "
        "false.",
    )
    weight_version: str
    e2e_latency: float | None = Field(
        default=None,
        description="Seconds from the arrival of the request in the server to its end. Null: the request has not "
        "ended.",
    )
    input_token_logprobs: list[_Entry] | None = Field(
        default=None,
        description="[log-probability, token id, text] of each prompt token; the first log-probability is null.",
    )
    output_token_logprobs: list[_Entry] | None = Field(
        default=None,
        description="[log-probability, token id, text] of each output token; with max_new_tokens 0, of the next token.",
    )
    output_token_logprobs_length: int | None = Field(
        default=None, description="Number of entries in output_token_logprobs."
    )
    input_top_logprobs: list[list[_Entry] | None] | None = Field(
        default=None, description="The most likely tokens at each position of the prompt."
    )
    output_top_logprobs: list[list[_Entry]] | None = Field(
        default=None, description="The most likely tokens at each position of the output."
    )
    input_token_ids_logprobs: list[list[_Entry] | None] | None = Field(
        default=None, description="The tokens of `token_ids_logprob` at each position of the prompt."
    )
    output_token_ids_logprobs: list[list[_Entry]] | None = Field(
        default=None, description="The tokens of `token_ids_logprob` at each position of the output."
    )


class AnswerBody(_Body):
    """One completion. In a stream, it contains everything that was generated so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = Field(
        default=None, description="The index of the completion, in a stream of several completions."
    )


class HealthBody(_Body):
    """The health of the server."""

    status: Literal["ok", "degraded", "draining", "sleeping", "unavailable"] = Field(
        description="`degraded`: some replicas are down, and the others serve requests. `draining`: the server is "
        "shutting down. `sleeping`: memory is released, and requests are refused until it is resumed."
    )
    problems: list[str] = Field(default=[], description="The current problems, one line each.")
    paused: bool = Field(
        default=False, description="Whether generation is paused, so that requests wait for /continue_generation."
    )


class ModelInfo(_Body):
    """Information about the model."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool = Field(default=True, description="Whether the model generates text.")
    architectures: list[str]
    dtype: str
    context_len: int
    max_context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    has_chat_template: bool
    chat_template: str | None = Field(default=None, description="The Jinja template that converts a chat to a prompt.")
    special_tokens: dict[str, str] = Field(default={}, description="The template's variables, such as `bos_token`.")
    prompt_prefix: str = Field(
        default="", description="The text that is added before each text prompt, such as the `bos_token`."
    )
    preferred_sampling_params: dict[str, Any] | None = None
    has_image_understanding: bool = False
    image_token: str | None = Field(
        default=None, description="The marker of a picture in a prompt; null if the model cannot use pictures."
    )
    has_audio_understanding: bool = False
    weight_version: str = "default"
    labels: list[str] = Field(
        default=[], description="The labels of the scores of the model's score head; empty if it has no score head."
    )


class LoadBody(_Body):
    """The load of one replica."""

    dp_rank: int
    num_reqs: int = Field(description="Number of prompts of this replica that have not ended.")
    num_held_reqs: int = Field(
        description="Number of prompts that wait in the server for a replica or for the end of a pause. The number "
        "is the same for all replicas."
    )
    num_waiting_reqs: int = Field(
        description="Number of requests in the replica's queue, from its latest report, which is less than one second "
        "old."
    )
    num_tokens: int = Field(
        description="Number of tokens of KV memory that running requests use, plus the number of prompt tokens of "
        "queued requests."
    )
    num_pages: int = Field(description="Number of pages that running requests use.")
    num_cached_pages: int = Field(description="Number of pages of cached prefixes that may be evicted.")
    max_total_pages: int


class ReplicaLoad(_Body):
    """The load of one replica, in the format of SGLang's `/v1/loads`."""

    dp_rank: int
    num_running_reqs: int = Field(description="Number of requests in the batch, from the replica's latest report.")
    num_waiting_reqs: int = Field(description="Number of requests in the queue, from the replica's latest report.")
    num_total_reqs: int = Field(description="Number of prompts that have not ended.")
    num_used_tokens: int = Field(description="Number of tokens of KV memory that running requests use.")
    max_total_num_tokens: int = Field(description="Capacity of the KV memory, in tokens.")
    token_usage: float = Field(description="`num_used_tokens` / `max_total_num_tokens`.")
    utilization: float = Field(description="`num_running_reqs` / `max_running_requests`.")
    max_running_requests: int


class LoadsBody(_Body):
    """The load of all replicas."""

    timestamp: str = Field(description="Time of the answer, in ISO 8601 and UTC.")
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
    kv_dtype: str = Field(description="The dtype of the KV cache: the model's dtype, int8 or float8_e4m3fn.")
    context_length: int
    max_total_num_tokens: int = Field(description="Capacity of a replica's KV memory, in tokens.")
    max_running_requests: int
    page_size: int
    tp_size: int = 1
    dp_size: int
    resolved: dict[str, dict[str, str]] = Field(
        description="The plugins in use: family -> name, distribution, and the reason for the selection."
    )
    config: dict[str, Any] = Field(description="The effective configuration.")
    internal_states: list[dict[str, Any]] = Field(description="The latest report of each replica.")


class ClassifyMeta(_Body):
    """Information about a classified text, in addition to its scores."""

    id: str = Field(description="The request's id.")
    prompt_tokens: int
    e2e_latency: float = Field(description="Seconds that the server took for the whole call.")


class ClassifyBody(_Body):
    """The scores of a text."""

    embedding: list[float] = Field(description="One score for each label: logits, or a reward.")
    label: str = Field(description="The label with the highest score, by its name in config.json.")
    meta_info: ClassifyMeta


class WeightsNamed(_Body):
    """The answer after the name of the weights was changed."""

    success: bool = True
    message: str
    new_version: str


class WeightsUpdated(_Body):
    """The answer when every replica has the new weights."""

    success: bool = True
    message: str
    num_paused_requests: int = Field(description="Number of requests that were paused during the update.")


class Sleeping(_Body):
    """Whether the server sleeps."""

    is_sleeping: bool = Field(description="Whether any memory is released.")


class Done(_Body):
    """The answer to a call that succeeded."""

    success: bool = True
    status: Literal["ok"] = "ok"
    message: str


class FlushDone(_Body):
    """The answer after a flush of the cache."""

    success: bool = True
    flushed_tokens: int = Field(description="Number of tokens removed from the caches of all replicas.")


class Pinned(_Body):
    """The answer after a prefix was pinned."""

    pinned_tokens: list[int] = Field(
        description="Number of pinned tokens in each replica; 0 if no part of the prefix is cached there."
    )


class Unpinned(_Body):
    """The answer after a pin was removed."""

    was_pinned: bool = Field(description="Whether exactly this prefix was pinned in at least one replica.")


class CacheSnapshots(_Body):
    """The contents of the replicas' prefix caches."""

    replicas: list[dict[str, Any]] = Field(
        description="One snapshot per replica, in the format of `graftlm.memory.cache_snapshot`."
    )


class AdaptersChanged(_Body):
    """The answer after an adapter was loaded or unloaded."""

    success: bool = True
    message: str
    loaded_adapters: dict[str, str] = Field(
        description="The adapters that requests can use from now on: name -> folder."
    )


class ProfileStarted(_Body):
    """The answer after the start of a recording."""

    success: bool = True
    output_dir: str = Field(description="The folder to which the traces will be written.")


class TracesWritten(_Body):
    """The answer after the end of a recording."""

    success: bool = True
    files: list[str]
