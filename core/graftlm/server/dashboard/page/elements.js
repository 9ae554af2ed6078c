// Elements of the page. Strings from outside become text, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Return the page's element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Return a new HTML element with attributes and children; strings become text. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Return a new SVG element with attributes and children. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Return a count as text: 7, 2.5, 4,567, 1.2M. */
export function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 1 : 0)}M`;
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

/** Return a count as short text: 7, 2.5, 4.6K, 131K. */
export function shortCount(value) {
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

/** Return a share as a percentage. */
export function percent(share) {
  return `${Math.round(share * 100)} %`;
}

/** Return a ratio with two decimals. */
export function ratio(value) {
  return value.toFixed(2);
}

/** Return a latency in seconds as text: 1.6 ms, 38 ms, 1.2 s. */
export function latency(seconds) {
  return seconds < 0.01 ? `${(seconds * 1000).toFixed(1)} ms` : duration(seconds);
}

/** Return a duration in seconds as text: 38 ms, 1.2 s, 3 min, 2 h. */
export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86400) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}
