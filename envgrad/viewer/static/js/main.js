// The page's frame: the address decides what is shown; news of the run reach the page that is open.

import { address, h, link, refill } from "./dom.js";
import { forget, get, Refused } from "./api.js";
import { nothing } from "./parts.js";
import { plural } from "./text.js";
import { keyboard } from "./keys.js";
import { theme } from "./theme.js";
import * as overview from "./overview.js";
import * as episodes from "./episodes.js";
import * as stepPage from "./step.js";
import * as group from "./group.js";
import * as episode from "./episode.js";
import * as compare from "./compare.js";

const PAGES = { overview, episodes, step: stepPage, group, episode, compare };
const POLL = 1500;
const main = document.getElementById("main");
const live = document.getElementById("live");
const app = { runs: [], page: null, name: null, params: {}, shown: null, cursors: {} };

/** The page and its parameters, from the address. */
function where() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: path in PAGES ? path : "overview", params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/** What a page gets: the run it shows, and how it changes the address. */
function context(params) {
  const run = app.runs.find((one) => one.id === params.run) ?? app.runs[0];
  return {
    run,
    runs: app.runs,
    /** the parameter that names the run; empty for the first one */
    runParam: run === app.runs[0] ? "" : run.id,
    go(page, next) {
      location.hash = address(page, next);
    },
    /** Change parameters of this page; `quietly` adds no entry to the history. */
    change(next, quietly = true) {
      const target = address(app.name, { ...app.params, ...next });
      if (target === location.hash) return;
      if (quietly) {
        history.replaceState(null, "", target);
        show();
      } else location.hash = target;
    },
    /** The same without drawing anything anew. */
    note(next) {
      app.params = { ...app.params, ...next };
      history.replaceState(null, "", address(app.name, app.params));
    },
    signal: app.giveUp.signal,
  };
}

async function show() {
  const { name, params } = where();
  const same = name === app.name && app.page?.update;
  app.giveUp?.abort();
  app.giveUp = new AbortController();
  const { signal } = app.giveUp;
  app.name = name;
  app.params = params;
  main.setAttribute("aria-busy", "true");
  try {
    const ctx = context(params);
    mark(name, ctx);
    if (same) await app.page.update(params, ctx);
    else {
      const page = await PAGES[name].open(params, ctx);
      if (signal.aborted) return;
      app.page = page;
      refill(main, page.element);
      scrollTo(0, 0);
      if (app.shown !== null) main.querySelector("h1")?.focus({ preventScroll: true });
    }
    if (signal.aborted) return;
    app.shown = location.hash;
    document.title = `${app.page.title?.() ?? PAGES[name].title} \u00b7 ${ctx.run.name}`;
    main.removeAttribute("aria-busy");
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    main.removeAttribute("aria-busy");
    app.page = null;
    const text = error instanceof Refused || error instanceof TypeError ? error.message : "";
    refill(main, h("div", { class: "page" }, h("h1", { tabindex: "-1" }, "This cannot be shown"),
      nothing(text || "The page met an error.", link("overview", {}, {}, "Go to the overview"))));
    if (!(error instanceof Refused) && error.name !== "TypeError") throw error;
  }
}

function mark(name, ctx) {
  const run = ctx.runParam;
  const pages = [["overview", "Overview"], ["step", "Steps"], ["episodes", "Episodes"]];
  if (app.runs.length > 1) pages.push(["compare", "Compare"]);
  const current = { group: "step", episode: "episodes" }[name] ?? name;
  refill(document.getElementById("nav"), pages.map(([page, text]) =>
    link(page, page === "compare" ? {} : { run }, { "aria-current": page === current ? "page" : null }, text)));
  const title = document.getElementById("run-name");
  title.textContent = name === "compare" ? app.runs.map((one) => one.name).join(" and ") : ctx.run.name;
  title.title = ctx.run.folder;
}

/** Ask for news now and then, and tell the open page. */
async function poll() {
  if (document.visibilityState === "visible") {
    try {
      for (const run of app.runs) {
        const news = await get("news", { run: run.id, since: app.cursors[run.id] });
        app.cursors[run.id] = news.cursor;
        const changed = news.changed || news.reset;
        if (news.reset) forget();
        if (changed) Object.assign(run, news.run);
        tell(run, changed);
        if (changed && app.page?.live && !app.giveUp.signal.aborted) await app.page.live(run, context(app.params), news);
      }
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof Refused)) {
        live.dataset.state = "lost";
        refill(live, "no server");
      }
    }
  }
  setTimeout(poll, POLL);
}

let freshUntil = 0;
function tell(run, changed) {
  if (changed) freshUntil = Date.now() + 15_000;
  if (run !== app.runs[0]) return;
  const state = Date.now() < freshUntil ? "fresh" : "still";
  const text = `${plural(run.episodes, "episode")}`;
  if (live.dataset.state === state && live.dataset.text === text) return;
  live.dataset.state = state;
  live.dataset.text = text;
  refill(live, state === "fresh" ? "live" : h("span", {}, text), state === "fresh" ? h("span", { class: "live-more" }, `, ${text}`) : null);
}

async function start() {
  theme(document.getElementById("theme"));
  keyboard({ app, go: (page, params) => { location.hash = address(page, params); }, run: () => app.params.run ?? "" });
  try {
    const { runs } = await get("run");
    app.runs = runs;
    for (const run of runs) app.cursors[run.id] = run.cursor;
    tell(runs[0], false);
    addEventListener("hashchange", show);
    await show();
    setTimeout(poll, POLL);
  } catch (error) {
    refill(main, nothing("The run cannot be read.", error.message));
  }
}

start();
