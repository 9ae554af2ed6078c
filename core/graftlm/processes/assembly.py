"""Assembly of the main process's parts."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graftlm.assembly.grammars import make_grammars
from graftlm.assembly.media_processor import make_media_processor, make_media_prompts
from graftlm.assembly.resolved_plugins import resolve_plugins, resolved_line
from graftlm.chat.chat_formats import choose_chat_formats, make_chat_formats
from graftlm.chat.configured_tokenizer import load_tokenizer
from graftlm.checkpoint import load_model_config, resolve_checkpoint
from graftlm.config import EngineConfig
from graftlm.contracts import MediaProcessor, ModelConfig, Provider
from graftlm.intake import Intake, IntakeLimits
from graftlm.media import MediaPrompts
from graftlm.pooling.sentence_embedding import read_embedding_defaults
from graftlm.processes.launcher import Launcher
from graftlm.processes.replicas import ReplicaSet
from graftlm.processes.request_metrics import RequestMetrics
from graftlm.processes.served_model import ServedModel
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.processes.trace_recorder import TraceRecorder
from graftlm.registry import Registry
from graftlm.routing import Router
from graftlm.tokenization import TextStream, Tokenizer

__all__ = ["assemble_manager"]

logger = logging.getLogger(__name__)


async def assemble_manager(
    config: EngineConfig,
    registry: Registry,
    launcher: Launcher,
    metrics: RequestMetrics,
    recorder: TraceRecorder | None = None,
    router: Router | None = None,
) -> TokenizerManager:
    """Load the tokenizer, wait until the processes have loaded the model, and return a manager for them.

    Args:
        launcher: the launcher, which has started the processes.
        metrics: measures the requests.
        recorder: records finished requests; None if they are not recorded.
        router: chooses the replicas; None: the least loaded replica is chosen.

    Raises:
        GraftlmError: the checkpoint, the configuration or a plugin is invalid.
    """
    path = resolve_checkpoint(config.model.path)
    model_config = load_model_config(path)
    tokenizer = await asyncio.to_thread(load_tokenizer, config, path)
    media = await asyncio.to_thread(make_media_processor, config, registry, path, model_config)
    grammars = make_grammars(config, registry, tokenizer, model_config)
    preloads = [asyncio.to_thread(grammars.preload)] if grammars is not None and config.grammar.preload else []
    infos, *_ = await asyncio.gather(launcher.ready(tokenizer.to_json()), *preloads)
    limits = _limits(infos)
    intake = Intake(limits, lambda params: TextStream(tokenizer, params), time.monotonic, grammars)
    replicas = ReplicaSet(launcher.scheduler_names, can_recover=config.server.restart, router=router)
    formats = choose_chat_formats(config, registry, tokenizer.chat_template)
    # The schedulers choose plugins for the families that depend on the model. Here, the other families are added.
    resolved = infos[0]["resolved"] | resolve_plugins(config, registry, formats, chat_template=tokenizer.chat_template)
    logger.info("%s", resolved_line(resolved))
    model = _served_model(config, model_config, path, infos[0] | {"resolved": resolved}, limits, tokenizer)
    if media is not None:
        model = replace(model, image_token=media[1].marker)
    manager = TokenizerManager(
        config,
        model,
        tokenizer,
        intake,
        replicas,
        launcher.send,
        metrics,
        recorder=recorder,
        chat_formats=make_chat_formats(config, registry, tokenizer.chat_template),
        adapter_digests=infos[0]["adapters"],
        media=_media_prompts(config, media, tokenizer, infos),
    )
    launcher.watch(manager)
    logger.info(
        "%d replica(s) of %s on %s in %s; KV memory of each: %s tokens of %s in pages of %d",
        len(infos),
        model.name,
        infos[0]["device"],
        model.dtype,
        f"{limits.memory_tokens:,}",
        infos[0]["kv_dtype"],
        infos[0]["page_size"],
    )
    return manager


def _media_prompts(
    config: EngineConfig,
    media: tuple[Provider[MediaProcessor], MediaProcessor] | None,
    tokenizer: Tokenizer,
    infos: Sequence[dict[str, Any]],
) -> MediaPrompts | None:
    if media is None:
        return None
    max_features = min(info["max_features"] for info in infos)
    return make_media_prompts(config, media[1], tokenizer, max_features, is_local=False)


def _limits(infos: Sequence[dict[str, Any]]) -> IntakeLimits:
    """Return limits that hold for every replica. `memory_tokens` is the minimum over the replicas."""
    limits = dict(infos[0]["limits"])
    limits["memory_tokens"] = min(info["limits"]["memory_tokens"] for info in infos)
    limits["eos_token_ids"] = tuple(limits["eos_token_ids"])
    limits["logits_processors"] = frozenset(limits["logits_processors"])
    return IntakeLimits(**limits)


def _served_model(
    config: EngineConfig,
    model_config: ModelConfig,
    path: Path,
    info: dict[str, Any],
    limits: IntakeLimits,
    tokenizer: Tokenizer,
) -> ServedModel:
    return ServedModel(
        name=config.server.served_model_name or Path(config.model.path).name or path.name,
        path=config.model.path,
        architectures=tuple(info["architectures"]),
        dtype=info["dtype"],
        kv_dtype=info["kv_dtype"],
        vocab_size=limits.vocab_size,
        context_len=limits.context_len,
        memory_tokens=limits.memory_tokens,
        eos_token_ids=limits.eos_token_ids,
        has_chat_template=tokenizer.has_chat_template,
        created_s=int(time.time()),
        generates=limits.generates,
        labels=() if limits.num_labels is None else model_config.labels,
        embedding=read_embedding_defaults(path),
        resolved=info["resolved"],
        aliases=config.server.model_names,
    )
