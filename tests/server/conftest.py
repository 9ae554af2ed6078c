"""Servers that several files of these tests share. Tests must not change their state."""

import pytest


@pytest.fixture(scope="session")
def thinking_server(tmp_path_factory):
    """Serve the demo model with tags around reasoning, without a key and without a folder for files.

    A test may load other weights from `it.checkpoints` if it restores those of `it.model`.
    """
    from graftlm.testing.server_process import ServerProcess
    from graftlm.testing.thinking_checkpoint import write_thinking_checkpoint

    checkpoints = tmp_path_factory.mktemp("thinking")
    model = checkpoints / "demo"
    write_thinking_checkpoint(model)
    settings = {
        "served_model_name": "demo",
        "open_admin": True,
        "clip_max_tokens": True,
        "checkpoint_roots": [str(checkpoints)],
        "profile_dir": str(checkpoints / "profiles"),
    }
    config = {"model": str(model), "memory": {"kv_tokens": 8192}, "server": settings}
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as it:
        it.checkpoints, it.model = checkpoints, model
        yield it


@pytest.fixture(scope="session")
def head_server(tmp_path_factory):
    """Serve a small model with a score head of one output; `model` is its folder."""
    from graftlm.testing.server_process import ServerProcess
    from graftlm.testing.tiny_models import write_tiny_checkpoint

    model = write_tiny_checkpoint(tmp_path_factory.mktemp("head"), "qwen3", 5, num_labels=1, tokenizer=True)
    config = {"model": str(model), "memory": {"kv_tokens": 1024}, "server": {"served_model_name": "tiny"}}
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as it:
        it.model = model
        yield it


@pytest.fixture(scope="session")
def keyed_server(tmp_path_factory):
    """Run a server with keys; `profile_dir` is its folder of profiles, `config` its configuration."""
    from graftlm.testing.server_process import ServerProcess

    profile_dir = tmp_path_factory.mktemp("profiles")
    settings = {
        "api_key": "s3cret-of-users",
        "admin_api_key": "s3cret-of-admins",
        "profile_dir": str(profile_dir),
        "max_body_bytes": 4096,
        "cors_origins": ["https://chat.example"],
        "files": {"path": str(tmp_path_factory.mktemp("files")), "max_file_bytes": 100, "max_bytes": 150},
    }
    config = {"model": "demo", "memory": {"kv_tokens": 4096}, "server": settings}
    arguments = ["--log-format", "json", "--log-level", "debug"]
    with ServerProcess(config, arguments, environment={"OMP_NUM_THREADS": "1"}) as it:
        it.profile_dir, it.config = profile_dir, config
        yield it


@pytest.fixture(scope="session")
def drafting_server():
    """Run a server that drafts tokens, exposes aliases of its metrics and often logs its load. It writes JSON lines."""
    from graftlm.testing.server_process import ServerProcess

    config = {
        "model": "demo",
        "cache": {"page_size": 4},
        "memory": {"kv_tokens": 8192},
        "speculation": "auto",
        "server": {"metrics_aliases": ["vllm", "sglang"], "log_interval_s": 0.2, "log_format": "json"},
    }
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as it:
        yield it


@pytest.fixture(scope="session")
def weights_server():
    """Run a server whose weights and memory may change. Each test restores them."""
    from graftlm.testing.server_process import ServerProcess

    settings = {"open_admin": True, "restart": True, "trainer_timeout_s": 5.0}
    config = {"model": "demo", "memory": {"kv_tokens": 8192}, "server": settings}
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as it:
        yield it
