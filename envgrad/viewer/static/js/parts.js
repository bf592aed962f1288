// Parts that several pages share: rewards, facts of an episode, states of a page.

import { h, link } from "./dom.js";
import { block, figure, nodes, plural, signed, words } from "./text.js";

/** A reward as a figure on its colour: from `scale.low` to `scale.high`, and a dash where there is none. */
export function rewardMark(row, scale) {
  if (row.failed) return h("span", { class: "reward failed" }, "failed");
  if (row.reward === null) return h("span", { class: "reward none", title: "no reward: it could not be scored" }, "no reward");
  const share = scale.high > scale.low ? (row.reward - scale.low) / (scale.high - scale.low) : 0.5;
  return h("span", { class: "reward num", vars: { "--share": Math.min(1, Math.max(0, share)).toFixed(3) } }, figure(row.reward));
}

/** The lowest and highest reward among rows. */
export function rewardScale(rows) {
  const scored = rows.filter((row) => !row.part).map((row) => row.reward).filter((reward) => typeof reward === "number");
  return scored.length ? { low: Math.min(...scored), high: Math.max(...scored) } : { low: 0, high: 1 };
}

/** Why an episode ended, as a tag. */
export function endTag(row) {
  if (row.failed) return h("span", { class: "tag bad" }, `failed: ${words(row.failed)}`);
  return h("span", { class: `tag${row.truncated ? " warn" : ""}` }, words(row.stop_reason ?? "?"));
}

/** What became of an episode, where that is not the usual. */
export function useTag(row) {
  if (!row.current) return h("span", { class: "tag warn", title: "the run was resumed from before this episode" }, "left behind");
  return ["filtered", "stale", "dropped"].includes(row.use) ? h("span", { class: "tag warn" }, row.use) : null;
}

/** Which part of a game an episode is, where the policy plays several. */
export function partTag(row) {
  return row.part ? h("span", { class: "tag", title: "another part of the policy's in the same game" }, nodes(row.part)) : null;
}

/** The mean reward of the agents among rows (other parts of the policy's do not count); null without a reward. */
export function meanReward(rows) {
  const scored = rows.filter((row) => !row.part && typeof row.reward === "number").map((row) => row.reward);
  return scored.length ? scored.reduce((sum, reward) => sum + reward, 0) / scored.length : null;
}

/** "compass, draw 12": environment and task. */
export function taskName(row) {
  const task = row.task_index === null ? `draw ${row.position}` : `task ${row.task_index}`;
  return row.environment ? `${row.environment}, ${task}` : task;
}

/** Facts of an episode in one line. */
export function facts(row) {
  return h("span", { class: "facts small soft num" }, `${plural(row.turns, "turn")} \u00b7 ${plural(row.sampled_tokens, "token")}`,
    row.advantage === null ? null : ` \u00b7 advantage ${signed(row.advantage)}`);
}

/** Reward components as a table's rows. */
export function components(rewards) {
  const entries = Object.entries(rewards);
  if (!entries.length) return null;
  return h("table", { class: "components" },
    h("caption", { class: "visually-hidden" }, "Reward components"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "component"), h("th", { scope: "col", class: "num" }, "reward"))),
    h("tbody", {}, entries.map(([name, value]) =>
      h("tr", {}, h("td", {}, nodes(name)), h("td", { class: "num" }, value === null ? "none" : figure(value, 4))))));
}

/** The text of a failure. */
export function failure(kind, text) {
  return h("section", { class: "error-box", "aria-label": "Failure" }, h("strong", {}, `Failed: ${words(kind)}`),
    text ? block(text, { class: "mono small" }) : null);
}

/** A page with nothing to show, and what to do. */
export function nothing(title, text) {
  return h("div", { class: "state panel" }, h("strong", {}, title), text);
}

/** A link that looks like a button; without an address it is off. */
export function step(text, label, page, params, key) {
  const shown = { class: "button", "aria-label": label, data: key ? { key } : null, title: key ? `${label} (${key})` : label };
  return params ? link(page, params, shown, text) : h("span", { class: "button", "aria-disabled": "true", role: "link", "aria-label": `${label}: none` }, text);
}

/** Buttons of which one is on. */
export function choice(label, options, chosen, change) {
  return h("div", { class: "choice", role: "group", "aria-label": label }, options.map(([value, text]) =>
    h("button", { type: "button", class: "button", "aria-pressed": String(value === chosen), on: { click: () => change(value) } }, text)));
}

/** A labelled drop-down. */
export function select(label, options, chosen, change) {
  return h("label", { class: "field" }, h("span", {}, label),
    h("select", { on: { change: (event) => change(event.target.value) } },
      options.map(([value, text]) => h("option", { value, selected: value === chosen }, text))));
}
