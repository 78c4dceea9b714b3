import { Figures } from "./figures.js";
import { add, addButton, addCopyButton, GrowingMarkdown } from "./rendering.js";

const $ = (id) => document.getElementById(id);
const messages = []; // messages of the conversation, in the form of the API
let running = null; // AbortController of the running request; null if none is running
let key = sessionStorage.getItem("key") ?? "";

const headers = () => ({ "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) });

/* Send a request. If the server answers 401, ask the user for an API key and send it again. */
async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers() });
  if (answer.status !== 401) return answer;
  await askForKey();
  return ask(path, options);
}

function askForKey() {
  const dialog = $("key-dialog");
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      key = $("key").value;
      sessionStorage.setItem("key", key);
      resolve();
    }, { once: true });
  });
}

/* Wait until the server is ready, showing its progress; then show the name of the model. */
async function introduce() {
  for (;;) {
    const answer = await fetch("health").catch(() => null);
    if (answer?.ok) break;
    const error = answer && (await answer.json()).error;
    const share = error?.progress ? `: ${Math.round(100 * error.progress)} %` : "";
    $("status").textContent = error ? `${error.message}${share}` : "The server does not answer.";
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
  const props = await (await ask("props")).json();
  $("model").textContent = document.title = props.model_alias;
  $("thinking-option").hidden = !props.chat_template.includes("enable_thinking");
  $("status").textContent = "";
}

/* Yield the JSON objects of a stream of server-sent events. */
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

/* The elements of a reply: thoughts, text, tool calls, and a line of figures. */
class Reply {
  constructor() {
    this.thoughts = "";
    this.turn = add($("conversation"), "article", "turn reply");
    this.details = add(this.turn, "details", "thoughts");
    this.details.hidden = true;
    this.summary = add(this.details, "summary", "", "Thinking…");
    this.thoughtText = add(this.details, "div", "text");
    this.atEnd = true; // whether the newest text was in view before the text that is not rendered yet
    this.markdown = new GrowingMarkdown(add(this.turn, "div", "body"), () => scroll(this.atEnd));
    this.figures = new Figures(this.turn);
    this.began = performance.now();
  }

  take(delta) {
    if (delta.reasoning_content) {
      this.thoughts += delta.reasoning_content;
      this.details.hidden = false;
      this.thoughtText.textContent = this.thoughts;
    }
    for (const call of delta.tool_calls ?? []) {
      this.figures.bars.before(add(this.turn, "pre", "call", `${call.function.name}(${call.function.arguments})`));
    }
    if (delta.content) {
      this.endThoughts();
      if (!this.markdown.frame) this.atEnd = isAtEnd();
      this.markdown.append(delta.content);
    }
  }

  get text() {
    return this.markdown.text;
  }

  endThoughts() {
    if (this.summary.textContent !== "Thinking…") return;
    this.summary.textContent = `Thoughts, ${((performance.now() - this.began) / 1000).toFixed(1)} s`;
  }

  end(timings, reason) {
    this.markdown.end();
    this.endThoughts();
    this.figures.show(timings, { length: "cut where the context or the limit of tokens ends", stopped: "stopped" }[reason]);
    if (this.text && navigator.clipboard) addCopyButton(this.turn, "Copy the reply", () => this.text);
  }

  fail(message) {
    add(this.turn, "div", "failure", message);
  }
}

/* Remove a question, its reply and all that follows from the conversation. */
function takeBack(question, place) {
  messages.length = place;
  while (question.nextSibling) question.nextSibling.remove();
  question.remove();
}

async function send(text) {
  const place = messages.length;
  messages.push({ role: "user", content: text });
  const question = add($("conversation"), "article", "turn user");
  add(question, "div", "text", text);
  addButton(question, "Edit", "Edit this message", () => {
    if (running) return;
    takeBack(question, place);
    $("message").value = text;
    $("message").focus();
  });
  const reply = new Reply();
  scroll(true);
  running = new AbortController();
  busy(true);
  let timings = null;
  let reason = null;
  try {
    const thinking = $("thinking-option").hidden ? {} : { chat_template_kwargs: { enable_thinking: $("thinking").checked } };
    const body = JSON.stringify({
      messages: [...instructions(), ...messages], stream: true, return_progress: true, timings_per_token: true, ...sampling(), ...thinking,
    });
    const answer = await ask("v1/chat/completions", { method: "POST", body, signal: running.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const chunk of events(answer.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const progress = chunk.prompt_progress;
      $("status").textContent = progress && progress.processed < progress.total
        ? `Reading: ${Math.round((100 * progress.processed) / progress.total)} %` : "";
      const atEnd = isAtEnd();
      reply.take(chunk.choices[0].delta);
      scroll(atEnd);
      timings = chunk.timings ?? timings;
      if (chunk.round) reply.figures.take(chunk.round, timings);
      reason = chunk.choices[0].finish_reason ?? reason;
    }
  } catch (error) {
    if (running.signal.aborted) reason = "stopped";
    else reply.fail(error.message);
  }
  const atEnd = isAtEnd();
  reply.end(timings, reason);
  addButton(reply.turn, "Try again", "Ask again for this reply", () => {
    if (running) return;
    takeBack(question, place);
    send(text);
  });
  scroll(atEnd);
  if (reply.text) messages.push({ role: "assistant", content: reply.text });
  else messages.pop(); // a message without a reply is not part of the conversation
  running = null;
  busy(false);
}

/* The settings that the user made, as parts of a request. Empty fields leave the model's own values. */
function instructions() {
  const system = $("system").value.trim();
  return system ? [{ role: "system", content: system }] : [];
}

function sampling() {
  const names = ["temperature", "top_p", "top_k", "seed", "max_tokens"];
  return Object.fromEntries(names.filter((name) => $(name).value !== "").map((name) => [name, Number($(name).value)]));
}

/* Settings stay in this browser. */
for (const field of document.querySelectorAll("#settings :is(input, textarea)")) {
  field.value = localStorage.getItem(`setting ${field.id}`) ?? "";
  field.addEventListener("input", () => localStorage.setItem(`setting ${field.id}`, field.value));
}

function setScheme(scheme) {
  document.documentElement.style.colorScheme = scheme ?? "";
  if (scheme) localStorage.setItem("scheme", scheme);
}

setScheme(localStorage.getItem("scheme"));

$("scheme").addEventListener("click", () => {
  const dark = document.documentElement.style.colorScheme
    ? document.documentElement.style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setScheme(dark ? "light" : "dark");
});

$("settings-button").addEventListener("click", () => $("settings").showModal());

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("clear").disabled = is;
  if (!is) {
    $("status").textContent = "";
    $("message").focus();
  }
}

function isAtEnd() {
  const { scrollHeight, scrollTop, clientHeight } = $("conversation");
  return scrollHeight - scrollTop - clientHeight < 40;
}

function scroll(wanted) {
  if (wanted) $("conversation").scrollTop = $("conversation").scrollHeight;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || running) return;
  $("message").value = "";
  send(text);
});

$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

$("stop").addEventListener("click", () => running?.abort());

$("clear").addEventListener("click", () => {
  messages.length = 0;
  $("conversation").replaceChildren();
  $("message").focus();
});

introduce();
