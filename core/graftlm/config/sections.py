"""The sections of a configuration: every field, its default, its bounds."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from graftlm.config.addresses import check_host_pattern

__all__ = [
    "AttentionSettings",
    "CacheSettings",
    "ChatSettings",
    "EvictionSettings",
    "ExecutionSettings",
    "GrammarSettings",
    "LoraSettings",
    "MemorySettings",
    "ModelSettings",
    "ParallelSettings",
    "PluginSettings",
    "PolicySettings",
    "QuantizationSettings",
    "SchedulingSettings",
    "Section",
    "ServerSettings",
]


class Section(BaseModel):
    """A mapping of known keys. Unknown keys are errors, values do not change, null means all defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The field that a plain string stands for: `cache: radix` is `cache: {name: radix}`.
    shorthand: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _accept_shorthand(cls, value: Any) -> Any:
        return cls.written_out(value)

    @classmethod
    def written_out(cls, value: Any) -> Any:
        """Return the mapping that a string or null stands for; anything else as it is."""
        if value is None:
            return {}
        if isinstance(value, str) and cls.shorthand is not None:
            return {cls.shorthand: value}
        return value


def _refuse_bool(value: Any) -> Any:
    # Python counts True as 1; `page_size: yes` is a mistake all the same.
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _check_zmq_address(address: str) -> str:
    """Refuse what ZeroMQ cannot bind."""
    if not re.fullmatch(r"tcp://(\S+):(\d{1,5})|ipc://\S+", address):
        raise ValueError("expected tcp://HOST:PORT or ipc://PATH")
    return address


def _check_power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _check_not_empty(values: tuple[int, ...]) -> tuple[int, ...]:
    if not values:
        raise ValueError("must name at least one, or be null")
    return values


Int = Annotated[int, BeforeValidator(_refuse_bool)]
Float = Annotated[float, BeforeValidator(_refuse_bool)]
PositiveFloat = Annotated[float, Field(gt=0), BeforeValidator(_refuse_bool)]
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(_refuse_bool)]
Name = Annotated[str, Field(min_length=1)]
Options = Annotated[dict[str, Any], Field(description="Options of the chosen one; `graftlm config schema` lists them.")]


def _refuse_auto(name: str) -> str:
    if name == "auto":
        raise ValueError("must name a quantization, or be null for none; nothing is chosen by itself")
    return name


class QuantizationSettings(Section):
    """In how many bits linear layers hold their weights."""

    shorthand = "name"

    name: Annotated[Name, AfterValidator(_refuse_auto)] | None = Field(
        default=None, description="A quantization of the weights of linear layers; null: as the checkpoint has them."
    )
    options: Options = Field(default_factory=dict)


class ModelSettings(Section):
    """Which checkpoint to serve, and as what."""

    shorthand = "path"

    path: Name = Field(
        default="demo",
        description="A checkpoint folder in Hugging Face layout, a .gguf file, or `demo`, the model that comes along.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Of weights and KV cache; `auto` takes the checkpoint's where the device computes it.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="`auto` takes a CUDA device when there is one."
    )
    architecture: Name = Field(
        default="auto",
        description="A model provider; `auto` takes one that claims the checkpoint's architecture, else one for any.",
    )
    context_len: PositiveInt | None = Field(
        default=None, description="Cap on a request's tokens, prompt and output together; null: the model's own."
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether tokenizer and model may run Python code that the checkpoint brings."
    )
    native_ops: bool = Field(
        default=True,
        description="Compute norms, rotation and activation each in one pass, and choose tokens, by kernels compiled "
        "for this device.",
    )
    kernels: Literal["auto", "native", "amx", "avx512-bf16", "x86-64-v3", "armv8.2-a"] = Field(
        default="auto",
        description="Instruction sets of the compiled CPU kernels: `auto` takes the wheel's for this CPU and compiles "
        "the others, `native` compiles all for this CPU, a level takes or compiles kernels of that level.",
    )
    prepack: bool = Field(
        default=True,
        description="Rearrange the loaded weights for this CPU's matrix kernels, where that has been measured to pay.",
    )
    quantization: QuantizationSettings = QuantizationSettings()


