// An episode's chat: messages, tool calls with their results, and what each turn earned.

import { h } from "./dom.js";
import { block, duration, line, plural, pretty, signed, words } from "./text.js";

/**
 * The chat as elements. `record`: {messages, opening, turns}; `options`: {from, compact, open}.
 * Tool results are shown under the call that they answer, so that their own messages are left out.
 */
export function conversation(record, options = {}) {
  const shown = [];
  const turns = record.turns.filter((turn) => !turn.row);
  let answers = 0;
  let turn = null;
  let results = 0;
  record.messages.forEach((message, index) => {
    const opening = index < record.opening;
    if (!opening && message.role === "assistant") {
      turn = turns[answers] ?? null;
      answers += 1;
      results = turn?.calls.length ?? 0;
      if (index >= (options.from ?? 0)) shown.push(assistant(message, turn, answers, options, record.messages[index + 1]));
      return;
    }
    if (!opening && message.role === "tool" && results > 0) {
      results -= 1;
      return;
    }
    if (index >= (options.from ?? 0)) shown.push(plain(message, opening, options));
  });
  // Turns that the messages do not hold (an episode that ended in the middle of one).
  for (const rest of turns.slice(answers)) {
    answers += 1;
    shown.push(assistant(rest.message, rest, answers, options));
  }
  return h("ol", { class: `chat${options.compact ? " compact" : ""}` }, shown);
}

/** Messages alone, without turns: an opening, a prompt. */
export function messagesOnly(messages, options = {}) {
  return h("ol", { class: `chat${options.compact ? " compact" : ""}` }, messages.map((message) => plain(message, true, options)));
}

function entry(role, name, meta, ...body) {
  return h("li", { class: `message ${role}` },
    h("div", { class: "message-head" }, h("span", { class: "role" }, name), h("span", { class: "message-meta" }, meta)), body);
}

function plain(message, opening, options) {
  const role = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other";
  const name = message.name ? `${message.role}: ${message.name}` : String(message.role ?? "message");
  const calls = rawCalls(message).map((call) => card(call, options));
  return entry(role, name, opening ? "given" : null, reasoning(message), content(message.content), calls);
}

function assistant(message, turn, number, options, next) {
  const calls = turn?.calls.length ? turn.calls : rawCalls(message);
  const meta = turn && [
    turn.reward === null ? null : h("span", { class: `tag ${turn.reward > 0 ? "good" : turn.reward < 0 ? "bad" : ""}` }, `reward ${signed(turn.reward)}`),
    h("span", {}, `${plural(turn.num_tokens, "token")} in ${duration(turn.sample_seconds)}`),
    turn.policy_version >= 0 && !options.compact ? h("span", {}, `policy ${turn.policy_version}`) : null,
  ];
  const sampled = turn && !options.compact && turn.text.trim() && turn.text.trim() !== plainText(message.content).trim();
  return entry("assistant", `turn ${number}`, meta, reasoning(message), content(message.content),
    calls.map((call) => card(calls.length > 1 || call.reward !== turn?.reward ? call : { ...call, reward: null }, options)),
    said(turn, next) ? result("the environment answered", turn.observation, true) : null,
    sampled ? h("details", { class: "fold" }, h("summary", {}, "as sampled"), block(turn.text, { class: "mono" })) : null);
}

// What `step` returned is in the chat as the next message, unless the episode ended with it.
function said(turn, next) {
  return typeof turn?.observation === "string" && (!next || plainText(next.content) !== turn.observation);
}

function reasoning(message) {
  const text = message.reasoning_content ?? message.reasoning;
  if (typeof text !== "string" || !text.trim()) return null;
  return h("details", { class: "fold", open: true }, h("summary", {}, "reasoning"), block(text, { class: "thought" }));
}

/** The text of a message's content, which may be a list of parts. */
export function plainText(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return "";
  return content.map((part) => (typeof part?.text === "string" ? part.text : "")).join("");
}

function content(value) {
  if (value === null || value === undefined || value === "") return null;
  if (typeof value === "string") return block(value);
  if (!Array.isArray(value)) return block(pretty(value), { class: "mono" });
  return value.map((part) =>
    typeof part?.text === "string" ? block(part.text) : h("span", { class: "tag" }, `[${words(part?.type ?? "part")}]`),
  );
}

function rawCalls(message) {
  return (Array.isArray(message.tool_calls) ? message.tool_calls : []).map((call) => ({
    name: call?.function?.name ?? call?.name ?? null,
    arguments: call?.function?.arguments ?? call?.arguments ?? {},
    error: null,
    result: null,
    ok: true,
    reward: null,
    seconds: null,
  }));
}

function card(call, options) {
  return h("div", { class: `call${call.ok ? "" : " failed"}` },
    h("div", { class: "call-head" },
      h("span", { class: "call-name mono" }, line(call.name ?? "unreadable call", 120)),
      isBrief(call.arguments) ? args(call.arguments) : null,
      call.ok ? null : h("span", { class: "tag bad" }, call.error ? "malformed" : "refused or raised"),
      call.reward === null ? null : h("span", { class: `tag ${call.reward > 0 ? "good" : "bad"}` }, `reward ${signed(call.reward)}`),
      call.seconds && !options.compact ? h("span", { class: "soft small" }, duration(call.seconds)) : null),
    isBrief(call.arguments) ? null : args(call.arguments),
    call.error ? h("div", { class: "error-box small" }, block(call.error)) : null,
    call.result === null ? null : result("result", call.result, call.ok));
}

// A few short arguments stand beside the tool's name.
function isBrief(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return false;
  const entries = Object.entries(value);
  return entries.length > 0 && entries.length <= 3 && entries.every(([name, item]) =>
    typeof item !== "object" && name.length <= 24 && String(item).length <= 40 && !String(item).includes("\n"));
}

function args(value) {
  if (value === null || value === undefined || value === "") return null;
  if (typeof value === "object" && !Array.isArray(value)) {
    const entries = Object.entries(value);
    if (!entries.length) return h("div", { class: "soft small" }, "no arguments");
    return h("dl", { class: `args${isBrief(value) ? " brief" : ""}` }, entries.map(([key, item]) => [
      h("dt", { class: "mono" }, line(key, 80)), h("dd", {}, block(pretty(item), { class: "mono" })),
    ]));
  }
  return block(pretty(value), { class: "mono" });
}

function result(label, text, ok) {
  return h("div", { class: `result${ok ? "" : " failed"}` }, h("span", { class: "result-label" }, label),
    text === "" ? h("span", { class: "soft small" }, "empty") : block(text, { class: "mono" }));
}
