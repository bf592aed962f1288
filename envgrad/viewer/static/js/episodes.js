// All episodes: filtered, searched, ordered, page by page.

import { h, link, refill, later } from "./dom.js";
import { get } from "./api.js";
import { endTag, nothing, partTag, rewardMark, rewardScale, select, taskName, useTag } from "./parts.js";
import { runSwitch } from "./overview.js";
import { count, duration, line, plural, signed, words } from "./text.js";

export const title = "Episodes";
const SIZE = 50;
const ORDERS = [
  ["", "newest first"], ["oldest", "oldest first"], ["-reward", "highest reward"], ["reward", "lowest reward"],
  ["-advantage", "highest advantage"], ["advantage", "lowest advantage"], ["-tokens", "most tokens"], ["tokens", "fewest tokens"],
];
const FILTERS = ["split", "environment", "first", "last", "min", "max", "stop", "use", "failed", "text", "task", "lineage", "part"];

export async function open(params, ctx) {
  const element = h("div", { class: "page" });
  const page = { element, ctx, params, update, live, total: null };
  build(page);
  await load(page);
  return page;

  async function update(next, context) {
    const other = context.run !== page.ctx.run;
    page.ctx = context;
    page.params = next;
    if (other) build(page);
    else filters(page);
    await load(page);
  }

  async function live(run) {
    if (run !== page.ctx.run || page.total === null) return;
    const { total } = await get("episodes", { ...query(page), limit: 0 });
    const more = total - page.total;
    if (more <= 0) return;
    refill(page.news, h("button", { type: "button", class: "button", on: { click: () => { page.ctx.note({ offset: "" }); page.params = { ...page.params, offset: "" }; load(page); } } },
      `${plural(more, "new episode")}: show`));
  }
}

function query(page) {
  const { params, ctx } = page;
  const asked = { run: ctx.run.id, order: params.order || "newest", limit: SIZE, offset: Number(params.offset ?? 0) };
  for (const name of FILTERS) asked[name] = params[name];
  return asked;
}

function build(page) {
  page.summary = h("p", { class: "soft", role: "status" });
  page.news = h("div", { "aria-live": "polite" });
  page.bar = h("form", { class: "panel filters", role: "search", "aria-label": "Filter episodes", on: { submit: (event) => event.preventDefault() } });
  page.list = h("div", {});
  refill(page.element,
    h("div", { class: "head" }, h("div", { class: "head-text" }, h("h1", { tabindex: "-1" }, "Episodes"), page.summary), h("div", { class: "end" }, page.news, runSwitch(page.ctx, page))),
    page.bar, page.list);
  page.fields = null;
  filters(page);
}

const change = (page, next) => page.ctx.change({ offset: "", ...next });

function field(page, name, label, props) {
  const input = h("input", { ...props, "aria-label": label, name, value: page.params[name] ?? "" });
  input.addEventListener("input", later(props.type === "search" ? 220 : 350, () => change(page, { [name]: input.value.trim() })));
  return input;
}

function filters(page) {
  const { params, ctx } = page;
  if (page.fields) {
    // Fields that somebody types in stay as they are; the others follow the address.
    for (const input of page.fields.inputs) if (input !== document.activeElement) input.value = params[input.name] ?? "";
    refill(page.fields.chosen, choices(page));
    refill(page.fields.end, reset(page));
    return;
  }
  const text = field(page, "text", "Search in prompts, answers and tool results", { type: "search", placeholder: "Search prompts, answers, results", class: "search", data: { key: "/" } });
  const numbers = [
    field(page, "min", "Lowest reward", { type: "number", step: "any", placeholder: "lowest" }),
    field(page, "max", "Highest reward", { type: "number", step: "any", placeholder: "highest" }),
    field(page, "first", "First step", { type: "number", min: 0, placeholder: "first" }),
    field(page, "last", "Last step", { type: "number", min: 0, placeholder: "last" }),
  ];
  page.fields = { inputs: [text, ...numbers], chosen: h("div", { class: "filter-row" }), end: h("span", { class: "end" }) };
  refill(page.fields.chosen, choices(page));
  refill(page.fields.end, reset(page));
  const range = (label, a, b) => h("fieldset", { class: "range" }, h("legend", {}, label), a, h("span", { "aria-hidden": "true" }, "to"), b);
  const toggle = h("button", { type: "button", class: "button filter-toggle", "aria-expanded": "false" }, "Filters and order");
  toggle.addEventListener("click", () => toggle.setAttribute("aria-expanded", String(page.bar.classList.toggle("open"))));
  refill(page.bar, text, toggle, page.fields.chosen,
    h("div", { class: "filter-row" }, range("Reward", numbers[0], numbers[1]), range("Step", numbers[2], numbers[3]), page.fields.end));
}

