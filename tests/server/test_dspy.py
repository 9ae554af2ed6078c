"""Requests of DSPy's adapters are answered in the form that the adapters parse."""

import json

import requests

SIGNATURE = (
    "Your input fields are:\n1. `question` (str):\nYour output fields are:\n1. `verdict` (str):\nOutputs will be a "
    'JSON object with the following fields.\n\n{\n  "verdict": "{verdict}"\n}'
)


def test_the_fields_of_a_signature_are_answered_as_the_requested_json(server):
    schema = {
        "type": "object",
        "properties": {"verdict": {"type": "string", "enum": ["right", "wrong"]}},
        "required": ["verdict"],
        "additionalProperties": False,
    }
    body = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": SIGNATURE},
            {"role": "user", "content": "[[ ## question ## ]]\nIs 2 + 3 = 5?\n\nRespond with a JSON object."},
        ],
        "max_completion_tokens": 200,
        "temperature": 0.0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": False},
        },
    }
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"])["verdict"] in ("right", "wrong")
