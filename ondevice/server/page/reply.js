/* The elements of one reply: thoughts, text, tool calls, figures, and a bar for each round of draft and verify. */

import { add, addCopyButton, GrowingMarkdown } from "./rendering.js";

const SVG = document.querySelector("svg").namespaceURI;
const SHOWN_ROUNDS = 160; // the newest ones; kept with the conversation too
const BAR_HEIGHT = 28; // pixels
const BAR_STEP = 5;
const LEAST_SCALE = 4; // drafted tokens that a full bar stands for at least

/* The bars of the newest rounds: drafted tokens faint, accepted ones solid, a dot for a round without a draft. */
class RoundBars {
  constructor(parent) {
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("class", "rounds");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("height", BAR_HEIGHT);
    this.paths = ["plain", "drafted", "accepted"].map((name) => {
      const path = this.svg.appendChild(document.createElementNS(SVG, "path"));
      path.setAttribute("class", name);
      return path;
    });
    this.title = this.svg.appendChild(document.createElementNS(SVG, "title"));
    parent.append(this.svg);
  }

  show(rounds, label) {
    const fitting = Math.floor((this.svg.clientWidth || 300) / BAR_STEP);
    const shown = rounds.slice(-Math.min(fitting, SHOWN_ROUNDS));
    const full = Math.max(LEAST_SCALE, ...shown.map(([drafted]) => drafted));
    const lines = ["", "", ""];
    shown.forEach(([drafted, accepted], index) => {
      const line = (count) => `M${BAR_STEP * index + 2} ${BAR_HEIGHT}v${-(count * BAR_HEIGHT) / full}`;
      if (drafted) lines[1] += line(drafted);
      else lines[0] += `M${BAR_STEP * index + 2} ${BAR_HEIGHT}v-2`;
      if (accepted) lines[2] += line(accepted);
    });
    this.paths.forEach((path, index) => path.setAttribute("d", lines[index]));
    this.title.textContent = label;
  }
}

/* Sums over the rounds of a reply. The first round is the prefill: its time is not that of decoding. */
class Sums {
  constructor() {
    Object.assign(this, { rounds: 0, tokens: 0, drafted: 0, accepted: 0, ms: 0 });
  }

  count(round) {
    this.tokens += round.tokens;
    if (this.rounds++) this.ms += round.time_ms;
    this.drafted += round.drafted;
    this.accepted += round.accepted;
  }

  get figures() {
    const found = [`${this.tokens} ${this.tokens === 1 ? "token" : "tokens"}`];
    if (this.ms) found.push(`${((1e3 * (this.tokens - 1)) / this.ms).toFixed(1)} tokens/s`);
    if (this.drafted) {
      found.push(`${((this.tokens - 1) / (this.rounds - 1)).toFixed(2)} tokens per round`);
      found.push(`${Math.round((100 * this.accepted) / this.drafted)} % of ${this.drafted} drafted tokens accepted`);
    }
    return found;
  }
}

const seconds = (value) => (value < 60 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`);

export class Reply {
  /* `afterwards` is called when elements have changed. While the reply grows, its figures are in `live`: below the growing
  text they would move with every line. */
  constructor(parent, afterwards, live = null) {
    this.afterwards = afterwards;
    this.sums = new Sums();
    this.message = { role: "assistant", content: "", rounds: [] };
    this.turn = add(parent, "article", "turn reply");
    this.turn.setAttribute("aria-label", "Reply");
    this.details = add(this.turn, "details", "thoughts");
    this.details.hidden = true;
    this.summary = add(this.details, "summary", "", "Thinking…");
    this.thoughtText = add(this.details, "div", "text");
    this.markdown = new GrowingMarkdown(add(this.turn, "div", "body"), afterwards);
    this.calls = add(this.turn, "div", "calls");
    this.foot = add(live ?? this.turn, "div", "foot");
    this.bars = new RoundBars(this.foot);
    this.line = add(this.foot, "div", "figures");
    this.buttons = add(this.foot, "div", "buttons");
    this.frame = 0;
  }

  /* A reply that was kept. */
  static of(parent, message) {
    const reply = new Reply(parent, () => null);
    if (message.reasoning) reply.takeThoughts(message.reasoning);
    for (const call of message.calls ?? []) reply.takeCall(call);
    reply.markdown.text = message.content;
    reply.message = message;
    reply.finish();
    return reply;
  }

  take(chunk) {
    const { delta } = chunk.choices[0];
    if (delta.reasoning_content) this.takeThoughts(delta.reasoning_content);
    for (const { function: { name, arguments: given } } of delta.tool_calls ?? []) {
      (this.message.calls ??= []).push({ name, arguments: given });
      this.takeCall({ name, arguments: given });
    }
    if (delta.content) {
      this.endThoughts();
      this.markdown.append(delta.content);
    }
    if (chunk.round) {
      this.sums.count(chunk.round);
      const { drafted, accepted } = chunk.round;
      if (this.sums.rounds > 1) this.message.rounds.push([drafted, accepted]);
      this.frame ||= requestAnimationFrame(() => this.showFigures());
    }
  }

  takeThoughts(text) {
    this.thoughtsFrom ??= performance.now();
    this.message.reasoning = (this.message.reasoning ?? "") + text;
    this.details.hidden = false;
    this.thoughtText.append(text);
  }

  endThoughts() {
    if (!this.message.reasoning || this.message.thought !== undefined) return;
    this.message.thought = (performance.now() - this.thoughtsFrom) / 1e3;
    this.summary.textContent = `Thought for ${seconds(this.message.thought)}`;
  }

  takeCall({ name, arguments: given }) {
    this.markdown.flush();
    const call = add(this.calls, "details", "call");
    add(add(call, "summary", "", "Calls "), "code", "", name);
    let shown = given;
    try {
      shown = JSON.stringify(JSON.parse(given), null, 2);
    } catch {
      // arguments that are not JSON are shown as they are
    }
    add(call, "pre", "", shown);
  }

  showFigures() {
    this.frame = 0;
    if (this.message.reasoning && this.message.thought === undefined) {
      this.summary.textContent = `Thinking… ${seconds((performance.now() - this.thoughtsFrom) / 1e3)}`;
    }
    this.show(this.sums.figures);
    this.afterwards();
  }

  show(figures) {
    const { rounds } = this.message;
    this.line.textContent = figures.join(" · ");
    this.bars.show(rounds, `Drafted and accepted tokens of the last ${Math.min(rounds.length, SHOWN_ROUNDS)} rounds`);
  }

  /* The stream is over; `reason` tells why. */
  end(reason) {
    this.endThoughts();
    const figures = this.sums.figures;
    if (reason === "length") figures.push("cut at the limit of tokens or context");
    if (reason === "stopped") figures.push("stopped");
    Object.assign(this.message, {
      content: this.markdown.text,
      figures: this.sums.tokens || reason === "stopped" ? figures : [],
      rounds: this.message.rounds.slice(-SHOWN_ROUNDS),
    });
    this.finish();
  }

  fail(message) {
    this.message.failure = message;
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.markdown.end();
    const { thought, failure, figures = [] } = this.message;
    this.summary.textContent = thought === undefined ? "Thoughts" : `Thought for ${seconds(thought)}`;
    if (failure) add(this.turn, "div", "failure", failure);
    this.turn.append(this.foot);
    this.show(figures);
    this.bars.svg.classList.toggle("none", !this.message.rounds.length);
    if (this.markdown.text && navigator.clipboard) addCopyButton(this.buttons, "Copy the reply", () => this.markdown.text);
  }
}
