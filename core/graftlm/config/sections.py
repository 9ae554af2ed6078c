"""The sections of a configuration, with fields, defaults and limits."""

import re
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

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
    "TracesSettings",
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
        raise ValueError("must be tcp://HOST:PORT or ipc://PATH")
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
        raise ValueError("must be the name of a quantization, or null for no quantization; 'auto' is not supported")
    return name


class QuantizationSettings(Section):
    """Quantization of the weights of linear layers."""

    shorthand = "name"

    name: Annotated[Name, AfterValidator(_refuse_auto)] | None = Field(
        default=None,
        description="Name of the quantization for the weights of linear layers. Null: the weights stay as in the "
        "checkpoint.",
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
        description="Dtype of weights and KV cache. `auto`: the checkpoint's dtype.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device that runs the model. `auto`: a CUDA device if there is one, else the CPU."
    )
    architecture: Name = Field(
        default="auto",
        description="Name of a model provider. `auto`: the provider of the highest rank that lists the "
        "checkpoint's architecture; if there is none, a provider that supports any architecture.",
    )
    context_len: PositiveInt | None = Field(
        default=None,
        description="Maximum number of tokens of a request, prompt and output together. Null: the model's maximum.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Allow the tokenizer and the model to run Python code from the checkpoint."
    )
    native_ops: bool = Field(
        default=True,
        description="Use compiled kernels for sampling, norms, rotary embedding and activations. If they cannot be "
        "compiled, PyTorch's operations are used.",
    )
    kernels: Literal["auto", "native", "amx", "avx512-bf16", "x86-64-v3", "armv8.2-a"] = Field(
        default="auto",
        description="Instruction set of the compiled CPU kernels. `auto`: load the kernels of the wheel for the "
        "best level that this CPU supports, and compile the missing ones. `native`: compile all "
        "kernels for this CPU. Any other value is a level: load or compile the kernels of this level.",
    )
    prepack: bool = Field(
        default=True,
        description="Rearrange the loaded weights for this CPU's matrix kernels, if measurements show that this "
        "makes matrix products faster.",
    )
    quantization: QuantizationSettings = QuantizationSettings()


class AttentionSettings(Section):
    """The attention backend."""

    shorthand = "name"

    name: Name = Field(
        default="auto",
        description="Name of the attention backend. `auto`: the backend of the highest rank that supports the model "
        "and the machine.",
    )
    options: Options = Field(default_factory=dict)


class EvictionSettings(Section):
    """The order in which cached prefixes are evicted."""

    shorthand = "name"

    name: Name = Field(
        default="lru", description="Name of the eviction strategy. `auto`: the available strategy of the highest rank."
    )
    options: Options = Field(default_factory=dict)


class CacheSettings(Section):
    """The prefix cache."""

    shorthand = "name"

    name: Name = Field(
        default="radix", description="Name of the prefix cache. `auto`: the available cache of the highest rank."
    )
    page_size: Annotated[Int, AfterValidator(_check_power_of_two)] = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of tokens in a KV page, a power of two. Requests share only whole pages.",
    )
    options: Options = Field(default_factory=dict)
    eviction: EvictionSettings = EvictionSettings()


class ChatSettings(Section):
    """The formats of tool calls and reasoning in chat answers."""

    tool_call_format: Name = Field(
        default="auto",
        description="Format of the model's tool calls. `auto`: the format whose marker is in the chat template, or "
        "`hermes` if the template has no known marker.",
    )
    reasoning_format: Name = Field(
        default="auto",
        description="Format of the model's reasoning. `auto`: the format whose marker is in the chat template. "
        "`none`: the reasoning stays in the content of the answer.",
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
        description="Name of the drafter. `auto`: all available drafters that need no options; a drafter is used "
        "where drafters of higher rank have no draft. Null or `none`: no speculation.",
    )
    options: Options = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.options and self.name in (None, "auto"):
            raise ValueError(
                f"`options` need the name of one drafter, but `name` is {self.name or 'null'}; set `name` to the "
                "drafter that has these options"
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
        description="Maximum number of tokens that are drafted for a request in one step. Fewer tokens or none are "
        "drafted where verification takes longer than it saves.",
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
        description="Name of the grammar backend. `auto`: the installed backend of the highest rank. Without a "
        "backend, requests with a grammar are refused.",
    )
    options: Options = Field(default_factory=dict)
    timeout_s: Float = Field(
        default=30.0,
        gt=0,
        description="Maximum time in seconds that a request waits for the compilation of its grammar. After this time "
        "the request fails.",
    )
    jump_forward: Annotated[Literal["exact", "fast", False], BeforeValidator(_true_is_fast)] = Field(
        default="fast",
        description="How text that the grammar determines is generated. `fast` (or true): append the tokenizer's "
        "tokens of this text without sampling; the output may differ from the output with masks only. "
        "`exact`: draft these tokens and verify them in one step; the output equals the output with "
        "masks only. false: sample each token. A request can disable it with `jump_forward: false`.",
    )
    cache_size: PositiveInt = Field(default=256, description="Maximum number of compiled grammars in the cache.")
    preload: bool = Field(
        default=False,
        description="Load the grammar backend at start. Otherwise the first request with a grammar waits some seconds "
        "for it.",
    )


