"""LangChain's OpenAI package: chats, streams, batches, structured answers, tools, responses, embeddings."""

import operator
from functools import reduce
from typing import Literal

import checks
import openai
from checks import ANSWER, QUESTION, check, raises
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

SERVER = {"base_url": f"{checks.URL}/v1", "api_key": checks.KEY, "model": "demo", "max_retries": 0}
model = ChatOpenAI(**SERVER, temperature=0, max_tokens=60)


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


@tool
def weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2]) -> str:
    """Tell the weather."""
    return f"rain in {city} for {days} days"


@check
def invoke():
    """invoke: text, usage, finish reason"""
    answer = model.invoke(QUESTION)
    assert answer.content == ANSWER
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"


@check
def stream():
    """stream: the chunks add up to the whole message and its usage"""
    whole = reduce(operator.add, model.stream(QUESTION, stream_usage=True))
    assert whole.content == ANSWER
    assert whole.usage_metadata["output_tokens"] == model.invoke(QUESTION).usage_metadata["output_tokens"]


@check
async def asynchronous():
    """ainvoke, astream and abatch"""
    assert (await model.ainvoke(QUESTION)).content == ANSWER
    assert "".join([chunk.content async for chunk in model.astream(QUESTION)]) == ANSWER
    assert [answer.content for answer in await model.abatch([QUESTION] * 4)] == [ANSWER] * 4


@check
def chain():
    """a prompt template piped into the model; turns with a system message"""
    chain = ChatPromptTemplate.from_messages([("human", "What is {a} plus {b}?")]) | model
    assert chain.invoke({"a": 2, "b": 3}).content == ANSWER
    turns = [SystemMessage("Be brief."), HumanMessage(QUESTION), AIMessage(ANSWER), HumanMessage(QUESTION)]
    assert model.invoke(turns).content


@check
def structured():
    """with_structured_output by JSON schema and by function calling"""
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Weather, method=method).invoke(QUESTION), Weather), method


@check
def tools():
    """bind_tools: a required call, its result, and the answer to it"""
    called = model.bind_tools([weather], tool_choice="weather").invoke(QUESTION)
    call = called.tool_calls[0]
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content.startswith("rain in")
    answer = model.bind_tools([weather]).invoke([HumanMessage(QUESTION), called, result])
    assert answer.content


@check
def streamed_tools():
    """the chunks of a streamed call add up to the whole one"""
    bound = model.bind_tools([weather], tool_choice="weather")
    whole = reduce(operator.add, bound.stream(QUESTION))
    assert [call["args"] for call in whole.tool_calls] == [call["args"] for call in bound.invoke(QUESTION).tool_calls]


@check
def responses():
    """the Responses API: text, stream, structured answer, call"""
    own = ChatOpenAI(**SERVER, temperature=0, max_tokens=60, use_responses_api=True)
    assert own.invoke(QUESTION).text == ANSWER
    assert "".join(chunk.text for chunk in own.stream(QUESTION)) == ANSWER
    assert isinstance(own.with_structured_output(Weather).invoke(QUESTION), Weather)
    assert own.bind_tools([weather], tool_choice="weather").invoke(QUESTION).tool_calls


@check
def completions():
    """OpenAI: completions, whole and streamed"""
    own = OpenAI(**SERVER, temperature=0, max_tokens=8)
    assert own.invoke("One, two,") == "".join(own.stream("One, two,")) != ""


@check
def embeddings():
    """OpenAIEmbeddings: documents and a query"""
    fields = {key: value for key, value in SERVER.items() if key != "max_retries"}
    own = OpenAIEmbeddings(**fields, check_embedding_ctx_length=False)
    vectors = own.embed_documents(["a fox", "a dog"])
    assert len(vectors) == 2
    assert max(abs(a - b) for a, b in zip(own.embed_query("a fox"), vectors[0], strict=True)) < 1e-5


@check
def errors():
    """errors are OpenAI's classes"""
    raises(openai.NotFoundError, ChatOpenAI(**SERVER | {"model": "other"}).invoke, QUESTION)
    raises(openai.AuthenticationError, ChatOpenAI(**SERVER | {"api_key": "wrong"}).invoke, QUESTION)
    raises(openai.BadRequestError, model.invoke, "one two " * 5000)


if __name__ == "__main__":
    checks.main("langchain-openai")
