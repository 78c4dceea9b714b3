/* Markdown to elements. HTML in the text is shown as text; only the tags in ALLOWED_TAGS reach the page. */

const ALLOWED_TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong",
  "table", "tbody", "td", "th", "thead", "tr", "ul", "#text",
];
const OPEN_BLOCKS = 2; // the next characters can join the last block to the one before it, as with the items of a list
const LABEL_MS = 2000; // for which a button says that it has copied
const BUSY_SHARE = 0.2; // of the time may go into rendering: a long block that is rendered again takes long
const escaped = ({ text }) => text.replace(/[&<>"]/g, (character) => `&#${character.charCodeAt(0)};`);

marked.use({ gfm: true, breaks: true, renderer: { html: escaped, image: escaped } });
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") Object.assign(node, { target: "_blank", rel: "noopener noreferrer" });
});

/* Append an element with a class name and a text to `parent`, and return it. */
export function add(parent, kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  parent.append(made);
  return made;
}

/* A button that copies the text that `read` returns when it is clicked. */
export function addCopyButton(parent, label, read) {
  const button = add(parent, "button", "copy", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  let timer = 0;
  button.addEventListener("click", async () => {
    clearTimeout(timer);
    button.textContent = await navigator.clipboard.writeText(read()).then(() => "Copied", () => "Refused");
    timer = setTimeout(() => (button.textContent = "Copy"), LABEL_MS);
  });
}

function formatted(text) {
  const options = { ALLOWED_TAGS, ALLOWED_ATTR: ["href", "start", "class"], RETURN_DOM_FRAGMENT: true };
  const made = DOMPurify.sanitize(marked.parse(text), options);
  for (const element of made.querySelectorAll("[class]")) {
    if (!element.matches("pre > code")) element.removeAttribute("class");
  }
  for (const code of made.querySelectorAll("pre > code")) {
    const language = code.className.replace("language-", "");
    code.removeAttribute("class");
    const bar = document.createElement("div");
    bar.className = "bar";
    add(bar, "span", "language", language);
    if (navigator.clipboard) addCopyButton(bar, "Copy the code", () => code.textContent);
    code.parentElement.before(bar);
  }
  return made;
}

/* Text that grows. The blocks that further text can change are rendered again: at most once per animation frame, and
less often where that takes long. */
export class GrowingMarkdown {
  constructor(element, afterwards) {
    this.element = element;
    this.afterwards = afterwards; // is called after each rendering
    this.text = "";
    this.settled = 0; // characters of the text whose elements no longer change
    this.settledNodes = 0;
    this.timer = 0;
    this.frame = 0;
    this.restUntil = 0; // time before which nothing is rendered
  }

  append(text) {
    this.text += text;
    if (this.timer || this.frame) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.frame = requestAnimationFrame(() => this.render());
    }, this.restUntil - performance.now());
  }

  /* Render what waits for its time: what is shown below must not move then. */
  flush() {
    if (!this.timer && !this.frame) return;
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
    this.timer = 0;
    this.render();
  }

  render() {
    const begin = performance.now();
    this.frame = 0;
    const tokens = marked.lexer(this.text.slice(this.settled));
    const blocks = tokens.map((token, index) => ({ token, index })).filter(({ token }) => token.type !== "space");
    const open = blocks.length > OPEN_BLOCKS ? blocks.at(-OPEN_BLOCKS).index : 0;
    const length = tokens.slice(0, open).reduce((sum, token) => sum + token.raw.length, 0);
    while (this.element.childNodes.length > this.settledNodes) this.element.lastChild.remove();
    if (length) {
      this.element.append(formatted(this.text.slice(this.settled, this.settled + length)));
      this.settled += length;
      this.settledNodes = this.element.childNodes.length;
    }
    this.element.append(formatted(this.text.slice(this.settled)));
    this.afterwards();
    const end = performance.now();
    this.restUntil = end + (end - begin) * (1 / BUSY_SHARE - 1);
  }

  /* Render the whole text: a link can refer to an address that comes later. */
  end() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
    this.element.replaceChildren(formatted(this.text));
  }
}
