"""The sections of a configuration, with fields, defaults and limits."""

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from graftlm.config.addresses import check_host_pattern

__all__ = [
    "AttentionSettings",
    "BatchSettings",
    "CacheSettings",
    "ChatSettings",
    "DrafterSettings",
    "EvictionSettings",
    "ExecutionSettings",
    "FileSettings",
    "GrammarSettings",
    "LoraSettings",
    "MemorySettings",
    "ModelSettings",
    "ParallelSettings",
    "PluginSettings",
    "PolicySettings",
    "QuantizationSettings",
    "ResponseStoreSettings",
    "SchedulingSettings",
    "Section",
    "ServerSettings",
    "SpeculationSettings",
]


class Section(BaseModel):
    """A mapping of known keys. Unknown keys are errors. Values are immutable. Null means all defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The field that a plain string sets. `cache: radix` means `cache: {name: radix}`.
    shorthand: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _accept_shorthand(cls, value: Any) -> Any:
        return cls.written_out(value)

    @classmethod
    def written_out(cls, value: Any) -> Any:
        """Return the mapping for a string or null. Other values are returned unchanged."""
        if value is None:
            return {}
        if isinstance(value, str) and cls.shorthand is not None:
            return {cls.shorthand: value}
        return value


def _refuse_bool(value: Any) -> Any:
    # True is an int in Python, but `page_size: yes` must be an error.
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _check_zmq_address(address: str) -> str:
    """Refuse addresses that ZeroMQ cannot bind."""
    if not re.fullmatch(r"tcp://(\S+):(\d{1,5})|ipc://\S+", address):
        raise ValueError("expected tcp://HOST:PORT or ipc://PATH")
    return address


def _check_power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _check_not_empty(values: tuple[int, ...]) -> tuple[int, ...]:
    if not values:
        raise ValueError("must have at least one element, or be null")
    return values


def _listed(value: Any) -> Any:
    """Accept one name for a list of one."""
    return (value,) if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_refuse_bool)]
Float = Annotated[float, BeforeValidator(_refuse_bool)]
PositiveFloat = Annotated[float, Field(gt=0), BeforeValidator(_refuse_bool)]
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(_refuse_bool)]
Name = Annotated[str, Field(min_length=1)]
MetricsAlias = Literal["vllm", "sglang"]
Options = Annotated[
    dict[str, Any], Field(description="Options of the selected provider; `graftlm config schema` lists them.")
]


def _refuse_auto(name: str) -> str:
    if name == "auto":
        raise ValueError("must be the name of a quantization, or null for none; 'auto' is not supported")
    return name


class QuantizationSettings(Section):
    """Quantization of the weights of linear layers."""

    shorthand = "name"

    name: Annotated[Name, AfterValidator(_refuse_auto)] | None = Field(
        default=None, description="A quantization of the weights of linear layers; null: as in the checkpoint."
    )
    options: Options = Field(default_factory=dict)


class ModelSettings(Section):
    """The served checkpoint and its loading."""

    shorthand = "path"

    path: Name = Field(
        default="demo",
        description="A checkpoint folder in Hugging Face layout, a .gguf file, or `demo`, the bundled model.",
    )
    download: bool = Field(
        default=False,
        description="Whether a start downloads the model if `path` is its name on the Hugging Face hub, such as "
        "`Qwen/Qwen3-8B`. Only files that the local cache lacks are downloaded.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Dtype of weights and KV cache; `auto`: the checkpoint's, if the device supports it.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="`auto`: a CUDA device if there is one, else the CPU."
    )
    architecture: Name = Field(
        default="auto",
        description="A model provider; `auto`: one that lists the checkpoint's architecture, else one that supports "
        "any.",
    )
    context_len: PositiveInt | None = Field(
        default=None, description="Maximum number of a request's tokens, prompt and output together; null: the model's."
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether tokenizer and model may run Python code of the checkpoint."
    )
    native_ops: bool = Field(
        default=True,
        description="Use kernels compiled for this device for sampling, and for norms, rotary embedding and "
        "activations in one pass each.",
    )
    kernels: Literal["auto", "native", "amx", "avx512-bf16", "x86-64-v3", "armv8.2-a"] = Field(
        default="auto",
        description="Instruction sets of the compiled CPU kernels: `auto` takes the wheel's for this CPU and compiles "
        "the others, `native` compiles all for this CPU, a level takes or compiles kernels of that level.",
    )
    prepack: bool = Field(
        default=True,
        description="Rearrange the loaded weights for this CPU's matrix kernels, where measurements show that it is "
        "faster.",
    )
    quantization: QuantizationSettings = QuantizationSettings()


class AttentionSettings(Section):
    """The attention backend."""

    shorthand = "name"

    name: Name = Field(
        default="auto", description="An attention backend; `auto`: the highest rank that supports model and machine."
    )
    options: Options = Field(default_factory=dict)


class EvictionSettings(Section):
    """The order in which cached prefixes are evicted."""

    shorthand = "name"

    name: Name = Field(default="lru", description="An eviction strategy, or `auto`.")
    options: Options = Field(default_factory=dict)


class CacheSettings(Section):
    """The prefix cache."""

    shorthand = "name"

    name: Name = Field(default="radix", description="A prefix cache, or `auto`.")
    page_size: Annotated[Int, AfterValidator(_check_power_of_two)] = Field(
        default=1, ge=1, le=1024, description="Tokens in a KV page, a power of two; only whole pages are shared."
    )
    options: Options = Field(default_factory=dict)
    eviction: EvictionSettings = EvictionSettings()


class ChatSettings(Section):
    """The formats of tool calls and reasoning in chat answers."""

    tool_call_format: Name = Field(
        default="auto",
        description="The format of the model's tool calls; `auto`: determined from the chat template, or `hermes` if "
        "the template has no known marker.",
    )
    reasoning_format: Name = Field(
        default="auto",
        description="The format of the model's reasoning; `auto`: determined from the chat template; `none`: reasoning "
        "stays in the content.",
    )


def _none_is_null(value: Any) -> Any:
    return None if value == "none" else value


def _true_is_fast(value: Any) -> Any:
    return "fast" if value is True else value


class DrafterSettings(Section):
    """The source of drafts."""

    shorthand = "name"

    name: Annotated[Name | None, BeforeValidator(_none_is_null)] = Field(
        default=None,
        description="A drafter; `auto`: all available ones that need no options, each asked where those of higher "
        "rank have no draft; null or `none`: no speculation.",
    )
    options: Options = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.options and self.name in (None, "auto"):
            raise ValueError(
                f"options belong to one drafter, but name is {self.name or 'null'}; set name to a drafter's"
            )
        return self


class SpeculationSettings(Section):
    """Speculative decoding, which verifies drafted tokens in one step and does not change the output."""

    shorthand = "drafter"

    drafter: DrafterSettings = DrafterSettings()
    first: tuple[Name, ...] = Field(
        default=(),
        description="Drafters that are called before `drafter`, in this order and with default options. A drafter is "
        "called for the requests for which those before it have no draft.",
    )
    max_drafts: Annotated[int, Field(ge=1, le=64), BeforeValidator(_refuse_bool)] = Field(
        default=15,
        description="Maximum number of tokens that are drafted for a request in one step. Fewer are drafted, or none, "
        "where verifying them takes longer than it saves.",
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.first:
            return self
        if self.drafter.name in (None, "auto"):
            raise ValueError(
                f"first lists drafters that are called before another one, but drafter is "
                f"{self.drafter.name or 'null'}; set drafter to the last drafter's name"
            )
        names = [*self.first, self.drafter.name]
        repeated = next((name for name in names if names.count(name) > 1 or name in ("auto", "none")), None)
        if repeated is not None:
            raise ValueError(f"first: expected names of different drafters, and not that of drafter, got {repeated}")
        return self


class GrammarSettings(Section):
    """Enforcement of JSON schemas, regular expressions and grammars."""

    shorthand = "name"

    name: Name = Field(
        default="auto",
        description="A grammar backend; `auto`: the installed one of the highest rank. Without a backend, the engine "
        "refuses requests that need one.",
    )
    options: Options = Field(default_factory=dict)
    timeout_s: Float = Field(
        default=30.0,
        gt=0,
        description="Maximum time that a request waits for the compilation of its grammar; then it fails.",
    )
    jump_forward: Annotated[Literal["exact", "fast", False], BeforeValidator(_true_is_fast)] = Field(
        default="fast",
        description="What to do with text that the grammar determines. `fast` (or true): append the tokenizer's tokens "
        "of it without sampling; the output may differ from that of masks only. `exact`: draft these tokens and verify "
        "them in one step; the output is that of masks only. false: sample each token. A request disables it with "
        "`jump_forward: false`.",
    )
    cache_size: PositiveInt = Field(default=256, description="Maximum number of cached compiled grammars.")
    preload: bool = Field(
        default=False,
        description="Load the backend at start; otherwise the first request with a grammar waits some seconds for it.",
    )


class LoraSettings(Section):
    """LoRA adapters, and the memory for them."""

    adapters: dict[Name, Name] = Field(
        default_factory=dict,
        description="Adapters to load at start, in the format of `peft`: name -> folder.",
    )
    enabled: bool | None = Field(
        default=None,
        description="Reserve memory for adapters that are loaded later; null: true if `adapters` is not empty.",
    )
    max_loaded: PositiveInt = Field(
        default=8, le=1024, description="Maximum number of adapters on the device; memory is reserved for all of them."
    )
    max_rank: PositiveInt = Field(default=64, le=4096, description="Maximum rank of an adapter.")
    target_modules: tuple[Name, ...] | None = Field(
        default=None,
        description="The projections that adapters may change, such as `q_proj`; null: all linear layers of the "
        "decoder. Fewer need less memory.",
    )

    @property
    def takes_adapters(self) -> bool:
        """Whether an engine reserves memory for adapters."""
        return bool(self.adapters) if self.enabled is None else self.enabled

    @model_validator(mode="after")
    def _check_adapters(self) -> "LoraSettings":
        if self.adapters and self.enabled is False:
            raise ValueError("`adapters` is not empty, but `enabled` is false; remove one of them")
        if len(self.adapters) > self.max_loaded:
            raise ValueError(f"`adapters` has {len(self.adapters)} adapters, more than `max_loaded` {self.max_loaded}")
        if self.target_modules is not None and not self.target_modules:
            raise ValueError("`target_modules` must have at least one element, or be null")
        return self


class PolicySettings(Section):
    """The order in which waiting requests are admitted."""

    shorthand = "name"

    name: Name = Field(default="lpm", description="A scheduling policy, or `auto`.")
    options: Options = Field(default_factory=dict)


class SchedulingSettings(Section):
    """Admission of requests, and the size of steps."""

    policy: PolicySettings = PolicySettings()
    max_running_requests: Int = Field(
        default=64, ge=1, le=65536, description="Maximum number of requests in one batch."
    )
    max_queued_requests: PositiveInt = Field(
        default=1024, description="Maximum number of waiting requests; more are refused at once."
    )
    prefill_tokens_per_step: PositiveInt = Field(
        default=2048, description="Maximum number of prompt tokens in one step; longer prompts are prefilled in chunks."
    )
    mix_chunks: bool = Field(
        default=True,
        description="Allow prefill chunks and decode requests in one step; otherwise decoding waits while there are "
        "prompts to prefill.",
    )
    overlap: bool = Field(
        default=True, description="Plan the next step while the device runs the current one; the tokens are the same."
    )


class ExecutionSettings(Section):
    """Execution of steps on the device."""

    graphs: Literal["auto", True, False] = Field(
        default="auto",
        description="Replay decode steps as CUDA graphs; `auto`: if the device and the attention backend support it. "
        "On a CPU, `auto` records decode steps of up to 64 requests and replays their kernel calls; `true` pads "
        "decode steps as for a GPU and replays nothing.",
    )
    graph_batch_sizes: Annotated[tuple[PositiveInt, ...], AfterValidator(_check_not_empty)] | None = Field(
        default=None,
        description="Batch sizes to capture, in requests; a step is padded to the next size. Null: 1, 2, 4, 8, 16, 24 "
        "and so on, up to `scheduling.max_running_requests`, at most 512. Larger steps run without a graph.",
    )


class MemorySettings(Section):
    """Size and dtype of the KV cache."""

    kv_tokens: PositiveInt | None = Field(
        default=None, description="Number of tokens in the KV cache; null: derived from `kv_fraction`."
    )
    window_tokens: PositiveInt | None = Field(
        default=None,
        description="Number of tokens in the memory of sliding-window layers, if the cache supports a separate, "
        "smaller memory for them; null: derived from `kv_tokens` and the windows of running requests.",
    )
    kv_fraction: Float = Field(
        default=0.8,
        gt=0,
        lt=1,
        description="Share of the memory for the KV cache, of the memory that is free after loading the weights.",
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto",
        description="Dtype of stored keys and values; `auto`: the model's. About twice as many tokens fit with `int8` "
        "and `fp8` as with a 16-bit dtype.",
    )


class ParallelSettings(Section):
    """The number of replicas."""

    data: Int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of replicas of the model that `graftlm serve` runs, each in a separate process and, on "
        "GPUs, on a separate device. An in-process engine has always one.",
    )


HostPattern = Annotated[Name, AfterValidator(check_host_pattern)]
ApiKey = Annotated[SecretStr, Field(min_length=1)]


class ResponseStoreSettings(Section):
    """The storage of responses of /v1/responses, and its limits."""

    kind: Literal["memory", "sqlite"] = Field(
        default="memory", description="`memory` loses the responses at the end of the server, `sqlite` keeps them."
    )
    path: Name | None = Field(default=None, description="Of kind `sqlite`: the file of the database.")
    max_responses: Annotated[int, Field(ge=0), BeforeValidator(_refuse_bool)] = Field(
        default=1000, description="Maximum number of stored responses; the oldest are removed. 0: none is stored."
    )
    max_bytes: PositiveInt = Field(
        default=256 * 2**20,
        description="Maximum size of the stored responses with their conversations; the oldest are removed.",
    )

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if (self.kind == "sqlite") != (self.path is not None):
            raise ValueError("path is the file of kind 'sqlite': set both, or neither")
        return self


class FileSettings(Section):
    """The folder of /v1/files and /v1/batches, and its limits."""

    path: Name | None = Field(
        default=None, description="A folder for uploaded files, batches and results; null: both APIs are off."
    )
    max_file_bytes: PositiveInt = Field(default=512 * 2**20, description="Maximum size of an uploaded file.")
    max_bytes: PositiveInt = Field(
        default=16 * 2**30, description="Size of all files from which on further uploads are refused."
    )


class BatchSettings(Section):
    """The limits and the priority of requests of the Batch API."""

    max_running: PositiveInt = Field(default=16, description="Requests of batches that run at a time.")
    max_running_beside: Annotated[int, Field(ge=0), BeforeValidator(_refuse_bool)] = Field(
        default=0,
        description="The same while other requests run, and for a second after. More make other requests slower; with "
        "0, one request of a batch runs every five seconds.",
    )
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), BeforeValidator(_refuse_bool)] = Field(
        default=-1000, description="The highest priority of a batch's request; other requests have 0 by default."
    )
    max_requests: PositiveInt = Field(default=50_000, description="Maximum number of requests of a batch.")


class ServerSettings(Section):
    """The HTTP server: address, access, limits and failures."""

    host: Name = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: Int = Field(default=30000, ge=0, le=65535, description="TCP port; 0: any free port.")
    allowed_hosts: tuple[HostPattern, ...] | None = Field(
        default=None,
        description="Allowed names and addresses in `Host`, in addition to `host` and those of the loopback "
        "interface: `llm.example.org`, `*.example.org`, `2001:db8::5`, `*` for any; without scheme and port. Null: no "
        "others if `host` is a loopback address, else any. Behind a proxy that forwards its clients' `Host`, add the "
        "proxy's names. If `host` is not a loopback address, `/health` and `/health_generate` also accept any address "
        "in `Host`.",
    )
    api_key: ApiKey | None = Field(
        default=None, description="Bearer token that clients must send; null: no token is needed."
    )
    allow_anonymous: bool = Field(
        default=False,
        description="Serve without `api_key` on an address that other machines can reach; otherwise the server does "
        "not start there without a key.",
    )
    admin_api_key: ApiKey | None = Field(
        default=None,
        description="Bearer token that administrators must send. Null: administration is off, with one exception: on a "
        "loopback address without `api_key`, programs of this machine may flush, pause, profile, abort and read the "
        "prefix tree.",
    )
    open_admin: bool = Field(
        default=False,
        description="Allow administration to all clients without `admin_api_key`: they may replace weights, load "
        "adapters and read all prompts.",
    )
    checkpoint_roots: tuple[Name, ...] = Field(
        default=(),
        description="Folders from which administrators may load checkpoints and adapters, in addition to those in the "
        "configuration.",
    )
    served_model_name: Name | None = Field(
        default=None, description="The model's name in the API; null: the last part of `model.path`."
    )
    model_names: tuple[Name, ...] = Field(
        default=(),
        description="Further names of the model in the API. `default`, an empty name and no name mean it always.",
    )
    request_timeout_s: PositiveFloat | None = Field(
        default=None, description="Maximum time of a request; then it is aborted. Null: no limit."
    )
    clip_max_tokens: bool = Field(
        default=False,
        description="Cut `max_tokens` of a request to the room in the context; otherwise a request for more is "
        "refused.",
    )
    max_body_bytes: PositiveInt = Field(
        default=32 * 2**20, description="Maximum size of a request's body; larger ones are refused."
    )
    max_header_bytes: Int = Field(
        default=2**16,
        ge=1024,
        description="Maximum size of a request line with its header fields, and of trailers; larger ones are refused.",
    )
    max_connections: Annotated[int, Field(ge=8), BeforeValidator(_refuse_bool)] | None = Field(
        default=None,
        description="Maximum number of open connections. For one more, a connection that waits for its client is "
        "closed: first the oldest without a complete request, then those that read an answer slowly. Null: limited by "
        "the number of open files, and by 4,096 or twice the requests that may run and wait.",
    )
    header_timeout_s: PositiveFloat = Field(
        default=15.0, description="Maximum time from the first byte of a request to the end of its header fields."
    )
    stall_timeout_s: PositiveFloat = Field(
        default=30.0,
        description="Maximum time for a request's body, plus one second for each received KiB. A client that reads "
        "nothing of its answer for this time is disconnected.",
    )
    cors_origins: tuple[Name, ...] = Field(
        default=(), description="Origins whose pages may call the API from a browser; `*`: all."
    )
    restart: bool = Field(
        default=False,
        description="Restart a scheduler or detokenizer process that ends unexpectedly. Otherwise the server reports "
        "it on /health, refuses requests and exits with status 1.",
    )
    drain_timeout_s: Float = Field(
        default=30.0, ge=0, description="Maximum time that running requests may take after SIGTERM."
    )
    watchdog_s: Float = Field(
        default=120.0,
        gt=0,
        description="A process without progress for this time is reported, with the stacks of its threads.",
    )
    trainer_hosts: tuple[Name, ...] = Field(
        default=(),
        description="Addresses at which a trainer's group may be joined (/init_weights_update_group), besides loopback "
        "addresses; `*`: all. The group's ports have no access control.",
    )
    trainer_timeout_s: PositiveFloat = Field(
        default=300.0, description="Maximum time to join a trainer's group, and to receive each tensor in it."
    )
    profile_dir: Name = Field(
        default="profiles", description="Folder of /start_profile's output; clients name subfolders."
    )
    kv_events: Annotated[Name, AfterValidator(_check_zmq_address)] | None = Field(
        default=None,
        description="A ZeroMQ address such as `tcp://127.0.0.1:5557`, on which the first replica publishes the "
        "changes of its prefix cache; each further replica uses the next port.",
    )
    record_trace: Name | None = Field(
        default=None,
        description="A file to which every finished request is appended, hashed and without text, for `graftlm "
        "cache-sim`; null: none.",
    )
    metrics_aliases: Annotated[
        tuple[MetricsAlias, ...],
        BeforeValidator(_listed, json_schema_input_type=MetricsAlias | tuple[MetricsAlias, ...]),
    ] = Field(
        default=(),
        description="Servers under whose names `/metrics` also reports the metrics, so that their dashboards work: "
        "`vllm`, `sglang`, or a list of both.",
    )
    response_store: ResponseStoreSettings = ResponseStoreSettings()
    files: FileSettings = FileSettings()
    batches: BatchSettings = BatchSettings()
    log_format: Literal["text", "json"] = Field(
        default="text", description="Format of the log lines on standard error."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level of logged messages."
    )
    log_interval_s: Float = Field(
        default=10.0,
        ge=0,
        description="Seconds between log lines with the load, written only while there are requests; 0: none.",
    )


class PluginSettings(Section):
    """Additional plugins, disabled plugins, and the choice between providers of the same name."""

    modules: tuple[Name, ...] = Field(
        default=(), description="Import names of plugin modules to load in addition to installed plugins."
    )
    disabled: tuple[Name, ...] = Field(
        default=(), description="Plugins that are not imported, by name of entry point, distribution or module."
    )
    prefer: dict[str, Name] = Field(
        default_factory=dict,
        description="The distribution to use if several provide the same name, as `family/name: distribution`.",
    )
