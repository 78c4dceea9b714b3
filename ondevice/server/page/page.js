/* The page: joins its parts, and gives each conversation an address.

To read first: conversation.js (what a conversation is), then replies.js (how a reply comes from the server and survives a reload).
store.js keeps them in the browser, and tells each tab what another has changed. What one sees is turns.js (the open
conversation) with reply.js (one reply) and rendering.js (Markdown, math, code); sidebar.js (the list); composer.js (writing a
message) with sounds.js and recorder.js; and settings.js. api.js talks to the server. */

import { onTrouble } from "./api.js";
import * as composer from "./composer.js";
import { addMessage, newId, titleOf } from "./conversation.js";
import { add, addButton } from "./rendering.js";
import * as replies from "./replies.js";
import * as settings from "./settings.js";
import * as sidebar from "./sidebar.js";
import * as store from "./store.js";
import * as turns from "./turns.js";

const $ = (id) => document.getElementById(id);
const ADDRESS = /^#\/c\/([\w-]+)$/;
const SPOKEN = 600; // characters of a reply that a screen reader is given when it is complete

let openId = newId(); // of the conversation in view, which need not be kept yet
let isStarting = false; // whether a reply has been asked for that is not in the conversation yet
let isStopped = false; // whether it is to be stopped then
let trouble = ""; // why the server does not answer

function say(text) {
  $("announcer").textContent = text;
  showStatus(text);
}

function showStatus(text = "") {
  $("status").classList.toggle("trouble", Boolean(trouble));
  $("status").textContent = trouble || text;
}

/* Conversations. */

function addressed() {
  return location.hash.match(ADDRESS)?.[1] ?? "";
}

/* Go to a conversation; to a new one for "". */
function go(id) {
  if (addressed() === id) open(id);
  else location.hash = id ? `#/c/${id}` : "#/";
}

function open(id) {
  const known = store.conversation(id);
  openId = known ? id : newId();
  if (id && !known) say("This conversation is not in this browser.");
  replies.lookAt(openId);
  turns.open(openId);
  sidebar.show(openId);
  showBusy();
  if (sidebar.narrow.matches) sidebar.showSide(false);
  $("message").focus({ preventScroll: true });
}

/* Add a question behind the message of the id `parent`, and let the model answer it. Where another tab has deleted the conversation
meanwhile, the question begins a new one. */
function answer(text, files, parent) {
  turns.leaveEditor();
  const question = store.change(openId, (conversation) => {
    const behind = conversation.messages.some(({ id }) => id === parent) ? parent : "";
    return addMessage(conversation, behind, { role: "user", content: text, ...(files.length && { files: [...files] }) });
  });
  store.keepFiles(files).catch(() => say("This browser has no room for the files: they are gone when this page is closed."));
  reply(question.id);
}

function reply(parent) {
  if (addressed() !== openId) history.pushState(null, "", `#/c/${openId}`);
  start(replies.begin(openId, parent, settings.model.name));
}

const again = ({ parent }) => isStarting || reply(parent);
const goOn = (message) => isStarting || start(replies.goOn(openId, message));

async function start(beginning) {
  isStarting = true;
  say("The model is writing.");
  showStatus();
  showBusy();
  turns.toEnd();
  await beginning;
  isStarting = false;
  if (isStopped) stop();
  isStopped = false;
  showBusy();
}

function showBusy() {
  const is = isStarting || Boolean(turns.writing());
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("turns").classList.toggle("busy", is);
}

function ended({ failure, content }, isShown) {
  if (store.isFull()) showStatus(store.NO_ROOM);
  if (!isShown) return;
  showBusy();
  $("announcer").textContent = failure ?? `Reply complete: ${content.slice(0, SPOKEN)}`;
  if (!sidebar.narrow.matches && document.activeElement === document.body) $("message").focus({ preventScroll: true });
}

function showUsed(used) {
  const { contextLength } = settings.model;
  const number = (value) => value.toLocaleString("en");
  $("context").textContent = used && contextLength ? `${number(used)} of ${number(contextLength)}` : "";
  if ($("context").textContent) add($("context"), "span", "unit", " tokens");
}

