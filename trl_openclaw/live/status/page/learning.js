// The queue, the versions, satisfaction over time, and what becomes of one's data.

import { ask, h, percent, plural, svg, when } from "./dom.js";

/** How many turns the next update has, and what became of all others. */
export function queue({ queue, turns }) {
  const share = Math.min(1, queue.ready / queue.wanted);
  const bar = h("div", {
    class: "progress", role: "progressbar", "aria-label": "Turns for the next update",
    "aria-valuemin": 0, "aria-valuemax": queue.wanted, "aria-valuenow": Math.min(queue.ready, queue.wanted), "aria-valuetext": queue.says,
  }, h("span", {}));
  bar.style.setProperty("--share", share.toFixed(4));
  const rest = Object.entries(turns).filter(([state, count]) => count > 0 && state !== "ready");
  return [
    h("p", { class: "says" }, queue.says),
    bar,
    h("ul", { class: "counts" }, rest.map(([state, count]) => h("li", {}, h("b", {}, count), ` ${state.replaceAll("_", " ")}`))),
  ];
}

const STATUS = { published: "answers now", rejected: "rejected", rolled_back: "rolled back", checked: "checked", superseded: "earlier", load_failed: "cannot be loaded", new: "unchecked" };

/** One version with its checks. */
export function versionItem(version, act) {
  const checked = version.events.findLast((event) => event.event === "checked");
  const back = version.can_return_to && h("button", {
    type: "button", class: "quiet", "data-focus": "back",
    onclick: async () => {
      const text = `Requests that are running finish on their version; all later ones are answered by ${version.version}.`;
      if (await ask(`Roll back to ${version.version}?`, text, "Roll back")) await act.rollBack(version.version);
    },
  }, "Roll back", h("span", { class: "unseen" }, ` to ${version.version}`));
  const last = version.events.findLast((event) => event.event === version.status);
  const why = last?.detail.reason ?? last?.detail.error;
  return h("li", { class: `version ${version.status}` },
    h("div", { class: "row" }, h("strong", {}, version.version), h("span", { class: `chip ${version.status}` }, STATUS[version.status]), back),
    why && h("p", { class: "why" }, why),
    checked
      ? h("details", {}, h("summary", {}, when(version.created), ", checks"), checks(checked.detail))
      : h("p", { class: "muted" }, version.created === null ? "without an adapter" : when(version.created)));
}

const OUTCOMES = { passed: "✓", failed: "✕", no_data: "–", off: "–" };

function checks(detail) {
  const { checks: found, ...rest } = detail;
  const list = Object.entries(found ?? {}).map(([name, check]) =>
    h("li", { class: check.outcome },
      h("span", { class: "sign", role: "img", "aria-label": check.outcome.replaceAll("_", " ") }, OUTCOMES[check.outcome] ?? "?"),
      h("b", {}, name.replaceAll("_", " ")), h("span", { class: "muted" }, check.note)));
  return [h("ul", { class: "checks" }, list), details(rest)];
}

// Anything else that was written down.
function details(value) {
  if (Array.isArray(value)) return h("ul", {}, value.map((each) => h("li", {}, details(each))));
  if (value !== null && typeof value === "object") {
    return h("dl", {}, Object.entries(value).map(([name, each]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, details(each))]));
  }
  if (typeof value === "number" && !Number.isInteger(value)) return value.toFixed(3).replace("-", "−");
  return value === true ? "yes" : value === false ? "no" : value === null ? "none" : String(value);
}

const CHART = { width: 280, height: 160, left: 40, right: 6, top: 10, bottom: 40 };
const SHOWN = 12;

/** The share of good verdicts among those with a score, per version or day, with how many there were. */
export function satisfaction(points, per) {
  const known = points.filter((point) => point.scored > 0).slice(-SHOWN);
  if (known.length === 0) return [h("p", { class: "muted" }, "No verdict has a score yet.")];
  const inner = { width: CHART.width - CHART.left - CHART.right, height: CHART.height - CHART.top - CHART.bottom };
  const x = (place) => CHART.left + (inner.width * (place + 0.5)) / known.length;
  const y = (share) => CHART.top + inner.height * (1 - share);
  const shares = known.map((point) => point.positive / point.scored);
  const drawing = svg("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, class: "chart", "aria-hidden": "true" },
    [0, 0.5, 1].map((share) => [
      svg("line", { class: "grid", x1: CHART.left, x2: CHART.width - CHART.right, y1: y(share), y2: y(share) }),
      svg("text", { class: "axis", x: CHART.left - 6, y: y(share) + 3.5, "text-anchor": "end" }, percent(share)),
    ]),
    svg("polyline", { class: "line", points: shares.map((share, place) => `${x(place)},${y(share)}`).join(" ") }),
    known.map((point, place) => [
      svg("circle", { class: "dot", cx: x(place), cy: y(shares[place]), r: 4 },
        svg("title", {}, `${point.name}: ${percent(shares[place])} of ${point.scored}`)),
      svg("text", { class: "axis", x: x(place), y: CHART.height - 24, "text-anchor": "middle" }, shortName(point.name, per)),
      svg("text", { class: "axis faint", x: x(place), y: CHART.height - 10, "text-anchor": "middle" }, point.scored),
    ]));
  const table = h("table", { class: "unseen" },
    h("caption", {}, `Share of good verdicts per ${per}`),
    h("tr", {}, [per, "good", "of"].map((name) => h("th", { scope: "col" }, name))),
    known.map((point, place) => h("tr", {}, h("th", { scope: "row" }, point.name), h("td", {}, percent(shares[place])), h("td", {}, point.scored))));
  return [drawing, table, h("p", { class: "muted" }, `Share of good verdicts per ${per}; below, how many had a score.`)];
}

const shortName = (name, per) => (per === "day" ? name.slice(5) : name.replace(/^v0+/, "v"));

/** What is kept, and whether it is trained on. */
export function data(overview, act) {
  const change = async () => {
    if (overview.opted_out) return act.optOut(false);
    const text = "Conversations are still recorded and shown here, and nothing of them is trained on from now on.";
    if (await ask("Keep your conversations out of training?", text, "Opt out")) await act.optOut(true);
  };
  return [
    h("p", {}, overview.opted_out ? "Your conversations are kept and not trained on." : "The model learns from your conversations. They stay on this machine."),
    h("button", { type: "button", class: "quiet", "data-focus": "opt-out", onclick: change },
      overview.opted_out ? "Let the model learn from them again" : "Opt out of training"),
    h("button", { type: "button", class: "quiet danger", "data-focus": "delete-all", onclick: act.deleteAll }, "Delete all my data"),
    h("p", { class: "muted" }, `User ${overview.user}, ${plural(Object.values(overview.turns).reduce((sum, count) => sum + count, 0), "turn")}.`),
  ];
}
