// One group: the opening that all siblings share, then their episodes side by side.

import { h, link, refill } from "./dom.js";
import { get } from "./api.js";
import { conversation, messagesOnly } from "./conversation.js";
import { endTag, facts, failure, meanReward, partTag, rewardMark, rewardScale, step as stepButton, taskName, useTag } from "./parts.js";
import { figure, nodes, plural } from "./text.js";

export const title = "Group";

export async function open(params, ctx) {
  const element = h("div", { class: "page" });
  const page = { element, ctx, params, update: load, title: () => `Group ${page.data.group}` };
  await load(params, ctx);
  return page;

  async function load(next, context) {
    page.params = next;
    page.ctx = context;
    page.data = await get("group", { run: context.run.id, group: next.group }, context.signal);
    draw(page);
  }
}

function draw(page) {
  const { data, ctx } = page;
  const run = ctx.runParam;
  const first = data.episodes[0].summary;
  const rows = data.episodes.map((one) => one.summary);
  const scale = rewardScale(rows);
  const mean = meanReward(rows);
  const to = (group) => (group === null ? null : { group, run });
  refill(page.element,
    h("div", { class: "head" },
      h("div", { class: "head-text" },
        h("div", { class: "crumbs" }, link("step", { step: first.step, split: first.split === "train" ? "" : first.split, run }, { data: { key: "u" } }, `step ${first.step}`), h("span", {}, `${first.split} group`)),
        h("h1", { tabindex: "-1" }, nodes(taskName(first))),
        h("p", { class: "soft num" }, [plural(rows.filter((row) => !row.part).length, "sibling"), mean === null ? "no reward" : `mean reward ${figure(mean)}`, `seed ${first.seed}`].join(" \u00b7 "))),
      h("div", { class: "end" }, useTag(first), stepButton("\u2190", "Previous group", "group", to(data.previous), "["),
        stepButton("\u2192", "Next group", "group", to(data.next), "]"))),
    data.opening.length ? h("details", { class: "panel fold-panel", open: true }, h("summary", {}, h("h2", {}, "Opening"), h("span", { class: "soft small" }, "the same for all siblings")),
      messagesOnly(data.opening))
      : h("p", { class: "error-box" }, "The siblings do not begin with the same messages: each column shows its own."),
    h("div", { class: "columns scroll", tabindex: "0", role: "region", "aria-label": "Siblings side by side", vars: { "--columns": rows.length } },
      data.episodes.map((episode) => column(episode, scale, run, episode.summary.part ? 0 : data.opening.length))));
}

function column(episode, scale, run, from) {
  const row = episode.summary;
  return h("article", { class: "panel column", "aria-label": `Sibling ${row.sibling}` },
    h("header", { class: "column-head" },
      h("h2", {}, link("episode", { n: row.number, run }, { data: { item: "" } }, `Sibling ${row.sibling}`)), rewardMark(row, scale)),
    h("div", { class: "tags" }, partTag(row), endTag(row), useTag(row)), facts(row),
    episode.dropped ? h("p", { class: "soft small" }, "Its text was dropped to keep the log within its limit.") : null,
    row.failed ? failure(row.failed, episode.error) : null,
    conversation(episode, { compact: true, from }));
}
