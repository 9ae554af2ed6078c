"""`graftlm batch` answers a file without a server, and goes on where it ended."""

import json

import pytest

from graftlm.cli import main


def line(i, **fields):
    body = {"messages": [{"role": "user", "content": f"What is {i} plus 3?"}], "temperature": 0, "max_tokens": 12}
    return {"custom_id": f"q{i}", "url": "/v1/chat/completions", "body": body | fields}


def write(path, lines):
    path.write_text("".join(json.dumps(it) + "\n" for it in lines))


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(["batch", *map(str, arguments), "--set", "memory.kv_tokens=4096", "--set", "model.path=demo"])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def results(path):
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({result["custom_id"] for result in found}) == len(found)
    return {result["custom_id"]: result for result in found}


def test_a_file_is_answered_and_a_second_run_answers_only_what_is_new(tmp_path, capsys):
    file = tmp_path / "requests.jsonl"
    lines = [line(i) for i in range(4)]
    write(file, lines)
    code, out, _ = run(capsys, file)
    output = tmp_path / "requests.answers.jsonl"
    assert (code, out) == (0, f"4 of 4 requests are answered in {output}\n")
    answers = results(output)
    assert answers["q2"]["response"]["body"]["choices"][0]["message"]["content"] == "2 + 3 = 5."
    completion = {"prompt": "One,", "max_tokens": 2}
    write(file, [*lines, line(9, temperature=9), {"custom_id": "c", "url": "/v1/completions", "body": completion}])
    code, out, err = run(capsys, file)
    assert (code, out) == (1, f"5 of 6 requests are answered in {output}\n")
    assert "1 failed" in err
    assert results(output)["q2"] == answers["q2"]
    assert results(tmp_path / "requests.errors.jsonl")["q9"]["response"]["status_code"] == 400


def test_a_wrong_file_is_refused_with_its_lines(tmp_path, capsys):
    file = tmp_path / "requests.jsonl"
    write(file, [line(1), line(1), line(2, stream=True)])
    code, _, err = run(capsys, file)
    assert code == 2
    assert f"{file}:2: custom_id 'q1' is given twice" in err
    assert f"{file}:3: body.stream must be false" in err
    code, _, err = run(capsys, tmp_path / "none.jsonl")
    assert code == 2
    assert "cannot read" in err
