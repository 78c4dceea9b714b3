/* Requests to the server: the API key, a server that is gone or still loads, streams of server-sent events. */

import { storage } from "./store.js";

const RETRY_MS = 1000; // between questions whether the server is back
const AGAIN_MS = 200; // before a request to a server that is back
const SILENCE_MS = 45_000; // the server sends something every 15 s: a connection that is silent for longer is dead
const PROXY = [502, 503, 504];
const GONE = "The server does not answer. This page joins it again by itself.";

const session = storage("sessionStorage");
let key = session.getItem("key") ?? "";
let returning = null; // promise of a server that is back
let report = () => null;

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/* The server has answered that it will not do this. The message is its sentence for the user. */
class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/* Let `listener` be called with a sentence while the server does not answer or loads, and with "" when it does answer. */
export function onTrouble(listener) {
  report = listener;
}

/* A header has ASCII only: of a key with other characters, which no server has, the browser would send nothing. */
const headers = () => ({
  "Content-Type": "application/json",
  ...(key && { Authorization: `Bearer ${key.replace(/[^ -~]/g, "?")}` }),
});

/* Send a request. Waits for a server that is gone, and for the user's API key where it is missing or wrong. Throws a
Refusal, or an AbortError. */
export async function ask(path, options = {}) {
  for (;;) {
    const sent = key;
    const answer = await fetch(path, { ...options, headers: headers() }).catch(() => null);
    options.signal?.throwIfAborted();
    if (answer?.ok) return answer;
    const error = await errorOf(answer);
    if (!error || error.stage) await orAborted(untilBack().then(() => pause(AGAIN_MS)), options.signal);
    else if (answer.status === 401) await orAborted(newKey(sent), options.signal);
    else throw new Refusal(answer.status, error.message);
  }
}

/* Send a request that waits for nothing, also while the page is closed. Returns a promise of the answer, null if there is none. */
export function tell(path, method) {
  return fetch(path, { method, headers: headers(), keepalive: true }).catch(() => null);
}

/* What the server says; null where it does not answer, and a proxy before it may say so in its own words. */
async function errorOf(answer) {
  if (!answer) return null;
  const { error } = await answer.json().catch(() => ({}));
  if (!error && PROXY.includes(answer.status)) return null;
  return error ?? { message: `The server answered with status ${answer.status}.` };
}

/* Wait until the model is loaded and the server answers. */
export function untilBack() {
  returning ??= (async () => {
    for (;;) {
      const answer = await fetch("health").catch(() => null);
      if (answer?.ok) break;
      const error = await errorOf(answer);
      const share = error?.progress ? `: ${Math.round(100 * error.progress)} %` : "";
      report(error ? `${error.message}${share}` : GONE);
      await pause(RETRY_MS);
    }
    report("");
    returning = null;
  })();
  return returning;
}

export const isGone = () => returning !== null;

function orAborted(promise, signal) {
  if (!signal) return promise;
  return Promise.race([promise, new Promise((_, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  })]);
}

/* Ask the user for a key, unless another request has got one since `sent` was. */
function newKey(sent) {
  const dialog = document.getElementById("key-dialog");
  if (!dialog.open && key !== sent) return null;
  if (!dialog.open) {
    document.getElementById("key-wrong").hidden = !sent;
    document.getElementById("key").value = "";
    dialog.showModal();
  }
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      key = document.getElementById("key").value;
      try {
        session.setItem("key", key);
      } catch {
        // it is asked for again after a reload
      }
      resolve();
    }, { once: true });
  });
}

/* The JSON objects of a stream of server-sent events. It may end early: a connection breaks, a laptop sleeps. Throws what
`ask` throws. */
export async function* events(path, options) {
  const answer = await ask(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const silence = setTimeout(() => reader.cancel().catch(() => null), SILENCE_MS);
    const { done, value } = await reader.read().catch(() => ({ done: true }));
    clearTimeout(silence);
    options.signal.throwIfAborted();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: {"));
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}