class LoraSettings(Section):
    """LoRA adapters, and the memory for them."""

    adapters: dict[Name, Name] = Field(
        default_factory=dict,
        description="Adapters to load at start, in the format of `peft`, as a mapping of name to folder.",
    )
    enabled: bool | None = Field(
        default=None,
        description="Reserve memory for adapters, so that adapters can be loaded later. Null: true if `adapters` is "
        "not empty, else false.",
    )
    max_loaded: PositiveInt = Field(
        default=8, le=1024, description="Maximum number of adapters on the device; memory is reserved for all of them."
    )
    max_rank: PositiveInt = Field(default=64, le=4096, description="Maximum rank of an adapter.")
    target_modules: tuple[Name, ...] | None = Field(
        default=None,
        description="Projections that adapters may change, such as `q_proj`. Null: all linear layers of the "
        "decoder. Fewer projections need less memory.",
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

    name: Name = Field(
        default="lpm", description="Name of the scheduling policy. `auto`: the available policy of the highest rank."
    )
    options: Options = Field(default_factory=dict)


class SchedulingSettings(Section):
    """Admission of requests, and the size of steps."""

    policy: PolicySettings = PolicySettings()
    max_running_requests: Int = Field(
        default=64, ge=1, le=65536, description="Maximum number of requests in one batch."
    )
    max_queued_requests: PositiveInt = Field(
        default=1024, description="Maximum number of waiting requests. Further requests are refused at once."
    )
    prefill_tokens_per_step: PositiveInt = Field(
        default=2048, description="Maximum number of prompt tokens in one step. Longer prompts are prefilled in chunks."
    )
    mix_chunks: bool = Field(
        default=True,
        description="Allow prefill chunks and decode requests in the same step. Otherwise decode requests wait "
        "while there are prompts to prefill.",
    )
    overlap: bool = Field(
        default=True,
        description="Plan the next step while the device computes the current one. The generated tokens are the same.",
    )


class ExecutionSettings(Section):
    """Execution of steps on the device."""

    graphs: Literal["auto", True, False] = Field(
        default="auto",
        description="Replay decode steps as CUDA graphs. `auto`: true if the device and the attention backend "
        "support it. On a CPU, `auto` records decode steps of up to 64 requests and replays their "
        "kernel calls; `true` pads decode steps as on a GPU and replays nothing.",
    )
    graph_batch_sizes: Annotated[tuple[PositiveInt, ...], AfterValidator(_check_not_empty)] | None = Field(
        default=None,
        description="Batch sizes of the captured graphs, in requests. A step is padded to the next size; steps "
        "with more requests run without a graph. Null: 1, 2, 4, 8, 16, 24 and so on, up to "
        "`scheduling.max_running_requests`, at most 512.",
    )


class MemorySettings(Section):
    """Size and dtype of the KV cache."""

    kv_tokens: PositiveInt | None = Field(
        default=None, description="Size of the KV cache in tokens. Null: derived from `kv_fraction`."
    )
    window_tokens: PositiveInt | None = Field(
        default=None,
        description="Size in tokens of the memory for sliding-window layers, if the cache has a separate memory "
        "for them. Null: derived from `kv_tokens` and the windows of running requests.",
    )
    kv_fraction: Float = Field(
        default=0.8,
        gt=0,
        lt=1,
        description="Fraction of the memory that is free after the weights are loaded; the KV cache gets this "
        "fraction.",
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto",
        description="Dtype of stored keys and values. `auto`: the model's dtype. With `int8` and `fp8`, about "
        "twice as many tokens fit as with a 16-bit dtype.",
    )


class ParallelSettings(Section):
    """The number of replicas."""

    data: Int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of replicas of the model that `graftlm serve` runs. Each replica has a process and, on "
        "GPUs, a device of its own. An in-process engine always has one replica.",
    )


HostPattern = Annotated[Name, AfterValidator(check_host_pattern)]
ApiKey = Annotated[SecretStr, Field(min_length=1)]


