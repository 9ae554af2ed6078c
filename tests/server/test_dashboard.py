"""The page at `/` in a real browser, and its requests to a real server."""

import re
import shutil
from urllib.parse import urlsplit

import httpx2
import pytest
from playwright.sync_api import expect, sync_playwright

from graftlm.server.dashboard import PAGE_PATHS
from graftlm.testing.server_process import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
USER_KEY, ADMIN_KEY = "s3cret-of-users", "s3cret-of-admins"  # of `keyed_server`
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
SERIES = ["prompt_tokens_per_s", "cached_tokens_per_s", "generated_tokens_per_s", "running_requests", "queued_requests"]
LATENCIES = ["first_token_p50_s", "first_token_p95_s", "inter_token_p50_s", "inter_token_p95_s"]
MARKUP = "<img src onerror=alert(1)>"


@pytest.fixture(scope="module")
def locked(keyed_server):
    """A server with keys. Its tree contains only the prompts of these tests."""
    with httpx2.Client(base_url=keyed_server.url, headers=ADMIN, timeout=30) as client:
        assert client.post("/flush_cache").status_code == 200
    return keyed_server


@pytest.fixture(scope="module")
def admin(locked):
    with httpx2.Client(base_url=locked.url, headers=ADMIN, timeout=30) as client:
        yield client


def read(client, path, **options):
    response = client.request("POST" if path == "/dashboard/tree" else "GET", path, **options)
    assert response.status_code == 200, response.text
    return response.json()


class TestRoutes:
    @pytest.mark.parametrize("path", sorted(PAGE_PATHS))
    def test_the_pages_files_need_no_key_and_may_load_nothing_from_other_origins(self, locked, path):
        response = httpx2.get(locked.url + path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        kind = {"css": "text/css", "js": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
        assert response.headers["content-type"] == f"{kind}; charset=utf-8"

    @pytest.mark.parametrize(
        ("method", "path", "key", "status"),
        [
            ("GET", "/dashboard/state", None, 401),
            ("GET", "/dashboard/state", USER_KEY, 200),
            ("POST", "/dashboard/tree", None, 401),
            ("POST", "/dashboard/tree", USER_KEY, 403),
            ("POST", "/dashboard/tree", ADMIN_KEY, 200),
            ("GET", "/dashboard/tree", ADMIN_KEY, 405),
            ("GET", "/dashboard/../engine.py", ADMIN_KEY, 404),
        ],
    )
    def test_figures_require_a_key_and_prompts_the_admin_key(self, locked, method, path, key, status):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        assert httpx2.request(method, locked.url + path, headers=headers).status_code == status

    def test_a_page_of_a_foreign_name_cannot_read_prompts(self, admin):
        headers = {"Origin": "http://evil.example", "Host": "evil.example"}
        assert admin.post("/dashboard/tree", headers=headers).status_code == 403

    @pytest.mark.parametrize("after", ["soon", "nan", "inf", ""])
    def test_an_invalid_time_is_refused(self, admin, after):
        assert admin.get("/dashboard/state", params={"after": after}).status_code == 400

    def test_only_points_after_the_given_time_are_returned(self, admin):
        wait_until(lambda: len(read(admin, "/dashboard/state")["points"]) >= 2, 10, "two points")
        state = read(admin, "/dashboard/state")
        fields, points = state["fields"], state["points"]
        assert fields[0] == "time_s"
        assert all(len(point) == len(fields) for point in points)
        later = read(admin, "/dashboard/state", params={"after": points[0][0]})["points"]
        assert points[0] not in later
        assert points[1] in later

    def test_points_have_the_latencies_of_recent_requests(self, admin):
        body = {"prompt": "One, two,", "max_tokens": 30, "ignore_eos": True}
        assert admin.post("/v1/completions", json=body).status_code == 200

        def latest():
            state = read(admin, "/dashboard/state")
            point = dict(zip(state["fields"], state["points"][-1], strict=True))
            return [point[name] for name in LATENCIES]

        wait_until(lambda: None not in latest(), 10, "a point with latencies")
        first, slow_first, gap, slow_gap = latest()
        assert 0 < first <= slow_first < 30
        assert 0 < gap <= slow_gap < 30

    def test_the_state_has_the_model_and_the_replicas(self, admin):
        state = read(admin, "/dashboard/state")
        assert state["about"]["model"] == "demo"
        assert state["health"] == {"ok": True, "draining": False, "problems": []}
        (replica,) = state["replicas"]
        assert (replica["name"], replica["ready"], replica["stats"]["total_pages"]) == ("scheduler-0", True, 4096)

    def test_the_tree_contains_a_prompt_after_its_answer(self, admin):
        prompt = "The tree shall hold this sentence of mine."
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "a tenant"}
        assert admin.post("/v1/completions", json=body).status_code == 200

        def nodes():
            (tree,) = read(admin, "/dashboard/tree")["trees"]
            assert tree["replica"] == "scheduler-0"
            assert tree["total_nodes"] == len(tree["nodes"])
            return [node for node in tree["nodes"] if node["namespace"] == "a tenant"]

        wait_until(lambda: bool(nodes()), 10, "the prompt's node")  # an answer may be up to two seconds old
        (node,) = nodes()
        assert prompt in node["text"]
        assert node["parent"] is None
        assert node["num_tokens"] == node["num_pages"] > 4
        assert node["num_locks"] == 0
        assert node["age_s"] < 60
        assert "token_ids" not in node


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def watched(browser, locked):
    """A page of 1300 by 1200 pixels that is not loaded yet. Errors and requests to other origins fail the test."""
    context = browser.new_context(viewport={"width": 1300, "height": 1200})
    context.set_default_timeout(15_000)
    page = context.new_page()
    complaints = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if is_elsewhere(request.url, locked) else None)
    yield page
    context.close()
    # The browser itself also reports every 4xx answer; the page shows these.
    assert [text for text in complaints if not re.search("status of 40[013]", text)] == []


