// A step's groups under each other, their siblings as columns.

import { h, link, refill } from "./dom.js";
import { get } from "./api.js";
import { choice, endTag, meanReward, nothing, partTag, rewardMark, rewardScale, select, step as stepButton, taskName, useTag } from "./parts.js";
import { runSwitch } from "./overview.js";
import { count, figure, line, nodes, plural, signed } from "./text.js";

export const title = "Steps";
const SORTS = [["", "task order"], ["low", "lowest mean first"], ["high", "highest mean first"], ["spread", "largest spread first"]];

export async function open(params, ctx) {
  const element = h("div", { class: "page" });
  const page = { element, ctx, params, update: load, live, title: () => (page.data ? `Step ${page.data.step ?? ""}` : "Steps") };
  await load(params, ctx);
  return page;

  async function load(next, context) {
    page.params = next;
    page.ctx = context;
    page.data = await get("step", { run: context.run.id, step: next.step, split: next.split, environment: next.environment }, context.signal);
    draw(page);
  }

  async function live(run, context) {
    if (run === page.ctx.run && !element.contains(document.activeElement)) await load(page.params, context);
  }
}

function spread(rows) {
  const scale = rewardScale(rows);
  return scale.high - scale.low;
}

function sorted(groups, order) {
  const all = [...groups];
  const key = (group) => meanReward(group.rows) ?? -Infinity;
  if (order === "low") all.sort((a, b) => key(a) - key(b));
  if (order === "high") all.sort((a, b) => key(b) - key(a));
  if (order === "spread") all.sort((a, b) => spread(b.rows) - spread(a.rows));
  return all;
}

function draw(page) {
  const { data, ctx, params } = page;
  const to = (step) => (step === null ? null : { ...params, step });
  const all = data.groups.flatMap((group) => group.rows);
  const head = h("div", { class: "head" },
    h("div", { class: "head-text" }, h("h1", { tabindex: "-1" }, data.step === null ? "Steps" : `Step ${count(data.step)}`), summary(data, all)),
    h("div", { class: "end" }, stepButton("\u2190", "Previous step", "step", to(data.previous), "["),
      stepButton("\u2192", "Next step", "step", to(data.next), "]"), runSwitch(ctx, page)));
  if (data.step === null) {
    refill(page.element, head, nothing("No step yet.", "Its groups appear here when the first round is played."));
    return;
  }
  const scale = rewardScale(all);
  const tools = h("div", { class: "filter-row" },
    data.splits.length > 1 ? choice("Split", data.splits.map((split) => [split, split]), data.split, (split) => ctx.change({ split: split === "train" ? "" : split }, false)) : null,
    data.environments.length > 1 ? select("Environment", [["", "all"], ...data.environments.map((name) => [name, name])], params.environment ?? "", (environment) => ctx.change({ environment })) : null,
    select("Order", SORTS, params.sort ?? "", (sort) => ctx.change({ sort })));
  const groups = sorted(data.groups, params.sort);
  refill(page.element, head, tools,
    groups.length ? h("div", { class: "groups" }, groups.map((group) => groupCard(page, group, scale)))
      : nothing("No group here.", "This step has none of this split or environment."),
    data.more ? h("p", { class: "soft" }, `${plural(data.more, "further group")} of this step: filter by environment, or look at them among `,
      link("episodes", { first: data.step, last: data.step, split: data.split, run: ctx.runParam }, {}, "the episodes"), ".") : null);
}

function summary(data, rows) {
  if (data.step === null) return null;
  const reward = meanReward(rows);
  const failed = rows.filter((row) => row.failed).length;
  const flat = data.groups.filter((group) => spread(group.rows) === 0).length;
  return h("p", { class: "soft num" },
    [plural(data.groups.length, "group"), plural(rows.length, "episode"), reward === null ? "no reward" : `mean reward ${figure(reward)}`,
      flat ? `${count(flat)} without spread` : null, failed ? `${count(failed)} failed` : null].filter(Boolean).join(" \u00b7 "));
}

function groupCard(page, group, scale) {
  const { runParam: run } = page.ctx;
  const first = group.rows[0];
  const average = meanReward(group.rows);
  const prompt = group.rows.map((row) => row.prompt).find(Boolean);
  const columns = Math.max(...group.rows.map((row) => row.sibling)) + 1;
  const id = `group-${group.group}`;
  return h("section", { class: "panel group", "aria-labelledby": id },
    h("div", { class: "panel-head" },
      h("h2", { id }, link("group", { group: group.group, run }, { data: { item: "" } }, nodes(taskName(first)))),
      h("span", { class: "soft small num" }, average === null ? "" : `mean ${figure(average)}, spread ${figure(spread(group.rows))}`),
      useTag(first),
      h("span", { class: "end small" }, link("group", { group: group.group, run }, { "aria-label": `Siblings side by side: ${taskName(first)}` }, "side by side"))),
    prompt ? h("p", { class: "group-prompt soft" }, line(prompt, 260)) : null,
    h("div", { class: "siblings scroll", tabindex: "0", role: "region", "aria-label": `Siblings of ${taskName(first)}`, vars: { "--columns": columns } },
      group.rows.map((row) => tile(row, scale, run))));
}

function tile(row, scale, run) {
  return link("episode", { n: row.number, run }, { class: "tile sibling", vars: { "--column": row.sibling + 1 } },
    h("span", { class: "visually-hidden" }, `Sibling ${row.sibling}: `),
    h("span", { class: "sibling-head" }, rewardMark(row, scale), row.advantage === null ? null : h("span", { class: "small soft num", title: "advantage" }, signed(row.advantage))),
    h("span", { class: "sibling-text small" }, line(row.answer || row.error || "", 150)),
    h("span", { class: "sibling-foot" }, partTag(row), endTag(row), h("span", { class: "small soft num" }, plural(row.turns, "turn"))));
}
