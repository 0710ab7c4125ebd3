// The page: asks for a summary every two seconds, and for the rest only when something has changed.

import { forgetKey, get, hasKey, post, Refused, setKey } from "./client.js";
import { LEARNS_FROM_HINTS, sessionItem, turnItem } from "./conversation.js";
import { ask, byId, renderList, say } from "./dom.js";
import { hidePeek, legend, movePeek } from "./heatmap.js";
import * as learning from "./learning.js";

const POLL = 2000;
const SLOWEST_POLL = 16000;
const NEAR = 80; // pixels from the end at which somebody reads along

// `sessions` and `turns` are the edges of the pages that were turned back through; the last one is that of the page shown.
const page = { etag: null, open: null, sessions: [], turns: [], per: "version", side: false, overview: null, wait: POLL };
const scores = new Map(); // what was computed for a turn in a batch never changes

// --- asking -----------------------------------------------------------------------------------------------------------

let timer;
let running = null;

/** Look whether anything has changed, and show it. Calls that come while one is running share the next one. */
async function refresh(force = false) {
  clearTimeout(timer);
  if (force) page.etag = null;
  if (running) return running.then(() => refresh(force));
  running = look();
  try {
    await running;
  } finally {
    running = null;
    clearTimeout(timer);
    if (!document.hidden && !byId("key").open) timer = setTimeout(refresh, page.wait);
  }
}

async function look() {
  try {
    const overview = await get("overview", {}, page.etag);
    page.wait = POLL;
    if (overview !== undefined) page.overview = overview;
    if (overview === undefined) return connected(true);
    showOverview();
    await showSessions();
    await showTurns();
    movePeek();
    page.etag = overview.etag;
    connected(true);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return askForKey(hasKey());
    page.wait = Math.min(SLOWEST_POLL, page.wait * 2);
    connected(false, error);
  }
}

const act = {
  refresh: () => refresh(true),
  tokensOf(turn) {
    const name = `${turn.turn_id} ${turn.scored}`;
    if (!scores.has(name)) scores.set(name, get("tokens", { turn: turn.turn_id }));
    scores.get(name).catch(() => scores.delete(name));
    return scores.get(name);
  },
  setHints: (turn, hints, done) => change("hints", { turn: turn.turn_id, hints }, ({ state }) =>
    LEARNS_FROM_HINTS.has(state) ? done : `${done} It comes too late: nothing more is learned from this turn.`),
  rollBack: (version) => change("roll-back", { to: version }, `${version} answers from now on.`).then(act.refresh),
  optOut: (on) => change("opt-out", { on }, on ? "Opted out." : "The model learns from them again.").then(act.refresh),
  async deleteTurn(turn) {
    const text = "It is removed for good, with its verdict, hints and scores, and with all later turns whose history holds " +
      "its reply. What the model has learned from it stays.";
    if (!(await ask("Delete this turn?", text, "Delete turn"))) return;
    await change("delete", { turn: turn.turn_id }, "Turn deleted.");
    await act.refresh();
  },
  async deleteSession() {
    const text = "All its turns are removed for good, with verdicts, hints and scores. What the model has learned from them stays.";
    if (!(await ask("Delete this conversation?", text, "Delete conversation"))) return;
    if (await change("delete", { session: page.open }, "Conversation deleted.")) await openSession(null);
  },
  async deleteAll() {
    const user = page.overview.user;
    const text = `All conversations of user ${user} are removed for good, with their verdicts, hints and token scores and the ` +
      "satisfaction counted from them, and so are exports that hold any of it. A reply that is on its way is not recorded. " +
      "What stays: versions that were published and trained on them, with the figures of their checks; your choice " +
      "about training; and a note, without text, of when how many turns were deleted.";
    if (!(await ask(`Delete all data of user ${user}?`, text, "Delete all"))) return;
    await change("delete", { all: true }, "All your data is deleted.");
    scores.clear();
    page.sessions = [];
    await openSession(null); // also where it failed: all may be gone but for traces in the file
  },
};

// Have something changed, and tell how it went, by a text or what makes one of the answer; true if it went well.
async function change(path, body, done) {
  try {
    const answer = await post(path, body);
    say(typeof done === "function" ? done(answer) : done);
    return true;
  } catch (error) {
    say(error.message);
    return false;
  }
}

// --- showing ----------------------------------------------------------------------------------------------------------

function showOverview() {
  const overview = page.overview;
  byId("serving").textContent = overview.model ? `${overview.model}, ${overview.published}` : overview.published;
  byId("queue").replaceChildren(...learning.queue(overview));
  renderList(byId("version-list"), overview.versions, (version) => version.version, (version) => learning.versionItem(version, act));
  byId("data").replaceChildren(...learning.data(overview, act));
  showSatisfaction();
  const problems = byId("problems");
  problems.hidden = overview.problems.length === 0;
  renderList(problems, overview.problems, (text) => text, (text) => Object.assign(document.createElement("li"), { textContent: text }));
}

