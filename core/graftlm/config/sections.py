"""The sections of a configuration except `server`, with fields, defaults and limits."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from graftlm.config.section import (
    Float,
    Int,
    Name,
    NaturalInt,
    Options,
    PositiveFloat,
    PositiveInt,
    Section,
    refuse_bool,
)

__all__ = [
    "AttentionSettings",
    "CacheSettings",
    "ChatSettings",
    "DrafterSettings",
    "EvictionSettings",
    "ExecutionSettings",
    "GrammarSettings",
    "LoraSettings",
    "MediaSettings",
    "MemorySettings",
    "ModelSettings",
    "ParallelSettings",
    "PluginSettings",
    "PolicySettings",
    "QuantizationSettings",
    "RoutingSettings",
    "SchedulingSettings",
    "SpeculationSettings",
]


def _check_power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _check_not_empty(values: tuple[int, ...]) -> tuple[int, ...]:
    if not values:
        raise ValueError("must have at least one element, or be null")
    return values


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
    """The template of chat prompts, and the formats of tool calls and reasoning in chat answers."""

    template: Name | None = Field(
        default=None,
        description="File with a Jinja template that converts chats to prompts. Null: the checkpoint's chat template.",
    )
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
    max_drafts: Annotated[int, Field(ge=1, le=64), BeforeValidator(refuse_bool)] = Field(
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


class MediaSettings(Section):
    """Pictures in prompts: the processor, limits, and memory."""

    shorthand = "name"

    name: Name = Field(
        default="auto",
        description="Name of the media processor. `auto`: the processor of the highest rank that lists the "
        "checkpoint's architecture.",
    )
    options: Options = Field(default_factory=dict)
    max_items: PositiveInt = Field(default=16, description="Maximum number of pictures in a request.")
    max_bytes: PositiveInt = Field(default=20 * 2**20, description="Maximum size in bytes of a picture's file.")
    max_pixels: PositiveInt = Field(
        default=32 * 2**20,
        description="Maximum number of pixels of a picture, width times height. It is checked before decoding.",
    )
    allowed_hosts: tuple[Name, ...] = Field(
        default=(),
        description="Hosts from which pictures may be downloaded, such as `images.example.org` or "
        "`images.example.org:8443`. Addresses that are not public are refused for all hosts. Empty: requests must "
        "contain their pictures.",
    )
    download_timeout_s: PositiveFloat = Field(
        default=10.0, description="Maximum time in seconds of the download of a picture."
    )
    feature_bytes: PositiveInt = Field(
        default=256 * 2**20,
        description="Size in bytes of the device memory for features of pictures, which their tokens need during "
        "prefill. Features without a request stay until others need the memory.",
    )
    prepared_bytes: PositiveInt = Field(
        default=256 * 2**20,
        description="Size in bytes of the host memory for decoded and prepared pictures of recent requests.",
    )


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
    state_snapshots: NaturalInt | None = Field(
        default=None,
        description="Number of recurrent states that are stored for later requests, for models with such states. Null: "
        "8 for each running request, but at most a quarter of the memory that `kv_fraction` determines.",
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto",
        description="Dtype of stored keys and values. `auto`: the model's dtype. With `int8` and `fp8`, about "
        "twice as many tokens fit as with a 16-bit dtype.",
    )


class RoutingSettings(Section):
    """The choice of a replica for each request."""

    shorthand = "name"

    name: Name = Field(
        default="auto",
        description="Name of the routing policy. `auto`: the available policy of the highest rank, which is "
        "`shortest_queue` without other plugins.",
    )
    options: Options = Field(default_factory=dict)


class ParallelSettings(Section):
    """The number of replicas, the choice of one for each request, and the ranks of each replica."""

    data: Int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of replicas of the model that `graftlm serve` runs. Each replica has a process and, on "
        "GPUs, a device of its own. An in-process engine always has one replica.",
    )
    routing: RoutingSettings = RoutingSettings()
    tensor: Int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of ranks of each replica. Each rank holds a part of every layer and, on GPUs, has a device "
        "of its own.",
    )
    executor: Name = Field(
        default="auto",
        description="Where the ranks run. `local`: in the scheduler's process, for a single rank. `processes`: each "
        "rank in a process of this machine. `auto`: `local` for one rank, otherwise the executor of the highest rank.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the executor.")


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
