// Elements made of plain text: whatever a message says, it is shown and never read as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element. `on...` properties are listeners, `class` and all others attributes; null and false leave one out. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for drawings. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * Make the children of `parent` those that `items` ask for, and leave alone what did not change: what one reads,
 * writes in or has in focus stays. `make(item)` is called for new and changed items only.
 */
export function renderList(parent, items, keyOf, make) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = items.map((item) => {
    const key = String(keyOf(item));
    const print = JSON.stringify(item);
    let child = old.get(key);
    if (!child || (child.dataset.print !== print && !isBusy(child))) {
      child = make(item);
      child.dataset.key = key;
      child.dataset.print = print;
      const replaced = old.get(key);
      if (replaced) carryFocus(replaced, child);
    }
    old.set(key, child);
    return child;
  });
  const keep = new Set(wanted);
  for (const child of [...parent.children]) if (!keep.has(child)) child.remove();
  wanted.forEach((child, place) => {
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
  });
}

// Somebody is writing in it.
const isBusy = (element) => element.querySelector("textarea") !== null;

function carryFocus(replaced, replacement) {
  const within = replaced.contains(document.activeElement) && document.activeElement.dataset.focus;
  replaced.replaceWith(replacement);
  if (within) replacement.querySelector(`[data-focus="${CSS.escape(within)}"]`)?.focus();
}

let saidTimer;

/** Tell what has happened, on the screen and to screen readers. */
export function say(text) {
  byId("said").textContent = text;
  clearTimeout(saidTimer);
  saidTimer = setTimeout(() => (byId("said").textContent = ""), 6000);
}

/** Ask before something that cannot be undone; true for yes. */
export function ask(title, text, yes) {
  const dialog = byId("ask");
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-yes").textContent = yes;
  dialog.returnValue = "";
  dialog.showModal();
  byId("ask-no").focus();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

const TIME = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

/** A moment, in the reader's own time: the time of day for today, with the date for others. */
export function when(seconds) {
  const date = new Date(seconds * 1000);
  const today = date.toDateString() === new Date().toDateString();
  return h("time", { datetime: date.toISOString(), title: date.toLocaleString() }, (today ? TIME : DAY).format(date));
}

/** A number with its sign, as "+0.42" or "−0.42". */
export function signed(value, digits = 2) {
  const text = Math.abs(value).toFixed(digits);
  if (Number(text) === 0) return text;
  return (value < 0 ? "−" : "+") + text;
}

export const percent = (share) => `${Math.round(share * 100)} %`;

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;
