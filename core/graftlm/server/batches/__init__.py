"""OpenAI's Files and Batches APIs."""

import time
from functools import partial
from pathlib import Path

from fastapi import APIRouter
from starlette.types import ASGIApp

from graftlm.config import EngineConfig
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.batches.files_routes import FILES_PATH
from graftlm.server.batches.folder import BatchFolder
from graftlm.server.batches.local_calls import LocalCalls
from graftlm.server.batches.routes import make_router, make_router_without_folder
from graftlm.server.batches.service import BatchService

__all__ = ["FILES_PATH", "BatchService", "make_batch_router", "make_batch_service"]


def make_batch_service(manager: TokenizerManager, api: ASGIApp) -> BatchService | None:
    """Return the service that runs batches; None if the configuration has no folder for them.

    Args:
        api: the application that answers the requests, without the check of API keys.

    Raises:
        ConfigError: the folder cannot be used.
    """
    server = manager.config.server
    path = server.files.path
    if path is None:
        return None
    num_others = partial(manager.num_requests_above, server.batches.priority)
    return BatchService(BatchFolder(Path(path), time.time), LocalCalls(api), server.batches, num_others)


def make_batch_router(service: BatchService | None, config: EngineConfig) -> APIRouter:
    """Return a router for files and batches."""
    return make_router_without_folder() if service is None else make_router(service, config.server)
