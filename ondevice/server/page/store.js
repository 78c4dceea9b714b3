/* What stays in this browser: conversations, one entry of localStorage each, and settings.

A conversation is { id, title, changed, messages }. Messages have the API's role and content; a reply also has what the
page shows of it: reasoning, thought (seconds), calls, rounds, figures, failure. */

const PREFIX = "ondevice.conversation.";
const SETTINGS = "ondevice.settings";

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // written by something else
  }
}

/* All conversations, the one that changed last first. */
export function conversations() {
  const found = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX)).map((name) => parsed(localStorage[name]));
  return found.filter((each) => Array.isArray(each?.messages)).sort((a, b) => b.changed - a.changed);
}

export function newConversation() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", changed: Date.now(), messages: [] };
}

/* Keep a conversation. Throws if the browser has no room for it. */
export function save(conversation) {
  localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function remove(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
}

/* The name that the list shows: the user's, or the beginning of the first message. */
export function titleOf({ title, messages }) {
  return title || messages[0]?.content.replace(/\s+/g, " ").slice(0, 60) || "New chat";
}

/* The messages as the API takes them. A message whose reply failed before its first word is left out. */
export function forTheModel(messages, system) {
  const said = messages.filter((message, index) => {
    const reply = message.role === "user" ? messages[index + 1] : message;
    return !reply || reply.content;
  });
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...said.map(({ role, content }) => ({ role, content }))];
}

/* Settings by the name of the API's field, besides `system`, `thinking` and `theme`. What is missing is the server's default. */
export function settings() {
  return parsed(localStorage.getItem(SETTINGS)) ?? {};
}

export function saveSettings(changed) {
  localStorage.setItem(SETTINGS, JSON.stringify({ ...settings(), ...changed }));
}

/* Let the browser save `value` as a file of JSON. */
export function download(name, value) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
  link.download = `${name.replace(/[^\p{L}\p{N} _-]+/gu, "").trim() || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
