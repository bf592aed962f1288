// Two runs beside each other: their curves, their last figures, and what both made of the same tasks.

import { h, link, refill } from "./dom.js";
import { get } from "./api.js";
import { lineChart } from "./charts.js";
import { choice, endTag, meanReward, nothing, rewardMark, rewardScale, select, step as stepButton, taskName } from "./parts.js";
import { rewardSeries } from "./overview.js";
import { count, figure, line, nodes, plural, signed } from "./text.js";

export const title = "Compare";
const SMOOTH = [["0", "Raw"], ["0.6", "Smooth"], ["0.9", "Smoother"]];

export async function open(params, ctx) {
  const element = h("div", { class: "page" });
  const page = { element, ctx, params, update, live, steps: [] };
  if (ctx.runs.length < 2) {
    refill(element, h("h1", { tabindex: "-1" }, "Compare"), nothing("There is one run only.", "Start the viewer with two: envgrad view RUN OTHER"));
    return { element };
  }
  await read(page);
  build(page);
  await update(params, ctx);
  return page;

  async function update(next, context) {
    page.params = next;
    page.ctx = context;
    curves(page);
    await pairs(page);
  }

  async function live(_run, context) {
    page.ctx = context;
    await read(page);
    curves(page);
    table(page);
  }
}

async function read(page) {
  const { runs, signal } = page.ctx;
  const both = (name) => Promise.all(runs.slice(0, 2).map((run) => get(name, { run: run.id }, signal)));
  [page.steps, page.metrics] = await Promise.all([both("steps"), both("metrics")]);
}

function build(page) {
  const [a, b] = page.ctx.runs;
  page.chartHolder = h("div", {});
  page.tools = h("div", { class: "end" });
  page.metricRows = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "figures" });
  page.pairHolder = h("div", { class: "page" });
  page.legend = h("div", { class: "legend" });
  refill(page.element,
    h("div", { class: "head" }, h("div", { class: "head-text" }, h("h1", { tabindex: "-1" }, "Two runs compared"),
      h("p", { class: "soft" }, h("b", { class: "side-a" }, "A"), " ", nodes(a.name), " \u00b7 ", h("b", { class: "side-b" }, "B"), " ", nodes(b.name)))),
    h("section", { class: "panel", "aria-labelledby": "curves" }, h("div", { class: "panel-head" }, h("h2", { id: "curves" }, "Reward"), page.tools), page.chartHolder, page.legend),
    page.pairHolder,
    h("section", { class: "panel", "aria-labelledby": "figures" }, h("div", { class: "panel-head" }, h("h2", { id: "figures" }, "Metrics, mean of the last tenth")), page.metricRows));
  table(page);
}

function curves(page) {
  const { runs } = page.ctx;
  const names = [...new Set(runs.slice(0, 2).flatMap((run) => run.environments))];
  const wanted = names.includes(page.params.environment) ? page.params.environment : "";
  const shown = wanted ? [wanted] : names;
  const what = page.params.split === "eval" ? "eval" : "train";
  const series = page.steps.flatMap((steps, index) =>
    rewardSeries(steps, names, (text) => `${index ? "B" : "A"}: ${text}`)
      .filter((one) => shown.some((name) => one.key === (what === "eval" ? `eval:${name}` : name)))
      .map((one) => ({ ...one, colour: wanted || names.length === 1 ? index : one.colour, dashed: index === 1, dots: what === "eval" })));
  const options = { height: 280, label: "Mean reward of both runs over steps", smooth: Number(page.params.smooth ?? 0),
    pick: (step) => page.ctx.change({ step }) };
  if (page.chart) page.chart.update(series, options);
  else {
    page.chart = lineChart(series, options);
    refill(page.chartHolder, page.chart.element);
  }
  refill(page.legend, series.map((one) => h("span", { class: "legend-item" }, h("i", { class: `swatch c${one.colour}${one.dashed ? " dashed" : ""}` }), nodes(one.name))));
  const evaluated = page.steps.some((steps) => Object.keys(steps.eval_rewards).length);
  refill(page.tools,
    evaluated ? choice("Split", [["train", "Training"], ["eval", "Evaluation"]], what, (value) => page.ctx.change({ split: value === "train" ? "" : value })) : null,
    names.length > 1 ? select("Environment", [["", "all"], ...names.map((name) => [name, name])], wanted, (environment) => page.ctx.change({ environment })) : null,
    choice("Smoothing", SMOOTH, page.params.smooth ?? "0", (value) => page.ctx.change({ smooth: value === "0" ? "" : value })));
}

function tail(points) {
  if (!points?.length) return null;
  const kept = points.slice(-Math.max(1, Math.ceil(points.length / 10)));
  return kept.reduce((sum, [, value]) => sum + value, 0) / kept.length;
}

