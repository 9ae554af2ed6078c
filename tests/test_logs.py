import io
import json
import logging
from datetime import datetime, timedelta

import pytest

from graftlm.logs import JsonFormatter, TextFormatter, configure_logging, request_id_var


def record(message="hello %s", *args, level=logging.INFO, exc_info=None, **extra):
    made = logging.LogRecord("graftlm.test", level, __file__, 1, message, args or ("you",), exc_info)
    vars(made).update(extra)
    return made


def failure():
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        return type(error), error, error.__traceback__


@pytest.fixture
def request_id():
    token = request_id_var.set("req-1")
    yield "req-1"
    request_id_var.reset(token)


@pytest.fixture
def restored_logging():
    names = (None, "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    yield
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


class TestJson:
    def test_a_json_record_is_one_line_with_all_keys(self):
        text = JsonFormatter("main").format(record("two\nlines %s", "é"))
        line = json.loads(text)
        assert "\n" not in text
        assert line.pop("ts").endswith("+00:00")
        assert line == {"level": "info", "logger": "graftlm.test", "process": "main", "message": "two\nlines é"}

    def test_the_timestamp_is_in_utc(self):
        made = record()
        made.created = 1.5
        when = datetime.fromisoformat(json.loads(JsonFormatter("main").format(made))["ts"])
        assert when.utcoffset() == timedelta(0)
        assert when.timestamp() == 1.5

    def test_the_id_of_the_current_request_is_added(self, request_id):
        assert json.loads(JsonFormatter("main").format(record()))["request_id"] == request_id

    def test_an_id_in_the_record_replaces_the_current_request_id(self, request_id):
        assert json.loads(JsonFormatter("main").format(record(request_id="other")))["request_id"] == "other"

    def test_an_exception_is_a_string_with_its_traceback(self):
        line = json.loads(JsonFormatter("main").format(record(exc_info=failure())))
        assert line["exc"].startswith("Traceback")
        assert line["exc"].endswith("ValueError: no such thing")

    def test_extra_fields_become_keys_and_replace_no_standard_key(self):
        line = json.loads(JsonFormatter("main").format(record(status=200, where=object, process="no")))
        assert line["status"] == 200
        assert line["where"] == "<class 'object'>"
        assert line["process"] == "main"


class TestText:
    def test_a_text_line_has_time_level_process_message_and_request(self, request_id):
        line = TextFormatter("scheduler-0").format(record(level=logging.WARNING))
        assert line[2] == line[5] == ":"
        assert line[9:] == "WARNING scheduler-0: hello you [req-1]"

    def test_a_traceback_follows_the_line(self):
        lines = TextFormatter("main").format(record(exc_info=failure())).splitlines()
        assert lines[1].startswith("Traceback")
        assert lines[-1] == "ValueError: no such thing"


@pytest.mark.usefixtures("restored_logging")
class TestConfigure:
    @pytest.mark.parametrize(
        ("level", "written"),
        [("debug", ["debug", "info", "error"]), ("info", ["info", "error"]), ("error", ["error"])],
    )
    def test_less_severe_records_are_dropped(self, level, written):
        stream = io.StringIO()
        configure_logging("json", level, "main", stream)
        logger = logging.getLogger("graftlm.test")
        for method in (logger.debug, logger.info, logger.error):
            method("x")
        assert [json.loads(line)["level"] for line in stream.getvalue().splitlines()] == written

    def test_a_second_call_replaces_the_first(self):
        first, second = io.StringIO(), io.StringIO()
        configure_logging("json", "info", "main", first)
        configure_logging("text", "info", "main", second)
        logging.getLogger("graftlm.test").info("once")
        assert first.getvalue() == ""
        assert second.getvalue().count("once") == 1

    def test_warnings_of_the_http_server_are_logged_once_in_the_same_format(self):
        stream = io.StringIO()
        logging.getLogger("uvicorn.error").addHandler(logging.StreamHandler(stream))
        configure_logging("json", "info", "main", stream)
        logging.getLogger("uvicorn.error").info("Uvicorn running on socket")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        (line,) = stream.getvalue().splitlines()
        assert json.loads(line)["message"] == "Invalid HTTP request received."

    def test_logs_go_to_standard_error_by_default(self, capsys):
        configure_logging("text", "info", "main")
        logging.getLogger("graftlm.test").info("here")
        assert "main: here" in capsys.readouterr().err
