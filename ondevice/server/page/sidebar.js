/* The list of conversations: search, rename, export, import, delete, and a dot where a reply is being written. */

import { isComposing } from "./composer.js";
import { found, isWriting, titleOf } from "./conversation.js";
import { add, addButton } from "./rendering.js";
import * as replies from "./replies.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
export const narrow = matchMedia("(max-width: 50rem)");

let openId = "";
let shape = ""; // what was shown last
let renaming = ""; // id of the conversation whose name is being edited
let nameField = null; // what has the edited name: it stays while the list changes around it
let acts = {}; // { open, say }

/* Let `open` be called with the id of a conversation, "" for a new one, and `say` with sentences. */
export function setUp(given) {
  acts = given;
  showSide(!narrow.matches);
}

/* Show the list, in which one conversation is open. The focus stays where it is. */
export function show(id = openId) {
  openId = id;
  const search = $("search").value.trim();
  const all = store.conversations();
  const listed = all
    .map((each) => ({ id: each.id, title: titleOf(each), isWriting: isWriting(each), excerpt: search ? found(each, search) : "" }))
    .filter(({ excerpt }) => excerpt !== null);
  const newShape = JSON.stringify([listed, openId, renaming, search]);
  if (newShape === shape) return;
  shape = newShape;
  const isTyping = document.activeElement === nameField;
  const focused = document.activeElement?.closest("#list li")?.dataset.id;
  $("list").replaceChildren();
  for (const each of listed) addItem(each);
  $("search").hidden = !all.length;
  $("none-found").hidden = listed.length > 0 || !all.length;
  if (isTyping) nameField?.focus({ preventScroll: true });
  else if (focused && !renaming) nameOf(focused)?.focus({ preventScroll: true });
}

const nameOf = (id) => $("list").querySelector(`[data-id="${CSS.escape(id)}"] .name`);

function addItem(each) {
  const item = add($("list"), "li", each.id === openId ? "open" : "");
  item.dataset.id = each.id;
  if (renaming === each.id) {
    item.append(nameField);
    return;
  }
  const name = addButton(item, "name", each.title, () => acts.open(each.id));
  name.dir = "auto"; // what does not fit is cut at its end
  if (each.isWriting) add(add(name, "span", "dot"), "span", "unseen", " (writing)");
  if (each.excerpt) add(name, "span", "excerpt", each.excerpt);
  if (each.id !== openId) return;
  name.setAttribute("aria-current", "true");
  const buttons = add(item, "div", "buttons");
  addButton(buttons, "", "Rename", () => rename(each));
  addButton(buttons, "", "Export", () => store.exportAs(each.title, each));
  addButton(buttons, "", "Delete", () => remove(each));
}

function rename(each) {
  renaming = each.id;
  nameField = makeNameField(each);
  show();
  nameField.select();
}

function makeNameField({ id, title }) {
  const field = document.createElement("input");
  field.value = title;
  field.setAttribute("aria-label", "Name of the conversation");
  const end = () => {
    renaming = "";
    nameField = null;
    show();
    nameOf(id)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (isComposing(event)) return;
    if (event.key === "Escape") {
      event.stopPropagation();
      end();
    }
    if (event.key !== "Enter") return;
    store.change(id, (conversation) => (conversation.title = field.value.trim()));
    end();
  });
  return field;
}

function remove({ id, title }) {
  if (!confirm(`Delete “${title}”?`)) return;
  replies.forget(id);
  store.remove(id);
  acts.open("");
  acts.say(store.isFull() ? store.NO_ROOM : `“${title}” is deleted.`);
}

export function showSide(is) {
  document.body.classList.toggle("side", is);
  $("menu").setAttribute("aria-expanded", is);
}

async function importFiles(files) {
  const ids = (await Promise.all(files.map((file) => store.importFile(file).catch(() => null)))).filter(Boolean);
  if (ids.length) acts.open(ids[0]);
  const said = ids.length === files.length ? "Imported." : "A file has no conversation of this page.";
  acts.say(ids.length && store.isFull() ? store.NO_ROOM : said);
}

$("search").addEventListener("input", () => show());
$("search").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !$("search").value) return;
  event.stopPropagation();
  $("search").value = "";
  show();
});
$("import").addEventListener("click", () => $("imported").click());
$("imported").addEventListener("change", ({ target }) => {
  importFiles([...target.files]);
  target.value = "";
});
$("menu").addEventListener("click", () => {
  showSide(!document.body.classList.contains("side"));
  if (narrow.matches) $("new").focus(); // the list covers what comes behind the button
});
$("shade").addEventListener("click", () => showSide(false));
narrow.addEventListener("change", () => showSide(!narrow.matches));
