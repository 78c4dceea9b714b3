/* Writing a message: its text, and pictures and sounds, which are read from files, pasted, dropped or recorded, made smaller where
the server would refuse them, and shown. */

import { add, addButton } from "./rendering.js";
import { record, soundOf } from "./sounds.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // what the server reads
const MOST_BYTES = 8 << 20; // of a file: a request has the files of its whole conversation, and ends at 48 MB
const MOST_PIXELS = 50e6;
const MOST_SIDE = 16384;
const SMALLER_SIDE = 4096; // of a picture that is made smaller: the model sees 2.6 million pixels at most
const QUALITY = 0.92;
const SHOWN_SIDE = 260; // pixels of a picture in the conversation
const UNSENT = "ondevice.unsent"; // the text of the message that is being written, over a reload of this tab
const LONGEST_S = Math.floor((MOST_BYTES - 100) / 32000); // of a recording

const touch = matchMedia("(hover: none) and (pointer: coarse)");
const session = store.storage("sessionStorage");
let own = null; // the attachments of the message that is being written
let recording = null; // what ends the recording that goes on
let acts = {}; // { say, send, reads, editor }

function fits(file, { width, height }) {
  const small = file.size <= MOST_BYTES && width * height <= MOST_PIXELS && Math.max(width, height) <= MOST_SIDE;
  return small && TYPES.includes(file.type);
}

/* The picture as a JPEG file, transparent pixels over white. */
async function redrawn(bitmap) {
  const scale = Math.min(1, SMALLER_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
}

/* What a message keeps of a file: { id, name, width, height } of a picture, { id, name, sound: true } of a sound. The store has
its bytes. `reads` tells what the model reads: { vision, audio }. */
async function read(file, reads) {
  const isSound = file.type.startsWith("audio/");
  if (!reads[isSound ? "audio" : "vision"]) throw new Error(`This model reads no ${isSound ? "sounds" : "pictures"}.`);
  return isSound ? readSound(file) : readPicture(file);
}

async function readSound(file) {
  const blob = await soundOf(file, MOST_BYTES).catch(() => null);
  if (!blob) throw new Error(`${file.name} is not a sound that this browser can read.`);
  return keptSound(blob, file.name);
}

/* What a message keeps of a sound. */
function keptSound(blob, name) {
  if (blob.size > MOST_BYTES) throw new Error(`${name} is longer than four minutes.`);
  return { id: store.holdFile(blob), name, sound: true };
}

async function readPicture(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) throw new Error(`${file.name} is not a picture that this browser can read.`);
  try {
    // a copy, because the file on the disk may change
    const blob = fits(file, bitmap) ? new Blob([await file.arrayBuffer()], { type: file.type }) : await redrawn(bitmap);
    return { id: store.holdFile(blob), name: file.name, width: bitmap.width, height: bitmap.height };
  } finally {
    bitmap.close();
  }
}

/* Show a file that a message keeps. Its place has its size before it is loaded. */
export function addFile(parent, { id, name, width, height, sound }) {
  const shown = add(parent, sound ? "audio" : "img", sound ? "sound" : "picture");
  shown.title = name;
  if (sound) Object.assign(shown, { controls: true, ariaLabel: name });
  else sizePicture(shown, name, width, height);
  store.fileOf(id).then((blob) => {
    if (blob) {
      shown.src = URL.createObjectURL(blob);
      if (!sound) shown.addEventListener("load", () => URL.revokeObjectURL(shown.src), { once: true });
    } else {
      const gone = document.createElement("span");
      shown.replaceWith(Object.assign(gone, { className: "gone", textContent: `${name} is not kept in this browser` }));
    }
  });
}

function sizePicture(picture, name, width, height) {
  const scale = Math.min(1, SHOWN_SIDE / Math.max(width, height));
  const [shownWidth, shownHeight] = [width, height].map((side) => Math.max(1, Math.round(side * scale)));
  Object.assign(picture, { width: shownWidth, height: shownHeight, alt: name });
}

/* The files that go with a message that is being written, as a list of thumbnails with buttons that remove them. */
export class Attachments {
  /* `report` is called with sentences for the user; `field` gets the focus where no thumbnail is left. */
  constructor(parent, field, report, files = []) {
    this.list = parent;
    this.field = field;
    this.report = report;
    this.files = [...files];
    this.show();
  }

