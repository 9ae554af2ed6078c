"""Downloads use allowed hosts and public addresses only, also after redirects."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from graftlm.errors import MediaError
from graftlm.media import MediaLimits
from graftlm.media.downloads import Downloads, is_public

CONTENT = b"a picture"


class Pages(BaseHTTPRequestHandler):
    def do_GET(self):
        kind, _, rest = self.path[1:].partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", rest if "://" in rest else f"/{rest}")
            self.end_headers()
            return
        self.send_response(404 if kind == "missing" else 200)
        self.end_headers()
        self.wfile.write(CONTENT * (100_000 if kind == "large" else 1))

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def port():
    server = HTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def downloads(port, addresses=("127.0.0.1",), is_allowed=lambda address: True):
    found = iter([*addresses, *["10.0.0.1"] * 9])
    limits = MediaLimits(max_bytes=10_000, allowed_hosts=(f"pictures.test:{port}",), download_timeout_s=5)
    return Downloads(limits, lambda host, port: [next(found)], is_allowed)


def test_an_allowed_host(port):
    assert downloads(port)(f"http://pictures.test:{port}/one") == CONTENT
    twice = downloads(port, ["127.0.0.1"] * 2)
    assert twice(f"http://PICTURES.test:{port}/to/one") == CONTENT


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("large", "larger than the maximum"),
        ("missing", "answered 404"),
        ("to/http://other.test/one", "may not be downloaded from other.test"),
        ("to/http://127.0.0.1/one", "may not be downloaded from 127.0.0.1"),
        ("to/file:///etc/passwd", "form https"),
        ("to/to/to/to/to/one", "redirects"),
    ],
)
def test_answers_that_are_refused(port, path, message):
    with pytest.raises(MediaError, match=message):
        downloads(port, ["127.0.0.1"] * 9)(f"http://pictures.test:{port}/{path}")


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/a.png",
        "http://pictures.test/a.png",  # another port
        "http://pictures.test:1@other.test/",
        "http://user:secret@pictures.test:{port}/",
        "http://pictures.test:{port}\\@other.test/",
        "http://pictures.test:{port} /",
        "http://pictures.tést:{port}/",
        "http://[::1]:{port}/",
        "http://127.1:{port}/",
        "http://2130706433:{port}/",
        "http://0x7f000001:{port}/",
        "http://localhost:{port}/",
        "ftp://pictures.test:{port}/",
        "http://pictures.test:99999/",
        "http://",
    ],
)
def test_urls_that_are_refused(port, url):
    with pytest.raises(MediaError):
        downloads(port)(url.format(port=port))


def test_the_checked_address_is_used_and_a_second_look_is_checked_again(port):
    fetch = downloads(port, ["127.0.0.1", "10.0.0.1"], lambda address: address == "127.0.0.1")
    with pytest.raises(MediaError, match=r"10\.0\.0\.1 is not public"):
        fetch(f"http://pictures.test:{port}/to/one")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "100.64.0.1",
        "224.0.0.1",
        "::1",
        "fe80::1%eth0",
        "::ffff:127.0.0.1",
        "fc00::1",
        "::",
    ],
)
def test_addresses_of_this_machine_and_network_are_not_public(address):
    assert not is_public(address)


def test_public_addresses():
    assert is_public("93.184.216.34")
    assert is_public("2606:4700::1111")
