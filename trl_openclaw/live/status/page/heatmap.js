// A reply as its tokens, each coloured by its advantage: blue for more of it, orange for less, which everybody can tell
// apart. The numbers stand in a small window beside the token that the pointer or the keyboard is at.

import { byId, h, percent, signed } from "./dom.js";

const WINDOW_GAP = 6;

/** The advantage at which colours are full: 1, or the largest of the reply where that is more. */
export const boundOf = (advantages) => Math.max(1, ...advantages.filter(isNumber).map(Math.abs));

/**
 * The reply. Its tokens are one stop of the tab key; the arrow keys, Home and End go from token to token.
 * @param scores tokens, advantages, student, teacher and prefers, each with one entry a token; numbers may be null.
 */
export function heatmap(scores, label) {
  const bound = boundOf(scores.advantages);
  const box = h("div", { class: "heatmap", role: "listbox", "aria-label": label, "aria-orientation": "horizontal" });
  scores.tokens.forEach((text, place) => box.append(token(scores, place, bound)));
  box.firstElementChild?.setAttribute("tabindex", "0");
  box.addEventListener("keydown", (event) => step(event, box));
  box.addEventListener("mouseover", (event) => open(event.target));
  box.addEventListener("focusin", (event) => open(event.target));
  box.addEventListener("mouseleave", hidePeek);
  box.addEventListener("focusout", hidePeek);

  function open(target) {
    const element = target.closest(".token");
    if (element) showPeek(element, scores, Number(element.dataset.place), bound);
  }
  return box;
}

function token(scores, place, bound) {
  const advantage = scores.advantages[place];
  const element = h("span", {
    class: `token ${kindOf(scores.tokens[place], advantage)}`,
    role: "option",
    tabindex: "-1",
    "aria-selected": "false",
    "aria-label": spoken(scores, place),
    "data-place": place,
  }, shown(scores.tokens[place]));
  if (isNumber(advantage)) element.style.setProperty("--strength", Math.min(1, Math.abs(advantage) / bound).toFixed(4));
  return element;
}

function kindOf(text, advantage) {
  const kind = !isNumber(advantage) ? "untrained" : advantage > 0 ? "more" : advantage < 0 ? "less" : "none";
  return /^<[^\s<>]+>$/.test(text) ? `${kind} special` : kind;
}

// A line break is a sign and a break, so that it can be seen and pointed at.
const shown = (text) => text.replace(/\n+/g, (breaks) => "⏎".repeat(breaks.length) + breaks).replaceAll("\t", "⇥\t");
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(empty)";

function spoken(scores, place) {
  const [advantage, student, teacher] = numbers(scores, place);
  const known = isNumber(advantage) ? `advantage ${signed(advantage)}` : "not trained";
  return `${visible(scores.tokens[place])}: ${known}, student ${logprob(student)}, teacher ${logprob(teacher)}`;
}

const numbers = (scores, place) => ["advantages", "student", "teacher"].map((name) => scores[name][place]);
const isNumber = (value) => typeof value === "number";
const logprob = (value) => (isNumber(value) ? value.toFixed(2).replace("-", "−") : "unknown");
const chance = (value) => (isNumber(value) ? share(Math.exp(value)) : "");
const share = (p) => (p >= 0.995 ? ">99 %" : p < 0.005 ? "<1 %" : percent(p));

function step(event, box) {
  const tokens = [...box.children];
  const at = tokens.indexOf(document.activeElement);
  const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: Infinity };
  if (!(event.key in moves)) return;
  event.preventDefault();
  const next = tokens[Math.max(0, Math.min(tokens.length - 1, moves[event.key]))];
  for (const each of tokens) each.tabIndex = each === next ? 0 : -1;
  next.focus();
}

function showPeek(element, scores, place, bound) {
  const peek = byId("peek");
  const [advantage, student, teacher] = numbers(scores, place);
  peek.replaceChildren(
    h("div", { class: "peek-head" },
      h("code", {}, visible(scores.tokens[place])),
      h("strong", { class: isNumber(advantage) ? (advantage < 0 ? "less" : "more") : "" },
        isNumber(advantage) ? signed(advantage, 3) : "not trained")),
    h("dl", {},
      row("full colour at", `±${bound.toFixed(2)}`),
      row("student", `${logprob(student)} nats`, chance(student)),
      row("teacher", `${logprob(teacher)} nats`, chance(teacher))),
    preferences(scores.prefers?.[place]),
  );
  peek.hidden = false;
  beside = element;
  movePeek();
  describe(element);
}

const row = (name, value, more) => [h("dt", {}, name), h("dd", {}, value, more && h("span", { class: "muted" }, more))];

function preferences(prefers) {
  if (!prefers?.length) return "";
  const head = h("tr", {}, ["preferred", "teacher", "student"].map((name) => h("th", { scope: "col" }, name)));
  const rows = prefers.map(([text, ...both]) =>
    h("tr", {}, h("th", { scope: "row" }, h("code", {}, visible(text))), both.map((p) => h("td", {}, meter(p)))));
  return h("table", {}, h("thead", {}, head), h("tbody", {}, rows));
}

function meter(p) {
  if (!isNumber(p)) return "";
  const bar = h("span", { class: "meter", "aria-hidden": "true" });
  bar.style.setProperty("--share", p.toFixed(4));
  return [share(p), bar];
}

let beside = null;

/** Keep the window at its token: below it, or above it where the page ends, and always inside. */
export function movePeek() {
  const peek = byId("peek");
  if (peek.hidden || !beside) return;
  const at = beside.getClientRects()[0];
  if (!at || at.bottom < 0 || at.top > innerHeight) return hidePeek();
  const { width, height } = peek.getBoundingClientRect();
  const below = at.bottom + WINDOW_GAP + height <= innerHeight;
  peek.style.left = `${Math.max(WINDOW_GAP, Math.min(at.left, innerWidth - width - WINDOW_GAP))}px`;
  peek.style.top = `${Math.max(WINDOW_GAP, below ? at.bottom + WINDOW_GAP : at.top - height - WINDOW_GAP)}px`;
}

function describe(element) {
  for (const other of document.querySelectorAll('[aria-describedby="peek"]')) other.removeAttribute("aria-describedby");
  element.setAttribute("aria-describedby", "peek");
}

/** Close the window with the numbers. */
export function hidePeek() {
  byId("peek").hidden = true;
}

/** What the colours mean. */
export function legend() {
  return [
    h("span", {}, "less of this token"),
    h("span", { class: "scale", "aria-hidden": "true" }),
    h("span", {}, "more of it"),
    h("span", { class: "muted" }, "Each token of a reply that was trained on, coloured by its advantage. Point at one for its numbers."),
  ];
}
