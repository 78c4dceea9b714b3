/* What stays in this browser: conversations, one entry of localStorage each, settings, and files in IndexedDB, because
localStorage has room for 5 MB only.

A conversation is { id, title, changed, messages }. Messages have the API's role and content; a question may have files,
pictures { id, name, width, height } and sounds { id, name, sound: true }; a reply also has what the page shows of it:
reasoning, thought (seconds), calls, rounds, figures, failure. */

const PREFIX = "ondevice.conversation.";
const SETTINGS = "ondevice.settings";
const FILES = "files";

const held = new Map(); // files by id, until the page is closed: also those for which the browser has no room
let database = null; // promise of the open one

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

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  return { id: newId(), title: "", changed: Date.now(), messages: [] };
}

/* Keep a conversation. Throws if the browser has no room for it. */
export function save(conversation) {
  localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function remove(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
  removeUnusedFiles();
}

/* The name that the list shows: the user's, or the beginning of the first message. */
export function titleOf({ title, messages }) {
  const [first] = messages;
  return title || first?.content.replace(/\s+/g, " ").slice(0, 60) || first?.files?.[0].name || "New chat";
}

/* The messages as the API takes them. A message whose reply failed before its first word is left out. Throws an error with
a sentence for the user if a file is gone. */
export async function forTheModel(messages, system) {
  const said = messages.filter((message, index) => {
    const reply = message.role === "user" ? messages[index + 1] : message;
    return !reply || reply.content;
  });
  const made = system ? [{ role: "system", content: system }] : [];
  for (const { role, content, files = [] } of said) {
    const parts = await Promise.all(files.map(partOf));
    if (content && parts.length) parts.push({ type: "text", text: content });
    made.push({ role, content: parts.length ? parts : content });
  }
  return made;
}

async function partOf({ id, name, sound }) {
  const url = await urlOf(id);
  if (!url) throw new Error(`${name} is not kept in this browser: edit its message, and attach it again.`);
  if (!sound) return { type: "image_url", image_url: { url } };
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format: "wav" } };
}

/* Files. */

function openDatabase() {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open("ondevice", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(FILES);
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
}

/* What `act` asks of the database's files. */
async function inFiles(mode, act) {
  database ??= openDatabase();
  const transaction = (await database).transaction(FILES, mode);
  const asked = act(transaction.objectStore(FILES));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/* Hold a file while this page is open, and return its id. */
export function holdFile(blob) {
  const id = newId();
  held.set(id, blob);
  return id;
}

/* Keep held files in the browser, after the conversation that has them. Throws if it has no room. */
export async function keepFiles(files) {
  for (const { id } of files) {
    if (held.has(id)) await inFiles("readwrite", (all) => all.put(held.get(id), id));
  }
}

/* A file; undefined if it is neither held nor kept. */
export async function fileOf(id) {
  return held.get(id) ?? inFiles("readonly", (all) => all.get(id)).catch(() => undefined);
}

async function urlOf(id) {
  const blob = await fileOf(id);
  if (!blob) return undefined;
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/* Remove the files that no conversation has. A conversation is kept before its files: those of other tabs stay. */
export async function removeUnusedFiles() {
  const ids = await inFiles("readonly", (all) => all.getAllKeys()).catch(() => []);
  const used = new Set(conversations().flatMap(({ messages }) => messages.flatMap(({ files = [] }) => files.map(({ id }) => id))));
  const unused = ids.filter((id) => !used.has(id));
  if (unused.length) await inFiles("readwrite", (all) => unused.forEach((id) => all.delete(id))).catch(() => null);
}

/* Settings by the name of the API's field, besides `system`, `thinking` and `theme`. What is missing is the server's default. */
export function settings() {
  return parsed(localStorage.getItem(SETTINGS)) ?? {};
}

export function saveSettings(changed) {
  localStorage.setItem(SETTINGS, JSON.stringify({ ...settings(), ...changed }));
}

/* Let the browser save a conversation as a file of JSON, with its files as data: URIs. */
export async function download(name, conversation) {
  const messages = await Promise.all(conversation.messages.map(async (message) => (
    message.files ? { ...message, files: await Promise.all(message.files.map(async (file) => ({ ...file, url: await urlOf(file.id) }))) } : message
  )));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ ...conversation, messages }, null, 2)], { type: "application/json" }));
  link.download = `${name.replace(/[^\p{L}\p{N} _-]+/gu, "").trim() || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
