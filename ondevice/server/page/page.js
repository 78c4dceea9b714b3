/* The page: the list of conversations, the open one, its messages, and the settings. */

import { chunks, properties, waitingRequests } from "./api.js";
import { addFile, Attachments, keptSound, MOST_BYTES } from "./attachments.js";
import { add } from "./rendering.js";
import { Reply } from "./reply.js";
import { record } from "./sounds.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const THEMES = { "": "as the system", dark: "dark", light: "light" };
const QUEUE_MS = 1000; // between questions whether a request waits
const LONGEST_S = Math.floor((MOST_BYTES - 100) / 32000); // of a recording
const SPOKEN = 600; // characters of a reply that a screen reader is given when it is complete
const narrow = matchMedia("(max-width: 50rem)");

let open = store.newConversation();
let running = null; // { abort: AbortController, done: Promise } of the reply that is being written
let contextLength = 0;
let atEnd = true; // whether the newest text is in view
let reads = {}; // { vision, audio }: whether the model reads pictures and sounds
let recording = null; // what ends the recording that goes on
let editor = null; // the attachments of the message that is being edited
const composer = new Attachments($("attached"), $("message"), say);

/* The open conversation. */

function button(parent, name, label, act) {
  const made = add(parent, "button", name, label);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

function say(text) {
  $("announcer").textContent = text;
  if (!running) $("status").textContent = text;
}

function follow() {
  if (atEnd) $("conversation").scrollTop = $("conversation").scrollHeight;
}

function showMessages() {
  editor = null;
  $("turns").replaceChildren();
  open.messages.forEach((message, index) => {
    if (message.role === "user") showQuestion(message, index);
    else showButtons(Reply.of($("turns"), message));
  });
  showContext(open.messages.at(-1)?.used ?? 0);
  atEnd = true;
  follow();
}

function showQuestion(message, index) {
  const turn = add($("turns"), "article", "turn user");
  turn.setAttribute("aria-label", "Your message");
  if (message.files) {
    const row = add(turn, "div", "files");
    for (const file of message.files) addFile(row, file);
  }
  if (message.content) add(turn, "div", "text", message.content);
  const buttons = add(turn, "div", "buttons");
  button(buttons, "edit", "Edit", () => edit(turn, message, index)).setAttribute("aria-label", "Edit the message");
}

function edit(turn, message, index) {
  if (running) return;
  const form = document.createElement("form");
  form.className = "editor";
  const list = add(form, "ul", "attached");
  list.setAttribute("aria-label", "Attached");
  const field = add(form, "textarea", "");
  const attached = new Attachments(list, field, say, message.files);
  editor = attached;
  field.value = message.content;
  field.setAttribute("aria-label", "Message");
  const row = add(form, "div", "row");
  add(row, "span", "hint", "Replaces this message and all after it");
  button(row, "", "Cancel", showMessages);
  add(row, "button", "primary", "Send").type = "submit";
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (text || attached.files.length) answerTo(text, attached.take(), index);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showMessages();
    else submitOnEnter(event, form);
  });
  turn.replaceChildren(form);
  turn.classList.add("editing");
  field.focus();
}

/* Only the last reply can be written again: the messages after another one answer that one. */
function showButtons(reply) {
  for (const old of document.querySelectorAll(".again")) old.remove();
  button(reply.buttons, "again", "Regenerate", () => {
    const { content, files } = open.messages.at(-2);
    if (!running) answerTo(content, files, open.messages.length - 2);
  });
}

function showContext(used) {
  const number = (value) => value.toLocaleString("en");
  $("context").textContent = used && contextLength ? `${number(used)} of ${number(contextLength)}` : "";
  if ($("context").textContent) add($("context"), "span", "unit", " tokens");
}

/* Put a message at `index`, in place of all from there on, and let the model answer it. */
function answerTo(text, files = [], index = open.messages.length) {
  if (running) return;
  open.messages.length = index;
  open.messages.push({ role: "user", content: text, ...(files.length && { files }) });
  showMessages();
  const abort = new AbortController();
  running = { abort, done: null };
  running.done = answer(open, abort.signal);
}