function showTitle() {
  const conversation = store.conversation(openId);
  document.title = conversation ? `${titleOf(conversation)} - ${settings.model.name}` : settings.model.name || "ondevice";
}

function stop() {
  const message = turns.writing();
  isStopped = isStarting;
  if (message) replies.stop(message.id);
}

/* An empty conversation. */

function showModel() {
  const { name, reads, can } = settings.model;
  composer.showButtons();
  const kinds = ["text", reads.vision && "images", reads.audio && "sound"].filter(Boolean);
  const thinks = can.includes("thinking") ? ", and can think before it answers" : "";
  $("able").textContent = `${name} reads ${new Intl.ListFormat("en").format(kinds)}${thinks}.`;
  $("private").textContent = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname)
    ? "Nothing leaves this machine." : `Nothing goes to anybody but ${location.hostname}.`;
  $("examples").replaceChildren();
  for (const [text, asks] of examples(reads)) addButton($("examples"), "example", text, asks);
  turns.show();
  showTitle();
  showUsed(turns.used());
}

function examples({ vision, audio }) {
  const ask = (text) => [text, () => send(text, [])];
  const withFile = (text) => [text, () => {
    $("message").value = text;
    $("message").focus();
    $("files").click();
  }];
  return [
    ...(vision ? [withFile("What is in this picture?")] : []),
    ...(audio ? [withFile("Write down what is said in this recording.")] : []),
    ask("Explain in three sentences why the sky is blue."),
    ask("Write a Python function that finds the prime numbers below n."),
    ask("Give me a table of five rivers with their lengths."),
    ask("Derive the formula for the roots of a quadratic equation."),
  ].slice(0, 4);
}

function send(text, files) {
  if (isStarting || turns.writing()) return false;
  if (!settings.model.name) {
    say("The model is not ready yet.");
    return false;
  }
  answer(text, files, turns.last());
  return true;
}

/* Keys and events. */

document.addEventListener("keydown", (event) => {
  if (!event.key || composer.isComposing(event)) return; // a browser that fills in a field sends events without a key
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    stop();
    if (sidebar.narrow.matches) sidebar.showSide(false);
    $("message").focus({ preventScroll: true });
  }
  if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    go("");
  }
});

$("message").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowUp" || $("message").value) return;
  event.preventDefault();
  [...document.querySelectorAll(".edit")].at(-1)?.click();
});

$("stop").addEventListener("click", () => {
  stop();
  $("message").focus({ preventScroll: true });
});
$("new").addEventListener("click", () => go(""));
addEventListener("hashchange", () => open(addressed()));

$("models").addEventListener("change", async ({ target }) => {
  const { value } = target;
  say(`Loading ${value}`);
  store.saveSettings({ model: value }); // before it is loaded: a server that is started meanwhile is asked for it again
  try {
    if (!await settings.choose(value)) return;
    say(`${value} answers from now on.`);
  } catch (error) {
    if (target.value !== value) return; // another one was chosen meanwhile
    store.saveSettings({ model: settings.model.name });
    target.value = settings.model.name;
    say(error.message);
  }
  showModel();
});

async function loadModel() {
  await settings.load().catch((error) => say(error.message));
  showModel();
}

async function begin() {
  onTrouble((text) => {
    trouble = text;
    showStatus();
    if (!text && settings.model.name) loadModel(); // the server may have been started with another one
  });
  composer.setUp({ say, send, reads: () => settings.model.reads, editor: () => turns.editor });
  sidebar.setUp({ open: go, say });
  turns.setUp({ say, answer, again, goOn, used: showUsed, ended, fields: settings.requestFields });
  store.onChange((id, isElsewhere) => {
    if (isElsewhere) replies.synchronize();
    sidebar.show();
    if (id === undefined || id === openId) turns.show();
    showBusy();
    showTitle();
  });
  open(addressed());
  await loadModel();
  replies.join();
  store.removeUnusedFiles();
}

begin();
