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
    """Return the routes; both are an administrator's: they read the server's files and change what others see."""
    paths = CheckpointPaths(manager.config)
    router = APIRouter(
        tags=["adapters"],
        dependencies=[Depends(require_admin)],
        responses={status: ERROR_RESPONSES[status] for status in (400, 403, 404, 503)},
    )

    @router.post("/load_lora_adapter", summary="Load an adapter into every replica, while requests go on")
    async def load_lora_adapter(body: LoadAdapterRequest) -> AdaptersChanged:
        await manager.adapters.load(body.lora_name, paths.admit(body.lora_path, "lora_path"))
        message = f"adapter {body.lora_name} is loaded, as model {manager.model.id_with(body.lora_name)}"
        return AdaptersChanged(message=message, loaded_adapters=manager.adapters.paths)

    @router.post("/unload_lora_adapter", summary="Take no more requests for an adapter; those under way end with it")
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> AdaptersChanged:
        num_left = await manager.adapters.unload(body.lora_name)
        message = f"adapter {body.lora_name} is unloaded; {num_left} requests under way end with it"
        return AdaptersChanged(message=message, loaded_adapters=manager.adapters.paths)

    return router
