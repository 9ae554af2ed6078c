"""The native routes that return information: health, model, configuration, load."""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Response

import graftlm
from graftlm.processes.replicas import Replica
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.native.generation_probe import GenerationProbe
from graftlm.server.native.responses import (
    HealthBody,
    LoadBody,
    LoadsBody,
    ModelInfo,
    ReplicaLoad,
    ServerInfo,
    VersionBody,
)

__all__ = ["make_router"]

_UNHEALTHY_RESPONSE: dict[int | str, dict[str, Any]] = {
    503: {"model": HealthBody, "description": "The server cannot serve requests; the body has the reason."}
}


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the routes of this module. Only /health_generate has an effect: it generates a token."""
    router = APIRouter(tags=["information"])
    probe = GenerationProbe(manager)
    start_s = time.monotonic()

    @router.get("/health", summary="Whether requests are served", responses=_UNHEALTHY_RESPONSE)
    async def health(response: Response) -> HealthBody:
        health = manager.health
        problems = list(health.problems)
        if health.ok:
            return HealthBody(status="degraded" if problems else "ok", problems=problems, paused=health.paused)
        response.status_code = 503
        status: Literal["draining", "sleeping", "unavailable"] = "draining" if health.serving else "unavailable"
        if health.sleeping and not health.draining:
            status = "sleeping"
        return HealthBody(status=status, problems=problems, paused=health.paused)

    @router.get("/ready", summary="Same as /health, for Kubernetes", responses=_UNHEALTHY_RESPONSE)
    @router.get("/ping", summary="Same as /health, for SageMaker", responses=_UNHEALTHY_RESPONSE)
    async def ready(response: Response) -> HealthBody:
        return await health(response)

    @router.get("/version", summary="The server's version")
    async def version() -> VersionBody:
        return VersionBody(version=graftlm.__version__)

    @router.get("/health_generate", summary="Whether a token can be generated", responses=_UNHEALTHY_RESPONSE)
    async def health_generate(response: Response) -> HealthBody:
        problem = await probe.problem()
        if problem is None:
            return HealthBody(status="ok")
        response.status_code = 503
        return HealthBody(status="unavailable", problems=[problem])

    @router.get("/model_info", summary="The model")
    @router.get("/get_model_info", summary="The model", include_in_schema=False)
    async def model_info() -> ModelInfo:
        return _model_info(manager)

    @router.get("/server_info", summary="The configuration and the state of each replica")
    @router.get("/get_server_info", summary="The configuration", include_in_schema=False)
    async def server_info() -> ServerInfo:
        return _server_info(manager, time.monotonic() - start_s)

    @router.get("/get_load", summary="The load of each replica, for routers")
    async def get_load() -> list[LoadBody]:
        return [_load(manager, rank, replica) for rank, replica in enumerate(manager.replicas.replicas)]

    @router.get("/v1/loads", summary="The load of each replica, in SGLang's second format")
    async def loads() -> LoadsBody:
        replicas = manager.replicas.replicas
        return LoadsBody(
            timestamp=datetime.now(UTC).isoformat(),
            version=graftlm.__version__,
            dp_rank_count=len(replicas),
            loads=[_replica_load(manager, rank, replica) for rank, replica in enumerate(replicas)],
        )

    return router


def _model_info(manager: TokenizerManager) -> ModelInfo:
    model = manager.model
    return ModelInfo(
        model_path=manager.weights.path or model.path,
        tokenizer_path=model.path,
        served_model_name=model.name,
        architectures=list(model.architectures),
        dtype=model.dtype,
        context_len=model.context_len,
        max_context_length=model.context_len,
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_ids),
        has_chat_template=model.has_chat_template,
        chat_template=manager.tokenizer.chat_template or None,
        special_tokens=manager.tokenizer.special_tokens,
        prompt_prefix=manager.tokenizer.prompt_prefix,
        weight_version=manager.weights.version,
        is_generation=model.generates,
        labels=list(model.labels),
        has_image_understanding=model.image_token is not None,
        image_token=model.image_token,
    )


def _server_info(manager: TokenizerManager, uptime_s: float) -> ServerInfo:
    config, model = manager.config, manager.model
    page_size = config.cache.page_size
    replicas = manager.replicas.replicas
    return ServerInfo(
        version=graftlm.__version__,
        uptime_s=round(uptime_s, 3),
        model_path=model.path,
        tokenizer_path=model.path,
        served_model_name=model.name,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        context_length=model.context_len,
        max_total_num_tokens=model.memory_tokens,
        max_running_requests=config.scheduling.max_running_requests,
        page_size=page_size,
        dp_size=len(replicas),
        resolved=model.resolved,
        config=config.model_dump(
            mode="json", exclude={"server": {"api_key": True, "admin_api_key": True, "traces": {"headers"}}}
        ),
        internal_states=[_state(manager, rank, replica) for rank, replica in enumerate(replicas)],
    )


def _state(manager: TokenizerManager, rank: int, replica: Replica) -> dict[str, Any]:
    """Return a replica's latest report and whether the replica accepts requests."""
    stats = {} if replica.load is None else asdict(replica.load.stats)
    load = _load(manager, rank, replica).model_dump()
    return load | {"process": replica.name, "ready": replica.ready, **stats}


def _replica_load(manager: TokenizerManager, rank: int, replica: Replica) -> ReplicaLoad:
    load = _load(manager, rank, replica)
    num_total = load.max_total_pages * manager.config.cache.page_size
    num_used = load.num_pages * manager.config.cache.page_size
    max_running = manager.config.scheduling.max_running_requests
    num_running = 0 if replica.load is None else replica.load.stats.running_requests
    return ReplicaLoad(
        dp_rank=rank,
        num_running_reqs=num_running,
        num_waiting_reqs=load.num_waiting_reqs,
        num_total_reqs=load.num_reqs,
        num_used_tokens=num_used,
        max_total_num_tokens=num_total,
        token_usage=round(num_used / num_total, 4) if num_total else 0.0,
        utilization=round(num_running / max_running, 4),
        max_running_requests=max_running,
    )


def _load(manager: TokenizerManager, rank: int, replica: Replica) -> LoadBody:
    page_size = manager.config.cache.page_size
    stats = None if replica.load is None else replica.load.stats
    used_pages = 0 if stats is None else stats.owned_pages + stats.locked_pages
    return LoadBody(
        dp_rank=rank,
        num_reqs=replica.num_requests,
        num_held_reqs=manager.replicas.num_held,
        num_waiting_reqs=0 if stats is None else stats.waiting_requests,
        num_tokens=used_pages * page_size + replica.queued_tokens,
        num_pages=used_pages,
        num_cached_pages=0 if stats is None else stats.evictable_pages,
        max_total_pages=0 if stats is None else stats.total_pages,
    )
