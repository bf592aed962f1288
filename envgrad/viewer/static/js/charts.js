// Line charts in SVG: a few series over optimizer steps, with a cursor that the mouse or the arrow keys move.

import { h, svg, refill } from "./dom.js";
import { figure } from "./text.js";

const MARGIN = { left: 48, right: 14, top: 10, bottom: 24 };

/**
 * A chart that redraws itself when its width changes.
 *
 * series: [{name, colour: 0..7, dashed, points: [[x, y], ...]}]; y may be null (a gap).
 * options: {height, label, smooth: 0..1, pick: (x) => void, pickLabel, xName}
 */
export function lineChart(series, options) {
  const holder = h("div", { class: "chart", tabindex: "0", role: "group", "aria-label": describe(series, options) });
  const note = h("div", { class: "chart-note", hidden: true, "aria-live": "polite" });
  const state = { series, options, width: 0, cursor: null, marks: null };
  const redraw = () => draw(holder, note, state);
  const observer = new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width && width !== state.width) {
      state.width = width;
      redraw();
    }
  });
  observer.observe(holder);
  listen(holder, note, state);
  return {
    element: holder,
    update(next, more) {
      state.series = next;
      Object.assign(state.options, more);
      holder.setAttribute("aria-label", describe(next, state.options));
      if (state.width) redraw();
    },
  };
}

function describe(series, options) {
  const parts = series.map((one) => {
    const last = one.points.findLast((point) => point[1] !== null);
    return last ? `${one.name} ${figure(last[1])} at ${last[0]}` : `${one.name} without figures`;
  });
  const keys = options.pick ? ` Arrow keys move along, Enter opens the ${options.pickLabel ?? "step"}.` : "";
  return `${options.label}: ${parts.slice(0, 8).join(", ")}.${keys}`;
}

/** The running mean with weight `smooth` on the past. */
export function smoothed(points, smooth) {
  if (!smooth) return points;
  let mean = null;
  return points.map(([x, y]) => {
    if (y !== null) mean = mean === null ? y : smooth * mean + (1 - smooth) * y;
    return [x, y === null ? null : mean];
  });
}

function draw(holder, note, state) {
  const { series, options, width } = state;
  const height = options.height ?? 240;
  const box = bounds(series);
  const right = width - MARGIN.right;
  const bottom = height - MARGIN.bottom;
  const x = (value) => MARGIN.left + ((value - box.x0) / (box.x1 - box.x0)) * (right - MARGIN.left);
  const y = (value) => bottom - ((value - box.y0) / (box.y1 - box.y0)) * (bottom - MARGIN.top);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const tick of ticks(box.y0, box.y1, Math.max(2, Math.floor(height / 45)))) {
    root.append(
      svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: MARGIN.left - 8, y: y(tick) + 4, "text-anchor": "end" }, figure(tick)),
    );
  }
  for (const tick of ticks(box.x0, box.x1, Math.max(3, Math.floor(width / 110))).filter(Number.isInteger)) {
    root.append(svg("text", { class: "tick", x: x(tick), y: height - 6, "text-anchor": "middle" }, figure(tick, 6)));
  }
  for (const one of series) {
    const clean = one.points.filter((point) => point[1] !== null);
    const curve = smoothed(one.points, options.smooth ?? 0);
    if (options.smooth && clean.length > 2) root.append(svg("path", { class: `raw c${one.colour}`, d: path(one.points, x, y) }));
    root.append(svg("path", { class: `curve c${one.colour}${one.dashed ? " dashed" : ""}`, d: path(curve, x, y) }));
    if (clean.length <= 2 || one.dots) {
      for (const [px, py] of curve) {
        if (py !== null) root.append(svg("circle", { class: `dot c${one.colour}`, cx: x(px), cy: y(py), r: 3 }));
      }
    }
  }
  const rule = svg("line", { class: "cursor", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
  root.append(rule);
  state.marks = { x, box, rule, right, xs: positions(series) };
  refill(holder, root, note);
  if (state.cursor !== null) point(note, state, state.cursor);
}

function bounds(series) {
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const one of series) {
    for (const [px, py] of one.points) {
      x0 = Math.min(x0, px);
      x1 = Math.max(x1, px);
      if (py === null) continue;
      y0 = Math.min(y0, py);
      y1 = Math.max(y1, py);
    }
  }
  if (x0 > x1) [x0, x1] = [0, 1];
  if (y0 > y1) [y0, y1] = [0, 1];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  if (y0 === y1) {
    const room = Math.abs(y0) * 0.1 || 0.5;
    [y0, y1] = [y0 - room, y1 + room];
  }
  const room = (y1 - y0) * 0.06;
  return { x0, x1, y0: y0 - room, y1: y1 + room };
}

