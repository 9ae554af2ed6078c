"""Access to routes and to checkpoint paths, tested on all routes of the application."""

import os
import time
from unittest.mock import AsyncMock, Mock

import pytest

from graftlm.config import EngineConfig
from graftlm.processes.replicas import ReplicaSet
from graftlm.server.app import create_app
from graftlm.server.batches import make_batch_router
from graftlm.server.dashboard import History
from graftlm.server.dashboard import make_router as make_dashboard_router
from graftlm.server.errors import ApiError
from graftlm.server.metrics import ServerMetrics
from graftlm.server.metrics import make_router as make_metrics_router
from graftlm.server.native.checkpoint_paths import CheckpointPaths
from graftlm.testing.asgi import call

ADMIN = {
    "/update_weights_from_disk": b'{"model_path": "demo"}',
    "/update_weights_from_tensor": b"",
    "/get_weights_by_name": b'{"name": "a"}',
    "/update_weight_version": b'{"new_version": "a"}',
    "/init_weights_update_group": b'{"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2}',
    "/update_weights_from_distributed": b'{"names": [], "dtypes": [], "shapes": []}',
    "/destroy_weights_update_group": b"{}",
    "/release_memory_occupation": b"",
    "/resume_memory_occupation": b"",
    "/sleep": b"",
    "/wake_up": b"",
    "/load_lora_adapter": b'{"lora_name": "a", "lora_path": "/a"}',
    "/unload_lora_adapter": b'{"lora_name": "a"}',
    "/v1/load_lora_adapter": b'{"lora_name": "a", "lora_path": "/a"}',
    "/v1/unload_lora_adapter": b'{"lora_name": "a"}',
}
OPERATOR = {
    "/flush_cache": b"",
    "/reset_prefix_cache": b"",
    "/pause_generation": b"",
    "/continue_generation": b"",
    "/start_profile": b"",
    "/stop_profile": b"",
    "/pin_prefix": b'{"text": "a"}',
    "/unpin_prefix": b'{"text": "a"}',
    "/abort_request": b'{"abort_all": true}',
    "/dashboard/tree": b"",
}
CLIENT = {
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/tokenize"),
    *("/v1/detokenize", "/generate", "/classify", "/score", "/rerank", "/v2/rerank", "/tokenize", "/detokenize"),
    *("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/{response_id}/cancel"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"),
    *("/encode", "/v1/classify", "/parse_function_call", "/separate_reasoning"),
    # Also single aborts.
    "/abort_request",
}


def application(**server):
    manager = Mock(config=EngineConfig(server=server), replicas=ReplicaSet(["scheduler-0"], can_recover=False))
    manager.calls.call_schedulers = AsyncMock(return_value=[])
    batches = make_batch_router(Mock(), manager.config)
    history = History(manager.replicas.replicas, time.monotonic)
    routers = [make_metrics_router(ServerMetrics()), make_dashboard_router(manager, history), batches]
    return create_app(manager, extra_routers=routers)


async def is_refused(app, path, body, key, client, method="POST"):
    headers = [("Host", "127.0.0.1:30000"), ("Content-Type", "application/json")]
    headers += [("Authorization", f"Bearer {key}")] if key else []
    answer = await call(app, method, path, headers, [body], client=(client, 5000))
    if answer.status == 403:
        assert "server.admin_api_key" in answer.json["error"]["message"]
    return answer.status == 403


def test_every_post_route_has_a_role():
    paths = application().openapi()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods} | {"/dashboard/tree"}
    assert posts <= ADMIN.keys() | OPERATOR.keys() | CLIENT
    assert ADMIN.keys() | OPERATOR.keys() <= posts


