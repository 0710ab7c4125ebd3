// Conversations in a list, and the turns of one of them.

import { ask, h, plural, signed, when } from "./dom.js";
import { heatmap } from "./heatmap.js";

const SIGNS = { positive: "+", negative: "−", neutral: "○", tied: "=", failed: "!", unasked: "·" };

const STATES = {
  side: ["side traffic", "A title, a summary or an automatic message: neither judged nor trained on."],
  open: ["waiting for what follows", "Nothing has followed this reply yet."],
  answered: ["waiting for the judge", "Something followed; the judge has not looked at it yet."],
  judged: ["nothing to learn", "The verdict has neither a score nor a hint."],
  ready: ["ready", "It waits for the next update."],
  claimed: ["in training", "The learner is working on it."],
  trained: ["trained", "A published version was trained on it."],
  rejected: ["update rejected", "It was trained on, and the version that came of it failed its checks."],
  expired: ["expired", "It was sampled by a version that is too old to learn from."],
  unusable: ["not usable", "Cut off, or the engine gave no log-probs: never trained on."],
  held_out: ["held out", "Kept to check new versions with: never trained on."],
  opted_out: ["opted out", "Its owner does not want it trained on."],
};

// Hints are for what will be trained, or may be once its owner wants it. A step during which they change is undone.
export const LEARNS_FROM_HINTS = new Set(["judged", "ready", "claimed", "opted_out"]);

/** One conversation in the list. */
export function sessionItem(session, isOpen, open) {
  const strip = h("span", { class: "strip", "aria-hidden": "true" },
    session.outcomes.map((outcome) => h("i", { class: outcome ?? "unknown" })));
  const scored = ["positive", "negative"].map((name) => session.outcomes.filter((each) => each === name).length);
  return h("li", {},
    h("button", { type: "button", "aria-current": isOpen ? "true" : null, "data-focus": "open", onclick: open },
      h("span", { class: "title" }, session.title || "(no text)"),
      h("span", { class: "meta" },
        plural(session.turns, "turn"), " · ", when(session.updated), strip,
        h("span", { class: "unseen" }, `. ${scored[0]} good, ${scored[1]} bad.`))));
}

/** One turn: what was said, what was replied, what followed, and what was made of it. */
export function turnItem(turn, act) {
  const [state, meaning] = STATES[turn.state] ?? [turn.state, ""];
  return h("li", { class: `turn ${turn.state}`, "aria-label": `Turn ${turn.number}` },
    turn.messages.map((message) => said(message)),
    h("div", { class: "reply" },
      h("div", { class: "who" }, "Reply", h("span", { class: "muted" }, turn.model_version)),
      replyBody(turn, act)),
    h("div", { class: "after" }, following(turn), verdict(turn), hints(turn, act)),
    h("footer", {},
      h("span", { class: "state", title: meaning }, state,
        turn.kind === "side" && turn.side_reason ? `: ${turn.side_reason}` : "",
        turn.use?.version ? ` in ${turn.use.version}` : ""),
      when(turn.created),
      h("code", { class: "id", title: turn.turn_id }, turn.turn_id.replace("chatcmpl-", "").slice(0, 8)),
      h("button", { type: "button", class: "quiet danger", "data-focus": "delete", onclick: () => act.deleteTurn(turn) },
        "Delete", h("span", { class: "unseen" }, " this turn"))));
}

const WHO = { user: "User", tool: "Tool", assistant: "Reply", system: "System", developer: "System" };

function said(message) {
  return h("div", { class: `said-by ${message.role}` },
    h("div", { class: "who" }, WHO[message.role] ?? message.role, message.name && h("code", {}, message.name)),
    text(message.text, message.cut), calls(message.tool_calls));
}

function text(value, cut) {
  return value ? h("div", { class: "text" }, value, cut > 0 && h("span", { class: "muted" }, ` … ${cut} more characters`)) : null;
}

function calls(list) {
  return (list ?? []).map((call) => h("pre", { class: "call" }, h("b", {}, call.name), ` ${call.arguments}`));
}