  async attach(files, reads) {
    for (const file of files) await this.attachOne(() => read(file, reads));
  }

  /* Attach what `make` returns, or report why it throws. */
  async attachOne(make) {
    try {
      const file = await make();
      this.files.push(file);
      this.report(`${file.name} is attached.`);
    } catch (error) {
      this.report(error.message);
    }
    this.show();
  }

  remove(file) {
    const at = this.files.indexOf(file);
    this.files.splice(at, 1);
    this.show();
    this.report(`${file.name} is removed.`);
    const buttons = this.list.querySelectorAll("button");
    (buttons[Math.min(at, buttons.length - 1)] ?? this.field).focus();
  }

  /* The files; the list is empty afterwards. */
  take() {
    const files = this.files;
    this.files = [];
    this.show();
    return files;
  }

  show() {
    this.list.replaceChildren();
    this.list.hidden = !this.files.length;
    for (const file of this.files) {
      const item = add(this.list, "li", "");
      addFile(item, file);
      addButton(item, "remove", "×", () => this.remove(file)).setAttribute("aria-label", `Remove ${file.name}`);
    }
  }
}

/* Let `say` be called with sentences for the user, `send` with a text and files; `reads` tells what the model reads, { vision,
audio }, and `editor` returns the attachments of the message that is being edited, or null. */
export function setUp(given) {
  acts = given;
  own = new Attachments($("attached"), $("message"), acts.say);
  $("message").value ||= session.getItem(UNSENT) ?? "";
}

addEventListener("pagehide", () => {
  try {
    session.setItem(UNSENT, $("message").value);
  } catch {
    // no room: as a page without this
  }
});

const readsFiles = () => acts.reads().vision || acts.reads().audio;

/* Show the buttons for what the model reads. */
export function showButtons() {
  const { vision, audio } = acts.reads();
  $("attach").hidden = !readsFiles();
  $("files").accept = [vision && "image/*", audio && "audio/*"].filter(Boolean).join();
  $("record").hidden = !(audio && navigator.mediaDevices);
}

/* Whether a key belongs to an input method, which makes characters of several keys. Safari ends the composition before its Enter,
which has the code 229 then. */
export function isComposing(event) {
  return event.isComposing || event.keyCode === 229;
}

/* Let Enter submit a form. A touch keyboard has no Shift+Enter for a new line: there, only the button does. */
export function submitOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || touch.matches || isComposing(event)) return;
  event.preventDefault();
  form.requestSubmit();
}

function attach(files) {
  if (readsFiles()) (acts.editor() ?? own).attach(files, acts.reads());
  else acts.say("This model reads text only.");
}

async function startRecording() {
  $("record").disabled = true; // the browser may ask the user first
  const recorder = await record().catch(() => null);
  $("record").disabled = false;
  if (!recorder) {
    acts.say("This browser gives no microphone to this page.");
    return;
  }
  const timer = setInterval(() => {
    const seconds = Math.floor(recorder.seconds());
    $("status").textContent = `Recording: ${seconds} s`;
    if (seconds >= LONGEST_S) recording?.();
  }, 500);
  recording = async () => {
    recording = null;
    clearInterval(timer);
    $("record").setAttribute("aria-pressed", false);
    await (acts.editor() ?? own).attachOne(async () => keptSound(await recorder.end(), "recording.wav"));
  };
  $("record").setAttribute("aria-pressed", true);
  acts.say("Recording. The same button ends it.");
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if ((text || own.files.length) && acts.send(text, own.files)) {
    $("message").value = "";
    own.take();
  }
});

$("message").addEventListener("keydown", (event) => submitOnEnter(event, $("form")));
$("record").addEventListener("click", () => (recording ? recording() : startRecording()));
$("attach").addEventListener("click", () => $("files").click());

$("files").addEventListener("change", ({ target }) => {
  attach([...target.files]);
  target.value = ""; // the same file can be chosen again
});

document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length || event.clipboardData.types.includes("text/plain")) return;
  event.preventDefault();
  attach(files);
});

for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // the browser would open the file in place of the page
    document.body.classList.toggle("dropping", readsFiles() && (name === "dragenter" || name === "dragover"));
    if (name === "drop") attach([...event.dataTransfer.files]);
  });
}
