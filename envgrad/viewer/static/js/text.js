// Text of models and tools: shown as it is, bounded, and with its invisible characters made visible.

import { h, append } from "./dom.js";

const FIRST = 6_000;
const MORE = 60_000;

// C0 and C1 controls without tab and newline, soft hyphen, zero-width and bidirectional controls, line and paragraph
// separators, BOM, tags, lone surrogates: none may act, all are named.
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}\p{Cs}]/gu;
const NAMES = { 0x1b: "ESC", 0x0d: "CR", 0x00: "NUL", 0x07: "BEL", 0x08: "BS", 0x7f: "DEL", 0x202e: "RLO", 0x200b: "ZWSP" };

/** The text's nodes: plain text, with a chip for each character that cannot be seen or would reorder others. */
export function nodes(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(ODD)) {
    // Joiners inside emoji and scripts that need them are left alone.
    const code = match[0].codePointAt(0);
    if ((code === 0x200d || code === 0x200c) && joins(text, match.index)) continue;
    if (code === 0x0d && text[match.index + 1] === "\n") continue;
    if (match.index > from) found.push(text.slice(from, match.index));
    found.push(chip(code));
    from = match.index + match[0].length;
  }
  if (from < text.length) found.push(text.slice(from));
  return found;
}

function joins(text, index) {
  return index > 0 && index + 1 < text.length && text.charCodeAt(index - 1) > 0x2ff && text.charCodeAt(index + 1) > 0x2ff;
}

function chip(code) {
  const hex = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  return h("span", { class: "odd", title: `a character that cannot be seen: ${hex}` }, NAMES[code] ?? hex);
}

/** A block of text: the first part at once, the rest on demand, whatever its length. */
export function block(text, props) {
  const holder = h("div", { ...props, class: `prose ${props?.class ?? ""}`, dir: "auto" });
  const add = (from, count) => append(holder, nodes(text.slice(from, from + count)));
  add(0, FIRST);
  if (text.length <= FIRST) return holder;
  let shown = FIRST;
  const button = h("button", { class: "more", type: "button" });
  const label = () => {
    button.textContent = `Show more (${count(text.length - shown)} of ${count(text.length)} characters left)`;
  };
  button.addEventListener("click", () => {
    add(shown, MORE);
    shown += MORE;
    if (shown >= text.length) button.remove();
    else label();
  });
  label();
  return h("div", {}, holder, button);
}

/** One line of a text, cut: for tables and tiles. */
export function line(text, limit = 160) {
  const flat = text.slice(0, limit * 4).replace(/\s+/g, " ").trim();
  return nodes(flat.length > limit ? `${flat.slice(0, limit - 1)}\u2026` : flat);
}

/** A value of JSON as text, indented. */
export function pretty(value) {
  return typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "null");
}

const grouped = new Intl.NumberFormat("en");

/** 12345 -> "12,345". */
export function count(value) {
  return grouped.format(value);
}

/** A figure in about `digits` digits; a missing one is a dash. */
export function figure(value, digits = 3) {
  if (value === null || value === undefined) return "\u2013";
  if (typeof value === "string") return value;
  if (Math.abs(value) < 1e-14) return "0"; // what is left of a sum of rounded figures
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("-", "\u2212").replace("e\u2212", "e-");
  const text = size >= 1000 ? grouped.format(Math.round(value)) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "\u2212");
}

/** The same with a sign. */
export function signed(value, digits = 3) {
  return value >= 1e-14 ? `+${figure(value, digits)}` : figure(value, digits);
}

/** Seconds as people say them. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "\u2013";
  if (seconds < 0.0000995) return `${figure(seconds * 1e6, 2)} \u00b5s`;
  if (seconds < 0.0995) return `${figure(seconds * 1000, 2)} ms`;
  if (seconds < 99.5) return `${figure(seconds, 2)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${figure(minutes / 60, 3)} h`;
}

/** "max_turns" -> "max turns". */
export function words(name) {
  return String(name).replaceAll("_", " ");
}

/** "1 episode", "2 episodes". */
export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}
