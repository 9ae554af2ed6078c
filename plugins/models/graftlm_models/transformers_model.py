"""Serves any decoder-only architecture with Transformers' own module and paged attention."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.contracts import AttentionBackend, AttentionLayer, ForwardBatch, Model, ModelContext
from graftlm.errors import ModelError, UnsupportedArchitectureError
from graftlm.layers import WeightSlot, copy_weights
from graftlm_models.transformers_attention import PAGED, PROBE, register_attention, try_attention
from graftlm_models.transformers_weights import CheckpointNames

__all__ = ["TransformersModel"]


class TransformersModel(nn.Module, Model):
    """Maps tokens to logits with a causal language model of Transformers.

    The module receives a step's tokens as one sequence [1, T], with their positions. Its parts process each token
    separately, except attention, which reads pages. A trial run records the arguments that the module passes to
    attention.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.causal = _build(context)
        body = _body_of(self.causal)
        self._is_twin = context.device.type == "meta"
        if self._is_twin:
            return  # a trial run is not possible on the meta device; such a model is only used to check weights
        for parameter in self.causal.parameters():
            parameter.zero_()
        self._calls, hidden = try_attention(body, _context_len(context), context.device)
        self._head = _Head(self.causal, body, hidden)
        self.causal.config._attn_implementation = PAGED
        self._body_path = _path_of(self.causal, body)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The layers of the attention calls, one per call, in the order of the calls.

        Raises:
            ModelError: this model is on the meta device, where no trial run is possible.
        """
        if self._is_twin:
            raise ModelError(
                f"The attention layers of {type(self.causal).__name__} are known only after a trial run, which is not "
                f"possible on the meta device. Create the model on another device"
            )
        return self._calls.layers

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Set the backend of every attention call."""
        self._calls.bind(backend)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return final hidden states, [T, hidden]."""
        self._calls.restart()
        body = self.causal.get_submodule(self._body_path)
        hidden: Tensor = body(input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False)[0]
        return hidden[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, V], with the module's scaling and caps."""
        return self._head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights of a Hugging Face checkpoint, renamed and converted as in Transformers; see the contract."""
        tensors: dict[str, Tensor] = self.causal.state_dict(keep_vars=True)
        first_names: dict[int, str] = {}
        for name, tensor in tensors.items():
            first_names.setdefault(id(tensor), name)
        names = CheckpointNames(self.causal, tensors)  # slots have the checkpoint's names, for error messages
        slots = [WeightSlot(names.in_checkpoint(name), tensors[name]) for name in first_names.values()]
        tied = {
            names.in_checkpoint(name): names.in_checkpoint(first_names[id(tensor)])
            for name, tensor in tensors.items()
            if first_names[id(tensor)] != name
        }
        copy_weights(slots, names.converted(weights), tied)


class _Head:
    """The part of a causal language model after its body; maps hidden states to logits.

    It is the whole model, with the body replaced by a module that returns its input embeddings.

    Args:
        causal: the model.
        body: the body, a submodule of the model.
        hidden: hidden states of a few tokens for a trial run, [T, hidden].

    Raises:
        UnsupportedArchitectureError: the trial run fails.
    """

    def __init__(self, causal: nn.Module, body: nn.Module, hidden: Tensor) -> None:
        *parents, name = _path_of(causal, body).split(".")
        self._module = parent = _twin(causal)
        for step in parents:
            child = _twin(parent.get_submodule(step))
            setattr(parent, step, child)
            parent = child
        setattr(parent, name, _GivenStates())
        try:
            with torch.no_grad():
                self(hidden)
        except Exception as error:
            raise UnsupportedArchitectureError(
                f"{type(causal).__name__} needs more than hidden states for its logits: a trial run failed with "
                f"{type(error).__name__}: {error}"
            ) from error

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map [S, hidden] to [S, V]."""
        logits: Tensor = self._module(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]


class _GivenStates(nn.Module):
    """Replaces the body of a model, and returns the given hidden states."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **rest: Any) -> _BodyOutput:
        """Return [1, S, hidden] unchanged."""
        return _BodyOutput(inputs_embeds)


@dataclass(frozen=True, slots=True)
class _BodyOutput:
    """The attributes of a body's output that Transformers' models read."""

    last_hidden_state: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None
    shared_kv_states: None = None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _twin(module: nn.Module) -> nn.Module:
    """Return a copy of a module with the same children. Replacing a child of the copy does not change the module."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _context_len(context: ModelContext) -> int:
    return context.context_len or context.config.max_position_embeddings


def _path_of(causal: nn.Module, body: nn.Module) -> str:
    path: str = next(name for name, module in causal.named_modules() if module is body)
    return path