class ResponseStoreSettings(Section):
    """The storage of responses of /v1/responses, and its limits."""

    kind: Literal["memory", "sqlite"] = Field(
        default="memory",
        description="Where responses are stored. `memory`: in memory; they are lost when the server ends. `sqlite`: "
        "in a database file.",
    )
    path: Name | None = Field(
        default=None, description="The database file of kind `sqlite`. Null: none, for kind `memory`."
    )
    max_responses: Annotated[int, Field(ge=0), BeforeValidator(_refuse_bool)] = Field(
        default=1000,
        description="Maximum number of stored responses; above it, the oldest are removed. 0: no response is stored.",
    )
    max_bytes: PositiveInt = Field(
        default=256 * 2**20,
        description="Maximum size in bytes of the stored responses with their conversations; above it, the oldest are "
        "removed.",
    )

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if (self.kind == "sqlite") != (self.path is not None):
            raise ValueError("path is the file of kind 'sqlite': set both, or neither")
        return self


class FileSettings(Section):
    """The folder of /v1/files and /v1/batches, and its limits."""

    path: Name | None = Field(
        default=None,
        description="Folder for uploaded files, batches and results. Null: `/v1/files` and `/v1/batches` are disabled.",
    )
    max_file_bytes: PositiveInt = Field(default=512 * 2**20, description="Maximum size of an uploaded file in bytes.")
    max_bytes: PositiveInt = Field(
        default=16 * 2**30,
        description="Maximum size of all files together in bytes. At this size, further uploads are refused.",
    )


class BatchSettings(Section):
    """The limits and the priority of requests of the Batch API."""

    max_running: PositiveInt = Field(
        default=16,
        description="Maximum number of concurrent requests of a batch while no request of higher priority runs.",
    )
    max_running_beside: Annotated[int, Field(ge=0), BeforeValidator(_refuse_bool)] = Field(
        default=0,
        description="Maximum number of concurrent requests of a batch while requests of higher priority run, and "
        "for one second after. A larger number makes these requests slower. 0: one request of the "
        "batch starts every five seconds.",
    )
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), BeforeValidator(_refuse_bool)] = Field(
        default=-1000,
        description="Highest priority that a request of a batch may have. The default priority of other requests is 0.",
    )
    max_requests: PositiveInt = Field(default=50_000, description="Maximum number of requests in a batch.")