@pytest.mark.parametrize(
    ("server", "key", "client", "may_operate", "may_administer"),
    [
        ({}, None, "127.0.0.1", True, False),
        ({}, None, "192.0.2.1", False, False),
        ({"host": "0.0.0.0", "allow_anonymous": True}, None, "127.0.0.1", False, False),
        ({"api_key": "key"}, "key", "127.0.0.1", False, False),
        ({"admin_api_key": "admin"}, None, "127.0.0.1", False, False),
        ({"admin_api_key": "admin"}, "admin", "192.0.2.1", True, True),
        ({"api_key": "key", "admin_api_key": "admin"}, "key", "127.0.0.1", False, False),
        ({"api_key": "key", "admin_api_key": "admin"}, "admin", "127.0.0.1", True, True),
        ({"open_admin": True}, None, "127.0.0.1", True, True),
        ({"api_key": "key", "open_admin": True}, "key", "192.0.2.1", True, True),
    ],
)
async def test_every_route_is_refused_as_the_table_in_the_docs_says(server, key, client, may_operate, may_administer):
    app = application(**server)
    for path, body in OPERATOR.items():
        assert await is_refused(app, path, body, key, client) != may_operate, path
    for path in ("/flush_cache", "/cache_snapshot"):
        assert await is_refused(app, path, b"", key, client, "GET") != may_operate, path
    for path, body in ADMIN.items():
        if not may_administer or path not in (
            "/load_lora_adapter",
            "/v1/load_lora_adapter",
        ):  # this route refuses the path
            assert await is_refused(app, path, body, key, client) != may_administer, path


@pytest.mark.parametrize(("path", "is_served"), [("/health", True), ("/", False), ("/server_info", False)])
async def test_only_health_checks_are_served_under_unlisted_hosts(path, is_served):
    app = application(host="0.0.0.0", allow_anonymous=True, allowed_hosts=["llm.example.org"])
    answer = await call(app, "GET", path, [("Host", "10.1.2.3:30000")])
    assert (answer.status != 403) == is_served


@pytest.fixture
def places(tmp_path):
    """Folders inside and outside of the checkpoint roots, with symbolic links between them."""
    for name in ("model", "adapter", "root/inner", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "loop").symlink_to(tmp_path / "root" / "loop")
    (tmp_path / "in").symlink_to(tmp_path / "root" / "inner")
    return tmp_path


def checkpoint_paths(places):
    return CheckpointPaths(
        EngineConfig(
            model=str(places / "model"),
            lora={"adapters": {"a": str(places / "adapter")}},
            server={"checkpoint_roots": [str(places / "root")]},
        )
    )


@pytest.mark.parametrize(
    ("path", "admitted"),
    [
        ("model", "model"),
        ("model/epoch-1", "model/epoch-1"),
        ("adapter", "adapter"),
        ("root", "root"),
        ("root/inner", "root/inner"),
        ("root/missing", "root/missing"),
        ("root/inner/../inner/.", "root/inner"),
        ("in", "root/inner"),
    ],
)
def test_paths_in_the_roots_are_admitted_with_links_resolved(places, path, admitted):
    assert checkpoint_paths(places).admit(f"{places}/{path}", "p") == os.path.realpath(places / admitted)


@pytest.mark.parametrize(
    "path",
    [
        *("{}", "{}/outside", "{}/missing", "{}/root/..", "{}/root/out", "{}/root/out/x", "{}/root2", "{}/model/../x"),
        *("{}/model\x00", "{}/\ud800", "/", "/etc", "~", "~root", "demo", "root", ".", "", "{}/" + "x" * 100_000),
    ],
)
def test_all_other_paths_are_refused_with_the_same_message(places, path):
    with pytest.raises(ApiError) as refused:
        checkpoint_paths(places).admit(path.replace("{}", str(places)), "lora_path")
    assert (refused.value.status, refused.value.code) == (403, "path_not_allowed")
    assert str(refused.value) == (
        "lora_path is outside the folders that clients may use; list its folder in server.checkpoint_roots"
    )


def test_the_name_of_the_served_model_is_admitted_unchanged(tmp_path, monkeypatch):
    paths = CheckpointPaths(EngineConfig(model="demo"))
    assert paths.admit("demo", "model_path") == "demo"
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ApiError):
        paths.admit("./demo", "model_path")
