// The table of replicas, with their current load and their totals.

import { byId, count, duration, element, percent } from "./elements.js";

const COLUMNS = [
  ["running", (s) => count(s.running_requests)],
  ["queued", (s) => count(s.waiting_requests)],
  ["pages in use", (s) => percent((s.locked_pages + s.owned_pages) / s.total_pages)],
  ["pages cached", (s) => percent(s.evictable_pages / s.total_pages)],
  ["finished", (s) => count(s.finished_requests)],
  ["prompt tokens", (s) => count(s.prompt_tokens)],
  ["found cached", (s) => (s.prompt_tokens ? percent(Math.min(1, s.cached_tokens / s.prompt_tokens)) : "–")],
  ["generated", (s) => count(s.generated_tokens)],
  ["evicted", (s) => count(s.evicted_tokens)],
  ["age at eviction", (s) => (s.eviction_age_s === null ? "–" : duration(s.eviction_age_s))],
  ["retracted", (s) => count(s.retracted_tokens)],
];

/** Write the table's head. */
export function openReplicas() {
  const names = ["replica", ...COLUMNS.map(([name]) => name)];
  byId("replica-names").append(...names.map((name) => element("th", { scope: "col" }, name)));
}

/** Show the replicas. */
export function showReplicas(replicas) {
  byId("replica-rows").replaceChildren(...replicas.map(row));
}

function row({ name, ready, stats }) {
  const mark = element("span", { class: ready ? "dot ok" : "dot bad" });
  const head = element("th", { scope: "row" }, mark, ready ? name : `${name} is down`);
  const cells = COLUMNS.map(([, read]) => element("td", {}, stats === null ? "–" : read(stats)));
  return element("tr", {}, head, ...cells);
}
