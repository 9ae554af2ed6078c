// A chart of the last minutes, with lines or stacked areas.

import { count, duration, element, shortCount, svg } from "./elements.js";

const SPAN_S = 300;
const HEIGHT = 132;
const MARGIN = { top: 8, right: 8, bottom: 20, left: 44 };

export class Chart {
  /**
   * @param {{title: string, series: {name: string, label: string, colour: string}[], stacked?: boolean,
   *   unit?: string, top?: number, exact?: boolean, format?: (value: number) => string,
   *   formatTick?: (value: number) => string}} options
   *   `top` is the minimum of the scale's upper end. With `exact`, the scale ends at the highest value instead of a
   *   round number.
   */
  constructor(options) {
    const defaults = { format: count, formatTick: shortCount, unit: "", top: 1, exact: false, stacked: false };
    this.options = { ...defaults, ...options };
    this.points = [];
    this.nowS = 0;
    this.width = 0;
    this.pickedS = null;
    this.values = new Map();
    this.drawing = svg("svg", { height: HEIGHT, tabindex: "0", role: "img" });
    this.element = element("figure", { class: "card chart" }, this.head(), this.drawing);
    this.drawing.addEventListener("pointermove", (event) => this.pickAt(event.offsetX));
    this.drawing.addEventListener("pointerleave", () => this.pick(null));
    this.drawing.addEventListener("blur", () => this.pick(null));
    this.drawing.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(([entry]) => this.resize(entry.contentRect.width)).observe(this.element);
  }

  head() {
    const legend = element("ul", { class: "legend" });
    for (const { name, label, colour } of this.options.series) {
      const value = element("b", {}, "–");
      this.values.set(name, value);
      legend.append(element("li", { "data-series": name }, element("i", { class: colour }), `${label} `, value));
    }
    this.when = element("span", { class: "quiet" }, this.options.unit);
    return element("figcaption", {}, element("div", { class: "title" }, element("h2", {}, this.options.title), this.when), legend);
  }

  /** Draw points, oldest first. Each has `time_s` and a number or null for each series. */
  update(points, nowS) {
    this.points = points;
    this.nowS = nowS;
    this.draw();
  }

  resize(width) {
    this.width = Math.floor(width);
    this.drawing.setAttribute("width", this.width);
    this.draw();
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.points.length) return;
    event.preventDefault();
    const last = this.points.length - 1;
    const current = this.pickedS === null ? last + 1 : this.indexAt(this.pickedS);
    this.pick(this.points[Math.min(last, Math.max(0, current + step))].time_s);
  }

  pickAt(x) {
    const inner = this.width - MARGIN.left - MARGIN.right;
    this.pick(this.nowS - SPAN_S * (1 - (x - MARGIN.left) / inner));
  }

  pick(timeS) {
    this.pickedS = timeS;
    this.draw();
  }

  indexAt(timeS) {
    const { points } = this;
    let nearest = 0;
    for (let i = 1; i < points.length; i++) {
      if (Math.abs(points[i].time_s - timeS) < Math.abs(points[nearest].time_s - timeS)) nearest = i;
    }
    return nearest;
  }

  draw() {
    if (!this.width) return;
    const layers = this.layers();
    const highest = Math.max(this.options.top, ...layers.flatMap((layer) => layer.tops.filter((v) => v !== null)));
    const ticks = this.options.exact ? [0, highest / 2, highest] : niceTicks(highest);
    const scale = this.scale(ticks.at(-1));
    const parts = [...this.grid(ticks, scale)];
    for (const layer of layers) parts.push(...this.shape(layer, scale));
    const shown = this.pickedS === null ? this.points.at(-1) : this.points[this.indexAt(this.pickedS)];
    if (this.pickedS !== null && shown) {
      const x = scale.x(shown.time_s);
      parts.push(svg("line", { class: "picked", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    }
    this.drawing.replaceChildren(...parts);
    if (shown) this.tell(shown);
  }

  /** Return the bounds of each series: {name, colour, bottoms, tops}, with one number or null per point. */
  layers() {
    let bottoms = this.points.map(() => 0);
    return this.options.series.map(({ name, colour }) => {
      const values = this.points.map((point) => point[name]);
      const tops = this.options.stacked ? values.map((value, i) => bottoms[i] + value) : values;
      const layer = { name, colour, bottoms, tops };
      if (this.options.stacked) bottoms = tops;
      return layer;
    });
  }

  scale(highest) {
    const innerWidth = this.width - MARGIN.left - MARGIN.right;
    const innerHeight = HEIGHT - MARGIN.top - MARGIN.bottom;
    return {
      x: (timeS) => MARGIN.left + innerWidth * (1 - (this.nowS - timeS) / SPAN_S),
      y: (value) => MARGIN.top + innerHeight * (1 - value / highest),
    };
  }

  *grid(ticks, scale) {
    for (const tick of ticks) {
      const y = scale.y(tick);
      yield svg("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y });
      yield svg("text", { class: "tick", x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, this.options.formatTick(tick));
    }
    const ends = [[MARGIN.left, "start", "5 min ago"], [this.width - MARGIN.right, "end", "now"]];
    for (const [x, anchor, text] of ends) {
      yield svg("text", { class: "tick", x, y: HEIGHT - 4, "text-anchor": anchor }, text);
    }
  }

  /** Yield a layer's area and line. A missing value leaves a gap. */
  *shape(layer, scale) {
    for (const run of runs(this.points, layer)) {
      const top = run.map(([timeS, , value]) => `${scale.x(timeS).toFixed(1)},${scale.y(value).toFixed(1)}`);
      const bottom = run.map(([timeS, value]) => `${scale.x(timeS).toFixed(1)},${scale.y(value).toFixed(1)}`).reverse();
      const kind = this.options.stacked ? "layer" : "shade";
      yield svg("path", { class: `${kind} ${layer.colour}`, d: `M${top.join("L")}L${bottom.join("L")}Z` });
      if (!this.options.stacked) {
        yield svg("path", { class: `line ${layer.colour}`, "data-series": layer.name, d: `M${top.join("L")}` });
      }
    }
  }

  /** Write the values of a point into the legend. */
  tell(point) {
    const { format, series, title, unit } = this.options;
    const said = [];
    for (const { name, label } of series) {
      const text = point[name] === null ? "–" : format(point[name]);
      this.values.get(name).textContent = text;
      said.push(`${label} ${text}`);
    }
    this.when.textContent = this.pickedS === null ? unit : `${duration(this.nowS - point.time_s)} ago`;
    this.drawing.setAttribute("aria-label", `${title}: ${said.join(", ")}`);
  }
}

/** Return the intervals without missing values, as lists of [time, bottom, top]. */
function runs(points, { bottoms, tops }) {
  const found = [];
  let run = null;
  points.forEach((point, i) => {
    if (tops[i] === null) {
      run = null;
      return;
    }
    if (run === null) found.push((run = []));
    run.push([point.time_s, bottoms[i], tops[i]]);
  });
  return found;
}

/** Return three round numbers from 0 to at least `highest`. */
function niceTicks(highest) {
  const rough = highest / 2;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  return [0, step, 2 * step];
}
