// The page, which polls the server's state while it is visible and passes the state to the charts and tables.

import { ApiError, askForKey, requestJson } from "./api.js";
import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { byId, count, duration, element, latency, percent, ratio } from "./elements.js";
import { openReplicas, showReplicas } from "./replicas.js";
import { Tree } from "./tree.js";

const STATE_MS = 1000;
const TREE_MS = 3000;
const MAX_WAIT_MS = 15000;
const SPAN_S = 300;

const charts = [
  new Chart({
    title: "Throughput",
    unit: "tokens a second",
    series: [
      { name: "prompt_tokens_per_s", label: "prompt", colour: "blue" },
      { name: "cached_tokens_per_s", label: "of it cached", colour: "teal" },
      { name: "generated_tokens_per_s", label: "generated", colour: "orange" },
    ],
  }),
  new Chart({
    title: "Time to first token",
    unit: "over 10 s",
    series: [
      { name: "first_token_p50_s", label: "median", colour: "blue" },
      { name: "first_token_p95_s", label: "95th percentile", colour: "orange" },
    ],
    top: 0.01,
    format: latency,
    formatTick: latency,
  }),
  new Chart({
    title: "Time between tokens",
    unit: "of a request, over 10 s",
    series: [
      { name: "inter_token_p50_s", label: "median", colour: "blue" },
      { name: "inter_token_p95_s", label: "95th percentile", colour: "orange" },
    ],
    top: 0.002,
    format: latency,
    formatTick: latency,
  }),
  new Chart({
    title: "Requests",
    series: [
      { name: "running_requests", label: "running", colour: "blue" },
      { name: "queued_requests", label: "queued", colour: "orange" },
    ],
    top: 2,
  }),
  new Chart({
    title: "KV pages",
    stacked: true,
    exact: true,
    series: [
      { name: "owned_pages", label: "owned", colour: "orange" },
      { name: "locked_pages", label: "locked", colour: "blue" },
      { name: "evictable_pages", label: "evictable", colour: "teal" },
      { name: "free_pages", label: "free", colour: "grey" },
    ],
  }),
  new Chart({
    title: "Hit rate",
    unit: "of the prompt tokens of 30 s",
    series: [{ name: "hit_rate", label: "found cached", colour: "teal" }],
    format: percent,
    formatTick: percent,
  }),
  new Chart({
    title: "Tokens per step",
    unit: "of a request, over 30 s",
    series: [{ name: "tokens_per_step", label: "generated", colour: "orange" }],
    top: 2,
    format: ratio,
    formatTick: ratio,
  }),
];
const chat = new Chat();
const tree = new Tree();

let points = [];
let run = null;

/** Request the new points, and show them. */
async function readState() {
  const state = await requestJson(`dashboard/state?after=${points.at(-1)?.time_s ?? 0}`);
  if (state.about.run !== run) {
    const isFirst = run === null;
    run = state.about.run;
    points = [];
    chat.use(state.about);
    if (!isFirst) return; // after a restart, the server has another clock, so request all points again
  }
  const read = state.points.map((row) => Object.fromEntries(state.fields.map((name, i) => [name, row[i]])));
  points = [...points, ...read].filter((point) => point.time_s > state.now_s - SPAN_S);
  for (const chart of charts) chart.update(points, state.now_s);
  showReplicas(state.replicas);
  showAbout(state);
}

function showAbout({ about, health, now_s: nowS }) {
  const length = `${count(about.context_len)} tokens of context`;
  const parts = [about.model, about.dtype, length, `up ${duration(nowS - about.start_s)}`, `v${about.version}`];
  byId("about").replaceChildren(...parts.map((part) => element("span", {}, part)));
  const text = health.problems.join("; ") || (health.draining ? "shutting down" : "ready");
  showHealth(health.ok ? "ok" : "bad", text);
  byId("enter-key").hidden = true;
}

function showHealth(kind, text) {
  byId("health").className = kind;
  // If the same text were set every second, a screen reader would read it out every second.
  if (byId("health-text").textContent !== text) byId("health-text").textContent = text;
}

async function readTree() {
  try {
    tree.update((await requestJson("dashboard/tree", { method: "POST" })).trees);
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401) throw error;
    tree.fail(error.status === 403 ? "The tree shows the text of requests, so it needs the server's admin key." : error.message);
  }
}

/** Wait until the page is not hidden. */
function pageShown() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

/** Wait until the tree is visible, because reading it takes the scheduler's time. */
async function treeShown() {
  await pageShown();
  await new Promise((resolve) => {
    const observer = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      resolve();
    });
    observer.observe(byId("tree"));
  });
}

function wait(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

/** Call `read` periodically while the data is visible. The interval doubles after each failure. */
async function poll(read, shown, intervalMs) {
  for (let failures = 0; ; ) {
    await shown();
    try {
      await read();
      failures = 0;
    } catch (error) {
      failures += 1;
      const refused = error instanceof ApiError;
      showHealth("bad", refused ? error.message : "the server does not answer");
      byId("enter-key").hidden = !refused || error.status !== 401;
    }
    await wait(Math.min(intervalMs * 2 ** failures, MAX_WAIT_MS));
  }
}

byId("charts").append(...charts.map((chart) => chart.element));
byId("enter-key").addEventListener("click", () => askForKey("Requests are sent with this key."));
openReplicas();
poll(readState, pageShown, STATE_MS);
poll(readTree, treeShown, TREE_MS);
