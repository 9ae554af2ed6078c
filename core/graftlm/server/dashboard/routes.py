"""The dashboard's routes, which return the page and its data."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Query

import graftlm
from graftlm.processes.replicas import Replica
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.dashboard import pages
from graftlm.server.dashboard.history import History, Point
from graftlm.server.dashboard.tree_reader import TreeReader
from graftlm.server.middleware import require_operator

__all__ = ["make_router"]

_MAX_NODES: Final = 300


def make_router(manager: TokenizerManager, history: History) -> APIRouter:
    """Return a router for the page and its data. The data routes are not a public interface.

    Args:
        history: the load. It takes its points while the application runs.
    """
    tree = TreeReader(manager, time.monotonic, _MAX_NODES)
    about = _about(manager)

    @contextlib.asynccontextmanager
    async def keep_history(app: FastAPI) -> AsyncIterator[None]:
        sampling = asyncio.create_task(history.run())
        yield
        sampling.cancel()

    router = APIRouter(include_in_schema=False, lifespan=keep_history)
    router.include_router(pages.make_router())

    @router.get("/dashboard/state")
    async def read_state(after: Annotated[float, Query(allow_inf_nan=False)] = 0.0) -> dict[str, Any]:
        health = manager.health
        return {
            "about": about,
            "now_s": time.monotonic(),
            "health": {"ok": health.ok, "draining": health.draining, "problems": health.problems},
            "replicas": [_state(replica) for replica in manager.replicas.replicas],
            "fields": Point._fields,
            "points": history.after(after),
        }

    # only for operators, because the tree contains the prompts of all clients
    @router.post("/dashboard/tree", dependencies=[Depends(require_operator)])
    async def read_tree() -> dict[str, Any]:
        return {"trees": await tree.read()}

    return router


def _about(manager: TokenizerManager) -> dict[str, Any]:
    """Return the data that does not change while the server runs. `run` is a random id of the current run."""
    model = manager.model
    return {
        "run": uuid.uuid4().hex,
        "version": graftlm.__version__,
        "model": model.name,
        "dtype": model.dtype,
        "context_len": model.context_len,
        "has_chat_template": model.has_chat_template,
        "page_size": manager.config.cache.page_size,
        "start_s": time.monotonic(),
    }


def _state(replica: Replica) -> dict[str, Any]:
    stats = None if replica.load is None else asdict(replica.load.stats)
    return {"name": replica.name, "ready": replica.ready, "stats": stats}
