/* Markdown to elements. HTML in the text is shown as text; only the tags in ALLOWED_TAGS reach the page. */

const ALLOWED_TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong",
  "table", "tbody", "td", "th", "thead", "tr", "ul", "#text",
];
const REST = 4; // times that a rendering took until the next one: a long block is rendered again as a whole
const OPEN_BLOCKS = 2; // the next characters can join the last block to the one before it, as with the items of a list
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

/* A small button with a text, and a label that says more. */
export function addButton(parent, text, label, act) {
  const button = add(parent, "button", "small", text);
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}

/* A button that copies the text that `read` returns when it is clicked. */
export function addCopyButton(parent, label, read) {
  const button = addButton(parent, "Copy", label, async () => {
    const copied = await navigator.clipboard.writeText(read()).then(() => true, () => false);
    button.textContent = copied ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
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

/* Text that grows. The blocks that further text can change are rendered again, at most once per animation frame, and so
   seldom that it takes a fifth of the time at most. */
export class GrowingMarkdown {
  constructor(element, afterwards) {
    this.element = element;
    this.afterwards = afterwards; // is called after each rendering
    this.text = "";
    this.settled = 0; // characters of the text whose elements no longer change
    this.settledNodes = 0;
    this.frame = 0;
    this.next = 0; // when it may be rendered again
  }

  append(text) {
    this.text += text;
    this.frame ||= requestAnimationFrame(() => this.wait());
  }

  wait() {
    const began = performance.now();
    if (began < this.next) {
      this.frame = requestAnimationFrame(() => this.wait());
      return;
    }
    this.frame = 0;
    this.render();
    const ended = performance.now();
    this.next = ended + REST * (ended - began);
  }

  render() {
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
  }

  /* Render the whole text: a link can refer to an address that comes later. */
  end() {
    cancelAnimationFrame(this.frame);
    this.element.replaceChildren(formatted(this.text));
  }
}