def _build(context: ModelContext) -> Any:
    """Create the module on its device, with uninitialised parameters and with buffers from the configuration.

    Raises:
        UnsupportedArchitectureError: Transformers cannot create the model, or the model cannot be served.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    named = ", ".join(context.config.architectures)
    try:
        config = _read_config(context)
        _check_config(config, _context_len(context))
        register_attention()
        remote = {} if context.code_folder is None else {"trust_remote_code": True}
        with torch.device(context.device), no_init_weights():
            causal = AutoModelForCausalLM.from_config(config, dtype=context.dtype, attn_implementation=PROBE, **remote)
    except UnsupportedArchitectureError:
        raise
    except Exception as error:  # the code may be part of the checkpoint
        if isinstance(error, KeyError) and error.args == (PROBE,):
            raise UnsupportedArchitectureError(
                f"{named} chooses between its own attention functions, and does not accept the function for paged "
                "attention"
            ) from error
        raise UnsupportedArchitectureError(
            f"Transformers cannot create {named} from this config.json: {type(error).__name__}: {error}"
        ) from error
    causal.requires_grad_(False).eval()
    causal.tie_weights()
    _keep_float32(causal, context.dtype)
    return causal


def _read_config(context: ModelContext) -> Any:
    """Read config.json as a configuration class of Transformers, or of the checkpoint's own code.

    Raises:
        UnsupportedArchitectureError: no such class exists, or the architecture does not generate text.
    """
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, AutoConfig

    raw, named = context.config.raw, ", ".join(context.config.architectures)
    if context.code_folder is not None and "AutoModelForCausalLM" in raw.get("auto_map", {}):
        return AutoConfig.from_pretrained(context.code_folder, trust_remote_code=True)
    model_type = raw.get("model_type")
    is_masked = model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_FOR_MASKED_LM_MAPPING
    if is_masked and not (raw.get("is_decoder") or raw.get("is_encoder_decoder")):
        raise UnsupportedArchitectureError(
            f"No model serves {named}: model_type {model_type!r} is an encoder, whose tokens also attend to later "
            f"tokens. Encoders are not supported; for embeddings and scores, use a checkpoint of a decoder"
        )
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        hint = ". To run the code in the checkpoint, set model.trust_remote_code" if "auto_map" in raw else ""
        raise UnsupportedArchitectureError(
            f"No model serves {named}: no provider supports it, and Transformers {transformers.__version__} has no "
            f"language model of model_type {model_type!r}. Install a plugin or a version of Transformers that "
            f"supports it{hint}"
        )
    config_class = CONFIG_MAPPING[model_type]
    model_name = MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__name__
    if model_name not in context.config.architectures:
        raise UnsupportedArchitectureError(
            f"No model serves {named}: no provider supports it, and Transformers runs only the language model "
            f"{model_name} of model_type {model_type!r}. If the checkpoint is such a model, correct architectures in "
            f"config.json"
        )
    return config_class.from_dict(_decoded(raw))


def _decoded(entry: Any) -> Any:
    """Copy an entry of config.json, and decode Transformers' notation for numbers that JSON cannot represent."""
    if isinstance(entry, Mapping):
        if entry.keys() == {"__float__"}:
            return float(entry["__float__"])
        return {name: _decoded(value) for name, value in entry.items()}
    return [_decoded(value) for value in entry] if isinstance(entry, list) else entry


def _check_config(config: Any, context_len: int) -> None:
    """Refuse unsupported configurations that a trial run would not detect.

    Raises:
        UnsupportedArchitectureError: the model has an encoder, or longrope with a context that is too long.
    """
    if config.is_encoder_decoder:
        raise UnsupportedArchitectureError(
            f"model_type {config.model_type!r} has an encoder and a decoder (is_encoder_decoder in config.json), but "
            f"only decoders are supported"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if not isinstance(part, Mapping) or part.get("rope_type") != "longrope":
            continue
        original_len = part.get("original_max_position_embeddings", config.max_position_embeddings)
        if context_len > original_len:
            raise UnsupportedArchitectureError(
                f"In Transformers, the frequencies of rope_type 'longrope' change for all requests of a batch if one "
                f"request is longer than {original_len} tokens. Set model.context_len to at most {original_len}, got "
                f"{context_len}"
            )


def _body_of(causal: Any) -> nn.Module:
    """Return the submodule that maps tokens and positions to hidden states.

    Raises:
        UnsupportedArchitectureError: the model does not take positions as an argument.
    """
    body: nn.Module = causal.get_decoder()
    if body is causal:
        body = getattr(causal, "model", causal)
    if body is causal or "position_ids" not in inspect.signature(body.forward).parameters:
        raise UnsupportedArchitectureError(
            f"{type(causal).__name__} has no argument for the positions of tokens, which a batch of several requests "
            f"needs. Models with a recurrent state, or with a distance bias in attention, have no such argument"
        )
    return body


def _keep_float32(causal: Any, dtype: torch.dtype) -> None:
    """Convert to float32 the tensors that Transformers keeps in float32, such as the biases of routers."""
    patterns = set()
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= causal._keep_in_fp32_modules_strict
    if dtype == torch.float16:
        patterns |= causal._keep_in_fp32_modules
    if not patterns:
        return
    kept = re.compile("|".join(rf"(^|\.)({pattern})(\.|$)" for pattern in patterns))
    for name, tensor in causal.state_dict(keep_vars=True).items():
        if kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
