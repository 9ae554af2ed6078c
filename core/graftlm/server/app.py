"""The HTTP application with its routes and middleware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import graftlm
from graftlm.config import EngineConfig
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server import anthropic, native, openai
from graftlm.server.batches import FILES_PATH
from graftlm.server.dashboard import PAGE_PATHS
from graftlm.server.errors import ErrorBody, install_error_handlers
from graftlm.server.middleware import PROBES, ApiKeyAuth, BodyLimit, HostGuard, OriginGuard, RequestLog
from graftlm.server.traces import tracing_layers

if TYPE_CHECKING:
    from graftlm.server.traces.exporter import TraceExporter

__all__ = ["create_app", "create_local_app"]

_HEALTH_PATHS: Final = frozenset({"/health", "/health_generate", "/ready", "/ping"})
#: Paths that need no API key: health checks of load balancers, and the page in which users enter the key.
OPEN_PATHS: Final = _HEALTH_PATHS | PAGE_PATHS

#: Paths where a GET request has an effect. SGLang's clients send GET requests to these paths.
_CHANGING_GETS: Final = frozenset({"/flush_cache", "/start_profile", "/stop_profile"})

#: Maximum number of bytes that the form of an upload adds to the size of the file.
_FORM_BYTES: Final = 1 << 16

_TAGS: Final = [
    {"name": "openai", "description": "The interface of OpenAI's clients."},
    {"name": "anthropic", "description": "Anthropic's Messages API."},
    {"name": "batches", "description": "OpenAI's files and batches, if `server.files.path` is set."},
    {"name": "generate", "description": "SGLang's native interface."},
    {"name": "information", "description": "Health, model, configuration and load of the server."},
    {"name": "cache", "description": "Pins in the prefix cache, and the content of the cache. For operators."},
    {"name": "memory", "description": "Release and resume memory. For administrators, except `/is_sleeping`."},
    {"name": "weights", "description": "Replace and show the model's weights. For administrators."},
    {"name": "adapters", "description": "Load and unload low-rank adapters. For administrators."},
    {
        "name": "control",
        "description": "Abort, flush, pause, profile. For operators, except aborts of single requests.",
    },
]


def create_app(
    manager: TokenizerManager,
    *,
    api: APIRouter | None = None,
    extra_routers: Sequence[APIRouter] = (),
    traces: TraceExporter | None = None,
) -> FastAPI:
    """Return the application.

    Args:
        manager: receives the requests of all routes.
        api: the routes of OpenAI's API; None to create them.
        extra_routers: further routes with the same middleware.
        traces: exports a span for each request; None if requests are not traced.
    """
    app = FastAPI(
        title="graftlm",
        version=graftlm.__version__,
        summary="Serves a large language model through OpenAI's, Anthropic's and SGLang's interfaces.",
        openapi_tags=_TAGS,
        responses={"4XX": {"model": ErrorBody, "description": "The request is refused; the body has the reason."}},
        dependencies=_documented_keys(manager.config),
        middleware=_middleware(manager, traces),
        telemetry=_without_spans(traces is not None),
        # Disabled, because FastAPI's documentation pages load scripts from another host. Such scripts could call this
        # server.
        docs_url=None,
        redoc_url=None,
    )
    install_error_handlers(app)
    own = [api or openai.make_router(manager), anthropic.make_router(manager), native.make_router(manager)]
    for router in (*own, *extra_routers):
        app.include_router(router)
    return app


def create_local_app(api: APIRouter, tracing: Sequence[Middleware] = ()) -> FastAPI:
    """Return an application with the routes of `api`, for calls within this process.

    The application does not check keys, hosts or origins.

    Args:
        tracing: the layer that traces the calls; empty if they are not traced.
    """
    app = FastAPI(openapi_url=None, middleware=list(tracing), telemetry=_without_spans(bool(tracing)))
    install_error_handlers(app)
    app.include_router(api)
    return app


def _without_spans(is_traced: bool) -> Any:
    """Return settings with which FastAPI creates no spans, if this server creates them.

    FastAPI creates spans if a plugin or a launcher has installed a global provider of OpenTelemetry. Versions of
    FastAPI without this feature ignore the settings.
    """
    return {"tracing": False} if is_traced else None


def _documented_keys(config: EngineConfig) -> list[Any]:
    """Return the dependencies that put the API keys into the OpenAPI document.

    The dependencies check nothing, because `ApiKeyAuth` checks the keys before a request reaches a route.
    """
    if config.server.api_key is None and config.server.admin_api_key is None:
        return []
    return [Depends(HTTPBearer(auto_error=False, description="The value of server.api_key or server.admin_api_key"))]


def _middleware(manager: TokenizerManager, traces: TraceExporter | None) -> list[Middleware]:
    """Return the middleware, outermost first."""
    server = manager.config.server
    cors = Middleware(
        CORSMiddleware,
        allow_origins=server.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )
    return [
        Middleware(anthropic.AnthropicErrors),
        Middleware(RequestLog),
        Middleware(HostGuard, host=server.host, allowed=server.allowed_hosts, probe_paths=_HEALTH_PATHS),
        *([cors] if server.cors_origins else []),
        Middleware(OriginGuard, allowed=server.cors_origins, guarded_paths=_CHANGING_GETS),
        Middleware(
            ApiKeyAuth,
            api_key=server.api_key,
            admin_api_key=server.admin_api_key,
            open_paths=OPEN_PATHS,
            host=server.host,
            open_admin=server.open_admin,
            takes_key_header=anthropic.is_messages_path,
        ),
        # Inside the checks above: refused clients create no spans.
        *tracing_layers(traces, manager.model.name, ignored_paths=PROBES | _HEALTH_PATHS | PAGE_PATHS),
        Middleware(
            BodyLimit,
            max_bytes=server.max_body_bytes,
            other_limits={FILES_PATH: (server.files.max_file_bytes + _FORM_BYTES, "server.files.max_file_bytes")},
        ),
    ]
