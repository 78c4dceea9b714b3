/* What a conversation is: a tree of messages, of which one path is shown.

A conversation is { id, title, changed, messages, chosen }. A message is { id, parent, role, content }: `parent` is the id of the
message that it follows, "" for a first one. Messages of one parent are versions of each other, and `chosen` has the id of the
shown one by the parent's id. A question may have `files`: pictures { id, name, width, height } and sounds { id, name, sound:
true }. A reply also has:

  state       "writing" until it has ended
  response    the server's id of it
  at          number of the last event in it; counts from 0 in each attempt
  attempt     how often it was asked for: a reply that was cut is continued by another response
  reasoning, thought, calls    thoughts, their seconds, and tool calls
  rounds, sums                 what reply.js shows of drafts and speed
  used, model                  tokens of the context, name of the model
  end, failure                 "stopped" or "length", and a sentence where it failed */

const SHOWN_ROUNDS = 160; // the newest ones are kept
const NO_SUMS = { tokens: 0, decoded: 0, rounds: 0, drafted: 0, accepted: 0, ms: 0, thoughtMs: 0, isNew: true };
const TITLE_LENGTH = 48;
const EXCERPT = 60; // characters that a search shows around its words
const isListOf = (is) => (value) => Array.isArray(value) && value.every(is);
const isObject = (value) => value !== null && typeof value === "object";
const FORMS = { // of fields that have parts
  reasoning: (value) => typeof value === "string",
  files: isListOf(isObject),
  calls: isListOf(isObject),
  rounds: isListOf(Array.isArray),
};

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  return { id: newId(), title: "", changed: Date.now(), messages: [], chosen: {} };
}

/* A conversation from a file or an earlier version of this page, whose messages may be a plain list. A message that does not come
behind its parent is left out: the way from message to message could have no end. So is a field of another form than its own. */
export function readConversation(found) {
  if (!Array.isArray(found?.messages)) return null;
  let last = "";
  const known = new Set([""]);
  const messages = found.messages.flatMap((message, index) => {
    const { role, content, id = `m${index}`, parent = last } = message ?? {};
    if (!role || typeof content !== "string" || known.has(id) || !known.has(parent)) return [];
    known.add(id);
    last = id;
    return [Object.fromEntries(Object.entries({ ...message, id, parent }).filter(([name, value]) => FORMS[name]?.(value) ?? true))];
  });
  const { id = newId(), title, changed = Date.now(), chosen } = found;
  return { id, title: String(title ?? ""), changed, messages, chosen: { ...chosen } };
}

/* A message and all versions of it, the oldest first. */
export function versionsOf({ messages }, { parent }) {
  return messages.filter((each) => each.parent === parent);
}

/* The shown messages, the first one first. */
export function shownMessages({ messages, chosen }) {
  const shown = [];
  for (let parent = ""; ;) {
    const versions = messages.filter((each) => each.parent === parent);
    if (!versions.length) return shown;
    shown.push(versions.find(({ id }) => id === chosen[parent]) ?? versions.at(-1));
    parent = shown.at(-1).id;
  }
}

/* The messages from the first one to one of an id. */
export function messagesUpTo({ messages }, id) {
  const found = [];
  for (let at = id; at;) {
    const message = messages.find((each) => each.id === at);
    found.unshift(message);
    at = message.parent;
  }
  return found;
}

export function choose({ chosen }, message) {
  chosen[message.parent] = message.id;
}

/* Add a message behind the one of the id `parent`, and show it. */
export function addMessage(conversation, parent, fields) {
  const message = { id: newId(), parent, ...fields };
  conversation.messages.push(message);
  conversation.changed = Date.now();
  choose(conversation, message);
  return message;
}

/* The name that the list shows: the user's, or the first words. */
export function titleOf(conversation) {
  const [first] = shownMessages(conversation);
  const text = conversation.title || first?.content.trim().replace(/\s+/g, " ") || first?.files?.[0]?.name || "New chat";
  if (text.length <= TITLE_LENGTH || conversation.title) return text;
  const cut = piece(text, 0, TITLE_LENGTH);
  return `${cut.slice(0, cut.lastIndexOf(" ") > TITLE_LENGTH / 2 ? cut.lastIndexOf(" ") : TITLE_LENGTH)}…`;
}

