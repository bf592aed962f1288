// The run at a glance: reward by environment, figures of the last step, every other metric as a small chart.

import { h, link, refill, whenSeen, later } from "./dom.js";
import { get } from "./api.js";
import { lineChart } from "./charts.js";
import { choice, nothing } from "./parts.js";
import { count, figure, nodes, plural, signed } from "./text.js";

export const title = "Overview";
const SMOOTH = [["0", "Raw"], ["0.6", "Smooth"], ["0.9", "Smoother"]];

/** Series of a run's rewards: training as lines, evaluation dashed. `tint` shifts the colours. */
export function rewardSeries(steps, environments, name = (text) => text) {
  const series = [];
  environments.forEach((environment, index) => {
    for (const [kind, values, dashed] of [["", steps.rewards, false], ["evaluation", steps.eval_rewards, true]]) {
      const column = values[environment];
      if (!column) continue;
      const points = steps.steps.map((step, at) => [step, column[at]]).filter((point) => point[1] !== null);
      const label = [environment || "reward", kind].filter(Boolean).join(", ");
      series.push({ key: `${dashed ? "eval:" : ""}${environment}`, name: name(label), colour: index % 8, dashed, dots: dashed, points });
    }
  });
  return series;
}

export async function open(params, ctx) {
  const element = h("div", { class: "page" });
  const page = { element, update, live, ctx, params, steps: null };
  page.steps = await get("steps", { run: ctx.run.id }, ctx.signal);
  build(page);
  return page;

  async function update(next, context) {
    const other = context.run !== page.ctx.run;
    page.ctx = context;
    page.params = next;
    if (other) {
      page.steps = await get("steps", { run: context.run.id }, context.signal);
      build(page);
    } else redraw(page);
  }

  async function live(run, context) {
    if (run !== page.ctx.run) return;
    page.ctx = context;
    page.steps = await get("steps", { run: run.id }, context.signal);
    redraw(page);
    await page.metrics?.refresh();
  }
}

function build(page) {
  const { ctx } = page;
  page.metrics = null;
  if (!page.steps.steps.length) {
    refill(page.element, h("h1", { tabindex: "-1" }, "Overview"),
      nothing("No episode yet.", "They appear here as the run plays them."));
    return;
  }
  page.figures = h("section", { class: "tiles", "aria-label": "The last step" });
  page.chartHolder = h("div", {});
  page.legend = h("div", { class: "legend" });
  page.smoothing = h("div", { class: "end" });
  page.recent = h("section", { class: "panel", "aria-labelledby": "recent" });
  page.metrics = metrics(page);
  page.heading = h("p", { class: "soft" });
  refill(page.element,
    h("div", { class: "head" }, h("div", { class: "head-text" }, h("h1", { tabindex: "-1" }, "Overview"), page.heading),
      h("div", { class: "end" }, runSwitch(ctx, page))),
    page.figures,
    h("section", { class: "panel", "aria-labelledby": "rewards" },
      h("div", { class: "panel-head" }, h("h2", { id: "rewards" }, "Reward by environment"), page.smoothing),
      page.chartHolder, page.legend),
    page.recent, page.metrics.element);
  page.chart = null;
  redraw(page);
}

/** Buttons that change between the runs, where there are two. */
export function runSwitch(ctx, page) {
  if (ctx.runs.length < 2) return null;
  return choice("Run", ctx.runs.map((run) => [run.id, run.name]), ctx.run.id,
    (id) => page.ctx.change({ run: id === ctx.runs[0].id ? "" : id }, false));
}

function redraw(page) {
  const { steps, ctx } = page;
  if (!steps.steps.length) return;
  if (!page.metrics) {
    build(page);
    return;
  }
  const smooth = Number(page.params.smooth ?? 0);
  const hidden = new Set((page.params.hide ?? "").split("|").filter(Boolean));
  const all = rewardSeries(steps, ctx.run.environments);
  const series = all.filter((one) => !hidden.has(one.key));
  const options = {
    height: 300, label: "Mean reward by environment over steps", smooth,
    pick: (step) => ctx.go("step", { step, run: ctx.runParam }),
  };
  if (page.chart) page.chart.update(series, options);
  else {
    page.chart = lineChart(series, options);
    refill(page.chartHolder, page.chart.element);
  }
  refill(page.smoothing, choice("Smoothing", SMOOTH, String(page.params.smooth ?? "0"),
    (value) => page.ctx.change({ smooth: value === "0" ? "" : value })));
  refill(page.legend, all.map((one) => legendItem(page, one, hidden)));
  heading(page);
  tiles(page);
  recent(page);
  page.metrics.redraw();
}

