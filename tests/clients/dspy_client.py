"""DSPy: signatures with typed fields, by its chat and JSON adapters, usage, error classes."""

from typing import Literal

import checks
import dspy
from checks import ANSWER, QUESTION, check, raises
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

#: DSPy asks for a JSON schema only where a provider states that its models follow one.
ACCESS = AccessPolicy(provider="graftlm", env_keys=("GRAFTLM_API_KEY",), base_url=f"{checks.URL}/v1")
STATED = ModelSupport(function_calling=True, response_schema=True)
register_provider(ProviderDefinition.chat(ACCESS, compat=OpenAIChatCompat.preset("vllm")), supports=STATED)


def model(name="graftlm/demo", **fields):
    given = {"api_base": f"{checks.URL}/v1", "api_key": checks.KEY, "temperature": 0, "max_tokens": 200}
    return dspy.LM(name, cache=False, num_retries=0, **given | fields)


class Judge(dspy.Signature):
    """Judge a sum."""

    question: str = dspy.InputField()
    verdict: Literal["right", "wrong"] = dspy.OutputField()
    weight: Literal[1, 2] = dspy.OutputField()


@check
def call():
    """a call with a prompt and with messages, by the provider openai and by a declared one"""
    for name in ("graftlm/demo", "openai/demo"):
        lm = model(name)
        for answer in (lm(QUESTION), lm(messages=[{"role": "user", "content": QUESTION}])):
            assert [text if isinstance(text, str) else text["text"] for text in answer] == [ANSWER], name
        assert lm.history[-1]["usage"]["completion_tokens"] > 0


@check
def predict():
    """Predict with typed fields by JSONAdapter"""
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        result = dspy.Predict(Judge)(question="Is 2 + 3 = 5?")
    assert result.verdict in ("right", "wrong")
    assert result.weight in (1, 2)


@check
def fallback():
    """Predict by ChatAdapter, which falls back to JSON"""
    with dspy.context(lm=model(), adapter=dspy.ChatAdapter()):
        assert dspy.Predict(Judge)(question="Is 2 + 3 = 5?").verdict in ("right", "wrong")


@check
async def asynchronous():
    """acall of a module"""
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        assert (await dspy.Predict(Judge).acall(question="Is 2 + 3 = 5?")).verdict in ("right", "wrong")


@check
def usage():
    """track_usage adds up the tokens"""
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter(), track_usage=True):
        used = dspy.Predict(Judge)(question="Is 2 + 3 = 5?").get_lm_usage()
    (counts,) = used.values()
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"] > 0


@check
def responses():
    """a call by the Responses API"""
    (answer,) = model("openai/demo", model_type="responses")(QUESTION)
    assert (answer if isinstance(answer, str) else answer["text"]) == ANSWER


@check
def errors():
    """errors are DSPy's classes: authentication, unsupported model, context window"""
    raises(dspy.utils.exceptions.LMAuthError, model(api_key="wrong"), QUESTION)
    raises(dspy.utils.exceptions.LMUnsupportedModelError, model("graftlm/other"), QUESTION)
    raises(dspy.utils.exceptions.ContextWindowExceededError, model(), "one two " * 5000)


if __name__ == "__main__":
    checks.main("dspy")
