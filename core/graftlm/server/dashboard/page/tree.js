// The prefix tree. A node is as wide as its number of tokens, and as high as the number of leaves below it.
// Its colour is warm if it was used recently.

import { byId, count, duration, element } from "./elements.js";

const ROW = 22;
const MIN_WIDTH = 4;
const COLD_S = 600;

/** Arrow key -> function that returns the next node. */
const STEPS = {
  ArrowLeft: (node) => node.up,
  ArrowRight: (node) => node.children[0],
  ArrowUp: (node) => node.siblings[node.index - 1],
  ArrowDown: (node) => node.siblings[node.index + 1],
};

export class Tree {
  constructor() {
    this.trees = [];
    this.chosen = null; // name of the shown replica
    this.focused = null; // the id of the node that the Tab key reaches
    this.pointed = null; // the id of the node under the pointer
    this.nodes = new Map();
    this.container = byId("tree-nodes");
    this.select = byId("tree-replica");
    this.select.addEventListener("change", () => this.choose(this.select.value));
    this.container.addEventListener("keydown", (event) => this.onKey(event));
    this.container.addEventListener("focusin", (event) => this.onFocus(event.target));
    this.container.addEventListener("pointerover", (event) => this.point(idOf(event.target)));
    this.container.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.container);
  }

  /** Show the replicas' trees from the server. */
  update(trees) {
    this.trees = trees;
    const names = trees.map((tree) => tree.replica);
    if (!names.includes(this.chosen)) this.chosen = names[0] ?? null;
    byId("tree-choice").hidden = names.length < 2;
    if (names.join() !== [...this.select.options].map((option) => option.value).join()) {
      this.select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    }
    this.select.value = this.chosen;
    this.draw();
  }

  /** Show the reason why there is no tree. */
  fail(message) {
    this.trees = [];
    this.draw();
    byId("tree-detail").textContent = message;
  }

  choose(replica) {
    this.chosen = replica;
    this.draw();
  }

  draw() {
    const tree = this.trees.find((candidate) => candidate.replica === this.chosen);
    const { placed, numRows, numTokens } = place(tree?.nodes ?? []);
    const hadFocus = this.container.contains(document.activeElement);
    this.nodes = new Map(placed.map((node) => [node.id, node]));
    if (!this.nodes.has(this.focused)) this.focused = placed[0]?.id ?? null;
    const perToken = (this.container.clientWidth - MIN_WIDTH) / Math.max(1, numTokens);
    const boxes = placed.map((node) => this.box(node, perToken));
    const ground = element("div", { class: "ground", role: "none" }, ...boxes);
    ground.style.height = `${numRows * ROW}px`;
    this.container.replaceChildren(ground);
    byId("tree-size").textContent = tree ? size(tree, placed.length) : "";
    if (hadFocus) this.boxOf(this.focused)?.focus({ preventScroll: true });
    this.tell();
  }

  box(node, perToken) {
    const box = element(
      "div",
      {
        class: node.num_locks ? "node locked" : "node",
        role: "treeitem",
        "aria-level": node.level,
        "aria-label": describe(node),
        "data-id": node.id,
        tabindex: node.id === this.focused ? "0" : "-1",
      },
      node.text.replaceAll("\n", "⏎") + (node.is_cut ? "…" : ""),
    );
    box.style.left = `${node.start * perToken}px`;
    box.style.width = `${Math.max(MIN_WIDTH, node.num_tokens * perToken)}px`;
    box.style.top = `${node.row * ROW}px`;
    box.style.height = `${node.rows * ROW}px`;
    box.style.setProperty("--warmth", `${Math.round(warmth(node.age_s) * 100)}%`);
    return box;
  }

  boxOf(id) {
    return this.container.querySelector(`[data-id="${id}"]`);
  }

  onFocus(target) {
    const id = idOf(target);
    if (!this.nodes.has(id)) return;
    this.boxOf(this.focused)?.setAttribute("tabindex", "-1");
    this.focused = id;
    target.setAttribute("tabindex", "0");
    this.tell();
  }

  point(id) {
    this.pointed = id;
    this.tell();
  }

  onKey(event) {
    const node = this.nodes.get(this.focused);
    const next = STEPS[event.key];
    if (!node || !next) return;
    event.preventDefault();
    const target = next(node);
    if (target) this.boxOf(target.id).focus();
  }

  /** Describe the node under the pointer, or else the focused node. */
  tell() {
    const id = this.pointed ?? idOf(document.activeElement);
    const node = this.nodes.get(id);
    let text = this.nodes.size ? "Point at a node, or walk with the arrow keys, to see what it holds." : "";
    if (!this.nodes.size && this.trees.length) text = "Nothing is cached yet. Send a message.";
    byId("tree-detail").textContent = node ? `${describe(node)}\n${node.text}${node.is_cut ? "…" : ""}` : text;
  }
}

/** Return the nodes with their positions (`start` in tokens, `row`, number of `rows`, `level`) and relatives. */
function place(plain) {
  const nodes = new Map(plain.map((node) => [node.id, { ...node, children: [] }]));
  const roots = [];
  for (const node of nodes.values()) {
    node.up = nodes.get(node.parent) ?? null;
    (node.up ? node.up.children : roots).push(node);
  }
  const byAge = (a, b) => a.id - b.id;
  for (const siblings of [roots, ...[...nodes.values()].map((node) => node.children)]) {
    siblings.sort(byAge);
    siblings.forEach((node, i) => Object.assign(node, { siblings, index: i }));
  }
  const placed = [];
  let [numRows, numTokens] = [0, 0];
  // Parents are placed before their children. The rows of a parent are computed after those of its descendants.
  const waiting = [...roots].reverse();
  while (waiting.length) {
    const node = waiting.pop();
    node.start = node.up ? node.up.start + node.up.num_tokens : 0;
    node.level = node.up ? node.up.level + 1 : 1;
    node.row = numRows;
    numTokens = Math.max(numTokens, node.start + node.num_tokens);
    placed.push(node);
    if (node.children.length) waiting.push(...[...node.children].reverse());
    else numRows += 1;
  }
  for (const node of [...placed].reverse()) {
    node.rows = node.children.reduce((sum, child) => sum + child.rows, 0) || 1;
  }
  return { placed, numRows, numTokens };
}

/** Return the id of a node's box; null for other elements. */
function idOf(target) {
  return target?.dataset?.id === undefined ? null : Number(target.dataset.id);
}

/** Return the warmth of a node: 1 if it was used just now, 0 after ten minutes. */
function warmth(ageS) {
  return 1 - Math.min(1, Math.log1p(ageS) / Math.log1p(COLD_S));
}

function size(tree, numShown) {
  const numTokens = tree.nodes.reduce((sum, node) => sum + node.num_tokens, 0);
  const shown = numShown < tree.total_nodes ? `the ${count(numShown)} largest of ${count(tree.total_nodes)}` : count(numShown);
  return `${shown} nodes, ${count(numTokens)} tokens`;
}

function describe(node) {
  const parts = [
    `${count(node.num_tokens)} tokens in ${count(node.num_pages)} pages`,
    `matched ${count(node.hits)}×`,
    `last used ${duration(node.age_s)} ago`,
  ];
  if (node.num_states) parts.push(`${count(node.num_states)} recurrent states`);
  if (node.num_locks) parts.push(`held by ${count(node.num_locks)} running`);
  if (node.namespace) parts.push(`namespace ${node.namespace}`);
  return parts.join(", ");
}