def _check_collector_url(url: str) -> str:
    """Refuse what is not the URL of an OTLP/HTTP endpoint. `EngineConfig` refuses URLs that contain a password."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or re.search(r"\s", url):
        raise ValueError("expected a URL such as http://localhost:4318")
    if parts.query or parts.fragment:
        raise ValueError("must not contain a query or a fragment")
    return url


_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def _check_header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError("must be the name of an HTTP header field")
    return name


def _check_header_value(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not (text.isascii() and text.isprintable()) or text != text.strip():
        raise ValueError("must be printable ASCII without spaces at its ends")
    return value


HeaderName = Annotated[Name, AfterValidator(_check_header_name)]
HeaderValue = Annotated[SecretStr, AfterValidator(_check_header_value)]


class TracesSettings(Section):
    """The export of traces to an OpenTelemetry collector."""

    shorthand = "endpoint"

    enabled: bool | None = Field(
        default=None,
        description="Export traces. Null: true if `endpoint` is set, or if the environment variables of OpenTelemetry "
        "name an OTLP endpoint or exporter. `OTEL_SDK_DISABLED=true` always disables traces.",
    )
    endpoint: Annotated[Name, AfterValidator(_check_collector_url)] | None = Field(
        default=None,
        description="URL of a collector that receives OTLP over HTTP, such as `http://localhost:4318`; `/v1/traces` is "
        "added. Null: `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT`, else port 4318 of this "
        "machine.",
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1), BeforeValidator(_refuse_bool)] | None = Field(
        default=None,
        description="Share of the requests that are traced. A request with a `traceparent` header is traced if and "
        "only if that header has the sampled flag. Null: `OTEL_TRACES_SAMPLER`, else all.",
    )
    service_name: Name | None = Field(
        default=None,
        description="The resource attribute `service.name`; null: `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES`, "
        "else `graftlm`.",
    )
    headers: dict[HeaderName, HeaderValue] = Field(
        default_factory=dict,
        description="HTTP header fields of each export, for example with a key. They replace fields of the same name "
        "in `OTEL_EXPORTER_OTLP_HEADERS`.",
    )


class ServerSettings(Section):
    """The HTTP server: address, access, limits and failures."""

    host: Name = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 means all addresses.")
    port: Int = Field(default=30000, ge=0, le=65535, description="TCP port. 0: any free port.")
    allowed_hosts: tuple[HostPattern, ...] | None = Field(
        default=None,
        description="Host names and addresses that clients may send in `Host`, without scheme and port, in "
        "addition to `host` and the names of the loopback interface: `llm.example.org`, "
        "`*.example.org`, `2001:db8::5`, or `*` for any. Null: no additional ones if `host` is a "
        "loopback address, else any. If a proxy forwards its clients' `Host`, add the proxy's names. "
        "If `host` is not a loopback address, `/health` and `/health_generate` also accept any address "
        "in `Host`.",
    )
    api_key: ApiKey | None = Field(
        default=None, description="Bearer token that clients must send. Null: no token is needed."
    )
    allow_anonymous: bool = Field(
        default=False,
        description="Serve without `api_key` on an address that other machines can reach. Otherwise the server "
        "needs a key to start on such an address.",
    )
    admin_api_key: ApiKey | None = Field(
        default=None,
        description="Bearer token that administrators must send. Null: administration is disabled, except on a "
        "loopback address without `api_key`: there, programs of this machine may flush, pause, "
        "profile, abort and read the prefix tree.",
    )
    open_admin: bool = Field(
        default=False,
        description="Give all clients the rights of administrators, without `admin_api_key`: they may replace "
        "weights, load adapters and read all prompts.",
    )
    checkpoint_roots: tuple[Name, ...] = Field(
        default=(),
        description="Folders from which administrators may load checkpoints and adapters, in addition to those in the "
        "configuration.",
    )
    served_model_name: Name | None = Field(
        default=None, description="Name of the model in the API. Null: the last part of `model.path`."
    )
    model_names: tuple[Name, ...] = Field(
        default=(),
        description="Further names of the model in the API. `default`, an empty name and a missing name always mean "
        "this model.",
    )
    request_timeout_s: PositiveFloat | None = Field(
        default=None,
        description="Maximum duration of a request in seconds; then the request is aborted. Null: no limit.",
    )
    clip_max_tokens: bool = Field(
        default=False,
        description="Reduce `max_tokens` of a request to the number of tokens that the context has room for. "
        "Otherwise a request for more tokens is refused.",
    )
    max_body_bytes: PositiveInt = Field(
        default=32 * 2**20,
        description="Maximum size of a request's body in bytes. Requests with larger bodies are refused.",
    )
    max_header_bytes: Int = Field(
        default=2**16,
        ge=1024,
        description="Maximum size in bytes of the request line with the header fields, and of the trailers. Requests "
        "that exceed it are refused.",
    )
    max_connections: Annotated[int, Field(ge=8), BeforeValidator(_refuse_bool)] | None = Field(
        default=None,
        description="Maximum number of open connections. To accept one more, the server closes a connection that "
        "waits for its client: first the oldest without a complete request, then those that read an "
        "answer slowly. Null: the number that the limit of open files permits, but at most the larger "
        "of 4,096 and twice the maximum number of running and waiting requests.",
    )
    header_timeout_s: PositiveFloat = Field(
        default=15.0,
        description="Maximum time in seconds from the first byte of a request to the end of its header fields.",
    )
    stall_timeout_s: PositiveFloat = Field(
        default=30.0,
        description="Maximum time in seconds for receiving a request's body; each received KiB adds one second. A "
        "client that reads nothing of its answer for this time is disconnected.",
    )
    cors_origins: tuple[Name, ...] = Field(
        default=(), description="Origins of web pages that may call the API from a browser; `*` means all."
    )
    restart: bool = Field(
        default=False,
        description="Restart a scheduler or detokenizer process that ends unexpectedly. Otherwise the server "
        "reports the failure on /health, refuses requests and exits with status 1.",
    )
    drain_timeout_s: Float = Field(
        default=30.0, ge=0, description="Maximum time in seconds that running requests may take after SIGTERM."
    )
    watchdog_s: Float = Field(
        default=120.0,
        gt=0,
        description="Seconds without progress after which a process is reported, with the stacks of its threads.",
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
        default="profiles", description="Folder for the output of /start_profile. A client may name a subfolder."
    )
    kv_events: Annotated[Name, AfterValidator(_check_zmq_address)] | None = Field(
        default=None,
        description="ZeroMQ address, such as `tcp://127.0.0.1:5557`, on which the first replica publishes the "
        "changes of its prefix cache. Each further replica uses the next port. Null: changes are not "
        "published.",
    )
    record_trace: Name | None = Field(
        default=None,
        description="File to which each finished request is appended, hashed and without text, for `graftlm "
        "cache-sim`. Null: requests are not recorded.",
    )
    metrics_aliases: Annotated[
        tuple[MetricsAlias, ...],
        BeforeValidator(_listed, json_schema_input_type=MetricsAlias | tuple[MetricsAlias, ...]),
    ] = Field(
        default=(),
        description="Servers under whose names `/metrics` also reports the metrics, so that their dashboards work: "
        "`vllm`, `sglang`, or a list of both.",
    )
    traces: TracesSettings = TracesSettings()
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
        default=(),
        description="Plugins that are not imported, given by the name of their entry point, distribution or module.",
    )
    prefer: dict[str, Name] = Field(
        default_factory=dict,
        description="The distribution to use if several distributions provide the same name, as `family/name: "
        "distribution`.",
    )
