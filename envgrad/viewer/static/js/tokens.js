// The tokens of an episode's row, coloured by mask, log-prob, ratio, advantage or policy version.

import { h, refill, whenSeen } from "./dom.js";
import { getOnce } from "./api.js";
import { choice, select } from "./parts.js";
import { count, figure, nodes, signed } from "./text.js";

const CHUNK = 1500;
const MODES = {
  mask: { text: "Trained", note: "tinted: sampled by the model and trained; grey: given" },
  logprob: { text: "Log-prob", note: "the stronger, the less likely the sampler found it" },
  ratio: { text: "Ratio", note: "trainer's probability over the sampler's: blue above 1, orange below" },
  advantage: { text: "Advantage", note: "blue: made more likely; orange: made less likely" },
  version: { text: "Policy", note: "one colour for each version of the weights" },
};

/** Fill `page.body` with the row that the address names. */
export async function tokens(page) {
  const { ctx, params, data } = page;
  const row = Number(params.row ?? 0);
  const found = await getOnce("tokens", { run: ctx.run.id, n: params.n, row }, ctx.signal);
  const modes = Object.keys(MODES).filter((mode) => mode === "mask" || found[`${mode}s`]);
  const mode = modes.includes(params.colour) ? params.colour : modes.includes("logprob") ? "logprob" : "mask";
  const state = { found, mode, scale: scaleOf(found, mode), page };
  const next = modes[(modes.indexOf(mode) + 1) % modes.length];
  const pick = (value) => ctx.change({ colour: value });
  const rows = data.rows.map((one, index) => [String(index), index ? `chat ${index + 1} (${count(one.length)} tokens)` : `main chat (${count(one.length)} tokens)`]);
  state.panel = h("div", { class: "token-panel small num", "aria-live": "polite" }, h("span", { class: "soft" }, "Point at a token, or walk with the arrow keys."));
  state.text = h("div", { class: "tokens mono", tabindex: "0", role: "group", "aria-label": "Tokens; arrow keys walk" });
  const cycle = h("button", { type: "button", class: "visually-hidden", tabindex: "-1", data: { key: "c" }, on: { click: () => pick(next) } }, "Next colouring");
  refill(page.body,
    h("div", { class: "filter-row" }, choice("Colour", modes.map((one) => [one, MODES[one].text]), mode, pick), cycle,
      rows.length > 1 ? select("Row", rows, String(row), (value) => ctx.change({ row: value === "0" ? "" : value, token: "" })) : null),
    h("p", { class: "soft small" }, MODES[mode].note, ". ", statistics(found),
      found.decoded ? null : " No tokenizer was found in the run's folder, so that ids are shown."),
    state.text, state.panel);
  listen(state);
  chunks(state, Number(params.token ?? -1));
}

function scaleOf(found, mode) {
  if (mode === "mask") return 1;
  if (mode === "version") return [...new Set(found.versions.filter((_, at) => found.mask[at]))].sort((a, b) => a - b);
  let most = 0;
  found[`${mode}s`].forEach((value, at) => {
    if (!found.mask[at] || value === null) return;
    most = Math.max(most, mode === "ratio" ? Math.abs(Math.log(Math.max(value, 1e-6))) : Math.abs(value));
  });
  return mode === "logprob" ? Math.min(Math.max(most, 1), 8) : mode === "ratio" ? Math.max(Math.min(most, 1), 0.05) : most || 1;
}

function statistics(found) {
  const trained = found.mask.filter(Boolean).length;
  const parts = [`${count(found.mask.length)} tokens, ${count(trained)} trained`];
  const over = (values, text) => {
    const kept = values?.filter((value, at) => found.mask[at] && value !== null) ?? [];
    if (kept.length) parts.push(`${text} ${figure(kept.reduce((a, b) => a + b, 0) / kept.length)}`);
  };
  over(found.logprobs, "mean log-prob");
  over(found.ratios, "mean ratio");
  return `${parts.join(", ")}.`;
}