/* A part of a text, without half an emoji at its ends. */
const piece = (text, begin, end) => text.slice(begin, end).replace(/^[\uDC00-\uDFFF]|[\uD800-\uDBFF]$/g, "");

export const isWriting = ({ messages }) => messages.some(({ state }) => state);

/* Where a conversation has all words of a search: a piece of text around the first one, "" if the title has them all; null
where it does not. */
export function found(conversation, search) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const title = titleOf(conversation).toLowerCase();
  if (words.every((word) => title.includes(word))) return "";
  for (const { content } of conversation.messages) {
    const text = content.toLowerCase();
    if (!words.every((word) => title.includes(word) || text.includes(word))) continue;
    const at = Math.max(0, Math.min(...words.map((word) => text.indexOf(word)).filter((each) => each >= 0)) - EXCERPT / 3);
    return `${at ? "…" : ""}${piece(content, at, at + EXCERPT).replace(/\s+/g, " ")}…`;
  }
  return null;
}

/* Messages as the `input` of the Responses API. A question whose reply failed before its first word is left out with it.
`partOf` makes the part of a file. */
export async function inputOf(messages, partOf) {
  const said = messages.filter((message, index) => {
    const reply = message.role === "user" ? messages[index + 1] : message;
    return !reply || reply.content;
  });
  const input = [];
  for (const { role, content, files = [] } of said) {
    const parts = await Promise.all(files.map(partOf));
    if (content && parts.length) parts.push({ type: "input_text", text: content });
    input.push({ role, content: parts.length ? parts : content });
  }
  return input;
}

/* Add an event of its response to a reply. */
export function addEvent(message, event) {
  message.at = event.sequence_number;
  switch (event.type) {
    case "response.created":
      Object.assign(message, { response: event.response.id, model: event.response.model });
      break;
    case "response.prompt_progress":
      message.used = event.prompt_progress.total;
      break;
    case "response.reasoning_text.delta":
      message.reasoning = (message.reasoning ?? "") + event.delta;
      break;
    case "response.output_text.delta":
      message.content += event.delta;
      if (message.reasoning) message.thought ??= (message.sums?.thoughtMs ?? 0) / 1e3;
      break;
    case "response.output_item.done":
      if (event.item.type === "function_call") {
        const { name, arguments: given } = event.item;
        message.calls = [...(message.calls ?? []), { name, arguments: given }];
      }
      break;
    case "response.round":
      count(message, event.round);
      break;
    case "response.completed":
    case "response.incomplete":
    case "response.failed":
      endWith(message, event.response);
      break;
    default:
  }
}

/* Count a round. The first one of a response is its prefill, whose time is not that of decoding. */
function count(message, { tokens, drafted, accepted, time_ms: ms }) {
  const sums = { ...NO_SUMS, ...message.sums };
  sums.tokens += tokens;
  sums.drafted += drafted;
  sums.accepted += accepted;
  if (!message.content) sums.thoughtMs += ms;
  if (!sums.isNew) {
    sums.rounds += 1;
    sums.decoded += tokens;
    sums.ms += ms;
    message.rounds = [...(message.rounds ?? []), [drafted, accepted]].slice(-SHOWN_ROUNDS);
  }
  sums.isNew = false;
  message.sums = sums;
  message.used = (message.used ?? 0) + tokens;
}

function endWith(message, { status, usage, error }) {
  message.used = usage?.total_tokens ?? message.used;
  const reasons = { incomplete: "length", cancelled: "stopped" };
  end(message, { ...(reasons[status] && { end: reasons[status] }), ...(error && { failure: error.message }) });
}

/* A reply has ended, or is no longer followed. */
export function end(message, fields) {
  if (message.reasoning) message.thought ??= (message.sums?.thoughtMs ?? 0) / 1e3;
  delete message.state;
  Object.assign(message, fields);
}
