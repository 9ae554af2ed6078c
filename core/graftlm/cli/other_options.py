"""Command-line options of other servers, and graftlm's settings with the same meaning."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer
import typer.core

from graftlm.cli.options import fail

__all__ = ["OTHER_OPTIONS", "OtherOption", "ServeCommand"]


@dataclass(frozen=True, slots=True)
class OtherOption:
    """An option of vLLM, SGLang or both.

    Attributes:
        names: the option's names on the command line, with a long name first.
        setting: graftlm's setting, as PATH or PATH=VALUE; None if graftlm does not have this feature.
        note: how the setting differs from the option, or the reason why there is no setting.
    """

    names: tuple[str, ...]
    setting: str | None = None
    note: str = ""

    def advice(self, name: str) -> str:
        """Return a message with the replacement of the option `name`."""
        if self.setting is None:
            return f"graftlm serve has no option {name}: {self.note}"
        value = "" if "=" in self.setting else "=VALUE"
        note = f" ({self.note})" if self.note else ""
        path = self.setting.partition("=")[0]
        return f"graftlm serve has no option {name}; the setting is {path}: --set {self.setting}{value}{note}"


OTHER_OPTIONS = (
    OtherOption(("--model-path",), "model.path", "or graftlm serve MODEL"),
    OtherOption(("--served-model-name",), "server.served_model_name", "further names: server.model_names"),
    OtherOption(("--max-model-len", "--context-length"), "model.context_len"),
    OtherOption(("--dtype",), "model.dtype"),
    OtherOption(("--device",), "model.device"),
    OtherOption(("--trust-remote-code",), "model.trust_remote_code=true"),
    OtherOption(("--quantization", "-q"), "model.quantization"),
    OtherOption(("--attention-backend",), "attention.name"),
    OtherOption(
        ("--gpu-memory-utilization", "--mem-fraction-static"),
        "memory.kv_fraction",
        "a fraction of the memory that is free after the weights are loaded",
    ),
    OtherOption(("--max-total-tokens",), "memory.kv_tokens"),
    OtherOption(("--kv-cache-dtype",), "memory.kv_dtype", "auto, int8 or fp8"),
    OtherOption(("--block-size", "--page-size"), "cache.page_size"),
    OtherOption(("--enable-prefix-caching",), "cache.name=radix", "the default"),
    OtherOption(("--enable-hierarchical-cache",), "cache.name=hicache"),
    OtherOption(("--radix-eviction-policy",), "cache.eviction"),
    OtherOption(("--max-num-seqs", "--max-running-requests"), "scheduling.max_running_requests"),
    OtherOption(("--max-queued-requests",), "scheduling.max_queued_requests"),
    OtherOption(
        ("--max-num-batched-tokens", "--chunked-prefill-size"),
        "scheduling.prefill_tokens_per_step",
        "prompt tokens only",
    ),
    OtherOption(("--scheduling-policy", "--schedule-policy"), "scheduling.policy"),
    OtherOption(("--disable-overlap-schedule",), "scheduling.overlap=false"),
    OtherOption(("--enforce-eager", "--disable-cuda-graph"), "execution.graphs=false"),
    OtherOption(("--grammar-backend", "--structured-outputs-config"), "grammar.name"),
    OtherOption(("--tool-call-parser",), "chat.tool_call_format"),
    OtherOption(("--reasoning-parser",), "chat.reasoning_format"),
    OtherOption(("--enable-lora",), "lora.enabled=true"),
    OtherOption(("--lora-modules", "--lora-paths"), "lora.adapters", "a mapping of name to folder"),
    OtherOption(("--max-loras", "--max-loras-per-batch"), "lora.max_loaded"),
    OtherOption(("--max-lora-rank",), "lora.max_rank"),
    OtherOption(("--lora-target-modules",), "lora.target_modules"),
    OtherOption(("--data-parallel-size", "--dp-size", "--dp", "-dp"), "parallel.data"),
    OtherOption(("--api-key",), "server.api_key", "prefer a file that only you can read"),
    OtherOption(("--admin-api-key",), "server.admin_api_key", "prefer a file that only you can read"),
    OtherOption(("--allowed-origins",), "server.cors_origins"),
    OtherOption(("--watchdog-timeout",), "server.watchdog_s"),
    OtherOption(("--kv-events-config",), "server.kv_events", "the address of a ZMQ socket"),
    OtherOption(
        ("--tensor-parallel-size", "--tp-size", "--tp", "-tp"), note="one replica runs on one device; see parallel.data"
    ),
    OtherOption(("--pipeline-parallel-size", "--pp-size", "--pp", "-pp"), note="one replica runs on one device"),
    OtherOption(
        ("--speculative-config", "--speculative-algorithm"),
        "speculation.drafter",
        "auto, radix, suffix or draft_model; draft heads are not supported",
    ),
    OtherOption(
        ("--speculative-num-draft-tokens", "--speculative-num-steps"),
        "speculation.max_drafts",
        "a maximum; fewer tokens are drafted where verification takes longer than it saves",
    ),
    OtherOption(
        ("--speculative-draft-model-path", "--speculative-draft-model"),
        "speculation.drafter.options",
        "{path: PATH}, with speculation.drafter.name=draft_model",
    ),
    OtherOption(("--speculative-eagle-topk",), note="a draft is one sequence of tokens, not a tree"),
    OtherOption(("--otlp-traces-endpoint",), "server.traces.endpoint", "OTLP over HTTP, usually port 4318"),
    OtherOption(("--enable-trace",), "server.traces.enabled=true", "or server.traces.endpoint"),
    OtherOption(("--enable-metrics",), note="metrics are always served, at /metrics"),
)

_BY_NAME = {name: option for option in OTHER_OPTIONS for name in option.names}


class ServeCommand(typer.core.TyperCommand):
    """A command that refuses other servers' options, and names the settings to use instead."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the command line.

        Raises:
            SystemExit: the command line contains an option of another server.
        """
        own = {name for parameter in self.params for name in parameter.opts}
        lines = [_BY_NAME[name].advice(name) for name in _given(args) if name in _BY_NAME and name not in own]
        if lines:
            fail(lines)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


def _given(args: Sequence[Any]) -> list[str]:
    """Return the names of the options before a "--", without repetitions."""
    words = list(args)
    words = words[: words.index("--")] if "--" in words else words
    return list(dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("-")))
