"""The examples of docs/server.md run unchanged and give the documented results."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:30000"


def blocks(language, page=PAGE):
    return re.findall(rf"```{language}\b[^\n]*\n(.*?)```", page, re.DOTALL)


@pytest.mark.parametrize("command", blocks("bash"), ids=lambda command: re.search(r"30000(/\S+)", command)[1])
def test_a_curl_example_succeeds(command, server):
    done = subprocess.run(
        command.replace("curl ", "curl --fail-with-body ").replace(ADDRESS, server.url),
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream": true' in command:
        events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        assert events[-1] == "[DONE]"
        assert all(json.loads(event) for event in events[:-1])
    else:
        answer = json.loads(done.stdout)
        assert isinstance(answer, list) or not answer.get("error")  # responses have a null there


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_example_runs(code, server, capsys):
    exec(compile(code.replace(ADDRESS, server.url), "server.md", "exec"), {})
    assert "Friday" in capsys.readouterr().out


@pytest.mark.parametrize("code", [code for code in blocks("python", README) if "openai" in code])
def test_the_readmes_client_example_runs(code, server, capsys):
    code = code.replace(ADDRESS, server.url).replace("Qwen3-8B", "demo")
    exec(compile(code, "README.md", "exec"), {})
    assert "2 + 3 = 5." in capsys.readouterr().out


def test_every_path_of_the_api_is_documented(server):
    import requests

    paths = requests.get(server.url + "/openapi.json", timeout=10).json()["paths"]
    missing = [path for path in paths if f"{path}`" not in PAGE and f"{path.replace('{model}', '')}" not in PAGE]
    assert not missing
