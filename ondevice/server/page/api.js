/* Requests to the server: the API key, streams of server-sent events, waiting until the model is loaded. */

let key = sessionStorage.getItem("key") ?? "";

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/* Send a request. If the server answers 401, ask the user for an API key and send it again. */
export async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status !== 401) return answer;
  await askForKey();
  return ask(path, options);
}

function askForKey() {
  const dialog = document.getElementById("key-dialog");
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      key = document.getElementById("key").value;
      sessionStorage.setItem("key", key);
      resolve();
    }, { once: true });
  });
}

/* The server's properties, as soon as the model is loaded. Until then `report` is called with a sentence each second. */
export async function properties(report) {
  for (;;) {
    const answer = await fetch("health").catch(() => null);
    if (answer?.ok) break;
    const error = answer && (await answer.json()).error;
    const share = error?.progress ? `: ${Math.round(100 * error.progress)} %` : "";
    report(error ? `${error.message}${share}` : "The server does not answer.");
    await pause(1000);
  }
  return (await ask("props")).json();
}

/* Requests that wait for a slot of the server. */
export async function waitingRequests() {
  const text = await (await ask("metrics")).text();
  return Number(text.match(/^ondevice:requests_deferred (\d+)/m)?.[1] ?? 0);
}

/* Ask for a reply and yield the JSON objects of its stream. */
export async function* chunks(body, signal) {
  const answer = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  for await (const chunk of events(answer.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
    }
  }
}
