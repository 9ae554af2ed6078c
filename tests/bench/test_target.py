"""The questions to a server before a run."""

import pytest
from aiohttp import web

from graftlm.bench import BenchError, BenchSettings
from graftlm.bench.client import open_session
from graftlm.bench.target import Target, flush_cache, probe

FOREIGN = {"/v1/models": '{"object": "list", "data": [{"id": "their-model"}, {"id": "another"}]}'}
OURS = {
    "/get_model_info": '{"served_model_name": "m", "vocab_size": 2048, "context_len": 512, "dtype": "float32"}',
    "/server_info": '{"version": "0.1.0", "config": {}}',
}


@pytest.fixture
async def serve():
    """Return a function that starts a server with these answers to GET, and returns its address."""
    runners = []

    async def start(answers, key=None):
        async def handle(request):
            if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
                return web.Response(status=401, text='{"error": {"message": "wrong key"}}')
            text = answers.get(request.path)
            return web.Response(status=404 if text is None else 200, text=text)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def ask(url, key=None, **fields):
    async with open_session(key, 5.0) as session:
        return await probe(session, BenchSettings(url=url, **fields))


@pytest.mark.parametrize(
    ("answers", "fields", "known"),
    [
        (OURS, {}, ("m", "0.1.0", 2048, 512)),
        (OURS, {"api": "openai-chat", "model": "given"}, ("given", "0.1.0", 2048, 512)),
        (OURS, {"vocab_size": 100}, ("m", "0.1.0", 100, 512)),
        (FOREIGN, {"api": "openai-completions"}, ("their-model", None, None, None)),
        (FOREIGN, {"api": "openai-completions", "model": "another"}, ("another", None, None, None)),
        ({}, {}, (None, None, None, None)),
        ({"/get_model_info": '{"model_path": "/m", "vocab_size": "many"}'}, {}, (None, None, None, None)),
        ({"/get_model_info": '{"model_path": "/m"}'}, {}, ("/m", None, None, None)),
    ],
)
async def test_the_server_reports_model_and_vocabulary(serve, answers, fields, known):
    url = await serve(answers)
    assert await ask(url, **fields) == Target(url, *known)


@pytest.mark.parametrize("answers", [{}, {"/v1/models": '{"data": []}'}, {"/v1/models": "oops"}])
async def test_a_server_that_names_no_model_needs_the_option_model(serve, answers):
    with pytest.raises(BenchError, match="returned no model: set --model"):
        await ask(await serve(answers), api="openai-chat")


async def test_the_key_is_sent_with_every_request(serve):
    url = await serve(OURS | {"/flush_cache": "{}"}, key="k")
    assert (await ask(url, key="k")).model == "m"
    async with open_session("k", 5.0) as session:
        await flush_cache(session, url)
    async with open_session(None, 5.0) as session:
        with pytest.raises(BenchError, match="status 401: wrong key"):
            await flush_cache(session, url)


async def test_a_missing_server_is_an_error(refused_url):
    with pytest.raises(BenchError, match="check that the server runs and that --url is correct"):
        await ask(refused_url)
