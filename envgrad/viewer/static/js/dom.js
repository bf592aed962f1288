// Elements are built from nodes alone. What a model or a tool wrote becomes text nodes: no string is ever read as HTML
// (the page's policy forbids it too).

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: attributes by name; `class`, `on` ({event: handler}), `data` ({name: value}), `value`, `checked`. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "vars") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

/** Append nodes; strings and numbers become text; null and false are left out; arrays are unrolled. */
export function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** `element` with these children instead of its own. A control that had the focus has it afterwards, drawn anew. */
export function refill(element, ...children) {
  const held = element !== document.activeElement && element.contains(document.activeElement) ? document.activeElement : null;
  const name = held && nameOf(held);
  element.replaceChildren();
  append(element, children);
  if (held && !held.isConnected) {
    [...element.querySelectorAll(held.tagName)].find((one) => nameOf(one) === name)?.focus({ preventScroll: true });
  }
  return element;
}

function nameOf(element) {
  return element.getAttribute("aria-label") ?? element.closest("label")?.textContent ?? element.textContent;
}

/** A link inside the page; `params` become the URL's query after the hash. */
export function link(page, params, props, ...children) {
  return h("a", { ...props, href: address(page, params) }, ...children);
}

/** "#/page?name=value&...": empty and null values are left out, and names come in one order. */
export function address(page, params) {
  const query = new URLSearchParams();
  for (const name of Object.keys(params ?? {}).sort()) {
    const value = params[name];
    if (value !== null && value !== undefined && value !== "" && value !== false) query.set(name, String(value));
  }
  const text = query.toString();
  return `#/${page}${text ? `?${text}` : ""}`;
}

/** Call `show` once when `element` comes near the screen. */
export function whenSeen(element, show) {
  const observer = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      show();
    },
    { rootMargin: "600px" },
  );
  observer.observe(element);
}

/** `run` after `wait` ms without another call. */
export function later(wait, run) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...values), wait);
  };
}
