/* Replies: asked of the server as background responses, kept piece by piece, joined again, stopped.

A reply is the server's until it has ended and this browser has it: its message has the id of the response and the number of
the last event that is in it, and any tab can join the events behind that one. */

import { ask, events, isGone, pause, tell } from "./api.js";
import { addEvent, addMessage, end, inputOf, messagesUpTo, newId } from "./conversation.js";
import * as store from "./store.js";

const SAVE_MS = 400; // between two times that a growing reply is kept
const POLL_MS = 2000; // between questions about a reply that is not in view
const LOADING_MS = 1000; // between questions whether a model is being loaded
const RECONNECT_MS = 300;
const SETTLE_MS = 1000; // in which this tab sees what another one has kept: a lock may come before it
const LOST = "The server no longer has this reply: it was started again, or an hour has passed. So the reply ends here.";
const NOT_SENT = "The tab was closed before the server had this message.";
const RUNNING = ["queued", "in_progress"];

const runs = new Map(); // replies that this tab follows, by the id of their message
let views = { begun: () => null, grown: () => null, waits: () => null, ended: () => null };
let fieldsOf = () => ({});
let shown = ""; // id of the conversation in view

/* One reply that this tab follows. */
class Run {
  constructor(conversationId, message) {
    this.conversationId = conversationId;
    this.message = message; // this tab's: ahead of the kept one
    this.connection = new AbortController();
    this.isStopped = false;
    this.hasEnded = false; // the server has all of it
    this.savedAt = 0;
    this.wait = { text: "" }; // what it waits for before its first piece, and the share of it that is done
    this.wake = () => null;
  }

  /* A browser opens six connections to a server, in all tabs together: only what is in view takes one. */
  get isInView() {
    return this.conversationId === shown && !document.hidden;
  }

  get path() {
    return `v1/responses/${this.message.response}`;
  }

  /* Leave what `write` waits for. */
  interrupt() {
    this.wake();
    this.connection.abort();
  }

  waits(text, share) {
    this.wait = { text, share };
    views.waits(this.message, this.wait);
  }
}

/* Let functions be called with a message when it begins, grows, waits (and for what), and has ended; and let
`fields(message)` return further fields of a request. */
export function setUp(listeners, fields) {
  views = listeners;
  fieldsOf = fields;
}

/* The newest state of a reply, also between two times that it is kept. */
export function newest(message) {
  return runs.get(message.id)?.message ?? message;
}

export function waitOf({ id }) {
  return runs.get(id)?.wait ?? { text: "" };
}

/* Ask for a reply to the message of the id `parent`. Ends when it is in the conversation. */
export function begin(conversationId, parent, model) {
  const id = newId();
  return alone(id, () => {
    const fields = { id, role: "assistant", content: "", state: "writing", attempt: 1, model };
    return follow(conversationId, store.change(conversationId, (conversation) => addMessage(conversation, parent, fields)));
  });
}

/* Ask for the rest of a reply that was cut; for all of it where it has no text yet. */
export function goOn(conversationId, { id }) {
  return alone(id, () => {
    const asked = store.change(conversationId, ({ messages }) => {
      const kept = messages.find((each) => each.id === id);
      Object.assign(kept, { state: "writing", attempt: (kept.attempt ?? 0) + 1, sums: { ...kept.sums, isNew: true } });
      for (const name of ["response", "at", "end", "failure"]) delete kept[name];
      if (!kept.content) for (const name of ["reasoning", "thought", "calls", "rounds", "sums"]) delete kept[name];
      return kept;
    });
    return follow(conversationId, asked);
  });
}

/* Follow all replies that are being written; those that no tab has sent yet are sent by the first that is free to. */
export function join() {
  for (const { id, messages } of store.conversations()) {
    for (const message of messages) {
      if (!message.state || runs.has(message.id)) continue;
      if (message.response) follow(id, message);
      else alone(message.id, () => takeOver(id, message));
    }
  }
}

/* Call `act` while no other tab does so for this reply; ends when it was called. Pages from elsewhere than this machine have no
locks without HTTPS, and a browser that is to keep nothing refuses them. */
function alone(id, act) {
  return new Promise((resolve) => {
    let done = null;
    const call = () => {
      done = act();
      resolve();
      return done;
    };
    if (navigator.locks) navigator.locks.request(`ondevice.reply.${id}`, call).catch(() => done ?? call());
    else call();
  });
}

function follow(conversationId, message) {
  const run = new Run(conversationId, structuredClone(message));
  runs.set(message.id, run);
  views.begun(run.message);
  return write(run);
}

/* The tab that sent a question has gone, or its reply has ended. */
async function takeOver(conversationId, { id }) {
  const find = ({ messages }) => messages.find((each) => each.id === id);
  const look = () => find(store.conversation(conversationId) ?? { messages: [] });
  const isUnsent = (message) => message?.state && !message.response;
  if (isUnsent(look())) await pause(SETTLE_MS);
  const kept = look();
  if (!kept || runs.has(id)) return;
  if (isUnsent(kept) && navigator.locks) await follow(conversationId, kept);
  else if (isUnsent(kept)) store.change(conversationId, (changed) => end(find(changed), { failure: NOT_SENT }));
  const now = look();
  if (now && !now.state) views.ended(now);
}

