"""The native routes that load and unload adapters."""

from fastapi import APIRouter, Depends

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.middleware import require_admin
from graftlm.server.native.checkpoint_paths import CheckpointPaths
from graftlm.server.native.requests import LoadAdapterRequest, UnloadAdapterRequest
from graftlm.server.native.responses import AdaptersChanged

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router for administrators only, since its routes read the server's files and affect other clients."""
    paths = CheckpointPaths(manager.config)
    router = APIRouter(
        tags=["adapters"],
        dependencies=[Depends(require_admin)],
        responses={status: ERROR_RESPONSES[status] for status in (400, 403, 404, 503)},
    )

    @router.post("/v1/load_lora_adapter", summary="As /load_lora_adapter")
    @router.post("/load_lora_adapter", summary="Load an adapter into every replica while requests run")
    async def load_lora_adapter(body: LoadAdapterRequest) -> AdaptersChanged:
        await manager.adapters.load(body.lora_name, paths.admit(body.lora_path, "lora_path"))
        message = f"adapter {body.lora_name} is loaded; its model name is {manager.model.id_with(body.lora_name)}"
        return AdaptersChanged(message=message, loaded_adapters=manager.adapters.paths)

    @router.post("/v1/unload_lora_adapter", summary="As /unload_lora_adapter")
    @router.post("/unload_lora_adapter", summary="Unload an adapter as soon as its running requests have ended")
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> AdaptersChanged:
        num_left = await manager.adapters.unload(body.lora_name)
        message = f"adapter {body.lora_name} is unloaded; {num_left} running requests still use it until they end"
        return AdaptersChanged(message=message, loaded_adapters=manager.adapters.paths)

    return router
