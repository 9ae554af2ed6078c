"""`model.download`: a hub's model is downloaded before the start, completed after an interruption, and used offline."""

import os
import subprocess
import sys

import pytest

from graftlm.demo import demo_checkpoint

from .hub import serve_hub

NAME = "someone/small"
PROGRAM = f"""
from graftlm import Engine, SamplingParams
with Engine(model={{"path": "{NAME}", "download": True}}) as engine:
    print(engine.generate([[{{"role": "user", "content": "What is the capital of France?"}}]],
                          SamplingParams(temperature=0))[0].text)
"""


@pytest.fixture
def hub():
    with serve_hub({NAME: demo_checkpoint()}) as hub:
        yield hub


@pytest.fixture
def run(hub, tmp_path):
    """Run a command with a cache of its own and this hub."""

    def run(*arguments, url=hub.url):
        names = {
            "HF_ENDPOINT": url,
            "HF_HOME": str(tmp_path),
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "HF_HUB_ETAG_TIMEOUT": "2",
        }
        done = subprocess.run(
            [sys.executable, *arguments], env=os.environ | names, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.full
def test_a_model_is_downloaded_once_and_then_used_offline(run, hub):
    status, out, err = run("-c", PROGRAM)
    assert status == 0, err
    assert "Paris" in out
    assert hub.gets_of("model.safetensors") == 1
    assert hub.gets_of("README.md") == 0
    status, out, err = run("-c", PROGRAM)
    assert status == 0, err
    assert hub.gets_of("model.safetensors") == 1
    status, out, err = run("-c", PROGRAM, url="http://127.0.0.1:9")
    assert status == 0, err
    assert "Paris" in out


@pytest.mark.full
def test_an_interrupted_download_is_completed(run, hub):
    hub.stop_after = 1_000_000
    status, _, err = run("-c", PROGRAM)
    assert status != 0
    hub.stop_after = None
    status, out, err = run("-c", PROGRAM)
    assert status == 0, err
    assert "Paris" in out


SERVE = ("-c", "from graftlm.cli import main; main()", "serve", "--set", "model.download=true", "--port", "0")


def test_a_dry_run_downloads_nothing_and_a_missing_model_is_reported(run, hub):
    status, out, err = run(*SERVE, NAME, "--dry-run")
    assert status == 0, err
    assert f"model: {NAME} is not in the local cache; the start downloads it" in out
    assert hub.gets_of("config.json") == 0
    status, _, err = run(*SERVE, "someone/missing")
    assert status == 2
    assert "model.path 'someone/missing' cannot be downloaded" in err


@pytest.mark.full
def test_a_hub_that_cannot_be_reached_is_reported(run):
    status, _, err = run(*SERVE, NAME, url="http://127.0.0.1:9")
    assert status == 2
    assert f"model.path '{NAME}' cannot be downloaded" in err
