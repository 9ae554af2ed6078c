"""LlamaIndex's OpenAILike: chats, completions, streams, structured answers, tools, embeddings."""

from typing import Literal

import checks
import openai
from checks import ANSWER, QUESTION, check, raises
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SERVER = {"api_base": f"{checks.URL}/v1", "api_key": checks.KEY, "max_retries": 0}
LIMITS = {"context_window": 2048, "max_tokens": 80, "temperature": 0}
llm = OpenAILike("demo", **SERVER, **LIMITS, is_chat_model=True, is_function_calling_model=True)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2]) -> str:
    """Tell the weather."""
    return f"rain in {city} for {days} days"


@check
def chat():
    """a chat, whole and streamed"""
    assert llm.chat(MESSAGES).message.content == ANSWER
    assert "".join(part.delta or "" for part in llm.stream_chat(MESSAGES)) == ANSWER


@check
async def asynchronous():
    """achat and astream_chat"""
    assert (await llm.achat(MESSAGES)).message.content == ANSWER
    assert "".join([part.delta or "" async for part in await llm.astream_chat(MESSAGES)]) == ANSWER


@check
def completion():
    """a completion without a chat template, whole and streamed"""
    plain = OpenAILike("demo", **SERVER, **LIMITS | {"max_tokens": 8})
    assert plain.complete("One, two,").text == "".join(part.delta for part in plain.stream_complete("One, two,")) != ""


@check
def usage():
    """the usage of a chat"""
    usage = llm.chat(MESSAGES).raw.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0


@check
def structured():
    """as_structured_llm: an object by a tool call"""
    own = OpenAILike("demo", **SERVER, **LIMITS, is_chat_model=True, is_function_calling_model=True)
    answer = own.as_structured_llm(Weather).chat(MESSAGES)
    assert isinstance(answer.raw, Weather)


@check
def json_schema():
    """a program whose model has a JSON schema as response_format"""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": Weather.model_json_schema()}}
    own = OpenAILike("demo", **SERVER, **LIMITS, is_chat_model=True, additional_kwargs={"response_format": form})
    program = LLMTextCompletionProgram.from_defaults(
        output_cls=Weather, prompt_template_str="The weather of {city}?", llm=own
    )
    assert isinstance(program(city="Oslo"), Weather)


@check
def tools():
    """a required tool is called"""
    tool = FunctionTool.from_defaults(weather)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert tool(**call.tool_kwargs).content.startswith("rain in")


@check
def index():
    """an index over documents: embeddings, and an answer from them"""
    embedding = OpenAILikeEmbedding("demo", api_base=SERVER["api_base"], api_key=checks.KEY)
    documents = [Document(text="a fox is red"), Document(text="a dog barks")]
    index = VectorStoreIndex.from_documents(documents, embed_model=embedding)
    assert {node.text for node in index.as_retriever(similarity_top_k=2).retrieve("a fox")} == {
        "a fox is red",
        "a dog barks",
    }
    assert str(index.as_query_engine(llm=llm).query(QUESTION))


@check
def errors():
    """errors are OpenAI's classes"""
    raises(openai.NotFoundError, OpenAILike("other", **SERVER, is_chat_model=True).chat, MESSAGES)
    stranger = OpenAILike("demo", **SERVER | {"api_key": "wrong"}, is_chat_model=True)
    raises(openai.AuthenticationError, stranger.chat, MESSAGES)


if __name__ == "__main__":
    checks.main("llama-index-llms-openai-like")