function legendItem(page, one, hidden) {
  const shown = !hidden.has(one.key);
  const toggle = () => {
    const next = new Set(hidden);
    if (shown) next.add(one.key);
    else next.delete(one.key);
    page.ctx.change({ hide: [...next].join("|") });
  };
  return h("button", { type: "button", class: "legend-item", "aria-pressed": String(shown), on: { click: toggle } },
    h("i", { class: `swatch c${one.colour}${one.dashed ? " dashed" : ""}` }), nodes(one.name));
}

function heading(page) {
  const { run } = page.ctx;
  const played = page.steps.steps.filter((_, at) => page.steps.episodes[at] || page.steps.eval_episodes[at]).length;
  const parts = [...run.about, plural(run.episodes, "episode"), plural(played, "step")];
  if (run.dropped) parts.push(`${count(run.dropped)} old episodes dropped to keep the log within its limit`);
  refill(page.heading, parts.join(" \u00b7 "));
}

function tiles(page) {
  const { steps } = page;
  const last = (name) => {
    const column = steps.headline[name];
    const at = column ? column.findLastIndex((value) => value !== null) : -1;
    return at < 0 ? null : { value: column[at], step: steps.steps[at], first: column.find((value) => value !== null) };
  };
  const total = (column) => column.reduce((sum, value) => sum + value, 0);
  const shown = [];
  const reward = last("reward");
  if (reward) shown.push(tile("Reward", figure(reward.value), `${signed(reward.value - reward.first)} since the first step`));
  const evaluated = last("eval_reward");
  if (evaluated) shown.push(tile("Evaluation", figure(evaluated.value), `at step ${evaluated.step}`));
  for (const [name, label, format] of HEADLINES) {
    const found = last(name);
    if (found) shown.push(tile(label, format(found.value), `at step ${found.step}`));
  }
  const failed = total(steps.failed);
  shown.push(tile("Failed episodes", count(failed), failed ? "open them" : "none so far",
    failed ? { run: page.ctx.runParam, failed: "true" } : null, failed ? "bad" : ""));
  refill(page.figures, shown);
}

const percent = (value) => `${figure(100 * value)}%`;
const HEADLINES = [
  ["truncated", "Cut off by a limit", percent],
  ["turns", "Turns", (value) => figure(value)],
  ["tokens", "Tokens sampled", (value) => figure(value, 4)],
  ["seconds", "Seconds an episode", (value) => figure(value)],
];

function tile(label, value, note, params, tone = "") {
  const body = [h("span", { class: "tile-label" }, label), h("span", { class: `tile-value num ${tone}` }, value), h("span", { class: "tile-note" }, note)];
  return params ? link("episodes", params, { class: "tile" }, body) : h("div", { class: "tile" }, body);
}

function recent(page) {
  const { steps, ctx } = page;
  const rows = steps.steps.map((step, at) => ({ step, at })).filter(({ at }) => steps.episodes[at] || steps.eval_episodes[at]).slice(-8).reverse();
  const environments = ctx.run.environments.filter((name) => steps.rewards[name] || steps.eval_rewards[name]);
  const cell = (values, name, at) => figure(values[name]?.[at] ?? null);
  refill(page.recent,
    h("div", { class: "panel-head" }, h("h2", { id: "recent" }, "Latest steps")),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "recent" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "step"), environments.map((name) => h("th", { scope: "col", class: "num" }, nodes(name || "reward"))),
        h("th", { scope: "col", class: "num" }, "episodes"), h("th", { scope: "col", class: "num" }, "failed"))),
      h("tbody", {}, rows.map(({ step, at }) => h("tr", {},
        h("td", {}, link("step", { step, split: steps.episodes[at] ? "" : "eval", run: ctx.runParam }, { class: "nowrap", data: { item: "" } }, `step ${step}`)),
        environments.map((name) => h("td", { class: "num" }, cell(steps.rewards, name, at),
          steps.eval_rewards[name]?.[at] === undefined || steps.eval_rewards[name][at] === null ? null
            : h("span", { class: "soft small" }, ` eval ${cell(steps.eval_rewards, name, at)}`))),
        h("td", { class: "num" }, count(steps.episodes[at] + steps.eval_episodes[at])),
        h("td", { class: `num${steps.failed[at] ? " bad" : ""}` }, count(steps.failed[at]))))))));
}