class AttentionSettings(Section):
    """Which attention backend runs."""

    shorthand = "name"

    name: Name = Field(
        default="auto", description="An attention backend; `auto` takes the highest rank that fits model and machine."
    )
    options: Options = Field(default_factory=dict)


class EvictionSettings(Section):
    """Which cached prefixes are given up first."""

    shorthand = "name"

    name: Name = Field(default="lru", description="An eviction strategy, or `auto`.")
    options: Options = Field(default_factory=dict)


class CacheSettings(Section):
    """How computed prefixes are kept."""

    shorthand = "name"

    name: Name = Field(default="radix", description="A prefix cache, or `auto`.")
    page_size: Annotated[Int, AfterValidator(_check_power_of_two)] = Field(
        default=1, ge=1, le=1024, description="Tokens in a KV page, a power of two; only whole pages are shared."
    )
    options: Options = Field(default_factory=dict)
    eviction: EvictionSettings = EvictionSettings()


class ChatSettings(Section):
    """How the model writes what is not plain text into a chat's answer."""

    tool_call_format: Name = Field(
        default="auto",
        description="How the model writes tool calls; `auto` goes by the chat template, and takes `hermes` where it "
        "tells nothing.",
    )
    reasoning_format: Name = Field(
        default="auto",
        description="How the model marks its reasoning; `auto` goes by the chat template, `none` leaves it in the "
        "content.",
    )


class GrammarSettings(Section):
    """What enforces JSON schemas, regular expressions and grammars."""

    shorthand = "name"

    name: Name = Field(
        default="auto",
        description="A grammar backend; `auto` takes the highest rank installed. When none is, the engine runs "
        "without, and refuses requests that need one.",
    )
    options: Options = Field(default_factory=dict)
    timeout_s: Float = Field(
        default=30.0, gt=0, description="A request waits this long while its grammar is compiled, then it fails."
    )
    jump_forward: bool = Field(
        default=True,
        description="Append output that a grammar leaves no choice about, without sampling it. The text may differ "
        "from that of masks alone; a request switches it off by `jump_forward: false`.",
    )
    cache_size: PositiveInt = Field(default=256, description="Compiled grammars that are kept for further requests.")
    preload: bool = Field(
        default=False,
        description="Load the backend at the start; otherwise the first request with a grammar waits for it, some "
        "seconds.",
    )


class LoraSettings(Section):
    """Which low-rank adapters requests may ask for, and how much room there is for them."""

    adapters: dict[Name, Name] = Field(
        default_factory=dict,
        description="Adapters to load at the start, in the format of `peft`: name -> folder.",
    )
    enabled: bool | None = Field(
        default=None, description="Keep room for adapters that are loaded later; null: if `adapters` names any."
    )
    max_loaded: PositiveInt = Field(
        default=8, le=1024, description="Adapters on the device at most; memory is set aside for all of them."
    )
    max_rank: PositiveInt = Field(default=64, le=4096, description="The largest rank of an adapter.")
    target_modules: tuple[Name, ...] | None = Field(
        default=None,
        description="The projections that adapters may change, such as `q_proj`; null: all of the decoder's layers. "
        "Fewer take less memory.",
    )

    @property
    def takes_adapters(self) -> bool:
        """Whether an engine has room for adapters."""
        return bool(self.adapters) if self.enabled is None else self.enabled

    @model_validator(mode="after")
    def _check_adapters(self) -> "LoraSettings":
        if self.adapters and self.enabled is False:
            raise ValueError("`adapters` names some, but `enabled` is false; leave one of them out")
        if len(self.adapters) > self.max_loaded:
            raise ValueError(f"`adapters` names {len(self.adapters)}, more than `max_loaded` {self.max_loaded}")
        if self.target_modules is not None and not self.target_modules:
            raise ValueError("`target_modules` must name at least one, or be null")
        return self