function choices(page) {
  const { params, ctx } = page;
  const { run } = ctx;
  const any = (name, label, values, all, text = words) =>
    select(label, [["", all], ...values.map((value) => [value, text(value)])], params[name] ?? "", (value) => change(page, { [name]: value }));
  return [
    any("split", "Split", run.splits, "all"),
    run.environments.length > 1 ? any("environment", "Environment", run.environments, "all", (name) => name) : null,
    any("stop", "End", run.stop_reasons, "any"),
    any("failed", "Failed", ["true", "false"], "any", (value) => (value === "true" ? "failed only" : "none failed")),
    any("use", "Use", ["trained", "filtered", "stale", "dropped", "evaluated"], "any"),
    run.parts ? any("part", "Part", ["agent"], "all", () => "the agents alone") : null,
    run.left_behind ? any("lineage", "Lineage", ["old", "both"], "present", (value) => (value === "old" ? "left behind by a resume" : "both")) : null,
    select("Order", ORDERS, params.order ?? "", (value) => change(page, { order: value })),
  ];
}

function reset(page) {
  const used = FILTERS.some((name) => page.params[name]);
  if (!used) return null;
  const clear = () => {
    for (const input of page.fields.inputs) input.value = "";
    change(page, Object.fromEntries(FILTERS.map((name) => [name, ""])));
  };
  return h("button", { type: "button", class: "button", on: { click: clear } }, "Clear filters");
}

async function load(page) {
  const found = await get("episodes", query(page), page.ctx.signal);
  page.total = found.total;
  refill(page.news);
  refill(page.summary, `${plural(found.total, "episode")}${found.total < page.ctx.run.episodes ? ` of ${count(page.ctx.run.episodes)}` : ""}`);
  if (!found.rows.length) {
    refill(page.list, nothing("No episode fits.", "Take a filter away, or search for other words."));
    return;
  }
  refill(page.list, table(page, found.rows), pager(page, found));
}

function table(page, rows) {
  const scale = rewardScale(rows);
  const run = page.ctx.runParam;
  const several = page.ctx.run.environments.length > 1;
  const head = [["reward"], ["episode"], ["ended"], ["turns", "num wide"], ["tokens", "num wide"], ["time", "num wide"], ["advantage", "num wide"]];
  return h("div", { class: "panel list" }, h("table", { class: "rows" },
    h("caption", { class: "visually-hidden" }, "Episodes"),
    h("thead", {}, h("tr", {}, head.map(([name, kind]) => h("th", { scope: "col", class: kind ?? "" }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", { on: { click: (event) => follow(event) } },
      h("td", { class: "reward-cell" }, rewardMark(row, scale)),
      h("td", { class: "what" },
        link("episode", { n: row.number, run }, { class: "what-link", data: { item: "" } }, line(row.prompt || taskName(row), 140)),
        h("div", { class: "what-answer small soft" }, line(row.answer || row.error || "", 180)),
        h("div", { class: "what-meta small soft" }, several || row.split !== "train" ? `${[row.split, row.environment].filter(Boolean).join(", ")} \u00b7 ` : "",
          `step ${row.step} \u00b7 ${row.task_index === null ? `draw ${row.position}` : `task ${row.task_index}`} \u00b7 sibling ${row.sibling}`, row.attempt ? ` \u00b7 attempt ${row.attempt + 1}` : "")),
      h("td", {}, h("div", { class: "tags" }, partTag(row), endTag(row), useTag(row))),
      h("td", { class: "num wide" }, count(row.turns)),
      h("td", { class: "num wide" }, count(row.sampled_tokens)),
      h("td", { class: "num wide nowrap" }, duration(row.seconds)),
      h("td", { class: "num wide" }, row.advantage === null ? "\u2013" : signed(row.advantage)))))));
}

function follow(event) {
  if (event.target.closest("a") || getSelection()?.toString()) return;
  event.currentTarget.querySelector("a").click();
}

function pager(page, found) {
  const offset = Number(page.params.offset ?? 0);
  const end = offset + found.rows.length;
  const turn = (text, label, to, key) => to === null
    ? h("span", { class: "button", "aria-disabled": "true", role: "link", "aria-label": `${label}: none` }, text)
    : link("episodes", { ...page.params, offset: to || "" }, { class: "button", "aria-label": label, data: { key } }, text);
  return h("div", { class: "pager" }, turn("\u2190", "Previous page", offset ? Math.max(0, offset - SIZE) : null, "["),
    h("span", { class: "soft num" }, `${count(offset + 1)} to ${count(end)} of ${count(found.total)}`),
    turn("\u2192", "Next page", end < found.total ? end : null, "]"));
}
