// One episode: as a conversation, or token by token.

import { h, link, refill } from "./dom.js";
import { getOnce } from "./api.js";
import { shareBar } from "./charts.js";
import { conversation } from "./conversation.js";
import { choice, components, endTag, failure, partTag, step as stepButton, rewardMark, taskName, useTag } from "./parts.js";
import { block, count, duration, figure, nodes, plural, pretty, signed, words } from "./text.js";
import { tokens } from "./tokens.js";

export const title = "Episode";

export async function open(params, ctx) {
  const element = h("div", { class: "page" });
  const page = { element, ctx, params, update, data: null, title: () => `Episode ${page.data.summary.number}` };
  await update(params, ctx);
  return page;

  async function update(next, context) {
    const other = page.data === null || next.n !== page.params.n || context.run !== page.ctx.run;
    page.params = next;
    page.ctx = context;
    if (other) {
      page.data = await getOnce("episode", { run: context.run.id, n: next.n }, context.signal);
      draw(page);
      scrollTo(0, 0);
    }
    await body(page);
  }
}

function draw(page) {
  const { data, ctx } = page;
  const row = data.summary;
  const run = ctx.runParam;
  page.tabs = h("div", { class: "end" });
  page.body = h("section", { class: "panel episode-body", "aria-label": "Episode" });
  refill(page.element,
    h("div", { class: "head" },
      h("div", { class: "head-text" },
        h("div", { class: "crumbs" }, link("step", { step: row.step, split: row.split === "train" ? "" : row.split, run }, {}, `step ${row.step}`),
          link("group", { group: row.group, run }, { data: { key: "u" } }, nodes(taskName(row))), h("span", {}, `sibling ${row.sibling}`)),
        h("div", { class: "title-line" }, h("h1", { tabindex: "-1" }, `Episode ${count(row.number)}`), rewardMark(row, scaleOf(row)), partTag(row), endTag(row), useTag(row))),
      h("div", { class: "end" }, siblings(page))),
    row.failed ? failure(row.failed, data.error) : null,
    h("div", { class: "episode" },
      h("div", { class: "episode-main" }, h("div", { class: "panel-head" }, h("h2", {}, "What happened"), page.tabs), page.body),
      aside(data)));
}

function siblings(page) {
  const { data, ctx, params } = page;
  const at = data.siblings.findIndex((one) => one.number === data.summary.number);
  const to = (index) => (data.siblings[index] ? { ...params, n: data.siblings[index].number, row: "", token: "", run: ctx.runParam } : null);
  return [stepButton("\u2190", "Previous sibling", "episode", to(at - 1), "["),
    h("span", { class: "soft small num" }, `${at + 1} of ${plural(data.siblings.length, "sibling")}`),
    stepButton("\u2192", "Next sibling", "episode", to(at + 1), "]")];
}

async function body(page) {
  const { data, ctx, params } = page;
  const view = params.view === "tokens" && data.rows.length ? "tokens" : "chat";
  const views = choice("View", [["chat", "Conversation"], ["tokens", "Tokens"]], view, (value) => ctx.change({ view: value === "chat" ? "" : value, token: "" }, false));
  if (data.rows.length) views.querySelector('[aria-pressed="false"]').dataset.key = "t";
  refill(page.tabs, data.rows.length ? views : null);
  if (view === "tokens") {
    await tokens(page);
    return;
  }
  refill(page.body, data.plain_prompt === null ? null : h("p", { class: "soft small" }, "A plain prompt: no chat template touched it."),
    conversation(data),
    data.branches ? h("p", { class: "soft small" }, `The agent began ${plural(data.branches, "further chat")}; the token view shows each.`) : null,
    data.feedback ? h("div", { class: "result" }, h("span", { class: "result-label" }, "feedback after the episode"), block(data.feedback)) : null);
}

function scaleOf(row) {
  return { low: Math.min(0, row.reward ?? 0), high: Math.max(1, row.reward ?? 0) };
}

function fact(name, value) {
  return value === null || value === undefined ? null : [h("dt", {}, name), h("dd", { class: "num" }, value)];
}

function aside(data) {
  const row = data.summary;
  const versions = row.first_version === null ? null : row.first_version === row.last_version ? String(row.first_version) : `${row.first_version} to ${row.last_version}`;
  const phases = Object.entries(data.seconds).filter(([, value]) => value > 0);
  return h("aside", { class: "episode-side", "aria-label": "Figures" },
    h("section", { class: "panel" },
      h("h3", {}, "Reward"),
      components(row.rewards), turnRewards(data),
      h("dl", { class: "pairs" },
        fact("advantage", row.advantage === null ? null : signed(row.advantage)),
        fact("turns", count(row.turns)),
        fact("tokens", `${count(row.prompt_tokens)} given, ${count(row.sampled_tokens)} sampled`),
        fact("policy", versions),
        fact("use", words(row.use)))),
    phases.length ? h("section", { class: "panel" }, h("h3", {}, `Time: ${duration(row.seconds)}`), shareBar(phases.map(([name, value]) => [words(name), value]), duration)) : null,
    h("section", { class: "panel" }, h("h3", {}, "Identity"), h("dl", { class: "pairs" },
      fact("split", row.split), fact("part", row.part ? nodes(row.part) : null), fact("environment", row.environment ? nodes(row.environment) : null),
      fact("task", row.task_index), fact("draw", row.position), fact("epoch", data.epoch), fact("attempt", row.attempt ? row.attempt + 1 : null),
      fact("group", h("span", { class: "mono" }, row.group_id)), fact("seed", h("span", { class: "mono" }, row.seed)))),
    folded("Dataset row", data.row), folded("Logged by rewards", Object.keys(data.extras).length ? data.extras : null),
    folded(`Tools (${data.tools.length})`, data.tools.length ? data.tools : null));
}

function turnRewards(data) {
  const paid = data.turns.map((turn, index) => [index + 1, turn.reward]).filter(([, reward]) => reward !== null);
  if (!paid.length) return null;
  return h("p", { class: "small soft num" }, "by turn: ", paid.map(([number, reward]) => `${number}: ${figure(reward)}`).slice(0, 40).join(", "), paid.length > 40 ? "\u2026" : "");
}

function folded(name, value) {
  if (value === null || value === undefined) return null;
  return h("details", { class: "panel fold-panel" }, h("summary", {}, h("h3", {}, name)), block(pretty(value), { class: "mono" }));
}
