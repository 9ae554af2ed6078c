"""The section `server` of a configuration and the sections in it, with fields, defaults and limits."""

import re
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from graftlm.config.addresses import check_host_pattern
from graftlm.config.section import Float, Int, Name, PositiveFloat, PositiveInt, Section, refuse_bool

__all__ = [
    "BatchSettings",
    "FileSettings",
    "KVEventSettings",
    "ResponseStoreSettings",
    "ServerSettings",
    "TracesSettings",
]


def _check_zmq_address(address: str) -> str:
    """Refuse addresses that ZeroMQ cannot bind."""
    if not re.fullmatch(r"tcp://(\S+):(\d{1,5})|ipc://\S+", address):
        raise ValueError("must be tcp://HOST:PORT or ipc://PATH")
    return address


def _listed(value: Any) -> Any:
    """Accept one name for a list of one."""
    return (value,) if isinstance(value, str) else value


MetricsAlias = Literal["vllm", "sglang"]
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
    max_responses: Annotated[int, Field(ge=0), BeforeValidator(refuse_bool)] = Field(
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
    max_running_beside: Annotated[int, Field(ge=0), BeforeValidator(refuse_bool)] = Field(
        default=0,
        description="Maximum number of concurrent requests of a batch while requests of higher priority run, and "
        "for one second after. A larger number makes these requests slower. 0: one request of the "
        "batch starts every five seconds.",
    )
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), BeforeValidator(refuse_bool)] = Field(
        default=-1000,
        description="Highest priority that a request of a batch may have. The default priority of other requests is 0.",
    )
    max_requests: PositiveInt = Field(default=50_000, description="Maximum number of requests in a batch.")


ZmqAddress = Annotated[Name, AfterValidator(_check_zmq_address)]


class KVEventSettings(Section):
    """The publishing of changes of the replicas' prefix caches, for routers and indexers."""

    shorthand = "endpoint"

    endpoint: ZmqAddress | None = Field(
        default=None,
        description="ZeroMQ address, such as `tcp://127.0.0.1:5557`, on which the first replica publishes the "
        "changes of its prefix cache. Each further replica uses the next port. Null: changes are not published.",
    )
    format: Literal["graftlm", "vllm"] = Field(
        default="graftlm",
        description="Format of the messages. `graftlm`: the nodes of the radix tree. `vllm`: vLLM's events of blocks, "
        "which routers for vLLM and SGLang read.",
    )
    replay_endpoint: ZmqAddress | None = Field(
        default=None,
        description="ZeroMQ address on which the first replica answers requests for earlier messages, in the format "
        "`vllm`. Each further replica uses the next port. Null: no replay.",
    )
    replay_mib: PositiveInt = Field(
        default=64, description="Maximum size in MiB of the messages that a replica keeps for replay."
    )
    topic: str = Field(
        default="", description="The first frame of each message in the format `vllm`, such as `kv@pod@model`."
    )

    @model_validator(mode="after")
    def _check_replay(self) -> Self:
        if self.replay_endpoint is not None and (self.endpoint is None or self.format != "vllm"):
            raise ValueError("replay_endpoint needs `endpoint` and the format 'vllm'; set both, or remove it")
        return self


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
    sample_ratio: Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_bool)] | None = Field(
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
    max_connections: Annotated[int, Field(ge=8), BeforeValidator(refuse_bool)] | None = Field(
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
    kv_events: KVEventSettings = KVEventSettings()
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
