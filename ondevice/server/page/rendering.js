/* Markdown to elements. No HTML is read: marked splits a text into tokens, and MAKERS has a function for each kind, so that nothing
else reaches the page; tags in a text are shown as text. Math and the colours of code are made by libraries that are loaded with
the first of them. */

const OPEN_BLOCKS = 2; // the next characters can join the last block to the one before it, as with the items of a list
const LABEL_MS = 2000; // for which a button says that it has copied
const BUSY_SHARE = 0.2; // of the time may go into rendering: a long block that is rendered again takes long
const LONGEST_COLOURED = 30_000; // characters of a code block
const DEEPEST = 40; // elements in each other: lists of that depth are as wide as the page
const ADDRESS = /^(https?:|mailto:)/i;
const ENTITY = /&(#\d{1,7}|#x[\da-f]{1,6}|\w{1,31});/gi;
const DISPLAYED = /^(?:\$\$([^$]+?)\$\$|\\\[([^]+?)\\\])/;
const INLINE = /^(?:\$(?![\s$])((?:\\.|[^\\$`\n])+?)(?<!\s)\$(?!\w)|\\\(([^]+?)\\\))/; // not the $5 and the $6 of a price

const libraries = {
  math: { load: () => Promise.all([loadScript("vendor/temml.js"), loadStyle("vendor/temml.css")]).then(() => globalThis.temml) },
  colours: { load: () => import("./vendor/highlight.js").then((module) => module.default) },
};

marked.use({ gfm: true, breaks: true, extensions: [
  {
    name: "displayedMath",
    level: "block",
    start: (text) => text.match(/^(\$\$|\\\[)/m)?.index,
    tokenizer: (text) => math(text, DISPLAYED, "displayedMath"),
  },
  {
    name: "math",
    level: "inline",
    start: (text) => text.match(/\$|\\[([]/)?.index,
    tokenizer: (text) => math(text, DISPLAYED, "displayedMath") ?? math(text, INLINE, "math"),
  },
] });

function math(text, pattern, type) {
  const found = text.match(pattern);
  return found ? { type, raw: found[0], text: (found[1] ?? found[2]).trim() } : undefined;
}

/* Append an element with a class name and a text to `parent`, and return it. */
export function add(parent, kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  parent.append(made);
  return made;
}

/* A button that calls `act`. */
export function addButton(parent, name, label, act) {
  const made = add(parent, "button", name, label);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

/* A button that copies the text that `read` returns when it is clicked. */
export function addCopyButton(parent, label, read) {
  let timer = 0;
  const button = addButton(parent, "copy", "Copy", async () => {
    clearTimeout(timer);
    button.textContent = await navigator.clipboard.writeText(read()).then(() => "Copied", () => "Refused");
    timer = setTimeout(() => (button.textContent = "Copy"), LABEL_MS);
  });
  button.setAttribute("aria-label", label);
}

function load(kind, fields) {
  return new Promise((resolve, reject) => {
    Object.assign(add(document.head, kind, ""), { onload: resolve, onerror: reject, ...fields });
  });
}

const loadScript = (src) => load("script", { src });
const loadStyle = (href) => load("link", { rel: "stylesheet", href });

/* Call `act` with a library, now or when it is there; never if it cannot be loaded. */
function use(library, act) {
  if (library.value) {
    act(library.value);
    return;
  }
  library.loading ??= library.load().then((value) => (library.value = value));
  library.loading.then(act, () => null);
}

let depth = 0; // of the elements that are being made

/* The elements of a Markdown text. A model that repeats itself writes thousands of quotes or lists in each other: what is too deep
for the page, or for the stack of a browser, is shown as it is written. */
function elementsOf(text) {
  const made = document.createDocumentFragment();
  try {
    makeAll(made, marked.lexer(text));
  } catch {
    made.replaceChildren();
    add(made, "div", "text", text);
  }
  for (const block of made.children) if (!block.matches("pre, .bar")) block.dir = "auto"; // code is written from left to right
  return made;
}

/* The blocks of a Markdown text; none where they are too deep. */
function blocksOf(text) {
  try {
    return marked.lexer(text);
  } catch {
    return [];
  }
}

function makeAll(parent, tokens) {
  depth += 1;
  try {
    if (depth > DEEPEST) throw new RangeError("too deep");
    for (const token of tokens) (MAKERS[token.type] ?? makeText)(parent, token);
  } finally {
    depth -= 1;
  }
}

/* A function that makes an element of a kind, with what is in the token. */
const element = (kind) => (parent, { tokens }) => makeAll(add(parent, kind, ""), tokens);

const MAKERS = {
  space: () => null,
  def: () => null,
  paragraph: element("p"),
  blockquote: element("blockquote"),
  strong: element("strong"),
  em: element("em"),
  del: element("del"),
  heading: (parent, { depth, tokens }) => makeAll(add(parent, `h${Math.min(6, depth + 1)}`, ""), tokens), // h1 is the model
  hr: (parent) => add(parent, "hr", ""),
  br: (parent) => add(parent, "br", ""),
  codespan: (parent, { text }) => add(parent, "code", "", text),
  checkbox: makeBox,
  list: makeList,
  table: makeTable,
  code: makeCode,
  link: makeLink,
  math: (parent, token) => makeMath(add(parent, "code", "math", token.text), token.text, false),
  displayedMath: (parent, token) => makeMath(add(add(parent, "span", "displayed"), "code", "math", token.text), token.text, true),
};

function makeText(parent, { tokens, type, text, block }) {
  if (tokens && type === "text") makeAll(parent, tokens);
  else if (block) add(parent, "p", "", text); // HTML
  else parent.append(type === "text" ? text.replace(ENTITY, character) : text);
}

/* The character of an entity. What is parsed is nothing but that. */
function character(entity) {
  return new DOMParser().parseFromString(entity, "text/html").body.textContent;
}

function makeBox(parent, { checked }) {
  const box = add(parent, "span", "task", checked ? "☑" : "☐");
  Object.assign(box, { role: "img", ariaLabel: checked ? "done" : "to do" });
}

function makeList(parent, { ordered, start, items }) {
  const list = add(parent, ordered ? "ol" : "ul", "");
  if (ordered && start !== 1) list.start = start;
  for (const { task, tokens } of items) makeAll(add(list, "li", task ? "with-task" : ""), tokens);
}

function makeTable(parent, { header, rows }) {
  const frame = add(parent, "div", "table");
  Object.assign(frame, { tabIndex: 0, role: "region", ariaLabel: "Table" }); // it scrolls
  const table = add(frame, "table", "");
  const addRow = (part, cells, kind) => {
    const row = add(part, "tr", "");
    for (const { tokens, align } of cells) makeAll(add(row, kind, align ?? ""), tokens);
  };
  addRow(add(table, "thead", ""), header, "th");
  const body = add(table, "tbody", "");
  for (const row of rows) addRow(body, row, "td");
}

function makeCode(parent, { text, lang }) {
  const language = lang?.match(/^[^\s{]*/)[0] ?? "";
  const bar = add(parent, "div", "bar");
  add(bar, "span", "language", language);
  if (navigator.clipboard) addCopyButton(bar, "Copy the code", () => code.textContent);
  const frame = add(parent, "pre", "");
  frame.tabIndex = 0; // it scrolls
  const code = add(frame, "code", "", `${text}\n`);
  if (!language || text.length > LONGEST_COLOURED) return;
  use(libraries.colours, (highlighter) => {
    if (!highlighter.getLanguage(language)) return;
    const coloured = highlighter.highlight(code.textContent, { language, ignoreIllegals: true }).value;
    const parsed = new DOMParser().parseFromString(`<pre>\n${coloured}</pre>`, "text/html");
    code.replaceChildren(...spansOf(parsed.body.firstChild));
  });
}

/* Copies of the texts in an element, and of its spans with their classes. Nothing else is copied. */
function spansOf(parent) {
  return [...parent.childNodes].map((node) => {
    if (node.nodeName !== "SPAN") return node.textContent;
    const span = document.createElement("span");
    span.className = node.className;
    span.append(...spansOf(node));
    return span;
  });
}

function makeLink(parent, { href, tokens }) {
  const link = add(parent, "a", "");
  if (ADDRESS.test(href)) link.href = href;
  Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  makeAll(link, tokens);
}

function makeMath(place, text, displayMode) {
  use(libraries.math, (temml) => {
    const made = document.createElement("span");
    try {
      temml.render(text, made, { displayMode, throwOnError: false, trust: false, maxExpand: 200 });
    } catch {
      return; // thousands of braces in each other
    }
    for (const named of made.querySelectorAll("[id], [href]")) { // of \label and \ref
      named.removeAttribute("id");
      named.removeAttribute("href");
    }
    if (!made.querySelector(".temml-error")) place.replaceWith(...made.childNodes);
  });
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
    const tokens = blocksOf(this.text.slice(this.settled));
    const blocks = tokens.map((token, index) => ({ token, index })).filter(({ token }) => token.type !== "space");
    const open = blocks.length > OPEN_BLOCKS ? blocks.at(-OPEN_BLOCKS).index : 0;
    const length = tokens.slice(0, open).reduce((sum, token) => sum + token.raw.length, 0);
    while (this.element.childNodes.length > this.settledNodes) this.element.lastChild.remove();
    if (length) {
      this.element.append(elementsOf(this.text.slice(this.settled, this.settled + length)));
      this.settled += length;
      this.settledNodes = this.element.childNodes.length;
    }
    this.element.append(elementsOf(this.text.slice(this.settled)));
    this.afterwards();
    const end = performance.now();
    this.restUntil = end + (end - begin) * (1 / BUSY_SHARE - 1);
  }

  /* Render the whole text: a link can refer to an address that comes later. */
  end() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
    this.element.replaceChildren(elementsOf(this.text));
  }
}
