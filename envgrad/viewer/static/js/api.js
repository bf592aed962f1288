// Requests to the server beside this page, and nowhere else.

/** A request that the server answered with an error; `message` is for people. */
export class Refused extends Error {}

const kept = new Map();
const KEEP = 60;

/** GET api/`name` with `params`; the answer as data. `signal` gives it up. */
export async function get(name, params, signal) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params ?? {})) {
    if (value !== null && value !== undefined && value !== "") query.set(key, String(value));
  }
  const answer = await fetch(`api/${name}?${query}`, { signal, credentials: "omit", cache: "no-store" });
  let body;
  try {
    body = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(`the server answered ${answer.status} without data`);
  }
  if (!answer.ok) throw new Refused(body.error ?? `the server answered ${answer.status}`);
  return body;
}

/** Ask anew for everything: what was read may not hold any more. */
export function forget() {
  kept.clear();
}

/** The same for what never changes once written (an episode's record): kept while the page is open. */
export async function getOnce(name, params, signal) {
  const key = `${name}?${JSON.stringify(params)}`;
  if (kept.has(key)) return kept.get(key);
  const body = await get(name, params, signal);
  kept.set(key, body);
  if (kept.size > KEEP) kept.delete(kept.keys().next().value);
  return body;
}
