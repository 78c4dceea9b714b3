/* What stays in this browser: conversations, one entry of localStorage each, settings, and files in IndexedDB, because
localStorage has room for 5 MB only.

All tabs share it. So a conversation is changed by a function of its newest state, and every tab is told of each change.

A browser may have no room, or may be told to keep nothing: then all of it lasts until the page is closed. */

import { newConversation, newId, readConversation } from "./conversation.js";

const PREFIX = "ondevice.conversation.";
const SETTINGS = "ondevice.settings";
const FILES = "files";
export const NO_ROOM = "This browser has no room for more: export or delete conversations.";

const local = storage("localStorage");
const unsaved = new Map(); // conversations for which the browser has no room, until the page is closed
let unsavedSettings = {}; // the same of settings
const read = new Map(); // the text of each conversation as it was read last, and what it is: a list of many is read often
const held = new Map(); // files by id, until the page is closed: also those for which the browser has no room
let database = null; // promise of the open one
let listener = () => null;

/* The browser's storage of a name. Where the user forbids it, reading `window.localStorage` throws. */
export function storage(name) {
  try {
    return window[name];
  } catch {
    const setItem = () => {
      throw new Error("This browser keeps nothing.");
    };
    return { getItem: () => null, setItem, removeItem: () => null };
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // written by something else
  }
}

/* Let `act` be called with the id of each conversation that changes, and with whether another tab has changed it. */
export function onChange(act) {
  listener = act;
}

addEventListener("storage", ({ key }) => {
  if (key === null || key.startsWith(PREFIX)) listener(key?.slice(PREFIX.length), true);
});
// a page to which the browser has gone back as it was left: meanwhile it was told of nothing
addEventListener("pageshow", ({ persisted }) => persisted && listener(undefined, true));

/* The newest state of a conversation; null if there is none of this id. */
export function conversation(id) {
  if (unsaved.has(id)) return unsaved.get(id);
  const text = local.getItem(PREFIX + id);
  if (read.get(id)?.text !== text) read.set(id, { text, value: readConversation(parsed(text)) });
  return read.get(id).value;
}

/* All conversations, the one that changed last first. */
export function conversations() {
  const names = Object.keys(local).filter((name) => name.startsWith(PREFIX)).map((name) => name.slice(PREFIX.length));
  const found = [...new Set([...names, ...unsaved.keys()])].map(conversation);
  return found.filter(Boolean).sort((a, b) => b.changed - a.changed);
}

/* Change a conversation, and return what `act` returns. Where the browser has no room, it is kept until the page is closed. */
export function change(id, act) {
  const changed = conversation(id) ?? { ...newConversation(), id };
  const result = act(changed);
  keep(changed);
  return result;
}

function keep(changed) {
  try {
    local.setItem(PREFIX + changed.id, JSON.stringify(changed));
    unsaved.delete(changed.id);
  } catch {
    unsaved.set(changed.id, changed);
  }
  listener(changed.id, false);
}

export const isFull = () => unsaved.size > 0;

export function remove(id) {
  unsaved.delete(id);
  local.removeItem(PREFIX + id);
  [...unsaved.values()].forEach(keep); // for which there may be room now
  listener(id, false);
  removeUnusedFiles();
}

/* Settings by the name of the API's field, besides `theme`. What is missing is the server's default. */
export function settings() {
  return { ...parsed(local.getItem(SETTINGS)), ...unsavedSettings };
}

export function saveSettings(changed) {
  const all = { ...settings(), ...changed };
  try {
    local.setItem(SETTINGS, JSON.stringify(all));
    unsavedSettings = {};
  } catch {
    unsavedSettings = all;
  }
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

/* A file as a part of the Responses API's input. Throws an error with a sentence for the user if it is gone. */
export async function partOf({ id, name, sound }) {
  const url = await urlOf(id);
  if (!url) throw new Error(`${name} is not kept in this browser: edit its message, and attach it again.`);
  if (!sound) return { type: "input_image", image_url: url };
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format: "wav" } };
}

/* Remove the files that no conversation has. A conversation is kept before its files: those of other tabs stay. */
export async function removeUnusedFiles() {
  const ids = await inFiles("readonly", (all) => all.getAllKeys()).catch(() => []);
  const used = new Set(conversations().flatMap(({ messages }) => messages.flatMap(({ files = [] }) => files.map(({ id }) => id))));
  const unused = ids.filter((id) => !used.has(id));
  if (unused.length) await inFiles("readwrite", (all) => unused.forEach((id) => all.delete(id))).catch(() => null);
}

/* Files of conversations. */

/* Let the browser save a conversation as a file of JSON, with its files as data: URIs. */
export async function exportAs(name, { id }) {
  const whole = conversation(id);
  const withUrl = async (file) => ({ ...file, url: await urlOf(file.id) });
  const messages = await Promise.all(whole.messages.map(async (message) => (
    message.files ? { ...message, files: await Promise.all(message.files.map(withUrl)) } : message
  )));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ ...whole, messages }, null, 2)], { type: "application/json" }));
  link.download = `${name.replace(/[^\p{L}\p{N} _-]+/gu, "").trim() || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/* Keep the conversation of an exported file, beside one that is there already, and return its id; null if it has none. */
export async function importFile(file) {
  const found = readConversation(parsed(await file.text()));
  if (!found?.messages.length) return null;
  for (const message of found.messages) {
    delete message.state; // a reply that was being written elsewhere
    if (message.files) message.files = await Promise.all(message.files.map(heldFile));
  }
  const made = { ...found, id: newId(), changed: Date.now() };
  keep(made);
  await keepFiles(made.messages.flatMap(({ files = [] }) => files)).catch(() => null);
  return made.id;
}

async function heldFile({ url, ...file }) {
  if (!url?.startsWith("data:")) return file;
  const [head, data] = url.slice(5).split(",");
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return { ...file, id: holdFile(new Blob([bytes], { type: head.split(";")[0] })) };
}
