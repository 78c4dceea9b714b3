/* The open conversation: its questions, replies, versions, the editor of a question, and what an empty one shows. */

import { choose, shownMessages, versionsOf } from "./conversation.js";
import { addFile, Attachments, isComposing, submitOnEnter } from "./composer.js";
import { add, addButton } from "./rendering.js";
import * as replies from "./replies.js";
import { Reply } from "./reply.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const AT_END = 40; // pixels: a conversation that is scrolled so far follows its reply

let id = ""; // of the conversation
let turns = new Map(); // what is shown, by the id of its message, the first one first: { key, element }, and a `view` of a reply
let isAtEnd = true;
let acts = {}; // { say, answer, again, goOn, used, ended, fields }

/* Let functions be called: `say` with a sentence, `answer` with a text, files and the id of the message before them, `again` and
`goOn` with a reply that is to be written again or continued, `used` with the tokens of the conversation, `ended` with a reply that
has ended and whether it is shown, and `fields` for further fields of a request. */
export function setUp(given) {
  acts = given;
  replies.setUp({
    begun: showIfOpen,
    waits: (message, wait) => viewOf(message)?.showWait(wait),
    grown: (message) => {
      if (!viewOf(message)) return;
      viewOf(message).grow(message);
      acts.used(message.used);
    },
    ended,
  }, given.fields);
}

/* The attachments of the question that is edited; null if none is. */
export let editor = null;

/* Show a conversation from its end. */
export function open(conversationId) {
  id = conversationId;
  editor = null;
  isAtEnd = true;
  turns = new Map();
  $("live").replaceChildren();
  $("turns").replaceChildren();
  show();
}

/* Show the conversation as it is kept now. Turns stay up to the first one that differs, whatever the texts of replies are: a long
conversation takes seconds to be made. */
export function show() {
  if (editor) return;
  const conversation = store.conversation(id);
  const messages = conversation ? shownMessages(conversation) : [];
  const last = messages.at(-1);
  const keys = messages.map((message) => keyOf(conversation, message, message === last));
  const before = [...turns.keys()];
  const differs = before.findIndex((each, index) => turns.get(each).key !== keys[index]);
  const kept = differs < 0 ? before.length : differs;
  $("empty").hidden = messages.length > 0;
  if (kept === before.length && kept === keys.length) return;
  for (const each of before.slice(kept)) {
    turns.get(each).element.remove();
    turns.get(each).view?.foot.remove(); // it is elsewhere while the reply grows
    turns.delete(each);
  }
  messages.slice(kept).forEach((message, index) => {
    const shown = message.role === "user" ? showQuestion(conversation, message) : showReply(conversation, message, message === last);
    turns.set(message.id, { key: keys[kept + index], ...shown });
  });
  acts.used(used());
  follow();
}

/* What a turn shows besides the text of its message. */
function keyOf(conversation, message, isLast) {
  const versions = versionsOf(conversation, message).map((each) => each.id);
  return JSON.stringify([message.id, message.attempt, versions, isLast && message.role !== "user"]);
}

const viewOf = (message) => turns.get(message.id)?.view;

/* The reply in view that is not complete; undefined if all are. Its last event comes before the end of its stream, and only then
has it its buttons. */
export function writing() {
  return [...turns.values()].find(({ view }) => view && !view.isFinished)?.view.message;
}

/* Tokens of the context that the conversation uses, and the id of its last message, "" if it has none. */
export const used = () => lastShown() && replies.newest(lastShown()).used;
export const last = () => lastShown()?.id ?? "";

function lastShown() {
  const conversation = store.conversation(id);
  return conversation && shownMessages(conversation).at(-1);
}

/* Forget what the editor has. */
export function leaveEditor() {
  editor = null;
}

function showIfOpen(message) {
  if (store.conversation(id)?.messages.some((each) => each.id === message.id)) show();
}

function showReply(conversation, message, isLast) {
  const view = new Reply($("turns"), replies.newest(message), follow, $("live"));
  if (view.message.state) view.showWait(replies.waitOf(message));
  else showButtons(view, conversation, isLast);
  return { element: view.turn, view };
}