class PolicySettings(Section):
    """In which order waiting requests are admitted."""

    shorthand = "name"

    name: Name = Field(default="lpm", description="A scheduling policy, or `auto`.")
    options: Options = Field(default_factory=dict)


class SchedulingSettings(Section):
    """How many requests run, and how much of them in one step."""

    policy: PolicySettings = PolicySettings()
    max_running_requests: Int = Field(default=64, ge=1, le=65536, description="Requests in one batch at most.")
    max_queued_requests: PositiveInt = Field(
        default=1024, description="Requests that may wait; one more is refused at once."
    )
    prefill_tokens_per_step: PositiveInt = Field(
        default=2048, description="Prompt tokens in one step at most; longer prompts come in chunks."
    )
    mix_chunks: bool = Field(
        default=True,
        description="Let a step hold both prompt chunks and requests that decode; otherwise decoding waits while "
        "there are prompts to read.",
    )
    overlap: bool = Field(
        default=True, description="Plan the next step while the device computes this one; tokens stay the same."
    )


class ExecutionSettings(Section):
    """How the device runs steps."""

    graphs: Literal["auto", True, False] = Field(
        default="auto",
        description="Replay steps in which every request brings one token as CUDA graphs; `auto` does where the device "
        "and the attention backend can. On a CPU, `auto` records such steps of up to 64 requests, and repeats what "
        "kernels were called for; `true` pads them as a GPU needs it and replays nothing.",
    )
    graph_batch_sizes: Annotated[tuple[PositiveInt, ...], AfterValidator(_check_not_empty)] | None = Field(
        default=None,
        description="Requests of the steps to capture; a step is padded to the next. Null: 1, 2, 4, 8, 16, 24 and so "
        "on, up to `scheduling.max_running_requests`, 512 at most. Larger steps run without a graph.",
    )


class MemorySettings(Section):
    """How much memory holds keys and values, and in how many bits."""

    kv_tokens: PositiveInt | None = Field(
        default=None, description="Tokens whose keys and values fit; null derives it from `kv_fraction`."
    )
    window_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens that sliding-window layers keep, where the cache lets them have a smaller memory of their "
        "own; null derives it from `kv_tokens` and what running requests need.",
    )
    kv_fraction: Float = Field(
        default=0.8, gt=0, lt=1, description="Share of the memory that is free once the weights are loaded."
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto",
        description="What keys and values are held in: `int8` and `fp8` fit about twice the tokens of a 16-bit type; "
        "`auto` is the model's dtype.",
    )


class ParallelSettings(Section):
    """How many copies of the model serve."""

    data: Int = Field(
        default=1,
        ge=1,
        le=64,
        description="Replicas of the model that `graftlm serve` runs, each in a process of its own and, on GPUs, on a "
        "device of its own. An in-process engine is always one.",
    )


HostPattern = Annotated[Name, AfterValidator(check_host_pattern)]
ApiKey = Annotated[SecretStr, Field(min_length=1)]