function replyBody(turn, act) {
  const reply = turn.reply;
  const plain = [
    reply.reasoning && h("details", {}, h("summary", {}, "Reasoning"), text(reply.reasoning)),
    text(reply.text, reply.cut),
    calls(reply.tool_calls),
    !reply.text && !reply.tool_calls.length && h("p", { class: "muted" }, "(empty reply)"),
  ];
  if (!turn.scored) return plain;
  const place = h("div", { class: "tokens" }, plain);
  act.tokensOf(turn).then((scores) => {
    if (scores?.tokens.length) place.replaceChildren(heatmap(scores, `Tokens of the reply of turn ${turn.number}`), ...calls(reply.tool_calls));
  }, (error) => place.append(h("p", { class: "error" }, `Its token advantages cannot be shown: ${error.message}`)));
  return place;
}

function following(turn) {
  if (turn.next_state === null) return null;
  return turn.next_state.map((message) => h("div", { class: "following" },
    h("span", { class: "who" }, `Then the ${(WHO[message.role] ?? message.role).toLowerCase()}`, message.name && h("code", {}, message.name)),
    text(message.text, message.cut), calls(message.tool_calls)));
}

function verdict(turn) {
  const given = turn.verdict;
  if (!given) return null;
  const score = given.score === null ? SIGNS[given.outcome] : signed(given.score, 0);
  const votes = given.votes.map((vote) => h("i", { class: vote.outcome, title: voteText(vote) }, SIGNS[vote.outcome]));
  return h("div", { class: "verdict" },
    h("span", { class: `chip ${given.outcome}` }, `${score} ${given.outcome}`),
    votes.length > 0 && h("span", { class: "votes", role: "img", "aria-label": `votes: ${given.votes.map(voteText).join(", ")}` }, votes),
    h("span", { class: "muted" }, given.source === "feedback" ? "by the user" : plural(votes.length, "vote")));
}

const voteText = (vote) => (vote.failure ? `failed, ${vote.failure}` : vote.outcome);

function hints(turn, act) {
  if (!turn.verdict) return null;
  const given = turn.verdict.hints;
  const open = LEARNS_FROM_HINTS.has(turn.state);
  const change = (list, done) => act.setHints(turn, list, done);
  const items = given.map((hint, place) => h("li", {},
    h("span", { class: "text" }, hint),
    open && h("span", { class: "row" },
      button("Edit", place, (event) => edit(event, hint, act, (value) => change(given.with(place, value), "Hint saved."))),
      button("Delete", place, async () => {
        if (!(await ask("Delete this hint?", hint, "Delete hint"))) return;
        await change(given.toSpliced(place, 1), "Hint deleted.");
        await act.refresh();
      }, "danger"))));
  return h("div", { class: "hints" },
    items.length > 0 && h("h3", {}, plural(items.length, "hint"), turn.verdict.hint_source === "edit" && h("span", { class: "muted" }, "edited")),
    items.length > 0 && h("ul", {}, items),
    open && h("button", {
      type: "button", class: "quiet", "data-focus": "add",
      onclick: (event) => edit(event, "", act, (value) => change([...given, value], "Hint added.")),
    }, "Add a hint"));
}

function button(name, place, onclick, more = "") {
  return h("button", { type: "button", class: `quiet ${more}`, "data-focus": `${name}-${place}`, onclick },
    name, h("span", { class: "unseen" }, ` hint ${place + 1}`));
}

// A field in place of the hint, or of the button, until it is saved or given up.
function edit(event, value, act, save) {
  const place = event.currentTarget.closest(".hints li") ?? event.currentTarget;
  const field = h("textarea", { rows: 3, "aria-label": "Hint", maxlength: 4000, required: true });
  field.value = value;
  const close = () => form.replaceWith(place);
  const form = h("form", {
    class: "edit",
    onsubmit: async (submitted) => {
      submitted.preventDefault();
      if (!(await save(field.value.trim()))) return;
      close();
      await act.refresh();
    },
    onkeydown: (pressed) => {
      if (pressed.key === "Escape") close();
      if (pressed.key === "Enter" && (pressed.ctrlKey || pressed.metaKey)) form.requestSubmit();
    },
  }, field, h("div", { class: "row end" },
    h("button", { type: "button", class: "quiet", onclick: close }, "Cancel"), h("button", { class: "solid" }, "Save")));
  place.replaceWith(form);
  field.focus();
}