/** Round values between `low` and `high`, about `wanted` of them. */
export function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function path(points, x, y) {
  let text = "";
  let pen = false;
  for (const [px, py] of points) {
    if (py === null) {
      pen = false;
      continue;
    }
    text += `${pen ? "L" : "M"}${x(px).toFixed(1)},${y(py).toFixed(1)}`;
    pen = true;
  }
  return text;
}

function positions(series) {
  const all = new Set();
  for (const one of series) for (const [px, py] of one.points) if (py !== null) all.add(px);
  return [...all].sort((a, b) => a - b);
}

function listen(holder, note, state) {
  const at = (event) => {
    const { marks } = state;
    if (!marks || !marks.xs.length) return null;
    const left = event.clientX - holder.getBoundingClientRect().left;
    let best = marks.xs[0];
    for (const value of marks.xs) if (Math.abs(marks.x(value) - left) < Math.abs(marks.x(best) - left)) best = value;
    return best;
  };
  holder.addEventListener("pointermove", (event) => {
    const value = at(event);
    if (value !== null) point(note, state, value);
  });
  holder.addEventListener("pointerleave", () => hide(note, state));
  holder.addEventListener("blur", () => hide(note, state));
  holder.addEventListener("click", (event) => {
    const value = at(event);
    if (value !== null) state.options.pick?.(value);
  });
  holder.addEventListener("keydown", (event) => {
    const xs = state.marks?.xs ?? [];
    if (!xs.length) return;
    const now = state.cursor === null ? xs.length : xs.indexOf(state.cursor);
    const jump = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: xs.length - 1 }[event.key];
    if (jump !== undefined) {
      event.preventDefault();
      point(note, state, xs[Math.min(Math.max(jump, 0), xs.length - 1)]);
    } else if (event.key === "Enter" && state.cursor !== null) {
      event.stopPropagation();
      state.options.pick?.(state.cursor);
    }
  });
}

function hide(note, state) {
  state.cursor = null;
  note.hidden = true;
  state.marks?.rule.setAttribute("visibility", "hidden");
}

function point(note, state, value) {
  const { marks, series, options } = state;
  state.cursor = value;
  const left = marks.x(value);
  marks.rule.setAttribute("x1", left);
  marks.rule.setAttribute("x2", left);
  marks.rule.setAttribute("visibility", "visible");
  const rows = [];
  for (const one of series) {
    const index = one.points.findIndex(([px]) => px === value);
    if (index < 0 || one.points[index][1] === null) continue;
    const drawn = smoothed(one.points, options.smooth ?? 0)[index][1];
    rows.push(
      h("div", { class: "chart-row" }, h("i", { class: `swatch c${one.colour}${one.dashed ? " dashed" : ""}` }),
        h("span", {}, one.name),
        h("b", {}, figure(one.points[index][1]), options.smooth ? ` (${figure(drawn)})` : "")),
    );
  }
  refill(note, h("div", { class: "chart-x" }, `${options.xName ?? "step"} ${figure(value, 6)}`), rows);
  note.hidden = false;
  const wide = note.offsetWidth;
  const place = left + 14 + wide > marks.right ? Math.max(4, left - wide - 14) : left + 14;
  note.style.setProperty("left", `${place}px`);
}

/** A small bar of parts that sum to a whole: [[name, value], ...]. */
export function shareBar(parts, format) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return null;
  const bar = parts.map(([name, value], index) =>
    h("span", { class: `share c${index % 8}`, vars: { "--w": value / total }, title: `${name}: ${format(value)}` }),
  );
  const legend = parts.map(([name, value], index) =>
    h("span", { class: "legend-item" }, h("i", { class: `swatch c${index % 8}` }), `${name} ${format(value)}`),
  );
  return h("div", { class: "shares" }, h("div", { class: "share-bar", "aria-hidden": "true" }, bar), h("div", { class: "legend" }, legend));
}
