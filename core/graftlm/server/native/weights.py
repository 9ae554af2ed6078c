"""The native routes that replace and return the model's weights, for training while the model is served."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.processes.weight_groups import GroupAddress
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.middleware import require_admin
from graftlm.server.native.checkpoint_paths import CheckpointPaths
from graftlm.server.native.requests import (
    DestroyGroupRequest,
    InitGroupRequest,
    UpdateFromDiskRequest,
    UpdateFromGroupRequest,
    WeightRequest,
    WeightVersionRequest,
)
from graftlm.server.native.responses import Done, WeightsNamed, WeightsUpdated

__all__ = ["make_router"]

#: The description of the body in the OpenAPI document, since the body is not JSON.
_SAFETENSORS: Final = {
    "requestBody": {
        "required": True,
        "description": "The content of a safetensors file: names and shapes as in a checkpoint.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the routes of this module. All are for administrators."""
    paths = CheckpointPaths(manager.config)
    router = APIRouter(
        tags=["weights"],
        dependencies=[Depends(require_admin)],
        responses={status: ERROR_RESPONSES[status] for status in (400, 403, 413, 503)},
    )

    @router.post(
        "/update_weights_from_disk", summary="Replace the weights with those of another checkpoint of this model"
    )
    async def update_from_disk(body: UpdateFromDiskRequest) -> WeightsUpdated:
        num_paused = await manager.weights.update(
            paths.admit(body.model_path, "model_path"),
            None,
            flush_cache=body.flush_cache is not False,
            abort_all=bool(body.abort_all_requests),
            version=body.weight_version,
        )
        return _updated(body.model_path, num_paused)

    @router.post(
        "/update_weights_from_tensor",
        summary="Replace weights with those in the body, which is a safetensors file",
        openapi_extra=_SAFETENSORS,
    )
    async def update_from_tensor(
        request: Request,
        flush_cache: Annotated[
            bool, Query(description="Discard the KV cache that was computed with the former weights.")
        ] = True,
        abort_all_requests: Annotated[
            bool,
            Query(
                description="Abort the current requests. If false, the update waits until they have ended, unless "
                "generation is paused."
            ),
        ] = False,
        weight_version: Annotated[
            str | None,
            Query(
                max_length=256,
                description="A name for the new weights, which answers contain. Null: the name is unchanged.",
            ),
        ] = None,
    ) -> WeightsUpdated:
        tensors = await request.body()
        num_paused = await manager.weights.update(
            None, tensors, flush_cache=flush_cache, abort_all=abort_all_requests, version=weight_version
        )
        return _updated(f"{len(tensors):,} bytes", num_paused)

    @router.post("/init_weights_update_group", summary="Join a trainer's group, with one rank for each replica")
    async def init_group(body: InitGroupRequest) -> Done:
        address = GroupAddress(
            master_address=body.master_address,
            master_port=body.master_port,
            rank_offset=body.rank_offset,
            world_size=body.world_size,
            backend=body.backend,
        )
        await manager.groups.join(body.group_name, address)
        return Done(message=f"joined the group {body.group_name}")

    @router.post(
        "/update_weights_from_distributed", summary="Replace weights with tensors that rank 0 of a group broadcasts"
    )
    async def update_from_group(body: UpdateFromGroupRequest) -> WeightsUpdated:
        num_paused = await manager.groups.update(
            body.group_name,
            body.names,
            body.dtypes,
            body.shapes,
            flush_cache=body.flush_cache is not False,
            abort_all=bool(body.abort_all_requests),
            version=body.weight_version,
        )
        return _updated(f"{len(body.names)} tensors of the group {body.group_name}", num_paused)

    @router.post("/destroy_weights_update_group", summary="Leave a trainer's group")
    async def destroy_group(body: DestroyGroupRequest) -> Done:
        await manager.groups.destroy(body.group_name)
        return Done(message=f"left the group {body.group_name}")

    @router.post("/update_weight_version", summary="Change the name of the weights, and not the weights themselves")
    async def update_weight_version(body: WeightVersionRequest) -> WeightsNamed:
        if body.abort_all_requests is not False:
            manager.abort_all()
        manager.weights.version = body.new_version
        return WeightsNamed(message=f"the name of the weights is now {body.new_version}", new_version=body.new_version)

    @router.post("/get_weights_by_name", summary="Return the first rows of a weight, as numbers")
    async def get_weight(body: WeightRequest) -> Any:
        found = await manager.calls.call_schedulers("get_weight", weight=body.name, num_rows=body.truncate_size)
        return found[0]

    return router


def _updated(source: str, num_paused: int) -> WeightsUpdated:
    return WeightsUpdated(message=f"the weights are now those of {source}", num_paused_requests=num_paused)
