/* The elements of one reply: thoughts, text, tool calls, figures, and a bar for each round of draft and verify. */

import { add, addCopyButton, GrowingMarkdown } from "./rendering.js";

const SVG = document.querySelector("svg").namespaceURI;
const BAR_HEIGHT = 28; // pixels
const BAR_STEP = 5;
const LEAST_SCALE = 4; // drafted tokens that a full bar stands for at least
const LEGEND = [["accepted", "accepted"], ["drafted", "rejected"], ["plain", "none in this round"]];
const ENDS = { length: "cut at the limit of tokens or context", stopped: "stopped" };

/* The bars of the newest rounds: drafted tokens faint, accepted ones solid, a dot for a round without a draft. */
class RoundBars {
  constructor(parent) {
    this.element = add(parent, "div", "draft-marks");
    this.svg = this.element.appendChild(document.createElementNS(SVG, "svg"));
    this.svg.setAttribute("class", "rounds");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("height", BAR_HEIGHT);
    this.paths = ["plain", "drafted", "accepted"].map((name) => {
      const path = this.svg.appendChild(document.createElementNS(SVG, "path"));
      path.setAttribute("class", name);
      return path;
    });
    this.title = this.svg.appendChild(document.createElementNS(SVG, "title"));
    const legend = add(this.element, "div", "legend", "Drafted tokens:");
    for (const [name, text] of LEGEND) add(legend, "span", name, text);
  }

  show(rounds) {
    const fitting = Math.floor((this.svg.clientWidth || 300) / BAR_STEP);
    const shown = rounds.slice(-fitting);
    const full = Math.max(LEAST_SCALE, ...shown.map(([drafted]) => drafted));
    const lines = ["", "", ""];
    shown.forEach(([drafted, accepted], index) => {
      const line = (count) => `M${BAR_STEP * index + 2} ${BAR_HEIGHT}v${-(count * BAR_HEIGHT) / full}`;
      if (drafted) lines[1] += line(drafted);
      else lines[0] += `M${BAR_STEP * index + 2} ${BAR_HEIGHT}v-2`;
      if (accepted) lines[2] += line(accepted);
    });
    this.paths.forEach((path, index) => path.setAttribute("d", lines[index]));
    this.title.textContent = `Drafted and accepted tokens of the last ${shown.length} rounds`;
  }
}

function figuresOf({ sums, end }) {
  const found = [];
  if (sums?.tokens) {
    const { tokens, decoded, rounds, drafted, accepted, ms } = sums;
    found.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    if (ms) found.push(`${((1e3 * decoded) / ms).toFixed(1)} tokens/s`);
    if (drafted && rounds) {
      found.push(`${(decoded / rounds).toFixed(2)} tokens per round`);
      found.push(`${Math.round((100 * accepted) / drafted)} % of ${drafted} drafted tokens accepted`);
    }
  }
  if (end) found.push(ENDS[end]);
  return found;
}

function seconds(value) {
  return value < 60 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
}

export class Reply {
  /* `afterwards` is called when elements have changed. While the reply grows, its figures are in `live`: below the growing
  text they would move with every line. */
  constructor(parent, message, afterwards, live) {
    this.message = message;
    this.afterwards = afterwards;
    this.turn = add(parent, "article", "turn reply");
    this.turn.setAttribute("aria-label", "Reply");
    this.wait = add(this.turn, "div", "wait");
    this.waitText = add(this.wait, "span", "", "");
    this.waitBar = add(this.wait, "progress", "");
    this.waitBar.setAttribute("aria-label", "Done so far");
    this.details = add(this.turn, "details", "thoughts");
    this.summary = add(this.details, "summary", "", "Thinking…");
    this.thoughts = add(this.details, "div", "text").appendChild(new Text());
    this.markdown = new GrowingMarkdown(add(this.turn, "div", "body"), afterwards);
    this.calls = add(this.turn, "div", "calls");
    this.foot = add(message.state ? live : this.turn, "div", "foot");
    this.bars = new RoundBars(this.foot);
    this.line = add(this.foot, "div", "figures");
    this.buttons = add(this.foot, "div", "buttons");
    this.frame = 0;
    this.isFinished = false;
    this.details.hidden = true;
    if (message.state) this.grow(message);
    else this.finish(message);
  }

  /* What the reply waits for before its first piece. */
  showWait({ text, share }) {
    this.waitText.textContent = share === undefined ? text : `${text}: ${Math.round(100 * share)} %`;
    this.waitBar.hidden = share === undefined;
    if (share !== undefined) this.waitBar.value = share;
  }

  /* Show what has been added to the message. */
  grow(message) {
    this.message = message;
    const { content, reasoning = "", calls = [] } = message;
    this.wait.hidden = Boolean(content || reasoning || calls.length);
    this.details.hidden = !reasoning;
    this.thoughts.appendData(reasoning.slice(this.thoughts.length));
    if (content.length > this.markdown.text.length) this.markdown.append(content.slice(this.markdown.text.length));
    for (const call of calls.slice(this.calls.childElementCount)) this.addCall(call);
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.showFigures();
      this.afterwards();
    });
  }

  addCall({ name, arguments: given }) {
    this.markdown.flush();
    const call = add(this.calls, "details", "call");
    add(add(call, "summary", "", "Calls "), "code", "", name);
    let shown = given;
    try {
      shown = JSON.stringify(JSON.parse(given), null, 2);
    } catch {
      // arguments that are not JSON are shown as they are
    }
    add(call, "pre", "", shown).tabIndex = 0;
  }

  showFigures() {
    const { thought, state, sums, rounds = [] } = this.message;
    const taken = thought ?? (sums?.thoughtMs ?? 0) / 1e3;
    this.summary.textContent = state && thought === undefined ? `Thinking… ${seconds(taken)}` : `Thought for ${seconds(taken)}`;
    this.line.textContent = figuresOf(this.message).join(" · ");
    this.bars.element.hidden = !rounds.length && !state;
    this.bars.show(rounds);
  }

  /* The message has ended. */
  finish(message) {
    this.isFinished = true;
    this.grow(message);
    cancelAnimationFrame(this.frame);
    this.wait.hidden = true;
    this.markdown.end();
    if (message.failure) add(this.turn, "div", "failure", message.failure);
    this.turn.append(this.foot);
    this.showFigures();
    if (this.markdown.text && navigator.clipboard) addCopyButton(this.buttons, "Copy the reply", () => this.markdown.text);
  }
}
