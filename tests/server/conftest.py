"""Servers that several files of these tests share. Tests must not change their state."""

import pytest


@pytest.fixture(scope="session")
def thinking_server(tmp_path_factory):
    """Serve the demo model with tags around reasoning, without a key and without a folder for files."""
    from graftlm.testing.server_process import ServerProcess
    from graftlm.testing.thinking_checkpoint import write_thinking_checkpoint

    folder = tmp_path_factory.mktemp("thinking") / "demo"
    write_thinking_checkpoint(folder)
    config = {"model": str(folder), "memory": {"kv_tokens": 8192}, "server": {"served_model_name": "demo"}}
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as it:
        yield it


@pytest.fixture(scope="session")
def keyed_server(tmp_path_factory):
    """Run a server with keys; `profile_dir` is its folder of profiles."""
    from graftlm.testing.server_process import ServerProcess

    profile_dir = tmp_path_factory.mktemp("profiles")
    settings = {
        "api_key": "s3cret-of-users",
        "admin_api_key": "s3cret-of-admins",
        "profile_dir": str(profile_dir),
        "max_body_bytes": 4096,
        "cors_origins": ["https://chat.example"],
    }
    config = {"model": "demo", "memory": {"kv_tokens": 4096}, "server": settings}
    arguments = ["--log-format", "json", "--log-level", "debug"]
    with ServerProcess(config, arguments, environment={"OMP_NUM_THREADS": "1"}) as it:
        it.profile_dir = profile_dir
        yield it