function showSatisfaction() {
  const points = page.overview.satisfaction[page.per];
  byId("satisfaction").replaceChildren(...learning.satisfaction(points, page.per));
  for (const button of document.querySelectorAll("[data-per]")) button.setAttribute("aria-pressed", String(button.dataset.per === page.per));
}

async function showSessions() {
  const { sessions, more } = await get("sessions", { before: page.sessions.at(-1) ?? null, side: page.side });
  if (page.open === null && sessions.length) page.open = sessions[0].session_id;
  const items = sessions.map((session) => ({ ...session, open: session.session_id === page.open }));
  renderList(byId("session-list"), items, (item) => item.session_id, (item) => sessionItem(item, item.open, () => openSession(item.session_id)));
  turnPages("sessions", "older-sessions", more && sessions.at(-1).number, "newer-sessions");
}

async function showTurns() {
  const none = { turns: [], more: false };
  const { turns, more } = page.open === null ? none : await get("turns", { session: page.open, before: page.turns.at(-1) ?? null });
  const pane = byId("turns");
  const readsAlong = page.justOpened || (page.turns.length === 0 && pane.scrollHeight - pane.scrollTop - pane.clientHeight < NEAR);
  renderList(byId("turn-list"), turns, (turn) => turn.turn_id, (turn) => turnItem(turn, act));
  turnPages("turns", "earlier-turns", more && turns[0].number, "later-turns");
  byId("delete-session").hidden = turns.length === 0;
  byId("session-name").textContent = page.open ?? "";
  const coloured = turns.some((turn) => turn.scored);
  byId("legend").hidden = !coloured;
  if (coloured && !byId("legend").hasChildNodes()) byId("legend").append(...legend());
  byId("empty").hidden = turns.length > 0;
  byId("empty").textContent = page.open === null
    ? "No conversation yet. Point any OpenAI client at this server and talk."
    : "This conversation has no turns.";
  if (readsAlong) pane.scrollTop = pane.scrollHeight;
  page.justOpened = false;
}

// The buttons that go one page back and forth: `edge` is where the next page back begins, false where there is none.
function turnPages(what, back, edge, forth) {
  byId(back).hidden = edge === false;
  byId(back).onclick = () => (page[what].push(edge), refresh(true));
  byId(forth).hidden = page[what].length === 0;
  byId(forth).onclick = () => (page[what].pop(), refresh(true));
}

function openSession(id) {
  page.open = id;
  page.turns = [];
  page.justOpened = true;
  history.replaceState(null, "", id === null ? location.pathname : `#session=${encodeURIComponent(id)}`);
  if (id !== null) showPane("turns");
  return refresh(true);
}

function connected(is, error) {
  const pill = byId("connection");
  const problems = page.overview?.problems.length ?? 0;
  const [text, kind] = !is ? ["Not connected", "bad"] : problems ? ["Needs attention", "bad"] : ["Live", "good"];
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = `pill ${kind}`;
  pill.title = is ? "" : error.message;
  byId("forget-key").hidden = !hasKey();
}

function askForKey(wasWrong) {
  forgetKey();
  const dialog = byId("key");
  if (wasWrong) byId("key-why").textContent = "This key is not known here.";
  for (const list of ["session-list", "turn-list", "version-list"]) byId(list).replaceChildren();
  if (!dialog.open) dialog.showModal();
}

function showPane(name) {
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll("[data-show]")) {
    if (button.dataset.show === name) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}

// --- listening --------------------------------------------------------------------------------------------------------

byId("side").addEventListener("click", () => {
  page.side = !page.side;
  page.sessions = [];
  byId("side").setAttribute("aria-pressed", String(page.side));
  refresh(true);
});
byId("delete-session").addEventListener("click", () => act.deleteSession());
for (const button of document.querySelectorAll("[data-per]")) {
  button.addEventListener("click", () => ((page.per = button.dataset.per), showSatisfaction()));
}
for (const button of document.querySelectorAll("[data-show]")) button.addEventListener("click", () => showPane(button.dataset.show));
byId("key").addEventListener("close", () => {
  const key = byId("key-value").value.trim();
  byId("key-value").value = "";
  if (key) setKey(key);
  refresh(true);
});
byId("forget-key").addEventListener("click", () => (forgetKey(), location.reload()));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the conversation
  byId("turns").focus();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && hidePeek());
document.addEventListener("scroll", movePeek, true);
addEventListener("resize", movePeek);
document.addEventListener("visibilitychange", () => !document.hidden && refresh());

const asked = new URLSearchParams(location.hash.slice(1)).get("session");
if (asked) page.open = asked;
showPane(document.body.dataset.view);
refresh();