async function answer(conversation, signal) {
  busy(true);
  const said = [...conversation.messages];
  const reply = new Reply($("turns"), follow, $("live"));
  conversation.messages.push(reply.message);
  keep(conversation);
  const kept = store.keepFiles(said.at(-1).files ?? []).then(() => true, () => false);
  atEnd = true;
  follow();
  const queue = setInterval(showQueue, QUEUE_MS);
  let timings = null;
  let reason = null;
  let read = 0; // tokens of the prompt
  try {
    const asked = await store.forTheModel(said, store.settings().system);
    for await (const chunk of chunks(request(asked), signal)) {
      const progress = chunk.prompt_progress;
      if (progress) {
        clearInterval(queue);
        read = progress.total;
        const share = Math.round((100 * progress.processed) / progress.total);
        $("status").textContent = progress.processed < read ? `Reading the conversation: ${share} %` : "";
      }
      if (chunk.round) {
        clearInterval(queue);
        $("status").textContent = "";
        showContext(read + reply.sums.tokens);
      }
      reply.take(chunk);
      timings = chunk.timings ?? timings;
      reason = chunk.choices[0].finish_reason ?? reason;
    }
  } catch (error) {
    if (signal.aborted) reason = "stopped";
    else reply.fail(error.message);
  }
  clearInterval(queue);
  if (timings) reply.message.used = timings.cache_n + timings.prompt_n + timings.predicted_n;
  else if (read) reply.message.used = read + reply.sums.tokens;
  reply.end(reason);
  showButtons(reply);
  showContext(reply.message.used ?? 0);
  follow();
  running = null;
  busy(false);
  keep(conversation);
  if (!(await kept)) $("status").textContent = "This browser has no room for the files: they are gone when this page is closed.";
  const { content, failure } = reply.message;
  $("announcer").textContent = failure ?? `Reply complete: ${content.slice(0, SPOKEN)}`;
}

function request(messages) {
  const { system, thinking, theme, ...fields } = store.settings();
  if (!$("thinking-option").hidden) fields.chat_template_kwargs = { enable_thinking: $("thinking").checked };
  return { messages, stream: true, return_progress: true, return_rounds: true, ...fields };
}

async function showQueue() {
  const waiting = await waitingRequests().catch(() => 0);
  if (running && waiting && !$("status").textContent.startsWith("Reading")) {
    $("status").textContent = `Waiting for a free place: ${waiting} in the queue`;
  }
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("turns").classList.toggle("busy", is);
  if (is) {
    $("announcer").textContent = "The model is writing.";
  } else {
    $("status").textContent = "";
    if (!narrow.matches) $("message").focus({ preventScroll: true });
  }
}

/* The list of conversations. */

function keep(conversation) {
  conversation.changed = Date.now();
  try {
    store.save(conversation);
  } catch {
    $("status").textContent = "This browser has no room for more: export or delete conversations.";
  }
  showList();
}

function showList() {
  $("list").replaceChildren();
  for (const each of store.conversations()) {
    const item = add($("list"), "li", "");
    const name = button(item, "name", store.titleOf(each), () => show(each));
    if (each.id !== open.id) continue;
    item.className = "open";
    name.setAttribute("aria-current", "true");
    const buttons = add(item, "div", "buttons");
    button(buttons, "", "Rename", () => rename(item, each));
    button(buttons, "", "Export", () => store.download(store.titleOf(each), each));
    button(buttons, "", "Delete", async () => {
      if (!confirm(`Delete “${store.titleOf(each)}”?`)) return;
      await show(store.newConversation());
      store.remove(each);
      showList();
    });
  }
}

function rename(item, conversation) {
  const field = document.createElement("input");
  field.value = store.titleOf(conversation);
  field.setAttribute("aria-label", "Name of the conversation");
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showList();
    if (event.key !== "Enter") return;
    open.title = field.value.trim();
    keep(open);
  });
  item.replaceChildren(field);
  field.select();
}

/* Open a conversation. A reply that is being written is stopped and kept. */
async function show(conversation) {
  running?.abort.abort();
  await running?.done;
  open = store.conversations().find(({ id }) => id === conversation.id) ?? conversation;
  showMessages();
  showList();
  if (narrow.matches) showSide(false);
  $("message").focus();
}

function showSide(is) {
  document.body.classList.toggle("side", is);
  $("menu").setAttribute("aria-expanded", is);
}

/* Settings. */

function showTheme() {
  const theme = store.settings().theme ?? "";
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
  $("theme").title = `Colours: ${THEMES[theme]}`;
}

function fillSettings() {
  const kept = store.settings();
  for (const field of $("settings-form").querySelectorAll("[name]")) field.value = kept[field.name] ?? "";
}

