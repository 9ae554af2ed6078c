"""Scores over HTTP: with label tokens of the bundled model, and with the head of a small reranker made here."""

import httpx2
import numpy as np
import pytest

from graftlm import Engine

LABELS = [300, 301]
DOCUMENTS = ["the sea", "flour", "a sack of flour"]


@pytest.fixture(scope="module")
def head(head_server):
    return head_server


@pytest.fixture(scope="module")
def expected(head):
    with Engine(model=str(head.model), memory={"kv_tokens": 1024}) as engine:
        return np.array(engine.score("a river", DOCUMENTS))[:, 0]


def ask(server, path, status=200, **body):
    answer = httpx2.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def test_a_reranker_orders_documents(head, expected):
    best = np.argsort(-expected).tolist()
    answer = ask(head, "/v1/rerank", query="a river", documents=[*DOCUMENTS[:2], {"text": DOCUMENTS[2]}])
    assert [result["index"] for result in answer["results"]] == best
    relevances = [result["relevance_score"] for result in answer["results"]]
    np.testing.assert_allclose(relevances, 1 / (1 + np.exp(-expected[best])), rtol=1e-4)
    assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[i] for i in best]
    short = ask(head, "/rerank", query="a river", documents=DOCUMENTS, top_n=1, return_documents=False)
    assert short["results"] == [{"index": best[0], "relevance_score": pytest.approx(relevances[0], rel=1e-4)}]


def test_each_pair_is_scored_separately(head, expected):
    answer = ask(head, "/v1/score", text_1="a river", text_2=DOCUMENTS, use_activation=False)
    np.testing.assert_allclose([entry["score"] for entry in answer["data"]], expected, rtol=1e-3)
    pairs = ask(head, "/score", text_1=["a river", "a river"], text_2=DOCUMENTS[:2], use_activation=False)
    np.testing.assert_allclose([entry["score"] for entry in pairs["data"]], expected[:2], rtol=1e-3)
    items = ask(head, "/v1/score", query="a river", items=DOCUMENTS)
    np.testing.assert_allclose(np.ravel(items["scores"]), expected, rtol=1e-3)


def test_softmax_over_one_number_is_refused(head):
    error = ask(head, "/v1/score", 400, query="a river", items=DOCUMENTS, apply_softmax=True)
    assert ("softmax of one score is always 1" in error["message"], error["param"]) == (True, "apply_softmax")


def test_classify_returns_the_outputs_of_the_head(head):
    answer = ask(head, "/classify", text="a river", rid="mine")
    assert answer["meta_info"]["id"] == "mine"
    assert (len(answer["embedding"]), answer["label"]) == (1, "LABEL_0")
    many = ask(head, "/classify", input_ids=[[5, 6], [7]])
    assert [entry["meta_info"]["prompt_tokens"] for entry in many] == [2, 1]


def test_a_server_without_an_output_projection_is_healthy_and_refuses_to_generate(head):
    assert httpx2.get(head.url + "/health_generate", timeout=60).json()["status"] == "ok"
    info = httpx2.get(head.url + "/model_info", timeout=60).json()
    assert (info["is_generation"], info["labels"]) == (False, ["LABEL_0"])
    error = ask(head, "/v1/completions", 400, prompt="x")
    assert (error["code"], "but cannot generate tokens" in error["message"]) == ("unsupported", True)
    assert len(ask(head, "/v1/embeddings", input="x", dimensions=5)["data"][0]["embedding"]) == 5


def test_label_tokens_score_items_with_a_generative_model(server):
    answer = ask(server, "/v1/score", query="2 plus 3 is", items=[" 5", " 6"], label_token_ids=LABELS)
    assert answer["object"] == "scoring"
    assert all(0 < share < 1 for shares in answer["scores"] for share in shares)
    softmax = ask(
        server, "/v1/score", query="2 plus 3 is", items=[" 5", " 6"], label_token_ids=LABELS, apply_softmax=True
    )
    np.testing.assert_allclose(np.sum(softmax["scores"], axis=1), 1.0)
    assert softmax["scores"][0][0] == pytest.approx(answer["scores"][0][0] / sum(answer["scores"][0]), rel=1e-3)
    ids = ask(server, "/v1/score", query=[300], items=[301, 302], label_token_ids=LABELS)
    assert len(ids["scores"]) == 1
    assert ids["usage"]["prompt_tokens"] == 3


def test_documents_are_ranked_by_the_share_of_the_first_label_token(server):
    template = "{document}: {query}?"
    body = {"query": "{document}", "documents": ["{query}", "b"], "label_token_ids": LABELS}
    answer = ask(server, "/v1/rerank", prompt_template=template, **body)
    items = ask(
        server, "/v1/score", query="", items=["{query}: {document}?", "b: {document}?"], label_token_ids=LABELS,
        apply_softmax=True,
    )  # fmt: skip
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    np.testing.assert_allclose([found[0], found[1]], [shares[0] for shares in items["scores"]], rtol=1e-3)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/classify", {"text": "x"}, "To score or rerank with a model that generates text"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "label_token_ids": LABELS, "top_n": 0}, "top_n: "),
        (
            "/v1/score",
            {"text_1": "x", "text_2": "y", "label_token_ids": [5]},
            "the others are the answers for other documents",
        ),
        ("/classify", {}, "either text or input_ids"),
        ("/classify", {"text": []}, "the list of prompts is empty"),
        ("/classify", {"text": ["x", "y"], "rid": "one"}, "a different id for each of the 2"),
        ("/v1/score", {"text_1": "x", "text_2": "y"}, "no score head"),
        ("/v1/score", {"text_1": "x", "items": "y"}, "got text_1, items"),
        ("/v1/score", {}, "got none of them"),
        (
            "/v1/score",
            {"text_1": ["x", "y"], "text_2": ["a", "b", "c"], "label_token_ids": LABELS},
            "text_1 has 2 texts and text_2 has 3",
        ),
        ("/v1/score", {"query": "x", "items": [[5]], "label_token_ids": LABELS}, "all be text, or all be token ids"),
        ("/v1/score", {"query": "x", "items": "y", "label_token_ids": [10**6]}, "outside the vocabulary"),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, "no score head"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        (
            "/v1/rerank",
            {"query": "x", "documents": ["y"], "label_token_ids": [5]},
            "the others are the answers for other documents",
        ),
        (
            "/v1/rerank",
            {"query": "x", "documents": ["y"], "label_token_ids": LABELS, "prompt_template": "{query}"},
            "must contain {document}",
        ),
    ],
)
def test_invalid_requests_are_refused(server, path, body, message):
    assert message in ask(server, path, 400, **body)["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"query": "x", "items": "y", "label_token_ids": [10**6]}, "label_token_ids"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "label_token_ids": [5]}, "label_token_ids"),
        ("/v1/score", {"text_1": ["x"] * 2, "text_2": ["a"] * 3, "label_token_ids": LABELS}, "text_1"),
        ("/v1/embeddings", {"input": "x", "dimensions": 10**6}, "dimensions"),
        ("/generate", {"text": "x", "sampling_params": {"heat": 1}}, "sampling_params.heat"),
        ("/classify", {"texts": "x"}, "texts"),
    ],
)
def test_the_error_names_the_wrong_field(server, path, body, param):
    assert ask(server, path, 400, **body)["param"] == param
