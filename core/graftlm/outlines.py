"""A model of Outlines that generates with an engine in this process. It needs the extra `outlines`."""

from collections.abc import Iterator
from typing import Any

try:
    from outlines.inputs import Chat
    from outlines.models.vllm_offline import VLLMOffline
except ImportError as error:
    raise ImportError("graftlm.outlines needs Outlines: pip install 'graftlm[outlines]'") from error

from graftlm.engine.engine import Engine
from graftlm.errors import InvalidPromptError, RequestFailedError, SamplingParamsError
from graftlm.output_types import as_specification
from graftlm.types import Message, RequestOutput, SamplingParams

__all__ = ["EngineModel", "from_engine"]


class EngineModel(VLLMOffline):
    """A model of Outlines that is called like its other models: `model(prompt, output_type)`, `model.stream(prompt)`.

    Outlines passes output types on only to the models that it knows. This class therefore derives from its model of
    vLLM's engine, without using vLLM.

    A prompt is a text or an `outlines.inputs.Chat`. If the engine's tokenizer has a chat template, a text is a message
    of the user. Keyword arguments of a call are those of `SamplingParams`; with `n`, a call returns a list of texts.
    """

    def __init__(self, engine: Engine) -> None:
        self.model = engine
        self.tokenizer = engine.tokenizer

    def generate(self, model_input: Chat | str, output_type: Any | None = None, **sampling: Any) -> str | list[str]:
        """Return the completion of a prompt, or all of them with `n`.

        Raises:
            InvalidPromptError: the prompt is no text and no chat of texts.
            SamplingParamsError: a keyword argument or the output type is not supported.
        """
        (texts,) = self.generate_batch([model_input], output_type, **sampling)
        return texts

    def generate_batch(
        self, model_input: list[Chat | str], output_type: Any | None = None, **sampling: Any
    ) -> list[str] | list[list[str]]:
        """Return the completions of several prompts, which are generated together.

        Raises:
            InvalidPromptError: a prompt is no text and no chat of texts.
            SamplingParamsError: a keyword argument or the output type is not supported.
        """
        params = _params(output_type, sampling)
        outputs = self.model.generate([self._prompt(one) for one in model_input], params)
        return [_texts(output, params.n) for output in outputs]

    def generate_stream(
        self, model_input: Chat | str, output_type: Any | None = None, **sampling: Any
    ) -> Iterator[str]:
        """Yield the pieces of a completion.

        Raises:
            InvalidPromptError: the prompt is no text and no chat of texts.
            SamplingParamsError: a keyword argument or the output type is not supported, or `n` is not 1.
        """
        params = _params(output_type, sampling)
        if params.n > 1:
            raise SamplingParamsError(f"n: a stream has one completion, got {params.n}")
        num_chars = 0
        for output in self.model.stream(self._prompt(model_input), params):
            _texts(output, n=1)
            text = output.completions[0].text
            if len(text) > num_chars:
                yield text[num_chars:]
                num_chars = len(text)

    def _prompt(self, model_input: Chat | str) -> str | list[Message]:
        if isinstance(model_input, str):
            is_message = self.tokenizer.has_chat_template
            return [{"role": "user", "content": model_input}] if is_message else model_input
        messages = getattr(model_input, "messages", None)
        if not isinstance(messages, list) or not all(isinstance(one.get("content"), str) for one in messages):
            raise InvalidPromptError(f"expected a text or a Chat whose messages are texts, got {model_input!r:.200}")
        return messages


def from_engine(engine: Engine) -> EngineModel:
    """Return a model of Outlines that generates with an engine. The engine stays the caller's to close."""
    return EngineModel(engine)


def _params(output_type: Any | None, sampling: dict[str, Any]) -> SamplingParams:
    if output_type is None:
        return SamplingParams(**sampling)
    name, specification = as_specification("output_type", output_type)
    return SamplingParams(**{**sampling, name: specification})


def _texts(output: RequestOutput, n: int) -> Any:
    failed = next((completion for completion in output.completions if completion.finish_reason == "error"), None)
    if failed is not None:
        raise RequestFailedError(failed.error or "the request failed")
    texts = [completion.text for completion in output.completions]
    return texts if n > 1 else texts[0]