def is_elsewhere(url, server):
    parts = urlsplit(url)
    return parts.scheme != "data" and parts.netloc != urlsplit(server.url).netloc


@pytest.fixture
def page(watched, locked):
    """The page, opened with the admin key."""
    watched.add_init_script(f"sessionStorage.setItem('graftlm-api-key', '{ADMIN_KEY}')")
    watched.goto(locked.url)
    expect(watched.locator("#health")).to_have_text("ready")
    return watched


def ask(page, text):
    """Send a message and return the element of its answer when the answer is complete."""
    answers = page.locator(".assistant")
    number = answers.count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    answer = answers.nth(number)
    expect(answer).to_have_attribute("aria-busy", "false")
    return answer


def num_pieces(answer):
    return answer.locator("span").first.evaluate("text => text.childNodes.length")


def reused(answer):
    return int(re.match(r"(\d+) of \d+", answer.locator(".reused").inner_text().strip())[1])


class TestPage:
    def test_an_answer_streams_and_the_second_one_reuses_the_cached_prefix(self, page):
        first = ask(page, "Which day comes after Thursday?")
        assert "Friday" in first.inner_text()
        second = ask(page, "What is 2 plus 3?")
        assert "2 + 3 = 5" in second.inner_text()
        # A browser on a busy machine may receive a short answer in one piece, but not every answer.
        more = [ask(page, f"What is the capital of {country}?") for country in ("France", "Spain", "Italy")]
        assert any(num_pieces(answer) > 1 for answer in (first, second, *more))
        assert reused(second) > reused(first)
        expect(second.locator(".figures")).to_contain_text("first after")
        expect(second.locator(".figures")).to_contain_text("tokens")

    def test_a_new_chat_clears_the_conversation(self, page):
        ask(page, "Which day comes after Thursday?")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)

    def test_an_answer_can_be_stopped(self, page):
        page.route("**/v1/chat/completions", lambda route: None)  # the answer never begins
        page.get_by_label("Message", exact=True).fill("Hello")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".assistant .error")).to_have_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_visible()

    def test_a_refused_message_shows_the_reason(self, page):
        page.get_by_label("temperature").fill("-1")
        answer = ask(page, "Hello")
        expect(answer.locator(".error")).to_contain_text("temperature")

    def test_markup_is_shown_as_text(self, page):
        ask(page, MARKUP)
        expect(page.locator(".user")).to_have_text(MARKUP)
        node = page.locator(".node", has_text="onerror").first
        expect(node).to_be_visible()
        node.hover()
        expect(page.locator("#tree-detail")).to_contain_text(MARKUP)
        assert page.locator("img").count() == 0

    def test_the_curves_have_points(self, page):
        ask(page, "What is 2 plus 3?")
        for name in SERIES:
            line = page.locator(f'path.line[data-series="{name}"]').last
            expect(line).to_have_attribute("d", re.compile(r"^M[\d.,]+(L[\d.,]+)+$"))
        expect(page.locator('path.line[data-series="hit_rate"]').first).to_be_attached()
        expect(page.locator('path.line[data-series="tokens_per_step"]').first).to_be_attached()
        expect(page.locator("path.layer")).to_have_count(4)
        expect(page.get_by_role("img", name=re.compile("KV pages: owned 0, locked 0, evictable .*"))).to_be_visible()

    def test_latencies_have_curves_and_their_legends_show_times(self, page):
        ask(page, "Which day comes after Thursday?")
        for name in LATENCIES:
            expect(page.locator(f'path.line[data-series="{name}"]').last).to_be_attached()
            expect(page.locator(f'li[data-series="{name}"] b')).to_have_text(re.compile(r"^[\d.]+ m?s$"))
        for title in ("Time to first token", "Time between tokens"):
            chart = page.get_by_role("img", name=re.compile(f"^{title}: median [\\d.]+ m?s, 95th percentile"))
            expect(chart).to_be_visible()

    def test_the_keyboard_selects_a_point_of_a_curve(self, page):
        chart = page.get_by_role("img", name=re.compile("^Requests"))
        expect(page.locator('path.line[data-series="running_requests"]').last).to_be_attached()
        chart.press("ArrowLeft")
        expect(page.locator("figure", has=chart).locator(".title .quiet")).to_have_text(re.compile(r"\d+ m?s ago"))

    def test_the_keyboard_moves_through_the_tree(self, page):
        for question in ("Which day comes after Thursday?", "What is 2 plus 3?"):
            ask(page, question)
            page.get_by_role("button", name="New chat").click()
        focused = page.locator("[role=treeitem]:focus")
        page.locator("[role=treeitem][aria-level='2']").first.focus()
        for key, level in [("ArrowLeft", "1"), ("ArrowRight", "2"), ("ArrowDown", "2"), ("ArrowUp", "2")]:
            page.keyboard.press(key)
            expect(focused).to_have_attribute("aria-level", level)
            expect(page.locator("#tree-detail")).to_contain_text(re.compile(r"\d tokens in \d+ pages, matched \d"))

    def test_the_replicas_are_listed(self, page):
        expect(page.get_by_role("row", name=re.compile("scheduler-0"))).to_be_visible()

    def test_a_hidden_page_sends_no_requests(self, watched, locked):
        watched.add_init_script("Object.defineProperty(document, 'hidden', {get: () => !window.isShown})")
        asked = []
        watched.on("request", lambda request: asked.append(request.url) if "/dashboard/state" in request.url else None)
        watched.add_init_script(f"sessionStorage.setItem('graftlm-api-key', '{ADMIN_KEY}')")
        watched.goto(locked.url)
        expect(watched.locator("#charts figure")).to_have_count(7)
        assert watched.evaluate("fetch('health').then((answer) => answer.status)") == 200
        assert asked == []
        watched.evaluate("window.isShown = true; document.dispatchEvent(new Event('visibilitychange'))")
        expect(watched.locator("#health")).to_have_text("ready")

    def test_the_page_shows_a_lost_server_and_its_return(self, page):
        # The browser itself also reports a connection that is really lost, which would fail the test.
        page.evaluate("() => { realFetch = fetch; fetch = () => Promise.reject(new TypeError('lost')); }")
        expect(page.locator("#health")).to_have_text("the server does not answer")
        expect(page.locator("#health")).to_have_class("bad")
        page.evaluate("() => { fetch = realFetch; }")
        expect(page.locator("#health")).to_have_text("ready")

    def test_the_page_fits_a_narrow_screen(self, page):
        page.set_viewport_size({"width": 400, "height": 800})
        expect(page.locator("path.line").first).to_be_attached()
        assert page.evaluate("document.documentElement.scrollWidth") == 400