/* Only the last reply can be written again: the messages after another one answer that one. */
function showButtons({ buttons, message }, conversation, isLast) {
  if (isLast) {
    addButton(buttons, "again", "Regenerate", () => acts.again(message));
    const isCut = message.end || message.failure;
    if (isCut) addButton(buttons, "more", message.content ? "Continue" : "Try again", () => acts.goOn(message));
  }
  addVersions(buttons, conversation, message);
}

function ended(message) {
  const view = viewOf(message);
  if (view && !view.isFinished) {
    const conversation = store.conversation(id);
    view.finish(message);
    showButtons(view, conversation, shownMessages(conversation).at(-1)?.id === message.id);
    acts.used(message.used);
    follow();
  }
  acts.ended(message, Boolean(view));
}

function showQuestion(conversation, message) {
  const turn = add($("turns"), "article", "turn user");
  turn.setAttribute("aria-label", "Your message");
  if (message.files) {
    const row = add(turn, "div", "files");
    for (const file of message.files) addFile(row, file);
  }
  if (message.content) add(turn, "div", "text", message.content);
  const buttons = add(turn, "div", "buttons");
  addVersions(buttons, conversation, message);
  addButton(buttons, "edit", "Edit", () => edit(turn, message)).setAttribute("aria-label", "Edit the message");
  return { element: turn };
}

/* Buttons that page through the versions of a message. */
function addVersions(parent, conversation, message) {
  const versions = versionsOf(conversation, message);
  if (versions.length < 2) return;
  const at = versions.findIndex((each) => each.id === message.id);
  const group = add(parent, "span", "versions");
  const turnTo = (name, label, other) => {
    const made = addButton(group, name, name === "earlier" ? "‹" : "›", () => {
      store.change(id, (changed) => choose(changed, versions[other]));
      const shown = [...$("turns").querySelectorAll(`.versions .${name}`)];
      const same = shown.find((each) => !each.disabled && each.dataset.parent === message.parent);
      (same ?? $("message")).focus({ preventScroll: true });
    });
    made.dataset.parent = message.parent;
    made.setAttribute("aria-label", label);
    made.disabled = !versions[other];
  };
  turnTo("earlier", "Earlier version", at - 1);
  add(group, "span", "", `${at + 1} / ${versions.length}`);
  turnTo("later", "Later version", at + 1);
}

function edit(turn, message) {
  if (writing() || editor) return;
  const form = document.createElement("form");
  form.className = "editor";
  const list = add(form, "ul", "attached");
  list.setAttribute("aria-label", "Attached");
  const field = add(form, "textarea", "");
  editor = new Attachments(list, field, acts.say, message.files);
  field.value = message.content;
  field.setAttribute("aria-label", "Message");
  const row = add(form, "div", "row");
  add(row, "span", "hint", "Becomes a new version; the old one stays");
  addButton(row, "", "Cancel", () => endEdit(message));
  add(row, "button", "primary", "Send").type = "submit";
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (!text && !editor.files.length) return;
    acts.answer(text, editor.files, message.parent);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !isComposing(event)) {
      event.stopPropagation();
      endEdit(message);
    } else {
      submitOnEnter(event, form);
    }
  });
  turn.replaceChildren(form);
  turn.classList.add("editing");
  turns.get(message.id).key = ""; // is made again when the editor is left
  field.focus();
}

/* Leave the editor without a change; the focus goes back to where it came from. */
function endEdit(message) {
  editor = null;
  show();
  (turns.get(message.id)?.element.querySelector(".edit") ?? $("message")).focus({ preventScroll: true });
}

/* Scrolling: the newest text stays in view until the user scrolls up. */

export function toEnd() {
  isAtEnd = true;
  follow();
}

function follow() {
  if (isAtEnd) $("conversation").scrollTop = $("conversation").scrollHeight;
  else showWay();
}

function showWay() {
  const { scrollHeight, scrollTop, clientHeight } = $("conversation");
  isAtEnd = scrollHeight - scrollTop - clientHeight < AT_END;
  $("to-end").hidden = isAtEnd;
}

$("conversation").addEventListener("scroll", showWay, { passive: true });
new ResizeObserver(() => isAtEnd && follow()).observe($("turns"));

$("to-end").addEventListener("click", () => {
  toEnd();
  $("message").focus({ preventScroll: true });
});
