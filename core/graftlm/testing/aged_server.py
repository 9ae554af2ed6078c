"""Prepares a server for tests that kill its processes: uses every feature that changes a process's state.

A grammar loads a compiler and its OpenMP runtime into the main process. An adapter, new weights and a profile change
the state of the scheduler processes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from safetensors.torch import load_file, save, save_file

from graftlm.checkpoint import resolve_checkpoint
from graftlm.testing.server_process import ServerProcess, wait_until

__all__ = ["NORM", "age", "ageable", "bring_back", "call", "renew_weights", "rolled_norm", "write_random_adapter"]

#: Name of the weight that `rolled_norm` changes.
NORM: Final = "model.norm.weight"
_TIMEOUT_S = 120.0
_SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
_GRAMMARS: Final[tuple[Mapping[str, str], ...]] = (
    {"json_schema": json.dumps(_SCHEMA)},
    {"regex": "[0-9]{1,3}"},
    {"ebnf": 'root ::= "yes" | "no"'},
)


def ageable(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration with the settings that `age` also needs: administration, adapters, a profile folder."""
    defaults = {"open_admin": True, "checkpoint_roots": [str(folder)], "profile_dir": str(folder / "profiles")}
    server = defaults | dict(config.get("server") or {})
    return {"lora": {"enabled": True, "max_rank": 8}} | dict(config) | {"server": server}


def age(url: str, folder: Path, model: str = "demo", adapter: str = "aged") -> None:
    """Use all features of a server that change the state of a process: grammars, an adapter, new weights, a profile.

    Effects: the adapter stays loaded; the original weights of the model are loaded again.

    Args:
        url: URL of a server whose configuration comes from `ageable`.
        folder: folder to which the adapter is written.
        model: path of the served checkpoint.
        adapter: name of the adapter.

    Raises:
        RuntimeError: the server refuses a request.
    """
    for grammar in _GRAMMARS:
        generate(url, "2 plus 3", **grammar)
    path = write_random_adapter(folder / adapter, resolve_checkpoint(model))
    call(url, "/load_lora_adapter", {"lora_name": adapter, "lora_path": str(path)})
    call(url, "/generate", _body("2 plus 3") | {"lora_path": adapter})
    call(url, "/update_weights_from_tensor", rolled_norm(model, 1))
    renew_weights(url, model)
    call(url, "/start_profile", {"activities": ["CPU"]})
    generate(url, "2 plus 3")
    call(url, "/stop_profile", {})


def bring_back(server: ServerProcess, model: str = "demo", timeout_s: float = 60.0) -> None:
    """Wait until a server is healthy again. If a restarted replica does not have the current weights, update them.

    Raises:
        TimeoutError: the server is not healthy after `timeout_s`.
    """

    def is_well() -> bool:
        try:
            with urlopen(server.url + "/health", timeout=5) as answer:
                problems = answer.read().decode()
                is_healthy = True
        except HTTPError as error:
            problems, is_healthy = error.read().decode(), False
        if "current weights" in problems:
            renew_weights(server.url, model)
            return False
        return is_healthy and "died" not in problems

    wait_until(is_well, timeout_s, "health")


def renew_weights(url: str, model: str = "demo") -> None:
    """Make a server load the weights of its model again.

    Raises:
        RuntimeError: the server refuses the request.
    """
    call(url, "/update_weights_from_disk", {"model_path": model, "weight_version": "default"})


def generate(url: str, text: str, **sampling: Any) -> Any:
    """Send a short greedy request to /generate and return the answer.

    Raises:
        RuntimeError: the server refuses the request.
    """
    return call(url, "/generate", _body(text, **sampling))


def call(url: str, path: str, body: Mapping[str, Any] | bytes) -> Any:
    """Send a POST request with JSON or bytes, and return the JSON of the answer.

    Raises:
        RuntimeError: the status is not 200.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    try:
        with urlopen(Request(url + path, data, {"Content-Type": kind}), timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        raise RuntimeError(f"{path}: {error.code} {error.read().decode(errors='replace')}") from error


def rolled_norm(model: str, shift: int) -> bytes:
    """Return the content of a safetensors file with the weight of the model's last norm, rolled by `shift` elements.

    Rolling changes the most probable token; scaling would not.
    """
    files = sorted(resolve_checkpoint(model).glob("*.safetensors"))
    (norm,) = [tensors[NORM] for tensors in map(load_file, files) if NORM in tensors]
    return save({NORM: norm.roll(shift)})


def write_random_adapter(folder: Path, checkpoint: Path, seed: int = 0, rank: int = 4) -> Path:
    """Write a random adapter of a Llama checkpoint's query projections in the format of `peft`.

    Returns: the folder.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden_size // num_heads
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden_size, generator=generator) * 0.2
        tensors[f"{name}.lora_B.weight"] = torch.randn(num_heads * head_dim, rank, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _body(text: str, **sampling: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 8} | sampling}
