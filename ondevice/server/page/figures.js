import { add } from "./rendering.js";

const SHOWN_ROUNDS = 120; // bars of a reply; older ones are removed

/* The figures of a reply while it grows: a bar for each round of draft and verification, and a line of numbers. A bar is
   as high as the round's draft, and filled as far as the model accepted it; a round always brings one token more. */
export class Figures {
  constructor(turn) {
    this.bars = add(turn, "div", "rounds");
    this.bars.setAttribute("role", "img");
    this.line = add(turn, "div", "figures");
    this.rounds = 0;
    this.tokens = 0;
  }

  take(round, timings) {
    this.rounds += 1;
    this.tokens += round.accepted + 1;
    const bar = add(this.bars, "i", "");
    bar.style.setProperty("--drafted", round.drafted);
    bar.style.setProperty("--accepted", round.accepted);
    bar.title = round.drafted ? `${round.accepted} of ${round.drafted} drafted tokens accepted (${round.source})` : "no draft";
    if (this.bars.childElementCount > SHOWN_ROUNDS) this.bars.firstElementChild.remove();
    this.bars.setAttribute("aria-label", `${this.tokens} tokens in ${this.rounds} rounds`);
    this.show(timings);
  }

  show(timings, remark) {
    const figures = [];
    if (timings) {
      figures.push(`${timings.predicted_n} tokens`);
      if (timings.predicted_per_second) figures.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
      if (this.rounds > 1) figures.push(`${(this.tokens / this.rounds).toFixed(1)} tokens per round`);
      if (timings.draft_n) {
        figures.push(`${Math.round((100 * timings.draft_n_accepted) / timings.draft_n)} % of ${timings.draft_n} drafted tokens accepted`);
      }
      if (timings.cache_n) figures.push(`${timings.cache_n} prompt tokens known`);
    }
    if (remark) figures.push(remark);
    this.line.textContent = figures.join(" · ");
  }
}