/* Follow a reply to its end. */
async function write(run) {
  while (run.message.state) {
    run.connection = new AbortController();
    const options = { signal: run.connection.signal };
    try {
      if (!run.message.response) await send(run, options);
      else if (run.isInView || run.hasEnded) await listen(run, joined(run), options);
      else await rest(run, options);
    } catch (error) {
      if (run.isStopped) end(run.message, { end: "stopped" });
      else if (error.status === 404 && run.message.response) lose(run);
      else if (!options.signal.aborted) end(run.message, { failure: error.message });
    }
    if (run.message.state) save(run);
    if (run.message.state && run.isInView) await pause(RECONNECT_MS);
  }
  finish(run);
}

async function send(run, options) {
  const loading = new AbortController();
  showLoading(run, loading.signal).catch(() => null);
  try {
    const conversation = store.conversation(run.conversationId);
    const messages = messagesUpTo(conversation, run.message.parent);
    if (run.message.content) messages.push(run.message); // to be continued
    const fields = { background: true, stream: true, return_progress: true, return_rounds: true, ...fieldsOf(run.message) };
    const body = JSON.stringify({ input: await inputOf(messages, store.partOf), ...fields });
    await listen(run, "v1/responses", { ...options, method: "POST", body });
  } finally {
    loading.abort();
  }
}

function joined({ path, message }) {
  return `${path}?stream=true${message.at === undefined ? "" : `&starting_after=${message.at}`}`;
}

async function listen(run, path, options) {
  for await (const event of events(path, options)) take(run, event);
}

/* Ask now and then whether a reply that is not in view has ended. */
async function rest(run, options) {
  const { status } = await (await ask(run.path, options)).json();
  run.hasEnded = !RUNNING.includes(status);
  if (!run.hasEnded) await Promise.race([pause(POLL_MS), new Promise((resolve) => (run.wake = resolve))]);
}

/* One question at a time: those of a minute without a server would all be asked when it is back. */
async function showLoading(run, signal) {
  for (;;) {
    await pause(LOADING_MS);
    if (signal.aborted || run.message.response) return;
    const { data } = await (await ask("v1/models", { signal })).json();
    const { status } = data.find(({ id }) => id === run.message.model) ?? data[0];
    if (status.value === "loading" && !run.message.response) run.waits("The model is being loaded", status.progress);
  }
}

/* Add an event to the message, and show it. */
function take(run, event) {
  const { message } = run;
  addEvent(message, event);
  switch (event.type) {
    case "response.created":
      save(run);
      if (run.isStopped) cancel(run);
      else if (!run.isInView) run.connection.abort();
      break;
    case "response.queued":
      run.waits(`Waiting for a free slot: ${event.queue_place > 1 ? `${event.queue_place - 1} before this` : "next in the queue"}`);
      break;
    case "response.prompt_progress":
      run.waits("Reading the conversation", event.prompt_progress.processed / event.prompt_progress.total);
      break;
    case "response.round":
      views.grown(message);
      break;
    default:
  }
  if (performance.now() - run.savedAt > SAVE_MS) save(run);
}

/* The server no longer has a reply: another tab has read and deleted it, or the server was started again. */
function lose(run) {
  const kept = keptOf(run);
  if (kept && !kept.state) run.message = structuredClone(kept);
  else end(run.message, { failure: LOST });
}

function finish(run) {
  const { id, response } = run.message;
  runs.delete(id);
  save(run);
  if (response && !store.isFull()) tell(run.path, "DELETE");
  views.ended(run.message);
}

function keptOf({ conversationId, message }) {
  return store.conversation(conversationId)?.messages.find(({ id }) => id === message.id);
}

/* Whether `message` has all that `other` has. */
function isAhead(message, other) {
  const [mine, its] = [message, other].map(({ attempt = 0, at = -1, state }) => [attempt, state ? at : Infinity]);
  return mine[0] > its[0] || (mine[0] === its[0] && mine[1] >= its[1]);
}

function save(run) {
  run.savedAt = performance.now();
  if (!keptOf(run)) return; // its conversation was deleted
  store.change(run.conversationId, (conversation) => {
    const at = conversation.messages.findIndex(({ id }) => id === run.message.id);
    if (isAhead(run.message, conversation.messages[at])) conversation.messages[at] = structuredClone(run.message);
    if (!run.message.state) conversation.changed = Date.now();
  });
}

/* Stop a reply, here and at the server. */
export function stop(id) {
  const run = runs.get(id);
  if (!run) return;
  if (run.message.response) cancel(run);
  else if (run.isStopped || run.wait.share !== undefined || isGone()) run.interrupt(); // the server has nothing to cancel
  run.isStopped = true;
}

function cancel(run) {
  tell(`${run.path}/cancel`, "POST").then((answer) => answer?.ok || run.interrupt());
}

/* Stop the replies of a conversation that is to be deleted. */
export function forget(conversationId) {
  for (const run of runs.values()) {
    if (run.conversationId !== conversationId) continue;
    run.isStopped = true;
    run.interrupt();
  }
}

/* Another conversation is in view, or the page is hidden or shown again. */
export function lookAt(conversationId) {
  shown = conversationId;
  for (const run of runs.values()) {
    if (run.isInView) run.wake();
    else if (run.message.response) run.interrupt();
  }
}

document.addEventListener("visibilitychange", () => lookAt(shown));
addEventListener("pagehide", () => runs.forEach(save));

/* Another tab has changed conversations: it may have begun a reply, or have ended one that this tab follows. */
export function synchronize() {
  for (const run of runs.values()) {
    const kept = keptOf(run);
    if (kept && (kept.state || !isAhead(kept, run.message))) continue;
    if (kept) run.message = structuredClone(kept);
    else run.isStopped = true;
    run.interrupt();
  }
  join();
}