class ServerSettings(Section):
    """Where the HTTP server listens, whom it lets in, and how it behaves when something fails."""

    host: Name = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: Int = Field(default=30000, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    allowed_hosts: tuple[HostPattern, ...] | None = Field(
        default=None,
        description="Names and addresses that requests may have in `Host`, besides those of the loopback interface and "
        "`host`: `llm.example.org`, `*.example.org`, `2001:db8::5`, `*` for any; without scheme and port. Null: none "
        "besides these on a loopback address, any on others. A proxy in front that keeps its clients' `Host` needs its "
        "names here. `/health` and `/health_generate` are also served by any address, if `host` is not a loopback one.",
    )
    api_key: ApiKey | None = Field(
        default=None, description="What clients must send as a bearer token; null asks for nothing."
    )
    allow_anonymous: bool = Field(
        default=False,
        description="Serve without `api_key` on an address that other machines reach; otherwise the server does not "
        "start there without one.",
    )
    admin_api_key: ApiKey | None = Field(
        default=None,
        description="What administrators must send as a bearer token. Null: without `api_key` too, programs of this "
        "machine may flush, pause, profile, abort and read the prefix tree of a server on a loopback address; "
        "everything else of administration is off.",
    )
    open_admin: bool = Field(
        default=False,
        description="Let every client that is served administer, too, without `admin_api_key`: it may replace weights, "
        "load adapters and read all prompts.",
    )
    checkpoint_roots: tuple[Name, ...] = Field(
        default=(),
        description="Folders in which administrators may name checkpoints and adapters to load, besides those that the "
        "configuration names itself.",
    )
    served_model_name: Name | None = Field(
        default=None, description="The model's name in the API; null: the last part of `model.path`."
    )
    model_names: tuple[Name, ...] = Field(
        default=(),
        description="Further names of the model in the API. `default`, an empty name and no name mean it always.",
    )
    request_timeout_s: PositiveFloat | None = Field(
        default=None, description="A request that takes longer is given up; null: never."
    )
    max_body_bytes: PositiveInt = Field(default=32 * 2**20, description="Larger request bodies are refused.")
    max_header_bytes: Int = Field(
        default=2**16, ge=1024, description="Larger request lines with their header fields are refused; trailers too."
    )
    max_connections: Annotated[int, Field(ge=8), BeforeValidator(_refuse_bool)] | None = Field(
        default=None,
        description="Connections at once; for one more, one that waits for its client is closed: first the oldest "
        "without a complete request, then those that read an answer slowly. Null: as many as the limit of open files "
        "leaves room for, 4,096 or twice the requests that may run and wait at most.",
    )
    header_timeout_s: PositiveFloat = Field(
        default=15.0, description="The header fields of a request must end so long after its first byte."
    )
    stall_timeout_s: PositiveFloat = Field(
        default=30.0,
        description="A request's body may take as long, and a second more for each KiB that came; a client that reads "
        "nothing of its answer is disconnected after this time.",
    )
    cors_origins: tuple[Name, ...] = Field(
        default=(), description="Origins whose pages may call the API from a browser; `*` for all."
    )
    restart: bool = Field(
        default=False,
        description="Start a scheduler or detokenizer process again when it dies. Otherwise the server reports it on "
        "/health, refuses requests and exits with status 1.",
    )
    drain_timeout_s: Float = Field(
        default=30.0, ge=0, description="After SIGTERM, requests under way may take this long to end."
    )
    watchdog_s: Float = Field(
        default=120.0,
        gt=0,
        description="A process that has not moved for this long is reported, with the stacks of its threads.",
    )
    profile_dir: Name = Field(
        default="profiles", description="Where /start_profile writes; clients name folders in it."
    )
    kv_events: Annotated[Name, AfterValidator(_check_zmq_address)] | None = Field(
        default=None,
        description="A ZeroMQ address such as `tcp://127.0.0.1:5557`, on which the first replica publishes what its "
        "prefix cache stores and removes; the next replica takes the next port.",
    )
    record_trace: Name | None = Field(
        default=None,
        description="A file to append every finished request to, hashed and without text, for `graftlm cache-sim`; "
        "null: none.",
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Form of the log lines on standard error.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severe messages that are logged."
    )


class PluginSettings(Section):
    """Which plugins are loaded besides the installed ones, which are not, and who wins a name."""

    modules: tuple[Name, ...] = Field(
        default=(), description="Import names of plugin modules to load besides the installed ones."
    )
    disabled: tuple[Name, ...] = Field(
        default=(), description="Plugins not to load, nor import: by entry point, distribution or module name."
    )
    prefer: dict[str, Name] = Field(
        default_factory=dict,
        description="Which distribution wins when two provide one name, as `family/name: distribution`.",
    )
