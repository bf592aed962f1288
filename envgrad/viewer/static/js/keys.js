// The keyboard, and the dialog that lists it.

import { h, refill } from "./dom.js";

const KEYS = [
  [["g", "o"], "overview"],
  [["g", "s"], "steps"],
  [["g", "e"], "episodes"],
  [["g", "c"], "compare two runs"],
  [["/"], "search"],
  [["j"], "next in the list"],
  [["k"], "previous in the list"],
  [["Enter"], "open it"],
  [["["], "previous step, sibling or page"],
  [["]"], "next step, sibling or page"],
  [["u"], "up: from an episode to its group, from a group to its step"],
  [["t"], "conversation or tokens"],
  [["c"], "tokens: the next colouring"],
  [["d"], "dark or light"],
  [["?"], "this list"],
  [["Esc"], "close, or leave a field"],
];

const JUMPS = { o: "overview", s: "step", e: "episodes", c: "compare" };

/** Listen on the whole page. Elements take part by their `data-key` (pressed) and `data-item` (walked by j and k). */
export function keyboard({ app, go, run }) {
  const dialog = document.getElementById("keys");
  const help = document.getElementById("help");
  refill(dialog, h("h2", { id: "keys-title" }, "Keyboard"),
    h("dl", { class: "keys" }, KEYS.map(([keys, what]) => [h("dt", {}, keys.map((key) => h("kbd", {}, key))), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", { class: "button", autofocus: true }, "Close")));
  const open = () => dialog.showModal();
  help.addEventListener("click", open);
  let pending = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    const field = event.target.closest("input, select, textarea");
    if (field) {
      if (event.key === "Escape") field.blur();
      return;
    }
    if (Date.now() < pending && JUMPS[event.key]) {
      pending = 0;
      if (event.key !== "c" || app.runs.length > 1) go(JUMPS[event.key], event.key === "c" ? {} : { run: run() });
      return;
    }
    pending = 0;
    if (event.key === "g") pending = Date.now() + 1200;
    else if (event.key === "?") open();
    else if (event.key === "d") document.getElementById("theme").click();
    else if (event.key === "j" || event.key === "k") walk(event.key === "j" ? 1 : -1);
    else {
      const target = [...document.querySelectorAll("main [data-key]")].find((one) => one.dataset.key === event.key);
      if (!target) return;
      event.preventDefault();
      if (target.matches("input")) target.focus();
      else target.click();
    }
  });
}

function walk(by) {
  const items = [...document.querySelectorAll("main [data-item]")];
  if (!items.length) return;
  const now = items.indexOf(document.activeElement);
  const next = items[now < 0 ? (by > 0 ? 0 : items.length - 1) : Math.min(Math.max(now + by, 0), items.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}