/** Every metric of the trainer as a small chart, by the part of its name before the slash; fetched when it comes near the screen. */
function metrics(page) {
  const list = h("div", { class: "metric-sections" });
  const field = h("input", { type: "search", placeholder: "Filter metrics, e.g. loss", "aria-label": "Filter metrics by name", value: page.params.metric ?? "" });
  const element = h("section", { class: "panel", "aria-labelledby": "metrics" },
    h("div", { class: "panel-head" }, h("h2", { id: "metrics" }, "All metrics"), h("div", { class: "end" }, field)), list);
  const state = { data: null, charts: new Map() };
  field.addEventListener("input", later(120, () => {
    page.ctx.note({ metric: field.value });
    page.params = { ...page.params, metric: field.value };
    redrawMetrics();
  }));
  whenSeen(element, refresh);
  async function refresh() {
    state.data = await get("metrics", { run: page.ctx.run.id });
    redrawMetrics();
  }
  function redrawMetrics() {
    if (!state.data) return;
    const wanted = field.value.trim().toLowerCase();
    const names = Object.keys(state.data).filter((name) => name.toLowerCase().includes(wanted)).sort();
    if (!names.length) {
      state.charts.clear();
      refill(list, h("p", { class: "soft" }, wanted ? "No metric has this in its name." : "The run has logged no metrics yet."));
      return;
    }
    const kept = new Map();
    const draw = (name) => {
      const chart = state.charts.get(name) ?? small(page, name);
      kept.set(name, chart);
      chart.draw(state.data[name], Number(page.params.smooth ?? 0));
      return chart.element;
    };
    refill(list, sections(page, names, wanted, draw));
    state.charts = kept;
  }
  return { element, refresh: () => (state.data ? refresh() : Promise.resolve()), redraw: redrawMetrics };
}

/** Metrics without a slash first and open; the others folded, until the address or a filter opens them. */
function sections(page, names, wanted, draw) {
  const parts = new Map([["", []]]);
  for (const name of names) {
    const part = name.includes("/") ? name.split("/")[0] : "";
    parts.set(part, [...(parts.get(part) ?? []), name]);
  }
  const opened = new Set((page.params.open ?? "").split("|").filter(Boolean));
  return [...parts].filter(([, own]) => own.length).map(([part, own]) => {
    const grid = h("div", { class: "metric-grid" }, own.map(draw));
    if (!part) return grid;
    const folder = h("details", { class: "metric-section", open: wanted || opened.has(part) || parts.size === 2 && !parts.get("").length },
      h("summary", {}, h("h3", {}, nodes(part)), h("span", { class: "soft small" }, count(own.length))), grid);
    folder.addEventListener("toggle", () => {
      if (field(page)) return;
      if (folder.open) opened.add(part);
      else opened.delete(part);
      page.params = { ...page.params, open: [...opened].join("|") };
      page.ctx.note({ open: page.params.open });
    });
    return folder;
  });
}

// While metrics are filtered by name all sections are open: that is not kept.
const field = (page) => Boolean(page.params.metric);

function small(page, name) {
  const value = h("span", { class: "num soft" });
  const holder = h("div", { class: "metric-chart" });
  const element = h("figure", { class: "metric" }, h("figcaption", {}, h("span", { class: "mono" }, nodes(name)), value), holder);
  let chart = null;
  let latest = null;
  whenSeen(element, () => {
    chart = lineChart(latest.series, latest.options);
    refill(holder, chart.element);
  });
  return {
    element,
    draw(points, smooth) {
      const last = points.at(-1);
      refill(value, last ? figure(last[1], 4) : "");
      latest = {
        series: [{ name, colour: 7, points }],
        options: { height: 110, label: name, smooth, pick: (step) => page.ctx.go("step", { step, run: page.ctx.runParam }) },
      };
      chart?.update(latest.series, latest.options);
    },
  };
}