class TestKey:
    def test_the_page_asks_for_a_key_and_keeps_it(self, watched, locked):
        watched.goto(locked.url)
        dialog = watched.get_by_role("dialog")
        expect(dialog).to_contain_text("The server asks for a key.")
        for key, answer in [("wrong", "does not accept"), (ADMIN_KEY, None)]:
            watched.get_by_label("API key", exact=True).locator("visible=true").last.fill(key)
            watched.keyboard.press("Enter")
            if answer:
                expect(dialog).to_contain_text(answer)
        expect(dialog).to_be_hidden()
        expect(watched.locator("#health")).to_have_text("ready")
        watched.reload()
        expect(watched.locator("#health")).to_have_text("ready")
        expect(dialog).to_be_hidden()

    def test_without_a_key_the_page_asks_again_only_on_click(self, watched, locked):
        watched.goto(locked.url)
        dialog = watched.get_by_role("dialog")
        expect(dialog).to_be_visible()
        watched.get_by_role("button", name="Cancel").click()
        expect(watched.locator("#health")).to_contain_text("asks for a key")
        expect(dialog).to_be_hidden()
        watched.get_by_role("button", name="Enter key").click()
        expect(dialog).to_be_visible()

    def test_a_clients_key_shows_everything_except_the_tree(self, watched, locked):
        watched.add_init_script(f"sessionStorage.setItem('graftlm-api-key', '{USER_KEY}')")
        watched.goto(locked.url)
        expect(watched.locator("#health")).to_have_text("ready")
        expect(watched.locator("#tree-detail")).to_contain_text("admin key")
        assert reused(ask(watched, "What is 2 plus 3?")) >= 0