$("settings-form").addEventListener("change", ({ target }) => {
  if (!target.checkValidity()) return;
  const value = target.type === "number" && target.value ? Number(target.value) : target.value;
  store.saveSettings({ [target.name]: value === "" ? undefined : value });
});

$("settings").addEventListener("click", () => {
  fillSettings();
  $("settings-dialog").showModal();
});

$("defaults").addEventListener("click", () => {
  const names = [...$("settings-form").querySelectorAll("[name]")].map(({ name }) => [name, undefined]);
  store.saveSettings(Object.fromEntries(names));
  fillSettings();
});

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  store.saveSettings({ theme: names[(names.indexOf(store.settings().theme ?? "") + 1) % names.length] });
  showTheme();
});

$("thinking").addEventListener("change", ({ target }) => store.saveSettings({ thinking: target.checked }));

/* Writing a message, and keys. */

function submitOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!(text || composer.files.length) || running) return;
  $("message").value = "";
  answerTo(text, composer.take());
});

/* Pictures and sounds: chosen, pasted, dropped anywhere on the page, or recorded. */

const readsFiles = () => reads.vision || reads.audio;

function attach(files) {
  if (readsFiles()) (editor ?? composer).attach(files, reads);
  else say("This model reads text only.");
}

async function startRecording() {
  $("record").disabled = true; // the browser may ask the user first
  const recorder = await record().catch(() => null);
  $("record").disabled = false;
  if (!recorder) return say("This browser gives no microphone to this page.");
  const timer = setInterval(() => {
    const seconds = Math.floor(recorder.seconds());
    $("status").textContent = `Recording: ${seconds} s`;
    if (seconds >= LONGEST_S) recording?.();
  }, 500);
  recording = async () => {
    recording = null;
    clearInterval(timer);
    $("record").setAttribute("aria-pressed", false);
    await (editor ?? composer).attachOne(async () => keptSound(await recorder.end(), "recording.wav"));
  };
  $("record").setAttribute("aria-pressed", true);
  say("Recording. The same button ends it.");
}

$("record").addEventListener("click", () => (recording ? recording() : startRecording()));

$("attach").addEventListener("click", () => $("files").click());

$("files").addEventListener("change", ({ target }) => {
  attach([...target.files]);
  target.value = ""; // the same file can be chosen again
});

document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length || event.clipboardData.types.includes("text/plain")) return;
  event.preventDefault();
  attach(files);
});

for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // the browser would open the file in place of the page
    document.body.classList.toggle("dropping", readsFiles() && (name === "dragenter" || name === "dragover"));
    if (name === "drop") attach([...event.dataTransfer.files]);
  });
}

$("message").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !$("message").value) {
    event.preventDefault();
    [...document.querySelectorAll(".edit")].at(-1)?.click();
  }
  submitOnEnter(event, $("form"));
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    running?.abort.abort();
    if (narrow.matches) showSide(false);
  }
  if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    show(store.newConversation());
  }
});

$("conversation").addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = $("conversation");
  atEnd = scrollHeight - scrollTop - clientHeight < 40;
}, { passive: true });

$("stop").addEventListener("click", () => running?.abort.abort());
$("new").addEventListener("click", () => show(store.newConversation()));
$("menu").addEventListener("click", () => showSide(!document.body.classList.contains("side")));
$("shade").addEventListener("click", () => showSide(false));
narrow.addEventListener("change", () => showSide(!narrow.matches));
addEventListener("storage", showList); // another tab has changed something

async function start() {
  showTheme();
  showSide(!narrow.matches);
  showList();
  const props = await properties((text) => ($("status").textContent = text));
  const { n_ctx: length, params } = props.default_generation_settings;
  contextLength = length;
  reads = props.modalities;
  $("attach").hidden = !readsFiles();
  $("files").accept = [reads.vision && "image/*", reads.audio && "audio/*"].filter(Boolean).join();
  $("record").hidden = !(reads.audio && navigator.mediaDevices);
  $("thinking-option").hidden = !props.chat_template.includes("enable_thinking");
  $("thinking").checked = store.settings().thinking ?? false;
  for (const [name, value] of Object.entries(params)) {
    const field = $("settings-form").elements[name];
    if (field) field.placeholder = value === null ? "off" : Number(value.toFixed(4));
  }
  for (const name of props.drafters) add($("settings-form").elements.drafter, "option", "", name).value = name;
  store.removeUnusedFiles();
  $("status").textContent = "";
  showContext(open.messages.at(-1)?.used ?? 0);
  $("model").textContent = document.title = props.model_alias;
}

start();