/** Colour of token `at` in this mode: [class, strength 0..1], or null. */
function paint({ found, mode, scale }, at) {
  if (!found.mask[at]) return null;
  if (mode === "mask") return ["plain", 0.55];
  if (mode === "version") return [`c${scale.indexOf(found.versions[at]) % 8}`, 0.7];
  const value = found[`${mode}s`][at];
  if (value === null) return null;
  if (mode === "logprob") return ["low", Math.min(1, -value / scale)];
  const amount = mode === "ratio" ? Math.log(Math.max(value, 1e-6)) : value;
  return [amount >= 0 ? "high" : "low", Math.min(1, Math.abs(amount) / scale)];
}

function chunks(state, chosen) {
  const total = state.found.mask.length;
  for (let from = 0; from < total; from += CHUNK) {
    const part = h("span", { class: "token-chunk" });
    state.text.append(part);
    const fillPart = () => refill(part, span(state, from, Math.min(total, from + CHUNK)));
    if (from === 0 || (chosen >= from && chosen < from + CHUNK)) fillPart();
    else {
      part.textContent = "\u00a0\n".repeat(30);
      whenSeen(part, fillPart);
    }
  }
  if (chosen >= 0) {
    const token = state.text.querySelector(`[data-at="${chosen}"]`);
    if (token) {
      token.scrollIntoView({ block: "center" });
      show(state, token, false);
    }
  }
}

function span(state, from, to) {
  const made = [];
  for (let at = from; at < to; at += 1) {
    const colour = paint(state, at);
    const classes = ["tok", state.found.mask[at] ? "" : "given", colour ? colour[0] : "", at === state.found.prompt_length ? "first" : ""];
    made.push(h("span", { class: classes.filter(Boolean).join(" "), data: { at }, vars: colour ? { "--v": colour[1].toFixed(3) } : {} }, face(state.found, at)));
  }
  return made;
}

function face(found, at) {
  const text = found.decoded ? found.texts[at] : `${found.ids[at]} `;
  if (text === "") return h("span", { class: "odd" }, "\u00b7");
  if (!text.includes("\n")) return nodes(text);
  return text.split(/(\n)/).filter(Boolean).flatMap((piece) => (piece === "\n" ? [h("span", { class: "newline", "aria-hidden": "true" }, "\u21b5"), "\n"] : nodes(piece)));
}

function listen(state) {
  const tokenOf = (event) => event.target.closest?.(".tok");
  state.text.addEventListener("pointerover", (event) => tokenOf(event) && show(state, tokenOf(event), false));
  state.text.addEventListener("click", (event) => tokenOf(event) && show(state, tokenOf(event), true));
  state.text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!by) return;
    event.preventDefault();
    const now = state.at ?? (by > 0 ? -1 : 1);
    const at = Math.min(Math.max(now + by, 0), state.found.mask.length - 1);
    const token = state.text.querySelector(`[data-at="${at}"]`);
    if (!token) return;
    token.scrollIntoView({ block: "nearest" });
    show(state, token, true);
  });
}

function show(state, token, keep) {
  const { found } = state;
  const at = Number(token.dataset.at);
  state.text.querySelector(".tok.on")?.classList.remove("on");
  token.classList.add("on");
  state.at = at;
  if (keep) state.page.ctx.note({ token: at });
  const cell = (name, value) => h("span", { class: "token-cell" }, h("span", { class: "soft" }, name), h("b", {}, value));
  const value = (values) => (values && values[at] !== null ? values[at] : null);
  refill(state.panel,
    h("span", { class: "token-text mono" }, found.decoded ? nodes(JSON.stringify(found.texts[at])) : "", ),
    cell("token", count(at)), cell("id", String(found.ids[at])),
    cell("part", found.mask[at] ? "sampled, trained" : at < found.prompt_length ? "prompt" : "given"),
    found.mask[at] ? [
      value(found.logprobs) === null ? null : cell("log-prob", figure(value(found.logprobs), 4)),
      value(found.logprobs) === null ? null : cell("prob", figure(Math.exp(value(found.logprobs)), 3)),
      value(found.ratios) === null ? null : cell("ratio", figure(value(found.ratios), 4)),
      value(found.advantages) === null ? null : cell("advantage", signed(value(found.advantages), 4)),
      cell("policy", String(found.versions[at]))] : null);
}