function table(page) {
  const [a, b] = page.metrics;
  const names = [...new Set([...Object.keys(a), ...Object.keys(b)])].sort();
  const side = (letter) => h("th", { scope: "col", class: "num" }, h("b", { class: `side-${letter.toLowerCase()}` }, letter));
  if (!names.length) {
    refill(page.metricRows, h("p", { class: "soft" }, "Neither run has logged metrics yet."));
    return;
  }
  refill(page.metricRows, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "metric"), side("A"), side("B"), h("th", { scope: "col", class: "num" }, "B \u2212 A"))),
    h("tbody", {}, names.map((name) => {
      const [left, right] = [tail(a[name]), tail(b[name])];
      return h("tr", {}, h("td", { class: "mono" }, nodes(name)), h("td", { class: "num" }, figure(left, 4)), h("td", { class: "num" }, figure(right, 4)),
        h("td", { class: "num" }, left === null || right === null ? "\u2013" : signed(right - left, 4)));
    }))));
}

/** Groups of both runs at one step; the same task (or draw) in one line. */
async function pairs(page) {
  const { runs, signal } = page.ctx;
  const { params } = page;
  const counted = params.split === "eval" ? "eval_episodes" : "episodes";
  const [first, second] = page.steps.map((one) => new Set(one.steps.filter((_, at) => one[counted][at])));
  const common = [...first].filter((step) => second.has(step));
  if (!common.length) {
    refill(page.pairHolder, nothing("No step in common.", "Both runs must have played the same step."));
    return;
  }
  const asked = Number(params.step ?? common.at(-1));
  const at = common.includes(asked) ? common.indexOf(asked) : common.length - 1;
  const step = common[at];
  const query = { step, split: params.split, environment: params.environment };
  const found = await Promise.all(runs.slice(0, 2).map((run) => get("step", { run: run.id, ...query }, signal)));
  const matched = match(found[0].groups, found[1].groups);
  const scale = rewardScale(found.flatMap((one) => one.groups.flatMap((group) => group.rows)));
  const to = (index) => (common[index] === undefined ? null : { ...params, step: common[index] });
  refill(page.pairHolder, h("section", { class: "panel", "aria-labelledby": "pairs" },
    h("div", { class: "panel-head" }, h("h2", { id: "pairs" }, `Step ${count(step)}: what both made of it`),
      h("span", { class: "soft small" }, `${plural(matched.same, "task")} in common`),
      h("div", { class: "end" }, stepButton("\u2190", "Previous common step", "compare", to(at - 1), "["), stepButton("\u2192", "Next common step", "compare", to(at + 1), "]"))),
    h("div", { class: "pairs-list" }, matched.pairs.map(([a, b]) => pair(page, a, b, scale)))));
}

function match(left, right) {
  const rest = new Set(right);
  const fits = [
    (a, b) => a.rows[0].group_id === b.rows[0].group_id,
    (a, b) => a.rows[0].task_index !== null && a.rows[0].task_index === b.rows[0].task_index,
  ];
  const pairs = left.map((a) => {
    const b = fits.flatMap((fit) => [...rest].filter((one) => one.rows[0].environment === a.rows[0].environment && fit(a, one)))[0] ?? null;
    rest.delete(b);
    return [a, b];
  });
  const common = pairs.filter(([, b]) => b);
  return { same: common.length, pairs: [...common, ...pairs.filter(([, b]) => !b), ...[...rest].map((b) => [null, b])] };
}

function mean(rows) {
  const value = meanReward(rows);
  return value === null ? null : h("span", { class: "soft small num pair-mean" }, `mean ${figure(value)}`);
}

function pair(page, a, b, scale) {
  const one = a ?? b;
  const prompt = one.rows.map((row) => row.prompt).find(Boolean);
  const half = (group, letter, run) => h("div", { class: "pair-side" }, h("b", { class: `side-${letter.toLowerCase()}` }, letter),
    group ? h("div", { class: "pair-marks" }, mean(group.rows), group.rows.filter((row) => !row.part).map((row) => link("episode", { n: row.number, run }, { class: "mark-link", data: { item: "" } },
      h("span", { class: "visually-hidden" }, `${letter}, sibling ${row.sibling}: `), rewardMark(row, scale), row.truncated ? endTag(row) : null))) : h("span", { class: "soft small" }, "did not play it at this step"));
  return h("div", { class: "pair" }, h("div", { class: "pair-head" }, h("span", {}, nodes(taskName(one.rows[0]))), prompt ? h("span", { class: "soft small" }, line(prompt, 120)) : null),
    half(a, "A", ""), half(b, "B", page.ctx.runs[1].id));
}
